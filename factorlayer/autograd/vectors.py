"""Gradients of several vectors at once: torch.autograd.grad(..., is_grads_batched=True), by which jacobian and hessian
of torch.autograd.functional with vectorize=True are made.

A backward pass is then called once, with tensors whose first dimension, that of the vectors, does not show. No op has
a rule for it but PyTorch's own. It is shown here, and hidden again in what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

_is_hidden = torch._C._functorch.is_legacy_batchedtensor


def are_vectors(*tensors: Tensor) -> bool:
    return not is_compiling() and any(map(_is_hidden, tensors))


def _level() -> int:
    """The level of the hidden dimension, as PyTorch counts them: the number of hidden dimensions that there are."""
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level - 1


def shown(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[vectors, ...] each. One that is the same for all vectors is expanded."""
    level = _level()
    found = [torch._remove_batch_dim(t, level, 1, 0) for t in tensors]
    count = max(len(t) for t in found)
    return [t.expand(count, *t.shape[1:]) for t in found]


def hidden(tensor: Tensor) -> Tensor:
    return torch._add_batch_dim(tensor, 0, _level())


def one_by_one(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What the function makes of each vector's tensors."""
    made = [function(*of_one) for of_one in zip(*shown(tensors), strict=True)]
    return tuple(hidden(torch.stack(each)) for each in zip(*made, strict=True))


def as_samples(function: Callable[[Tensor, Tensor], Tensor], grad_y: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [N, in] that the function makes of grad_y [N, out] and x, for all vectors by one call: their
    samples are independent of each other, and so are taken as more samples."""
    (grads,) = shown([grad_y])
    count = len(grads)
    made = function(grads.flatten(0, 1), x.repeat(count, 1))
    return hidden(made.unflatten(0, (count, len(x))))
