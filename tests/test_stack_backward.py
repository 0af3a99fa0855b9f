"""All gradients of stacks of dense layers of any widths: which the planner takes, what the compilers make of them, and, by
tests/emulator, right results without a race."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from emulator.driver import Emulator
from once import Compile
from oracle import kronecker
from test_emulator import check_gradients_of_stack, stack_of

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.stack.stack_backward import StackBackward, tile, tilings
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import BATCHES, Plan

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
MOST_SPILLED = 80  # bytes, of single values that ptxas keeps in memory for a while beside functions in double
SMALL, MEDIUM, LARGE = BATCHES
HOPPER, AMPERE = Gpu.of(90), Gpu.of(80)
ON_HOPPER, ON_AMPERE = replace(HOPPER, sms=1), replace(AMPERE, sms=2)


def tiled(layers: list[Chain], dtype: str, gpu: Gpu, **fields: int) -> Plan:
    """The first tiling that has these fields."""
    found = tilings(tuple(layers), dtype, LARGE, gpu)
    planned = next(p for p in found if all(getattr(p, name) == value for name, value in fields.items()))
    return Plan(replace(layers[0], backward=True), dtype, LARGE, gpu, planned.passes)


# Widths that 8 divides and not, a single feature, slopes told by results and kept, batches that end within a tile
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
@pytest.mark.parametrize("gpu", [ON_HOPPER])
def test_is_right(
    widths: list[int],
    dtype: str,
    activation: str,
    last: str,
    batch: int,
    fields: dict[str, int],
    gpu: Gpu,
    emulator: Emulator,
) -> None:
    layers = stack_of(widths, dtype, activation, last)
    check_gradients_of_stack(tiled(layers, dtype, gpu, **fields), layers, batch, emulator)
