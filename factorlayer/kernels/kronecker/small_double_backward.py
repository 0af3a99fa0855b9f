"""All gradients of three or four small factors in double in one pass: small_double_backward.cuh."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.bank_layouts import Uses, lay_out
from factorlayer.kernels.gradient import BlockSums
from factorlayer.kernels.kronecker.small_double import (
    BARRIER_BYTES,
    OfSmallDouble,
    Step,
    groups_of,
    orders_of,
    sizes_between,
    takes,
    time_of,
    visit,
)
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Mode


@dataclass(frozen=True)
class SmallDoubleBackward(OfSmallDouble, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    steps: tuple[Step, ...]
    waves: int  # accesses to states, for a unit
    units_per_sample: int
    warps: int
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    dtype = "float64"

    @property
    def weights(self) -> int:
        """Elements of all weights."""
        return sum(step.p * step.q for step in self.steps)

    @property
    def output_bytes(self) -> int:
        return 8 * self.units_per_sample * math.prod(self.steps[0].before.sizes)

    @property
    def tiles(self) -> int:
        """Tiles of 8 rows of all sums."""
        return sum(-(-step.p // 8) for step in self.steps)

    @property
    def _state_begins(self) -> list[int]:
        """Bytes at which states begin, behind the slots, and at which the last one ends."""
        begins = [self.slots * self.steps[0].before.bytes + self.steps[-1].behind.bytes]
        for step in self.steps[1:]:
            begins.append(begins[-1] + step.before.bytes)
        return begins

    @property
    def group_bytes(self) -> int:
        """Bytes for all states, and for four sums of each thread, which take their place in the end."""
        return max(self._state_begins[-1], 32 * 32 * self.warps)

    @property
    def shared(self) -> int:
        return self.weight_bytes + self.groups * (self.group_bytes + BARRIER_BYTES)

    def us_of(self, batch: int) -> float:
        return _time(self, batch)

    @property
    def told(self) -> list[str]:
        loads, weights, weight_bytes = self.weight_lines([step.mode for step in self.steps], True)
        slot = self.steps[0].before.bytes
        told: Told = {"X": self.steps[0].before.cuda(), "G": self.steps[-1].behind.cuda(), "GRAD": len(self.steps)}
        told |= {"WARPS": self.warps, "GROUPS": self.groups, "SLOTS": self.slots, "kFours": self.tiles}
        told |= {"UNITS_PER_SAMPLE": self.units_per_sample, "kSums": self.weights}
        told |= {"kSlot": slot, "kGrad": self.slots * slot, "kGroup": self.group_bytes, "kWeights": weight_bytes}
        begins = [-1, *self._state_begins[:-1], -1]
        fours = 0
        for i, step in enumerate(self.steps):
            to = sum(other.p * other.q for other in self.steps if other.mode < step.mode)
            of = step.cuda((begins[i], begins[i + 1]), weights[i])
            told[f"S{i}"] = f"BackStep<{of}, {fours}, {to}>"
            fours += -(-step.p // 8)
        numbers = range(len(self.steps))
        return [
            *constants(told),
            *visit("forward", [f"k.template forward<S{i}>();" for i in numbers[:-1]]),
            *visit("back", [f"k.template back<S{i}>(sums);" for i in reversed(numbers)], "Sums& sums"),
            "template <class Kernel>",
            "static DEVICE void place(const Kernel& k, int n, Lane at, const double (&sum)[4], double* to) {",
            f"  {' '.join(f'k.template place<S{i}>(n, at, sum, to);' for i in numbers)}",
            "}",
            *visit("load_weights", loads),
        ]


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> SmallDoubleBackward | None:
    """None where this family has no kernel. `outer` is the size of what lies before the modes."""
    if dtype != "float64" or len(modes) == 2 or not takes(modes, gpu):  # of which pairs are faster
        return None
    return fastest(replace(plan, us=_time(plan, batch)) for plan in tilings(modes, outer, gpu))


@functools.lru_cache(256)
def _ways(modes: tuple[Mode, ...]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """Orders, the first mode first, with the accesses to states."""
    found, last = [], len(modes) - 1
    for order in orders_of(modes):
        sizes = sizes_between(modes, order)
        # Behind a contraction threads store the state, but for the last, and load the gradient; before it they load
        # the state, but for the last, and store the gradient, but for the first.
        before = [Uses(mode, 1 + (i < last), 1) for i, mode in enumerate(order)]
        behind = [Uses(mode, 1 + (0 < i < last), 1) for i, mode in enumerate(order)]
        ends = list(zip([None, *before], [*behind, None], strict=True))
        waves, laid, orders = lay_out(sizes, ends, True, 0, True)
        steps = zip(order, laid[:-1], laid[1:], orders, strict=True)
        found.append((waves, tuple(Step(*each) for each in steps)))
    return tuple(found)


def tilings(modes: tuple[Mode, ...], outer: int, gpu: Gpu) -> Iterator[SmallDoubleBackward]:
    """Tilings of modes that this family takes."""
    for (waves, steps), warps, slots in itertools.product(_ways(modes), (1, 2, 4, 8), (1, 2)):
        plan = SmallDoubleBackward(steps, waves, outer, warps, 1, slots, gpu)
        registers = max(step.registers(warps) for step in steps) + 8 * plan.tiles
        groups = groups_of(gpu, warps, registers, plan.group_bytes, plan.weight_bytes)
        if groups > 0:
            yield replace(plan, groups=groups)


def _time(plan: SmallDoubleBackward, batch: int) -> float:
    steps = plan.steps
    x, y = (math.prod(sizes) for sizes in (steps[0].before.sizes, steps[-1].behind.sizes))
    moved = 8 * (2 * x + y)
    waves = plan.waves + (moved + 8 * x) / 128 + sum(step.weight_reads for step in steps + steps[:-1])
    multiply_adds = sum(step.multiply_adds for step in steps) + sum(step.multiply_adds for step in steps[:-1])
    products = sum(-(-step.columns // 8) * -(-step.p // 8) for step in steps)
    alone = plan.alone(waves, 1.5 * len(steps))
    units = batch * plan.units_per_sample
    return time_of(plan.gpu, units, waves, multiply_adds, products, moved, plan.groups, alone)
