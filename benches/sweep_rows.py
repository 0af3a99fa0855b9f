"""How a sweep measures its rows: the first calls, then for each row a check, times, the planner's prediction.

A row is right if y and grad_x of some samples are a float64 computation's, by the definition or by nn.Linear, and all
gradients of weights are those of the batched implementation. What is wrong or raises is in row.broken.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from benches.ceilings import measure_ceilings, tf32_allowed
from benches.floor import DTYPES, Ceilings, ImpossibleFigureError, dense_work, refuse_impossible, work
from benches.results import PASS_NAMES
from benches.subjects import Call, UnavailableError, build
from benches.sweep_check import draw_tensors, wrong
from benches.sweep_plans import candidates, predicted_us, taken_by_auto
from benches.sweep_results import Sweep, SweepRow
from benches.timing import Effort, Timing, sets_needed, time_cpu, time_cuda
from benches.workloads import PASSES, Block, Workload

OURS = ("v3", "auto", "v2")
EFFORTS = {
    "cuda": Effort(budget=0.1, block=0.004, least=5, most=9, slowest_dense=0.1, most_sets=64, eager=False),
    "cpu": Effort(budget=0.5, block=0.005, least=5, most=15, slowest_dense=1.0),
}
LARGEST_DENSE = 1 << 26  # elements of its weight
AT_ONCE = 50  # rows whose kernels are compiled before the first of them is measured


@dataclass(frozen=True)
class Ways:
    """Whether the planner's other ways are timed; rows to compile at once; when no row begins any more."""

    candidates: bool
    workers: int
    end: float  # by time.monotonic


def measure_rows(sweep: Sweep, rows: Sequence[tuple[Workload, str]], path: Path, ways: Ways) -> None:
    """Measures the rows that the sweep lacks, and saves them one by one."""
    ceilings: dict[str, Ceilings] = {}
    measured = {row.index for row in sweep.rows}
    missing = [i for i in range(len(rows)) if i not in measured]
    for start in range(0, len(missing), AT_ONCE):
        some = missing[start : start + AT_ONCE]
        if time.monotonic() >= ways.end:
            return
        first = _first_calls([rows[i] for i in some], ways.workers) if sweep.device == "cuda" else {}
        for i in some:
            if time.monotonic() >= ways.end:
                return
            workload, dtype = rows[i]
            if dtype not in ceilings:
                ceilings[dtype] = measure_ceilings(sweep.device, dtype)
                sweep.ceilings[dtype] = _in_numbers(ceilings[dtype])
                if ceilings[dtype].special is None:
                    typer.echo(f"{dtype}: floors count no special functions, {ceilings[dtype].special_of}", err=True)
            with tf32_allowed(dtype == "tf32"):
                row = measure_row(workload, dtype, i, sweep.threads, ceilings[dtype], ways.candidates)
            row.first_seconds = first.get(workload.name, {})
            sweep.rows.append(row)
            sweep.rows.sort(key=lambda row: row.index)
            sweep.save(path)
            typer.echo(f"{len(sweep.rows):4}/{len(rows)}  {in_a_line(row)}", err=True)
            if sweep.device == "cuda":  # graphs keep what they write to
                gc.collect()
                torch.cuda.empty_cache()


def _in_numbers(ceilings: Ceilings) -> dict[str, float | str | None]:
    return {
        "flops_per_second": ceilings.rate,
        "reached_by": ceilings.rate_of,
        "copy_bytes_per_second": ceilings.bandwidth(1 << 30),
        "special_functions_per_second": ceilings.special,
        "special_functions_reached_by": ceilings.special_of,
    }


def in_a_line(row: SweepRow) -> str:
    efficiency = " / ".join("-" if (e := row.efficiency(p)) is None else f"{e:.2f}" for p in PASSES)
    over = " / ".join("-" if (s := row.auto_over_batched(p)) is None else f"{s:.2f}x" for p in PASSES)
    first = " / ".join(f"{row.first_seconds[p]:.1f}" for p in PASSES if p in row.first_seconds)
    words = f"{row.structure} {row.shape}, {row.dtype}, {row.batch} samples, floor {row.floor_us['forward']:.3g} us: "
    words += f"{efficiency} of the floor, auto over batched {over}" + (f", first calls {first} s" if first else "")
    return words + "".join(f"\n  failed: {message}" for message in row.broken)


