"""Gradients of both weights of a Monarch layer of any sizes: monarch_pairs.cuh, its tiles and source; and, with
monarch_chunks.py, all its gradients.

What a pair of an input and an output group has of a gradient depends on no other pair: a block has some of either, and
neither the state nor its gradient is seen by memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import Long, constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.monarch import monarch_chunks
from factorlayer.kernels.monarch.monarch_chunks import (
    GRAD,
    MOST_ACROSS,
    MOST_REGISTERS,
    OF_ITEM,
    OF_SUM,
    WARPS,
    fetching,
    load_of,
    registers,
    row_stride,
)
from factorlayer.kernels.monarch_layer import OfMonarch
from factorlayer.kernels.passes import MOST_BLOCKS, Pass, fastest
from factorlayer.kernels.product.streamed import LOADED_INSTRUCTIONS
from factorlayer.kernels.stages import INSTRUCTIONS, together
from factorlayer.kernels.timing import waits_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

MOST_SUMS = 96  # registers of a thread that hold sums of one side
TILES = (
    (1, 1),
    (1, 2),
    (2, 1),
    (2, 2),
    (2, 4),
    (1, 4),
)  # of 16 rows and 8 columns of a gradient that a warp has at once
WEIGHTS_AT_ONCE = 16  # numbers of a weight that a thread has on their way


@dataclass(frozen=True)
class Side:
    """Groups of one kind: how many there are and what each has, what a block has of them and of the other kind's."""

    groups: int
    numbers: int
    some: int
    columns: int  # of its states: ranks of the other kind's groups
    samples: int
    mt: int
    nt: int
    dtype: str

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @kept
    def padded(self) -> int:
        return round_up(self.numbers, 16 if self.size == 2 else 8)

    @property
    def n1(self) -> int:
        """Tiles of 8 columns of a warp's states."""
        return min(-(-self.columns // 8), MOST_ACROSS // (2 if self.size == 8 else 1))

    @kept
    def across(self) -> int:
        return -(-self.columns // (8 * self.n1))

    @kept
    def down_by_along(self) -> tuple[int, int]:
        """Warp tiles of a group's gradient."""
        return -(-self.columns // (16 * self.mt)), -(-self.numbers // (8 * self.nt))

    @property
    def items(self) -> int:
        return self.some * math.prod(self.down_by_along)

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums."""
        return -(-self.items // WARPS) * self.mt * self.nt * 4 * (2 if self.size == 8 else 1)

    @kept
    def weight_bytes(self) -> int:
        return self.some * self.across * 8 * self.n1 * row_stride(self.padded, self.size) * self.size

    @kept
    def row_bytes(self) -> int:
        """Bytes of a tile of its tensor."""
        reach = max(self.padded, self.down_by_along[1] * 8 * self.nt)
        width = round_up((self.some - 1) * self.padded + reach, 16 if self.size == 2 else 8)
        return self.samples * row_stride(width, self.size) * self.size

    @kept
    def state_bytes(self) -> int:
        """Bytes of the other kind's states, which its gradient is summed over."""
        row = row_stride(self.down_by_along[0] * 16 * self.mt, self.size)
        return self.some * self.samples * row * self.size

    def load(self, step: int) -> int:
        return load_of(self.numbers, step, self.size)


@dataclass(frozen=True)
class MonarchPairs(OfMonarch, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    chain: Chain
    dtype: str
    x: Side
    y: Side
    slots: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = 32 * WARPS
    units_per_sample = 1
    writes = "s2"
    output_bytes = 0

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (0,)

    @property
    def weights(self) -> int:
        return sum(c.weight_size for c in self.both)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.x, self.y

    @property
    def samples(self) -> int:
        return self.x.samples

    @property
    def units_per_block(self) -> int:
        return self.samples

    @kept
    def split(self) -> int:
        """Parts of the pairs."""
        return math.prod(-(-side.groups // side.some) for side in self.sides)

    @kept
    def shared(self) -> int:
        rows = self.slots * sum(side.row_bytes for side in self.sides)
        return rows + sum(side.weight_bytes + side.state_bytes for side in self.sides)

    @kept
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return self.gpu.blocks_at_once(self.shared, self.threads * self.registers, 2)

    @kept
    def registers(self) -> int:
        """Registers of a thread, about."""
        return sum(side.sums for side in self.sides) + max(
            registers(side.dtype, *tiles) for side in self.sides for tiles in ((self.down, side.n1), (side.mt, side.nt))
        )

    @property
    def blocks_per_sm(self) -> int:
        return self.blocks

    @property
    def most(self) -> int:
        """Blocks for a part."""
        return max(1, self.gpu.sms * self.blocks // self.split)

    @property
    def down(self) -> int:
        """Tiles of 16 samples of a warp's states."""
        return 2 if self.samples % 32 == 0 else 1

    def us_of(self, batch: int) -> float:
        """Microseconds: of a tile, what multiprocessors multiply, read, issue and get from L2, side by side; weights
        before, and sums behind all tiles."""
        gpu, size, dtype, samples = self.gpu, self.size, self.dtype, self.samples
        of_a, of_b, of_product = INSTRUCTIONS[dtype]
        width = 16 if size == 2 else 8
        multiply = move = issue = weights = 0.0
        turns = 0  # waits for what goes through registers
        for side, step in ((self.x, 1), (self.y, self.y.groups)):
            states = side.some * samples // (16 * self.down) * side.across
            rounds, all_items = (-(-n // WARPS) * WARPS for n in (states, side.items))
            steps, sums = side.padded / width, samples / width
            multiply += 256 * (rounds * self.down * side.n1 * side.padded + all_items * side.mt * side.nt * samples)
            read = states * (16 * self.down + 8 * side.n1) * side.padded
            read += side.items * (16 * side.mt + 8 * side.nt) * samples
            stored = states * self.down * side.n1 * 4
            move += read * size + stored * 32 * max(4, size) + side.row_bytes
            issue += rounds * (steps * (self.down * of_a + side.n1 * (of_b + self.down * of_product)) + OF_ITEM)
            issue += all_items * (sums * (side.mt * 2 * of_a + side.nt * (of_b + side.mt * of_product)) + OF_ITEM)
            issue += stored * OF_SUM
            fetched, trips = fetching(samples * side.some, side.numbers, step, size)
            turns += trips
            issue += fetched
            weights += side.some * side.columns * side.numbers
        loaded = sum(side.row_bytes for side in self.sides)
        issue *= waits_of(WARPS * self.blocks)
        units = multiply / gpu.flops[dtype], move / gpu.shared_bytes, issue / gpu.instructions, loaded / gpu.l2_bytes
        chunk = together(*units)
        waits = 2 * gpu.rates.sync_us + gpu.rates.wait_us * max(turns, self.slots == 1)
        tiles = -(-batch // samples)
        across = min(tiles, self.most)
        blocks, each = across * self.split, -(-tiles // across)
        begin = gpu.rates.wait_us * (1 + weights / (self.threads * WEIGHTS_AT_ONCE) * (1 if size == 2 else 0.1))
        begin += 2 * weights * LOADED_INSTRUCTIONS / 32 / gpu.instructions
        end = weights * SUM_BYTES[dtype] / gpu.l2_bytes * 2
        busy = each * chunk + begin + end
        alone = each * max(chunk + waits, gpu.rates.wait_us) + begin + end
        full, rest = divmod(blocks, gpu.sms * self.blocks)
        last = -(-rest // gpu.sms)
        us = full * max(self.blocks * busy, alone) + (max(last * busy, alone) if last else 0.0)
        moved = batch * (self.chain.in_features + self.chain.out_features) * size / (gpu.memory_bytes * gpu.sms)
        summed = 2 * across * self.weights * SUM_BYTES[dtype] / (gpu.l2_bytes * gpu.sms)
        return gpu.rates.behind_us + gpu.rates.ramp_us + together(us, moved) + summed

    @property
    def details(self) -> str:
        x, y = self.sides
        pairs = f"pairs of {x.some} of {x.groups} groups of {x.numbers} and {y.some} of {y.groups} of {y.numbers}"
        tiles = f"tiles of {16 * x.mt}×{8 * x.nt} and {16 * y.mt}×{8 * y.nt}"
        return f"{pairs}, rank {self.rank}, {tiles}, {self.slots} slots of {self.samples} samples"

    @property
    def told(self) -> list[str]:
        first, second = self.both
        outs, p, r = second.inner, first.p, self.rank
        row = first.outer * r  # of the second weights
        at_x = {"STEP": 1, "GROUP": r * outs * p, "OTHER": p, "RANK": outs * p, "NUMBER": 1}
        at_y = {"STEP": outs, "GROUP": second.q * row, "OTHER": r, "RANK": 1, "NUMBER": row}
        at_x |= {"BEGIN": first.weight * second.weight_size}
        at_y |= {"BEGIN": second.weight * first.weight_size}
        told = {"WARPS": WARPS, "SAMPLES": self.samples, "DOWN": self.down, "SLOTS": self.slots, "R": r, "GRAD": GRAD}
        lines = [*kinds(self.dtype), *constants(told | {"COUNT": Long(self.weights)})]
        for name, side, c, places in (("X", self.x, first, at_x), ("Y", self.y, second, at_y)):
            numbers = {"WEIGHT": c.weight, "ALL": side.groups, "NUMBERS": side.numbers, "SOME": side.some}
            numbers |= {"N1": side.n1, "MT": side.mt, "NT": side.nt, "LOAD": side.load(places["STEP"])}
            numbers |= {key: Long(value) for key, value in places.items()}
            lines += [f"struct {name} {{ {' '.join(constants(numbers))} }};"]
        return lines


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...] | None:
    """The passes: x's gradient, and both weights'; None where one does not fit."""
    if not chain.is_monarch or chain.x_turned or chain.turn or chain.slabs or chain.mixed:
        return None
    back = monarch_chunks.tile_back(chain, dtype, batch, gpu)
    of_weights = tile(replace(chain, bias=False), dtype, batch, gpu)
    return (*back.passes, *of_weights.passes) if back and of_weights else None


@functools.lru_cache(256)
def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchPairs | None:
    """The fastest tiling by prediction; None where none fits."""
    return fastest(_tilings(chain, dtype, batch, gpu), batch)


def _tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchPairs]:
    first, second = chain.contractions
    rank = first.q // second.inner
    for samples in (16, 32, 64):
        if samples >= 2 * max(16, batch):
            continue
        for ins, outs in itertools.product(_some(first.outer, rank), _some(second.inner, rank)):
            xs = _sides(first.outer, first.p, ins, outs * rank, samples, dtype)
            ys = _sides(second.inner, second.q, outs, ins * rank, samples, dtype)
            for x, y in itertools.product(xs, ys):
                if MonarchPairs(chain, dtype, x, y, 1, batch, gpu).registers > MOST_REGISTERS:
                    continue
                for slots in (2, 1):
                    plan = MonarchPairs(chain, dtype, x, y, slots, batch, gpu)
                    if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS:
                        yield plan
                        break


def _some(groups: int, rank: int) -> list[int]:
    """Groups of a block: those whose ranks leave little padding, and equal parts of all."""
    found = {n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, groups, -(-groups // 2), -(-groups // 3)) if n <= groups}
    return sorted(found | {n for n in (8 // rank, 16 // rank, 32 // rank) if 0 < n <= groups})


@functools.lru_cache(4096)
def _sides(groups: int, numbers: int, some: int, columns: int, samples: int, dtype: str) -> tuple[Side, ...]:
    """With the tiles of its gradient that need fewest registers, and with those by which all warps read least."""
    made = [Side(groups, numbers, some, columns, samples, mt, nt, dtype) for mt, nt in TILES]
    fewest = min(made, key=lambda side: (side.sums, -side.mt * side.nt))
    fitting = [side for side in made if side.sums <= MOST_SUMS] or [fewest]
    least = min(fitting, key=lambda side: (-(-side.items // WARPS) * (2 * side.mt + side.nt), side.sums))
    return tuple(dict.fromkeys((fewest, least)))
