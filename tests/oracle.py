"""The rule for right numbers, and the layers that the tests run it on.

Against naive in float64 on the same inputs, the relative error (Frobenius) of fused is at most twice that of batched
in the same dtype, plus 4 eps(dtype), for y and for every gradient. What makes it a fair test:
- A quantity of few numbers is pooled over several draws: the error of one number that cancels is luck.
- So is that of a gradient that hangs on one sample, where all others' tanh is saturated, or of the sine of a large
  number. Hence where the plain rule fails, a quantity may be off by twice as much as the reference itself moves when
  every input is moved by an eps of the arithmetic (float32 for the 16-bit types). That is about 2 eps, thus no relief,
  for ordinary inputs.
- float64 has no better reference here, and naive's own rounding grows like the root of the longest sum, N: there what
  is allowed beyond the error of batched (which may have naive's rounding, and no error) is √N times as much.
- Where the reference is zero, the result has to be zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from factorlayer.activations.expression import X, apply, parameter, select
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.functional import run
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IMPLEMENTATIONS = ("naive", "batched", "fused")
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
# Activations with a learned scalar
PRELU = select(apply("lt", 0, X), X, parameter(0) * X).program
SINE = apply("sin", parameter(0) * X).program


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_id(value: object) -> str | None:
    """kronecker-2x4-3x5-r2: inputs x outputs of every mode; None for what is no spec."""
    if not isinstance(value, LayerSpec):
        return None
    sizes = "-".join(f"{p}x{q}" for p, q in zip(value.in_factors, value.out_factors, strict=True))
    return f"{value.structure}-{sizes}" + (f"-r{value.rank}" if value.rank > 1 else "")


@dataclass(frozen=True)
class Case:
    """A layer and a batch."""

    spec: LayerSpec
    batch: int
    bias: bool = True
    activation: str = "identity"

    @property
    def chain(self) -> Chain:
        return Chain.of(self.spec, self.bias, self.activation)

    def __str__(self) -> str:
        activation = {PRELU: "prelu", SINE: "learned-sine"}.get(self.activation, self.activation)
        return f"{spec_id(self.spec)}-n{self.batch}-{activation}{'-bias' * self.bias}"


@dataclass(frozen=True)
class Inputs:
    """Behind the weights are parameters of the activation."""

    x: Tensor
    weights: list[Tensor]
    bias: Tensor | None
    grad_y: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Inputs(self.x.to(dtype), [w.to(dtype) for w in self.weights], bias, self.grad_y.to(dtype))


def draw_inputs(
    case: Case, dtype: torch.dtype, seed: int, layout: str = "contiguous", badly_scaled: bool = False
) -> Inputs:
    """Normal numbers, the weights so scaled that the states keep their size. Badly scaled: the features of x and of
    grad_y are multiplied by 10^-3 … 10^3; for float16 by what its range can hold."""
    generator = torch.Generator().manual_seed(seed)
    spec = case.spec

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def scales(features: int, least: float, most: float) -> Tensor:
        exponents = torch.rand(features, generator=generator, dtype=torch.float64)
        return 10 ** (least + (most - least) * exponents)

    x, grad_y = normal(case.batch, spec.in_features), normal(case.batch, spec.out_features)
    if badly_scaled:
        narrow = dtype == torch.float16
        x = x * scales(spec.in_features, *((-1, 1) if narrow else (-3, 3)))
        grad_y = grad_y * scales(spec.out_features, *((-2, 0) if narrow else (-3, 3)))
    bias = normal(spec.out_features) if case.bias else None
    weights = [normal(*shape, scale=1 / math.sqrt(shape[-1])) for shape in spec.weight_shapes]
    weights += [0.5 + normal(1).abs() for _ in range(case.chain.parameters)]

    def lay_out(tensor: Tensor) -> Tensor:
        return with_layout(tensor.to(dtype), layout)

    # Expanded: x is one row for all samples, grad_y one column for all features. One row of both would add up equal
    # numbers only, whose roundings all go one way.
    grad_y = lay_out(grad_y.mT).mT if layout == "expanded" else lay_out(grad_y)
    return Inputs(lay_out(x), [lay_out(w) for w in weights], None if bias is None else lay_out(bias), grad_y)


def with_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers (expanded: the first row for all) in memory that is not contiguous."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "strided":
        spread = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype, device=tensor.device)
        spread[..., 0] = tensor
        return spread[..., 0]
    if layout == "expanded" and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor.contiguous()


def results(case: Case, inputs: Inputs, implementation: str, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
    """y and the gradients, by name: grad_x, grad_weight_0 …, grad_bias; only those wanted, if it is given."""
    leaves = {"x": inputs.x, **{f"weight_{i}": w for i, w in enumerate(inputs.weights)}}
    if inputs.bias is not None:
        leaves["bias"] = inputs.bias
    wanted = list(leaves) if wanted is None else wanted
    leaves = {name: leaf.detach().requires_grad_(name in wanted) for name, leaf in leaves.items()}
    weights = [leaves[f"weight_{i}"] for i in range(len(inputs.weights))]
    y = run(case.spec, case.chain, leaves["x"], weights, leaves.get("bias"), implementation, "test")
    if not wanted:
        return {"y": y}
    gradients = torch.autograd.grad(y, [leaves[name] for name in wanted], inputs.grad_y)
    return {"y": y.detach()} | {f"grad_{name}": g for name, g in zip(wanted, gradients, strict=True)}


def relative_errors(found: Sequence[dict[str, Tensor]], right: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Of every quantity, over several draws together."""
    errors = {}
    for name in right[0]:
        off = math.sqrt(
            sum(float((f[name].double() - r[name]).square().sum()) for f, r in zip(found, right, strict=True))
        )
        size = math.sqrt(sum(float(r[name].square().sum()) for r in right))
        errors[name] = off / size if size else (0.0 if off == 0 else math.inf)
    return errors


