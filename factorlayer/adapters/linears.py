"""Linear layers that an adapter is added to, where both are one step of autograd.

Whatever is not usual is left to the layer itself and to product(): hooks, transforms, graphs that are compiled or
traced, modes that see operators, weights that are trained. Factors may be of another dtype than the layer: without
autocast that is the product's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as modules

from factorlayer.adapters.added import add
from factorlayer.adapters.products import is_faster_made
from factorlayer.adapters.ways import MOST_KEPT, Way, way_of
from factorlayer.autograd.layer_ops import DTYPES, runs_in_tf32, transforms_active
from factorlayer.autograd.runtime import CompileError
from factorlayer.functional import any_autocast, autocast
from factorlayer.tuning import choices

KINDS = (Tensor, nn.Parameter)
_taken: dict[tuple[object, ...], Way] = {}


def added(base: nn.Module, x: Tensor, first: Sequence[Tensor], second: Sequence[Tensor], scale: float) -> Tensor | None:
    """base(x) + scale x (w1 ⊗ w2)ᵀ, or None where it has to be made in another way. A factor is one tensor, or two,
    whose product it is."""
    if is_dynamo_compiling() or type(base) is not nn.Linear or _is_unusual():
        return None
    weight: Tensor | None = base._parameters.get("weight")
    bias: Tensor | None = base._parameters.get("bias")
    if weight is None or weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    halves, dtype = [*first, *second], first[0].dtype
    if any_autocast() and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x, (weight,), bias = autocast(x, (weight,), bias)
        dtype = x.dtype if dtype is not torch.float64 else dtype
    if not _are_plain(x, weight, bias, halves) or dtype not in DTYPES or is_faster_made(x, weight.shape):
        return None
    inner = None if dtype is x.dtype else x.detach().to(dtype)
    way = _way(x, inner, weight, len(first), halves)
    if way is None:
        return None
    try:
        y: Tensor = add(way, len(first), scale, inner, x, weight, bias, *halves)
    except CompileError:  # of which product() tells the user
        _taken.clear()
        return None
    return y


def is_watched(base: nn.Module) -> bool:
    """Whether others see what goes into a layer or comes out, or have put a forward of their own in its place."""
    own = base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks
    return bool(own) or "forward" in base.__dict__ or modules._has_any_global_hook()


def _way(x: Tensor, inner: Tensor | None, weight: Tensor, split: int, halves: Sequence[Tensor]) -> Way | None:
    """Which auto takes, or None. It may change with what was measured, with nothing else."""
    recorded = torch.is_grad_enabled() and (x.requires_grad or any(half.requires_grad for half in halves))
    x = x if inner is None else inner
    shapes = [half.shape for half in halves]
    key = x.dtype, x.get_device(), x.numel(), recorded, runs_in_tf32(x), split, weight.shape, *shapes
    if key in _taken and not choices.BATCHED:
        return _taken[key]
    choices.load()
    way = way_of(x, (shapes[0][0], shapes[split - 1][1]), shapes[split:], recorded=recorded)
    if way.sizes != weight.shape or not way.takes(x, x.numel() // weight.shape[1], recorded):
        return None
    if len(_taken) == MOST_KEPT:
        _taken.clear()
    _taken[key] = way
    return way


def _is_unusual() -> bool:
    is_seen = torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0  # as by who counts FLOPs
    return is_seen or transforms_active() or forward_ad._current_level >= 0


def _are_plain(x: Tensor, weight: Tensor, bias: Tensor | None, halves: Sequence[Tensor]) -> bool:
    """Whether all are dense, the layer's of one dtype and the factors of one, and x is what the layer takes."""
    dtype, of_halves = x.dtype, halves[0].dtype
    if type(x) not in KINDS or type(weight) not in KINDS or weight.dtype is not dtype:
        return False
    for half in halves:
        if type(half) not in KINDS or half.dtype is not of_halves:
            return False
    if bias is not None and bias.dtype is not dtype:
        return False
    if dtype not in DTYPES or x.layout is not torch.strided or x.is_nested or not (x.is_cpu or x.is_cuda):
        return False
    return x.dim() > 0 and x.shape[-1] == weight.shape[1] and x.numel() > 0
