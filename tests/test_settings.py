"""settings.py: each setting is what its name says, and what is run is what was asked for."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from settings import BY_NAME, SETTINGS, SLOW, Setting, app, command, environment, read_only, together
from typer.testing import CliRunner

TESTS = Path(__file__).parent
PASSES = "tests/test_settings.py::test_nothing"


def test_nothing() -> None:
    """For the runs below."""


def call(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, TESTS / "settings.py", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def tell(setting: Setting, program: str, folder: Path) -> str:
    given = environment(setting, folder, 0)
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_list_has_them_all_once() -> None:
    done = CliRunner().invoke(app, ["--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == [setting.name for setting in SETTINGS]
    assert len(BY_NAME) == len(SETTINGS)


def test_a_name_that_is_none_lists_those_that_are() -> None:
    done = CliRunner().invoke(app, ["sse", "mmx"])
    assert done.exit_code == 2 and "'mmx'" in done.output and "read-only-home" in done.output


def test_what_is_left_out_is_there() -> None:
    assert all((TESTS / name).exists() for name in SLOW)
    assert command(True, "-x tests/test_a.py", 1)[-2:] == ["-x", "tests/test_a.py"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["avx2", "sse"])
def test_pytorch_takes_the_instructions(name: str, tmp_path: Path) -> None:
    if not torch.cpu._is_avx2_supported():
        pytest.skip("a processor without AVX2")
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    assert tell(BY_NAME[name], program, tmp_path) == {"avx2": "AVX2", "sse": "DEFAULT"}[name]


def test_home_is_unset_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path))
    assert "HOME" not in environment(BY_NAME["no-home"], tmp_path, 0)
    given = environment(BY_NAME["read-only-home"], tmp_path, 0)
    assert Path(given["HOME"]) == read_only(tmp_path) != tmp_path and "FACTORLAYER_CACHE" not in given
    with pytest.raises(OSError, match=r"ermission|ermitted|ead-only"):
        (Path(given["HOME"]) / "file").write_text("")


def test_together_is_all_of_them(tmp_path: Path) -> None:
    both = together([BY_NAME["sse"], BY_NAME["threads-4"], BY_NAME["load"]])
    assert both.name == "sse+threads-4+load" and both.load and not both.sdist
    given = environment(both, tmp_path, 0)
    assert given["ATEN_CPU_CAPABILITY"] == "default" and given["FACTORLAYER_TEST_THREADS"] == "4"


CONFTEST = Path(__file__).with_name("conftest.py")  # tests/gpu has one of that name, too


def test_the_order_is_another_one_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = runpy.run_path(str(CONFTEST))

    def order(seed: str | None) -> list[int]:
        collect = conftest["pytest_collection_modifyitems"]
        monkeypatch.setitem(collect.__globals__, "ORDER", seed)
        monkeypatch.setitem(collect.__globals__, "SHARE", 1)
        items = list(range(100))
        collect(None, items)
        return items

    assert order(None) == list(range(100)) == sorted(order("1"))
    assert order("1") == order("1") != order("2")
    assert order("1") != order(None)


def test_cases_are_drawn_by_a_number_and_no_test_goes_without() -> None:
    draw = runpy.run_path(str(CONFTEST))["draw"]
    draw.__globals__["SHARE"] = 8
    tests = [[f"test_{i}[{j}]" for j in range(1 + i)] for i in range(60)]
    for cases in tests:
        found = draw(cases, "7")
        assert found and found <= set(cases) and found == draw(cases, "7")
    assert sum(len(draw(cases, "7")) for cases in tests) < 0.2 * sum(map(len, tests))
    assert {name for number in range(60) for name in draw(tests[-1], str(number))} == set(tests[-1])


def test_each_test_that_takes_seconds_is_drawn_by_some_number() -> None:
    draw_long = runpy.run_path(str(CONFTEST))["draw_long"]
    tests = [f"test_{i}" for i in range(50)]
    share = draw_long.__globals__["LONG_SHARE"]
    assert share > 1 and len(draw_long(tests, "7")) == -(-50 // share)
    assert draw_long(tests, "7") == draw_long(reversed(tests), "7")
    assert draw_long(tests, "7") != draw_long(tests, "8")
    assert set().union(*(draw_long(tests, str(number)) for number in range(40))) == set(tests)
    assert draw_long(tests[:1], "7") == set(tests[:1]) and not draw_long([], "7")


@pytest.mark.long
def test_a_run_counts_and_fails_where_a_test_does() -> None:
    status, text = call("sse", "threads-2", "order", "--together", "--seed=7", "--processes=0", "--select", PASSES)
    assert status == 0, text
    assert "+ env ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 FACTORLAYER_TEST_ORDER=7" in text
    status, text = call("no-home", "plain", "--processes=0", "--select", f"{PASSES}_of_this_name")
    assert status == 1 and "env -u FACTORLAYER_CACHE -u HOME" in text
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["no-home", "FAILED"], ["plain", "FAILED"]]
