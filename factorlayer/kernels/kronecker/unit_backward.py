"""All gradients of two factors of 16 bits, up to 64 x 64, in one pass: unit_backward.cuh, Hopper's matrix
unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, hopper_headers, kernel, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import PART_BYTES, BlockSums
from factorlayer.kernels.weights import can_be_made, weight_functions
from factorlayer.kernels.work import Mode, OfTwoModes, as_two, round_up

LARGEST = 64
LEAST = 24  # of a size that fills the matrix unit
BARRIER_BYTES = 1024
SLAB = 64 * 128  # bytes of a matrix, whatever its sizes are
START_US = 4.0  # with the weights and the first unit on their way
UNIT_US = 0.9  # of a group, from a unit's first product to its store


@dataclass(frozen=True)
class UnitBackward(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0
    singles: int = 0  # sums of each block that a pass before has made, and grad_y, where this one's result will lie

    groups = 3
    slots = 6
    ahead = 2  # units on their way from memory; more are slower
    copy_registers, registers = 32, 160  # of a thread, by what its warpgroup does
    size = 2

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def weights(self) -> int:
        return self.singles + super().weights

    def is_others(self, missing: int, padding: int) -> bool:
        return not padding and missing == self.most * self.singles * PART_BYTES[self.dtype]

    @property
    def shared(self) -> int:
        return BARRIER_BYTES + (2 + 2 * self.slots + self.groups) * SLAB

    def __str__(self) -> str:
        p0, p1, q0, q1 = self.sizes
        return (
            f"unit pair, backward: {p1}→{q1}, {p0}→{q0}, {self.groups} warpgroups, {self.slots} slots, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = dict(zip(("P0", "P1", "Q0", "Q1"), self.sizes, strict=True))
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "SLOTS": self.slots, "AHEAD": self.ahead}
        numbers |= {"GROUPS": self.groups, "COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}
        numbers |= {"GRAD": sum(len(mode.parts) for mode in self.modes), "SINGLES": self.singles}
        lines = [f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        for mode, letter in zip(self.modes, "ab", strict=True):
            lines += weight_functions(mode, letter, self.dtype)
        _, p1, q0, q1 = (round_up(n, 16) for n in self.sizes)
        products = "".join(wgmma(self.dtype, n, turned=True) for n in sorted({p1, q0, q1}))
        code = hopper_headers(products, "slabs.cuh", "splits.cuh", "sums.cuh", "unit_products.cuh", "unit_backward.cuh")
        return kernel(code, name, "UnitBackward", lines, self.threads, asks=() if self.singles else self.asks)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> UnitBackward | None:
    """The fastest by prediction, of all ways to take neighbours as two; None where this family has no kernel."""
    if not gpu.wgmma or dtype not in ("bfloat16", "float16"):
        return None
    plans = []
    for both in as_two(modes):
        plan = UnitBackward(both, dtype, outer, gpu)
        _, p1, _, q1 = plan.sizes
        fits = min(plan.sizes) >= LEAST and max(plan.sizes) <= LARGEST and plan.shared <= gpu.shared
        if fits and p1 % 8 == 0 and q1 % 8 == 0 and all(can_be_made(mode, dtype) for mode in both):
            plans.append(replace(plan, us=_time(plan, batch)))
    return min(plans, key=lambda plan: plan.us, default=None)


def _time(plan: UnitBackward, batch: int) -> float:
    """Predicted microseconds."""
    p0, p1, q0, q1 = plan.sizes
    memory = (2 * p0 * p1 + q0 * q1) * plan.size / (0.9 * plan.gpu.memory_bytes)
    _, p1, q0, q1 = (round_up(n, 16) for n in plan.sizes)
    products = 64 * (3 * p1 * q1 + 2 * q0 * q1) / (0.4 * plan.gpu.flops[plan.dtype])
    units = math.ceil(batch * plan.units_per_sample / plan.gpu.sms)
    ends = plan.weights * PART_BYTES[plan.dtype] / plan.gpu.l2_bytes
    return START_US + max(units * max(memory, products), UNIT_US * math.ceil(units / plan.groups)) + ends
