"""Passes of two to four small factors in double by columns: what small_double.cuh is told, and what it takes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.bank_layouts import MOST_MODES, Order, State, Uses, lay_out
from factorlayer.kernels.passes import Pass, fastest
from factorlayer.kernels.work import Mode, OfWork, Work, round_up

LARGEST = 16
MOST_GROUPS = 15  # of several warps, which have a barrier each
MOST_WARPS = 16
BARRIER_BYTES = 32  # of a group
OTHER_REGISTERS = 64
AT_ONCE = 6  # sums, at least
START_US = 5.0
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


class OfSmallDouble(Pass):
    """A pass of small factors in double, forward or backward."""

    gpu: Gpu
    steps: tuple[Step, ...]
    warps: int
    groups: int
    slots: int

    units_per_block = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @property
    def details(self) -> str:
        steps = ", ".join(f"{step.p}→{step.q}" for step in self.steps)
        return f"{steps}, {self.groups} groups of {self.warps} warps, {self.slots} slots"

    def weight_lines(self, weights: Sequence[int], turned: bool) -> tuple[list[str], list[tuple[int, int]], int]:
        """Calls that load the steps' weights, which have these numbers; the places of each, as it is and turned; all
        bytes."""
        at, places, lines = 0, [], []
        for step, number in zip(self.steps, weights, strict=True):
            place = []
            for flag in (False, True) if turned else (False,):
                rows, row = (step.p, step.q) if flag else (step.q, step.p)
                lines.append(f"k.template load_weight<{step.q}, {step.p}, {str(flag).lower()}>({number}, {at});")
                place.append(at)
                at += 8 * rows * round_up(row, 2)
            places.append((place[0], place[-1] if turned else 0))
        return lines, places, at

    def alone(self, waves: float, steps: float) -> float:
        """Microseconds of a group for a unit, with so many accesses, if it is alone."""
        return ALONE * waves / WAVES_US / self.warps + STEP_US * steps + (LOAD_US if self.slots == 1 else 0)

    @property
    def weight_bytes(self) -> int:
        return sum(8 * (step.q * round_up(step.p, 2) + step.p * round_up(step.q, 2)) for step in self.steps)


def groups_of(gpu: Gpu, warps: int, registers: int, group_bytes: int, weight_bytes: int) -> int:
    """Groups that a block can have; none where a thread would need too many registers."""
    if registers > 255:
        return 0
    room = (gpu.shared - weight_bytes) // (group_bytes + BARRIER_BYTES)
    most = MOST_GROUPS if warps > 1 else MOST_WARPS
    return min(most, room, 65536 // (128 * round_up(registers, 8)) * 4 // warps)


def time_of(
    gpu: Gpu, units: int, waves: float, multiply_adds: float, products: float, moved: int, groups: int, alone: float
) -> float:
    """Predicted microseconds: of units that each take so many accesses to shared memory, FMA of warps and products of
    the matrix unit, and move so many bytes. A group by itself takes `alone` for one."""
    rate = gpu.flops["float64"] / 0.45e6
    times = (
        waves / WAVES_US,
        multiply_adds * CLOCKS / WAVES_US,
        2048 * products / (rate * 0.45e6),
        moved / (0.9 * gpu.memory_bytes),
    )
    each = -(-units // gpu.sms)
    return START_US + max(each * (max(times) + 0.08 * (sum(times) - max(times))), -(-each // groups) * alone)


@dataclass(frozen=True)
class SmallDouble(OfSmallDouble, OfWork):
    """A pass, tiled. `us` is the time predicted."""

    work: Work
    steps: tuple[Step, ...]
    waves: int  # accesses to states, for a unit
    warps: int
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    asks = ()

    @property
    def output_bytes(self) -> int:
        return 8 * self.work.outer * math.prod(self.steps[-1].behind.sizes)

    @property
    def group_bytes(self) -> int:
        slots = self.slots * self.steps[0].before.bytes
        return slots + max(step.before.bytes for step in self.steps[1:])

    @property
    def shared(self) -> int:
        weights = sum(8 * step.q * round_up(step.p, 2) for step in self.steps)
        return weights + self.groups * (self.group_bytes + BARRIER_BYTES)

    def us_of(self, batch: int) -> float:
        return _time(self, batch)

    @property
    def told(self) -> list[str]:
        work, modes = self.work, dict(self.work.steps)
        loads, weights, weight_bytes = self.weight_lines([modes[s.mode].parts[0][0] for s in self.steps], False)
        slot = self.steps[0].before.bytes
        state = self.slots * slot
        first, *between, last = (s.cuda((state, state), weight) for s, weight in zip(self.steps, weights, strict=True))
        told: Told = {"Element": ELEMENT[work.dtype], "First": first, "Last": last, "UNITS_PER_SAMPLE": work.outer}
        told |= {"WARPS": self.warps, "GROUPS": self.groups, "SLOTS": self.slots}
        told |= {"kSlot": slot, "kGroup": self.group_bytes, "kWeights": weight_bytes}
        calls = [f"k.template contract<{each}>();" for each in between]
        return constants(told) + work.finish + visit("between", calls) + visit("load_weights", loads)


def tile(work: Work, batch: int, gpu: Gpu) -> SmallDouble | None:
    """None where this family has no kernel."""
    if work.dtype != "float64" or work.rank > 1 or work.inner > 1 or len(work.steps) != len(work.sizes):
        return None
    if not takes([mode for _, mode in work.steps], gpu):
        return None
    return fastest(replace(plan, us=_time(plan, batch)) for plan in tilings(work, gpu))


@functools.lru_cache(256)
def _ways(modes: tuple[Mode, ...]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """Orders, the first mode last, with the accesses to states by columns."""
    found = []
    for order in orders_of(modes):
        order = (*order[1:], 0)
        sizes = sizes_between(modes, order)
        uses = [Uses(mode, 1, 0) for mode in order]
        ends = list(zip([None, *uses], [*uses, None], strict=True))
        waves, laid, orders = lay_out(sizes, ends, False, len(modes) - 1, False)
        steps = zip(order, laid[:-1], laid[1:], orders, strict=True)
        found.append((waves, tuple(Step(*each) for each in steps)))
    return tuple(found)


def tilings(work: Work, gpu: Gpu) -> Iterator[SmallDouble]:
    """Tilings of a work that this family takes."""
    modes = tuple(mode for _, mode in sorted(work.steps))
    for (waves, steps), warps, slots in itertools.product(_ways(modes), (1, 2, 4, 8), (1, 2)):
        plan = SmallDouble(work, steps, waves, warps, 1, slots, gpu)
        registers = max(step.registers(warps) for step in steps)
        groups = groups_of(gpu, warps, registers, plan.group_bytes, plan.weight_bytes)
        if groups > 0:
            yield replace(plan, groups=groups)


def _time(plan: SmallDouble, batch: int) -> float:
    steps = plan.steps
    moved = 8 * sum(math.prod(sizes) for sizes in (steps[0].before.sizes, steps[-1].behind.sizes))
    waves = plan.waves + moved / 128 + sum(step.weight_reads for step in steps)
    multiply_adds = sum(step.multiply_adds for step in steps)
    alone = plan.alone(waves, len(steps))
    units = batch * plan.work.outer
    return time_of(plan.gpu, units, waves, multiply_adds, 0, moved, plan.groups, alone)
