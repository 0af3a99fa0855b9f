"""All gradients of two large factors of 16 bits in one pass: large_backward.cuh, Hopper's matrix unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, hopper_headers, kernel, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import PART_BYTES, BlockSums
from factorlayer.kernels.weights import can_be_made, weight_functions
from factorlayer.kernels.work import Mode, OfTwoModes, as_two, round_up

LARGEST = 128
LEAST = 24  # of a size that fills the matrix unit
BARRIER_BYTES = 1024
STATE_BYTES = 128 * 128 * 2  # whatever the sizes are
START_US = 4.0  # with the weights and the first unit on their way
UNIT_US = 1.3  # of waits and conversions, which nothing hides


@dataclass(frozen=True)
class LargeBackward(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0

    slots = 2
    threads = 384
    shared = BARRIER_BYTES + (3 + 2 * slots) * STATE_BYTES

    @property
    def size(self) -> int:
        return 2

    def __str__(self) -> str:
        p0, p1, q0, q1 = self.sizes
        return f"large pair, backward: {p1}→{q1}, {p0}→{q0}, {self.shared} bytes of shared memory"

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = dict(zip(("P0", "P1", "Q0", "Q1"), self.sizes, strict=True))
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "SLOTS": self.slots}
        numbers |= {"GRAD": sum(len(mode.parts) for mode in self.modes)}
        lines = [f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        for mode, letter in zip(self.modes, "ab", strict=True):
            lines += weight_functions(mode, letter, self.dtype)
        _, p1, q0, q1 = (round_up(n, 16) for n in self.sizes)
        products = "".join(wgmma(self.dtype, n, turned=True) for n in sorted({p1, q0, q1}))
        code = hopper_headers(products, "slabs.cuh", "sums.cuh", "large_backward.cuh")
        return kernel(code, name, "LargeBackward", lines, self.threads, asks=self.asks)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> LargeBackward | None:
    """None where this family has no kernel, or warps by themselves need no more products."""
    if not gpu.wgmma or dtype not in ("bfloat16", "float16") or gpu.shared < LargeBackward.shared:
        return None
    for both in as_two(modes):
        plan = LargeBackward(both, dtype, outer, gpu)
        p0, p1, _, q1 = plan.sizes
        fits = min(plan.sizes) >= LEAST and max(plan.sizes) <= LARGEST and min(p0, q1) > LARGEST // 2
        if fits and p1 % 8 == 0 and q1 % 8 == 0 and all(can_be_made(mode, dtype) for mode in both):
            return replace(plan, us=_time(plan, batch))
    return None


def _time(plan: LargeBackward, batch: int) -> float:
    """Predicted microseconds."""
    p0, p1, q0, q1 = plan.sizes
    memory = (2 * p0 * p1 + q0 * q1) * plan.size / (0.9 * plan.gpu.memory_bytes)
    _, p1, q0, q1 = (round_up(n, 16) for n in plan.sizes)
    products = 128 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * plan.gpu.flops[plan.dtype])
    units = math.ceil(batch * plan.units_per_sample / plan.gpu.sms)
    ends = plan.weights * PART_BYTES[plan.dtype] / plan.gpu.l2_bytes
    return START_US + units * max(memory, products + UNIT_US) + ends
