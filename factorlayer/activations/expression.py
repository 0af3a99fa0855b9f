"""Elementwise expressions of a tensor x and scalars p0, p1, …: what an activation computes, as data. No torch in here.

An expression is a graph whose nodes are made once: equal expressions are one object. Its text is a word of steps, each
with the numbers of the steps that it takes: "x,softplus:0,tanh:1,mul:0:2" is x · tanh(softplus(x)). An activation's
program is its expression and the derivatives of it by x, p0, p1, …, "/" between them; each of them ends a part, whose
steps go on from the last part's, and ":3" is step 3 again. csrc/expression.h reads programs, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

# Their numbers of arguments. select(c, a, b) is a where c is not 0; lt, le and eq are 0 or 1; min and max of NaN are
# NaN; softplus is log(1 + e^x); and the second argument of pow is a number.
OPERATIONS = {
    "neg": 1, "abs": 1, "sign": 1, "floor": 1, "sqrt": 1, "exp": 1, "expm1": 1, "log": 1, "log1p": 1, "sin": 1,
    "cos": 1, "tanh": 1, "sigmoid": 1, "softplus": 1, "erf": 1, "atan": 1,
    "add": 2, "sub": 2, "mul": 2, "div": 2, "pow": 2, "min": 2, "max": 2, "lt": 2, "le": 2, "eq": 2,
    "select": 3,
}  # fmt: skip
COMPARISONS = ("lt", "le", "eq")
MOST_STEPS, MOST_PARAMETERS = 1000, 16  # of a program
LONGEST_STEP = 80  # letters


class Expression:
    """One node, immutable: a number, "x", "p" with its index, or an operation on others."""

    __slots__ = ("__weakref__", "args", "op", "value")
    op: str
    args: tuple[Expression, ...]
    value: float | int | None

    def __new__(cls, op: str, args: tuple[Expression, ...] = (), value: float | int | None = None) -> Expression:
        key = (op, args, repr(value))  # -0.0 is another number than 0.0, and NaN is NaN
        found = _known.get(key)
        if found is None:
            found = super().__new__(cls)
            for name, content in (("op", op), ("args", args), ("value", value)):
                object.__setattr__(found, name, content)
            found = _known.setdefault(key, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an Expression does not change: {name} cannot be set")

    @classmethod
    def parse(cls, text: str) -> Expression:
        """The expression of a text, or the first of a program."""
        return parse(text)[0]

    @property
    def text(self) -> str:
        return write(self)

    @property
    def program(self) -> str:
        """The program with all derivatives, as a chain's text has it."""
        too_large = (
            f"it has more than {MOST_STEPS} operations or {MOST_PARAMETERS} parameters; leave a part of it to a layer "
            "without activation"
        )
        if len(in_order(self)) > MOST_STEPS or self.parameters > MOST_PARAMETERS:
            raise ValueError(too_large)
        of_all = _adjoints(self)
        slopes = [of_all.get(leaf, ZERO) for leaf in (X, *map(parameter, range(self.parameters)))]
        text = write(self, *slopes)
        if text.count(",") + text.count("/") >= MOST_STEPS:
            raise ValueError(f"with its derivatives {too_large}")
        return text

    @property
    def parameters(self) -> int:
        """How many, counted up to the last that occurs."""
        return max((int(node.value or 0) + 1 for node in in_order(self) if node.op == "p"), default=0)

    @property
    def is_boolean(self) -> bool:
        return self.op in COMPARISONS

    def derivative(self, parameter: int | None = None) -> Expression:
        """The derivative by x, or by a parameter."""
        return _adjoints(self).get(X if parameter is None else Expression("p", (), parameter), ZERO)

    def __reduce__(self) -> tuple[Any, ...]:
        return Expression.parse, (self.text,)

    def __repr__(self) -> str:
        return f"Expression.parse({self.text!r})"

    # Arithmetic. What is left out changes no bit of a result.

    def __neg__(self) -> Expression:
        if self.op == "number":
            return number(-float(self.value or 0))
        return self.args[0] if self.op == "neg" else Expression("neg", (self,))

    def __add__(self, other: Operand) -> Expression:
        return _operation("add", self, number(other), lambda a, b: a + b)

    def __radd__(self, other: float) -> Expression:
        return number(other) + self

    def __sub__(self, other: Operand) -> Expression:
        other = number(other)
        return self if other is ZERO else _operation("sub", self, other, lambda a, b: a - b)

    def __rsub__(self, other: float) -> Expression:
        return number(other) - self

    def __mul__(self, other: Operand) -> Expression:
        other = number(other)
        if ONE in (self, other):
            return other if self is ONE else self
        return _operation("mul", self, other, lambda a, b: a * b)

    def __rmul__(self, other: float) -> Expression:
        return number(other) * self

    def __truediv__(self, other: Operand) -> Expression:
        other = number(other)
        return self if other is ONE else _operation("div", self, other, _quotient)

    def __rtruediv__(self, other: float) -> Expression:
        return number(other) / self


