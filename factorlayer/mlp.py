"""FactorMLP: layers with activations between them, as one module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from factorlayer.activations.texts import UserActivation, activation_of, computed
from factorlayer.autograd.inputs import Input, are_several, concatenated
from factorlayer.autograd.record import Record, Recorded
from factorlayer.functional import Implementation, implementation_name
from factorlayer.layers import FactorLinear
from factorlayer.maths.spec import Structure
from factorlayer.stacks.stack import Activation, LayerStack, RunsAsStacks

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

    The layers are `layers[i]`, and `gates[i]` of a gated block: FactorLinear, or nn.Linear where dense.
    """

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
        sizes = [_sizes(width) for width in widths]
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
        # Stacks, one behind another, each with the gate that multiplies it, if it has one. They stand in a list, so
        # that they are no children: they own no parameters.
        self._stacks: list[tuple[LayerStack, LayerStack | None]] = []
        activations = [None if gated else self.activation] * (count - 1) + [self.output_activation]
        each = [(f"layers.{i}", self.layers[i], activations[i]) for i in range(count)]
        for i, gate in enumerate(self.gates or ()):
            gating = self._stack([(f"gates.{i}", gate, self.activation)])
            self._stacks.append((self._stack([each.pop(0)]), gating))
        self._stacks.append((self._stack(each), None))

    def _stack(self, members: Sequence[tuple[str, nn.Module, Activation]]) -> LayerStack:
        return LayerStack(members, self._implementation, "FactorMLP")

    @property
    def stacks(self) -> list[LayerStack]:
        """The stacks that its layers run as."""
        return [stack for both in self._stacks for stack in both if stack is not None]

    def forward(self, x: Input) -> Tensor:
        """Returns y [..., out] of x [..., in], or of a list of tensors as if it were concatenated along the
        features."""
        (stack, gate), *others = self._stacks
        y: Tensor = stack(x) if gate is None else gate(x) * stack(x)
        for stack, gate in others:
            y = stack(y) if gate is None else gate(y) * stack(y)
        return (concatenated(x) if are_several(x) else x) + y if self.residual else y

    def what_it_is(self) -> Record:
        activations = [layer.chain.activation for stack in self.stacks for layer in stack.layers]
        return {"activations": activations, "residual": self.residual}

    def _own_layers(self) -> list[FactorLinear]:
        return [layer for layer in (*self.layers, *(self.gates or ())) if isinstance(layer, FactorLinear)]

    def understood(self) -> list[str]:
        """The lines of explain(): one for each layer."""
        lines = ["FactorMLP, frozen:" if self.is_frozen else "FactorMLP:"]
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


def _sizes(width: Width) -> tuple[int, ...]:
    sizes = (width,) if isinstance(width, int) else tuple(width)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"FactorMLP: a width should be a positive number, or several; it is {width}")
    return sizes
