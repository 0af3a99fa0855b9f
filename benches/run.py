"""Measures workloads and prints, checks and saves what came out: `python -m benches.run --help`.

For every workload, dtype and thread count: the floor, then forward and forward+backward of every subject in
turn. A subject that cannot run a workload is shown as "-" with a note; one whose result differs from v2's
is not timed; a time that the hardware does not allow is refused. Wrong results of ours and refused times
make the exit status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benches import report, tables
from benches.ceilings import measure_ceilings, tf32_allowed
from benches.floor import (
    DTYPES,
    Ceilings,
    ImpossibleFigureError,
    dense_work,
    refuse_impossible,
    work,
)
from benches.machine import describe, usable_cores
from benches.results import FOLDER, PASS_NAMES, Results, Row
from benches.subjects import OURS, SUBJECTS, Call, Tensors, UnavailableError, build, tolerances, wrong
from benches.timing import FULL, QUICK, Effort, Timing, kernels_launched, peak_bytes, sets_needed, time_cpu, time_cuda
from benches.workloads import PASSES, Block, Workload, published, select

PRINTED_WIDTH = 180  # where there is no terminal to fold the table to
EXAMPLES = """Examples:

python -m benches.run --select "1024:*" --dtype float32 --threads 1

python -m benches.run --threads 1 --threads 2 --plot

python -m benches.run --device cuda --select "mlp-*" --dtype bfloat16

python -m benches.run --device cuda --output benches/results/h200.json
"""
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(help="Measure v1, v2, v3 and their peers against the hardware's floor.", epilog=EXAMPLES)
def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    patterns: Annotated[
        list[str] | None, typer.Option("--select", help="Glob on workloads' names; repeatable.")
    ] = None,
    dtypes: Annotated[list[str] | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; repeatable.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="CPU threads; repeatable. Default: all cores.")] = None,
    implementations: Annotated[
        list[str] | None,
        typer.Option("--implementation", help=f"Of {', '.join(SUBJECTS)}; repeatable. Default: all."),
    ] = None,
    compile_v2: Annotated[bool, typer.Option("--compile", help="Also v2 under torch.compile (slow to start).")] = False,
    quick: Annotated[bool, typer.Option(help="A few short rounds: does everything run? Not for publishing.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Results file. Default: benches/results/DEVICE.json, for full runs of all workloads only."),
    ] = None,
    plot: Annotated[bool, typer.Option(help="Also draw the results file, beside it.")] = False,
) -> None:
    cases = _cases(device, patterns, dtypes)
    subjects = _subjects(implementations, compile_v2)
    counts: list[int | None] = [None] if device == "cuda" else list(_thread_counts(threads))
    if output is None and not (quick or patterns or dtypes or implementations):
        output = FOLDER / f"{device}.json"
    results = measure(device, cases, subjects, counts, QUICK if quick else FULL)
    tables.show(results, Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH))
    if output is not None:
        results.save(output)
        Console(stderr=True).print(f"saved {output}")
        if plot:
            _draw(results, output)
    elif plot:
        Console(stderr=True).print("nothing was drawn: --plot draws a results file, name one with --output")
    if any(row.broken for row in results.rows):
        raise typer.Exit(1)


def measure(
    device: str,
    cases: list[tuple[Workload, str]],
    subjects: list[str],
    counts: list[int | None],
    effort: Effort,
) -> Results:
    """One row for each case and thread count; PyTorch's own thread count is restored."""
    before = torch.get_num_threads()
    results = Results(describe(device, [c or before for c in counts]), {}, [])
    ceilings: dict[tuple[str, int | None], Ceilings] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(cases) * len(counts))
            for count in counts:
                torch.set_num_threads(count or before)
                for workload, dtype in cases:
                    progress.update(task, description=f"{workload.name} {dtype}")
                    if (dtype, count) not in ceilings:
                        ceilings[dtype, count] = found = measure_ceilings(device, dtype)
                        results.ceilings[f"{dtype}, {count} threads" if count else dtype] = {
                            "flops_per_second": found.rate,
                            "reached_by": found.rate_of,
                            "copy_bytes_per_second": found.bandwidth(1 << 30),
                            "special_functions_per_second": found.special,
                            "special_functions_reached_by": found.special_of,
                        }
                    with tf32_allowed(dtype == "tf32"):
                        row = measure_row(workload, dtype, count, subjects, ceilings[dtype, count], effort)
                    results.rows.append(row)
                    progress.advance(task)
    finally:
        torch.set_num_threads(before)
    return results


