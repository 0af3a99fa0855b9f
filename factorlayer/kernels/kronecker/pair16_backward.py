"""All gradients of two factors of 16 bits, up to 64 x 64, in one pass: pair16_backward.cuh, Hopper's matrix
unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, ways
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Inputs, Mode, round_up

SLAB = 64 * 128  # bytes of a matrix, whatever its sizes are
UNIT_US = 0.9  # of a group, from a unit's first product to its store


@dataclass(frozen=True)
class Pair16Backward(ByWarpgroups):
    """A pass, tiled. `us` is the time predicted."""

    dtypes = ("bfloat16", "float16")
    groups = 3
    slots = 6
    ahead = 2  # units on their way from memory; more are slower
    copy_registers, registers = 32, 160  # of a thread, by what its warpgroup does

    def with_bias(self) -> Pair16Backward | None:
        """Sums of grad_y as well, of which a block has those of a sample: where that is one unit."""
        return replace(self, bias=True) if self.units_per_sample == 1 and not self.merged else None

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        _, _, q0, q1 = self.sizes
        sums = self.bias * round_up(q0 * q1, 8 * 128) * SUM_BYTES[self.dtype]  # whole pieces of who copies
        return BARRIER_BYTES + (2 + 2 * self.slots + self.groups) * SLAB + sums

    @property
    def details(self) -> str:
        return f"{self.contracted}, {self.groups} warpgroups, {self.slots} slots" + ", with the bias's" * self.bias

    @property
    def numbers(self) -> dict[str, int]:
        found = {"SLOTS": self.slots, "AHEAD": self.ahead, "GROUPS": self.groups, "SINGLES": self.singles}
        found |= {"COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}
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
