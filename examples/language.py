"""A small language model of bytes, learned from this repository's pages and Python: a causal transformer whose MLPs are
dense, Monarch, Kronecker or low-rank, at equal parameters and at equal time.

The others' hidden layers are wider than the dense ones, and their rank is the largest with which the model has no more
parameters. Learning rates follow fan-ins (param_groups), those of low-rank layers, too. Losses are of whole files that
nobody learns from, in bits a byte. The rate is constant after a warm-up, so that one run says both: the loss after so
many steps, and after so many seconds. On a CPU these are the processor's: a busy machine does not count.
python examples/language.py --picture language.png
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
import typer
from torch import Tensor, nn

from factorlayer import convert, param_groups

ROOT = Path(__file__).parents[1]
FOLDERS, ENDINGS = ("benches", "docs", "examples", "factorlayer", "tests"), (".md", ".py")
HELD_OUT = 10  # of so many files, one
KINDS = 256  # of bytes
NAMES = ("dense", "monarch", "kronecker", "low-rank")
WARM_UP = 50  # steps in which the rate grows
TESTED = 64  # pieces of what is held out, as long as the context


@dataclass(frozen=True)
class Sizes:
    width: int
    heads: int
    layers: int
    context: int
    hidden: int  # of a dense MLP
    wider: int  # times that, of the others


def text(folder: Path) -> tuple[Tensor, Tensor]:
    """The bytes to learn from, and those that are held out."""
    found = [path for name in FOLDERS for path in sorted((folder / name).rglob("*")) if path.suffix in ENDINGS]
    parts = bytearray(), bytearray()
    for i, path in enumerate(found):
        parts[i % HELD_OUT == 0].extend(path.read_bytes())
    learned, held_out = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return learned, held_out


class LowRank(nn.Sequential):
    """Two matrices for one. The outputs of a fresh one have the variance that a fresh nn.Linear's have."""

    def __init__(self, features: int, out_features: int, rank: int) -> None:
        first, second = nn.Linear(features, rank, bias=False), nn.Linear(rank, out_features)
        super().__init__(first, second)
        self.both = first, second
        with torch.no_grad():
            for layer in self.both:
                layer.weight.mul_(3**0.25)  # a fresh layer's outputs have a third of the inputs' variance

    def rates(self) -> dict[Tensor, float]:
        """Of both weights, over that of a dense layer, by the rule of param_groups."""
        features = self.both[0].in_features
        return {layer.weight: features / layer.in_features / len(self.both) for layer in self.both}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        given = self.attention(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = given.transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(found.transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(self.before_mlp(x))
        return made


class Language(nn.Module):
    """What is expected behind each byte: [sequences, bytes, kinds]."""

    def __init__(self, sizes: Sizes, hidden: int) -> None:
        super().__init__()
        width = sizes.width
        self.bytes, self.places = nn.Embedding(KINDS, width), nn.Parameter(0.02 * torch.randn(sizes.context, width))
        self.blocks = nn.Sequential(*(Block(width, sizes.heads, hidden) for _ in range(sizes.layers)))
        self.readout = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, KINDS))

    def forward(self, given: Tensor) -> Tensor:
        expected: Tensor = self.readout(self.blocks(self.bytes(given) + self.places))
        return expected


