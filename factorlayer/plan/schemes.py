"""The ways in which the CUDA engine can run a chain or a stack at one visit, for people to compare.

planner.py takes the fastest by prediction; here is the fastest of each kind: by where a pass hands its states on,
whether the weights stay in shared memory, and how many samples a tile has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels import resident_stack, tiling
from factorlayer.kernels.batches import BATCHES
from factorlayer.kernels.kronecker import pair, small_float, triple
from factorlayer.kernels.kronecker.pair import Pair
from factorlayer.kernels.kronecker.small_float import SmallFloat
from factorlayer.kernels.monarch import monarch_through
from factorlayer.kernels.passes import Pass, class_us
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.product.whole import Instead
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.stack import dense, dense_streamed
from factorlayer.kernels.stages import Sandwich, TileUs
from factorlayer.maths.chain import Chain
from factorlayer.plan.cuts import cuts
from factorlayer.plan.layers import plan
from factorlayer.plan.plan import Plan
from factorlayer.plan.planner import parsed
from factorlayer.plan.products import one_by_one
from factorlayer.plan.registry import family_of
from factorlayer.plan.registry.product import OF_WHOLE

REGISTERS, SHARED, MEMORY, NOWHERE = "registers", "shared memory", "memory", "none"
CLUSTER = "shared memory of a cluster"
RESIDENT, STREAMED, MULTIPLIED_OUT = "resident", "streamed", "multiplied out"


@dataclass(frozen=True)
class Scheme:
    states: str  # where one contraction leaves what the next one takes
    weights: str  # resident in shared memory, streamed through it, or one of both
    samples: str  # of a tile
    plan: Plan

    @property
    def kind(self) -> tuple[type[Pass], str, str, str]:
        return type(self.plan.passes[0]), self.states, self.weights, self.samples

    @kept
    def us(self) -> float:
        """What it is compared by: the time predicted for the class of batches."""
        return class_us(self.plan.passes, self.plan.batch)

    @property
    def shared(self) -> int:
        """Most bytes of shared memory for a block of any of its kernels."""
        return max(p.shared for p in self.plan.passes)


def schemes(text: str, dtype: str, batch_class: int, gpu: Gpu) -> list[Scheme]:
    """The ways to run a chain or a stack forward; the fastest by prediction first."""
    layers, dtype = parsed(text, dtype)
    batch = BATCHES[batch_class]
    found = _of_stack(layers, dtype, batch, gpu) if len(layers) > 1 else _of_chain(layers[0], dtype, batch, gpu)
    best: dict[tuple[type[Pass], str, str, str], Scheme] = {}
    for scheme in found:
        if scheme.kind not in best or scheme.us < best[scheme.kind].us:
            best[scheme.kind] = scheme
    return sorted(best.values(), key=lambda scheme: scheme.us)


def _of_stack(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> Iterator[Scheme]:
    for tiled in dense.tilings(layers, dtype, batch, gpu):
        yield Scheme(REGISTERS, RESIDENT, str(64 * tiled.groups), Plan(layers[0], dtype, batch, gpu, tiled.passes))
    for streamed in dense_streamed.tilings(layers, dtype, batch, gpu):
        yield Scheme(SHARED, STREAMED, str(64 * streamed.groups), Plan(layers[0], dtype, batch, gpu, streamed.passes))
    for held in resident_stack.tilings(layers, dtype, batch, gpu):
        states = SHARED + ", in place" * held.in_place
        yield Scheme(states, RESIDENT, str(held.units), Plan(layers[0], dtype, batch, gpu, held.passes))


def _of_chain(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[Scheme]:
    alone = len(chain.contractions) == 1

    def of(states: str, weights: str, samples: Fraction, *passes: Pass) -> Scheme:
        return Scheme(
            NOWHERE if alone else states, weights, str(samples), Plan(chain, dtype, batch, gpu, with_halves(passes))
        )

    for works in cuts(chain, dtype):
        if len(works) > 1:
            continue
        (work,) = works
        paired = pair.tile(work, batch, gpu)
        if paired:
            yield of(REGISTERS, RESIDENT, _samples(paired), paired)
        clustered = triple.tile(work, batch, gpu)
        if clustered:
            yield of(CLUSTER, RESIDENT, _samples(clustered), clustered)
        few = small_float.tile(work, batch, gpu)
        if few:
            yield of(SHARED, RESIDENT, _samples(few), few)
        for _, fields, made in tiling.candidates(work, batch, gpu):
            tiled = replace(Resident(*fields), tile_us=TileUs(*made))
            stays = any(isinstance(stage, Sandwich) for stage in tiled.stages)
            yield of(REGISTERS if stays else SHARED + ", in place" * tiled.in_place, RESIDENT, _samples(tiled), tiled)
    if chain.is_dense:
        for streamed in dense_streamed.tilings((chain,), dtype, batch, gpu):
            yield of(NOWHERE, STREAMED, Fraction(64 * streamed.groups), *streamed.passes)
    for at_once in monarch_through.tilings(chain, dtype, batch, gpu):
        yield of(REGISTERS, RESIDENT, _samples(at_once), at_once)
    best, each = plan(chain, dtype, batch, gpu).passes, one_by_one(chain, dtype, batch, gpu)
    if family_of(best[0]) in OF_WHOLE:
        yield of(NOWHERE, MULTIPLIED_OUT, _samples(best[-1]), *best)
    if len(best) > 1 and all(isinstance(p, Pair | Resident | SmallFloat) for p in best):
        yield of(MEMORY, RESIDENT, _samples(best[0]), *best)
    yield of(MEMORY, STREAMED, _samples(each[0]), *each)


def _samples(p: Pass) -> Fraction:
    """How many samples a tile has."""
    p = p.of if isinstance(p, Instead) else p
    units = p.units if isinstance(p, Resident) else p.rows if isinstance(p, Mapped | Wide) else p.units_per_block
    return Fraction(units, p.units_per_sample)
