"""take_over_operators: when our products are in place, for which operators, and what they make."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from factorlayer import adapters
from factorlayer.adapters import operators

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs


@pytest.fixture
def operator() -> Callable[..., object]:
    """Of factors, which are theirs or tensors."""
    package = pytest.importorskip("linear_operator", reason="needs linear_operator, of the extra `foreign`")
    return package.operators.KroneckerProductLinearOperator


def results(operator: Callable[..., object], factors: list[Tensor], right: Tensor) -> list[Tensor]:
    """Of the operator and of its transpose, and the gradients of both."""
    leaves = [tensor.detach().requires_grad_() for tensor in (right, *factors)]
    found = []
    for made in (operator(*leaves[1:]), operator(*(leaf.mT for leaf in leaves[1:])).mT):
        y = made @ leaves[0]
        grad_y = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
        found += [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]
    return found


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 400])
@pytest.mark.parametrize("sizes", [[(4, 4), (6, 6)], [(2, 3), (5, 4), (3, 3)]], ids=str)
def test_products_are_theirs(
    operator: Callable[..., object], sizes: list[tuple[int, int]], columns: int, batch: tuple[int, ...]
) -> None:
    factors = [torch.randn(*batch, *size, dtype=torch.float64) for size in sizes]
    right = torch.randn(*batch, math.prod(p for _, p in sizes), columns, dtype=torch.float64)
    expected = results(operator, factors, right)
    with adapters.take_over_operators() as taken:
        torch.testing.assert_close(results(operator, factors, right), expected, rtol=1e-11, atol=1e-11)
    is_ours = not batch or right[(0,) * len(batch)].numel() >= operators.LARGE_MEMBER
    assert bool(taken.calls["factorlayer"]) is is_ours
    assert len(taken.calls) == 1


def test_a_right_side_with_a_batch_of_its_own(operator: Callable[..., object]) -> None:
    made = operator(*(torch.randn(8, 8, dtype=torch.float64) for _ in range(2)))
    right = torch.randn(2, 64, 64, dtype=torch.float64)
    expected = made @ right
    with adapters.take_over_operators() as taken:
        torch.testing.assert_close(made @ right, expected, rtol=1e-11, atol=1e-11)
    assert taken.calls["factorlayer"] == 1


def test_a_factor_with_a_structure_of_its_own_is_left_to_them(operator: Callable[..., object]) -> None:
    from linear_operator.operators import ToeplitzLinearOperator

    toeplitz = ToeplitzLinearOperator(torch.tensor([3.0, 1.0, 0.5]))
    made, right = operator(toeplitz, torch.eye(4)), torch.randn(12, 2)
    expected = made @ right
    with adapters.take_over_operators() as taken:
        assert torch.equal(made @ right, expected)
    assert "ToeplitzLinearOperator, whose structure is its own" in str(taken)
    assert not taken.calls["factorlayer"]


def test_it_is_in_place_until_the_last_one_is_undone(operator: Callable[..., object]) -> None:
    from linear_operator.operators import kronecker_product_linear_operator as module

    theirs = module._matmul, module._t_matmul
    first = adapters.take_over_operators()
    second = adapters.take_over_operators()
    first.undo()
    first.undo()
    assert module._matmul is not theirs[0]
    second.undo()
    assert (module._matmul, module._t_matmul) == theirs


def test_without_the_package_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="linear_operator is not installed; `pip install linear_operator`"):
        adapters.take_over_operators()
