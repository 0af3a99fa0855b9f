"""Gradients of weights in tf32 and 16 bits on Hopper, of states that the copy engine reads by maps:
mapped_gradient.cuh, its tiles and source.

Of tied weights with something behind the mode that lies in whole pieces of 16 bytes, and in 16 bits of any with nothing
behind it whose rows do. All others are left to wide_gradient.py and gradient.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import NO_SUM, SUM_BYTES, States, TileSums, reduction_us
from factorlayer.kernels.passes import MOST_BLOCKS, fastest, tensor_map
from factorlayer.kernels.product.mapped import CYCLES, LEAST_SLOTS, REGISTERS, ByMaps
from factorlayer.kernels.product.streamed import SECTOR
from factorlayer.kernels.work import round_up
from factorlayer.maths.spec import Contraction

DTYPES = ("tf32", "bfloat16", "float16")
SHAPES = (1, 1), (2, 1), (3, 1), (1, 2), (2, 2)  # warpgroups of consumers, and times 64 q's that each has
MOST_SUMS = {1: 192, 2: 176, 3: 96}  # registers of a thread's sums, by warpgroups of consumers
LEAST_FEATURES, LEAST_SUMMED = 32, 64  # of the larger side of a weight that is worth a tile of 64, and summed over
LEAST_CHUNKS = (1, 2, 4, 8, 16)  # that are worth a block
# Fitted to 121 tilings of 23 gradients on one H200: 90 % are within 20 % and 95 % within 30, and the one with the least
# prediction takes 1.02 of the best one's time. Nanoseconds for a row of a slab; times more where rows begin within
# sectors, and where one has less than a slab
ROW_NS, WITHIN_SECTORS, SHORT = 1.31, 1.48, 1.23
STORE_RATE = 200e3  # bytes of sums that a block stores in a microsecond
TILE_US = 0.2  # of a tile, beside what it does
BESIDE, ALONE = 0.7, 1.1  # of memory's time what is beside that of multiprocessors, and what it takes at least


@dataclass(frozen=True)
class MappedGradient(ByMaps, TileSums):
    """A pass, tiled: `consumers` warpgroups with 64 x `parts` q's and n p's each, and a block for at least `least`
    chunks, where there are enough. `us` is the time predicted."""

    contraction: Contraction
    dtype: str
    consumers: int
    parts: int
    n: int
    least: int
    gpu: Gpu
    batch: int
    us: float = 0.0
    grad: int = 0  # the parameter that grad_y is
    stays: bool = False
    states: States = NO_SUM

    @property
    def is_turned(self) -> bool:
        """Whether rows are summed over, as nothing lies behind the mode."""
        return self.contraction.inner == 1

    @property
    def sums(self) -> int:
        """Registers of a thread for sums."""
        return self.parts * self.n // 2

    @property
    def slab(self) -> int:
        """Elements of 128 bytes."""
        return 128 // self.size

    @property
    def brought(self) -> int:
        """Rows of 128 bytes of a slot: of both states."""
        return self.rows + (round_up(self.n, 64) if self.is_turned else self.n)

    @property
    def slot_bytes(self) -> int:
        return 128 * self.brought

    @property
    def staged_bytes(self) -> int:
        """Bytes by way of which sums are stored, where rows begin anywhere."""
        return 4 * self.consumers * 16 * (self.n + 8) * 4 if self.contraction.p % 4 else 0

    @property
    def fits(self) -> bool:
        held = self.sums <= MOST_SUMS[self.consumers] and self.slots >= LEAST_SLOTS
        return held and self.staged_bytes <= self.slots * self.slot_bytes and self.tiles <= MOST_BLOCKS

    @property
    def groups(self) -> int:
        """Groups that have weights of their own."""
        return 1 if self.contraction.tied else self.contraction.outer

    @kept
    def tiles(self) -> int:
        c = self.contraction
        return -(-c.q // self.rows) * -(-c.p // self.n) * self.groups * self.states.terms

    @property
    def rows_per_sample(self) -> int:
        return self.contraction.outer if self.contraction.tied else 1

    @property
    def slabs(self) -> int:
        """Slabs of a row."""
        return -(-self.contraction.inner // self.slab)

    @property
    def units_per_sample(self) -> int:
        return self.rows_per_sample * self.slabs

    @property
    def units_per_block(self) -> int:
        return self.least * (64 if self.is_turned else 1)

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps of x and of grad_y."""
        c, terms = self.contraction, self.states
        return (
            self._map("x", c.p, self.n, terms.terms if terms.x else 1),
            self._map(f"{self.grad}*", c.q, self.rows, terms.terms if terms.g else 1),
        )

    def _map(self, of: str, features: int, columns: int, terms: int) -> str:
        rows, inner = self.rows_per_sample * terms, self.contraction.inner
        if self.is_turned:
            row = features * self.groups
            return tensor_map(
                of, self.dtype, (features, self.groups, rows, 1, 1), (features, *[row] * 3), (64, 1, 64, 1, 1)
            )
        sizes, row = (inner, features, rows, 1, 1), features * inner
        return tensor_map(of, self.dtype, sizes, (inner, *[row] * 3), (self.slab, columns, 1, 1, 1))

    def us_of(self, batch: int) -> float:
        """Microseconds: each block is bound by what it asks for or what it multiplies, and memory by all of them."""
        c, gpu, size = self.contraction, self.gpu, self.size
        rows = batch * self.rows_per_sample
        chunks = -(-rows // 64) if self.is_turned else rows * self.slabs
        parts = min(-(-chunks // self.least), self.most)
        run = (min(c.p, c.q) if self.is_turned else c.inner) * size
        asked = ROW_NS * self.brought * (WITHIN_SECTORS if run % SECTOR else 1)
        asked *= SHORT if run < 128 and not self.is_turned else 1
        steps = 4 if self.is_turned else -(-c.inner * size // 32) / self.slabs
        chunk = max(asked / 1e3, self.rows * self.n / 32 / CYCLES[size] * steps / 4)
        stored = self.rows * self.n * SUM_BYTES[self.dtype] / STORE_RATE * (2 if c.p % 4 else 1)
        busy = -(-parts * self.tiles // gpu.sms) * (-(-chunks // parts) * chunk + stored + TILE_US)
        memory = size * rows * (c.p + c.q) * c.inner * self.groups * self.states.terms / (gpu.memory_bytes * gpu.sms)
        sums = 0 if self.is_whole else parts * self.weights * SUM_BYTES[self.dtype]
        summed = 2 * sums / (gpu.l2_bytes * gpu.sms)  # written, and read again
        return gpu.rates.behind_us + max(busy + BESIDE * memory, ALONE * memory) + summed

    @property
    def details(self) -> str:
        c = self.contraction
        groups = f" of {self.groups} groups" if self.groups > 1 else ""
        by = f"{self.slab} rows" if self.is_turned else f"{self.slab} behind the mode"
        tiles = f"tiles of {self.rows}×{self.n} sums{groups}"
        return f"{c.q}×{c.p}, {tiles}, {self.slots} slots of {by}, {self.for_a_tile}"

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {self.n}, turned=self.is_turned)

    @property
    def told(self) -> list[str]:
        c, states = self.contraction, self.states
        more, fewer = REGISTERS[self.consumers]
        told: Told = {"Element": ELEMENT[self.dtype], "Result": self.result, "P": c.p, "Q": c.q, "INNER": c.inner}
        told |= {"ROWS": self.rows_per_sample, "GROUPS": self.groups, "TERMS": states.terms}
        told |= {"X_TERMS": states.x > 0, "G_TERMS": states.g > 0, "CONSUMERS": self.consumers, "PARTS": self.parts}
        return constants(told | {"N": self.n, "SLOTS": self.slots, "MORE": more, "FEWER": fewer})


def tile(contraction: Contraction, dtype: str, batch: int, gpu: Gpu, states: States = NO_SUM) -> MappedGradient | None:
    """The fastest tiling by prediction; None if this is no contraction for it."""
    return fastest(tilings(contraction, dtype, batch, gpu, states), batch, reduction_us)


def tilings(c: Contraction, dtype: str, batch: int, gpu: Gpu, states: States = NO_SUM) -> Iterator[MappedGradient]:
    size = ELEMENT_BYTES[dtype]
    if not gpu.wgmma or dtype not in DTYPES or max(c.p, c.q) < LEAST_FEATURES:
        return
    if batch * c.inner * (c.outer if c.tied else 1) < LEAST_SUMMED:
        return
    if c.inner == 1:  # the matrix unit turns 16 bits; rows of a term end where the next one's begin
        if size == 4 or states.terms > 1 or c.p % 8 or c.q % 8:
            return
    elif not c.tied or c.inner * size % 16:
        return
    widths = sorted({min(256, round_up(-(-c.p // n), 16)) for n in range(-(-c.p // 256), 1 + -(-c.p // 64))})
    for (consumers, parts), n, least in itertools.product(SHAPES, widths, LEAST_CHUNKS):
        if 64 * consumers * parts >= c.q + 64 and (consumers, parts) != (1, 1):
            continue
        plan = MappedGradient(c, dtype, consumers, parts, n, least, gpu, batch, states=states)
        if plan.fits:
            yield plan
