"""A gated recurrent unit over all steps, some sequences a block, forward and back: what recurrent.cuh and
recurrent_backward.cuh are told, and what they take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Told, constants, function, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import Pass, fastest
from factorlayer.kernels.recurrent.untied import OF_PICKED, UntiedStage, gains
from factorlayer.kernels.resident import stage_type
from factorlayer.kernels.stages import INSTRUCTIONS, SUM_REGISTERS, Stage
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import GATES, Recurrence
from factorlayer.maths.spec import Contraction

STEPS = 256  # that times are predicted for
WARPS = (4, 8, 16)
SEQUENCES = (1, 2, 4, 8, 16, 32)  # of a block
SHARES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (1, 8))  # 16 x 8 sums of a warp at once, down and across
GROUPS = (1, 2, 4, 8, 16)  # of those that have weights of their own, of a warp
SLOTS = (4, 2)  # steps that inputs are asked for ahead, a power of two
LOADING = 1  # warps that bring inputs
REGISTERS = 65536  # of a multiprocessor
OF_SUM = {"float32": 2, "float64": 2}  # registers of a number that is kept, where that is not one
BESIDE = 72  # registers of a thread beside its numbers
OF_GROUPS = 52  # and, where groups have weights of their own, of sums that it keeps a part of, and of their operands
OF_CORNER = 5  # of where the features of a round lie
TOGETHER = 4  # warps that get registers at once
NUMBER_BYTES = 8  # of what says where a sequence's row lies
FUNCTIONS = 5  # special ones of a feature: two sigmoids of two each, and a tanh
# Instructions for two features of a lane, and for two sums that go to the next contraction, and beside these
OF_TWO, OF_TWO_BACK, OF_TWO_SUMS, OF_TILE = 32, 43, 4, 30
# Cycles of a warp that others do not fill, fitted to 180 tilings of 14 units on an H100: from one of its instructions
# to the next, for a product behind another, and of a step besides
OF_INSTRUCTION, OF_PRODUCT, OF_STEP = 3.7, 52, 290
INPUTS = 3  # tensors that a step reads forward, beside them the initial state
STREAMS = 6  # and back: the gradient of its output, slopes of three gates, reset, and what update leaves
# What chain.cuh asks for and no kernel of these needs
OF_CHAIN: Told = {"GROUPS": 1, "UNITS_PER_SAMPLE": 1, "RANK": 1, "STRAIGHT": False, "AS_MEMORY": False, "BESIDE": -1}
OF_CHAIN |= {"BIAS": False, "AlsoRaw": "void", "Activation": "identity"}
APART = "// Blocks have multiprocessors of their own, where there are as many.\n"  # as csrc/runtime/plan.cpp has it


class AllSteps(Pass):
    """What passes over all steps of a unit have in common, forward and `back`: then weights are turned, and steps are
    walked from last ones to first ones, unless the recurrence does that forward."""

    recurrence: Recurrence

    if TYPE_CHECKING:  # as a property, so that a family may have it as a field

        @property
        def units(self) -> int:
            """Sequences that a block has at once."""

    units_per_sample = 1
    back = False

    @property
    def units_per_block(self) -> int:
        return self.units

    @property
    def first_tensor(self) -> int:
        """The place behind the weights."""
        return GATES * self.recurrence.weights

    @property
    def walk_at(self) -> int:
        return self.first_tensor + (STREAMS - 1 if self.back else INPUTS)

    @property
    def goes_down(self) -> bool:
        return self.back != self.recurrence.reverse

    @property
    def of_steps(self) -> Told:
        """What kernels are told of steps: how these are walked, and the places of tensors."""
        told: Told = {"HAS_BIAS": self.recurrence.chain.bias, "DOWN": self.goes_down, "kInputs": self.first_tensor}
        return told | {"kWalk": self.walk_at, "kOutputs": self.walk_at + 9}

    @property
    def functions(self) -> list[str]:
        return [] if self.back else functions_of(self.recurrence.chain, self.dtype)

    def source(self, name: str) -> str:
        return super().source(name) + APART


@dataclass(frozen=True)
class Recurrent(AllSteps):
    """A pass, tiled, whose `units` are sequences of a block. `stages` contract the state of one gate."""

    recurrence: Recurrence
    dtype: str
    stages: tuple[Stage, ...]
    units: int
    warps: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    blocks_per_sm = 0
    title = "recurrent"

    def us_of(self, batch: int) -> float:
        blocks = -(-batch // self.units) * self.split
        return STEPS * self.step_us * -(-blocks // self.gpu.sms)

    @property
    def threads(self) -> int:
        return 32 * (self.warps + LOADING)

    @property
    def split(self) -> int:
        """Blocks along y: parts of a state that have nothing to do with each other."""
        return parts_of(self.recurrence)

    @property
    def hidden(self) -> int:
        """Features of a part."""
        return self.recurrence.hidden // self.split

    @property
    def before(self) -> bool:
        return self.recurrence.reset == "before"

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    @property
    def paired(self) -> bool:
        """Whether no two neighbouring features lie in different rows of a contraction."""
        first, last = self.stages[0], self.last
        return not any(
            n % 2 for n in (first.inner if first.inner > 1 else first.p, last.inner if last.inner > 1 else last.q)
        )

    @property
    def pairs(self) -> int:
        """Pairs of features of a thread."""
        return -(-self.last.tiles // self.warps) * 2 * self.last.mt * self.last.nt

    # Shared memory: where rows lie, weights, states and what lies between contractions, inputs of some steps

    @property
    def states(self) -> int:
        """Places of states."""
        return 2 if self.before or len(self.stages) == 1 else 1

    streams = GATES  # tensors that a step reads

    @property
    def slot_bytes(self) -> int:
        return self.streams * self.last.result_bytes

    @property
    def rows_bytes(self) -> int:
        return round_up(2 * self.slots * self.units * NUMBER_BYTES, 128)

    @property
    def weight_bytes(self) -> int:
        return round_up(GATES * sum(stage.weight_bytes for stage in self.stages), 128)

    @property
    def places(self) -> list[int]:
        """Bytes at which what each stage reads begins: the states, and what the gates have between contractions, in two
        places in turn; and behind all."""
        begin = self.states * self.states_at_once * self.stages[0].state_bytes
        odd, even = (
            GATES * max((stage.state_bytes for stage in some), default=0)
            for some in (self.stages[1::2], self.stages[2::2])
        )
        return [0, *(begin if i % 2 else begin + odd for i in range(1, len(self.stages))), begin + odd + even]

    @property
    def states_at_once(self) -> int:
        """States that a step begins with."""
        return 1

    @property
    def streams_at(self) -> int:
        return self.rows_bytes + self.weight_bytes + self.places[-1]

    @property
    def shared(self) -> int:
        return self.streams_at + self.slots * self.slot_bytes

    @property
    def details(self) -> str:
        each = f"{self.units} sequences" if self.units > 1 else "one sequence"
        parts = f" of one of {self.split} parts" if self.split > 1 else ""
        stages = (stage.words if isinstance(stage, UntiedStage) else str(stage) for stage in self.stages)
        return f"{each}{parts} a block, {self.warps} warps, inputs {self.slots} steps ahead, " + ", ".join(stages)

    @property
    def is_even(self) -> bool:
        """Whether a lane's features lie in the first contraction's state at constants behind its first one."""
        last, layout = self.last, self.stages[0].layout
        if not last.by_rows and last.down > 1:
            return False
        width = last.q if last.by_rows else last.inner
        rows = np.arange(0, last.m, 16 * last.mt)[:, None] + np.arange(8)
        halves = 8 * np.arange(2 * last.mt)
        columns = np.arange(0, round_up(width, 8 * last.nt), 8 * last.nt)[:, None] + np.arange(8)
        first = (rows.flatten()[:, None] * width + columns.flatten()).flatten()
        behind = (halves[:, None] * width + 8 * np.arange(last.nt)).flatten()
        ends = self.units * self.hidden
        places = first[:, None] + behind
        there = (places < ends) & (first[:, None] < ends)
        return bool(np.all((layout.at(places) == layout.at(first)[:, None] + layout.at(behind)) | ~there))

    # Time

    @property
    def step_us(self) -> float:
        """Microseconds of a step."""
        gates = (2, 1) if self.before else (GATES,)
        products = sum(
            stage_us(stage, count, self.warps, self.gpu, stage is self.last) for count in gates for stage in self.stages
        )
        return products + self._gates_us() + len(gates) * OF_STEP / self.gpu.rates.cycles

    def _gates_us(self) -> float:
        special = self.units * self.hidden * FUNCTIONS / self.gpu.rates.special_functions
        return max(special, issued_us(self.pairs * OF_TWO, self.warps, self.gpu))

    # What its kernel is told

    @property
    def told(self) -> list[str]:
        told = OF_CHAIN | self.of_steps | {"WARPS": self.warps, "UNITS": self.units, "RESET_BEFORE": self.before}
        told |= {"HIDDEN": self.hidden, "PARTS": self.split, "PAIRED": self.paired, "SLOTS": self.slots}
        told |= {"STREAMS": self.streams, "EVEN": self.is_even}
        told |= {"RESULT": str(self.last.result_layout), "kStreamBytes": self.last.result_bytes, "STATES": self.states}
        told |= {"kBarrierBytes": self.rows_bytes, "kRowsAt": 0, "kWeightBytes": self.weight_bytes}
        told |= {"kGroupBytes": self.places[-1], "kStreamsAt": self.streams_at}
        told |= {"kSlotBytes": self.slot_bytes, "kStateBytes": self.stages[0].state_bytes}
        weight_at = 0
        for i, stage in enumerate(self.stages):
            following = self.stages[i + 1].layout if i + 1 < len(self.stages) else stage.result_layout
            told[f"S{i}"] = stage_type(stage, stage.layout, following, weight_at, -1)
            if isinstance(stage, UntiedStage):
                evenly = str(stage.lies_evenly(following)).lower()
                told[f"S{i}"] = f"Untied<{told[f'S{i}']}, {stage.outer}, {stage.share}, {evenly}>"
            weight_at += GATES * stage.weight_bytes
        told |= {"FirstStage": "void", "Last": f"S{len(self.stages) - 1}"}
        told |= {"LAYOUT": str(self.stages[0].layout), "Output": f"Region<1, {self.hidden}, 1, {self.hidden}, 0, 1>"}
        return [*kinds(self.dtype), *constants(told), *self.functions, *self.before_last, *self.loading]

    @property
    def before_last(self) -> list[str]:
        places, calls, at, apart = self.places, [], "from", "apart"
        for i, following in enumerate(self.stages[1:]):
            to, to_apart = f"c.memory + {places[i + 1]}", str(following.state_bytes)
            calls.append(f"  c.template contract<S{i}, FIRST, END>({at}, {apart}, {to}, {to_apart});")
            at, apart = to, to_apart
        arguments = "(const C& c, u32 from, int apart)"
        head = f"template <int FIRST, int END, class C> static DEVICE Gathered before_last{arguments} {{"
        return [head, *calls, f"  return {{{at}, {apart}}};", "}"]

    @property
    def loading(self) -> list[str]:
        calls = [f"for (int gate = 0; gate < {GATES}; ++gate) {{"]
        for i, (c, stage) in enumerate(zip(contractions_of(self.recurrence, self.back), self.stages, strict=True)):
            weight = f"c.params.weights[gate * {self.recurrence.weights} + {c}]"
            calls.append(f"  auto w{i} = static_cast<const Element*>({weight}) + blockIdx.y * {stage.p * stage.q};")
            place, rows = f"p * {stage.q} + q", ""
            if isinstance(stage, UntiedStage):  # its q's are those of all groups, one behind another
                place = f"(q / {stage.q} * {stage.p} + p) * {stage.q} + q % {stage.q}"
                rows = f", {stage.groups * stage.q}"
            if self.back:
                at = f"[&](int q, int p) {{ return w{i}[{place}]; }}"
                calls.append(f"  c.template make_weight<S{i}, true{rows}>(gate, {at});")
            else:
                calls.append(f"  c.template load_weight<S{i}{rows}>(gate, w{i});")
        return function("load_weights(const C& c)", [*calls, "}"])


@dataclass(frozen=True)
class RecurrentBackward(Recurrent):
    """A pass, tiled, by slopes. Its stages contract the gradients of one gate by the turned weights."""

    header, title = "recurrent_backward", "recurrent, backward"
    back = True

    @property
    def states(self) -> int:
        return 2 if len(self.stages) == 1 else 1

    @property
    def states_at_once(self) -> int:
        return GATES

    streams = STREAMS

    def _gates_us(self) -> float:
        return issued_us(self.pairs * OF_TWO_BACK, self.warps, self.gpu)


def functions_of(chain: Chain, dtype: str) -> list[str]:
    """The functions of a unit's gates and of its candidate, each in a struct."""
    named = {"Gate": "sigmoid", "Candidate": chain.activation}
    return [f"struct {name} {{ {activation_type(function, dtype, 0)} }};" for name, function in named.items()]


