"""kernels/product/wide.py, of rows that 16 bytes do not divide: which tilings there are, that they compile, and, on a
CPU, that they are right."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.driver import Array, Emulator, decode, encode

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.product import wide
from factorlayer.kernels.product.streamed import Product, products
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan

Tiling = tuple[int, int, bool]  # consumers, n, whether x comes by boxes
GPU = Gpu.of(90)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}


def product_of(text: str, dtype: str) -> Product:
    (product,) = products(Chain.parse(text), dtype)
    return product


def plan_of(text: str, dtype: str, batch: int, processors: int, tiling: Tiling) -> Plan:
    chain, gpu = Chain.parse(text), Gpu(90, processors, 232448)
    product = product_of(text, dtype)
    found = [p for p in wide.tilings(product, batch, gpu) if (p.consumers, p.n, p.boxed, p.held) == (*tiling, 1)]
    assert found, sorted((p.consumers, p.n, p.boxed, p.held) for p in wide.tilings(product, batch, gpu))
    return Plan(chain, dtype, batch, gpu, with_halves((found[0],)))


def draw(dtype: str, *shape: int, scale: float = 1.0) -> Array:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) * scale
    return decode(encode(values, dtype), dtype).reshape(shape)


def tensors_of(chain: Chain, dtype: str, batch: int) -> tuple[Array, Array, Array | None]:
    """x, the weight, and a bias."""
    (c,) = chain.contractions
    shape = (c.q, c.p) if c.tied else (c.outer * c.inner, c.q, c.p)
    bias = draw(dtype, chain.out_features) if chain.bias else None
    terms = (chain.rank,) if chain.rank > 1 else ()
    return draw(dtype, batch, chain.in_features), draw(dtype, *terms, *shape, scale=c.p**-0.5), bias


def right(chain: Chain, x: Array, weight: Array, bias: Array | None) -> Array:
    (c,) = chain.contractions
    if c.tied:
        y = np.einsum("nop,qp->noq", x.reshape(len(x), c.outer, c.p), weight)
    else:
        y = np.einsum("ngp,gqp->ngq", x.reshape(len(x), -1, c.p), weight)
        y = y.reshape(len(x), c.outer, c.inner, c.q).swapaxes(2, 3)
    y = y.reshape(len(x), -1) + (0 if bias is None else bias)
    return np.maximum(y, 0) if chain.activation == "relu" else y


# Rows of x by boxes, of one, two, four and eight; by pieces of 4 bytes and of 8. Of y, ends of 2, 4 and 8 bytes. Less
# than a slab, and whole steps of it that are again; tiles that nothing is left for; fewer rows than a tile.
CASES: list[tuple[str, str, int, int, Tiling]] = [
    ("tied 0 1 139 200 1; bias; relu", "bfloat16", 203, 2, (2, 224, True)),
    ("tied 0 1 139 71 1; bias; relu", "bfloat16", 203, 2, (1, 72, True)),
    ("tied 0 1 254 254 1; bias", "float16", 203, 2, (2, 256, False)),
    ("tied 0 1 254 254 1; bias", "float16", 203, 2, (2, 256, True)),
    ("tied 0 1 37 139 1; relu", "float16", 61, 2, (2, 72, True)),
    ("tied 0 3 71 37 1; bias", "bfloat16", 75, 3, (1, 40, True)),
    ("tied 0 1 113 76 1", "bfloat16", 129, 2, (1, 80, True)),
    ("tied 0 1 20 30 1; bias", "float16", 131, 2, (1, 32, False)),
    ("tied 0 1 20 30 1; bias", "float16", 131, 2, (1, 32, True)),
    ("untied 0 5 69 37 1; bias; relu", "bfloat16", 133, 4, (1, 40, True)),
    ("untied 0 6 69 39 1; bias", "bfloat16", 133, 4, (2, 40, True)),
    ("untied 0 4 49 63 1; bias", "float16", 133, 4, (2, 64, True)),
    ("untied 0 8 139 33 1; relu", "bfloat16", 133, 4, (1, 40, True)),
    ("tied 0 1 139 200 1; bias; tf32", "tf32", 203, 2, (2, 64, False)),
    ("tied 0 1 139 200 1; bias; tf32", "tf32", 203, 2, (2, 104, True)),
    ("tied 0 1 254 254 1; bias; relu; tf32", "tf32", 203, 2, (2, 128, False)),
    ("tied 0 1 254 254 1; bias; relu; tf32", "tf32", 203, 2, (2, 128, True)),
    ("untied 0 5 69 37 1; bias; relu; tf32", "tf32", 133, 4, (1, 64, False)),
    ("untied 0 5 69 37 1; bias; relu; tf32", "tf32", 133, 4, (1, 40, True)),
    ("untied 0 3 38 71 1; tf32", "tf32", 133, 4, (2, 128, False)),
    ("untied 0 3 38 71 1; tf32", "tf32", 133, 4, (2, 72, True)),
]


@pytest.mark.parametrize(("text", "dtype", "batch", "processors", "tiling"), CASES, ids=str)
def test_is_right_in_any_order_and_keeps_samples_apart(
    text: str, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    found = plan_of(text, dtype, batch, processors, tiling)
    x, weight, bias = tensors_of(found.chain, dtype, batch)
    kernels = emulator.compile(found)
    (y,), errors = emulator.run(found, kernels, x, [weight], bias, processors, seed=1)
    assert not errors
    y = y.reshape(batch, -1)
    wanted = right(found.chain, x, weight, bias)
    assert np.linalg.norm(y - wanted) <= EPS[dtype] * np.linalg.norm(wanted)

    for value, seed in ((np.nan, 2), (np.inf, 3)):
        sick = x.copy()
        sick[batch // 2] = value
        (broken,), errors = emulator.run(found, kernels, sick, [weight], bias, processors, seed=seed)
        assert not errors
        broken = broken.reshape(batch, -1)
        others = np.arange(batch) != batch // 2
        np.testing.assert_array_equal(broken[others], y[others])
    p = found.chain.contractions[0].p  # one number, which the last slab of its row has again: nothing else makes it NaN
    x[batch // 2, max(0, (p - 1) // 64 * 64 - 1)] = np.inf
    (broken,), errors = emulator.run(found, kernels, x, [weight], bias, processors, seed=4)
    assert not errors and not np.isnan(broken).any() and np.isinf(broken).any()
