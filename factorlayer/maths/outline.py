"""What FactorLinear.weight is: shape, dtype and device of a matrix that is nowhere in memory.

Other people's code looks at a linear layer's weight: for its dtype, as transformers' T5 does, or to see whether a
kernel of its own may take it, as nn.TransformerEncoderLayer does. It is no Tensor, and what is computed with it is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch


@dataclass(frozen=True)
class Outline:
    """Of W [out_features, in_features]."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"FactorLinear.weight has no {name!r}: {_REFUSED}")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"FactorLinear.weight cannot be computed with: {_REFUSED}")

    # Operators, for which Python asks no attribute, and of which a tensor has no words of its own.
    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(f"FactorLinear.weight cannot be computed with: {_REFUSED}")


_REFUSED = (
    "the matrix is structured and nowhere in memory, so that weight is its shape, dtype and device alone; the layer "
    "multiplies by it, to_dense() makes it, and its parameters are in weights"
)
