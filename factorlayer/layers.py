"""FactorLinear: a drop-in for nn.Linear whose matrix is structured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from factorlayer.activations.expression import Expression
from factorlayer.activations.texts import UserActivation, activation_of, computed, scalars
from factorlayer.autograd.input_ops import explain_inputs, of_inputs
from factorlayer.autograd.inputs import Input
from factorlayer.autograd.layer_ops import explain_fused, explain_shards, is_sharded, text_for
from factorlayer.autograd.leaves import as_node, is_traced
from factorlayer.autograd.record import Record, Recorded, record_of, record_of_weights, warn_of_dense
from factorlayer.functional import (
    IMPLEMENTATIONS,
    Implementation,
    autocast,
    choose,
    implementation_name,
    run,
    tune_layer,
    warm_up,
    why_auto_has_no_choice,
    why_auto_is_batched,
)
from factorlayer.maths.chain import Chain
from factorlayer.maths.outline import Outline
from factorlayer.maths.project import ProjectionError, project, projection_error, to_dense
from factorlayer.maths.spec import Factors, LayerSpec, Structure, resolve
from factorlayer.tuning import choices, predicted

if TYPE_CHECKING:
    from factorlayer.tuning.candidates import Tuned


def _check_batch(who: str, batch: Any) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"{who}: batch should be a positive number of samples, it is {batch!r}")


def refuse_script(who: str) -> NoReturn:
    raise RuntimeError(
        f"{who}: torch.jit.script cannot compile this module; use torch.export or torch.compile, or, where it has to "
        "be TorchScript, torch.jit.trace under torch.no_grad()"
    )


HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_forward_hooks", "_backward_hooks")


def is_hooked(module: nn.Module) -> bool:
    """Whether calling a module does something else than its class's forward."""
    own = vars(module)
    return any(own[name] for name in HOOKS) or "forward" in own or is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it of another module, or module.compile() was called."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _is_hooked_inside(module: nn.Module) -> bool:
    """Whether a module or a part of it is hooked."""
    return is_hooked(module) or any(_is_hooked_inside(part) for part in module._modules.values() if part is not None)


