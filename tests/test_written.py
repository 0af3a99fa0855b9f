"""Activations as device code: the text of it, and what its functions make, against float64.

The functions run on a CPU, with special functions that are off by as much as a GPU's may be (tests/emulator), over all
numbers of 16 bits and a part of those of 32 and 64. tests/gpu/test_values.py does the same on a GPU, with all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from accuracy import ALLOWED, FUNCTIONS, all_of_16_bits, check, drawn_of_32_bits, drawn_of_64_bits
from emulator.driver import why_not
from pointwise import Functions

from factorlayer.activations.expression import NAMED, Expression, X, apply, parameter, select
from factorlayer.activations.named import ACTIVATIONS, evaluate
from factorlayer.activations.tracing import trace
from factorlayer.activations.written import (
    FUNCTIONS as OF_DTYPES,
)
from factorlayer.activations.written import (
    activation_type,
    gradient,
    gradient_by_result,
    is_gelu_tanh,
    shortened,
    slope,
    struct,
)


def test_words() -> None:
    """Constants that C++ has no word for, comparisons as conditions and as numbers, and what it has no code for."""
    e = select(apply("lt", X, -math.inf), apply("le", X, 0.1) * math.nan, apply("exp", -X))
    assert struct(e, "Mine", "float32") == (
        "struct Mine {\n"
        "  DEVICE Mine(const Params&) {}\n"
        "  template <class T> static DEVICE T of([[maybe_unused]] T x) {\n"
        "    const bool v0 = x < T(-__uint_as_float(0x7f800000u));\n"
        "    const bool v1 = x <= T(0.1);\n"
        "    const T v2 = T(v1) * T(__uint_as_float(0x7fc00000u));\n"
        "    const T v3 = -x;\n"
        "    const T v4 = Accurate::exp(v3);\n"
        "    const T v5 = v0 ? v2 : v4;\n"
        "    return v5;\n"
        "  }\n"
        "};"
    )
    assert "return T(v0);" in struct(apply("eq", X, 0), "Mine", "float32")
    assert "const T v0 = x != T(0) ? T(1.0) : T(2.0);" in struct(apply("select", X, 1, 2), "Mine", "float32")
    assert activation_type("identity", "bfloat16", 2) == "using Activation = identity;"
    assert activation_type("silu", "bfloat16", 2) == struct(NAMED["silu"], "Activation", "bfloat16")
    assert activation_type(e.program, "tf32", 2) == struct(e, "Activation", "tf32")
    assert slope("square", "tf32", "Slope") == struct(X + X, "Slope", "tf32")
    assert slope(e.program, "float64", "Slope") == struct(e.derivative(), "Slope", "float64")
    learned = parameter(2) * X + parameter(0)
    assert struct(learned, "Mine", "float16", 3) == (
        "struct Mine {\n"
        "  const Sum<Element> p2, p0;\n"
        "  DEVICE Mine(const Params& params) : p2(widen(*static_cast<const Element*>(params.weights[5]))), "
        "p0(widen(*static_cast<const Element*>(params.weights[3]))) {}\n"
        "  template <class T> DEVICE T of([[maybe_unused]] T x) const {\n"
        "    const T v0 = p2 * x;\n"
        "    const T v1 = v0 + p0;\n"
        "    return v1;\n"
        "  }\n"
        "};"
    )
    assert activation_type(learned.program, "float16", 3) == struct(learned, "Activation", "float16", 3)


def test_words_for_gradients_have_a_second_argument() -> None:
    assert "of([[maybe_unused]] T x, [[maybe_unused]] T g)" in gradient("tanh", "float32", "Gradient")
    assert "v1 = v0 ? T(0.0) : x;" in gradient_by_result("relu", "float32", "Gradient")
    assert "T x" in (text := gradient_by_result("elu", "tf32", "Gradient")) and "T y" in text and "* v" in text


def test_functions_are_those_of_the_dtype() -> None:
    for dtype, functions in OF_DTYPES.items():
        assert f" = {functions}::tanh(x);" in activation_type("tanh", dtype, 0)


def test_quotients_by_numbers_are_products_but_in_double() -> None:
    assert "v0 = x * T(0.25);" in struct(X / 4, "Mine", "float32")
    assert "v0 = x * T(-0.5);" in struct(X / -2, "Mine", "bfloat16")
    assert "v0 = Accurate::quotient(x, T(3.0));" in struct(X / 3, "Mine", "float64")
    for divisor in (0.0, 1e-39, 1e39, math.inf, math.nan):  # whose reciprocals are no floats, or not exact enough
        assert "v0 = Short<11>::quotient(x, " in struct(X / divisor, "Mine", "tf32")


def test_shorter_forms() -> None:
    """One function for several, where that is the same: of what is shared, too."""
    inner = 3 * X
    of = functools.partial(Expression, value=None)
    assert shortened(1 + apply("erf", inner)) == of("one_plus_erf", (inner,))
    assert shortened(apply("tanh", inner) + 1) == of("one_plus_tanh", (inner,))
    assert shortened(apply("tanh", apply("softplus", inner))) == of("tanh_of_softplus", (inner,))
    assert shortened(NAMED["relu"]) == apply("max", X, 0)
    square = 1 - apply("tanh", X) * apply("tanh", X)
    one_plus = of("one_plus_tanh", (X,))
    assert shortened(square) == square
    assert shortened(square * (1 + apply("tanh", X))) == one_plus * (2 - one_plus) * one_plus
    for same in (2 + apply("erf", X), 1 - apply("erf", X), apply("tanh", X), select(apply("le", X, 0), 1, X)):
        assert shortened(same) == same


# Against float64


@pytest.fixture(scope="module")
def functions(of_the_run: object, tmp_path_factory: pytest.TempPathFactory) -> object:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pointwise")
    return functools.cache(lambda dtype: Functions(folder, dtype, list(FUNCTIONS.values())))


INPUTS = {
    "bfloat16": lambda: all_of_16_bits(torch.bfloat16).float(),
    "float16": lambda: all_of_16_bits(torch.float16).float(),
    "tf32": lambda: drawn_of_32_bits(1 << 16),
    "float32": lambda: drawn_of_32_bits(1 << 16),
    "float64": lambda: drawn_of_64_bits(1 << 14),
}


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_over_the_whole_range(name: str, dtype: str, functions: object) -> None:
    expression, x = FUNCTIONS[name], INPUTS[dtype]()
    made = functions(dtype)  # type: ignore[operator]
    check(name, "value", dtype, x, made.run("Value", expression, x))
    check(name, "slope", dtype, x, made.run("Gradient", expression, x))


def test_every_function_has_its_errors() -> None:
    assert set(NAMED) <= set(FUNCTIONS) and set(ALLOWED) <= set(FUNCTIONS)


RULE = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", RULE, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 10.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_errors_are_twice_torchs_at_most(name: str, size: float, dtype: torch.dtype, functions: object) -> None:
    """Of values and slopes of normally distributed numbers, in the Frobenius norm, without the rule's 4 eps."""
    x = (torch.randn(1 << 14, dtype=torch.float64) * size).to(dtype)
    made = functions(str(dtype).removeprefix("torch."))  # type: ignore[operator]
    given = x.clone().requires_grad_()
    y = ACTIVATIONS[name](given)
    (its_slope,) = torch.autograd.grad(y, given, torch.ones_like(y))
    for kind, its, right in (
        ("Value", y, evaluate(NAMED[name], x.double())),
        ("Gradient", its_slope, evaluate(NAMED[name].derivative(), x.double())),
    ):
        ours = made.run(kind, NAMED[name], x.float()).to(dtype)
        off, torchs = (float(torch.linalg.norm(each.detach().double() - right)) for each in (ours, its))
        assert off <= 2 * torchs + 1e-30, f"{kind}: {off} instead of {torchs}"


