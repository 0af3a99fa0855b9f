"""All gradients of two large factors of 16 bits in one pass: pair16_large_backward.cuh, Hopper's matrix unit."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, ways
from factorlayer.kernels.work import Inputs, Mode

STATE_BYTES = 128 * 128 * 2  # whatever the sizes are
UNIT_US = 1.3  # of waits and conversions, which nothing hides


@dataclass(frozen=True)
class Pair16LargeBackward(ByWarpgroups):
    """A pass, tiled. `us` is the time predicted."""

    dtypes = ("bfloat16", "float16")
    largest = 128
    slots = 2
    threads = 384
    shared = BARRIER_BYTES + (3 + 2 * slots) * STATE_BYTES

    @property
    def details(self) -> str:
        return self.in_words(self.contracted)

    @property
    def fits(self) -> bool:
        """Whether its kernel takes these sizes, and warps by themselves would need more products."""
        p0, _, _, q1 = self.sizes
        return super().fits and min(p0, q1) > self.largest // 2

    @property
    def numbers(self) -> dict[str, int]:
        return {"SLOTS": self.slots}

    def units_us(self, units: int) -> float:
        _, p1, q0, q1 = self.rounded
        products = 128 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * self.gpu.flops[self.dtype])
        return units * max(self.memory_us, products + UNIT_US)


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None, rank: int = 1
) -> tuple[Pair16LargeBackward, ...]:
    """None where this family has no kernel, or warps by themselves need no more products."""
    return next(ways(Pair16LargeBackward, modes, outer, dtype, batch, gpu, inputs, rank), ())
