"""Which gradients a backward pass is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

_will_execute = torch._C._will_engine_execute_node
_pass_now = torch._C._current_graph_task_id
ASKED = 1 << 16  # numbers of a layer's inputs and weights, from which on it is worth the question
_known = -2  # the pass of which all gradients are taken for needed that may be; -1 is none


def needed(ctx: Any, given: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Of a Function's inputs those whose gradients this pass brings on, as ctx.needs_input_grad has them: that says of
    which ones a pass may, and torch.autograd.grad(y, x) asks for x's alone. `given` are the last inputs, tensors or
    None, the layer's own x first.

    PyTorch answers for a node of its graph, which takes a tenth of a microsecond; of a leaf that autograd.grad is asked
    for it raises, which takes 30. So the last input of one layer answers for all inputs of all layers of a pass, unless
    its own gradient is not needed; and of small layers, whose gradients take little more, nobody is asked."""
    global _known
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if is_compiling() or _pass_now() == _known:
        return needs
    if sum([tensor.numel() for tensor in given if tensor is not None]) < ASKED:
        return needs
    nodes, last = ctx.next_functions, len(needs) - 1
    places = [i for i, tensor in enumerate(given, len(needs) - len(given)) if tensor is not None]
    if len(nodes) != len(places) or places[-1] != last or not needs[last]:
        return needs
    if _is_needed(nodes[-1][0]):
        _known = _pass_now()
        return needs
    found = list(needs)
    for place, (node, _) in zip(places, nodes, strict=True):
        found[place] = needs[place] and _is_needed(node)
    return tuple(found)


def _is_needed(node: Any) -> bool:
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # a leaf that autograd.grad is asked for, or there is no pass
        return True
