"""Families that make all gradients at one visit, a record each: the planner asks all of a kind, and takes the fastest.

The first of equals wins, so their order is part of what a plan is. Families of forward passes, and of gradients one by
one, are still asked by planner.py itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from factorlayer.kernels.kronecker import (
    cluster_backward,
    columns_backward,
    double_backward,
    eights_backward,
    large_backward,
    mixed_backward,
    pair_backward,
    scaled_backward,
    small_backward,
    split_pair_backward,
    split_single_backward,
    strip_backward,
    triple,
    unit_backward,
)
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import single_backward


@dataclass(frozen=True)
class Family:
    """`tile` has the pass, or passes in order, that are predicted to be the fastest, or nothing."""

    name: str
    about: str
    tile: Callable[..., Pass | tuple[Pass, ...] | None]

    def way(self, *asked: Any) -> tuple[Pass, ...]:
        """Its passes, with those that add up their sums; none where it has no kernel."""
        found = self.tile(*asked) or ()
        passes = found if isinstance(found, tuple) else (found,)
        return (*passes, *passes[-1].finishing) if passes else ()


# Both gradients of one tied contraction: tile(contraction, dtype, batch, gpu)
OF_ONE_FACTOR = (
    Family("single backward", "one factor, on any GPU", single_backward.tile),
    Family("split single backward", "one factor of 32 bits, up to 128 x 128", split_single_backward.tile),
)
# All gradients of a Kronecker product of rank 1: tile(modes, outer, dtype, batch, gpu)
OF_FACTORS = (
    Family("pair backward", "two factors, on any GPU", pair_backward.tile),
    Family("large backward", "two large factors of 16 bits", large_backward.tile),
    Family("scaled backward", "two large factors in tf32", scaled_backward.tile),
    Family("unit backward", "two factors of 16 bits, up to 64 x 64", unit_backward.tile),
    Family("mixed backward", "a small factor and two of up to 64 x 64 in 16 bits", mixed_backward.tile),
    Family("split pair backward", "two factors of 32 bits, up to 64 x 64", split_pair_backward.tile),
    Family("strip backward", "two factors, where samples are few", strip_backward.tile),
    Family("eights backward", "five factors of 8 x 8 in float", eights_backward.tile),
    Family("small backward", "four or five small square factors in float", small_backward.tile),
    Family("columns backward", "three or four small factors in double", columns_backward.tile),
    Family("double backward", "two large factors in double", double_backward.tile),
    Family("triple backward", "three large factors", triple.tile_backward),
    Family("cluster backward", "two factors, where a cluster takes all samples", cluster_backward.tile),
)


def ways(families: tuple[Family, ...], *asked: Any) -> Iterator[tuple[Pass, ...]]:
    """Of each family that has a kernel."""
    yield from (way for family in families if (way := family.way(*asked)))
