"""Three large factors in one pass of clusters: where the planner takes it, what the compilers make of it, and, by
tests/emulator, right results without a race. There two blocks are a cluster, with few warpgroups."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from compiled import UsageOf
from emulator.driver import Array, Emulator, decode, encode
from oracle import kronecker

from factorlayer.device.gpu import Gpu
from factorlayer.kernels import batches
from factorlayer.kernels.gradient import Reduction
from factorlayer.kernels.kronecker import triple
from factorlayer.kernels.kronecker.triple import DTYPES, Triple, TripleBackward
from factorlayer.kernels.kronecker.warpgroups import Pair16Backward, PairSplitBackward
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.cuts import cuts
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import plan
from factorlayer.plan.registry.family import ways
from factorlayer.plan.registry.kronecker import OF_FACTORS

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
MOST_SPILLED = 32  # bytes, of values that are kept for a while
HOPPER = Gpu.of(90)
EPS = {"tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
Sizes = tuple[int, int, int]
SMALL, MEDIUM, LARGE = batches.FEW, batches.SOME, batches.BATCHES[-1]


def chain_of(p: Sizes, q: Sizes, activation: str = "identity") -> Chain:
    return Chain.of(kronecker(p, q), True, activation)


def work_of(chain: Chain, dtype: str) -> Work:
    (work,) = next(iter(cuts(chain, dtype)))
    return work


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [MEDIUM, LARGE])
def test_many_samples_of_a_cube_take_one_pass(dtype: str, batch: int) -> None:
    (found,) = plan(chain_of((64,) * 3, (64,) * 3), dtype, batch, HOPPER).passes
    assert isinstance(found, Triple)
    assert found.shared <= HOPPER.shared
    assert found.cluster == found.split == 8


@pytest.mark.parametrize(
    ("p", "q", "dtype", "arch"),
    [
        ((64,) * 3, (64,) * 3, "bfloat16", 80),
        ((64,) * 3, (64,) * 3, "float64", 90),
        ((64, 64), (64, 64), "bfloat16", 90),
        ((64, 64, 8), (64, 64, 8), "bfloat16", 90),
        ((8, 64, 64), (8, 64, 64), "bfloat16", 90),
        ((64, 64, 63), (64, 64, 64), "bfloat16", 90),
        ((64, 64, 64), (64, 64, 63), "tf32", 90),
    ],
)
def test_other_factors_and_gpus_do_not(p: tuple[int, ...], q: tuple[int, ...], dtype: str, arch: int) -> None:
    chain = Chain.of(LayerSpec("kronecker", p, q, 1), False, "identity")
    assert not any(isinstance(each, Triple) for each in plan(chain, dtype, LARGE, Gpu.of(arch)).passes)


def tiled(p: Sizes, q: Sizes, dtype: str, activation: str = "identity", **tiling: int) -> Plan:
    """By hand, as no plan is: clusters of two blocks, with few warpgroups each."""
    chain = chain_of(p, q, activation)
    found = triple.tile(work_of(chain, dtype), MEDIUM, HOPPER)
    assert found is not None
    return Plan(chain, dtype, MEDIUM, HOPPER, (replace(found, **tiling),))


@pytest.mark.parametrize(
    ("p", "q", "dtype"),
    [
        *(((64, 64, 64), (64, 64, 64), dtype) for dtype in DTYPES),
        *(((48, 64, 32), (48, 64, 32), dtype) for dtype in DTYPES),
        ((84, 64, 64), (84, 64, 64), "bfloat16"),
        ((40, 32, 48), (72, 56, 64), "float16"),
        ((40, 32, 48), (72, 56, 64), "tf32"),
        ((32, 64, 96), (24, 48, 80), "bfloat16"),
        ((32, 64, 96), (24, 48, 80), "tf32"),
    ],
    ids=str,
)
def test_compiles_without_a_spill(p: Sizes, q: Sizes, dtype: str, usage_of: UsageOf) -> None:
    found = triple.tile(work_of(chain_of(p, q), dtype), LARGE, HOPPER)
    assert found is not None and found.shared <= HOPPER.shared
    usage = usage_of(found.source("kernel"), "kernel", "sm_90a", OPTIONS)
    assert "C7512" not in usage.notes
    assert usage.stored <= MOST_SPILLED, usage


class Problem:
    """Inputs of a plan, and what it should make of them."""

    def __init__(self, planned: Plan, batch: int) -> None:
        spec = kronecker(*(tuple(c[i] for c in self.sizes_of(planned)) for i in (0, 1)))
        random = np.random.default_rng(1)
        self.planned, dtype = planned, planned.dtype

        def draw(*shape: int) -> Array:
            return decode(encode(random.standard_normal(shape), dtype), dtype).reshape(shape)

        self.x, self.bias = draw(batch, spec.in_features), draw(spec.out_features)
        self.weights = [decode(encode(draw(q, p) / p**0.5, dtype), dtype).reshape(q, p) for q, p in spec.weight_shapes]

    @staticmethod
    def sizes_of(planned: Plan) -> list[tuple[int, int]]:
        return [(c.p, c.q) for c in sorted(planned.chain.contractions, key=lambda c: c.weight)]

    def right(self) -> Array:
        state = self.x.reshape(-1, *(p for p, _ in self.sizes_of(self.planned)))
        y = np.einsum("nabc,pa,qb,rc->npqr", state, *self.weights, optimize=True).reshape(len(self.x), -1) + self.bias
        return np.maximum(y, 0) if self.planned.chain.activation == "relu" else y

    def run(
        self, emulator: Emulator, x: Array, seed: int, changes: dict[str, str] | None = None
    ) -> tuple[Array, list[str]]:
        kernels = emulator.compile(self.planned, changes)
        outputs, errors = emulator.run(self.planned, kernels, x, self.weights, self.bias, blocks=4, seed=seed)
        return outputs[0].reshape(len(x), -1) if outputs else np.empty((0, 1)), errors


# One buffer and two, several groups, chunks and parts, rows and k's that are padded, blocks with fewer rows and X's
CASES = [
    ((24, 32, 32), (24, 32, 32), "bfloat16", 7, {"groups": 1, "last": 1}),
    ((25, 24, 48), (24, 41, 72), "float16", 5, {"groups": 1, "last": 1, "slots": 4}),
    ((24, 24, 32), (32, 32, 32), "tf32", 5, {"groups": 2, "last": 1, "buffers": 1}),
    ((27, 40, 36), (36, 45, 72), "tf32", 3, {"groups": 1, "last": 1, "slots": 4, "buffers": 1}),
    ((32, 24, 24), (24, 24, 24), "tf32", 9, {"groups": 1, "last": 2, "buffers": 2}),
    ((24, 32, 32), (24, 32, 32), "bfloat16", 9, {"groups": 3, "last": 0}),
    ((25, 24, 32), (32, 25, 32), "tf32", 7, {"groups": 3, "last": 0, "buffers": 1}),
]


@pytest.mark.parametrize(("p", "q", "dtype", "batch", "tiling"), CASES)
def test_is_right_in_any_order_and_keeps_samples_apart(
    p: Sizes, q: Sizes, dtype: str, batch: int, tiling: dict[str, int], emulator: Emulator
) -> None:
    problem = Problem(tiled(p, q, dtype, "relu", cluster=2, **tiling), batch)
    y, errors = problem.run(emulator, problem.x, 1)
    assert not errors
    right = problem.right()
    assert np.linalg.norm(y - right) <= 6 * EPS[dtype] * np.linalg.norm(right)

    broken = problem.x.copy()
    sick = batch // 2
    broken[sick] = np.nan
    found, errors = problem.run(emulator, broken, 2)
    assert not errors
    assert np.isnan(found[sick]).all()
    others = np.arange(batch) != sick
    np.testing.assert_array_equal(found[others], y[others])


SYNC = "sync_consumers<kMakers>();\n      make_middles"
RELEASE = "if (tile + TILERS >= tiles) release(buffer);"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_bytes(empty(buffer, row / kSentOfShare), phase);", ";", "race"),
        ("wait_for_bytes(full(buffer), turn / BUFFERS & 1);", "", "has not landed"),
        (f"fence_copy_engine();\n      {SYNC}", SYNC, "no fence"),
        ("sync_warpgroup(warpgroup);  // the last rows have left", "", "race"),
        (RELEASE, RELEASE.replace(") release", " && sample == blockIdx.x) release"), "nobody goes on"),
    ],
)
def test_finds_what_is_missing(old: str, new: str, said: str, emulator: Emulator) -> None:
    problem = Problem(tiled((24, 32, 32), (24, 32, 32), "bfloat16", cluster=2, groups=1, last=1, buffers=1), 7)
    _, errors = problem.run(emulator, problem.x, 1, {old: new})
    assert any(said in error for error in errors), errors


def backward_of(p: Sizes, q: Sizes, dtype: str, cluster: int = 2, **tiling: int) -> Plan:
    """By hand, as no plan is: as many blocks as two clusters have."""
    chain = replace(Chain.of(kronecker(p, q), False, "identity"), backward=True)
    gpu = replace(HOPPER, sms=2 * cluster)
    modes = tuple(Mode(((i, *sizes),)) for i, sizes in enumerate(zip(q, p, strict=True)))
    first, behind = triple.tile_backward(modes, 1, dtype, MEDIUM, gpu)
    first = replace(first, cluster=cluster, **tiling)
    return Plan(chain, dtype, MEDIUM, gpu, (first, behind, Reduction(behind)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("p", "q"), [((64,) * 3, (64,) * 3), ((48, 24, 64), (32, 32, 48)), ((64, 48, 32), (48, 24, 64))], ids=str
)
def test_all_gradients_of_many_samples_are_two_passes_and_their_sums(
    p: Sizes, q: Sizes, dtype: str, usage_of: UsageOf
) -> None:
    modes = tuple(Mode(((i, *sizes),)) for i, sizes in enumerate(zip(q, p, strict=True)))
    found = ways(OF_FACTORS, modes, 1, dtype, LARGE, HOPPER)
    first, behind, reduction = next(passes for passes in found if isinstance(passes[0], TripleBackward))
    assert isinstance(reduction, Reduction)
    assert isinstance(behind, PairSplitBackward if dtype == "tf32" else Pair16Backward)
    assert first.cluster == first.split == 8 and 0 < behind.us < first.us
    assert reduction.of.weights == sum(a * b for a, b in zip(p, q, strict=True)) == first.weights
    for each in (first, behind):
        assert each.shared <= HOPPER.shared
        usage = usage_of(each.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C7512" not in usage.notes
        assert usage.stored <= MOST_SPILLED, usage


@pytest.mark.parametrize(
    ("p", "q", "dtype", "batch", "arch"),
    [
        ((64,) * 3, (64,) * 3, "bfloat16", SMALL, 90),
        ((64,) * 3, (64,) * 3, "bfloat16", LARGE, 80),
        ((64,) * 3, (64,) * 3, "float64", LARGE, 90),
        ((64, 64, 64), (64, 64, 48), "bfloat16", LARGE, 90),
        ((64, 64, 64), (64, 60, 64), "bfloat16", LARGE, 90),
        ((40, 64, 64), (64, 64, 64), "float16", LARGE, 90),
        ((64, 64, 80), (64, 64, 80), "bfloat16", LARGE, 90),
    ],
)
def test_other_gradients_go_by_visits(p: Sizes, q: Sizes, dtype: str, batch: int, arch: int) -> None:
    chain = replace(Chain.of(kronecker(p, q), False, "identity"), backward=True)
    try:
        found = plan(chain, dtype, batch, Gpu.of(arch))
    except PlanError:
        return
    assert not any(isinstance(p, TripleBackward) for p in found.passes)


# Several groups, warpgroups behind them and slots, factors that no power of two divides, blocks with fewer X's
BACKWARD = [
    ((32, 32, 32), (32, 32, 32), "bfloat16", 5, {"groups": 1, "last": 1, "depth": 2, "buffers": 2}),
    ((48, 24, 64), (32, 32, 48), "float16", 5, {"groups": 1, "last": 2, "slots": 2}),
    ((64, 48, 32), (48, 24, 64), "bfloat16", 7, {"groups": 2, "last": 1}),
    ((32, 32, 32), (32, 32, 32), "tf32", 5, {"depth": 3, "slots": 2, "shares": 2}),
    ((32, 32, 32), (48, 32, 32), "tf32", 3, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("p", "q", "dtype", "batch", "tiling"), BACKWARD)
def test_all_gradients_are_right_and_keep_samples_apart(
    p: Sizes, q: Sizes, dtype: str, batch: int, tiling: dict[str, int], emulator: Emulator
) -> None:
    planned = backward_of(p, q, dtype, **tiling)
    problem, kernels = Problem(planned, batch), emulator.compile(planned)
    random = np.random.default_rng(2)
    grad = decode(encode(random.standard_normal((batch, math.prod(q))), dtype), dtype).reshape(batch, -1)
    a, b, c = problem.weights
    x, before = problem.x, np.zeros(0)
    sick = batch // 2
    fine = np.arange(batch) != sick
    for seed, value in enumerate((None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[sick, 1], grad[sick, 2] = value, -value
        outputs, errors = emulator.run(planned, kernels, x, [a, b, c, grad], None, blocks=4, seed=seed)
        assert not errors
        grad_x, grad_weights = outputs[-2].reshape(batch, -1), outputs[-1]
        if value is not None:
            assert not np.isfinite(grad_weights).all() and not np.isfinite(grad_x[sick]).all()
            np.testing.assert_array_equal(grad_x[fine], before[fine])
            continue
        before, state, behind = grad_x, x.reshape(batch, *p), grad.reshape(batch, *q)
        at = dict(optimize=True)
        right = [
            np.einsum("npqr,pa,qb,rc->nabc", behind, a, b, c, **at),
            np.einsum("npqr,nabc,qb,rc->pa", behind, state, b, c, **at),
            np.einsum("npqr,nabc,pa,rc->qb", behind, state, a, c, **at),
            np.einsum("npqr,nabc,pa,qb->rc", behind, state, a, b, **at),
        ]
        ends = np.cumsum([w.size for w in problem.weights])
        parts = [grad_x, *np.split(grad_weights, ends[:-1])]
        for part, expected in zip(parts, right, strict=True):
            error = np.linalg.norm(part.ravel() - expected.ravel())
            assert error <= 6 * EPS[dtype] * np.linalg.norm(expected)


GATHERED = "sync();  // all of G is there, and the last dT has left"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_bytes(Base::full(buffer), turn / BUFFERS & 1);", "", "has not landed"),
        (f"fence_copy_engine();\n        {GATHERED}", GATHERED, "no fence"),
        (GATHERED, "", "race"),
        ("sync_warpgroup(warpgroup);  // nobody reads G any more", "", "race"),
    ],
)
def test_finds_what_is_missing_backward(old: str, new: str, said: str, emulator: Emulator) -> None:
    planned = backward_of((32, 32, 32), (32, 32, 32), "bfloat16", groups=1, last=1)
    problem = Problem(planned, 5)
    grad = problem.x[::-1]
    planned = replace(planned, passes=planned.passes[:1])
    kernels = emulator.compile(planned, {old: new})
    _, errors = emulator.run(planned, kernels, problem.x, [*problem.weights, grad], None, blocks=4, seed=1)
    assert any(said in error for error in errors), errors
