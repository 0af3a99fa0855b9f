"""The `convert` and `report` commands' work: a model of the user's, mappings as they are typed, and files."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import nn

from factorlayer.cli.batches import Batches, batches_of
from factorlayer.cli.progress import progress
from factorlayer.cli.refusals import refuse, require_folder, worded
from factorlayer.cli.subject import load_checkpoint, make_model
from factorlayer.models.checkpoints import MISSING, load_converted, save_converted
from factorlayer.models.convert import convert
from factorlayer.models.report import Report, report
from factorlayer.models.suggest import suggest
from factorlayer.models.times import gpu_for

if TYPE_CHECKING:
    from factorlayer.models.conversion import Conversion

SAFETENSORS = ".safetensors"


def model_of(name: str, checkpoint: Path | None, device: str | None) -> nn.Module:
    """What the function makes, with what the file holds: converted as it says, if it is of a converted model."""
    model = worded("--model", lambda: make_model(name))
    if checkpoint is not None:
        load(model, checkpoint)
    if device is not None:
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            refuse("--device", f"the model cannot be moved to {device}: {str(error).splitlines()[0]}")
    return model


def load(model: nn.Module, path: Path) -> None:
    """What --checkpoint names, into a model, which it converts if the file is of a converted one."""
    require_safetensors("--checkpoint", path)
    worded("--checkpoint", lambda: _load(model, path))


def _load(model: nn.Module, path: Path) -> None:
    if path.suffix != SAFETENSORS or not path.is_file():
        return load_checkpoint(model, path)
    try:
        load_converted(model, path)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None


def require_safetensors(option: str, path: Path) -> None:
    if path.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        refuse(option, f"{path} {MISSING}")


def require_output(path: Path) -> None:
    """Refuses, before any work, an --output that cannot be written."""
    if path.suffix != SAFETENSORS:
        refuse("--output", f"the file's name should end in {SAFETENSORS}; it is {path}")
    require_folder("--output", path)
    require_safetensors("--output", path)


def mapping_of(words: Sequence[str]) -> dict[str, Mapping[str, Any] | None]:
    """What --map says, as often as it is given: later ones stand behind earlier ones."""
    found: dict[str, Mapping[str, Any] | None] = {}
    for text in words:
        found |= worded("--map", lambda: _parse(text))  # noqa: B023 (it runs at once)
    return found


def _parse(text: str) -> dict[str, Mapping[str, Any] | None]:
    pattern, equals, settings = text.partition("=")
    if not equals:
        return _from_file(Path(text))
    if settings == "none":
        return {pattern: None}
    structure, *others = settings.split(",")
    made: dict[str, Any] = {"structure": structure}
    factors = []
    for word in others:
        if re.fullmatch("[0-9]+x[0-9]+", word):
            factors.append([int(size) for size in word.split("x")])
        elif match := re.fullmatch("(rank|blocks)=([0-9]+)", word):
            made[match[1]] = int(match[2])
        elif match := re.fullmatch("blocks=([0-9]+)x([0-9]+)", word):
            made["blocks"] = int(match[1]), int(match[2])
        else:
            raise ValueError(
                f"a PATTERN should become a structure, with blocks=4 or blocks=4x6, rank=2 and factors such as 24x48 "
                f"(in x out), between commas, or none; {word!r} is in {text!r}"
            )
    if factors:
        made["factors"] = tuple(zip(*factors, strict=True))
    return {pattern: made}


def _from_file(path: Path) -> dict[str, Mapping[str, Any] | None]:
    example = "'*.mlp.*=monarch,blocks=4,rank=8'"
    if not path.is_file():
        raise ValueError(f"it should be PATTERN=STRUCTURE,… such as {example}, or a JSON file; it is {str(path)!r}")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} should hold an object, of patterns with settings each; it holds {type(found).__name__}"
        )
    return found


def converted(
    model: nn.Module,
    mapping: Mapping[str, Any],
    budget: float | None,
    fresh: bool,
    output: Path | None,
    inputs: str | None = None,
) -> Conversion:
    """A dry run where there is no output: with inputs, of a model that is thrown away."""
    batches = None if inputs is None else _batches_of(inputs, model)
    if budget is not None:
        mapping = worded("--budget", lambda: suggest(model, budget))
    try:
        done = convert(
            model, mapping, initialize="fresh" if fresh else "project", dry_run=output is None or batches is not None
        )
    except (TypeError, ValueError) as error:
        refuse("--map", str(error))
    if batches is not None:
        done = replace(_fitted(model, mapping, batches, len(done.changes)), dry_run=output is None)
    if output is not None:
        try:
            save_converted(model, output)
        except OSError as error:
            refuse("--output", str(error))
    return done


def _batches_of(inputs: str, model: nn.Module) -> Batches:
    require_safetensors("--inputs", Path(inputs))
    return worded("--inputs", lambda: batches_of(inputs, model))


def _fitted(model: nn.Module, mapping: Mapping[str, Any], batches: Batches, layers: int) -> Conversion:
    """Batches are gone through once to see in what order layers are called, and then for each layer."""
    steps = 1 + layers
    with closing(progress(range(steps), "fitting", steps)) as batches.passes:
        return worded("--inputs", lambda: convert(model, mapping, inputs=batches))


def reported(
    model: nn.Module,
    samples: int,
    mapping: Mapping[str, Any],
    budget: float | None,
    training: bool,
    measure: bool,
    arch: int | None,
) -> Report:
    if budget is not None:
        mapping = worded("--budget", lambda: suggest(model, budget))
    if arch is not None:
        worded("--arch", lambda: gpu_for(torch.device("cpu"), arch, "report"))
    try:
        return report(model, samples, mapping or None, training=training, measure=measure, arch=arch)
    except (TypeError, ValueError) as error:
        refuse("--map" if mapping else "--model", str(error))


def print_found(command: str, found: Conversion | Report, asked: Mapping[str, Any], as_json: bool) -> None:
    typer.echo(str(found), err=as_json)
    if as_json:
        typer.echo(json.dumps({"command": command, **asked, **found.to_json()}, allow_nan=False))
