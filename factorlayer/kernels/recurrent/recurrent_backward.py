"""Back through a gated recurrent unit, by slopes: what recurrent_backward.cuh is told, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.recurrent.recurrent import OF_TWO_BACK, Recurrent, issued_us, tilings
from factorlayer.maths.recurrence import GATES, Recurrence

STREAMS = 6  # of a step: the gradient of its output, slopes of three gates, reset, and what update leaves


@dataclass(frozen=True)
class RecurrentBackward(Recurrent):
    """A pass, tiled. Its stages contract the gradients of one gate by the turned weights."""

    title = "recurrent, backward"
    turned = goes_down = True

    @property
    def states(self) -> int:
        return 2 if len(self.stages) == 1 else 1

    @property
    def states_at_once(self) -> int:
        return GATES

    streams = STREAMS

    def _gates_us(self) -> float:
        return issued_us(self.pairs * OF_TWO_BACK, self.warps, self.gpu)

    @property
    def walk_at(self) -> int:
        return self.first_tensor + STREAMS - 1

    @property
    def functions(self) -> list[str]:
        return [f"static constexpr int kOutputs = {self.walk_at + 9};"]


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> RecurrentBackward | None:
    return fastest(tilings(RecurrentBackward, recurrence, dtype, batch, gpu))
