"""suggest: structures for a model's layers under a budget, those whose matrices are nearest to the layers' own.

Of each layer, Kronecker products of two balanced factors and Monarch matrices of K = L blocks are asked what they leave
and what they take, with all ranks that have fewer parameters and fewer FLOPs than the dense layer. The layers' errors,
‖W - W'‖² / ‖W‖², are added up, and what they take: from the smallest structure of each, the step is taken again and
again that lessens the error most for what it adds, of those on each layer's convex hull, until none fits the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from factorlayer.maths.spec import STRUCTURES, LayerSpec, Structure, resolve
from factorlayer.models.dense import bias_of, count_of, is_turned, matrix_of
from factorlayer.models.rows import Example, rows_of
from factorlayer.models.selection import Chosen, Selector, Settings, check_model, select, settings_of
from factorlayer.models.spectra import ranks, squares_left
from factorlayer.models.times import dense_spec, gpu_for, layer_us

Takes = Callable[[nn.Module, LayerSpec], float]
Of = Literal["parameters", "time"]
BLOCKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """A way to have one layer: structured, or, without a spec, as it is."""

    spec: LayerSpec | None
    takes: float  # parameters or microseconds
    error: float  # squared, relative


def suggest(
    model: nn.Module,
    budget: float,
    *,
    of: Of = "parameters",
    layers: Selector | Sequence[Selector] | None = None,
    structures: Sequence[Structure] = STRUCTURES,
    batch: int | Example | None = None,
    arch: int | None = None,
    training: bool = False,
) -> dict[str, Settings]:
    """A mapping for convert, from the layers' names to structures, that keeps a model within a budget.

    Args:
        budget: of the model's parameters: a share below 1, or how many there may be; with of="time": of what its linear
            layers are predicted to take on a GPU, a share below 1, or microseconds.
        layers: selectors, as convert has them, of the layers that may change; by default all linear ones.
        batch, arch, training: of="time" alone: how many samples each layer gets, or an example, as report has it; the
            compute capability of the GPU, by default the model's own; whether gradients count.

    The same model, budget and device give the same mapping.
    """
    _check(budget, of, structures, batch)
    check_model(model, "suggest")
    if layers is None and not any(_is_dense(*named) for named in model.named_modules()):
        raise ValueError(f"suggest: {type(model).__name__} has no dense linear layers; restore(model) brings them back")
    selectors = _selectors(layers)
    chosen, _ = select(model, {selector: dict(factors=1) for selector in selectors}, "suggest")
    modules = [each.place.module for each in chosen]
    takes = _takes(model, modules, of, batch, arch, training)
    ways = [_ways(each, structures, takes) for each in chosen]
    changeable = sum(way[0].takes for way in ways)
    fixed = count_of(model) - changeable if of == "parameters" else 0.0
    now = fixed + changeable
    allowed = budget * now if budget < 1 else budget
    unit = "parameters" if of == "parameters" else "us"
    if allowed >= now:
        raise ValueError(f"suggest: a budget of {budget} {unit} is no less than the {now:.0f} {unit} that there are")
    hulls = [_hull(way) for way in ways]
    least = fixed + sum(hull[0].takes for hull in hulls)
    if least > allowed:
        raise ValueError(
            f"suggest: a budget of {allowed:.0f} {unit} cannot be kept: with the smallest structures there are "
            f"{least:.0f}, of which {fixed:.0f} are not in layers that may change"
        )
    taken = zip(chosen, _spend(hulls, allowed - fixed), strict=True)
    return {each.place.name: settings_of(way.spec) for each, way in taken if way.spec is not None}


def _takes(
    model: nn.Module,
    modules: Sequence[nn.Module],
    of: Of,
    batch: int | Example | None,
    arch: int | None,
    training: bool,
) -> Takes:
    """What a layer takes with a spec in the place of its own matrix."""
    if of == "parameters" or batch is None:
        return lambda module, spec: spec.parameter_count
    device = matrix_of(modules[0]).device
    gpu = gpu_for(device, arch, "suggest")
    if gpu is None:
        raise ValueError(f"suggest: times are predicted for GPUs, the model is on {device}: arch=90 asks for one's")
    rows = rows_of(model, modules, batch, "suggest")

    def us(module: nn.Module, spec: LayerSpec) -> float:
        dtype = matrix_of(module).dtype
        return layer_us(spec, bias_of(module) is not None, dtype, rows[id(module)], gpu, training) or 0.0

    return us


def _check(budget: Any, of: str, structures: Sequence[str], batch: object) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(f"suggest: budget should be a share below 1, or a number above; it is {budget!r}")
    if of not in get_args(Of):
        raise ValueError(f"suggest: of should be 'parameters' or 'time', it is {of!r}")
    if not structures or not set(structures) <= set(STRUCTURES):
        raise ValueError(f"suggest: structures should be some of {', '.join(STRUCTURES)}; they are {structures!r}")
    if (of == "time") != (batch is not None):
        raise ValueError("suggest: of='time' and batch belong together: time depends on how many samples layers get")


def _is_dense(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_turned(module)


def _selectors(layers: Selector | Sequence[Selector] | None) -> list[Selector]:
    if layers is None:
        return [_is_dense]
    selectors = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]
    if not selectors:
        raise ValueError("suggest: layers should be selectors of the layers that may change, there are none")
    return selectors


def _ways(chosen: Chosen, structures: Sequence[str], takes: Takes) -> list[Candidate]:
    """The dense layer first."""
    module = chosen.place.module
    matrix = matrix_of(module)
    if matrix.is_meta:
        raise ValueError(f"suggest: {chosen.place.name} is on the meta device and has no weights to be near to")
    out_features, in_features = matrix.shape
    found = [Candidate(None, takes(module, dense_spec(in_features, out_features)), 0.0)]
    for spec in _shapes(in_features, out_features, structures):
        left = squares_left(spec, matrix)
        found += [Candidate(e, takes(module, e), left[e.rank - 1]) for e in ranks(spec)]
    return found


def _shapes(in_features: int, out_features: int, structures: Sequence[str]) -> list[LayerSpec]:
    """Of rank 1. Sizes without a balanced factorization have no Kronecker product here."""
    found = []
    if "kronecker" in structures:
        with contextlib.suppress(ValueError):
            found.append(resolve(in_features, out_features))
    if "monarch" in structures:
        counts = [count for count in BLOCKS if in_features % count == 0 and out_features % count == 0]
        found += [resolve(in_features, out_features, "monarch", blocks=count) for count in counts]
    return found


def _hull(ways: Sequence[Candidate]) -> list[Candidate]:
    """The lower convex hull of errors over what is taken, from the smallest on."""
    hull: list[Candidate] = []
    for way in sorted(ways, key=lambda way: (way.takes, way.error)):
        if hull and way.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], way):
            hull.pop()
        hull.append(way)
    return hull


def _gain(small: Candidate, large: Candidate) -> float:
    """How much less error there is for what is taken more."""
    return (small.error - large.error) / (large.takes - small.takes)


def _spend(hulls: Sequence[Sequence[Candidate]], allowed: float) -> list[Candidate]:
    at = [0] * len(hulls)
    spent = sum(hull[0].takes for hull in hulls)
    while True:
        steps = []
        for number, hull in enumerate(hulls):
            if at[number] + 1 < len(hull):
                small, large = hull[at[number]], hull[at[number] + 1]
                if spent + large.takes - small.takes <= allowed:
                    steps.append((-_gain(small, large), number))
        if not steps:
            return [hull[place] for hull, place in zip(hulls, at, strict=True)]
        _, number = min(steps)
        spent += hulls[number][at[number] + 1].takes - hulls[number][at[number]].takes
        at[number] += 1
