"""All gradients of two factors in one pass by Hopper's matrix unit: pair16_backward.cuh, pair16_large_backward.cuh,
pair_split_backward.cuh and pair_tf32_backward.cuh, which differ in how numbers are multiplied, and in how large factors
may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from factorlayer.device.code import ELEMENT, Asks, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.passes import timed
from factorlayer.kernels.weights import can_be_made, told_weights
from factorlayer.kernels.work import ONE_PRODUCT, Inputs, Mode, OfTwoModes, Terms, as_two, round_up, told_inputs

LEAST = 24  # of a size that fills the matrix unit
BARRIER_BYTES = 1024
SLAB = 64 * 128  # bytes of a matrix of up to 64 x 64, or of a piece of one, whatever its sizes are
LARGE_BYTES = 128 * 128 * 2  # of one of up to 128 x 128

# Of 16 bits, up to 64 x 64
MOST_SUMS = 112  # of a thread that multiplies, in 144 registers without spills
UNIT_US = 0.9  # of a group, from a unit's first product to its store
# Of a group and unit for each term of a sum, in which it multiplies nothing, and what products have of the matrix
# unit's rate: fitted to nine sums of two to eight terms on one H200, of 0.8 to 1.4 us for a term and round.
TERM_US, TERMS_RATE = 0.45, 0.87
REGISTERS = {3: 160, 2: 232}  # of a thread that multiplies, by warpgroups that do
OF_PLACES = 20  # registers that no sum and no operand is in
MOST_TERMS = 4  # that shared memory has room for, with the slots

# Of 32 bits, up to 64 x 64: bf16 pieces of a float, and products of these, that count
PIECES = {"float32": 3, "tf32": 2}
PRODUCTS = {3: 6, 2: 3}
# Of waits, beside which the other groups' products are made; and what products have of the matrix unit's rate, by
# pieces, with operands that are split on their way: 64 x 64 took one H200 4.7 us of a round in tf32, and 7.3 in float.
SPLIT_US = 1.1
RATES = {3: 0.23, 2: 0.18}


@dataclass(frozen=True)
class ByWarpgroups(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0
    inputs: Inputs | None = None
    singles: int = 0  # sums of each block that a pass before has made, and grad_y, where this one's result will lie
    bias: bool = False  # whether sums of grad_y are made as well, behind those of weights
    terms: Terms = ONE_PRODUCT  # where they are not a sum's first ones, their gradient of x is added to what is there

    dtypes: ClassVar[tuple[str, ...]] = ()
    largest: ClassVar[int] = 64  # of a size
    takes_several: ClassVar[bool] = True  # whether x may be several tensors, and products a sum
    multiplied: ClassVar[str] = ""  # what is multiplied, if not the dtype itself
    start_us: ClassVar[float] = 4.0  # with the weights and the first unit on their way
    groups = 2  # warpgroups that multiply; one more copies

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def weights(self) -> int:
        _, _, q0, q1 = self.sizes
        return self.singles + self.rank * super().weights + self.bias * q0 * q1

    @property
    def rank(self) -> int:
        return self.terms.of

    @property
    def most_terms(self) -> int:
        """Terms of a sum that a pass may take."""
        return 1

    @property
    def leaves(self) -> str:
        return "begun" if self.terms.first + self.terms.count < self.rank else ""

    def is_others(self, missing: int, padding: int) -> bool:
        others = self.singles + (self.rank - self.terms.count) * super().weights
        return not padding and missing == self.most * others * SUM_BYTES[self.dtype]

    @property
    def rounded(self) -> tuple[int, int, int, int]:
        """The sizes in whole steps of products."""
        p0, p1, q0, q1 = (round_up(n, 16) for n in self.sizes)
        return p0, p1, q0, q1

    @property
    def widths(self) -> set[int]:
        """Widths of products."""
        return set(self.rounded[1:])

    def in_words(self, details: str) -> str:
        """With the terms of a sum."""
        return f"{details}, {self.terms}" if str(self.terms) else details

    @property
    def numbers(self) -> dict[str, int]:
        """Numbers that its kernel is told beside sizes."""
        return {}

    @property
    def fits(self) -> bool:
        """Whether its kernel takes these sizes: rows of whole pieces of 16 bytes."""
        _, p1, _, q1 = self.sizes
        inside = min(self.sizes) >= LEAST and max(self.sizes) <= self.largest and self.shared <= self.gpu.shared
        pieces = p1 * self.size % 16 == 0 and q1 * self.size % 16 == 0
        pieces = pieces and (self.inputs is None or self.inputs.are_pieces(self.size))
        return inside and pieces and all(can_be_made(mode, self.dtype, self.terms) for mode in self.modes)

    @property
    def products(self) -> str:
        return wgmma(self.multiplied or self.dtype, self.widths, turned=True)

    @property
    def asks(self) -> Asks:
        return () if self.singles else super().asks

    @property
    def told(self) -> list[str]:
        numbers = {"UNITS_PER_SAMPLE": self.units_per_sample, "GRAD": sum(len(mode.parts) for mode in self.modes)}
        lines = constants(
            {"Element": ELEMENT[self.dtype], **told_inputs(self.inputs), **self.told_sizes, **self.numbers, **numbers}
        )
        return lines + told_weights(self.modes, "ab", self.dtype, self.terms)

    @property
    def memory_us(self) -> float:
        """Microseconds that memory takes for a unit."""
        p0, p1, q0, q1 = self.sizes
        adds = self.terms.first > 0
        return ((2 + adds) * p0 * p1 + q0 * q1) * self.size / (0.9 * self.gpu.memory_bytes)

    def us_of(self, batch: int) -> float:
        """Predicted microseconds: of units, with the start and what blocks write in the end."""
        units = math.ceil(batch * self.units_per_sample / self.gpu.sms)
        ends = self.weights * SUM_BYTES[self.dtype] / self.gpu.l2_bytes * self.terms.count / self.rank
        return self.start_us + self.units_us(units) + ends

    def units_us(self, units: int) -> float:
        """Microseconds of so many units of a block."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pair16Backward(ByWarpgroups):
    """Of 16 bits, up to 64 x 64."""

    header = "pair16_backward"
    dtypes = ("bfloat16", "float16")
    slots = 6
    ahead = 2  # units on their way from memory; more are slower

    @property
    def groups(self) -> int:  # type: ignore[override]
        """Two where three have no room for sums of units beside those of who copies."""
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
        return timed(replace(self, bias=True), batch)

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


