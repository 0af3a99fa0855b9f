"""Passes of few samples for an untied contraction or a dense layer, and for all gradients of two: few.cuh, tiles and
source.

What counts is how soon all of a weight is on its way, and how few kernels wait for each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Asks, ask_for, constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import FEW, MOST_BLOCKS, OF_FEW, Pass
from factorlayer.kernels.product.streamed import Product, batches_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

MOST_SAMPLES = 64
TILES = (2, 4, 8)  # of 8 samples, that a block's warps multiply at once
SAMPLES = (16, 32, 64)  # of a block, where there are more
STRIPS = 2  # of 64 bytes, of a warp's part of a gradient
HELD_ROWS, HELD_COLUMNS = 64, 112  # registers of a thread that hold a weight, at most
HELD_TILES = {"float32": 128, "float64": 256}  # by columns, times tiles of samples: with more, ptxas spills
MOST_REGISTERS = 248
SECTOR = 32  # bytes that L2 stores at once
STORED_BYTES = 40e3  # by a multiprocessor in a microsecond, of whole sectors
PART_US = 3.2e-3  # for a part of a sector: 2.8 million of them, of 1024 samples of 16 times 256 → 688, took 69 us
CYCLES = 1.75e3  # in a microsecond
# Until a pass's blocks have begun and at its end, for each warp of a block and each register that holds a weight;
# cycles of a warp's access to eight rows, of one to rows of states of which gradients are summed, and of a store; the
# time that warps' products take, of what the table has for them. Fitted to 220 plans forward and 260 of gradients
# of 20 Monarch layers on one H100, 4 to 62 samples, all dtypes, of which 95 and 97 % are within 30 %.
BEGIN_US, WARP_US, HELD_US = 0.5, 0.015, 0.003
LOAD_CYCLES, OUTER_CYCLES, STORE_CYCLES, OF_FLOPS = 3.3, 37, 5, 1.5


def _chunk(size: int) -> int:
    """Elements of a row that a warp's access has: four pieces of 16 bytes."""
    return 64 // size


def _most(tiles: int, by_elements: bool) -> int:
    """Chunks of states, of so many tiles of 8 samples, that a thread has at once, at most."""
    return (8 if by_elements else 16) // tiles


def _held(chunks: int, tiles: int, by_elements: bool = False) -> int:
    """Chunks of a weight that a thread has at once, of so many that it takes in a round. As few.cuh has it."""
    return round_up(chunks, 2) if chunks > _most(tiles, by_elements) else chunks


def _ahead(held: int, tiles: int, by_elements: bool = False) -> int:
    """Chunks of states."""
    return next(ahead for ahead in range(min(held, _most(tiles, by_elements)), 0, -1) if held % ahead == 0)


def _registers(dtype: str, held: int, sums: int, rows: int) -> int:
    """A thread's registers, `held` of which hold a weight and states: `sums` tiles, `rows` that are pointed to."""
    each = 8 if dtype in ("float32", "float64") else 4
    halves = 32 if dtype == "float32" else 0
    return round_up((44 if dtype == "float64" else 32) + held + each * sums + 2 * rows + halves, 8)