def parts_of(recurrence: Recurrence) -> int:
    """Blocks of a matrix that is block-diagonal."""
    (c, *further) = recurrence.chain.contractions
    return 1 if further or c.tied or c.inner > 1 else c.outer


def is_untied(recurrence: Recurrence, c: Contraction) -> bool:
    """Whether what a block of threads contracts may have several weights. Of one alone, too, what it makes of a row may
    be in several rows of the next state."""
    return not c.tied and (len(recurrence.chain.contractions) > 1 or c.inner > 1)


def contractions_of(recurrence: Recurrence, turned: bool) -> tuple[int, ...]:
    """The weights of a gate's contractions, in the order that they are made."""
    weights = tuple(c.weight for c in recurrence.chain.contractions)
    return weights[::-1] if turned else weights


def why_not(recurrence: Recurrence) -> str:
    """Why these kernels do not take it, or nothing."""
    chain = recurrence.chain
    if chain.rank > 1:
        return "no recurrent kernel takes a recurrent matrix that is a sum of products"
    if chain.parameters:
        return "no recurrent kernel takes an activation of the candidate that has parameters"
    return ""


def issued_us(instructions: float, warps: int, gpu: Gpu) -> float:
    """Microseconds for so many of each warp."""
    return max(instructions * OF_INSTRUCTION / gpu.rates.cycles, instructions * warps / gpu.instructions)


