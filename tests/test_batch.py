"""Factors with batch axes: each member's numbers and gradients, broadcasting, and the words for what is ambiguous."""

from __future__ import annotations

import functools
import itertools
import re
import warnings

import pytest
import torch
from oracle import SMALL_SPECS, kronecker, monarch, spec_id
from torch import Tensor

import factorlayer.functional
from factorlayer import factor_linear
from factorlayer.maths.project import to_dense
from factorlayer.maths.spec import LayerSpec

each_implementation = pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])


def draw(spec: LayerSpec, batch: tuple[int, ...], rows: tuple[int, ...] = (3,)) -> tuple[Tensor, list[Tensor], Tensor]:
    return (
        torch.randn(*batch, *rows, spec.in_features, dtype=torch.float64, requires_grad=True),
        [torch.randn(*batch, *shape, dtype=torch.float64, requires_grad=True) for shape in spec.weight_shapes],
        torch.randn(*batch, spec.out_features, dtype=torch.float64, requires_grad=True),
    )


def by_members(spec: LayerSpec, x: Tensor, weights: list[Tensor], bias: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Each by its dense matrix; a tensor may have axes of 1."""
    x = x.expand(*batch, *x.shape[len(batch) :])
    weights = [weight.expand(*batch, *weight.shape[len(batch) :]) for weight in weights]
    bias = bias.expand(*batch, spec.out_features)
    ys = []
    for index in itertools.product(*map(range, batch)):
        W = to_dense(spec, [weight[index] for weight in weights])
        ys.append(torch.tanh(x[index] @ W.T + bias[index]))
    return torch.stack(ys).unflatten(0, batch)


@each_implementation
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=str)
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
@pytest.mark.feature("weights with batch axes", result="works")
def test_members_have_their_own_weights(
    spec: LayerSpec, batch: tuple[int, ...], large: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto takes one way where a member is large, another where it is small."""
    monkeypatch.setattr(factorlayer.functional, "LARGE_MEMBER", 0 if large else 1 << 30)
    x, weights, bias = draw(spec, batch)
    leaves = [x, bias, *weights]
    y = factor_linear(x, weights, bias, "tanh", spec.structure, implementation, rank=spec.rank, batch_dims=len(batch))
    right = by_members(spec, x, weights, bias, batch)
    torch.testing.assert_close(y, right)
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad_y)
    torch.testing.assert_close(found, torch.autograd.grad(right, leaves, grad_y))


@each_implementation
def test_each_member_is_torch_kron(implementation: str) -> None:
    F1, F2 = torch.randn(4, 4, 2, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    y = factor_linear(x, [F1, F2], implementation=implementation, batch_dims=1)
    for b in range(4):
        torch.testing.assert_close(y[b], x[b] @ torch.kron(F1[b], F2[b]).T)


@pytest.mark.filterwarnings("ignore")
@each_implementation
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_it_is_the_product_of_linear_operator(batch: tuple[int, ...], implementation: str) -> None:
    operators = pytest.importorskip("linear_operator.operators")
    factors = [torch.randn(*batch, q, p, dtype=torch.float64) for q, p in ((4, 2), (5, 3), (2, 2))]
    x = torch.randn(*batch, 7, 12, dtype=torch.float64)
    operator = operators.KroneckerProductLinearOperator(*map(operators.to_linear_operator, factors))
    y = factor_linear(x, factors, implementation=implementation, batch_dims=len(batch))
    torch.testing.assert_close(y, operator.matmul(x.mT).mT)


@each_implementation
@pytest.mark.parametrize("spec", [kronecker((2, 3), (4, 5), rank=2), monarch((4, 3), (2, 5), rank=2)], ids=spec_id)
@pytest.mark.parametrize("alone", ["x", "weights", "one-weight", "bias", "shared-bias", "all"])
def test_axes_of_one_are_expanded(spec: LayerSpec, alone: str, implementation: str) -> None:
    batch = (2, 3)
    x, weights, bias = draw(spec, batch)
    with torch.no_grad():
        x = x[:1] if alone in ("x", "all") else x
        weights = [w[:, :1] if alone in ("weights", "all") else w for w in weights]
        weights = [weights[0][:1, :1] if alone == "one-weight" else weights[0], *weights[1:]]
        bias = bias[0, 0] if alone == "shared-bias" else bias[:1] if alone in ("bias", "all") else bias
        weights = [w[:1] if alone == "all" else w for w in weights]
        x, bias = (x[:, :1], bias[:, :1]) if alone == "all" else (x, bias)
    leaves = [t.detach().requires_grad_() for t in (x, bias, *weights)]
    x, bias, *weights = leaves
    y = factor_linear(x, weights, bias, "tanh", spec.structure, implementation, batch_dims=2)
    right = by_members(spec, x, weights, bias, (1, 1) if alone == "all" else batch)
    torch.testing.assert_close(y, right)
    found = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(right.square().sum(), leaves))


