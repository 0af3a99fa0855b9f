"""What `bench --variants` shows: the CUDA engine's ways to run the same layers forward, timed side by side.

Each way's plan takes the planner's place for as long as it is timed, in a replayed graph, so that the host's time does
not count. On a CPU the table has what is predicted for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Measurement, Timer

from factorlayer.autograd.runtime import CompileError, class_of_batch, dtype_name, install
from factorlayer.cli.case import Problem
from factorlayer.device.gpu import Gpu
from factorlayer.plan.plan import Plan
from factorlayer.plan.planner import plan_of
from factorlayer.plan.schemes import Scheme, schemes
from factorlayer.stacks.stack import LayerStack

HEAD = ("kernels", "states", "weights", "samples a tile", "shared memory", "predicted us", "measured us", "differs by")


@dataclass(frozen=True)
class Variant:
    """One way. `differs_by` is its distance from the batched implementation, relative in the Frobenius norm."""

    kernels: int
    states: str
    weights: str
    samples: str  # of a tile
    shared_bytes: int
    predicted_us: float
    chosen: bool  # by the planner
    measured_us: float | None = None
    iqr_us: float | None = None
    differs_by: float | None = None
    failure: str | None = None  # why it could not be timed


@dataclass(frozen=True)
class Table:
    """The variants of layers that are planned together."""

    layers: tuple[str, ...]
    chain: str
    variants: tuple[Variant, ...]

    def lines(self) -> list[str]:
        rows = [HEAD, *map(_cells, self.variants)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [f"{' | '.join(self.layers)}:"] + [
            "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip() for row in rows
        ]


def _cells(variant: Variant) -> tuple[str, ...]:
    timed = variant.failure or "-"
    if variant.measured_us is not None:
        timed = f"{variant.measured_us:.1f} ± {variant.iqr_us:.1f}"
    return (
        f"{variant.kernels}{' (chosen)' if variant.chosen else ''}",
        variant.states,
        variant.weights,
        variant.samples,
        f"{variant.shared_bytes}",
        f"{variant.predicted_us:.1f}",
        timed,
        "-" if variant.differs_by is None else f"{variant.differs_by:.1e}",
    )


def tables(problem: Problem, gpu: Gpu, min_run_time: float) -> Iterator[Table]:
    """The table of each layer or stack that v3 runs. A stack that no single kernel takes comes layer by layer."""
    for stack, x in _called(problem):
        layers = stack.alone() if len(stack.names) > 1 else []
        found = _schemes(stack, x, gpu)
        if found or not layers:
            yield _table(stack, x, found, layers, gpu, min_run_time)
            continue
        for layer in layers:
            yield _table(layer, x, _schemes(layer, x, gpu), [], gpu, min_run_time)
            with torch.no_grad():
                x = layer(x)


def _schemes(stack: LayerStack, x: Tensor, gpu: Gpu) -> list[Scheme]:
    return schemes(stack.text_for(x), dtype_name(x.dtype), class_of_batch(len(x)), gpu)


def _called(problem: Problem) -> list[tuple[LayerStack, Tensor]]:
    """Stacks of v3, each with what it is called with."""
    found: list[tuple[LayerStack, Tensor]] = []
    hooks = []
    for part, stack in problem.stacks():

        def record(_: Any, given: tuple[Tensor, ...], stack: LayerStack = stack) -> None:
            found.append((stack, given[0].detach().reshape(-1, given[0].shape[-1])))

        hooks.append(part.register_forward_pre_hook(record))
    try:
        with torch.no_grad():
            problem.forward("v3")
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _table(
    stack: LayerStack,
    x: Tensor,
    found: Sequence[Scheme],
    layers: Sequence[LayerStack],
    gpu: Gpu,
    min_run_time: float,
) -> Table:
    """`layers` are the stack's, to compare with."""
    dtype, batch_class = dtype_name(x.dtype), class_of_batch(len(x))
    text = stack.text_for(x)
    chosen = plan_of(text, dtype, batch_class, gpu)
    with torch.no_grad():
        expected = stack.run_by("batched")(x) if x.is_cuda else None

    def timed(run: Callable[[Tensor], Tensor], plan: Plan | None = None) -> tuple[Any, ...]:
        if expected is None:
            return ()
        try:
            if plan is not None:
                install(text, x.dtype, batch_class, x.get_device(), plan.text())
            with torch.no_grad():
                y = run(x)
                measured = _replayed(run, x, min_run_time)
        except CompileError as error:
            return None, None, None, str(error)
        distance = torch.linalg.vector_norm((y - expected).double()) / torch.linalg.vector_norm(expected.double())
        return measured.median * 1e6, measured.iqr * 1e6, distance.item()

    variants = []
    for scheme in found:
        plan = scheme.plan
        told = len(plan.passes), scheme.states, scheme.weights, scheme.samples, scheme.shared, plan.us
        variants.append(Variant(*told, plan.passes == chosen.passes, *timed(stack, plan)))
    if expected is not None:
        install(text, x.dtype, batch_class, x.get_device(), chosen.text())
    if layers:
        plans = [plan_of(layer.text_for(x), dtype, batch_class, gpu) for layer in layers]
        passes = [p for plan in plans for p in plan.passes]
        told = len(passes), "memory", "layer by layer", "", max(p.shared for p in passes), sum(p.us for p in plans)
        variants.append(Variant(*told, False, *timed(nn.Sequential(*layers))))
    return Table(stack.names, text, tuple(variants))


def _replayed(run: Callable[[Tensor], Tensor], x: Tensor, min_run_time: float) -> Measurement:
    """Times a graph of one call, which has been made before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(x.device):
        with torch.cuda.graph(graph):
            run(x)
        return Timer("graph.replay()", globals={"graph": graph}).blocked_autorange(min_run_time=min_run_time)
