"""Saved tensors that others keep, and bring back when they like: checkpointing, hooks, backward passes run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import MODULES, module, sample
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]

Run = Callable[[nn.Module, Tensor], Tensor]
each_kind = pytest.mark.parametrize("kind", MODULES)
each_way = pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])


def recomputed(module: nn.Module, x: Tensor, **how: Any) -> Tensor:
    y: Tensor = checkpoint(module, x, use_reentrant=False, **how)
    return y


def selective(policy: CheckpointPolicy) -> Run:
    """With the policy for the layers' own operations."""

    def choose(ctx: Any, op: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        own = "factorlayer" in str(op) or "mm" in str(op)
        return policy if own else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda m, x: recomputed(m, x, context_fn=lambda: create_selective_checkpoint_contexts(choose))


def without_early_stop(module: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return recomputed(module, x)


def under(hooks: Callable[[], contextlib.AbstractContextManager[Any]]) -> Run:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with hooks():
            y: Tensor = module(x)
        return y

    return run


def copies() -> contextlib.AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


CHECKPOINTED: dict[str, Run] = {
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "non-reentrant": recomputed,
    "without early stop": without_early_stop,
    "nested": lambda m, x: recomputed(lambda z: recomputed(m, z), x),
    "selective, saved": selective(CheckpointPolicy.MUST_SAVE),
    "selective, recomputed": selective(CheckpointPolicy.MUST_RECOMPUTE),
    "sequential": lambda m, x: checkpoint_sequential([m, nn.Identity()], 2, x, use_reentrant=False),
    "reentrant sequential": lambda m, x: checkpoint_sequential([m, nn.Identity()], 2, x, use_reentrant=True),
}
KEPT: dict[str, Run] = {
    "save_on_cpu": under(save_on_cpu),
    "copies": under(copies),
    "anomaly mode": under(lambda: torch.autograd.detect_anomaly(check_nan=True)),
}


def gradients(run: Run, module: nn.Module, x: Tensor, twice: bool = False) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = run(module, x)
    leaves = [x, *module.parameters()]
    if twice:
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True, allow_unused=True)
        total = torch.stack([g.square().sum() for g in first if g is not None]).sum()
        return [y, *torch.autograd.grad(total, leaves, allow_unused=True)]
    y.square().sum().backward()
    return [y, *(leaf.grad for leaf in leaves)]


def assert_same(found: list[Tensor | None], right: list[Tensor | None], implementation: str) -> None:
    """Equal bits of our own kernels, whose every run is the same."""
    for one, other in zip(found, right, strict=True):
        if implementation == "fused" and one is not None and other is not None:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


@each_kind
@each_way
@pytest.mark.parametrize("way", [*CHECKPOINTED, *KEPT])
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.feature("activation checkpointing, reentrant and not, nested, selective", result="works")
def test_gradients_are_those_without(kind: str, implementation: str, way: str) -> None:
    model, x = module(kind, implementation), sample(5)
    right = gradients(lambda m, x: m(x), model, x)
    assert_same(gradients({**CHECKPOINTED, **KEPT}[way], model, x), right, implementation)


@each_kind
@each_way
@pytest.mark.parametrize("way", ["non-reentrant", "without early stop", "nested", "sequential", *KEPT])
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_second_gradients_are_those_without(kind: str, implementation: str, way: str) -> None:
    model, x = module(kind, implementation), sample(5)
    right = gradients(lambda m, x: m(x), model, x, twice=True)
    found = gradients({**CHECKPOINTED, **KEPT}[way], model, x, twice=True)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_what_selective_checkpointing_has_saved_is_given_once(kind: str) -> None:
    """In PyTorch's words, which a second try to run the layers would hide."""
    with pytest.raises(RuntimeError, match="only allowed to backward once on any region computed under selective"):
        gradients(CHECKPOINTED["selective, saved"], module(kind, "fused"), sample(5), twice=True)


@each_kind
@each_way
def test_checkpointing_under_autocast(kind: str, implementation: str) -> None:
    model, x = module(kind, implementation, torch.float32), sample(5, dtype=torch.float32)

    def cast(run: Run) -> Run:
        def inner(m: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(m, x)
            return y.float()

        return inner

    right = gradients(cast(lambda m, x: m(x)), model, x)
    assert_same(gradients(cast(recomputed), model, x), right, implementation)


@pytest.mark.parametrize(
    ("kind", "implementation"), [(kind, ("auto", "fused")[i % 2]) for i, kind in enumerate(MODULES)]
)
@pytest.mark.feature("activation checkpointing inside torch.compile", result="works")
def test_checkpointing_compiled(kind: str, implementation: str) -> None:
    torch._dynamo.reset()
    model, x = module(kind, implementation), sample(5)
    right = gradients(recomputed, model, x)
    compiled = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, model, x), right)


@each_kind
@each_way
def test_backward_twice(kind: str, implementation: str) -> None:
    """With retain_graph the same once more; without it refused in PyTorch's words."""
    model, x = module(kind, implementation), sample(5).requires_grad_()
    leaves = [x, *(model.parameters() if kind != "frozen" else ())]
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert_same(list(second), list(first), implementation)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@each_kind
@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_saved_tensors_are_asked_for_once(kind: str, implementation: str) -> None:
    brought: list[int] = []
    kept: list[Tensor] = []

    def bring(given: tuple[int, Tensor]) -> Tensor:
        brought.append(given[0])
        return given[1]

    x = sample(5).requires_grad_()
    with saved_tensors_hooks(lambda t: (kept.append(t) or len(kept) - 1, t.detach()), bring):  # type: ignore[func-returns-value]
        y = module(kind, implementation)(x)
    y.sum().backward()
    assert len(brought) == len(set(brought)) == len(kept) > 0


@each_kind
@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_a_weight_that_was_written_to_is_noticed(kind: str, implementation: str) -> None:
    model, x = module(kind, implementation), sample(5).requires_grad_()
    x = x * 1  # no leaf, which may not be written to
    y = model(x)
    with torch.no_grad():
        (x if kind == "frozen" else next(model.parameters())).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@each_kind
@pytest.mark.parametrize("implementation", ["auto", "fused"])
@pytest.mark.feature("torch.inference_mode", result="works")
def test_inference_tensors_are_not_recorded(kind: str, implementation: str) -> None:
    model = module(kind, implementation)
    with torch.inference_mode():
        x = sample(5)
    if kind == "frozen":  # which records nothing of it
        assert not model(x).requires_grad
    else:
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model(x.clone()))


@each_kind
@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_hooks_of_parameters_see_their_gradients(kind: str, implementation: str) -> None:
    model, x = module(kind, implementation), sample(5)
    expected = gradients(lambda m, x: m(x), model, x)[2:]
    doubled: list[Tensor] = []
    ready: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda g: (doubled.append(g), 2 * g)[1])
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(p))
    found = gradients(lambda m, x: m(x), model, x)[2:]
    used = [g for g in expected if g is not None]
    assert len(doubled) == len(ready) == len(used)
    assert all(torch.equal(g, 2 * e) for g, e in zip(found, expected, strict=True) if g is not None and e is not None)


@each_kind
@each_way
def test_gradcheck_under_checkpointing(kind: str, implementation: str) -> None:
    model, x = module(kind, implementation), sample(2).requires_grad_()
    for run in (lambda x: model(x), lambda x: recomputed(model, x)):
        assert torch.autograd.gradcheck(run, (x,), fast_mode=True)
        assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)
