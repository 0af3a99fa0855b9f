"""Kernels of gated recurrent units on the emulator: against the definition in float64, for any walk of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import class_of
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.recurrent import recurrent, recurrent_cluster, recurrent_many, recurrent_spread
from factorlayer.kernels.recurrent.recurrent import Recurrent, RecurrentBackward
from factorlayer.kernels.recurrent.recurrent_cluster import RecurrentCluster, RecurrentClusterBackward
from factorlayer.kernels.recurrent.recurrent_many import RecurrentMany, RecurrentManyBackward
from factorlayer.kernels.recurrent.recurrent_slopes import RecurrentSlopes
from factorlayer.kernels.recurrent.recurrent_spread import RecurrentSpread, RecurrentSpreadBackward
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import GATES, Recurrence
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.maths.steps import Walk, naive
from factorlayer.plan.plan import PlanError
from factorlayer.plan.planner import has_plan, plan_of

if TYPE_CHECKING:
    from compiled import UsageOf
    from emulator.driver import Emulator

GPU = Gpu.of(90)
OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
TORCH = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32}
TORCH |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_SPILLED = 16  # bytes of a thread, of one of many kernels
# Of numbers of about 1: what rounding states, sums and slopes may make of them
NEAR = {"float64": 1e-11, "float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 8e-2}


def dense(size: int) -> Chain:
    return Chain((Contraction(0, 1, size, size, 1, tied=True),))


def blocks(count: int, size: int) -> Chain:
    return Chain((Contraction(0, count, size, size, 1, tied=False),))


def kronecker(*sizes: int, to: Sequence[int] = ()) -> Chain:
    return Chain(LayerSpec("kronecker", sizes, tuple(to) or sizes).contractions)


def monarch(inputs: Sequence[int], outputs: Sequence[int], rank: int = 1) -> Chain:
    """K groups of p features to s features of L groups: (K, p), (s, L); or any number of modes."""
    return Chain(LayerSpec("monarch", tuple(inputs), tuple(outputs), rank).contractions)


@dataclass(frozen=True)
class Case:
    chain: Chain
    dtype: str
    sequences: int = 3
    steps: int = 5
    reset: str = "after"
    bias: bool = True
    activation: str = "tanh"
    reverse: bool = False
    ragged: bool = False
    starts: bool = False
    joined: bool = False
    units: int = 0  # of a block, if not what the planner takes
    spread: int = 0  # features of a block, if several share the matrix
    together: int = 16  # sequences that it has at once
    cluster: int = 0  # blocks, if these share the state
    many: int = 0  # features of a block, if there are many sequences
    warpgroups: int = 1  # of such a block
    in_turns: bool = False  # whether it is the only one, along x of the grid
    empty: int = 0  # sequences, the first ones, that have no step, if they have several lengths

    def __str__(self) -> str:
        words = [
            self.dtype,
            self.chain.text.replace(" ", "_").replace(";", ""),
            f"{self.sequences}x{self.steps}",
            self.reset,
        ]
        words += [name for name in ("reverse", "ragged", "starts", "joined") if getattr(self, name)]
        return "-".join(
            words
            + [self.activation] * (self.activation != "tanh")
            + [f"units{self.units}"] * bool(self.units)
            + [f"cluster{self.cluster}"] * bool(self.cluster)
            + [f"many{self.many}x{self.warpgroups}"] * bool(self.many)
        )

    @property
    def recurrence(self) -> Recurrence:
        chain = replace(self.chain, bias=self.bias and self.reset == "after", activation=self.activation)
        return Recurrence(chain, self.reset, self.reverse)  # type: ignore[arg-type]


CASES = [
    Case(dense(16), "bfloat16"),
    Case(dense(10), "float32", 5, 4, ragged=True),
    Case(dense(7), "float64", starts=True, bias=False),
    Case(dense(40), "tf32", 9, 3, units=4),
    Case(dense(16), "float16", reverse=True, ragged=True, joined=True),
    Case(blocks(3, 16), "bfloat16", 4, 4, starts=True, joined=True),
    Case(blocks(2, 9), "float32", 2, 3, reset="before"),
    Case(kronecker(4, 8), "float64", ragged=True, starts=True),
    Case(kronecker(5, 7), "bfloat16"),
    Case(kronecker(6, 4, to=(4, 6)), "float16", 2, 4, reset="before", starts=True),
    Case(kronecker(8, 24), "tf32", reset="before", reverse=True),
    Case(kronecker(16, 16), "float32", 2, 2, activation="elu"),
    Case(kronecker(3, 4, 5), "float64", reset="before", ragged=True),
    Case(kronecker(4, 4, 4), "bfloat16", 5, 3, units=2, starts=True),
    Case(kronecker(32, 8), "float16", 1, 9, activation="relu"),
    Case(dense(24), "bfloat16", 3, 5, spread=8),
    Case(dense(32), "float32", 18, 4, starts=True, ragged=True, spread=16),
    Case(dense(21), "float64", 4, 3, ragged=True, spread=8, bias=False),
    Case(dense(19), "float16", 2, 4, reverse=True, starts=True, spread=8),
    Case(dense(40), "tf32", 5, 3, joined=True, spread=16, activation="elu"),
    Case(dense(24), "bfloat16", 11, 4, spread=8, together=8, ragged=True),
    Case(dense(32), "float32", 7, 4, starts=True, ragged=True, spread=16, together=4),
    Case(dense(21), "float64", 5, 3, ragged=True, spread=8, together=4, reverse=True),
    Case(dense(40), "tf32", 9, 3, joined=True, spread=16, together=8, activation="elu"),
    Case(dense(32), "float16", 9, 3, spread=8, together=8, reset="before", starts=True),
    Case(dense(24), "bfloat16", 3, 5, spread=8, reset="before", starts=True),
    Case(dense(32), "float32", 18, 4, spread=16, reset="before", ragged=True),
    Case(dense(21), "float64", 4, 3, spread=8, reset="before", ragged=True, starts=True, reverse=True),
    Case(dense(19), "float16", 2, 4, spread=8, reset="before", joined=True),
    Case(dense(40), "tf32", 5, 3, spread=16, reset="before", joined=True, activation="elu"),
    Case(dense(24), "bfloat16", 3, 5, many=16, starts=True),
    Case(dense(40), "tf32", 70, 3, many=16, warpgroups=2, joined=True, ragged=True),
    Case(dense(33), "float16", 9, 4, many=16, ragged=True, starts=True, reverse=True),
    Case(dense(72), "bfloat16", 130, 3, many=48, in_turns=True, ragged=True, starts=True, bias=False),
    Case(dense(96), "float16", 140, 2, many=32, warpgroups=2, in_turns=True, joined=True, activation="elu"),
    Case(dense(21), "tf32", 66, 3, many=16, in_turns=True, starts=True),
    Case(dense(24), "float16", 130, 3, many=16, in_turns=True, ragged=True, empty=64),
    Case(monarch((8, 16), (16, 8)), "bfloat16", starts=True),
    Case(monarch((5, 6), (10, 3), 2), "float32", 3, 4, ragged=True),
    Case(monarch((3, 7), (3, 7), 2), "float64", 2, 3, reset="before", ragged=True, starts=True),
    Case(monarch((24, 2), (24, 2)), "tf32", 5, 3, units=2, reverse=True),
    Case(monarch((4, 32), (8, 16), 4), "float16", 2, 4, reset="before", joined=True),
    Case(monarch((2, 20), (4, 10), 3), "bfloat16", 5, 3, units=4, ragged=True, activation="elu"),
    Case(monarch((20, 8), (16, 10)), "float16", 3, 3, units=2, bias=False),
    Case(monarch((2, 3, 4), (4, 2, 3)), "float32", 2, 3),
    Case(monarch((1, 20), (5, 4), 2), "float16", 2, 2, reset="before", units=2),
    Case(monarch((8, 3), (24, 1), 2), "float32", 2, 1, starts=True),
    Case(monarch((4, 96), (96, 4)), "float64", 1, 2),  # without padding
    Case(kronecker(16, 16), "bfloat16", 2, 5, cluster=2, starts=True),
    Case(kronecker(14, 20), "float32", 3, 4, cluster=4, ragged=True, starts=True, units=2),
    Case(kronecker(6, 24), "float64", 3, 4, cluster=2, ragged=True, reverse=True, bias=False),
    Case(kronecker(40, 24), "float16", 2, 3, cluster=2, joined=True, ragged=True),
    Case(kronecker(24, 48), "tf32", 2, 3, cluster=3, starts=True, activation="elu"),
]


class Rows:
    """The rows of a case, sequences one behind another if they are of several lengths."""

    def __init__(self, case: Case, rng: torch.Generator) -> None:
        b, t = case.sequences, case.steps
        self.walk = Walk(b, t, of_sequence=1, of_step=b)
        self.count = b * t
        if case.ragged:
            lengths = torch.randint(0, t + 1, (b,), generator=rng)
            lengths[b // 2] = t
            lengths[: case.empty] = 0
            first = torch.cumsum(lengths, 0) - lengths
            self.count = int(lengths.sum())
            self.walk = Walk(b, t, first=first, lengths=lengths, offsets=torch.arange(t))
        self.starts = torch.rand(self.count, generator=rng) < 0.3 if case.starts else None

    @property
    def places(self) -> list[Tensor | int | None]:
        walk = self.walk
        return [self.starts, walk.first, walk.lengths, walk.offsets, *walk.numbers, self.count]


def written(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def run(
    emulator: Emulator,
    planned: Pass,
    batch: int,
    x: Tensor,
    bias: Tensor | None,
    places: Sequence[Tensor | int | None],
    outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    seed: int,
    before: Sequence[Tensor] = (),
    unwritten: int = 0,
    in_turns: bool = False,
) -> list[Tensor]:
    """What a kernel writes, from tensors and numbers in the places of weights. `before` is what it finds in its
    outputs, of which it leaves so many bytes `unwritten`; the last output is where sums are. One block along x of the
    grid may take all sequences `in_turns`."""
    import subprocess

    from emulator.driver import for_the_cpu

    library = emulator.library(0, for_the_cpu(planned.source("kernel")))
    folder = emulator.folder
    for stale in folder.glob("w*"):
        stale.unlink()
    (folder / "maps").write_text("")
    (folder / "x").write_bytes(written(x))
    (folder / "bias").write_bytes(b"" if bias is None else written(bias))
    for i, place in enumerate(places):
        if isinstance(place, Tensor):
            (folder / f"w{i}").write_bytes(written(place))
        else:
            (folder / f"n{i}").write_text(str(place or 0))
    sizes = [int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size() for shape, dtype in outputs]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // 16) * 16)
    grid = 1 if in_turns else -(-batch // planned.units_per_block), planned.split
    together = planned.split if isinstance(planned, (RecurrentSpread, RecurrentCluster, RecurrentMany)) else 1
    if before:
        (folder / "before").write_bytes(
            b"".join(written(t).ljust(-(-size // 16) * 16, b"\0") for t, size in zip(before, sizes, strict=True))
        )
    scratch = folder / "scratch"
    scratch.unlink(missing_ok=True)
    if isinstance(planned, RecurrentMany):
        scratch.write_bytes(b"\0" * planned.counters_bytes + b"\xff" * (planned.scratch[2] - planned.counters_bytes))
    missing = begins[-1] - sum(sizes) + unwritten
    numbers = [seed, batch, begins[-1], missing, planned.shared, planned.threads, together, *grid]
    numbers += [int(bias is not None), len(places), begins[-2] if before else begins[-1], *begins[1:-1]]
    (folder / "y").unlink(missing_ok=True)
    command = [str(emulator.program), str(library), str(folder), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    for number in folder.glob("n*"):  # other tests have tensors in these places
        number.unlink()
    (folder / "before").unlink(missing_ok=True)
    scratch.unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout[:4000] + f" exit code {done.returncode}"
    memory = (folder / "y").read_bytes()
    parts = [memory[at : at + size] for at, size in zip(begins, sizes, strict=False)]
    return [
        torch.frombuffer(bytearray(part or b"\0" * 8), dtype=dtype)[: int(np.prod(shape))].view(shape)
        for part, (shape, dtype) in zip(parts, outputs, strict=True)
    ]


def planned(case: Case, backward: bool = False) -> Recurrent | RecurrentSpread | RecurrentCluster | RecurrentMany:
    if case.many:
        of_many = RecurrentManyBackward if backward else RecurrentMany
        tilings = recurrent_many.tilings(of_many, case.recurrence, case.dtype, 1000, GPU)
        return next(p for p in tilings if (p.own, p.warpgroups) == (case.many, case.warpgroups))
    if case.cluster:
        family = RecurrentClusterBackward if backward else RecurrentCluster
        of_cluster = recurrent_cluster.tilings(family, case.recurrence, case.dtype, 1000, GPU)
        return next(p for p in of_cluster if p.cluster == case.cluster and p.units == (case.units or 1))
    if case.spread:
        kind = RecurrentSpreadBackward if backward else RecurrentSpread
        all_of = recurrent_spread.tilings(kind, case.recurrence, case.dtype, case.sequences, GPU)
        return next(p for p in all_of if p.own == case.spread and p.units == case.together)
    found = recurrent.tile(case.recurrence, case.dtype, case.sequences, GPU, backward)
    if case.units:
        family = RecurrentBackward if backward else Recurrent
        found = next(
            p for p in recurrent.tilings(family, case.recurrence, case.dtype, 1000, GPU) if p.units == case.units
        )
    assert found is not None
    return found


class Inputs:
    def __init__(self, case: Case) -> None:
        rng = torch.Generator().manual_seed(5)
        dtype = TORCH[case.dtype]

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=rng, dtype=torch.float64) * scale).to(dtype)

        recurrence = case.recurrence
        self.rows, hidden = Rows(case, rng), recurrence.hidden
        self.gates = [random(self.rows.count, hidden) for _ in range(GATES)]
        self.joined = torch.cat(self.gates, 1) if case.joined else None
        self.initial = random(case.sequences, hidden)
        self.bias = random(hidden) if recurrence.chain.bias else None
        self.weights = []
        for _ in range(GATES):
            for c in sorted(recurrence.chain.contractions, key=lambda c: c.weight):
                shape = (c.q, c.p) if c.tied else (c.outer * c.inner, c.q, c.p)
                self.weights.append(random(*shape, scale=c.p**-0.5))
        self.grad = random(self.rows.count, hidden)

    def wanted(self, case: Case) -> tuple[Tensor, list[Tensor]]:
        """The output, and gradients of the gates' inputs and of the initial state, in float64."""
        double = [t.double().requires_grad_() for t in (*self.gates, self.initial)]
        weights = [w.double() for w in self.weights]
        bias = None if self.bias is None else self.bias.double()
        function = ACTIVATIONS[case.activation]
        output = naive(
            case.recurrence, double[:3], double[3], weights, bias, self.rows.starts, self.rows.walk, function
        )
        return output.detach(), list(torch.autograd.grad(output, double, self.grad.double()))

    def gate_places(self) -> tuple[Tensor, list[Tensor]]:
        """The first gate's inputs, and those of the others; a joined tensor's begin there."""
        if self.joined is None:
            return self.gates[0], self.gates[1:]
        hidden = self.initial.shape[1]
        flat = self.joined.flatten()
        return flat, [flat[hidden:], flat[2 * hidden :]]


