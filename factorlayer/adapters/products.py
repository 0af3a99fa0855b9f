"""x by a Kronecker product, whose matrix is not made: of two factors, the second of which may come as w2 = a b, or of
several with columns behind. ways.py has how each is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from factorlayer.adapters import ways
from factorlayer.adapters.ways import cached, of_columns, way_of
from factorlayer.functional import factor_linear, run

# On a CPU, entries of a matrix and multiply-adds by it up to which it is made in less time than a product without it
# takes to be called: a training step of 64 -> 64 features takes 0.21 and 0.27 ms with 8 rows, 0.36 and 0.34 with 128.
SMALL_MATRIX, FEW_MULTIPLY_ADDS = 1 << 12, 1 << 18


def product(x: Tensor, first: Tensor, second: Sequence[Tensor], behind: int = 0) -> Tensor:
    """x (first ⊗ second)ᵀ along the axis of x that has `behind` axes behind it; second is (w2,) or (a, b)."""
    if not behind:
        return _rows(x, first, second)
    if not ways.is_by_chain(x) or not x.is_contiguous() or not x.numel():
        return _rows(x.movedim(-1 - behind, -1), first, second).movedim(-1, -1 - behind)
    shape, at = x.shape, x.dim() - 1 - behind
    rows = x.reshape(*shape[:at], math.prod(shape[at:]))
    y = _rows(rows, first, second, math.prod(shape[at + 1 :]))
    return y.reshape(*shape[:at], -1, *shape[at + 1 :])


def kronecker(weights: Sequence[Tensor], right: Tensor) -> Tensor:
    """(w1 ⊗ w2 ⊗ …) right, where right is [in, columns]."""
    if not ways.is_by_chain(right) or not right.numel():
        return factor_linear(right.mT, weights).mT
    columns = right.shape[-1]
    way = cached(of_columns)(columns, *(_sizes(weight) for weight in weights))
    x = right.reshape(1, -1)
    return run(way.spec, way.chain, x, weights, None, "auto", "kronecker").reshape(-1, columns)


def is_faster_made(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a matrix of these sizes, [out, in], takes less time made than as a product."""
    out, into = sizes
    return x.is_cpu and out * into <= SMALL_MATRIX and x.numel() * out <= FEW_MULTIPLY_ADDS


def _rows(x: Tensor, first: Tensor, second: Sequence[Tensor], columns: int = 1) -> Tensor:
    sizes = [_sizes(half) for half in second]
    return way_of(x, _sizes(first), sizes, columns, torch.is_grad_enabled()).product(x, first, second)


def _sizes(weight: Tensor) -> tuple[int, ...]:
    return tuple(map(int, weight.shape))  # which are tensors while a call is traced
