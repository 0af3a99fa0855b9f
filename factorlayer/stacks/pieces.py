"""What fuse makes of a module: a Whole, whose forward is a graph, or InParts, which runs its own with pieces in it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling

from factorlayer.functional import Implementation
from factorlayer.layers import FactorLinear, is_compiled, is_hooked
from factorlayer.stacks.graph import Reasons, is_leaf, put_stack, runs_of, signature, trace
from factorlayer.stacks.guard import is_equal
from factorlayer.stacks.stack import LayerStack, RunsAsStacks, has_own_call
from factorlayer.stacks.stand_in import stand_in, why_none

METHODS = ("_ff_block", "feed_forward_chunk", "ff_chunk")  # by which others call a block's two layers


def piece_of(
    module: nn.Module, path: str, known: Reasons, implementation: Implementation, is_part: bool = False
) -> Whole | InParts:
    """The piece of a module, by its path, which ends in a dot or is nothing."""
    if is_part and _may_leave_out(module):  # it is called with what its graph leaves out, most often
        in_parts = InParts(module, path, known, implementation, "it has arguments that may be left out")
        if in_parts.stacks:
            return in_parts
    if is_leaf(module):
        return InParts(module, path, known, implementation, "")
    if has_own_call(module):  # which runs around its forward: its stand-in has it, and a graph would not
        return InParts(module, path, known, implementation, "it has a __call__ of its own")
    try:
        return Whole(module, path, known, implementation)
    except ValueError as error:
        return InParts(module, path, known, implementation, str(error))


def _part_of(module: nn.Module, path: str, known: Reasons, implementation: Implementation) -> Whole | InParts | None:
    """The piece of a part, or None if there is nothing in it to be fused."""
    if isinstance(module, FactorLinear | RunsAsStacks | torch.jit.ScriptModule) or not module._modules:
        return None
    if is_hooked(module) or known.get(module) == "" or why_none(module) is not None:
        return None
    found = piece_of(module, path, known, implementation, is_part=True)
    return found if found.stacks else None


def _may_leave_out(module: nn.Module) -> bool:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        given = signature(module).parameters.values()
    except (TypeError, ValueError):
        return False
    return not is_leaf(module) and any(a.default is not a.empty or a.kind in several for a in given)


def _why_hooked(part: nn.Module) -> str:
    """Why a part that is hooked stays as it was; nothing of another one."""
    if is_compiled(part):
        return ", because it is compiled: fuse it before"
    return ", because it has hooks" if is_hooked(part) else ""


class Whole:
    """A graph with stacks in it. Where it does not hold, the module's own method runs."""

    def __init__(
        self, module: nn.Module, path: str, known: Reasons, implementation: Implementation, method: str = "forward"
    ) -> None:
        self.module, self.path, self.method = module, path, method
        self.trace = trace(module, known, method)
        self.stacks: dict[str, LayerStack] = {}
        own: dict[str, LayerStack] = {}
        for members in list(runs_of(module, self.trace.graph)):
            name = self._free_name(f"stack_{len(own)}")
            own[name] = put_stack(module, self.trace, members, name, path, implementation)
            self.stacks[f"{path}{method}.{name}"] = own[name]
        self._has_own = bool(own)
        self.parts = self._fuse_parts(own, known, implementation)
        owner = nn.Module()
        for name, part in (*module.named_children(), *own.items(), *self._others.items()):
            owner.add_module(name, part)
        owner._parameters, owner._buffers = module._parameters, module._buffers
        calls = fx.GraphModule(owner, self.trace.graph)
        # GraphModule has copied the modules on the way to a parameter. The module's own parts take their place, as one
        # of them may be replaced later.
        calls._modules, calls._parameters, calls._buffers = owner._modules, owner._parameters, owner._buffers
        calls.__dict__.update(own)  # where they are found at once
        self.calls, self._forward = calls, calls.forward
        self._left_out = self._defaults()
        self._warned = False

    def _free_name(self, name: str) -> str:
        while hasattr(self.module, name):
            name += "_"
        return name

    def _fuse_parts(
        self, own: dict[str, LayerStack], known: Reasons, implementation: Implementation
    ) -> dict[str, Whole | InParts]:
        """The pieces of the parts that the graph calls and does not look into, by the names of their calls."""
        parts: dict[str, Whole | InParts] = {}
        self._others: dict[str, Part] = {}
        names: dict[str, str] = {}  # of parts that the graph may call more than once
        for node in self.trace.graph.nodes:
            if node.op != "call_module" or str(node.target) in own:
                continue
            path = str(node.target)
            if path not in names:
                part = _part_of(self.module.get_submodule(path), f"{self.path}{path}.", known, implementation)
                names[path] = path if part is None else self._free_name(f"part_{len(parts)}")
                if part is not None:
                    parts[names[path]], self._others[names[path]] = part, Part(part)
                    self.stacks |= part.stacks
            node.target = names[path]
        return parts

    def _defaults(self) -> dict[str, Any]:
        own = signature(self.module, self.method).parameters.values()
        return {a.name: a.default for a in own if a.default is not inspect.Parameter.empty}

    def run(self, own: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the graph; where it does not hold, `own`, the module's own method."""
        arguments = self.trace.arguments
        if named or len(given) != len(arguments):
            found = self._bound(given, named)
            if found == ():
                return own(*given, **named)  # which has words for what is missing
            if found is None:
                self._warn("called with other arguments than those it was traced with")
                return own(*given, **named)
        else:
            found = given
        for each in found:
            if not isinstance(each, Tensor):
                made = own(*given, **named)  # which may have words for it
                self._warn("called with what is no tensor")
                return made
        if not self.trace.guard.holds():
            self._warn("not what it was traced as")
            return own(*given, **named)
        return self._forward(*found)

    def _bound(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """The graph's arguments, if the other arguments are as they were in the trace, and None if not; () if the call
        does not fit the method's signature."""
        try:
            bound = signature(self.module, self.method).bind(*given, **named).arguments
        except TypeError:
            return ()
        for name, value in bound.items():
            if name in self.trace.arguments:
                continue
            if name not in self._left_out or not is_equal(value, self._left_out[name]):
                return None
        return tuple(bound[name] for name in self.trace.arguments)

    def _warn(self, why: str) -> None:
        if not self._warned and not is_compiling():
            self._warned = True
            changed = self.trace.guard.what_changed()
            warnings.warn(
                f"fuse: {self._called()} is {why}{f' ({changed})' if changed else ''}, and its own {self.method} runs "
                f"instead{', unfused; fuse the model again' if changed else ', unfused'}",
                stacklevel=6,
            )

    def _called(self) -> str:
        return self.path.rstrip(".") or type(self.module).__name__

    def places(self) -> Iterator[str]:
        """The paths of what fuse makes one module of, inner parts first: those in parts that the graph does not look
        into, where torch.compile would not follow it, and its own, if it has stacks beside these."""
        for part in self.parts.values():
            yield from part.places()
        if self._has_own:
            yield self.path.rstrip(".")

    def compiled(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The call under torch.compile, which can follow a graph."""
        return self.run(self.module, given, named)

    def twin(self) -> nn.Module:
        """A stand-in for the module, whose method runs this graph."""
        return stand_in(self.module, {}, {self.method: self.as_method()})

    def as_method(self) -> Callable[..., Any]:
        base = getattr(type(self.module), self.method)

        @wraps(base)  # some look at how many arguments it takes
        def method(module: nn.Module, *given: Any, **named: Any) -> Any:
            return self.run(partial(base, module), given, named)

        return method

    def explain(self) -> list[str]:
        lines: list[str] = []
        changed = self.trace.guard.what_changed()
        if changed:
            lines.append(f"  {self._called()}: its own {self.method} runs, because {changed}; fuse the model again")
        for node in self.trace.graph.nodes:
            target = str(node.target)
            if isinstance(self.calls._modules.get(target), LayerStack):
                stack = self.calls._modules[target]
                assert isinstance(stack, LayerStack)
                lines.append(f"  {'a stack' if len(stack.layers) > 1 else 'one layer'}:")
                lines += [f"    {line}" for line in stack.explain()]
            elif target in self.parts:
                lines += self.parts[target].explain()
            elif node.op not in ("placeholder", "output", "get_attr"):
                name = node.target if isinstance(node.target, str) else node.target.__name__
                lines.append(f"  {self.path}{name}: as it was{self._why_not(node)}")
        left_out = [name for name in self._left_out if name not in self.trace.arguments]
        if left_out:
            lines.append(f"  {self._called()}: its own {self.method} runs where {', '.join(left_out)} is given")
        return lines

    def _why_not(self, node: fx.Node) -> str:
        if node.op != "call_module":
            return ""
        return _why_hooked(self.module.get_submodule(str(node.target))) or self.trace.opaque.get(str(node.target), "")


class InParts:
    """A module that runs its own forward on its stand-in."""

    def __init__(self, module: nn.Module, path: str, known: Reasons, implementation: Implementation, why: str) -> None:
        self.module, self.path, self.why = module, path, why
        self.methods: list[Whole] = []
        for method in METHODS:
            if hasattr(type(module), method) and method not in vars(module):
                try:
                    whole = Whole(module, path, known, implementation, method)
                except ValueError:
                    continue
                if whole.stacks:
                    self.methods.append(whole)
        self.parts: dict[str, Whole | InParts] = {}
        self._left: dict[str, str] = {}
        found: dict[nn.Module, Whole | InParts | None] = {}  # one, if it has several names
        for name, child in module._modules.items():
            if child is None or any(whole.trace.calls(child) for whole in self.methods):
                continue
            if child not in found:
                found[child] = _part_of(child, f"{path}{name}.", known, implementation)
            part = found[child]
            if part is not None:
                self.parts[name] = part
            else:
                self._left[name] = _why_hooked(child) or known.get(child) or ""
        self.stacks: dict[str, LayerStack] = {}
        for piece in (*self.methods, *self.parts.values()):
            self.stacks |= piece.stacks

    def compiled(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The call under torch.compile, which cannot follow a stand-in: the module runs as it is, with a warning."""
        if self.stacks:
            frozen = any(stack.frozen is not None for stack in self.stacks.values())
            _say_as_it_was(self._name(), any(self.places()), frozen)
        return self.module(*given, **named)

    def places(self) -> Iterator[str]:
        """The paths of the largest parts that fuse makes one module of: its own, if methods of it are fused, else those
        of its parts."""
        if self.methods:
            yield self.path.rstrip(".")
        else:
            for part in self.parts.values():
                yield from part.places()

    def _name(self) -> str:
        return self.path.rstrip(".") or type(self.module).__name__

    def twin(self) -> nn.Module:
        if not self.parts and not self.methods:
            return self.module
        parts = {name: (part.module, part.twin()) for name, part in self.parts.items()}
        return stand_in(self.module, parts, {whole.method: whole.as_method() for whole in self.methods})

    def explain(self) -> list[str]:
        fused = "with parts of it fused (under torch.compile as it was)" if self.stacks else "as it was"
        because = f", because {self.why}" if self.why else ""
        lines = [f"  {self._name()}: its own forward, {fused}{because}"]
        for whole in self.methods:
            lines += whole.explain()
        for name, part in self.parts.items():
            is_first = part.path == f"{self.path}{name}."
            lines += part.explain() if is_first else [f"  {self.path}{name}: the same as {part.path.rstrip('.')}"]
        return lines + [f"  {self.path}{child}: as it was{why}" for child, why in self._left.items()]


class Part(nn.Module):
    """A part that a graph calls: its stand-in, or what torch.compile can follow."""

    def __init__(self, piece: Whole | InParts) -> None:
        super().__init__()
        self._both = (piece, piece.twin())  # in a tuple: no children, whose parameters would have two names

    def forward(self, *given: Any, **named: Any) -> Any:
        piece, twin = self._both
        return piece.compiled(given, named) if is_compiling() else twin(*given, **named)


def _say_as_it_was(name: str, in_parts: bool, frozen: bool) -> None:
    warnings.warn(
        f"fuse: under torch.compile and torch.export {name} runs as it was, unfused"
        + ", with its parameters as they are and not as they were frozen" * frozen
        + ": they cannot follow a forward of which only parts are fused"
        + "; fuse(model, inplace=True) makes of the model's parts what they can follow" * in_parts,
        stacklevel=2,
    )


# Called once, as the graph is made: this is all that torch.compiler.assume_constant_result does, but for importing the
# compiler.
_say_as_it_was._dynamo_marked_constant = True  # type: ignore[attr-defined]
