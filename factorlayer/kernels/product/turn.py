"""Passes that turn matrices, of states or weights: turn.cuh, its tiles and source."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.work import round_up

ACCESSES = 4  # of a thread, on their way at once
BLOCKS = 5  # on a multiprocessor: some read while others write
WHOLE_BYTES = 24 << 10  # of whole matrices that a block takes, or more
OF_WORD = 24  # instructions for what a thread stores of them at once
# Times what memory takes by its bandwidth; and cycles of a multiprocessor for a warp's access, however narrow. Of 37
# turns in drawn layers on one H100, 35 are within 30 %.
MEMORY, ACCESS_CYCLES = 1.1, 8


@dataclass(frozen=True)
class Turn(Pass):
    """The pass that turns `matrices` of each sample, [rows, columns] to [columns, rows]; in tf32 rounded to it. Rows
    may be `mixed`: what lies as [r, c] of them is taken as [c, r]."""

    matrices: int
    rows: int
    columns: int
    dtype: str
    batch: int
    gpu: Gpu
    mixed: tuple[int, int] | None = None

    threads = 256
    blocks_per_sm = 0  # as many as there is work

    @property
    def blocks(self) -> int:
        return BLOCKS

    @kept
    def tile(self) -> tuple[int, int, int]:
        """Rows and columns, 128 bytes of each, and tiles side by side. Few columns are all in one, with rows of many
        matrices, and few rows in several."""
        least = 128 // self.size
        elements = ACCESSES * self.threads * self.read
        if self.is_stacked:
            rows = self.batch * self.matrices * self.rows // (2 * self.gpu.sms)
            return least * max(1, min(elements // (self.columns * least), -(-rows // least))), self.columns, 1
        if self.rows <= least:
            rows = round_up(self.rows, 8)
            return rows, least, max(1, min(elements // (rows * least), -(-self.columns // least)))
        return least * max(1, min(elements // (least * least), -(-self.rows // least))), least, 1

    @property
    def is_stacked(self) -> bool:
        return self.columns * self.size <= 256

    @property
    def read(self) -> int:
        """Elements of one access."""
        in_rows = self.is_stacked and not self.mixed
        return math.gcd(16 // self.size, self.rows * self.columns if in_rows else self.columns)

    @property
    def write(self) -> int:
        return math.gcd(16 // self.size, self.rows)

    @property
    def shared(self) -> int:
        return math.prod(self.tile) * self.size

    @property
    def units_per_sample(self) -> int:
        rows, columns, beside = self.tile
        tiles = -(-self.rows // rows) * -(-self.columns // (columns * beside))
        return self.matrices * (self.rows if self.is_stacked else tiles)

    @property
    def units_per_block(self) -> int:
        return self.tile[0] if self.is_stacked else 1

    @property
    def output_bytes(self) -> int:
        return self.matrices * self.rows * self.columns * self.size

    @property
    def us(self) -> float:
        """Predicted: memory's time, and that of accesses, which do not overlap."""
        tiles = -(-self.batch * self.units_per_sample // self.units_per_block)
        elements = tiles * math.prod(self.tile) / self.gpu.sms
        accesses = elements * (1 / self.read + 1 / self.write) / 32
        moved = 2 * self.batch * self.output_bytes / (self.gpu.memory_bytes * self.gpu.sms)
        return 1.7 + MEMORY * moved + ACCESS_CYCLES * accesses / self.gpu.rates.cycles

    def us_of(self, batch: int) -> float:
        return replace(self, batch=batch).us

    def __str__(self) -> str:
        return f"turn: {self.rows}×{self.columns}, in tiles of {self.tile[0]}×{self.tile[1] * self.tile[2]}"

    @property
    def told(self) -> list[str]:
        told: Told = {"Element": ELEMENT[self.dtype], "MATRICES": self.matrices, "ROWS": self.rows}
        told |= {"COLUMNS": self.columns}
        told |= dict(zip(("TR", "TC", "BESIDE"), self.tile, strict=True))
        told |= {"READ": self.read, "WRITE": self.write, "THREADS": self.threads, "ROUNDS": self.dtype == "tf32"}
        told |= dict(zip(("MIXED_ROWS", "MIXED_COLUMNS"), self.mixed or (self.rows, 1), strict=True))
        return constants(told)


@dataclass(frozen=True)
class TurnWhole(Turn):
    """The same by whole matrices: a block takes `together` of them, which lie in memory one behind another, before and
    after. Rows and columns of any length come by 16 bytes and are stored by words."""

    together: int = 1

    @property
    def shared(self) -> int:
        return self.together * self.rows * self.columns * self.size

    @property
    def blocks(self) -> int:
        return min(BLOCKS, (self.gpu.shared + 1024) // (self.shared + 1024))

    @property
    def units_per_sample(self) -> int:
        return self.matrices

    @property
    def units_per_block(self) -> int:
        return self.together

    @property
    def us(self) -> float:
        """Predicted: the longest of memory's time, that of instructions, and of reads that meet in banks, of as many
        blocks as the multiprocessor with most has."""
        blocks = -(-self.batch * self.matrices // self.together)
        elements = -(-blocks // self.gpu.sms) * self.together * self.rows * self.columns
        words = max(1, self.size // 4)  # of an element
        meet = words * math.gcd(self.columns, 32 // words) * elements / 32 / self.gpu.rates.cycles
        issue = OF_WORD * min(1, self.size / 4) * elements / 32 / self.gpu.instructions
        moved = MEMORY * 2 * elements * self.size / self.gpu.memory_bytes
        return 1.7 + self.gpu.rates.wait_us + max(moved, issue, meet)

    def __str__(self) -> str:
        return f"turn: {self.rows}×{self.columns}, {self.together} of them at once"

    @property
    def told(self) -> list[str]:
        told: Told = {"Element": ELEMENT[self.dtype], "MATRICES": self.matrices, "ROWS": self.rows}
        told |= {"COLUMNS": self.columns, "TOGETHER": self.together, "THREADS": self.threads}
        return constants(told | {"ROUNDS": self.dtype == "tf32"})


def tile(
    matrices: int,
    rows: int,
    columns: int,
    dtype: str,
    batch: int,
    gpu: Gpu,
    mixed: tuple[int, int] | None = None,
) -> tuple[Turn]:
    """The faster of both by prediction."""
    by_tiles = Turn(matrices, rows, columns, dtype, batch, gpu, mixed)
    found = None if mixed else whole(matrices, rows, columns, dtype, batch, gpu)
    return (min([by_tiles, *([found] if found else [])], key=lambda turn: turn.us),)


def whole(matrices: int, rows: int, columns: int, dtype: str, batch: int, gpu: Gpu) -> TurnWhole | None:
    """With as many matrices together as begin at whole 16 bytes."""
    of_one = rows * columns * ELEMENT_BYTES[dtype]
    least = 16 // math.gcd(16, of_one)
    together = least * max(1, WHOLE_BYTES // (least * of_one))
    found = TurnWhole(matrices, rows, columns, dtype, batch, gpu, together=together)
    return found if found.shared <= gpu.shared else None