def _first_calls(rows: Sequence[tuple[Workload, str]], workers: int) -> dict[str, dict[str, float]]:
    """Seconds of each row's first forward pass and of its first training step, in processes of one processor each: in
    threads of one, planners wait for each other."""
    fresh = multiprocessing.get_context("spawn")
    cores: multiprocessing.Queue[int] = fresh.Queue()
    usable = sorted(os.sched_getaffinity(0))
    for i in range(workers):  # far apart: neighbours may be one processor's two threads
        cores.put(usable[i * len(usable) // workers % len(usable)])
    with ProcessPoolExecutor(workers, fresh, _begin, (cores,)) as pool:
        answers = {workload.name: pool.submit(_first_call, workload, dtype) for workload, dtype in rows}
        try:
            return {name: answer.result() for name, answer in answers.items()}
        except BaseException:  # Ctrl-C waits for no row that has not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(cores: multiprocessing.Queue[int]) -> None:
    """What a program has done before its first layer runs: a thread, and a GPU that is awake."""
    os.sched_setaffinity(0, {cores.get()})
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").sum().item()


def _first_call(workload: Workload, dtype: str) -> dict[str, float]:
    """What fails here fails again where it is measured, and is reported there."""
    seconds: dict[str, float] = {}
    try:
        with tf32_allowed(dtype == "tf32"):
            call = build("v3", workload, draw_tensors(workload, dtype))
            for of_pass in PASSES:
                _wait()
                start = time.perf_counter()
                call.run(of_pass)
                _wait()
                seconds[of_pass] = time.perf_counter() - start
    except (RuntimeError, TypeError, ValueError, UnavailableError):
        pass
    return seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_row(
    workload: Workload, dtype: str, index: int, threads: int | None, ceilings: Ceilings, others: bool
) -> SweepRow:
    torch.manual_seed(index)
    forward, backward = work(workload, DTYPES[dtype].itemsize)
    floors = {
        "forward": ceilings.floor(forward) * 1e6,
        "forward_backward": ceilings.floor(forward, backward) * 1e6,
    }
    row = SweepRow(workload.name, workload.shape, workload.batch, dtype, threads, workload.source, floors)
    row.index, row.is_block = index, isinstance(workload, Block)
    row.structure = "block" if isinstance(workload, Block) else workload.structure
    row.activation = workload.activation if isinstance(workload, Block) else ""
    row.flops_share = workload.costs[1] / workload.dense_costs[1]
    try:
        calls = _calls(workload, dtype, ceilings, row)
        _time(workload, dtype, calls, ceilings, row)
        if workload.device == "cuda" and "v3" in calls:
            row.predicted_us = predicted_us(calls["v3"][0])
            if others:
                row.candidates_us = candidates(calls["v3"], EFFORTS["cuda"])
    except Exception as error:  # a row that raises is a failed one, whatever it was, and the next one is measured
        row.broken.append(f"{type(error).__name__}: {error}")
    return row


def _calls(workload: Workload, dtype: str, ceilings: Ceilings, row: SweepRow) -> dict[str, list[Call]]:
    """The subjects on their sets of tensors: ours that are right, and nn.Linear where it is small enough."""
    itemsize, on_cuda = DTYPES[dtype].itemsize, workload.device == "cuda"
    works = {"ours": work(workload, itemsize), "dense": dense_work(workload, itemsize)}
    most = EFFORTS[workload.device].most_sets
    counts = {who: sets_needed(w[0].bytes, most) if on_cuda else 1 for who, w in works.items()}
    effort, names = EFFORTS[workload.device], list(OURS)
    if workload.dense_costs[0] > LARGEST_DENSE or ceilings.floor(*works["dense"]) > effort.slowest_dense:
        row.notes["dense"] = "too large or too slow"
        counts["dense"] = 0
    else:
        names.append("dense")
    tensors = [draw_tensors(workload, dtype) for _ in range(max(counts.values()))]
    calls: dict[str, list[Call]] = {}
    for name in names:
        try:
            count = counts["dense" if name == "dense" else "ours"]
            calls[name] = [build(name, workload, of_one) for of_one in tensors[:count]]
        except (UnavailableError, torch.OutOfMemoryError) as reason:
            if name in OURS:
                raise
            row.notes[name] = str(reason).splitlines()[0]
    row.auto = taken_by_auto(calls["auto"][0])
    row.broken += wrong(workload, dtype, tensors[0], {name: calls[name][0] for name in OURS})
    return calls


def _time(workload: Workload, dtype: str, calls: dict[str, list[Call]], ceilings: Ceilings, row: SweepRow) -> None:
    itemsize, effort = DTYPES[dtype].itemsize, EFFORTS[workload.device]
    for number, of_pass in enumerate(PASSES):
        timings: dict[str, Timing]
        if workload.device == "cpu":
            timings = time_cpu({name: sets[0] for name, sets in calls.items()}, of_pass, effort)
        else:
            timings, failures = time_cuda(calls, of_pass, effort)
            row.broken += [f"{name}: {words}" for name, words in failures.items() if name in OURS]
            row.notes |= {name: words for name, words in failures.items() if name not in OURS}
        for name, timing in timings.items():
            passes = (dense_work if name == "dense" else work)(workload, itemsize)[: number + 1]
            who = f"{workload.name} {dtype} {name} {PASS_NAMES[of_pass]}"
            try:
                refuse_impossible(who, timing.us / 1e6, tuple(passes), dtype, ceilings)
            except ImpossibleFigureError as error:
                row.broken.append(str(error))
            else:
                row.times.setdefault(name, {})[of_pass] = timing