@each_implementation
@pytest.mark.parametrize("rows", [(), (0,), (2, 4)], ids=str)
def test_any_dimensions_follow_the_batch(rows: tuple[int, ...], implementation: str) -> None:
    spec = kronecker((2, 3), (4, 5))
    x, weights, bias = draw(spec, (3,), rows)
    y = factor_linear(x, weights, bias, "tanh", implementation=implementation, batch_dims=1)
    torch.testing.assert_close(y, by_members(spec, x, weights, bias, (3,)))
    assert y.shape == (3, *rows, 20)


@each_implementation
def test_a_batch_without_members(implementation: str) -> None:
    x, weights, bias = draw(kronecker((2, 3), (4, 5)), (2, 0))
    y = factor_linear(x, weights, bias, implementation=implementation, batch_dims=2)
    assert (y.shape, y.dtype) == ((2, 0, 3, 20), torch.float64)
    found = torch.autograd.grad(y.sum(), [x, bias, *weights])
    assert [g.shape for g in found] == [t.shape for t in (x, bias, *weights)]


@each_implementation
def test_second_derivatives(implementation: str) -> None:
    x, weights, bias = draw(kronecker((2, 3), (2, 2)), (2,), (2,))

    def call(x: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return factor_linear(x, weights, bias, "tanh", implementation=implementation, batch_dims=1)

    assert torch.autograd.gradgradcheck(call, (x, bias, *weights), fast_mode=True)


def test_complex_members_and_an_activation_that_learns() -> None:
    weights = [torch.randn(3, 4, 2, dtype=torch.complex128), torch.randn(3, 5, 3, dtype=torch.complex128)]
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    y = factor_linear(x, weights, batch_dims=1)
    for b in range(3):
        torch.testing.assert_close(y[b], (x[b] + 0j) @ torch.kron(weights[0][b], weights[1][b]).T)
    slope = torch.nn.PReLU(dtype=torch.float64)
    x, weights, bias = draw(kronecker((2, 3), (4, 5)), (3,))
    for implementation in ("auto", "naive", "batched", "fused"):
        y = factor_linear(x, weights, bias, slope, implementation=implementation, batch_dims=1)
        plain = factor_linear(x, weights, bias, implementation="naive", batch_dims=1)
        found, right = (torch.autograd.grad(v.sum(), slope.weight) for v in (y, slope(plain)))
        torch.testing.assert_close((y, found), (slope(plain), right))


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_compiles_as_a_whole(implementation: str) -> None:
    x, weights, bias = draw(kronecker((2, 3), (4, 5)), (3,))
    call = functools.partial(factor_linear, implementation=implementation, batch_dims=1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weights, bias), call(x, weights, bias))


# What is ambiguous


