"""Expressions: text, derivatives and tracing, against PyTorch's own functions and autograd in float64."""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from factorlayer.activations.expression import (
    COMPARISONS,
    MOST_STEPS,
    NAMED,
    OPERATIONS,
    Expression,
    X,
    apply,
    in_order,
    number,
    parameter,
    parse,
    power,
    select,
    write,
)
from factorlayer.activations.named import ACTIVATIONS, activate, evaluate
from factorlayer.activations.texts import activation_of, scalars
from factorlayer.activations.tracing import trace

SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, 30.0, -30.0, 300.0, -300.0, 1e30, -1e30]
SPECIAL += [math.inf, -math.inf, math.nan]
SIZE = apply("abs", X) + 0.5
EVERY_OPERATION = functools.reduce(
    operator.add,
    [
        *(apply(op, X) for op in ("neg", "abs", "sign", "floor", "sin", "cos", "tanh", "sigmoid", "softplus", "erf")),
        *(apply(op, SIZE) for op in ("sqrt", "log", "log1p", "atan")),
        *(apply(op, -SIZE) for op in ("exp", "expm1")),
        *(apply(op, X, SIZE) for op in ("add", "sub", "mul", "div")),
        *(select(apply(op, X, 0.5), SIZE, X) + apply(op, 0.2, X) for op in COMPARISONS),
        apply("pow", SIZE, 1.3),
        apply("min", X, 0.25),
        apply("max", X, SIZE),
    ],
)
SWEEP = torch.tensor([*SPECIAL, *(i / 64 for i in range(-700, 701))], dtype=torch.float64)


# Random expressions


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    """A dozen steps, each on what was there before."""
    numbers = st.sampled_from([-2.0, -1.0, 0.0, 0.25, 0.5, 1.0, 3.0])
    made = [X, parameter(0), X]
    for _ in range(draw(st.integers(1, 12))):
        any_made = st.sampled_from(made)
        op = draw(st.sampled_from(sorted(OPERATIONS)))
        if op == "pow":
            made.append(power(draw(any_made), draw(st.sampled_from([-2, -1, -0.5, 0.5, 1.5, 2, 3, 4]))))
        elif op == "select":
            compared = apply(draw(st.sampled_from(COMPARISONS)), draw(any_made), draw(any_made | numbers))
            made.append(select(compared, draw(any_made), draw(any_made | numbers)))
        elif OPERATIONS[op] == 2:
            a, b = draw(any_made), draw(any_made | numbers)
            made.append(apply(op, *((a, b) if draw(st.booleans()) else (b, a))))
        else:
            made.append(apply(op, draw(any_made)))
    return made[-1]


@given(expressions())
@settings(max_examples=300)
def test_text_is_read_back(e: Expression) -> None:
    assert Expression.parse(e.text) is e
    assert parse(e.program) == (e, e.derivative(), *(e.derivative(i) for i in range(e.parameters)))
    assert pickle.loads(pickle.dumps(e)) is e
    assert copy.deepcopy(e) is e
    assert len(set(in_order(e))) == len(in_order(e)) == e.text.count(",") + 1


def autograd(function: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Value and derivatives at each x, of each parameter, too: they are one for each x."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *(p.expand_as(x) for p in parameters))]
    y = torch.stack([function(*(leaf[i] for leaf in leaves)) for i in range(len(x))])
    found = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True) if y.requires_grad else [None] * 2
    return y.detach(), [torch.zeros_like(x) if g is None else g for g in found]


