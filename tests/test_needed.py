"""Gradients that a pass asks for are all that it makes: torch.autograd.grad(y, x) no weight's, and the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorLinear, FactorMLP
from factorlayer.autograd import input_ops, layer_ops, needed, recurrent_ops, stack_ops

Given = Tensor | list[Tensor]


def layer(**told: Any) -> Callable[[Given], Tensor]:
    return FactorLinear(12, 15, factors=((3, 4), (5, 3)), implementation="fused", dtype=torch.float64, **told)


def states(gru: FactorGRU) -> Callable[[Given], Tensor]:
    return lambda x: gru(x)[0]


def modules() -> dict[str, tuple[nn.Module, Callable[[Given], Tensor], int]]:
    """A module, what is called, and how many tensors it is given."""
    torch.manual_seed(0)
    told: dict[str, Any] = dict(implementation="fused", dtype=torch.float64)
    gru = FactorGRU(12, 6, **told)
    made = {
        "layer": layer(),
        "without-bias": layer(bias=False),
        "activated": layer(activation="tanh"),
        "several": layer(),
        "block": FactorMLP([12, 8, 9], activation="gelu", **told),
    }
    found = {name: (module, module, 2 if name == "several" else 1) for name, module in made.items()}
    return {**found, "gru": (gru, states(gru), 1)}  # type: ignore[dict-item]


KINDS = tuple(modules())


def inputs(count: int) -> list[Tensor]:
    shape = (7, 2, 12 // count)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """What each backward pass of a Function is found to be asked for, without what is no tensor."""
    found: list[tuple[bool, ...]] = []
    monkeypatch.setattr(needed, "ASKED", 0)

    def record(ctx: Any, given: Any) -> tuple[bool, ...]:
        needs = needed.needed(ctx, given)
        found.append(tuple(need for need, t in zip(needs[-len(given) :], given, strict=True) if t is not None))
        return needs

    for module in (layer_ops, stack_ops, input_ops, recurrent_ops):
        monkeypatch.setattr(module, "needed", record)
    return found


@pytest.mark.feature("gradients of some inputs alone: torch.autograd.grad(y, x), backward(inputs=)", result="works")
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_alone_is_as_with_all_others(kind: str, leaf: bool, asked: list[tuple[bool, ...]]) -> None:
    module, call, count = modules()[kind]
    leaves = inputs(count)
    x = leaves if leaf else [2 * each for each in leaves]
    y = call(x if count > 1 else x[0])
    grad = torch.randn_like(y)
    learned = [*x, *module.parameters()]
    right = torch.autograd.grad(y, learned, grad, retain_graph=True)
    assert all(all(needs) or kind == "gru" for needs in asked)
    for wanted in itertools.chain(([i] for i in range(len(learned))), [range(len(x)), range(len(x), len(learned))]):
        asked.clear()
        made = torch.autograd.grad(y, [learned[i] for i in wanted], grad, retain_graph=True)
        for i, each in zip(wanted, made, strict=True):
            torch.testing.assert_close(each, right[i], rtol=1e-12, atol=1e-12)
        if set(wanted) <= set(range(len(x))):  # no parameter's
            assert asked and not any(any(needs[len(x) :]) for needs in asked if kind != "gru")
    (y * grad).sum().backward()
    for each, expected in zip([*leaves, *module.parameters()], right, strict=True):
        factor = 1 if leaf or not any(each is t for t in leaves) else 2
        torch.testing.assert_close(each.grad, factor * expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_an_input_can_be_differentiated(kind: str) -> None:
    """As a network's derivative by its inputs, of which a loss is made."""
    found = []
    for implementation in ("fused", "batched"):
        module, call, count = modules()[kind]
        module.implementation = implementation  # type: ignore[assignment]
        torch.manual_seed(1)
        x = inputs(count)
        y = call(x if count > 1 else x[0])
        slopes = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        loss = torch.stack([each.pow(2).sum() for each in slopes]).sum() + y.pow(3).sum()
        found.append(torch.autograd.grad(loss, [*x, *module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_inputs_of_a_backward_pass_are_all_that_gets_a_gradient(asked: list[tuple[bool, ...]]) -> None:
    module = layer()
    (x,) = inputs(1)
    weight, *others = module.parameters()  # type: ignore[attr-defined]
    module(x).sum().backward(inputs=[weight])
    assert weight.grad is not None and x.grad is None and all(each.grad is None for each in others)
    assert sum(map(sum, asked)) == 1


def test_small_layers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question may take as long as all their gradients."""
    questions: list[Any] = []
    monkeypatch.setattr(needed, "_will_execute", lambda node: questions.append(node) or True)
    module, (x,) = layer(), inputs(1)
    torch.autograd.grad(module(x).sum(), x)
    assert not questions
    monkeypatch.setattr(needed, "ASKED", x.numel())
    torch.autograd.grad(module(x).sum(), x)
    assert questions


def test_outside_of_a_pass_all_is_needed_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "ASKED", 0)
    x = torch.ones(3, requires_grad=True)
    node = (x * x).grad_fn
    assert node is not None

    class Context:
        needs_input_grad = False, True, True
        next_functions = node.next_functions

    assert needed.needed(Context(), [x, x]) == Context.needs_input_grad
    assert needed.needed(Context(), [x]) == Context.needs_input_grad  # another number of tensors than the node has
