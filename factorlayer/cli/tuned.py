"""The `tune` command's work: what is timed of a case, and choices taken from a file and put into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from factorlayer.cli.progress import gather
from factorlayer.cli.refusals import refuse, worded

if TYPE_CHECKING:
    from factorlayer.cli.case import Problem
    from factorlayer.tuning.candidates import Tuned


def choices_of(problem: Problem, as_json: bool) -> dict[str, Any]:
    """Times the case's layers and stacks, prints what came of it, and returns it for --json."""
    if not problem.case.batch:
        refuse("BATCH", "there should be samples to time, it is 0")
    timed = gather(_tuning(problem), "timing")
    for tuned in timed.found:
        typer.echo(str(tuned), err=as_json)
    if timed.interrupted:
        typer.echo(f"interrupted: {len(timed.found)} choices were measured and are kept", err=as_json)
    return {"interrupted": timed.interrupted, "tuned": [_to_json(tuned) for tuned in timed.found]}


def _tuning(problem: Problem) -> Iterator[Tuned]:
    """Tunes the case's parts, and of a user's model those that it has as it is, beside those that fuse makes of it."""
    from factorlayer.cli.case import run_by
    from factorlayer.stacks.tuning import parts_of, tuning

    modules = [problem.modules["model"]] if "model" in problem.modules else []
    for module in (*modules, run_by(problem.module, "auto")):
        if list(parts_of(module)):
            yield from tuning(module, problem.x)


def _to_json(tuned: Tuned) -> dict[str, Any]:
    choice = tuned.choice
    chosen = None if choice is None else {"implementation": choice.implementation, **asdict(choice)}
    return {"name": tuned.name, "choice": chosen, "why_not": tuned.why_not}


def move_choices(option: str, path: Path | None, as_json: bool) -> dict[str, Any]:
    """Does what --import or --export asks for, says how many choices that were, and returns it for --json."""
    if path is None:
        return {}
    from factorlayer.tuning.kept import export_choices, import_choices

    move, done = (import_choices, "imported") if option == "--import" else (export_choices, "exported")
    try:
        count = worded(option, lambda: move(path))
    except OSError as error:
        refuse(option, f"{path} cannot be written: {error.strerror or error}")
    typer.echo(f"{count} choices were {done}: {path}", err=as_json)
    return {done: count}
