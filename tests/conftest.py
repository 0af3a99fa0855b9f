"""Settings of all tests: the same examples in every run, and one thread, so that results can be compared bitwise.

FACTORLAYER_TEST_THREADS asks for more threads, FACTORLAYER_TEST_ORDER for a random order, by its seed: settings.py.
FACTORLAYER_TEST_SHARE=12 has one case in twelve of each test, and one at least, but only one in five of the tests that
say that they take seconds (`long`), drawn by FACTORLAYER_TEST_DRAWN: .ci/run has others for every commit. All run
without it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from compiled import UsageOf
    from emulator.driver import Emulator
    from once import Compile

hypothesis.settings.register_profile(
    "factorlayer", derandomize=True, deadline=None, max_examples=50, print_blob=False, database=None
)
hypothesis.settings.load_profile("factorlayer")
# Inductor compiles few files here, for which headers compiled before, 150 MB for each set of flags, come too late.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Nor does it look which vectors g++ has, by programs of seconds each: what it compiles of PyTorch's own goes without.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# OpenMP's threads wait without work, of the processes that this one starts: while other processes of the run have all
# cores, threads that look for work all the time take these from the ones that have it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
gc.disable()  # until all tests are found: there is much to look at, and nothing to collect
THREADS = int(os.environ.get("FACTORLAYER_TEST_THREADS", "1"))
ORDER = os.environ.get("FACTORLAYER_TEST_ORDER")
SHARE = int(os.environ.get("FACTORLAYER_TEST_SHARE", "1"))
LONG_SHARE = 5  # of tests that take seconds, one in so many runs where not all cases do


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run draw by one number, and put down what they ask for in one folder."""
    from compiled import ASKED, DRAWN

    os.environ.setdefault(DRAWN, str(random.randrange(1_000_000)))
    if ASKED not in os.environ:
        os.environ[ASKED] = tempfile.mkdtemp()
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(ASKED)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from compiled import ASKED, DRAWN, report

    for line in report(Path(os.environ[ASKED]), os.environ[DRAWN]):
        terminalreporter.write_line(line)
    if SHARE > 1:
        terminalreporter.write_line(
            f"one case in {SHARE} of each test, and one in {LONG_SHARE} of those that take seconds, drawn by "
            f"{DRAWN}={os.environ[DRAWN]}"
        )


def test_of(case: str) -> str:
    return case.partition("[")[0]


def place(name: str, number: str) -> int:
    """Where the number has the name, among all."""
    return int(hashlib.sha256(f"{number} {name}".encode()).hexdigest(), 16)


def draw(names: list[str], number: str) -> set[str]:
    """One in SHARE of a test's cases, and one at least."""
    found = {name for name in names if place(name, number) % SHARE == 0}
    return found or {min(names, key=lambda name: place(name, number))}


def draw_long(tests: Iterable[str], number: str) -> set[str]:
    """One in LONG_SHARE of the tests that take seconds."""
    ordered = sorted(tests, key=lambda name: place(name, number))
    return set(ordered[::LONG_SHARE])


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Processes of a run of all tests begin with different files: pytest rewrites a file's assertions for the first one
    that imports it and keeps that for the others, which would all do the same at once."""
    given = getattr(session.config, "workerinput", None)
    here = Path(__file__).parent
    if given is None or [session.config.invocation_params.dir / path for path in session.config.args] != [here]:
        return
    files = sorted(here.glob("test_*.py"))
    first = int(given["workerid"].removeprefix("gw")) * len(files) // given["workercount"]
    for path in (*files[first:], *files[:first]):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which come again where pytest collects the file
            importlib.import_module(path.stem)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SHARE > 1:
        from compiled import DRAWN

        number = os.environ[DRAWN]
        long = {test_of(item.nodeid) for item in items if item.get_closest_marker("long")}
        left_out = long - draw_long(long, number)
        tests = itertools.groupby((item.nodeid for item in items), key=test_of)
        drawn = set().union(*(draw(list(cases), number) for test, cases in tests if test not in left_out))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn])
        items[:] = [item for item in items if item.nodeid in drawn]
    for item in items:
        if "usage_of" in getattr(item, "fixturenames", ()):
            item.add_marker("compiles")
    if ORDER is not None:
        random.Random(ORDER).shuffle(items)


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: later collections need not look at it, and come less often than one in 700
    objects, which took a tenth of the time."""
    gc.enable()
    gc.set_threshold(20_000)
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """What `-n auto` is: one process where there is a GPU, whose memory and times tests measure."""
    return 0 if torch.cuda.is_available() else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Neighbours stay in one process, which has what they share at hand, until another one has nothing left to do."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(scope="session", autouse=True)
def _nothing_kept() -> None:
    """What somebody has tuned or calibrated on this machine changes no test."""
    from factorlayer.device import table
    from factorlayer.tuning import choices

    choices._load.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "kept_in", lambda: None)
        table.own()  # which is asked once


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Every test starts with the same seed and as many threads, whatever the test before it did."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    # torch.manual_seed would keep where it was called from for every kind of GPU that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the run have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "of_the_run"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compile_kernel(of_the_run: Path) -> Compile:
    """NVRTC, which needs no GPU; it compiles a kernel once in a run."""
    from once import compile_in, folder_of_compiled

    try:
        compiler, _ = torch.ops.factorlayer.compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return compile_in(folder_of_compiled(of_the_run), compiler)


@pytest.fixture(scope="session")
def usage_of(compile_kernel: Compile) -> Iterator[UsageOf]:
    """What kernels use, by the record, or by NVRTC where it has no line."""
    from compiled import ASKED, DRAWN, RECORD, Compiled, recorded

    compiler, _ = torch.ops.factorlayer.compiler()
    known = recorded(RECORD.read_text() if RECORD.exists() else "", compiler)
    compiled = Compiled(compile_kernel, known, os.environ[DRAWN])
    yield compiled
    compiled.put_down(compiler, Path(os.environ[ASKED]))


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory, of_the_run: Path) -> Emulator:
    """Tensors lie in a folder of this process, programs in one of the run."""
    from emulator.driver import Emulator, why_not
    from once import folder_of_compiled

    if reason := why_not():
        pytest.skip(reason)
    return Emulator(tmp_path_factory.mktemp("emulator"), folder_of_compiled(of_the_run))
