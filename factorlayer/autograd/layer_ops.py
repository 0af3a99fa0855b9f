"""v3: the raw ops of the compiled extension, and what PyTorch has to know about them.

factorlayer::forward and ::backward take tensors and the chain's text, and return new, contiguous tensors. Here are
their shapes (fakes), FLOP formulas, vmap rules and autograd. Backward needs x and the weights and recomputes the
states between contractions, or, on a GPU, is given those that lie in memory between passes anyway. Double backward
goes through the batched implementation, whose every operation PyTorch can differentiate again.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling, is_exporting
from torch.utils.flop_counter import register_flop_formula

from factorlayer.activations.named import activate
from factorlayer.autograd.backward import (
    Kept,
    Ops,
    counts_as,
    gradients,
    kept_if_worth_it,
    planned_behind,
    slope_of_kept,
    step_texts,
    texts,
    visits_of,
)
from factorlayer.autograd.build import check_build
from factorlayer.autograd.needed import needed
from factorlayer.autograd.runtime import (
    MAX_WEIGHTS,
    class_of_batch,
    dtype_name,
    prepare_together,
    raise_failure,
    tf32_allowed,
    untraced,
    why_not_on_gpu,
)
from factorlayer.autograd.vectors import are_vectors, as_samples, one_by_one
from factorlayer.kernels.batches import BATCHES, OF_SOME
from factorlayer.maths.batched import batched
from factorlayer.maths.chain import MOST_CONTRACTIONS, Chain
from factorlayer.plan.plan import asked_of, takes_turns

MOST_WANTED = 61  # weights that the op `backward` has bits for
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

try:
    _C = importlib.import_module("factorlayer._C")  # registers the ops
    check_build(_C)
except ImportError as error:
    missing_extension: ImportError | None = error
else:
    missing_extension = None
    _forward = torch.ops.factorlayer.forward.default
    _backward = torch.ops.factorlayer.backward.default
    _forward_states = torch.ops.factorlayer.forward_states.default
    _forward_now = _forward._op  # the same, but for a Python call around it, which torch.compile has to see


def why_not_fused(x: Tensor, chain: Chain | None = None) -> str | None:
    """Why the fused implementation cannot take x, or None; of a chain, if one is given."""
    reason = why_never_fused(x, chain)
    if reason is not None:
        return reason
    if forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    if transforms_active() and is_compiling():
        return "torch.compile cannot trace its autograd rule under torch.func"
    if chain is not None and chain.weights > MOST_WANTED and x.is_cuda and is_compiling():
        return f"torch.compile takes its gradients of {MOST_WANTED} weights at most, this layer has {chain.weights}"
    if is_exporting() and torch.onnx.is_in_onnx_export():
        return "ONNX has no operation like it"
    return None


def why_never_fused(x: Tensor, chain: Chain | None = None) -> str | None:
    """Why the fused implementation can take x at no time: the reasons of why_not_fused that do not depend on what
    PyTorch is doing just now."""
    if missing_extension is not None:
        return (
            f"the compiled extension factorlayer._C cannot be imported ({missing_extension}); build it with "
            "`pip install --no-build-isolation .` in factorlayer's source folder (with `-e .` if that is how it was "
            "installed)"
        )
    if type(x) is not Tensor and is_sharded(x):
        return "its kernels take what a process has of x, and x is a DTensor"
    if x.dtype not in DTYPES:
        return f"it has kernels for {', '.join(map(str, DTYPES))}, x is {x.dtype}"
    if chain is not None and len(chain.contractions) > MOST_CONTRACTIONS:
        return f"its kernels take {MOST_CONTRACTIONS} factors at most, this layer has {len(chain.contractions)}"
    if x.is_cuda:
        if chain is not None and chain.weights > MAX_WEIGHTS:
            return f"its CUDA kernels take {MAX_WEIGHTS} weights at most, this layer has {chain.weights}"
        return why_not_on_gpu(x.get_device())
    if not (x.is_cpu or x.is_meta):
        return f"it has kernels for CPU and CUDA tensors, x is on {x.device}"
    return None


def is_sharded(x: Tensor) -> bool:
    return type(x).__name__ == "DTensor"  # by name: to import it takes seconds


def explain_shards(parameters: Iterable[Tensor]) -> list[str]:
    """The line that explain() adds where parameters are DTensors, and nothing where they are not. They may serve an x
    that is one, or, under fully_shard, be made whole when they are used."""
    if not any(map(is_sharded, parameters)):
        return []
    return ["its parameters are DTensors now: of an x that is one, each process runs what it has (docs/distributed.md)"]


def text_for(chain: Chain, x: Tensor) -> str:
    """The chain as the raw ops take it: with tf32 where PyTorch's own switch allows it."""
    return chain.tf32_text if runs_in_tf32(x) else chain.text


