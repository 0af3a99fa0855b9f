"""factor_linear, the choice of an implementation, and every message that wrong input brings (in full)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable

import pytest
import torch
from forked import python
from oracle import SMALL_SPECS, Case, draw_inputs, kronecker, monarch, nearly, spec_id
from torch import Tensor, nn

import factorlayer.functional
from factorlayer import FactorLinear, factor_linear
from factorlayer.autograd.layer_ops import not_at_once
from factorlayer.functional import choose
from factorlayer.maths.spec import LayerSpec

# What it computes


@pytest.mark.parametrize("implementation", ["auto", "v1", "v2", "v3"])
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_it_is_the_layer(spec: LayerSpec, implementation: str) -> None:
    layer = FactorLinear(
        spec.in_features, spec.out_features, structure=spec.structure, factors=(spec.in_factors, spec.out_factors),
        rank=spec.rank, activation="silu", implementation=implementation, dtype=torch.float64,
    )  # fmt: skip
    x = torch.randn(2, 3, spec.in_features, dtype=torch.float64)
    y = factor_linear(x, layer.weights, layer.bias, "silu", spec.structure, implementation, rank=spec.rank)
    assert nearly(y, layer(x))
    torch.testing.assert_close(y, nn.functional.silu(x @ layer.to_dense().T + layer.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("implementation", ["naive", "batched", "fused"])
def test_any_memory_layout(implementation: str, layout: str) -> None:
    inputs = draw_inputs(Case(monarch((4, 3), (2, 5), rank=2), 7), torch.float64, 0, layout)
    right = factor_linear(
        inputs.x.contiguous(), [w.contiguous() for w in inputs.weights], inputs.bias.contiguous(),
        structure="monarch", implementation="naive",
    )  # fmt: skip
    y = factor_linear(inputs.x, inputs.weights, inputs.bias, structure="monarch", implementation=implementation)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)


def test_weights_may_come_from_an_iterator() -> None:
    weights, x = [torch.randn(4, 2), torch.randn(5, 3)], torch.randn(7, 6)
    assert torch.equal(factor_linear(x, iter(weights)), factor_linear(x, weights))


# The choice


def test_auto_leaves_large_and_short_products_to_pytorch() -> None:
    x = torch.ones(1, 6)
    product, large = Case(kronecker((6,), (5,)), 1).chain, Case(kronecker((6,), (90_000,)), 1).chain
    assert choose(Case(kronecker((2, 3), (4, 5)), 1).chain, x, "auto", "test") == "fused"
    assert choose(Case(monarch((2, 3), (4, 5)), 1).chain, x, "auto", "test") == "fused"
    assert choose(product, x, "auto", "test") == "fused"
    assert choose(large, x, "auto", "test") == choose(product, x.bfloat16(), "auto", "test") == "batched"
    assert choose(large, x, "fused", "test") == "fused"


@pytest.mark.parametrize("implementation", ["naive", "batched", "fused"])
def test_what_was_named_runs(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("naive", "batched", "fused"):
        real = getattr(factorlayer.functional, name)

        def spy(*arguments: object, name: str = name, real: Callable[..., Tensor] = real) -> Tensor:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(factorlayer.functional, name, spy)
    monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)  # instead of fused
    FactorLinear(12, 20, implementation=implementation)(torch.ones(12))
    assert calls == [implementation]


WITHOUT_EXTENSION = """
import sys, warnings, torch
sys.modules["factorlayer._C"] = None  # what importing it then raises is an ImportError
from factorlayer import FactorLinear

x = torch.randn(5, 12)
layer = FactorLinear(12, 20)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        y = layer(x)
        FactorLinear(12, 20)(x)
print(*(f"{w.category.__name__}: {w.message}" for w in caught), sep="\\n")
torch.testing.assert_close(y, layer.to_linear()(x))
print(layer.explain().splitlines()[-1])
try:
    FactorLinear(12, 20, implementation="fused")(x)
except RuntimeError as error:
    print(f"RuntimeError: {error}")
