"""The dense rival that `bench` times beside the implementations: nn.Linear of the same features, in PyTorch alone.

Of a layer, nn.Linear and its activation; of a block, nn.Linear between its widths and the activations one by one; of a
recurrent layer, nn.GRU.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from factorlayer.activations.named import ACTIVATIONS, activation_name
from factorlayer.cli.case import Case
from factorlayer.cli.subject import Activation, Own, Recurrent, Single

LARGEST_WEIGHTS = 1 << 28  # bytes of all weights together: a gradient of as many comes beside them


class DenseGRU(nn.GRU):
    """nn.GRU's outputs alone: cuDNN's, on a GPU."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(input, hx)[0]

    def __str__(self) -> str:
        count = sum(p.numel() for p in self.parameters())
        return f"nn.GRU {self.input_size} -> {self.hidden_size}, {count} parameters"


class DenseUnavailableError(ValueError):
    """Why it is not timed."""


class Dense(nn.Module):
    """Linear layers, behind each but perhaps the last of them the activation."""

    def __init__(self, features: list[int], bias: bool, activation: Activation, ends_activated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(p, q, bias) for p, q in itertools.pairwise(features))
        given = copy.deepcopy(activation)  # its own, where it has parameters
        self.activation: Callable[[Tensor], Tensor]
        self.activation = ACTIVATIONS[activation_name(given)] if isinstance(given, str) else given
        self.activated = len(self.layers) if ends_activated else len(self.layers) - 1

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.activation(layer(x)) if i < self.activated else layer(x)
        return x

    def __str__(self) -> str:
        """nn.Linear 48 -> 512 -> 12, 31000 parameters."""
        features = [self.layers[0].in_features, *(layer.out_features for layer in self.layers)]
        return f"nn.Linear {' -> '.join(map(str, features))}, {sum(p.numel() for p in self.parameters())} parameters"


def dense_of(case: Case) -> nn.Module:
    """The dense layers to time beside a case, on its device, with parameters of their own. Raises
    DenseUnavailableError, which says why there are none."""
    subject = case.subject
    if isinstance(subject, Own):
        raise DenseUnavailableError("it stands beside a layer or --mlp; a model of your own is timed as it is: model")
    if isinstance(subject, Recurrent):
        hidden = math.prod(q for _, q in subject.factors)
        features = [subject.shape[1] + hidden, 3 * hidden]
    elif isinstance(subject, Single):
        features = [subject.spec.in_features, subject.spec.out_features]
    else:
        features = [width if isinstance(width, int) else math.prod(width) for width in subject.widths]
    size = sum(p * q for p, q in itertools.pairwise(features)) * case.dtype.itemsize
    if size > LARGEST_WEIGHTS:
        raise DenseUnavailableError(
            f"weights of nn.Linear {' -> '.join(map(str, features))} would take {_bytes(size)}, "
            f"more than {_bytes(LARGEST_WEIGHTS)}"
        )
    if isinstance(subject, Recurrent):
        return DenseGRU(subject.shape[1], hidden, bias=subject.bias).to(case.device, case.dtype)
    dense = Dense(features, subject.bias, subject.activation, isinstance(subject, Single))
    return dense.to(case.device, case.dtype)


def _bytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 1 << 30 else f"{count / 2**30:.1f} GiB"
