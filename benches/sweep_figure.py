"""The figure of a sweep: efficiency over floor, a dot for each row and pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benches.machine import in_words
from benches.results import LONG_FLOOR_US
from benches.sweep_results import STRUCTURES, Sweep

COLORS = dict(zip(STRUCTURES, ("#4c78a8", "#f58518", "#54a24b"), strict=True))
MARKERS = {"forward": ("o", "forward"), "forward_backward": ("^", "forward+backward")}


def draw(sweeps: Sequence[Sweep], path: Path) -> None:
    """Draws the efficiencies of several sweeps of one machine together."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib, which is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for sweep in sweeps for row in sweep.rows]
    # The salt makes the ids in the file the same each time.
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "benches"}):
        figure, axis = pyplot.subplots(figsize=(9.4, 5.0), facecolor="white", layout="constrained")
        for structure, color in COLORS.items():
            for of_pass, (marker, words) in MARKERS.items():
                points = [
                    (row.floor_us[of_pass], efficiency)
                    for row in rows
                    if row.structure == structure and (efficiency := row.efficiency(of_pass)) is not None
                ]
                if points:
                    label = f"{structure}, {words}"
                    face = color if of_pass == "forward" else "none"
                    floors, found = zip(*points, strict=True)
                    axis.scatter(floors, found, s=16, marker=marker, c=face, edgecolors=color, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axhline(1, color="#444444", linewidth=1)
        axis.axvline(LONG_FLOOR_US, color="#bbbbbb", linewidth=1, linestyle="--")
        axis.set_xlabel("floor of the pass, us")
        axis.set_ylabel("efficiency: floor / time of v3")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(in_words(sweeps[0].machine), fontsize=8, color="#444444")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
