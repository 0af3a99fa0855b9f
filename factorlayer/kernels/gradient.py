"""Gradients of weights: gradient.cuh, its tiles and source.

A contraction's states, before and behind it, lie in memory as its chain has them. Few weights and many samples: blocks
share the samples, each writes its own sums, and a second kernel adds them up in a fixed order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from factorlayer.device.code import ELEMENT, Long, constants, function, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import most_of_class
from factorlayer.kernels.factor_gradients import FactorGradients
from factorlayer.kernels.passes import MOST_BLOCKS, OneSpread, Pass, Placed, fastest
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

MOST_RUNS = 16  # on their way to a thread, of both states together
MOST_WIDE = 128  # a tile, either way
LEAST_CHUNKS = 4  # that are worth a block
PLACE_REGISTERS = 3  # for where a run is read
MOST_WAITING = 4 << 20  # bytes of a pass's sums that wait for those of others
PLACE_BYTES = 256  # what sums that wait begin at a multiple of
REDUCTION_US = 2.2  # of a second kernel, beside what it moves
SHORT_US = 40.0  # of a pass
# Of a Gradient, from the kernel before it; and until sums of blocks have come to the kernel that adds them up. Without
# these a pass by itself was predicted 2.2 us too long in each of 28 drawn layers of one factor, trained, on an H200
# (seeds 301201 to 611302), which take 5 to 11 us
BEGIN_US, HANDED_US = 2.0, 2.2
FILLED = 1 << 17  # threads that fill a GPU
SUM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 4, "float16": 4}
# Warp tiles, in 16 q's and 8 p's, and registers that they need beside the runs.
TILES = {
    "float64": {(2, 4): 168, (1, 4): 120, (1, 2): 96, (1, 1): 80},
    "float32": {(2, 4): 208, (1, 4): 152, (1, 2): 120, (1, 1): 96},
    "tf32": {(2, 4): 128, (2, 2): 96, (1, 4): 96, (1, 2): 80, (1, 1): 96},
    "bfloat16": {(4, 4): 160, (2, 8): 160, (2, 4): 112, (2, 2): 88, (1, 4): 88, (1, 2): 80, (1, 1): 72},
}
TILES["float16"] = TILES["bfloat16"]


class States(NamedTuple):
    """Of a sum of products, whose terms have weights of their own: how many, and features of what is before and behind
    the contraction, if there is a state for each term, one term behind another; 0 if all have one."""

    terms: int = 1
    x: int = 0
    g: int = 0


NO_SUM = States()


class Sums(Pass):
    """What passes have in common whose blocks write sums of gradients, `most` blocks for each at most."""

    gpu: Gpu
    folds: Any = 1  # sums for each weight that a block has
    singles: Any = 0  # the first weights, of which a block has one sum, whatever it has of the others
    begin: Any = 0  # elements of the gradients of all weights before these, where it makes some of them
    gradients_to: Any = "y"  # of a Reduction behind it
    most: Any
    part_bytes: Any

    @property
    def scratch(self) -> tuple[int, ...]:
        return 0, 0, self.part_bytes

    def sum_bytes(self, blocks: int) -> int:
        return int(blocks * (self.part_bytes // self.most))


class InTiles(Sums):
    """What passes have in common whose blocks each have a tile of the sums, and share its samples."""

    batch: int
    blocks: Any  # at once on a multiprocessor
    tiles: Any

    @property
    def split(self) -> int:
        return int(self.tiles)

    @kept
    def most(self) -> int:
        """Blocks for a tile."""
        wanted = -(-most_of_class(self.batch) * self.units_per_sample // self.units_per_block)
        return int(max(1, min(self.gpu.sms * self.blocks // self.tiles, wanted)))


class TileSums(InTiles):
    """What most of them have in common: sums for one contraction's weights."""

    contraction: Contraction
    states: Any = NO_SUM
    bias: Any = False  # whether that of the columns of what comes back is made, too
    stays: Any = False  # whether its sums do, in s2, for a pass behind it

    reads = "x"

    @property
    def writes(self) -> str:
        return "y" if self.is_whole else "s2"

    @property
    def blocks_per_sm(self) -> int:
        return int(self.blocks)

    @property
    def finishing(self) -> tuple[Pass, ...]:
        if self.stays:
            return (Reduction(self, in_place=True),) if self._sums_of_blocks > 1 else ()
        return () if self.is_whole else (Reduction(self),)

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.weights * ELEMENT_BYTES[self.dtype] if self.is_whole else 0,)

    @kept
    def weights(self) -> int:
        return int(self.states.terms * self.contraction.weight_size) + (self.contraction.q if self.bias else 0)

    @kept
    def is_whole(self) -> bool:
        """Whether its blocks write gradients: a tile never has several."""
        return self._sums_of_blocks == 1 and not self.stays

    @property
    def _sums_of_blocks(self) -> int:
        """Sums of blocks for each weight."""
        return int(self.most * self.folds)

    @property
    def result(self) -> str:
        """The type of what it writes, in C++."""
        return "Element" if self.is_whole else "Sum<Element>"

    @property
    def part_bytes(self) -> int:
        """Bytes of the sums that all blocks write, at most."""
        return 0 if self.is_whole else int(self._sums_of_blocks * self.weights * SUM_BYTES[self.dtype])

    @property
    def for_a_tile(self) -> str:
        return f"{'one block' if self.is_whole else f'at most {self.most} blocks'} for a tile"


