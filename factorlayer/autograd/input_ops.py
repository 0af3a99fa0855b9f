"""v3 of an x that is several tensors: the raw ops inputs_forward, _backward and _gradients, and what PyTorch has to
know about them.

They take the tensors of x where they lie, and those of one layer or of a stack (stack_ops.py); in the text the first
layer has "inputs". Kernels of a CPU take every such text. On a GPU the planner has plans for some, and what it has none
for, or a slower one, takes x as one tensor, concatenated before.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from factorlayer.autograd import layer_ops
from factorlayer.autograd.backward import back_to_contractions, columns_texts, gradients, launched_texts
from factorlayer.autograd.layer_ops import (
    cuda_ops,
    explaining,
    gpu_limits,
    has_kernel,
    missing_extension,
    predicted_us,
    raise_better,
    record_inputs_by,
    refuse_traced_gradients,
    text_for,
    transforms_active,
)
from factorlayer.autograd.needed import needed
from factorlayer.autograd.runtime import MAX_WEIGHTS, class_of_batch, dtype_name, prepare_together
from factorlayer.autograd.stack_ops import backward_flops as stack_backward_flops
from factorlayer.autograd.stack_ops import by_torch, differentiable_backward, known
from factorlayer.autograd.stack_ops import forward_flops as stack_forward_flops
from factorlayer.autograd.vectors import are_vectors
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import BATCHES, LAST
from factorlayer.maths.chain import Chain, parse_layers

if missing_extension is None:
    _forward = torch.ops.factorlayer.inputs_forward.default
    _forward_now = _forward._op  # the same, but for a Python call around it, which torch.compile has to see
    _backward = torch.ops.factorlayer.inputs_backward.default
    _backward_now = _backward._op
    _gradients_now = torch.ops.factorlayer.inputs_gradients.default._op


def of_inputs(chain: Chain, features: tuple[int, ...]) -> Chain:
    """The chain of the same layer for an x that is several tensors, with so many features each."""
    if is_compiling():  # a graph is for numbers of features, though Dynamo may have symbols for them
        return replace(chain, inputs=tuple(len(range(n)) for n in features))
    if torch._C._is_tracing():  # whose sizes are tensors
        features = tuple(map(int, features))
    return _of_inputs(chain, features)


@functools.lru_cache(1024)
def _of_inputs(chain: Chain, features: tuple[int, ...]) -> Chain:
    return replace(chain, inputs=features)


def why_concatenated(text: str, x: Tensor, batch: int) -> str | None:
    """Why kernels do not take the inputs of a layer or a stack where they lie, as of `batch` samples like x; or
    None."""
    if transforms_active():
        return "torch.func has no rule for it"
    if not x.is_cuda:
        return None
    batch_class = LAST if is_compiling() else class_of_batch(batch)
    return _why_concatenated(text, x.dtype, x.get_device(), batch_class)


@known
def _why_concatenated(text: str, dtype: torch.dtype, device: int, batch_class: int) -> str | None:
    layers = parse_layers(text)
    if sum(layer.tensors for layer in layers) + len(layers[0].inputs) > MAX_WEIGHTS:
        return f"CUDA kernels take {MAX_WEIGHTS} weights, biases and inputs at most"
    if not has_kernel(text, dtype, device, batch_class):
        return "no kernel that takes this reads x from several tensors"
    each = [layer.alone.text for layer in layers]
    ways = each, [" | ".join(each)]
    alone = min(ways, key=lambda texts: _us(texts, dtype, device, batch_class))
    return slower_than_concatenated(text, alone, dtype, device, batch_class)


def _us(texts: Sequence[str], dtype: torch.dtype, device: int, batch_class: int) -> float:
    return sum(predicted_us(text, BATCHES[batch_class], dtype, device) for text in texts)


def slower_than_concatenated(
    text: str, alone: Sequence[str], dtype: torch.dtype, device: int, batch_class: int
) -> str | None:
    """Why kernels that read x from several tensors are predicted to take more than concatenating x and running the
    texts of `alone`; or None."""
    batch, gpu = BATCHES[batch_class], Gpu(*gpu_limits(device))
    moved = 2 * batch * parse_layers(text)[0].in_features * ELEMENT_BYTES[dtype_name(dtype)]
    concatenating = gpu.rates.behind_us + moved / (gpu.memory_bytes * gpu.sms)
    several, of_one = (_us(texts, dtype, device, batch_class) for texts in ([text], alone))
    if several <= of_one + concatenating:
        return None
    return (
        f"kernels that read x from several tensors are predicted to take {several:.1f} us, others {of_one:.1f} and "
        f"concatenating {concatenating:.1f}"
    )


def explain_inputs(chain: Chain, x: Tensor, batch: int) -> str:
    """Whether the inputs of a layer are read where they lie, in words."""
    text = text_for(chain, x)
    reason = why_concatenated(text, x, batch)
    if reason is not None:
        return f"of several inputs: concatenated before, because {reason}"
    if not x.is_cuda:
        return "of several inputs: each is read where it lies, and its gradient written there"
    from factorlayer.plan.planner import explain  # not needed to run kernels that are in the cache

    device, batch_class = x.get_device(), class_of_batch(batch)
    kernels = explain(text, dtype_name(x.dtype), batch_class, *gpu_limits(device))
    _, reason = _at_once(text, x.dtype, device, batch_class)
    how = f"concatenated, because {reason}" if reason else "read where they lie, by one plan for all gradients"
    return f"of several inputs, read where they lie: {kernels}\nbackward they are {how}"


def fused_inputs(text: str, inputs: Sequence[Tensor], tensors: Sequence[Tensor], recorded: bool) -> Tensor:
    """What the layers of a text make of rows [N, features of each], side by side. `tensors` are ordered as a stack's:
    each layer's weights, and its bias behind them."""
    compiling = is_compiling()
    given = [*inputs, *tensors]
    if recorded and compiling:  # torch.compile wants every input of a Function once
        given = [t.view_as(t) if any(t is other for other in given[:i]) else t for i, t in enumerate(given)]
    y: Tensor
    try:
        if recorded and compiling:
            y = _Inputs.apply(text, *given)
        elif recorded:
            refuse_traced_gradients()
            y = _apply_inputs(text, *given)
        else:
            y = (_forward if compiling else _forward_now)(inputs, tensors, text)
    except RuntimeError as error:
        raise_better(error, text, inputs[0])
        raise
    return y


