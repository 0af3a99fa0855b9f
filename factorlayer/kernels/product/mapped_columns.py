"""Passes of one tied contraction by columns in 16 bits on Hopper, of states that the copy engine reads by maps:
mapped_columns.cuh, its tiles and source.

What lies behind the mode has to be whole pieces of 16 bytes; the mode may be several taken as one. All others are left
to resident.py and streamed.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_BLOCKS, fastest, tensor_map
from factorlayer.kernels.product.mapped import CYCLES, LARGEST, REGISTERS, ByMaps
from factorlayer.kernels.product.streamed import SECTOR
from factorlayer.kernels.weights import can_be_made, weight_functions
from factorlayer.kernels.work import OfStates, Terms, Work, round_up

DTYPES = ("bfloat16", "float16")
LEAST, MOST = 24, 256  # of p and q: a box has 256 p's at most
LEAST_BEHIND = 32  # columns that are worth a product of 64 q's
# Groups of warpgroups, warpgroups of each, and times 64 q's that each has
SHAPES = (
    (1, 1, 1),
    (2, 1, 1),
    (3, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 3, 1),
    (2, 1, 2),
    (3, 1, 2),
    (1, 2, 2),
    (2, 1, 4),
)
MOST_SUMS = {1: 112, 2: 128, 3: 80, 4: 48}  # registers of a thread's sums, by warpgroups of consumers
REGISTERS_OF = REGISTERS | {4: (112, 32)}
MOST_SLOTS, LEAST_SLOTS = 8, 2
STAGED_BYTES = 2048  # of a warp
PRODUCT = 2048  # multiply-adds of the matrix unit in a cycle
# Fitted to 332 tilings of 34 works on one H200: 88 % are within 20 % and 94 % within 30, and the one with the least
# prediction takes 1.02 of the best one's time. Nanoseconds for a row of 128 bytes, and times more where rows begin
# within sectors; bytes that are stored in a microsecond there, elsewhere stores are hidden
ROW_NS, WITHIN_SECTORS, STORED_WITHIN = 1.49, 2.1, 28e3
# Microseconds until the first tile is there; more for each element of a weight that a thread makes or loads by
# itself; of L2's time for a weight
START_US, MADE_US, WEIGHT = 1.3, 0.052, 0.6
# Of the shorter one of multiprocessors' time and memory's; what memory takes at least, and where rows begin within
# sectors, of which five are read for four; of L2's time for what other blocks read again
BESIDE, ALONE, ALONE_WITHIN, AGAIN = 0.5, 1.11, 1.3, 0.12


@dataclass(frozen=True)
class MappedColumns(ByMaps, OfStates):
    """A pass, tiled: `groups` take tiles of n columns and 64 x `down` x `parts` q's, of a block that has the weights of
    `terms` terms. `us` is the time predicted."""

    work: Work
    gpu: Gpu
    n: int
    groups: int
    down: int
    parts: int
    terms: int = 1
    us: float = 0.0
    takes: str = ""  # what it reads and gives, buffers of a plan, where that is not the state before and behind it
    gives: str = ""

    @property
    def consumers(self) -> int:
        return self.groups * self.down

    @property
    def rows(self) -> int:
        """Q's of a block."""
        return 64 * self.down * self.parts

    @property
    def mode_sizes(self) -> tuple[int, int]:
        """p and q."""
        ((_, mode),) = self.work.steps
        return mode.p, mode.q

    @property
    def all_terms(self) -> int:
        return max(self.work.rank, self.work.terms)

    @property
    def is_made(self) -> bool:
        """Whether threads make a weight, or load it, element by element."""
        ((_, mode),) = self.work.steps
        return self.work.transposed or len(mode.parts) > 1 or mode.p % 8 > 0

    @property
    def slots_of_tile(self) -> int:
        return self.terms if self.work.apart else 1

    @property
    def chunks(self) -> int:
        return -(-self.work.inner // self.n)

    @property
    def sums(self) -> int:
        """Registers of a thread for sums."""
        return self.parts * self.n // 2

    @property
    def slot_bytes(self) -> int:
        return round_up(self.mode_sizes[0], 16) * round_up(self.n, 64) * 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of slabs of 64 p's, which have the q's that there are, but for the last one."""
        p, q = self.mode_sizes
        here = self.rows if self.rows < q else round_up(q, 8)
        return self.terms * 128 * ((-(-p // 64) - 1) * here + self.rows)

    @property
    def beside_slots(self) -> int:
        """Bytes of weights and their scales, of what is stored, and of what it takes to begin at a multiple of 1024."""
        scales = round_up(4 * self.terms, 16)
        return 1024 + self.weight_bytes + scales + 4 * self.consumers * STAGED_BYTES

    @kept
    def slots(self) -> int:
        fit = min(MOST_SLOTS, (self.gpu.shared - self.beside_slots) // (self.slot_bytes + 16))
        return int(fit // (self.groups * self.slots_of_tile) * self.groups * self.slots_of_tile)

    @kept
    def shared(self) -> int:
        return int(self.slots * (self.slot_bytes + 16) + self.beside_slots)

    @property
    def q_tiles(self) -> int:
        return -(-self.mode_sizes[1] // self.rows)

    @property
    def split(self) -> int:
        return self.q_tiles * (self.all_terms // self.terms)

    @property
    def units_per_sample(self) -> int:
        return self.work.outer * self.chunks

    @property
    def units_per_block(self) -> int:
        return 1

    @property
    def most_samples(self) -> int:
        return LARGEST // (self.work.outer * self.all_terms)

    @property
    def output_bytes(self) -> int:
        work = self.work
        return work.terms * work.outer * math.prod(work.states[-1]) * work.inner * self.size

    @property
    def maps(self) -> tuple[str, ...]:
        """The map of x."""
        work, (p, _) = self.work, self.mode_sizes
        rows, row = work.outer * (self.all_terms if work.apart else 1), p * work.inner
        return (
            tensor_map(
                "x",
                work.dtype,
                (work.inner, p, rows, 1, 1),
                (work.inner, row, row, row),
                (64, round_up(p, 16), 1, 1, 1),
            ),
        )

    def us_of(self, batch: int) -> float:
        """Multiprocessors take tiles, whose next ones come while one is multiplied and others are stored."""
        work, gpu, (p, q) = self.work, self.gpu, self.mode_sizes
        within = work.inner * self.size % SECTOR > 0
        tiles = -(-batch * self.units_per_sample // max(1, gpu.sms // self.split))  # of a multiprocessor
        asked = ROW_NS * round_up(p, 16) * -(-work.inner // 64) / self.chunks * (WITHIN_SECTORS if within else 1)
        products = self.terms * self.rows * self.n * round_up(p, 16) / PRODUCT / CYCLES[self.size]
        states = self.terms if work.terms > 1 else 1
        stored = states * min(self.rows, q) * self.n * self.size / STORED_WITHIN if within else 0
        busy = tiles * max(self.slots_of_tile * asked / 1e3, products, (products + stored) / self.groups)
        read = batch * work.outer * work.inner * p * self.size * (self.all_terms if work.apart else 1)
        made = batch * self.output_bytes
        memory = (ALONE_WITHIN if within else ALONE) * (read + made) / (gpu.memory_bytes * gpu.sms)
        begin = (
            START_US
            + WEIGHT * self.weight_bytes / gpu.l2_bytes
            + AGAIN * (self.split - 1) * read / (gpu.l2_bytes * gpu.sms)
        )
        begin += MADE_US * self.terms * min(self.rows, q) * p / self.threads if self.is_made else 0
        return gpu.rates.behind_us + begin + max(busy, memory) + BESIDE * min(busy, memory)

    @property
    def details(self) -> str:
        p, q = self.mode_sizes
        work, terms = self.work, self.all_terms
        each = f"; all {terms} terms" if work.rank > 1 else f"; a state for each of {terms} terms" if terms > 1 else ""
        by = " by each block" if 1 < self.terms == work.terms else ""
        tiles = f"tiles of {self.rows}×{self.n} sums"
        groups = f"{self.groups} groups of {self.down} warpgroups"
        return f"{p}→{q} by columns, {tiles}, {groups}, {self.slots} slots{each}{by}"

    @property
    def products(self) -> str:
        return wgmma(self.work.dtype, {self.n}, turned=True)

    @property
    def told(self) -> list[str]:
        work, (p, q) = self.work, self.mode_sizes
        ((_, mode),) = work.steps
        more, fewer = REGISTERS_OF[self.consumers]
        told: Told = {"Element": ELEMENT[work.dtype], "P": p, "Q": q, "INNER": work.inner, "OUTER": work.outer}
        told |= {"N": self.n, "GROUPS": self.groups, "DOWN": self.down, "PARTS": self.parts, "SLOTS": self.slots}
        told |= {"MORE": more, "FEWER": fewer, "SUMMED": work.rank > 1, "X_TERMS": work.apart}
        told |= {"Y_TERMS": work.terms > 1, "TURNED": work.transposed}
        numbers = Terms(self.all_terms, 0, self.terms).numbers
        weight = weight_functions(mode.turned if work.transposed else mode, "w", work.dtype)
        return [*constants(told | dict(numbers)), *weight, *work.finish]


def tile(work: Work, batch: int, gpu: Gpu) -> MappedColumns | None:
    """The fastest tiling by prediction; None if this is no work for it."""
    return fastest(tilings(work, gpu), batch)


def tilings(work: Work, gpu: Gpu) -> Iterator[MappedColumns]:
    if not gpu.wgmma or work.dtype not in DTYPES or len(work.sizes) > 1 or work.inputs or work.slope:
        return
    ((_, mode),) = work.steps
    terms = max(work.rank, work.terms)
    if not min(mode.p, mode.q) >= LEAST or max(mode.p, mode.q) > MOST or not can_be_made(mode, work.dtype):
        return
    if work.inner % 8 or work.inner < LEAST_BEHIND:
        return
    widths = {work.inner} if work.inner <= 256 else set()
    widths |= {n for n in (64, 128, 192, 256) if n < work.inner}
    held = (terms,) if work.rank > 1 else (terms, 1) if terms > 1 else (1,)
    for (groups, down, parts), n, each in itertools.product(SHAPES, sorted(widths), held):
        if 64 * down * parts >= mode.q + 64:
            continue
        plan = MappedColumns(work, gpu, n, groups, down, parts, each)
        if plan.sums <= MOST_SUMS[plan.consumers] and plan.slots >= LEAST_SLOTS and plan.split <= MOST_BLOCKS:
            yield plan
