"""What a gated recurrent unit is: the recurrent matrices of its gates as chains, and how its gates make a state.

With h the state before a step, U a gate's recurrent matrix, and x_r, x_z, x_n what a step's input, and biases that
can be added before it is known, bring to the gates reset, update and candidate:

    r = sigmoid(x_r + U_r h)                 z = sigmoid(x_z + U_z h)
    n = act(x_n + r * (U_n h + b))           reset after the product, as PyTorch and cuDNN have it
    n = act(x_n + U_n (r * h))               reset before it, as first published
    h' = (1 - z) * n + z * h
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from factorlayer.maths.chain import Chain

Reset = Literal["after", "before"]
GATES = 3  # reset, update, candidate: PyTorch's order


@dataclass(frozen=True)
class Recurrence:
    """`chain` is that of one gate's recurrent matrix; its bias is the candidate's, inside of the product that is reset,
    and its activation the candidate's. Weights are given gate by gate."""

    chain: Chain
    reset: Reset = "after"
    reverse: bool = False  # from each sequence's last step to its first one
    text: str = field(init=False, compare=False, repr=False)  # what ops carry

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"gru {self.reset}{' reversed' * self.reverse}; {self.chain.text}")

    @staticmethod
    @functools.cache
    def parse(text: str) -> Recurrence:
        """ValueError if it is another text than a recurrence's own."""
        head, _, chain = text.partition("; ")
        words = head.split(" ")
        if words[0] != "gru" or words[1:2] not in (["after"], ["before"]) or words[2:] not in ([], ["reversed"]):
            raise ValueError(f"recurrence {text[:200]!r} should begin with 'gru after' or 'gru before'")
        return Recurrence(Chain.parse(chain), "after" if words[1] == "after" else "before", len(words) == 3)

    @property
    def hidden(self) -> int:
        return self.chain.out_features

    @property
    def weights(self) -> int:
        """Weights of a gate."""
        return len(self.chain.contractions)
