"""A cell: what a recurrent layer computes in one direction, its parameters by name, and what inputs bring to gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling

from factorlayer.activations.texts import UserActivation, activation_of
from factorlayer.autograd import recurrent_ops
from factorlayer.autograd.inputs import dense_product
from factorlayer.autograd.layer_ops import any_requires_grad, transforms_active
from factorlayer.autograd.runtime import tf32_allowed
from factorlayer.functional import choose, run
from factorlayer.maths.chain import Chain
from factorlayer.maths.project import to_dense
from factorlayer.maths.recurrence import GATE_NAMES, GATES, GateStructure, Recurrence, Reset, gate_specs, is_dense
from factorlayer.maths.spec import Factors, LayerSpec
from factorlayer.maths.steps import normed

Norm = Literal["layer"] | None
Kind = Literal["ih", "hh"]  # of a matrix: of inputs, or of states
KINDS: tuple[Kind, Kind] = ("ih", "hh")
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """What a layer computes in one direction, and what its parameters are called."""

    inputs: LayerSpec  # one gate's input matrix
    recurrent: LayerSpec  # one gate's recurrent matrix
    recurrence: Recurrence
    bias: bool
    norm: Norm
    learned_initial: bool
    suffix: str = ""  # _l0, _l0_reverse …; none of a FactorGRUCell
    shapes: dict[str, tuple[int, ...]] = field(init=False, compare=False, repr=False)  # of the parameters, as nn.GRU's
    chain: Chain = field(init=False, compare=False, repr=False)  # of one gate's input matrix
    # Of the input matrices of all gates as one dense one, exact and in TF32
    joined: tuple[tuple[LayerSpec, Chain], ...] = field(init=False, compare=False, repr=False)
    _names: dict[str, list[str]] = field(init=False, compare=False, repr=False)  # of weights, by the kind of matrix

    def __post_init__(self) -> None:
        """Dense gates lie in one tensor."""
        gates, shapes, names = (GATES * self.hidden,), dict[str, tuple[int, ...]](), {}
        for kind in KINDS:
            spec = self.spec(kind)
            own: dict[str, tuple[int, ...]] = {f"weight_{kind}{self.suffix}": (*gates, spec.in_features)}
            if not is_dense(spec):
                places = [(gate, i) for gate in GATE_NAMES for i in range(len(spec.weight_shapes))]
                own = {f"weight_{kind}_{gate}_{i}{self.suffix}": spec.weight_shapes[i] for gate, i in places}
            shapes |= own
            names[kind] = list(own)
        for present, name in ((self.bias, "bias"), (self.norm, "norm")):
            shapes |= {f"{name}_{kind}{self.suffix}": gates for kind in KINDS if present}
        shapes |= {f"initial{self.suffix}": (self.hidden,)} if self.learned_initial else {}
        biased = self.bias and self.norm is None
        all_gates = LayerSpec("kronecker", (self.inputs.in_features,), gates)
        chain = Chain.of(all_gates, biased, "identity")
        for name, value in (
            ("shapes", shapes),
            ("chain", Chain.of(self.inputs, biased, "identity")),
            ("joined", ((all_gates, chain), (all_gates, replace(chain, tf32=True)))),
            ("_names", names),
        ):
            object.__setattr__(self, name, value)

    @property
    def hidden(self) -> int:
        return self.recurrent.out_features

    def spec(self, kind: Kind) -> LayerSpec:
        return self.inputs if kind == "ih" else self.recurrent

    def weights(self, kind: Kind, parameters: Parameters) -> list[list[Tensor]]:
        """The input or the recurrent matrices' weights, gate by gate."""
        found = self.tensors(kind, parameters)
        each = list(found[0].chunk(GATES)) if len(found) == 1 else found
        count = len(each) // GATES
        return [each[g * count : (g + 1) * count] for g in range(GATES)]

    def tensors(self, kind: Kind, parameters: Parameters) -> list[Tensor]:
        """The same as they are kept: dense ones in one tensor."""
        return [parameters[name] for name in self._names[kind]]

    def biases(self, parameters: Parameters) -> tuple[Tensor | None, Tensor | None]:
        """What the inputs of all gates take, [3 · hidden], and what only the candidate's product does: a bias that is
        reset with it."""
        if not self.bias:
            return None, None
        of_inputs, of_states = parameters[f"bias_ih{self.suffix}"], parameters[f"bias_hh{self.suffix}"]
        if self.recurrence.reset == "before":
            return of_inputs + of_states, None
        both = 2 * self.hidden
        if is_compiling() or transforms_active() or forward_ad._current_level >= 0:
            return of_inputs + F.pad(of_states[:both], (0, self.hidden)), of_states[both:]
        if torch.is_grad_enabled() and (of_inputs.requires_grad or of_states.requires_grad):
            added, candidate = _Biases.apply(of_inputs, of_states)
            return added, candidate
        return _biases(of_inputs, of_states)

    def gates(
        self,
        rows: Sequence[Tensor],
        parameters: Parameters,
        bias: Tensor | None,
        implementation: str,
        who: str,
        switch: str | None,
    ) -> list[Tensor]:
        """What the inputs of all rows, and a bias [3 · hidden], bring to the gates: [rows, hidden] of each, or
        [rows, 3 · hidden] of dense ones, which are one product. Several tensors are rows side by side. A fused
        recurrence may be TF32 as one of PyTorch's switches says; of others there is none."""
        gains = parameters.get(f"norm_ih{self.suffix}")
        added = None if gains is not None else bias
        x = rows[0] if len(rows) == 1 else list(rows)
        if is_dense(self.inputs):
            weight = parameters[f"weight_ih{self.suffix}"]
            if switch is None:
                made = [dense_product(rows, weight, added)]
            else:
                made = [self._of_dense(rows, weight, added, who, switch)]
        else:
            biases = [None] * GATES if added is None else added.chunk(GATES)
            each = zip(self.weights("ih", parameters), biases, strict=True)
            made = [run(self.inputs, self.chain, x, weights, b, implementation, who) for weights, b in each]
        if gains is None:
            return made
        both, candidate = torch.cat(made, dim=1).split([2 * self.hidden, self.hidden], dim=1)
        product = torch.cat([normed(both, gains), normed(candidate, gains)], dim=1)
        return [product if bias is None else product + bias]

    def _of_dense(self, rows: Sequence[Tensor], weight: Tensor, bias: Tensor | None, who: str, switch: str) -> Tensor:
        """The same of a dense matrix and a fused recurrence."""
        first = rows[0]
        spec, chain = self.joined[first.dtype == torch.float32 and tf32_allowed(switch)]
        x = first if len(rows) == 1 else list(rows)
        if recurrent_ops.multiplies_fused(first):
            return run(spec, chain, x, [weight], bias, "fused", who)
        if len(rows) > 1 or not first.is_cuda or is_compiling():
            return dense_product(rows, weight, bias)
        recorded = torch.is_grad_enabled() and any_requires_grad(first, bias, [weight])
        if choose(self.joined[0][1], first, "auto", who, len(first), recorded) == "fused":
            return run(spec, self.joined[0][1], first, [weight], bias, "fused", who)
        return recurrent_ops.input_product(first, weight, bias)

    def matrix(self, kind: Kind, parameters: Parameters) -> Tensor:
        """[3 · hidden, features], of all gates, as nn.GRU has it."""
        return torch.cat([to_dense(self.spec(kind), weights) for weights in self.weights(kind, parameters)])

    def reset(self, parameters: Parameters) -> None:
        """What Gated.reset_parameters says, of a cell's parameters."""
        bound = 1 / math.sqrt(self.hidden)
        for kind in KINDS:
            spec = self.spec(kind)
            if is_dense(spec):
                nn.init.uniform_(parameters[f"weight_{kind}{self.suffix}"], -bound, bound)
                continue
            variance = spec.in_features / (3 * self.hidden)  # of products with inputs of variance 1
            share = (variance / spec.terms) ** (1 / len(spec.contractions))
            for weights in self.weights(kind, parameters):
                for c in spec.contractions:
                    most = math.sqrt(3 * share / c.p)
                    nn.init.uniform_(weights[c.weight], -most, most)
        for name, parameter in parameters.items():
            if name.startswith("bias"):
                nn.init.uniform_(parameter, -bound, bound)
            elif not name.startswith("weight"):
                nn.init.constant_(parameter, float(name.startswith("norm")))


