"""v3 of a stack of layers: the raw ops stack_forward, _states and _backward, layers_backward, and what PyTorch has to
know about them.

tensors are each layer's weights and bias, layer by layer. A GPU has one kernel for some stacks, and one for all
gradients of fewer. To be trained, a stack is cut into runs of layers that have both; what is left is run layer by layer
(stacks/stack.py). Layers that are trained one by one are one run where that takes less: one kernel forward stores
what each makes, or one takes the gradient back through the activation of the one before (autograd/layerwise.py).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from factorlayer.activations.named import activate
from factorlayer.autograd import layer_ops
from factorlayer.autograd.layer_ops import (
    ask_planner,
    forward_keeping,
    has_kernel,
    kept_for_many,
    kept_text,
    missing_extension,
    predicted_us,
    raise_better,
    refuse_traced_gradients,
    runs_in_tf32,
    transforms_active,
    why_not_fused,
)
from factorlayer.autograd.layerwise import (
    all_at_once,
    backward_by_layers,
    handed_back,
    has_backward,
    prepare_layers,
    tensors_of,
    texts_by_layers,
    without_activation,
)
from factorlayer.autograd.needed import needed
from factorlayer.autograd.runtime import class_of_batch
from factorlayer.autograd.vectors import are_vectors
from factorlayer.kernels.batches import BATCHES, LAST
from factorlayer.maths.batched import batched
from factorlayer.maths.chain import MOST_LAYERS, MOST_TEXT, Chain, parse_layers

if missing_extension is None:
    _forward = torch.ops.factorlayer.stack_forward.default
    _forward_now = _forward._op  # the same, but for a Python call around it, which torch.compile has to see
    _states = torch.ops.factorlayer.stack_states.default
    _layers_backward = torch.ops.factorlayer.layers_backward.default

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """Layers one behind another, as the raw ops take them."""

    layers: tuple[Chain, ...]
    text: str = field(init=False, compare=False, repr=False)
    tf32_text: str = field(init=False, compare=False, repr=False)  # of the same layers with tf32

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " | ".join(layer.text for layer in self.layers))
        object.__setattr__(self, "tf32_text", " | ".join(layer.tf32_text for layer in self.layers))

    def text_for(self, x: Tensor) -> str:
        return self.tf32_text if runs_in_tf32(x) else self.text


# The most elements of a dense weight whose product is not left to a library. 768 -> 3072 -> 768 trains 1.3 times as
# fast by oneMKL, 48-512-256-12 does not; so it is with cuBLAS in 16 bits and tf32.
LARGEST_DENSE = 1 << 19


def is_large_product(layer: Chain) -> bool:
    """Whether a layer is one product that is large enough to be left to PyTorch's library."""
    return layer.is_dense and layer.contractions[0].weight_size > LARGEST_DENSE


def is_left_to_pytorch(layer: Chain, x: Tensor) -> bool:
    """Whether a layer of one contraction is left to PyTorch, rather than run by our kernels, which take less time to
    call. csrc/ops/eager.cpp decides the same."""
    if is_compiling():
        return True
    return not x.is_cuda and (x.dtype not in (torch.float32, torch.float64) or is_large_product(layer))


def is_short(dtype: torch.dtype, tf32: bool) -> bool:
    """Whether products are of 16-bit numbers, or of the 19 bits that TF32 keeps."""
    return dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and tf32)


def is_left_to_cublas(layer: Chain, x: Tensor) -> bool:
    """Whether a layer of a stack that is run by itself is left to cuBLAS. In float32 our kernels, which split numbers
    into bfloat16 ones, are twice as fast."""
    return is_large_product(layer) and x.is_cuda and is_short(x.dtype, runs_in_tf32(x))


MANY = 3 * BATCHES[-1] // 2  # samples, more than fill a GPU once, that layers are put together for

# A run of a stack's layers: the number of the first one, that behind the last one, and their text, which ends in STATES
# if their gradients are made layer by layer. It is a tuple, as torch.compile takes that for a constant.
Run = tuple[int, int, str]
STATES = " | states"


def why_no_stack(x: Tensor) -> str | None:
    """Why x cannot go through several layers at once, whatever the layers are, or None."""
    reason = why_not_fused(x)
    if reason is not None:
        return reason
    return "torch.func takes it layer by layer" if transforms_active() else None


def why_auto_is_not_stacked(stack: Stack, x: Tensor) -> str | None:
    """Why auto takes the layers one by one, though all at once would do, or None."""
    if x.is_cuda:
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return "matrix products of 16 bits are left to PyTorch"
    if any(map(is_large_product, stack.layers)):
        return "products with a weight this large are left to PyTorch"
    return None


