"""LyCORIS' LoKr layers with our product. Imported where lycoris is; lokr.py has the calls."""

from __future__ import annotations

from typing import Any

import torch
from lycoris.modules import lokr as theirs
from torch import Tensor, nn

from factorlayer.adapters.convolutions import places, why_no_matrix
from factorlayer.adapters.linears import added
from factorlayer.adapters.parts import Parts
from factorlayer.adapters.products import is_faster_made, product

LAYERS = theirs.LokrModule
NAMES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


class LokrModule(theirs.LokrModule):
    """Both ways of theirs: bypass mode, and the one that makes the matrix, with its dropout of rows."""

    def bypass_forward(self, x: Tensor, scale: float = 1) -> Tensor:
        y = None if self.training and self.dropout else _at_once(self, x, scale)
        if y is None:
            y = super().bypass_forward(x, scale)
        return y

    def bypass_forward_diff(self, h: Tensor, scale: float = 1) -> Tensor:
        delta = _delta(self, h, scale)
        if self.training and self.dropout:
            delta = delta.contiguous()  # as theirs is: numbers are drawn in the order of memory
        dropped: Tensor = self.drop(delta)
        return dropped

    def _rebuild_forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if is_faster_made(x, self.shape[:2]):
            made: Tensor = super()._rebuild_forward(x, *args, **named)
            return made
        if not (args or named or (self.training and self.rank_dropout)):
            at_once = _at_once(self, x, self.multiplier)
            if at_once is not None:
                return at_once
        base: Tensor = self.org_forward(x, *args, **named)
        y = _delta(self, x, self.multiplier)
        if self.training and self.rank_dropout:
            kept = (torch.rand(self.shape[0]) > self.rank_dropout).to(y.dtype)
            if self.rank_dropout_scale:
                kept /= kept.mean()
            y = y * kept.view(-1, *[1] * (len(self.shape) - 2)).to(y.device)
        return base + y


CLASSES = {theirs.LokrModule: LokrModule}


def why_left(layer: Any) -> str | None:
    if type(layer) not in (*CLASSES, *CLASSES.values()):
        return f"{type(layer).__name__} is a class of somebody's own"
    if layer.wd:
        return "weight_decompose takes the norm of the whole matrix"
    if "forward" in layer.__dict__:
        return "it is a parametrization, which makes the weight itself"
    return why_no_matrix(layer.org_module[0])


def parts_of(layer: Any) -> list[Parts]:
    return [Parts("it", {name: getattr(layer, name, None) for name in NAMES}, layer.shape[:2])]


def _at_once(layer: Any, x: Tensor, scale: float | Tensor) -> Tensor | None:
    """What the layer below makes and the delta, in one step of autograd; None where that is not to be had."""
    base, forward = layer.org_module[0], layer.org_forward
    if (
        len(layer.shape) > 2
        or getattr(forward, "__func__", None) is not nn.Linear.forward
        or forward.__self__ is not base
    ):
        return None
    first, second = _factors(layer, x, scale)
    return added(base, x, [first], second, 1)


def _delta(layer: Any, x: Tensor, scale: float | Tensor) -> Tensor:
    first, second = _factors(layer, x, scale)
    behind = len(layer.shape) - 2
    return product(places(x, layer.org_module[0]) if behind else x, first, second, behind)


def _factors(layer: Any, x: Tensor, scale: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """w1 with all that scales it, and w2 or its halves, in the dtype of x, to which they cast what they make."""
    first = [layer.lokr_w1] if layer.use_w1 else [layer.lokr_w1_a, layer.lokr_w1_b]
    second = [layer.lokr_w2] if layer.use_w2 else [layer.lokr_w2_a, layer.lokr_w2_b]
    first, second = ([half.flatten(1).to(x.device, x.dtype) for half in pair] for pair in (first, second))
    w1 = first[0] if len(first) == 1 else first[0] @ first[1]
    return w1 * (layer.scale * scale * layer.scalar.to(x.device, x.dtype)), second
