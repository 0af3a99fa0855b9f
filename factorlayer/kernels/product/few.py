"""A pass of few samples for an untied contraction or a dense layer: few.cuh, tiles and source. What counts is how soon
all of a weight is on its way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Asks, constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import MOST_BLOCKS, Pass, fastest
from factorlayer.kernels.product.streamed import Product
from factorlayer.kernels.work import round_up

MOST_SAMPLES = 64
TILES = (2, 4, 8)  # of 8 samples, that a block's warps multiply at once
SAMPLES = (16, 32, 64)  # of a block, where there are more
HELD_ROWS = 64  # registers of a thread that hold a weight, at most
HELD_FLOATS = 192  # of float, times tiles of samples: with more, ptxas spills
MOST_REGISTERS = 248
SECTOR = 32  # bytes that L2 stores at once
STORED_BYTES = 40e3  # by a multiprocessor in a microsecond, of whole sectors
PART_US = 3.2e-3  # for a part of a sector: 2.8 million of them, of 1024 samples of 16 times 256 → 688, took 69 us
CYCLES = 1.75e3  # in a microsecond
# Of a pass behind another, more than a small kernel takes, and for each register that holds a weight; of memory's rate
# that weights come by; cycles of a warp's access to eight rows, and of one to a sum in shared memory, which is waited
# for; the time that warps' products take, of what the table has for them. Fitted to 230 plans forward and 403 of
# gradients of 45 Monarch layers on one H100, 1 to 60 samples, all dtypes; of 40 layers drawn afterwards, and those 45,
# 80 times forward and 84 of all gradients are within 30 %.
BEGIN_US, HELD_US, OF_MEMORY = 0.15, 0.005, 0.83
LOAD_CYCLES, ADD_CYCLES, OF_FLOPS = 4.4, 80, 1.5


def chunk_of(size: int) -> int:
    """Elements of a row that a warp's access has: four pieces of 16 bytes."""
    return 64 // size


def _most(tiles: int, by_elements: bool) -> int:
    """Chunks of states, of so many tiles of 8 samples, that a thread has at once, at most."""
    return (8 if by_elements else 16) // tiles


def held_at_once(chunks: int, tiles: int, by_elements: bool = False) -> int:
    """Chunks of a weight that a thread has at once, of so many that it takes in a round. As few_tiles.cuh has it."""
    return round_up(chunks, 2) if chunks > _most(tiles, by_elements) else chunks


def states_ahead(held: int, tiles: int, by_elements: bool = False) -> int:
    """Chunks of states."""
    return next(ahead for ahead in range(min(held, _most(tiles, by_elements)), 0, -1) if held % ahead == 0)


