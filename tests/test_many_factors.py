"""Layers of very many factors: each gradient is the one that is asked for, however many tensors there are beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import factorlayer
from factorlayer import FactorLinear
from factorlayer.autograd.layer_ops import MOST_WANTED, why_not_fused
from factorlayer.maths.chain import MOST_CONTRACTIONS, Chain
from factorlayer.maths.spec import LayerSpec

COUNTS = [30, 31, 32, 61, 62, 63, 64, 65, 66, 100, 200, 400, 1000]  # some bits of a mask of 32 or 64, and beyond
TWOS = (0, -1, 29)  # factors of 2 x 2, among others of 1 x 1


def layer_of(count: int, bias: bool, implementation: str = "fused", activation: str | None = None) -> FactorLinear:
    """Numbers near 1, so that a product of many is none too small, and all of them different."""
    sizes = [1] * count
    for at in TWOS:
        sizes[at] = 2
    features = 2 ** sizes.count(2)
    layer = FactorLinear(
        features, features, bias, factors=(tuple(sizes), tuple(sizes)), activation=activation,
        implementation=implementation, dtype=torch.float64,
    )  # fmt: skip
    random = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.98 + 0.04 * torch.rand(parameter.shape, generator=random, dtype=torch.float64))
    return layer


def gradients(layer: torch.nn.Module, x: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    given = x.clone().requires_grad_("x" in wanted)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in wanted)
        parameter.grad = None
    y = layer(given)
    (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = {name: parameter.grad for name, parameter in [("x", given), *layer.named_parameters()]}
    assert {name for name, grad in found.items() if grad is not None} == wanted
    return {"y": y.detach(), **{name: grad for name, grad in found.items() if grad is not None}}


def x_for(layer: FactorLinear) -> Tensor:
    return torch.rand(5, layer.in_features, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def subsets(layer: FactorLinear) -> list[set[str]]:
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return [
        set(names),
        {"x"},
        {names[-1]},
        {names[1], names[-1]},
        set(names[1::2]),
        set(names[::3]),
        set(names[60:67] or names[:2]),
    ]


# A thousand factors once: what a bias moves are limits of few
@pytest.mark.parametrize(
    ("count", "bias"),
    [(count, bias) for count in COUNTS for bias in (False, True) if bias or count < 1000],
)
def test_gradients_of_every_subset_are_those_of_the_definition(count: int, bias: bool) -> None:
    layer, naive = layer_of(count, bias), layer_of(count, bias, "naive")
    x = x_for(layer)
    for wanted in subsets(layer) if count <= 200 else subsets(layer)[::3]:
        right, found = gradients(naive, x, wanted), gradients(layer, x, wanted)
        for name, value in right.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("count", [62, 63, 64, 130])
def test_an_activation_that_learns_stands_behind_many_factors(count: int) -> None:
    layer, naive = (layer_of(count, True, name, torch.nn.PReLU(dtype=torch.float64)) for name in ("fused", "naive"))
    x = x_for(layer) - 2
    everything = {"x", *(name for name, _ in layer.named_parameters())}
    right, found = gradients(naive, x, everything), gradients(layer, x, everything)
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [61, 62, 100])
def test_compiled(count: int) -> None:
    layer = layer_of(count, False)
    x = x_for(layer)
    wanted = {"x", "weight_0", f"weight_{count - 1}"}
    right = gradients(layer, x, wanted)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    given = x.clone().requires_grad_()
    y = compiled(given)
    (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    torch.testing.assert_close(given.grad, right["x"])
    torch.testing.assert_close(dict(layer.named_parameters())[f"weight_{count - 1}"].grad, right[f"weight_{count - 1}"])


def test_gradients_for_each_sample_by_vmap() -> None:
    layer, naive = layer_of(100, True), layer_of(100, True, "naive")
    parameters, x = dict(layer.named_parameters()), x_for(layer)

    def loss(model: FactorLinear, given: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, sample[None]).square().sum()

    found, right = (
        torch.func.vmap(
            torch.func.grad(lambda given, sample, model=model: loss(model, given, sample)), in_dims=(None, 0)
        )(parameters if model is layer else dict(naive.named_parameters()), x)
        for model in (layer, naive)
    )
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_a_second_derivative() -> None:
    layer, naive = layer_of(70, False), layer_of(70, False, "naive")
    x = x_for(layer)
    seconds = []
    for model in (layer, naive):
        given = x.clone().requires_grad_()
        weights = list(model.parameters())
        first = torch.autograd.grad(model(given).square().sum(), [given, weights[69]], create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), [given, weights[0], weights[65]]))
    for found, right in zip(*seconds, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("frozen", [False, True], ids=["as-they-are", "frozen"])
def test_stacks_of_such_layers(frozen: bool) -> None:
    layers, plain = (
        [layer_of(count, bias, name) for count, bias in ((70, True), (100, False))] for name in ("fused", "naive")
    )
    fused, naive = factorlayer.fuse(torch.nn.Sequential(*layers)), torch.nn.Sequential(*plain)
    x = x_for(layers[0])
    if frozen:
        torch.testing.assert_close(fused.freeze()(x), naive(x), rtol=1e-9, atol=1e-9)
        return
    names = [name for name, _ in naive.named_parameters()]
    for wanted in ({*names}, {names[-1], "x"}, set(names[1::3])):
        right = gradients(naive, x, wanted)
        found = gradients(fused, x, {*wanted})
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_the_raw_op_says_how_many_bits_it_has() -> None:
    layer = layer_of(MOST_WANTED + 1, False)
    x, weights = x_for(layer), list(layer.parameters())
    with pytest.raises(
        (ValueError, RuntimeError), match=f"bits for {MOST_WANTED} weights at most, the chain has {MOST_WANTED + 1}"
    ):
        torch.ops.factorlayer.backward(x, x, weights, None, layer.chain.text, 1)
    layer = layer_of(MOST_WANTED, False)
    x, weights = x_for(layer), list(layer.parameters())
    last = torch.ops.factorlayer.backward(x, x, weights, None, layer.chain.text, 1 << (MOST_WANTED + 1))
    places = torch.ops.factorlayer.stack_backward(x, x, weights, layer.chain.text, [MOST_WANTED])
    assert torch.equal(last[0], places[0])


def test_a_bound_is_stated() -> None:
    spec = LayerSpec("kronecker", (1,) * (MOST_CONTRACTIONS + 1), (1,) * (MOST_CONTRACTIONS + 1))
    chain = Chain.of(spec, False, "identity")
    assert f"{MOST_CONTRACTIONS} factors at most" in (why_not_fused(torch.ones(1, 1), chain) or "")
    with pytest.raises((ValueError, RuntimeError), match=r"contractions at most|a weight index"):
        torch.ops.factorlayer.forward(torch.ones(1, 1), [torch.ones(1, 1)] * (MOST_CONTRACTIONS + 1), None, chain.text)
    most = LayerSpec("kronecker", (1,) * MOST_CONTRACTIONS, (1,) * MOST_CONTRACTIONS)
    text = Chain.of(most, False, "identity").text
    ones = [torch.ones(1, 1)] * MOST_CONTRACTIONS
    assert torch.ops.factorlayer.forward(torch.ones(1, 1), ones, None, text).item() == 1
    assert all(
        g.item() == 1
        for g in itertools.chain(
            torch.ops.factorlayer.stack_backward(torch.ones(1, 1), torch.ones(1, 1), ones, text, [0, 77])
        )
    )
