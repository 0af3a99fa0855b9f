"""All gradients of few samples of two untied contractions, by three passes: few_backward.cuh, tiles and source. What
counts is how soon all of a weight is on its way, and how few kernels wait for each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import Asks, ask_for, constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.monarch_layer import OfMonarch
from factorlayer.kernels.passes import MOST_BLOCKS, few_samples
from factorlayer.kernels.product.few import (
    BEGIN_US,
    HELD_US,
    MOST_REGISTERS,
    MOST_SAMPLES,
    TILES,
    OfFew,
    busy_us,
    bytes_of_totals,
    chunk_of,
    held_at_once,
    most_held,
    registers_of,
    share_of,
    states_ahead,
    waits_us,
)
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

HELD_COLUMNS = 112  # registers of a thread that hold a weight by columns, at most
HELD_TILES = {"float32": 128, "float64": 256}  # times tiles of samples: with more, ptxas spills
OUTER_CYCLES, STORE_CYCLES = 12, 4  # of a warp's access to states of which gradients are summed, and of a store


@dataclass(frozen=True)
class FewPass(OfFew, OfMonarch):
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
    strips: int  # of 64 bytes, of a row of a warp's part of a gradient
    us: float = 0.0

    header = "few_backward"
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
        """Microseconds, as few.py has them; of the last pass also those of what it reads and stores of gradients."""
        gpu, size, piece = self.gpu, self.size, 16 // self.size
        weight, chunk = self.both[self._by_columns], chunk_of(self.size)
        passes, eights = -(-batch // (8 * self.tiles)), -(-batch // 8)
        again = passes if self.rounds > 1 else 1
        warps = self.row_tiles * self.ways
        if self.part == "FewStates":
            steps = -(-weight.p // (chunk * self.ways))
            loads = (16 // self._load(0, 16)) * (2 * self.height * again + eights)
            tile = 16 * self.height * 16 * -(-batch // 16)
        else:
            steps, row = -(-weight.q // (chunk * self.ways)), 4 * self.words
            of_states = -(-min(eights, self.tiles) // min(self.tiles, piece)) * passes
            loads = piece * (row // self._load(self._by_columns, row) * again + of_states)
            tile = 8 * self.each * passes * 8 * self.tiles
        share = 1 / gpu.sms if self.part == "FewLast" else share_of(self.row_tiles, gpu)
        products = warps * steps * chunk * tile
        busy = busy_us(gpu, self.dtype, weight.weight_size * size, warps * steps * loads, products, share)
        if self.part == "FewLast":
            eights_across, spread = self.strips * piece // 2, min(gpu.sms, self.split)
            for which in (0, 1):
                read = -(-batch // chunk) * (2 * self.height + eights_across)
                runs = 16 * self.height * self.strips * chunk // (32 * self.run_of(which))
                stored = runs if self.run_of(which) == piece else 2 * runs  # by way of shared memory
                cycles = self._outer_tiles(which) * (OUTER_CYCLES * read + STORE_CYCLES * stored)
                made = self.both[which].weight_size * size
                busy += cycles / (gpu.rates.cycles * spread)
                busy += max(made / (gpu.memory_bytes * gpu.sms), made / (gpu.l2_bytes * spread))
        waits = passes * -(-steps // states_ahead(self._at_once, self.tiles, self._by_elements))
        tiles = -(-self.row_tiles // (gpu.sms * self.blocks))
        rows = 16 * self.height if self.part == "FewStates" else 8 * self.each
        cells = min(8 * eights, 8 * self.tiles) * rows // piece
        adds = passes * -(-cells // self.threads) * self.ways * piece * max(4, size) // 16
        return gpu.rates.behind_us + BEGIN_US + HELD_US * self.held + busy + waits_us(gpu, tiles, waits, adds)

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
        return c.outer * c.inner * -(-c.q // (16 * self.height)) * -(-c.p // (self.strips * chunk_of(self.size)))

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
            return bytes_of_totals(16 * self.height, self.tiles, self.ways, self.size, by_samples=True)
        run = min(2 * self.tiles, 32 // self.size)
        run = max(run, 16 // self.size)
        totals = bytes_of_totals(8 * self.each, self.tiles, self.ways, self.size, run, self.part == "FewBack")
        return max(totals, self._staged if self.part == "FewLast" else 0)

    @property
    def _staged(self) -> int:
        """Bytes of gradients' tiles of a block on their way through shared memory."""
        return self.ways * 16 * self.height * (64 * self.strips + 64)

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
        return held_at_once(-(-self._chunks // self.rounds), self.tiles, self._by_elements)

    @property
    def _by_columns(self) -> int:
        """The weight that is read by columns."""
        return 1 if self.part == "FewBack" else 0

    @property
    def _chunks(self) -> int:
        """Chunks of what is contracted that a warp has."""
        c = self.both[self._by_columns]
        return -(-(c.p if self.part == "FewStates" else c.q) // (chunk_of(self.size) * self.ways))

    @property
    def needed(self) -> int:
        """Registers of a thread."""
        of_x = (8 if self._by_elements else 4) * self.tiles * states_ahead(self._at_once, self.tiles, self._by_elements)
        tall = self.height if self.part == "FewStates" else self.each // 2
        rows = 16 if self.part == "FewStates" else 16 // self.size
        height = self.height if self.part == "FewStates" else 1
        needed = registers_of(self.dtype, self.held + of_x, height, tall * self.tiles, rows)
        if self.part != "FewLast":
            return needed
        eights, chunks = self.strips * 8 // self.size, 1 if self.size == 2 else 2
        loaded = 4 * (2 * self.height + eights) * chunks
        return max(needed, registers_of(self.dtype, loaded, self.height, self.height * eights, 8))

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
        numbers |= {"HEIGHT": self.height, "STRIPS": self.strips, "TURNS": self.turns}
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
        plan = min(ways, key=lambda plan: math.prod(plan.us_of(each) for each in few_samples(batch)), default=None)
        if not plan:
            return None
        found.append(replace(plan, us=plan.us_of(batch)))
    return tuple(found)


def _passes(template: str, chain: Chain, dtype: str, gpu: Gpu) -> Iterator[FewPass]:
    widths = (4,) if dtype == "float64" else (2,) if template == "FewStates" else (2, 4)
    split = dtype in ("float32", "float64")
    heights = {"FewStates": (1, 2), "FewBack": (1,), "FewLast": (1, 2) if split else (2,)}
    most_ways = (1, 2, 4, 8) if template == "FewStates" else (1, 2, 4, 8, 16)  # what turns states needs registers, too
    strips = (2, 4) if dtype == "float64" and template == "FewLast" else (2,)
    choices = itertools.product(most_ways, widths, TILES, heights[template], strips)
    for ways, words, tiles, height, strip in choices:
        most = most_held(dtype, tiles) if template == "FewStates" else HELD_COLUMNS
        if template != "FewStates" and dtype in HELD_TILES:
            most = min(most, HELD_TILES[dtype] // tiles)
        plan = FewPass(template, chain, dtype, gpu, ways, words, 1, tiles, height, strip)
        for rounds in range(1, plan._chunks + 1):
            plan = replace(plan, rounds=rounds)
            if plan.held <= most and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                    yield plan
                break
