"""Activations whose derivative their result tells, which is kept anyway: what the next layer reads.

A row is an expression of x, and its derivative as an expression of the result, which stands there as x; p0 and p1 are
any positive numbers. At kinks and for NaN it is PyTorch's own derivative, as in elementwise.py.
"""

from __future__ import annotations

import functools

from factorlayer.activations.expression import (
    NAMED,
    ONE,
    RELU,
    ZERO,
    Expression,
    X,
    apply,
    expression_of,
    parameter,
    select,
)

RESULT = Expression("y")
_P, _Q = parameter(0), parameter(1)
_IS_NEGATIVE, _IS_POSITIVE = apply("le", X, 0), apply("lt", 0, X)
_EXPM1 = apply("expm1", X)

ROWS = {
    RELU: select(_IS_NEGATIVE, ZERO, ONE),
    NAMED["relu_squared"]: select(_IS_NEGATIVE, ZERO, apply("sqrt", X) * 2),
    select(_IS_POSITIVE, X, _P * X): select(_IS_POSITIVE, ONE, _P),
    select(_IS_NEGATIVE, _EXPM1, X): select(_IS_NEGATIVE, X + 1, ONE),
    select(_IS_NEGATIVE, _EXPM1 * _P, X): select(_IS_NEGATIVE, X + _P, ONE),  # elu
    select(_IS_NEGATIVE, apply("expm1", X * _Q) * _P, X): select(_IS_NEGATIVE, (X + _P) * _Q, ONE),  # celu
    select(_IS_NEGATIVE, _EXPM1 * _P, X * _Q): select(_IS_NEGATIVE, X + _P, _Q),  # selu
    NAMED["tanh"]: 1 - X * X,
    NAMED["sigmoid"]: (1 - X) * X,
    NAMED["softplus"]: select(apply("lt", 20, X), ONE, -apply("expm1", -X)),
    select(apply("lt", 20, X * _P), X, apply("softplus", X * _P) / _P): select(
        apply("lt", 20, X * _P), ONE, -apply("expm1", -(X * _P))
    ),
    X / (apply("abs", X) + 1): (1 - apply("abs", X)) * (1 - apply("abs", X)),  # softsign
}


@functools.cache
def from_result(activation: str) -> Expression | None:
    """The derivative of a chain's activation as an expression of its result, which stands there as x."""
    given = expression_of(activation)
    for row, derivative in ROWS.items():
        numbers: dict[Expression, Expression] = {}
        if _is_like(given, row, numbers):
            return _with(derivative, numbers)
    return None


def gradient_from_result(activation: str) -> Expression:
    """What makes the gradient of what is activated from that of the result, X, and the RESULT. It is zero where an
    activation is constant, even if the first is infinite."""
    derivative = from_result(activation)
    assert derivative is not None
    return _times(X, _with(derivative, {X: RESULT}))


def _is_like(given: Expression, row: Expression, numbers: dict[Expression, Expression]) -> bool:
    """Whether it is the row, with numbers for its parameters."""
    if row.op == "p":
        return given.op == "number" and float(given.value or 0) > 0 and numbers.setdefault(row, given) is given
    if not row.args:
        return given is row
    return given.op == row.op and all(_is_like(g, r, numbers) for g, r in zip(given.args, row.args, strict=True))


def _with(node: Expression, replaced: dict[Expression, Expression]) -> Expression:
    if node in replaced or not node.args:
        return replaced.get(node, node)
    return Expression(node.op, tuple(_with(arg, replaced) for arg in node.args))


def _times(gradient: Expression, derivative: Expression) -> Expression:
    """Where the derivative is nothing, there is nothing to multiply: no 0 times infinity."""
    if derivative.op == "select":
        condition, *branches = derivative.args
        return select(condition, *(_times(gradient, branch) for branch in branches))
    return ZERO if derivative is ZERO else gradient * derivative
