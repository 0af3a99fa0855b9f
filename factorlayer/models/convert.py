"""convert, restore and load_dense: a model's dense layers swapped for structured ones, and back.

All that is new is made first, and then swapped in: a call that fails has changed nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from factorlayer.layers import FactorLinear
from factorlayer.maths.project import ProjectionError, in_double, project, projection_error
from factorlayer.models.conversion import Change, Conversion, spec_in_words
from factorlayer.models.dense import (
    ORIGIN,
    Origin,
    Place,
    bias_of,
    converted,
    count_of,
    hand_over,
    hand_over_marks,
    in_words,
    is_in_shards,
    load_whole,
    made_by_hooks,
    matrix_of,
    owned,
    weight_of,
)
from factorlayer.models.distil import check_batches, distil
from factorlayer.models.fit import RIDGE
from factorlayer.models.rows import Example
from factorlayer.models.selection import MOST_NAMED, Chosen, Settings, check_model, select

Initialize = Literal["project", "fresh"]
Weights = Literal["kept", "present"]


def convert(
    model: nn.Module,
    mapping: Mapping[Any, Settings | None],
    *,
    initialize: Initialize = "project",
    keep: bool = False,
    dry_run: bool = False,
    inputs: Iterable[Example] | None = None,
    ridge: float = RIDGE,
) -> Conversion:
    """Swaps a model's dense layers, nn.Linear and the Conv1D of transformers, for FactorLinear, in place.

    Args:
        mapping: selectors, and what the layers that they select become: {"*.mlp.*": dict(structure="monarch", blocks=4,
            rank=48)}. A selector is a pattern for names, in which * stands for anything, also for dots; a class of
            layers; or a function of name and module. Of several that select a layer, the first counts. None instead of
            a dict leaves layers as they are.
        initialize: "project": the structured matrix nearest to the layer's own; "fresh": drawn anew, with the variance
            of outputs that the layer's own weights give.
        keep: the original weights are kept, which restore(model) brings back.
        dry_run: returns the same Conversion, and changes nothing.
        inputs: batches for the model, with which layers are fitted to what they should return, weights and bias, from
            their projections on (models/distil.py): a list, or what else can be gone through again. Each is a tensor,
            a tuple of arguments, or a dict of them by name. The model is called in eval mode, with all batches twice
            for each layer.
        ridge: of that fit, as factorlayer.fit has it; what few samples show stays near the layer's own matrix.

    Names, dtype, device, requires_grad, mode and hooks stay, and the bias is the same parameter. Optimizers have to be
    made afterwards. Layers that are more than a weight and a bias of their own stay as they are, as with tied weights:
    the Conversion that is returned says which, and why. One that was named by itself is refused.
    """
    if initialize not in get_args(Initialize):
        raise ValueError(f"convert: initialize should be 'project' or 'fresh', it is {initialize!r}")
    if keep and initialize == "fresh":
        raise ValueError("convert: keep=True is for initialize='project': fresh layers have nothing to go back to")
    if inputs is not None:
        if initialize == "fresh" or dry_run:
            what = "dry_run=True calls no model" if dry_run else "initialize='fresh' starts from nothing"
            raise ValueError(f"convert: inputs fit layers from their projections on, and {what}: leave one of them out")
        check_batches(inputs)
    chosen, left = select(model, mapping, "convert", finite=initialize == "project")
    changes, made = [], []
    for each in chosen:
        weights, error = _projected(each) if initialize == "project" else (None, None)
        changes.append(_change(each, error))
        if not dry_run:
            layer = _structured(each, weights, error)
            vars(layer)[ORIGIN] = Origin.of(each.place.module, keep)
            made.append((each.place, layer))
    before = count_of(model)
    after = before + sum(change.parameters_after - change.parameters_before for change in changes)
    if inputs is not None:
        changes = _fitted(model, made, changes, inputs, ridge)
    swap(made)
    if made:
        _guard(model)
    return Conversion(tuple(changes), tuple(left), before, after, dry_run)


def _fitted(
    model: nn.Module,
    made: list[tuple[Place, FactorLinear]],
    changes: list[Change],
    batches: Iterable[Example],
    ridge: float,
) -> list[Change]:
    """Layers fitted, each with a bias of its own until all are: the dense ones still have theirs."""
    biases = [(layer, bias) for _, layer in made if (bias := layer.bias) is not None]
    for _, layer in made:
        if layer.bias is not None:
            layer.register_parameter("bias", nn.Parameter(layer.bias.detach().clone()))
    fits = distil(model, made, batches, ridge, swap)
    found = []
    for (place, layer), change in zip(made, changes, strict=True):
        if id(layer) in fits:
            matrix = matrix_of(place.module)
            layer.projection_error = projection_error(layer.spec, layer.weights, matrix, None, None)
            change = replace(change, error=layer.projection_error, fit=fits[id(layer)])
        found.append(change)
    with torch.no_grad():
        for layer, bias in biases:
            assert layer.bias is not None
            bias.copy_(layer.bias)
            layer.register_parameter("bias", bias)
    return found


def restore(model: nn.Module, weights: Weights | None = None) -> Conversion:
    """Brings the dense layers back that convert replaced, in place.

    Args:
        weights: "kept": those from before, values of the bias too, for which convert was told keep=True; "present": the
            structured weights as they are now, multiplied out; None: those that were kept, and where none were, the
            present ones.
    """
    if weights is not None and weights not in get_args(Weights):
        raise ValueError(f"restore: weights should be 'kept', 'present' or None, it is {weights!r}")
    check_model(model, "restore")
    found = list(converted(model))
    if not found:
        raise ValueError(f"restore: convert has made no layer of this {type(model).__name__}")
    owners = owned(model)
    sharded = is_in_shards(model)
    for place, layer, _ in found:
        if sharded and is_in_shards(layer):
            raise ValueError(
                f"restore: {place.name} cannot be restored: its weights are sharded (DTensor); restore a model of one "
                "process, into which load_converted loads what save_converted writes of this one"
            )
        if id(place.module) in owners:
            raise ValueError(
                f"restore: {place.name} cannot be restored: {owners[id(place.module)]}; restore what fuse was given, "
                "which is its .module, and fuse that again"
            )
        hooked = made_by_hooks(layer)
        if hooked:
            raise ValueError(
                f"restore: {place.name} cannot be restored: its {hooked[0]} is made of other parameters by a "
                "hook, which the dense layer would get: make it a parameter, as prune.remove does, then restore"
            )
    without = [place.name for place, _, origin in found if origin.weight is None]
    if weights == "kept" and without:
        raise ValueError(
            f"restore: no weights were kept of {_listed(without)}: convert keeps them with keep=True; "
            "weights='present' multiplies out those that are there"
        )
    changes, made, biases = [], [], []
    for place, layer, origin in found:
        kept = origin.weight is not None and weights != "present"
        dense = _dense(layer, origin, kept)
        hand_over(layer, dense)
        if kept and layer.bias is not None and origin.bias is not None:
            biases.append((layer.bias, origin.bias))
        after = f"{in_words(dense)}, {'kept' if kept else 'multiplied out'}"
        sizes = layer.parameter_count, count_of(dense)
        changes.append(Change(place.names, spec_in_words(layer.spec), after, *sizes))
        made.append((place, dense))
    before = count_of(model)
    swap(made)
    with torch.no_grad():
        for bias, values in biases:
            bias.copy_(values)
    unguard(model)
    return Conversion(tuple(changes), (), before, count_of(model))


def load_dense(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Conversion:
    """Loads a checkpoint of the model before convert into what convert made of it: dense weights are projected, all
    else is loaded as it is."""
    check_model(model, "load_dense")
    changes, state = [], OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # of nn.Module, by which modules know what wrote it
        vars(state)["_metadata"] = state_dict._metadata
    for place, layer, origin in converted(model):
        weights: list[Tensor] | None = None
        for name in place.names:
            key = f"{name}.weight"
            if key not in state:
                continue
            given = state.pop(key)
            matrix = given.T if origin.is_turned else given
            try:
                weights = weights or project(layer.spec, matrix)
            except ValueError as error:
                raise ValueError(f"load_dense: {key}: {error}") from None
            state |= {f"{name}.weight_{i}": weight for i, weight in enumerate(weights)}
        if weights is not None:
            left = projection_error(layer.spec, weights, matrix, None, None)
            sizes = matrix.numel() + (layer.bias is not None) * layer.out_features, layer.parameter_count
            changes.append(Change(place.names, f"dense {tuple(matrix.shape)}", spec_in_words(layer.spec), *sizes, left))
    if not changes:
        raise ValueError(
            "load_dense: the state_dict has no dense weight of a layer that convert made: model.load_state_dict loads "
            "one of the converted model"
        )
    load_whole(model, state, strict)
    return Conversion(tuple(changes), (), count_of(model), count_of(model))


def _projected(chosen: Chosen) -> tuple[list[Tensor], ProjectionError | None]:
    matrix, bias = matrix_of(chosen.place.module), bias_of(chosen.place.module)
    try:
        weights = project(chosen.spec, matrix)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"convert: {chosen.place.name} ({in_words(chosen.place.module)}): {error}") from error
    return weights, None if matrix.is_meta else projection_error(chosen.spec, weights, matrix, bias, None)


def _change(chosen: Chosen, error: ProjectionError | None) -> Change:
    module = chosen.place.module
    bias = bias_of(module)
    after = chosen.spec.parameter_count + (0 if bias is None else bias.numel())
    words = in_words(module), spec_in_words(chosen.spec)
    return Change(chosen.place.names, *words, count_of(module), after, error, chosen.settings)


def _structured(chosen: Chosen, weights: list[Tensor] | None, error: ProjectionError | None) -> FactorLinear:
    module, spec = chosen.place.module, chosen.spec
    matrix, bias = matrix_of(module), bias_of(module)
    layer = FactorLinear(
        spec.in_features,
        spec.out_features,
        bias is not None,
        structure=spec.structure,
        factors=(spec.in_factors, spec.out_factors),
        rank=spec.rank,
        implementation=chosen.implementation,
        device="meta" if weights is not None else matrix.device,
        dtype=matrix.dtype,
    )
    if weights is None:
        _draw(layer, matrix)
    else:
        for i, weight in enumerate(weights):
            layer.register_parameter(f"weight_{i}", nn.Parameter(weight))
        layer.projection_error = error
    for weight in layer.weights:
        weight.requires_grad_(weight_of(module).requires_grad)
    layer.register_parameter("bias", bias)
    hand_over(module, layer)
    hand_over_marks(module, layer)
    return layer


def _draw(layer: FactorLinear, matrix: Tensor) -> None:
    """Weights whose matrix has entries of the same mean square as the layer's own. Where these are zeros, the last
    weight in the chain is, and the others as in a fresh layer, so that gradients come to it. Where they are no numbers,
    as in memory into which a checkpoint is yet to be loaded, all weights are as in a fresh layer."""
    if matrix.is_meta:
        return
    square = float(in_double(matrix).abs().square().mean())
    if not math.isfinite(square):
        return
    fresh = (2 if matrix.is_complex() else 1) / (3 * layer.in_features)  # of reset_parameters
    with torch.no_grad():
        if not square:
            layer.weights[layer.spec.contractions[-1].weight].zero_()
            return
        scale = (square / fresh) ** (1 / (2 * len(layer.weights)))
        for weight in layer.weights:
            weight.mul_(scale)


def _dense(layer: FactorLinear, origin: Origin, kept: bool) -> nn.Module:
    present = layer.weights[0]
    if kept:
        assert origin.weight is not None
        matrix = origin.weight.to(present.device, present.dtype)
    else:
        matrix = layer.to_dense().detach()
    return origin.dense(matrix, layer.bias, any(weight.requires_grad for weight in layer.weights))


def swap(made: list[tuple[Place, Any]]) -> None:
    """Where a module's children are kept, which runs no code of the user's that may fail."""
    for place, module in made:
        for parent, name in place.parents:
            parent._modules[name] = module


def _guard(model: nn.Module) -> None:
    if not any(_is_guard(hook) for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(refuse_dense)


def unguard(model: nn.Module) -> None:
    for key, hook in list(model._load_state_dict_pre_hooks.items()):
        if _is_guard(hook):
            del model._load_state_dict_pre_hooks[key]


def _is_guard(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "hook", hook) is refuse_dense


def refuse_dense(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before a converted model loads anything: one error, where the checkpoint is of the model before. Also with
    strict=False, as nn.Module does not say here whether it is strict."""
    keys = [f"{prefix}{name}" for place, _, _ in converted(model) for name in place.names]
    dense = [f"{key}.weight" for key in keys if f"{key}.weight" in state_dict and f"{key}.weight_0" not in state_dict]
    if dense:
        raise RuntimeError(
            f"convert: the state_dict is of the model before it was converted: it has dense weights where this one has "
            f"structured layers ({_listed(dense)}). factorlayer.load_dense(model, state_dict) projects them and loads "
            "all else as it is; to load it unchanged, factorlayer.restore(model) first"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
