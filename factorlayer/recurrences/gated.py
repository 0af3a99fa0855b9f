"""Gated: what FactorGRU and FactorGRUCell share, parameters by their cells' names, and how a cell's recurrence is run:
naive or batched (maths/steps.py), or fused (autograd/recurrent_ops.py)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from factorlayer.activations.expression import Expression
from factorlayer.activations.named import activate
from factorlayer.activations.texts import UserActivation, computed, scalars
from factorlayer.autograd import recurrent_ops
from factorlayer.autograd.inputs import check_alike
from factorlayer.autograd.layer_ops import transforms_active
from factorlayer.autograd.record import Record, Recorded, record_of
from factorlayer.autograd.runtime import CompileError
from factorlayer.functional import Implementation, any_autocast, autocast, implementation_name
from factorlayer.layers import refuse_script
from factorlayer.maths.chain import Chain
from factorlayer.maths.project import ProjectionError, project, projection_error
from factorlayer.maths.recurrence import GATE_NAMES, GATES, TAKEN, Recurrence, is_dense, structure_of
from factorlayer.maths.spec import Factors
from factorlayer.maths.steps import Walk, batched, naive
from factorlayer.plan.recurrent_library import Sequences, Unit
from factorlayer.recurrences.cell import KINDS, Cell, Parameters, cells_of
from factorlayer.recurrences.layout import cut
from factorlayer.tuning.recurrent import why_slower


class Gated(Recorded):
    """What FactorGRU and FactorGRUCell share: parameters by their cells' names, and how they run."""

    _who: str  # who complains
    _switch: str  # that one of PyTorch's by which float32 may be TF32 on a GPU, as runtime.tf32_allowed names it
    input_size: int
    _sizes: tuple[Any, ...]  # factors, input_factors, blocks and rank, as they were given
    projection_errors: dict[str, ProjectionError]  # by the gate's matrix, of what was made of a dense one

    def _build(
        self,
        cells: Sequence[Cell],
        activation: UserActivation,
        scalar_names: tuple[str, ...],
        implementation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"{self._who}: dtype should be a floating-point type, it is {dtype!r}")
        self.cells, self._scalar_names = tuple(cells), scalar_names
        self._names = [name for cell in cells for name in cell.shapes]
        features = tuple(cell.inputs.in_features for cell in cells)
        self._unit = Unit(features, cells[0].hidden, cells[0].bias, self._is_dense)
        self.implementation = implementation  # type: ignore[assignment]
        for cell in cells:
            for name, shape in cell.shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.activation: str | Expression | nn.Module | None
        if isinstance(activation, nn.Module):
            self.activation = activation.to(device=device, dtype=dtype)
        else:
            self.activation = computed(self._chain.activation)
        self.projection_errors = {}
        self.reset_parameters()

    @property
    def _chain(self) -> Chain:
        """One gate's recurrent matrix, and the candidate's bias and activation."""
        return self.cells[0].recurrence.chain

    @property
    def implementation(self) -> Implementation:
        return self._implementation

    @implementation.setter
    def implementation(self, name: Implementation) -> None:
        self._implementation = implementation_name(name, self._who)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks every module for."""
        refuse_script(self._who)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation" and hasattr(self, name):
            raise AttributeError(f"{self._who}: activation is traced when the layer is built; build another layer")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"projection_errors": {}}

    def reset_parameters(self) -> None:
        """Uniform, as nn.GRU's are; structured matrices so scaled that their products have the variance that nn.GRU's
        have. Gains of layer norm are 1, learned initial states 0."""
        for cell in self.cells:
            cell.reset({name: getattr(self, name) for name in cell.shapes})

    def what_it_is(self) -> Record:
        first = self.cells[0]
        kind = record_of(first.recurrent) | {"structure": structure_of(first.recurrent)}
        inputs = record_of(first.inputs) | {"structure": structure_of(first.inputs)}
        further = {"reset": first.recurrence.reset, "activation": self._chain.activation, "norm": first.norm}
        return kind | {f"input_{name}": value for name, value in inputs.items()} | further

    def _take(self, dense: nn.Module) -> None:
        """The parameters of an nn.GRU or nn.GRUCell: its matrices gate by gate, the nearest if structured."""
        with torch.no_grad():
            for cell in self.cells:
                parameters = {name: getattr(self, name) for name in cell.shapes}
                for name, parameter in parameters.items():
                    if hasattr(dense, name):  # a parametrized one is no parameter of its module
                        parameter.copy_(getattr(dense, name))
                for kind in KINDS:
                    if is_dense(cell.spec(kind)):
                        continue
                    matrices = getattr(dense, f"weight_{kind}{cell.suffix}").chunk(GATES)
                    each = zip(GATE_NAMES, matrices, cell.weights(kind, parameters), strict=True)
                    for gate, matrix, weights in each:
                        found = project(cell.spec(kind), matrix)
                        for weight, projected in zip(weights, found, strict=True):
                            weight.copy_(projected)
                        if not matrix.is_meta:  # which has no numbers to compare
                            error = projection_error(cell.spec(kind), found, matrix, None, None)
                            self.projection_errors[f"weight_{kind}_{gate}{cell.suffix}"] = error

    def _give(self, dense: nn.Module) -> None:
        """The inverse of _take: all matrices are multiplied out."""
        cell = self.cells[0]
        held = {
            "reset": (cell.recurrence.reset, "after"),
            "activation": (self.activation, "tanh"),
            "norm": (cell.norm, None),
            "learned_initial": (cell.learned_initial, False),
        }
        for name, (value, only) in held.items():
            if value != only:
                raise ValueError(
                    f"{self._who}.to_gru: this one has {name}={value!r}, {type(dense).__name__} knows {only!r} alone"
                )
        into = dict(dense.named_parameters())
        with torch.no_grad():
            for cell in self.cells:
                parameters = {name: getattr(self, name) for name in cell.shapes}
                for kind in KINDS:
                    into[f"weight_{kind}{cell.suffix}"].copy_(cell.matrix(kind, parameters))
                    if self.cells[0].bias:
                        name = f"bias_{kind}{cell.suffix}"
                        into[name].copy_(parameters[name])

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters(recurse=False))

    def flops(self, sequences: int = 1, steps: int = 1) -> int:
        """FLOPs of a forward pass, products alone."""
        each = sum(cell.inputs.flops(1) + cell.recurrent.flops(1) for cell in self.cells)
        return GATES * sequences * steps * each

    def _warm_up(self, shape: tuple[int, ...]) -> None:
        self._check_counts("warmup", shape)
        weight = next(self.parameters())
        made = self(torch.zeros(*shape, self.input_size, device=weight.device, dtype=weight.dtype))
        y = made if isinstance(made, Tensor) else made[0]
        wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if torch.is_grad_enabled() and wanted:
            torch.autograd.grad(y.sum(), wanted)

    def _check_counts(self, method: str, counts: Sequence[Any]) -> None:
        if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
            raise ValueError(
                f"{self._who}.{method}: sequences and steps should be positive integers, they are {tuple(counts)}"
            )

    def _explained(self, sequences: int, steps: int) -> str:
        """What a call with so many sequences of so many steps computes and runs, in words."""
        self._check_counts("explain", (sequences, steps))
        dense = sum(GATES * cell.hidden * (cell.inputs.in_features + cell.hidden) for cell in self.cells)
        held = sum(GATES * cell.spec(kind).parameter_count for cell in self.cells for kind in KINDS)
        lines = [
            repr(self),
            f"{self.parameter_count} parameters, those of matrices {held / dense:.2%} of dense ones'",
            f"{sequences} sequences of {steps} steps: {self.flops(sequences, steps):.3e} FLOPs, "
            f"{2 * sequences * steps * dense:.3e} dense",
        ]
        if self.projection_errors:
            worst = max(self.projection_errors, key=lambda name: self.projection_errors[name].weight)
            lines.append(f"projected: {worst} most; {self.projection_errors[worst]}")
        x = autocast(next(self.parameters())[:0], (), None)[0]
        given = self._given_steps(Walk(sequences, steps, 1, sequences), sequences * steps)
        training = self._is_recorded(self.parameters())
        chosen = self._choose(x, given, training)
        if chosen == "fused":
            lines.append("runs fused: input products at once, and the recurrence by one op")
        elif self.implementation == "auto":
            reason = self.why_not_fused(x)
            because = self._why_slower(x, given, training) if reason is None else f"fused cannot: {reason}"
            lines.append(f"runs {self._batched(x)}, because {because}")
        else:
            lines.append(f"runs {self._batched(x) if chosen == 'batched' else chosen}, as asked")
        return "\n".join(lines)

    def _batched(self, x: Tensor) -> str:
        if not self._is_left_to_pytorch(x):
            return "batched, step by step"
        return "batched, by PyTorch’s op for all of it" + ", with matrices multiplied out" * (not self._is_dense)

    def _check_features(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"{self._who}: the last dimension of input should be input_size={self.input_size}, input has the shape "
                f"{tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"{self._who}: input should be a floating-point tensor, it is {x.dtype}; convert it with input.float()"
            )

    def _given(
        self, rows: Sequence[Tensor], hx: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, dict[str, Tensor], list[Tensor]]:
        """Inputs, state, parameters by their names and those of the activation, in autocast's dtype if there is one."""
        names = self._names
        try:  # an attribute of a module takes ten times as long as an entry of a dict
            tensors: list[Tensor] = [self._parameters[name] for name in names]  # type: ignore[misc]
        except KeyError:  # a parametrization has taken the place of a parameter
            tensors = [getattr(self, name) for name in names]
        further = scalars(self.activation, self._scalar_names) if self._scalar_names else []
        if any_autocast():
            rows = [autocast(x, (), None)[0] for x in rows]
            _, tensors, hx = autocast(rows[0], [*tensors, *further], hx)  # type: ignore[assignment]
            tensors, further = tensors[: len(names)], tensors[len(names) :]
        if len(rows) > 1:
            check_alike(self._who, rows, "input")
        x = rows[0]
        parameters = dict(zip(names, tensors, strict=True))
        for name, tensor in [*parameters.items(), *([] if hx is None else [("hx", hx)])]:
            if tensor.dtype != x.dtype:
                raise TypeError(
                    f"{self._who}: input and {name} should have one dtype, input is {x.dtype} and {name} is "
                    f"{tensor.dtype}; convert one with .to(), or use torch.autocast"
                )
            if tensor.device != x.device:
                raise TypeError(
                    f"{self._who}: input and {name} should be on one device, input is on {x.device} and {name} on "
                    f"{tensor.device}"
                )
        return list(rows), hx, parameters, further

    def _initials(self, sequences: int, x: Tensor, parameters: Parameters) -> list[Tensor]:
        """Where the sequences of each cell begin if no state is given."""
        first = self.cells[0]
        if not first.learned_initial:  # the same zeros for all of them
            return [x.new_zeros(sequences, first.hidden)] * len(self.cells)
        return [parameters[f"initial{cell.suffix}"].expand(sequences, -1) for cell in self.cells]

    def _states(
        self,
        cell: Cell,
        rows: Sequence[Tensor],
        initial: Tensor,
        restart: Tensor | None,
        starts: Tensor | None,
        walk: Walk,
        parameters: Parameters,
        further: Sequence[Tensor],
        chosen: str,
    ) -> Tensor:
        """The states behind all steps, [rows, hidden]."""
        added, bias = cell.biases(parameters)
        given = rows, parameters, added, self.implementation, self._who
        gains = parameters.get(f"norm_hh{cell.suffix}")
        if chosen == "fused":
            try:
                gates = cell.gates(*given, switch=self._switch)
                tensors = cell.tensors("hh", parameters)
                return _by_op(cell.recurrence, gates, initial, restart, tensors, bias, starts, walk, self._switch)
            except CompileError as error:
                if self.implementation == "fused":
                    raise
                self._give_up(rows[0], error)
        activation = self._chain.activation
        step_by_step = naive if chosen == "naive" else batched
        gates = cell.gates(*given, switch=None)
        weights = [weight for of_gate in cell.weights("hh", parameters) for weight in of_gate]
        of_steps = gates, initial, weights, bias, starts, walk
        return step_by_step(cell.recurrence, *of_steps, lambda x: activate(activation, x, further), restart, gains)

    def _give_up(self, x: Tensor, error: CompileError) -> None:
        """So that the next call does not try again."""
        text = self.cells[0].recurrence.text
        _given_up[text, x.dtype] = str(error)
        message = f"factorlayer runs the batched implementation, not the fused one, of {text}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=5)

    @property
    def _is_dense(self) -> bool:
        return all(is_dense(cell.spec(kind)) for cell in self.cells for kind in KINDS)

    @property
    def _is_gru(self) -> bool:
        """Whether PyTorch has an op for what it computes, but for the matrices' structure."""
        cell = self.cells[0]
        known = cell.recurrence.reset == "after" and self._chain.activation == "tanh" and cell.norm is None
        return known and not transforms_active() and forward_ad._current_level < 0

    def _is_left_to_pytorch(self, x: Tensor) -> bool:
        """Whether that op is the best of PyTorch: on a GPU, where a step of a loop is a dozen launches, structured
        matrices are multiplied out for it."""
        return self._is_gru and (x.is_cuda or self._is_dense)

    def _given_steps(self, walk: Walk, rows: int) -> Sequences:
        """What a choice depends on."""
        return Sequences(walk.sequences, walk.steps, rows, walk.lengths is not None)

    def _is_recorded(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether autograd would go back to any of them."""
        return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])

    def _choose(
        self, x: Tensor, given: Sequences, training: bool, starts: bool = False, starts_apart: bool = False
    ) -> str:
        """naive, batched or fused."""
        if self.implementation not in ("auto", "fused"):
            return self.implementation
        reason = self.why_not_fused(x, starts_apart)
        if reason is None:  # PyTorch's op knows no starts
            return "batched" if not starts and self._why_slower(x, given, training) else "fused"
        if self.implementation == "fused":
            raise RuntimeError(
                f"{self._who}: implementation='fused' cannot run: {reason}; or use implementation='auto'"
            )
        return "batched"

    def why_not_fused(self, x: Tensor, starts_apart: bool = False) -> str | None:
        """Why the fused implementation cannot take a call, or None."""
        if self.cells[0].norm is not None:
            return "its kernels have no layer norm"
        if starts_apart:
            return (
                "of a PackedSequence's sequences its kernels know one state to begin with and again, and hx is another"
            )
        if transforms_active() and self.implementation == "auto":
            return "under torch.func it is called for each sample"
        if not is_compiling() and torch._C._is_tracing():
            return "torch.jit.trace takes numbers of sequences and steps for tensors, which its op is not given"
        recurrence = self.cells[0].recurrence
        if self.implementation == "auto" and _given_up and (recurrence.text, x.dtype) in _given_up:
            return _given_up[recurrence.text, x.dtype]
        return recurrent_ops.why_not_fused(recurrence, x, self._switch)

    def _why_slower(self, x: Tensor, given: Sequences, training: bool) -> str | None:
        """Why auto does not take the fused implementation, which could; or None."""
        if self.implementation != "auto" or not given.rows or not self._is_left_to_pytorch(x):
            return None
        return why_slower(self.cells[0].recurrence, self._unit, given, training, x, self._switch)

    def _sizes_again(self) -> tuple[Any, ...]:
        """factors, input_factors, blocks and rank that build the same matrices: those of the first cell if they do, or
        as they were given, where no such sizes say what all cells' matrices have."""
        cell, given = self.cells[0], self._sizes
        kinds = inputs, recurrent = structure_of(cell.inputs), structure_of(cell.recurrent)
        factors: Factors = cell.inputs.out_factors if "factors" in TAKEN[inputs] else None
        if "factors" in TAKEN[recurrent]:
            factors = cell.recurrent.in_factors, cell.recurrent.out_factors
        input_factors = cell.inputs.in_factors if "factors" in TAKEN[inputs] else None
        blocks = (cell.inputs if inputs == "blocks" else cell.recurrent).in_factors[0] if "blocks" in kinds else None
        found = factors, input_factors, blocks, max(cell.inputs.rank, cell.recurrent.rank)
        sizes = self.input_size, cell.hidden, False, recurrent, inputs, *found
        layers, directions = getattr(self, "num_layers", None), 1 + bool(getattr(self, "bidirectional", False))
        try:
            cells, _ = cells_of(self._who, *sizes, "after", None, None, False, layers, directions)
        except ValueError:
            return given
        alike = all(
            c.inputs == own.inputs and c.recurrent == own.recurrent for c, own in zip(cells, self.cells, strict=True)
        )
        return found if alike else given

    def _kind(self) -> list[str]:
        """The further arguments that build this module again."""
        cell, weight = self.cells[0], next(self.parameters())
        inputs, recurrent = structure_of(cell.inputs), structure_of(cell.recurrent)
        parts = [f"structure={recurrent!r}"] if recurrent != "dense" else []
        parts += [f"input_structure={inputs!r}"] if inputs != recurrent else []
        factors, input_factors, blocks, rank = self._sizes_again()
        given = {
            "factors": (factors, None),
            "input_factors": (input_factors, None),
            "blocks": (blocks, None),
            "rank": (rank, 1),
            "reset": (cell.recurrence.reset, "after"),
            "activation": (self.activation, "tanh"),
            "norm": (cell.norm, None),
            "learned_initial": (cell.learned_initial, False),
            "implementation": (self.implementation, "auto"),
            "device": (str(weight.device), "cpu"),
        }
        parts += [
            f"{name}={value!r}"
            for name, (value, default) in given.items()
            if not isinstance(value, nn.Module) and value != default
        ]
        return parts + ([f"dtype={weight.dtype}"] if weight.dtype != torch.get_default_dtype() else [])


_given_up: dict[tuple[str, torch.dtype], str] = {}  # recurrences whose CUDA kernels could not be had


def _by_op(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    initial: Tensor,
    restart: Tensor | None,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    walk: Walk,
    switch: str,
) -> Tensor:
    """The op knows one state of a sequence, to begin with and to begin again: with two, each sequence becomes two."""
    if starts is not None and restart is not None and walk.steps:
        walk = cut(walk, starts, recurrence.reverse)
        initial = torch.cat([restart, initial] if recurrence.reverse else [initial, restart])
    return recurrent_ops.fused(recurrence, gates, initial, weights, bias, starts, walk, switch)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """All tensors are in its dtype by now."""
    return torch.autocast(x.device.type, enabled=False) if any_autocast() else contextlib.nullcontext()
