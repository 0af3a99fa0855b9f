"""Times a step of GRUDecoder beside PyTorch's operations on a GPU: `python -m benches.decode --output FILE`.

A step is embedding, context, GRU, head and argmax. In a CUDA graph of STEPS of them, where launches of the host do not
count, and in eager mode, where nothing else does; nn.Linear in eager mode beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benches.machine import describe, in_words
from benches.recurrent import DTYPES, ROUNDS, in_graph
from factorlayer import GRUDecoder

STEPS = 32
EMBEDDING, HIDDEN, VOCABULARY = 256, 512, 5893  # the seed's decoder
# A row: features of the context, samples, dtype, what is chosen.
ROWS: list[tuple[int, int, str, Any]] = [
    (0, 1, "float32", "argmax"),
    (0, 1, "bfloat16", "argmax"),
    (512, 1, "float32", "argmax"),
    (0, 4, "float32", "argmax"),
    (0, 16, "float32", "argmax"),
    (0, 16, "bfloat16", "argmax"),
    (0, 1, "float32", ("sample", 0.8)),
    (0, 1, "float32", ("best", 8)),
]
app = typer.Typer(add_completion=False)


@dataclass
class Row:
    """Microseconds of a step: of GRUDecoder and of PyTorch's operations, in a graph and in eager mode."""

    context: int
    samples: int
    dtype: str
    choose: Any
    us: dict[str, float]


@app.command()
def main(output: Annotated[Path | None, typer.Option(help="Results file.")] = None) -> None:
    rows = []
    with torch.no_grad():
        for context, samples, dtype, choose in ROWS:
            rows.append(Row(context, samples, dtype, choose, times(context, samples, DTYPES[dtype], choose)))
            typer.echo(line(asdict(rows[-1])))
    found = {"machine": describe("cuda", []), "rows": [asdict(row) for row in rows]}
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


def times(context: int, samples: int, dtype: torch.dtype, choose: Any) -> dict[str, float]:
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    embedding = nn.Embedding(VOCABULARY, EMBEDDING, **like)
    gru, head = nn.GRU(EMBEDDING + context, HIDDEN, **like), nn.Linear(HIDDEN, VOCABULARY, **like)
    first = torch.zeros(samples, dtype=torch.int64, device="cuda")
    state = torch.zeros(1, samples, HIDDEN, **like)
    beside = torch.randn(samples, context, **like) if context else None
    found = {}
    for name in ("fused", "batched"):
        decoder = GRUDecoder(embedding, gru, head, choose, implementation=name)

        def steps() -> None:
            tokens, h = first, state
            for _ in range(STEPS):
                made = decoder.step(tokens, h, beside)  # noqa: B023 (called here alone)
                tokens, h = made[0] if made[0].dim() == 1 else made[0][:, 0], made[-1]

        found[f"{name}, graph"] = in_graph(steps) / STEPS
        found[f"{name}, eager"] = eager(steps) / STEPS
    x = torch.randn(samples, HIDDEN, **like)
    small = nn.Linear(HIDDEN, HIDDEN, **like)

    def products() -> Tensor | None:
        y = None
        for _ in range(STEPS):
            y = small(x)
        return y

    found["nn.Linear, eager"] = eager(products) / STEPS
    return found


def eager(call: Callable[[], Any]) -> float:
    """Microseconds of the host until all is on its way, the GPU's queue empty before."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(found)


def line(row: dict[str, Any]) -> str:
    choose = row["choose"] if isinstance(row["choose"], str) else " ".join(map(str, row["choose"]))
    us = [row["us"][name] for name in ("fused, graph", "batched, graph", "fused, eager", "batched, eager")]
    times = f"{us[1] / us[0]:.1f}x"
    cells = [choose, row["dtype"], row["samples"], row["context"], *(f"{each:.1f}" for each in us[:2]), times]
    cells += [f"{each:.1f}" for each in (*us[2:], row["us"]["nn.Linear, eager"])]
    return f"| {' | '.join(map(str, cells))} |"


def markdown(path: Path) -> list[str]:
    """The table of a results file."""
    told = json.loads(path.read_text())
    head = ["choice", "dtype", "samples", "context", "GRUDecoder, graph", "PyTorch, graph", "over it"]
    head += ["GRUDecoder, host", "PyTorch, host", "an nn.Linear, host"]
    sizes = f"embedding {EMBEDDING}, hidden {HIDDEN}, vocabulary {VOCABULARY}"
    lines = [in_words(told["machine"]) + f". Microseconds of a step; {sizes}.", ""]
    return [*lines, f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *map(line, told["rows"])]


if __name__ == "__main__":
    app()
