"""The source distribution: whoever unpacks it can build the package, run its tests and read its documents."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from forked import python

ROOT = Path(__file__).parents[1]
MADE = {"__pycache__", ".hypothesis"}  # by running


def make(*arguments: str) -> None:
    command = [*python(), "setup.py", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_installed_package_has_the_tables_of_gpus(tmp_path: Path) -> None:
    """And all of its modules and device headers."""
    make("egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path))
    for source, built, kind in (
        (ROOT / "factorlayer", tmp_path / "factorlayer", "*.py"),
        (ROOT / "factorlayer" / "device", tmp_path / "factorlayer" / "device", "*.json"),
        (ROOT / "csrc" / "engine", tmp_path / "factorlayer" / "engine", "*.cuh"),
    ):
        names, there = ({path.relative_to(top) for path in top.rglob(kind)} for top in (source, built))
        assert names == there != set()


def test_it_holds_all_that_the_tests_need(tmp_path: Path) -> None:
    make("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {"LICENSE", "pyproject.toml", "setup.py", "test.py", ".ci/run", *(path.name for path in ROOT.glob("*.md"))}
    for folder in ("factorlayer", "csrc", "tests", "benches", "examples", "docs"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and not MADE & set(path.parts)]
        wanted |= {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".so"}
    assert wanted - names == set()
