"""Monarch layers as dense ones, by tiles of every kind: the dense weight and both gradients, by the emulator, against
float64."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compiled import UsageOf
from emulator.driver import Emulator, decode, encode
from test_emulator import EPS, check_all_gradients_of_groups, drawing, monarch
from test_engine import OPTIONS
from test_whole import backward, forward, gpu_of

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import MOST_BLOCKS
from factorlayer.kernels.product.whole_monarch import MonarchGradients, MonarchWeight, Tile
from factorlayer.maths.naive import naive
from factorlayer.plan.plan import Plan

BATCH = 20


@dataclass(frozen=True)
class Tiled:
    """A layer, with tiles of its dense weight and of that one turned, groups k and l of a block, and tiles of gradients
    with their groups k and what they sum over at once."""

    groups_in: tuple[int, int]
    groups_out: tuple[int, int]
    rank: int
    dtype: str
    weight: tuple[Tile, int]
    turned: tuple[Tile, int, int]
    gradients: tuple[Tile, Tile, int, int]
    arch: int = 90

    def __str__(self) -> str:
        return f"{self.groups_in} {self.groups_out} {self.rank} {self.dtype} {self.weight[0]} {self.turned[0]}"

    def of(self, found: Plan) -> Plan:
        """The same plan, by these tiles."""
        passes = []
        for each in found.passes:
            if isinstance(each, MonarchWeight):
                tile, k, groups = self.turned if each.turned else (*self.weight, 1)
                each = dataclasses.replace(each, tile=tile, k=k, others=groups)
            if isinstance(each, MonarchGradients):
                first, second, k, depth = self.gradients
                each = dataclasses.replace(each, of_first=first, of_second=second, k=k, depth=depth)
            passes.append(each)
        return dataclasses.replace(found, passes=tuple(passes))


TILED = [
    # Parts of a group's p's and q's, more r's than are summed over at once, or than a block has
    Tiled((2, 77), (85, 2), 70, "bfloat16", (Tile(1, 48, 40, 1, 5), 1), (Tile(1, 32, 40, 2, 1), 1, 2),
          (Tile(1, 40, 24, 1, 3), Tile(1, 48, 40, 2, 5), 1, 16)),
    # Several groups, not all of them there; of some at a time, and parts of those that take turns in a row
    Tiled((5, 9), (11, 7), 8, "float16", (Tile(2, 11, 9, 1, 1), 3), (Tile(2, 8, 9, 1, 2), 2, 3),
          (Tile(3, 8, 9, 1, 2), Tile(3, 11, 8, 1, 1), 3, 16)),
    Tiled((3, 33), (35, 3), 31, "tf32", (Tile(2, 16, 33, 1, 2), 2), (Tile(1, 35, 16, 2, 2), 1, 2),
          (Tile(2, 16, 33, 1, 4), Tile(2, 35, 16, 2, 2), 2, 32)),
    Tiled((4, 17), (16, 5), 13, "float32", (Tile(4, 16, 17, 1, 3), 4), (Tile(3, 16, 17, 1, 3), 1, 5),
          (Tile(2, 13, 16, 1, 2), Tile(2, 16, 8, 1, 1), 2, 16)),
    Tiled((3, 66), (9, 4), 9, "float32", (Tile(1, 9, 64, 1, 4), 1), (Tile(4, 9, 24, 1, 1), 1, 4),
          (Tile(1, 9, 24, 1, 3), Tile(1, 9, 9, 1, 2), 1, 64), 80),
    Tiled((3, 15), (14, 3), 9, "float64", (Tile(2, 8, 15, 1, 2), 2), (Tile(3, 14, 8, 1, 1), 1, 3),
          (Tile(2, 9, 15, 1, 2), Tile(2, 14, 9, 1, 1), 2, 16)),
    Tiled((1, 40), (24, 1), 20, "float64", (Tile(1, 24, 40, 2, 1), 1), (Tile(1, 16, 16, 1, 2), 1, 1),
          (Tile(1, 16, 40, 1, 3), Tile(1, 24, 16, 2, 1), 1, 32), 80),
    Tiled((6, 8), (8, 6), 8, "bfloat16", (Tile(6, 8, 8, 1, 1), 6), (Tile(6, 8, 8, 1, 1), 1, 6),
          (Tile(2, 8, 8, 1, 1), Tile(2, 8, 8, 1, 1), 2, 16), 80),
    Tiled((9, 1), (1, 8), 1, "float16", (Tile(8, 1, 1, 1, 1), 9), (Tile(8, 1, 1, 1, 1), 2, 8),
          (Tile(9, 1, 1, 1, 1), Tile(9, 1, 1, 1, 1), 9, 16)),
]  # fmt: skip
tiled = pytest.mark.parametrize("case", TILED, ids=str)


@tiled
def test_a_dense_weight_is_what_both_contractions_do(case: Tiled, emulator: Emulator) -> None:
    spec, draw = monarch(case.groups_in, case.groups_out, rank=case.rank), drawing(case.dtype)
    found = case.of(forward(spec, case.dtype, gpu_of(case.arch)))
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    weights = [decode(encode(w, case.dtype), case.dtype).reshape(w.shape) for w in weights]
    x, bias = draw(BATCH, spec.in_features), draw(spec.out_features)
    outputs, errors = emulator.run(found, emulator.compile(found), x, weights, bias, blocks=2, seed=1)
    assert not errors
    right = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]).numpy() + bias
    made = outputs[-1].reshape(right.shape)
    assert np.linalg.norm(made - right) <= 4 * EPS[case.dtype] * np.linalg.norm(right)


@tiled
def test_both_gradients_come_of_the_dense_weights(case: Tiled, emulator: Emulator) -> None:
    """Infinite and NaN where they have to be."""
    spec = monarch(case.groups_in, case.groups_out, rank=case.rank)
    check_all_gradients_of_groups(spec, case.of(backward(spec, case.dtype, gpu_of(case.arch))), BATCH, emulator)


@pytest.mark.parametrize("scale", [2.0**9, 2.0**-12])
def test_gradients_keep_what_is_beyond_half_precision(scale: float, emulator: Emulator) -> None:
    """The dense weight's is, where those of both weights are not."""
    spec, draw = monarch((2, 21), (19, 3), rank=12), drawing("float16")
    found = backward(spec, "float16", gpu_of(90))
    x, grad = (draw(BATCH, n) * scale for n in (spec.in_features, spec.out_features))
    weights = [draw(*shape) / (4 * scale) for shape in spec.weight_shapes]
    values = [decode(encode(t, "float16"), "float16").reshape(t.shape) for t in (x, *weights, grad)]
    x, *weights, grad = values
    made, errors = emulator.run(found, emulator.compile(found), x, [*weights, grad], None, blocks=2, seed=1)
    assert not errors
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
    right = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
    parts = np.split(made[-1], [weights[0].size])
    for part, expected in zip(parts, (t.numpy().ravel() for t in right[1:]), strict=True):
        assert np.linalg.norm(part - expected) <= 2 * EPS["float16"] * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [
        ((53, 136), (136, 53), 51),
        ((45, 74), (74, 45), 17),
        ((14, 65), (70, 14), 57),
        ((31, 34), (50, 31), 33),
        ((42, 80), (80, 42), 13),
        ((60, 24), (24, 60), 11),
        ((2, 226), (226, 2), 1),
        ((2, 300), (300, 2), 150),
        ((90, 3), (5, 70), 2),
    ],
    ids=str,
)
def test_they_compile_and_spill_nothing(
    inputs: tuple[int, int], outputs: tuple[int, int], rank: int, dtype: str, usage_of: UsageOf
) -> None:
    spec = monarch(inputs, outputs, rank=rank)
    for found in (forward(spec, dtype, Gpu.of(90)), backward(spec, dtype, Gpu.of(90))):
        mine = [p for p in found.passes if isinstance(p, (MonarchWeight, MonarchGradients))]
        assert mine
        for p in mine:
            usage = usage_of(p.source("kernel"), "kernel", "sm_90a", OPTIONS)
            assert not usage.spilled and not re.search(r"\b(warning|error)\b", usage.notes), f"{p}: {usage}"
            assert p.shared <= found.gpu.shared and p.split <= MOST_BLOCKS
