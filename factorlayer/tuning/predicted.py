"""What is predicted to be faster on a GPU where nothing was measured: the fused implementation, or the batched one.

The planner says what the kernels take that a layer would run, and plan/library.py what PyTorch's own operations take.
Both are asked once for all numbers of samples that round up to the same power of two and are whole eights, or are
none, so that what auto takes for a call depends on no other call; what the planner has said is kept in the cache beside
its plans.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from factorlayer.autograd.backward import step_texts
from factorlayer.autograd.layer_ops import cuda_ops, gpu_limits, kept_text, predicted_us
from factorlayer.autograd.runtime import class_of_batch, dtype_name
from factorlayer.autograd.stack_ops import MANY, known, runs_on_gpu, texts_of_run
from factorlayer.device.gpu import Gpu
from factorlayer.maths.chain import Chain
from factorlayer.plan.library import Ways

EIGHT = 8  # elements of 16 bits that are moved at once


@dataclass(frozen=True)
class Samples:
    """Numbers of samples that one choice is made for: those that round up to one power of two, of `bits`. PyTorch's
    products take odd ones by smaller pieces, as the samples lie side by side between two contractions of its own."""

    bits: int
    is_odd: bool  # no whole eights

    @property
    def asked(self) -> int:
        """The number that the choice is made for."""
        return max(1, 3 * (1 << self.bits) // 4) + self.is_odd

    def __str__(self) -> str:
        most = 1 << self.bits
        which = ", no multiples of 8" if self.is_odd else ""
        return f"{most // 2 + 1 if self.bits > 1 else 1} to {most} samples{which}"


def _likeness(batch: int) -> int:
    """A number that is the same for all numbers of samples that share one choice. It is no Samples, as every call asks
    for it."""
    bits = max(1, (batch - 1).bit_length())
    return 2 * bits + (batch > 2 * EIGHT and batch % EIGHT > 0)


def _samples(likeness: int) -> Samples:
    return Samples(likeness // 2, likeness % 2 > 0)


@dataclass(frozen=True)
class Prediction:
    """The microseconds that both implementations are predicted to take; infinitely many for kernels that cannot be
    had."""

    fused_us: float
    batched_us: float
    training: bool
    samples: Samples
    multiplied_out: bool = False  # whether batched multiplies the layer's matrix out

    @property
    def implementation(self) -> str:
        return "batched" if self.batched_us < self.fused_us < math.inf else "fused"

    @property
    def why_batched(self) -> str | None:
        return f"it is {self}" if self.implementation == "batched" else None

    def __str__(self) -> str:
        fused, batched = f"fused {self.fused_us:.1f} us", f"batched {self.batched_us:.1f} us"
        batched += " with its matrix multiplied out" if self.multiplied_out else ""
        times = f"{batched}, {fused}" if self.implementation == "batched" else f"{fused}, {batched}"
        doing = "training" if self.training else "inference"
        return f"predicted: {times}, for {doing} with {self.samples}"


def predicted(text: str, dtype: torch.dtype, device: int, batch: int, training: bool) -> Prediction:
    """The prediction for a layer's text, as the raw ops take it, on the GPU with the index `device`."""
    return _predicted(text, dtype, device, _likeness(batch), training)


def why_batched(text: str, dtype: torch.dtype, device: int, batch: int, training: bool) -> str | None:
    """Why auto takes the batched implementation, or None."""
    return predicted(text, dtype, device, batch, training).why_batched


@functools.lru_cache(4096)
def _predicted(text: str, dtype: torch.dtype, device: int, likeness: int, training: bool) -> Prediction:
    like = _samples(likeness)
    samples = like.asked
    asked = [(text, samples)]
    if training:
        ops, kept = cuda_ops(device, dtype), kept_text(text, dtype, device, samples)
        asked = step_texts(text, kept, ops.fits_of(samples), samples, ops.us)
    fused_us = sum(predicted_us(*each, dtype, device) for each in asked)
    batched = _batched(text, dtype, device, likeness, training)
    return Prediction(fused_us, batched.us, training, like, batched.multiplies)


def predicted_stack(
    text: str, dtype: torch.dtype, device: int, batch: int, training: bool, joined: bool = False
) -> Prediction:
    """The prediction for layers one behind another. Fused is those runs of layers that there are, `joined` or not, and
    the other layers one by one by auto."""
    return _predicted_stack(text, dtype, device, _likeness(batch), training, joined)


def why_stack_batched(
    text: str, dtype: torch.dtype, device: int, batch: int, training: bool, joined: bool = False
) -> str | None:
    """Why auto takes layers one by one that one pass could take, or None."""
    return predicted_stack(text, dtype, device, batch, training, joined).why_batched


@known
def why_any_batched(text: str, dtype: torch.dtype, device: int, training: bool) -> str | None:
    """Why auto takes layers one by one where one way has to serve every number of samples, as in a compiled graph; or
    None: it is decided for many samples."""
    return why_stack_batched(text, dtype, device, MANY, training)


def joined_is_faster(text: str, dtype: torch.dtype, device: int, batch: int) -> bool:
    """Whether layers that are trained one by one are predicted to take less if they are joined than each by auto."""
    asked = text, dtype, device, _likeness(batch), True
    return _predicted_stack(*asked, True).fused_us < _predicted_stack(*asked, False).fused_us


@functools.lru_cache(4096)
def _predicted_stack(
    text: str, dtype: torch.dtype, device: int, likeness: int, training: bool, joined: bool
) -> Prediction:
    layers, like = text.split(" | "), _samples(likeness)
    alone = [_predicted(layer, dtype, device, likeness, training) for layer in layers]
    samples, fused_us, at = like.asked, 0.0, 0
    found = runs_on_gpu(text, dtype, device, training, joined, class_of_batch(samples))
    for begin, end, run in (*found, (len(layers), len(layers), "")):
        fused_us += sum(min(layer.fused_us, layer.batched_us) for layer in alone[at:begin])
        if run:
            asked = texts_of_run(run, samples, dtype, device, training)
            fused_us += sum(predicted_us(*each, dtype, device) for each in asked)
        at = end
    return Prediction(fused_us, sum(layer.batched_us for layer in alone), training, like)


def is_multiplied_out(text: str, dtype: torch.dtype, device: int, batch: int, training: bool) -> bool:
    """Whether the batched implementation takes a layer with its matrix multiplied out."""
    return _batched(text, dtype, device, _likeness(batch), training).multiplies


@functools.lru_cache(4096)
def _batched(text: str, dtype: torch.dtype, device: int, likeness: int, training: bool) -> Ways:
    chain, samples = Chain.parse(text), _samples(likeness).asked
    computed = "tf32" if chain.tf32 and dtype == torch.float32 else dtype_name(dtype)
    return Ways.of(chain, computed, samples, Gpu(*gpu_limits(device)), training)
