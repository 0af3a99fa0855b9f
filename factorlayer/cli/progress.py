"""Long work of the command line: a bar while it goes on, and what there is of it after Ctrl-C."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
INTERRUPTED = 130  # a program's exit status after Ctrl-C, as shells have it


@dataclass
class Gathered(Generic[T]):
    """What came of some steps."""

    found: list[T] = field(default_factory=list)
    interrupted: bool = False


def gather(steps: Iterable[T], what: str, total: int | None = None) -> Gathered[T]:
    """What the steps make, until they end or Ctrl-C is pressed: then what was made before is kept."""
    gathered: Gathered[T] = Gathered()
    try:
        for step in progress(steps, what, total):
            gathered.found.append(step)
    except KeyboardInterrupt:
        gathered.interrupted = True
    return gathered


def progress(steps: Iterable[T], what: str, total: int | None) -> Generator[T, None, None]:
    """The steps, with a bar on stderr if that is a terminal: it says how many of them are done. It moves between steps
    only: no thread of its own runs while something is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    off = total is None or not console.is_terminal
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=off) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()
        for step in steps:
            yield step
            bar.advance(task)
            bar.refresh()
