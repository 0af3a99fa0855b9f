"""The dense weight of a Monarch layer, and both weights' gradients from that one's: whole_monarch.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Long, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import MOST_BLOCKS
from factorlayer.kernels.product.whole import START_US, THREADS, Between, Largest, WholeWeight
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

WAYS, MOST_WAYS = 4, 16  # of these, for a column
HELD, HELD_OF_MANY, FEW_GROUPS = 32, 16, 4  # q's that a block holds at once, for the first gradient
MANY = 8  # blocks for a multiprocessor
# A round of gradients' sums, with both its barriers. So 17 passes that took 1.5 to 42 us on one H100 are predicted
# within 1.5 times, but for the shortest one.
ROUND_US = 1.2
AT_ONCE, AT_ONCE_OF_DOUBLES = 3, 2  # blocks of a multiprocessor that wait together, as they share its registers
# Loads of a thread on their way: whole_monarch.cuh. Of first weights all, where they are no more than MOST_FIRST
HELD_TOGETHER, FIRST_TOGETHER, MOST_FIRST, TILES_TOGETHER = 8, 16, 24, 12
MOST_BYTES = 1 << 31
# Instructions for each product: by columns, a load for HEIGHT of them and one for four; by tiles, three loads for two
BY_COLUMNS, BY_TILES = 1.7, 3.5


@dataclass(frozen=True)
class OfBoth(Between):
    """A pass between both weights and the dense one."""

    first: Contraction
    second: Contraction
    dtype: str
    gpu: Gpu

    @property
    def rank(self) -> int:
        return self.first.q // self.second.inner

    @property
    def features(self) -> tuple[int, int]:
        return self.first.outer * self.first.p, self.second.inner * self.second.q

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


@dataclass(frozen=True)
class MonarchLargest(Largest):
    """The pass before that looks for the largest of each weight, by blocks."""

    shared = THREADS // 32 * 8
    numbers = 2

    @property
    def us(self) -> float:
        of = self.of
        return float(START_US + of._moved_us((of.first.weight_size + of.second.weight_size) * of.size))

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
class MonarchWeight(OfBoth, WholeWeight):
    """The pass that makes the dense weight."""

    turned: bool = False

    largest = MonarchLargest

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
        rounds = math.ceil(held) + (1 if self.rank <= MOST_FIRST else math.ceil(self.rank / FIRST_TOGETHER))
        waits = self.gpu.rates.wait_us * rounds * max(1.0, self._turns())
        stored = self._moved_us(self.bytes)
        return START_US + self._issued_us(self.elements * self.rank * BY_COLUMNS) + waits + stored

    @property
    def told(self) -> list[str]:
        return self._lines(self.height) + constants({"TURNED": self.turned} | self._told_places)


@dataclass(frozen=True)
class MonarchGradients(OfBoth):
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
        read = self._moved_us(2 * self.elements * self._sum_bytes)
        loads = self._side * (self.mine * self.down + self._tile_r) * self.long / (self.threads * TILES_TOGETHER)
        of_first = 1 + math.ceil(self.second.q / self.held)
        of_second = 1 + math.ceil(self.first.p / self.long) * math.ceil(loads)
        share = self._blocks(self.mine) / self.split
        rounds = max(of_first, of_second, ((1 - share) * of_first + share * of_second) * self._turns())
        issued = self._issued_us(self.elements * self.rank * (BY_COLUMNS + BY_TILES))
        return START_US + issued + read + ROUND_US * rounds

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


def weight(chain: Chain, dtype: str, gpu: Gpu, turned: bool = False) -> MonarchWeight:
    first, second = chain.contractions
    return MonarchWeight(first, second, dtype, gpu, turned)


def parts(chain: Chain, dtype: str, gpu: Gpu, begin: int) -> tuple[MonarchGradients, ...]:
    """The pass that makes both gradients of the dense weight's, and needs no memory."""
    first, second = chain.contractions
    return (MonarchGradients(first, second, dtype, gpu),)
