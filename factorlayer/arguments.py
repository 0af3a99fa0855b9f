"""How the command line is read: BATCH, FACTOR... and the options that every command shares, and where the
command stands among them. cli.py declares the commands.

torch is imported when a command runs, not before: --help needs none of it. Typer reads the
annotations, so they are not deferred in this file and in cli.py.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from factorlayer.case import Case

T = TypeVar("T")
EXAMPLE = "python test.py 16 32 32 check"


class Dtype(str, Enum):
    f, d, h, b = "f", "d", "h", "b"


class Structure(str, Enum):
    kronecker, monarch = "kronecker", "monarch"


class Version(str, Enum):
    v1, v2, v3 = "v1", "v2", "v3"
    naive, batched, fused = "naive", "batched", "fused"

    @property
    def number(self) -> str:
        return {"naive": "v1", "batched": "v2", "fused": "v3"}.get(self.value, self.value)


class CacheAction(str, Enum):
    list, verify, clear = "list", "verify", "clear"


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


def case_of(
    batch: Annotated[int, typer.Argument(metavar="BATCH", min=0, help="Samples; 0 is allowed.")],
    factors: Annotated[
        list[str], typer.Argument(metavar="FACTOR", help="Sizes of the modes: 32, or 20x36 for in x out.")
    ],
    dtype: Annotated[Dtype, layer_option("float32, float64 (d), float16 (h) or bfloat16 (b).")] = Dtype.f,
    structure: Annotated[Structure, layer_option("How the modes make up the matrix.")] = Structure.kronecker,
    rank: Annotated[int, layer_option("Products added up, or the rank of Monarch's blocks.", min=1)] = 1,
    activation: Annotated[str, layer_option("relu, gelu, silu, tanh, sine …", metavar="NAME")] = "none",
    bias: Annotated[bool, layer_option("Whether the layer has a bias.")] = True,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 …; by default cuda where there is one."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default PyTorch's.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the weights, x and grad_y.")] = 0,
) -> "Case":
    """The case that the arguments and options of every command describe."""
    import torch

    from factorlayer.activations import activation_name
    from factorlayer.case import DTYPES, Case, parse_factor, spec_of_factors, usable_device

    if threads is not None:
        torch.set_num_threads(threads)
    sizes = worded("FACTOR", lambda: [parse_factor(factor) for factor in factors])
    spec = worded("--rank", lambda: spec_of_factors(structure.value, sizes, rank))
    name = worded("--activation", lambda: activation_name(activation))
    where = worded("--device", lambda: usable_device(device, DTYPES[dtype.value]))
    return Case(spec, batch, DTYPES[dtype.value], where, name, bias, seed)


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
