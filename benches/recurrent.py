"""Times FactorGRU beside nn.GRU on a GPU, and saves what came out: `python -m benches.recurrent --output FILE`. With
`--select "dense 512*"` some units alone.

Each is captured in a CUDA graph, forward alone and with backward, so that launches of the host do not count. float32 is
as PyTorch's switches leave it, where recurrences may be TF32 and products may not; in tf32 both may.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benches.ceilings import tf32_allowed
from benches.machine import describe, in_words
from factorlayer import FactorGRU

ROUNDS = 7
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}
DENSE: dict[str, Any] = {}
# A row: its name, what FactorGRU is told, features of input and state, sequences, steps.
UNITS: list[tuple[str, dict[str, Any], int, int, int, int]] = [
    ("32 x 32", {"structure": "kronecker"}, 1024, 1024, 16, 1024),
    ("64 x 64", {"structure": "kronecker"}, 4096, 4096, 16, 1024),
    ("8 blocks of 64", {"structure": "blocks", "blocks": 8}, 512, 512, 16, 1024),
    ("Monarch, 8 groups", {"structure": "monarch", "blocks": 8}, 1024, 1024, 16, 1024),
    ("Monarch, 16 and 32 groups", {"structure": "monarch"}, 512, 512, 16, 1024),
    ("dense 128, 2 layers", {"num_layers": 2}, 45, 128, 61, 11),
    ("dense 256", DENSE, 256, 256, 16, 1024),
    ("dense 512, one sequence", DENSE, 768, 512, 1, 13),
    ("dense 512", DENSE, 512, 512, 16, 1024),
    ("dense 512, 128 sequences", DENSE, 256, 512, 128, 32),
    ("dense 512, 4096 sequences", DENSE, 48, 512, 4096, 24),
    ("dense 768", DENSE, 768, 768, 16, 1024),
    ("dense 768, 256 sequences", DENSE, 768, 768, 256, 64),
    ("dense 1024", DENSE, 1024, 1024, 16, 1024),
    ("dense 1024, 1000 sequences", DENSE, 256, 1024, 1000, 32),
]
app = typer.Typer(add_completion=False)


@dataclass
class Row:
    """Microseconds of a whole call, by "auto", "fused" and "cudnn", forward and with backward; None with a note."""

    name: str
    dtype: str
    hidden: int
    sequences: int
    steps: int
    us: dict[str, list[float | None]]
    notes: dict[str, str]


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    patterns: Annotated[
        list[str] | None,
        typer.Option("--select", help="Glob on units' names; repeatable. Of a results file, other rows stay."),
    ] = None,
) -> None:
    chosen = [unit for unit in UNITS if any(fnmatch(unit[0], pattern) for pattern in patterns or ["*"])]
    if not chosen:
        raise typer.BadParameter(f"--select {patterns} matches none of {', '.join(unit[0] for unit in UNITS)}")
    rows: list[dict[str, Any]] = []
    for name, told, inputs, hidden, sequences, steps in chosen:
        for dtype in DTYPES:
            row = Row(name, dtype, hidden, sequences, steps, {}, {})
            for subject in ("auto", "fused", "cudnn"):
                try:
                    with tf32_allowed(dtype == "tf32"):
                        row.us[subject] = times(subject, told, inputs, hidden, sequences, steps, DTYPES[dtype])
                except (RuntimeError, torch.OutOfMemoryError) as error:
                    row.us[subject], row.notes[subject] = [None, None], str(error)[:200]
            rows.append(asdict(row))
            typer.echo(line(row))
    if output is not None:
        if patterns and output.exists():
            rows = merged(json.loads(output.read_text())["rows"], rows)
        output.write_text(json.dumps({"machine": describe("cuda", []), "rows": rows}, indent=1) + "\n")


def merged(before: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the order of UNITS, where new rows take the place of those before."""
    by_name = {(row["name"], row["dtype"]): row for row in [*before, *new]}
    return [by_name[name, dtype] for name, *_ in UNITS for dtype in DTYPES if (name, dtype) in by_name]


def times(
    subject: str, told: dict[str, Any], inputs: int, hidden: int, sequences: int, steps: int, dtype: torch.dtype
) -> list[float | None]:
    torch.manual_seed(0)
    module: nn.Module
    if subject == "cudnn":
        module = nn.GRU(inputs, hidden, told.get("num_layers", 1), device="cuda", dtype=dtype)
    else:
        told = told | {"implementation": subject}
        module = FactorGRU(inputs, hidden, **told, device="cuda", dtype=dtype)
    x = torch.randn(steps, sequences, inputs, device="cuda", dtype=dtype)
    grad = torch.randn(steps, sequences, hidden, device="cuda", dtype=dtype)
    learned = [x.requires_grad_(), *module.parameters()]

    def forward() -> Tensor:
        with torch.no_grad():
            made: Tensor = module(x)[0]
            return made

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x)[0], learned, grad)

    return [in_graph(forward), in_graph(both)]


def in_graph(call: Any) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    found: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def per_step(row: Row, subject: str, of_pass: int) -> float | None:
    us = row.us[subject][of_pass]
    return None if us is None else us / row.steps


def cells(row: Row) -> list[str]:
    """Microseconds a step, and how many times as fast as cuDNN auto is."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    made = []
    for of_pass in range(2):
        auto, fused, cudnn = (per_step(row, subject, of_pass) for subject in ("auto", "fused", "cudnn"))
        times = "-" if auto is None or cudnn is None else f"{cudnn / auto:.2f}x"
        made += [shown(fused), shown(auto), shown(cudnn), times]
    return made


def line(row: Row) -> str:
    return f"| {row.name} | {row.dtype} | {row.sequences} x {row.steps} | {' | '.join(cells(row))} |"


def markdown(path: Path) -> list[str]:
    """The table of a results file."""
    told = json.loads(path.read_text())
    names = [f"{pass_} {who}" for pass_ in ("fwd", "fwd+bwd") for who in ("fused", "auto", "nn.GRU", "auto over it")]
    head = ["unit", "dtype", "sequences x steps", *names]
    rows = [line(Row(**row)) for row in told["rows"]]
    lines = [in_words(told["machine"]) + ". Microseconds a step, in a CUDA graph.", ""]
    return [*lines, f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *rows]


if __name__ == "__main__":
    app()
