"""A GPU's table: its rates and latencies, which the planner predicts times by. No torch, no GPU needed.

A GPU that was measured has a file, which `python -m benches.calibrate` writes: those that are shipped lie in the folder
rates beside this module, a user's own in the cache folder, which comes first. Any other GPU has the rates of an H200,
scaled by data sheets. They only rank plans; no result depends on them.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16")
HEAD, VERSION = "factorlayer rates", 1
SHIPPED = Path(__file__).parent / "rates"
FOLDER = "rates"  # in the cache's
LARGEST_FILE = 1 << 16  # bytes that are read
LEAST, MOST = 1e-6, 1e12  # of a number
# Of the bytes that memory's clock and bus make, those that copies move: 0.865 on an H200, 0.896 on an H100
MEMORY_SHARE = 0.86
L2_OVER_MEMORY = 1.8  # on an H200


@dataclass(frozen=True)
class Rates:
    """Facts of one GPU: rates of one multiprocessor in a microsecond, while all are busy, as kernels sustain them, and
    latencies in microseconds."""

    memory_bytes: float  # moved through memory, read and written together
    l2_bytes: float  # read from L2, of what it holds
    shared_bytes: float  # read from shared memory
    instructions: float  # of warps, that are issued
    cycles: float  # of the clock, while the matrix unit is busy
    # FLOPs of the matrix instructions that a dtype is computed with: of float32 by three products in tf32, of 16 bits
    # by warpgroups, counted as twice those of a warp
    flops: dict[str, float]
    special_functions: float  # exponentials, sines, … that the units for them make
    double_functions: float  # exponentials, sines, … in double
    behind_us: float  # until a small kernel behind another in a CUDA graph has run
    wait_us: float  # for what L2 or memory has been asked for
    ramp_us: float  # until all of memory's bandwidth is in use, and at the end
    sync_us: float  # for a barrier of a block's warps, with what it lets run dry

    @property
    def by_name(self) -> dict[str, float]:
        """Each number, flops by dtypes: "flops.tf32"."""
        found: dict[str, float] = {}
        for name, value in asdict(self).items():
            found |= {f"{name}.{dtype}": each for dtype, each in value.items()} if name == "flops" else {name: value}
        return found


Key = tuple[int, int, int, int]  # what the driver says of a GPU: arch, sms, shared, memory, as gpu.py has them
KEY = ("arch", "sms", "shared", "memory")
H200: Key = (90, 132, 232448, 4916736)


@dataclass(frozen=True)
class Table:
    """Rates, and of whom. `machine` says what they were measured on, `source` where they are from."""

    gpu: Key
    machine: dict[str, Any]
    rates: Rates
    source: str = ""

    def text(self) -> str:
        told = {HEAD: VERSION, "gpu": dict(zip(KEY, self.gpu, strict=True)), "machine": self.machine}
        return json.dumps(told | {"rates": asdict(self.rates)}, indent=1) + "\n"


def file_name(gpu: Key) -> str:
    return "sm_{}-{}-{}-{}.json".format(*gpu)


def read(path: Path) -> Table:
    """OSError or ValueError says why there is no table in it."""
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    ) as stream:  # pipes would wait
        known = os.fstat(stream.fileno())
        if not stat.S_ISREG(known.st_mode) or known.st_size > LARGEST_FILE:
            raise ValueError(f"it is no file of at most {LARGEST_FILE} bytes")
        return parsed(stream.read(LARGEST_FILE), f"in {path}")


def parsed(text: bytes, source: str) -> Table:
    """ValueError says what is wrong."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(told, dict) or HEAD not in told:
        raise ValueError(f'it should hold "{HEAD}"')
    if told[HEAD] != VERSION:
        raise ValueError(f"it is of version {told[HEAD]!r}, this factorlayer reads {VERSION}: calibrate again")
    _check_names(told, (HEAD, "gpu", "machine", "rates"), "a table")
    gpu, rates = told["gpu"], told["rates"]
    _check_names(gpu, KEY, '"gpu"')
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in gpu.values()) or not gpu["sms"]:
        raise ValueError('"gpu" should have whole numbers')
    if not isinstance(told["machine"], dict):
        raise ValueError('"machine" should describe a machine')
    _check_names(rates, tuple(each.name for each in fields(Rates)), '"rates"')
    _check_names(rates["flops"], DTYPES, '"flops"')
    for name, value in Rates(**rates).by_name.items():
        if type(value) not in (int, float) or not LEAST < value < MOST:
            raise ValueError(f"{name} should be a number from {LEAST:g} to {MOST:g}, it is {str(value)[:40]!r}")
    return Table((gpu["arch"], gpu["sms"], gpu["shared"], gpu["memory"]), told["machine"], Rates(**rates), source)


