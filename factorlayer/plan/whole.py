"""Passes of a structured layer that is run as a dense one: forward, a pass that makes the dense weight comes before
those of the dense layer; back, passes that make the gradients of the structured weights come behind them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import whole, whole_kronecker, whole_monarch
from factorlayer.kernels.product.whole import SCALED
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan.registry.family import Family
from factorlayer.plan.registry.product import WHOLE_KRONECKER, WHOLE_MONARCH

__all__ = ["SCALED", "all_gradients", "dense", "family", "forward", "takes", "transposed"]


def takes(chain: Chain, dtype: str) -> bool:
    """Whether a chain is a layer of several contractions, or its gradients, in which nothing is turned."""
    turned = chain.x_turned or chain.turn or chain.mixed or chain.slabs
    if len(chain.contractions) == 1 or turned or chain.parameters or chain.inputs or chain.slope:
        return False
    return chain.is_monarch or (chain.is_kronecker and whole_kronecker.takes(chain, dtype))


def family(chain: Chain) -> Family:
    return WHOLE_MONARCH if chain.is_monarch else WHOLE_KRONECKER


def dense(chain: Chain) -> Chain:
    """The dense layer that computes what the contractions do."""
    return _of_one(chain, chain.in_features, chain.out_features)


def transposed(chain: Chain) -> Chain:
    """The dense layer that makes the gradient of x."""
    return _of_one(chain, chain.out_features, chain.in_features)


def _of_one(chain: Chain, p: int, q: int) -> Chain:
    return replace(chain, contractions=(Contraction(0, 1, p, q, 1, tied=True),), rank=1, backward=False)


def forward(chain: Chain, product: Sequence[Pass], dtype: str, gpu: Gpu) -> tuple[Pass, ...]:
    """Passes of the layer by those of the dense one; none where its weight does not fit."""
    of = _structure(chain)
    return whole.forward(of.weight(chain, dtype, gpu), len(chain.contractions), product)


def all_gradients(
    chain: Chain, product: Sequence[Pass], gradient: Sequence[Pass], dtype: str, gpu: Gpu
) -> tuple[Pass, ...]:
    """Passes of all gradients by those of the dense layer: the transposed one's product, and its weight's gradient."""
    of = _structure(chain)
    weight, parts = of.weight(chain, dtype, gpu, turned=True), functools.partial(of.parts, chain, dtype, gpu)
    return whole.all_gradients(weight, len(chain.contractions), product, gradient, parts)


def _structure(chain: Chain) -> ModuleType:
    return whole_monarch if chain.is_monarch else whole_kronecker
