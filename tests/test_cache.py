"""The disk cache of kernels and plans, under real processes: races, kills, damage, folders that cannot be written.

Whatever happens, a kernel is never wrong: a file is used if it is whole and made from the same source, and its contents
are equal whoever made it, so every test compares bytes. Plans are kept by the same code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import python
from typer.testing import CliRunner

import factorlayer
import factorlayer.plan.planner
from factorlayer.autograd import runtime
from factorlayer.cli.app import app
from factorlayer.device import code as device

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def plan_of(*names: str, value: int = 1) -> str:
    text = "factorlayer plan 1\nchunk 0\nscratch 4 4 0\n"
    for i, name in enumerate(names):
        source = f'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] = {value}; }}'
        out = "y" if i == len(names) - 1 else "s0"
        text += f"pass x {out} 32 0 1 1 0 1 sm_90 {name} {len(source)}\n{source}\n"
    return text


def large_plan(lines: int) -> str:
    """Takes seconds to compile if they are hundreds."""
    body = "".join(
        f"for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i * 7 + {j}) % 64] + x[i + {j}];\n" for j in range(lines)
    )
    source = f'extern "C" __global__ void slow(float* x) {{ float a[64] = {{}};\n{body}for (int i = 0; i < 64; ++i) '
    source += "x[i] = a[i]; }"
    head = "factorlayer plan 1\nchunk 0\nscratch 0 0 0\npass x y 32 0 1 1 0 1 sm_90 slow "
    return f"{head}{len(source)}\n{source}\n"


FILL = """
import sys
from factorlayer.autograd import runtime
print("ready", flush=True)
sys.stdin.readline()
runtime.fill_cache(open(sys.argv[1]).read())
print("done", flush=True)
"""


def start(plan: Path, cache: Path, code: str = FILL, **environment: str) -> subprocess.Popen[str]:
    """A process that fills the cache once it is given a line, so that several begin at the same time."""
    begin = [sys.executable] if "LD_PRELOAD" in environment else python()
    environment = {**os.environ, "FACTORLAYER_CACHE": str(cache), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*begin, "-c", code, str(plan)], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> str:
    """Its stderr."""
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (0, "done\n"), err
    return err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FACTORLAYER_CACHE", str(folder))
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan"
    path.write_text(plan_of("a", "b", "c"))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kernels() -> list[str]:
    return sorted(entry.name for entry in runtime.cache_entries() if entry.whole)


# Where it is and what it holds


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FACTORLAYER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert runtime.cache_folder() == tmp_path / ".cache" / "factorlayer"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # which the XDG rules say to ignore
    assert runtime.cache_folder() == tmp_path / ".cache" / "factorlayer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert runtime.cache_folder() == tmp_path / "xdg" / "factorlayer"
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "own"))
    assert runtime.cache_folder() == tmp_path / "own"


def test_a_kernel_is_compiled_once(cache: Path) -> None:
    runtime.fill_cache(plan_of("a", "b"))
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    runtime.fill_cache(plan_of("a", "b"))
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
    version = torch.ops.factorlayer.compiler()[0]
    for entry in runtime.cache_entries():
        assert entry.whole and entry.name in "ab" and entry.architecture == "sm_90"
        assert (entry.compiler, entry.package) == (version, factorlayer.__version__)
        assert entry.bytes == (cache / entry.file).stat().st_size


@linux
def test_what_is_in_the_cache_needs_no_compiler(cache: Path, plan: Path) -> None:
    """Opening NVRTC takes longer than all the rest of a first call."""
    runtime.fill_cache(plan.read_text())
    code = FILL + 'assert "libnvrtc" not in open("/proc/self/maps").read()\n'
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch may open NVRTC itself")
    assert run_once(plan, cache, code) == ""


def test_everything_that_matters_is_in_the_key(cache: Path) -> None:
    variants = [plan_of("a"), plan_of("a", value=2), plan_of("b"), plan_of("a").replace("sm_90", "sm_80")]
    for i, text in enumerate(variants):
        runtime.fill_cache(text)
        assert len(list(cache.iterdir())) == i + 1
    runtime.fill_cache(plan_of("a").replace(" 32 0 1 1 0 1 ", " 64 128 2 2 1 3 "))  # a launch is not compiled
    assert len(list(cache.iterdir())) == len(variants)


def test_the_key_of_a_kernel(cache: Path) -> None:
    """Word by word: what another process, another version or another compiler would have to agree about."""
    runtime.fill_cache(plan_of("a"))
    (path,) = cache.iterdir()
    version, nvrtc = torch.ops.factorlayer.compiler()
    source = plan_of("a").splitlines()[-1]
    identity = (
        f"factorlayer kernel 1\npackage {factorlayer.__version__}\ncompiler {version}\narchitecture sm_90\n"
        "options --std=c++17 --device-as-default-execution-space\nname a\n"
        f"source {hashlib.sha256(source.encode()).hexdigest()}\n"
    )
    cubin = path.read_bytes().split(b"\n\n", 1)[1]
    proof = f"contents {len(cubin)} {hashlib.sha256(cubin).hexdigest()}\n\n"
    assert path.read_bytes() == (identity + proof).encode() + cubin
    assert path.name == hashlib.sha256(identity.encode()).hexdigest()[:40] + ".kernel"
    assert version.endswith(f" ({Path(nvrtc).stat().st_size} bytes)")  # which tells builds of one version apart


@pytest.mark.long
@linux
def test_a_file_is_on_disk_before_it_has_its_name(cache: Path, plan: Path, tmp_path: Path) -> None:
    """Else a machine that goes down could leave an empty file under a name that is right."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, log = tmp_path / "sync.so", tmp_path / "log"
    source = Path(__file__).parent / "native" / "sync.c"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    assert run_once(plan, cache, LD_PRELOAD=str(library), SYNC_LOG=str(log)) == ""
    lines = log.read_text().splitlines()
    drafts = [line.split()[1] for line in lines if line.startswith("rename ") and ".kernel." in line]
    assert len(drafts) == 3
    for draft in drafts:
        assert f"fsync {draft}" in lines[: lines.index(f"rename {draft}")]


