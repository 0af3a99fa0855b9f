"""From a dense matrix to the nearest structured one, in the Frobenius norm.

Kronecker, two factors: rearranged so that each row is a block, W becomes a matrix whose best rank-r approximation (SVD)
is the best sum of r Kronecker products (Van Loan and Pitsianis). More factors: the same rearrangement is a tensor; for
rank 1 successive SVDs give a start that is exact on exact inputs, alternating least squares the rest. For rank >= 2 of
more than two factors there is no closed form: the result is a local optimum, found term by term and then jointly.

Monarch of two modes: every block (l, k) of W is approximated on its own, by its SVD. Block-diagonal: the blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorlayer.maths.chain import Chain
from factorlayer.maths.multiplied import multiplied_out
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import BlockDiagonal, LayerSpec

SWEEPS = 200  # of alternating least squares at most; it stops when a sweep changes nothing visible


def project(spec: LayerSpec, dense: Tensor) -> list[Tensor]:
    """The weights whose structured matrix is nearest to dense [out, in], computed in float64 or complex128."""
    if dense.shape != (spec.out_features, spec.in_features):
        raise ValueError(
            f"the dense weight should be [out_features, in_features] = {(spec.out_features, spec.in_features)}, "
            f"it is {tuple(dense.shape)}"
        )
    W = in_double(dense)
    if not W.is_meta and not W.isfinite().all():
        raise ValueError("the dense weight has infinite numbers or NaN, to which no matrix is nearest")
    weights = _project_kronecker(spec, W) if spec.tied else _project_monarch(spec, W)
    shaped = zip(weights, spec.weight_shapes, strict=True)
    return [weight.reshape(shape).to(dense.dtype).contiguous() for weight, shape in shaped]


@dataclass(frozen=True)
class ProjectionError:
    """What a projection leaves: ‖W - W'‖ / ‖W‖ in the Frobenius norm, and the same of outputs if inputs were given."""

    weight: float
    outputs: float | None = None

    def __str__(self) -> str:
        of_outputs = "" if self.outputs is None else f", and outputs by {self.outputs:.2e} of theirs"
        return f"W differs by {self.weight:.2e} of its norm from the dense one it was projected from{of_outputs}"


def projection_error(
    spec: LayerSpec, weights: Sequence[Tensor], dense: Tensor, bias: Tensor | None, inputs: Tensor | None
) -> ProjectionError:
    """The error of weights in the place of dense [out, in], in float64; outputs are those of inputs [..., in], with the
    bias."""
    W, found = in_double(dense), to_dense(spec, [in_double(weight) for weight in weights])
    if inputs is None:
        return ProjectionError(_relative(found - W, W))
    if inputs.dim() == 0 or inputs.shape[-1] != spec.in_features:
        raise ValueError(
            f"the last dimension of inputs should be in_features={spec.in_features}, they have the shape "
            f"{tuple(inputs.shape)}"
        )
    x = (
        in_double(inputs)
        .to(W.device, torch.promote_types(in_double(inputs).dtype, W.dtype))
        .reshape(-1, spec.in_features)
    )
    y = x @ W.T.to(x.dtype)
    left = x @ (found - W).T.to(x.dtype)
    return ProjectionError(_relative(found - W, W), _relative(left, y if bias is None else y + in_double(bias)))


def _relative(left: Tensor, whole: Tensor) -> float:
    """Zero of nothing is nothing."""
    norm, of = float(left.norm()), float(whole.norm())
    return norm / of if of else norm


def in_double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def to_dense(spec: LayerSpec, weights: list[Tensor]) -> Tensor:
    """The matrix [out, in] that the weights stand for; Kronecker products by elements, which neither TF32 nor autocast
    rounds."""
    if spec.tied:
        weights = [weight.contiguous() for weight in weights]  # torch.kron takes a transposed one for no product
        terms = [weights] if spec.rank == 1 else zip(*weights, strict=True)
        return functools.reduce(torch.add, (functools.reduce(torch.kron, factors) for factors in terms))
    if spec.blocks:
        return multiplied_out(Chain.of(spec, False, "identity"), weights)
    return naive(spec, torch.eye(spec.in_features, dtype=weights[0].dtype, device=weights[0].device), weights).T