def nearly(found: Tensor, right: Tensor) -> bool:
    """Equal but for roundings. What PyTorch itself computes may differ in its last bits from one call to the next: the
    order of its sums depends on the processor and on where the numbers lie in memory."""
    off, size = (found.double() - right.double()).norm(), right.double().norm()
    return (
        found.shape == right.shape
        and found.dtype == right.dtype
        and bool(off <= 64 * torch.finfo(right.dtype).eps * size)
    )


def longest_sum_root(case: Case) -> float:
    """√N, N the longest sum behind a value: along a contraction, or of a weight gradient over samples and positions."""
    longest = max(c.p for c in case.spec.contractions)
    positions = max(c.outer * c.inner if c.tied else 1 for c in case.spec.contractions)
    positions = case.spec.out_features if case.chain.parameters else positions
    return math.sqrt(max(longest, case.batch * positions))


def movement(case: Case, inputs: Sequence[Inputs], right: Sequence[dict[str, Tensor]], eps: float) -> dict[str, float]:
    """How far the reference moves when every number given moves by eps: the most of four tries."""
    generator = torch.Generator().manual_seed(0)

    def move(tensor: Tensor) -> Tensor:
        signs = 2 * torch.randint(0, 2, tensor.shape, generator=generator).double() - 1
        return tensor.double() * (1 + eps * signs)

    most = dict.fromkeys(right[0], 0.0)
    for _ in range(4):
        moved = [
            Inputs(
                move(i.x),
                [move(w) for w in i.weights],
                None if i.bias is None else move(i.bias),
                move(i.grad_y),
            )
            for i in inputs
        ]
        errors = relative_errors([results(case, i, "naive") for i in moved], right)
        most = {name: max(most[name], error) for name, error in errors.items()}
    return most


def check_rule(
    case: Case,
    dtype: torch.dtype,
    seed: int = 0,
    layout: str = "contiguous",
    badly_scaled: bool = False,
    threads: int | None = None,
) -> None:
    """AssertionError, with all the numbers, where fused breaks the rule."""
    fewest = min(case.spec.out_features, *(math.prod(shape) for shape in case.spec.weight_shapes))
    fewest = 1 if case.chain.parameters else fewest
    draws = max(1, min(12, 64 // fewest))
    check_rule_on(
        case, [draw_inputs(case, dtype, 1000 * seed + i, layout, badly_scaled) for i in range(draws)], threads
    )


def check_rule_on(case: Case, inputs: Sequence[Inputs], threads: int | None = None) -> None:
    dtype = inputs[0].x.dtype
    right = [results(case, i.to(torch.float64), "naive") for i in inputs]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    fused = [results(case, i, "fused") for i in inputs]
    torch.set_num_threads(before)
    for one, reference in zip(fused, right, strict=True):
        shapes = {name: (value.shape, value.dtype) for name, value in one.items()}
        assert shapes == {name: (value.shape, dtype) for name, value in reference.items()}
    of_fused = relative_errors(fused, right)
    of_batched = relative_errors([results(case, i, "batched") for i in inputs], right)
    uncertain = longest_sum_root(case) if dtype == torch.float64 else 1.0
    allowed = {name: 2 * error + 4 * uncertain * torch.finfo(dtype).eps for name, error in of_batched.items()}
    if all(of_fused[name] <= allowed[name] for name in allowed):
        return
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    moves = movement(case, inputs, right, eps)
    wrong = {
        name: f"fused is off by {of_fused[name]:.2e}, batched by {of_batched[name]:.2e}"
        for name in of_fused
        if not of_fused[name] <= max(allowed[name], 2 * uncertain * moves[name])
    }
    assert not wrong, f"{case}, {dtype}: {wrong}"


def kronecker(in_factors: tuple[int, ...], out_factors: tuple[int, ...], rank: int = 1) -> LayerSpec:
    return LayerSpec("kronecker", in_factors, out_factors, rank)


def monarch(in_factors: tuple[int, ...], out_factors: tuple[int, ...], rank: int = 1) -> LayerSpec:
    return LayerSpec("monarch", in_factors, out_factors, rank)


# One of each kind, small enough for loops; rectangular, so that a mixed-up size shows.
SMALL_SPECS = [
    kronecker((5,), (3,)),
    kronecker((2, 3), (4, 5)),
    kronecker((3, 2), (2, 4), rank=2),
    kronecker((2, 3, 4), (3, 2, 2)),
    kronecker((3, 2, 2), (2, 3, 2), rank=3),
    kronecker((2, 3, 1, 2), (2, 1, 3, 2)),
    kronecker((2, 2, 2, 2, 2), (2, 3, 1, 2, 2)),
    monarch((5,), (3,)),
    monarch((2, 3), (4, 5)),
    monarch((3, 4), (2, 5), rank=2),
    monarch((1, 6), (7, 1), rank=3),  # a low-rank layer
    monarch((2, 3, 4), (3, 2, 2)),
    monarch((2, 3, 1, 2), (2, 1, 3, 2)),
]

# Layers that take paths of the kernels which small ones miss.
LARGE_CASES = [
    Case(kronecker((32, 32), (32, 32)), 70, True, "gelu"),  # plain layout, several blocks
    Case(kronecker((128, 128), (128, 128)), 3, False),  # the state leaves the first-level cache: packed panels
    Case(kronecker((16, 96), (64, 80), rank=2), 19, True, "silu"),
    Case(kronecker((1100,), (9,)), 5, True),  # a reduction too long for packing
    Case(kronecker((3, 1100), (2, 7)), 21, True, "tanh"),
    Case(kronecker((8, 8, 8), (8, 8, 8)), 130, True, "relu"),
    Case(kronecker((7, 7, 7), (5, 9, 8), rank=3), 37, True),
    Case(monarch((32, 32), (32, 32)), 130, True, "gelu"),
    Case(monarch((8, 64), (48, 16), rank=4), 33, True, "sine"),
    Case(monarch((4, 1100), (3, 4)), 17, False),
    Case(monarch((12, 11, 10), (9, 12, 13)), 40, True, "softplus"),
]

SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33])
SMALL_SIZES = st.sampled_from([1, 2, 3, 4, 5, 7])
LARGEST_STATE = 1200  # features, so that an example takes milliseconds


