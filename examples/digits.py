"""Handwritten digits (scikit-learn's, 8 x 8 pixels) by a block of structured layers, and by its dense twin.

python examples/digits.py --picture digits.png
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
import typer
from sklearn.datasets import load_digits
from torch import Tensor

from factorlayer import FactorMLP

Width = int | tuple[int, ...]


def data(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 64] and digits [N] to learn from, and those to be tested with: every fifth."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    tested = torch.arange(len(labels), device=device) % 5 == 0
    return images[~tested], labels[~tested], images[tested], labels[tested]


def dense(widths: Sequence[Width]) -> list[Width]:
    return [width if isinstance(width, int) else math.prod(width) for width in widths]


def main(
    side: Annotated[int, typer.Option(min=1, help="Hidden layers have side² features.")] = 24,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden layers.")] = 2,
    rank: Annotated[int, typer.Option(min=1, help="Kronecker products added up in a layer.")] = 2,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    batch: Annotated[int, typer.Option(min=1)] = 128,
    rate: Annotated[float, typer.Option(help="Learning rate, at first.")] = 3e-3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    picture: Annotated[Path | None, typer.Option(help="Where to draw accuracies (needs matplotlib).")] = None,
) -> None:
    """Learn digits with a FactorMLP and its dense twin: accuracy, parameters and time of both."""
    widths: list[Width] = [(8, 8), *[(side, side)] * hidden, 10]
    blocks = {"dense": (dense(widths), 1), "factored": (widths, rank)}
    curves = {}
    for name, (each, terms) in blocks.items():
        torch.manual_seed(0)
        block = FactorMLP(each, activation="gelu", rank=terms, device=device)
        begin = time.perf_counter()
        curves[name] = learn(block, data(device), epochs, batch, rate)
        taken = (time.perf_counter() - begin) / epochs
        parameters = sum(parameter.numel() for parameter in block.parameters())
        typer.echo(f"{name}: accuracy {curves[name][-1]:.1%}, {parameters} parameters, {1000 * taken:.0f} ms an epoch")
    if picture is not None:
        save(curves, picture)


def learn(
    block: FactorMLP, split: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int, batch: int, rate: float
) -> list[float]:
    """The accuracy on what is not learned from, after each epoch."""
    images, labels, test_images, test_labels = split
    steps = math.ceil(len(images) / batch)
    optimizer = torch.optim.AdamW(block.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    accuracies = []
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), device=images.device).split(batch):
            loss = F.cross_entropy(block(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            accuracies.append(float((block(test_images).argmax(1) == test_labels).float().mean()))
    return accuracies


def save(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), [100 * accuracy for accuracy in curve], label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy, %")
    axes.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
