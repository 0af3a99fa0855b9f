"""A short sweep on a GPU, from first calls to candidates and tables."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benches import sweep
from benches.ceilings import measure_ceilings
from benches.sweep_results import Sweep
from benches.workloads import ALL_DTYPES, PASSES


def test_a_sweep_of_every_structure_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    options = ["--seed", "12", "--count", "20", "--device", "cuda", "--candidates", "--output", str(path)]
    finished = CliRunner().invoke(sweep.app, options, env={"COLUMNS": "300"})
    assert finished.exit_code == 0, finished.output
    rows = Sweep.load(path).rows
    assert len({(row.structure, row.dtype) for row in rows}) == 3 * len(ALL_DTYPES)
    for row in rows:
        assert all(row.us(who, of_pass) for who in ("v3", "auto", "v2") for of_pass in PASSES)
        assert set(row.first_seconds) == set(PASSES)
        assert row.auto in ("fused", "batched")
    assert sum(row.predicted_us is not None for row in rows) > len(rows) / 2
    assert any(row.candidates_us for row in rows)


def test_special_functions_have_a_rate() -> None:
    fast, double = measure_ceilings("cuda", "bfloat16"), measure_ceilings("cuda", "float64")
    assert fast.special and double.special
    assert double.special < fast.special < fast.rate
