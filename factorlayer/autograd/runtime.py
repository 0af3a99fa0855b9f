"""The CUDA engine's side in Python: whether a GPU will do, where its compiler is, and errors with all that belongs to
them. csrc/runtime does the work; csrc/python.cpp calls nvrtc_paths, planner and warn when a kernel is first needed."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from factorlayer.device.code import folder as engine_folder
from factorlayer.device.table import own

MAX_WEIGHTS = 62  # that a kernel's argument has room for, as in csrc/runtime/kernels.h


class CompileError(RuntimeError):
    """A chain that has no plan, or a kernel that cannot be compiled or loaded; empty texts where there is none."""

    def __init__(self, message: str, source: str = "", log: str = "", plan: str = "") -> None:
        super().__init__(message, source, log, plan)
        self.source, self.log, self.plan = source, log, plan

    def __str__(self) -> str:
        return str(self.args[0])


def warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def nvrtc_paths() -> str:
    """Places among the Python packages where NVRTC may be, a path a line: of PyTorch's own CUDA version first."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.1[23]")]
    found += Path(torch.__file__).parent.glob("lib/libnvrtc*.so.1[23]")
    major = (torch.version.cuda or "13").split(".")[0]
    return "\n".join(sorted(map(str, found), key=lambda path: (not path.endswith(major), path)))


@functools.cache
def planner() -> str:
    """What tells one planner from another: the hash of all that makes plans, the package's Python, its tables of rates,
    the user's own and the device code."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder, kind in ((package, "*.py"), (package, "*.json"), (engine_folder(), "*.cuh")):
        for path in sorted(folder.rglob(kind)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    for table in own().values():
        digest.update(table.text().encode())
    return digest.hexdigest()


_reasons: dict[int, str | None] = {}
_hopper: dict[int, bool] = {}


def why_not_on_gpu(index: int) -> str | None:
    """Why the engine cannot run on a CUDA device, or None. Looked up once for each."""
    if index not in _reasons:
        _reasons[index] = _find_reason(index)
    return _reasons[index]


def is_hopper(index: int) -> bool:
    """Whether a CUDA device has the matrix instructions of warpgroups. Looked up once for each."""
    if index not in _hopper:
        _hopper[index] = torch.cuda.get_device_capability(index) == (9, 0)
    return _hopper[index]


def tf32_allowed(operation: str = "matmul") -> bool:
    """PyTorch's own switch for that operation, read in the way that takes no microsecond: "matmul" is
    torch.backends.cuda.matmul.fp32_precision, "rnn" torch.backends.cudnn.rnn.fp32_precision, which allows it unless it
    is told otherwise.

    Of the three ways to set one, this is the one whose reading never raises, whichever set it.
    """
    return bool(torch._C._get_fp32_precision_getter("cuda", operation) == "tf32")


# torch.compile calls these and takes what they return as constant (of the switch for matmul, until it changes). This is
# all that torch.compiler.assume_constant_result does, but for importing the compiler.
why_not_on_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]
tf32_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find_reason(index: int) -> str | None:
    if torch.version.hip is not None:
        return "its CUDA kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        name = torch.cuda.get_device_name(index)
        return f"its CUDA kernels need compute capability 8.0 or later, {name} has {major}.{minor}"
    try:
        untraced(torch.ops.factorlayer.compiler)
    except RuntimeError as error:
        return str(error)
    return None


def untraced(op: Callable[..., Any], *args: Any) -> Any:
    """The answer of an op that is asked of texts and numbers, hidden from whoever watches operators: torch.export has
    no place for a text that an op returns, and may be tracing when it is first asked whether a GPU can be used."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return op(*args)


def plan_text(chain: str, dtype: torch.dtype, batch: int, *limits: int) -> str:
    """The plan from the cache or from the planner, for a GPU of such limits; needs no GPU."""
    return str(torch.ops.factorlayer.plan(chain, dtype_name(dtype), class_of_batch(batch), *limits))


@functools.lru_cache(4096)
def class_of_batch(batch: int) -> int:
    """The class of a number of samples, by which alone plans depend on it."""
    return int(torch.ops.factorlayer.batch_class(batch))


