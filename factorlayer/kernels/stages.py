"""Stages of a resident pass: how a tile lies in shared memory, and the warp tiles that multiply it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.work import round_up

SUM_REGISTERS = {"float64": 4, "float32": 4, "tf32": 1, "bfloat16": 1, "float16": 1}  # of a sum, and what goes with it
OVERLAP = 0.09  # of units that work side by side: what the shorter times add
# Of a thread that has all of a weight: registers beside it and its columns, instructions for a column's place, and for
# each number of the weight, which it reads for every tile.
OTHER_OF_THREADS, OF_COLUMN, OF_WEIGHT = 40, 24, 3
OTHER_REGISTERS = {"float64": 52, "float32": 48, "tf32": 44, "bfloat16": 32, "float16": 32}


# Issued for each k-step: for 16 rows of A, for 8 columns of B, for their product.
INSTRUCTIONS = {
    "float64": (2.5, 1.5, 1),
    "float32": (16, 8, 5),
    "tf32": (6, 2, 1.2),
    "bfloat16": (1.5, 1, 1),
    "float16": (1.5, 1, 1),
}


def together(*times: float) -> float:
    """Microseconds of units that work side by side, but not perfectly."""
    slowest = max(times)
    return slowest + OVERLAP * (sum(times) - slowest)


Places = TypeVar("Places", int, NDArray[np.int64])


@dataclass(frozen=True)
class Layout:
    """Rows ROW apart, p's of a row STEP apart, I contiguous: layout.cuh."""

    p: int
    i: int
    row: int
    step: int

    def __str__(self) -> str:
        return f"Layout<{self.p}, {self.i}, {self.row}, {self.step}>"

    def at(self, e: Places) -> Places:
        return e // (self.p * self.i) * self.row + e // self.i % self.p * self.step + e % self.i


# Asynchronous copies of 512 bytes take shared memory four cycles where they keep their places in lines of 128. With
# padding between rows they take at least twice as long, or, in these four, so long for them and for each row
# (docs/traps.md).
LEAST_SHIFTED, OF_SHIFTED, OF_SHIFTED_ROW = 2.0, 1.2, 0.31
COPIED, PIECE, LINE = 512, 16, 128  # bytes that a warp copies at once, that a lane does, and of a line
WIDE_STORE = 64  # bytes of a row that four lanes store straight to memory: of fewer, L2 takes fewer in a microsecond


def times_of_copies(layout: Layout, chunk: int, size: int) -> float:
    """What asynchronous copies of a state from memory take of shared memory, in what whole lines take. All of
    its rows are copied, or `chunk` elements of each."""
    run, apart = (layout.i, layout.step) if layout.i > 1 else (layout.p, layout.row)
    together = size * (min(run, chunk) if chunk else run)
    if together % PIECE:
        return LEAST_SHIFTED
    if apart != run:
        return max(LEAST_SHIFTED, OF_SHIFTED + OF_SHIFTED_ROW * COPIED / together)
    return max(1.0, LINE / together) if chunk else 1.0


# Where a stage's state is from: copied from memory, or made by a stage before it
Source = Literal["memory", "stage", "other"]


