"""v1, the definition: the shortest code that is obviously right. In float64 it is the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorlayer.maths.spec import LayerSpec


def naive(spec: LayerSpec, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [N, in] -> [N, out], without bias."""
    if not spec.tied:
        return monarch(spec, x, weights)
    if spec.rank == 1:
        return kronecker(spec, x, weights)
    terms = [kronecker(spec, x, [weight[r] for weight in weights]) for r in range(spec.rank)]
    return torch.stack(terms).sum(0)


def kronecker(spec: LayerSpec, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """y[n, j1, …, jk] = sum over i1 … ik of F1[j1, i1] · … · Fk[jk, ik] x[n, i1, …, ik]"""
    state = x.reshape(-1, *spec.in_factors)
    for mode in reversed(range(len(weights))):
        state = (state.movedim(mode + 1, -1) @ weights[mode].T).movedim(-1, mode + 1)
    return state.reshape(-1, spec.out_features)


def monarch(spec: LayerSpec, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """y[n, o, q, i] = sum over p of weight[o, i, q, p] x[n, o, p, i], for each contraction in its order"""
    state = x
    for c in spec.contractions:
        weight = weights[c.weight].view(c.outer, c.inner, c.q, c.p)
        state = torch.einsum("oiqp,nopi->noqi", weight, state.reshape(-1, c.outer, c.p, c.inner))
    return state.reshape(-1, spec.out_features)
