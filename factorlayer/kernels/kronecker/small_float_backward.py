"""All gradients of four or five small square factors in float, in one pass: small_float_backward.cuh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from factorlayer.device.code import constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import BlockSums
from factorlayer.kernels.kronecker.small_float import Sizes, sizes_of, time_of
from factorlayer.kernels.work import Mode

MOST_THREADS = 256  # whose registers hold three times two modes
MULTIPLY_ADDS = 3  # for an element of a mode: back, its gradient, and forward again


@dataclass(frozen=True)
class SmallFloatBackward(BlockSums):
    """A pass, tiled. `us` is the time predicted."""

    sizes: Sizes
    units_per_sample: int
    gpu: Gpu
    us: float = 0.0

    dtype = "float32"

    @property
    def weights(self) -> int:
        """Elements of all modes' weights."""
        return sum(self.sizes.weights)

    @property
    def threads(self) -> int:
        return min(self.sizes.columns, MOST_THREADS)

    @property
    def shared(self) -> int:
        """Bytes of a block, with a row for each thread beside the state's."""
        return self.sizes.shared + self.threads * self.sizes.row_bytes

    @property
    def output_bytes(self) -> int:
        return 4 * self.units_per_sample * self.sizes.size

    def us_of(self, batch: int) -> float:
        return time_of(self.sizes, MULTIPLY_ADDS * sum(self.sizes.modes), 3, 1, batch * self.units_per_sample, self.gpu)

    @property
    def details(self) -> str:
        return f"{self.sizes}, {self.threads // 32} warps"

    @property
    def told(self) -> list[str]:
        numbers = self.sizes.constants(0, self.units_per_sample, self.threads)
        return numbers + constants({"GRAD": len(self.sizes.weights)})


def tile(modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu) -> SmallFloatBackward | None:
    """None where this family has no kernel. `outer` is the size of what lies before the modes."""
    sizes = sizes_of(modes) if dtype == "float32" else None
    if sizes is None or max(sizes.weights) > sizes.d * sizes.e:
        return None
    plan = SmallFloatBackward(sizes, outer, gpu)
    if plan.shared > gpu.shared:
        return None
    return replace(plan, us=time_of(sizes, MULTIPLY_ADDS * sum(sizes.modes), 3, 1, batch * outer, gpu))
