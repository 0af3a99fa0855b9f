"""What is faster for a recurrent layer on a GPU, its fused kernels or PyTorch's own op: predicted, for auto."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from factorlayer.autograd.layer_ops import gpu_limits, predicted_us
from factorlayer.autograd.recurrent_ops import text_for, through_text
from factorlayer.autograd.runtime import dtype_name, tf32_allowed
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.recurrent.recurrent import STEPS
from factorlayer.maths.recurrence import Recurrence
from factorlayer.plan.library import Call
from factorlayer.plan.recurrent_library import RowsProduct, RowsSum, Sequences, Unit, alike, around, op_us, steps_us


class Allowed(NamedTuple):
    """Whether float32 may be TF32: in the steps, and in the products of all steps around them."""

    steps: bool
    products: bool


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


def why_slower(
    recurrence: Recurrence, unit: Unit, given: Sequences, training: bool, x: Tensor, switch: str
) -> str | None:
    """Why PyTorch's op for dense units is predicted to take less than the fused implementation, or None; `recurrence`
    is one cell's, which may be TF32 by that one of PyTorch's switches."""
    if not x.is_cuda or is_compiling():
        return None
    tf32 = Allowed(tf32_allowed(switch), tf32_allowed())
    steps = alike(given.steps)
    rows = alike(given.rows) if given.packed else given.sequences * steps
    given = Sequences(given.sequences, steps, rows, given.packed)
    asked = unit, given, training, x.dtype, tf32, x.get_device()
    return _predicted(text_for(recurrence, x, switch), *asked).why_slower


@functools.lru_cache(4096)
def _predicted(
    text: str,
    unit: Unit,
    given: Sequences,
    training: bool,
    dtype: torch.dtype,
    tf32: Allowed,
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
        step_us, step_back_us = steps_us(unit, name, tf32.steps, given, training, gpu)
        return Prediction(us, given.steps * (step_us + step_back_us * training), training, given)
    starts = (1 + training) * (gpu.rates.behind_us + gpu.rates.wait_us)
    beside = sum(_around_us(call, dtype, tf32, device, gpu) for call in around(unit, given, training))
    us = len(unit.features) * (us + starts) + beside
    return Prediction(us, op_us(unit, name, tf32.steps, given, training, gpu), training, given)


def _around_us(call: Call, dtype: torch.dtype, tf32: Allowed, device: int, gpu: Gpu) -> float:
    """Of an operation around the steps: sums are made by our kernels, and products as recurrent_ops.py has them."""
    is_float = dtype == torch.float32
    of_pytorch = "tf32" if is_float and tf32.products else dtype_name(dtype)
    if isinstance(call, RowsSum):
        return predicted_us(call.text, call.samples, dtype, device)
    if not isinstance(call, RowsProduct):
        return call.us(of_pytorch, gpu)
    text = call.text + "; tf32" * (is_float and (tf32.steps or tf32.products))
    ours = predicted_us(text, call.samples, dtype, device)
    return ours if is_float and not tf32.products else min(ours, call.us(of_pytorch, gpu))