def runs(stack: Stack, x: Tensor, recorded: bool, joined: bool = False, many: bool = False) -> tuple[Run, ...]:
    """The runs of layers that go through one kernel each; none if no kernel takes several layers. Layers between runs
    are left to run by themselves; if `joined`, only where they are no faster together. Runs are chosen for as many
    samples as x has, or for `many`."""
    text = stack.text_for(x)
    if len(stack.layers) > MOST_LAYERS or len(text) > MOST_TEXT:
        return ()
    if x.is_cuda:
        batch_class = LAST if many or is_compiling() else class_of_batch(x.numel() // (x.shape[-1] or 1))
        return runs_on_gpu(text, x.dtype, x.get_device(), recorded, joined, batch_class)
    return ((0, len(stack.layers), text),)


def known(function: Callable[..., T]) -> Callable[..., T]:
    """The function with a cache, in a form that torch.compile takes for a constant, which what lru_cache returns is
    not."""
    cached = functools.lru_cache(1024)(function)

    def call(*args: Hashable) -> T:
        return cached(*args)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def _read_cut(answer: str, count: int) -> list[tuple[int, int]]:
    """Reads a cut as the planner or the cache writes it: pairs of the first layer of a run and the one behind its
    last."""
    if not _CUT.fullmatch(answer):
        raise RuntimeError(f"factorlayer: a cut of {count} layers cannot be read: {answer[:200]!r}; empty the cache")
    ends = list(map(int, re.findall("[0-9]+", answer)))
    if ends != sorted(ends) or any(end > count for end in ends):
        raise RuntimeError(f"factorlayer: {answer[:200]!r} is no cut of {count} layers; empty the cache")
    return list(zip(ends[::2], ends[1::2], strict=True))


_CUT = re.compile(r"\(((\([0-9]{1,6}, [0-9]{1,6}\), )*\([0-9]{1,6}, [0-9]{1,6}\),?)?\)", re.ASCII)


@known
def runs_on_gpu(
    text: str,
    dtype: torch.dtype,
    device: int,
    recorded: bool,
    joined: bool = False,
    batch_class: int = LAST,
) -> tuple[Run, ...]:
    layers = text.split(" | ")
    found: list[Run] = []
    cut = ask_planner("cut", text + " | backward" * recorded, dtype, batch_class, device)
    for begin, end in _read_cut(cut, len(layers)):
        if found and end - begin == 1:  # one more layer for itself, behind others
            first, before, _ = found[-1]
            longer = " | ".join(layers[first:end]) + STATES
            alone = before - first == 1 or found[-1][2].endswith(STATES)
            if before == begin and alone and has_kernel(longer, dtype, device):
                found[-1] = (first, end, longer)
                continue
        found.append((begin, end, " | ".join(layers[begin:end])))
    return _joined(found, layers, dtype, device, batch_class) if recorded and joined else tuple(found)


def _joined(
    found: Sequence[Run], layers: Sequence[str], dtype: torch.dtype, device: int, batch_class: int
) -> tuple[Run, ...]:
    """The runs, with those added that layers outside of them form. Neighbours that are trained one by one become one
    run where the first is handed the gradient that the second makes, or one kernel makes the states of both."""
    taken = {i for begin, end, _ in found for i in range(begin, end)}
    chains = list(map(Chain.parse, layers))
    short = is_short(dtype, chains[0].tf32)
    taken |= {i for i, chain in enumerate(chains) if chain.parameters or (short and is_large_product(chain))}
    alone = [(i, i + 1, layer) for i, layer in enumerate(layers) if i not in taken]
    every = " | ".join(layers)

    def goes_on(begin: int) -> bool:
        """Whether the layer there is joined to the one before it."""
        handed = handed_back(every, dtype, device, batch_class)[begin - 1]
        return handed or begin in _inside(_parts(every, dtype, device))

    made: list[Run] = []
    for begin, end, text in sorted([*found, *alone]):
        one_by_one = end - begin == 1 or text.endswith(STATES)
        first, before, last = made[-1] if made else (0, 0, "")
        behind_one = before == begin and (before - first == 1 or last.endswith(STATES))
        if one_by_one and behind_one and goes_on(begin):
            made[-1] = (first, end, " | ".join(layers[first:end]) + STATES)
        else:
            made.append((begin, end, text))
    return tuple(run for run in made if run not in alone)


def _inside(parts: Sequence[str]) -> set[int]:
    """The layers that are in a part, behind another layer of it."""
    ends = list(itertools.accumulate(1 + part.count(" | ") for part in parts))
    return set(range(ends[-1])) - {0, *ends}


def texts_of_run(text: str, batch: int, dtype: torch.dtype, device: int, trained: bool) -> list[tuple[str, int]]:
    """The texts of a run's kernels, forward, and back if it is `trained`, each with its number of samples."""
    if not text.endswith(STATES):
        return [(text, batch), (f"{text} | backward", batch)][: 1 + trained]
    layers = text.removesuffix(STATES)
    everything, kept = range(1 + sum(_tensors(layers))), keeping(layers, dtype, device, batch)
    return [*_stored(layers, kept, batch, dtype, device), *texts_by_layers(kept, everything, batch, dtype, device)]


def _stored(layers: str, kept: str, batch: int, dtype: torch.dtype, device: int) -> list[tuple[str, int]]:
    return [(part + STATES * (" | " in part), batch) for part in _kept_parts(layers, kept, dtype, device)]


def _kept_parts(layers: str, kept: str, dtype: torch.dtype, device: int) -> list[str]:
    """The parts of _parts(), of which single layers say what they keep."""
    each, at, made = kept.split(" | "), 0, []
    for part in _parts(layers, dtype, device):
        made.append(part if " | " in part else each[at])
        at += 1 + part.count(" | ")
    return made


@known
def keeping(layers: str, dtype: torch.dtype, device: int, batch: int | None) -> str:
    """Layers that are trained one by one, of which those say so that keep states between their kernels: with a batch,
    or in a graph, which is for any. One that is handed the gradient of what it activates makes no slope."""
    alone = {part for part in _parts(layers, dtype, device) if " | " not in part}
    batch_class = class_of_batch(batch or MANY)

    def of(layer: str, is_handed: bool) -> str:
        if layer not in alone or has_backward(layer, dtype, device, batch_class):
            return layer
        asked = without_activation(layer) if is_handed else layer, dtype, device
        kept = kept_for_many(*asked) if batch is None else kept_text(*asked, batch)
        return replace(Chain.parse(layer), kept=Chain.parse(kept).kept).text if kept else layer

    handed = handed_back(layers, dtype, device, batch_class)
    return " | ".join(map(of, layers.split(" | "), handed))


@known
def _parts(text: str, dtype: torch.dtype, device: int) -> tuple[str, ...]:
    """Layers that are trained one by one, cut into parts: neighbours whose states one kernel makes and stores, and
    single layers."""

    def us(part: str) -> float:
        return predicted_us(part + STATES * (" | " in part), MANY, dtype, device)

    first, *rest = text.split(" | ")
    made = [first]
    for layer in rest:
        longer = f"{made[-1]} | {layer}"
        if us(longer) < us(made[-1]) + us(layer):
            made[-1] = longer
        else:
            made.append(layer)
    return (text,) if us(text) < sum(map(us, made)) else tuple(made)


def fused_stack(text: str, x: Tensor, tensors: Sequence[Tensor], recorded: bool) -> Tensor:
    """x [N, in] -> [N, out], through the layers of a run's text."""
    compiling = is_compiling()
    if recorded and compiling:  # torch.compile wants every input of a Function once
        tensors = [t.view_as(t) if any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
    y: Tensor
    try:
        if recorded and compiling:
            y = _Stack.apply(text, x, *tensors)
        elif recorded:
            refuse_traced_gradients()
            y = _apply_stack(text, x, *tensors)
        elif text.endswith(STATES):
            layers = text.removesuffix(STATES)
            y = _made_by_layers(layers, layers, x, tensors, stored=False)[0][-1]
        else:
            y = _forward(x, tensors, text) if compiling else _forward_now(x, tensors, text)
    except RuntimeError as error:
        raise_better(error, text, x)
        raise
    return y


def _made_by_layers(
    text: str, kept: str, x: Tensor, tensors: Sequence[Tensor], stored: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What each layer makes if it is to be `stored`; else what the last layer of each part makes. And the states that
    layers keep, whose texts in `kept` say so."""
    made, at = [x], 0
    states: list[Tensor] = []  # torch.compile knows no list[Tensor]()
    forward = _forward if is_compiling() else _forward_now
    for part in _kept_parts(text, kept, x.dtype, x.get_device()):
        own = tensors[at : at + sum(_tensors(part))]
        at += len(own)
        stores = stored and " | " in part
        try:
            if stores:
                made += _states(made[-1], own, part)
            elif " kept " in part:
                y, *further = _keep(made[-1], own, part)
                made.append(y)
                states += further
            else:
                made.append(forward(made[-1], own, part))
        except RuntimeError as error:
            raise_better(error, part + STATES * stores, x)
            raise
    return made[1:], states


@known
def _has_bias(layer: str) -> bool:
    return Chain.parse(layer).bias


def _keep(x: Tensor, tensors: Sequence[Tensor], layer: str) -> list[Tensor]:
    if _has_bias(layer):
        return forward_keeping(x, tensors[:-1], tensors[-1], layer)
    return forward_keeping(x, tensors, None, layer)


_prepared: set[Hashable] = set()


def _prepare_training(text: str, kept: str, x: Tensor, needs: tuple[bool, ...]) -> None:
    """Compiles and loads, before a first forward pass, what it runs and what the backward pass behind it runs."""
    device, batch = x.get_device(), len(x)
    key = kept, needs, class_of_batch(batch), x.dtype, device
    if batch and key not in _prepared:
        wanted = [place for place, need in enumerate(needs) if need]
        prepare_layers(kept, wanted, batch, x.dtype, device, _stored(text, kept, batch, x.dtype, device))
        _prepared.add(key)


class _Stack(Function):
    @staticmethod
    def forward(ctx: Any, text: str, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.text = ctx.layers = text
        if text.endswith(STATES):
            layers = text.removesuffix(STATES)
            ctx.layers = kept = _kept_by(layers, x, is_compiling() or all(ctx.needs_input_grad[2:]))
            if not is_compiling():
                _prepare_training(layers, kept, x, ctx.needs_input_grad[1:])
            made, further = _made_by_layers(layers, kept, x, tensors, stored=True)
            states, y = [*made[:-1], *further], made[-1]
        else:
            states, y = [], _forward(x, tensors, text)
        ctx.save_for_backward(*states, x, *tensors)
        ctx.states = len(states)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # asked for once: checkpointing brings them back only once
        states, given = saved[: ctx.states], saved[ctx.states :]
        # Layers that keep states for each other make all gradients.
        needs = ctx.needs_input_grad if states else needed(ctx, given)
        return _back(ctx.text, ctx.layers, needs[1:], grad_y, states, given)


def _kept_by(layers: str, x: Tensor, learns: bool) -> str:
    """The layers' texts for training, of which those say so that keep states: none does if some weight does not
    learn."""
    if not learns or not x.is_cuda or (not is_compiling() and not len(x)):
        return layers
    return keeping(layers, x.dtype, x.get_device(), None if is_compiling() else len(x))


def _back(
    text: str, layers: str, needs: Sequence[bool], grad_y: Tensor, states: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Any, ...]:
    """The gradients of a run, by its text, or by its layers' where they are made one by one."""
    wanted = tuple(place for place, need in enumerate(needs) if need)
    many = are_vectors(grad_y) or (not is_compiling() and transforms_active())  # of which no op of ours has a rule
    if torch.is_grad_enabled() or many:
        forward = functools.partial(by_torch, text.removesuffix(STATES))
        found = iter(differentiable_backward(forward, wanted, grad_y, given))
    elif states:
        found = iter(_by_layers(layers, wanted, grad_y, states, *given))
    else:
        x, *tensors = given
        found = iter(all_at_once(grad_y, x, tensors, text, wanted))
    return None, *(next(found) if need else None for need in needs)


_apply_stack = super(Function, _Stack).apply  # without what torch.func needs, as in layer_ops.py

if layer_ops.stack_at_once is not layer_ops.not_at_once:  # then all that follows is there
    from factorlayer.autograd.layer_ops import _C

    class _StackAtOnce(_Stack):
        forward = staticmethod(_C.record)

        @staticmethod
        def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            return _back(ctx.text, ctx.text, needed(ctx, saved)[1:], grad_y, (), saved)

    def _backward_at_once(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        """What autograd's engine calls, as in layer_ops.py."""
        saved = ctx.saved_tensors
        needs = needed(ctx, saved)
        made: tuple[Any, ...] | None = None
        if not torch.is_grad_enabled():
            made = layer_ops._gradients_at_once(ctx.text, grad_y.contiguous(), saved, needs)
        return _back(ctx.text, ctx.text, needs[1:], grad_y, (), saved) if made is None else made

    _StackAtOnce._backward_cls.apply = _backward_at_once  # type: ignore[attr-defined]
    layer_ops.record_stack_by(super(Function, _StackAtOnce).apply)


def differentiable_backward(
    forward: Callable[..., Tensor], wanted: tuple[int, ...], grad_y: Tensor, given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The backward pass of a function by PyTorch's operations, which it can differentiate again."""
    with torch.enable_grad():
        leaves = [t.view_as(t) for t in given]  # one that stands at two places has a gradient for each
        y = forward(*leaves)
    if not y.requires_grad:  # a step's
        return tuple(torch.zeros_like(leaves[place]) for place in wanted)
    return torch.autograd.grad(
        y, [leaves[place] for place in wanted], grad_y, create_graph=True, allow_unused=True, materialize_grads=True
    )


def _by_layers(
    text: str, wanted: tuple[int, ...], grad_y: Tensor, states: Sequence[Tensor], x: Tensor, *tensors: Tensor
) -> Sequence[Tensor]:
    backward = _layers_backward if is_compiling() else backward_by_layers  # without a round by the dispatcher
    return backward(grad_y, x, states, tensors, text, wanted)


def by_torch(text: str, x: Tensor, *tensors: Tensor) -> Tensor:
    """The stack's result by operations that PyTorch can differentiate."""
    at = 0
    for layer in parse_layers(text):
        count = len(layer.contractions)
        end = at + count + layer.parameters
        y = batched(layer, x, tensors[at : at + count])
        x = activate(layer.activation, y + tensors[end] if layer.bias else y, tensors[at + count : end])
        at = end + layer.bias
    return x


_tensors = known(tensors_of)


# What PyTorch asks of an op


def _forward_fake(x: Tensor, tensors: Sequence[Tensor], stack: str) -> Tensor:
    layers = parse_layers(stack)
    if x.shape[1] != layers[0].in_features:
        raise RuntimeError(f"factorlayer: x must be [batch, {layers[0].in_features}]")
    for tensor in tensors:
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise RuntimeError("factorlayer: weights and biases must have x's dtype and device")
    return x.new_empty(x.shape[0], layers[-1].out_features)


def _states_fake(x: Tensor, tensors: Sequence[Tensor], stack: str) -> list[Tensor]:
    _forward_fake(x, tensors, stack)
    return [x.new_empty(x.shape[0], layer.out_features) for layer in parse_layers(stack)]


def _backward_fake(
    grad_y: Tensor, x: Tensor, tensors: Sequence[Tensor], stack: str, wanted: Sequence[int]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in ((x, *tensors)[place] for place in wanted)]


def _layers_backward_fake(
    grad_y: Tensor, x: Tensor, states: Sequence[Tensor], tensors: Sequence[Tensor], stack: str, wanted: Sequence[int]
) -> list[Tensor]:
    return _backward_fake(grad_y, x, tensors, stack, wanted)


def forward_flops(x_shape: Any, tensor_shapes: Any, stack: str, *, out_shape: Any = None, **_: Any) -> int:
    return sum(layer.forward_flops(x_shape[0]) for layer in parse_layers(stack))


def backward_flops(
    grad_y_shape: Any, x_shape: Any, tensor_shapes: Any, stack: str, wanted: Sequence[int], **_: Any
) -> int:
    total, at, reaches_back = 0, 1, 0 in wanted
    for layer in parse_layers(stack):
        count = len(layer.contractions)
        wants_weights = [at + i in wanted for i in range(count)]
        total += layer.backward_flops(x_shape[0], reaches_back, wants_weights)
        end = at + count + layer.parameters + layer.bias
        reaches_back = reaches_back or any(place in wanted for place in range(at, end))
        at = end
    return total


def _layers_backward_flops(
    grad_y_shape: Any, x_shape: Any, state_shapes: Any, tensor_shapes: Any, stack: str, wanted: Sequence[int], **_: Any
) -> int:
    return backward_flops(grad_y_shape, x_shape, tensor_shapes, stack, wanted)


if missing_extension is None:
    torch.library.register_fake("factorlayer::stack_forward")(_forward_fake)
    torch.library.register_fake("factorlayer::stack_states")(_states_fake)
    torch.library.register_fake("factorlayer::stack_backward")(_backward_fake)
    torch.library.register_fake("factorlayer::layers_backward")(_layers_backward_fake)
    register_flop_formula(torch.ops.factorlayer.stack_forward)(forward_flops)
    register_flop_formula(torch.ops.factorlayer.stack_states)(forward_flops)
    register_flop_formula(torch.ops.factorlayer.stack_backward)(backward_flops)
    register_flop_formula(torch.ops.factorlayer.layers_backward)(_layers_backward_flops)
    _cuda = torch.library.Library("factorlayer", "IMPL")
    _cuda.impl("layers_backward", torch.no_grad()(backward_by_layers), "CUDA")
