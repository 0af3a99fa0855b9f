"""Contractions one by one: a pass for each, its weight streamed.

For untied contractions, whose weights no pass keeps, and for factors too large to stay in shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import few, mapped, streamed, wide
from factorlayer.kernels.product.few import Few
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.streamed import Product, Streamed
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.wide import Wide
from factorlayer.maths.chain import Chain

STRIDED = {2: 6.0, 4: 1.8, 8: 1.5}  # times what a pass is predicted to take whose p's do not lie side by side
STREAMED, STREAMED_OF_FEW = 1.2, 0.9  # of streamed products, predicted too short, but better with few samples


def one_by_one(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A pass for each contraction, its weight streamed."""
    products = streamed.products(chain, dtype)
    last = len(products) - 1
    passes = _in_turns([product_pass(product, batch, gpu, i == 0, i == last) for i, product in enumerate(products)])
    first = chain.contractions[0]
    if first.tied or first.inner == 1 or chain.x_turned:
        return passes
    turn = Turn(first.outer, first.p, first.inner, dtype, batch, gpu)
    turned = (turn, *one_by_one(replace(chain, x_turned=True), dtype, batch, gpu))
    strided = STRIDED[ELEMENT_BYTES[dtype]] * passes[0].us + sum(p.us for p in passes[1:])
    return turned if sum(p.us for p in turned) < strided else passes


def _in_turns(passes: list[Few | Mapped | Streamed | Wide]) -> tuple[Pass, ...]:
    """Of a pass in 16 bits that reads what the one before has made last, the last samples come first. One that makes
    more than it reads does not get faster so."""

    def turned(i: int, p: Few | Mapped | Streamed | Wide) -> Pass:
        if i % 2 and isinstance(p, Wide) and p.product.size == 2 and p.product.y_features <= p.product.x_features:
            return replace(p, from_last=True)
        return p

    return tuple(turned(i, p) for i, p in enumerate(passes))


def product_pass(
    product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True
) -> Few | Mapped | Streamed | Wide:
    """Times of streamed passes are predicted too short, but they are better with few samples, untied ones apart."""
    of_few = few.tile(product, batch, gpu, first, last)
    if of_few:
        return of_few
    narrow = streamed.tile(product, batch, gpu)
    tiled = (family.tile(product, batch, gpu) for family in (wide, mapped))
    found = min((p for p in tiled if p), key=lambda p: p.us, default=None)
    weight = STREAMED if batch > 64 else STREAMED_OF_FEW
    return found if found and found.us < weight * narrow.us else narrow
