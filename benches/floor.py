"""How fast a workload could run at best, and what is too fast to be true.

floor = max(bytes / copy bandwidth, FLOPs / arithmetic rate, special functions / their rate), every input read once and
every output written once, FLOPs of the cheapest order of contraction, special functions as activations/functions.py
counts them. Backward reads x, grad_y and the weights, writes their gradients and does twice the forward's FLOPs;
forward+backward is the sum of the two floors. What a block has between its layers is not counted: it need not leave the
chip, nor be kept for the backward. Efficiency is floor / time. The ceilings are measured in the same run, by
ceilings.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benches.workloads import Workload

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# Bytes and FLOPs per second. float32 is a third of float16: what fp32 accuracy costs on tensor cores, at best. Its
# floor counts a third of tf32 (ceilings.py), as that of a product without scales would.
DATASHEETS = {
    "H100": {
        "memory": 3.35e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "tf32": 495e12,
        "float32": 989e12 / 3,
        "float64": 67e12,
    },
    "H200": {
        "memory": 4.8e12,
        "bfloat16": 989e12,
        "float16": 989e12,
        "tf32": 495e12,
        "float32": 989e12 / 3,
        "float64": 67e12,
    },
}
MOST_EFFICIENT = 1.1  # without a datasheet: more than the measured ceilings and a tenth of noise is not believed


class ImpossibleFigureError(ValueError):
    """A time shorter than the hardware allows."""


@dataclass(frozen=True)
class Work:
    """Bytes read or written, floating-point operations done, and special functions taken."""

    bytes: int
    flops: int
    functions: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.functions + other.functions)


def work(workload: Workload, itemsize: int) -> tuple[Work, Work]:
    """Forward and backward."""
    return _work(workload, *workload.costs, itemsize)


def dense_work(workload: Workload, itemsize: int) -> tuple[Work, Work]:
    """Forward and backward of what PyTorch has in its place."""
    return _work(workload, *workload.dense_costs, itemsize)


def _work(workload: Workload, parameters: int, flops: int, itemsize: int) -> tuple[Work, Work]:
    (inputs, outputs), batch = workload.features, workload.batch
    taken, taken_back = workload.functions
    forward = Work((batch * (inputs + outputs) + parameters) * itemsize, flops, taken)
    backward = Work((batch * (2 * inputs + outputs) + 2 * parameters) * itemsize, 2 * flops, taken_back)
    return forward, backward


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy that moves so many bytes; FLOPs per second, and who reached them; special functions
    per second, likewise, or None where nobody could tell."""

    bandwidth: Callable[[int], float]
    rate: float
    rate_of: str
    datasheet: dict[str, float] | None = None
    special: float | None = None
    special_of: str = ""

    def floor(self, *passes: Work) -> float:
        """Seconds, at least."""
        return sum(max(self._without_functions(w), w.functions / (self.special or math.inf)) for w in passes)

    def _without_functions(self, work: Work) -> float:
        return max(work.bytes / self.bandwidth(work.bytes), work.flops / self.rate)

    def least(self, *passes: Work) -> float:
        """Seconds below which a time is not believed: special functions may be computed in other ways."""
        return sum(map(self._without_functions, passes))


def refuse_impossible(who: str, seconds: float, passes: tuple[Work, ...], dtype: str, ceilings: Ceilings) -> None:
    """Raises if that time needs more than the datasheet has, or, without one, is well below the floor."""
    total = sum(passes[1:], passes[0])
    if ceilings.datasheet is None:
        if ceilings.least(*passes) > MOST_EFFICIENT * seconds:
            raise ImpossibleFigureError(
                f"{who}: at least {ceilings.least(*passes) * 1e6:.1f} us were expected, the floor of this "
                f"machine; it came out as {seconds * 1e6:.1f} us; measure again, on an idle machine"
            )
        return
    for unit, done, most in (
        ("bytes", total.bytes, ceilings.datasheet["memory"]),
        ("FLOPs", total.flops, ceilings.datasheet[dtype]),
    ):
        if done > most * seconds:
            raise ImpossibleFigureError(
                f"{who}: at most {most:.3g} {unit}/s were expected, the datasheet's; it came out as "
                f"{done / seconds:.3g}; look for work that did not run, or inputs that stayed in a cache"
            )
