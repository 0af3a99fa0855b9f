"""What the command line works on: one layer, a block given by its widths, a recurrent layer, or a model of the user's
own.

arguments.py makes one of what the user typed; case.py makes tensors for it.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factorlayer.activations.formula import formula
from factorlayer.activations.named import activation_name
from factorlayer.activations.nearest import did_you_mean, nearest
from factorlayer.activations.texts import activation_of
from factorlayer.layers import FactorLinear
from factorlayer.maths.recurrence import GateStructure, Reset
from factorlayer.maths.spec import LayerSpec, Structure
from factorlayer.mlp import FactorMLP, Width
from factorlayer.recurrent import FactorGRU
from factorlayer.stacks.stack import layer_of

Activation = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Single:
    """One FactorLinear."""

    spec: LayerSpec
    activation: Activation = "identity"
    bias: bool = True
    option: ClassVar = "FACTOR"  # what asked for it

    def __str__(self) -> str:
        return self.spec.structure

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return (self.spec.in_features,)

    def make(self) -> nn.Module:
        """The layer in float64, with the parameters that torch's seed means."""
        spec = self.spec
        return FactorLinear(
            spec.in_features,
            spec.out_features,
            self.bias,
            structure=spec.structure,
            factors=(spec.in_factors, spec.out_factors),
            rank=spec.rank,
            activation=copy.deepcopy(self.activation),
            dtype=torch.float64,
        )

    def configuration(self) -> dict[str, Any]:
        """What was asked, for --json."""
        spec = self.spec
        sizes = {"in_factors": spec.in_factors, "out_factors": spec.out_factors}
        return {
            **sizes,
            "structure": spec.structure,
            "rank": spec.rank,
            "activation": _stage(self.activation),
            "bias": self.bias,
        }


@dataclass(frozen=True)
class Block:
    """A FactorMLP."""

    widths: tuple[Width, ...]
    structure: Structure = "kronecker"
    rank: int = 1
    activation: Activation = "identity"
    bias: bool = True
    option: ClassVar = "--mlp"

    def __str__(self) -> str:
        widths = [width if isinstance(width, int) else math.prod(width) for width in self.widths]
        return f"MLP {'-'.join(map(str, widths))}, {formula(_stage(self.activation))}"

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.widths[0]
        return (first if isinstance(first, int) else math.prod(first),)

    def make(self) -> nn.Module:
        return FactorMLP(
            self.widths,
            activation=copy.deepcopy(self.activation),
            bias=self.bias,
            structure=self.structure,
            rank=self.rank,
            dtype=torch.float64,
        )

    def configuration(self) -> dict[str, Any]:
        kind = {"widths": self.widths, "structure": self.structure, "rank": self.rank}
        return {**kind, "activation": _stage(self.activation), "bias": self.bias}


@dataclass(frozen=True)
class Own:
    """A model of the user's, in eval mode."""

    module: nn.Module
    shape: tuple[int, ...]
    name: str  # path.py:function
    checkpoint: str | None = None
    option: ClassVar = "--model"

    def __str__(self) -> str:
        return self.name

    def make(self) -> nn.Module:
        return copy.deepcopy(self.module).double()

    def configuration(self) -> dict[str, Any]:
        return {"model": self.name, "checkpoint": self.checkpoint, "input": self.shape}


class Outputs(FactorGRU):
    """A FactorGRU that returns its outputs alone."""

    def forward(self, input: Any, hx: Any = None, **further: Any) -> Any:
        return super().forward(input, hx, **further)[0]


@dataclass(frozen=True)
class Recurrent:
    """A FactorGRU, over so many steps."""

    steps: int
    factors: tuple[tuple[int, int], ...]  # of the input, and of the state
    structure: GateStructure = "kronecker"
    rank: int = 1
    activation: Activation = "tanh"
    bias: bool = True
    reset: Reset = "after"
    option: ClassVar = "--rnn"

    def __str__(self) -> str:
        return f"GRU, {self.steps} step{'s' * (self.steps != 1)}, {self.structure}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.steps, math.prod(p for p, _ in self.factors))

    def make(self) -> nn.Module:
        inputs, hidden = zip(*self.factors, strict=True)
        sizes: dict[str, Any] = {"factors": hidden, "input_factors": inputs, "rank": self.rank}
        if self.structure in ("dense", "blocks"):
            sizes = {"blocks": inputs[0]} if self.structure == "blocks" else {}
        return Outputs(
            math.prod(inputs),
            math.prod(hidden),
            bias=self.bias,
            dtype=torch.float64,
            structure=self.structure,
            activation=copy.deepcopy(self.activation),
            reset=self.reset,
            **sizes,
        )

    def configuration(self) -> dict[str, Any]:
        kind = {"steps": self.steps, "factors": self.factors, "structure": self.structure, "rank": self.rank}
        return {**kind, "activation": _stage(self.activation), "bias": self.bias, "reset": self.reset}


Subject = Single | Block | Recurrent | Own


def parse_factor(text: str) -> tuple[int, int]:
    """'32' is (32, 32), '20x36' is (20, 36): in and out."""
    match = re.fullmatch(r"([0-9]{1,18})(?:x([0-9]{1,18}))?", text)
    sizes = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if min(sizes) < 1:
        raise ValueError(f"a FACTOR should be a positive size or two, such as 32 or 20x36 (in x out); it is {text!r}")
    return sizes


