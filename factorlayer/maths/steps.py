"""A recurrence in PyTorch, step by step: v1 is its definition, v2 the best of PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorlayer.maths.batched import batched
from factorlayer.maths.recurrence import GATES, Recurrence


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


def step(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    state: Tensor,
    product: Callable[[int, Tensor], Tensor],
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The state behind a step, by its three gates' inputs [sequences, hidden]; `product(g, x)` is that of gate g's
    recurrent matrix."""
    reset = torch.sigmoid(gates[0] + product(0, state))
    update = torch.sigmoid(gates[1] + product(1, state))
    if recurrence.reset == "before":
        candidate = activation(gates[2] + product(2, reset * state))
    else:
        recurrent = product(2, state)
        candidate = activation(gates[2] + reset * (recurrent if bias is None else recurrent + bias))
    return (1 - update) * candidate + update * state


def naive(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    initial: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    walk: Walk,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The states behind all steps, [rows, hidden], like `gates`, which are three of these or one [rows, 3 · hidden].
    Where `starts` [rows] is true, a sequence begins again from its initial state [sequences, hidden]."""
    gates = gates[0].chunk(GATES, dim=-1) if len(gates) == 1 else gates
    if not (walk.steps and walk.sequences and gates[0].shape[0]):
        return torch.zeros_like(gates[0])
    rows, there = walk.rows(initial)
    chain, count = recurrence.chain, recurrence.weights
    state = initial
    states: list[Tensor] = []
    order = range(walk.steps - 1, -1, -1) if recurrence.reverse else range(walk.steps)
    for t in order:
        row = rows[t]
        before = state if starts is None else torch.where(starts[row][:, None], initial, state)
        made = step(
            recurrence,
            [gate[row] for gate in gates],
            before,
            lambda g, x: batched(chain, x, weights[g * count : (g + 1) * count]),
            bias,
            activation,
        )
        state = torch.where(there[t][:, None], made, state)
        states.append(state)
    all_states = torch.stack(states[::-1] if recurrence.reverse else states)
    return gates[0].new_zeros(gates[0].shape).index_put((rows[there],), all_states[there])
