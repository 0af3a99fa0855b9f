"""The figure of recurrent units: microseconds a step of each, ours beside PyTorch's, forward and with backward."""

from __future__ import annotations

import json
from pathlib import Path

from benches.machine import in_words
from benches.recurrent import Row, per_step

DTYPE = "bfloat16"
SUBJECTS = {"auto": ("FactorGRU", "#4c78a8"), "cudnn": ("nn.GRU", "#f58518")}
PASSES = (("o", "forward"), ("^", "forward+backward"))


def draw(results: Path, path: Path) -> None:
    """Draws the times of a results file."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib, which is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    told = json.loads(results.read_text())
    shown = [row for told_row in told["rows"] if (row := Row(**told_row)).dtype == DTYPE][::-1]  # the first one on top
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "benches"}):
        figure, axis = pyplot.subplots(figsize=(8.4, 0.6 + 0.34 * len(shown)), facecolor="white", layout="constrained")
        for of_pass, (marker, words) in enumerate(PASSES):
            height = 0.14 - 0.28 * of_pass
            for subject, (who, color) in SUBJECTS.items():
                found = [(us, i + height) for i, row in enumerate(shown) if (us := per_step(row, subject, of_pass))]
                times, heights = zip(*found, strict=True)
                face, label = "none" if of_pass else color, f"{who}, {words}"
                axis.scatter(times, heights, s=22, marker=marker, c=face, edgecolors=color, label=label)
            for i, row in enumerate(shown):
                both = [us for subject in SUBJECTS if (us := per_step(row, subject, of_pass))]
                axis.plot((min(both), max(both)), (i + height,) * 2, color="#bbbbbb", linewidth=1, zorder=0)
        axis.set_yticks(range(len(shown)), [f"{row.name}, {row.sequences} x {row.steps}" for row in shown])
        axis.set_xscale("log")
        axis.set_xlabel(f"us a step, {DTYPE}; beside each unit its sequences x steps")
        axis.grid(alpha=0.3, axis="x", which="both")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(in_words(told["machine"]), fontsize=8, color="#444444")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
