"""Gradients of weights that a pass has taken as one: factor_gradients.cuh, from those of their products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, constants, function
from factorlayer.device.gpu import ELEMENT_BYTES
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_BLOCKS, OneSpread
from factorlayer.kernels.weights import factors
from factorlayer.kernels.work import Mode

WARPS = 8  # of a block, each with an element


@dataclass(frozen=True)
class FactorGradients(OneSpread):
    """A pass behind one that has summed the gradients of products, and behind what adds up its blocks' sums."""

    modes: tuple[Mode, ...]
    dtype: str
    rank: int = 1  # terms, of which each weight has one behind the other
    begin: int = 0  # elements of other weights' gradients before these
    us: float = 3.0

    threads = 32 * WARPS
    shared = threads * 8
    blocks = 4
    starts = True
    reads, writes = "s2", "w"

    def outputs(self, batch: int) -> tuple[int, ...]:
        return ((self.begin + self.weights) * ELEMENT_BYTES[self.dtype],)

    def written(self, batch: int) -> int:
        return self.weights * ELEMENT_BYTES[self.dtype]

    @kept
    def weights(self) -> int:
        return self.rank * sum(q * p for mode in self.modes for _, q, p in mode.parts)

    @property
    def split(self) -> int:
        return min(-(-self.weights // WARPS), MOST_BLOCKS)

    def __str__(self) -> str:
        products = self.rank * sum(mode.q * mode.p for mode in self.modes)
        return f"factor gradients: {self.weights} sums, of {products} of products"

    @property
    def told(self) -> list[str]:
        calls = function("gradient(const C& c, int at)", list(self._calls()))
        return constants({"Element": ELEMENT[self.dtype], "COUNT": self.weights, "BEGIN": self.begin}) + calls

    def _calls(self) -> Iterator[str]:
        begin = made = 0
        for mode in self.modes:
            behind_q, behind_p = mode.q, mode.p
            for j, (_, q, p) in enumerate(mode.parts):
                behind_q, behind_p = behind_q // q, behind_p // p
                for term in range(self.rank):
                    sizes = [q, p, mode.q, mode.p, behind_q, behind_p, begin + term * mode.q * mode.p, made]
                    yield f"c.template part<{', '.join(map(str, sizes))}>(at, [&](int q, int p) {{"
                    yield from (f"  {line}" for line in _others(mode, j, term))
                    yield "});"
                    made += q * p
            begin += self.rank * mode.q * mode.p


def _others(mode: Mode, own: int, term: int) -> Iterator[str]:
    """What an element of a product has beside that of one of its parts."""
    names = []
    for j, ((weight, q, p), factor) in enumerate(zip(mode.parts, factors(mode), strict=True)):
        if j != own:
            yield f"auto w{j} = static_cast<const Element*>(c.params.weights[{weight}]) + {term * q * p};"
            names.append(factor)
    yield f"return {' * '.join(names) or 'Sum<Element>(1)'};"
