"""What a sweep says: tables for the terminal, and the same as lines of markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benches.floor import DTYPES
from benches.machine import in_words
from benches.results import LONG_FLOOR_US, PASS_NAMES
from benches.sweep_results import BEHIND, CLOSE, FEW_FLOPS, STRUCTURES, Spread, Sweep, SweepRow, is_short, share

LINE = ("rows", "pass", "count", "mean", "median", "tenth", "worst")
Groups = dict[str, Callable[[SweepRow], bool]]
SUMS: Groups = {
    f"bf16 fp16 tf32, floor from {LONG_FLOOR_US} us": lambda row: is_short(row) and _is_long(row),
    f"fp32 fp64, floor from {LONG_FLOOR_US} us": lambda row: not is_short(row) and _is_long(row),
    f"all, floor from {LONG_FLOOR_US} us": lambda row: _is_long(row),
    "all": lambda row: True,
}


def _is_long(row: SweepRow) -> bool:
    return row.floor_us["forward"] >= LONG_FLOOR_US


def groups(rows: Sequence[SweepRow]) -> Groups:
    """Groups of rows by name: those of SUMS, and each structure with each dtype of which there are rows."""
    found: Groups = dict(SUMS)
    for structure in STRUCTURES:
        for dtype in DTYPES:
            if any(row.structure == structure and row.dtype == dtype for row in rows):
                found[f"{structure}, {dtype}"] = _of(structure, dtype)
    return found


def _of(structure: str, dtype: str) -> Callable[[SweepRow], bool]:
    return lambda row: row.structure == structure and row.dtype == dtype


def efficiencies(rows: Sequence[SweepRow]) -> Iterator[tuple[str, str, Spread]]:
    """The spread of v3's efficiencies, by group and pass."""
    for name, belongs in groups(rows).items():
        for of_pass in PASS_NAMES:
            spread = Spread.of(row.efficiency(of_pass) for row in rows if belongs(row))
            if spread:
                yield name, of_pass, spread


def show(sweep: Sweep, console: Console, before: Sweep | None = None) -> None:
    table = Table(title=in_words(sweep.machine), caption="floor / time of v3; mean is geometric, tenth a percentile")
    for heading in LINE:
        table.add_column(heading, justify="left" if heading in LINE[:2] else "right")
    for cells in _cells(sweep.rows):
        table.add_row(*cells)
    console.print(table)
    for line in sentences(sweep.rows):
        console.print(line)
    for row in sweep.rows:
        for message in row.broken:
            console.print(f"failed: row {row.index}, {row.structure} {row.shape}, {row.dtype}: {message}", style="red")
    if before is not None:
        for line in ratios(before.rows, sweep.rows):
            console.print(line)


def _cells(rows: Sequence[SweepRow]) -> Iterator[list[str]]:
    for name, of_pass, spread in efficiencies(rows):
        numbers = (spread.mean, spread.median, spread.tenth, spread.worst)
        yield [name, PASS_NAMES[of_pass], str(spread.count), *(f"{number:.3f}" for number in numbers)]


def markdown(sweeps: Sequence[Sweep]) -> list[str]:
    """The sentences and the table of several sweeps of one machine together."""
    rows = [row for sweep in sweeps for row in sweep.rows]
    seeds = ", ".join(str(sweep.seed) for sweep in sweeps)
    lines = [f"{in_words(sweeps[0].machine)}. {len(rows)} rows of the seeds {seeds}.", ""]
    lines += [f"- {line}" for line in sentences(rows)]
    lines += ["", "Floor / time of v3; the mean is geometric.", ""]
    headings = [*LINE[:3], "mean", "median", "tenth percentile", "worst"]
    lines += ["| " + " | ".join(headings) + " |", "| --- | --- |" + " ---: |" * (len(headings) - 2)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in _cells(rows)]


