"""Slopes of all steps of a gated recurrent unit: what recurrent_slopes.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.activations.written import slope
from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass, timed
from factorlayer.kernels.recurrent.recurrent import functions_of
from factorlayer.maths.recurrence import Recurrence

THREADS = 256
READ, WRITTEN = 7, 5  # of a feature


@dataclass(frozen=True)
class RecurrentSlopes(Pass):
    """A pass, whose samples are rows."""

    recurrence: Recurrence
    dtype: str
    gpu: Gpu
    us: float = 0.0

    threads, shared = THREADS, 0
    units_per_sample, units_per_block, blocks_per_sm = 1, 1, 8
    title, details = "recurrent, slopes", "of all steps"

    def us_of(self, batch: int) -> float:
        moved = batch * self.recurrence.hidden * (READ + WRITTEN) * self.size
        return self.gpu.rates.behind_us + moved / (self.gpu.memory_bytes * self.gpu.sms)

    @property
    def told(self) -> list[str]:
        chain = self.recurrence.chain
        told: Told = {
            "Element": ELEMENT[self.dtype],
            "THREADS": THREADS,
            "HIDDEN": chain.out_features,
            "HAS_BIAS": chain.bias,
        }
        told |= {"RESET_BEFORE": self.recurrence.reset == "before", "kInputs": 0}
        return [*constants(told), *functions_of(chain, self.dtype), slope(chain.activation, self.dtype, "Slope")]


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> RecurrentSlopes:
    plan = RecurrentSlopes(recurrence, dtype, gpu)
    return timed(plan, batch)
