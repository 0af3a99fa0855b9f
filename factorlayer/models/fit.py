"""fit: a layer's weights by its outputs, where a projection goes by the matrix: least squares on samples.

What is made least is the sum over samples of ‖layer(x) - target‖², and of `ridge` times as much for weights that leave
a reference: directions that few samples have stay near that. convert(…, inputs=) fits the layers of a model so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from factorlayer.layers import FactorLinear
from factorlayer.maths.least_squares import least_squares, why_not
from factorlayer.maths.moments import Moments
from factorlayer.maths.project import in_double, to_dense
from factorlayer.stacks.stack import is_foreign

RIDGE = 1e-2  # with fewer samples than features it is needed, with many it costs little (docs/models.md)
SWEEPS = 50

Batches = Tensor | Iterable[Tensor]
Pairs = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Fit:
    """What fit did: ‖layer(inputs) - targets‖ / ‖targets‖ before and after, and in how many sweeps over the weights."""

    before: float
    after: float
    iterations: int
    samples: int
    unseen: int = 0  # at least so many directions of the inputs had no sample

    def __str__(self) -> str:
        found = (
            f"outputs differ by {self.after:.2e} of the targets, {self.before:.2e} before: {self.iterations} "
            f"iterations, {self.samples} samples"
        )
        if self.unseen:
            found += (
                f"; {self.unseen} directions of the inputs or more had no sample, where nothing but the ridge counts"
            )
        return found


def fit(
    layer: FactorLinear,
    inputs: Batches,
    targets: Batches,
    *,
    ridge: float = RIDGE,
    iterations: int = SWEEPS,
    before_activation: bool = False,
) -> Fit:
    """Weights and bias of a layer, in place, for which its outputs on inputs are nearest to targets.

    Alternating least squares in float64 from the weights as they are; the error is never larger afterwards. The same
    arguments give the same weights.

    Args:
        inputs, targets: [..., in_features] and [..., out_features] on the layer's device; or as many batches of them,
            any iterable, of which one at a time is in memory.
        ridge: what a change of the matrix costs in directions that no sample has, as a share of what it costs in an
            average one. 0: nothing but the samples counts.
        iterations: sweeps over the weights at most; it ends when one changes little.
        before_activation: that targets are what goes into the layer's activation. A layer that has one is refused
            without: no least squares are known behind it.
    """
    check_layer(layer, "fit")
    if layer.chain.activation != "identity" and not before_activation:
        raise ValueError(
            f"fit: the layer ends in activation={layer.activation!r}, behind which the best weights are no least "
            "squares; give targets of what goes into it, and before_activation=True"
        )
    return fit_pairs(layer, _pairs(inputs, targets), None, ridge, iterations, "fit")


def fit_pairs(
    layer: FactorLinear,
    pairs: Pairs,
    reference: Tensor | None,
    ridge: float,
    iterations: int,
    who: str,
    hold_bias: bool = False,
) -> Fit:
    """With a reference matrix for what samples don't say; None: that of the weights as they are. Errors speak for
    `who`."""
    if not ridge >= 0:
        raise ValueError(f"{who}: ridge should be a number not below 0, it is {ridge}")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"{who}: iterations should be a positive integer, it is {iterations!r}")
    spec, present = layer.spec, [in_double(weight) for weight in layer.weights]
    start, bias = to_dense(spec, present), None if layer.bias is None else in_double(layer.bias)
    moments = Moments(start, bias, bias is not None and not hold_bias)
    for number, (x, target) in enumerate(pairs):
        _check_batch(layer, x, target, number, who)
        moments.add(x.detach().reshape(-1, spec.in_features), target.detach().reshape(-1, spec.out_features))
    if not moments.samples:
        raise ValueError(f"{who}: inputs should have samples, there are none")
    if not (moments.inputs.isfinite().all() and moments.rest.isfinite().all() and start.isfinite().all()):
        raise ValueError(f"{who}: the layer's weights, or sums of squares of the samples, are infinite or no numbers")
    away = start.new_zeros(()) if reference is None else in_double(reference) - start
    scale = ridge * float(moments.inputs.diagonal().mean())
    A = moments.inputs + scale * torch.eye(spec.in_features, dtype=start.dtype, device=start.device)
    B = moments.rest + scale * away + start @ A
    at_start = moments.of_rest + scale * float(away.square().sum())
    weights, left = least_squares(spec, present, A, B, at_start, iterations)
    before = moments.error_of(start, bias)
    fitted = [weight.to(own.dtype) for weight, own in zip(weights, layer.weights, strict=True)]
    matrix = to_dense(spec, [in_double(weight) for weight in fitted])  # what rounding made of it
    found = moments.bias_for(matrix)
    found = None if found is None or layer.bias is None else found.to(layer.bias.dtype)
    after = moments.error_of(matrix, None if found is None else in_double(found))
    unseen = max(0, spec.in_features - moments.samples)
    if not after < before:
        return Fit(before, before, len(left) - 1, moments.samples, unseen)
    with torch.no_grad():
        for own, weight in zip(layer.weights, fitted, strict=True):
            own.copy_(weight)
        if layer.bias is not None and found is not None:
            layer.bias.copy_(found)
    return Fit(before, after, len(left) - 1, moments.samples, unseen)


def check_layer(layer: nn.Module, who: str) -> None:
    if not isinstance(layer, FactorLinear):
        raise TypeError(f"{who}: layer should be a FactorLinear, it is {type(layer).__name__}")
    why = why_not(layer.spec)
    if why is not None:
        raise ValueError(f"{who}: {why}")
    names = [
        *(f"weight_{i}" for i in range(len(layer.spec.weight_shapes))),
        *(["bias"] if layer.bias is not None else []),
    ]
    for name in names:
        parameter = layer._parameters.get(name)
        if parameter is None:
            raise ValueError(f"{who}: {name} is parametrized: torch.nn.utils.parametrize.remove_parametrizations first")
        if is_foreign(parameter):
            raise ValueError(f"{who}: {name} is a {type(parameter).__name__}; only plain parameters can be fitted")
        if parameter.is_meta or parameter.is_complex():
            what = "on the meta device" if parameter.is_meta else "complex"
            raise ValueError(f"{who}: {name} is {what}; there are least squares for real numbers alone")


def _pairs(inputs: Batches, targets: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(inputs, Tensor) != isinstance(targets, Tensor):
        raise TypeError("fit: inputs and targets should both be tensors, or both batches of them")
    if isinstance(inputs, Tensor):
        assert isinstance(targets, Tensor)
        yield inputs, targets
        return
    given, wanted = iter(inputs), iter(targets)
    number = 0
    while True:
        x, target = next(given, None), next(wanted, None)
        if x is None and target is None:
            return
        if x is None or target is None:
            more = "targets" if x is None else "inputs"
            raise ValueError(
                f"fit: there should be as many batches of inputs as of targets; {more} have more than {number}"
            )
        yield x, target
        number += 1


def _check_batch(layer: FactorLinear, x: Tensor, target: Tensor, number: int, who: str) -> None:
    for name, given, features, called in (
        ("inputs", x, layer.in_features, "in_features"),
        ("targets", target, layer.out_features, "out_features"),
    ):
        if not isinstance(given, Tensor):
            raise TypeError(f"{who}: batch {number} of {name} should be a tensor, it is {type(given).__name__}")
        if given.dim() == 0 or given.shape[-1] != features:
            raise ValueError(
                f"{who}: {name} should be [..., {called}={features}]; those of batch {number} have the shape "
                f"{tuple(given.shape)}"
            )
        if not given.is_floating_point():
            raise TypeError(f"{who}: {name} should be real floating-point numbers; batch {number} has {given.dtype}")
        if given.device != layer.weights[0].device:
            raise ValueError(
                f"{who}: {name} should be on the layer's device, {layer.weights[0].device}; batch {number} is on "
                f"{given.device}"
            )
        if not given.isfinite().all():
            raise ValueError(f"{who}: {name} should be finite; batch {number} has infinite numbers or NaN")
    if x.shape[:-1] != target.shape[:-1]:
        raise ValueError(
            f"{who}: inputs and targets should have as many samples; batch {number} has the shapes {tuple(x.shape)} "
            f"and {tuple(target.shape)}"
        )
