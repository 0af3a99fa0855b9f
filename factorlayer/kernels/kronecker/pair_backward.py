"""All gradients of two factors in one pass: pair_backward.cuh, its tiles and source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.grouped import HELD, MOST_GROUPS, Grouped
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.weights import can_be_made, told_weights
from factorlayer.kernels.work import Inputs, Mode, OfTwoModes, as_two, round_up, told_inputs

LARGEST = {"float64": 96, "float32": 96, "tf32": 96, "bfloat16": 128, "float16": 128}  # whose sums a group can hold
LEAST = 8  # half of a warp's rows


@dataclass(frozen=True)
class PairBackward(OfTwoModes, Grouped):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    rows: int  # warps of 16 p0's each
    parts: int  # of the columns, each with such warps
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0
    inputs: Inputs | None = None

    @property
    def at_once(self) -> int:
        return 8 if self.size < 8 and self.dtype != "float32" and self.sizes[3] <= 64 else 4

    def _tiles(self, n: int) -> tuple[int, int]:
        return self.tiles_of(n, even=self.size == 2 or self.parts % 2 == 1)

    @kept
    def padded(self) -> tuple[int, int, int, int]:
        _, p1, q0, q1 = self.sizes
        p1, q1 = (8 * self.parts * pieces * tiles for pieces, tiles in map(self._tiles, (p1, q1)))
        return 16 * self.rows, p1, round_up(q0, 16), q1

    @kept
    def registers(self) -> int:
        _, p1, q0, q1 = self.padded
        kept = 16 * q0 + -(-q1 // (16 * self.rows)) * 16 * p1 // self.parts
        return self.registers_of(kept, HELD[self.dtype] * q0, max(self._tiles(n)[1] for n in self.sizes[1::2]))

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of X and B, of G and dT, and of A in shared memory."""
        p0, p1, _, q1 = self.padded
        return p1 + self.padding, q1 + self.padding, p0 + self.padding

    @kept
    def shared(self) -> int:
        p0, _, q0, q1 = self.padded
        x, g, of_a = self.strides
        staged = self.staged(self._tiles(self.sizes[1])[1])
        groups = self.groups * (self.slots * (p0 * x + q0 * g) + p0 * g + staged)
        a = q0 * of_a
        return (q1 * x + (a + groups if self.dtype == "float32" else max(a, groups))) * self.size

    def us_of(self, batch: int) -> float:
        p0, p1, q0, q1 = self.sizes
        memory = (2 * p0 * p1 + q0 * q1) * self.size / (0.9 * self.gpu.memory_bytes)
        p0, p1, q0, q1 = self.padded
        turns = -(-q1 // (16 * self.rows))
        products = 2 * p0 * p1 * q1 + 2 * p0 * q0 * q1 + turns * 16 * self.rows * p0 * p1
        operands = self.rows * (2 * p1 * q1 + 2 * q0 * q1 + turns * p0 * p1) + self.parts * p0 * (p1 + 2 * q1)
        sums = self.groups * (self.parts * p0 * q0 + turns * 16 * self.rows * p1)
        return self.time(batch, memory, products, operands, sums)

    @property
    def details(self) -> str:
        return f"{self.contracted}, {self.groups} groups of {self.rows}×{self.parts} warps, {self.slots} slots"

    @property
    def told(self) -> list[str]:
        numbers = self.told_sizes | {"GRAD": sum(len(mode.parts) for mode in self.modes)}
        return self.constants(numbers | told_inputs(self.inputs)) + told_weights(self.modes, "ab", self.dtype)


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> PairBackward | None:
    """The fastest by prediction, of all ways to take neighbouring modes as two; None where this family has no kernel.
    `outer` is the size of what lies before them."""
    return fastest(_tilings(modes, outer, dtype, gpu, inputs), batch)


def _tilings(
    modes: tuple[Mode, ...], outer: int, dtype: str, gpu: Gpu, inputs: Inputs | None
) -> Iterator[PairBackward]:
    size = ELEMENT_BYTES[dtype]
    for both, columns in itertools.product(as_two(modes), (1, 2, 4)):
        sizes = [n for mode in both for n in (mode.p, mode.q)]
        if min(sizes) < LEAST or max(sizes) > LARGEST[dtype] or not all(can_be_made(mode, dtype) for mode in both):
            continue
        if inputs and not (inputs.are_pieces(size) and both[1].p * size % 16 == 0):
            continue
        if size == 2 and (both[1].p % 2 or both[1].q % 2):
            continue
        if columns > 1 and 8 * columns > min(both[1].p, both[1].q):
            continue
        rows = -(-both[0].p // 16)
        for groups, slots, more in itertools.product(range(MOST_GROUPS, 0, -1), (3, 2, 1), (0, 1, 2)):
            plan = PairBackward(both, dtype, outer, rows + more, columns, groups, slots, gpu, inputs=inputs)
            if plan.fits:
                yield plan
