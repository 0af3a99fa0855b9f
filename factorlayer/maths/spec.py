"""What a layer is: its modes, how they are contracted, what that costs. No torch in here.

A layer maps in = P1·…·Pk features to out = Q1·…·Qk. Contracting mode i turns its P_i into Q_i.

Kronecker: weight i is [Qi, Pi] (with rank r: [r, Qi, Pi]) and W = F1 ⊗ … ⊗ Fk, summed over r. The weights are
tied: all positions of the other modes share one, so the order of contraction only changes the cost.

Monarch: weight i is [positions of the other modes, Qi, Pi], untied, contracted last mode first. With two modes this
is the block form: K = P1 groups of p = P2 inputs, L = Q2 groups of s = Q1 outputs, and the s x p matrix between input
group k and output group l has rank ρ: weight_1 is [K, ρ·L, p] (row r·L + l) and acts first, weight_0 is
[L, s, K·ρ] (column k·ρ + r); output j of group l is j·L + l.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, get_args

Structure = Literal["kronecker", "monarch"]
STRUCTURES: tuple[Structure, ...] = get_args(Structure)
Factors = int | Sequence[int] | Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Contraction:
    """The state is viewed as [outer, p, inner]; p is contracted to q with one weight, or (untied) with one for each
    (outer, inner)."""

    weight: int
    outer: int
    p: int
    q: int
    inner: int
    tied: bool

    @property
    def multiply_adds(self) -> int:
        return self.outer * self.inner * self.p * self.q

    @property
    def weight_size(self) -> int:
        """Elements, of one term."""
        return self.q * self.p * (1 if self.tied else self.outer * self.inner)


@dataclass(frozen=True)
class LayerSpec:
    """One structured layer's sizes. Two specs with equal fields are the same layer."""

    structure: Structure
    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    rank: int = 1
    in_features: int = field(init=False, compare=False)
    out_features: int = field(init=False, compare=False)
    contractions: tuple[Contraction, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_structure(self.structure)
        if len(self.in_factors) != len(self.out_factors) or not self.in_factors:
            raise ValueError(
                f"factors should name as many sizes for the inputs as for the outputs, at least one; there are "
                f"{len(self.in_factors)} {self.in_factors} and {len(self.out_factors)} {self.out_factors}"
            )
        for size in self.in_factors + self.out_factors:
            if not _is_int(size) or size < 1:
                raise ValueError(
                    f"factors should be positive integers, {size!r} is among {(self.in_factors, self.out_factors)}"
                )
        if not _is_int(self.rank) or self.rank < 1:
            raise ValueError(f"rank should be a positive integer, it is {self.rank!r}")
        if self.rank > self.max_rank:
            sizes = f"blocks {self.blocks}" if self.blocks else f"factors {(self.in_factors, self.out_factors)}"
            raise ValueError(
                f"rank should be at most {self.max_rank} for a {self.structure} layer with {sizes}, it is {self.rank}; "
                "a larger one adds parameters and nothing else"
            )
        object.__setattr__(self, "in_features", math.prod(self.in_factors))
        object.__setattr__(self, "out_features", math.prod(self.out_factors))
        object.__setattr__(self, "contractions", tuple(self._contractions()))

    def _contractions(self) -> list[Contraction]:
        P, Q, k = self.in_factors, self.out_factors, len(self.in_factors)
        if not self.tied and k == 2:
            (K, p), (s, L), rho = P, Q, self.rank
            return [
                Contraction(1, K, p, rho * L, 1, tied=False),
                Contraction(0, 1, K * rho, s, L, tied=False),
            ]
        order = list(reversed(range(k)))
        if self.tied:
            # Of two neighbours in the order, i goes first if 1/Pi - 1/Qi is smaller: fewest multiply-adds.
            order.sort(key=lambda i: 1 / P[i] - 1 / Q[i])
        sizes, contractions = list(P), []
        for i in order:
            outer, inner = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
            contractions.append(Contraction(i, outer, P[i], Q[i], inner, self.tied))
            sizes[i] = Q[i]
        return contractions

    @property
    def tied(self) -> bool:
        return self.structure == "kronecker"

    @property
    def blocks(self) -> tuple[int, int] | None:
        """(K, L) of a Monarch layer in block form."""
        if self.tied or len(self.in_factors) != 2:
            return None
        return self.in_factors[0], self.out_factors[1]

    @property
    def max_rank(self) -> int:
        """The largest rank that can make a difference."""
        P, Q = self.in_factors, self.out_factors
        if self.tied:
            sizes = [p * q for p, q in zip(P, Q, strict=True)]
            return math.prod(sizes) // max(sizes)
        return min(P[1], Q[0]) if len(P) == 2 else 1

    @property
    def weight_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of weight_0 … weight_{k-1}."""
        ranks = (self.rank,) if self.rank > 1 else ()
        shapes = {c.weight: (*ranks, c.q, c.p) if c.tied else (c.outer * c.inner, c.q, c.p) for c in self.contractions}
        return tuple(shapes[i] for i in range(len(shapes)))

    @property
    def parameter_count(self) -> int:
        """Elements of the weights; a bias adds out_features."""
        return sum(math.prod(shape) for shape in self.weight_shapes)

    @property
    def terms(self) -> int:
        """How many chains of contractions are added up."""
        return self.rank if self.tied else 1

    def multiply_adds(self, batch: int = 1) -> int:
        """Multiply-adds of a forward pass, in the cheapest order of contraction."""
        return batch * self.terms * sum(c.multiply_adds for c in self.contractions)

    def flops(self, batch: int = 1) -> int:
        return 2 * self.multiply_adds(batch)

    def elements_moved(self, batch: int) -> int:
        """What a forward pass has to read and write at least: x, the weights, y."""
        return batch * (self.in_features + self.out_features) + self.parameter_count


@dataclass(frozen=True)
class BlockDiagonal(LayerSpec):
    """As many blocks as heads, each from its own inputs to its own outputs: one untied contraction, whose weight_0 is
    [blocks, s, p]; factors are (blocks, p) and (blocks, s)."""

    def _contractions(self) -> list[Contraction]:
        (count, p), (_, s) = self.in_factors, self.out_factors
        return [Contraction(0, count, p, s, 1, tied=False)]

    @property
    def blocks(self) -> None:
        return None

    @property
    def max_rank(self) -> int:
        return 1


def _check_structure(structure: str) -> None:
    if structure not in STRUCTURES:
        raise ValueError(f"structure should be one of {', '.join(map(repr, STRUCTURES))}, it is {structure!r}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def resolve(
    in_features: int,
    out_features: int,
    structure: Structure = "kronecker",
    factors: Factors = None,
    blocks: int | Sequence[int] | None = None,
    rank: int = 1,
) -> LayerSpec:
    """The spec that FactorLinear's arguments mean, or a ValueError in their words."""
    _check_structure(structure)
    in_features, out_features, factors, blocks, rank = map(plain, (in_features, out_features, factors, blocks, rank))
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if not _is_int(size) or size < 1:
            raise ValueError(f"{name} should be a positive integer, it is {size!r}")
    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    if blocks is not None:
        if factors is not None:
            raise ValueError(
                f"factors={factors} and blocks={blocks} were both given: each of them fixes the sizes, give one"
            )
        if structure != "monarch":
            raise ValueError(f"blocks={blocks} was given for structure={structure!r}; only 'monarch' has blocks")
        in_factors, out_factors = _factors_of_blocks(in_features, out_features, blocks)
    else:
        in_factors, out_factors = _factors_of(in_features, out_features, factors)
    return LayerSpec(structure, in_factors, out_factors, rank)


def plain(sizes: Any) -> Any:
    """Sizes, one or sequences, as integers of Python where they are numpy's or tensors, which nn.Linear takes."""
    if isinstance(sizes, bool):
        return sizes
    if isinstance(sizes, (tuple, list)):
        return (list if isinstance(sizes, list) else tuple)(map(plain, sizes))
    try:
        return operator.index(sizes)
    except TypeError:
        return sizes


def spec_of_weights(structure: Structure, shapes: Sequence[Sequence[int]]) -> LayerSpec:
    """The spec whose weights have these shapes: what the functional form is called with."""
    shapes = [tuple(shape) for shape in shapes]
    _check_structure(structure)
    if not shapes:
        raise ValueError("weights should hold at least one tensor, it is empty")
    if structure == "kronecker":
        dims = {len(shape) for shape in shapes}
        ranks = {shape[0] for shape in shapes} if dims == {3} else {1}
        if dims not in ({2}, {3}) or len(ranks) != 1:
            raise ValueError(
                f"kronecker weights should all be [Qi, Pi], or all [rank, Qi, Pi] with one rank; they are "
                f"{', '.join(map(str, shapes))}"
            )
        if dims == {3} and ranks == {1}:
            raise ValueError(
                f"kronecker weights of rank 1 should be [Qi, Pi], without a leading axis; they are "
                f"{', '.join(map(str, shapes))}"
            )
        return LayerSpec(structure, tuple(s[-1] for s in shapes), tuple(s[-2] for s in shapes), ranks.pop())
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"monarch weights should be [positions, Qi, Pi]; they are {', '.join(map(str, shapes))}")
    if len(shapes) == 2:
        (L, s, columns), (K, rows, p) = shapes
        rank = rows // L if L else 0
        if rank < 1 or rows != rank * L or columns != K * rank:
            raise ValueError(
                f"monarch weights should be [L, s, K·rank] and [K, rank·L, p]; they are {shapes[0]} and {shapes[1]}"
            )
        return LayerSpec(structure, (K, p), (s, L), rank)
    spec = LayerSpec(structure, tuple(s[2] for s in shapes), tuple(s[1] for s in shapes))
    if list(spec.weight_shapes) != shapes:
        raise ValueError(
            f"monarch weights with factors {(spec.in_factors, spec.out_factors)} should have the shapes "
            f"{', '.join(map(str, spec.weight_shapes))}; they have {', '.join(map(str, shapes))}"
        )
    return spec


