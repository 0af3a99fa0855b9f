"""Wide passes whose weights stay in shared memory: wide_resident.cuh, of few k's in 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.product.streamed import Product
from factorlayer.kernels.product.wide import MIXED, PRODUCERS, Wide

ROWS = 64  # of a warpgroup
STEP = 32  # columns of a tile: a thread has eight side by side
LARGEST, LARGEST_ACTIVATED = 256, 192  # columns of a tile: activations need registers
MOST_SLOTS = 4


@dataclass(frozen=True)
class WideResident(Wide):
    """A pass, tiled: tiles of 64 x n, for each n a block of the grid's other direction. `us` is the time predicted."""

    warpgroups = 2  # that multiply
    registers = 224, 56
    chunk_bytes = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of rows of x, with all their k's."""
        return self.chunks * ROWS * 128

    @property
    def weight_bytes(self) -> int:
        return self.chunks * self.n * 128

    @property
    def slots(self) -> int:
        return min(MOST_SLOTS, (self.gpu.shared - 1024 - self.weight_bytes) // (self.slot_bytes + 16))

    @property
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        return 1024 + self.weight_bytes + self.slots * (self.slot_bytes + 16)

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + PRODUCERS

    @property
    def split(self) -> int:
        return -(-self.product.contraction.q // self.n)

    @property
    def units_per_block(self) -> int:
        return ROWS

    def us_of(self, batch: int) -> float:
        return _time(replace(self, batch=batch))

    title = "wide"

    @property
    def details(self) -> str:
        c, before = self.product.contraction, "8→8 before, " if self.product.mixed >= 0 else ""
        held = f"{self.n} columns of the weight resident, {self.warpgroups} warpgroups"
        return f"{c.p}→{c.q} by rows, {before}{held}, {self.slots} slots of {ROWS} rows"

    @property
    def told(self) -> list[str]:
        return super().told + constants({"GROUPS_OF_WARPS": self.warpgroups})


def tile(product: Product, batch: int, gpu: Gpu) -> WideResident | None:
    """The fastest tiling by prediction; None where this family has no kernel."""
    c, one = product.contraction, product.groups == product.terms == product.terms_out == product.fast == 1
    if not gpu.wgmma or product.size != 2 or not product.by_rows or not one or product.reads_beside:
        return None
    if c.p % 8 or c.q % 8 or product.x_step > 1 or (product.mixed >= 0 and product.outer % MIXED):
        return None
    plans = []
    largest = LARGEST if product.activation == "identity" else LARGEST_ACTIVATED
    for n in range(STEP, largest + 1, STEP):
        plan = WideResident(product, 1, n, 1, 8, batch, gpu)
        if plan.slots >= 3 and plan.split <= gpu.sms and plan.store == 16:
            plans.append(replace(plan, us=_time(plan)))
    return fastest(plans)


def _time(plan: WideResident) -> float:
    """Predicted microseconds: warpgroups' products hide each other's stores."""
    product, gpu = plan.product, plan.gpu
    rows = plan.batch * product.outer
    each = math.ceil(math.ceil(rows / ROWS) / max(1, gpu.sms // plan.split))  # tiles of a block
    products = ROWS * plan.n * product.contraction.p / (0.4 * gpu.flops[product.dtype])
    read = ROWS * product.contraction.p * 2 / 55e3  # from L2
    alone = products + ROWS * plan.n * 2 / 30e3 + 0.5
    memory = 1.15 * (rows * (product.contraction.p + product.contraction.q) * 2) / (gpu.memory_bytes * gpu.sms)
    busy = each * max(products, read, alone / plan.warpgroups)
    return 3.0 + plan.weight_bytes / 50e3 + max(busy, memory) + 0.1 * min(busy, memory)