def row_of(case: Case) -> int:
    return case.recurrence.hidden * (GATES if case.joined else 1)


def assert_near(made: Tensor, wanted: Tensor, dtype: str) -> None:
    assert made.shape == wanted.shape
    torch.testing.assert_close(made.double(), wanted.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, emulator: Emulator) -> None:
    inputs = Inputs(case)
    x, others = inputs.gate_places()
    places = [*inputs.weights, *others, inputs.initial, *inputs.rows.places, row_of(case)]
    # Where blocks of a matrix hand on states, those that are reset before the product are in a tensor, too.
    handed_on = 1 + (case.spread > 0 and case.reset == "before")
    outputs = [(tuple(inputs.gates[0].shape), x.dtype)] * handed_on
    wanted, _ = inputs.wanted(case)
    p = planned(case)
    made = [
        run(emulator, p, case.sequences, x, inputs.bias, places, outputs, seed, in_turns=case.in_turns)[0]
        for seed in (1, 2)
    ]
    assert_near(made[0], wanted, case.dtype)
    assert torch.equal(made[0].view(torch.uint8), made[1].view(torch.uint8)), "not the same in any order"


@pytest.mark.parametrize(
    "case",
    [
        Case(monarch((3, 8), (8, 3), 2), "float32", 2, 1),
        Case(monarch((4, 4), (2, 8)), "bfloat16", 2, 1, units=2),
    ],
    ids=str,
)
def test_infinite_weights_of_a_group_come_to_its_features_alone(case: Case, emulator: Emulator) -> None:
    """By the others' infinities their sums would be NaN."""
    inputs = Inputs(case)
    for weight in inputs.weights[-2:]:  # the candidate's
        weight[-1, 0, 1] = torch.inf
    x, others = inputs.gate_places()
    places = [*inputs.weights, *others, inputs.initial, *inputs.rows.places, row_of(case)]
    outputs = [(tuple(inputs.gates[0].shape), x.dtype)]
    wanted, _ = inputs.wanted(case)
    assert wanted.isfinite().all()
    assert_near(run(emulator, planned(case), 2, x, inputs.bias, places, outputs, 1)[0], wanted, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, emulator: Emulator) -> None:
    inputs = Inputs(case)
    recurrence, dtype = case.recurrence, TORCH[case.dtype]
    output, grads = inputs.wanted(case)
    before = states_before(case, inputs, output)
    products = products_of(case, inputs, before)
    x, others = inputs.gate_places()
    shape = tuple(inputs.gates[0].shape)
    slopes_pass = RecurrentSlopes(recurrence, case.dtype, GPU)
    products_row = row_of(case) if case.reset == "after" else recurrence.hidden
    if products_row == recurrence.hidden:
        given = [p.to(dtype) for p in products]
    else:
        flat = torch.cat([p.to(dtype) for p in products], 1).flatten()
        given = [flat[gate * recurrence.hidden :] for gate in range(GATES)]
    places = [*others, *given, before.to(dtype), row_of(case), products_row]
    slopes = run(emulator, slopes_pass, shape[0], x, inputs.bias, places, [(shape, dtype)] * 5, 1)
    p = planned(case, backward=True)
    places = [*inputs.weights, *slopes, *inputs.rows.places, recurrence.hidden]
    outputs = [(shape, dtype)] * (4 - (case.reset == "before")) + [(tuple(inputs.initial.shape), dtype)]
    made = [
        run(emulator, p, case.sequences, inputs.grad, None, places, outputs, seed, in_turns=case.in_turns)
        for seed in (1, 2)
    ]
    for one, two in zip(*made, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), "not the same in any order"
    for each, wanted in zip([*made[0][:GATES], made[0][-1]], grads, strict=True):
        assert_near(each, wanted, case.dtype)
    if case.reset == "after":
        reset = torch.sigmoid(inputs.gates[0].double() + products[0])
        assert_near(made[0][3], grads[2] * reset, case.dtype)


