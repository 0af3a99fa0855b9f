"""The picture of a report: bars for each layer, before and after, and the errors beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

BAR = 0.4  # of the space that a layer has
INCHES = 0.22  # of height for a layer
WIDTH = 3.2  # inches of a column


def draw(
    names: Sequence[str],
    bars: Mapping[str, Sequence[tuple[float, float]]],
    errors: Sequence[float | None],
    title: str,
    path: str | Path,
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.picture needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(
        figsize=(WIDTH * (len(bars) + 1), 1.5 + INCHES * len(names)), layout="constrained"
    )  # no display needed
    columns = figure.subplots(1, len(bars) + 1, sharey=True)
    places = range(len(names))
    for axes, (what, values) in zip(columns, bars.items(), strict=False):
        for offset, (label, side) in ((-BAR / 2, ("before", 0)), (BAR / 2, ("after", 1))):
            axes.barh([at + offset for at in places], [both[side] for both in values], BAR, label=label)
        axes.set_title(what)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 3))
    columns[-1].barh(places, [error or 0.0 for error in errors], 2 * BAR, color="gray")
    columns[-1].set_title("projection error")
    columns[0].set_yticks(places, names)
    columns[0].invert_yaxis()
    figure.legend(*columns[0].get_legend_handles_labels(), loc="outside upper right")
    figure.suptitle(title)
    figure.savefig(path)
