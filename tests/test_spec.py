"""maths/spec.py: sizes, contractions, costs, the factorization chosen for the user, specs from weights."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import KINDS, kronecker, monarch, spec_id, specs

from factorlayer.maths.spec import Contraction, LayerSpec, resolve, spec_of_weights


def cost_of_order(in_factors: tuple[int, ...], out_factors: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Multiply-adds of one sample: each contraction makes all elements of the new state, P summands each."""
    sizes, cost = list(in_factors), 0
    for mode in order:
        sizes[mode] = out_factors[mode]
        cost += math.prod(sizes) * in_factors[mode]
    return cost


def test_features_are_products_of_the_factors() -> None:
    spec = kronecker((2, 3, 4), (5, 6, 7))
    assert (spec.in_features, spec.out_features) == (24, 210)


@pytest.mark.parametrize(
    ("spec", "contractions"),
    [
        (kronecker((5,), (3,)), [Contraction(0, 1, 5, 3, 1, True)]),
        (
            kronecker((32, 32), (32, 32)),
            [Contraction(1, 32, 32, 32, 1, True), Contraction(0, 1, 32, 32, 32, True)],
        ),
        (  # mode 0 shrinks 4 -> 2, so it goes first; mode 1 grows
            kronecker((4, 3), (2, 5)),
            [Contraction(0, 1, 4, 2, 3, True), Contraction(1, 2, 3, 5, 1, True)],
        ),
        (monarch((5,), (3,)), [Contraction(0, 1, 5, 3, 1, False)]),
        (  # K = 4 groups of p = 3 inputs, L = 5 groups of s = 2 outputs, rank 2
            monarch((4, 3), (2, 5), rank=2),
            [Contraction(1, 4, 3, 10, 1, False), Contraction(0, 1, 8, 2, 5, False)],
        ),
        (  # last mode first, though this order is not the cheapest
            monarch((4, 2, 3), (2, 6, 5)),
            [
                Contraction(2, 8, 3, 5, 1, False),
                Contraction(1, 4, 2, 6, 5, False),
                Contraction(0, 1, 4, 2, 30, False),
            ],
        ),
    ],
    ids=spec_id,
)
def test_contractions(spec: LayerSpec, contractions: list[Contraction]) -> None:
    assert list(spec.contractions) == contractions


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
)
def test_kronecker_takes_the_cheapest_order(pairs: list[tuple[int, int]]) -> None:
    P, Q = zip(*pairs, strict=True)
    cheapest = min(cost_of_order(P, Q, order) for order in itertools.permutations(range(len(P))))
    assert kronecker(P, Q).multiply_adds() == cheapest


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=5))
def test_an_untied_chain_is_never_reordered(pairs: list[tuple[int, int]]) -> None:
    P, Q = zip(*pairs, strict=True)
    spec = monarch(P, Q)
    assert [c.weight for c in spec.contractions] == list(reversed(range(len(P))))
    assert spec.multiply_adds() == cost_of_order(P, Q, tuple(reversed(range(len(P)))))
    assert spec.multiply_adds() == spec.parameter_count  # every weight is used once per sample


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        (kronecker((2, 3), (4, 5)), [(4, 2), (5, 3)]),
        (kronecker((2, 3), (4, 5), rank=3), [(3, 4, 2), (3, 5, 3)]),
        (kronecker((5,), (3,)), [(3, 5)]),
        (monarch((5,), (3,)), [(1, 3, 5)]),
        (monarch((4, 3), (2, 5)), [(5, 2, 4), (4, 5, 3)]),  # [L, s, K] and [K, L, p]
        (monarch((4, 3), (2, 5), rank=2), [(5, 2, 8), (4, 10, 3)]),  # [L, s, K·rank] and [K, rank·L, p]
        (monarch((2, 3, 4), (5, 6, 7)), [(42, 5, 2), (14, 6, 3), (6, 7, 4)]),
    ],
    ids=spec_id,
)
def test_weight_shapes(spec: LayerSpec, shapes: list[tuple[int, ...]]) -> None:
    assert list(spec.weight_shapes) == shapes
    assert spec.parameter_count == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (kronecker((5,), (3,)), 1),
        (kronecker((2, 3), (4, 5)), 8),  # the rearranged matrix is 8 x 15
        (kronecker((2, 2, 2), (2, 3, 2)), 16),
        (monarch((5,), (3,)), 1),
        (monarch((4, 3), (2, 5)), 2),  # blocks are 2 x 3
        (monarch((4, 2), (7, 5)), 2),
        (monarch((4, 3, 3), (2, 5, 3)), 1),
    ],
    ids=spec_id,
)
def test_max_rank(spec: LayerSpec, most: int) -> None:
    assert spec.max_rank == most
    assert LayerSpec(spec.structure, spec.in_factors, spec.out_factors, most).rank == most
    with pytest.raises(ValueError, match=f"rank should be at most {most} "):
        LayerSpec(spec.structure, spec.in_factors, spec.out_factors, most + 1)


def test_parameters_of_monarch_are_those_of_the_design() -> None:
    spec = resolve(24, 30, "monarch", blocks=(4, 5), rank=3)
    assert spec.blocks == (4, 5)
    assert spec.parameter_count == 3 * (5 * 24 + 4 * 30)  # rank · (L · in + K · out)
    assert spec.multiply_adds(7) == 7 * spec.parameter_count