def sentences(rows: Sequence[SweepRow]) -> list[str]:
    lines = [line for of_pass in PASS_NAMES for line in _auto(rows, of_pass)]
    lines += [line for of_pass in PASS_NAMES for line in _over_dense(rows, of_pass)]
    predictions = [row.prediction for row in rows]
    if spread := Spread.of(predictions):
        right = share(predictions, lambda ratio: 1 / CLOSE <= ratio <= CLOSE)
        lines.append(
            f"predicted over measured, forward: {right:.0%} of {spread.count} rows within {CLOSE - 1:.0%}, geometric "
            f"mean {spread.mean:.2f}, four in five from {spread.tenth:.2f} to {spread.ninetieth:.2f}"
        )
    choices = [row.choice for row in rows]
    if spread := Spread.of(choices):
        close = share(choices, lambda ratio: ratio >= 0.95)
        lines.append(
            f"the best that was measured over auto, forward: {close:.0%} of {spread.count} rows within 5 %, geometric "
            f"mean {spread.mean:.2f}, worst {spread.worst:.2f}"
        )
    for of_pass, words in (("forward", "forward pass"), ("forward_backward", "training step behind it")):
        if spread := Spread.of(row.first_seconds.get(of_pass) for row in rows):
            most = max(row.first_seconds.get(of_pass, 0.0) for row in rows)
            lines.append(f"first {words}, several rows at once: median {spread.median:.2f} s, worst {most:.2f} s")
    failed = sum(bool(row.broken) for row in rows)
    return [*lines, f"failed: {failed} of {len(rows)} rows"]


def _auto(rows: Sequence[SweepRow], of_pass: str) -> Iterator[str]:
    found = [row.auto_over_batched(of_pass) for row in rows]
    spread = Spread.of(found)
    if spread:
        slower, behind = (share(found, lambda speed: speed < least) for least in (1.0, BEHIND))  # noqa: B023
        worst = min((row for row in rows if row.auto_over_batched(of_pass)), key=lambda row: _speed(row, of_pass))
        yield (
            f"auto over batched, {PASS_NAMES[of_pass]}: {slower:.0%} of {spread.count} rows slower, {behind:.0%} below "
            f"{BEHIND}; geometric mean {spread.mean:.2f}x, worst {spread.worst:.2f}x ({worst.structure} {worst.shape}, "
            f"{worst.dtype}, {worst.batch} samples)"
        )


def _speed(row: SweepRow, of_pass: str) -> float:
    return row.auto_over_batched(of_pass) or 0.0


def _over_dense(rows: Sequence[SweepRow], of_pass: str) -> Iterator[str]:
    """Sentences on auto over nn.Linear: for layers with few of the dense layer's FLOPs, and for blocks."""
    kinds = {
        f"{structure} layers of a third of the FLOPs": [
            row for row in rows if row.structure == structure and row.flops_share <= FEW_FLOPS
        ]
        for structure in ("kronecker", "monarch")
    }
    kinds["blocks"] = [row for row in rows if row.is_block]
    for name, some in kinds.items():
        speeds = [
            dense / auto if (dense := row.us("dense", of_pass)) and (auto := row.us("auto", of_pass)) else None
            for row in some
        ]
        if spread := Spread.of(speeds):
            yield (
                f"auto over nn.Linear, {PASS_NAMES[of_pass]}, {name}: geometric mean {spread.mean:.2f}x, worst "
                f"{spread.worst:.2f}x, {share(speeds, lambda speed: speed < 0.95):.0%} of {spread.count} below 0.95"
            )


def ratios(before: Sequence[SweepRow], after: Sequence[SweepRow]) -> list[str]:
    """Sentences on what changed between two sweeps: the mean efficiencies by group, and the times of rows that are in
    both."""
    old = {(name, of_pass): spread for name, of_pass, spread in efficiencies(before)}
    lines = [
        f"new/old, {name}, {PASS_NAMES[of_pass]}: mean {new.mean / old[name, of_pass].mean:.2f}x "
        f"({old[name, of_pass].mean:.3f}, then {new.mean:.3f}), tenth percentile "
        f"{new.tenth / old[name, of_pass].tenth:.2f}x"
        for name, of_pass, new in efficiencies(after)
        if (name, of_pass) in old
    ]
    both = {_key(row): row for row in before}
    for of_pass, pass_name in PASS_NAMES.items():
        speeds = [
            was / now
            for row in after
            if (other := both.get(_key(row))) and (was := other.us("v3", of_pass)) and (now := row.us("v3", of_pass))
        ]
        if spread := Spread.of(speeds):
            lines.append(
                f"speed of v3 over the old one's, {spread.count} rows that are in both, {pass_name}: geometric mean "
                f"{spread.mean:.2f}x, worst {spread.worst:.2f}x"
            )
    return lines


def _key(row: SweepRow) -> tuple[str, str, int, str, int | None]:
    return row.workload, row.shape, row.batch, row.dtype, row.threads
