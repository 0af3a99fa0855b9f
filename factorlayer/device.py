"""The device code of csrc/engine as text, put together for the run-time compiler."""

from __future__ import annotations

import functools
from pathlib import Path

HEADERS = ("types.cuh", "memory.cuh", "mma.cuh", "pointwise.cuh", "layout.cuh", "params.cuh")


@functools.cache
def folder() -> Path:
    """Inside the installed package, or beside it in a source tree."""
    here = Path(__file__).parent
    return next(path for path in (here / "engine", here.parent / "csrc" / "engine") if path.is_dir())


@functools.cache
def headers(*further: str) -> str:
    """The shared vocabulary and further headers, in order, with their names for the compiler's messages."""
    text = []
    for name in (*HEADERS, *further):
        lines = (folder() / name).read_text().splitlines()
        kept = [line if not line.startswith(("#include", "#pragma once")) else "" for line in lines]
        text.append("\n".join([f'#line 1 "{name}"', *kept]))
    return "\n".join(text) + "\n"
