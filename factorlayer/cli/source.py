"""What `check --source` shows: the kernels that a GPU runs a case's layers with, as planned, generated and compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from factorlayer import __version__
from factorlayer.autograd.layer_ops import gpu_limits
from factorlayer.autograd.runtime import cache_entries, cache_folder, class_of_batch, dtype_name, fill_cache
from factorlayer.cli.case import Problem
from factorlayer.device.gpu import LIMITS, Gpu
from factorlayer.plan import planner
from factorlayer.plan.plan import PlanError
from factorlayer.stacks.stack import LayerStack


@dataclass(frozen=True)
class Kernel:
    name: str
    architecture: str
    file: str | None  # of the compiled kernel
    code: str


@dataclass(frozen=True)
class Source:
    """The plan and the kernels of layers that are planned together."""

    layers: tuple[str, ...]
    chain: str
    plan: str
    kernels: tuple[Kernel, ...]

    def lines(self) -> list[str]:
        lines = [f"{' | '.join(self.layers)}: {self.plan}"]
        for kernel in self.kernels:
            where = kernel.file or "nowhere: it is compiled where there are NVRTC and a cache that can be written"
            lines += [f"{kernel.name} for {kernel.architecture}, compiled: {where}", kernel.code.rstrip()]
        return lines


def gpu_of(problem: Problem, arch: int | None) -> Gpu:
    """The case's device, or what is typical of a compute capability."""
    if arch is None and problem.x.is_cuda:
        return Gpu(*gpu_limits(problem.x.get_device()))
    if arch is not None and arch not in LIMITS:
        raise ValueError(f"the compute capability should be one of {', '.join(map(str, LIMITS))}; it is {arch}")
    return Gpu.of(arch or 90)


def sources(problem: Problem, gpu: Gpu) -> Iterator[Source]:
    """Forward kernels of v3. A stack that no single kernel takes comes layer by layer."""
    dtype, batch_class = dtype_name(problem.x.dtype), class_of_batch(len(problem.x))
    limits = (gpu.arch, gpu.sms, gpu.shared, gpu.memory)

    def planned(stack: LayerStack) -> Source:
        chain = stack.text_for(problem.x)
        text = planner.plan_text(chain, dtype, batch_class, *limits)
        return Source(stack.names, chain, planner.explain(chain, dtype, batch_class, *limits), _kernels(text))

    for _, stack in problem.stacks():
        try:
            yield planned(stack)
        except PlanError:
            yield from map(planned, stack.alone())


def _kernels(text: str) -> tuple[Kernel, ...]:
    """The kernels in a plan's text. plan.py writes it in lines; the line of a pass ends in the size of the code behind
    it."""
    compiled = not why_not_compiled()
    if compiled:
        fill_cache(text)
    kernels, rest = [], text.encode()
    while rest:
        line, rest = rest.split(b"\n", 1)
        if line.startswith(b"pass "):
            *_, architecture, name, size = line.decode().split()
            code, rest = rest[: int(size)].decode(), rest[int(size) :]
            file = _file(code, name, architecture) if compiled else None
            kernels.append(Kernel(name, architecture, file, code))
    return tuple(kernels)


def why_not_compiled() -> str | None:
    try:
        torch.ops.factorlayer.compiler()
    except RuntimeError as error:
        return str(error)
    return None


def _file(code: str, name: str, architecture: str) -> str | None:
    """A file of the cache begins with what it was compiled from."""
    source = f"\nsource {hashlib.sha256(code.encode()).hexdigest()}\n".encode()
    compiler = torch.ops.factorlayer.compiler()[0]
    for entry in cache_entries():
        found = (entry.name, entry.architecture, entry.compiler, entry.package)
        if entry.whole and entry.kind == "kernel" and found == (name, architecture, compiler, __version__):
            path = cache_folder() / entry.file
            if source in path.read_bytes()[:2048]:
                return str(path)
    return None