def states_before(case: Case, inputs: Inputs, output: Tensor) -> Tensor:
    """Those before each row's step."""
    rows, there = inputs.rows.walk.rows(output)
    before = torch.empty_like(output)
    for sequence in range(case.sequences):
        mine = rows[there[:, sequence], sequence].tolist()
        state = inputs.initial[sequence].double()
        for row in reversed(mine) if case.reverse else mine:
            before[row] = (
                inputs.initial[sequence].double()
                if inputs.rows.starts is not None and inputs.rows.starts[row]
                else state
            )
            state = output[row]
    return before


def products_of(case: Case, inputs: Inputs, before: Tensor) -> list[Tensor]:
    from factorlayer.maths.batched import batched

    count = case.recurrence.weights
    weights = [w.double() for w in inputs.weights]

    def product(gate: int, x: Tensor) -> Tensor:
        return batched(case.recurrence.chain, x, weights[gate * count : (gate + 1) * count])

    reset, update = product(0, before), product(1, before)
    if case.reset == "before":
        before = torch.sigmoid(inputs.gates[0].double() + reset) * before
    return [reset, update, product(2, before)]


@pytest.mark.parametrize("family", [RecurrentSpread, RecurrentSpreadBackward])
def test_blocks_that_wait_for_one_another_are_no_more_than_multiprocessors(family: type[RecurrentSpread]) -> None:
    asked = Case(dense(1024), "bfloat16").recurrence, "bfloat16", 16
    assert {p.split for p in recurrent_spread.tilings(family, *asked, Gpu(90, 132, 232448))} >= {128, 64}
    few = list(recurrent_spread.tilings(family, *asked, Gpu(90, 100, 232448)))
    assert few and all(p.split <= 100 for p in few)
    assert all(p.source("k").count("\n" + recurrent_spread.TOGETHER) == 1 for p in few)
    with pytest.raises(PlanError, match="do not fit"):
        plan_of(asked[0].text, "bfloat16", 0, Gpu(90, 12, 232448))


