"""Layers that one pass takes, forward or back."""

from __future__ import annotations

import functools
from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.maths.chain import Chain
from factorlayer.plan import registry
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
    asked = layers, dtype, batch, gpu
    if backward:
        ways = list(registry.ways(registry.OF_STACK_BACK, *asked))
    else:
        ways = list(registry.ways(registry.OF_STACK, *asked, states=states))
        # Weights that stay in shared memory are faster: six layers of 128, 1.3 million samples, 401 us instead of 517.
        if not ways and _streams(layers, dtype, gpu, states):
            ways = list(registry.ways(registry.OF_WIDE_STACK, *asked, states=states, frozen=frozen))

    def us(passes: tuple[Pass, ...]) -> float:
        return sum(p.us for p in passes if not (frozen and p.reads == "none"))

    found = min(ways, key=us, default=None)
    if found is None:
        which = "makes all gradients" if backward else "takes all layers"
        raise PlanError(f"no pass {which} of {' | '.join(layer.text for layer in layers)!r}")
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, found)


@functools.lru_cache(256)
def _streams(layers: tuple[Chain, ...], dtype: str, gpu: Gpu, states: bool) -> bool:
    """Whether a pass that streams their weights is predicted to be faster than layer by layer, for many samples: layers
    that have a kernel for these have one for few as well."""
    found = registry.fastest(registry.OF_WIDE_STACK, layers, dtype, BATCHES[-1], gpu, states=states)
    if not found:
        return False
    alone = PASS_WEIGHT * sum(plan(layer, dtype, BATCHES[-1], gpu).us for layer in layers)
    return sum(p.us for p in found) < alone
