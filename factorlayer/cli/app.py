"""The command line: check, profile, bench and tune a layer, a block or a model, convert and report a model, and the
cache. test.py and the entry point call main().

python test.py [OPTIONS] BATCH FACTOR... check | profile | bench | tune
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factorlayer.cli.arguments import CacheAction, Version, may_take_a_case, takes_a_case
from factorlayer.cli.grammar import EXAMPLE, INSTALLED, PROGRAM, Command, CommandAnywhere
from factorlayer.cli.progress import INTERRUPTED, gather, progress
from factorlayer.cli.refusals import (
    refuse,
    refuse_given,
    require_available,
    require_folder,
    require_plot,
    say_unavailable,
)
from factorlayer.cli.tuned import choices_of, move_choices
from factorlayer.cli.views import sources_of, variants_of

if TYPE_CHECKING:
    from factorlayer.cli.case import Case, Problem

AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout; the rest goes to stderr.")]

app = typer.Typer(
    cls=CommandAnywhere,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="BATCH FACTOR... check|profile|bench|tune",
    epilog=(
        f"Example: {EXAMPLE}\n\n"
        f"Example: {PROGRAM} --dtype d --structure monarch 16 20x36 28x44 check\n\n"
        f"Example: {PROGRAM} 32 128 128 bench --plot out.png\n\n"
        f"Example: {PROGRAM} --mlp --activation gelu 4096 48 512=16*32 1024=32*32 12 check\n\n"
        f"Example: {PROGRAM} --rnn 16 1024 32 32 bench\n\n"
        f"Example: {PROGRAM} --model nets.py:make_model --checkpoint weights.pt 4096 check\n\n"
        f"Example: {PROGRAM} convert --model nets.py:make_model --map '*.mlp.*=monarch,blocks=4' --output y.safetensors"
        "\n\n"
        f"Example: {PROGRAM} cache list\n\n"
        "Options may stand anywhere; `check --help` and so on list them."
        + ("" if PROGRAM == INSTALLED else f" Installed, this is `{INSTALLED}`.")
    ),
)


def print_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from factorlayer.cli.about import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def group(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=print_version, help="Say what runs here, and exit."),
    ] = False,
) -> None:
    """Check, profile or time a structured linear layer: BATCH samples through the modes FACTOR... Or, with --mlp, a
    block of such layers, and with --model a model of your own."""


@app.command(cls=Command, epilog=f"Example: {PROGRAM} --mlp --activation gelu 4096 48 512=16*32 1024=32*32 12 check")
@takes_a_case
def check(
    case: "Case",
    source: Annotated[
        bool,
        typer.Option("--source", help="Also show v3's forward kernels on a GPU: plan, device code, compiled file."),
    ] = False,
    arch: Annotated[
        int | None,
        typer.Option(metavar="80|86|89|90|100|120", help="With --source, of another GPU than the case's; without, 90."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the outputs and gradients of v1, v2 and v3. Exits with 1 if two of them differ."""
    from factorlayer.cli import compare

    refuse_recurrent(case, {"--source": source or None})
    if arch is not None and not source:
        refuse("--arch", "it says which GPU --source is for; give --source as well")
    problem = problem_of(case)
    kernels = sources_of(problem, arch, as_json) if source else {}
    report = compare.check(problem)
    say_unavailable(report.unavailable, case, as_json)
    typer.echo("\n".join(report.lines()), err=as_json)
    if as_json:
        print_json("check", case, {**report.to_json(), **kernels})
    raise typer.Exit(0 if report.passed else 1)


