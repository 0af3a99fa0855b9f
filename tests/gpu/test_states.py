"""Layers that keep the states between their kernels for the way back: right gradients however they are asked for, the
same bits every time, and memory that goes when the graph does."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import time

import pytest
import torch
from forward_rule import DTYPES, arithmetic, poison
from oracle import kronecker, monarch
from torch import Tensor, nn

from factorlayer import FactorLinear, fuse
from factorlayer.activations.texts import UserActivation, activation_of
from factorlayer.autograd import layer_ops
from factorlayer.autograd.backward import slope_of_kept
from factorlayer.functional import factor_linear
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec

LAYERS = [  # which keep states in nearly every dtype
    (kronecker((16, 16, 8, 24, 16), (16, 16, 8, 24, 16), rank=3), 9),
    (kronecker((57, 118, 140), (57, 118, 140), rank=3), 5),
    (kronecker((8, 40, 104, 24), (16, 8, 112, 40)), 30),
    (kronecker((21, 4, 24, 31, 15), (21, 4, 24, 31, 15)), 7),
    (monarch((64, 64), (64, 64)), 16384),
    (monarch((36, 264), (264, 36), rank=8), 2229),
]
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "tf32": 4e-3, "float32": 2e-5, "float64": 1e-12}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
layers = pytest.mark.parametrize(("spec", "batch"), LAYERS, ids=str)


def tensors(spec: LayerSpec, dtype: str, batch: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """x, weights, bias and grad_y on the GPU, x and parameters with gradients."""
    torch.manual_seed(batch)
    dt = torch.float32 if dtype == "tf32" else getattr(torch, dtype)

    def made(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda", dtype=torch.float64) * by).to(dt)

    weights = [made(*shape, by=shape[-1] ** -0.5).requires_grad_() for shape in spec.weight_shapes]
    x, bias = made(batch, spec.in_features).requires_grad_(), made(spec.out_features).requires_grad_()
    return x, weights, bias, made(batch, spec.out_features)


def layer_of(
    spec: LayerSpec,
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor,
    implementation: str = "fused",
    activation: UserActivation = None,
) -> Tensor:
    rank = spec.rank if spec.structure == "kronecker" else None
    return factor_linear(
        x,
        weights,
        bias,
        activation=activation,
        structure=spec.structure,
        rank=rank,
        implementation=implementation,
    )


def right(
    spec: LayerSpec,
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor,
    grad: Tensor,
    activation: UserActivation = None,
) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights, bias)]
    y = layer_of(spec, leaves[0], leaves[1:-1], leaves[-1], "batched", activation)
    return [y, *torch.autograd.grad(y, leaves, grad.double())]


def keeps(y: Tensor) -> bool:
    """Whether the node has a text that keeps states."""
    return bool(getattr(y.grad_fn, "kept", ""))


@layers
@dtypes
def test_gradients_of_everything(spec: LayerSpec, batch: int, dtype: str) -> None:
    x, weights, bias, grad = tensors(spec, dtype, batch)
    with arithmetic(dtype):
        poison(batch * spec.out_features * x.element_size())
        y = layer_of(spec, x, weights, bias)
        chain = Chain.of(spec, True, "identity")
        assert keeps(y) == bool(layer_ops.kept_text(layer_ops.text_for(chain, x), x.dtype, x.get_device(), batch))
        assert keeps(y) or dtype == "float32"
        poison(batch * spec.in_features * x.element_size())
        found = torch.autograd.grad(y, [x, *weights, bias], grad, retain_graph=True)
        again = torch.autograd.grad(y, [x, *weights, bias], grad)
        once_more = layer_of(spec, x, weights, bias)  # by the eager call
        assert keeps(once_more) == keeps(y)
        by_eager = torch.autograd.grad(once_more, [x, *weights, bias], grad)
    assert torch.equal(y, once_more)
    for first, second, third in zip(found, again, by_eager, strict=True):  # nothing that was kept has changed
        assert torch.equal(first, second) and torch.equal(first, third)
    for made, expected in zip((y, *found), right(spec, x, weights, bias, grad), strict=True):
        assert (made.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def kept_text(spec: LayerSpec, x: Tensor, activation: UserActivation) -> str:
    """The text of a layer with a bias that keeps states."""
    text = layer_ops.text_for(Chain.of(spec, True, activation_of(activation)[0]), x)
    return layer_ops.kept_text(text, x.dtype, x.get_device(), len(x))


@dtypes
@pytest.mark.parametrize(
    ("number", "activation"),
    [(0, "gelu"), (1, "tanh"), (2, nn.functional.mish), (3, "sigmoid")],
    ids=["gelu", "tanh", "mish", "sigmoid"],
)
def test_a_kronecker_layer_with_an_activation(number: int, activation: UserActivation, dtype: str) -> None:
    spec, batch = LAYERS[number]
    x, weights, bias, grad = tensors(spec, dtype, batch)
    leaves = [x, *weights, bias]
    with arithmetic(dtype):
        poison(batch * spec.out_features * x.element_size())
        y = layer_of(spec, x, weights, bias, activation=activation)
        assert keeps(y) == bool(kept_text(spec, x, activation))
        assert keeps(y) or dtype == "float32"
        poison(batch * spec.out_features * x.element_size())
        found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        again = torch.autograd.grad(y, leaves, grad)
        once_more = layer_of(spec, x, weights, bias, activation=activation)  # by the eager call
        assert keeps(once_more) == keeps(y)
        by_eager = torch.autograd.grad(once_more, leaves, grad)
    assert torch.equal(y, once_more)
    for first, second, third in zip(found, again, by_eager, strict=True):  # nothing that was kept has changed
        assert torch.equal(first, second) and torch.equal(first, third)
    for made, expected in zip((y, *found), right(spec, x, weights, bias, grad, activation), strict=True):
        assert (made.double() - expected).norm() <= 2 * TOLERANCE[dtype] * expected.norm()


def test_what_is_activated_may_be_changed_in_place() -> None:
    """As no slope is made of it."""
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)
    leaves = [x, *weights, bias]
    expected = torch.autograd.grad(layer_of(spec, x, weights, bias, activation="tanh"), leaves, 2 * grad)
    y = layer_of(spec, x, weights, bias, activation="tanh")
    assert keeps(y)
    for made, each in zip(torch.autograd.grad(y.mul_(2), leaves, grad), expected, strict=True):
        assert torch.equal(made, each)


def test_a_state_of_other_features_is_refused() -> None:
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)
    kept = kept_text(spec, x, "gelu")
    *_, last = Chain.parse(kept).kept
    assert last != spec.in_features
    slopes = torch.ops.factorlayer.slopes
    with torch.no_grad(), pytest.raises(RuntimeError, match=rf"x must be \[batch, {last}\]"):
        slopes(grad, x, weights, bias, slope_of_kept(kept))
    with torch.no_grad(), pytest.raises(RuntimeError, match='should be a layer and "kept"'):
        torch.ops.factorlayer.forward_states(x.new_zeros(batch, last), weights, bias, slope_of_kept(kept))


@dtypes
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_a_monarch_layer_with_an_activation(activation: str, dtype: str) -> None:
    spec, batch = LAYERS[5]
    x, weights, bias, grad = tensors(spec, dtype, batch)
    with arithmetic(dtype):
        y = layer_of(spec, x, weights, bias, activation=activation)
        assert keeps(y)
        found = torch.autograd.grad(y, [x, *weights, bias], grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights, bias)]
    expected = layer_of(spec, leaves[0], leaves[1:-1], leaves[-1], "batched", activation)
    for made, each in zip(found, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert (made.double() - each).norm() <= 2 * TOLERANCE[dtype] * each.norm()


@pytest.mark.parametrize(("number", "activation"), [(0, None), (0, "gelu"), (5, None)])
@pytest.mark.parametrize("wanted", ["x", "one weight", "bias", "all but x", "all but the bias", "all weights"])
def test_some_gradients(wanted: str, number: int, activation: UserActivation) -> None:
    spec, batch = LAYERS[number]
    x, weights, bias, grad = tensors(spec, "float32", batch)
    asked = {"x": [x], "one weight": [weights[1]], "bias": [bias], "all but x": [*weights, bias]}
    asked |= {"all but the bias": [x, *weights], "all weights": weights}
    y = layer_of(spec, x, weights, bias, activation=activation)
    assert keeps(y)
    made_right = right(spec, x, weights, bias, grad, activation)[1:]
    expected = dict(zip(map(id, (x, *weights, bias)), made_right, strict=True))
    for leaf, made in zip(asked[wanted], torch.autograd.grad(y, asked[wanted], grad), strict=True):
        assert (made.double() - expected[id(leaf)]).norm() <= 2e-5 * expected[id(leaf)].norm()


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_gradients_that_are_differentiated_again(activation: UserActivation) -> None:
    spec, batch = kronecker((8, 40, 104, 24), (16, 8, 112, 40)), 3
    x, weights, bias, grad = tensors(spec, "float64", batch)
    y = layer_of(spec, x, weights, bias, activation=activation)
    assert keeps(y)
    (of_x,) = torch.autograd.grad(y, x, grad, create_graph=True)
    made = torch.autograd.grad(of_x.square().sum(), weights)
    z = layer_of(spec, x, weights, bias, "batched", activation)
    (of_x,) = torch.autograd.grad(z, x, grad, create_graph=True)
    for one, other in zip(made, torch.autograd.grad(of_x.square().sum(), weights), strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_several_vectors_at_once(activation: UserActivation) -> None:
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "float32", batch)
    y = layer_of(spec, x, weights, bias, activation=activation)
    assert keeps(y)
    grads = torch.stack([grad, -2 * grad])
    made = torch.autograd.grad(y, [x, weights[0]], grads, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(y, [x, weights[0]], grad)
    for several, one in zip(made, alone, strict=True):
        assert (several[0] - one).norm() <= 1e-5 * one.norm()
        assert (several[1] + 2 * one).norm() <= 1e-5 * 2 * one.norm()


def test_frozen_weights_keep_nothing_and_a_weight_changed_in_place_is_found_out() -> None:
    spec, batch = LAYERS[2]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)
    y = layer_of(spec, x, weights, bias)
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)
    weights[1].requires_grad_(False)
    assert not keeps(layer_of(spec, x, weights, bias))


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_memory_goes_with_the_graph(activation: UserActivation) -> None:
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)

    def step() -> None:
        y = layer_of(spec, x, weights, bias, activation=activation)
        assert keeps(y)
        torch.autograd.grad(y, [x, *weights, bias], grad)

    step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        step()
    for _ in range(300):  # the thread that went back lets go of the gradients when it comes to it
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("number", [4, 5])
def test_compiled_layers_keep_it_too(number: int, activation: str | None) -> None:
    spec, batch = LAYERS[number]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch // 8)

    def step(*given: Tensor) -> Tensor:
        return layer_of(spec, given[0], list(given[1:-1]), given[-1], activation=activation)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    y = compiled(x, *weights, bias)
    found = torch.autograd.grad(y, [x, *weights, bias], grad)
    expected = step(x, *weights, bias)
    for made, each in zip(found, torch.autograd.grad(expected, [x, *weights, bias], grad), strict=True):
        assert (made.double() - each.double()).norm() <= TOLERANCE["bfloat16"] * each.double().norm()
    assert layer_ops.kept_for_many(Chain.of(spec, True, activation or "identity").text, x.dtype, x.get_device())


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
@pytest.mark.parametrize("compiles", [False, True])
@dtypes
def test_blocks_of_monarch_layers(activation: str, compiles: bool, dtype: str) -> None:
    torch.manual_seed(0)
    dt = DTYPES[dtype]
    widths = [1024, 2048, 1024, 512]
    layers = [FactorLinear(*size, structure="monarch", blocks=16, rank=24) for size in itertools.pairwise(widths)]
    kinds = {"tanh": nn.Tanh, "gelu": nn.GELU}
    model = nn.Sequential(layers[0], kinds[activation](), layers[1], kinds[activation](), layers[2])
    twin = copy.deepcopy(model).to("cuda", torch.float64)
    for layer in layers:
        layer.implementation = "fused"
    block = fuse(model.to("cuda", dt), implementation="fused")
    x = torch.randn(3000, 1024, device="cuda", dtype=dt)
    with arithmetic(dtype):
        run = block
        if compiles:
            torch._dynamo.reset()
            run = torch.compile(block)
        loss = run(x).double().square().sum()
        loss.backward()
        found = [p.grad.clone() for p in block.parameters()]
        block.zero_grad()
        run(x).double().square().sum().backward()
    for p, first in zip(block.parameters(), found, strict=True):
        assert torch.equal(p.grad, first)
    twin(x.double()).square().sum().backward()
    for made, each in zip(found, twin.parameters(), strict=True):
        assert (made.double() - each.grad).norm() <= 8 * TOLERANCE[dtype] * each.grad.norm()


def nodes_that_keep(y: Tensor) -> int:
    """How many nodes of the graph behind y have a text that keeps states."""
    found, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return sum(" kept " in getattr(node, "kept", "") + getattr(node, "layers", "") for node in found)


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
@dtypes
def test_blocks_of_kronecker_layers(activation: str, dtype: str) -> None:
    """The gradient goes back through tanh behind a layer that is one of a run, and through gelu in the layer."""
    torch.manual_seed(0)
    dt = DTYPES[dtype]
    wide, other = (8, 40, 104, 24), (16, 8, 112, 40)
    pairs = [(wide, other), (other, wide), (wide, other)]
    layers = [FactorLinear(math.prod(p), math.prod(q), factors=(p, q)) for p, q in pairs]
    kinds = {"tanh": nn.Tanh, "gelu": nn.GELU}
    model = nn.Sequential(layers[0], kinds[activation](), layers[1], kinds[activation](), layers[2], nn.GELU())
    for p in model.parameters():
        p.data.normal_().mul_(p.shape[-1] ** -0.5 if p.dim() > 1 else 1)
    for layer in layers:
        layer.implementation = "batched"
    twin = copy.deepcopy(model).to("cuda", torch.float64)
    for layer in layers:
        layer.implementation = "fused"
    block = fuse(model.to("cuda", dt), implementation="fused")
    x = torch.randn(30, math.prod(wide), device="cuda", dtype=dt, requires_grad=True)
    leaves = [x, *block.parameters()]
    with arithmetic(dtype):
        y = block(x)
        assert nodes_that_keep(y) or dtype == "float32"
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, leaves, grad)
        again = torch.autograd.grad(block(x), leaves, grad)
    for first, second in zip(found, again, strict=True):
        assert torch.equal(first, second)
    x = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(twin(x), [x, *twin.parameters()], grad.double())
    for made, each in zip(found, expected, strict=True):
        assert (made.double() - each).norm() <= 8 * TOLERANCE[dtype] * each.norm()


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_graph_replays_it(activation: UserActivation) -> None:
    spec, batch = LAYERS[2]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)

    def step() -> tuple[Tensor, ...]:
        y = layer_of(spec, x, weights, bias, activation=activation)
        assert keeps(y)
        return torch.autograd.grad(y, [x, *weights, bias], grad)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    graph.replay()
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_what_explain_says_of_it(activation: UserActivation) -> None:
    spec, batch = LAYERS[0]
    factors = spec.in_factors, spec.out_factors
    layer = FactorLinear(spec.in_features, spec.out_features, factors=factors, rank=spec.rank, activation=activation)
    said = layer.to("cuda", torch.bfloat16).explain(batch)
    assert "states between kernels kept" in said and "from these states" in said
    assert ("activation: grad_y back through it, from the last state" in said) == (activation == "gelu")
