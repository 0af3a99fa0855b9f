"""The dense weight of a Kronecker layer, and all factors' gradients from that one's: whole_kronecker.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Long, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import MOST_BLOCKS
from factorlayer.kernels.product.whole import ALIGNED, SCALED, START_US, THREADS, Between, Largest, WholeWeight
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

# Elements of a dense weight: products with a larger one are tens of times those with two factors, of which predictions
# are not close enough (1728², bf16, and 1998², float, took an H100 1.3 and 1.6 times as long forward as factors did)
MOST_ELEMENTS = 1 << 21
MOST_BYTES = 1 << 25  # of sums of columns, which L2 is to hold
MOST_SCALED = 5  # factors in half precision, whose products float holds: from 2^-120 to 2^80
WIDE = 32  # columns of a tile of the dense weight
HEIGHT, TERMS = 4, 4  # rows of a thread, and terms at once: whole_kronecker.cuh
MOST_RANKS = 4  # terms that a thread sums for
LENGTH = 32  # numbers that a thread sums, at least one q of the longest factor
MOST_TOGETHER, TOGETHER = 16, 8  # numbers of a thread on their way, all of them or so many: whole_kronecker.cuh
MOST_WAYS = 256  # threads for a gradient
OF_A_WAY = 4  # numbers that are worth a thread
# Instructions for each number of a factor that is multiplied, and for each that is summed, stored or read
BY_FACTOR, BY_ELEMENT = 3.0, 8.0
OF_WEIGHT, OF_GRADIENTS = 4, 2  # blocks that a multiprocessor has to have registers for
AT_ONCE = 4  # of these that it mostly has, and that wait together


def _sizes(numbers: list[int]) -> str:
    return f"Sizes<{', '.join(map(str, numbers))}>"


@dataclass(frozen=True)
class OfFactors(Between):
    """A pass between the factors, of sizes (q, p) each, in so many terms, and the dense weight."""

    sizes: tuple[tuple[int, int], ...]
    rank: int
    dtype: str
    gpu: Gpu

    @property
    def features(self) -> tuple[int, int]:
        return math.prod(p for _, p in self.sizes), math.prod(q for q, _ in self.sizes)

    @property
    def _numbers(self) -> int:
        """Of factors, for an element of the dense weight."""
        return self.rank * len(self.sizes)

    @property
    def _told(self) -> dict[str, int | str]:
        qs, ps = (_sizes([each[i] for each in self.sizes]) for i in range(2))
        return {"Element": ELEMENT[self.dtype], "Qs": qs, "Ps": ps, "R": self.rank}

    def _waits_us(self, rounds: Sequence[tuple[int, int]]) -> float:
        """Microseconds of waits one behind another: of so many blocks, so many each, behind a first one."""
        shared = sum(count * each for count, each in rounds) / (AT_ONCE * self.gpu.sms)
        return self.gpu.rates.wait_us * (1 + max(shared, *(each for _, each in rounds)))


class OfTiles(OfFactors):
    """A pass over the dense weight by tiles."""

    blocks = OF_WEIGHT

    @property
    def tiles(self) -> int:
        p, q = self.features
        return -(-p // WIDE) * -(-q // (THREADS // WIDE * HEIGHT))

    @property
    def _made_us(self) -> float:
        """Microseconds for all elements."""
        issued = self._issued_us(self.elements * (self._numbers * BY_FACTOR + BY_ELEMENT))
        return issued + self._waits_us([(self.tiles, -(-self.rank // TERMS))])


@dataclass(frozen=True)
class KroneckerLargest(Largest):
    """The pass before that looks for the largest number of the dense weight, by blocks."""

    of: KroneckerWeight

    shared = THREADS // 32 * 4
    numbers = 1

    @property
    def us(self) -> float:
        return START_US + self.of._made_us

    def __str__(self) -> str:
        return "the largest of the dense weight"

    @property
    def told(self) -> list[str]:
        return constants(self.of._told | {"HEIGHT": HEIGHT, "LARGEST": self.prepared_at // 4})


@dataclass(frozen=True)
class KroneckerWeight(OfTiles, WholeWeight):
    """The pass that makes the dense weight."""

    turned: bool = False

    largest = KroneckerLargest

    @property
    def shared(self) -> int:
        line = THREADS // WIDE * HEIGHT * self.size + max(4, self.size)
        return WIDE * line if self.turned else THREADS // 32 * 4

    @property
    def split(self) -> int:
        return min(self.tiles, MOST_BLOCKS)

    @property
    def us(self) -> float:
        return START_US + self._made_us + self._moved_us(self.bytes)

    @property
    def told(self) -> list[str]:
        return constants(self._told | {"HEIGHT": HEIGHT, "TURNED": self.turned} | self._told_places)


class OfColumns(OfFactors):
    """A pass that makes, or adds up, sums of columns of the dense weight's gradient, which lie in s2 behind `begin`
    bytes."""

    begin: int

    blocks = OF_GRADIENTS

    @property
    def height(self) -> int:
        return min(self.rank, MOST_RANKS)

    @property
    def longs(self) -> list[int]:
        """For each factor the other one with most q's."""
        count = len(self.sizes)
        return [max((j for j in range(count) if j != i), key=lambda j: self.sizes[j][0]) for i in range(count)]

    @property
    def eaches(self) -> list[int]:
        """Of that one, q's that a thread takes."""
        found = []
        for i, long in enumerate(self.longs):
            others = self.features[1] // (self.sizes[i][0] * self.sizes[long][0])
            found.append(min(self.sizes[long][0], max(1, LENGTH // others)))
        return found

    @property
    def parts(self) -> list[int]:
        return [-(-self.sizes[long][0] // each) for long, each in zip(self.longs, self.eaches, strict=True)]

    @property
    def sums(self) -> int:
        """Of columns."""
        each = (parts * self.rank * q for parts, (q, _) in zip(self.parts, self.sizes, strict=True))
        return self.features[0] * sum(each)

    @property
    def end(self) -> int:
        return self.begin + self.sums * self._sum_bytes

    @property
    def fits(self) -> bool:
        return self.sums * self._sum_bytes <= MOST_BYTES

    @property
    def _told(self) -> dict[str, int | str]:
        of_each = {"Longs": _sizes(self.longs), "Eaches": _sizes(self.eaches)}
        return super()._told | {"COLUMNS": Long(self.begin // self._sum_bytes), "HEIGHT": self.height} | of_each


@dataclass(frozen=True)
class KroneckerColumns(OfColumns):
    """The pass that makes sums of columns."""

    begin: int

    shared = 0
    reads, writes = "s2", "s2"

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.end

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.end,)

    def written(self, batch: int) -> int:
        return self.sums * self._sum_bytes

    def result_dtype(self, dtype: str) -> str:
        return "float32" if self._sum_bytes == 4 else dtype

    @property
    def _blocks(self) -> list[int]:
        """For each factor."""
        tiles, each = -(-self.rank // self.height), zip(self.parts, self.sizes, strict=True)
        return [tiles * parts * -(-q * self.features[0] // THREADS) for parts, (q, _) in each]

    @property
    def split(self) -> int:
        return min(sum(self._blocks), MOST_BLOCKS)

    @property
    def _rounds(self) -> list[int]:
        """Waits of a thread, for each factor."""
        found = []
        for (q, _), long, each in zip(self.sizes, self.longs, self.eaches, strict=True):
            others = self.features[1] // (q * self.sizes[long][0])
            found.append(-(-others * each // MOST_TOGETHER) if each <= MOST_TOGETHER else others * -(-each // TOGETHER))
        return found

    @property
    def us(self) -> float:
        read = self.elements * len(self.sizes) * -(-self.rank // self.height)
        issued = self._issued_us(read * (self.height * BY_FACTOR + BY_ELEMENT))
        moved = self._moved_us((read + self.sums) * self._sum_bytes)
        return START_US + issued + moved + self._waits_us(list(zip(self._blocks, self._rounds, strict=True)))

    title = "gradients of all factors, by columns"

    @property
    def details(self) -> str:
        p, q = self.features
        return f"{self.sums} sums, of {p}×{q}"

    @property
    def told(self) -> list[str]:
        return constants(self._told)


@dataclass(frozen=True)
class KroneckerGradients(OfColumns):
    """The pass that adds up those of columns."""

    begin: int

    reads, writes = "s2", "w"

    @property
    def shared(self) -> int:
        return THREADS * self._sum_bytes

    @property
    def weights(self) -> int:
        return self.rank * sum(q * p for q, p in self.sizes)

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.weights * self.size,)

    @property
    def _lengths(self) -> list[int]:
        """Sums of columns for a gradient of each factor."""
        return [parts * self.features[0] // p for parts, (_, p) in zip(self.parts, self.sizes, strict=True)]

    @property
    def ways(self) -> list[int]:
        """Threads for a gradient."""
        return [min(MOST_WAYS, 1 << max(0, (length - 1) // OF_A_WAY).bit_length()) for length in self._lengths]

    @property
    def _blocks(self) -> list[int]:
        """For each factor."""
        return [-(-self.rank * q * p * ways // THREADS) for ways, (q, p) in zip(self.ways, self.sizes, strict=True)]

    @property
    def split(self) -> int:
        return min(sum(self._blocks), MOST_BLOCKS)

    @property
    def us(self) -> float:
        each = zip(self._blocks, self._lengths, self.ways, strict=True)
        rounds = [(count, -(-n // (ways * TOGETHER))) for count, n, ways in each]
        moved = self._moved_us(self.sums * self._sum_bytes)
        return START_US + self._issued_us(self.sums * BY_ELEMENT) + moved + self._waits_us(rounds)

    title = "gradients of all factors"

    @property
    def details(self) -> str:
        return f"{self.weights} of {self.sums} sums"

    @property
    def told(self) -> list[str]:
        return constants(self._told | {"Ways": _sizes(self.ways)})


def takes(chain: Chain, dtype: str) -> bool:
    """Whether a Kronecker product's dense weight is worth asking for, and can be made."""
    fits = dtype != SCALED or len(chain.contractions) <= MOST_SCALED
    return fits and chain.in_features * chain.out_features <= MOST_ELEMENTS


def _sizes_of(chain: Chain) -> tuple[tuple[int, int], ...]:
    return tuple((c.q, c.p) for c in sorted(chain.contractions, key=lambda c: c.weight))


def weight(chain: Chain, dtype: str, gpu: Gpu, turned: bool = False) -> KroneckerWeight:
    return KroneckerWeight(_sizes_of(chain), chain.rank, dtype, gpu, turned)


def parts(chain: Chain, dtype: str, gpu: Gpu, begin: int) -> tuple[Between, ...]:
    """The passes that make all gradients of the dense weight's, whose sums are in the first `begin` bytes of s2."""
    told = _sizes_of(chain), chain.rank, dtype, gpu, round_up(begin, ALIGNED)
    return KroneckerColumns(*told), KroneckerGradients(*told)
