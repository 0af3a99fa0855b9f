"""Families of gated recurrent units, forward and back: tile(recurrence, dtype, sequences, gpu, back)."""

from __future__ import annotations

from factorlayer.kernels.decode import decode_choice, decode_draw, decode_few, decode_step
from factorlayer.kernels.recurrent import (
    recurrent,
    recurrent_cluster,
    recurrent_many,
    recurrent_slopes,
    recurrent_spread,
)
from factorlayer.plan.registry.family import Family, Takes

RECURRENT = Family(
    "All steps of a gated recurrent unit, or what goes back through them",
    recurrent.tile,
    (recurrent.Recurrent, recurrent.RecurrentBackward),
    "recurrent",
    Takes(more="recurrent weights that a multiprocessor holds; factors, Monarch, blocks or dense"),
    told=("back",),
)
RECURRENT_SPREAD = Family(
    "The same of a dense matrix that several blocks share",
    recurrent_spread.tile,
    (recurrent_spread.RecurrentSpread, recurrent_spread.RecurrentFill, recurrent_spread.RecurrentSpreadBackward),
    "recurrent",
    Takes(factors=(1, 1), tied=True, more="dense, on all multiprocessors together"),
    told=("back",),
)
RECURRENT_MANY = Family(
    "The same of a dense matrix that several blocks share, of many sequences",
    recurrent_many.tile,
    (recurrent_many.RecurrentMany, recurrent_many.RecurrentCounters, recurrent_many.RecurrentManyBackward),
    "recurrent",
    Takes(
        needs=("wgmma",),
        dtypes=recurrent_many.DTYPES,
        factors=(1, 1),
        tied=True,
        more="dense, reset after the product, many sequences; on all multiprocessors together",
    ),
    told=("back",),
)
RECURRENT_CLUSTER = Family(
    "The same of two factors, with a state that a cluster shares out",
    recurrent_cluster.tile,
    (recurrent_cluster.RecurrentCluster, recurrent_cluster.RecurrentClusterBackward),
    "recurrent",
    Takes(
        needs=("clusters",),
        factors=(2, 2),
        tied=True,
        more="square factors, reset after the product, shared out by clusters",
    ),
    told=("back",),
)
RECURRENT_SLOPES = Family(
    "What goes back is multiplied by, of all steps at once",
    recurrent_slopes.tile,
    (recurrent_slopes.RecurrentSlopes,),
    "recurrent",
)
DECODE_STEP = Family(
    "A layer's step of a decoder, of few samples",
    decode_step.tile,
    (decode_step.DecodeStep,),
    "recurrent",
    Takes(more="dense, reset after the product; 16 samples at most"),
)
DECODE_CHOICE = Family(
    "The best token of a decoder's step, or all scores",
    decode_choice.tile,
    (decode_choice.DecodeChoice,),
    "recurrent",
    Takes(more="16 samples at most"),
)
DECODE_DRAW = Family(
    "A token for each sample, drawn by its scores",
    decode_draw.tile,
    (decode_draw.DecodeDraw,),
    "recurrent",
)
DECODE_FEW = Family(
    "The few best of each sample's scores",
    decode_few.tile,
    (decode_few.DecodeFew,),
    "recurrent",
)
OF_RECURRENCE = (RECURRENT, RECURRENT_CLUSTER, RECURRENT_SPREAD, RECURRENT_MANY)
OF_RECURRENT_SLOPES = (RECURRENT_SLOPES,)
OF_DECODE_STEP = (DECODE_STEP,)
OF_DECODE_CHOICE = (DECODE_CHOICE,)
OF_DECODE_DRAW = (DECODE_DRAW,)
OF_DECODE_FEW = (DECODE_FEW,)
