"""Stacks: layers one behind another, as FactorMLP and fuse run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from factorlayer.activations.expression import Expression
from factorlayer.activations.formula import formula
from factorlayer.activations.named import activate
from factorlayer.activations.texts import activation_of, scalars
from factorlayer.autograd.input_ops import fused_inputs, of_inputs, why_concatenated
from factorlayer.autograd.inputs import Input, are_several, check_alike, checked, concatenated
from factorlayer.autograd.layer_ops import (
    any_requires_grad,
    explain_shards,
    runs_in_tf32,
    stack_at_once,
    take_kernels,
)
from factorlayer.autograd.nested import through
from factorlayer.autograd.runtime import CompileError, dtype_name, is_hopper
from factorlayer.autograd.stack_ops import (
    Run,
    Stack,
    fused_stack,
    is_large_product,
    is_left_to_cublas,
    is_short,
    runs,
    why_auto_is_not_stacked,
    why_no_stack,
)
from factorlayer.functional import (
    Implementation,
    any_autocast,
    autocast,
    implementation_name,
    run,
    tune_layer,
    why_measured_batched,
)
from factorlayer.layers import HOOKS, FactorLinear, refuse_script
from factorlayer.maths.chain import MOST_INPUTS, MOST_LAYERS, MOST_TEXT, Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.stacks.frozen import Frozen
from factorlayer.tuning import choices, predicted

if TYPE_CHECKING:
    from typing_extensions import Self

    from factorlayer.tuning.candidates import Tuned

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Layer:
    """One layer of a stack. A dense layer counts as a Kronecker product of one factor."""

    spec: LayerSpec
    chain: Chain
    tensors: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Counts `tensors`: the weights, the parameters of the activation, and the bias behind them."""
        count = len(self.spec.weight_shapes) + self.chain.parameters + self.chain.bias
        object.__setattr__(self, "tensors", count)

    def ending_in(self, activation: str) -> Layer:
        return replace(self, chain=replace(self.chain, activation=activation))

    def __str__(self) -> str:
        p, q = (" x ".join(map(str, sizes)) for sizes in (self.spec.in_factors, self.spec.out_factors))
        kind = "" if len(self.spec.in_factors) == 1 else f", {self.spec.structure}"
        activation = "" if self.chain.activation == "identity" else f", {formula(self.chain.activation)}"
        return f"{p} -> {q}{kind}{activation}"


def layer_of(member: nn.Module) -> Layer | None:
    """The Layer that describes a FactorLinear or an nn.Linear, or None for anything else, such as a quantised layer."""
    if any(map(is_foreign, member._parameters.values())) or has_own_call(member):
        return None
    if isinstance(member, FactorLinear) and type(member).forward is FactorLinear.forward:
        return Layer(member.spec, member.chain)
    if isinstance(member, nn.Linear) and type(member).forward is nn.Linear.forward:
        spec = LayerSpec("kronecker", (member.in_features,), (member.out_features,))
        return Layer(spec, Chain.of(spec, member.bias is not None, "identity"))
    return None


def has_own_call(module: nn.Module) -> bool:
    """Whether a call of it does more than PyTorch's modules do around forward. A GraphModule's only words errors."""
    return type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule)


def is_foreign(tensor: Tensor | None) -> bool:
    """Whether it is of a class that has products of its own, as a quantised weight has."""
    kind = type(tensor)
    return tensor is not None and kind not in (Tensor, nn.Parameter) and kind.__name__ not in _OF_PYTORCH


_OF_PYTORCH = ("DTensor", "FakeTensor", "FunctionalTensor")


