"""FactorMLP: layers with activations between them, as one module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from factorlayer.activations.named import activate
from factorlayer.activations.texts import UserActivation, activation_of, computed
from factorlayer.autograd.inputs import Input, are_several, concatenated
from factorlayer.autograd.leaves import as_node, is_traced
from factorlayer.autograd.record import Record, Recorded
from factorlayer.functional import Implementation, implementation_name
from factorlayer.layers import FactorLinear
from factorlayer.maths.spec import Structure, plain
from factorlayer.stacks.stack import Activation, LayerStack, RunsAsStacks, layer_of

Width = int | Sequence[int]


class FactorMLP(Recorded, RunsAsStacks):
    """Layers one behind another: activation(x Wᵀ + b) for all but the last, which ends in output_activation.

    Args:
        widths: of the input, of each hidden layer, of the output: a number, or factors that multiply up to it. Between
            two widths in as many factors lies a structured layer, between any others a dense one.
        activation, output_activation: as FactorLinear has them; a module's parameters are shared by all hidden layers.
        gated: a hidden layer is activation(gate) · layer, two layers of one width side by side (silu: SwiGLU).
        residual: the input is added to the output.
        bias, structure, rank, implementation: as FactorLinear has them.

    The layers are `layers[i]`, and `gates[i]` of a gated block: FactorLinear, or nn.Linear where dense. Others may be
    put in their place, an adapter's or quantised ones; what is neither has all of them called one by one.
    """

    _built: Sequence[nn.Module] = ()  # the parts that _stacks are of

    def __init__(
        self,
        widths: Sequence[Width],
        *,
        activation: UserActivation = "relu",
        output_activation: UserActivation = None,
        gated: bool = False,
        residual: bool = False,
        bias: bool = True,
        structure: Structure = "kronecker",
        rank: int = 1,
        implementation: Implementation = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = [_sizes(width) for width in widths] if isinstance(widths, Iterable) else []
        if len(sizes) < 2:
            raise ValueError(f"FactorMLP: widths should be those of the input and the output at least; it is {widths}")
        try:
            self.activation, self.output_activation = _kept(activation), _kept(output_activation)
            self._implementation = implementation_name(implementation)
        except (TypeError, ValueError) as error:
            raise type(error)(f"FactorMLP: {error}") from None
        if residual and math.prod(sizes[0]) != math.prod(sizes[-1]):
            raise ValueError(
                f"FactorMLP: residual=True adds the input to the output; their widths are {widths[0]} and {widths[-1]}"
            )
        self.residual = residual

        def layer(i: int) -> nn.Module:
            p, q = sizes[i], sizes[i + 1]
            features = math.prod(p), math.prod(q)
            if len(p) != len(q) or len(p) == 1:
                return nn.Linear(*features, bias, device=device, dtype=dtype)
            return FactorLinear(
                *features,
                bias,
                structure=structure,
                factors=(p, q),
                rank=rank,
                implementation=implementation,
                device=device,
                dtype=dtype,
            )

        count = len(sizes) - 1
        self.layers = nn.ModuleList(layer(i) for i in range(count))
        self.gates = nn.ModuleList(layer(i) for i in range(count - 1)) if gated else None
        self._build()
        for given in (self.activation, self.output_activation):
            if isinstance(given, nn.Module):  # as FactorLinear has it; traced before, while its buffers have values
                given.to(device=device, dtype=None if dtype is not None and dtype.is_complex else dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("activation", "output_activation") and hasattr(self, name) and "_is_replica" not in self.__dict__:
            raise AttributeError(f"FactorMLP: {name} is traced when the block is built; build another block")
        super().__setattr__(name, value)

    def _parts(self) -> list[nn.Module]:
        """Its layers and gates as they are now."""
        own = self._modules  # an attribute of a module takes ten times as long
        parts: list[Any] = [*own["layers"]._modules.values()]  # type: ignore[union-attr]
        if "gates" in own:
            parts += own["gates"]._modules.values()  # type: ignore[union-attr]
        return parts

    def _build(self) -> None:
        """The stacks of its parts as they are now. There are none where one of them is of a class of its own."""
        parts, count = self._parts(), len(self.layers)
        layers, gates = parts[:count], parts[count:]
        # Stacks, one behind another, each with the gate that multiplies it, if it has one. They stand in a list, so
        # that they are no children: they own no parameters.
        stacks: list[tuple[LayerStack, LayerStack | None]] = []
        if all(map(_is_plain, parts)):
            activations = [None if gates else self.activation] * (count - 1) + [self.output_activation]
            each = [(f"layers.{i}", layer, activations[i]) for i, layer in enumerate(layers)]
            for i, gate in enumerate(gates):
                gating = self._stack([(f"gates.{i}", gate, self.activation)])
                stacks.append((self._stack([each.pop(0)]), gating))
            stacks.append((self._stack(each), None))
            made = [stack for both in stacks for stack in both if stack is not None]
            self._activations = [layer.chain.activation for stack in made for layer in stack.layers]
        self._stacks, self._built = stacks, parts

    def _stack(self, members: Sequence[tuple[str, nn.Module, Activation]]) -> LayerStack:
        return LayerStack(members, self._implementation, "FactorMLP")

    def _notice(self) -> bool:
        """Builds the stacks anew where other parts have taken the place of theirs; whether it runs as stacks."""
        if self._parts() != self._built:
            if is_dynamo_compiling() or "_is_replica" in self.__dict__:  # nn.DataParallel's, which lives for one call
                return False
            frozen = any(stack.frozen is not None for stack, _ in self._stacks)
            self._build()
            for stack in self.stacks if frozen else ():
                stack.freeze()
        return len(self._stacks) > 0  # bool of a list is nothing that PyTorch 2.11 compiles

    @property
    def stacks(self) -> list[LayerStack]:
        """The stacks that its layers run as."""
        self._notice()
        return [stack for both in self._stacks for stack in both if stack is not None]

    def forward(self, x: Input) -> Tensor:
        """Returns y [..., out] of x [..., in], or of a list of tensors as if it were concatenated along the
        features."""
        if type(x) is not Tensor and is_traced(x):
            return as_node(self, x)
        if not self._notice():
            y = self._one_by_one(concatenated(x) if are_several(x) else x)
        else:
            (stack, gate), *others = self._stacks
            y = stack(x) if gate is None else gate(x) * stack(x)
            for stack, gate in others:
                y = stack(y) if gate is None else gate(y) * stack(y)
        return (concatenated(x) if are_several(x) else x) + y if self.residual else y

    def _one_by_one(self, y: Tensor) -> Tensor:
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            if self.gates is None:
                y = _activated(layer(y), self.activation)
            else:
                y = _activated(self.gates[i](y), self.activation) * layer(y)
        return _activated(last(y), self.output_activation)

    def what_it_is(self) -> Record:
        self._notice()
        return {"activations": self._activations, "residual": self.residual}

    def _own_layers(self) -> list[FactorLinear]:
        return [layer for layer in (*self.layers, *(self.gates or ())) if isinstance(layer, FactorLinear)]

    def understood(self) -> list[str]:
        """The lines of explain(): one for each layer."""
        lines = ["FactorMLP, frozen:" if self.is_frozen else "FactorMLP:"]
        names = [f"layers.{i}" for i in range(len(self.layers))] + [f"gates.{i}" for i in range(len(self.gates or ()))]
        both = zip(names, self._parts(), strict=True)
        others = [f"{name} is {part._get_name()}" for name, part in both if not _is_plain(part)]
        lines += [f"  its layers one by one, because {', '.join(others)}"] if others else []
        for stack, gate in self._stacks:
            lines += [f"  {line}" for line in stack.explain()]
            lines += [f"  multiplied by {line}" for line in (gate.explain() if gate else [])]
        return [*lines, "  plus the input"] if self.residual else lines

    def extra_repr(self) -> str:
        activations = {"activation": self.activation, "output_activation": self.output_activation}
        parts = [f"{name}={given!r}" for name, given in activations.items() if not isinstance(given, nn.Module)]
        return ", ".join(parts + ["residual=True"] * self.residual)


def _kept(activation: UserActivation) -> Activation:
    """What the block keeps of an activation: a module itself, and of a function what it computes."""
    stage, _ = activation_of(activation)
    if isinstance(activation, nn.Module):
        return activation
    return computed(stage)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a stack can have it, with an activation behind it."""
    found = layer_of(layer)
    return found is not None and found.chain.activation == "identity"


def _activated(y: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, nn.Module):
        made: Tensor = activation(y)
        return made
    return activate(activation_of(activation)[0], y)


def _sizes(width: Width) -> tuple[int, ...]:
    sizes: tuple[Any, ...] = plain(tuple(width) if isinstance(width, list | tuple) else (width,))
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"FactorMLP: a width should be a positive number, or several; it is {width!r}")
    return sizes
