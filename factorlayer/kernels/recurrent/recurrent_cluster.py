"""A gated recurrent unit of two Kronecker factors, whose state a cluster of blocks shares out, forward and back: what
recurrent_cluster.cuh and recurrent_cluster_backward.cuh are told, and what they take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from factorlayer.device.code import Told, constants, function, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.recurrent.recurrent import (
    FUNCTIONS,
    NUMBER_BYTES,
    OF_CHAIN,
    OF_INSTRUCTION,
    OF_PRODUCT,
    OF_STEP,
    OF_TWO,
    OF_TWO_BACK,
    OF_TWO_SUMS,
    REGISTERS,
    SLOTS,
    STEPS,
    STREAMS,
    AllSteps,
)
from factorlayer.kernels.recurrent.sides import Side
from factorlayer.kernels.stages import INSTRUCTIONS, row_step
from factorlayer.kernels.work import round_up
from factorlayer.maths.recurrence import GATES, Recurrence

MOST_BLOCKS, POWERS = 8, (2, 4, 8)  # of a cluster, as any GPU with clusters has
SEQUENCES = (1, 2, 4, 8)  # of a cluster
SHARES = (1, 2, 4)  # 8 columns of a warp at once
MOST_WARPS = 16
QUARTERS = 4  # of a multiprocessor, which have registers and a matrix unit of their own
MOST_REGISTERS = 255  # of a thread
OF_ODD = 28  # of a thread, about, where some numbers of a tile are not there
ROOM = 15 / 16  # of the multiprocessors, that large clusters fit into
RESERVED = 1024  # bytes of shared memory that every block has beside its own
# From what a block has made to what another one reads of it, and bytes in a microsecond that a multiprocessor hands on,
# measured on an H200 with clusters of 2, 4 and 8 blocks
HANDED_ON_US, HANDED_ON_BYTES = 0.11, 37000
SIDES = "Rows", "Columns"  # as kernels name them
HELD = (True, True), (True, False), (False, True), (False, False)  # weights of which factor stay in registers


@dataclass(frozen=True)
class RecurrentCluster(AllSteps):
    """A pass, tiled, whose `units` are sequences of a cluster. `held` says of each side whether its weights stay in
    registers."""

    recurrence: Recurrence
    dtype: str
    cluster: int
    units: int
    shares: tuple[int, int]  # 8 columns of a warp at once, by rows and by columns
    held: tuple[bool, bool]
    slots: int
    gpu: Gpu
    us: float = 0.0

    blocks_per_sm = 0
    title = "recurrent, in clusters"
    states = 1  # that a step begins with
    streams, written_each_step = GATES, 1  # tensors with a row for each step

    @property
    def split(self) -> int:
        return self.cluster

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Own rows, and own columns."""
        columns, rows = (c.p for c in self.recurrence.chain.contractions)
        by_rows, by_columns = self.shares
        return (
            Side(columns, rows, self.cluster, self.units, True, by_rows, self.dtype),
            Side(rows, columns, self.cluster, self.units, False, by_columns, self.dtype),
        )

    @property
    def warps(self) -> int:
        return max(side.tiles for side in self.sides)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    other_registers, of_columns = 48, 40  # of a thread, about, beside weights, and for every 8 columns

    @property
    def registers(self) -> int:
        held = sum(side.held_registers for side, stays in zip(self.sides, self.held, strict=True) if stays)
        odd = OF_ODD * any(side.is_odd for side in self.sides)
        return held + odd + self.other_registers + self.of_columns * max(self.shares) * max(1, self.size // 4)

    @property
    def most_registers(self) -> int:
        """A quarter's, of all its warps."""
        return min(MOST_REGISTERS, REGISTERS // QUARTERS // 32 // -(-self.warps // QUARTERS))

    # Shared memory: where rows lie, barriers, weights, what is kept of states, inputs of some steps

    @property
    def barriers_at(self) -> int:
        return 2 * self.slots * self.units * NUMBER_BYTES

    @property
    def rows_bytes(self) -> int:
        return round_up(self.barriers_at + 2 * NUMBER_BYTES, 128)

    @property
    def weight_bytes(self) -> int:
        """Of weights that do not stay in registers. The others lie behind them, until these have them."""
        return sum(side.weight_bytes for side, stays in zip(self.sides, self.held, strict=True) if not stays)

    def _weight_at(self, i: int) -> int:
        before = sum(self.sides[j].weight_bytes for j in range(i) if self.held[j] == self.held[i])
        return before + (self.weight_bytes if self.held[i] else 0)

    @cached_property
    def places(self) -> list[int]:
        """Bytes at which each side's states begin, what is handed on, what is kept, what leaves; and behind all."""
        sizes = [
            size
            for side in self.sides
            for size in (self.states * side.state_bytes, GATES * side.gathered_bytes, side.kept_bytes, self._out_bytes)
        ]
        return [0, *itertools.accumulate(sizes)]

    @property
    def _out_bytes(self) -> int:
        """Of 16 bits what leaves lies as what comes."""
        return self.written_each_step * self.stream_bytes if self.size == 2 else 0

    @property
    def stream_bytes(self) -> int:
        return max(side.stream_bytes for side in self.sides)

    @property
    def streams_at(self) -> int:
        return self.rows_bytes + self.weight_bytes + self.places[-1]

    @property
    def shared(self) -> int:
        loaded = self.rows_bytes + sum(side.weight_bytes for side in self.sides)
        return max(loaded, self.streams_at + self.slots * self.streams * self.stream_bytes)

    @property
    def details(self) -> str:
        each = f"{self.units} sequences" if self.units > 1 else "one sequence"
        held = {0: "no weights", 1: "weights of one factor", 2: "weights"}[sum(self.held)]
        return (
            f"{each} a cluster of {self.cluster} blocks, {self.warps} warps, {held} in registers, "
            f"inputs {self.slots} steps ahead"
        )

    # Time

    def us_of(self, batch: int) -> float:
        """Where there are more clusters than places for them, two blocks may share a multiprocessor."""
        clusters = -(-batch // self.units)
        places = int(self.gpu.sms * ROOM) // self.cluster
        ways = range(1, max(1, min(self.beside_others, -(-clusters // places))) + 1)
        return STEPS * min(self._step_us(each) * -(-clusters // (places * each)) for each in ways)

    @property
    def beside_others(self) -> int:
        """Blocks that a multiprocessor has room for."""
        of_warp = 32 * round_up(min(self.registers, MOST_REGISTERS), 8)
        by_registers = REGISTERS // (of_warp * round_up(self.warps, QUARTERS))
        return min(by_registers, (self.gpu.shared + RESERVED) // (self.shared + RESERVED))

    @property
    def step_us(self) -> float:
        return self._step_us(1)

    def _step_us(self, blocks: int) -> float:
        """Microseconds of a step, which ends on either side in turn, with so many blocks on a multiprocessor."""
        first = [self._contraction_us(i, self.states, blocks) for i in (0, 1)]
        last = [self._contraction_us(i, GATES, blocks) + self._gates_us(i, blocks) for i in (0, 1)]
        of_feature = GATES * self.size + self.sides[0].real
        handed_on = blocks * self.units * max(side.own * side.whole for side in self.sides) * of_feature
        exchange = HANDED_ON_US + handed_on / HANDED_ON_BYTES
        return sum(first + last) / 2 + exchange + OF_STEP / self.gpu.rates.cycles

    def _contraction_us(self, i: int, states: int, blocks: int) -> float:
        """Of all gates, for so many states."""
        side, gpu = self.sides[i], self.gpu
        wide = 16 if self.size == 2 else 8
        steps = -(-side.whole // wide)
        of_a, of_b, of_product = INSTRUCTIONS[self.dtype]
        of_a = 0 if self.held[i] else of_a
        each = steps * (GATES * of_a + side.nt * (states * of_b + GATES * of_product)) + side.nt * GATES * OF_TWO_SUMS
        rate = gpu.flops[self.dtype] / (2 if wide == 16 else 1)  # a table has those of warpgroups
        multiply = 2 * round_up(side.tiles, QUARTERS) * GATES * side.nt * 128 * steps * wide / rate
        read = GATES * (0 if self.held[i] else 16) + states * 8 * side.nt  # rows of weights and columns of a tile
        busy = max(
            multiply,
            side.tiles * read * steps * wide * self.size / gpu.shared_bytes,
            side.tiles * each / gpu.instructions,
        )
        waits = (steps * OF_PRODUCT + each * OF_INSTRUCTION) / gpu.rates.cycles
        return max(waits, blocks * busy)

    of_two, functions_of_feature = OF_TWO, FUNCTIONS

    def _gates_us(self, i: int, blocks: int) -> float:
        side, gpu = self.sides[i], self.gpu
        functions = self.units * side.own * side.whole * self.functions_of_feature / gpu.rates.special_functions
        instructions = 2 * side.nt * self.of_two
        waits = instructions * OF_INSTRUCTION / gpu.rates.cycles
        return max(blocks * functions, waits, blocks * side.tiles * instructions / gpu.instructions)

    # What its kernel is told

    def _side(self, name: str, i: int) -> str:
        side, places = self.sides[i], self.places[4 * i :]
        size = [side.whole, side.other, side.own, self.units, str(side.by_rows).lower(), side.nt]
        told: Told = {"HELD": self.held[i], "W_STRIDE": row_step(side.whole, self.dtype)}
        told |= {"WEIGHT": self._weight_at(i)}
        told |= {"STATE_STEP": side.state_step, "STREAM_ROW": side.stream_row}
        told |= {"STATE_AT": places[0], "GATHERED_AT": places[1], "KEPT_AT": places[2], "OUT_AT": places[3]}
        told |= {"BARRIER_AT": self.barriers_at + i * NUMBER_BYTES}
        told |= {"kStateBytes": side.state_bytes, "kGatheredBytes": side.gathered_bytes}
        return f"struct {name} : Side<{', '.join(map(str, size))}> {{ {' '.join(constants(told))} }};"

    @property
    def told(self) -> list[str]:
        told = OF_CHAIN | self.of_steps | {"WARPS": self.warps, "UNITS": self.units, "SLOTS": self.slots}
        told |= {"HIDDEN": self.recurrence.hidden, "STREAMS": self.streams, "OUTPUTS": self.written_each_step}
        told |= {"kBarrierBytes": self.rows_bytes, "kRowsAt": 0, "kWeightBytes": self.weight_bytes}
        told |= {"kGroupBytes": self.places[-1], "kStreamsAt": self.streams_at, "kStreamBytes": self.stream_bytes}
        told |= {"kSlotBytes": self.streams * self.stream_bytes, "FirstStage": "void"}
        told |= {"Output": f"Region<1, {self.recurrence.hidden}, 1, 1, 0, 1>"}
        sides = [self._side(name, i) for i, name in enumerate(SIDES)]
        return [*kinds(self.dtype), *constants(told), *sides, *self.functions, *self.loading]

    @property
    def loading(self) -> list[str]:
        calls = [f"for (int gate = 0; gate < {GATES}; ++gate) {{"]
        for name, side, c in zip(SIDES, self.sides, self.recurrence.chain.contractions, strict=True):
            weight = f"c.params.weights[gate * {self.recurrence.weights} + {c.weight}]"
            calls.append(f"  auto {name}_weight = static_cast<const Element*>({weight});")
            if self.back:
                at = f"[&](int q, int p) {{ return {name}_weight[p * {side.whole} + q]; }}"
                calls.append(f"  c.template make_weight<{name}, true>(gate, {at});")
            else:
                calls.append(f"  c.template load_weight<{name}>(gate, {name}_weight);")
        return function("load_weights(const C& c)", [*calls, "}"])


@dataclass(frozen=True)
class RecurrentClusterBackward(RecurrentCluster):
    """A pass, tiled, by slopes. What is multiplied at a step are three states, those of the gates' gradients."""

    header, title = "recurrent_cluster_backward", "recurrent, in clusters, backward"
    back = True
    states, streams, written_each_step = GATES, STREAMS, GATES + 1
    other_registers, of_columns = 72, 52
    of_two, functions_of_feature = OF_TWO_BACK, 0


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu, back: bool = False) -> RecurrentCluster | None:
    family = RecurrentClusterBackward if back else RecurrentCluster
    return fastest(tilings(family, recurrence, dtype, batch, gpu), batch)


Tiled = TypeVar("Tiled", bound=RecurrentCluster)


def tilings(family: type[Tiled], recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> Iterator[Tiled]:
    chain = recurrence.chain
    if chain.parameters or recurrence.reset != "after" or any(c.p != c.q or not c.tied for c in chain.contractions):
        return
    sizes = tuple(c.p for c in chain.contractions)
    if any(size % 2 for size in sizes):  # states are handed on in pairs, along rows and along columns
        return
    # Where blocks have whole eights, operands and lines are whole.
    whole = tuple(n for n in range(2, MOST_BLOCKS + 1) if not any(size % (8 * n) for size in sizes))
    found = False
    for plan in _tilings_of(family, recurrence, dtype, batch, gpu, whole):
        found = True
        yield plan
    if not found:
        yield from _tilings_of(family, recurrence, dtype, batch, gpu, POWERS)


def _tilings_of(
    family: type[Tiled], recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu, clusters: tuple[int, ...]
) -> Iterator[Tiled]:
    for cluster, units, by_rows, by_columns in itertools.product(clusters, SEQUENCES, SHARES, SHARES):
        if units > 1 and units >= 2 * batch:
            continue
        for held, slots in itertools.product(HELD[-1:] if dtype in ("float32", "float64") else HELD, SLOTS):
            plan = family(recurrence, dtype, cluster, units, (by_rows, by_columns), held, slots, gpu)
            if any((cluster - 1) * side.own >= side.other for side in plan.sides) or plan.warps > MOST_WARPS:
                break  # nor any other way to hold weights
            if plan.shared <= gpu.shared and plan.registers <= plan.most_registers:
                yield plan
                break
