"""The structured matrix W for which <W A, W> - 2 <W, B> is least: alternating least squares from a start.

A [in, in] is the sum of x xᵀ over samples and B [out, in] that of target xᵀ (maths/moments.py), so this is what is
nearest in outputs, where project.py is nearest in weights. W is linear in each of its weights, which are solved for in
turn, the others held:

Kronecker: one factor at a time, of all terms together.
Monarch of two modes: output group l has W_l = C_l D_l, where D_l has U_lk for each input group k on its diagonal. U_lk
is solved for k by k, then C_l for all k together.

No step raises what is made least: each is found as a change of what is there, and damped, so that unknowns on which
nothing depends stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorlayer.maths.project import balance, to_dense
from factorlayer.maths.spec import LayerSpec

DAMPING = 1e-12  # of the mean diagonal of a step's normal matrix
ENOUGH = 1e-3  # ends when a sweep takes off less than this share of what all have, and of what is left
ROUNDING = 1e-15  # of the targets' squares: below it, what is left is what rounding leaves


def why_not(spec: LayerSpec) -> str | None:
    if spec.tied or len(spec.in_factors) <= 2:
        return None
    return (
        f"there are no least squares for a Monarch chain of {len(spec.in_factors)} factors; use two factors, or blocks"
    )


def least_squares(
    spec: LayerSpec, weights: Sequence[Tensor], A: Tensor, B: Tensor, at_start: float, sweeps: int
) -> tuple[list[Tensor], list[float]]:
    """From weights in float64, with which at_start is left: those found, and what is left before and behind sweeps."""
    start = to_dense(spec, list(weights))
    constant = at_start - float((start @ A * start).sum() - 2 * (start * B).sum())
    kind = _Kronecker if spec.tied or len(spec.in_factors) == 1 else _Monarch
    state = kind(spec, weights, A, B)
    left = [at_start]
    for _ in range(sweeps):
        left.append(constant + state.sweep())
        if left[-2] - left[-1] <= ENOUGH * min(at_start - left[-1], left[-1]) + ROUNDING * constant:
            break
    shaped = zip(state.weights(), spec.weight_shapes, strict=True)
    return [weight.reshape(shape) for weight, shape in shaped], left


class _Kronecker:
    """Factors [rank, Qi, Pi]; A and B once for each mode, that mode's axes in front."""

    def __init__(self, spec: LayerSpec, weights: Sequence[Tensor], A: Tensor, B: Tensor) -> None:
        P, Q, k = spec.in_factors, spec.out_factors, len(spec.in_factors)
        self.factors = [weight.reshape(-1, q, p).clone() for weight, q, p in zip(weights, Q, P, strict=True)]
        self.A, self.B = [], []
        for mode, (q, p) in enumerate(zip(Q, P, strict=True)):
            rest = [i for i in range(k) if i != mode]
            axes = [mode, k + mode, *rest, *(k + i for i in rest)]
            self.A.append(A.reshape(*P, *P).permute(axes).reshape(p * p, -1))
            self.B.append(B.reshape(*Q, *P).permute(axes).reshape(q * p, -1))

    def sweep(self) -> float:
        for mode, factor in enumerate(self.factors):
            rank, q, p = factor.shape
            others = self._others(mode)  # [rank, Q', P']
            squares = torch.einsum("rji,sjk->rsik", others, others).flatten(2).flatten(0, 1)
            normal = (self.A[mode] @ squares.T).view(p, p, rank, rank).permute(2, 0, 3, 1).reshape(rank * p, rank * p)
            right = (self.B[mode] @ others.flatten(1).T).view(q, p, rank).transpose(1, 2).reshape(q, rank * p)
            row = factor.transpose(0, 1).reshape(q, rank * p)
            row = row + solve(normal, right - row @ normal)
            self.factors[mode] = row.view(q, rank, p).transpose(0, 1)
        return float((row @ normal * row).sum() - 2 * (row * right).sum())

    def _others(self, mode: int) -> Tensor:
        factors = [factor for i, factor in enumerate(self.factors) if i != mode]
        product = self.factors[mode].new_ones(len(self.factors[mode]), 1, 1)
        for factor in factors:
            product = torch.einsum("rab,rcd->racbd", product, factor).flatten(3).flatten(1, 2)
        return product

    def weights(self) -> list[Tensor]:
        return balance([factor.flatten(1) for factor in self.factors])


class _Monarch:
    """C [L, s, K, rank] and U [L, K, rank, p]; UA [L, K, rank, in] is U times the rows of A that it meets."""

    def __init__(self, spec: LayerSpec, weights: Sequence[Tensor], A: Tensor, B: Tensor) -> None:
        (self.K, self.p), (self.s, self.L), self.rank = spec.in_factors, spec.out_factors, spec.rank
        K, p, s, L, rank = self.K, self.p, self.s, self.L, self.rank
        self.C = weights[0].reshape(L, s, K, rank).clone()
        self.U = weights[1].reshape(K, rank, L, p).permute(2, 0, 1, 3).contiguous()
        self.A = A.reshape(K, p, K * p)
        self.B = B.reshape(s, L, K, p).transpose(0, 1).contiguous()
        self.UA = self.U @ self.A

    def sweep(self) -> float:
        for k in range(self.K):
            self._solve_first(k)
        return self._solve_second()

    def _solve_first(self, k: int) -> None:
        columns = slice(k * self.p, (k + 1) * self.p)
        left = self.B[:, :, k] - self.C.flatten(2) @ self.UA.flatten(1, 2)[..., columns]  # [L, s, p]
        C = self.C[:, :, k]
        change = solve(C.mT @ C, (C.mT @ left).mT).mT  # [L, rank, p]
        self.U[:, k] += solve(self.A[k][:, columns], change)
        self.UA[:, k] = self.U[:, k] @ self.A[k]

    def _solve_second(self) -> float:
        by_groups = self.UA.view(self.L, self.K * self.rank, self.K, self.p)
        normal = torch.einsum("lakp,lkrp->lakr", by_groups, self.U).flatten(2)  # [L, K·rank, K·rank]
        right = torch.einsum("lskp,lkrp->lskr", self.B, self.U).flatten(2)
        C = self.C.flatten(2)
        C = C + solve(normal, right - C @ normal)
        self.C = C.view_as(self.C)
        return float((C @ normal * C).sum() - 2 * (C * right).sum())

    def weights(self) -> list[Tensor]:
        """Columns of C and rows of U of equal norm."""
        of_C, of_U = self.C.norm(dim=1), self.U.norm(dim=3)  # [L, K, rank]
        scale = torch.where((of_C > 0) & (of_U > 0), (of_U / of_C).sqrt(), 1.0)
        first = self.U / scale.unsqueeze(3)
        return [self.C * scale.unsqueeze(1), first.permute(1, 2, 0, 3)]


def solve(normal: Tensor, right: Tensor) -> Tensor:
    """X [..., m, n] with X (normal + damping) = right, where normal [..., n, n] is symmetric, with no negative
    eigenvalue but by rounding."""
    mean = normal.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    damping = torch.where(mean > 0, DAMPING * mean, 1.0)
    while True:
        damped = normal + torch.diag_embed(damping.expand(normal.shape[:-1]))
        root, failed = torch.linalg.cholesky_ex((damped + damped.mT) / 2)
        if not failed.any():
            return torch.cholesky_solve(right.mT, root).mT
        damping = torch.where(failed.unsqueeze(-1) > 0, 10 * damping, damping)