def _factors_of(in_features: int, out_features: int, factors: Factors) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if factors is None:
        factors = 2
    if _is_int(factors):
        if factors < 1:
            raise ValueError(f"factors should be at least 1 when it counts them, it is {factors}")
        return _balanced("in_features", in_features, factors), _balanced("out_features", out_features, factors)
    wanted = "factors should be None, how many there are, or ((P1, …, Pk), (Q1, …, Qk))"
    if not isinstance(factors, (tuple, list)) or not factors:
        raise ValueError(f"{wanted}; it is {factors!r}")
    nested = [tuple(sizes) for sizes in factors if isinstance(sizes, (tuple, list))]
    if len(nested) not in (0, len(factors)) or len(nested) not in (0, 2) or () in nested:
        raise ValueError(f"{wanted}; it is {factors!r}")
    in_factors, out_factors = nested if nested else (tuple(factors),) * 2
    both = "" if nested else f"; {factors} stands for the inputs and the outputs, give both if they differ"
    for name, features, sizes in (
        ("in_features", in_features, in_factors),
        ("out_features", out_features, out_factors),
    ):
        if all(_is_int(size) and size > 0 for size in sizes) and math.prod(sizes) != features:
            raise ValueError(
                f"factors should multiply up to {name}={features}; "
                f"{'·'.join(map(str, sizes))} is {math.prod(sizes)}{both}"
            )
    return in_factors, out_factors


