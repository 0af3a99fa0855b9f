"""All gradients of dense layers one behind another at one visit: stack_backward.cuh, its tiles and source.

It takes any widths in any dtype on any GPU, as far as a block holds the weights and its registers the sums of their
gradients. States are made again from x, tile by tile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.functions import of_slope, of_value
from factorlayer.activations.results import from_result
from factorlayer.activations.written import activation_type, gradient, gradient_by_result, slope
from factorlayer.device.code import Asks, Told, ask_for, constants, function, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.chain_backward import (
    MOST_GROUPS,
    OTHER_REGISTERS,
    SLACK,
    Learned,
    fitting,
    temporary,
    ways_of,
)
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.passes import MOST_TENSORS, steadiest
from factorlayer.kernels.resident import copied_at_once, stage_type
from factorlayer.kernels.stages import NO_TILES, Layout, Stage, TileUs, row_step, together
from factorlayer.kernels.tiling import WEIGHTS_AT_ONCE, odd_us, of_pieces, stage_for
from factorlayer.kernels.timing import predict, waits_of
from factorlayer.kernels.work import round_up, told_inputs
from factorlayer.maths.chain import Chain

SAMPLES = (16, 32, 64, 128)  # of a tile
WARPS = (4, 8, 16)  # of a group
MOST_TILES = (16, 8, 4)  # of 16 x 8 sums for a warp
MOST_SUMS = (32, 64, 96, 160)  # of a thread, of all weights: fewer leave room for more warps
MOST_AT_ONCE = (16, 8, 4, 2, 1)  # tiles of 16 x 8 of a weight's gradient that a warp has: what a tile adds is apart
BEYOND = 64  # columns that a tile may read behind the last weight
OF_END = 6  # instructions for a sum: bias, padding, a comparison with the last sample, and places
# Fitted to 440 passes of drawn layers and blocks on one H200, of which nine in ten are within 30 %, of double six: of
# what instructions and products take one after another, what is not beside others'; times what a multiprocessor takes
# for functions at its rate; bytes of weights that come in a microsecond; times what shared memory and L2 take for sums
# at their rates; of the Reduction behind, what it does while this pass ends
BUSY = {"float64": 0.95, "float32": 0.65, "tf32": 0.8, "bfloat16": 0.8, "float16": 0.8}
FUNCTIONS = 2.0
WEIGHT_BYTES, SUMS = 16e3, 2.5
EARLY_US = 0.8
FUNCTION_REGISTERS = 16


@dataclass(frozen=True)
class StackBackward(BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    layers: tuple[Chain, ...]
    dtype: str
    forward: tuple[Stage, ...]
    back: tuple[Stage, ...]
    learned: tuple[Learned, ...]
    units: int
    warps: int
    groups: int
    slots: int
    gpu: Gpu
    us: float
    tile_us: TileUs = NO_TILES

    # What a pass says of itself

    units_per_sample = 1

    def us_of(self, batch: int) -> float:
        return self.tile_us.of(-(-batch // self.units), self.groups, self.most, self.gpu)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @property
    def units_per_block(self) -> int:
        return self.units

    @property
    def output_bytes(self) -> int:
        return self.widths[0] * self.size

    @property
    def weights(self) -> int:
        """Elements of all gradients but x's."""
        return self.begin_of(len(self.layers))

    def begin_of(self, i: int) -> int:
        """Where the gradients of layer i's weight begin, and behind them its bias's."""
        return sum(
            layer.in_features * layer.out_features + layer.out_features * layer.bias for layer in self.layers[:i]
        )

    @property
    def asks(self) -> Asks:
        grad_y = f"params.weights[{self.tensors}]"
        return [ask_for("params.x", self.widths[0] * self.size), ask_for(grad_y, self.widths[-1] * self.size)]

    # The layers

    @kept
    def widths(self) -> tuple[int, ...]:
        return (self.layers[0].in_features, *(layer.out_features for layer in self.layers))

    @property
    def tensors(self) -> int:
        return self.first(len(self.layers))

    def first(self, i: int) -> int:
        """The first of the parameters that is layer i's; behind all layers, grad_y."""
        return sum(layer.tensors for layer in self.layers[:i])

    def is_learned(self, i: int) -> bool:
        """Whether state i has a column of ones, for the gradient of the bias behind it."""
        return i < len(self.layers) and self.layers[i].bias

    def keeps(self, i: int) -> bool:
        """Whether layer i's slopes are: its result does not tell them, and it is not the last one."""
        activation = self.layers[i].activation
        return i < len(self.layers) - 1 and activation != "identity" and from_result(activation) is None

    @property
    def steepens(self) -> bool:
        """Whether grad_y goes back through an activation."""
        return self.layers[-1].activation != "identity"

    @property
    def made(self) -> tuple[Stage, ...]:
        """The stages that its kernel makes, forward and back."""
        return (*self.forward[: len(self.layers) - (not self.steepens)], *self.back)

    # Memory

    def layout(self, i: int) -> Layout:
        """Of state i, whose gradient takes its place, with features padded as stages take them."""
        return Layout(round_up(self.widths[i], 8), 1, row_step(self.widths[i] + self.is_learned(i), self.dtype), 1)

    def raw(self, i: int) -> Layout:
        """The same, as memory has its features."""
        return replace(self.layout(i), p=self.widths[i])

    @kept
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes for each state, with what tiles read behind the last row, and behind them all for grad_y."""
        found = []
        for i in range(len(self.widths)):
            row = self.layout(i).row
            of_x = self.learned[i].reach_p if i < len(self.layers) else 0
            reach = max(of_x, self.learned[i - 1].reach_q if i else 0)
            elements = self.units * row + max(0, reach - row)
            found.append(round_up(elements * self.size + SLACK, 128))
        return tuple(found)

    @kept
    def places(self) -> tuple[int, ...]:
        """Bytes behind a group's slots where states between layers begin, then those where kept slopes do, and all."""
        states = self.state_bytes[1:-1]
        slopes = (self.state_bytes[i + 1] * self.keeps(i) for i in range(len(self.layers) - 1))
        return tuple(itertools.accumulate((*states, *slopes), initial=0))

    @property
    def slot_bytes(self) -> int:
        return self.state_bytes[0] + self.state_bytes[-1]

    @property
    def group_bytes(self) -> int:
        return max(self.slots * self.slot_bytes + self.places[-1], round_up(self.fold_bytes, 128))

    @property
    def fold_bytes(self) -> int:
        """Bytes of a group in which its warps' sums are added up."""
        return 32 * self.warps * 4 * SUM_BYTES[self.dtype]

    @kept
    def weight_places(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((stage.weight_bytes for stage in self.forward), initial=0))

    @property
    def weight_bytes(self) -> int:
        return round_up(self.weight_places[-1] + BEYOND * self.size, 128)

    @kept
    def bias_places(self) -> tuple[int, ...]:
        """Bytes behind the weights' first one at which each bias begins, behind all groups, and the last one ends."""
        sizes = (round_up(round_up(f.q, 8 * f.nt) * self.size, 16) for f in self.forward)
        return tuple(itertools.accumulate(sizes, initial=self.weight_bytes + self.groups * self.group_bytes))

    @property
    def shared(self) -> int:
        return self.bias_places[-1]

    @property
    def details(self) -> str:
        kept = [f"{i}" for i in range(len(self.layers)) if self.keeps(i)]
        return (
            f"{self.groups} groups of {self.warps} warps, tiles of {self.units} samples, {self.slots} slots; "
            + ", ".join(map(str, (*self.made, *self.learned)))
            + (f"; slopes of layers {', '.join(kept)} kept" if kept else "")
        )

    # Its kernel

    @property
    def told(self) -> list[str]:
        last = len(self.layers) - 1
        regions = [(1, width, 1, width, 0) for width in (self.widths[0], self.widths[-1])]
        told: Told = {"WARPS": self.warps, "GROUPS": self.groups, "UNITS": self.units, "SLOTS": self.slots, "RANK": 1}
        told |= {"UNITS_PER_SAMPLE": 1, "GRAD": self.tensors, "COUNT": self.weights, "BIAS": False, "PARTS": 1}
        told |= {"PADDED": False}  # behind a row there may be what sums of a bias are made by
        told |= {"TERMS": 1, "GRADS": 1, "kGradBytes": 0, "MEETINGS": last + self.steepens + 2 * (last + 1)}
        told |= told_inputs(None)
        told |= {"X_TERM": 0, "G_TERM": 0, "COPY_X": copied_at_once(self.raw(0), regions[0], self.size)}
        told |= {"COPY_G": copied_at_once(self.raw(last + 1), regions[1], self.size)}
        told |= {"kBarrierBytes": 0, "kWeightBytes": self.weight_bytes, "kStateBytes": self.state_bytes[0]}
        told |= {"kSlotBytes": self.slot_bytes, "kGroupBytes": self.group_bytes}
        told |= {"ROW_X": self.layout(0).row, "ROW_G": self.layout(last + 1).row}
        told |= {"X": str(self.raw(0)), "G": str(self.raw(last + 1)), "OutputEnd": f"E{last}"}
        for key, region in zip(("Input", "Output"), regions, strict=True):
            told[key] = f"Region<{', '.join(map(str, region))}, 1>"
        for i, (f, b) in enumerate(zip(self.forward, self.back, strict=True)):
            x, g, at = self.layout(i), self.layout(i + 1), self.weight_places[i]
            told[f"F{i}"] = stage_type(f, x, g, at, -1, end=f"E{i}")
            told[f"B{i}"] = stage_type(b, g, x, at, -1, end=f"E{i - 1}" if i else "InputEnd", stride=f.weight_stride)
        for i, d in enumerate(self.learned):
            sizes = (d.p, d.q, d.inner, d.rows, d.mt, d.nt, d.count, d.share)
            is_raw = (str(i == 0).lower(), str(i == last and not self.steepens).lower())
            words = (*sizes, self.layout(i), self.layout(i + 1), self.begin_of(i), *is_raw)
            told[f"D{i}"] = f"Learned<{', '.join(map(str, words))}>"
        told |= {"FirstStage": "F0", "AlsoRaw": "void" if self.steepens else f"B{last}"}
        tiles = " ".join(f"typename C::template Tiles<D{i}> d{i} = {{}};" for i in range(last + 1))
        stores = [
            f"c.template store_layer<D{i}, {str(layer.bias).lower()}>(sums.d{i});"
            for i, layer in enumerate(self.layers)
        ]
        return [
            *kinds(self.dtype),
            activation_type("identity", self.dtype, 0),
            *self.ends,
            *constants(told),
            f"template <class C> struct AllSums {{ {tiles} }};",
            *self.loading,
            *self.preparing,
            *self.walk,
            *function("store_sums(const C& c, const AllSums<C>& sums)", stores),
        ]

    @property
    def ends(self) -> list[str]:
        """What stands behind each layer, and, of x, what its rows hold."""
        told: Told = {"Q": self.widths[0], "ONES": self.is_learned(0), "KEEPS": False}
        made = [f"struct InputEnd {{ {' '.join(constants(told))} using Activation = identity; }};"]
        for i, layer in enumerate(self.layers):
            told = {"Q": self.widths[i + 1], "ONES": self.is_learned(i + 1), "KEEPS": self.keeps(i)}
            told |= {"BIAS": layer.bias, "bias_at": self.bias_places[i], "bias_step": 0}
            types = [activation_type(layer.activation, self.dtype, 0)]
            if self.keeps(i):
                types.append(slope(layer.activation, self.dtype, "Slope"))
            elif i == len(self.layers) - 1:
                types.append(gradient(layer.activation, self.dtype, "Gradient"))
            elif layer.activation != "identity":
                types.append(gradient_by_result(layer.activation, self.dtype, "Back"))
            made.append(f"struct E{i} {{ {' '.join(constants(told))} {' '.join(types)} }};")
        return made

    @property
    def loading(self) -> list[str]:
        calls = []
        for i, layer in enumerate(self.layers):
            (p, q), first = self.widths[i : i + 2], self.first(i)
            calls += [f"c.template load_weight<F{i}, {q}, {p}>(0, {_tensor(first)});", f"c.template fill_gaps<F{i}>();"]
            calls += [f"c.template load_bias<F{i}>(0, {_tensor(first + 1)});"] * layer.bias
        calls.append(f"c.fill_behind({self.weight_places[-1]});")
        return function("load_weights(const C& c)", calls)

    @property
    def preparing(self) -> list[str]:
        rows = [(i, self.layout(i + 1).row) for i in range(len(self.layers) - 1)]
        calls = [f"c.template pad<E{i}, {row}>({self._state(i + 1)});" for i, row in rows]
        return function("prepare_states(const C& c)", calls)

    def _state(self, i: int) -> str:
        return "x" if i == 0 else "g" if i == len(self.layers) else f"c.state({self.places[i - 1]})"

    def _slopes(self, i: int) -> str:
        """Where those of layer i are kept."""
        return f"c.state({self.places[len(self.layers) - 1 + i]})" if i >= 0 and self.keeps(i) else "0"

    @property
    def walk(self) -> list[str]:
        last = len(self.layers) - 1
        calls = []
        for i in range(last):
            given = f"{self._state(i)}, {self._state(i + 1)}, {self._slopes(i)}, present"
            calls.append(f"c.template forward<F{i}>({given});")
        if self.steepens:
            calls.append(f"c.template steepen<F{last}>({self._state(last)}, g, present);")
        for i in reversed(range(last + 1)):
            x, g = self._state(i), self._state(i + 1)
            calls += [f"c.template learn<D{i}>(sums.d{i}, {x}, {g}, 0);", "c.sync();"]
            calls.append(f"c.template back<B{i}>({g}, {x}, {self._slopes(i - 1)}, present);")
        return function("walk(const C& c, AllSums<C>& sums, u32 x, u32 g, int present)", calls)


