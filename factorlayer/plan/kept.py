"""Layers that keep the states between their passes for their gradients, which would make them once more otherwise.

Of a Kronecker product the passes forward and back are found together, so that they agree about these states; what
visits.py makes again is a fifth of the way back. What is kept is less than PyTorch's own operations would: a state for
each term between two passes, not between two contractions. An activation's slopes are made of the last of these
states, by the last pass once more. Of a Monarch layer the state between its contractions is kept, as the second one
reads it, and its gradient as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass, class_us, sum_us
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.plan.cuts import works_of
from factorlayer.plan.forward import forward
from factorlayer.plan.gradients import all_gradients
from factorlayer.plan.plan import KEPT_WORTH, PlanError
from factorlayer.plan.products import of_each
from factorlayer.plan.visits import apart_us, back_by_visits, ordered, ways_to_visit
from factorlayer.plan.works import least_us, tile_all


class Kept(NamedTuple):
    modes: tuple[Mode, ...]  # of which some are several factors taken as one
    parts: list[list[int]]  # of these, that each pass contracts
    forward: tuple[Pass, ...]
    back: tuple[Pass, ...]
    features: tuple[int, ...]  # of each state, all its terms


def features_of(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[int, ...]:
    """The features of the states that a layer may keep between passes if it is trained; none where it keeps none."""
    if not chain.may_keep:
        return ()
    first = chain.contractions[0]
    if not first.tied:
        return (first.outer * first.q,) if chain.is_monarch else ()
    found = _worth_it(replace(chain, bias=False), dtype, batch, gpu)
    return found.features if found else ()


def passes_of(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[tuple[Pass, ...], tuple[int, ...]]:
    """The passes of a layer that keeps states, and which of those that they hand on; or the passes of all its
    gradients, or of its slope. Raises PlanError if the text names others."""
    layer = replace(chain, kept=(), backward=False)
    if layer.contractions[0].tied:
        found = fastest(_contractions(layer), dtype, batch, gpu)
        states = found.features if found else ()
    else:
        found, states = None, features_of(layer, dtype, batch, gpu)
    if chain.kept != states:
        raise PlanError(f"{chain.text!r} names other states than those between its passes")
    if found is None:
        first, second = of_each(layer, dtype, batch, gpu)
        return (*first, *second), (len(first) - 1,)
    if chain.backward:
        return found.back, ()
    passes = forward_of(layer, found, dtype, batch, gpu)
    if not passes:
        raise PlanError(f"there are no passes for {chain.text!r}")
    return passes, () if chain.slope else tuple(range(len(chain.kept)))


def forward_of(chain: Chain, found: Kept, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes of a layer that may have a bias and an activation, which the one that was found has not; of a slope,
    the one that makes it of the last state, if there is one."""
    return _forward(chain, dtype, found.modes, found.parts, batch, gpu)


def _contractions(chain: Chain) -> Chain:
    return Chain(chain.contractions, chain.rank, tf32=chain.tf32)


@functools.lru_cache(256)
def _worth_it(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Kept | None:
    """The fastest way to keep states, or None where training is not predicted to take less by it. With an activation it
    may still take more: here its slope takes nothing where states are kept, and the whole layer where they are not."""
    alone = _contractions(chain)
    try:
        ahead = forward(chain, dtype, batch, gpu) * (1 if chain.activation == "identity" else 2)
    except PlanError:
        return None
    try:
        apart = *ahead, *all_gradients(replace(alone, backward=True), dtype, batch, gpu)
    except PlanError:  # several calls are faster than the visits that make states once more
        return fastest(alone, dtype, batch, gpu, KEPT_WORTH * (sum_us(ahead) + apart_us(alone, dtype, batch, gpu)))
    found = fastest(alone, dtype, batch, gpu, KEPT_WORTH * sum_us(apart))
    is_worth_it = found and class_us((*found.forward, *found.back), batch) < KEPT_WORTH * class_us(apart, batch)
    return found if is_worth_it else None


@functools.lru_cache(256)
def fastest(chain: Chain, dtype: str, batch: int, gpu: Gpu, most: float = math.inf) -> Kept | None:
    """The way to keep states that is predicted to take the least time, if that is less than `most` microseconds."""
    found = None
    for way in ways_to_visit(chain, dtype, batch, gpu):
        if sum(way.least) >= most:
            break
        states, parts = len(way.works) - 1, ordered(way.modes, way.runs)
        ahead = _forward(chain, dtype, way.modes, parts, batch, gpu, most - sum(way.least[states:])) if states else ()
        if not ahead:
            continue
        names = [f"@{len(chain.contractions) + 2 + i}" for i in range(states)]  # behind grad_y and gradients of weights
        back = back_by_visits(chain, way, names, batch, gpu, most - sum_us(ahead))
        if back and sum_us((*ahead, *back)) < most:
            most = sum_us((*ahead, *back))
            found = Kept(way.modes, parts, ahead, back, tuple(map(_features, way.works[:-1])))
    return found


def _features(work: Work) -> int:
    """Of the state that a work makes, all its terms."""
    return work.terms * work.outer * math.prod(work.states[-1]) * work.inner


def _forward(
    chain: Chain,
    dtype: str,
    modes: tuple[Mode, ...],
    parts: Sequence[Sequence[int]],
    batch: int,
    gpu: Gpu,
    most: float = math.inf,
) -> tuple[Pass, ...]:
    """The passes of a layer that contracts modes by these parts, of a slope the last one; none if one has no tiling or
    they would take `most` microseconds."""
    works = works_of(chain, dtype, modes, [list(part) for part in parts])
    works = works[-1:] if chain.slope else works
    return tile_all(works, batch, gpu, [least_us(work, batch, gpu) for work in works], most) or ()
