"""The house's floor plan: a file imports only from lower floors, and torch is seen where it may be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from factorlayer.activations import ACTIVATIONS
from factorlayer.expression import OPERATIONS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "factorlayer"
FLOORS = {
    "_C": 0, "build": 0, "device": 0, "expression": 0, "gpu": 0, "nearest": 0, "nested": 0, "progress": 0, "spec": 0,
    "vectors": 0,
    "activations": 1, "batch": 1, "chain": 1, "elementwise": 1, "formula": 1, "guard": 1, "naive": 1, "record": 1,
    "resident": 1, "results": 1, "states": 1,
    "backward": 2, "batched": 2, "dense": 2, "emit": 2, "gradient": 2, "grammar": 2, "project": 2, "runtime": 2,
    "slopes": 2, "streamed": 2, "tiling": 2, "tracing": 2, "turn": 2,
    "cluster_backward": 3, "column_sums": 3, "columns": 3, "dense_backward": 3, "dense_streamed": 3,
    "double_backward": 3, "double_pair": 3, "few": 3, "grouped": 3, "large_backward": 3, "mapped": 3, "monarch": 3,
    "monarch_backward": 3, "monarch_mapped": 3, "monarch_through": 3, "pair": 3, "parts": 3, "scaled_backward": 3,
    "slab_backward": 3, "small": 3, "split_pair_backward": 3, "stages": 3, "stand_in": 3, "strip": 3,
    "strip_backward": 3, "unit_backward": 3, "untied_backward": 3, "wide": 3, "wide_gradient": 3,
    "columns_backward": 4, "dense_backward32": 4, "eights": 4, "eights_backward": 4, "layer_backward": 4,
    "mixed_backward": 4, "pair_backward": 4, "single_backward": 4, "small_backward": 4, "split_single_backward": 4,
    "triple": 4, "weight_halves": 4, "wide_resident": 4,
    "plan": 5,
    "planner": 6,
    "fused": 7, "schemes": 7,
    "functional": 8, "layerwise": 8,
    "layers": 9, "stacked": 9,
    "frozen": 10,
    "stack": 11,
    "graph": 12, "mlp": 12,
    "pieces": 13,
    "fusion": 14,
    "__init__": 15, "subject": 15,
    "about": 16, "case": 16,
    "comparison": 17, "linear": 17, "measure": 17, "refusals": 17, "source": 17, "variants": 17,
    "arguments": 18, "compare": 18, "views": 18,
    "cli": 19,
}  # fmt: skip
TORCH_OPS = {"torch/csrc/stable/ops.h"}  # not ours
MODULES = sorted(PACKAGE.glob("*.py"))
CPU_FILES = sorted((ROOT / "csrc" / "cpu").iterdir())


def imports(path: Path) -> set[str]:
    """Full names of all that a file imports, anywhere in it; `from a import b` counts as a and, if a module, a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_modules(path: Path) -> set[str]:
    """Of the package itself, by stem; the package as a whole is __init__."""
    names = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "factorlayer":
            continue
        if len(parts) == 1:
            names.add("__init__")
        elif parts[1] in FLOORS or (PACKAGE / f"{parts[1]}.py").exists():
            names.add(parts[1])
    # `from factorlayer.spec import X` names spec; only `from factorlayer import X` means the package as a whole.
    whole = any(
        (isinstance(node, ast.ImportFrom) and node.module == "factorlayer"
        and any(alias.name not in FLOORS for alias in node.names))
        or (isinstance(node, ast.Import) and any(alias.name == "factorlayer" for alias in node.names))
        for node in ast.walk(ast.parse(path.read_text()))
    )  # fmt: skip
    return names - {"__init__"} | ({"__init__"} if whole else set())


