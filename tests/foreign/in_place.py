"""factorlayer in the place of other packages' Kronecker products.

Each `put_into_…` replaces one function of an installed package by factor_linear; what it returns is a list that grows
by one with each call of ours. As a plugin of pytest it does so for whatever suite runs, theirs included:

    PYTHONPATH=tests/foreign python -m pytest -p in_place path/of/their/tests
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from factorlayer import factor_linear

Replace = Callable[[Any, str, Any], None]  # as pytest.MonkeyPatch.setattr
Calls = list[str]
IMPLEMENTATION = "fused"


def product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x (w1 ⊗ w2 ⊗ …)ᵀ."""
    return factor_linear(x, list(weights), implementation=IMPLEMENTATION)


def put_into_linear_operator(replace: Replace) -> Calls:
    """In the products of KroneckerProductLinearOperator with a matrix, its own and its transpose's. A batch of
    operators has other weights for each, which are one product of ours after the other."""
    from linear_operator.operators import kronecker_product_linear_operator as module

    calls: Calls = []

    def multiply(weights: list[Tensor], right: Tensor, batch: torch.Size) -> Tensor:
        weights = [w.expand(*batch, *w.shape[-2:]) for w in weights]
        right = right.expand(*batch, *right.shape[-2:])
        if not batch:
            return product(right.mT, weights).mT
        return torch.stack([multiply([w[i] for w in weights], right[i], batch[1:]) for i in range(batch[0])])

    def ours(transposed: bool) -> Callable[..., Tensor]:
        def matmul(operators: Sequence[Any], shape: torch.Size, right: Tensor) -> Tensor:
            calls.append("linear_operator")
            weights = [operator.to_dense() for operator in operators]
            weights = [w.mT for w in weights] if transposed else weights
            return multiply(weights, right, torch.broadcast_shapes(shape[:-2], right.shape[:-2]))

        return matmul

    replace(module, "_matmul", ours(transposed=False))
    replace(module, "_t_matmul", ours(transposed=True))
    return calls


def put_into_peft(replace: Replace) -> Calls:
    """In LoKr's linear layers, which else make the whole of w1 ⊗ w2. Dropout of its rows needs it as a whole."""
    from peft.tuners.lokr import layer as module

    calls: Calls = []
    theirs = module.Linear._get_delta_activations

    def ours(self: Any, adapter: str, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        if self.training and self.rank_dropout[adapter]:
            return theirs(self, adapter, x, *rest, **named)
        calls.append("peft")
        w1, w2 = (
            getattr(self, name)[adapter]
            if adapter in getattr(self, name)
            else getattr(self, f"{name}_a")[adapter] @ getattr(self, f"{name}_b")[adapter]
            for name in ("lokr_w1", "lokr_w2")
        )
        return product(self._cast_input_dtype(x, w1.dtype), [w1, w2]) * self.scaling[adapter]

    replace(module.Linear, "_get_delta_activations", ours)
    return calls


def put_into_lycoris(replace: Replace) -> Calls:
    """In LoKr's linear layers in bypass mode; in the other one they make the whole of w1 ⊗ w2."""
    from lycoris.modules import lokr as module

    calls: Calls = []

    def ours(
        x: Tensor, w1: Any, w1a: Any, w1b: Any, w2: Any, w2a: Any, w2b: Any, t: None = None, scale: float = 1.0
    ) -> Tensor:
        calls.append("lycoris")
        return product(x, [w1a @ w1b if w1 is None else w1, w2a @ w2b if w2 is None else w2]) * scale

    replace(module, "kron_bypass", ours)
    return calls


PACKAGES = {"linear_operator": put_into_linear_operator, "peft": put_into_peft, "lycoris": put_into_lycoris}
_all: list[Calls] = []


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: in all of them that are installed."""
    _all.extend(put(setattr) for name, put in PACKAGES.items() if importlib.util.find_spec(name) is not None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    calls = [call for found in _all for call in found]
    counts = ", ".join(f"{calls.count(name)} in {name}" for name in PACKAGES)
    terminalreporter.write_line(f"products that factorlayer made: {counts}")
