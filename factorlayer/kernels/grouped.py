"""What passes have in common that make all gradients of their units, each block by groups of warps: a group takes unit
after unit through its slots, and multiplies as operands.cuh has it."""

from __future__ import annotations

import math
from typing import Any

from factorlayer.device.code import Told, constants, kinds
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.work import round_up

MOST_GROUPS = 12
START_US = 3.2  # with the weights and the first unit on their way
UNIT_US = 0.5  # from a unit's last copy to its store, where no other group hides them
HIDDEN = {8: 0.8, 4: 0.0, 2: 0.3}  # by bytes of an element: how much of reading operands is behind products
HELD = {"float64": 16, "float32": 0, "tf32": 16, "bfloat16": 8, "float16": 8}  # of a weight in a warp's registers
OTHER_REGISTERS = {"float64": 60, "float32": 72, "tf32": 56, "bfloat16": 48, "float16": 48}


class Grouped(BlockSums):
    rows: int  # warps of a group, with 16 rows each of what they make
    parts: int  # of the columns, each with such warps
    groups: int
    slots: int
    at_once: Any  # tiles of 8 columns that a warp makes, at most
    registers: Any
    shared: Any
    units_per_sample: Any

    @property
    def warps(self) -> int:
        return self.rows * self.parts * self.groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def padding(self) -> int:
        """Elements behind a row in shared memory."""
        return 8 if self.size == 2 else 4

    def tiles_of(self, n: int, *, even: bool) -> tuple[int, int]:
        """Pieces of a part of n columns, and tiles of 8 in each."""
        count = -(-n // (8 * self.parts))
        pieces = -(-count // self.at_once)
        return pieces, round_up(-(-count // pieces), 2 if even else 1)

    def registers_of(self, kept: int, held: int, tiles: int) -> int:
        """A thread's registers, about: a warp's sums, what it holds of weights, and what it makes at once with an
        operand."""
        made = 8 * 16 * tiles * (2 if self.dtype == "float32" else 1)
        return (kept + made + held) * max(1, self.size // 4) // 32 + OTHER_REGISTERS[self.dtype]

    def staged(self, tiles: int) -> int:
        """Elements that a group's results leave through."""
        return 16 * self.rows * self.parts * (8 * tiles + 8) if self.size == 2 else 0

    @property
    def fits(self) -> bool:
        most = 65536 // (128 * round_up(self.registers, 8)) * 4  # warps: registers are dealt to quarters of four
        return bool(self.registers <= 255 and self.warps <= most and self.shared <= self.gpu.shared)

    def constants(self, numbers: Told) -> list[str]:
        """The first lines of its kernel's constants."""
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "ROWS": self.rows, "PARTS": self.parts}
        numbers |= {"GROUPS": self.groups, "SLOTS": self.slots, "AT_ONCE": self.at_once}
        types = kinds(self.dtype)
        return types + constants(numbers)

    def time(self, batch: int, memory: float, products: int, operands: int, sums: int) -> float:
        """Predicted microseconds: for units what they move (`memory`, of one), or multiply-adds, operands from shared
        memory and what groups wait for; in the end the sums of all groups."""
        gpu = self.gpu
        rate = (0.25 if self.size == 2 else 0.5) * gpu.flops[self.dtype]  # mma.sync has half of wgmma's
        units = math.ceil(batch * self.units_per_sample / gpu.sms)
        warps = self.rows * self.parts * min(self.groups, units)
        read = (1 - HIDDEN[self.size]) * operands * self.size / gpu.shared_bytes
        busy = (products / rate + read) * max(1.0, 8 / warps)
        waits = (UNIT_US + (memory if self.slots == 1 else 0)) * math.ceil(units / self.groups)
        part_bytes = SUM_BYTES[self.dtype]
        ends = 2 * sums * part_bytes / gpu.shared_bytes + self.weights * part_bytes / gpu.l2_bytes
        both = units * memory, units * busy + waits
        return float(START_US + max(both) + 0.1 * min(both) + ends)  # one does not hide all of the other
