"""All gradients of a Monarch layer whose groups are small and many, its state and that one's gradient on chip:
monarch_back.cuh, which makes that of x and leaves grad_y turned, and monarch_gradient.cuh, those of the
weights, which reads it so: what an output group has lies side by side. Before them, monarch_weights.cuh puts weights
in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import constants, kinds, wgmma
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import BlockSums, Reduction
from factorlayer.kernels.monarch.layer import OfMonarch
from factorlayer.kernels.passes import OneSpread, fastest
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

DTYPES = ("tf32", "bfloat16", "float16")
WARPS = 8
MOST_SUMS = 200  # of a thread, whatever else it holds
MOST_SUMS_BACK = 112
UNITS = 16  # of a block on the way back
MOST_SLOTS = 9
RANKS = (4, 8, 16)
OWN_COPY_US = 0.1  # a chunk's start


class _Both(OfMonarch):
    """A pass of the two over samples."""

    output_bytes = 0  # outputs() of each says what it writes

    @property
    def step(self) -> int:
        """The size that one product is summed over."""
        return 32 // self.size

    @property
    def all_units(self) -> int:
        """Fours of the state's numbers that an output group reads."""
        return self.both[1].p // 4

    def lines(self, numbers: dict[str, int]) -> list[str]:
        return kinds(self.dtype) + constants(self.told_layer | numbers)


