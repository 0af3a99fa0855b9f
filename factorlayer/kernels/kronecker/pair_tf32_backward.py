"""All gradients of two large factors in tf32 in one pass: pair_tf32_backward.cuh, where Hopper's matrix unit
multiplies scaled f16."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, ways
from factorlayer.kernels.work import Mode

STATE_BYTES = 128 * 128 * 2  # whatever the sizes are
UNIT_US = 5.0  # of waits and conversions, which nothing hides


@dataclass(frozen=True)
class PairTf32Backward(ByWarpgroups):
    """A pass, tiled. `us` is the time predicted."""

    dtypes = ("tf32",)
    largest = 128
    multiplied = "float16"
    start_us = 5.0
    threads = 384
    shared = BARRIER_BYTES + 7 * STATE_BYTES  # two on their way

    @property
    def details(self) -> str:
        return self.contracted

    @property
    def fits(self) -> bool:
        p0, _, _, q1 = self.sizes
        return super().fits and max(p0, q1) > self.largest // 2

    @property
    def widths(self) -> set[int]:
        _, p1, _, q1 = self.rounded
        return {64, p1, q1}

    def units_us(self, units: int) -> float:
        _, p1, q0, q1 = self.rounded
        products = 128 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * self.gpu.flops["float16"])
        return units * max(self.memory_us, products + UNIT_US)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> tuple[PairTf32Backward, ...]:
    """None where this family has no kernel."""
    return next(ways(PairTf32Backward, modes, outer, dtype, batch, gpu), ())
