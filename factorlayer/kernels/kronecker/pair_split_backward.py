"""All gradients of two factors of 32 bits, up to 64 x 64, in one pass: pair_split_backward.cuh, where
Hopper's matrix unit multiplies bf16 pieces of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, quickest, ways
from factorlayer.kernels.work import Inputs, Mode

PIECES = {"float32": 3, "tf32": 2}
PRODUCTS = {3: 6, 2: 3}  # of pieces, that count
SLAB = 64 * 128  # bytes of a piece of a state
# Of waits, beside which the other groups' products are made; and what products have of the matrix unit's rate, by
# pieces, with operands that are split on their way: 64 x 64 took one H200 4.7 us of a round in tf32, and 7.3 in float.
UNIT_US = 1.1
RATES = {3: 0.23, 2: 0.18}


@dataclass(frozen=True)
class PairSplitBackward(ByWarpgroups):
    """A pass, tiled. `us` is the time predicted."""

    dtypes = tuple(PIECES)
    multiplied = "bfloat16"
    groups = 2
    copy_registers, registers = 104, 200  # of a thread, by what its warpgroup does

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def pieces(self) -> int:
        return PIECES[self.dtype]

    @property
    def shared(self) -> int:
        return BARRIER_BYTES + (2 + 3 * self.groups) * self.pieces * SLAB

    @property
    def details(self) -> str:
        return self.in_words(f"{self.contracted}, {self.groups} warpgroups, {self.pieces} pieces")

    @property
    def numbers(self) -> dict[str, int]:
        found = {"PIECES": self.pieces, "GROUPS": self.groups, "SINGLES": self.singles}
        return found | {"COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}

    def units_us(self, units: int) -> float:
        p0, p1, q0, q1 = self.rounded
        # The left operand is read as long as 32 columns are multiplied, the right one half as long as its own are.
        of_p1, of_q0, of_q1 = (max(n, 32 + n / 2) for n in (p1, q0, q1))
        count = 64 * ((q0 + p1) * of_q1 + q1 * of_q0 + (p0 + q1) * of_p1) * PRODUCTS[self.pieces]
        products = count / (RATES[self.pieces] * self.gpu.flops["bfloat16"])
        waits = (products + UNIT_US) * math.ceil(units / self.groups)
        return max(units * max(self.memory_us, products), waits)


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None, rank: int = 1
) -> tuple[PairSplitBackward, ...]:
    """The fastest by prediction, of all ways to take neighbours as two; none where this family has no kernel."""
    return quickest(ways(PairSplitBackward, modes, outer, dtype, batch, gpu, inputs, rank))
