"""What a run of the tests makes once, whichever of its processes wants it first: programs and compiled kernels.

FACTORLAYER_TEST_COMPILED is a folder that keeps them for later runs, too: a name there stands for all that a file was
made from, compilers and flags as well, and a file's time is when a run last asked for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from factorlayer.autograd import runtime

# A kernel's source, its name, the architecture and options: the cubin, and the compiler's log
Compile = Callable[[str, str, str, Sequence[str]], tuple[bytes, str]]


def name_of(*parts: str) -> str:
    """The same for the same parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """The file, which `make` writes somewhere beside it if nobody has; others that want it wait."""
    if not path.exists():
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_name(f"{path.name}.part")
                make(part)
                part.rename(path)
    path.touch()
    return path


def folder_of_compiled(of_the_run: Path) -> Path:
    """Where compiled files lie: the one that is asked for, or this run's."""
    folder = Path(os.environ.get("FACTORLAYER_TEST_COMPILED") or of_the_run)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_in(folder: Path, compiler: str) -> Compile:
    """runtime.compile_kernel, which keeps there what it has compiled by the compiler of this name."""

    def compile_kernel(source: str, kernel: str, architecture: str, options: Sequence[str]) -> tuple[bytes, str]:
        def make(path: Path) -> None:
            cubin, log = runtime.compile_kernel(source, kernel, architecture, options)
            path.write_bytes(log.encode() + b"\0" + cubin)

        kept = once(folder / name_of(compiler, source, kernel, architecture, *options), make).read_bytes()
        log, _, cubin = kept.partition(b"\0")
        return cubin, log.decode()

    return compile_kernel
