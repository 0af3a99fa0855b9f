"""fuse: a model's layers and activations as stacks, with the model's own parameters.

torch.fx finds what stands one behind another. What is no layer and no activation stays as it is, between stacks. What
torch.fx cannot trace runs its own forward, with what is fused in its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from factorlayer.functional import Implementation, implementation_name
from factorlayer.layers import is_compiled, is_hooked
from factorlayer.mlp import FactorMLP
from factorlayer.stacks.graph import Reasons, signature
from factorlayer.stacks.pieces import InParts, Whole, piece_of
from factorlayer.stacks.stack import STATE_HOOKS, LayerStack, RunsAsStacks

if TYPE_CHECKING:
    from typing_extensions import Self


@overload
def fuse(module: FactorMLP, implementation: Implementation = "auto", inplace: bool = False) -> FactorMLP: ...
@overload
def fuse(
    module: nn.Module, implementation: Implementation = "auto", inplace: Literal[False] = False
) -> RunsAsStacks: ...
@overload
def fuse(module: nn.Module, implementation: Implementation = "auto", *, inplace: bool) -> nn.Module: ...
def fuse(module: nn.Module, implementation: Implementation = "auto", inplace: bool = False) -> nn.Module:
    """The module, run as stacks of its Linear and FactorLinear layers with the activations behind them.

    The parameters are the module's own, under their names: optimizers and checkpoints go on with either. What cannot be
    in a stack is called as before; a module that torch.fx cannot trace runs its own forward, with its parts fused.
    `explain()` of what is returned says what runs how. Where arguments come that the trace left out, and where the
    module has been changed since (an attribute, a part, a hook), its own forward runs, with a warning: fuse it again.
    Python's globals are those of now.

    Args:
        inplace: puts each part that can be fused into the module as what fuse returns for it, and returns the module
            itself, whose class, methods and hooks stay; torch.compile and torch.export follow it. A module that is
            itself what can be fused becomes what fuse returns for it: it stays the same object, and is no instance of
            its old class any more.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fuse: module should be an nn.Module, it is {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "fuse: module is of torch.jit, whose code is compiled; fuse what it is made of, then trace that"
        )
    chosen = implementation_name(implementation, "fuse")
    if isinstance(module, FactorMLP):
        return module
    given = module.module if isinstance(module, Fused) else module
    if is_compiled(module):
        raise ValueError(
            f"fuse: {type(module).__name__} is compiled, and would go on as it was; fuse it with inplace=True "
            "before, and compile what that returns"
        )
    paths = list(piece_of(given, "", Reasons(), chosen, is_part=True).places()) if inplace else [""]
    if "" in paths and is_hooked(given):
        raise ValueError(
            f"fuse: {type(given).__name__} has hooks or a forward of its own, which would not run; fuse it without, "
            "and put them on what fuse returns"
        )
    if not inplace:
        return Fused(given, chosen)
    if not paths:
        warnings.warn(f"fuse: nothing in {type(given).__name__} can be fused that is not yet", stacklevel=2)
    _put_into(module, given, paths, chosen)
    return module if "" in paths else given


