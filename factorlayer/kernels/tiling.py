"""The search for a resident pass's tiling: which tiles, groups and layouts are predicted to be fastest."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from factorlayer.activations.functions import of_slope
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.resident import SCALE_BYTES, Resident, scales_of
from factorlayer.kernels.stages import (
    COPIED,
    LINE,
    SUM_REGISTERS,
    Layout,
    Sandwich,
    Source,
    Stage,
    Stages,
    TileUs,
    last_of,
    memory_of,
    stage_us,
    tiles_across,
    times_of_copies,
    together,
)
from factorlayer.kernels.tile_work import (
    FILLED_WAITS,
    FROM_MEMORY,
    MEETING_CYCLES,
    OF_COPY,
    OF_STORED,
    RUN_BYTES,
    SECTOR_US,
    SHORT_STORES,
    WEIGHTS_RATE,
    beside,
    of_groups,
    padding_of,
    share_ahead,
    slower_products,
    work_of,
)
from factorlayer.kernels.timing import Fastest, most_of, us_of_class, waits_of
from factorlayer.kernels.work import OF_TENSOR, Inputs, Mode, Work, round_up

MOST_TILES = (32, 16, 8, 4)  # of 16 x 8 sums for a warp: fewer leave room for more warps
# Tiles of 16 x 8 that a warp takes down and across.
TILES = (
    *((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8)),
    *((2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 7), (2, 8)),
    *((4, 1), (4, 2), (4, 3), (4, 4), (4, 7), (4, 8), (8, 1), (16, 1)),
)
# Instructions of a warp, counted in machine code: to move a piece between memory and shared memory, one of 2 bytes,
# made of words, and issue slots that the load and store unit takes for each line of memory that a warp's pieces are in.
OF_PIECE, OF_HALF, OF_LINE = 2, 6, 2
OF_SINGLE = 1  # more, for a sum that is converted and put down by itself, not together with its neighbour
SECTOR = 32  # bytes of memory
PART_US = 4e-3  # of a multiprocessor, for a part of a sector whose rest another tile stores: docs/kernels/resident.md
IN_L2 = 16 << 20  # bytes of a result that L2 keeps until all its sectors are whole
# Beside a warp's products, in machine code as well: for a sum of a stage whose sizes 8 does not divide, 16 bytes of
# padding, and for that of a row.
OF_ODD_SUM, OF_PADDING, OF_PADDED_ROW = 2, 8, 12
WEIGHTS_AT_ONCE = 16  # numbers that a thread has asked for, before it waits
OF_LOADED = 16  # a warp's instructions for each, in machine code
MOST_OF_THREADS = 36  # numbers of a weight that each thread has, in registers
MOST_GROUPS = 32, 16  # of a block: of one warp, and of several
MOST_BESIDE = 1024  # bytes of barriers, and of scales of one term


@functools.lru_cache(512)
def tile(work: Work, batch: int, gpu: Gpu) -> Resident | None:
    """The fastest tiling by prediction, or None where the weights or one unit do not fit."""
    found = _tile(work.unnumbered, batch, gpu)
    if found is None:
        return None
    modes = dict(work.steps)
    return replace(found, work=replace(work, steps=tuple((at, modes[at]) for at, _ in found.work.steps)))


@functools.lru_cache(512)
def _tile(work: Work, batch: int, gpu: Gpu) -> Resident | None:
    """The fastest tiling of these sizes, whatever the weights' numbers are."""
    found = min(candidates(work, batch, gpu, Fastest(batch, gpu)), key=lambda candidate: candidate[0], default=None)
    return replace(Resident(*found[1]), tile_us=TileUs(*found[2])) if found else None


# What it is compared by, in microseconds, and fields of a Resident and of its TileUs
Candidate = tuple[float, tuple[Any, ...], tuple[float, ...]]


def candidates(work: Work, batch: int, gpu: Gpu, fastest: Fastest | None = None) -> Iterator[Candidate]:
    """All tilings; or, of those that are given the `fastest` so far, each that is faster than the ones before it."""
    for order in _orders(work):
        for split in _splits(order, batch, gpu):
            for chunk in chunks_of(order):
                for made in _made(order):
                    tilings = _tilings(order, chunk, split, made, batch, gpu, fastest or Fastest(batch, gpu))
                    yield from fastest.among(tilings) if fastest else tilings


