"""kernels/product/mapped_columns.py: which tilings there are, that they compile, and that they are right on a CPU."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from compiled import UsageOf
from emulator.driver import Array, Emulator, decode, encode

from factorlayer.device.gpu import Gpu
from factorlayer.kernels import tiling
from factorlayer.kernels.product import mapped_columns
from factorlayer.kernels.product.mapped_columns import MappedColumns
from factorlayer.kernels.work import Inputs, Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.cuts import works_of
from factorlayer.plan.plan import Plan

Tiling = tuple[int, ...]  # n, groups, down, parts, and terms of a block
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # p's and q's
GPU = Gpu.of(90)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def draw(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) * scale
    return decode(encode(values, dtype), dtype).reshape(shape)


def plan_of(
    sizes: Sizes,
    rank: int,
    modes: Sequence[Sequence[int]],
    at: int,
    dtype: str,
    processors: int,
    tiling_of: Tiling,
    **more,
) -> Plan:
    """A layer's passes, one mode each, which may be several factors as one, in the order of `modes`: that with number
    `at` is by columns, others are resident."""
    gpu = Gpu(90, processors, 232448)
    chain = replace(Chain.of(LayerSpec("kronecker", *sizes, rank), False, "identity"), **more)
    sorted_modes = sorted(modes)
    taken = tuple(Mode(tuple((i, sizes[1][i], sizes[0][i]) for i in mode)) for mode in sorted_modes)
    passes = []
    for number, work in enumerate(works_of(chain, dtype, taken, [[sorted_modes.index(mode)] for mode in modes])):
        if number != at:
            passes.append(tiling.tile(work, 64, gpu))
            continue
        made = MappedColumns(work, gpu, *tiling_of)
        assert made in set(mapped_columns.tilings(work, gpu))
        passes.append(made)
    return Plan(chain, dtype, 64, gpu, tuple(passes))


def right(x: Array, weights: Sequence[Array], sizes: Sizes) -> Array:
    letters = string.ascii_lowercase
    p, q = letters[: len(weights)], letters[len(weights) : 2 * len(weights)]
    factors = ",".join(f"{b}{a}" for a, b in zip(p, q, strict=True))
    with np.errstate(invalid="ignore"):
        y = sum(
            np.einsum(f"z{p},{factors}->z{q}", x.reshape(len(x), *sizes[0]), *(w[term] for w in weights), optimize=True)
            for term in range(len(weights[0]))
        )
    return y.reshape(len(x), -1)


# One group, two and three, warpgroups beside each other by q's, twice 64 q's of each, blocks that share q's;
# p's, q's, columns and chunks that they do not fill; rings that turn. Of sums: a state for each term, made by blocks
# that have all weights or one term's, of x and of terms' own states, and all terms added up. Several factors as one.
CASES: list[tuple[Sizes, int, list[list[int]], int, str, int, int, Tiling]] = [
    (((40, 72), (48, 72)), 1, [[0], [1]], 0, "bfloat16", 5, 2, (72, 1, 1, 1)),
    (((3, 100, 104), (3, 130, 104)), 1, [[1], [2], [0]], 0, "float16", 3, 3, (104, 1, 3, 1)),
    (((2, 25, 200), (2, 90, 200)), 1, [[1], [2], [0]], 0, "bfloat16", 4, 2, (64, 1, 2, 1)),
    (((33, 280), (140, 280)), 1, [[0], [1]], 0, "bfloat16", 4, 2, (64, 2, 1, 1)),
    (((70, 264), (150, 264)), 1, [[0], [1]], 0, "float16", 3, 2, (64, 3, 1, 2)),
    (((56, 40), (130, 40)), 1, [[1], [0]], 1, "bfloat16", 9, 3, (40, 1, 1, 1)),
    (((40, 72), (48, 80)), 3, [[0], [1]], 0, "bfloat16", 4, 2, (72, 1, 1, 1, 3)),
    (((40, 72), (48, 80)), 3, [[0], [1]], 0, "float16", 4, 6, (72, 1, 1, 1, 1)),
    (((40, 72), (48, 80)), 2, [[1], [0]], 1, "bfloat16", 5, 2, (80, 1, 1, 1, 2)),
    (((5, 40, 72), (5, 80, 72)), 2, [[2], [1], [0]], 1, "float16", 3, 4, (72, 2, 2, 1, 2)),
    (((5, 40, 72), (5, 80, 72)), 2, [[2], [1], [0]], 1, "bfloat16", 3, 4, (72, 1, 1, 1, 1)),
    (((5, 8, 72), (6, 8, 72)), 1, [[0, 1], [2]], 0, "float16", 4, 2, (72, 1, 1, 1)),
    (((5, 8, 72), (6, 8, 72)), 2, [[2], [0, 1]], 1, "bfloat16", 4, 2, (72, 1, 1, 1, 2)),
    (((5, 8, 72), (6, 8, 72)), 2, [[2], [0, 1]], 1, "float16", 4, 2, (72, 1, 1, 1, 2)),
    (((5, 8, 72), (6, 8, 72)), 2, [[0, 1], [2]], 0, "float16", 4, 4, (72, 1, 1, 1, 1)),
]


@pytest.mark.parametrize(("sizes", "rank", "modes", "at", "dtype", "batch", "processors", "tiled"), CASES, ids=str)
def test_is_right_in_any_order_and_keeps_samples_apart(
    sizes: Sizes,
    rank: int,
    modes: list[list[int]],
    at: int,
    dtype: str,
    batch: int,
    processors: int,
    tiled: Tiling,
    emulator: Emulator,
) -> None:
    found = plan_of(sizes, rank, modes, at, dtype, processors, tiled)
    kernels = emulator.compile(found)
    x = draw((batch, int(np.prod(sizes[0]))), dtype)
    weights = [draw((rank, q, p), dtype, p**-0.5) for p, q in zip(*sizes, strict=True)]
    outputs, errors = emulator.run(found, kernels, x, weights, None, processors)
    assert not errors
    y, wanted = outputs[-1].reshape(batch, -1), right(x, weights, sizes)
    assert np.linalg.norm(y - wanted) <= 3 * EPS[dtype] * np.linalg.norm(wanted)

    sick = batch // 2
    x[sick] = np.nan
    outputs, errors = emulator.run(found, kernels, x, weights, None, processors, seed=2)
    assert not errors
    broken, others = outputs[-1].reshape(batch, -1), np.arange(batch) != sick
    assert np.isnan(broken[sick]).all()
    np.testing.assert_array_equal(broken[others], y[others])


def test_a_bias_and_an_activation_are_behind_the_sums(emulator: Emulator) -> None:
    sizes = (40, 72), (70, 72)
    found = plan_of(sizes, 1, [[1], [0]], 1, "bfloat16", 2, (72, 2, 1, 2), bias=True, activation="relu")
    x, bias = draw((5, 40 * 72), "bfloat16"), draw((70 * 72,), "bfloat16")
    weights = [draw((1, q, p), "bfloat16", p**-0.5) for p, q in zip(*sizes, strict=True)]
    outputs, errors = emulator.run(found, emulator.compile(found), x, weights, bias, 2)
    assert not errors
    wanted = np.maximum(right(x, weights, sizes) + bias, 0)
    assert np.linalg.norm(outputs[-1].reshape(5, -1) - wanted) <= 3 * EPS["bfloat16"] * np.linalg.norm(wanted)


def test_products_of_small_weights_are_scaled(emulator: Emulator) -> None:
    """Each term by itself."""
    sizes = (5, 8, 72), (6, 8, 72)
    found = plan_of(sizes, 2, [[2], [0, 1]], 1, "float16", 2, (72, 1, 1, 1, 2))
    x = draw((4, 5 * 8 * 72), "float16")
    weights = [draw((2, q, p), "float16", p**-0.5) for p, q in zip(*sizes, strict=True)]
    for term, scale in enumerate((2.0**-9, 2.0**-10)):
        for weight in weights[:2]:
            weight[term] = decode(encode(weight[term] * scale, "float16"), "float16").reshape(weight[term].shape)
        weights[2][term] *= 2.0**12
    outputs, errors = emulator.run(found, emulator.compile(found), x, weights, None, 2)
    assert not errors
    wanted = right(x, weights, sizes)
    assert np.linalg.norm(outputs[-1].reshape(4, -1) - wanted) <= 4 * EPS["float16"] * np.linalg.norm(wanted)


@pytest.mark.parametrize("p", [48, 50])
def test_weights_may_lie_the_other_way_round(p: int, emulator: Emulator) -> None:
    work = Work(3, (p,), 40, ((0, Mode(((0, 72, p),))),), "float16", transposed=True)
    gpu = Gpu(90, 2, 232448)
    made = MappedColumns(work, gpu, 40, 1, 2, 1)
    found = Plan(Chain.parse(f"tied 0 3 {p} 72 40"), "float16", 64, gpu, (made,))
    x, weight = draw((4, 3, p, 40), "float16"), draw((p, 72), "float16", p**-0.5)
    outputs, errors = emulator.run(found, emulator.compile(found), x.reshape(4, -1), [weight], None, 2)
    assert not errors
    wanted = np.einsum("nopi,pq->noqi", x, weight).ravel()
    assert np.linalg.norm(outputs[-1].ravel() - wanted) <= 2 * EPS["float16"] * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Base::wait_until_empty(cursor);\n    expect", "expect", "race"),
        ("if (t == 0 || kHeld > 1) ring.wait_until_full(cursor);", "", "has not landed"),
        ("wait_for_products<0>();\n    UNROLL", "UNROLL", "nobody goes on"),
        ("fence_copy_engine();\n    __syncthreads();", "__syncthreads();", "no fence"),
        ("      __syncwarp();\n      each_piece(first", "      each_piece(first", "race"),
    ],
)
def test_finds_what_is_planted(old: str, new: str, said: str, emulator: Emulator) -> None:
    sizes = (70, 264), (150, 264)
    found = plan_of(sizes, 1, [[0], [1]], 0, "bfloat16", 1, (64, 2, 1, 2))
    found = replace(found, passes=found.passes[:1])
    weights = [draw((1, q, p), "bfloat16") for p, q in zip(*sizes, strict=True)]
    _, errors = emulator.run(
        found, emulator.compile(found, {old: new}), draw((4, 70 * 264), "bfloat16"), weights, None, 1
    )
    assert any(said in error for error in errors), errors


OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]


@pytest.mark.parametrize(("dtype", "activation"), [("bfloat16", "identity"), ("float16", "gelu")])
def test_the_largest_tilings_compile(dtype: str, activation: str, usage_of: UsageOf) -> None:
    """Without products one after the other, and without registers in memory."""
    work = Work(1, (96,), 1024, ((0, Mode(((0, 248, 96),))),), dtype, bias=True, activation=activation)
    largest: dict[tuple[int, ...], MappedColumns] = {}
    for tiled in mapped_columns.tilings(work, GPU):
        shape = tiled.groups, tiled.down, tiled.parts
        if shape not in largest or tiled.n > largest[shape].n:
            largest[shape] = tiled
    assert len(largest) == len(mapped_columns.SHAPES)
    for tiled in largest.values():
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C75" not in usage.notes, usage
        assert not usage.frame, f"{tiled}: {usage}"


def test_what_maps_cannot_describe_is_left_to_others() -> None:
    work = Work(1, (64,), 64, ((0, Mode(((0, 64, 64),))),), "bfloat16")
    assert mapped_columns.tile(work, 64, GPU)
    for other in (
        replace(work, inner=68),  # runs of no whole 16 bytes
        replace(work, inner=1),
        replace(work, inner=16),  # products that would be mostly empty
        replace(work, dtype="tf32"),  # what the matrix unit does not turn
        replace(work, dtype="float32"),
        replace(work, sizes=(64, 2), steps=((0, Mode(((0, 64, 64),))), (1, Mode(((1, 2, 2),))))),
        replace(work, sizes=(264,), steps=((0, Mode(((0, 64, 264),))),)),
        replace(work, sizes=(16,), steps=((0, Mode(((0, 64, 16),))),)),
        replace(work, inputs=Inputs((32 * 64, 32 * 64), 2)),
        replace(work, slope=True, activation="tanh"),
    ):
        assert mapped_columns.tile(other, 64, GPU) is None, other
    assert mapped_columns.tile(work, 64, Gpu.of(80)) is None
