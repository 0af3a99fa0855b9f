"""Resident passes of dense layers one behind another, as chain.cuh is told them: stages by rows, each with a bias and
an activation of its own.

Weights and biases stay in shared memory, and so do states between layers, whose features are padded with zeros to what
the matrix unit takes. Any dtype, any GPU; what Hopper's own families take, they keep.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from factorlayer.activations.functions import of_value
from factorlayer.activations.written import activation_type
from factorlayer.device.code import Asks, Told, ask_for, constants, function
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_TENSORS, steadiest, timed
from factorlayer.kernels.resident import Resident, copied_at_once, region_of
from factorlayer.kernels.stages import Layout, Stage, memory_of, together
from factorlayer.kernels.tiling import (
    MOST_TILES,
    odd_us,
    pieces_of,
    stage_for,
    warps_that_fit,
    weights_us,
)
from factorlayer.kernels.timing import waits_of
from factorlayer.kernels.work import Inputs, Mode, Work, round_up
from factorlayer.maths.chain import Chain

BIAS_US = 0.2  # of 16 bits, which come by registers, one behind another: 89 passes of drawn blocks on one H200
OF_END = 3  # instructions for a sum: bias and padding, for four a load and two comparisons as well
# Until the first tile of several layers is on its way, beside a kernel's start, in 16 bits and tf32, and instructions
# for a special function: 239 passes of drawn blocks on H200s, of which 93 % are within 30 %, 88 % without both
START_US, OF_FUNCTION = 0.7, 5
SAMPLES = (8, 16, 32, 64, 128)  # of a tile
WARPS = (1, 2, 4, 8, 16)  # of a group


@dataclass(frozen=True)
class ResidentStack(Resident):
    """A pass, tiled. `us` is the time predicted."""

    layers: tuple[Chain, ...] = ()
    states: bool = False  # stored as well, those between layers

    as_memory = False  # layers pad what they make

    def us_of(self, batch: int) -> float:
        """Predicted microseconds: rounds of tiles, one of each group."""
        gpu, units, warps = self.gpu, self.units, self.warps
        p, q = self.sizes[0][0], self.sizes[-1][1]
        between = sum(q for _, q in self.sizes[:-1]) if self.states else 0
        memory = units * (p + q + between) * self.size / gpu.memory_bytes
        moved = units * (p + q + 2 * between) * self.size / gpu.shared_bytes
        pieces = units * (pieces_of(p, self.work, 1, self.work.inputs) + pieces_of(q, self.work, 1)) / gpu.instructions
        special = units * self.functions / gpu.rates.special_functions
        syncs = gpu.rates.sync_us * (len(self.stages) * (2 if self.in_place else 1) + 2)
        ahead = self.slots > 1 or (not self.in_place and len(self.stages) % 2 == 1)

        def round_us(groups: int) -> float:
            waits = waits_of(groups * warps)
            busy = together(odd_us(self.plain, warps, groups, gpu) + (self.ends_us + pieces) * waits + moved, special)
            return groups * (max(memory / 0.95, busy) + min(memory, busy) / groups * (0.4 if ahead else 1.0))

        tiles = -(-batch // units)
        whole, left = divmod(-(-tiles // gpu.sms), self.groups)  # rounds of a block, and tiles of the last one
        rounds = whole * max(round_us(self.groups), syncs) + (max(round_us(left), syncs) if left else 0.0)
        start = gpu.rates.behind_us + min(gpu.rates.ramp_us, memory * tiles / gpu.sms) + self.weight_bytes / 59e3
        start += weights_us(self.work, self.threads, gpu)
        if len(self.layers) > 1 and self.dtype not in ("float32", "float64"):
            start += START_US
        if self.size == 2:
            start += BIAS_US * sum(layer.bias for layer in self.layers)
        return start + memory + syncs + rounds

    @kept
    def functions(self) -> int:
        """Special functions of a sample; none in float64, where planner.times counts them."""
        if self.dtype == "float64":
            return 0
        return sum(layer.out_features * of_value(layer.activation) for layer in self.layers)

    @kept
    def ends_us(self) -> float:
        """Microseconds to issue what stands behind a tile's sums."""
        issued = sum(OF_END * 4 * stage.mt * stage.nt * stage.tiles for stage in self.plain)
        return (issued + OF_FUNCTION * self.units * self.functions / 32) / self.gpu.instructions

    @kept
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes p, q of each layer."""
        return tuple((layer.in_features, layer.out_features) for layer in self.layers)

    def first(self, i: int) -> int:
        """The first of the parameters that is layer i's; behind all layers, the first of the states'."""
        return sum(layer.tensors for layer in self.layers[:i])

    @kept
    def bias_places(self) -> tuple[int, ...]:
        """Bytes behind the weights' first one at which each bias begins, behind all groups, and the last one ends."""
        begin = self.weight_bytes + self.groups * self.group_bytes
        sizes = (self._bias_bytes(i) * layer.bias for i, layer in enumerate(self.layers))
        return tuple(itertools.accumulate(sizes, initial=begin))

    def _bias_bytes(self, i: int) -> int:
        """With what its stage pads it to."""
        return round_up(round_up(self.plain[i].q, 8 * self.plain[i].nt) * self.size, 16)

    @kept
    def alike(self) -> tuple[range, ...]:
        """Runs of layers that one piece of code makes, so that all of a kernel's stays in its cache: those between the
        first one and the last one that differ in nothing but their tensors."""
        runs, last = [range(0, 1)], len(self.layers) - 1
        for i in range(1, last + 1):
            same = 1 < i < last and self._is_like(i, i - 1)
            runs[-1:] = [range(runs[-1].start, i + 1)] if same else [runs[-1], range(i, i + 1)]
        return tuple(runs)

    def _is_like(self, i: int, j: int) -> bool:
        a, b = self.layers[i], self.layers[j]
        return self.sizes[i] == self.sizes[j] and not a.parameters and (a.activation, a.bias) == (b.activation, b.bias)

    @property
    def plain(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, Stage))

    @property
    def shared(self) -> int:
        return self.barrier_bytes + self.bias_places[-1]

    @property
    def asks(self) -> Asks:
        x, inputs = ask_for("params.x", self.sizes[0][0] * self.size), self.work.inputs
        return (inputs.asks(self.size) if inputs else [x]) + [
            (f"params.weights[{self.first(i)}]", str(p * q * self.size)) for i, (p, q) in enumerate(self.sizes)
        ]

    def outputs(self, batch: int) -> tuple[int, ...]:
        further = [q for _, q in self.sizes[:-1]] if self.states else []
        return tuple(batch * q * self.size for q in (self.sizes[-1][1], *further))

    def __str__(self) -> str:
        kept = "; a bias and an activation behind each" + ", states between them stored" * self.states
        return super().__str__() + kept

    def end(self, i: int) -> str:
        return f"E{i}"

    def between(self, i: int) -> tuple[int, int]:
        return -1, -1

    @property
    def ends(self) -> list[str]:
        made = []
        for i, layer in enumerate(self.layers):
            told: Told = {"Q": self.sizes[i][1], "BIAS": layer.bias, "bias_at": self.bias_places[i]}
            told |= {"bias_step": self._bias_bytes(i)}
            activation = activation_type(layer.activation, self.dtype, self.first(i) + 1)
            made.append(f"struct {self.end(i)} {{ {' '.join(constants(told))} {activation} }};")
        return made

    @property
    def loading(self) -> list[str]:
        calls = []
        for run in self.alike:
            for i in run:
                (p, q), which, first = self.sizes[i], f"S{run.start}", self.first(i)
                calls.append(f"c.template load_weight<{which}, {q}, {p}>({i - run.start}, {tensor(first)});")
                bias = tensor(first + 1 + self.layers[i].parameters)
                calls += [f"c.template load_bias<{which}>({i - run.start}, {bias});"] * self.layers[i].bias
        return function("load_weights(const C& c)", calls)

    @property
    def calls(self) -> list[str]:
        beside = "from" if self.in_place else f"c.memory + {self.offset(1)}"
        calls = [f"u32 from = c.slot_address(slot), to = {beside}, free;"]
        for run in self.alike:
            i, last = run.start, run.stop == len(self.layers)
            calls.append(f"ROLL for (int i = 0; i < {len(run)}; ++i) {{")
            calls.append(f"  c.template stage_to<S{i}, {'void' if last else f'S{i + 1}'}>(i, from, to, tile);")
            if self.states and not last:
                state = self.first(len(self.layers)) + i
                calls.append(f"  c.template keep_state<{self._state(i)}>({state} + i, tile, to);")
            calls += ["  free = from, from = to, to = free;", "}"]
        return function("stages(const C& c, int, int slot, i64 tile)", calls)

    def _state(self, i: int) -> str:
        """How what layer i makes lies in memory and in shared memory, and bytes of one access."""
        q, layout = self.sizes[i][1], self.stages[i + 1].layout
        held = Layout(q, 1, layout.row, 1)
        region = region_of(self.work, 1, q, q)
        return f"Region<{', '.join(map(str, region))}, 1>, {held}, {copied_at_once(held, region, self.size)}"


