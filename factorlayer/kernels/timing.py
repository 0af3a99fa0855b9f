"""What a pass is predicted to take whose groups of warps take tile after tile, from what a tile's traffic and its work
take by themselves; and how soon one can be told to be no faster than another.

The prediction was fitted to thousands of measured tilings; docs/kernels/common.md says how far it is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import COMPARED, class_of
from factorlayer.kernels.stages import TileUs

Timed = TypeVar("Timed", bound=tuple[Any, ...])

BUS = 0.95  # of memory's rate: what tiles beside one another reach
LONGEST_WAIT = 0.075  # of a scheduler's cycles that a warp fills: dependent instructions are a dozen cycles apart
HIDDEN = 0.6  # of the shorter one of a tile's traffic and its work, where the next tile comes while a group works


def waits_of(warps: int) -> float:
    """Times what instructions take on a multiprocessor with so many warps, where they depend on each other."""
    return 1 / (1 - math.exp(-LONGEST_WAIT * warps))


def slower_together(warps: int, in_double: bool) -> float:
    """Times what a group's work takes with so many warps on the multiprocessor. In double few keep it busy: products
    are most of the work there, and take long."""
    return 1.0 if in_double else 1 + 2 / warps


def predict(
    memory: float,
    busy: float,
    barriers: int,
    warps: int,
    groups: int,
    ahead: float,
    tiles: int,
    split: int,
    gpu: Gpu,
    parts: float = 0.0,
    in_double: bool = False,
) -> tuple[float, tuple[float, float, float]]:
    """Microseconds, and the first of what they are made of, as TileUs has it: from those of a tile's traffic and of
    its work in a multiprocessor that has nothing else to do. `ahead` is the share of the traffic that is under way
    while the group works on the tile before. The work has the waits of all warps in it already: those of one group by
    itself are longer. `parts` of sectors that a tile stores take memory's time, which nobody waits for."""
    blocks = max(gpu.sms // split, 1)
    slower = waits_of(warps) / waits_of(groups * warps)
    alone = memory + busy * slower + barriers * gpu.rates.sync_us
    busy *= slower_together(groups * warps, in_double)
    overlapped = groups * (max(memory / BUS, busy) + min(memory, busy) / groups * (1 - HIDDEN * ahead))
    overlapped = max(overlapped, groups * (memory + parts) / BUS)
    made = memory, alone, max(overlapped, alone - memory * ahead)
    return TileUs(*made).of(tiles, groups, blocks, gpu), made


def most_of(batch: int) -> float:
    """The most samples that tilings for so many are compared by."""
    return COMPARED[class_of(batch)][-1] * batch


def us_of_class(batch: int, made: TileUs, units: int, groups: int, blocks: int, total: int, gpu: Gpu) -> float:
    """What tiles of so many units take, in the mean of the numbers of samples that plans are compared by."""
    most, compared = max(1, gpu.sms // blocks), COMPARED[class_of(batch)]
    times = (made.of(math.ceil(each * total / units), groups, most, gpu) for each in compared)
    return math.prod(times) ** (1 / len(compared))


class Fastest:
    """The time of the fastest tiling so far, in microseconds, of those that take so many units: who looks for the
    fastest alone need not see what cannot be faster."""

    def __init__(self, batch: int, gpu: Gpu) -> None:
        self.us, self.gpu, self.compared = math.inf, gpu, COMPARED[class_of(batch)]

    def among(self, tilings: Iterable[Timed]) -> Iterator[Timed]:
        """Each that is faster than the ones before it, by the time that it begins with."""
        for each in tilings:
            if each[0] < self.us:
                self.us = each[0]
                yield each

    def may_be(
        self,
        total: int,
        units: int,
        blocks: int,
        memory: float,
        busy: float,
        warps: int,
        groups: int,
        parts: float = 0.0,
        begin: float = 0.0,
        in_double: bool = False,
    ) -> bool:
        """Whether tiles of so many of `total` units may be faster, whose traffic and work, with the waits of so many
        groups of warps, take at least this. With fewer groups nothing is faster. A pass has its first tile, and those
        of the busiest multiprocessor."""
        alone, busy = memory + busy, busy * slower_together(groups * warps, in_double)
        each = max((memory + parts) / BUS, max(memory / BUS, busy) + min(memory, busy) / groups * (1 - HIDDEN))
        return self.may_take(total, units, blocks, each, alone, begin)

    def may_take(self, total: int, units: int, blocks: int, each: float, alone: float, begin: float = 0.0) -> bool:
        """The same of tiles that take at least `each` beside one another, and one by itself at least as long as
        `alone`."""
        if self.us == math.inf:
            return True
        most, start = units * max(1, self.gpu.sms // blocks), self.gpu.rates.behind_us + begin
        times = (start + max(alone, math.ceil(share * total / most) * each) for share in self.compared)
        return math.prod(times) < self.us ** len(self.compared)
