"""The script that measures a GPU's table: its arithmetic, what it refuses, and whether its kernels compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches is not installed with the package

from benches import calibrate, probes
from benches.calibrate import bounds, check, lines, rates_of
from benches.floor import ImpossibleFigureError
from factorlayer.device import table
from factorlayer.device.gpu import Gpu
from factorlayer.device.table import H200, file_name, read, shipped

GPU, CLOCK = Gpu(*H200), 1980.0
# What was measured on an H200, by other programs; of latencies, what they were taken to be
MEASURED = {
    "memory_bytes": 4.23e6 / 132,
    "l2_bytes": 7.8e6 / 132,
    "shared_bytes": 32.9e6 / 132,
    "instructions": 7000.0,
    "cycles": 1650.0,
    "flops.float64": 64.7e6 / 132,
    "flops.tf32": 322e6 / 132,
    "flops.float16": 645e6 / 132,
    "flops.bfloat16": 645e6 / 132,
    "special_functions": 4.2e6 / 132,
    "double_functions": 2390.0,
    "behind_us": 1.0,
    "wait_us": 0.8,
    "ramp_us": 0.514,
    "sync_us": 0.038,
}


@dataclass
class StandIn:
    """Has measured that already."""

    gpu: Gpu
    clock: float = CLOCK

    def measure(self) -> Iterator[tuple[str, float]]:
        yield from MEASURED.items()


def test_a_table_is_what_kernels_sustain_of_what_probes_reach() -> None:
    found, known = rates_of(MEASURED, GPU.rates).by_name, shipped()[H200].rates.by_name
    assert found.keys() == known.keys()
    for name, number in found.items():
        assert number == pytest.approx(known[name], rel=0.06), name
        assert number == float(f"{number:.4g}")


def test_each_figure_has_bounds() -> None:
    assert bounds(GPU, CLOCK).keys() == MEASURED.keys()
    check(MEASURED, GPU, CLOCK)
    few_doubles = MEASURED | {"flops.float64": 4000.0, "double_functions": 17.0}
    check(few_doubles, Gpu(121, 132, 101376), CLOCK)  # an architecture that is not named
    with pytest.raises(ImpossibleFigureError, match=r"flops\.float64 should be .* double_functions should be"):
        check(few_doubles, GPU, CLOCK)


@pytest.mark.parametrize("name", MEASURED)
def test_what_no_gpu_can_do_is_refused(name: str) -> None:
    least, most = bounds(GPU, CLOCK)[name]
    for figure in (0.99 * least, 1.01 * most, -1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ImpossibleFigureError, match=f"{name} should be from .* to .*, it came out as"):
            check(MEASURED | {name: figure}, GPU, CLOCK)
    missing = {other: figure for other, figure in MEASURED.items() if other != name}
    with pytest.raises(ImpossibleFigureError, match=f"{name} should be from .*, it came out as nan"):
        check(missing, GPU, CLOCK)


def test_memory_is_bound_by_its_clock_and_bus() -> None:
    most = bounds(GPU, CLOCK)["memory_bytes"][1]
    assert most == pytest.approx(1.02 * 4916736 / 132)
    assert bounds(Gpu.of(90), CLOCK)["memory_bytes"][1] > most


def test_measured_numbers_stand_beside_those_until_now() -> None:
    head, *rows = lines(MEASURED, rates_of(MEASURED, GPU.rates), GPU.table)
    assert "measured on such a GPU" in head
    assert len(rows) == len(MEASURED) + 1
    (of_floats,) = (row.split() for row in rows if row.startswith("flops.float32"))
    assert of_floats[1:] == ["-", "7.318e+05", "7.5e+05", "0.98"]


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(calibrate, "gpu_limits", lambda _: H200)
    monkeypatch.setattr(calibrate, "describe", lambda *_: {"gpu": "a GPU", "cuda": "13", "torch": "2", "date": "now"})
    monkeypatch.setattr(probes, "Probes", StandIn)
    monkeypatch.setattr(table, "kept_in", lambda: tmp_path / "rates")
    monkeypatch.setattr(calibrate, "kept_in", lambda: tmp_path / "rates")
    return tmp_path


def test_a_table_is_kept_where_plans_find_it(on_a_gpu: Path) -> None:
    done = CliRunner().invoke(calibrate.app, [])
    assert done.exit_code == 0, done.output
    path = on_a_gpu / "rates" / file_name(H200)
    assert str(path) in done.output.replace("\n", "")
    found = table.own.__wrapped__()
    assert found[H200].rates == rates_of(MEASURED, GPU.rates)
    assert found[H200].machine["probes"] == MEASURED
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_table_goes_where_it_is_wanted(on_a_gpu: Path) -> None:
    path = on_a_gpu / "new" / "mine.json"
    done = CliRunner().invoke(calibrate.app, ["--output", str(path)])
    assert done.exit_code == 0, done.output
    assert read(path).gpu == H200
    assert not (on_a_gpu / "rates").exists()


def test_nothing_is_written_of_a_figure_that_is_refused(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURED, "memory_bytes", 1e6)
    done = CliRunner().invoke(calibrate.app, [])
    assert done.exit_code == 1
    assert "memory_bytes should be from" in done.output
    assert list(on_a_gpu.iterdir()) == []


def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = CliRunner().invoke(calibrate.app, [])
    assert done.exit_code == 2
    assert "a GPU that PyTorch can use should be measured" in done.output


STEP_US = {"shared": 1.05, "instructions": 0.58, "special": 2.0, "barriers": 0.6, "chase": 0.7, "l2": 2.2, "small": 0.9}
STEP_US["doubles"] = 3.0
STEP_US |= {"products_float64": 2.1, "products_tf32": 0.21, "products_float16": 0.215, "products_bfloat16": 0.22}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """A stand-in for a GPU: a launch takes 2 us, and each step as long as STEP_US says, or a part of what is moved.
    What is launched: names, blocks and threads."""
    took, launched = [0.0], list[tuple[str, int, int]]()

    def compiled(name: str, gpu: Gpu) -> object:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: list[Any]) -> None:
            _, clock, steps, _ = arguments
            us = steps * STEP_US[name] + (0 if name == "small" else 2.0)
            clock[:2] = torch.tensor([1.5e3 * us, 1e3 * us])
            took[0] += us
            launched.append((name, grid[0], block[0]))

        return launch

    def us_of(call: Callable[[], object], launches: int = 0, rounds: int = 0) -> float:
        took[0] = 0.0
        call()
        return took[0] or 100.0

    def neg(source: torch.Tensor, out: torch.Tensor) -> None:
        took[0] += 5.0 + source.numel() / 1e3

    monkeypatch.setattr(probes, "DEVICE", "cpu")
    monkeypatch.setattr(probes, "ELEMENTS", 1 << 12)
    monkeypatch.setattr(probes, "compiled", compiled)
    monkeypatch.setattr(probes, "us_of", us_of)
    monkeypatch.setattr(probes, "graph_of", lambda call: SimpleNamespace(replay=call))
    monkeypatch.setattr("torch.neg", neg)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1 << 20))
    return launched


def test_figures_are_what_a_multiprocessor_does_in_a_microsecond(timed: list[tuple[str, int, int]]) -> None:
    all_of_them = probes.Probes(GPU)
    found = dict(all_of_them.measure())
    expected = {
        "memory_bytes": 2 * 4 * 4096 / 100 / 132,
        "l2_bytes": 1024 * 8 * 16 / 2.2,  # a thread's loads of 16 bytes
        "shared_bytes": 1024 * 16 * 16 / 1.05,
        "instructions": 32 * 128 / 0.58,
        "special_functions": 1024 * 64 / 2.0,
        "double_functions": 512 * 2 * 8 / 3.0,
        "flops.float64": 16 * 16 * 2 * 16 * 8 * 16 / 2.1,
        "flops.tf32": 16 * 16 * 2 * 16 * 8 * 8 / 0.21,
        "flops.float16": 16 * 16 * 2 * 16 * 8 * 16 / 0.215,
        "flops.bfloat16": 16 * 16 * 2 * 16 * 8 * 16 / 0.22,
        "cycles": 1500.0,
        "wait_us": 0.7,
        "sync_us": 0.6 / 16,
        "behind_us": 0.9,
        "ramp_us": 5.0 - 0.9,
    }
    assert found == pytest.approx(expected, rel=2e-3)  # a launch's start is a part of it
    assert expected.keys() == MEASURED.keys() and all_of_them.clock == pytest.approx(1500, rel=1e-3)
    by_name = {name: (blocks, threads) for name, blocks, threads in timed}
    assert by_name.keys() == probes.kernels(90).keys()
    for name, (blocks, threads) in by_name.items():
        assert threads == probes.kernels(90)[name][1]
        assert (blocks % 132, blocks * threads >= 132 * 128) == ((1, False) if name == "chase" else (0, True))


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.usefixtures("compile_kernel")
def test_probes_compile(arch: int) -> None:
    for name in probes.kernels(arch):
        assert len(probes.cubin_of(name, Gpu.of(arch))) > 1000


def test_every_probe_is_of_a_number() -> None:
    """Those of products are of a dtype each."""
    of_products = {name.removeprefix("products_") for name in probes.kernels(90) if name.startswith("products_")}
    assert {f"flops.{dtype}" for dtype in of_products} == {name for name in MEASURED if name.startswith("flops.")}
