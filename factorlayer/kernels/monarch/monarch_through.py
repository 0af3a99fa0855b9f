"""Passes of both contractions of a Monarch layer in 16 bits on Hopper whose groups are few and large, by products of
warpgroups, of tensors that the copy engine reads by maps: monarch_through.cuh, its tiles and source.

Tiles are as large as a block's memory allows, which holds their state alone: weights go by, once for each tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.activations.written import activation_type
from factorlayer.device.code import ELEMENT, constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.monarch_layer import OfMonarch, takes_forward
from factorlayer.kernels.passes import fastest, tensor_map
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

DTYPES = ("bfloat16", "float16")
ROWS = 64  # of a block
CLUSTER = 2
MORE, FEWER = 232, 40  # registers of a consumer's and a producer's thread
OTHER = 24  # of a consumer's registers
MOST_SLOTS, LEAST_X = 6, 4
MOST_PARTS = 8  # of the columns, which are written out: with more of them, two passes are as fast


@dataclass(frozen=True)
class MonarchThrough(OfMonarch):
    """A pass, tiled: `n` columns of the result at a time. `us` is the time predicted."""

    chain: Chain
    dtype: str
    n: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = 384
    units_per_sample = 1
    units_per_block = ROWS * CLUSTER  # of a cluster
    split = cluster = CLUSTER

    @property
    def half(self) -> int:
        """Groups of the second contraction that a warpgroup has."""
        return self.chain.contractions[1].inner // 2

    @property
    def depth(self) -> int:
        """Slabs of 64 numbers of the state, of each group."""
        return -(-self.chain.contractions[1].p // 64)

    @property
    def x_slabs(self) -> int:
        first = self.chain.contractions[0]
        return first.outer * -(-first.p // 64)

    @property
    def slot(self) -> int:
        """Bytes of weights, for both warpgroups."""
        return 256 * max(self.half * self.rank, self.depth * self.n)

    @property
    def exchange(self) -> int:
        return 2 * 256 * self.n // 2 * self.half

    @property
    def bias_bytes(self) -> int:
        """Of a bias, each of the second contraction's groups by itself."""
        second = self.chain.contractions[1]
        return round_up(second.inner * round_up(second.q, self.n) * 2, 16) if self.chain.bias else 0

    @kept
    def slots(self) -> tuple[int, int]:
        """Slots of x, of which there is a tile at most, and of weights, which come first: they are more."""
        room, of_x = self.gpu.shared - 1024 - self.exchange - self.bias_bytes, ROWS * 128 + 16
        of_weights = min(MOST_SLOTS, (room - LEAST_X * of_x) // (self.slot + 16))
        return min(self.x_slabs, (room - of_weights * (self.slot + 16)) // of_x), of_weights

    @property
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        of_x, of_weights = self.slots
        return 1024 + self.exchange + self.bias_bytes + of_x * (ROWS * 128 + 16) + of_weights * (self.slot + 16)

    @property
    def fits(self) -> bool:
        """Whether a thread has registers, and a block room."""
        first = self.chain.contractions[0]
        state, sums = first.outer * self.half * self.rank // 4, self.half * self.rank // 2
        held = state + sums + self.n // 2 + self.half * self.n // 2 + OTHER <= MORE
        parts = -(-self.chain.contractions[1].q // self.n)
        return held and self.slots[1] >= 3 and parts <= MOST_PARTS

    @property
    def maps(self) -> tuple[str, ...]:
        """What csrc/runtime reads: of x, p, groups and samples; of the first weights, p, the rank's numbers, groups of
        the second contraction and of the first one; of the second weights, what is summed, columns and groups."""
        first, second = self.chain.contractions
        features, p = self.chain.in_features, first.p
        x = (p, first.outer, 1, 1, 1), (p, features, features, features), (64, 1, ROWS, 1, 1)
        sizes = p, self.rank, second.inner, first.outer, 1
        weights = sizes, (second.inner * p, p, first.q * p, first.q * p), (64, self.rank, self.half, 1, 1)
        size = second.q * second.p
        columns = (second.p, second.q, second.inner, 1, 1), (second.p, size, size, size), (64, self.n, 1, 1, 1)
        return (
            tensor_map("x", self.dtype, *x),
            tensor_map(first.weight, self.dtype, *weights),
            tensor_map(second.weight, self.dtype, *columns),
        )

    def us_of(self, batch: int) -> float:
        """Multiprocessors take turns at tiles, each bound by its slowest unit. Numbers fitted to an H200."""
        first, second = self.chain.contractions
        gpu = self.gpu
        each = math.ceil(math.ceil(batch / self.units_per_block) / (gpu.sms // CLUSTER))
        columns, steps, parts = self.half * self.rank, -(-first.p // 64) * 4, -(-second.q // self.n)
        # Cycles of a product of 64 x n x 16, by the matrix unit and by shared memory, and of what is done to its sums
        both = first.outer * steps * 2 * max(columns / 2, 16 + columns / 4)
        both += parts * second.p / 16 * second.inner * self.n / 2
        both += 300 * first.outer + 200 * parts
        loads = first.outer * steps // 4 * (ROWS + first.q) + parts * self.depth * second.inner * self.n
        moved = batch * (self.chain.in_features + self.chain.out_features) * 2
        busy = each * max(1.3 * both / gpu.rates.cycles, 128 * loads / 90e3)
        memory = 1.2 * moved / (gpu.memory_bytes * gpu.sms)
        return 3.2 + max(busy, memory) + 0.1 * min(busy, memory)

    @property
    def details(self) -> str:
        first, second = self.chain.contractions
        slabs = f"{self.slots[0]} slabs of x and {self.slots[1]} of weights on their way"
        both = f"{first.p}→{first.q}, {second.p}→{second.q} at once"
        return f"{both}, tiles of {ROWS} samples, {self.n} columns at a time, {slabs}"

    @property
    def products(self) -> str:
        return wgmma(self.dtype, {self.n, self.half * self.rank})

    @property
    def told(self) -> list[str]:
        numbers = self.told_layer | {"N": self.n, "X_SLOTS": self.slots[0], "SLOTS": self.slots[1]}
        numbers |= {"SLOT": self.slot, "MORE": MORE, "FEWER": FEWER, "BIAS": self.chain.bias}
        return [
            *constants({"Element": ELEMENT[self.dtype], **numbers}),
            activation_type(self.chain.activation, self.dtype, 2),
        ]


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchThrough | None:
    """The fastest tiling by prediction; None if this is no chain for it."""
    return fastest(tilings(chain, dtype, batch, gpu), batch)


def _takes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    if dtype not in DTYPES or not gpu.wgmma or batch <= 64 or not takes_forward(chain) or chain.x_turned:
        return False
    first, second = chain.contractions
    if second.inner not in (4, 8) or first.q % (16 * second.inner) or first.q > 256 or second.q % 2:
        return False
    return first.p % 8 == 0 and second.p % 8 == 0


def tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchThrough]:
    if not _takes(chain, dtype, batch, gpu):
        return
    for n in (16, 32, 48, 64):
        plan = MonarchThrough(chain, dtype, n, batch, gpu)
        if plan.fits:
            yield plan
