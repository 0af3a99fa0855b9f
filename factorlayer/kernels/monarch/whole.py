"""A Monarch layer multiplied out: whole.cuh makes its dense weight, and both weights' gradients from that one's.

Where groups are small or their rank is high, the dense weight has hardly more products, or fewer, and no state between
two contractions, which may be many times as large as x. Passes of dense layers take the samples: they find what is
prepared in the place of the first weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from factorlayer.device.code import ELEMENT, Long, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.gradient import SUM_BYTES, Gradient
from factorlayer.kernels.passes import MOST_BLOCKS, OneSpread, Pass, Preparing
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

SCALED = "float16"  # where a product of weights may be too small for its bits, though neither of them is
THREADS = 256  # of a block
WAYS, MOST_WAYS = 4, 16  # of these, for a column
LOOKING = 128  # blocks, for the largest of each weight
HELD, HELD_OF_MANY, FEW_GROUPS = 32, 16, 4  # q's that a block holds at once, for the first gradient
MANY = 8  # blocks for a multiprocessor
START_US = 0.4
# A round of gradients' sums, with both its barriers. So 17 passes that took 1.5 to 42 us on one H100 are predicted
# within 1.5 times, but for the shortest one.
ROUND_US = 1.2
AT_ONCE, AT_ONCE_OF_DOUBLES = 3, 2  # blocks of a multiprocessor that wait together, as they share its registers
HELD_TOGETHER, FIRST_TOGETHER, TILES_TOGETHER = 8, 16, 12  # loads of a thread on their way: whole.cuh
ALIGNED = 256  # bytes, of what is prepared behind a weight
MOST_BYTES = 1 << 31
GRAD = 2  # the parameter that grad_y is, behind both weights
# Instructions for each product: by columns, a load for HEIGHT of them and one for four; by tiles, three loads for two
BY_COLUMNS, BY_TILES = 1.7, 3.5


def takes(chain: Chain) -> bool:
    """Whether it is a layer's chain, forward or back, of which nothing is turned."""
    turned = chain.x_turned or chain.turn or chain.mixed or chain.slabs
    return chain.is_monarch and not turned and not chain.parameters


def dense(chain: Chain) -> Chain:
    """The dense layer that two contractions are."""
    contraction = Contraction(0, 1, chain.in_features, chain.out_features, 1, tied=True)
    return replace(chain, contractions=(contraction,), backward=False)


def transposed(chain: Chain) -> Chain:
    """The dense layer of x's gradient."""
    contraction = Contraction(0, 1, chain.out_features, chain.in_features, 1, tied=True)
    return replace(chain, contractions=(contraction,), backward=False)


