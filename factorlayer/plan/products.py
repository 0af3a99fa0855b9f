"""Contractions one by one: a pass for each, its weight streamed.

For untied contractions, whose weights no pass keeps, and for factors too large to stay in shared memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import FEW, MOST_SOME, samples_of_class
from factorlayer.kernels.passes import Pass, sum_us
from factorlayer.kernels.product.streamed import Product, products, unturned
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import PlanError
from factorlayer.plan.registry import family_of
from factorlayer.plan.registry.family import fastest
from factorlayer.plan.registry.product import OF_PRODUCT, OF_PRODUCT_AND_SLOPES, OF_PRODUCT_OF_SOME, OF_TURN, STREAMED

# Times what a product and a turn behind it are predicted to take: 4 groups of 424 → 32 in fp16, and 16 groups to 688,
# take 125 us either way.
TURNED = 1.1
STRIDED = {2: 6.0, 4: 1.8, 8: 1.5}  # times what a pass is predicted to take whose p's do not lie side by side


def of_each(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> list[tuple[Pass, ...]]:
    """A pass for each contraction, and maybe one that turns what it makes. A pass that reads what the one before has
    made last takes the last samples first, where that is faster."""
    each = products(chain, dtype)
    last = len(each) - 1
    made = [_stored(product, batch, gpu, i == 0, i == last) for i, product in enumerate(each)]
    return [(p.from_the_end(), *turn) if i % 2 else (p, *turn) for i, (p, *turn) in enumerate(made)]


def one_by_one(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The passes of each contraction, one behind the other."""
    passes = tuple(itertools.chain(*of_each(chain, dtype, batch, gpu)))
    first = chain.contractions[0]
    if first.tied or first.inner == 1 or chain.x_turned or chain.inputs:
        return passes
    turn = fastest(OF_TURN, first.outer, first.p, first.inner, dtype, batch, gpu)
    turned = (*turn, *one_by_one(replace(chain, x_turned=True), dtype, batch, gpu))
    strided = STRIDED[ELEMENT_BYTES[dtype]] * passes[0].us + sum(p.us for p in passes[1:])
    return turned if sum(p.us for p in turned) < strided else passes


def _stored(product: Product, batch: int, gpu: Gpu, first: bool, last: bool) -> tuple[Pass, ...]:
    """The passes of a product that store y as it is wanted. Untied groups may store only parts of L2's sectors where
    they take turns: where it is predicted to be faster, groups are stored one behind another, and a second pass turns
    them."""
    made = product_pass(product, batch, gpu, first, last)
    found = unturned(product) if batch > FEW else None
    if not found:
        return (made,)
    other, turn = found
    # A turn rounds as well, to what only a state between two passes of ours is rounded to.
    dtype = product.dtype if product.ours_out else "float32" if product.dtype == "tf32" else product.dtype
    apart = product_pass(other, batch, gpu, first, last), *fastest(OF_TURN, *turn, dtype, batch, gpu)
    batches = samples_of_class(batch)
    direct = math.prod(sum_us((made,), each) for each in batches)
    turned = math.prod(TURNED * sum_us(apart, each) for each in batches)
    return apart if turned < direct else (made,)


def product_pass(product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True) -> Pass:
    if product.reads_beside:
        if at_once := fastest(OF_PRODUCT_AND_SLOPES, product, batch, gpu):
            return at_once[0]
        raise PlanError(f"no pass makes the product and the slopes of {product.contraction} at once")
    (made,) = fastest(OF_PRODUCT, product, batch, gpu, first=first, last=last)
    if product.contraction.tied or not FEW < batch <= MOST_SOME:
        return made
    batches = samples_of_class(batch)
    if made.is_for_many:
        made = min((made, *fastest((STREAMED,), product, batch, gpu)), key=lambda each: _together(each, batches))
    of_few = fastest(OF_PRODUCT_OF_SOME, product, batch, gpu, first=first, last=last)
    return of_few[0] if of_few and _is_faster(of_few[0], made, batches) else made


def _together(made: Pass, batches: tuple[int, ...]) -> float:
    return math.prod(made.us_of(batch) for batch in batches)


def _is_faster(of_few: Pass, other: Pass, batches: tuple[int, ...]) -> bool:
    """Whether the pass for few samples is faster for all numbers of samples together; or for each of them, where the
    `other` one is not made for many."""
    if family_of(other).last or other.is_for_many:
        return _together(of_few, batches) < _together(other, batches)
    return all(of_few.us_of(batch) < other.us_of(batch) for batch in batches)
