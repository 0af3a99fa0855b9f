"""A way's product and that of a linear layer whose weight is frozen, as one step of autograd.

The layer's is summed upon what the way has made, forward and back, by the matrix product itself, so that nothing is
read and written for a sum alone:

    y = way(x) + bias;  y += x Wᵀ            grad_x = the way's;  grad_x += grad_y W

Factors may be of another dtype. They are cast to that of the way, within the step. Where this is not the layer's, x is
cast for the way, and the way's is summed upon the layer's, in the layer's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from factorlayer.adapters.ways import Way, halves_back
from factorlayer.autograd.layer_ops import transforms_active
from factorlayer.autograd.vectors import are_vectors


class Added(Function):
    """Of (way, halves of w1, scale, inner, x, weight, bias, *halves): scale x (w1 ⊗ w2)ᵀ + x Wᵀ + bias. `inner` is x in
    the way's dtype, or None where it is x."""

    @staticmethod
    def forward(
        ctx: Any, way: Way, split: int, scale: float, inner: Tensor | None, x: Tensor, weight: Tensor,
        bias: Tensor | None, *halves: Tensor,
    ) -> Tensor:  # fmt: skip
        dtype = x.dtype if inner is None else inner.dtype
        # All that are not of the way's dtype, but w1, which is scaled by the same operation.
        cast = [] if halves[0].dtype is dtype else [half.to(dtype) for half in halves[split == 1 :]]
        second = cast[split - len(halves) :] or halves[split:]
        first = _scaled(halves[0] if split == 1 else torch.mm(*(cast or halves)[:2]), scale, dtype)
        shape = x.shape
        rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        if inner is None:
            y, kept = way.forward(rows, first, second, bias)
            y.addmm_(rows, weight.t())
        else:
            delta, kept = way.forward(inner.reshape(rows.shape), first, second, None)
            y = linear(rows, weight, bias).add_(delta)
        ctx.way, ctx.split, ctx.scale, ctx.dtype, ctx.casts = way, split, scale, dtype, len(cast)
        ctx.save_for_backward(x, weight, bias, first, *halves, *cast, *kept)
        # No view, so that y may be changed in place, as by nn.ReLU(inplace=True).
        return y if rows is x else y.resize_(*shape[:-1], way.sizes[0])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        way, split, scale, needs = ctx.way, ctx.split, ctx.scale, ctx.needs_input_grad
        x, weight, bias, first, *tensors = ctx.saved_tensors
        of_halves = needs[7:]
        count = len(of_halves)
        halves, cast, kept = tensors[:count], tensors[count : count + ctx.casts], tensors[count + ctx.casts :]
        if torch.is_grad_enabled() or are_vectors(grad_y) or transforms_active():
            return _by_formula(way, split, scale, ctx.dtype, needs, grad_y, x, weight, bias, halves)
        shape = x.shape
        if len(shape) != 2:
            x, grad_y = x.reshape(-1, shape[-1]), grad_y.reshape(-1, way.sizes[0])
        grad_y = grad_y.contiguous()
        wanted = needs[4], any(of_halves[:split]), any(of_halves[split:])
        second = cast[split - count :] or halves[split:]
        is_alike = ctx.dtype is x.dtype
        given = (grad_y, x) if is_alike else (grad_y.to(ctx.dtype), x.to(ctx.dtype))
        grad_x, grad_first, of_second = way.backward(*given, first, second, kept, wanted)
        if grad_x is not None:
            grad_x = grad_x.addmm_(grad_y, weight) if is_alike else torch.mm(grad_y, weight).add_(grad_x)
            grad_x = grad_x if len(shape) == 2 else grad_x.view(shape)
        if grad_first is not None:
            grad_first = _scaled(grad_first, scale, halves[0].dtype if split == 1 else ctx.dtype)
        of_first = halves_back(grad_first, (cast or halves)[:split])
        return None, None, None, None, grad_x, None, None, *of_first, *of_second  # which autograd casts, if need be


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """In a dtype, by one operation."""
    if tensor.dtype is dtype:
        return tensor if scale == 1 else tensor * scale
    return tensor.to(dtype) if scale == 1 else torch.mul(tensor, scale, out=torch.empty_like(tensor, dtype=dtype))


# Function.apply without what torch.func needs, which takes longer than the rest of it.
add = super(Function, Added).apply


def _by_formula(
    way: Way, split: int, scale: float, dtype: torch.dtype, needs: Sequence[bool], grad_y: Tensor, x: Tensor,
    weight: Tensor, bias: Tensor | None, halves: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients that can be differentiated, or mapped: of a y that is made again by operations that can."""
    given = [None, None, None, None, x, weight, bias, *halves]
    leaves = [tensor for tensor, need in zip(given, needs, strict=True) if tensor is not None and need]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        cast = [half.to(dtype) for half in halves]
        first = cast[0] if split == 1 else cast[0] @ cast[1]
        delta = way.product(x.to(dtype), first if scale == 1 else first * scale, cast[split:])
        y = (delta + linear(x, weight, bias)).to(weight.dtype)
    found = iter(torch.autograd.grad(y, leaves, grad_y, create_graph=again))
    return tuple(next(found) if need else None for need in needs)
