"""v1 and to_dense against the definitions, written here once more with loops and torch.kron."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import KINDS, SMALL_SPECS, Case, draw_inputs, kronecker, monarch, spec_id, specs
from torch import Tensor

from factorlayer.maths.naive import naive
from factorlayer.maths.project import to_dense
from factorlayer.maths.spec import LayerSpec

BLOCK_SPECS = [spec for spec in SMALL_SPECS if spec.blocks is not None]
KRONECKER_SPECS = [spec for spec in SMALL_SPECS if spec.tied]
CHAIN_SPECS = [spec for spec in SMALL_SPECS if not spec.tied and spec.rank == 1]


def weights_of(spec: LayerSpec) -> list[Tensor]:
    return draw_inputs(Case(spec, 1), torch.float64, seed=3).weights


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def monarch_by_definition(x: Tensor, w1: Tensor, w2: Tensor, K: int, L: int, rank: int) -> Tensor:
    """One sample: x as K groups of p; w1[k] is [L·rank, p]; group l of the outputs gathers the rank values that every
    k made for it and multiplies them by w2[l], [s, K·rank]; value j of group l is output j·L + l."""
    p, s = x.numel() // K, w2.shape[1]
    made = torch.zeros(K, rank, L, dtype=x.dtype)
    for k in range(K):
        for r in range(rank):
            for l in range(L):  # noqa: E741 (the design's letter)
                made[k, r, l] = sum(w1[k, r * L + l, i] * x[k * p + i] for i in range(p))
    y = torch.zeros(s * L, dtype=x.dtype)
    for l in range(L):  # noqa: E741
        for j in range(s):
            gathered = itertools.product(range(K), range(rank))
            y[j * L + l] = sum(w2[l, j, k * rank + r] * made[k, r, l] for k, r in gathered)
    return y


def untied_chain_by_definition(x: Tensor, weights: list[Tensor], spec: LayerSpec) -> Tensor:
    """One sample as an array with k axes, the last contracted first; each mode's matrix depends on the indices of all
    the other modes, numbered in their order."""
    state = x.reshape(spec.in_factors)
    for mode in reversed(range(len(spec.in_factors))):
        sizes = list(state.shape)
        others = sizes[:mode] + sizes[mode + 1 :]
        sizes[mode] = spec.out_factors[mode]
        contracted = torch.zeros(sizes, dtype=x.dtype)
        for position, index in enumerate(itertools.product(*map(range, others))):
            before, after = index[:mode], index[mode:]
            contracted[(*before, slice(None), *after)] = weights[mode][position] @ state[(*before, slice(None), *after)]
        state = contracted
    return state.flatten()


@pytest.mark.parametrize("spec", KRONECKER_SPECS, ids=spec_id)
def test_kronecker_is_torch_kron_nested_and_summed(spec: LayerSpec) -> None:
    weights = weights_of(spec)
    terms = [weights] if spec.rank == 1 else [[w[r] for w in weights] for r in range(spec.rank)]
    W = sum(functools.reduce(torch.kron, factors) for factors in terms)
    close(to_dense(spec, weights), W)
    x = torch.randn(6, spec.in_features, dtype=torch.float64)
    close(naive(spec, x, weights), x @ W.T)


def test_the_first_factor_is_the_slowest() -> None:
    """One entry by hand: W[j1·Q2 + j2, i1·P2 + i2] = F1[j1, i1] F2[j2, i2]"""
    F1, F2 = weights_of(kronecker((2, 3), (4, 5)))
    W = to_dense(kronecker((2, 3), (4, 5)), [F1, F2])
    assert W.shape == (20, 6)
    assert W[3 * 5 + 4, 1 * 3 + 2] == F1[3, 1] * F2[4, 2]


@pytest.mark.parametrize("spec", BLOCK_SPECS, ids=spec_id)
def test_monarch_is_the_block_form(spec: LayerSpec) -> None:
    w2, w1 = weights_of(spec)
    K, L = spec.blocks
    xs = torch.randn(4, spec.in_features, dtype=torch.float64)
    by_definition = torch.stack([monarch_by_definition(x, w1, w2, K, L, spec.rank) for x in xs])
    close(naive(spec, xs, [w2, w1]), by_definition)
    close(xs @ to_dense(spec, [w2, w1]).T, by_definition)


@given(specs("blocks", largest_state=150))
def test_every_block_of_monarch_has_the_rank(spec: LayerSpec) -> None:
    (K, L), p, s = spec.blocks, spec.in_factors[1], spec.out_factors[0]
    W = to_dense(spec, weights_of(spec))
    for k, l in itertools.product(range(K), range(L)):  # noqa: E741
        singular = torch.linalg.svdvals(W.reshape(s, L, K, p)[:, l, k, :])
        assert (singular[spec.rank :] <= 1e-12 * singular[0]).all()
        assert singular[spec.rank - 1] > 1e-9 * singular[0]  # and no less


@pytest.mark.parametrize("spec", CHAIN_SPECS, ids=spec_id)
def test_an_untied_chain_has_a_matrix_for_every_position(spec: LayerSpec) -> None:
    weights = weights_of(spec)
    xs = torch.randn(3, spec.in_features, dtype=torch.float64)
    by_definition = torch.stack([untied_chain_by_definition(x, weights, spec) for x in xs])
    close(naive(spec, xs, weights), by_definition)
    close(xs @ to_dense(spec, weights).T, by_definition)


@given(specs("kronecker", largest_state=100).filter(lambda spec: spec.rank == 1))
def test_kronecker_is_monarch_with_tied_weights(spec: LayerSpec) -> None:
    """The same matrix at every position: an untied chain of any length becomes the Kronecker product."""
    factors = weights_of(spec)
    untied = monarch(spec.in_factors, spec.out_factors)
    tied = [factor.expand(shape) for factor, shape in zip(factors, untied.weight_shapes, strict=True)]
    close(to_dense(untied, tied), to_dense(spec, factors))


@given(st.integers(1, 4), st.integers(2, 4), st.integers(2, 4), st.integers(1, 4), st.data())
def test_kronecker_of_rank_r_is_monarch_of_rank_r(K: int, p: int, s: int, L: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(2, min(p, s)))
    blocks = monarch((K, p), (s, L), rank)
    F1, F2 = torch.randn(rank, s, K, dtype=torch.float64), torch.randn(rank, L, p, dtype=torch.float64)
    W = sum(torch.kron(F1[r], F2[r]) for r in range(rank))
    w2 = F1.permute(1, 2, 0).reshape(1, s, K * rank).expand(L, -1, -1)  # column k·rank + r
    w1 = F2.reshape(1, rank * L, p).expand(K, -1, -1)  # row r·L + l
    close(to_dense(blocks, [w2, w1]), W)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), batch=st.integers(0, 9))
def test_naive_multiplies_by_to_dense(kind: str, data: st.DataObject, batch: int) -> None:
    spec = data.draw(specs(kind))
    inputs = draw_inputs(Case(spec, batch), torch.float64, seed=0)
    W = to_dense(spec, inputs.weights)
    assert W.shape == (spec.out_features, spec.in_features)
    close(naive(spec, inputs.x, inputs.weights), inputs.x @ W.T)
