"""GPUs' tables of rates: those that are shipped, what data sheets say of others, and a user's own."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from factorlayer.autograd import runtime
from factorlayer.device import table
from factorlayer.device.gpu import LIMITS, Gpu
from factorlayer.device.table import H200, Rates, Table, file_name, parsed, read, shipped
from factorlayer.maths.chain import Chain
from factorlayer.plan import planner
from factorlayer.plan.library import contracted_us
from factorlayer.plan.planner import plan_of, times

LARGE = "tied 0 1 4096 4096 1"
PAIR, MONARCH = "tied 1 32 32 32 1; tied 0 1 32 32 32", "untied 0 64 88 384 1; untied 1 1 384 64 64"
DENSE = "tied 0 1 64 64 1; bias; gelu"
# What is predicted for, so that every number counts in some of them: text, dtype, class of batch sizes.
CASES = (
    *((PAIR, dtype, 3) for dtype in ("float64", "float32", "bfloat16")),
    *((f"{PAIR}; backward", dtype, 3) for dtype in ("float32", "float16")),
    (MONARCH, "float32", 4),
    (f"{MONARCH}; tf32", "float32", 4),
    (MONARCH, "bfloat16", 1),
    (DENSE, "float64", 4),
    (f"{DENSE} | {DENSE}", "bfloat16", 4),
)
A_GPU = Gpu(90, 132, 232448, 1234567)  # that nobody makes
RATES = shipped()[H200].rates


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's tables, of a process that begins."""

    def forget() -> None:
        table.own.cache_clear()
        runtime.planner.cache_clear()

    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path))
    forget()
    (tmp_path / "rates").mkdir()
    yield tmp_path / "rates"
    forget()
    monkeypatch.setattr(table, "kept_in", lambda: None)
    table.own()


def key_of(gpu: Gpu) -> table.Key:
    return gpu.arch, gpu.sms, gpu.shared, gpu.memory


def changed(name: str, factor: float) -> Rates:
    """An H200's, but for one number."""
    if name.startswith("flops."):
        dtype = name.removeprefix("flops.")
        return replace(RATES, flops=RATES.flops | {dtype: factor * RATES.flops[dtype]})
    return replace(RATES, **{name: factor * getattr(RATES, name)})


def keep(folder: Path, gpu: Gpu, rates: Rates) -> Path:
    path = folder / file_name(key_of(gpu))
    path.write_text(Table(key_of(gpu), {"gpu": "a GPU"}, rates).text())
    return path


# What is shipped, and the others.


