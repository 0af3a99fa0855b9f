"""Complex tensors: what naive and batched compute, their gradients, a layer's start, its projection, and the words."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from oracle import SMALL_SPECS, kronecker, monarch, spec_id
from torch import Tensor, nn

from factorlayer import ACTIVATIONS, FactorLinear, FactorMLP, factor_linear, fuse
from factorlayer.maths.project import project, to_dense
from factorlayer.maths.spec import LayerSpec

COMPLEX, REAL = torch.complex128, torch.float64
each_spec = pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
DEFINED = {"identity", "sigmoid", "tanh", "sine", "square"}  # and silu, which has no derivative


def tensors(spec: LayerSpec, x: torch.dtype, weights: torch.dtype, bias: torch.dtype) -> tuple[Tensor, Tensor, list]:
    return (
        torch.randn(2, 3, spec.in_features, dtype=x),
        torch.randn(spec.out_features, dtype=bias),
        [torch.randn(shape, dtype=weights) for shape in spec.weight_shapes],
    )


def dense(spec: LayerSpec, x: Tensor, bias: Tensor, weights: list[Tensor]) -> Tensor:
    return x.to(COMPLEX) @ to_dense(spec, [weight.to(COMPLEX) for weight in weights]).T + bias


@pytest.mark.parametrize("kinds", [(COMPLEX,) * 3, (COMPLEX, REAL, REAL), (REAL, COMPLEX, REAL), (REAL, REAL, COMPLEX)])
@pytest.mark.parametrize("implementation", ["auto", "naive", "batched"])
@each_spec
@pytest.mark.feature("complex64, complex128", result="falls back")
def test_outputs_and_gradients(spec: LayerSpec, implementation: str, kinds: tuple[torch.dtype, ...]) -> None:
    x, bias, weights = tensors(spec, *kinds)
    leaves = [t.requires_grad_() for t in (x, bias, *weights)]
    y = factor_linear(x, weights, bias, structure=spec.structure, implementation=implementation, rank=spec.rank)
    right = dense(spec, x, bias, weights)
    torch.testing.assert_close(y, right)
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad_y)
    assert [g.dtype for g in found] == [leaf.dtype for leaf in leaves]
    torch.testing.assert_close(found, torch.autograd.grad(right, leaves, grad_y))


@pytest.mark.parametrize("implementation", ["naive", "batched"])
@each_spec
def test_gradcheck(spec: LayerSpec, implementation: str) -> None:
    x, bias, weights = tensors(spec, COMPLEX, COMPLEX, COMPLEX)
    leaves = [t.requires_grad_() for t in (x[0], bias, *weights)]

    def call(x: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return factor_linear(x, weights, bias, "tanh", spec.structure, implementation, rank=spec.rank)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_conjugates_are_not_taken_for_what_they_conjugate() -> None:
    spec = kronecker((2, 3), (4, 5))
    x, bias, weights = tensors(spec, COMPLEX, COMPLEX, COMPLEX)
    given = x.conj(), bias.conj(), [weight.conj() for weight in weights]
    torch.testing.assert_close(factor_linear(given[0], given[2], given[1]), dense(spec, x, bias, weights).conj())
    torch.testing.assert_close(  # the imaginary part is negated by name only, the real part lies between others
        factor_linear(x.conj().imag, [w.conj().imag for w in weights], bias.real),
        dense(spec, -x.imag, bias.real, [-w.imag for w in weights]).real,
    )


@pytest.mark.parametrize("x", [torch.complex64, torch.float32])
@pytest.mark.parametrize("weights", [torch.complex64, torch.float32])
def test_auto_says_why_it_is_batched_and_fused_refuses(x: torch.dtype, weights: torch.dtype) -> None:
    layer = FactorLinear(12, 20, dtype=weights)
    if weights.is_complex:
        assert layer.explain().splitlines()[-1] == (
            "runs batched, because fused cannot: it has kernels for torch.float64, torch.float32, torch.bfloat16, "
            "torch.float16, x is torch.complex64"
        )
    layer.implementation = "fused"
    rows = torch.randn(2, 12).to(x)
    if x.is_complex or weights.is_complex:
        name = "x" if x.is_complex else "weight_0"
        with pytest.raises(RuntimeError, match=f"FactorLinear: implementation='fused' cannot run: .*, {name} is "):
            layer(rows)
    else:
        assert layer(rows).dtype == torch.float32


@pytest.mark.parametrize("implementation", ["auto", "naive", "batched"])
def test_two_precisions_are_refused(implementation: str) -> None:
    layer = FactorLinear(12, 20, dtype=torch.complex64, implementation=implementation)
    with pytest.raises(TypeError, match=r"x and weight_0 should have one dtype, x is torch\.complex128 and weight_0"):
        layer(torch.randn(2, 12, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"x is torch\.bfloat16 and weight_0 is torch\.complex64"):
        layer(torch.randn(2, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("implementation", ["auto", "naive"])
def test_activations_are_those_that_pytorch_has(name: str, implementation: str) -> None:
    layer = FactorLinear(12, 20, activation=name, dtype=COMPLEX, implementation=implementation)
    x = torch.randn(2, 12, dtype=COMPLEX)
    if name in DEFINED:
        torch.testing.assert_close(layer(x), ACTIVATIONS[name](dense(layer.spec, x, layer.bias, layer.weights)))
        return
    with pytest.raises(
        TypeError, match=r"FactorLinear: activation .* is one that PyTorch does not have for complex numbers"
    ):
        layer(x)
    if name == "silu":
        layer.requires_grad_(False)
        torch.testing.assert_close(layer(x), nn.functional.silu(dense(layer.spec, x, layer.bias, layer.weights)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=REAL))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * x)


def test_an_activation_that_learns_and_one_that_compares() -> None:
    layer = FactorLinear(12, 20, activation=Scaled(), dtype=COMPLEX)
    x = torch.randn(2, 12, dtype=COMPLEX)
    torch.testing.assert_close(layer(x), torch.tanh(0.5 * dense(layer.spec, x, layer.bias, layer.weights)))
    layer(x).abs().sum().backward()
    assert layer.activation.scale.grad.dtype == REAL
    with pytest.raises(TypeError, match="is one that PyTorch does not have"):
        FactorLinear(12, 20, activation=lambda x: torch.where(x > 0, x, -x), dtype=COMPLEX)(x)


@pytest.mark.parametrize(
    "spec",
    [
        kronecker((48,), (32,)),
        kronecker((8, 6), (4, 8)),
        kronecker((8, 6), (4, 8), rank=4),
        kronecker((4, 4, 3), (4, 2, 4), rank=2),
        monarch((8, 6), (4, 8), rank=4),
        monarch((4, 4, 3), (4, 2, 4)),
    ],
    ids=spec_id,
)
def test_outputs_start_with_the_variance_of_linear(spec: LayerSpec) -> None:
    """nn.Linear draws both parts of a weight as it draws real ones: E|y|² is two thirds of E|x|², and the bias adds its
    own. The mean over layers is known to four of its own standard errors, which are small."""
    linear = nn.Linear(spec.in_features, 20000, dtype=COMPLEX).requires_grad_(False)
    assert float(linear.weight.abs().square().sum(1).mean()) == pytest.approx(2 / 3, rel=0.01)
    of_weights, of_bias = [], []
    for _ in range(800):
        layer = FactorLinear(
            spec.in_features, spec.out_features, structure=spec.structure, factors=(spec.in_factors, spec.out_factors),
            rank=spec.rank, dtype=COMPLEX,
        ).requires_grad_(False)  # fmt: skip
        of_weights.append(layer.to_dense().abs().square().sum(1).mean())
        of_bias.append(layer.bias.abs().square().mean())
    variances = torch.stack(of_weights)
    error = 4 * float(variances.std()) / math.sqrt(len(variances))
    assert error <= 0.06
    assert float(variances.mean()) == pytest.approx(2 / 3, abs=error)
    of_linear = float(linear.bias.abs().square().mean())
    assert float(torch.stack(of_bias).mean()) == pytest.approx(of_linear, rel=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        kronecker((5,), (3,)),
        kronecker((2, 3), (4, 5)),
        kronecker((3, 4), (5, 2), rank=3),
        kronecker((2, 3, 4), (3, 2, 2)),
        monarch((4, 6), (5, 3), rank=2),
        monarch((1, 8), (6, 1), rank=3),
    ],
    ids=spec_id,
)
def test_what_has_the_structure_comes_back_from_linear(spec: LayerSpec) -> None:
    weights = [torch.randn(shape, dtype=COMPLEX) for shape in spec.weight_shapes]
    W = to_dense(spec, weights)
    torch.testing.assert_close(to_dense(spec, project(spec, W)), W)
    linear = nn.Linear(spec.in_features, spec.out_features, dtype=COMPLEX)
    with torch.no_grad():
        linear.weight.copy_(W)
    layer = FactorLinear.from_linear(
        linear, structure=spec.structure, factors=(spec.in_factors, spec.out_factors), rank=spec.rank
    )
    x = torch.randn(5, spec.in_features, dtype=COMPLEX)
    torch.testing.assert_close(layer(x), linear(x))
    torch.testing.assert_close(layer.to_linear()(x), linear(x))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_complex_projection_reaches_the_svd_bound(rank: int) -> None:
    (P1, P2), (Q1, Q2) = (2, 4), (3, 5)
    W = torch.randn(Q1 * Q2, P1 * P2, dtype=COMPLEX)
    blocks = [W[j * Q2 : (j + 1) * Q2, i * P2 : (i + 1) * P2].flatten() for j in range(Q1) for i in range(P1)]
    spec = kronecker((P1, P2), (Q1, Q2), rank)
    left = torch.linalg.svdvals(torch.stack(blocks))[rank:].norm()
    assert float((to_dense(spec, project(spec, W)) - W).norm()) == pytest.approx(float(left), rel=1e-10)


@pytest.mark.parametrize("x_dtype", [COMPLEX, REAL])
@pytest.mark.parametrize("implementation", ["auto", "v1", "v2"])
def test_blocks_and_what_fuse_returns(implementation: str, x_dtype: torch.dtype) -> None:
    settings = dict(activation="tanh", implementation=implementation, dtype=COMPLEX)
    mlp = FactorMLP([6, (2, 4), (4, 4), 3], **settings)
    x = torch.randn(5, 6, dtype=x_dtype)
    y: Tensor = x.to(COMPLEX)
    for i, layer in enumerate(mlp.layers):
        weight = layer.to_dense() if isinstance(layer, FactorLinear) else layer.weight
        y = nn.functional.linear(y, weight, layer.bias)
        y = torch.tanh(y) if i < 2 else y
    torch.testing.assert_close(mlp(x), y)
    torch.testing.assert_close(copy.deepcopy(mlp).freeze()(x), y)
    module = nn.Sequential(nn.Linear(6, 7, dtype=COMPLEX), nn.Tanh(), nn.Linear(7, 3, dtype=COMPLEX))
    torch.testing.assert_close(fuse(module, implementation)(x), module(x.to(COMPLEX)))


def test_a_layer_becomes_complex_and_keeps_under_torch_func_and_compile() -> None:
    layer = FactorLinear(12, 20, activation="tanh", dtype=COMPLEX)
    assert "dtype=torch.complex128" in repr(layer)
    x = torch.randn(5, 12, dtype=COMPLEX)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    again = FactorLinear(12, 20, activation="tanh", dtype=COMPLEX)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again(x), layer(x))
