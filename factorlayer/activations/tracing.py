"""From a module or a Python function of one tensor to the expression that it computes, by torch.fx.

Its operations are the rows of activations/elementwise.py. Numbers and buffers count as they are when the function is
traced; parameters of one element are the expression's p0, p1, ….
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from factorlayer.activations.elementwise import ALIASES, OF_X, TRACED
from factorlayer.activations.expression import Expression, X, in_order, name_of, number, parameter

_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}


def program_of(activation: Any) -> tuple[str, tuple[str, ...]]:
    """The program of an expression, a module or a function, and which parameters of the module p0, p1, … are."""
    names: tuple[str, ...] = ()
    if isinstance(activation, Expression):
        if activation.parameters:
            raise ValueError(f"activation {activation.text} has parameters without values; give it as a module")
        expression, names = activation, ()
    elif callable(activation) and not isinstance(activation, type):
        expression, names = trace(activation)
    else:
        raise TypeError(
            "activation should be None, a name, a module or a function of one tensor; it is "
            f"{type(activation).__name__} {activation!r}"
        )
    name = name_of(expression)
    try:
        return name or expression.program, names
    except ValueError as error:
        raise ValueError(f"activation {_called(activation)} cannot be traced: {error}") from None


def trace(function: Callable[[Tensor], Tensor]) -> tuple[Expression, tuple[str, ...]]:
    """The expression, and the names of the parameters p0, p1, …. Raises ValueError with the name of what it refuses."""
    try:
        first, again = _trace_once(function), _trace_once(function)
    except _RefusedError as error:
        raise ValueError(
            f"activation {_called(function)} cannot be traced: {error}, or apply it behind a layer without activation"
        ) from None
    if first != again:
        raise ValueError(
            f"activation {_called(function)} cannot be traced: it is another function each time it is called; leave "
            "out what is random, or apply it behind a layer without activation"
        )
    return first


class _RefusedError(Exception):
    """Why, and what to do about it."""


def _refuse(why: str) -> NoReturn:
    raise _RefusedError(why)


def _called(function: Any) -> str:
    return type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", repr(function))


class _Root(nn.Module):
    """Torch.fx wants a module that has all the others."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Proxy(fx.Proxy):
    """Also for x += 1, which fx takes for x = x + 1: but what else is x would change, too."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


TRACING = threading.RLock()


class Tracer(fx.Tracer):
    """Of one thread, which has TRACING: torch.fx changes nn.Module's methods while it traces. Two of them at once would
    leave these changed, and modules that other threads call meanwhile would be sought in what is traced."""

    _thread = 0

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._thread = threading.get_ident()
        return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _Tracer(Tracer):
    def __init__(self) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]  # math takes no tensors, so it is not traced

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():  # nor is it inside of an autograd.Function
            _refuse(
                f"it computes {getattr(target, '__name__', target)} without recording it for gradients; leave that out"
            )
        return super().create_node(kind, target, *args, **kwargs)


def _trace_once(function: Any) -> tuple[Expression, tuple[str, ...]]:
    root = _Root(function)
    try:
        with TRACING, torch.enable_grad():
            graph = _Tracer().trace(root)
    except _RefusedError:
        raise
    except fx.proxy.TraceError:
        _refuse("what it does depends on the values in x; use torch.where")
    except NameError as error:
        _refuse(f"{error}; make a module that has as its own all parameters and modules that it uses")
    except Exception as error:  # whatever code that expects a tensor says of what stands for it
        _refuse(f"{type(error).__name__}: {error}; use torch's operations on single elements")
    values: dict[fx.Node, Any] = {}
    names: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = X
        elif node.op == "get_attr":
            values[node] = _attribute(root, str(node.target), names)
        elif node.op == "output":
            result = node.args[0]
            if not isinstance(result, fx.Node) or not isinstance(values[result], Expression):
                _refuse(f"it returns {type(result).__name__} where a tensor of x's shape should be; return one")
            if any(step.args and all(arg.op == "number" for arg in step.args) for step in in_order(values[result])):
                _refuse("it computes with tensors that do not depend on x; use Python's math for numbers")
            return values[result], tuple(name.removeprefix("function.") for name in names)
        else:
            values[node] = _call(node, values)
    raise AssertionError("a graph ends in its output")


def _attribute(root: nn.Module, name: str, names: list[str]) -> Expression:
    """The first name counts, if a parameter has several."""
    path, _, last = name.rpartition(".")
    tensor = getattr(root.get_submodule(path), last)
    shown = "constant" if name.startswith("_tensor_constant") else name.removeprefix("function.")
    if not isinstance(tensor, Tensor):
        _refuse(f"it is a {type(tensor).__name__}; use a Python function or module")
    if tensor.numel() != 1:
        _refuse(f"its {shown} has {tensor.numel()} elements; use one for all of x")
    if isinstance(tensor, nn.Parameter):
        same = [i for i, other in enumerate(names) if root.get_parameter(other) is tensor]
        if not same:
            names.append(name)
        return parameter(same[0] if same else len(names) - 1)
    if tensor.requires_grad:
        _refuse("it reads a tensor that requires a gradient; make a module that has it as nn.Parameter")
    if tensor.is_meta:
        _refuse(f"its {shown} is on the meta device, without a value; build the layer on another")
    return number(tensor.item())


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def value_of(arg: Any) -> Any:
        return values[arg] if isinstance(arg, fx.Node) else arg

    args = [value_of(arg) for arg in node.args]
    kwargs = {key: value_of(arg) for key, arg in node.kwargs.items() if key != "inplace"}
    name, is_method = str(node.target), node.op == "call_method"
    if not is_method:
        name, home = getattr(node.target, "__name__", name), getattr(node.target, "__module__", None) or ""
        if name == "getattr" and args[1] in ("dtype", "device"):
            return OF_X
        if name == "getattr":
            _refuse(f"it asks for x.{args[1]}; use what does not depend on x's shape")
        if home.split(".")[0] not in ("torch", "_operator"):
            _refuse(f"it calls {home}.{name}; use torch's operations on single elements")
        if name in _IN_PLACE and args[0] is X:
            _refuse(f"{name} overwrites x; use {_IN_PLACE[name]}, which makes a new tensor")
    if node.kwargs.get("inplace") or name in _IN_PLACE:
        _refuse_if_used_again(node, name)
    name = _IN_PLACE.get(name, name)
    name = f"Tensor.{name}" if is_method and f"Tensor.{name}" in TRACED else ALIASES.get(name, name)
    if name not in TRACED:
        advice = f"use {name[:-1]}, which makes a new tensor" if name.endswith("_") else "use others"
        _refuse(f"{name} is none of the operations on single elements that are known here; {advice}")
    try:
        return TRACED[name](*args, **kwargs)
    except (TypeError, AttributeError):
        shown = ", ".join([*map(_shown, args), *(f"{key}={_shown(arg)}" for key, arg in kwargs.items())])
        _refuse(f"{name}({shown}) is not known here with these arguments; use others")


def _shown(arg: Any) -> str:
    return "Tensor" if isinstance(arg, Expression) else repr(arg)


def _refuse_if_used_again(node: fx.Node, name: str) -> None:
    """In place, an operation does what it does out of place, if nobody else reads what it overwrites."""
    overwritten = node.args[0]
    if isinstance(overwritten, fx.Node) and len(overwritten.users) > 1:
        _refuse(f"{name} overwrites in place what is used again; use it without inplace")