def _check_names(told: Any, names: tuple[str, ...], what: str) -> None:
    if not isinstance(told, dict) or set(told) != set(names):
        raise ValueError(f"{what} should have {', '.join(names)}, and nothing else")


@functools.cache
def shipped() -> dict[Key, Table]:
    found = [read(path) for path in sorted(SHIPPED.glob("*.json"))]
    return {table.gpu: replace(table, source="measured on such a GPU") for table in found}


def cache_folder() -> Path | None:
    """Where this user's files are, or None if there is no home folder. As csrc/runtime/cache.cpp has it: asked without
    an op, which whoever watches operators would see."""
    own, base, home = (os.environ.get(name, "") for name in ("FACTORLAYER_CACHE", "XDG_CACHE_HOME", "HOME"))
    if own:
        return Path(own)
    if base.startswith("/"):
        return Path(base) / "factorlayer"
    return Path(home) / ".cache" / "factorlayer" if home else None


def kept_in() -> Path | None:
    """The folder of a user's own tables, a file for each GPU, by its name."""
    where = cache_folder()
    return where / FOLDER if where else None


@functools.cache
def own() -> dict[Key, Table]:
    """A user's own tables, read once in a process, so that all its plans are made by the same. One warning says of all
    that are no tables, and why."""
    where = kept_in()
    try:
        paths = sorted(where.glob("*.json")) if where else []
    except OSError:
        paths = []
    found, ignored = dict[Key, Table](), list[str]()
    for path in paths:
        try:
            table = read(path)
            if path.name != file_name(table.gpu):
                raise ValueError(f"it is another GPU's, whose file would be {file_name(table.gpu)}")
            found[table.gpu] = table
        except FileNotFoundError:  # somebody else has removed it
            continue
        except OSError as error:
            ignored.append(f"{path.name} ({error.strerror or error})")
        except ValueError as error:
            ignored.append(f"{path.name} ({error})")
    if ignored:
        warnings.warn(
            f"factorlayer ignores tables of rates in {where}, which cannot be used: {'; '.join(ignored)}; run python "
            "-m benches.calibrate on that GPU, or remove the file",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def of(gpu: Key) -> Table:
    """The user's own table of a GPU, or what is shipped, or what data sheets say."""
    return own().get(gpu) or shipped().get(gpu) or _by_data_sheets(gpu)


def _by_data_sheets(gpu: Key) -> Table:
    arch, sms, _, memory = gpu
    measured = asdict(shipped()[H200].rates)
    typical = typical_memory_bytes(arch)
    measured["memory_bytes"] = MEMORY_SHARE * memory / sms if memory else typical
    measured["l2_bytes"] = L2_OVER_MEMORY * typical  # which is the same whatever memory is behind it
    measured["shared_bytes"] *= 1 if arch in (80, 90, 100) else 200 / 230
    scale = {80: 0.6, 86: 0.3, 89: 0.45, 90: 1.0, 100: 1.0, 120: 0.45}.get(arch, 0.5)
    doubles = {80: 0.17e6, 90: measured["flops"]["float64"], 100: 0.25e6}.get(arch, 0.01e6)
    measured["flops"] = {dtype: scale * rate for dtype, rate in measured["flops"].items()} | {"float64": doubles}
    return Table(gpu, {}, Rates(**measured), "of an H200, scaled by data sheets")


def typical_memory_bytes(arch: int) -> float:
    """Moved through the memory of a typical GPU of that generation: an H200's, and what data sheets say."""
    return {80: 14e3, 86: 10e3, 89: 8e3, 90: 32e3, 100: 48e3, 120: 10e3}.get(arch, 16e3)
