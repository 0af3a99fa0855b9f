"""Passes of four or five small square factors in float: what small_float.cuh is told, and what that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import timed
from factorlayer.kernels.work import OfWork, Work

SIZES = (4, 8)
MOST_THREADS, REGISTERS = 512, 128
START_US = 3.2
OTHER = 1.25  # instructions for each multiply-add
HIDDEN = 0.7  # of what takes less time, memory or instructions


@dataclass(frozen=True)
class Sizes:
    """Sizes p = q of five modes; of four, c is 1."""

    a: int
    b: int
    c: int
    d: int
    e: int

    @property
    def modes(self) -> list[int]:
        """Sizes of the modes that there are."""
        return [n for n in (self.a, self.b, self.c, self.d, self.e) if n > 1]

    @property
    def rows(self) -> int:
        """Rows in shared memory."""
        return self.a * self.b * self.c

    @property
    def columns(self) -> int:
        return self.c * self.d * self.e

    @property
    def size(self) -> int:
        return self.rows * self.d * self.e

    @property
    def weights(self) -> list[int]:
        """Elements of each mode's weight."""
        return [n * n for n in self.modes]

    @property
    def row_bytes(self) -> int:
        return 4 * (self.d * self.e + 4)

    @property
    def shared(self) -> int:
        """Bytes of the weights, both ways, and of a state."""
        return 8 * sum(self.weights) + self.rows * self.row_bytes

    def constants(self, first: int, units_per_sample: int, threads: int) -> list[str]:
        """A struct's first lines; `first` is the weight of a."""
        numbers = {"A": self.a, "B": self.b, "C": self.c, "D": self.d, "E": self.e, "FIRST": first}
        numbers |= {"UNITS_PER_SAMPLE": units_per_sample, "THREADS": threads}
        return constants(numbers)

    def __str__(self) -> str:
        return "·".join(map(str, self.modes))


def _sizes_in(work: Work) -> Sizes | None:
    """The sizes of a pass's modes; None where it has others than these passes, or something else to do."""
    if work.dtype != "float32" or work.rank > 1 or work.inner > 1 or len(work.steps) != len(work.sizes):
        return None
    modes = [mode for _, mode in sorted(work.steps)]
    square = all(len(mode.parts) == 1 and mode.p == mode.q and mode.p in SIZES for mode in modes)
    if not square or len(modes) not in (4, 5):
        return None
    a, b, *c, d, e = (mode.p for mode in modes)
    found = Sizes(a, b, math.prod(c), d, e)
    if found.rows != found.columns or found.columns % 32 or found.columns > MOST_THREADS:
        return None
    # A warp stores its rows' (a, b), one quarter of a row in each lane at a time.
    return found if 32 // found.c * (d * e // 4) % 32 == 0 else None


@dataclass(frozen=True)
class SmallFloat(OfWork):
    """A pass, tiled. `us` is the time predicted."""

    work: Work
    sizes: Sizes
    gpu: Gpu
    us: float = 0.0

    units_per_block = 1
    asks = ()

    @property
    def threads(self) -> int:
        return self.sizes.columns

    @kept
    def blocks_per_sm(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return min((self.gpu.shared + 1024) // (self.sizes.shared + 1024), 65536 // (self.threads * REGISTERS))

    @property
    def shared(self) -> int:
        return self.sizes.shared

    @property
    def output_bytes(self) -> int:
        return 4 * self.work.outer * self.sizes.size

    def us_of(self, batch: int) -> float:
        sizes, gpu, units = self.sizes, self.gpu, batch * self.work.outer
        rate = gpu.instructions * gpu.float_lanes / 128
        alone = OTHER * sum(sizes.modes) * sizes.size / 32 / rate
        busy = alone * max(1.0, 256 / (sizes.columns * min(self.blocks_per_sm, -(-units // gpu.sms))))  # few warps wait
        memory = 2 * 4 * sizes.size / (0.9 * gpu.memory_bytes)
        return START_US + -(-units // gpu.sms) * (max(busy, memory) + (1 - HIDDEN) * min(busy, memory))

    def __str__(self) -> str:
        return f"small float: {self.sizes}, {self.blocks_per_sm} blocks with {self.shared} bytes of shared memory"

    @property
    def blocks(self) -> int:
        return self.blocks_per_sm

    @property
    def told(self) -> list[str]:
        work = self.work
        first = dict(work.steps)[0].parts[0][0]
        return ["using Element = float;", *self.sizes.constants(first, work.outer, self.threads), *work.finish]


def tile(work: Work, batch: int, gpu: Gpu) -> SmallFloat | None:
    """None where this family has no kernel."""
    sizes = _sizes_in(work)
    if sizes is None or sizes.shared > gpu.shared:
        return None
    return timed(SmallFloat(work, sizes, gpu), batch)
