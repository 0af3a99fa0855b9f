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
TILE = 16  # samples that a block's warps multiply at once
SAMPLES = (16, 32, 64)  # of a block, where there are more
STRIPS = 2  # of 64 bytes, of a warp's part of a gradient
HELD_ROWS, HELD_COLUMNS = 64, 112  # registers of a thread that hold a weight, at most
SECTOR = 32  # bytes that L2 stores at once
STORED_BYTES = 40e3  # by a multiprocessor in a microsecond, of whole sectors
PART_US = 3.2e-3  # for a part of a sector: 2.8 million of them, of 1024 samples of 16 times 256 → 688, took 69 us
CYCLES = 1.75e3  # in a microsecond


def _chunk(size: int) -> int:
    """Elements of a row that a warp's access has: four pieces of 16 bytes."""
    return 64 // size


def _registers(held: int, dtype: str) -> int:
    """A thread's registers, `held` of which hold a weight."""
    of_pieces = 16 if dtype in ("float32", "float64") else 0
    return min(255, of_pieces + (64 if held <= 16 else 96 if held <= 32 else 128 if held <= 48 else 240))


@dataclass(frozen=True)
class Few(Pass):
    """A pass of one contraction, tiled. `us` is the time predicted."""

    product: Product
    wg: int
    ways: int
    height: int
    rounds: int  # in which a thread has its part of a weight
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
        return self.wg * self.ways * self.height * 16 * 18 * max(4, self.product.size)

    @property
    def split(self) -> int:
        p = self.product
        groups = -(-p.fast // self.wg) * (p.groups // p.fast)
        return -(-p.contraction.q // (16 * self.height)) * groups

    @property
    def load(self) -> int:
        """Bytes of an access to a row."""
        return math.gcd(16, self.product.contraction.p * self.product.size)

    @property
    def held(self) -> int:
        """Registers of a thread. What comes by 2 bytes has one for each."""
        chunks = -(-self.product.contraction.p // (_chunk(self.product.size) * self.ways))
        return (16 if self.load == 2 else 8) * self.height * -(-chunks // self.rounds)

    @property
    def registers(self) -> int:
        of_words = 24 if self.product.dtype == "float32" and self.load < 16 else 0
        return min(255, of_words + _registers(self.held, self.product.dtype))

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return max(1, 65536 // (self.threads * self.registers))

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
        """Microseconds: the weight's way from memory, states' from L2 for each of its tiles, and what is done behind
        it; more where not all blocks fit at once, registers are many, or runs short. Fitted to an H200. Every 16
        samples, and every part of a weight, wait for L2 once more, in each block that a multiprocessor takes."""
        p, gpu = self.product, self.gpu
        weight = p.weights * p.size
        blocks, tiles = -(-batch // self.samples), -(-batch // 16)
        # The weights of one behind another are on their way when that one ends, in a graph or not.
        us = gpu.rates.behind_us
        us += max(weight / (gpu.memory_bytes * gpu.sms), weight / (gpu.l2_bytes * min(gpu.sms, self.split)))
        # A load of a warp has pieces of eight rows, each a line of the first-level cache
        each = 1 / min(gpu.l2_bytes, 4 * self.load * CYCLES) / gpu.sms
        again = tiles if self.rounds > 1 else blocks  # the weight, from L2
        moved = (tiles / self.height + again - 1) * weight * each
        states = batch * (p.x_features * (not p.ours_in) + p.y_features) * p.size / (gpu.memory_bytes * gpu.sms)
        stored = batch * self.stored_us / gpu.sms if batch > MOST_SAMPLES else 0  # of few, nobody waits for L2
        products = 2 * p.weights * 16 * tiles / (gpu.flops[p.dtype] * gpu.sms)
        waves = -(-self.split * blocks // (gpu.sms * self.blocks))
        turns = -(-min(batch, self.samples) // 16) * self.rounds
        waits = (waves * turns - self.rounds) * gpu.rates.wait_us
        held = (0.014 if p.dtype in ("float32", "float64") else 0.006) * self.held
        busy = max(moved, products, states, stored)
        # Of many samples a multiprocessor's blocks wait for what they all move: seven passes of 1031 to 1811 samples on
        # one H100 took both.
        us += busy + waits if batch > MOST_SAMPLES else max(busy, waits)
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
        told |= {"WG": self.wg, "WAYS": self.ways, "HEIGHT": self.height, "ROUNDS": self.rounds}
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
    longest = 2 * SECTOR if len(samples) > 1 else 16  # bytes of a run
    least = 1 if len(samples) > 1 and p.dtype != "float32" else 2  # warps of a group: splitting needs registers as well
    for wg, ways, height in itertools.product((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), heights):
        if wg > p.fast or (wg > 1 and (p.b > 1 or wg * p.size > longest)):
            continue
        if ways < least or not 2 <= wg * ways <= 16:
            continue
        chunks = -(-p.contraction.p // (_chunk(p.size) * ways))
        for rounds in range(1, chunks + 1):
            plan = Few(p, wg, ways, height, rounds, samples[0], first, last, gpu)
            if plan.held <= HELD_ROWS and plan.threads * plan.registers <= 65536:
                if plan.split <= MOST_BLOCKS:
                    yield from (replace(plan, samples=each) for each in samples)
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
        return (self._bytes_of(batch, padded=True),)

    def written(self, batch: int) -> int:
        if self.part == "FewLast":
            return sum(self.outputs(batch))
        return self._bytes_of(batch, padded=False)

    def _bytes_of(self, batch: int, padded: bool) -> int:
        """Bytes of the states that it makes. Padding is behind rows that are read by 16 bytes, and rows of samples
        beyond."""
        (first, second), samples, piece = self.both, round_up(batch, 8), 16 // self.size
        rows = [round_up(c.q, piece) for c in self.both]
        if self.part == "FewStates":
            turned = first.outer * first.p + second.inner * (second.p + second.q)
            return (turned * samples + second.inner * rows[1] * (samples if padded else batch)) * self.size
        return first.outer * (first.q + (rows[0] if padded else first.q)) * samples * self.size

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
        units += 16 * -(-second.q // piece) * (second.inner // across)
        return -(-units // self.threads)

    @property
    def split(self) -> int:
        first, _ = self.both
        if self.part == "FewStates":
            return first.outer * -(-first.q // 16) + self.turns
        if self.part == "FewBack":
            return self._column_tiles(1)
        return self._column_tiles(0) + sum(-(-self._outer_tiles(which) // self.ways) for which in (0, 1))

    @property
    def shared(self) -> int:
        rows = 16 if self.part == "FewStates" else 8 * self.each
        return self.ways * rows * 18 * max(4, self.size)

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight."""
        if self.part == "FewStates":
            in_rows = 16 if self._load(0, 16) == 2 else 8
            return in_rows * -(-self._chunks // self.rounds)
        words = self.words * (2 if self._load(self._by_columns, 16) == 2 else 1)
        return 16 // self.size * words * -(-self._chunks // self.rounds)

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
    def registers(self) -> int:
        return max(_registers(self.held, self.dtype), 128 if self.part == "FewLast" else 0)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return max(1, 65536 // (self.threads * self.registers))

    @property
    def states_bytes(self) -> int:
        """Bytes of what the first pass makes, for as many samples as there may be."""
        first, second = self.both
        rows = round_up(second.q * self.size, 16) // self.size
        features = first.outer * first.p + second.inner * (second.p + second.q + rows)
        return MOST_SAMPLES * features * self.size

    @property
    def back_bytes(self) -> int:
        """Bytes of what the second pass makes, for one sample, which is padded to eight."""
        first, _ = self.both
        row = round_up(first.q * self.size, 16) // self.size
        return 8 * first.outer * (first.q + row) * self.size

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
        numbers |= {"WAYS": self.ways, "ROUNDS": self.rounds, "WORDS": self.words, "TALL": self.tall}
        numbers |= {"STRIPS": STRIPS, "TURNS": self.turns}
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
    for ways, words in itertools.product((2, 4, 8, 16), widths):
        plan = FewPass(template, chain, dtype, gpu, ways, words, 1)
        for rounds in range(1, plan._chunks + 1):
            plan = replace(plan, rounds=rounds)
            if plan.held <= most and plan.threads * plan.registers <= 65536:
                if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                    yield plan
                break


def _backward_time(plan: FewPass, batch: int = TILE) -> float:
    """Microseconds, as above: multiprocessors without a block cost, too, and blocks of many warps that write. Blocks of
    every wave wait for further tiles of samples, where a weight that has several rounds comes again, unless what they
    read of states, or multiply, takes longer."""
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    waves, further = -(-plan.split // (gpu.sms * plan.blocks)), -(-batch // TILE) - 1
    states, products = (
        plan.states_read * TILE * size / gpu.l2_bytes,
        2 * plan.multiply_adds * TILE / gpu.flops[plan.dtype],
    )
    again = further * max(waves * plan.rounds * gpu.rates.wait_us, states / gpu.sms, products / gpu.sms)
    if plan.template == "FewStates":
        held = 0.014 if plan.dtype == "float32" else 0.008
        us = gpu.rates.behind_us + first.weight_size * size / (gpu.memory_bytes * gpu.sms)
        us += 0.3 * (waves - 1) + held * plan.held + 0.06 * plan.ways + (plan.rounds - 1) * gpu.rates.wait_us
        return us + again
    if plan.template == "FewBack":
        moved, tiles, of_warps = second.weight_size, plan.split, 0.03
    else:
        moved, tiles, of_warps = 2 * first.weight_size + second.weight_size, plan._column_tiles(0), 0.025 * size
    us = gpu.rates.behind_us + moved * size / (gpu.memory_bytes * gpu.sms) + max(0.0, 1 - tiles / gpu.sms)
    us += (plan.rounds - 1) * gpu.rates.wait_us
    return us + 1.3 * (waves - 1) + 0.02 * plan.held + of_warps * plan.ways + again
