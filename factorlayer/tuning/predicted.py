"""What is predicted to be faster on a GPU where nothing was measured: the fused implementation, or the batched one.

The planner says what the kernels take that a layer would run, and plan/library.py what PyTorch's own operations take.
Both are asked once for all numbers of samples that round up to the same power of two, so that what auto takes for a
call depends on no other call; what the planner has said is kept in the cache beside its plans.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from factorlayer.autograd.backward import texts
from factorlayer.autograd.fused import ask_planner, cuda_ops, gpu_limits
from factorlayer.autograd.runtime import class_of_batch, dtype_name
from factorlayer.device.gpu import Gpu
from factorlayer.maths.chain import Chain
from factorlayer.plan.library import library_us

MARGIN = 1.1  # batched has to be faster by this factor: less cannot be told apart, and fused needs less memory
QUESTIONS = ("times_of_few", "times_of_some", "times_of_many")  # of the planner, for each class of batch


@dataclass(frozen=True)
class Prediction:
    """Microseconds of both; of kernels that cannot be had, infinitely many."""

    fused_us: float
    batched_us: float
    training: bool
    samples: tuple[int, int]  # from one number up to another

    @property
    def implementation(self) -> str:
        return "batched" if self.batched_us * MARGIN < self.fused_us < math.inf else "fused"

    def __str__(self) -> str:
        fused, batched = f"fused {self.fused_us:.1f} us", f"batched {self.batched_us:.1f} us"
        times = f"{batched}, {fused}" if self.implementation == "batched" else f"{fused}, {batched}"
        doing = "training" if self.training else "inference"
        return f"predicted: {times}, for {doing} with {self.samples[0]} to {self.samples[1]} samples"


def predicted(text: str, dtype: torch.dtype, device: int, batch: int, training: bool) -> Prediction:
    """Of a layer's text as the raw ops take it, and a GPU's index."""
    return _predicted(text, dtype, device, max(1, (batch - 1).bit_length()), training)


def why_batched(text: str, dtype: torch.dtype, device: int, batch: int, training: bool) -> str | None:
    """Why auto takes the batched implementation, or None."""
    found = predicted(text, dtype, device, batch, training)
    return f"it is {found}" if found.implementation == "batched" else None


@functools.lru_cache(4096)
def _predicted(text: str, dtype: torch.dtype, device: int, bits: int, training: bool) -> Prediction:
    most = 1 << bits
    samples = max(1, 3 * most // 4)
    chain, gpu = Chain.parse(text), Gpu(*gpu_limits(device))
    asked = [(text, samples)]
    if training:
        asked += texts(text, cuda_ops(device, dtype).fits_of(samples), samples)
    fused_us = sum(_kernels_us(*each, dtype, device) for each in asked)
    computed = "tf32" if chain.tf32 and dtype == torch.float32 else dtype_name(dtype)
    batched_us = library_us(chain, computed, samples, gpu, training)
    return Prediction(fused_us, batched_us, training, (most // 2 + 1 if bits > 1 else 1, most))


def _kernels_us(text: str, samples: int, dtype: torch.dtype, device: int) -> float:
    """Of a plan, which is made for one number of samples of each class: all but the starts of its kernels grows with
    them."""
    answer = ask_planner(QUESTIONS[class_of_batch(samples)], text, dtype, device)
    of_sample, starts = map(float, answer.split(" "))
    return starts + of_sample * samples
