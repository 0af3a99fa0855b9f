"""Learning rates for structured layers: groups of parameters for an optimizer, by the rule of the literature.

Qiu, Potapczynski, Finzi, Goldblum and Wilson, "Compute Better Spent: Replacing Dense Layers with Structured Matrices"
(ICML 2024, arXiv:2406.06248, section 3): by the maximal update parametrization, Adam's rate of a matrix goes with one
over its fan-in. Each weight of a structured layer is a matrix, or a batch of them, with a fan-in d_i of its own, which
is less than the layer's d; and as all of its n weights move at once, each takes an n-th, as in the authors' code:

    rate of weight i = rate of the dense layer · d / d_i / n
"""

from __future__ import annotations

from typing import Any

from torch import nn

from factorlayer.layers import FactorLinear
from factorlayer.maths.spec import LayerSpec
from factorlayer.models.selection import check_model


def fan_ins(spec: LayerSpec) -> tuple[int, ...]:
    """Of weight_0, weight_1, …: how many numbers each of its outputs sums. The last contraction of a sum of Kronecker
    products adds up the terms as well."""
    last = spec.contractions[-1]
    found = {c.weight: c.p * (spec.terms if c is last else 1) for c in spec.contractions}
    return tuple(found[i] for i in range(len(found)))


def multipliers(spec: LayerSpec) -> tuple[float, ...]:
    """Of weight_0, weight_1, …: their rates, over that of the dense layer."""
    fans = fan_ins(spec)
    return tuple(spec.in_features / fan / len(fans) for fan in fans)


def param_groups(model: nn.Module, *, lr: float, **settings: Any) -> list[dict[str, Any]]:
    """Groups for Adam or AdamW: weights of FactorLinear layers with the rates that belong to their fan-ins, and all
    other parameters with `lr`, the rate that the dense model would be trained with.

    `settings`, such as weight_decay, go into every group; each says its "multiplier" of lr. A scheduler that multiplies
    rates keeps their ratios.
    """
    check_model(model, "param_groups")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not lr > 0:
        raise ValueError(f"param_groups: lr should be a positive number, it is {lr!r}")
    of_weights = {
        id(weight): multiplier
        for layer in model.modules()
        if isinstance(layer, FactorLinear)
        for weight, multiplier in zip(layer.weights, multipliers(layer.spec), strict=True)
    }
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    for parameter in model.parameters():
        groups.setdefault(of_weights.get(id(parameter), 1.0), []).append(parameter)
    return [
        {**settings, "params": parameters, "lr": lr * multiplier, "multiplier": multiplier}
        for multiplier, parameters in sorted(groups.items())
        if parameters
    ]