def _orders(work: Work) -> Iterator[Work]:
    """Orders of contractions: as given, with the last two modes as a sandwich takes them, and with the first mode
    first."""
    seen = [work.steps]
    yield work
    last = len(work.sizes) - 1
    modes = dict(work.steps)
    for first in ((last - 1, last), (0,)):
        if (work.inner > 1 and len(first) > 1) or not modes.keys() >= set(first):
            continue
        steps = (*((at, modes[at]) for at in first), *(step for step in work.steps if step[0] not in first))
        if steps not in seen:
            seen.append(steps)
            yield replace(work, steps=steps)


def chunks_of(work: Work) -> Iterator[int]:
    """Parts of what lies behind the modes, as runs of memory: the longest that fits, some of 64 bytes and more, of
    which the last one is shorter where they do not divide it, and sectors."""
    yield work.inner
    if work.inner == 1:
        return
    size = ELEMENT_BYTES[work.dtype]
    runs = [run // size for run in (256, 128, 64) if run // size < work.inner]
    chunks = [run for run in runs if work.inner % run == 0]
    if not chunks:
        most = 2048 // size
        chunks = [d for d in range(min(most, work.inner - 1), 0, -1) if work.inner % d == 0][:3] + runs
    sector = SECTOR // size
    if work.inner > sector and work.inner % sector == 0 and sector not in chunks:
        chunks.append(sector)
    yield from chunks


def _splits(work: Work, batch: int, gpu: Gpu) -> Iterator[int]:
    """Parts of the first mode's q, where one weight is large or units are few: each block reads x for its own part."""
    yield 1
    (at, mode), *further = work.steps
    if at > 0 or len(mode.parts) > 1 or work.rank > 1 or work.terms > 1:
        return
    whole = mode.q * mode.p * ELEMENT_BYTES[work.dtype]
    few = batch * work.outer * work.inner * max(1, work.sizes[-1] // 16) < 8 * gpu.sms
    if whole > gpu.shared // 8 or few:
        least = 16 if further or work.inner > 1 else 8
        most = min(gpu.sms, mode.q // least)  # more parts would take turns at multiprocessors
        parts = (d for d in range(2, most + 1) if mode.q % (least * d) == 0)
        yield from itertools.islice((d for d in parts if whole // d < gpu.shared * 3 // 4), 4)


def _made(work: Work) -> tuple[int, ...]:
    """Terms whose states a block makes of one x: one, of which other blocks read the same x, or all."""
    return (1, work.terms) if work.terms > 1 and not work.apart else (1,)


def _tilings(
    work: Work, chunk: int, split: int, made: int, batch: int, gpu: Gpu, fastest: Fastest
) -> Iterator[Candidate]:
    states, blocks, terms = work.states_of(split), split * work.terms // made, work.rank * made  # for a unit
    unit_in, unit_out = math.prod(states[0]) * chunk, math.prod(states[-1]) * chunk
    unit_in *= work.held
    unit, size = max(unit_in, unit_out), ELEMENT_BYTES[work.dtype]
    unit_out *= made
    weights = sum(mode.p * mode.q // (1 if number else split) for number, (_, mode) in enumerate(work.steps))
    left = gpu.shared - terms * size * weights
    beside_bytes = MOST_BESIDE + (scales_of(work, terms) - SCALE_BYTES) * len(work.steps)
    per_sample = work.outer * -(-work.inner // chunk)
    total, most_units = batch * per_sample, math.ceil(most_of(batch) * per_sample)
    run = chunk * size if chunk < work.inner else 128
    same = 1 if work.apart else work.terms // made  # blocks that read one x, which L2 has for all but one
    of_x = unit_in * size * shared_us(same, gpu)
    of_y = unit_out * (1 + work.slope)  # with grad_y, which is read where results go
    stored_us = of_y * size / gpu.memory_bytes
    filled = FILLED_WAITS * gpu.rates.wait_us
    memory = FROM_MEMORY * (of_x + stored_us) * (1 + RUN_BYTES / run)  # short runs cost more
    memory += made * parts_of_sectors(math.prod(states[-1]), chunk, work, batch) * SECTOR_US
    if not fastest.may_take(total, 1, blocks, memory, memory):
        return
    copies = times_of_copies(copied_layout(work.steps[0], states[0], chunk, work.dtype), chunk % work.inner, size)
    functions = unit_out * of_slope(work.activation) if work.slope and work.dtype != "float64" else 0
    if chunk == work.inner and split == 1 and not work.slope and work.lies_as_memory:
        pieces = singles_of(unit_out, work)  # the result leaves by whole 16 bytes
    else:
        pieces = (1 + work.slope) * pieces_of(unit_out, work, chunk)
    coming = pieces_of(unit_in, work, chunk, work.inputs)
    of_unit = coming + OF_STORED * pieces + (OF_COPY * unit_in * size / COPIED if not coming else 0.0)
    moved = (unit_in * copies + of_y) * size
    for warps in (1, 2, 4, 8, 16):
        units = units_of(unit, warps, total)
        if units * unit * size > left or (warps > 1 and work.rank == 1 and units * unit < warps * 128):
            continue
        traffic, issued = units * memory, units * functions / gpu.rates.special_functions
        tiles = -(-total // units)
        wanted = max(1, -(-math.ceil(most_units / units) * blocks // gpu.sms))  # groups that all have a tile
        most_groups = min(MOST_GROUPS[warps > 1], wanted)
        least = beside(traffic, issued + units * of_unit / gpu.instructions, units * moved / gpu.shared_bytes)
        if not fastest.may_take(total, units, blocks, least, traffic):
            continue
        seen: list[tuple[bool, Stages]] = []
        largest = MOST_TILES[0] + 1
        for most in MOST_TILES:
            if largest <= most:  # fewer tiles leave what was found before as it is
                continue
            schemes = list(_schemes(work, chunk, split, made, units, warps, most, gpu))
            largest = max((stage.sums for _, stages in schemes for stage in stages), default=0)
            for in_place, stages in schemes:
                if (in_place, stages) in seen:
                    continue
                seen.append((in_place, stages))
                fields = (work, stages, chunk, blocks, made, units, warps)
                weight_bytes = sum(stage.weight_bytes for stage in stages) * terms
                room = gpu.shared - beside_bytes - weight_bytes
                fit = min(most_groups, warps_that_fit(work, stages) // warps, room // stages[0].state_bytes)
                if fit < 1:
                    continue
                of_stages = work_of(stages, warps, made, work, in_place, gpu)
                instructions = of_stages.instructions + units * of_unit
                shared = (of_stages.shared + units * moved) / gpu.shared_bytes
                waits = of_stages.cycles / gpu.rates.cycles
                each = beside(traffic, issued + instructions / gpu.instructions, of_stages.products_us, shared)
                begin = weight_bytes / WEIGHTS_RATE
                if not fastest.may_take(total, units, blocks, each, waits + traffic, begin):
                    continue
                goes = not in_place and blocks * made == work.terms and _goes_straight(stages, chunk, work)
                goes = goes and not work.slope  # grad_y lies where a result does
                for straight, slots, alone in _ways(stages, terms, in_place, goes):
                    slot, *sides = memory_of(stages, alone, in_place, straight or work.slope, work.rank)
                    slot *= work.held
                    group = slots * slot + sum(sides) + (last_of(stages).result_bytes if work.slope else 0)
                    groups = min(room // group, fit)
                    if groups < 1:
                        continue
                    # A tile meets for x, and for its result or what is beside that, too.
                    meetings = (2 - straight) * terms + work.slope
                    waits = (of_stages.cycles + MEETING_CYCLES * meetings) / gpu.rates.cycles
                    narrow = straight and not last_of(stages).stores_widely
                    of_memory = traffic + (SHORT_STORES * units * stored_us if narrow else 0.0)
                    leaving = 0.0 if straight else OF_COPY * units * unit_out * size / COPIED
                    products = of_stages.products_us * slower_products(groups * warps)
                    each = beside(of_memory, issued + (instructions + leaving) / gpu.instructions, products, shared)
                    # What a group does while its next tile comes, with one slot: behind the stage that reads x last, if
                    # x is alone there, else behind all stages, if their result is not where x was
                    behind = units * stored_us / made + (of_stages.behind / gpu.rates.cycles if alone else 0.0)
                    beside_x = not straight and (work.slope or (not in_place and len(stages) % 2 == 1))
                    ahead = share_ahead(behind, units * of_x, gpu) if alone or beside_x else 0.0
                    of_tile = of_groups(each, waits, of_memory, 1.0 if slots > 1 else ahead, groups, gpu)
                    begin = weight_bytes / WEIGHTS_RATE + made * weights_us(work, 32 * warps * groups, gpu)
                    made_of = (of_memory, *of_tile, begin, filled)
                    of = TileUs(*made_of), units, groups, blocks
                    us = of[0].of(tiles, groups, max(gpu.sms // blocks, 1), gpu)
                    weight = us_of_class(batch, *of, total, gpu)
                    yield weight, (*fields, groups, slots, in_place, alone, straight, gpu, us), made_of


def copied_layout(step: tuple[int, Mode], sizes: Sequence[int], chunk: int, dtype: str) -> Layout:
    """Of a state that comes from memory, for the contraction that reads it."""
    at, mode = step
    return Stage(mode.p, mode.q, math.prod(sizes[at + 1 :]) * chunk, 1, 1, 1, dtype, source="memory").layout


def shared_us(blocks: int, gpu: Gpu) -> float:
    """Microseconds of a multiprocessor for a byte that so many blocks read: L2 has it for all but one."""
    return (1 / gpu.memory_bytes + (blocks - 1) / gpu.l2_bytes) / blocks


def _ways(stages: Stages, terms: int, in_place: bool, goes: bool) -> Iterator[tuple[bool, int, bool]]:
    """Whether the result goes straight to memory, if it may, slots of a group, and whether nothing but x is in them, so
    that the next tile may come: with one slot, states of even number may have places of their own for that. Of several
    terms they have."""
    for straight in (False, True) if goes else (False,):
        states = len(stages) - straight  # that lie in shared memory beside x
        must = not in_place and (states == 1 or (states > 1 and terms > 1))
        yield straight, 2, must
        if states > 1 and not must and not in_place:
            yield straight, 1, True
        yield straight, 1, must


def _goes_straight(stages: Stages, chunk: int, work: Work) -> bool:
    """Whether lanes that hold neighbouring sums of the last stage store whole sectors of memory, as chain.cuh does."""
    last, size = stages[-1], ELEMENT_BYTES[work.dtype]
    if isinstance(last, Sandwich) or not last.mt or (size == 2 and last.nt % 2):
        return False
    row = last.q if last.by_rows else last.inner
    runs = (row, chunk, work.inner) if chunk < work.inner else (row,)
    return all(run * size % SECTOR == 0 for run in runs)


def weights_us(work: Work, threads: int, gpu: Gpu, both_ways: bool = False) -> float:
    """Microseconds, beside those of their bytes: what the copy engine and asynchronous copies cannot move comes by
    registers, each factor of a mode that is several by itself. `both_ways`: backward, weights lie turned as well."""
    rounds = loaded = 0
    for _, mode in work.steps:
        odd = mode.p * ELEMENT_BYTES[work.dtype] % 4 > 0
        if len(mode.parts) > 1 or work.transposed or both_ways or odd:
            elements = work.rank * round_up(mode.p, 8) * round_up(mode.q, 8)
            rounds += -(-elements // (threads * WEIGHTS_AT_ONCE)) - 1
            loaded += elements * len(mode.parts)
    return rounds * gpu.rates.wait_us + loaded * OF_LOADED / 32 / gpu.instructions


def odd_us(stages: Sequence[Stage], warps: int, groups: int, gpu: Gpu) -> float:
    """Microseconds of a tile's stages whose places are computed as the kernel runs: then what is issued is most of it,
    and waits with that of so many groups."""
    waits = waits_of(groups * warps)
    products = issued = 0.0
    for stage in stages:
        multiply, move, issue = stage.parts(warps, gpu)
        products += together(multiply, move, issue * waits)
        issued += OF_ODD_SUM * 4 * stage.mt * stage.nt * stage.tiles if stage.is_odd else 0.0
        issued += padding_of(stage, OF_PADDING, OF_PADDED_ROW)
    return products + waits * issued / gpu.instructions


def pieces_of(elements: int, work: Work, chunk: int, inputs: Inputs | None = None) -> float:
    """Instructions of warps that move a unit by pieces of less than 16 bytes, or from several tensors."""
    size = ELEMENT_BYTES[work.dtype]
    run = chunk if chunk < work.inner else elements
    access = math.gcd(16, run * size, work.inner * size if chunk < work.inner else 16)
    access = inputs.access(access, size) if inputs else access
    if access == 16 and inputs is None:
        return 0.0
    each = of_pieces(access, run * size) if access < 16 else 0.0
    return elements * size / access / 32 * (each + (OF_TENSOR if inputs else 0))


def singles_of(elements: int, work: Work) -> float:
    """Instructions of warps for sums that are put down one by one, where others are two by two."""
    row = work.inner if work.inner > 1 else work.states[-1][-1]
    return elements / 32 * OF_SINGLE if row % 2 else 0.0


def parts_of_sectors(rows: int, chunk: int, work: Work, batch: int) -> int:
    """Sectors of memory of which a unit of so many rows stores a part, and other tiles the rest at another time. Those
    of short rows, which come at about the same time, and those of small results are put together in L2."""
    size = ELEMENT_BYTES[work.dtype]
    run, row = chunk * size, work.inner * size
    are_whole = chunk == work.inner or math.gcd(run, row) % SECTOR == 0
    if are_whole or row < LINE or batch * work.outer * rows * row < IN_L2:
        return 0
    return rows if run < SECTOR else 2 * rows


def of_pieces(access: int, run: int) -> float:
    """Issue slots for one of each lane, of so many bytes in runs of `run` bytes of memory."""
    return (OF_PIECE if access > 2 else OF_HALF) + OF_LINE * 32 * access / min(run, LINE)


def warps_that_fit(work: Work, stages: Stages) -> int:
    """Warps that fit by their registers: a quarter of a block's warps shares 512 for each lane."""
    registers = max(stage.registers for stage in stages)
    last = last_of(stages)
    if not last.mt:  # a thread has the weights of all terms
        registers += (work.rank - 1) * last.p * last.q * (2 if work.dtype == "float64" else 1)
    registers += 16 if work.activation != "identity" else 4 * work.bias
    return min(32, 4 * (512 // round_up(registers, 8)))


def units_of(unit: int, warps: int, total: int) -> int:
    """Units of a tile: at least 512 elements for each warp, where there are so many."""
    units = 1
    while units * unit < warps * 512 and units < 64 and units * 2 <= total:
        units *= 2
    return units


def _schemes(
    work: Work, chunk: int, split: int, made: int, units: int, warps: int, most: int, gpu: Gpu
) -> Iterator[tuple[bool, Stages]]:
    for in_place in (False, True) if made == 1 else (False,):
        stages = _stages(work, chunk, split, units, warps, most, in_place, gpu)
        if stages is not None:
            yield in_place, stages
    stages = _sandwich(work, split, units, warps, most, gpu)
    if stages is not None:
        yield False, stages


def _stages(
    work: Work, chunk: int, split: int, units: int, warps: int, most: int, in_place: bool, gpu: Gpu
) -> Stages | None:
    if in_place and work.rank > 1:
        return None
    stages: list[Stage | Sandwich] = []
    for number, ((at, mode), sizes) in enumerate(zip(work.steps, work.states_of(split), strict=False)):
        rows = units * math.prod(sizes[:at])
        inner = math.prod(sizes[at + 1 :]) * chunk
        q = mode.q if number else mode.q // split
        sums = work.rank if number == len(work.steps) - 1 else 1  # terms that a thread would have the weights of
        by_threads = not in_place and sums * mode.p * q <= MOST_OF_THREADS
        source: Source = "stage" if number else "memory"
        stage = stage_for(mode.p, q, inner, rows, work.dtype, warps, most, in_place, gpu, by_threads, source)
        if stage is None:
            return None
        stages.append(stage)
    return tuple(stages)


def _sandwich(work: Work, split: int, units: int, warps: int, most: int, gpu: Gpu) -> Stages | None:
    """Tilings with the first two steps at one visit, where their sizes are whole tiles; not in float32, which repairs
    sums."""
    last = len(work.sizes) - 1
    if len(work.steps) < 2 or work.rank > 1 or work.inner > 1 or work.dtype == "float32":
        return None
    (at, a), (following, b) = work.steps[:2]
    if (at, following) != (last - 1, last) or a.q // split % 16 or b.p % 16:
        return None
    rows = units * math.prod(work.sizes[:at])
    first = _sandwich_stage(a.p, a.q // split, b.p, b.q, rows, work.dtype, warps, most, gpu)
    if first is None:
        return None
    stages: list[Stage | Sandwich] = [first]
    for (at, mode), sizes in list(zip(work.steps, work.states_of(split), strict=False))[2:]:
        rows, inner = units * math.prod(sizes[:at]), math.prod(sizes[at + 1 :])
        by_threads = mode.p * mode.q <= MOST_OF_THREADS
        stage = stage_for(mode.p, mode.q, inner, rows, work.dtype, warps, most, False, gpu, by_threads, "stage")
        if stage is None:
            return None
        stages.append(stage)
    return tuple(stages)


@functools.lru_cache(1024)
def _sandwich_stage(
    pa: int, qa: int, pb: int, qb: int, rows: int, dtype: str, warps: int, most: int, gpu: Gpu
) -> Sandwich | None:
    nt = -(-qb // 8)
    found = [
        Sandwich(Stage(pa, qa, pb, rows, mt, nc, dtype, source="memory"), Stage(pb, qb, 1, rows * qa, mt, nt, dtype))
        for mt, nc in itertools.product((1, 2), (2, 4))
        if mt * (nt + nc) * SUM_REGISTERS[dtype] <= most * 5 // 4 and qa % (16 * mt) == 0 and pb % (8 * nc) == 0
    ]
    return min(found, key=lambda pair: pair.time(warps, gpu), default=None)


@functools.lru_cache(1 << 14)
def stage_for(
    p: int,
    q: int,
    inner: int,
    rows: int,
    dtype: str,
    warps: int,
    most: int,
    once: bool,
    gpu: Gpu,
    by_threads: bool,
    source: Source = "other",
) -> Stage | None:
    """The warp tile that moves and multiplies least, or threads if they may; `once`: each warp has at most one tile."""
    m = rows if inner == 1 else q
    fits = (
        tile
        for tile in _tiles_by_time(p, q, inner, rows, dtype, warps, gpu)
        if tile.sums <= most and not (once and -(-m // (16 * tile.mt)) * tiles_across(q, inner, rows, tile.nt) > warps)
    )
    best = next(fits, None)
    if by_threads and (best is None or stage_us(p, q, inner, rows, 0, 0, dtype, warps, gpu) < best.us):
        return Stage(p, q, inner, rows, 0, 0, dtype, source=source)
    return Stage(p, q, inner, rows, best.mt, best.nt, dtype, source=source) if best else None


class WarpTile(NamedTuple):
    us: float  # of a stage by such tiles, were it alone
    mt: int
    nt: int
    sums: int  # as what bounds them counts them


@functools.lru_cache(1 << 14)
def _tiles_by_time(p: int, q: int, inner: int, rows: int, dtype: str, warps: int, gpu: Gpu) -> tuple[WarpTile, ...]:
    """The warp tiles of a stage, the fastest first."""
    m, n = (rows, q) if inner == 1 else (q, rows * round_up(inner, 8))
    found = [
        WarpTile(
            stage_us(p, q, inner, rows, mt, nt, dtype, warps, gpu),
            mt,
            nt,
            mt * nt * SUM_REGISTERS[dtype],
        )
        for mt, nt in TILES
        # More than half of others would be padding, or they have more sums than any stage may have.
        if (mt == 1 or 8 * mt < m) and (nt == 1 or 4 * nt < n) and mt * nt * SUM_REGISTERS[dtype] <= MOST_TILES[0]
    ]
    return tuple(sorted(found, key=lambda tile: tile.us))
