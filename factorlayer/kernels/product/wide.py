"""Passes of one contraction by rows on Hopper's warpgroup instructions: wide.cuh, its tiles and source.

Products, groups and layouts are those of streamed.py. Rows that 16 bytes do not divide come by smaller pieces; or whole
ones that hold them, of rows that begin at the same place in theirs, which another pass shifts the weight to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.activations.written import activation_type, gradient, gradient_by_result
from factorlayer.device.code import ELEMENT, Told, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.product.runs import Runs, runs_of
from factorlayer.kernels.product.streamed import LINE_CYCLES, SECTOR, ByWarpgroups, Product

DTYPES = ("float32", "tf32", "bfloat16", "float16")
MOST_BESIDE_TWO, WIDEST_BESIDE_TWO = 128, 192  # sums and results of a thread, and a tile, beside two of producers
PRODUCERS = 128  # threads that bring a slab together
MIXED = 8  # of a mode before
LEAST_BESIDE = 65  # features of odd rows: fewer, and such in tf32, take less by a product and the slopes behind it
MOST_SLOTS = 8
MOST_HELD = {2: 192, 4: 160}  # registers of a thread's sums and results, by bytes of an element
REGISTERS = {1: (0, 0), 2: (232, 40), 3: (152, 56)}  # of a consumer's and a producer's thread, where not what all get
MIX_REGISTERS = {1: (0, 0), 2: (224, 56)}  # where producers mix
SPLIT_REGISTERS = {1: (0, 0), 2: (224, 56), 3: (152, 56)}  # where floats are split, by both
ODD_REGISTERS = {1: (0, 0), 2: (216, 72), 3: (144, 80)}  # where, besides, rows of x come by small pieces
BESIDE_TWO = {1: (216, 144), 2: (184, 72)}  # where two warpgroups of producers split or round
MOST_SPLIT = {1: 160, 2: 160, 3: 96}  # sums and results then, by consumers
# For a store that does not fill one, on a multiprocessor: 3.2 to 7.6 ns in eight products of 28 to 61 groups that take
# turns, on one H100, where two pieces of 8 bytes took as long as one of 16
PART_US = 4e-3
NEIGHBOURS = 0.3  # of these, where other lanes store the rest: seven products, on the same
# And where all of a row is stored at once, by bytes of an element: of floats, 73 → 73 and 34 → 34 took as long as if
# their rows began at sectors; in 16 bits 408 → 680, 904 → 456 and 1000 → 200 on an H200
WHOLE_ROWS = {4: 0.05, 2: 0.5}
# Of a slab, by bytes of an element: cycles for n columns of a warpgroup, and what shared memory is read in, of its rate
PRODUCT_CYCLES, READ_SHARE = {4: 2.3, 2: 1.7}, {4: 1.15, 2: 0.85}
# Times what whole lines take, copies of rows that begin within lines, and within sectors
WITHIN_LINES, WITHIN_SECTORS = 1.4, 1.75
# Of floats that are split, cycles on one H100: of a producer for each of its pieces of 16 bytes, for a line of rows
# that come by smaller ones, and for a float; until copies are there; of a consumer for each slab, and for each of n
# sums that it scales and adds; of shared memory; what the second slowest unit adds, and a kernel's start. 128 tilings
# of 13 products, of 300 to 80,000 samples: 76 % are within 10 % and 97 % within 20 (24 and 71 as it was).
PIECE_CYCLES, SPLIT_LINE_CYCLES, SPLIT_CYCLES, COPIED_CYCLES = 10, 4.5, 30, 310
MULTIPLY_CYCLES, SUM_CYCLES, SPLIT_SHARED, SECOND, SPLIT_START_US = 140, 2.2, 1.08, 0.46, 2.0
# Until a slab of rows that 16 bytes do not divide has come, and is rounded: 254 → 254, 139 → 200, 375 → 393 on one H100
SHIFTED_US, PIECES_US = 3.1, 5.2
# Of the pass that splits a weight (weight_halves.cuh): warps of a multiprocessor, chunks that a warp has asked for
# before it waits, bytes of halves that all of them write in a microsecond, and those that L2 holds beside the weight
SPLITTING_WARPS, SPLIT_AT_ONCE, HALVES_BYTES, HALVES_HELD = 24, 16, 2e6, 20 << 20


def every_of(row: int, size: int) -> int:
    """Rows, of so many elements, from one that begins at some place in 16 bytes to the next one that does."""
    piece = 16 // size
    return piece // math.gcd(piece, row)


def reach(features: int, size: int) -> int:
    """Columns of a row, with those before it in its first piece of 16 bytes, at most."""
    piece = 16 // size
    return features + piece - math.gcd(piece, features)


@dataclass(frozen=True)
class Wide(ByWarpgroups):
    """A pass, tiled: products of 64 x `consumers` by n for `held` groups; a thread has `run` columns side by side.

    With 32 bits the weights are operand A, which comes through registers and is rounded or split there; else it is x.
    `us` is the time predicted.
    """

    consumers: int
    n: int
    held: int
    run: int
    batch: int
    gpu: Gpu
    cluster: int = 1  # blocks whose results lie in the same sectors of L2
    us: float = 0.0
    halves_at: int = 0  # bytes before those of the weight that another pass splits,
    scales_at: int = 0  # and before its rows' scales
    shifted: bool = False  # x comes by pieces of 16 bytes, wherever its rows begin in them
    runs: Runs | None = None  # how results go through shared memory of groups that take turns, if they do

    @property
    def rows(self) -> int:
        return self.n if self.product.size == 4 else 64 * self.consumers

    @property
    def columns(self) -> int:
        return 64 * self.consumers if self.product.size == 4 else self.n

    @property
    def splits(self) -> bool:
        return self.product.dtype == "float32"

    @property
    def every(self) -> int:
        """Rows of x from one of a tile to its next."""
        return every_of(self.row, self.product.size) if self.shifted else 1

    @property
    def shift(self) -> int:
        """What divides all places in a piece where rows begin; 0 where each begins one."""
        return math.gcd(self.piece, self.product.contraction.p) if self.shifted else 0

    @property
    def piece(self) -> int:
        """Elements that are copied at once where 16 bytes are."""
        return 16 // self.product.size

    @property
    def row(self) -> int:
        """Elements from one row of x to the next."""
        p = self.product
        return p.contraction.p if p.outer > 1 else p.x_features

    @property
    def is_staged(self) -> bool:
        """Whether results go through shared memory, since threads would store small pieces of their rows."""
        p = self.product
        apart = p.fast == 1 or p.b == p.contraction.q
        return self.runs is not None or (p.size == 2 and p.contraction.q % self.piece > 0 and apart and self.held == 1)

    @property
    def parts(self) -> int:
        """Parts of 128 bytes in a row of a slab: where floats were, their halves lie."""
        return 2 if self.splits else 1

    @property
    def slab(self) -> int:
        """Elements of k in a slab."""
        return self.parts * 128 // self.product.size

    @property
    def slot_bytes(self) -> int:
        return 128 * self.parts * (64 * self.consumers + self.n)

    @property
    def chunks(self) -> int:
        """Chunks of a row of the weight."""
        p = self.product.contraction.p
        return -(-(reach(p, self.product.size) if self.shifted else p) // self.slab)

    @property
    def part(self) -> int:
        """Elements of k in a part."""
        return -(-self.product.contraction.p // (8 * self.chunks)) * 4

    @property
    def weight_rows(self) -> int:
        """Rows of the weight; of one term, if terms are summed."""
        return self.product.contraction.q * max(self.product.groups, self.product.terms_out)

    @property
    def summed(self) -> int:
        """Terms that it sums."""
        return self.product.terms if self.product.terms_out == 1 else 1

    @property
    def halves_bytes(self) -> int:
        """Of a weight that another pass puts in order: split, or shifted."""
        return self.every * self.summed * self.weight_rows * self.chunks * 128 * self.parts

    @property
    def scale_bytes(self) -> int:
        """And of what scales its rows."""
        return 4 * self.weight_rows if self.splits else 0

    @property
    def stage_extra(self) -> int:
        """Bytes of a slot's barriers, and of the scale of each row of x."""
        return 16 + 4 * self.n * (self.parts - 1)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that a block is given by the other one of two."""
        return 208 + self.rows * self.columns * self.held * self.product.size // 2 if self.cluster > 1 else 0

    @property
    def result_bytes(self) -> int:
        """Bytes of results on their way, half of a tile's rows of an odd number of pieces of 16, or all of them where
        groups take turns."""
        if self.runs:
            return self.rows * self.runs.row_bytes
        return self.rows // 2 * (self.n * self.product.size // 16 + 1 | 1) * 16 if self.is_staged else 0

    @property
    def groups(self) -> int:
        """Groups of a tile."""
        return self.runs.groups if self.runs else self.held

    @kept
    def slots(self) -> int:
        others = 1024 + self.exchange_bytes + self.result_bytes
        return min(MOST_SLOTS, (self.gpu.shared - others) // (self.slot_bytes + self.stage_extra))

    @kept
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return self.slots * (self.slot_bytes + self.stage_extra) + self.exchange_bytes + self.result_bytes + 1024

    @property
    def ahead(self) -> int:
        """Slabs on their way to producers who round, split or mix them."""
        if self.producers > 1:
            return (self.slots - 1) // 2 - 1
        return max(1, min(4, self.slots - 2))

    @property
    def on_their_way(self) -> int:
        """Slabs on their way to all producers."""
        return self.ahead if self.producers == 1 else 2 * self.ahead + 1

    @property
    def producers(self) -> int:
        """Warpgroups that bring slabs, in turns: two that split, or round what comes by pieces."""
        waits = self.splits or (self.rounds and (self.shifted or self.copy < 16))
        room = self.consumers < 3 and self.sums <= MOST_BESIDE_TWO
        return 2 if waits and room and (self.consumers == 1 or self.n <= WIDEST_BESIDE_TWO) else 1

    @property
    def sums(self) -> int:
        """Registers of a consumer's thread for sums, and results that wait."""
        p, n = self.product, self.n
        sums = n // 2 + (self.held - 1) * n // 4 if p.size == 2 else (self.held + self.splits) * n // 2
        return sums + (n * p.size // 8 if p.reads_beside else 0)  # what waits for them, where results will be

    @property
    def slabs(self) -> int:
        """Slabs of a tile and group."""
        return self.summed * self.chunks

    @property
    def tiles(self) -> int:
        """Tiles for each tile of rows, or for EVERY of them together."""
        p = self.product
        groups = -(-p.fast // (self.groups * self.cluster)) * (p.groups // p.fast)
        columns = self.runs.columns if self.runs else self.columns
        return -(-p.contraction.q // columns) * groups * p.terms_out * self.every

    @property
    def threads(self) -> int:
        return 128 * self.consumers + PRODUCERS * self.producers

    @property
    def together(self) -> int:
        """Elements that a thread stores side by side."""
        p = self.product
        if self.held == 1:
            return math.gcd(self.run, p.contraction.q if p.fast == 1 else p.b)
        if self.held == p.fast:
            return math.gcd(self.run * self.held, p.fast * p.contraction.q)
        return math.gcd(self.held * p.b, p.fast * p.b)

    @property
    def copy(self) -> int:
        """Bytes of one access to x, and to weights that no other pass has prepared."""
        return 16 if self.shifted else math.gcd(16, self.product.contraction.p * self.product.size)

    @property
    def store(self) -> int:
        """Bytes of one access to y, of a thread, or at the ends of rows that go through shared memory."""
        if self.is_staged:
            return math.gcd(16, (self.product.b if self.runs else self.product.contraction.q) * self.product.size)
        return math.gcd(16, self.together * self.product.size)

    @property
    def is_paired(self) -> bool:
        """Whether a thread has whole sectors of L2."""
        p = self.product
        return self.cluster > 1 or (self.together * p.size % 32 == 0 and p.fast % self.held == 0)

    @property
    def span(self) -> int:
        """Tiles of rows whose blocks run side by side; one, where the weights stay in L2 anyhow. In 16 bits up to 12 MB
        make no difference."""
        most = (16 if self.product.dtype == "tf32" else 4) << 20
        return 1 if self.product.weights * self.product.size < most else 16

    @kept
    def _is_small(self) -> bool:
        """Whether blocks have to be found along y of the grid."""
        rows = self.batch * self.product.outer
        each = self.rows * self.every
        return -(-rows // self._unit) < min(self.gpu.sms, -(-rows // each) * self.tiles)

    @property
    def _unit(self) -> int:
        """Rows that are worth a block: half a tile's, or rows whose last tile is hardly begun had fewer blocks than
        tiles."""
        return max(1, self.rows * self.every // (2 * self.tiles))

    @property
    def split(self) -> int:
        return min(self.tiles, self.gpu.sms // self.cluster) * self.cluster if self._is_small else self.cluster

    @property
    def units_per_block(self) -> int:
        """Rows that are worth a block: each takes any tiles, so that these only count blocks."""
        return self.rows * self.every if self._is_small else self._unit

    @property
    def reads_prepared(self) -> bool:
        return self.splits or self.shifted

    @property
    def is_for_many(self) -> bool:
        """Where rows are odd: it may wait for a weight, and has tiles of many of them."""
        return not self.splits and (self.shifted or self.copy < 16 or self.is_staged)

    def us_of(self, batch: int) -> float:
        """Multiprocessors take turns at tiles, each bound by its slowest unit. Numbers fitted to an H200."""
        product, gpu, size = self.product, self.gpu, self.product.size
        tiles = -(-batch * product.outer // (self.rows * self.every)) * self.tiles
        each = -(-tiles // (gpu.sms // self.cluster))
        # Of a slab: loads, and what is made of them
        if self.splits:
            load, made, drain, start = 0.0, _split_us(self), 0.0, SPLIT_START_US
        else:
            (load, made), drain, start = _slab_us(self), 0.1, 0.0  # drain: of a group
        slabs = self.groups * self.slabs
        ends = (
            self.runs.us(self.consumers, gpu.rates.cycles) if self.runs else self.held * drain + _store_us(self) + 0.5
        )
        taken = slabs * max(load, made) + ends
        if size == 2 and not self.runs:  # the next tile's loads go on while a tile is stored
            taken = max(slabs * load, slabs * made + ends)
        busy = start + each * taken
        moved = batch * (product.terms_in * product.x_features + product.terms_out * product.y_features)
        moved += batch * product.y_features if product.reads_beside else 0
        moved += product.terms * product.weights
        memory = 1.2 * moved * size / (gpu.memory_bytes * gpu.sms)
        prepared = prepared_us(self) if self.reads_prepared else 0.0  # its weight, by another pass
        return 2.2 + prepared + max(busy, memory) + 0.1 * min(busy, memory)

    @property
    def details(self) -> str:
        p, c = self.product, self.product.contraction
        done = "grad_y back through its activation, " if p.slope else "8→8 before, " if p.mixed >= 0 else ""
        done = "and back through the activation before, " if p.through else done
        of = f"{self.groups}, {self.held} at once," if self.groups > self.held else self.held
        groups = f" for {of} of {p.groups} groups" if p.groups > 1 else ""
        tiles = f"tiles of {self.rows}×{self.columns} sums{groups}"
        return f"{c.p}→{c.q} by rows, {done}{tiles}, {self.slots} slots of {self.slab}"

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's and a producer's thread."""
        if self.producers > 1:
            return BESIDE_TWO[self.consumers]
        if self.copy < 16 and self.splits:
            return ODD_REGISTERS[self.consumers]
        tables = SPLIT_REGISTERS if self.splits else MIX_REGISTERS if self.product.mixed >= 0 else REGISTERS
        return tables[self.consumers]

    @property
    def products(self) -> str:
        half = self.n // 2 if self.n >= 64 else self.n  # of columns that are scaled while others are multiplied
        return wgmma("float16", {half}) if self.splits else wgmma(self.product.dtype, {self.n})

    @property
    def rounds(self) -> bool:
        """Whether producers round x to tf32."""
        return self.product.dtype == "tf32" and not self.product.ours_in

    @property
    def told(self) -> list[str]:
        p = self.product
        more, fewer = self.registers
        told: Told = {"Element": ELEMENT[p.dtype], **p.told}
        told |= {"TERMS": self.summed, "TERM_BLOCKS": p.terms_out, "MIXED": p.mixed, "MORE": more, "FEWER": fewer}
        told |= {"SPAN": self.span, "CONSUMERS": self.consumers, "N": self.n, "HELD": self.held, "RUN": self.run}
        told |= {"SLOTS": self.slots, "COPY": self.copy, "STORE": max(4, self.store)}
        told |= {"TURNS": self.runs.turns if self.runs else 0, "SWEPT": self.groups}
        told |= {"STAGED": self.is_staged, "EDGE": self.store, "EVERY": self.every, "SHIFT": self.shift}
        told |= {"BESIDE": p.scalars if p.reads_beside else -1}
        told |= {"PRODUCERS": self.producers, "AHEAD": self.ahead, "SPLIT": self.splits, "SCALED": self.scaled_at // 4}
        told |= {"HALVES": self.halves_at // p.size, "SCALES": self.scales_at // 4}
        told |= {"PAIRED": self.is_paired, "CLUSTER": self.cluster > 1, "FROM_LAST": self.from_last}
        told |= {"ROUND_X": self.splits or self.rounds, "ROUND_Y": p.dtype == "tf32" and p.ours_out}
        if p.reads_beside:
            activation = (gradient if p.slope else gradient_by_result)(p.activation, p.dtype, "Activation")
        else:
            activation = activation_type(p.activation, p.dtype, p.scalars)
        return [*constants(told), activation]


def tile(product: Product, batch: int, gpu: Gpu) -> Wide | None:
    """The fastest tiling by prediction; None if this is no product for it."""
    return fastest(tilings(product, batch, gpu), batch)


def tilings(product: Product, batch: int, gpu: Gpu) -> Iterator[Wide]:
    if not gpu.wgmma or product.dtype not in DTYPES or not product.by_rows:
        return
    c, size = product.contraction, product.size
    if product.x_step > 1:
        return
    if product.mixed >= 0 and (size > 2 or c.p % 8 or product.outer % MIXED or product.terms > 1):
        return
    odd = c.p * size % 16 > 0 and product.dtype != "float32"
    if product.reads_beside and odd and (size > 2 or min(c.p, c.q) < LEAST_BESIDE):
        return
    if c.p * size % 4 == 0:
        yield from _tilings(product, batch, gpu, shifted=False)
    # Of several states of x, whichever number of samples they have, each has to begin at a whole piece.
    if odd and (product.terms_in == 1 or product.x_features * size % 16 == 0):
        yield from _tilings(product, batch, gpu, shifted=True)


def _tilings(product: Product, batch: int, gpu: Gpu, shifted: bool) -> Iterator[Wide]:
    size, splits = product.size, product.dtype == "float32"
    by_threads = []
    for consumers, (held, run, cluster) in itertools.product((1, 2, 3), _holdings(product)):
        if (consumers > 2 and (size == 2 or (held > 1 and not splits))) or (shifted and cluster > 1):
            continue
        deals = (size == 2 and cluster > 1) or (held > 1 and product.reads_beside)
        most = MOST_HELD[size] - (20 if deals else 0)  # an exchange, or a state dealt to groups, needs some, too
        most -= REGISTERS[2][0] - REGISTERS[3][0] if consumers > 2 else 0
        most = MOST_SPLIT[consumers] if splits else most
        for n in _widths(product, run):
            plan = Wide(product, consumers, n, held, run, batch, gpu, cluster, shifted=shifted)
            if plan.sums <= most and (plan.store >= 4 or plan.is_staged) and plan.slots >= 3:
                by_threads.append(plan)
    yield from by_threads
    if product.b * size % SECTOR == 0 or any(plan.is_paired for plan in by_threads):
        return  # threads store whole sectors, and shared memory would be slower
    for consumers, runs in itertools.product((1, 2), runs_of(product)):
        plan = Wide(product, consumers, runs.n, runs.held, 2, batch, gpu, shifted=shifted, runs=runs)
        if plan.slots >= 3:
            yield plan


def _widths(product: Product, run: int) -> list[int]:
    """Widths of a tile: of samples, or of columns that leave little of the last tile empty."""
    if product.size == 4:
        return [8, 16, 32, 48, 64, 96, 128, 192, 256]
    q, step = product.contraction.q, 4 * run
    return sorted({-(-q // (tiles * step)) * step for tiles in range(-(-q // 256), q // step + 2)} - {0})[-32:]


def _holdings(product: Product) -> Iterator[tuple[int, int, int]]:
    """Groups held, columns in a run of a thread, blocks of a cluster: groups are held together where they take turns in
    y, since a sector of L2 that is stored in parts costs several times as much."""
    row, b, fast, q = 16 // product.size, product.b, product.fast, product.contraction.q
    turned, apart = product.size == 4, fast == 1 or b == q  # turned: a thread has two columns
    if apart and not turned and q % row:
        yield 1, 2, 1  # through shared memory
    elif fast == 1 or b % 2 == 0:
        yield 1, 2 if turned else row, 1
    beside = product.reads_beside and product.dtype != "tf32"  # others are faster without, and slopes behind them
    if fast == 1 or row % b or b == row or (turned and b > 2) or beside:
        return
    run = max(2, b)
    for held in (2, 4, 8, 16):
        if held == fast:
            yield held, run if turned else max(run, row // held), 1
        elif held < fast:
            yield held, run, 1
            if held * b == row and fast % (2 * held) == 0 and not product.reads_beside:
                yield held, run, 2


def _store_us(plan: Wide) -> float:
    """Microseconds of a tile's stores, which run while nothing else does."""
    product, size = plan.product, plan.product.size
    result = plan.rows * plan.columns * plan.held * size
    store = result / 40e3 + _parts_of_sectors(plan) * PART_US * (WHOLE_ROWS[size] if product.fast == 1 else 1)
    store += result / 27e3 * (plan.cluster - 1)
    return store + (result / 80e3 if product.reads_beside else 0)  # of which most comes while products are made


def _slab_us(plan: Wide) -> tuple[float, float]:
    """Microseconds of a slab that nobody splits: of its loads, and of its products or what they read."""
    product, gpu, size = plan.product, plan.gpu, plan.product.size
    row = product.contraction.p * size
    begins = WITHIN_SECTORS if row % SECTOR == 16 and size == 2 else WITHIN_LINES if row % 128 else 1
    load = 0.12 + plan.slot_bytes / 100e3 * begins
    products = PRODUCT_CYCLES[size] * plan.consumers * plan.n / gpu.rates.cycles
    read = plan.slot_bytes + 128 * plan.consumers * (64 + plan.n)
    if product.mixed >= 0 or plan.rounds:
        read += 256 * plan.rows  # mixed or rounded in place
    if plan.copy < 16:  # a warp's copies touch two lines each
        load += 2 * LINE_CYCLES * 128 * (plan.rows + plan.columns) / (32 * plan.copy) / gpu.rates.cycles
    if plan.rounds and (plan.shifted or plan.copy < 16):
        load = max(load, (SHIFTED_US if plan.shifted else PIECES_US) / plan.on_their_way)
    return load, max(products, READ_SHARE[size] * read / 128 / gpu.rates.cycles)


def _split_us(plan: Wide) -> float:
    """Microseconds of a slab of floats: a warpgroup of producers asks for it, waits and splits it, the consumers
    multiply it, and then its slot is free. What takes longest binds, and the second adds some of its time."""
    c, n = plan.consumers, plan.n
    ask, floats = plan.slot_bytes / (16 * PRODUCERS), plan.rows * plan.slab / PRODUCERS  # of a producer
    ask *= PIECE_CYCLES
    if plan.copy < 16:  # a row of x touches two lines, in each part
        x = plan.rows * plan.parts
        ask += 2 * SPLIT_LINE_CYCLES * x - PIECE_CYCLES * 128 * x / (16 * PRODUCERS)
    bring = ask + SPLIT_CYCLES * floats
    multiply = MULTIPLY_CYCLES + 6 * n + SUM_CYCLES * n  # 12 products of n / 2 cycles
    shared = (plan.slot_bytes + 512 * plan.rows + 128 * c * (128 + 3 * n)) / 128
    units = sorted(
        (
            (bring + (0 if plan.ahead else COPIED_CYCLES)) / plan.producers,
            multiply,
            (bring + COPIED_CYCLES + multiply) / plan.slots,
            SPLIT_SHARED * shared,
        )
    )
    return (units[-1] + SECOND * units[-2]) / plan.gpu.rates.cycles


def prepared_us(plan: Wide) -> float:
    """Microseconds of the pass that shifts the weight, or splits it: a warp takes a row, for its largest number and, if
    it is more than a round of chunks, once more, and waits for each round."""
    rates, gpu = plan.gpu.rates, plan.gpu
    if not plan.splits:
        return rates.behind_us + plan.halves_bytes / HALVES_BYTES
    rows = -(-plan.weight_rows // (gpu.sms * SPLITTING_WARPS))  # of a warp
    rounds = -(-plan.summed * plan.chunks // SPLIT_AT_ONCE)
    reads = 1 if rounds == 1 else 2
    moved = plan.halves_bytes / HALVES_BYTES
    if plan.halves_bytes > HALVES_HELD:
        moved = max(moved, (1 + reads) * plan.halves_bytes / (gpu.memory_bytes * gpu.sms))
    return rates.behind_us + max(reads * rows * rounds * rates.wait_us, moved)


def _parts_of_sectors(plan: Wide) -> float:
    """Stores of a tile to sectors of L2 that they do not fill: of a warp at once, sectors that its lanes touch."""
    p = plan.product
    lanes = 8 if p.size == 4 else 4  # that have a row's columns side by side
    result = plan.rows * plan.columns * plan.held * p.size
    if plan.is_paired:
        return 0
    if plan.is_staged:  # both ends of a row
        return 2 * plan.rows * (1 - math.gcd(SECTOR, p.contraction.q * p.size) / SECTOR)
    if plan.held > 1 and plan.held < p.fast:
        return result / (16 if plan.store == 8 else plan.store)
    mine = plan.run * plan.held * p.size  # of a thread, side by side
    run = min(lanes * mine, (p.contraction.q if p.fast == 1 or plan.held == p.fast else p.b) * plan.held * p.size)
    if mine == plan.store and run >= SECTOR:
        b = p.b if plan.held < p.fast else p.contraction.q
        aligned = math.gcd(SECTOR, b * plan.held * p.size)
        return result / run * 2 * (1 - aligned / SECTOR)
    return result / plan.store * (NEIGHBOURS if run >= SECTOR else 1)
