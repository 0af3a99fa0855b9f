"""What `check --source` shows: the kernels that a GPU runs a case's layers with, as planned, generated and compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from factorlayer import __version__, plan
from factorlayer.case import Problem
from factorlayer.fused import gpu_limits
from factorlayer.fusion import Fused
from factorlayer.gpu import LIMITS, Gpu
from factorlayer.layers import FactorLinear
from factorlayer.mlp import FactorMLP
from factorlayer.plan import PlanError
from factorlayer.runtime import cache_entries, cache_folder, dtype_name, fill_cache
from factorlayer.stack import Layer, layer_of
from factorlayer.stacked import Stack


@dataclass(frozen=True)
class Kernel:
    name: str
    architecture: str
    file: str | None  # of the compiled kernel
    code: str


@dataclass(frozen=True)
class Source:
    """Of layers that are planned together."""

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
    dtype, batch_class = dtype_name(problem.x.dtype), torch.ops.factorlayer.batch_class(len(problem.x))
    limits = (gpu.arch, gpu.sms, gpu.shared)

    def planned(names: Sequence[str], layers: Sequence[Layer]) -> Source:
        chain = Stack(tuple(layer.chain for layer in layers)).text_for(problem.x)
        text = plan.plan_text(chain, dtype, batch_class, *limits)
        return Source(tuple(names), chain, plan.explain(chain, dtype, batch_class, *limits), _kernels(text))

    for names, layers in _stacks(problem):
        try:
            yield planned(names, layers)
        except PlanError:
            for name, layer in zip(names, layers, strict=True):
                yield planned([name], [layer])


def _stacks(problem: Problem) -> Iterator[tuple[Sequence[str], Sequence[Layer]]]:
    module = problem.modules["v3"]
    stacks = [stack for part in module.modules() if isinstance(part, Fused | FactorMLP) for stack in part.stacks]
    members = {id(member) for stack in stacks for member in stack.members}
    yield from ((stack.names, stack.layers) for stack in stacks)
    for name, part in module.named_modules():
        layer = layer_of(part)
        if isinstance(part, FactorLinear) and id(part) not in members and layer is not None:
            yield [name or "FactorLinear"], [layer]


def _kernels(text: str) -> tuple[Kernel, ...]:
    """Of a plan's text, which plan.py writes: lines, of which those of passes end in the size of the code behind."""
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
