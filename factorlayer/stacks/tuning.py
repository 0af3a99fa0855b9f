"""tune: a model's layers and stacks timed, each for the samples that it gets, and the faster implementation kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from factorlayer.autograd.runtime import class_of_batch
from factorlayer.layers import FactorLinear
from factorlayer.stacks.stack import LayerStack, RunsAsStacks
from factorlayer.tuning.candidates import Tuned
from factorlayer.tuning.choices import check_can_time

Example = Tensor | tuple[Any, ...]


def tune(model: nn.Module, batch: int | Example) -> list[Tuned]:
    """Times the fused and the batched implementation of each FactorLinear, FactorMLP and result of fuse in a model, and
    keeps what is faster for `auto`, as FactorLinear.warmup(batch, tune=True) does for one layer.

    `batch` is how many samples all of them get; or an example, a tensor or a tuple of the model's arguments, with which
    the model is called once, in eval mode and without gradients, to see how many samples each gets. With gradients
    enabled, training is timed as well for parts with parameters that need one. Returns a Tuned for each choice or for
    why there is none, which str() puts in words. What is measured is kept at once, so that an interrupted call is not
    lost.
    """
    return list(tuning(model, batch))


def tuning(model: nn.Module, batch: int | Example) -> Iterator[Tuned]:
    """Does what tune() does, and yields each result as it comes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune: model should be an nn.Module, it is {type(model).__name__}")
    if isinstance(batch, bool) or not isinstance(batch, int | Tensor | tuple):
        raise TypeError(
            "tune: batch should be a number of samples, or an example: a tensor or a tuple of the model's arguments; "
            f"it is {type(batch).__name__}"
        )
    if isinstance(batch, int) and batch < 1:
        raise ValueError(f"tune: batch should be a positive number of samples, it is {batch}")
    check_can_time("tune")
    parts = dict(parts_of(model))
    if not parts:
        raise ValueError(
            f"tune: the model should have a FactorLinear, a FactorMLP or what fuse returns, {type(model).__name__} has "
            "none; give tune what fuse(model) returns"
        )
    return _tuning(parts, _samples(model, parts, batch))


def _tuning(parts: dict[str, LayerStack | FactorLinear], samples: dict[str, list[int]]) -> Iterator[Tuned]:
    for name, part in parts.items():
        training = torch.is_grad_enabled() and any(p.requires_grad for p in _parameters(part))
        if not samples[name]:
            yield Tuned(name, None, "the example does not come to it", lasting=True)
        for rows in samples[name]:
            if isinstance(part, LayerStack):
                yield from part.tuned(rows, training)
            else:
                yield from part.tuned(rows, training, name)


def parts_of(model: nn.Module) -> Iterator[tuple[str, LayerStack | FactorLinear]]:
    """What auto chooses for: stacks, and layers that are in none, by name."""
    stacks = [model] if isinstance(model, LayerStack) else []
    stacks += [stack for part in model.modules() if isinstance(part, RunsAsStacks) for stack in part.stacks]
    members = {id(member) for stack in stacks for member in stack.members}
    for i, stack in enumerate(stacks):
        yield f"stack {i}", stack
    for name, part in model.named_modules():
        if isinstance(part, FactorLinear) and id(part) not in members:
            yield name or "FactorLinear", part


def _parameters(part: LayerStack | FactorLinear) -> Sequence[Tensor]:
    own = [part] if isinstance(part, FactorLinear) else part.members
    return [parameter for module in own for parameter in module.parameters()]


def _samples(
    model: nn.Module, parts: dict[str, LayerStack | FactorLinear], batch: int | Example
) -> dict[str, list[int]]:
    """How many samples each part gets: the largest number of each class of batch."""
    if isinstance(batch, int):
        return {name: [batch] for name in parts}
    found: dict[str, set[int]] = {name: set() for name in parts}
    names = {id(part): name for name, part in parts.items()}

    def record(module: nn.Module, given: tuple[Any, ...]) -> None:
        if id(module) in names and given and isinstance(given[0], Tensor) and given[0].numel():
            found[names[id(module)]].add(given[0].numel() // given[0].shape[-1])

    modes = [(part, part.training) for part in model.modules()]
    hook = register_module_forward_pre_hook(record)  # of no module's own, with which layers would run one by one
    try:
        model.eval()
        with torch.no_grad():
            model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        hook.remove()
        for part, mode in modes:
            part.training = mode
    return {name: _one_of_a_class(rows) for name, rows in found.items()}


def _one_of_a_class(rows: set[int]) -> list[int]:
    """The largest number of each class of batch."""
    return list({class_of_batch(number): number for number in sorted(rows)}.values())
