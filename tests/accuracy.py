"""How exact activations are on a GPU: the functions that are swept, their numbers, and the errors that they may have.

Of values: so much of the result. Of slopes: so much of the result and of 1 + |x|, up to |x| = 30, as what they are made
of cancels. docs/kernels/activations.md has the largest that were seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from factorlayer.activations.expression import NAMED, Expression, in_order
from factorlayer.activations.named import evaluate
from factorlayer.activations.tracing import trace

_MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": nn.Mish(), "log_sigmoid": nn.LogSigmoid(), "selu": nn.SELU(), "celu": nn.CELU(0.7),
    "tanhshrink": nn.Tanhshrink(), "softsign": nn.Softsign(), "hardswish": nn.Hardswish(), "exp": torch.exp,
    "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "erf": torch.erf, "cos": torch.cos,
    "atan": torch.atan, "sqrt": torch.sqrt, "reciprocal": torch.reciprocal, "power": lambda x: x**1.7,
    "cubed_inverse": lambda x: x**-3.0, "sixth": lambda x: x / 6, "softplus_of_half": nn.Softplus(0.5),
}  # fmt: skip
FUNCTIONS: dict[str, Expression] = {**NAMED, **{name: trace(function)[0] for name, function in _MODULES.items()}}

VALUE = {"float64": 2.0**-50, "float32": 2.0**-21.4, "tf32": 2.0**-14, "float16": 2.0**-14, "bfloat16": 2.0**-12.5}
SLOPE = {"float64": 2.0**-49, "float32": 2.0**-20.5, "tf32": 2.0**-14, "float16": 2.0**-14, "bfloat16": 2.0**-12.5}
# Of single functions: the unit's own tanh is off by 2^-11, and its square by twice that; a power's exponent is rounded
# where it is up to 128; mish is a product of three.
ALLOWED: dict[str, dict[str, float]] = {
    "tanh": {"bfloat16": 2.0**-9.9},
    "tanhshrink": {"bfloat16": 2.0**-9.9},
    "power": {"float32": 2.0**-18},
    "mish": {"float32": 2.0**-20.9},
}
# Values that cancel, as torch's do: off by so much of x, too.
_WIDE = ("float64", "float32")
CANCELLING = {"gelu": _WIDE, "gelu_tanh": _WIDE, "tanhshrink": tuple(VALUE)}
LARGEST_ANGLE = 2.0**17  # up to which sines for 16 bits and tf32 are right; beyond they are some number from -1 to 1
FLUSHED = 2.0**-118  # where special functions below 2^-126 are zero, and multiplied by as much as x


def _ndtr(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-x * 0.5**0.5)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    c = (2 / torch.pi) ** 0.5
    s = torch.sigmoid(2 * c * (x + 0.044715 * x * x * x))
    slope = s + x * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * x * x)
    return x * s, torch.where((x.abs() > 100) & x.isfinite(), (x > 0).double(), slope)


def right_of(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope in float64, also where an expression's own terms cancel."""
    x = x.double()
    if name == "gelu":
        return x * _ndtr(x), _ndtr(x) + x * torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
    if name == "gelu_tanh":
        return _gelu_tanh(x)
    expression = FUNCTIONS[name]
    return evaluate(expression, x), evaluate(expression.derivative(), x)


def all_of_16_bits(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def drawn_of_32_bits(count: int) -> Tensor:
    """Evenly over all that there are, and over what is of use."""
    of_all = (torch.arange(count) * ((1 << 32) // count) + 1237).to(torch.int32).view(torch.float32)
    return torch.cat([of_all, *(torch.linspace(-to, to, count // 4 + 1) for to in (0.1, 1, 10, 100, 1e4))])


def drawn_of_64_bits(count: int) -> Tensor:
    of_all = (torch.arange(count) * ((1 << 63) // count) + 12345).view(torch.float64)
    of_use = [torch.linspace(-to, to, count, dtype=torch.float64) for to in (0.1, 1, 10, 100)]
    return torch.cat([of_all, -of_all, *of_use])


def check(name: str, kind: str, dtype: str, x: Tensor, found: Tensor) -> float:
    """Raises AssertionError where `found` is off by more than is allowed. The largest error, in parts of that."""
    expression, is_slope = FUNCTIONS[name], kind == "slope"
    right = right_of(name, x)[is_slope]
    alone = evaluate(expression.derivative() if is_slope else expression, x)  # torch's, in the dtype of the sums
    size = x.double().abs()
    unit = max((SLOPE if is_slope else VALUE)[dtype], ALLOWED.get(name, {}).get(dtype, 0))
    scale = right.abs()
    if is_slope:
        scale = scale + 1 + size.clamp(max=30)
    elif dtype in CANCELLING.get(name, ()):
        scale = scale + size
    smallest = {"float64": 2.0**-1000, "float32": 2.0**-140 * (1 + size.clamp(max=128))}.get(dtype, FLUSHED)
    allowed = unit * scale + smallest
    is_short = dtype not in _WIDE
    if is_short and any(node.op in ("sin", "cos") for node in in_order(expression)):
        allowed = torch.where(size > LARGEST_ANGLE, 2.0 + 2.0**-10, allowed)
    off = (found.double() - right).abs()
    largest, tiny = torch.finfo(found.dtype).max, torch.finfo(found.dtype).tiny
    same = (found == right.to(found.dtype)) | (found.isnan() & right.isnan())
    same |= (found.isnan() & alone.isnan()) | (~found.isfinite() & (found == alone))  # as torch's own sums overflow
    infinite = found.isinf() & (found.sign() == right.sign())
    same |= infinite & (right.abs() > 0.97 * largest)
    same |= infinite & is_short & (x.abs() < tiny) & (right.abs() > 2.0**126)  # a quotient by what is flushed
    wrong = ~(same | (found.isfinite() & (off <= allowed)))
    if wrong.any():
        at = int(torch.where(wrong & found.isfinite(), off / allowed, wrong.double()).argmax())
        such = f"{found[at]!r} for {right[at]!r} at {x[at]!r}"
        raise AssertionError(f"{kind} of {name} in {dtype}: {int(wrong.sum())} wrong, such as {such}")
    return float(torch.where(same | ~found.isfinite(), 0.0, off / allowed).max())
