"""Passes that make gradients: of one weight, of all weights at one visit, of a bias, and back through an activation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from factorlayer.activations.results import from_result
from factorlayer.device.gpu import Gpu
from factorlayer.kernels import gradient
from factorlayer.kernels.gradient import REDUCTION_US, Gradient
from factorlayer.kernels.monarch import monarch_backward, slab_backward, untied_backward
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import few, streamed, wide, wide_gradient
from factorlayer.kernels.product.column_sums import ColumnSums
from factorlayer.kernels.product.slopes import Slopes
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan import registry
from factorlayer.plan.cuts import around, modes_of
from factorlayer.plan.plan import BATCHES, PlanError
from factorlayer.plan.products import one_by_one

FLOAT_GRADIENT = 2  # times what a gradient of many floats is predicted to take where warps multiply


def of_weight(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The gradient of the weight of one contraction, and maybe that of a bias behind it."""
    (c,) = chain.contractions
    c = replace(c, outer=c.outer * c.inner, inner=1) if chain.x_turned else c
    if chain.bias:
        both = wide_gradient.tile(c, dtype, batch, gpu, True)
        if both is None:
            raise PlanError(f"no pass makes both gradients of {chain.text!r} at once")
        return _with_reduction(both)
    return _in_order(chain, c, dtype, batch, gpu) if chain.mixed else _gradient(c, dtype, batch, gpu)


def sums(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """Over samples, of what is given: the gradient of a bias."""
    return _with_reduction(ColumnSums(chain.sums, dtype, batch, gpu))


def slopes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Slopes | Wide:
    if chain.through and from_result(chain.activation) is None:
        raise PlanError(f"the slope of {chain.activation!r} cannot be told from its result")
    if not chain.contractions:
        return Slopes(chain.slope or chain.through, chain.activation, dtype, batch, gpu, chain.through > 0)
    product, *further = streamed.products(chain, dtype)
    takes = not further and chain.rank == 1 and not chain.parameters
    found = wide.tile(product, batch, gpu) if takes else None
    if found is None:
        raise PlanError(f"no pass makes the product and the slopes of {chain.text!r} at once")
    return found


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if chain.bias:  # by the kernel that is the fastest without it, if it can
        (first, *_) = all_gradients(replace(chain, bias=False), dtype, batch, gpu)
        with_bias = first.with_bias()
        if with_bias is None:
            raise PlanError(f"no pass makes all gradients of {chain.text!r}, the bias's among them")
        return (with_bias,)
    found = list(_ways_back(chain, dtype, batch, gpu))
    if not found:
        raise PlanError(f"no pass makes all gradients of {chain.text!r} at once")
    return min(found, key=lambda passes: sum(p.us for p in passes))


def _ways_back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[tuple[Pass, ...]]:
    first, *more = chain.contractions
    if first.tied and not more:
        yield from registry.ways(registry.OF_ONE_FACTOR, first, dtype, batch, gpu)
    elif chain.slabs:
        if (by_slabs := slab_backward.tile(chain, dtype, batch, gpu)) and _is_worth_it(chain, dtype, gpu):
            yield by_slabs, *by_slabs.finishing
    elif not more and (visit := untied_backward.tile(chain, dtype, batch, gpu)):
        if _is_worth_it(chain, dtype, gpu):
            yield visit, *visit.finishing
    elif chain.x_turned:
        return
    elif passes := monarch_backward.all_gradients(chain, dtype, batch, gpu):
        yield passes
    elif few_passes := few.all_gradients(chain, dtype, batch, gpu):
        yield few_passes
    elif chain.rank == 1 and all(c.tied for c in chain.contractions):
        outer, inner = around(chain)
        if inner > 1:
            return
        yield from registry.ways(registry.OF_FACTORS, modes_of(chain), outer, dtype, batch, gpu)


@functools.lru_cache(256)
def _is_worth_it(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether both gradients at one visit are predicted to be faster than one by one, for many samples: what has a
    kernel for these has one for fewer as well."""
    batch = BATCHES[-1]
    family = slab_backward if chain.slabs else untied_backward
    visit = family.tile(chain, dtype, batch, gpu)
    (c,) = chain.contractions
    grouped = replace(c, outer=c.outer * c.inner, inner=1)
    back = Chain((replace(c, p=c.q, q=c.p),), x_turned=chain.x_turned, turn=chain.turn)
    apart = (*_gradient(grouped, dtype, batch, gpu), *one_by_one(back, dtype, batch, gpu))
    return visit is not None and visit.us + REDUCTION_US < sum(p.us for p in apart)


def _gradient(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    tiled = [family.tile(contraction, dtype, batch, gpu) for family in (gradient, wide_gradient)]
    ways = [_with_reduction(p) for p in tiled if p]
    if not ways:
        raise PlanError(f"no pass makes the gradient of {contraction}: it has too many groups")
    weight = FLOAT_GRADIENT if dtype == "float32" and batch > 64 else 1
    return min(ways, key=lambda passes: sum(p.us for p in passes) * (weight if isinstance(passes[0], Gradient) else 1))


def _in_order(chain: Chain, c: Contraction, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """Of q's that come in another order: one family takes them so, and is asked whatever the number of samples."""
    summing = wide_gradient.tile(c, dtype, batch, gpu)
    if summing is None or not chain.mixed or math.prod(chain.mixed[1:]) != c.q or c.inner > 1:
        raise PlanError(f"no pass makes {chain.text!r}")
    return _with_reduction(replace(summing, mixed=chain.mixed[1:]))


def _with_reduction(summing: ColumnSums | Gradient | WideGradient) -> tuple[Pass, ...]:
    return summing, *summing.finishing
