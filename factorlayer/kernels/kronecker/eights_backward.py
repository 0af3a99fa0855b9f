"""All gradients of five factors of 8 x 8 in float, in one pass from sm_90 on: eights_backward.cuh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import BlockSums
from factorlayer.kernels.kronecker.small_float import Sizes, sizes_of, time_of
from factorlayer.kernels.work import Mode

SIZES = Sizes(8, 8, 8, 8, 8)
WARPS = 16
# A state; of each warp half of its columns of what comes back, and a cube of x; weights in parts
SHARED = 4 * SIZES.size + WARPS * (64 * 64 + 8 * 8 * 8 * 4) + 8 * sum(SIZES.weights)
MULTIPLY_ADDS = 92  # of an element, that would take as long as its products


@dataclass(frozen=True)
class EightsBackward(BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    units_per_sample: int
    gpu: Gpu
    us: float = 0.0

    dtype = "float32"
    threads = 32 * WARPS
    shared = SHARED
    weights = sum(SIZES.weights)

    @property
    def output_bytes(self) -> int:
        return 4 * self.units_per_sample * SIZES.size

    def us_of(self, batch: int) -> float:
        return time_of(SIZES, MULTIPLY_ADDS, 3, 1, batch * self.units_per_sample, self.gpu)

    @property
    def details(self) -> str:
        return f"{SIZES}, {WARPS} warps"

    @property
    def told(self) -> list[str]:
        return constants({"UNITS_PER_SAMPLE": self.units_per_sample})


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> EightsBackward | None:
    """None where this family has no kernel. `outer` is the size of what lies before the modes."""
    if dtype != "float32" or not gpu.copy_engine or gpu.shared < SHARED or sizes_of(modes) != SIZES:
        return None
    plan = EightsBackward(outer, gpu)
    return replace(plan, us=time_of(SIZES, MULTIPLY_ADDS, 3, 1, batch * outer, gpu))
