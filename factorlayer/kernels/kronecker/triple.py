"""Passes of three large modes whose state a cluster of blocks holds: what triple.cuh is told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import constants, wgmma
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import MOST_FEW
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.kronecker import warpgroups
from factorlayer.kernels.kronecker.pair import LEAST, Pair
from factorlayer.kernels.kronecker.warpgroups import Pair16Backward, PairSplitBackward
from factorlayer.kernels.passes import timed
from factorlayer.kernels.weights import weight_functions
from factorlayer.kernels.work import Mode, OfWork, Work, round_up

Behind = PairSplitBackward | Pair16Backward
DTYPES = ("tf32", "bfloat16", "float16")
LARGEST = 128
CLUSTER = 8  # blocks, backward
COPY_REGISTERS = {2: 32, 4: 40}  # of a thread, by bytes of an element
SLOT_BYTES = 8192
START_US = 10.2
STATE_US, KILOBYTE_US = (
    0.7,
    0.063,
)  # that a warpgroup takes to contract two modes of a state, and for what it reads and writes
TILE_US = 1.5  # to contract the first mode of 64 columns
TILE_BYTES = 64 * 64  # of 64 columns of a state, times those of an element
BACK_US = 1.4  # that a warpgroup takes for one


@dataclass(frozen=True)
class Triple(OfWork):
    """A pass of three tied contractions, tiled. `us` is the time predicted."""

    work: Work
    chunk: int  # of the second mode's p, in a slot
    slots: int
    groups: int  # that make states of two modes contracted
    last: int  # warpgroups that contract the first one; 0: those of the groups
    cluster: int
    buffers: int
    gpu: Gpu
    us: float = 0.0

    asks = ()
    depth, shares = 0, 1  # as backward has them

    @kept
    def pair(self) -> Pair:
        """The pass of the last two modes, which this one is made of."""
        work = self.work
        steps = tuple((at - 1, mode) for at, mode in work.steps if at > 0)
        two = replace(work, outer=work.outer * work.sizes[0], sizes=work.sizes[1:], steps=steps)
        return Pair(two, self.chunk, self.slots, self.groups, self.gpu)

    @property
    def mode(self) -> Mode:
        """The first mode."""
        return next(mode for at, mode in self.work.steps if at == 0)

    @property
    def n(self) -> int:
        return round_up(self.mode.q, 16)

    @property
    def threads(self) -> int:
        return 128 * (self.groups * self.pair.parts + self.last + 1)

    @property
    def last_registers(self) -> int:
        """Registers of a thread that contracts the first mode: sums, operands, places."""
        _, _, q0, q1 = self.pair.sizes
        whole = self.mode.q == self.n and q0 % self.cluster == 0 and self.rows * q1 % 64 == 0
        return round_up(self.n // 2 + (48 if whole and self.size == 2 else 56 if whole else 64), 8)

    @property
    def registers(self) -> int:
        """Registers of a thread that makes states: those that are left."""
        makers, warpgroups = self.groups * self.pair.parts, self.threads // 128
        left = 65536 // self.threads // 8 * 8 * warpgroups - COPY_REGISTERS[self.size] - self.last_registers * self.last
        return min(240, left // makers // 8 * 8)

    @property
    def sent(self) -> int:
        """Rows that a warpgroup sends together."""
        return 64 if self.size == 2 else 32 if self.last else 16

    @property
    def rows(self) -> int:
        """Rows of a state that a block has."""
        return -(-self.pair.sizes[2] // self.cluster)

    @property
    def state_bytes(self) -> int:
        """Bytes of a block's part of all states of a sample."""
        columns = round_up(self.rows * self.pair.sizes[3], 64)
        return round_up(round_up(self.mode.p, 32 // self.size) * (columns * self.size + 16), 128)

    @property
    def weight_bytes(self) -> int:
        return -(-self.mode.p * self.size // 128) * self.n * 128

    @property
    def result_bytes(self) -> int:
        """Bytes of results of a warpgroup that contracts the first mode."""
        return self.n * 128 if self.size == 2 else 0

    @kept
    def shared(self) -> int:
        staged = self.groups * self.pair.parts * self.sent * 64 * self.size
        results = self.last * self.result_bytes
        pair = self.pair.shared - self.pair.staged
        return pair + self.weight_bytes + staged + results + self.buffers * self.state_bytes

    @property
    def split(self) -> int:
        """Blocks along y of the grid."""
        return self.cluster

    @property
    def units_per_block(self) -> int:
        return 1

    @property
    def output_bytes(self) -> int:
        _, _, q0, q1 = self.pair.sizes
        return self.work.outer * self.mode.q * q0 * q1 * self.size

    def us_of(self, batch: int) -> float:
        """Predicted microseconds, with numbers fitted to an H200, a sixteenth of which has no room for clusters."""
        work, gpu = self.work, self.gpu
        p0, p1, q0, q1 = self.pair.sizes
        rounds = -(-batch * work.outer // max(1, gpu.sms * 15 // 16 // self.cluster))
        states, tiles = -(-self.mode.p // self.cluster), -(-self.rows * q1 // 64)
        busy = states / self.groups * (STATE_US + KILOBYTE_US * (p0 * p1 + q0 * q1) * self.size / 1e3)
        busy += tiles * TILE_US / self.groups if self.buffers == 1 and self.last == 0 else 0
        moved = (self.mode.p * p0 * p1 + self.mode.q * q0 * q1) * self.size / (0.8 * gpu.memory_bytes * self.cluster)
        return START_US + rounds * max(busy, moved)

    title = "triple"

    @property
    def details(self) -> str:
        first = f"{self.mode.p}→{self.mode.q}, states in clusters of {self.cluster} blocks"
        groups = f"{self.groups} groups of {self.pair.parts} warpgroups and {self.last}"
        return f"{self.pair.contracted}, {first}, {groups}, {self.slots} slots of {self.chunk} rows"

    @property
    def products(self) -> str:
        return wgmma(self.work.dtype, {self.chunk, self.pair.n, self.n})

    @property
    def told(self) -> list[str]:
        registers = COPY_REGISTERS[self.size], self.registers
        numbers = {"PO": self.mode.p, "QO": self.mode.q, "SAMPLES": self.work.outer, "CLUSTER": self.cluster}
        numbers |= {"BUFFERS": self.buffers, "LAST": self.last, "SENT": self.sent, "DEPTH": self.depth}
        numbers |= {"LAST_REGISTERS": self.last_registers, "SHARES": self.shares}
        lines = self.pair.lines(registers, min(3, self.slots - 2))
        return lines + weight_functions(self.mode, "o", self.work.dtype) + constants(numbers)


@dataclass(frozen=True)
class TripleBackward(Triple, BlockSums):
    """All that goes back through the first of three modes, the state before it made again:
    triple_backward.cuh. What goes back through the others, `behind`, adds up its sums as well."""

    depth: int = 2  # slots of a warpgroup for what comes back
    shares: int = 1  # of a state, each of which makes room for the next one's by itself

    leaves = "begun"
    header = "triple_backward"

    @property
    def behind(self) -> Behind:
        last, first = (mode for at, mode in self.work.steps if at > 0)
        family = Pair16Backward if self.size == 2 else PairSplitBackward
        return family((first, last), self.dtype, self.pair.work.outer, self.gpu, singles=self.singles)

    @property
    def singles(self) -> int:
        return self.mode.p * self.mode.q

    @property
    def weights(self) -> int:
        return self.behind.weights

    def sum_bytes(self, blocks: int) -> int:
        return self.part_bytes

    def is_others(self, missing: int, padding: int) -> bool:
        return not padding and missing == self.part_bytes - self.most * self.singles * SUM_BYTES[self.dtype]

    @property
    def last_registers(self) -> int:
        return round_up(self.mode.p // 2 + 32 + (48 if self.size == 2 else 88), 8)

    @property
    def sent(self) -> int:
        return 64 if self.size == 2 else 0  # two sums of a thread, which leaves room for slots

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes if self.size == 2 else -(-self.mode.q * self.size // 128) * self.mode.p * 128

    @property
    def result_bytes(self) -> int:
        return self.depth * TILE_BYTES * self.size // (1 if self.size == 2 else self.last)

    @property
    def tiles(self) -> int:
        """Tiles of a block, 64 columns each."""
        return self.rows * self.pair.sizes[3] // 64

    @property
    def state_bytes(self) -> int:
        return self.tiles * TILE_BYTES * self.size

    @property
    def output_bytes(self) -> int:
        _, _, q0, q1 = self.pair.sizes
        return self.work.outer * self.mode.p * q0 * q1 * self.size

    def us_of(self, batch: int) -> float:
        return _time_backward(self, batch)

    def __str__(self) -> str:
        return f"{super().__str__()}: the state made again, and back through {self.mode.p}→{self.mode.q}"

    @property
    def products(self) -> str:
        plain, turned = {self.chunk, self.pair.n, self.mode.p}, {self.mode.p, 64} if self.size == 2 else set[int]()
        return wgmma(self.dtype, plain - turned) + wgmma(self.dtype, turned, turned=True)

    @property
    def told(self) -> list[str]:
        return super().told + constants({"GRAD": 3, "MOST": self.behind.most, "UNITS": self.behind.units_per_sample})


def tile_backward(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu
) -> tuple[TripleBackward, Behind] | tuple[()]:
    """The passes that make all gradients of three large modes; none where these families have no kernels."""
    if len(modes) != 3 or not gpu.wgmma or dtype not in DTYPES or batch <= MOST_FEW:
        return ()
    if any(len(mode.parts) > 1 or max(mode.p, mode.q) > 64 or mode.q < LEAST or mode.p < LEAST for mode in modes):
        return ()
    first, *two = modes
    if first.p % 16 or first.q % 16 or any(n % 8 for n in (two[1].p, two[1].q)):
        return ()
    if math.prod(mode.p for mode in two) != math.prod(mode.q for mode in two):
        return ()  # what comes back lies where that of x belongs
    work = Work(outer, tuple(mode.p for mode in modes), 1, tuple((i, modes[i]) for i in (2, 1, 0)), dtype)
    plan = next((plan for plan in _tilings_backward(work, gpu) if _fits(plan)), None)
    behind = warpgroups.tile(tuple(two), outer * first.p, dtype, batch, gpu)
    if plan is None or not behind:
        return ()
    return replace(plan, us=_time_backward(plan, batch)), replace(plan.behind, us=behind[0].us)


def _tilings_backward(work: Work, gpu: Gpu) -> Iterator[TripleBackward]:
    """Tilings, the best first. Slots for what is on its way are worth more than a second buffer."""
    (po, p0, _), (_, q0, q1) = work.states[0], work.states[-1]
    if q0 % CLUSTER or (CLUSTER - 1) * -(-po // CLUSTER) >= po:
        return
    columns = q0 // CLUSTER * q1
    if ELEMENT_BYTES[work.dtype] == 4:
        if columns % 64 == 0:
            shares = 4 if q0 % 64 == 0 and columns % 256 == 0 else 1
            for slots in (4, 3, 2):
                yield TripleBackward(work, 32, slots, 1, 2, CLUSTER, 1, gpu, shares=shares)
        return
    for groups, last, depth, slots in itertools.product((2, 1), (2, 1), (4, 3, 2), (8, 6, 4, 3, 2)):
        if columns % (64 * last) == 0:
            yield TripleBackward(work, round_up(p0, 16), slots, groups, last, CLUSTER, 1, gpu, depth=depth)


def tile(work: Work, batch: int, gpu: Gpu) -> Triple | None:
    """The tiling of three large modes; None where this family has no kernel."""
    if not gpu.wgmma or work.dtype not in DTYPES or work.rank > 1 or work.inner > 1:
        return None
    if not len(work.steps) == len(work.sizes) == 3:
        return None
    if work.dtype == "float16" and any(len(mode.parts) > 1 for _, mode in work.steps):
        return None  # products would have to be scaled
    sizes = *work.states[0], *work.states[-1]
    size = ELEMENT_BYTES[work.dtype]
    if min(sizes) < LEAST or max(sizes) > LARGEST or sizes[2] * size % 16 or sizes[5] * size % 16:
        return None
    found = next((plan for plan in _tilings(work, gpu) if _fits(plan)), None)
    return timed(found, batch) if found else None


def _fits(plan: Triple) -> bool:
    each = 65536 // plan.threads // 8 * 8
    widest = max(plan.n, plan.pair.n, plan.chunk)
    enough = plan.pair.registers_needed <= plan.registers and widest // 2 + 32 <= each
    return (
        enough and plan.shared <= plan.gpu.shared and plan.slots >= plan.groups * -(-plan.pair.sizes[0] // plan.chunk)
    )


def _tilings(work: Work, gpu: Gpu) -> Iterator[Triple]:
    """Tilings, the best first. In tf32, where one buffer leaves tasks little to overlap, all warpgroups take both."""
    (po, p0, p1), (_, q0, q1) = work.states[0], work.states[-1]
    size, parts = ELEMENT_BYTES[work.dtype], -(-q1 // 64)
    row = round_up(p1 * size, 128)
    for cluster, buffers in itertools.product((8, 4, 2), (2, 1)):
        if any((cluster - 1) * -(-n // cluster) >= n for n in (po, q0)):
            continue
        in_turn = size == 4 and buffers == 1
        chunks = -(-p0 * row // (2 * SLOT_BYTES if in_turn else SLOT_BYTES))
        chunk = round_up(-(-p0 // chunks), 8 if size == 4 else 16)
        ways = (
            ((3, 0),) if in_turn and parts == 1 else ((3, 2), (2, 2)) if parts == 1 and size == 2 else ((3 - parts, 2),)
        )
        for (groups, last), slots in itertools.product(ways, (8, 6, 5, 4, 3)):
            yield Triple(work, chunk, slots, groups, last, cluster, buffers, gpu)


def _time_backward(plan: TripleBackward, batch: int) -> float:
    work, gpu = plan.work, plan.gpu
    p0, p1, q0, q1 = plan.pair.sizes
    rounds = -(-batch * work.outer // max(1, gpu.sms * 15 // 16 // plan.cluster))
    states = -(-plan.mode.p // plan.cluster) / plan.groups
    busy = states * (STATE_US + KILOBYTE_US * (p0 * p1 + q0 * q1) * plan.size / 1e3)
    elements = plan.mode.p * (p0 * p1 + q0 * q1) + plan.mode.q * q0 * q1
    moved = elements * plan.size / (0.8 * gpu.memory_bytes * plan.cluster)
    return START_US + rounds * max(busy, plan.tiles / plan.last * BACK_US, moved)