def _tensor(i: int) -> str:
    return f"static_cast<const Element*>(c.params.weights[{i}])"


@functools.lru_cache(512)
def tile(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> StackBackward | None:
    """The fastest tiling by prediction, or None where this family has no kernel."""
    return steadiest(tilings(layers, dtype, batch, gpu), batch)


def tilings(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> Iterator[StackBackward]:
    if not all(layer.is_dense and not layer.parameters for layer in layers):
        return
    widths, size = (layers[0].in_features, *(layer.out_features for layer in layers)), ELEMENT_BYTES[dtype]
    weights = sum(p * q for p, q in itertools.pairwise(widths))
    words = 2 if dtype == "float64" else 1
    if sum(layer.tensors for layer in layers) > MOST_TENSORS or weights * size > gpu.shared:
        return
    functions = FUNCTION_REGISTERS * any(layer.activation != "identity" for layer in layers)
    for warps, samples in itertools.product(WARPS, SAMPLES):
        if samples > SAMPLES[0] and samples >= 2 * batch:
            continue
        seen = set()
        for most_sums, at_once, most_tiles in itertools.product(MOST_SUMS, MOST_AT_ONCE, MOST_TILES):
            if words * weights > most_sums * 32 * warps:
                continue
            both = _stages(widths, dtype, samples, warps, most_tiles, gpu)
            learned = _learned(layers, widths, dtype, samples, warps, most_sums // words, at_once, gpu)
            if both is None or learned is None or (both, learned) in seen:
                continue
            seen.add((both, learned))
            sums = words * sum(d.sums for d in learned)
            most = max(
                max(stage.registers for stage in (*both[0], *both[1])) + functions,
                OTHER_REGISTERS + max(temporary(d, dtype) for d in learned),
            )
            fit = min(32, 4 * (512 // round_up(sums + most, 8)))
            if sums + most > 255 or fit < warps:
                continue
            one = StackBackward(layers, dtype, *both, learned, samples, warps, 1, 1, gpu, 0.0)
            yield from _grouped(one, fit, batch)


def _grouped(one: StackBackward, fit: int, batch: int) -> Iterator[StackBackward]:
    """Groups as many as fit, with two slots or one."""
    gpu, tiles = one.gpu, -(-batch // one.units)
    room = gpu.shared - one.shared + one.group_bytes
    for slots in (2, 1):
        group = max(one.group_bytes, slots * one.slot_bytes + one.places[-1])
        groups = min(room // group, fit // one.warps, MOST_GROUPS)
        if groups >= 1:
            groups = max(1, min(groups, -(-tiles // gpu.sms)))
            us, tile_us = _us(one, groups, slots, tiles)
            yield replace(one, groups=groups, slots=slots, us=us, tile_us=tile_us)


def _us(plan: StackBackward, groups: int, slots: int, tiles: int) -> tuple[float, TileUs]:
    """Predicted microseconds of a plan with so many groups and slots."""
    gpu, units, warps, widths = plan.gpu, plan.units, plan.warps, plan.widths
    p, q, bytes_of_sum = widths[0], widths[-1], SUM_BYTES[plan.dtype]
    moved = units * (2 * p + q) * plan.size
    waits = waits_of(groups * warps)
    learned = (d.parts_of_time(plan.dtype, warps, gpu) for d in plan.learned)
    busy = odd_us(plan.made, warps, groups, gpu)
    busy += sum(together(multiply, move, issue * waits) for multiply, move, issue in learned)
    ends = sum(OF_END * 4 * stage.mt * stage.nt * stage.tiles for stage in plan.made)
    pieces = sum(times * _pieces(n * units, n, plan.size) for times, n in ((2, p), (1, q)))
    busy += waits * (ends + pieces) / gpu.instructions + moved / gpu.shared_bytes
    functions = (
        n * (of_value(c.activation) + of_slope(c.activation)) for n, c in zip(widths[1:], plan.layers, strict=True)
    )
    busy *= BUSY[plan.dtype]
    if plan.dtype != "float64":  # whose functions planner.times counts
        busy += FUNCTIONS * units * sum(functions) / gpu.rates.special_functions
    barriers = 3 * len(plan.layers) + plan.steepens + 2
    many = warps, groups, slots > 1, tiles, 1, gpu
    us, of_tile = predict(moved / gpu.memory_bytes, busy, barriers, *many)
    by_registers = (a * b for a, b in itertools.pairwise(widths) if a * plan.size % 4)
    rounds = sum(-(-elements // (32 * warps * groups * WEIGHTS_AT_ONCE)) - 1 for elements in by_registers)
    sums = 32 * warps * sum(d.sums for d in plan.learned) * bytes_of_sum
    summed = 2 * min(tiles, plan.most) * plan.weights * bytes_of_sum / (gpu.l2_bytes * gpu.sms)
    beside = plan.weight_bytes / WEIGHT_BYTES + 2 * SUMS * groups * sums / gpu.shared_bytes + SUMS * summed
    beside += rounds * gpu.rates.wait_us - EARLY_US
    return us + beside, TileUs(*of_tile, beside)


def _pieces(elements: int, width: int, size: int) -> float:
    """Instructions of warps that move rows of a width, which lie together."""
    access = next(n for n in (16, 8, 4, 2) if width * size % n == 0)
    return of_pieces(access, 128) * elements * size / access / 32


@functools.lru_cache(512)
def _stages(
    widths: tuple[int, ...], dtype: str, samples: int, warps: int, most: int, gpu: Gpu
) -> tuple[tuple[Stage, ...], tuple[Stage, ...]] | None:
    """Of each layer forward and back."""
    forward: list[Stage] = []
    back: list[Stage] = []
    for p, q in itertools.pairwise(round_up(width, 8) for width in widths):
        for a, b, stages in ((p, q, forward), (q, p, back)):
            stage = stage_for(a, b, 1, samples, dtype, warps, most, False, gpu, False)
            if stage is None:
                return None
            stages.append(stage)
    return tuple(forward), tuple(back)


@functools.lru_cache(512)
def _learned(
    layers: tuple[Chain, ...],
    widths: tuple[int, ...],
    dtype: str,
    samples: int,
    warps: int,
    most: int,
    at_once: int,
    gpu: Gpu,
) -> tuple[Learned, ...] | None:
    """The fastest tiles for each weight, with a column for a bias."""
    sizes = [(p + layer.bias, q) for layer, (p, q) in zip(layers, itertools.pairwise(widths), strict=True)]
    ways = [[d for d in ways_of(p, q, 1, samples, warps, 1, dtype, gpu) if d.mt * d.nt <= at_once] for p, q in sizes]
    return fitting(ways, most)