def runs_in_tf32(x: Tensor, operation: str = "matmul") -> bool:
    return x.is_cuda and x.dtype == torch.float32 and tf32_allowed(operation)


def explain_fused(chain: Chain, x: Tensor, batch: int) -> str:
    """The kernels that a call with `batch` samples like x runs on x's GPU, and how gradients are made."""
    from factorlayer.plan.planner import explain  # not needed to run kernels that are in the cache

    text, device = text_for(chain, x), x.get_device()
    kernels = explain(text, dtype_name(x.dtype), class_of_batch(batch), *gpu_limits(device))
    everything = (1 << (len(chain.contractions) + 2)) - 1 - 2 * (not chain.bias)
    ops = cuda_ops(device, x.dtype)
    planned = visits_of(ops, text, everything, batch)
    back = [str(visit) for visit in reversed(planned)]
    if chain.parameters:
        back.insert(0, "activation: what it takes once more, and its gradients by PyTorch")
    elif chain.activation != "identity":
        first, *_ = steps = [Chain.parse(step) for step in planned_behind(ops, text, everything, batch)[1]]
        where = "with the product, made again" if first.slope else "behind the product, made again"
        (slope,) = (step for step in steps if step.slope)
        further = ["with the bias's gradient"] * (slope.sums > 0) + ["turned"] * (slope.turn is not None)
        back.insert(0, f"activation: grad_y back through it, {', '.join([where, *further])}")
    lines = [f"{kernels}\nbackward{' for each term' if chain.rank > 1 else ''}:", *back]
    if kept := kept_text(text, x.dtype, device, batch):
        in_training = explain(kept, dtype_name(x.dtype), class_of_batch(batch), *gpu_limits(device))
        lines[0] = f"{kernels}\ntrained, with states between kernels kept: {in_training}\nbackward, from these states:"
        if chain.contractions[0].tied:
            made_of = "the last state" if ops.fits_of(batch)(Chain.parse(slope_of_kept(kept))) else "x"
            slopes = [f"activation: grad_y back through it, from {made_of}"]
            back = slopes * (chain.activation != "identity") + ["all gradients at once"]
        lines[1:] = back
    return "\n  ".join(lines)


def kept_text(text: str, dtype: torch.dtype, device: int, batch: int) -> str:
    """The text of a layer that is trained with states between its passes kept; empty where it keeps none."""
    if not batch or not Chain.parse(text).may_keep:
        return ""
    return _kept_text(text, dtype, device, counts_as(batch))


@functools.lru_cache(1024)
def _kept_text(text: str, dtype: torch.dtype, device: int, batch: int) -> str:
    kept = ask_planner("kept", text, dtype, class_of_batch(batch), device)
    ops = cuda_ops(device, dtype)
    return kept_if_worth_it(text, kept, ops.fits_of(batch), batch, ops.us) if kept and ops.us else ""


@functools.lru_cache(1024)
def has_kernel(text: str, dtype: torch.dtype, device: int, batch_class: int = OF_SOME) -> bool:
    """Whether the engine has kernels of its own for a text, of so many samples."""
    return ask_planner("has_plan", text, dtype, batch_class, device) == "True"


def ask_planner(question: str, text: str, dtype: torch.dtype, batch_class: int, device: int) -> str:
    """What a function of planner.py says of a text on a GPU; from the cache, if it has been asked before."""
    asked = question, text, dtype_name(dtype), batch_class, *gpu_limits(device)
    answer: str = untraced(torch.ops.factorlayer.ask_planner, *asked)
    return answer


def predicted_us(text: str, batch: int, dtype: torch.dtype, device: int) -> float:
    """Microseconds of a text's kernels, as the planner predicts them."""
    batch_class = class_of_batch(batch)
    answers = ask_planner("times", text, dtype, batch_class, device).split(" ")
    asked = asked_of(text, batch_class)
    points = list(zip(asked, map(float, answers), strict=True))
    at = min(bisect.bisect_left(asked, batch), len(points) - 1)
    if takes_turns(text) and (batch_class == 0 or batch <= asked[0]):  # as long as the next of these
        return points[at][1]
    at = max(1, at)
    (before, us_before), (behind, us_behind) = points[at - 1], points[at]
    if us_behind == math.inf:
        return math.inf
    return us_before + (us_behind - us_before) / (behind - before) * (batch - before)


