"""v2 against v1: in float64 the same numbers, and in every dtype the error that its roundings explain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import (
    DTYPES,
    KINDS,
    LARGE_CASES,
    LAYOUTS,
    SMALL_SPECS,
    Case,
    cases,
    draw_inputs,
    dtype_id,
    relative_errors,
    results,
    spec_id,
)

from factorlayer.functional import run
from factorlayer.maths.batched import batched, flat, together
from factorlayer.maths.chain import Chain
from factorlayer.maths.multiplied import multiplied_out
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import BlockDiagonal, LayerSpec


def check_float64(case: Case, layout: str = "contiguous") -> None:
    inputs = draw_inputs(case, torch.float64, 0, layout)
    found, right = results(case, inputs, "batched"), results(case, inputs, "naive")
    for name, value in right.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12 * scale * math.sqrt(len(value) or 1))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_batched_is_naive_in_float64(kind: str, data: st.DataObject, layout: str) -> None:
    check_float64(data.draw(cases(kind)), layout)


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_batched_is_naive_in_float64_when_large(case: Case) -> None:
    check_float64(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_error_is_a_few_roundings(spec: LayerSpec, dtype: torch.dtype) -> None:
    """Each contraction, sum over the rank and bias rounds once more; sums are at most a few dozen long here."""
    case = Case(spec, 33)
    inputs = draw_inputs(case, dtype, seed=0)
    right = results(case, inputs.to(torch.float64), "naive")
    errors = relative_errors([results(case, inputs, "batched")], [right])
    roundings = len(spec.contractions) + spec.terms + 1
    assert max(errors.values()) <= 4 * roundings * torch.finfo(dtype).eps, errors


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_gradcheck(spec: LayerSpec) -> None:
    case = Case(spec, 3, True, "tanh")
    inputs = draw_inputs(case, torch.float64, seed=0)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.bias, *inputs.weights)]

    def call(x: torch.Tensor, bias: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return run(spec, case.chain, x, weights, bias, "batched", "test")

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_no_samples(spec: LayerSpec) -> None:
    case = Case(spec, 0)
    inputs = draw_inputs(case, torch.float32, seed=0)
    assert batched(case.chain, inputs.x, inputs.weights).shape == (0, spec.out_features)
    for name, gradient in results(case, inputs, "batched").items():
        assert not gradient.any(), name


@pytest.mark.parametrize("batch", [0, 1, 7])
@pytest.mark.parametrize("spec", [spec for spec in SMALL_SPECS if spec.tied and spec.rank == 1], ids=spec_id)
def test_flat_products_are_the_same_layer(spec: LayerSpec, batch: int) -> None:
    """What CUDA takes for small factors needs no CUDA."""
    weights = [torch.randn(shape, dtype=torch.float64) for shape in spec.weight_shapes]
    x = torch.randn(batch, spec.in_features, dtype=torch.float64)
    torch.testing.assert_close(flat(x, weights), naive(spec, x, weights))


@pytest.mark.parametrize("spec", [*SMALL_SPECS, BlockDiagonal("monarch", (3, 2), (3, 4))], ids=spec_id)
@pytest.mark.parametrize("batch", [0, 5])
def test_several_chains_at_once(spec: LayerSpec, batch: int) -> None:
    """Each is what it is by itself."""
    chain, count = Chain.of(spec, False, "identity"), 3
    x = torch.randn(batch, spec.in_features, dtype=torch.float64)
    stacked = [torch.randn(count, *shape, dtype=torch.float64) for shape in spec.weight_shapes]
    found = together(chain, x, stacked)
    assert found.shape == (count, batch, spec.out_features)
    for i in range(count):
        torch.testing.assert_close(found[i], naive(spec, x, [weight[i] for weight in stacked]))


@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec("kronecker", (3, 4), (5, 2)),
        LayerSpec("kronecker", (3, 4), (5, 2), 3),
        LayerSpec("kronecker", (3, 4, 2), (5, 2, 6), 2),
        LayerSpec("kronecker", (3, 1, 2, 5), (5, 2, 1, 4)),
        LayerSpec("monarch", (6, 5), (10, 3)),
        LayerSpec("monarch", (4, 6), (5, 8), 3),
    ],
    ids=spec_id,
)
def test_a_matrix_is_multiplied_out(spec: LayerSpec) -> None:
    inputs = draw_inputs(Case(spec, 7, bias=False), torch.float64, seed=0)
    matrix = multiplied_out(Chain.of(spec, False, "identity"), inputs.weights)
    torch.testing.assert_close(inputs.x @ matrix.T, naive(spec, inputs.x, inputs.weights), rtol=0, atol=1e-12)
