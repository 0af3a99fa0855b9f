"""How a time is taken: calls of several subjects in turn, round after round, so that noise hits all alike.

CPU: perf_counter around blocks of calls. CUDA: replays of a graph that holds one call for each of several
sets of tensors, together larger than twice the L2 cache, and keeps all their outputs: nothing is found in a
cache that a real caller would not find there. Medians are reported, with the interquartile range.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benches.subjects import Call

MOST_SETS = 2048


@dataclass(frozen=True)
class Effort:
    """Seconds to spend on all subjects of a pass, seconds of a block of calls, bounds for the rounds, and the
    slowest forward+backward of a dense layer, by its floor, that is waited for; on a GPU, the most sets of tensors that
    a graph rotates through, and whether the host's time is taken too."""

    budget: float
    block: float
    least: int
    most: int
    slowest_dense: float
    most_sets: int = MOST_SETS
    eager: bool = True


FULL = Effort(budget=3.0, block=0.02, least=5, most=25, slowest_dense=2.0)
QUICK = Effort(budget=0.1, block=0.001, least=3, most=5, slowest_dense=0.1)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, interquartile range; eager_us is the wall time without a graph."""

    us: float
    iqr_us: float
    rounds: int
    eager_us: float | None = None


def time_cpu(calls: dict[str, Call], of_pass: str, effort: Effort) -> dict[str, Timing]:
    """Round robin over the subjects; small inputs stay in cache between calls, as the floor's copies do."""
    repeats = {}
    for name, call in calls.items():
        call.run(of_pass)
        repeats[name] = max(1, int(effort.block / _seconds(call, of_pass, 1)))
    blocks = {name: functools.partial(_seconds, call, of_pass, repeats[name]) for name, call in calls.items()}
    return _round_robin(blocks, effort)


def _seconds(call: Call, of_pass: str, repeats: int) -> float:
    """The seconds of one call, the mean over a block of calls. The grad mode is set once, as a program does."""
    function, x, grad_y, wanted = call.function, call.x, call.grad_y, (call.x, *call.weights)
    if repeats > 1:
        call.run(of_pass)  # the caches hold what the subject before this one left
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.set_grad_enabled(of_pass != "forward"):
            start = time.perf_counter()
            if of_pass == "forward":
                for _ in range(repeats):
                    function(x)
            else:
                for _ in range(repeats):
                    torch.autograd.grad(function(x), wanted, grad_y)
            return (time.perf_counter() - start) / repeats
    finally:
        if collecting:
            gc.enable()


def _round_robin(blocks: Mapping[str, Callable[[], float]], effort: Effort) -> dict[str, Timing]:
    start = time.perf_counter()
    times = {name: [block()] for name, block in blocks.items()}
    rounds = effort.budget / (time.perf_counter() - start)
    for _ in range(min(max(int(rounds), effort.least), effort.most) - 1):
        for name, block in blocks.items():
            times[name].append(block())
    return {name: _timing(seconds) for name, seconds in times.items()}


def _timing(seconds: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median * 1e6, (high - low) * 1e6, len(seconds))


def sets_needed(bytes_per_call: int, most: int = MOST_SETS) -> int:
    """How many sets of tensors a graph rotates through: more than twice the L2, unless one is far larger."""
    cache: int = torch.cuda.get_device_properties("cuda").L2_cache_size
    if bytes_per_call > 8 * cache:
        return 1
    return min(max(2, math.ceil(2 * cache / bytes_per_call) + 1), most)


def time_cuda(calls: dict[str, list[Call]], of_pass: str, effort: Effort) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times by subject, and why a subject could not be captured."""
    blocks, eager, failures = {}, {}, {}
    # One pool for all: no graph reads what another one left there, and the largest rows need the room.
    pool = torch.cuda.graph_pool_handle()
    for name, sets in calls.items():
        try:
            graph = _capture(sets, of_pass, pool)
            if effort.eager:
                eager[name] = _eager_seconds(sets, of_pass, effort)
        except RuntimeError as error:
            failures[name] = f"not captured in a CUDA graph: {str(error).splitlines()[0]}"
            continue
        too_few = effort.most_sets < MOST_SETS and len(sets) >= effort.most_sets
        blocks[name] = _flushed(graph, len(sets)) if too_few else _replayer(graph, len(sets), effort)
    timings = _round_robin(blocks, effort) if blocks else {}
    for name, seconds in eager.items():
        if name in timings:
            timings[name] = replace(timings[name], eager_us=seconds * 1e6)
    return timings, failures


def _capture(sets: list[Call], of_pass: str, pool: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose kernels and take workspaces before the capture
        for call in (sets[0], sets[0], sets[-1]):
            call.run(of_pass)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = [call.run(of_pass) for call in sets]
    del outputs  # not before: an output in another's place would find that place in the L2
    return graph


def _replayer(graph: torch.cuda.CUDAGraph, calls: int, effort: Effort) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(replays: int) -> float:
        torch.cuda._sleep(1_000_000)  # cycles: the host has everything queued before the clock starts
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / replays

    seconds(1)
    replays = min(max(1, int(effort.block / 4 / seconds(1))), 50)
    return lambda: seconds(replays) / calls


def _flushed(graph: torch.cuda.CUDAGraph, calls: int) -> Callable[[], float]:
    """A function that times one replay of a graph whose sets of tensors fit into the L2 together, after something else
    has filled it."""
    cache: int = torch.cuda.get_device_properties("cuda").L2_cache_size
    other = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds() -> float:
        torch.cuda._sleep(1_000_000)
        other.fill_(1)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    seconds()
    return seconds


def _eager_seconds(sets: list[Call], of_pass: str, effort: Effort) -> float:
    """Wall time of one call issued from Python, the device's work included where it is longer."""

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            sets[i % len(sets)].run(of_pass)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    count = min(max(2, int(effort.block / seconds(1))), 20)
    return statistics.median(seconds(count) for _ in range(5))


def kernels_launched(call: Call) -> list[str]:
    """Names of the kernels that a forward pass runs on the GPU, copies among them."""
    call.run("forward")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call.run("forward")
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type.name == "CUDA"]


def peak_bytes(call: Call) -> int:
    """What a forward pass allocates beyond its inputs at the worst moment, the output included.

    PyTorch's allocators are watched; the fused CPU kernels' scratch, a cache's worth per thread, is not seen.
    """
    if call.x.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call.run("forward")
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    call.run("forward")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call.run("forward")
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results else []
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
