"""Kernels that read x, and write its gradient, as several tensors, by the emulator, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulator.driver import Array, Emulator
from oracle import kronecker, monarch
from test_chain_backward import gradients_of, right_gradients
from test_emulator import EPS, all_gradients_of, drawing

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES, FEW, SOME
from factorlayer.kernels.kronecker.pair_backward import PairBackward
from factorlayer.kernels.kronecker.pair_few_backward import PairFewBackward
from factorlayer.kernels.kronecker.warpgroups import Pair16Backward, Pair16LargeBackward, PairSplitBackward
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product.streamed import Streamed
from factorlayer.kernels.work import inputs_of
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan import planner
from factorlayer.plan.cuts import around, cuts, modes_of
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.products import one_by_one
from factorlayer.plan.registry.family import ways
from factorlayer.plan.registry.kronecker import OF_FACTORS, PAIR

MANY = BATCHES[-1]

CASES = [
    # layer, inputs, dtype, samples, planned for, compute capability
    (kronecker((8, 8), (8, 12)), (40, 24), "bfloat16", 19, MANY, 90),  # 16 bytes at once
    (kronecker((6, 10), (10, 6)), (18, 2, 40), "tf32", 9, SOME, 80),  # 8 bytes
    (kronecker((5, 9), (7, 4)), (1, 43, 1), "float16", 7, MANY, 90),  # 2 bytes
    (kronecker((3, 4, 6), (5, 2, 7)), (30, 41, 1), "float32", 21, FEW, 80),
    (kronecker((4, 9), (6, 5), rank=2), (20, 16), "float64", 6, SOME, 90),
    (kronecker((64, 64), (16, 16)), (2048, 2048), "float32", 3, FEW, 90),  # the copy engine
]


def planned(spec: LayerSpec, chain: Chain, inputs: tuple[int, ...], dtype: str, batch: int, arch: int) -> Plan:
    asked, computed = planner.parsed(
        replace(chain, inputs=inputs, tf32=dtype == "tf32").text, "float32" if dtype == "tf32" else dtype
    )
    return planner.plan(asked[0], computed, batch, replace(Gpu.of(arch), sms=2))


@pytest.mark.parametrize(("spec", "inputs", "dtype", "batch", "plan_of", "arch"), CASES, ids=str)
def test_forward(
    spec: LayerSpec, inputs: tuple[int, ...], dtype: str, batch: int, plan_of: int, arch: int, emulator: Emulator
) -> None:
    found = planned(spec, Chain.of(spec, True, "relu"), inputs, dtype, plan_of, arch)
    check_forward(spec, inputs, found, batch, emulator)


@pytest.mark.parametrize(
    ("spec", "inputs", "dtype"),
    [
        (kronecker((40, 48), (32, 64)), (1000, 920), "bfloat16"),
        (kronecker((24, 32), (40, 24)), (28, 700, 40), "float32"),
        (kronecker((2, 28, 32), (2, 24, 32)), (900, 892), "tf32"),
    ],
    ids=str,
)
def test_two_factors_forward(spec: LayerSpec, inputs: tuple[int, ...], dtype: str, emulator: Emulator) -> None:
    chain, gpu = replace(Chain.of(spec, True, "relu"), inputs=inputs), replace(Gpu.of(90), sms=2)
    works = (works[0] for works in cuts(chain, dtype) if len(works) == 1)
    passes = next(filter(None, (PAIR.way(work, MANY, gpu) for work in works)))
    check_forward(spec, inputs, Plan(chain, dtype, MANY, gpu, passes), 5, emulator)


@pytest.mark.parametrize(
    ("spec", "inputs", "dtype"),
    [
        (monarch((6, 8), (8, 5)), (20, 28), "bfloat16"),
        (monarch((5, 13), (4, 9)), (1, 40, 24), "float16"),  # eight elements in order may be of two tensors
        (monarch((5, 12), (6, 8), rank=2), (1, 59), "float32"),
        (kronecker((40, 9), (24, 3)), (100, 260), "tf32"),
        (kronecker((40, 16), (24, 16)), (600, 40), "float16"),
        (kronecker((12, 5), (7, 6)), (33, 27), "float64"),
    ],
    ids=str,
)
def test_one_by_one_forward(spec: LayerSpec, inputs: tuple[int, ...], dtype: str, emulator: Emulator) -> None:
    chain, gpu = replace(Chain.of(spec, True, "relu"), inputs=inputs), replace(Gpu.of(90), sms=2)
    found = Plan(chain, dtype, SOME, gpu, one_by_one(chain, dtype, SOME, gpu))
    check_forward(spec, inputs, found, 9, emulator)
    check_forward(spec, inputs, found, 9, emulator, value=np.inf)


def check_forward(
    spec: LayerSpec,
    inputs: tuple[int, ...],
    found: Plan,
    batch: int,
    emulator: Emulator,
    value: float | None = None,  # of a feature of a sample
) -> None:
    dtype, first_pass = found.dtype, next(each for each in found.passes if each.reads != "none")  # weights alone
    told = first_pass.product if isinstance(first_pass, Streamed) else first_pass.work
    assert told.inputs.features == inputs
    draw = drawing(dtype)
    x, bias = draw(batch, spec.in_features), draw(spec.out_features)
    x[1, 3] = x[1, 3] if value is None else value
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    first, *others = np.split(x, np.cumsum(inputs)[:-1], axis=1)
    outputs, errors = emulator.run(found, emulator.compile(found), first, [*weights, bias, *others], bias, blocks=2)
    assert not errors

    def sums(x: Array, *given: Array) -> Array:
        return np.asarray(naive(spec, torch.from_numpy(x), list(map(torch.from_numpy, given))))

    right = np.maximum(sums(x, *weights) + bias, 0)
    size = sums(*map(np.abs, (x, *weights))) + np.abs(bias)  # of what cancels
    made = outputs[-1].reshape(right.shape)
    np.testing.assert_array_equal(np.isfinite(made), np.isfinite(right))
    made, size, right = (np.where(np.isfinite(right), t, 0) for t in (made, size, right))
    allowed = max(2 * (1 + len(spec.weight_shapes)) * np.linalg.norm(right), np.linalg.norm(size))
    assert np.linalg.norm(made - right) <= EPS[dtype] * allowed


@pytest.mark.parametrize(("spec", "inputs", "dtype", "batch", "plan_of", "arch"), CASES, ids=str)
def test_all_gradients(
    spec: LayerSpec, inputs: tuple[int, ...], dtype: str, batch: int, plan_of: int, arch: int, emulator: Emulator
) -> None:
    found = planned(spec, all_gradients_of(spec), inputs, dtype, plan_of, arch)
    check_gradients(spec, inputs, found, batch, emulator)


FAMILIES = [
    (PairBackward, kronecker((16, 24), (24, 16)), (8, 368, 8), "float16", 80),
    (PairBackward, kronecker((9, 12), (16, 9)), (4, 104), "float32", 80),
    (Pair16Backward, kronecker((40, 48), (32, 64)), (1000, 920), "bfloat16", 90),
    (Pair16LargeBackward, kronecker((72, 80), (40, 96)), (32, 5728), "float16", 90),
    (PairFewBackward, kronecker((32, 16), (16, 32)), (500, 12), "float32", 80),
    (PairSplitBackward, kronecker((24, 32), (40, 24)), (28, 700, 40), "float32", 90),
    (PairSplitBackward, kronecker((2, 28, 32), (2, 24, 32)), (896, 896), "tf32", 90),
]


@pytest.mark.parametrize(("kind", "spec", "inputs", "dtype", "arch"), FAMILIES, ids=str)
def test_families_that_take_inputs(
    kind: type[Pass], spec: LayerSpec, inputs: tuple[int, ...], dtype: str, arch: int, emulator: Emulator
) -> None:
    chain, gpu = replace(all_gradients_of(spec), inputs=inputs), replace(Gpu.of(arch), sms=2)
    outer, _ = around(chain)
    batch = FEW if kind is PairFewBackward else MANY
    found = ways(OF_FACTORS, modes_of(chain), outer, dtype, batch, gpu, inputs=inputs_of(chain))
    (passes,) = (way for way in found if isinstance(way[0], kind))
    check_gradients(spec, inputs, Plan(chain, dtype, batch, gpu, passes), 3, emulator)


def check_gradients(spec: LayerSpec, inputs: tuple[int, ...], found: Plan, batch: int, emulator: Emulator) -> None:
    dtype = found.dtype
    draw = drawing(found.dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    kernels = emulator.compile(found)
    first, *others = np.split(x, np.cumsum(inputs)[:-1], axis=1)
    outputs, errors = emulator.run(found, kernels, first, [*weights, grad, grad[:0], *others], None, blocks=2)
    assert not errors
    of_x, *of_weights = right_gradients(spec, x, weights, grad)
    made = gradients_of(outputs, found, spec)
    by_inputs = np.concatenate([t.ravel() for t in np.split(of_x.reshape(x.shape), np.cumsum(inputs)[:-1], axis=1)])
    sizes = right_gradients(spec, np.abs(x), list(map(np.abs, weights)), np.abs(grad))  # of what cancels
    for part, expected, size in zip(made, (by_inputs, *of_weights), sizes, strict=True):
        allowed = max(4 * len(spec.weight_shapes) * np.linalg.norm(expected), np.linalg.norm(size))
        assert np.linalg.norm(part - expected) <= EPS[dtype] * allowed


def test_dense_layers_at_once(emulator: Emulator) -> None:
    inputs, dtype, arch = (20, 12, 8), "bfloat16", 90
    text = " ".join(map(str, ("inputs", *inputs))) + "; tied 0 1 40 24 1; bias; relu | tied 0 1 24 9 1; bias"
    layers, _ = planner.parsed(text, dtype)
    found = planner.plan_stack(layers, dtype, SOME, replace(Gpu.of(arch), sms=2))
    draw = drawing(dtype)
    x, tensors = draw(21, 40), [draw(24, 40) / 6, draw(24), draw(9, 24) / 5, draw(9)]
    first, *others = np.split(x, np.cumsum(inputs)[:-1], axis=1)
    (y,), errors = emulator.run(found, emulator.compile(found), first, [*tensors, *others], None, blocks=2)
    assert not errors
    right = np.maximum(x @ tensors[0].T + tensors[1], 0) @ tensors[2].T + tensors[3]
    assert np.linalg.norm(y.reshape(21, 9) - right) <= 4 * EPS[dtype] * np.linalg.norm(right)


def test_what_no_pass_takes_is_refused() -> None:
    gpu = Gpu.of(90)
    for text, words in (("inputs 8 8; tied 0 1 16 16 1 | tied 0 1 16 16 1 | backward", "no pass makes all gradients"),):
        with pytest.raises(PlanError, match=words):
            planner.plan_of(text, "float32", 1, gpu)
