"""x by a Kronecker product, whose matrix is not made: of two factors, the second of which may come as w2 = a b, or of
several with columns behind.

On a CPU all of it is one chain of contractions for the fused kernels, with a and b as contractions of their own where
that takes fewer multiply-adds, and with the columns as the axis behind all modes, so that nothing is turned. Elsewhere
factor_linear takes the factors. Where that is predicted to be faster than its kernels, it multiplies them out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.functional import linear

from factorlayer.autograd.layer_ops import transforms_active
from factorlayer.functional import any_autocast, factor_linear, run
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction, LayerSpec

T = TypeVar("T")
MOST_KEPT = 1024  # sizes
# On a CPU, entries of a matrix and multiply-adds by it up to which it is made in less time than a product without it
# takes to be called: a training step of 64 -> 64 features takes 0.21 and 0.27 ms with 8 rows, 0.36 and 0.34 with 128.
SMALL_MATRIX, FEW_MULTIPLY_ADDS = 1 << 12, 1 << 18


@dataclass(frozen=True)
class WithColumns(LayerSpec):
    """Kronecker factors and, as the last of its sizes, columns, which are not contracted."""

    def _contractions(self) -> list[Contraction]:
        columns = self.in_factors[-1]
        spec = LayerSpec("kronecker", self.in_factors[:-1], self.out_factors[:-1])
        return [Contraction(c.weight, c.outer, c.p, c.q, c.inner * columns, tied=True) for c in spec.contractions]


@dataclass(frozen=True)
class Between(LayerSpec):
    """w1 ⊗ (a b), with columns behind: weights are b, w1 and a, contracted in this order."""

    between: int = 1  # rows of b

    def _contractions(self) -> list[Contraction]:
        (p1, p2, columns), (q1, q2, _), r = self.in_factors, self.out_factors, self.between
        return [
            Contraction(0, p1, p2, r, columns, tied=True),
            Contraction(1, 1, p1, q1, r * columns, tied=True),
            Contraction(2, q1, r, q2, columns, tied=True),
        ]


def product(x: Tensor, first: Tensor, second: Sequence[Tensor], behind: int = 0) -> Tensor:
    """x (first ⊗ second)ᵀ along the axis of x that has `behind` axes behind it; second is (w2,) or (a, b)."""
    if not behind:
        return _rows(x, first, second)
    if not _is_by_chain(x) or not x.is_contiguous():
        return _rows(x.movedim(-1 - behind, -1), first, second).movedim(-1, -1 - behind)
    shape, at = x.shape, x.dim() - 1 - behind
    rows = x.reshape(*shape[:at], math.prod(shape[at:]))
    y = _by_chain(rows, first, second, math.prod(shape[at + 1 :]))
    return y.reshape(*shape[:at], -1, *shape[at + 1 :])


def kronecker(weights: Sequence[Tensor], right: Tensor) -> Tensor:
    """(w1 ⊗ w2 ⊗ …) right, where right is [in, columns]."""
    if not _is_by_chain(right) or not right.numel():
        return factor_linear(right.mT, weights).mT
    columns = right.shape[-1]
    spec, chain = _cached(_with_columns)(tuple((*weight.shape,) for weight in weights), columns)
    return run(spec, chain, right.reshape(1, -1), weights, None, "auto", "kronecker").reshape(-1, columns)


def is_faster_made(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a matrix of these sizes, [out, in], takes less time made than as a product."""
    out, into = sizes
    return x.is_cpu and out * into <= SMALL_MATRIX and x.numel() * out <= FEW_MULTIPLY_ADDS