@dataclass(frozen=True)
class Stage:
    """One contraction of a tile: `rows` times [p, inner] -> [q, inner], in warp tiles of mt x nt times 16 x 8, or,
    where these are 0, by threads that have all of a small weight each."""

    p: int
    q: int
    inner: int
    rows: int
    mt: int
    nt: int
    dtype: str
    source: Source = field(default="other", kw_only=True)

    def __str__(self) -> str:
        how = "rows" if self.by_rows else "columns"
        return f"{self.p}→{self.q} by {how} " + (f"{16 * self.mt}×{8 * self.nt}" if self.mt else "of threads")

    @property
    def by_rows(self) -> bool:
        return self.inner == 1

    @property
    def inner_padded(self) -> int:
        return 1 if self.by_rows else round_up(self.inner, 8)

    @property
    def padded(self) -> int:
        """p's of a row with what pads them, by columns."""
        return round_up(self.p, 8) if self.mt else self.p

    @property
    def m(self) -> int:
        return self.rows if self.by_rows else self.q

    @property
    def down(self) -> int:
        """Rows of the state that a warp tile has by columns, if it is not a part of one."""
        return _down(self.inner_padded, self.nt) if self.nt else 1

    @kept
    def sums(self) -> int:
        """Tiles of 16 x 8 sums for a warp, as what bounds them counts them."""
        return self.mt * self.nt * SUM_REGISTERS[self.dtype]

    @kept
    def tiles(self) -> int:
        if not self.mt:
            return -(-self.rows * self.inner // 32)
        return -(-self.m // (16 * self.mt)) * tiles_across(self.q, self.inner, self.rows, self.nt)

    @property
    def weight_stride(self) -> int:
        return row_step(self.p, self.dtype)

    @kept
    def weight_bytes(self) -> int:
        rows = round_up(self.q, 8 * self.nt if self.by_rows else 16 * self.mt) if self.mt else self.q
        return rows * self.weight_stride * ELEMENT_BYTES[self.dtype]

    @kept
    def layout(self) -> Layout:
        """The layout of the state that it reads: no two lanes of an access in one bank, p padded to whole matrix steps,
        but for threads by columns. Where a stage before has made it, whose lanes store q's in rows of their own, no two
        of these are in one bank either."""
        if self.by_rows:
            # Two lanes of a row of 32 bytes meet, which takes less than to copy rows with padding between them.
            is_short = self.p * ELEMENT_BYTES[self.dtype] == 32 and self.p % 8 == 0
            as_in_memory = is_short and self.source == "memory" and self.mt > 0
            return Layout(self.p, 1, self.p if as_in_memory else row_step(self.p, self.dtype), 1)
        step = self.inner_padded + 4 if self.dtype == "float64" else _odd_eights(self.inner_padded)
        row = self.padded * step
        return Layout(self.p, self.inner, _odd_eights(row) if self.source == "stage" and self.rows > 1 else row, step)

    @kept
    def stores_widely(self) -> bool:
        """Whether four lanes store so much of a row side by side, straight to memory, as chain.cuh does."""
        size = ELEMENT_BYTES[self.dtype]
        tiles = WIDE_STORE // (8 * size)
        return not self.nt % tiles and not (self.q if self.by_rows else self.inner) % (8 * tiles)

    @kept
    def state_bytes(self) -> int:
        """Bytes of the state that it reads, with what its tiles touch beyond the last row."""
        rows = round_up(self.rows, max(1, 16 * self.mt) if self.by_rows else self.down)
        behind = (
            0 if self.by_rows or not self.nt else max(0, round_up(self.inner_padded, 8 * self.nt) - self.layout.step)
        )
        return round_up((rows * self.layout.row + behind) * ELEMENT_BYTES[self.dtype], 128)

    @kept
    def is_odd(self) -> bool:
        """Whether places of its sums have to be computed as the kernel runs, which takes registers."""
        return bool(self.mt and ((self.rows if self.by_rows else self.inner) % 8 or self.q % 8))

    @kept
    def registers(self) -> int:
        """Registers of a thread, about: sums, operands, and what the loops need. Split floats take two of each."""
        words = 2 if self.dtype in ("float32", "float64") else 1
        places = 12 if self.is_odd else 0
        if not self.mt:
            return (2 if self.dtype == "float64" else 1) * (self.p * self.q + 2 * (2 * self.p + 2)) + OTHER_OF_THREADS
        return words * (4 * self.mt * self.nt + 4 * self.mt + 2 * self.nt) + OTHER_REGISTERS[self.dtype] + places

    @kept
    def result_layout(self) -> Layout:
        """The layout of what it writes, where no stage follows."""
        if self.by_rows:
            return Layout(self.q, 1, _odd_eights(round_up(self.q, 8)), 1)
        step = _odd_eights(round_up(self.inner, 8))
        return Layout(self.q, self.inner, self.q * step, step)

    @property
    def memory_layout(self) -> Layout:
        """What it writes as memory has it, with nothing between its rows."""
        return Layout(self.q, self.inner, self.q * self.inner, self.inner if self.inner > 1 else 1)

    @kept
    def result_bytes(self) -> int:
        return round_up(self.rows * self.result_layout.row * ELEMENT_BYTES[self.dtype], 128)

    def parts(self, warps: int, gpu: Gpu) -> tuple[float, float, float]:
        return stage_parts(self.p, self.q, self.inner, self.rows, self.mt, self.nt, self.dtype, warps, gpu)


def stage_us(p: int, q: int, inner: int, rows: int, mt: int, nt: int, dtype: str, warps: int, gpu: Gpu) -> float:
    """Microseconds of one multiprocessor for a tile, were it alone. The planner asks thousands of times."""
    return together(*stage_parts(p, q, inner, rows, mt, nt, dtype, warps, gpu))


def stage_parts(
    p: int, q: int, inner: int, rows: int, mt: int, nt: int, dtype: str, warps: int, gpu: Gpu
) -> tuple[float, float, float]:
    """Microseconds of multiplying, moving and issuing among those."""
    if not mt:
        return _parts_of_threads(p, q, inner, rows, dtype, warps, gpu)
    tiles = -(-(rows if inner == 1 else q) // (16 * mt)) * tiles_across(q, inner, rows, nt)
    shares = -(-tiles // warps) * warps  # some warps may have nothing to do in the last round
    k, size = p + 7 & ~7, ELEMENT_BYTES[dtype]
    multiply = 2 * shares * (16 * mt * 8 * nt) * k / gpu.flops[dtype]
    move = (tiles * (16 * mt + 8 * nt) * k + rows * q * inner) * size / gpu.shared_bytes
    issue = shares * (steps_of(p, dtype) * of_step(mt, nt, dtype) + 8 * mt * nt + 40) / gpu.instructions
    return multiply, move, issue


def steps_of(p: int, dtype: str) -> int:
    """Of the matrix unit, along p."""
    return -(-(p + 7 & ~7) // (16 if ELEMENT_BYTES[dtype] == 2 else 8))


def of_step(mt: int, nt: int, dtype: str) -> float:
    """Instructions of a warp for a k-step of its tile."""
    of_a, of_b, of_product = INSTRUCTIONS[dtype]
    return mt * of_a + nt * of_b + mt * nt * of_product


def _parts_of_threads(
    p: int, q: int, inner: int, rows: int, dtype: str, warps: int, gpu: Gpu
) -> tuple[float, float, float]:
    """Microseconds of a stage by threads likewise."""
    issue = warps * of_threads(p, q, inner, rows, dtype, warps) / gpu.instructions
    return 0.0, rows * inner * (p + q) * ELEMENT_BYTES[dtype] / gpu.shared_bytes, issue


def of_threads(p: int, q: int, inner: int, rows: int, dtype: str, warps: int, terms: int = 1) -> int:
    """Instructions of each warp for a stage by threads, of several terms that are summed: two columns at a time where
    they are pairs of 16 bits."""
    size = ELEMENT_BYTES[dtype]
    wide = 2 if size == 2 and inner % 2 == 0 else 1
    rounds = -(-(rows * inner // wide) // (32 * warps))
    fma = p * q * wide * (2 if dtype == "float64" else 1)
    column = OF_COLUMN + terms * (p * (1 + size % 4) + fma) + q * (wide + 1)
    return rounds * column + terms * OF_WEIGHT * p * q


def tiles_across(q: int, inner: int, rows: int, nt: int) -> int:
    """Tiles of a warp: by rows of all q, else of what lies behind the mode in all rows, of which none has parts of
    two."""
    if inner == 1:
        return -(-q // (8 * nt))
    padded = inner + 7 & ~7
    return -(-rows // _down(padded, nt)) * -(-padded // (8 * nt))


def _down(padded: int, nt: int) -> int:
    return 8 * nt // padded if 8 * nt % padded == 0 else 1


@dataclass(frozen=True)
class Sandwich:
    """The last two modes at one visit: A by columns, then B by rows, what is between them in registers. `nc` tiles of 8
    columns of A X are made at a time."""

    first: Stage
    second: Stage

    @kept
    def layout(self) -> Layout:
        return self.first.layout

    @kept
    def state_bytes(self) -> int:
        return round_up(self.first.rows * self.layout.row * ELEMENT_BYTES[self.first.dtype], 128)

    @kept
    def weight_bytes(self) -> int:
        return self.first.weight_bytes + self.second.weight_bytes

    @property
    def sums(self) -> int:
        """Sums of a warp for both, which may be a quarter more than a stage's."""
        return -(-(self.first.nt + self.second.nt) * self.first.mt * SUM_REGISTERS[self.first.dtype] * 4 // 5)

    @property
    def tiles(self) -> int:
        return self.second.tiles

    @kept
    def registers(self) -> int:
        words = 2 if self.first.dtype == "float64" else 1
        return self.second.registers + words * 4 * self.first.mt * self.first.nt - 8

    def __str__(self) -> str:
        return f"[{self.first}, {self.second}]"

    def time(self, warps: int, gpu: Gpu) -> float:
        flops, issued, moved = self.counted(warps)
        shares = -(-self.tiles // warps) * warps
        issue = shares * (issued + 8 * self.second.mt * self.second.nt + 40) / gpu.instructions
        return together(flops / gpu.flops[self.first.dtype], moved / gpu.shared_bytes, issue)

    def counted(self, warps: int) -> tuple[float, float, float]:
        """FLOPs, instructions of a warp for the steps of its tile, and bytes."""
        a, b = self.first, self.second
        rows, k, size, chunks = 16 * a.mt, round_up(a.p, 8), ELEMENT_BYTES[a.dtype], a.inner // (8 * a.nt)
        _, of_b, of_product = INSTRUCTIONS[a.dtype]
        width = 16 if size == 2 else 8
        first = k / width * of_step(a.mt, a.nt, a.dtype) * chunks
        second = a.inner / width * (a.mt * 4 + b.nt * of_b + b.mt * b.nt * of_product)
        read = self.tiles * (k * a.inner + chunks * rows * k + a.inner * 8 * b.nt)
        flops = 2 * -(-self.tiles // warps) * warps * rows * a.inner * (k + 8 * b.nt)
        return flops, first + second, (read + a.rows * a.q * b.q) * size


Stages = tuple[Stage | Sandwich, ...]


MUCH_US = 1.0  # of a multiprocessor's traffic: as much takes half as long as any amount to be under way


@dataclass(frozen=True)
class TileUs:
    """What a pass takes whose groups of warps take tile after tile, in microseconds."""

    memory: float = 0.0  # of a tile's traffic
    alone: float = 0.0  # of a tile that nothing runs beside
    further: float = 0.0  # of a tile of each group, all beside one another
    beside: float = 0.0  # of weights before tiles, and of sums behind them
    filled: float = 0.0  # until all of the traffic is under way, if there is much of it, and behind the last of it

    def of(self, tiles: int, groups: int, blocks: int, gpu: Gpu) -> float:
        """Of so many tiles, dealt to as many groups of each block."""
        traffic = self.memory * tiles / blocks
        start = gpu.rates.behind_us + min(gpu.rates.ramp_us, traffic) + self.filled * traffic / (traffic + MUCH_US)
        whole, left = divmod(-(-tiles // blocks), groups)  # rounds of a block, and tiles of its last one
        last = max(min(self.alone, self.further), self.further * left / groups) if left else 0.0
        first = max(0.0, self.alone - self.further)  # that nothing hides of the first round
        return start + self.beside + first + whole * self.further + last


NO_TILES = TileUs()


def memory_of(stages: Stages, alone: bool, in_place: bool, straight: bool, terms: int = 1) -> tuple[int, int, int]:
    """Bytes of a slot, which may have x `alone`, and of the buffers beside it for states of odd and of even number; the
    result is one of them, unless it goes `straight` to memory, or has a place of its own. What the last stage of a sum
    of several terms reads is there for each of them; what stages make before that lies where the last term's will."""
    states = [*(stage.state_bytes for stage in stages), *[last_of(stages).result_bytes] * (not straight)]
    if in_place:
        return max(states), 0, 0
    last = len(stages) - 1
    others = (terms - 1) * states[last] if last else 0
    sides = [max(states[first::2], default=0) + others * (last % 2 == first % 2) for first in (1, 2)]
    if alone:
        return states[0], sides[0], sides[1]
    return max(states[0::2]), sides[0], 0


def last_of(stages: Stages) -> Stage:
    last = stages[-1]
    return last.second if isinstance(last, Sandwich) else last


def row_step(p: int, dtype: str) -> int:
    """Elements between rows of p that the matrix unit takes whole: an odd multiple of 16 bytes, of 32 for doubles."""
    least = 8 if ELEMENT_BYTES[dtype] == 2 else 4
    n = round_up(p, 8)
    return n if n // least % 2 else n + least


def _odd_eights(n: int) -> int:
    """The next odd multiple of eight."""
    n = round_up(n, 8)
    return n if n % 16 else n + 8