def _put_into(module: nn.Module, given: nn.Module, paths: list[str], implementation: Implementation) -> None:
    """Puts what fuse makes of the parts of `given` at some paths in their places: all, or none. A path comes behind
    those within it; `module` takes the place of `given` itself."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for part in dict.fromkeys([given.get_submodule(path) for path in paths]):
            if part is given:
                _become_fused(module, given, implementation)
            else:
                _put_under_all_names(given, part, Fused(part, implementation, is_part=True), replaced)
    except BaseException:
        for owner, name, part in replaced:
            setattr(owner, name, part)
        raise


def _put_under_all_names(
    module: nn.Module, part: nn.Module, made: Fused, replaced: list[tuple[nn.Module, str, nn.Module]]
) -> None:
    left = [module]
    known = set(left)
    while left:
        owner = left.pop()
        for name, child in list(owner._modules.items()):
            if child is part:
                setattr(owner, name, made)
                replaced.append((owner, name, part))
            elif child is not None and child not in known and not isinstance(child, RunsAsStacks):
                known.add(child)
                left.append(child)


def _become_fused(module: nn.Module, given: nn.Module, implementation: Implementation) -> None:
    """Makes of the object `module` what fuse returns for `given`: itself, of which a copy stays, or, if it is fused
    already, the module that it was made of."""
    if given is module:
        given = object.__new__(type(module))
        given.__dict__.update(module.__dict__)
    made = Fused(given, implementation, is_part=True)
    try:
        object.__setattr__(module, "__class__", Fused)
    except TypeError as error:
        raise ValueError(
            f"fuse: {type(given).__name__} cannot become another class, {error}; use what fuse returns without inplace"
        ) from None
    object.__setattr__(module, "__dict__", made.__dict__)


class Fused(RunsAsStacks):
    """What fuse returns: the children of a module under their names, called by way of stacks."""

    _is_part = False  # of a model that calls it, most often with what a graph leaves out

    def __init__(self, module: nn.Module, implementation: Implementation, is_part: bool = False) -> None:
        super().__init__()
        self._implementation, self._is_part = implementation, is_part
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._module = [module]  # in a list: no child, whose parameters would have two names
        for name in STATE_HOOKS:  # whichever of both is given one
            hooks, own = vars(module)[name], vars(self)
            hooks |= {key: hook for key, hook in own[name].items() if hook not in hooks.values()}
            own[name] = hooks
        self._build()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_piece" in self.__dict__ and name not in self.__dict__ and not hasattr(type(self), name):
            if isinstance(value, nn.Module):
                raise AttributeError(
                    f"fuse: {name} cannot be set afterwards: set it in the module, which is `.module`, and fuse again"
                )
            if name not in self._parameters and name not in self._buffers:
                return setattr(self.module, name, value)  # whose code reads it, and which notices
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """What was set in the module is deleted there."""
        if name in vars(self.module) and name not in vars(self):
            return delattr(self.module, name)
        super().__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_twin" not in self.__dict__:
                raise
        return getattr(self._twin[0], name)  # what the module has besides forward: settings, methods

    # Python looks for these in the class: a sequence's parts are asked for by number, by a model that has it as a part.
    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __setitem__(self, index: Any, part: Any) -> None:
        self.module[index] = part  # type: ignore[operator]

    def __delitem__(self, index: Any) -> None:
        del self.module[index]  # type: ignore[operator]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.module)

    # PyTorch calls these of every part of a model. The module's class may have its own, to keep a part in eval mode or
    # to load older checkpoints.
    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def state_dict(self, *given: Any, **named: Any) -> Any:
        return self.module.state_dict(*given, **named)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        self.module._load_from_state_dict(*given, **named)

    def _apply_to_parameters(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        self.module._apply(fn, recurse)

    def _replicate_for_data_parallel(self) -> NoReturn:
        """What nn.DataParallel asks every part for: a replica would run the parameters of the original."""
        raise RuntimeError("fuse: nn.DataParallel cannot replicate what fuse made; use DistributedDataParallel")

    @property
    def module(self) -> nn.Module:
        """The module as it was given."""
        given: nn.Module = self.__dict__["_module"][0]
        return given

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_module" in self.__dict__:
            self.module.training = mode

    @property
    def stacks(self) -> list[LayerStack]:
        """What runs as one, in the order of their calls."""
        return list(self._stacks.values())

    def _build(self) -> None:
        module, known = self.module, Reasons()
        piece = piece_of(module, "", known, self._implementation, self._is_part)
        self._stacks: dict[str, LayerStack] = piece.stacks
        self._twin = [piece.twin()]
        self.__dict__["forward"] = _forward(module, piece, self._twin[0])
        self._piece = [piece]  # last: what is set from now on is the module's

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickle, without what is built again from the module."""
        built = ("_piece", "_stacks", "_twin", "forward")
        kept = {name: value for name, value in self.__dict__.items() if name not in built}
        return kept | {"_frozen": {name: stack.frozen for name, stack in self._stacks.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        frozen = state.pop("_frozen")
        super().__setstate__(state)
        self._build()
        for name, stack in self._stacks.items():
            stack.frozen = frozen.get(name)

    def understood(self) -> list[str]:
        """What runs as stacks, what stays as it was, and why."""
        first = f"fuse({type(self.module).__name__}){', frozen' * self.is_frozen}:"
        (piece,) = self._piece
        return [first, *piece.explain()]


def _forward(module: nn.Module, piece: Whole | InParts, twin: nn.Module) -> Callable[..., Any]:
    """The forward of a Fused: a function that takes the module's own arguments."""

    def forward(*given: Any, **named: Any) -> Any:
        if whole is not None:
            return whole.run(module, given, named)
        return piece.compiled(given, named) if is_compiling() else twin(*given, **named)

    whole = piece if isinstance(piece, Whole) else None
    try:
        forward.__signature__ = signature(module)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        warnings.warn(f"fuse: {type(module).__name__}.forward has no signature", stacklevel=4)
    return forward
