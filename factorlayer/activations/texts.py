"""What an activation is in a chain's text: a name, or a program, made by code that is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from factorlayer.activations.expression import Expression
from factorlayer.activations.named import activation_name

UserActivation = str | Expression | nn.Module | Callable[[Tensor], Tensor] | None


def activation_of(activation: Any) -> tuple[str, tuple[str, ...]]:
    """The chain's stage for what a user gives, and which parameters of the module p0, p1, … are. Raises ValueError and
    TypeError."""
    if activation is None or isinstance(activation, str):
        return activation_name(activation), ()
    from factorlayer.activations.tracing import program_of

    return program_of(activation)


# torch.compile takes what it returns as constant, until the function is another one.
activation_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def computed(stage: str) -> Expression | str | None:
    """What a module keeps of an activation that is no module: the stage's name, or, of a function, the expression that
    it computes, which can be pickled. The identity is None."""
    return Expression.parse(stage) if "/" in stage else None if stage == "identity" else stage


def scalars(module: Any, names: tuple[str, ...]) -> list[Tensor]:
    """The module's parameters as they are now: they may have been moved, replaced or parametrized."""
    found = []
    for name in names:
        owner = module
        for part in name.split("."):
            owner = getattr(owner, part)
        found.append(owner)
    return found
