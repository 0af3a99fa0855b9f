"""From a module to a graph of its calls, by torch.fx, and to the stacks in it.

A graph is the module's forward with one tensor for each argument that has to be given, and the others left out. What
else it depends on is in its guard. What a graph cannot keep is refused with a reason.
"""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from factorlayer.activations.expression import Expression
from factorlayer.activations.texts import activation_of
from factorlayer.activations.tracing import TRACING, Proxy, Tracer
from factorlayer.functional import Implementation
from factorlayer.layers import FactorLinear, is_hooked
from factorlayer.recurrences.gated import Gated
from factorlayer.stacks.guard import Guard, Read, recording
from factorlayer.stacks.stack import Activation, Layer, LayerStack, RunsAsStacks, has_own_call, layer_of

Reasons = dict[nn.Module, str | None]  # why a graph cannot look into a module: None if it can, "" of an activation


@dataclass
class Trace:
    """A graph, the names of its arguments, what it depends on, and why it does not look into parts."""

    graph: fx.Graph
    arguments: tuple[str, ...]
    guard: Guard
    opaque: dict[str, str]
    through: list[nn.Module]
    called: list[nn.Module]

    def calls(self, part: nn.Module) -> bool:
        """Whether the graph has what a part does, if only by looking into it."""
        inner = set(part.modules())
        return not inner.isdisjoint(self.called) or not inner.isdisjoint(self.through)