def prepare(chain: str, dtype: torch.dtype, batch: int, device: int) -> None:
    """Plans, compiles and loads what a call of the raw op needs. Raises CompileError."""
    _raise(torch.ops.factorlayer.prepare(chain, dtype_name(dtype), class_of_batch(batch), device))


def prepare_together(asked: Sequence[tuple[str, int]], dtype: torch.dtype, device: int) -> None:
    """Prepares several chains, each with its batch, in threads, since the compiler takes longest. Raises
    CompileError."""
    asked = list(dict.fromkeys(asked))
    with ThreadPoolExecutor(min(len(asked), os.cpu_count() or 1) or 1) as pool:
        for done in [pool.submit(prepare, chain, dtype, batch, device) for chain, batch in asked]:
            done.result()


def install(chain: str, dtype: torch.dtype, batch_class: int, device: int, plan: str) -> None:
    """Puts a plan into the table, in place of the planner's. Raises CompileError."""
    _raise(torch.ops.factorlayer.install(chain, dtype_name(dtype), batch_class, device, plan))


def raise_failure(chain: str, dtype: torch.dtype, batch: int, device: int) -> None:
    """Raises CompileError if that is why a call of the raw op failed."""
    _raise(torch.ops.factorlayer.failure(chain, dtype_name(dtype), class_of_batch(batch), device))


def fill_cache(plan: str) -> None:
    """Compiles a plan's kernels into the cache, which needs no GPU. Raises CompileError."""
    _raise(torch.ops.factorlayer.fill_cache(plan))


def compile_kernel(source: str, kernel: str, architecture: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """The cubin and the compiler's log, past the cache; needs no GPU. Raises CompileError."""
    cubin, log, error = torch.ops.factorlayer.compile(source, kernel, architecture, list(options))
    if error:
        raise CompileError(error, source, log)
    return bytes(cubin.numpy()), log


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raise(parts: Sequence[str]) -> None:
    if parts:
        raise CompileError(*parts)


@dataclass(frozen=True)
class CacheEntry:
    """A file of the cache, which keeps kernels and plans; a plan has no compiler."""

    file: str
    bytes: int
    whole: bool
    kind: str
    name: str
    architecture: str
    compiler: str
    package: str

    def line(self) -> str:
        compiler = f" by NVRTC {self.compiler}" if self.compiler else ""
        what = f"{self.kind} {self.name} for {self.architecture}{compiler}, factorlayer {self.package}"
        return f"{self.file}  {self.bytes:>8}  {what if self.whole else 'damaged'}"


def cache_folder() -> Path:
    return Path(torch.ops.factorlayer.cache_folder())


def cache_entries() -> list[CacheEntry]:
    entries = []
    for line in torch.ops.factorlayer.cache_entries():
        file, size, state, *rest = line.split("\t")
        entries.append(CacheEntry(file, int(size), state == "whole", *rest))
    return entries


@dataclass(frozen=True)
class CacheRoom:
    """Bytes that this user's files take in the cache, in whole pages of 4096, and the most they may."""

    occupied: int
    limit: int

    def __str__(self) -> str:
        return f"{self.occupied} of at most {self.limit} bytes are taken"


def cache_room() -> CacheRoom:
    ops = torch.ops.factorlayer
    return CacheRoom(int(ops.cache_occupied()), int(ops.cache_limit()))


def set_cache_limit(limit: int) -> None:
    """Keeps a limit in the cache's folder, for all who share it. The next process that writes removes what is too much:
    of its user's files, those that were used least recently."""
    if not 0 < limit < 10**18:
        raise ValueError(f"the cache's limit should be a number of bytes from 1 to 10^18 - 1; it is {limit}")
    if trouble := torch.ops.factorlayer.set_cache_limit(limit):
        raise RuntimeError(f"the cache's limit cannot be kept in {cache_folder()}: {trouble}")


def clear_cache() -> int:
    """Removes the cache's files, and no others in its folder. Returns how many."""
    return int(torch.ops.factorlayer.remove_cache_entries(True))
