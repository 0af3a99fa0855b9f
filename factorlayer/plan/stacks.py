"""Plans of several layers that one pass takes, forward or back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from factorlayer.activations.results import from_result
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.maths.chain import Chain
from factorlayer.plan.layers import plan
from factorlayer.plan.plan import BATCHES, Plan, PlanError
from factorlayer.plan.registry.family import Family, fastest, ways
from factorlayer.plan.registry.stack import (
    OF_ANY_STACK,
    OF_ANY_STACK_BACK,
    OF_CLUSTER_STACK,
    OF_STACK,
    OF_STACK_BACK,
    OF_WIDE_STACK,
)

ALONE = 1.3  # times what layers one by one are predicted to take, beside a pass that streams all their weights


def plan_stack(
    layers: tuple[Chain, ...],
    dtype: str,
    batch: int,
    gpu: Gpu,
    backward: bool = False,
    states: bool = False,
    frozen: bool = False,
) -> Plan:
    """The plan of layers that one pass takes: forward, storing the states between them if `states`, or `backward`,
    making all gradients. If the layers are `frozen`, passes that read weights alone take no time."""
    asked = layers, dtype, batch, gpu
    if layers[0].inputs:
        offered = [] if backward or frozen else list(ways(OF_ANY_STACK, *asked, states=states))
    elif backward:
        offered = list(ways(OF_STACK_BACK, *asked))
        if not offered and _is_worth_it(OF_ANY_STACK_BACK, *asked):
            offered = list(ways(OF_ANY_STACK_BACK, *asked))
    else:
        offered = list(ways(OF_STACK, *asked, states=states))
        # Weights that stay in shared memory are faster: six layers of 128, 1.3 million samples, 401 us instead of 517.
        if not offered and _streams(layers, dtype, gpu, states):
            offered = list(ways(OF_WIDE_STACK, *asked, states=states, frozen=frozen))
        short = gpu.wgmma and dtype not in ("float32", "float64")  # of which wgmma's products are faster by themselves
        if not offered and (not short or _is_worth_it(OF_ANY_STACK, layers, dtype, BATCHES[-1], gpu)):
            offered = list(ways(OF_ANY_STACK, *asked, states=states))
        if offered or not states:  # what is stored for gradients may as well be made layer by layer
            offered += ways(OF_CLUSTER_STACK, *asked, states=states)

    def us(passes: tuple[Pass, ...]) -> float:
        return sum(p.us for p in passes if not (frozen and p.reads == "none"))

    found = min(offered, key=us, default=None)
    if found is None:
        which = "makes all gradients" if backward else "takes all layers"
        raise PlanError(f"no pass {which} of {' | '.join(layer.text for layer in layers)!r}")
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, found)


@functools.lru_cache(256)
def _streams(layers: tuple[Chain, ...], dtype: str, gpu: Gpu, states: bool) -> bool:
    """Whether a pass that streams the layers' weights is predicted to be faster than layer by layer, for many samples:
    layers with a kernel for many samples have one for few as well."""
    found = fastest(OF_WIDE_STACK, layers, dtype, BATCHES[-1], gpu, states=states)
    if not found:
        return False
    alone = ALONE * sum(plan(layer, dtype, BATCHES[-1], gpu).us for layer in layers)
    return sum(p.us for p in found) < alone


def are_hoppers(layers: tuple[Chain, ...], dtype: str, gpu: Gpu) -> bool:
    """Whether families that only Hopper has take all layers at once, which was measured to be faster than one by
    one."""
    if layers[0].inputs:
        return False
    return bool(fastest(OF_STACK, layers, dtype, BATCHES[1], gpu)) or _streams(layers, dtype, gpu, False)


@functools.lru_cache(256)
def _is_worth_it(families: Sequence[Family], layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> bool:
    """Whether a pass of the families that take any layers is predicted to be faster than layer by layer, for so many
    samples or for many: layers with a kernel for many samples have one for fewer as well."""
    back = families is OF_ANY_STACK_BACK

    def is_faster(batch: int) -> bool:
        if not (found := fastest(families, layers, dtype, batch, gpu)):
            return False
        alone = sum(back_us(layer, dtype, batch, gpu) if back else us_of(layer) for layer in layers)
        return us_around(found, batch) < alone

    def us_of(layer: Chain) -> float:
        return us_around(plan(layer, dtype, batch, gpu).passes, batch)

    return any(map(is_faster, dict.fromkeys((batch, BATCHES[-1]))))


def us_around(passes: Sequence[Pass], batch: int) -> float:
    """The microseconds that passes are predicted to take for so many samples and for twice as many, added up: a single
    number of samples might just fill a GPU once."""
    return sum(p.us_of(samples) for samples in (batch, 2 * batch) for p in passes)


@functools.lru_cache(1024)
def back_us(layer: Chain, dtype: str, batch: int, gpu: Gpu) -> float:
    """The microseconds, added up as by us_around, of the gradients of a dense layer as autograd/backward.py makes them:
    back through its activation, of its weight and its bias, and of what it reads."""

    def us(*chains: Chain) -> float:
        try:
            return sum(us_around(plan(chain, dtype, batch, gpu).passes, batch) for chain in chains)
        except PlanError:
            return math.inf

    (c,) = layer.contractions
    plain = Chain((c,), tf32=layer.tf32)
    gradient = replace(plain, gradient=True)
    turned = plan(Chain((), turn=(1, c.q, c.p), tf32=layer.tf32), dtype, BATCHES[0], gpu)  # the weight, at both times
    found = us(replace(plain, contractions=(replace(c, p=c.q, q=c.p),))) + 2 * turned.us

    def behind(sums: int) -> float:
        """Back through the activation, with those sums."""
        alone = us(Chain((), sums=sums)) if sums else 0.0
        if layer.activation == "identity" or from_result(layer.activation) is not None:
            return alone  # what the layer behind hands back may be by one kernel with the slope
        before, slope = replace(layer, activation="identity"), Chain((), activation=layer.activation, slope=c.q)
        return min(us(replace(layer, slope=c.q)) + alone, us(before, replace(slope, sums=sums)))

    apart = us(gradient) + behind(c.q if layer.bias else 0)
    return found + (min(us(replace(gradient, bias=True)) + behind(0), apart) if layer.bias else apart)
