"""Activations as people read them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from factorlayer import FactorLinear
from factorlayer.activations.formula import LONGEST, formula


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        ("gelu", "gelu"),
        (None, "identity"),
        (lambda x: -(x**3) / (1 - x), "(-((x * x) * x)) / (1 - x)"),
        (lambda x: (x - 1) - (x - 2 * x), "(x - 1) - (x - (2 * x))"),
        (nn.Hardtanh(-0.5, 2), "select(x <= -0.5, -0.5, select(2 <= x, 2, x))"),
        (nn.PReLU(), "select(0 < x, x, p0 * x)"),
    ],
)
def test_formula(activation: object, text: str) -> None:
    assert formula(FactorLinear(4, 4, activation=activation).chain.activation) == text


def test_what_is_too_long_is_left_out() -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.sin(x) * x
        return x

    text = formula(FactorLinear(4, 4, activation=nested).chain.activation)
    assert "…" in text and len(text) <= LONGEST
