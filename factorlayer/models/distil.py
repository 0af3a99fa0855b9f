"""The layers that convert makes, fitted one by one to what the dense ones compute in the model.

In the order in which the model calls them: targets are the outputs of the dense layer in the model as it was, inputs
are those that the layer gets behind the layers that were fitted before it, so that it makes up for what these leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from factorlayer.layers import FactorLinear
from factorlayer.models.dense import Place, Sharing, bias_of, matrix_of
from factorlayer.models.fit import SWEEPS, Fit, fit_pairs
from factorlayer.models.rows import Example, evaluated, listen, without_shortcuts

Made = Sequence[tuple[Place, FactorLinear]]
Record = tuple[Tensor, Tensor]  # what a layer was called with, and returned


def check_batches(batches: Any) -> None:
    if isinstance(batches, Tensor | tuple | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            "convert: inputs should be batches, such as a list, each a tensor, a tuple of the model's arguments or a "
            f"dict of them by name; it is a {type(batches).__name__}"
        )
    if isinstance(batches, Iterator):
        raise TypeError(
            f"convert: inputs should be batches that can be gone through again for each layer, such as a list; a "
            f"{type(batches).__name__} is at its end after the first"
        )


def distil(
    model: nn.Module, made: Made, batches: Iterable[Example], ridge: float, swap: Callable[[Any], None]
) -> dict[int, Fit]:
    """Fits layers that are to be swapped in, and swaps none: the model is as it was. By the id of a layer; those that
    the model does not call are not among them."""
    fits: dict[int, Fit] = {}
    sharing = Sharing(model)
    ready: list[tuple[Place, nn.Module]] = []
    with evaluated(model), without_shortcuts():
        for place, layer in _in_order(model, made, batches):
            bias = bias_of(place.module)
            held = bias is not None and bool(sharing.others(place.module, bias))
            pairs = _pairs(model, place, ready, batches, swap)
            who = f"convert: {place.name}"
            fits[id(layer)] = fit_pairs(layer, pairs, matrix_of(place.module), ridge, SWEEPS, who, hold_bias=held)
            ready.append((place, layer))
    return fits


def _pairs(
    model: nn.Module,
    place: Place,
    ready: list[tuple[Place, nn.Module]],
    batches: Iterable[Example],
    swap: Callable[[Any], None],
) -> Iterator[Record]:
    """Inputs of a dense layer behind those that are ready, and its outputs in the model as it was."""
    dense = [(each, each.module) for each, _ in ready]
    for batch in _checked(batches):
        wanted = given = _records(model, place.module, batch)
        if ready:
            try:
                swap(ready)
                given = _records(model, place.module, batch)
            finally:
                swap(dense)
        if len(given) != len(wanted):
            raise ValueError(
                f"convert: {place.name} is called {len(wanted)} times with a batch, and {len(given)} times where "
                "layers before it are structured: it cannot be fitted in this model"
            )
        for (x, _), (_, target) in zip(given, wanted, strict=True):
            yield x, target


def _in_order(model: nn.Module, made: Made, batches: Iterable[Example]) -> Made:
    """As the first batch comes through them; without those that it does not."""
    first = next(_checked(batches), None)
    if first is None:
        raise ValueError("convert: inputs should have batches, there are none")
    by_module = {id(place.module): (place, layer) for place, layer in made}
    calls: list[int] = []
    listen(model, [place.module for place, _ in made], first, lambda module, x, output: calls.append(id(module)))
    if not calls:
        raise ValueError("convert: with inputs the model calls none of the layers that it was to fit")
    return [by_module[number] for number in dict.fromkeys(calls)]


def _checked(batches: Iterable[Example]) -> Iterator[Example]:
    for batch in batches:
        if not isinstance(batch, Tensor | tuple | Mapping):
            raise TypeError(
                "convert: each batch of inputs should be a tensor, a tuple of the model's arguments or a dict of them "
                f"by name; one is a {type(batch).__name__}"
            )
        yield batch


def _records(model: nn.Module, module: nn.Module, batch: Example) -> list[Record]:
    """Of each call of a module in a call of the model. Copies: what comes behind may write over them."""
    found: list[Record] = []
    listen(model, [module], batch, lambda _, x, output: found.append((x.clone(), output.clone())))
    return found
