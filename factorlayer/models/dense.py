"""Dense layers of a model: which there are, what they multiply by, why some stay as they are, and what is kept of one
to bring it back.

A dense layer is an nn.Linear, or the Conv1D of transformers, whose weight is [in_features, out_features]. A layer that
computes something else, or whose weight is not its own, is left alone: why_left() says why.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from factorlayer.autograd.layer_ops import is_sharded
from factorlayer.layers import FactorLinear
from factorlayer.stacks.stack import STATE_HOOKS, RunsAsStacks, is_foreign

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
ORIGIN = "_origin"  # of a FactorLinear that convert made: what it was


@dataclass(frozen=True)
class Place:
    """A module of a model, and where it is: by several names, if the model has it in several places."""

    names: tuple[str, ...]
    module: nn.Module
    parents: tuple[tuple[nn.Module, str], ...]  # each with its name for the module; none of the model itself

    @property
    def name(self) -> str:
        return self.names[0]


def places(model: nn.Module) -> list[Place]:
    """Every module of a model, once."""
    names: dict[int, list[str]] = {}
    parents: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
        for child_name, child in module._modules.items():
            if child is not None:
                parents.setdefault(id(child), {})[id(module), child_name] = (module, child_name)
    return [Place(tuple(names[i]), modules[i], tuple(parents.get(i, {}).values())) for i in modules]


def conv1d() -> type[nn.Module] | None:
    """The class of transformers, if that has been imported: no model has one otherwise."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_turned(module: nn.Module) -> bool:
    """Whether its weight is [in_features, out_features]."""
    kind = conv1d()
    return kind is not None and isinstance(module, kind)


def weight_of(module: nn.Module) -> nn.Parameter:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix [out_features, in_features] that a dense layer multiplies by, without its history."""
    weight = weight_of(module).detach()
    return weight.T if is_turned(module) else weight


def bias_of(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("bias")


def looks_linear(module: nn.Module) -> bool:
    """Whether a user may mean it by a pattern for linear layers: it is one, or is like one, as quantised layers are."""
    if isinstance(module, nn.Linear | FactorLinear) or is_turned(module):
        return True
    sizes = vars(module).get("in_features"), vars(module).get("out_features")
    return all(isinstance(size, int) for size in sizes)


def is_dense(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (is_turned(module) and type(module) is conv1d())


def in_words(module: nn.Module) -> str:
    """Linear 768 -> 3072"""
    kind = type(module).__name__
    if is_turned(module) and is_dense(module):
        return "{} {} -> {}".format(kind, *weight_of(module).shape)
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return kind if None in sizes else f"{kind} {sizes[0]} -> {sizes[1]}"


def count_of(module: nn.Module) -> int:
    """Parameters, each once, of those that have a size yet."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


class Sharing:
    """Which parameters several modules of a model have, or have in the same memory, and which modules they keep beside
    their parts."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[object, list[tuple[int, str]]] = {}
        self._kept: dict[int, str] = {}
        for name, module in model.named_modules():
            for own_name, value in vars(module).items():
                if own_name != "_modules":
                    where = f"{type(module).__name__}.{own_name}"
                    self._kept |= dict.fromkeys(map(id, _modules_in(value)), where)
            for own_name, parameter in module._parameters.items():
                if parameter is not None:
                    owner = id(module), f"{name}.{own_name}".lstrip(".")
                    self._owners.setdefault(memory_of(parameter), []).append(owner)

    def others(self, module: nn.Module, parameter: Tensor) -> list[str]:
        """The names that a parameter has in other modules."""
        return [name for owner, name in self._owners.get(memory_of(parameter), []) if owner != id(module)]

    def where_kept(self, module: nn.Module) -> str | None:
        """The attribute, such as a list, in which a module has it beside its parts."""
        return self._kept.get(id(module))


def _modules_in(value: Any, levels: int = 3) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif levels and isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(each, levels - 1)


def memory_of(parameter: Tensor) -> object:
    """What is the same of two parameters that are one."""
    if is_lazy(parameter) or type(parameter) not in (Tensor, nn.Parameter) or parameter.layout != torch.strided:
        return id(parameter)
    return (parameter.device, parameter.data_ptr()) if not parameter.is_meta and parameter.numel() else id(parameter)


def is_in_shards(module: nn.Module) -> bool:
    """Whether it has parameters that are DTensors. Those that fully_shard has left whole after a call are taken apart
    again before."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
    return any(map(is_sharded, module.parameters()))


