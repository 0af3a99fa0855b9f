"""Writes the generated tables and the plots from benches/results/*.json: `python -m benches.report`.

All rows of results/NAME.json lie in docs/benchmarks.md, between <!-- benches:begin NAME --> and
<!-- benches:end NAME -->; README has their means, in a small table, between the same lines of NAME-summary. What the
sweeps in results/sweeps say lies between those of "sweeps", all seeds of a machine together, and results/recurrent,
results/decode and results/models between those of "recurrent", "decode" and "models".
With --check nothing is written, and the exit status says whether both files are up to date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benches import decode, models, recurrent, recurrent_figure, sweep_figure, sweep_tables, tables
from benches.machine import in_words
from benches.results import FOLDER, PASS_NAMES, Results, Row
from benches.sweep_results import Sweep

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
EXAMPLES = """Examples:

python -m benches.report

python -m benches.report --check
"""
SWEEPS = "sweeps"  # a section's name, and a folder's
# Sections that are tables with a column for each thing that is measured, one table for each machine: what writes them.
RECURRENT = "recurrent"
BESIDE = {RECURRENT: recurrent.markdown, "decode": decode.markdown, "models": models.markdown}
COLORS = {"forward": "#4c78a8", "forward_backward": "#f58518"}
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(help="Write the tables and plots of README and docs from the results, or check them.", epilog=EXAMPLES)
def main(
    check: Annotated[bool, typer.Option(help="Write nothing; exit 1 if a table is out of date.")] = False,
    page: Annotated[Path, typer.Option(help="The file with the markers of all rows.")] = PAGE,
    readme: Annotated[Path, typer.Option(help="The file with the markers of the means.")] = README,
    folder: Annotated[Path, typer.Option("--results", help="The folder with the results files.")] = FOLDER,
) -> None:
    try:
        before = {path: path.read_text() for path in (page, readme)}
        after = {
            page: with_beside(with_sweeps(updated(before[page], page, folder), page, folder), page, folder),
            readme: updated(before[readme], readme, folder, summary, "-summary"),
        }
        if not check:
            for path, text in after.items():
                path.write_text(text)
            for path in _files(folder):
                if _with_speedups((results := Results.load(path)).rows):
                    draw(results, path)
            for plot, sweeps in sweeps_of(folder).items():
                sweep_figure.draw(sweeps, plot)
            for path in _files(folder / RECURRENT):
                recurrent_figure.draw(path, path.with_suffix(".svg"))
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"benches.report: {error}", err=True)
        raise typer.Exit(2) from None
    stale = [path for path in after if after[path] != before[path]]
    if check and stale:
        for path in stale:
            typer.echo(f"{path} is out of date with {folder}; run `python -m benches.report`", err=True)
        raise typer.Exit(1)


def section(path: Path, page: Path) -> list[str]:
    """The lines on layers and on blocks: their means, the plot where there is a speed-up to draw, and the table."""
    results = Results.load(path)
    lines = [in_words(results.machine) + "."]
    for rows in results.kinds:
        lines += ["", *tables.means(rows)]
        if _with_speedups(rows):
            lines += [_figure(path, rows, page), ""]
        heading = f"<details><summary>{'Blocks' if rows[0].is_block else 'Layers'}</summary>"
        lines += [heading, "", *tables.markdown(rows), "", "</details>"]
    return lines


def summary(path: Path, page: Path) -> list[str]:
    """The machine, a table of means with a line for each dtype, and the plot of layers."""
    results = Results.load(path)
    lines = [in_words(results.machine) + ".", "", *tables.summary(results)]
    if _with_speedups(results.kinds[0]):
        lines += ["", _figure(path, results.kinds[0], page)]
    return lines


def updated(
    text: str,
    page: Path,
    folder: Path,
    write: Callable[[Path, Path], list[str]] = section,
    suffix: str = "",
) -> str:
    """The page's text with a section for each results file, whose markers have its name and the suffix."""
    names = {path: path.stem + suffix for path in _files(folder)}
    unknown = set(re.findall("<!-- benches:begin (.*?) -->", text)) - {*names.values(), SWEEPS, *BESIDE}
    if unknown:
        raise ValueError(
            f"{page} should have sections of the results in {folder} only; there are none of "
            f"{', '.join(sorted(unknown))}; measure them, or remove the section"
        )
    for path, name in names.items():
        text = _put(text, name, write(path, page), page, path.name)
    return text


def with_sweeps(text: str, page: Path, folder: Path) -> str:
    """The page's text with what the sweeps say, a part for each machine."""
    lines: list[str] = []
    for plot, sweeps in sweeps_of(folder).items():
        lines += ["", *sweep_tables.markdown(sweeps), "", f"![Efficiency over floor, {plot.stem}]({_seen(plot, page)})"]
    if not lines and f"<!-- benches:begin {SWEEPS} -->" not in text:
        return text
    return _put(text, SWEEPS, lines[1:], page, SWEEPS)


