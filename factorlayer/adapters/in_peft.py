"""PEFT's LoKr layers with our product. Imported where peft is; lokr.py has the calls."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lokr import layer as theirs
from torch import Tensor, nn

from factorlayer.adapters.convolutions import places, why_no_matrix
from factorlayer.adapters.linears import added, is_watched
from factorlayer.adapters.parts import Parts
from factorlayer.adapters.products import is_faster_made, product

# Of a second factor that is one tensor [out, in, 1]. PEFT's make_kron gives it to torch.kron beside a matrix, which is
# made [1, out, in] and not [out, in, 1].
CONV1D_DIMS = 3
LAYERS = theirs.LoKrLayer
NAMES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


class Ours:
    """The delta of one adapter, which their own forward adds to what the base layer makes."""

    def _get_delta_activations(self: Any, adapter: str, x: Tensor, *args: Any, **named: Any) -> Any:
        base = self.get_base_layer()
        weight = base.weight
        if is_faster_made(x, weight.shape[:2]):
            return self._theirs(adapter, x, *args, **named)
        first, second = _factor(self, "lokr_w1", adapter), _factor(self, "lokr_w2", adapter)
        w1 = first[0] if len(first) == 1 else first[0] @ first[1]
        x = self._cast_input_dtype(x, torch.promote_types(w1.dtype, second[0].dtype))
        if second[0].dim() == CONV1D_DIMS:  # of an adapter that has been added since
            return self._theirs(adapter, x, *args, **named)
        if weight.dim() > 2:
            x, second = places(x, base), [half.flatten(1) for half in second]
        scaling, behind = self.scaling[adapter], weight.dim() - 2
        y = product(x, w1 * scaling if scaling != 1 else w1, second, behind)
        dropped = self.rank_dropout[adapter] if self.training else 0
        if not dropped:
            return y
        # Rows of w1 ⊗ w2, which are features of y; drawn as get_delta_weight draws them.
        kept = (torch.rand(y.shape[-1 - behind]) > dropped).float()
        kept = kept.view(-1, *[1] * behind).to(y.device)
        if self.rank_dropout_scale[adapter]:
            kept /= kept.mean()
        return y * kept.to(y.dtype)

    def _theirs(self, *args: Any, **named: Any) -> Any:
        return super()._get_delta_activations(*args, **named)  # type: ignore[misc]


class Linear(Ours, theirs.Linear):
    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        y = None if args or named else self._at_once(x)
        return super().forward(x, *args, **named) if y is None else y

    def _at_once(self, x: Tensor) -> Tensor | None:
        """What their forward returns, in one step of autograd; None where it is not one active adapter's alone."""
        names = self._active_adapter
        if self._disable_adapters or self.merged_adapters or (type(names) is not str and len(names) != 1):
            return None
        if not self.__dict__.get("cast_input_dtype_enabled", True):
            return None
        adapter = names if type(names) is str else names[0]
        training, modules = self.training, self._modules
        first, second = _halves(modules, "lokr_w1", adapter), _halves(modules, "lokr_w2", adapter)
        if not (first and second) or (training and (self.rank_dropout[adapter] or self.module_dropout[adapter])):
            return None
        base = modules["base_layer"]
        y = None if is_watched(base) else added(base, x, first, second, self.scaling[adapter])
        if y is None:
            return None
        if training:
            torch.rand(1)  # which they draw for the dropout of modules, so that what is drawn next is the same
        return y if y.dtype is x.dtype else y.to(x.dtype)


class Conv1d(Ours, theirs.Conv1d):
    pass


class Conv2d(Ours, theirs.Conv2d):
    pass


CLASSES = {theirs.Linear: Linear, theirs.Conv1d: Conv1d, theirs.Conv2d: Conv2d}


def why_left(layer: Any) -> str | None:
    if type(layer) not in (*CLASSES, *CLASSES.values()):
        return f"{type(layer).__name__} is a class of somebody's own"
    reason = why_no_matrix(layer.get_base_layer())
    if reason is None and any(whole.dim() == CONV1D_DIMS for whole in layer.lokr_w2.values()):
        return "PEFT's matrix of a Conv1d whose second factor is one tensor is another than w1 ⊗ w2"
    return reason


def parts_of(layer: Any) -> list[Parts]:
    sizes = layer.get_base_layer().weight.shape[:2]
    found = []
    for adapter in sorted(layer._available_adapters):
        tensors = {name: getattr(layer, name)[adapter] for name in NAMES if adapter in getattr(layer, name)}
        found.append(Parts(f"adapter {adapter!r}", tensors, tuple(sizes)))
    return found


def _halves(modules: Any, name: str, adapter: str) -> tuple[Tensor, ...]:
    """Of an adapter's factor, one tensor or two, or none where there is none."""
    whole = modules[name]._parameters.get(adapter)
    if whole is not None:
        return (whole,)
    a, b = modules[f"{name}_a"]._parameters.get(adapter), modules[f"{name}_b"]._parameters.get(adapter)
    return () if a is None or b is None else (a, b)


def _factor(layer: nn.Module, name: str, adapter: str) -> list[Tensor]:
    """Of one matrix or of two. An attribute of a module takes ten times as long as an entry of its dict."""
    modules: Any = layer._modules
    whole = modules[name]
    if adapter in whole:
        return [whole[adapter]]
    return [modules[f"{name}_a"][adapter], modules[f"{name}_b"][adapter]]