def run_stack(
    stack: Stack, layers: Sequence[Layer], x: Input, tensors: Sequence[Tensor], implementation: str, who: Sequence[str]
) -> Tensor:
    """Runs all layers on x [..., in]. `tensors` are theirs, layer by layer; `who` names each layer in errors."""
    if are_several(x):
        return _of_inputs(stack, layers, x, tensors, implementation, who)
    if len(layers) > 1 and implementation in ("auto", "fused"):
        y = None if is_dynamo_compiling() else _at_once(stack, x, tensors, implementation)
        if y is not None:
            return y
        try:
            y = _by_runs(stack, layers, x, tensors, implementation, who) if x.dim() else None
        except (CompileError, torch.OutOfMemoryError):
            raise
        except (AttributeError, RuntimeError):
            if isinstance(x, Tensor) and x.is_nested:
                return through(lambda rows: run_stack(stack, layers, rows, tensors, implementation, who), x)
            y = None
            with contextlib.suppress(RuntimeError):  # as this one is: a hook's, or checkpointing's
                y = _one_by_one(layers, x, tensors, implementation, who)  # which has better words for what is wrong
            if y is not None and y.is_complex():  # for weights that are complex, which x is not, there are no kernels
                return y
            raise
        if y is not None:
            return y
    return _one_by_one(layers, x, tensors, implementation, who)


def _by_runs(
    stack: Stack, layers: Sequence[Layer], x: Tensor, tensors: Sequence[Tensor], implementation: str, who: Sequence[str]
) -> Tensor | None:
    """Runs layers by the raw ops, as many at once as kernels take. Returns None where no kernel takes several layers,
    or `auto` leaves all of them to themselves."""
    cast, given, _ = autocast(x, tensors, None) if any_autocast() else (x, tensors, None)
    recorded = torch.is_grad_enabled() and any_requires_grad(cast, None, given)
    if implementation == "auto":
        if is_dynamo_compiling() or choices.TABLE:
            text, batch = stack.text_for(cast), cast.numel() // (cast.shape[-1] or 1)
            if why_measured_batched(text, cast, batch, recorded) is not None:
                return _one_by_one(layers, x, tensors, "batched", who)
        if why_auto_is_not_stacked(stack, cast) is not None:
            return None
    if why_no_stack(cast) is not None:
        return None
    found = runs(stack, cast, recorded, recorded and (implementation == "fused" or is_joined(stack, cast)))
    if not found or (implementation == "auto" and why_predicted_apart(stack, cast, recorded) is not None):
        return None
    is_matrix = len(cast.shape) == 2
    rows = cast if is_matrix else cast.reshape(-1, cast.shape[-1])
    if len(found) == 1 and found[0][1] - found[0][0] == len(layers):
        text = found[0][2]
        y = fused_stack(text, rows, given, recorded)
        if rows.is_cuda and not recorded and implementation == "auto" and not is_compiling():
            # By the eager call from now on.
            take_kernels(text, dtype_name(rows.dtype), rows.get_device(), rows.shape[0], recorded)
    else:
        y = _run_by_run(found, layers, rows, given, implementation, who)
    return y if is_matrix else y.reshape(*x.shape[:-1], layers[-1].spec.out_features)


def _at_once(stack: Stack, x: Tensor, tensors: Sequence[Tensor], implementation: str) -> Tensor | None:
    """Makes the eager call past PyTorch's dispatcher. Returns None where that call does not apply, or an argument is
    wrong."""
    chooses, kind = implementation == "auto", type(x)
    if kind is not Tensor and kind is not nn.Parameter:
        return None
    if chooses and choices.BATCHED and not choices.BATCHED.isdisjoint((stack.text, stack.tf32_text)):
        return None  # which may have been measured to be slower
    if x.is_cuda and (not chooses or (torch.is_grad_enabled() and any_requires_grad(x, None, tensors))):
        return None  # the raw ops know of what is recorded, and of what was asked for
    try:
        shape, rows = x.shape, x
        if len(shape) != 2:
            if not shape or shape[-1] != stack.layers[0].in_features or not x.is_contiguous():
                return None
            rows = x.reshape(-1, shape[-1])
    except RuntimeError:  # of nested tensors and sparse ones
        return None
    y = stack_at_once(stack.text, stack.tf32_text, chooses, rows, tensors)
    return y if y is None or rows is x else y.reshape(*shape[:-1], y.shape[1])