@app.command(cls=Command, epilog=f"Example: {PROGRAM} 16 20x36 28x44 profile --implementation v3 --trace v3.json")
@takes_a_case
def profile(
    case: "Case",
    implementation: Annotated[
        Version, typer.Option(help="v1 is naive, v2 batched, v3 fused, dense nn.Linear.")
    ] = Version.v3,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Where the trace goes; by default factorlayer_v3.json …"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many calls to profile.")] = 5,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward pass out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print PyTorch's profiler table of one implementation and write a trace."""
    from factorlayer.cli import measure

    version = implementation.number
    path = trace or Path(f"factorlayer_{version}.json")
    require_folder("--trace", path)
    problem = problem_of(case)
    add_dense(problem, [implementation], as_json)
    require_available(problem, [version])
    warm = gather(measure.warm_up(problem, version, forward_only), "warming up", measure.WARM_UP_STEPS)
    if warm.interrupted:
        say_interrupted("nothing was profiled yet, and no trace written", as_json)
        raise typer.Exit(INTERRUPTED)
    profiler, whole = measure.run_profiler(problem, version, forward_only, progress(range(steps), "profiling", steps))
    profiler.export_chrome_trace(str(path))
    typer.echo(measure.profile_table(profiler, case), err=as_json)
    typer.echo(f"The trace is in {path}: open it at https://ui.perfetto.dev or in chrome://tracing.", err=as_json)
    interrupted = whole < steps
    if interrupted:
        say_interrupted(f"{whole} of {steps} calls were profiled whole", as_json)
    if as_json:
        found = {"implementation": version, "trace": str(path), "interrupted": interrupted, "steps": whole}
        print_json("profile", case, {**found, "events": measure.profile_to_json(profiler)})
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command(
    cls=Command, epilog=f"Example: {PROGRAM} 32 128 128 bench --implementation v2 --implementation v3 --plot out.png"
)
@takes_a_case
def bench(
    case: "Case",
    implementation: Annotated[
        list[Version] | None, typer.Option(help="May be given several times; by default all.")
    ] = None,
    min_run_time: Annotated[float, typer.Option(min=0.001, max=3600, help="Seconds for each figure, at least.")] = 0.2,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Also draw a bar chart (needs matplotlib)."),
    ] = None,
    variants: Annotated[
        bool,
        typer.Option("--variants", help="Instead compare v3's ways to run it on a GPU: states, weights, tiles."),
    ] = False,
    arch: Annotated[
        int | None,
        typer.Option(metavar="80|86|89|90|100|120", help="With --variants on a CPU, which GPU; by default 90."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the implementations, forward and forward+backward."""
    from factorlayer.cli import measure

    refuse_recurrent(case, {"--variants": variants or None})
    if plot is not None:
        require_plot(plot)
    if variants:
        refuse_given("--variants times v3 only", {"--implementation": implementation, "--plot": plot})
    elif arch is not None:
        refuse("--arch", "it says which GPU --variants is for; give --variants as well")
    problem = problem_of(case)
    if variants:
        found = variants_of(problem, arch, min_run_time, as_json)
        if as_json:
            print_json("bench", case, found)
        raise typer.Exit(INTERRUPTED if found["interrupted"] else 0)
    add_dense(problem, implementation, as_json)
    versions = list(dict.fromkeys(version.number for version in implementation or ()))
    require_available(problem, versions)
    missing = problem.unavailable()
    versions = versions or [version for version in problem.modules if version not in missing]
    if not implementation:
        say_unavailable(missing, case, as_json)
    size, intensity = measure.state_size(problem), measure.arithmetic_intensity(problem)
    typer.echo(f"state size {size}, AI {intensity:.1e} (multiply-adds per element moved)", err=as_json)
    timed = gather(measure.bench(problem, versions, min_run_time), "timing", 2 * len(versions))
    typer.echo(measure.table(timed.found), err=as_json)
    if timed.interrupted:
        say_interrupted(f"{len(timed.found)} of {2 * len(versions)} figures were measured", as_json)
    if plot is not None and timed.found:
        measure.plot(timed.found, f"{case.subject}, state size {size}, batch {case.batch}", plot)
        typer.echo(f"The plot is in {plot}.", err=as_json)
    if as_json:
        figures = {"state_size": size, "arithmetic_intensity": intensity, "unavailable": missing}
        figures |= {"interrupted": timed.interrupted, "timings": [timing.to_json() for timing in timed.found]}
        print_json("bench", case, figures)
    if timed.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command(cls=Command, epilog=f"Example: {PROGRAM} --dtype b 4096 48 48 tune --export choices.json")
@may_take_a_case
def tune(
    case: "Case | None",
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write all choices that are kept here into a file, at last."),
    ] = None,
    import_: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", dir_okay=False, help="Keep the choices of such a file, at first."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time v3 and v2 here, and keep what is faster: `auto` takes it from then on, for such a layer and class of batch.
    Without BATCH, choices are exported or imported only."""
    if case is None and export is None and import_ is None:
        refuse("BATCH", f"say what to tune, or give --export or --import. For example: {PROGRAM} 4096 48 48 tune")
    if export is not None:
        require_folder("--export", export)
    if case is not None:
        refuse_recurrent(case, {"tune": True})
    found = move_choices("--import", import_, as_json)
    if case is not None:
        found |= choices_of(problem_of(case), as_json)
    found |= move_choices("--export", export, as_json)
    if as_json:
        configuration = {} if case is None else {"configuration": case.configuration()}
        typer.echo(json.dumps({"command": "tune", **configuration, **found}, allow_nan=False))
    raise typer.Exit(INTERRUPTED if found.get("interrupted") else 0)


OfModel = Annotated[
    str,
    typer.Option(
        "--model", metavar="FILE.py:FUNCTION", help="The function makes the model, an nn.Module.", show_default=False
    ),
]
OfCheckpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="FILE", dir_okay=False, help="The model's state_dict, or a converted model's."
    ),
]
OfMap = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="PATTERN=STRUCTURE,…",
        help="Which layers become what: '*.mlp.*=monarch,blocks=4,rank=8', '*.c_fc=kronecker,24x48,32x64,rank=2', "
        "'lm_head=none', or a JSON file. May be given several times; the first that selects a layer counts.",
    ),
]
OfBudget = Annotated[
    float | None,
    typer.Option(
        "--budget", help="Instead of --map: the parameters that the model may keep, a share below 1, or how many."
    ),
]
OfDevice = Annotated[
    str | None, typer.Option("--device", help="Where the model is moved: cpu, cuda …; by default it stays.")
]


