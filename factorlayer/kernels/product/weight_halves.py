"""The pass that splits the weights of wide products of floats: weight_halves.cuh."""

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
    """The pass that splits weights into halves, for all passes of a plan that want them; these count its time as
    theirs."""

    of: tuple[Wide, ...]

    shared = 0
    threads = 512
    us = 0.0

    @property
    def prepared_at(self) -> int:
        return self.of[0].halves_at

    @property
    def prepared_bytes(self) -> int:
        """Bytes of all halves and scales."""
        return sum(p.halves_bytes + 4 * p.weight_rows for p in self.of)

    @property
    def split(self) -> int:
        rows = max(p.weight_rows for p in self.of)
        return min(-(-rows * 32 // self.threads), 2 * self.of[0].gpu.sms)

    def __str__(self) -> str:
        return f"weights split: {self.prepared_bytes} bytes"

    @property
    def told(self) -> list[str]:
        lines = constants({"THREADS": self.threads})
        for i, p in enumerate(self.of):
            told = {"WEIGHT": p.product.contraction.weight, "P": p.product.contraction.p, "ROWS": p.weight_rows}
            told |= {"TERMS": p.summed, "PART": p.part, "CHUNKS": p.chunks}
            told |= {"AT": Long(p.halves_at), "SCALES": Long(p.scales_at)}
            lines += [f"struct W{i} {{ {' '.join(constants(told))} }};"]
        calls = " ".join(f"c.template weight<W{i}>();" for i in range(len(self.of)))
        return [*lines, f"template <class C> static DEVICE void weights(const C& c) {{ {calls} }}"]


def with_halves(
    passes: tuple[Each | Wide | WeightHalves, ...], begin: int = 0
) -> tuple[Each | Wide | WeightHalves, ...]:
    """Passes, with one before them if any wants its weight split, to bytes from `begin` on."""
    splitting = [p for p in passes if isinstance(p, Wide) and p.splits]
    if not splitting:
        return passes
    halves = itertools.accumulate((p.halves_bytes for p in splitting), initial=begin)
    scales = itertools.accumulate(
        (4 * p.weight_rows for p in splitting), initial=begin + sum(p.halves_bytes for p in splitting)
    )
    placed = [
        replace(p, halves_at=at, scales_at=of_scales)
        for p, at, of_scales in zip(splitting, halves, scales, strict=False)
    ]
    further = iter(placed)
    rest = [p for p in passes if not isinstance(p, WeightHalves)]
    return (WeightHalves(tuple(placed)), *(next(further) if p in splitting else p for p in rest))
