"""Two factors at once, where samples are few: pair_few.cuh, its tiles and source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import MOST_FEW
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import TakesTwoModes, Work

SPANS, ROWS = (16, 32, 64), (128, 64, 32, 16)
START_US = 0.3  # weights and samples are asked for while the kernel before ends
CHUNK_US = 0.35  # of waits, for each chunk
ALONE_BYTES = 64 << 10  # of shared memory: blocks with more had better not share a multiprocessor
LONGER = 1.5  # than that a block takes: loads and products hide less of each other, and all blocks load at once


@dataclass(frozen=True)
class PairFew(TakesTwoModes):
    """A pass, tiled. `us` is the time predicted."""

    work: Work
    span: int  # columns of a block
    rows: int  # of a chunk
    slots: int
    warps: int
    gpu: Gpu
    us: float = 0.0

    units_per_block = 1
    blocks_per_sm = 0  # as many as there is work

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def split(self) -> int:
        """Strips of a unit."""
        return self.sizes[3] // self.span

    @property
    def chunks(self) -> int:
        p0, _, q0, _ = self.sizes
        return (p0 + q0) // self.rows

    @kept
    def tiles(self) -> tuple[int, int]:
        """Tiles of 16 rows and of 8 columns that a warp makes at once."""
        rows, columns = self.rows // 16, self.span // 8
        high = 2 if rows % 2 == 0 and rows * columns >= 8 * self.warps else 1
        wide = (n for n in (8, 4, 2, 1) if n * high <= 8 and columns % n == 0)
        return high, next((n for n in wide if rows // high * (columns // n) >= self.warps), 1)

    @kept
    def shared(self) -> int:
        """Bytes that it needs, or so many that early blocks, which go where there is room, do not gather."""
        p0, p1, q0, _ = self.sizes
        padding = 8 if self.size == 2 else 4
        chunks = self.slots * self.rows * (max(p0, p1) + padding)
        staged = self.warps * 16 * (64 + 8) if self.size == 2 else 0
        rows = p0 + (q0 if self.work.bias else 0)  # of T, and of a bias
        used = (self.span * (p1 + padding) + rows * (self.span + padding) + chunks + staged) * self.size
        return max(used, self.gpu.shared // 32 * 16 + 16) if used > ALONE_BYTES else used

    def us_of(self, batch: int) -> float:
        """Predicted microseconds."""
        p0, p1, q0, _ = self.sizes
        gpu, dtype = self.gpu, self.work.dtype
        load = (p0 * (p1 + q0) + self.span * (p1 + q0 * self.work.bias)) * self.size / gpu.l2_bytes
        products = self.span * p0 * (p1 + q0)
        # One warp for each quarter of a multiprocessor cannot keep its matrix unit busy with doubles.
        rate = {2: 0.55, 4: 1.0, 8: min(1.0, self.warps / 8)}[self.size] * gpu.flops[dtype]
        multiply = 2 * products / rate
        high, wide = self.tiles
        read = products * (1 / (16 * high) + 1 / (8 * wide)) * self.size / gpu.shared_bytes
        busy = max(multiply, read) + CHUNK_US * self.chunks
        block = max(load, busy) + min(load, busy) / self.chunks
        return START_US + LONGER * block * math.ceil(batch * self.units_per_sample * self.split / gpu.sms)

    @property
    def details(self) -> str:
        strips = f"{self.split} strips, chunks of {self.rows} rows"
        return f"{self.contracted}, {strips}, {self.slots} slots, {self.warps} warps"

    @property
    def told(self) -> list[str]:
        work = self.work
        numbers = {f"FACTOR_{x}": mode.parts[0][0] for (_, mode), x in zip(work.steps, "BA", strict=True)}
        numbers |= {"UNITS_PER_SAMPLE": work.outer, "SPAN": self.span, "ROWS": self.rows}
        numbers |= {"SLOTS": self.slots, "WARPS": self.warps}
        return kinds(work.dtype) + work.finish + constants(self.told_sizes | numbers)


def tile(work: Work, batch: int, gpu: Gpu) -> PairFew | None:
    """The fastest by prediction; None where this family has no kernel."""
    if work.rank > 1 or work.inner > 1 or [at for at, _ in work.steps] != [1, 0] or batch > MOST_FEW:
        return None
    return fastest(tilings(work, gpu), batch)


def tilings(work: Work, gpu: Gpu) -> Iterator[PairFew]:
    first, second = (mode for _, mode in reversed(work.steps))
    if any(len(mode.parts) > 1 or mode.p % 16 or mode.q % 16 for mode in (first, second)):
        return
    for span, rows, warps in itertools.product(SPANS, ROWS, (4, 8)):
        if second.q % span or first.p % rows or first.q % rows:
            continue
        for slots in range((first.p + first.q) // rows, 1, -1):
            plan = PairFew(work, span, rows, slots, warps, gpu)
            if plan.shared <= gpu.shared:
                yield plan
