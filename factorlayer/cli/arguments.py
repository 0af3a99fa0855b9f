"""The arguments that every command shares, BATCH, FACTOR... and options, and the case that they describe. grammar.py
says in what order they may stand; app.py declares the commands.

torch is imported when a command runs, not before: --help needs none of it. Typer reads the
annotations, so they are not deferred in this file and in app.py.
"""

import inspect
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factorlayer.cli.grammar import EXAMPLE, complete_a_size, complete_an_activation
from factorlayer.cli.refusals import refuse, refuse_given, worded

if TYPE_CHECKING:
    from factorlayer.cli.case import Case
    from factorlayer.cli.subject import Subject
    from factorlayer.maths import recurrence, spec


class Dtype(str, Enum):
    f, d, h, b = "f", "d", "h", "b"


class Structure(str, Enum):
    kronecker, monarch = "kronecker", "monarch"
    dense, blocks = "dense", "blocks"


class Reset(str, Enum):
    after, before = "after", "before"


class Version(str, Enum):
    v1, v2, v3 = "v1", "v2", "v3"
    naive, batched, fused = "naive", "batched", "fused"
    model, dense = "model", "dense"

    @property
    def number(self) -> str:
        return {"naive": "v1", "batched": "v2", "fused": "v3"}.get(self.value, self.value)


class CacheAction(str, Enum):
    list, verify, clear, limit = "list", "verify", "clear", "limit"


def layer_option(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="The layer", **settings)


def model_option(help: str, metavar: str, **settings: Any) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="The block or model", **settings)


