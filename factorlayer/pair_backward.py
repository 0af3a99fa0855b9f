"""All gradients of two factors in one pass: csrc/engine/pair_backward.cuh, its tiles and source."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device import ELEMENT, MATH, headers, kernel
from factorlayer.emit import can_be_made, weight_functions
from factorlayer.gpu import ELEMENT_BYTES, Gpu
from factorlayer.gradient import PART_BYTES, BlockSums
from factorlayer.resident import Mode, OfTwoModes, as_two, round_up

LARGEST = {"float64": 96, "float32": 96, "tf32": 96, "bfloat16": 128, "float16": 128}  # whose sums a group can hold
LEAST = 8  # half of a warp's rows
MOST_GROUPS = 12
START_US = 4.0  # with the weights and the first unit on their way
UNIT_US = 0.5  # from a unit's last copy to its store, where no other group hides them
HIDDEN = {8: 0.8, 4: 0.0, 2: 0.3}  # by bytes of an element: how much of reading operands is behind products
OTHER_REGISTERS = {"float64": 60, "float32": 72, "tf32": 56, "bfloat16": 48, "float16": 48}


@dataclass(frozen=True)
class PairBackward(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    rows: int  # warps of 16 p0's each
    parts: int  # of the columns, each with such warps
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    split = 1
    units_per_block = 1  # so that few units have a multiprocessor each

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def at_once(self) -> int:
        """Tiles of 8 columns that a warp makes, at most."""
        return 8 if self.size < 8 and self.dtype != "float32" and self.sizes[3] <= 64 else 4

    @property
    def warps(self) -> int:
        return self.rows * self.parts * self.groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def _tiles(self, n: int) -> tuple[int, int]:
        """Pieces of a part of n columns, and tiles of 8 in each."""
        count = -(-n // (8 * self.parts))
        pieces = -(-count // self.at_once)
        return pieces, round_up(-(-count // pieces), 2 if self.size == 2 or self.parts % 2 else 1)

    @functools.cached_property
    def padded(self) -> tuple[int, int, int, int]:
        _, p1, q0, q1 = self.sizes
        p1, q1 = (8 * self.parts * pieces * tiles for pieces, tiles in map(self._tiles, (p1, q1)))
        return 16 * self.rows, p1, round_up(q0, 16), q1

    @functools.cached_property
    def registers(self) -> int:
        """Of a thread, about: sums of dA and dB, A, and what is made at once with an operand."""
        _, p1, q0, q1 = self.padded
        kept = 16 * q0 + -(-q1 // (16 * self.rows)) * 16 * p1 // self.parts
        made = 8 * 16 * max(self._tiles(n)[1] for n in self.sizes[1::2])
        of_a = {"float32": 0, "bfloat16": 8, "float16": 8}.get(self.dtype, 16) * q0
        made *= 2 if self.dtype == "float32" else 1
        return (kept + made + of_a) * max(1, self.size // 4) // 32 + OTHER_REGISTERS[self.dtype]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of X and B, of G and dT, and of A in shared memory."""
        p0, p1, _, q1 = self.padded
        pad = 8 if self.size == 2 else 4
        return p1 + pad, q1 + pad, p0 + pad

    @functools.cached_property
    def shared(self) -> int:
        p0, _, q0, q1 = self.padded
        x, g, of_a = self.strides
        staged = 16 * self.rows * self.parts * (8 * self._tiles(self.sizes[1])[1] + 8) if self.size == 2 else 0
        groups = self.groups * (self.slots * (p0 * x + q0 * g) + p0 * g + staged)
        a = q0 * of_a
        return (q1 * x + (a + groups if self.dtype == "float32" else max(a, groups))) * self.size

    def __str__(self) -> str:
        p0, p1, q0, q1 = self.sizes
        return (
            f"pair, backward: {p1}→{q1}, {p0}→{q0}, {self.groups} groups of {self.rows}×{self.parts} warps, "
            f"{self.slots} slots, {self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = dict(zip(("P0", "P1", "Q0", "Q1"), self.sizes, strict=True))
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "ROWS": self.rows, "PARTS": self.parts}
        numbers |= {"GROUPS": self.groups, "SLOTS": self.slots, "AT_ONCE": self.at_once}
        numbers |= {"GRAD": sum(len(mode.parts) for mode in self.modes)}
        lines = [f"using Math = {MATH[self.dtype]};", f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        for mode, letter in zip(self.modes, "ab", strict=True):
            lines += weight_functions(mode, letter, self.dtype)
        return kernel(
            headers("sums.cuh", "operands.cuh", "pair_backward.cuh"), name, "PairBackward", lines, self.threads, 1
        )


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> PairBackward | None:
    """The fastest by prediction, of all ways to take neighbouring modes as two; None where this family has no kernel.
    `outer` is the size of what lies before them."""
    plans = [replace(plan, us=_time(plan, batch)) for plan in _tilings(modes, outer, dtype, gpu)]
    return min(plans, key=lambda plan: plan.us, default=None)


def _tilings(modes: tuple[Mode, ...], outer: int, dtype: str, gpu: Gpu) -> Iterator[PairBackward]:
    for both, columns in itertools.product(as_two(modes), (1, 2, 4)):
        sizes = [n for mode in both for n in (mode.p, mode.q)]
        if min(sizes) < LEAST or max(sizes) > LARGEST[dtype] or not all(can_be_made(mode, dtype) for mode in both):
            continue
        if ELEMENT_BYTES[dtype] == 2 and (both[1].p % 2 or both[1].q % 2):
            continue
        if columns > 1 and 8 * columns > min(both[1].p, both[1].q):
            continue
        rows = -(-both[0].p // 16)
        for groups, slots, more in itertools.product(range(MOST_GROUPS, 0, -1), (3, 2, 1), (0, 1, 2)):
            plan = PairBackward(both, dtype, outer, rows + more, columns, groups, slots, gpu)
            most = 65536 // (128 * round_up(plan.registers, 8)) * 4  # warps: registers are dealt to quarters of four
            if plan.registers <= 255 and plan.warps <= most and plan.shared <= gpu.shared:
                yield plan


def _time(plan: PairBackward, batch: int) -> float:
    """Predicted microseconds: for units what they move, or products, operands from shared memory and what groups wait
    for; in the end the sums of all groups."""
    gpu = plan.gpu
    p0, p1, q0, q1 = plan.sizes
    memory = (2 * p0 * p1 + q0 * q1) * plan.size / (0.9 * gpu.memory_bytes)
    p0, p1, q0, q1 = plan.padded
    turns = -(-q1 // (16 * plan.rows))
    rate = (0.25 if plan.size == 2 else 0.5) * gpu.flops[plan.dtype]  # of multiply-adds; mma.sync has half of wgmma's
    products = (2 * p0 * p1 * q1 + 2 * p0 * q0 * q1 + turns * 16 * plan.rows * p0 * p1) / rate
    operands = plan.rows * (2 * p1 * q1 + 2 * q0 * q1 + turns * p0 * p1) + plan.parts * p0 * (p1 + 2 * q1)
    units = math.ceil(batch * plan.units_per_sample / gpu.sms)
    warps = plan.rows * plan.parts * min(plan.groups, units)
    busy = (products + (1 - HIDDEN[plan.size]) * operands * plan.size / gpu.shared_bytes) * max(1.0, 8 / warps)
    waits = (UNIT_US + (memory if plan.slots == 1 else 0)) * math.ceil(units / plan.groups)
    part_bytes = PART_BYTES[plan.dtype]
    sums = plan.groups * (plan.parts * p0 * q0 + turns * 16 * plan.rows * p1) * part_bytes
    ends = 2 * sums / gpu.shared_bytes + plan.weights * part_bytes / gpu.l2_bytes
    both = units * memory, units * busy + waits
    return START_US + max(both) + 0.1 * min(both) + ends  # one does not hide all of the other
