"""Families of gated recurrent units, forward and back: tile(recurrence, dtype, sequences, gpu)."""

from __future__ import annotations

from factorlayer.kernels.recurrent import (
    recurrent,
    recurrent_backward,
    recurrent_slopes,
    recurrent_spread,
    recurrent_spread_backward,
)
from factorlayer.plan.registry.family import Family, Takes

TAKES = Takes(more="recurrent weights that a multiprocessor holds; factors, blocks or dense")

RECURRENT = Family(
    "recurrent",
    "All steps of a gated recurrent unit",
    recurrent.tile,
    (recurrent.Recurrent,),
    "recurrent",
    TAKES,
)
RECURRENT_BACKWARD = Family(
    "recurrent backward",
    "What goes back through all steps of a gated recurrent unit",
    recurrent_backward.tile,
    (recurrent_backward.RecurrentBackward,),
    "recurrent",
    TAKES,
)
SPREAD_TAKES = Takes(factors=(1, 1), tied=True, more="dense, reset after the product, on all multiprocessors together")
RECURRENT_SPREAD = Family(
    "recurrent spread",
    "The same of a dense matrix that several blocks share",
    recurrent_spread.tile,
    (recurrent_spread.RecurrentSpread, recurrent_spread.RecurrentFill),
    "recurrent",
    SPREAD_TAKES,
)
RECURRENT_SPREAD_BACKWARD = Family(
    "recurrent spread backward",
    "What goes back through a dense matrix that several blocks share",
    recurrent_spread_backward.tile,
    (recurrent_spread_backward.RecurrentSpreadBackward,),
    "recurrent",
    SPREAD_TAKES,
)
RECURRENT_SLOPES = Family(
    "recurrent slopes",
    "What goes back is multiplied by, of all steps at once",
    recurrent_slopes.tile,
    (recurrent_slopes.RecurrentSlopes,),
    "recurrent",
)
OF_RECURRENCE = (RECURRENT, RECURRENT_SPREAD)
OF_RECURRENCE_BACK = (RECURRENT_BACKWARD, RECURRENT_SPREAD_BACKWARD)
OF_RECURRENT_SLOPES = (RECURRENT_SLOPES,)
