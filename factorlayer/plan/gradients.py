"""Passes that make gradients: of one weight, of all weights at one visit, of a bias, and back through an activation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from factorlayer.activations.results import from_result
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES, FEW, OF_FEW, SOME, stands_for
from factorlayer.kernels.gradient import REDUCTION_US
from factorlayer.kernels.passes import Pass, class_us, sum_us
from factorlayer.kernels.product.streamed import products
from factorlayer.kernels.work import inputs_of
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan import whole
from factorlayer.plan.cuts import around, modes_of
from factorlayer.plan.forward import dense, forward
from factorlayer.plan.plan import PlanError
from factorlayer.plan.products import one_by_one
from factorlayer.plan.registry.family import Family, fastest, ways
from factorlayer.plan.registry.kronecker import OF_FACTORS, OF_ONE_FACTOR
from factorlayer.plan.registry.monarch import MONARCH_PAIRS, OF_ONE_UNTIED, OF_ONE_UNTIED_BY_SLABS, OF_TWO_UNTIED
from factorlayer.plan.registry.product import (
    OF_COLUMNS,
    OF_PRODUCT_AND_SLOPES,
    OF_TURN,
    OF_WEIGHT,
    OF_WEIGHT_AND_BIAS,
    OF_WEIGHT_IN_ORDER,
    WHOLE_MONARCH,
)
from factorlayer.plan.visits import apart_us, are_worth_it, visits

# Numbers of samples that two ways of all gradients are compared for, where one has to be taken for all, and how much
# the ratio of their times counts: what few samples lose by it are microseconds. Of 225 drawn Monarch layers the way
# taken is predicted to take 1.02 and 1.002 of the faster one's time with up to 2048 samples and with more, where all
# count alike 1.01 and 1.03, twice as long at worst
COUNTS = {128: 0.5, SOME: 1, BATCHES[-1]: 2}


def of_weight(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The gradient of the weight of one contraction, and maybe that of a bias behind it."""
    (c,) = chain.contractions
    c = replace(c, outer=c.outer * c.inner, inner=1) if chain.x_turned else c
    if chain.bias:
        both = fastest(OF_WEIGHT_AND_BIAS, c, dtype, batch, gpu, bias=True)
        if not both:
            raise PlanError(f"no pass makes both gradients of {chain.text!r} at once")
        return both
    if not chain.mixed:
        return _gradient(c, dtype, batch, gpu)
    if not (found := _in_order(c, chain.mixed, dtype, batch, gpu)):
        raise PlanError(f"no pass makes {chain.text!r}")
    return found


