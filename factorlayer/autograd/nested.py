"""Nested tensors, of samples in pieces of several lengths: a layer takes the samples of all pieces at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def through(function: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    """What the function makes of the pieces' samples, in the same pieces; it takes [..., in]."""
    if x.layout != torch.jagged:
        return torch.nested.as_nested_tensor([function(piece) for piece in x.unbind()])
    if x._ragged_idx != 1:
        raise ValueError(
            "a nested tensor should have its pieces' samples in dimension 1, x has them in dimension "
            f"{x._ragged_idx}; transpose x"
        )
    return torch.nested.nested_tensor_from_jagged(function(x.values()), x.offsets(), x.lengths())