def _project_monarch(spec: LayerSpec, W: Tensor) -> list[Tensor]:
    if len(spec.in_factors) == 1:
        return [W]
    if isinstance(spec, BlockDiagonal):
        (count, p), (_, s) = spec.in_factors, spec.out_factors
        return [W.reshape(count, s, count, p).diagonal(dim1=0, dim2=2).permute(2, 0, 1)]
    if spec.blocks is None:
        raise ValueError(
            f"there is no projection onto a Monarch chain of {len(spec.in_factors)} factors; use two factors, or blocks"
        )
    (K, p), (s, L), rank = spec.in_factors, spec.out_factors, spec.rank
    blocks = W.reshape(s, L, K, p).permute(1, 2, 0, 3)  # [L, K, s, p]
    U, S, V = torch.linalg.svd(blocks, full_matrices=False)
    root = S[..., :rank].sqrt()
    left = U[..., :rank] * root.unsqueeze(-2)  # [L, K, s, rank]
    right = V[..., :rank, :] * root.unsqueeze(-1)  # [L, K, rank, p]
    return [left.permute(0, 2, 1, 3), right.permute(1, 2, 0, 3)]  # [L, s, K, rank], [K, rank, L, p]


def _project_kronecker(spec: LayerSpec, W: Tensor) -> list[Tensor]:
    P, Q, k = spec.in_factors, spec.out_factors, len(spec.in_factors)
    pairs = [axis for mode in range(k) for axis in (mode, k + mode)]
    sizes = [q * p for q, p in zip(Q, P, strict=True)]
    tensor = W.reshape(*Q, *P).permute(pairs).reshape(sizes)  # entry (j1 i1, …, jk ik): a product of k numbers
    if k == 1:
        return [W]
    if k == 2:
        U, S, V = torch.linalg.svd(tensor, full_matrices=False)
        root = S[: spec.rank].sqrt()
        return [(U[:, : spec.rank] * root).T, V[: spec.rank] * root.unsqueeze(-1)]
    terms: list[list[Tensor]] = []
    rest = tensor
    for _ in range(spec.rank):
        terms.append(_alternate(rest, [f.unsqueeze(0) for f in _successive_svd(rest)]))
        rest = rest - _sum_of_products(terms[-1])
    factors = [torch.cat(column) for column in zip(*terms, strict=True)]  # k times [rank, size]
    return balance(factors if spec.rank == 1 else _alternate(tensor, factors))


def _successive_svd(tensor: Tensor) -> list[Tensor]:
    """k vectors whose outer product is tensor, if there are such."""
    vectors = []
    while tensor.dim() > 1:
        U, S, V = torch.linalg.svd(tensor.reshape(tensor.shape[0], -1), full_matrices=False)
        vectors.append(U[:, 0])
        tensor = (S[0] * V[0]).reshape(tensor.shape[1:])
    return [*vectors, tensor]


def _sum_of_products(factors: list[Tensor]) -> Tensor:
    """Factors [rank, size] each -> the sum over rank of their outer products."""
    total = factors[0]
    for factor in factors[1:]:
        total = total.unsqueeze(-1) * factor.reshape(factor.shape[0], *[1] * (total.dim() - 1), -1)
    return total.sum(0)


def _alternate(tensor: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """Alternating least squares from the given start: each factor in turn is solved for, the others held."""
    factors = list(factors)
    scale = float(tensor.norm())
    before = math.inf
    for _ in range(SWEEPS):
        for mode in range(len(factors)):
            others = [factor for i, factor in enumerate(factors) if i != mode]
            design = others[0]
            for other in others[1:]:
                design = (design.unsqueeze(-1) * other.unsqueeze(1)).flatten(1)  # [rank, product of sizes]
            unfolded = tensor.movedim(mode, -1).reshape(-1, tensor.shape[mode])
            factors[mode] = torch.linalg.pinv(design.T) @ unfolded
        error = float((tensor - _sum_of_products(factors)).norm())
        if before - error <= 1e-12 * scale:
            break
        before = error
    return factors


def balance(factors: list[Tensor]) -> list[Tensor]:
    """Equal norms in every term, so that no factor is large because another is small."""
    norms = torch.stack([factor.norm(dim=1) for factor in factors])  # [k, rank]
    wanted = norms.prod(0) ** (1 / len(factors))
    return [
        factor * torch.where(norm > 0, wanted / norm, norm).unsqueeze(-1)
        for factor, norm in zip(factors, norms, strict=True)
    ]
