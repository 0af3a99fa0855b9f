"""Measures what floors are made of: copy bandwidth and arithmetic rate, on this machine, at this moment.

CPU: copies are as large as the workload's own footprint, since what fits in a cache is faster than memory.
No library gives the arithmetic peak away (a matrix product may use narrower vectors than the CPU has), so
the rate is the best of several, the fused layer itself among them: the best that anyone reached here, not a
proven peak.
CUDA: copies through memory whatever the footprint, since timed inputs are rotated so that no cache holds
them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from benches.floor import DATASHEETS, DTYPES, Ceilings
from factorlayer import FactorLinear
from factorlayer.autograd.layer_ops import why_not_fused

SMALLEST_COPY = 256 << 10  # bytes; below it, calling copy_ costs more than copying
LARGEST_COPY = 512 << 20  # beyond every cache
SPECIAL_STEPS = 256  # functions for each number read: memory does not count


class tf32_allowed:  # noqa: N801 (used as a statement)
    """with tf32_allowed(True): …, and the switch as it was afterwards."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.allowed

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """The ceilings of this machine, on a CPU at PyTorch's current number of threads."""
    return _cuda_ceilings(dtype) if device == "cuda" else _cpu_ceilings(dtype)


def _cpu_ceilings(dtype: str) -> Ceilings:
    rates = {"matmul": _matmul_rate(torch.device("cpu"), DTYPES[dtype], 1536)}
    if dtype == "float32" and torch.backends.mkldnn.is_available():
        rates["oneDNN convolution"] = _convolution_rate()
    for size, batch in ((32, 512), (64, 256), (128, 32)):
        x = torch.randn(batch, size * size, dtype=DTYPES[dtype])
        if why_not_fused(x) is None:
            layer = FactorLinear(size**2, size**2, False, factors=(size, size), implementation="fused", dtype=x.dtype)
            rates[f"fused {batch}:{size}^2"] = layer.flops(batch) / _best_seconds(lambda: layer(x))  # noqa: B023
    best = max(rates, key=lambda name: rates[name])
    special, special_of = _special_rate_of_cpu(torch.float64 if dtype == "float64" else torch.float32)

    @functools.cache
    def bandwidth(size: int) -> float:
        return _copy_bandwidth(torch.device("cpu"), min(max(size, SMALLEST_COPY), LARGEST_COPY))

    return Ceilings(bandwidth, rates[best], best, None, special, special_of)


def _cuda_ceilings(dtype: str) -> Ceilings:
    device = torch.device("cuda")
    copy = _copy_bandwidth(device, 2 << 30)
    size = 4096 if dtype == "float64" else 8192
    with tf32_allowed(dtype in ("tf32", "float32")):
        rate = _matmul_rate(device, DTYPES[dtype], size)
    name = torch.cuda.get_device_name()
    datasheet = next((limits for gpu, limits in DATASHEETS.items() if gpu in name), None)
    special = _special_rate_of_gpu(dtype)
    if dtype == "float32":
        return Ceilings(lambda _: copy, rate / 3, "tf32 matmul / 3", datasheet, *special)
    return Ceilings(lambda _: copy, rate, f"{dtype} matmul", datasheet, *special)


def _copy_bandwidth(device: torch.device, footprint: int) -> float:
    source = torch.randn(footprint // 8, device=device)  # half of the footprint is read, half is written
    target = torch.empty_like(source)
    return 8 * source.numel() / _best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best_seconds(lambda: torch.matmul(a, b, out=out), device)


def _convolution_rate() -> float:
    """A 1x1 convolution is a matrix product by oneDNN's kernels; torch.matmul may call another library."""
    x = torch.randn(16, 512, 32, 32).to(memory_format=torch.channels_last)
    weight = torch.randn(512, 512, 1, 1).to(memory_format=torch.channels_last)
    flops = 2 * 16 * 32 * 32 * 512 * 512
    return flops / _best_seconds(lambda: torch.nn.functional.conv2d(x, weight))


def _special_rate_of_cpu(dtype: torch.dtype) -> tuple[float, str]:
    """The rate of the fastest of three functions, over numbers that stay in the L2, and its name."""
    x = torch.randn(torch.get_num_threads() << 15, dtype=dtype)
    out = torch.empty_like(x)
    rates = {}
    for function in (torch.exp, torch.tanh, torch.sigmoid):
        rates[f"torch.{function.__name__}"] = x.numel() / _best_seconds(lambda: function(x, out=out), budget=0.1)  # noqa: B023
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best


def _special_rate_of_gpu(dtype: str) -> tuple[float | None, str]:
    """The rate of a kernel that computes nothing but exponentials, by the special function units or in float64, and its
    name."""
    x = torch.rand(1 << 22, dtype=torch.float64 if dtype == "float64" else torch.float32, device="cuda")
    step = "x = exp(-x);" if dtype == "float64" else 'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(-x));'
    code = f"template <typename T> T special(T x) {{ for (int i = 0; i < {SPECIAL_STEPS}; ++i) {step} return x; }}"
    try:
        function = torch.cuda.jiterator._create_jit_fn(code)
        seconds = _best_seconds(lambda: function(x), x.device, budget=0.1)
    except (AttributeError, RuntimeError) as error:
        return None, f"not measured: {str(error).splitlines()[0]}"
    return SPECIAL_STEPS * x.numel() / seconds, "exp in float64" if dtype == "float64" else "ex2"


def _best_seconds(call: Callable[[], object], device: torch.device | None = None, budget: float = 0.25) -> float:
    """The seconds of one call. They are the best and not the median: a ceiling is what the machine can do
    undisturbed."""
    on_cuda = device is not None and device.type == "cuda"
    calls, best, end = 1, float("inf"), float("inf")
    with torch.no_grad():
        for round_ in range(1000):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if on_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if round_ == 0:  # warmed up: now the rounds that count, of a millisecond or one call at least
                start = time.perf_counter()
                call()
                if on_cuda:
                    torch.cuda.synchronize()
                calls = max(1, int((2e-2 if on_cuda else 1e-3) / (time.perf_counter() - start)))
                end = time.perf_counter() + budget
                continue
            best = min(best, seconds / calls)
            if round_ >= 3 and time.perf_counter() > end:
                break
    return best
