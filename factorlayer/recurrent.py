"""FactorGRU and FactorGRUCell: drop-ins for nn.GRU and nn.GRUCell whose matrices may be structured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from factorlayer.activations.texts import UserActivation
from factorlayer.autograd.inputs import Input, are_several, checked, concatenated
from factorlayer.autograd.leaves import as_node, is_traced
from factorlayer.functional import Implementation
from factorlayer.maths.recurrence import GateStructure, Reset
from factorlayer.maths.spec import Factors
from factorlayer.maths.steps import Walk
from factorlayer.plan.recurrent_library import Sequences
from factorlayer.recurrences.cell import KINDS, Norm, Parameters, cells_of
from factorlayer.recurrences.gated import Gated, no_autocast
from factorlayer.recurrences.layout import check_dense, ends, layout_of, mask_of, state_of


@contextlib.contextmanager
def _weights_apart() -> Iterator[None]:
    """Weights that are multiplied out are new at each call: PyTorch's advice, to lay them side by side once, is not
    for them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


class FactorGRU(Gated):
    """nn.GRU, whose matrices may be structured: every gate has its own, of its inputs and of its state.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as nn.GRU has them.
        structure: of the recurrent matrices: "dense", "kronecker", "monarch", or "blocks", which are block-diagonal.
        input_structure: of the input matrices; the same if it is not given.
        factors: sizes that multiply up to hidden_size; None: a balanced pair; 3: a balanced triple.
        input_factors: as many that multiply up to input_size, of the first layer; None: balanced ones.
        blocks: of Monarch matrices (K, L), or 4 for (4, 4); of block-diagonal ones their number.
        rank: as FactorLinear has it; of input matrices that are too small for it, the largest that they can have.
        reset: "after": n = act(x_n + r * (U_n h + b)), as PyTorch and cuDNN have it; "before": n = act(x_n +
            U_n (r * h) + b), as first published.
        activation: the candidate's, as FactorLinear has it.
        norm: "layer": layer norm of all products with inputs and states, before the biases.
        learned_initial: whether the state that a sequence begins with is a parameter; zero if not.
        implementation: "auto", "naive" (v1), "batched" (v2) or "fused" (v3).

    Parameters have nn.GRU's names and shapes where matrices are dense, so that state_dicts go both ways. Of structured
    ones, weight_hh_reset_0_l0 is the reset gate's first in layer 0; the gates are reset, update and candidate.
    """

    _who, _switch = "FactorGRU", "rnn"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        structure: GateStructure = "dense",
        input_structure: GateStructure | None = None,
        factors: Factors = None,
        input_factors: Sequence[int] | None = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        reset: Reset = "after",
        activation: UserActivation = "tanh",
        norm: Norm = None,
        learned_initial: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise ValueError(f"FactorGRU: num_layers should be a positive integer, it is {num_layers!r}")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"FactorGRU: dropout should be a probability from 0 to 1, it is {dropout!r}")
        if dropout and num_layers == 1:
            warnings.warn(
                f"FactorGRU: dropout={dropout} is between layers, and there is num_layers=1", UserWarning, stacklevel=2
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.learned_initial = bidirectional, learned_initial
        self._sizes = factors, input_factors, blocks, rank
        sizes = input_size, hidden_size, bias, structure, input_structure, *self._sizes
        kind = reset, activation, norm, learned_initial
        cells, names = cells_of("FactorGRU", *sizes, *kind, num_layers, 2 if bidirectional else 1)
        self._build(cells, activation, names, implementation, device, dtype)
        self.flatten_parameters()

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    # What nn.GRU's flatten_parameters asks for.
    mode, proj_size = "GRU", 0

    @property
    def _flat_weights_names(self) -> list[str]:
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.bias else [])]
        return [kind + cell.suffix for cell in self.cells for kind in kinds]

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._flat_weights_names]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """nn.GRU's: the parameters of each layer and direction."""
        return [[getattr(self, name) for name in cell.shapes] for cell in self.cells]

    def flatten_parameters(self) -> None:
        """Brings dense parameters together in memory on a GPU, as cuDNN wants them and nn.GRU does."""
        if self._is_gru and self._is_dense:
            nn.GRU.flatten_parameters(self)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> FactorGRU:
        super()._apply(fn, recurse)
        self.flatten_parameters()
        return self

    def forward(
        self,
        input: Input | PackedSequence | Sequence[PackedSequence],
        hx: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Any, Tensor]:
        """(output, h_n), as nn.GRU has them.

        input: as nn.GRU's, or a list of such as if they were concatenated along the features: the products that they
            bring to the gates are made of them as they lie, but for PyTorch's own op, which takes one tensor.
        starts: a mask like input without its features: where it is true, a sequence begins again, in either direction
            from where it would without hx.
        cu_seqlens: of input [total, input_size], in which sequences of different length stand one behind another: where
            each begins, and, at last, total. With max_seqlen, the length of the longest one (or more), nobody waits for
            a GPU to look at it.
        """
        if is_traced(input):
            output, state = as_node(self, input, hx, starts=starts, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            return output, state
        layout = layout_of("FactorGRU", input, self.input_size, self.batch_first, cu_seqlens, max_seqlen)
        if isinstance(input, Tensor):
            self._check_features(input)
        elif len(layout.rows) == 1:
            self._check_features(layout.rows[0])
        walk, packed = layout.walk, layout.packed
        state = state_of("FactorGRU", hx, layout, len(self.cells), self.hidden_size)
        mask = mask_of("FactorGRU", starts, layout)
        rows, state, parameters, further = self._given(layout.rows, state)
        apart = mask is not None and state is not None and walk.offsets is not None
        x = rows[0]
        training = x.is_cuda and self._is_recorded([*rows, state, *parameters.values()])
        given = self._given_steps(walk, x.shape[0])
        chosen = self._choose(x, given, training, mask is not None, apart)
        with no_autocast(x):
            if chosen == "batched" and mask is None and x.shape[0] and self._is_left_to_pytorch(x):
                output, states = self._by_pytorch(concatenated(rows), walk, state, parameters)
            else:
                output, states = self._by_cells(rows, walk, state, mask, parameters, further, chosen)
        if packed is None:
            output = output.view(*layout.shape, output.shape[-1])
            return output, states.squeeze(1) if layout.alone else states
        order = packed.unsorted_indices
        return PackedSequence(output, *packed[1:]), states if order is None else states.index_select(1, order)

    def _by_cells(
        self,
        rows: Sequence[Tensor],
        walk: Walk,
        hx: Tensor | None,
        starts: Tensor | None,
        parameters: Parameters,
        further: Sequence[Tensor],
        chosen: str,
    ) -> tuple[Tensor, Tensor]:
        states = []
        fresh: list[Any] = [None] * len(self.cells)  # what cells begin with, where no state is given
        if hx is None or starts is not None:
            fresh = self._initials(walk.sequences, rows[0], parameters)
        begins = [starts, ends(starts, walk) if starts is not None and self.bidirectional else None]
        for layer in range(self.num_layers):
            outputs = []
            for reverse in range(self._directions):
                i = layer * self._directions + reverse
                cell = self.cells[i]
                initial, restart = (fresh[i], None) if hx is None else (hx[i], fresh[i])
                core = rows, initial, restart, begins[reverse], walk, parameters, further, chosen
                outputs.append(self._states(cell, *core))
                states.append(walk.last(outputs[-1], initial, bool(reverse)))
            y = concatenated(outputs)
            if self.dropout and self.training and layer < self.num_layers - 1:
                y = F.dropout(y, self.dropout)
            rows = [y]
        return y, torch.stack(states)  # of one cell too: h_n is no part of the output, nor of hx, as nn.GRU's is none

    def _by_pytorch(self, rows: Tensor, walk: Walk, hx: Tensor | None, parameters: Parameters) -> tuple[Tensor, Tensor]:
        if hx is None:
            if self.learned_initial:
                hx = torch.stack(self._initials(walk.sequences, rows, parameters))
            else:
                hx = rows.new_zeros(len(self.cells), walk.sequences, self.hidden_size)
        parameters = dict(parameters)
        for cell in self.cells:
            for kind in KINDS:  # structured matrices are multiplied out
                name = f"weight_{kind}{cell.suffix}"
                parameters[name] = parameters[name] if name in parameters else cell.matrix(kind, parameters)
        flat = [parameters[name] for name in self._flat_weights_names]
        dropout = self.dropout if self.training else 0.0
        how = flat, self.bias, self.num_layers, dropout, self.training, self.bidirectional
        together = self._is_dense and rows.dtype != torch.bfloat16  # of which nn.GRU keeps no weights together
        apart = contextlib.nullcontext() if together or is_compiling() else _weights_apart()
        if walk.lengths is None:
            with apart:
                output, states = torch.gru(walk.by_steps(rows), hx, *how, False)
            back = output.transpose(0, 1) if walk.of_step == 1 and walk.steps > 1 else output
            return back.flatten(0, 1), states
        sizes, order, at = walk.packed(rows)
        sizes = [size for size in sizes if size]  # max_seqlen may be more than the longest one
        initial = hx if order is None else hx[:, order]
        given = rows if at is None else rows[at]
        batch_sizes = torch.tensor(sizes, device="cpu")
        with apart:
            data, states = torch.gru(given, batch_sizes, initial[:, : sizes[0]].contiguous(), *how)
        states = torch.cat([states, initial[:, sizes[0] :]], dim=1)  # of sequences without steps
        if order is None or at is None:
            return data, states
        return torch.empty_like(data).index_copy(0, at, data), torch.empty_like(states).index_copy(1, order, states)

    @classmethod
    def from_gru(
        cls,
        gru: nn.GRU,
        *,
        structure: GateStructure = "dense",
        input_structure: GateStructure | None = None,
        factors: Factors = None,
        input_factors: Sequence[int] | None = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        implementation: Implementation = "auto",
    ) -> FactorGRU:
        """The FactorGRU of an nn.GRU: dense, it computes the same; structured, it is the nearest one. Every gate's
        matrix is a projection then (maths/project.py), and `projection_errors` says, by the names of the matrices, how
        far off each is."""
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"FactorGRU.from_gru: gru should be an nn.GRU, it is {type(gru).__name__}")
        weight: Tensor = gru.weight_ih_l0  # type: ignore[assignment]
        made = cls(
            gru.input_size,
            gru.hidden_size,
            gru.num_layers,
            gru.bias,
            gru.batch_first,
            gru.dropout,
            gru.bidirectional,
            weight.device,
            weight.dtype,
            structure=structure,
            input_structure=input_structure,
            factors=factors,
            input_factors=input_factors,
            blocks=blocks,
            rank=rank,
            implementation=implementation,
        )
        made._take(gru)
        return made.train(gru.training)

    def to_gru(self) -> nn.GRU:
        """The nn.GRU that computes the same."""
        weight = next(self.parameters())
        sizes = self.input_size, self.hidden_size, self.num_layers, self.bias, self.batch_first, self.dropout
        gru = nn.GRU(*sizes, self.bidirectional, device=weight.device, dtype=weight.dtype)
        self._give(gru)
        return gru.train(self.training)

    def explain(self, sequences: int = 1, steps: int = 1) -> str:
        """What a call with so many sequences of so many steps computes and runs, in words."""
        return self._explained(sequences, steps)

    def warmup(self, sequences: int, steps: int) -> None:
        """Runs a call with so many sequences of so many steps, and its backward pass unless under torch.no_grad(), so
        that all it needs is compiled and loaded: before a CUDA graph captures one, or a first request."""
        self._warm_up((sequences, steps) if self.batch_first else (steps, sequences))

    def extra_repr(self) -> str:
        """The arguments that build this layer again."""
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        parts += [f"{name}={value}" for name, of in defaults.items() if (value := getattr(self, name)) != of]
        return ", ".join(parts + self._kind())


