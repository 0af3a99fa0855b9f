"""All gradients of a Monarch layer whose groups are small and many, its state and that one's gradient on chip:
csrc/engine/monarch_gradient.cuh, which makes those of the weights, and monarch_back.cuh, that of x.

Both read grad_y turned: what an output group has lies side by side.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.chain import Chain
from factorlayer.device import ELEMENT, MATH, headers, hopper_headers, kernel, wgmma
from factorlayer.gpu import ELEMENT_BYTES, Gpu
from factorlayer.gradient import BlockSums, Reduction
from factorlayer.spec import Contraction

DTYPES = ("tf32", "bfloat16", "float16")
WARPS = 8
MOST_SUMS = 200  # of a thread, whatever else it holds
RANKS = (4, 8, 16)
OWN_COPY_US = 0.1  # a chunk's start


class _Both:
    """What the two passes have in common."""

    chain: Chain
    dtype: str
    gpu: Gpu

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def step(self) -> int:
        """What one product is summed over."""
        return 32 // self.size

    @property
    def both(self) -> tuple[Contraction, Contraction]:
        first, second = self.chain.contractions
        return first, second

    @property
    def rank(self) -> int:
        return self.both[0].q // self.both[1].inner

    @property
    def all_units(self) -> int:
        """Fours of the state's numbers that an output group reads."""
        return self.both[1].p // 4

    def _stride(self, elements: int) -> int:
        """Bytes from row to row, an odd multiple of 16."""
        return (-(-elements * self.size // 16) | 1) * 16

    @property
    def numbers(self) -> dict[str, int]:
        first, second = self.both
        numbers = {"FIRST": first.weight, "SECOND": second.weight, "GRAD": 2, "K": first.outer, "P": first.p}
        return numbers | {"L": second.inner, "S": second.q, "RHO": self.rank}

    def lines(self, numbers: dict[str, int]) -> list[str]:
        kinds = [f"using Math = {MATH[self.dtype]};", f"using Element = {ELEMENT[self.dtype]};"]
        return kinds + [f"static constexpr int {key} = {value};" for key, value in (self.numbers | numbers).items()]


@dataclass(frozen=True)
class MonarchGradient(_Both, BlockSums):
    """The pass over x and grad_y that makes gradients of both weights, tiled: a block has 4 * `wk` units and 4 * `wl`
    output groups. `us` is the time predicted."""

    chain: Chain
    dtype: str
    wk: int
    wl: int
    groups: int  # of warps, that take turns at chunks
    samples: int  # of a chunk
    stages: int
    wgmma: bool  # Hopper's products, of those with grad_y
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = 32 * (WARPS + 4)  # with those that copy
    units_per_sample = 1

    @property
    def weights(self) -> int:
        return sum(c.weight_size for c in self.both)

    @property
    def split(self) -> int:
        """Parts of the weights."""
        return self.all_units // (4 * self.wk) * (self.both[1].inner // (4 * self.wl))

    @property
    def most(self) -> int:
        """Blocks for one of them."""
        return max(1, self.gpu.sms // self.split)

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def columns(self) -> int:
        """Of x, for a block."""
        return 4 * self.wk * 4 // self.rank * self.both[0].p

    @functools.cached_property
    def shared(self) -> int:
        first, second = self.both
        row = 128 if self.wgmma else self._stride(second.q)
        weights = 16 * 4 * self.wk * self.wl * (self._stride(first.p) + row)
        stage = self.samples * (self._stride(self.columns) + 4 * self.wl * row)
        return weights + self.stages * ((-(-stage // 1024) * 1024 if self.wgmma else stage) + 16)

    def __str__(self) -> str:
        first, second = self.both
        return (
            f"monarch gradients: {first.p}→{first.q}, {second.p}→{second.q} for {4 * self.wl} of {second.inner} groups "
            f"and {16 * self.wk} of {second.p}, {self.groups} groups of {self.wk}×{self.wl} warps, "
            f"{self.stages} stages of {self.samples} samples, {self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        first, second = self.both
        numbers = {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        numbers |= {"WK": self.wk, "WL": self.wl, "GROUPS": self.groups, "CHUNK": self.samples, "STAGES": self.stages}
        flag = f"static constexpr bool WGMMA = {str(self.wgmma).lower()};"
        products = "".join(wgmma(self.dtype, n, turned=True) for n in sorted({16, second.q})) if self.wgmma else ""
        code = hopper_headers(products, "sums.cuh", "monarch_gradient.cuh")
        return kernel(code, name, "MonarchGradient", [*self.lines(numbers), flag], self.threads)


@dataclass(frozen=True)
class MonarchBack(_Both):
    """The pass over grad_y that makes the gradient of x, tiled: a block has 4 * `wk` units and 16 * `mt` * `wm`
    samples, and `groups` output groups at a time. `us` is the time predicted."""

    chain: Chain
    dtype: str
    wk: int
    wm: int
    mt: int
    groups: int
    stages: int
    batch: int
    gpu: Gpu
    us: float = 0.0

    threads = 32 * (WARPS + 8)  # with those that copy: with four it takes a sixth longer in tf32
    units_per_sample = 1

    @property
    def samples(self) -> int:
        return 16 * self.mt * self.wm

    @property
    def units_per_block(self) -> int:
        return self.samples

    @property
    def split(self) -> int:
        return self.all_units // (4 * self.wk)

    @functools.cached_property
    def shared(self) -> int:
        first, second = self.both
        grad = self.samples * self._stride(second.q)
        weights = second.q * (16 * self.wk + 8) * self.size + 16 * self.wk * self._stride(first.p)
        return self.stages * (self.groups * (grad + weights) + 16)

    def __str__(self) -> str:
        first, second = self.both
        return (
            f"monarch back: {second.q}→{second.p}, {first.q}→{first.p} at once, tiles of {self.samples} samples and "
            f"{16 * self.wk} of {second.p}, {self.stages} stages of {self.groups} of {second.inner} groups, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        numbers = {"WK": self.wk, "WM": self.wm, "MT": self.mt, "CL": self.groups, "STAGES": self.stages}
        code = headers("sums.cuh", "monarch_back.cuh")
        return kernel(code, name, "MonarchBack", self.lines(numbers), self.threads)


def all_gradients(
    chain: Chain, dtype: str, batch: int, gpu: Gpu
) -> tuple[MonarchGradient, Reduction, MonarchBack] | None:
    """The passes, each the fastest by prediction; None if this is no chain for them."""
    if gpu.arch != 90 or batch <= 64 or not _takes(chain, dtype):
        return None
    of_weights = min(gradient_tilings(chain, dtype, batch, gpu), key=lambda plan: plan.us, default=None)
    back = min(back_tilings(chain, dtype, batch, gpu), key=lambda plan: plan.us, default=None)
    return (of_weights, Reduction(of_weights), back) if of_weights and back else None


def _takes(chain: Chain, dtype: str) -> bool:
    """Whether it is a Monarch layer whose state is the largest of all."""
    if dtype not in DTYPES or len(chain.contractions) != 2 or chain.rank > 1:
        return False
    first, second = chain.contractions
    if first.tied or second.tied or first.inner > 1 or second.outer > 1 or first.q % second.inner:
        return False
    rank = first.q // second.inner
    if rank not in RANKS or second.p != first.outer * rank or second.inner % 4 or first.p % 8 or second.q % 16:
        return False
    return first.outer * first.q >= chain.in_features + chain.out_features


def gradient_tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchGradient]:
    first, second = chain.contractions
    if 2 * (first.p + second.q) > MOST_SUMS:
        return
    flags = (True, False) if ELEMENT_BYTES[dtype] == 2 and second.q <= 64 else (False,)
    ways = itertools.product(flags, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (6, 4, 3, 2), (1, 2))
    for of_groups, wk, wl, groups, stages, steps in ways:
        plan = MonarchGradient(chain, dtype, wk, wl, groups, 16 * steps, stages, of_groups, batch, gpu)
        if stages < groups + 1 or (of_groups and (wk % 4 or groups > 1)):
            continue
        if wk * wl * groups != WARPS or plan.all_units % (4 * wk) or second.inner % (4 * wl):
            continue
        if 16 * wk % plan.rank == 0 and plan.shared <= gpu.shared:
            yield replace(plan, us=_gradient_time(plan))


def _gradient_time(plan: MonarchGradient) -> float:
    """Microseconds: multiprocessors take chunks in turn, and what warps read and multiply partly overlaps."""
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    chunks = -(-plan.batch // plan.samples)
    each = -(-chunks // plan.most) * -(-plan.split // gpu.sms)
    loaded = plan.samples * (plan.columns + 4 * plan.wl * second.q) * size
    warps = plan.wk * plan.wl
    read = (plan.samples * 8 + plan.samples // 16 * 64) * (first.p + second.q) * size * (0.64 if plan.wgmma else 1.0)
    products = 2 * 2 * plan.samples * 64 * (first.p + second.q) / (0.6 * 8.9e6 * (1 if size == 2 else 0.5))
    chunk = max(warps * read / gpu.shared_bytes, loaded / (0.8 * gpu.l2_bytes)) + 0.5 * warps * products + OWN_COPY_US
    ends = 2 * plan.most * plan.weights * 4 / (gpu.l2_bytes * gpu.sms)
    return 6.0 + each * chunk + ends


def back_tilings(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[MonarchBack]:
    first, second = chain.contractions
    step = 32 // ELEMENT_BYTES[dtype]
    for wk, mt, groups, stages in itertools.product((1, 2, 4, 8), (1, 2), (2, 4, 8), (3, 2)):
        plan = MonarchBack(chain, dtype, wk, WARPS // wk, mt, groups, stages, batch, gpu)
        if plan.all_units % (4 * wk) or groups % (step // 4) or second.inner % groups:
            continue
        if 16 // plan.rank * first.p * mt // 2 <= MOST_SUMS // 2 and plan.shared <= gpu.shared:
            yield replace(plan, us=_back_time(plan))


def _back_time(plan: MonarchBack) -> float:
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    each = -(-plan.batch // plan.samples) / max(1, gpu.sms // plan.split)
    grad, weights = plan.samples * second.q, 16 * plan.wk * (first.p + second.q)
    read = WARPS * (16 * plan.mt * second.q + 16 * (first.p + second.q)) * size
    products = 2 * plan.samples * 16 * plan.wk * (first.p + second.q) / (0.6 * 8.9e6 * (1 if size == 2 else 0.5))
    chunk = max(read / gpu.shared_bytes, (grad + weights) * size / (0.8 * gpu.l2_bytes)) + 0.5 * products
    return 5.0 + max(each, 1.0) * (second.inner * chunk + OWN_COPY_US * second.inner / plan.groups)