def spec_of_factors(structure: Structure, factors: Sequence[tuple[int, int]], rank: int) -> LayerSpec:
    """The layer that FACTOR… means on the command line."""
    in_factors, out_factors = zip(*factors, strict=True)
    return LayerSpec(structure, in_factors, out_factors, rank)


def parse_width(text: str) -> Width:
    """'512' is 512, '1024=32*32' is (32, 32)."""
    match = re.fullmatch(r"([0-9]{1,18})(?:=([0-9]{1,18}(?:\*[0-9]{1,18})*))?", text)
    width = int(match[1]) if match else 0
    factors = tuple(map(int, match[2].split("*"))) if match and match[2] else (width,)
    if width < 1 or min(factors) < 1:
        raise ValueError(f"a WIDTH should be a positive size, or with its factors 1024=32*32; it is {text!r}")
    if math.prod(factors) != width:
        raise ValueError(
            f"the factors of a WIDTH should multiply up to it; those of {text!r} make {math.prod(factors)}"
        )
    return factors if match and match[2] else width


def recurrent_of(
    steps: str, factors: Sequence[str], structure: GateStructure, rank: int, name: Activation, bias: bool, reset: Reset
) -> Recurrent:
    """What STEPS and FACTOR… mean with --rnn."""
    if not re.fullmatch("[0-9]{1,18}", steps) or not factors:
        came = " ".join([steps, *factors])
        raise ValueError(f"BATCH should be followed by STEPS and sizes, such as 16 1024 32 32; {came} came behind it")
    sizes = tuple(map(parse_factor, factors))
    wanted = {"dense": 1, "blocks": 2}.get(structure, len(sizes))
    if len(sizes) != wanted or (structure == "blocks" and sizes[0][0] != sizes[0][1]):
        what = {
            "dense": "one, or 256x512 for in x out",
            "blocks": "how many blocks there are, and the size of one",
        }
        raise ValueError(f"sizes should be {what[structure]}, of structure {structure}; they are {' '.join(factors)}")
    if rank != 1 and structure in ("dense", "blocks"):
        raise ValueError(f"a rank of structure {structure} has no meaning; it is {rank}")
    return Recurrent(int(steps), sizes, structure, rank, name, bias, reset)


def parse_shape(text: str) -> tuple[int, ...]:
    """'3,32' is (3, 32)."""
    if not re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text):
        raise ValueError(
            f"the shape of a sample should be sizes with commas between them, such as 3,32; it is {text!r}"
        )
    return tuple(map(int, text.split(",")))


def parse_activation(text: str) -> Activation:
    """A name, or a function or module in a file of the user's."""
    if ":" not in text:
        return activation_name(text)
    found = _find(text)
    activation: Activation = _of_the_user(f"{text}()", found) if isinstance(found, type) else found
    try:
        activation_of(activation)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return activation


def _stage(activation: Activation) -> str:
    return activation_of(activation)[0]


def returned(name: str) -> Any:
    """What a function in a file of the user's makes, path/to/file.py:function; of an iterator, all that comes of it."""
    function = _find(name)

    def run() -> Any:
        found = function()
        return list(found) if isinstance(found, Iterator) else found

    return _of_the_user(f"{name}()", run)


def make_model(name: str) -> nn.Module:
    """The model that a function in a user's file returns, in eval mode."""
    model = returned(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}() should return an nn.Module; it returned {type(model).__name__}")
    return model.eval()


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """A state_dict, as torch.save or safetensors wrote it."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # there are as many kinds as ways to be no checkpoint
        raise ValueError(
            f"{path} cannot be read as a state_dict ({type(error).__name__}); write one with "
            "torch.save(model.state_dict(), …) or with safetensors"
        ) from error
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None


def sample_shape(model: nn.Module, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a sample: the one given, or the features of the model's first layer."""
    if given is not None:
        return given
    for part in model.modules():
        if layer_of(part) is not None:
            return (part.in_features,)  # type: ignore[return-value]  # which both kinds of layers have
    raise ValueError(f"{type(model).__name__} has no nn.Linear and no FactorLinear: there is nothing to compare")


def _find(name: str) -> Callable[..., Any]:
    """A function of a file: path/to/file.py:function."""
    path, _, function = name.rpartition(":")
    if not path or not function:
        raise ValueError(f"a function of your own should be given as path/to/file.py:function; it is {name!r}")
    module = _run_file(Path(path))
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        functions = [name for name, of in vars(module).items() if callable(of) and not name.startswith("__")]
        came = f"it has a {type(found).__name__} of that name" if hasattr(module, function) else "it has none"
        meant = did_you_mean(nearest(function, functions))
        raise ValueError(f"{path} should have a function {function}; {came}{meant}")
    return found


def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"a Python file that exists should be given before the function; there is no {path}")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _of_the_user(str(path), lambda: loader.exec_module(module))
    return module


def _of_the_user(what: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{what} raised {type(error).__name__}: {error} (line {at.lineno} of {at.filename})"
        ) from error
