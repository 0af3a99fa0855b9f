"""Who is timed: v1, v2, v3, the dense layer, v2 under torch.compile, and pyfastkron, all on the same tensors.

`build` returns a Call for a name and a set of tensors, or raises UnavailableError with the reason, which
the tables show; the sweep has it build `auto`, too. The floor counts no bias, which is next to nothing of it. Of a
block, dense is nn.Linear and the activations one by one, with the block's own weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from benches import peers
from benches.floor import DTYPES
from benches.workloads import Block, Workload
from factorlayer.autograd.layer_ops import why_not_fused
from factorlayer.functional import Implementation

OURS = ("v1", "v2", "v3")
SUBJECTS = (*OURS, "dense", "compile", "fastkron")
LARGEST_DENSE = 1 << 30  # bytes of its weight
# The relative differences from v2 that are allowed, in the Frobenius norm: far above rounding, far below a wrong
# answer.
TOLERANCES = {"float64": 1e-12, "float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
EPS = {**{name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()}, "tf32": 2.0**-10}


class UnavailableError(Exception):
    """Why a subject does not run a workload."""


@dataclass
class Tensors:
    """One set of inputs; gradients are wanted of x and of the weights."""

    x: Tensor
    grad_y: Tensor
    weights: list[Tensor]  # parameters

    @classmethod
    def random(cls, workload: Workload, dtype: str) -> Tensors:
        inputs, outputs = workload.features
        to: dict[str, Any] = {"dtype": DTYPES[dtype], "device": workload.device}
        x = torch.randn(workload.batch, inputs, **to).requires_grad_()
        grad_y = torch.randn(workload.batch, outputs, **to)
        # Scaled by the summands of each contraction: no dtype overflows. A layer's bias is as large as its sums.
        scales = [1 if len(s) == 1 and not isinstance(workload, Block) else s[-1] for s in _shapes(workload)]
        drawn = [torch.randn(s, **to).div_(math.sqrt(n)) for s, n in zip(_shapes(workload), scales, strict=True)]
        weights: list[Tensor] = [nn.Parameter(weight) for weight in drawn]
        return cls(x, grad_y, weights)


@functools.cache
def _shapes(workload: Workload) -> list[torch.Size]:
    return [parameter.shape for parameter in workload.make("v2").parameters()]


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
    if name in OURS or name == "auto":
        if name == "v1" and isinstance(workload, Block):
            raise UnavailableError("for dense layers it is the same as v2")
        if name == "v3" and (reason := why_not_fused(x)) is not None:
            raise UnavailableError(reason)
        function = _holding(workload.make(cast(Implementation, name)), weights)
    elif name == "compile":
        compiled = _compiled(workload, x.dtype)
        function = functools.partial(_apply_compiled, compiled, weights)
    elif name == "fastkron":
        try:
            function, weights, note = peers.fastkron(workload, x, weights)
        except peers.NotForFastKronError as reason:
            raise UnavailableError(str(reason)) from None
    else:
        function, weights = _dense(workload, x, weights)
    return Call(function, x, tensors.grad_y, weights, note)


def disagreement(call: Call, reference: tuple[Tensor, ...]) -> tuple[float, float]:
    """The largest relative differences from v2: those of y, with and without gradients wanted, and those of the
    gradients that the reference has."""
    y, *gradients = reference
    with_gradients, *found = call.run("forward_backward")
    of_y = max(_difference(a, y) for a in (*call.run("forward"), with_gradients))
    return of_y, max(_difference(a, b) for a, b in zip(found, gradients, strict=False))


def tolerances(workload: Workload, dtype: str) -> tuple[float, float]:
    """The differences that are allowed of y and of gradients. Rounding moves about eps of what enters a relu across
    zero, where the derivative jumps, and a share s of other values makes a difference of sqrt(s)."""
    rounded = TOLERANCES[dtype] * math.sqrt(workload.depth)
    return rounded, rounded + math.sqrt(workload.jumps * EPS[dtype])


def wrong(call: Call, reference: tuple[Tensor, ...], allowed: tuple[float, float]) -> str | None:
    """A sentence on how much a subject differs from v2, if y or the gradients differ by more than is allowed; else
    None."""
    of_y, of_gradients = disagreement(call, reference)
    if of_y <= allowed[0] and of_gradients <= allowed[1]:
        return None
    return f"differs from v2 by {of_y:.1e}, in gradients by {of_gradients:.1e}"


def _difference(a: Tensor, b: Tensor) -> float:
    with torch.no_grad():
        difference = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
    return math.inf if math.isnan(difference) else difference


def _holding(module: nn.Module, weights: list[Tensor]) -> nn.Module:
    """The module with parameters that all subjects share."""
    for name, weight in zip(_names(module), weights, strict=True):
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, weight)
    return module


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@functools.lru_cache(maxsize=1)
def _compiled(workload: Workload, dtype: torch.dtype) -> Callable[..., Tensor]:
    """v2 under torch.compile, once for all sets of tensors; the reset avoids the recompilation limit."""
    torch._dynamo.reset()
    module = workload.make("v2")
    names = _names(module)

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), x)
        return y

    return torch.compile(function, dynamic=False)


def _apply_compiled(compiled: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> Tensor:
    return compiled(x, *weights)


def _dense(workload: Workload, x: Tensor, weights: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    if isinstance(workload, Block):
        return _holding(workload.dense(), weights), weights
    size = workload.dense_costs[0] * x.element_size()
    if size > LARGEST_DENSE:
        raise UnavailableError(f"its weight would take {size / 2**30:.1f} GiB")
    linear = workload.dense().to(x.dtype).to_empty(device=x.device)
    linear.reset_parameters()
    return linear, list(linear.parameters())
