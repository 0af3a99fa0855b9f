"""All gradients of any list of tied contractions: what the kernels of a plan make, by the emulator, against float64."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from emulator.driver import Emulator
from test_emulator import EPS, Array, all_gradients_of, drawing, kronecker, terms_apart

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES, FEW, SOME
from factorlayer.kernels.chain_backward import ChainBackward
from factorlayer.kernels.factor_gradients import FactorGradients
from factorlayer.kernels.gradient import Gradient, OfVisit, Reduction, Reductions
from factorlayer.kernels.product.whole_kronecker import KroneckerGradients
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.tiling import tile
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan import planner
from factorlayer.plan import visits as visits_module
from factorlayer.plan.cuts import modes_of, works_of
from factorlayer.plan.plan import Plan
from factorlayer.plan.visits import are_worth_it
from factorlayer.plan.visits import visits as visits_of


def visits(spec: LayerSpec, dtype: str, batch: int, gpu: Gpu, count: int | None = None) -> Plan:
    """The fastest plan by this family alone, of so many visits."""
    chain, computed = planner.parsed(all_gradients_of(spec).text, dtype)
    found = visits_of(chain[0], computed, batch, gpu, count or 0)
    assert found is not None
    return Plan(chain[0], computed, batch, gpu, found)


def gradients_of(outputs: list[Array], found: Plan, spec: LayerSpec) -> list[Array]:
    """Of x and of all weights, from what the passes have written."""
    sizes = [int(np.prod(shape)) for shape in spec.weight_shapes]
    weights, grad_x = np.full(sum(sizes), np.nan), np.empty(0)
    passes = (p for p in found.passes if p.leaves not in ("prepared", "begun"))
    for planned, output in zip(passes, outputs, strict=True):
        if planned.writes == "y":
            grad_x = output
        if isinstance(planned, KroneckerGradients):
            weights[:] = output
        of = planned.of if isinstance(planned, Reductions) else (planned,)
        for part in of:
            if isinstance(part, Reduction | FactorGradients) and part.writes == "w":
                end = part.begin + (part.of.weights if isinstance(part, Reduction) else part.weights)
                weights[part.begin : end] = output[part.begin : end]
    return [grad_x, *np.split(weights, np.cumsum(sizes)[:-1])]


def right_gradients(spec: LayerSpec, x: Array, weights: list[Array], grad: Array) -> list[Array]:
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
    found = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
    return [each.numpy().ravel() for each in found]


def check_gradients(
    made: list[Array], spec: LayerSpec, x: Array, weights: list[Array], grad: Array, dtype: str
) -> None:
    """Against float64, and infinite or NaN where they have to be."""
    right = right_gradients(spec, x, weights, grad)
    sizes = [np.sqrt(each) for each in right_gradients(spec, x**2, [w**2 for w in weights], grad**2)]  # of sums
    for part, expected, size in zip(made, right, sizes, strict=True):
        finite = np.isfinite(expected)
        assert not np.isfinite(part[~finite]).any()
        # Sums are rounded at every step in these
        terms = len(x) * spec.multiply_adds() / part.size if dtype in ("float32", "float64") else len(weights)
        allowed = 4 * EPS[dtype] * np.sqrt(max(terms, len(weights))) * np.linalg.norm(size[finite])
        assert np.linalg.norm(part[finite] - expected[finite]) <= allowed


def check(spec: LayerSpec, found: Plan, batch: int, emulator: Emulator) -> None:
    draw = drawing(found.dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    check_of(spec, found, x, weights, grad, (batch // 2, batch - 1), emulator)


def check_of(
    spec: LayerSpec, found: Plan, x: Array, weights: list[Array], grad: Array, sick: tuple[int, int], emulator: Emulator
) -> None:
    """Infinite and NaN where they have to be, which no other sample is; and the same bits for any order of blocks.

    ``sick`` are the samples whose input and whose gradient get an infinity, then a NaN.
    """
    kernels = emulator.compile(found)
    fine = [n for n in range(len(x)) if n not in sick]
    before: list[Array] = []
    for seed, value in enumerate((None, None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[sick[0], 1 % x.shape[1]], grad[sick[1], 2 % grad.shape[1]] = value, -value
        outputs, errors = emulator.run(found, kernels, x, [*weights, grad], None, blocks=2, seed=seed)
        assert not errors
        made = gradients_of(outputs, found, spec)
        check_gradients(made, spec, x, weights, grad, found.dtype)
        if seed == 1:
            for part, other in zip(made, before, strict=True):
                np.testing.assert_array_equal(part, other)
        before = before or made
        np.testing.assert_array_equal(made[0].reshape(len(x), -1)[fine], before[0].reshape(len(x), -1)[fine])


CASES = [
    # in, out, rank, dtype, batch, visits (None: as many as are the fastest)
    ((12, 12, 12), (12, 12, 12), 1, "bfloat16", 3, 1),
    ((7, 9), (5, 11), 1, "float16", 9, 1),
    ((33,), (20,), 1, "tf32", 21, 1),
    ((4, 3, 5, 6), (2, 7, 5, 3), 1, "float32", 5, 1),
    ((17, 4, 7), (17, 4, 7), 1, "float64", 4, None),
    ((6, 10), (10, 6), 3, "bfloat16", 7, 1),
    ((9, 14), (12, 5), 2, "float32", 5, 2),
    ((5, 6, 7), (7, 6, 5), 2, "float64", 5, 2),
    ((20, 3, 24), (11, 5, 24), 1, "bfloat16", 5, 2),
    ((10, 12, 9), (10, 12, 9), 3, "float16", 3, 3),
    ((2, 3, 2, 19), (2, 3, 2, 19), 2, "tf32", 6, 2),
    ((10, 12, 9), (6, 12, 17), 1, "tf32", 5, 3),
    ((40, 36), (36, 40), 1, "float32", 5, 2),
    ((90, 7), (131, 5), 1, "float16", 3, 2),
    ((131, 3), (90, 3), 2, "float64", 2, 2),
    ((40, 1), (40, 8), 1, "float32", 5, 1),
    ((40, 8), (40, 1), 1, "bfloat16", 5, 1),
    ((4, 5, 6, 3), (5, 4, 3, 6), 1, "float16", 5, 4),
    ((9, 2, 10, 3), (4, 7, 2, 9), 2, "float64", 3, 4),
    ((3, 12, 4, 5), (3, 12, 4, 5), 3, "bfloat16", 3, 4),
    ((2, 5, 2, 3, 2), (3, 2, 4, 2, 5), 2, "float32", 3, 4),
    ((2, 3, 2, 3, 2, 2), (3, 2, 3, 2, 2, 3), 1, "tf32", 5, 4),
    ((8, 24), (8, 24), 2, "float32", 5, 1),
    ((12, 3, 9), (2, 12, 4), 2, "bfloat16", 5, 3),
    ((5, 24, 8), (5, 40, 8), 1, "bfloat16", 3, 1),  # two rows of half a step are one, and one is left
    ((2, 20, 7), (2, 28, 7), 2, "float16", 5, 1),
]


# Each on one of two GPUs, in turn for each dtype
ON_A_GPU = [(*case, (80, 90)[sum(other[3] == case[3] for other in CASES[:i]) % 2]) for i, case in enumerate(CASES)]


def test_dtypes_and_numbers_of_visits_meet_both_gpus() -> None:
    for at, least in ((3, 5), (5, 4)):
        met = collections.Counter({(case[at], case[-1]): case[at] for case in ON_A_GPU if case[at]}.values())
        assert len(met) >= least and {*met.values()} == {2}


@pytest.mark.parametrize(("sizes_in", "sizes_out", "rank", "dtype", "batch", "count", "arch"), ON_A_GPU, ids=str)
def test_visits_are_right(
    sizes_in: tuple[int, ...],
    sizes_out: tuple[int, ...],
    rank: int,
    dtype: str,
    batch: int,
    count: int | None,
    arch: int,
    emulator: Emulator,
) -> None:
    spec = dataclasses.replace(kronecker(sizes_in, sizes_out), rank=rank)
    found = visits(spec, dtype, 1024, dataclasses.replace(Gpu.of(arch), sms=2), count)
    check(spec, found, batch, emulator)


@pytest.mark.parametrize(
    ("sizes", "batch", "arch"),
    [((8,) * 4, 5, 90), ((4,) * 5, 9, 80), ((4, 8, 8, 8, 4), 3, 90), ((8, 8, 4, 8, 8), 2, 80)],
    ids=str,
)
def test_many_small_factors_of_floats_are_right(
    sizes: tuple[int, ...], batch: int, arch: int, emulator: Emulator
) -> None:
    """Neighbours of which are taken as one, by whichever families the planner takes."""
    spec = kronecker(sizes, sizes)
    found = planner.plan(all_gradients_of(spec), "float32", BATCHES[-1], dataclasses.replace(Gpu.of(arch), sms=2))
    assert any(isinstance(p, FactorGradients) for p in found.passes)
    check(spec, found, batch, emulator)


@pytest.mark.parametrize(
    ("sizes", "rank", "dtype", "batch", "count", "shared"),
    [
        ((1, 16), 1, "float64", 5, 1, 232448),
        ((7, 9), 2, "float16", 9, 1, 232448),
        ((12, 20), 1, "float32", 3, 1, 232448),
        ((2, 3, 2, 19), 1, "tf32", 6, 2, 232448),
        ((3, 2, 16), 2, "bfloat16", 5, 1, 232448),
        ((9, 4, 41), 1, "float64", 3, 2, 30000),  # chunks of 16
    ],
    ids=str,
)
def test_an_infinite_weight_meets_no_zeros(
    sizes: tuple[int, ...], rank: int, dtype: str, batch: int, count: int, shared: int, emulator: Emulator
) -> None:
    """Units that the last tile has not, and columns that the last chunk has not, add nothing to a gradient."""
    spec = dataclasses.replace(kronecker(sizes, sizes), rank=rank)
    found = visits(spec, dtype, 16, dataclasses.replace(Gpu.of(90), sms=2, shared=shared), count)
    kernels = emulator.compile(found)
    draw = drawing(found.dtype)
    x, grad = abs(draw(batch, spec.in_features)), abs(draw(batch, spec.out_features))
    weights = [abs(draw(*shape)) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    for sick in range(len(sizes)):
        given = [weight.copy() for weight in weights]
        given[sick].flat[0] = np.inf
        outputs, errors = emulator.run(found, kernels, x, [*given, grad], None, blocks=2, seed=sick)
        assert not errors
        for made, right in zip(gradients_of(outputs, found, spec), right_gradients(spec, x, given, grad), strict=True):
            assert not np.isnan(right).any()
            np.testing.assert_array_equal(np.isposinf(made), np.isposinf(right))
            assert not np.isnan(made).any()


@pytest.mark.parametrize(
    ("sizes_in", "sizes_out", "rank", "count"),
    [((4, 6, 20), (6, 4, 24), 3, 1), ((4, 6, 20), (6, 4, 24), 3, 2), ((2, 2, 70, 3), (2, 2, 70, 3), 2, 2)],
    ids=str,
)
def test_gradients_of_terms_in_half_precision_may_be_far_apart(
    sizes_in: tuple[int, ...], sizes_out: tuple[int, ...], rank: int, count: int, emulator: Emulator
) -> None:
    """Each term has its own error, whatever the others are."""
    spec = dataclasses.replace(kronecker(sizes_in, sizes_out), rank=rank)
    found = visits(spec, "float16", 1024, dataclasses.replace(Gpu.of(90), sms=2), count)
    back = [planned for planned in found.passes if isinstance(planned, ChainBackward)]
    assert any(planned.merged for planned in back) and len(back) == count
    draw = drawing("float16")
    x, grad = draw(3, spec.in_features), draw(3, spec.out_features)
    weights = terms_apart([draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes])
    outputs, errors = emulator.run(found, emulator.compile(found), x, [*weights, grad], None, blocks=2)
    assert not errors
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
    of_x, *of_weights = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
    made_x, *made = gradients_of(outputs, found, spec)
    pairs = [(made_x, of_x.numpy().ravel())]
    for part, right in zip(made, of_weights, strict=True):
        pairs += zip(part.reshape(spec.rank, -1), right.numpy().reshape(spec.rank, -1), strict=True)
    for part, expected in pairs:
        assert np.linalg.norm(part - expected) <= 8 * EPS["float16"] * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("size", "dtype", "rank", "arch"),
    [
        (124, "float64", 2, 80),
        (131, "float32", 1, 90),
        (131, "tf32", 3, 80),
        (131, "bfloat16", 2, 80),
        (131, "float16", 1, 90),
    ],
    ids=str,
)
def test_parts_of_a_middle_weight_write_beside_what_they_read(
    size: int, dtype: str, rank: int, arch: int, emulator: Emulator
) -> None:
    sizes = (2, size, 2)
    spec = dataclasses.replace(kronecker(sizes, sizes), rank=rank)
    found = visits(spec, dtype, 16, dataclasses.replace(Gpu.of(arch), sms=2), 3)
    first, middle, last = (planned for planned in found.passes if isinstance(planned, ChainBackward))
    assert middle.parts > 1 == first.parts == last.parts
    assert (middle.reads, middle.beside[0], middle.writes, last.beside[0]) == ("s0", "s1", "s3", "s3")
    check(spec, found, 3, emulator)


BY_TWO_PASSES = [
    # in, out, rank, dtype, the gradients of weights by passes of their own, GPU
    ((3, 136), (3, 130), 1, "bfloat16", [WideGradient, Gradient], 90),
    ((36, 60), (20, 64), 1, "float16", [WideGradient, Gradient], 90),
    ((2, 3, 72), (2, 3, 76), 1, "tf32", [WideGradient, Gradient, Gradient], 90),
    ((76, 3), (70, 3), 1, "float32", [Gradient, Gradient], 90),
    ((5, 2, 30), (3, 2, 34), 1, "float64", [Gradient, Gradient, Gradient], 80),
    ((2, 56, 3), (3, 56, 2), 1, "float32", [Gradient, Gradient, Gradient], 80),
    ((2, 3, 64), (2, 3, 64), 2, "float16", [WideGradient, Gradient], 90),
    ((4, 72), (3, 40), 3, "tf32", [WideGradient], 90),
    ((50, 33), (50, 35), 2, "bfloat16", [Gradient], 90),
    ((30, 20), (31, 24), 2, "float64", [Gradient], 80),
]


@pytest.mark.parametrize(("sizes_in", "sizes_out", "rank", "dtype", "kinds", "arch"), BY_TWO_PASSES, ids=str)
def test_gradients_of_large_weights_may_be_passes_of_their_own(
    sizes_in: tuple[int, ...],
    sizes_out: tuple[int, ...],
    rank: int,
    dtype: str,
    kinds: list[type],
    arch: int,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = dataclasses.replace(kronecker(sizes_in, sizes_out), rank=rank)
    (chain,), computed = planner.parsed(all_gradients_of(spec).text, dtype)
    monkeypatch.setattr(visits_module, "_at_once", lambda *_: ())
    gpu = dataclasses.replace(Gpu.of(arch), sms=2)
    found = Plan(chain, computed, 1024, gpu, visits_of.__wrapped__(chain, computed, 1024, gpu, len(sizes_in)) or ())
    assert [type(planned.of) for planned in found.passes if isinstance(planned, OfVisit)] == kinds
    check(spec, found, 5, emulator)


@pytest.mark.parametrize(
    ("sizes_in", "sizes_out", "dtype"),
    [
        ((2, 160), (2, 144), "bfloat16"),
        ((2, 128), (2, 112), "float32"),
        ((2, 160, 3), (2, 144, 3), "tf32"),
        ((2, 64), (2, 72), "float64"),
    ],
    ids=str,
)
def test_blocks_have_parts_of_a_weight_that_goes_back(
    sizes_in: tuple[int, ...],
    sizes_out: tuple[int, ...],
    dtype: str,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few samples each makes some rows of the gradient of what was read, by columns of the weight in memory."""
    spec = kronecker(sizes_in, sizes_out)
    monkeypatch.setattr(visits_module, "_at_once", lambda *_: ())
    asked = all_gradients_of(spec), dtype, 16, dataclasses.replace(Gpu.of(90), sms=2)
    found = Plan(*asked, visits_of.__wrapped__(*asked, len(sizes_in)) or ())
    assert any(p.parts > 1 and p.work.transposed for p in found.passes if isinstance(p, Resident))
    check(spec, found, 3, emulator)


