"""Kronecker layers that keep the states between their passes for their gradients: passes forward and back that agree
about these states, as they are found together.

Otherwise the way back makes the states once more (visits.py), which is a fifth of what it takes. What is kept is less
than PyTorch's own operations would: a state for each term between two passes, not between two contractions.
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
from factorlayer.plan.plan import PlanError
from factorlayer.plan.visits import apart_us, back_by_visits, ordered, ways_to_visit
from factorlayer.plan.works import least_us, tile_all

WORTH = 0.97  # of the time without: memory for the states has to be worth that


class Kept(NamedTuple):
    modes: tuple[Mode, ...]  # of which some are several factors taken as one
    parts: list[list[int]]  # of these, that each pass contracts
    forward: tuple[Pass, ...]
    back: tuple[Pass, ...]
    features: tuple[int, ...]  # of each state, all its terms


def features_of(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[int, ...]:
    """The features of the states that are kept between passes of a layer that is trained; none where it keeps none."""
    found = _worth_it(replace(chain, bias=False), dtype, batch, gpu) if chain.may_keep else None
    return found.features if found else ()


def passes_of(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes of a layer that keeps states, or of all its gradients. Raises PlanError if the text names others."""
    found = _worth_it(replace(chain, kept=(), backward=False, bias=False), dtype, batch, gpu)
    if found is None or found.features != chain.kept:
        raise PlanError(f"{chain.text!r} keeps {found.features if found else 'no'} states between its passes")
    return found.back if chain.backward else forward_of(chain, found, dtype, batch, gpu)


def forward_of(chain: Chain, found: Kept, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes of a layer that may have a bias, which the one that was found has not."""
    return _forward(replace(chain, kept=()), dtype, found.modes, found.parts, batch, gpu)


@functools.lru_cache(256)
def _worth_it(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Kept | None:
    """The fastest way to keep states, or None where training is not predicted to take less by it."""
    try:
        ahead = forward(chain, dtype, batch, gpu)
    except PlanError:
        return None
    try:
        apart = *ahead, *all_gradients(replace(chain, backward=True), dtype, batch, gpu)
    except PlanError:  # several calls are faster than the visits that make states once more
        return fastest(chain, dtype, batch, gpu, WORTH * (sum_us(ahead) + apart_us(chain, dtype, batch, gpu)))
    found = fastest(chain, dtype, batch, gpu, WORTH * sum_us(apart))
    is_worth_it = found and class_us((*found.forward, *found.back), batch) < WORTH * class_us(apart, batch)
    return found if is_worth_it else None


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
    """The passes of a layer that contracts modes by these parts; none if they would take `most` microseconds."""
    works = works_of(chain, dtype, modes, [list(part) for part in parts])
    return tile_all(works, batch, gpu, [least_us(work, batch, gpu) for work in works], most) or ()
