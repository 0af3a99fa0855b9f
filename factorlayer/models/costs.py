"""What one layer has and takes, dense or structured: counted, predicted and measured, once for all that are alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from factorlayer.device.gpu import Gpu
from factorlayer.functional import Implementation
from factorlayer.layers import FactorLinear
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.models.dense import is_turned
from factorlayer.models.times import dense_spec, layer_us
from factorlayer.tuning.timing import medians


@dataclass(frozen=True)
class Cost:
    """Of one layer, or of all, in one pass."""

    parameters: int
    flops: int
    bytes: int  # read and written at least: x, the weights, y
    predicted_us: float | None = None
    measured_us: float | None = None

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(_sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


@dataclass(frozen=True)
class Side:
    """What a layer is, for its costs: those that are alike are measured once."""

    spec: LayerSpec
    bias: bool
    dtype: torch.dtype
    device: torch.device
    implementation: Implementation = "auto"

    @classmethod
    def of(cls, module: nn.Module) -> Side:
        """Attributes, not parameters: under hooks, as of pruning, a dense layer's are made of others."""
        bias = module.bias is not None
        if isinstance(module, FactorLinear):
            first = module.weights[0]
            return cls(module.spec, bias, first.dtype, first.device, module.implementation)
        weight: Any = module.weight
        out_features, in_features = reversed(weight.shape) if is_turned(module) else weight.shape
        return cls(dense_spec(in_features, out_features), bias, weight.dtype, weight.device)

    @property
    def is_dense(self) -> bool:
        return len(self.spec.in_factors) == 1 and self.spec.tied

    def module(self) -> nn.Module:
        """A layer with other weights, which takes as long."""
        spec = self.spec
        if self.is_dense:
            return nn.Linear(spec.in_features, spec.out_features, self.bias, self.device, self.dtype)
        return FactorLinear(
            spec.in_features,
            spec.out_features,
            self.bias,
            structure=spec.structure,
            factors=(spec.in_factors, spec.out_factors),
            rank=spec.rank,
            implementation=self.implementation,
            device=self.device,
            dtype=self.dtype,
        )


class Costs:
    """What layers take, each kind asked and measured once."""

    def __init__(self, gpu: Gpu | None, training: bool, measure: bool) -> None:
        self._gpu, self._training, self._measure = gpu, training, measure
        self._known: dict[tuple[Side, int], Cost] = {}

    def of(self, side: Side, samples: int) -> Cost:
        if (side, samples) not in self._known:
            self._known[side, samples] = self._cost(side, samples)
        return self._known[side, samples]

    def _cost(self, side: Side, samples: int) -> Cost:
        spec, training = side.spec, self._training
        flops = spec.flops(samples)
        if training:
            chain = Chain.of(spec, side.bias, "identity")
            flops += chain.backward_flops(samples, True, [True] * len(spec.weight_shapes))
        size = torch.empty(0, dtype=side.dtype).element_size()
        us = layer_us(spec, side.bias, side.dtype, samples, self._gpu, training) if self._gpu else None
        measured = self._measured_us(side, samples) if self._measure else None
        parameters = spec.parameter_count + side.bias * spec.out_features
        return Cost(parameters, flops, spec.elements_moved(samples) * size, us, measured)

    def _measured_us(self, side: Side, samples: int) -> float:
        if not samples:
            return 0.0
        layer = side.module()
        x = torch.randn(samples, side.spec.in_features, device=side.device, dtype=side.dtype)

        def forward() -> None:
            with torch.no_grad():
                layer(x)

        def both() -> None:
            y = layer(x)
            torch.autograd.grad(y, [x, *layer.parameters()], grad_y)

        if not self._training:
            return 1e6 * medians({"forward": forward}, side.device)["forward"]
        x.requires_grad_()
        grad_y = torch.randn(samples, side.spec.out_features, device=side.device, dtype=side.dtype)
        return 1e6 * medians({"both": both}, side.device)["both"]
