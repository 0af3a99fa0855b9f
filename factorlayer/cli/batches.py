"""Batches for a model, of a file or of a function in a file of the user's: with them `convert --inputs` fits layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorlayer.cli.subject import returned
from factorlayer.models.distil import check_batches
from factorlayer.models.rows import Example, call, evaluated

PICKLED = (".pt", ".pth")
SUFFIXES = (".safetensors", *PICKLED, ".npy")


class Batches:
    """Batches that come to the model's device one by one, as often as they are gone through."""

    def __init__(self, given: Iterable[Example], device: torch.device) -> None:
        self._given, self._device = given, device
        self.passes: Iterator[Any] = iter(())  # moves on when they are gone through

    def __iter__(self) -> Iterator[Example]:
        next(self.passes, None)
        for batch in self._given:
            yield _on(self._device, batch)


def batches_of(name: str, model: nn.Module) -> Batches:
    """What a file holds or a function returns: a batch, or several. Each has been through the model once, so that one
    that does not fit is not found after long work."""
    path = Path(name)
    if path.suffix in SUFFIXES:
        given = _named(_read(path), model, name) if path.suffix == ".safetensors" else _read(path)
    elif ":" in name:
        given = returned(name)
    else:
        raise ValueError(
            f"it should be a file of tensors ({', '.join(SUFFIXES)}), or path/to/file.py:function, which returns "
            f"batches; it is {name!r}"
        )
    if isinstance(given, Tensor | tuple | Mapping):
        given = [given]
    try:
        check_batches(given)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    batches = Batches(given, next((p.device for p in model.parameters()), torch.device("cpu")))
    with evaluated(model):
        number = -1
        for number, batch in enumerate(batches):
            _try(model, batch, f"{name}: batch {number}")
    if number < 0:
        raise ValueError(f"{name} should have batches, there are none")
    return batches


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix in PICKLED:
            return torch.load(path, map_location="cpu", weights_only=True)
        import numpy as np

        return torch.from_numpy(np.load(path, allow_pickle=False))
    except Exception as error:  # there are as many kinds as ways to be no file of tensors
        raise ValueError(f"{path} cannot be read as {path.suffix} ({_in_a_line(error)})") from error


def _named(tensors: Mapping[str, Tensor], model: nn.Module, file: str) -> list[Example]:
    """Batches of a file that has nothing but names: 0, 1, … are batches, 0.mask is an argument of batch 0, and names
    without numbers are the arguments of one batch. A tensor alone whose name is no argument's is the first argument."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:([0-9]+)(?:\.|$))?(.*)", name)
        assert match is not None
        found.setdefault(int(match[1] or -1), {})[match[2]] = tensor
    if (-1 in found and len(found) > 1) or any("" in batch and len(batch) > 1 for batch in found.values()):
        raise ValueError(
            f"{file} should name its tensors all in one way: 0, 1, … for batches, 0.mask, 1.mask, … for arguments of "
            f"each, or mask, … for those of one; they are {', '.join(sorted(tensors))}"
        )
    arguments = inspect.signature(model.forward).parameters
    several = (batch for _, batch in sorted(found.items()))
    return [batch if len(batch) > 1 or batch.keys() <= arguments.keys() else batch.popitem()[1] for batch in several]


def _try(model: nn.Module, batch: Example, who: str) -> None:
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise ValueError(
            f"{who} should be a tensor, a tuple of the model's arguments or a dict of them by name; it is a "
            f"{type(batch).__name__}"
        )
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    tensors = [value for value in values if isinstance(value, Tensor)]
    words = ", ".join(f"{list(tensor.shape)} of {tensor.dtype}" for tensor in tensors) or "no tensor"
    if not any(tensor.numel() for tensor in tensors):
        raise ValueError(f"{who} should have samples; it is {words}")
    try:
        call(model, batch)
    except Exception as error:  # of any kind: the model is the user's
        raise ValueError(f"{who} ({words}) does not go through the model: {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _on(device, each) for name, each in value.items()}
    return type(value)(_on(device, each) for each in value) if type(value) in (tuple, list) else value
