"""A structured layer multiplied out: passes that make its dense weight, and its weights' gradients from that one's.

Of few features, small groups or a high rank, the dense weight has hardly more products than the layer, or fewer, and no
state between two contractions, which may be many times as large as x. A pass without samples makes it, and passes of
dense layers take the samples: they find what is prepared in the place of the first weight. whole_kronecker.py and
whole_monarch.py have the passes of the two structures, plan/whole.py asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, Gradient
from factorlayer.kernels.passes import OneSpread, Pass, Placed, Preparing
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.work import round_up

SCALED = "float16"  # where a product of weights may be too small for its bits, though none of them is
THREADS = 256  # of a block
LOOKING = 128  # blocks, for the largest numbers
START_US = 0.4
ALIGNED = 256  # bytes, of what is prepared behind a weight


class Between(OneSpread):
    """A pass between the layer's weights and the dense one."""

    dtype: str
    gpu: Gpu

    threads = THREADS

    if TYPE_CHECKING:

        @property
        def features(self) -> tuple[int, int]:
            """Those of the layer, in and out."""

    @property
    def fits(self) -> bool:
        """Whether there is a kernel for it."""
        return True

    @property
    def elements(self) -> int:
        """Elements of the dense weight."""
        return self.features[0] * self.features[1]

    @property
    def _sum_bytes(self) -> int:
        return SUM_BYTES[self.dtype]

    def _issued_us(self, instructions: float) -> float:
        """Microseconds of so many, of single threads."""
        busy = min(1.0, self.split / self.gpu.sms)
        return instructions / 32 / (self.gpu.instructions * self.gpu.sms * busy)

    def _moved_us(self, moved: int) -> float:
        """Microseconds of so many bytes in L2."""
        return moved / (self.gpu.l2_bytes * self.gpu.sms)


class WholeWeight(Between):
    """The pass that makes the dense weight, [out, in], or [in, out] if it is `turned`."""

    turned: bool
    largest: ClassVar[type[Any]]  # the pass before it, of a weight that is scaled

    reads, writes = "none", "s2"
    leaves = "prepared"

    @property
    def bytes(self) -> int:
        return self.elements * self.size

    @property
    def scaled(self) -> bool:
        return self.dtype == SCALED

    @property
    def scaled_at(self) -> int:
        """The place of the power of two that it is multiplied by, and of what takes it back; -1 if there is none."""
        return round_up(self.bytes, 16) if self.scaled else -1

    @property
    def end(self) -> int:
        """The end of what it prepares, where other passes may begin."""
        return round_up(self.scaled_at + 8 if self.scaled else self.bytes, ALIGNED)

    @property
    def reads_prepared(self) -> bool:
        return self.scaled

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.largest(self), self) if self.scaled else (self,)

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.end

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.bytes, 8) if self.scaled else (self.bytes,)

    title = "multiplied out to a dense weight"

    @property
    def details(self) -> str:
        p, q = self.features
        return f"{p}→{q}{', turned' if self.turned else ''}"

    @property
    def _told_places(self) -> dict[str, int | str]:
        """Floats in what is prepared, or -1: of the power of two, and of what LOOKING blocks have found."""
        return {"SCALED": self.scaled_at // 4, "LARGEST": self.end // 4 if self.scaled else -1, "BLOCKS": LOOKING}


@dataclass(frozen=True)
class Largest(Preparing):
    """The pass before that looks for largest numbers, of each block `numbers`."""

    of: Any

    threads = THREADS
    blocks = 4
    split = LOOKING
    numbers: ClassVar[int]

    @property
    def prepared_bytes(self) -> int:
        return 4 * self.numbers * LOOKING

    @property
    def prepared_at(self) -> int:
        return int(self.of.end)


class Instead(Placed):
    """A pass of a dense layer that has what is prepared in the place of the first weight, and `x` in that of x."""

    beside = "s2", 0

    def __init__(self, of: Pass, x: str, scaled: bool) -> None:
        super().__init__(of)
        self.reads_prepared = scaled or of.reads_prepared
        self.reads, self.writes = ("none", "s2") if of.reads == "none" else (x, "y")


def forward(weight: WholeWeight, weights: int, product: Sequence[Pass]) -> tuple[Pass, ...]:
    """Passes of the dense layer, behind the one that makes its weight of so many; none where that does not fit."""
    return _prepared(weight, weights, product, "x") if weight.fits else ()


def all_gradients(
    weight: WholeWeight,
    weights: int,
    product: Sequence[Pass],
    gradient: Sequence[Pass],
    parts: Callable[[int], tuple[Between, ...]],
) -> tuple[Pass, ...]:
    """The passes of all gradients: that of x by a transposed product of grad_y, those of the weights by `parts` from
    the dense one's, whose sums are so many bytes of s2; none where a pass does not fit. grad_y is the parameter behind
    the weights."""
    sums = replace(cast(Gradient | WideGradient, gradient[0]), grad=weights, stays=True)
    made = parts(sums.part_bytes)
    if not (weight.fits and all(each.fits for each in made)):
        return ()
    return *_prepared(weight, weights, product, f"@{weights}"), *sums.passes, *made


def _prepared(weight: WholeWeight, weights: int, product: Sequence[Pass], x: str) -> tuple[Pass, ...]:
    """Passes of a dense layer behind the one that makes its weight. What they prepare themselves lies behind that."""
    asked = weight.end, weight.scaled_at, weights
    placed = [each for p in product if p.leaves != "prepared" for each in p.behind_weight(*asked).passes]
    taking = with_halves(tuple(placed), weight.end)
    return *weight.passes, *(cast(Pass, Instead(p, x, weight.scaled)) for p in taking)
