"""A build beside the source it was not made from, and setup.py where it cannot build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest
from forked import python

import factorlayer
from factorlayer.autograd.build import INTERFACE, VERSION, check_build

ROOT = Path(__file__).parents[1]

# What the extension and the package call of each other: a digest for the number that both sides have.
INTERFACES = {
    1: "115c7432d777b023",
    2: "a15ea06018e0be89",
    3: "17b265ad827c8992",
    4: "ba9d33d0bcabf415",
    5: "ba9d33d0bcabf415",  # plans name more than three buffers of scratch
    6: "8e15f65555edf7ff",
    7: "6baa825b59bc85b7",
    9: "4605ec0bbc346fb8",
    10: "32101d4a22b178f4",
    11: "32101d4a22b178f4",  # products that slopes are made of may be one tensor
    12: "d9f498314badac4b",
    13: "fd5b4f39f45bdad8",
    14: "fd5b4f39f45bdad8",  # six classes of batches
    15: "d7b6c1911592936c",
    16: "d7b6c1911592936c",  # Kronecker layers with an activation keep states
}


def extension(**attributes: object) -> types.ModuleType:
    module = types.ModuleType("factorlayer._C")
    module.__dict__.update(attributes)
    return module


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    begin = [sys.executable] if code.startswith(HIDDEN) else python()
    return subprocess.run(
        [*begin, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# A stale extension


def test_the_version_is_said_once() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert factorlayer.__version__ == VERSION == project[1]


def test_this_build_is_of_this_source() -> None:
    check_build(pytest.importorskip("factorlayer._C"))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"version": "0.0.9", "interface": INTERFACE}, rf"was built from factorlayer 0\.0\.9, and this is {VERSION}"),
        ({}, "it was built from factorlayer before 0\\.1\\.0, and this is"),
        ({"version": VERSION, "interface": INTERFACE + 1}, f"its interface is {INTERFACE + 1}, this one's {INTERFACE}"),
        ({"version": VERSION}, f"its interface is 0, this one's {INTERFACE}"),
    ],
    ids=["another version", "none", "another interface", "no interface"],
)
def test_a_stale_build_is_refused(attributes: dict[str, object], words: str) -> None:
    with pytest.raises(ImportError, match=words):
        check_build(extension(**attributes))


def test_auto_runs_batched_beside_a_stale_build_and_says_so() -> None:
    done = run_python(
        "import sys, types, warnings\n"
        "stale = types.ModuleType('factorlayer._C')\n"
        "stale.version, stale.interface = '0.0.9', 1\n"
        "sys.modules['factorlayer._C'] = stale\n"
        "import torch\n"
        "from factorlayer import FactorLinear, FactorMLP\n"
        "layer, x = FactorLinear(16, 36), torch.randn(5, 16)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    y = layer(x)\n"
        "    y.sum().backward()\n"
        "    block = FactorMLP([4, 8, 3])(x[:, :4])\n"
        "torch.testing.assert_close(y, x @ layer.to_dense().t() + layer.bias)\n"
        "assert block.shape == (5, 3)\n"
        "print(caught[0].message)\n"
        "layer.implementation = 'fused'\n"
        "try:\n"
        "    layer(x)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    warned, refused = done.stdout.splitlines()
    for words in (warned, refused):
        assert f"(it was built from factorlayer 0.0.9, and this is {VERSION}); build it with `pip install" in words
    assert warned.startswith("factorlayer runs the batched implementation, not the fused one")
    assert refused.startswith("FactorLinear: implementation='fused' cannot run")


def test_a_changed_interface_has_a_new_number() -> None:
    """So that a build from before the change is refused, not called in the wrong way."""
    assert re.search(rf"constexpr int interface = {INTERFACE};", (ROOT / "csrc" / "python.h").read_text())
    ops, python = ((ROOT / "csrc" / name).read_text() for name in ("ops/library.cpp", "python.cpp"))
    schemas = re.findall(r'm\.def\(\s*("[^;]*")\);', ops)
    methods = re.findall(r'\{"(\w+)", (?:reinterpret_cast<PyCFunction>\()?\w+\)?, METH_', python)
    given = re.findall(r"for \(PyObject\*\* place : \{(.*?)\}\)", python, re.DOTALL)
    called = re.findall(r'\bcall\(("factorlayer[\w.]+", [^)]*?),? *"(\w*)"', python)
    assert len(schemas) > 20 and len(methods) == 8 and len(given) == 1 and len(called) >= 4
    interface = re.sub(r"\s+", " ", repr((schemas, methods, given, called)))
    digest = hashlib.sha256(interface.encode()).hexdigest()[:16]
    assert INTERFACES.get(INTERFACE) == digest, (
        "what the extension and the package call of each other has changed: make the number in csrc/python.h and in "
        f"autograd/build.py one higher, build again, and write it here with {digest!r}"
    )


# setup.py


HIDDEN = (
    "import sys\n"
    "class Hide:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] == 'torch':\n"
    "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    "sys.meta_path.insert(0, Hide())\n"
)
OLD = "import sys, torch\ntorch.__version__ = '2.10.1+cu128'\n"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (HIDDEN, "here there is none .* `pip install --no-build-isolation .`"),
        (OLD, r"PyTorch 2\.11 or later, .* here is 2\.10\.1\+cu128: update it with `pip install --upgrade torch`"),
    ],
    ids=["no torch", "old torch"],
)
@pytest.mark.parametrize(
    "build",
    [
        "import runpy\nsys.argv = ['setup.py', '--version']\nrunpy.run_path('setup.py', run_name='__main__')\n",
        "from setuptools import build_meta\nbuild_meta.get_requires_for_build_wheel()\n",  # what pip calls
    ],
    ids=["setup.py", "pip"],
)
def test_a_build_that_cannot_be_ends_in_one_sentence(before: str, words: str, build: str) -> None:
    done = run_python(before + build)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if "factorlayer" in line]
    assert re.search(words, sentence)


def test_metadata_names_the_licence_and_the_sdist_has_what_a_build_needs(tmp_path: Path) -> None:
    """Without compiling: setup.py's own commands, in a copy of what they read."""
    files = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    for name in (*files, "csrc", "factorlayer"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        [*python(), "setup.py", "-q", "sdist"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        found = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
        metadata = sdist.extractfile(f"factorlayer-{VERSION}/PKG-INFO").read().decode()
    assert {*files, "factorlayer/py.typed"} <= found
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "factorlayer").glob("*.py")}
    assert sources | modules <= found
    assert re.search(r"^License(-Expression)?: MIT$", metadata, re.MULTILINE)
    assert "License-File: LICENSE" in metadata
    assert "Author: The factorlayer authors" in metadata