# Damage


@pytest.mark.parametrize("length", [0, 1, 30, 200, -1], ids=str)
def test_a_truncated_entry_is_rebuilt(cache: Path, length: int) -> None:
    runtime.fill_cache(plan_of("a", "b"))
    right = contents(cache)
    name = next(iter(right))
    (cache / name).write_bytes(right[name][:length])
    assert len(kernels()) == 1
    runtime.fill_cache(plan_of("a", "b"))
    assert contents(cache) == right


def test_an_entry_with_a_flipped_byte_is_rebuilt(cache: Path) -> None:
    runtime.fill_cache(plan_of("a"))
    right = contents(cache)
    (name,) = right
    header = right[name].index(b"\n\n")
    for at in [0, 25, header - 40, header, header + 1, header + 2, len(right[name]) // 2, len(right[name]) - 1]:
        damaged = bytearray(right[name])
        damaged[at] ^= 1
        (cache / name).write_bytes(damaged)
        assert not kernels(), at
        runtime.fill_cache(plan_of("a"))
        assert contents(cache) == right, at


def test_an_entry_under_another_ones_name_is_not_used(cache: Path) -> None:
    runtime.fill_cache(plan_of("a", "b"))
    right = contents(cache)
    first, second = right
    (cache / first).write_bytes(right[second])
    runtime.fill_cache(plan_of("a", "b"))
    assert contents(cache) == right


def test_bytes_behind_the_end_are_damage(cache: Path) -> None:
    runtime.fill_cache(plan_of("a"))
    right = contents(cache)
    (name,) = right
    (cache / name).write_bytes(right[name] + b"\0")
    assert not kernels()
    runtime.fill_cache(plan_of("a"))
    assert contents(cache) == right


# Plans

CHAIN = "tied 1 4 4 4 1; tied 0 1 4 4 4; bias"
PLAN = """
import sys, torch
from factorlayer.autograd import runtime
print("ready", flush=True)
sys.stdin.readline()
text = runtime.plan_text(open(sys.argv[1]).read(), torch.float32, 5, 90, 132, 232448)
print("done", flush=True)
"""
ONLY_READ = PLAN + 'assert "factorlayer.plan.planner" not in sys.modules, "it was planned again"\n'


def planned(chain: str = CHAIN, dtype: torch.dtype = torch.float32, batch: int = 5, *gpu: int) -> str:
    return runtime.plan_text(chain, dtype, batch, *(gpu or (90, 132, 232448)))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    path = tmp_path / "chain"
    path.write_text(CHAIN)
    return path


def test_a_plan_is_made_once(cache: Path, chain: Path) -> None:
    text = planned()
    assert text == factorlayer.plan.planner.plan_text(CHAIN, "float32", 1, 90, 132, 232448)
    before = contents(cache)
    assert planned() == text and run_once(chain, cache, ONLY_READ) == ""
    assert contents(cache) == before
    (entry,) = runtime.cache_entries()
    assert entry.whole and (entry.kind, entry.name) == ("plan", f"{CHAIN} in float32, batch class 1")
    assert entry.architecture == "sm_90 with 132 SMs of 232448 bytes"
    assert (entry.compiler, entry.package) == ("", factorlayer.__version__)
    assert before[entry.file].endswith(text.encode())


def test_the_planner_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (90, 132, 232448)
    stack = "tied 0 1 8 8 1; bias; relu | tied 0 1 8 4 1; bias"
    questions = [
        ("has_plan", CHAIN),
        ("has_plan", f"{CHAIN}; backward"),
        ("predicted", CHAIN),
        ("cut", f"{stack} | backward"),
    ]

    def answers() -> list[str]:
        return [
            torch.ops.factorlayer.ask_planner(question, text, "float32", 1, *limits) for question, text in questions
        ]

    right = [
        str(getattr(factorlayer.plan.planner, question)(text, "float32", *limits, batch_class=1))
        for question, text in questions
    ]
    assert answers() == right and right[:2] == ["True", "False"]

    def refuse(*_: object) -> bool:
        raise AssertionError("the planner was asked again")

    for question, _ in questions:
        monkeypatch.setattr(factorlayer.plan.planner, question, refuse)
    assert answers() == right
    assert all(entry.whole for entry in runtime.cache_entries()) and len(runtime.cache_entries()) == len(questions)
    with pytest.raises(RuntimeError, match="asked again"):
        torch.ops.factorlayer.ask_planner("has_plan", CHAIN, "float64", 1, *limits)


def test_everything_that_matters_is_in_the_key_of_a_plan(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: list[tuple[object, ...]] = [(), (CHAIN.replace("; bias", ""),), (f"{CHAIN}; tf32",)]
    variants += [(CHAIN, torch.float64), (CHAIN, torch.float32, 65), (CHAIN, torch.float32, 2049)]
    variants += [(CHAIN, torch.float32, 5, *gpu) for gpu in ((80, 132, 232448), (90, 114, 232448), (90, 132, 101376))]
    variants += [(CHAIN, torch.float32, 5, 90, 132, 232448, memory) for memory in (3352320, 4916736)]
    for i, arguments in enumerate(variants):
        planned(*arguments)  # type: ignore[arg-type]
        assert len(list(cache.iterdir())) == i + 1, arguments
    planned(CHAIN, torch.float32, 64)  # of the same class as 5
    assert len(list(cache.iterdir())) == len(variants)
    monkeypatch.setattr(runtime, "planner", lambda: "another")
    planned()
    assert len(list(cache.iterdir())) == len(variants) + 1


@pytest.mark.parametrize(
    "change",
    [
        "factorlayer/kernels/tiling.py",
        "factorlayer/device/rates/sm_90-132-232448-4916736.json",
        "csrc/engine/types/types.cuh",
        "csrc/engine/new.cuh",
    ],
)
def test_a_changed_planner_is_another_one(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied as a whole it is the same one."""
    package, engine = Path(factorlayer.__file__).parent, device.folder()
    shutil.copytree(package, tmp_path / "factorlayer", ignore=shutil.ignore_patterns("*.so", "engine"))
    shutil.copytree(engine, tmp_path / "csrc" / "engine")
    before = runtime.planner()
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "factorlayer" / "autograd" / "runtime.py"))
    monkeypatch.setattr(runtime, "engine_folder", lambda: tmp_path / "csrc" / "engine")
    assert runtime.planner.__wrapped__() == before
    with (tmp_path / change).open("a") as file:
        file.write("\n")
    assert runtime.planner.__wrapped__() != before


@pytest.mark.parametrize("length", [0, 30, 500, -1], ids=str)
def test_a_damaged_plan_is_made_again(cache: Path, length: int) -> None:
    text = planned()
    right = contents(cache)
    (name,) = right
    flipped = bytearray(right[name])
    flipped[length] ^= 1
    for damaged in (right[name][:length], bytes(flipped), right[name] + b"\n"):
        (cache / name).write_bytes(damaged)
        assert [entry.whole for entry in runtime.cache_entries()] == [False]
        assert planned() == text
        assert contents(cache) == right


def test_a_chain_without_a_plan_leaves_nothing(cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"PlanError: the contractions of .* are not those of a Kronecker"):
            planned("tied 0 1 4 4 4; tied 1 2 8 8 1")
    assert not cache.exists()


@pytest.mark.long
def test_plans_of_eight_processes_from_cold(cache: Path, chain: Path) -> None:
    processes = [start(chain, cache, PLAN) for _ in range(8)]
    for process in processes:
        go(process)
    assert [finish(process) for process in processes] == [""] * 8
    (file,) = contents(cache)
    assert file.endswith(".plan")


@pytest.mark.long
def test_a_plan_that_cannot_be_kept_is_no_trouble(chain: Path, tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert run_once(chain, tmp_path / "file", PLAN) == ""
    (small_disk / "else").write_bytes(bytes(4096))
    assert run_once(chain, small_disk, PLAN) == ""
    assert [path.name for path in small_disk.iterdir()] == ["else"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert run_once(chain, small_disk, PLAN) == ""


# Processes


@pytest.mark.long
def test_eight_processes_from_cold(cache: Path, plan: Path) -> None:
    processes = [start(plan, cache) for _ in range(8)]
    for process in processes:
        go(process)
    assert [finish(process) for process in processes] == [""] * 8
    assert kernels() == ["a", "b", "c"]
    found = contents(cache)
    assert len(found) == 3, "a temporary file was left"
    shutil.rmtree(cache)
    runtime.fill_cache(plan.read_text())
    assert contents(cache) == found


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_a_process_killed_while_it_compiles(cache: Path, tmp_path: Path, plan: Path, seconds: float) -> None:
    slow = tmp_path / "slow"
    slow.write_text(large_plan(300))
    runtime.fill_cache(plan.read_text())
    before = contents(cache)
    process = start(slow, cache)
    go(process)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was done before it was killed"
    assert contents(cache) == before
    runtime.fill_cache(plan_of("d"))
    assert kernels() == ["a", "b", "c", "d"]


@linux
def test_a_process_killed_while_it_writes(cache: Path, plan: Path) -> None:
    """By the file size limit's own signal, after 2000 bytes: the half file stays, under a name that is never read."""
    code = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n" + FILL.replace(
        "sys.stdin.readline()", "sys.stdin.readline(); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    )
    process = start(plan, cache, code)
    go(process)
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGXFSZ
    (left,) = contents(cache)
    assert left.endswith(".tmp")
    assert [entry.whole for entry in runtime.cache_entries()] == [False]
    runtime.fill_cache(plan.read_text())
    assert kernels() == ["a", "b", "c"]
    assert runtime.clear_cache() == 4
    assert not contents(cache)


@linux
def test_two_package_versions_share_a_folder(cache: Path, plan: Path, tmp_path: Path) -> None:
    """The other version is a copy of the package whose compiled part was given another number."""
    package = Path(factorlayer.__file__).parent
    copy = tmp_path / "other" / "factorlayer"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    library = copy / "_C.abi3.so"
    marked = f"package {factorlayer.__version__}\ncompiler ".encode()
    other = marked.replace(factorlayer.__version__.encode(), b"9" * len(factorlayer.__version__))
    assert library.read_bytes().count(marked) == 1
    library.write_bytes(library.read_bytes().replace(marked, other))
    code = f"import sys\nsys.path.insert(0, {str(copy.parent)!r})\n" + FILL
    processes = [start(plan, cache), start(plan, cache, code)]
    for process in processes:
        go(process)
    assert [finish(process) for process in processes] == ["", ""]
    packages = [entry.package for entry in runtime.cache_entries() if entry.whole]
    assert sorted(packages) == sorted([factorlayer.__version__, "9" * len(factorlayer.__version__)] * 3)
    before = contents(cache)
    for process in [start(plan, cache), start(plan, cache, code)]:
        go(process)
        assert finish(process) == ""
    assert contents(cache) == before


# Folders that cannot be written: one warning, and the kernel all the same


def check_warned_once(err: str, folder: Path, reason: str) -> None:
    assert err.count("RuntimeWarning") == 1, err
    assert f"factorlayer cannot keep compiled kernels in {folder} ({reason}), so every process compiles them" in err
    assert "set FACTORLAYER_CACHE to a folder that can be written" in err


def run_once(plan: Path, folder: Path, code: str = FILL, **environment: str) -> str:
    process = start(plan, folder, code, **environment)
    go(process)
    return finish(process)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(plan: Path, small_disk: Path) -> None:
    (small_disk / "else").write_bytes(bytes(4096))
    check_warned_once(run_once(plan, small_disk / "cache"), small_disk / "cache", "No space left on device")
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["else"]


def test_a_disk_that_fills_up_in_the_middle_of_a_file(plan: Path, small_disk: Path) -> None:
    (small_disk / "else").write_bytes(b"")
    big = plan.parent / "big"
    big.write_text(large_plan(20))
    check_warned_once(run_once(big, small_disk), small_disk, "No space left on device")
    assert [path.name for path in small_disk.iterdir()] == ["else"]


@linux
def test_a_file_size_limit(cache: Path, plan: Path) -> None:
    """As a full disk, for those who may not mount one: Python ignores the signal, and writing fails."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    err = run_once(
        plan, cache, "import resource\n" + FILL.replace("sys.stdin.readline()", f"sys.stdin.readline(); {limit}")
    )
    check_warned_once(err, cache, "File too large")
    assert not contents(cache)


def test_a_read_only_disk(plan: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    check_warned_once(run_once(plan, small_disk), small_disk, "Read-only file system")
    check_warned_once(run_once(plan, small_disk / "deep" / "er"), small_disk / "deep" / "er", "Read-only file system")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(cache: Path, plan: Path) -> None:
    cache.mkdir(mode=0o555)
    check_warned_once(run_once(plan, cache), cache, "Permission denied")


@linux
def test_a_read_only_cache_is_still_read(cache: Path, plan: Path) -> None:
    runtime.fill_cache(plan.read_text())
    if subprocess.run(["mount", "--bind", str(cache), str(cache)], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a folder")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(cache)], check=True)
        assert run_once(plan, cache) == ""
        (cache.parent / "more").write_text(plan_of("a", "d"))
        check_warned_once(run_once(cache.parent / "more", cache), cache, "Read-only file system")
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_a_file_where_the_folder_should_be(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_warned_once(run_once(plan, tmp_path / "file"), tmp_path / "file", "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


# The command line


def size_on_disk(folder: Path) -> int:
    """Of the entries and drafts, in pages."""
    ours = [path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{40}\.(kernel|plan)(\..*tmp)?", path.name)]
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in ours)


def test_the_cache_command(cache: Path) -> None:
    def room() -> str:
        return f"{size_on_disk(cache)} of at most 1073741824 bytes are taken"

    def run(arguments: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(app, arguments.split(), prog_name="test.py")
        return result.exit_code, result.stdout.splitlines()

    assert run("cache list") == (0, [f"0 kernels and plans in {cache}; 0 of at most 1073741824 bytes are taken"])
    runtime.fill_cache(plan_of("a", "b"))
    mine = ["0" * 40 + ".plan.txt", "0" * 40 + ".txt", "mine.plan"]
    for name in mine:
        (cache / name).write_text("neither a kernel nor a plan")
    code, lines = run("cache")
    assert code == 0 and len(lines) == 3 and lines[2] == f"2 kernels and plans in {cache}; {room()}"
    for name in "ab":
        assert any(f"{name} for sm_90 by NVRTC 13." in line for line in lines)
    assert run("cache verify") == (0, [f"2 kernels and plans in {cache}, 0 damaged; {room()}"])
    damaged = runtime.cache_entries()[0].file
    (cache / damaged).write_bytes(b"factorlayer kernel 1\n")
    code, lines = run("cache verify")
    assert code == 1
    assert lines[0].split() == [damaged, "21", "damaged"]
    summary = f"2 kernels and plans in {cache}, 1 damaged; {room()}"
    assert lines[1] == f"{summary}; damaged ones are made again when they are needed"
    found = json.loads(run("cache list --json")[1][0])
    assert (found["occupied"], found["limit"]) == (size_on_disk(cache), 1 << 30)
    assert [entry["whole"] for entry in found["entries"]] == [False, True]
    assert run("cache clear") == (0, [f"2 of 2 kernels and plans removed from {cache}"])
    assert sorted(path.name for path in cache.iterdir()) == mine
    planned()
    assert f"  plan {CHAIN} in float32, batch class 1 for sm_90 with 132 SMs" in run("cache list")[1][0]
    assert run("cache clear")[0] == 0
    assert sorted(path.name for path in cache.iterdir()) == mine


def test_the_command_says_that_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "FACTORLAYER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["cache", "list", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["folder"] is None
    assert "in no folder (neither HOME nor FACTORLAYER_CACHE is set); 0 of at most" in result.stderr
