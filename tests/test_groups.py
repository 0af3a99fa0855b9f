"""param_groups: learning rates of structured layers, by the fan-ins of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformer import Transformer, loss_of

from factorlayer import FactorLinear, FactorMLP, convert, param_groups
from factorlayer.models.groups import fan_ins, multipliers

MONARCH = dict(structure="monarch", blocks=4, rank=2)


@pytest.mark.parametrize(
    ("settings", "fans"),
    [
        (dict(factors=((4, 6), (8, 12))), (4, 6)),
        (dict(factors=((4, 6), (8, 12)), rank=3), (12, 6)),  # weight_1 acts first, weight_0 sums the terms as well
        (dict(factors=((2, 3, 4), (4, 4, 6))), (2, 3, 4)),
        (MONARCH, (8, 6)),  # weight_1 [K, rank·L, p] of p = 6, weight_0 [L, s, K·rank] of 8
        (dict(structure="monarch", factors=((2, 3, 4), (4, 4, 6))), (2, 3, 4)),
    ],
    ids=str,
)
def test_fan_ins(settings: dict[str, object], fans: tuple[int, ...]) -> None:
    layer = FactorLinear(24, 96, **settings)
    assert fan_ins(layer.spec) == fans
    assert multipliers(layer.spec) == tuple(24 / fan / len(fans) for fan in fans)


@pytest.mark.parametrize("settings", [dict(factors=((4, 6), (8, 12)), rank=3), MONARCH, dict(factors=3)], ids=str)
def test_a_fan_in_is_what_an_output_of_the_contraction_sums(settings: dict[str, object]) -> None:
    """With all of a weight ones, and what enters it ones, its outputs are the fan-in, over that of all others."""
    layer = FactorLinear(24, 96, bias=False, **settings).double()
    with torch.no_grad():
        for weight in layer.weights:
            weight.fill_(1)
    product = 1
    for fan in fan_ins(layer.spec):
        product *= fan
    y = layer(torch.ones(1, 24).double())
    torch.testing.assert_close(y, torch.full_like(y, product))


def test_each_parameter_is_in_one_group_with_its_rate() -> None:
    model = Transformer()
    convert(model, {"*.mlp.*": MONARCH})
    groups = param_groups(model, lr=0.01, weight_decay=0.1)
    every = [parameter for group in groups for parameter in group["params"]]
    assert len(every) == len({id(parameter) for parameter in every}) == len(list(model.parameters()))
    assert all(group["weight_decay"] == 0.1 and group["lr"] == 0.01 * group["multiplier"] for group in groups)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    layer = model.h[0].mlp["c_fc"]
    assert rates[id(layer.weight_0)] == pytest.approx(0.01 * 24 / 8 / 2)
    assert rates[id(layer.weight_1)] == pytest.approx(0.01 * 24 / 6 / 2)
    assert rates[id(layer.bias)] == rates[id(model.wte.weight)] == rates[id(model.h[0].attn["c_proj"].weight)] == 0.01


def test_a_dense_model_is_one_group() -> None:
    (group,) = param_groups(Transformer(), lr=0.1)
    assert group["lr"] == 0.1 and group["multiplier"] == 1.0
    (first, *_) = param_groups(FactorMLP([4, (4, 4), (4, 4), 2]), lr=0.1)
    assert first["multiplier"] == 1.0


def test_optimizers_and_schedulers_take_them() -> None:
    model = Transformer()
    convert(model, {"*.mlp.*": MONARCH})
    optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    scheduler.step()
    assert all(group["lr"] == 0.5 * 3e-3 * group["multiplier"] for group in optimizer.param_groups)


def test_an_update_of_adam_moves_outputs_as_the_dense_layers_does() -> None:
    """What the rule is for: as layers get wider, a step of Adam moves the outputs of each as far."""
    moved: dict[str, list[float]] = {"by the rule": [], "by one rate": []}
    for width in (64, 256, 1024):
        for name, groups in moved.items():
            torch.manual_seed(0)
            layer = FactorLinear(width, width, structure="monarch", blocks=int(width**0.5))
            given = param_groups(layer, lr=1 / width) if name == "by the rule" else layer.parameters()
            optimizer = torch.optim.Adam(given, lr=1 / width)
            x, aim = torch.randn(1, width), torch.randn(1, width)
            before = layer(x)
            (before * aim).sum().backward()
            optimizer.step()
            groups.append((layer(x) - before).square().mean().sqrt().item())
    assert max(moved["by the rule"]) < 1.5 * min(moved["by the rule"])
    assert max(moved["by one rate"]) > 3 * min(moved["by one rate"])


def test_rates_that_mean_nothing() -> None:
    for lr in (0, -1.0, float("nan"), "1e-3", None):
        with pytest.raises(ValueError, match="param_groups: lr should be a positive number"):
            param_groups(nn.Linear(2, 2), lr=lr)
    with pytest.raises(TypeError, match=r"param_groups: model should be an nn\.Module, it is list"):
        param_groups([], lr=0.1)
