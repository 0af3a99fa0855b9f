"""What a gated recurrent unit is: the matrices of its gates as chains, and how its gates make a state.

With h the state before a step, U a gate's recurrent matrix, and x_r, x_z, x_n what a step's input, and biases that
can be added before it is known, bring to the gates reset, update and candidate:

    r = sigmoid(x_r + U_r h)                 z = sigmoid(x_z + U_z h)
    n = act(x_n + r * (U_n h + b))           reset after the product, as PyTorch and cuDNN have it
    n = act(x_n + U_n (r * h))               reset before it, as first published
    h' = (1 - z) * n + z * h

With layer norm, every product is normalised before a bias is added: those of reset and update together, that of the
candidate by itself (Ba, Kiros and Hinton 2016).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import BlockDiagonal, Factors, LayerSpec, resolve

Reset = Literal["after", "before"]
GateStructure = Literal["dense", "kronecker", "monarch", "blocks"]
GATE_STRUCTURES: tuple[GateStructure, ...] = get_args(GateStructure)
GATES = 3  # reset, update, candidate: PyTorch's order
GATE_NAMES = ("reset", "update", "candidate")


@dataclass(frozen=True)
class Recurrence:
    """`chain` is that of one gate's recurrent matrix; its bias is the candidate's, inside of the product that is reset,
    and its activation the candidate's. Weights are given gate by gate, parameters of the activation behind them."""

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


# Which arguments say a matrix' sizes.
TAKEN: dict[str, tuple[str, ...]] = {
    "dense": (),
    "kronecker": ("factors", "rank"),
    "monarch": ("factors", "blocks", "rank"),
    "blocks": ("blocks",),
}


def gate_specs(
    input_size: int,
    hidden_size: int,
    structure: GateStructure,
    input_structure: GateStructure | None = None,
    factors: Factors = None,
    input_factors: Sequence[int] | None = None,
    blocks: int | Sequence[int] | None = None,
    rank: int = 1,
) -> tuple[LayerSpec, LayerSpec]:
    """A gate's input matrix and its recurrent one, as FactorGRU's arguments mean them, or a ValueError in their words.

    Either takes of `factors`, `blocks` and `rank` what its structure has. An input matrix has the recurrent one's sizes
    for its outputs, as many, balanced ones, for its inputs, and no rank that makes no difference."""
    kinds = structure if input_structure is None else input_structure, structure
    for name, kind in (("structure", structure), ("input_structure", kinds[0])):
        if kind not in GATE_STRUCTURES:
            raise ValueError(f"{name} should be one of {', '.join(map(repr, GATE_STRUCTURES))}, it is {kind!r}")
    for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} should be a positive integer, it is {size!r}")
    given = {"factors": factors, "blocks": blocks, "rank": None if rank == 1 else rank}
    for name, value in given.items():
        if value is not None and not any(name in TAKEN[kind] for kind in kinds):
            raise ValueError(f"{name}={value} was given, which structure={structure!r} has none of")
    if input_factors is not None and "factors" not in TAKEN[kinds[0]]:
        raise ValueError(f"input_factors={input_factors} was given, which {kinds[0]!r} input matrices have none of")
    recurrent = _gate_spec(hidden_size, hidden_size, structure, factors, blocks, rank)
    if "factors" not in TAKEN[kinds[0]] or (blocks is not None and input_factors is None and kinds[0] == "monarch"):
        most = _gate_spec(input_size, hidden_size, kinds[0], None, blocks, 1).max_rank
        return _gate_spec(input_size, hidden_size, kinds[0], None, blocks, min(rank, most)), recurrent
    if "factors" not in TAKEN[structure]:
        count = 2 if input_factors is None else len(input_factors)
        outputs = resolve(hidden_size, hidden_size, "kronecker", count if factors is None else factors).out_factors
    else:
        outputs = recurrent.out_factors
    inputs = outputs if input_size == hidden_size else None
    if input_factors is not None:
        inputs = tuple(input_factors)
    if inputs is None and input_size == 2 * hidden_size:  # of two directions, one behind the other
        inputs = (2 * outputs[0], *outputs[1:])
    if inputs is None:
        inputs = resolve(input_size, input_size, "kronecker", len(outputs)).in_factors
    most = _gate_spec(input_size, hidden_size, kinds[0], (inputs, outputs), None, 1).max_rank
    return _gate_spec(input_size, hidden_size, kinds[0], (inputs, outputs), None, min(rank, most)), recurrent


def _gate_spec(
    in_features: int,
    out_features: int,
    structure: GateStructure,
    factors: Factors,
    blocks: int | Sequence[int] | None,
    rank: int,
) -> LayerSpec:
    """A dense matrix is a Kronecker product of a single factor."""
    if structure == "dense":
        return resolve(in_features, out_features, "kronecker", 1)
    if structure == "kronecker":
        return resolve(in_features, out_features, structure, factors, None, rank)
    if structure == "monarch":
        return resolve(in_features, out_features, structure, factors, blocks, rank)
    common = math.gcd(in_features, out_features)
    if blocks is None:  # about as many blocks as each has outputs
        divisors = [d for d in range(1, common + 1) if common % d == 0]
        blocks = min(divisors, key=lambda d: abs(math.log(d * d / out_features)))
    if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1 or common % blocks:
        raise ValueError(
            f"blocks should be a number that divides the features of the inputs, {in_features}, and of the outputs, "
            f"{out_features}; it is {blocks!r}"
        )
    return BlockDiagonal("monarch", (blocks, in_features // blocks), (blocks, out_features // blocks))


def structure_of(spec: LayerSpec) -> GateStructure:
    return "dense" if is_dense(spec) else "blocks" if isinstance(spec, BlockDiagonal) else spec.structure


def is_dense(spec: LayerSpec) -> bool:
    return len(spec.contractions) == 1 and spec.tied
