"""The order of words on the command line: BATCH FACTOR... and then the command, or the other way around, and options
anywhere. And what depends on it: which word was meant by one that is none, what a shell completes, the program's name.

app.py declares its commands of these classes.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from factorlayer.activations.nearest import did_you_mean, nearest

INSTALLED = "factorlayer"
PROGRAM = INSTALLED if Path(sys.argv[0]).stem == INSTALLED else "python test.py"
EXAMPLE = f"{PROGRAM} 16 32 32 check"
UNDECIDED = "check|profile|bench"  # the command, while a shell completes a line that has none yet
LONG_NAMES = {"float": "f", "float32": "f", "fp32": "f", "double": "d", "float64": "d", "fp64": "d"}
LONG_NAMES |= {"half": "h", "float16": "h", "fp16": "h", "bfloat16": "b", "bf16": "b"}


class Command(TyperCommand):
    """A command whose refusal of a word says which one was meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            refused = re.search("'(.*)' is not one of (.*[^.])", error.message)
            if refused:
                error.message = refused[0] + did_you_mean(_meant(refused[1], re.findall("'(.*?)'", refused[2])))
            raise


def _meant(came: str, names: list[str]) -> str | None:
    if names == list("fdhb"):
        return LONG_NAMES.get(nearest(came, LONG_NAMES) or "")
    return nearest(came, names)


class CommandAnywhere(TyperGroup):
    """A group whose command may stand behind its own arguments: its name is moved to the front."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, self._for_completion(args))
        for i, arg in enumerate(args):
            if arg.split("=")[0] in self._own_options():
                if "completion" in arg and ctx.info_name != INSTALLED:
                    ctx.fail(f"a shell completes the installed program only: `{INSTALLED} {arg}`; {PROGRAM} came")
                return super().parse_args(ctx, args[i:])
        positional = list(self._positional(args))
        found = [i for i in positional if args[i] in self.commands]
        for i in positional:
            if re.match(r"-[0-9]", args[i]):
                ctx.fail(f"BATCH should be 0 or more and each FACTOR a positive size; {args[i]} came")
        if len(found) > 1:
            ctx.fail(f"one command at a time, {' and '.join(args[i] for i in found)} came")
        if found:
            args = self._first(args, found[0])
        elif {"--help", "-h"} & set(args):
            args = ["--help"]
        elif args:
            ctx.fail(self._no_command([args[i] for i in positional if args[i][0].isalpha()]))
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of that name. While a shell completes a line that has none yet, it is one that takes every
        command's options."""
        if name == UNDECIDED and ctx.resilient_parsing:
            own = {parameter.name: parameter for parameter in self.params}
            taken = {p.name: p for command in self._with_a_case() for p in command.params}
            return Command(UNDECIDED, params=[*(taken | own).values()])
        return super().get_command(ctx, name)

    def _for_completion(self, args: list[str]) -> list[str]:
        found = [i for i in self._positional(args) if args[i] in self.commands]
        return self._first(args, found[0]) if found else [UNDECIDED, *args]

    @staticmethod
    def _first(args: list[str], i: int) -> list[str]:
        return [args[i], *args[:i], *args[i + 1 :]]

    def _no_command(self, words: list[str]) -> str:
        """The sentence that refuses a line without one. `words` are those that might have been meant as one."""
        meant = [word for word in words if nearest(word, self.commands)]
        word = (meant or words[-1:] or [""])[0]
        came = f", there is no command {word!r}{did_you_mean(nearest(word, self.commands))}" if word else ""
        return (
            f"say what to do: check, profile or bench{came}{'' if came.endswith('?') else '.'} For example: {EXAMPLE}"
        )

    def _with_a_case(self) -> list[Any]:
        return [command for command in self.commands.values() if takes_a_batch(command)]

    def _own_options(self) -> set[str]:
        return {name for p in self.params for name in p.opts}

    def _positional(self, args: list[str]) -> Iterator[int]:
        """The places of arguments that are no option and no option's value: in `--trace check`, check names a file."""
        options = [p for command in self.commands.values() for p in command.params if p.param_type_name == "option"]
        with_value = {name for p in options if not getattr(p, "is_flag", False) for name in p.opts}
        for i, arg in enumerate(args):
            is_option = arg.startswith("-") and not re.match(r"-[0-9]", arg)
            if arg and not is_option and not (i and args[i - 1] in with_value):
                yield i


def takes_a_batch(command: Any) -> bool:
    return any(parameter.name == "batch" for parameter in command.params)


def complete_a_size(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """What may stand in the place of a BATCH or FACTOR while the line has no command: the commands."""
    if ctx.command.name != UNDECIDED or ctx.parent is None:
        return []
    commands: dict[str, Any] = ctx.parent.command.commands  # type: ignore[attr-defined]
    return [
        (name, command.get_short_help_str())
        for name, command in commands.items()
        if name.startswith(incomplete) and (not ctx.params.get("batch") or takes_a_batch(command))
    ]


def complete_an_activation(incomplete: str) -> list[str]:
    """The named ones."""
    from factorlayer.activations.named import ACTIVATIONS

    return [name for name in ("none", *ACTIVATIONS) if name.startswith(incomplete)]