def most_held(dtype: str, tiles: int) -> int:
    """Registers of a thread that hold a weight by rows, at most."""
    return min(HELD_ROWS, HELD_FLOATS // tiles) if dtype == "float32" else HELD_ROWS


def registers_of(dtype: str, held: int, height: int, sums: int, rows: int) -> int:
    """A thread's registers, `held` of which hold a weight and states: `height` left operands, of float as two halves,
    `sums` tiles, `rows` that are pointed to."""
    each = 8 if dtype in ("float32", "float64") else 4
    halves = 32 * height if dtype == "float32" else 0
    return round_up((44 if dtype == "float64" else 32) + held + each * sums + 2 * rows + halves, 8)


def bytes_of_totals(rows: int, tiles: int, ways: int, size: int, run: int = 0, by_samples: bool = False) -> int:
    """Bytes of what warps have summed, as WarpTotals has it; `run` is of a lane's samples, where these are more than
    pairs."""
    size, samples = max(4, size), 8 * tiles
    skews = samples // run * (16 if by_samples else 32) // size if run else 0
    elements = rows * (samples + 8 + skews) if by_samples else samples * (rows + 16 // size) + skews
    return ways * elements * size + 16


def busy_us(gpu: Gpu, dtype: str, size: int, loads: float, products: float, share: float) -> float:
    """Microseconds for a weight of so many bytes, `loads` of warps, and multiply-adds, of which a multiprocessor has
    `share`."""
    moved = max(size / (OF_MEMORY * gpu.memory_bytes * gpu.sms), share * size / gpu.l2_bytes)
    moved += share * LOAD_CYCLES * loads / gpu.rates.cycles
    return max(moved, share * OF_FLOPS * 2 * products / gpu.flops[dtype])


def waits_us(gpu: Gpu, tiles: int, waits: int, adds: int) -> float:
    """Microseconds that the tiles of a block wait, one behind the other: for chunks of states that are not yet there,
    the first of which are until a small kernel has run; and for so many accesses to sums in shared memory."""
    return (tiles * waits - 1) * gpu.rates.wait_us + tiles * adds * ADD_CYCLES / gpu.rates.cycles


def share_of(tiles: int, gpu: Gpu) -> float:
    """The busiest multiprocessor's, where tiles are dealt one by one."""
    return -(-tiles // gpu.sms) / tiles


class OfFew(Pass):
    """A pass of few samples, with what is the same of those forward and back. `needed` are registers of a thread."""

    gpu: Gpu
    needed: Any

    units_per_sample = 1
    waits = False

    @property
    def registers(self) -> int:
        return int(min(MOST_REGISTERS, self.needed))

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once: each of its four parts has registers of its own."""
        registers = 4 * (512 // self.registers) * 32
        return max(1, min(registers // self.threads, (self.gpu.shared + 1024) // (self.shared + 1024)))


@dataclass(frozen=True)
class Few(OfFew):
    """A pass of one contraction, tiled. `us` is the time predicted."""

    product: Product
    wg: int
    ways: int
    height: int
    rounds: int  # in which a thread has its part of a weight
    tiles: int  # of 8 samples that a block's warps multiply at once
    samples: int  # of a block
    first: bool
    last: bool
    gpu: Gpu
    us: float = 0.0

    blocks_per_sm = 0  # as many as there is work

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def threads(self) -> int:
        return 32 * self.wg * self.ways

    @property
    def shared(self) -> int:
        return self.wg * bytes_of_totals(16 * self.height, self.tiles, self.ways, self.product.size)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows of all groups, which blocks take one after the other."""
        p = self.product
        groups = -(-p.fast // self.wg) * (p.groups // p.fast)
        return -(-p.contraction.q // (16 * self.height)) * groups

    @property
    def split(self) -> int:
        return min(self.row_tiles, self.gpu.sms * self.blocks)

    @property
    def load(self) -> int:
        """Bytes of an access to a row."""
        return math.gcd(16, self.product.contraction.p * self.product.size)

    @property
    def chunks(self) -> int:
        """Chunks of its weight that a warp has at once."""
        chunks = -(-self.product.contraction.p // (chunk_of(self.product.size) * self.ways))
        return held_at_once(-(-chunks // self.rounds), self.tiles, self.load == 2)

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight. What comes by 2 bytes has one for each."""
        return (16 if self.load == 2 else 8) * self.height * self.chunks

    @property
    def needed(self) -> int:
        """Registers of a thread."""
        of_x = (8 if self.load == 2 else 4) * self.tiles * states_ahead(self.chunks, self.tiles, self.load == 2)
        of_words = 24 if self.product.dtype == "float32" and self.load < 16 else 0
        held, rows = self.held + of_x, self.height * 2
        return of_words + registers_of(self.product.dtype, held, self.height, self.height * self.tiles, rows)

    @property
    def run(self) -> int:
        """Elements that are stored at once."""
        p = self.product
        return math.gcd(16 // p.size, *((self.wg, p.fast) if self.wg > 1 else (p.b,)))

    @property
    def together(self) -> int:
        """Elements of a sample that lie side by side in y, of what a block makes."""
        p, columns = self.product, 16 * self.height
        if self.wg == p.fast:
            return min(columns, p.contraction.q) * self.wg
        return self.wg if self.wg > 1 else min(columns, p.b)

    @property
    def stored_us(self) -> float:
        """Microseconds that a multiprocessor takes to store one sample's results, were it alone."""
        p = self.product
        run = self.together * p.size
        parts = 0 if run % SECTOR == 0 and p.fast * p.b * p.size % SECTOR == 0 else 1 if run < SECTOR else 2
        each = parts * PART_US + max(0, run - parts * SECTOR) / STORED_BYTES
        return p.y_features / self.together * each

    @property
    def output_bytes(self) -> int:
        return self.product.y_features * self.product.size

    def us_of(self, batch: int) -> float:
        """Microseconds: what is moved and asked for, multiplied or stored, whichever takes longest, and behind it what
        the tiles of a multiprocessor wait for, one after the other."""
        if batch > MOST_SAMPLES:
            return self._us_of_many(batch)
        p, gpu = self.product, self.gpu
        chunk, passes = chunk_of(p.size), -(-batch // (8 * self.tiles))
        steps = -(-p.contraction.p // (chunk * self.ways))
        warps = self.row_tiles * self.wg * self.ways
        rows = 2 * self.height * (passes if self.rounds > 1 else 1)  # of eight, with those of states
        loads = warps * steps * (16 // self.load) * (rows + -(-batch // 8))
        products = warps * steps * chunk * 16 * self.height * 16 * -(-batch // 16)
        share = share_of(self.row_tiles, gpu)
        busy = busy_us(gpu, p.dtype, p.weights * p.size, loads, products, share)
        busy = max(busy, batch * self.stored_us / gpu.sms)
        waits = passes * -(-steps // states_ahead(self.chunks, self.tiles, self.load == 2))
        tiles = -(-self.row_tiles // (gpu.sms * self.blocks))
        cells = min(batch, 8 * self.tiles) * 16 * self.height * self.wg // self.run
        accesses = self.run if self.wg > 1 else -(-self.run * max(4, p.size) // 16)
        adds = passes * -(-cells // self.threads) * self.ways * accesses
        return gpu.rates.behind_us + BEGIN_US + HELD_US * self.held + busy + waits_us(gpu, tiles, waits, adds)

    def _us_of_many(self, batch: int) -> float:
        """The same of more samples: the weight's way from memory, states' from L2 for each of its tiles, and what is
        done behind it; more where not all blocks fit at once, registers are many, or runs short. Fitted to an H200.
        Every 16 samples, and every part of a weight, wait for L2 once more, in each of a multiprocessor's blocks."""
        p, gpu = self.product, self.gpu
        weight = p.weights * p.size
        blocks, tiles = -(-batch // self.samples), -(-batch // 16)
        # The weights of one behind another are on their way when that one ends, in a graph or not.
        us = gpu.rates.behind_us
        us += max(weight / (gpu.memory_bytes * gpu.sms), weight / (gpu.l2_bytes * min(gpu.sms, self.row_tiles)))
        # A load of a warp has pieces of eight rows, each a line of the first-level cache
        each = 1 / min(gpu.l2_bytes, 4 * self.load * CYCLES) / gpu.sms
        again = tiles if self.rounds > 1 else blocks  # the weight, from L2
        moved = (tiles / self.height + again - 1) * weight * each
        states = batch * (p.x_features * (not p.ours_in) + p.y_features) * p.size / (gpu.memory_bytes * gpu.sms)
        products = 2 * p.weights * 16 * tiles / (gpu.flops[p.dtype] * gpu.sms)
        waves = -(-self.row_tiles * blocks // (gpu.sms * self.blocks))
        turns = -(-min(batch, self.samples) // 16) * self.rounds
        waits = (waves * turns - self.rounds) * gpu.rates.wait_us
        held = (0.014 if p.dtype in ("float32", "float64") else 0.006) * self.held
        # A multiprocessor's blocks wait for what they all move: seven passes of 1031 to 1811 samples on one H100 took
        # both.
        us += max(moved, products, states, batch * self.stored_us / gpu.sms) + waits
        us += (self.rounds - 1) * gpu.rates.wait_us + 0.25 * (waves - 1)
        return us + held + 0.06 * self.wg * self.ways + 1 / self.run

    @property
    def details(self) -> str:
        p, c = self.product, self.product.contraction
        columns = f"{16 * self.height} columns for {self.wg} of {p.groups} groups"
        return f"{c.p}→{c.q}, {columns}, {self.wg * self.ways} warps"

    @property
    def asks(self) -> Asks:
        return self.product.asks if self.first else ()

    @property
    def told(self) -> list[str]:
        p = self.product
        told = p.told | {"LOAD": self.load, "RUN": self.run}
        told |= {"WG": self.wg, "WAYS": self.ways, "HEIGHT": self.height, "ROUNDS": self.rounds, "TILES": self.tiles}
        told |= {"MORE": self.row_tiles > self.split}
        told |= {"ROUND_Y": p.dtype == "tf32" and p.ours_out, "FIRST": self.first, "LAST": self.last}
        return [*kinds(p.dtype), activation_type(p.activation, p.dtype, p.scalars), *constants(told)]


def tile(product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True) -> Few | None:
    """The fastest tiling by prediction for a class of batches, if the product has one."""
    p = product
    c = p.contraction
    if c.tied and (c.outer * c.inner > 1 or batch > MOST_SAMPLES):
        return None
    if p.x_step > 1 or p.terms > 1 or p.reads_beside:
        return None
    samples = SAMPLES if batch > MOST_SAMPLES else SAMPLES[-1:]
    return fastest(_tilings(product, gpu, samples, first, last), batch)


def _tilings(product: Product, gpu: Gpu, samples: tuple[int, ...], first: bool, last: bool) -> Iterator[Few]:
    p = product
    # Of more samples, float and double in tiles of 32 rows have not been measured.
    heights = (1,) if len(samples) > 1 and p.dtype in ("float32", "float64") else (1, 2)
    all_tiles = TILES[:1] if len(samples) > 1 else TILES
    least = 1 if len(samples) == 1 or p.dtype != "float32" else 2  # warps of a group: splitting needs registers as well
    for wg, ways, height, tiles in itertools.product((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), heights, all_tiles):
        if wg > p.fast or (wg > 1 and (p.b > 1 or wg * p.size > 2 * SECTOR)):
            continue
        if ways < least or not 2 <= wg * ways <= 16:
            continue
        chunks, most = -(-p.contraction.p // (chunk_of(p.size) * ways)), most_held(p.dtype, tiles)
        for rounds in range(1, chunks + 1):
            plan = Few(p, wg, ways, height, rounds, tiles, samples[0], first, last, gpu)
            if plan.held <= most and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.split <= MOST_BLOCKS and plan.shared <= gpu.shared:
                    yield from (replace(plan, samples=each) for each in samples if each >= 8 * tiles)
                break