def trace(module: nn.Module, known: Reasons, method: str = "forward") -> Trace:
    """The graph of one of the module's methods. Raises ValueError with the reason, if it cannot be had."""
    opaque = _opaque(module, known)
    try:
        graph, reads, through = _trace_in_both_modes(module, opaque, method)
        guard = Guard()
        for part in through:
            guard.add_module(part)
        guard.add_reads(reads)
        called = [module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
        return Trace(graph, tuple(_required(module, method)), guard, opaque, through[1:], called)
    except Exception as error:  # whatever a model's code raises when it is called with proxies
        raise ValueError(f"torch.fx cannot trace it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _opaque(module: nn.Module, known: Reasons) -> dict[str, str]:
    """The parts of a module that its graph does not look into."""
    opaque: dict[str, str] = {}
    for name, part in reversed(list(module.named_modules())):  # the innermost first
        if name and not is_leaf(part):
            why = _why_opaque(part, known)
            if why is not None:
                opaque[name] = why
    return opaque


def _why_opaque(part: nn.Module, known: Reasons) -> str | None:
    if part not in known:
        if is_hooked(part) or (not has_own_call(part) and _is_activation(part)):
            known[part] = ""
        else:
            try:
                trace(part, known)
                known[part] = None
            except ValueError as error:
                known[part] = f", because {error}"
    return known[part]


def is_leaf(part: nn.Module) -> bool:
    """Whether a call of it is one node of a graph, whatever it does."""
    return _Tracer({}, "forward", []).is_leaf_module(part, "")


class _TypeAskedError(Exception):
    pass


class _Proxy(Proxy):
    """Stands for a tensor while a graph is traced; code that asks for its type would learn that it is no tensor, and is
    refused."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking == "torch" or asking.split(".")[0] not in ("torch", "factorlayer"):
            raise _TypeAskedError("it asks for the type of what is a tensor here, which a graph would not")
        return type(self)


class _Tracer(Tracer):
    """Traces a module: calls of PyTorch's modules, of ours and of what cannot be traced become nodes, and others are
    looked into."""

    def __init__(self, opaque: dict[str, str], method: str, arguments: Sequence[str]) -> None:
        super().__init__()
        self.opaque, self.switches, self.arguments = opaque, _switches(), arguments
        self.traced_func_name = method
        self.through: list[nn.Module] = []

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Makes tensors for the arguments that have to be given, by name; nothing for *args, **kwargs and arguments
        with a default."""
        self.through.append(self.root)
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self.arguments}
        return lambda root: root_fn(root, **given), [self.root]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _switches() != self.switches:
            raise ValueError("it switches gradients or autocast on or off, which a graph does not keep")
        return super().create_node(kind, target, *args, **kwargs)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == self._thread:
            if not self.is_leaf_module(m, self.path_of_module(m)):
                self.through.append(m)
            elif has_own_call(m):  # of which this is a part, and a node would be the whole
                raise ValueError(f"{type(m).__name__} has a __call__ of its own, and cannot be looked into")
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.opaque or isinstance(
            m, FactorLinear | Gated | RunsAsStacks | torch.jit.ScriptModule
        ):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def signature(module: nn.Module, method: str = "forward") -> inspect.Signature:
    """The signature of a call of it, without self."""
    whole = inspect.signature(getattr(type(module), method))
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _required(module: nn.Module, method: str) -> list[str]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = signature(module, method).parameters.values()
    return [a.name for a in own if a.default is a.empty and a.kind not in several]


Traced = tuple[fx.Graph, list[Read], list[nn.Module]]


def _trace_in_both_modes(module: nn.Module, opaque: dict[str, str], method: str) -> Traced:
    """Traces in training mode with gradients and in evaluation mode without, and refuses a module whose graphs differ:
    a graph holds one of them only."""
    training, evaluation = _in_both_modes(module, lambda: _trace_once(module, opaque, method))
    if str(training[0]) != str(evaluation[0]):
        raise ValueError(
            "its forward asks whether it is in training mode, or gradients are enabled; use modules for what differs, "
            "as nn.Dropout"
        )
    return evaluation[0], training[1] + evaluation[1], evaluation[2]


def _trace_once(module: nn.Module, opaque: dict[str, str], method: str) -> Traced:
    """Traces with the arguments left out that have defaults. Raises ValueError if the module's code does what a graph
    does not keep. Whatever it has done to the module is undone."""
    own_code = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    parts = {part: (dict(part.__dict__), dict(part._buffers)) for part in own_code}
    buffers = {buffer: (buffer._version, buffer.clone()) for buffer in module.buffers()}
    drawn, seed, draws = (random.getstate(), torch.get_rng_state()), torch.initial_seed(), _Draws()
    tracer = _Tracer(opaque, method, _required(module, method))
    tracer.proxy_buffer_attributes = True
    try:
        with TRACING, draws, recording(parts) as reads:
            graph = tracer.trace(module)
    finally:
        changed = {name for part, (own, _) in parts.items() for name in _changed(own, part.__dict__)}
        changed |= {name for part, (_, own) in parts.items() for name in _changed(own, part._buffers)}
        changed |= {"a buffer" for buffer, (version, _) in buffers.items() if buffer._version != version}
        for part, (own, own_buffers) in parts.items():
            part.__dict__.clear()
            part.__dict__.update(own)
            part._buffers.clear()
            part._buffers.update(own_buffers)
        for buffer, (_, values) in buffers.items():
            buffer.data.copy_(values)
        if random.getstate() != drawn[0] or torch.initial_seed() != seed:
            draws.any = True
        if draws.any:
            random.setstate(drawn[0])
            torch.set_rng_state(drawn[1])
    if any(name.startswith("_tensor_constant") for name in changed):
        raise ValueError("it makes tensors of its own, which a graph would keep as they are now")
    if changed:
        raise ValueError(f"its forward sets {', '.join(sorted(changed))}, which a graph does not")
    if draws.any:
        raise ValueError("it draws random numbers, which a graph would keep as they are now")
    return graph, reads, tracer.through


class _Draws(TorchDispatchMode):
    """Whether this thread draws random numbers: others may do so meanwhile, from the same generator."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def _switches() -> tuple[bool, ...]:
    """What a module's code may switch without a graph's knowing: gradients, inference mode and autocast."""
    autocast = map(torch.is_autocast_enabled, ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


T = TypeVar("T")


def _in_both_modes(module: nn.Module, look: Callable[[], T]) -> tuple[T, T]:
    """What is seen with the module in training mode and gradients enabled, and in evaluation mode without."""
    modes = {part: part.training for part in module.modules()}
    seen = []
    try:
        for mode in (True, False):
            for part in modes:
                part.training = mode
            with torch.set_grad_enabled(mode):
                seen.append(look())
    finally:
        for part, mode in modes.items():
            part.training = mode
    return seen[0], seen[1]


# From a graph to stacks


def runs_of(module: nn.Module, graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Nodes one behind another that are one stack: layers, each with an activation behind it or none, and dropouts
    between them."""
    taken: set[fx.Node] = set()
    for first in graph.nodes:
        layer = _layer(module, first)
        if first in taken or layer is None:
            continue
        run, behind = [first], [first]  # behind: the last layer, and its activation
        dropped = 0  # nodes behind these, until the next layer
        while len(run[-1].users) == 1:
            (following,) = run[-1].users
            # Nothing may stand between: it might write what the stack reads.
            if following.all_input_nodes != [run[-1]] or run[-1].next is not following:
                break
            if _layer(module, following) is not None:
                behind, dropped = [following], 0
            elif _drops(module, following) or (dropped and _is_one(module, following, nn.Identity)):
                dropped += 1
            elif not dropped and _ends(module, behind[0]) and _activation(module, [*behind[1:], following]) is not None:
                behind.append(following)
            else:
                break
            run.append(following)
        run = run[: len(run) - dropped]
        taken.update(run)
        if len(run) > 1:
            yield run


def put_stack(
    module: nn.Module, trace: Trace, run: Sequence[fx.Node], name: str, path: str, implementation: Implementation
) -> LayerStack:
    """Puts a stack in the place of a run. `path` is that of the module, for the names of the layers."""
    starts = [i for i, node in enumerate(run) if _layer(module, node) is not None]
    members: list[tuple[str, nn.Module, Activation]] = []
    dropouts: list[list[nn.Module]] = []
    for start, end in itertools.pairwise([*starts, len(run)]):
        layer = str(run[start].target)
        behind = run[start + 1 : end]
        of_it = list(itertools.takewhile(lambda node: not _drops(module, node), behind))
        members.append((path + layer, module.get_submodule(layer), _activation(module, of_it)))
        dropouts.append([module.get_submodule(str(node.target)) for node in behind[len(of_it) :]])
        for node in of_it:
            if node.op == "call_module":
                trace.guard.add_activation(module.get_submodule(str(node.target)))
    with trace.graph.inserting_after(run[-1]):
        call = trace.graph.call_module(name, (run[0].args[0],))
    run[-1].replace_all_uses_with(call)
    for node in reversed(run):
        trace.graph.erase_node(node)
    return LayerStack(members, implementation, "fuse", dropouts)


def _layer(module: nn.Module, node: fx.Node) -> Layer | None:
    """The layer that a node calls, with one tensor and nothing else."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    member = module.get_submodule(str(node.target))
    return None if is_hooked(member) else layer_of(member)


def _is_one(module: nn.Module, node: fx.Node, kind: type[nn.Module]) -> bool:
    """Whether a node calls a module of just this class, with one tensor and nothing else."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return False
    part = module.get_submodule(str(node.target))
    return type(part) is kind and not is_hooked(part)


def _drops(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node is a dropout, which does nothing in evaluation mode."""
    return _is_one(module, node, nn.Dropout) and not module.get_submodule(str(node.target)).inplace


def _ends(module: nn.Module, node: fx.Node) -> bool:
    """Whether a layer is not followed by an activation of its own."""
    layer = _layer(module, node)
    return layer is not None and layer.chain.activation == "identity"


class _Call(nn.Module):
    """A function or a method, called with a tensor and what does not change."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.target, self.given, self.named = node.target, list(node.args), dict(node.kwargs)
        self.place = next(i for i, given in enumerate(node.args) if isinstance(given, fx.Node))
        self.given[self.place] = None

    def forward(self, x: Tensor) -> Any:
        given: list[Any] = [*self.given[: self.place], x, *self.given[self.place + 1 :]]
        if isinstance(self.target, str):
            return getattr(x, self.target)(*given[1:], **self.named)
        return self.target(*given, **self.named)


def _activation(module: nn.Module, nodes: Sequence[fx.Node]) -> Activation:
    """The function of single elements that some nodes, one behind another, compute; or None if they do not. Without
    nodes it is None as well."""
    parts: list[nn.Module] = []
    for node in nodes:
        given = [*node.args, *node.kwargs.values()]
        if [isinstance(each, fx.Node) for each in node.args].count(True) != 1 or len(node.all_input_nodes) != 1:
            return None
        if node.op == "call_module" and len(given) == 1:
            parts.append(module.get_submodule(str(node.target)))
        elif node.op in ("call_function", "call_method"):
            parts.append(_Call(node))
        else:
            return None
    if not parts or any(map(is_hooked, parts)):
        return None
    whole = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
    return whole if _is_activation(whole) else None


def _is_activation(module: nn.Module) -> bool:
    if layer_of(module) is not None or (isinstance(module, nn.Sequential) and len(module) == 0):
        return False
    if next(module.buffers(), None) is not None:  # whose values may change
        return False
    try:
        (stage, _), other = _in_both_modes(module, lambda: activation_of(module))
        for part in module.modules():
            if not any(isinstance(inner, _Call) for inner in part.modules()):
                Guard().add_activation(part)
    except (TypeError, ValueError):
        return False
    return stage == other[0] and not ("/" in stage and Expression.parse(stage).is_boolean)
