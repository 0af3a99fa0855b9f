"""A work of a Kronecker product, one pass of a cut, by the family that is predicted to be the fastest."""

from __future__ import annotations

import math
from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import FEW, samples_of_class
from factorlayer.kernels.passes import Pass, class_us
from factorlayer.kernels.product.streamed import Product
from factorlayer.kernels.product.wide import MIXED
from factorlayer.kernels.work import Work
from factorlayer.maths.spec import Contraction
from factorlayer.plan.products import product_pass
from factorlayer.plan.registry.family import fastest, ways
from factorlayer.plan.registry.kronecker import OF_WORK
from factorlayer.plan.registry.product import OF_MIXED_PRODUCT, OF_PRODUCT_AND_SLOPES

LEAST_OF_PASS = 2.0  # microseconds that any takes, however little it moves


def least_us(work: Work, batch: int, gpu: Gpu) -> float:
    """A bound: no tiling of the work is predicted to be faster than this for the class of batches."""
    first, *_, last = work.states
    moved = (math.prod(first) * work.held + math.prod(last) * work.terms) * work.outer * work.inner
    of_sample = least_of_sample(work, moved, 1, gpu)
    samples = samples_of_class(batch)
    return math.prod(LEAST_OF_PASS + each * of_sample for each in samples) ** (1 / len(samples))


def least_of_sample(work: Work, moved: int, times: int, gpu: Gpu) -> float:
    """The least microseconds that the GPU takes for a sample, if a pass moves so many elements and multiplies so many
    times: several factors taken as one are multiplied by `mma.sync` alone."""
    states = zip(work.steps, work.states, strict=False)
    products = sum(mode.q * math.prod(state) for (_, mode), state in states if len(mode.parts) > 1)
    products *= 2 * times * max(work.rank, work.terms) * work.outer * work.inner
    return max(moved * ELEMENT_BYTES[work.dtype] / gpu.memory_bytes, products / gpu.flops[work.dtype]) / gpu.sms


def tile_all(works: list[Work], batch: int, gpu: Gpu, least: list[float], most: float) -> tuple[Pass, ...] | None:
    """The fastest pass of each work; or None, if a work has none, or if all would take `most` microseconds, when works
    that are not tiled yet take their `least`."""
    tiled: list[Pass] = []
    for number, work in enumerate(works):
        if class_us(tiled, batch) + sum(least[number:]) >= most:
            return None
        found = _fastest(work, batch, gpu)
        if found is None:
            return None
        tiled.append(found)
    return tuple(tiled)


def _fastest(work: Work, batch: int, gpu: Gpu) -> Pass | None:
    """The fastest pass of all families, by the times that are predicted for the class of batches."""
    found = [passes[0] for passes in ways(OF_WORK, work, batch, gpu)]
    alone = single(work, batch, gpu)
    return min([*found, *([alone] if alone else [])], key=lambda made: class_us((made,), batch), default=None)


def single(work: Work, batch: int, gpu: Gpu) -> Pass | None:
    """A pass of one factor whose weight comes from memory again and again, and maybe of one of 8 before it."""
    if any(len(mode.parts) > 1 for _, mode in work.steps) or len(work.steps) != len(work.sizes):
        return None
    *before, mode = (mode for _, mode in sorted(work.steps, key=lambda step: step[0]))
    ((weight, q, p),) = mode.parts
    outer, rank = work.outer * math.prod(each.p for each in before), max(work.rank, work.terms)
    contraction = Contraction(weight, outer, p, q, work.inner, tied=True)
    product = Product(work.dtype, contraction, work.inner, 1, 1, q, inputs=work.inputs)
    product = replace(product, bias=work.bias, activation=work.activation, scalars=work.scalars, slope=work.slope)
    product = replace(product, terms_in=rank if work.apart else 1, terms_out=work.terms, terms=rank)
    if not before and work.slope:
        return next(iter(fastest(OF_PRODUCT_AND_SLOPES, product, batch, gpu)), None)
    if not before:
        return product_pass(product, batch, gpu)
    if work.inputs or rank > 1 or batch <= FEW or [(mode.p, mode.q) for mode in before] != [(MIXED, MIXED)]:
        return None
    product = replace(product, mixed=before[0].parts[0][0])
    return next(iter(fastest(OF_MIXED_PRODUCT, product, batch, gpu)), None)
