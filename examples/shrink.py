"""A dense network that has learned scikit-learn's digits, made smaller: its layers projected onto structured ones under
budgets of parameters, fitted to what the dense ones compute, and trained on for a few epochs.

python examples/shrink.py --picture shrink.png
"""

import copy
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

from factorlayer import convert, param_groups, report, suggest

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def data() -> Data:
    """Images [N, 64] and digits [N] to learn from, and those to be tested with: every fifth."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    tested = torch.arange(len(labels)) % 5 == 0
    return images[~tested], labels[~tested], images[tested], labels[tested]


def learn(model: nn.Module, split: Data, epochs: int, rate: float) -> None:
    """With learning rates that belong to the layers' structures."""
    images, labels, _, _ = split
    optimizer = torch.optim.AdamW(param_groups(model, lr=rate))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(128):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model: nn.Module, split: Data) -> float:
    with torch.no_grad():
        return float((model(split[2]).argmax(1) == split[3]).float().mean())


def main(
    width: Annotated[int, typer.Option(min=8, help="Features of the hidden layers.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="That the dense network learns for.")] = 20,
    further: Annotated[int, typer.Option(min=0, help="Epochs of a converted network.")] = 5,
    budget: Annotated[list[float] | None, typer.Option(help="Shares of the parameters; several times.")] = None,
    rate: Annotated[float, typer.Option(help="Learning rate of dense layers.")] = 1e-3,
    picture: Annotated[Path | None, typer.Option(help="Where to draw accuracies (needs matplotlib).")] = None,
) -> None:
    """Convert a trained network under several budgets: accuracy projected, fitted, each trained on, and drawn anew."""
    split = data()
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)]
    dense = nn.Sequential(*layers)
    learn(dense, split, epochs, rate)
    before, longer = accuracy(dense, split), copy.deepcopy(dense)
    learn(longer, split, further, rate)
    typer.echo(f"dense: {before:.1%}, {further} epochs later {accuracy(longer, split):.1%}")
    rows = []
    for share in budget or [0.5, 0.25, 0.1, 0.05, 0.03]:
        mapping = suggest(dense, share)
        projected, fitted, fresh = (copy.deepcopy(dense) for _ in range(3))
        done = convert(projected, mapping)
        convert(fitted, mapping, inputs=[split[0]])
        convert(fresh, mapping, initialize="fresh")
        found = [accuracy(projected, split), accuracy(fitted, split)]
        for model in (projected, fitted, fresh):
            learn(model, split, further, rate)
            found.append(accuracy(model, split))
        rows.append((share, found))
        typer.echo(
            f"{done.parameters_after / done.parameters_before:.1%} of the parameters: projected {found[0]:.1%}, fitted "
            f"{found[1]:.1%}; {further} epochs later {found[2]:.1%} and {found[3]:.1%}, drawn anew {found[4]:.1%}"
        )
    typer.echo(report(projected, batch=128, training=True))
    if picture is not None:
        save(rows, accuracy(longer, split), picture)


def save(rows: list[tuple[float, list[float]]], dense: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(
        ("projected", "fitted", "projected, trained on", "fitted, trained on", "drawn anew, trained on")
    ):
        axes.plot([100 * share for share, _ in rows], [100 * found[i] for _, found in rows], "o-", label=name)
    axes.axhline(100 * dense, color="gray", linestyle=":", label="dense, trained on")
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share, _ in rows], [f"{100 * share:g}" for share, _ in rows])
    axes.minorticks_off()
    axes.set_xlabel("parameters, % of the dense network's")
    axes.set_ylabel("accuracy, %")
    axes.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
