"""PyTorch's operations on single elements as expressions, one row each, by the name that PyTorch has for them.

Where PyTorch has a derivative of its own at a kink or for NaN, the row's branches are such that the expression's
derivative is that one. A row raises TypeError for arguments that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from factorlayer.activations.expression import (
    ONE,
    OPERATIONS,
    ZERO,
    Expression,
    Operand,
    X,
    apply,
    number,
    power,
    select,
)


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


OF_X = object()  # x's own dtype or device


def _converted(x: Any, *to: Any, **further: Any) -> Expression:
    """A boolean tensor as numbers, or any tensor as what it is already."""
    return _tensor(x) if to and all(one is OF_X or one is X for one in to) and not further else _boolean(x)


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
ALIASES = {
    "negative": "neg", "positive": "pos", "absolute": "abs", "sgn": "sign", "arctan": "atan", "fix": "trunc",
    "special_expit": "sigmoid", "special_erf": "erf", "special_expm1": "expm1", "special_log1p": "log1p",
    "special_sinc": "sinc", "subtract": "sub", "multiply": "mul", "div": "truediv", "divide": "truediv",
    "true_divide": "truediv", "min": "minimum", "max": "maximum", "clip": "clamp", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "and_": "logical_and", "bitwise_and": "logical_and",
    "or_": "logical_or", "bitwise_or": "logical_or", "xor": "logical_xor", "bitwise_xor": "logical_xor",
    "invert": "logical_not", "bitwise_not": "logical_not", "logsigmoid": "log_sigmoid", "_threshold": "threshold",
    "__and__": "logical_and", "__or__": "logical_or", "__xor__": "logical_xor",
}  # fmt: skip
