"""All gradients of a list of tied contractions at one visit: chain_backward.cuh, its tiles and source.

It takes any sizes in any dtype, and is to gradients what resident passes are to layers. A state too large for one visit
takes several, each with some neighbouring modes (plan/visits.py).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Long, Told, ask_for, constants, function, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.passes import scratch_of
from factorlayer.kernels.resident import (
    copied_at_once,
    is_scaled,
    load_weight_lines,
    region_of,
    scales_of,
    stage_type,
)
from factorlayer.kernels.stages import INSTRUCTIONS, NO_TILES, Layout, Source, Stage, TileUs, times_of_copies, together
from factorlayer.kernels.tiling import (
    MOST_OF_THREADS,
    OF_PADDED_ROW,
    PART_US,
    chunks_of,
    odd_us,
    of_pieces,
    parts_of_sectors,
    shared_us,
    stage_for,
    units_of,
    weights_us,
)
from factorlayer.kernels.timing import Fastest, most_of, predict, us_of_class, waits_of
from factorlayer.kernels.work import OF_TENSOR, Mode, Work, merged, round_up, told_inputs

# Tiles of 16 x 8 that a warp has of a weight's gradient, down and across.
TILES = (
    *((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (2, 8)),
    *((3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 4)),
)
MOST_SUMS = (16, 32, 64, 96)  # of a thread, of all weights: fewer leave room for more warps
PARTS = (1, 2, 4, 8)
FEW = 64  # columns for each multiprocessor, of which parts are tried where one block has room for all
MOST_GROUPS = 15  # each has a barrier of its own
WARPS = (2, 4, 8, 16)
FEWER = (1, 2, 4)  # times: what pads the states of a tile may leave room for smaller ones alone
OTHER_REGISTERS = 56
WEIGHTS_RATE = 40e3  # bytes of weights, both ways round, that a multiprocessor loads in a microsecond before tiles
SLACK = 16  # bytes behind a state, which an access of whole 16 bytes may reach


@dataclass(frozen=True)
class Learned:
    """The gradient of one weight: `rows` times [q, inner] by [p, inner], in warp tiles of mt x nt times 16 x 8."""

    p: int
    q: int
    inner: int
    rows: int
    mt: int
    nt: int
    count: int  # tiles of a warp
    share: int  # warps with different ones

    @kept
    def sums(self) -> int:
        """Sums of a thread."""
        return 4 * self.mt * self.nt * self.count

    @property
    def reach_q(self) -> int:
        return round_up(self.q, 16 * self.mt)

    @property
    def reach_p(self) -> int:
        return round_up(self.p, 8 * self.nt)

    def __str__(self) -> str:
        return f"{self.q}×{self.p} by {16 * self.mt}×{8 * self.nt}"

    def time(self, dtype: str, warps: int, gpu: Gpu) -> float:
        """Microseconds of a multiprocessor for a tile of units, were it alone."""
        return together(*self.parts_of_time(dtype, warps, gpu))

    def parts_of_time(self, dtype: str, warps: int, gpu: Gpu) -> tuple[float, float, float]:
        """What multiplying, moving and issuing take of that."""
        size = ELEMENT_BYTES[dtype]
        width = 16 if size == 2 else 8
        if self.inner == 1:
            steps = -(-self.rows // width)
        elif round_up(self.inner, 8) * 2 == width:  # two rows are one step
            steps = -(-self.rows // 2)
        else:
            steps = self.rows * -(-round_up(self.inner, 8) // width)
        rounds = -(-steps // (warps // self.share)) * self.count * warps
        of_a, of_b, of_product = INSTRUCTIONS[dtype]
        issue = rounds * (self.mt * of_a + self.nt * of_b + self.mt * self.nt * of_product + 6)
        issue += warps * self.count * (4 * self.mt * self.nt + 20)
        multiply = 2 * rounds * width * 128 * self.mt * self.nt / gpu.flops[dtype]
        move = rounds * width * (16 * self.mt + 8 * self.nt) * size / gpu.shared_bytes
        return multiply, move, issue / gpu.instructions


@dataclass(frozen=True)
class ChainBackward(BlockSums):
    """A pass, tiled. `us` is the time predicted for `batch` samples."""

    work: Work  # its contractions forward; `terms` of a sum are blocks along y of the grid, a block has `rank` others
    forward: tuple[Stage, ...]  # one for each step, of which the last one is not made
    back: tuple[Stage, ...]
    learned: tuple[Learned, ...]
    chunk: int
    units: int
    warps: int
    groups: int
    slots: int
    parts: int  # blocks along y of the grid that share a single weight
    places: Places
    gpu: Gpu
    us: float
    tile_us: TileUs = NO_TILES
    sums_at: int = 0  # bytes in s2 before its sums, which other passes have

    # What a pass says of itself

    def us_of(self, batch: int) -> float:
        return self.tile_us.of(-(-batch * self.units_per_sample // self.units), self.groups, self.most, self.gpu)

    @property
    def dtype(self) -> str:
        return self.work.dtype

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @property
    def split(self) -> int:
        return self.work.terms * self.parts

    @property
    def most(self) -> int:
        return max(1, self.gpu.sms // self.split)

    @property
    def chunks(self) -> int:
        return -(-self.work.inner // self.chunk)

    @property
    def units_per_sample(self) -> int:
        return self.work.outer * self.chunks

    @property
    def units_per_block(self) -> int:
        return self.units

    @property
    def reads(self) -> str:
        return self.places.x

    @property
    def beside(self) -> tuple[str, int]:
        """The buffer that takes grad_y's place, and which parameter that is."""
        return (self.places.g, self.places.grad) if self.places.g else ("", 0)

    @property
    def writes(self) -> str:
        return self.places.y or "s2"

    @property
    def output_bytes(self) -> int:
        return self.terms_out * self.features(0) * self.size if self.places.y else 0

    def outputs(self, batch: int) -> tuple[int, ...]:
        if self.work.inputs and self.places.y:
            return tuple(batch * features * self.size for features in self.work.inputs.features)
        return super().outputs(batch)

    @property
    def terms_out(self) -> int:
        return self.work.terms if self.places.terms_y else 1

    @property
    def scratch(self) -> tuple[int, ...]:
        state = self.work.terms * self.size
        of = {self.places.x: self.features(0) * state, self.places.g: self.features(-1) * state * self.work.rank}
        of[self.places.y] = max(of.get(self.places.y, 0), self.output_bytes)
        return scratch_of(of, self.sums_at + self.part_bytes)

    def waiting_at(self, place: int) -> ChainBackward:
        return replace(self, sums_at=place)

    def sum_bytes(self, blocks: int) -> int:
        return self.sums_at + super().sum_bytes(blocks)

    def is_others(self, missing: int, padding: int) -> bool:
        return 0 < self.sums_at == missing - padding

    @kept
    def modes(self) -> tuple[Mode, ...]:
        """The modes in the order of the weights."""
        return tuple(mode for _, mode in sorted(self.work.steps, key=lambda step: step[0]))

    @property
    def merged(self) -> tuple[Mode, ...]:
        return merged(self.modes)

    @property
    def rank(self) -> int:
        return self.work.terms * self.work.rank

    @property
    def weights(self) -> int:
        return self.rank * sum(mode.p * mode.q for mode in self.modes)

    @property
    def begin(self) -> int:
        """Elements of the gradients before these weights'."""
        return self.places.begin

    @property
    def asks(self) -> list[tuple[str, str]]:
        if self.places.g or self.places.x != "x":
            return []
        return [
            *self.work.asks[: len(self.work.inputs.features) if self.work.inputs else 1],
            ask_for(f"params.weights[{self.places.grad}]", self.features(-1) * self.size),
        ]

    # Memory

    def features(self, state: int) -> int:
        """Elements of a sample's state in memory, before the first step or behind the last one."""
        return self.work.outer * math.prod(self.work.states[state]) * self.work.inner

    @kept
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes for each S, whose place G takes, and behind them for grad_y."""
        found = []
        for i, (stage, learned) in enumerate(zip(self.forward, self.learned, strict=True)):
            of_s = _bytes(stage, learned.reach_p, i < len(self.forward) - 1)
            of_g = _bytes(self.back[i - 1], self.learned[i - 1].reach_q, True) if i else self.back[0].result_bytes
            found.append(max(of_s, of_g))
        found.append(_bytes(self.back[-1], self.learned[-1].reach_q, True))
        return tuple(found)

    @kept
    def slot_bytes(self) -> int:
        return self.state_bytes[0] + self.gradients * self.state_bytes[-1]

    @property
    def gradients(self) -> int:
        """Those of a slot: of all terms, or one for each that a block has."""
        return self.work.rank if self.places.terms_g else 1

    @kept
    def between(self) -> tuple[int, ...]:
        """Bytes of each S between x and grad_y. What the last contraction back reads is there for each term."""
        return tuple(n * (1 if i else self.work.rank) for i, n in enumerate(self.state_bytes[1:-1]))

    @kept
    def group_bytes(self) -> int:
        return self.slots * self.slot_bytes + sum(self.between)

    @kept
    def stages(self) -> tuple[Stage, ...]:
        """The stages that its kernel makes, forward and back."""
        return (*self.forward[:-1], *(self.back if self.places.y else self.back[1:]))

    @kept
    def weight_bytes(self) -> int:
        return round_up(self.work.rank * sum(stage.weight_bytes for stage in self.stages), 128)

    @kept
    def barrier_bytes(self) -> int:
        """Scales of weights, for each step."""
        scaled = any(is_scaled(self.dtype, mode) for mode in self.modes)
        return round_up(scales_of(self.work, self.work.rank) * len(self.work.steps), 128) if scaled else 0

    @property
    def shared(self) -> int:
        return self.barrier_bytes + self.weight_bytes + self.groups * max(self.group_bytes, self.fold_bytes)

    @property
    def fold_bytes(self) -> int:
        """Bytes of a group in which its warps' sums are added up."""
        return 32 * self.warps * 4 * SUM_BYTES[self.dtype]

    def __str__(self) -> str:
        terms = f", {self.work.terms} terms" if self.work.terms > 1 else ""
        terms += f", all {self.work.rank} terms of a tile" if self.work.rank > 1 else ""
        return (
            f"chain, backward: {self.groups} groups of {self.warps} warps, tiles of {self.units} units"
            + (f" in chunks of {self.chunk}" if self.chunk != self.work.inner else "")
            + (f" by {self.parts} blocks" if self.parts > 1 else "")
            + f", {self.slots} slots, {self.shared} bytes of shared memory{terms}; "
            + ", ".join(map(str, (*self.stages, *self.learned)))
        )

    @property
    def told(self) -> list[str]:
        work, places, last = self.work, self.places, len(self.forward) - 1
        layouts = [stage.layout for stage in self.forward]
        back_layouts = [self.back[0].result_layout, *(stage.layout for stage in self.back)]  # of G
        of_x, of_g = (math.prod(work.states[state]) for state in (0, -1))
        regions = [region_of(work, self.chunk, whole, whole) for whole in (of_x, of_g)]
        returned = region_of(work, self.chunk, of_x, self.back[0].q if self.parts > 1 else of_x)
        group_bytes = (self.shared - self.barrier_bytes - self.weight_bytes) // self.groups // 16 * 16
        told: Told = {"WARPS": self.warps, "GROUPS": self.groups, "UNITS": self.units, "SLOTS": self.slots}
        told |= {"RANK": work.rank, "TERMS": work.rank, "GRADS": self.gradients, "kGradBytes": self.state_bytes[-1]}
        told |= {"UNITS_PER_SAMPLE": self.units_per_sample, "GRAD": places.grad, "COUNT": self.weights, "BIAS": False}
        told |= {"BESIDE": -1, "AS_MEMORY": False, "PADDED": True}
        told |= {"COPY_X": copied_at_once(layouts[0], regions[0], self.size, work.inputs)}
        told |= {"COPY_G": copied_at_once(back_layouts[-1], regions[1], self.size)}
        told |= {"STORE": copied_at_once(back_layouts[0], returned, self.size, work.inputs), "RETURNS": bool(places.y)}
        told |= told_inputs(work.inputs)
        told |= {"SUMS_AT": Long(self.sums_at // SUM_BYTES[self.dtype])}
        told |= {"MEETINGS": work.rank * 3 * last + 2 * bool(places.y)}
        told |= {"PARTS": self.parts, "PART": self.back[0].q, "ROWS": self.forward[0].p}
        told |= {"PART_STEP": Long(self.back[0].q * work.inner), "kStateBytes": self.state_bytes[0]}
        told |= {"kBarrierBytes": self.barrier_bytes, "kWeightBytes": self.weight_bytes}
        told |= {"kSlotBytes": self.slot_bytes, "kGroupBytes": group_bytes}
        for key, state, terms in (("X", 0, places.terms_x), ("G", -1, places.terms_g), ("Y", 0, places.terms_y)):
            told[f"{key}_TERM"] = Long(self.features(state) if terms else 0)
        width = work.inner if work.inner % self.chunk else 0
        for key, region in zip(("Input", "Output", "Returned"), (*regions, returned), strict=True):
            told[key] = f"Region<{', '.join(map(str, region))}, {self.units_per_sample}, {width}>"
        at = 0
        for i, stage in enumerate(self.forward):
            following = layouts[i + 1] if i < last else stage.layout
            told[f"F{i}"] = _stage_type(self, i, stage, layouts[i], following, at)
            at += work.rank * stage.weight_bytes if i < last else 0
        for i, stage in enumerate(self.back):
            told[f"B{i}"] = _stage_type(self, i, stage, back_layouts[i + 1], back_layouts[i], at)
            at += work.rank * stage.weight_bytes if i > 0 or places.y else 0
        begins = dict(zip(self.modes, itertools.accumulate((m.p * m.q for m in self.modes), initial=0), strict=False))
        for i, (d, (_, mode)) in enumerate(zip(self.learned, work.steps, strict=True)):
            sizes = (d.p, d.q, d.inner, d.rows, d.mt, d.nt, d.count, d.share)
            raw = (str(i == 0).lower(), str(i == last).lower())
            words = (*sizes, layouts[i], back_layouts[i + 1], begins[mode] * self.rank, *raw)
            told[f"D{i}"] = f"Learned<{', '.join(map(str, words))}>"
        told |= {"X": "F0::In", "G": f"B{last}::In", "Final": str(back_layouts[0]), "FirstX": "F0"}
        told |= {"FirstG": f"B{last}", "FirstStage": "F0", "AlsoRaw": f"B{last}"}
        tiles = " ".join(f"typename C::template Tiles<D{i}> d{i} = {{}};" for i in range(last + 1))
        stores = [f"c.template store<D{i}>(sums.d{i});" for i in range(last + 1)]
        return [
            *kinds(self.dtype),
            activation_type("identity", self.dtype, work.scalars),
            *constants(told),
            f"template <class C> struct Sums {{ {tiles} }};",
            *_load_weights(self),
            *_walk(self),
            *function("store_sums(const C& c, const Sums<C>& sums)", stores),
        ]


@dataclass(frozen=True)
class Places:
    """Buffers of the plan in which a pass finds states and leaves the gradient of what it reads, each with a state for
    each term or one for all. `y` is empty where that gradient is not made, `g` where it is grad_y itself, parameter
    `grad`."""

    grad: int
    begin: int = 0  # of the gradients of all weights, elements before these
    x: str = "x"
    g: str = ""
    y: str = "y"
    terms_x: bool = False
    terms_g: bool = False
    terms_y: bool = False


def _bytes(stage: Stage, reach: int, is_read: bool) -> int:
    """Bytes of a state, with what tiles touch behind its rows and behind its last one's p's, if the stage itself reads
    it or only the gradient of its weight does."""
    layout = stage.layout
    width = 16 if ELEMENT_BYTES[stage.dtype] == 2 else 8
    rows = round_up(stage.rows, width) if stage.by_rows else stage.rows
    behind = max(0, reach - (layout.row if stage.by_rows else layout.row // layout.step))
    elements = rows * layout.row + behind * (1 if stage.by_rows else layout.step)
    whole = stage.state_bytes if is_read else 0
    return round_up(max(whole, elements * ELEMENT_BYTES[stage.dtype] + SLACK), 128)


def _stage_type(plan: ChainBackward, i: int, stage: Stage, layout: Layout, following: Layout, weight: int) -> str:
    scale = scales_of(plan.work, plan.work.rank) * i if is_scaled(plan.dtype, plan.work.steps[i][1]) else -1
    return stage_type(stage, layout, following, weight, scale=scale)


def _load_weights(plan: ChainBackward) -> list[str]:
    last, rank = len(plan.forward) - 1, plan.work.rank
    part = plan.back[0].q if plan.parts > 1 else 0
    lines: list[str] = []
    for i, (_, mode) in enumerate(plan.work.steps):
        names = [f"F{i}"] if i < last else []
        transposed = [f"B{i}"] if i > 0 or plan.places.y else []
        of_term = load_weight_lines(mode, plan.dtype, names, transposed, "(c.term() + term)", part=part)
        lines += [f"for (int term = 0; term < {rank}; ++term) {{", *of_term, "}"]
    return function("load_weights(const C& c)", lines)


def _walk(plan: ChainBackward) -> list[str]:
    last = len(plan.forward) - 1
    rank, grad_bytes = plan.work.rank, plan.state_bytes[-1] if plan.gradients > 1 else 0
    apart = plan.state_bytes[1] if last else grad_bytes  # from term to term, of what the last contraction back reads
    offsets = list(itertools.accumulate(plan.between, initial=0))
    states = ["x", *(f"c.state({offset})" for offset in offsets[:-1]), "g"]
    of_term = list(states)
    of_term[-1] += f" + term * {grad_bytes}" if grad_bytes else ""
    if last:
        of_term[1] += f" + term * {apart}"
    calls = [f"c.template contract<F{i}, F{i + 1}>({of_term[i]}, {of_term[i + 1]}, tile, term);" for i in range(last)]
    for i in reversed(range(last + 1)):
        calls.append(f"c.template learn<D{i}>(sums.d{i}, {of_term[i]}, {of_term[i + 1]}, term);")
        if i > 0:
            back = f"c.template contract<B{i}, B{i - 1}>({of_term[i + 1]}, {of_term[i]}, tile, term);"
            calls += ["c.sync();", back]
    calls = [f"ROLL for (int term = 0; term < {rank}; ++term) {{", *calls, "}"]
    if plan.places.y:
        calls += ["c.sync();", f"c.template contract<B0, void, {rank}, {apart}>({states[1]}, x, tile);"]
    return function("walk(const C& c, Sums<C>& sums, u32 x, u32 g, i64 tile)", calls)


@functools.lru_cache(512)
def tile(work: Work, places: Places, batch: int, gpu: Gpu) -> ChainBackward | None:
    """The fastest by prediction, or None where a unit, or the sums, do not fit. Blocks that share a weight read what
    others would overwrite, where the gradient takes the place of the state."""
    y = "y" if places.y else ""
    same = Places(0, x=y if places.x == places.y else "x", y=y, terms_x=places.terms_x, terms_g=places.terms_g)
    found = _tile(work.unnumbered, same, batch, gpu)
    return replace(found, work=work, places=places) if found else None


@functools.lru_cache(512)
def _tile(work: Work, places: Places, batch: int, gpu: Gpu) -> ChainBackward | None:
    """The fastest tiling of these sizes and places, whatever the weights' numbers are."""
    tilings = _tilings(work, places, batch, gpu, Fastest(batch, gpu))
    found = min(tilings, key=lambda candidate: candidate[0], default=None)
    return replace(ChainBackward(*found[1]), tile_us=TileUs(*found[2])) if found else None


# What it is compared by, in microseconds, and fields of a ChainBackward and of its TileUs
Candidate = tuple[float, tuple[Any, ...], tuple[float, float, float, float]]


def _tilings(work: Work, places: Places, batch: int, gpu: Gpu, fastest: Fastest) -> Iterator[Candidate]:
    """Each faster than the `fastest` before it."""
    alone = len(work.steps) == 1 and work.rank == 1 and places.x != places.y and not work.inputs
    for parts in PARTS if alone else (1,):
        yield from fastest.among(_of_parts(work, places, parts, batch, gpu, fastest))
        if fastest.us < math.inf and batch * work.outer * work.inner >= FEW * gpu.sms:
            return


def _of_parts(work: Work, places: Places, parts: int, batch: int, gpu: Gpu, fastest: Fastest) -> Iterator[Candidate]:
    size = ELEMENT_BYTES[work.dtype]
    for chunk, warps, fewer in itertools.product(chunks_of(work), WARPS, FEWER):
        states = [math.prod(state) * chunk for state in work.states]
        total = batch * work.outer * -(-work.inner // chunk)
        units, rest = divmod(units_of(max(states), warps, total), fewer)
        if rest or units * sum(states) * size > gpu.shared or (warps > 2 and units * max(states) < warps * 128):
            continue
        if parts > 1 and work.steps[0][1].p < 16 * parts:
            continue
        every_learned = _learned(work, chunk, units, warps, parts, gpu)
        largest = math.inf
        for most in (16, 8, 4) if every_learned else ():
            if largest <= most:  # fewer tiles leave what was found before as it is
                continue
            both = _stages(work, chunk, units, warps, most, parts, gpu)
            if both is None:
                break
            largest = max(stage.sums for stage in (*both[0], *both[1]))
            for learned in every_learned:
                yield from _grouped(work, places, both, learned, chunk, units, warps, parts, total, batch, gpu, fastest)


def _grouped(
    work: Work,
    places: Places,
    stages: tuple[tuple[Stage, ...], tuple[Stage, ...]],
    learned: tuple[Learned, ...],
    chunk: int,
    units: int,
    warps: int,
    parts: int,
    total: int,
    batch: int,
    gpu: Gpu,
    fastest: Fastest,
) -> Iterator[Candidate]:
    """Groups as many as fit, with two slots or one."""
    size, blocks = ELEMENT_BYTES[work.dtype], work.terms * parts
    words = 2 if work.dtype == "float64" else 1
    sums = words * work.rank * sum(d.sums for d in learned)
    most = max(
        max(stage.registers for stage in (*stages[0], *stages[1])),
        OTHER_REGISTERS + max(temporary(d, work.dtype) for d in learned),
    )
    first = stages[1][0]
    most += 0 if first.mt else words * (work.rank - 1) * first.p * first.q  # of a thread that sums terms
    fit = min(32, 4 * (512 // round_up(sums + most, 8)))
    if sums + most > 255 or fit < warps:
        return
    fields = (work, *stages, learned, chunk, units, warps)
    of_x, of_g = (math.prod(work.states[i]) * chunk * size for i in (0, -1))
    run = chunk * size if chunk < work.inner else 128
    one = ChainBackward(*fields, 1, 1, parts, places, gpu, 0.0)
    of_y, of_g = of_x * bool(places.y) / parts, of_g * one.gradients
    layouts = stages[0][0].layout, stages[1][-1].layout
    copies = [times_of_copies(layout, chunk % work.inner, size) for layout in layouts]
    moved = of_x * copies[0] + of_y + of_g * copies[1]
    alike = (parts * (1 if apart else work.terms) for apart in (places.terms_x, places.terms_g))  # blocks that read one
    read = sum(n * shared_us(blocks, gpu) for n, blocks in zip((of_x, of_g), alike, strict=True))
    memory = units * (read + of_y / gpu.memory_bytes) * (1 + 11 / run)  # short runs cost more
    shared = units * parts_of_sectors(math.prod(work.states[0]), chunk, work, batch) * PART_US if places.y else 0.0
    tiles, room = -(-total // units), gpu.shared - one.barrier_bytes - one.weight_bytes
    of_learned = [d.parts_of_time(work.dtype, warps, gpu) for d in learned]
    moving = _moving(one)

    def busy_us(groups: int) -> float:
        """Of a tile's work, with the waits of so many groups."""
        waits = waits_of(groups * warps)
        busy = odd_us(one.stages, warps, groups, gpu)
        busy += sum(together(multiply, move, issue * waits) for multiply, move, issue in of_learned)
        return work.rank * busy + units * moved / gpu.shared_bytes + waits * moving / gpu.instructions

    wanted = max(1, math.ceil(most_of(batch) * total / batch / units * blocks / gpu.sms))  # that all have a tile
    most_groups = min(room // one.group_bytes, fit // warps, MOST_GROUPS, wanted)
    if most_groups < 1:
        return
    busy = {most_groups: busy_us(most_groups)}
    begin = one.weight_bytes / WEIGHTS_RATE
    of_tile, in_double = (memory, busy[most_groups], warps, most_groups), work.dtype == "float64"
    if not fastest.may_be(total, units, blocks, *of_tile, parts=shared, begin=begin, in_double=in_double):
        return
    for slots in (2, 1):
        group = one.group_bytes + (slots - 1) * one.slot_bytes
        groups = min(room // group, most_groups)
        if groups < 1 or groups * max(group, one.fold_bytes) > room:
            continue
        if groups not in busy:
            busy[groups] = busy_us(groups)
        barriers = 2 * len(one.stages) * work.rank + 4
        many = warps, groups, float(slots > 1), tiles, blocks, gpu
        us, made_of = predict(memory, busy[groups], barriers, *many, parts=shared, in_double=in_double)
        begin = one.weight_bytes / WEIGHTS_RATE + weights_us(work, 32 * warps * groups, gpu, both_ways=True)
        summed = 2 * min(tiles, one.most) * one.weights * SUM_BYTES[work.dtype]
        end = 2 * groups * sums * 32 * warps * 4 / gpu.shared_bytes + summed / (gpu.l2_bytes * gpu.sms)
        us += begin + end
        of = TileUs(*made_of, begin + end), units, groups, blocks
        weight = us_of_class(batch, *of, total, gpu)
        yield weight, (*fields, groups, slots, parts, places, gpu, us), (*made_of, begin + end)


def _moving(plan: ChainBackward) -> float:
    """Instructions of warps that move a tile of units, and what is beside the products of its gradients."""
    work, size, count = plan.work, plan.size, 0.0
    for state, times in ((0, 2 if plan.places.y else 1), (-1, plan.gradients)):
        run = plan.chunk if plan.chunk < work.inner else math.prod(work.states[state]) * work.inner
        inputs = None if state else work.inputs
        access = math.gcd(16, run * size, work.inner * size if plan.chunk < work.inner else 16)
        access = inputs.access(access, size) if inputs else access
        elements = plan.units * math.prod(work.states[state]) * plan.chunk
        each = of_pieces(access, run * size) + (OF_TENSOR if inputs else 0)
        count += times * each * elements * size / access / 32
    for stage in plan.stages:  # what gradients are summed over is padded, too
        count += work.rank * stage.rows * stage.p * OF_PADDED_ROW / 32 if stage.inner_padded > stage.inner else 0
    return count


def temporary(d: Learned, dtype: str) -> int:
    """Registers for a tile's sums and operands."""
    words = {"float64": 2, "float32": 3}.get(dtype, 1)
    return words * 4 * d.mt * d.nt + (4 * d.mt + 2 * d.nt) * (2 if words > 1 else 1)


def _stages(
    work: Work, chunk: int, units: int, warps: int, most: int, parts: int, gpu: Gpu
) -> tuple[tuple[Stage, ...], tuple[Stage, ...]] | None:
    """Forward and back, of each step; of what a single one gives back, one of `parts`."""
    forward: list[Stage] = []
    back: list[Stage] = []
    last = len(work.steps) - 1
    for i, ((at, mode), sizes) in enumerate(zip(work.steps, work.states, strict=False)):
        rows, inner = units * math.prod(sizes[:at]), math.prod(sizes[at + 1 :]) * chunk
        part = mode.p if parts == 1 else round_up(-(-mode.p // parts), 16)
        for p, q, stages, copied in ((mode.p, mode.q, forward, i == 0), (mode.q, part, back, i == last)):
            summed = 1 if back or stages is forward else work.rank  # terms that a thread would have the weights of
            by_threads = summed * p * q <= MOST_OF_THREADS
            source: Source = "memory" if copied else "stage"
            stage = stage_for(p, q, inner, rows, work.dtype, warps, most, False, gpu, by_threads, source)
            if stage is None:
                return None
            stages.append(stage)
    return tuple(forward), tuple(back)


def _learned(work: Work, chunk: int, units: int, warps: int, parts: int, gpu: Gpu) -> list[tuple[Learned, ...]]:
    """The fastest tiles for each weight whose sums are together at most some of MOST_SUMS of a thread: large weights
    first get what they need at least."""
    ways = []
    for (at, mode), sizes in zip(work.steps, work.states, strict=False):
        rows, inner = units * math.prod(sizes[:at]), math.prod(sizes[at + 1 :]) * chunk
        ways.append(ways_of(mode.p, mode.q, inner, rows, warps, parts, work.dtype, gpu))
    found = (fitting(ways, most // work.rank) for most in MOST_SUMS)
    return list(dict.fromkeys(learned for learned in found if learned))


def fitting(ways: Sequence[Sequence[Learned]], most: int) -> tuple[Learned, ...] | None:
    """Of each weight's tiles the first whose sums are, with the least of the others, at most `most` of a thread."""
    least = [min(d.sums for d in each) for each in ways]
    chosen, left = [], most
    for i, each in enumerate(ways):
        room = left - sum(least[i + 1 :])
        d = next((d for d in each if d.sums <= room), None)
        if d is None:
            return None
        chosen.append(d)
        left -= d.sums
    return tuple(chosen)


@functools.lru_cache(1 << 12)
def ways_of(p: int, q: int, inner: int, rows: int, warps: int, parts: int, dtype: str, gpu: Gpu) -> tuple[Learned, ...]:
    """Tiles of a weight's gradient, the fastest first."""
    found = []
    for mt, nt in TILES:
        if (mt > 1 and 8 * mt >= q) or (nt > 1 and 4 * nt >= p):
            continue  # more than half of it would be padding
        tiles = -(-(-(-q // (16 * mt)) * -(-p // (8 * nt))) // parts)
        share = min(warps, 1 << (tiles - 1).bit_length())
        found.append(Learned(p, q, inner, rows, mt, nt, -(-tiles // share), share))
    return tuple(sorted(found, key=lambda d: d.time(dtype, warps, gpu)))