Operand = Expression | float
_known: WeakValueDictionary[tuple[Any, ...], Expression] = WeakValueDictionary()


def number(value: Operand) -> Expression:
    return value if isinstance(value, Expression) else Expression("number", (), float(value))


def parameter(index: int) -> Expression:
    return Expression("p", (), index)


X, ZERO, ONE = Expression("x"), number(0), number(1)
GRADIENT = Expression("g")  # of the result


def apply(op: str, *args: Operand) -> Expression:
    return Expression(op, tuple(map(number, args)))


def select(condition: Expression, a: Operand, b: Operand) -> Expression:
    a, b = number(a), number(b)
    if a.op == "select" and a.args[0] is condition:
        a = a.args[1]
    if b.op == "select" and b.args[0] is condition:
        b = b.args[2]
    return a if a is b else Expression("select", (condition, a, b))


def power(base: Expression, exponent: float) -> Expression:
    """Small powers as PyTorch computes them."""
    if exponent == 0:
        return ONE
    if exponent in (1, 2, 3):
        return base if exponent == 1 else power(base, exponent - 1) * base
    if exponent in (0.5, -0.5):
        root = apply("sqrt", base)
        return root if exponent > 0 else 1 / root
    return 1 / power(base, -exponent) if exponent in (-1, -2) else apply("pow", base, exponent)


def _operation(op: str, a: Expression, b: Expression, of_numbers: Callable[[float, float], float]) -> Expression:
    if a.value is not None and b.value is not None and a.op == b.op == "number":
        return number(of_numbers(a.value, b.value))
    return Expression(op, (a, b))


