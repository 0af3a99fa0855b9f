"""Peers that are installed to be timed beside us. pyfastkron (`pip install pyfastkron`) is the only one.

It takes x [batch, P1·…·Pk] and factors [Pi, Qi], the transposes of our weights, in float32 and float64.
Where its own check finds the system or the dtype unsupported it runs a PyTorch fallback; the note says so.
(Bits equal to PyTorch's are no sign of it: its float32 kernels add in the same order as MKL's and often
agree to the last bit.)
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.workloads import Layer, Workload

Fast = tuple[Callable[[Tensor], Tensor], list[Tensor], str]


class NotForFastKronError(Exception):
    """Why pyfastkron does not run a workload."""


def fastkron(workload: Workload, x: Tensor, weights: list[Tensor]) -> Fast:
    """pyfastkron's function of x, its own leaf tensors, and "fallback" or nothing."""
    library = _library()
    if library is None:
        raise NotForFastKronError("pyfastkron cannot be imported; pip install pyfastkron")
    if not isinstance(workload, Layer) or workload.structure != "kronecker" or workload.rank != 1:
        raise NotForFastKronError("pyfastkron has Kronecker products of rank 1 only")
    if x.dtype not in (torch.float32, torch.float64):
        raise NotForFastKronError("pyfastkron has float32 and float64 only")
    if x.device.type == "cpu":
        _set_threads(Path(library.__file__).parent, torch.get_num_threads())
    factors = [weight.detach().t().contiguous().requires_grad_() for weight in weights]

    def function(x: Tensor) -> Tensor:
        # pyfastkron looks at requires_grad and not at the grad mode, and would keep what only a backward pass needs.
        leaves = factors if torch.is_grad_enabled() else [factor.detach() for factor in factors]
        y: Tensor = library.gemkm(x if torch.is_grad_enabled() else x.detach(), leaves)
        return y

    note = "" if library.fastkrontorch.isSupported(x, factors) else "fallback"
    return function, factors, note


@functools.cache
def _library() -> Any:
    try:
        return importlib.import_module("pyfastkron.fastkrontorch")
    except Exception:  # whatever keeps it from loading, it is not there to be timed
        return None


def _set_threads(package: Path, threads: int) -> None:
    """Sets the threads of pyfastkron's own OpenMP runtime, which torch.set_num_threads does not reach."""
    for runtime in package.parent.glob("pyfastkron.libs/libgomp*"):
        ctypes.CDLL(str(runtime)).omp_set_num_threads(threads)
