"""Gradients of many vectors at once: torch.autograd's vectorised Jacobians and torch.func's, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import MODULES, module, sample
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.func import hessian as func_hessian
from torch.utils import _pytree as pytree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]
Ask = Callable[[nn.Module, Tensor], Any]


def vectors(like: Tensor) -> Tensor:
    return torch.randn(3, *like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(2))


def leaves_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [x.requires_grad_(), *model.parameters()]


def batched_grads(model: nn.Module, x: Tensor, create_graph: bool = False) -> list[Tensor]:
    leaves, y = leaves_of(model, x), model(x)
    options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(y, leaves, vectors(y), create_graph, create_graph, is_grads_batched=True, **options)
    if not create_graph:
        return list(found)
    return list(torch.autograd.grad(torch.stack([g.square().sum() for g in found]).sum(), leaves, **options))


def batched_second_grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves, y = leaves_of(model, x), model(x)
    (first,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    return list(torch.autograd.grad(first, leaves, vectors(first), is_grads_batched=True, **options))


def mapped_grads(model: nn.Module, x: Tensor, create_graph: bool = False) -> list[Tensor]:
    """As in PyTorch's tutorial: the transform is at work in the backward pass only."""
    leaves = leaves_of(model, x)
    y = model(x)

    def of_one(v: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(y, leaves, v, retain_graph=True, create_graph=create_graph, allow_unused=True)
        return tuple(g for g in found if g is not None)

    found = vmap(of_one)(vectors(y))
    if not create_graph:
        return list(found)
    total = torch.stack([g.square().sum() for g in found]).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def mapped_second_grads(model: nn.Module, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), [x], create_graph=True)
    found: Tensor = vmap(lambda v: torch.autograd.grad(first, [x], v, retain_graph=True)[0])(vectors(first))
    return found


def per_sample(model: nn.Module, x: Tensor) -> Any:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = grad(lambda p, x: functional_call(model, p, (x,)).square().sum(), (0, 1))
    return vmap(loss, (None, 0))(parameters, x)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


REVERSE: dict[str, Ask] = {
    "is_grads_batched": batched_grads,
    "is_grads_batched, recorded": lambda m, x: batched_grads(m, x, True),
    "is_grads_batched, twice": batched_second_grads,
    "vmap of autograd.grad": mapped_grads,
    "vmap of autograd.grad, recorded": lambda m, x: mapped_grads(m, x, True),
    "vmap of autograd.grad, twice": mapped_second_grads,
    "jacobian": lambda m, x: jacobian(m, x, vectorize=True),
    "jacobian, recorded": lambda m, x: jacobian(m, x.requires_grad_(), create_graph=True, vectorize=True),
    "hessian": lambda m, x: hessian(loss_of(m), x, vectorize=True),
    "jacrev": lambda m, x: jacrev(m)(x),
    "jacrev in chunks": lambda m, x: jacrev(m, chunk_size=2)(x),
    "jacrev of jacrev": lambda m, x: jacrev(jacrev(loss_of(m)))(x),
    "vmap of jacrev": lambda m, x: vmap(jacrev(m))(x),
    "vmap of vjp": lambda m, x: vmap(vjp(m, x)[1])(vectors(m(x))),
    "gradients of each sample": per_sample,
}
FORWARD: dict[str, Ask] = {
    "jacobian": lambda m, x: jacobian(m, x, vectorize=True, strategy="forward-mode"),
    "hessian": lambda m, x: hessian(loss_of(m), x, vectorize=True, outer_jacobian_strategy="forward-mode"),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "func.hessian": lambda m, x: func_hessian(loss_of(m))(x),
    "jacfwd of grad": lambda m, x: jacfwd(grad(loss_of(m)))(x),
    "grad of jacfwd": lambda m, x: grad(lambda x: jacfwd(m)(x).square().sum())(x),
}


def made(ask: Ask, kind: str, implementation: str) -> list[Tensor]:
    return [t.detach() for t in pytree.tree_leaves(ask(module(kind, implementation), sample(3)))]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("implementation", ["auto", "fused"])
@pytest.mark.parametrize("way", REVERSE)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.feature(
    "vectorised Jacobians and Hessians: is_grads_batched, vectorize=True, vmap of autograd.grad", result="works"
)
def test_reverse_mode(kind: str, implementation: str, way: str) -> None:
    torch.testing.assert_close(made(REVERSE[way], kind, implementation), made(REVERSE[way], kind, "naive"))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.feature("Jacobians and Hessians by forward mode, vectorised", result="falls back")
def test_forward_mode(kind: str, way: str) -> None:
    """auto runs the batched implementation, and fused is refused."""
    torch.testing.assert_close(made(FORWARD[way], kind, "auto"), made(FORWARD[way], kind, "naive"))
    with pytest.raises(RuntimeError, match="implementation='fused' cannot run: it has no forward-mode derivative; or"):
        made(FORWARD[way], kind, "fused")


@pytest.mark.parametrize("kind", MODULES)
def test_at_once_is_one_by_one(kind: str) -> None:
    """The oracle is a loop over vectors, so that nothing here hangs on a transform."""
    model, x = module(kind, "fused"), sample(3).requires_grad_()
    leaves = [x, *(model.parameters() if kind != "frozen" else ())]
    y = model(x)
    each = [torch.autograd.grad(y, leaves, v, retain_graph=True) for v in vectors(y)]
    at_once = torch.autograd.grad(y, leaves, vectors(y), is_grads_batched=True)
    torch.testing.assert_close(at_once, tuple(torch.stack(of_one) for of_one in zip(*each, strict=True)))


@pytest.mark.parametrize("kind", ["layer", "learned", "monarch", "ranked"])
@pytest.mark.parametrize("way", ["jacobian", "jacrev"])
def test_a_jacobian_of_x_is_one_backward_pass(kind: str, way: str) -> None:
    """Its vectors are samples. Under torch.func it is so of what is not auto, which runs batched there."""
    calls: list[str] = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **kwargs or {})

    model = module(kind, "fused").requires_grad_(False)
    with Noted():
        REVERSE[way](model, sample(3))
    assert calls.count("factorlayer.backward.default") == 1


def test_vectors_that_have_one_gradient_each() -> None:
    """A single vector, and none of the weights wanted but one."""
    model, x = module("layer", "fused"), sample(3)
    model.requires_grad_(False).weight_1.requires_grad_()
    y = model(x)
    v = vectors(y)[:1]
    (expected,) = torch.autograd.grad(y, model.weight_1, v[0], retain_graph=True)
    (found,) = torch.autograd.grad(y, model.weight_1, v, is_grads_batched=True)
    torch.testing.assert_close(found, expected[None])


def test_gradcheck_with_vectors() -> None:
    """What gradcheck asks of any function: check_batched_grad."""
    for kind in MODULES:
        model, x = module(kind, "fused"), sample(2).requires_grad_()
        assert torch.autograd.gradcheck(model, (x,), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(model, (x,), check_batched_grad=True)
