"""All gradients of a small factor and two of up to 64 x 64 in 16 bits, in one pass: pair_mixed_backward.cuh,
Hopper's matrix unit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Asks, ask_for, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, LEAST, SLAB, Pair16Backward
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.weights import can_be_made, told_weights
from factorlayer.kernels.work import Mode, merged, round_up

MOST_MIXED = 8  # of the small mode
CHUNK = 16  # rows of X
MIXED_BYTES = MOST_MIXED * (SLAB + 128)  # of all mixtures
START_US = 4.2  # with the weights and the first unit on their way
UNIT_US = 0.9  # of a group, for each of its mixtures
MIX_US = 0.09  # of a row of X's, mixed, and mixed back, while nothing else is multiplied


@dataclass(frozen=True)
class PairMixedBackward(BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode, Mode]
    dtype: str
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0

    groups = 2
    slots = 4  # of G
    copy_registers, registers = 56, 224  # of a thread, by what its warpgroup does

    @kept
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Sizes p, p0, p1, q, q0, q1."""
        small, first, second = self.modes
        return small.p, first.p, second.p, small.q, first.q, second.q

    @property
    def weights(self) -> int:
        """Elements of all three weights."""
        return sum(mode.p * mode.q for mode in self.modes)

    @property
    def merged(self) -> tuple[Mode, ...]:
        return merged(self.modes)

    @property
    def output_bytes(self) -> int:
        return self.units_per_sample * math.prod(self.sizes[:3]) * self.size

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def fixed(self) -> int:
        """Bytes of shared memory beside those of X's chunks."""
        return BARRIER_BYTES + (2 + self.groups + self.slots) * SLAB + MIXED_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 16 rows of all X's."""
        p, _, p1, *_ = self.sizes
        return p * (CHUNK * p1 // 8 | 1) * 16

    @property
    def least_chunks(self) -> int:
        """Chunks of a unit."""
        return -(-self.sizes[1] // CHUNK)

    @property
    def chunks(self) -> int:
        """Chunks that there is room for: of two units at most."""
        return min(2 * self.least_chunks, (self.gpu.shared - self.fixed) // self.chunk_bytes)

    @property
    def shared(self) -> int:
        return self.fixed + self.chunks * self.chunk_bytes

    def us_of(self, batch: int) -> float:
        p, p0, p1, q, q0, q1 = self.sizes
        memory = (2 * p * p0 * p1 + q * q0 * q1) * self.size / (0.85 * self.gpu.memory_bytes)
        busy = -(-q // self.groups) * UNIT_US + p0 * MIX_US
        units = math.ceil(batch * self.units_per_sample / self.gpu.sms)
        return START_US + units * max(memory, busy) + self.weights * SUM_BYTES[self.dtype] / self.gpu.l2_bytes

    @property
    def details(self) -> str:
        p, p0, p1, q, q0, q1 = self.sizes
        return f"{p1}→{q1}, {p0}→{q0}, {p}→{q}, {self.groups} warpgroups, {self.chunks} chunks"

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """The weights, each with its sizes."""
        return [part for mode in self.modes for part in mode.parts]

    @property
    def products(self) -> str:
        _, _, p1, _, q0, q1 = self.sizes
        return wgmma(self.dtype, (round_up(n, 16) for n in (p1, q0, q1)), turned=True)

    @property
    def asks(self) -> Asks:
        p, p0, p1, q, q0, q1 = self.sizes
        states = {"params.x": p * p0 * p1, f"params.weights[{len(self.parts)}]": q * q0 * q1}
        asks = [ask_for(name, self.units_per_sample * count * self.size) for name, count in states.items()]
        return asks + [(f"params.weights[{weight}]", str(q * p * self.size)) for weight, q, p in self.parts]

    @property
    def told(self) -> list[str]:
        numbers = dict(zip(("P", "P0", "P1", "Q", "Q0", "Q1"), self.sizes, strict=True))
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "SLOTS": self.slots, "CHUNKS": self.chunks}
        numbers |= {"GROUPS": self.groups, "COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}
        lines = constants({"Element": ELEMENT[self.dtype], "GRAD": len(self.parts), **numbers})
        return lines + told_weights(self.modes, "mab", self.dtype)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> PairMixedBackward | None:
    """The fastest by prediction, of all ways to take neighbours as three; None where this family has no kernel."""
    if not gpu.moves_registers or dtype not in ("bfloat16", "float16"):
        return None
    plans = []
    for three in _as_three(modes):
        plan = PairMixedBackward(three, dtype, outer, gpu)
        p, p0, p1, q, q0, q1 = plan.sizes
        large = (p0, p1, q0, q1)
        fits = 1 < max(p, q) <= MOST_MIXED and min(large) >= LEAST and max(large) <= Pair16Backward.largest
        fits = fits and p1 % 8 == 0 and q1 % 8 == 0 and all(can_be_made(mode, dtype) for mode in three)
        if fits and plan.chunks > plan.least_chunks:
            plans.append(plan)
    return fastest(plans, batch)


def _as_three(modes: tuple[Mode, ...]) -> Iterator[tuple[Mode, Mode, Mode]]:
    parts = [part for mode in modes for part in mode.parts]
    for i, j in itertools.combinations(range(1, len(parts)), 2):
        yield Mode(tuple(parts[:i])), Mode(tuple(parts[i:j])), Mode(tuple(parts[j:]))
