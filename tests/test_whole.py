"""Kronecker layers as dense ones: the dense weight and all factors' gradients, by the emulator, against float64."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from compiled import UsageOf
from emulator.driver import Emulator, decode, encode
from test_chain_backward import check_of
from test_emulator import EPS, LEARNED, Array, all_gradients_of, drawing, kronecker, terms_apart
from test_engine import OPTIONS

from factorlayer.activations.named import activate
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES, FEW, SOME, class_of
from factorlayer.kernels.passes import MOST_BLOCKS
from factorlayer.kernels.product.whole_kronecker import KroneckerWeight
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan import gradients, whole
from factorlayer.plan.forward import dense
from factorlayer.plan.plan import Plan
from factorlayer.plan.planner import has_plan, plan

LARGE = BATCHES[-1]
CASES = [
    # in, out, rank, dtype, batch, arch: whole tiles and others, few sums and many, more terms than a thread has
    ((3, 9, 5), (3, 9, 5), 3, "float16", 70, 90),
    ((12, 5), (9, 7), 3, "bfloat16", 70, 90),
    ((15, 4, 6), (15, 4, 6), 3, "bfloat16", 70, 80),
    ((61, 2), (57, 2), 2, "tf32", 40, 90),
    ((2, 77), (2, 77), 1, "tf32", 70, 90),
    ((2, 9, 3), (40, 2, 5), 5, "float32", 40, 90),
    ((5, 1, 31), (3, 4, 11), 2, "float64", 20, 90),
    ((2, 3, 2, 2, 3), (3, 2, 2, 3, 2), 9, "float16", 70, 90),
    ((2, 3, 2, 2, 3, 2), (3, 2, 2, 3, 2, 1), 2, "float32", 20, 80),
    ((1, 16), (130, 1), 1, "bfloat16", 70, 80),
]
sizes = pytest.mark.parametrize(("sizes_in", "sizes_out", "rank", "dtype", "batch", "arch"), CASES, ids=str)
Factors = tuple[int, ...]


def forward(spec: LayerSpec, dtype: str, gpu: Gpu, activation: str = "identity") -> Plan:
    """The plan by a dense weight, whichever the planner would take."""
    chain = dataclasses.replace(Chain.of(spec, True, activation), tf32=dtype == "tf32")
    assert whole.takes(chain, dtype)
    found = whole.forward(chain, dense(whole.dense(chain), dtype, LARGE, gpu), dtype, gpu)
    assert found
    return Plan(chain, dtype, LARGE, gpu, found)


def backward(spec: LayerSpec, dtype: str, gpu: Gpu) -> Plan:
    chain = dataclasses.replace(all_gradients_of(spec), tf32=dtype == "tf32")
    found = gradients._as_dense(chain, dtype, LARGE, gpu)
    assert found
    return Plan(chain, dtype, LARGE, gpu, found)


def gpu_of(arch: int) -> Gpu:
    return dataclasses.replace(Gpu.of(arch), sms=2)


def names(found: Plan) -> list[str]:
    return [type(p).__name__ for p in found.passes]


@sizes
def test_a_dense_weight_makes_what_its_factors_do(
    sizes_in: Factors, sizes_out: Factors, rank: int, dtype: str, batch: int, arch: int, emulator: Emulator
) -> None:
    spec = kronecker(sizes_in, sizes_out, rank=rank)
    found, draw = forward(spec, dtype, gpu_of(arch), "gelu"), drawing(dtype)
    assert names(found)[0] == ("KroneckerLargest" if dtype == "float16" else "KroneckerWeight")
    kernels = emulator.compile(found)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    weights = [decode(encode(w, dtype), dtype).reshape(w.shape) for w in weights]
    x, bias = draw(batch, spec.in_features), draw(spec.out_features)
    outputs, errors = emulator.run(found, kernels, x, weights, bias, blocks=2, seed=1)
    assert not errors
    made = outputs[-1].reshape(batch, -1)
    z = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]) + torch.from_numpy(bias)
    right = np.asarray(activate("gelu", z, []))
    assert np.linalg.norm(made - right) <= 2 * EPS[dtype] * len(sizes_in) * np.linalg.norm(right)
    x[batch // 2] = np.nan
    outputs, errors = emulator.run(found, kernels, x, weights, bias, blocks=2, seed=2)
    again = outputs[-1].reshape(batch, -1)
    fine = np.arange(batch) != batch // 2
    assert not errors and np.isnan(again[batch // 2]).all()
    np.testing.assert_array_equal(again[fine], made[fine])


@pytest.mark.long
@sizes
def test_all_gradients_come_of_the_dense_weights(
    sizes_in: Factors, sizes_out: Factors, rank: int, dtype: str, batch: int, arch: int, emulator: Emulator
) -> None:
    """Infinite and NaN where they have to be, which no other sample is; and the same bits for any order of blocks."""
    spec = kronecker(sizes_in, sizes_out, rank=rank)
    found, draw = backward(spec, dtype, gpu_of(arch)), drawing(dtype)
    assert names(found)[-2:] == ["KroneckerColumns", "KroneckerGradients"]
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    weights = [decode(encode(w, dtype), dtype).reshape(w.shape) for w in weights]
    check_of(spec, found, x, weights, grad, (batch // 2, batch // 2), emulator)


@pytest.mark.parametrize(("scale", "decades"), [(2.0**-8, 3), (1.0, 3), (2.0**9, 1)])
def test_dense_weights_in_half_precision_keep_their_bits(scale: float, decades: float, emulator: Emulator) -> None:
    """Of small factors they would be subnormal numbers or zeros, of large ones infinite, though those of a term are far
    apart. Infinities stay alone."""
    spec, draw = kronecker((12, 5), (9, 7), rank=3), drawing("float16")
    found = forward(spec, "float16", gpu_of(90))
    kernels = emulator.compile(found)
    weights = [w * scale for w in terms_apart([draw(*shape) / 2 for shape in spec.weight_shapes], decades)]
    x, bias = draw(70, spec.in_features), draw(spec.out_features)
    weights, (x,) = (
        [decode(encode(t, "float16"), "float16").reshape(t.shape) for t in ts] for ts in (weights, [x / scale])
    )

    def run(seed: int) -> tuple[Array, Array]:
        outputs, errors = emulator.run(found, kernels, x, weights, bias, blocks=2, seed=seed)
        assert not errors
        right = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]) + torch.from_numpy(bias)
        return outputs[-1].reshape(70, -1), right.numpy()

    y, right = run(1)
    assert np.linalg.norm(y - right) <= 4 * EPS["float16"] * np.linalg.norm(right)
    weights[0][1, 2, 3] = np.inf
    y, right = run(2)
    sick = ~np.isfinite(right)
    assert sick.any() and not sick.all()
    np.testing.assert_array_equal(~np.isfinite(y), sick)


@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize(("factors", "rank"), [((15, 4, 6), 3), ((2, 193), 1), ((16, 16), 40), ((2,) * 5, 2)], ids=str)
def test_they_compile_and_spill_nothing(factors: Factors, rank: int, dtype: str, usage_of: UsageOf) -> None:
    spec = kronecker(factors, factors, rank=rank)
    for found in (forward(spec, dtype, Gpu.of(90)), backward(spec, dtype, Gpu.of(90))):
        mine = [p for p in found.passes if type(p).__name__.startswith("Kronecker")]
        assert mine
        for p in mine:
            usage = usage_of(p.source("kernel"), "kernel", "sm_90a", OPTIONS)
            assert not usage.spilled and not re.search(r"\b(warning|error)\b", usage.notes), f"{p}: {usage}"
            assert p.shared <= found.gpu.shared and p.split <= MOST_BLOCKS


@pytest.mark.parametrize(
    ("sizes_in", "sizes_out", "rank", "dtype"),
    [
        ((10, 25), (10, 25), 3, "float16"),
        ((209, 4), (209, 4), 2, "tf32"),  # 91 us with 3029 samples, 38; trained 295, 135
        ((36, 2), (36, 2), 1, "float64"),
    ],
)
def test_what_is_faster_as_a_dense_layer_is(sizes_in: Factors, sizes_out: Factors, rank: int, dtype: str) -> None:
    spec = kronecker(sizes_in, sizes_out, rank=rank)
    for chain in (Chain.of(spec, True, "relu"), all_gradients_of(spec)):
        found = plan(chain, dtype, LARGE, Gpu.of(90))
        assert any(isinstance(p, KroneckerWeight) for p in found.passes)
        assert "multiplied out to a dense weight: " in str(found)


def test_what_is_no_dense_layer_is_none() -> None:
    """Few samples and large layers, parts of a chain, what has several inputs, learns in its activation, makes slopes;
    sums of so many terms that L2 does not hold them; and, in half precision, products of factors beyond float's."""
    spec = kronecker((10, 24), (10, 24), rank=3)
    chain, gpu = Chain.of(spec, False, "identity"), Gpu.of(90)
    assert whole.takes(chain, "float16") and whole.takes(all_gradients_of(spec), "float16")
    first, second = chain.contractions
    others = [
        dataclasses.replace(chain, contractions=(first,)),
        dataclasses.replace(chain, contractions=(dataclasses.replace(first, outer=2 * first.outer), second)),
        dataclasses.replace(chain, inputs=(100, 140)),
        dataclasses.replace(chain, slope=240),
        dataclasses.replace(chain, turn=(1, 10, 24)),
        Chain.of(spec, False, LEARNED),
        Chain.of(kronecker((64, 64), (64, 64)), False, "identity"),
    ]
    assert not any(whole.takes(each, "float16") for each in others)
    six = Chain.of(kronecker((2,) * 6, (2,) * 6), False, "identity")
    assert whole.takes(six, "bfloat16") and not whole.takes(six, "float16")
    of_many_terms = all_gradients_of(kronecker((32, 32), (32, 32), rank=1024))
    assert whole.takes(of_many_terms, "bfloat16") and not gradients._as_dense(of_many_terms, "bfloat16", LARGE, gpu)
    few = plan(chain, "float16", FEW, gpu)
    assert not any(isinstance(p, KroneckerWeight) for p in few.passes)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_gradients_that_some_samples_have_a_plan_for_many_have(dtype: str) -> None:
    """Of one term and three, in turn for each dtype."""
    sizes = ((3, 5), (10, 24), (209, 4), (2, 3, 4, 2), (40, 3, 2), (7, 60))
    for rank, factors in zip(itertools.cycle((1, 3) if dtype in ("float64", "bfloat16") else (3, 1)), sizes):
        text = all_gradients_of(kronecker(factors, factors, rank=rank)).text
        classes = range(class_of(SOME), len(BATCHES))
        found = {has_plan(text, dtype, 90, 132, 232448, 3352320, each) for each in (class_of(192), *classes)}
        assert len(found) == 1, text