def _of_inputs(
    stack: Stack,
    layers: Sequence[Layer],
    given: Input,
    tensors: Sequence[Tensor],
    implementation: str,
    who: Sequence[str],
) -> Tensor:
    """Runs all layers on several tensors [..., features of each], side by side. On a CPU, and on a GPU without
    gradients, one call reads them where they lie, if there are kernels for it. Elsewhere the first layer runs by
    itself, if it is structured; dense layers, which are faster together, take the concatenated tensors."""
    first = layers[0]
    if len(layers) == 1:
        return _one_by_one(layers, given, tensors, implementation, who)
    inputs = checked(who[0], given, first.spec.in_features, "in_features")
    x, cast = inputs[0], tensors
    if any_autocast():
        _, cast, _ = autocast(x, tensors, None)
        inputs = [autocast(each, (), None)[0] for each in inputs]
        x = inputs[0]
    check_alike(who[0], inputs)
    some = len([each for each in inputs if each.shape[-1]])
    alike = all(t.dtype == x.dtype and t.device == x.device for t in cast)
    if implementation in ("auto", "fused") and 1 < some == len(inputs) <= MOST_INPUTS and alike:
        text = _text_of_inputs(stack, inputs, cast, implementation)
        if text is not None:
            recorded = torch.is_grad_enabled() and any_requires_grad(x, None, [*inputs, *cast])
            y = fused_inputs(text, [each.reshape(-1, each.shape[-1]) for each in inputs], cast, recorded)
            return y.reshape(*x.shape[:-1], layers[-1].spec.out_features)
    if x.is_cuda and first.chain.is_dense:
        return run_stack(stack, layers, concatenated(inputs), tensors, implementation, who)
    y = _one_by_one(layers[:1], inputs, tensors[: first.tensors], implementation, who[:1])
    rest = Stack(stack.layers[1:])
    return run_stack(rest, layers[1:], y, tensors[first.tensors :], implementation, who[1:])


def _text_of_inputs(
    stack: Stack, inputs: Sequence[Tensor], tensors: Sequence[Tensor], implementation: str
) -> str | None:
    """The text of the kernels that take all layers at once and read the inputs where they lie, or None if they are not
    to run. On a CPU they run as for one tensor, on a GPU only without gradients."""
    x, batch = inputs[0], inputs[0].numel() // inputs[0].shape[-1]
    recorded = torch.is_grad_enabled() and any_requires_grad(x, None, [*inputs, *tensors])
    if (x.is_cuda and recorded) or why_no_stack(x) is not None:
        return None
    if implementation == "auto":
        if why_auto_is_not_stacked(stack, x) is not None or why_predicted_apart(stack, x, recorded) is not None:
            return None
        text = stack.text_for(x)
        if choices.TABLE and why_measured_batched(text, x, batch, recorded) is not None:
            return None
    first, *others = stack.layers
    several = Stack((of_inputs(first, tuple(each.shape[-1] for each in inputs)), *others)).text_for(x)
    if len(several) > MOST_TEXT or len(stack.layers) > MOST_LAYERS or why_concatenated(several, x, batch) is not None:
        return None
    return several


def why_predicted_apart(stack: Stack, x: Tensor, recorded: bool) -> str | None:
    """Why auto runs layers on a GPU one by one, where nothing was measured: PyTorch is predicted to be faster."""
    if not x.is_cuda:
        return None
    text = stack.text_for(x)
    if is_compiling():
        return predicted.why_any_batched(text, x.dtype, x.get_device(), recorded)
    batch = x.numel() // (x.shape[-1] or 1)
    if not batch:
        return None
    of_x = x.get_device(), batch, recorded
    if choices.TABLE and choices.measured(text, x.dtype, x.device.type, *of_x):
        return None
    return predicted.why_stack_batched(text, x.dtype, *of_x, recorded and is_joined(stack, x))


def is_joined(stack: Stack, x: Tensor) -> bool:
    """Whether auto joins layers that are trained one by one. On Hopper, in 16 bits and TF32, that is known to be faster
    than PyTorch; elsewhere it is predicted. A compiled graph serves every batch, so nothing is predicted for it."""
    if not x.is_cuda:
        return False
    batch = 0 if is_compiling() else x.numel() // (x.shape[-1] or 1)
    short = is_short(x.dtype, runs_in_tf32(x))
    if short and is_hopper(x.get_device()):
        return True
    return batch > 0 and predicted.joined_is_faster(stack.text_for(x), x.dtype, x.get_device(), batch)


