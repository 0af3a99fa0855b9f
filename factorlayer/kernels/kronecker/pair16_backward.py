"""All gradients of two factors of 16 bits, up to 64 x 64, in one pass: pair16_backward.cuh, Hopper's matrix
unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, ways
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Inputs, Mode

SLAB = 64 * 128  # bytes of a matrix, whatever its sizes are
MOST_SUMS = 112  # of a thread that multiplies, in 144 registers without spills
UNIT_US = 0.9  # of a group, from a unit's first product to its store


@dataclass(frozen=True)
class Pair16Backward(ByWarpgroups):
    """A pass, tiled. `us` is the time predicted."""

    dtypes = ("bfloat16", "float16")
    slots = 6
    ahead = 2  # units on their way from memory; more are slower

    @property
    def groups(self) -> int:
        """Warpgroups that multiply: two where three have no room for sums of units beside those of who copies."""
        _, p1, q0, q1 = self.rounded
        return 2 if self.bias and (p1 + q0) // 2 + q1 > MOST_SUMS else 3

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and maybe adds up what it has copied, and of one that multiplies."""
        return ((64, 144) if self.groups == 3 else (104, 200)) if self.bias else (32, 160)

    def with_bias(self, batch: int) -> Pair16Backward | None:
        """Sums of grad_y as well, of which a block has those of a sample: where that is one unit."""
        if self.units_per_sample > 1 or self.merged:
            return None
        both = replace(self, bias=True)
        return replace(both, us=both.us_of(batch))

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        return BARRIER_BYTES + (2 + 2 * self.slots + self.groups) * SLAB

    @property
    def details(self) -> str:
        return f"{self.contracted}, {self.groups} warpgroups, {self.slots} slots" + ", with the bias's" * self.bias

    @property
    def numbers(self) -> dict[str, int]:
        found = {"SLOTS": self.slots, "AHEAD": self.ahead, "GROUPS": self.groups, "SINGLES": self.singles}
        found |= dict(zip(("COPY_REGISTERS", "REGISTERS"), self.registers, strict=True))
        return found | {"BIAS": self.bias}

    def units_us(self, units: int) -> float:
        _, p1, q0, q1 = self.rounded
        products = 64 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * self.gpu.flops[self.dtype])
        return max(units * max(self.memory_us, products), UNIT_US * math.ceil(units / self.groups))


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> Pair16Backward | None:
    """The fastest by prediction, of all ways to take neighbours as two; None where this family has no kernel."""
    return fastest(ways(Pair16Backward, modes, outer, dtype, batch, gpu, inputs))
