"""Sums over samples, a bias's gradient from grad_y: column_sums.cuh, its threads and source."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.gradient import SUM_BYTES, TileSums

EACH = 8  # pieces of a thread that are on their way at once
BLOCKS = 4  # on a multiprocessor


@dataclass(frozen=True)
class ColumnSums(TileSums):
    """The pass that sums each feature over the samples."""

    features: int
    dtype: str
    batch: int
    gpu: Gpu

    threads = 256
    units_per_sample = 1
    blocks = BLOCKS

    @property
    def weights(self) -> int:
        return self.features

    @property
    def folds(self) -> int:
        """Samples of a row that 16 bytes divide."""
        piece = 16 // ELEMENT_BYTES[self.dtype]
        return piece // math.gcd(piece, self.features)

    @property
    def shared(self) -> int:
        return self.threads * 16 // ELEMENT_BYTES[self.dtype] * SUM_BYTES[self.dtype]

    @property
    def _pieces(self) -> int:
        return self.features * self.folds * ELEMENT_BYTES[self.dtype] // 16

    @property
    def lanes(self) -> int:
        return -(-self._pieces // -(-self._pieces // self.threads))

    @property
    def ways(self) -> int:
        return self.threads // self.lanes

    @property
    def tiles(self) -> int:
        return -(-self._pieces // self.lanes)

    @property
    def units_per_block(self) -> int:
        """Units that are worth a block: few samples are one block's."""
        return max(64 if self.folds == 1 else 0, self.folds * self.ways * EACH)

    @property
    def us(self) -> float:
        """Predicted microseconds."""
        bytes_read = self.batch * self.features * ELEMENT_BYTES[self.dtype]
        return 1.7 + bytes_read / (0.85 * self.gpu.memory_bytes * self.gpu.sms)

    def us_of(self, batch: int) -> float:
        return replace(self, batch=batch).us

    def __str__(self) -> str:
        return f"sums: of {self.features} features, {self.folds} samples a row, {self.ways} rows at once"

    @property
    def told(self) -> list[str]:
        told: Told = {"Element": ELEMENT[self.dtype], "Result": self.result, "FEATURES": self.features}
        told |= {"FOLD": self.folds}
        return constants(told | {"LANES": self.lanes, "WAYS": self.ways, "EACH": EACH})
