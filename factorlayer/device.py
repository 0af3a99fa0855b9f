"""The device code of csrc/engine as text, put together for the run-time compiler."""

from __future__ import annotations

import functools
from pathlib import Path

# What a dtype is in there: how it is multiplied, and what memory holds.
MATH = {"float64": "Fp64", "float32": "Split3", "tf32": "Tf32", "bfloat16": "Half<bf16>", "float16": "Half<f16>"}
ELEMENT = {"float64": "double", "float32": "float", "tf32": "float", "bfloat16": "bf16", "float16": "f16"}

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
