"""A network that solves a differential equation: -Δu = f on the unit square, u = 0 on its edges, by second derivatives.

u = sin(πx) sin(2πy) + sin(3πx) sin(πy) / 2 is known, so that the error can be told.
Second derivatives go through PyTorch's operations; fused kernels compute states for them once more, which takes longer.
python examples/poisson.py --picture poisson.png
"""

import time
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor, pi

from factorlayer import FactorMLP, Implementation

TERMS = [(1.0, 1, 2), (0.5, 3, 1)]  # amplitude, and half waves along x and y


def solution(places: Tensor) -> Tensor:
    x, y = places.unbind(-1)
    return sum((a * torch.sin(m * pi * x) * torch.sin(n * pi * y) for a, m, n in TERMS), torch.zeros_like(x))


def source(places: Tensor) -> Tensor:
    """f = -Δu"""
    x, y = places.unbind(-1)
    waves = ((a * (m * m + n * n), m, n) for a, m, n in TERMS)
    return sum((pi**2 * a * torch.sin(m * pi * x) * torch.sin(n * pi * y) for a, m, n in waves), torch.zeros_like(x))


def u(network: FactorMLP, places: Tensor) -> Tensor:
    """The network, times what is zero on the edges."""
    x, y = places.unbind(-1)
    free: Tensor = network(2 * places - 1).squeeze(-1)
    return 16 * x * (1 - x) * y * (1 - y) * free


def laplacian(network: FactorMLP, places: Tensor) -> Tensor:
    places = places.requires_grad_()
    (slope,) = torch.autograd.grad(u(network, places).sum(), places, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), places, create_graph=True)[0][:, i] for i in range(2)]
    return second[0] + second[1]


@torch.no_grad()
def relative_error(network: FactorMLP, places: Tensor) -> float:
    right = solution(places)
    return float((u(network, places) - right).norm() / right.norm())


def main(
    width: Annotated[int, typer.Option(min=1, help="Of the hidden layers.")] = 48,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden layers.")] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 3000,
    batch: Annotated[int, typer.Option(min=1, help="Places in a step.")] = 1024,
    rate: Annotated[float, typer.Option(help="Learning rate, at first.")] = 3e-3,
    implementation: Annotated[str, typer.Option(help="auto, naive, batched or fused.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    picture: Annotated[Path | None, typer.Option(help="Where to draw u and its error (needs matplotlib).")] = None,
) -> None:
    """Solve Poisson's equation with a network: its error against the known solution."""
    torch.manual_seed(0)
    way = cast(Implementation, implementation)
    network = FactorMLP([2, *[width] * hidden, 1], activation="tanh", implementation=way, device=device)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    begin = time.perf_counter()
    for step in range(steps):
        places = torch.rand(batch, 2, device=device)
        loss = (laplacian(network, places) + source(places)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            typer.echo(f"step {step}: residual {loss.item() ** 0.5:.3g}")
    lines = torch.linspace(0, 1, 101, device=device)
    grid = torch.cartesian_prod(lines, lines)
    taken = time.perf_counter() - begin
    typer.echo(f"relative error of u {relative_error(network, grid):.2e}, {1000 * taken / steps:.2f} ms a step")
    if picture is not None:
        save(network, grid, len(lines), picture)


def save(network: FactorMLP, grid: Tensor, count: int, path: Path) -> None:
    from matplotlib.figure import Figure

    with torch.no_grad():
        found = u(network, grid)
    figure = Figure(figsize=(7, 3), layout="constrained")
    fields = {"u": found, "error of u": found - solution(grid)}
    for axes, (title, field) in zip(figure.subplots(1, 2), fields.items(), strict=True):
        values = field.reshape(count, count).T.cpu().numpy()
        drawn = axes.imshow(values, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
        figure.colorbar(drawn, ax=axes)
        axes.set_title(title)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
