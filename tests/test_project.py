"""From dense to structured: exact on exact inputs, and nothing nearer is found by other means."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
from oracle import Case, draw_inputs, kronecker, monarch, nearly, spec_id
from torch import Tensor, nn

from factorlayer import FactorLinear
from factorlayer.maths.project import project, to_dense
from factorlayer.maths.spec import LayerSpec

EXACT_SPECS = [
    kronecker((5,), (3,)),
    kronecker((2, 3), (4, 5)),
    kronecker((3, 4), (5, 2), rank=3),
    kronecker((2, 3), (3, 2), rank=6),  # the full rank: every matrix has this structure
    kronecker((2, 3, 4), (3, 2, 2)),
    kronecker((2, 3, 2, 2), (3, 2, 1, 4)),
    kronecker((1, 3, 1), (3, 1, 2)),
    monarch((5,), (3,)),
    monarch((2, 3), (4, 5)),
    monarch((4, 6), (5, 3), rank=2),
    monarch((1, 8), (6, 1), rank=3),
    monarch((2, 4), (3, 2), rank=3),
]
SMALL_SPECS = [
    kronecker((2, 2), (2, 3)),
    kronecker((2, 2), (3, 2), rank=2),
    kronecker((2, 2, 2), (2, 2, 2)),
    monarch((2, 3), (2, 2)),
    monarch((2, 3), (3, 2), rank=2),
]


def structured(spec: LayerSpec, seed: int = 0) -> Tensor:
    return to_dense(spec, draw_inputs(Case(spec, 1), torch.float64, seed).weights)


def distance(spec: LayerSpec, dense: Tensor) -> float:
    return float((to_dense(spec, project(spec, dense)) - dense).norm() / dense.norm())


def dense_of(spec: LayerSpec) -> Tensor:
    return torch.randn(spec.out_features, spec.in_features, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", EXACT_SPECS, ids=spec_id)
def test_what_has_the_structure_comes_back(spec: LayerSpec, seed: int) -> None:
    dense = structured(spec, seed)
    weights = project(spec, dense)
    assert [w.shape for w in weights] == [torch.Size(shape) for shape in spec.weight_shapes]
    torch.testing.assert_close(to_dense(spec, weights), dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_two_terms_of_three_factors_come_back(seed: int) -> None:
    """No closed form, and in general a local optimum; on exact inputs of this size the alternation gets there."""
    spec = kronecker((3, 3, 3), (3, 3, 3), rank=2)
    assert distance(spec, structured(spec, seed)) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_more_terms_are_nearer(seed: int) -> None:
    torch.manual_seed(seed)
    dense = torch.randn(12, 12, dtype=torch.float64)
    distances = [distance(kronecker((2, 3, 2), (2, 3, 2), rank), dense) for rank in (1, 2, 3, 4)]
    assert all(more < less - 1e-3 for less, more in itertools.pairwise(distances))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_two_factors_reach_the_svd_bound(rank: int) -> None:
    """Rearranged by loops so that each block of W is a row: no rank-r matrix is nearer than what the SVD leaves."""
    (P1, P2), (Q1, Q2) = (2, 4), (3, 5)
    dense = torch.randn(Q1 * Q2, P1 * P2, dtype=torch.float64)
    blocks = [dense[j * Q2 : (j + 1) * Q2, i * P2 : (i + 1) * P2].flatten() for j in range(Q1) for i in range(P1)]
    left = torch.linalg.svdvals(torch.stack(blocks))[rank:].norm() / dense.norm()
    assert distance(kronecker((P1, P2), (Q1, Q2), rank), dense) == pytest.approx(float(left), rel=1e-10)


@pytest.mark.parametrize("rank", [1, 2])
def test_monarch_reaches_the_svd_bound_of_every_block(rank: int) -> None:
    K, L, p, s = 3, 4, 5, 2
    dense = torch.randn(L * s, K * p, dtype=torch.float64)
    left = torch.tensor(0.0, dtype=torch.float64)
    for k in range(K):
        for l in range(L):  # noqa: E741
            block = torch.stack([dense[j * L + l, k * p : (k + 1) * p] for j in range(s)])
            left += torch.linalg.svdvals(block)[rank:].square().sum()
    assert distance(monarch((K, p), (s, L), rank), dense) ** 2 == pytest.approx(
        float(left / dense.square().sum()), rel=1e-9, abs=1e-20
    )


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_no_descent_finds_anything_nearer(spec: LayerSpec) -> None:
    """L-BFGS from many random starts. With three factors there is no proof of the best, so this is the check."""
    dense = dense_of(spec)
    reached = distance(spec, dense)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        weights = [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in spec.weight_shapes
        ]
        optimizer = torch.optim.LBFGS(weights, max_iter=150, line_search_fn="strong_wolfe")

        def loss(weights: list[Tensor] = weights, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = (to_dense(spec, weights) - dense).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        found = float((to_dense(spec, weights).detach() - dense).norm() / dense.norm())
        assert reached <= found + 1e-6, seed


@pytest.mark.parametrize("spec", [*EXACT_SPECS, kronecker((2, 2, 2), (2, 2, 2), rank=2)], ids=spec_id)
def test_zero_comes_back_as_zero(spec: LayerSpec) -> None:
    weights = project(spec, torch.zeros(spec.out_features, spec.in_features))
    assert all(weight.isfinite().all() for weight in weights)
    assert not to_dense(spec, weights).any()


@pytest.mark.parametrize("spec", EXACT_SPECS, ids=spec_id)
def test_weights_share_the_size(spec: LayerSpec) -> None:
    """No weight is tiny because another is huge, which 16-bit types could not hold."""
    weights = project(spec, 1e6 * dense_of(spec))
    norms = [float(weight.norm()) for weight in weights]
    assert max(norms) <= 10 * min(norms)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("structure", ["kronecker", "monarch"])
def test_round_trip_through_linear(structure: str, dtype: torch.dtype, bias: bool) -> None:
    layer = FactorLinear(12, 20, bias, structure=structure, rank=2, dtype=dtype)
    linear = layer.to_linear()
    assert type(linear) is nn.Linear
    assert (linear.in_features, linear.out_features, linear.bias is not None) == (12, 20, bias)
    assert linear.weight.dtype == dtype
    assert nearly(linear.weight, layer.to_dense())
    back = FactorLinear.from_linear(linear, structure=structure, rank=2)
    assert back.spec == layer.spec
    assert all(parameter.dtype == dtype for parameter in back.parameters())
    if bias:
        assert torch.equal(back.bias, layer.bias)
    rtol = 4 * torch.finfo(dtype).eps
    error = (back.to_dense().double() - layer.to_dense().double()).norm() / layer.to_dense().double().norm()
    assert error <= rtol
    x = torch.randn(7, 12, dtype=dtype)
    assert (back(x) - linear(x)).double().norm() <= 4 * rtol * linear(x).double().norm()


def test_from_linear_passes_its_arguments_on() -> None:
    linear = nn.Linear(12, 20)
    layer = FactorLinear.from_linear(
        linear, structure="monarch", blocks=(3, 4), rank=2, activation="relu", implementation="v2"
    )
    assert (layer.spec, layer.activation, layer.implementation) == (
        monarch((3, 4), (5, 4), rank=2), "relu", "batched"
    )  # fmt: skip
    layer = FactorLinear.from_linear(linear, factors=((3, 4), (4, 5)))
    assert layer.spec == kronecker((3, 4), (4, 5))


def test_a_16_bit_weight_is_projected_in_float64() -> None:
    """Within a rounding of what the same numbers give in float64."""
    linear = nn.Linear(12, 20, dtype=torch.bfloat16)
    found = FactorLinear.from_linear(linear).to_dense().double()
    spec = FactorLinear.from_linear(linear).spec
    right = to_dense(spec, project(spec, linear.weight.double()))
    assert (found - right).norm() <= 4 * torch.finfo(torch.bfloat16).eps * right.norm()


def test_from_linear_does_not_touch_the_linear() -> None:
    linear = nn.Linear(12, 20)
    before = linear.weight.clone()
    layer = FactorLinear.from_linear(linear)
    layer.bias.data.zero_()
    assert torch.equal(linear.weight, before)
    assert linear.bias.any()


def test_gradients_flow_through_to_dense() -> None:
    for spec in (kronecker((2, 3), (3, 2), rank=2), monarch((2, 3), (3, 2), rank=2)):
        weights = [w.requires_grad_() for w in draw_inputs(Case(spec, 1), torch.float64, 0).weights]
        assert torch.autograd.gradcheck(lambda *weights, spec=spec: to_dense(spec, list(weights)), weights)


WRONG = {
    "untied-chain": (
        lambda: FactorLinear.from_linear(nn.Linear(8, 8), structure="monarch", factors=3),
        ValueError,
        "FactorLinear.from_linear: there is no projection onto a Monarch chain of 3 factors; use two factors, "
        "or blocks",
    ),
    "no-linear": (
        lambda: FactorLinear.from_linear(nn.Bilinear(8, 8, 8)),
        TypeError,
        "FactorLinear.from_linear: linear should be an nn.Linear, it is Bilinear",
    ),
    "activation": (
        lambda: FactorLinear(8, 8, activation="relu").to_linear(),
        ValueError,
        "FactorLinear.to_linear: this layer ends in activation='relu', which nn.Linear cannot hold; build the layer "
        "without it, or use to_dense()",
    ),
    "transposed": (
        lambda: project(kronecker((2, 3), (4, 5)), torch.zeros(6, 20)),
        ValueError,
        "the dense weight should be [out_features, in_features] = (20, 6), it is (6, 20)",
    ),
    **{
        name: (
            lambda number=number: project(kronecker((2, 3), (4, 5)), torch.full((20, 6), number)),
            ValueError,
            "the dense weight has infinite numbers or NaN, to which no matrix is nearest",
        )
        for name, number in (("infinite", torch.inf), ("NaN", torch.nan))
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        call()
    assert str(error.value) == message


# What a projection leaves


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "arguments",
    [dict(), dict(rank=3), dict(factors=3), dict(structure="monarch", blocks=4), dict(structure="monarch", rank=2)],
    ids=str,
)
def test_the_error_is_that_of_the_weights_and_of_outputs(arguments: dict[str, object], dtype: torch.dtype) -> None:
    linear = nn.Linear(16, 24, dtype=dtype).requires_grad_(False)
    x = torch.randn(3, 5, 16, dtype=dtype)
    layer = FactorLinear.from_linear(linear, activation="tanh", inputs=x, **arguments)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    W, bias, x = linear.weight.to(wide), linear.bias.to(wide), x.to(wide)
    found = to_dense(layer.spec, [weight.detach().to(wide) for weight in layer.weights])
    assert layer.projection_error.weight == pytest.approx(relative(found, W), rel=1e-9)
    assert layer.projection_error.outputs == pytest.approx(relative(x @ found.T + bias, x @ W.T + bias), rel=1e-9)
    assert layer.projection_error.weight > 0.1
    assert FactorLinear.from_linear(linear, **arguments).projection_error.outputs is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", EXACT_SPECS, ids=spec_id)
def test_the_error_of_what_has_the_structure_is_a_rounding(spec: LayerSpec, bias: bool) -> None:
    linear = nn.Linear(spec.in_features, spec.out_features, bias, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(structured(spec))
    error = FactorLinear.from_linear(
        linear, structure=spec.structure, factors=(spec.in_factors, spec.out_factors), rank=spec.rank,
        inputs=torch.randn(7, spec.in_features),
    ).projection_error  # fmt: skip
    assert error.weight < 1e-10 and error.outputs < 1e-10


def test_the_error_is_explained_and_kept_by_nothing_else() -> None:
    linear, x = nn.Linear(16, 24), torch.randn(5, 16)
    layer = FactorLinear.from_linear(linear, inputs=x)
    line = f"projected: {layer.projection_error}"
    assert line in layer.explain().splitlines() and re.fullmatch(
        r"projected: W differs by \d\.\d\de[-+]\d\d of its norm from the dense one it was projected from, and outputs "
        r"by \d\.\d\de[-+]\d\d of theirs",
        line,
    )
    assert "projected" not in FactorLinear(16, 24).explain()
    assert list(layer.state_dict()) == ["weight_0", "weight_1", "bias"]
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.projection_error is None and torch.equal(again(x), layer(x))
    assert b"ProjectionError" not in pickle.dumps(layer)


def test_the_error_of_zero_and_of_wrong_inputs() -> None:
    linear = nn.Linear(16, 24)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    error = FactorLinear.from_linear(linear, inputs=torch.ones(2, 16)).projection_error
    assert (error.weight, error.outputs) == (0, 0)
    dense, x = nn.Linear(16, 24), torch.randn(16)
    alone, of_one = (FactorLinear.from_linear(dense, inputs=inputs).projection_error for inputs in (x, x[None]))
    assert alone == of_one and of_one.outputs > 0
    message = (
        "FactorLinear.from_linear: the last dimension of inputs should be in_features=16, they have the shape (2, 15)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FactorLinear.from_linear(linear, inputs=torch.ones(2, 15))


@pytest.mark.parametrize("rank", [1, 2])
def test_weights_may_be_transposed(rank: int) -> None:
    layer = FactorLinear(12, 20, factors=((3, 4), (4, 5)), rank=rank)
    W = layer.to_dense()
    for weight in layer.weights:
        weight.data = weight.data.mT.contiguous().mT
        assert torch.equal(layer.to_dense(), W)
