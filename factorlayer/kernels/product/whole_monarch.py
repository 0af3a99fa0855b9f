"""The dense weight of a Monarch layer, and both weights' gradients from that one's: whole_monarch.cuh, its tiles.

For each group k of the first contraction and l of the second both are products of matrices, by the matrix unit. Of 16
bits, the dense weight's gradient is floats, of any range: its products are tf32's, as exact as half precision's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from factorlayer.device.code import ELEMENT, MATH, Long, constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import MOST_BLOCKS
from factorlayer.kernels.product.streamed import SECTOR
from factorlayer.kernels.product.whole import START_US, THREADS, Between, Largest, WholeWeight
from factorlayer.kernels.stages import INSTRUCTIONS, together
from factorlayer.kernels.timing import waits_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

Of = TypeVar("Of", "MonarchWeight", "MonarchGradients")

WARPS = THREADS // 32
# Registers of a thread beside sums and operands, and for each of a warp's tiles; blocks of a multiprocessor by how many
# their threads have
OTHER_REGISTERS, OF_PLACES = {"float64": 56, "float32": 52, "tf32": 44}, 6
AT_ONCE = {80: 3, 128: 2}
MOST_HELD = 144, 72, 32, 16  # of q's and p's, tiles that are tried
MOST_TERMS, MOST_RANKS = 64, 64  # r's that a weight's products sum over at once, and that gradients have
DEPTHS = 16, 32, 64  # q's or p's that gradients' products sum over at once
GROUPS = 1, 2, 4, 8, 16, 32, 64  # that a block has, about
HELD_BY_L2 = 32 << 20  # bytes; of more, memory is waited for
MOST_BYTES = 1 << 31
# Issue slots of a warp: for a tile of it, for pieces that are loaded and put down, for numbers that are rounded and
# widened, and for two sums that are put down, as one or as two; and microseconds until a kernel has what it needs to
# begin and all has left. Of 30 passes of ten layers on an H200 83 % are within 30 %.
OF_TILE, OF_PIECE, OF_ROUNDED, OF_WIDENED, OF_PAIR, OF_TWO = 42, 35, 1, 2, 17, 28
BEGIN_US = 1.0


@dataclass(frozen=True)
class Tile:
    """Sums of a block: of some groups at once, m x n of each, of which its warps have tiles of 16 mt x 8 nt."""

    groups: int
    m: int
    n: int
    mt: int
    nt: int

    def __str__(self) -> str:
        return f"Tile<{self.groups}, {self.m}, {self.n}, {self.mt}, {self.nt}>"

    @property
    def rows(self) -> int:
        return round_up(self.m, 16 * self.mt)

    @property
    def columns(self) -> int:
        return round_up(self.n, 8 * self.nt)

    @property
    def each(self) -> int:
        """Tiles of a warp."""
        return -(-self.groups * self.rows * self.columns // (128 * self.mt * self.nt * WARPS))

    def registers(self, dtype: str) -> int:
        """Of a thread, about: split floats have sums of high and of low parts beside the others, and two of each
        operand, of two steps."""
        words, some = 2 if dtype == "float64" else 1, min(self.nt, 2 if dtype == "float32" else 4)
        operands = words * (4 * self.mt + 2 * some)
        if dtype == "float32":
            operands = 16 * self.mt + 4 * some + 4 * self.mt * (self.nt + some)
        sums = 4 * self.mt * self.nt * self.each * words
        return sums + operands + OF_PLACES * self.each + OTHER_REGISTERS.get(dtype, OTHER_REGISTERS["tf32"])


@dataclass(frozen=True)
class Lines:
    """Lines that a block moves, of so many numbers, by pieces of some; numbers of `size` bytes, which take so many
    instructions each beside."""

    lines: int
    numbers: int
    piece: int
    size: int
    beside: int = 0

    @property
    def issued(self) -> float:
        """Instructions of warps."""
        pieces = -(-self.numbers // self.piece)
        across = min(32, 128 // (self.piece * self.size), 1 << (pieces - 1).bit_length())
        return self.lines * round_up(pieces, across) / 32 * (OF_PIECE + self.beside * self.piece)

    @property
    def bytes(self) -> int:
        return self.lines * self.numbers * self.size


@dataclass(frozen=True)
class OfBoth(Between):
    """A pass between both weights and the dense one."""

    first: Contraction
    second: Contraction
    dtype: str
    gpu: Gpu

    if TYPE_CHECKING:

        @property
        def math(self) -> str:
            """The dtype of its products."""

    @property
    def rank(self) -> int:
        return self.first.q // self.second.inner

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Groups of the first contraction and numbers of each, the same of the second one, and the rank."""
        return self.first.outer, self.first.p, self.second.inner, self.second.q, self.rank

    @property
    def features(self) -> tuple[int, int]:
        return self.first.outer * self.first.p, self.second.inner * self.second.q

    @property
    def fits(self) -> bool:
        """Whether it fits in a block's shared memory, and, as a weight whose end is counted in ints, in memory."""
        return self.shared <= self.gpu.shared and self.elements * self._sum_bytes < MOST_BYTES

    if TYPE_CHECKING:

        @property
        def registers(self) -> int:
            """Of a thread, about."""

    @property
    def blocks(self) -> int:
        return next(blocks for most, blocks in AT_ONCE.items() if self.registers <= most)

    @property
    def step(self) -> int:
        """The size that one product of the matrix unit sums over."""
        return 16 if self.math in ("bfloat16", "float16") else 8

    def _stride(self, numbers: int) -> int:
        """From a row of operands to the next: operands.cuh."""
        return numbers + (8 if self.step == 16 else 4)

    def _piece(self, *numbers: int, size: int = 0) -> int:
        """Numbers that are moved at once, in rows of so many."""
        return math.gcd(16 // (size or self.size), *numbers)

    def _busy_us(self, tile: Tile, depth: int, loads: Iterable[Lines], issued: float, moved: float) -> float:
        """Microseconds of a multiprocessor for a block that sums over so much at once: `issued` and `moved` is what
        else it does, in instructions, and in bytes from L2."""
        gpu, steps, tiles = self.gpu, depth // self.step, tile.each * WARPS
        of_a, of_b, of_product = INSTRUCTIONS[self.math]
        size = 2 if self.step == 16 else self._sum_bytes
        each = steps * (tile.mt * of_a + tile.nt * of_b + tile.mt * tile.nt * of_product) + OF_TILE
        issued += tiles * each + sum(load.issued for load in loads)
        loaded = sum(load.bytes for load in loads)
        read = tiles * (16 * tile.mt + 8 * tile.nt) * depth * size
        multiply = 2 * 128 * tile.mt * tile.nt * tiles * depth / gpu.flops[self.math]
        issue = issued * waits_of(WARPS * self._together) / gpu.instructions
        return together(multiply, (read + 2 * loaded) / gpu.shared_bytes, issue, (loaded + moved) / gpu.l2_bytes)

    @property
    def _together(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return max(1, min(self.blocks, (self.gpu.shared + 1024) // (self.shared + 1024)))

    def _us_of(self, blocks: int, busy: float, alone: float, moved: int) -> float:
        """Of so many blocks, with what one takes of a multiprocessor and what it waits for; `moved` bytes are what
        memory moves if L2 does not hold them."""
        sms = self.gpu.sms
        us = max(-(-blocks // sms) * busy, -(-blocks // (sms * self._together)) * (busy + alone))
        return BEGIN_US + together(us, moved / (self.gpu.memory_bytes * sms) if moved > HELD_BY_L2 else 0.0)

    @property
    def _wait_us(self) -> float:
        """Of what is loaded before it is multiplied."""
        return self.gpu.rates.wait_us + 2 * self.gpu.rates.sync_us

    def _lines(self) -> list[str]:
        numbers = {"WEIGHT_0": self.first.weight, "WEIGHT_1": self.second.weight}
        return constants(numbers | dict(zip("KPLQR", self.sizes, strict=True)))


@dataclass(frozen=True)
class MonarchLargest(Largest):
    """The pass before that looks for the largest of each weight, by blocks."""

    shared = THREADS // 32 * 8
    numbers = 2

    @property
    def us(self) -> float:
        of = self.of
        return float(START_US + of._moved_us((of.first.weight_size + of.second.weight_size) * of.size))

    def __str__(self) -> str:
        return "the largest of each weight"

    @property
    def told(self) -> list[str]:
        first, second = self.of.first, self.of.second
        numbers = {"WEIGHT_0": first.weight, "WEIGHT_1": second.weight, "LARGEST": self.prepared_at // 4}
        numbers |= {"COUNT_0": first.weight_size, "COUNT_1": second.weight_size}
        long = {key: Long(value) for key, value in numbers.items()}
        return constants({"Element": ELEMENT[self.of.dtype], **long})


@dataclass(frozen=True)
class MonarchWeight(OfBoth, WholeWeight):
    """The pass that makes the dense weight: blocks have `k` groups of the first contraction and `others` of the
    second."""

    turned: bool
    tile: Tile
    k: int
    others: int

    largest = MonarchLargest

    @property
    def math(self) -> str:
        return self.dtype

    @property
    def registers(self) -> int:
        return self.tile.registers(self.dtype)

    @property
    def depth(self) -> int:
        """r's that are summed over at once."""
        return self.rank if self.rank <= MOST_TERMS else MOST_TERMS

    @property
    def _padded(self) -> int:
        return round_up(self.depth, self.step)

    @property
    def _pieces(self) -> tuple[int, int]:
        """Numbers of either weight that are loaded at once."""
        return self._piece(self.first.p, self._of_p), self._piece(self.rank, self.depth)

    @property
    def _of_p(self) -> int:
        """Columns that one block's lie behind another's."""
        return self.tile.n if self.tile.n < self.first.p else self.first.p

    @property
    def store(self) -> int:
        """Bytes of an access to the dense weight."""
        p, q = self.features
        if not self.turned:
            return self.size * (
                self._piece(p, self.k * self.first.p) if self.k > 1 else self._piece(self.first.p, self._of_p)
            )
        groups, rows = self.second.inner, min(self.tile.m, self.second.q)
        return self.size * (self._piece(groups, self.others) if self.others < groups else self._piece(q, rows * groups))

    @property
    def _runs(self) -> tuple[int, int]:
        """Lines of a block's results, and numbers that lie side by side in each."""
        rows, columns, groups = self.tile.m, self.k * self.tile.n, self.second.inner
        if not self.turned:
            return rows, columns
        return (columns, rows * groups) if self.others == groups else (columns * rows, self.others)

    @property
    def shared(self) -> int:
        tile = self.tile
        across = tile.columns + 4 if self.size == 8 else round_up(tile.columns, 16) + 8
        operands = tile.groups * (tile.rows * self._stride(self._padded) + self._padded * across) * self.size
        lines, run = self._runs
        if self.turned and self.others < self.second.inner:
            lines, run = lines // tile.m, run * tile.m
        results = lines * (-(-run * self.size // 16) | 1) * 16
        return max(operands, results) if tile.groups == self.k * self.others else operands + results

    @property
    def _blocks(self) -> int:
        groups, p, others, q, _ = self.sizes
        return -(-groups // self.k) * -(-p // self.tile.n) * -(-others // self.others) * -(-q // self.tile.m)

    @property
    def split(self) -> int:
        return min(self._blocks, MOST_BLOCKS)

    @property
    def us(self) -> float:
        tile, size, depth = self.tile, self.size, self._padded
        turns, chunks = -(-self.k * self.others // tile.groups), -(-self.rank // self.depth)
        of_p, of_r = self._pieces
        rounded = OF_ROUNDED if self.math == "tf32" else 0
        loads = (
            Lines(tile.groups * tile.rows, depth, of_r, size, rounded),
            Lines(tile.groups * depth, tile.columns, of_p, size, rounded),
        )
        lines, run = self._runs
        pieces = Lines(lines, run, self.store // size, size)
        paired = not self.turned and tile.n % 2 == 0
        put_down = tile.each * WARPS * tile.mt * tile.nt * 2 * (OF_PAIR if paired else OF_TWO)
        sectors = 1 + (SECTOR - math.gcd(SECTOR, run * size)) / (run * size)  # a run's ends are parts of sectors
        each = turns * chunks * self._busy_us(tile, depth, loads, put_down, 0)
        put = 2 * pieces.bytes / self.gpu.shared_bytes, pieces.issued / self.gpu.instructions
        busy = each + together(*put, sectors * pieces.bytes / self.gpu.l2_bytes)
        return self._us_of(self._blocks, busy, turns * chunks * self._wait_us + self.gpu.rates.wait_us, self.bytes)

    @property
    def told(self) -> list[str]:
        of_p, of_r = self._pieces
        told: dict[str, int | str] = {"Sums": str(self.tile), "PIECE_0": of_p, "PIECE_1": of_r, "DEPTH": self.depth}
        told |= {"AT_K": self.k, "AT_L": self.others, "TURNED": self.turned, "STORE": self.store}
        return kinds(self.dtype) + self._lines() + constants(told | self._told_places)


@dataclass(frozen=True)
class MonarchGradients(OfBoth):
    """The pass that makes gradients of both weights, from sums that are the dense weight's: blocks have `k` groups of
    the first contraction, and of the first weight r's and p's, of the second one q's and r's."""

    of_first: Tile
    of_second: Tile
    k: int
    depth: int

    reads, writes = "s2", "w"

    @property
    def math(self) -> str:
        return "tf32" if self.size == 2 else self.dtype

    @property
    def registers(self) -> int:
        return max(self.of_first.registers(self.math), self.of_second.registers(self.math))

    @property
    def weights(self) -> int:
        return self.first.weight_size + self.second.weight_size

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.weights * self.size,)

    @property
    def shared(self) -> int:
        first, second, depth = self.of_first, self.of_second, self.depth
        of_first = depth * (self._stride(first.rows) + self._stride(first.columns))
        of_second = (second.rows + second.columns) * self._stride(depth)
        return self.k * max(of_first, of_second) * self._sum_bytes

    @property
    def _counts(self) -> tuple[int, int]:
        """Blocks of either weight."""
        groups, p, others, q, rank = self.sizes
        all_groups = -(-groups // self.k) * others
        first, second = self.of_first, self.of_second
        of_first = -(-rank // first.m) * -(-p // first.n)
        return all_groups * of_first, all_groups * -(-q // second.m) * -(-rank // second.n)

    @property
    def split(self) -> int:
        return min(sum(self._counts), MOST_BLOCKS)

    @property
    def _pieces(self) -> tuple[int, int, int]:
        """Numbers of either weight, and of the dense one's sums, that are loaded at once."""
        p = self.first.p
        return self._piece(p), self._piece(self.rank, self.of_first.m), self._piece(p, size=self._sum_bytes)

    @property
    def us(self) -> float:
        _, p, _, q, _ = self.sizes
        of_p, of_r, of_sums = self._pieces
        size, sums, rounded = self.size, self._sum_bytes, OF_ROUNDED if self.math == "tf32" else 0
        widened = OF_WIDENED if size == 2 else rounded
        first, second, depth = self.of_first, self.of_second, self.depth
        busy = alone = 0.0
        for tile, length, count in ((first, q, self._counts[0]), (second, p, self._counts[1])):
            if tile is first:
                weights = Lines(self.k * depth, tile.rows, of_r, size, widened)
                dense = Lines(self.k * depth, tile.columns, of_sums, sums, rounded)
            else:
                weights = Lines(self.k * tile.columns, depth, of_p, size, widened)
                dense = Lines(self.k * tile.rows, depth, of_sums, sums, rounded)
            chunks = -(-length // depth)
            stored = tile.each * WARPS * tile.mt * tile.nt * 4
            last = stored / 2 * OF_TWO / self.gpu.instructions + stored * 32 * size / self.gpu.l2_bytes
            busy += count * (chunks * self._busy_us(tile, depth, (weights, dense), 0, 0) + last)
            alone += count * (chunks * self._wait_us + self.gpu.rates.wait_us)
        count = sum(self._counts)
        return self._us_of(count, busy / count, alone / count, self.elements * self._sum_bytes)

    title = "gradients of both weights"

    @property
    def details(self) -> str:
        p, q = self.features
        return f"{self.weights} sums, of {p}×{q}"

    @property
    def told(self) -> list[str]:
        first, second = self.first, self.second
        of_p, of_r, of_sums = self._pieces
        told: dict[str, int | str] = {"First": str(self.of_first), "Second": str(self.of_second)}
        told |= {"Math": MATH[self.math], "Element": ELEMENT[self.dtype], "AT_K": self.k, "DEPTH": self.depth}
        told |= {"PIECE_0": of_p, "PIECE_1": of_r, "PIECE": of_sums}
        of = {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        return self._lines() + constants(told | {key: Long(value) for key, value in of.items()})


def weight(chain: Chain, dtype: str, gpu: Gpu, turned: bool = False) -> MonarchWeight:
    """The tiling that is fastest by prediction."""
    return _weight(*chain.contractions, dtype, gpu, turned)


@functools.lru_cache(1024)
def _weight(first: Contraction, second: Contraction, dtype: str, gpu: Gpu, turned: bool) -> MonarchWeight:
    groups, others, apart = first.outer, second.inner, turned and second.inner > 1
    found = []
    for m, n in itertools.product(_shares(second.q), _shares(first.p)):
        most_k = groups if n >= first.p else 1
        for k, of_others in itertools.product(_balanced(most_k), _balanced(others) if apart else (1,)):
            if apart and k > 1 and of_others < others:  # first of all what takes turns in a row
                continue
            for tile in _tiles(k * of_others, m, n, dtype):
                found.append(MonarchWeight(first, second, dtype, gpu, turned, tile, k, of_others))
    return _fastest(found)


def parts(chain: Chain, dtype: str, gpu: Gpu, begin: int) -> tuple[MonarchGradients, ...]:
    """The pass that makes both gradients of the dense weight's, and needs no memory."""
    return (_gradients(*chain.contractions, dtype, gpu),)


@functools.lru_cache(1024)
def _gradients(first: Contraction, second: Contraction, dtype: str, gpu: Gpu) -> MonarchGradients:
    dtype_of = "tf32" if ELEMENT_BYTES[dtype] == 2 else dtype
    r = _shares(first.q // second.inner, (MOST_RANKS,))[0]
    depths = [depth for depth in DEPTHS if depth == DEPTHS[0] or depth < 2 * max(first.p, second.q)]
    found = []
    for k, p, q in itertools.product(_balanced(first.outer), _shares(first.p), _shares(second.q)):
        for tiles in itertools.product(_tiles(k, r, p, dtype_of), _tiles(k, q, r, dtype_of)):
            if tiles[0].groups == tiles[1].groups == k:
                found += [MonarchGradients(first, second, dtype, gpu, *tiles, k, depth) for depth in depths]
    return _fastest(found)


def _fastest(found: list[Of]) -> Of:
    """Of those that fit, if there are any."""
    return min([each for each in found if each.fits] or found, key=lambda each: each.us)


def _shares(n: int, most: Iterable[int] = MOST_HELD) -> list[int]:
    """Equal parts of so many numbers: whole eights, or all of them."""
    return sorted({min(n, round_up(-(-n // -(-n // each)), 8)) for each in most}, reverse=True)


def _balanced(n: int) -> list[int]:
    """Groups of a block, of which all have about as many."""
    return sorted({-(-n // -(-n // each)) for each in GROUPS if each < 2 * n})


def _tiles(groups: int, m: int, n: int, dtype: str) -> list[Tile]:
    """For each number of blocks that share a multiprocessor's registers."""
    return list(dict.fromkeys(tile for most in AT_ONCE if (tile := _tile(groups, m, n, dtype, most))))


@functools.lru_cache(4096)
def _tile(groups: int, m: int, n: int, dtype: str, most: int) -> Tile | None:
    """The most groups at once whose sums so many registers hold, in the tiles that take the fewest instructions."""
    of_a, of_b, of_product = INSTRUCTIONS[dtype]
    for some in dict.fromkeys((groups, *(each for each in reversed(GROUPS) if each < groups))):
        found = []
        for mt, nt in itertools.product((2, 1), (6, 5, 4, 3, 2, 1)):
            tile = Tile(some, m, n, mt, nt)
            if tile.registers(dtype) <= most:
                found.append((tile.each * (mt * of_a + nt * of_b + mt * nt * of_product + OF_TILE / 4), -mt * nt, tile))
        if found:
            return min(found, key=lambda way: way[:2])[2]
    return None
