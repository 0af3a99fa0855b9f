"""A function of one member of a batch, called with all of them: factors that have a batch axis, as linear_operator's.

Every tensor has the batch axes first, of the batch's sizes or of 1, as torch.matmul broadcasts them. Members are called
one by one, or mapped by torch.func.vmap, where one product takes them all; factor_linear asks for what is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Elements of a member's x from which on a fused call for each member is faster than products of all members at once: 64
# members of 64 features take 1.0 and 1.2 ms with 64 rows each, on one CPU thread, and 1.4 and 0.3 ms with one row.
LARGE_MEMBER = 1 << 12


def batch_of(named: Sequence[tuple[str, Tensor]], dims: int) -> tuple[int, ...]:
    """The sizes of the batch axes, which the first `dims` of every tensor are."""
    sizes = [1] * dims
    for name, tensor in named:
        for axis, size in enumerate(tensor.shape[:dims]):
            if size != 1 and sizes[axis] not in (1, size):
                shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)
                raise ValueError(
                    f"batch_dims={dims}: axis {axis} should have one size, or 1, in all tensors; they are {shapes}"
                )
            sizes[axis] = size if size != 1 else sizes[axis]
    return tuple(sizes)


def one_by_one(call: Callable[..., Tensor], tensors: Sequence[Tensor], batch: tuple[int, ...]) -> Tensor:
    def pick(tensor: Tensor, index: tuple[int, ...]) -> Tensor:
        return tensor[tuple(i if size != 1 else 0 for i, size in zip(index, tensor.shape, strict=False))]

    indices = itertools.product(*map(range, batch))
    members = [call(*(pick(tensor, index) for tensor in tensors)) for index in indices]
    y: Tensor = torch.stack(members).unflatten(0, batch)
    return y


def mapped(call: Callable[..., Tensor], tensors: Sequence[Tensor], batch: tuple[int, ...]) -> Tensor:
    """The mapped op by products of all members. An axis of one for all is not mapped."""
    if not batch:
        y: Tensor = call(*tensors)
        return y
    dims = tuple(0 if tensor.shape[0] == batch[0] else None for tensor in tensors)
    given = [tensor if dim == 0 else tensor.squeeze(0) for tensor, dim in zip(tensors, dims, strict=True)]
    y = torch.func.vmap(lambda *inner: mapped(call, inner, batch[1:]), in_dims=dims)(*given)
    return y


def of_no_members(tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """What a batch without members makes: nothing, whose gradients are zero."""
    return torch.stack([tensor.sum() for tensor in tensors]).sum().expand(shape)