def with_beside(text: str, page: Path, folder: Path) -> str:
    """The page's text with the tables of recurrent units and of decoders, one for each machine."""
    for name, markdown in BESIDE.items():
        lines = []
        for path in _files(folder / name):
            lines += ["", *markdown(path)]
            if name == RECURRENT:
                plot = path.with_suffix(".svg")
                lines += ["", f"![Microseconds a step, {plot.stem}]({_seen(plot, page)})"]
        if lines or f"<!-- benches:begin {name} -->" in text:
            text = _put(text, name, lines[1:], page, name)
    return text


def sweeps_of(folder: Path) -> dict[Path, list[Sweep]]:
    """Sweeps with rows, by the plot of those that were measured on one machine."""
    found: dict[Path, list[Sweep]] = {}
    for path in _files(folder / SWEEPS):
        sweep = Sweep.load(path)
        if sweep.rows:
            of = sweep.machine
            machine = of.get("gpu") or f"{of['cpu']} {of['instruction_set']} {sweep.threads} threads"
            name = re.sub("[^a-z0-9]+", "-", machine.lower()).strip("-")
            found.setdefault(folder / SWEEPS / f"{name}.svg", []).append(sweep)
    return found


def _put(text: str, name: str, lines: list[str], page: Path, whose: str) -> str:
    """The text with these lines between a section's two."""
    begin, end = (f"<!-- benches:{side} {name} -->" for side in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"{page} should hold the lines {begin} and {end} once, in this order, for {whose}; "
            "they are missing or repeated; put them where its table belongs"
        )
    head, tail = text[: text.index(begin)], text[text.index(end) :]
    return head + "\n".join([begin, *lines, ""]) + tail


def _figure(path: Path, rows: list[Row], page: Path) -> str:
    """The plot, by its place as seen from the page."""
    plot = plot_path(path, rows)
    return f"![Speed-up of v3 over {rows[0].rival}, {plot.stem}]({_seen(plot, page)})"


def _seen(plot: Path, page: Path) -> str:
    """The path of a plot as seen from a page."""
    return Path(os.path.relpath(plot.resolve(), page.resolve().parent)).as_posix()


def plot_path(path: Path, rows: list[Row]) -> Path:
    """The path of a plot, beside the results file."""
    return path.with_name(f"{path.stem}{'-blocks' if rows[0].is_block else ''}.svg")


def draw(results: Results, path: Path) -> None:
    """The plots of the results file at that path, one of layers and one of blocks."""
    drawn = [rows for rows in map(_with_speedups, results.kinds) if rows]
    if not drawn:
        raise ValueError("a plot needs rows with times of v3 and of v2 or dense; these results have none")
    for rows in drawn:
        _draw(rows, in_words(results.machine), plot_path(path, rows))


def _draw(rows: list[Row], title: str, path: Path) -> None:
    """Bars of v3's speed-up over its rival, a panel for each dtype and thread count."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib, which is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, int | None], list[Row]] = {}
    places: dict[str, int] = {}  # of workloads, in all panels: not every one has all
    for row in rows:
        panels.setdefault((row.dtype, row.threads), []).append(row)
        places.setdefault(row.workload, len(places))
    columns = len({dtype for dtype, _ in panels})
    lines = -(-len(panels) // columns)
    # The salt makes the ids in the file the same each time.
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "benches"}):
        figure, axes = pyplot.subplots(
            lines,
            columns,
            figsize=(9.4, lines * (0.36 * len(places) + 1.0) + 0.5),
            sharex=True,
            sharey=True,
            squeeze=False,
            facecolor="white",
            layout="constrained",
        )
        for axis, ((dtype, threads), some) in zip(axes.flat, panels.items(), strict=False):
            for shift, of_pass in ((-0.2, "forward"), (0.2, "forward_backward")):
                speedups = [row.speedup(of_pass) or 0 for row in some]
                label = f"v3 over {rows[0].rival}, {PASS_NAMES[of_pass]}"
                at = [places[row.workload] + shift for row in some]
                bars = axis.barh(at, speedups, height=0.38, color=COLORS[of_pass], label=label)
                axis.bar_label(bars, [f"{s:.1f}x" if s else "-" for s in speedups], padding=2, fontsize=7.5)
            axis.set_yticks(list(places.values()), list(places))
            axis.axvline(1, color="#444444", linewidth=1)
            axis.set_title(tables.where(dtype, threads), fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.12)
        axes[0][0].invert_yaxis()  # shared: the first workload on top, in every panel
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(title, fontsize=8, color="#444444")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _with_speedups(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.speedup("forward") is not None]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


if __name__ == "__main__":
    app()
