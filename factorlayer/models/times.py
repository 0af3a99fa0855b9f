"""What a layer is predicted to take on a GPU, dense or structured; a GPU need not be there.

A dense layer is PyTorch's own product. Of a structured one it is what auto runs: the fused kernels, or PyTorch's own
operations where these are predicted to be faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from factorlayer.autograd import layer_ops
from factorlayer.autograd.backward import kept_if_worth_it, step_texts
from factorlayer.autograd.runtime import class_of_batch, dtype_name, tf32_allowed
from factorlayer.device.gpu import LIMITS, Gpu
from factorlayer.kernels.batches import class_of
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.library import Ways
from factorlayer.plan.plan import PlanError
from factorlayer.plan.planner import has_plan, kept, us_for

PREDICTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def gpu_for(device: torch.device, arch: int | None, who: str) -> Gpu | None:
    """The GPU that predictions are for: of the compute capability asked for, or the model's own; None of a CPU's."""
    if layer_ops.missing_extension is not None:
        if arch is not None:
            raise ValueError(
                f"{who}: no time is predicted without the compiled extension: {layer_ops.missing_extension}"
            )
        return None
    if arch is not None:
        if arch not in LIMITS:
            raise ValueError(f"{who}: arch should be one of {', '.join(map(str, LIMITS))}, it is {arch!r}")
        return Gpu.of(arch)
    return Gpu(*layer_ops.gpu_limits(device.index or 0)) if device.type == "cuda" else None


def dense_spec(in_features: int, out_features: int) -> LayerSpec:
    """A dense layer is a Kronecker product of one factor."""
    return LayerSpec("kronecker", (in_features,), (out_features,))


def layer_us(spec: LayerSpec, bias: bool, dtype: torch.dtype, samples: int, gpu: Gpu, training: bool) -> float | None:
    """Microseconds of a forward pass, or of training: forward and all gradients. None of a dtype that no GPU's table
    has."""
    if dtype not in PREDICTED:
        return None
    if not samples:
        return 0.0
    tf32 = dtype == torch.float32 and tf32_allowed()
    return _us(spec, bias, dtype_name(dtype), tf32, samples, gpu, training)


@functools.lru_cache(4096)
def _us(spec: LayerSpec, bias: bool, dtype: str, tf32: bool, samples: int, gpu: Gpu, training: bool) -> float:
    chain = Chain.of(spec, bias, "identity")
    library = Ways.of(chain, "tf32" if tf32 else dtype, samples, gpu, training).us
    if chain.is_dense:
        return library
    fused = _fused_us(chain.tf32_text if tf32 else chain.text, dtype, samples, gpu, training)
    return min(library, fused)


def _fused_us(text: str, dtype: str, samples: int, gpu: Gpu, training: bool) -> float:
    limits = gpu.arch, gpu.sms, gpu.shared, gpu.memory, class_of(samples)
    asked = [(text, samples)]
    if training:

        def us_of(batch: int) -> Callable[[str], float]:
            return lambda text: plan_us(text, batch, dtype, gpu)

        def fits(back: Chain) -> bool:
            return has_plan(back.text, dtype, *limits)

        chain = Chain.parse(text)
        keeps = kept(text, dtype, *limits) if chain.may_keep else ""
        if keeps:
            keeps = kept_if_worth_it(text, keeps, fits, samples, us_of)
        asked = step_texts(text, keeps, fits, samples, us_of)
    return sum(plan_us(*each, dtype, gpu) for each in asked)


@functools.lru_cache(4096)
def plan_us(text: str, samples: int, dtype: str, gpu: Gpu) -> float:
    """Microseconds of the plan that runs so many samples; infinitely many where there is none."""
    try:
        return us_for(text, dtype, gpu, class_of_batch(samples))(samples)
    except PlanError:
        return math.inf
