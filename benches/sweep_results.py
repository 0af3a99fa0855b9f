"""What a sweep leaves behind, as JSON, and what is said of its rows: efficiencies, shares, ratios."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benches.results import Row, rounded
from benches.timing import Timing

STRUCTURES = ("kronecker", "monarch", "block")
SAME_MACHINE = ("gpu", "cpu", "cores", "instruction_set", "torch", "cuda")
BEHIND = 0.97  # of the batched implementation's speed, below which auto should never be
CLOSE = 1.3  # times, either way, within which a prediction is right
FEW_FLOPS = 1 / 3  # of the dense layer's, from which down a layer should not be slower


@dataclass
class SweepRow(Row):
    """A row of a drawn workload. `broken` says why it failed."""

    index: int = 0
    structure: str = "kronecker"
    activation: str = ""
    flops_share: float = 1.0  # of the dense layer's
    auto: str = ""  # batched, if auto runs nothing else
    predicted_us: float | None = None  # by the planner for this batch, forward
    first_seconds: dict[str, float] = field(default_factory=dict)  # of the first call, compiling
    candidates_us: dict[str, float] = field(default_factory=dict)  # of the planner's ways, forward

    def auto_over_batched(self, of_pass: str) -> float | None:
        """The speed of one over the other's; 1 where they are the same."""
        auto, batched = self.us("auto", of_pass), self.us("v2", of_pass)
        if auto is None or batched is None:
            return None
        return 1.0 if self.auto == "batched" else batched / auto

    @property
    def prediction(self) -> float | None:
        """Over the time measured."""
        us = self.us("v3", "forward")
        return None if us is None or not self.predicted_us else self.predicted_us / us

    @property
    def choice(self) -> float | None:
        """The time of the best that was measured over auto's."""
        auto, batched = self.us("auto", "forward"), self.us("v2", "forward")
        if not self.candidates_us or auto is None:
            return None
        return min([auto, *self.candidates_us.values(), *([] if batched is None else [batched])]) / auto


@dataclass
class Sweep:
    """One results file; rows in the order of their numbers."""

    machine: dict[str, Any]
    ceilings: dict[str, Any]
    rows: list[SweepRow]
    seed: int
    device: str
    dtypes: list[str]
    threads: int | None

    def save(self, path: Path) -> None:
        """Writes the sweep whole or not at all, as it may be stopped at any time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n"
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text)
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Sweep:
        try:
            data = json.loads(path.read_text())
            rows = []
            for row in data.pop("rows"):
                times = {who: {p: Timing(**t) for p, t in passes.items()} for who, passes in row.pop("times").items()}
                rows.append(SweepRow(**row, times=times))
            return cls(**data, rows=rows)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} should be a results file of `python -m benches.sweep`; it could not be read as one "
                f"({error!r}); measure it again"
            ) from None

    def going_on(self, begun: Sweep, path: Path) -> Sweep:
        """The sweep that was `begun`, if it is the same one on the same machine, as this one is to go on with its
        rows."""
        mine, theirs = (
            {name: getattr(sweep, name) for name in ("seed", "device", "dtypes", "threads")}
            | {name: sweep.machine.get(name) for name in SAME_MACHINE}
            for sweep in (self, begun)
        )
        other = [f"{name} {theirs[name]}" for name in mine if mine[name] != theirs[name]]
        if other:
            raise ValueError(
                f"--resume should go on with the same sweep on the same machine; {path} has {', '.join(other)}; "
                "name another file with --output"
            )
        return begun


@dataclass(frozen=True)
class Spread:
    """The spread of numbers of which larger ones are better."""

    count: int
    mean: float  # geometric
    median: float
    tenth: float  # percentile
    worst: float
    ninetieth: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the values that are there, or None if there are none."""
        found = sorted(value for value in values if value is not None and value > 0)
        if not found:
            return None
        mean = statistics.geometric_mean(found)
        return cls(len(found), mean, statistics.median(found), _quantile(found, 0.1), found[0], _quantile(found, 0.9))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between two values in proportion, as numpy takes it."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def share(values: Iterable[float | None], holds: Callable[[float], bool]) -> float:
    """The share of the values there are that fulfil a condition."""
    found = [holds(value) for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0


def is_short(row: Row) -> bool:
    """Whether it is of 16 bits or tf32."""
    return row.dtype in ("bfloat16", "float16", "tf32")