def sizes_of_terms(e: Expression, x: Tensor, p: Tensor) -> dict[Expression, Tensor]:
    """What the derivative's terms add up to without their signs: what its rounding error is measured by."""
    sizes = {e: torch.ones_like(x)}
    for node in reversed(in_order(e)):
        args = [arg for arg in dict.fromkeys(node.args) if arg.op != "number"]
        if node not in sizes or not args:
            continue
        values = {arg: evaluate(arg, x, [p]).detach().requires_grad_() for arg in args}
        places = {arg: parameter(i) for i, arg in enumerate(args)}
        alone = Expression(node.op, tuple(places.get(arg, arg) for arg in node.args), node.value)
        y = torch.stack([evaluate(alone, x[i], [v[i] for v in values.values()]) for i in range(len(x))])
        if y.requires_grad:
            partial = torch.autograd.grad(y, list(values.values()), torch.ones_like(y), allow_unused=True)
            for arg, slope in zip(args, partial, strict=True):
                if slope is not None:
                    slope = torch.ones_like(x) if node.op in ("tanh", "sigmoid") else slope  # 1 - y^2 cancels
                    sizes[arg] = sizes.get(arg, 0) + (sizes[node] * slope).abs().nan_to_num(math.inf, math.inf)
    return sizes


@given(expressions(), st.lists(st.sampled_from(SPECIAL) | st.floats(-30, 30), min_size=4, max_size=4))
@settings(max_examples=150)
def test_derivatives_are_those_of_autograd(e: Expression, values: list[float]) -> None:
    """But where autograd's is NaN: of a branch that was not taken, it can be a number here."""
    x, p = torch.tensor(values, dtype=torch.float64), torch.tensor(0.75, dtype=torch.float64)
    y, slopes = autograd(lambda x, p: evaluate(e, x, [p]), x, p)
    torch.testing.assert_close(evaluate(e, x, [p]), y, equal_nan=True, rtol=1e-12, atol=1e-300)
    sizes = sizes_of_terms(e, x, p)
    for leaf, derivative, right in zip((X, parameter(0)), (e.derivative(), e.derivative(0)), slopes, strict=True):
        found = evaluate(derivative, x, [p])
        error = torch.where(found == right, 0.0, (found - right).abs())
        allowed = 1e-12 * sizes.get(leaf, torch.zeros_like(x)) + 1e-290
        assert (right.isnan() | (error <= allowed)).all(), (e.text, x, found, right)


def test_second_derivatives() -> None:
    e = X * apply("tanh", apply("softplus", X)) + apply("exp", -(X * X))
    x = torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(evaluate(e, x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(evaluate(e.derivative().derivative(), x.detach()), bend, rtol=1e-12, atol=1e-13)


def test_what_is_not_selected_does_not_matter() -> None:
    """Autograd multiplies by 0 there, which makes NaN of an infinite derivative."""
    e = select(apply("lt", 0, X), apply("sqrt", X), number(0))
    x = torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64)
    assert evaluate(e.derivative(), x).tolist() == [0, 0, 0.25]
    assert evaluate((e * 3).derivative(), x).tolist() == [0, 0, 0.75]


def test_every_operation_is_in_it() -> None:
    assert {node.op for node in in_order(EVERY_OPERATION)} == {*OPERATIONS, "x", "number"}


def test_common_parts_are_computed_once() -> None:
    assert (apply("exp", X) * apply("exp", X)).text == "x,exp:0,mul:1:1"
    assert apply("exp", X).program == "x,exp:0/:1"
    e = X
    for _ in range(200):
        e = e * e  # 2^200 paths
    assert e.program.count(",") < 1000


def test_numbers_are_exact() -> None:
    for value in (0.1, -0.0, 5e-324, 1e300, math.inf, -math.inf, math.nan, 2.0**70):
        e = X + value
        assert Expression.parse(e.text) is e and repr(Expression.parse(e.text).args[1].value) == repr(value)
    assert X + 0.0 is not X + -0.0


NO_EXPRESSIONS = [
    "", ",", "/", "x/", "x,", "y", "x y", "exp", "exp:0", "x,exp:1", "x,exp:-1", "x,exp:0:0", "x,exp:", "x,exp:0x0",
    "x,exp:99999999999999999999", "x,:1", ":0", "x,add:0", "x,1,add:1:1", "1,exp:0", "p16", "p-1", "p", "p01x", "1_0",
    "+1.0", "1", "0x1", "x,2.0,pow:1:0", "x,pow:0:0", "x,1.0,select:1:0:0", "x,lt:0:0,select:1:0", "x,neg:0;", "x,²",
    "x,exp:²", ",".join(["x"] * (MOST_STEPS + 1))]  # fmt: skip


@pytest.mark.parametrize("text", NO_EXPRESSIONS)
def test_refuses_what_is_no_expression(text: str) -> None:
    with pytest.raises(ValueError, match=r"^step \d+ of expression .* cannot be read: |should have 1000 steps at most"):
        parse(text)


def test_does_not_change() -> None:
    with pytest.raises(AttributeError, match="an Expression does not change: op cannot be set"):
        X.op = "p"
    assert repr(X * 2) == "Expression.parse('x,2.0,mul:0:1')"


# Tracing


class Snake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.frequency * x) ** 2 / self.frequency


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-((x / self.width) ** 2))


