"""report: what a model's linear layers have and take, dense and structured, layer by layer and in all."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from factorlayer.layers import FactorLinear
from factorlayer.maths.project import project, projection_error
from factorlayer.maths.spec import LayerSpec
from factorlayer.models.conversion import spec_in_words, table
from factorlayer.models.costs import Cost, Costs, Side
from factorlayer.models.dense import Place, count_of, is_dense, is_in_shards, matrix_of, origin_of, places
from factorlayer.models.picture import draw
from factorlayer.models.rows import Example, rows_of
from factorlayer.models.selection import Chosen, Settings, check_model, select
from factorlayer.models.times import dense_spec, gpu_for


@dataclass(frozen=True)
class Line:
    """One layer, as it is or was dense, and as it is or would be."""

    name: str
    samples: int
    before: Cost
    after: Cost
    structure: str | None  # in words; of a layer that stays dense None
    error: float | None


@dataclass(frozen=True)
class Report:
    """str() is a table, json() the same as JSON, picture(path) draws it."""

    lines: tuple[Line, ...]
    before: Cost  # of all lines
    after: Cost
    parameters_before: int  # of the whole model
    parameters_after: int
    doing: str  # inference or training
    where: str  # what predictions and measurements are of

    def _column(self, name: str) -> list[Any]:
        return [getattr(line.after, name) for line in self.lines]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def json(self) -> str:
        return json.dumps(self.to_json(), allow_nan=False)

    def picture(self, path: str | Path) -> None:
        """Bars of what each layer has and takes, as an image (needs matplotlib)."""
        columns = [(name, title) for name, title in COLUMNS.items() if None not in self._column(name)]
        names = [line.name for line in self.lines]
        bars = {
            title: [(getattr(line.before, name), getattr(line.after, name)) for line in self.lines]
            for name, title in columns
        }
        draw(names, bars, [line.error for line in self.lines], f"{len(names)} layers, {self.doing}{self.where}", path)

    def __str__(self) -> str:
        columns = [name for name in COLUMNS if set(self._column(name)) != {None}]
        rows = [("layer", "structure", "samples", *(COLUMNS[name] for name in columns), "error")]
        for line in self.lines:
            numbers = (_before_and_after(line.before, line.after, name) for name in columns)
            error = "-" if line.error is None else f"{line.error:.2e}"
            rows.append((line.name, line.structure or "dense", f"{line.samples}", *numbers, error))
        numbers = (_before_and_after(self.before, self.after, name) for name in columns)
        rows.append(("all of these", "", "", *numbers, ""))
        lines = table(rows, "llr" + "r" * (len(columns) + 1))
        share = self.parameters_after / max(1, self.parameters_before)
        lines.append(
            f"the whole model: {self.parameters_before} -> {self.parameters_after} parameters ({share:.1%}); "
            f"{self.doing}{self.where}"
        )
        return "\n".join(lines)


COLUMNS = {
    "parameters": "parameters",
    "flops": "FLOPs",
    "bytes": "bytes",
    "predicted_us": "predicted us",
    "measured_us": "measured us",
}


def _before_and_after(before: Cost, after: Cost, name: str) -> str:
    found = [_short(getattr(cost, name)) for cost in (before, after)]
    return found[0] if found[0] == found[1] else " -> ".join(found)


def _short(number: float | None) -> str:
    """1.23M"""
    if number is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def report(
    model: nn.Module,
    batch: int | Example = 1,
    mapping: Mapping[Any, Settings | None] | None = None,
    *,
    training: bool = False,
    measure: bool = False,
    arch: int | None = None,
) -> Report:
    """What each linear layer of a model has and takes, dense and structured: parameters, FLOPs, bytes, the projection's
    error, predicted and measured time.

    Args:
        batch: how many samples each layer gets; or an example, a tensor, a tuple of the model's arguments or a dict of
            them by name, with which the model is called once to see.
        mapping: what convert would be given: the report is of what it would do. Without one, of what convert has done.
        training: gradients are counted too.
        measure: also time each layer by itself on the model's device; layers that are alike once.
        arch: the compute capability of a GPU that times are predicted for; by default the model's own, if it is on one.
    """
    check_model(model, "report")
    selected = [] if mapping is None else select(model, mapping, "report")[0]
    chosen = {id(each.place.module): each for each in selected}
    found = [place for place in places(model) if is_dense(place.module) or isinstance(place.module, FactorLinear)]
    if not found:
        raise ValueError(f"report: {type(model).__name__} has no linear layers")
    device = next(found[0].module.parameters()).device
    gpu = gpu_for(device, arch, "report")
    rows = rows_of(model, [place.module for place in found], batch, "report")
    costs = Costs(gpu, training, measure)
    lines = [_line(place, rows[id(place.module)], costs, chosen, mapping is not None) for place in found]
    before = functools.reduce(Cost.__add__, [line.before for line in lines])
    after = functools.reduce(Cost.__add__, [line.after for line in lines])
    now, saved = count_of(model), before.parameters - after.parameters
    before_whole, after_whole = (now + saved, now) if mapping is None else (now, now - saved)
    where = f"; predicted for a GPU of compute capability {gpu.arch / 10}" if gpu else ""
    where += f"; measured on {device}" if measure else ""
    doing = "training" if training else "inference"
    return Report(tuple(lines), before, after, before_whole, after_whole, doing, where)


def _line(place: Place, samples: int, costs: Costs, chosen: Mapping[int, Chosen], planned: bool) -> Line:
    """With a mapping, before is what there is; without, before is the dense layer of the same sizes."""
    module, each = place.module, chosen.get(id(place.module))
    now = Side.of(module)
    if each is not None:
        before, after = now, replace(now, spec=each.spec, implementation=each.implementation)
        error = _error_of(each.spec, module)
    else:
        dense = dense_spec(now.spec.in_features, now.spec.out_features)
        before, after = now if planned else replace(now, spec=dense, implementation="auto"), now
        error = _error_left(module)
    structure = None if after.is_dense else spec_in_words(after.spec)
    return Line(place.name, samples, costs.of(before, samples), costs.of(after, samples), structure, error)


def _error_of(spec: LayerSpec, module: nn.Module) -> float | None:
    matrix = matrix_of(module)
    return None if matrix.is_meta else projection_error(spec, project(spec, matrix), matrix, None, None).weight


def _error_left(module: nn.Module) -> float | None:
    """Of a layer that convert made: of its weights as they are, if those before were kept, or as it was projected."""
    if not isinstance(module, FactorLinear):
        return None
    origin = origin_of(module)
    kept = None if origin is None else origin.weight
    if kept is not None and not kept.is_meta and not is_in_shards(module):
        kept = kept.to(module.weights[0].device)
        return projection_error(module.spec, module.weights, kept, None, None).weight
    return None if module.projection_error is None else module.projection_error.weight
