"""Stacks of dense layers by resident passes: which the planner takes, what the compilers make of them, and, by
tests/emulator, right results without a race."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled import UsageOf
from emulator.driver import Emulator
from oracle import kronecker
from test_emulator import check_stack, check_states, drawing, drawn_tensors, run_in_torch, stack_of

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels import batches
from factorlayer.kernels.resident_stack import ResidentStack, tile, tilings
from factorlayer.kernels.stack.dense import Dense
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import plan_stack, runs_of
from factorlayer.plan.schemes import RESIDENT, schemes

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
MOST_SPILLED = 80  # bytes, of single values that ptxas keeps in memory for a while beside functions in double
SMALL, MEDIUM, LARGE = batches.FEW, batches.SOME, batches.BATCHES[-1]
HOPPER, AMPERE = Gpu.of(90), Gpu.of(80)
ON_AMPERE, ON_HOPPER = replace(AMPERE, sms=2), replace(HOPPER, sms=2)


def dense(*widths: int, activation: str = "elu") -> tuple[Chain, ...]:
    return tuple(Chain.of(kronecker((p,), (q,)), True, activation) for p, q in itertools.pairwise(widths))


# Widths that 8 divides and not, a single feature, batches that end within a tile and within a warp's rows
STACKS = [
    ([1, 73, 59, 1], "float32", "elu", 70, ON_HOPPER),
    ([10, 59, 59, 8], "float64", "silu", 70, ON_HOPPER),
    ([3, 34, 13], "float64", "learned", 5, ON_AMPERE),
    ([48, 24, 40, 8], "float32", "learned", 37, ON_AMPERE),
    ([13, 45, 5], "tf32", "sigmoid", 70, ON_AMPERE),
    ([1, 59, 73, 3], "bfloat16", "gelu", 70, ON_AMPERE),
    ([20, 20, 20], "float16", "relu", 1, ON_AMPERE),
    ([3, 1, 1], "float32", "sine", 9, ON_AMPERE),
    ([73, 8, 73], "float64", "identity", 33, ON_AMPERE),
]


@pytest.mark.parametrize(("widths", "dtype", "activation", "batch", "gpu"), STACKS, ids=str)
def test_is_right_and_keeps_samples_apart(
    widths: list[int], dtype: str, activation: str, batch: int, gpu: Gpu, emulator: Emulator
) -> None:
    layers = stack_of(widths, dtype, activation, activation)
    found = plan_stack(tuple(layers), dtype, batch, gpu)
    assert isinstance(found.passes[0], ResidentStack)
    check_stack(found, layers, batch, emulator)


def tiled(layers: list[Chain], dtype: str, gpu: Gpu, states: bool = False, **fields: int | bool) -> Plan:
    """The first tiling that has these fields."""
    found = tilings(layers, dtype, LARGE, gpu, states)
    planned = next(p for p in found if all(getattr(p, name) == value for name, value in fields.items()))
    return Plan(layers[0], dtype, LARGE, gpu, (planned,))


@pytest.mark.parametrize(
    ("dtype", "tiling"),
    [
        ("float32", {"in_place": True, "warps": 4, "units": 32}),
        ("float32", {"in_place": False, "warps": 2, "units": 64, "slots": 2}),
        ("float64", {"in_place": True, "warps": 8, "units": 16, "slots": 1}),
        ("bfloat16", {"in_place": False, "warps": 1, "units": 8, "slots": 1}),
        ("tf32", {"in_place": False, "warps": 1, "units": 64, "slots": 2}),
    ],
    ids=str,
)
def test_each_kind_of_tiling_makes_the_same(dtype: str, tiling: dict[str, int | bool], emulator: Emulator) -> None:
    layers = stack_of([5, 20, 33, 24, 3], dtype, "tanh")
    check_stack(tiled(layers, dtype, replace(ON_AMPERE, shared=60 << 10), **tiling), layers, 150, emulator)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize(
    ("dtype", "in_place", "states"),
    [("float32", False, False), ("float64", True, False), ("tf32", False, True), ("bfloat16", True, True)],
)
def test_layers_that_are_alike_are_terms_of_one(
    dtype: str, in_place: bool, states: bool, count: int, emulator: Emulator
) -> None:
    """One piece of code makes them, from one state to the other and back."""
    layers = [replace(layer, bias=True) for layer in stack_of([9, *[20] * count, 7], dtype, "tanh")]
    found = tiled(layers, dtype, ON_AMPERE, states, in_place=in_place, warps=2)
    (planned,) = found.passes
    assert isinstance(planned, ResidentStack) and [len(run) for run in planned.alike] == [1, count - 1, 1]
    (check_states if states else check_stack)(found, layers, 40, emulator)


@pytest.mark.parametrize(
    ("widths", "dtype", "activation", "batch"),
    [
        ([1, 73, 20, 3], "float32", "elu", 40),
        ([10, 33, 24, 8], "float64", "gelu", 19),
        ([13, 45, 64, 5], "tf32", "learned", 70),
        ([16, 23, 1, 7], "bfloat16", "relu", 70),
    ],
    ids=str,
)
def test_states_are_stored(widths: list[int], dtype: str, activation: str, batch: int, emulator: Emulator) -> None:
    layers = stack_of(widths, dtype, activation, "relu")
    check_states(plan_stack(tuple(layers), dtype, LARGE, ON_AMPERE, states=True), layers, batch, emulator)


INTO_INFINITIES = [5, 20, 20, 3]  # widths of layers for check_infinities()


def check_infinities(found: Plan, layers: list[Chain], emulator: Emulator) -> None:
    """Of samples and of weights; what activations make finite again is so, beside padding as well."""
    draw = drawing(found.dtype)
    x, tensors = draw(20, 5), drawn_tensors(layers, draw)
    x[3, 1], x[4, 0], x[5, 4], x[6, :2] = np.inf, -np.inf, np.nan, (np.inf, -np.inf)
    for broken in (False, True):
        if broken:
            tensors[0][7, 2] = -np.inf
        right = run_in_torch(layers, torch.from_numpy(x), [torch.from_numpy(t) for t in tensors]).numpy()
        (y,), errors = emulator.run(found, emulator.compile(found), x, tensors, None, blocks=2)
        assert not errors and np.isnan(right[5]).all() and (broken or np.isfinite(right[3]).all())
        y = y.reshape(20, 3)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(right))
        np.testing.assert_allclose(y, right, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_what_is_no_number_are_pytorchs(dtype: str, emulator: Emulator) -> None:
    layers = stack_of(INTO_INFINITIES, dtype, "sigmoid")
    check_infinities(plan_stack(tuple(layers), dtype, LARGE, ON_AMPERE), layers, emulator)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\n    sync();\n  }\n", "\n  }\n", "race: a"),  # behind a layer
        ("wait_for_copies<0>();\n    __syncthreads();", "", "race: a"),  # weights and biases
    ],
)
def test_what_is_missing_is_found(old: str, new: str, said: str, emulator: Emulator) -> None:
    layers = [replace(layer, bias=True) for layer in stack_of([9, 20, 20, 20, 7], "float32", "tanh")]
    found = tiled(layers, "float32", ON_AMPERE, in_place=False, warps=2)
    draw = drawing("float32")
    x, tensors = draw(40, 9), drawn_tensors(layers, draw)
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, tensors, None)
    assert any(said in error for error in errors), errors


def test_padding_hands_on_nothing(emulator: Emulator) -> None:
    """Of an infinite feature times weights that are not there, it would be no number, which the next layer reads."""
    layers = stack_of([3, 5, 2], "float32", "sigmoid")
    found = plan_stack(tuple(layers), "float32", LARGE, ON_AMPERE)
    draw = drawing("float32")
    x, tensors = draw(9, 3), drawn_tensors(layers, draw)
    x[4, 0] = np.inf
    changed = {"column + n * 8 + i % 2 < there ? made : 0": "true ? made : 0"}
    for changes in (None, changed):
        (y,), errors = emulator.run(found, emulator.compile(found, changes), x, tensors, None)
        assert not errors and np.isnan(y.reshape(9, 2)[4]).all() == (changes is not None)


def test_hoppers_own_families_keep_what_they_take() -> None:
    layers = dense(20, 30, 10)
    for dtype in DTYPES:
        (found,) = plan_stack(layers, dtype, LARGE, HOPPER).passes
        assert type(found) is (ResidentStack if dtype in ("float32", "float64") else Dense)
        (found,) = plan_stack(layers, dtype, LARGE, AMPERE).passes
        assert type(found) is ResidentStack


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=["H100", "A100"])
def test_what_does_not_fit_or_is_another_kind_has_no_kernel(gpu: Gpu) -> None:
    assert tile(dense(256, 256, 256), "float32", LARGE, gpu) is None
    assert tile(dense(*[8] * 40), "float64", LARGE, gpu) is None, "a kernel is not given so many tensors"
    assert tile(dense(*[8] * 25), "float64", LARGE, gpu) and tile(dense(*[8] * 25), "float64", LARGE, gpu, True) is None
    factors = Chain.of(kronecker((3, 5), (4, 4)), True, "relu")
    assert tile((*dense(8, 16), factors), "float32", LARGE, gpu) is None
    with pytest.raises(PlanError, match="no pass takes all layers"):
        plan_stack(dense(2048, 2048, 2048), "float64", LARGE, gpu)


@pytest.mark.parametrize("batch", batches.BATCHES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tilings_are_within_the_limits(dtype: str, batch: int) -> None:
    for gpu, states in itertools.product((HOPPER, AMPERE), (False, True)):
        found = list(tilings(dense(1, 73, 59, 8), dtype, batch, gpu, states))
        assert found and all(plan.shared <= gpu.shared and plan.threads <= 1024 for plan in found)
        assert all(plan.us_of(2 * batch) >= plan.us > 0 for plan in found)
        best = tile(dense(1, 73, 59, 8), dtype, batch, gpu, states)
        assert best in found


def test_each_way_to_run_a_stack_is_shown_with_the_one_that_is_chosen() -> None:
    layers = dense(10, 59, 59, 8)
    ways = schemes(" | ".join(layer.text for layer in layers), "float64", batches.BATCHES.index(LARGE), HOPPER)
    assert len(ways) > 4 and {way.weights for way in ways} == {RESIDENT}
    assert plan_stack(layers, "float64", LARGE, HOPPER).us in [way.plan.us for way in ways]


def test_layers_that_do_not_fit_are_cut_into_runs_that_do() -> None:
    text = " | ".join(layer.text for layer in dense(*[96] * 13))
    for gpu in (HOPPER, AMPERE):
        runs = runs_of(text, "float32", gpu, batches.LAST)
        assert len(runs) > 1 and [end for _, end in runs[:-1]] == [begin for begin, _ in runs[1:]]
        assert runs[0][0] == 0 and runs[-1][1] == 12


# Of which a block's registers are few, or functions take many of them
COMPILED = [
    ((1, 73, 73, 1), "elu", "float32"),
    ((485, 34, 34, 13), "tanh", "float32"),
    ((10, 59, 59, 8), "silu", "float64"),
    ((64, 64, 64), "gelu", "float64"),
    ((128, 96, 10), "softplus", "float32"),
    ((20, 40, 100), "gelu_tanh", "float32"),
]


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=["H100", "A100"])
@pytest.mark.parametrize(("widths", "activation", "dtype"), COMPILED, ids=str)
def test_compiles_without_a_spill(
    widths: tuple[int, ...], activation: str, dtype: str, gpu: Gpu, usage_of: UsageOf
) -> None:
    planned = tile(dense(*widths, activation=activation), dtype, LARGE, gpu)
    assert planned is not None
    usage = usage_of(planned.source("kernel"), "kernel", gpu.architecture, OPTIONS)
    assert usage.stored <= (MOST_SPILLED if dtype == "float64" else 0), usage
