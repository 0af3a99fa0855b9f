"""A way's product and that of a linear layer whose weight is frozen, as one step of autograd.

The layer's is summed upon what the way has made, forward and back, by the matrix product itself, so that nothing is
read and written for a sum alone:

    y = way(x) + bias;  y += x Wᵀ            grad_x = the way's;  grad_x += grad_y W
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
    """Of (way, halves of w1, scale, x, weight, bias, *halves): scale x (w1 ⊗ w2)ᵀ + x Wᵀ + bias."""

    @staticmethod
    def forward(
        ctx: Any, way: Way, split: int, scale: float, x: Tensor, weight: Tensor, bias: Tensor | None,
        *halves: Tensor,
    ) -> Tensor:  # fmt: skip
        first = halves[0] if split == 1 else torch.mm(*halves[:split])
        first = first if scale == 1 else first * scale
        shape = x.shape
        rows = x if len(shape) == 2 else x.reshape(-1, shape[-1])
        y, kept = way.forward(rows, first, halves[split:], bias)
        y.addmm_(rows, weight.t())
        ctx.way, ctx.split, ctx.scale = way, split, scale
        ctx.save_for_backward(x, weight, bias, first, *halves, *kept)
        # No view, so that y may be changed in place, as by nn.ReLU(inplace=True).
        return y if rows is x else y.resize_(*shape[:-1], way.sizes[0])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        way, split, scale, needs = ctx.way, ctx.split, ctx.scale, ctx.needs_input_grad
        x, weight, bias, first, *tensors = ctx.saved_tensors
        of_halves = needs[6:]
        halves, kept = tensors[: len(of_halves)], tensors[len(of_halves) :]
        if torch.is_grad_enabled() or are_vectors(grad_y) or transforms_active():
            return _by_formula(way, split, scale, needs, grad_y, x, weight, bias, halves)
        shape = x.shape
        if len(shape) != 2:
            x, grad_y = x.reshape(-1, shape[-1]), grad_y.reshape(-1, way.sizes[0])
        grad_y = grad_y.contiguous()
        wanted = needs[3], any(of_halves[:split]), any(of_halves[split:])
        grad_x, grad_first, of_second = way.backward(grad_y, x, first, halves[split:], kept, wanted)
        if grad_x is not None:
            grad_x.addmm_(grad_y, weight)
            grad_x = grad_x if len(shape) == 2 else grad_x.view(shape)
        if grad_first is not None and scale != 1:
            grad_first = grad_first * scale
        return None, None, None, grad_x, None, None, *halves_back(grad_first, halves[:split]), *of_second


# Function.apply without what torch.func needs, which takes longer than the rest of it.
add = super(Function, Added).apply


def _by_formula(
    way: Way, split: int, scale: float, needs: Sequence[bool], grad_y: Tensor, x: Tensor, weight: Tensor,
    bias: Tensor | None, halves: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients that can be differentiated, or mapped: of a y that is made again by operations that can."""
    given = [None, None, None, x, weight, bias, *halves]
    leaves = [tensor for tensor, need in zip(given, needs, strict=True) if tensor is not None and need]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        first = halves[0] if split == 1 else halves[0] @ halves[1]
        y = way.product(x, first if scale == 1 else first * scale, halves[split:]) + linear(x, weight, bias)
    found = iter(torch.autograd.grad(y, leaves, grad_y, create_graph=again))
    return tuple(next(found) if need else None for need in needs)
