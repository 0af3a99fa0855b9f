"""Passes of dense layers one behind another, their states in registers: what dense.cuh is told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from factorlayer.activations.functions import of_value
from factorlayer.activations.written import activation_type
from factorlayer.device.code import constants, function, kinds, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_TENSORS, Pass, timed
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

WIDEST = 256  # of the matrix unit's sums
LOADED_AT_ONCE = 64  # elements of weights that a thread has asked for, before it waits
# Fitted to 84 passes of drawn blocks and of the registry's on one H200, of which 94 % are within 30 %: until the
# weights that a thread has asked for are there; from a warpgroup's products to the next layer's operands; times what a
# multiprocessor takes for functions at its rate; of what a tile takes, what is not beside the longest; times what
# memory takes at its rate for rows that 16 bytes divide, and for others
WEIGHTS_US = 0.4
PRODUCT_US = 0.07
FUNCTIONS = {"bfloat16": 2.2, "float16": 2.2, "tf32": 3.6}  # of tf32 they are longer: 24 passes of drawn blocks
BESIDE = 0.1
LAYERS_US = 0.7  # until the first tile of several layers is on its way, beside a kernel's start: 290 of drawn blocks
WHOLE_ROWS, ODD_ROWS = 1.11, 1.6
WRITE_US = 0.85e-3  # of 2 or 4 bytes: a sector's for L2, which takes 5 TB/s
OTHER_REGISTERS = 34


def beside(share: float, *parts: float) -> float:
    """The microseconds of parts beside one another: of the longest, and of the others that share."""
    longest = max(parts)
    return longest + share * (sum(parts) - longest)


def tiles_us(tiles: int, groups: int, alone: float, busy: float) -> float:
    """The microseconds of a multiprocessor's tiles: the first one by itself, those behind it beside one another; or of
    rounds of as many as there are groups, each by itself."""
    return max(alone * math.ceil(tiles / groups), alone + (tiles - 1) * busy)


@dataclass(frozen=True)
class Dense(Pass):
    """A pass, tiled. `us` is the time predicted."""

    layers: tuple[Chain, ...]
    dtype: str
    groups: int  # of four warps, each with samples of its own
    gpu: Gpu
    us: float = 0.0
    states: bool = False  # stored as well, those between layers
    packs: bool = True  # rows that accesses of 8 bytes do not fit

    @property
    def step(self) -> int:
        """k's of a product."""
        return 32 // self.size

    @kept
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes p, q of each layer."""
        return tuple((chain.in_features, chain.out_features) for chain in self.layers)

    def columns(self, i: int) -> tuple[int, int]:
        """Columns of layer i: its k's, in whole steps, and its sums, in whole steps of the next layer, or in tiles."""
        p, q = self.sizes[i]
        return round_up(p, self.step), round_up(q, 8 if i == len(self.layers) - 1 else self.step)

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @kept
    def places(self) -> tuple[tuple[int, int], ...]:
        """Bytes of shared memory at which each layer's weight and bias begin, and at which the last one's end."""
        found, at = [], 0
        for i in range(len(self.sizes)):
            weight, (k, n) = at, self.columns(i)
            at += -(-k // (4 * self.step)) * n * 128  # slabs of four steps
            found.append((weight, at))
            at = round_up(at + 4 * round_up(n, 16), 1024)
        return (*found, (at, at))

    @property
    def shared(self) -> int:
        return self.places[-1][0] + self.packed_bytes

    @property
    def taken(self) -> tuple[int, ...]:
        """Features of the rows that warps take from memory."""
        return (self.sizes[0][0],)

    @property
    def stored(self) -> tuple[int, ...]:
        return tuple(q for _, q in self.sizes) if self.states else (self.sizes[-1][1],)

    @kept
    def packed(self) -> tuple[int, ...]:
        """Of a warp's bytes in shared memory: where rows that pass through it lie, those stored, 8 at once, behind them
        each kind of those taken, 16 at once, and where they end."""
        stored, *taken = (max(self._misfits(rows), default=0) for rows in (self.stored, *((n,) for n in self.taken)))
        sizes = (8 * stored, *(16 * row for row in taken))
        return tuple(itertools.accumulate((self.packs * size for size in sizes), initial=0))

    def _misfits(self, features: Sequence[int]) -> list[int]:
        """Bytes of the rows that accesses of 8 bytes do not fit, and no lane takes alone."""
        return [n * self.size for n in features if n * self.size % 8 and n * self.size > 16]

    @property
    def packing_us(self) -> float:
        """What such rows cost a tile: 14 instructions for 16 bytes of each lane, or a write for each access."""
        if self.packs:
            rows = sum(self._misfits((*self.taken, *self.stored)))
            return 64 * rows / 512 * 14 / self.gpu.instructions
        return 64 * WRITE_US * sum(row // (row & -row) for row in self._misfits(self.stored))

    @property
    def packed_bytes(self) -> int:
        """Bytes of all warps."""
        return 4 * self.groups * self.packed[-1]

    @property
    def registers_needed(self) -> int:
        """A thread's registers, about: a layer's sums, its operands and the next one's, and those of the samples to
        come."""
        columns = [self.columns(i) for i in range(len(self.sizes))]
        steps, sums = [k // self.step * 4 for k, _ in columns], [n // 2 for _, n in columns]
        most = max(s + max(d, n) for s, d, n in zip(steps, sums, [*steps[1:], 0], strict=True))
        both = max(d + n for d, n in zip(sums, [*steps[1:], 0], strict=True))
        storing = 16 * self.states  # four of an operand's registers are in another order than four of a row's
        return steps[0] + max(most, both) + storing + OTHER_REGISTERS

    @property
    def tensors(self) -> int:
        """Weights, parameters of activations, and biases."""
        return sum(layer.tensors for layer in self.layers)

    def first(self, i: int) -> int:
        """The first of the parameters that is layer i's."""
        return sum(layer.tensors for layer in self.layers[:i])

    @property
    def units_per_sample(self) -> int:
        return 1

    @property
    def units_per_block(self) -> int:
        """Fewer than a block has room for, so that few samples still keep all multiprocessors busy."""
        return 64

    @property
    def reads(self) -> str:
        return "x"

    @property
    def writes(self) -> str:
        return "y"

    def outputs(self, batch: int) -> tuple[int, ...]:
        further = [q for _, q in self.sizes[:-1]] if self.states else []
        return tuple(batch * q * self.size for q in (self.sizes[-1][1], *further))

    @property
    def output_bytes(self) -> int:
        return self.sizes[-1][1] * self.size

    @property
    def passes(self) -> tuple[Any, ...]:
        """Itself, with what is needed before or behind it."""
        return (self,)

    @property
    def made(self) -> str:
        """The layers' sizes in words."""
        widths = "→".join(map(str, [self.sizes[0][0], *(q for _, q in self.sizes)]))
        return widths + ", states between them stored" * self.states

    def us_of(self, batch: int) -> float:
        tiles = math.ceil(batch / (64 * self.gpu.sms))
        rate = 0.6 * self.gpu.flops["bfloat16"] * (0.5 if self.dtype == "tf32" else 1.0)
        columns = [self.columns(i) for i in range(len(self.sizes))]
        products = sum(2 * 64 * k * n for k, n in columns) / rate
        sums = 64 * sum(n for _, n in columns) * 6 / 32 / self.gpu.instructions + self.packing_us
        counted = sum(n * of_value(chain.activation) for (_, n), chain in zip(columns, self.layers, strict=True))
        functions = FUNCTIONS[self.dtype] * 64 * counted / self.gpu.rates.special_functions
        # Of a tile that nothing runs beside
        alone = PRODUCT_US * len(self.layers) + products + sums + functions + self.rows_us(min(64, batch))
        parts = products, sums, functions, self.rows_us(64)
        start = self.gpu.rates.behind_us + self.layers_us + self.loading_us
        return start + tiles_us(tiles, self.groups, alone, beside(BESIDE, *parts))

    @property
    def layers_us(self) -> float:
        """What several layers take before their first tile."""
        return LAYERS_US if len(self.layers) > 1 else 0.0

    def rows_us(self, rows: int) -> float:
        """What memory takes for so many rows."""
        stored = [q for _, q in self.sizes] if self.states else [self.sizes[-1][1]]
        each = (n * self.size for n in (self.sizes[0][0], *stored))
        moved = rows * sum(n * (ODD_ROWS if n % 16 else WHOLE_ROWS) for n in each)
        return moved / self.gpu.memory_bytes

    title = "dense layers"

    @property
    def details(self) -> str:
        return f"{self.made}, {self.groups} warpgroups"

    def struct(self, i: int) -> dict[str, int | bool | str]:
        """What the kernel is told of layer i."""
        p, q = self.sizes[i]
        k, n = self.columns(i)
        weight_at, bias_at = self.places[i]
        bias = self.first(i) + 1 + self.layers[i].parameters
        told: dict[str, int | bool | str] = {"P": p, "Q": q, "K": k, "N": n, "WEIGHT": self.first(i)}
        told |= {"BIAS": bias if self.layers[i].bias else -1, "weight_at": weight_at, "bias_at": bias_at}
        return told | {"FIRST": i == 0 or self.states, "LAST": i == len(self.layers) - 1 or self.states}

    def loading(self) -> list[str]:
        """Calls that bring weights to shared memory, those of several layers at once as far as registers have them."""
        calls: list[str] = []
        for layers in self._loaded_together:
            for i in layers:
                calls += [f"typename C::template Coming<L{i}> w{i};", f"c.template begin_layer<L{i}>(w{i});"]
            calls += [f"c.template end_layer<L{i}>(w{i});" for i in layers]
        return calls

    def _elements(self, i: int) -> int:
        """Elements of a layer's weight that a thread brings."""
        k, n = self.columns(i)
        return -(-n // (self.threads // self.step)) * (k // self.step)

    @property
    def _loaded_together(self) -> list[list[int]]:
        """Layers whose weights, or first parts of them, are on their way at once."""
        found: list[list[int]] = [[]]
        coming = 0
        for i in range(len(self.layers)):
            elements = min(self._elements(i), LOADED_AT_ONCE)
            if coming + elements > LOADED_AT_ONCE and found[-1]:
                found.append([])
                coming = 0
            found[-1].append(i)
            coming += elements
        return found

    @property
    def loading_us(self) -> float:
        """Microseconds of it: waits, of a weight that registers do not have at once for each part."""
        each = [self._elements(i) for i in range(len(self.layers))]
        waits = len(self._loaded_together) + sum(-(-elements // LOADED_AT_ONCE) - 1 for elements in each)
        return waits * WEIGHTS_US

    @property
    def widths(self) -> set[int]:
        """Widths of products."""
        return {self.columns(i)[1] for i in range(len(self.layers))}

    @property
    def products(self) -> str:
        return wgmma(self.dtype, self.widths, turned=self.size == 2)

    @property
    def told(self) -> list[str]:
        last = len(self.layers) - 1
        calls = []
        for i in range(last):
            calls += [f"float d{i}[L{i}::N / 2];", f"c.template multiply<L{i}>(a{i}, d{i});"]
            calls += [f"u32 a{i + 1}[L{i + 1}::K / C::kStep][4];"]
            calls += [f"c.template hand_on<L{i}, L{i + 1}>(d{i}, a{i + 1});"]
            if self.states:
                calls += [f"c.template save<L{i}::Q>(c.params.weights[{self.tensors + i}], a{i + 1}, tile);"]
        calls += [f"float d{last}[L{last}::N / 2];", f"c.template multiply<L{last}>(a{last}, d{last});"]
        calls += [f"c.template store<L{last}::Q, L{last}::Activation>(c.params.y, d{last}, tile);"]
        return self.told_layers() + function("layers(const C& c, u32 (&a0)[L0::K / C::kStep][4], i64 tile)", calls)

    def told_layers(self, lines: Sequence[str] = ()) -> list[str]:
        """What a kernel is told of the layers, with `lines` before them."""
        numbers = {"GROUPS": self.groups, "packed_at": self.shared - self.packed_bytes, "packed_bytes": self.packed[-1]}
        numbers |= dict(zip(("packed_x", "packed_y"), self.packed[1:-1], strict=False))
        head = [*kinds(self.dtype), *constants(numbers), *lines]
        for i, chain in enumerate(self.layers):
            activation = activation_type(chain.activation, self.dtype, self.first(i) + 1)
            head.append(f"struct L{i} {{ {' '.join(constants(self.struct(i)))} {activation} }};")
        ends = constants({"First": "L0", "Last": f"L{len(self.layers) - 1}"})
        return head + ends + function("load_weights(const C& c)", self.loading())


def tile(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> Dense | None:
    """The tiling with as many warpgroups as fit; None where this family has no kernel."""
    return next(tilings(layers, dtype, batch, gpu, states), None)


def tilings(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> Iterator[Dense]:
    if not gpu.wgmma or dtype not in ("bfloat16", "float16", "tf32"):
        return
    for chain in layers:
        c = chain.contractions[0]
        if not chain.is_dense or max(c.p, c.q) > WIDEST:
            return
    if sum(chain.tensors + states for chain in layers) > MOST_TENSORS:
        return
    for packs, groups in itertools.product((True, False), (4, 3, 2, 1)):
        plan = Dense(tuple(layers), dtype, groups, gpu, states=states, packs=packs)
        if plan.shared <= gpu.shared and plan.registers_needed <= min(255, 65536 // plan.threads // 8 * 8):
            yield timed(plan, batch)