def build(name: str, sizes: Sizes, rank: int) -> Language:
    """A model with MLPs of one kind, all drawn anew."""
    width, hidden = sizes.width, sizes.hidden * (1 if name == "dense" else sizes.wider)
    model = Language(sizes, hidden)
    if name == "low-rank":
        for block in model.blocks:
            assert isinstance(block, Block)
            block.mlp[0], block.mlp[2] = LowRank(width, hidden, rank), LowRank(hidden, width, rank)
    if name == "monarch":
        convert(model, {"blocks.*.mlp.?": dict(structure=name, blocks=4, rank=rank)}, initialize="fresh")
    if name == "kronecker":  # of a small factor and a large one: two of like sizes take a higher rank, and more FLOPs
        large = width // 2
        ends = (width // large, large), (hidden // large, large)
        given = {f"blocks.*.mlp.{i}": dict(factors=factors, rank=rank) for i, factors in ((0, ends), (2, ends[::-1]))}
        convert(model, given, initialize="fresh")
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def rank_of(name: str, sizes: Sizes) -> int:
    """The largest with which a model has no more parameters than the dense one."""
    one, two = (count(build(name, sizes, rank)) for rank in (1, 2))
    return 1 if name == "dense" else max(1, 1 + (count(build("dense", sizes, 1)) - one) // (two - one))


def groups(model: Language, rate: float) -> list[dict[str, Any]]:
    """param_groups, with low-rank layers' weights in groups of their own."""
    own = {
        weight: times for part in model.modules() if isinstance(part, LowRank) for weight, times in part.rates().items()
    }
    found = param_groups(model, lr=rate)
    for group in found:
        group["params"] = [each for each in group["params"] if each not in own]
    return found + [{"params": [weight], "lr": rate * times} for weight, times in own.items()]


@dataclass
class Curve:
    """Bits a byte of what is held out, by steps and by seconds of training."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)

    def at(self, places: Sequence[float], place: float) -> float:
        """On the line between the measured ones around it."""
        behind = max(1, next(i for i, each in enumerate(places) if each >= place))
        before = behind - 1
        share = (place - places[before]) / (places[behind] - places[before])
        return self.bits[before] + share * (self.bits[behind] - self.bits[before])


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """Of every byte but the first of pieces [sequences, bytes], in nats."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def learn(model: Language, data: tuple[Tensor, Tensor], batch: int, rate: float, steps: int, seconds: float) -> Curve:
    """Until both have passed, steps and seconds."""
    learned, held_out = data
    device, long = learned.device.type, len(model.places) + 1
    tested = held_out.unfold(0, long, (len(held_out) - long) // TESTED)[:TESTED]
    draw = torch.Generator().manual_seed(torch.initial_seed())
    optimizer = torch.optim.AdamW(groups(model, rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    loss_of(model, tested[:batch]).backward()  # on a GPU kernels are compiled, before the clock starts
    curve, taken, step = Curve(), 0.0, 0
    while True:
        if step % max(1, steps // 20) == 0:
            with torch.no_grad():
                bits = [float(loss_of(model, part)) / math.log(2) for part in tested.split(batch)]
            curve.steps.append(step)
            curve.seconds.append(taken)
            curve.bits.append(sum(bits) / len(bits))
            if step >= steps and taken >= seconds:
                return curve
        begin = clock(device)
        starts = torch.randint(len(learned) - long, (batch, 1), generator=draw)
        pieces = learned[(starts + torch.arange(long)).to(device)]
        optimizer.zero_grad()
        loss_of(model, pieces).backward()
        optimizer.step()
        schedule.step()
        taken, step = taken + clock(device) - begin, step + 1


def main(
    width: Annotated[int, typer.Option(min=16, help="Features of a byte.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Of attention.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Blocks.")] = 2,
    context: Annotated[int, typer.Option(min=2, help="Bytes that are read at once.")] = 128,
    wider: Annotated[int, typer.Option(min=1, help="Hidden layers of the others, over dense ones.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 8,
    rate: Annotated[float, typer.Option(help="Learning rate of dense layers.")] = 2e-3,
    steps: Annotated[int, typer.Option(min=1, help="That each learns for, at least.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0, help="And for how long, at least.")] = 45,
    seed: Annotated[int, typer.Option(help="Of weights, and of what is drawn to learn from.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; several times.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw losses (needs matplotlib).")] = None,
) -> None:
    """Learn a language model with each kind of MLP: its loss at equal parameters, after equal steps and equal time."""
    sizes = Sizes(width, heads, layers, context, 4 * width, wider)
    learned, held_out = (part.to(device) for part in text(ROOT))
    typer.echo(f"{len(learned)} bytes to learn from, {len(held_out)} held out; losses of these, in bits a byte")
    typer.echo(f"| MLPs | hidden | rank | parameters | ms a step | after {steps} steps | after {seconds:g} s |")
    typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
    curves = {}
    for name in only or NAMES:
        rank = rank_of(name, sizes)
        torch.manual_seed(seed)
        model = build(name, sizes, rank).to(device)
        curve = curves[name] = learn(model, (learned, held_out), batch, rate, steps, seconds)
        hidden, ms = sizes.hidden * (1 if name == "dense" else wider), 1000 * curve.seconds[-1] / curve.steps[-1]
        told = "-" if name == "dense" else str(rank)
        found = f"{curve.at(curve.steps, steps):.3f} | {curve.at(curve.seconds, seconds):.3f}"
        typer.echo(f"| {name} | {hidden} | {told} | {count(model)} | {ms:.0f} | {found} |")
    if picture is not None:
        save(curves, picture)


def save(curves: dict[str, Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        left.plot(curve.steps[1:], curve.bits[1:], label=name)
        right.plot(curve.seconds[1:], curve.bits[1:], label=name)
    left.set_xlabel("step")
    left.set_ylabel("loss, bits a byte")
    right.set_xlabel("seconds of training")
    left.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
