"""What a run of the tests makes once, whichever of its processes wants it first: programs and compiled kernels."""

from __future__ import annotations

import fcntl
import hashlib
import json
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
    return path


def compile_in(folder: Path) -> Compile:
    """runtime.compile_kernel, which keeps there what it has compiled."""

    def compile_kernel(source: str, kernel: str, architecture: str, options: Sequence[str]) -> tuple[bytes, str]:
        def make(path: Path) -> None:
            cubin, log = runtime.compile_kernel(source, kernel, architecture, options)
            path.write_bytes(log.encode() + b"\0" + cubin)

        kept = once(folder / name_of(source, kernel, architecture, *options), make).read_bytes()
        log, _, cubin = kept.partition(b"\0")
        return cubin, log.decode()

    return compile_kernel
