"""All gradients of three or four small factors in double in one pass, by columns: small_double_backward.cuh."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from factorlayer.device.code import Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.bank_layouts import MOST_MODES, Order, State, Uses, lay_out
from factorlayer.kernels.gradient import BlockSums
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Mode, round_up

LARGEST = 16
MOST_GROUPS = 15  # of several warps, which have a barrier each
MOST_WARPS = 16
BARRIER_BYTES = 32  # of a group
OTHER_REGISTERS = 64
AT_ONCE = 6  # sums, at least
START_US = 4.2
STEP_US = 0.4  # of a contraction, that warps wait for each other
ALONE = 6  # times what accesses take, where a warp waits for each of its own
LOAD_US = 1.0  # from memory, where a group has no slot for the next unit
WAVES_US = 1750.0  # accesses of 128 bytes to shared memory, or steps of a clock
CLOCKS = 0.5  # of a multiprocessor for an FMA of a warp


@dataclass(frozen=True)
class Step:
    """A contraction of the mode at a place, between two states."""

    mode: int
    before: State
    behind: State
    order: Order

    @property
    def p(self) -> int:
        return self.before.sizes[self.mode]

    @property
    def q(self) -> int:
        return self.behind.sizes[self.mode]

    @property
    def columns(self) -> int:
        return math.prod(self.before.sizes) // self.p

    def each(self, warps: int) -> int:
        """Columns of a thread."""
        return -(-self.columns // (32 * warps))

    def registers(self, warps: int) -> int:
        """A thread's registers, about, in either direction."""
        each = self.each(warps)
        return 2 * (each * max(self.p, self.q) + 2 * max(AT_ONCE, each)) + OTHER_REGISTERS

    @property
    def multiply_adds(self) -> int:
        """FMA instructions of warps, one of which has all columns."""
        return self.each(1) * self.p * self.q

    @property
    def weight_reads(self) -> int:
        """Reads of the weight by warps, about: a thread has up to three columns."""
        return -(-self.each(1) // 3) * self.p * self.q // 2

    def cuda(self, places: tuple[int, int], weight: tuple[int, int]) -> str:
        mode = self.mode + MOST_MODES - len(self.before.sizes)
        numbers = ", ".join(map(str, (*places, *weight)))
        return f"Step<{mode}, {self.before.cuda()}, {self.behind.cuda()}, {self.order.cuda()}, {numbers}>"


def visit(name: str, calls: Sequence[str], further: str = "") -> list[str]:
    """A function of a kernel `k` that makes these calls."""
    more = f", class {further.split('&')[0]}" if further else ""
    parameters = f"const Kernel& k{', ' + further if further else ''}"
    return [f"template <class Kernel{more}> static DEVICE void {name}({parameters}) {{ {' '.join(calls)} }}"]


def sizes_between(modes: Sequence[Mode], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes of the states before, between and behind contractions."""
    sizes = [mode.p for mode in modes]
    found = [tuple(sizes)]
    for at in order:
        sizes[at] = modes[at].q
        found.append(tuple(sizes))
    return found


def orders_of(modes: Sequence[Mode]) -> list[tuple[int, ...]]:
    """Orders of contractions, the first mode's first; of many modes, which have more orders, some."""
    further = range(1, len(modes))
    if len(modes) == MOST_MODES:
        return [(0, *further), (0, *reversed(further))]
    return [(0, *each) for each in itertools.permutations(further)]


def takes(modes: Sequence[Mode], gpu: Gpu) -> bool:
    """Whether such passes can have these modes."""
    if not (gpu.copy_engine and gpu.doubles) or not 2 <= len(modes) <= MOST_MODES:
        return False
    small = all(len(mode.parts) == 1 and 2 <= mode.p <= LARGEST and 2 <= mode.q <= LARGEST for mode in modes)
    return small and 8 * math.prod(max(mode.p, mode.q) for mode in modes) <= gpu.shared // 2


def groups_of(gpu: Gpu, warps: int, registers: int, group_bytes: int, weight_bytes: int) -> int:
    """Groups that a block can have; none where a thread would need too many registers."""
    if registers > 255:
        return 0
    room = (gpu.shared - weight_bytes) // (group_bytes + BARRIER_BYTES)
    most = MOST_GROUPS if warps > 1 else MOST_WARPS
    return min(most, room, 65536 // (128 * round_up(registers, 8)) * 4 // warps)


@dataclass(frozen=True)
class SmallDoubleBackward(BlockSums):
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
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @property
    def details(self) -> str:
        steps = ", ".join(f"{step.p}→{step.q}" for step in self.steps)
        return f"{steps}, {self.groups} groups of {self.warps} warps, {self.slots} slots"

    def weight_lines(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Calls that load the steps' weights, and the places of each, as it is and turned."""
        at, places, lines = 0, [], []
        for step in self.steps:
            for turned, rows, row in (("false", step.q, step.p), ("true", step.p, step.q)):
                lines.append(f"k.template load_weight<{step.q}, {step.p}, {turned}>({step.mode}, {at});")
                places.append(at)
                at += 8 * rows * round_up(row, 2)
        return lines, list(zip(places[::2], places[1::2], strict=True))

    @property
    def weight_bytes(self) -> int:
        return sum(8 * (step.q * round_up(step.p, 2) + step.p * round_up(step.q, 2)) for step in self.steps)

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
        """Predicted microseconds: accesses to shared memory, FMA of warps, products of the matrix unit and what is
        moved, side by side; or groups, one unit after another."""
        steps, gpu = self.steps, self.gpu
        x, y = (math.prod(sizes) for sizes in (steps[0].before.sizes, steps[-1].behind.sizes))
        moved = 8 * (2 * x + y)
        waves = self.waves + (moved + 8 * x) / 128 + sum(step.weight_reads for step in steps + steps[:-1])
        multiply_adds = sum(step.multiply_adds for step in steps) + sum(step.multiply_adds for step in steps[:-1])
        products = sum(-(-step.columns // 8) * -(-step.p // 8) for step in steps)
        times = (
            waves / WAVES_US,
            multiply_adds * CLOCKS / WAVES_US,
            2048 * products / gpu.flops["float64"],
            moved / (0.9 * gpu.memory_bytes),
        )
        alone = ALONE * waves / WAVES_US / self.warps + STEP_US * 1.5 * len(steps) + (LOAD_US if self.slots == 1 else 0)
        each = -(-batch * self.units_per_sample // gpu.sms)
        return START_US + max(each * (max(times) + 0.08 * (sum(times) - max(times))), -(-each // self.groups) * alone)

    @property
    def told(self) -> list[str]:
        loads, weights = self.weight_lines()
        slot = self.steps[0].before.bytes
        told: Told = {"X": self.steps[0].before.cuda(), "G": self.steps[-1].behind.cuda(), "GRAD": len(self.steps)}
        told |= {"WARPS": self.warps, "GROUPS": self.groups, "SLOTS": self.slots, "kFours": self.tiles}
        told |= {"UNITS_PER_SAMPLE": self.units_per_sample, "kSums": self.weights}
        told |= {"MEETINGS": 3 * len(self.steps) - 2}
        told |= {"kSlot": slot, "kGrad": self.slots * slot, "kGroup": self.group_bytes, "kWeights": self.weight_bytes}
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
    return fastest(tilings(modes, outer, gpu), batch)


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
        waves, laid, orders = lay_out(sizes, ends)
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
