"""Passes of dense layers one behind another, their weights streamed: what dense_streamed.cuh is told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from factorlayer.activations.functions import of_value
from factorlayer.device.code import constants, function
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_TENSORS, Preparing, fastest
from factorlayer.kernels.product.streamed import LOADED_US, PART_US
from factorlayer.kernels.stack.dense import FUNCTIONS, Dense, beside
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

WIDEST = 256  # sums of a row that a warpgroup holds at once
MOST_SLOTS, LEAST_SLOTS = 8, 3
# Fitted to 352 passes of drawn layers and blocks and of the registry's on one H200, of which 89 % are within 30 %: a
# start, and what each round of tiles waits; of the shorter one of a round's work and its traffic, what the other one
# does not hide; what each layer waits; of a chunk that comes through registers, a wait, and bytes of it in a
# microsecond; of one that lies in memory, until it is there; of x's slabs that come through registers, and of parts of
# sectors, what nothing hides; times what shared memory takes at its rate; instructions for a sum
START_US, ROUND_US = 1.3, 0.5
BESIDE = 0.45
LAYER_US = 0.15
CHUNK_US, CHUNK_BYTES = 0.024, 70e3
PREPARED_US = 0.77
LOADED_SHARE, PARTS_SHARE = 0.17, 0.52
SHARED = 1.19
INSTRUCTIONS = 5
REGISTERS = 216, 72  # of threads who multiply and who copy, where 3 warpgroups share them


class Columns(NamedTuple):
    """Columns of a layer: k's in whole steps; sums by chunk, by chunks side by side, and how often."""

    k: int
    n: int
    parts: int
    passes: int
    slabs: int  # of a chunk

    @property
    def all(self) -> int:
        return self.n * self.parts * self.passes


