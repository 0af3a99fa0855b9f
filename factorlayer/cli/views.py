"""What the command line prints of a GPU's kernels: `check --source` and `bench --variants`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from factorlayer.cli.progress import gather
from factorlayer.cli.refusals import refuse, require_available, worded

if TYPE_CHECKING:
    from factorlayer.cli.case import Problem


def sources_of(problem: Problem, arch: int | None, as_json: bool) -> dict[str, Any]:
    """Prints what --source asks for, and returns it for --json."""
    from factorlayer.autograd import layer_ops
    from factorlayer.cli.source import gpu_of, sources, why_not_compiled

    if layer_ops.missing_extension is not None:
        refuse("--source", layer_ops.why_never_fused(problem.x) or "")
    gpu = worded("--arch", lambda: gpu_of(problem, arch))
    reason = why_not_compiled()
    typer.echo(
        f"v3's forward kernels on a GPU of compute capability {gpu.arch / 10}, {gpu.sms} multiprocessors"
        + ("" if problem.x.is_cuda else f" (here v3 runs on {problem.case.device})")
        + (f"; not compiled: {reason}" if reason else ""),
        err=as_json,
    )
    found = list(sources(problem, gpu))
    for each in found:
        typer.echo("\n".join(each.lines()), err=as_json)
    return {"architecture": gpu.architecture, "source": [asdict(each) for each in found]}


def variants_of(problem: Problem, arch: int | None, min_run_time: float, as_json: bool) -> dict[str, Any]:
    """Prints what --variants asks for, and returns it for --json."""
    from factorlayer.cli.source import gpu_of
    from factorlayer.cli.variants import tables

    require_available(problem, ["v3"])
    if arch is not None and problem.x.is_cuda:
        refuse("--arch", f"{problem.case.device} times its own kernels; leave it out, or give --device cpu")
    gpu = worded("--arch", lambda: gpu_of(problem, arch))
    timed = "" if problem.x.is_cuda else f"; predicted only, the case is on {problem.case.device}"
    what = f"v3's ways on a GPU of compute capability {gpu.arch / 10}, {gpu.sms} multiprocessors"
    typer.echo(what + timed, err=as_json)
    found = gather(tables(problem, gpu, min_run_time), "timing")
    for table in found.found:
        typer.echo("\n".join(table.lines()), err=as_json)
    if found.interrupted:
        typer.echo(f"interrupted: {len(found.found)} tables are whole", err=as_json)
    variants = [asdict(table) for table in found.found]
    return {"architecture": gpu.architecture, "interrupted": found.interrupted, "variants": variants}
