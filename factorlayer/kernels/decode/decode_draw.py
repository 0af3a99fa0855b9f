"""Tokens that are drawn by scores: what decode_draw.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass

THREADS = 1024
VOCABULARY = 4096  # that times are predicted for


@dataclass(frozen=True)
class DecodeDraw(Pass):
    """A pass: a block for each sample. `placed`: scores are those of some tokens alone."""

    placed: bool
    dtype: str
    gpu: Gpu

    threads = THREADS
    units_per_sample, units_per_block, blocks_per_sm = 1, 1, 0
    title, details = "decode draw", "a block for each sample"

    @property
    def shared(self) -> int:
        return THREADS // 32 * 2 * max(4, self.size)

    def us_of(self, batch: int) -> float:
        rates, waves = self.gpu.rates, -(-batch // self.gpu.sms)
        return rates.behind_us + waves * (rates.wait_us + VOCABULARY * self.size / rates.l2_bytes)

    @property
    def us(self) -> float:
        return self.us_of(1)

    @property
    def told(self) -> list[str]:
        return constants({"Element": ELEMENT[self.dtype], "THREADS": THREADS, "PLACED": self.placed})


def tile(placed: bool, dtype: str, batch: int, gpu: Gpu) -> DecodeDraw:
    return DecodeDraw(placed, dtype, gpu)
