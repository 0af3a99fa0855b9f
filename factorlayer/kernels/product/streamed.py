"""Passes of one contraction whose weights do not stay in shared memory: streamed.cuh, its tiles and source.

Untied contractions (Monarch) have a matrix product for each (outer, inner). Between two of them the state's layout is
ours: a pass writes what the next one contracts contiguously.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from factorlayer.activations.written import activation_type
from factorlayer.device.code import MOST_ASKED, Long, Told, ask_for, constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import samples_of_class
from factorlayer.kernels.passes import MOST_BLOCKS, Pass, fastest
from factorlayer.kernels.work import OF_TENSOR, Inputs, inputs_of, round_up, told_inputs
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_TILINGS = 64  # that are compared
ISSUE_RATE = 7e3  # instructions of a multiprocessor's warps in a microsecond
# What a chunk waits for that goes through registers: one sample of 435 → 47 in bfloat16 took 1.4 us for each of 28.
LOADED_US = 1.3
LINE, SECTOR = 128, 32  # bytes of memory that are copied, and of L2 that are written, as one
# Of a warp's copy: instructions, also where it goes through registers, and cycles for each line that it touches; on a
# multiprocessor a store to a part of a sector. Of 120 passes of drawn layers on one H100, 76 % are within 30 %.
COPY_INSTRUCTIONS, LOADED_INSTRUCTIONS, LINE_CYCLES, PART_US = 6, 12, 1.5, 2e-3
# Times what a unit takes by its rate; shares of the second slowest unit and of what is beside memory or beside
# products; what a chunk takes of that with many warps, and more with one; of results, in shared memory and sent to L2;
# until the first chunk. Fitted to 876 kernels of 146 contractions of drawn Monarch layers on one H100, all dtypes, 4 to
# 32 warps of a multiprocessor (benches/results/pairs/streamed-tilings.json): 79 % are within 30 %, and of a
# contraction's tilings the one with the least prediction takes 1.07 of the best one's time, 1.50 at most
OF_FLOPS, OF_SHARED, OF_L2, OF_ISSUE = 1.75, 1.24, 0.35, 2.6
SECOND, BESIDE, BUSY, LONE_WARP, STORED, SENT, BEGIN_US = 0.54, 0.46, 0.5, 2.2, 2.35, 0.47, 0.47
# Warp tiles, in 16 rows and 8 columns of sums, and registers that they need.
TILES_16 = {
    (4, 8): 232,
    (4, 6): 192,
    (4, 4): 128,
    (2, 8): 128,
    (2, 4): 96,
    (1, 8): 96,
    (1, 4): 72,
    (1, 2): 64,
    (1, 1): 64,
}
TILES_32 = {(4, 8): 255, (4, 6): 200, (4, 4): 144, (2, 8): 144, (2, 4): 104, (1, 4): 80, (1, 2): 64, (1, 1): 64}
TILES_SPLIT = {(4, 4): 240, (2, 6): 200, (2, 4): 160, (1, 8): 168, (1, 4): 112, (1, 2): 80, (1, 1): 64}
TILES_64 = {(4, 4): 240, (2, 4): 168, (1, 4): 112, (1, 2): 80, (1, 1): 64}
TILES = {"float64": TILES_64, "float32": TILES_SPLIT, "tf32": TILES_32, "bfloat16": TILES_16, "float16": TILES_16}


@dataclass(frozen=True)
class Product:
    """A contraction with the layouts of its states in memory, in elements.

    x: [term][sample][group][p], or as a chain has it where p's are x_step > 1 apart. y: [term][sample][group / fast][a]
    [group % fast][b] with q as `row_steps` has it; groups within `fast` count (inner, next).
    """

    dtype: str
    contraction: Contraction
    x_step: int
    fast: int
    next: int
    b: int
    terms_in: int = 1  # states of x, and of y; the weights have as many as the larger one
    terms_out: int = 1
    terms: int = 1
    ours_in: bool = False  # x, or y, is a state between two of our passes: of tf32, rounded
    ours_out: bool = False
    bias: bool = False
    activation: str = "identity"
    scalars: int = 0  # the first weight that is a parameter of the activation
    slope: bool = False  # the activation's, times a state like y that is read
    mixed: int = -1  # the weight of a mode of 8 before the contracted one, by which rows of x are mixed
    slabs: bool = False  # y is [sample / 32][feature, as a chain has it][sample % 32]
    through: bool = False  # what is made, times the activation's slope, from a state like y that is its result
    inputs: Inputs | None = None  # if x is several tensors
    unturned: bool = False  # y is [sample][group][q], and the pass behind turns it

    @kept
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @kept
    def by_rows(self) -> bool:
        return not self.contraction.tied or self.contraction.inner == 1

    @kept
    def groups(self) -> int:
        c = self.contraction
        return 1 if c.tied else c.outer * c.inner

    @property
    def reads_beside(self) -> bool:
        """A state like y, with each sum what is at its place."""
        return self.slope or self.through

    @property
    def row_steps(self) -> tuple[int, int]:
        """Of q, from one a to the next, and from one b: the following contraction's groups come first in q, unless
        groups lie behind q as well, of which then only runs of b change places with these."""
        return (self.b, 1) if self.contraction.inner > 1 else (1, self.contraction.q // self.b)

    @property
    def bias_inner(self) -> int:
        """Groups that take turns in the bias, though they do not in y."""
        return self.contraction.inner if self.unturned else 1

    @kept
    def outer(self) -> int:
        return self.contraction.outer if self.contraction.tied else 1

    @kept
    def inner(self) -> int:
        return 1 if self.by_rows else self.contraction.inner

    @kept
    def weights(self) -> int:
        return self.groups * self.contraction.p * self.contraction.q

    @property
    def told(self) -> dict[str, int]:
        """What its kernels are told, whichever family they are of: sizes, groups, and features of a sample, and the
        same again where each term has a state of its own, or 0."""
        c = self.contraction
        told = {"WEIGHT": c.weight, "P": c.p, "Q": c.q, "OUTER": self.outer, "GROUPS": self.groups, "BIAS": self.bias}
        told |= {"FAST": self.fast, "NEXT": self.next, "B": self.b, "BIAS_INNER": self.bias_inner}
        told |= dict(zip(("STEP_A", "STEP_B"), self.row_steps, strict=True))
        steps = {"X_SAMPLE": self.x_features, "Y_SAMPLE": self.y_features}
        steps |= {"X_TERM": self.x_features if self.terms_in > 1 else 0}
        steps |= {"Y_TERM": self.y_features if self.terms_out > 1 else 0}
        return told | {key: Long(step) for key, step in steps.items()}

    @property
    def asks(self) -> list[tuple[str, str]]:
        """What a kernel reads first: x, if it is not a state between two of ours, and some of the weight."""
        weight = min(self.contraction.weight_size * self.size, MOST_ASKED)
        of_x = [] if self.ours_in else [ask_for("params.x", self.terms_in * self.x_features * self.size)]
        of_x = self.inputs.asks(self.size) if self.inputs else of_x
        return [*of_x, (f"params.weights[{self.contraction.weight}]", str(weight))]

    @kept
    def x_features(self) -> int:
        c = self.contraction
        return c.outer * c.p * c.inner

    @kept
    def y_features(self) -> int:
        c = self.contraction
        return c.outer * c.q * c.inner


def products(chain: Chain, dtype: str) -> list[Product]:
    """A pass for each contraction."""
    found: list[Product] = []
    last = len(chain.contractions) - 1
    ours = chain.x_turned  # the state's layout
    for i, c in enumerate(chain.contractions):
        x_step = 1 if ours else c.inner
        if c.tied:
            ours, layout = False, (1, 1, c.q)
        else:
            turned = _turned(c, chain.contractions[i + 1]) if i < last else y_turned(chain)
            ours, layout = turned is not None, turned or ((1, 1, c.q) if chain.slabs else _natural(c))
        found.append(
            Product(
                dtype,
                c,
                x_step,
                *layout,
                terms_in=chain.rank if i > 0 else 1,
                terms_out=chain.rank if i < last else 1,
                terms=chain.rank,
                ours_in=i > 0 or chain.x_turned,
                ours_out=i < last or chain.turn is not None or chain.slabs > 0,
                slabs=chain.slabs > 0,
                bias=chain.bias and i == last,
                activation=chain.activation if i == last else "identity",
                scalars=len(chain.contractions),
                slope=chain.slope > 0 and i == last,
                through=chain.through > 0 and i == last,
                inputs=inputs_of(chain) if i == 0 else None,
            )
        )
    return found


def unturned(product: Product) -> tuple[Product, tuple[int, int, int]] | None:
    """The same with groups one after the other in y, and how another pass turns that: matrices, rows, columns. None
    where groups do not take turns, or in no way that turns matrices."""
    c, groups, b = product.contraction, product.groups, product.b
    if c.tied or product.fast == 1 or b == c.q or product.terms_out > 1 or product.reads_beside or product.slabs:
        return None
    if c.inner > 1 and (product.next > 1 or b > 1):
        return None
    apart = replace(product, fast=groups, next=groups, b=c.q, unturned=True)
    return apart, (groups // product.fast, product.fast * b, c.q // b)


def y_turned(chain: Chain) -> tuple[int, int, int] | None:
    """fast, next, b for a y that the last contraction stores turned; None where a pass behind it has to."""
    if not chain.turn:
        return None
    outer, rows, columns = chain.turn
    last = chain.contractions[-1]
    if last.inner > 1 and not last.tied and columns == last.inner and outer % last.outer == 0:
        return columns, 1, rows
    return _turned(last, Contraction(-1, outer, rows, 1, columns, tied=False))


def _natural(c: Contraction) -> tuple[int, int, int]:
    """fast, next, b for y as the chain has it."""
    return (c.inner, 1, 1) if c.inner > 1 else (c.outer, c.outer, c.q)


def _turned(c: Contraction, following: Contraction) -> tuple[int, int, int] | None:
    """The same where y is to be [outer, inner, p] of the following contraction; None where no layout is."""
    if c.tied or following.tied or c.outer % following.outer or following.p % (c.outer // following.outer):
        return None
    following_groups = c.outer // following.outer
    b = following.p // following_groups
    if (b > 1 and c.inner > 1) or c.q * c.inner != b * following.inner:
        return None
    return c.inner * following_groups, following_groups, b


@dataclass(frozen=True)
class ByWarpgroups(Pass):
    """A pass of one contraction by rows on Hopper's warpgroup instructions."""

    product: Product
    from_last: bool = field(default=False, kw_only=True)  # the last samples come first
    scaled_at: int = field(default=-1, kw_only=True)  # bytes before what a prepared weight is scaled by, if it is

    @property
    def units_per_sample(self) -> int:
        return self.product.outer

    @property
    def output_bytes(self) -> int:
        return self.product.terms_out * self.product.y_features * self.product.size

    def from_the_end(self) -> Self:
        """The same from the last sample on, in 16 bits, unless it makes more than it reads: that gets no faster."""
        takes = self.product.size == 2 and self.product.y_features <= self.product.x_features
        return replace(self, from_last=True) if takes else self

    def behind_weight(self, begin: int, scaled_at: int, weights: int) -> Self:
        return replace(self, scaled_at=scaled_at)


