"""Families of Kronecker products: one pass of several factors, and all their gradients at one visit."""

from __future__ import annotations

from factorlayer.kernels import chain_backward, tiling
from factorlayer.kernels.bank_layouts import MOST_MODES
from factorlayer.kernels.chain_backward import ChainBackward
from factorlayer.kernels.kronecker import (
    pair,
    pair_backward,
    pair_cluster_backward,
    pair_double,
    pair_double_backward,
    pair_few,
    pair_few_backward,
    pair_mixed_backward,
    single_split_backward,
    small_double_backward,
    small_float,
    triple,
    warpgroups,
)
from factorlayer.kernels.product import mapped_columns, single_backward
from factorlayer.kernels.resident import Resident
from factorlayer.plan.registry.family import ANY, FEW, FLOATS, HALVES, MANY, Family, Takes

# One pass of a Kronecker product: tile(work, batch, gpu)


RESIDENT = Family(
    "Any list of tied factors, any GPU",
    tiling.tile,
    (Resident,),
    "resident",
    Takes(sums=True, inputs=True, slopes=True),
)
MAPPED_COLUMNS = Family(
    "One large factor by columns, of tensors that maps describe",
    mapped_columns.tile,
    (mapped_columns.MappedColumns,),
    "wide",
    Takes(
        mapped_columns.DTYPES,
        ("wgmma",),
        (1, 1),
        (mapped_columns.LEAST, mapped_columns.MOST),
        sums=True,
        more="whole 16 bytes behind the mode",
    ),
)
SMALL_FLOAT = Family(
    "Four or five square factors of 4 or 8 in float",
    small_float.tile,
    (small_float.SmallFloat,),
    "small-factors",
    Takes(("float32",), factors=(4, 5), sizes=(4, 8)),
)
PAIR_FEW = Family(
    "Few samples of two factors",
    pair_few.tile,
    (pair_few.PairFew,),
    "few-samples",
    Takes(factors=(2, 2), sizes=(16, ANY), samples=FEW, more="multiples of 16"),
)
PAIR_DOUBLE = Family(
    "Two factors in double",
    pair_double.tile,
    (pair_double.PairDouble,),
    "pair",
    Takes(("float64",), ("moves_registers",), (2, 2), (pair_double.LEAST, pair_double.LARGEST)),
)
TRIPLE = Family(
    "Three large factors (64³)",
    triple.tile,
    (triple.Triple,),
    "triple",
    Takes(triple.DTYPES, ("wgmma",), (3, 3), (pair.LEAST, triple.LARGEST)),
)
PAIR = Family(
    "Two large factors, maybe with a small one before them",
    pair.tile,
    (pair.Pair,),
    "pair",
    Takes(
        FLOATS,
        ("wgmma",),
        (2, 3),
        sums=True,
        inputs=True,
        more="of the last two q's of 24 to 128; sums and inputs of two factors",
    ),
)
OF_STATES = (RESIDENT, MAPPED_COLUMNS)  # which read and write any buffer
OF_WORK = (*OF_STATES, SMALL_FLOAT, PAIR_FEW, PAIR_DOUBLE, TRIPLE, PAIR)

# All gradients of contractions, at one visit: tile(contraction, dtype, batch, gpu) of one tied factor

SINGLE_BACKWARD = Family(
    "Both gradients of one factor, any GPU",
    single_backward.tile,
    (single_backward.SingleBackward,),
    "pair-backward",
    Takes(factors=(1, 1), sizes=(1, single_backward.LARGEST), tied=True),
)
SINGLE_SPLIT_BACKWARD = Family(
    "Both gradients of one factor in 32 bits",
    single_split_backward.tile,
    (single_split_backward.SingleSplitBackward,),
    "pair-backward",
    Takes(
        ("float32", "tf32"),
        ("wgmma",),
        (1, 1),
        (warpgroups.LEAST, 2 * single_split_backward.BLOCK),
        tied=True,
    ),
)
OF_ONE_FACTOR = (SINGLE_BACKWARD, SINGLE_SPLIT_BACKWARD)

# of a Kronecker product of rank 1: tile(modes, outer, dtype, batch, gpu)

OF_FACTORS = (
    Family(
        "Gradients of two factors, any GPU",
        pair_backward.tile,
        (pair_backward.PairBackward,),
        "pair-backward",
        Takes(
            factors=(2, ANY), sizes=(pair_backward.LEAST, max(pair_backward.LARGEST.values())), merged=True, inputs=True
        ),
        told=("inputs",),
    ),
    Family(
        "Gradients of two factors by Hopper's matrix unit",
        warpgroups.tile,
        warpgroups.KINDS,
        "pair-backward",
        Takes(
            FLOATS,
            ("wgmma",),
            (2, ANY),
            (warpgroups.LEAST, warpgroups.Pair16LargeBackward.largest),
            merged=True,
            sums=True,
            inputs=True,
            more="in float up to 64; above that in tf32 neither sums nor inputs",
        ),
        told=("inputs", "rank"),
        named="pair by warpgroups",
    ),
    Family(
        "Gradients of a small factor and two of up to 64 (8⁵) in 16 bits",
        pair_mixed_backward.tile,
        (pair_mixed_backward.PairMixedBackward,),
        "pair-backward",
        Takes(
            HALVES,
            ("moves_registers",),
            (3, ANY),
            (warpgroups.LEAST, warpgroups.Pair16Backward.largest),
            merged=True,
            more=f"one of at most {pair_mixed_backward.MOST_MIXED} before two of these sizes",
        ),
    ),
    Family(
        "Gradients of few samples of two factors",
        pair_few_backward.tile,
        (pair_few_backward.PairFewBackward,),
        "few-samples",
        Takes(factors=(2, 2), sizes=(16, pair_few_backward.LARGEST), samples=FEW, inputs=True, more="multiples of 16"),
        told=("inputs",),
    ),
    Family(
        "Gradients of factors of up to 16 in double",
        small_double_backward.tile,
        (small_double_backward.SmallDoubleBackward,),
        "small-factors",
        Takes(("float64",), ("copy_engine", "doubles"), (3, MOST_MODES), (2, small_double_backward.LARGEST)),
    ),
    Family(
        "Gradients of two large factors in double",
        pair_double_backward.tile,
        (pair_double_backward.PairDoubleBackward,),
        "pair-backward",
        Takes(("float64",), ("moves_registers",), (2, 2), (pair_double.LEAST, pair_double.LARGEST)),
    ),
    Family(
        "Gradients of three large factors",
        triple.tile_backward,
        (triple.TripleBackward,),
        "triple",
        Takes(triple.DTYPES, ("wgmma",), (3, 3), (pair.LEAST, 64), samples=MANY),
    ),
    Family(
        "Gradients of few samples of two factors, where a cluster takes all (32²)",
        pair_cluster_backward.tile,
        (pair_cluster_backward.PairClusterBackward,),
        "few-samples",
        Takes(needs=("clusters",), factors=(2, 2), sizes=(16, pair_few_backward.LARGEST), samples=FEW, inputs=True),
        told=("inputs",),
    ),
)

# By visits of neighbouring factors, which plan/visits.py tiles: of any sizes, in any number of terms
CHAIN_BACKWARD = Family(
    "All gradients of any list of tied factors, any GPU",
    chain_backward.tile,
    (ChainBackward,),
    "visits",
    Takes(tied=True, sums=True, inputs=True),
)
