"""The matrix that a chain's weights stand for, multiplied out by products that PyTorch is fast at, forward and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from factorlayer.maths.chain import Chain


def multiplied_out(chain: Chain, weights: Sequence[Tensor]) -> Tensor:
    """[out, in]. A block is a product of matrices, a sum of Kronecker products one over its terms."""
    if chain.is_monarch:
        first, second = chain.contractions
        K, L, s, p = first.outer, second.inner, second.q, first.p
        rank = first.q // L
        left = weights[0].reshape(L, s, K, rank).transpose(1, 2)
        right = weights[1].reshape(K, rank, L, p).permute(2, 0, 1, 3)
        return (left @ right).permute(2, 0, 1, 3).reshape(s * L, K * p)
    terms = [weight.reshape(chain.rank, *weight.shape[-2:]) for weight in weights]
    matrix, last = terms[0], terms[-1]
    for factor in terms[1:-1]:
        matrix = _side_by_side(matrix.flatten(1).unsqueeze(2) @ factor.flatten(1).unsqueeze(1), matrix, factor)
    return _side_by_side(matrix.flatten(1).t() @ last.flatten(1), matrix, last).squeeze(0)


def _side_by_side(products: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """[terms, rows, columns] from the products of each entry of one with each of the other."""
    (a, b), (c, d) = left.shape[1:], right.shape[1:]
    return products.reshape(-1, a, b, c, d).transpose(2, 3).reshape(-1, a * c, b * d)
