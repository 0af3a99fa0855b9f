"""The named activations, one row each. The compiled kernels have a row of the same name (csrc/cpu/pointwise.h)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sine": torch.sin,
    "softplus": F.softplus,
    "square": torch.square,
    "relu_squared": lambda x: torch.square(F.relu(x)),
}


def activation_name(activation: str | None) -> str:
    """The row that a user's name means: None and 'none' are the identity."""
    if activation is None or activation == "none":
        return "identity"
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation should be None or one of {', '.join(ACTIVATIONS)}; it is {activation!r}")
    return activation
