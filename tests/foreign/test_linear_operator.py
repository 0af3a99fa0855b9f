"""linear_operator's own test cases of an operator, which its package brings, on Kronecker products that are ours."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from functools import reduce

import pytest
import torch
from in_place import go_our_way
from torch import Tensor

from factorlayer import adapters

pytest.importorskip("linear_operator", reason="needs linear_operator, of the extra `foreign`")

from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs


@pytest.fixture(autouse=True, scope="module")
def _ours() -> Iterator[None]:
    """In place for all tests of this file, of which some must have called it."""
    with pytest.MonkeyPatch.context() as patch, adapters.take_over_operators() as taken:
        go_our_way(patch.setattr)
        yield
    assert taken.calls["factorlayer"]


def positive(size: int, *batch: int) -> Tensor:
    """A symmetric positive matrix, near the identity: their tests solve in float32 to 1e-5."""
    half = torch.randn(*batch, size, size) / (4 * size)
    return (half @ half.mT + torch.eye(size)).requires_grad_()


class Products:
    """What all of them share: three factors, and the product written out."""

    seed = 0
    should_call_lanczos = True
    should_call_lanczos_diagonalization = False

    def create_linear_op(self) -> KroneckerProductLinearOperator:
        return KroneckerProductLinearOperator(*map(DenseLinearOperator, self.factors()))

    def evaluate_linear_op(self, operator: KroneckerProductLinearOperator) -> Tensor:
        def kron(a: Tensor, b: Tensor) -> Tensor:
            whole = torch.einsum("...ij,...kl->...ikjl", a, b)
            return whole.flatten(-4, -3).flatten(-2, -1)

        return reduce(kron, (each.tensor for each in operator.linear_ops))


class TestSquare(Products, LinearOperatorTestCase, unittest.TestCase):
    def factors(self) -> list[Tensor]:
        return [positive(size) for size in (3, 2, 4)]


class TestBatch(Products, LinearOperatorTestCase, unittest.TestCase):
    def factors(self) -> list[Tensor]:
        return [positive(size, 3) for size in (3, 2, 4)]


class TestRectangular(Products, RectangularLinearOperatorTestCase, unittest.TestCase):
    def factors(self) -> list[Tensor]:
        return [torch.randn(*size, requires_grad=True) for size in ((2, 3), (5, 2), (6, 4))]


class TestRectangularBatches(Products, RectangularLinearOperatorTestCase, unittest.TestCase):
    def factors(self) -> list[Tensor]:
        return [torch.randn(3, 4, *size, requires_grad=True) for size in ((2, 3), (5, 2), (6, 4))]
