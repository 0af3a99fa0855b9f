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


MOST_LEVELS = 64  # of hidden dimensions, as PyTorch has it


def _level(tensors: Sequence[Tensor]) -> int:
    """The level of the innermost hidden dimension, as PyTorch counts them: the number of hidden dimensions that there
    are. The threads that go back on a GPU do not count them, so that the tensors are looked at."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level:
        return level
    some = [t for t in tensors if _is_hidden(t)]
    return next(n for n in range(MOST_LEVELS - 1, 0, -1) if any(_has(t, n) for t in some))


def _has(tensor: Tensor, level: int) -> bool:
    """Whether a tensor has the hidden dimension of a level: one that it has not is made, of any size."""
    sizes = {len(torch._remove_batch_dim(tensor, level, size, 0)) for size in (1, 2)}
    return len(sizes) == 1


def shown(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    """[vectors, ...] each. One that is the same for all vectors is expanded."""
    found = [torch._remove_batch_dim(t, level, 1, 0) for t in tensors]
    count = max(len(t) for t in found)
    return [t.expand(count, *t.shape[1:]) for t in found]


def one_by_one(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What the function makes of each vector's tensors."""
    level = _level(tensors)
    made = [function(*of_one) for of_one in zip(*shown(tensors, level), strict=True)]
    return tuple(torch._add_batch_dim(torch.stack(each), 0, level) for each in zip(*made, strict=True))


def as_samples(function: Callable[[Tensor, Tensor], Tensor], grad_y: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [N, in] that the function makes of grad_y [N, out] and x, for all vectors by one call: their
    samples are independent of each other, and so are taken as more samples."""
    level = _level([grad_y])
    (grads,) = shown([grad_y], level)
    count = len(grads)
    made = function(grads.flatten(0, 1), x.repeat(count, 1))
    return torch._add_batch_dim(made.unflatten(0, (count, len(x))), 0, level)
