"""The plan of one chain: a layer forward, or what a backward pass asks for."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.monarch import monarch, monarch_mapped, monarch_through
from factorlayer.kernels.monarch.monarch import Monarch
from factorlayer.kernels.monarch.monarch_mapped import MonarchMapped
from factorlayer.kernels.monarch.monarch_through import MonarchThrough
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import mapped, streamed
from factorlayer.kernels.product.few import Few
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.stack import dense_streamed
from factorlayer.maths.chain import Chain
from factorlayer.plan import gradients
from factorlayer.plan.cuts import cuts
from factorlayer.plan.plan import BATCHES, PASS_WEIGHT, Plan, PlanError
from factorlayer.plan.products import one_by_one
from factorlayer.plan.works import least_us, tile_all

AT_ONCE = 1.2  # what both contractions of a Monarch layer in one pass have to win by
BY_ROWS = 1.3  # of a dense layer as a stack of one, beside passes that move whole 16 bytes


@functools.lru_cache(256)
def plan(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan:
    return Plan(chain, dtype, batch, gpu, with_halves(_passes(chain, dtype, batch, gpu)))


def _passes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if chain.gradient:
        return gradients.of_weight(chain, dtype, batch, gpu)
    if chain.sums:
        return gradients.sums(chain, dtype, batch, gpu)
    if chain.slope or chain.through:
        return (gradients.slopes(chain, dtype, batch, gpu),)
    if chain.backward:
        return gradients.all_gradients(chain, dtype, batch, gpu)
    if chain.slabs:
        return (_by_slabs(chain, dtype, batch, gpu),)
    if chain.turn and not (chain.contractions and streamed.y_turned(chain)):
        return _turned(chain, chain.turn, dtype, batch, gpu)
    return _forward(chain, dtype, batch, gpu)


def _by_slabs(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Mapped:
    """One contraction that makes a state which lies by slabs."""
    (product,) = streamed.products(chain, dtype)
    by_maps = mapped.tile(product, batch, gpu)
    if by_maps is None:
        raise PlanError(f"no pass makes {chain.text!r}")
    return by_maps


def _turned(chain: Chain, turn: tuple[int, int, int], dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A turn by itself, behind contractions if there are any, none of which can store its y so."""
    first = plan(replace(chain, turn=None), dtype, batch, gpu).passes if chain.contractions else ()
    mixed = chain.mixed[1:] if chain.mixed else None
    if mixed and (chain.contractions or math.prod(mixed) != turn[1]):
        raise PlanError(f"{chain.text!r} turns other rows than it mixes")
    return *first, Turn(*turn, dtype, batch, gpu, mixed)


def _forward(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The fastest of cuts into passes, contractions one by one, both of a Monarch layer at once, and a stack of one."""
    best: Plan | None = None
    for works in cuts(chain, dtype):
        if best is not None and PASS_WEIGHT ** (len(works) - 1) * least_us(works, batch, gpu) > best.weight:
            continue
        tiled = tile_all(works, batch, gpu)
        if tiled is None:
            continue
        found = Plan(chain, dtype, batch, gpu, tiled)
        if best is None or found.weight < best.weight:
            best = found
    if best is None or (chain.rank > 1 and len(best.passes) > 1):
        alone = Plan(chain, dtype, batch, gpu, one_by_one(chain, dtype, batch, gpu))
        best = min(alone, best or alone, key=lambda found: found.weight)
    at_once = None if isinstance(best.passes[0], Few) else _at_once(chain, dtype, batch, gpu)
    if at_once and AT_ONCE * at_once.us < best.us:
        return (at_once,)
    by_rows = _by_rows(chain, dtype, batch, gpu)
    return (by_rows if by_rows and by_rows.us * _margin(chain, dtype) < best.us else best).passes


def _at_once(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Monarch | MonarchMapped | MonarchThrough | None:
    """Both contractions of a Monarch layer."""
    tiled = [family.tile(chain, dtype, batch, gpu) for family in (monarch_mapped, monarch_through, monarch)]
    return min((plan for plan in tiled if plan), key=lambda plan: plan.us, default=None)


def _by_rows(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan | None:
    """A dense layer by the pass that takes stacks of them, its weight streamed, unless there are few samples."""
    if not chain.is_dense or chain.turn or chain.x_turned or batch <= BATCHES[0]:
        return None
    found = dense_streamed.tile((chain,), dtype, batch, gpu)
    return Plan(chain, dtype, batch, gpu, found.passes) if found else None


def _margin(chain: Chain, dtype: str) -> float:
    """What such a pass has to win by: nothing where 16 bytes do not divide a row, which others move by elements."""
    (c,) = chain.contractions
    return BY_ROWS if all(n * ELEMENT_BYTES[dtype] % 16 == 0 for n in (c.p, c.q)) else 1.0
