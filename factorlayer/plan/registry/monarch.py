"""Families of Monarch layers: both contractions at once, and gradients of untied contractions."""

from __future__ import annotations

from factorlayer.kernels.batches import MOST_SOME
from factorlayer.kernels.monarch import (
    monarch_chunks,
    monarch_pairs,
    monarch_through,
    slab_backward,
    untied_backward,
)
from factorlayer.kernels.product import few_backward
from factorlayer.plan.registry.family import MANY, ON_TABLES, Family, Margin, Takes

# Both contractions of a Monarch layer: tile(chain, dtype, batch, gpu)

AT_ONCE = Margin(1.2, source=f"beside two passes: {ON_TABLES}")
MONARCH_THROUGH = Family(
    "A Monarch layer of few large groups",
    monarch_through.tile,
    (monarch_through.MonarchThrough,),
    "monarch",
    Takes(monarch_through.DTYPES, ("wgmma",), (2, 2), tied=False, samples=MANY, more="4 or 8 groups"),
    margin=Margin(1.05, source=f"beside two passes: two layers of named rows on an H200, {ON_TABLES}"),
)
MONARCH_CHUNKS = Family(
    "A Monarch layer of any sizes, and its gradient of x",
    monarch_chunks.tile,
    (monarch_chunks.MonarchChunks, monarch_chunks.MonarchKept, monarch_chunks.MonarchChunkWeights),
    "monarch",
    Takes(factors=(2, 2), tied=False),
)
OF_MONARCH = (MONARCH_THROUGH, MONARCH_CHUNKS)

# Gradients of untied contractions: tile(chain, dtype, batch, gpu)

UNTIED_BACKWARD = Family(
    "Both gradients of an untied contraction in 16 bits",
    untied_backward.tile,
    (untied_backward.UntiedBackward,),
    "untied",
    Takes(untied_backward.DTYPES, ("wgmma",), (1, 1), tied=False, samples=MANY, more="p and q are multiples of 8"),
)
SLAB_BACKWARD = Family(
    "Both gradients of an untied contraction in tf32",
    slab_backward.tile,
    (slab_backward.SlabBackward,),
    "untied",
    Takes(("tf32",), ("wgmma",), (1, 1), tied=False, samples=MANY, more="a grad_y that lies by slabs"),
)
FEW_BACKWARD = Family(
    "All gradients of few samples of a Monarch layer, or of some hundreds",
    few_backward.all_gradients,
    (few_backward.FewPass,),
    "few-samples",
    Takes(factors=(2, 2), tied=False, samples=(1, MOST_SOME)),
    named="few backward",
)
MONARCH_PAIRS = Family(
    "All gradients of a Monarch layer of any sizes",
    monarch_pairs.all_gradients,
    (monarch_pairs.MonarchPairs,),
    "monarch",
    Takes(factors=(2, 2), tied=False, samples=MANY),
    margin=AT_ONCE,
)

OF_ONE_UNTIED = (UNTIED_BACKWARD,)
OF_ONE_UNTIED_BY_SLABS = (SLAB_BACKWARD,)
OF_TWO_UNTIED = (FEW_BACKWARD,)
