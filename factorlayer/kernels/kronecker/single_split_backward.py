"""Both gradients of one factor of 32 bits, up to 128 x 128, in one pass: single_split_backward.cuh, where
Hopper's matrix unit multiplies bf16 pieces of floats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.code import constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, BlockSums
from factorlayer.kernels.kronecker.warpgroups import BARRIER_BYTES, LEAST, PIECES, PRODUCTS, SLAB
from factorlayer.kernels.passes import timed
from factorlayer.kernels.product.single_backward import OfOneFactor
from factorlayer.maths.spec import Contraction

BLOCK = 64  # rows and columns of what is multiplied at once, and a unit's
START_US = 3.2  # with the weight and the first unit on their way
UNIT_US = 1.0  # of waits, splitting and sums, where no other group's products hide them


@dataclass(frozen=True)
class SingleSplitBackward(OfOneFactor, BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    contraction: Contraction
    dtype: str
    gpu: Gpu
    us: float = 0.0

    threads = 384
    copy_registers, registers = 88, 208  # of a thread, by what its warpgroup does
    products = wgmma("bfloat16", {BLOCK}, turned=True)

    @property
    def units_per_sample(self) -> int:
        c = self.contraction
        return c.outer * c.inner // BLOCK

    @property
    def parts(self) -> int:
        """Blocks of p, with a warpgroup each, and of q."""
        return -(-self.contraction.p // BLOCK)

    @property
    def pieces(self) -> int:
        return PIECES[self.dtype]

    @property
    def shared(self) -> int:
        groups = 2 // self.parts
        return BARRIER_BYTES + (self.parts**2 + groups * 2 * self.parts) * self.pieces * SLAB

    def us_of(self, batch: int) -> float:
        c = self.contraction
        memory = BLOCK * (2 * c.p + c.q) * self.size / (0.85 * self.gpu.memory_bytes)
        products = 2 * BLOCK**3 * self.parts**2 * PRODUCTS[self.pieces] / (0.3 * self.gpu.flops["bfloat16"])
        units = math.ceil(batch * self.units_per_sample / self.gpu.sms)
        ends = self.weights * SUM_BYTES[self.dtype] / self.gpu.l2_bytes
        waits = (products + UNIT_US) * math.ceil(units * self.parts / 2)
        return START_US + max(units * max(memory, products), waits) + ends

    @property
    def details(self) -> str:
        return f"{self.contracted}, {self.pieces} pieces"

    @property
    def told(self) -> list[str]:
        c = self.contraction
        numbers = {"P": c.p, "Q": c.q, "INNER": c.inner, "UNITS_PER_SAMPLE": self.units_per_sample, "GRAD": 1}
        numbers |= {"PIECES": self.pieces, "COPY_REGISTERS": self.copy_registers, "REGISTERS": self.registers}
        return constants(numbers | {"BY_COLUMNS": self.by_columns})


def tile(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> SingleSplitBackward | None:
    """None where this family has no kernel."""
    c = contraction
    if not gpu.wgmma or dtype not in PIECES or min(c.p, c.q) < LEAST or max(c.p, c.q) > 2 * BLOCK:
        return None
    if (c.inner if c.inner > 1 else c.outer) % BLOCK or (c.inner == 1 and (c.p % 4 or c.q % 4)):
        return None
    plan = SingleSplitBackward(c, dtype, gpu)
    if plan.parts != -(-c.q // BLOCK) or plan.shared > gpu.shared:
        return None
    return timed(plan, batch)
