"""Kernels for GPUs that the campaign draws at random, at small sizes, and runs on the CPU by tests/emulator.

Forward passes of layers and of stacks of dense ones, all gradients of Kronecker layers, also by states that these have
kept, products with the slopes behind them, layers on several inputs, and steps of recurrences and of decoders: right
numbers, the same for any order of blocks, no race, no access outside of a tensor, no sample that another one reaches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import test_decode_kernels as decoding
import test_inputs_emulated
import test_kept
import test_recurrent_kernels as recurrent
from drawn import KINKED
from emulator.driver import Emulator, why_not
from oracle import spec_id
from test_chain_backward import check as check_gradients
from test_emulator import (
    LEARNED,
    Case,
    all_gradients_of,
    check_slopes,
    check_stack,
    stack_of,
    test_is_right_in_any_order_and_keeps_samples_apart,
)

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import BATCHES
from factorlayer.kernels.recurrent.recurrent_many import DTYPES as DTYPES_OF_MANY
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import plan, plan_stack

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


def drawn_monarch(rng: random.Random) -> Chain:
    """Of as many features as there go in: both numbers of groups divide them."""
    groups, others = (rng.choice([1, 2, 3, 4, 5, 8, 16, 20]) for _ in range(2))
    each = rng.choice([1, 2, 3, 5] if groups * others > 1 else [2, 3, 5])
    inputs, outputs = (groups, others * each), (groups * each, others)
    return recurrent.monarch(inputs, outputs, rng.randint(1, min(3, inputs[1], outputs[0])))


class Emulated:
    """Compiles its emulator once."""

    def __init__(self, seed: int, folder: Path) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self.seed, self.emulator = seed, Emulator(folder)

    def case(self, number: int) -> tuple[str, Callable[[], str]]:
        rng = random.Random(f"emulator {self.seed} {number}")
        words, run = rng.choice(
            [
                self.layer,
                self.layer,
                self.gradients,
                self.kept,
                self.slopes,
                self.stack,
                self.inputs,
                self.recurrence,
                self.decoder,
            ]
        )(rng)

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

    def kept(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """A Kronecker layer that keeps the states between its passes, and its gradients."""
        spec, dtype = replace(drawn_spec(rng), structure="kronecker"), rng.choice(DTYPES)
        spec = replace(spec, rank=min(spec.rank, spec.max_rank))
        batch, arch = min(rng.choice([3, 4, 6]), max(3, int(WORK / spec.multiply_adds()))), rng.choice([80, 90])
        activation = rng.choice(["identity", *(name for name in SMOOTH if name not in KINKED)])

        def run() -> None:
            test_kept.check(spec, test_kept.planned(spec, dtype, arch, activation), batch, self.emulator)

        return f"kept {spec_id(spec)} {dtype} {activation} n{batch} sm_{arch}", run

    def slopes(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        spec, dtype = drawn_spec(rng), rng.choice(DTYPES)
        activation = rng.choice([name for name in SMOOTH if name not in KINKED | {"identity"}])
        batch = min(rng.choice([2, 3, 7, 16, 19, 33, 70]), max(2, int(WORK / spec.multiply_adds())))
        chain = replace(Chain.of(spec, True, activation), slope=spec.out_features)
        planned, gpu = rng.choice(BATCHES), Gpu.of(rng.choice([80, 90]))

        def run() -> None:
            check_slopes(plan(chain, dtype, planned, gpu), spec, activation, batch, self.emulator)

        return f"slopes {spec_id(spec)} {dtype} {activation} n{batch} of {planned} sm_{gpu.arch}", run

    def stack(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        widths = [rng.choice([1, 3, 8, 12, 16, 20, 24, 32, 40, 48, 64]) for _ in range(rng.choice([3, 3, 4, 5]))]
        dtype, batch, architecture = rng.choice(DTYPES), rng.choice([1, 5, 40, 130, 150]), rng.choice([80, 90])
        activation = rng.choice(["relu", "gelu", "tanh", "silu", "learned"])
        layers = stack_of(widths, dtype, activation, "learned" if activation == "learned" else "identity")
        planned, gpu = rng.choice(BATCHES), replace(Gpu.of(architecture), sms=rng.choice([2, 16]))
        words = f"stack {widths} {dtype} n{batch} of {planned} {activation} sm_{architecture} of {gpu.sms}"
        return words, lambda: check_stack(plan_stack(tuple(layers), dtype, planned, gpu), layers, batch, self.emulator)

    def inputs(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """A layer that reads x as several tensors, forward and back."""
        spec, dtype = drawn_spec(rng), rng.choice(DTYPES)
        cuts = sorted(
            rng.sample(range(1, max(2, spec.in_features)), min(rng.choice([1, 1, 2, 3]), spec.in_features - 1))
        )
        features = tuple(b - a for a, b in itertools.pairwise((0, *cuts, spec.in_features)))
        batch = min(rng.choice([2, 3, 5, 9, 19]), max(2, int(WORK / spec.multiply_adds())))
        asked = dtype, rng.choice(BATCHES), rng.choice([80, 90])

        def run() -> None:
            if len(features) < 2 or spec.in_features < 4:
                raise PlanError("x is one tensor")
            forward = test_inputs_emulated.planned(spec, Chain.of(spec, True, "relu"), features, *asked)
            test_inputs_emulated.check_forward(spec, features, forward, batch, self.emulator)
            if spec.structure == "kronecker":
                back = test_inputs_emulated.planned(spec, all_gradients_of(spec), features, *asked)
                test_inputs_emulated.check_gradients(spec, features, back, batch, self.emulator)

        return f"inputs {features} {spec_id(spec)} {asked} n{batch}", run

    def recurrence(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """A recurrence by one block or by several, forward and back, as the planner has it or shared by a cluster."""
        size = rng.choice([1, 3, 5, 8, 12, 16, 20, 24, 33, 40])
        chain = rng.choice(
            [
                recurrent.dense(size),
                recurrent.blocks(rng.choice([2, 3, 4]), min(size, 20)),
                recurrent.kronecker(rng.choice([2, 3, 5, 8, 12, 16, 24]), size),
                recurrent.kronecker(2, rng.choice([2, 3, 4]), rng.choice([2, 5, 8])),
                drawn_monarch(rng),
            ]
        )
        alone, tied = len(chain.contractions) == 1, all(c.tied for c in chain.contractions)
        case = recurrent.Case(
            chain,
            rng.choice(DTYPES),
            rng.choice([1, 2, 3, 5, 9, 18]),
            rng.choice([1, 2, 3, 4, 7]),
            activation=rng.choice(["tanh", "tanh", "elu", "silu"]),
            bias=rng.random() < 0.7,
            **{name: rng.random() < 0.4 for name in ("reverse", "ragged", "starts", "joined")},
        )
        way = rng.choice(["", "", "before", "spread", "many", "cluster"])
        if way == "before":
            case = replace(case, reset="before")
        elif way == "spread" and alone and tied:
            case = replace(case, spread=rng.choice([8, 16]), together=rng.choice([4, 8, 16]))
            case = replace(case, reset=rng.choice(["after", "before"]))
        elif way == "many" and alone and tied and case.dtype in DTYPES_OF_MANY:
            sequences, warpgroups = rng.choice([1, 9, 64, 70, 140]), rng.choice([1, 1, 2])
            case = replace(case, many=rng.choice([16, 32]), warpgroups=warpgroups, in_turns=rng.random() < 0.5)
            case = replace(case, sequences=sequences, steps=min(case.steps, 3))
        elif way == "cluster" and tied and len(chain.contractions) == 2:
            case = replace(case, cluster=rng.choice([2, 3, 4]))

        def run() -> None:
            for backward in (False, True):
                try:
                    recurrent.planned(case, backward)
                except (StopIteration, AssertionError):
                    raise PlanError("nobody takes these") from None
            recurrent.test_forward(case, self.emulator)
            recurrent.test_backward(case, self.emulator)

        return f"recurrence {case}", run

    def decoder(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """A decoder's step and its choice."""
        dtype = rng.choice([name for name in DTYPES if name != "tf32"])
        embedding, hidden = rng.choice([1, 4, 5, 8, 16, 31]), rng.choice([1, 3, 8, 16, 20, 47, 64, 80])
        context, vocabulary = rng.choice([0, 0, 1, 3, 8]), rng.choice([1, 2, 9, 40, 130, 700])
        batch = rng.choice([1, 2, 3, 5, 8, 11, 16])
        made = rng.choice(["best", "drawn", "scores"])
        layer, activation = rng.choice([0, 0, 1]), rng.choice(["tanh", "silu"])
        biased, samples = rng.random() < 0.7, rng.choice([s for s in (1, 2, 4, 8, 16) if s >= batch])
        sizes = embedding, context, hidden, vocabulary, batch, samples
        case = decoding.Case(dtype, *sizes, made, biased, layer, activation)

        def run() -> None:
            decoding.test_a_step(case, self.emulator)
            decoding.test_a_choice(case, rng.random() < 0.3, self.emulator)

        return f"decoder {case}", run
