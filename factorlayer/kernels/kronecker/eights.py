"""Passes of five factors of 8 x 8 in float from sm_90 on: what eights.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker.small_float import Sizes, sizes_in, time_of
from factorlayer.kernels.work import OfWork, Work

SIZES = Sizes(8, 8, 8, 8, 8)
WARPS, ROWS = 16, 32  # of a warp
ROW_BYTES = 8 * 8 * 4
FEWEST_STAGED = ROWS // 2  # a warp's lanes ask for a line each of the others
# Weights in parts, a state, what lies between its slabs, what warps say of their numbers, what weights make of these
FIXED_BYTES = 5 * 32 * 16 + SIZES.rows * SIZES.row_bytes + 48 + 4 * WARPS + 5 * 4
BARRIER_BYTES = 8
MULTIPLY_ADDS = 23  # of an element, that would take as long as its products


@dataclass(frozen=True)
class Eights(OfWork):
    """A pass, tiled. `us` is the time predicted."""

    work: Work
    gpu: Gpu
    us: float = 0.0

    units_per_block = 1
    asks = ()
    threads = 32 * WARPS

    @property
    def staged(self) -> int:
        """Of a warp's rows, those that the copy engine brings."""
        room = (self.gpu.shared - FIXED_BYTES) // WARPS - BARRIER_BYTES
        return min(room // ROW_BYTES, ROWS - 1)

    @property
    def shared(self) -> int:
        return FIXED_BYTES + WARPS * (BARRIER_BYTES + self.staged * ROW_BYTES)

    @property
    def output_bytes(self) -> int:
        return 4 * self.work.outer * SIZES.size

    def us_of(self, batch: int) -> float:
        return time_of(SIZES, MULTIPLY_ADDS, 2, 1, batch * self.work.outer, self.gpu)

    @property
    def details(self) -> str:
        return f"{SIZES}, {self.staged} of {ROWS} rows staged"

    @property
    def told(self) -> list[str]:
        work = self.work
        numbers = {"FIRST": dict(work.steps)[0].parts[0][0], "UNITS_PER_SAMPLE": work.outer, "STAGED": self.staged}
        return constants({"Element": "float", **numbers}) + work.finish


def tile(work: Work, batch: int, gpu: Gpu) -> Eights | None:
    """None where this family has no kernel."""
    if not gpu.copy_engine or sizes_in(work) != SIZES:
        return None
    plan = Eights(work, gpu, time_of(SIZES, MULTIPLY_ADDS, 2, 1, batch * work.outer, gpu))
    return plan if plan.staged >= FEWEST_STAGED else None
