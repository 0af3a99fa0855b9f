"""Tuning of one layer or stack: both implementations timed on numbers drawn at random, and what was faster kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorlayer.autograd.layer_ops import is_sharded
from factorlayer.autograd.runtime import CompileError, class_of_batch, dtype_name
from factorlayer.tuning import kept, timing
from factorlayer.tuning.choices import Choice, place_of

Forward = Callable[[Tensor, Sequence[Tensor]], Tensor]  # of x and the tensors that make y


@dataclass(frozen=True)
class Tuned:
    """What tuning came to: for a pass a choice, or why there is none."""

    name: str
    choice: Choice | None
    why_not: str = ""
    lasting: bool = False  # whether it is so by nature, and no trouble

    def __str__(self) -> str:
        if self.choice is None:
            return f"{self.name}: nothing was chosen, {self.why_not}"
        return f"{self.name}: auto runs {self.choice.implementation}, {self.choice}"


def tune(
    name: str,
    text: str,
    like: Tensor,
    batch: int,
    training: bool,
    tensors: Sequence[Tensor],
    runs: Mapping[str, Forward],
) -> Iterator[Tuned]:
    """Times "fused" and "batched" for inference and, if asked for, with gradients. x is drawn like `like` [0, in],
    weights like `tensors`; those of one element, which an activation learns, stay as they are."""
    if like.device.type not in ("cpu", "cuda") or any(map(is_sharded, tensors)):
        yield Tuned(name, None, f"only plain tensors on a CPU or a GPU can be timed, its weights are on {like.device}")
        return
    for gradients in (False, True)[: 1 + training]:
        try:
            times = _times(like, batch, gradients, tensors, runs)
        except (MemoryError, RuntimeError) as error:
            why = _why_not_timed(error, like, batch)
            if why is None:
                raise
            yield Tuned(name, None, why)
            continue
        if min(times.values()) <= 0:
            yield Tuned(name, None, f"{batch} samples are too few for the clock: a call took no time")
            continue
        us = {way: seconds * 1e6 for way, seconds in times.items()}
        place = place_of(like.device.type, like.get_device())
        dtype, batch_class = dtype_name(like.dtype), class_of_batch(batch)
        choice = Choice(text, dtype, batch_class, gradients, place, batch, us["fused"], us["batched"])
        kept.keep([choice])
        yield Tuned(name, choice)


def _why_not_timed(error: Exception, like: Tensor, batch: int) -> str | None:
    """What an error means for a user whose layer could not be timed: no memory, or no kernel; None for any other
    error."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, CompileError):
        return f"fused cannot: {first}"
    words = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words):
        return f"{batch} samples are too many for the memory of {like.device}: {first}"
    return None


def _times(
    like: Tensor, batch: int, training: bool, tensors: Sequence[Tensor], runs: Mapping[str, Forward]
) -> dict[str, float]:
    device = like.device
    on_device = torch.cuda.device(device) if like.is_cuda else contextlib.nullcontext()
    with (
        on_device,
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
        torch.set_grad_enabled(training),
    ):
        source = torch.Generator(device).manual_seed(0)  # the program's own numbers go on as they would

        def drawn(shape: Sequence[int], scale: float = 1) -> Tensor:
            numbers = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
            return numbers.mul_(scale).to(like.dtype)

        x = drawn((batch, like.shape[-1])).requires_grad_(training)
        given = [
            (
                drawn(t.shape, t.shape[-1] ** -0.5) if t.numel() > 1 else t.detach().to(like.dtype).clone()
            ).requires_grad_(training and t.requires_grad)
            for t in tensors
        ]
        inputs = [x, *(t for t in given if t.requires_grad)]
        grad_y = drawn(runs["batched"](x, given).shape) if training else x

        def call(forward: Forward) -> timing.Run:
            if not training:
                return lambda: forward(x, given)
            return lambda: torch.autograd.grad(forward(x, given), inputs, grad_y)

        return timing.medians({way: call(forward) for way, forward in runs.items()}, device)
