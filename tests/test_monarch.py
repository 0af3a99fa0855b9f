"""Monarch layers of any sizes (kernels/monarch/monarch_chunks.py, monarch_pairs.py): on a CPU, that they are right."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled import UsageOf
from emulator.driver import Array, Emulator
from oracle import monarch
from test_emulator import (
    EPS,
    LEARNED,
    Case,
    check_all_gradients_of_groups,
    drawing,
)
from test_emulator import test_is_right_in_any_order_and_keeps_samples_apart as check_any_order

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import BATCHES, SOME
from factorlayer.kernels.monarch import monarch_chunks, monarch_pairs
from factorlayer.kernels.monarch.monarch_chunks import MonarchChunks, MonarchKept
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.plan import Plan

GPU = replace(Gpu.of(90), sms=2)
OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
Sizes = tuple[tuple[int, int], tuple[int, int], int]
# Groups and numbers of x, numbers and groups of y, rank
SPECS: list[Sizes] = [
    ((5, 6), (7, 4), 3),
    ((3, 9), (12, 5), 5),
    ((4, 10), (9, 6), 2),
    ((7, 5), (3, 7), 1),
    ((2, 17), (18, 3), 9),
]


def chain_of(sizes: Sizes, dtype: str, *, bias: bool = False, backward: bool = False) -> tuple[LayerSpec, Chain]:
    inputs, outputs, rank = sizes
    spec = monarch(inputs, outputs, rank=rank)
    chain = Chain.of(spec, bias, "relu" if bias else "identity")
    return spec, replace(chain, backward=backward, tf32=dtype == "tf32")


def tiled_as(tiled: MonarchChunks, **fields: Any) -> MonarchChunks:
    given = {field.name: getattr(tiled, field.name) for field in dataclasses.fields(tiled)} | fields
    return (MonarchKept if given["k"] == tiled.sizes[0] else MonarchChunks)(**given)


def forward(sizes: Sizes, dtype: str, **fields: Any) -> tuple[LayerSpec, Plan]:
    """With fields of its tiling as they are given."""
    spec, chain = chain_of(sizes, dtype, bias=True)
    tiled = monarch_chunks.tile(chain, dtype, SOME, GPU)
    assert tiled
    tiled = tiled_as(tiled, **fields)
    assert tiled.shared <= GPU.shared
    return spec, Plan(chain, dtype, SOME, GPU, tiled.passes)


def check_forward(spec: LayerSpec, found: Plan, batch: int, emulator: Emulator) -> None:
    """And NaN for the sample that has one."""
    kernels, draw = emulator.compile(found), drawing(found.dtype)
    x, bias = draw(batch, spec.in_features), draw(spec.out_features)
    weights = [draw(*shape) / 4 for shape in spec.weight_shapes]
    tensors = [torch.from_numpy(t) for t in (x, *weights)]
    right = (naive(spec, tensors[0], tensors[1:]) + torch.from_numpy(bias)).relu().numpy()
    sick = batch // 2
    fine = np.arange(batch) != sick
    healthy: Array | None = None
    for seed, value in enumerate((None, np.nan)):
        if value is not None:
            x = x.copy()
            x[sick] = value
        made, errors = emulator.run(found, kernels, x, weights, bias, seed=seed)
        assert not errors
        y = made[-1].reshape(batch, -1)
        assert value is None or np.isnan(y[sick]).all()
        healthy = y if healthy is None else healthy
        np.testing.assert_array_equal(y[fine], healthy[fine])
    assert np.linalg.norm(healthy - right) <= 4 * EPS[found.dtype] * np.linalg.norm(right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_odd_sizes_in_any_order(sizes: Sizes, dtype: str, emulator: Emulator) -> None:
    check_forward(*forward(sizes, dtype), 37, emulator)


# Parts of groups and of columns, chunks that the last group does not fill, one slot, several tiles of a warp
TILED: list[tuple[Sizes, str, dict[str, int]]] = [
    (((5, 6), (7, 4), 3), "float64", {"samples": 16, "mt": 1, "groups": 3, "columns": 5, "nt": 1, "k": 2, "slots": 2}),
    (((5, 7), (17, 6), 2), "float16", {"samples": 32, "mt": 1, "groups": 4, "columns": 8, "nt": 1, "k": 3, "slots": 1}),
    (
        ((5, 7), (17, 6), 2),
        "bfloat16",
        {"samples": 64, "mt": 2, "groups": 6, "columns": 17, "nt": 2, "k": 2, "slots": 2},
    ),
    (((7, 8), (24, 9), 1), "tf32", {"samples": 32, "mt": 2, "groups": 4, "columns": 16, "nt": 2, "k": 4, "slots": 2}),
    (
        ((3, 7), (9, 11), 7),
        "float32",
        {"samples": 16, "mt": 1, "groups": 11, "columns": 9, "nt": 2, "k": 1, "slots": 2},
    ),
]


@pytest.mark.parametrize(("sizes", "dtype", "fields"), TILED, ids=str)
def test_tiles_need_not_divide_sizes(sizes: Sizes, dtype: str, fields: dict[str, int], emulator: Emulator) -> None:
    spec, found = forward(sizes, dtype, **fields)
    assert isinstance(tiled := found.passes[-1], MonarchChunks) and tiled.chunks > 1 and len(found.passes) == 2
    check_forward(spec, found, 41, emulator)


# Of which a block has some output groups and columns, in parts that do not divide them, or all
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "columns"), [(3, 5), (4, 7)])
def test_weights_that_are_kept(groups: int, columns: int, dtype: str, emulator: Emulator) -> None:
    spec, found = forward(((5, 6), (7, 4), 3), dtype, k=5, groups=groups, columns=columns, samples=16, mt=1, slots=1)
    assert len(found.passes) == 1
    check_forward(spec, found, 41, emulator)


def test_an_activation_that_learns_is_planned(emulator: Emulator) -> None:
    case = Case(monarch((8, 20), (15, 8), rank=2), "float64", 70, BATCHES[-1], activation=LEARNED)
    assert isinstance(case.plan.passes[-1], MonarchChunks)
    check_any_order(case, emulator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SPECS, ids=str)
def test_all_gradients_of_odd_sizes(sizes: Sizes, dtype: str, emulator: Emulator) -> None:
    spec, chain = chain_of(sizes, dtype, backward=True)
    passes = monarch_pairs.all_gradients(chain, dtype, SOME, GPU)
    assert passes
    check_all_gradients_of_groups(spec, Plan(chain, dtype, SOME, GPU, passes), 41, emulator)


def parts_of_pairs(
    sizes: Sizes, dtype: str, some: tuple[int, int], slots: int, *, kept: bool = False
) -> tuple[LayerSpec, Plan]:
    """With so many groups of either kind for a block; those that make x's gradient keep their weights, or do not."""
    spec, chain = chain_of(sizes, dtype, backward=True)
    back, tiled = (of(chain, dtype, SOME, GPU) for of in (monarch_chunks.tile_back, monarch_pairs.tile))
    assert isinstance(back, MonarchChunks) and isinstance(tiled, monarch_pairs.MonarchPairs)
    back = tiled_as(back, k=sizes[1][1] if kept else 1, slots=1 if kept else 2)
    x, y = (replace(side, some=n, samples=16) for side, n in zip(tiled.sides, some, strict=True))
    x, y = replace(x, columns=y.some * tiled.rank), replace(y, columns=x.some * tiled.rank)
    tiled = replace(tiled, x=x, y=y, slots=slots)
    return spec, Plan(chain, dtype, SOME, GPU, (*back.passes, *tiled.passes))


