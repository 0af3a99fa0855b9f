"""How many samples each layer of a model gets: as many as are said, or as an example of its arguments brings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def rows_of(model: nn.Module, layers: Iterable[nn.Module], batch: int | Example, who: str) -> dict[int, int]:
    """By the id of the layer. With an example the model is called once, in eval mode and without gradients."""
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

    def record(module: nn.Module, given: tuple[Any, ...]) -> None:
        if id(module) in found and given and isinstance(given[0], Tensor):
            found[id(module)] += math.prod(given[0].shape[:-1])

    hook = register_module_forward_pre_hook(record)
    try:
        with evaluated(model), without_shortcuts():
            call(model, batch)
    finally:
        hook.remove()
    return found


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
def without_shortcuts() -> Iterator[None]:
    """Every layer is called as a module, so that hooks see it: by nn.TransformerEncoder, which in eval mode would read
    its layers' weights instead, and by models that are compiled."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def call(model: nn.Module, example: Example) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*(example if isinstance(example, tuple) else (example,)))
