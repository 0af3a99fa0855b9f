"""Layers that keep the states between their kernels for the way back: right gradients however they are asked for, the
same bits every time, and memory that goes when the graph does."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from forward_rule import DTYPES, arithmetic, poison
from oracle import kronecker, monarch
from torch import Tensor, nn

from factorlayer import FactorLinear, fuse
from factorlayer.autograd import layer_ops
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
    spec: LayerSpec, x: Tensor, weights: list[Tensor], bias: Tensor, implementation: str = "fused", activation: str = ""
) -> Tensor:
    rank = spec.rank if spec.structure == "kronecker" else None
    return factor_linear(
        x,
        weights,
        bias,
        activation=activation or None,
        structure=spec.structure,
        rank=rank,
        implementation=implementation,
    )


def right(spec: LayerSpec, x: Tensor, weights: list[Tensor], bias: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights, bias)]
    y = layer_of(spec, leaves[0], leaves[1:-1], leaves[-1], "batched")
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


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("wanted", ["x", "one weight", "bias", "all but x"])
def test_some_gradients(wanted: str, number: int) -> None:
    spec, batch = LAYERS[number]
    x, weights, bias, grad = tensors(spec, "float32", batch)
    asked = {"x": [x], "one weight": [weights[1]], "bias": [bias], "all but x": [*weights, bias]}[wanted]
    y = layer_of(spec, x, weights, bias)
    assert keeps(y)
    expected = dict(zip(map(id, (x, *weights, bias)), right(spec, x, weights, bias, grad)[1:], strict=True))
    for leaf, made in zip(asked, torch.autograd.grad(y, asked, grad), strict=True):
        assert (made.double() - expected[id(leaf)]).norm() <= 2e-5 * expected[id(leaf)].norm()


def test_gradients_that_are_differentiated_again() -> None:
    spec, batch = kronecker((8, 40, 104, 24), (16, 8, 112, 40)), 3
    x, weights, bias, grad = tensors(spec, "float64", batch)
    y = layer_of(spec, x, weights, bias)
    assert keeps(y)
    (of_x,) = torch.autograd.grad(y, x, grad, create_graph=True)
    made = torch.autograd.grad(of_x.square().sum(), weights)
    z = layer_of(spec, x, weights, bias, "batched")
    (of_x,) = torch.autograd.grad(z, x, grad, create_graph=True)
    for one, other in zip(made, torch.autograd.grad(of_x.square().sum(), weights), strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_several_vectors_at_once() -> None:
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "float32", batch)
    y = layer_of(spec, x, weights, bias)
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


def test_memory_goes_with_the_graph() -> None:
    spec, batch = LAYERS[0]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)

    def step() -> None:
        y = layer_of(spec, x, weights, bias)
        assert keeps(y)
        torch.autograd.grad(y, [x, *weights, bias], grad)

    step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        step()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("activation", ["", "gelu"])
@pytest.mark.parametrize("number", [4, 5])
def test_compiled_layers_keep_it_too(number: int, activation: str) -> None:
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


def test_a_graph_replays_it() -> None:
    spec, batch = LAYERS[2]
    x, weights, bias, grad = tensors(spec, "bfloat16", batch)

    def step() -> tuple[Tensor, ...]:
        y = layer_of(spec, x, weights, bias)
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


def test_what_explain_says_of_it() -> None:
    spec, batch = LAYERS[0]
    layer = FactorLinear(
        spec.in_features, spec.out_features, factors=(spec.in_factors, spec.out_factors), rank=spec.rank
    )
    said = layer.to("cuda", torch.bfloat16).explain(batch)
    assert "states between kernels kept" in said and "from these states" in said
