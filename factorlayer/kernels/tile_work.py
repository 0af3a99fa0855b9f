"""What a tile of a resident pass takes of a multiprocessor. All groups of warps share its matrix unit, instructions,
shared memory and traffic; how long a group waits between a tile's first stage and its last, other groups hide.

The numbers are fitted to 3086 tilings of 341 passes of drawn layers, in all dtypes, timed on an H200: 89 % are
predicted within 30 %, and as many where they were left out of the fit (docs/kernels/resident.md).
"""

from __future__ import annotations

from typing import NamedTuple

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.stages import Sandwich, Stage, Stages, last_of, of_step, of_threads, steps_of
from factorlayer.kernels.work import Work, round_up

# Instructions of a warp for 16 x 8 sums that are put down, and more where their places are odd; for a warp's tile; for
# 16 bytes of padding, and for that of a row; for 16 bytes of each lane that are copied; times those of smaller pieces,
# where these leave
OF_SUMS, OF_ODD_SUMS, OF_TILE, OF_PADDING, OF_PADDED_ROW, OF_COPY, OF_STORED = 10.8, 10.0, 5.0, 16.0, 24.0, 8.4, 0.5
# Cycles until a warp has made a k-step, a tile beside its steps, and 16 x 8 odd sums; those of an instruction of
# threads that have all of a weight, and until all warps of a group have met
STEP_CYCLES = {"float64": 17, "float32": 120, "tf32": 47, "bfloat16": 75, "float16": 75}
TILE_CYCLES, ODD_CYCLES, THREAD_CYCLES, MEETING_CYCLES = 81, 69, 1.5, 172
MATRIX_UNITS = 4  # of a multiprocessor, of which a warp uses one
BIAS_CYCLES, BIAS_WORDS = 800, 16  # a wait for L2, and a lane's words of a bias that it asks for at once
FROM_MEMORY = 0.79  # of memory's time, of which L2 takes over a part
RUN_BYTES = 16  # bytes beside each run of memory that take as long as its own
SECTOR_US, SHORT_STORES = 1.6e-3, 0.16  # of parts of sectors, and of stores of single ones: docs/kernels/resident.md
FILLED_WAITS, WAITS = 1.6, 0.19  # times a wait for memory: for all traffic, and for what is not asked for ahead
BESIDE = 0.17  # what adds to the longest of products, instructions, shared memory and traffic: of the others' time
SHOWN = 0.41  # of a group's waits, which no other group hides
WEIGHTS_RATE = 59e3  # bytes of weights that a multiprocessor loads in a microsecond, before tiles


class TileWork(NamedTuple):
    products_us: float  # of the matrix unit
    instructions: float  # of warps
    shared: float  # bytes that go through shared memory
    cycles: float  # that a group waits
    behind: float  # of these, behind its first stage


def work_of(stages: Stages, warps: int, made: int, work: Work, in_place: bool, gpu: Gpu) -> TileWork:
    """Of all stages. The last one of several terms puts down their sum, for each state that is `made`; x is padded
    once, or each of the states that a tile has."""
    last, meeting, rank = len(stages) - 1, MEETING_CYCLES * (2 if in_place else 1), work.rank
    flops = instructions = shared = cycles = first = 0.0
    for i, stage in enumerate(stages):
        times, terms = (made, rank) if i == last else (made * rank, 1)
        parts = _of_sandwich(stage, warps) if isinstance(stage, Sandwich) else _of(stage, warps, terms, gpu)
        multiplied, issued, moved, waited = parts
        flops += times * multiplied
        instructions += times * issued
        if isinstance(stage, Stage):
            instructions += (made * rank if i else work.held) * padding_of(stage, OF_PADDING, OF_PADDED_ROW)
        shared += times * moved
        cycles += times * waited + made * rank * meeting
        first = first or cycles
    if work.bias:
        cycles += made * _waits_for_bias(last_of(stages), warps) * BIAS_CYCLES
    return TileWork(flops / gpu.flops[work.dtype], instructions, shared, cycles, cycles - first)