def _run_by_run(
    found: Sequence[Run],
    layers: Sequence[Layer],
    x: Tensor,
    tensors: Sequence[Tensor],
    implementation: str,
    who: Sequence[str],
) -> Tensor:
    """Runs each run of layers by one call, and layers outside of runs one by one."""
    at = first = 0  # among layers, and among tensors
    for begin, end, text in (*found, (len(layers), len(layers), "")):
        behind = first + sum(layer.tensors for layer in layers[at:begin])
        x = _one_by_one(layers[at:begin], x, tensors[first:behind], implementation, who[at:begin])
        first = behind + sum(layer.tensors for layer in layers[begin:end])
        own = tensors[behind:first]
        if text:
            x = fused_stack(text, x, own, torch.is_grad_enabled() and any_requires_grad(x, None, own))
        at = end
    return x


def _one_by_one(
    layers: Sequence[Layer], x: Input, tensors: Sequence[Tensor], implementation: str, who: Sequence[str]
) -> Tensor:
    at = 0
    for layer, name in zip(layers, who, strict=True):
        end = at + layer.tensors
        bias = tensors[end - 1] if layer.chain.bias else None
        left = implementation == "fused" and is_left_to_cublas(layer.chain, x[0] if are_several(x) else x)
        way = "batched" if left else implementation
        x = run(layer.spec, layer.chain, x, tensors[at : end - layer.chain.bias], bias, way, name)
        at = end
    assert isinstance(x, Tensor)
    return x


Activation = nn.Module | Expression | str | None


