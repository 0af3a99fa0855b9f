"""A state as the blocks of a cluster share it out, by rows or by columns: how it lies in their shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.gpu import ELEMENT_BYTES
from factorlayer.kernels.stages import row_step
from factorlayer.kernels.work import round_up
from factorlayer.maths.recurrence import GATES


@dataclass(frozen=True)
class Side:
    """A state as blocks have it that share out one of its modes: sides.cuh."""

    whole: int  # of the mode that each has whole
    other: int
    cluster: int
    units: int
    by_rows: bool
    nt: int
    dtype: str

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def real(self) -> int:
        """Bytes of a number that is not rounded."""
        return max(4, self.size)

    @property
    def own(self) -> int:
        """An even number: pairs are handed on."""
        return round_up(-(-self.other // self.cluster), 2)

    @property
    def columns(self) -> int:
        """With those that warps have beyond the last one."""
        return round_up(self.units * round_up(self.own, 8), 8 * self.nt)

    @property
    def tiles(self) -> int:
        return -(-self.whole // 16) * (self.columns // (8 * self.nt))

    @property
    def weight_bytes(self) -> int:
        return round_up(GATES * round_up(self.whole, 16) * row_step(self.whole, self.dtype) * self.size, 128)

    @property
    def state_step(self) -> int:
        return self.columns + 4 if self.size == 8 else _odd(self.columns, 8)

    @property
    def state_bytes(self) -> int:
        return round_up(round_up(self.whole, 8) * self.state_step * self.size, 128)

    @property
    def gathered_bytes(self) -> int:
        return round_up(self.columns * round_up(self.whole, 8) * self.size, 128)

    @property
    def kept_bytes(self) -> int:
        return round_up(self.columns * round_up(self.whole, 8) * self.real, 128)

    @property
    def stream_row(self) -> int:
        """Elements from a line that lies together in memory to the next, each of whole pieces."""
        line, step = (self.whole, self.whole) if self.by_rows else (self.own, self.other)
        piece = math.gcd(16, line * self.size, step * self.size)
        if self.size > 2 and not self.by_rows:
            return line  # padding would save few conflicts
        return _odd(line * self.size, piece) // self.size

    @property
    def stream_bytes(self) -> int:
        lines = self.own if self.by_rows else self.whole
        return round_up(self.units * lines * self.stream_row * self.size, 128)

    @property
    def is_odd(self) -> bool:
        return bool(self.whole % 16 or self.own % 8 or self.other % self.own or self.columns > self.units * self.own)

    @property
    def held_registers(self) -> int:
        """Registers of the weights, if they stay there."""
        return GATES * 4 * -(-self.whole // (16 if self.size == 2 else 8))


def _odd(n: int, of: int) -> int:
    """The next odd multiple."""
    n = round_up(n, of)
    return n if n // of % 2 else n + of
