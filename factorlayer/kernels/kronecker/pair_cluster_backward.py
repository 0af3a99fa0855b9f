"""All gradients of two factors by one kernel, where samples are so few that a cluster of blocks takes them all:
pair_cluster_backward.cuh, its tiles and source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.code import constants, kinds
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.gradient import SUM_BYTES
from factorlayer.kernels.kronecker.pair_few_backward import takes
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.work import Inputs, Mode, OfTwoModes, told_inputs

CLUSTER = 8  # blocks, as any GPU with clusters has
MOST_SLOTS, MOST_THREADS = 4, 256
START_US = 0.8  # with the first unit on its way
UNIT_US = 0.35  # of waits, for each of a group
EXCHANGE_US = 0.6  # of sums
REGISTERS = {8: 128, 4: 96, 2: 80}  # beside the sums, by bytes of an element


@dataclass(frozen=True)
class PairClusterBackward(OfTwoModes):
    """A pass, tiled. `us` is the time predicted."""

    modes: tuple[Mode, Mode]
    dtype: str
    units_per_sample: int
    span: int  # of a strip
    groups: int  # of a block
    warps: int  # of a group
    slots: int
    batch: int
    gpu: Gpu
    cluster: int = CLUSTER
    us: float = 0.0
    inputs: Inputs | None = None
    bias: bool = False  # makes its gradient as well

    units_per_block = 1 << 40  # one block, but for the other direction of the grid
    blocks_per_sm = 0  # as many as there is work
    reads, writes = "x", "y"
    is_apart = True

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.groups

    def with_bias(self, batch: int) -> PairClusterBackward:
        return replace(self, bias=True)

    def outputs(self, batch: int) -> tuple[int, ...]:
        return batch * self.output_bytes, self.made * self.size

    @property
    def parts(self) -> int:
        """Units taken at once."""
        return self.cluster * self.groups

    @property
    def split(self) -> int:
        """Blocks: a cluster for each strip of either weight's gradient, and of x's, and one for a bias's."""
        p0, _, _, q1 = self.sizes
        return ((2 * p0 + q1) // self.span + self.bias) * self.cluster

    @property
    def made(self) -> int:
        """Elements of gradients, but for that of x."""
        _, _, q0, q1 = self.sizes
        return self.weights + self.bias * self.units_per_sample * q0 * q1

    @kept
    def sums(self) -> int:
        """Sums of a block."""
        _, p1, q0, _ = self.sizes
        return self.span * max(q0, p1)

    @kept
    def shared(self) -> int:
        p0, p1, q0, q1 = self.sizes
        padding = 8 if self.size == 2 else 4
        x, g, a, s = (n + padding for n in (p1, q1, p0, self.span))
        weights = max(q1 * x + q0 * s, q0 * a)
        slot = max(self.span * x + q0 * g, p0 * x + q0 * s)
        state = max(self.span * g, p0 * s)
        staged = self.warps * 16 * (32 + padding) * self.size if self.size == 2 else 0
        received = max(self.sums * SUM_BYTES[self.dtype], staged)
        found = (weights + self.groups * (self.slots * slot + state)) * self.size + self.groups * received
        return max(found, self.bias * 256 * 16 // self.size * SUM_BYTES[self.dtype])

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        return self.sums // (32 * self.warps) * max(1, self.size // 4) + REGISTERS[self.size]

    @property
    def fits(self) -> bool:
        return self.shared <= self.gpu.shared and self.threads * self.registers <= 65536 and self.registers <= 255

    def us_of(self, batch: int) -> float:
        """Predicted microseconds."""
        p0, p1, q0, q1 = self.sizes
        gpu, size = self.gpu, self.size
        products = self.span * max(q1 * (p1 + q0), q0 * (p0 + p1))  # of a group's unit
        rate = (0.4 if size == 2 else 0.8) * gpu.flops[self.dtype] * min(1.0, self.warps / 4)
        read = products / 16 * (1 + 16 / min(self.span, 32)) * size / gpu.shared_bytes
        unit = max(
            2 * products / rate, read * self.groups, 2 * products * self.groups / (rate / min(1.0, self.warps / 4))
        )
        weights = max(q1 * p1 + q0 * self.span, q0 * p0) * size
        load = (weights + self.groups * max(self.span * p1 + q0 * q1, p0 * p1 + q0 * self.span) * size) / gpu.l2_bytes
        exchange = EXCHANGE_US + 2 * self.groups * self.sums * SUM_BYTES[self.dtype] / gpu.l2_bytes
        waves = -(-self.split // gpu.sms)
        rounds = math.ceil(batch * self.units_per_sample / self.parts)
        return START_US + exchange + waves * (load + (UNIT_US + unit) * rounds)

    @property
    def details(self) -> str:
        groups = f"{self.cluster} blocks of {self.groups} groups of {self.warps} warps"
        return f"{self.contracted}, strips of {self.span}, {groups}, {self.slots} slots"

    def __str__(self) -> str:
        return super().__str__() + (", with the bias's" if self.bias else "")

    @property
    def told(self) -> list[str]:
        numbers = {"UNITS": self.units_per_sample, "SPAN": self.span, "CLUSTER": self.cluster, "BIAS": self.bias}
        numbers |= {"GROUPS": self.groups, "WARPS": self.warps, "SLOTS": self.slots, "GRAD": 2}
        return kinds(self.dtype) + constants({**told_inputs(self.inputs), **self.told_sizes, **numbers})


def tile(
    modes: tuple[Mode, ...], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> PairClusterBackward | None:
    """The fastest by prediction; None where this family has no kernel. `outer` is the size of what lies before them."""
    if not gpu.clusters or not takes(modes, dtype, batch, inputs):
        return None
    return fastest(tilings((modes[0], modes[1]), outer, dtype, batch, gpu, inputs), batch)


def tilings(
    modes: tuple[Mode, Mode], outer: int, dtype: str, batch: int, gpu: Gpu, inputs: Inputs | None = None
) -> Iterator[PairClusterBackward]:
    for span, groups, warps in itertools.product((64, 32, 16), (1, 2, 4), (1, 2, 4, 8)):
        if modes[0].p % span or modes[1].q % span or groups * warps * 32 > MOST_THREADS:
            continue
        for slots in range(MOST_SLOTS, 1, -1):
            plan = PairClusterBackward(modes, dtype, outer, span, groups, warps, slots, batch, gpu, inputs=inputs)
            if plan.fits:
                yield plan
                break
