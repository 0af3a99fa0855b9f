"""From a call to an implementation: check what came, apply autocast, choose, run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from factorlayer.activations import ACTIVATIONS, activation_name
from factorlayer.batched import batched
from factorlayer.chain import Chain
from factorlayer.fused import fused, missing_extension, transforms_active, why_not_fused
from factorlayer.naive import naive
from factorlayer.spec import LayerSpec, spec_of_weights

IMPLEMENTATIONS = {"auto": "auto", "naive": "naive", "batched": "batched", "fused": "fused"}
IMPLEMENTATIONS |= {"v1": "naive", "v2": "batched", "v3": "fused"}


def implementation_name(implementation: str) -> str:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation should be one of {', '.join(IMPLEMENTATIONS)}; it is {implementation!r}")
    return IMPLEMENTATIONS[implementation]


def factor_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: str | None = None,
    structure: str = "kronecker",
    implementation: str = "auto",
) -> Tensor:
    """activation(x Wᵀ + bias), where W is the structured matrix that the weights stand for.

    Kronecker weights are [Qi, Pi] each, or [rank, Qi, Pi]; Monarch weights are [positions, Qi, Pi], and for two of
    them [L, s, K·rank] and [K, rank·L, p]: factorlayer/spec.py has the definitions.
    """
    try:
        spec = spec_of_weights(structure, [weight.shape for weight in weights])
        chain = Chain.of(spec, bias is not None, activation_name(activation))
        implementation = implementation_name(implementation)
    except ValueError as error:
        raise ValueError(f"factor_linear: {error}") from None
    return run(spec, chain, x, weights, bias, implementation, "factor_linear")


def run(
    spec: LayerSpec,
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    implementation: str,
    who: str,
) -> Tensor:
    """The layer on x [..., in], by the implementation named; `who` is named in errors."""
    x, weights, bias = _autocast(x, weights, bias)
    _check(who, spec, x, weights, bias)
    rows = x.reshape(-1, spec.in_features)
    chosen = choose(chain, rows, implementation, who)
    if chosen == "fused":
        y = fused(chain, rows, weights, bias)
    else:
        y = naive(spec, rows, weights) if chosen == "naive" else batched(chain, rows, weights)
        y = ACTIVATIONS[chain.activation](y if bias is None else y + bias)
    return y.reshape(*x.shape[:-1], spec.out_features)


def choose(chain: Chain, x: Tensor, implementation: str, who: str) -> str:
    """naive, batched or fused. auto takes the fastest that supports the case."""
    if implementation not in ("auto", "fused"):
        return implementation
    reason = why_not_fused(x)
    if implementation == "fused":
        if reason is not None:
            raise RuntimeError(f"{who}: implementation='fused' cannot run: {reason}; or use implementation='auto'")
        return "fused"
    if reason is not None:
        if missing_extension is not None:
            _warn_once(f"factorlayer runs the batched implementation, not the fused one: {reason}")
        return "batched"
    # Under torch.func the batched implementation maps and differentiates as one operation over all samples, where
    # the fused one is called for each; and one contraction is a plain matrix product.
    return "batched" if len(chain.contractions) == 1 or transforms_active() else "fused"


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _autocast(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
    """Under autocast, everything but float64 in autocast's dtype, as nn.Linear does it."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x, weights, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(x), [cast(weight) for weight in weights], None if bias is None else cast(bias)


def _check(who: str, spec: LayerSpec, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] != spec.in_features:
        raise ValueError(
            f"{who}: the last dimension of x should be in_features={spec.in_features}, x has the shape {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        advice = "give its real and imaginary parts one by one" if x.is_complex() else "convert it with x.float()"
        raise TypeError(f"{who}: x should be a floating-point tensor, it is {x.dtype}; {advice}")
    for i, weight in enumerate(weights):
        _check_same(who, f"weight_{i}", weight, x)
    if bias is not None:
        _check_same(who, "bias", bias, x)
        if bias.shape != (spec.out_features,):
            raise ValueError(
                f"{who}: bias should have the shape ({spec.out_features},), out_features; it has {tuple(bias.shape)}"
            )


def _check_same(who: str, name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{who}: x and {name} should have one dtype, x is {x.dtype} and {name} is {tensor.dtype}; "
            "convert one with .to(), or use torch.autocast"
        )
    if tensor.device != x.device:
        raise TypeError(
            f"{who}: x and {name} should be on one device, x is on {x.device} and {name} on {tensor.device}"
        )
