"""A contraction whose groups have weights of their own: what untied.cuh is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.stages import INSTRUCTIONS, Layout, Stage, row_step
from factorlayer.kernels.work import round_up

OF_PICKED = 4  # instructions for a group's sums of a lane, of 16 x 8, of which it keeps its own
SERVED_TWICE = 2  # accesses to a weight whose rows are not padded


@dataclass(frozen=True)
class UntiedStage(Stage):
    """One with a weight for each of `outer` rows of a unit, and of `inner` columns. A warp tile is of 16 rows or 8
    columns, of whose groups a warp multiplies `share`. `tight` weights have no padding behind their rows, where that
    would be half of a row: banks then meet by twos."""

    outer: int
    share: int
    tight: bool = False

    @property
    def of_tile(self) -> int:
        """Groups of a warp tile: of its rows, or of its columns, of which a lane has two."""
        return min(self.outer, 16) if self.by_rows else min(round_up(self.inner, 2), 8)

    @property
    def shares(self) -> int:
        """Warps for a tile."""
        return -(-self.of_tile // self.share)

    @property
    def is_whole(self) -> bool:
        return self.shares == 1

    @property
    def groups(self) -> int:
        return self.outer * self.inner

    @property
    def tiles(self) -> int:
        return super().tiles * self.shares

    @property
    def weight_stride(self) -> int:
        return round_up(self.p, 8) if self.tight and gains(self.p, self.dtype) else row_step(self.p, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Of all groups, without padding between them."""
        last = round_up(self.q, 8 * self.nt if self.by_rows else 16 * self.mt)
        return ((self.groups - 1) * self.q + last) * self.weight_stride * ELEMENT_BYTES[self.dtype]

    @property
    def products(self) -> int:
        """Of 16 x 8, of a warp tile and a step."""
        return self.share * self.mt * self.nt

    @property
    def issued(self) -> float:
        """Instructions of a step for these and their operands: weights are read for each group."""
        of_a, of_b, of_product = INSTRUCTIONS[self.dtype]
        if self.by_rows:
            return of_a + self.products * (of_b + of_product)
        return self.nt * of_b + self.products * (of_a + of_product)

    def lies_evenly(self, following: Layout) -> bool:
        """Whether q's of a row lie in the next state at one distance from each other: not where that has only some of
        them in a row, of a rank above 1."""
        q = np.arange(self.q)
        row = np.arange(self.rows)[:, None] * self.q * self.inner
        places = following.at(row + q * self.inner) - following.at(row)
        return bool(np.all(places == q * places[0, min(1, self.q - 1)]))

    def read_us(self, gates: int, gpu: Gpu) -> float:
        """Microseconds in which shared memory gives a step's weights of some gates."""
        numbers = (8 if self.by_rows else 16) * round_up(self.p, 8) * self.products * self.tiles
        twice = SERVED_TWICE if self.tight and gains(self.p, self.dtype) else 1
        return gates * numbers * ELEMENT_BYTES[self.dtype] * twice / gpu.shared_bytes

    @property
    def words(self) -> str:
        return f"{self} by {self.groups} weights, {self.share} at once"


def gains(p: int, dtype: str) -> bool:
    """Whether padding is half as much as what is in a row."""
    return 2 * row_step(p, dtype) >= 3 * round_up(p, 8)
