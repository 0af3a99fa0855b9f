"""What passes have in common that make all gradients of two factors at once by Hopper's matrix unit: what their kernels
are told, and which sizes they take. They differ in how numbers are multiplied, and in how large factors may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from factorlayer.device.code import ELEMENT, Asks, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.passes import timed
from factorlayer.kernels.weights import can_be_made, told_weights
from factorlayer.kernels.work import ONE_PRODUCT, Inputs, Mode, OfTwoModes, Terms, as_two, round_up, told_inputs

LEAST = 24  # of a size that fills the matrix unit
BARRIER_BYTES = 1024


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
    multiplied: ClassVar[str] = ""  # what is multiplied, if not the dtype itself
    start_us: ClassVar[float] = 4.0  # with the weights and the first unit on their way

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


Family = TypeVar("Family", bound=ByWarpgroups)


def ways(
    family: type[Family],
    modes: tuple[Mode, ...],
    outer: int,
    dtype: str,
    batch: int,
    gpu: Gpu,
    inputs: Inputs | None = None,
    rank: int = 1,
) -> Iterator[tuple[Family, ...]]:
    """Ways to take neighbours as two that the family has a kernel for: of a sum of `rank` products in as many passes as
    its terms need, of about the same number each."""
    if gpu.wgmma and dtype in family.dtypes:
        for both in as_two(modes):
            one = family(both, dtype, outer, gpu, inputs=inputs, terms=Terms(rank))
            if one.fits:
                passes = -(-rank // one.most_terms)
                bounds = [rank * i // passes for i in range(passes + 1)]
                terms = [Terms(rank, first, end - first) for first, end in itertools.pairwise(bounds)]
                made = (replace(one, terms=some) for some in terms)
                yield tuple(timed(each, batch) for each in made)


def quickest(found: Iterator[tuple[Family, ...]]) -> tuple[Family, ...]:
    """The way that is predicted to take least; none of none."""
    return min(found, key=lambda passes: sum(each.us for each in passes), default=())
