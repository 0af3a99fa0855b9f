"""How many samples each layer of a model gets: as many as are said, or as an example of its arguments brings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from factorlayer.stacks.stack import RunsAsStacks

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def rows_of(model: nn.Module, layers: Iterable[nn.Module], batch: int | Example, who: str) -> dict[int, int]:
    """By the id of the layer. With an example the model is called once, in eval mode and without gradients."""
    layers = list(layers)
    ids = [id(layer) for layer in layers]
    if isinstance(batch, int) and not isinstance(batch, bool):
        if batch < 1:
            raise ValueError(f"{who}: batch should be a positive number of samples, it is {batch}")
        return dict.fromkeys(ids, batch)
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise TypeError(
            f"{who}: batch should be a number of samples, or an example: a tensor, a tuple of the model's arguments or "
            f"a dict of them by name; it is {type(batch).__name__}"
        )
    found = dict.fromkeys(ids, 0)

    def record(module: nn.Module, x: Any, output: Tensor) -> None:
        found[id(module)] += math.prod(output.shape[:-1])

    with evaluated(model), without_shortcuts(), _thawed(model):
        listen(model, layers, batch, record)
    return found


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Every layer is called as a module, so that hooks see it: by nn.TransformerEncoder, which in eval mode would read
    its layers' weights instead, and by models that are compiled."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _eager():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _eager() -> AbstractContextManager[Any]:
    """Nothing is compiled; the compiler, whose import takes seconds, is not asked for that where nobody has it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and each module's own mode again afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def _thawed(model: nn.Module) -> Iterator[None]:
    """Stacks that are frozen call their layers, too, as stacks do whose layers have hooks."""
    stacks = {
        stack: stack.frozen for part in model.modules() if isinstance(part, RunsAsStacks) for stack in part.stacks
    }
    try:
        for stack in stacks:
            stack.frozen = None
        yield
    finally:
        for stack, frozen in stacks.items():
            stack.frozen = frozen


def call(model: nn.Module, example: Example) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*(example if isinstance(example, tuple) else (example,)))


def listen(
    model: nn.Module, modules: Iterable[nn.Module], example: Example, say: Callable[[nn.Module, Any, Tensor], None]
) -> None:
    """Calls a model, and says of each call of the modules what the input was behind others' hooks, and the output
    before them."""

    def hear(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        say(module, args[0] if args else next(iter(named.values())), output)

    hooks = [module.register_forward_hook(hear, prepend=True, with_kwargs=True) for module in modules]
    try:
        call(model, example)
    finally:
        for hook in hooks:
            hook.remove()
