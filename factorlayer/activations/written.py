"""Activations as device code: structs of the kernels, made of the functions of csrc/engine/finish/pointwise.cuh.

Those are Short where results have 11 bits or fewer, and Accurate otherwise. What has a shorter form as a whole, such as
1 + erf(x), becomes one function here. docs/kernels/activations.md counts their instructions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

from factorlayer.activations.expression import (
    GRADIENT,
    NAMED,
    ONE,
    ZERO,
    Expression,
    X,
    apply,
    check_activation,
    expression_of,
    gradient_of,
    in_order,
)
from factorlayer.activations.results import RESULT, gradient_from_result

# The functions of each dtype, which tell how many bits their results have
FUNCTIONS = {
    "float64": "Accurate", "float32": "Accurate", "tf32": "Short<11>", "float16": "Short<11>", "bfloat16": "Short<8>",
}  # fmt: skip
_WORDS = {
    "neg": "-{}", "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}",
    "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}",
    **{op: f"{op}_({{}})" for op in ("abs", "sign", "floor")},
    **{op: f"{op}_({{}}, {{}})" for op in ("min", "max")},
}  # fmt: skip
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126  # whose reciprocals are floats


def activation_type(activation: str, dtype: str, first: int) -> str:
    """A chain's activation, a name or a program, as the type Activation of a kernel's constants. Its parameters are
    weights from the `first` on."""
    check_activation(activation)  # it becomes code here
    if activation == "identity":
        return "using Activation = identity;"
    return struct(value_of(expression_of(activation)), "Activation", dtype, first)


def slope(activation: str, dtype: str, name: str) -> str:
    """The derivative of a chain's activation, a name or a program, as a struct of the kernels."""
    expression = expression_of(activation)
    return struct(GELU_TANH_SLOPE if is_gelu_tanh(expression) else expression.derivative(), name, dtype)


def gradient(activation: str, dtype: str, name: str) -> str:
    """The same times the gradient of the result, a second argument."""
    return struct(times_slope_of(expression_of(activation)), name, dtype, further=(GRADIENT,))


def gradient_by_result(activation: str, dtype: str, name: str) -> str:
    """What makes the gradient of what is activated from that of the result, x, and the result, a second argument."""
    return struct(gradient_from_result(activation), name, dtype, further=(RESULT,))


def struct(output: Expression, name: str, dtype: str, first: int = 0, further: tuple[Expression, ...] = ()) -> str:
    """A function of x, and of further leaves; its parameters are weights from the `first` on."""
    lines: list[str] = []
    names: dict[Expression, str] = {}
    read: dict[str, int] = {}  # parameters, each from a weight

    def as_number(node: Expression) -> str:
        return f"T({names[node]})" if node.is_boolean else names[node]

    output = shortened(output)
    for node in in_order(output):
        if node.op == "p":
            names[node] = f"p{node.value}"
            read[names[node]] = first + int(node.value or 0)
            continue
        if node is X or node in further or node.op == "number":
            names[node] = _constant(float(node.value or 0)) if node.op == "number" else node.op
            continue
        args = list(map(as_number, node.args))
        if node.op == "select":
            condition = node.args[0]
            made = f"{names[condition] if condition.is_boolean else f'{args[0]} != T(0)'} ? {args[1]} : {args[2]}"
        elif node.op in _WORDS:
            made = _WORDS[node.op].format(*args)
        elif node.op == "div":
            made = _quotient(node, args, dtype)
        else:
            made = f"{FUNCTIONS[dtype]}::{node.op}({', '.join(args)})"
        names[node] = f"v{len(lines)}"
        lines.append(f"    const {'bool' if node.is_boolean else 'T'} {names[node]} = {made};")
    body = "\n".join([*lines, f"    return {as_number(output)};"])
    members = f"  const Sum<Element> {', '.join(read)};\n" if read else ""
    given = ", ".join(f"{p}(widen(*static_cast<const Element*>(params.weights[{i}])))" for p, i in read.items())
    made = (
        f"  DEVICE {name}(const Params& params) : {given} {{}}\n" if read else f"  DEVICE {name}(const Params&) {{}}\n"
    )
    taken = ", ".join(f"[[maybe_unused]] T {leaf.op}" for leaf in (X, *further))
    of = f"{'' if read else 'static '}DEVICE T of({taken}){' const' if read else ''}"
    return f"struct {name} {{\n{members}{made}  template <class T> {of} {{\n{body}\n  }}\n}};"


