"""The plan of one chain: a layer forward, or what a backward pass asks for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product.streamed import products, y_turned
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.plan import gradients, registry
from factorlayer.plan.cuts import cuts
from factorlayer.plan.plan import BATCHES, PASS_WEIGHT, Plan, PlanError
from factorlayer.plan.products import one_by_one
from factorlayer.plan.works import least_us, tile_all


@functools.lru_cache(256)
def plan(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan:
    return Plan(chain, dtype, batch, gpu, with_halves(_passes(chain, dtype, batch, gpu)))


def _passes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if chain.gradient:
        return gradients.of_weight(chain, dtype, batch, gpu)
    if chain.sums:
        return gradients.sums(chain, dtype, batch, gpu)
    if chain.slope or chain.through:
        return gradients.slopes(chain, dtype, batch, gpu)
    if chain.backward:
        return gradients.all_gradients(chain, dtype, batch, gpu)
    if chain.slabs:
        return _by_slabs(chain, dtype, batch, gpu)
    if chain.turn and not (chain.contractions and y_turned(chain)):
        return _turned(chain, chain.turn, dtype, batch, gpu)
    return _forward(chain, dtype, batch, gpu)


def _by_slabs(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """One contraction that makes a state which lies by slabs."""
    (product,) = products(chain, dtype)
    found = registry.fastest(registry.OF_SLABS, product, batch, gpu)
    if not found:
        raise PlanError(f"no pass makes {chain.text!r}")
    return found


def _turned(chain: Chain, turn: tuple[int, int, int], dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A turn by itself, behind contractions if there are any, none of which can store its y so."""
    first = plan(replace(chain, turn=None), dtype, batch, gpu).passes if chain.contractions else ()
    mixed = chain.mixed[1:] if chain.mixed else None
    if mixed and (chain.contractions or math.prod(mixed) != turn[1]):
        raise PlanError(f"{chain.text!r} turns other rows than it mixes")
    return *first, *registry.fastest(registry.OF_TURN, *turn, dtype, batch, gpu, mixed=mixed)


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
    return next((offer.passes for offer in _at_once(chain, dtype, batch, gpu, best) if offer.us < best.us), best.passes)


def _at_once(chain: Chain, dtype: str, batch: int, gpu: Gpu, best: Plan) -> Iterator[registry.Offer]:
    """The fastest of those that take both contractions of a Monarch layer, unless few samples have a family by itself,
    and of those that take a dense layer as a stack of one, unless samples are few."""
    if not registry.family_of(best.passes[0]).alone:
        yield from _first(registry.offers(registry.OF_MONARCH, chain, dtype, batch, gpu))
    if chain.is_dense and not chain.turn and not chain.x_turned and batch > BATCHES[0]:
        yield from _first(registry.offers(registry.OF_DENSE_LAYER, (chain,), dtype, batch, gpu))


def _first(offers: Iterator[registry.Offer]) -> list[registry.Offer]:
    return sorted(offers, key=lambda offer: offer.us)[:1]
