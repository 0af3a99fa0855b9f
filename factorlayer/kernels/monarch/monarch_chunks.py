"""Passes of both contractions of a Monarch layer of any sizes, forward or of x's gradient: monarch_chunks.cuh, its
tiles and source.

The state between stays in shared memory, of some input groups at a time, so that small ranks are padded together. A
pass before puts weights into the order of the copies. Blocks that take all input groups at once keep their weights and
need no such pass.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Long, constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.monarch_layer import OfMonarch, takes_forward
from factorlayer.kernels.passes import MOST_BLOCKS, Pass, Preparing, fastest
from factorlayer.kernels.product.streamed import PART_US, SECTOR
from factorlayer.kernels.stages import INSTRUCTIONS, together
from factorlayer.kernels.timing import waits_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

WARPS = 8
MOST_SUMS = 96  # registers of a thread that hold sums of y
OTHER_REGISTERS = {"float64": 72, "float32": 80, "tf32": 56, "bfloat16": 48, "float16": 48}
MOST_REGISTERS = 255  # of a thread
MOST_ACROSS = 4  # tiles of 8 numbers of a state that a warp has at once
MOST_TOGETHER = 4  # blocks of a multiprocessor
MOST_CHUNK = 128  # numbers of a state that one product sums over
MOST_PREPARED = 64 << 20  # bytes
GRAD = 2  # the parameter that grad_y is, behind both weights
START_US = 1.2  # of the pass that puts weights in order: a launch, and two trips to L2
# Of blocks that keep their weights: until these have come, and for each more turn of what comes through registers.
# Fitted to 305 tilings of 52 layers on an H200
KEPT_US, AGAIN_US = 0.1, 0.38
# Instructions of a warp, counted in PTX: for an item, a sum that is stored, a piece of y; for 16 bytes of a weight that
# is prepared, a piece of x that is copied, and one that goes through registers, alone or as eight
OF_ITEM, OF_SUM, OF_PIECE = 40, 8, 8
OF_WEIGHT, OF_COPY, OF_HELD, OF_EIGHT = 6, 16, 10, 36
EIGHT = 8  # numbers of 2 bytes that come together
HELD, HELD_EIGHTS = 16, 4  # pieces that a thread holds at once


def row_stride(elements: int, size: int) -> int:
    """Elements from a row in shared memory to the next, as operands.cuh has them: of whole steps, so that no two lanes
    meet in a bank."""
    return elements + (8 if size == 2 else 4)


def registers(dtype: str, mt: int, nt: int) -> int:
    """Registers of a thread beside sums that stay, for a product of mt times nt tiles: their own sums, and operands. Of
    floats, sums of low parts and of high ones as well."""
    words = {"float64": 2, "float32": 2}.get(dtype, 1)
    return words * (4 * mt * nt + 4 * mt + 2 * min(nt, 4)) + OTHER_REGISTERS[dtype]


def load_of(numbers: int, step: int, size: int) -> int:
    """Bytes of an access to a tensor whose groups' numbers are `step` apart (monarch_rows.cuh)."""
    return size if step > 1 else math.gcd(16, numbers * size)


