"""All families of kernels, a record each, by what they are asked for.

The planner asks all families of a kind and takes the fastest by prediction; the first of equals wins, so their order is
part of what a plan is. family.py says what a record is; the files beside it have the records of a room of kernels each.
`python -m factorlayer.plan.registry` prints them.
"""

from __future__ import annotations

from factorlayer.kernels.monarch.whole import Instead
from factorlayer.kernels.passes import Pass
from factorlayer.plan.registry.family import Family, Margin, Offer, Takes, fastest, offers, ways
from factorlayer.plan.registry.kronecker import CHAIN_BACKWARD, OF_FACTORS, OF_ONE_FACTOR, OF_WORK, PAIR, RESIDENT
from factorlayer.plan.registry.monarch import (
    MONARCH_PAIRS,
    OF_MONARCH,
    OF_ONE_UNTIED,
    OF_ONE_UNTIED_BY_SLABS,
    OF_TWO_UNTIED,
    WHOLE,
)
from factorlayer.plan.registry.product import (
    BESIDE,
    OF_MIXED_PRODUCT,
    OF_PRODUCT,
    OF_PRODUCT_AND_SLOPES,
    OF_PRODUCT_OF_SOME,
    OF_SCALED_PRODUCT,
    OF_SLABS,
    OF_SLOPES,
    OF_SUMS,
    OF_TURN,
    OF_WEIGHT,
    OF_WEIGHT_AND_BIAS,
    OF_WEIGHT_IN_ORDER,
)
from factorlayer.plan.registry.recurrent import (
    OF_DECODE_CHOICE,
    OF_DECODE_DRAW,
    OF_DECODE_FEW,
    OF_DECODE_STEP,
    OF_RECURRENCE,
    OF_RECURRENCE_BACK,
    OF_RECURRENT_SLOPES,
)
from factorlayer.plan.registry.stack import (
    OF_ANY_STACK,
    OF_ANY_STACK_BACK,
    OF_DENSE_LAYER,
    OF_STACK,
    OF_STACK_BACK,
    OF_WIDE_STACK,
)

__all__ = [
    "CHAIN_BACKWARD",
    "MONARCH_PAIRS",
    "OF_ANY_STACK",
    "OF_ANY_STACK_BACK",
    "OF_DECODE_CHOICE",
    "OF_DECODE_DRAW",
    "OF_DECODE_FEW",
    "OF_DECODE_STEP",
    "OF_DENSE_LAYER",
    "OF_FACTORS",
    "OF_MIXED_PRODUCT",
    "OF_MONARCH",
    "OF_ONE_FACTOR",
    "OF_ONE_UNTIED",
    "OF_ONE_UNTIED_BY_SLABS",
    "OF_PRODUCT",
    "OF_PRODUCT_AND_SLOPES",
    "OF_PRODUCT_OF_SOME",
    "OF_RECURRENCE",
    "OF_RECURRENCE_BACK",
    "OF_RECURRENT_SLOPES",
    "OF_SCALED_PRODUCT",
    "OF_SLABS",
    "OF_SLOPES",
    "OF_STACK",
    "OF_STACK_BACK",
    "OF_SUMS",
    "OF_TURN",
    "OF_TWO_UNTIED",
    "OF_WEIGHT",
    "OF_WEIGHT_AND_BIAS",
    "OF_WEIGHT_IN_ORDER",
    "OF_WIDE_STACK",
    "OF_WORK",
    "PAIR",
    "RESIDENT",
    "WHOLE",
    "Family",
    "Margin",
    "Offer",
    "Takes",
    "families",
    "family_of",
    "fastest",
    "offers",
    "ways",
]

KINDS = {
    "One pass of a Kronecker product": OF_WORK,
    "One contraction": OF_PRODUCT,
    "Both contractions of a Monarch layer": OF_MONARCH,
    "All gradients of one factor": OF_ONE_FACTOR,
    "All gradients of several factors": (*OF_FACTORS, CHAIN_BACKWARD),
    "All gradients of untied contractions": (*OF_ONE_UNTIED, *OF_ONE_UNTIED_BY_SLABS, *OF_TWO_UNTIED, MONARCH_PAIRS),
    "The gradient of one weight": OF_WEIGHT,
    "What goes before and behind contractions": (*OF_SUMS, *OF_SLOPES, *OF_TURN),
    "Dense layers one behind another": (*OF_STACK, *OF_WIDE_STACK, *OF_ANY_STACK),
    "All gradients of dense layers": (*OF_STACK_BACK, *OF_ANY_STACK_BACK),
    "Recurrent units": (*OF_RECURRENCE, *OF_RECURRENCE_BACK, *OF_RECURRENT_SLOPES),
    "A decoder's step": (*OF_DECODE_STEP, *OF_DECODE_CHOICE, *OF_DECODE_DRAW, *OF_DECODE_FEW),
    "Beside others' passes": (WHOLE, *BESIDE),
}


def families() -> tuple[Family, ...]:
    """All, each once."""
    return tuple(family for kind in KINDS.values() for family in kind)


_FAMILY_OF: dict[type[Pass], Family] = {kind: family for family in reversed(families()) for kind in family.makes}


def family_of(made: Pass) -> Family:
    """The one that a pass is of."""
    return _FAMILY_OF[type(made.of if isinstance(made, Instead) else made)]