class LayerStack(nn.Module):
    """Layers of a model, one behind another, with activations behind them. The parameters stay the members' own. Where
    a dropout between them drops something, the layers before it and those behind it run as two stacks."""

    def __init__(
        self,
        members: Sequence[tuple[str, nn.Module, Activation]],
        implementation: str,
        who: str,
        dropouts: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        """`members` are the layers, each with its name and the activation behind it; `dropouts` are, for each layer,
        those behind its activation."""
        super().__init__()
        self.names, self.implementation = tuple(name for name, *_ in members), implementation
        self._owner = who
        self._who = tuple(f"{who}: layer {name}" for name in self.names)
        self._members: list[_Member] = []  # no children, whose parameters would have two names
        self.layers: tuple[Layer, ...] = ()
        self._types: list[type] = []
        self._have_scalars = False
        for (_, member, activation), dropped in zip(members, dropouts or [()] * len(members), strict=True):
            layer = layer_of(member)
            assert layer is not None
            stage, scalar_names = activation_of(activation)
            added = _Member(member, activation, stage, scalar_names, tuple(dropped))
            self._members.append(added)
            bias = nn.Parameter if layer.chain.bias else type(None)
            self._types += [*[nn.Parameter] * (len(added.names) - 1), bias]
            self._have_scalars |= added.has_scalars
            self.layers += (layer if stage == "identity" else layer.ending_in(stage),)
        self._stack = Stack(tuple(layer.chain for layer in self.layers))
        self.frozen: Frozen | None = None
        self._look()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "implementation":
            value = implementation_name(value)
        super().__setattr__(name, value)

    def _look(self) -> None:
        """Finds once where forward looks up parameters and hooks: to ask the modules at every call would take longer
        than the rest of it."""
        behind = [part for m in self._members for part in (m.layer, m.activation, *m.dropouts)]
        given = [part for part in behind if isinstance(part, nn.Module)]
        self._dropouts = [part for m in self._members for part in m.dropouts if isinstance(part, nn.Dropout)]
        parts = [part for each in given for part in each.modules()]
        self._owns = [vars(part) for part in parts]
        self._hooks = [own[name] for own in self._owns for name in HOOKS]
        self._parameters_of = [vars(m.layer)["_parameters"] for m in self._members for _ in m.names]
        self._names_in = [name for m in self._members for name in m.names]
        choices.load()

    def __getstate__(self) -> dict[str, Any]:
        found = ("_owns", "_hooks", "_parameters_of", "_names_in", "_dropouts")
        return {name: value for name, value in self.__dict__.items() if name not in found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._look()

    def forward(self, x: Input) -> Tensor:
        frozen = self.frozen
        if frozen is not None:
            if self._drops():
                return self._in_parts(x, frozen.tensors)
            y = frozen.run(x, self.implementation)
            if y is None:
                y = run_stack(self._stack, self.layers, x, frozen.tensors, self.implementation, self._who)
            return y
        if self._is_hooked():
            return self._one_by_one(x)
        tensors = self._tensors()
        if tensors is None:
            return self._one_by_one(x)
        if self._drops():
            return self._in_parts(x, tensors)
        return run_stack(self._stack, self.layers, x, tensors, self.implementation, self._who)

    def _drops(self) -> bool:
        """Whether a dropout between layers drops something now."""
        return any(dropout.training and dropout.p for dropout in self._dropouts)

    def _in_parts(self, x: Input, tensors: Sequence[Tensor]) -> Tensor:
        """Runs the layers up to each dropout as one stack, then the dropout."""
        at = first = 0  # among layers, and among tensors
        for end, member in enumerate(self._members, 1):
            if member.dropouts or end == len(self._members):
                layers, who = self.layers[at:end], self._who[at:end]
                behind = first + sum(layer.tensors for layer in layers)
                stack = Stack(self._stack.layers[at:end])
                x = run_stack(stack, layers, x, tensors[first:behind], self.implementation, who)
                for dropout in member.dropouts:
                    x = dropout(x)
                at, first = end, behind
        assert isinstance(x, Tensor)
        return x

    def _is_hooked(self) -> bool:
        return any(self._hooks) or any("forward" in own for own in self._owns)

    def freeze(self) -> None:
        """Makes the stack run with the tensors as they are now, until freeze or unfreeze is called again."""
        if self._is_hooked():
            raise ValueError(
                f"{self._owner}: freeze: layers {', '.join(self.names)} should have no hooks, which would not run; "
                "remove them before"
            )
        tensors = self._tensors()
        if tensors is None:
            return  # it goes on layer by layer
        kinds = sorted(set(map(_kind, tensors)))
        if len(kinds) > 1 or kinds[0].endswith(SHARDED):
            raise ValueError(
                f"{self._owner}: freeze: the weights of layers {', '.join(self.names)} should be of one dtype, on one "
                f"device and no shards; they are {' and '.join(kinds)}; convert them with .to()"
            )
        frozen = Frozen(self._stack, tensors)
        frozen.prepare(self.implementation)
        self.frozen = frozen

    def unfreeze(self) -> None:
        self.frozen = None

    def _tensors(self) -> list[Tensor] | None:
        """The members' tensors, layer by layer, or None if some are now of a class that has products of its own."""
        if not self._have_scalars:
            try:
                own = list(map(getitem, self._parameters_of, self._names_in))
            except KeyError:  # a parametrization has taken the place of a parameter
                own = []
            if [type(tensor) for tensor in own] == self._types:
                return [tensor for tensor in own if tensor is not None]
        tensors: list[Tensor] = []
        for member, layer, who in zip(self._members, self.layers, self._who, strict=True):
            found = member.tensors()
            if len(found) != layer.tensors:
                raise ValueError(f"{who} has got or lost its bias since; build or fuse what it is part of again")
            tensors += found
        return None if any(map(is_foreign, tensors)) else tensors

    @property
    def members(self) -> list[nn.Module]:
        return [member.layer for member in self._members]

    def text_for(self, x: Tensor) -> str:
        """The stack's text, as the raw ops take it for x."""
        return self._stack.text_for(x)

    def run_by(self, implementation: str) -> LayerStack:
        members = [(name, m.layer, m.activation) for name, m in zip(self.names, self._members, strict=True)]
        return LayerStack(members, implementation, self._owner, [m.dropouts for m in self._members])

    def alone(self) -> list[LayerStack]:
        """Each of its layers as a stack by itself."""
        members = zip(self.names, self._members, strict=True)
        return [LayerStack([(name, m.layer, m.activation)], self.implementation, self._owner) for name, m in members]

    def tuned(self, batch: int, training: bool) -> Iterator[Tuned]:
        """Times two ways for `batch` samples, and keeps which was faster: batched, and what auto runs where nothing was
        measured."""
        from factorlayer.tuning.candidates import Tuned, tune

        who, tensors = f"{self._owner}: {', '.join(self.names)}", self._tensors()
        if tensors is None or self.implementation != "auto" or self.frozen is not None:
            why = "it is frozen" if self.frozen is not None else f"it runs {self.implementation}, as asked"
            yield Tuned(
                who, None, why if tensors is not None else "its weights have products of their own", lasting=True
            )
            return
        first, last = self.layers[0], tensors[-1]
        x, _, _ = autocast(tensors[0].new_empty(0, first.spec.in_features), (), None)
        if len(self.layers) == 1:
            own, bias = (tensors[:-1], last) if first.chain.bias else (tensors, None)
            yield from tune_layer(first.spec, first.chain, x, own, bias, batch, training, who)
            return

        def fused(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            with choices.ignored():
                return run_stack(self._stack, self.layers, x, given, "auto", self._who)

        def batched(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            return run_stack(self._stack, self.layers, x, given, "batched", self._who)

        runs = {"fused": fused, "batched": batched}
        yield from tune(who, self.text_for(x), x, batch, training, tensors, runs)

    def measured(self) -> list[str]:
        """The lines of explain() on what was measured for samples like its weights; none for a single layer, which says
        so itself."""
        tensors = self._tensors()
        if tensors is None or self.implementation != "auto" or len(self.layers) == 1 or not choices.TABLE:
            return []
        x, _, _ = autocast(tensors[0], (), None)
        found = choices.of_both_passes(self.text_for(x), x, None)
        return [f"{', '.join(self.names)}: auto runs {c.implementation}, {c}" for c in found]

    def explain(self) -> list[str]:
        learns = " (on a GPU, trained by itself: its activation learns)"
        large = " (on a GPU in 16 bits and tf32, by cuBLAS: one large product)"
        drops = " (dropout behind it: where that drops something, the stack ends here)"
        return [
            f"{name}: {layer}{learns if layer.chain.parameters else large if is_large_product(layer.chain) else ''}"
            f"{drops if member.dropouts else ''}"
            for name, layer, member in zip(self.names, self.layers, self._members, strict=True)
        ]

    def _one_by_one(self, x: Input) -> Tensor:
        y: Tensor = concatenated(x) if are_several(x) else x
        for member in self._members:
            y = member.layer(y)
            y = member.activation(y) if isinstance(member.activation, nn.Module) else activate(member.stage, y)
            for dropout in member.dropouts:
                y = dropout(y)
        return y


class RunsAsStacks(nn.Module):
    """A module that runs as stacks: it sets their implementation, and freezes them."""

    _implementation: Implementation

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_freeze_again)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks every module for."""
        refuse_script("FactorMLP" if type(self).__name__ == "FactorMLP" else "fuse")

    @property
    def stacks(self) -> list[LayerStack]:
        raise NotImplementedError

    @property
    def implementation(self) -> Implementation:
        return self._implementation

    @implementation.setter
    def implementation(self, name: Implementation) -> None:
        self._implementation = implementation_name(name, type(self).__name__)
        for stack in self.stacks:
            stack.implementation = self._implementation
        for layer in self._own_layers():
            layer.implementation = self._implementation

    def _own_layers(self) -> Sequence[FactorLinear]:
        """The layers of its own, which it calls one by one where one of them has a hook: what fuse returns has none."""
        return ()

    def understood(self) -> list[str]:
        raise NotImplementedError

    def explain(self) -> str:
        """Says in words what it runs, as it was understood, and by which implementation if one was asked for."""
        asked = [] if self.implementation == "auto" else [f"  stacks run by {self.implementation}, as asked"]
        measured = [f"  {line}" for stack in self.stacks for line in stack.measured()]
        of_stacks = (p for stack in self.stacks for member in stack.members for p in member.parameters())
        shards = [f"  {line}" for line in explain_shards(of_stacks)]
        return "\n".join([*self.understood(), *asked, *measured, *shards])

    def freeze(self) -> Self:
        """Calls factorlayer.freeze() on this module, whose docstring says more, and returns it."""
        return freeze(self)

    def unfreeze(self) -> Self:
        """Calls factorlayer.unfreeze() on this module, and returns it."""
        return unfreeze(self)

    @property
    def is_frozen(self) -> bool:
        return any(stack.frozen is not None for stack in self.stacks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._apply_to_parameters(fn, recurse)
        for stack in self.stacks:
            if stack.frozen is not None:
                stack.frozen.apply(fn)
        return self

    def _apply_to_parameters(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        super()._apply(fn, recurse)


def freeze(module: Module) -> Module:
    """Makes the stacks in a module run, for inference, with the weights that they have now. Stacks are those of every
    FactorMLP and of all that fuse has made in the module, such as a model that was fused in place. Returns the module.

    The weights are packed once, as kernels take them; on a GPU this compiles what calls will run. They are constants: x
    may have gradients, the parameters get none, and changing the parameters has no effect until freeze() is called
    again. load_state_dict() calls it, and .to(), .half() and the like convert what is frozen as well. Hooks that layers
    get afterwards are not called. state_dict() has the parameters; copies and pickles are frozen.
    """
    stacks = _stacks_in(module, "freeze")
    before = [stack.frozen for stack in stacks]
    try:
        for stack in stacks:
            stack.freeze()
    except BaseException:
        for stack, frozen in zip(stacks, before, strict=True):
            stack.frozen = frozen
        raise
    return module


def unfreeze(module: Module) -> Module:
    """Makes the stacks in a module run with their weights as they are at each call again, so that they train. Returns
    the module."""
    for stack in _stacks_in(module, "unfreeze"):
        stack.unfreeze()
    return module


def _stacks_in(module: nn.Module, who: str) -> list[LayerStack]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: module should be an nn.Module, it is {type(module).__name__}")
    parts = [part for part in module.modules() if isinstance(part, RunsAsStacks)]
    if not parts:
        raise ValueError(
            f"{who}: the module should have a FactorMLP or what fuse makes, {type(module).__name__} has none; "
            f"give {who} what fuse(module, inplace=True) returns"
        )
    return [stack for part in parts for stack in part.stacks]


def _freeze_again(module: nn.Module, incompatible: object) -> None:
    """Freezes a module that is frozen again, after it has loaded parameters."""
    if isinstance(module, RunsAsStacks) and module.is_frozen:
        module.freeze()


@dataclass
class _Member:
    """A layer of a stack, the activation behind it, the names of those of the activation's parameters that are its p0,
    p1, …, and the dropouts behind."""

    layer: nn.Module
    activation: Activation
    stage: str  # what it is in a chain
    scalar_names: tuple[str, ...]
    dropouts: tuple[nn.Module, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layer's own parameters."""
        return (*(self.layer._weight_names if isinstance(self.layer, FactorLinear) else ("weight",)), "bias")

    @property
    def has_scalars(self) -> bool:
        return bool(self.scalar_names or (isinstance(self.layer, FactorLinear) and self.layer._scalar_names))

    def tensors(self) -> list[Tensor]:
        """The layer's weights, the activation's parameters, and the bias."""
        own, layer = self.layer._parameters, self.layer
        found = [own[name] if name in own else getattr(layer, name) for name in self.names]
        bias = found.pop()
        if isinstance(layer, FactorLinear):
            found += scalars(layer.activation, layer._scalar_names)
        if self.scalar_names:
            found += scalars(self.activation, self.scalar_names)
        return [tensor for tensor in (*found, bias) if tensor is not None]


SHARDED = ", sharded"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}" + SHARDED * (type(tensor).__name__ == "DTensor")


STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
