"""The passes of a layer forward: the fastest of all ways to cut it, of contractions one by one, and of all at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import FEW
from factorlayer.kernels.passes import Pass, class_us
from factorlayer.kernels.product.streamed import products
from factorlayer.maths.chain import Chain
from factorlayer.plan import whole
from factorlayer.plan.cuts import cuts
from factorlayer.plan.plan import PASS_US, PASS_WEIGHT, Plan, PlanError
from factorlayer.plan.products import one_by_one
from factorlayer.plan.registry import family_of
from factorlayer.plan.registry.family import Offer, fastest, offers
from factorlayer.plan.registry.monarch import OF_MONARCH
from factorlayer.plan.registry.product import OF_FEW_DENSE, OF_SCALED_PRODUCT
from factorlayer.plan.registry.stack import OF_DENSE_LAYER
from factorlayer.plan.works import least_us, tile_all


@functools.lru_cache(1024)
def forward(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The fastest passes of a layer among five ways: cut into passes, contraction by contraction, both contractions of
    a Monarch layer at once, all of them as one dense layer, and the layer as a stack of one."""
    best, weight = None, math.inf
    ways = [(works, [least_us(work, batch, gpu) for work in works]) for works in cuts(chain, dtype)]
    for works, least in sorted(ways, key=lambda way: _with_passes(sum(way[1]), len(way[0]))):
        if _with_passes(sum(least), len(works)) > weight:
            break
        tiled = tile_all(works, batch, gpu, least, _without_passes(weight, len(works)))
        if tiled is None:
            continue
        found = Plan(chain, dtype, batch, gpu, tiled)
        if (own := _weight(found)) < weight:
            best, weight = found, own
    if best is None or (chain.rank > 1 and len(best.passes) > 1):
        best = _one_by_one(chain, dtype, batch, gpu, best)
    if chain.inputs or chain.slope:
        return best.passes
    of_class = functools.partial(class_us, batch=batch)
    at_once = [(offer.us, offer.passes) for offer in _at_once(chain, dtype, batch, gpu)]
    apart = min([(of_class(best.passes), best.passes), *at_once], key=lambda way: way[0])[1]
    if batch <= FEW or not whole.takes(chain, dtype):
        return apart
    product = dense(whole.dense(chain), dtype, batch, gpu)
    together = whole.forward(chain, product, dtype, gpu) if product else ()
    if not together:
        return apart
    margin = family_of(apart[-1]).margin.of(chain, dtype, batch, gpu) if apart is not best.passes else 1.0
    of_whole = whole.family(chain).margin.of(chain, dtype, batch, gpu)
    return together if of_whole * of_class(together) < margin * of_class(apart) else apart


def _one_by_one(chain: Chain, dtype: str, batch: int, gpu: Gpu, other: Plan | None) -> Plan:
    """The plan that takes contractions one by one, or the `other` plan, if that is better or no pass goes back through
    the activation behind the last contraction."""
    try:
        alone = Plan(chain, dtype, batch, gpu, one_by_one(chain, dtype, batch, gpu))
    except PlanError:
        if other is None:
            raise
        return other
    return min(alone, other or alone, key=_weight)


def _weight(plan: Plan) -> float:
    """The number that plans are compared by: the lower, the better."""
    return _with_passes(class_us(plan.passes, plan.batch), len(plan.passes))


def _with_passes(us: float, passes: int) -> float:
    """The weight of passes that take `us` microseconds: every pass but the first has to be worth its kernel and the
    memory between."""
    return us * PASS_WEIGHT ** (passes - 1) + PASS_US * (passes - 1)


def _without_passes(weight: float, passes: int) -> float:
    """The microseconds that so many passes may take for that weight."""
    return (weight - PASS_US * (passes - 1)) / PASS_WEIGHT ** (passes - 1)


def dense(layer: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The fastest passes of a dense layer whose weight is multiplied out. There are none where the weight has to be
    scaled and no kernel scales it back."""
    if dtype != whole.SCALED:
        return forward(layer, dtype, batch, gpu)
    ways = [fastest(OF_SCALED_PRODUCT, *products(layer, dtype), batch, gpu)]
    ways += [fastest(OF_DENSE_LAYER, (layer,), dtype, batch, gpu)]
    return min(filter(None, ways), key=functools.partial(class_us, batch=batch), default=())


def _at_once(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[Offer]:
    """The fastest pass that takes both contractions of a Monarch layer; and the fastest for a dense layer: a family for
    few samples, or a stack of one for more."""
    yield from _first(offers(OF_MONARCH, chain, dtype, batch, gpu))
    if chain.is_dense and not chain.turn and not chain.x_turned:
        if batch > FEW:
            yield from _first(offers(OF_DENSE_LAYER, (chain,), dtype, batch, gpu))
        else:
            yield from _first(offers(OF_FEW_DENSE, *products(chain, dtype), batch, gpu, first=True, last=True))


def _first(offers: Iterator[Offer]) -> list[Offer]:
    return sorted(offers, key=lambda offer: offer.us)[:1]
