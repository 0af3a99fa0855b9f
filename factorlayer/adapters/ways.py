"""How x is multiplied by w1 ⊗ w2, where w2 may come as two halves: w2 = a b.

On a CPU all of it is one chain of contractions for the fused kernels, with a and b as contractions of their own where
that takes fewer multiply-adds, and with columns as the axis behind all modes, so that nothing is turned. On a GPU it is
the chain of w1 and w2, or a plain product by b and the chain of w1 and a, whatever is predicted to be faster.

A way has the product as the layers' own autograd records it. For who records it, added.py, it has y with what of its
making is kept, and the gradients: of x, of w1 and of w2 or its halves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.functional import linear

from factorlayer.autograd.layer_ops import (
    fused,
    gpu_limits,
    gradients_now,
    layer_at_once,
    predicted_us,
    text_for,
)
from factorlayer.autograd.runtime import dtype_name
from factorlayer.device.gpu import Gpu
from factorlayer.functional import choose, run
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.plan.library import Ways
from factorlayer.tuning.predicted import predicted

T = TypeVar("T")
Sizes = tuple[int, ...]  # of a matrix: rows, columns
Wanted = tuple[bool, bool, bool]  # gradients of x, of w1, and of w2 or a half of it
Gradients = tuple[Tensor | None, Tensor | None, list[Tensor | None]]  # of these
MOST_KEPT = 1024  # sizes


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


@dataclass(frozen=True)
class ByChain:
    """Our kernels, on w1 and w2, or on b, w1 and a."""

    spec: LayerSpec
    chain: Chain
    with_bias: Chain
    is_apart: bool = False

    @classmethod
    def of(cls, spec: LayerSpec, is_apart: bool = False) -> ByChain:
        return cls(spec, Chain.of(spec, False, "identity"), Chain.of(spec, True, "identity"), is_apart)

    @property
    def sizes(self) -> Sizes:
        return self.spec.out_features, self.spec.in_features

    def us(self, x: Tensor, batch: int, recorded: bool) -> float:
        """What is predicted for so many samples of x's kind, infinitely long where auto does not take the kernels."""
        if not self.takes(x, batch, recorded):
            return math.inf
        return predicted(text_for(self.chain, x), x.dtype, x.get_device(), batch, recorded).fused_us

    def takes(self, x: Tensor, batch: int, recorded: bool) -> bool:
        return choose(self.chain, x, "auto", "product", batch, recorded) == "fused"

    def product(self, x: Tensor, first: Tensor, second: Sequence[Tensor]) -> Tensor:
        weights = self._weights(
            first, second, second[0] if len(second) == 1 or self.is_apart else second[0] @ second[1]
        )
        return run(self.spec, self.chain, x, weights, None, "auto", "product")

    def forward(
        self, rows: Tensor, first: Tensor, second: Sequence[Tensor], bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        kept = [] if len(second) == 1 or self.is_apart else [torch.mm(*second)]
        return self.now(rows, self._weights(first, second, *(kept or second[:1])), bias), kept

    def now(self, rows: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
        """By the kernels, unrecorded."""
        chain = self.chain if bias is None else self.with_bias
        y = layer_at_once(chain.text, chain.tf32_text, False, rows, bias, weights, True)  # in autocast's dtype, if any
        return fused(chain, rows, weights, bias, recorded=False) if y is None else y

    def backward(
        self, grad_y: Tensor, rows: Tensor, first: Tensor, second: Sequence[Tensor], kept: Sequence[Tensor],
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        of_x, of_first, of_second = wanted
        if self.is_apart:
            a, b = second
            found = self.back(grad_y, rows, [b, first, a], of_x, of_second, of_first, of_second)
            return found[0], found[2], [found[3], found[1]]
        whole = (kept or second)[0]
        steps = (
            cached(_steps)(self.chain.contractions[0].weight == 0, first.shape, whole.shape) if rows.is_cuda else None
        )
        if steps is not None and of_first and of_second and steps.are_faster(self.chain, rows):
            grad_x, grad_first, grad_second = steps.back(grad_y, rows, first, whole, of_x)
        else:
            grad_x, grad_first, grad_second = self.back(grad_y, rows, [first, whole], of_x, of_first, of_second)
        return grad_x, grad_first, halves_back(grad_second, second)

    def back(self, grad_y: Tensor, rows: Tensor, weights: list[Tensor], *wanted: bool) -> list[Tensor | None]:
        """Gradients of x and of the weights, those wanted."""
        needs = False, wanted[0], False, *wanted[1:]
        _, grad_x, _, *others = gradients_now(text_for(self.chain, rows), grad_y, (rows, None, *weights), needs)
        return [grad_x, *others]

    def _weights(self, first: Tensor, second: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
        return [second[1], first, second[0]] if self.is_apart else [first, whole]


@dataclass(frozen=True)
class Steps:
    """Gradients of w1 by our kernels and of w2 by plain products, of which either is contracted first."""

    begins_with_first: bool
    first: ByChain  # with the columns that it meets
    second: ByChain  # as a layer of its own, which nobody runs
    blocks: int  # of a sample, that go through it

    def back(
        self, grad_y: Tensor, rows: Tensor, first: Tensor, second: Tensor, of_x: bool
    ) -> tuple[Tensor | None, ...]:
        q2, p2 = second.shape
        if self.begins_with_first:
            grad_y = grad_y.view(-1, q2)
            grad_second = torch.mm(grad_y.t(), self.first.now(rows, [first]).view(-1, p2))
            grad_inner = torch.mm(grad_y, second).view(len(rows), -1)
            return *self.first.back(grad_inner, rows, [first], of_x, True), grad_second
        x = rows.reshape(-1, p2)
        inner = torch.mm(x, second.t()).view(len(rows), -1)
        found, grad_first = self.first.back(grad_y, inner, [first], True, True)
        assert found is not None
        grad_inner = found.view(-1, q2)
        grad_x = torch.mm(grad_inner, second).view(rows.shape) if of_x else None
        return grad_x, grad_first, torch.mm(grad_inner.t(), x)

    def are_faster(self, together: Chain, x: Tensor) -> bool:
        """Whether they are predicted to take a GPU less time than one plan of both contractions."""
        texts = [text_for(chain, x) for chain in (together, self.first.chain, self.second.chain)]
        return _are_faster(*texts, self.blocks, self.begins_with_first, x.dtype, x.get_device(), len(x))


@functools.lru_cache(MOST_KEPT)
def _are_faster(
    together: str, first: str, second: str, blocks: int, begins_with_first: bool, dtype: torch.dtype, device: int,
    batch: int,
) -> bool:  # fmt: skip
    """What w1's kernels and PyTorch's products take, against the plan that makes all gradients at once, if any does."""
    chain = Chain.parse(second)
    asked = chain, "tf32" if chain.tf32 else dtype_name(dtype), blocks * batch, Gpu(*gpu_limits(device))
    library, trained = (Ways.of(*asked, training).us for training in (False, True))
    again = predicted_us(first, batch, dtype, device) if begins_with_first else library
    of_first, of_all = (predicted_us(_backward(text), batch, dtype, device) for text in (first, together))
    return again + trained - library + of_first < of_all


def _backward(text: str) -> str:
    """All gradients of what the text stands for."""
    tf32 = "; tf32"
    return text.removesuffix(tf32) + "; backward" + (tf32 if text.endswith(tf32) else "")


@dataclass(frozen=True)
class ByHalf:
    """A plain product by b of each block of x, and our kernels on w1 and a."""

    sizes: Sizes
    blocks: int
    half: ByChain  # b as a layer of its own, which nobody runs
    rest: ByChain

    def us(self, x: Tensor, batch: int, recorded: bool) -> float:
        rest = self.rest.us(x, batch, recorded)
        asked = x.dtype, x.get_device(), self.blocks * batch, recorded
        return rest + predicted(text_for(self.half.chain, x), *asked).batched_us if rest < math.inf else rest

    def takes(self, x: Tensor, batch: int, recorded: bool) -> bool:
        return self.rest.takes(x, batch, recorded)

    def product(self, x: Tensor, first: Tensor, second: Sequence[Tensor]) -> Tensor:
        a, b = second
        inner = linear(x.unflatten(-1, (first.shape[1], b.shape[1])), b).flatten(-2)
        return self.rest.product(inner, first, [a])

    def forward(
        self, rows: Tensor, first: Tensor, second: Sequence[Tensor], bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        a, b = second
        inner = torch.mm(rows.reshape(-1, b.shape[1]), b.t()).view(-1, self.rest.sizes[1])
        return self.rest.now(inner, [first, a], bias), [inner]

    def backward(
        self, grad_y: Tensor, rows: Tensor, first: Tensor, second: Sequence[Tensor], kept: Sequence[Tensor],
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        (a, b), (of_x, of_first, of_second) = second, wanted
        grad_inner, grad_first, (grad_a,) = self.rest.backward(
            grad_y, kept[0], first, [a], [], (of_x or of_second, of_first, of_second)
        )
        if grad_inner is None:
            return None, grad_first, [grad_a, None]
        grad_inner = grad_inner.view(-1, b.shape[0])
        grad_x = torch.mm(grad_inner, b).view(rows.shape) if of_x else None
        grad_b = torch.mm(grad_inner.t(), rows.reshape(-1, b.shape[1])) if of_second else None
        return grad_x, grad_first, [grad_a, grad_b]


Way = ByChain | ByHalf


def halves_back(grad: Tensor | None, halves: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of one tensor or of two, from that of their product."""
    if grad is None or len(halves) == 1:
        return [grad] * len(halves)
    a, b = halves
    return [torch.mm(grad, b.t()), torch.mm(a.t(), grad)]


def way_of(x: Tensor, first: Sizes, second: Sequence[Sizes], columns: int = 1, recorded: bool = False) -> Way:
    """Of the sizes of w1, and of w2 or of its halves."""
    way, by_half = cached(_ways)(is_by_chain(x), columns, first, *second)
    if by_half is None or not x.is_cuda or is_compiling():
        return way
    asked = x, x.numel() // way.sizes[1], recorded
    return by_half if by_half.us(*asked) < way.us(*asked) else way


def is_by_chain(x: Tensor) -> bool:
    return x.is_cpu and not x.is_complex()


def _ways(on_cpu: bool, columns: int, first: Sizes, *second: Sizes) -> tuple[ByChain, ByHalf | None]:
    """By our kernels alone, and by them behind a plain product, if there are halves and a GPU may run both."""
    (q1, p1), q2, p2 = first, second[0][0], second[-1][1]
    together = of_columns(columns, first, (q2, p2))
    if len(second) == 1:
        return together, None
    rank = second[1][0]
    if not on_cpu:
        half, rest = of_columns(1, (rank, p2)), of_columns(1, first, (q2, rank))
        return together, ByHalf(together.sizes, p1, half, rest) if columns == 1 else None
    apart = Between("kronecker", (p1, p2, columns), (q1, q2, columns), between=rank)
    return ByChain.of(apart, is_apart=True) if apart.multiply_adds() < together.spec.multiply_adds() else together, None


def _steps(begins_with_first: bool, first: Sizes, second: Sizes) -> Steps:
    (q1, p1), (q2, p2) = first, second
    columns, blocks = (p2, q1) if begins_with_first else (q2, p1)
    return Steps(begins_with_first, of_columns(columns, (q1, p1)), of_columns(1, (q2, p2)), blocks)


def of_columns(columns: int, *weights: Sizes) -> ByChain:
    """Of weights of these sizes, with columns behind."""
    return ByChain.of(_with_columns(weights, columns))


def multiply_adds(first: Sizes, a: Sizes, b: Sizes) -> tuple[int, int]:
    """For each sample, of weights' sizes: with a b multiplied before, and with a and b as contractions of their own."""
    (q1, p1), (q2, rank), p2 = first, a, b[1]
    apart = Between("kronecker", (p1, p2, 1), (q1, q2, 1), between=rank)
    return _with_columns((first, (q2, p2)), 1).multiply_adds(), apart.multiply_adds()


def _with_columns(weights: Sequence[Sizes], columns: int) -> LayerSpec:
    into, out = tuple(p for _, p in weights), tuple(q for q, _ in weights)
    if columns == 1:
        return LayerSpec("kronecker", into, out)
    return WithColumns("kronecker", (*into, columns), (*out, columns))


# What depends on sizes alone, which is kept for the next call, but by a compiler, which keeps its graph.


def cached(sized: Callable[..., T]) -> Callable[..., T]:
    return sized if is_dynamo_compiling() else _kept(sized)


@functools.cache
def _kept(sized: Callable[..., T]) -> Callable[..., T]:
    return functools.lru_cache(MOST_KEPT)(sized)
