"""Passes that make both gradients of an untied contraction at one visit: untied_backward.cuh, its tiles and
source.

For groups whose sums, of all q's, a block's registers can hold: up to 256 q's. In 16 bits on Hopper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import SUM_BYTES, AtOneVisit
from factorlayer.kernels.passes import MOST_BLOCKS, fastest, tensor_map
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

DTYPES = ("bfloat16", "float16")
SLAB_BYTES = 64 * 128  # of 64 columns
ROWS = 64  # of a chunk
LEAST_CHUNKS = 4  # that are worth a block
MOST_SLOTS = 6
PRODUCERS = 128  # threads
# By consumers: registers of their threads and of a producer's, where these are not what all get; at most for sums.
REGISTERS = {1: (0, 0, 192), 2: (232, 40, 184), 3: (160, 24, 128)}


@dataclass(frozen=True)
class UntiedBackward(AtOneVisit):
    """A pass, tiled: a block has `together` groups, of each `n` * `wn` p's; a group's `wm` x `wn` warpgroups have
    64 `height` q's and n p's each. `us` is the time predicted."""

    chain: Chain
    dtype: str
    together: int
    wm: int
    wn: int
    height: int
    n: int
    gpu: Gpu
    batch: int
    paired: bool = False  # blocks, in clusters, which add up their sums before they write them
    in_turns: bool = False  # a group's warpgroups make x's gradient of a chunk each
    shared_rows: bool = False  # blocks, in clusters, which read grad_y together
    us: float = 0.0

    waits = False

    @property
    def bp(self) -> int:
        return self.n * self.wn

    @property
    def left(self) -> int:
        """Slabs of a group's q's."""
        return self.height * self.wm

    @property
    def right(self) -> int:
        """Slabs of a group's p's."""
        return -(-self.bp // 64)

    @property
    def consumers(self) -> int:
        return self.together * self.wm * self.wn

    @property
    def share(self) -> int:
        """Columns of x's gradient of a warpgroup."""
        return self.bp // (1 if self.in_turns else self.wm * self.wn)

    @property
    def sums(self) -> int:
        """Sums of a thread, with those of a chunk."""
        return (self.height * self.n + self.share) // 2

    @property
    def weight_bytes(self) -> int:
        return self.together * self.left * self.right * SLAB_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.together * (self.left + self.right) * SLAB_BYTES

    @kept
    def slots(self) -> int:
        return min(MOST_SLOTS, (self.gpu.shared - 1040 - self.weight_bytes) // (self.slot_bytes + 16))

    @property
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return self.weight_bytes + self.slots * (self.slot_bytes + 16) + 1040

    @property
    def threads(self) -> int:
        return 128 * self.consumers + PRODUCERS

    @property
    def tiles(self) -> int:
        return self.groups // self.together * -(-self.contraction.p // self.bp) * (1 + self.paired)

    @property
    def units_per_block(self) -> int:
        return LEAST_CHUNKS * ROWS * (1 + self.paired)

    @property
    def fits(self) -> bool:
        whole = self.share % (64 if self.wm == 2 and not self.in_turns else 32) == 0
        held = whole and self.sums <= REGISTERS[self.consumers][2]
        given = self.together * self.left * self.bp * 64 * 2
        held = held and (not self.paired or (self.n % 32 == 0 and given <= self.slots * self.slot_bytes))
        held = held and (not self.shared_rows or -(-self.contraction.p // self.bp) % 2 == 0)
        return held and self.slots >= 2 and self.tiles <= min(self.gpu.sms, MOST_BLOCKS)

    @property
    def parts(self) -> int:
        """Parts of a group's p's in x's map, where all blocks have as many; else p's are counted from the group's
        first."""
        return 1 if self.contraction.p % self.bp else self.contraction.p // self.bp

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps of x and of grad_y."""
        c = self.contraction
        part, rows = c.p // self.parts, ROWS // (1 + self.shared_rows)
        x = (
            (part, self.parts, 1, self.groups, 1),
            (part, self.groups * c.p, c.p, self.groups * c.p),
            (64, 1, ROWS, 1, 1),
        )
        row = self.groups * c.q
        grad = (c.q, self.groups, 1, 1, 1), (c.q, row, row, row), (64, 1, rows, 1, 1)
        return tensor_map("x", self.dtype, *x), tensor_map("1*", self.dtype, *grad)

    def us_of(self, batch: int) -> float:
        """Each block is bound by its slowest unit, all of them by memory. Rates as for wide.py."""
        c, gpu = self.contraction, self.gpu
        chunks, pair = -(-batch // ROWS), 1 + self.paired
        parts = min(-(-chunks // (LEAST_CHUNKS * pair)), self.most)
        steps = -(-c.q // 16)
        shares, backs = self.consumers // self.together, self.bp // self.share  # warpgroups with sums, and with x's
        products = 2.3 * self.together * (shares * 4 * self.height * self.n + steps * self.bp) / 4 / gpu.rates.cycles
        read = 32 * self.together * (shares * 4 * self.height * (64 + self.n) + backs * steps * (64 + self.share))
        read += self.slot_bytes
        moved = self.slot_bytes + self.together * ROWS * self.bp * self.size  # through L2
        chunk = max(products, 1.15 * read / 128 / gpu.rates.cycles, moved / gpu.l2_bytes) + 0.1
        sums = self.together * self.left * 64 * self.bp * SUM_BYTES[self.dtype] / pair
        busy = -(-chunks // (parts * pair)) * chunk + self.weight_bytes / 60e3 + sums / 40e3 + 0.2 * self.paired
        memory = self.size * batch * self.groups * (2 * c.p + c.q) / (gpu.memory_bytes * gpu.sms)
        memory *= 1.7 if c.p > 2 * self.bp else 1  # rows in many parts
        again = -(-c.p // self.bp) / (1 + self.shared_rows) - 1  # grad_y, from L2, which is hidden in part
        memory += 0.75 * again * self.size * batch * self.groups * c.q / (gpu.l2_bytes * gpu.sms)
        summed = parts * self.weights * SUM_BYTES[self.dtype] / (gpu.l2_bytes * gpu.sms)
        # Half of what they push out of L2 goes to memory while others still multiply
        summed += parts * self.weights * SUM_BYTES[self.dtype] / (2 * gpu.memory_bytes * gpu.sms)
        return 3.2 + max(busy, memory) + 0.1 * min(busy, memory) + summed

    title = "untied backward"

    @property
    def details(self) -> str:
        c, slots = self.contraction, f"{self.slots} slots of {ROWS}"
        held = f"{self.bp} of its columns for {self.together} of {self.groups} groups"
        further = ", in pairs" * self.paired + ", rows for two blocks" * self.shared_rows
        return f"{c.q}×{c.p} at one visit, {held}, {slots}, {self.for_a_tile}{further}"

    @property
    def cluster(self) -> int:
        return 2 if self.paired or self.shared_rows else 1

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {self.n, self.share}, turned=True)

    @property
    def told(self) -> list[str]:
        c = self.contraction
        more, fewer, _ = REGISTERS[self.consumers]
        _, rows, columns = self.chain.mixed or (1, c.q, 1)
        told: Told = {"Element": ELEMENT[self.dtype], "P": c.p, "Q": c.q, "GROUPS": self.groups, "INNER": c.inner}
        told |= {"RUN": self.chain.turn[1] if self.chain.turn else c.p, "MIXED_ROWS": rows, "MIXED_COLUMNS": columns}
        told |= {"TOGETHER": self.together, "WM": self.wm, "WN": self.wn, "HEIGHT": self.height, "N": self.n}
        told |= {"SLOTS": self.slots, "PARTS": self.parts, "MOST": self.most, "MORE": more, "FEWER": fewer}
        return constants(told | {"PAIRED": self.paired, "IN_TURNS": self.in_turns, "SHARED": self.shared_rows})


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> UntiedBackward | None:
    """The fastest tiling by prediction; None if this is nothing for it."""
    return fastest(tilings(chain, dtype, batch, gpu), batch)


def _takes(chain: Chain, dtype: str) -> bool:
    """Whether it is one untied contraction, whose states lie by groups, and x's gradient in runs of whole sectors."""
    c, *more = chain.contractions
    if dtype not in DTYPES or more or c.tied or c.p % 8 or c.q % 8 or chain.rank > 1:
        return False
    if chain.mixed and (c.inner > 1 or math.prod(chain.mixed[1:]) != c.q):
        return False
    if chain.turn is None:
        return c.inner == 1
    _, rows, columns = chain.turn
    return chain.x_turned and columns == c.inner and rows % 16 == 0 and c.p % rows == 0


def tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[UntiedBackward]:
    if not gpu.wgmma or batch <= ROWS or not _takes(chain, dtype):
        return
    (c,) = chain.contractions
    groups = c.outer * c.inner
    for together, (wm, wn) in itertools.product((1, 2, 3), ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))):
        if together * wm * wn not in REGISTERS or groups % together:
            continue
        height = -(-c.q // (64 * wm))
        further = {96} if wm == 3 and height == 1 else {round_up(c.p, 32)} if wm * wn == 1 else set()
        for n in {64, 128, 192, 256} | further:
            if n <= 256 and n * wn < c.p + 64:
                clusters = ((False, False), (True, False), (False, True)) if n * wn < c.p else ((False, False),)
                for (paired, shared), in_turns in itertools.product(
                    clusters, (False, True) if wm * wn > 1 else (False,)
                ):
                    tiling = together, wm, wn, height, n
                    plan = UntiedBackward(chain, dtype, *tiling, gpu, batch, paired, in_turns, shared)
                    if plan.fits:
                        yield plan