@dataclass(frozen=True)
class DenseStreamed(Dense):
    """A pass, tiled. A chunk of a weight has at most `rows` of it. If weights are `frozen`, chunks are made once."""

    rows: int = WIDEST
    frozen: bool = False
    begin: int = 0  # bytes of what another pass has prepared before
    apart: int = 0  # parameters between a weight and its bias
    scaled_at: int = -1  # bytes before what a prepared weight is scaled by, if it is

    @property
    def slab(self) -> int:
        """k's of a slab."""
        return 4 * self.step

    @kept
    def shapes(self) -> tuple[Columns, ...]:
        """The shape of each layer. As many rows as the largest chunk has are filled by several slabs of smaller
        ones."""
        found = [self._shape(i) for i in range(len(self.sizes))]
        rows = max(c.n for c in found)
        return tuple(c._replace(slabs=max(1, min(-(-c.k // self.slab), rows // c.n))) for c in found)

    def _shape(self, i: int) -> Columns:
        p, q = self.sizes[i]
        is_last = i == len(self.sizes) - 1
        unit = 32 if is_last and self.size == 2 else 16  # whose columns are dealt
        passes = -(-q // WIDEST)
        columns = round_up(-(-q // passes), self.slab) if passes > 1 else round_up(q, unit)
        parts = -(-columns // self.rows)
        return Columns(round_up(p, self.step), round_up(-(-columns // parts), unit), parts, passes, 1)

    def columns(self, i: int) -> tuple[int, int]:
        return self.shapes[i].k, self.shapes[i].n

    @kept
    def state_places(self) -> tuple[int, ...]:
        """Where x and what each layer but the last one makes begin in a warpgroup's bytes, and where all end. x has a
        place of its own; what is made in several passes may not lie where they read, all else does."""
        at = behind_x = end = self._state_bytes(self.shapes[0].k)
        found, held = [0], 0
        for i, shape in enumerate(self.shapes[:-1]):
            size = self._state_bytes(shape.all)
            if i and shape.passes > 1:
                at = behind_x if at - behind_x >= size else at + held
            found.append(at)
            held, end = size, max(end, at + size)
        return (*found, end)

    def _state_bytes(self, features: int) -> int:
        return -(-features // self.slab) * 8192

    @property
    def slot_rows(self) -> int:
        """Rows of 128 bytes of a slot."""
        return max(c.n * c.slabs for c in self.shapes)

    @property
    def chunks(self) -> list[int]:
        """Chunks of each layer."""
        return [c.passes * c.parts * -(-c.k // (c.slabs * self.slab)) for c in self.shapes]

    @property
    def bias_bytes(self) -> int:
        return sum(4 * c.all for c, chain in zip(self.shapes, self.layers, strict=True) if chain.bias)

    @property
    def rest_bytes(self) -> int:
        """Bytes of shared memory beside the slots: states, biases, results and x's barriers."""
        return self.groups * self.state_places[-1] + self.bias_bytes + self.results_bytes + 16

    @kept
    def results_bytes(self) -> int:
        """Bytes of shared memory for results whose rows 16 bytes do not divide, if there is room: from there they leave
        by whole sectors."""
        row = self.sizes[-1][1] * self.size
        bytes_, rest = 64 * self.groups * row, self.groups * self.state_places[-1] + self.bias_bytes + 16
        left = self.gpu.shared - rest - bytes_
        fits = row % 16 and self.shapes[-1].passes == 1 and left >= LEAST_SLOTS * (128 * self.slot_rows + 16)
        return bytes_ if fits else 0

    @kept
    def chunk_places(self) -> tuple[int, ...]:
        """Bytes of memory at which each layer's chunks begin, if they are put there, and at which they end."""
        slabs = (c.passes * c.parts * -(-c.k // self.slab) for c in self.shapes)
        sizes = (128 * c.n * count for c, count in zip(self.shapes, slabs, strict=True))
        return tuple(itertools.accumulate(sizes, initial=self.begin))

    @property
    def reads_prepared(self) -> bool:
        return len(self.passes) > 1

    @property
    def passes(self) -> tuple[Dense | WeightChunks, ...]:
        return (WeightChunks(self), self) if self.in_chunks else (self,)

    def behind_weight(self, begin: int, scaled_at: int, weights: int) -> DenseStreamed:
        """The bias is the parameter behind these weights."""
        return replace(self, begin=begin, apart=weights - 1, scaled_at=scaled_at)

    @property
    def in_chunks(self) -> bool:
        """Whether weights lie in memory as slots hold them, put there by the pass before."""
        return self.frozen or self.size == 4

    @property
    def follows(self) -> bool:
        """Whether that pass runs each time, so that this one can start meanwhile."""
        return self.in_chunks and not self.frozen

    @kept
    def slots(self) -> int:
        return min(MOST_SLOTS, (self.gpu.shared - self.rest_bytes) // (128 * self.slot_rows + 16))

    @property
    def shared(self) -> int:
        return self.slots * (128 * self.slot_rows + 16) + self.rest_bytes

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def us_of(self, batch: int) -> float:
        tiles, rows = math.ceil(batch / 64), min(64, batch)
        groups = min(self.groups, math.ceil(tiles / self.gpu.sms))  # with tiles
        load = products = read = 0.0
        for (p, _), c, chunks in zip(self.sizes, self.shapes, self.chunks, strict=True):
            columns, chunk = c.all, 128 * c.n * c.slabs
            if self.in_chunks:
                load += chunks * max(chunk / 100e3, PREPARED_US / (self.slots - 1))
            else:
                widest = max(w for w in (2, 4, 8, 16, 32, 128) if p * self.size % w == 0)
                whole = {2: 4.0, 4: 3.0, 8: 2.0, 16: 2.1, 32: 1.4, 128: 1.0}[widest]
                load += chunks * whole * (CHUNK_US + chunk / CHUNK_BYTES)
            products += 2.3 * columns * c.k / self.slab / self.gpu.rates.cycles
            read += 128 * c.k / self.slab * (columns * (groups + 1) + 64 * groups * c.parts * c.passes)
        layers = list(zip(self.shapes, self.layers, strict=True))
        counted = sum(c.all * of_value(chain.activation) for c, chain in layers)
        sums = 64 * sum(c.all for c, _ in layers) * INSTRUCTIONS / 32 / self.gpu.instructions
        sums += FUNCTIONS[self.dtype] * 64 * counted / self.gpu.rates.special_functions
        alone = products + sums + LAYER_US * len(layers)
        states = rows * self.size * sum(q for _, q in self.sizes[:-1]) if self.states else 0
        shared = SHARED * (read + groups * states) / 128 / self.gpu.rates.cycles
        if not self.in_chunks and self.sizes[0][0] * self.size % 4:  # x comes through registers
            load += LOADED_SHARE * groups * math.ceil(self.shapes[0].k / self.slab) * LOADED_US
        busy = max(load, groups * (products + sums), alone, shared)
        memory = groups * max(self.rows_us(rows), PARTS_SHARE * _parts_us(self, rows))
        each = beside(BESIDE, busy, memory) + ROUND_US
        return START_US + self.layers_us + math.ceil(tiles / (self.gpu.sms * groups)) * each

    title = "dense layers, weights streamed"

    @property
    def details(self) -> str:
        return f"{self.made}, {self.groups} warpgroups, {self.slots} slots of {self.slot_rows} rows"

    @property
    def taken(self) -> tuple[int, ...]:
        return ()  # rows pass through shared memory anyhow

    @property
    def stored(self) -> tuple[int, ...]:
        return ()

    def loading(self) -> list[str]:
        return [f"c.template load_layer<L{i}>();" for i in range(len(self.layers))]

    def struct(self, i: int) -> dict[str, int | bool | str]:
        (p, q), c, last = self.sizes[i], self.shapes[i], len(self.layers) - 1
        weight = self.first(i)
        biases = sum(4 * c.all for c, chain in zip(self.shapes[:i], self.layers, strict=False) if chain.bias)
        told: dict[str, int | bool | str] = {"P": p, "Q": q, "K": c.k, "N": c.n, "PARTS": c.parts, "PASSES": c.passes}
        told |= {"SLABS": c.slabs, "WEIGHT": weight, "BIAS": weight + 1 + self.apart if self.layers[i].bias else -1}
        told |= {"FIRST": i == 0, "LAST": i == last, "IN_PLACE": i > 0 and c.passes == 1}
        told["STATE"] = self.tensors + i - 1 if self.states and i else -1
        told |= {"from": self.state_places[i], "to": self.state_places[i + 1] if i < last else 0}
        return told | {"bias_at": self._biases_at + biases, "chunks_at": self.chunk_places[i]}

    @property
    def _biases_at(self) -> int:
        return self.slots * 128 * self.slot_rows + self.groups * self.state_places[-1]

    @property
    def widths(self) -> set[int]:
        return {c.n for c in self.shapes}

    @property
    def waits(self) -> bool:
        return not self.follows

    @property
    def told(self) -> list[str]:
        more, fewer = REGISTERS if self.groups > 1 else (0, 0)
        numbers = {"SLOTS": self.slots, "SLOT_ROWS": self.slot_rows, "CHUNKS": sum(self.chunks)}
        numbers |= {"IN_CHUNKS": int(self.in_chunks), "CHUNKS_BEFORE": int(self.follows)}
        numbers |= {"STATE_BYTES": self.state_places[-1], "states_at": self.slots * 128 * self.slot_rows}
        numbers |= {"MORE": more, "FEWER": fewer, "SCALED": self.scaled_at // 4}
        results_at = self._biases_at + self.bias_bytes
        numbers |= {"results_at": results_at, "barriers_at": results_at + self.results_bytes}
        numbers |= {"RESULTS": int(self.results_bytes > 0)}
        body = function(
            "layers(const C& c, typename C::Cursor& cursor, int round)", self._calls("layer", "cursor, round")
        )
        body += function("weights(const C& c, typename C::Cursor& cursor)", self._calls("stream", "cursor"))
        return self.told_layers(constants(numbers)) + body

    def _calls(self, what: str, given: str) -> list[str]:
        """Calls for each layer, and, in a loop, which is shorter by their code, for those that are all alike."""
        alike = [
            (
                chain.bias,
                chain.activation,
                *(told[key] for key in told if key not in ("WEIGHT", "BIAS", "STATE", "bias_at", "chunks_at")),
            )
            for chain, told in zip(self.layers, map(self.struct, range(len(self.layers))), strict=True)
        ]
        calls, begin = [], 0
        for _, run in itertools.groupby(alike):
            count = len(list(run))
            call = f"c.template {what}<L{begin}>({given}"
            if count > 1:
                calls += ["#pragma unroll 1", f"for (int i = 0; i < {count}; ++i) {call}, i);"]
            else:
                calls += [f"{call});"]
            begin += count
        return calls


@dataclass(frozen=True)
class WeightChunks(Preparing):
    """A pass that puts weights as the slots of the one behind it hold them: weight_chunks.cuh."""

    of: DenseStreamed

    header = "weight_chunks"
    shared = 0
    threads = 512

    @property
    def prepared_at(self) -> int:
        return self.of.begin

    @property
    def prepared_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.of.chunk_places[-1] - self.prepared_at

    @property
    def split(self) -> int:
        return min(-(-self.prepared_bytes // (16 * self.threads)), self.of.gpu.sms)

    @property
    def us(self) -> float:
        return 1.2 + self.prepared_bytes / 1e6

    def __str__(self) -> str:
        return f"weights as slots hold them: {self.prepared_bytes} bytes"

    @property
    def told(self) -> list[str]:
        calls = [f"c.template layer<L{i}>();" for i in range(len(self.of.layers))]
        lines = self.of.told_layers(constants({"THREADS": self.threads}))
        return lines + function("weights(const C& c)", calls)


def tile(
    layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False, frozen: bool = False
) -> DenseStreamed | None:
    """The fastest tiling by prediction; None where this family has no kernel."""
    return fastest(tilings(layers, dtype, batch, gpu, states, frozen), batch)


def tilings(
    layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False, frozen: bool = False
) -> Iterator[DenseStreamed]:
    if not gpu.wgmma or dtype not in ("bfloat16", "float16", "tf32"):
        return
    if any(not chain.is_dense or chain.parameters for chain in layers):
        return
    if sum(1 + chain.bias + states for chain in layers) > MOST_TENSORS:
        return
    for groups, rows in itertools.product((2, 1), (256, 128, 64)):
        plan = DenseStreamed(tuple(layers), dtype, groups, gpu, states=states, rows=rows, frozen=frozen)
        if plan.slots >= LEAST_SLOTS:
            yield plan


def _parts_us(plan: DenseStreamed, rows: int) -> float:
    """Of a warpgroup's stores of so many rows to sectors of L2 that they do not fill: where 16 bytes do not divide y's
    rows, four lanes have 64 bytes, and store all their first pieces, which touch two or three sectors, then all their
    second ones; where 16 bytes do, and 32 do not, these 64 bytes begin and end within sectors, whose rest comes
    next."""
    row = plan.sizes[-1][1] * plan.size
    piece = math.gcd(row, 32)
    if piece == 32 or plan.results_bytes:
        return 0.0
    return rows * row / 64 * (1 if piece == 16 else 2.5 * 16 / piece) * PART_US
