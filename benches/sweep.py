"""Layers and blocks that nobody named, drawn and measured: `python -m benches.sweep --help`.

Each 20 rows (8 on a CPU) hold every dtype with every structure: two Kronecker layers, a Monarch layer and a block. One
generator draws them from the seed, the same rows on every machine; none is left out for its times, and one that fails
is kept as failed.

    Kronecker   1 to 6 factors; sizes 2 to 256, log-uniform, in a third of the layers all of them multiples of 8; in
                half of them other sizes out than in; rank 1 to 3, as far as it adds something; at most 2^20 features
    Monarch     2 to 64 groups, in a third of the layers another number out than in; groups of 2 to 512, log-uniform,
                in a third of the layers multiples of 8, in half of them other sizes out than in; rank 1 to 64
    blocks      1 to 8 dense layers with any named activation between them; widths 1 to 512, log-uniform, in half of
                the blocks one for all hidden layers
    bias        in half of the layers, and in all blocks
    samples     1 to 100,000, log-uniform, as far as a bound on the bytes of all tensors and one on the FLOPs allow

Sizes that leave no room for a single sample are drawn again. Factors that would make more than 2^20 features are drawn
from those that leave room for the others. On a CPU both bounds are lower, and without --dtype there are float32 and
float64.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benches import sweep_tables
from benches.floor import DTYPES
from benches.machine import describe, usable_cores
from benches.results import FOLDER
from benches.sweep_figure import draw as draw_figure
from benches.sweep_results import Sweep
from benches.sweep_rows import Ways, measure_rows
from benches.workloads import ALL_DTYPES, CPU_DTYPES, Block, Layer, Workload
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.maths.spec import LayerSpec

KINDS = ("kronecker", "kronecker", "monarch", "block")
MOST_FACTORS, LARGEST_FACTOR, MOST_RANK, MOST_FEATURES = 6, 256, 3, 1 << 20
MOST_GROUPS, LARGEST_GROUP, MOST_BLOCK_RANK = 64, 512, 64
MOST_LAYERS, WIDEST = 8, 512
MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Bounds:
    """The most that a row may take: bytes of all tensors (x, y, weights, gradients, the largest between them), and
    FLOPs of a forward pass."""

    bytes: int
    flops: int


BOUNDS = {"cuda": Bounds(2 * 10**9, 2 * 10**11), "cpu": Bounds(25 * 10**7, 4 * 10**9)}


def drawn(seed: int, count: int, device: str, dtypes: Sequence[str]) -> list[tuple[Workload, str]]:
    """The first `count` rows of a seed. A larger count begins with the rows of a smaller one."""
    source, rows = random.Random(seed), list[tuple[Workload, str]]()
    while len(rows) < count:
        pairs = [(kind, dtype) for kind in KINDS for dtype in dtypes]
        source.shuffle(pairs)
        for kind, dtype in pairs:
            rows.append((_workload(source, kind, dtype, f"{seed}:{len(rows)}", device), dtype))
    return rows[:count]


def _workload(source: random.Random, kind: str, dtype: str, name: str, device: str) -> Workload:
    bounds = BOUNDS[device]
    while True:
        workload = _block(source, name, device) if kind == "block" else _layer(source, kind, name, device)
        fixed, each = footprint(workload)
        room = (bounds.bytes // DTYPES[dtype].itemsize - fixed) // each
        most = min(MOST_SAMPLES, room, bounds.flops // workload.costs[1])
        if most >= 1:
            batch = _size(source, 1, most)
            if isinstance(workload, Block):
                return Block(name, workload.widths, workload.activation, batch, device, (dtype,), "drawn")
            spec = workload.spec
            sizes = spec.in_factors, spec.out_factors
            bias = random.Random(f"{name} bias").random() < 1 / 2  # apart: a seed's other draws are what they were
            return Layer(name, spec.structure, batch, *sizes, device, (dtype,), "drawn", spec.rank, bias)


def _layer(source: random.Random, kind: str, name: str, device: str) -> Layer:
    spec = _kronecker(source) if kind == "kronecker" else _monarch(source)
    return Layer(name, spec.structure, 1, spec.in_factors, spec.out_factors, device, (), "drawn", spec.rank)


def _kronecker(source: random.Random) -> LayerSpec:
    count, step = source.randint(1, MOST_FACTORS), 8 if source.random() < 1 / 3 else 1
    in_factors = out_factors = _factors(source, count, step)
    if source.random() < 1 / 2:
        while out_factors == in_factors:
            out_factors = _factors(source, count, step)
    rank = min(source.randint(1, MOST_RANK), LayerSpec("kronecker", in_factors, out_factors).max_rank)
    return LayerSpec("kronecker", in_factors, out_factors, rank)


def _factors(source: random.Random, count: int, step: int) -> tuple[int, ...]:
    """Factors in any order. Each leaves room for those drawn after it."""
    sizes, least, room = list[int](), max(2, step), MOST_FEATURES
    for behind in reversed(range(count)):
        sizes.append(_size(source, least, min(LARGEST_FACTOR, room // least**behind), step))
        room //= sizes[-1]
    source.shuffle(sizes)
    return tuple(sizes)


def _monarch(source: random.Random) -> LayerSpec:
    K = L = _size(source, 2, MOST_GROUPS)
    if source.random() < 1 / 3:
        while L == K:
            L = _size(source, 2, MOST_GROUPS)
    step = 8 if source.random() < 1 / 3 else 1
    p = s = _size(source, max(2, step), LARGEST_GROUP, step)
    if source.random() < 1 / 2:
        while s == p:
            s = _size(source, max(2, step), LARGEST_GROUP, step)
    return LayerSpec("monarch", (K, p), (s, L), _size(source, 1, min(MOST_BLOCK_RANK, p, s)))


def _block(source: random.Random, name: str, device: str) -> Block:
    count, activation = source.randint(1, MOST_LAYERS), source.choice(sorted(ACTIVATIONS))
    widths = [_size(source, 1, WIDEST) for _ in range(count + 1)]
    if source.random() < 1 / 2:
        widths[1:-1] = widths[1:2] * (count - 1)
    return Block(name, tuple(widths), activation, 1, device, (), "drawn")


def _size(source: random.Random, least: int, most: int, step: int = 1) -> int:
    """Log-uniform: in each octave as often as in the next."""
    low, high = -(-least // step), most // step
    return step * min(high, int(low * ((high + 1) / low) ** source.random()))


def footprint(workload: Workload) -> tuple[int, int]:
    """Elements of all tensors: of the weights and their gradients, and for each sample."""
    if isinstance(workload, Block):
        between = max(workload.widths)
    else:
        # The batched implementation multiplies a tied weight by each sample's state, and so makes its gradient.
        contractions = workload.spec.contractions
        between = max(c.outer * max(c.p * c.inner, c.q * c.inner) for c in contractions)
        between = max([between, *(c.outer * c.p * c.q for c in contractions if c.tied and c.inner > 1)])
    return 2 * workload.costs[0], 2 * sum(workload.features) + between


EXAMPLES = """Examples:

