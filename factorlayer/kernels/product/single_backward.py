"""Both gradients of one factor in one pass: single_backward.cuh, its tiles and source."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import constants
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.grouped import HELD, MOST_GROUPS, Grouped
from factorlayer.kernels.passes import Pass, fastest
from factorlayer.kernels.work import round_up
from factorlayer.maths.spec import Contraction

LARGEST = 128  # whose sums a group can hold
SPANS = (16, 32, 64, 128)


class OfOneFactor(Pass):
    """A pass that makes both gradients of one factor."""

    contraction: Contraction

    @property
    def by_columns(self) -> bool:
        return self.contraction.inner > 1

    @property
    def contracted(self) -> str:
        """Its contraction in words."""
        return f"{self.contraction.p}→{self.contraction.q} by {'columns' if self.by_columns else 'rows'}"

    @property
    def weights(self) -> int:
        return self.contraction.p * self.contraction.q

    @property
    def output_bytes(self) -> int:
        c = self.contraction
        return c.outer * c.p * c.inner * self.size


@dataclass(frozen=True)
class SingleBackward(OfOneFactor, Grouped):
    """A pass, tiled. `us` is the time predicted."""

    contraction: Contraction
    dtype: str
    span: int  # columns of what lies behind p, or rows if nothing does
    rows: int  # warps of 16 rows of dX each
    parts: int  # of its columns, each with such warps
    groups: int
    slots: int
    gpu: Gpu
    us: float = 0.0

    @property
    def units_per_sample(self) -> int:
        c = self.contraction
        return c.outer * c.inner // self.span

    @property
    def at_once(self) -> int:
        return 4 if self.dtype in ("float32", "float64") or self.contraction.q > 64 else 8

    @kept
    def tiles(self) -> tuple[int, int]:
        """Pieces of a part of dX's columns, and tiles in each."""
        return self.tiles_of(self.span if self.by_columns else self.contraction.p, even=self.size == 2)

    @property
    def columns(self) -> int:
        pieces, tiles = self.tiles
        return 8 * self.parts * pieces * tiles

    @property
    def turns(self) -> int:
        """Turns of a warp, by rows: it makes 16 rows of the weight's gradient in each."""
        return -(-round_up(self.contraction.q, 16) // (16 * self.rows))

    @kept
    def registers(self) -> int:
        q = round_up(self.contraction.q, 16)
        if self.by_columns:
            return self.registers_of(16 * q, HELD[self.dtype] * q, self.tiles[1])
        return self.registers_of(self.turns * 16 * self.columns // self.parts, 0, self.tiles[1])

    @kept
    def shared(self) -> int:
        pad, q = self.padding, round_up(self.contraction.q, 16)
        rows, x = 16 * self.rows, self.columns + pad
        slot = rows * x + (q * x if self.by_columns else rows * (q + pad))
        weight = q * ((rows if self.by_columns else self.columns) + pad)
        return (weight + self.groups * (self.slots * slot + self.staged(self.tiles[1]))) * self.size

    def us_of(self, batch: int) -> float:
        c = self.contraction
        memory = self.span * (2 * c.p + c.q) * self.size / (0.85 * self.gpu.memory_bytes)
        q, rows = round_up(c.q, 16), 16 * self.rows
        if self.by_columns:
            products = 2 * q * rows * self.columns
            operands = self.columns * (2 * self.rows * q + self.parts * rows)
        else:
            products = rows * self.columns * (q + rows * self.turns)
            operands = self.rows * self.columns * (q + self.turns * rows) + self.parts * rows * 2 * q
        sums = self.groups * (self.parts if self.by_columns else 1) * self.weights
        return self.time(batch, memory, products, operands, sums)

    @property
    def details(self) -> str:
        groups = f"{self.groups} groups of {self.rows}×{self.parts} warps"
        return f"{self.contracted}, {self.span} at once, {groups}, {self.slots} slots"

    @property
    def told(self) -> list[str]:
        c = self.contraction
        numbers = self.constants({"P": c.p, "Q": c.q, "SPAN": self.span, "INNER": c.inner, "GRAD": 1})
        return numbers + constants({"BY_COLUMNS": self.by_columns})


def tile(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> SingleBackward | None:
    """The fastest tiling by prediction; None where this family has no kernel."""
    return fastest(_tilings(contraction, dtype, gpu), batch)


def _tilings(c: Contraction, dtype: str, gpu: Gpu) -> Iterator[SingleBackward]:
    size = ELEMENT_BYTES[dtype]
    if max(c.p, c.q) > LARGEST or (c.inner == 1 and (c.p * size % 4 or c.q * size % 4)):
        return
    for span, parts in itertools.product(SPANS, (1, 2, 4)):
        if (c.inner if c.inner > 1 else c.outer) % span or 8 * parts > (span if c.inner > 1 else c.p):
            continue
        rows = -(-c.p // 16) if c.inner > 1 else span // 16
        for groups, slots in itertools.product(range(MOST_GROUPS, 0, -1), (3, 2)):
            plan = SingleBackward(c, dtype, span, rows, parts, groups, slots, gpu)
            exact = plan.columns == span or (c.inner == 1 and groups > 1)  # one group alone waits more than it moves
            if exact and plan.fits:
                yield plan
