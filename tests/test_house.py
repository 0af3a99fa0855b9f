"""The house's floor plan: rooms import only from lower rooms, folders stay small, and torch is seen where it may be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from factorlayer.activations.expression import NAMED, OPERATIONS
from factorlayer.activations.named import ACTIVATIONS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "factorlayer"
ENGINE = ROOT / "csrc" / "engine"
# From the ground up. A room is a folder; each file that users import is a room of its own.
FLOORS = (
    ("activations", "device"),
    ("maths",),
    ("kernels",),
    ("kernels/product",),
    ("kernels/kronecker", "kernels/monarch", "kernels/recurrent", "kernels/stack"),
    ("kernels/decode",),
    ("plan/registry",),
    ("plan",),
    ("autograd",),
    ("tuning",),
    ("functional.py",),
    ("layers.py", "adapters"),
    ("recurrences",),
    ("stacks",),
    ("mlp.py", "parallel.py", "recurrent.py"),
    ("decoder.py", "fusion.py", "models"),
    ("__init__.py",),
    ("cli",),
)
ENGINE_FLOORS = (
    ("ptx",),
    ("types",),
    ("move",),
    ("multiply",),
    ("finish",),
    ("kernels",),
    ("kernels/product",),
    ("kernels/kronecker", "kernels/monarch", "kernels/decode", "kernels/recurrent", "kernels/stack"),
)
MOST_FILES = 21  # of a folder
SOURCES = (".py", ".cuh", ".h", ".cpp")
PLANNED_WITHOUT_TORCH = ("device", "kernels", "plan")
MODULES = sorted(PACKAGE.rglob("*.py"))
OPS = ROOT / "csrc" / "ops"
CPU = ROOT / "csrc" / "cpu"
CPU_FILES = sorted(path for path in CPU.rglob("*") if path.is_file())


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


def floor(room: str, floors: tuple[tuple[str, ...], ...]) -> int:
    found = [number for number, rooms in enumerate(floors) if room in rooms]
    assert found, f"{room} has no floor: give it one in tests/test_house.py"
    return found[0]


def room_of(path: Path) -> str:
    """The folder that a file of the package is in, or, of those that users import, the file itself."""
    folder = path.parent.relative_to(PACKAGE)
    return path.name if folder == Path() else folder.as_posix()


def imported_files(path: Path) -> set[Path]:
    """Of the package itself. What is imported from the package as a whole, and is no module, is its __init__.py's."""
    found = set()
    for name in imports(path):
        first, *parts = name.split(".")
        file = PACKAGE.joinpath(*parts).with_suffix(".py") if parts else PACKAGE / "__init__.py"
        if first == "factorlayer" and file.exists():
            found.add(file)
    modules = {alias for file in found for alias in (file.stem,)}
    if not _takes_what_the_package_exports(path, modules):
        found.discard(PACKAGE / "__init__.py")
    return found


def _takes_what_the_package_exports(path: Path, modules: set[str]) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "factorlayer":
            if any(alias.name not in modules for alias in node.names):
                return True
        elif isinstance(node, ast.Import) and any(alias.name == "factorlayer" for alias in node.names):
            return True
    return False


