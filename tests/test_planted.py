"""plant.py: its faults can be planted, and it tells what is found from what survives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import plant
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("found", plant.FAULTS, ids=lambda found: found.name)
def test_faults_can_be_planted(found: plant.Fault) -> None:
    """What they replace stands once in its file, and their tests are there."""
    assert plant.place(found, ROOT) != (ROOT / found.file).read_text()
    assert found.tests
    for test in found.tests:
        path, _, function = test.partition("::")
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source


def test_there_are_some_of_every_part() -> None:
    assert max(Counter(found.name for found in plant.FAULTS).values()) == 1
    files = {found.file.removeprefix("csrc/").split("/")[0] for found in plant.FAULTS}
    assert {"runtime", "cpu", "chain.cpp", "expression.cpp", "ops", "python.cpp"} <= files
    assert len(plant.FAULTS) >= 30


def test_what_stands_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1 + 1")
    for old in ("1", "2"):
        with pytest.raises(ValueError, match="should stand once in f, it stands there"):
            plant.place(plant.Fault("f", "f", old, "3", ()), tmp_path)
    assert plant.place(plant.Fault("f", "f", "+", "-", ()), tmp_path) == "1 - 1"


SETUP = """
import pathlib, sys
if "syntax error" in pathlib.Path("csrc/one.cpp").read_text():
    sys.exit(1)
"""
TEST = """
import pathlib
def test_it():
    assert pathlib.Path("csrc/one.cpp").read_text().startswith("int one = 1;")
"""


@pytest.mark.long
def test_one_fault_is_caught_and_one_that_is_none_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a repository that is built in no time. Each fault is taken out before the next one."""
    house = tmp_path / "house"
    for name, text in {
        "csrc/one.cpp": "int one = 1;  // a number\n",
        "setup.py": SETUP,
        "tests/test_one.py": TEST,
    }.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    monkeypatch.setattr(plant, "ROOT", house)
    faults = [
        plant.fault("another-number", "one.cpp", "= 1", "= 2", "test_one.py"),
        plant.fault("another-comment", "one.cpp", "a number", "one number", "test_one.py"),
        plant.fault("no-code", "one.cpp", "a number", "syntax error", "test_one.py"),
    ]
    for workers in (1, 2):
        said = plant.run(faults, workers, 1, tmp_path / str(workers))
        assert said == {"another-number": "caught", "another-comment": "survived", "no-code": "not built"}
    assert (house / "csrc" / "one.cpp").read_text().startswith("int one = 1;")


@pytest.mark.parametrize("test", ["test_one.py::test_other", "test_other.py", "test_one.py::test_it"])
def test_a_test_that_fails_anyway_catches_nothing(test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is not there."""
    house = tmp_path / "house"
    for name, text in {"csrc/one.cpp": "int two = 2;", "setup.py": "", "tests/test_one.py": TEST}.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    monkeypatch.setattr(plant, "ROOT", house)
    with pytest.raises(RuntimeError, match=f"with no fault planted, these do not pass: tests/{test}"):
        plant.run([plant.fault("three", "one.cpp", "2", "3", test)], 1, 1, tmp_path / "garden")


def test_a_repository_that_is_not_built_is_no_garden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "house" / "csrc").mkdir(parents=True)
    (tmp_path / "house" / "csrc" / "one.cpp").write_text("syntax error")
    (tmp_path / "house" / "setup.py").write_text(SETUP)
    monkeypatch.setattr(plant, "ROOT", tmp_path / "house")
    with pytest.raises(RuntimeError, match="cannot be built as it is"):
        plant.run([], 1, 1, tmp_path / "garden")
