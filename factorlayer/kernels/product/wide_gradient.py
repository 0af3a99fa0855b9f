"""Gradients of weights on Hopper's warpgroup instructions: wide_gradient.cuh, its tiles and source.

Where nothing lies behind the mode, so that the rows of both states are contiguous. All others are left to gradient.py,
as doubles are. Of rows that 16 bytes do not divide a block has those that begin at the same place in a piece of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import NO_SUM, SUM_BYTES, States, TileSums, reduction_us
from factorlayer.kernels.passes import MOST_BLOCKS, fastest
from factorlayer.kernels.product.wide import every_of, reach
from factorlayer.kernels.work import round_up
from factorlayer.maths.spec import Contraction

DTYPES = ("float32", "tf32", "bfloat16", "float16")
SLAB_BYTES = 64 * 128  # of 64 columns
PRODUCERS = 128  # threads
MOST_LOADED = 6  # slabs on their way through the producers' registers
MOST_SLOTS = 8
# Bytes that a multiprocessor gets from L2 in a microsecond, and stores of sums; times what loads take of rows that
# begin within 16 bytes, whose sectors come for others as well; what 16 rows of a warp's sums take by way of shared
# memory, and a chunk of tf32 and each slab of it that goes through registers: fitted to 57 gradients on one H100
LOAD_RATE, STORE_RATE, MISPLACED, STAGED_US = 55e3, 31e3, 1.2, 1.0
TURNED_US, TURNED_SLAB_US = 0.38, 0.16
START_US, TILE_US = 2.2, 1.0  # of a pass, and of each tile of a block
MOST_SUMS_BYTES = 128 << 20  # of all blocks, where rows begin at several places
# By bytes of an element and consumers: registers of their threads and of a producer's, where these are not what all
# get; at most for sums.
REGISTERS = {
    2: {1: (0, 0, 192), 2: (232, 40, 192), 3: (152, 40, 96)},
    4: {1: (0, 0, 192), 2: (0, 0, 128)},
}
# Where consumers load their left operand: registers for sums, without a bias and with one; those of a thread of each of
# two consumers and the producers together; what each needs beside sums, operands and slabs.
MOST_SUMS_LOADING = {1: 192, 2: 144}, {1: 160, 2: 144}
TOGETHER, OTHER_REGISTERS = 504, 40


@dataclass(frozen=True)
class WideGradient(TileSums):
    """A pass, tiled: `wm` x `wn` warpgroups have 64 `height` q's and n p's each, and a block at least `least` chunks,
    where there are enough. `us` is the time predicted."""

    contraction: Contraction
    dtype: str
    wm: int
    wn: int
    height: int
    n: int
    least: int
    gpu: Gpu
    batch: int
    bias: bool = False
    mixed: tuple[int, int] | None = None  # q's lie as [r, c] in the weight, and come as [c, r]
    us: float = 0.0
    grad: int = 0  # the parameter that grad_y is
    stays: bool = False
    states: States = NO_SUM

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return 128 // self.size

    @property
    def is_split(self) -> bool:
        return self.dtype == "float32"

    @property
    def loads_left(self) -> bool:
        """Whether the left operand goes through consumers' registers, from rows of grad_y: no one turns them."""
        return self.dtype == "tf32"

    @property
    def registers(self) -> tuple[int, int, int]:
        if not self.loads_left:
            return REGISTERS[self.size][self.consumers]
        most = MOST_SUMS_LOADING[self.bias][self.consumers]
        if self.consumers == 1:
            return 0, 0, most
        left = 8 * self.height * (1 if self.height > 2 else 2)  # operands of two groups of products
        more = round_up(self.sums + left + OTHER_REGISTERS, 8)
        if self.is_shifted and more == TOGETHER // 3:
            more += 8  # where what all get is just enough, places in pieces are too much
        return (more, TOGETHER - 2 * more, most) if more > TOGETHER // 3 else (0, 0, most)

    @kept
    def held(self) -> int:
        """Chunks on their way through the producers' registers."""
        if not self.loads_left:
            return 1
        room, right = self.registers[1] or TOGETHER // 3, -(-self.bn // 64)
        return 2 if 32 * right + OTHER_REGISTERS <= room and right < 4 else 1

    @property
    def slabs(self) -> int:
        """Slabs of both states."""
        return self.bm // 64 + -(-self.bn // 64)

    @property
    def sums(self) -> int:
        """Sums of a thread, with those of one chunk."""
        return self.height * self.n // 2 * (2 if self.is_split else 1)

    @property
    def bm(self) -> int:
        return 64 * self.height * self.wm

    @property
    def bn(self) -> int:
        return self.n * self.wn

    @property
    def consumers(self) -> int:
        return self.wm * self.wn

    @property
    def slot_bytes(self) -> int:
        return SLAB_BYTES * self.slabs * (2 if self.is_split else 1)

    @property
    def has_ones(self) -> bool:
        """Whether a bias is summed by products with ones; of tf32 its sums are added up unrounded."""
        return self.bias and not self.loads_left

    @property
    def ones_bytes(self) -> int:
        return 2048 if self.has_ones else 0

    @kept
    def every(self) -> int:
        """Rows from one that begins at some place in a piece to the next one that does, of both states."""
        c = self.contraction
        groups = 1 if c.tied else c.outer
        return max(every_of(features * groups, self.size) for features in (c.p, c.q))

    @kept
    def is_shifted(self) -> bool:
        """Whether rows, or those of a group, begin within 16 bytes."""
        return any(features * self.size % 16 for features in (self.contraction.p, self.contraction.q))

    @property
    def folds(self) -> int:
        return self.every

    @kept
    def slots(self) -> int:
        return min(MOST_SLOTS, (self.gpu.shared - 1024 - self.ones_bytes) // (self.slot_bytes + 16))

    @property
    def fits(self) -> bool:
        c, held = self.contraction, self.sums <= self.registers[2] and (self.height != 3 or self.loads_left)
        loaded = -(-self.bn // 64) if self.loads_left else self.slabs
        held = held and (self.size == 2 or loaded <= MOST_LOADED)
        bounded = self.every == 1 or self.every * c.weight_size * SUM_BYTES[self.dtype] <= MOST_SUMS_BYTES
        parted = self.across == 1 or self.bn % 64 == 0  # slabs belong to one tile
        bounded = bounded and not (self.is_shifted and self.states.terms > 1)  # where a term begins, samples say
        return held and bounded and parted and self.slots >= 2 and self.tiles <= MOST_BLOCKS

    @property
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return self.slots * (self.slot_bytes + 16) + self.ones_bytes + 1024

    @property
    def threads(self) -> int:
        return 128 * self.consumers + PRODUCERS

    @property
    def across(self) -> int:
        """Tiles of a row of the gradient."""
        return -(-reach(self.contraction.p, self.size) // self.bn)

    @property
    def weighted(self) -> int:
        """Groups, or terms, that have weights of their own."""
        return self.states.terms if self.contraction.tied else self.contraction.outer

    @kept
    def tiles(self) -> int:
        c = self.contraction
        return -(-reach(c.q, self.size) // self.bm) * self.across * self.weighted * self.every

    @property
    def units_per_sample(self) -> int:
        """Rows of a sample."""
        return self.contraction.outer if self.contraction.tied else 1

    @property
    def units_per_block(self) -> int:
        return self.least * self.chunk * self.every

    def us_of(self, batch: int) -> float:
        """Microseconds: each block is bound by its slowest unit, all of them by memory. Rates as for wide.py."""
        c, gpu = self.contraction, self.gpu
        rows = batch * self.units_per_sample
        chunks = -(-rows // (self.chunk * self.every))
        parts = min(-(-chunks // self.least), self.most)
        misplaced = MISPLACED if self.is_shifted else 1.0
        load = misplaced * self.slot_bytes / LOAD_RATE
        products = 2.3 * self.consumers * self.height * (self.n + 32 * self.has_ones) / gpu.rates.cycles
        read = self.slot_bytes + 128 * self.consumers * self.height * (64 + self.n)
        if self.loads_left:
            right = -(-self.bn // 64)
            turned = misplaced * (TURNED_US + TURNED_SLAB_US * right)
            load = max(load, turned, gpu.rates.wait_us / -(-chunks // parts))
            read += SLAB_BYTES * right
        elif self.size == 4:  # through registers, with one chunk on its way
            load = max(misplaced * self.slot_bytes / LOAD_RATE / (1 + self.is_split), gpu.rates.wait_us)
            read += SLAB_BYTES * self.slabs
        if self.is_split:
            products = 3 * products + (2 * self.height * self.n + 200) / self.consumers / gpu.rates.cycles
            read += 256 * self.consumers * self.height * (64 + self.n)
        chunk = max(load, products, 1.15 * read / 128 / gpu.rates.cycles)
        store = self.bm * self.bn * SUM_BYTES[self.dtype] / STORE_RATE + self.is_shifted * self.height * STAGED_US
        busy = -(-parts * self.tiles // gpu.sms) * (-(-chunks // parts) * chunk + store + TILE_US)
        memory = self.size * rows * (c.p + c.q) * self.weighted / (gpu.memory_bytes * gpu.sms)
        sums = 0 if self.is_whole else parts * self.every * self.weights * SUM_BYTES[self.dtype]
        summed = 2 * sums / (gpu.l2_bytes * gpu.sms)  # written, and read again
        return START_US + max(busy, memory) + 0.1 * min(busy, memory) + summed

    @property
    def details(self) -> str:
        c, bias = self.contraction, " and its bias" if self.bias else ""
        groups = "" if c.tied else f" of {c.outer} groups"
        every = f" of every {self.every}th" if self.every > 1 else ""
        slots = f"{self.slots} slots of {self.chunk} rows{every}"
        return f"{c.q}×{c.p}{bias}, tiles of {self.bm}×{self.bn} sums{groups}, {slots}, {self.for_a_tile}"

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {8, self.n} if self.has_ones else {self.n}, turned=self.size == 2)

    @property
    def told(self) -> list[str]:
        c = self.contraction
        more, fewer, _ = self.registers
        told: Told = {"Element": ELEMENT[self.dtype], "Result": self.result, "WEIGHT": self.grad, "P": c.p, "Q": c.q}
        told |= {"GROUPS": 1 if c.tied else c.outer, "ROWS": self.units_per_sample, "MORE": more, "FEWER": fewer}
        told |= {"WM": self.wm, "WN": self.wn, "HEIGHT": self.height, "N": self.n, "SLOTS": self.slots}
        told |= {"TERMS": self.states.terms, "X_TERM": self.states.x, "G_TERM": self.states.g}
        told |= {"EVERY": self.every, "HELD": self.held, "SPLIT": self.is_split, "BIAS": self.bias}
        told |= dict(zip(("MIXED_ROWS", "MIXED_COLUMNS"), self.mixed or (c.q, 1), strict=True))
        return constants(told)


def tile(
    contraction: Contraction,
    dtype: str,
    batch: int,
    gpu: Gpu,
    bias: bool = False,
    mixed: tuple[int, int] | None = None,
    states: States = NO_SUM,
) -> WideGradient | None:
    """The fastest tiling by prediction; None if this is no contraction for it."""
    found = fastest(tilings(contraction, dtype, batch, gpu, bias, states), batch, reduction_us)
    return replace(found, mixed=mixed) if found else None


def tilings(
    c: Contraction, dtype: str, batch: int, gpu: Gpu, bias: bool = False, states: States = NO_SUM
) -> Iterator[WideGradient]:
    if not gpu.wgmma or dtype not in DTYPES or c.inner > 1:
        return
    if bias and (c.outer > 1 or not c.tied or dtype == "float32"):
        return
    registers, step = REGISTERS[ELEMENT_BYTES[dtype]], 16 if ELEMENT_BYTES[dtype] == 2 else 32
    whole = round_up(reach(c.p, ELEMENT_BYTES[dtype]), step)
    for (wm, wn), height, least in itertools.product(((1, 1), (2, 1), (1, 2), (3, 1)), (1, 2, 3, 4), (1, 2, 4, 8, 16)):
        if wm * wn not in registers or (bias and height > 2):  # whose columns take too many registers
            continue
        widths = {n for n in (64, 128, 192, 256) if n < c.p + 64}
        widths |= {96} if wn == 2 and dtype == "tf32" else set()
        for n in widths | ({whole} if wn == 1 and whole <= 256 else set()):
            plan = WideGradient(c, dtype, wm, wn, height, n, least, gpu, batch, bias, states=states)
            if plan.fits:
                yield plan