def tensor(i: int) -> str:
    return f"static_cast<const Element*>(c.params.weights[{i}])"


@functools.lru_cache(512)
def tile(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> ResidentStack | None:
    """The fastest tiling by prediction, or None where this family has no kernel."""
    return steadiest(tilings(layers, dtype, batch, gpu, states), batch)


def tilings(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> Iterator[ResidentStack]:
    if not all(layer.is_dense for layer in layers):
        return
    if sum(layer.tensors + states for layer in layers) > MOST_TENSORS:
        return
    work, size = work_of(layers, dtype, states), ELEMENT_BYTES[dtype]
    if sum(mode.p * mode.q for _, mode in work.steps) * size > gpu.shared:
        return
    ending = replace(work, bias=dtype == "float64")  # whose functions take registers beside sums
    for warps, samples in itertools.product(WARPS, SAMPLES):
        if samples > SAMPLES[0] and samples >= 2 * batch:
            continue
        seen = []
        for most, in_place in itertools.product(MOST_TILES, (False, True)):
            stages = stages_of(work, samples, warps, most, in_place, gpu)
            if stages is None or (stages, in_place) in seen:
                continue
            seen.append((stages, in_place))
            fit = warps_that_fit(ending, stages) // warps
            slot, side, _ = memory_of(stages, False, in_place, False)
            weights = sum(stage.weight_bytes + round_up(stage.q, 64) * size for stage in stages)
            for slots in (2, 1):
                room = gpu.shared - 1024 - weights
                groups = min(room // (slots * slot + side), fit, 16 if warps > 1 else 32)
                if groups < 1:
                    continue
                fields = work, stages, 1, 1, 1, samples, warps, groups, slots, in_place, False, False, gpu, 0.0
                yield timed(ResidentStack(*fields, layers=tuple(layers), states=states), batch)


def work_of(layers: Sequence[Chain], dtype: str, states: bool) -> Work:
    steps, at = [], 0
    for layer in layers:
        (c,) = layer.contractions
        steps.append((0, Mode(((at, c.q, c.p),))))
        at += layer.tensors
    features, second = layers[0].inputs, at + states * (len(layers) - 1)
    inputs = Inputs(features, second) if features else None
    return Work(1, (layers[0].in_features,), 1, tuple(steps), dtype, inputs=inputs)


def stages_of(
    work: Work, samples: int, warps: int, most: int, in_place: bool, gpu: Gpu, cluster: int = 1
) -> tuple[Stage, ...] | None:
    """Of a tile, a block's share of each layer's q's. What the first layer reads is as memory has it, and what the last
    one makes, but by a cluster."""
    stages, last = [], len(work.steps) - 1
    for i, (_, mode) in enumerate(work.steps):
        p = round_up(mode.p, 8) if i else mode.p
        q = round_up(-(-mode.q // cluster), 8) if i < last or cluster > 1 else mode.q
        stage = stage_for(p, q, 1, samples, work.dtype, warps, most, in_place, gpu, False)
        if stage is None:
            return None
        stages.append(stage)
    return tuple(stages)