def batch_of(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise typer.BadParameter(f"BATCH should be a number of samples, 0 or more; it is {text!r}")
    return int(text)


def case_of(
    batch: Annotated[
        int,
        typer.Argument(metavar="BATCH", parser=batch_of, help="Samples; 0 is allowed.", autocompletion=complete_a_size),
    ],
    factors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FACTOR",
            show_default=False,
            autocompletion=complete_a_size,
            help="Sizes of the modes: 32, or 20x36 for in x out. With --mlp, the widths: 512, or 1024=32*32; with "
            "--rnn, STEPS before the sizes.",
        ),
    ] = None,
    dtype: Annotated[Dtype, layer_option("float32, float64 (d), float16 (h) or bfloat16 (b).")] = Dtype.f,
    structure: Annotated[
        Structure | None,
        layer_option(
            "How the modes make up the matrix; by default kronecker. dense and blocks are for --rnn.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        layer_option("Products added up, or the rank of Monarch's blocks; by default 1.", min=1, show_default=False),
    ] = None,
    activation: Annotated[
        str | None,
        layer_option(
            "relu, gelu, silu, tanh, sine …, or FILE.py:FUNCTION, of one tensor; by default none, in an MLP relu, in a "
            "GRU tanh.",
            metavar="NAME",
            autocompletion=complete_an_activation,
        ),
    ] = None,
    bias: Annotated[
        bool | None, layer_option("Whether the layers have a bias; by default they do.", show_default=False)
    ] = None,
    mlp: Annotated[
        bool,
        typer.Option(
            "--mlp",
            help="A FactorMLP: between widths with as many factors a structured layer, else a dense one.",
            rich_help_panel="The block or model",
        ),
    ] = False,
    rnn: Annotated[
        bool,
        typer.Option(
            "--rnn",
            help="A FactorGRU: BATCH STEPS and sizes, of the input x the state where they differ.",
            rich_help_panel="The block or model",
        ),
    ] = False,
    reset: Annotated[
        Reset | None,
        model_option("With --rnn: the product is reset, or the state before it; by default after.", "after|before"),
    ] = None,
    model: Annotated[
        str | None,
        model_option("A model of your own, in eval mode: what the function returns.", "FILE.py:FUNCTION"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        model_option("The model's state_dict, or a converted model's.", "FILE", exists=True, dir_okay=False),
    ] = None,
    input: Annotated[
        str | None,
        model_option("Shape of a sample of the model: 3,32. By default its first layer's features.", "SIZES"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 …; by default cuda where there is one."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default PyTorch's.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the parameters, x and grad_y.")] = 0,
) -> "Case":
    """The case that the arguments and options of every command describe."""
    import torch

    from factorlayer.cli.case import DTYPES, Case, usable_device

    if threads is not None:
        torch.set_num_threads(threads)
    layer = {"--structure": structure, "--rank": rank, "--activation": activation, "--bias": bias, "--mlp": mlp or None}
    layer |= {"--rnn": rnn or None, "--reset": reset}
    subject: Subject
    if model is not None:
        refuse_given("they are the model's own", {"FACTOR": factors, **layer})
        torch.manual_seed(seed)
        subject = own_model(model, checkpoint, input)
    else:
        refuse_given("they are for a model; give --model", {"--checkpoint": checkpoint, "--input": input})
        if not factors:
            refuse("FACTOR", f"BATCH should be followed by one or more. For example: {EXAMPLE}")
        kind = structure or Structure.kronecker
        if rnn:
            refuse_given("it is another module than --rnn is", {"--mlp": mlp or None})
            subject = recurrent(factors, kind.value, rank or 1, activation, bias, (reset or Reset.after).value)
        elif kind is Structure.kronecker or kind is Structure.monarch:
            refuse_given("it is for a recurrent layer; give --rnn", {"--reset": reset})
            subject = layer_or_block(factors, mlp, kind.value, rank or 1, activation, bias)
        else:
            refuse("--structure", f"{kind.value} is for --rnn; without it, kronecker of one FACTOR is dense")
    where = worded("--device", lambda: usable_device(device, DTYPES[dtype.value]))
    return Case(subject, batch, DTYPES[dtype.value], where, seed)


def layer_or_block(
    factors: list[str], mlp: bool, structure: "spec.Structure", rank: int, activation: str | None, bias: bool | None
) -> "Subject":
    from factorlayer.cli.subject import Block, Single, parse_activation, parse_factor, parse_width, spec_of_factors

    name = worded("--activation", lambda: parse_activation(activation or ("relu" if mlp else "none")))
    if mlp:
        widths = worded("WIDTH", lambda: [parse_width(width) for width in factors])
        return Block(tuple(widths), structure, rank, name, bias is not False)
    sizes = worded("FACTOR", lambda: [parse_factor(factor) for factor in factors])
    return Single(worded("--rank", lambda: spec_of_factors(structure, sizes, rank)), name, bias is not False)


def recurrent(
    factors: list[str],
    structure: "recurrence.GateStructure",
    rank: int,
    activation: str | None,
    bias: bool | None,
    reset: "recurrence.Reset",
) -> "Subject":
    from factorlayer.cli.subject import parse_activation, recurrent_of

    name = worded("--activation", lambda: parse_activation(activation or "tanh"))
    steps, *sizes = factors
    return worded("--rnn", lambda: recurrent_of(steps, sizes, structure, rank, name, bias is not False, reset))


def own_model(name: str, checkpoint: Path | None, input: str | None) -> "Subject":
    from factorlayer.cli.subject import Own, make_model, parse_shape, sample_shape

    module = worded("--model", lambda: make_model(name))
    if checkpoint is not None:
        from factorlayer.cli.models import load

        load(module, checkpoint)
    given = None if input is None else worded("--input", lambda: parse_shape(input))
    shape = worded("--model", lambda: sample_shape(module, given))
    return Own(module, shape, name, None if checkpoint is None else str(checkpoint))


def takes_a_case(command: Callable[..., None]) -> Callable[..., None]:
    """Gives command(case, …) the arguments and options of case_of in place of `case`."""
    return _with_a_case(command, dict(inspect.signature(case_of).parameters))


def may_take_a_case(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command what takes_a_case gives it, but `case` is None where no BATCH was given."""
    shared = dict(inspect.signature(case_of).parameters)
    return _with_a_case(command, shared | {"batch": shared["batch"].replace(default=None)})


def _with_a_case(command: Callable[..., None], shared: dict[str, inspect.Parameter]) -> Callable[..., None]:
    own = dict(list(inspect.signature(command).parameters.items())[1:])

    def run(**given: Any) -> None:
        words = {name: given.pop(name) for name in shared}
        command(None if words["batch"] is None else case_of(**words), **given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (shared | own).values()]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run
