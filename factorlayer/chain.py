"""Layers as chains of stages: contractions, then bias and activation.

The raw ops carry a chain as text, which csrc/chain.h documents and reads; so a compiled or exported graph holds all
that an engine has to know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from factorlayer.spec import Contraction, LayerSpec


@dataclass(frozen=True)
class Chain:
    """The contractions in their order; with rank > 1, the sum over the weights' leading axis.

    States that an engine hands on may lie turned: x, or grad_y where all gradients of several contractions are made,
    as the first or the last one's [outer, inner, p or q], or y, of which `turn` are [outer, rows, columns], as [outer,
    columns, rows]; with tf32 they are rounded to it. Of gradients it is that of x that is turned so; and `mixed` means
    that what weights have as q's [outer, rows, columns] comes back as [outer, columns, rows]. A turn can be all that
    is done, of rows that are `mixed` or not, or the way back through an activation, `slope` or `through`. Or there are
    `sums` over samples, of what is given.
    """

    contractions: tuple[Contraction, ...]
    rank: int = 1
    bias: bool = False
    activation: str = "identity"  # a name, or a program (factorlayer/expression.py)
    gradient: bool = False  # not the contraction itself, but the gradient of its weight
    backward: bool = False  # not the contractions themselves, but all their gradients
    x_turned: bool = False
    turn: tuple[int, int, int] | None = None
    mixed: tuple[int, int, int] | None = None
    slabs: int = 0  # states that lie by slabs of 32 samples: grad_y, or that and the gradient of x
    tf32: bool = False  # float32 products may be rounded to TensorFloat-32
    slope: int = 0  # features of y, if it is not y that is made, but the gradient of what is activated, from grad_y
    through: int = 0  # the same, of what has been activated before: from the gradient of its result, and that
    sums: int = 0  # features of x, if it is these, over all samples, that are made
    text: str = field(init=False, compare=False, repr=False)
    tf32_text: str = field(init=False, compare=False, repr=False)  # of the same chain with tf32

    def __post_init__(self) -> None:
        stages = [f"rank {self.rank}"] if self.rank > 1 else []
        stages += ["turned"] if self.x_turned else []
        for c in self.contractions:
            stages.append(f"{'tied' if c.tied else 'untied'} {c.weight} {c.outer} {c.p} {c.q} {c.inner}")
        stages += ["bias"] if self.bias else []
        stages += [self.activation] if self.activation != "identity" else []
        stages += [f"slope {self.slope}"] if self.slope else []
        stages += [f"through {self.through}"] if self.through else []
        stages += [f"sums {self.sums}"] if self.sums else []
        stages += ["gradient"] if self.gradient else []
        stages += ["backward"] if self.backward else []
        stages += ["turn {} {} {}".format(*self.turn)] if self.turn else []
        stages += ["mixed {} {} {}".format(*self.mixed)] if self.mixed else []
        stages += [f"slabs {self.slabs}"] if self.slabs else []
        object.__setattr__(self, "tf32_text", "; ".join([*stages, "tf32"]))
        object.__setattr__(self, "text", self.tf32_text if self.tf32 else "; ".join(stages))

    @classmethod
    def of(cls, spec: LayerSpec, bias: bool, activation: str) -> Chain:
        return cls(spec.contractions, spec.terms, bias, activation)

    @staticmethod
    @functools.cache
    def parse(text: str) -> Chain:
        contractions, rank, bias, activation = [], 1, False, "identity"
        gradient = backward = x_turned = tf32 = False
        turn, mixed, slabs, slope, through, sums = None, None, 0, 0, 0, 0
        for name, *numbers in map(str.split, text.split(";")):
            if name in ("tied", "untied"):
                weight, outer, p, q, inner = map(int, numbers)
                contractions.append(Contraction(weight, outer, p, q, inner, tied=name == "tied"))
            elif name == "rank":
                rank = int(numbers[0])
            elif name == "bias":
                bias = True
            elif name == "gradient":
                gradient = True
            elif name == "backward":
                backward = True
            elif name == "turned":
                x_turned = True
            elif name == "turn":
                outer, rows, columns = map(int, numbers)
                turn = outer, rows, columns
            elif name == "mixed":
                outer, rows, columns = map(int, numbers)
                mixed = outer, rows, columns
            elif name == "slabs":
                slabs = int(numbers[0])
            elif name == "slope":
                slope = int(numbers[0])
            elif name == "through":
                through = int(numbers[0])
            elif name == "sums":
                sums = int(numbers[0])
            elif name == "tf32":
                tf32 = True
            else:
                activation = name
        stages = (rank, bias, activation, gradient, backward, x_turned, turn, mixed, slabs, tf32, slope, through, sums)
        return Chain(tuple(contractions), *stages)

    @property
    def parameters(self) -> int:
        """Of the activation: weights behind those of the contractions."""
        return max(0, self.activation.count("/") - 1)

    @property
    def weights(self) -> int:
        """Of both."""
        return len(self.contractions) + self.parameters

    @property
    def in_features(self) -> int:
        if not self.contractions:
            return self.slope or self.through or self.sums or math.prod(self.turn or ())
        c = self.contractions[0]
        return c.outer * c.p * c.inner

    @property
    def is_dense(self) -> bool:
        """Whether it is one matrix product."""
        (c, *further) = self.contractions
        return not further and c.tied and c.outer * c.inner == 1 and self.rank == 1

    @property
    def is_monarch(self) -> bool:
        """Whether its contractions are the two of a Monarch layer."""
        if len(self.contractions) != 2 or self.rank > 1:
            return False
        first, second = self.contractions
        if first.tied or second.tied or first.inner > 1 or second.outer > 1 or first.q % second.inner:
            return False
        return second.p == first.outer * (first.q // second.inner)

    @property
    def out_features(self) -> int:
        if not self.contractions:
            return self.in_features
        c = self.contractions[-1]
        return c.outer * c.q * c.inner

    def forward_flops(self, batch: int) -> int:
        return 2 * batch * self.rank * sum(c.multiply_adds for c in self.contractions)

    def backward_flops(self, batch: int, wants_x: bool, wants_weights: Sequence[bool]) -> int:
        """Of the gradients wanted; recomputing the states is not counted."""
        multiply_adds, reaches_back = 0, wants_x
        for c in self.contractions:
            multiply_adds += c.multiply_adds * (wants_weights[c.weight] + reaches_back)
            reaches_back = reaches_back or wants_weights[c.weight]
        return 2 * batch * self.rank * multiply_adds