@st.composite
def specs(draw: st.DrawFn, kind: str, largest_state: int = LARGEST_STATE) -> LayerSpec:
    """kind: kronecker, blocks (two-factor Monarch with rank) or untied (a Monarch chain)."""
    k = {"kronecker": st.integers(1, 5), "blocks": st.just(2), "untied": st.integers(1, 4)}[kind]
    count = draw(k)
    sizes = st.lists(SIZES if count < 3 else SMALL_SIZES, min_size=count, max_size=count).map(tuple)
    few = sizes.filter(lambda chosen: math.prod(chosen) <= largest_state)
    in_factors, out_factors = draw(few), draw(few)
    structure = "kronecker" if kind == "kronecker" else "monarch"
    most = 1 if kind == "untied" else min(3, LayerSpec(structure, in_factors, out_factors).max_rank)
    return LayerSpec(structure, in_factors, out_factors, draw(st.integers(1, most)))


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    batch = draw(st.one_of(st.sampled_from([1, 2, 7, 8, 15, 16, 17, 33, 65]), st.integers(0, 70)))
    activation = draw(st.one_of(st.just("identity"), st.sampled_from(list(ACTIVATIONS))))
    return Case(draw(specs(kind)), batch, draw(st.booleans()), activation)


KINDS = ("kronecker", "blocks", "untied")

# Layers that strain a planner: sizes that no matrix unit divides, states and weights that do not fit on chip, many
# factors, long and thin ones.
AWKWARD_SPECS = [
    kronecker((1,), (1,)),
    kronecker((1, 1, 1), (1, 1, 1)),
    kronecker((7, 1, 13), (7, 1, 13)),
    kronecker((97, 31), (97, 31)),
    kronecker((84, 124), (84, 124)),
    kronecker((127, 128), (127, 128)),
    kronecker((1000, 3), (1000, 3)),
    kronecker((3, 1000), (3, 1000)),
    kronecker((20, 28), (36, 44)),
    kronecker((8, 256), (256, 8)),
    kronecker((3, 5, 4), (7, 2, 9)),
    kronecker((2,) * 10, (2,) * 10),
    kronecker((8,) * 5, (8,) * 5),
    kronecker((12,) * 5, (12,) * 5),
    kronecker((64,) * 3, (64,) * 3),
    kronecker((16, 32), (24, 8), rank=2),
    kronecker((13, 5), (6, 17), rank=3),
    kronecker((16, 8, 3), (24, 32, 5), rank=3),
    kronecker((4096,), (4096,)),
    kronecker((4099,), (3,)),
    kronecker((1024, 1024), (1024, 1024)),
    monarch((5,), (3,)),
    monarch((2, 3), (4, 5)),
    monarch((32, 32), (32, 32)),
    monarch((97, 31), (31, 97)),
    monarch((8, 64), (48, 16), rank=4),
    monarch((1, 4096), (4096, 1), rank=7),  # a low-rank layer
    monarch((2, 3, 4), (3, 2, 2)),
    monarch((8, 8, 8), (8, 8, 8)),
    monarch((12, 11, 10), (9, 12, 13)),
]
