"""LoKr layers of PEFT and of LyCORIS, with their own products and with ours: the same outputs and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_place import put_into_lycoris, put_into_peft
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs

SIZES = [(12, 20), (64, 48), (17, 30), (96, 96)]  # 17 is prime: a factor of 1
RANKS = [1, 4, 64]  # of both halves, of the second one, of none
LEADING = [(5,), (2, 3), ()]
configurations = pytest.mark.parametrize(
    ("sizes", "rank", "both", "factor", "leading"),
    [
        (*case, LEADING[i % len(LEADING)])
        for i, case in enumerate(itertools.product(SIZES, RANKS, (False, True), (-1, 4)))
    ],
    ids=str,
)


def randomize(module: nn.Module) -> None:
    """Their layers begin as zeros."""
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64) / 4


def results(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    y = run(x)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    grad_y = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


@configurations
def test_peft(
    sizes: tuple[int, int], rank: int, both: bool, factor: int, leading: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    peft = pytest.importorskip("peft", reason="needs peft, of the extra `foreign`")
    base = nn.Sequential(nn.Linear(*sizes), nn.Tanh(), nn.Linear(sizes[1], sizes[0])).double()
    config = peft.LoKrConfig(
        r=rank, alpha=3, target_modules=["0", "2"], decompose_both=both, decompose_factor=factor, init_weights=False
    )
    model = peft.get_peft_model(base, config)
    randomize(model)
    x = torch.randn(*leading, sizes[0], dtype=torch.float64, requires_grad=True)
    right = results(model, model, x)
    calls = put_into_peft(monkeypatch.setattr)
    torch.testing.assert_close(results(model, model, x), right, rtol=1e-10, atol=1e-10)
    assert len(calls) == 2
    with torch.no_grad():
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(x), right[0], rtol=1e-10, atol=1e-10)


@configurations
def test_lycoris(
    sizes: tuple[int, int], rank: int, both: bool, factor: int, leading: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lokr = pytest.importorskip("lycoris.modules.lokr", reason="needs lycoris-lora, of the extra `foreign`")
    linear = nn.Linear(*sizes).double()

    def layer(bypass: bool) -> Any:
        return lokr.LokrModule(
            "layer", linear, lora_dim=rank, alpha=3, decompose_both=both, factor=factor, bypass_mode=bypass
        ).double()

    made, whole = layer(bypass=True), layer(bypass=False)
    randomize(made)
    whole.load_state_dict(made.state_dict())
    x = torch.randn(*leading, sizes[0], dtype=torch.float64, requires_grad=True)
    right = results(made, made, x)
    calls = put_into_lycoris(monkeypatch.setattr)
    torch.testing.assert_close(results(made, made, x), right, rtol=1e-10, atol=1e-10)
    assert calls
    torch.testing.assert_close(made(x), whole(x), rtol=1e-10, atol=1e-10)
