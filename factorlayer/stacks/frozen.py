"""Stacks whose weights stay as they are: the raw ops stack_prepare and stack_frozen, and who calls them.

The tensors of all layers lie side by side in one. On a GPU there stands behind them what kernels would make of them at
every call: for each class of batch sizes what the passes of its plan that read nothing but weights write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_exporting
from torch.utils.flop_counter import register_flop_formula

from factorlayer.autograd.inputs import Input
from factorlayer.autograd.layer_ops import missing_extension, raise_better, runs_in_tf32, transforms_active
from factorlayer.autograd.stack_ops import (
    Stack,
    _forward_fake,
    forward_flops,
    runs,
    why_auto_is_not_stacked,
    why_no_stack,
)
from factorlayer.functional import any_autocast, autocast
from factorlayer.tuning import predicted

if missing_extension is None:
    _prepare = torch.ops.factorlayer.stack_prepare.default
    _frozen = torch.ops.factorlayer.stack_frozen.default
    _frozen_now = _frozen._op  # the same, but for a Python call around it, which torch.compile has to see

FROZEN = " | frozen"
ALIGNMENT = 128  # elements, as in csrc/chain.cpp

# What the packed tensors depend on: the dtype and device of x, whether it runs in TF32, whether autocast has cast it,
# and the implementation.
Key = tuple[torch.dtype, torch.device, bool, bool, str]


class Frozen:
    """The tensors of a stack's layers as they were, and in the forms in which kernels have taken them since."""

    def __init__(self, stack: Stack, tensors: Sequence[Tensor]) -> None:
        self.stack, self.shapes = stack, [t.shape for t in tensors]
        self.features = stack.layers[0].in_features
        _refuse_capture(tensors[0])
        with torch.inference_mode(False), torch.no_grad():  # what is made here may be used anywhere
            self._take(_side_by_side(tensors))

    def _take(self, values: Tensor) -> None:
        self.values, self.tensors, at = values, list[Tensor](), 0
        for shape in self.shapes:
            self.tensors.append(values[at : at + shape.numel()].view(shape))
            at += _room(shape.numel())
        self._packed: dict[Key, tuple[str, Tensor] | None] = {}
        _wait_for(values)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickle. It leaves out what kernels have taken, which another GPU's kernels may take
        in another form."""
        kept = ("stack", "shapes", "features", "values")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self.values)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies the function to the frozen tensors, as nn.Module does to parameters."""
        with torch.inference_mode(False), torch.no_grad():
            self._take(function(self.values))

    def run(self, x: Input, implementation: str) -> Tensor | None:
        """x [..., in] -> [..., out] by one call. Returns None where that call does not apply, such as where x has a
        gradient."""
        # A microsecond in here is a tenth of a call, so a check may not cost more than the case that it is for.
        if type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if transforms_active() or forward_ad._current_level >= 0:
            return None
        casting = any_autocast() and not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if casting:
            x, _, _ = autocast(x, (), None)
        compiling = is_compiling()
        try:
            shape = x.shape
            found = self._packed[x.dtype, x.device, runs_in_tf32(x), casting, implementation]
        except KeyError:
            if compiling:
                return None
            found = self._pack(x, casting, implementation)
            self._packed[x.dtype, x.device, runs_in_tf32(x), casting, implementation] = found
        except RuntimeError:  # a nested tensor has no shape
            return None
        if found is None or not shape or shape[-1] != self.features:
            return None
        text, packed = found
        is_matrix = len(shape) == 2
        rows = x if is_matrix else x.reshape(-1, self.features)
        y: Tensor
        try:
            if not compiling:
                y = _frozen_now(rows, packed, text)
            elif is_exporting():  # a graph that may run elsewhere
                return None
            else:
                y = _frozen(rows, packed, text)
        except RuntimeError as error:
            if x.layout != torch.strided:
                return None
            raise_better(error, text, rows)
            raise
        return y if is_matrix else y.reshape(*shape[:-1], y.shape[-1])

    def prepare(self, implementation: str) -> None:
        """Packs the tensors for calls with an x of their dtype and device."""
        self.run(self.values.new_empty(0, self.features), implementation)

    def _pack(self, x: Tensor, casting: bool, implementation: str) -> tuple[str, Tensor] | None:
        """The text and the tensor that the op takes, or None where no kernel takes all layers at once."""
        values, count = self.values, len(self.stack.layers)
        if implementation not in ("auto", "fused") or count == 1 or x.device != values.device:
            return None
        if why_no_stack(x) is not None:
            return None
        if implementation == "auto" and why_auto_is_not_stacked(self.stack, x) is not None:
            return None
        found = runs(self.stack, x, False, many=True)  # packed once for any number of samples
        if len(found) != 1 or found[0][:2] != (0, count):
            return None
        choosing = implementation == "auto" and x.is_cuda
        if choosing and predicted.why_any_batched(found[0][2], x.dtype, x.get_device(), False) is not None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            if casting and values.dtype != torch.float64:
                values = values.to(x.dtype)
            if values.dtype != x.dtype:
                return None
            text = found[0][2] + FROZEN
            if x.is_cuda:
                _refuse_capture(x)
                try:
                    values = torch.cat([values, _prepare(values, text)])
                except RuntimeError as error:
                    raise_better(error, text, x)
                    raise
                _wait_for(values)
            return text, values


def _refuse_capture(like: Tensor) -> None:
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"frozen layers are not packed for {like.dtype} on {like.device}, and a capture cannot do it; "
            "call freeze() or the layers before the capture"
        )


def _wait_for(made: Tensor) -> None:
    """Waits until a tensor is made, as calls may come on other streams."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


def _room(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    return torch.cat([torch.nn.functional.pad(part, (0, _room(len(part)) - len(part))) for part in parts])


# What PyTorch asks of an op


def _frozen_fake(x: Tensor, frozen: Tensor, stack: str) -> Tensor:
    return _forward_fake(x, [frozen], stack.removesuffix(FROZEN))


def _frozen_flops(x_shape: Any, frozen_shape: Any, stack: str, **_: Any) -> int:
    return forward_flops(x_shape, [frozen_shape], stack.removesuffix(FROZEN))


if missing_extension is None:
    torch.library.register_fake("factorlayer::stack_frozen")(_frozen_fake)
    register_flop_formula(torch.ops.factorlayer.stack_frozen)(_frozen_flops)
