"""What projections leave, for all ranks at once, by the singular values of one rearrangement of a matrix.

maths/project.py says which rearrangement that is: of a Kronecker product of two factors a matrix, of Monarch's blocks
one for each. Their squares are the eigenvalues of the smaller Gram matrix, which takes a fraction of what an SVD does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from factorlayer.maths.project import in_double
from factorlayer.maths.spec import LayerSpec

NOISE = 1e-14  # of a sum of squares, what is left of it by rounding in float64


def squares_left(spec: LayerSpec, dense: Tensor) -> list[float]:
    """‖W - W'‖² / ‖W‖² of the layer with rank 1, 2, … in the place of the spec's own."""
    (P, p), (Q, q) = spec.in_factors, spec.out_factors  # of Monarch (K, p) and (s, L)
    W = in_double(dense).reshape(Q, q, P, p)
    matrices = W.permute(0, 2, 1, 3).reshape(Q * P, q * p) if spec.tied else W.permute(1, 2, 0, 3)
    squares = _squared_singular_values(matrices).reshape(-1, min(matrices.shape[-2:])).sum(0)
    whole = squares.sum()
    left = whole - squares.cumsum(0)
    shares = left / whole if whole else left
    return shares.where(shares > NOISE, 0).tolist()


def _squared_singular_values(matrices: Tensor) -> Tensor:
    """Descending."""
    rows, columns = matrices.shape[-2:]
    gram = matrices @ matrices.mH if rows <= columns else matrices.mH @ matrices
    squares: Tensor = torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1)
    return squares


def ranks(spec: LayerSpec) -> list[LayerSpec]:
    """The same layer with rank 1, 2, 3, 4, 6, 8, 12, …: those that have fewer parameters than the dense one, and fewer
    FLOPs."""
    dense = spec.in_features * spec.out_features
    found: list[LayerSpec] = []
    power = 1
    while power <= spec.max_rank:
        for rank in (power, power * 3 // 2) if power > 1 else (1,):
            each = replace(spec, rank=min(rank, spec.max_rank))
            if max(each.parameter_count, each.multiply_adds()) < dense and each not in found:
                found.append(each)
        power *= 2
    return found