def includes(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_imports_point_downwards(path: Path) -> None:
    assert path.stem in FLOORS, f"{path.name} has no floor: give it one here"
    upward = {name for name in imported_modules(path) if FLOORS.get(name, 99) >= FLOORS[path.stem]}
    assert not upward, f"{path.name} is on floor {FLOORS[path.stem]} and imports {upward}"


@pytest.mark.parametrize(
    "name",
    [
        "spec",
        "gpu",
        "device",
        "expression",
        "resident",
        "tiling",
        "column_sums",
        "columns",
        "columns_backward",
        "dense",
        "dense_backward",
        "dense_backward32",
        "dense_streamed",
        "double_pair",
        "eights",
        "emit",
        "few",
        "layer_backward",
        "mapped",
        "mixed_backward",
        "monarch",
        "monarch_mapped",
        "monarch_through",
        "nearest",
        "pair",
        "parts",
        "results",
        "slab_backward",
        "slopes",
        "small",
        "states",
        "streamed",
        "triple",
        "turn",
        "untied_backward",
        "wide",
        "wide_gradient",
        "wide_resident",
        "plan",
        "planner",
        "schemes",
    ],
)
def test_the_planner_and_what_it_stands_on_need_no_torch(name: str) -> None:
    assert not {imported for imported in imports(PACKAGE / f"{name}.py") if imported.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_the_package_does_not_know_its_benches_and_tests(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {
        "benches",
        "examples",
        "tests",
        "oracle",
        "pytest",
        "hypothesis",
    }


@pytest.mark.parametrize(
    "path",
    [
        *MODULES,
        *sorted(ROOT.glob("*.py")),
        *(path for name in ("benches", "examples") for path in sorted((ROOT / name).rglob("*.py"))),
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_argparse(path: Path) -> None:
    assert "argparse" not in {name.split(".")[0] for name in imports(path)}


def test_one_file_sees_torch_and_one_python() -> None:
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        seen = {name.split("/")[0] for name in includes(path) if name.startswith(("torch", "ATen", "c10", "Python"))}
        allowed = {"ops.cpp": {"torch"}, "python.cpp": {"Python.h"}}
        assert seen == allowed.get(path.name, set()), f"{path.name} includes {seen}"


def test_nothing_includes_ops() -> None:
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        assert not {name for name in includes(path) if name.split("/")[-1] in ("ops.h", "ops.cpp")} - TORCH_OPS


@pytest.mark.parametrize("path", CPU_FILES, ids=lambda path: path.name)
def test_kernels_include_the_standard_library_the_chain_and_each_other(path: Path) -> None:
    own = {file.name for file in CPU_FILES} | {"../chain.h", "../dtype.h", "immintrin.h"}
    foreign = {name for name in includes(path) - own if not re.fullmatch(r"[a-z_]+|sys/mman\.h", name)}
    assert not foreign


RUNTIME_FILES = sorted((ROOT / "csrc" / "runtime").iterdir())


@pytest.mark.parametrize("path", RUNTIME_FILES, ids=lambda path: path.name)
def test_the_runtime_includes_the_system_the_chain_and_itself(path: Path) -> None:
    own = {file.name for file in RUNTIME_FILES} | {"../chain.h", "../dtype.h", "../shown.h", "../table.h"}
    system = {"dirent.h", "dlfcn.h", "fcntl.h", "sys/file.h", "sys/stat.h", "unistd.h"}
    assert all(re.fullmatch(r"[a-z_]+", name) for name in includes(path) - own - system)


ENGINE_FILES = sorted((ROOT / "csrc" / "engine").iterdir())


@pytest.mark.parametrize("path", ENGINE_FILES, ids=lambda path: path.name)
def test_the_engine_includes_itself_alone(path: Path) -> None:
    """NVRTC comes without CUDA's headers and without the standard library's."""
    assert includes(path) <= {file.name for file in ENGINE_FILES}


def test_the_chain_includes_nothing_but_the_standard_library() -> None:
    own = r"[a-z_]+|(chain|expression|shown|table)\.h"
    for name in ("chain.h", "chain.cpp", "expression.h", "expression.cpp", "shown.h", "table.h", "dtype.h"):
        assert all(re.fullmatch(own, include) for include in includes(ROOT / "csrc" / name))


def test_activations_have_the_same_rows_in_python_and_in_the_kernels() -> None:
    source = (ROOT / "csrc" / "cpu" / "pointwise.h").read_text()
    table = re.search(r"#define FL_ACTIVATIONS\(ROW\)(.*?)\n\n", source, re.DOTALL)
    assert table is not None
    assert re.findall(r"\bROW\((\w+),", table[1]) == list(ACTIVATIONS)
    on_gpu = (ROOT / "csrc" / "engine" / "pointwise.cuh").read_text()
    assert re.findall(r"^ACTIVATION\((\w+),", on_gpu, re.MULTILINE) == list(ACTIVATIONS)


def test_expressions_have_the_same_operations_in_python_and_in_the_kernels() -> None:
    rows = re.findall(r"\bROW\((\w+), (\d)\)", (ROOT / "csrc" / "expression.h").read_text())
    assert [(name, int(count)) for name, count in rows] == list(OPERATIONS.items())
    on_cpu = (ROOT / "csrc" / "cpu" / "expression.h").read_text()
    assert re.findall(r"static FL_INLINE V (\w+)\(V a", on_cpu) == list(OPERATIONS)


def test_the_raw_ops_are_named_in_one_file() -> None:
    """Everything else goes through fused.py, so that a new engine is added in one place."""
    for op, name in (("forward", "fused.py"), ("stack_forward", "stacked.py"), ("stack_frozen", "frozen.py")):
        assert {path.name for path in MODULES if f"torch.ops.factorlayer.{op}" in path.read_text()} == {name}
