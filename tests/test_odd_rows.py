"""kernels/product/wide.py, of rows that 16 bytes do not divide: which tilings there are, that they compile, and, on a
CPU, that they are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from compiled import UsageOf
from emulator.driver import Array, Emulator, decode, encode

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.product import wide
from factorlayer.kernels.product.streamed import Product, products
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan

Tiling = tuple[int, int, int, bool]  # consumers, n, groups held, whether the weight is shifted
Again = tuple[Callable[[Array, int], Array], Array]  # what runs a plan of an x and a seed, and an x
GPU = Gpu.of(90)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11, "float32": 2.0**-21}


def product_of(text: str, dtype: str) -> Product:
    (product,) = products(Chain.parse(text), dtype)
    return product


def plan_of(text: str, dtype: str, batch: int, processors: int, tiling: Tiling) -> Plan:
    chain, gpu = Chain.parse(text), Gpu(90, processors, 232448)
    product = product_of(text, dtype)
    found = [p for p in wide.tilings(product, batch, gpu) if (p.consumers, p.n, p.held, p.shifted) == tiling]
    assert found, sorted((p.consumers, p.n, p.held, p.shifted) for p in wide.tilings(product, batch, gpu))
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
    return draw(dtype, batch, chain.in_features), draw(dtype, *terms, *shape, scale=(chain.rank * c.p) ** -0.5), bias


def right(chain: Chain, x: Array, weight: Array, bias: Array | None) -> Array:
    (c,) = chain.contractions
    weight = weight.sum(0) if chain.rank > 1 else weight
    if c.tied:
        y = np.einsum("nop,qp->noq", x.reshape(len(x), c.outer, c.p), weight)
    else:
        y = np.einsum("ngp,gqp->ngq", x.reshape(len(x), -1, c.p), weight)
        y = y.reshape(len(x), c.outer, c.inner, c.q).swapaxes(2, 3)
    y = y.reshape(len(x), -1) + (0 if bias is None else bias)
    y = np.maximum(y, 0) if chain.activation == "relu" else y
    return y.reshape(len(x), *chain.turn).swapaxes(2, 3).reshape(len(x), -1) if chain.turn else y


# Rows of x that begin anywhere in a piece, or at even places, all, every second, fourth and eighth in a tile; by pieces
# of 4 bytes and of 8. Of y, ends of 2, 4 and 8 bytes. One slab, several, and one of few steps; tiles that nothing is
# left for; fewer rows than a tile.
CASES: list[tuple[str, str, int, int, Tiling]] = [
    ("tied 0 1 139 200 1; bias; relu", "bfloat16", 203, 2, (2, 224, 1, True)),
    ("tied 0 1 139 71 1; bias; relu", "bfloat16", 203, 2, (1, 72, 1, True)),
    ("tied 0 1 254 254 1; bias", "float16", 203, 2, (2, 256, 1, False)),
    ("tied 0 1 254 254 1; bias", "float16", 203, 2, (2, 256, 1, True)),
    ("tied 0 1 37 139 1; relu", "float16", 61, 2, (2, 72, 1, True)),
    ("tied 0 3 71 37 1; bias", "bfloat16", 75, 3, (1, 40, 1, True)),
    ("tied 0 1 113 76 1", "bfloat16", 129, 2, (1, 80, 1, True)),
    ("tied 0 1 20 30 1; bias", "float16", 131, 2, (1, 32, 1, False)),
    ("tied 0 1 20 30 1; bias", "float16", 131, 2, (1, 32, 1, True)),
    ("untied 0 5 69 37 1; bias; relu", "bfloat16", 133, 4, (1, 40, 1, True)),
    ("untied 0 6 69 39 1; bias", "bfloat16", 133, 4, (2, 40, 1, True)),
    ("untied 0 4 49 63 1; bias", "float16", 133, 4, (2, 64, 1, True)),
    ("untied 0 8 139 33 1; relu", "bfloat16", 133, 4, (1, 40, 1, True)),
    ("rank 2; tied 0 1 45 39 1; bias; tf32", "tf32", 133, 4, (1, 32, 1, True)),
    ("rank 3; tied 0 1 75 40 1; bias", "bfloat16", 133, 4, (1, 64, 1, True)),
    ("turned; untied 0 1 139 96 4; bias", "bfloat16", 133, 4, (1, 96, 4, True)),
    ("turned; untied 0 2 45 64 8; bias; relu", "float16", 133, 4, (1, 32, 8, True)),
    ("turned; untied 0 2 46 64 8; bias; relu", "float16", 133, 4, (1, 32, 8, False)),
    ("turned; untied 0 1 50 48 4; relu; tf32", "tf32", 133, 4, (1, 32, 4, False)),
    ("turned; untied 0 1 50 48 4; relu; tf32", "tf32", 133, 4, (1, 32, 4, True)),
    ("tied 0 1 139 200 1; bias; tf32", "tf32", 203, 2, (2, 64, 1, False)),
    ("tied 0 1 139 200 1; bias; tf32", "tf32", 203, 2, (2, 64, 1, True)),
    ("tied 0 1 254 254 1; bias; relu; tf32", "tf32", 203, 2, (2, 128, 1, False)),
    ("tied 0 1 254 254 1; bias; relu; tf32", "tf32", 203, 2, (2, 128, 1, True)),
    ("untied 0 5 69 38 1; bias; relu; tf32", "tf32", 133, 4, (1, 64, 1, False)),
    ("untied 0 5 69 38 1; bias; relu; tf32", "tf32", 133, 4, (1, 64, 1, True)),
    ("untied 0 3 38 70 1; tf32", "tf32", 133, 4, (2, 128, 1, False)),
    ("untied 0 3 38 70 1; tf32", "tf32", 133, 4, (2, 128, 1, True)),
    ("tied 0 1 330 139 1; bias; relu", "float32", 203, 2, (2, 64, 1, False)),
    ("tied 0 1 75 300 1; bias", "float32", 133, 2, (1, 128, 1, False)),
    ("tied 0 1 520 100 1", "float32", 133, 1, (2, 128, 1, False)),
    ("tied 0 1 210 100 1; relu", "float32", 133, 1, (3, 96, 1, False)),
    ("rank 2; tied 0 1 69 38 1; bias", "float32", 133, 4, (1, 32, 1, False)),
    ("turned; untied 0 1 50 48 4; bias; relu", "float32", 133, 4, (1, 32, 4, False)),
]


def is_right_and_keeps_samples_apart(found: Plan, dtype: str, batch: int, processors: int, emulator: Emulator) -> Again:
    """A plan of one product; how to run it again."""
    chain = found.chain
    x, weight, bias = tensors_of(chain, dtype, batch)
    kernels = emulator.compile(found)

    def run(x: Array, seed: int) -> Array:
        (y,), errors = emulator.run(found, kernels, x, [weight], bias, processors, seed=seed)
        assert not errors
        return y.reshape(batch, -1)

    y, wanted = run(x, 1), right(chain, x, weight, bias)
    assert np.linalg.norm(y - wanted) <= EPS[dtype] * np.linalg.norm(wanted)

    for value, seed in ((np.nan, 2), (np.inf, 3)):
        sick = x.copy()
        sick[batch // 2] = value
        others = np.arange(batch) != batch // 2
        np.testing.assert_array_equal(run(sick, seed)[others], y[others])
    return run, x


@pytest.mark.parametrize(("text", "dtype", "batch", "processors", "tiling"), CASES, ids=str)
def test_is_right_in_any_order_and_keeps_samples_apart(
    text: str, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    found = plan_of(text, dtype, batch, processors, tiling)
    run, x = is_right_and_keeps_samples_apart(found, dtype, batch, processors, emulator)
    p = found.chain.contractions[0].p  # one number, which the last slab of its row has again
    x[batch // 2, max(0, (p - 1) // 64 * 64 - 1)] = np.inf
    broken = run(x, 4)
    assert np.isinf(broken).any()
    assert np.isnan(broken).any() == (found.chain.rank > 1)  # where terms have other signs


PAIRS = "move_pairs(tile, half, [&](u32 at, int i) {\n        if"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("? min(16, rest) : 0", "? 16 : 0", "outside of the tensors"),
        ("__syncwarp();\n      move_pairs(tile, half, [&](u32 at, int i) {\n        if", PAIRS, "race"),
        ("__syncwarp();\n      ROLL for (int i = threadIdx.x % 32", "ROLL for (int i = threadIdx.x % 32", "race"),
        ("kTurned || kShifted", "kTurned", "race"),
    ],
)
def test_finds_what_is_planted(old: str, new: str, said: str, emulator: Emulator) -> None:
    found = plan_of("tied 0 1 139 71 1", "bfloat16", 203, 1, (1, 72, 1, True))
    x, weight, _ = tensors_of(found.chain, "bfloat16", 203)
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, [weight], None, 1)
    assert any(said in error for error in errors), errors


OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("tied 0 1 139 200 1; bias; gelu", "bfloat16"),
        ("tied 0 1 254 254 1; bias; gelu", "float16"),
        ("untied 0 11 71 71 1; bias; gelu", "bfloat16"),
        ("rank 5; tied 0 1 1139 2001 1; bias", "bfloat16"),
        ("tied 0 1 375 393 1; bias; gelu; tf32", "tf32"),
    ],
)
def test_the_largest_tilings_compile(text: str, dtype: str, usage_of: UsageOf) -> None:
    """Without products one after the other, and with few registers in memory."""
    found = sorted(wide.tilings(product_of(text, dtype), 16384, GPU), key=lambda t: t.rows * t.columns)
    for tiled in found[-3:]:
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C75" not in usage.notes, usage
        assert usage.frame <= 48, f"{tiled}: {usage}"


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("tied 0 1 2320 232 1", "float32"), ("tied 0 1 3330 3330 1", "float32"), ("tied 0 1 139 900 1", "bfloat16")],
)
def test_there_is_a_block_for_each_tile(text: str, dtype: str) -> None:
    """Also where there are fewer samples than the plan was made for, and the last tile of rows is hardly begun."""
    for made in wide.tilings(product_of(text, dtype), 16384, GPU):
        for batch in (1025, 2213, 3000, 4097, 20000):
            tiles = -(-batch // (made.rows * made.every)) * made.tiles
            blocks = -(-batch * made.units_per_sample // made.units_per_block) * made.split
            assert min(blocks, GPU.sms) >= min(tiles, GPU.sms), (made, batch)


def test_what_16_bytes_divide_comes_by_them() -> None:
    for text, dtype, ways in (
        ("tied 0 1 200 139 1", "bfloat16", {(16, 1)}),
        ("tied 0 1 204 139 1", "bfloat16", {(8, 1), (16, 2)}),
        ("tied 0 1 139 200 1", "float16", {(16, 8)}),
        ("untied 0 8 139 139 1", "float16", {(16, 1)}),
        ("tied 0 1 140 139 1; tf32", "tf32", {(16, 1)}),
        ("tied 0 1 139 139 1; tf32", "tf32", {(4, 1), (16, 4)}),
        ("tied 0 1 139 139 1", "float32", {(4, 1)}),
    ):
        assert {(t.copy, t.every) for t in wide.tilings(product_of(text, dtype), 16384, GPU)} == ways, text
