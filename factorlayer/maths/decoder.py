"""What a step of a decoder computes, as the text that its ops carry: from the last tokens to the next ones.

x = embedding[token], the context behind it      h' = a step of the recurrence, layer behind layer
scores = head weight · h' + head bias             the next token: that of the best score, or one that is drawn
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, get_args

from factorlayer.maths.recurrence import Recurrence

# What is made of the scores: the token of the best one; one that is drawn; the scores themselves.
Made = Literal["best", "drawn", "scores"]
MADE: tuple[Made, ...] = get_args(Made)
MOST_SAMPLES = 16  # that an op takes at once
LAYERS_MOST = 12
BIASED = "biased"
DRAWS = "draw", "draw placed"  # texts of the op that draws by scores, those of all tokens or of some
FEW = "few"  # of the op that finds the few best scores


@dataclass(frozen=True)
class Decoder:
    """`recurrence` is that of every layer, which is dense and has its reset after the product; kernels are made for
    `samples` at most."""

    recurrence: Recurrence
    embedding: int
    context: int
    vocabulary: int
    layers: int = 1
    samples: int = 1
    made: Made = "best"
    biased: bool = True  # the head
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        numbers = self.embedding, self.context, self.vocabulary, self.layers, self.samples
        words = ["decode", *map(str, numbers), self.made, *([BIASED] if self.biased else [])]
        object.__setattr__(self, "text", f"{' '.join(words)}; {self.recurrence.text}")

    @staticmethod
    @functools.cache
    def parse(text: str) -> Decoder:
        """ValueError if it is another text than a decoder's own."""
        head, _, recurrence = text.partition("; ")
        name, *words = head.split(" ")
        numbers, made, biased = words[:5], words[5:6], words[6:]
        if name != "decode" or len(made) != 1 or made[0] not in MADE or biased not in ([], [BIASED]):
            raise ValueError(f"decoder {text[:200]!r} should begin with 'decode', five numbers and one of {MADE}")
        embedding, context, vocabulary, layers, samples = map(int, numbers)
        sizes = embedding, context, vocabulary, layers, samples
        found = Decoder(Recurrence.parse(recurrence), *sizes, made[0], bool(biased))
        reason = why_not(found.recurrence)
        if reason is not None:
            raise ValueError(f"decoder {text[:200]!r}: {reason}")
        return found

    @property
    def hidden(self) -> int:
        return self.recurrence.hidden

    def features_in(self, layer: int) -> int:
        return self.embedding + self.context if layer == 0 else self.hidden


def why_not(recurrence: Recurrence) -> str | None:
    """Why a decoder's ops do not take such a recurrence, or None."""
    if not recurrence.chain.is_dense:
        return "its recurrent matrices should be dense"
    if recurrence.reset != "after":
        return "its reset gate should stand after the product"
    if recurrence.reverse:
        return "it should go from the first step to the last one"
    if recurrence.chain.parameters:
        return "its activation should have no parameters"
    return None
