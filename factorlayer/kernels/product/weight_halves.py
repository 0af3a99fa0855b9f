"""The pass that puts weights of wide products in order, those of floats split, others shifted: weight_halves.cuh."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TypeVar

from factorlayer.device.code import Long, constants
from factorlayer.kernels.passes import Preparing
from factorlayer.kernels.product.wide import Wide

Each = TypeVar("Each")


@dataclass(frozen=True)
class WeightHalves(Preparing):
    """The pass that splits weights into halves, or shifts them, for all passes of a plan that want that; these count
    its time as theirs."""

    of: tuple[Wide, ...]

    shared = 0
    threads = 128
    us = 0.0

    @property
    def prepared_at(self) -> int:
        return self.of[0].halves_at

    @property
    def prepared_bytes(self) -> int:
        """Bytes of all halves and scales."""
        return sum(p.halves_bytes + p.scale_bytes for p in self.of)

    @property
    def split(self) -> int:
        threads = max(p.weight_rows * 32 if p.splits else p.halves_bytes // 16 for p in self.of)
        return min(-(-threads // self.threads), 8 * self.of[0].gpu.sms)

    def __str__(self) -> str:
        return f"weights {'split' if self.of[0].splits else 'shifted'}: {self.prepared_bytes} bytes"

    @property
    def told(self) -> list[str]:
        lines = constants({"THREADS": self.threads})
        for i, p in enumerate(self.of):
            told = {"WEIGHT": p.product.contraction.weight, "P": p.product.contraction.p, "ROWS": p.weight_rows}
            told |= {"TERMS": p.summed, "PART": p.part, "CHUNKS": p.chunks}
            block = p.product.contraction.p if p.product.groups > 1 else 0
            told |= {"EVERY": p.every, "Q": p.product.contraction.q}
            told |= {"X_ROW": p.row % p.piece, "X_BLOCK": block % p.piece}
            told |= {"AT": Long(p.halves_at), "SCALES": Long(p.scales_at)}
            lines += [f"struct W{i} {{ {' '.join(constants(told))} }};"]
        calls = " ".join(_put(p, i) for i, p in enumerate(self.of))
        return [*lines, f"template <class C> static DEVICE void weights(const C& c) {{ {calls} }}"]


def _put(wide: Wide, number: int) -> str:
    return f"c.template {f'split<W{number}>' if wide.splits else f'shift<W{number}, u{8 * wide.product.size}>'}();"


def with_halves(
    passes: tuple[Each | Wide | WeightHalves, ...], begin: int = 0
) -> tuple[Each | Wide | WeightHalves, ...]:
    """Passes, with one before them if any wants its weight in order, in bytes from `begin` on."""
    taking = [p for p in passes if isinstance(p, Wide) and p.reads_prepared]
    if not taking:
        return passes
    halves = itertools.accumulate((p.halves_bytes for p in taking), initial=begin)
    scales = itertools.accumulate((p.scale_bytes for p in taking), initial=begin + sum(p.halves_bytes for p in taking))
    placed = [
        replace(p, halves_at=at, scales_at=of_scales) for p, at, of_scales in zip(taking, halves, scales, strict=False)
    ]
    further = iter(placed)
    rest = [p for p in passes if not isinstance(p, WeightHalves)]
    return (WeightHalves(tuple(placed)), *(next(further) if p in taking else p for p in rest))