def piecewise(x: Tensor) -> Tensor:
    inside = (x > -1) & ~(x >= 2) | (x == 5)
    return torch.where(inside, x**3, 0.5 * x).masked_fill(x < -4, -1.0) + (x <= 1) * x + (x != 0).to(x.dtype)


def accumulated(x: Tensor) -> Tensor:
    y = 2 * x
    y -= 1
    y *= x
    return F.relu(y, inplace=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"named-{name}": function for name, function in ACTIVATIONS.items()},
    "mish": nn.Mish(),
    "mish-by-hand": lambda x: x * torch.tanh(F.softplus(x)),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardtanh": nn.Hardtanh(-2, 3),
    "relu6": nn.ReLU6(),
    "clamp": lambda x: torch.clamp(x, -1, 3),
    "clamp-below": lambda x: x.clamp(min=-1),
    "clamp-above": lambda x: torch.clamp_max(x, 3),
    "celu": nn.CELU(1.5),
    "selu": nn.SELU(),
    "elu": nn.ELU(0.7),
    "leaky-relu": nn.LeakyReLU(0.2),
    "softplus": nn.Softplus(2, 6),
    "softsign": nn.Softsign(),
    "softshrink": nn.Softshrink(1.0),
    "hardshrink": nn.Hardshrink(1.0),
    "tanhshrink": nn.Tanhshrink(),
    "threshold": nn.Threshold(1.0, 5.0),
    "logsigmoid": nn.LogSigmoid(),
    "sinc": torch.sinc,
    "gaussian": Gaussian(),
    "snake": lambda x: x + torch.sin(3 * x) ** 2 / 3,
    "sine": lambda x: torch.sin(30 * x),
    "maximum": lambda x: torch.maximum(x, torch.ones_like(x)) - torch.min(x, 2 * x),
    "roots": lambda x: torch.sqrt(torch.abs(x)) + torch.rsqrt(x * x + 1) + torch.reciprocal(1 + x.square()),
    "powers": lambda x: x**2 + x**3 - x**4 + (1 + x * x) ** 1.25 + (2 + x.abs()) ** -1,
    "rounded": lambda x: torch.floor(x) + torch.trunc(2 * x) + x.ceil() + torch.frac(x),
    "logarithms": lambda x: torch.log1p(x * x) - torch.log2(x.abs() + 1) + torch.atan(x) - torch.log(2 + torch.cos(x)),
    "piecewise": piecewise,
    "accumulated": accumulated,
    "sequence": nn.Sequential(nn.Softplus(), nn.Identity(), nn.ReLU(inplace=True), nn.Sigmoid()),
    "gelu-by-hand": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "expm1": lambda x: torch.add(torch.expm1(-x.abs()), x, alpha=2).neg() - torch.sign(x),
}  # fmt: skip
# Differences of nearly equal numbers, in PyTorch, too: right to eps |x|, and sinc's derivative to eps / |x|
CANCELLING = {"gelu-by-hand", "named-gelu", "named-gelu_tanh", "rounded", "sinc", "tanhshrink", "logsigmoid"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_functions_and_their_derivatives(name: str) -> None:
    expression, parameters = trace(FUNCTIONS[name])
    assert parameters == ()
    x = SWEEP[(SWEEP.abs() <= 1e5) | ~SWEEP.isfinite()]
    right, (right_slope,) = autograd(FUNCTIONS[name], x)
    value, slope = evaluate(expression, x), evaluate(expression.derivative(), x)
    if name == "piecewise":  # autograd multiplies the branch that is not taken by 0
        right_slope = torch.where(right_slope.isnan(), slope, right_slope)
    slack = 1e-14 * x.abs() if name in CANCELLING else 0.0
    slack = 1e-8 if name == "hardsigmoid" else slack  # PyTorch's sixth is a float's
    assert_near(value, right, 1e-14 + slack, x)
    assert_near(slope, right_slope, 1e-12 + (1e-14 / x.abs().clamp(1e-3, 1) if name == "sinc" else slack), x)


def assert_near(found: Tensor, right: Tensor, slack: Tensor | float, x: Tensor) -> None:
    same = (found == right) | (found.isnan() & right.isnan())
    wrong = ~(same | ((found - right).abs() <= 1e-12 * right.abs() + slack))
    assert not wrong.any(), f"at {x[wrong]}: {found[wrong]} instead of {right[wrong]}"


@pytest.mark.parametrize("module", [Snake(), nn.PReLU(dtype=torch.float64), nn.Sequential(nn.Tanh(), Snake())], ids=str)
def test_learnable_scalars(module: nn.Module) -> None:
    program, names = activation_of(module)
    values = scalars(module, names)
    assert values == list(module.parameters()) and program.count("/") == 1 + len(values)
    x = SWEEP[SWEEP.abs() < 300].clone().requires_grad_()
    right = module(x)
    found = activate(program, x, values)
    torch.testing.assert_close(found, right, rtol=1e-14, atol=1e-14)
    grad_y = torch.randn_like(right)
    rights = torch.autograd.grad(right, [x, *values], grad_y)
    torch.testing.assert_close(torch.autograd.grad(found, [x, *values], grad_y), rights, rtol=1e-11, atol=1e-11)
    _, *slopes = parse(program)
    sums = [grad_y * evaluate(slope, x, values) for slope in slopes]
    torch.testing.assert_close(sums[0], rights[0], rtol=1e-12, atol=1e-12)
    for found_sum, wanted in zip(sums[1:], rights[1:], strict=True):
        torch.testing.assert_close(found_sum.sum(), wanted.sum(), rtol=1e-10, atol=1e-10)


def test_one_parameter_under_two_names_is_one() -> None:
    module = nn.Sequential(nn.PReLU(), nn.Tanh(), nn.PReLU())
    module[2].weight = module[0].weight
    assert activation_of(module)[1] == ("0.weight",)


def test_named_expressions_are_those_of_the_torch_functions() -> None:
    assert {name: trace(function)[0] for name, function in ACTIVATIONS.items()} == NAMED


def test_what_equals_a_named_one_is_that() -> None:
    same = {
        "relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "tanh": torch.tanh,
        "sine": torch.sin, "sigmoid": nn.Sigmoid(), "elu": nn.ELU(), "leaky_relu": nn.LeakyReLU(),
        "square": torch.square, "softplus": nn.Softplus(), "identity": nn.Identity(),
        "relu_squared": lambda x: F.relu(x) ** 2,
    }  # fmt: skip
    assert set(same) == set(ACTIVATIONS)
    for name, function in same.items():
        assert activation_of(function) == activation_of(name) == (name, ())
    assert activation_of(X * apply("sigmoid", X)) == ("silu", ())


# Refusals


def control_flow(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def adds_in_place(x: Tensor) -> Tensor:
    x += 1
    return x


def reads_what_it_overwrote(x: Tensor) -> Tensor:
    y = 2 * x
    z = y + 0.5
    y += 1
    return y * z


SCALAR, PRELU = nn.Parameter(torch.ones(())), nn.PReLU()
REFUSED: dict[str, tuple[object, str]] = {
    "softmax": (nn.Softmax(-1), "Softmax cannot be traced: softmax is none of the operations on single elements"),
    "sum": (lambda x: x - x.sum(), "sum is none"),
    "dropout": (nn.Dropout(), "Dropout cannot be traced: dropout is none"),
    "rrelu": (nn.RReLU(), "rrelu is none"),
    "random": (lambda x: x * torch.rand(()), "it is another function each time it is called; leave out"),
    "control-flow": (control_flow, "control_flow cannot be traced: what it does depends on the values in x; use"),
    "no-grad": (without_gradient, "it computes sigmoid without recording it for gradients"),
    "own-rule": (Straight.apply, "it computes sign without recording it for gradients"),
    "detach": (lambda x: x.detach(), "detach is none"),
    "in-place": (lambda x: x.mul_(2), "mul_ is none .*; use mul, which makes a new tensor"),
    "in-place-add": (adds_in_place, "iadd overwrites x; use add, which makes a new tensor"),
    "used-again": (lambda x: F.relu(x, inplace=True) + x, "relu overwrites in place what is used again"),
    "overwritten": (reads_what_it_overwrote, "iadd overwrites in place what is used again"),
    "elements": (nn.PReLU(3), r"PReLU cannot be traced: its weight has 3 elements; use one for all of x"),
    "tensor": (lambda x: x * torch.ones(2), "its constant has 2 elements"),
    "parameter-outside": (lambda x: x * SCALAR, "parameter is not a member of this module; make a module"),
    "module-outside": (lambda x: PRELU(x), "module is not installed as a submodule; make a module"),
    "math": (lambda x: math.sin(x), "TypeError: must be real number, not Proxy; use torch's operations"),
    "exponent": (lambda x: 2**x, r"pow\(2, Tensor\) is not known here with these arguments"),
    "dimension": (lambda x: torch.max(x, 0), r"maximum\(Tensor, 0\) is not known"),
    "shape": (lambda x: x / x.shape[-1], r"it asks for x\.shape"),
    "dtype": (lambda x: x.double(), r"double\(Tensor\) is not known"),
    "booleans": (lambda x: (x > 0) + (x > 1), "add.* is not known"),
    "two": (lambda x: (x, x), "it returns tuple where a tensor of x's shape should be"),
    "number": (lambda x: 1.0, "it returns float"),
    "scripted": (torch.jit.script(nn.Tanh()), "it is a ScriptModule"),
    "long": (lambda x: sum(torch.sin(i * x) for i in range(1, 400)), "more than 1000 operations or 16 parameters"),
    "parameters": (nn.Sequential(*(nn.PReLU() for _ in range(17))), "more than 1000 operations or 16 parameters"),
    "values": (parameter(0) * X, "has parameters without values; give it as a module"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_the_name_of_the_operation(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^activation .*{message}"):
        activation_of(function)


def test_refuses_what_is_no_function() -> None:
    message = "activation should be None, a name, a module or a function of one tensor; it is int 3"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        activation_of(3)
    with pytest.raises(TypeError, match=r"a module or a function of one tensor; it is type <class '.*\.ReLU'>$"):
        activation_of(nn.ReLU)


def test_texts_of_numbers_of_steps() -> None:
    e = apply("exp", X) + parameter(1)
    assert write(e) == "x,exp:0,p1,add:1:2"
    assert e.parameters == 2
    assert e.program == "x,exp:0,p1,add:1:2/:1/0.0/1.0"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_expressions_of_the_names(name: str) -> None:
    """What kernels make slopes of: values and derivatives are those of PyTorch's functions."""
    x = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 0.5, -0.7, 3.0, -4.0, 19.0, 25.0, -30.0], dtype=torch.float64)
    x.requires_grad_()
    y = ACTIVATIONS[name](x)
    (right,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(evaluate(NAMED[name], x), y, rtol=1e-12, atol=1e-15)
    found = evaluate(NAMED[name].derivative(), x.detach())
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)
