"""FactorMLP: what it computes, its parameters, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from oracle import nearly
from torch import Tensor, nn

import factorlayer.functional
from factorlayer import FactorLinear, FactorMLP
from factorlayer.activations.expression import Expression
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.stacks.stack import why_auto_is_not_stacked

BLOCKS = {
    "dense": dict(widths=[5, 7, 3]),
    "factored": dict(widths=[(2, 3), (4, 5), (3, 3)], activation="gelu", rank=2),
    "mixed": dict(widths=[6, (2, 4), (4, 4), 3, 6], activation="tanh", output_activation="sigmoid", residual=True),
    "monarch": dict(widths=[(2, 3), (3, 4), (2, 2)], structure="monarch", bias=False),
    "gated": dict(widths=[(3, 4), (6, 6), (3, 4)], activation="silu", gated=True, residual=True),
    "deeply-gated": dict(widths=[5, 8, 6, 4], activation="gelu", gated=True),
    "learned": dict(widths=[4, (2, 3), (3, 2), 2], activation=nn.PReLU(), output_activation=lambda x: x.tanh() / 2),
    "one-layer": dict(widths=[4, 3], output_activation="sine"),
}
each_block = pytest.mark.parametrize("kind", BLOCKS)


def block(kind: str, **more: object) -> FactorMLP:
    torch.manual_seed(0)
    return FactorMLP(**copy.deepcopy({**BLOCKS[kind], **more})).double()


def definition(mlp: FactorMLP, x: Tensor) -> Tensor:
    """Layer by layer, by dense matrices."""

    def apply(layer: nn.Module, x: Tensor) -> Tensor:
        weight = layer.to_dense() if isinstance(layer, FactorLinear) else layer.weight
        return nn.functional.linear(x, weight, layer.bias)

    def activation(given: object, z: Tensor) -> Tensor:
        if isinstance(given, nn.Module):
            return given(z)
        return z.tanh() / 2 if isinstance(given, Expression) else ACTIVATIONS[given or "identity"](z)

    y, last = x, len(mlp.layers) - 1
    for i, layer in enumerate(mlp.layers):
        z = apply(layer, y)
        if i == last:
            y = activation(mlp.output_activation, z)
        elif mlp.gates is None:
            y = activation(mlp.activation, z)
        else:
            y = activation(mlp.activation, apply(mlp.gates[i], y)) * z
    return x + y if mlp.residual else y


@each_block
@pytest.mark.parametrize("implementation", ["auto", "v1", "v2", "v3"])
def test_outputs_and_gradients_are_those_of_its_definition(kind: str, implementation: str) -> None:
    mlp = block(kind, implementation=implementation)
    features = mlp.layers[0].in_features
    x = torch.randn(2, 4, features, dtype=torch.float64, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    grad_y = torch.randn_like(mlp(x))
    found = torch.autograd.grad(mlp(x), leaves, grad_y)
    right = torch.autograd.grad(definition(mlp, x), leaves, grad_y)
    torch.testing.assert_close(mlp(x), definition(mlp, x))
    torch.testing.assert_close(found, right)
    assert mlp(x[:0]).shape == (0, *mlp(x).shape[1:])


def test_second_derivatives_make_a_laplacian() -> None:
    """As networks for differential equations need it."""
    mlp = block("dense", widths=[3, 8, 8, 1], activation="tanh", implementation="fused")
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def laplacian(run: object) -> Tensor:
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3))

    found, right = laplacian(mlp), laplacian(lambda x: definition(mlp, x))
    torch.testing.assert_close(found, right)
    parameters = [p for p in mlp.parameters() if p is not mlp.layers[-1].bias]  # which no derivative knows
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), parameters), torch.autograd.grad(right.square().sum(), parameters)
    )


def test_layers_and_names() -> None:
    mlp = block("mixed")
    assert [type(layer) for layer in mlp.layers] == [nn.Linear, FactorLinear, nn.Linear, nn.Linear]
    assert list(mlp.state_dict())[:5] == [
        "layers.0.weight", "layers.0.bias", "layers.1.weight_0", "layers.1.weight_1", "layers.1.bias",
    ]  # fmt: skip
    assert list(block("gated").state_dict())[-3:] == ["gates.0.weight_0", "gates.0.weight_1", "gates.0.bias"]
    assert "activation='silu'" in repr(block("gated")) and "residual=True" in repr(block("gated"))


@each_block
@pytest.mark.feature("FactorMLP: copy.deepcopy, pickle, state_dict", result="works")
def test_copies_pickles_and_moves(kind: str) -> None:
    mlp = block(kind)
    x = torch.randn(3, mlp.layers[0].in_features, dtype=torch.float64)
    for again in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert nearly(again(x), mlp(x))
        with torch.no_grad():
            next(again.parameters()).add_(1)
        assert not nearly(again(x), mlp(x))
    fresh = block(kind)
    fresh.load_state_dict(mlp.state_dict())
    assert nearly(fresh(x), mlp(x))
    assert mlp.float()(x.float()).dtype == torch.float32


@each_block
@pytest.mark.feature("FactorMLP: torch.compile as a whole graph", result="works")
def test_compiles_as_a_whole(kind: str) -> None:
    torch._dynamo.reset()
    mlp = block(kind, implementation="fused")
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, mlp.layers[0].in_features, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), mlp(x))


def test_trains() -> None:
    torch.manual_seed(0)
    mlp = FactorMLP([(2, 4), (4, 8), (2, 4)], activation="gelu", residual=True)
    x = torch.randn(256, 8)
    goal = torch.sin(2 * x)
    optimizer = torch.optim.Adam(mlp.parameters(), 0.02)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (mlp(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(widths=[4]), r"FactorMLP: widths should be those of the input and the output at least; it is \[4\]"),
        (dict(widths=[4, 5], activation="relo"), "FactorMLP: activation should be None or one of"),
        (dict(widths=[4, 5], implementation="v4"), "FactorMLP: implementation should be one of"),
        (dict(widths=[4, 5], residual=True), "residual=True adds the input to the output; their widths are 4 and 5"),
        (dict(widths=4), "FactorMLP: widths should be those of the input and the output at least; it is 4"),
        (dict(widths=[4, 5.0]), r"FactorMLP: a width should be a positive number, or several; it is 5\.0"),
        (dict(widths=[4, "5"]), "FactorMLP: a width should be a positive number, or several; it is '5'"),
        (dict(widths=[4, True]), "FactorMLP: a width should be a positive number, or several; it is True"),
        (dict(widths=[4, 0]), "FactorMLP: a width should be a positive number, or several; it is 0"),
        (dict(widths=[4, ()]), r"FactorMLP: a width should be a positive number, or several; it is \(\)"),
        (dict(widths=[4, (2, 2.5)]), r"FactorMLP: a width should be a positive number, or several; it is \(2, 2.5\)"),
    ],
)
def test_errors(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FactorMLP(**settings)


def test_a_wrong_input_names_the_layer() -> None:
    mlp = block("dense")
    with pytest.raises(
        ValueError, match=r"FactorMLP: layer layers\.0: the last dimension of x should be in_features=5"
    ):
        mlp(torch.randn(2, 6, dtype=torch.float64))


def test_auto_takes_all_layers_at_once_where_that_is_faster() -> None:
    def reason(*widths: int, dtype: torch.dtype = torch.float32) -> str | None:
        ((stack, _),) = FactorMLP(list(widths))._stacks
        return why_auto_is_not_stacked(stack._stack, torch.randn(2, widths[0], dtype=dtype))

    assert reason(48, 512, 256, 12) is None and reason(2, 20, 20, 1, dtype=torch.float64) is None
    assert "a weight this large" in str(reason(768, 3072, 768))
    assert "16 bits" in str(reason(48, 64, 12, dtype=torch.bfloat16))


def test_the_implementation_can_be_changed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    right = factorlayer.functional.naive
    monkeypatch.setattr(factorlayer.functional, "naive", lambda *a: called.append(1) or right(*a))
    mlp = block("gated", implementation="batched")
    mlp(torch.randn(2, 12, dtype=torch.float64))
    assert not called
    mlp.implementation = "v1"
    mlp(torch.randn(2, 12, dtype=torch.float64))
    assert len(called) == 3 and mlp.implementation == "naive"
    with pytest.raises(ValueError, match="implementation should be one of"):
        mlp.implementation = "fastest"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_activations_that_learn_are_where_the_layers_are(dtype: torch.dtype, device: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(0.5))
            self.register_buffer("shift", torch.tensor(0.25))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.by * x + self.shift)

    mlp = FactorMLP([6, (2, 4), (4, 2), 3], activation=Scaled(), output_activation=Scaled(), dtype=dtype, device=device)
    x = torch.zeros(4, 6, dtype=dtype, device=device)
    assert mlp(x).dtype == dtype and mlp(x).device == x.device
    for activation in (mlp.activation, mlp.output_activation):
        assert activation.by.dtype == (torch.float32 if dtype.is_complex else dtype)
        assert activation.by.device == activation.shift.device == x.device


@pytest.mark.parametrize("kind", ["gated", "learned"])
def test_activations_cannot_be_changed_afterwards(kind: str) -> None:
    mlp = block(kind)
    for name in ("activation", "output_activation"):
        with pytest.raises(AttributeError, match=f"FactorMLP: {name} is traced when the block is built; build another"):
            setattr(mlp, name, "sigmoid")


class Adapted(nn.Module):
    """A layer with a product of low rank beside it, as adapters put it in the layer's place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(torch.randn(2, layer.in_features).double())
        self.high = nn.Parameter(torch.randn(layer.out_features, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.low.t() @ self.high.t()


@each_block
def test_layers_that_take_the_place_of_others_run(kind: str) -> None:
    mlp, other = block(kind), block(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    mlp.layers[-1] = other.layers[-1]
    x = torch.randn(3, mlp.layers[0].in_features, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), definition(mlp, x))
    mlp.freeze()
    mlp.layers, mlp.gates = other.layers, other.gates
    torch.testing.assert_close(mlp(x), definition(mlp, x))
    assert mlp.is_frozen and mlp.stacks[0].members[0] is other.layers[0]


@pytest.mark.parametrize("compiled", [False, True])
@each_block
def test_what_is_no_layer_of_ours_is_called(kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    mlp = block(kind)
    run = torch.compile(mlp, backend="eager", fullgraph=True) if compiled else mlp
    x = torch.randn(3, mlp.layers[0].in_features, dtype=torch.float64)
    torch.testing.assert_close(run(x), definition(mlp, x))
    saved = mlp.state_dict()._metadata[""]
    name, layer = next(iter(mlp.layers.named_children()))
    mlp.layers._modules[name] = Adapted(layer)  # as torch.ao.quantization does
    right = copy.deepcopy(mlp)
    right.layers[0] = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.float64)
    adapted = mlp.layers[0]
    with torch.no_grad():
        dense = layer.to_dense() if isinstance(layer, FactorLinear) else layer.weight
        right.layers[0].weight.copy_(dense + adapted.high @ adapted.low)
        if layer.bias is not None:
            right.layers[0].bias.copy_(layer.bias)
    torch.testing.assert_close(run(x), definition(right, x))
    run(x).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())
    assert mlp.explain().splitlines()[1] == "  its layers one by one, because layers.0 is Adapted"
    assert mlp.state_dict()._metadata[""] == saved


def test_a_layer_with_a_call_of_its_own_is_called() -> None:
    class Twice(FactorLinear):
        def __call__(self, x: Tensor) -> Tensor:
            made: Tensor = super().__call__(x)
            return 2 * made

    mlp, x = FactorMLP([4, 4, 3], activation="tanh", dtype=torch.float64), torch.randn(5, 4).double()
    mlp.layers[0] = Twice(4, 4, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), mlp.layers[1](torch.tanh(mlp.layers[0](x))))


