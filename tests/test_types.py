"""What type checkers say of programs that use the package: those of README and docs pass, and a wrong name does not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import python

ROOT = Path(__file__).parents[1]
CHECKERS = {
    "mypy": ["--check-untyped-defs", "--no-incremental", "--cache-dir=/dev/null", "--config-file=mypy.ini", "."],
    "basedpyright": ["--pythonpath", sys.executable, "."],
}
# What PyTorch imports and no page does: mypy reads files without these in half the time, basedpyright reads all of them
UNREAD = [f"torch.{name}" for name in ("_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "ao")]
UNREAD += [f"torch.{name}" for name in ("distributions", "export", "fx", "onnx")]
UNREAD += ["matplotlib", "onnx", "onnxscript", "sympy"]


PAGES = {"readme.py": ROOT / "README.md"}  # those whose programs stand on their own, by the file they become
PAGES |= {f"of_{name}.py": ROOT / "docs" / f"{name}.md" for name in ("layers", "blocks", "models", "distributed")}


def program(page: Path) -> str:
    """The page's Python, one block behind the other, as a reader would paste them."""
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, page
    return "\n\n".join(found)


GROUP = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # of one process, as torchrun says

WRONG = """
import torch
from factorlayer import FactorLinear, FactorMLP, Implementation, Structure, factor_linear, fuse
from torch import nn

right: Implementation = "v3"
structure: Structure = "monarch"
layer = FactorLinear(16, 16, structure=structure, implementation=right)
reveal: int = layer.out_features
FactorLinear(16, 16, implementation="v9")  # wrong
FactorLinear(16, 16, structure="butterfly")  # wrong
FactorMLP([4, 4], implementation="fast")  # wrong
FactorLinear.from_linear(nn.Linear(4, 4), structure="kron")  # wrong
fuse(nn.Sequential(nn.Linear(4, 4)), "triton")  # wrong
factor_linear(torch.randn(4, 16), layer.weights, implementation="v0")  # wrong
"""


Errors = dict[str, list[tuple[int, str]]]


def errors_by_file(checker: str, folder: Path) -> Errors:
    """Of programs away from the source, as in a user's folder, all at once: reading PyTorch is what takes the time."""
    for name, page in PAGES.items():
        (folder / name).write_text(program(page))
    (folder / "wrong.py").write_text(WRONG)
    assert not any(re.search(rf"\b{re.escape(name)}\b", program(page)) for name in UNREAD for page in PAGES.values())
    unread = ",".join(f"{name}.*" for name in UNREAD)
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{unread}]\nfollow_imports = skip\n")
    source = str(ROOT)  # where it lies if it is installed as editable, which checkers do not follow
    settings = {"typeCheckingMode": "standard", "extraPaths": [source]}  # pyright's own default
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    environment = os.environ | {"MYPYPATH": source}
    command = [sys.executable, "-m", checker, *CHECKERS[checker]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: Errors = {name: [] for name in (*PAGES, "wrong.py")}
    for name, line, words in re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error:? (.*)", done.stdout):
        found[name].append((int(line), words))
    return found


@pytest.fixture(scope="module", params=CHECKERS)
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, str]]]:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install {request.param}")
    return errors_by_file(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_errors(errors: Errors, name: str) -> None:
    assert errors[name] == []


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(program(PAGES[name]))
    environment = os.environ | GROUP | {"FACTORLAYER_CACHE": str(tmp_path / "cache")}
    command = [*python(), name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_wrong_name_is_an_error(errors: Errors) -> None:
    wrong = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) == 6
    assert {line for line, _ in errors["wrong.py"]} == wrong
