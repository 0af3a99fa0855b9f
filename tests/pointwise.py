"""Activations as the GPU's kernels have them, element by element on a CPU: csrc/engine's functions, and the emulator's
instructions, in a library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from emulator.driver import HERE, compile_cpp, for_the_cpu
from torch import Tensor

from factorlayer.activations.expression import GRADIENT, Expression
from factorlayer.activations.written import struct, times_slope_of, value_of
from factorlayer.device.code import headers

OPTIMIZED = ["-O2", "-mfma", "-shared", "-fPIC", f"-I{HERE}"]


class Functions:
    """Of expressions in a dtype: values, and gradients of one."""

    def __init__(self, folder: Path, dtype: str, expressions: Sequence[Expression]) -> None:
        self.at = {e: i for i, e in enumerate(expressions)}
        self.number = np.float64 if dtype == "float64" else np.float32
        number = "double" if dtype == "float64" else "float"
        code = [headers("pointwise.cuh"), '#line 1 "functions"']
        for e, i in self.at.items():
            code.append(struct(value_of(e), f"Value{i}", dtype))
            code.append(struct(times_slope_of(e), f"Gradient{i}", dtype, further=(GRADIENT,)))
            for kind, call in (("Value", "of(x[i])"), ("Gradient", f"of(x[i], {number}(1))")):
                code.append(
                    f'extern "C" void run_{kind}{i}(const {number}* x, {number}* y, i64 count) {{\n'
                    f"  for (i64 i = 0; i < count; ++i) y[i] = {kind}{i}::{call};\n}}"
                )
        path = folder / f"{dtype}.cpp"
        text = for_the_cpu("\n".join(code))
        path.write_text(text[: text.index('#line 1 "entry"')])
        compile_cpp([*OPTIMIZED, str(path), "-o", str(path.with_suffix(".so"))])
        self.library = ctypes.CDLL(str(path.with_suffix(".so")))

    def run(self, kind: str, expression: Expression, x: Tensor) -> Tensor:
        """`kind` is Value or Gradient. x is in the dtype that sums have."""
        given = np.ascontiguousarray(x.numpy())
        assert given.dtype == self.number
        made = np.empty_like(given)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (given, made)]
        self.library[f"run_{kind}{self.at[expression]}"](*pointers, ctypes.c_int64(len(given)))
        return torch.from_numpy(made)
