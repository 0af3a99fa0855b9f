"""How the command line is read: BATCH, FACTOR... and the options that every command shares, and where the
command stands among them. cli.py declares the commands.

torch is imported when a command runs, not before: --help needs none of it. Typer reads the
annotations, so they are not deferred in this file and in cli.py.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from factorlayer import spec
    from factorlayer.case import Case
    from factorlayer.subject import Subject

T = TypeVar("T")
EXAMPLE = "python test.py 16 32 32 check"


class Dtype(str, Enum):
    f, d, h, b = "f", "d", "h", "b"


class Structure(str, Enum):
    kronecker, monarch = "kronecker", "monarch"


class Version(str, Enum):
    v1, v2, v3 = "v1", "v2", "v3"
    naive, batched, fused = "naive", "batched", "fused"
    model = "model"

    @property
    def number(self) -> str:
        return {"naive": "v1", "batched": "v2", "fused": "v3"}.get(self.value, self.value)


class CacheAction(str, Enum):
    list, verify, clear, limit = "list", "verify", "clear", "limit"


class CommandAnywhere(TyperGroup):
    """A group whose command may stand behind its own arguments: its name is moved to the front."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        positional = list(self._positional(args))
        found = [i for i in positional if args[i] in self.commands]
        for i in positional:
            if re.match(r"-[0-9]", args[i]):
                ctx.fail(f"BATCH should be 0 or more and each FACTOR a positive size; {args[i]} came")
        if len(found) > 1:
            ctx.fail(f"one command at a time, {' and '.join(args[i] for i in found)} came")
        if found:
            args = [args[found[0]], *args[: found[0]], *args[found[0] + 1 :]]
        elif {"--help", "-h"} & set(args):
            args = ["--help"]
        elif args:
            words = [args[i] for i in positional if args[i][0].isalpha()]
            came = f", there is no command {words[-1]!r}" if words else ""
            ctx.fail(f"say what to do: check, profile or bench{came}. For example: {EXAMPLE}")
        return super().parse_args(ctx, args)

    def _positional(self, args: list[str]) -> Iterator[int]:
        """Where no option and no option's value stands: `--trace check` names a file."""
        options = [p for command in self.commands.values() for p in command.params if p.param_type_name == "option"]
        with_value = {name for p in options if not getattr(p, "is_flag", False) for name in p.opts}
        for i, arg in enumerate(args):
            is_option = arg.startswith("-") and not re.match(r"-[0-9]", arg)
            if arg and not is_option and not (i and args[i - 1] in with_value):
                yield i


def layer_option(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="The layer", **settings)


def model_option(help: str, metavar: str, **settings: Any) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="The block or model", **settings)


def case_of(
    batch: Annotated[int, typer.Argument(metavar="BATCH", min=0, help="Samples; 0 is allowed.")],
    factors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FACTOR",
            show_default=False,
            help="Sizes of the modes: 32, or 20x36 for in x out. With --mlp, the widths: 512, or 1024=32*32.",
        ),
    ] = None,
    dtype: Annotated[Dtype, layer_option("float32, float64 (d), float16 (h) or bfloat16 (b).")] = Dtype.f,
    structure: Annotated[
        Structure | None, layer_option("How the modes make up the matrix; by default kronecker.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None,
        layer_option("Products added up, or the rank of Monarch's blocks; by default 1.", min=1, show_default=False),
    ] = None,
    activation: Annotated[
        str | None,
        layer_option(
            "relu, gelu, silu, tanh, sine …, or FILE.py:FUNCTION, of one tensor; by default none, in an MLP relu.",
            metavar="NAME",
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
    model: Annotated[
        str | None,
        model_option("A model of your own, in eval mode: what the function returns.", "FILE.py:FUNCTION"),
    ] = None,
    checkpoint: Annotated[
        Path | None, model_option("A state_dict to load into the model.", "FILE", exists=True, dir_okay=False)
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

    from factorlayer.case import DTYPES, Case, usable_device

    if threads is not None:
        torch.set_num_threads(threads)
    layer = {"--structure": structure, "--rank": rank, "--activation": activation, "--bias": bias, "--mlp": mlp or None}
    subject: Subject
    if model is not None:
        refuse_given("they are the model's own", {"FACTOR": factors, **layer})
        torch.manual_seed(seed)
        subject = own_model(model, checkpoint, input)
    else:
        refuse_given("they are for a model; give --model", {"--checkpoint": checkpoint, "--input": input})
        if not factors:
            refuse("FACTOR", f"BATCH should be followed by one or more. For example: {EXAMPLE}")
        subject = layer_or_block(factors, mlp, (structure or Structure.kronecker).value, rank or 1, activation, bias)
    where = worded("--device", lambda: usable_device(device, DTYPES[dtype.value]))
    return Case(subject, batch, DTYPES[dtype.value], where, seed)


def layer_or_block(
    factors: list[str], mlp: bool, structure: "spec.Structure", rank: int, activation: str | None, bias: bool | None
) -> "Subject":
    from factorlayer.subject import Block, Single, parse_activation, parse_factor, parse_width, spec_of_factors

    name = worded("--activation", lambda: parse_activation(activation or ("relu" if mlp else "none")))
    if mlp:
        widths = worded("WIDTH", lambda: [parse_width(width) for width in factors])
        return Block(tuple(widths), structure, rank, name, bias is not False)
    sizes = worded("FACTOR", lambda: [parse_factor(factor) for factor in factors])
    return Single(worded("--rank", lambda: spec_of_factors(structure, sizes, rank)), name, bias is not False)


def own_model(name: str, checkpoint: Path | None, input: str | None) -> "Subject":
    from factorlayer.subject import Own, load_checkpoint, make_model, parse_shape, sample_shape

    module = worded("--model", lambda: make_model(name))
    if checkpoint is not None:
        worded("--checkpoint", lambda: load_checkpoint(module, checkpoint))
    given = None if input is None else worded("--input", lambda: parse_shape(input))
    shape = worded("--model", lambda: sample_shape(module, given))
    return Own(module, shape, name, None if checkpoint is None else str(checkpoint))


def refuse_given(why: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None and value != []:
            refuse(name, f"it was given where it has no meaning: {why}")


def worded(hint: str, make: Callable[[], T]) -> T:
    """What `make` returns; its ValueError becomes a message about wrong usage, without a traceback."""
    try:
        return make()
    except ValueError as error:
        refuse(hint, str(error))


def refuse(hint: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=f"'{hint}'")


def takes_a_case(command: Callable[..., None]) -> Callable[..., None]:
    """Gives command(case, …) the arguments and options of case_of in place of `case`."""
    shared = inspect.signature(case_of).parameters
    own = dict(list(inspect.signature(command).parameters.items())[1:])

    def run(**given: Any) -> None:
        case = case_of(**{name: given.pop(name) for name in shared})
        command(case, **given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (shared | own).values()]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run