@pytest.mark.parametrize("implementation", ["auto", "naive"])
def test_as_many_rows_as_terms_are_warned_of_and_computed_as_before(implementation: str) -> None:
    F1, F2 = torch.randn(3, 4, 2), torch.randn(3, 5, 3)
    x = torch.randn(3, 7, 6)
    W = sum(torch.kron(F1[r], F2[r]) for r in range(3))
    message = (
        "factor_linear: W is the sum of 3 products, as the weights are (3, 4, 2), (3, 5, 3); x (3, 7, 6) has as many "
        "along its first axis: say batch_dims=1 if each of these has a W of its own, or rank=3 if not"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        y = factor_linear(x, [F1, F2], implementation=implementation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated = factor_linear(x, [F1, F2], implementation=implementation, rank=3)
        factor_linear(x[0], [F1, F2])  # a matrix of rows, as many as there are or not
        factor_linear(x[0, :3], [F1, F2])
        factor_linear(torch.randn(2, 7, 6), [F1, F2])
    for found in (y, stated):
        torch.testing.assert_close(found, x @ W.T, rtol=1e-4, atol=1e-4)


ONES = torch.ones
WRONG = {
    "rank-of-others": (
        dict(x=ONES(2, 6), weights=[ONES(3, 4, 2), ONES(3, 5, 3)], rank=2),
        "rank=2 was given, the weights are of rank 3: (3, 4, 2), (3, 5, 3)",
    ),
    "rank-of-one": (
        dict(x=ONES(2, 6), weights=[ONES(4, 2), ONES(5, 3)], rank=2),
        "rank=2 was given, the weights are of rank 1: (4, 2), (5, 3)",
    ),
    "four-dimensions": (
        dict(x=ONES(2, 6), weights=[ONES(2, 2, 4, 2), ONES(2, 2, 5, 3)]),
        "kronecker weights should all be [Qi, Pi], or all [rank, Qi, Pi] with one rank; they are (2, 2, 4, 2), "
        "(2, 2, 5, 3); a batch of them is said by batch_dims",
    ),
    "negative": (
        dict(x=ONES(2, 6), weights=[ONES(4, 2), ONES(5, 3)], batch_dims=-1),
        "batch_dims should be how many axes of a batch there are, it is -1",
    ),
    "bool": (
        dict(x=ONES(2, 6), weights=[ONES(4, 2), ONES(5, 3)], batch_dims=True),
        "batch_dims should be how many axes of a batch there are, it is True",
    ),
    "x-without-a-batch": (
        dict(x=ONES(6), weights=[ONES(2, 4, 2), ONES(2, 5, 3)], batch_dims=1),
        "batch_dims=1: x should be [*batch, …, in_features], it is (6,)",
    ),
    "weights-without-a-batch": (
        dict(x=ONES(2, 6), weights=[ONES(4, 2), ONES(5, 3)], batch_dims=1),
        "batch_dims=1: weights should be [*batch, Qi, Pi] or more, they are (4, 2), (5, 3)",
    ),
    "a-bias-of-other-dimensions": (
        dict(x=ONES(2, 6), weights=[ONES(2, 4, 2), ONES(2, 5, 3)], bias=ONES(2, 1, 20), batch_dims=1),
        "batch_dims=1: bias should be [*batch, out_features] or [out_features], it is (2, 1, 20)",
    ),
    "two-sizes": (
        dict(x=ONES(3, 1, 6), weights=[ONES(2, 4, 2), ONES(2, 5, 3)], batch_dims=1),
        "batch_dims=1: axis 0 should have one size, or 1, in all tensors; they are x (3, 1, 6), weight_0 (2, 4, 2), "
        "weight_1 (2, 5, 3)",
    ),
    "features": (
        dict(x=ONES(2, 3, 7), weights=[ONES(2, 4, 2), ONES(2, 5, 3)], batch_dims=1),
        "the last dimension of x should be in_features=6, x has the shape (3, 7)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=f"^{re.escape(f'factor_linear: {message}')}$"):
        factor_linear(**given)
