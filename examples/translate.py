"""Translation without attention: dates as people write them, letter by letter, into 1987-03-05. Encoder and decoder are
a FactorGRU each, beside the same of nn.GRU.

The encoder's last state is all that the decoder knows. Strings of different length go through as a PackedSequence.
python examples/translate.py --picture translate.png
"""

import datetime
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
import typer
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from factorlayer import FactorGRU, GRUDecoder
from factorlayer.maths.recurrence import GateStructure

Unit = nn.GRU | FactorGRU
WRITTEN = string.ascii_lowercase + string.digits + " ,./'"
DATE = string.digits + "-"
LENGTH = len("1987-03-05")
FIRST = len(DATE)  # what the decoder is given before the first letter
FORMS = (
    "%A, %d %B %Y", "%A the {th} of %B, %Y", "%B {th}, %Y", "{d} %b %Y", "%b {d} '%y", "the {th} of %B %Y", "%d.%m.%Y",
    "%a %d %b %Y", "%B %Y, the {th}", "%Y %b {d}", "{d} %B, in the year %Y", "%m/%d/%Y",
)  # fmt: skip
EARLIEST, DAYS = datetime.date(1940, 1, 1), 36524  # two digits of a year are enough


def written(day: datetime.date, form: str) -> str:
    ending = "th" if 10 < day.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return day.strftime(form).format(d=day.day, th=f"{day.day}{ending}").lower()


def numbers(text: str, letters: str) -> Tensor:
    return torch.tensor([letters.index(letter) for letter in text])


def pairs(days: Sequence[int], draw: random.Random) -> tuple[list[Tensor], Tensor]:
    """Dates, each in a form that is drawn, and what they are to become, [dates, letters]."""
    dates = [EARLIEST + datetime.timedelta(days=day) for day in days]
    given = [numbers(written(date, draw.choice(FORMS)), WRITTEN) for date in dates]
    return given, torch.stack([numbers(date.isoformat(), DATE) for date in dates])


class Translator(nn.Module):
    def __init__(self, encoder: Unit, decoder: Unit, features: int, hidden: int) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.letters, self.made = nn.Embedding(len(WRITTEN), features), nn.Embedding(len(DATE) + 1, features)
        self.readout = nn.Linear(hidden, len(DATE))

    def read(self, given: Sequence[Tensor]) -> Tensor:
        """The state behind each string."""
        packed = pack_sequence([self.letters(each) for each in given], enforce_sorted=False)
        state: Tensor = self.encoder(packed)[1]
        return state

    def forward(self, given: Sequence[Tensor], right: Tensor) -> Tensor:
        """What the decoder expects at each letter, if those before it are right: [letters, strings, kinds]."""
        before = torch.cat([torch.full_like(right[:, :1], FIRST), right[:, :-1]], dim=1)
        states, _ = self.decoder(self.made(before.t()), self.read(given))
        expected: Tensor = self.readout(states)
        return expected

    def translate(self, given: Sequence[Tensor]) -> Tensor:
        """Letter by letter, each of which the next one is made of: [strings, letters]."""
        with torch.no_grad():
            state = self.read(given)
        decoder = GRUDecoder(self.made, self.decoder, self.readout)
        return decoder.generate(torch.full((len(given),), FIRST), state, LENGTH)[0]


def learn(model: Translator, steps: int, batch: int, rate: float) -> tuple[list[tuple[int, float]], float]:
    """The share of whole dates that are right among those not learned from, as it learns, and seconds a step."""
    draw = random.Random(0)
    days = list(range(DAYS))
    draw.shuffle(days)
    tested, learned = days[:1000], days[1000:]
    test = pairs(tested, draw)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    curve, taken = [], 0.0
    for step in range(1, steps + 1):
        given, right = pairs(draw.sample(learned, batch), draw)
        begin = time.perf_counter()
        loss = F.cross_entropy(model(given, right).flatten(0, 1), right.t().flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        taken += time.perf_counter() - begin
        if step % max(1, steps // 20) == 0:
            share = float((model.translate(test[0]) == test[1]).all(dim=1).float().mean())
            curve.append((step, share))
    return curve, taken / steps


def main(
    hidden: Annotated[int, typer.Option(min=1, help="Features of the state.")] = 256,
    structure: Annotated[str, typer.Option(help="blocks, monarch or kronecker.")] = "monarch",
    blocks: Annotated[int | None, typer.Option(min=1, help="Of monarch and blocks; by default about √hidden.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of a matrix, or of its blocks.")] = 1,
    features: Annotated[int, typer.Option(min=1, help="Of a letter.")] = 16,
    steps: Annotated[int, typer.Option(min=1)] = 1500,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    rate: Annotated[float, typer.Option(help="Learning rate, at most.")] = 5e-3,
    only: Annotated[str | None, typer.Option(help="dense or factored; both if neither is given.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw accuracies (needs matplotlib).")] = None,
) -> None:
    """Learn to read dates with FactorGRU and with nn.GRU: accuracy, parameters and time of both."""

    def dense() -> Unit:
        return nn.GRU(features, hidden)

    def factored() -> Unit:
        kind = cast(GateStructure, structure)
        return FactorGRU(features, hidden, structure=kind, blocks=blocks, rank=rank, input_structure="dense")

    curves = {}
    for name, make in {"dense": dense, "factored": factored}.items():
        if only not in (None, name):
            continue
        torch.manual_seed(0)
        model = Translator(make(), make(), features, hidden)
        curves[name], seconds = learn(model, steps, batch, rate)
        count = sum(parameter.numel() for parameter in model.parameters())
        right = curves[name][-1][1]
        typer.echo(f"{name}: {right:.1%} right, {count} parameters, {1000 * seconds:.0f} ms a step")
        given = [numbers(text, WRITTEN) for text in ("the 5th of march 1987", "feb 29 '04")]
        for text, made in zip(("the 5th of march 1987", "feb 29 '04"), model.translate(given), strict=True):
            typer.echo(f"  {text} -> {''.join(DATE[i] for i in made)}")
    if picture is not None:
        save(curves, picture)


def save(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*zip(*((step, 100 * share) for step, share in curve), strict=True), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("dates that are right, %")
    axes.legend()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    typer.run(main)
