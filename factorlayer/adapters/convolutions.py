"""Which convolutions multiply the channels of each place by one matrix, as a linear layer does its features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def why_no_matrix(base: nn.Module) -> str | None:
    """Why a layer is not one matrix for the features of each place, or None."""
    if not isinstance(base, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return None
    if any(size != 1 for size in base.kernel_size):
        return (
            f"a convolution with a kernel of {' x '.join(map(str, base.kernel_size))} mixes places, not channels alone"
        )
    if base.groups != 1:
        return f"its convolution has {base.groups} groups, which are a matrix each"
    if base.padding not in ("valid", "same") and any(base.padding):
        return f"its convolution has a padding of {base.padding}, which makes places without a sample"
    return None


def places(x: Tensor, base: Any) -> Tensor:
    """What a convolution's matrix takes: the places that its strides reach."""
    if all(step == 1 for step in base.stride):
        return x
    taken: Any = (..., *(slice(None, None, step) for step in base.stride))
    reached: Tensor = x[taken]
    return reached