class FactorLinear(Recorded):
    """y = activation(x Wᵀ + bias), where W [out_features, in_features] is a Kronecker product or a Monarch matrix.

    Args:
        in_features, out_features, bias: as nn.Linear has them.
        structure: "kronecker" or "monarch".
        factors: sizes that multiply up to the features. None: a balanced pair; 3: a balanced triple;
            ((32, 32), (48, 64)): those of the inputs and those of the outputs; (32, 32): the same for both.
        blocks: Monarch only, instead of factors: (K, L), the number of input and of output groups; 4 means (4, 4).
        rank: Kronecker: how many products are added up; Monarch: the rank of each block.
        activation: what follows the bias: None, a name (factorlayer.ACTIVATIONS), or a module or function of one tensor
            that is made of operations on single elements. That one is traced now, with its numbers and buffers as they
            are; a module's parameters of one element stay parameters, as activation.NAME.
        implementation: "auto", "naive" (v1), "batched" (v2) or "fused" (v3).

    The parameters are weight_0 … weight_{k-1} (shapes: maths/spec.py) and bias. A fresh layer's outputs have the
    variance that a fresh nn.Linear's have. dtype may be complex, which naive and batched run. load_state_dict refuses
    what is of another structure, and, if strict, of another activation (autograd/record.py).
    """

    bias: nn.Parameter | None
    projection_error: ProjectionError | None = None  # of from_linear
    own_chain: Chain | None = None  # what each process runs, where parallelize_module has shared the layer out

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        structure: Structure = "kronecker",
        factors: Factors = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        activation: UserActivation = None,
        implementation: Implementation = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        try:
            self.spec: LayerSpec = resolve(in_features, out_features, structure, factors, blocks, rank)
            stage, self._scalar_names = activation_of(activation)
            self.chain = Chain.of(self.spec, bool(bias), stage)
        except (TypeError, ValueError) as error:
            raise type(error)(f"FactorLinear: {error}") from None
        self.implementation = implementation
        if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
            raise TypeError(f"FactorLinear: dtype should be a floating-point or complex type, it is {dtype!r}")
        self._weight_names = [f"weight_{i}" for i in range(len(self.spec.weight_shapes))]
        for name, shape in zip(self._weight_names, self.spec.weight_shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        parameter = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", parameter)
        self.activation: str | Expression | nn.Module | None
        if isinstance(activation, nn.Module):
            kept = dtype is not None and dtype.is_complex  # its parameters stay real: they are p0 of p0 * x
            self.activation = activation.to(device=device, dtype=None if kept else dtype)
        else:
            self.activation = computed(self.chain.activation)
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation" and hasattr(self, name) and "_is_replica" not in self.__dict__:  # nn.DataParallel's
            raise AttributeError("FactorLinear: activation is traced when the layer is built; build another layer")
        if name == "implementation":
            value = implementation_name(value, "FactorLinear")
        super().__setattr__(name, value)
        if name == "bias":
            self._notice_bias(value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name == "bias":
            self._notice_bias(param)

    def _notice_bias(self, bias: Tensor | None) -> None:
        """A chain says whether there is one, which may be taken away and given afterwards, as nn.Linear's."""
        if self.chain.bias != (bias is not None):
            self.chain = replace(self.chain, bias=bias is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "projection_error"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle. Older layers could be given any name of an implementation; an unknown one ran naive."""
        super().__setstate__(state)
        self.implementation = IMPLEMENTATIONS.get(self.implementation, "naive")

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks every module for."""
        refuse_script("FactorLinear")

    def reset_parameters(self) -> None:
        """Draws uniform weights, scaled so that outputs have the variance that nn.Linear's have: a third of the
        inputs'. Complex outputs have twice that: their real and imaginary parts are each drawn as a real weight is."""
        parts = 2 if self.weights[0].is_complex() else 1
        share = (parts / (3 * self.spec.terms)) ** (1 / len(self.spec.contractions))
        for c in self.spec.contractions:
            bound = math.sqrt(3 * share / (parts * c.p))  # the variance is share / p, over p summands
            nn.init.uniform_(self.weights[c.weight], -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Input) -> Tensor:
        """Returns y [..., out_features] of input [..., in_features], or of a list of tensors as if it were concatenated
        along the features."""
        if type(input) is not Tensor and is_traced(input):
            return as_node(self, input)
        parameters = self._parameters
        weights: list[Tensor]
        bias: Tensor | None
        try:  # an attribute of a module takes ten times as long as an entry of a dict
            weights = [parameters[name] for name in self._weight_names]  # type: ignore[misc]
            bias = parameters["bias"]
        except KeyError:  # a parametrization has taken the place of a parameter
            weights, bias = self.weights, self.bias
        activation = self._modules.get("activation")
        if activation is not None and _is_hooked_inside(activation):  # then it is called, as a module of its own
            chain = replace(self.chain, activation="identity")
            y: Tensor = activation(run(self.spec, chain, input, weights, bias, self.implementation, "FactorLinear"))
            return y
        if self._scalar_names:
            weights += scalars(self.activation, self._scalar_names)
        return run(self.spec, self.chain, input, weights, bias, self.implementation, "FactorLinear")

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._weight_names]

    @property
    def weight(self) -> Outline:
        """What other code sees of the matrix W, which is nowhere in memory: its shape, dtype and device."""
        first = self.weights[0]
        shape = torch.Size((self.out_features, self.in_features))
        return Outline(shape, first.dtype, first.device, first.requires_grad)

    @property
    def in_features(self) -> int:
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        return self.spec.out_features

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters(recurse=False))

    def flops(self, batch: int = 1) -> int:
        """FLOPs of a forward pass over batch samples, contractions only."""
        return self.spec.flops(batch)

    def to_dense(self) -> Tensor:
        """The matrix W [out_features, in_features]; gradients flow through it."""
        if any(map(is_sharded, self.weights)):
            raise ValueError(
                "FactorLinear.to_dense: W is made of whole weights, these are sharded (DTensor): full_tensor() of each "
                "makes them, called by all processes"
            )
        return to_dense(self.spec, self.weights)

    def to_linear(self) -> nn.Linear:
        """The nn.Linear that computes the same."""
        if self.chain.activation != "identity":
            raise ValueError(
                f"FactorLinear.to_linear: this layer ends in activation={self.activation!r}, which nn.Linear cannot "
                "hold; build the layer without it, or use to_dense()"
            )
        weight = self.to_dense().detach()
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        structure: Structure = "kronecker",
        factors: Factors = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        activation: UserActivation = None,
        implementation: Implementation = "auto",
        inputs: Tensor | None = None,
    ) -> FactorLinear:
        """The layer nearest to a dense one: its W is the projection of linear.weight (maths/project.py).

        What that leaves is its `projection_error`, which explain() shows: of W, and of the outputs on `inputs`
        [..., in_features] if they are given, both before an activation. It belongs to this object, and to no copy,
        pickle or state_dict of it; training does not change it.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"FactorLinear.from_linear: linear should be an nn.Linear, it is {type(linear).__name__}")
        if inputs is not None and not isinstance(inputs, Tensor):
            kind = type(inputs).__name__
            raise TypeError(f"FactorLinear.from_linear: inputs should be a tensor [..., in_features], it is {kind}")
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            structure=structure,
            factors=factors,
            blocks=blocks,
            rank=rank,
            activation=activation,
            implementation=implementation,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        try:
            weights = project(layer.spec, linear.weight)
            if not linear.weight.is_meta:  # which has no numbers to compare
                layer.projection_error = projection_error(layer.spec, weights, linear.weight, linear.bias, inputs)
        except ValueError as wrong:
            raise ValueError(f"FactorLinear.from_linear: {wrong}") from None
        with torch.no_grad():
            for weight, projected in zip(layer.weights, weights, strict=True):
                weight.copy_(projected)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def what_it_is(self) -> Record:
        return record_of(self.spec) | {"activation": self.chain.activation}

    def record_of_given(self, found: Record | None, given: Mapping[str, Any]) -> Record | None:
        own = [parameter for name in self._weight_names if (parameter := self._parameters.get(name)) is not None]
        if tuple(tuple(parameter.shape) for parameter in own) != self.spec.weight_shapes:
            return None  # somebody else has cut them, or taken their place, and knows how to load them
        warn_of_dense(self.spec, given)
        return record_of_weights(self.spec, found, given)

    def warmup(self, batch: int, tune: bool = False) -> None:
        """Compiles and loads what calls with `batch` samples run: before a CUDA graph captures one, or a first request.

        Under autocast, for autocast's dtype; under torch.no_grad, without what the backward pass runs. On a CPU there
        is nothing to do.

        With tune=True it times the fused and the batched implementation before, and keeps what is faster, for which
        `auto` takes it from then on, in this process and later ones: for all batches of the same class, on this device.
        Where that cannot be timed, as for want of memory, a warning says why, and `auto` goes on as it was.
        """
        _check_batch("FactorLinear.warmup", batch)
        recorded = self._is_recorded()
        if tune:
            choices.check_can_time("FactorLinear.warmup")
            for tuned in self.tuned(batch, recorded, "FactorLinear.warmup"):
                if tuned.choice is None and not tuned.lasting:
                    warnings.warn(str(tuned), RuntimeWarning, stacklevel=2)
        warm_up(
            self.own_chain or self.chain,
            self._no_samples(),
            batch,
            self.implementation,
            "FactorLinear.warmup",
            recorded,
        )

    def tuned(self, batch: int, training: bool, who: str) -> Iterator[Tuned]:
        """Times the layer for inference and, if `training`, for training, and keeps each choice as soon as it is
        measured."""
        from factorlayer.tuning.candidates import Tuned

        weights, x = self.weights, self._no_samples()
        if self.implementation != "auto":
            yield Tuned(who, None, f"it runs {self.implementation}, as asked", lasting=True)
            return
        if self._scalar_names:
            weights += scalars(self.activation, self._scalar_names)
        yield from tune_layer(self.spec, self.chain, x, weights, self.bias, batch, training, who)

    def _is_recorded(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

    def _no_samples(self) -> Tensor:
        weight = self.weights[0]
        x = torch.empty(0, self.in_features, device=weight.device, dtype=weight.dtype)
        return autocast(x, (), None)[0]

    def explain(self, batch: int = 1, inputs: Sequence[int] = ()) -> str:
        """Says in words what a call with `batch` samples computes, moves and runs. `inputs` are the numbers of features
        of the tensors in a list, if x is one."""
        _check_batch("FactorLinear.explain", batch)
        spec, weight, x = self.spec, self.weights[0], self._no_samples()
        recorded, chain = self._is_recorded(), self.own_chain or self.chain
        chosen = choose(chain, x, self.implementation, "FactorLinear.explain", batch, recorded)
        lines = [
            repr(self),
            f"{self.parameter_count} parameters, those of the weights "
            f"{spec.parameter_count / (spec.in_features * spec.out_features):.2%} of the dense weight's",
            f"{batch} samples: {spec.flops(batch):.3e} FLOPs, {2 * batch * spec.in_features * spec.out_features:.3e} "
            f"dense; {spec.elements_moved(batch) * weight.element_size():.3e} bytes moved at least",
        ]
        if self.projection_error is not None:
            lines.append(f"projected: {self.projection_error}")
        for c in spec.contractions:
            shared = "one weight" if c.tied else f"{c.outer * c.inner} weights"
            lines.append(
                f"  [{c.outer}, {c.p}, {c.inner}] -> [{c.outer}, {c.q}, {c.inner}] by weight_{c.weight}, {shared}"
                + (f", for each of {spec.terms} terms" if spec.terms > 1 else "")
            )
        if self.own_chain is not None:
            each = f"[{chain.in_features}] to [{chain.out_features}]"
            lines.append(f"shared out among processes, each of which has a layer from {each}")
        if self.implementation == "auto" and why_auto_has_no_choice(chain, x) is None:
            lines.append(self._choice_in_words(chain, x, batch))
        lines.append("runs " + self._implementation_in_words(chain, chosen, x, batch, recorded))
        lines += [self._inputs_in_words(inputs, chosen, x, batch)] if inputs else []
        return "\n".join([*lines, *explain_shards(self.parameters())])

    def _inputs_in_words(self, inputs: Sequence[int], chosen: str, x: Tensor, batch: int) -> str:
        """The words that say whether a list is concatenated."""
        if not isinstance(inputs, list | tuple) or min(inputs) < 0 or sum(inputs) != self.in_features:
            raise ValueError(
                f"FactorLinear.explain: inputs should be features of each, in_features={self.in_features} together; "
                f"they are {inputs}"
            )
        some = tuple(features for features in inputs if features)
        if len(some) == 1:
            return "of several inputs: one has features, and runs as it is"
        if chosen == "batched" and self.chain.is_dense:
            return "of several inputs: a product for each, added up"
        if chosen != "fused":
            return f"of several inputs: concatenated, as {chosen} takes one tensor"
        return explain_inputs(of_inputs(self.chain, some), x, batch)

    def _choice_in_words(self, chain: Chain, x: Tensor, batch: int) -> str:
        """The words that say where auto's choice comes from."""
        found = choices.of_both_passes(text_for(chain, x), x, batch)
        if not found and x.is_cuda:
            text, device = text_for(chain, x), x.get_device()
            both = [predicted.predicted(text, x.dtype, device, batch, training) for training in (False, True)]
            return "\n".join(f"auto takes {each.implementation}: {each}" for each in both)
        if not found:
            return "auto takes fused as always: nothing was measured"
        return "\n".join(f"auto takes {choice.implementation}: {choice}" for choice in found)

    def _implementation_in_words(self, chain: Chain, chosen: str, x: Tensor, batch: int, recorded: bool) -> str:
        if chosen == "fused" and x.is_cuda:
            return f"fused, on a GPU: {explain_fused(chain, x, batch)}"
        if chosen == "fused":
            return f"fused, {torch.ops.factorlayer.instruction_set()} kernels: one pass over x for all contractions"
        if self.implementation == "auto":
            return f"{chosen}, because {why_auto_is_batched(chain, x, batch, recorded)}"
        return f"{chosen}, as asked"

    def extra_repr(self) -> str:
        """The arguments that build this layer again."""
        spec, weight = self.spec, self.weights[0]
        parts = [f"{spec.in_features}, {spec.out_features}"]
        if self.bias is None:
            parts.append("bias=False")
        parts.append(f"structure={spec.structure!r}, factors={(spec.in_factors, spec.out_factors)}")
        if spec.rank != 1:
            parts.append(f"rank={spec.rank}")
        if self.activation is not None and not isinstance(self.activation, nn.Module):
            parts.append(f"activation={self.activation!r}")
        if self.implementation != "auto":
            parts.append(f"implementation={self.implementation!r}")
        if weight.device.type != "cpu":
            parts.append(f"device={str(weight.device)!r}")
        if weight.dtype != torch.get_default_dtype():
            parts.append(f"dtype={weight.dtype}")
        return ", ".join(parts)
