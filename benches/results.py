"""What a run leaves behind, as JSON: the machine, its ceilings, a Row for each workload, dtype, thread count.

Also the figures that run.py and report.py derive from a Row: speed-ups, efficiency, geometric means.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benches.timing import Timing

FOLDER = Path(__file__).parent / "results"
PASS_NAMES = {"forward": "fwd", "forward_backward": "fwd+bwd"}


@dataclass
class Row:
    """Times are by subject and pass; notes say why one is missing; broken lists refused figures."""

    workload: str
    shape: str
    batch: int
    dtype: str
    threads: int | None
    source: str
    floor_us: dict[str, float]
    times: dict[str, dict[str, Timing]] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kernels: int | None = None  # that v3 launches on a GPU for a forward pass
    notes: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    is_block: bool = False

    def us(self, subject: str, of_pass: str) -> float | None:
        timing = self.times.get(subject, {}).get(of_pass)
        return None if timing is None else timing.us

    @property
    def rival(self) -> str:
        """The best that PyTorch alone does. Of a block, nn.Linear: unlike v2, it adds the bias as it multiplies."""
        return "dense" if self.is_block else "v2"

    def speedup(self, of_pass: str, over: str | None = None) -> float | None:
        """How many times as fast v3 is as its rival, or as another subject."""
        rival, v3 = self.us(over or self.rival, of_pass), self.us("v3", of_pass)
        return None if rival is None or v3 is None else rival / v3

    def lead(self, of_pass: str) -> float | None:
        """How many times as fast v3 is as the best published code."""
        peer, v3 = self.published.get(of_pass, {}).get("us"), self.us("v3", of_pass)
        return None if peer is None or v3 is None else float(peer / v3)

    @property
    def is_kronecker(self) -> bool:
        return not self.is_block and "blocks" not in self.shape

    def efficiency(self, of_pass: str) -> float | None:
        """Floor over v3's time."""
        v3 = self.us("v3", of_pass)
        return None if v3 is None else self.floor_us[of_pass] / v3


@dataclass
class Results:
    """One results file."""

    machine: dict[str, Any]
    ceilings: dict[str, Any]
    rows: list[Row]

    @property
    def kinds(self) -> list[list[Row]]:
        """The rows of layers and those of blocks, as far as there are any: their tables and means are not mixed."""
        kinds = ([row for row in self.rows if row.is_block == is_block] for is_block in (False, True))
        return [rows for rows in kinds if rows]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            data = json.loads(path.read_text())
            rows = []
            for row in data["rows"]:
                times = {who: {p: Timing(**t) for p, t in passes.items()} for who, passes in row.pop("times").items()}
                rows.append(Row(**row, times=times))
            return cls(data["machine"], data["ceilings"], rows)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} should be a results file of `python -m benches.run`; it could not be read as one "
                f"({error!r}); measure it again"
            ) from None


def geometric_means(rows: Iterable[Row], over: str | None = None) -> dict[tuple[str, int | None], dict[str, float]]:
    """The geometric means of v3's speed-ups over its rival, or over another subject, by dtype and threads, then by
    pass."""
    speedups: dict[tuple[str, int | None], dict[str, list[float]]] = {}
    for row in rows:
        for of_pass in PASS_NAMES:
            speedup = row.speedup(of_pass, over)
            if speedup is not None:
                speedups.setdefault((row.dtype, row.threads), {}).setdefault(of_pass, []).append(speedup)
    return {
        key: {of_pass: statistics.geometric_mean(values) for of_pass, values in passes.items()}
        for key, passes in speedups.items()
    }


LONG_FLOOR_US = 5  # from which on efficiency says more of a kernel than of its launch


def efficiency_means(rows: Iterable[Row], of_pass: str = "forward") -> dict[str, float]:
    """The geometric mean of efficiencies for each dtype, over Kronecker rows and blocks whose forward floor is long
    enough."""
    found: dict[str, list[float]] = {}
    for row in rows:
        efficiency = row.efficiency(of_pass)
        long = row.floor_us["forward"] >= LONG_FLOOR_US
        if efficiency is not None and (row.is_kronecker or row.is_block) and long:
            found.setdefault(row.dtype, []).append(efficiency)
    return {dtype: statistics.geometric_mean(values) for dtype, values in found.items()}


def lead_means(rows: Iterable[Row], of_pass: str = "forward") -> dict[str, tuple[float, float]]:
    """The geometric mean and the least of v3's leads over the best published time, for each dtype."""
    found: dict[str, list[float]] = {}
    for row in rows:
        lead = row.lead(of_pass)
        if lead is not None:
            found.setdefault(row.dtype, []).append(lead)
    return {dtype: (statistics.geometric_mean(values), min(values)) for dtype, values in found.items()}


def rounded(value: Any) -> Any:
    """Four significant digits: more would be noise in every diff."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
