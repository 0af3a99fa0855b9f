"""The `bench` and `profile` commands' work: timings of the implementations, profiles of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Compare, Measurement, Timer, select_unit

from factorlayer.cli.case import DENSE, Case, Problem

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Timing:
    version: str
    direction: str  # forward, or forward+backward
    multiply_adds: int
    measurement: Measurement

    def to_json(self) -> dict[str, Any]:
        return {
            "implementation": self.version,
            "direction": self.direction,
            "multiply_adds": self.multiply_adds,
            "median_seconds": self.measurement.median,
            "iqr_seconds": self.measurement.iqr,
            "runs": len(self.measurement.times) * self.measurement.number_per_run,
        }


def state_size(problem: Problem) -> int:
    """The most features that a row has on its way through the layers."""
    return max(c.outer * max(c.p, c.q) * c.inner for call in problem.calls for c in call.layer.spec.contractions)


def forward_multiply_adds(problem: Problem) -> int:
    """The multiply-adds of the layers that a forward pass calls."""
    return sum(call.layer.spec.multiply_adds(call.rows) for call in problem.calls)


def backward_multiply_adds(problem: Problem) -> int:
    chains = ((call.layer.chain, call.rows) for call in problem.calls)
    return sum(chain.backward_flops(rows, True, [True] * len(chain.contractions)) // 2 for chain, rows in chains)


def arithmetic_intensity(problem: Problem) -> float:
    """Multiply-adds of a forward pass per element that it has to move: x, the weights, y."""
    weights = {call.name: call.layer.spec.parameter_count for call in problem.calls}
    return forward_multiply_adds(problem) / (problem.x.numel() + problem.grad_y.numel() + sum(weights.values()))


def bench(problem: Problem, versions: Sequence[str], min_run_time: float) -> Iterator[Timing]:
    """Times each version, forward without autograd and forward+backward, one figure at a time."""
    case = problem.case

    def run_forward(version: str) -> None:
        with torch.no_grad():
            problem.forward(version)

    def run_both(version: str) -> None:
        problem.backward(problem.forward(version), version)

    for direction, run in (("forward", run_forward), ("forward+backward", run_both)):
        multiply_adds = _multiply_adds(problem, direction)
        for version in versions:
            timer = Timer(
                "run(version)",
                globals={"run": run, "version": version},
                label=f"{case.subject}, {str(case.dtype).removeprefix('torch.')} on {case.device}",
                sub_label=f"{direction}, {multiply_adds['']:.3e} multiply-adds",
                description=version,
                num_threads=torch.get_num_threads(),
            )
            for _ in range(WARM_UP_STEPS):
                run(version)
            measurement = timer.blocked_autorange(min_run_time=min_run_time)
            yield Timing(version, direction, multiply_adds.get(version, multiply_adds[""]), measurement)


def _multiply_adds(problem: Problem, direction: str) -> dict[str, int]:
    """The multiply-adds of the layers (""), and of the dense ones beside them (DENSE), which need as many again for
    each of two gradients."""
    forward, both = forward_multiply_adds(problem), direction != "forward"
    counted = {"": forward + (backward_multiply_adds(problem) if both else 0)}
    if DENSE in problem.modules:
        dense = sum(p.numel() for p in problem.modules[DENSE].parameters() if p.dim() == 2)
        counted[DENSE] = problem.calls[0].rows * dense * (3 if both else 1)
    return counted


def table(timings: Sequence[Timing]) -> str:
    return str(Compare([timing.measurement for timing in timings])) if timings else ""


def plot(timings: Sequence[Timing], title: str, path: Path) -> None:
    """A bar for each version in each direction, as far as it was timed."""
    from matplotlib.figure import Figure  # an optional dependency; refusals.py has looked for it

    directions = list(dict.fromkeys(timing.direction for timing in timings))
    versions = list(dict.fromkeys(timing.version for timing in timings))
    seconds = {(timing.version, timing.direction): timing.measurement.median for timing in timings}
    unit, scale = select_unit(max(seconds.values()))
    figure = Figure(figsize=(6, 4), layout="constrained")  # not pyplot: nothing here needs a display
    axes = figure.subplots()
    width = 0.8 / len(versions)
    for i, version in enumerate(versions):
        at = [x + (i - (len(versions) - 1) / 2) * width for x in range(len(directions))]
        timed = [place for place, direction in enumerate(directions) if (version, direction) in seconds]
        heights = [seconds[version, directions[place]] / scale for place in timed]
        axes.bar_label(axes.bar([at[place] for place in timed], heights, width, label=version), fmt="%.3g")
    axes.set_xticks(range(len(directions)), directions)
    axes.set_ylabel(f"median, {unit}")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)


def warm_up(problem: Problem, version: str, forward_only: bool) -> Iterator[int]:
    """First calls load, allocate and start threads; a profile should not show that."""
    for step in range(WARM_UP_STEPS):
        _step(problem, version, forward_only)
        yield step


def run_profiler(problem: Problem, version: str, forward_only: bool, steps: Iterable[int]) -> tuple[Any, int]:
    """PyTorch's profiler of the steps, and how many of them it has seen whole: Ctrl-C ends them early."""
    activities = [ProfilerActivity.CPU]
    if problem.case.device.type == "cuda":
        torch.cuda.synchronize(problem.case.device)
        activities.append(ProfilerActivity.CUDA)
    whole = 0
    with profile(activities=activities, acc_events=True) as profiler:
        try:
            for _ in steps:
                _step(problem, version, forward_only)
                whole += 1
        except KeyboardInterrupt:
            pass  # what was profiled before is worth having; the caller sees that steps are missing
        if problem.case.device.type == "cuda":
            torch.cuda.synchronize(problem.case.device)
    return profiler, whole


def profile_table(profiler: Any, case: Case) -> str:
    by = "self_cpu_time_total" if case.device.type == "cpu" else "self_device_time_total"
    table: str = profiler.key_averages().table(sort_by=by, row_limit=25)
    return table


def profile_to_json(profiler: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": event.key,
            "calls": event.count,
            "self_cpu_us": event.self_cpu_time_total,
            "cpu_us": event.cpu_time_total,
            "self_device_us": event.self_device_time_total,
            "device_us": event.device_time_total,
        }
        for event in profiler.key_averages()
    ]


def _step(problem: Problem, version: str, forward_only: bool) -> None:
    if forward_only:
        with torch.no_grad(), record_function(f"{version} forward"):
            problem.forward(version)
        return
    with record_function(f"{version} forward"):
        y = problem.forward(version)
    with record_function(f"{version} backward"):
        problem.backward(y, version)