@pytest.mark.parametrize(
    ("sizes", "dtype", "some", "slots"),
    [
        (((5, 6), (7, 4), 3), "float64", (2, 3), 2),
        (((7, 5), (18, 4), 2), "float16", (3, 4), 1),
        (((3, 10), (9, 6), 1), "float32", (3, 4), 2),
    ],
    ids=str,
)
def test_pairs_by_parts(sizes: Sizes, dtype: str, some: tuple[int, int], slots: int, emulator: Emulator) -> None:
    for kept in (False, True):
        spec, found = parts_of_pairs(sizes, dtype, some, slots, kept=kept)
        assert len(found.passes) == 4 - kept and found.passes[-2].split > 1
        check_all_gradients_of_groups(spec, found, 53, emulator)


def test_missing_samples_meet_no_infinite_weight(emulator: Emulator) -> None:
    """Of these a tile makes states of zero, not of an infinite weight times zero: sums stay infinite."""
    spec, chain = chain_of(((3, 5), (4, 3), 2), "float32", backward=True)
    passes = monarch_pairs.all_gradients(chain, "float32", SOME, GPU)
    assert passes
    found, draw = Plan(chain, "float32", SOME, GPU, passes), drawing("float32")
    x, grad = np.abs(draw(5, spec.in_features)), np.abs(draw(5, spec.out_features))
    weights = [draw(*shape) / 4 for shape in spec.weight_shapes]
    weights[1][0, 0, 0] = np.inf
    made, errors = emulator.run(found, emulator.compile(found), x, [*weights, grad], None)
    leaves = [torch.from_numpy(t).requires_grad_() for t in weights]
    right = torch.autograd.grad(naive(spec, torch.from_numpy(x), leaves), leaves, torch.from_numpy(grad))
    expected = np.concatenate([t.numpy().ravel() for t in right])
    assert not errors and np.isposinf(expected).any() and not np.isnan(expected).any()
    np.testing.assert_array_equal(np.isposinf(made[-1]), np.isposinf(expected))


