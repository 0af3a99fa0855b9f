"""Wide passes of untied groups whose weights stay in shared memory, of rows that the copy engine reads by a map:
csrc/engine/mapped_resident.cuh, in 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device import headers, kernel, wgmma
from factorlayer.gpu import Gpu
from factorlayer.streamed import Product
from factorlayer.wide import PRODUCERS, Wide

ROWS = 64  # of a warpgroup
STEP = 32  # columns of a tile: a thread has eight side by side
LARGEST, LARGEST_ACTIVATED = 256, 192  # columns of a tile: activations need registers
MOST_STAGES = 6
LEAST_TILES = 4  # of a block, which are worth its weights


@dataclass(frozen=True)
class MappedResident(Wide):
    """A pass, tiled: tiles of 64 x n, for each n of each group a block of the grid's other direction. `us` is the time
    predicted."""

    warpgroups = 2  # that multiply
    registers = 224, 56

    @property
    def stage_bytes(self) -> int:
        """Of rows of x, with all their k's."""
        return self.chunks * ROWS * 128

    @property
    def weight_bytes(self) -> int:
        return self.chunks * self.n * 128

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (self.gpu.shared - 1024 - self.weight_bytes) // (self.stage_bytes + 16))

    @property
    def shared(self) -> int:
        """With what it takes to begin at a multiple of 1024."""
        return 1024 + self.weight_bytes + self.stages * (self.stage_bytes + 16)

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + PRODUCERS

    @property
    def split(self) -> int:
        return self.product.groups * -(-self.product.contraction.q // self.n)

    @property
    def units_per_block(self) -> int:
        return ROWS

    @property
    def maps(self) -> tuple[str, ...]:
        """What csrc/runtime reads, of x."""
        p, row = self.product.contraction.p, self.product.x_features
        strides = (2 * n for n in (p, row, row, row))
        return (" ".join(map(str, ("x u16", p, self.product.groups, 1, 1, 1, *strides, 64, 1, ROWS, 1, 1))),)

    def __str__(self) -> str:
        c = self.product.contraction
        return (
            f"wide: {c.p}→{c.q} by rows, {self.n} columns of the weights of {self.product.groups} groups resident, "
            f"{self.warpgroups} warpgroups, {self.stages} stages of {ROWS} rows, {self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        code = headers("wgmma.cuh", "halves.cuh", "mixing.cuh", "wide.cuh", "mapped_resident.cuh")
        lines = [*self.lines(), f"static constexpr int WARPGROUPS = {self.warpgroups};"]
        code += wgmma(self.product.dtype, self.n)
        return kernel(code, name, "MappedResident", lines, self.threads, maps=True)


def tile(product: Product, batch: int, gpu: Gpu) -> MappedResident | None:
    """The fastest tiling by prediction; None where this family has no kernel."""
    c, one = product.contraction, product.terms == product.terms_out == product.x_step == 1
    if gpu.arch != 90 or product.size != 2 or c.tied or not one or product.reads_beside or product.slabs:
        return None
    if c.p % 8 or c.q % 8 or (product.fast > 1 and product.b % 8):
        return None
    plans = []
    largest = LARGEST if product.activation == "identity" else LARGEST_ACTIVATED
    for n in range(STEP, largest + 1, STEP):
        plan = MappedResident(product, 1, n, 1, 8, batch, gpu)
        few = plan.split > gpu.sms or -(-batch // ROWS) < LEAST_TILES * (gpu.sms // plan.split)
        if not few and plan.stages >= 3 and plan.store == 16 and n < c.q + STEP:
            plans.append(replace(plan, us=_time(plan)))
    return min(plans, key=lambda plan: plan.us, default=None)


def _time(plan: MappedResident) -> float:
    """Predicted microseconds: warpgroups' products hide each other's stores."""
    product, c, gpu = plan.product, plan.product.contraction, plan.gpu
    each = math.ceil(math.ceil(plan.batch / ROWS) / (gpu.sms // plan.split))  # tiles of a block
    products = ROWS * plan.n * c.p / (0.4 * gpu.flops[product.dtype])
    read = ROWS * c.p * 2 / 55e3  # from L2
    alone = products + ROWS * plan.n * 2 / 30e3 + 0.5
    memory = 1.15 * plan.batch * (product.x_features + product.y_features) * 2 / (gpu.memory_bytes * gpu.sms)
    parts = -(-c.q // plan.n)  # of a group's columns, which each read x, from L2
    memory += (parts - 1) * plan.batch * product.x_features * 2 / (gpu.l2_bytes * gpu.sms)
    busy = each * max(products, read, alone / plan.warpgroups)
    return 2.0 + plan.weight_bytes / 50e3 + max(busy, memory) + 0.1 * min(busy, memory)
