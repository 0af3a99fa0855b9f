"""Passes of both contractions of a Monarch layer in tf32 on Hopper, by products of warpgroups, of tensors that the copy
engine reads by maps: monarch_mapped.cuh, its tiles and source.

What lies between stays on chip, as in monarch.py, which takes what this one does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import constants, wgmma
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.monarch.layer import OfMonarch, takes_forward
from factorlayer.kernels.passes import fastest, tensor_map
from factorlayer.maths.chain import Chain

ROWS = 64  # of a tile
TEAMS = 2  # warpgroups that take tiles
THREADS = 384  # these, and one of which two threads ask for what is copied
HELD = 8  # groups of the second contraction that a block has: floats of a sector of L2
MOST_COLUMNS = 32  # of each, for a thread's registers
MORE, FEWER = 232, 40  # registers of a consumer's and a producer's thread
SLAB = 32  # floats of a row
MOST_SLABS = 8
LARGEST = 1 << 31  # of a map's size


@dataclass(frozen=True)
class MonarchMapped(OfMonarch):
    """A pass, tiled: blocks of `n` columns of eight groups of the second contraction, clusters of `cluster` that share
    x; their warpgroups with room for so many `slabs` of x and `slots` of first weights. `us` is the time predicted."""

    chain: Chain
    n: int
    cluster: int
    slabs: int
    slots: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    units_per_sample = 1

    dtype = "tf32"
    threads = THREADS

    @kept
    def period(self) -> int:
        """Groups of the first contraction after which slabs and pairs of four numbers begin together."""
        p, units = self.chain.contractions[0].p, self.rank // 4
        return next(k for k in range(1, 9) if k * p % SLAB == 0 and k * units % 2 == 0)

    @property
    def pairs(self) -> int:
        """Steps of eight numbers of the second contraction, as padded."""
        periods = -(-self.chain.contractions[0].outer // self.period)
        return periods * self.period * self.rank // 8

    @property
    def weight_bytes(self) -> int:
        return HELD * -(-self.pairs // 4) * self.n * 128

    @property
    def each(self) -> int:
        """Groups of the first contraction that a slot has."""
        return 1 + self.rank // 4 % 2

    @property
    def slot_bytes(self) -> int:
        return self.each * -(-self.chain.contractions[0].p // SLAB) * self.rank * HELD * 128

    @kept
    def shared(self) -> int:
        """Bytes of a block, with what it takes to begin at a multiple of 1024."""
        room = self.slabs * (ROWS * 128 + 16) + self.slots * (self.slot_bytes + 16)
        return self.weight_bytes + TEAMS * room + 16 + 1024

    @property
    def split(self) -> int:
        second = self.chain.contractions[1]
        return second.inner // HELD * -(-second.q // (self.n * self.cluster)) * self.cluster

    @property
    def units_per_block(self) -> int:
        return TEAMS * ROWS

    @property
    def maps(self) -> tuple[str, ...]:
        """What csrc/runtime reads, of x, a sample as one row, and of the first weights: p, two neighbours of the second
        contraction's groups, the rank's numbers, pairs of those groups, and the first contraction's groups."""
        first, second = self.chain.contractions
        features = self.chain.in_features
        x = (features, 1, 1, 1, 1), (features,) * 4, (SLAB, 1, ROWS // self.cluster, 1, 1)
        sizes = first.p, 2, self.rank, second.inner // 2, first.outer
        strides = first.p, second.inner * first.p, 2 * first.p, first.q * first.p
        pairs, each = (HELD // 2, self.each // self.cluster) if self.each > 1 else (HELD // 2 // self.cluster, 1)
        weights = sizes, strides, (SLAB, 2, 4, pairs, each)
        return tensor_map("x", "tf32", *x), tensor_map(first.weight, "tf32", *weights)

    def us_of(self, batch: int) -> float:
        return _time(replace(self, batch=batch))

    @property
    def details(self) -> str:
        first, second = self.chain.contractions
        tiles = f"tiles of {ROWS} samples and {self.n} columns of {HELD} of {second.inner} groups"
        share = f", {self.cluster} blocks share x" if self.cluster > 1 else ""
        slabs = f"{self.slabs} slabs of {SLAB} and {self.slots * self.each} of {first.outer} groups on their way"
        return f"{first.p}→{first.q}, {second.p}→{second.q} at once, {tiles}{share}, {slabs}"

    @property
    def products(self) -> str:
        return wgmma("tf32", {self.n, 4 * HELD})

    @property
    def told(self) -> list[str]:
        numbers = self.told_layer | {"N": self.n, "BLOCKS": self.cluster, "SLABS": self.slabs, "SLOTS": self.slots}
        numbers |= {"MORE": MORE, "FEWER": FEWER, "BIAS": self.chain.bias}
        return [*constants({"Element": "float", **numbers}), activation_type(self.chain.activation, "tf32", 2)]


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchMapped | None:
    """The fastest tiling by prediction; None if this is no chain for it."""
    return fastest(tilings(chain, dtype, batch, gpu))


def _takes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    if dtype != "tf32" or not gpu.wgmma or batch < ROWS or not takes_forward(chain):
        return False
    first, second = chain.contractions
    if first.q % (4 * second.inner):
        return False
    return first.p % 8 == 0 and second.inner % HELD == 0 and first.outer * first.q * first.p < LARGEST


def tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchMapped]:
    if not _takes(chain, dtype, batch, gpu):
        return
    first, second = chain.contractions
    parts = -(-second.q // MOST_COLUMNS)
    # What a pair of units reads lies there at once.
    held = 1 if first.q // second.inner % 8 == 0 else 2
    least = -(-held * first.p // SLAB) + (held * first.p % SLAB > 0)
    for cluster, slots in itertools.product((1, 2), (1, 2, 3, 4)):
        n = -(-second.q // (-(-parts // cluster) * cluster * 8)) * 8
        plan = MonarchMapped(chain, n, cluster, least, slots, batch, gpu)
        plan = replace(plan, slabs=min(MOST_SLABS, least + (gpu.shared - plan.shared) // (TEAMS * (ROWS * 128 + 16))))
        if plan.slabs >= least:
            yield replace(plan, us=_time(plan))


def _time(plan: MonarchMapped) -> float:
    """Microseconds: multiprocessors take turns at tiles. Numbers fitted to an H200."""
    first, gpu = plan.chain.contractions[0], plan.gpu
    each = -(-plan.batch // plan.units_per_block) / max(1, gpu.sms // plan.split)
    # Of a pair of units, for both warpgroups: products, whose operands come from shared memory, and waits for what is
    # on its way, pairs
    products = TEAMS * (first.p // 8 * 2 * 24 + HELD * max(16, plan.n // 2)) / 1.16e3
    numbers = 8 * first.p / plan.rank  # of x
    ahead = min(plan.slabs * SLAB / numbers, plan.slots * plan.each * plan.rank / 8)
    pair = max(products, 0.26 + 0.78 / ahead) * (1.07 if plan.cluster == 1 else 1)
    store = TEAMS * 4 * ROWS * plan.n * HELD / 24e3
    busy = max(each, 1.0) * (plan.pairs * pair + store)
    moved = 4 * plan.batch * (plan.chain.in_features + plan.chain.out_features)
    return 3.0 + plan.weight_bytes / 60e3 + max(busy, 1.2 * moved / (gpu.memory_bytes * gpu.sms))
