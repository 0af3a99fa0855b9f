"""From a module or a Python function of one tensor to the expression that it computes, by torch.fx.

Every operation is one row of TRACED, by the name that PyTorch has for it; where PyTorch has a derivative of its own at
a kink or for NaN, the row's branches are such that the expression's derivative is that one. Numbers and buffers count
as they are when the function is traced; parameters of one element are the expression's p0, p1, ….
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from factorlayer.activations import ACTIVATIONS, activation_name
from factorlayer.expression import (
    ONE,
    OPERATIONS,
    ZERO,
    Expression,
    Operand,
    X,
    apply,
    in_order,
    number,
    parameter,
    power,
    select,
)

UserActivation = str | Expression | nn.Module | Callable[[Tensor], Tensor] | None


def activation_of(activation: Any) -> tuple[str, tuple[str, ...]]:
    """The chain's stage for what a user gives, and which parameters of the module p0, p1, … are. Raises ValueError and
    TypeError."""
    if activation is None or isinstance(activation, str):
        return activation_name(activation), ()
    names: tuple[str, ...] = ()
    if isinstance(activation, Expression):
        if activation.parameters:
            raise ValueError(f"activation {activation.text} has parameters without values; give it as a module")
        expression, names = activation, ()
    elif callable(activation):
        expression, names = trace(activation)
    else:
        raise TypeError(
            "activation should be None, a name, a module or a function of one tensor; it is "
            f"{type(activation).__name__} {activation!r}"
        )
    name = _names().get(expression)
    try:
        return name or expression.program, names
    except ValueError as error:
        raise ValueError(f"activation {_called(activation)} cannot be traced: {error}") from None


# torch.compile takes what it returns as constant, until the function is another one.
activation_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def scalars(module: Any, names: tuple[str, ...]) -> list[Tensor]:
    """The module's parameters as they are now: they may have been moved, replaced or parametrized."""
    found = []
    for name in names:
        owner = module
        for part in name.split("."):
            owner = getattr(owner, part)
        found.append(owner)
    return found


@functools.cache
def _names() -> dict[Expression, str]:
    """Of the expressions that have one, and kernels of their own."""
    return {trace(function)[0]: name for name, function in ACTIVATIONS.items()}


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


class _Tracer(fx.Tracer):
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
        with torch.enable_grad():
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
            return _OF_X
        if name == "getattr":
            _refuse(f"it asks for x.{args[1]}; use what does not depend on x's shape")
        if home.split(".")[0] not in ("torch", "_operator"):
            _refuse(f"it calls {home}.{name}; use torch's operations on single elements")
        if name in _IN_PLACE and args[0] is X:
            _refuse(f"{name} overwrites x; use {_IN_PLACE[name]}, which makes a new tensor")
    if node.kwargs.get("inplace") or name in _IN_PLACE:
        _refuse_if_used_again(node, name)
    name = _IN_PLACE.get(name, name)
    name = f"Tensor.{name}" if is_method and f"Tensor.{name}" in TRACED else _ALIASES.get(name, name)
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


# The rows


def _number(value: Operand) -> float:
    if isinstance(value, Expression):
        if value.op != "number":
            raise TypeError
        value = float(value.value or 0)
    return float(value)


def _tensor(value: Any) -> Expression:
    if not isinstance(value, Expression):
        raise TypeError
    return value


def _boolean(value: Any) -> Expression:
    if not _tensor(value).is_boolean:
        raise TypeError
    return _tensor(value)


def _above(a: Operand, b: Operand) -> Expression:
    return apply("lt", b, a)


def _not(a: Expression) -> Expression:
    return apply("eq", _boolean(a), 0)


def _and(a: Expression, b: Expression) -> Expression:
    return apply("lt", 0, apply("min", _boolean(a), _boolean(b)))


def _or(a: Expression, b: Expression) -> Expression:
    return apply("lt", 0, apply("max", _boolean(a), _boolean(b)))


def _both_boolean(a: Any, b: Any) -> bool:
    return all(isinstance(value, Expression) and value.is_boolean for value in (a, b))


