"""Passes that make the gradient of what an activation is given from that and grad_y, or from grad_y and its result: for
slopes.cuh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from factorlayer.activations.written import gradient, gradient_by_result
from factorlayer.device.code import ELEMENT, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass

EACH = 4  # accesses of a thread that are on their way at once, of either


@dataclass(frozen=True)
class Slopes(Pass):
    """The pass that multiplies what comes back by the slopes of an activation, of all elements."""

    features: int
    activation: str
    dtype: str
    batch: int
    gpu: Gpu
    through: bool = False  # from the result

    threads = 256
    shared = 0
    blocks_per_sm = 0  # as many as there is work

    @property
    def units_per_sample(self) -> int:
        return self.features

    @property
    def units_per_block(self) -> int:
        return self.threads * EACH * 16 // self.size

    @property
    def output_bytes(self) -> int:
        return self.features * self.size

    @property
    def us(self) -> float:
        """Predicted microseconds."""
        return 1.7 + 3 * self.batch * self.output_bytes / (0.9 * self.gpu.memory_bytes * self.gpu.sms)

    def us_of(self, batch: int) -> float:
        return replace(self, batch=batch).us

    def __str__(self) -> str:
        return f"slopes: of {self.features} activations{', from their results' if self.through else ''}, times grad_y"

    @property
    def told(self) -> list[str]:
        told = {"BESIDE": 0, "FEATURES": self.features, "THREADS": self.threads, "EACH": EACH}
        made = (gradient_by_result if self.through else gradient)(self.activation, self.dtype, "Gradient")
        return [*constants({"Element": ELEMENT[self.dtype], **told}), made]
