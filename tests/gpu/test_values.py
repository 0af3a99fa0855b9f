"""Activations on a GPU, element by element: values and slopes of all numbers of 16 bits and of tf32, and of millions of
those of 32 and 64 bits, against float64. tests/test_written.py does a part of it without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch
from accuracy import FUNCTIONS, all_of_16_bits, check, drawn_of_32_bits, drawn_of_64_bits
from torch import Tensor

from factorlayer.activations.expression import GRADIENT
from factorlayer.activations.written import struct, times_slope_of, value_of
from factorlayer.autograd.runtime import compile_kernel
from factorlayer.device.code import headers
from factorlayer.device.gpu import LIMITS, Gpu

OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]  # as csrc/runtime/kernels.cpp has them
THREADS = 256


def all_of_tf32() -> Tensor:
    return (torch.arange(1 << 19, dtype=torch.int64) << 13).to(torch.int32).view(torch.float32)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: all_of_16_bits(torch.bfloat16).float(),
    "float16": lambda: all_of_16_bits(torch.float16).float(),
    "tf32": all_of_tf32,
    "float32": lambda: drawn_of_32_bits(1 << 22),
    "float64": lambda: drawn_of_64_bits(1 << 20),
}


class Kernels:
    """A module with a kernel for each function's value and slope."""

    def __init__(self, dtype: str) -> None:
        number = "double" if dtype == "float64" else "float"
        code = [headers("pointwise.cuh"), '#line 1 "functions"']
        for i, e in enumerate(FUNCTIONS.values()):
            code.append(struct(value_of(e), f"Value{i}", dtype))
            code.append(struct(times_slope_of(e), f"Slope{i}", dtype, further=(GRADIENT,)))
            for kind, call in (("Value", "of(x[i])"), ("Slope", f"of(x[i], {number}(1))")):
                code.append(
                    f'extern "C" __global__ void run_{kind}{i}(const {number}* x, {number}* y, i64 count) {{\n'
                    f"  const i64 i = i64(blockIdx.x) * {THREADS} + threadIdx.x;\n"
                    f"  if (i < count) y[i] = {kind}{i}::{call};\n}}"
                )
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
        target = Gpu.of(arch).architecture if arch in LIMITS else f"sm_{arch}"
        cubin, _ = compile_kernel("\n".join(code), "functions", target, OPTIONS)
        torch.zeros(1, device="cuda")  # makes the context
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(self.module), cubin)

    def call(self, name: str, *arguments: object) -> None:
        assert (error := getattr(self.driver, name)(*arguments)) == 0, f"{name} fails with {error}"

    def run(self, kind: str, name: str, x: Tensor) -> Tensor:
        function, y = ctypes.c_void_p(), torch.empty_like(x)
        at = list(FUNCTIONS).index(name)
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, f"run_{kind}{at}".encode())
        given = [ctypes.c_uint64(x.data_ptr()), ctypes.c_uint64(y.data_ptr()), ctypes.c_int64(len(x))]
        pointers = (ctypes.c_void_p * 3)(*(ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in given))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        blocks = -(-len(x) // THREADS)
        self.call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, stream, pointers, None)
        torch.cuda.synchronize()
        return y


@pytest.fixture(scope="module")
def kernels() -> Callable[[str], Kernels]:
    return functools.cache(Kernels)


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_over_the_whole_range(name: str, dtype: str, kernels: Callable[[str], Kernels]) -> None:
    """Prints the largest errors, in parts of what is allowed, for docs/kernels/activations.md."""
    x, made = INPUTS[dtype]().cuda(), kernels(dtype)
    of_value = check(name, "value", dtype, x, made.run("Value", name, x))
    of_slope = check(name, "slope", dtype, x, made.run("Slope", name, x))
    print(f"{dtype} {name}: value {of_value:.2f}, slope {of_slope:.2f} of what is allowed")
