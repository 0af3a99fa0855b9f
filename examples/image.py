"""An image as a function of x and y: a network with sine activations learns it, run by PyTorch and through fuse.

python examples/image.py --picture image.png
"""

import copy
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor, nn

from factorlayer import Implementation, fuse


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def sine_network(width: int, hidden: int) -> nn.Sequential:
    """Initialised as in Sitzmann et al. 2020: the first layer makes waves of up to 30 radians."""
    parts: list[nn.Module] = []
    for p in [2, *[width] * (hidden - 1)]:
        layer = nn.Linear(p, width)
        bound = math.sqrt(6 / p) if parts else 30 / p
        nn.init.uniform_(layer.weight, -bound, bound)
        parts += [layer, Sine()]
    return nn.Sequential(*parts, nn.Linear(width, 3))


def draw(size: int) -> tuple[Tensor, Tensor]:
    """Places [size², 2] from -1 to 1, and their colours [size², 3]: a sun over waves, with edges and fine lines."""
    steps = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    sky = torch.stack([0.9 - 0.3 * y, 0.6 - 0.2 * y, 0.5 + 0.4 * y], -1)
    distance = (x**2 + (y + 0.2) ** 2).sqrt()
    sun = torch.tensor([1.0, 0.9, 0.4]) * (0.8 + 0.2 * torch.cos(60 * distance))[..., None]
    wave = 0.5 + 0.5 * torch.sin(12 * x + 3 * torch.sin(4 * x) + 30 * (y - 0.2) ** 2)
    sea = torch.stack([0.1 * wave, 0.3 + 0.4 * wave, 0.5 + 0.4 * wave], -1)
    image = torch.where((distance < 0.5)[..., None], sun, sky)
    image = torch.where((y > 0.25 + 0.05 * torch.sin(9 * x))[..., None], sea, image)
    return torch.stack([x, y], -1).reshape(-1, 2), image.clamp(0, 1).reshape(-1, 3)


def fit(
    networks: Sequence[nn.Module], places: Tensor, colours: Tensor, steps: int, batch: int, rate: float
) -> list[float]:
    """Trains them, a step of each in turn, and returns the median seconds of a step."""
    optimizers = [torch.optim.Adam(network.parameters(), rate) for network in networks]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]
    taken: list[list[float]] = [[] for _ in networks]
    for _ in range(steps):
        chosen = torch.randint(len(places), (batch,), device=places.device)
        x, right = places[chosen], colours[chosen]
        for network, optimizer, schedule, times in zip(networks, optimizers, schedules, taken, strict=True):
            begin = seconds(places)
            loss = (network(x) - right).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            times.append(seconds(places) - begin)
    return [statistics.median(times) for times in taken]


def seconds(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main(
    size: Annotated[int, typer.Option(min=8, help="Pixels along a side.")] = 192,
    width: Annotated[int, typer.Option(min=1, help="Of the hidden layers.")] = 64,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden layers.")] = 4,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Pixels in a step.")] = 8192,
    rate: Annotated[float, typer.Option(help="Learning rate, at first.")] = 3e-3,
    implementation: Annotated[str, typer.Option(help="Of the fused network: auto, naive, batched or fused.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    picture: Annotated[Path | None, typer.Option(help="Where to draw the images (needs matplotlib).")] = None,
) -> None:
    """Fit an image with a coordinate network, in eager PyTorch and fused: PSNR and time of both."""
    torch.manual_seed(0)
    places, colours = (tensor.to(device) for tensor in draw(size))
    plain = sine_network(width, hidden).to(device)
    networks = {"PyTorch": plain, "fused": fuse(copy.deepcopy(plain), cast(Implementation, implementation))}
    images = {"the image": colours}
    taken = fit(list(networks.values()), places, colours, steps, batch, rate)
    for (name, network), step in zip(networks.items(), taken, strict=True):
        with torch.no_grad():
            found = network(places).clamp(0, 1)
        psnr = -10 * math.log10((found - colours).square().mean().item())
        typer.echo(f"{name}: PSNR {psnr:.2f} dB, {1000 * step:.2f} ms a step")
        images[f"{name}, {psnr:.1f} dB"] = found
    if picture is not None:
        save(images, size, picture)


def save(images: dict[str, Tensor], size: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(images), 3.2), layout="constrained")
    for axes, (title, image) in zip(figure.subplots(1, len(images)), images.items(), strict=True):
        axes.imshow(image.reshape(size, size, 3).cpu().numpy())
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
