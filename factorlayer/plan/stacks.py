"""Plans of several layers that one pass takes, forward or back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from factorlayer.activations.results import from_result
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES, FEW
from factorlayer.kernels.passes import Pass
from factorlayer.maths.chain import Chain
from factorlayer.plan.layers import plan
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.registry.family import fastest, ways
from factorlayer.plan.registry.stack import OF_ANY_STACK_BACK, OF_STACK, OF_STACK_BACK


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
    if backward:
        offered = ways((*OF_STACK_BACK, *(OF_ANY_STACK_BACK if _is_worth_it(*asked) else ())), *asked)
    else:
        has_kernels = not (frozen and layers[0].inputs)
        offered = ways(OF_STACK if has_kernels else (), *asked, states=states, frozen=frozen)

    def us(passes: tuple[Pass, ...]) -> float:
        return us_around([p for p in passes if not (frozen and p.reads == "none")], batch)

    found = min(offered, key=us, default=None)
    if found is None:
        which = "makes all gradients" if backward else "takes all layers"
        raise PlanError(f"no pass {which} of {' | '.join(layer.text for layer in layers)!r}")
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, found)


@functools.lru_cache(256)
def _is_worth_it(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> bool:
    """Whether all gradients at one visit are predicted to be faster, on any GPU, than layer by layer, for so many
    samples or for many: layers with a kernel for many samples have one for fewer as well."""

    def is_faster(batch: int) -> bool:
        found = fastest(OF_ANY_STACK_BACK, layers, dtype, batch, gpu)
        return bool(found) and us_around(found, batch) < sum(back_us(layer, dtype, batch, gpu) for layer in layers)

    return any(map(is_faster, dict.fromkeys((batch, BATCHES[-1]))))


def _times(batch: int) -> tuple[int, ...]:
    """Times so many samples that plans are compared for: a single number of them might just fill a GPU once, and the
    last class of batches has no end."""
    return (1, 4, 16) if batch >= BATCHES[-1] else (1, 2)


def us_around(passes: Sequence[Pass], batch: int) -> float:
    """The microseconds that passes are predicted to take for so many samples: those for more of them, by their share,
    added up."""
    return sum(p.us_of(times * batch) / times for times in _times(batch) for p in passes)


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
    turned = plan(Chain((), turn=(1, c.q, c.p), tf32=layer.tf32), dtype, FEW, gpu)  # the weight
    found = us(replace(plain, contractions=(replace(c, p=c.q, q=c.p),)))
    found += sum(turned.us / times for times in _times(batch))

    def behind(sums: int) -> float:
        """Back through the activation, with those sums."""
        alone = us(Chain((), sums=sums)) if sums else 0.0
        if layer.activation == "identity" or from_result(layer.activation) is not None:
            return alone  # what the layer behind hands back may be by one kernel with the slope
        before, slope = replace(layer, activation="identity"), Chain((), activation=layer.activation, slope=c.q)
        return min(us(replace(layer, slope=c.q)) + alone, us(before, replace(slope, sums=sums)))

    apart = us(gradient) + behind(c.q if layer.bias else 0)
    return found + (min(us(replace(gradient, bias=True)) + behind(0), apart) if layer.bias else apart)
