"""x as several tensors side by side, as if they were concatenated along their features: what a list of them may be, and
what PyTorch alone makes of one. Their features are as many together as the layer takes; some may have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from factorlayer.autograd.layer_ops import transforms_active

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Input = Tensor | list[Tensor] | tuple[Tensor, ...]  # what a user may give for x


def are_several(x: Any) -> TypeIs[list[Tensor] | tuple[Tensor, ...]]:
    return isinstance(x, (list, tuple))


def checked(who: str, given: Input, features: int, wanted: str, name: str = "x") -> list[Tensor]:
    """The tensors of a list, [..., features of each]; raises what is wrong with them. `wanted` is what the user knows
    the features by."""
    if not given:
        raise ValueError(f"{who}: {name} should be a tensor or a list of tensors, the list is empty")
    for i, x in enumerate(given):
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise TypeError(
                f"{who}: {name} should be a tensor or a list of tensors, {name}[{i}] is of the "
                f"type {kind}; convert it with torch.as_tensor"
            )
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{who}: the tensors of {name} should be dense, the layout of {name}[{i}] is {x.layout}")
    first, *others = given
    if not first.dim() or any(x.shape[:-1] != first.shape[:-1] or not x.dim() for x in others):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(
            f"{who}: the tensors of {name} should have one shape but for their last dimension, they have {shapes}"
        )
    if sum(x.shape[-1] for x in given) != features:
        came = " + ".join(str(x.shape[-1]) for x in given)
        raise ValueError(
            f"{who}: the last dimensions of {name}'s tensors should be {wanted}={features} together, they are {came}"
        )
    return list(given)


def check_alike(who: str, inputs: Sequence[Tensor], name: str = "x") -> None:
    first = inputs[0]
    for what, own in (("dtype", [x.dtype for x in inputs]), ("device", [x.device for x in inputs])):
        if any(each != own[0] for each in own):
            raise TypeError(
                f"{who}: the tensors of {name} should have one {what}, they have {', '.join(map(str, own))}"
            )
    if not (first.is_floating_point() or first.is_complex()):
        raise TypeError(f"{who}: {name} should be floating-point tensors, they are {first.dtype}")


def concatenated(inputs: Sequence[Tensor]) -> Tensor:
    return inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), dim=-1)


def dense_product(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of rows [N, features of each]: a product for each input, added to those before it where these lie."""
    if len(inputs) == 1:  # of a part that is all of it a gradient would be copied
        return F.linear(inputs[0], weight, bias)
    parts = weight.split([x.shape[1] for x in inputs], dim=1)
    y = F.linear(inputs[0], parts[0], bias)
    for x, part in zip(inputs[1:], parts[1:], strict=True):
        y = torch.addmm(y, x, part.t()) if transforms_active() else y.addmm_(x, part.t())
    return y
