"""A recurrence in PyTorch, step by step: v1 is its definition, v2 the best of PyTorch alone where it has no op for the
whole of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from factorlayer.maths.batched import batched as product_of
from factorlayer.maths.batched import together
from factorlayer.maths.recurrence import GATES, Recurrence

EPS = 1e-5  # of layer norm: nn.LayerNorm's own


@dataclass(frozen=True)
class Walk:
    """Where the rows of sequences lie in what has a row for each step of each: step t of sequence i has row `first[i] +
    offsets[t]`. Tensors that are None are multiples of a number, and all lengths the same."""

    sequences: int
    steps: int  # of the longest one
    of_sequence: int = 0  # rows from a sequence's first one to the next one's
    of_step: int = 0  # rows from a step to the next one
    first: Tensor | None = None  # int64 [sequences]
    lengths: Tensor | None = None  # int64 [sequences]
    offsets: Tensor | None = None  # int64 [steps]

    @property
    def numbers(self) -> list[int]:
        return [self.steps, self.of_sequence, self.of_step]

    def rows(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each step of each sequence, and whether it is there: [steps, sequences], on `like`'s device."""
        steps = torch.arange(self.steps, device=like.device)
        sequences = torch.arange(self.sequences, device=like.device)
        first = sequences * self.of_sequence if self.first is None else self.first
        offsets = steps * self.of_step if self.offsets is None else self.offsets
        lengths = torch.full_like(sequences, self.steps) if self.lengths is None else self.lengths
        there = steps[:, None] < lengths
        return torch.where(there, first + offsets[:, None], 0), there

    def last(self, output: Tensor, initial: Tensor, reverse: bool) -> Tensor:
        """The state [sequences, hidden] behind the step that each sequence ends with: the initial one if it has no
        steps."""
        if not self.steps or not output.shape[0]:
            return initial
        if self.lengths is None:
            return self.by_steps(output)[0 if reverse else -1]
        rows, _ = self.rows(output)
        at = torch.zeros_like(self.lengths) if reverse else (self.lengths - 1).clamp(min=0)
        return torch.where((self.lengths > 0)[:, None], output[rows.gather(0, at[None])[0]], initial)

    def by_steps(self, rows: Tensor) -> Tensor:
        """[rows, …] as [steps, sequences, …], of sequences that are all of one length."""
        if self.of_step == 1 and self.steps > 1:
            return rows.view(self.sequences, self.steps, *rows.shape[1:]).transpose(0, 1)
        return rows.view(self.steps, self.sequences, *rows.shape[1:])

    def packed(self, like: Tensor) -> tuple[list[int], Tensor | None, Tensor | None]:
        """How many sequences have each step, the longest ones first; which sequences these are, and which rows their
        steps, one behind another: None where they lie like that."""
        rows, there = self.rows(like)
        sizes = there.sum(1).tolist()
        if self.offsets is not None and self.first is None:  # as a PackedSequence's
            return sizes, None, None
        assert self.lengths is not None
        order = self.lengths.argsort(descending=True, stable=True)
        return sizes, order, rows[:, order][there[:, order]]


def step(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    state: Tensor,
    product: Callable[[int, Tensor], Tensor],
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    gains: Tensor | None = None,
) -> Tensor:
    """The state behind a step, by its three gates' inputs [sequences, hidden]; `product(g, x)` is that of gate g's
    recurrent matrix, and `gains` [3 · hidden] those of layer norm, if there is one."""
    both = torch.cat([product(0, state), product(1, state)], dim=-1)
    reset, update = (both if gains is None else normed(both, gains)).chunk(2, dim=-1)
    reset, update = torch.sigmoid(gates[0] + reset), torch.sigmoid(gates[1] + update)
    recurrent = product(2, reset * state if recurrence.reset == "before" else state)
    recurrent = recurrent if gains is None else normed(recurrent, gains)
    recurrent = recurrent if bias is None else recurrent + bias
    candidate = activation(gates[2] + (recurrent if recurrence.reset == "before" else reset * recurrent))
    return (1 - update) * candidate + update * state


def normed(products: Tensor, gains: Tensor) -> Tensor:
    """Layer norm of the products of reset and update, [n, 2 · hidden], or of the candidate's, [n, hidden]; `gains` are
    those of all three."""
    features = products.shape[-1]
    own = gains[:features] if 2 * features > gains.shape[0] else gains[-features:]
    return F.layer_norm(products, (features,), own, eps=EPS)