@dataclass(frozen=True)
class Whole(OneSpread):
    """A pass between both weights and the dense one."""

    first: Contraction
    second: Contraction
    dtype: str
    gpu: Gpu

    threads = THREADS

    @property
    def rank(self) -> int:
        return self.first.q // self.second.inner

    @property
    def features(self) -> tuple[int, int]:
        return self.first.outer * self.first.p, self.second.inner * self.second.q

    @property
    def elements(self) -> int:
        """Elements of the dense weight."""
        return self.features[0] * self.features[1]

    @property
    def fits(self) -> bool:
        """Whether it fits in a block's shared memory, and, as a weight whose end is counted in ints, in memory."""
        return self.shared <= self.gpu.shared and self.elements * self._sum_bytes < MOST_BYTES

    @property
    def _groups(self) -> int:
        """Groups of the first contraction that a block's columns are of."""
        return min(self.first.outer, -(-(self._columns - 1) // self.first.p) + 1)

    @property
    def ways(self) -> int:
        """Threads for a column."""
        return WAYS

    @property
    def _columns(self) -> int:
        """Columns of a block."""
        return THREADS // self.ways

    @property
    def _across(self) -> int:
        return -(-self.features[0] // self._columns)

    @property
    def _sum_bytes(self) -> int:
        return SUM_BYTES[self.dtype]

    def _lines(self, height: int) -> list[str]:
        numbers = {"WEIGHT_0": self.first.weight, "WEIGHT_1": self.second.weight, "HEIGHT": height, "R": self.rank}
        numbers["WAYS"] = self.ways
        numbers |= {"K": self.first.outer, "P": self.first.p, "L": self.second.inner, "Q": self.second.q}
        return constants({"Element": ELEMENT[self.dtype], **numbers})

    @property
    def blocks(self) -> int:
        return AT_ONCE_OF_DOUBLES if self.dtype == "float64" else AT_ONCE

    def _turns(self) -> float:
        """Rounds of as many blocks as the multiprocessors have at once."""
        return self.split / (self.blocks * self.gpu.sms)

    def _issued_us(self, each: float) -> float:
        """Microseconds of so many instructions for each product of two weights."""
        busy = min(1.0, self.split / self.gpu.sms)
        return self.elements * self.rank * each / 32 / (self.gpu.instructions * self.gpu.sms * busy)


@dataclass(frozen=True)
class WholeWeight(Whole):
    """The pass that makes the dense weight, [out, in], or [in, out] if it is `turned`."""

    turned: bool = False

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
        return (WholeLargest(self), self) if self.scaled else (self,)

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.end

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.bytes, 8) if self.scaled else (self.bytes,)

    @property
    def _is_apart(self) -> bool:
        """Whether groups take turns in its rows: then a block has several groups."""
        return self.turned and self.second.inner > 1

    @property
    def ways(self) -> int:
        groups = self.second.inner
        return (WAYS if groups <= WAYS else 8 if groups <= 8 else MOST_WAYS) if self._is_apart else WAYS

    @property
    def height(self) -> int:
        return 8 if self.second.q > (4 if self._is_apart else 4 * WAYS) else 4

    @property
    def shared(self) -> int:
        held = self._groups * self.rank * (self.ways * self.height * self._sum_bytes + 16)
        return max(held, THREADS * self.height * self.size + max(4, self.size) * self._columns if self._is_apart else 0)

    @property
    def split(self) -> int:
        groups, q = self.second.inner, self.second.q
        if self._is_apart:
            return min(self._across * -(-groups // self.ways) * -(-q // self.height), MOST_BLOCKS)
        return min(self._across * groups * -(-q // (self.ways * self.height)), MOST_BLOCKS)

    @property
    def us(self) -> float:
        held = self.ways * self.height * self._groups * self.rank / (THREADS * HELD_TOGETHER)
        rounds = math.ceil(held) + math.ceil(self.rank / FIRST_TOGETHER)
        waits = self.gpu.rates.wait_us * rounds * max(1.0, self._turns())
        stored = self.elements * self.size / (self.gpu.l2_bytes * self.gpu.sms)
        return START_US + self._issued_us(BY_COLUMNS) + waits + stored

    title = "weights as one"

    @property
    def details(self) -> str:
        p, q = self.features
        return f"{p}→{q}{', turned' if self.turned else ''}"

    @property
    def told(self) -> list[str]:
        places = {"SCALED": self.scaled_at // 4, "LARGEST": self.end // 4 if self.scaled else -1, "BLOCKS": LOOKING}
        return self._lines(self.height) + constants({"TURNED": self.turned, **places})


@dataclass(frozen=True)
class WholeLargest(Preparing):
    """The pass before that looks for the largest of each weight, by blocks."""

    of: WholeWeight

    threads = THREADS
    shared = threads // 32 * 8
    blocks = 4
    split = LOOKING
    prepared_bytes = 8 * LOOKING

    @property
    def prepared_at(self) -> int:
        return self.of.end

    @property
    def us(self) -> float:
        gpu, weights = self.of.gpu, self.of.first.weight_size + self.of.second.weight_size
        return START_US + weights * self.of.size / (gpu.l2_bytes * gpu.sms)

    def __str__(self) -> str:
        return "the largest of each weight"

    @property
    def told(self) -> list[str]:
        first, second = self.of.first, self.of.second
        numbers = {"WEIGHT_0": first.weight, "WEIGHT_1": second.weight, "LARGEST": self.prepared_at // 4}
        numbers |= {"COUNT_0": first.weight_size, "COUNT_1": second.weight_size}
        long = {key: Long(value) for key, value in numbers.items()}
        return constants({"Element": ELEMENT[self.of.dtype], **long})


@dataclass(frozen=True)
class WholeGradients(Whole):
    """The pass that makes gradients of both weights, from sums that are the dense weight's."""

    reads, writes = "s2", "w"

    @property
    def weights(self) -> int:
        return self.first.weight_size + self.second.weight_size

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.weights * self.size,)

    @property
    def height(self) -> int:
        """Numbers r of a thread."""
        return 4 if self.rank <= 4 else 8 if self.rank <= 8 else 16

    @property
    def held(self) -> int:
        """q's that a block holds at once, for the first gradient."""
        return HELD if self._groups <= FEW_GROUPS else HELD_OF_MANY

    @property
    def across(self) -> int:
        """Threads of neighbouring r's."""
        return 4 if self.rank <= 4 else 8 if self.rank <= 8 else 16

    @property
    def down(self) -> int:
        """Threads of neighbouring q's: others have neighbouring groups, if there are so many."""
        most, down = self.threads // self.across, 4
        while down < most and (2 * down < self.second.q or most // down > self.first.outer):
            down *= 2
        return down

    @property
    def mine(self) -> int:
        """q's of a thread: more, where there are blocks enough."""
        return 4 if 2 * self.down < self.second.q and self._blocks(2) > MANY * self.gpu.sms else 2

    @property
    def long(self) -> int:
        """p's that a block holds at once."""
        return 8 if self.first.p <= 8 else 16 if self.first.p <= 16 else 32

    @property
    def _side(self) -> int:
        """Groups of the first contraction, of a block for the second gradient."""
        return self.threads // (self.across * self.down)

    @property
    def _tile_r(self) -> int:
        return self.across * (2 if self.rank > self.across else 1)

    def _blocks(self, mine: int) -> int:
        """Blocks for the second gradient."""
        groups = -(-self.first.outer // self._side) * self.second.inner
        return groups * -(-self.second.q // (mine * self.down)) * -(-self.rank // self._tile_r)

    @property
    def shared(self) -> int:
        by_columns = max(self.held * self._groups * self.height, self.height * self.threads)
        by_tiles = self._side * (self.mine * self.down + self._tile_r) * (self.long + 1)
        return max(by_columns, by_tiles) * self._sum_bytes

    @property
    def split(self) -> int:
        of_first = self._across * self.second.inner * -(-self.rank // self.height)
        return min(of_first + self._blocks(self.mine), MOST_BLOCKS)

    @property
    def us(self) -> float:
        read = 2 * self.elements * self._sum_bytes / (self.gpu.l2_bytes * self.gpu.sms)
        loads = self._side * (self.mine * self.down + self._tile_r) * self.long / (self.threads * TILES_TOGETHER)
        of_first = 1 + math.ceil(self.second.q / self.held)
        of_second = 1 + math.ceil(self.first.p / self.long) * math.ceil(loads)
        share = self._blocks(self.mine) / self.split
        rounds = max(of_first, of_second, ((1 - share) * of_first + share * of_second) * self._turns())
        return START_US + self._issued_us(BY_COLUMNS + BY_TILES) + read + ROUND_US * rounds

    title = "gradients of both weights"

    @property
    def details(self) -> str:
        p, q = self.features
        return f"{self.weights} sums, of {p}×{q}"

    @property
    def told(self) -> list[str]:
        first, second = self.first, self.second
        of = {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        told = {"ACROSS": self.across, "DOWN": self.down, "MINE": self.mine, "LONG": self.long, "HELD": self.held}
        return self._lines(self.height) + constants(told | {key: Long(value) for key, value in of.items()})


class Instead:
    """A pass of a dense layer that has what is prepared in the place of the first weight, and `x` in that of x: all
    else is as the pass says."""

    beside = "s2", 0

    def __init__(self, of: Pass, x: str, scaled: bool) -> None:
        self.of = of
        self.reads_prepared = scaled or of.reads_prepared
        self.reads, self.writes = ("none", "s2") if of.reads == "none" else (x, "y")

    def __getattr__(self, name: str) -> Any:
        if name == "of":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.of, name)

    def __str__(self) -> str:
        return str(self.of)


def forward(chain: Chain, product: Sequence[Pass], dtype: str, gpu: Gpu) -> tuple[Pass, ...]:
    """Passes of the dense layer, behind the one that makes its weight; none where that does not fit."""
    first, second = chain.contractions
    weight = WholeWeight(first, second, dtype, gpu)
    return _prepared(weight, product, "x") if weight.fits else ()


def all_gradients(
    chain: Chain, product: Sequence[Pass], gradient: Sequence[Pass], dtype: str, gpu: Gpu
) -> tuple[Pass, ...]:
    """The passes of all gradients: that of x by a transposed product of grad_y, those of the weights from the dense
    one's; none where a pass does not fit."""
    first, second = chain.contractions
    weight, parts = WholeWeight(first, second, dtype, gpu, turned=True), WholeGradients(first, second, dtype, gpu)
    if not (weight.fits and parts.fits):
        return ()
    sums = replace(cast(Gradient | WideGradient, gradient[0]), grad=GRAD, stays=True)
    return *_prepared(weight, product, f"@{GRAD}"), *sums.passes, parts


def _prepared(weight: WholeWeight, product: Sequence[Pass], x: str) -> tuple[Pass, ...]:
    """Passes of a dense layer behind the one that makes its weight. What they prepare themselves lies behind that."""
    begin, at = weight.end, weight.scaled_at
    placed = [each for p in product if p.leaves != "prepared" for each in p.behind_weight(begin, at).passes]
    taking = with_halves(tuple(placed), begin)
    return *weight.passes, *(cast(Pass, Instead(p, x, weight.scaled)) for p in taking)
