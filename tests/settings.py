"""Runs the tests under settings that other machines have, one after the other, and says what each run counted.

    python tests/settings.py                     all of them; each takes as long as the tests do
    python tests/settings.py sse order           these
    python tests/settings.py sse order --together      in one run
    python tests/settings.py --list
    python tests/settings.py avx2 --quick --select "-x tests/test_layers.py"

PyTorch's libraries compute other bits with other instructions and other numbers of threads, and tests may assert none
of them, nor an order of tests, a time, or what lies in the home folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
# What takes most of the time, and computes little by PyTorch
SLOW = ("test_emulator.py", "test_engine.py", "test_triple.py", "test_dense_streamed.py", "test_types.py", "gpu")
UNSET = ""  # of a variable: it is taken out


@dataclass(frozen=True)
class Setting:
    """Variables that tests are run with, and what else there is: `{folder}` and `{seed}` are those of the run."""

    name: str
    what: str
    variables: dict[str, str] = field(default_factory=dict)
    load: bool = False  # busy processes, two for each core
    sdist: bool = False  # in what the source distribution unpacks to


def instructions(mkl: str, aten: str, dnnl: str) -> dict[str, str]:
    return {"MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": aten, "DNNL_MAX_CPU_ISA": dnnl}


def threads(count: int) -> dict[str, str]:
    return {"FACTORLAYER_TEST_THREADS": str(count), "OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


NO_CACHE = {"FACTORLAYER_CACHE": UNSET, "XDG_CACHE_HOME": UNSET}
SETTINGS = (
    Setting("plain", "as pytest alone runs them"),
    Setting("avx2", "PyTorch's libraries held to AVX2", instructions("AVX2", "avx2", "AVX2")),
    Setting("sse", "PyTorch's libraries held to SSE", instructions("SSE4_2", "default", "SSE41")),
    Setting("threads-2", "two threads", threads(2)),
    Setting("threads-4", "four threads", threads(4)),
    Setting("order", "in random order, of a seed that is printed", {"FACTORLAYER_TEST_ORDER": "{seed}"}),
    Setting("load", "beside two busy processes for each core", load=True),
    Setting("no-home", "HOME unset", {"HOME": UNSET, **NO_CACHE}),
    Setting("read-only-home", "HOME where nothing can be written", {"HOME": "{read_only}", **NO_CACHE}),
    Setting("sdist", "built and run in what the source distribution unpacks to", sdist=True),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


def together(chosen: list[Setting]) -> Setting:
    variables = {name: value for setting in chosen for name, value in setting.variables.items()}
    return Setting(
        "+".join(setting.name for setting in chosen),
        "; ".join(setting.what for setting in chosen),
        variables,
        any(setting.load for setting in chosen),
        any(setting.sdist for setting in chosen),
    )


def environment(setting: Setting, folder: Path, seed: int) -> dict[str, str]:
    """That of the tests: this process's, changed."""
    made = dict(os.environ)
    for name, value in setting.variables.items():
        made.pop(name, None)
        if value != UNSET:
            made[name] = value.format(seed=seed, read_only=read_only(folder)) if "{" in value else value
    return made


def read_only(folder: Path) -> Path:
    """A folder that nothing can be written to: root may write to all but what the kernel makes."""
    if os.geteuid() == 0:
        return Path("/sys")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o555)
    return home


def command(quick: bool, select: str, processes: int) -> list[str]:
    left_out = [f"--ignore=tests/{name}" for name in SLOW] if quick else []
    given = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"-n{processes}", *left_out]
    return given + shlex.split(select)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def unpacked(folder: Path) -> Path:
    """The source distribution, with the extension built in it."""
    made_here = ["egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder)]
    subprocess.run([sys.executable, "setup.py", "-q", *made_here], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=source, check=True)
    return source


def run(setting: Setting, arguments: list[str], seed: int) -> tuple[int, str]:
    """The exit status of the tests, and their last line."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        given = environment(setting, folder, seed)
        where = unpacked(folder) if setting.sdist else ROOT
        given["PYTHONPATH"] = str(where)  # programs that tests start find this package
        if setting.load:
            stack.enter_context(busy(2 * (os.cpu_count() or 1)))
        last = ""
        with subprocess.Popen(arguments, cwd=where, env=given, stdout=subprocess.PIPE, text=True) as tests:
            assert tests.stdout is not None
            for line in tests.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                last = line.strip(" =\n") or last
        return tests.returncode, last


def show(setting: Setting, arguments: list[str], seed: int) -> str:
    set_ = {name: value.format(seed=seed, read_only="…") for name, value in setting.variables.items()}
    variables = [f"-u {name}" if value == UNSET else f"{name}={value}" for name, value in set_.items()]
    return " ".join(["env", *sorted(variables), shlex.join(arguments)])


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Settings, by default all.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say what there is.")] = False,
    in_one: Annotated[bool, typer.Option("--together", help="Run the tests once, with all of these settings.")] = False,
    quick: Annotated[bool, typer.Option(help=f"Without {', '.join(SLOW)}.")] = False,
    select: Annotated[str, typer.Option(help="Arguments for pytest.")] = "",
    processes: Annotated[int, typer.Option(help="Of pytest-xdist.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of the random order; by default a new one.")] = None,
) -> None:
    if list_:
        for setting in SETTINGS:
            print(f"{setting.name:15} {setting.what}")
        return
    unknown = [name for name in names or () if name not in BY_NAME]
    if unknown:
        raise typer.BadParameter(f"no setting is called {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    chosen = [BY_NAME[name] for name in names] if names else list(SETTINGS)
    chosen = [together(chosen)] if in_one else chosen
    drawn = random.randrange(10**6) if seed is None else seed
    arguments = command(quick, select, processes)
    counts: list[tuple[Setting, int, str]] = []
    for setting in chosen:
        print(f"{setting.name}: {setting.what}\n+ {show(setting, arguments, drawn)}", flush=True)
        counts.append((setting, *run(setting, arguments, drawn)))
    print()
    for setting, status, last in counts:
        print(f"{setting.name:15} {'ok' if status == 0 else 'FAILED':6} {last}")
    raise typer.Exit(any(status for _, status, _ in counts))


if __name__ == "__main__":
    app()
