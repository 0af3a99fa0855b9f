"""Several layers that one pass takes, forward or back, and how a stack is cut into runs of such layers."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.stack import dense, dense_backward, dense_backward32, dense_streamed, layer_backward
from factorlayer.kernels.stack.dense import Dense
from factorlayer.kernels.stack.dense_streamed import WeightChunks
from factorlayer.maths.chain import Chain
from factorlayer.plan.layers import plan
from factorlayer.plan.plan import BATCHES, PASS_WEIGHT, Plan, PlanError


def plan_stack(
    layers: tuple[Chain, ...],
    dtype: str,
    batch: int,
    gpu: Gpu,
    backward: bool = False,
    states: bool = False,
    frozen: bool = False,
) -> Plan:
    """Of layers that one pass takes, and stores the states between if these are wanted, or that makes all gradients. If
    they are frozen, what is done with weights alone takes no time."""
    if backward:
        families = (dense_backward, dense_backward32, layer_backward)
        tiled = [family.tile(layers, dtype, batch, gpu) for family in families]
    else:
        tiled = [dense.tile(layers, dtype, batch, gpu, states)]
        # Weights that stay in shared memory are faster: six layers of 128, 1.3 million samples, 401 us instead of 517.
        streams = tiled[0] is None and _streams(layers, dtype, gpu, states)
        tiled += [dense_streamed.tile(layers, dtype, batch, gpu, states, frozen)] if streams else []

    def us(p: Dense) -> float:
        return math.fsum(each.us for each in p.passes if not (frozen and isinstance(each, WeightChunks)))

    found = min((p for p in tiled if p), key=us, default=None)
    if found is None:
        which = "makes all gradients" if backward else "takes all layers"
        raise PlanError(f"no pass {which} of {' | '.join(layer.text for layer in layers)!r}")
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, found.passes)


@functools.lru_cache(256)
def _streams(layers: tuple[Chain, ...], dtype: str, gpu: Gpu, states: bool) -> bool:
    """Whether a pass that streams their weights is predicted to be faster than layer by layer, for many samples: layers
    that have a kernel for these have one for few as well."""
    found = dense_streamed.tile(layers, dtype, BATCHES[-1], gpu, states)
    if found is None:
        return False
    alone = PASS_WEIGHT * sum(plan(layer, dtype, BATCHES[-1], gpu).us for layer in layers)
    return sum(p.us for p in found.passes) < alone