def _add(a: Any, b: Any, *, alpha: float = 1) -> Expression:
    if _both_boolean(a, b):
        raise TypeError  # which is another boolean
    return number(a) + number(b) * _number(alpha)


def _subtract(a: Any, b: Any, *, alpha: float = 1) -> Expression:
    return number(a) - number(b) * _number(alpha)


def _multiply(a: Any, b: Any) -> Expression:
    return _and(a, b) if _both_boolean(a, b) else number(a) * number(b)


def _power(a: Any, b: Any) -> Expression:
    return power(_tensor(a), _number(b))


def _where(condition: Any, a: Operand, b: Operand) -> Expression:
    return select(_boolean(condition), a, b)


def _clamp(x: Expression, min: Operand | None = None, max: Operand | None = None) -> Expression:
    """Within the bounds the derivative is 1, on them, too. Of NaN it is 0."""
    low, high = -math.inf if min is None else _number(min), math.inf if max is None else _number(max)
    low = low if low < high else high
    inside = x if max is None else select(apply("le", x, high), x, high)
    if min is None:
        return select(apply("le", x, high), x, select(_above(x, high), high, x * 0))
    return select(apply("le", low, x), inside, select(apply("lt", x, low), low, x * 0))


def _hardtanh(x: Expression, min_val: float = -1.0, max_val: float = 1.0) -> Expression:
    return select(apply("le", x, min_val), min_val, select(apply("le", max_val, x), max_val, x))


def _relu(x: Expression) -> Expression:
    return select(apply("le", x, 0), 0.0, x)


def _leaky_relu(x: Expression, negative_slope: Operand = 0.01) -> Expression:
    return select(_above(x, 0), x, negative_slope * x)


def _elu(x: Expression, alpha: float = 1.0) -> Expression:
    return select(apply("le", x, 0), apply("expm1", x) * alpha, x)


def _celu(x: Expression, alpha: float = 1.0) -> Expression:
    return select(apply("le", x, 0), apply("expm1", x * (1 / alpha)) * alpha, x)


def _selu(x: Expression) -> Expression:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return select(apply("le", x, 0), apply("expm1", x) * (alpha * scale), x * scale)


