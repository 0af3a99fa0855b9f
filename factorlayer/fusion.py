"""fuse: a model's layers and activations as stacks, with the model's own parameters.

torch.fx finds what stands one behind another. What is no layer and no activation stays as it is, between stacks.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from factorlayer.expression import Expression
from factorlayer.functional import Implementation, implementation_name
from factorlayer.layers import FactorLinear
from factorlayer.mlp import FactorMLP
from factorlayer.stack import Activation, Layer, LayerStack, RunsAsStacks, is_hooked, layer_of
from factorlayer.stages import activation_of
from factorlayer.tracing import Proxy


def fuse(module: nn.Module, implementation: Implementation = "auto") -> nn.Module:
    """The module, run as stacks of its Linear and FactorLinear layers with the activations behind them.

    The parameters are the module's own, under their names: optimizers and checkpoints go on with either. What cannot be
    in a stack is called as before; `explain()` of what is returned says what runs how. Python's numbers and decisions
    are those of now, and so are the module's parts: to change these, change the module and fuse it again.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fuse: module should be an nn.Module, it is {type(module).__name__}")
    try:
        chosen = implementation_name(implementation)
    except ValueError as error:
        raise ValueError(f"fuse: {error}") from None
    if isinstance(module, Fused):
        module = module.module
    elif is_hooked(module):
        raise ValueError(
            f"fuse: {type(module).__name__} has hooks or a forward of its own, which would not run; fuse it without, "
            "and put them on what fuse returns"
        )
    if isinstance(module, FactorLinear | FactorMLP) or not list(module.children()):
        return module  # which runs as stacks already, or is one layer, or nothing to fuse
    return Fused(module, chosen)