def multiply_adds(first: tuple[int, int], a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """For each sample, of weights' sizes: with a b multiplied before, and with a and b as contractions of their own."""
    together, _ = _with_columns((first, (a[0], b[1])), 1)
    apart, _ = _between(first, a, b, 1)
    return together.multiply_adds(), apart.multiply_adds()


def _is_by_chain(x: Tensor) -> bool:
    return x.is_cpu and not x.is_complex()


def _rows(x: Tensor, first: Tensor, second: Sequence[Tensor]) -> Tensor:
    if _is_by_chain(x):
        return _by_chain(x, first, second, 1)
    if len(second) == 2 and _cached(_is_lower_as_two)(*_sizes(first, *second)):
        return _as_two(x, first, *second)
    return _by_factors(x, [first, _whole(second)], 1)


def _by_chain(x: Tensor, first: Tensor, second: Sequence[Tensor], columns: int) -> Tensor:
    if len(second) == 2 and _cached(_is_less_apart)(*_sizes(first, *second)):
        a, b = second
        spec, chain = _cached(_between)(*_sizes(first, a, b), columns)
        return run(spec, chain, x, [b, first, a], None, "auto", "product")
    return _by_factors(x, [first, _whole(second)], columns)


def _by_factors(x: Tensor, weights: list[Tensor], columns: int) -> Tensor:
    """What factor_linear does, with what it finds out of the sizes kept."""
    spec, chain = _cached(_with_columns)(_sizes(*weights), columns)
    return run(spec, chain, x, weights, None, "auto", "product")


def _whole(second: Sequence[Tensor]) -> Tensor:
    return second[0] if len(second) == 1 else second[0] @ second[1]


def _as_two(x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two plain products, by I ⊗ b and by first ⊗ a: a LoRA's, whose rank is that of a b for each block of x."""
    if not (is_compiling() or transforms_active() or any_autocast()):
        y: Tensor = _AsTwo.apply(x, first, a, b)
        return y
    (q1, p1), (q2, rank) = first.shape, a.shape
    inner = linear(x.unflatten(-1, (p1, b.shape[1])), b).flatten(-2)
    return linear(inner, _outer(first, a).reshape(q1 * q2, p1 * rank))


def _outer(first: Tensor, a: Tensor) -> Tensor:
    """first ⊗ a, as [q1, q2, p1, rank]."""
    return first[:, None, :, None] * a[None, :, None, :]


class _AsTwo(Function):
    """The same in one step of autograd: half of an eager step's time is PyTorch's between small operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
        (q1, p1), (q2, rank) = first.shape, a.shape
        outer = _outer(first, a).view(q1 * q2, p1 * rank)
        inner = torch.mm(x.reshape(-1, b.shape[1]), b.t()).view(-1, p1 * rank)
        ctx.save_for_backward(x, first, a, b, inner, outer)
        return torch.mm(inner, outer.t()).view(*x.shape[:-1], q1 * q2)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, first, a, b, inner, outer = ctx.saved_tensors
        wants_x, wants_first, wants_a, wants_b = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradients themselves are differentiated: inner and outer are made again
            outer = _outer(first, a).reshape(outer.shape)
            inner = torch.mm(x.reshape(-1, b.shape[1]), b.t()).view(inner.shape)
        (q1, p1), (q2, rank) = first.shape, a.shape
        grad_y = grad_y.reshape(-1, q1 * q2)
        grads: list[Tensor | None] = [None] * 4
        if wants_x or wants_b:
            grad_inner = torch.mm(grad_y, outer).view(-1, rank)
            grads[0] = torch.mm(grad_inner, b).view(x.shape) if wants_x else None
            grads[3] = torch.mm(grad_inner.t(), x.reshape(-1, b.shape[1])) if wants_b else None
        if wants_first or wants_a:
            # By entries of first and of a: [q1 p1, q2 rank]
            grad_outer = torch.mm(grad_y.t(), inner).view(q1, q2, p1, rank).transpose(1, 2).reshape(q1 * p1, q2 * rank)
            grads[1] = torch.mv(grad_outer, a.reshape(-1)).view(q1, p1) if wants_first else None
            grads[2] = torch.mv(grad_outer.t(), first.reshape(-1)).view(q2, rank) if wants_a else None
        return tuple(grads)


# What depends on sizes alone, which is kept for the next call, but by a compiler, which keeps its graph.


def _cached(sized: Callable[..., T]) -> Callable[..., T]:
    return sized if is_dynamo_compiling() else _kept(sized)


@functools.cache
def _kept(sized: Callable[..., T]) -> Callable[..., T]:
    return functools.lru_cache(MOST_KEPT)(sized)


def _sizes(*weights: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple((*weight.shape,) for weight in weights)


def _with_columns(sizes: tuple[tuple[int, int], ...], columns: int) -> tuple[LayerSpec, Chain]:
    into, out = tuple(p for _, p in sizes), tuple(q for q, _ in sizes)
    if columns == 1:
        return _and_chain(LayerSpec("kronecker", into, out))
    return _and_chain(WithColumns("kronecker", (*into, columns), (*out, columns)))


def _between(first: tuple[int, int], a: tuple[int, int], b: tuple[int, int], columns: int) -> tuple[LayerSpec, Chain]:
    (q1, p1), (q2, between), (_, p2) = first, a, b
    return _and_chain(Between("kronecker", (p1, p2, columns), (q1, q2, columns), between=between))


def _and_chain(spec: LayerSpec) -> tuple[LayerSpec, Chain]:
    return spec, Chain.of(spec, False, "identity")


def _is_less_apart(first: tuple[int, int], a: tuple[int, int], b: tuple[int, int]) -> bool:
    together, apart = multiply_adds(first, a, b)
    return apart < together


def _is_lower_as_two(first: tuple[int, int], a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two plain products take fewer multiply-adds than the two factors."""
    (q1, p1), (q2, rank), (_, p2) = first, a, b
    together, _ = multiply_adds(first, a, b)
    return p1 * p2 * rank + p1 * rank * q1 * q2 < together
