"""Converted models as safetensors files, which say what convert did: so that one call makes such a model again.

Weights that a model has under several names are written once, under the first, as safetensors demands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorlayer.autograd.layer_ops import is_sharded
from factorlayer.models.conversion import Conversion
from factorlayer.models.convert import convert, swap, unguard
from factorlayer.models.dense import converted, load_whole, memory_of, places
from factorlayer.models.selection import check_model, settings_of

KEY = "factorlayer.convert"  # of the file's metadata: the mapping, as JSON
MISSING = "needs safetensors, which is not installed: pip install safetensors"


def mapping_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What convert has made of a model's layers, by name."""
    return {place.name: settings_of(layer.spec, layer.implementation) for place, layer, _ in converted(model)}


def save_converted(model: nn.Module, path: str | Path) -> None:
    """Writes a model's state_dict as safetensors, with what load_converted needs. A model whose parameters are DTensors
    is saved by all its processes together, of which the first writes, and has whole weights in the file."""
    check_model(model, "save_converted")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"save_converted {MISSING}") from error
    first = {names[0] for names in _names(model)}
    state = {name: value for name, value in model.state_dict().items() if name in first}
    mesh = next((value.device_mesh for value in state.values() if is_sharded(value)), None)
    whole = {name: (value.full_tensor() if is_sharded(value) else value).contiguous() for name, value in state.items()}
    try:
        if mesh is None or not any(mesh.get_coordinate() or ()):
            save_file(_apart(whole), path, metadata={"format": "pt", KEY: json.dumps(mapping_of(model))})
    except SafetensorError as error:
        raise OSError(f"save_converted: {path} cannot be written: {error}") from error
    finally:
        for group in [] if mesh is None else mesh.get_all_groups():
            torch.distributed.barrier(group)  # the file is there when any process goes on


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In memory that no two share, as safetensors demands: what overlaps another tensor, as a part of it, is copied."""
    found: dict[str, Tensor] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for name, value in state.items():
        begin, end = value.data_ptr(), value.data_ptr() + value.nbytes
        runs = taken.setdefault(value.untyped_storage().data_ptr(), [])
        overlaps = any(begin < other_end and other < end for other, other_end in runs)
        runs.append((begin, end))
        found[name] = value.clone() if overlaps else value
    return found


def load_converted(model: nn.Module, path: str | Path) -> Conversion | None:
    """Converts a model as a file of save_converted says, and loads it. None says that there was nothing to convert, as
    with a file of the dense model, or where the model has been converted so already: one whose parameters are DTensors
    has to be, and each process takes its own part from the file. Where the file does not fit, the layers are the dense
    ones again; what else fits has been loaded then, as by load_state_dict."""
    check_model(model, "load_converted")
    state, mapping = read(path)
    present = mapping_of(model)
    for name, settings in mapping.items():
        if name in present and (there := _structure(present[name])) != _structure(settings):
            raise ValueError(
                f"load_converted: {name} is structured otherwise in {path} than in the model, in which it is {there}; "
                f"the file has {settings}: load it into the model as it was before convert, or restore(model) first"
            )
    missing = {name: settings for name, settings in mapping.items() if name not in present}
    before = [(place, place.module) for place in places(model)]
    try:
        done = convert(model, missing, initialize="fresh") if missing else None
    except ValueError as error:
        raise ValueError(f"load_converted: {path} does not fit the model: {error}") from error
    try:
        load_whole(model, completed(model, state))
    except Exception:
        swap(before)
        if not present:
            unguard(model)
        raise
    return done


def _structure(settings: Any) -> Any:
    """As JSON has it, and without what runs the layer."""
    found = json.loads(json.dumps(settings))
    return {key: value for key, value in found.items() if key != "implementation"} if isinstance(found, dict) else found


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and what convert did."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"load_converted {MISSING}") from error
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            text = (file.metadata() or {}).get(KEY, "{}")
    except SafetensorError as error:
        raise ValueError(
            f"load_converted: {path} should be a safetensors file, as save_converted writes them; it cannot be read as "
            f"one ({error})"
        ) from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"load_converted: {path} should say as a JSON object what convert did; it says {text[:40]!r}")
    return state, found


def completed(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With weights under all the names that the model has for them."""
    found = dict(state)
    for names in _names(model):
        given = [name for name in names if name in state]
        found |= {name: state[given[0]] for name in names if given and name not in state}
    return found


def _names(model: nn.Module) -> list[list[str]]:
    """The names of a state_dict, those of one tensor together. A tensor and its transpose are two."""
    groups: dict[object, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        key: object = name
        if isinstance(value, Tensor) and value.numel():
            key = memory_of(value), value.shape, value.stride() if value.layout == torch.strided else None
        groups.setdefault(key, []).append(name)
    return list(groups.values())
