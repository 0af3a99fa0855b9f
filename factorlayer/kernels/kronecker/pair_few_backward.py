"""All gradients of two factors at once, where samples are few: pair_few_backward.cuh, its tiles and source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import MOST_FEW, most_of_class
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Inputs, Mode, OfTwoModes, told_inputs

LARGEST = 128  # whose sums the warps of a block can hold
MOST_BYTES = 64 << 20  # of all blocks' sums: a part of a longer chain has many units for each sample
SPANS, WIDTHS = (16, 32, 64), (64, 32, 16)
START_US = 1.7  # with the first chunk on its way
CHUNK_US = 0.5  # of waits, for each chunk
REGISTERS = {8: 100, 4: 90, 2: 80}  # beside the sums, by bytes of an element


@dataclass(frozen=True)
class PairFewBackward(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    span: int  # rows of a block
    width: int  # of a chunk
    slots: int
    batch: int
    gpu: Gpu
    us: float = 0.0
    inputs: Inputs | None = None

    warps = 8  # two for each quarter of a multiprocessor: with one, doubles take 14 % longer, others the same
    blocks_per_sm = 0  # as many as there is work

    @property
    def split(self) -> int:
        """Strips of a unit."""
        return self.sizes[0] // self.span

    @property
    def folds(self) -> int:
        return self.split

    @property
    def singles(self) -> int:
        """Sums of the first weight's gradient, of which a strip has columns of its own."""
        p0, _, q0, _ = self.sizes
        return p0 * q0

    @property
    def most(self) -> int:
        """Units at most, each with sums of its own."""
        return most_of_class(self.batch) * self.units_per_sample

    @property
    def unit_sums(self) -> int:
        return self.singles + self.split * (self.weights - self.singles)

    @property
    def part_bytes(self) -> int:
        return self.most * self.unit_sums * SUM_BYTES[self.dtype]

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @kept
    def shared(self) -> int:
        _, p1, q0, _ = self.sizes
        padding = 8 if self.size == 2 else 4
        x, a, t = (n + padding for n in (p1, self.span, self.width))
        chunks = self.slots * (self.width * x + q0 * t)
        staged = self.warps * 16 * (64 + padding) if self.size == 2 else 0
        return (self.span * (x + 2 * t) + q0 * a + max(chunks, staged)) * self.size

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        _, p1, q0, _ = self.sizes
        return self.span * (p1 + q0) // self.threads * max(1, self.size // 4) + REGISTERS[self.size]

    @property
    def fits(self) -> bool:
        return self.shared <= self.gpu.shared and self.registers <= 65536 // self.threads

    def us_of(self, batch: int) -> float:
        """Predicted microseconds."""
        _, p1, q0, q1 = self.sizes
        chunks, gpu = q1 // self.width, self.gpu
        load = (q1 + self.span) * (p1 + q0) * self.size / gpu.l2_bytes
        products = self.span * q1 * (3 * p1 + 2 * q0)
        multiply = 2 * products / ((0.55 if self.size == 2 else 1.0) * gpu.flops[self.dtype])
        read = products / 16 * (1 + 16 / self.span) * self.size / gpu.shared_bytes
        sums = 2 * self.unit_sums * SUM_BYTES[self.dtype] / gpu.l2_bytes / self.split
        busy = max(multiply, read) + CHUNK_US * chunks
        block = max(load, busy) + min(load, busy) / chunks + sums
        return START_US + block * math.ceil(batch * self.units_per_sample * self.split / gpu.sms)

    @property
    def details(self) -> str:
        strips = f"{self.split} strips, chunks of {self.width}"
        return f"{self.contracted}, {strips}, {self.slots} slots, {self.warps} warps"

    @property
    def told(self) -> list[str]:
        numbers = {"SPAN": self.span, "WIDTH": self.width, "SLOTS": self.slots, "WARPS": self.warps, "GRAD": 2}
        return kinds(self.dtype) + constants({**told_inputs(self.inputs), **self.told_sizes, **numbers})


def takes(modes: tuple[Mode, ...], dtype: str, batch: int, inputs: Inputs | None) -> bool:
    """Whether these are two factors, of whole sixteens, and few samples."""
    sizes = [n for mode in modes for n in (mode.p, mode.q)]
    both = len(modes) == 2 and all(len(mode.parts) == 1 for mode in modes)
    whole = not any(n % 16 for n in sizes) and max(sizes) <= LARGEST
    return both and whole and batch <= MOST_FEW and (inputs is None or inputs.are_pieces(ELEMENT_BYTES[dtype]))


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> PairFewBackward | None:
    """The fastest by prediction; None where this family has no kernel. `outer` is the size of what lies before them."""
    if not takes(modes, dtype, batch, inputs):
        return None
    plans = tilings((modes[0], modes[1]), outer, dtype, batch, gpu, inputs)
    return fastest((plan for plan in plans if plan.part_bytes <= MOST_BYTES), batch)


def tilings(
    modes: tuple[Mode, Mode], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> Iterator[PairFewBackward]:
    for span, width in itertools.product(SPANS, WIDTHS):
        chunks = modes[1].q // width
        if modes[0].p % span or modes[1].q % width:
            continue
        for slots in range(chunks, 1, -1):
            plan = PairFewBackward(modes, dtype, outer, span, width, slots, batch, gpu, inputs=inputs)
            if plan.fits:
                yield plan
