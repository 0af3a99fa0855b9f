"""The time that calls take, one beside another: the median of rounds in which each has its turn.

On a GPU by events on its stream: what the host takes counts only where the GPU waits for it, as in a program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

LEAST, MOST = 0.02, 0.5  # seconds for all rounds of one
ROUND = 0.002  # seconds of one round: a hundred times what a clock is wrong by
ROUNDS = 5  # at least, but where a single call takes too long
MOST_CALLS = 1000  # in a round
WARM_UPS = 2  # of which the first compiles, and the second fills caches

Run = Callable[[], object]


def medians(runs: Mapping[str, Run], device: torch.device) -> dict[str, float]:
    """Seconds of a call of each."""
    clock = _seconds_on_gpu if device.type == "cuda" else _seconds
    calls: dict[str, int] = {}
    for name, run in runs.items():
        clock(run, WARM_UPS)
        calls[name] = min(MOST_CALLS, math.ceil(ROUND / max(clock(run, 1), 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    rounds = 0
    while not _is_enough([calls[name] * sum(times) for name, times in found.items()], rounds):
        for name, run in runs.items():
            found[name].append(clock(run, calls[name]) / calls[name])
        rounds += 1
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def _is_enough(spent: list[float], rounds: int) -> bool:
    """Whether the seconds that each run has `spent` in so many rounds are enough, or one more round would take more
    than MOST."""
    if not rounds:
        return False
    return (min(spent) >= LEAST and rounds >= ROUNDS) or max(spent) * (rounds + 1) / rounds > MOST


def _seconds(run: Run, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin


def _seconds_on_gpu(run: Run, calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
