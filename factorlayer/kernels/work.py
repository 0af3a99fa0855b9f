"""The work of a pass: modes of a Kronecker product, some taken as one, that it contracts in some order."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Asks, ask_for, constants
from factorlayer.device.gpu import ELEMENT_BYTES
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import Pass, scratch_of
from factorlayer.maths.chain import Chain

OF_TENSOR = 25  # instructions of a warp to find where pieces are in one of two tensors, in machine code


@dataclass(frozen=True)
class Inputs:
    """The tensors that x is, side by side, each of some features: the first in its place, the second a kernel's weight
    of this number, and so on; and their gradients so behind them."""

    features: tuple[int, ...]
    second: int

    def are_pieces(self, size: int) -> bool:
        """Whether all rows are whole pieces of 16 bytes."""
        return all(n * size % 16 == 0 for n in self.features)

    def access(self, access: int, size: int) -> int:
        """Bytes moved at once, which lie in one tensor alone, where they would be so many of one."""
        return math.gcd(access, *(n * size for n in self.features))

    def asks(self, size: int) -> list[tuple[str, str]]:
        """As kernels ask for them; of elements of so many bytes."""
        names = ["params.x", *(f"params.weights[{self.second + i}]" for i in range(len(self.features) - 1))]
        return [ask_for(name, n * size) for name, n in zip(names, self.features, strict=True)]


def inputs_of(chain: Chain) -> Inputs | None:
    """Where kernels find x, if it is several tensors: behind the weights and a bias, or, of all gradients, behind
    grad_y and what is made."""
    second = len(chain.contractions) + 2 if chain.backward else chain.weights + 1
    return Inputs(chain.inputs, second) if chain.inputs else None


def told_inputs(inputs: Inputs | None) -> dict[str, str]:
    """What a kernel is told of x and of its gradient: tensors that they are, if they are several."""
    if inputs is None:
        return {"Source": "void", "Sink": "void"}
    features, others = ", ".join(map(str, inputs.features)), len(inputs.features) - 1
    at = {"Source": inputs.second, "Sink": inputs.second + others}
    return {name: f"Several<Element, {second}, {features}>" for name, second in at.items()}


SIZES = "P0", "P1", "Q0", "Q1"  # of two modes, as kernels are told them


@dataclass(frozen=True)
class Terms:
    """Of a sum of `of` Kronecker products, the `count` terms that a pass takes, from the one with number `first` on. Of
    each weight, terms lie one behind another, and so do their gradients."""

    of: int = 1
    first: int = 0
    count: int = 1

    @property
    def numbers(self) -> dict[str, int]:
        """As kernels are told them."""
        return {"RANK": self.of, "TERM": self.first, "TERMS": self.count}

    def __str__(self) -> str:
        """In words; empty of one product."""
        if self.count == self.of:
            return f"all {self.of} terms" if self.of > 1 else ""
        return f"terms {self.first + 1} to {self.first + self.count} of {self.of}"


ONE_PRODUCT = Terms()


@dataclass(frozen=True)
class Mode:
    """Neighbouring modes taken as one: (weight, q, p) of each. A product of weights is made as they are loaded."""

    parts: tuple[tuple[int, int, int], ...]

    @kept
    def p(self) -> int:
        return math.prod(p for _, _, p in self.parts)

    @kept
    def q(self) -> int:
        return math.prod(q for _, q, _ in self.parts)

    @property
    def turned(self) -> Mode:
        """The one of weights that lie the other way round."""
        return Mode(tuple((weight, p, q) for weight, q, p in self.parts))


def as_two(modes: tuple[Mode, ...]) -> Iterator[tuple[Mode, Mode]]:
    """Ways to take neighbouring modes as one, so that there are two."""
    parts = [part for mode in modes for part in mode.parts]
    for i in range(1, len(parts)):
        yield Mode(tuple(parts[:i])), Mode(tuple(parts[i:]))


def merged(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """The modes, if any of them is several taken as one; else none."""
    return modes if any(len(mode.parts) > 1 for mode in modes) else ()


class TwoSizes(Pass):
    """A pass of two modes, by their sizes."""

    if TYPE_CHECKING:

        @property
        def sizes(self) -> tuple[int, int, int, int]:
            """Sizes p0, p1, q0, q1."""

    @property
    def told_sizes(self) -> dict[str, int]:
        return dict(zip(SIZES, self.sizes, strict=True))

    @property
    def contracted(self) -> str:
        """Its contractions in words."""
        p0, p1, q0, q1 = self.sizes
        return f"{p1}→{q1}, {p0}→{q0}"


class OfTwoModes(TwoSizes):
    """A pass that makes all gradients of two modes."""

    modes: tuple[Mode, Mode]
    dtype: str
    inputs: Inputs | None = None  # if x is several tensors, which not all take

    @kept
    def sizes(self) -> tuple[int, int, int, int]:
        first, second = self.modes
        return first.p, second.p, first.q, second.q

    @property
    def weights(self) -> int:
        """Elements of both weights."""
        p0, p1, q0, q1 = self.sizes
        return p0 * q0 + p1 * q1

    @property
    def merged(self) -> tuple[Mode, ...]:
        return merged(self.modes)

    @property
    def output_bytes(self) -> int:
        p0, p1, _, _ = self.sizes
        return self.units_per_sample * p0 * p1 * ELEMENT_BYTES[self.dtype]

    @property
    def asks(self) -> Asks:
        """Tensors that a backward pass reads first: x, weights, and grad_y behind them."""
        p0, p1, q0, q1 = self.sizes
        size = ELEMENT_BYTES[self.dtype]
        parts = [part for mode in self.modes for part in mode.parts]
        weights = [(f"params.weights[{weight}]", str(q * p * size)) for weight, q, p in parts]
        x, grad_y = (
            ask_for(name, self.units_per_sample * count * size)
            for name, count in (("params.x", p0 * p1), (f"params.weights[{len(parts)}]", q0 * q1))
        )
        return [*(self.inputs.asks(size) if self.inputs else [x]), grad_y, *weights]

    def outputs(self, batch: int) -> tuple[int, ...]:
        if self.inputs is None:
            return super().outputs(batch)
        return tuple(batch * n * self.size for n in self.inputs.features)


@dataclass(frozen=True)
class Work:
    """One pass: [outer, the sizes of its modes, inner] -> the same with some modes contracted, in this order."""

    outer: int
    sizes: tuple[int, ...]
    inner: int
    steps: tuple[tuple[int, Mode], ...]  # (position among the sizes, mode)
    dtype: str
    rank: int = 1
    bias: bool = False
    activation: str = "identity"
    scalars: int = 0  # the first weight that is a parameter of the activation
    # Of a sum of products that takes several passes: `rank` terms are summed, or each of `terms` makes a state
    terms: int = 1
    apart: bool = False  # x has a state for each term
    transposed: bool = False  # weights lie in memory the other way round: as [p, q]
    slope: bool = False  # the activation's, times a state like y that is read, as the weight behind the contractions'
    inputs: Inputs | None = None  # if x is several tensors

    @property
    def held(self) -> int:
        """States of x that a unit takes."""
        return self.rank if self.apart else 1

    @kept
    def states(self) -> list[tuple[int, ...]]:
        """Sizes before each step and after the last."""
        return self.states_of(1)

    @kept
    def lies_as_memory(self) -> bool:
        """Whether a result had better lie in shared memory as it will in memory: where 8 bytes do not divide its rows,
        unless more than two of the lanes that put down their sums would meet in a bank."""
        (at, mode), state = self.steps[-1], self.states[-1]
        row = math.prod(state[at + 1 :]) * self.inner
        row = row if row > 1 else mode.q
        size = ELEMENT_BYTES[self.dtype]
        words = {(g * row + 2 * t) * size // 4 for g in range(8) for t in range(4)}
        meeting = collections.Counter(word % 32 for word in words)
        return row * size % 8 > 0 and max(meeting.values()) <= 2

    @kept
    def unnumbered(self) -> Work:
        """The same work without the weights' numbers: all of its sizes are tiled as it is."""
        steps = tuple((at, Mode(tuple((0, q, p) for _, q, p in mode.parts))) for at, mode in self.steps)
        inputs = self.inputs and replace(self.inputs, second=0)
        return replace(self, steps=steps, scalars=0, inputs=inputs)

    @property
    def asks(self) -> Asks:
        """Tensors that a kernel reads first: x, and weights."""
        size = ELEMENT_BYTES[self.dtype]
        parts = [part for _, mode in self.steps for part in mode.parts]
        weights = [(f"params.weights[{weight}]", str(q * p * size)) for weight, q, p in parts]
        x = ask_for("params.x", self.outer * math.prod(self.sizes) * self.inner * size)
        return [*(self.inputs.asks(size) if self.inputs else [x]), *weights]

    @property
    def finish(self) -> list[str]:
        """Lines of a kernel's constants for what stands behind the contractions."""
        return [activation_type(self.activation, self.dtype, self.scalars), *constants({"BIAS": self.bias})]

    def states_of(self, split: int) -> list[tuple[int, ...]]:
        """Sizes of the states of a block that makes one of `split` parts of what the first step makes of the first
        mode."""
        found = [self.sizes]
        for number, (at, mode) in enumerate(self.steps):
            q = mode.q if number else mode.q // split
            found.append((*found[-1][:at], q, *found[-1][at + 1 :]))
        return found


class OfWork(Pass):
    """A pass that does such work."""

    work: Work

    @property
    def dtype(self) -> str:
        return self.work.dtype

    @property
    def units_per_sample(self) -> int:
        return self.work.outer

    @property
    def asks(self) -> Asks:
        return self.work.asks


class OfStates(OfWork):
    """A pass that may read and write any buffer of a plan: `takes` and `gives`, where these are not the state before
    and behind it."""

    takes: str
    gives: str

    @property
    def reads(self) -> str:
        return self.takes or "state"

    @property
    def writes(self) -> str:
        return self.gives or "state"

    @property
    def scratch(self) -> tuple[int, ...]:
        return scratch_of({self.gives: self.output_bytes})


class TakesTwoModes(OfWork, TwoSizes):
    """A pass that takes a work's only two modes at once."""

    @kept
    def sizes(self) -> tuple[int, int, int, int]:
        (p0, p1), (q0, q1) = self.work.sizes, self.work.states[-1]
        return p0, p1, q0, q1

    @property
    def output_bytes(self) -> int:
        _, _, q0, q1 = self.sizes
        return self.work.outer * q0 * q1 * ELEMENT_BYTES[self.work.dtype]


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to
