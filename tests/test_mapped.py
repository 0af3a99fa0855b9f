"""kernels/product/mapped.py: which tilings there are, that they compile, and, on a CPU, that they are right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import UsageOf
from emulator.driver import Array, Emulator, decode, encode

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.product import mapped
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.streamed import Product, products
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan
from factorlayer.plan.planner import plan

Tiling = tuple[int, ...]  # n, held, blocks across, warpgroups of consumers, parts of each, blocks down
GPU = Gpu.of(90)


def product_of(text: str, dtype: str = "tf32") -> Product:
    (product,) = products(Chain.parse(text), dtype)
    return product


def plan_of(text: str, batch: int, processors: int, tiling: Tiling, dtype: str = "tf32") -> Plan:
    chain, gpu = Chain.parse(text), Gpu(90, processors, 232448)
    n, held, across, *others = tiling
    consumers, parts, down = (*others, *(2, 1, 1)[len(others) :])
    tiled = Mapped(product_of(text, dtype), batch, gpu, n, held, consumers, parts, across, down)
    assert tiled in set(mapped.tilings(tiled.product, batch, gpu))
    return Plan(chain, dtype, batch, gpu, (tiled,))


def draw(*shape: int, scale: float = 1.0, dtype: str = "tf32") -> Array:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) * scale
    return decode(encode(values, dtype), dtype).reshape(shape)


def tensors_of(chain: Chain, batch: int, dtype: str = "tf32") -> tuple[Array, Array, Array | None]:
    """x, the weight, and a bias."""
    (c,) = chain.contractions
    shape = (c.q, c.p) if c.tied else (c.outer * c.inner, c.q, c.p)
    bias = draw(chain.out_features, dtype=dtype) if chain.bias else None
    return draw(batch, chain.in_features, dtype=dtype), draw(*shape, scale=c.p**-0.5, dtype=dtype), bias


def right(chain: Chain, x: Array, weight: Array, bias: Array | None) -> Array:
    (c,) = chain.contractions
    states = x.reshape(len(x), c.outer, c.inner, c.p) if chain.x_turned else x.reshape(len(x), c.outer, c.p, c.inner)
    subscripts = "noip" if chain.x_turned else "nopi"
    if c.tied:
        y = np.einsum(f"{subscripts},qp->noqi", states, weight)
    else:
        y = np.einsum(f"{subscripts},oiqp->noqi", states, weight.reshape(c.outer, c.inner, c.q, c.p))
    y = y.reshape(len(x), -1) + (0 if bias is None else bias)
    y = np.maximum(y, 0) if chain.activation == "relu" else y
    if chain.turn:
        outer, rows, columns = chain.turn
        y = y.reshape(len(x), outer, rows, columns).swapaxes(2, 3).reshape(len(x), -1)
    return y


def rows_of(y: Array, chain: Chain, batch: int) -> Array:
    if chain.slabs:
        y = y.reshape(batch // 32, -1, 32).swapaxes(1, 2)
    return y.reshape(batch, -1)


# One group: runs as q has them, of 16 and of 48, each in boxes of its own. Groups that take turns: two, four, eight,
# and eight of sixteen. y by slabs. Slabs of k, tiles and boxes that sizes do not fill, tiles that nothing is left for,
# rings that turn. In 16 bits, of 16 and of 8 bytes a thread, with one and three warpgroups of consumers, and last slabs
# of all numbers of steps.
CASES: list[tuple[str, int, int, Tiling]] = [
    ("tied 0 3 44 112 1; bias; tf32", 70, 2, (64, 1, 1)),
    ("tied 0 1 196 176 1; relu; tf32", 400, 2, (96, 1, 1)),
    ("untied 0 4 68 192 1; turn 4 48 4; tf32", 140, 2, (96, 1, 1)),
    ("untied 0 2 132 192 1; turn 1 192 2; tf32", 140, 4, (96, 1, 2)),
    ("untied 0 4 36 192 1; turn 1 192 4; tf32", 140, 2, (192, 1, 1)),
    ("untied 0 4 36 64 1; turn 1 64 4; tf32", 260, 4, (32, 1, 2)),
    ("turned; untied 0 1 76 96 2; bias; relu; tf32", 300, 4, (48, 2, 2)),
    ("turned; untied 0 2 76 96 4; bias; tf32", 200, 2, (32, 4, 1)),
    ("turned; untied 0 1 76 96 4; bias; relu; tf32", 300, 4, (32, 4, 2)),
    ("turned; untied 0 1 40 48 8; bias; tf32", 300, 2, (48, 8, 1)),
    ("turned; untied 0 1 40 48 16; relu; tf32", 300, 4, (32, 8, 1)),
    ("untied 0 3 68 176 1; slabs 1; tf32", 192, 4, (96, 1, 2)),
    ("turned; untied 0 2 76 96 2; slabs 1; tf32", 320, 2, (48, 1, 1)),
    ("tied 0 1 196 100 1; bias; tf32", 300, 2, (64, 1, 1)),
]
CASES16: list[tuple[str, str, int, int, Tiling]] = [
    ("tied 0 1 136 104 1; bias; relu", "bfloat16", 300, 2, (64, 1, 1)),
    ("tied 0 1 136 104 1; relu", "bfloat16", 200, 3, (64, 1, 1, 1)),
    ("tied 0 1 136 100 1; bias", "float16", 300, 2, (64, 1, 1, 3)),
    ("tied 0 3 80 192 1; bias", "bfloat16", 150, 3, (96, 1, 1, 3)),
    ("tied 0 2 232 40 1", "float16", 200, 2, (32, 1, 2)),
    ("untied 0 5 104 88 1; bias; relu", "float16", 200, 4, (48, 1, 1)),
    ("tied 0 1 136 128 1; bias", "bfloat16", 600, 4, (64, 1, 1, 2, 2, 2)),
    ("tied 0 1 136 96 1; bias; relu", "float16", 500, 4, (32, 1, 2, 2, 2)),
    ("untied 0 2 88 128 1", "bfloat16", 500, 2, (128, 1, 1, 3, 1, 2)),
    ("untied 0 4 64 192 1; turn 4 48 4", "bfloat16", 140, 2, (96, 1, 1)),
    ("untied 0 4 72 128 1; turn 4 32 4", "float16", 260, 4, (64, 1, 2)),
]


@pytest.mark.parametrize(
    ("text", "dtype", "batch", "processors", "tiling"),
    [*((text, "tf32", *rest) for text, *rest in CASES), *CASES16],
    ids=str,
)
def test_is_right_in_any_order_and_keeps_samples_apart(
    text: str, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    found = plan_of(text, batch, processors, tiling, dtype)
    x, weight, bias = tensors_of(found.chain, batch, dtype)
    kernels = emulator.compile(found)
    (y,), errors = emulator.run(found, kernels, x, [weight], bias, processors, seed=1)
    assert not errors
    y = rows_of(y, found.chain, batch)
    wanted = right(found.chain, x, weight, bias)
    assert np.linalg.norm(y - wanted) <= 2 * 2.0 ** -(8 if dtype == "bfloat16" else 11) * np.linalg.norm(wanted)

    sick = batch // 2
    x[sick] = np.nan
    (broken,), errors = emulator.run(found, kernels, x, [weight], bias, processors, seed=2)
    assert not errors
    broken = rows_of(broken, found.chain, batch)
    assert np.isnan(broken[sick]).all()
    others = np.arange(batch) != sick
    np.testing.assert_array_equal(broken[others], y[others])


def test_is_the_same_from_the_last_samples_on(emulator: Emulator) -> None:
    found = plan_of("tied 0 1 136 104 1; bias", 300, 2, (64, 1, 1), "bfloat16")
    (tiled,) = found.passes
    assert isinstance(tiled, Mapped)
    from_the_end = replace(found, passes=(tiled.from_the_end(),))
    assert "FROM_LAST = true" in from_the_end.text()
    x, weight, bias = tensors_of(found.chain, 300, "bfloat16")
    made = []
    for each in (found, from_the_end):
        (y,), errors = emulator.run(each, emulator.compile(each), x, [weight], bias, 2, seed=3)
        assert not errors
        made.append(y)
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Base::wait_until_empty(cursor);\n    expect", "expect", "race"),
        ("ring.wait_until_full(cursor);", "", "has not landed"),
        ("wait_for_products<1>();", "", "race"),
        ("fence_copy_engine();\n    __syncthreads();", "__syncthreads();", "no fence: the copy engine"),
        ("if (lane < BLOCKS) free", "if (lane == blockIdx.y) free", "nobody goes on"),
        ("if constexpr (BLOCKS > 1) sync_cluster();\n    part", "part", "race"),
    ],
)
def test_finds_what_is_planted(old: str, new: str, said: str, emulator: Emulator) -> None:
    found = plan_of("turned; untied 0 1 264 96 4; tf32", 300, 4, (48, 4, 2))
    x, weight, _ = tensors_of(found.chain, 300)
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, [weight], None, 4)
    assert any(said in error for error in errors), errors


OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]


@pytest.mark.parametrize(
    "text",
    [
        "tied 0 2 256 256 1; bias; gelu; tf32",
        "untied 0 4 192 192 1; turn 1 192 4; tf32",
        "turned; untied 0 1 1024 4096 2; bias; tf32",
        "turned; untied 0 1 192 768 4; bias; relu; tf32",
        "turned; untied 0 1 256 688 16; tf32",
        "turned; untied 0 1 768 192 4; slabs 1; tf32",
    ],
)
def test_the_largest_tilings_compile(text: str, usage_of: UsageOf) -> None:
    """Without products one after the other, and with few registers in memory."""
    assert "gelu" in ACTIVATIONS
    found = list(mapped.tilings(product_of(text), 16384, GPU))
    for tiled in sorted(found, key=lambda t: t.n)[-3:]:
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C75" not in usage.notes, usage
        assert usage.frame <= 16, f"{tiled}: {usage}"


def test_what_maps_cannot_describe_is_left_to_others() -> None:
    for text in (
        "tied 0 1 194 192 1; tf32",  # rows of no whole 16 bytes
        "tied 0 1 192 190 1; tf32",  # rows of y of no whole 16 bytes
        "turned; untied 0 1 192 200 4; tf32",  # columns that runs do not fill
        "tied 0 1 192 192 3; tf32",  # p's that lie apart
        "untied 0 4 192 96 1; turn 4 24 4; tf32",  # runs that others do not fill
        "turned; untied 0 1 192 192 3; tf32",  # groups that take turns in other numbers
        "rank 2; tied 0 1 192 192 1; tf32",
    ):
        assert not list(mapped.tilings(products(Chain.parse(text), "tf32")[0], 16384, GPU)), text
    text = "tied 0 1 192 192 1; tf32"
    assert not list(mapped.tilings(product_of("untied 0 3 64 192 1; slabs 1", "bfloat16"), 16384, GPU))
    for dtype, gpu in (("float32", GPU), ("float64", GPU), ("tf32", Gpu.of(80)), ("tf32", Gpu.of(100))):
        (product,) = products(Chain.parse(text), dtype)
        assert not list(mapped.tilings(product, 16384, gpu))


@pytest.mark.parametrize("outer", [1, 8])
def test_chunks_keep_maps_within_what_the_copy_engine_counts(outer: int) -> None:
    found = plan(Chain.parse(f"tied 0 {outer} 256 1024 1; tf32"), "tf32", 16384, GPU)
    assert [type(p) for p in found.passes] == [Mapped]
    assert found.chunk * outer == 2**31
    assert "\nmap x tf32 256 1 " in found.text() and "\nmap 0 tf32 256 " in found.text()
