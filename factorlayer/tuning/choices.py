"""What was measured of layers, as `auto` asks for it: for a text, dtype, class of batch and pass, on one machine.

The table is empty in a process whose user has tuned nothing; then nobody asks it. It is read from the cache folder
once, when a layer first runs, so that what another process measures meanwhile changes no results of this one.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from factorlayer.autograd.build import VERSION
from factorlayer.autograd.runtime import class_of_batch, dtype_name
from factorlayer.device.table import cache_folder
from factorlayer.kernels.batches import MOST

MARGIN = 1.03  # batched has to be faster by this factor: less is noise, and fused needs less memory
FOLDER = "choices"  # in the cache's
SAMPLES = *(f"up to {most} samples" for most in MOST), f"more than {MOST[-1]} samples"  # of a class


@dataclass(frozen=True)
class Place:
    """The machine and the versions with which a choice was measured. The choice holds nowhere else."""

    device: str  # name of the GPU, or of the processor
    driver: str  # of the GPU; empty of a processor
    torch: str
    factorlayer: str

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.device}{driver}, torch {self.torch}, factorlayer {self.factorlayer}"


Key = tuple[str, str, int, bool]  # text of a chain or a stack, dtype, class of batch, whether gradients are made


@dataclass(frozen=True)
class Choice:
    """The measured times of both implementations. `samples` is how many were timed; the choice holds for their whole
    class."""

    text: str
    dtype: str
    batch_class: int
    training: bool
    place: Place
    samples: int
    fused_us: float
    batched_us: float

    @property
    def key(self) -> Key:
        return self.text, self.dtype, self.batch_class, self.training

    @property
    def implementation(self) -> str:
        return "batched" if self.batched_us * MARGIN < self.fused_us else "fused"

    def __str__(self) -> str:
        fused, batched = f"fused {self.fused_us:.1f} us", f"batched {self.batched_us:.1f} us"
        times = f"{batched}, {fused}" if self.implementation == "batched" else f"{fused}, {batched}"
        doing = "training" if self.training else "inference"
        return f"measured on {self.place.device}: {times}, for {doing} with {SAMPLES[self.batch_class]}"


TABLE: dict[Key, dict[Place, Choice]] = {}
BATCHED: frozenset[str] = frozenset()  # texts of which some choice, of wherever, is batched
_load: list[Callable[[], object]] = []  # what reads the kept choices, once
_changed: list[Callable[[], None]] = []
_lock = threading.RLock()
_here = threading.local()


def folder() -> Path | None:
    """The folder where choices are kept, or None if there is no home folder."""
    where = cache_folder()
    return where / FOLDER if where else None


def when_read(read: Callable[[], object]) -> None:
    """Registers a function that `load` calls if anything is kept."""
    _load.append(read)


def when_changed(call: Callable[[], None]) -> None:
    """Registers a function that is called whenever choices have come into the table."""
    _changed.append(call)


def load() -> None:
    """Reads what was kept before, if that was not done yet."""
    if _load:
        with _lock:
            where = folder()
            is_kept = where is not None and os.path.isdir(where)
            while _load:
                read = _load.pop()
                if is_kept:
                    read()


def put(choices: list[Choice]) -> None:
    """Puts choices into the table, in the place of those with the same key and place."""
    global BATCHED
    with _lock:
        for choice in choices:
            TABLE[choice.key] = TABLE.get(choice.key, {}) | {choice.place: choice}
        BATCHED = frozenset(c.text for at in TABLE.values() for c in at.values() if c.implementation == "batched")
    if choices:
        for call in _changed:
            call()


@contextmanager
def ignored() -> Iterator[None]:
    """Inside, this thread runs as where nothing was measured."""
    before = getattr(_here, "ignored", False)
    _here.ignored = True
    try:
        yield
    finally:
        _here.ignored = before


def measured(
    text: str, dtype: torch.dtype, device: str, index: int, batch: int | None, training: bool
) -> tuple[Choice, ...]:
    """The choice for a batch, if there is one; without a batch, as in a graph that is compiled for many, those of all
    classes."""
    load()
    if not TABLE or getattr(_here, "ignored", False) or device not in ("cpu", "cuda"):
        return ()
    classes = range(len(SAMPLES)) if batch is None else (class_of_batch(batch),)
    at = [TABLE.get((text, dtype_name(dtype), batch_class, training), {}) for batch_class in classes]
    if not any(at):
        return ()
    here = place_of(device, index)
    found = tuple(places[here] for places in at if here in places)
    if not found:
        _warn_of_another([choice for places in at for choice in places.values()], device, here)
    return found


def of_both_passes(text: str, x: Tensor, batch: int | None) -> list[Choice]:
    """The choices for inference and for training with samples like x."""
    asked = text, x.dtype, x.device.type, x.get_device(), batch
    return [choice for training in (False, True) for choice in measured(*asked, training)]


def why_batched(
    text: str, dtype: torch.dtype, device: str, index: int, batch: int | None, training: bool
) -> str | None:
    """Why auto takes the batched implementation, or None. Without a batch all that was measured has to say so."""
    found = measured(text, dtype, device, index, batch, training)
    if found and all(choice.implementation == "batched" for choice in found):
        return f"it was {found[0]}"
    return None


# A compiled graph takes the answer for a constant, as in autograd/runtime.py: it serves all batches, and what is
# measured later does not change it.
why_batched._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _warn_of_another(choices: list[Choice], device: str, here: Place) -> None:
    """Warns if a choice was measured on another device of the same kind. Choices of another kind say nothing: a layer
    that was tuned on a GPU may well run on a processor."""
    others = [choice.place for choice in choices if bool(choice.place.driver) == (device == "cuda")]
    if others:
        warn_once(
            f"factorlayer ignores a choice that was measured elsewhere, on {others[0]}; this is {here}. auto runs the "
            "fused implementation; tune the layer here"
        )


_warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.lru_cache(64)
def place_of(device: str, index: int) -> Place:
    """The Place of a device of this process. `index` is a GPU's."""
    if device == "cuda":
        return Place(torch.cuda.get_device_name(index), _driver(), str(torch.__version__), VERSION)
    return Place(_processor(), "", str(torch.__version__), VERSION)


def _processor() -> str:
    """The processor's name as Linux has it, and elsewhere the name of its architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    import platform

    name = found[1] if found else platform.processor() or platform.machine()
    return name.strip() or "a processor"


def _driver() -> str:
    """The kernel module's version, or CUDA's that it supports where the module does not say."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([0-9.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else f"of CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def check_can_time(who: str) -> None:
    """Raises where nothing can be timed now."""
    if is_compiling():
        _refuse_compiled(who)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{who}: kernels cannot be timed inside a CUDA graph capture; tune before the capture")


def _refuse_compiled(who: str) -> NoReturn:
    raise RuntimeError(f"{who}: kernels cannot be timed inside a compiled or exported graph; tune before it is made")


# So that torch.compile raises the error, and does not run the call uncompiled.
_refuse_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
