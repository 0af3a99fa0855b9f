"""A linear layer and what an adapter adds to it, in one step of autograd on a GPU, by each way there is: errors are at
most twice those of the layer and of the Kronecker product's matrix in PyTorch, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import DTYPES, dtype_id
from torch import Tensor, nn
from torch.nn.functional import linear

from factorlayer.adapters import added, linears, ways

# w1, and w2 or its halves
SIZES = [
    ((32, 32), ((32, 32),)),
    ((8, 8), ((128, 8), (8, 128))),
    ((44, 32), ((64, 8), (8, 32))),
    ((8, 8), ((352, 128),)),  # whose gradients no plan makes at once, by w1 first
    ((8, 8), ((128, 352),)),  # and by w2 first
    ((3, 5), ((70, 2), (2, 60))),
]
Results = list[Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float64) / shape[-1] ** 0.5


def results(y: Tensor, leaves: list[Tensor], grad_y: Tensor) -> Results:
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y.to(y.dtype))]


def in_pytorch(base: nn.Linear, x: Tensor, first: Tensor, *second: Tensor) -> Tensor:
    whole = second[0] if len(second) == 1 else second[0] @ second[1]
    return base(x) + 0.5 * linear(x, torch.kron(first, whole))


def check(found: Results, others: Results, right: Results) -> None:
    for mine, other, each in zip(found, others, right, strict=True):
        assert (mine - each).norm() <= 2 * (other - each).norm() + 1e-12 * each.norm()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=dtype_id)
@pytest.mark.parametrize("count", [20, 1200])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_way(size: tuple[tuple[int, int], tuple[tuple[int, int], ...]], count: int, dtype: torch.dtype) -> None:
    first, second = size
    base = nn.Linear(first[1] * second[-1][1], first[0] * second[0][0], device="cuda").to(dtype).requires_grad_(False)
    exact = nn.Linear(base.in_features, base.out_features, device="cuda", dtype=torch.float64).requires_grad_(False)
    exact.load_state_dict(base.state_dict())
    given = [
        each.to(dtype) for each in (drawn(2, count, base.in_features), drawn(*first), *(drawn(*s) for s in second))
    ]
    leaves, doubles = ([each.detach().to(to).requires_grad_() for each in given] for to in (dtype, torch.float64))
    grad_y = drawn(2, count, base.out_features).to(dtype)
    right = results(in_pytorch(exact, *doubles), doubles, grad_y)
    others = results(in_pytorch(base, *leaves), leaves, grad_y)
    for way in ways._ways(False, 1, first, *second):
        if way is not None:
            y = added.add(way, 1, 0.5, None, leaves[0], base.weight, base.bias, *leaves[1:])
            check(results(y, leaves, grad_y), others, right)
    y = linears.added(base, leaves[0], [leaves[1]], leaves[2:], 0.5)
    if y is not None:  # which is auto's choice
        check(results(y, leaves, grad_y), others, right)


def test_under_autocast() -> None:
    base = nn.Linear(1024, 1024, device="cuda").requires_grad_(False)
    leaves = [each.float().requires_grad_() for each in (drawn(300, 1024), drawn(8, 8), drawn(128, 8), drawn(8, 128))]
    doubles = [each.detach().double().requires_grad_() for each in leaves]
    grad_y = drawn(300, 1024)
    with torch.autocast("cuda", torch.bfloat16):
        y, theirs = linears.added(base, leaves[0], [leaves[1]], leaves[2:], 0.5), in_pytorch(base, *leaves)
    assert y is not None and y.dtype == torch.bfloat16
    found, others = results(y, leaves, grad_y), results(theirs, leaves, grad_y)
    check(found, others, results(in_pytorch(copy.deepcopy(base).double(), *doubles), doubles, grad_y))
