"""Modules of every kind, for tests of what PyTorch does with any module: each maps 12 features to as many or to 20."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from factorlayer import FactorLinear, FactorMLP, fuse

WIDTHS = [(3, 4), (4, 5), (3, 4)]


def _fused(implementation: str) -> nn.Module:
    return fuse(nn.Sequential(FactorLinear(12, 20), nn.GELU(), nn.Linear(20, 12), nn.Tanh()), implementation)


MODULES: dict[str, Callable[[str], nn.Module]] = {
    "layer": lambda way: FactorLinear(12, 20, activation="gelu", implementation=way),
    "learned": lambda way: FactorLinear(12, 20, activation=nn.PReLU(), implementation=way),
    "monarch": lambda way: FactorLinear(12, 20, False, structure="monarch", blocks=2, rank=2, implementation=way),
    "ranked": lambda way: FactorLinear(12, 12, rank=2, activation="tanh", implementation=way),
    "block": lambda way: FactorMLP(WIDTHS, activation="tanh", implementation=way),
    "gated": lambda way: FactorMLP(WIDTHS, activation="silu", gated=True, residual=True, implementation=way),
    "frozen": lambda way: FactorMLP(WIDTHS, activation="tanh", implementation=way).freeze(),
    "fuse": _fused,
}


def module(kind: str, implementation: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[kind](implementation).to(dtype)


def sample(*leading: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*leading, 12, dtype=dtype, generator=torch.Generator().manual_seed(1))
