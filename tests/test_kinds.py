"""Tensors of every kind that PyTorch has: what each does, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import MODULES, module, sample
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from factorlayer import FactorGRU, FactorGRUCell, FactorLinear, FactorMLP

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
each_kind = pytest.mark.parametrize("kind", MODULES)
WAYS = ["auto", "naive", "batched", "fused"]
each_way = pytest.mark.parametrize("implementation", WAYS)


class Named(Tensor):
    """By __torch_function__."""


class Wrapped(Tensor):
    """By __torch_dispatch__, around another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        alike: dict[str, Any] = dict(strides=inner.stride(), dtype=inner.dtype, device=inner.device)
        made = Tensor._make_wrapper_subclass(cls, inner.shape, **alike)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda w: w.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


# What is as good as a dense tensor of its numbers

AS_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": nn.Parameter,
    "buffer": nn.Buffer,
    "named": lambda x: x.as_subclass(Named),
    "wrapped": Wrapped,
    "expanded": lambda x: x[:1].expand(5, 12),
    "one number": lambda x: x[:1, :1].expand(5, 12),
    "negated in name": lambda x: torch.complex(x, x).conj().imag,
    "real part": lambda x: torch.complex(x, x).conj().real,
    "overlapping": lambda x: x.flatten().as_strided((5, 12), (1, 1)),
    "zeros": lambda x: torch._efficientzerotensor(5, 12, dtype=x.dtype),
    "backwards": lambda x: x.flip(-1),
}


@each_kind
@each_way
@pytest.mark.parametrize("form", AS_DENSE)
@pytest.mark.feature("tensor subclasses, conjugate and negative views, expanded and overlapping x", result="works")
def test_it_is_its_numbers(kind: str, implementation: str, form: str) -> None:
    x = AS_DENSE[form](sample(5)).detach()
    dense = (x.inner if isinstance(x, Wrapped) else x.as_subclass(Tensor)) * 1
    found, right = gradients(module(kind, implementation), x), gradients(module(kind, "naive"), dense)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.inner if isinstance(one, Wrapped) else one.as_subclass(Tensor), other)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x.requires_grad_()
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    y = model(x)
    found = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


# Modes


@each_kind
@each_way
@pytest.mark.parametrize("mode", [Dispatching, Overriding])
def test_modes_change_nothing(kind: str, implementation: str, mode: Callable[[], Any]) -> None:
    right = gradients(module(kind, implementation), sample(5))
    model, x = module(kind, implementation), sample(5)
    with mode():
        torch.testing.assert_close(gradients(model, x), right)


@each_kind
@each_way
@pytest.mark.feature("FakeTensorMode", result="works")
def test_fake_tensors_have_the_shapes(kind: str, implementation: str) -> None:
    right = gradients(module(kind, implementation), sample(5))
    model = module(kind, implementation)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = gradients(model, mode.from_tensor(sample(5)))
    assert [t.shape for t in found] == [t.shape for t in right]


@pytest.mark.parametrize(
    ("kind", "implementation", "tracing"),
    [
        (kind, way, ("real", "fake", "symbolic")[(i + j) % 3])  # every two of these meet
        for i, kind in enumerate(MODULES)
        for j, way in enumerate(WAYS)
    ],
)
@pytest.mark.feature("make_fx, with real, fake and symbolic tensors", result="works")
def test_make_fx(kind: str, implementation: str, tracing: str) -> None:
    model = module(kind, implementation)

    def both(x: Tensor) -> list[Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x])]

    traced = make_fx(both, tracing_mode=tracing, _allow_non_fake_inputs=True)(sample(5).requires_grad_())
    x = sample(7 if tracing == "symbolic" else 5).requires_grad_()
    torch.testing.assert_close(traced(x), both(x))