@pytest.mark.parametrize("dtype", ["tf32", "float16"])
def test_a_tanh_at_its_end_has_no_slope(dtype: str, functions: Callable[[str], Functions]) -> None:
    """A gradient times a number that is not quite 0 would be noise."""
    x = torch.tensor([-3e38, -1e4, -6.0, 6.0, 9.0, 1e4, 3e38])
    assert torch.equal(functions(dtype).run("Value", NAMED["tanh"], x), x.sign())
    assert not functions(dtype).run("Gradient", NAMED["tanh"], x).any()


def test_gelu_by_tanh_is_known_however_it_is_written() -> None:
    """As models write it, and nothing that is like it: other constants, a part of it, something beside."""
    c = math.sqrt(2 / math.pi)
    for function in (
        lambda x: 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        torch.nn.GELU(approximate="tanh"),
    ):
        expression = trace(function)[0]
        assert is_gelu_tanh(expression)
        assert "::gelu_tanh(" in activation_type(expression.program, "bfloat16", 2)
        assert "::gelu_tanh_slope(" in gradient(expression.program, "float64", "Gradient")
    for other in (
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x * x * x))),
        lambda x: 0.5 * (1.0 + torch.tanh(c * (x + 0.044715 * x * x * x))),
        lambda x: x + 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * x * x * x))),
        torch.nn.GELU(),
        torch.tanh,
    ):
        assert not is_gelu_tanh(trace(other)[0])
    learned = 0.5 * X * (1 + apply("tanh", parameter(0) * X))
    assert not is_gelu_tanh(learned)
