"""All gradients of dense layers one behind another in one pass, in tf32: what dense_backward32.cuh is told,
and layer_backward32.cuh, which is for one layer of many weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from factorlayer.activations.written import slope
from factorlayer.device.code import constants, function
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import timed
from factorlayer.kernels.stack.dense import beside, tiles_us
from factorlayer.kernels.stack.dense import tile as tile_forward
from factorlayer.kernels.stack.dense_backward import DenseBackward
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

SAMPLES_BYTES = 64 * 4  # of a feature
OTHER_REGISTERS = 34
LEAST, MOST = 64, 128  # inputs or outputs of a layer whose sums are shared: beyond the first; both, up to the second
# Fitted to 96 passes of drawn layers and blocks and of the registry's on one H200, of which 83 % are within 30 %: a
# start; what each layer of 64 samples waits that nothing runs beside; what each piece of 4 or 8 bytes takes of a row
# that 16 bytes do not divide; times what a multiprocessor takes for functions at its rate; of what a tile takes, what
# is not beside the longest
START_US = 0.8
WAIT_US = 1.3
PIECE_US = 0.04
FUNCTIONS = 5.0
BESIDE = 0.3


def pieces(row: int) -> int:
    """How many pieces of 4 or 8 bytes a row is that 16 bytes do not divide."""
    return row // math.gcd(row, 8) if row % 16 else 0


@dataclass(frozen=True)
class DenseBackward32(DenseBackward):
    """A pass, tiled, whose warpgroups have samples and sums of their own."""

    together = False  # whether warpgroups share them

    @property
    def taken(self) -> tuple[int, ...]:
        return ()  # 32-bit elements go alone where they must: two of each weight leave no room to pack rows

    @property
    def stored(self) -> tuple[int, ...]:
        return ()

    @kept
    def backs(self) -> tuple[int, ...]:
        """Bytes of shared memory at which each layer's weight by outputs begins, and, behind the last one, ones."""
        found = [self.places[-1][0]]
        for k, n in map(self.columns, range(len(self.layers))):
            found.append(found[-1] + -(-n // 32) * k * 128)
        return tuple(found)

    @property
    def own_at(self) -> int:
        return self.backs[-1] + 1024

    def slab_bytes(self, i: int) -> tuple[int, int]:
        """Bytes of 64 samples of what layer i reads, and of the gradient of its sums: 64 rows, if it is a left
        operand."""
        k, n = self.columns(i)
        left = not self.turned(i)
        rows = round_up(k, 8 if left else 64), round_up(n, 64 if left or self.layers[i].bias else 8)
        return SAMPLES_BYTES * rows[0], SAMPLES_BYTES * rows[1]

    @kept
    def own(self) -> dict[str, int]:
        """Bytes of a warpgroup: where what each layer reads, slopes and gradients of sums lie, and all."""
        found, at = {}, 0
        layers = range(len(self.layers))
        for i in layers:
            found[f"state {i}"] = at
            at += self.slab_bytes(i)[0]
        for i in layers:
            found[f"slope {i}"] = at
            at += SAMPLES_BYTES * self.columns(i)[1] if self.has_slope(i) and i + 1 in layers else 0
        each = max(self.slab_bytes(i)[1] for i in layers)
        return found | {"behind": at, "each": each, "all": at + each * min(2, len(layers))}

    @property
    def shared(self) -> int:
        return self.own_at + self.groups * self.own["all"]

    @kept
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """64s of rows, and columns, of the sums of each layer's weight."""
        found = []
        for i, (k, n) in enumerate(map(self.columns, range(len(self.layers)))):
            left, right = (k, n) if self.turned(i) else (n, k)
            found.append((-(-left // 64), right))
        return tuple(found)

    @property
    def registers_needed(self) -> int:
        """A thread's registers, about: all sums of gradients, grad_y, and what a layer reads and makes, or both
        gradients."""
        columns = [self.columns(i) for i in range(len(self.layers))]
        kept = sum(rows * right // 2 for rows, right in self.tiles)
        kept += sum(4 * -(-n // 64) for (_, n), chain in zip(columns, self.layers, strict=True) if chain.bias)
        (first, _), (_, last) = columns[0], columns[-1]
        forward = max(k // 2 + n // 2 for k, n in columns) + last // 2
        ending = first + last // 2  # what x gets, and the next samples
        return kept + max(forward, ending) + OTHER_REGISTERS

    def makes_again(self, i: int) -> bool:
        return i < len(self.layers) - 1 or self.has_slope(i)

    def us_of(self, batch: int) -> float:
        tiles = math.ceil(batch / (64 * self.gpu.sms))
        columns = [self.columns(i) for i in range(len(self.layers))]
        forward = sum(k * n for i, (k, n) in enumerate(columns) if self.makes_again(i))
        back = sum(k * n for k, n in columns) + sum(64 * rows * right for rows, right in self.tiles)
        products = 2 * 64 * (forward + back) / (0.3 * self.gpu.flops["bfloat16"])
        each = sum(n * (16 if self.has_slope(i) else 4) + k * 4 for i, (k, n) in enumerate(columns))
        others = 64 * each / 32 / self.gpu.instructions
        memory = 64 * (2 * self.sizes[0][0] + self.sizes[-1][1]) * self.size / self.gpu.memory_bytes
        functions = FUNCTIONS * 64 * self.functions / self.gpu.rates.special_functions
        x, y = (PIECE_US * pieces(n * self.size) for n in (self.sizes[0][0], self.sizes[-1][1]))
        rows = min(64, batch) / 64
        alone = WAIT_US * len(columns) + products + others + functions + rows * (memory + x + y)
        busy = beside(BESIDE, products, others, functions, memory) + x
        return START_US + tiles_us(tiles, self.groups, alone, busy)

    def __str__(self) -> str:
        return super().__str__() + ", tf32"

    def struct(self, i: int) -> dict[str, int | bool | str]:
        return super().struct(i) | {"back_at": self.backs[i]}

    @property
    def numbers(self) -> dict[str, int]:
        own = self.own
        found = {"GRAD_Y": self.tensors, "SUMS": self.weights, "ones_at": self.backs[-1], "own_at": self.own_at}
        found |= {"own_bytes": own["all"], "behind_at": own["behind"], "behind_bytes": own["each"]}
        found |= {"LAYERS": len(self.layers)}
        return found | {"all": self.shared}

    @property
    def told(self) -> list[str]:
        last = len(self.layers) - 1
        lines = constants(self.numbers | {"TOGETHER": self.together})
        lines += [slope(chain.activation, self.dtype, f"Slope{i}") for i, chain in enumerate(self.layers)]
        body = function("turn_weights(const C& c)", [f"c.template turn_weight<L{i}>();" for i in range(last + 1)])
        return self.told_layers(lines) + body + ([] if self.together else self.with_samples())

    def with_samples(self) -> list[str]:
        """What the kernel does with 64 samples, and where it begins and ends."""
        last = len(self.layers) - 1
        body = ["template <class C> struct AllSums {"]
        body += [*(f"  typename C::template Sums<L{i}> s{i} = {{}};" for i in range(last + 1)), "};"]
        calls = ["c.template keep<L0>(a0);"]
        for i in range(last + 1):
            if i < last or self.has_slope(i):
                calls += [f"float z{i}[L{i}::N / 2];", f"c.template multiply<L{i}>(a{i}, z{i});"]
            if i < last:
                calls += [f"c.template keep_slopes<L{i}>(z{i}, tile);"] if self.has_slope(i) else []
                calls += [f"u32 a{i + 1}[L{i + 1}::K / 8][4];", f"c.template hand_on<L{i}, L{i + 1}>(z{i}, a{i + 1});"]
                calls += [f"c.template keep<L{i + 1}>(a{i + 1});"]
        calls += [f"c.steepen_last(z{last}, y, tile);" if self.has_slope(last) else "c.round(y);"]
        for i in reversed(range(last + 1)):
            behind = "y" if i == last else f"g{i}"
            calls += [f"float d{i}[L{i}::K / 2];"]
            calls += [f"c.template layer<L{i}>({behind}, sums.s{i}, d{i}, {(last - i) % 2});"]
            if i:
                calls += [f"u32 g{i - 1}[L{i - 1}::N / 8][4];"]
                pass_on = "steepen" if self.has_slope(i - 1) else "narrowed"
                calls += [f"c.template {pass_on}<L{i - 1}>(d{i}, g{i - 1});", f"c.template finish<L{i}>(sums.s{i});"]
        calls += ["c.load_x(next, a0);", "c.load_grad_y(next, y);"]
        calls += ["c.template store<L0::P, identity>(c.params.y, d0, tile);", "c.template finish<L0>(sums.s0);"]
        given = f"const C& c, u32 (&a0)[L0::K / 8][4], u32 (&y)[L{last}::N / 8][4], AllSums<C>& sums"
        body += function(f"tile({given}, i64 tile, i64 next)", calls)
        adding = [f"c.template store_sums<L{i}>(sums.s{i});" for i in range(last + 1)]
        return body + function("run(const C& c)", ["AllSums<C> sums;", "c.all_tiles(sums);", *adding])


@dataclass(frozen=True)
class LayerBackward32(DenseBackward32):
    """A pass, tiled, whose warpgroups, two of them, share the weight's sums."""

    header = "layer_backward32"
    together = True

    def turned(self, i: int) -> bool:
        """Whether its sums are turned: each warpgroup has 64 rows, so there have to be more than those of the first."""
        k, n = self.columns(i)
        return k > LEAST and (n <= LEAST or n < k)

    @property
    def barriers_at(self) -> int:
        """The place of the barriers, behind two places for what the layer reads, and one for the gradient of its
        sums."""
        read, behind = self.slab_bytes(0)
        return self.own_at + 2 * read + behind

    @property
    def shared(self) -> int:
        return self.barriers_at + 16

    @property
    def registers_needed(self) -> int:
        """A thread's registers, about: sums of gradients, and any two of x, the layer's sums, grad_y and what x
        gets."""
        k, n = self.columns(0)
        (_, right), *_ = self.tiles
        return right // 2 + 4 * self.layers[0].bias + max(k // 2 + n // 2, n) + OTHER_REGISTERS

    title = "dense layer, backward"

    @property
    def details(self) -> str:
        p, q = self.sizes[0]
        return f"{p}→{q}, 2 warpgroups together"

    @property
    def numbers(self) -> dict[str, int]:
        return super().numbers | {"slabs_at": self.own_at, "barriers_at": self.barriers_at}


def tile(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu) -> DenseBackward32 | None:
    """None where this family has no kernel."""
    if dtype != "tf32" or any(layer.parameters for layer in layers) or tile_forward(layers, dtype, batch, gpu) is None:
        return None
    for groups in (4, 3, 2):
        plan = DenseBackward32(tuple(layers), dtype, groups, gpu)
        if plan.shared <= gpu.shared and plan.registers_needed <= min(255, 65536 // plan.threads // 8 * 8):
            return timed(plan, batch)
    if len(layers) == 1 and LEAST < max(plan.columns(0)) <= MOST:
        plan = LayerBackward32(tuple(layers), dtype, 2, gpu)
        return timed(plan, batch) if plan.shared <= gpu.shared else None
    return None
