"""Passes of two to four small factors in double, by columns: what csrc/engine/columns.cuh is told, and what that takes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from factorlayer.device import headers, kernel
from factorlayer.expression import cuda_type
from factorlayer.gpu import Gpu
from factorlayer.resident import Mode, Work, round_up

ARCHITECTURES = (90, 100)  # with a copy engine, and units for doubles
MOST_MODES, LARGEST = 4, 16
BANKS = 16  # of doubles, for half a warp at once
MOST_GROUPS = 15  # of several warps, which have a barrier each
MOST_WARPS = 16
BARRIER_BYTES = 32  # of a group
OTHER_REGISTERS = 64
AT_ONCE = 6  # sums, at least
START_US = 5.0
STEP_US = 0.25  # of a contraction, that a group waits for what it reads
LOAD_US = 1.5  # from memory, where a group has no slot for the next unit
WAVES_US = 1750.0  # accesses of 128 bytes to shared memory, or steps of a clock
CLOCKS = 0.5  # of a multiprocessor for an FMA of a warp
Int = NDArray[np.int64]


def met(places: Int) -> int:
    """Accesses that half warps take, rows of `places` in doubles: negative ones are not accessed."""
    banks = np.where(places < 0, BANKS, places % BANKS)
    counts = (banks[:, :, None] == np.arange(BANKS)).sum(axis=1)
    return int(counts.max(axis=1).sum())


@dataclass(frozen=True)
class State:
    """As it lies in shared memory: sizes of its modes, and how far apart in doubles."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return round_up(8 * (sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1), 16)

    def columns(self, mode: int) -> Int:
        """Where the columns of a mode begin."""
        places = np.zeros(1, np.int64)
        for i, (n, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            if i != mode:
                places = (places[:, None] + np.arange(n) * stride).ravel()
        return places

    def by_columns(self, mode: int) -> int:
        """Accesses to all elements, where a lane has a column."""
        places = self.columns(mode)
        padded = np.full(round_up(len(places), BANKS), -1, np.int64)
        padded[: len(places)] = places
        return self.sizes[mode] * met(padded.reshape(-1, BANKS))

    def as_operand(self, mode: int, spread: bool) -> int:
        """The same where the mode is m or n of a matrix product, and columns are its k's."""
        places, n, stride = self.columns(mode), self.sizes[mode], self.strides[mode]
        fours = 2 * -(-len(places) // 8)
        padded = np.full(4 * fours, -1, np.int64)
        padded[: len(places)] = places
        lanes = padded.reshape(4, fours).T if spread else padded.reshape(fours, 4)
        total = 0
        for first in range(0, n, 4):
            rows = np.arange(first, min(first + 4, n)) * stride
            both = np.where(lanes[:, None, :] < 0, -1, lanes[:, None, :] + rows[:, None])
            total += met(both.reshape(fours, -1))
        return total

    def cuda(self) -> str:
        sizes = (1,) * (MOST_MODES - len(self.sizes)) + self.sizes
        strides = (0,) * (MOST_MODES - len(self.sizes)) + self.strides
        return f"Strides<{', '.join(map(str, (*sizes, *strides[:-1])))}>"


def dense(sizes: tuple[int, ...]) -> State:
    return next(_padded(sizes, [range(1)] * (len(sizes) - 1)))


def in_slot(sizes: tuple[int, ...], cost: Callable[[State], int]) -> State:
    """As the copy engine puts it there, which can part its runs where 16 bytes divide them, at the least cost."""
    pads = range(0, BANKS, 2) if math.prod(sizes[1:]) % 2 == 0 else range(1)
    return min(_padded(sizes, [pads, *[range(1)] * (len(sizes) - 2)]), key=cost)


def _padded(sizes: tuple[int, ...], pads: Sequence[range]) -> Iterator[State]:
    for each in itertools.product(*pads):
        strides = [1]
        for n, pad in zip(reversed(sizes[1:]), reversed(each), strict=True):
            strides.insert(0, n * strides[0] + pad)
        yield State(sizes, tuple(strides))


def states(sizes: tuple[int, ...]) -> Iterator[State]:
    """Ways to lay one out."""
    further = range(BANKS if len(sizes) == 3 else 2)
    yield from _padded(sizes, [range(BANKS), *[further] * (len(sizes) - 2)])


@dataclass(frozen=True)
class Step:
    """A contraction of the mode at a place, between two states."""

    mode: int
    before: State
    behind: State

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
        """Of a thread, about, in either direction."""
        each = self.each(warps)
        return 2 * (each * max(self.p, self.q) + 2 * max(AT_ONCE, each)) + OTHER_REGISTERS

    @property
    def multiply_adds(self) -> int:
        """Of warps, one of which has all columns."""
        return self.each(1) * self.p * self.q

    @property
    def weight_reads(self) -> int:
        """About, as a thread has up to three columns"""
        return -(-self.each(1) // 3) * self.p * self.q // 2

    def cuda(self, places: tuple[int, int], weight: tuple[int, int]) -> str:
        mode = self.mode + MOST_MODES - len(self.before.sizes)
        numbers = ", ".join(map(str, (*places, *weight)))
        return f"Step<{mode}, {self.before.cuda()}, {self.behind.cuda()}, {numbers}>"


def sizes_between(modes: Sequence[Mode], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Of the states before, between and behind contractions."""
    sizes = [mode.p for mode in modes]
    found = [tuple(sizes)]
    for at in order:
        sizes[at] = modes[at].q
        found.append(tuple(sizes))
    return found


def takes(modes: Sequence[Mode], gpu: Gpu) -> bool:
    """Whether such passes can have these modes."""
    if gpu.arch not in ARCHITECTURES or not 2 <= len(modes) <= MOST_MODES:
        return False
    small = all(len(mode.parts) == 1 and 2 <= mode.p <= LARGEST and 2 <= mode.q <= LARGEST for mode in modes)
    return small and 8 * math.prod(max(mode.p, mode.q) for mode in modes) <= gpu.shared // 2


class ByColumns:
    """What such passes have in common, forward and backward."""

    gpu: Gpu
    steps: tuple[Step, ...]
    warps: int
    groups: int
    slots: int

    split = 1
    units_per_block = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    def weight_lines(self, weights: Sequence[int], turned: bool) -> tuple[list[str], list[tuple[int, int]], int]:
        """What loads the steps' weights, with their numbers, where they lie, as they are and turned, and their bytes."""
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

    @property
    def weight_bytes(self) -> int:
        return sum(8 * (step.q * round_up(step.p, 2) + step.p * round_up(step.q, 2)) for step in self.steps)


def groups_of(gpu: Gpu, warps: int, registers: int, group_bytes: int, weight_bytes: int) -> int:
    """That a block can have; none where a thread would need too many registers."""
    if registers > 255:
        return 0
    room = (gpu.shared - weight_bytes) // (group_bytes + BARRIER_BYTES)
    most = MOST_GROUPS if warps > 1 else MOST_WARPS
    return min(most, room, 65536 // (128 * round_up(registers, 8)) * 4 // warps)


def time_of(
    gpu: Gpu, units: int, waves: float, multiply_adds: float, products: float, moved: int, groups: int, alone: float
) -> float:
    """Predicted microseconds: of units that each take so many accesses to shared memory, FMA of warps and products of the
    matrix unit, and move so many bytes. A group by itself takes `alone` for one."""
    rate = gpu.flops["float64"] / 0.45e6
    times = (
        waves / WAVES_US,
        multiply_adds * CLOCKS / WAVES_US,
        2048 * products / (rate * 0.45e6),
        moved / (0.9 * gpu.memory_bytes),
    )
    each = -(-units // gpu.sms)
    return START_US + max(each * (max(times) + 0.15 * (sum(times) - max(times))), -(-each // groups) * alone)


@dataclass(frozen=True)
class Columns(ByColumns):
    """A pass, tiled. `us` is the time predicted."""

    work: Work
    steps: tuple[Step, ...]
    warps: int
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    @property
    def units_per_sample(self) -> int:
        return self.work.outer

    @property
    def output_bytes(self) -> int:
        """For one sample."""
        return 8 * self.work.outer * math.prod(self.steps[-1].behind.sizes)

    @property
    def group_bytes(self) -> int:
        slots = self.slots * self.steps[0].before.bytes
        return slots + max(step.before.bytes for step in self.steps[1:])

    @property
    def shared(self) -> int:
        weights = sum(8 * step.q * round_up(step.p, 2) for step in self.steps)
        return weights + self.groups * (self.group_bytes + BARRIER_BYTES)

    def __str__(self) -> str:
        steps = ", ".join(f"{step.p}→{step.q}" for step in self.steps)
        return (
            f"columns: {steps}, {self.groups} groups of {self.warps} warps, {self.slots} slots, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        work, modes = self.work, dict(self.work.steps)
        loads, weights, weight_bytes = self.weight_lines([modes[s.mode].parts[0][0] for s in self.steps], False)
        slot = self.steps[0].before.bytes
        state = self.slots * slot
        types = [s.cuda((state, state), weight) for s, weight in zip(self.steps, weights, strict=True)]
        numbers = {"WARPS": self.warps, "GROUPS": self.groups, "SLOTS": self.slots, "UNITS_PER_SAMPLE": work.outer}
        numbers |= {"kSlot": slot, "kGroup": self.group_bytes, "kWeights": weight_bytes}
        lines = [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        lines += [cuda_type(work.activation, work.scalars), f"static constexpr bool BIAS = {str(work.bias).lower()};"]
        lines += [f"using First = {types[0]};", f"using Last = {types[-1]};"]
        between = " ".join(f"k.template contract<{each}>();" for each in types[1:-1])
        lines += [f"template <class Kernel> static DEVICE void between(const Kernel& k) {{ {between} }}"]
        lines += [f"template <class Kernel> static DEVICE void load_weights(const Kernel& k) {{ {' '.join(loads)} }}"]
        return kernel(headers("columns.cuh"), name, "Columns", lines, self.threads)


def tile(work: Work, batch: int, gpu: Gpu) -> Columns | None:
    """None where this family has no kernel."""
    if work.dtype != "float64" or work.rank > 1 or work.inner > 1 or len(work.steps) != len(work.sizes):
        return None
    modes = dict(work.steps)
    in_order = tuple(modes[at] for at in range(len(work.sizes)))
    if not takes(in_order, gpu):
        return None
    plans = [plan for steps in _ways(in_order) for plan in _tilings(work, steps, gpu)]
    return min((replace(plan, us=_time(plan, batch)) for plan in plans), key=lambda plan: plan.us, default=None)


@functools.lru_cache(256)
def _ways(modes: tuple[Mode, ...]) -> tuple[tuple[Step, ...], ...]:
    """Orders, the first mode last, with the states between as few lanes meet in a bank."""
    found = []
    for first in itertools.permutations(range(1, len(modes))):
        order = (*first, 0)
        sizes = sizes_between(modes, order)
        laid = [in_slot(sizes[0], functools.partial(_cost, order[:1]))]
        laid += [min(states(n), key=functools.partial(_cost, order[i : i + 2])) for i, n in enumerate(sizes[1:-1])]
        laid.append(dense(sizes[-1]))
        found.append(tuple(Step(at, *laid[i : i + 2]) for i, at in enumerate(order)))
    return tuple(found)


def _cost(modes: Sequence[int], state: State) -> int:
    """Accesses by columns of some modes, times the bytes that this takes."""
    return sum(state.by_columns(mode) for mode in modes) * state.bytes


def _tilings(work: Work, steps: tuple[Step, ...], gpu: Gpu) -> Iterator[Columns]:
    for warps, slots in itertools.product((1, 2, 4, 8), (1, 2)):
        plan = Columns(work, steps, warps, 1, slots, gpu)
        registers = max(step.registers(warps) for step in steps)
        groups = groups_of(gpu, warps, registers, plan.group_bytes, plan.weight_bytes)
        if groups > 0:
            yield replace(plan, groups=groups)


def _time(plan: Columns, batch: int) -> float:
    steps = plan.steps
    moved = 8 * sum(math.prod(sizes) for sizes in (steps[0].before.sizes, steps[-1].behind.sizes))
    waves = moved / 128 + sum(step.before.by_columns(step.mode) + step.weight_reads for step in steps)
    waves += sum(step.behind.by_columns(step.mode) for step in steps[:-1])
    multiply_adds = sum(step.multiply_adds for step in steps)
    alone = STEP_US * len(steps) + 4 * CLOCKS * multiply_adds / plan.warps / WAVES_US
    alone += LOAD_US if plan.slots == 1 else 0
    units = batch * plan.work.outer
    return time_of(plan.gpu, units, waves, multiply_adds, 0, moved, plan.groups, alone)