def _quotient(node: Expression, args: list[str], dtype: str) -> str:
    """By a number, as a product; in double, the quotient itself."""
    divisor = node.args[1]
    by = abs(float(divisor.value or 0)) if divisor.op == "number" else 0
    if dtype != "float64" and _SMALLEST <= by <= _LARGEST:
        return f"{args[0]} * {_constant(1 / float(divisor.value or 0))}"
    return f"{FUNCTIONS[dtype]}::quotient({', '.join(args)})"


def _constant(value: float) -> str:
    if math.isfinite(value):
        return f"T({value!r})"
    bits = 0x7FC00000 if math.isnan(value) else 0x7F800000
    return f"T({'-' if value < 0 else ''}__uint_as_float({bits:#x}u))"


# Operations that only the kernels have, of one argument

GELU_TANH, GELU_TANH_SLOPE = Expression("gelu_tanh", (X,)), Expression("gelu_tanh_slope", (X,))
# What it may be written with; where an expression is gelu_tanh if it has its values, but for constants of fewer digits
_WRITTEN_WITH: dict[str, Callable[..., float]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "pow": operator.pow, "tanh": math.tanh,
}  # fmt: skip
_PROBED, _AS_WRITTEN = (-4.5, -1.25, -0.5, 0.75, 1.5, 3.25), 1e-8


@functools.cache
def is_gelu_tanh(expression: Expression) -> bool:
    """Whether it is gelu by tanh, however it is written: models have x^3, x * x * x, and constants of their own."""
    ops = {node.op for node in in_order(expression) if node.args}
    if expression.parameters or "tanh" not in ops or not ops <= _WRITTEN_WITH.keys():
        return False
    pairs = ((_number_of(each, x) for each in (expression, NAMED["gelu_tanh"])) for x in _PROBED)
    return all(math.isclose(*pair, rel_tol=_AS_WRITTEN, abs_tol=_AS_WRITTEN) for pair in pairs)


def _number_of(expression: Expression, x: float) -> float:
    """Its value, if it is written with these operations; NaN where there is none."""
    values = {X: x}
    for node in in_order(expression):
        if node.op == "number":
            values[node] = float(node.value or 0)
        elif node is not X:
            try:
                values[node] = _WRITTEN_WITH[node.op](*(values[arg] for arg in node.args))
            except ArithmeticError:
                return math.nan
    return float(values[expression])


def value_of(expression: Expression) -> Expression:
    """What a kernel makes of an activation."""
    return GELU_TANH if is_gelu_tanh(expression) else expression


def times_slope_of(expression: Expression) -> Expression:
    """And of the gradient of its result."""
    return GRADIENT * GELU_TANH_SLOPE if is_gelu_tanh(expression) else gradient_of(expression)


def shortened(output: Expression) -> Expression:
    """The same function by fewer special functions."""
    sums = {
        arg.args[0]
        for node in in_order(output)
        if node.op == "add" and ONE in node.args
        for arg in node.args
        if arg.op == "tanh"
    }
    made: dict[Expression, Expression] = {}
    for node in in_order(output):
        args = tuple(made[arg] for arg in node.args)
        made[node] = _shorter(node, args, sums) if args else node
    return made[output]


def _shorter(node: Expression, args: tuple[Expression, ...], sums: set[Expression]) -> Expression:
    """A shorter text of a node whose arguments are made. `sums`: of what 1 + tanh is needed anyway."""
    if node.op == "add" and ONE in node.args:
        for arg, its in zip(node.args, args, strict=True):
            if arg.op in ("erf", "tanh"):
                return Expression(f"one_plus_{arg.op}", its.args)
    if node.op == "sub" and node.args[0] is ONE and node.args[1].op == "mul":
        a, b = node.args[1].args
        if a is b and a.op == "tanh" and a.args[0] in sums:  # 1 - tanh^2
            one_plus = Expression("one_plus_tanh", args[1].args[0].args)
            return one_plus * (2 - one_plus)
    if node.op == "tanh" and args[0].op == "softplus":
        return Expression("tanh_of_softplus", args[0].args)
    if node.op == "select" and node.args[1] is ZERO and node.args[0] is apply("le", node.args[2], ZERO):
        return apply("max", args[2], ZERO)
    return Expression(node.op, args, node.value)
