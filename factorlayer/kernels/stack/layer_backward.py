"""All gradients of one dense layer with its activation, and many weights: for layer_backward.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from factorlayer.activations.written import slope
from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import timed
from factorlayer.kernels.stack.dense_backward import SLAB, DenseBackward
from factorlayer.maths.chain import Chain

# 16 layers on one H200, beside products and instructions at their rates: a start, what a round waits, and what rows
# take that land to be taken apart between two barriers, while nothing else runs
START_US, ROUND_US, LANDED_US = 2.3, 0.4, 1.5
LEAST, MOST = 64, 128  # outputs, beyond the first and up to the second, and inputs up to the second


@dataclass(frozen=True)
class LayerBackward(DenseBackward):
    """A pass, tiled, whose warpgroups, two of them, share the weight's sums."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of each of the weight's two copies in shared memory, which differ in the order of inputs."""
        k, n = self.columns(0)
        return -(-k // 64) * n * 128

    @property
    def slabs_at(self) -> int:
        return 2 * self.weight_bytes + 1024 + 2048  # behind the bias and ones

    @property
    def shared(self) -> int:
        slabs = 2 * self.groups * SLAB * sum(-(-columns // 64) for columns in self.columns(0))
        return self.slabs_at + slabs + self.packed_bytes

    @property
    def taken(self) -> tuple[int, ...]:
        return ()  # a warpgroup's threads fetch its rows together

    @property
    def units_per_block(self) -> int:
        return 128

    def us_of(self, batch: int) -> float:
        rounds = math.ceil(batch / (128 * self.gpu.sms))
        (p, q), (k, n), has_slope = self.sizes[0], self.columns(0), self.has_slope(0)
        products = (2 + has_slope) * 2 * 128 * k * n / (0.6 * self.gpu.flops[self.dtype])
        slopes = 128 * n * 12 / 32 / self.gpu.instructions * has_slope
        memory = 128 * (2 * p + q) * self.size / (0.9 * self.gpu.memory_bytes)
        landed = sum(n for n in (p, q) if n % 4)
        apart = 2 * self.packing_us + 128 * landed * self.size / 512 * 12 / self.gpu.instructions
        apart += LANDED_US if landed else 0
        return START_US + rounds * max(products + slopes + apart + ROUND_US, memory)

    title = "dense layer, backward"

    @property
    def details(self) -> str:
        p, q = self.sizes[0]
        return f"{p}→{q}, 2 warpgroups side by side"

    def struct(self, i: int) -> dict[str, int | bool | str]:
        p, q = self.sizes[0]
        k, n = self.columns(0)
        told: dict[str, int | bool | str] = {"P": p, "Q": q, "K": k, "N": n, "WEIGHT": 0}
        told |= {"BIAS": 1 if self.layers[0].bias else -1, "weight_at": 0, "bias_at": 2 * self.weight_bytes}
        told |= {"FIRST": False, "LAST": False, "Slope": "struct Slope0", "TURNED": False}
        return told | {"sums_at": 0, "bias_sums_at": p * q}

    @property
    def told(self) -> list[str]:
        numbers = {"GRAD_Y": self.tensors, "SUMS": self.weights, "all": self.shared, "TOGETHER": 1}
        numbers |= {"dealt_at": self.weight_bytes, "ones_at": self.slabs_at - 2048, "slabs_at": self.slabs_at}
        return self.told_layers([*constants(numbers), slope(self.layers[0].activation, self.dtype, "Slope0")])


def tile(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu) -> LayerBackward | None:
    """None where this family has no kernel."""
    (layer, *further), (c, *_) = layers, layers[0].contractions
    if further or not gpu.wgmma or dtype not in ("bfloat16", "float16"):
        return None
    if not layer.is_dense or layer.parameters or not LEAST < c.q <= MOST or c.p > MOST:
        return None
    plan = LayerBackward((layer,), dtype, 2, gpu)
    return timed(plan, batch) if plan.shared <= gpu.shared else None