"""


@pytest.mark.feature("without the compiled extension", result="falls back")
def test_without_the_extension() -> None:
    """auto runs batched and warns once; fused is refused; both say how to build it."""
    done = subprocess.run(
        [*python(), "-c", WITHOUT_EXTENSION], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    reason = (
        "the compiled extension factorlayer._C cannot be imported (import of factorlayer._C halted; None in "
        "sys.modules); build it with `pip install --no-build-isolation .` in factorlayer's source folder (with `-e .` "
        "if that is how it was installed)"
    )
    assert done.stdout.splitlines() == [
        f"RuntimeWarning: factorlayer runs the batched implementation, not the fused one: {reason}",
        f"runs batched, because fused cannot: {reason}",
        f"RuntimeError: FactorLinear: implementation='fused' cannot run: {reason}; or use implementation='auto'",
    ]


# The messages

ONES = torch.ones(5, 6)
WEIGHTS = [torch.ones(4, 2), torch.ones(5, 3)]
BIAS = torch.ones(20)


def layer(*arguments: object, **named: object) -> Callable[[], object]:
    return lambda: FactorLinear(*arguments, **named)


def call(
    x: Tensor = ONES, weights: list[Tensor] = WEIGHTS, bias: Tensor | None = None, **named: object
) -> Callable[[], object]:
    return lambda: factor_linear(x, weights, bias, **named)


def through_layer(x: Tensor, **named: object) -> Callable[[], object]:
    return lambda: FactorLinear(6, 20, factors=((2, 3), (4, 5)), **named)(x)


def with_bias(bias: Tensor) -> Callable[[], object]:
    return call(bias=bias)


FACTORS = "factors should be None, how many there are, or ((P1, …, Pk), (Q1, …, Qk)); it is "
OR_GIVE = ", or give factors=((P1, …), (Q1, …))"
SAME_DTYPE = "convert one with .to(), or use torch.autocast"

WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # sizes
    "in-features-zero": (
        layer(0, 4), ValueError, "FactorLinear: in_features should be a positive integer, it is 0",
    ),
    "out-features-negative": (
        layer(4, -4), ValueError, "FactorLinear: out_features should be a positive integer, it is -4",
    ),
    "in-features-bool": (
        layer(True, 4), ValueError, "FactorLinear: in_features should be a positive integer, it is True",
    ),
    "out-features-float": (
        layer(4, 4.0), ValueError, "FactorLinear: out_features should be a positive integer, it is 4.0",
    ),
    "in-features-string": (
        layer("4", 4), ValueError, "FactorLinear: in_features should be a positive integer, it is '4'",
    ),
    "no-balanced-factorization": (
        layer(769, 768), ValueError,
        "FactorLinear: in_features=769 has no balanced factorization into 2 sizes (the best is 1·769); the nearest "
        "that have one are 768 and 770" + OR_GIVE,
    ),
    "no-balanced-triple": (
        layer(64, 62, factors=3), ValueError,
        "FactorLinear: out_features=62 has no balanced factorization into 3 sizes (the best is 1·2·31); the nearest "
        "that have one are 60 and 63" + OR_GIVE,
    ),
    # factors
    "factors-that-do-not-multiply-up": (
        layer(12, 20, factors=((3, 5), (4, 5))), ValueError,
        "FactorLinear: factors should multiply up to in_features=12; 3·5 is 15",
    ),
    "out-factors-that-do-not-multiply-up": (
        layer(12, 20, factors=((3, 4), (4, 6))), ValueError,
        "FactorLinear: factors should multiply up to out_features=20; 4·6 is 24",
    ),
    "one-tuple-for-two-sizes": (
        layer(12, 20, factors=(3, 4)), ValueError,
        "FactorLinear: factors should multiply up to out_features=20; 3·4 is 12; (3, 4) stands for the inputs and "
        "the outputs, give both if they differ",
    ),
    "factors-of-two-lengths": (
        layer(12, 20, factors=((3, 4), (2, 2, 5))), ValueError,
        "FactorLinear: factors should name as many sizes for the inputs as for the outputs, at least one; there are "
        "2 (3, 4) and 3 (2, 2, 5)",
    ),
    "three-tuples": (
        layer(12, 20, factors=((3, 4), (4, 5), (1, 1))), ValueError,
        f"FactorLinear: {FACTORS}((3, 4), (4, 5), (1, 1))",
    ),
    "factors-empty": (layer(12, 20, factors=()), ValueError, f"FactorLinear: {FACTORS}()"),
    "factors-string": (layer(12, 20, factors="3x4"), ValueError, f"FactorLinear: {FACTORS}'3x4'"),
    "factors-bool": (layer(12, 20, factors=True), ValueError, f"FactorLinear: {FACTORS}True"),
    "factors-float": (layer(12, 20, factors=2.0), ValueError, f"FactorLinear: {FACTORS}2.0"),
    "factor-count-zero": (
        layer(12, 20, factors=0), ValueError, "FactorLinear: factors should be at least 1 when it counts them, it is 0",
    ),
    "factor-zero": (
        layer(12, 20, factors=((0, 4), (4, 5))), ValueError,
        "FactorLinear: factors should be positive integers, 0 is among ((0, 4), (4, 5))",
    ),
    "factor-negative": (
        layer(12, 20, factors=((-3, -4), (4, 5))), ValueError,
        "FactorLinear: factors should be positive integers, -3 is among ((-3, -4), (4, 5))",
    ),
    "factor-float": (
        layer(12, 20, factors=((3.0, 4), (4, 5))), ValueError,
        "FactorLinear: factors should be positive integers, 3.0 is among ((3.0, 4), (4, 5))",
    ),
    "factor-bool": (
        layer(12, 20, factors=((True, 12), (4, 5))), ValueError,
        "FactorLinear: factors should be positive integers, True is among ((True, 12), (4, 5))",
    ),
    # blocks
    "factors-and-blocks": (
        layer(12, 20, structure="monarch", factors=2, blocks=(3, 5)), ValueError,
        "FactorLinear: factors=2 and blocks=(3, 5) were both given: each of them fixes the sizes, give one",
    ),
    "blocks-of-kronecker": (
        layer(12, 20, blocks=(3, 5)), ValueError,
        "FactorLinear: blocks=(3, 5) was given for structure='kronecker'; only 'monarch' has blocks",
    ),
    "blocks-that-do-not-divide": (
        layer(12, 20, structure="monarch", blocks=(5, 5)), ValueError,
        "FactorLinear: blocks should divide the features: K=5 does not divide in_features=12; divisors near it are "
        "3, 4, 6",
    ),
    "out-blocks-that-do-not-divide": (
        layer(12, 20, structure="monarch", blocks=(3, 3)), ValueError,
        "FactorLinear: blocks should divide the features: L=3 does not divide out_features=20; divisors near it are "
        "1, 2, 4",
    ),
    "one-number-of-blocks": (
        layer(12, 20, structure="monarch", blocks=3), ValueError,
        "FactorLinear: blocks should divide the features: L=3 does not divide out_features=20; divisors near it are "
        "1, 2, 4",
    ),
    "blocks-zero": (
        layer(12, 20, structure="monarch", blocks=0), ValueError,
        "FactorLinear: blocks should be (K, L), two positive integers; it is 0",
    ),
    "blocks-three": (
        layer(12, 20, structure="monarch", blocks=(3, 4, 5)), ValueError,
        "FactorLinear: blocks should be (K, L), two positive integers; it is (3, 4, 5)",
    ),
    "blocks-float": (
        layer(12, 20, structure="monarch", blocks=(3.0, 5)), ValueError,
        "FactorLinear: blocks should be (K, L), two positive integers; it is (3.0, 5)",
    ),
    # rank
    "rank-zero": (layer(12, 20, rank=0), ValueError, "FactorLinear: rank should be a positive integer, it is 0"),
    "rank-bool": (layer(12, 20, rank=True), ValueError, "FactorLinear: rank should be a positive integer, it is True"),
    "rank-float": (layer(12, 20, rank=2.0), ValueError, "FactorLinear: rank should be a positive integer, it is 2.0"),
    "rank-too-large": (
        layer(12, 20, rank=13), ValueError,
        "FactorLinear: rank should be at most 12 for a kronecker layer with factors ((3, 4), (4, 5)), it is 13; a "
        "larger one adds parameters and nothing else",
    ),
    "rank-too-large-for-the-blocks": (
        layer(12, 20, structure="monarch", blocks=(3, 5), rank=5), ValueError,
        "FactorLinear: rank should be at most 4 for a monarch layer with blocks (3, 5), it is 5; a larger "
        "one adds parameters and nothing else",
    ),
    "rank-of-an-untied-chain": (
        layer(8, 8, structure="monarch", factors=3, rank=2), ValueError,
        "FactorLinear: rank should be at most 1 for a monarch layer with factors ((2, 2, 2), (2, 2, 2)), it is 2; a "
        "larger one adds parameters and nothing else",
    ),
    # names
    "unknown-structure": (
        layer(12, 20, structure="butterfly"), ValueError,
        "FactorLinear: structure should be one of 'kronecker', 'monarch', it is 'butterfly'",
    ),
    "unknown-implementation": (
        layer(12, 20, implementation="v4"), ValueError,
        "FactorLinear: implementation should be one of auto, naive, batched, fused, v1, v2, v3; it is 'v4'",
    ),
    "unknown-activation": (
        layer(12, 20, activation="Relu"), ValueError,
        "FactorLinear: activation should be None or one of identity, relu, leaky_relu, elu, gelu, gelu_tanh, silu, "
        "sigmoid, tanh, sine, softplus, square, relu_squared; it is 'Relu'; did you mean 'relu'?",
    ),
    # dtypes of parameters
    "integer-layer": (
        layer(12, 20, dtype=torch.int64), TypeError,
        "FactorLinear: dtype should be a floating-point or complex type, it is torch.int64",
    ),
    # x
    "too-many-features": (
        through_layer(torch.ones(2, 3, 7)), ValueError,
        "FactorLinear: the last dimension of x should be in_features=6, x has the shape (2, 3, 7)",
    ),
    "no-features": (
        through_layer(torch.tensor(1.0)), ValueError,
        "FactorLinear: the last dimension of x should be in_features=6, x has the shape ()",
    ),
    "functional-too-few-features": (
        call(torch.ones(5, 4)), ValueError,
        "factor_linear: the last dimension of x should be in_features=6, x has the shape (5, 4)",
    ),
    "integer-x": (
        through_layer(torch.ones(5, 6, dtype=torch.int64)), TypeError,
        "FactorLinear: x should be a floating-point tensor, it is torch.int64; convert it with x.float()",
    ),
    "bool-x": (
        through_layer(torch.ones(5, 6, dtype=torch.bool)), TypeError,
        "FactorLinear: x should be a floating-point tensor, it is torch.bool; convert it with x.float()",
    ),
    "mixed-dtypes": (
        through_layer(ONES.double()), TypeError,
        "FactorLinear: x and weight_0 should have one dtype, x is torch.float64 and weight_0 is torch.float32; "
        + SAME_DTYPE,
    ),
    "second-weight-of-another-dtype": (
        call(weights=[WEIGHTS[0], WEIGHTS[1].half()]), TypeError,
        "factor_linear: x and weight_1 should have one dtype, x is torch.float32 and weight_1 is torch.float16; "
        + SAME_DTYPE,
    ),
    "integer-weight": (
        call(weights=[WEIGHTS[0].int(), WEIGHTS[1]]), TypeError,
        "factor_linear: x and weight_0 should have one dtype, x is torch.float32 and weight_0 is torch.int32; "
        + SAME_DTYPE,
    ),
    "bias-of-another-dtype": (
        with_bias(BIAS.double()), TypeError,
        "factor_linear: x and bias should have one dtype, x is torch.float32 and bias is torch.float64; " + SAME_DTYPE,
    ),
    "layer-on-another-device": (
        through_layer(ONES, device="meta"), TypeError,
        "FactorLinear: x and weight_0 should be on one device, x is on cpu and weight_0 on meta",
    ),
    "x-on-another-device": (
        through_layer(ONES.to("meta")), TypeError,
        "FactorLinear: x and weight_0 should be on one device, x is on meta and weight_0 on cpu",
    ),
    "bias-on-another-device": (
        with_bias(BIAS.to("meta")), TypeError,
        "factor_linear: x and bias should be on one device, x is on cpu and bias on meta",
    ),
    "bias-too-long": (
        with_bias(torch.ones(21)), ValueError,
        "factor_linear: bias should have the shape (20,), out_features; it has (21,)",
    ),
    "bias-a-matrix": (
        with_bias(torch.ones(1, 20)), ValueError,
        "factor_linear: bias should have the shape (20,), out_features; it has (1, 20)",
    ),
    # weights
    "no-weights": (call(weights=[]), ValueError, "factor_linear: weights should hold at least one tensor, it is empty"),
    "weights-of-mixed-dimensions": (
        call(weights=[torch.ones(4, 2), torch.ones(2, 5, 3)]), ValueError,
        "factor_linear: kronecker weights should all be [Qi, Pi], or all [rank, Qi, Pi] with one "
        "rank; they are (4, 2), (2, 5, 3)",
    ),
    "weights-of-two-ranks": (
        call(weights=[torch.ones(2, 4, 2), torch.ones(3, 5, 3)]), ValueError,
        "factor_linear: kronecker weights should all be [Qi, Pi], or all [rank, Qi, Pi] with one "
        "rank; they are (2, 4, 2), (3, 5, 3)",
    ),
    "weights-of-rank-one": (
        call(weights=[torch.ones(1, 4, 2), torch.ones(1, 5, 3)]), ValueError,
        "factor_linear: kronecker weights of rank 1 should be [Qi, Pi], without a leading axis; "
        "they are (1, 4, 2), (1, 5, 3); a batch of them is said by batch_dims",
    ),
    "vectors": (
        call(weights=[torch.ones(4), torch.ones(5)]), ValueError,
        "factor_linear: kronecker weights should all be [Qi, Pi], or all [rank, Qi, Pi] with one "
        "rank; they are (4,), (5,)",
    ),
    "monarch-matrices": (
        call(structure="monarch"), ValueError,
        "factor_linear: monarch weights should be [positions, Qi, Pi]; they are (4, 2), (5, "
        "3)",
    ),
    "monarch-blocks-that-disagree": (
        call(weights=[torch.ones(5, 2, 4), torch.ones(3, 5, 3)], structure="monarch"), ValueError,
        "factor_linear: monarch weights should be [L, s, K·rank] and [K, rank·L, p]; they are (5, 2, 4) and (3, 5, 3)",
    ),
    "monarch-positions-that-disagree": (
        call(weights=[*[torch.ones(4, 2, 2)] * 2, torch.ones(3, 2, 2)], structure="monarch"), ValueError,
        "factor_linear: monarch weights with factors ((2, 2, 2), (2, 2, 2)) should have the shapes "
        "(4, 2, 2), (4, 2, 2), (4, 2, 2); "
        "they have (4, 2, 2), (4, 2, 2), (3, 2, 2)",
    ),
    "functional-rank-too-large": (
        call(torch.ones(5, 2), weights=[torch.ones(3, 1, 1), torch.ones(3, 5, 2)]), ValueError,
        "factor_linear: rank should be at most 1 for a kronecker layer with factors ((1, 2), (1, "
        "5)), it is 3; a larger one adds "
        "parameters and nothing else",
    ),
    "weights-that-are-no-list": (
        call(weights=None), TypeError,
        "factor_linear: weights should be a list of tensors, it is of the type NoneType",
    ),
    "a-weight-that-is-no-tensor": (
        call(weights=[torch.ones(4, 2), None]), TypeError,
        "factor_linear: weight_1 should be a tensor, it is of the type NoneType",
    ),
    "a-sparse-weight": (
        call(weights=[torch.ones(4, 2), torch.ones(5, 3).to_sparse()]), TypeError,
        "factor_linear: weight_1 should be a dense tensor, its layout is torch.sparse_coo",
    ),
    "a-bias-that-is-no-tensor": (
        call(bias=[1.0] * 20), TypeError,
        "factor_linear: bias should be a tensor, it is of the type list",
    ),
    "functional-structure": (
        call(structure="butterfly"), ValueError,
        "factor_linear: structure should be one of 'kronecker', 'monarch', it is 'butterfly'",
    ),
    "functional-implementation": (
        call(implementation="triton"), ValueError,
        "factor_linear: implementation should be one of auto, naive, batched, fused, v1, v2, v3; it is 'triton'",
    ),
    "functional-activation": (
        call(activation="mish"), ValueError,
        "factor_linear: activation should be None or one of identity, relu, leaky_relu, elu, gelu, "
        "gelu_tanh, silu, sigmoid, tanh, "
        "sine, softplus, square, relu_squared; it is 'mish'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    wrong, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        wrong()
    assert str(error.value) == message


def test_fused_refuses_a_dtype_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "DTYPES", (torch.float64, torch.float32))
    monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)
    half = FactorLinear(12, 20, dtype=torch.float16, implementation="fused")
    message = (
        "FactorLinear: implementation='fused' cannot run: it has kernels for torch.float64, torch.float32, x is "
        "torch.float16; or use implementation='auto'"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)) as error:
        half(torch.ones(12, dtype=torch.float16))
    assert str(error.value) == message
    half.implementation = "auto"
    with pytest.warns(RuntimeWarning, match=r"runs the batched implementation, not the fused one: .* torch\.float16$"):
        assert half(torch.ones(12, dtype=torch.float16)).shape == (20,)
    assert half(torch.ones(12, dtype=torch.float16)).shape == (20,)  # once is enough


def test_what_weights_stand_for_is_told_apart() -> None:
    """By structure, shapes, bias and activation, thought out once; what has no hash is thought out each time."""
    known = factorlayer.functional._described
    shapes = ((3, 2, 4), (2, 6, 3))
    asked = [("monarch", shapes, bias, stage) for bias in (False, True) for stage in ("identity", "relu")]
    asked += [("kronecker", ((3, 2), (5, 4)), True, "relu"), ("kronecker", ((5, 4), (3, 2)), True, "relu")]
    made = [known(*each) for each in asked]
    assert len({chain.text for _, chain in made}) == len(asked)
    for each, (spec, chain) in zip(asked, made, strict=True):
        assert (spec, chain) == factorlayer.functional._made(*each) and known(*each)[0] is spec
    unknown = ("kronecker", ([3, 2], [5, 4]), True, "relu")
    assert known(*unknown) == made[4]
