"""A work of a Kronecker product, one pass of a cut, by the family that is predicted to be the fastest."""

from __future__ import annotations

import math
from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.kronecker import columns, double_pair, eights, pair, small, strip, triple
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import wide, wide_resident
from factorlayer.kernels.product.few import Few
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.streamed import Product, Streamed
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.tiling import tile
from factorlayer.kernels.work import Work
from factorlayer.maths.spec import Contraction
from factorlayer.plan.plan import BATCHES
from factorlayer.plan.products import product_pass

# What a family's predicted time is multiplied by where another family's stands beside it. They were chosen so that an
# H200 gets the faster of the two in the tables' rows; one cost model for all families would need none of them.
COLUMNS, COLUMNS_PADDED = 1.2, 0.6  # beside resident passes, whose predictions are too short with padded modes
PAIR, PAIR_OF_FEW = 0.85, 1.15  # beside resident passes, which start faster: it shows where units are few


def least_us(passes: list[Work], batch: int, gpu: Gpu) -> float:
    """No tiling of them is predicted to be faster."""
    elements = sum((math.prod(p.states[0]) + math.prod(p.states[-1])) * p.outer * p.inner for p in passes)
    return 2.0 * len(passes) + batch * elements * ELEMENT_BYTES[passes[0].dtype] / gpu.memory_bytes / gpu.sms


def tile_all(passes: list[Work], batch: int, gpu: Gpu) -> tuple[Pass, ...] | None:
    tiled = []
    for work in passes:
        found = _fastest(work, batch, gpu)
        if found is None:
            return None
        tiled.append(found)
    return tuple(tiled)


def _fastest(work: Work, batch: int, gpu: Gpu) -> Pass | None:
    """Of all families, by predicted times and the margins between them."""
    if work.terms > 1 or work.apart:
        return tile(work, batch, gpu)
    resident, paired = tile(work, batch, gpu), pair.tile(work, batch, gpu)
    others = (family.tile(work, batch, gpu) for family in (small, eights, strip, double_pair, triple))
    found: list[tuple[float, Pass]] = [(p.us, p) for p in (resident, *others) if p]
    by_columns = columns.tile(work, batch, gpu)
    if by_columns:
        padded = any(n % 8 for state in work.states for n in state)
        found.append((by_columns.us * (COLUMNS_PADDED if padded else COLUMNS), by_columns))
    if paired:
        found.append((paired.us * (PAIR if batch * work.outer > gpu.sms else PAIR_OF_FEW), paired))
    else:
        single = _single(work, batch, gpu)
        if single and (isinstance(single, Mapped | Wide) or not found):
            found.append((single.us, single))
    return min(found, key=lambda each: each[0])[1] if found else None


def _single(work: Work, batch: int, gpu: Gpu) -> Few | Mapped | Streamed | Wide | None:
    """A pass of one factor whose weight comes from memory again and again, and maybe of one of 8 before it."""
    if any(len(mode.parts) > 1 for _, mode in work.steps) or len(work.steps) != len(work.sizes) or work.rank > 1:
        return None
    *before, mode = (mode for _, mode in sorted(work.steps, key=lambda step: step[0]))
    ((weight, q, p),) = mode.parts
    outer = work.outer * math.prod(each.p for each in before)
    contraction = Contraction(weight, outer, p, q, work.inner, tied=True)
    product = Product(
        work.dtype, contraction, work.inner, 1, 1, q, bias=work.bias, activation=work.activation, scalars=work.scalars
    )
    if not before:
        return product_pass(product, batch, gpu)
    mixes = len(before) == 1 and before[0].p == before[0].q == wide.MIXED and batch > BATCHES[0]
    if not mixes:
        return None
    product = replace(product, mixed=before[0].parts[0][0])
    tiled = (family.tile(product, batch, gpu) for family in (wide, wide_resident))
    return min((p for p in tiled if p), key=lambda p: p.us, default=None)
