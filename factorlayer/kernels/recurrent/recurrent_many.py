"""A gated recurrent unit with a dense recurrent matrix and many sequences, on Hopper's matrix unit, forward and back:
what recurrent_many.cuh and recurrent_many_backward.cuh are told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from factorlayer.device.code import constants, kinds, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import FEW, sequences_of_class
from factorlayer.kernels.passes import OneSpread, Pass, timed
from factorlayer.kernels.recurrent import recurrent_spread
from factorlayer.kernels.recurrent.recurrent import NUMBER_BYTES, STEPS, STREAMS
from factorlayer.kernels.recurrent.recurrent_spread import (
    STEPS_HELD,
    SharedOut,
    fastest_shared,
)
from factorlayer.kernels.work import round_up
from factorlayer.maths.recurrence import GATES, Recurrence

DTYPES = ("tf32", "bfloat16", "float16")
ROWS = 64  # sequences of a group
SLAB_ROW = 128  # bytes of a slab's row, whose 1024 it begins at a multiple of
OWN = (16, 32, 48)  # features of a block
# By warpgroups that multiply: registers of who multiplies and who brings, where nothing is said as many as the compiler
# takes; and the most bytes of a sequence's own features that these are enough for, forward and back. Numbers of 16 bits
# that come one by one take about half as much again.
REGISTERS = {1: (0, 0), 2: (208, 88), 3: (144, 80)}
MOST_OWN, MOST_OWN_BACK = {1: 96, 2: 96, 3: 64}, {1: 96, 2: 96, 3: 32}
BRINGING = 128  # threads beside these, of which a warp brings what a warpgroup multiplies
MOST_SLOTS, LEAST_SLOTS = 8, 2
BARRIERS = 16  # bytes of two, of a slot, and of rows that are known
COUNTER_BYTES = 128
# Fitted to 343 tilings of 27 units, 64 to 8000 sequences, on an H200, of which 97 % are within 30 %, and the one with
# the least prediction takes 1.002 of the fastest one's time: microseconds from what a block has made to what another
# one multiplies of it, with what is alike at every step; of a slab where a ring has one slot; for each of a thread's
# accesses to memory for a sequence; for a feature forward, whose functions are short ones in bf16; the share of a
# product's time that nothing covers, and of what a warpgroup is busy with that another one of the block waits for;
# cycles that a product of 32 bytes of k takes at least
HANDED_ON_US, SLAB_US, ACCESS_US, FEATURE_US, FEATURE_BF16_US = 1.84, 0.48, 0.0185, 0.03, 0.0078
OF_PRODUCT, OF_ANOTHER, PRODUCT_CYCLES = 0.82, 0.78, 24


@dataclass(frozen=True)
class RecurrentMany(SharedOut):
    """A pass, tiled: blocks have groups of sequences along x, one for each of `warpgroups` at once."""

    recurrence: Recurrence
    dtype: str
    own: int
    warpgroups: int
    gpu: Gpu
    us: float = 0.0

    most_own = MOST_OWN
    handed = 1  # states that blocks hand on at once
    summed = GATES  # gates whose sums stay apart
    accesses = GATES + 1  # to tensors, for a feature: what is read and written
    title = "recurrent, many sequences"

    @property
    def units(self) -> int:
        """Sequences that a block has at once."""
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + BRINGING

    @property
    def products(self) -> str:
        return wgmma(self.dtype, [self.summed * self.own])

    # Shared memory: weights, slots, where rows lie, barriers

    @property
    def slabs(self) -> int:
        """Of a state."""
        return -(-self.hidden * self.size // SLAB_ROW)

    @property
    def weight_bytes(self) -> int:
        return GATES * self.slabs * self.own * SLAB_ROW

    @property
    def rows_bytes(self) -> int:
        return self.warpgroups * STEPS_HELD * ROWS * NUMBER_BYTES

    @property
    def slots(self) -> int:
        """Of a warpgroup's ring."""
        left = self.gpu.shared - 1024 - self.weight_bytes - self.rows_bytes
        return min(MOST_SLOTS, (left // self.warpgroups - STEPS_HELD * BARRIERS) // (ROWS * SLAB_ROW + BARRIERS))

    @property
    def rows_at(self) -> int:
        return self.weight_bytes + self.warpgroups * self.slots * ROWS * SLAB_ROW

    @property
    def barriers_at(self) -> int:
        return self.rows_at + self.rows_bytes

    @property
    def shared(self) -> int:
        return 1024 + self.barriers_at + self.warpgroups * (self.slots + STEPS_HELD) * BARRIERS

    # What blocks hand on: counters, and two places of a group's states, for all warpgroups that have other sequences

    @property
    def at_once(self) -> int:
        return self.gpu.sms // self.split * self.warpgroups

    @property
    def counters_bytes(self) -> int:
        return round_up(self.at_once * COUNTER_BYTES, 1024)

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.counters_bytes + 2 * self.at_once * self.handed * self.slabs * ROWS * SLAB_ROW

    # Time

    @property
    def details(self) -> str:
        return f"{self.own} features a block, {self.split} blocks for {self.units} sequences"

    @property
    def busy_us(self) -> float:
        """Microseconds of a step that a warpgroup multiplies, and goes on with the sums."""
        run = 8 if self.size == 2 and self.own % 32 == 0 else 4
        piece = math.gcd(run, self.hidden)
        accesses = self.own / piece * self.accesses + self.own / run * self.handed
        steps = self.handed * -(-self.hidden * self.size // 32)
        multiplied = steps * max(PRODUCT_CYCLES, self.summed * self.own / 2) / self.gpu.rates.cycles
        of_feature = FEATURE_BF16_US if self.dtype == "bfloat16" else FEATURE_US
        return OF_PRODUCT * multiplied + accesses * ACCESS_US + (0 if self.back else self.own * of_feature)

    def us_of(self, batch: int) -> float:
        groups = -(-batch // ROWS)
        blocks = min(self.gpu.sms // self.split, -(-groups // self.warpgroups))
        others = min(self.warpgroups, -(-groups // blocks)) - 1
        waits = HANDED_ON_US + SLAB_US * self.handed * self.slabs / self.slots
        return STEPS * -(-groups // self.at_once) * (waits + self.busy_us * (1 + OF_ANOTHER * others))

    # What its kernel is told

    @property
    def told(self) -> list[str]:
        more, fewer = REGISTERS[self.warpgroups]
        told = self.of_steps | {"HIDDEN": self.hidden, "OWN": self.own, "PARTS": self.split}
        told |= {"HANDED": self.handed, "SUMMED": self.summed, "TURNED": self.back}
        told |= {"WARPGROUPS": self.warpgroups, "SLOTS": self.slots, "MORE": more, "FEWER": fewer}
        told |= {"kSlotsAt": self.weight_bytes, "kRowsAt": self.rows_at, "kBarriersAt": self.barriers_at}
        told |= {"kStatesAt": self.counters_bytes}
        return [*kinds(self.dtype), *constants(told), *self.functions]

    @property
    def passes(self) -> tuple[Pass, ...]:
        return RecurrentCounters(self.at_once, self.dtype, self.gpu), self


@dataclass(frozen=True)
class RecurrentManyBackward(RecurrentMany):
    """A pass, tiled, by slopes. What comes back to products of all three gates is handed on, and summed together."""

    header, title = "recurrent_many_backward", "recurrent, many sequences, backward"
    back = True
    most_own = MOST_OWN_BACK
    handed = GATES
    summed = 1
    accesses = STREAMS + GATES + 1


@dataclass(frozen=True)
class RecurrentCounters(OneSpread):
    """A pass that sets counters to zero."""

    count: int
    dtype: str
    gpu: Gpu

    threads, shared = 256, 0
    title, header = "recurrent, counters", "recurrent_counters"
    writes = "s2"

    @property
    def details(self) -> str:
        return f"{self.count} set to zero"

    @property
    def us(self) -> float:
        return self.gpu.rates.behind_us

    @property
    def told(self) -> list[str]:
        return constants({"THREADS": self.threads, "COUNTERS": self.count})


Many = TypeVar("Many", bound=RecurrentMany)


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu, back: bool = False) -> RecurrentMany | None:
    """None also where recurrent_spread.py is faster with 8, 16, 32 and 64 sequences together, which have one plan. (The
    registry compares families by 12 to 48, as layers; groups take a turn more with these than with 8 to 32.)"""
    family = RecurrentManyBackward if back else RecurrentMany
    found = fastest_shared(tilings(family, recurrence, dtype, batch, gpu), batch)
    if found is None or batch > FEW:
        return found
    spread = recurrent_spread.tile(recurrence, dtype, batch, gpu, back)

    def together(plan: SharedOut) -> float:
        return math.prod(map(plan.us_of, sequences_of_class(batch)))

    return None if spread is not None and together(spread) < together(found) else found


def tilings(family: type[Many], recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> Iterator[Many]:
    chain = recurrence.chain
    takes = chain.is_dense and not chain.parameters and recurrence.reset == "after" and dtype in DTYPES
    if not takes or not gpu.wgmma:
        return
    for own, warpgroups in itertools.product(OWN, REGISTERS):
        plan = family(recurrence, dtype, own, warpgroups, gpu)
        size = plan.size + (plan.size == 2 and plan.hidden % 2)
        fits = own * size <= plan.most_own[warpgroups] and plan.split <= gpu.sms and plan.slots >= LEAST_SLOTS
        if fits and (warpgroups == 1 or batch > ROWS):
            yield timed(plan, batch)