def includes(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_downwards(path: Path) -> None:
    """To a lower floor, or to the same room."""
    room = room_of(path)
    mine = floor(room, FLOORS)
    others = {room_of(file) for file in imported_files(path)} - {room}
    upward = {other for other in others if floor(other, FLOORS) >= mine}
    assert not upward, f"{path.name} is in {room}, on floor {mine}, and imports from {upward}"


def test_no_two_files_of_a_room_import_each_other() -> None:
    """Nor any longer circle of modules."""
    below = {path: imported_files(path) for path in MODULES}
    done: set[Path] = set()

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, f"a circle: {' -> '.join(p.stem for p in (*way, path))}"
        if path not in done:
            for file in below[path]:
                visit(file, (*way, path))
            done.add(path)

    for path in MODULES:
        visit(path, ())


@pytest.mark.parametrize("folder", [PACKAGE, ENGINE.parent], ids=lambda folder: folder.name)
def test_no_folder_has_more_files_than_one_looks_through(folder: Path) -> None:
    for each in (folder, *(path for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [path for path in each.iterdir() if path.suffix in SOURCES and path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, f"{each.name} has {len(files)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "path",
    [
        *(path for path in MODULES if room_of(path).split("/")[0] in PLANNED_WITHOUT_TORCH),
        *(
            PACKAGE / name
            for name in (
                "maths/spec.py",
                "activations/expression.py",
                "activations/results.py",
                "activations/written.py",
            )
        ),
    ],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_the_planner_and_what_it_stands_on_need_no_torch(path: Path) -> None:
    assert not {imported for imported in imports(path) if imported.split(".")[0] == "torch"}


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


def test_one_folder_sees_torch_and_one_file_python() -> None:
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        seen = {name.split("/")[0] for name in includes(path) if name.startswith(("torch", "ATen", "c10", "Python"))}
        allowed = {"torch"} if path.parent == OPS else {"Python.h"} if path.name == "python.cpp" else set()
        assert seen <= allowed, f"{path.name} includes {seen}"


def test_nothing_includes_ops() -> None:
    """They stand on everything else."""
    headers = {path.name for path in OPS.glob("*.h")}
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        found = {name for name in includes(path) if not name.startswith("torch/") and name.split("/")[-1] in headers}
        assert path.parent == OPS or not found, f"{path.name} includes {found}"


@pytest.mark.parametrize("path", CPU_FILES, ids=lambda path: path.name)
def test_kernels_include_the_standard_library_the_chain_and_each_other(path: Path) -> None:
    own = {file.relative_to(CPU).as_posix() for file in CPU_FILES} | {
        "../chain.h",
        "../decoder.h",
        "../dtype.h",
        "immintrin.h",
    }
    foreign = {name for name in includes(path) - own if not re.fullmatch(r"[a-z_]+|sys/mman\.h", name)}
    assert not foreign


RUNTIME_FILES = sorted((ROOT / "csrc" / "runtime").iterdir())


@pytest.mark.parametrize("path", RUNTIME_FILES, ids=lambda path: path.name)
def test_the_runtime_includes_the_system_the_chain_and_itself(path: Path) -> None:
    own = {file.name for file in RUNTIME_FILES} | {"../chain.h", "../dtype.h", "../shown.h", "../table.h"}
    system = {"dirent.h", "dlfcn.h", "fcntl.h", "sys/file.h", "sys/stat.h", "unistd.h"}
    assert all(re.fullmatch(r"[a-z_]+", name) for name in includes(path) - own - system)


ENGINE_FILES = sorted(ENGINE.rglob("*.cuh"))


@pytest.mark.parametrize("path", ENGINE_FILES, ids=lambda path: path.name)
def test_the_engine_includes_itself_alone_and_downwards(path: Path) -> None:
    """NVRTC comes without CUDA's headers and without the standard library's."""
    room = path.parent.relative_to(ENGINE).as_posix()
    mine = floor(room, ENGINE_FLOORS)
    for name in includes(path):
        assert (ENGINE / name).exists(), f"{name} is no header of the engine"
        other = Path(name).parent.as_posix()
        assert other == room or floor(other, ENGINE_FLOORS) < mine, f"{path.name} includes {name} from above"


def test_a_blocks_barriers_have_their_numbers_in_one_place() -> None:
    named = [path.name for path in ENGINE_FILES if "sync_threads<" in path.read_text()]
    assert named == ["memory.cuh"]


def test_loops_with_a_block_have_braces_around_them_behind_if_constexpr() -> None:
    """Where such a branch is left out, NVRTC leaves out others' stores as well: docs/traps.md."""
    branch, pragma = r"(?:if constexpr \([^\n]*\)|\belse)\s*\n?\s*", r"(?:UNROLL|ROLL|UNROLL_BY\([^\n]*\))? *"
    bare = re.compile(branch + pragma + r"for \([^\n]*\{\n")
    found = [f"{path.name}: {match.group()}" for path in ENGINE_FILES for match in bare.finditer(path.read_text())]
    assert not found, found


def test_no_two_headers_have_one_name() -> None:
    """device/code.py finds them by it."""
    names = [path.name for path in ENGINE_FILES]
    assert len(names) == len(set(names))


def test_the_chain_includes_nothing_but_the_standard_library() -> None:
    own = r"[a-z_]+|(chain|decoder|expression|shown|table)\.h"
    of_expressions = "expression.h", "expression.cpp"
    of_decoders = "decoder.h", "decoder.cpp"
    for name in ("chain.h", "chain.cpp", *of_expressions, *of_decoders, "shown.h", "table.h", "dtype.h"):
        assert all(re.fullmatch(own, include) for include in includes(ROOT / "csrc" / name))


def test_activations_have_the_same_rows_in_python_and_in_the_kernels() -> None:
    source = (CPU / "finish" / "pointwise.h").read_text()
    table = re.search(r"#define FL_ACTIVATIONS\(ROW\)(.*?)\n\n", source, re.DOTALL)
    assert table is not None
    assert re.findall(r"\bROW\((\w+),", table[1]) == list(ACTIVATIONS)
    assert list(NAMED) == list(ACTIVATIONS)


def test_expressions_have_the_same_operations_in_python_and_in_the_kernels() -> None:
    rows = re.findall(r"\bROW\((\w+), (\d)\)", (ROOT / "csrc" / "expression.h").read_text())
    assert [(name, int(count)) for name, count in rows] == list(OPERATIONS.items())
    on_cpu = (CPU / "finish" / "expression.h").read_text()
    assert re.findall(r"static FL_INLINE V (\w+)\(V a", on_cpu) == list(OPERATIONS)


def test_the_raw_ops_are_named_in_one_file() -> None:
    """Everything else goes through layer_ops.py, so that a new engine is added in one place."""
    for op, name in (("forward", "layer_ops.py"), ("stack_forward", "stack_ops.py"), ("stack_frozen", "frozen.py")):
        assert {path.name for path in MODULES if f"torch.ops.factorlayer.{op}" in path.read_text()} == {name}


@pytest.mark.parametrize(
    "path", [PACKAGE / "plan" / "plan.py", ROOT / "tests" / "emulator" / "driver.py"], ids=lambda path: path.name
)
def test_a_plan_and_the_emulator_ask_passes_and_know_no_family(path: Path) -> None:
    asked = {name for name in imports(path) if name.startswith("factorlayer.kernels")}
    assert {name.split(".")[2] for name in asked} <= {"batches", "passes"}
    assert "isinstance" not in path.read_text()
