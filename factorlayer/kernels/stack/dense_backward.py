"""All gradients of dense layers one behind another in one pass: what dense_backward.cuh is told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from factorlayer.activations.functions import of_slope, of_value
from factorlayer.activations.written import slope
from factorlayer.device.code import constants, function
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import BlockSums, Reduction
from factorlayer.kernels.passes import timed
from factorlayer.kernels.stack.dense import WHOLE_ROWS, Dense, beside, tiles_us
from factorlayer.kernels.stack.dense import tile as tile_forward
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

SLAB = 64 * 128  # bytes: 64 samples of 64 features
# Fitted to 126 passes of drawn layers and blocks and of the registry's on one H200, of which 89 % are within 30 %: a
# start, with sums that are added and stored in the end; times what instructions for sums, and functions at a
# multiprocessor's rate, take of a warpgroup by itself; of what a tile takes, what is not beside the longest
START_US = 2.4
SUMS_ALONE, FUNCTIONS = 2.4, 3.8
BESIDE = 0.45
PRODUCTS = 3  # of a layer: forward once more, its gradient, and what goes back
OTHER_REGISTERS = 40


@dataclass(frozen=True)
class DenseBackward(BlockSums, Dense):
    """A pass, tiled, whose blocks write sums for a Reduction."""

    @property
    def passes(self) -> tuple[Dense | Reduction, ...]:
        return self, Reduction(self)

    def columns(self, i: int) -> tuple[int, int]:
        p, q = self.sizes[i]
        return round_up(p, self.step), round_up(q, self.step)

    def turned(self, i: int) -> bool:
        """Whether the sums of layer i's weight gradient are its transpose: what takes fewer registers."""
        k, n = self.columns(i)
        return -(-k // 64) * n < -(-n // 64) * k

    @kept
    def own(self) -> dict[str, int]:
        """Bytes of a warpgroup: where each layer's input, its slopes and the gradients behind layers lie, and all."""
        found, at = {}, 0
        for i in range(len(self.layers)):
            found[f"state {i}"] = at
            at += -(-self.columns(i)[0] // 64) * SLAB
        for i in range(len(self.layers)):
            found[f"slope {i}"] = at
            at += self.columns(i)[1] * 128 if self.has_slope(i) else 0
        behind = max(-(-self.columns(i)[1] // 64) for i in range(len(self.layers))) * SLAB
        return found | {"behind": round_up(at, 1024), "each": behind, "all": round_up(at, 1024) + 2 * behind}

    def makes_again(self, i: int) -> bool:
        """Whether layer i goes forward once more."""
        return True

    def has_slope(self, i: int) -> bool:
        return self.layers[i].activation != "identity"

    @property
    def shared(self) -> int:
        return self.places[-1][0] + SLAB + self.groups * self.own["all"] + self.packed_bytes

    @property
    def taken(self) -> tuple[int, ...]:
        return self.sizes[0][0], self.sizes[-1][1]

    @property
    def stored(self) -> tuple[int, ...]:
        return (self.sizes[0][0],)

    @property
    def registers_needed(self) -> int:
        """A thread's registers, about: all sums of gradients, and what the widest layer needs on the way back."""
        kept = 0
        for i, chain in enumerate(self.layers):
            k, n = self.columns(i)
            left, right = (k, n) if self.turned(i) else (n, k)
            kept += -(-left // 64) * right // 2 + (4 * -(-n // 64) if chain.bias else 0)
        passing = max(k // 2 + n // 4 for k, n in map(self.columns, range(len(self.layers))))
        ahead = (self.columns(0)[0] + self.columns(len(self.layers) - 1)[1]) // 4
        return kept + passing + ahead + OTHER_REGISTERS

    @kept
    def sums(self) -> tuple[int, ...]:
        """The place where each layer's sums begin: of its weight, and behind them of its bias."""
        sizes = [p * q + q * chain.bias for (p, q), chain in zip(self.sizes, self.layers, strict=True)]
        return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))

    @property
    def weights(self) -> int:
        """Elements of all gradients but x's."""
        return self.sums[-1]

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (batch * self.output_bytes,)

    @property
    def output_bytes(self) -> int:
        return self.sizes[0][0] * self.size

    def us_of(self, batch: int) -> float:
        tiles = math.ceil(batch / (64 * self.gpu.sms))
        columns = [self.columns(i) for i in range(len(self.layers))]
        products = PRODUCTS * sum(2 * 64 * k * n for k, n in columns) / (0.5 * self.gpu.flops[self.dtype])
        sums = 64 * sum(2 * n for _, n in columns) * 8 / 32 / self.gpu.instructions + self.packing_us
        memory = 64 * (2 * self.sizes[0][0] + self.sizes[-1][1]) * self.size / self.gpu.memory_bytes
        functions = FUNCTIONS * 64 * self.functions / self.gpu.rates.special_functions
        alone = products + SUMS_ALONE * sums + functions + memory  # of a tile that nothing runs beside
        busy = beside(BESIDE, products, sums, functions, WHOLE_ROWS * memory)
        return START_US + tiles_us(tiles, self.groups, alone, busy)

    @kept
    def functions(self) -> int:
        """Special functions of a sample: of what is made once more, and of slopes."""
        return sum(
            self.columns(i)[1] * (self.makes_again(i) * of_value(chain.activation) + of_slope(chain.activation))
            for i, chain in enumerate(self.layers)
        )

    title = "dense layers, backward"

    def struct(self, i: int) -> dict[str, int | bool | str]:
        p, q = self.sizes[i]
        told = super().struct(i) | {"TURNED": self.turned(i), "Slope": f"struct Slope{i}"}
        told |= {"state_at": self.own[f"state {i}"], "slope_at": self.own[f"slope {i}"]}
        return told | {"sums_at": self.sums[i], "bias_sums_at": self.sums[i] + p * q}

    @property
    def widths(self) -> set[int]:
        return {8, *(n for i in range(len(self.layers)) for n in self.columns(i))}

    @property
    def told(self) -> list[str]:
        last = len(self.layers) - 1
        own_at = self.places[-1][0] + SLAB
        numbers = {"GRAD_Y": self.tensors, "SUMS": self.weights, "LAYERS": last + 1, "own_at": own_at}
        numbers |= {"ones_at": own_at - SLAB, "own_bytes": self.own["all"]}
        numbers |= {"behind_at": self.own["behind"], "behind_bytes": self.own["each"]}
        numbers |= {"all": own_at + self.groups * self.own["all"], "TOGETHER": 0}
        lines = constants(numbers)
        lines += [slope(chain.activation, self.dtype, f"Slope{i}") for i, chain in enumerate(self.layers)]
        sums = [f"typename C::template Sums<L{i}> s{i} = {{}};" for i in range(last + 1)]
        body = ["template <class C> struct AllSums {", *(f"  {each}" for each in sums), "};"]

        calls = ["c.put(c.own + L0::state_at, a0);"]
        for i in range(last + 1):
            if i < last or self.has_slope(i):
                calls += [f"float z{i}[L{i}::N / 2];", f"c.template multiply<L{i}>(a{i}, z{i});"]
                calls += [f"c.template keep_slopes<L{i}>(z{i});"] if self.has_slope(i) else []
            if i < last:
                calls += [f"u32 a{i + 1}[L{i + 1}::K / 16][4];", f"c.template hand_on<L{i}, L{i + 1}>(z{i}, a{i + 1});"]
                calls += [f"c.put(c.own + L{i + 1}::state_at, a{i + 1});"]
        if self.has_slope(last):
            calls += [f"float d[L{last}::N / 2];", "c.widened(y, d);", f"c.template steepen<L{last}>(d, y);"]
        for i in reversed(range(last + 1)):
            behind = "y" if i == last else f"g{i}"
            calls += [f"float d{i}[L{i}::K / 2];", f"c.template layer<L{i}>({behind}, sums.s{i}, d{i}, turn);"]
            if i:
                calls += [f"u32 g{i - 1}[L{i - 1}::N / 16][4];"]
                pass_on = "steepen" if self.has_slope(i - 1) else "narrowed"
                calls += [f"c.template {pass_on}<L{i - 1}>(d{i}, g{i - 1});"]
        calls += ["c.template store<L0::P, identity>(c.params.y, d0, tile);"]
        given = f"const C& c, u32 (&a0)[L0::K / 16][4], u32 (&y)[L{last}::N / 16][4], AllSums<C>& sums"
        body += function(f"tile({given}, i64 tile, int& turn)", calls)

        adding = [f"c.template store_sums<L{i}>(sums.s{i});" for i in range(last + 1)]
        body += function("run(const C& c)", ["AllSums<C> sums;", "c.all_tiles(sums);", *adding])
        return self.told_layers(lines) + body


def tile(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu) -> DenseBackward | None:
    """None where this family has no kernel."""
    if any(layer.parameters for layer in layers):  # whose gradients are sums over everything
        return None
    if dtype not in ("bfloat16", "float16") or tile_forward(layers, dtype, batch, gpu) is None:
        return None
    for packs, groups in itertools.product((True, False), (4, 3, 2, 1)):
        plan = DenseBackward(tuple(layers), dtype, groups, gpu, packs=packs)
        if plan.shared <= gpu.shared and plan.registers_needed <= min(255, 65536 // plan.threads // 8 * 8):
            return timed(plan, batch)
    return None