python -m benches.sweep --seed 1 --count 20 --threads 1 --output one.json

python -m benches.sweep --seed 1 --count 60 --device cuda

python -m benches.sweep --seed 1 --count 200 --device cuda --seconds 500 --resume

python -m benches.sweep --seed 1 --count 200 --device cuda --resume --against before.json
"""
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(help="Draw layers and blocks at random and measure them against the hardware's floor.", epilog=EXAMPLES)
def main(
    seed: Annotated[int, typer.Option(help="Of the generator that draws the rows.")],
    count: Annotated[int, typer.Option(min=1, help="Rows.")] = 60,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[list[str] | None, typer.Option("--dtype", help="Draw of these alone; repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    candidates: Annotated[bool, typer.Option(help="Also time the planner's other ways, on a GPU (slow).")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Rows whose kernels are compiled at once, on a GPU.")] = 8,
    seconds: Annotated[float, typer.Option(help="Begin no row after so long; what there is, is kept.")] = math.inf,
    resume: Annotated[bool, typer.Option(help="Go on with the rows that the results file lacks.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Results file. Default: benches/results/sweeps/DEVICE-SEED.json.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="An older results file to compare with.")
    ] = None,
    figure: Annotated[bool, typer.Option(help="Draw efficiency over floor, beside the results file.")] = True,
) -> None:
    begun = time.monotonic()
    wanted = _dtypes(device, dtypes)
    path = output or FOLDER / "sweeps" / f"{device}-{seed}.json"
    threads = None if device == "cuda" else _threads(threads)
    sweep = Sweep(describe(device, [threads or torch.get_num_threads()]), {}, [], seed, device, wanted, threads)
    try:
        before = Sweep.load(against) if against else None
        if resume and path.exists():
            sweep = sweep.going_on(Sweep.load(path), path)
    except ValueError as error:
        typer.echo(f"benches.sweep: {error}", err=True)
        raise typer.Exit(2) from None
    rows = drawn(seed, count, device, wanted)
    at = torch.get_num_threads()
    torch.set_num_threads(threads or at)
    interrupted = False
    try:
        measure_rows(sweep, rows, path, Ways(candidates, min(workers, usable_cores()), begun + seconds))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        torch.set_num_threads(at)
    sweep.save(path)
    sweep_tables.show(sweep, Console(width=None if os.isatty(1) else 160, markup=False, highlight=False), before)
    typer.echo(f"saved {len(sweep.rows)} of {count} rows in {path}", err=True)
    if figure and any(row.times for row in sweep.rows):
        _draw(sweep, path.with_suffix(".svg"))
    if interrupted:
        raise typer.Exit(130)
    if any(row.broken for row in sweep.rows):
        raise typer.Exit(1)


def _draw(sweep: Sweep, path: Path) -> None:
    try:
        draw_figure([sweep], path)
    except ValueError as error:
        typer.echo(f"nothing was drawn: {error}", err=True)


def _dtypes(device: str, dtypes: list[str] | None) -> list[str]:
    if device not in BOUNDS:
        raise typer.BadParameter(f"--device should be cpu or cuda, it is {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU that PyTorch can use; there is none, try --device cpu")
    known = [dtype for dtype in ALL_DTYPES if device == "cuda" or dtype != "tf32"]
    for dtype in dtypes or ():
        if dtype not in known:
            raise typer.BadParameter(f"--dtype should be one of {', '.join(known)} on {device}, it is {dtype!r}")
    default = ALL_DTYPES if device == "cuda" else CPU_DTYPES
    return [dtype for dtype in known if dtype in (dtypes or default)]


def _threads(threads: int | None) -> int:
    cores = usable_cores()
    if threads is not None and threads > cores:
        raise typer.BadParameter(f"--threads should be between 1 and {cores}, the cores here; it is {threads}")
    return threads or torch.get_num_threads()


if __name__ == "__main__":
    app()
