"""What docs/adding.md says is enough for a GPU and for an activation, done from outside in a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forked import python

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding.md").read_text()
ROW = "LIMITS[121] = (101376, 48)\n"
ACTIVATION = """import torch


def cousin(x):
    return x * torch.sigmoid(1.702 * x)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "factorlayer", folder / "factorlayer", ignore=ignored)
    shutil.copytree(ROOT / "csrc" / "engine", folder / "csrc" / "engine", ignore=ignored)
    shutil.copy(ROOT / "test.py", folder)
    (folder / "acts.py").write_text(ACTIVATION)
    return folder


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(copy), "FACTORLAYER_CACHE": str(copy / "cache")}
    command = [*python(), "test.py", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def files_of(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^- \[([\w/.]+)\]", section, re.M)


@pytest.mark.long
def test_a_gpu_is_one_row(copy: Path) -> None:
    (module,) = (path for path in (copy / "factorlayer").rglob("gpu.py") if "LIMITS[" in path.read_text())
    assert module.relative_to(copy).as_posix() == files_of("A GPU")[0]
    command = ["64", "8", "8", "check", "--json", "--source", "--arch", "121"]
    refused = run(copy, *command)
    assert refused.returncode != 0
    assert "the compute capability should be one of" in refused.stderr

    before = module.read_text()
    module.write_text(before.replace("LIMITS[120]", f"{ROW}LIMITS[120]"))
    try:
        done = run(copy, *command)
    finally:
        module.write_text(before)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["source"]
    assert {kernel["architecture"] for kernel in source["kernels"]} == {"sm_121"}


def test_an_activation_of_ones_own_touches_no_file(copy: Path) -> None:
    done = run(copy, "64", "8", "8", "check", "--dtype", "d", "--activation", "acts.py:cousin")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_of_a_named_activation_have_the_one_that_is_named_there() -> None:
    files = files_of("A named activation")
    assert len(files) == 5
    assert [path for path in files if not re.search(r"\bsilu\b", (ROOT / path).read_text())] == []
