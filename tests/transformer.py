"""A small transformer, written out: a causal language model as GPT-2 is, its head's weight tied to the embedding."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WIDTH, VOCABULARY, LENGTH, HEADS = 24, 50, 12, 4


class Conv1D(nn.Module):
    """As transformers have it: the weight is [in_features, out_features]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """Conv1D, as if transformers had been imported."""
    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    return Conv1D


class Block(nn.Module):
    def __init__(self, dense: type[nn.Module]) -> None:
        super().__init__()

        def linear(p: int, q: int) -> nn.Module:
            return dense(q, p) if dense is Conv1D else dense(p, q)

        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"c_attn": linear(WIDTH, 3 * WIDTH), "c_proj": linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": linear(WIDTH, 4 * WIDTH), "c_proj": linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["c_attn"](self.ln_1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](gelu(self.mlp["c_fc"](self.ln_2(x))))


class Transformer(nn.Module):
    def __init__(self, dense: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(dense) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def tokens(batch: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, device: str = "cpu") -> Tensor:
    given = tokens().to(device)
    return cross_entropy(model(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