def measure_row(
    workload: Workload,
    dtype: str,
    threads: int | None,
    subjects: list[str],
    ceilings: Ceilings,
    effort: Effort,
) -> Row:
    torch.manual_seed(0)
    forward, backward = work(workload, DTYPES[dtype].itemsize)
    floors = {
        "forward": ceilings.floor(forward) * 1e6,
        "forward_backward": ceilings.floor(forward, backward) * 1e6,
    }
    row = Row(workload.name, workload.shape, workload.batch, dtype, threads, workload.source, floors)
    row.is_block = isinstance(workload, Block)
    row.published = published(workload, dtype)
    calls = _calls(workload, dtype, subjects, ceilings, effort, row)
    dense = dense_work(workload, DTYPES[dtype].itemsize)
    for of_pass in PASSES:
        for name, timing in _timings(workload, calls, of_pass, effort, row).items():
            works = dense if name == "dense" else (forward, backward)
            try:
                who = f"{workload.name} {dtype} {name} {PASS_NAMES[of_pass]}"
                refuse_impossible(who, timing.us / 1e6, works[: 1 + PASSES.index(of_pass)], dtype, ceilings)
            except ImpossibleFigureError as error:
                row.broken.append(str(error))
            else:
                row.times.setdefault(name, {})[of_pass] = timing
    if workload.device == "cuda" and "v3" in calls:
        names = kernels_launched(calls["v3"][0])
        row.kernels = len(names)
        if strangers := [name for name in names if not name.startswith("factorlayer")]:
            if isinstance(workload, Block) and workload.leaves_to_cublas(dtype):
                row.notes["v3"] = "leaves large products to cuBLAS"
            else:
                row.broken.append(f"{workload.name} {dtype}: v3 ran kernels that are not its own: {strangers[:3]}")
    row.peak_bytes = {name: peak_bytes(calls[name][0]) for name in ("v2", "v3") if name in calls}
    return row


def _timings(
    workload: Workload, calls: dict[str, list[Call]], of_pass: str, effort: Effort, row: Row
) -> dict[str, Timing]:
    if workload.device == "cpu":
        return time_cpu({name: sets[0] for name, sets in calls.items()}, of_pass, effort)
    timings, failures = time_cuda(calls, of_pass, effort)
    row.notes |= failures
    return timings


def _calls(
    workload: Workload, dtype: str, subjects: list[str], ceilings: Ceilings, effort: Effort, row: Row
) -> dict[str, list[Call]]:
    """The subjects that run this workload and agree with v2, each on its sets of tensors."""
    itemsize = DTYPES[dtype].itemsize
    works = {"ours": work(workload, itemsize), "dense": dense_work(workload, itemsize)}
    counts = {who: 1 if workload.device == "cpu" else sets_needed(w[0].bytes) for who, w in works.items()}
    tensors = [Tensors.random(workload, dtype) for _ in range(max(counts.values()))]
    reference = build("v2", workload, tensors[0]).run("forward_backward")
    if not row.is_block:  # y and grad_x: peers of layers have weights of their own
        reference = reference[:2]
    calls: dict[str, list[Call]] = {}
    for name in subjects:
        try:
            if name == "dense" and ceilings.floor(*works["dense"]) > effort.slowest_dense:
                raise UnavailableError(f"forward+backward would take more than {effort.slowest_dense:g} s")
            count = counts["dense" if name == "dense" else "ours"]
            sets = [build(name, workload, tensors_of_one) for tensors_of_one in tensors[:count]]
            if (row.is_block or name != "dense") and (words := wrong(sets[0], reference, tolerances(workload, dtype))):
                if name in OURS:
                    row.broken.append(f"{workload.name} {dtype}: {name} {words}")
                raise UnavailableError(f"wrong result: it {words}")
        except UnavailableError as reason:
            row.notes[name] = str(reason)
            continue
        except RuntimeError as error:  # a peer's failure, or too little memory, is a note and not the end of the run
            if name in OURS and not isinstance(error, torch.OutOfMemoryError):
                raise
            row.notes[name] = f"failed: {str(error).splitlines()[0]}"
            continue
        calls[name] = sets
        if sets[0].note:
            row.notes[name] = sets[0].note
    return calls


def _draw(results: Results, output: Path) -> None:
    try:
        report.draw(results, output)
    except ValueError as error:
        Console(stderr=True).print(f"nothing was drawn: {error}")


def _cases(device: str, patterns: list[str] | None, dtypes: list[str] | None) -> list[tuple[Workload, str]]:
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device should be cpu or cuda, it is {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU that PyTorch can use; there is none, try --device cpu")
    for dtype in dtypes or ():
        if dtype not in DTYPES:
            raise typer.BadParameter(f"--dtype should be one of {', '.join(DTYPES)}, it is {dtype!r}")
    cases = select(device, patterns or ["*"], dtypes or ())
    if not cases:
        raise typer.BadParameter(f"--select {patterns} --dtype {dtypes} matches no {device} workload of workloads.py")
    return cases


def _subjects(implementations: list[str] | None, compile_v2: bool) -> list[str]:
    for name in implementations or ():
        if name not in SUBJECTS:
            raise typer.BadParameter(f"--implementation should be one of {', '.join(SUBJECTS)}, it is {name!r}")
    wanted = implementations or [name for name in SUBJECTS if name != "compile"]
    return [name for name in SUBJECTS if name in wanted or (name == "compile" and compile_v2)]


def _thread_counts(threads: list[int] | None) -> list[int]:
    cores = usable_cores()
    for count in threads or ():
        if not 1 <= count <= cores:
            raise typer.BadParameter(f"--threads should be between 1 and {cores}, the cores here; it is {count}")
    return threads or [torch.get_num_threads()]


if __name__ == "__main__":
    app()
