"""All gradients of stacks of dense layers of any widths: where the planner takes that pass, what the compilers make of
it, and, by tests/emulator, right results without a race."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled import UsageOf
from emulator.driver import Emulator
from oracle import kronecker
from test_emulator import check_gradients_of_stack, drawing, drawn_tensors, run_in_torch, stack_of

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels import batches
from factorlayer.kernels.resident_stack import ResidentStack
from factorlayer.kernels.stack.dense_backward import DenseBackward
from factorlayer.kernels.stack.stack_backward import StackBackward, tile, tilings
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import cut, plan_stack, runs_of

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
MOST_SPILLED = 80  # bytes, of single values that ptxas keeps in memory for a while
SMALL, MEDIUM, LARGE = batches.FEW, batches.SOME, batches.BATCHES[-1]
HOPPER, AMPERE = Gpu.of(90), Gpu.of(80)
ON_HOPPER, ON_AMPERE = replace(HOPPER, sms=1), replace(AMPERE, sms=1)


def dense(*widths: int, activation: str = "elu", last: str = "identity") -> tuple[Chain, ...]:
    stages = [activation] * (len(widths) - 2) + [last]
    pairs = zip(itertools.pairwise(widths), stages, strict=True)
    return tuple(Chain.of(kronecker((p,), (q,)), True, stage) for (p, q), stage in pairs)


def tiled(layers: list[Chain], dtype: str, gpu: Gpu, **fields: int) -> Plan:
    """The first tiling that has these fields."""
    found = tilings(tuple(layers), dtype, LARGE, gpu)
    planned = next(p for p in found if all(getattr(p, name) == value for name, value in fields.items()))
    return Plan(replace(layers[0], backward=True), dtype, LARGE, gpu, planned.passes)


# Widths that 8 divides and not, a single feature, slopes told by results and kept, batches that end within a tile, and
# what tilings differ in
STACKS = [
    ([1, 73, 40, 1], "float32", "elu", "identity", 150, {"warps": 4, "units": 32}),
    ([24, 8, 17], "float32", "gelu", "tanh", 33, {"warps": 4, "groups": 2}),
    ([10, 24, 8], "float64", "silu", "identity", 70, {"warps": 8, "units": 16, "slots": 1}),
    ([3, 9, 7], "float64", "identity", "sine", 5, {"slots": 2}),
    ([13, 45, 24, 5], "tf32", "sigmoid", "gelu", 130, {"warps": 4, "slots": 2}),
    ([1, 59, 32, 3], "bfloat16", "gelu", "softplus", 70, {"warps": 8}),
    ([64, 24, 64], "float16", "relu", "identity", 100, {"units": 64}),
    ([279, 15, 2], "float16", "gelu", "identity", 65, {"units": 16}),
    ([16, 16], "bfloat16", "identity", "square", 1, {}),
]


@pytest.mark.parametrize(("widths", "dtype", "activation", "last", "batch", "fields"), STACKS, ids=str)
def test_is_right_and_keeps_samples_apart(
    widths: list[int],
    dtype: str,
    activation: str,
    last: str,
    batch: int,
    fields: dict[str, int],
    emulator: Emulator,
) -> None:
    layers = stack_of(widths, dtype, activation, last)
    gpu = ON_AMPERE if dtype in ("tf32", "float64") else ON_HOPPER
    check_gradients_of_stack(tiled(layers, dtype, gpu, **fields), layers, batch, emulator)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_add_up_the_same_in_any_order(dtype: str, emulator: Emulator) -> None:
    layers = stack_of([9, 20, 5], dtype, "tanh")
    found = tiled(layers, dtype, replace(HOPPER, sms=3), warps=4)
    draw = drawing(dtype)
    x, grad, tensors = draw(200, 9), draw(200, 5), drawn_tensors(layers, draw)
    kernels = emulator.compile(found)
    made = [emulator.run(found, kernels, x, [*tensors, grad], None, blocks=3, seed=seed) for seed in (1, 2)]
    assert not any(errors for _, errors in made)
    for one, other in zip(*(outputs for outputs, _ in made), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_are_pytorchs_and_meet_no_padding(dtype: str, emulator: Emulator) -> None:
    """Of grad_y, whose rows have features that are not there beside them, and of a weight, beside samples that are not
    there."""
    layers = [replace(layer, bias=True) for layer in stack_of([5, 12, 3], dtype, "relu")]
    found = tiled(layers, dtype, ON_HOPPER, warps=4)
    draw = drawing(dtype)
    x, grad, tensors = np.abs(draw(9, 5)) + 1, draw(9, 3), [np.abs(t) + 0.5 for t in drawn_tensors(layers, draw)]
    grad[4, 1] = np.inf
    for broken in (False, True):
        if broken:
            tensors[2][1, 7] = np.inf
        leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *tensors)]
        y = run_in_torch(layers, leaves[0], leaves[1:])
        right = [t.numpy() for t in torch.autograd.grad(y, leaves, torch.from_numpy(grad))]
        outputs, errors = emulator.run(found, emulator.compile(found), x, [*tensors, grad], None, blocks=1)
        assert not errors
        made = np.split(outputs[1], np.cumsum([t.size for t in tensors])[:-1])
        for one, other in zip([outputs[0], *made], right, strict=True):
            np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other.ravel()))
            np.testing.assert_allclose(one[np.isfinite(one)], other.ravel()[np.isfinite(one)], rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "        put(g + place, two);\n      });\n    }\n    sync();",
            "        put(g + place, two);\n      });\n    }",
            "race",
        ),
        ("wait_for_copies<Pass::SLOTS - 1>();\n      sync();\n      const u32 x", "const u32 x", "has not landed"),
    ],
)
def test_what_is_missing_is_found(old: str, new: str, said: str, emulator: Emulator) -> None:
    layers = stack_of([9, 20, 7], "float32", "tanh", "gelu")
    found = tiled(layers, "float32", ON_HOPPER, warps=4, units=16, slots=2)
    draw = drawing("float32")
    x, grad, tensors = draw(330, 9), draw(330, 7), drawn_tensors(layers, draw)
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, [*tensors, grad], None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=["H100", "A100"])
def test_what_does_not_fit_or_is_another_kind_has_no_kernel(gpu: Gpu) -> None:
    assert tile(dense(256, 256, 256), "float32", LARGE, gpu) is None
    assert tile(dense(*[8] * 40), "float64", LARGE, gpu) is None, "a kernel is not given so many tensors"
    assert tile(dense(*[8] * 12), "float64", LARGE, gpu) is not None
    factors = Chain.of(kronecker((3, 5), (4, 4)), True, "relu")
    assert tile((*dense(8, 16), factors), "float32", LARGE, gpu) is None
    (learned, *_) = stack_of([8, 8], "float32", "learned", "learned")
    assert tile((learned,), "float32", LARGE, gpu) is None, "whose gradients are sums over everything"
    with pytest.raises(PlanError, match="no pass makes all gradients"):
        plan_stack(dense(256, 256, 256), "float64", LARGE, gpu, backward=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tilings_are_within_the_limits(dtype: str) -> None:
    layers = dense(1, 73, 59, 8, activation="gelu")
    for gpu, batch in itertools.product((HOPPER, AMPERE), batches.BATCHES):
        found = list(tilings(layers, dtype, batch, gpu))
        assert found and all(plan.shared <= gpu.shared and plan.threads <= 1024 for plan in found)
        assert all(plan.us_of(2 * batch) >= plan.us_of(batch) > 0 for plan in found)
        assert [plan.us_of(batch) for plan in found] == pytest.approx([plan.us for plan in found])
        assert tile(layers, dtype, batch, gpu) in found


@pytest.mark.long
def test_narrow_layers_of_any_dtype_are_trained_by_one_kernel_each_way() -> None:
    text = " | ".join(layer.text for layer in dense(20, 30, 30, 10))
    for gpu, dtype in itertools.product((HOPPER, AMPERE), ("float64", "float32", "float16")):
        asked = f"{text} | backward", dtype, gpu.arch, gpu.sms, gpu.shared
        assert [runs_of(text, dtype, gpu, i, backward=True) for i in range(4)] == [((0, 3),)] * 4
        assert [cut(*asked, batch_class=i) for i in range(len(batches.BATCHES))] == ["((0, 3),)"] * len(batches.BATCHES)
        for batch in batches.BATCHES:
            (back, _) = plan_stack(dense(20, 30, 30, 10), dtype, batch, gpu, backward=True).passes
            assert isinstance(back, StackBackward | DenseBackward)


def test_a_large_layer_is_left_to_itself() -> None:
    text = " | ".join(layer.text for layer in dense(20, 30, 512, 512, 30, 20))
    for batch_class in range(len(batches.BATCHES)):
        runs = runs_of(text, "float32", HOPPER, batch_class, backward=True)
        assert runs and all(end <= 2 or begin >= 3 for begin, end in runs)


def test_wide_layers_that_no_wgmma_takes_are_one_pass_forward() -> None:
    layers = dense(279, 15, 2)
    (found,) = plan_stack(layers, "float16", LARGE, HOPPER).passes
    assert isinstance(found, ResidentStack)


# Of which a block's registers are few, or functions take many of them
COMPILED = [
    ((1, 73, 73, 1), "elu", "float32"),
    ((30, 202, 68), "gelu", "float32"),
    ((10, 59, 59, 8), "silu", "float64"),
    ((66, 6, 2, 8, 167, 82), "relu_squared", "float16"),
    ((13, 45, 64, 5), "gelu_tanh", "tf32"),
]


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=["H100", "A100"])
@pytest.mark.parametrize(("widths", "activation", "dtype"), COMPILED, ids=str)
def test_compiles_with_hardly_a_spill(
    widths: tuple[int, ...], activation: str, dtype: str, gpu: Gpu, usage_of: UsageOf
) -> None:
    planned = tile(dense(*widths, activation=activation), dtype, LARGE, gpu)
    assert planned is not None
    usage = usage_of(planned.source("kernel"), "kernel", gpu.architecture, OPTIONS)
    assert usage.stored <= MOST_SPILLED, usage
