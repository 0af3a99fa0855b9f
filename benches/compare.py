"""Compares two results files and marks what got slower: `python -m benches.compare --help`.

Rows are matched by workload, shape, batch, dtype and threads, times by implementation and pass. A time is
marked when it moved by more than the two runs' own spread.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benches.machine import in_words
from benches.results import PASS_NAMES, Results, Row
from benches.subjects import SUBJECTS
from benches.tables import where
from benches.timing import Timing

PRINTED_WIDTH = 120  # where there is no terminal to fold the table to
# Two runs of the same code differ by more than their rounds do: clocks, neighbours and places in memory change
# between runs. Of the dense layer, which is not our code, 137 of 138 times of two full runs on an H200 agreed
# within this, 74 of 76 on shared CPU cores; a third run on those was 18 % slower as a whole.
LEAST_SPREAD = {"cuda": 0.05, "cpu": 0.15}
HARDWARE = {"cuda": ("gpu", "gpu_l2"), "cpu": ("cpu", "cores", "l2", "l3")}  # that the times depend on
SOFTWARE = ("instruction_set", "torch", "cuda", "python", "os")
HELP = """Compare two results files of `benches.run` and mark the times that moved by more than their spread.

The spread is sqrt(iqr_old² + iqr_new²), and at least 5 % on a GPU, 15 % on a CPU. Where implementations that are
not ours moved too (the last lines have their medians), the machine did: measure again.

Exit status 1: v3 got slower, or lost its time in a row that both files have. What only one file has is listed,
no more. On different hardware the table is printed and the exit status is 0, as it says nothing of the code;
other versions of PyTorch, CUDA or Python are named and judged. Status 2: no time of v3 is in both files.
"""
EXAMPLES = """Examples:

python -m benches.compare benches/results/h200.json new.json
"""
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False)]
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class RowKey(NamedTuple):
    workload: str
    shape: str
    batch: int
    dtype: str
    threads: int | None

    @classmethod
    def of(cls, row: Row) -> RowKey:
        return cls(row.workload, row.shape, row.batch, row.dtype, row.threads)

    def __str__(self) -> str:
        return f"{self.workload} ({self.shape}, batch {self.batch}), {where(self.dtype, self.threads)}"


class TimeKey(NamedTuple):
    row: RowKey
    subject: str
    of_pass: str


@dataclass(frozen=True)
class Change:
    """The change of a time that both files have; ratio and spread are in units of the old time."""

    key: TimeKey
    old: Timing
    new: Timing
    least_spread: float

    @property
    def ratio(self) -> float:
        return self.new.us / self.old.us

    @property
    def spread(self) -> float:
        """How far a ratio may be from 1 by chance: whole interquartile ranges, not divided by sqrt(rounds), as what
        disturbs a round disturbs the next ones too."""
        return max(self.least_spread, math.hypot(self.old.iqr_us, self.new.iqr_us) / self.old.us)

    @property
    def mark(self) -> str:
        if abs(self.ratio - 1) <= self.spread:
            return ""
        return "slower" if self.ratio > 1 else "faster"


@app.command(help=HELP, epilog=EXAMPLES)
def main(old_file: File, new_file: File) -> None:
    try:
        old, new = Results.load(old_file), Results.load(new_file)
        changes = compare(old, new)
    except ValueError as error:
        typer.echo(f"benches.compare: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH, markup=False, highlight=False)
    console.print(_table(changes))
    for side, one, other in (("old", old, new), ("new", new, old)):
        for what, rows in _grouped(*only_in(one, other)).items():
            console.print(f"only in the {side} file, {what}: {'; '.join(rows)}")
    for side, results in (("old", old), ("new", new)):
        console.print(f"{side}: {in_words(results.machine)}")
    other_hardware = _differences(old, new, HARDWARE[_device(new)])
    if other_hardware:
        console.print(f"other hardware, nothing is judged: {other_hardware}", style="bold red")
    if other_software := _differences(old, new, SOFTWARE):
        console.print(f"other software: {other_software}", style="bold")
    for line in _summary(changes):
        console.print(line)
    slower = [change for change in changes if change.key.subject == "v3" and change.mark == "slower"]
    lost = [key for key in only_in(old, new)[1] if key.subject == "v3"]
    if (slower or lost) and not other_hardware:
        console.print(f"v3 got slower: {len(slower)} times; has no time any more: {len(lost)}", style="bold red")
        raise typer.Exit(1)


def compare(old: Results, new: Results) -> list[Change]:
    """The times that are in both, the slower ones first, v3's before the others'."""
    before, after = _times(old), _times(new)
    least_spread = LEAST_SPREAD[_device(new)]
    changes = [Change(key, before[key], after[key], least_spread) for key in before if key in after]
    if not any(change.key.subject == "v3" for change in changes):
        raise ValueError(
            "two results files should share a time of v3, these have none for the same workload, shape, batch, "
            "dtype and threads; measure both with the same options"
        )
    return sorted(changes, key=lambda change: (change.mark != "slower", change.key.subject != "v3", -change.ratio))


def only_in(one: Results, other: Results) -> tuple[list[RowKey], list[TimeKey]]:
    """Rows that the other file lacks, and times that the same row of the other file lacks."""
    rows, times = {RowKey.of(row) for row in other.rows}, _times(other)
    return (
        [key for row in one.rows if (key := RowKey.of(row)) not in rows],
        [key for key in _times(one) if key.row in rows and key not in times],
    )


def _times(results: Results) -> dict[TimeKey, Timing]:
    return {
        TimeKey(RowKey.of(row), subject, of_pass): timing
        for row in results.rows
        for subject, passes in row.times.items()
        for of_pass, timing in passes.items()
    }


def _grouped(rows: list[RowKey], times: list[TimeKey]) -> dict[str, list[str]]:
    groups = {"all of": [str(row) for row in rows]} if rows else {}
    for row, subject, of_pass in times:
        groups.setdefault(f"{subject} {PASS_NAMES[of_pass]} of", []).append(str(row))
    return groups


def _device(results: Results) -> str:
    return "cuda" if "gpu" in results.machine else "cpu"


def _differences(old: Results, new: Results, names: tuple[str, ...]) -> str:
    pairs = {name: (old.machine.get(name), new.machine.get(name)) for name in names}
    return ", ".join(f"{name} {before}, then {after}" for name, (before, after) in pairs.items() if before != after)


def _table(changes: list[Change]) -> Table:
    table = Table(caption="microseconds, medians")
    table.add_column("workload", no_wrap=True)
    for heading in ("dtype", "implementation", "pass"):
        table.add_column(heading)
    for heading in ("old", "new", "new/old", "spread"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in changes:
        row, subject, of_pass = change.key
        table.add_row(
            row.workload,
            where(row.dtype, row.threads),
            subject,
            PASS_NAMES[of_pass],
            _us(change.old.us),
            _us(change.new.us),
            f"{change.ratio:.2f}x",
            f"±{change.spread:.0%}",
            change.mark,
            style={"slower": "red", "faster": "green"}.get(change.mark),
        )
    return table


def _us(value: float) -> str:
    """Microseconds in four digits, which is all that a results file keeps."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _summary(changes: list[Change]) -> list[str]:
    """A line for each implementation."""
    lines = []
    for subject in SUBJECTS:
        if own := [change for change in changes if change.key.subject == subject]:
            marks = [change.mark for change in own]
            median = statistics.median(change.ratio for change in own)
            counts = f"{marks.count('slower')} slower, {marks.count('faster')} faster"
            lines.append(f"{subject}: {counts} of {len(own)}, new/old {median:.2f}x in the median")
    return lines


if __name__ == "__main__":
    app()