def _gelu(x: Expression, *, approximate: str = "none") -> Expression:
    if approximate == "none":
        return 0.5 * x * (1 + apply("erf", math.sqrt(0.5) * x))
    if approximate != "tanh":
        raise TypeError
    return 0.5 * x * (1 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _softplus(x: Expression, beta: float = 1.0, threshold: float = 20.0) -> Expression:
    return select(_above(x * beta, threshold), x, apply("softplus", x * beta) / beta)


def _log_sigmoid(x: Expression) -> Expression:
    return select(apply("lt", x, 0), x - apply("softplus", x), 0 - apply("softplus", -x))


def _hardsigmoid(x: Expression) -> Expression:
    inside = select(apply("lt", x, 3), (x + 3) / 6, 1.0)
    return select(apply("lt", -3, x), inside, select(apply("le", x, -3), 0.0, x * 0))


def _hardswish(x: Expression) -> Expression:
    return select(apply("le", x, -3), x * 0, select(apply("lt", x, 3), x * (x + 3) / 6, x))


def _hardshrink(x: Expression, lambd: float = 0.5) -> Expression:
    return select(apply("le", -lambd, x), select(apply("le", x, lambd), 0.0, x), x)


def _softshrink(x: Expression, lambd: float = 0.5) -> Expression:
    return select(apply("le", -lambd, x), select(apply("le", x, lambd), 0.0, x - lambd), x + lambd)


def _threshold(x: Expression, threshold: float, value: float) -> Expression:
    return select(apply("le", x, threshold), value, x)


def _sinc(x: Expression) -> Expression:
    """By its series near 0, where the derivative of the quotient would lose all digits."""
    angle = x * math.pi
    square = angle * angle
    return select(apply("lt", square, 1e-6), 1 - square / 6 * (1 - square / 20), apply("sin", angle) / angle)


def _truncated(x: Expression) -> Expression:
    return select(apply("lt", x, 0), -apply("floor", -x), apply("floor", x))


def _unary(op: str) -> Callable[[Any], Expression]:
    return lambda x: apply(op, _tensor(x))


_OF_X = object()  # x's own dtype or device


def _converted(x: Any, *to: Any, **further: Any) -> Expression:
    """A boolean tensor as numbers, or any tensor as what it is already."""
    return _tensor(x) if to and all(one is _OF_X or one is X for one in to) and not further else _boolean(x)


TRACED: dict[str, Callable[..., Expression]] = {
    **{op: _unary(op) for op, arguments in OPERATIONS.items() if arguments == 1 and op not in ("neg", "softplus")},
    "neg": lambda x: -_tensor(x),
    "pos": _tensor,
    "clone": _tensor,
    "add": _add,
    "sub": _subtract,
    "rsub": lambda a, b: _subtract(b, a),
    "mul": _multiply,
    "truediv": lambda a, b: number(a) / number(b),
    "pow": _power,
    "square": lambda x: power(_tensor(x), 2),
    "reciprocal": lambda x: power(_tensor(x), -1),
    "rsqrt": lambda x: power(_tensor(x), -0.5),
    "log2": lambda x: apply("log", _tensor(x)) * (1 / math.log(2)),
    "log10": lambda x: apply("log", _tensor(x)) * (1 / math.log(10)),
    "ceil": lambda x: -apply("floor", -_tensor(x)),
    "trunc": _truncated,
    "frac": lambda x: x - _truncated(_tensor(x)),
    "sinc": _sinc,
    "minimum": lambda a, b: apply("min", _tensor(a), _tensor(b)),
    "maximum": lambda a, b: apply("max", _tensor(a), _tensor(b)),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "lt": lambda a, b: apply("lt", a, b),
    "le": lambda a, b: apply("le", a, b),
    "gt": lambda a, b: apply("lt", b, a),
    "ge": lambda a, b: apply("le", b, a),
    "eq": lambda a, b: apply("eq", a, b),
    "ne": lambda a, b: _not(apply("eq", a, b)),
    "isnan": lambda x: _not(apply("eq", _tensor(x), _tensor(x))),
    "logical_not": _not,
    "logical_and": _and,
    "logical_or": _or,
    "logical_xor": lambda a, b: _not(apply("eq", _boolean(a), _boolean(b))),
    "where": _where,
    "Tensor.where": lambda a, condition, b: _where(condition, a, b),
    "masked_fill": lambda x, mask, value: _where(mask, value, _tensor(x)),
    "zeros_like": lambda x: ZERO,
    "ones_like": lambda x: ONE,
    "full_like": lambda x, fill_value: number(_number(fill_value)),
    **dict.fromkeys(("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long"), _converted),
    "relu": _relu,
    "relu6": lambda x: _hardtanh(x, 0.0, 6.0),
    "leaky_relu": _leaky_relu,
    "prelu": lambda x, weight: _leaky_relu(x, _tensor(weight)),
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "gelu": _gelu,
    "silu": lambda x: x * apply("sigmoid", x),
    "mish": lambda x: x * apply("tanh", apply("softplus", x)),
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "tanhshrink": lambda x: x - apply("tanh", x),
    "softsign": lambda x: x / (apply("abs", x) + 1),
    "threshold": _threshold,
}
_ALIASES = {
    "negative": "neg", "positive": "pos", "absolute": "abs", "sgn": "sign", "arctan": "atan", "fix": "trunc",
    "special_expit": "sigmoid", "special_erf": "erf", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_sinc": "sinc", "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv",
    "true_divide": "truediv", "min": "minimum", "max": "maximum", "clip": "clamp", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "and_": "logical_and", "bitwise_and": "logical_and",
    "or_": "logical_or", "bitwise_or": "logical_or", "xor": "logical_xor", "bitwise_xor": "logical_xor",
    "invert": "logical_not", "bitwise_not": "logical_not", "logsigmoid": "log_sigmoid", "_threshold": "threshold",
    "__and__": "logical_and", "__or__": "logical_or", "__xor__": "logical_xor",
}  # fmt: skip
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
