"""Passes that turn matrices, of states or weights: csrc/engine/turn.cuh, its tiles and source."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from factorlayer.device import ELEMENT, headers, kernel
from factorlayer.gpu import ELEMENT_BYTES, Gpu

TILE_BYTES = 16384


@dataclass(frozen=True)
class Turn:
    """Of each sample `matrices` of them, [rows, columns] to [columns, rows]; in tf32 rounded to it."""

    matrices: int
    rows: int
    columns: int
    dtype: str
    batch: int
    gpu: Gpu

    threads = 256
    split = 1
    units_per_block = 1

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @functools.cached_property
    def tile(self) -> tuple[int, int]:
        """Rows, of which 128 bytes are a column's least, and columns."""
        least = 128 // self.size
        columns = self.columns if self.columns <= least else least
        most = max(1, TILE_BYTES // (columns * self.size * least))
        return least * min(most, -(-self.rows // least)), columns

    @property
    def read(self) -> int:
        """Elements of one access."""
        rows, columns = self.tile
        whole = self.rows * self.columns if columns == self.columns else self.columns
        return math.gcd(16 // self.size, whole, rows * columns)

    @property
    def write(self) -> int:
        return math.gcd(16 // self.size, self.rows)

    @property
    def shared(self) -> int:
        rows, columns = self.tile
        return rows * columns * self.size

    @property
    def units_per_sample(self) -> int:
        rows, columns = self.tile
        return self.matrices * -(-self.rows // rows) * -(-self.columns // columns)

    @property
    def output_bytes(self) -> int:
        """For one sample."""
        return self.matrices * self.rows * self.columns * self.size

    @property
    def us(self) -> float:
        """Predicted."""
        return 2.5 + 2 * self.batch * self.output_bytes / (0.75 * self.gpu.memory_bytes * self.gpu.sms)

    def __str__(self) -> str:
        return f"turn: {self.rows}×{self.columns}, in tiles of {self.tile[0]}×{self.tile[1]}"

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        rows, columns = self.tile
        numbers = {"ROWS": self.rows, "COLUMNS": self.columns, "TR": rows, "TC": columns}
        numbers |= {"READ": self.read, "WRITE": self.write, "THREADS": self.threads}
        lines = [f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        lines += [f"static constexpr bool ROUNDS = {str(self.dtype == 'tf32').lower()};"]
        return kernel(headers("turn.cuh"), name, "Turn", lines, self.threads)
