"""Activations on the CPU's kernels, by name and by program: value and derivative against torch's in float64."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import kronecker
from test_expression import FUNCTIONS, NO_EXPRESSIONS, SPECIAL, SWEEP, Snake, expressions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import factorlayer.autograd.layer_ops
from factorlayer import ACTIVATIONS, FactorLinear, factor_linear, fuse
from factorlayer.activations.expression import OPERATIONS, Expression, X, apply, in_order, number_steps, parameter
from factorlayer.activations.named import evaluate
from factorlayer.activations.tracing import trace
from factorlayer.autograd.layer_ops import explain_fused, why_never_fused
from factorlayer.functional import choose
from factorlayer.maths.chain import Chain

DTYPES = [torch.float32, torch.float64]
# Values that cancel where the function nears zero, 1 + erf(x) and 1 + tanh(x): right to eps·|x|, as torch's are.
CANCELLING = {"gelu", "gelu_tanh"}
# Derivatives that are sums or products of several terms of size |x|: right to eps·(1 + |x|).
EXACT_SLOPES = {"identity", "relu", "leaky_relu", "softplus", "square", "relu_squared", "sine"}


def sweep(dtype: torch.dtype) -> Tensor:
    """Dense where the functions bend, with kinks, signed zeros, tiny and large numbers."""
    special = [0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 1.0, -1.0, 20.0, 20.000002, 19.999998, 1e4, -1e4]
    special += [k * math.pi / 2 for k in range(-8, 9)]
    x = torch.cat([torch.linspace(-30, 30, 8000, dtype=torch.float64), torch.tensor(special, dtype=torch.float64)])
    return x.to(dtype)


def identity_layer(features: int, activation: str, dtype: torch.dtype) -> FactorLinear:
    """y = activation(x): both factors are identity matrices, so every pre-activation is x exactly."""
    layer = FactorLinear(
        features * features, features * features, bias=False, factors=(features, features), activation=activation,
        implementation="fused", dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for weight in layer.weights:
            weight.copy_(torch.eye(features))
    return layer


def fused_value_and_slope(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    side = 9  # 81 features: full vectors and a tail
    rows = F.pad(x, (0, -x.numel() % side**2)).reshape(-1, side**2).requires_grad_()
    y = identity_layer(side, activation, x.dtype)(rows)
    (slope,) = torch.autograd.grad(y, rows, torch.ones_like(y))
    return y.detach().flatten()[: x.numel()], slope.flatten()[: x.numel()]


def torch_value_and_slope(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = ACTIVATIONS[activation](x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), slope


def assert_near(found: Tensor, right: Tensor, slack: Tensor | float, x: Tensor) -> None:
    """To 4 eps of the value (8 in float64, where torch's own error counts too), plus the slack in eps."""
    eps, few = torch.finfo(found.dtype).eps, 8 if found.dtype == torch.float64 else 4
    smallest = torch.finfo(found.dtype).tiny
    off = (found.double() - right).abs() - few * eps * (right.abs() + slack) - smallest
    worst = int(off.argmax())
    assert off[worst] <= 0, f"at {x[worst]!r}: {found[worst]!r} instead of {right[worst]!r}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_derivative(activation: str, dtype: torch.dtype) -> None:
    x = sweep(dtype)
    value, slope = fused_value_and_slope(activation, x)
    right, right_slope = torch_value_and_slope(activation, x.double())
    size = x.double().abs()
    assert_near(value, right, size if activation in CANCELLING else 0.0, x)
    assert_near(slope, right_slope, 0.0 if activation in EXACT_SLOPES else 1 + size.clamp(max=30), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("features", [1, 3, 7, 16, 33], ids=lambda n: f"{n}-features")
def test_special_values_are_those_of_torch(activation: str, dtype: torch.dtype, features: int) -> None:
    """NaN, infinities and kinks, in every lane of a vector and of its tail. They come in through the bias, since in a
    sum of products they would spread: y = activation(0 + bias). The reference is torch in float64, one number at a
    time: in torch's own vectors gelu(inf) is NaN in float32, and elu's slope at NaN is NaN in some lanes, 1 in others
    (so that one is left out)."""
    for number in (math.nan, math.inf, -math.inf, 0.0, 1e4, -1e4, 20.0):
        bias = torch.full((features,), number, dtype=dtype, requires_grad=True)
        weights = [torch.zeros(1, 1, dtype=dtype), torch.zeros(features, 1, dtype=dtype)]
        y = factor_linear(torch.zeros(1, 1, dtype=dtype), weights, bias, activation, implementation="fused")
        (slope,) = torch.autograd.grad(y, bias, torch.ones_like(y))
        right, right_slope = torch_value_and_slope(activation, torch.tensor([number], dtype=torch.float64))
        pairs = {"value": (y[0], right), "slope": (slope, right_slope)}
        if activation == "elu" and math.isnan(number):
            del pairs["slope"]
        for what, (found, wanted) in pairs.items():
            torch.testing.assert_close(
                found, wanted.to(dtype).expand(features), equal_nan=True, rtol=1e-5, atol=1e-6,
                msg=lambda text, what=what, number=number: f"{what} at {number}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["relu", "relu_squared", "leaky_relu", "elu"])
def test_an_infinite_gradient_comes_back_as_in_torch(activation: str, dtype: torch.dtype) -> None:
    """Where a rectifier is constant, nothing does: no 0 times infinity. In every lane of a vector and of its tail: the
    bias is what is activated, as x is 0."""
    for features, number in itertools.product((1, 7, 16, 33), (math.inf, -math.inf, math.nan)):
        for at in (-2.0, -0.5, 0.0, 1.0):
            slopes = []
            for implementation in ("fused", "naive"):
                bias = torch.full((features,), at, dtype=dtype, requires_grad=True)
                weights = [torch.zeros(1, 1, dtype=dtype), torch.zeros(features, 1, dtype=dtype)]
                y = factor_linear(
                    torch.zeros(1, 1, dtype=dtype), weights, bias, activation, implementation=implementation
                )
                slopes += torch.autograd.grad(y, bias, torch.full_like(y, number))
            torch.testing.assert_close(*slopes, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_row_means_the_same_in_every_implementation(activation: str) -> None:
    x = torch.randn(5, 12, dtype=torch.float64)
    layer = FactorLinear(12, 12, factors=(3, 4), activation=activation, dtype=torch.float64)
    plain = FactorLinear(12, 12, factors=(3, 4), dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)  # of a layer with another activation
    right = ACTIVATIONS[activation](plain(x))
    for layer.implementation in ("naive", "batched", "fused"):
        torch.testing.assert_close(layer(x), right, rtol=1e-12, atol=1e-12)


def test_rows_are_the_torch_functions() -> None:
    """Against the modules of torch.nn, where there is one."""
    modules = {
        "identity": torch.nn.Identity(), "relu": torch.nn.ReLU(), "leaky_relu": torch.nn.LeakyReLU(),
        "elu": torch.nn.ELU(), "gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU("tanh"), "silu": torch.nn.SiLU(),
        "sigmoid": torch.nn.Sigmoid(), "tanh": torch.nn.Tanh(), "softplus": torch.nn.Softplus(), "sine": torch.sin,
        "square": lambda x: x * x, "relu_squared": lambda x: x.clamp(min=0) ** 2,
    }  # fmt: skip
    assert set(modules) == set(ACTIVATIONS)
    x = sweep(torch.float64)
    for name, module in modules.items():
        torch.testing.assert_close(ACTIVATIONS[name](x), module(x), rtol=1e-15, atol=1e-300)


@pytest.mark.parametrize("nothing", [None, "none", "identity"])
def test_no_activation(nothing: str | None) -> None:
    assert FactorLinear(4, 4, activation=nothing).activation is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = (
        "identity, relu, leaky_relu, elu, gelu, gelu_tanh, silu, sigmoid, tanh, sine, softplus, square, relu_squared"
    )
    message = f"FactorLinear: activation should be None or one of {known}; it is 'swish'"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        FactorLinear(4, 4, activation="swish")
    assert str(error.value) == message


# Programs


def run_program(program: str, x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Value and derivatives by x and by the parameters, of which one is the sum over all x, by the raw ops."""
    side = 83  # full chunks and vectors, and a tail
    rows = F.pad(x, (0, -x.numel() % side)).reshape(-1, side)
    chain, weights = f"untied 0 {side} 1 1 1; {program}", [torch.ones(side, 1, 1, dtype=x.dtype), *parameters]
    y = torch.ops.factorlayer.forward(rows, weights, None, chain)
    grad_y = (torch.arange(rows.numel()) < x.numel()).to(x.dtype).view_as(rows)
    wanted = 1 | ((1 << len(parameters)) - 1) << 3
    slope, *slopes = torch.ops.factorlayer.backward(grad_y, rows, weights, None, chain, wanted)
    return y.flatten()[: x.numel()], slope.flatten()[: x.numel()], slopes


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
def test_a_parameters_gradient_has_every_term(dtype: torch.dtype) -> None:
    """Of 1 to 40 terms, which are summed up by eight: powers of two, of which none can stand in for another."""
    program = trace(nn.PReLU())[0].program
    for count in range(1, 41):
        for first in range(0, count, 20):  # as many as float32 has bits for
            x = torch.zeros(count, 1, dtype=dtype)
            place = torch.arange(first, min(count, first + 20))
            x[place, 0] = -(2.0 ** (place - first).to(dtype))
            weights = [torch.ones(1, 1, dtype=dtype), torch.full((), 0.25, dtype=dtype)]
            chain = f"tied 0 1 1 1 1; {program}"
            (slope,) = torch.ops.factorlayer.backward(torch.ones_like(x), x, weights, None, chain, 8)
            assert slope.item() == 1 - 2.0 ** len(place), (count, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
def test_every_number_has_its_value_and_gradient(dtype: torch.dtype) -> None:
    """The last one too, wherever a vector or a chunk of rows ends: 0.5 x where x is negative."""
    program = (X * 0.5).program
    for count in (*range(1, 41), *range(250, 264), *range(506, 520)):
        x, grad_y = -torch.arange(1, count + 1, dtype=dtype)[:, None], torch.arange(2, count + 2, dtype=dtype)[:, None]
        arguments = x, [torch.ones(1, 1, dtype=dtype)], None, f"tied 0 1 1 1 1; {program}"
        assert torch.equal(torch.ops.factorlayer.forward(*arguments), 0.5 * x), count
        (grad_x,) = torch.ops.factorlayer.backward(grad_y, *arguments, 1)
        assert torch.equal(grad_x, 0.5 * grad_y), count


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_are_as_accurate_as_torch(name: str, dtype: torch.dtype) -> None:
    """To 4 times the error of torch's operations, one by one in that dtype; with NaN and infinities where those are, or
    where they are in float64: torch's vectors do not make them alike on all processors."""
    expression = trace(FUNCTIONS[name])[0]
    x = SWEEP[SWEEP.abs().nan_to_num(0, 0) < 1e5].to(dtype)
    for found, e in zip(run_program(expression.program, x), (expression, expression.derivative()), strict=False):
        right, torchs = evaluate(e, x.double()), evaluate(e, x)
        same = (found == torchs) | (found.isnan() & (torchs.isnan() | right.isnan())) | (found == right.to(dtype))
        scale = right.abs() + 1 + x.double().abs() + (1 / x.double().abs() if name == "sinc" else 0)
        allowed = 4 * (torchs.double() - right).abs() + 8 * torch.finfo(dtype).eps * scale
        wrong = ~(same | ((found.double() - right).abs() <= allowed))
        assert not wrong.any(), f"at {x[wrong]}: {found[wrong]} instead of {right[wrong]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation(op: str, dtype: torch.dtype) -> None:
    """On all it may be given: zeros, infinities, NaN, subnormal, tiny and huge numbers."""
    p = torch.tensor(0.75, dtype=dtype)
    numbers = [X, parameter(0), X][: OPERATIONS[op]] if op != "pow" else [X, 1.7]
    e = apply(op, *numbers)
    subnormal = torch.finfo(dtype).tiny * torch.tensor([0.3, -0.3, 1.0, 2.0**-20], dtype=dtype)
    x = torch.cat([torch.tensor(SPECIAL, dtype=dtype), torch.randn(200, dtype=dtype) * 10, subnormal, 0.75 + subnormal])
    found, right = run_program((e + parameter(0) * 0).program, x, p)[0], evaluate(e, x.double(), [p.double()])
    ulps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, right.to(dtype), rtol=ulps, atol=0 if op != "log1p" else ulps, equal_nan=True)


# What is rounded correctly, as NumPy has it on all processors; of PyTorch's square root the last bit differs with them.
EXACT = {
    "neg": np.negative, "abs": np.abs, "sign": lambda x: 1.0 * (x > 0) - (x < 0), "floor": np.floor, "sqrt": np.sqrt,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "select": lambda c, a, b: np.where(c != 0, a, b),
}  # fmt: skip


def exactly(e: Expression, x: Tensor, p: Tensor) -> Tensor:
    """Step by step in float64."""
    kept: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for op, value, args in number_steps(e):
            given = {"x": x.numpy(), "p": p.numpy(), "number": value}
            step = given[op] if op in given else EXACT[op](*(kept[i] for i in args))
            kept.append(np.broadcast_to(np.asarray(step, dtype=np.float64), x.shape))
    return torch.from_numpy(kept[-1].copy())


@pytest.mark.long
@given(expressions(), st.lists(st.sampled_from(SPECIAL) | st.floats(-30, 30), min_size=3, max_size=3))
@settings(max_examples=300)
def test_programs_are_run_step_by_step(e: Expression, values: list[float]) -> None:
    """What is rounded correctly comes out bit for bit, whatever the rows in which its steps are kept."""
    exact = [node for node in in_order(e) if all(step.op in EXACT or not step.args for step in in_order(node))]
    e = exact[-1] + parameter(0) * 0
    x, p = torch.tensor(values, dtype=torch.float64), torch.tensor(0.75, dtype=torch.float64)
    y, slope, (of_parameter,) = run_program(e.program, x, p)
    torch.testing.assert_close(y, exactly(e, x, p), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(slope, exactly(e.derivative(), x, p), rtol=0, atol=0, equal_nan=True)
    right = exactly(e.derivative(0), x, p)
    if right.isfinite().all():
        torch.testing.assert_close(of_parameter, right.sum(), rtol=1e-14, atol=1e-14 * right.abs().max().item())


def test_rows_are_used_again_and_are_many() -> None:
    """A sum of terms that are all kept for their product: as many rows as terms."""
    terms = [apply("sin", X * float(i)) for i in range(1, 40)]
    total, product = terms[0], terms[0]
    for term in terms[1:]:
        total, product = total + term, product * (term + 2.0)
    e = total * product
    x = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    y, slope, _ = run_program(e.program, x)
    right, right_slope = evaluate(e, x), evaluate(e.derivative(), x)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12 * right.abs().max().item())
    torch.testing.assert_close(slope, right_slope, rtol=1e-12, atol=1e-12 * right_slope.abs().max().item())


def learnable(kind: str) -> nn.Module:
    return {"prelu": nn.PReLU, "snake": Snake, "both": lambda: nn.Sequential(nn.PReLU(), Snake())}[kind]()


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("structure", ["kronecker", "monarch"])
@pytest.mark.parametrize("kind", ["prelu", "snake", "both"])
def test_learnable_scalars_in_every_implementation(kind: str, structure: str, rank: int) -> None:
    layer = FactorLinear(
        42, 40, structure=structure, factors=((6, 7), (8, 5)), rank=rank, activation=learnable(kind),
        dtype=torch.float64,
    )  # fmt: skip
    names = [f"activation.{name}" for name, _ in learnable(kind).named_parameters()]
    assert [name for name, _ in layer.named_parameters()][-len(names) :] == names
    x, grad_y = (torch.randn(37, n, dtype=torch.float64) for n in (42, 40))
    found = {}
    for layer.implementation in ("naive", "batched", "fused"):
        y = layer(x)
        found[layer.implementation] = [y, *torch.autograd.grad(y, list(layer.parameters()), grad_y)]
    for other in ("batched", "fused"):
        torch.testing.assert_close(found[other], found["naive"], rtol=1e-11, atol=1e-11)
    scalars = list(layer.activation.parameters())
    (y, *alone), layer.implementation = found["fused"], "fused"
    torch.testing.assert_close(
        torch.autograd.grad(layer(x), scalars, grad_y), tuple(alone[-len(scalars) :]), rtol=0, atol=0
    )

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, given, (x,))

    inputs = [t.detach().requires_grad_() for t in (x[:3], *layer.parameters())]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_scalars_gradient_sums_over_many_numbers(dtype: torch.dtype, threads: int) -> None:
    """Of 16384 x 64 summands, which are added up in double; each time with the same bits."""
    torch.set_num_threads(threads)
    layer = FactorLinear(64, 64, activation=nn.PReLU(), implementation="fused", dtype=dtype)
    x = torch.randn(16384, 64).to(dtype)
    first, second = (torch.autograd.grad(layer(x).sum(), layer.activation.weight)[0] for _ in range(2))
    assert torch.equal(first, second)
    exact = FactorLinear(64, 64, activation=nn.PReLU(dtype=torch.float64), implementation="naive", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    (right,) = torch.autograd.grad(exact(x.double()).sum(), exact.activation.weight)
    torch.testing.assert_close(first.double(), right, rtol=torch.finfo(dtype).eps, atol=0)


def test_a_scalar_comes_in_any_number_of_dimensions() -> None:
    program = (X * parameter(0)).program
    x = torch.randn(3, dtype=torch.float64)
    for shape in ((), (1,), (1, 1)):
        scalar = torch.full(shape, 2.0, dtype=torch.float64)
        y, _, (gradient,) = run_program(program, x, scalar)
        assert torch.equal(y, 2 * x) and gradient.shape == shape


MALFORMED = {
    **{
        f"step-{i}": (f"{text}/x", "cannot be read|1000 steps at most|is no letter")
        for i, text in enumerate(NO_EXPRESSIONS[3:])
    },
    "no-derivative-by-a-parameter": ("x,p0,mul:0:1/:1", "has a parameter p0, but no derivative by it"),
    "seventeen-parameters": ("x" + "/x" * 18, "with its derivatives by x and by at most 16 parameters"),
    "a-parameter-too-few": ("x,p0,mul:0:1/:1/:0", "the chain has 2 weights, 1 were given"),
    "number-out-of-range": ("x,1e999/x", "cannot be read"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_programs_are_refused(name: str) -> None:
    program, message = MALFORMED[name]
    if any(c in program for c in "; ") or not program.strip():
        message = ".*"  # another stage
    with pytest.raises((ValueError, RuntimeError), match=message):
        run_program(program, torch.ones(3))


def test_a_parameter_has_one_element_of_xs_dtype() -> None:
    program = (X * parameter(0)).program
    for wrong in (torch.ones(2), torch.ones(1).double(), torch.ones(0)):
        with pytest.raises(RuntimeError, match="an activation's parameter must be a CPU tensor of x's dtype"):
            run_program(program, torch.ones(3), wrong)
    layer = FactorLinear(4, 4, activation=nn.PReLU(), dtype=torch.float64)
    layer.activation.float()
    message = "FactorLinear: x and the activation's parameter 0 should have one dtype, x is torch.float64"
    for layer.implementation in ("batched", "fused"):
        with pytest.raises(TypeError, match=message):
            layer(torch.ones(1, 4, dtype=torch.float64))


@given(st.text("xp0123456789.:,/-naeimulsc", min_size=1, max_size=40))
@settings(max_examples=500)
def test_any_text_is_run_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError, RuntimeError):
        run_program(f"x,exp:0,{text}/x", torch.ones(3))


def test_a_layer_keeps_its_activation() -> None:
    def build(activation: object) -> FactorLinear:
        return FactorLinear(12, 12, activation=activation)

    module = nn.Sequential(nn.PReLU(), nn.Tanh())
    assert build(module).activation is module and "(activation): Sequential" in repr(build(module))
    assert build(nn.GELU()).chain.activation == "gelu"
    assert build(torch.tanh).activation == "tanh" and build(lambda x: x).activation is None
    by_hand = build(lambda x: x * torch.tanh(x))
    assert by_hand.activation is X * apply("tanh", X)
    assert repr(eval(repr(by_hand), {"FactorLinear": FactorLinear, "Expression": Expression})) == repr(by_hand)
    for layer in (by_hand, build(Snake().float())):
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(copied(torch.ones(1, 12)), layer(torch.ones(1, 12)))
    with pytest.raises(AttributeError, match="activation is traced when the layer is built; build another layer"):
        by_hand.activation = nn.Tanh()
    with pytest.raises(ValueError, match=r"FactorLinear\.to_linear: this layer ends in activation=Expression"):
        by_hand.to_linear()


def test_refusals_name_the_caller() -> None:
    with pytest.raises(ValueError, match=r"^FactorLinear: activation Softmax cannot be traced: softmax is none"):
        FactorLinear(4, 4, activation=nn.Softmax(-1))
    with pytest.raises(TypeError, match=r"^FactorLinear: activation should be None, a name, a module or a function"):
        FactorLinear(4, 4, activation=3)
    with pytest.raises(ValueError, match=r"^factor_linear: activation Softmax cannot be traced"):
        factor_linear(torch.ones(1, 4), [torch.ones(2, 2)] * 2, activation=nn.Softmax(-1))


def test_opcheck_of_a_program_with_a_parameter() -> None:
    x, grad_y = torch.randn(5, 6), torch.randn(5, 20)
    weights = [torch.randn(4, 2), torch.randn(5, 3), torch.tensor(0.5)]
    chain = f"tied 1 2 3 5 1; tied 0 1 2 4 5; bias; {trace(Snake())[0].program}"
    arguments = (x, weights, torch.randn(20), chain)
    torch.library.opcheck(torch.ops.factorlayer.forward, arguments)
    torch.library.opcheck(torch.ops.factorlayer.backward, (grad_y, *arguments, 0b11111))


def test_stacks_carry_programs_and_parameters() -> None:
    layers = [
        FactorLinear(12, 20, activation=nn.PReLU()),
        FactorLinear(20, 18, rank=2, activation=nn.Mish(), bias=False),
        FactorLinear(18, 16, structure="monarch", activation=nn.Sequential(Snake(), nn.PReLU())),
    ]
    model = nn.Sequential(*layers).double()
    stack = fuse(model, implementation="fused")
    x = torch.randn(35, 12, dtype=torch.float64, requires_grad=True)
    leaves = [x, *model.parameters()]
    for wanted in (leaves, [layers[0].activation.weight], list(layers[2].activation.parameters())):
        found, right = (torch.autograd.grad(f(x).square().sum(), wanted) for f in (stack, model))
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(stack(x), model(x))
    assert {"factorlayer::stack_forward"} <= {event.name for event in profile.events()}
    assert torch.autograd.gradgradcheck(lambda x: stack(x), [x[:2].detach().requires_grad_()], fast_mode=True)


def test_a_gpu_takes_parameters_as_far_as_its_kernels_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "why_not_on_gpu", lambda index: None)
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda")
    program = sum((parameter(i) * X for i in range(4)), X).program
    few, many = (Chain.of(kronecker((1,) * k, (1,) * k), True, program) for k in (58, 59))
    assert why_never_fused(x, few) is None
    reason = "its CUDA kernels take 62 weights at most, this layer has 63"
    assert why_never_fused(x, many) == reason
    assert choose(many, x, "auto", "test") == "batched"
    with pytest.raises(RuntimeError, match=f"^test: implementation='fused' cannot run: {reason}; or use"):
        choose(many, x, "fused", "test")


def test_explain_says_who_makes_the_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "gpu_limits", lambda index: (90, 132, 232448))
    with FakeTensorMode():
        x = torch.empty(0, 16, device="cuda:7", dtype=torch.bfloat16)
    for module, said in ((nn.PReLU(), True), (None, False)):
        lines = explain_fused(FactorLinear(16, 16, activation=module).chain, x, 1000).splitlines()
        begin = lines.index("backward:") + 1
        assert (lines[begin] == "  activation: what it takes once more, and its gradients by PyTorch") == said
        assert lines[-1] == "  weight_0, weight_1: all gradients at once"
