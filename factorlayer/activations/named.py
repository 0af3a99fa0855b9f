"""Activations in PyTorch's operations: the named ones, one row each, and expressions.

The compiled kernels have a row of the same name (csrc/cpu/finish/pointwise.h); they read the programs of expressions,
too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from factorlayer.activations.expression import Expression, number_steps
from factorlayer.activations.nearest import did_you_mean, nearest

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sine": torch.sin,
    "softplus": F.softplus,
    "square": torch.square,
    "relu_squared": lambda x: torch.square(F.relu(x)),
}


def activation_name(activation: str | None) -> str:
    """The row that a user's name means: None and 'none' are the identity."""
    if activation is None or activation == "none":
        return "identity"
    if activation not in ACTIVATIONS:
        meant = did_you_mean(nearest(activation, ACTIVATIONS))
        raise ValueError(f"activation should be None or one of {', '.join(ACTIVATIONS)}; it is {activation!r}{meant}")
    return activation


def activate(activation: str, x: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
    """The value of an activation, a name or a program, which takes parameters of one element."""
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation](x)
    values: list[Any] = []
    for op, value, places in _steps(activation):
        if op == "x":
            values.append(x)
        elif op == "p":
            values.append(parameters[int(value or 0)].reshape(()))
        elif op == "number":
            values.append(value)
        else:
            args = [values[place] for place in places]
            first = 1 if op == "select" else 0
            args[first:] = [_as_number(x, arg) for arg in args[first:]]
            values.append(_OPERATIONS[op](x, *args))
    y = _as_number(x, values[-1])
    return y.expand_as(x) if isinstance(y, Tensor) else torch.full_like(x, y)


def evaluate(expression: Expression, x: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
    """An expression's value, which PyTorch can differentiate; p0, p1, … are tensors of one element."""
    return activate(expression.text, x, parameters)


_parsed: dict[str, Any] = {}


def _steps(text: str) -> Any:
    if text not in _parsed:
        _parsed[text] = number_steps(Expression.parse(text))
    return _parsed[text]


# torch.compile takes what it returns as constant: this is all that torch.compiler.assume_constant_result does, but for
# importing the compiler.
_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _as_number(x: Tensor, value: Any) -> Any:
    return value.to(x.dtype) if isinstance(value, Tensor) and value.dtype == torch.bool else value


def _tensor(x: Tensor, value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else x.new_full((), value)


def _select(x: Tensor, condition: Tensor, a: Any, b: Any) -> Tensor:
    condition = condition if condition.dtype == torch.bool else condition != 0
    return torch.where(condition, _tensor(x, a), _tensor(x, b))


def _on_tensors(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda x, *values: function(*(_tensor(x, value) for value in values))


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers stay Python's, which are not rounded to x's dtype."""
    return lambda x, *values: function(*values)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _as_it_is(getattr(torch, name))
        for name in (
            "neg", "abs", "sign", "floor", "sqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid",
            "erf", "atan",
        )
    },
    "softplus": lambda x, value: -F.logsigmoid(-value),  # accurate everywhere, and so is its derivative
    "add": _as_it_is(operator.add),
    "sub": _as_it_is(operator.sub),
    "mul": _as_it_is(operator.mul),
    "div": _on_tensors(torch.div),  # a number over a tensor is rounded twice otherwise
    "pow": _as_it_is(operator.pow),
    "min": _on_tensors(torch.minimum),
    "max": _on_tensors(torch.maximum),
    "lt": _as_it_is(operator.lt),
    "le": _as_it_is(operator.le),
    "eq": _as_it_is(operator.eq),
    "select": _select,
}  # fmt: skip