class _Inputs(Function):
    @staticmethod
    def forward(ctx: Any, text: str, *given: Tensor) -> Tensor:
        ctx.text, count = text, _count(text)
        ctx.save_for_backward(*given)
        y: Tensor = (_forward if is_compiling() else _forward_now)(given[:count], given[count:], text)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        return _back(ctx.text, needed(ctx, saved)[1:], grad_y, saved)


def _back(text: str, needs: Sequence[bool], grad_y: Tensor, given: Sequence[Tensor]) -> tuple[Any, ...]:
    count = _count(text)
    wanted = tuple(place for place, need in enumerate(needs) if need)
    many = are_vectors(grad_y) or (not is_compiling() and transforms_active())  # of which no op of ours has a rule
    if torch.is_grad_enabled() or many:

        def forward(*given: Tensor) -> Tensor:
            return by_torch(text, torch.cat(given[:count], 1), *given[count:])

        found = iter(differentiable_backward(forward, wanted, grad_y, given))
    elif grad_y.is_cuda and not is_compiling():  # without a round by the dispatcher
        found = iter(_backward_on_cuda(grad_y, given[:count], given[count:], text, wanted))
    else:
        backward = _backward if is_compiling() else _backward_now
        found = iter(backward(grad_y, given[:count], given[count:], text, wanted))
    return None, *(next(found) if need else None for need in needs)


