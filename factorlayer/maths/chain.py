"""Layers as chains of stages: contractions, then bias and activation.

The raw ops carry a chain as text, which csrc/chain.h documents and reads; so a compiled or exported graph holds all
that an engine has to know.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from factorlayer.activations.expression import check_activation
from factorlayer.maths.spec import Contraction, LayerSpec

# What a text may have, as csrc/chain.h says, too.
MOST_TEXT = 1 << 22  # bytes
MOST_CONTRACTIONS = 4096  # of a chain
MOST_LAYERS = 4096  # of a stack
MOST_ELEMENTS = 1 << 48  # of a tensor or state
MOST_INPUTS = 4096  # tensors that x is
MOST_KEPT = 3  # states between passes
NUMBERS = {
    "tied": 5, "untied": 5, "rank": 1, "turned": 0, "bias": 0, "slope": 1, "through": 1, "sums": 1,
    "gradient": 0, "backward": 0, "turn": 3, "mixed": 3, "slabs": 1, "few": 0, "tf32": 0,
}  # fmt: skip
INPUTS, KEPT = "inputs", "kept"  # behind which any number of numbers stands, up to these
MOST_NUMBERS = {INPUTS: MOST_INPUTS, KEPT: MOST_KEPT}


@dataclass(frozen=True)
class Chain:
    """The contractions of a layer in their order, what follows them, and what is asked for: y, or a gradient.

    With rank > 1 the chain is summed over the weights' leading axis. There is a field for each stage of the text;
    csrc/chain.h says what they mean.
    """

    contractions: tuple[Contraction, ...]
    rank: int = 1
    bias: bool = False
    activation: str = "identity"  # a name, or a program (activations/expression.py)
    gradient: bool = False  # not the contraction itself, but the gradient of its weight
    backward: bool = False  # not the contractions themselves, but all their gradients
    x_turned: bool = False  # x is the first contraction's [outer, inner, p]; with backward, grad_y the last one's, of q
    turn: tuple[int, int, int] | None = None  # y, or the gradient of x, [outer, rows, columns], is stored transposed
    mixed: tuple[int, int, int] | None = None  # the q's of grad_y come as [outer, columns, rows] of what weights have
    slabs: int = 0  # states that lie by slabs of 32 samples: grad_y, or that and the gradient of x
    tf32: bool = False  # float32 products may be rounded to TensorFloat-32
    slope: int = 0  # features, if it makes the gradient of what is activated, from grad_y and what is activated
    through: int = 0  # features, if it makes that gradient from the activation's result and the gradient of that
    sums: int = 0  # features, if it makes their sums over all samples, alone or beside a gradient
    inputs: tuple[int, ...] = ()  # features of each tensor that x is, side by side, if it is several
    few: bool = False  # all gradients of a Monarch layer, of some hundreds of samples, by the kernels of few
    kept: tuple[int, ...] = ()  # features of the states that a layer makes beside y, and its gradients are made of
    text: str = field(init=False, compare=False, repr=False)
    tf32_text: str = field(init=False, compare=False, repr=False)  # of the same chain with tf32

    def __post_init__(self) -> None:
        stages = [" ".join(map(str, (INPUTS, *self.inputs)))] if self.inputs else []
        stages += [f"rank {self.rank}"] if self.rank > 1 else []
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
        stages += ["few"] if self.few else []
        stages += [" ".join(map(str, (KEPT, *self.kept)))] if self.kept else []
        object.__setattr__(self, "tf32_text", "; ".join([*stages, "tf32"]))
        object.__setattr__(self, "text", self.tf32_text if self.tf32 else "; ".join(stages))

    @classmethod
    def of(cls, spec: LayerSpec, bias: bool, activation: str) -> Chain:
        return cls(spec.contractions, spec.terms, bias, activation)

    @staticmethod
    @functools.cache
    def parse(text: str) -> Chain:
        """The chain of a text that anyone may have written: ValueError if it is another than the chain's own."""
        if len(text) > MOST_TEXT or not _TEXT.fullmatch(text):
            raise ValueError(
                f"chain {_shown(text)} should have {MOST_TEXT} letters at most, small ones, digits and _;,:/.+- alone"
            )
        try:
            chain = Chain._read(text)
        except ValueError as error:
            raise ValueError(f"chain {_shown(text)} cannot be read: {error}") from None
        if chain.text != text:
            raise ValueError(f"chain {_shown(text)} should be written as {_shown(chain.text)}")
        return chain

    @staticmethod
    def _read(text: str) -> Chain:
        contractions, rank, bias, activation = [], 1, False, "identity"
        inputs: tuple[int, ...] = ()
        kept: tuple[int, ...] = ()
        gradient = backward = x_turned = few = tf32 = False
        turn, mixed, slabs, slope, through, sums = None, None, 0, 0, 0, 0
        for name, *words in (stage.split(" ") for stage in text.split("; ")):
            numbers = _numbers(name, words)
            if name == INPUTS:
                inputs = tuple(numbers)
            elif name in ("tied", "untied"):
                weight, outer, p, q, inner = numbers
                contractions.append(Contraction(weight, outer, p, q, inner, tied=name == "tied"))
            elif name == "rank":
                rank = numbers[0]
            elif name == "bias":
                bias = True
            elif name == "gradient":
                gradient = True
            elif name == "backward":
                backward = True
            elif name == "turned":
                x_turned = True
            elif name == "turn":
                outer, rows, columns = numbers
                turn = outer, rows, columns
            elif name == "mixed":
                outer, rows, columns = numbers
                mixed = outer, rows, columns
            elif name == "slabs":
                slabs = numbers[0]
            elif name == "few":
                few = True
            elif name == "slope":
                slope = numbers[0]
            elif name == "through":
                through = numbers[0]
            elif name == "sums":
                sums = numbers[0]
            elif name == KEPT:
                kept = tuple(numbers)
            elif name == "tf32":
                tf32 = True
            else:
                check_activation(name)
                activation = name
        _check_sizes(contractions, rank)
        further = (turn, mixed, slabs, tf32, slope, through, sums, inputs, few, kept)
        chain = Chain(tuple(contractions), rank, bias, activation, gradient, backward, x_turned, *further)
        if not contractions and len({slope, through, sums, math.prod(turn or (0,))} - {0}) > 1:
            raise ValueError("it has one number of features, on which slope, through, sums and turn should agree")
        if kept and not chain.may_keep:
            raise ValueError(
                "states are kept by a Kronecker product, for its slope and, without a bias, for its gradients, or by a "
                "Monarch layer, behind which no activation has parameters"
            )
        if inputs and sum(inputs) != chain.in_features:
            raise ValueError(f"its inputs have {sum(inputs)} features, the chain takes {chain.in_features}")
        return chain

    @property
    def parameters(self) -> int:
        """Parameters of the activation: weights behind those of the contractions."""
        return max(0, self.activation.count("/") - 1)

    @property
    def weights(self) -> int:
        """Weights of the contractions, and parameters."""
        return len(self.contractions) + self.parameters

    @property
    def tensors(self) -> int:
        """Those that a layer has: weights, parameters, and a bias."""
        return self.weights + self.bias

    @property
    def in_features(self) -> int:
        if not self.contractions:
            return self.slope or self.through or self.sums or math.prod(self.turn or ())
        c = self.contractions[0]
        return c.outer * c.p * c.inner

    @property
    def alone(self) -> Chain:
        """The same of an x that is one tensor."""
        return replace(self, inputs=()) if self.inputs else self

    @property
    def may_keep(self) -> bool:
        """Whether states between its passes may be kept for its gradients: of a Kronecker product all of them, which
        its gradients are made of, and of the last one an activation's slope; of a Monarch layer the one between its
        contractions."""
        where = (self.inputs, self.x_turned, self.turn, self.mixed, self.slabs)
        if any(where) or self.gradient or self.through or self.sums or self.parameters:
            return False
        tied = [c.tied for c in self.contractions]
        if tied == [False, False]:
            return not (self.backward or self.slope) and self.rank == 1
        is_more = self.bias or self.activation != "identity"
        return len(tied) > 1 and all(tied) and not (self.backward and is_more)

    @property
    def is_dense(self) -> bool:
        """Whether it is one matrix product."""
        if len(self.contractions) != 1 or self.rank > 1:  # torch.compile of PyTorch 2.11 knows no `not` of a tuple
            return False
        (c,) = self.contractions
        return c.tied and c.outer * c.inner == 1

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
    def is_kronecker(self) -> bool:
        """Whether its contractions are all those of a Kronecker product, whose factors are its weights in order."""
        sizes = {c.weight: c.p for c in self.contractions}
        if not sizes or sorted(sizes) != list(range(len(sizes))):
            return False
        state = [sizes[i] for i in range(len(sizes))]
        for c in self.contractions:
            around = math.prod(state[: c.weight]), math.prod(state[c.weight + 1 :])
            if not c.tied or (c.outer, c.inner) != around:
                return False
            state[c.weight] = c.q
        return True

    @property
    def out_features(self) -> int:
        if not self.contractions:
            return self.in_features
        c = self.contractions[-1]
        return c.outer * c.q * c.inner

    def forward_flops(self, batch: int) -> int:
        return 2 * batch * self.rank * sum(c.multiply_adds for c in self.contractions)

    def backward_flops(self, batch: int, wants_x: bool, wants_weights: Sequence[bool]) -> int:
        """FLOPs of the gradients wanted; recomputing the states is not counted."""
        multiply_adds, reaches_back = 0, wants_x
        for c in self.contractions:
            multiply_adds += c.multiply_adds * (wants_weights[c.weight] + reaches_back)
            reaches_back = reaches_back or wants_weights[c.weight]
        return 2 * batch * self.rank * multiply_adds


