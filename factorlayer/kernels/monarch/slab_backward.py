"""Passes that make both gradients of an untied contraction at one visit, in tf32 on Hopper:
slab_backward.cuh, its tiles and source.

For groups of up to 256 q's, of grad_y that lies by slabs of 32 samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.code import constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import AtOneVisit
from factorlayer.kernels.passes import MOST_BLOCKS, tensor_map, timed
from factorlayer.maths.chain import Chain

UNIT = 64  # samples
COLUMNS = 64  # p's of a block
LEAST_UNITS = 4  # that are worth a block
MOST_SLOTS = 12
THREADS = 384  # a warpgroup for either gradient, and one of which a thread asks for what is copied
MORE, FEWER = 232, 40  # registers of a consumer's and a producer's thread
START_US = 4.2  # of a block: its weights, the first units, and its sums
MOST_SLABS = 1 << 24


@dataclass(frozen=True)
class SlabBackward(AtOneVisit):
    """A pass: a block has 64 p's of a group. `us` is the time predicted."""

    chain: Chain
    gpu: Gpu
    batch: int
    us: float = 0.0

    dtype = "tf32"
    threads = THREADS
    units_per_block = LEAST_UNITS * UNIT

    @property
    def weight_bytes(self) -> int:
        return -(-self.contraction.q // 32) * COLUMNS * 128

    @property
    def slot_bytes(self) -> int:
        return 128 * (self.contraction.q + COLUMNS)

    @kept
    def slots(self) -> int:
        room = (self.gpu.shared - 1024 - self.weight_bytes) // (self.slot_bytes + 16)
        return min(MOST_SLOTS, room // 2 * 2)

    @property
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return self.weight_bytes + self.slots * (self.slot_bytes + 16) + 1024

    @property
    def tiles(self) -> int:
        return self.groups * -(-self.contraction.p // COLUMNS)

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps of x and of grad_y."""
        c = self.contraction
        x = (c.p, self.groups, 1, 1, 1), (c.p, *(self.groups * c.p,) * 3), (32, 1, 32, 1, 1)
        rows = (c.inner, 1, c.q * c.inner, self.groups * c.q)
        grad = (32, c.q, c.inner, c.outer, MOST_SLABS), tuple(32 * n for n in rows), (32, c.q, 1, 1, 1)
        return tensor_map("x", "tf32", *x), tensor_map(1, "tf32", *grad)

    def us_of(self, batch: int) -> float:
        """Each block is bound by its slowest unit, all of them by memory. Rates as for wide.py."""
        c, gpu = self.contraction, self.gpu
        units = -(-batch // UNIT)
        parts = min(-(-units // LEAST_UNITS), self.most)
        products = 1.15 * 2 * UNIT * COLUMNS * c.q / 1024 / gpu.rates.cycles
        read = 4 * self.slot_bytes + 512 * c.q  # written, and read as left operands; as right ones
        moved = 256 * (c.q + COLUMNS) + 4 * UNIT * COLUMNS  # through L2
        unit = max(products, 1.15 * read / 128 / gpu.rates.cycles, moved / gpu.l2_bytes) + 0.1
        busy = -(-parts * self.tiles // gpu.sms) * (-(-units // parts) * unit + START_US)
        memory = 4 * batch * self.groups * (2 * c.p + c.q) / (gpu.memory_bytes * gpu.sms)
        summed = parts * self.weights * 4 / (gpu.l2_bytes * gpu.sms)
        return 3.2 + max(busy, memory) + 0.1 * min(busy, memory) + summed

    title = "slab backward"

    @property
    def details(self) -> str:
        c, held = self.contraction, f"{COLUMNS} of its columns for one of {self.groups} groups"
        return f"{c.q}×{c.p} at one visit, {held}, {self.slots} slots of 32, {self.for_a_tile}"

    @property
    def products(self) -> str:
        return wgmma("tf32", {COLUMNS, self.contraction.q})

    @property
    def told(self) -> list[str]:
        c, run = self.contraction, self.chain.turn[1] if self.chain.turn else self.contraction.p
        numbers = {"P": c.p, "Q": c.q, "OUTER": c.outer, "INNER": c.inner, "SLOTS": self.slots, "MOST": self.most}
        return constants(numbers | {"RUN": run, "MORE": MORE, "FEWER": FEWER, "SLABS_OUT": self.chain.slabs > 1})


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> SlabBackward | None:
    """The pass; None if this contraction is nothing for it."""
    if not gpu.wgmma or batch <= UNIT or not _takes(chain, dtype):
        return None
    plan = SlabBackward(chain, gpu, batch)
    fits = plan.slots >= 4 and plan.tiles <= min(gpu.sms, MOST_BLOCKS)
    return timed(plan, batch) if fits else None


def _takes(chain: Chain, dtype: str) -> bool:
    """Whether it is one untied contraction, whose x lies by groups and grad_y by slabs."""
    c, *more = chain.contractions
    if dtype != "tf32" or not chain.slabs or more or c.tied or chain.rank > 1 or chain.mixed:
        return False
    if c.p % 4 or c.q % 8 or c.q > 256 or (c.inner > 1) != chain.x_turned:
        return False
    if chain.turn is None:
        return c.inner == 1 or chain.slabs > 1
    _, rows, columns = chain.turn
    return chain.slabs == 1 and columns == c.inner and rows % 8 == 0 and c.p % rows == 0