def _quotient(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def in_order(*outputs: Expression) -> list[Expression]:
    """All nodes, each behind its arguments."""
    seen: dict[Expression, None] = {}
    waiting = list(reversed(outputs))
    while waiting:
        node = waiting[-1]
        missing = [arg for arg in node.args if arg not in seen]
        if missing:
            waiting += reversed(missing)
        else:
            seen.setdefault(waiting.pop())
    return list(seen)


def number_steps(output: Expression) -> tuple[tuple[str, float | int | None, tuple[int, ...]], ...]:
    """Operation, value and the numbers of its arguments, for each node in order."""
    at = {node: i for i, node in enumerate(in_order(output))}
    return tuple((node.op, node.value, tuple(at[arg] for arg in node.args)) for node in at)


# Text


def write(*outputs: Expression) -> str:
    at: dict[Expression, int] = {}
    parts, count = [], 0
    for output in outputs:
        words: list[str] = []
        for node in in_order(output):
            if node not in at:
                at[node] = count + len(words)
                words.append(_word(node, at))
        if not words or at[output] != count + len(words) - 1:
            words.append(f":{at[output]}")
        count += len(words)
        parts.append(",".join(words))
    return "/".join(parts)


def _word(node: Expression, at: dict[Expression, int]) -> str:
    if node.op == "number":
        return repr(node.value)
    return ":".join([node.op if node.op != "p" else f"p{node.value}", *(str(at[arg]) for arg in node.args)])


def parse(text: str) -> tuple[Expression, ...]:
    steps: list[Expression] = []
    outputs = []
    if text.count(",") + text.count("/") >= MOST_STEPS:
        raise ValueError(f"an expression should have {MOST_STEPS} steps at most, this one has more")
    for part in text.split("/"):
        for word in part.split(","):
            try:
                steps.append(_parse_word(word, steps))
            except (ValueError, IndexError):
                raise ValueError(
                    f"step {len(steps)} of expression {text[:200]!r} cannot be read: {word[:80]!r}"
                ) from None
        outputs.append(steps[-1])
    return tuple(outputs)


def _parse_word(word: str, steps: list[Expression]) -> Expression:
    if not word or not word.isascii() or len(word) > LONGEST_STEP:
        raise ValueError
    op, *places = word.split(":")
    if not all(place.isdecimal() for place in places):
        raise ValueError
    args = tuple(steps[int(place)] for place in places)
    if op == "" and len(args) == 1:
        return args[0]
    if op in OPERATIONS:
        is_number = [arg.op == "number" for arg in args]
        constant = {"select": is_number[:1] == [True], "pow": is_number != [False, True]}.get(op, all(is_number))
        if constant or len(args) != OPERATIONS[op]:
            raise ValueError
        return Expression(op, args)
    if args:
        raise ValueError
    if op == "x":
        return X
    if op.startswith("p") and op[1:].isdecimal() and int(op[1:]) < MOST_PARAMETERS:
        return parameter(int(op[1:]))
    value = number(float(op))
    if repr(value.value) != op:
        raise ValueError
    return value


# Derivatives: from the result back to x, by the formulas and in the order of PyTorch's autograd, so that what overflows
# or is NaN there is so here. But where a select passes nothing on, there is nothing to multiply: no 0 times infinity.


def _adjoints(output: Expression, gradient: Expression = ONE) -> dict[Expression, Expression]:
    """The derivative of an expression by each of its nodes that it depends on, times what comes from behind it."""
    found = {output: gradient}
    for node in reversed(in_order(output)):
        if node in found and node.args:
            for arg, share in zip(node.args, _shares(node, found[node]), strict=True):
                if share is not ZERO and arg.op != "number":
                    found[arg] = found[arg] + share if arg in found else share
    return found


def _shares(node: Expression, g: Expression) -> tuple[Expression, ...]:
    """What comes to each argument of a node from g, the derivative by the node."""
    around: list[tuple[Expression, bool]] = []  # selects of g or 0, the outermost first, and whether g comes first
    while g.op == "select" and ZERO in g.args[1:]:
        condition, a, b = g.args
        around.append((condition, b is ZERO))
        g = a if b is ZERO else b
    shares = _plain_shares(node, g)
    for condition, is_first in reversed(around):
        shares = tuple(select(condition, each, ZERO) if is_first else select(condition, ZERO, each) for each in shares)
    return shares


def _plain_shares(node: Expression, g: Expression) -> tuple[Expression, ...]:
    """Of a g that is no select of nothing."""
    if node.op in _UNARY:
        return (_UNARY[node.op](g, node.args[0], node),)
    if node.op in _BINARY:
        a, b = node.args
        return _BINARY[node.op](g, a, b, node)
    if node.op == "select":
        condition = node.args[0]
        return ZERO, select(condition, g, ZERO), select(condition, ZERO, g)
    return (ZERO,) * len(node.args)  # steps: their derivative is 0


def _larger(g: Expression, a: Expression, b: Expression) -> Expression:
    """The share of max(a, b) that comes to a: half of it in a tie."""
    return select(apply("lt", a, b), ZERO, select(apply("eq", a, b), g * 0.5, g))


_UNARY: dict[str, Callable[[Expression, Expression, Expression], Expression]] = {
    "neg": lambda g, a, y: -g,
    "abs": lambda g, a, y: g * apply("sign", a),
    "sqrt": lambda g, a, y: g / (2 * y),
    "exp": lambda g, a, y: g * y,
    "expm1": lambda g, a, y: g * (y + 1),
    "log": lambda g, a, y: g / a,
    "log1p": lambda g, a, y: g / (a + 1),
    "sin": lambda g, a, y: g * apply("cos", a),
    "cos": lambda g, a, y: g * -apply("sin", a),
    "tanh": lambda g, a, y: g * (1 - y * y),
    "sigmoid": lambda g, a, y: g * (1 - y) * y,
    "softplus": lambda g, a, y: g * apply("sigmoid", a),
    "erf": lambda g, a, y: g * (2 / math.sqrt(math.pi) * apply("exp", -(a * a))),
    "atan": lambda g, a, y: g / (a * a + 1),
}
_BINARY: dict[str, Callable[[Expression, Expression, Expression, Expression], tuple[Expression, ...]]] = {
    "add": lambda g, a, b, y: (g, g),
    "sub": lambda g, a, b, y: (g, -g),
    "mul": lambda g, a, b, y: (ZERO if b is ZERO else g * b, ZERO if a is ZERO else g * a),
    "div": lambda g, a, b, y: (g / b, -g * (y / b)),
    "pow": lambda g, a, b, y: (g * (b * power(a, float(b.value or 0) - 1)), ZERO),
    "max": lambda g, a, b, y: (_larger(g, a, b), _larger(g, b, a)),
    "min": lambda g, a, b, y: (_larger(g, b, a), _larger(g, a, b)),
}


# A chain's activation: a name, or a program

RELU = select(apply("le", X, 0), 0, X)
NAMED = {
    "identity": X,
    "relu": RELU,
    "leaky_relu": select(apply("lt", 0, X), X, 0.01 * X),
    "elu": select(apply("le", X, 0), apply("expm1", X), X),
    "gelu": 0.5 * X * (1 + apply("erf", math.sqrt(0.5) * X)),
    "gelu_tanh": 0.5 * X * (1 + apply("tanh", math.sqrt(2 / math.pi) * (X + 0.044715 * X * X * X))),
    "silu": X * apply("sigmoid", X),
    "sigmoid": apply("sigmoid", X),
    "tanh": apply("tanh", X),
    "sine": apply("sin", X),
    "softplus": select(apply("lt", 20, X), X, apply("softplus", X)),
    "square": X * X,
    "relu_squared": RELU * RELU,
}  # what tracing makes of factorlayer.ACTIVATIONS
_NAMES = {expression: name for name, expression in NAMED.items()}


def name_of(expression: Expression) -> str | None:
    """The name of an activation that kernels have a row for."""
    return _NAMES.get(expression)


def check_activation(activation: str) -> None:
    """ValueError unless it is one of the names, or a program of operations that there are."""
    if "/" not in activation:
        if activation not in NAMED:
            raise ValueError(f"unknown stage {activation[:200]!r}")
        return
    count = len(parts := parse(activation)) - 2
    if not 0 <= count <= MOST_PARAMETERS or any(part.parameters > count for part in parts):
        raise ValueError(
            f"an expression should come with its derivatives by x and by its parameters, {MOST_PARAMETERS} at most"
        )


def gradient_of(activation: Expression) -> Expression:
    """The derivative times GRADIENT, that of the result, from which PyTorch's formulas begin: so it is zero where an
    activation is constant, even if that gradient is infinite."""
    return _adjoints(activation, GRADIENT).get(X, ZERO)


def expression_of(activation: str) -> Expression:
    """The expression of a chain's activation, a name or a program."""
    return Expression.parse(activation) if "/" in activation else NAMED[activation]