@app.command(
    cls=Command,
    epilog=f"Example: {PROGRAM} convert --model nets.py:make_model --map '*.mlp.*=monarch,blocks=4' --output "
    "y.safetensors",
)
def convert(
    model: OfModel,
    checkpoint: OfCheckpoint = None,
    map: OfMap = None,
    budget: OfBudget = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Draw weights anew, instead of projecting the model's own.")
    ] = False,
    inputs: Annotated[
        str | None,
        typer.Option(
            "--inputs",
            metavar="FILE|FILE.py:FUNCTION",
            help="Fit the layers to what the dense ones return on batches: a .safetensors, .pt or .npy file of one or "
            "several, or a function that returns them.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors", dir_okay=False, help="Where the converted model goes; without, a dry run."
        ),
    ] = None,
    device: OfDevice = None,
    as_json: AsJson = False,
) -> None:
    """Swap a model's dense layers for structured ones, and write what comes of it."""
    from factorlayer.cli import models

    if (map is None) == (budget is None):
        refuse("--map", "say which layers become what by --map, or give --budget, and not both")
    if inputs is not None:
        refuse_given("--inputs fits layers from their projections on", {"--fresh": fresh or None})
    if output is not None:
        models.require_output(output)
    mapping = models.mapping_of(map or ())
    made = models.model_of(model, checkpoint, device)
    done = models.converted(made, mapping, budget, fresh, output, inputs)
    asked = {"model": model, "checkpoint": checkpoint and str(checkpoint), "inputs": inputs}
    asked |= {"output": output and str(output)}
    models.print_found("convert", done, asked, as_json)
    typer.echo(f"The converted model is in {output}." if output else "Nothing was written: give --output.", err=as_json)


