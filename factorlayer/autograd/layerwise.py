"""Layers of a stack that are trained one by one on a GPU: the gradients of each, from what it has read.

Where an activation's result tells its slope (activations/results.py), the layer behind takes the gradient back through
it, mostly with the product that makes it, and the layer itself has nothing to make again: it is handed the gradient of
what it activates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorlayer.activations.results import from_result
from factorlayer.autograd.backward import (
    Kept,
    Ops,
    back_through,
    gradients,
    hollow,
    hollow_layer,
    recording,
    slope_texts,
    through_alone,
    through_text,
    visits,
)
from factorlayer.autograd.layer_ops import ask_planner, cuda_ops, has_kernel, missing_extension, raise_better
from factorlayer.autograd.runtime import class_of_batch, prepare_together
from factorlayer.kernels.batches import LAST
from factorlayer.maths.chain import Chain

if missing_extension is None:
    _all_at_once = torch.ops.factorlayer.stack_backward.default


def has_backward(layer: str, dtype: torch.dtype, device: int, batch_class: int = LAST) -> bool:
    """Whether one kernel makes all gradients of a layer, with those of its activation, and is what a plan of so many
    samples takes."""
    return has_kernel(f"{layer} | backward", dtype, device, batch_class)


@functools.lru_cache(1024)
def handed_back(text: str, dtype: torch.dtype, device: int, batch_class: int = LAST) -> tuple[bool, ...]:
    """Whether each of several layers, one behind another, is handed the gradient of what it activates. That is so where
    it is predicted to be faster with many samples, and no kernel makes all of the layer's gradients; never for the last
    layer."""
    layers = text.split(" | ")
    return (*(_is_handed(*both, dtype, device, batch_class) for both in itertools.pairwise(layers)), False)


def _is_handed(layer: str, behind: str, dtype: torch.dtype, device: int, batch_class: int) -> bool:
    def us(*texts: str) -> float:
        return sum(float(ask_planner("predicted", text, dtype, LAST, device)) for text in texts)

    chain = Chain.parse(layer)
    if from_result(chain.activation) is None or has_backward(layer, dtype, device, batch_class):
        return False
    fits = cuda_ops(device, dtype).fits
    at_once, before, slope = slope_texts(layer, fits)
    ways = [us(through_alone(chain.activation, chain.out_features))]
    everything = (1 << (Chain.parse(behind).weights + 2)) - 1
    both = through_text(behind, everything, chain.activation, fits)
    if both and not has_backward(behind, dtype, device, batch_class):
        ways.append(us(both) - us(visits(behind, everything, fits)[0].back))
    return min(ways) < (us(at_once) if at_once else us(before, slope))


def backward_by_layers(
    grad: Tensor, x: Tensor, states: Sequence[Tensor], tensors: Sequence[Tensor], text: str, wanted: Sequence[int]
) -> list[Tensor]:
    """The gradients at the places `wanted` in x and the tensors, from the states that all layers but the last made, and
    behind them those that layers have kept, whose texts say so."""
    prepare_layers(text, wanted, len(x), x.dtype, x.get_device())
    made = _Layers(cuda_ops(x.get_device(), x.dtype), all_at_once, x.dtype, x.get_device())
    return made.gradients(grad, x, states, tensors, text, wanted)


_prepared: set[Hashable] = set()  # backward passes whose kernels are there, or have been


def prepare_layers(
    text: str,
    wanted: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    device: int,
    before: Sequence[tuple[str, int]] = (),
) -> None:
    """Compiles and loads what the gradients take, and what runs `before`, unless that was done."""
    key = text, *wanted, class_of_batch(batch), dtype, device
    if batch and key not in _prepared:
        prepare_together([*before, *texts_by_layers(text, wanted, batch, dtype, device)], dtype, device)
        _prepared.add(key)


def texts_by_layers(
    text: str, wanted: Sequence[int], batch: int, dtype: torch.dtype, device: int
) -> list[tuple[str, int]]:
    """The texts that make the gradients, as often as they run, each with its number of samples."""
    on_cuda = cuda_ops(device, dtype)
    ops, asked = recording(on_cuda.fits_of(batch), on_cuda.us)

    def at_once(grad: Tensor, x: Tensor, tensors: Sequence[Tensor], text: str, places: Sequence[int]) -> list[Tensor]:
        asked.append((f"{text} | backward", len(x)))
        return [hollow(*(x, *tensors)[place].shape) for place in places]

    layers = list(map(Chain.parse, text.split(" | ")))
    x, *states, y = (hollow(batch, n) for n in (layers[0].in_features, *(layer.out_features for layer in layers)))
    states += [hollow(batch, n) for layer in layers for n in layer.kept]
    tensors = [t for weights, bias in map(hollow_layer, layers) for t in (*weights, bias) if t is not None]
    _Layers(ops, at_once, dtype, device).gradients(y, x, states, tensors, text, wanted)
    return asked


@dataclass(frozen=True)
class _Layers:
    """The gradients of layers one behind another, each made by parts (`ops`) or all at once (`at_once`)."""

    ops: Ops
    at_once: Callable[[Tensor, Tensor, Sequence[Tensor], str, Sequence[int]], list[Tensor]]
    dtype: torch.dtype
    device: int

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        states: Sequence[Tensor],
        tensors: Sequence[Tensor],
        text: str,
        wanted: Sequence[int],
    ) -> list[Tensor]:
        given, counts = text.split(" | "), tensors_of(text)
        layers = list(map(_without_states, given))
        handed = handed_back(" | ".join(layers), self.dtype, self.device, class_of_batch(len(x)))
        found: dict[int, Tensor] = {}
        end, last = len(tensors) + 1, len(layers) - 1
        kept = list(states[last:])
        for i, read in reversed(list(enumerate((x, *states[:last])))):
            begin = end - counts[i]
            own = [place for place in wanted if begin <= place < end]
            goes_on = any(place < begin for place in wanted)
            places = [0] * goes_on + [place - begin + 1 for place in own]
            layer = without_activation(layers[i]) if handed[i] else layers[i]
            through = Chain.parse(layers[i - 1]).activation if goes_on and i and handed[i - 1] else "identity"
            own_states = kept[len(kept) - len(Chain.parse(given[i]).kept) :]
            del kept[len(kept) - len(own_states) :]
            by = Kept(given[i], own_states) if own_states else None
            made = self._of_layer(grad, read, tensors[begin - 1 : end - 1], layer, places, through, by)
            found.update(zip(own, made[goes_on:], strict=True))
            if not goes_on:
                break
            grad, end = made[0], begin
        return [found[place] if place else grad for place in wanted]

    def _of_layer(
        self,
        grad: Tensor,
        x: Tensor,
        tensors: Sequence[Tensor],
        text: str,
        places: Sequence[int],
        through: str,
        by: Kept | None,
    ) -> list[Tensor]:
        """The gradients of one layer, by states that it may have kept. That of x is taken back through the activation
        that made x."""
        if has_backward(text, self.dtype, self.device, class_of_batch(len(x))):
            made = self.at_once(grad, x, tensors, text, places)
            made[0] = back_through(self.ops, made[0], x, through)
            return made
        *weights, last = tensors
        chain = Chain.parse(text)
        bias = last if chain.bias else None
        if bias is None:
            weights.append(last)
        bits = [1 if not place else 2 << place if place <= len(weights) else 2 for place in places]
        found = gradients(self.ops, grad, x, weights, bias, text, sum(bits), through, by)
        return [dict(zip(sorted(bits), found, strict=True))[bit] for bit in bits]


def all_at_once(grad: Tensor, x: Tensor, tensors: Sequence[Tensor], text: str, places: Sequence[int]) -> list[Tensor]:
    """The gradients of layers that one kernel makes."""
    try:
        return list(_all_at_once(grad, x, tensors, text, places))
    except RuntimeError as error:
        raise_better(error, f"{text} | backward", x)
        raise


@functools.lru_cache(1024)
def tensors_of(text: str) -> tuple[int, ...]:
    """How many tensors each layer of a text has."""
    return tuple(Chain.parse(layer).tensors for layer in text.split(" | "))


@functools.lru_cache(1024)
def _without_states(layer: str) -> str:
    return replace(Chain.parse(layer), kept=()).text


@functools.lru_cache(1024)
def without_activation(layer: str) -> str:
    return replace(Chain.parse(layer), activation="identity").text
