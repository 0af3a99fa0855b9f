"""All gradients of two factors of 32 bits, up to 64 x 64, in one pass: split_pair_backward.cuh, where
Hopper's matrix unit multiplies bf16 pieces of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import hopper_headers, kernel, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import PART_BYTES, BlockSums
from factorlayer.kernels.weights import weight_functions
from factorlayer.kernels.work import Mode, OfTwoModes, as_two, round_up

LARGEST = 64
LEAST = 24  # of a size that fills the matrix unit
PIECES = {"float32": 3, "tf32": 2}
PRODUCTS = {3: 6, 2: 3}  # of pieces, that count
BARRIER_BYTES = 1024
SLAB = 64 * 128  # bytes of a piece of a state
START_US = 4.0  # with the weights and the first unit on their way
UNIT_US = 1.3  # of waits and splitting, beside which the other groups' products are made


@dataclass(frozen=True)
class SplitPairBackward(OfTwoModes, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0
    singles: int = 0  # sums of each block that a pass before has made, and grad_y, where this one's result will lie

    groups = 2
    copy_registers, registers = 104, 200  # of a thread, by what its warpgroup does
    size = 4

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def weights(self) -> int:
        return self.singles + super().weights

    @property
    def pieces(self) -> int:
        return PIECES[self.dtype]

    def is_others(self, missing: int, padding: int) -> bool:
        return not padding and missing == self.most * self.singles * PART_BYTES[self.dtype]

    @property
    def shared(self) -> int:
        return BARRIER_BYTES + (2 + 3 * self.groups) * self.pieces * SLAB

    def __str__(self) -> str:
        p0, p1, q0, q1 = self.sizes
        return (
            f"split pair, backward: {p1}→{q1}, {p0}→{q0}, {self.groups} warpgroups, {self.pieces} pieces, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = dict(zip(("P0", "P1", "Q0", "Q1"), self.sizes, strict=True))
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "PIECES": self.pieces, "GROUPS": self.groups}
        numbers |= {"COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}
        numbers |= {"GRAD": sum(len(mode.parts) for mode in self.modes), "SINGLES": self.singles}
        lines = [
            "using Element = float;",
            *(f"static constexpr int {key} = {value};" for key, value in numbers.items()),
        ]
        for mode, letter in zip(self.modes, "ab", strict=True):
            lines += weight_functions(mode, letter, self.dtype)
        _, p1, q0, q1 = (round_up(n, 16) for n in self.sizes)
        products = "".join(wgmma("bfloat16", n, turned=True) for n in sorted({p1, q0, q1}))
        code = hopper_headers(products, "splits.cuh", "sums.cuh", "split_pair_backward.cuh")
        return kernel(code, name, "SplitPairBackward", lines, self.threads, asks=() if self.singles else self.asks)


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> SplitPairBackward | None:
    """The fastest by prediction, of all ways to take neighbours as two; None where this family has no kernel."""
    if not gpu.wgmma or dtype not in PIECES:
        return None
    plans = []
    for both in as_two(modes):
        plan = SplitPairBackward(both, dtype, outer, gpu)
        _, p1, _, q1 = plan.sizes
        fits = min(plan.sizes) >= LEAST and max(plan.sizes) <= LARGEST and plan.shared <= gpu.shared
        if fits and p1 % 4 == 0 and q1 % 4 == 0:
            plans.append(replace(plan, us=_time(plan, batch)))
    return min(plans, key=lambda plan: plan.us, default=None)


def _time(plan: SplitPairBackward, batch: int) -> float:
    """Predicted microseconds."""
    p0, p1, q0, q1 = plan.sizes
    memory = (2 * p0 * p1 + q0 * q1) * plan.size / (0.9 * plan.gpu.memory_bytes)
    p0, p1, q0, q1 = (round_up(n, 16) for n in plan.sizes)
    # The left operand is read as long as 32 columns are multiplied, the right one half as long as its own are.
    of_p1, of_q0, of_q1 = (max(n, 32 + n / 2) for n in (p1, q0, q1))
    count = 64 * ((q0 + p1) * of_q1 + q1 * of_q0 + (p0 + q1) * of_p1) * PRODUCTS[plan.pieces]
    products = count / (0.3 * plan.gpu.flops["bfloat16"])
    units = math.ceil(batch * plan.units_per_sample / plan.gpu.sms)
    ends = plan.weights * PART_BYTES[plan.dtype] / plan.gpu.l2_bytes
    waits = (products + UNIT_US) * math.ceil(units / plan.groups)
    return START_US + max(units * max(memory, products), waits) + ends
