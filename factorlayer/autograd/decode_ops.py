"""A decoder's step by its raw op, factorlayer::decode; drawing by scores, ::draw; the few best scores, ::few; and what
PyTorch has to know about them. They have no gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from factorlayer.autograd import layer_ops
from factorlayer.autograd.layer_ops import missing_extension, raise_better, transforms_active
from factorlayer.maths import noise
from factorlayer.maths.chain import Chain
from factorlayer.maths.decoder import DRAWS, FEW, MOST_SAMPLES, Decoder
from factorlayer.maths.recurrence import GATES

if missing_extension is None:
    _decode = torch.ops.factorlayer.decode.default
    _decode_now = _decode._op  # the same, but for a Python call around it, which torch.compile has to see
    _draw_now = torch.ops.factorlayer.draw.default._op
    _few_now = torch.ops.factorlayer.few.default._op


def why_not_fused(text: str, chain: Chain, state: Tensor) -> str | None:
    """Why the op cannot take a step of the decoder from such a state, or None. `chain` is its recurrence's."""
    if state.shape[-2] > MOST_SAMPLES:
        return f"it takes {MOST_SAMPLES} samples at once, there are {state.shape[-2]}"
    return _why_never(text, chain, state) or ("under torch.func it has no rule" if transforms_active() else None)


def _why_never(text: str, chain: Chain, state: Tensor) -> str | None:
    reason = layer_ops.why_not_fused(state, chain)
    if reason is not None or not state.is_cuda:
        return reason
    return _why_no_kernel(text, state.dtype, state.get_device()) or None


@functools.lru_cache(4096)
def _why_no_kernel(text: str, dtype: torch.dtype, device: int) -> str:
    if layer_ops.has_kernel(text, dtype, device, batch_class=0):
        return ""
    return "what its samples are multiplied by does not fit in shared memory"


_why_no_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decode(
    text: str,
    tokens: Tensor,
    state: Tensor,
    context: Tensor | None,
    tensors: tuple[Tensor, ...],
    random: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Tokens or scores, and the state behind them; of tensors as csrc/ops/decode.cpp has them. `random`, a seed, the
    number of the step, and what is zero between calls, goes one step on."""
    op = _decode if is_compiling() else _decode_now
    made: tuple[Tensor, Tensor]
    try:
        made = op(tokens, state, context, tensors, random, temperature, text)
    except RuntimeError as error:
        raise_better(error, text, state[0])
        raise
    return made


def draw(scores: Tensor, places: Tensor | None, random: Tensor, temperature: float) -> Tensor:
    """Draws as maths/noise.py does, by one kernel where there is one."""
    if is_compiling() or transforms_active() or layer_ops.why_never_fused(scores) is not None:
        return noise.draw(scores, places, random, temperature)
    try:
        made: Tensor = _draw_now(scores, places, random, temperature)
    except RuntimeError as error:
        raise_better(error, DRAWS[places is not None], scores)
        raise
    return made


MOST_FEW = 32  # that are found one after another


def few(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best scores, in float32 or float64, and their tokens, as topk gives them."""
    if not scores.is_cuda or count > MOST_FEW or is_compiling() or layer_ops.why_never_fused(scores) is not None:
        best, tokens = scores.topk(count, dim=1)
        return best, tokens
    try:
        best, tokens = _few_now(scores, count)
    except RuntimeError as error:
        raise_better(error, FEW, scores)
        raise
    return best, tokens


# What PyTorch asks of an op


def _decode_fake(
    tokens: Tensor,
    state: Tensor,
    context: Tensor | None,
    tensors: Sequence[Tensor],
    random: Tensor | None,
    temperature: float,
    text: str,
) -> tuple[Tensor, Tensor]:
    decoder, samples = Decoder.parse(text), tokens.shape[0]
    if decoder.made != "scores":
        return tokens.new_empty(samples), state.new_empty(state.shape)
    dtype = torch.float64 if state.dtype == torch.float64 else torch.float32
    return state.new_empty(samples, decoder.vocabulary, dtype=dtype), state.new_empty(state.shape)


def _draw_fake(scores: Tensor, places: Tensor | None, random: Tensor, temperature: float) -> Tensor:
    return random.new_empty(scores.shape[0])


def _few_fake(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    shape = scores.shape[0], count
    return scores.new_empty(shape, dtype=dtype), scores.new_empty(shape, dtype=torch.int64)


def _decode_flops(tokens: Any, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    decoder = Decoder.parse(shapes[-1])
    units = sum(GATES * (decoder.features_in(i) + decoder.hidden) for i in range(decoder.layers))
    return 2 * int(tokens[0]) * decoder.hidden * (units + decoder.vocabulary)


if missing_extension is None:
    torch.library.register_fake("factorlayer::decode")(_decode_fake)
    torch.library.register_fake("factorlayer::draw")(_draw_fake)
    torch.library.register_fake("factorlayer::few")(_few_fake)
    register_flop_formula(torch.ops.factorlayer.decode)(_decode_flops)