def fetching(rows: int, numbers: int, step: int, size: int) -> tuple[float, int]:
    """Instructions of warps that bring rows of numbers to shared memory, and how often they wait for memory: what goes
    through registers comes in turns."""
    load = load_of(numbers, step, size)
    if load >= 4:
        return rows * numbers * size / load / 32 * OF_COPY, 0
    each, together, pieces = (OF_EIGHT, HELD_EIGHTS, -(-numbers // EIGHT)) if step == 1 else (OF_HELD, HELD, numbers)
    return rows * pieces / 32 * each, -(-rows * pieces // (32 * WARPS * together))


@dataclass(frozen=True)
class MonarchChunks(OfMonarch):
    """A pass, tiled: blocks of `samples`, `groups` output groups and `columns` of their numbers, `k` input groups at a
    time. `us` is the time predicted, with the pass before."""

    chain: Chain
    dtype: str
    back: bool  # makes the gradient of x, of grad_y
    samples: int
    groups: int
    columns: int
    k: int
    mt: int
    n1: int
    nt: int
    slots: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    units_per_sample = 1
    threads = 32 * WARPS
    reads_prepared = True

    @property
    def blocks_per_sm(self) -> int:
        return 0  # as many as there is work

    @property
    def reads(self) -> str:
        return f"@{GRAD}" if self.back else "state"

    @property
    def writes(self) -> str:
        return "y" if self.back else "state"

    @kept
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Groups and numbers of each that it reads, the same that it makes, and the rank."""
        first, second = self.both
        x, y = (first.outer, first.p), (second.inner, second.q)
        return (*y, *x, self.rank) if self.back else (*x, *y, self.rank)

    @property
    def steps(self) -> dict[str, int]:
        """Where numbers lie: of x and y, in either weight."""
        ins, outs, p, rank = self.both[0].outer, self.both[1].inner, self.both[0].p, self.rank
        row = ins * rank  # of the second weights
        first = {"A": rank * outs * p, "B": p, "R": outs * p, "P": 1}
        second = {"B": self.both[1].q * row, "Q": row, "A": rank, "R": 1}
        if self.back:  # each weight in the other's place
            back = {"A": second["B"], "B": second["A"], "R": second["R"], "P": second["Q"]}
            second = {"B": first["A"], "A": first["B"], "R": first["R"], "Q": first["P"]}
            first = back
        steps = {f"FIRST_{at}": step for at, step in first.items()}
        steps |= {f"SECOND_{at}": step for at, step in second.items()}
        places = (outs, p, 1) if self.back else (1, 1, outs)
        return steps | dict(zip(("X_STEP", "Y_GROUP", "Y_STEP"), places, strict=True))

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def step(self) -> int:
        """The size that one product of the matrix unit sums over."""
        return 16 if self.size == 2 else 8

    @kept
    def padded(self) -> int:
        return round_up(self.sizes[1], self.step)

    @kept
    def depth(self) -> int:
        """Numbers of the state that a chunk's second product sums over, as padded."""
        return round_up(self.k * self.rank, self.step)

    @kept
    def chunks(self) -> int:
        return -(-self.sizes[0] // self.k)

    @kept
    def parts(self) -> int:
        """Parts of the output groups, and of their numbers."""
        return -(-self.sizes[2] // self.groups) * -(-self.sizes[3] // self.columns)

    @property
    def split(self) -> int:
        return self.parts

    @kept
    def rows(self) -> tuple[int, int]:
        """Rows of the first weights that tiles of an input group read, and of the second ones of an output group."""
        return round_up(self.groups * self.rank, 8 * self.n1), round_up(self.columns, 8 * self.nt)

    @kept
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of a chunk's first and second weights."""
        first, second = self.rows
        of_first = ((self.k - 1) * self.groups * self.rank + first) * row_stride(self.padded, self.size)
        return of_first * self.size, self.groups * second * row_stride(self.depth, self.size) * self.size

    @kept
    def x_bytes(self) -> int:
        return self.samples * row_stride(self.k * self.padded, self.size) * self.size

    @kept
    def slot_bytes(self) -> int:
        return self.x_bytes + sum(self.weight_bytes)

    @kept
    def state_bytes(self) -> int:
        return self.groups * self.samples * row_stride(self.depth, self.size) * self.size

    @kept
    def result_bytes(self) -> int:
        return self.samples * self.groups * self.columns * self.size

    @kept
    def shared(self) -> int:
        return max(self.slots * self.slot_bytes + self.state_bytes, self.result_bytes)

    @kept
    def states(self) -> int:
        """Warp tiles of a chunk's states."""
        return self.k * self.samples // (16 * self.mt) * self.rows[0] // (8 * self.n1)

    @kept
    def items(self) -> int:
        """Warp tiles of y."""
        return self.groups * self.samples // (16 * self.mt) * self.rows[1] // (8 * self.nt)

    @kept
    def sums(self) -> int:
        """Registers of a thread that hold sums of y."""
        return -(-self.items // WARPS) * self.mt * self.nt * 4 * (2 if self.size == 8 else 1)

    @kept
    def blocks(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return self.gpu.blocks_at_once(self.shared, self.threads * self.registers, MOST_TOGETHER)

    @kept
    def registers(self) -> int:
        """Registers of a thread, about."""
        return self.sums + max(registers(self.dtype, self.mt, n) for n in (self.n1, self.nt))

    @property
    def load(self) -> int:
        """Bytes of an access to x."""
        return load_of(self.sizes[1], self.steps["X_STEP"], self.size)

    @kept
    def runs(self) -> tuple[int, int]:
        """Elements of y side by side that a block makes, and from one run to the next."""
        _, _, groups, q, _ = self.sizes
        return (self.groups, groups) if self.steps["Y_STEP"] > 1 else (self.columns, q)

    @property
    def store(self) -> int:
        return math.gcd(16, *(n * self.size for n in self.runs))

    @property
    def output_bytes(self) -> int:
        return self.sizes[2] * self.sizes[3] * self.size

    @property
    def passes(self) -> tuple[Pass, ...]:
        return MonarchChunkWeights(self), self

    @kept
    def chunk_work(self) -> tuple[float, float, float]:
        """Both products of a chunk: microseconds of the matrix unit, bytes of shared memory, instructions of warps."""
        size, dtype = self.size, self.dtype
        of_a, of_b, of_product = INSTRUCTIONS[dtype]
        states, items = self.states, self.items
        of_states, of_items = -(-states // WARPS) * WARPS, -(-items // WARPS) * WARPS
        first, second = self.padded, self.depth
        multiply = 2 * 128 * self.mt * (of_states * self.n1 * first + of_items * self.nt * second)
        rows, width = 16 * self.mt, self.step
        stored = states * self.mt * self.n1 * 4  # stores of a warp
        read = (states * (rows + 8 * self.n1) * first + items * (rows + 8 * self.nt) * second) * size
        issue = of_states * (
            first / width * (self.mt * of_a + self.n1 * of_b + self.mt * self.n1 * of_product) + OF_ITEM
        )
        issue += of_items * (
            second / width * (self.mt * of_a + self.nt * of_b + self.mt * self.nt * of_product) + OF_ITEM
        )
        return multiply / self.gpu.flops[dtype], read + stored * 32 * max(4, size), issue + stored * OF_SUM

    @kept
    def ends(self) -> float:
        """Microseconds of a tile's results, on their way through shared memory."""
        gpu, size = self.gpu, self.size
        _, _, b, q, _ = self.sizes
        run, between = self.runs
        made = self.samples * min(self.groups, b) * min(self.columns, q)
        whole = run == between
        sides = 0.0 if whole else 2 * (1 - math.gcd(SECTOR, run * size, between * size) / SECTOR)
        us = (self.items * self.mt * self.nt * 4 * OF_SUM + made * size / self.store / 32 * OF_PIECE) / gpu.instructions
        return us + 2 * made * size / gpu.shared_bytes + made / run * sides * PART_US + made * size / gpu.l2_bytes

    def moved(self, batch: int) -> float:
        """Microseconds of memory."""
        a, p, b, q, _ = self.sizes
        return batch * (a * p + b * q) * self.size / (self.gpu.memory_bytes * self.gpu.sms)

    def us_of(self, batch: int) -> float:
        """Microseconds: of a chunk, what multiprocessors multiply, read, issue and get from L2, side by side; blocks
        that share one wait for each other's."""
        gpu = self.gpu
        multiply, read, issue = self.chunk_work
        fetched, turns = fetching(self.samples * self.k, self.sizes[1], self.steps["X_STEP"], self.size)
        issue += fetched + sum(self.weight_bytes) / 512 * OF_WEIGHT
        issue *= waits_of(WARPS * self.blocks)
        move = (read + self.slot_bytes) / gpu.shared_bytes
        chunk = together(multiply, move, issue / gpu.instructions, self.slot_bytes / gpu.l2_bytes)
        waits = 2 * gpu.rates.sync_us + gpu.rates.wait_us * max(turns, self.slots == 1)
        busy = self.chunks * chunk + self.ends
        alone = (
            self.chunks * max(chunk + waits, gpu.rates.wait_us if self.slots > 1 else 0.0)
            + self.ends
            + 2 * gpu.rates.wait_us
        )
        blocks = -(-batch // self.samples) * self.parts
        full, rest = divmod(blocks, gpu.sms * self.blocks)
        last = -(-rest // gpu.sms)
        us = full * max(self.blocks * busy, alone) + (max(last * busy, alone) if last else 0.0)
        prepared = START_US + self.prepared_bytes / (gpu.l2_bytes * gpu.sms) * 8
        return 2 * gpu.rates.behind_us + prepared + together(us, self.moved(batch))

    title = "monarch by chunks"

    @property
    def details(self) -> str:
        a, p, b, q, r = self.sizes
        what = f"{a} of {p} → {a}×{b} of {r} → {b} of {q}{', of grad_y' if self.back else ''}"
        tiles = f"tiles of {self.samples} samples, {self.groups} groups and {self.columns} columns"
        return f"{what}, {tiles}, {self.slots} slots of {self.k} groups, {16 * self.mt}×{8 * self.n1} and {8 * self.nt}"

    @property
    def told_sizes(self) -> dict[str, int]:
        told = dict(zip("APBQR", self.sizes, strict=True)) | {"WARPS": WARPS, "SAMPLES": self.samples}
        told |= {"CA": self.k, "BB": self.groups, "COLUMNS": self.columns, "JN": self.rows[1] // (8 * self.nt)}
        return told | {"MT": self.mt, "N1": self.n1, "NT": self.nt, "SECONDS": Long(self.seconds_at)}

    @property
    def told_parameters(self) -> dict[str, int]:
        first, second = self.both[:: -1 if self.back else 1]
        return {"FIRST": first.weight, "SECOND": second.weight}

    @property
    def _all_parts(self) -> tuple[int, int]:
        """Chunks of first and second weights that are prepared."""
        groups = -(-self.sizes[2] // self.groups)
        return groups * self.chunks, self.parts * self.chunks

    @property
    def seconds_at(self) -> int:
        return self._all_parts[0] * self.weight_bytes[0]

    @property
    def prepared_bytes(self) -> int:
        return self.seconds_at + self._all_parts[1] * self.weight_bytes[1]

    @property
    def told(self) -> list[str]:
        chain = self.chain
        numbers = self.told_sizes | {at: Long(self.steps[at]) for at in ("X_STEP", "Y_GROUP", "Y_STEP")}
        numbers |= {"LOAD": self.load, "STORE": self.store, "SLOTS": self.slots, "BIAS": chain.bias}
        return [*kinds(self.dtype), activation_type(chain.activation, self.dtype, 2), *constants(numbers)]


@dataclass(frozen=True)
class MonarchChunkWeights(Preparing):
    """The pass that puts both weights in order."""

    of: MonarchChunks

    threads = 256
    shared = 0
    us = 0.0  # counted by the pass behind it
    starts = True

    @property
    def prepared_bytes(self) -> int:
        return self.of.prepared_bytes

    @property
    def split(self) -> int:
        return max(1, min(self.prepared_bytes // (self.of.size * 8 * self.threads), 4 * self.of.gpu.sms))

    def __str__(self) -> str:
        return f"monarch weights by chunks: {self.prepared_bytes} bytes"

    @property
    def told(self) -> list[str]:
        numbers = self.of.told_sizes | self.of.told_parameters | {"THREADS": self.threads}
        numbers |= {at: Long(step) for at, step in self.of.steps.items() if at.startswith(("FIRST", "SECOND"))}
        return [*kinds(self.of.dtype), *constants(numbers)]


@dataclass(frozen=True)
class MonarchKept(MonarchChunks):
    """A pass whose blocks keep the weights of some output groups and columns, and take tile after tile."""

    reads_prepared = False
    title = "monarch with weights kept"

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self,)

    @property
    def blocks_per_sm(self) -> int:
        return self.blocks

    @kept
    def shared(self) -> int:
        return self.slot_bytes + self.state_bytes + self.result_bytes

    @property
    def weight_rows(self) -> tuple[tuple[int, int, int], ...]:
        """Rows of either weight that a block has, their numbers, and the steps between these."""
        a, p, b, q, _ = self.sizes
        first, second = (self.k * self.groups * self.rank, p), (self.groups * self.columns, a * self.rank)
        return (*first, b * self.rank if self.back else 1), (*second, q if self.back else 1)

    def us_of(self, batch: int) -> float:
        """Microseconds: of its weights, which a block waits for once, and of tiles, whose x comes while the tile before
        is used."""
        gpu, size = self.gpu, self.size
        tiles = -(-batch // self.samples)
        beside = max(1, min(self.blocks, -(-tiles * self.parts // gpu.sms)))  # blocks of a multiprocessor
        multiply, read, issue = self.chunk_work
        fetched, _ = fetching(self.samples * self.k, self.sizes[1], self.steps["X_STEP"], size)
        issue = (issue + fetched) * waits_of(WARPS * beside) / gpu.instructions
        tile = together(multiply, (read + self.x_bytes) / gpu.shared_bytes, issue, self.x_bytes / gpu.l2_bytes)
        tile += self.ends
        weights = [fetching(*rows, size) for rows in self.weight_rows]
        begin = sum(each for each, _ in weights) * waits_of(WARPS * beside) / gpu.instructions
        begin = beside * (begin + sum(self.weight_bytes) / gpu.l2_bytes)
        begin += KEPT_US + AGAIN_US * sum(again for _, again in weights)
        grid = max(1, min(tiles, gpu.sms * self.blocks // self.parts))
        alone = -(-tiles // grid) * (tile + 3 * gpu.rates.sync_us)
        us = max(-(-tiles * self.parts // gpu.sms) * tile, alone)
        return gpu.rates.behind_us + begin + together(us, self.moved(batch))

    @property
    def told(self) -> list[str]:
        loads = [load_of(length, step, self.size) for _, length, step in self.weight_rows]
        numbers = self.told_parameters | dict(zip(("FIRST_LOAD", "SECOND_LOAD"), loads, strict=True))
        numbers["TURNED"] = self.back
        return [*super().told, *constants(numbers)]


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchChunks | None:
    """The fastest tiling forward by prediction; None if this is no chain for it."""
    return _tile(chain, dtype, False, batch, gpu) if takes_forward(chain) and not chain.x_turned else None


def tile_back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchChunks | None:
    """The same of x's gradient."""
    return _tile(replace(chain, backward=False), dtype, True, batch, gpu)


@functools.lru_cache(256)
def _tile(chain: Chain, dtype: str, back: bool, batch: int, gpu: Gpu) -> MonarchChunks | None:
    return fastest(_tilings(chain, dtype, back, batch, gpu), batch)


def _tilings(chain: Chain, dtype: str, back: bool, batch: int, gpu: Gpu) -> Iterator[MonarchChunks]:
    first, second = chain.contractions
    rank, size = first.q // second.inner, ELEMENT_BYTES[dtype]
    (a, b, q) = (second.inner, first.outer, first.p) if back else (first.outer, second.inner, second.q)
    step = 16 if size == 2 else 8
    fields = chain, dtype, back
    ways = itertools.product((16, 32, 64, 128), _shares(b), _shares(q), _depths(a, rank, step))
    for samples, groups, columns, k in ways:
        if samples >= 2 * max(16, batch):
            continue
        n1 = min(-(-groups * rank // 8), MOST_ACROSS // (2 if size == 8 else 1))
        if (warp_tile := _warp_tile(samples, groups, columns, n1, dtype)) is None:
            continue
        mt, nt = warp_tile
        tiling = *fields, samples, groups, columns, k, mt, n1, nt
        kind = MonarchKept if k == a else MonarchChunks
        plan = kind(*tiling, 2 if k < a else 1, batch, gpu)
        if plan.shared > gpu.shared:
            plan = MonarchChunks(*tiling, 1, batch, gpu)
        if plan.shared <= gpu.shared and plan.split <= MOST_BLOCKS and plan.prepared_bytes <= MOST_PREPARED:
            yield plan


@functools.lru_cache(4096)
def _warp_tile(samples: int, groups: int, columns: int, n1: int, dtype: str) -> tuple[int, int] | None:
    """Tiles of 16 rows and of 8 columns of y that a warp has at once, by which all warps read least; None where
    registers do not hold the sums."""
    words, tiles = 2 if dtype == "float64" else 1, -(-columns // 8)
    found = []
    for mt, most in itertools.product((1, 2, 4), (8, 4, 2, 1)):
        nt = min(tiles, most)
        each = -(-groups * (samples // (16 * mt)) * -(-tiles // nt) // WARPS)
        sums = words * 4 * each * mt * nt
        made = max(registers(dtype, mt, n) for n in (n1, nt))
        if samples % (16 * mt) == 0 and sums <= MOST_SUMS and sums + made <= MOST_REGISTERS:
            found.append((each * (16 * mt + 8 * nt), mt, nt))
    return min(found)[1:] if found else None


def _shares(n: int) -> list[int]:
    """Parts of so many groups or columns: whole, halves and so on, most of them whole eights."""
    found = {n} | {-(-n // parts) for parts in (2, 3, 4, 6, 8)} | {8 * m for m in (1, 2, 4) if 8 * m < n}
    return sorted(found)


def _depths(a: int, rank: int, step: int) -> list[int]:
    """Input groups of a chunk: those that leave least padding, of few and of many."""
    ways = [k for k in range(1, min(a, max(1, MOST_CHUNK // rank)) + 1)]
    waste = {k: round_up(k * rank, step) * -(-a // k) for k in ways}
    bounds = (step, 2 * step, 4 * step, MOST_CHUNK)
    found = [
        min((k for k in ways if k * rank <= bound), key=lambda k: (waste[k], -k), default=ways[0]) for bound in bounds
    ]
    return sorted(set(found))
