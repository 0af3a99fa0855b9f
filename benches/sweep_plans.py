"""What runs a drawn row: the implementation that auto takes, the time that the planner predicts, its other ways, timed.

Plans are made for three sizes of batch; the prediction is what the one that runs takes of the row's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benches.subjects import Call
from benches.timing import Effort, time_cuda
from factorlayer import FactorLinear
from factorlayer.autograd.layer_ops import gpu_limits, text_for
from factorlayer.autograd.runtime import CompileError, class_of_batch, dtype_name, install
from factorlayer.autograd.stack_ops import is_left_to_cublas, runs, why_auto_is_not_stacked
from factorlayer.device.gpu import Gpu
from factorlayer.functional import choose
from factorlayer.models.times import plan_us
from factorlayer.plan.planner import plan_of
from factorlayer.plan.schemes import schemes
from factorlayer.stacks.stack import LayerStack, is_joined, why_predicted_apart


def taken_by_auto(call: Call) -> str:
    """batched, or fused if anything is, forward; of layers at once, or in a training step."""
    module, x = call.function, call.x
    if isinstance(module, FactorLinear):
        return choose(module.chain, x, "auto", "benches.sweep", len(x))
    (stack,) = module.stacks  # type: ignore[attr-defined]
    together = len(stack.layers) > 1 and why_auto_is_not_stacked(stack._stack, x) is None
    ways = {choose(layer.chain, x, "auto", "benches.sweep", len(x)) for layer in stack.layers}
    for back in (False, True) if together else ():
        apart = why_predicted_apart(stack._stack, x, back) is not None
        ways |= {"fused"} if runs(stack._stack, x, back, back and is_joined(stack._stack, x)) and not apart else set()
    return "fused" if "fused" in ways else "batched"


def predicted_us(call: Call) -> float | None:
    """The microseconds that v3's forward pass is predicted to take; None where a library makes a part of it."""
    x = call.x
    gpu, us = Gpu(*gpu_limits(x.get_device())), 0.0
    for text in _texts(call):
        if text is None:
            return None
        us += plan_us(text, len(x), dtype_name(x.dtype), gpu)
    return us if us < math.inf else None


def candidates(sets: list[Call], effort: Effort) -> dict[str, float]:
    """Microseconds of each way in which the engine can run the whole call at once; none where there is no such way."""
    texts = list(_texts(sets[0]))
    if len(texts) != 1 or texts[0] is None:
        return {}
    text, x = texts[0], sets[0].x
    device, batch_class, dtype = x.get_device(), class_of_batch(len(x)), dtype_name(x.dtype)
    gpu, us = Gpu(*gpu_limits(device)), dict[str, float]()
    try:
        for i, scheme in enumerate(schemes(text, dtype, batch_class, gpu)):
            family = " + ".join(type(p).__name__ for p in scheme.plan.passes)
            name = f"{i}: {family}, {scheme.states}, {scheme.weights}, {scheme.samples} samples"
            try:
                install(text, x.dtype, batch_class, device, scheme.plan.text())
            except CompileError:
                continue
            timings, _ = time_cuda({name: sets}, "forward", effort)
            us |= {way: timing.us for way, timing in timings.items()}
    finally:
        install(text, x.dtype, batch_class, device, plan_of(text, dtype, batch_class, gpu).text())
    return us


def _texts(call: Call) -> Iterator[str | None]:
    """The texts that a forward pass runs one after another; None stands for a product that is left to a library."""
    if isinstance(call.function, FactorLinear):
        yield text_for(call.function.chain, call.x)
        return
    (stack,) = call.function.stacks  # type: ignore[attr-defined]
    yield from _of_stack(stack, call.x)


def _of_stack(stack: LayerStack, x: Tensor) -> Iterator[str | None]:
    with torch.no_grad():
        found = runs(stack._stack, x, recorded=False) if len(stack.layers) > 1 else ()
    at = 0
    for begin, end, text in (*found, (len(stack.layers), len(stack.layers), "")):
        for layer in stack.layers[at:begin]:
            yield None if is_left_to_cublas(layer.chain, x) else text_for(layer.chain, x)
        if text:
            yield text
        at = end
