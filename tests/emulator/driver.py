"""Runs the kernels of a plan on a CPU, by the C++ files beside this, and collects what they find wrong.

The device code is what the GPU gets, but for instructions.cuh and Wgmma<...>: those are instructions.cuh
beside this.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from once import name_of, once

from factorlayer.kernels.passes import STATES, Pass
from factorlayer.plan.plan import Plan

HERE = Path(__file__).parent
COMPILE = ["g++", "-std=c++17", "-w", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing"]
# A kernel's compiler takes longer than it does: a little less without what tells how to leave functions, and a tenth
# less where the many functions that are called once are part of those that call them, and where nobody guesses branches
KERNEL = ["-Og", "-fstack-reuse=none", "-fno-exceptions", "-fno-asynchronous-unwind-tables"]
KERNEL += ["-finline-functions-called-once", "-fno-guess-branch-probability"]
KERNEL += ["-fPIC", "-fvisibility=hidden"]
EMULATOR = ["-O3", "-mavx2"]  # which most of a kernel's time is in
# A kernel calls what the emulator has, and is linked with nothing. By way of g++ the linker takes twice as long.
LINK = ["ld.gold" if shutil.which("ld.gold") else "ld", "-shared"]
ENVIRONMENT = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # by large pages, where there are some
SECONDS = 600  # for a kernel, on a machine that has much else to do
Array = NDArray[np.float64]


def why_not() -> str | None:
    """Why there is no emulator here, or None."""
    if platform.machine() != "x86_64":
        return f"the emulator's fibers are for x86_64, this is {platform.machine()}"
    return None if shutil.which("g++") else "the emulator needs g++"


def encode(values: Array, dtype: str) -> bytes:
    """As memory holds it."""
    if dtype != "bfloat16":
        return values.astype({"float64": np.float64, "float16": np.float16}.get(dtype, np.float32)).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).tobytes()


def decode(memory: bytes, dtype: str) -> Array:
    """Any bits: broken kernels leave signalling NaNs, too."""
    if dtype == "bfloat16":
        held = (np.frombuffer(memory, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        held = np.frombuffer(memory, {"float64": np.float64, "float16": np.float16}.get(dtype, np.float32))
    with np.errstate(invalid="ignore"):
        return held.astype(np.float64)


@dataclass(frozen=True)
class Kernel:
    """A pass as a library that the emulator loads."""

    emulator: Path
    library: Path
    planned: Pass
    cluster: int

    def arguments(self, folder: Path, seed: int, batch: int, blocks: int, bias: bool, weights: int) -> list[str]:
        """With as many blocks as the runtime would launch where there are `blocks` processors."""
        p = self.planned
        grid_y = p.split
        grid_x = -(-batch * p.units_per_sample // p.units_per_block)
        if p.blocks_per_sm:
            grid_x = min(grid_x, max(1, blocks * p.blocks_per_sm // grid_y))
        *places, end = self.places(batch)
        numbers = [seed, batch, end + p.sum_bytes(grid_x), end - p.written(batch), p.shared, p.threads, self.cluster]
        numbers += [grid_x, grid_y, int(bias), weights, -1 if p.reads_prepared else end, *places[1:]]
        return [str(self.emulator), str(self.library), str(folder), *map(str, numbers)]

    def places(self, batch: int) -> list[int]:
        """Where they begin, as tensors do, and where sums do behind them."""
        return list(itertools.accumulate((-(-size // 16) * 16 for size in self.planned.outputs(batch)), initial=0))


class Emulator:
    """Compiled once. Kernels and tensors lie in its folder; kernels that others can use lie in `shared`."""

    def __init__(self, folder: Path, shared: Path | None = None) -> None:
        self.folder, self.shared = folder, shared and shared / f"emulator-{made_from()}"
        self.made = self.shared or folder
        self.made.mkdir(exist_ok=True)
        paths = sorted(HERE.glob("*.cpp"))
        first = place_among(len(paths))  # other processes begin with other files, and wait less for each other
        objects = [str(self.object_of(path)) for path in (*paths[first:], *paths[:first])]
        whole = [*objects, "-rdynamic", "-ldl"]
        self.program = once(self.made / "emulator", lambda part: compile_cpp([*whole, "-o", str(part)]))
        # What every kernel includes first: the compiler finds it compiled beside no header, before it finds the header
        vocabulary = [*KERNEL, "-x", "c++-header", str(HERE / "instructions.cuh")]
        once(self.made / "instructions.cuh.gch", lambda part: compile_cpp([*vocabulary, "-o", str(part)]))

    def object_of(self, path: Path) -> Path:
        """Of a file of the emulator."""
        return once(
            self.made / f"{path.stem}.o", lambda part: compile_cpp([*EMULATOR, "-c", str(path), "-o", str(part)])
        )

    def headers(self, text: str) -> tuple[str, str]:
        """A name for what a kernel includes, which is compiled once with `shared`, and what follows it."""
        headers, mark, kernel = text.partition('#line 1 "kernel"')
        name = f"{name_of(headers)}.h"

        def build(part: Path) -> None:
            path = self.folder / name
            path.write_text(headers)
            compile_cpp([f"-I{HERE}", *KERNEL, "-x", "c++-header", str(path), "-o", str(part)])
            path.unlink()

        once(self.made / f"{name}.gch", build)
        return name, mark + kernel

    def library(self, number: int, text: str, changed: bool = False) -> Path:
        """Of a kernel. Without `shared` the next one takes its place. Changed headers are few kernels'."""

        def build(library: Path) -> None:
            path, code = self.folder / f"kernel{number}.cpp", text
            if self.shared and not changed:
                name, kernel = self.headers(text)
                code = f'#include "{name}"\n{kernel}'
            path.write_text(code)
            compiled = str(path.with_suffix(".o"))
            compile_cpp([f"-I{self.made}", *KERNEL, "-c", str(path), "-o", compiled])
            called([*LINK, compiled, "-o", str(library)])

        if self.shared:
            return once(self.shared / name_of(text), build)
        build(self.folder / f"kernel{number}")
        return self.folder / f"kernel{number}"

    def compile(
        self, plan: Plan, changes: dict[str, str] | None = None, which: Sequence[int] | None = None
    ) -> list[Kernel]:
        """A library for each pass, or some. `changes` breaks the device code: texts in it, each in some pass."""
        asked = [i for i in range(len(plan.passes)) if which is None or i in which]
        sources = {i: plan.passes[i].source("kernel") for i in asked}
        clusters = {i: re.search(r"__cluster_dims__\(1, (\d+), 1\)", text) for i, text in sources.items()}
        texts = {i: for_the_cpu(text) for i, text in sources.items()}
        for old, new in (changes or {}).items():
            assert any(old in text for text in texts.values()), f"the device code has no {old!r}"
            texts = {i: text.replace(old, new) for i, text in texts.items()}
        sizes = {i: int(found[1]) if found else 1 for i, found in clusters.items()}
        return [
            Kernel(self.program, self.library(i, text, bool(changes)), plan.passes[i], sizes[i])
            for i, text in texts.items()
        ]

    def run(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        x: Array,
        weights: Sequence[Array],
        bias: Array | None,
        blocks: int = 3,
        seed: int = 1,
    ) -> tuple[list[Array], list[str]]:
        """What the passes write, and the errors found."""
        for name, values in {"x": x, "bias": bias, **{f"w{i}": w for i, w in enumerate(weights)}}.items():
            if values is not None:
                (self.folder / name).write_bytes(encode(values, plan.dtype))
        left, before = self.folder / "left", self.folder / "before"  # what one pass leaves for another one
        left.unlink(missing_ok=True)
        before.unlink(missing_ok=True)
        outputs: list[Array] = []
        errors: list[str] = []
        named = any(p.beside[0] or p.reads[0] == "@" or p.reads == p.writes in STATES for p in plan.passes)
        buffers = Buffers(self.folder) if named else None
        for number, kernel in enumerate(kernels):
            planned = kernel.planned
            if buffers:
                buffers.give(planned)
            (self.folder / "maps").write_text("\n".join(planned.maps))
            if planned.leaves == "state":
                left.touch()
            arguments = kernel.arguments(self.folder, seed, len(x), blocks, bias is not None, len(weights))
            (self.folder / "y").unlink(missing_ok=True)  # a pass that is stopped leaves none
            try:
                done = subprocess.run(
                    arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return outputs, [*errors, f"pass {number}: not done after {SECONDS} s"]
            found = done.stdout.splitlines()
            if done.returncode not in (0, 1):
                found.append(f"exit code {done.returncode}: accesses outside of the tensors, or a broken stack")
            errors += [f"pass {number}: {line}" for line in found if not is_left_to_another(planned, line)]
            if done.returncode not in (0, 1) or not (self.folder / "y").exists():
                return outputs, errors
            memory = (self.folder / "y").read_bytes()
            sizes, places = planned.outputs(len(x)), kernel.places(len(x))
            if planned.leaves == "prepared":
                begin = planned.prepared_at
                if begin:
                    path = self.folder / "chunks"
                    kept = path.read_bytes()[:begin] if path.exists() else b""
                    memory = kept.ljust(begin, b"\0") + memory[begin:]
                (self.folder / "chunks").write_bytes(memory)
                if buffers:
                    buffers.held["s2"] = memory
                continue
            if planned.leaves == "state":
                of_x, state = sizes
                outputs.append(decode(memory[:of_x], plan.dtype))
                left.write_bytes(memory[places[1] :][:state])
                continue
            left.unlink(missing_ok=True)
            if planned.leaves == "begun":
                before.write_bytes(memory)
                continue
            before.unlink(missing_ok=True)
            if errors and (planned.leaves or planned.takes_sums):
                return outputs, errors
            if planned.leaves == "sums":
                held = memory[places[-1] :]
                continue
            if planned.takes_sums:
                memory = memory[: places[-1]] + merged(planned, held, memory[places[-1] :])
            parts = [memory[at : at + size] for at, size in zip(places, sizes, strict=False)]
            written = b"".join(parts)
            sums = memory[places[-1] :]
            if buffers:
                buffers.take(planned, written, sums)
            for part in parts if planned.is_apart else [written]:
                outputs.append(decode(part, planned.result_dtype(plan.dtype)))
            (self.folder / "x").write_bytes(sums or written)
        return outputs, errors


class Buffers:
    """What plans name whose passes read what others than the one before have made. Sums go from a pass to the next, or
    to one behind several."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.held = folder, {"x": (folder / "x").read_bytes()}
        self.given: dict[int, bytes] = {}
        self.sums = b""

    def give(self, planned: Pass) -> None:
        for place, weight in self.given.items():
            (self.folder / f"w{place}").write_bytes(weight)
        (beside, place), reads = planned.beside, planned.reads
        if beside:
            weight = self.folder / f"w{place}"
            self.given[place] = weight.read_bytes()
            weight.write_bytes(self.held[beside])
        if planned.adds_up_all:
            (self.folder / "x").write_bytes(self.sums)
        elif reads not in ("s2", "none"):
            x = (self.folder / f"w{reads[1:]}").read_bytes() if reads[0] == "@" else self.held[reads]
            (self.folder / "x").write_bytes(x)

    def take(self, planned: Pass, written: bytes, sums: bytes) -> None:
        if planned.writes in STATES:
            self.held[planned.writes] = written
        at = planned.sums_at
        self.sums = self.sums[:at].ljust(at, b"\0") + sums[at:] + self.sums[len(sums) :]


def merged(planned: Pass, held: bytes, made: bytes) -> bytes:
    """Sums of blocks, in double: each one's first ones by the pass before, the others by this one."""
    left, own = (np.frombuffer(sums).reshape(-1, planned.sum_bytes(1) // 8) for sums in (held, made))
    return np.hstack([left[:, : planned.takes_sums], own[:, planned.takes_sums :]]).tobytes()


def is_left_to_another(planned: Pass, line: str) -> bool:
    """Whether all that is missing are sums that another kernel writes."""
    found = re.search(r": (\d+) bytes of the output not written, and (\d+) behind tensors$", line)
    return found is not None and planned.is_others(int(found[1]), int(found[2]))


def for_the_cpu(text: str) -> str:
    """The source of a kernel without its instructions, and the emulator's entry into it."""
    sections = re.split(r'(?=^#line 1 ")', text, flags=re.MULTILINE)
    kept = [section for section in sections if not re.match(r'#line 1 "(instructions\.cuh|Wgmma<.*>)"', section)]
    assert len(kept) < len(sections) and not any(re.search(r"\basm\b", section) for section in kept)
    maps = ", *static_cast<const Maps*>(maps)" if "Maps maps)" in text else ""
    entry = 'extern "C" __attribute__((visibility("default"))) void run_kernel(const void* params, const void* maps) '
    entry += f"{{ kernel(*static_cast<const Params*>(params){maps}); }}\n"
    return '#include "instructions.cuh"\n' + "".join(kept) + '#line 1 "entry"\n' + entry


def place_among(count: int) -> int:
    """Where this process of a run begins with so many things that all of its processes want."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return int(worker.removeprefix("gw")) * count // int(workers)


def made_from() -> str:
    """A name for the compiler, its flags and all files of the emulator: programs of others are not these."""
    version = subprocess.run([COMPILE[0], "--version"], capture_output=True, text=True, check=True).stdout
    files = [path.read_text() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h", ".cuh")]
    return name_of(version, *COMPILE, *KERNEL, *EMULATOR, *LINK, *files)


def compile_cpp(arguments: list[str]) -> None:
    called([*COMPILE, *arguments])


def called(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[:4000]}"