def parse_layers(text: str) -> tuple[Chain, ...]:
    """The layers of a chain's or a stack's text."""
    layers = text.split(" | ", MOST_LAYERS)
    if len(layers) > MOST_LAYERS or len(text) > MOST_TEXT:
        raise ValueError(f"stack {_shown(text)} should have {MOST_LAYERS} layers and {MOST_TEXT} letters at most")
    return tuple(map(Chain.parse, layers))


_TEXT = re.compile("[a-z0-9_ ;,:/.+-]+", re.ASCII)
_NUMBER = re.compile("0|[1-9][0-9]{0,15}", re.ASCII)


def _shown(text: str) -> str:
    """What an error shows of a text from anywhere."""
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(text)} letters)"


def _numbers(name: str, words: Sequence[str]) -> list[int]:
    count = NUMBERS.get(name, 0)
    if name in MOST_NUMBERS:
        count = min(max(1, len(words)), MOST_NUMBERS[name])
    if len(words) != count or not all(map(_NUMBER.fullmatch, words)):
        raise ValueError(f"{_shown(name)} should have {count} whole numbers behind it")
    numbers = list(map(int, words))
    if any(n > MOST_ELEMENTS for n in numbers) or 0 in numbers[name in ("tied", "untied") :]:
        raise ValueError(f"the sizes behind {name!r} should be from 1 to {MOST_ELEMENTS}")
    return numbers


def _check_sizes(contractions: Sequence[Contraction], rank: int) -> None:
    """Whether contractions are of a chain that memory can hold."""
    if len(contractions) > MOST_CONTRACTIONS:
        raise ValueError(f"it should have {MOST_CONTRACTIONS} contractions at most, it has {len(contractions)}")
    if len({c.weight for c in contractions}) < len(contractions):
        raise ValueError("two contractions share a weight")
    for c in contractions:
        if c.weight >= MOST_CONTRACTIONS:
            raise ValueError(f"its weights should be from 0 to {MOST_CONTRACTIONS - 1}, one is {c.weight}")
        weight = rank * c.p * c.q * (1 if c.tied else c.outer * c.inner)
        if max(weight, c.outer * c.p * c.inner, c.outer * c.q * c.inner) > MOST_ELEMENTS:
            raise ValueError(f"its weights and states should have {MOST_ELEMENTS} elements at most")
    if any(a.outer * a.q * a.inner != b.outer * b.p * b.inner for a, b in itertools.pairwise(contractions)):
        raise ValueError("neighbouring contractions disagree about the size of the state")