def test_explain() -> None:
    assert block("gated").explain().splitlines() == [
        "FactorMLP:",
        "  layers.0: 3 x 4 -> 6 x 6, kronecker",
        "  multiplied by gates.0: 3 x 4 -> 6 x 6, kronecker, silu",
        "  layers.1: 6 x 6 -> 3 x 4, kronecker",
        "  plus the input",
    ]
    assert block("dense").explain().splitlines()[1:] == ["  layers.0: 5 -> 7, relu", "  layers.1: 7 -> 3"]
    learning = FactorMLP([4, 8, 2], activation=nn.PReLU()).explain().splitlines()
    assert learning[1].endswith("p0 * x) (on a GPU, trained by itself: its activation learns)")
    assert learning[2] == "  layers.1: 8 -> 2"


@pytest.mark.feature("FactorMLP: second derivatives", result="works")
def test_gradgradcheck() -> None:
    mlp = block("learned", implementation="fused")
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    inputs = (x, *mlp.parameters())
    assert torch.autograd.gradgradcheck(lambda x, *_: mlp(x), inputs, atol=1e-4)


@pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])
def test_a_weight_of_another_shape_is_refused(implementation: str) -> None:
    mlp = block("dense", implementation=implementation)
    mlp.layers[0].weight = nn.Parameter(torch.randn(5, 7).double())
    with pytest.raises(
        ValueError, match=r"^FactorMLP: layer layers\.0: weight_0 should have the shape \(7, 5\), it has"
    ):
        mlp(torch.randn(2, 5).double())


@pytest.mark.feature("FactorMLP: torch.autograd.functional.jacobian(vectorize=True)", result="works")
def test_jacobians_of_many_vectors_at_once() -> None:
    mlp = block("dense")
    x = torch.randn(3, 5, dtype=torch.float64)
    found = torch.autograd.functional.jacobian(mlp, x, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(lambda x: definition(mlp, x), x))


def test_gradients_through_a_step_are_zeros_that_can_be_differentiated() -> None:
    mlp = FactorMLP([4, 4, 3], activation=lambda x: (x > 0) * 1.0, implementation="fused", dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    plain = torch.autograd.grad(mlp(x).sum(), leaves)
    again = torch.autograd.grad(mlp(x).sum(), leaves, create_graph=True)
    torch.testing.assert_close(plain, again)