@functools.cache
def gpu_limits(device: int) -> tuple[int, int, int, int]:
    """What a plan depends on, as the engine has it of the driver: compute capability, multiprocessors, bytes of shared
    memory for a block, and bytes that memory moves in a microsecond by its clock and bus."""
    arch, sms, shared, memory = untraced(torch.ops.factorlayer.limits, device)
    return arch, sms, shared, memory


def prepare_fused(chain: Chain, x: Tensor, batch: int, recorded: bool) -> None:
    """Compiles and loads what a first call with `batch` samples like x would, and its backward pass if `recorded`.
    Raises CompileError."""
    if x.is_cuda:
        text, device = text_for(chain, x), x.get_device()
        ops = cuda_ops(device, x.dtype)
        asked = [(text, batch)]
        if recorded:
            kept = kept_text(text, x.dtype, device, batch)
            asked = step_texts(text, kept, ops.fits_of(batch), batch, ops.us)
        prepare_together(asked, x.dtype, device)


def fused(chain: Chain, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, recorded: bool) -> Tensor:
    """x [N, in] -> [N, out], with bias and activation; `recorded` if a backward pass may follow.

    Raises CompileError where a CUDA kernel cannot be had.
    """
    text = chain.tf32_text if runs_in_tf32(x) else chain.text
    y: Tensor
    try:
        if transforms_active():
            y = _TransformableChain.apply(text, x, bias, *weights)
        elif is_compiling():
            kept = _kept_in_graph(text, x, weights) if recorded else ""
            if kept:
                y = _KeptInGraph.apply(text, kept, x, bias, *weights)
            else:
                y = _Chain.apply(text, x, bias, *weights) if recorded else _forward(x, weights, bias, text)
        elif recorded:
            refuse_traced_gradients()
            kept = _kept_for(text, x, weights) if x.is_cuda else ""
            y = _apply_kept(text, kept, x, bias, *weights) if kept else _apply_chain(text, x, bias, *weights)
        else:
            y = _forward_now(x, weights, bias, text)
    except RuntimeError as error:  # PyTorch hands on a C++ exception's message only
        raise_better(error, text, x)
        raise
    return y


def _kept_for(text: str, x: Tensor, weights: Sequence[Tensor]) -> str:
    """The text of a layer that keeps states in this call; empty where it keeps none. The eager call is told for the
    next one."""
    device, batch = x.get_device(), x.shape[0]
    kept = kept_text(text, x.dtype, device, batch)
    settle(text, dtype_name(x.dtype), device, batch, kept)
    return kept if all(weight.requires_grad for weight in weights) else ""


def _kept_in_graph(text: str, x: Tensor, weights: Sequence[Tensor]) -> str:
    """The same in a compiled graph, which is for any number of samples: of a Monarch layer, whose state is the same for
    all of them, by what many would take."""
    if not x.is_cuda or not all(weight.requires_grad for weight in weights):
        return ""
    return kept_for_many(text, x.dtype, x.get_device())


def kept_for_many(text: str, dtype: torch.dtype, device: int) -> str:
    """The text of a Monarch layer that keeps its state if it is trained with many samples; else an empty one."""
    return kept_text(text, dtype, device, BATCHES[-1]) if Chain.parse(text).is_monarch else ""


