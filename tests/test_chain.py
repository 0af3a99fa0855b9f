"""maths/chain.py: the text that carries a chain, both ways, and its FLOPs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import KINDS, SMALL_SPECS, kronecker, monarch, spec_id, specs

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        (  # the example in csrc/chain.h
            Chain.of(kronecker((32, 32), (32, 32)), True, "gelu"),
            "tied 1 32 32 32 1; tied 0 1 32 32 32; bias; gelu",
        ),
        (Chain.of(kronecker((5,), (3,)), False, "identity"), "tied 0 1 5 3 1"),
        (
            Chain.of(kronecker((3, 3), (3, 3), rank=2), True, "identity"),
            "rank 2; tied 1 3 3 3 1; tied 0 1 3 3 3; bias",
        ),
        (
            Chain.of(monarch((4, 3), (2, 5), rank=2), False, "relu"),
            "untied 1 4 3 10 1; untied 0 1 8 2 5; relu",
        ),
        (
            dataclasses.replace(Chain.of(kronecker((5,), (3,)), True, "relu"), tf32=True),
            "tied 0 1 5 3 1; bias; relu; tf32",
        ),
        (
            dataclasses.replace(Chain.of(kronecker((5,), (3,)), False, "elu"), through=3),
            "tied 0 1 5 3 1; elu; through 3",
        ),
    ],
    ids=["rank-1", "k-1", "rank-2", "monarch", "tf32", "through"],
)
def test_text(chain: Chain, text: str) -> None:
    assert chain.text == text
    assert chain.tf32_text == text.removesuffix("; tf32") + "; tf32"
    assert Chain.parse(text) == chain


@pytest.mark.parametrize("text", ["gelu; slope 12; sums 13", "sums 12; turn 1 4 4", "gelu; slope 12; turn 1 4 4"])
def test_what_stands_behind_contractions_has_one_number_of_features(text: str) -> None:
    with pytest.raises(ValueError, match="on which slope, through, sums and turn should agree"):
        Chain.parse(text)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), bias=st.booleans(), activation=st.sampled_from(list(ACTIVATIONS)))
def test_parse_is_the_inverse_of_text(kind: str, data: st.DataObject, bias: bool, activation: str) -> None:
    spec = data.draw(specs(kind))
    chain = Chain.of(spec, bias, activation)
    assert Chain.parse(chain.text) == chain
    assert (chain.in_features, chain.out_features) == (spec.in_features, spec.out_features)


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_flops(spec: LayerSpec) -> None:
    chain = Chain.of(spec, True, "relu")
    k = len(spec.contractions)
    assert chain.forward_flops(7) == spec.flops(7)
    assert chain.backward_flops(7, True, [True] * k) == 2 * spec.flops(7)
    assert chain.backward_flops(7, False, [False] * k) == 0


@pytest.mark.parametrize("wants_x", [True, False])
def test_flops_of_the_gradients_wanted(wants_x: bool) -> None:
    """Every weight gradient costs its contraction; so does every step back to the earliest gradient wanted."""
    spec = kronecker((2, 3, 4), (3, 2, 2))
    for wanted in itertools.product([True, False], repeat=3):
        costs = [2 * 7 * c.multiply_adds for c in spec.contractions]
        of_weights = sum(cost for c, cost in zip(spec.contractions, costs, strict=True) if wanted[c.weight])
        earliest = min((i for i, c in enumerate(spec.contractions) if wanted[c.weight]), default=3)
        of_steps = sum(costs if wants_x else costs[earliest + 1 :])
        assert Chain.of(spec, False, "identity").backward_flops(7, wants_x, wanted) == of_weights + of_steps
