"""take_over_operators: products of linear_operator's KroneckerProductLinearOperator with a matrix, and so GPyTorch's.

The package's module has two functions for them, of the operator and of its transpose. Ours stand in their places, and
call theirs where that is faster, or where a factor is no plain matrix.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from factorlayer.adapters.products import kronecker
from factorlayer.autograd.batch import LARGE_MEMBER, one_by_one

MODULE = "linear_operator.operators.kronecker_product_linear_operator"
NAMES = ("_matmul", "_t_matmul")
Product = Callable[[Sequence[Any], torch.Size, Tensor], Tensor]

_theirs: dict[str, Product] = {}
_in_place: list[TakenOperators] = []


class TakenOperators:
    """Ours in place until undo(), or until the block ends; calls says how many products were made by whom."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        if not _in_place:
            module = _module()
            for name in NAMES:
                _theirs[name] = getattr(module, name)
                setattr(module, name, _ours(name))
        _in_place.append(self)

    def undo(self) -> None:
        if self not in _in_place:
            return
        _in_place.remove(self)
        if not _in_place:
            module = _module()
            for name in NAMES:
                setattr(module, name, _theirs.pop(name))

    def __enter__(self) -> TakenOperators:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{self.calls.total()} products of Kronecker operators"]
        return "\n".join([*lines, *(f"  {count} by {words}" for words, count in self.calls.most_common())])


def take_over_operators() -> TakenOperators:
    """From now on, or in a with block, Kronecker operators of linear_operator multiply by factorlayer."""
    return TakenOperators()


def _module() -> ModuleType:
    if importlib.util.find_spec("linear_operator") is None:
        raise ModuleNotFoundError(
            "take_over_operators: linear_operator is not installed; `pip install linear_operator`, or "
            '`pip install "factorlayer[foreign]"`'
        )
    return importlib.import_module(MODULE)


def _ours(name: str) -> Product:
    turned = name == "_t_matmul"

    def matmul(operators: Sequence[Any], shape: torch.Size, right: Tensor) -> Tensor:
        weights = [_matrix(operator) for operator in operators]
        batch = torch.broadcast_shapes(shape[:-2], right.shape[:-2])
        reason = _why_theirs(operators, weights, batch, right)
        for each in _in_place:
            each.calls[reason or "factorlayer"] += 1
        if reason is not None:
            return _theirs[name](operators, shape, right)
        tensors = [right, *(weight.mT if turned else weight for weight in weights if weight is not None)]
        if not batch:
            return kronecker(tensors[1:], right)
        tensors = [tensor.expand(*batch, *tensor.shape[-2:]) for tensor in tensors]
        return one_by_one(lambda right, *weights: kronecker(weights, right), tensors, tuple(batch))

    return matmul


def _matrix(operator: Any) -> Tensor | None:
    """The tensor of a factor that is one, itself or as a triangle."""
    inner = getattr(operator, "_tensor", operator)  # of a triangle
    found = getattr(inner, "tensor", None) if type(inner).__name__ == "DenseLinearOperator" else None
    return found if isinstance(found, Tensor) else None


def _why_theirs(
    operators: Sequence[Any], weights: Sequence[Tensor | None], batch: torch.Size, right: Tensor
) -> str | None:
    for operator, weight in zip(operators, weights, strict=True):
        if weight is None:
            return f"linear_operator: a factor is a {type(operator).__name__}, whose structure is its own"
    if batch and (math.prod(right.shape[-2:]) < LARGE_MEMBER or 0 in batch):
        return "linear_operator: members of the batch are small, which one product takes together"
    return None