@pytest.mark.parametrize("reset", ["after", "before"])
@pytest.mark.parametrize("backward", [False, True])
def test_all_that_blocks_hand_on_is_filled_before(reset: str, backward: bool, emulator: Emulator) -> None:
    """Rows that sequences have, and nothing else."""
    case = Case(dense(24), "bfloat16", 3, 5, reset=reset, ragged=True, spread=8)
    inputs, found = Inputs(case), planned(case, backward)
    assert isinstance(found, RecurrentSpread)
    fill = found.passes[0]
    others: list[Tensor | int | None] = [inputs.gates[0]] * (5 if backward else 3)
    places = [*inputs.weights, *others, *inputs.rows.places, case.recurrence.hidden]
    held = [torch.ones_like(inputs.gates[0]) for _ in range(GATES + (reset == "after") if backward else found.filled)]
    filled = {"after": [0, 1, 3], "before": [0, 1, 2]}[reset] if backward else list(range(found.filled))
    outputs = [(tuple(each.shape), each.dtype) for each in held]
    unwritten = (len(held) - len(filled)) * len(written(held[0]))
    made = run(
        emulator, fill, case.sequences, inputs.gates[0], None, places, outputs, 1, before=held, unwritten=unwritten
    )
    for i, each in enumerate(made):
        assert (each.view(torch.int16) == -1).all() if i in filled else torch.equal(each, held[i])