def _totals(rows: int, tiles: int, ways: int, size: int, run: int = 0, by_samples: bool = False) -> int:
    """Bytes of what warps have summed, as FewTotals has it; `run` is of a lane's samples, where these are more than
    pairs."""
    size, samples = max(4, size), 8 * tiles
    skews = samples // run * (16 if by_samples else 32) // size if run else 0
    elements = rows * (samples + 8 + skews) if by_samples else samples * (rows + 16 // size) + skews
    return ways * elements * size + 16


def _blocks(threads: int, registers: int, shared: int, gpu: Gpu) -> int:
    """Blocks that a multiprocessor has at once: each of its four parts has registers of its own."""
    return max(1, min(4 * (512 // registers) * 32 // threads, (gpu.shared + 1024) // (shared + 1024)))


def _busy_us(gpu: Gpu, dtype: str, size: int, loads: float, products: float) -> float:
    """Microseconds for a weight of so many bytes, `loads` of warps, and multiply-adds."""
    accesses = LOAD_CYCLES * loads / gpu.rates.cycles
    return (size / gpu.memory_bytes + accesses + OF_FLOPS * 2 * products / gpu.flops[dtype]) / gpu.sms


@dataclass(frozen=True)
class Few(Pass):
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

    units_per_sample = 1
    blocks_per_sm = 0  # as many as there is work

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def threads(self) -> int:
        return 32 * self.wg * self.ways

    @property
    def shared(self) -> int:
        return self.wg * _totals(16 * self.height, self.tiles, self.ways, self.product.size)

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
        chunks = -(-self.product.contraction.p // (_chunk(self.product.size) * self.ways))
        return _held(-(-chunks // self.rounds), self.tiles, self.load == 2)

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight. What comes by 2 bytes has one for each."""
        return (16 if self.load == 2 else 8) * self.height * self.chunks

    @property
    def needed(self) -> int:
        """Registers of a thread."""
        of_x = (8 if self.load == 2 else 4) * self.tiles * _ahead(self.chunks, self.tiles, self.load == 2)
        of_words = 24 if self.product.dtype == "float32" and self.load < 16 else 0
        return of_words + _registers(self.product.dtype, self.held + of_x, self.height * self.tiles, self.height * 2)

    @property
    def registers(self) -> int:
        return min(MOST_REGISTERS, self.needed)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return _blocks(self.threads, self.registers, self.shared, self.gpu)

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
        """Microseconds: what is moved, asked for and multiplied, or else what is stored, and behind it what the tiles
        of a multiprocessor wait for: chunks of states that are not yet there, one after the other."""
        if batch > MOST_SAMPLES:
            return self._us_of_many(batch)
        p, gpu = self.product, self.gpu
        chunk, passes = _chunk(p.size), -(-batch // (8 * self.tiles))
        steps = -(-p.contraction.p // (chunk * self.ways))
        warps = self.row_tiles * self.wg * self.ways
        rows = 2 * self.height * (passes if self.rounds > 1 else 1)  # of eight, with those of states
        loads = warps * steps * (16 // self.load) * (rows + -(-batch // 8))
        products = warps * steps * chunk * 16 * self.height * 16 * -(-batch // 16)
        busy = max(_busy_us(gpu, p.dtype, p.weights * p.size, loads, products), batch * self.stored_us / gpu.sms)
        waits = passes * -(-steps // _ahead(self.chunks, self.tiles, self.load == 2))
        tiles = -(-self.row_tiles // (gpu.sms * self.blocks))
        us = gpu.rates.behind_us + BEGIN_US + WARP_US * self.wg * self.ways + HELD_US * self.held
        return us + busy + tiles * waits * gpu.rates.wait_us

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

    waits = False

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
    """The fastest tiling by prediction, if the product has one, for several numbers of few samples together; in the
    middle class of batches for its fewest samples, too."""
    few = tuple(round(each * batch) for each in OF_FEW)
    batches = few if batch <= MOST_SAMPLES else batches_of(product, batch)
    p = product
    c = p.contraction
    if c.tied and (c.outer * c.inner > 1 or batch > MOST_SAMPLES):
        return None
    if p.x_step > 1 or p.terms > 1 or p.reads_beside:
        return None
    samples = SAMPLES if batch > MOST_SAMPLES else SAMPLES[-1:]
    tilings = _tilings(product, gpu, samples, first, last)
    found = min(tilings, key=lambda plan: math.prod(plan.us_of(batch) for batch in batches), default=None)
    return replace(found, us=found.us_of(batch)) if found else None


def _tilings(product: Product, gpu: Gpu, samples: tuple[int, ...], first: bool, last: bool) -> Iterator[Few]:
    p = product
    heights = (1,) if p.dtype in ("float32", "float64") else (1, 2)
    all_tiles = TILES[:1] if len(samples) > 1 else TILES
    least = 1 if len(samples) == 1 or p.dtype != "float32" else 2  # warps of a group: splitting needs registers as well
    for wg, ways, height, tiles in itertools.product((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), heights, all_tiles):
        if wg > p.fast or (wg > 1 and (p.b > 1 or wg * p.size > 2 * SECTOR)):
            continue
        if ways < least or not 2 <= wg * ways <= 16:
            continue
        chunks = -(-p.contraction.p // (_chunk(p.size) * ways))
        for rounds in range(1, chunks + 1):
            plan = Few(p, wg, ways, height, rounds, tiles, samples[0], first, last, gpu)
            if plan.held <= HELD_ROWS and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.split <= MOST_BLOCKS and plan.shared <= gpu.shared:
                    yield from (replace(plan, samples=each) for each in samples if each >= 8 * tiles)
                break


# All gradients of two contractions


@dataclass(frozen=True)
class FewPass(Pass):
    """One of three passes that make all gradients of two untied contractions."""

    part: str  # the template of its kernel
    chain: Chain
    dtype: str
    gpu: Gpu
    ways: int
    words: int  # of a lane's part of a row, by columns
    rounds: int  # in which a thread has its part of a weight
    tiles: int  # of 8 samples that a block's warps multiply at once
    height: int  # of a warp's part of a weight, or of a gradient, in 16 rows
    us: float = 0.0

    header = "few"
    units_per_sample = 1
    units_per_block = 1 << 40
    is_apart = True

    @property
    def template(self) -> str:
        return self.part

    @property
    def reads(self) -> str:
        return {"FewStates": "x", "FewBack": "x", "FewLast": "s0"}[self.part]

    @property
    def writes(self) -> str:
        return {"FewStates": "s2", "FewBack": "s0", "FewLast": "y"}[self.part]

    @property
    def scratch(self) -> tuple[int, int, int]:
        return self.back_bytes, 0, self.states_bytes

    @property
    def leaves(self) -> str:
        return "prepared" if self.part == "FewStates" else ""

    reads_prepared = True

    def us_of(self, batch: int) -> float:
        return _backward_time(self, batch)

    def outputs(self, batch: int) -> tuple[int, ...]:
        first, second = self.both
        if self.part == "FewLast":
            return batch * first.outer * first.p * self.size, (first.weight_size + second.weight_size) * self.size
        return (self._bytes_of(batch),)

    def written(self, batch: int) -> int:
        if self.part == "FewLast":
            return sum(self.outputs(batch))
        return self._bytes_of(batch)

    def _bytes_of(self, batch: int) -> int:
        """Bytes of the states that it makes, of whole eights of samples."""
        (first, second), samples = self.both, round_up(batch, 8)
        if self.part == "FewStates":
            return (first.outer * first.p + second.inner * (second.p + second.q)) * samples * self.size
        return first.outer * first.q * samples * self.size

    @property
    def both(self) -> tuple[Contraction, Contraction]:
        first, second = self.chain.contractions
        return first, second

    @kept
    def rank(self) -> int:
        first, second = self.both
        return first.q // second.inner

    @property
    def threads(self) -> int:
        return 32 * self.ways

    @property
    def each(self) -> int:
        """Columns of a lane."""
        return self.words * 4 // self.size

    def _load(self, which: int, most: int) -> int:
        """Bytes of an access to rows of a weight."""
        return math.gcd(most, self.both[which].p * self.size)

    def _column_tiles(self, which: int) -> int:
        c = self.both[which]
        return c.outer * c.inner * -(-c.p // (8 * self.each))

    def _outer_tiles(self, which: int) -> int:
        """Tiles of a weight's gradient, by warps."""
        c = self.both[which]
        return c.outer * c.inner * -(-c.q // (16 * self.height)) * -(-c.p // (STRIPS * _chunk(self.size)))

    def _begin_of(self, which: int) -> int:
        """Where a weight's gradient begins, behind the other's or in front of it."""
        return self.both[which].weight * self.both[1 - which].weight_size

    def run_of(self, which: int) -> int:
        """Elements of a weight's gradient that are stored at once."""
        return math.gcd(16 // self.size, self.both[which].p, self._begin_of(which))

    @property
    def turns(self) -> int:
        """Blocks that turn states: a square of 16 bytes for each thread, of 16 samples."""
        piece = 16 // self.size
        first, second = self.both
        across, across_x = math.gcd(piece, second.inner), math.gcd(piece, first.outer * first.p)
        units = 16 // piece * (first.outer * first.p // across_x + second.q * second.inner // across)
        return -(-units // self.threads)

    @property
    def row_tiles(self) -> int:
        """Tiles of the weight that it multiplies, which blocks take one after the other."""
        first, _ = self.both
        if self.part == "FewStates":
            return first.outer * -(-first.q // (16 * self.height))
        return self._column_tiles(self._by_columns)

    @property
    def of_tiles(self) -> int:
        """Blocks that take these."""
        return min(self.row_tiles, self.gpu.sms * self.blocks)

    @property
    def of_weights(self) -> tuple[int, int]:
        """Blocks that make the gradients of the weights."""
        tiles = [-(-self._outer_tiles(which) // self.ways) for which in (0, 1)]
        most = self.gpu.sms * self.blocks
        if sum(tiles) <= most:
            return tiles[0], tiles[1]
        second = max(1, min(most - 1, round(most * tiles[1] / sum(tiles))))
        return max(1, most - second), second

    @property
    def _has_more_tiles(self) -> bool:
        """Whether a warp makes more than one tile of gradients."""
        return any(self._outer_tiles(which) > self.ways * self.of_weights[which] for which in (0, 1))

    @property
    def split(self) -> int:
        if self.part == "FewStates":
            return self.of_tiles + self.turns
        return self.of_tiles + (sum(self.of_weights) if self.part == "FewLast" else 0)

    @property
    def shared(self) -> int:
        if self.part == "FewStates":
            return _totals(16 * self.height, self.tiles, self.ways, self.size, by_samples=True)
        run = min(2 * self.tiles, 32 // self.size)
        run = max(run, 16 // self.size)
        totals = _totals(8 * self.each, self.tiles, self.ways, self.size, run, self.part == "FewBack")
        return max(totals, self._staged if self.part == "FewLast" else 0)

    @property
    def _staged(self) -> int:
        """Bytes of gradients' tiles of a block on their way through shared memory."""
        return self.ways * 16 * self.height * (STRIPS * 64 + 64)

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight."""
        if self.part == "FewStates":
            return (16 if self._load(0, 16) == 2 else 8) * self.height * self._at_once
        words = self.words * (2 if self._load(self._by_columns, 16) == 2 else 1)
        return 16 // self.size * words * self._at_once

    @property
    def _by_elements(self) -> bool:
        """Whether states are read by elements of 2 bytes."""
        return self.part == "FewStates" and self._load(0, 16) == 2

    @property
    def _at_once(self) -> int:
        """Chunks of its weight that a warp has at once."""
        return _held(-(-self._chunks // self.rounds), self.tiles, self._by_elements)

    @property
    def _by_columns(self) -> int:
        """The weight that is read by columns."""
        return 1 if self.part == "FewBack" else 0

    @property
    def _chunks(self) -> int:
        """Chunks of what is contracted that a warp has."""
        c = self.both[self._by_columns]
        return -(-(c.p if self.part == "FewStates" else c.q) // (_chunk(self.size) * self.ways))

    @property
    def needed(self) -> int:
        """Registers of a thread."""
        of_x = (8 if self._by_elements else 4) * self.tiles * _ahead(self._at_once, self.tiles, self._by_elements)
        tall = self.height if self.part == "FewStates" else self.each // 2
        rows = 16 if self.part == "FewStates" else 16 // self.size
        needed = _registers(self.dtype, self.held + of_x, tall * self.tiles, rows)
        if self.part != "FewLast":
            return needed
        eights = STRIPS * 8 // self.size
        loaded = 4 * (2 * self.height + eights)
        return max(needed, _registers(self.dtype, loaded, self.height * eights, 8))

    @property
    def registers(self) -> int:
        return min(MOST_REGISTERS, self.needed)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return _blocks(self.threads, self.registers, self.shared, self.gpu)

    @property
    def states_bytes(self) -> int:
        """Bytes of what the first pass makes, for as many samples as there may be."""
        first, second = self.both
        features = first.outer * first.p + second.inner * (second.p + second.q)
        return MOST_SAMPLES * features * self.size

    @property
    def back_bytes(self) -> int:
        """Bytes of what the second pass makes, for one sample, which is padded to eight."""
        first, _ = self.both
        return 8 * first.outer * first.q * self.size

    def __str__(self) -> str:
        first, second = self.both
        what = {"FewStates": f"{first.p}→{first.q} for {first.outer} groups, and states turned"}
        what |= {"FewBack": f"{second.q}→{second.p} for {second.inner} groups"}
        what |= {"FewLast": f"{first.q}→{first.p}, and gradients of both weights"}
        return f"few, backward: {what[self.part]}, {self.ways} warps, {self.shared} bytes of shared memory"

    waits = False

    @property
    def asks(self) -> Asks:
        if self.part != "FewStates":
            return ()
        weights = [(f"params.weights[{c.weight}]", str(c.weight_size * self.size)) for c in self.both]
        features = {"params.x": self.chain.in_features, "params.weights[2]": self.chain.out_features}
        return [*(ask_for(name, count * self.size) for name, count in features.items()), *weights]

    @property
    def told(self) -> list[str]:
        first, second = self.both
        numbers = {"K": first.outer, "L": second.inner, "R": self.rank, "P0": first.p, "Q1": second.q}
        numbers |= {"WEIGHT_0": first.weight, "WEIGHT_1": second.weight, "GRAD": 2}
        numbers |= {"OF_0": self._begin_of(0), "OF_1": self._begin_of(1)}
        numbers |= {"WAYS": self.ways, "ROUNDS": self.rounds, "TILES": self.tiles, "WORDS": self.words}
        numbers |= {"HEIGHT": self.height, "STRIPS": STRIPS, "TURNS": self.turns}
        numbers |= {"OF_X": self.of_tiles, "OF_W1": self.of_weights[1]}
        numbers |= {"MORE": self.row_tiles > self.of_tiles, "MORE_TILES": self._has_more_tiles}
        columns, piece = 4 * self.words, 16 // self.size
        numbers |= {"LOAD": self._load(0, 16), "LOAD_0": self._load(0, columns), "LOAD_1": self._load(1, columns)}
        numbers |= {"ACROSS_X": math.gcd(piece, first.outer * first.p), "ACROSS_G": math.gcd(piece, second.inner)}
        numbers |= {"RUN_X": math.gcd(piece, first.p), "RUN_0": self.run_of(0), "RUN_1": self.run_of(1)}
        return kinds(self.dtype) + constants(numbers)


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[FewPass, ...] | None:
    """The three passes; none where they do not take the chain."""
    if not chain.is_monarch or batch > MOST_SAMPLES:
        return None
    found = []
    for template in ("FewStates", "FewBack", "FewLast"):
        ways = _passes(template, chain, dtype, gpu)
        few = [round(each * batch) for each in OF_FEW]
        plan = min(ways, key=lambda plan: math.prod(plan.us_of(each) for each in few), default=None)
        if not plan:
            return None
        found.append(replace(plan, us=plan.us_of(batch)))
    return tuple(found)


def _passes(template: str, chain: Chain, dtype: str, gpu: Gpu) -> Iterator[FewPass]:
    widths = (4,) if dtype == "float64" else (2,) if template == "FewStates" else (2, 4)
    split = dtype in ("float32", "float64")
    heights = {"FewStates": (1,) if split else (1, 2), "FewBack": (1,), "FewLast": (1,) if split else (2,)}
    most_ways = (1, 2, 4, 8) if template == "FewStates" else (1, 2, 4, 8, 16)  # what turns states needs registers, too
    choices = itertools.product(most_ways, widths, TILES, heights[template])
    for ways, words, tiles, height in choices:
        most = HELD_ROWS if template == "FewStates" else HELD_COLUMNS
        if template != "FewStates" and dtype in HELD_TILES:
            most = min(most, HELD_TILES[dtype] // tiles)
        plan = FewPass(template, chain, dtype, gpu, ways, words, 1, tiles, height)
        for rounds in range(1, plan._chunks + 1):
            plan = replace(plan, rounds=rounds)
            if plan.held <= most and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                    yield plan
                break


def _backward_time(plan: FewPass, batch: int = FEW) -> float:
    """Microseconds, as above; of the last pass also those of what it reads and stores of gradients."""
    gpu, size, piece = plan.gpu, plan.size, 16 // plan.size
    weight, chunk = plan.both[plan._by_columns], _chunk(plan.size)
    passes, eights = -(-batch // (8 * plan.tiles)), -(-batch // 8)
    again = passes if plan.rounds > 1 else 1
    warps = plan.row_tiles * plan.ways
    if plan.part == "FewStates":
        steps = -(-weight.p // (chunk * plan.ways))
        loads = (16 // plan._load(0, 16)) * (2 * plan.height * again + eights)
        tile = 16 * plan.height * 16 * -(-batch // 16)
    else:
        steps, row = -(-weight.q // (chunk * plan.ways)), 4 * plan.words
        of_states = -(-min(eights, plan.tiles) // min(plan.tiles, piece)) * passes
        loads = piece * (row // plan._load(plan._by_columns, row) * again + of_states)
        tile = 8 * plan.each * passes * 8 * plan.tiles
    busy = _busy_us(gpu, plan.dtype, weight.weight_size * size, warps * steps * loads, warps * steps * chunk * tile)
    if plan.part == "FewLast":
        eights_across = STRIPS * piece // 2
        for which in (0, 1):
            read = -(-batch // chunk) * (2 * plan.height + eights_across)
            runs = 16 * plan.height * STRIPS * chunk // (32 * plan.run_of(which))
            stored = runs if plan.run_of(which) == piece else 2 * runs  # by way of shared memory
            cycles = plan._outer_tiles(which) * (OUTER_CYCLES * read + STORE_CYCLES * stored)
            busy += cycles / (gpu.rates.cycles * gpu.sms)
    waits = passes * -(-steps // _ahead(plan._at_once, plan.tiles, plan._by_elements))
    tiles = -(-plan.row_tiles // (gpu.sms * plan.blocks))
    us = gpu.rates.behind_us + BEGIN_US + WARP_US * plan.ways + HELD_US * plan.held
    return us + busy + tiles * waits * gpu.rates.wait_us