class _Biases(Function):
    """What autograd makes of slices and a sum are seven operations back; this is one."""

    @staticmethod
    def forward(ctx: Any, of_inputs: Tensor, of_states: Tensor) -> tuple[Tensor, Tensor]:
        return _biases(of_inputs, of_states)

    @staticmethod
    def backward(ctx: Any, grad_added: Tensor, grad_candidate: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return grad_added, None
        return grad_added, torch.cat([grad_added[: -grad_candidate.shape[0]], grad_candidate])


def _biases(of_inputs: Tensor, of_states: Tensor) -> tuple[Tensor, Tensor]:
    added, both = of_inputs.clone(), of_inputs.shape[0] // GATES * 2
    added[:both].add_(of_states[:both])
    return added, of_states[both:]


def cells_of(
    who: str,
    input_size: int,
    hidden_size: int,
    bias: bool,
    structure: GateStructure,
    input_structure: GateStructure | None,
    factors: Factors,
    input_factors: Sequence[int] | None,
    blocks: int | Sequence[int] | None,
    rank: int,
    reset: Reset,
    activation: UserActivation,
    norm: Norm,
    learned_initial: bool,
    layers: int | None = None,
    directions: int = 1,
) -> tuple[list[Cell], tuple[str, ...]]:
    """The cells of a FactorGRU, or, without `layers`, that of a FactorGRUCell, and the parameters of the activation."""
    try:
        if reset not in ("after", "before"):
            raise ValueError(f"reset should be 'after' or 'before', it is {reset!r}")
        if norm not in (None, "layer"):
            raise ValueError(f"norm should be None or 'layer', it is {norm!r}")
        stage, names = activation_of(activation)
        cells = []
        for layer in range(1 if layers is None else layers):
            size = input_size if layer == 0 else directions * hidden_size
            own = input_factors if layer == 0 else None
            sizes = size, hidden_size, structure, input_structure, factors, own, blocks, rank
            inputs, recurrent = gate_specs(*sizes)
            for reverse in range(directions):
                chain = Chain.of(recurrent, bool(bias) and reset == "after", stage)
                suffix = "" if layers is None else f"_l{layer}{'_reverse' * reverse}"
                recurrence = Recurrence(chain, reset, bool(reverse))
                cells.append(Cell(inputs, recurrent, recurrence, bool(bias), norm, bool(learned_initial), suffix))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: {error}") from None
    return cells, names
