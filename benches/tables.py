"""Results as tables: for the terminal with rich, and as lines of markdown for docs/benchmarks.md and README.

Layers and blocks have one each. Where there are published peers, v3 is compared with them too.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benches.machine import in_words
from benches.results import LONG_FLOOR_US, PASS_NAMES, Results, Row, efficiency_means, geometric_means, lead_means
from benches.subjects import SUBJECTS


def show(results: Results, console: Console) -> None:
    """The tables of a run, their geometric means, and everything that needs a second look."""
    rows = results.rows
    subjects = [name for name in SUBJECTS if any(name in row.times or name in row.notes for row in rows)]
    for some in results.kinds:
        console.print(_table(results, some, subjects))
        for (dtype, threads), means in geometric_means(some).items():
            words = ", ".join(f"{PASS_NAMES[of_pass]} {mean:.2f}x" for of_pass, mean in means.items())
            console.print(f"v3 over {some[0].rival}, geometric mean, {where(dtype, threads)}: {words}")
    for row in rows:
        for of_pass, pass_name in PASS_NAMES.items():
            if (speedup := row.speedup(of_pass)) is not None and speedup < 1:
                console.print(f"slower than {row.rival}: {_label(row)} {pass_name}, {speedup:.2f}x", style="red")
        for message in row.broken:
            console.print(f"broken: {message}", style="bold red", markup=False)
    notes: dict[str, list[str]] = {}
    for subject in subjects:
        for row in rows:
            if subject in row.notes:
                notes.setdefault(f"{subject}: {row.notes[subject]}", []).append(_label(row))
    for note, labels in notes.items():
        console.print(f"{note} ({'all' if len(labels) == len(rows) else '; '.join(labels)})", markup=False)


def _table(results: Results, rows: list[Row], subjects: list[str]) -> Table:
    threaded = any(row.threads for row in rows)
    has_published = any(row.published for row in rows)
    eager = any(timing.eager_us for row in rows for passes in row.times.values() for timing in passes.values())
    caption = "microseconds, medians" + (" (eager, from the host)" if eager else "") + "; efficiency = floor / v3"
    table = Table(title=in_words(results.machine), caption=caption)
    table.add_column("workload", no_wrap=True)
    for heading in ("dtype", *(["threads"] if threaded else []), "pass"):
        table.add_column(heading)
    extra = ["published"] if has_published else []
    for heading in ("floor", *subjects, *extra, f"{rows[0].rival}/v3", "efficiency", "peak MB v2/v3"):
        table.add_column(heading, justify="right")
    for row in rows:
        for of_pass, pass_name in PASS_NAMES.items():
            first = of_pass == "forward"
            speedup = row.speedup(of_pass)
            names = [row.workload, row.dtype, *([str(row.threads)] if threaded else [])]
            table.add_row(
                *(name if first else "" for name in names),
                pass_name,
                _us(row.floor_us[of_pass]),
                *(_timing(row, subject, of_pass) for subject in subjects),
                *([_us(row.published.get(of_pass, {}).get("us"))] if has_published else []),
                _times(speedup),
                _number(row.efficiency(of_pass)),
                _peaks(row) if first else "",
                style="red" if row.broken or (speedup is not None and speedup < 1) else None,
                end_section=not first,
            )
    return table


def markdown(rows: list[Row]) -> list[str]:
    """The whole table of one kind of rows."""
    return (_blocks if rows[0].is_block else _layers)(rows)


def _layers(rows: list[Row]) -> list[str]:
    has_published = any(row.published for row in rows)
    headings = ["v2 µs", "v3 µs", "speed-up fwd", "speed-up fwd+bwd", "efficiency"]
    said = "Forward unless a column says fwd+bwd, or has both; medians."
    if has_published:
        headings = ["floor µs", "best published µs", *headings[:2], "v3 fwd+bwd µs", "over published", *headings[2:]]
        headings.append("kernels")
    else:
        headings = ["nn.Linear µs", *headings[:2], "over nn.Linear", *headings[2:]]
        said += " nn.Linear is the dense layer of the same features; - where it was not timed, too large or too slow."
    lines = [said, "", *_heading(rows, [], headings)]
    for row in rows:
        ours = [_us(row.us("v2", "forward")), _us(row.us("v3", "forward"))]
        speedups = [_times(row.speedup(of_pass)) for of_pass in PASS_NAMES]
        efficiency = " / ".join(_number(row.efficiency(of_pass)) for of_pass in PASS_NAMES)
        if has_published:
            cells = [_us(row.floor_us["forward"]), _published(row, "forward"), *ours]
            leads = " / ".join(_times(row.lead(of_pass)) for of_pass in PASS_NAMES)
            cells += [_us(row.us("v3", "forward_backward")), leads, *speedups, efficiency, str(row.kernels or "-")]
        else:
            over = " / ".join(_times(row.speedup(of_pass, "dense")) for of_pass in PASS_NAMES)
            cells = [_us(row.us("dense", "forward")), *ours, over, *speedups, efficiency]
        name = f"{row.workload} ({row.shape})" if "blocks" in row.shape else row.workload
        lines.append(_line(row, name, cells))
    return lines


def _blocks(rows: list[Row]) -> list[str]:
    has_published = any(row.published for row in rows)
    headings = ["floor µs", "nn.Linear µs", "v3 µs", "speed-up", "efficiency"]
    if has_published:
        headings += ["best published µs", "over published", "kernels"]
    lines = ["Medians; speed-up is over nn.Linear and the activations one by one.", ""]
    lines += _heading(rows, ["pass"], headings)
    for row in rows:
        for of_pass, pass_name in PASS_NAMES.items():
            first = of_pass == "forward"
            cells = [pass_name, _us(row.floor_us[of_pass]), _us(row.us(row.rival, of_pass)), _us(row.us("v3", of_pass))]
            cells += [_times(row.speedup(of_pass)), _number(row.efficiency(of_pass))]
            if has_published:
                cells += [_published(row, of_pass), _times(row.lead(of_pass))]
                note = f", {row.notes['v3']}" if "v3" in row.notes else ""
                cells.append(f"{row.kernels or '-'}{note}" if first else "")
            lines.append(_line(row, f"{row.workload} ({row.shape})" if first else "", cells))
    return lines


def _heading(rows: list[Row], further_names: list[str], headings: list[str]) -> list[str]:
    names = ["workload", "dtype", *(["threads"] if any(row.threads for row in rows) else []), *further_names]
    ruler = [" --- "] * len(names) + [" ---: "] * len(headings)
    return ["| " + " | ".join(names + headings) + " |", "|" + "|".join(ruler) + "|"]


def _line(row: Row, name: str, cells: list[str]) -> str:
    return "| " + " | ".join([name, row.dtype, *([str(row.threads)] if row.threads else []), *cells]) + " |"


def _published(row: Row, of_pass: str) -> str:
    peer = row.published.get(of_pass, {})
    return f"{_us(peer['us'])} ({peer['who']})" if peer else "-"


def means(rows: list[Row]) -> list[str]:
    """The sentences on the geometric means of one kind of rows, if there is a v3 to have them."""
    is_block = rows[0].is_block
    v3, rival, long_rows = ("Blocks, v3", "nn.Linear", "blocks") if is_block else ("v3", "v2", "Kronecker rows")
    lines = []
    for (dtype, threads), found in geometric_means(rows).items():
        words = " and ".join(f"{mean:.2f}x {PASS_NAMES[of_pass]}" for of_pass, mean in found.items())
        lines += [f"{v3} over {rival}, geometric mean, {where(dtype, threads)}: {words}.", ""]
    passes = {"forward": "forward", "forward_backward": "forward+backward"}
    for of_pass, pass_words in passes.items():
        leads = lead_means(rows, of_pass)
        if leads:
            words = ", ".join(f"{dtype} {mean:.2f}x (least {least:.2f}x)" for dtype, (mean, least) in leads.items())
            lines += [f"{v3} over the best published, {pass_words}, geometric mean: {words}.", ""]
        if leads and (efficiencies := efficiency_means(rows, of_pass)):
            words = ", ".join(f"{dtype} {mean:.2f}" for dtype, mean in efficiencies.items())
            lines += [
                f"Efficiency, {pass_words}, {long_rows} with a floor of {LONG_FLOOR_US} µs and more: {words}.",
                "",
            ]
    return lines


def summary(results: Results) -> list[str]:
    """README's small table: a line for each dtype and thread count, geometric means forward / forward and backward."""
    columns: dict[str, dict[tuple[str, int | None], str]] = {}
    for rows in results.kinds:
        kind = "blocks" if rows[0].is_block else "layers"
        for over in dict.fromkeys((rows[0].rival, "dense")):
            found = geometric_means(rows, over)
            heading = f"{kind} over {'nn.Linear' if over == 'dense' else over}"
            columns[heading] = {key: " / ".join(f"{mean:.2f}x" for mean in of.values()) for key, of in found.items()}
        leads = [lead_means(rows, of_pass) for of_pass in PASS_NAMES]
        columns[f"{kind} over published"] = {
            (dtype, None): " / ".join(f"{lead[dtype][0]:.2f}x" for lead in leads if dtype in lead) for dtype in leads[0]
        }
    columns = {heading: cells for heading, cells in columns.items() if cells}
    keys = list(dict.fromkeys((row.dtype, row.threads) for row in results.rows))
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [
        f"| {where(*key)} | " + " | ".join(cells.get(key, "-") for cells in columns.values()) + " |" for key in keys
    ]
    return lines


def where(dtype: str, threads: int | None) -> str:
    """float32, 2 threads."""
    return dtype + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")


def _label(row: Row) -> str:
    return f"{row.workload} {row.dtype}" + (f" {row.threads}t" if row.threads else "")


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _timing(row: Row, subject: str, of_pass: str) -> str:
    """The median, the interquartile range in percent where it is large enough to matter, the eager time."""
    timing = row.times.get(subject, {}).get(of_pass)
    if timing is None:
        return "-"
    percent = round(100 * timing.iqr_us / timing.us)
    eager = "" if timing.eager_us is None else f" ({_us(timing.eager_us)})"
    return _us(timing.us) + (f" ±{percent}%" if percent >= 5 else "") + eager


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _peaks(row: Row) -> str:
    return "/".join(f"{row.peak_bytes[name] / 1e6:.1f}" if name in row.peak_bytes else "-" for name in ("v2", "v3"))
