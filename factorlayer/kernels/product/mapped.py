"""Passes of one contraction by rows in tf32 on Hopper, of tensors that the copy engine reads by maps, rounding them:
mapped.cuh, its tiles and source.

Products, groups and layouts are those of streamed.py; what maps cannot describe is left to wide.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import Pass, tensor_map
from factorlayer.kernels.product.streamed import Product

ROWS = 128  # of a tile
THREADS = 384  # two warpgroups of consumers, and one of which a thread asks for what is copied
MOST_SLOTS = 8
MOST_SUMS = 192  # registers of a thread
MORE, FEWER = 232, 40  # registers of a consumer's and a producer's thread
LARGEST = 1 << 31  # of a map's size
SLAB = 32  # elements of k
SPAN = 2  # tiles of rows whose blocks run side by side


@dataclass(frozen=True)
class Mapped(Pass):
    """A pass, tiled: products of 128 by n for `held` groups, by clusters of `cluster` blocks that share rows of x.
    `us` is the time predicted."""

    product: Product
    n: int
    held: int
    cluster: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = THREADS

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def slot_bytes(self) -> int:
        return 128 * (ROWS + self.n)

    @kept
    def slots(self) -> int:
        return min(MOST_SLOTS, (self.gpu.shared - 1024) // (self.slot_bytes + 16))

    @kept
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return self.slots * (self.slot_bytes + 16) + 1024

    @property
    def tiles(self) -> int:
        """Tiles of a cluster, for its rows."""
        p = self.product
        return -(-p.contraction.q // (self.n * self.cluster)) * (p.groups // self.held)

    @property
    def split(self) -> int:
        return self.cluster

    @property
    def units_per_sample(self) -> int:
        return self.product.outer

    @property
    def units_per_block(self) -> int:
        """Rows that are worth a block: each takes any tiles, so that these only count blocks. Of a whole tile's rows,
        blocks would be fewer than tiles where the last one is hardly begun."""
        return max(1, ROWS // (2 * self.tiles))

    @property
    def most_samples(self) -> int:
        return LARGEST // self.product.outer

    @property
    def output_bytes(self) -> int:
        return self.product.y_features * 4

    @kept
    def lines(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Of the weights' map: sizes behind k but the last one, rows of the weight from one to the next along each,
        lines' lengths in runs, and rows from one line's first to the next one's. A thread has columns 8 n + 2 t + e of
        the products. Of one group, 16 n + 8 m + 2 t + e are made of column 16 n + 4 t + 2 e + m; of two, they are as
        they come; of more, they are made of 8 n + 4 e + t."""
        p, q = self.product, self.product.contraction.q
        if self.held > 1:
            sizes, steps = ((8, 1), (1, 8)) if self.held == 2 else ((2, 4), (4, 1))
            return (*sizes, q // 8), (*steps, 8), q // 8, 0
        step_a, step = p.row_steps
        if p.b == q or p.b == 16:
            return (8, 2, q // 16), (2 * step, step, step_a if p.b == 16 else 16 * step), q // 16, 0
        return (8, 2, p.b // 16), (2 * step, step, 16 * step), p.b // 16, step_a

    @property
    def run(self) -> int:
        return self.lines[0][0] * self.lines[0][1]

    @property
    def box(self) -> int:
        """Runs of a box of the weights' map."""
        wanted, line = self.n // self.run, self.lines[2]
        return wanted if line * self.run == self.product.contraction.q else math.gcd(wanted, line)

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps of x and of the weights."""
        p, c = self.product, self.product.contraction
        row = p.x_features if p.outer == 1 else c.p
        x = (c.p, p.groups, p.outer, 1, 1), (c.p, row, c.p, c.p), (SLAB, 1, ROWS // self.cluster, 1, 1)
        sizes, steps, _, _ = self.lines
        strides = (*(step * c.p for step in steps), c.p)
        weights = (c.p, *sizes, p.groups * c.q), strides, (SLAB, *sizes[:2], self.box, 1)
        return tensor_map("x", "tf32", *x), tensor_map(c.weight, "tf32", *weights)

    def us_of(self, batch: int) -> float:
        return time(replace(self, batch=batch))

    @property
    def details(self) -> str:
        p, c = self.product, self.product.contraction
        groups = f" for {self.held} of {p.groups} groups" if p.groups > 1 else ""
        share = f", {self.cluster} blocks share x" if self.cluster > 1 else ""
        return f"{c.p}→{c.q} by rows, tiles of {ROWS}×{self.n} sums{groups}{share}, {self.slots} slots of {SLAB}"

    @property
    def products(self) -> str:
        return wgmma(self.product.dtype, {self.n})

    @property
    def told(self) -> list[str]:
        p, c = self.product, self.product.contraction
        _, _, line, line_step = self.lines
        told = p.told | {"INNER": c.inner, "ROUND_Y": p.ours_out, "SLABS": p.slabs}
        told |= {"SPAN": SPAN, "N": self.n, "HELD": self.held, "BLOCKS": self.cluster, "SLOTS": self.slots}
        told |= {"MORE": MORE, "FEWER": FEWER, "RUN": self.run, "BOX": self.box, "LINE": line, "LINE_STEP": line_step}
        return [*constants({"Element": "float", **told}), activation_type(p.activation, p.dtype, p.scalars)]


def tile(product: Product, batch: int, gpu: Gpu) -> Mapped | None:
    """The fastest tiling by prediction; None if this is no product for it."""
    found = [(time(plan), -plan.n, plan.cluster, plan) for plan in tilings(product, batch, gpu)]
    if not found:
        return None
    us, *_, plan = min(found)
    return replace(plan, us=us)


def tilings(product: Product, batch: int, gpu: Gpu) -> Iterator[Mapped]:
    c, b, fast = product.contraction, product.b, product.fast
    if not gpu.wgmma or product.dtype != "tf32" or not product.by_rows or product.reads_beside:
        return
    if product.x_step > 1 or product.terms > 1 or c.p % 4 or c.q % 16 or product.weights >= LARGEST:
        return
    if batch * product.outer < ROWS:
        return
    if b % 16 == 0:
        holdings = [1]
    else:  # groups that take turns, element by element; eight of 48 were slower than wide, of 16 and of 64 faster
        holdings = [held for held in (2, 4, 8) if b == 1 and (fast == held or (held == 8 and fast in (16, 32, 64)))]
    widths = {-(-c.q // (tiles * 16)) * 16 for tiles in range(-(-c.q // 256), 1 + c.q // 16)}
    for held, n in itertools.product(holdings, sorted(widths)):
        for cluster in (1, 2) if n < c.q and gpu.sms > 1 else (1,):
            if held * n // 2 <= MOST_SUMS:
                yield Mapped(product, n, held, cluster, batch, gpu)


def time(plan: Mapped) -> float:
    """Microseconds: multiprocessors take turns at tiles, and nothing runs beside stores. Numbers fitted to an H200."""
    p, gpu, c = plan.product, plan.gpu, plan.product.contraction
    clusters = -(-plan.batch * p.outer // ROWS) * plan.tiles
    each = -(-clusters // (gpu.sms // plan.cluster))
    # Of a slab: products, what L2 gives, what shared memory is written and read
    products = 4 * plan.n / 1.65e3
    load = 128 * (ROWS / plan.cluster + plan.n) / (95e3 if plan.held > 4 else 105e3)
    shared = (plan.slot_bytes + 128 * (ROWS + 2 * plan.n)) / 265e3
    boxes = 0.09 * plan.n / (plan.run * plan.box)
    slab = max(products, load, shared, boxes)
    store = 4 * ROWS * plan.n * plan.held / (32e3 if plan.held > 4 or p.slabs else 45e3)  # several for a sector
    busy = each * (plan.held * (-(-c.p // SLAB) * slab + 0.05) + store)
    busy *= 1.03 if plan.cluster > 1 or c.q % plan.n else 1
    moved = 4 * plan.batch * (p.x_features + p.y_features) + 4 * p.weights
    memory = 1.1 * moved / (gpu.memory_bytes * gpu.sms)
    return 2.2 + max(busy, memory) + 0.1 * min(busy, memory)