def behind(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes that go back through an activation, by themselves or with the product that makes what is activated,
    and that sum the gradient of a bias over samples, by themselves or beside the former."""
    if chain.through and from_result(chain.activation) is None:
        raise PlanError(f"the slope of {chain.activation!r} cannot be told from its result")
    if not chain.contractions:
        found = fastest(OF_COLUMNS, chain, dtype, batch, gpu)
        if not found:
            raise PlanError(f"no pass makes all of {chain.text!r} at once")
        return found
    if chain.parameters:
        raise PlanError(f"the slopes of {chain.text!r} are PyTorch's, as what it has learned")
    if chain.sums:
        raise PlanError(f"no pass makes the product, the slopes and the sums of {chain.text!r} at once")
    if chain.slope:
        return forward(chain, dtype, batch, gpu)
    product, *further = products(chain, dtype)
    found = fastest(OF_PRODUCT_AND_SLOPES, product, batch, gpu) if not further and chain.rank == 1 else ()
    if not found:
        raise PlanError(f"no pass makes the product and the slopes of {chain.text!r} at once")
    return found


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if not chain.bias:
        return min(_all_gradients(chain, dtype, batch, gpu), key=sum_us)
    # What has a plan for some samples has one for many as well.
    classes = BATCHES[OF_FEW + 1 :] if batch > FEW else ()
    found = [_with_bias(chain, dtype, each, gpu) for each in (batch, *classes)]
    if not all(found):
        raise PlanError(f"no pass makes all gradients of {chain.text!r}, the bias's among them")
    return found[0]


@functools.lru_cache(256)
def _with_bias(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """One kernel that makes the bias's gradient with all others, if it is predicted to be no slower than the fastest
    way without it and a kernel for the bias's behind that."""
    plain = _all_gradients(replace(chain, bias=False), dtype, batch, gpu)
    alone = [first for first, *rest in plain if tuple(rest) == first.finishing]
    both = [(each, *each.finishing) for first in alone if (each := first.with_bias(batch))]
    apart = sum_us(min(plain, key=sum_us)) + sum_us(behind(Chain((), sums=chain.out_features), dtype, batch, gpu))
    return min((passes for passes in both if sum_us(passes) <= apart), key=sum_us, default=())


@functools.lru_cache(256)
def _all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[tuple[Pass, ...], ...]:
    """The ways to make all gradients, at least one. Raises PlanError if there is none."""
    ways_back = _of_factors(chain, dtype, batch, gpu) if chain.inputs else _ways_back(chain, dtype, batch, gpu)
    found = (*ways_back, *_by_visits(chain, dtype, batch, gpu))
    if batch > FEW and chain.is_kronecker and whole.takes(chain, dtype):
        found = _or_as_dense(found, chain, dtype, batch, gpu)
    if not found:
        raise PlanError(f"no pass makes all gradients of {chain.text!r} at once")
    return found


def _or_as_dense(
    others: tuple[tuple[Pass, ...], ...], chain: Chain, dtype: str, batch: int, gpu: Gpu
) -> tuple[tuple[Pass, ...], ...]:
    """The `others`, or instead of them the way by the dense weight, where that is predicted to be faster for a
    Kronecker product."""
    if not (together := _as_dense(chain, dtype, batch, gpu)):
        return others
    us = whole.family(chain).margin.of(chain, dtype, batch, gpu) * class_us(together, batch)
    faster = us < min(class_us(each, batch) for each in others) if others else _is_worth_a_weight(chain, dtype, gpu)
    return (together,) if faster else others


@functools.lru_cache(256)
def _is_worth_a_weight(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether making all gradients by the dense weight's gradient is predicted to be faster than by several calls.
    Numbers of samples from just above few up to many are judged together, as a chain with a plan for some samples needs
    one for many."""
    ratio = 1.0
    for batch, counts in COUNTS.items():
        margin = whole.family(chain).margin.of(chain, dtype, batch, gpu)
        together = margin * sum_us(_as_dense(chain, dtype, batch, gpu))
        ratio *= (together / apart_us(chain, dtype, batch, gpu)) ** counts
    return ratio < 1


def _by_visits(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> list[tuple[Pass, ...]]:
    """The way by visits of a Kronecker product, where it is predicted to be faster than several calls. A single factor
    needs no visit, as its gradient and its product can each be made by itself, whatever lies before and behind its
    mode; unless x is several tensors, which only visits read so."""
    plain = all(c.tied for c in chain.contractions) and not (chain.turn or chain.slabs or chain.mixed)
    if not plain or not (chain.inputs or (len(chain.contractions) > 1 and are_worth_it(chain, dtype, batch, gpu))):
        return []
    found = visits(chain, dtype, batch, gpu)
    return [found] if found else []


def _ways_back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[tuple[Pass, ...]]:
    first, *more = chain.contractions
    if first.tied and not more:
        yield from ways(OF_ONE_FACTOR, first, dtype, batch, gpu)
    elif chain.slabs or not more:
        visit = fastest(_at_one_visit(chain), chain, dtype, batch, gpu)
        if visit and _is_worth_it(chain, dtype, gpu):
            yield visit
    elif chain.x_turned:
        return
    elif chain.few or (batch <= FEW and chain.is_monarch):
        yield from ways(OF_TWO_UNTIED, chain, dtype, batch, gpu)
    elif chain.is_monarch:
        if whole.takes(chain, dtype) and _are_worth_one_visit(chain, dtype, gpu):
            yield min(_of_two_untied(chain, dtype, batch, gpu), key=lambda way: way[0])[1]
    else:
        yield from _of_factors(chain, dtype, batch, gpu)


def _of_factors(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[tuple[Pass, ...]]:
    """The ways of families of several factors, of an x that is several tensors those that read it so; of more than two
    factors where some of them at a time are not predicted to take less."""
    if len(chain.contractions) > 1 and all(c.tied for c in chain.contractions):
        outer, inner = around(chain)
        plain = chain.rank == 1 and not chain.inputs
        if inner == 1 and not (plain and len(chain.contractions) > 2 and _are_less_apart(chain, dtype, batch, gpu)):
            asked = modes_of(chain), outer, dtype, batch, gpu
            yield from ways(OF_FACTORS, *asked, inputs=inputs_of(chain), rank=chain.rank)


def _are_less_apart(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    """Whether several calls are predicted to take less than families that make all gradients of so many factors. The
    answer for many samples is that for some, as a chain with a plan for the one class of batches has one for the
    other."""
    batch = stands_for(batch)
    outer, _ = around(chain)
    together = ways(OF_FACTORS, modes_of(chain), outer, dtype, batch, gpu)
    return apart_us(chain, dtype, batch, gpu) < min(map(sum_us, together), default=0.0)


def _at_one_visit(chain: Chain) -> tuple[Family, ...]:
    """The families that make both gradients of one untied contraction."""
    return OF_ONE_UNTIED_BY_SLABS if chain.slabs else OF_ONE_UNTIED


@functools.lru_cache(256)
def _is_worth_it(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether making both gradients at one visit is predicted to be faster than one by one, for many samples: a
    contraction with a kernel for many samples has one for fewer as well."""
    batch = BATCHES[-1]
    visit = fastest(_at_one_visit(chain), chain, dtype, batch, gpu)
    (c,) = chain.contractions
    grouped = replace(c, outer=c.outer * c.inner, inner=1)
    back = Chain((replace(c, p=c.q, q=c.p),), x_turned=chain.x_turned, turn=chain.turn)
    apart = (*_gradient(grouped, dtype, batch, gpu), *one_by_one(back, dtype, batch, gpu))
    return len(visit) > 0 and visit[0].us + REDUCTION_US < sum(p.us for p in apart)


def _as_dense(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes that make all gradients of a layer whose weights are multiplied out."""
    product = dense(whole.transposed(chain), dtype, batch, gpu)
    if not product:
        return ()
    gradient = _gradient(whole.dense(chain).contractions[0], dtype, batch, gpu)
    return whole.all_gradients(chain, product, gradient, dtype, gpu)


def _of_two_untied(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> list[tuple[float, tuple[Pass, ...]]]:
    """The ways to make all gradients of a Monarch layer of any sizes, each with the microseconds it is predicted to
    take."""
    ways = (WHOLE_MONARCH, _as_dense), (MONARCH_PAIRS, MONARCH_PAIRS.way)
    found = [(family, make(chain, dtype, batch, gpu)) for family, make in ways]
    return [(family.margin.times * class_us(passes, batch), passes) for family, passes in found if passes]


@functools.lru_cache(256)
def _are_worth_one_visit(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether making all gradients of a Monarch layer at once, or by a dense weight's, is predicted to be faster than
    contraction by contraction. Numbers of samples from just above few up to many are judged together, as a chain with a
    plan for some samples needs one for many."""
    ratio = 1.0
    for batch, counts in COUNTS.items():
        together = min((us for us, _ in _of_two_untied(chain, dtype, batch, gpu)), default=math.inf)
        try:
            ratio *= (together / class_us(_apart(chain, dtype, batch, gpu), batch)) ** counts
        except PlanError:
            return ratio * together < math.inf
    return ratio < 1


def _apart(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes that make all gradients of a Monarch layer contraction by contraction: the state is made again and
    turned, and so is grad_y; then, of each contraction, come the gradient of its weight and the way back through it."""
    first, second = chain.contractions
    turned = second.outer, second.p, second.inner
    passes = one_by_one(Chain((first,), turn=turned, tf32=chain.tf32), dtype, batch, gpu)
    passes += fastest(OF_TURN, second.outer, second.q, second.inner, dtype, batch, gpu)
    for c, x_turned in ((second, True), (first, False)):
        alone = Chain((c,), x_turned=x_turned, backward=True, tf32=chain.tf32)
        grouped = replace(c, outer=c.outer * c.inner, inner=1)
        back = Chain((replace(c, p=c.q, q=c.p),), x_turned=x_turned, tf32=chain.tf32)
        each = (*_gradient(grouped, dtype, batch, gpu), *one_by_one(back, dtype, batch, gpu))
        visits = ways(OF_ONE_UNTIED, alone, dtype, batch, gpu)
        passes += min([each, *visits], key=sum_us)
    return passes


def _gradient(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    found = fastest(OF_WEIGHT, contraction, dtype, batch, gpu)
    if not found:
        raise PlanError(f"no pass makes the gradient of {contraction}: it has too many groups")
    return found


def _in_order(c: Contraction, mixed: tuple[int, int, int], dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes that make a weight's gradient from q's that come in another order, by the one family that takes
    them."""
    if math.prod(mixed[1:]) != c.q or c.inner > 1:
        return ()
    return fastest(OF_WEIGHT_IN_ORDER, c, dtype, batch, gpu, mixed=mixed[1:])
