"""Passes of one contraction by rows in tf32 and 16 bits on Hopper, of tensors that the copy engine reads by maps:
mapped.cuh, its tiles and source.

Products, groups and layouts are those of streamed.py; what maps cannot describe is left to wide.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from factorlayer.activations.written import activation_type
from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import Pass, fastest, tensor_map
from factorlayer.kernels.product.streamed import SECTOR, ByWarpgroups, Product
from factorlayer.kernels.work import round_up

DTYPES = ("tf32", "bfloat16", "float16")
PRODUCERS = 128  # threads beside the consumers, of which one asks for what is copied
MOST_SLOTS = 8
SHAPES = (2, 1), (1, 1), (2, 2), (3, 1)  # warpgroups of consumers, and times 64 rows that each has
LEAST_SLOTS = 3
# By warpgroups of consumers: registers of a thread's sums, fewer where it has more rows than two, and of a consumer's
# and a producer's thread. ptxas has 128 for each where there are 512 threads, which a product's sums are among.
MOST_SUMS, MORE_PLACES = {1: 128, 2: 192, 3: 96}, 16
REGISTERS = {1: (0, 0), 2: (232, 40), 3: (160, 32)}
LARGEST = 1 << 31  # of a map's size
LEAST = 128  # rows that are worth it
SPAN = 2  # tiles of rows whose blocks run side by side
# Fitted to 768 tilings of 31 products of 300 to 150,000 samples on one H200: 76 % are within 10 % and 95 % within 20,
# and the one with the least prediction takes 1.01 of the best one's time. Nanoseconds for a row of a slab that a block
# asks for, by how many groups it holds up to; times more where rows begin within sectors; for one that it gets, if
# another asks for some; the matrix unit's cycles in a microsecond, by bytes of an element
ASKED_NS, WITHIN_SECTORS, GOT_NS, CYCLES = {4: 1.2, 8: 1.35}, 1.85, 1.15, {2: 1760, 4: 1650}
# Nanoseconds for a box; microseconds until the first slab is there, of a tile beside its stores, of part of a sector at
# a row's end, and of a cluster's start
BOX_NS, START_US, END_US, PART_US, CLUSTER_US = 90, 1.1, 0.16, 3.7e-3, 0.95
# Bytes that a tile stores in a microsecond, by bytes of a thread side by side; and where groups or samples take turns
STORED, STORED_IN_TURNS = {16: 37e3, 8: 25e3}, 32e3
BESIDE = 0.1  # of the shorter one of what multiprocessors and what memory takes


class ByMaps(Pass):
    """What passes have in common that read tensors by maps: tiles of 64 x `parts` rows for each of `consumers`
    warpgroups, and slots of what one thread asks for."""

    gpu: Gpu
    consumers: Any
    parts: Any
    slot_bytes: Any

    @property
    def threads(self) -> int:
        return int(128 * self.consumers + PRODUCERS)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return int(64 * self.consumers * self.parts)

    @kept
    def slots(self) -> int:
        return int(min(MOST_SLOTS, (self.gpu.shared - 1024) // (self.slot_bytes + 16)))

    @kept
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return int(self.slots * (self.slot_bytes + 16) + 1024)


@dataclass(frozen=True)
class Mapped(ByMaps, ByWarpgroups):
    """A pass, tiled: products of 64 x `consumers` x `parts` by n for `held` groups, by clusters of `across` blocks that
    share rows of x, or `down` that share columns. `us` is the time predicted."""

    batch: int
    gpu: Gpu
    n: int
    held: int = 1
    consumers: int = 2
    parts: int = 1
    across: int = 1
    down: int = 1
    us: float = 0.0

    @property
    def cluster(self) -> int:
        return self.across * self.down

    @property
    def sums(self) -> int:
        """Registers of a thread for sums."""
        return self.held * self.parts * self.n // 2

    @property
    def most_sums(self) -> int:
        return MOST_SUMS[self.consumers] - (MORE_PLACES if self.parts > 1 else 0)

    @property
    def shares(self) -> bool:
        """Whether blocks of a cluster have something to share: columns of one group, by whole runs, or rows of which
        they have other columns."""
        if self.down > 1:
            return self.is_apart and self.product.size == 2 and self.n % (2 * self.run) == 0
        return self.across == 1 or self.n < self.product.contraction.q

    @property
    def slab(self) -> int:
        """Elements of k in a slab of 128 bytes."""
        return 128 // self.product.size

    @property
    def slot_bytes(self) -> int:
        return 128 * (self.rows + self.n)

    @property
    def tiles(self) -> int:
        """Tiles of a cluster, for its rows."""
        p = self.product
        return -(-p.contraction.q // (self.n * self.across)) * (p.groups // self.held)

    @property
    def split(self) -> int:
        return self.cluster

    @property
    def units_per_block(self) -> int:
        """Rows that are worth a block: each takes any tiles, so that these only count blocks. Of a whole tile's rows,
        blocks would be fewer than tiles where the last one is hardly begun."""
        return max(1, self.rows * self.down // (2 * self.tiles))

    @property
    def most_samples(self) -> int:
        return LARGEST // self.product.outer

    @property
    def each(self) -> int:
        """Columns that a thread has side by side of two products' sums, one each: two such make 16 bytes, or 8."""
        if self.product.size == 4:
            return 2
        run = self.product.contraction.q if self.is_apart else self.product.b
        return 4 if self.n % 32 == 0 and run % (8 if self.is_apart else 32) == 0 else 2

    @property
    def is_apart(self) -> bool:
        """Whether all of a group's columns lie side by side in y: the last tile of them may share some with the one
        before it."""
        return self.product.b == self.product.contraction.q and self.held == 1

    @kept
    def lines(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Of the weights' map: sizes behind k but the last one, rows of the weight from one to the next along each,
        lines' lengths in runs, and rows from one line's first to the next one's. A thread has columns 8 n + 2 t + e of
        the products. Of one group, those of EACH n's are EACH columns side by side, behind those of 2 t + e; of two
        groups, they are as they come; of more, they are 8 n + 4 e + t."""
        p, q, each = self.product, self.product.contraction.q, self.each
        if self.held > 1:
            sizes, steps = ((8, 1), (1, 8)) if self.held == 2 else ((2, 4), (4, 1))
            return (*sizes, q // 8), (*steps, 8), q // 8, 0
        step_a, step = p.row_steps
        run = 8 * each
        if self.is_apart or p.b == run:
            return (8, each, q // run), (each * step, step, run * step if self.is_apart else step_a), q // run, 0
        return (8, each, p.b // run), (each * step, step, run * step), p.b // run, step_a

    @property
    def run(self) -> int:
        return self.lines[0][0] * self.lines[0][1]

    @property
    def box(self) -> int:
        """Runs of a box of the weights' map."""
        wanted, line = self.n // self.run, self.lines[2]
        if self.is_apart or line * self.run == self.product.contraction.q:
            return wanted
        return math.gcd(wanted, line)

    @property
    def maps(self) -> tuple[str, ...]:
        """The maps of x and of the weights."""
        p, c = self.product, self.product.contraction
        row = p.x_features if p.outer == 1 else c.p
        x = (c.p, p.groups, p.outer, 1, 1), (c.p, row, c.p, c.p), (self.slab, 1, self.rows // self.across, 1, 1)
        sizes, steps, _, _ = self.lines
        strides = (*(step * c.p for step in steps), c.p)
        weights = (c.p, *sizes, p.groups * c.q), strides, (self.slab, *sizes[:2], self.box // self.down, 1)
        return tensor_map("x", p.dtype, *x), tensor_map(c.weight, p.dtype, *weights)

    def us_of(self, batch: int) -> float:
        """Microseconds: multiprocessors take turns at tiles, and the next one's slabs come while one is stored."""
        p, gpu, c = self.product, self.gpu, self.product.contraction
        clusters = -(-batch * p.outer // (self.rows * self.down)) * self.tiles
        each = -(-clusters // (gpu.sms // self.cluster))
        # Of a slab: what is asked for and comes, and products, of which the last slab may have fewer
        slabs = -(-c.p // self.slab)
        asked = ASKED_NS[4 if self.held <= 4 else 8] * (self.rows / self.across + self.n / self.down)
        asked *= WITHIN_SECTORS if c.p * p.size % SECTOR else 1
        load = max(asked, GOT_NS * (self.rows + self.n), BOX_NS * self.n / (self.run * self.box)) / 1e3
        products = self.rows * self.n / 32 / CYCLES[p.size] * c.p / (slabs * self.slab)
        turns = self.held > 4 or p.slabs
        stored = (
            p.size * self.rows * self.n * self.held / (STORED_IN_TURNS if turns else STORED[2 * self.each * p.size])
        )
        ends = END_US + stored + (PART_US * self.rows if p.b * p.size % SECTOR and self.held == 1 else 0)
        slabs *= self.held
        busy = each * max(slabs * load, slabs * max(products, load) + ends) + (CLUSTER_US if self.cluster > 1 else 0)
        moved = p.size * (batch * (p.x_features + p.y_features) + p.weights)
        memory = 1.1 * moved / (gpu.memory_bytes * gpu.sms)
        return gpu.rates.behind_us + START_US + max(busy, memory) + BESIDE * min(busy, memory)

    @property
    def details(self) -> str:
        p, c = self.product, self.product.contraction
        groups = f" for {self.held} of {p.groups} groups" if p.groups > 1 else ""
        share = f", two blocks share {'x' if self.across > 1 else 'the weight'}" if self.cluster > 1 else ""
        return (
            f"{c.p}→{c.q} by rows, tiles of {self.rows}×{self.n} sums{groups}{share}, {self.slots} slots of {self.slab}"
        )

    @property
    def products(self) -> str:
        return wgmma(self.product.dtype, {self.n})

    @property
    def told(self) -> list[str]:
        p, c = self.product, self.product.contraction
        _, _, line, line_step = self.lines
        more, fewer = REGISTERS[self.consumers]
        told: Told = {"Element": ELEMENT[p.dtype], **p.told, "INNER": c.inner, "SLABS": p.slabs}
        told |= {"ROUND_Y": p.dtype == "tf32" and p.ours_out, "SPAN": SPAN, "FROM_LAST": self.from_last}
        told |= {"CONSUMERS": self.consumers, "N": self.n, "HELD": self.held, "EACH": self.each, "PARTS": self.parts}
        told |= {"ACROSS": self.across, "DOWN": self.down}
        told |= {"SLOTS": self.slots, "MORE": more, "FEWER": fewer, "SCALED": self.scaled_at // 4}
        told |= {"RUN": self.run, "BOX": self.box, "LINE": line, "LINE_STEP": line_step, "APART": self.is_apart}
        return [*constants(told), activation_type(p.activation, p.dtype, p.scalars)]


def tile(product: Product, batch: int, gpu: Gpu) -> Mapped | None:
    """The fastest tiling by prediction; None if this is no product for it."""
    return fastest(tilings(product, batch, gpu), batch)


def tilings(product: Product, batch: int, gpu: Gpu) -> Iterator[Mapped]:
    c, size = product.contraction, product.size
    if not gpu.wgmma or product.dtype not in DTYPES or not product.by_rows or product.reads_beside:
        return
    if product.x_step > 1 or product.terms > 1 or c.p * size % 16 or product.weights >= LARGEST or product.mixed >= 0:
        return
    if batch * product.outer < LEAST or c.q < 16 or (product.slabs and size == 2):
        return
    # Of columns, whole tiles but for the last one, which begins where it ends with them
    widths = sorted({min(round_up(-(-c.q // n), 16), c.q // 16 * 16) for n in range(-(-c.q // 256), 1 + c.q // 16)})
    shapes = SHAPES if size == 2 else SHAPES[:1]
    clusters = ((1, 1), (2, 1), (1, 2)) if gpu.sms > 1 else ((1, 1),)
    for held, n, shape, cluster in itertools.product(_holdings(product), widths, shapes, clusters):
        plan = Mapped(product, batch, gpu, n, held, *shape, *cluster)
        if plan.sums <= plan.most_sums and plan.slots >= LEAST_SLOTS and plan.shares:
            yield plan


def _holdings(product: Product) -> tuple[int, ...]:
    """Numbers of groups that are held together: those that take turns in y, element by element, in 32 bits."""
    q, b, fast = product.contraction.q, product.b, product.fast
    if (b == q and q % 4 == 0) or (b % 16 == 0 and q % 16 == 0):
        return (1,)
    if product.size == 2 or b > 1 or q % 16:
        return ()
    # Eight of 48 were slower than wide, of 16 and of 64 faster
    return tuple(held for held in (2, 4, 8) if fast == held or (held == 8 and fast in (16, 32, 64)))
