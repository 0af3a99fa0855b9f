"""Kernels for GPUs that the campaign draws at random, at small sizes, and runs on the CPU by tests/emulator.

Forward passes of layers and of stacks of dense ones, and all gradients of Kronecker layers: right numbers, the same for
any order of blocks, no race, no access outside of a tensor, no sample that another one reaches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from emulator.driver import Emulator, why_not
from oracle import spec_id
from test_chain_backward import check as check_gradients
from test_emulator import (
    LEARNED,
    Case,
    all_gradients_of,
    check_stack,
    stack_of,
    test_is_right_in_any_order_and_keeps_samples_apart,
)

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import BATCHES, plan, plan_stack

SIZES = [1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 16, 16, 17, 20, 24, 31, 32, 33, 40, 48, 64]
SMALL_SIZES = [1, 2, 3, 4, 5, 8]
WORK = 2e6  # multiply-adds
# Of named activations those that a rounding of what they take does not move by more than itself
SMOOTH = [name for name in ACTIVATIONS if name not in ("square", "relu_squared", "sine")]


def drawn_spec(rng: random.Random) -> LayerSpec:
    count = rng.choice([1, 2, 2, 2, 3, 4])
    pool = SIZES if count < 3 else SMALL_SIZES
    p, q = (tuple(rng.choice(pool) for _ in range(count)) for _ in range(2))
    spec = LayerSpec(rng.choice(["kronecker", "kronecker", "monarch"]), p, p if rng.random() < 0.3 else q)
    most = 1 if spec.structure == "monarch" and count != 2 else min(4, spec.max_rank)
    return replace(spec, rank=rng.choice([1, 1, rng.randint(1, most)]))


class Emulated:
    """Compiles its emulator once."""

    def __init__(self, seed: int, folder: Path) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self.seed, self.emulator = seed, Emulator(folder)

    def case(self, number: int) -> tuple[str, Callable[[], str]]:
        rng = random.Random(f"emulator {self.seed} {number}")
        words, run = rng.choice([self.layer, self.layer, self.gradients, self.stack])(rng)

        def checked() -> str:
            try:
                run()
            except PlanError:
                return "without a plan"
            return words.split()[0]

        return f"case {number}: {words}", checked

    def layer(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        spec, dtype = drawn_spec(rng), rng.choice(DTYPES)
        batch = min(rng.choice([1, 2, 3, 7, 8, 16, 19, 33, 70]), max(1, int(WORK / spec.multiply_adds())))
        activation = rng.choice(["identity", "relu", *SMOOTH, LEARNED])
        case = Case(spec, dtype, batch, rng.choice(BATCHES), rng.choice([80, 90]), rng.choice([1, 2, 3, 4]), activation)
        return (
            f"layer {case} {activation} on {case.processors}",
            lambda: test_is_right_in_any_order_and_keeps_samples_apart(case, self.emulator),
        )

    def gradients(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        spec, dtype = replace(drawn_spec(rng), structure="kronecker"), rng.choice(DTYPES)
        spec = replace(spec, rank=min(spec.rank, spec.max_rank))
        batch = min(rng.choice([2, 3, 5, 9]), max(2, int(WORK / spec.multiply_adds())))
        gpu = replace(Gpu.of(rng.choice([80, 90])), sms=2)

        def run() -> None:
            found: Plan = plan(all_gradients_of(spec), dtype, rng.choice(BATCHES), gpu)
            check_gradients(spec, found, batch, self.emulator)

        return f"gradients {spec_id(spec)} {dtype} n{batch} sm_{gpu.arch}", run

    def stack(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        widths = [rng.choice([1, 3, 8, 12, 16, 20, 24, 32, 40, 48, 64]) for _ in range(rng.choice([3, 3, 4, 5]))]
        dtype, batch, architecture = rng.choice(DTYPES), rng.choice([1, 5, 40, 130, 150]), rng.choice([80, 90])
        activation = rng.choice(["relu", "gelu", "tanh", "silu", "learned"])
        layers = stack_of(widths, dtype, activation, "learned" if activation == "learned" else "identity")
        words, gpu = f"stack {widths} {dtype} n{batch} {activation} sm_{architecture}", Gpu.of(architecture)
        return words, lambda: check_stack(
            plan_stack(tuple(layers), dtype, BATCHES[-1], replace(gpu, sms=2)), layers, batch, self.emulator
        )