@pytest.mark.parametrize(
    ("sizes", "dtype", "apart"),
    [((3, 200), "bfloat16", True), ((3, 200), "tf32", True), ((3, 60), "tf32", False)],
    ids=str,
)
def test_a_weight_that_several_blocks_would_share_has_a_pass_of_its_own(
    sizes: tuple[int, ...], dtype: str, apart: bool
) -> None:
    found = visits(kronecker(sizes, sizes), dtype, 1024, dataclasses.replace(Gpu.of(90), sms=2))
    assert any(isinstance(planned, OfVisit) for planned in found.passes) == apart


@pytest.mark.parametrize(
    ("sizes", "rank", "dtype", "together"),
    [((24, 65, 4, 5), 3, "float16", True), ((8, 8, 16), 3, "float64", True), ((107, 21, 23), 3, "float16", False)],
    ids=str,
)
def test_the_visit_of_x_has_all_terms_where_there_is_room(
    sizes: tuple[int, ...], rank: int, dtype: str, together: bool
) -> None:
    """Else a pass behind it adds up what comes back to x."""
    spec = dataclasses.replace(kronecker(sizes, sizes), rank=rank)
    found = visits(spec, dtype, 1024, Gpu.of(90)).passes
    *others, first = (planned for planned in found if isinstance(planned, ChainBackward))
    assert (first.work.rank, first.work.terms) == ((rank, 1) if together else (1, rank))
    assert [planned.reads for planned in found if planned.writes == "y"] == ["x" if together else first.places.g]
    assert all(planned.work.rank == 1 for planned in others)


