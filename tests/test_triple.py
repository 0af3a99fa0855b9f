"""Three large factors in one pass of clusters: where the planner takes it, what the compilers make of it, and, on a CPU by
tests/emulator, right results without a race. There two blocks are a cluster, with a warpgroup for each of their tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator.driver import Array, Emulator, decode, encode, why_not
from oracle import kronecker

from factorlayer import triple
from factorlayer.chain import Chain
from factorlayer.gpu import Gpu
from factorlayer.plan import Plan
from factorlayer.planner import BATCHES, cuts, plan
from factorlayer.resident import Work
from factorlayer.runtime import compile_kernel
from factorlayer.spec import LayerSpec
from factorlayer.triple import DTYPES, Triple

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
HOPPER = Gpu.of(90)
EPS = {"tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
Sizes = tuple[int, int, int]
SMALL, MEDIUM, LARGE = BATCHES


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
