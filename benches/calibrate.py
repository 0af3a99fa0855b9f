"""Makes a GPU's table of rates and latencies (factorlayer/device/table.py) from a run on that GPU, in half a minute.

    python -m benches.calibrate                 # for this user: kept in the cache folder, and taken from then on
    python -m benches.calibrate --output FILE   # elsewhere, such as into factorlayer/device/rates

A number of the table is what kernels sustain of what a probe reaches (benches/probes.py), by the share that they had on
the H200 that the prediction was fitted on. What is beyond what such a GPU can do is refused, and no table is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benches.floor import ImpossibleFigureError
from benches.machine import describe, in_words
from factorlayer.autograd.layer_ops import gpu_limits
from factorlayer.device.gpu import Gpu
from factorlayer.device.table import KEY, Rates, Table, file_name, kept_in

# The share of each probe's figure that predictions were fitted with, on an H200; 1 for figures that are not named.
# Products in 16 bits count twice, since families take shares of what warpgroups do.
SHARES = {
    "shared_bytes": 0.92,
    "special_functions": 0.94,
    "double_functions": 0.8,
    "flops.float64": 0.92,
    "flops.tf32": 0.9,
    "flops.float16": 2 * 0.91,
    "flops.bfloat16": 2 * 0.91,
    "sync_us": 1.6,
}
# Numbers that predictions were fitted with and no probe reproduces: on one H100 probes reach 0.83 and 0.43 of them. A
# new table keeps what the GPU had before.
KEPT = "instructions", "wait_us"
FLOAT32_OF_TF32 = 1 / 3  # three products make one
# The most that a multiprocessor can do in a cycle.
MOST_IN_A_CYCLE = {"l2_bytes": 64, "shared_bytes": 128, "instructions": 4, "special_functions": 16}
FLOPS = "flops.float16", "flops.bfloat16", "flops.tf32", "flops.float64"
MOST_FLOPS = {
    80: (2048, 2048, 1024, 128),
    86: (1024, 1024, 512, 4),
    89: (1024, 1024, 512, 4),
    90: (4096, 4096, 2048, 256),
    100: (8192, 8192, 4096, 256),
    120: (1024, 1024, 512, 4),
}
OF_DOUBLE_FUNCTION = 40  # FLOPs of an exponential in double, at least
LEAST_SHARE = 0.05  # of what it can do at most: less is another unit, or another program's GPU
NOISE = 1.02  # times what it can do at most, that a clock may be wrong by
CLOCKS = 300, 4000  # cycles of a microsecond, at least and at most
LATENCIES = {"behind_us": (0.3, 20), "wait_us": (0.2, 5), "ramp_us": (0.1, 50)}
LATENCIES["sync_us"] = 0.002, 1

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def bounds(gpu: Gpu, clock: float) -> dict[str, tuple[float, float]]:
    """The least and the most that a probe's figure may be, for a clock of so many cycles in a microsecond. What an
    architecture can do that is not named lies between all others."""
    named = [MOST_FLOPS[gpu.arch]] if gpu.arch in MOST_FLOPS else list(MOST_FLOPS.values())
    found = {name: (each * clock, each * clock) for name, each in MOST_IN_A_CYCLE.items()}
    found |= {name: (min(each) * clock, max(each) * clock) for name, *each in zip(FLOPS, *named, strict=True)}
    least, most = found["flops.float64"]
    found["double_functions"] = least / OF_DOUBLE_FUNCTION, most / OF_DOUBLE_FUNCTION
    found["memory_bytes"] = (gpu.memory / gpu.sms, gpu.memory / gpu.sms) if gpu.memory else found["l2_bytes"]
    found = {name: (LEAST_SHARE * least, NOISE * most) for name, (least, most) in found.items()}
    return found | LATENCIES | {"cycles": CLOCKS}


def check(measured: dict[str, float], gpu: Gpu, clock: float) -> None:
    """Raises if a figure is beyond what such a GPU can do, or is missing."""
    wrong = []
    for name, (least, most) in bounds(gpu, clock).items():
        figure = measured.get(name, math.nan)
        if not least <= figure <= most:
            wrong.append(f"{name} should be from {least:.4g} to {most:.4g}, it came out as {figure:.4g}")
    if wrong:
        raise ImpossibleFigureError(f"{'; '.join(wrong)}: measure again, on a GPU that nobody else uses")


def rates_of(measured: dict[str, float], before: Rates) -> Rates:
    """The table's numbers, of four digits, of what the probes reach."""
    found = measured | {"flops.float32": FLOAT32_OF_TF32 * measured["flops.tf32"]}
    shares = SHARES | {"flops.float32": SHARES["flops.tf32"]}
    numbers = {name: float(f"{shares.get(name, 1) * figure:.4g}") for name, figure in found.items()}
    numbers |= {name: before.by_name[name] for name in KEPT}
    flops = {name.removeprefix("flops."): numbers.pop(name) for name in sorted(numbers) if name.startswith("flops.")}
    return Rates(flops=flops, **numbers)


def lines(measured: dict[str, float], rates: Rates, before: Table) -> Iterable[str]:
    """A number each: what the probe reached, what the table has of it, and what it had before."""
    yield f"{'':18}{'probe':>12}{'table':>12}{'until now':>12}{'ratio':>8}   ({before.source})"
    old = before.rates.by_name
    for name, number in rates.by_name.items():
        probe = f"{measured[name]:.4g}" if name in measured else "-"
        yield f"{name:18}{probe:>12}{number:>12.4g}{old[name]:>12.4g}{number / old[name]:>8.2f}"


def table_of(measured: dict[str, float], gpu: Gpu, machine: dict[str, Any]) -> Table:
    return Table(tuple(getattr(gpu, name) for name in KEY), machine, rates_of(measured, gpu.rates))


def write(table: Table, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(table.text())
    draft.replace(path)


@app.command()
def calibrate(
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="The table's file; by default this GPU's in the cache folder."
        ),
    ] = None,
) -> None:
    """Measure the rates and latencies of this GPU, and write its table."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("a GPU that PyTorch can use should be measured, there is none")
    from benches.probes import Probes

    gpu = Gpu(*gpu_limits(torch.cuda.current_device()))
    probes, measured = Probes(gpu), dict[str, float]()
    machine = describe("cuda", [1])
    typer.echo(in_words(machine))
    for name, figure in probes.measure():
        measured[name] = figure
        typer.echo(f"{name} {figure:.4g}", err=True)
    table = table_of(measured, gpu, machine | {"probes": measured, "fastest_clock": probes.clock})
    typer.echo("\n".join(lines(measured, table.rates, gpu.table)))
    try:
        check(measured, gpu, probes.clock)
    except ImpossibleFigureError as error:
        typer.echo(f"benches.calibrate: {error}", err=True)
        raise typer.Exit(1) from None
    folder = kept_in()
    path = output or (folder / file_name(table.gpu) if folder else None)
    if path is None:
        raise typer.BadParameter("there is no home folder to keep a table in; give --output")
    write(table, path)
    typer.echo(f"The table is in {path}.")


if __name__ == "__main__":
    app()
