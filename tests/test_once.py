"""once.py: a file is made once, by one of those who want it at the same time, and stands for all it was made from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from once import compile_in, folder_of_compiled, once

from factorlayer.autograd import runtime


def test_one_makes_it_and_the_others_wait(tmp_path: Path) -> None:
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: once(tmp_path / "file", make).read_text(), range(8)))
    assert found == ["whole"] * 8 and len(made) == 1


def test_what_could_not_be_made_is_made_by_the_next_one(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ValueError("an error of the compiler")

    with pytest.raises(ValueError, match="of the compiler"):
        once(tmp_path / "file", fail)
    assert once(tmp_path / "file", lambda path: path.write_text("whole")).read_text() == "whole"


def test_a_kernel_is_kept_for_what_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run that asks for the same finds it; another source, name, architecture, option or compiler is new."""
    asked = []

    def compile_kernel(*given: object) -> tuple[bytes, str]:
        asked.append(given)
        return b"\x7fELF\0\n" + str(given).encode(), f"log of {given}"

    monkeypatch.setattr(runtime, "compile_kernel", compile_kernel)
    right = ("source", "kernel", "sm_90a", ("-O",))
    others: list[tuple[str, str, str, Sequence[str]]] = [
        ("another", *right[1:]),
        ("source", "another", *right[2:]),
        ("source", "kernel", "sm_80", ("-O",)),
        (*right[:3], ("-G",)),
    ]
    for _ in range(2):
        for given in (right, *others):
            assert compile_in(tmp_path, "13.0")(*given) == compile_kernel(*given)
            asked.pop()
    assert asked == [right, *others]
    compile_in(tmp_path, "13.1")(*right)
    assert asked == [right, *others, right]


def test_what_a_run_asks_for_is_younger_than_the_rest(tmp_path: Path) -> None:
    for name in ("used", "left"):
        once(tmp_path / name, lambda path: path.write_text("whole"))
        os.utime(tmp_path / name, (0, 0))
    once(tmp_path / "used", lambda path: pytest.fail("it is there"))
    assert (tmp_path / "used").stat().st_mtime > 0 == (tmp_path / "left").stat().st_mtime


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTORLAYER_TEST_COMPILED", str(tmp_path / "kept"))
    assert folder_of_compiled(tmp_path) == tmp_path / "kept" and (tmp_path / "kept").is_dir()
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("FACTORLAYER_TEST_COMPILED")
        else:
            monkeypatch.setenv("FACTORLAYER_TEST_COMPILED", unset)
        assert folder_of_compiled(tmp_path) == tmp_path