def stage_us(stage: Stage, gates: int, warps: int, gpu: Gpu, last: bool = False) -> float:
    """Microseconds of a contraction for some gates, of a block that has a multiprocessor to itself. Of the last one, a
    warp has all gates of its tiles."""
    wide = 16 if ELEMENT_BYTES[stage.dtype] == 2 else 8
    steps = -(-stage.p // wide)
    rounds = -(-stage.tiles // warps) * gates if last else -(-stage.tiles * gates // warps)
    of_a, of_b, of_product = INSTRUCTIONS[stage.dtype]
    products = sums = stage.mt * stage.nt
    read = 0.0
    if isinstance(stage, UntiedStage):
        products, read = stage.products, stage.read_us(gates, gpu)
        each = steps * stage.issued + products * OF_PICKED
    else:
        each = steps * (stage.mt * of_a + stage.nt * of_b + sums * of_product)
    each += 0 if last else 2 * sums * OF_TWO_SUMS + OF_TILE
    rate = gpu.flops[stage.dtype] / (2 if wide == 16 else 1)  # a table has those of warpgroups
    multiply = 2 * rounds * warps * products * 128 * steps * wide / rate
    waits = rounds * (steps * OF_PRODUCT + each * OF_INSTRUCTION) / gpu.rates.cycles
    return max(multiply, read, waits, issued_us(rounds * each, warps, gpu))


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu, back: bool = False) -> Recurrent | None:
    return fastest(tilings(RecurrentBackward if back else Recurrent, recurrence, dtype, batch, gpu), batch)


Tiled = TypeVar("Tiled", bound=Recurrent)


def tilings(family: type[Tiled], recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> Iterator[Tiled]:
    if why_not(recurrence):
        return
    untied = [c for c in recurrence.chain.contractions if is_untied(recurrence, c)]
    padded = (False, True) if any(gains(c.q if family.back else c.p, dtype) for c in untied) else (False,)
    for units, warps, share, others, tight in itertools.product(SEQUENCES, WARPS, SHARES, (2, 4, 8), padded):
        if units > 1 and units >= 2 * batch:
            continue
        stages = _stages(family, recurrence, dtype, units, warps, share, others, tight, gpu)
        if stages is None:
            continue
        for slots in SLOTS:
            plan = family(recurrence, dtype, stages, units, warps, slots, gpu)
            if plan.shared <= gpu.shared and _has_registers(plan):
                yield plan
                break


def _has_registers(plan: Recurrent) -> bool:
    """By what a thread has, about: sums of all gates, and the numbers that it keeps."""
    each = OF_SUM.get(plan.dtype, 1)
    sums = GATES * 4 * plan.last.mt * plan.last.nt * each
    kept = 2 * plan.pairs * each * (2 if plan.before or plan.back or plan.recurrence.chain.bias else 1)
    if any(isinstance(stage, UntiedStage) for stage in plan.stages):
        beside = BESIDE + OF_GROUPS + OF_CORNER * -(-plan.last.tiles // plan.warps)
        return (sums + kept + beside) * 32 * round_up(plan.warps + LOADING, TOGETHER) <= REGISTERS
    return (sums + kept + BESIDE) * plan.threads <= REGISTERS


def _stages(
    family: type[Recurrent],
    recurrence: Recurrence,
    dtype: str,
    units: int,
    warps: int,
    share: tuple[int, int],
    others: int,
    tight: bool,
    gpu: Gpu,
) -> tuple[Stage, ...] | None:
    contractions = recurrence.chain.contractions
    if family.back:
        contractions = contractions[::-1]
    stages: list[Stage] = []
    for i, c in enumerate(contractions):
        p, q = (c.q, c.p) if family.back else (c.p, c.q)
        rows = units * c.outer // parts_of(recurrence)

        def tiled(mt: int, nt: int, c: Contraction = c, p: int = p, q: int = q, rows: int = rows) -> Iterator[Stage]:
            if not is_untied(recurrence, c):
                yield Stage(p, q, c.inner, rows, mt, nt, dtype)
            elif (nt if c.inner > 1 else mt) == 1:
                yield from _untied(p, q, c, rows, mt, nt, dtype, tight)

        if i == len(contractions) - 1:
            mt, nt = share
            if (mt > 1 and 8 * mt >= (rows if c.inner == 1 else q)) or (
                nt > 1 and 4 * nt >= (q if c.inner == 1 else rows * c.inner)
            ):
                return None
            found = [stage for stage in tiled(mt, nt) if not isinstance(stage, UntiedStage) or stage.is_whole]
            if not found:
                return None
            stages.append(found[0])
        else:
            shares = [
                stage for mt, nt in SHARES if mt * nt * SUM_REGISTERS[dtype] <= others * 2 for stage in tiled(mt, nt)
            ]
            stages.append(min(shares, key=lambda stage: stage_us(stage, GATES, warps, gpu)))
    return tuple(stages)


def _untied(
    p: int, q: int, c: Contraction, rows: int, mt: int, nt: int, dtype: str, tight: bool
) -> Iterator[UntiedStage]:
    """Up to the share that has all groups of a tile."""
    for share in GROUPS[0 if c.inner == 1 else 1 :]:
        stage = UntiedStage(p, q, c.inner, rows, mt, nt, dtype, c.outer, share, tight)
        yield stage
        if stage.is_whole:
            return
