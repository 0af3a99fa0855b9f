"""A gated recurrent unit with a dense recurrent matrix that several blocks share, forward and back: what
recurrent_spread.cuh and recurrent_spread_backward.cuh are told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from factorlayer.device.code import ELEMENT, Told, constants, function, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import sequences_of_class
from factorlayer.kernels.passes import Pass, timed
from factorlayer.kernels.recurrent.recurrent import (
    NUMBER_BYTES,
    OF_CHAIN,
    OF_INSTRUCTION,
    OF_PRODUCT,
    STEPS,
    AllSteps,
)
from factorlayer.kernels.resident import stage_type
from factorlayer.kernels.stages import INSTRUCTIONS, Layout, Stage, row_step
from factorlayer.kernels.work import round_up
from factorlayer.maths.recurrence import GATES, Recurrence

TOGETHER = "// All blocks are on the GPU at once.\n"  # as csrc/runtime/plan.cpp has it
WARPS = 8
OWN = (8, 16, 24, 32, 48, 64)  # features of a block
SEQUENCES = (4, 8, 16, 32, 64)  # of a block at once
SECTOR = 32  # bytes, of L2
ROWS = 16  # of a product, of which fewer sequences leave some unused
STEPS_HELD = 4  # whose rows are known
LANES = 4  # that add up what warps have summed of two features
# Microseconds on an H100: from what a block has made to what another one reads of it, with what is alike at every step;
# and for the features that a block's threads go on with at once, forward and back. Where a step hands on twice, the
# second time adds that: 16 sequences of 512, 768 and 1024 features in bf16 took 1.0, 2.4 and 2.9 more on an H200 than
# those that hand on once, back 1.0, 2.7 and 1.0; 512 in float 1.1 more
HANDED_ON_US, ROUND_US, ROUND_BACK_US = 0.6, 0.65, 1.05
TWICE_US = 1.7


class SharedOut(AllSteps):
    """A pass over all steps whose blocks along y share out a dense matrix, and wait for one another: `own` features of
    the state for each of them."""

    own: int

    @property
    def hidden(self) -> int:
        return self.recurrence.hidden

    @property
    def split(self) -> int:
        return -(-self.hidden // self.own)

    @property
    def shares_sectors(self) -> bool:
        """Whether two blocks hand on halves of one."""
        return self.own * self.size % SECTOR != 0

    def source(self, name: str) -> str:
        return super().source(name) + TOGETHER


@dataclass(frozen=True)
class RecurrentSpread(SharedOut):
    """A pass, tiled: blocks have `units` sequences along x at once."""

    recurrence: Recurrence
    dtype: str
    own: int
    units: int
    gpu: Gpu
    us: float = 0.0

    threads = 32 * WARPS
    summed = GATES  # gates whose sums stay apart
    round_us = ROUND_US
    title = "recurrent, spread"

    @property
    def before(self) -> bool:
        return self.recurrence.reset == "before"

    @property
    def handed(self) -> int:
        """Tensors of states that blocks hand on at once."""
        return 1

    @property
    def filled(self) -> int:
        """Those that they hand on in a step."""
        return 1 + self.before

    def us_of(self, batch: int) -> float:
        groups = -(-batch // self.units)
        return STEPS * self.step_us * -(-groups // (self.gpu.sms // self.split))

    # Shared memory: where rows lie, weights, states, and what warps have summed

    @property
    def slice(self) -> Stage:
        """The contraction of a warp."""
        p = round_up(-(-self.hidden // WARPS), 16)
        nt = 2 if self.own % 16 == 0 else 1
        return Stage(p, self.own, 1, self.units, 1, nt, self.dtype)

    @property
    def row(self) -> int:
        """Elements from a row of states, or of a weight, to the next."""
        return row_step(WARPS * self.slice.p, self.dtype)

    @property
    def rows_bytes(self) -> int:
        return round_up(STEPS_HELD * self.units * NUMBER_BYTES, 128)

    @property
    def weight_bytes(self) -> int:
        return round_up(GATES * self.own * self.row * self.size, 128)

    @property
    def states_at(self) -> int:
        return self.rows_bytes + self.weight_bytes

    @property
    def sums_at(self) -> int:
        rows = self.handed * self.units + max(ROWS - self.units, 0)  # a product takes as many from a tensor's first on
        return self.states_at + round_up(rows * self.row * self.size, 128)

    @property
    def shared(self) -> int:
        return self.sums_at + WARPS * (self.summed * self.units * self.own * max(4, self.size) + 64)

    @property
    def details(self) -> str:
        return f"{self.own} features a block, {self.split} blocks for {self.units} sequences"

    @property
    def step_us(self) -> float:
        """Microseconds of a step of the sequences that a block has at once."""
        gpu, stage = self.gpu, self.slice
        steps = -(-stage.p // (16 if self.size == 2 else 8))
        of_a, of_b, of_product = INSTRUCTIONS[self.dtype]
        each = steps * (of_a + stage.nt * of_b + stage.nt * of_product)
        products = stage.tiles * GATES * (steps * OF_PRODUCT / 2 + each * OF_INSTRUCTION) / gpu.rates.cycles
        gathered = self.filled * self.units * self.hidden * self.size
        rounds = -(-self.units * self.own // 2 * LANES // self.threads)
        handed_on = HANDED_ON_US + TWICE_US * self.before
        return handed_on + gathered / gpu.rates.l2_bytes + products + rounds * self.round_us

    # What its kernel is told

    @property
    def told(self) -> list[str]:
        stage, even = self.slice, self.hidden % 2 == 0
        told = OF_CHAIN | self.of_steps | {"WARPS": WARPS, "UNITS": self.units}
        told |= {"HIDDEN": self.hidden, "RESET_BEFORE": self.before}
        told |= {"OWN": self.own, "PARTS": self.split, "HANDED": self.handed, "SUMMED": self.summed, "PAIRED": even}
        told |= {"ROW": self.row, "TURNED": self.back, "kRowsAt": 0, "kGroupBytes": 0}
        told |= {"kBarrierBytes": self.rows_bytes, "kWeightBytes": self.weight_bytes}
        told |= {"kStatesAt": self.states_at, "kSumsAt": self.sums_at}
        layouts = Layout(stage.p, 1, self.row, 1), Layout(self.own, 1, self.own, 1)
        told |= {"Slice": stage_type(stage, *layouts, 0, -1, stride=self.row), "FirstStage": "Slice"}
        told |= {"Output": f"Region<1, {self.own}, 1, {self.own}, 0, 1>"}
        loading = function("load_weights(const C& c)", ["c.load_own();"])
        return [*kinds(self.dtype), *constants(told), *self.functions, *loading]

    @property
    def passes(self) -> tuple[Pass, ...]:
        return RecurrentFill(self, self.dtype, self.gpu), self


@dataclass(frozen=True)
class RecurrentSpreadBackward(RecurrentSpread):
    """A pass, tiled, by slopes. What comes back to products of all three gates is handed on, and summed together."""

    header, title = "recurrent_spread_backward", "recurrent, spread, backward"
    back = True
    summed = 1
    round_us = ROUND_BACK_US
    filled = GATES

    @property
    def handed(self) -> int:
        return GATES - self.before


@dataclass(frozen=True)
class RecurrentFill(Pass):
    """A pass that sets all bits of what blocks hand on."""

    of: RecurrentSpread
    dtype: str
    gpu: Gpu

    threads, shared = 256, 0
    units_per_sample, units_per_block, blocks_per_sm, split = 1, 1, 0, 8
    title, details = "recurrent, fill", "of what blocks hand on"
    writes = "y"

    @property
    def us(self) -> float:
        return self.us_of(1)

    def us_of(self, batch: int) -> float:
        moved = batch * STEPS * self.of.filled * self.of.hidden * self.size
        return self.gpu.rates.behind_us + moved / (self.gpu.memory_bytes * self.gpu.sms)

    @property
    def told(self) -> list[str]:
        told: Told = {"Element": ELEMENT[self.dtype], "THREADS": self.threads, "HIDDEN": self.of.hidden}
        told |= {"kWalk": self.of.walk_at, "kOutputs": self.of.walk_at + 9, "BACKWARD": self.of.back}
        told |= {"RESET_BEFORE": self.of.before}
        return constants(told)

    header = "recurrent_fill"


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu, back: bool = False) -> RecurrentSpread | None:
    family = RecurrentSpreadBackward if back else RecurrentSpread
    return fastest_shared(tilings(family, recurrence, dtype, batch, gpu), batch)


Shared = TypeVar("Shared", bound=SharedOut)
Tiled = TypeVar("Tiled", bound=RecurrentSpread)


def fastest_shared(found: Iterator[Shared], batch: int) -> Shared | None:
    """Up to 64 sequences have one plan: where groups take turns, twice as many take twice as long. Blocks that share a
    sector of L2 come last: asked for by all while one half is there, it cost 0.2 to 1 us forward, and 1 to 6 back."""
    compared = sequences_of_class(batch)
    return min(found, key=lambda plan: (plan.shares_sectors, math.prod(map(plan.us_of, compared))), default=None)


def tilings(family: type[Tiled], recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> Iterator[Tiled]:
    chain = recurrence.chain
    if not chain.is_dense or chain.parameters or gpu.arch < 70:
        return
    for own, units in itertools.product(OWN, SEQUENCES):
        if units > ROWS and units >= 2 * batch:
            continue
        plan = family(recurrence, dtype, own, units, gpu)
        if plan.split <= gpu.sms and plan.shared <= gpu.shared:
            yield timed(plan, batch)