def _waits_for_bias(stage: Stage, warps: int) -> int:
    """How often a warp waits for a bias: with each tile, for as much of it as registers have."""
    if not stage.mt:
        return 1
    words = stage.mt * stage.nt * ELEMENT_BYTES[stage.dtype]
    return -(-stage.tiles // warps) * -(-words // BIAS_WORDS)


def beside(*times: float) -> float:
    """Microseconds of what a multiprocessor does side by side."""
    longest = max(times)
    return longest + BESIDE * (sum(times) - longest)


def of_groups(each: float, waits: float, traffic: float, ahead: float, groups: int, gpu: Gpu) -> tuple[float, float]:
    """Microseconds of a tile that nothing runs beside, and of a tile of each group, as TileUs has them: of tiles that
    take `each`, and `waits` of their group. `ahead` is the share of the traffic that is under way while the group works
    on the tile before."""
    one = waits + (1 - ahead) * (WAITS * gpu.rates.wait_us + traffic)
    return waits + traffic, max(one, groups * each + SHOWN * one)


def share_ahead(behind: float, of_x: float, gpu: Gpu) -> float:
    """The share of a tile's traffic that comes while its group still does this."""
    return min(1.0, behind / (WAITS * gpu.rates.wait_us + of_x))


def slower_products(warps: int) -> float:
    """Times what products take where all warps of a multiprocessor together leave some of its matrix units idle."""
    return max(1.0, MATRIX_UNITS / warps)


def _of(stage: Stage, warps: int, terms: int, gpu: Gpu) -> tuple[float, float, float, float]:
    """FLOPs, instructions, bytes and cycles of one stage; of several terms that are summed, products are made for
    each."""
    size, elements = ELEMENT_BYTES[stage.dtype], stage.rows * stage.inner
    if not stage.mt:
        each = of_threads(stage.p, stage.q, stage.inner, stage.rows, stage.dtype, warps, terms)
        return 0.0, warps * each, elements * (terms * stage.p + stage.q) * size, THREAD_CYCLES * each
    mt, nt, sums = stage.mt, stage.nt, stage.mt * stage.nt
    rounds, k = -(-stage.tiles // warps), round_up(stage.p, 8)
    steps = terms * steps_of(stage.p, stage.dtype)
    multiplied = 2 * terms * rounds * warps * sums * 128 * k
    issued: float = rounds * warps * (steps * of_step(mt, nt, stage.dtype) + OF_SUMS * sums + OF_TILE)
    moved: float = (terms * stage.tiles * (16 * mt + 8 * nt) * k + elements * stage.q) * size
    of_unit = MATRIX_UNITS * 2 * terms * sums * 128 * k / gpu.flops[stage.dtype] * gpu.rates.cycles
    waited: float = rounds * (max(steps * STEP_CYCLES[stage.dtype], of_unit) + TILE_CYCLES)
    if stage.is_odd:
        issued += OF_ODD_SUMS * sums * stage.tiles
        waited += ODD_CYCLES * sums * stage.tiles / warps
    return multiplied, issued, moved, waited


def _of_sandwich(pair: Sandwich, warps: int) -> tuple[float, float, float, float]:
    """The same of two stages at one visit, the first one some columns at a time."""
    a, b, rounds = pair.first, pair.second, -(-pair.tiles // warps)
    multiplied, of_steps, moved = pair.counted(warps)
    issued = rounds * warps * (of_steps + OF_SUMS * b.mt * b.nt + OF_TILE)
    width, chunks = 16 if ELEMENT_BYTES[a.dtype] == 2 else 8, a.inner // (8 * a.nt)
    waited = rounds * ((chunks * round_up(a.p, 8) + a.inner) / width * STEP_CYCLES[a.dtype] + TILE_CYCLES)
    return multiplied, issued, moved, waited


def padding_of(stage: Stage, each: float, of_row: float) -> float:
    """Instructions of warps that pad the state which a stage reads, of so many for each 16 bytes, or for a row."""
    rows = stage.rows * (round_up(stage.p, 8) > stage.p)
    if stage.by_rows:
        return rows * of_row / 32
    padding = (stage.padded - stage.p) * stage.layout.step
    return rows * padding * ELEMENT_BYTES[stage.dtype] / 16 * each / 32
