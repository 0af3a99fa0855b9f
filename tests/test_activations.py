"""Every named activation: the fused value and derivative against autograd of the torch function in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from factorlayer import ACTIVATIONS, FactorLinear, factor_linear

DTYPES = [torch.float32, torch.float64]
# Values that cancel where the function nears zero, 1 + erf(x) and 1 + tanh(x): right to eps·|x|, as torch's are.
CANCELLING = {"gelu", "gelu_tanh"}
# Derivatives that are sums or products of several terms of size |x|: right to eps·(1 + |x|).
EXACT_SLOPES = {"identity", "relu", "leaky_relu", "softplus", "square", "relu_squared", "sine"}


def sweep(dtype: torch.dtype) -> Tensor:
    """Dense where the functions bend, with kinks, signed zeros, tiny and large numbers."""
    special = [0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 1.0, -1.0, 20.0, 20.000002, 19.999998, 1e4, -1e4]
    special += [k * math.pi / 2 for k in range(-8, 9)]
    x = torch.cat([torch.linspace(-30, 30, 8000, dtype=torch.float64), torch.tensor(special, dtype=torch.float64)])
    return x.to(dtype)


def identity_layer(features: int, activation: str, dtype: torch.dtype) -> FactorLinear:
    """y = activation(x): both factors are identity matrices, so every pre-activation is x exactly."""
    layer = FactorLinear(
        features * features, features * features, bias=False, factors=(features, features), activation=activation,
        implementation="fused", dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for weight in layer.weights:
            weight.copy_(torch.eye(features))
    return layer


def fused_value_and_slope(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    side = 9  # 81 features: full vectors and a tail
    rows = F.pad(x, (0, -x.numel() % side**2)).reshape(-1, side**2).requires_grad_()
    y = identity_layer(side, activation, x.dtype)(rows)
    (slope,) = torch.autograd.grad(y, rows, torch.ones_like(y))
    return y.detach().flatten()[: x.numel()], slope.flatten()[: x.numel()]


def torch_value_and_slope(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = ACTIVATIONS[activation](x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), slope


def assert_near(found: Tensor, right: Tensor, slack: Tensor | float, x: Tensor) -> None:
    """To 4 eps of the value (8 in float64, where torch's own error counts too), plus the slack in eps."""
    eps, few = torch.finfo(found.dtype).eps, 8 if found.dtype == torch.float64 else 4
    smallest = torch.finfo(found.dtype).tiny
    off = (found.double() - right).abs() - few * eps * (right.abs() + slack) - smallest
    worst = int(off.argmax())
    assert off[worst] <= 0, f"at {x[worst]!r}: {found[worst]!r} instead of {right[worst]!r}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_derivative(activation: str, dtype: torch.dtype) -> None:
    x = sweep(dtype)
    value, slope = fused_value_and_slope(activation, x)
    right, right_slope = torch_value_and_slope(activation, x.double())
    size = x.double().abs()
    assert_near(value, right, size if activation in CANCELLING else 0.0, x)
    assert_near(slope, right_slope, 0.0 if activation in EXACT_SLOPES else 1 + size.clamp(max=30), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("features", [1, 3, 7, 16, 33], ids=lambda n: f"{n}-features")
def test_special_values_are_those_of_torch(activation: str, dtype: torch.dtype, features: int) -> None:
    """NaN, infinities and kinks, in every lane of a vector and of its tail. They come in through the bias, since in a
    sum of products they would spread: y = activation(0 + bias). The reference is torch in float64, one number at a
    time: in torch's own vectors gelu(inf) is NaN in float32, and elu's slope at NaN is NaN in some lanes, 1 in others
    (so that one is left out)."""
    for number in (math.nan, math.inf, -math.inf, 0.0, 1e4, -1e4, 20.0):
        bias = torch.full((features,), number, dtype=dtype, requires_grad=True)
        weights = [torch.zeros(1, 1, dtype=dtype), torch.zeros(features, 1, dtype=dtype)]
        y = factor_linear(torch.zeros(1, 1, dtype=dtype), weights, bias, activation, implementation="fused")
        (slope,) = torch.autograd.grad(y, bias, torch.ones_like(y))
        right, right_slope = torch_value_and_slope(activation, torch.tensor([number], dtype=torch.float64))
        pairs = {"value": (y[0], right), "slope": (slope, right_slope)}
        if activation == "elu" and math.isnan(number):
            del pairs["slope"]
        for what, (found, wanted) in pairs.items():
            torch.testing.assert_close(
                found, wanted.to(dtype).expand(features), equal_nan=True, rtol=1e-5, atol=1e-6,
                msg=lambda text, what=what, number=number: f"{what} at {number}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_row_means_the_same_in_every_implementation(activation: str) -> None:
    x = torch.randn(5, 12, dtype=torch.float64)
    layer = FactorLinear(12, 12, factors=(3, 4), activation=activation, dtype=torch.float64)
    plain = FactorLinear(12, 12, factors=(3, 4), dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    right = ACTIVATIONS[activation](plain(x))
    for layer.implementation in ("naive", "batched", "fused"):
        torch.testing.assert_close(layer(x), right, rtol=1e-12, atol=1e-12)


def test_rows_are_the_torch_functions() -> None:
    """Against the modules of torch.nn, where there is one."""
    modules = {
        "identity": torch.nn.Identity(), "relu": torch.nn.ReLU(), "leaky_relu": torch.nn.LeakyReLU(),
        "elu": torch.nn.ELU(), "gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU("tanh"), "silu": torch.nn.SiLU(),
        "sigmoid": torch.nn.Sigmoid(), "tanh": torch.nn.Tanh(), "softplus": torch.nn.Softplus(), "sine": torch.sin,
        "square": lambda x: x * x, "relu_squared": lambda x: x.clamp(min=0) ** 2,
    }  # fmt: skip
    assert set(modules) == set(ACTIVATIONS)
    x = sweep(torch.float64)
    for name, module in modules.items():
        torch.testing.assert_close(ACTIVATIONS[name](x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("nothing", [None, "none", "identity"])
def test_no_activation(nothing: str | None) -> None:
    assert FactorLinear(4, 4, activation=nothing).activation is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = (
        "identity, relu, leaky_relu, elu, gelu, gelu_tanh, silu, sigmoid, tanh, sine, softplus, square, relu_squared"
    )
    message = f"FactorLinear: activation should be None or one of {known}; it is 'swish'"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        FactorLinear(4, 4, activation="swish")
    assert str(error.value) == message
