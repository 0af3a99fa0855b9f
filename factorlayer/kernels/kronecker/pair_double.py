"""Passes of two large modes in double, their weights streamed: what pair_double.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import timed
from factorlayer.kernels.work import TakesTwoModes, Work, round_up

DEPTH = 16  # k's of a chunk
MOST_SLOTS, LEAST_SLOTS = 4, 3
LEAST, LARGEST = 24, 128  # of a size: two tiles of 16 rows of four warps
START_US = 8.2  # first X, first weights, last Y
CHUNK_US = 0.22  # of waits: of 11 layers of 64² to 128² times on an H100 are 0.93 to 1.08 of those predicted
UNIT_US = 0.3  # of what no product hides: T put down, Y stored
REGISTERS = 232, 40  # of threads who multiply, and who copy
BARRIER_BYTES = 128


@dataclass(frozen=True)
class PairDouble(TakesTwoModes):
    """A pass. `us` is the time predicted."""

    work: Work
    gpu: Gpu
    us: float = 0.0

    threads = 384
    units_per_block = 1

    @property
    def chunks(self) -> int:
        p0, p1, _, _ = self.sizes
        return -(-p0 // DEPTH) - (-p1 // DEPTH)

    @property
    def _rest_bytes(self) -> int:
        """Bytes of shared memory beside the slots: a state, T's last rows and barriers."""
        p0, p1, _, q1 = self.sizes
        row = 8 * (round_up(max(p1, q1), 16) + 4)
        return (round_up(p0, 64) + DEPTH) * row + BARRIER_BYTES

    @property
    def _slot_bytes(self) -> int:
        _, _, q0, q1 = self.sizes
        return 8 * (DEPTH + 4) * max(round_up(q0, 64), round_up(q1, 16))

    @property
    def slots(self) -> int:
        """Slots for chunks: as many as there is room for."""
        return min(MOST_SLOTS, (self.gpu.shared - self._rest_bytes) // self._slot_bytes)

    @property
    def shared(self) -> int:
        return self._rest_bytes + self.slots * self._slot_bytes

    def us_of(self, batch: int) -> float:
        p0, p1, q0, q1 = self.sizes
        rows, columns = (round_up(n, 64) for n in (p0, q0)), round_up(q1, 16)
        products = sum(2 * m * columns * k for m, k in zip(rows, (p1, p0), strict=True)) / self.gpu.flops["float64"]
        memory = 8 * (p0 * p1 + q0 * q1) / (0.9 * self.gpu.memory_bytes)
        alone = max(products + self.chunks * CHUNK_US + UNIT_US, memory)
        return START_US + -(-batch * self.work.outer // self.gpu.sms) * alone

    @property
    def details(self) -> str:
        return f"{self.contracted}, weights streamed, {self.slots} slots"

    @property
    def told(self) -> list[str]:
        work, modes = self.work, dict(self.work.steps)
        numbers = {"UNITS_PER_SAMPLE": work.outer, "SLOTS": self.slots}
        numbers |= {"REGISTERS": REGISTERS[0], "COPY_REGISTERS": REGISTERS[1]}
        numbers |= {"FACTOR_A": modes[0].parts[0][0], "FACTOR_B": modes[1].parts[0][0]}
        return kinds(work.dtype) + work.finish + constants(self.told_sizes | numbers)


def tile(work: Work, batch: int, gpu: Gpu) -> PairDouble | None:
    """None where this family has no kernel."""
    if not gpu.moves_registers or work.dtype != "float64" or work.rank > 1 or work.inner > 1:
        return None
    if not len(work.steps) == len(work.sizes) == 2 or any(len(mode.parts) > 1 for _, mode in work.steps):
        return None
    plan = PairDouble(work, gpu)
    if min(plan.sizes) < LEAST or max(plan.sizes) > LARGEST or plan.slots < LEAST_SLOTS:
        return None
    return timed(plan, batch)
