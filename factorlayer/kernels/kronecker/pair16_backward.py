"""All gradients of two factors of 16 bits, up to 64 x 64, in one pass: pair16_backward.cuh, Hopper's matrix
unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, ByWarpgroups, quickest, ways
from factorlayer.kernels.passes import timed
from factorlayer.kernels.work import Inputs, Mode

SLAB = 64 * 128  # bytes of a matrix, whatever its sizes are
MOST_SUMS = 112  # of a thread that multiplies, in 144 registers without spills
UNIT_US = 0.9  # of a group, from a unit's first product to its store
# Of a group and unit for each term of a sum, in which it multiplies nothing, and what products have of the matrix
# unit's rate: fitted to nine sums of two to eight terms on one H200, of 0.8 to 1.4 us for a term and round.
TERM_US, TERMS_RATE = 0.45, 0.87
REGISTERS = {3: 160, 2: 232}  # of a thread that multiplies, by warpgroups that do
OF_PLACES = 20  # registers that no sum and no operand is in
MOST_TERMS = 4  # that shared memory has room for, with the slots


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
        if self.terms.count > 1:
            return 3 if self._needed(self.terms.count) <= REGISTERS[3] else 2
        return 2 if self.bias and (p1 + q0) // 2 + q1 > MOST_SUMS else 3

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and maybe adds up what it has copied, and of one that multiplies."""
        if self.bias:
            return (64, 144) if self.groups == 3 else (104, 200)
        return 32, REGISTERS[self.groups]

    def _needed(self, terms: int) -> int:
        """Registers of a thread that multiplies: sums of weights' gradients for each of so many terms, those of dX, of
        T or dT, and T as an operand."""
        _, p1, q0, q1 = self.rounded
        return terms * (q0 + p1) // 2 + p1 // 2 + q1 // 2 + q1 // 4 + OF_PLACES

    @property
    def most_terms(self) -> int:
        return max(n for n in range(1, MOST_TERMS + 1) if n == 1 or self._needed(n) <= REGISTERS[2])

    def with_bias(self, batch: int) -> Pair16Backward | None:
        """Sums of grad_y as well, of which a block has those of a sample: where that is one unit."""
        if self.units_per_sample > 1 or self.merged or self.rank > 1:
            return None
        both = replace(self, bias=True)
        return timed(both, batch)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        slot = 2 + (self.terms.first > 0)
        return BARRIER_BYTES + (2 * self.terms.count + slot * self.slots + self.groups) * SLAB

    @property
    def details(self) -> str:
        details = f"{self.contracted}, {self.groups} warpgroups, {self.slots} slots"
        return self.in_words(details) + ", with the bias's" * self.bias

    @property
    def numbers(self) -> dict[str, int]:
        found = {"SLOTS": self.slots, "AHEAD": self.ahead, "GROUPS": self.groups, "SINGLES": self.singles}
        found |= dict(zip(("COPY_REGISTERS", "REGISTERS"), self.registers, strict=True))
        return found | {"BIAS": self.bias}

    def units_us(self, units: int) -> float:
        p0, p1, q0, q1 = self.rounded
        rounds, memory = math.ceil(units / self.groups), units * self.memory_us
        if self.terms.count > 1:
            products = 2 * 64 * (p0 * p1 + 2 * p1 * q1 + 2 * q0 * q1) / (TERMS_RATE * self.gpu.flops[self.dtype])
            return max(memory, self.terms.count * (units * products + TERM_US * rounds))
        products = 64 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * self.gpu.flops[self.dtype])
        return max(memory, units * products, UNIT_US * rounds)


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None, rank: int = 1
) -> tuple[Pair16Backward, ...]:
    """The fastest by prediction, of all ways to take neighbours as two; none where this family has no kernel."""
    return quickest(ways(Pair16Backward, modes, outer, dtype, batch, gpu, inputs, rank))
