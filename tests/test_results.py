"""activations/results.py: derivatives from results, against PyTorch's autograd of the functions themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from factorlayer.activations.expression import X, apply, parameter, select
from factorlayer.activations.named import ACTIVATIONS, evaluate
from factorlayer.activations.results import RESULT, from_result, gradient_from_result
from factorlayer.activations.texts import activation_of

KNOWN = [
    nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU(0.3), nn.ELU(), nn.ELU(0.5), nn.ELU(2.5), nn.CELU(), nn.CELU(0.5),
    nn.SELU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Softplus(3.0), nn.Softsign(),
]  # fmt: skip
OTHERS = [
    nn.LeakyReLU(-0.1), nn.ELU(-1.0), nn.Softplus(1.0, 2.0), nn.PReLU(), nn.GELU(), nn.SiLU(), nn.Mish(),
    nn.Hardswish(), nn.Tanhshrink(), nn.Threshold(0.1, 20.0), nn.Identity(),
]  # fmt: skip
EDGES = [0.0, 1e-300, 1e-9, 1e-3, 6.0, 20.0, 20.5, 40.0, 700.0]


def x_values() -> torch.Tensor:
    edges = torch.tensor(EDGES, dtype=torch.float64)
    return torch.cat([-edges, edges, torch.linspace(-25, 25, 1001, dtype=torch.float64)]).requires_grad_()


@pytest.mark.parametrize("module", KNOWN, ids=str)
def test_a_result_tells_the_slope(module: nn.Module) -> None:
    slope = from_result(activation_of(module)[0])
    assert slope is not None
    x = x_values()
    y = module(x)
    (right,) = torch.autograd.grad(y.sum(), x)
    # What is near 0 has lost digits, and near 20 softplus is one branch or the other.
    torch.testing.assert_close(evaluate(slope, y.detach()), right, rtol=4e-9, atol=4e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_their_modules_do(name: str) -> None:
    slope = from_result(name)
    told = "relu", "relu_squared", "leaky_relu", "elu", "tanh", "sigmoid", "softplus"
    assert (slope is not None) == (name in told)
    if slope is not None:
        x = x_values()
        y = ACTIVATIONS[name](x)
        torch.testing.assert_close(
            evaluate(slope, y.detach()), torch.autograd.grad(y.sum(), x)[0], rtol=4e-9, atol=4e-15
        )


@pytest.mark.parametrize("module", OTHERS, ids=str)
def test_others_keep_theirs(module: nn.Module) -> None:
    """What falls, what is no row, and what learns."""
    assert from_result(activation_of(module)[0]) is None


def test_a_row_with_a_parameter_is_no_row() -> None:
    assert from_result((parameter(0) * X).program) is None


def test_nothing_is_multiplied_where_the_slope_is_zero() -> None:
    assert gradient_from_result("relu") == select(apply("le", RESULT, 0), 0, X)
    assert gradient_from_result("elu") == select(apply("le", RESULT, 0), X * (RESULT + 1), X)
