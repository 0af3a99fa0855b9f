"""Plans of dense layers one behind another by the first family that has a kernel for them: so each is tested, also
where another one is predicted to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan
from factorlayer.plan.registry.family import ways
from factorlayer.plan.registry.stack import OF_ANY_STACK_BACK, OF_STACK, OF_STACK_BACK


def plan_by_first(
    layers: Sequence[Chain],
    dtype: str,
    batch: int,
    gpu: Gpu,
    backward: bool = False,
    states: bool = False,
    frozen: bool = False,
) -> Plan:
    asked = tuple(layers), dtype, batch, gpu
    if backward:
        found = ways((*OF_STACK_BACK, *OF_ANY_STACK_BACK), *asked)
    else:
        found = ways(OF_STACK, *asked, states=states, frozen=frozen)
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, next(found))
