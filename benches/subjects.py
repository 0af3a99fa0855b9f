"""Who is timed: v1, v2, v3, the dense layer, v2 under torch.compile, and pyfastkron, all on the same tensors.

`build` returns a Call for a name and a set of tensors, or raises UnavailableError with the reason, which
the tables show. No subject has a bias: the floor counts none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benches import peers
from benches.floor import DTYPES
from benches.workloads import Workload
from factorlayer import FactorLinear, factor_linear
from factorlayer.fused import why_not_fused

OURS = ("v1", "v2", "v3")
SUBJECTS = (*OURS, "dense", "compile", "fastkron")
LARGEST_DENSE = 1 << 30  # bytes of its weight
# Of relative differences from v2 (Frobenius) in y and grad_x: far above rounding, far below a wrong answer.
TOLERANCES = {"float64": 1e-12, "float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}


class UnavailableError(Exception):
    """Why a subject does not run a workload."""


@dataclass
class Tensors:
    """One set of inputs; gradients are wanted of x and of the weights."""

    x: Tensor
    grad_y: Tensor
    weights: list[Tensor]

    @classmethod
    def random(cls, workload: Workload, dtype: str) -> Tensors:
        spec, batch = workload.spec, workload.batch
        to: dict[str, Any] = {"dtype": DTYPES[dtype], "device": workload.device}
        x = torch.randn(batch, spec.in_features, **to).requires_grad_()
        grad_y = torch.randn(batch, spec.out_features, **to)
        # Scaled by the summands of each contraction: no dtype overflows.
        weights = [torch.randn(s, **to).div_(math.sqrt(s[-1])).requires_grad_() for s in spec.weight_shapes]
        return cls(x, grad_y, weights)


@dataclass
class Call:
    """A subject with its tensors; `note` is shown beside its times."""

    function: Callable[[Tensor], Tensor]
    x: Tensor
    grad_y: Tensor
    weights: list[Tensor]
    note: str = ""

    def run(self, of_pass: str) -> tuple[Tensor, ...]:
        """y, and with forward_backward grad_x and the weights' gradients."""
        if of_pass == "forward":
            with torch.no_grad():
                return (self.function(self.x),)
        y = self.function(self.x)
        return y, *torch.autograd.grad(y, (self.x, *self.weights), self.grad_y)


def build(name: str, workload: Workload, tensors: Tensors) -> Call:
    x, weights, note = tensors.x, tensors.weights, ""
    function: Callable[[Tensor], Tensor]
    if name in OURS:
        if name == "v3" and (reason := why_not_fused(x)) is not None:
            raise UnavailableError(reason)
        function = _layer(workload, name, weights)
    elif name == "compile":
        compiled = _compiled(workload, x.dtype)
        function = functools.partial(_apply_compiled, compiled, weights)
    elif name == "fastkron":
        try:
            function, weights, note = peers.fastkron(workload, x, weights)
        except peers.NotForFastKronError as reason:
            raise UnavailableError(str(reason)) from None
    else:
        linear = _dense(workload, x)
        function, weights = linear, [linear.weight]
    return Call(function, x, tensors.grad_y, weights, note)


def disagreement(call: Call, reference: tuple[Tensor, ...]) -> float:
    """The largest relative difference of y, with and without gradients wanted, and of grad_x from v2's."""
    y, grad_x = reference[:2]
    found = (*call.run("forward"), *call.run("forward_backward")[:2])
    return max(_difference(a, b) for a, b in zip(found, (y, y, grad_x), strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    with torch.no_grad():
        difference = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
    return math.inf if math.isnan(difference) else difference


def _layer(workload: Workload, implementation: str, weights: list[Tensor]) -> FactorLinear:
    spec = workload.spec
    layer = FactorLinear(
        spec.in_features,
        spec.out_features,
        bias=False,
        structure=spec.structure,
        factors=(spec.in_factors, spec.out_factors),
        rank=spec.rank,
        implementation=implementation,
        device="meta",
    )
    for i, weight in enumerate(weights):
        delattr(layer, f"weight_{i}")
        setattr(layer, f"weight_{i}", weight)  # a plain tensor, shared by all layers, that wants a gradient
    return layer


@functools.lru_cache(maxsize=1)
def _compiled(workload: Workload, dtype: torch.dtype) -> Callable[..., Tensor]:
    """v2 under torch.compile, once for all sets of tensors; the reset avoids the recompilation limit."""
    torch._dynamo.reset()

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return factor_linear(x, weights, structure=workload.structure, implementation="v2")

    return torch.compile(function, dynamic=False)


def _apply_compiled(compiled: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Tensor:
    return compiled(x, *weights)


def _dense(workload: Workload, x: Tensor) -> nn.Linear:
    spec = workload.spec
    size = spec.in_features * spec.out_features * x.element_size()
    if size > LARGEST_DENSE:
        raise UnavailableError(f"its weight would take {size / 2**30:.1f} GiB")
    return nn.Linear(spec.in_features, spec.out_features, bias=False, device=x.device, dtype=x.dtype)
