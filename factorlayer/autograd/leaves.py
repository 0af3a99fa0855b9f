"""Calls of our modules in graphs that torch.fx traces: one node each, as calls of PyTorch's own layers are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from factorlayer.autograd.inputs import are_several


def is_traced(x: Any) -> bool:
    """Whether x, or a tensor of the list that it is, stands for one that a graph will have."""
    return isinstance(x, fx.Proxy) or (are_several(x) and any(isinstance(each, fx.Proxy) for each in x))


def as_node(module: nn.Module, *given: Any, **named: Any) -> Tensor:
    """Adds the call of a module to the graph that is traced, and returns what stands for its result there, by which its
    caller goes on as by a tensor."""
    inputs = given[0] if are_several(given[0]) else [given[0]]
    tracer: Any = next(each for each in inputs if isinstance(each, fx.Proxy)).tracer
    path = tracer.path_of_module(module)
    if not path:
        kind = type(module).__name__
        raise TypeError(f"{kind}: torch.fx cannot look into it; trace a model that it is a part of")
    node: Tensor = tracer.create_proxy("call_module", path, given, named)
    return node