def load_whole(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Loads whole tensors, of which each process takes its own part where parameters are DTensors."""
    if not is_in_shards(model):
        model.load_state_dict(state, strict=strict)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, {**state}, options=StateDictOptions(full_state_dict=True, strict=strict))


def owned(model: nn.Module) -> dict[int, str]:
    """Of modules that another one does more with than to call them: what that is."""
    found: dict[int, str] = {}
    for part in model.modules():
        kind = type(part).__name__
        if isinstance(part, RunsAsStacks):
            found |= dict.fromkeys(map(id, part.modules()), f"{kind} runs it as part of a stack")
        elif ADAPTED in part._modules:
            found |= dict.fromkeys(map(id, part.modules()), f"{kind} adapts a layer, whose weight it reads")
    return found


ADAPTED = "base_layer"  # PEFT's name for the layer that an adapter is put on


def why_left(place: Place, sharing: Sharing, owners: dict[int, str]) -> str | None:
    """Why a layer that looks linear stays as it is, or None."""
    module = place.module
    if id(module) in owners:
        return f"{owners[id(module)]}: convert the model first"
    if not place.parents:
        return "it is the model itself, which nothing holds: FactorLinear.from_linear makes a layer of one nn.Linear"
    return _why_no_dense(module) or _why_not_alone(module) or _why_kept(module, sharing) or _why_weight(module, sharing)


def _why_no_dense(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, FactorLinear):
        return "it is a FactorLinear already: restore(model) makes dense layers of those that convert made"
    if any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values()):
        return "it has no sizes before its first call: call the model once, then convert"
    for name, parameter in module._parameters.items():
        if parameter is not None and is_sharded(parameter):
            return f"its {name} is sharded (DTensor): convert the model before it is sharded"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized: torch.nn.utils.parametrize.remove_parametrizations, then convert"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and does not call it"
    if is_dense(module):
        return None
    if isinstance(module, nn.Linear) or is_turned(module):
        return f"{kind} is a class of its own, derived from a dense layer: its forward may do something else"
    return f"{kind} is no nn.Linear: a layer of its own, or a quantised one"


def _why_not_alone(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "it has a forward of its own, set on the object: take that off, then convert"
    made_of = sorted({*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"})
    if module._parameters.get("weight") is None:
        return f"its weight is made of other parameters ({', '.join(made_of)}): make it a parameter, then convert"
    if made_of:
        return f"it has more than a weight and a bias: {', '.join(made_of)}"
    hooks = [name for name in STATE_HOOKS if getattr(module, name, None)]
    if hooks:
        return f"it has hooks on its state_dict ({', '.join(hooks)}), which know its weight by name: remove them"
    return None


def _why_kept(module: nn.Module, sharing: Sharing) -> str | None:
    where = sharing.where_kept(module)
    return where and f"{where} has it as well, where it would stay dense: have an nn.ModuleList there, then convert"


def _why_weight(module: nn.Module, sharing: Sharing) -> str | None:
    weight = weight_of(module)
    for name, tensor in (("weight", weight), ("bias", bias_of(module))):
        if is_foreign(tensor):
            return f"its {name} is a {type(tensor).__name__}, which has products of its own, as quantised weights have"
    if weight.dtype not in DTYPES:
        return f"its weight is of {weight.dtype}: quantised weights stay as they are"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks on its gradient, which no other parameter would have: remove them, then convert"
    others = sharing.others(module, weight)
    return f"its weight is tied: it is {', '.join(others)} as well" if others else None


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def hand_over(before: nn.Module, after: nn.Module) -> None:
    """The hooks themselves, so that their handles go on removing them, and the mode."""
    for name in HOOKS:
        if name in vars(before):
            vars(after)[name] = vars(before)[name]
    after.training = before.training


def made_by_hooks(layer: FactorLinear) -> list[str]:
    """Names of a layer's weights and bias that its hooks make before each call, as those of pruning do. A parametrized
    weight is made without, but a bias has to be a parameter, as the dense layer gets it itself."""
    names = [f"weight_{i}" for i in range(len(layer.spec.weight_shapes))]
    made = [name for name in (*names, "bias") if name not in layer._parameters]
    return [name for name in made if name == "bias" or not parametrize.is_parametrized(layer, name)]


def hand_over_marks(before: nn.Module, after: nn.Module) -> None:
    """What somebody has set on a layer beside what it is made of."""
    for name, value in vars(before).items():
        if name not in vars(after) and not hasattr(type(after), name):
            vars(after)[name] = value


@dataclass(frozen=True)
class Origin:
    """What a FactorLinear was before: the module without its parameters, and, if they are kept, these."""

    hollow: nn.Module
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, keep: bool) -> Origin:
        bias = bias_of(module)
        kept = (matrix_of(module), None if bias is None else bias.detach().clone()) if keep else (None, None)
        return cls(_without_parameters(module), *kept)

    @property
    def is_turned(self) -> bool:
        return is_turned(self.hollow)

    def dense(self, matrix: Tensor, bias: nn.Parameter | None, requires_grad: bool) -> nn.Module:
        """Such a module with a matrix [out_features, in_features]."""
        module: nn.Module = _without_parameters(self.hollow)
        weight = matrix.T.contiguous() if self.is_turned else matrix
        module._parameters = {"weight": nn.Parameter(weight, requires_grad), "bias": bias}
        return module


def _without_parameters(module: nn.Module) -> Any:
    hollow = copy.copy(module)
    state: dict[str, Any] = vars(hollow)
    state |= {"_parameters": {}, "_buffers": {}, "_modules": {}}
    return hollow


def origin_of(module: nn.Module) -> Origin | None:
    """Of what convert made."""
    return vars(module).get(ORIGIN) if isinstance(module, FactorLinear) else None


def converted(model: nn.Module) -> Iterator[tuple[Place, FactorLinear, Origin]]:
    for place in places(model):
        origin = origin_of(place.module)
        if origin is not None:
            assert isinstance(place.module, FactorLinear)
            yield place, place.module, origin
