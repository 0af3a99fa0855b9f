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
from factorlayer.kernels.passes import MOST_BLOCKS, Pass
from factorlayer.kernels.product.streamed import Product, batches_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

MOST_SAMPLES = 64
TILES = (2, 4, 8)  # of 8 samples, that a block's warps multiply at once
SAMPLES = (16, 32, 64)  # of a block, where there are more
STRIPS = 2  # of 64 bytes, of a warp's part of a gradient
HELD_ROWS, HELD_COLUMNS = 64, 112  # registers of a thread that hold a weight, at most
MOST_REGISTERS = 248
SECTOR = 32  # bytes that L2 stores at once
STORED_BYTES = 40e3  # by a multiprocessor in a microsecond, of whole sectors
PART_US = 3.2e-3  # for a part of a sector: 2.8 million of them, of 1024 samples of 16 times 256 → 688, took 69 us
BEGIN_US, STEP_US, SUM_US = 0.3, 0.4, 0.5
OF_FLOPS = 2


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
        return _registers(self.product.dtype, self.held + of_x, self.height * self.tiles, self.height * 2)

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
        """Microseconds: what all blocks move and multiply, or wait for, whichever takes longer, and what a block takes
        by itself."""
        p, gpu = self.product, self.gpu
        blocks, eights = -(-batch // self.samples), 2 * -(-batch // 16)
        passes = -(-min(batch, self.samples) // (8 * self.tiles))  # of a block, over its weight
        again = passes * blocks if self.rounds > 1 else blocks
        weight = p.weights * p.size
        memory = weight + batch * (p.x_features * (not p.ours_in) + p.y_features) * p.size
        of_l1 = self.row_tiles * self.wg * self.ways * self.chunks * self.rounds * 8 * (16 // self.load)
        of_l1 *= 2 * self.height * again + eights
        of_l2 = again * weight + self.row_tiles * self.wg * p.contraction.p * p.size * batch
        flops = 2 * self.row_tiles * self.wg * 16 * self.height * p.contraction.p * 8 * eights
        busy = max(
            memory / gpu.memory_bytes,
            of_l1 / gpu.rates.cycles,
            of_l2 / gpu.l2_bytes,
            OF_FLOPS * flops / gpu.flops[p.dtype],
            batch * self.stored_us,
        ) / gpu.sms
        waves = -(-self.row_tiles * blocks // (gpu.sms * self.blocks))
        ahead = _ahead(self.chunks, self.tiles, self.load == 2)
        life = BEGIN_US + gpu.rates.wait_us + passes * (self.chunks * self.rounds / ahead * STEP_US + SUM_US)
        return gpu.rates.behind_us + max(busy, (waves - 1) * life) + life

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
        told |= {"ROUND_Y": p.dtype == "tf32" and p.ours_out, "FIRST": self.first, "LAST": self.last}
        return [*kinds(p.dtype), activation_type(p.activation, p.dtype, p.scalars), *constants(told)]


def tile(product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True) -> Few | None:
    """The fastest tiling by prediction, if the product has one; in the middle class of batches for its fewest samples,
    too."""
    batches = batches_of(product, batch)
    p = product
    c = p.contraction
    if c.tied and (c.outer * c.inner > 1 or batch > MOST_SAMPLES):
        return None
    if p.x_step > 1 or p.terms > 1 or p.reads_beside:
        return None
    samples = SAMPLES if batches[-1] > MOST_SAMPLES else SAMPLES[-1:]
    tilings = _tilings(product, gpu, samples, first, last)
    found = min(tilings, key=lambda plan: math.prod(plan.us_of(batch) for batch in batches), default=None)
    return replace(found, us=found.us_of(batches[-1])) if found else None


def _tilings(product: Product, gpu: Gpu, samples: tuple[int, ...], first: bool, last: bool) -> Iterator[Few]:
    p = product
    heights = (1,) if p.dtype in ("float32", "float64") else (1, 2)
    for wg, ways, height, tiles in itertools.product((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), heights, TILES):
        if wg > p.fast or (wg > 1 and (p.b > 1 or wg * p.size > 2 * SECTOR)):
            continue
        if not 2 <= wg * ways <= 16:
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

    @property
    def tall(self) -> int:
        """Sixteens of rows in a warp's part of a gradient."""
        return 1 if self.dtype in ("float32", "float64") else 2

    def _column_tiles(self, which: int) -> int:
        c = self.both[which]
        return c.outer * c.inner * -(-c.p // (8 * self.each))

    def _outer_tiles(self, which: int) -> int:
        """Tiles of a weight's gradient, by warps."""
        c = self.both[which]
        return c.outer * c.inner * -(-c.q // (16 * self.tall)) * -(-c.p // (STRIPS * _chunk(self.size)))

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a sample."""
        first, second = (c.weight_size for c in self.both)
        return {"FewStates": first, "FewBack": second, "FewLast": 2 * first + second}[self.part]

    @property
    def states_read(self) -> int:
        """Elements that blocks read of a sample's states; of those that gradients are summed of, by warps."""
        first, second = self.both
        if self.part == "FewStates":
            return first.outer * -(-first.q // 16) * first.p
        if self.part == "FewBack":
            return self._column_tiles(1) * second.q
        outer = sum(self._outer_tiles(which) for which in (0, 1))
        return self._column_tiles(0) * first.q + outer * (16 * self.tall + STRIPS * _chunk(self.size))

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
        return first.outer * -(-first.q // 16) if self.part == "FewStates" else self._column_tiles(self._by_columns)

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
        second = min(most - 1, max(1, round(most * tiles[1] / sum(tiles))))
        return most - second, second

    @property
    def split(self) -> int:
        if self.part == "FewStates":
            return self.of_tiles + self.turns
        return self.of_tiles + (sum(self.of_weights) if self.part == "FewLast" else 0)

    @property
    def shared(self) -> int:
        if self.part == "FewStates":
            return _totals(16, self.tiles, self.ways, self.size, by_samples=True)
        run = min(2 * self.tiles, 32 // self.size)
        run = max(run, 16 // self.size)
        totals = _totals(8 * self.each, self.tiles, self.ways, self.size, run, self.part == "FewBack")
        return max(totals, self._staged if self.part == "FewLast" else 0)

    @property
    def _staged(self) -> int:
        """Bytes of gradients' tiles of a block on their way through shared memory."""
        return self.ways * 16 * self.tall * (STRIPS * 64 + 64)

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight."""
        if self.part == "FewStates":
            return (16 if self._load(0, 16) == 2 else 8) * self._at_once
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
        tall = 1 if self.part == "FewStates" else self.each // 2
        rows = 16 if self.part == "FewStates" else 16 // self.size
        needed = _registers(self.dtype, self.held + of_x, tall * self.tiles, rows)
        return max(needed, 128 if self.part == "FewLast" else 0)

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
        numbers |= {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        numbers |= {"WAYS": self.ways, "ROUNDS": self.rounds, "TILES": self.tiles, "WORDS": self.words}
        numbers |= {"TALL": self.tall, "STRIPS": STRIPS, "TURNS": self.turns}
        numbers |= {"OF_X": self.of_tiles, "OF_W1": self.of_weights[1]}
        columns, piece = 4 * self.words, 16 // self.size
        numbers |= {"LOAD": self._load(0, 16), "LOAD_0": self._load(0, columns), "LOAD_1": self._load(1, columns)}
        numbers |= {"ACROSS_X": math.gcd(piece, first.outer * first.p), "ACROSS_G": math.gcd(piece, second.inner)}
        numbers |= {"RUN_X": math.gcd(piece, first.p), "RUN_0": math.gcd(piece, first.p, numbers["OF_0"])}
        numbers |= {"RUN_1": math.gcd(piece, second.p, numbers["OF_1"])}
        return kinds(self.dtype) + constants(numbers)


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[FewPass, ...] | None:
    """The three passes; none where they do not take the chain."""
    if not chain.is_monarch or batch > MOST_SAMPLES:
        return None
    found = []
    for template in ("FewStates", "FewBack", "FewLast"):
        ways = [replace(plan, us=_backward_time(plan)) for plan in _passes(template, chain, dtype, gpu)]
        if not ways:
            return None
        found.append(min(ways, key=lambda plan: plan.us))
    return tuple(found)


def _passes(template: str, chain: Chain, dtype: str, gpu: Gpu) -> Iterator[FewPass]:
    most = HELD_ROWS if template == "FewStates" else HELD_COLUMNS
    widths = (4,) if dtype == "float64" else (2,) if template == "FewStates" else (2, 4)
    for ways, words, tiles in itertools.product((1, 2, 4, 8, 16), widths, TILES):
        plan = FewPass(template, chain, dtype, gpu, ways, words, 1, tiles)
        for rounds in range(1, plan._chunks + 1):
            plan = replace(plan, rounds=rounds)
            if plan.held <= most and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                    yield plan
                break


def _backward_time(plan: FewPass, batch: int = 16) -> float:
    gpu, size, (first, second) = plan.gpu, plan.size, plan.both
    eights, passes = 2 * -(-batch // 16), -(-batch // (8 * plan.tiles))
    again = passes if plan.rounds > 1 else 1
    by = first if plan.part != "FewBack" else second
    weight = by.weight_size * size
    moved = weight + batch * plan.states_read * size * 0
    warps = plan.row_tiles * plan.ways
    steps = plan._at_once * plan.rounds
    if plan.part == "FewStates":
        of_l1 = warps * steps * 8 * (16 // plan._load(0, 16)) * (2 * again + eights)
    else:
        of_l1 = warps * steps * 16 // size * (4 * again * max(1, plan.words * 4 // plan._load(plan._by_columns, 16)) + eights / 2 * size / 2)
    of_l2 = again * weight + plan.states_read * size * batch
    if plan.part == "FewLast":
        moved += (first.weight_size + second.weight_size) * size
        outer = sum(plan._outer_tiles(which) for which in (0, 1))
        of_l1 += outer * 8 * (-(-batch // _chunk(size)) * (2 * plan.tall + STRIPS * 8 // size) + 2 * plan.tall * STRIPS)
    flops = 2 * plan.multiply_adds * 8 * eights
    busy = max(
        moved / gpu.memory_bytes, of_l1 / gpu.rates.cycles, of_l2 / gpu.l2_bytes, OF_FLOPS * flops / gpu.flops[plan.dtype]
    ) / gpu.sms
    waves = -(-plan.row_tiles // (gpu.sms * plan.blocks))
    ahead = _ahead(plan._at_once, plan.tiles, plan._by_elements)
    life = BEGIN_US + gpu.rates.wait_us + passes * (steps / ahead * STEP_US + SUM_US)
    return gpu.rates.behind_us + max(busy, (waves - 1) * life) + life