_apply_inputs = super(Function, _Inputs).apply  # without what torch.func needs, as in layer_ops.py

if layer_ops.layer_at_once is not layer_ops.not_at_once:  # then all that follows is there
    from factorlayer.autograd.layer_ops import _C

    class _InputsAtOnce(_Inputs):
        forward = staticmethod(_C.record)

    def _backward_at_once(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        """What autograd's engine calls, as in layer_ops.py."""
        saved = ctx.saved_tensors
        needs = needed(ctx, saved)
        if not torch.is_grad_enabled():
            made: tuple[Any, ...] | None
            made = layer_ops._gradients_at_once(ctx.text, grad_y.contiguous(), saved, needs)
            if made is not None:
                return made
        return _back(ctx.text, needs[1:], grad_y, saved)

    _InputsAtOnce._backward_cls.apply = _backward_at_once  # type: ignore[attr-defined]
    record_inputs_by(super(Function, _InputsAtOnce).apply)


def _count(text: str) -> int:
    """How many tensors x is: as many as the first stage of the text has numbers."""
    return text.partition("; ")[0].count(" ")


def _backward_on_cuda(
    grad_y: Tensor, inputs: Sequence[Tensor], tensors: Sequence[Tensor], text: str, wanted: Sequence[int]
) -> list[Tensor]:
    """The gradients by one plan, if there is one for all of them and all are wanted; else those of the concatenated
    inputs, and the gradient of x is then cut into the inputs' parts."""
    count = len(inputs)
    x = inputs[0]
    device, dtype, batch = x.get_device(), x.dtype, x.shape[0]
    chain = parse_layers(text)[0]
    weights = tensors[: len(tensors) - chain.bias]
    ops = cuda_ops(device, dtype)
    everything = any(place < count for place in wanted) and all(count + i in wanted for i in range(len(weights)))
    if not everything or " | " in text:
        return _of_concatenated(grad_y, inputs, tensors, text, wanted)
    at_once, reason = _at_once(text, dtype, device, class_of_batch(batch))
    if reason is not None:
        return _of_concatenated(grad_y, inputs, tensors, text, wanted)
    key = text, class_of_batch(batch), dtype, device
    before = [replace(chain, activation="identity").text] * (chain.activation != "identity")
    behind = columns_texts(chain, chain.bias, None, ops.fits_of(batch))
    if batch and key not in _prepared:
        prepare_together([(each, batch) for each in (at_once, *before, *behind)], dtype, device)
        _prepared.add(key)
    with torch.no_grad():
        grad = grad_y.reshape(batch, chain.out_features)
        z = _forward_now(inputs, tensors, before[0]) if before else grad
        grad, of_bias = back_to_contractions(ops, behind, grad, z)
        found = dict(enumerate(explaining(_gradients_now)(grad, inputs, weights, at_once)))
        if of_bias is not None:
            found[count + len(weights)] = of_bias
    return [found[place] for place in wanted]


_prepared: set[Hashable] = set()


@functools.lru_cache(1024)
def _at_once(text: str, dtype: torch.dtype, device: int, batch_class: int) -> tuple[str, str | None]:
    """The text that is asked for all gradients of a layer without its bias and activation, and why x is concatenated
    instead: None if one plan makes them and is predicted to take less than that."""
    chain = Chain.parse(text)
    plain = replace(chain, bias=False, activation="identity")
    back = replace(plain, backward=True).text
    if chain.parameters:
        return back, "its activation has parameters"
    if len(chain.contractions) + 2 * len(chain.inputs) > MAX_WEIGHTS:
        return back, f"CUDA kernels take {MAX_WEIGHTS} weights, inputs and gradients of these at most"
    if not has_kernel(back, dtype, device, batch_class):
        return back, "no plan for all gradients reads x from several tensors"
    ops, batch = cuda_ops(device, dtype), BATCHES[batch_class]
    alone = [asked for asked, _ in launched_texts(plain.alone.text, ops.fits_of(batch), batch, us=ops.us)]
    return back, slower_than_concatenated(back, alone, dtype, device, batch_class)


def _of_concatenated(
    grad_y: Tensor, inputs: Sequence[Tensor], tensors: Sequence[Tensor], text: str, wanted: Sequence[int]
) -> list[Tensor]:
    count = len(inputs)
    first, *others = parse_layers(text)
    x, alone = torch.cat(list(inputs), 1), " | ".join(layer.text for layer in (first.alone, *others))
    of_x = any(place < count for place in wanted)
    places = [0] * of_x + [place - count + 1 for place in wanted if place >= count]
    if others:
        made = torch.ops.factorlayer.stack_backward(grad_y, x, tensors, alone, places)
    else:
        bias = tensors[-1] if first.bias else None
        weights = tensors[: len(tensors) - first.bias]
        bits = [1 if not place else 2 << place if place <= len(weights) else 2 for place in places]
        with torch.no_grad():
            ops = cuda_ops(x.get_device(), x.dtype)
            made = gradients(ops, grad_y, x, weights, bias, alone, sum(bits))
        found = dict(zip(sorted(bits), made, strict=True))
        made = [found[bit] for bit in bits]
    parts = made[0].split([x.shape[1] for x in inputs], 1) if of_x else ()
    return [*(parts[place] for place in wanted if place < count), *made[of_x:]]


def _backward_op(
    grad_y: Tensor, inputs: Sequence[Tensor], tensors: Sequence[Tensor], stack: str, wanted: Sequence[int]
) -> list[Tensor]:
    """The raw op, whose results share no memory."""
    return [t.contiguous() for t in _backward_on_cuda(grad_y, inputs, tensors, stack, wanted)]


# What PyTorch asks of an op


def _forward_fake(inputs: Sequence[Tensor], tensors: Sequence[Tensor], stack: str) -> Tensor:
    layers = parse_layers(stack)
    x = inputs[0]
    if tuple(x.shape[1] for x in inputs) != layers[0].inputs:
        raise RuntimeError(f"factorlayer: inputs must be [batch, {layers[0].inputs}]")
    for tensor in (*inputs, *tensors):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise RuntimeError("factorlayer: weights and biases must have the inputs' dtype and device")
    return x.new_empty(x.shape[0], layers[-1].out_features)


def _backward_fake(
    grad_y: Tensor, inputs: Sequence[Tensor], tensors: Sequence[Tensor], stack: str, wanted: Sequence[int]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in ((*inputs, *tensors)[place] for place in wanted)]


def _gradients_fake(grad_y: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], chain: str) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (*inputs, *weights)]


def _forward_flops(input_shapes: Any, tensor_shapes: Any, stack: str, **_: Any) -> int:
    return stack_forward_flops(input_shapes[0], tensor_shapes, stack)


def _backward_flops(
    grad_y_shape: Any, input_shapes: Any, tensor_shapes: Any, stack: str, wanted: Sequence[int], **_: Any
) -> int:
    """The FLOPs of the same layers for one x: its gradient is one product, whichever of the inputs wants its part."""
    count = len(input_shapes)
    places = {max(0, place - count + 1) for place in wanted}
    return stack_backward_flops(grad_y_shape, input_shapes[0], tensor_shapes, stack, sorted(places))


if missing_extension is None:
    torch.library.register_fake("factorlayer::inputs_forward")(_forward_fake)
    torch.library.register_fake("factorlayer::inputs_backward")(_backward_fake)
    torch.library.register_fake("factorlayer::inputs_gradients")(_gradients_fake)
    register_flop_formula(torch.ops.factorlayer.inputs_forward)(_forward_flops)
    register_flop_formula(torch.ops.factorlayer.inputs_backward)(_backward_flops)
    _cuda = torch.library.Library("factorlayer", "IMPL")
    _cuda.impl("inputs_backward", _backward_op, "CUDA")
