"""The two block-diagonal products of fly (HazyResearch/fly, which is not on PyPI), written out here from their
definition: weights of their shapes give the same layer, without reordering anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorlayer import factor_linear

# Blocks k of q x p, then l of s x r, where l·r = k·q and l divides q: square and rectangular ones
SHAPES = [
    (4, 4, 4, 4, 4),
    (8, 8, 8, 8, 8),
    (4, 12, 6, 4, 5),
    (3, 8, 5, 4, 9),
    (5, 4, 3, 2, 7),
    (1, 6, 10, 1, 8),
    (2, 10, 16, 5, 3),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def butterfly(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """x [..., k·p] by w1 [k, q, p] and w2 [l, s, r]: number k·q of the middle goes to block (number mod l), and value s
    of block l is output s·l."""
    k, _, p = w1.shape
    blocks, _, r = w2.shape
    middle = torch.einsum("kqp,...kp->...kq", w1, x.unflatten(-1, (k, p))).flatten(-2)
    grouped = middle.unflatten(-1, (r, blocks)).mT
    return torch.einsum("lsr,...lr->...sl", w2, grouped).flatten(-2)


@shapes
@pytest.mark.parametrize("implementation", ["naive", "batched", "fused"])
@pytest.mark.parametrize("leading", [(7,), (2, 3), ()], ids=str)
def test_outputs_and_gradients(shape: tuple[int, ...], implementation: str, leading: tuple[int, ...]) -> None:
    k, q, p, blocks, s = shape
    leaves = [
        torch.randn(*size, dtype=torch.float64, requires_grad=True)
        for size in ((*leading, k * p), (k, q, p), (blocks, s, k * q // blocks))
    ]
    x, w1, w2 = leaves
    y, right = factor_linear(x, [w2, w1], structure="monarch", implementation=implementation), butterfly(x, w1, w2)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    grad_y = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, grad_y), torch.autograd.grad(right, leaves, grad_y), rtol=1e-12, atol=1e-12
    )


def test_blocks_whose_rows_cannot_be_shared_out_evenly_are_refused() -> None:
    """fly takes q = 6 rows for l = 4 blocks; then blocks of W have different ranks, which Monarch has not."""
    x, w1, w2 = torch.randn(7, 48), torch.randn(4, 6, 12), torch.randn(4, 7, 6)
    assert butterfly(x, w1, w2).shape == (7, 28)
    with pytest.raises(ValueError, match=r"monarch weights should be \[L, s, K·rank\] and \[K, rank·L, p\]"):
        factor_linear(x, [w2, w1], structure="monarch")
