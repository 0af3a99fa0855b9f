"""v2: the best that PyTorch alone can do. One matrix product per contraction: flat where the contracted mode is last,
batched where others follow it, without permuting in between. On CUDA, batches of tiny products are slower than moving
the axes of the state, so that small factors take one flat product each. Where the structure saves little, the matrix is
multiplied out (multiplied.py), as functional.py decides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

LARGEST_FLAT = 12  # bfloat16 on an H200: 8^5 takes 1129 µs flat and 2466 batched, 16^3 108 and 103


def batched(chain: Chain, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [N, in] -> [N, out], without bias and activation."""
    if chain.rank == 1:
        return _contract_all(chain, x, weights)
    total = _contract_all(chain, x, [weight[0] for weight in weights])
    for r in range(1, chain.rank):
        total = total + _contract_all(chain, x, [weight[r] for weight in weights])
    return total


def _contract_all(chain: Chain, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if x.is_cuda and all(c.tied and max(c.p, c.q) <= LARGEST_FLAT for c in chain.contractions):
        return flat(x, weights)
    state = x
    for c in chain.contractions:
        state = (_tied if c.tied else _untied)(c, state, weights[c.weight])
    return state.reshape(-1, chain.out_features)


def flat(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """With the samples last, so that moving an axis moves whole rows of them. The first mode is contracted and goes
    behind the others: after all of them, they stand in their order again."""
    batch, features = x.shape
    state = x.t()
    for weight in weights:
        q, p = weight.shape
        rest = features // p
        product = (weight @ state.reshape(p, rest * batch)).view(q, rest, batch)
        features = rest * q
        state = product.transpose(0, 1).reshape(features, batch)
    return state.t()


def together(chain: Chain, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Several chains of the same sizes at once, one for each place of the weights' first axis: x [N, in] for all of
    them -> [chains, N, out], without bias and activation. With the samples last, as `flat` has them."""
    count, batch = weights[0].shape[0], x.shape[0]
    if chain.is_dense:
        return (
            torch.nn.functional.linear(x, weights[0].flatten(0, 1))
            .view(batch, count, chain.out_features)
            .transpose(0, 1)
        )
    groups = count * chain.rank  # the terms of a sum are chains of their own
    state, features = x.t().expand(groups, *x.t().shape), chain.in_features
    if all(c.tied for c in chain.contractions):
        for weight in weights:  # modes in their order, each of which goes behind the others
            q, p = weight.shape[-2:]
            rest = features // p
            state = torch.bmm(weight.reshape(groups, q, p), state.reshape(groups, p, rest * batch))
            state, features = state.view(groups, q, rest, batch).transpose(1, 2), rest * q
    else:
        for c in chain.contractions:
            places = groups * c.outer * c.inner
            state = state.reshape(groups, c.outer, c.p, c.inner, batch).transpose(2, 3)
            state = torch.bmm(weights[c.weight].reshape(places, c.q, c.p), state.reshape(places, c.p, batch))
            state = state.view(groups, c.outer, c.inner, c.q, batch).transpose(2, 3)
    state = state.reshape(count, chain.rank, chain.out_features, batch)
    return (state.sum(1) if chain.rank > 1 else state.squeeze(1)).transpose(1, 2)


def _tied(c: Contraction, state: Tensor, weight: Tensor) -> Tensor:
    if c.inner == 1:
        return state.reshape(-1, c.p) @ weight.t()
    state = state.reshape(-1, c.p, c.inner)
    return torch.bmm(weight.expand(state.shape[0], c.q, c.p), state)


def _untied(c: Contraction, state: Tensor, weight: Tensor) -> Tensor:
    batch = state.numel() // (c.outer * c.p * c.inner)
    state = state.reshape(batch, c.outer, c.p, c.inner)
    if c.inner == 1:  # samples last: what a following contraction can read without another copy
        out = torch.bmm(weight, state.squeeze(-1).permute(1, 2, 0))  # [outer, q, N]
        return out.permute(2, 0, 1)
    groups = state.permute(1, 3, 0, 2).reshape(c.outer * c.inner, batch, c.p)
    out = torch.bmm(groups, weight.transpose(1, 2))  # [outer · inner, N, q]
    return out.reshape(c.outer, c.inner, batch, c.q).permute(2, 0, 3, 1)