class Whole(nn.Module):
    """A model with one of each kind, and with an x that is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = FactorLinear(12, 20, rank=2)
        self.block = FactorMLP([20, (4, 4), 12], activation="gelu")
        self.joined = FactorLinear(32, 12)
        self.gru = FactorGRU(12, 8, batch_first=True)
        self.cell = FactorGRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        output, h = self.gru(self.joined([y, self.block(y)]))
        step: Tensor = self.cell(output[:, -1], h[0])
        return step


@pytest.mark.feature("torch.fx.symbolic_trace, as nodes of the graph", result="works")
def test_symbolic_trace() -> None:
    model, x = Whole().double(), torch.randn(3, 5, 12, dtype=torch.float64)
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["first", "block", "joined", "gru", "cell"]
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(TypeError, match=r"FactorLinear: torch\.fx cannot look into it"):
        torch.fx.symbolic_trace(model.first)


# Nested tensors


def pieces(layout: torch.layout) -> tuple[list[Tensor], Tensor]:
    parts = [part.clone().requires_grad_() for part in sample(6).split([2, 1, 3])]
    return parts, torch.nested.as_nested_tensor(parts, layout=layout)


@each_kind
@each_way
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.feature("nested tensors, strided and jagged", result="works")
def test_nested(kind: str, implementation: str, layout: torch.layout) -> None:
    model = module(kind, implementation)
    parts, x = pieces(layout)
    y = model(x)
    assert y.is_nested and y.layout == layout
    expected = [model(part) for part in parts]
    torch.testing.assert_close(list(y.unbind()), expected)
    found = torch.autograd.grad(torch.cat(y.unbind()).square().sum(), parts)
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(expected).square().sum(), parts))


def test_jagged_results_go_with_what_they_were_made_of() -> None:
    _, x = pieces(torch.jagged)
    y = module("block", "auto")(x)
    assert (x + y).shape == x.shape


@each_way
def test_what_is_wrong_with_a_nested_tensor_is_said(implementation: str) -> None:
    layer = module("layer", implementation)
    parts, _ = pieces(torch.jagged)
    nested = torch.nested.as_nested_tensor([part[:, :5] for part in parts], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"FactorLinear: the last dimension of x should be in_features=12, x has"):
        layer(nested)
    turned = torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="FactorLinear: "):
        layer(turned)


# Complex numbers


@pytest.mark.parametrize("kind", ["monarch", "ranked", "block", "frozen"])
@pytest.mark.parametrize("implementation", ["auto", "naive", "batched"])
def test_conjugated_in_name(kind: str, implementation: str) -> None:
    """By those whose activation PyTorch has for complex numbers."""
    model = module(kind, implementation)
    x = torch.complex(sample(5), sample(5).flip(0)).conj()
    assert x.is_conj()
    found = complex_gradients(model, x)
    torch.testing.assert_close(found, complex_gradients(module(kind, "naive"), x.resolve_conj()))


def complex_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x.requires_grad_(), *(p for p in model.parameters() if p.requires_grad)]
    y = model(x)
    found = torch.autograd.grad(y.abs().square().sum(), leaves, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


# What is refused

DENSE = "x should be a dense tensor, its layout is torch"
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "coo": (Tensor.to_sparse, f"{DENSE}.sparse_coo; convert it with x.to_dense()"),
    "csr": (Tensor.to_sparse_csr, f"{DENSE}.sparse_csr; convert it with x.to_dense()"),
    "csc": (Tensor.to_sparse_csc, f"{DENSE}.sparse_csc; convert it with x.to_dense()"),
    "bsr": (lambda x: x.to_sparse_bsr((2, 2)), f"{DENSE}.sparse_bsr; convert it with x.to_dense()"),
    "hybrid": (lambda x: x.to_sparse(1), f"{DENSE}.sparse_coo; convert it with x.to_dense()"),
    "mkldnn": (lambda x: x.to_mkldnn(), f"{DENSE}._mkldnn; convert it with x.to_dense()"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "x should be a floating-point tensor, it is torch.quint8; convert it with x.float()",
    ),
    "array": (lambda x: x.numpy(), "x should be a tensor, it is of the type ndarray; convert it with torch.as_tensor"),
    "list": (
        lambda x: x.tolist(),
        "x should be a tensor or a list of tensors, x[0] is of the type list; convert it with torch.as_tensor",
    ),
    "nothing": (lambda x: None, "x should be a tensor, it is of the type NoneType; convert it with torch.as_tensor"),
}


@each_kind
@each_way
@pytest.mark.parametrize("form", REFUSED)
@pytest.mark.filterwarnings("ignore:.*(beta state|quantize|quantized).*:UserWarning", "ignore:.*quanti.*")
@pytest.mark.feature("sparse, mkldnn and quantised x", result="refused")
def test_refused(kind: str, implementation: str, form: str) -> None:
    make, message = REFUSED[form]
    model = module(kind, implementation, torch.float32)
    with pytest.raises(TypeError) as error:
        model(make(sample(4, dtype=torch.float32)))
    assert str(error.value).endswith(message)
    assert str(error.value).split(":")[0] in ("FactorLinear", "FactorMLP", "fuse")