@app.command(
    cls=Command, epilog=f"Example: {PROGRAM} report --model nets.py:make_model --map '*.mlp.*=monarch,blocks=4'"
)
def report(
    model: OfModel,
    checkpoint: OfCheckpoint = None,
    map: OfMap = None,
    budget: OfBudget = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples each layer gets.")] = 1,
    training: Annotated[bool, typer.Option("--training", help="Count gradients as well.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Also time the layers, on the model's device.")] = False,
    arch: Annotated[
        int | None,
        typer.Option(metavar="80|86|89|90|100|120", help="Predict times for a GPU of this compute capability."),
    ] = None,
    device: OfDevice = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also draw it (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model's layers have and take, dense and structured: of a converted checkpoint, or of what --map would
    do."""
    from factorlayer.cli import models

    if map is not None and budget is not None:
        refuse("--budget", "it proposes what --map says: give one of them")
    if plot is not None:
        require_plot(plot)
    mapping = models.mapping_of(map or ())
    made = models.model_of(model, checkpoint, device)
    found = models.reported(made, samples, mapping, budget, training, measure, arch)
    models.print_found("report", found, {"model": model, "checkpoint": checkpoint and str(checkpoint)}, as_json)
    if plot is not None:
        found.picture(plot)
        typer.echo(f"The picture is in {plot}.", err=as_json)


@app.command(cls=Command, epilog=f"Example: {PROGRAM} cache list")
def cache(
    action: Annotated[
        CacheAction, typer.Argument(help="What to do; verify exits with 1 if there are damaged files.")
    ] = CacheAction.list,
    size: Annotated[
        str | None,
        typer.Argument(
            metavar="SIZE",
            show_default=False,
            help="Of limit: the most that your files may take, in bytes, or as 500M or 2G.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List, verify, clear or limit the CUDA kernels and plans that are kept on disk. Past the limit, 1 GiB by default,
    those used least recently are removed."""
    from factorlayer.autograd import runtime
    from factorlayer.tuning import choices

    if size is not None and action is not CacheAction.limit:
        refuse("SIZE", f"it is what the cache is limited to, {action.value} takes none; {size} came")
    if size is not None:
        set_cache_limit(size)
    folder = None if choices.folder() is None else runtime.cache_folder()
    where = "no folder (neither HOME nor FACTORLAYER_CACHE is set)" if folder is None else folder
    entries, room = runtime.cache_entries(), runtime.cache_room()
    damaged = [entry for entry in entries if not entry.whole]
    if action is CacheAction.clear:
        summary = f"{runtime.clear_cache()} of {len(entries)} kernels and plans removed from {where}"
    elif action is CacheAction.verify:
        summary = f"{len(entries)} kernels and plans in {where}, {len(damaged)} damaged; {room}"
        summary += "; damaged ones are made again when they are needed" if damaged else ""
    else:
        summary = f"{len(entries)} kernels and plans in {where}; {room}"
    for entry in {CacheAction.list: entries, CacheAction.verify: damaged}.get(action, []):
        typer.echo(entry.line(), err=as_json)
    typer.echo(summary, err=as_json)
    if as_json:
        found = {"folder": folder and str(folder), **asdict(room), "entries": [asdict(entry) for entry in entries]}
        typer.echo(json.dumps({"command": "cache", "action": action.value, **found}))
    raise typer.Exit(1 if action is CacheAction.verify and damaged else 0)


def set_cache_limit(size: str) -> None:
    """Sets the cache's limit to a size as a user writes it: 500M are 500 times 1024² bytes."""
    from factorlayer.autograd import runtime

    number, unit = (size[:-1], size[-1].upper()) if size[-1:].upper() in ("K", "M", "G", "T") else (size, "")
    if not (number.isascii() and number.isdigit()):
        refuse("SIZE", f"it should be a number of bytes, or one with K, M, G or T behind it; {size!r} came")
    try:
        runtime.set_cache_limit(int(number) << 10 * " KMGT".index(unit or " "))
    except (ValueError, RuntimeError) as error:
        refuse("SIZE", str(error))


def refuse_recurrent(case: "Case", asked: dict[str, Any]) -> None:
    """What there is of layers and stacks only."""
    if case.subject.option == "--rnn":
        refuse_given("it is for layers, blocks and models, not for --rnn", asked)


def problem_of(case: "Case") -> "Problem":
    """The case's tensors."""
    from factorlayer.cli.case import Problem

    try:
        return Problem(case)
    except ValueError as error:
        refuse(case.subject.option, str(error))
    except (RuntimeError, MemoryError) as error:  # the sizes are valid, so that only memory can be missing
        message = f"a layer and samples of these sizes cannot be made on {case.device}: {error}"
        refuse(case.subject.option, message)


def add_dense(problem: "Problem", implementations: Sequence[Version] | None, as_json: bool) -> None:
    """Adds nn.Linear to what can be timed: if it was asked for, or if nothing else was."""
    from factorlayer.cli.case import DENSE
    from factorlayer.cli.linear import DenseUnavailableError, dense_of

    if implementations and Version.dense not in implementations:
        return
    try:
        dense = dense_of(problem.case)
    except DenseUnavailableError as error:
        if implementations:
            refuse("--implementation", f"dense cannot run: {error}; choose another of v1, v2 and v3")
        if "model" not in problem.modules:
            typer.echo(f"dense is left out: {error}", err=as_json)
        return
    problem.modules[DENSE] = dense
    typer.echo(f"dense is {dense}", err=as_json)


def say_interrupted(what_there_is: str, as_json: bool) -> None:
    typer.echo(f"interrupted: {what_there_is}", err=as_json)


def print_json(command: str, case: "Case", result: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"command": command, "configuration": case.configuration(), **result}, allow_nan=False))


def main() -> None:
    app(prog_name=PROGRAM)
