"""All families of kernels, a record each, by what they are asked for.

The planner asks all families of a kind and takes the fastest by prediction; the first of equals wins, so their order is
part of what a plan is. family.py says what a record is; the files beside it have the records of a room of kernels each,
and in tuples, OF_ what they are asked for, their order. `python -m factorlayer.plan.registry` prints them.
"""

from __future__ import annotations

from factorlayer.kernels.passes import Pass, Placed
from factorlayer.plan.registry import kronecker, monarch, product, recurrent, stack
from factorlayer.plan.registry.family import Family

KINDS = {
    "One pass of a Kronecker product": kronecker.OF_WORK,
    "One contraction": product.OF_PRODUCT,
    "Both contractions of a Monarch layer": monarch.OF_MONARCH,
    "All gradients of one factor": kronecker.OF_ONE_FACTOR,
    "All gradients of several factors": (*kronecker.OF_FACTORS, kronecker.CHAIN_BACKWARD),
    "All gradients of untied contractions": (
        *monarch.OF_ONE_UNTIED,
        *monarch.OF_ONE_UNTIED_BY_SLABS,
        *monarch.OF_TWO_UNTIED,
        monarch.MONARCH_PAIRS,
    ),
    "The gradient of one weight": product.OF_WEIGHT,
    "What goes before and behind contractions": (*product.OF_COLUMNS, *product.OF_TURN),
    "Dense layers one behind another": stack.OF_STACK,
    "All gradients of dense layers": (*stack.OF_STACK_BACK, *stack.OF_ANY_STACK_BACK),
    "Recurrent units": (*recurrent.OF_RECURRENCE, *recurrent.OF_RECURRENT_SLOPES),
    "A decoder's step": (
        *recurrent.OF_DECODE_STEP,
        *recurrent.OF_DECODE_CHOICE,
        *recurrent.OF_DECODE_DRAW,
        *recurrent.OF_DECODE_FEW,
    ),
    "A layer as a dense one": product.OF_WHOLE,
    "Beside others' passes": product.BESIDE,
}


def families() -> tuple[Family, ...]:
    """All, each once."""
    return tuple(family for kind in KINDS.values() for family in kind)


_FAMILY_OF: dict[type[Pass], Family] = {kind: family for family in reversed(families()) for kind in family.makes}


def family_of(made: Pass) -> Family:
    """The one that a pass is of."""
    return _FAMILY_OF[type(made.of if isinstance(made, Placed) else made)]
