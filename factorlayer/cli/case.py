"""A case of the command line and its tensors: a layer, block or model with x and grad_y, run by each implementation.

app.py builds a Case from what the user typed; compare.py and measure.py make the tensors of it and run them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from factorlayer.autograd.layer_ops import why_not_fused
from factorlayer.cli.subject import Own, Recurrent, Subject
from factorlayer.functional import Implementation
from factorlayer.fusion import Fused, fuse
from factorlayer.layers import FactorLinear
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import GATE_NAMES
from factorlayer.mlp import FactorMLP
from factorlayer.recurrences.gated import Gated
from factorlayer.stacks.stack import Layer, LayerStack, layer_of

VERSIONS: dict[str, Implementation] = {"v1": "naive", "v2": "batched", "v3": "fused"}
DENSE = "dense"  # nn.Linear in the place of the layers, which bench and profile may add to a problem's modules
DTYPES = {"f": torch.float32, "d": torch.float64, "h": torch.float16, "b": torch.bfloat16}


def usable_device(name: str | None, dtype: torch.dtype) -> torch.device:
    """The device named (none: CUDA where there is one), or a ValueError if nothing can be computed on it."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, dtype=dtype, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        count = torch.cuda.device_count()
        raise ValueError(
            f"the device should be one that computes {dtype} here: cpu"
            + (f" or cuda:0 … cuda:{count - 1}" if count else ", there is no CUDA device")
            + f"; it is {name!r} ({reason})"
        ) from None
    return device


@dataclass(frozen=True)
class Case:
    subject: Subject
    batch: int
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    def configuration(self) -> dict[str, Any]:
        """What was asked, for --json."""
        return {
            "batch": self.batch,
            **self.subject.configuration(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
        }


@dataclass(frozen=True)
class Call:
    """A call of a layer, somewhere in the module."""

    name: str
    layer: Layer
    rows: int  # that it was called with


class Problem:
    """A case's module and tensors, drawn in float64 on the CPU and cast: all dtypes see the same.

    `modules` are the implementations by name, with the same parameters: v1, v2, v3, and a user's model as it is.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        module = case.subject.make()
        x = torch.randn(case.batch, *case.subject.shape, dtype=torch.float64)
        if isinstance(case.subject, Recurrent):
            x = x.transpose(0, 1).contiguous()  # step by step, as nn.GRU has it
        self.module = module.to(case.device, case.dtype)
        self.x = x.to(case.device, case.dtype).requires_grad_()
        self.modules = {"model": module} if isinstance(case.subject, Own) else {}
        self.modules |= {version: run_by(module, name) for version, name in VERSIONS.items()}
        self.calls, y = self._first_call()
        self.grad_y = torch.randn(y.shape, dtype=torch.float64).to(case.device, case.dtype)

    def _first_call(self) -> tuple[list[Call], Tensor]:
        """The layers that a call of the module calls, and y. A layer with a hook is called by itself, whatever stack it
        is part of."""
        module, calls, hooks = self.modules["v1"], [], []

        def watch(name: str, part: nn.Module, layer: Layer) -> Any:
            def record(part: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> None:
                calls.append(Call(name, layer, math.prod(y.shape[:-1])))

            return part.register_forward_hook(record)

        for name, part in module.named_modules():
            layer = layer_of(part)
            if layer is not None:
                hooks.append(watch(name, part, layer))
        try:
            with torch.no_grad():
                y = module(self.x)
        except Exception as error:
            if not isinstance(self.case.subject, Own):
                raise
            raise ValueError(
                f"the model cannot be called with x {list(self.x.shape)}: {error}; --input gives the shape of a sample"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(y, Tensor):
            raise ValueError(f"the model should return a tensor; it returned {type(y).__name__}")
        if isinstance(module, Gated):
            calls = [
                Call(f"{kind}_{gate}", Layer(spec, Chain.of(spec, False, "identity")), math.prod(y.shape[:-1]))
                for cell in module.cells
                for kind, spec in (("input", cell.inputs), ("recurrent", cell.recurrent))
                for gate in GATE_NAMES
            ]
        if not calls:
            raise ValueError("the model called no nn.Linear and no FactorLinear: there is nothing to compare")
        return calls, y

    def in_float64(self) -> Problem:
        """The same problem in float64, for v1 alone."""
        exact = copy.copy(self)
        exact.case = replace(self.case, dtype=torch.float64)
        exact.module = copy.deepcopy(self.module).double()
        exact.modules = {"v1": run_by(exact.module, "naive")}
        exact.x = self.x.detach().double().requires_grad_()
        exact.grad_y = self.grad_y.double()
        return exact

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that get a gradient, by name."""
        return self._inputs_of(self.module)

    def _inputs_of(self, module: nn.Module) -> dict[str, Tensor]:
        return {"x": self.x, **{name: p for name, p in module.named_parameters() if p.requires_grad}}

    def forward(self, version: str) -> Tensor:
        y: Tensor = self.modules[version](self.x)
        return y

    def backward(self, y: Tensor, version: str = "") -> dict[str, Tensor]:
        """The gradients, by the name of what they are gradients of; zero if y does not depend on it. The versions have
        the same parameters, all but dense."""
        inputs = self._inputs_of(self.modules[DENSE] if version == DENSE else self.module)
        found = torch.autograd.grad(y, list(inputs.values()), self.grad_y, materialize_grads=True)
        return dict(zip(inputs, found, strict=True))

    def stacks(self) -> Iterator[tuple[nn.Module, LayerStack]]:
        """What v3 plans together, a layer that is in no stack by itself, each with the module that is called."""
        module = self.modules["v3"]
        stacks = [stack for part in module.modules() if isinstance(part, Fused | FactorMLP) for stack in part.stacks]
        members = {id(member) for stack in stacks for member in stack.members}
        yield from ((stack, stack) for stack in stacks)
        for name, part in module.named_modules():
            if isinstance(part, FactorLinear) and id(part) not in members and layer_of(part) is not None:
                yield part, LayerStack([(name or "FactorLinear", part, None)], part.implementation, "v3")

    def unavailable(self) -> dict[str, str]:
        """The implementations that cannot run here, each with the reason."""
        if isinstance(self.module, Gated):
            reason = self.module.why_not_fused(self.x)
            return {} if reason is None else {"v3": reason}
        for call in self.calls:
            reason = why_not_fused(self.x, call.layer.chain)
            if reason is not None:
                return {"v3": reason}
        return {}

    def explain(self) -> list[str]:
        """What the module was understood as, layer by layer."""
        module = self.modules["v3"]
        if isinstance(module, Gated):
            return [f"each gate's {c.name.split('_')[0]} matrix: {c.layer}" for c in self.calls[:: len(GATE_NAMES)]]
        if not isinstance(module, Fused | FactorMLP):
            return [str(call.layer) for call in self.calls]
        lines = _lines(module.understood())
        for name, part in module.named_modules():
            if name and isinstance(part, Fused | FactorMLP):
                lines += _lines([f"{name}: {line}" if i == 0 else line for i, line in enumerate(part.understood())])
        return lines


def _lines(told: list[str]) -> list[str]:
    """One of what is told, as an error's message, may have several."""
    return "\n".join(told).splitlines()


def run_by(module: nn.Module, implementation: Implementation) -> nn.Module:
    """The module with the same parameters, its layers run by one implementation."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, shared)
    alone = isinstance(copied, FactorLinear | Gated) or not list(copied.children())
    twin = copied if alone else fuse(copied, implementation)
    for part in twin.modules():
        if isinstance(part, FactorLinear | FactorMLP | Fused | Gated):
            part.implementation = implementation
    return twin