# Barriers behind states
@pytest.mark.parametrize(
    ("which", "old", "new"),
    [
        (1, "x + kXBytes);\n      __syncthreads();\n", "x + kXBytes);\n"),
        (2, "      __syncthreads();\n      add<X>", "      add<X>"),
    ],
    ids=["chunks", "pairs"],
)
def test_finds_what_is_missing(which: int, old: str, new: str, emulator: Emulator) -> None:
    spec, found = parts_of_pairs(((5, 6), (7, 4), 3), "float64", (2, 3), 2)
    kernels, draw = emulator.compile(found, {old: new}), drawing("float64")
    weights = [draw(*shape) for shape in spec.weight_shapes]
    x, grad = draw(19, spec.in_features), draw(19, spec.out_features)
    _, errors = emulator.run(found, kernels, x, [*weights, grad], None)
    assert any(error.startswith(f"pass {which}: ") for error in errors)


def test_finds_padding_that_nobody_clears(emulator: Emulator) -> None:
    spec, found = forward(((5, 6), (7, 4), 3), "float64")
    assert len(found.passes) == 1
    kernels = emulator.compile(found, {"    Base::clear(kResult);\n": ""})
    draw = drawing("float64")
    weights = [draw(*shape) for shape in spec.weight_shapes]
    made, _ = emulator.run(found, kernels, draw(19, spec.in_features), weights, draw(spec.out_features))
    assert np.isnan(made[-1]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_and_spill_nothing(dtype: str, usage_of: UsageOf) -> None:
    _, chain = chain_of(((44, 26), (14, 44), 5), dtype, backward=True)
    passes = monarch_pairs.all_gradients(chain, dtype, BATCHES[-1], Gpu.of(90))
    assert passes
    for made in passes[:-1]:
        usage = usage_of(made.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert usage.stored == 0, usage


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_with_weights_that_are_kept_spill_nothing(dtype: str, usage_of: UsageOf) -> None:
    _, chain = chain_of(((6, 18), (18, 6), 4), dtype, bias=True)
    made = monarch_chunks.tile(chain, dtype, SOME, Gpu.of(90))
    assert isinstance(made, MonarchKept)
    usage = usage_of(made.source("kernel"), "kernel", "sm_90a", OPTIONS)
    assert usage.stored == 0, usage