def _factors_of_blocks(
    in_features: int, out_features: int, blocks: int | Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    pair = (blocks, blocks) if _is_int(blocks) else blocks
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(_is_int(b) and b > 0 for b in pair):
        raise ValueError(f"blocks should be (K, L), two positive integers; it is {blocks!r}")
    K, L = pair
    for name, count, feature_name, features in (
        ("K", K, "in_features", in_features),
        ("L", L, "out_features", out_features),
    ):
        if features % count:
            near = sorted(divisors(features), key=lambda d: (abs(d - count), d))[:3]
            raise ValueError(
                f"blocks should divide the features: {name}={count} does not divide {feature_name}={features}; "
                f"divisors near it are {', '.join(map(str, sorted(near)))}"
            )
    return (K, in_features // K), (out_features // L, L)


MOST_UNBALANCED = 4  # the largest factor over the smallest, in a factorization chosen for the user


def _balanced(name: str, features: int, count: int) -> tuple[int, ...]:
    sizes = _most_balanced(features, count)
    if sizes[-1] <= MOST_UNBALANCED * sizes[0]:
        return sizes
    near = []
    for step in (-1, 1):
        size = features + step
        while size > 1 and _spread(size, count) > MOST_UNBALANCED:
            size += step
        near.append(size)
    raise ValueError(
        f"{name}={features} has no balanced factorization into {count} sizes (the best is "
        f"{'·'.join(map(str, sizes))}); the nearest that have one are {near[0]} and {near[1]}, "
        "or give factors=((P1, …), (Q1, …))"
    )


def _spread(features: int, count: int) -> float:
    sizes = _most_balanced(features, count)
    return sizes[-1] / sizes[0]


def _most_balanced(features: int, count: int) -> tuple[int, ...]:
    """The factorization into `count` sizes, ascending, whose largest is least."""
    best: tuple[int, ...] = (1,) * (count - 1) + (features,)

    def search(rest: int, smallest: int, chosen: tuple[int, ...]) -> None:
        nonlocal best
        left = count - len(chosen)
        if left == 1:
            if (rest, -chosen[0] if chosen else 0) < (best[-1], -best[0]):
                best = (*chosen, rest)
            return
        for size in divisors(rest):
            if size >= smallest and size**left <= rest:
                search(rest // size, size, (*chosen, size))

    search(features, 1, ())
    return best


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