class FactorGRUCell(Gated):
    """nn.GRUCell, whose matrices may be structured; arguments as FactorGRU has them. Parameters have nn.GRUCell's names
    and shapes where matrices are dense."""

    _who, _switch = "FactorGRUCell", "matmul"  # which nn.GRUCell follows

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        structure: GateStructure = "dense",
        input_structure: GateStructure | None = None,
        factors: Factors = None,
        input_factors: Sequence[int] | None = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        reset: Reset = "after",
        activation: UserActivation = "tanh",
        norm: Norm = None,
        learned_initial: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.learned_initial = learned_initial
        self._sizes = factors, input_factors, blocks, rank
        sizes = input_size, hidden_size, bias, structure, input_structure, *self._sizes
        cells, names = cells_of("FactorGRUCell", *sizes, reset, activation, norm, learned_initial)
        self._build(cells, activation, names, implementation, device, dtype)

    def forward(self, input: Input, hx: Tensor | None = None) -> Tensor:
        """The state [batch, hidden], or [hidden], behind a step; of a list as FactorGRU takes it."""
        if is_traced(input):
            return as_node(self, input, hx)
        inputs: list[Any] = [input]
        if are_several(input):
            inputs = checked("FactorGRUCell", input, self.input_size, "input_size", "input")
        return self._of_inputs(inputs, hx)

    def _given_steps(self, walk: Walk, rows: int) -> Sequences:
        return super()._given_steps(walk, rows)._replace(packed=True)  # its op has no kernel of several steps

    def _is_left_to_pytorch(self, x: Tensor) -> bool:
        return self._is_gru and self._is_dense

    def _of_inputs(self, inputs: Sequence[Any], hx: Tensor | None) -> Tensor:
        input = inputs[0]
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            came = (
                f"has the shape {tuple(input.shape)}" if isinstance(input, Tensor) else f"is a {type(input).__name__}"
            )
            raise ValueError(f"FactorGRUCell: input should be [batch, input_size] or [input_size], it {came}")
        check_dense("FactorGRUCell", input)
        if len(inputs) == 1:
            self._check_features(input)
        shape = (*input.shape[:-1], self.hidden_size)
        if hx is not None and (not isinstance(hx, Tensor) or tuple(hx.shape) != shape):
            came = f"has {tuple(hx.shape)}" if isinstance(hx, Tensor) else f"is of the type {type(hx).__name__}"
            raise ValueError(f"FactorGRUCell: hx should have the shape {shape}, it {came}")
        (cell,), batch = self.cells, input.shape[0] if input.dim() == 2 else 1
        rows = [x.reshape(batch, x.shape[-1]) for x in inputs]
        rows, hx, parameters, further = self._given(rows, None if hx is None else hx.reshape(batch, self.hidden_size))
        x = rows[0]
        initial = self._initials(batch, x, parameters)[0] if hx is None else hx
        training = x.is_cuda and self._is_recorded([*rows, hx, *parameters.values()])
        with no_autocast(x):
            chosen = self._choose(x, self._given_steps(Walk(batch, 1, 1, batch), batch), training)
            if chosen == "batched" and self._is_gru and self._is_dense:
                flat = [parameters.get(f"{kind}_{of}") for kind in ("weight", "bias") for of in ("ih", "hh")]
                state = torch.gru_cell(concatenated(rows), initial, *flat)  # type: ignore[arg-type]
            else:
                walk = Walk(batch, 1, 1, batch)
                state = self._states(cell, rows, initial, None, None, walk, parameters, further, chosen)
        return state.view(shape)

    @classmethod
    def from_gru(
        cls,
        cell: nn.GRUCell,
        *,
        structure: GateStructure = "dense",
        input_structure: GateStructure | None = None,
        factors: Factors = None,
        input_factors: Sequence[int] | None = None,
        blocks: int | Sequence[int] | None = None,
        rank: int = 1,
        implementation: Implementation = "auto",
    ) -> FactorGRUCell:
        """The FactorGRUCell of an nn.GRUCell, as FactorGRU.from_gru makes one of an nn.GRU."""
        if not isinstance(cell, nn.GRUCell):
            raise TypeError(f"FactorGRUCell.from_gru: cell should be an nn.GRUCell, it is {type(cell).__name__}")
        made = cls(
            cell.input_size,
            cell.hidden_size,
            cell.bias,
            cell.weight_ih.device,
            cell.weight_ih.dtype,
            structure=structure,
            input_structure=input_structure,
            factors=factors,
            input_factors=input_factors,
            blocks=blocks,
            rank=rank,
            implementation=implementation,
        )
        made._take(cell)
        return made

    def to_gru(self) -> nn.GRUCell:
        """The nn.GRUCell that computes the same."""
        weight = next(self.parameters())
        cell = nn.GRUCell(self.input_size, self.hidden_size, self.bias, weight.device, weight.dtype)
        self._give(cell)
        return cell

    def explain(self, batch: int = 1) -> str:
        """What a call with `batch` states computes and runs, in words."""
        return self._explained(batch, 1)

    def warmup(self, batch: int) -> None:
        """Compiles and loads what a call with `batch` states needs, as FactorGRU.warmup does."""
        self._warm_up((batch,))

    def extra_repr(self) -> str:
        """The arguments that build this layer again."""
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *["bias=False"] * (not self.bias), *self._kind()])
