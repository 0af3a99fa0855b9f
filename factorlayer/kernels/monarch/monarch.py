"""Passes of both contractions of a Monarch layer: monarch.cuh, its tiles and source.

What lies between stays on chip. It is for many small groups: a block holds the second weights of some of them whole,
and a warp the sums of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.monarch.layer import OfMonarch, takes_forward
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

DTYPES = ("tf32", "bfloat16", "float16")
MOST_SUMS = 128  # of a thread
MOST_SAMPLES = 256
LONGEST = 96  # of what a group of x has
SECTOR = 32  # bytes of L2 that are written as fast as any
# For a store that fills no sector, on a multiprocessor, as streamed.py has it
PART_US = 2.4e-3
FEW_WARPS = 4  # of a block: fewer wait for each other's products as long as these do


@dataclass(frozen=True)
class Monarch(OfMonarch):
    """A pass, tiled: blocks of `groups` of the second contraction and 16 * `mt` * `warps_m` samples, `k` groups of the
    first one at a time. `us` is the time predicted."""

    chain: Chain
    dtype: str
    groups: int
    mt: int
    warps_m: int
    k: int
    slots: int
    rounds: int
    batch: int
    gpu: Gpu
    cluster: int = 1
    teams: int = 1
    us: float = 0.0

    units_per_sample = 1

    @property
    def units(self) -> int:
        """Units, of four numbers each, in a chunk."""
        return self.k * -(-self.rank // 4)

    @property
    def chunks(self) -> int:
        return -(-self.chain.contractions[0].outer // self.k)

    @property
    def depth(self) -> int:
        """Size that the second contraction sums over, as padded."""
        return self.chunks * self.units * 4

    @property
    def tiles(self) -> int:
        """Tiles of 8 sums that a group has."""
        return -(-self.chain.contractions[1].q // 8)

    @property
    def padded(self) -> int:
        return round_up(self.chain.contractions[0].p, 8)

    @property
    def samples(self) -> int:
        return 16 * self.mt * self.warps_m

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.groups // 2 * self.warps_m

    @property
    def loaders(self) -> bool:
        """Whether four more warps copy: where those that multiply need more registers than all would have."""
        return self.gpu.moves_registers and self.warps == 8

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (4 if self.loaders else 0))

    @property
    def cell(self) -> int:
        """Bytes of a sample's results that lie side by side in y."""
        return self.groups * self.cluster * self.size

    @property
    def slot_bytes(self) -> int:
        rows = self.groups // 2 * self.units * 8
        return self.samples // self.teams * self.row_bytes(self.k * self.padded) + rows * self.row_bytes(self.padded)

    @property
    def result_bytes(self) -> int:
        """Bytes of what a block stores itself, of what the other one of two sends, and of what it gets."""
        columns = -(-self.tiles // self.rounds) * 8
        unit = 16 * self.mt // self.cluster * columns * 2 * self.size + 16
        return (3 if self.cluster > 1 else 1) * self.warps_m * self.groups // 2 * unit

    @property
    def weight_bytes(self) -> int:
        line = self.depth * self.size
        return self.groups * self.tiles * 8 * (line if line % 128 == 0 else self.row_bytes(self.depth))

    @kept
    def shared(self) -> int:
        barriers = 16 * (self.warps_m + self.teams * self.slots)
        return self.weight_bytes + self.teams * self.slots * self.slot_bytes + self.result_bytes + barriers

    @property
    def store(self) -> int:
        return math.gcd(16, self.chain.contractions[1].inner * self.size, self.cell)

    @property
    def split(self) -> int:
        return -(-self.chain.contractions[1].inner // (self.groups * self.cluster)) * self.cluster

    @property
    def units_per_block(self) -> int:
        return self.samples

    def us_of(self, batch: int) -> float:
        return _time(replace(self, batch=batch))

    @property
    def details(self) -> str:
        first, second = self.chain.contractions
        tiles = f"tiles of {self.samples} samples and {self.groups} of {second.inner} groups"
        slots = f"{self.slots} slots of {self.k} of {first.outer}"
        return f"{first.p}→{first.q}, {second.p}→{second.q} at once, {tiles}, {self.warps} warps, {slots}"

    @property
    def told(self) -> list[str]:
        numbers = self.told_layer | {"CK": self.k, "GROUPS": self.groups, "MT": self.mt}
        numbers |= {"WARPS_M": self.warps_m, "TEAMS": self.teams, "SLOTS": self.slots, "ROUNDS": self.rounds}
        numbers |= {"STORE": self.store, "BIAS": self.chain.bias, "CLUSTER": self.cluster > 1, "LOADERS": self.loaders}
        return [*kinds(self.dtype), activation_type(self.chain.activation, self.dtype, 2), *constants(numbers)]


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Monarch | None:
    """The fastest tiling by prediction; None if this is no chain for it."""
    return fastest(tilings(chain, dtype, batch, gpu))


def _takes(chain: Chain, dtype: str) -> bool:
    if dtype not in DTYPES or not takes_forward(chain):
        return False
    first, second = chain.contractions
    return first.p * ELEMENT_BYTES[dtype] % 4 == 0 and first.p <= LONGEST and second.inner % 2 == 0


def tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[Monarch]:
    if not _takes(chain, dtype):
        return
    first, second = chain.contractions
    size = ELEMENT_BYTES[dtype]
    step = 8 // size  # units
    numbers = -(-first.q // second.inner // 4)
    tiles = -(-second.q // 8)
    most = min(16, second.inner)
    clusters = (1, 2) if gpu.clusters else (1,)
    for mt, warps_m, groups, cluster in itertools.product((1, 2, 4), (1, 2, 4, 8), (2, 4, 8, 16), clusters):
        warps = groups // 2 * warps_m
        sums = 8 * mt * tiles
        if sums > MOST_SUMS or warps > (8 if sums > 32 else 16) or groups > most or 16 * mt * warps_m > MOST_SAMPLES:
            continue
        if cluster > 1 and groups * cluster > second.inner:
            continue
        for k in (1, 2, 4, 8):
            if k * numbers % step or k > max(step, first.outer):
                continue
            for slots, rounds in itertools.product((2, 3, 4, 6), (1, 2, 4, 8)):
                if rounds > tiles:
                    continue
                for teams in (1, 2, 4):
                    plan = Monarch(chain, dtype, groups, mt, warps_m, k, slots, rounds, batch, gpu, cluster, teams)
                    if warps_m % teams == 0 and plan.shared <= gpu.shared:
                        yield replace(plan, us=_time(plan))


def _together(pieces: int) -> int:
    """Threads that take neighbouring pieces of a row, as the kernel has them."""
    for n in (1, 2, 4):
        if pieces <= n:
            return n
    return 4 if pieces % 8 and pieces % 4 == 0 else 8


def _time(plan: Monarch) -> float:
    """Microseconds: multiprocessors take turns at tiles. Numbers fitted to an H200, where what warps read from shared
    memory, most of their products, and copies, by the lines that they touch, add up instead of overlapping."""
    first, second = plan.chain.contractions
    gpu, size, warps = plan.gpu, plan.size, plan.warps
    each = -(-plan.batch // plan.samples) / max(1, gpu.sms // plan.split)
    # Of a chunk
    x = plan.samples * plan.k * plan.padded * size
    weight = plan.groups // 2 * plan.units * 8 * plan.padded * size
    reads = plan.groups // 2 * -(-plan.rank // 4) * x + plan.warps_m * weight
    reads += warps * 2 * plan.tiles * 8 * plan.units * 4 * size
    sums = plan.samples * plan.groups * plan.units * 4 * (plan.padded + plan.tiles * 8)
    products = 2 * sums / (4.9e6 if size == 2 else 2.45e6) * 8.9e6 / gpu.flops["bfloat16"]
    access = math.gcd(16, first.p * size)
    x_pieces, weight_pieces = (n * first.p * size // access for n in (plan.k, plan.groups))
    lines = plan.samples * -(-x_pieces // _together(x_pieces))
    lines += plan.teams * plan.units * 4 * -(-weight_pieces // _together(weight_pieces))
    chunk = (reads / gpu.shared_bytes + 0.7 * products) * (1 if warps >= 8 else 1.3 * max(1.0, FEW_WARPS / warps))
    chunk = max(chunk + 1.9 * lines / gpu.rates.cycles, (x + plan.teams * weight) / gpu.l2_bytes)
    chunk += 0.03 if plan.slots > 2 else 0.07
    # Results, while others multiply if there are teams
    result = plan.samples * second.q * plan.groups * size
    kilobyte = (
        (0.15 if plan.cell >= 16 else 3.2 / plan.cell) if plan.cell < SECTOR else 0.036 if plan.cluster > 1 else 0.03
    )
    finish = plan.rounds * (0.2 if plan.cluster > 1 else 0.1) + kilobyte * result / 1e3
    if plan.cell >= SECTOR:  # at both ends of a cell
        aligned = math.gcd(SECTOR, plan.cell, second.inner * size)
        finish += result / plan.cell * 2 * (1 - aligned / SECTOR) * PART_US
    busy = max(each, 1.0) * (plan.chunks * chunk + finish * (0.85 if plan.teams > 1 else 1))
    moved = plan.batch * (plan.chain.in_features + plan.chain.out_features) * size
    return 3.0 + plan.weight_bytes / 60e3 + max(busy, 1.2 * moved / (gpu.memory_bytes * gpu.sms))
