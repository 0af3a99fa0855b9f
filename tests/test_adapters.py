"""What factorlayer.adapters is made of, without the packages whose layers it takes: tests/foreign has those."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest
import torch
from forked import python
from torch import Tensor, nn

from factorlayer import adapters
from factorlayer.adapters import products
from factorlayer.adapters.record import Record

SIZES = [
    ((3, 4), (5, 2, 6)),
    ((2, 2), (8, 1, 16)),
    ((1, 1), (6, 2, 7)),
    ((4, 1), (3, 4, 4)),
]  # w1; rows of a, rank, b's
whole = pytest.mark.parametrize("is_whole", [False, True])
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def factors(size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool) -> tuple[Tensor, list[Tensor]]:
    first, (q, rank, p) = size
    return drawn(*first), [drawn(q, p)] if is_whole else [drawn(q, rank), drawn(rank, p)]


def matrix(first: Tensor, second: list[Tensor]) -> Tensor:
    return torch.kron(first, second[0] if len(second) == 1 else second[0] @ second[1])


@whole
@sizes
@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("by_chain", [True, False])
def test_a_product_and_its_gradients(
    size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool, behind: int, by_chain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not by_chain:
        monkeypatch.setattr(products, "_is_by_chain", lambda x: False)
    first, second = factors(size, is_whole)
    into = matrix(first, second).shape[1]
    x = drawn(2, 3, into, *(4, 5)[:behind])
    leaves = [x, first, *second]
    y = products.product(x, first, second, behind)
    right = (x.movedim(-1 - behind, -1) @ matrix(first, second).mT).movedim(-1, -1 - behind)
    torch.testing.assert_close(y, right, rtol=1e-11, atol=1e-11)
    grad_y = torch.randn_like(right)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, grad_y), torch.autograd.grad(right, leaves, grad_y), rtol=1e-11, atol=1e-11
    )


@sizes
def test_two_plain_products_are_differentiated_twice(size: tuple[tuple[int, int], tuple[int, int, int]]) -> None:
    first, second = factors(size, is_whole=False)
    x = drawn(3, matrix(first, second).shape[1])
    leaves = (x, first, *second)
    assert torch.autograd.gradcheck(products._AsTwo.apply, leaves)
    assert torch.autograd.gradgradcheck(products._AsTwo.apply, leaves)
    mapped = torch.func.vmap(lambda row: products._as_two(row, first, *second))(x)
    torch.testing.assert_close(mapped, products._as_two(*leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given", [0, 1, 2, 3])
def test_gradients_that_nobody_wants_are_not_made(given: int) -> None:
    first, second = factors(SIZES[0], is_whole=False)
    tensors = [drawn(3, matrix(first, second).shape[1]), first, *second]
    tensors = [tensor if i == given else tensor.detach() for i, tensor in enumerate(tensors)]
    y = products._AsTwo.apply(*tensors)
    right = tensors[0] @ matrix(tensors[1], tensors[2:]).mT
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), tensors[given]), torch.autograd.grad(right.sum(), tensors[given])
    )


def test_columns_behind_all_factors() -> None:
    weights = [drawn(2, 3), drawn(4, 2), drawn(3, 3)]
    right = drawn(18, 5)
    leaves = [right, *weights]
    y, expected = products.kronecker(weights, right), torch.kron(torch.kron(*weights[:2]), weights[2]) @ right
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
    )
    assert products.kronecker(weights, right[:, :0]).shape == (24, 0)


def test_halves_are_contracted_where_that_takes_fewer_multiply_adds() -> None:
    # 32·32 by 32·32: 2 · 32³ by factors; 3 · 8 · 32² by halves
    assert products.multiply_adds((32, 32), (32, 8), (8, 32)) == (65536, 24576)
    together, apart = products.multiply_adds((4, 4), (4, 3), (3, 4))
    assert apart > together


def test_small_products_are_left_to_who_makes_the_matrix() -> None:
    assert products.is_faster_made(torch.zeros(8, 64), (64, 64))
    assert not products.is_faster_made(torch.zeros(128, 64), (64, 64))
    assert not products.is_faster_made(torch.zeros(1, 128), (128, 128))


def test_what_is_no_model_and_what_has_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"take_over: model should be an nn\.Module, it is list"):
        adapters.take_over([nn.Linear(2, 2)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="take_over: Linear has no LoKr layers of PEFT or LyCORIS; make them with"):
        adapters.take_over(nn.Linear(2, 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="neither of which is installed; `pip install"):
        adapters.take_over(nn.Linear(2, 2))
    assert adapters.give_back(nn.Linear(2, 2)) == 0


def test_a_record_prints_layers_that_are_alike_once() -> None:
    record = Record({"a": "4 -> 4", "b": "4 -> 4", "c": "4 -> 8"}, {"d": "it has 2 groups"})
    assert str(record).split("\n") == [
        "3 LoKr layers taken over, 1 left to their own code",
        "  taken: a and 1 more: 4 -> 4",
        "  taken: c: 4 -> 8",
        "  left: d: it has 2 groups",
    ]


def test_its_import_brings_no_other_package() -> None:
    code = (
        "import sys; from factorlayer import adapters; "
        "assert not {'peft', 'lycoris', 'linear_operator'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([*python(), "-c", code], check=True)
