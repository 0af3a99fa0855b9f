"""All gradients of few samples of two untied contractions, or of some hundreds, by three passes: few_backward.cuh,
tiles and source. What counts is how soon all of a weight is on its way, and how few kernels wait for each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import Asks, ask_for, constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.monarch_layer import OfMonarch
from factorlayer.kernels.passes import MOST_BLOCKS, fastest
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
GRAD = 2  # the parameter that grad_y is
TURNED = 32  # columns of states that are turned at once
# Of more samples than a few: microseconds of each pass, times what is counted for few, for each byte that is turned and
# each of a gradient. Fitted to 89 times of each pass, of 56 drawn Monarch layers and 11 others on one H100, with 67 to
# 2048 samples: 212 of 267 are within 30 %.
SOME_US, SOME_TIMES, TURNED_US, STORED_US = 0.45, 1.45, 0.9e-6, 1.4e-6
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
    share: int = 1  # warps that share a tile of a gradient, each with a part of the samples
    some: bool = False  # for more samples than few: blocks along x of the grid take turns at them
    us: float = 0.0

    header = "few_backward"
    is_apart = True

    @property
    def template(self) -> str:
        return self.part

    @property
    def units_per_block(self) -> int:
        return 8 * self.tiles if self.some else 1 << 40

    @property
    def blocks_per_sm(self) -> int:
        return 0 if self.some else 1

    @property
    def reads(self) -> str:
        return {"FewStates": "x", "FewBack": "s1" if self.some else "x", "FewLast": "s0"}[self.part]

    @property
    def beside(self) -> tuple[str, int]:
        return ("s1", GRAD) if self.some and self.part == "FewLast" else ("", 0)

    @property
    def writes(self) -> str:
        return {"FewStates": "s1" if self.some else "s2", "FewBack": "s0", "FewLast": "y"}[self.part]

    @property
    def scratch(self) -> tuple[int, int, int]:
        """What the first pass makes, for as many samples as few may be, or for each of more; and what the second one
        makes, for each: samples are padded to eight."""
        first, second = self.both
        states = (first.outer * first.p + second.inner * (second.p + second.q)) * self.size
        back = first.outer * first.q * self.size
        if self.some:
            return _padded(back), _padded(states), 0
        return 8 * back, 0, MOST_SAMPLES * states

    @property
    def leaves(self) -> str:
        return "prepared" if self.part == "FewStates" and not self.some else ""

    @property
    def reads_prepared(self) -> bool:
        return not self.some

    def us_of(self, batch: int) -> float:
        """Microseconds, as few.py has them; of the last pass also those of what it reads and stores of gradients."""
        gpu, size, piece = self.gpu, self.size, 16 // self.size
        weight, chunk = self.both[self._by_columns], chunk_of(self.size)
        passes, eights = -(-batch // (8 * self.tiles)), -(-batch // 8)
        across = passes if self.some else 1  # blocks along x of the grid
        turns = passes // across  # of a block
        again = passes if self.rounds > 1 else across
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
        units = self.row_tiles * across
        share = 1 / gpu.sms if self.part == "FewLast" else share_of(units, gpu)
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
        waits = turns * -(-steps // states_ahead(self._at_once, self.tiles, self._by_elements))
        tiles = -(-units // (gpu.sms * self.blocks))
        rows = 16 * self.height if self.part == "FewStates" else 8 * self.each
        cells = min(8 * eights, 8 * self.tiles) * rows // piece
        adds = turns * -(-cells // self.threads) * self.ways * piece * max(4, size) // 16
        us = BEGIN_US + HELD_US * self.held + busy + waits_us(gpu, tiles, waits, adds)
        return gpu.rates.behind_us + (self._us_of_some(us, batch) if self.some else us)

    def _us_of_some(self, us: float, batch: int) -> float:
        """More than what is counted for few: what goes through shared memory to be turned, gradients, waits."""
        first, second = self.both
        us = SOME_US + SOME_TIMES * us
        if self.part == "FewStates":
            us += TURNED_US * batch * (first.outer * first.p + second.q * second.inner) * self.size
        elif self.part == "FewLast":
            us += STORED_US * (first.weight_size + second.weight_size) * self.size
            # Two chunks of samples are on their way; of wider numbers their products take longer.
            chunks = -(-batch // (2 * chunk_of(self.size) * self.share))
            us += (chunks - 1) * self.gpu.rates.wait_us * 2 / self.size
        return us

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
        """Blocks that turn states: of few samples a square of 16 bytes for each thread, of 16 samples; of more, so many
        for each block of samples."""
        piece, (first, second) = 16 // self.size, self.both
        if self.some:
            parts = -(-first.outer * first.p // TURNED) - (-second.q * second.inner // TURNED)
            return min(-(-parts * 8 * self.tiles // self.turned), 2 * self.gpu.sms)
        across, across_x = self._across
        units = 16 // piece * (first.outer * first.p // across_x + second.q * second.inner // across)
        return -(-units // self.threads)

    @property
    def _across(self) -> tuple[int, int]:
        """Elements of an access to grad_y and to x where these are turned."""
        piece, (first, second) = 16 // self.size, self.both
        return math.gcd(piece, second.inner), math.gcd(piece, first.outer * first.p)

    @property
    def turned(self) -> int:
        """Samples that are turned at once by way of shared memory: a thread's loads of these are all on their way."""
        return min(64, 8 * self.ways * max(1, 4 // self.size))

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
        tiles = [-(-self._outer_tiles(which) * self.share // (self._least_across * self.ways)) for which in (0, 1)]
        most = self.gpu.sms * self.blocks
        if sum(tiles) <= most:
            return tiles[0], tiles[1]
        second = max(1, min(most - 1, round(most * tiles[1] / sum(tiles))))
        return max(1, most - second), second

    @property
    def _least_across(self) -> int:
        """Blocks along x of the grid, at least."""
        return -(-(MOST_SAMPLES + 1) // (8 * self.tiles)) if self.some else 1

    @property
    def _has_more_tiles(self) -> bool:
        """Whether a warp makes more than one tile of gradients."""
        tiles = self._least_across * self.ways // self.share
        return any(self._outer_tiles(which) > tiles * self.of_weights[which] for which in (0, 1))

    @property
    def split(self) -> int:
        if self.part == "FewStates":
            return self.of_tiles + self.turns
        return self.of_tiles + (sum(self.of_weights) if self.part == "FewLast" else 0)

    @property
    def shared(self) -> int:
        if self.part == "FewStates":
            turned = TURNED * (self.turned + max(1, 4 // self.size)) * self.size * self.some
            return max(turned, bytes_of_totals(16 * self.height, self.tiles, self.ways, self.size, by_samples=True))
        run = min(2 * self.tiles, 32 // self.size)
        run = max(run, 16 // self.size)
        totals = bytes_of_totals(8 * self.each, self.tiles, self.ways, self.size, run, self.part == "FewBack")
        return max(totals, self._staged if self.part == "FewLast" else 0)

    @property
    def _staged(self) -> int:
        """Bytes of gradients' tiles of a block on their way through shared memory."""
        if self.share > 1:
            eights, piece = self.strips * chunk_of(self.size) // 8, 16 // self.size
            of_tile = bytes_of_totals(16 * self.height, eights, self.share, self.size, piece, by_samples=True)
            return self.ways // self.share * of_tile
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
        loaded = 4 * (2 * self.height + eights) * (2 if self.some else chunks)
        return max(needed, registers_of(self.dtype, loaded, self.height, self.height * eights, 8))

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
        numbers |= {"WEIGHT_0": first.weight, "WEIGHT_1": second.weight, "GRAD": GRAD}
        numbers |= {"OF_0": self._begin_of(0), "OF_1": self._begin_of(1)}
        numbers |= {"WAYS": self.ways, "ROUNDS": self.rounds, "TILES": self.tiles, "WORDS": self.words}
        numbers |= {"HEIGHT": self.height, "STRIPS": self.strips, "TURNS": self.turns}
        numbers |= {"OF_X": self.of_tiles, "OF_W0": self.of_weights[0], "OF_W1": self.of_weights[1]}
        numbers |= {"SHARE": self.share}
        numbers |= {"MORE": self.row_tiles > self.of_tiles, "MORE_TILES": self._has_more_tiles}
        columns, piece = 4 * self.words, 16 // self.size
        across, across_x = self._across
        numbers |= {"ACROSS_X": across_x, "ACROSS_G": across, "SOME": self.some}
        numbers |= {"LOAD": self._load(0, 16), "LOAD_0": self._load(0, columns), "LOAD_1": self._load(1, columns)}
        numbers |= {"RUN_X": math.gcd(piece, first.p), "RUN_0": self.run_of(0), "RUN_1": self.run_of(1)}
        return kinds(self.dtype) + constants(numbers)


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[FewPass, ...] | None:
    """The three passes; none where they do not take the chain."""
    if not chain.is_monarch:
        return None
    found = []
    for template in ("FewStates", "FewBack", "FewLast"):
        ways = _passes(template, chain, dtype, gpu, batch > MOST_SAMPLES)
        plan = fastest(ways, batch)
        if not plan:
            return None
        found.append(plan)
    return tuple(found)


def _padded(size: int) -> int:
    """Bytes for each of more samples than a few, of which up to seven are added."""
    least = MOST_SAMPLES + 1
    return -(-size * (least + 7) // least)


def _passes(template: str, chain: Chain, dtype: str, gpu: Gpu, some: bool = False) -> Iterator[FewPass]:
    widths = (4,) if dtype == "float64" else (2,) if template == "FewStates" else (2, 4)
    split = dtype in ("float32", "float64")
    heights = {"FewStates": (1, 2), "FewBack": (1,), "FewLast": (1, 2) if split else (2,)}
    most_ways = (1, 2, 4, 8) if template == "FewStates" else (1, 2, 4, 8, 16)  # what turns states needs registers, too
    strips = (2, 4) if dtype == "float64" and template == "FewLast" else (2,)
    shares = (1, 2, 4, 8) if some and template == "FewLast" else (1,)
    choices = itertools.product(most_ways, widths, TILES, heights[template], strips, shares)
    for ways, words, tiles, height, strip, share in choices:
        if share > ways:
            continue
        most = most_held(dtype, tiles) if template == "FewStates" else HELD_COLUMNS
        if template != "FewStates" and dtype in HELD_TILES:
            most = min(most, HELD_TILES[dtype] // tiles)
        plan = FewPass(template, chain, dtype, gpu, ways, words, 1, tiles, height, strip, share, some)
        for rounds in range(1, plan._chunks + 1):
            plan = replace(plan, rounds=rounds)
            if plan.held <= most and plan.needed <= MOST_REGISTERS and plan.threads * plan.registers <= 65536:
                if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                    yield plan
                break
