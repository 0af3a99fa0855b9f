"""All gradients of two large factors in double, A's by one kernel, B's and x's by another:
pair_double_backward.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.kronecker.pair_double import (
    BARRIER_BYTES,
    DEPTH,
    LARGEST,
    LEAST,
    LEAST_SLOTS,
    REGISTERS,
)
from factorlayer.kernels.passes import timed
from factorlayer.kernels.work import Mode, OfTwoModes, round_up

MOST_SLOTS = 6
START_US = 5.2  # first chunks, last sums
CHUNK_US = 0.12  # of waits: of 11 layers of 48² to 128² on an H200, 10 are within a fifth of what is predicted so
PART_US = 0.3  # of what no product hides: a part of the middle state put down


@dataclass(frozen=True)
class PairDoubleBackward(OfTwoModes, BlockSums):
    """A pass of the two. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    units_per_sample: int
    returns: bool  # B's and x's
    gpu: Gpu
    us: float = 0.0

    dtype = "float64"
    threads = 384
    asks = ()  # chunks go by one after another

    @property
    def writes(self) -> str:
        return "y" if self.returns else "s2"

    @property
    def output_bytes(self) -> int:
        return super().output_bytes if self.returns else 0

    @property
    def leaves(self) -> str:
        return "" if self.returns else "sums"

    @property
    def takes_sums(self) -> int:
        """Sums of each block that the other pass has left."""
        p0, _, q0, _ = self.sizes
        return p0 * q0 if self.returns else 0

    def is_others(self, missing: int, padding: int) -> bool:
        p0, p1, q0, q1 = self.sizes
        others = 2 * SUM_BYTES[self.dtype] * (q0 * p0 if self.returns else q1 * p1)  # of two blocks
        return 0 <= missing - others < 16  # and what lies between tensors

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows of the middle state, what makes it, its columns, and those of the weight's gradient."""
        p0, p1, q0, q1 = self.sizes
        return (q1, q0, p0, p1) if self.returns else (p0, p1, q1, q0)

    @property
    def parts(self) -> int:
        """Parts of the middle state's columns."""
        return -(-self.shape[2] // 64)

    @property
    def part(self) -> int:
        """Columns of a part."""
        return round_up(-(-self.shape[2] // self.parts), DEPTH)

    @property
    def _slot_bytes(self) -> int:
        m, _, _, n = (round_up(count, unit) for count, unit in zip(self.shape, (64, 1, 1, 16), strict=True))
        if self.returns:
            return 8 * DEPTH * max(m + 4 + self.part + 4, n + 4)
        return 8 * (DEPTH + 4) * max(m + self.part, n)

    @property
    def _rest_bytes(self) -> int:
        """Bytes of shared memory beside the slots: a part of the middle state, and barriers."""
        return 8 * round_up(self.shape[0], 64) * (self.part + 4) + BARRIER_BYTES

    @property
    def slots(self) -> int:
        """Slots for chunks: as many as there is room for."""
        return min(MOST_SLOTS, (self.gpu.shared - self._rest_bytes) // self._slot_bytes)

    @property
    def shared(self) -> int:
        return self._rest_bytes + self.slots * self._slot_bytes

    def us_of(self, batch: int) -> float:
        m, k, _, n2 = self.shape
        m, k, n2, part = round_up(m, 64), round_up(k, DEPTH), round_up(n2, 16), self.part
        products = 2 * part * (m * k + m * n2) + (2 * 64 * m * n2 if self.returns else 0)
        chunks = (k + part + (m if self.returns else 0)) / DEPTH
        alone = self.parts * (products / self.gpu.flops["float64"] + chunks * CHUNK_US + PART_US)
        p0, p1, q0, q1 = self.sizes
        memory = 8 * ((2 if self.returns else 1) * p0 * p1 + q0 * q1) / (0.9 * self.gpu.memory_bytes)
        ends = self.weights * SUM_BYTES[self.dtype] / self.gpu.l2_bytes / 2
        return START_US + math.ceil(batch * self.units_per_sample / self.gpu.sms) * max(alone, memory) + ends

    @property
    def details(self) -> str:
        made = "the last weight's and x’s" if self.returns else "the first weight's"
        return f"{self.contracted}, {made}, {self.slots} slots"

    @property
    def told(self) -> list[str]:
        numbers = {"UNITS_PER_SAMPLE": self.units_per_sample, "SLOTS": self.slots, "RETURNS": self.returns}
        numbers |= {"REGISTERS": REGISTERS[0], "COPY_REGISTERS": REGISTERS[1], "GRAD": len(self.modes)}
        numbers |= {f"FACTOR_{x}": mode.parts[0][0] for x, mode in zip("AB", self.modes, strict=True)}
        return kinds(self.dtype) + constants(self.told_sizes | numbers)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> tuple[PairDoubleBackward, ...]:
    """Both passes; none where this family has no kernels."""
    if not gpu.moves_registers or dtype != "float64" or len(modes) != 2 or any(len(mode.parts) > 1 for mode in modes):
        return ()
    first, last = modes
    both = [PairDoubleBackward((first, last), outer, returns, gpu) for returns in (False, True)]
    if min(both[0].sizes) < LEAST or max(both[0].sizes) > LARGEST or min(plan.slots for plan in both) < LEAST_SLOTS:
        return ()
    return tuple(timed(plan, batch) for plan in both)