def test_visits_go_where_states_between_them_are_smallest() -> None:
    found = visits(kronecker((32, 8, 24), (4, 64, 3)), "bfloat16", 1024, Gpu.of(90), 3)
    back = [planned.work.steps for planned in found.passes if isinstance(planned, ChainBackward)]
    assert [(mode.p, mode.q) for steps in back for _, mode in steps] == [(8, 64), (32, 4), (24, 3)]


@pytest.mark.parametrize("sizes", [(18, 167, 12), (164, 12, 41), (211, 13, 200), (9, 150, 8, 11)], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_parts_of_a_weight_overwrite_nothing_that_others_read(sizes: tuple[int, ...], rank: int) -> None:
    chain = all_gradients_of(dataclasses.replace(kronecker(sizes, sizes), rank=rank))
    for batch in BATCHES:
        for count in (1, 2, 3, 4):
            for planned in visits_of(chain, "bfloat16", batch, Gpu.of(90), count) or ():
                if isinstance(planned, ChainBackward) and planned.parts > 1:
                    assert planned.writes not in (planned.reads, planned.beside[0])


@pytest.mark.parametrize(("sizes", "dtype"), [((2, 11, 180), "float64"), ((48, 2, 7, 9), "tf32")], ids=str)
def test_padding_leaves_room_for_more_than_one_group(sizes: tuple[int, ...], dtype: str) -> None:
    """Of small modes states are mostly padding: units are fewer then, not warps."""
    found = visits(kronecker(sizes, sizes), dtype, 1024, Gpu.of(90))
    for planned in found.passes:
        if isinstance(planned, ChainBackward):
            assert planned.groups * planned.warps >= 8


@pytest.mark.parametrize(("sizes", "dtype"), [((24, 16, 40), "float64"), ((16, 48, 24), "bfloat16")], ids=str)
def test_terms_by_themselves_have_to_make_the_gradient_of_x_as_well(sizes: tuple[int, ...], dtype: str) -> None:
    chain = all_gradients_of(dataclasses.replace(kronecker(sizes, sizes), rank=3))
    assert are_worth_it(chain, dtype, SOME, Gpu.of(90))


def test_few_samples_are_asked_of_by_themselves() -> None:
    """What many have no plan for, as their work is less a contraction at a time, may have one for few."""
    chain = all_gradients_of(dataclasses.replace(kronecker((60, 200, 24), (60, 200, 24)), rank=3))
    worth = [are_worth_it(chain, "float32", batch, Gpu.of(90)) for batch in BATCHES]
    assert worth == [batch <= FEW for batch in BATCHES]
    assert planner.has_plan(chain.text, "float32", 90, 132, 232448, batch_class=0)
    assert not planner.has_plan(chain.text, "float32", 90, 132, 232448)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_lines_that_lie_side_by_side_in_a_row_come_without_padding(dtype: str, emulator: Emulator) -> None:
    """Chunks of seven elements, eleven of which are a row of the first stage back."""
    spec, gpu = kronecker((4, 16, 7, 17), (7, 11, 7, 11)), dataclasses.replace(Gpu.of(90), sms=2, shared=30000)
    found = visits(spec, dtype, 16, gpu, 2)
    assert any(isinstance(p, ChainBackward) and p.chunk == 7 and len(p.work.steps) == 2 for p in found.passes)
    check(spec, found, 3, emulator)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_same_forward(dtype: str, emulator: Emulator) -> None:
    spec = dataclasses.replace(kronecker((11, 7, 9, 9), (5, 5, 7, 7)), rank=2)
    gpu = dataclasses.replace(Gpu.of(90), sms=2, shared=30000)
    chain = Chain.of(spec, False, "identity")
    works = works_of(chain, dtype, modes_of(chain), [[0, 1], [3], [2]])
    found = Plan(chain, dtype, 16, gpu, tuple(filter(None, (tile(work, 16, gpu) for work in works))))
    assert [p.chunk == 27 for p in found.passes if isinstance(p, Resident)] == [True, False, False]
    draw = drawing(dtype)
    x, weights = (
        draw(3, spec.in_features),
        [draw(*shape) / 4 for shape in spec.weight_shapes],
    )  # exactly, by a power of two
    (*_, y), errors = emulator.run(found, emulator.compile(found), x, weights, None, blocks=2)
    assert not errors
    right = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]).numpy()
    error = np.linalg.norm(y.reshape(right.shape) - right) / np.linalg.norm(right)
    assert error < (2e-3 if dtype == "float16" else 2e-2)
