"""What is faster for a recurrent layer on a GPU, its fused kernels or PyTorch's own op: predicted, for auto."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from factorlayer.autograd.layer_ops import gpu_limits, predicted_us
from factorlayer.autograd.recurrent_ops import text_for, through_text
from factorlayer.autograd.runtime import dtype_name
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.recurrent.recurrent import STEPS
from factorlayer.maths.recurrence import Recurrence
from factorlayer.plan.recurrent_library import Sequences, Unit, around, op_us, steps_us

LEADING = 4  # bits of a number of steps, or of packed rows, that a choice depends on


@dataclass(frozen=True)
class Prediction:
    """The microseconds that both ways are predicted to take, for whole calls or for their steps alone."""

    fused_us: float
    op_us: float
    training: bool
    given: Sequences

    @functools.cached_property
    def why_slower(self) -> str | None:
        return f"it is {self}" if self.op_us < self.fused_us else None

    def __str__(self) -> str:
        doing = "training" if self.training else "inference"
        return (
            f"predicted: PyTorch's op {self.op_us:.1f} us, fused {self.fused_us:.1f} us, for {doing} with "
            f"{self.given.sequences} sequences of {self.given.steps} steps"
        )


def why_slower(recurrence: Recurrence, unit: Unit, given: Sequences, training: bool, x: Tensor) -> str | None:
    """Why PyTorch's op for dense units is predicted to take less than the fused implementation, or None; `recurrence`
    is one cell's."""
    if not x.is_cuda or is_compiling():
        return None
    tf32 = torch._C._get_fp32_precision_getter("cuda", "rnn") == "tf32"  # read as tf32_allowed does
    steps = _alike(given.steps)
    rows = _alike(given.rows) if given.packed else given.sequences * steps
    given = Sequences(given.sequences, steps, rows, given.packed)
    asked = unit, given, training, x.dtype, tf32, x.get_device()
    return _predicted(text_for(recurrence, x), *asked).why_slower


def _alike(n: int) -> int:
    """A number with all but its leading bits cleared, so that lengths which differ little from call to call share a
    prediction."""
    others = max(0, n.bit_length() - LEADING)
    return n >> others << others


@functools.lru_cache(4096)
def _predicted(
    text: str,
    unit: Unit,
    given: Sequences,
    training: bool,
    dtype: torch.dtype,
    tf32: bool,
    device: int,
) -> Prediction:
    gpu, name = Gpu(*gpu_limits(device)), dtype_name(dtype)
    kernels = [(text, given.sequences, given.steps / STEPS)]
    if training:
        kernels.append((f"{through_text(text)} | backward", given.sequences, given.steps / STEPS))
        kernels += [(f"{text} | slopes", given.rows, 1.0)] * unit.dense
    us = sum(share * predicted_us(asked, batch, dtype, device) for asked, batch, share in kernels)
    if not unit.dense:
        # The passes around the steps are not compared: multiplying structured matrices out for PyTorch's op, and
        # bringing gradients back to them, takes no less than their own passes.
        step_us, step_back_us = steps_us(unit, name, tf32, given, training, gpu)
        return Prediction(us, given.steps * (step_us + step_back_us * training), training, given)
    computed = "tf32" if Recurrence.parse(text).chain.tf32 and name == "float32" else name
    starts = (1 + training) * (gpu.rates.behind_us + gpu.rates.wait_us)
    us = len(unit.features) * (us + starts) + sum(call.us(computed, gpu) for call in around(unit, given, training))
    return Prediction(us, op_us(unit, name, tf32, given, training, gpu), training, given)
