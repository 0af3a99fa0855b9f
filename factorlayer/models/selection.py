"""Which layers of a model a mapping means, and as what: what convert, suggest and report ask.

A mapping has selectors and settings. A selector is a pattern for names ("*.mlp.c_fc", or a layer's name), a class of
layers, or a function of name and module that says yes or no. Of several that select one layer, the first in the mapping
counts. Settings are FactorLinear's own, as a dict; None leaves a layer as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from factorlayer.activations.nearest import did_you_mean, nearest
from factorlayer.functional import implementation_name
from factorlayer.maths.spec import LayerSpec, resolve
from factorlayer.models.dense import (
    Place,
    Sharing,
    in_words,
    looks_linear,
    matrix_of,
    owned,
    places,
    why_left,
)

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Settings = Mapping[str, Any]
SETTINGS = ("structure", "factors", "blocks", "rank", "implementation")
MOST_NAMED = 5  # layers or names that a message lists


@dataclass(frozen=True)
class Chosen:
    """A layer that is to be structured."""

    place: Place
    spec: LayerSpec
    implementation: Any = "auto"

    @property
    def settings(self) -> dict[str, Any]:
        """Those that say the same of this layer alone."""
        return settings_of(self.spec, self.implementation)


@dataclass(frozen=True)
class Left:
    """A layer that was selected and stays as it is."""

    name: str
    layer: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.layer}): {self.why}"


def settings_of(spec: LayerSpec, implementation: str = "auto") -> dict[str, Any]:
    sizes: dict[str, Any] = {"factors": (spec.in_factors, spec.out_factors)}
    if spec.blocks is not None:
        sizes = {"blocks": spec.blocks}
    settings = {"structure": spec.structure, **sizes, "rank": spec.rank}
    return settings if implementation == "auto" else settings | {"implementation": implementation}


def select(
    model: nn.Module, mapping: Mapping[Any, Settings | None], who: str, finite: bool = True
) -> tuple[list[Chosen], list[Left]]:
    """What a mapping means of a model. Errors speak for `who`. `finite` says that weights have to be numbers."""
    check_model(model, who)
    rules = _rules(mapping, who)
    sharing, owners = Sharing(model), owned(model)
    layers = [place for place in places(model) if looks_linear(place.module)]
    names = {name for place in layers for name in place.names}
    chosen: list[Chosen] = []
    left: list[Left] = []
    taken: dict[int, list[Place]] = {number: [] for number in range(len(rules))}
    selected = {number: 0 for number in taken}
    for place in layers:
        numbers = [number for number, (selector, _) in enumerate(rules) if _selects(selector, place, names)]
        for number in numbers:
            selected[number] += 1
        if not numbers:
            continue
        selector, settings = rules[numbers[0]]
        taken[numbers[0]].append(place)
        if settings is None:
            continue
        why = why_left(place, sharing, owners)
        if why is None:
            advice = (
                "" if selector in place.names else f"; {{{place.name!r}: None}} in front leaves this layer as it is"
            )
            if finite:
                _check_numbers(place, who)
            chosen.append(_chosen(place, settings, who, advice))
        elif selector in place.names:
            raise ValueError(f"{who}: {place.name} ({in_words(place.module)}) cannot be structured: {why}")
        else:
            left.append(Left(place.name, in_words(place.module), why))
    for number, (selector, _) in enumerate(rules):
        if not selected[number]:
            raise ValueError(f"{who}: {_no_layer(model, selector, layers)}")
        if not taken[number]:
            raise ValueError(
                f"{who}: {_shown(selector)} selects only layers that selectors before it take, of which the first "
                "counts: put it before them, or leave it out"
            )
    if not chosen and any(settings is not None for _, settings in rules):
        reasons = _listed([str(each) for each in left], "; ")
        raise ValueError(f"{who}: none of the layers that were selected can be structured: {reasons}")
    return chosen, left


def check_model(model: nn.Module, who: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model should be an nn.Module, it is {type(model).__name__}")
    wrapped = {type(part).__name__ for part in model.modules()} & {
        "DistributedDataParallel",
        "FullyShardedDataParallel",
    }
    if wrapped:
        raise ValueError(
            f"{who}: the model is wrapped in {wrapped.pop()}, which knows its parameters: wrap it afterwards"
        )


def _rules(mapping: Mapping[Any, Settings | None], who: str) -> list[tuple[Selector, Settings | None]]:
    if not isinstance(mapping, Mapping) or not mapping:
        raise TypeError(
            f"{who}: mapping should say which layers become what, as {{'*.mlp.*': dict(structure='monarch', "
            f"blocks=4)}}; it is {mapping!r}"
        )
    for selector, settings in mapping.items():
        is_class = isinstance(selector, type)
        if (is_class and not issubclass(selector, nn.Module)) or not (isinstance(selector, str) or callable(selector)):
            raise TypeError(
                f"{who}: a selector should be a pattern for names, a class of layers, or a function of name and "
                f"module; it is {selector!r}"
            )
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise TypeError(
                f"{who}: what {_shown(selector)} becomes should be a dict such as dict(structure='kronecker', rank=2), "
                f"or None to leave it; it is {settings!r}"
            )
        for name in settings:
            if name not in SETTINGS:
                meant = did_you_mean(nearest(str(name), SETTINGS))
                raise ValueError(
                    f"{who}: {_shown(selector)} has the setting {name!r}; there are {', '.join(SETTINGS)}{meant}"
                )
    return list(mapping.items())


def _selects(selector: Selector, place: Place, names: Collection[str]) -> bool:
    """A layer's own name is no pattern, whatever is in it."""
    if isinstance(selector, str):
        return selector in place.names if selector in names else any(fnmatchcase(n, selector) for n in place.names)
    if isinstance(selector, type):
        return isinstance(place.module, selector)
    return any(selector(name, place.module) for name in place.names)


def _check_numbers(place: Place, who: str) -> None:
    matrix = matrix_of(place.module)
    if not matrix.is_meta and not matrix.isfinite().all():
        raise ValueError(f"{who}: {place.name} ({in_words(place.module)}) has weights that are infinite or no numbers")


def _chosen(place: Place, settings: Settings, who: str, advice: str) -> Chosen:
    out_features, in_features = matrix_of(place.module).shape
    sizes = {name: value for name, value in settings.items() if name != "implementation"}
    try:
        implementation = implementation_name(settings.get("implementation", "auto"))
        return Chosen(place, resolve(in_features, out_features, **sizes), implementation)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: {place.name} ({in_words(place.module)}): {error}{advice}") from None


def _no_layer(model: nn.Module, selector: Selector, layers: Sequence[Place]) -> str:
    if not layers:
        return f"{type(model).__name__} has no linear layers"
    names = [name for place in layers for name in place.names]
    if isinstance(selector, str):
        module = dict(model.named_modules()).get(selector)
        if module is not None:
            inner = [name for name in names if name.startswith(f"{selector}.")]
            advice = f"; '{selector}.*' selects the {len(inner)} in it" if inner else ""
            return f"{selector!r} is a {type(module).__name__}, no linear layer{advice}"
    meant = did_you_mean(nearest(selector, names)) if isinstance(selector, str) else ""
    return f"{_shown(selector)} selects no layer; the model's linear layers are {_listed(names)}{meant}"


def _shown(selector: Selector) -> str:
    return repr(selector) if isinstance(selector, str) else getattr(selector, "__qualname__", repr(selector))


def _listed(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return between.join(words[:MOST_NAMED]) + more