def test_blocks_are_those_of_two_factor_monarch_only() -> None:
    assert monarch((4, 3), (2, 5)).blocks == (4, 5)
    assert kronecker((4, 3), (2, 5)).blocks is None
    assert monarch((4, 3, 2), (2, 5, 2)).blocks is None
    assert monarch((4,), (2,)).blocks is None


@pytest.mark.parametrize(
    ("features", "count", "sizes"),
    [
        (768, 2, (24, 32)),
        (4096, 2, (64, 64)),
        (1024, 2, (32, 32)),
        (1024, 3, (8, 8, 16)),
        (3072, 2, (48, 64)),
        (50257, 1, (50257,)),
        (1, 2, (1, 1)),
        (2, 2, (1, 2)),
        (4, 2, (2, 2)),
        (36, 4, (2, 2, 3, 3)),
    ],
    ids=str,
)
def test_balanced_factors(features: int, count: int, sizes: tuple[int, ...]) -> None:
    spec = resolve(features, features, factors=count)
    assert spec.in_factors == spec.out_factors == sizes
    if count == 2:
        assert resolve(features, features).in_factors == sizes


@given(st.integers(1, 5000), st.integers(1, 4))
def test_balanced_factors_have_the_least_largest_size(features: int, count: int) -> None:
    """Against every factorization; more than 4 : 1 is refused, with the nearest sizes that are not."""

    def factorizations(rest: int, left: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [(rest,)]
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        return [(d, *more) for d in divisors for more in factorizations(rest // d, left - 1) if d <= more[0]]

    least = min(max(sizes) for sizes in factorizations(features, count))
    best = [sizes for sizes in factorizations(features, count) if max(sizes) == least]
    if all(max(sizes) > 4 * min(sizes) for sizes in best):
        with pytest.raises(ValueError, match="has no balanced factorization"):
            resolve(features, features, factors=count)
        return
    assert resolve(features, features, factors=count).in_factors in best


@pytest.mark.parametrize(("prime", "below", "above"), [(769, 768, 770), (7, 6, 8), (50257, 50256, 50258)])
def test_a_prime_is_refused_with_the_nearest_sizes(prime: int, below: int, above: int) -> None:
    with pytest.raises(ValueError, match=f"in_features={prime} has no balanced factorization") as error:
        resolve(prime, 64)
    found = str(error.value).split("the nearest that have one are ")[1].split(", or")[0]
    lower, upper = map(int, found.split(" and "))
    assert lower < prime < upper
    for size in (lower, upper):
        resolve(size, size)
    for size in (*range(lower + 1, prime), *range(prime + 1, upper)):
        with pytest.raises(ValueError, match="no balanced factorization"):
            resolve(size, size)
    if prime < 50257:
        assert (lower, upper) == (below, above)


@pytest.mark.parametrize(
    ("arguments", "in_factors", "out_factors"),
    [
        (dict(factors=((32, 32), (48, 64))), (32, 32), (48, 64)),
        (dict(factors=[[32, 32], [48, 64]]), (32, 32), (48, 64)),
        (dict(factors=((1024,), (3072,))), (1024,), (3072,)),
        (dict(factors=1), (1024,), (3072,)),
        (dict(structure="monarch", blocks=(4, 8)), (4, 256), (384, 8)),
        (dict(structure="monarch", blocks=16), (16, 64), (192, 16)),
        (dict(structure="monarch"), (32, 32), (48, 64)),
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, object], in_factors: tuple[int, ...], out_factors: tuple[int, ...]) -> None:
    spec = resolve(1024, 3072, **arguments)
    assert (spec.in_factors, spec.out_factors) == (in_factors, out_factors)


def test_one_tuple_of_factors_serves_inputs_and_outputs() -> None:
    assert resolve(12, 12, factors=(3, 4)) == resolve(12, 12, factors=((3, 4), (3, 4)))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_spec_of_weights_is_the_inverse_of_weight_shapes(kind: str, data: st.DataObject) -> None:
    spec = data.draw(specs(kind))
    assert spec_of_weights(spec.structure, spec.weight_shapes) == spec


def test_equal_fields_are_the_same_layer() -> None:
    assert kronecker((2, 3), (4, 5)) == kronecker((2, 3), (4, 5))
    assert hash(kronecker((2, 3), (4, 5))) == hash(kronecker((2, 3), (4, 5)))
    assert kronecker((2, 3), (4, 5)) != monarch((2, 3), (4, 5))
    assert kronecker((2, 3), (4, 5)) != kronecker((2, 3), (4, 5), rank=2)


def test_costs_of_the_designs_example() -> None:
    """`32 128 128`: 1.342e+08 multiply-adds, AI 1.2e+02."""
    spec = resolve(128 * 128, 128 * 128, factors=(128, 128))
    assert f"{spec.multiply_adds(32):.3e}" == "1.342e+08"
    assert spec.elements_moved(32) == 2 * 32 * 16384 + 2 * 128 * 128
    assert f"{spec.multiply_adds(32) / spec.elements_moved(32):.1e}" == "1.2e+02"
    assert spec.flops(32) == 2 * spec.multiply_adds(32)


def test_every_term_of_the_rank_costs_the_same() -> None:
    one, three = kronecker((4, 3), (2, 5)), kronecker((4, 3), (2, 5), rank=3)
    assert three.multiply_adds(7) == 3 * one.multiply_adds(7) == 21 * one.multiply_adds()
