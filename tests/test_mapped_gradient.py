"""kernels/product/mapped_gradient.py: which tilings there are, that they compile, and that they are right on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiled import UsageOf
from emulator.driver import Array, Emulator, decode, encode

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import NO_SUM, Reduction, States
from factorlayer.kernels.product import mapped_gradient
from factorlayer.kernels.product.mapped_gradient import MappedGradient
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan.plan import Plan

Sizes = tuple[int, int, int, int, bool]  # outer, p, q, inner, tied
Tiling = tuple[int, int, int, int]  # warpgroups of consumers, parts of each, n, chunks for a block
GPU = Gpu.of(90)
EPS = {"tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SUM_EPS = 2.0**-23


def plan_of(sizes: Sizes, dtype: str, batch: int, processors: int, tiling: Tiling, states: States = NO_SUM) -> Plan:
    *numbers, tied = sizes
    c, gpu = Contraction(0, *numbers, tied=tied), Gpu(90, processors, 232448)
    summing = MappedGradient(c, dtype, *tiling, gpu, batch, states=states)
    assert summing.fits
    passes = (summing,) if summing.is_whole else (summing, Reduction(summing))
    return Plan(Chain((c,), gradient=True), dtype, batch, gpu, passes)


def draw(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return decode(encode(np.random.default_rng(seed).standard_normal(shape), dtype), dtype).reshape(shape)


def right(x: Array, grad: Array, tied: bool) -> Array:
    """Of states [samples, outer, features, inner]."""
    with np.errstate(invalid="ignore"):
        return np.einsum("noqi,nopi->qp" if tied else "noqi,nopi->oqp", grad, x).ravel()


# Of what lies behind the mode: slabs that it does not fill, by all numbers of steps, and rows of outer. Of rows:
# chunks, slabs and tiles that they do not fill, and groups. Both with p's that begin anywhere or by whole sectors in
# the weight (the latter in 16 bits too, of one block), one warpgroup and three, twice 64 q's, several blocks for a
# tile, and rings that turn.
CASES: list[tuple[Sizes, str, int, int, Tiling]] = [
    ((1, 64, 64, 32, True), "tf32", 40, 1, (1, 1, 64, 1)),
    ((3, 45, 70, 44, True), "tf32", 9, 2, (2, 1, 48, 1)),
    ((2, 130, 200, 12, True), "tf32", 20, 4, (1, 2, 80, 1)),
    ((1, 101, 61, 68, True), "tf32", 30, 6, (1, 1, 64, 2)),
    ((1, 64, 72, 64, True), "bfloat16", 40, 2, (1, 1, 64, 1)),
    ((2, 100, 140, 104, True), "bfloat16", 20, 2, (3, 1, 112, 1)),
    ((5, 33, 270, 24, True), "float16", 11, 6, (2, 2, 48, 1)),
    ((1, 63, 100, 152, True), "float16", 25, 3, (2, 1, 64, 1)),
    ((7, 36, 64, 8, True), "bfloat16", 10, 1, (1, 1, 48, 16)),
    ((1, 72, 136, 1, True), "bfloat16", 700, 2, (1, 1, 80, 1)),
    ((3, 40, 200, 1, True), "float16", 90, 2, (2, 1, 48, 1)),
    ((1, 264, 72, 1, True), "bfloat16", 333, 6, (1, 2, 96, 1)),
    ((3, 104, 136, 1, False), "float16", 200, 6, (3, 1, 112, 1)),
    ((2, 72, 264, 1, False), "bfloat16", 470, 4, (2, 2, 48, 2)),
]


@pytest.mark.parametrize(("sizes", "dtype", "batch", "processors", "tiling"), CASES, ids=str)
def test_is_right_in_any_order(
    sizes: Sizes, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    """And infinite where it has to be."""
    outer, p, q, inner, tied = sizes
    found = plan_of(sizes, dtype, batch, processors, tiling)
    kernels = emulator.compile(found)
    x, grad = draw((batch, outer, p, inner), dtype, 1), draw((batch, outer, q, inner), dtype, 2)
    for sick in (False, True):
        if sick:
            x[batch // 2, 0, p // 2, inner - 1] = np.inf
        outputs, errors = emulator.run(
            found, kernels, x.reshape(batch, -1), [grad.reshape(batch, -1)], None, processors
        )
        assert not errors
        expected = right(x, grad, tied)
        fine = np.isfinite(expected)
        np.testing.assert_array_equal(outputs[-1][~fine], expected[~fine])
        error = np.linalg.norm(outputs[-1][fine] - expected[fine]) / np.linalg.norm(expected[fine])
        assert error <= 2 * EPS[dtype] + SUM_EPS * (batch * outer * inner) ** 0.5


def test_cases_have_one_block_for_a_tile_and_several() -> None:
    assert {(case[0][3] == 1, len(plan_of(*case).passes)) for case in CASES} == {
        (turned, passes) for turned in (False, True) for passes in (1, 2)
    }


@pytest.mark.parametrize(("of_x", "of_grad"), [(True, True), (False, True), (True, False)])
def test_terms_have_states_of_their_own(of_x: bool, of_grad: bool, emulator: Emulator) -> None:
    terms, batch, outer, p, q, inner = 3, 10, 2, 40, 72, 36
    states = States(terms, of_x * outer * p * inner, of_grad * outer * q * inner)
    found = plan_of((outer, p, q, inner, True), "tf32", batch, 6, (1, 1, 48, 1), states)
    x = draw((terms if of_x else 1, batch, outer, p, inner), "tf32", 1)
    grad = draw((terms if of_grad else 1, batch, outer, q, inner), "tf32", 2)
    outputs, errors = emulator.run(
        found, emulator.compile(found), x.reshape(batch, -1), [grad.reshape(batch, -1)], None, 6
    )
    assert not errors
    expected = np.concatenate([right(x[t * of_x], grad[t * of_grad], True) for t in range(terms)])
    assert np.linalg.norm(outputs[-1] - expected) <= 2 * EPS["tf32"] * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Base::wait_until_empty(cursor);\n    expect", "expect", "race"),
        ("ring.wait_until_full(cursor);", "", "has not landed"),
        ("wait_for_products<1>();", "wait_for_products<2>();", "race"),
        ("fence_copy_engine();\n    __syncthreads();", "__syncthreads();", "no fence: the copy engine"),
        ("sync_consumers<kConsumers>();", "", "race"),
    ],
)
def test_finds_what_is_planted(old: str, new: str, said: str, emulator: Emulator) -> None:
    found = plan_of((1, 101, 200, 72, True), "bfloat16", 40, 1, (2, 2, 112, 1))
    tensors = draw((40, 101 * 72), "bfloat16", 1), [draw((40, 200 * 72), "bfloat16", 2)]
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), *tensors, None, 1)
    assert any(said in error for error in errors), errors


OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]


@pytest.mark.parametrize("dtype", mapped_gradient.DTYPES)
@pytest.mark.parametrize(("p", "inner"), [(255, 104), (256, 104), (1000, 1)])
def test_the_largest_tilings_compile(dtype: str, p: int, inner: int, usage_of: UsageOf) -> None:
    """Without products one after the other, and without registers in memory."""
    c = Contraction(0, 1, p, 1000, inner, tied=True)
    largest: dict[tuple[int, int], MappedGradient] = {}
    for tiled in mapped_gradient.tilings(c, dtype, 16384, GPU):
        shape = tiled.consumers, tiled.parts
        if shape not in largest or tiled.n > largest[shape].n:
            largest[shape] = tiled
    assert len(largest) == (0 if dtype == "tf32" and inner == 1 else len(mapped_gradient.SHAPES))
    for tiled in largest.values():
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C75" not in usage.notes, usage
        assert not usage.frame, f"{tiled}: {usage}"


def test_what_maps_cannot_describe_is_left_to_others() -> None:
    left = [
        ("tf32", (1, 64, 64, 6, True)),  # runs of no whole 16 bytes
        ("bfloat16", (1, 64, 64, 12, True)),
        ("bfloat16", (1, 60, 64, 1, True)),
        ("bfloat16", (4, 64, 60, 1, False)),
        ("tf32", (1, 64, 64, 1, True)),  # what the matrix unit does not turn
        ("bfloat16", (1, 64, 64, 8, False)),  # groups that take turns
        ("float32", (1, 64, 64, 64, True)),  # products of parts
        ("float64", (1, 64, 64, 64, True)),
        ("bfloat16", (1, 24, 24, 64, True)),  # tiles that would be empty
    ]
    for dtype, (*numbers, tied) in left:
        assert mapped_gradient.tile(Contraction(0, *numbers, tied=tied), dtype, 4096, GPU) is None, (dtype, numbers)
    c = Contraction(0, 1, 64, 64, 64, tied=True)
    assert mapped_gradient.tile(c, "bfloat16", 4096, GPU)
    assert mapped_gradient.tile(replace(c, inner=1), "bfloat16", 4096, GPU, States(2, 64, 64)) is None
    assert mapped_gradient.tile(c, "bfloat16", 4096, Gpu.of(80)) is None