# Features, dtype
MANY = [(512, "bfloat16"), (333, "float16"), (264, "tf32"), (1024, "bfloat16")]


@pytest.mark.parametrize("family", [RecurrentMany, RecurrentManyBackward])
@pytest.mark.parametrize(("hidden", "dtype"), MANY)
def test_warps_that_part_have_the_registers_that_they_take(
    hidden: int, dtype: str, family: type[RecurrentMany], usage_of: UsageOf
) -> None:
    """Who multiplies takes what who brings gives back: more than the block has, and they would wait for ever."""
    recurrence = Case(dense(hidden), dtype, bias=family is RecurrentMany).recurrence
    found = list(recurrent_many.tilings(family, recurrence, dtype, 1000, GPU))
    assert {plan.warpgroups for plan in found} >= {1, 2}
    for plan in found:
        usage = usage_of(plan.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert usage.spilled <= MOST_SPILLED, plan
        more, fewer = recurrent_many.REGISTERS[plan.warpgroups]
        assert 128 * (plan.warpgroups * more + fewer) <= usage.registers * plan.threads


def test_many_sequences_share_a_dense_matrix() -> None:
    def taken(
        hidden: int, batch: int, dtype: str = "bfloat16", arch: int = 90, reset: str = "after"
    ) -> set[type[Pass]]:
        text = Recurrence(dense(hidden), reset).text  # type: ignore[arg-type]
        plans = [plan_of(text + asked, dtype, class_of(batch), Gpu.of(arch)) for asked in ("", " | backward")]
        return {type(plan.passes[-1]) for plan in plans}

    many, spread = {RecurrentMany, RecurrentManyBackward}, {RecurrentSpread, RecurrentSpreadBackward}
    assert taken(512, 4096) == taken(768, 200) == taken(333, 100, "float16") == many
    assert [taken(hidden, 16) for hidden in (512, 768, 1024)] == [
        spread
    ] * 3  # a class of 5 to 64 sequences has one plan
    assert taken(512, 16) == taken(512, 4096, "float32") == taken(512, 4096, arch=80) == spread
    assert taken(512, 4096, reset="before") == spread
    tilings = [
        plan
        for hidden, batch in itertools.product((200, 512, 1024), (65, 1000, 100_000))
        for plan in recurrent_many.tilings(
            RecurrentMany, Case(dense(hidden), "bfloat16").recurrence, "bfloat16", batch, GPU
        )
    ]
    for plan in tilings:
        assert plan.split * (plan.at_once // plan.warpgroups) <= GPU.sms, "all blocks are on the GPU at once"
        assert plan.source("k").count("\n" + recurrent_spread.TOGETHER) == 1


def test_counters_begin_at_zero(emulator: Emulator) -> None:
    case = Case(dense(24), "bfloat16", many=16)
    counters, p = planned(case).passes
    assert isinstance(p, RecurrentMany)
    x, count = torch.ones(1), p.counters_bytes // 4
    held = torch.ones(count, dtype=torch.int32)
    written_bytes = p.at_once * recurrent_many.COUNTER_BYTES
    (made,) = run(
        emulator, counters, 1, x, None, [], [((count,), torch.int32)], 1, [held], p.counters_bytes - written_bytes
    )
    assert not made[: written_bytes // 4].any() and (made[written_bytes // 4 :] == 1).all()


def test_clusters_share_out_large_factors() -> None:
    def taken(chain: Chain, dtype: str, arch: int = 90, reset: str = "after", asked: str = "") -> type[Pass]:
        text = Recurrence(replace(chain, bias=reset == "after"), reset).text  # type: ignore[arg-type]
        return type(plan_of(text + asked, dtype, 0, Gpu.of(arch)).passes[-1])

    large = kronecker(64, 64)
    assert taken(large, "bfloat16") is taken(large, "float32") is RecurrentCluster
    assert taken(kronecker(48, 96), "tf32", asked=" | backward") is RecurrentClusterBackward
    assert taken(large, "bfloat16", 80) is taken(large, "bfloat16", reset="before") is Recurrent
    assert taken(kronecker(4, 4), "bfloat16") is Recurrent
    odd = [replace(Case(kronecker(*sizes), "tf32"), cluster=2) for sizes in ((12, 3), (33, 16))]
    for case, family in itertools.product(odd, (RecurrentCluster, RecurrentClusterBackward)):
        assert not list(recurrent_cluster.tilings(family, case.recurrence, case.dtype, 1000, GPU))


# Groups and features of the states that a Monarch matrix goes from and to, rank, dtype, sequences
HELD = [
    ((8, 128), (128, 8), 1, "bfloat16", 16),
    ((16, 32), (32, 16), 1, "float16", 16),
    ((8, 64), (64, 8), 2, "bfloat16", 16),
    ((8, 64), (64, 8), 1, "float32", 16),
    ((8, 64), (64, 8), 1, "tf32", 300),
    ((5, 18), (10, 9), 2, "bfloat16", 300),
    ((8, 32), (32, 8), 1, "float64", 16),
]


@pytest.mark.parametrize(("inputs", "outputs", "rank", "dtype", "sequences"), HELD)
@pytest.mark.parametrize("reset", ["after", "before"])
def test_monarch_kernels_compile_and_spill_nothing(
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rank: int,
    dtype: str,
    sequences: int,
    reset: str,
    usage_of: UsageOf,
) -> None:
    case = Case(monarch(inputs, outputs, rank), dtype, sequences, reset=reset)
    for backward in (False, True):
        found = planned(case, backward)
        usage = usage_of(found.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert usage.frame == usage.spilled == 0, found
        # Registers are given to four warps at once.
        assert usage.registers * -(-found.threads // 128) * 128 <= recurrent.REGISTERS, found


@pytest.mark.parametrize(("hidden", "dtype"), [(768, "bfloat16"), (333, "float16"), (256, "float32"), (256, "float64")])
def test_dense_matrices_are_spread_with_either_order_of_the_reset_gate(
    hidden: int, dtype: str, usage_of: UsageOf
) -> None:
    """A step that hands on twice takes longer, and fits as well."""
    us = {}
    for reset, family in itertools.product(("after", "before"), (RecurrentSpread, RecurrentSpreadBackward)):
        asked = " | backward" if family is RecurrentSpreadBackward else ""
        text = Recurrence(dense(hidden), reset).text + asked  # type: ignore[arg-type]
        *_, found = plan_of(text, dtype, 0, GPU).passes
        assert type(found) is family
        us[reset, family] = found.us
        usage = usage_of(found.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert usage.spilled == 0, found
    assert all(us["after", family] < us["before", family] for family in (RecurrentSpread, RecurrentSpreadBackward))


def test_what_a_multiprocessor_cannot_hold_is_refused() -> None:
    gpu = Gpu(90, 132, 232448)
    text = Recurrence(monarch((8, 128), (128, 8))).text
    assert has_plan(text, "bfloat16", 90, 132, 232448)
    for asked in ("", " | backward"):
        with pytest.raises(PlanError, match="1024 features in bfloat16 do not fit in the 232448 bytes"):
            plan_of(Recurrence(monarch((32, 32), (32, 32))).text + asked, "bfloat16", 0, gpu)
        summed = Recurrence(replace(kronecker(4, 4), rank=2)).text
        with pytest.raises(PlanError, match="a sum of products"):
            plan_of(summed + asked, "bfloat16", 0, gpu)


def test_weights_have_no_padding_where_they_would_not_fit() -> None:
    """Rows of 8 floats, or of 16 numbers of 16 bits, would be one and a half times as long."""
    wide, close = (planned(Case(monarch((8, 32 * n), (32 * n, 8), 2), "bfloat16")).stages for n in (2, 4))
    assert [getattr(stages[1], "tight", None) for stages in (wide, close)] == [False, True]
    assert wide[1].weight_stride == 24 and close[1].weight_stride == 16


def test_pairs_of_elements_are_those_of_a_dtype() -> None:
    assert all(planned(case).size == ELEMENT_BYTES[case.dtype] for case in CASES)
