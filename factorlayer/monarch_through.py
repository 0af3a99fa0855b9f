"""Passes of both contractions of a Monarch layer in 16 bits on Hopper whose groups are few and large, by products of
warpgroups, of tensors that the copy engine reads by maps: csrc/engine/monarch_through.cuh, its tiles and source.

Tiles are as large as a block's memory allows, which holds their state alone: weights go by, once for each tile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.chain import Chain
from factorlayer.device import ELEMENT, hopper_headers, kernel, wgmma
from factorlayer.expression import cuda_type
from factorlayer.gpu import Gpu

DTYPES = ("bfloat16", "float16")
REGISTERS = {2: (232, 40), 3: (160, 32)}  # of a consumer's and a producer's thread, by consumers
OTHER = 24  # of a consumer's registers
LARGEST = 1 << 31  # of a map's size
MOST_SLOTS = 8
CYCLES = 1.65e3  # in a microsecond


@dataclass(frozen=True)
class MonarchThrough:
    """A pass, tiled: 64 samples for each of `teams` warpgroups; `n` columns of the result at a time. `us` is the time
    predicted."""

    chain: Chain
    dtype: str
    teams: int
    n: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    units_per_sample = 1
    split = 1

    @property
    def rank(self) -> int:
        first, second = self.chain.contractions
        return first.q // second.inner

    @property
    def half(self) -> int:
        """Groups whose state is in registers, and others in shared memory."""
        return self.chain.contractions[1].inner // 2

    @property
    def units_per_block(self) -> int:
        return 64 * self.teams

    @property
    def threads(self) -> int:
        return 128 * (self.teams + 1)

    @property
    def depth(self) -> int:
        """Slabs of 64 numbers of the state, of each group."""
        return -(-self.chain.contractions[1].p // 64)

    @property
    def state_bytes(self) -> int:
        return self.depth * self.half * self.units_per_block * 128

    @property
    def slot(self) -> int:
        """Bytes: of a slab of x, or of first weights for half of the groups, or of second weights of one."""
        return 128 * max(self.units_per_block, self.half * self.rank, self.depth * self.n)

    @functools.cached_property
    def slots(self) -> int:
        extra = self.depth * (self.half * self.units_per_block * 128 // self.slot)
        room = self.gpu.shared - 1024 - 8 - self.state_bytes - 16 * extra
        return min(MOST_SLOTS, room // (self.slot + 16))

    @property
    def shared(self) -> int:
        """With what it takes to begin at a multiple of 1024."""
        extra = self.depth * (self.half * self.units_per_block * 128 // self.slot)
        return 1024 + self.state_bytes + self.slots * self.slot + 16 * (self.slots + extra) + 8

    @property
    def fits(self) -> bool:
        """Whether a thread has registers, and a block room for all of a group's x and two slots more."""
        first = self.chain.contractions[0]
        state, sums = first.outer * self.half * self.rank // 4, self.half * self.rank // 2
        results = self.n // 2 + self.half * self.n // 2
        return state + sums + results + OTHER <= REGISTERS[self.teams][0] and self.slots >= -(-first.p // 64) + 2

    @property
    def output_bytes(self) -> int:
        """For one sample."""
        return self.chain.out_features * 2

    @property
    def maps(self) -> tuple[str, ...]:
        """What csrc/runtime reads: of x, p, groups and samples; of the first weights, p, the rank's numbers, groups of the
        second contraction and of the first one; of the second weights, what is summed, columns and groups."""
        first, second = self.chain.contractions
        features, p = self.chain.in_features, first.p
        x = (p, first.outer, 1, 1, 1), (p, features, features, features), (64, 1, self.units_per_block, 1, 1)
        sizes = p, self.rank, second.inner, first.outer, 1
        weights = sizes, (second.inner * p, p, first.q * p, first.q * p), (64, self.rank, self.half, 1, 1)
        size = second.q * second.p
        columns = (second.p, second.q, second.inner, 1, 1), (second.p, size, size, size), (64, self.n, 1, 1, 1)
        return tuple(
            " ".join(map(str, (of, "u16", *sizes, *(2 * stride for stride in strides), *box)))
            for of, (sizes, strides, box) in (("x", x), (first.weight, weights), (second.weight, columns))
        )

    def __str__(self) -> str:
        first, second = self.chain.contractions
        return (
            f"monarch through: {first.p}→{first.q}, {second.p}→{second.q} at once, tiles of {self.units_per_block} samples, "
            f"{self.n} columns at a time, {self.slots} slots of {self.slot} bytes, {self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        first, second = self.chain.contractions
        more, fewer = REGISTERS[self.teams]
        numbers = {
            **{"FIRST": first.weight, "SECOND": second.weight, "K": first.outer, "P": first.p},
            **{"L": second.inner, "S": second.q, "RHO": self.rank, "N": self.n, "TEAMS": self.teams},
            **{"SLOTS": self.slots, "SLOT": self.slot, "MORE": more, "FEWER": fewer},
        }
        lines = [f"using Element = {ELEMENT[self.dtype]};", cuda_type(self.chain.activation, 2)]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        lines += [f"static constexpr bool BIAS = {str(self.chain.bias).lower()};"]
        products = "".join(wgmma(self.dtype, n) for n in sorted({self.n, self.half * self.rank}))
        code = hopper_headers(products, "monarch_through.cuh")
        return kernel(code, name, "MonarchThrough", lines, self.threads, maps=True)


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> MonarchThrough | None:
    """The fastest tiling by prediction; None if this is no chain for it."""
    return min(tilings(chain, dtype, batch, gpu), key=lambda plan: plan.us, default=None)


def _takes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    if dtype not in DTYPES or gpu.arch != 90 or batch <= 64 or not chain.is_monarch or chain.x_turned:
        return False
    if chain.turn or chain.slope or chain.through or chain.gradient or chain.backward:
        return False
    first, second = chain.contractions
    if second.inner not in (2, 4, 8) or first.q % (16 * second.inner) or first.q > 256 or second.q % 2:
        return False
    return first.p % 8 == 0 and second.p % 8 == 0


def tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchThrough]:
    if not _takes(chain, dtype, batch, gpu):
        return
    for teams, n in itertools.product(REGISTERS, (16, 32, 48, 64)):
        plan = MonarchThrough(chain, dtype, teams, n, batch, gpu)
        if plan.fits:
            yield replace(plan, us=_time(plan))


def _time(plan: MonarchThrough) -> float:
    """Microseconds: multiprocessors take turns at tiles, each bound by its slowest unit. Numbers fitted to an H200."""
    first, second = plan.chain.contractions
    gpu = plan.gpu
    each = -(-(-(-plan.batch // plan.units_per_block)) // gpu.sms)
    columns, steps, parts = plan.half * plan.rank, -(-first.p // 64) * 4, -(-second.q // plan.n)
    # Cycles of a product of 64 x n x 16, by the matrix unit and by shared memory
    both = first.outer * steps * 2 * max(columns / 2, 16 + columns / 4)
    both += parts * second.p / 16 * plan.half * (max(plan.n / 2, 16 + plan.n / 4) + plan.n / 2)
    products = 1.15 * plan.teams * both / CYCLES
    moved = plan.batch * (plan.chain.in_features + plan.chain.out_features) * 2
    loads = first.outer * steps // 4 * (64 * plan.teams + first.q) + parts * plan.depth * second.inner * plan.n
    busy = each * max(products, 128 * loads / 55e3)
    memory = 1.2 * moved / (gpu.memory_bytes * gpu.sms)
    return 5.0 + max(busy, memory) + 0.1 * min(busy, memory)