kept_for_many._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward_keeping(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> list[Tensor]:
    """y, and behind it the states that a text says a layer keeps."""
    made: list[Tensor] = (_forward_states if is_compiling() else _forward_states._op)(x, weights, bias, text)
    return made


def product(x: Tensor, weights: Sequence[Tensor], text: str) -> Tensor:
    """What a chain's contractions alone make of rows, unrecorded."""
    made: Tensor = torch.ops.factorlayer.forward(x, weights, None, text)
    return made


def raise_better(error: RuntimeError, text: str, x: Tensor) -> None:
    """CompileError or OutOfMemoryError, if that is why a raw op failed on a GPU."""
    if x.is_cuda:
        raise_failure(text, x.dtype, x.shape[0], x.get_device())
        if "CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None


def any_requires_grad(x: Tensor, bias: Tensor | None, weights: Sequence[Tensor]) -> bool:
    if x.requires_grad or (bias is not None and bias.requires_grad):
        return True
    for weight in weights:  # noqa: SIM110 (any() takes three times as long)
        if weight.requires_grad:
            return True
    return False


transforms_active = torch._C._are_functorch_transforms_active  # whether a transform of torch.func is at work


def refuse_traced_gradients() -> None:
    """torch.jit.trace records a Function as a call of this process's Python, which is neither saved nor loaded."""
    if torch._C._is_tracing():
        raise RuntimeError(
            "factorlayer: torch.jit.trace cannot keep the gradients of the fused implementation; trace under "
            "torch.no_grad(), or with implementation='batched' where gradients are needed"
        )


# Autograd. The forward op and the backward op have a Function each, in two forms: one that saves through ctx, fast in
# eager mode, and one with setup_context, which is what torch.func can transform.


def _kept(ctx: Any, text: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The x, bias and weights that a backward pass needs. Where no weight learns and nothing is activated, it needs the
    sizes of x alone: one number stands for all of x, whose memory may go then, as nn.Linear lets it go."""
    x = tensors[0]
    if is_compiling() or x is None or any(ctx.needs_input_grad[3:]) or Chain.parse(text).activation != "identity":
        return tensors  # a compiler finds by itself what to keep
    ctx.is_x_kept = False
    return x.new_empty(()).expand(x.shape), *tensors[1:]


class _Chain(Function):
    @staticmethod
    def forward(ctx: Any, text: str, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.text = text
        ctx.save_for_backward(*_kept(ctx, text, (x, bias, *weights)))
        y: Tensor = _forward(x, weights, bias, text)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        backward = _recorded_backward if torch.is_grad_enabled() else _raw_backward
        saved = ctx.saved_tensors
        return _gradients(ctx.text, needed(ctx, saved), grad_y, saved, backward)


class _ChainNow(_Chain):
    """The op in eager mode, where every Python call counts."""

    @staticmethod
    def forward(ctx: Any, text: str, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.text = text
        ctx.to_save = _kept(ctx, text, (x, bias, *weights))  # which is all that save_for_backward does
        y: Tensor = _forward_now(x, weights, bias, text)
        return y


# Function.apply begins with what torch.func needs, which takes longer than the rest of it. This is the rest.
_apply_chain = super(Function, _ChainNow).apply


class _KeptChain(Function):
    """The op in eager mode on a GPU, of a layer that keeps the states between its passes."""

    @staticmethod
    def forward(ctx: Any, text: str, kept: str, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.text, ctx.kept = text, kept
        y, *states = forward_keeping(x, weights, bias, kept)
        ctx.to_save = x, bias, *weights, *states
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        saved, count = ctx.saved_tensors, len(ctx.needs_input_grad) - 2
        needs = needed(ctx, saved[:count])[1:]
        some = needs != ctx.needs_input_grad[1:]
        return None, *_gradients_by_states(ctx.text, ctx.kept, needs, grad_y, saved, some)


def _gradients_by_states(
    text: str, kept: str, needs: Sequence[bool], grad_y: Tensor, saved: Sequence[Any], some: bool
) -> tuple[Any, ...]:
    """What _gradients() makes, of states that were saved behind the x, bias and weights. Who wants to differentiate
    again, the gradients of several vectors, or `some` gradients alone, has states made anew."""
    given, states = saved[: len(needs) - 1], saved[len(needs) - 1 :]

    def by_states(text: str, wanted: int, *tensors: Any) -> tuple[Tensor, ...]:
        grad_y, x, bias, *weights = tensors
        return tuple(_backward_on_cuda(grad_y, x, weights, bias, text, wanted, Kept(kept, states)))

    anew = _recorded_backward if torch.is_grad_enabled() else _raw_backward
    plain = not (some or torch.is_grad_enabled() or are_vectors(grad_y) or transforms_active())
    return _gradients(text, needs, grad_y, given, by_states if plain else anew)


class _KeptInGraph(Function):
    """The same in a compiled graph, where the op for layers one behind another makes the gradients of this one."""

    @staticmethod
    def forward(ctx: Any, text: str, kept: str, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.text, ctx.kept, ctx.given = text, kept, 2 + len(weights)
        y, *states = forward_keeping(x, weights, bias, kept)
        ctx.save_for_backward(x, bias, *weights, *states)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        needs, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        given, states = saved[: ctx.given], saved[ctx.given :]
        if torch.is_grad_enabled():
            return None, *_gradients(ctx.text, needs, grad_y, given, _recorded_backward)
        x, bias, *weights = given
        tensors = weights if bias is None else [*weights, bias]
        places = [0, len(weights) + 1, *range(1, len(weights) + 1)]  # of x, the bias and the weights
        wanted = [place for place, need in zip(places, needs[1:], strict=True) if need]
        op = torch.ops.factorlayer.layers_backward.default
        made = dict(zip(sorted(wanted), op(grad_y, x, states, tensors, ctx.kept, sorted(wanted)), strict=True))
        return None, None, *(made[place] if need else None for place, need in zip(places, needs[1:], strict=True))


_apply_kept = super(Function, _KeptChain).apply

# Where nothing watches operators, a whole call is one call of C++ (csrc/eager.h), past the dispatcher and the Python
# around it. It needs names that PyTorch keeps to itself, each of which may be missing one day: then calls go to the raw
# ops.


def not_at_once(*_: Any) -> None:
    """Stands where there is no eager call. It returns None, which leaves the call to the raw ops."""


def _apply_backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    """The backward pass that autograd's engine calls, instead of looking `backward` up and calling that."""
    saved, count = ctx.saved_tensors, len(ctx.needs_input_grad) - 1
    needs = needed(ctx, saved[:count])
    if len(saved) > count:  # states are among them
        return _gradients_by_states(ctx.text, ctx.kept, needs, grad_y, saved, needs != ctx.needs_input_grad)
    if torch.is_grad_enabled():
        return _gradients(ctx.text, needs, grad_y, saved, _recorded_backward)
    if not ctx.is_x_kept:  # kernels are given an x to point at, of which they read nothing
        saved = torch.empty_like(saved[0], memory_format=torch.contiguous_format), *saved[1:]
    return gradients_now(ctx.text, grad_y, saved, needs)


def gradients_now(
    text: str, grad_y: Tensor, saved: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of (x, bias, *weights), unrecorded, behind a None in the place of the text. `needs` has an entry
    for the text, too."""
    made = _gradients_at_once(text, grad_y, saved, needs)
    if made is None and not grad_y.is_contiguous():  # as that of a sum
        made = _gradients_at_once(text, grad_y.contiguous(), saved, needs)
    return _gradients(text, needs, grad_y, saved, _raw_backward) if made is None else made


# Makes y of (text, tf32 text, whether to choose, x, bias, weights, whether they are in autocast's dtype already: no if
# it is left out).
layer_at_once: Callable[..., Tensor | None] = not_at_once
# Makes y of (text, tf32 text, whether to choose, x, the layers' weights and biases).
stack_at_once: Callable[..., Tensor | None] = not_at_once
# These record a y that one of the two has made, from (text, the tensors of x, weights, bias), or from (text, x, the
# layers' weights and biases). input_ops.py and stack_ops.py, which import this file, set them.
_record_inputs: Callable[..., Any] = not_at_once
_record_stack: Callable[..., Any] = not_at_once


def _recorded_inputs(*given: Any) -> Any:
    return _record_inputs(*given)


def _recorded_stack(*given: Any) -> Any:
    return _record_stack(*given)


def record_inputs_by(function: Callable[..., Tensor]) -> None:
    global _record_inputs
    _record_inputs = function


def record_stack_by(function: Callable[..., Tensor]) -> None:
    global _record_stack
    _record_stack = function


# Called with (text, dtype, device, batch, whether recorded): from then on an eager call that has to choose takes these
# kernels.
take_kernels: Callable[..., None] = not_at_once
# Called with (text, dtype, device, batch, the text that keeps states or ""): how a recorded eager call runs from then
# on.
settle: Callable[..., None] = not_at_once
_gradients_at_once: Callable[..., tuple[Any, ...] | None] = not_at_once
# Makes a decoder's step of (text, tokens, state, context, random numbers, parameters as a tuple, temperature).
decode_at_once: Callable[..., list[Tensor] | None] = not_at_once

if missing_extension is None:

    class _ChainAtOnce(_ChainNow):
        forward = staticmethod(_C.record)

    try:
        _ChainAtOnce._backward_cls.apply = _apply_backward  # type: ignore[attr-defined]
        _ChainAtOnce._backward_cls.keep_less = _kept  # type: ignore[attr-defined]
        _ChainAtOnce._backward_cls.is_x_kept = True  # type: ignore[attr-defined]
        _C.begin(
            (
                *(None, Tensor, nn.Parameter),
                Tensor.__dlpack_c_exchange_api__,
                torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs,
                super(Function, _ChainAtOnce).apply,
                _recorded_inputs,
                _recorded_stack,
                torch.is_grad_enabled,
                *(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
                (
                    torch._C._is_any_autocast_enabled,
                    torch._C._are_functorch_transforms_active,
                    torch._C._len_torch_dispatch_stack,
                    torch._C._len_torch_function_stack,
                    torch._C._is_tracing,
                    torch._C._autograd._profiler_enabled,
                ),
                *(forward_ad, "_current_level", "requires_grad", Tensor.is_neg, "text", "to_save"),
            )
        )
    except (AttributeError, ValueError):
        pass
    else:
        layer_at_once, take_kernels, _gradients_at_once = _C.layer, _C.take, _C.gradients
        stack_at_once, decode_at_once, settle = _C.stack, _C.decode, _C.settle


class _TransformableChain(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        y: Tensor = _forward(x, weights, bias, text)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.text = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        backward = _TransformableChainBackward.apply
        return _gradients(ctx.text, ctx.needs_input_grad, grad_y, ctx.saved_tensors, backward)


class _ChainBackward(Function):
    @staticmethod
    def forward(ctx: Any, text: str, wanted: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.text, ctx.wanted = text, wanted
        ctx.save_for_backward(*tensors)
        return _raw_backward(text, wanted, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor) -> tuple[Any, ...]:
        return _double_backward(ctx, grad_gradients)


class _TransformableChainBackward(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, wanted: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _raw_backward(text, wanted, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.text, ctx.wanted = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor) -> tuple[Any, ...]:
        return _double_backward(ctx, grad_gradients)


def _gradients(
    text: str,
    needs: Sequence[bool],
    grad_y: Tensor,
    saved: Sequence[Tensor | None],
    backward: Callable[..., tuple[Tensor, ...]],
) -> tuple[Any, ...]:
    wanted = 0
    for bit, need in enumerate(needs[1:]):  # x, bias, weights
        wanted |= need << bit
    if are_vectors(grad_y):
        found = iter(_of_vectors(text, wanted, grad_y, saved, backward))
    else:
        found = iter(backward(text, wanted, grad_y, *saved))
    return None, *(next(found) if need else None for need in needs[1:])


def _of_vectors(
    text: str,
    wanted: int,
    grad_y: Tensor,
    saved: Sequence[Tensor | None],
    backward: Callable[..., tuple[Tensor, ...]],
) -> Sequence[Tensor]:
    """The gradients for several vectors grad_y: by one call if only x's is wanted, as in a Jacobian; else vector by
    vector, as a weight's gradient is a sum over the samples of one vector."""
    x, *rest = saved
    if wanted == 1 and x is not None:
        return [as_samples(lambda grad_y, x: backward(text, wanted, grad_y, x, *rest)[0], grad_y, x)]
    return one_by_one(lambda grad_y: backward(text, wanted, grad_y, *saved), grad_y)


def _raw_backward(text: str, wanted: int, *tensors: Any) -> tuple[Tensor, ...]:
    grad_y, x, bias, *weights = tensors
    if len(weights) > MOST_WANTED and not x.is_cuda:
        return _backward_by_places(grad_y, x, weights, bias, text, wanted)
    at_once = x.is_cuda and not is_compiling() and not transforms_active()  # without a round by the dispatcher
    backward = _backward_on_cuda if at_once else _backward
    return tuple(backward(grad_y, x, weights, bias, text, wanted))


def _backward_by_places(
    grad_y: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str, wanted: int
) -> tuple[Tensor, ...]:
    """The gradients of more tensors than an integer has bits for, by the op for stacks: it takes the layer as a stack
    of one, whose bias stands behind its weights."""
    tensors = [*weights] if bias is None else [*weights, bias]
    last = len(weights) + 1
    at = [0, last, *range(1, last)]  # the place of what each bit stands for
    places = [place for bit, place in enumerate(at) if wanted >> bit & 1]
    found = torch.ops.factorlayer.stack_backward(grad_y, x, tensors, text, sorted(places))
    by_place = dict(zip(sorted(places), found, strict=True))
    return tuple(by_place[place] for place in places)


def _recorded_backward(text: str, wanted: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The backward pass that can be differentiated again, for a forward pass outside of torch.func; one of its
    transforms may still map the backward pass."""
    backward = _TransformableChainBackward if transforms_active() else _ChainBackward
    made: tuple[Tensor, ...] = backward.apply(text, wanted, *tensors)
    return made


def _double_backward(ctx: Any, grad_gradients: tuple[Tensor, ...]) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors

    def first_gradients(*present: Tensor) -> tuple[Tensor, ...]:
        rest = iter(present)
        given = [None if t is None else next(rest) for t in tensors]
        return _differentiable_backward(ctx.text, ctx.wanted, *given)

    vjp = torch.func.vjp(first_gradients, *(t for t in tensors if t is not None))[1]
    if are_vectors(*grad_gradients):
        found = iter(one_by_one(lambda *of_one: vjp(of_one), *grad_gradients))
    else:
        found = iter(vjp(grad_gradients))
    return None, None, *(None if t is None else next(found) for t in tensors)


def _differentiable_backward(text: str, wanted: int, *tensors: Any) -> tuple[Tensor, ...]:
    """The gradients of the backward op, by operations that PyTorch can differentiate."""
    chain = Chain.parse(text)
    grad_y, x, bias, *weights = tensors

    def forward(x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        count = len(chain.contractions)
        y = batched(chain, x, weights[:count])
        return activate(chain.activation, y if bias is None else y + bias, weights[count:])

    if bias is None:
        grad_x, *rest = torch.func.vjp(lambda x, *weights: forward(x, None, *weights), x, *weights)[1](grad_y)
        gradients = [grad_x, None, *rest]
    else:
        gradients = torch.func.vjp(forward, x, bias, *weights)[1](grad_y)
    return tuple(g for bit, g in enumerate(gradients) if wanted >> bit & 1)


def _backward_on_cuda(
    grad_y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    chain: str,
    wanted: int,
    by: Kept | None = None,
) -> list[Tensor]:
    device, dtype, batch = x.get_device(), x.dtype, x.shape[0]
    ops, kept = cuda_ops(device, dtype), "" if by is None else by.text
    key = chain, wanted, counts_as(batch), dtype, device, kept
    if batch and key not in _prepared:
        prepare_together(texts(chain, ops.fits_of(batch), batch, wanted, ops.us, kept), dtype, device)
        _prepared.add(key)
    if not torch.is_grad_enabled():  # as in a backward pass; the context takes longer than all Python here
        return gradients(ops, grad_y, x, weights, bias, chain, wanted, by=by)
    with torch.no_grad():
        return gradients(ops, grad_y, x, weights, bias, chain, wanted, by=by)


_prepared: set[Hashable] = set()  # backward passes whose kernels are there, or have been


@functools.cache
def cuda_ops(device: int, dtype: torch.dtype) -> Ops:
    """What gradients are made of on a GPU: ops without the Python call around them, which only torch.compile needs."""

    def fits_of(batch_class: int) -> Callable[[Chain], bool]:
        return lambda chain: has_kernel(chain.text, dtype, device, batch_class)

    @functools.cache
    def us_of(batch: int) -> Callable[[str], float]:
        return lambda text: predicted_us(text, batch, dtype, device)

    ops = torch.ops.factorlayer
    return Ops(
        explaining(ops.forward.default._op),
        explaining(ops.weight_gradient.default._op),
        explaining(ops.gradients.default._op),
        explaining(ops.slopes.default._op),
        explaining(ops.slopes_and_sums.default._op),
        fits_of(OF_SOME),
        fits_in=[fits_of(each) for each in range(len(BATCHES))],
        us=lambda batch: us_of(counts_as(batch)),
    )


def explaining(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, changed to raise CompileError where a kernel cannot be had."""

    def run(first: Tensor, *rest: Any) -> Any:
        try:
            return op(first, *rest)
        except RuntimeError:
            text = next(each for each in rest if isinstance(each, str))
            raise_failure(text, first.dtype, first.shape[0], first.get_device())
            raise

    return run


# What PyTorch asks of an op: the shapes it returns, its FLOPs, and how it is mapped over a further dimension.


def _forward_fake(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, chain: str) -> Tensor:
    for tensor in (*weights, x if bias is None else bias):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise RuntimeError("factorlayer: weights and bias must have x's dtype and device")
    return x.new_empty(x.shape[0], Chain.parse(chain).out_features)


def _forward_states_fake(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, chain: str) -> list[Tensor]:
    return [_forward_fake(x, weights, bias, chain), *(x.new_empty(x.shape[0], n) for n in Chain.parse(chain).kept)]


def _backward_fake(
    grad_y: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, chain: str, wanted: int
) -> list[Tensor]:
    gradients = [None if t is None else t.new_empty(t.shape) for t in (x, bias, *weights)]
    return [g for bit, g in enumerate(gradients) if g is not None and wanted >> bit & 1]


def _forward_flops(
    x_shape: Any, weight_shapes: Any, bias_shape: Any, chain: str, *, out_shape: Any = None, **_: Any
) -> int:
    return Chain.parse(chain).forward_flops(x_shape[0])


def _backward_flops(
    grad_y_shape: Any, x_shape: Any, weight_shapes: Any, bias_shape: Any, chain: str, wanted: int, **_: Any
) -> int:
    wants_weights = [bool(wanted >> (i + 2) & 1) for i in range(len(weight_shapes))]
    return Chain.parse(chain).backward_flops(x_shape[0], bool(wanted & 1), wants_weights)


def _forward_vmap(info: Any, in_dims: Any, x: Tensor, weights: Sequence[Tensor], bias: Any, chain: str) -> Any:
    x_dim, weight_dims, bias_dim, _ = in_dims
    op = torch.ops.factorlayer.forward
    if bias_dim is None and all(dim is None for dim in weight_dims):
        x = x.movedim(x_dim, 0)
        return op(x.flatten(0, 1), weights, bias, chain).unflatten(0, x.shape[:2]), 0
    ys = [
        op(
            _pick(x, x_dim, i),
            [_pick(w, d, i) for w, d in zip(weights, weight_dims, strict=True)],
            _pick(bias, bias_dim, i),
            chain,
        )
        for i in range(info.batch_size)
    ]
    return torch.stack(ys), 0


def _backward_vmap(
    info: Any,
    in_dims: Any,
    grad_y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    chain: str,
    wanted: int,
) -> Any:
    """Calls the op once for each index, as a weight's gradient is a sum over samples, which must not mix the
    indices."""
    grad_y_dim, x_dim, weight_dims, bias_dim, _, _ = in_dims
    if wanted == 1 and bias_dim is None and all(dim is None for dim in weight_dims):  # of x alone: more samples
        rows = [_first(t, dim, info.batch_size).flatten(0, 1) for t, dim in ((grad_y, grad_y_dim), (x, x_dim))]
        (grad_x,) = torch.ops.factorlayer.backward(*rows, weights, bias, chain, wanted)
        return [grad_x.unflatten(0, (info.batch_size, -1))], [0]
    per_index = [
        torch.ops.factorlayer.backward(
            _pick(grad_y, grad_y_dim, i),
            _pick(x, x_dim, i),
            [_pick(w, d, i) for w, d in zip(weights, weight_dims, strict=True)],
            _pick(bias, bias_dim, i),
            chain,
            wanted,
        )
        for i in range(info.batch_size)
    ]
    gradients = [torch.stack(of_one) for of_one in zip(*per_index, strict=True)]
    return gradients, [0] * len(gradients)


def _places_vmap(
    info: Any, in_dims: Any, grad_y: Tensor, x: Tensor, tensors: Sequence[Tensor], stack: str, wanted: Sequence[int]
) -> Any:
    """The rule of _backward_vmap for stack_backward."""
    grad_y_dim, x_dim, dims, _, _ = in_dims
    op = torch.ops.factorlayer.stack_backward
    per_index = [
        op(
            _pick(grad_y, grad_y_dim, i),
            _pick(x, x_dim, i),
            [_pick(t, d, i) for t, d in zip(tensors, dims, strict=True)],
            stack,
            wanted,
        )
        for i in range(info.batch_size)
    ]
    gradients = [torch.stack(of_one) for of_one in zip(*per_index, strict=True)]
    return gradients, [0] * len(gradients)


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the mapped dimension in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _pick(tensor: Any, dim: int | None, index: int) -> Any:
    """The part of a mapped tensor that belongs to one index."""
    return tensor if dim is None else tensor.select(dim, index)


if missing_extension is None:
    torch.library.register_fake("factorlayer::forward")(_forward_fake)
    torch.library.register_fake("factorlayer::forward_states")(_forward_states_fake)
    torch.library.register_fake("factorlayer::backward")(_backward_fake)
    torch.library.register_vmap("factorlayer::forward")(_forward_vmap)
    torch.library.register_vmap("factorlayer::backward")(_backward_vmap)
    torch.library.register_vmap("factorlayer::stack_backward")(_places_vmap)
    register_flop_formula(torch.ops.factorlayer.forward)(_forward_flops)
    register_flop_formula(torch.ops.factorlayer.forward_states)(_forward_flops)
    register_flop_formula(torch.ops.factorlayer.backward)(_backward_flops)
    _cuda = torch.library.Library("factorlayer", "IMPL")
    _cuda.impl("backward", _backward_on_cuda, "CUDA")