@pytest.mark.parametrize("path", sorted(table.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_a_measured_gpus(path: Path) -> None:
    found = read(path)
    assert path.name == file_name(found.gpu) and found.gpu[3]
    assert found.machine["gpu"]
    gpu = Gpu(*found.gpu)
    assert gpu.rates == found.rates
    assert gpu.table.source == "measured on such a GPU"
    assert path.read_text() == found.text()


def test_other_gpus_have_an_h200s_rates_scaled_by_data_sheets() -> None:
    for arch in LIMITS:
        gpu = Gpu.of(arch)
        assert gpu.table.source == "of an H200, scaled by data sheets"
        assert (gpu.rates.behind_us, gpu.rates.cycles) == (RATES.behind_us, RATES.cycles)
        assert 0.2 < gpu.flops["bfloat16"] / RATES.flops["bfloat16"] <= 1
    of_slow_memory = A_GPU.rates
    assert replace(of_slow_memory, memory_bytes=RATES.memory_bytes, l2_bytes=RATES.l2_bytes) == RATES
    assert of_slow_memory.memory_bytes == table.MEMORY_SHARE * 1234567 / 132
    assert of_slow_memory.l2_bytes == Gpu.of(90).l2_bytes


def test_a_table_is_read_as_it_was_written() -> None:
    written = Table(key_of(A_GPU), {"gpu": "a GPU", "date": "today"}, changed("wait_us", 1 / 3), "here")
    assert parsed(written.text().encode(), "here") == written


# A user's own.


def test_a_users_own_table_comes_first(folder: Path) -> None:
    slower = changed("memory_bytes", 0.5)
    for gpu in (A_GPU, Gpu(*H200)):
        path = keep(folder, gpu, slower)
    for gpu in (Gpu(*key_of(A_GPU)), Gpu(*H200)):
        assert gpu.rates == slower
        assert "rates in " in str(plan_of(PAIR, "float32", 1, gpu))
    assert Gpu(*H200).table.source == f"in {path}"
    assert Gpu.of(90).rates != slower


def _predicted(gpu: Gpu) -> list[object]:
    limits = gpu.arch, gpu.sms, gpu.shared, gpu.memory
    of_library = [contracted_us(Chain.parse(LARGE), dtype, 4096, gpu, True) for dtype in RATES.flops]
    return [[times(text, dtype, *limits, batch_class) for text, dtype, batch_class in CASES], of_library]


@pytest.mark.long
def test_every_number_counts(folder: Path) -> None:
    """Each GPU's table has another number changed, and only their memory tells them apart."""
    names = list(RATES.by_name)
    gpus = [Gpu(90, 132, 232448, 1000 + i) for i in range(len(names) + 1)]
    keep(folder, gpus[0], RATES)
    for gpu, name in zip(gpus[1:], names, strict=True):
        keep(folder, gpu, changed(name, 0.4))
    as_it_is = _predicted(gpus[0])
    assert [name for gpu, name in zip(gpus[1:], names, strict=True) if _predicted(gpu) == as_it_is] == []


def test_a_plan_by_another_table_is_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache keeps of the one is not handed out for the other."""
    asked = list[object]()

    def predicted(*question: object) -> float:
        asked.append(question)
        return 1.0

    monkeypatch.setattr(planner, "predicted", predicted)
    for rates in (None, RATES, None, changed("cycles", 2), RATES):
        path = folder / file_name(key_of(A_GPU))
        path.unlink(missing_ok=True)
        if rates:
            keep(folder, A_GPU, rates)
        for each in (table.own, runtime.planner):  # as in another process
            each.cache_clear()
        torch.ops.factorlayer.ask_planner("predicted", PAIR, "float32", 3, *key_of(A_GPU))
    assert len(asked) == 3


def test_a_process_keeps_to_the_tables_that_it_has_read(folder: Path) -> None:
    assert Gpu(*key_of(A_GPU)).table.source.endswith("data sheets")
    before = runtime.planner()
    keep(folder, A_GPU, RATES)
    assert Gpu(*key_of(A_GPU)).table.source.endswith("data sheets")
    assert runtime.planner.__wrapped__() == before


def _with(change: Callable[[dict[str, Any]], object]) -> str:
    told = json.loads(Table(key_of(A_GPU), {}, RATES).text())
    change(told)
    return json.dumps(told)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is no JSON"),
        ("[" * 10000, "it is no JSON"),
        ("[]", 'it should hold "factorlayer rates"'),
        ("{}", 'it should hold "factorlayer rates"'),
        (" " * (1 << 17), "it is no file of at most"),
        (_with(lambda told: told.update({"factorlayer rates": 0})), "it is of version 0, this factorlayer reads 1"),
        (_with(lambda told: told.pop("machine")), "a table should have"),
        (_with(lambda told: told.update(machine="mine")), '"machine" should describe a machine'),
        (_with(lambda told: told["gpu"].pop("sms")), '"gpu" should have arch, sms, shared, memory'),
        (_with(lambda told: told["gpu"].update(sms=0)), '"gpu" should have whole numbers'),
        (_with(lambda told: told["gpu"].update(sms=131)), "it is another GPU's"),
        (_with(lambda told: told["rates"].pop("wait_us")), '"rates" should have memory_bytes'),
        (_with(lambda told: told["rates"].update(older=1.0)), '"rates" should have memory_bytes'),
        (_with(lambda told: told["rates"].update(flops=1.0)), '"flops" should have float64'),
        (_with(lambda told: told["rates"]["flops"].pop("tf32")), '"flops" should have float64'),
        (_with(lambda told: told["rates"]["flops"].update(tf32=-1.0)), "flops.tf32 should be a number from"),
        *(
            (_with(lambda told, value=value: told["rates"].update(cycles=value)), "cycles should be a number from")  # type: ignore[misc]
            for value in (0, -1.5, float("nan"), float("inf"), 10**400, "1650", True, None)
        ),
    ],
)
def test_a_broken_table_is_ignored_with_a_warning(folder: Path, text: str, why: str) -> None:
    path = folder / file_name(key_of(A_GPU))
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=re.escape(why)) as warned:
        rates = Gpu(*key_of(A_GPU)).rates
    assert len(warned) == 1 and str(folder) in str(warned[0].message) and path.name in str(warned[0].message)
    assert rates == Gpu(*key_of(A_GPU)).rates != RATES


def test_one_warning_says_of_all_what_is_wrong(folder: Path) -> None:
    (folder / "mine.json").write_text(Table(key_of(A_GPU), {}, RATES).text())
    (folder / "sm_90.json").mkdir()
    kept = keep(folder, Gpu(*H200), changed("sync_us", 2))
    with pytest.warns(RuntimeWarning) as warned:
        assert Gpu(*H200).table.source == f"in {kept}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gpu(*key_of(A_GPU)).rates  # noqa: B018
    (message,) = (str(each.message) for each in warned)
    assert f"mine.json (it is another GPU's, whose file would be {file_name(key_of(A_GPU))})" in message
    assert "sm_90.json (Is a directory)" in message
    assert "benches.calibrate" in message


def test_without_a_home_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FACTORLAYER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert table.kept_in() is None
    assert table.own.__wrapped__() == {}


def test_numbers_have_names() -> None:
    names = RATES.by_name
    assert len(names) == len(asdict(RATES)) - 1 + len(RATES.flops)
    assert names["flops.tf32"] == RATES.flops["tf32"]
