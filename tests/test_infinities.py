"""Infinite and NaN gradients on their way back through activations with flat sides, against PyTorch's autograd: where
an activation is constant nothing comes back, no 0 times infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor, nn

from factorlayer import FactorLinear, factor_linear

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "clamp_below": lambda x: x.clamp(max=0.75),
    "where": lambda x: torch.where(x > 0.25, x * 2, 0.5),
    "floor": torch.floor,
    "relu6_of_a_product": lambda x: F.relu6(3 * x) / 2,
    "sine_of_relu": lambda x: torch.sin(F.relu(x) / 8),
    "relu_of_sine": lambda x: F.relu(torch.sin(x / 8)),
    "relu_and_more": lambda x: F.relu(x) + x,
    "product_with_relu": lambda x: x * F.relu(x),
}


def places(tensor: Tensor) -> tuple[list[bool], ...]:
    return tuple(has(tensor).flatten().tolist() for has in (torch.isnan, torch.isposinf, torch.isneginf))


def drawn(features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x with numbers on all sides and kinks, and a gradient with something at every third place."""
    generator = torch.Generator().manual_seed(features)
    x = 3 * torch.randn(9, features, generator=generator, dtype=torch.float64)
    kinks = torch.tensor([0.0, 0.5, -0.5, 0.75, 1.0, -1.0, 3.0, -3.0, 6.0, 7.0], dtype=torch.float64)
    at = torch.randint(0, len(kinks), x.shape, generator=generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.3, kinks[at], x)
    special = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    at = torch.randint(0, 3, x.shape, generator=generator)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.where(torch.rand(x.shape, generator=generator) < 0.4, special[at], grad).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_nothing_comes_back_from_where_an_activation_is_flat(name: str, dtype: torch.dtype) -> None:
    """The layer multiplies one feature by 1, so that places are the activation's alone: in whole chunks of vectors, and
    in what is left of them. PyTorch's own function says what is right."""
    for count in (1, 7, 33, 128, 300):
        x, grad_y = drawn(count, dtype)
        found = []
        for fused in (True, False):
            rows = x.reshape(-1, 1).clone().requires_grad_()
            weights = [torch.ones(1, 1, dtype=dtype)]
            y = factor_linear(rows, weights, None, FLAT[name], implementation="fused") if fused else FLAT[name](rows)
            found += torch.autograd.grad(y, rows, grad_y.reshape(-1, 1))
        assert places(found[0]) == places(found[1]), count
        assert torch.isinf(grad_y).any()
        finite = found[1].isfinite()
        torch.testing.assert_close(found[0][finite], found[1][finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positive", [True, False])
def test_a_learned_number_hears_nothing_of_where_it_is_not_read(positive: bool, dtype: torch.dtype) -> None:
    """PReLU's weight of positive numbers, whose gradient is infinite."""
    made = []
    for implementation in ("fused", "batched"):
        layer = FactorLinear(3, 3, False, factors=((3,), (3,)), activation=nn.PReLU(), implementation=implementation)
        layer.to(dtype).weight_0.data = torch.eye(3, dtype=dtype)
        x = torch.tensor([[1.0, 2.0, -3.0]], dtype=dtype)
        grad_y = torch.tensor([[math.inf, 1.0, 1.0] if positive else [1.0, 1.0, math.inf]], dtype=dtype)
        parameters: list[Any] = [p for name, p in layer.named_parameters() if name != "weight_0"]
        made += torch.autograd.grad(layer(x), parameters, grad_y)
    assert places(made[0]) == places(made[1])
    assert bool(made[0].isfinite().all()) == positive


class Scaled(nn.Module):
    """What it learns is multiplied by 0, which is a number like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * self.scale


def test_a_factor_of_zero_is_no_flat_side() -> None:
    made = []
    for implementation in ("fused", "batched"):
        layer = FactorLinear(2, 2, False, factors=((2,), (2,)), activation=Scaled(), implementation=implementation)
        layer.weight_0.data = torch.eye(2)
        x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
        (scale,) = (p for name, p in layer.named_parameters() if name != "weight_0")
        made.append(torch.autograd.grad(layer(x), [x, scale], torch.tensor([[math.inf, 1.0]])))
    for one, other in zip(*made, strict=True):
        assert places(one) == places(other)
