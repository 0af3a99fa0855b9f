"""All gradients of two factors in one pass: csrc/engine/pair_backward.cuh, its tiles and source."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

from factorlayer.chain import Chain
from factorlayer.device import ELEMENT, MATH
from factorlayer.gpu import ELEMENT_BYTES, Gpu
from factorlayer.gradient import kernel
from factorlayer.resident import round_up

LARGEST = 64  # size whose sums a warp can hold
MOST_WARPS = 12  # of a block: registers of a thread are then 168


@dataclass(frozen=True)
class PairBackward:
    """A pass, tiled. `us` is the time predicted."""

    sizes: tuple[int, int, int, int]  # p0, p1, q0, q1
    dtype: str
    units_per_sample: int
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def warps(self) -> int:
        """Of a group."""
        return -(-self.sizes[0] // 16)

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    @functools.cached_property
    def shared(self) -> int:
        p0, p1, q0, q1 = (round_up(n, 16) for n in self.sizes)
        x, g = p0 * (p1 + 8), q0 * (q1 + 8)
        group = self.slots * (x + g) + p0 * (q1 + 8) + x
        return (q1 * (p1 + 8) + self.groups * group) * self.size

    @property
    def weights(self) -> int:
        p0, p1, q0, q1 = self.sizes
        return p0 * q0 + p1 * q1

    @property
    def split(self) -> int:
        return 1

    @property
    def units_per_block(self) -> int:
        return self.groups

    @property
    def most(self) -> int:
        """Blocks, each with sums of its own."""
        return self.gpu.sms

    @property
    def part_bytes(self) -> int:
        """Of what all blocks write, at most."""
        return self.most * self.weights * 4

    def __str__(self) -> str:
        p0, p1, q0, q1 = self.sizes
        return (
            f"pair, backward: {p1}→{q1}, {p0}→{q0}, {self.groups} groups of {self.warps} warps, {self.slots} slots, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        p0, p1, q0, q1 = self.sizes
        numbers = {"P0": p0, "P1": p1, "Q0": q0, "Q1": q1, "UNITS_PER_SAMPLE": self.units_per_sample}
        numbers |= {"WARPS": self.warps, "GROUPS": self.groups, "SLOTS": self.slots}
        numbers |= {"COPY": math.gcd(16, p1 * self.size, q1 * self.size), "STORE": math.gcd(16, p1 * self.size)}
        lines = [f"using Math = {MATH[self.dtype]};", f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        return kernel(name, "pair_backward.cuh", "PairBackward", lines, self.threads, 1)


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> PairBackward | None:
    """None where this family has no kernel."""
    if dtype not in ("bfloat16", "float16") or len(chain.contractions) != 2:
        return None
    first, second = sorted(chain.contractions, key=lambda c: c.weight)
    p0, p1, q0, q1 = sizes = (first.p, second.p, first.q, second.q)
    if not (first.tied and second.tied) or max(sizes) > LARGEST or min(sizes) < 8 or p1 % 2 or q1 % 2:
        return None
    if second.inner != 1 or first.inner not in (p1, q1) or second.outer not in (first.outer * p0, first.outer * q0):
        return None
    for groups, slots in itertools.product(range(8, 0, -1), (3, 2)):
        plan = PairBackward(sizes, dtype, first.outer, groups, slots, gpu)
        if plan.threads <= 32 * MOST_WARPS and plan.shared <= gpu.shared:
            return replace(plan, us=_time(plan, batch))
    return None


def _time(plan: PairBackward, batch: int) -> float:
    """Predicted microseconds."""
    p0, p1, q0, q1 = (round_up(n, 16) for n in plan.sizes)
    units = -(-batch * plan.units_per_sample // (plan.gpu.sms * plan.groups)) * plan.groups
    memory = (2 * p0 * p1 + q0 * q1) * plan.size / (0.9 * plan.gpu.memory_bytes)
    products = (2 * p0 * p1 * q1 + 2 * p0 * q0 * q1 + p0 * p1 * q1) / (0.5 * plan.gpu.flops[plan.dtype])
    return 6.0 + units * max(memory, products, 0.1)