@dataclass(frozen=True)
class MonarchGradient(_Both, BlockSums):
    """The pass over x and grad_y that makes gradients of both weights, tiled: a block has 4 * `wk` units and 4 * `wl`
    output groups. `us` is the time predicted."""

    chain: Chain
    dtype: str
    wk: int
    wl: int
    groups: int  # of warps, that take turns at chunks
    samples: int  # of a chunk
    slots: int
    wgmma: bool  # Hopper's products, of those with grad_y
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = 32 * (WARPS + 4)  # with those that copy
    units_per_sample = 1
    reads, writes = "x", "s0"  # beside s2, for sums; s0 is the way back's to write

    @property
    def weights(self) -> int:
        return sum(c.weight_size for c in self.both)

    @property
    def split(self) -> int:
        """Parts of the weights."""
        return self.all_units // (4 * self.wk) * (self.both[1].inner // (4 * self.wl))

    @property
    def most(self) -> int:
        """Blocks for a part of the weights."""
        return max(1, self.gpu.sms // self.split)

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def columns(self) -> int:
        """Columns of x that a block has."""
        return 4 * self.wk * 4 // self.rank * self.both[0].p

    @kept
    def shared(self) -> int:
        first, second = self.both
        row = 128 if self.wgmma else self.row_bytes(second.q)
        weights = 16 * 4 * self.wk * self.wl * (self.row_bytes(first.p) + row)
        slot = self.samples * (self.row_bytes(self.columns) + 4 * self.wl * row)
        return weights + self.slots * ((round_up(slot, 1024) if self.wgmma else slot) + 16)

    def us_of(self, batch: int) -> float:
        return _gradient_time(replace(self, batch=batch))

    title = "monarch gradients"

    @property
    def details(self) -> str:
        first, second = self.both
        parts = f"{4 * self.wl} of {second.inner} groups and {16 * self.wk} of {second.p}"
        groups = f"{self.groups} groups of {self.wk}×{self.wl} warps, {self.slots} slots of {self.samples} samples"
        return f"{first.p}→{first.q}, {second.p}→{second.q} for {parts}, {groups}"

    header = "monarch_gradient"

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {min(self.samples, 32), self.both[1].q} if self.wgmma else (), turned=True)

    @property
    def told(self) -> list[str]:
        first, second = self.both
        numbers = {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        numbers |= {"WK": self.wk, "WL": self.wl, "GROUPS": self.groups, "CHUNK": self.samples, "SLOTS": self.slots}
        return self.lines(numbers | {"WGMMA": self.wgmma})


@dataclass(frozen=True)
class MonarchWeights(_Both, OneSpread):
    """The pass that puts both weights in the order in which the way back reads them."""

    chain: Chain
    dtype: str
    gpu: Gpu

    threads = 256
    shared = 0
    us = 3.0
    reads, writes = "x", "s0"  # beside s2; s0 is the way back's to write
    leaves = "prepared"

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.prepared_bytes

    def sum_bytes(self, blocks: int) -> int:
        return self.prepared_bytes

    @property
    def split(self) -> int:
        return min(self.prepared_bytes // (16 * self.threads), 2 * self.gpu.sms)

    @property
    def prepared_bytes(self) -> int:
        """Bytes of both weights as prepared."""
        first, second = self.both
        return second.p * second.inner * (_slabs(second.q * self.size) * 128 + first.p * self.size)

    def __str__(self) -> str:
        return f"monarch weights in another order: {self.prepared_bytes} bytes"

    header = "monarch_weights"

    @property
    def told(self) -> list[str]:
        return self.lines({"THREADS": self.threads})


@dataclass(frozen=True)
class MonarchBack(_Both):
    """The pass over grad_y that makes the gradient of x and leaves grad_y turned, tiled: a block has 16 units and 64
    samples, with `cluster` blocks that turn grad_y for each other. `us` is the time predicted."""

    chain: Chain
    dtype: str
    slots: int  # of an output group
    firsts: int  # of the first weights for four of them
    turners: int  # warps that turn grad_y
    depth: int  # of 16 bits: samples in shared memory for each of these
    batch: int
    gpu: Gpu
    us: float = 0.0

    units_per_sample = 1
    units_per_block = 64
    reads, writes = "s0", "y"
    leaves = "state"
    reads_prepared = True

    @property
    def scratch(self) -> tuple[int, int, int]:
        return self.turned_bytes, 0, 0

    def outputs(self, batch: int) -> tuple[int, ...]:
        return batch * self.chain.in_features * self.size, batch * self.turned_bytes

    def written(self, batch: int) -> int:
        """Bytes written, without what is behind short rows of a slab."""
        return batch * (self.chain.in_features + self.chain.out_features) * self.size

    @property
    def threads(self) -> int:
        return 384 if self.size == 2 else 512

    @property
    def split(self) -> int:
        return self.all_units // UNITS

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def turned_bytes(self) -> int:
        """Bytes of grad_y turned, for one sample."""
        return self.both[1].inner * _slabs(self.both[1].q * self.size) * 128

    @kept
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        first, second = self.both
        slot = 2 * _slabs(second.q * self.size) * 64 * 128
        others = self.turners * self.depth * (self.chain.out_features * 2 + 8) if self.size == 2 else 0
        return self.slots * (slot + 16) + self.firsts * (UNITS * first.p * 16 * self.size + 16) + others + 16 + 1024

    def us_of(self, batch: int) -> float:
        return _back_time(replace(self, batch=batch))

    @property
    def details(self) -> str:
        first, second = self.both
        tiles = f"tiles of {self.units_per_block} samples and {4 * UNITS} of {second.p}"
        back = f"{second.q}→{second.p}, {first.q}→{first.p} at once, and grad_y turned"
        return f"{back}, {tiles}, {self.slots} slots of {second.inner} groups"

    header = "monarch_back"

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {32, self.both[0].p})

    @property
    def told(self) -> list[str]:
        numbers = {"GRAD": 2, "SLOTS": self.slots, "FIRSTS": self.firsts, "BLOCKS": self.cluster}
        return self.lines(numbers | {"TURNERS": self.turners, "DEPTH": self.depth})


def _slabs(row: int) -> int:
    return -(-row // 128)


def all_gradients(
    chain: Chain, dtype: str, batch: int, gpu: Gpu
) -> tuple[MonarchWeights, MonarchBack, MonarchGradient, Reduction] | None:
    """The passes, each the fastest by prediction; None if this is no chain for them."""
    if not gpu.wgmma or batch <= 64 or not _takes(chain, dtype):
        return None
    of_weights = fastest(gradient_tilings(chain, dtype, batch, gpu))
    back = _back(chain, dtype, batch, gpu)
    if not of_weights or not back:
        return None
    return MonarchWeights(chain, dtype, gpu), back, of_weights, Reduction(of_weights)


def _takes(chain: Chain, dtype: str) -> bool:
    """Whether it is a Monarch layer whose state is the largest of all."""
    if dtype not in DTYPES or not chain.is_monarch:
        return False
    first, second = chain.contractions
    rank, piece = first.q // second.inner, 16 // ELEMENT_BYTES[dtype]
    if rank not in RANKS or second.p not in (4 * UNITS, 8 * UNITS):
        return False
    run = second.q // piece  # 16 bytes of a row of grad_y turned
    if run > 8 and run % 8:
        return False
    if second.inner % max(4, piece) or first.p % 8 or second.q % 16 or 32 // rank * first.p > 4 * MOST_SUMS_BACK:
        return False
    return first.outer * first.q >= chain.in_features + chain.out_features


def gradient_tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchGradient]:
    first, second = chain.contractions
    if 2 * (first.p + second.q) > MOST_SUMS:
        return
    flags = (True, False) if ELEMENT_BYTES[dtype] == 2 and second.q <= 64 else (False,)
    ways = itertools.product(flags, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (6, 4, 3, 2), (1, 2))
    for of_groups, wk, wl, groups, slots, steps in ways:
        plan = MonarchGradient(chain, dtype, wk, wl, groups, 16 * steps, slots, of_groups, batch, gpu)
        if slots < groups + 1 or (of_groups and (wk % 4 or groups > 1)):
            continue
        if wk * wl * groups != WARPS or plan.all_units % (4 * wk) or second.inner % (4 * wl):
            continue
        if 16 * wk % plan.rank == 0 and plan.shared <= gpu.shared:
            yield replace(plan, us=_gradient_time(plan))


def _gradient_time(plan: MonarchGradient) -> float:
    """Microseconds: multiprocessors take chunks in turn, and what warps read and multiply partly overlaps."""
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    chunks = -(-plan.batch // plan.samples)
    each = -(-chunks // plan.most) * -(-plan.split // gpu.sms)
    loaded = plan.samples * (plan.columns + 4 * plan.wl * second.q) * size
    warps = plan.wk * plan.wl
    part = (0.5 if plan.samples % 32 == 0 else 0.6) if plan.wgmma else 1.0  # what warps do not read together
    read = (plan.samples * 8 + plan.samples // 16 * 64) * (first.p + second.q) * size * part
    products = 2 * 2 * plan.samples * 64 * (first.p + second.q) / (0.6 * 8.9e6 * (1 if size == 2 else 0.5))
    chunk = max(warps * read / gpu.shared_bytes, loaded / (0.8 * gpu.l2_bytes)) + 0.5 * warps * products + OWN_COPY_US
    ends = 2 * plan.most * plan.weights * 4 / (gpu.l2_bytes * gpu.sms)
    return 6.0 + each * chunk + ends


def _back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchBack | None:
    copies = ((2, 2), (2, 1), (1, 1)) if ELEMENT_BYTES[dtype] == 2 else ((6, 1),)
    for firsts, (turners, depth), slots in itertools.product((3, 2), copies, range(MOST_SLOTS, 3, -1)):
        plan = MonarchBack(chain, dtype, slots, firsts, turners, depth, batch, gpu)
        if plan.shared <= gpu.shared and (slots > 5 or firsts == 2):
            return replace(plan, us=_back_time(plan))
    return None


def _back_time(plan: MonarchBack) -> float:
    """Microseconds: of an output group, what L2 gives, and what shared memory moves; before them, a tile is turned."""
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    each = -(-plan.batch // (plan.units_per_block * max(1, gpu.sms // plan.split)))
    grad, weights = plan.units_per_block * second.q * size, 4 * UNITS * (first.p + second.q) * size
    loaded = grad / plan.cluster + weights
    moved = grad + weights + 2 * (grad + weights // 2) + 2 * weights
    turn = 2 * grad * second.inner / plan.cluster / gpu.memory_bytes
    return 5.0 + turn + each * second.inner * max(loaded / (0.8 * gpu.l2_bytes), moved / gpu.shared_bytes)
