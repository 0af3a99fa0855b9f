"""Both gradients of one factor in one pass: csrc/engine/single_backward.cuh, its tiles and source."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device import ELEMENT, MATH, headers, kernel
from factorlayer.gpu import ELEMENT_BYTES, Gpu
from factorlayer.gradient import (
    HIDDEN,
    MOST_GROUPS,
    OTHER_REGISTERS,
    PART_BYTES,
    START_US,
    UNIT_US,
    BlockSums,
)
from factorlayer.resident import round_up
from factorlayer.spec import Contraction

LARGEST = 128  # whose sums a group can hold
SPANS = (16, 32, 64, 128)


@dataclass(frozen=True)
class SingleBackward(BlockSums):
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

    split = 1
    units_per_block = 1  # so that few units have a multiprocessor each

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def by_columns(self) -> bool:
        return self.contraction.inner > 1

    @property
    def weights(self) -> int:
        return self.contraction.p * self.contraction.q

    @property
    def units_per_sample(self) -> int:
        c = self.contraction
        return c.outer * c.inner // self.span

    @property
    def at_once(self) -> int:
        """Tiles of 8 columns that a warp makes, at most."""
        return 4 if self.dtype in ("float32", "float64") or self.contraction.q > 64 else 8

    @property
    def warps(self) -> int:
        return self.rows * self.parts * self.groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @functools.cached_property
    def tiles(self) -> tuple[int, int]:
        """Pieces of a part of dX's columns, and tiles of 8 in each."""
        count = -(-(self.span if self.by_columns else self.contraction.p) // (8 * self.parts))
        pieces = -(-count // self.at_once)
        return pieces, round_up(-(-count // pieces), 2 if self.size == 2 else 1)

    @property
    def columns(self) -> int:
        pieces, tiles = self.tiles
        return 8 * self.parts * pieces * tiles

    @property
    def turns(self) -> int:
        """Of a warp, by rows: 16 rows of the weight's gradient in each."""
        return -(-round_up(self.contraction.q, 16) // (16 * self.rows))

    @functools.cached_property
    def registers(self) -> int:
        """Of a thread, about: sums of the weight's gradient, the weight, and what is made at once with an operand."""
        q = round_up(self.contraction.q, 16)
        kept = 16 * q if self.by_columns else self.turns * 16 * self.columns // self.parts
        held = {"float32": 0, "bfloat16": 8, "float16": 8}.get(self.dtype, 16) * q if self.by_columns else 0
        made = 8 * 16 * self.tiles[1] * (2 if self.dtype == "float32" else 1)
        return (kept + held + made) * max(1, self.size // 4) // 32 + OTHER_REGISTERS[self.dtype]

    @functools.cached_property
    def shared(self) -> int:
        pad, q = 8 if self.size == 2 else 4, round_up(self.contraction.q, 16)
        rows, x = 16 * self.rows, self.columns + pad
        slot = rows * x + (q * x if self.by_columns else rows * (q + pad))
        weight = q * ((rows if self.by_columns else self.columns) + pad)
        staged = self.rows * self.parts * 16 * (8 * self.tiles[1] + 8) if self.size == 2 else 0
        return (weight + self.groups * (self.slots * slot + staged)) * self.size

    def __str__(self) -> str:
        c = self.contraction
        return (
            f"single, backward: {c.p}→{c.q} by {'columns' if self.by_columns else 'rows'}, {self.span} at once, "
            f"{self.groups} groups of {self.rows}×{self.parts} warps, {self.slots} slots, "
            f"{self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        c = self.contraction
        numbers = {"P": c.p, "Q": c.q, "SPAN": self.span, "INNER": c.inner, "GRAD": 1}
        numbers |= {"UNITS_PER_SAMPLE": self.units_per_sample, "ROWS": self.rows, "PARTS": self.parts}
        numbers |= {"GROUPS": self.groups, "SLOTS": self.slots, "AT_ONCE": self.at_once}
        lines = [f"using Math = {MATH[self.dtype]};", f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        lines += [f"static constexpr bool BY_COLUMNS = {str(self.by_columns).lower()};"]
        code = headers("sums.cuh", "operands.cuh", "single_backward.cuh")
        return kernel(code, name, "SingleBackward", lines, self.threads, 1)


def tile(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> SingleBackward | None:
    """The fastest tiling by prediction; None where this family has no kernel."""
    plans = [replace(plan, us=_time(plan, batch)) for plan in _tilings(contraction, dtype, gpu)]
    return min(plans, key=lambda plan: plan.us, default=None)


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
            most = 65536 // (128 * round_up(plan.registers, 8)) * 4  # warps: registers are dealt to quarters of four
            exact = plan.columns == span or (c.inner == 1 and groups > 1)  # one group alone waits more than it moves
            if exact and plan.registers <= 255 and plan.warps <= most and plan.shared <= gpu.shared:
                yield plan


def _time(plan: SingleBackward, batch: int) -> float:
    """Predicted microseconds, as of pairs."""
    gpu, c = plan.gpu, plan.contraction
    memory = plan.span * (2 * c.p + c.q) * plan.size / (0.85 * gpu.memory_bytes)
    q, rows = round_up(c.q, 16), 16 * plan.rows
    rate = (0.25 if plan.size == 2 else 0.5) * gpu.flops[plan.dtype]
    if plan.by_columns:
        products = 2 * q * rows * plan.columns
        operands = plan.columns * (2 * plan.rows * q + plan.parts * rows)
    else:
        products = rows * plan.columns * (q + 16 * plan.rows * plan.turns)
        operands = plan.rows * plan.columns * (q + plan.turns * rows) + plan.parts * rows * 2 * q
    units = math.ceil(batch * plan.units_per_sample / gpu.sms)
    warps = plan.rows * plan.parts * min(plan.groups, units)
    busy = (products / rate + (1 - HIDDEN[plan.size]) * operands * plan.size / gpu.shared_bytes) * max(1.0, 8 / warps)
    waits = UNIT_US * math.ceil(units / plan.groups)
    sums = plan.weights * PART_BYTES[plan.dtype]
    ends = 2 * plan.groups * (plan.parts if plan.by_columns else 1) * sums / gpu.shared_bytes + sums / gpu.l2_bytes
    both = units * memory, units * busy + waits
    return START_US + max(both) + 0.1 * min(both) + ends
