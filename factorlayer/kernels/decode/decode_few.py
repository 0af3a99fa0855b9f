"""The few best of scores: what decode_few.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass

THREADS = 1024
HELD = 8  # scores that a thread keeps in registers
FEW, VOCABULARY = 8, 4096  # that times are predicted for


@dataclass(frozen=True)
class DecodeFew(Pass):
    """A pass: a block for each sample."""

    dtype: str
    gpu: Gpu

    threads = THREADS
    units_per_sample, units_per_block, blocks_per_sm = 1, 1, 0
    title, details = "decode few", "a block for each sample"

    @property
    def shared(self) -> int:
        """Of two places in turn, what warps have found."""
        return 2 * THREADS // 32 * 2 * max(4, self.size)

    def us_of(self, batch: int) -> float:
        rates, waves = self.gpu.rates, -(-batch // self.gpu.sms)
        read = rates.wait_us + VOCABULARY * self.size / rates.l2_bytes
        return rates.behind_us + waves * (read + FEW * (rates.sync_us + rates.wait_us))

    @property
    def us(self) -> float:
        return self.us_of(1)

    @property
    def told(self) -> list[str]:
        return constants({"Element": ELEMENT[self.dtype], "THREADS": THREADS, "HELD": HELD})


def tile(dtype: str, batch: int, gpu: Gpu) -> DecodeFew:
    return DecodeFew(dtype, gpu)