def naive(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    initial: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    walk: Walk,
    activation: Callable[[Tensor], Tensor],
    restart: Tensor | None = None,
    gains: Tensor | None = None,
) -> Tensor:
    """The states behind all steps, [rows, hidden], like `gates`, which are three of these or one [rows, 3 · hidden].
    Where `starts` [rows] is true, a sequence begins again from `restart`, or its initial state [sequences, hidden]."""
    gates = gates[0].chunk(GATES, dim=-1) if len(gates) == 1 else gates
    restart = initial if restart is None else restart
    rows, there = walk.rows(initial)
    chain, count = recurrence.chain, recurrence.weights
    state, states, places = initial, [], []
    for t in _order(recurrence, walk):
        having = slice(None) if walk.lengths is None else there[t].nonzero()[:, 0]
        row, before = rows[t, having], state[having]
        if starts is not None:
            before = torch.where(starts[row][:, None], restart[having], before)
        made = step(
            recurrence,
            [gate[row] for gate in gates],
            before,
            lambda g, x: product_of(chain, x, weights[g * count : (g + 1) * count]),
            bias,
            activation,
            gains,
        )
        state = made if isinstance(having, slice) else state.index_copy(0, having, made)
        states.append(made)
        places.append(row)
    if not states:
        return gates[0] * 0
    return gates[0].new_zeros(gates[0].shape).index_copy(0, torch.cat(places), torch.cat(states))


def batched(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    initial: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    walk: Walk,
    activation: Callable[[Tensor], Tensor],
    restart: Tensor | None = None,
    gains: Tensor | None = None,
) -> Tensor:
    """What `naive` computes, with as few operations a step as PyTorch has: all gates' products at once, and of
    sequences that end, no further steps."""
    each = gates[0] if len(gates) == 1 else torch.cat(list(gates), dim=1)
    sizes, order, rows = [walk.sequences] * walk.steps, None, None
    if walk.lengths is not None:
        sizes, order, rows = walk.packed(initial)
    if order is not None:
        initial, restart = initial[order], None if restart is None else restart[order]
    restart = initial if restart is None else restart

    def by_steps(tensor: Tensor) -> Sequence[Tensor]:
        if walk.lengths is None:
            return walk.by_steps(tensor).unbind()
        packed: Sequence[Tensor] = (tensor if rows is None else tensor[rows]).split(sizes)
        return packed

    count = recurrence.weights
    stacked = [torch.stack(list(weights[i : GATES * count : count])) for i in range(count)]
    of_steps, begins = by_steps(each), None if starts is None else by_steps(starts)
    state = initial
    states: list[Tensor] = []
    for t in _order(recurrence, walk):
        having = sizes[t]
        if not states and walk.lengths is not None:
            state = initial[:having]
        elif having < state.shape[0]:
            state = state[:having]
        elif having > state.shape[0]:
            state = torch.cat([state, initial[state.shape[0] : having]])
        if begins is not None:
            state = torch.where(begins[t][:, None], restart[:having], state)
        state = _step_at_once(recurrence, of_steps[t], state, stacked, bias, activation, gains)
        states.append(state)
    states = states[::-1] if recurrence.reverse else states
    if not states:
        return each[:, : recurrence.hidden]
    if walk.lengths is None:
        return torch.stack(states, 1 if walk.of_step == 1 and walk.steps > 1 else 0).flatten(0, 1)
    output = torch.cat(states)
    return output if rows is None else output.new_zeros(each.shape[0], recurrence.hidden).index_copy(0, rows, output)


def _order(recurrence: Recurrence, walk: Walk) -> range:
    return range(walk.steps - 1, -1, -1) if recurrence.reverse else range(walk.steps)


def _step_at_once(
    recurrence: Recurrence,
    gates: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    gains: Tensor | None,
) -> Tensor:
    """`step` of gates [n, 3 · hidden] and weights that are stacked gate by gate."""
    batch, hidden = gates.shape[0], recurrence.hidden
    inputs = gates.view(batch, GATES, hidden).transpose(0, 1)
    before = recurrence.reset == "before"
    products = together(recurrence.chain, state, [w[: GATES - before] for w in weights])
    both, candidate = products[:2], products[-1]
    if gains is not None:
        both = normed(both.transpose(0, 1).reshape(batch, 2 * hidden), gains).view(batch, 2, hidden).transpose(0, 1)
    reset, update = torch.sigmoid(inputs[:2] + both)
    if before:
        candidate = together(recurrence.chain, reset * state, [w[GATES - 1 :] for w in weights])[0]
    candidate = candidate if gains is None else normed(candidate, gains)
    candidate = candidate if bias is None else candidate + bias
    candidate = inputs[2] + candidate if before else torch.addcmul(inputs[2], reset, candidate)
    return torch.lerp(activation(candidate), state, update)
