"""What the command line does not do, each in a sentence: wrong usage of options, and what this machine lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from factorlayer.cli.case import Case, Problem

T = TypeVar("T")


def refuse(hint: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=f"'{hint}'")


def refuse_given(why: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None and value != []:
            refuse(name, f"it was given where it has no meaning: {why}")


def worded(hint: str, make: Callable[[], T]) -> T:
    """What `make` returns; its ValueError becomes a message about wrong usage, without a traceback."""
    try:
        return make()
    except ValueError as error:
        refuse(hint, str(error))


def require_available(problem: Problem, versions: Sequence[str]) -> None:
    missing = problem.unavailable()
    if "model" not in problem.modules:
        missing["model"] = "it is a model of your own, for --model"
    for version in versions:
        if version in missing:
            refuse("--implementation", f"{version} cannot run: {missing[version]}; choose another of v1, v2 and v3")


def say_unavailable(missing: Mapping[str, str], case: Case, as_json: bool) -> None:
    for version, reason in missing.items():
        typer.echo(f"{version} is not available on {case.device} and left out: {reason}", err=as_json)


def require_folder(option: str, path: Path) -> None:
    """Refuses, before any work, a file whose folder does not exist."""
    if not path.parent.is_dir():
        refuse(option, f"the file should be in a folder that exists; there is no {path.parent}")


def require_plot(path: Path) -> None:
    require_folder("--plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        refuse("--plot", "drawing needs matplotlib, which is not installed: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:] not in formats:
        refuse("--plot", f"the file's name should end in one of {', '.join(formats)}; it is {path}")