@dataclass(frozen=True)
class Streamed(Pass):
    """A pass, tiled. `us` is the time predicted."""

    product: Product
    mt: int
    nt: int
    wm: int
    wn: int
    wg: int
    steps: int
    bk: int
    slots: int
    registers: int
    gpu: Gpu
    us: float = 0.0
    blocks_per_sm = 0  # as many as there is work

    @kept
    def bm(self) -> int:
        return 16 * self.mt * self.wm

    @kept
    def bn(self) -> int:
        return 8 * self.nt * self.wn

    @kept
    def groups(self) -> int:
        """Groups of a block."""
        return self.wg * self.steps

    @kept
    def columns(self) -> int:
        """Columns of a block and group, by rows: whole b's where groups take turns in y."""
        b = self.product.b
        return self.bn // b * b if self.groups > 1 and b <= self.bn else self.bn

    @property
    def together(self) -> int:
        return math.gcd(self.product.b, self.columns)

    @kept
    def warps(self) -> int:
        return self.wm * self.wn * self.wg

    @kept
    def threads(self) -> int:
        return 32 * self.warps

    @kept
    def slot_bytes(self) -> int:
        if self.product.by_rows:
            elements = self.wg * (self.bm + self.bn) * self.bk
        else:
            column = self.bn + 4 if self.product.size == 8 else self.bn if self.bn % 16 else self.bn + 8
            elements = (self.bm + column) * self.bk
        return elements * self.product.size

    @kept
    def line(self) -> int:
        """Elements of a row of the result."""
        return self.columns * self.groups if self.product.by_rows else self.bn

    @property
    def result_bytes(self) -> int:
        return (self.bm + 1) * self.line * self.product.size

    @kept
    def total_chunks(self) -> int:
        p = self.product
        return self.steps * (p.terms if p.terms_out == 1 else 1) * -(-p.contraction.p // self.bk)

    @property
    def result(self) -> int:
        """The place of the result: that of the slots if they are not needed any more."""
        return 0 if self.steps == 1 else round_up(self.slots * self.slot_bytes, 128)

    @kept
    def shared(self) -> int:
        return max(self.slots * self.slot_bytes, self.result + self.result_bytes)

    @kept
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return self.gpu.blocks_at_once(self.shared, self.threads * self.registers, 8)

    @kept
    def tiles(self) -> int:
        """Tiles for each of the first tile's rows or columns."""
        p = self.product
        terms = p.terms_out
        if not p.by_rows:
            return -(-p.contraction.q // self.bm) * terms
        return -(-p.contraction.q // self.columns) * -(-p.fast // self.groups) * (p.groups // p.fast) * terms

    @property
    def span(self) -> int:
        """Tiles of samples whose blocks run side by side; one, where the weights stay in L2 anyhow."""
        c = self.product.contraction
        return 1 if self.product.groups * c.p * c.q * self.product.size < 4 << 20 else 16

    @property
    def split(self) -> int:
        return min(self.tiles, MOST_BLOCKS)

    @property
    def units_per_sample(self) -> int:
        return self.product.outer * self.product.inner

    @property
    def units_per_block(self) -> int:
        return self.bm if self.product.by_rows else self.bn

    @property
    def output_bytes(self) -> int:
        return self.product.terms_out * self.product.y_features * self.product.size

    def us_of(self, batch: int) -> float:
        """Microseconds: a kernel starts behind another, and multiprocessors take turns at tiles, each bound by its
        slowest unit, or by waiting for its chunks."""
        product, gpu, size = self.product, self.gpu, self.product.size
        tiles = -(-batch * self.units_per_sample // self.units_per_block) * self.tiles
        each = -(-tiles // gpu.sms)  # of one multiprocessor
        together = min(self.blocks, each)
        chunks = self.total_chunks
        stored, parts = self._stored_us
        busy = chunks * self._chunk_us * (BUSY + LONE_WARP / (self.warps * together))
        busy += stored * (1.2 if together > 1 else 1) + parts
        moved = batch * (product.terms_in * product.x_features + product.terms_out * product.y_features)
        moved += product.terms * product.weights
        bounds = each * busy, moved * size / (gpu.memory_bytes * gpu.sms)
        us: float = max(bounds) + BESIDE * min(bounds)
        turns = -(-each // self.blocks)
        through_registers = min(self.accesses[:2]) < 4
        each_wait = LOADED_US if through_registers else gpu.rates.wait_us / min(self.slots - 1, chunks)
        waits = turns * chunks * each_wait  # a ring asks for all chunks but one that it has room for
        return gpu.rates.behind_us + max(us, waits) + BEGIN_US * max(1.0, turns / min(together, 2))

    @kept
    def _chunk_us(self) -> float:
        """Microseconds of a chunk, by its slowest unit, where warps wait for nothing."""
        product, gpu = self.product, self.gpu
        copied, copies, lines = _copied(self)
        read = self.warps * (16 * self.mt + 8 * self.nt) * self.bk * product.size
        issue = self.warps * (self.bk * _instructions(product, self.mt, self.nt) + 40) + copies
        units = (
            OF_FLOPS * self.wg * self.bm * self.bn * self.bk / gpu.flops[product.dtype],
            OF_SHARED * ((read + copied) / gpu.shared_bytes + LINE_CYCLES * lines / gpu.rates.cycles),
            OF_L2 * copied / gpu.l2_bytes * (1.2 if self.bk * product.size < 128 else 1),
            OF_ISSUE * issue / ISSUE_RATE,
        )
        _, _, second, slowest = sorted(units)
        return slowest + SECOND * second

    @kept
    def _stored_us(self) -> tuple[float, float]:
        """Microseconds of a tile's stores, and those of sectors that they do not fill."""
        result, parts = _stored(self)
        return STORED * result / self.gpu.shared_bytes + SENT * result / self.gpu.l2_bytes, parts * PART_US

    @property
    def details(self) -> str:
        p, c = self.product, self.product.contraction
        how, columns = ("rows", self.columns) if p.by_rows else ("columns", self.bn)
        groups = f" for {self.groups} of {p.groups} groups" if p.groups > 1 else ""
        warps = f"{self.warps} warps of {16 * self.mt}×{8 * self.nt}, {self.slots} slots of {self.bk}"
        return f"{c.p}→{c.q} by {how}, tiles of {self.bm}×{columns} sums{groups}, {warps}"

    @property
    def told(self) -> list[str]:
        p = self.product
        told: Told = {**p.told, "INNER": p.inner, "X_STEP": p.x_step, "TJ": self.columns, "TB": self.together}
        told |= {"TERMS": p.terms if p.terms_out == 1 else 1, "TERM_BLOCKS": p.terms_out}
        told |= {"WM": self.wm, "WN": self.wn, "WG": self.wg, "STEPS": self.steps, "MT": self.mt, "NT": self.nt}
        told |= {"BK": self.bk, "SLOTS": self.slots, "SPAN": self.span, "RESULT": self.result}
        told |= dict(zip(("COPY_X", "COPY_W", "STORE"), self.accesses, strict=True))
        told |= {"Source": told_inputs(p.inputs)["Source"]}
        told |= {"BY_ROWS": p.by_rows, "ROUND_X": not p.ours_in, "ROUND_Y": p.dtype == "tf32" and p.ours_out}
        return [*kinds(p.dtype), activation_type(p.activation, p.dtype, p.scalars), *constants(told)]

    @kept
    def run_starts(self) -> list[int]:
        """Elements from one run of a result's row to the next, by rows; the last one is what a run has."""
        p, c = self.product, self.product.contraction
        if self.groups == 1:
            return [p.fast * p.b, p.b, min(self.columns, p.b)]
        if self.together < p.b:
            return [p.fast * p.b, self.together]
        if self.groups == p.fast:  # a's follow each other
            return [p.fast * c.q, p.fast * self.columns]
        return [p.fast * p.b, self.groups * p.b]

    @kept
    def accesses(self) -> tuple[int, int, int]:
        """Bytes moved at once of x, weights and y: what divides every run."""
        p, c = self.product, self.product.contraction
        if p.by_rows:
            x = p.size if p.x_step > 1 else math.gcd(16, c.p * p.size)
            runs = self.run_starts
        else:
            x = math.gcd(16, c.inner * p.size)
            runs = [c.inner]
        x = p.inputs.access(x, p.size) if p.inputs else x
        return x, math.gcd(16, c.p * p.size), math.gcd(16, *(run * p.size for run in runs))


Numbers = tuple[int, int, int, int, int, int, int, int, int]  # of a Streamed, from mt to registers


def tile(product: Product, batch: int, gpu: Gpu) -> Streamed:
    """The fastest tiling by prediction for a class of batches."""
    unnumbered = replace(product, contraction=replace(product.contraction, weight=0), scalars=0)
    return replace(_tile(unnumbered, batch, gpu), product=product)


@functools.lru_cache(512)
def _tile(product: Product, batch: int, gpu: Gpu) -> Streamed:
    """The same of a product of these sizes, whatever its weight's number is."""
    least, *_, most = samples_of_class(batch)
    plan = fastest(_tilings(product, (least, most), gpu), batch)
    assert plan  # any product has one
    return plan


def _tilings(product: Product, batches: tuple[int, ...], gpu: Gpu) -> Iterator[Streamed]:
    """For each of some numbers of samples the tilings that read least, of blocks that fit; those of several once."""
    fitting: dict[Numbers, bool] = {}
    for batch in batches:
        count = 0
        for numbers in _that_read_least(product, batch, gpu):
            if numbers not in fitting:
                plan = Streamed(product, *numbers, gpu)
                fitting[numbers] = plan.shared <= gpu.shared and _copies(plan)
                if fitting[numbers]:
                    yield _deepest(plan)
            count += fitting[numbers]
            if count == MOST_TILINGS:
                break


def _that_read_least(product: Product, batch: int, gpu: Gpu) -> Iterator[Numbers]:
    """The numbers of tilings, of those that read least first."""
    c = product.contraction
    rows = batch * product.outer
    m, n = (rows, c.q) if product.by_rows else (c.q, rows * product.inner)
    chunks = _chunks(product)
    found = []
    for (mt, nt), registers in TILES[product.dtype].items():
        for warps, wg in itertools.product((4, 8, 16), (1, 2, 4, 8)):
            if warps * 32 * registers > 65536 or (warps == 16 and mt * nt > 8):
                continue
            if wg > min(product.fast, warps) or (wg > 1 and product.groups == 1):
                continue
            for wm in _shapes(m, n, mt, nt, warps // wg):
                wn = warps // wg // wm
                bm, bn = 16 * mt * wm, 8 * nt * wn
                for step in _steps(product, wg):
                    blocks = -(-m // bm) * -(-n // bn) * -(-product.groups // (wg * step))
                    read = -(-blocks // gpu.sms) * (bm + bn) * wg * step  # for each k by one multiprocessor
                    found += [(read, (mt, nt, wm, wn, wg, step, bk, 2, registers)) for bk in chunks]
    return (numbers for _, numbers in sorted(found))


def _shapes(m: int, n: int, mt: int, nt: int, warps: int) -> list[int]:
    """Warps that lie along m: the two numbers that read least."""

    def read(wm: int) -> int:
        bm, bn = 16 * mt * wm, 8 * nt * (warps // wm)
        return -(-m // bm) * -(-n // bn) * (bm + bn)

    fits = [wm for wm in (1, 2, 4, 8, 16) if wm <= warps and 16 * mt * wm <= 256 and 8 * nt * (warps // wm) <= 256]
    return sorted(fits, key=read)[:2]


def _chunks(product: Product) -> list[int]:
    """Chunks of the contracted size: rows of 128 or 64 bytes that waste little; a small one for what is copied in
    pieces."""
    p, size = product.contraction.p, product.size
    found = {bk for bk in (128 // size, 64 // size) if round_up(p, bk) < 1.3 * p}
    if not found:
        found.add(min(max(8, 1 << (p - 1).bit_length()), 128 // size))
    if p * size % 16:
        found.add(8)
    return sorted(found)


def _steps(product: Product, wg: int) -> list[int]:
    """Turns of a block's groups: enough for runs of 32 bytes in y (sectors of L2), or 64."""
    if product.groups == 1 or product.b == product.contraction.q:
        return [1]
    found = set()
    for run in (32, 64):
        groups = min(-(-run // (product.b * product.size)), product.fast)
        found.add(-(-groups // wg))
    return sorted(found)


def _copies(plan: Streamed) -> bool:
    """Whether a block's threads take whole rows, as the kernel wants it, and few enough to hold their places."""
    x, weight, _ = plan.accesses
    size, by_rows = plan.product.size, plan.product.by_rows
    copies = [(plan.bk * size // weight, plan.wg * plan.bn if by_rows else plan.bm)]
    copies.append((plan.bk * size // x, plan.wg * plan.bm) if by_rows else (plan.bn * size // x, plan.bk))
    return all(plan.threads % row == 0 and rows * row <= 16 * plan.threads for row, rows in copies)


def _deepest(plan: Streamed) -> Streamed:
    """The tiling with as many slots as change nothing else."""
    for slots in (4, 3):
        if slots > plan.total_chunks + 1 or slots * plan.slot_bytes > plan.gpu.shared:
            continue
        deeper = replace(plan, slots=slots)
        if deeper.shared <= plan.gpu.shared and deeper.blocks == plan.blocks:
            return deeper
    return plan


def _copied(plan: Streamed) -> tuple[float, float, float]:
    """Bytes of a chunk, instructions that copy them, and lines of memory that these touch, one and a piece of another
    each."""
    product, row = plan.product, plan.bk * plan.product.size
    x, weight, _ = plan.accesses
    if product.by_rows:
        rows_x, row_x, rows_weight = plan.wg * plan.bm, row, plan.wg * plan.bn
        together_x = product.size if product.x_step > 1 else row
    else:
        rows_x, row_x, rows_weight = plan.bk, plan.bn * product.size, plan.bm
        together_x = min(plan.bn, product.inner) * product.size
    copied = copies = lines = 0.0
    of_each = (rows_x, row_x, together_x, x, True), (rows_weight, row, row, weight, False)
    for rows, bytes_, together, access, of_x in of_each:
        run = min(32 * access, together)
        copied += rows * bytes_
        copies += rows * bytes_ / (32 * access) * (COPY_INSTRUCTIONS if access >= 4 else LOADED_INSTRUCTIONS)
        copies += rows * bytes_ / (32 * access) * (OF_TENSOR if of_x and product.inputs else 0)
        lines += rows * bytes_ / run * (1 + (run - access) / LINE if access < 16 else max(1.0, run / LINE))
    return copied, copies, lines


def _stored(plan: Streamed) -> tuple[float, float]:
    """Bytes of a tile, and stores of a warp to sectors of L2 that they do not fill, at both ends of a run."""
    product, size, q = plan.product, plan.product.size, plan.product.contraction.q
    there = q / (-(-q // (plan.columns if product.by_rows else plan.bm)))  # of its columns, or rows
    if not product.by_rows:
        run, result, starts = min(plan.bn, product.inner), there * plan.bn * size, [product.inner]
    else:
        result = plan.bm * there * product.fast / -(-product.fast // plan.groups) * size
        starts = plan.run_starts
        run = starts[-1]
    run_bytes = min(run * size, 32 * plan.accesses[2])
    aligned = math.gcd(SECTOR, *(start * size for start in starts))
    parts = 2 * (1 - aligned / SECTOR) if run_bytes >= SECTOR else (run_bytes + SECTOR - aligned) / SECTOR
    return result, result / run_bytes * parts


def _instructions(product: Product, mt: int, nt: int) -> float:
    """Instructions of a warp for each k: loads of operands, what is done to each of them, products."""
    if product.size == 2:
        return (mt + nt / 2 + mt * nt) / 16
    made = {"float64": 0, "float32": 3, "tf32": 3}[product.dtype]  # of an operand's element
    made_x = 1 if product.dtype == "tf32" and product.ours_in else made
    products = {"float64": 1, "float32": 5, "tf32": 1}[product.dtype]
    return (mt * (2 + 4 * made_x) + nt * (1 + 2 * made) + mt * nt * products) / 8
