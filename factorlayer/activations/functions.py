"""Special functions: how many an activation takes, for floors and predictions.

A GPU has units for exponentials, logarithms, sines, reciprocals and roots, of a rate of their own, and a CPU takes many
instructions for each. A function counts as the fewest of those that make it; erf counts as one. The derivative is taken
of what is known anyway, the argument or the result, whichever takes fewer.
"""

from __future__ import annotations

import functools

from factorlayer.activations.expression import Expression, expression_of, in_order
from factorlayer.activations.results import from_result

COUNTS = {
    "sqrt": 1, "exp": 1, "expm1": 1, "log": 1, "log1p": 1, "sin": 1, "cos": 1, "tanh": 1, "sigmoid": 1, "softplus": 2,
    "erf": 1, "atan": 1,
}  # fmt: skip


@functools.cache
def of_value(activation: str) -> int:
    """Of a chain's activation, a name or a program."""
    return _count(expression_of(activation))


@functools.cache
def of_slope(activation: str) -> int:
    """Of its derivative."""
    by_result = from_result(activation)
    by_argument = _count(expression_of(activation).derivative())
    return by_argument if by_result is None else min(by_argument, _count(by_result))


def _count(expression: Expression) -> int:
    return sum(map(_of_step, in_order(expression)))


def _of_step(node: Expression) -> int:
    if node.op in ("div", "pow"):
        second = node.args[1]
        if second.op != "number":
            return 1
        exponent = float(second.value or 0)
        whole = node.op == "div" or exponent == int(exponent)
        return int(exponent < 0 and node.op == "pow") if whole else 2
    return COUNTS.get(node.op, 0)