@dataclass(frozen=True)
class Pair16LargeBackward(ByWarpgroups):
    """Of 16 bits, where warpgroups with units of their own would need more products."""

    header = "pair16_large_backward"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    largest = 128
    slots = 2
    unit_us: ClassVar[float] = 1.3  # of waits and conversions, which nothing hides
    shared = BARRIER_BYTES + (3 + 2 * slots) * LARGE_BYTES

    @property
    def details(self) -> str:
        return self.in_words(self.contracted)

    @property
    def shared_rows(self) -> int:
        """Rows of a unit that two warpgroups share."""
        p0, _, _, q1 = self.sizes
        return min(p0, q1)

    @property
    def fits(self) -> bool:
        return super().fits and self.shared_rows > self.largest // 2

    @property
    def numbers(self) -> dict[str, int]:
        return {"SLOTS": self.slots}

    def units_us(self, units: int) -> float:
        _, p1, q0, q1 = self.rounded
        products = 128 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * self.gpu.flops[self.multiplied or self.dtype])
        return units * max(self.memory_us, products + self.unit_us)


@dataclass(frozen=True)
class PairSplitBackward(ByWarpgroups):
    """Of 32 bits, up to 64 x 64: bf16 pieces of floats are multiplied."""

    header = "pair_split_backward"
    dtypes = tuple(PIECES)
    multiplied = "bfloat16"
    copy_registers, registers = 104, 200  # of a thread, by what its warpgroup does

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
        waits = (products + SPLIT_US) * math.ceil(units / self.groups)
        return max(units * max(self.memory_us, products), waits)


@dataclass(frozen=True)
class PairTf32Backward(Pair16LargeBackward):
    """Of tf32, where factors are too large for pieces of floats: scaled f16 is multiplied."""

    header = "pair_tf32_backward"
    dtypes = ("tf32",)
    takes_several = False
    multiplied = "float16"
    start_us = 5.0
    unit_us = 5.0
    shared = BARRIER_BYTES + 7 * LARGE_BYTES  # two on their way

    @property
    def shared_rows(self) -> int:
        p0, _, _, q1 = self.sizes
        return max(p0, q1)

    @property
    def numbers(self) -> dict[str, int]:
        return {}

    @property
    def widths(self) -> set[int]:
        _, p1, _, q1 = self.rounded
        return {64, p1, q1}


KINDS = Pair16Backward, Pair16LargeBackward, PairSplitBackward, PairTf32Backward


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None, rank: int = 1
) -> tuple[ByWarpgroups, ...]:
    """The fastest by prediction, of all ways to take neighbours as two; none where no kernel takes any. `outer` is the
    size of what lies before them."""
    found = _ways(modes, outer, dtype, batch, gpu, inputs, rank)
    return min(found, key=lambda passes: sum(each.us for each in passes), default=())


def _ways(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None, rank: int
) -> Iterator[tuple[ByWarpgroups, ...]]:
    """Of a sum of `rank` products in as many passes as its terms need, of about the same number each."""
    for kind, both in itertools.product(KINDS, as_two(modes)):
        if dtype not in kind.dtypes or (not kind.takes_several and (inputs or rank > 1)):
            continue
        one = kind(both, dtype, outer, gpu, inputs=inputs, terms=Terms(rank))
        if one.fits:
            passes = -(-rank // one.most_terms)
            bounds = [rank * i // passes for i in range(passes + 1)]
            terms = [Terms(rank, first, end - first) for first, end in itertools.pairwise(bounds)]
            yield tuple(timed(replace(one, terms=some), batch) for some in terms)
