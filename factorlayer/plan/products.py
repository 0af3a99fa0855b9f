"""Contractions one by one: a pass for each, its weight streamed.

For untied contractions, whose weights no pass keeps, and for factors too large to stay in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product.streamed import Product, batches_of, products
from factorlayer.maths.chain import Chain
from factorlayer.plan import registry
from factorlayer.plan.plan import BATCHES

STREAMED_OF_SOME = 1.6  # beside few: ten Monarch layers of 85 to 1722 samples took 2.0 of what is predicted, and 1.3
STRIDED = {2: 6.0, 4: 1.8, 8: 1.5}  # times what a pass is predicted to take whose p's do not lie side by side


def expected_us(passes: Iterable[Pass]) -> float:
    """What passes are predicted to take, those of the last resort as they were seen to."""
    return sum(STREAMED_OF_SOME * p.us if registry.family_of(p).last else p.us for p in passes)


def one_by_one(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A pass for each contraction. Of a pass that reads what the one before has made last, the last samples come first,
    where that is faster."""
    each = products(chain, dtype)
    last = len(each) - 1
    passes = tuple(product_pass(product, batch, gpu, i == 0, i == last) for i, product in enumerate(each))
    passes = tuple(p.from_the_end() if i % 2 else p for i, p in enumerate(passes))
    first = chain.contractions[0]
    if first.tied or first.inner == 1 or chain.x_turned:
        return passes
    turn = registry.fastest(registry.OF_TURN, first.outer, first.p, first.inner, dtype, batch, gpu)
    turned = (*turn, *one_by_one(replace(chain, x_turned=True), dtype, batch, gpu))
    strided = STRIDED[ELEMENT_BYTES[dtype]] * passes[0].us + sum(p.us for p in passes[1:])
    return turned if sum(p.us for p in turned) < strided else passes


def product_pass(product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True) -> Pass:
    (made,) = registry.fastest(registry.OF_PRODUCT, product, batch, gpu, first=first, last=last)
    if product.contraction.tied or not BATCHES[0] < batch <= BATCHES[1]:
        return made
    of_few = registry.fastest(registry.OF_PRODUCT_OF_SOME, product, batch, gpu, first=first, last=last)
    return of_few[0] if of_few and _is_faster(of_few[0], made, batches_of(product, batch)) else made


def _is_faster(of_few: Pass, other: Pass, batches: tuple[int, ...]) -> bool:
    """For all numbers of samples together; or for each, where the other one is made for many."""
    us = [of_few.us_of(batch) for batch in batches]
    others = [other.us_of(batch) for batch in batches]
    if registry.family_of(other).last:
        return math.prod(us) < STREAMED_OF_SOME ** len(us) * math.prod(others)
    return all(mine < another for mine, another in zip(us, others, strict=True))