class Fused(RunsAsStacks):
    """What fuse returns: the children of a module under their names, called by way of stacks."""

    def __init__(self, module: nn.Module, implementation: Implementation) -> None:
        super().__init__()
        self.training, self._implementation = module.training, implementation
        self._parameters, self._buffers = module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        for name, child in module.named_children():
            self.add_module(name, child)
        self._module = [module]  # in a list: no child, whose parameters would have two names
        self._build()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and "_calls" in self.__dict__:
            raise AttributeError(f"fuse: {name} cannot be set afterwards: set it in the module, and fuse that again")
        super().__setattr__(name, value)

    @property
    def module(self) -> nn.Module:
        """The module as it was given."""
        return self._module[0]

    @property
    def stacks(self) -> list[LayerStack]:
        """What runs as one, in the order of their calls."""
        return list(self._stacks.values())

    def _build(self) -> None:
        module = self.module
        graph, self._reasons = _trace(module)
        self._stacks: dict[str, LayerStack] = {}
        for members in list(_runs(module, graph)):
            name = f"stack_{len(self._stacks)}"
            while hasattr(module, name):
                name += "_"
            self._stacks[name] = _replace(module, graph, members, name, self._implementation)
        owner = nn.Module()
        for name, part in (*module.named_children(), *self._stacks.items()):
            owner.add_module(name, part)
        owner._parameters, owner._buffers = module._parameters, module._buffers
        calls = fx.GraphModule(owner, graph)
        # Not copies of what lies on the way to a parameter, but the module's own parts: another may take its place.
        calls._modules, calls._parameters, calls._buffers = owner._modules, owner._parameters, owner._buffers
        calls.__dict__.update(self._stacks)  # where they are found at once
        self._calls = [calls]
        self.__dict__["forward"] = calls.forward  # with the module's own arguments

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle: without what can be built again."""
        built = ("_calls", "_stacks", "_reasons", "forward")
        kept = {name: value for name, value in self.__dict__.items() if name not in built}
        return kept | {"_frozen": {name: stack.frozen for name, stack in self._stacks.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        frozen = state.pop("_frozen")
        super().__setstate__(state)
        self._build()
        for name, stack in self._stacks.items():
            stack.frozen = frozen[name]

    def understood(self) -> list[str]:
        """What runs as stacks, what stays as it was, and why."""
        lines = [f"fuse({type(self.module).__name__}){', frozen' * self.is_frozen}:"]
        for node in self._calls[0].graph.nodes:
            stack = self._stacks.get(str(node.target))
            if stack is not None:
                lines.append(f"  {'a stack' if len(stack.layers) > 1 else 'one layer'}:")
                lines += [f"    {line}" for line in stack.explain()]
            elif node.op not in ("placeholder", "output", "get_attr"):
                name = node.target if isinstance(node.target, str) else node.target.__name__
                lines.append(f"  {name}: as it was{self._why_not(node)}")
        return lines

    def _why_not(self, node: fx.Node) -> str:
        if node.op != "call_module":
            return ""
        member = self.module.get_submodule(str(node.target))
        if is_hooked(member):
            return ", because it has hooks"
        return self._reasons.get(str(node.target), "")


# From a module to a graph


class _Tracer(fx.Tracer):
    """Calls of PyTorch's modules, of ours and of what cannot be traced are nodes; others are looked into."""

    def __init__(self, opaque: dict[str, str]) -> None:
        super().__init__()
        self.opaque, self.switches = opaque, _switches()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _switches() != self.switches:
            raise ValueError("it switches gradients or autocast on or off, which a graph does not keep")
        return super().create_node(kind, target, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.opaque or isinstance(m, (FactorLinear, FactorMLP, Fused)):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def _trace(module: nn.Module) -> tuple[fx.Graph, dict[str, str]]:
    """The graph of a module's calls, and why it does not look into a part: nothing, if that is an activation."""
    opaque: dict[str, str] = {}
    for name, part in reversed(list(module.named_modules())):  # the innermost first
        if not name or _Tracer({}).is_leaf_module(part, name):
            continue
        if is_hooked(part) or _is_activation(part):
            opaque[name] = ""
            continue
        inner = {key[len(name) + 1 :]: why for key, why in opaque.items() if key.startswith(f"{name}.")}
        try:
            _trace_in_both_modes(part, inner)
        except Exception as error:  # whatever a model's code raises when it is called with proxies
            opaque[name] = f", because torch.fx cannot trace it: {error}"
    try:
        return _trace_in_both_modes(module, opaque), opaque
    except Exception as error:
        raise ValueError(
            f"fuse: torch.fx cannot trace {type(module).__name__}: {error}; fuse the parts of it that are sequences of "
            "layers, and put them in their places"
        ) from error


def _trace_in_both_modes(module: nn.Module, opaque: dict[str, str]) -> fx.Graph:
    """For a graph knows one only."""
    training, evaluation = _in_both_modes(module, lambda: _trace_once(module, opaque))
    if str(training) != str(evaluation):
        raise ValueError("its forward asks whether it is in training mode; use modules for what differs, as nn.Dropout")
    return evaluation


def _trace_once(module: nn.Module, opaque: dict[str, str]) -> fx.Graph:
    """With arguments left out that may be. Raises ValueError if the module's code does what a graph does not keep; what
    it has done to the module is undone."""
    arguments = inspect.signature(type(module).forward).parameters.values()
    left_out = {a.name: a.default for a in arguments if a.default is not a.empty and not isinstance(a.default, Tensor)}
    parts = {part: (dict(part.__dict__), dict(part._buffers)) for part in module.modules()}
    buffers = {buffer: (buffer._version, buffer.clone()) for buffer in module.buffers()}
    drawn = random.getstate(), torch.get_rng_state()
    try:
        graph = _Tracer(opaque).trace(module, left_out or None)
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
        draws = random.getstate() != drawn[0] or not torch.equal(torch.get_rng_state(), drawn[1])
        random.setstate(drawn[0])
        torch.set_rng_state(drawn[1])
    if any(name.startswith("_tensor_constant") for name in changed):
        raise ValueError("it makes tensors of its own, which a graph would keep as they are now")
    if changed:
        raise ValueError(f"its forward sets {', '.join(sorted(changed))}, which a graph does not")
    if draws:
        raise ValueError("it draws random numbers, which a graph would keep as they are now")
    return graph


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def _switches() -> tuple[bool, ...]:
    """What a module's code may switch, and a graph does not know of."""
    autocast = map(torch.is_autocast_enabled, ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


T = TypeVar("T")


def _in_both_modes(module: nn.Module, look: Callable[[], T]) -> tuple[T, T]:
    """What is seen with the module in training mode, and in evaluation mode."""
    modes = {part: part.training for part in module.modules()}
    seen = []
    try:
        for mode in (True, False):
            for part in modes:
                part.training = mode
            seen.append(look())
    finally:
        for part, mode in modes.items():
            part.training = mode
    return seen[0], seen[1]


# From a graph to stacks


def _runs(module: nn.Module, graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Nodes one behind another that are one stack: layers, each with an activation behind it or none."""
    taken: set[fx.Node] = set()
    for first in graph.nodes:
        layer = _layer(module, first)
        if first in taken or layer is None:
            continue
        run, behind = [first], [first]  # behind: the last layer, and its activation
        while len(run[-1].users) == 1:
            (following,) = run[-1].users
            # Nothing may stand between: it might write what the stack reads.
            if following.all_input_nodes != [run[-1]] or run[-1].next is not following:
                break
            if _layer(module, following) is not None:
                behind = [following]
            elif _ends(module, behind[0]) and _activation(module, [*behind[1:], following]) is not None:
                behind.append(following)
            else:
                break
            run.append(following)
        taken.update(run)
        if len(run) > 1:
            yield run


def _replace(module: nn.Module, graph: fx.Graph, run: Sequence[fx.Node], name: str, implementation: str) -> LayerStack:
    starts = [i for i, node in enumerate(run) if _layer(module, node) is not None]
    members: list[tuple[str, nn.Module, Activation]] = []
    for start, end in itertools.pairwise([*starts, len(run)]):
        layer = str(run[start].target)
        members.append((layer, module.get_submodule(layer), _activation(module, run[start + 1 : end])))
    with graph.inserting_after(run[-1]):
        call = graph.call_module(name, (run[0].args[0],))
    run[-1].replace_all_uses_with(call)
    for node in reversed(run):
        graph.erase_node(node)
    return LayerStack(members, implementation, "fuse")


def _layer(module: nn.Module, node: fx.Node) -> Layer | None:
    """The layer that a node calls, with one tensor and nothing else."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    member = module.get_submodule(str(node.target))
    return None if is_hooked(member) else layer_of(member)


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
    """The function that nodes one behind another are, if it is one of single elements; None of nothing, too."""
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
    except (TypeError, ValueError):
        return False
    return stage == other[0] and not ("/" in stage and Expression.parse(stage).is_boolean)
