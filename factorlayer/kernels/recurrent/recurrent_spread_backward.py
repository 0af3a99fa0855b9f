"""Back through a gated recurrent unit whose dense recurrent matrix several blocks share, by slopes: what
recurrent_spread_backward.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.recurrent.recurrent_spread import ROUND_BACK_US, STREAMS, RecurrentSpread, tilings
from factorlayer.maths.recurrence import GATES, Recurrence


@dataclass(frozen=True)
class RecurrentSpreadBackward(RecurrentSpread):
    """A pass, tiled. What comes back to the products of all three gates is handed on, and summed together."""

    handed, summed = GATES, 1
    turned = goes_down = True
    round_us = ROUND_BACK_US
    title = "recurrent, spread, backward"

    @property
    def walk_at(self) -> int:
        return GATES + STREAMS - 1

    @property
    def functions(self) -> list[str]:
        return []


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> RecurrentSpreadBackward | None:
    return fastest(tilings(RecurrentSpreadBackward, recurrence, dtype, batch, gpu))