class AtOneVisit(TileSums):
    """What passes have in common that make both gradients of an untied contraction: x's, and sums of the weight's."""

    chain: Chain
    writes: Any = "y"
    gradients_to = "w"
    is_whole = False  # a second kernel makes elements of the sums
    units_per_sample = 1

    @property
    def contraction(self) -> Contraction:  # type: ignore[override]
        return self.chain.contractions[0]

    @property
    def groups(self) -> int:
        return self.contraction.outer * self.contraction.inner

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (batch * self.output_bytes,)

    @property
    def output_bytes(self) -> int:
        return self.groups * self.contraction.p * self.size


@dataclass(frozen=True)
class Gradient(TileSums):
    """A pass over the states, tiled. `us` is the time predicted."""

    contraction: Contraction
    dtype: str
    mt: int
    nt: int
    wm: int
    wn: int
    wg: int  # groups of a block
    bk: int
    registers: int
    gpu: Gpu
    batch: int
    us: float = 0.0
    grad: int = 0  # the parameter that grad_y is
    stays: bool = False
    states: States = NO_SUM

    @kept
    def bm(self) -> int:
        return 16 * self.mt * self.wm

    @kept
    def bn(self) -> int:
        return 8 * self.nt * self.wn

    @kept
    def run(self) -> int:
        """Elements that are read at once."""
        c = self.contraction
        return math.gcd(16 // self.size, *((c.p, c.q) if c.inner == 1 else (c.inner,)))

    @kept
    def threads(self) -> int:
        return 32 * self.wm * self.wn * self.wg

    @kept
    def runs(self) -> int:
        """Runs on their way to a thread."""
        return sum(-(-self.wg * self.bk * width // (self.run * self.threads)) for width in (self.bm, self.bn))

    def _stride(self, width: int) -> int:
        return width + 4 if self.size == 8 else width if width % 16 else width + 8

    @kept
    def shared(self) -> int:
        return 2 * self.wg * self.bk * (self._stride(self.bm) + self._stride(self.bn)) * self.size

    @kept
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return self.gpu.blocks_at_once(self.shared, self.threads * self.registers, 8)

    @kept
    def rows(self) -> int:
        """Rows of a sample."""
        return self.contraction.outer if self.contraction.tied else 1

    @kept
    def tiles(self) -> int:
        c = self.contraction
        groups = self.states.terms if c.tied else c.outer * -(-c.inner // self.wg)
        return -(-c.q // self.bm) * -(-c.p // self.bn) * groups

    @kept
    def _inner_here(self) -> int:
        """Elements behind p that a chunk has."""
        c = self.contraction
        return min(1 << (c.inner - 1).bit_length(), self.bk) if c.tied else 1

    @kept
    def units_per_sample(self) -> int:
        c = self.contraction
        return self.rows * (-(-c.inner // self._inner_here) if c.tied else 1)

    @kept
    def units_per_block(self) -> int:
        return LEAST_CHUNKS * (self.bk // self._inner_here)

    def us_of(self, batch: int) -> float:
        """Microseconds: what a multiprocessor reads and multiplies for its chunks, then the sums of all."""
        chunks = -(-batch * self.units_per_sample * LEAST_CHUNKS // self.units_per_block)
        blocks = min(-(-chunks // LEAST_CHUNKS), self.most) * self.tiles
        each = -(-blocks // (self.gpu.sms * self.blocks)) * self.blocks * -(-chunks * self.tiles // blocks)
        parts = min(blocks // self.tiles, self.most) * self.weights * SUM_BYTES[self.dtype]
        if self.is_whole:
            return BEGIN_US + each * self._chunk_us
        return BEGIN_US + HANDED_US + each * self._chunk_us + 2 * parts / (self.gpu.l2_bytes * self.gpu.sms)

    @kept
    def _chunk_us(self) -> float:
        gpu, warps = self.gpu, self.threads / 32
        states = self.wg * self.bk * (self.bm + self.bn)
        stores = states / (32 * (self.run if self.contraction.inner == 1 else 1))
        products = self.wg * self.bm * self.bn * self.bk / (0.6 * gpu.flops[self.dtype])
        loads = warps * self.bk * (2 * self.mt + self.nt) / 8 if self.size > 2 else states * self.mt / 128
        issue = (self.runs * 24 * self.threads / 32 + stores + loads + 40 * warps) / gpu.instructions
        return max(products, issue, states * self.size / gpu.memory_bytes) + 0.05

    @property
    def details(self) -> str:
        c = self.contraction
        kind = "columns" if c.inner == 1 else "inner" if c.tied else "groups"
        groups = "" if c.tied else f" for {self.wg} of {c.outer * c.inner} groups"
        warps = f"{self.threads // 32} warps, chunks of {self.bk}"
        return f"{c.q}×{c.p} by {kind}, tiles of {self.bm}×{self.bn} sums{groups}, {warps}, {self.for_a_tile}"

    @property
    def told(self) -> list[str]:
        c = self.contraction
        told = {"WEIGHT": self.grad, "P": c.p, "Q": c.q, "INNER": c.inner, "OUTER": c.outer, "ROWS": self.rows}
        told |= {"WM": self.wm, "WN": self.wn, "WG": self.wg, "MT": self.mt, "NT": self.nt, "BK": self.bk}
        told |= {"TERMS": self.states.terms, "X_TERM": self.states.x, "G_TERM": self.states.g}
        return kinds(self.dtype) + constants(told | {"RUN": self.run, "TIED": c.tied, "Result": self.result})


class BlockSums(Sums):
    """What passes have in common that make all gradients at once, with one block for each multiprocessor."""

    weights: Any
    merged: Any = ()  # its modes, if its sums are those of several taken as one
    rank: Any = 1  # terms, of which each weight has one behind the other

    reads: Any = "x"
    writes: Any = "y"
    gradients_to = "w"
    units_per_block: Any = 1  # so that few units have a multiprocessor each

    @property
    def finishing(self) -> tuple[Pass, ...]:
        if self.merged:
            return Reduction(self, in_place=True), FactorGradients(self.merged, self.dtype, self.rank, self.begin)
        return (Reduction(self),)

    def waiting_at(self, place: int) -> BlockSums | None:
        """The same with its sums from that byte of s2 on, so that they may wait there; None where it cannot."""
        return None

    @property
    def most(self) -> int:
        """Blocks, each with sums of its own."""
        return self.gpu.sms

    @property
    def part_bytes(self) -> int:
        """Bytes of the sums that all blocks write, at most."""
        return int(self.most * self.weights * SUM_BYTES[self.dtype])


class OfVisit(Placed):
    """The pass that makes the gradient of a visit's one weight from a state and its gradient, which lie in buffers of
    the plan, or are x and grad_y."""

    gradients_to = "w"

    def __init__(self, of: Any, x: str, g: str, begin: int, grad: int) -> None:
        super().__init__(replace(of, stays=True, grad=grad))
        self.reads, self.beside, self.begin = x, (g, grad) if g else ("", 0), begin

    @property
    def finishing(self) -> tuple[Pass, ...]:
        return (Reduction(self),)


class Summing(Protocol):
    """A pass whose blocks, `most` at most for each weight, write sums."""

    @property
    def dtype(self) -> str: ...
    @property
    def gradients_to(self) -> str: ...
    @property
    def weights(self) -> int: ...
    @property
    def units_per_sample(self) -> int: ...
    @property
    def units_per_block(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def folds(self) -> int: ...
    @property
    def singles(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def us(self) -> float: ...


@dataclass(frozen=True)
class Reduction(OneSpread):
    """A pass that adds up what the blocks of another one have summed."""

    of: Summing
    in_place: bool = False  # sums that another pass reads, in the first block's place
    us: float = REDUCTION_US

    threads = 256
    blocks = 2
    shared = 256 * 16
    reads = "s2"

    @property
    def writes(self) -> str:
        return "s2" if self.in_place else self.of.gradients_to

    def outputs(self, batch: int) -> tuple[int, ...]:
        return ((self.begin + self.of.weights) * self._result_bytes,)

    def written(self, batch: int) -> int:
        return self.of.weights * self._result_bytes

    @property
    def _result_bytes(self) -> int:
        return (SUM_BYTES if self.in_place else ELEMENT_BYTES)[self.of.dtype]

    def result_dtype(self, dtype: str) -> str:
        return "float32" if self.in_place and SUM_BYTES[dtype] == 4 else dtype

    @property
    def begin(self) -> int:
        return 0 if self.in_place else self.of.begin

    @property
    def vector(self) -> int:
        """Sums of a thread: 16 bytes, unless there are so few that more threads are worth more."""
        whole = 16 // SUM_BYTES[self.of.dtype]
        divides = all(n % whole == 0 for n in (self.of.weights, self.of.singles, self.begin))
        return whole if divides and self.of.weights * 8 >= whole * FILLED // 2 else 1

    @property
    def ways(self) -> int:
        """Threads that share the blocks' sums."""
        return next((n for n in (1, 2, 4) if n * self.of.weights >= self.vector * FILLED), 8)

    @property
    def split(self) -> int:
        return min(-(-self.of.weights * self.ways // (self.vector * self.threads)), MOST_BLOCKS)

    @property
    def starts(self) -> bool:
        """Whether the next kernel starts early, where that is worth it: not of tiles, and not behind long passes."""
        return isinstance(self.of, BlockSums) and self.of.us < SHORT_US

    def __str__(self) -> str:
        return f"reduction: of {self.of.weights} sums"

    @property
    def told(self) -> list[str]:
        of = self.of
        numbers = {"COUNT": of.weights, "UNITS": of.units_per_sample, "UNITS_PER_BLOCK": of.units_per_block}
        numbers |= {"MOST": of.most, "FOLDS": of.folds, "SINGLES": of.singles, "WAYS": self.ways, "VECTOR": self.vector}
        numbers |= {"BEGIN": self.begin}
        told = {"Element": ELEMENT[of.dtype], "Result": "Sum<Element>" if self.in_place else "Element"}
        return constants(told | {key: Long(value) for key, value in numbers.items()})


@dataclass(frozen=True)
class Reductions(OneSpread):
    """A pass that adds up what the blocks of several passes have summed. In s2 their sums begin at `places`, bytes."""

    of: tuple[Reduction, ...]
    places: tuple[int, ...]
    us: float = REDUCTION_US

    threads, blocks, shared = Reduction.threads, Reduction.blocks, Reduction.shared
    reads = "s2"

    @property
    def dtype(self) -> str:
        return self.of[0].of.dtype

    @property
    def writes(self) -> str:
        return self.of[0].writes

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (max(each.outputs(batch)[0] for each in self.of),)

    def written(self, batch: int) -> int:
        return sum(each.written(batch) for each in self.of)

    @property
    def split(self) -> int:
        return sum(each.split for each in self.of)

    @property
    def starts(self) -> bool:
        return all(each.starts for each in self.of)

    def __str__(self) -> str:
        return f"reductions: of {', '.join(str(each.of.weights) for each in self.of)} sums"

    header = "gradient"
    adds_up_all = True

    @property
    def told(self) -> list[str]:
        lines, calls, first = [], [], 0
        for i, (each, place) in enumerate(zip(self.of, self.places, strict=True)):
            lines += [f"struct R{i} {{", *(f"  {line}" for line in each.told), "};"]
            calls.append(f"c.template add<R{i}, {first}, {each.split}>({place});")
            first += each.split
        return [*lines, *function("add_all(const C& c)", calls)]


def finished(passes: Sequence[Pass]) -> Iterator[Pass]:
    """These with those that add up their blocks' sums: one behind them all, where it has several to add up, as each
    kernel takes a launch. Sums that it does not take, of modes taken as one and such as L2 would not keep, are in s2
    for a while only, before the others."""
    summing = [p for p in passes if isinstance(p, BlockSums | OfVisit)]
    blocks = [p for p in summing if isinstance(p, BlockSums)]
    waiting = [p for p in blocks if not p.merged and p.part_bytes <= MOST_WAITING and p.waiting_at(0)]
    if len(waiting) < 2:
        waiting = []
    at = max((p.part_bytes for p in summing if p not in waiting), default=0)
    places: list[int] = []
    for p in passes:
        if isinstance(p, BlockSums) and p in waiting:
            places.append(-(-at // PLACE_BYTES) * PLACE_BYTES)
            at = places[-1] + p.part_bytes
            yield p.waiting_at(places[-1]) or p
        else:
            yield from (p, *p.finishing)
    if waiting:
        yield Reductions(tuple(map(Reduction, waiting)), tuple(places))


def tile(contraction: Contraction, dtype: str, batch: int, gpu: Gpu, states: States = NO_SUM) -> Gradient | None:
    """The fastest tiling by prediction, or None where the groups make more tiles than a grid has rows."""
    return fastest(_tilings(contraction, dtype, batch, gpu, states), batch, reduction_us)


def reduction_us(plan: TileSums) -> float:
    """Microseconds of the kernel that adds up the blocks' sums, where there is one."""
    return 0.0 if plan.is_whole else REDUCTION_US


def _tilings(c: Contraction, dtype: str, batch: int, gpu: Gpu, states: States) -> Iterator[Gradient]:
    size = ELEMENT_BYTES[dtype]
    by_groups = not c.tied and c.inner > 1
    run = math.gcd(16 // size, c.inner)
    for ((mt, nt), registers), warps, bk in itertools.product(TILES[dtype].items(), (2, 4, 8), (64, 32, 16)):
        for wm in (1, 2, 4, 8):
            for wg in (run, 2 * run) if by_groups else (1,):
                wn = warps // (wm * wg)
                if warps % (wm * wg) or 16 * mt * wm > MOST_WIDE or 8 * nt * wn > MOST_WIDE:
                    continue
                plan = Gradient(c, dtype, mt, nt, wm, wn, wg, bk, 0, gpu, batch, states=states)
                if plan.runs > MOST_RUNS or plan.shared > gpu.shared or plan.tiles > MOST_BLOCKS:
                    continue
                needed = registers + plan.runs * (plan.run * size // 4 + PLACE_REGISTERS)
                if needed <= 255 and plan.threads * needed <= 65536:
                    yield replace(plan, registers=needed)
