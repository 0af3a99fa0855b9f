"""All gradients of one dense layer with its activation, in tf32: what csrc/engine/layer_backward32.cuh is told."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from factorlayer.chain import Chain
from factorlayer.dense import write
from factorlayer.dense_backward import START_US, DenseBackward
from factorlayer.expression import slope
from factorlayer.gpu import Gpu
from factorlayer.resident import round_up

MOST = 128  # inputs, and outputs
SAMPLES_BYTES = 64 * 4  # of a feature
OTHER_REGISTERS = 34
WAIT_US = 2.0  # of 64 samples that nothing runs beside: to load them, for barriers and for products to end


@dataclass(frozen=True)
class LayerBackward32(DenseBackward):
    """A pass, tiled. Its warpgroups have sums of their own, or two TOGETHER have those of the weight."""

    together: bool = False

    headers = ("packed.cuh", "dense.cuh", "sums.cuh", "layer_backward32.cuh")

    def turned(self, i: int) -> bool:
        """Two warpgroups have 64 rows each, so there have to be more than those of the first."""
        k, n = self.columns(i)
        return k > 64 and (n <= 64 or n < k) if self.together else super().turned(i)

    @functools.cached_property
    def tiles(self) -> tuple[int, int]:
        """Of the weight's sums, rows for all warpgroups in 64s, and columns."""
        k, n = self.columns(0)
        left, right = (k, n) if self.turned(0) else (n, k)
        return -(-left // 64), right

    @functools.cached_property
    def at(self) -> dict[str, int]:
        """Where in shared memory what is behind the weight and the bias begins, and where all ends."""
        k, n = self.columns(0)
        back = self.places[-1][0]
        ones = back + -(-n // 32) * k * 128
        slabs = ones + 1024
        of_x, of_g = (SAMPLES_BYTES * round_up(columns, 64) for columns in (k, n))
        barriers = slabs + self.groups * of_x + (1 if self.together else self.groups) * of_g
        end = barriers + 16 if self.together else barriers
        return {"back_at": back, "ones_at": ones, "slabs_at": slabs, "barriers_at": barriers, "all": end}

    @property
    def shared(self) -> int:
        return self.at["all"]

    @property
    def taken(self) -> tuple[int, ...]:
        return ()  # 32-bit elements go alone where they must: two weights leave no room to pack rows

    @property
    def stored(self) -> tuple[int, ...]:
        return ()

    @property
    def registers_needed(self) -> int:
        """Of a thread, about: sums of gradients, and x, grad_y and the layer's sums, or what x gets, as they pass."""
        k, n = self.columns(0)
        rows, right = self.tiles
        bias = 4 * -(-n // 64) if self.layers[0].bias else 0
        if self.together:
            return right // 2 + min(bias, 4) + max(k // 2 + n // 2, n, k) + OTHER_REGISTERS
        return rows * right // 2 + bias + max(k // 2 + n, k + n // 2) + OTHER_REGISTERS

    def __str__(self) -> str:
        p, q = self.sizes[0]
        how = "2 warpgroups together" if self.together else f"{self.groups} warpgroups"
        return f"dense layer, backward: {p}→{q} in tf32, {how}, {self.shared} bytes of shared memory"

    def struct(self, i: int) -> dict[str, int | bool | str]:
        dropped = ("state_at", "slope_at", "sums_at", "bias_sums_at")
        return {key: value for key, value in super().struct(i).items() if key not in dropped}

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = {"GRAD_Y": self.tensors, "SUMS": self.weights, **self.at}
        lines = [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        lines += [f"static constexpr bool TOGETHER = {str(self.together).lower()};"]
        lines += [slope(self.layers[0].activation, "Slope0")]
        return write(self, name, "LayerBackward32", lines, [], {8, *self.columns(0)})


def tile(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu) -> LayerBackward32 | None:
    """None where this family has no kernel."""
    (layer, *further), (c, *_) = layers, layers[0].contractions
    if further or gpu.arch != 90 or dtype != "tf32":
        return None
    if not layer.is_dense or layer.rank > 1 or layer.parameters or max(c.p, c.q) > MOST:
        return None
    for groups, together in ((4, False), (3, False), (2, False), (2, True)):
        plan = LayerBackward32((layer,), dtype, groups, gpu, together=together)
        fits = plan.registers_needed <= min(255, 65536 // plan.threads // 8 * 8)
        if fits and plan.shared <= gpu.shared and (not together or plan.tiles[0] == 2):
            return replace(plan, us=_time(plan, batch))
    return None


def _time(plan: LayerBackward32, batch: int) -> float:
    """Predicted microseconds."""
    tiles = math.ceil(batch / (64 * plan.gpu.sms))
    (p, q), (k, n), has_slope = plan.sizes[0], plan.columns(0), plan.has_slope(0)
    rows, right = plan.tiles
    multiply_adds = 64 * ((1 + has_slope) * k * n + 64 * rows * right)
    products = 2 * multiply_adds / (0.3 * plan.gpu.flops["bfloat16"])
    others = 64 * (n * (16 if has_slope else 4) + k * 4) / 32 / plan.gpu.instructions
    memory = 64 * (2 * p + q) * plan.size / (0.9 * plan.gpu.memory_bytes)
    alone = WAIT_US + products + others
    return START_US + max(tiles * max(products + others, memory), alone * math.ceil(tiles / plan.groups))
