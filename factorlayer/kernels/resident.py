"""Passes whose weights stay in shared memory: what chain.cuh is told, and what that takes.

A pass contracts some neighbouring modes of a Kronecker chain. Its units are [modes of the pass, a chunk of what lies
behind them]; a block's groups of warps take tiles of units. tiling.py chooses among what can be said here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from factorlayer.activations.written import activation_type, gradient
from factorlayer.device.code import Long, Told, constants, function, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.stages import NO_TILES, PIECE, Layout, Sandwich, Stage, Stages, TileUs, last_of, memory_of
from factorlayer.kernels.weights import normals, product
from factorlayer.kernels.work import Inputs, Mode, OfStates, Work, round_up, told_inputs

SCALE_BYTES = 4
LEAST_RUN = 2048  # bytes worth a request to the copy engine, which takes about 50 cycles for each


@dataclass(frozen=True)
class Resident(OfStates):
    """A pass, tiled. `us` is the time predicted for `batch` samples."""

    work: Work
    stages: Stages
    chunk: int  # of inner
    split: int = field()  # blocks for a unit: one for each term, or for each part of the q of what is contracted first
    made: int  # states that a block makes of a unit, one for each term
    units: int
    warps: int
    groups: int
    slots: int
    in_place: bool
    alone: bool  # nothing but x is in a slot, and the next tile comes as soon as its last stage has read it
    straight: bool  # sums of the last stage go straight to memory
    gpu: Gpu
    us: float
    tile_us: TileUs = NO_TILES
    takes: str = ""  # what it reads and gives, buffers of a plan, where that is not the state before and behind it
    gives: str = ""

    def us_of(self, batch: int) -> float:
        tiles = -(-batch * self.units_per_sample // self.units)
        return self.tile_us.of(tiles, self.groups, max(1, self.gpu.sms // self.split), self.gpu)

    @property
    def last(self) -> Stage:
        return last_of(self.stages)

    @property
    def final(self) -> Layout:
        """The layout of the result in shared memory, before it is stored."""
        return self.last.memory_layout if self.as_memory else self.last.result_layout

    @kept
    def as_memory(self) -> bool:
        """Whether the result lies in shared memory as it will in memory, and leaves for it by 16 bytes all the same: a
        tile begins there as far into 16 bytes as in memory."""
        if self.straight or self.work.slope or self.parts > 1 or self.chunk < self.work.inner:
            return False
        last = self.last
        fits = last.rows * last.q * last.inner * self.size + PIECE <= last.result_bytes
        return fits and self.work.lies_as_memory

    @property
    def parts(self) -> int:
        """Parts of the first mode's q, which is contracted first then."""
        return self.split * self.made // self.work.terms

    @property
    def terms(self) -> int:
        """Terms whose weights a block has: they are summed, or have a state each."""
        return self.work.rank * self.made

    @property
    def held_bytes(self) -> int:
        """Bytes of one state in a slot."""
        return self._memory[0]

    @property
    def slot_bytes(self) -> int:
        return self.work.held * self.held_bytes

    @property
    def side_bytes(self) -> tuple[int, int]:
        """Buffers beside the slots: states of odd number, and those of even number where x is alone."""
        return self._memory[1:]

    @kept
    def _memory(self) -> tuple[int, int, int]:
        return memory_of(self.stages, self.alone, self.in_place, self.result_beside, self.work.rank)

    @property
    def result_beside(self) -> bool:
        """Whether no result is among the states in shared memory: it goes straight to memory, or where grad_y is."""
        return self.straight or self.work.slope

    @property
    def beside_bytes(self) -> int:
        """Bytes of a tile's grad_y, behind the states."""
        return self.last.result_bytes if self.work.slope else 0

    @property
    def result_apart(self) -> bool:
        """Whether the first stage leaves what the last one before it reads, or has made, where it is, and ends with a
        barrier."""
        if self.straight:
            return len(self.stages) == 1 or self.offset(len(self.stages) - 1) != self.offset(1)
        return len(self.stages) > 1 and self.offset(len(self.stages)) != self.offset(1)

    @property
    def final_offset(self) -> int:
        """The place of the result, or, straight to memory, -1 where the next tile has to wait for all of this one."""
        return -1 if self.straight and not self.alone else self.offset(len(self.stages))

    @property
    def group_bytes(self) -> int:
        return self.slots * self.slot_bytes + sum(self.side_bytes) + self.beside_bytes

    @property
    def weight_bytes(self) -> int:
        return round_up(sum(stage.weight_bytes for stage in self.stages) * self.terms, 128)

    @property
    def barrier_bytes(self) -> int:
        """The copy engine's barriers, and scales of weights, for each step."""
        return round_up(self.scale_offset(len(self.work.steps)), 128)

    def scale_offset(self, step: int) -> int:
        return 8 * self.slots * self.groups + scales_of(self.work, self.terms) * step

    @property
    def shared(self) -> int:
        return self.barrier_bytes + self.weight_bytes + self.groups * self.group_bytes

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @property
    def chunks(self) -> int:
        """Chunks of a slice, the last one maybe not whole."""
        return -(-self.work.inner // self.chunk)

    @property
    def is_ragged(self) -> bool:
        return self.work.inner % self.chunk > 0

    @property
    def units_per_sample(self) -> int:
        return self.work.outer * self.chunks

    @property
    def units_per_block(self) -> int:
        """Fewer than a block has room for, so that few samples still keep all multiprocessors busy."""
        return self.units

    @property
    def output_bytes(self) -> int:
        return self.work.terms * self.features(-1) * self.size

    def features(self, state: int) -> int:
        """Elements of a sample's state in memory, before the first step or behind the last one."""
        return self.work.outer * math.prod(self.work.states[state]) * self.work.inner

    def offset(self, state: int) -> int:
        """The place of a state in the group's memory; -1 is the slot."""
        if self.work.slope and state == len(self.stages):
            return self.group_bytes - self.beside_bytes
        if self.in_place or state == 0 or (state % 2 == 0 and not self.alone):
            return -1
        behind, last = 0, len(self.stages) - 1
        if 0 < state < last and state % 2 == last % 2:  # what the last stage reads stays, of each term
            behind = (self.work.rank - 1) * self.last.state_bytes
        return self.slots * self.slot_bytes + (0 if state % 2 else self.side_bytes[0]) + behind

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        places = "in place, " if self.in_place else "x alone, " if self.alone and len(self.stages) > 1 else ""
        return (
            f"resident: {self.groups} groups of {self.warps} warps, tiles of {self.units} units, {self.slots} slots, "
            f"{places}{self.shared} bytes of shared memory; {stages}"
            + (f"; the first q in {self.parts} parts" if self.parts > 1 else "")
            + (f"; a state for each of {self.work.terms} terms" if self.work.terms > 1 else "")
            + (" by each block" if self.made > 1 else "")
            + ("; straight to memory" if self.straight else "")
            + ("; grad_y back through its activation" if self.work.slope else "")
            + (f"; x from {len(self.work.inputs.features)} tensors" if self.work.inputs else "")
            + (f"; chunks of {self.chunk}" if self.chunk != self.work.inner else "")
        )

    template, header = "Chain", "chain"

    @property
    def told(self) -> list[str]:
        work, stages = self.work, self.stages
        layouts = [*(stage.layout for stage in stages), self.final]
        regions = [_region(self, out) for out in (False, True)]
        load_run, store_run = (_run(self, layouts[-out], regions[out], out) for out in (False, True))
        split_step = math.prod(work.states[-1]) // self.parts * work.inner if self.parts > 1 else 0
        told: Told = {"WARPS": self.warps, "GROUPS": self.groups, "UNITS": self.units, "SLOTS": self.slots}
        told |= {"RANK": work.rank, "MADE": self.made, "RESULT_APART": self.result_apart, "STRAIGHT": self.straight}
        told |= {"AS_MEMORY": self.as_memory}
        told |= {"X_ALONE": self.alone or (self.straight and len(stages) == 1)}
        told |= {"HELD": work.held, "UNITS_PER_SAMPLE": self.units_per_sample, "FINAL": self.final_offset}
        told |= {
            key: _access(self, layouts[-out], regions[out], out) for key, out in (("COPY", False), ("STORE", True))
        }
        store_run *= not self.straight
        told |= {"LOAD_RUN": load_run, "STORE_RUN": store_run, "BULK_LOAD": load_run > 0, "BULK_STORE": store_run > 0}
        told |= {"kBarrierBytes": self.barrier_bytes, "kWeightBytes": self.weight_bytes, "kHeldBytes": self.held_bytes}
        told |= {"kSlotBytes": self.slot_bytes, "kGroupBytes": self.group_bytes, "SPLIT_STEP": Long(split_step)}
        told |= {"TERM_IN": Long(self.features(0) if work.apart else 0), "BIAS": work.bias}
        told |= {"TERM_OUT": Long(self.features(-1) if work.terms > 1 else 0)}
        told |= {"Source": told_inputs(work.inputs)["Source"]}
        told |= {key: _region_type(self, out) for key, out in (("Input", False), ("Output", True))}
        weight_at = 0
        for i, stage in enumerate(stages):
            told[f"S{i}"] = type_of_stage(self, i, layouts[i], layouts[i + 1], weight_at)
            weight_at += stage.weight_bytes * self.terms
        told |= {"FirstStage": "S0::First" if isinstance(stages[0], Sandwich) else "S0", "AlsoRaw": "void"}
        told |= {"First": "FirstStage::In", "Final": str(layouts[-1])}
        told |= {"BESIDE": work.scalars if work.slope else -1, "BESIDE_AT": self.group_bytes - self.beside_bytes}
        told |= {"LATER": self._asked_later * (load_run == 0)}
        activation = [activation_type("identity" if work.slope else work.activation, work.dtype, work.scalars)]
        activation += [gradient(work.activation, work.dtype, "Gradient")] * work.slope
        return [*kinds(work.dtype), *activation, *self.ends, *constants(told), *self.loading, *self.calls]

    @property
    def _asked_later(self) -> int:
        """Tiles of x that are asked for between a tile's grad_y and the sums that meet it."""
        return int(self.alone and len(self.stages) > 1)

    @property
    def ends(self) -> list[str]:
        """Types of what stands behind stages by themselves, layers of several, each named as `end` says."""
        return []

    def end(self, i: int) -> str:
        return ""

    def between(self, i: int) -> tuple[int, int]:
        """Places of what stage i reads and makes."""
        return self.offset(i), self.offset(i + 1)

    @property
    def loading(self) -> list[str]:
        """A function that brings weights to shared memory."""
        return _load_weights(self)

    @property
    def calls(self) -> list[str]:
        """A function that makes all stages of a tile."""
        return _stages(self)


def _region(plan: Resident, out: bool) -> tuple[int, int, int, int, int]:
    whole = math.prod(plan.work.states[-1 if out else 0])
    return region_of(plan.work, plan.chunk, whole, whole // plan.parts if out else whole)


def region_of(work: Work, chunk: int, whole: int, rows: int) -> tuple[int, int, int, int, int]:
    """rows, contiguous, chunks, slice, step of a unit in memory, which has `rows` of a `whole` state's."""
    if chunk == work.inner:
        return 1, rows * work.inner, 1, whole * work.inner, 0
    return rows, chunk, -(-work.inner // chunk), whole * work.inner, work.inner


def _region_type(plan: Resident, out: bool) -> str:
    width = plan.work.inner if plan.is_ragged else 0
    return f"Region<{', '.join(map(str, _region(plan, out)))}, {plan.units_per_sample}, {width}>"


def _access(plan: Resident, layout: Layout, region: tuple[int, int, int, int, int], out: bool) -> int:
    return copied_at_once(layout, region, plan.size, None if out else plan.work.inputs)


def copied_at_once(
    layout: Layout, region: tuple[int, int, int, int, int], size: int, inputs: Inputs | None = None
) -> int:
    """Bytes: what divides every run, in memory and in shared memory, and the rows of each tensor that x is."""
    _, contiguous, _, whole, step = region
    run = layout.i if layout.i > 1 else layout.p
    access = math.gcd(16, *(n * size for n in (run, contiguous, whole, step)))
    return inputs.access(access, size) if inputs else access


def _run(plan: Resident, layout: Layout, region: tuple[int, int, int, int, int], out: bool) -> int:
    """Elements that lie together in memory and in shared memory, if the copy engine should move them; or 0."""
    rows, contiguous, *_ = region
    step = layout.step if layout.i > 1 else 1
    together = layout.i if layout.i > 1 else layout.p
    if step == layout.i:
        together = layout.p * layout.i if layout.row != layout.p * layout.i else rows * contiguous
    run = math.gcd(together, contiguous, *(() if out or not plan.work.inputs else plan.work.inputs.features))
    good = not plan.is_ragged and run * plan.size >= LEAST_RUN and _access(plan, layout, region, out) == 16
    return run if plan.gpu.copy_engine and good else 0


def type_of_stage(plan: Resident, i: int, layout: Layout, following: Layout, weight: int) -> str:
    stage = plan.stages[i]
    step = i + sum(isinstance(earlier, Sandwich) for earlier in plan.stages[:i])
    if isinstance(stage, Sandwich):
        first = _single_type(plan, stage.first, i, step, layout, following, weight)
        second = _single_type(
            plan, stage.second, i, step + 1, layout, following, weight + stage.first.weight_bytes * plan.terms, True
        )
        return f"Sandwich<{first}, {second}>"
    return _single_type(plan, stage, i, step, layout, following, weight)


def _scaled(plan: Resident, step: int) -> bool:
    return is_scaled(plan.work.dtype, plan.work.steps[step][1])


def is_scaled(dtype: str, mode: Mode) -> bool:
    """Whether a weight is a product that is kept normalised."""
    return dtype == "float16" and len(mode.parts) > 1


def scales_of(work: Work, terms: int) -> int:
    """Bytes of the scales of a step: one for each term."""
    return SCALE_BYTES * (terms if any(is_scaled(work.dtype, mode) for _, mode in work.steps) else 1)


def _single_type(
    plan: Resident,
    stage: Stage,
    i: int,
    step: int,
    layout: Layout,
    following: Layout,
    weight: int,
    from_sums: bool = False,
) -> str:
    scale = plan.scale_offset(step) if _scaled(plan, step) else -1
    return stage_type(stage, layout, following, weight, scale, plan.between(i), plan.in_place, from_sums, plan.end(i))


def stage_type(
    stage: Stage,
    layout: Layout,
    following: Layout,
    weight: int,
    scale: int,
    places: tuple[int, int] = (-1, -1),
    in_place: bool = False,
    from_sums: bool = False,
    end: str = "",
    stride: int = 0,
) -> str:
    """A stage in C++: `weight`, `scale`, and `places` of its state and of the next, are offsets, as chain.cuh says. Of
    a weight that lies as another stage reads it, `stride` is that one's."""
    run, side = following.i if following.i > 1 else following.p, stage.q if stage.by_rows else stage.inner
    even = following.row % 2 == 0 and (following.i == 1 or following.step % 2 == 0)
    pairs = even and (run == side or (run % 2 == 0 and side % 2 == 0))
    words = [
        str(stage.by_rows).lower(),
        *(stage.p, stage.q, stage.inner, stage.rows, stage.mt, stage.nt),
        *(layout, following, *places, weight),
        *(str(flag).lower() for flag in (in_place, _splits(stage, following), pairs)),
        scale,
        stride or stage.weight_stride,
        str(from_sums).lower(),
        *([end] if end else []),
    ]
    return f"Stage<{', '.join(map(str, words))}>"


@functools.lru_cache(1024)
def _splits(stage: Stage, out: Layout) -> bool:
    """Whether what a warp tile has of several rows of a state lies in the next one at constants behind the first."""
    if not stage.mt:
        return False
    if stage.by_rows:
        size, step, count = stage.q, 8, 2 * stage.mt
        lanes = np.arange(-(-stage.m // (16 * stage.mt)))[:, None] * 16 * stage.mt + np.arange(8)
    else:
        size, step, count = stage.q * stage.inner, 1, stage.down
        lanes = np.arange(0, stage.rows, stage.down)[:, None]
    behind = step * np.arange(count)
    rows = lanes[..., None] + behind
    first = out.at(lanes * size)[..., None]
    return bool(np.all((rows >= stage.rows) | (out.at(rows * size) == first + out.at(behind * size))))


def _load_weights(plan: Resident) -> list[str]:
    lines: list[str] = []
    for step, ((_, mode), stage) in enumerate(zip(plan.work.steps, _types(plan), strict=True)):
        lines.append(f"for (int term = 0; term < {plan.terms}; ++term) {{")
        term, parts = ("blockIdx.y", 1) if plan.work.terms > plan.made else ("term", 1)
        if plan.parts > 1 and step == 0:
            term, parts = "blockIdx.y", plan.parts
        if plan.work.transposed:
            part = ("0", 1, mode.q // parts, "blockIdx.y") if parts > 1 else (term,)
            loading = load_weight_lines(mode.turned, plan.work.dtype, [], [stage], *part)
        else:
            loading = load_weight_lines(mode, plan.work.dtype, [stage], [], term, parts)
        lines += [f"  {line}" for line in loading]
        lines.append("}")
    return function("load_weights(const C& c)", lines)


def load_weight_lines(
    mode: Mode,
    dtype: str,
    stages: Sequence[str],
    transposed: Sequence[str],
    term: str,
    parts: int = 1,
    part: int = 0,
    number: str = "c.part()",
) -> list[str]:
    """A mode's weight to where `stages` have it, and `transposed` ones the other way round: that of a `term`, or one of
    `parts` of its rows. Transposed ones may take `part` of its columns, by its `number`, the last of which may not be
    whole."""
    lines = [
        f"auto w{j} = static_cast<const Element*>(c.params.weights[{weight}]) + {term} * {q // parts * p};"
        for j, (weight, q, p) in enumerate(mode.parts)
    ]
    if is_scaled(dtype, mode):
        lines.append(f"const float scale = {normals(mode)};")
        lines += [f"c.template keep_scale<{stage}>(term, scale);" for stage in (*stages, *transposed)]
    made = f"scale * {product(mode)}" if is_scaled(dtype, mode) else product(mode)
    for stage in stages:
        if len(mode.parts) == 1:
            lines.append(f"c.template load_weight<{stage}>(term, w0);")
        else:
            make = f"[&](int q, int p) {{ return narrow<Element>({made}); }}"
            lines.append(f"c.template make_weight<{stage}, false>(term, {make});")
    made = f"w0[q * {mode.p} + p]" if len(mode.parts) == 1 else f"narrow<Element>({made})"
    begin = f"p += {number} * {part}; if (p >= {mode.p}) return Element{{}}; " if part else ""
    for stage in transposed:
        lines.append(f"c.template make_weight<{stage}, true>(term, [&](int p, int q) {{ {begin}return {made}; }});")
    return lines


def _types(plan: Resident) -> list[str]:
    """The stage of each step."""
    types: list[str] = []
    for i, stage in enumerate(plan.stages):
        types += [f"S{i}::First", f"S{i}::Second"] if isinstance(stage, Sandwich) else [f"S{i}"]
    return types


def _stages(plan: Resident) -> list[str]:
    last = len(plan.stages) - 1
    calls = []
    for i, stage in enumerate(plan.stages):
        following = f"S{i + 1}" if i < last else "void"
        if isinstance(stage, Sandwich):
            calls.append(f"c.template sandwich<S{i}, {following}>(term, state, tile);")
        else:
            calls.append(f"c.template stage<S{i}, {following}>(term, state, tile);")
    head, x = "stages(const C& c, int term, int slot, i64 tile)", "c.slot_address(slot)"
    load = f"if (term == {plan.terms - 1}) c.load_next(tile, slot);"
    if plan.work.rank == 1:
        return function(head, [f"const u32 state = {x};", calls[0], *[load] * plan.alone, *calls[1:]])
    head = head.replace("int term", "int")
    *before, _ = calls
    to = f"c.template out_address<S{last}>(x)"
    if not before:
        apart = plan.held_bytes if plan.work.apart else 0
        summed = f"c.template sum_terms<S{last}, {plan.work.rank}, {apart}>(x, {to}, tile);"
        return function(head, [f"const u32 x = {x};", summed, *["c.load_next(tile, slot);"] * plan.alone])
    apart = last_of(plan.stages).state_bytes
    at = f"c.template out_address<S{last - 1}>(state) + term * {apart}"
    before[-1] = f"c.template stage_to<S{last - 1}, S{last}>(term, state, {at}, tile);"
    first, *others = before
    lines = [
        f"for (int term = 0; term < {plan.work.rank}; ++term) {{",
        f"  const u32 state = x{' + term * kHeldBytes' if plan.work.apart else ''};",
        *(f"  {line}" for line in (first, *[load] * plan.alone, *others)),
        "}",
        f"c.template sum_terms<S{last}, {plan.work.rank}, {apart}>(c.template in_address<S{last}>(x), {to}, tile);",
    ]
    return function(head, [f"const u32 x = {x};", *lines])
