"""A small transformer that has learned scikit-learn's digits, its MLPs then made structured: as they are projected, and
as convert fits them to what the dense layers compute of the training images. A row for each structure and rank.

python examples/distil.py
"""

import copy
from typing import Annotated

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

from factorlayer import convert

PATCH = 2  # pixels of 8, each way
SETTINGS = [dict(structure="kronecker", rank=rank) for rank in (1, 4, 16, 32)]
SETTINGS += [dict(structure="monarch", blocks=4, rank=rank) for rank in (1, 2, 4, 8)]


class Reader(nn.Module):
    """Patches of an image as a sequence; the digit is read from their mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((8 // PATCH) ** 2, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        states = self.patches(images).flatten(2).transpose(1, 2) + self.places
        found: Tensor = self.head(self.encoder(states).mean(1))
        return found


def learn(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(
    width: Annotated[int, typer.Option(min=32, help="Features of the transformer.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Its blocks.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="That it learns for.")] = 30,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
) -> None:
    """Convert a trained transformer by projection and by fit: errors of outputs and accuracy on images not learned."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    tested = torch.arange(len(labels)) % 5 == 0
    torch.manual_seed(0)
    dense = Reader(width, layers)
    learn(dense, images[~tested], labels[~tested], epochs, rate)
    dense.eval()

    def outputs(model: nn.Module) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(images[tested])
            return found

    def of(model: nn.Module) -> tuple[float, float]:
        """How far the outputs are from the dense model's, and how many digits are right."""
        found, right = outputs(model), outputs(dense)
        rights = (found.argmax(1) == labels[tested]).double().mean()
        return float((found - right).norm() / right.norm()), float(rights)

    typer.echo(f"dense: {of(dense)[1]:.1%} right")
    typer.echo("| MLPs | their parameters | error, projected | fitted | right, projected | fitted |")
    typer.echo("| --- | --- | --- | --- | --- | --- |")
    for settings in SETTINGS:
        projected, fitted = copy.deepcopy(dense), copy.deepcopy(dense)
        done = convert(projected, {"*.linear?": settings})
        convert(fitted, {"*.linear?": settings}, inputs=[images[~tested]])
        share = sum(c.parameters_after for c in done.changes) / sum(c.parameters_before for c in done.changes)
        (far, right), (near, more) = of(projected), of(fitted)
        words = f"{settings['structure']}, rank {settings['rank']}"
        typer.echo(f"| {words} | {share:.1%} | {far:.1%} | {near:.1%} | {right:.1%} | {more:.1%} |")


if __name__ == "__main__":
    typer.run(main)
