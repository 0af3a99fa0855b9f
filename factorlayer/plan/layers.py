"""The plan of one chain: a layer forward, or what a backward pass asks for."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product.streamed import products, y_turned
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.plan import gradients, kept
from factorlayer.plan.forward import forward
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.registry.family import fastest
from factorlayer.plan.registry.product import OF_SLABS, OF_TURN


@functools.lru_cache(256)
def plan(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan:
    passes, keeps = kept.passes_of(chain, dtype, batch, gpu) if chain.kept else (_passes(chain, dtype, batch, gpu), ())
    return Plan(chain, dtype, batch, gpu, with_halves(passes), keeps)


def _passes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if chain.gradient:
        return gradients.of_weight(chain, dtype, batch, gpu)
    if chain.slope or chain.through or chain.sums:
        return gradients.behind(chain, dtype, batch, gpu)
    if chain.backward:
        return gradients.all_gradients(chain, dtype, batch, gpu)
    if chain.slabs:
        return _by_slabs(chain, dtype, batch, gpu)
    if chain.turn and not (chain.contractions and y_turned(chain)):
        return _turned(chain, chain.turn, dtype, batch, gpu)
    return forward(chain, dtype, batch, gpu)


def _by_slabs(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """One contraction that makes a state which lies by slabs."""
    (product,) = products(chain, dtype)
    found = fastest(OF_SLABS, product, batch, gpu)
    if not found:
        raise PlanError(f"no pass makes {chain.text!r}")
    return found


def _turned(chain: Chain, turn: tuple[int, int, int], dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A turn by itself, behind contractions if there are any, none of which can store its y so."""
    first = plan(replace(chain, turn=None), dtype, batch, gpu).passes if chain.contractions else ()
    mixed = chain.mixed[1:] if chain.mixed else None
    if mixed and (chain.contractions or math.prod(mixed) != turn[1]):
        raise PlanError(f"{chain.text!r} turns other rows than it mixes")
    return *first, *fastest(OF_TURN, *turn, dtype, batch, gpu, mixed=mixed)
