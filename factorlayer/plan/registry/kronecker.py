"""Families of Kronecker products: one pass of several factors, and all their gradients at one visit."""

from __future__ import annotations

from factorlayer.device.gpu import Gpu
from factorlayer.kernels import chain_backward, tiling
from factorlayer.kernels.chain_backward import ChainBackward
from factorlayer.kernels.kronecker import (
    cluster_backward,
    columns,
    columns_backward,
    double_backward,
    double_pair,
    eights,
    eights_backward,
    large_backward,
    mixed_backward,
    pair,
    pair_backward,
    scaled_backward,
    small,
    small_backward,
    split_pair_backward,
    split_single_backward,
    strip,
    strip_backward,
    triple,
    unit_backward,
    warpgroups,
)
from factorlayer.kernels.product import single_backward
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.states import MOST_MODES
from factorlayer.kernels.work import Work
from factorlayer.plan.registry.family import ANY, FEW, FLOATS, HALVES, MANY, ON_TABLES, Family, Margin, Takes

# One pass of a Kronecker product: tile(work, batch, gpu)


def _is_padded(work: Work, batch: int, gpu: Gpu) -> bool:
    """Whether resident passes would pad a mode."""
    return any(n % 8 for state in work.states for n in state)


def _has_few_units(work: Work, batch: int, gpu: Gpu) -> bool:
    """Of which resident passes start faster."""
    return batch * work.outer <= gpu.sms


RESIDENT = Family(
    "resident",
    "Any list of tied factors, any GPU",
    tiling.tile,
    (Resident,),
    "resident",
    Takes(sums=True),
)
SMALL = Family(
    "small",
    "Four or five square factors of 4 or 8 in float",
    small.tile,
    (small.Small,),
    "small-factors",
    Takes(("float32",), factors=(4, 5), sizes=(4, 8)),
)
EIGHTS = Family(
    "eights",
    "8⁵ in float",
    eights.tile,
    (eights.Eights,),
    "small-factors",
    Takes(("float32",), ("copy_engine",), factors=(5, 5), sizes=(8, 8)),
)
STRIP = Family(
    "strip",
    "Few samples of two factors",
    strip.tile,
    (strip.Strip,),
    "few-samples",
    Takes(factors=(2, 2), sizes=(16, ANY), samples=FEW, more="multiples of 16"),
)
DOUBLE_PAIR = Family(
    "double pair",
    "Two factors in double",
    double_pair.tile,
    (double_pair.DoublePair,),
    "pair",
    Takes(("float64",), ("moves_registers",), (2, 2), (double_pair.LEAST, double_pair.LARGEST)),
)
TRIPLE = Family(
    "triple",
    "Three large factors (64³)",
    triple.tile,
    (triple.Triple,),
    "triple",
    Takes(triple.DTYPES, ("wgmma",), (3, 3), (pair.LEAST, triple.LARGEST)),
)
COLUMNS = Family(
    "columns",
    "Factors of up to 16 in double",
    columns.tile,
    (columns.Columns,),
    "small-factors",
    Takes(("float64",), ("copy_engine", "doubles"), (2, MOST_MODES), (2, columns.LARGEST)),
    margin=Margin(1.2, 0.6, _is_padded, f"beside resident passes, predicted too short with padded modes: {ON_TABLES}"),
)
PAIR = Family(
    "pair",
    "Two large factors, maybe with a small one before them",
    pair.tile,
    (pair.Pair,),
    "pair",
    Takes(FLOATS, ("wgmma",), (2, 3), more="of the last two q's of 24 to 128"),
    margin=Margin(0.85, 1.15, _has_few_units, f"beside resident passes, which start faster: {ON_TABLES}"),
    settles=True,
)
OF_WORK = (RESIDENT, SMALL, EIGHTS, STRIP, DOUBLE_PAIR, TRIPLE, COLUMNS, PAIR)

# All gradients of contractions, at one visit: tile(contraction, dtype, batch, gpu) of one tied factor

SINGLE_BACKWARD = Family(
    "single backward",
    "Both gradients of one factor, any GPU",
    single_backward.tile,
    (single_backward.SingleBackward,),
    "pair-backward",
    Takes(factors=(1, 1), sizes=(1, single_backward.LARGEST), tied=True),
)
SPLIT_SINGLE_BACKWARD = Family(
    "split single backward",
    "Both gradients of one factor in 32 bits",
    split_single_backward.tile,
    (split_single_backward.SplitSingleBackward,),
    "pair-backward",
    Takes(
        ("float32", "tf32"),
        ("wgmma",),
        (1, 1),
        (warpgroups.LEAST, 2 * split_single_backward.BLOCK),
        tied=True,
    ),
)
OF_ONE_FACTOR = (SINGLE_BACKWARD, SPLIT_SINGLE_BACKWARD)

# of a Kronecker product of rank 1: tile(modes, outer, dtype, batch, gpu)

OF_FACTORS = (
    Family(
        "pair backward",
        "Gradients of two factors, any GPU",
        pair_backward.tile,
        (pair_backward.PairBackward,),
        "pair-backward",
        Takes(factors=(2, ANY), sizes=(pair_backward.LEAST, max(pair_backward.LARGEST.values())), merged=True),
    ),
    Family(
        "large backward",
        "Gradients of two large factors in 16 bits",
        large_backward.tile,
        (large_backward.LargeBackward,),
        "pair-backward",
        Takes(HALVES, ("wgmma",), (2, ANY), (warpgroups.LEAST, large_backward.LargeBackward.largest), merged=True),
    ),
    Family(
        "scaled backward",
        "Gradients of two large factors in tf32",
        scaled_backward.tile,
        (scaled_backward.ScaledBackward,),
        "pair-backward",
        Takes(("tf32",), ("wgmma",), (2, ANY), (warpgroups.LEAST, scaled_backward.ScaledBackward.largest), merged=True),
    ),
    Family(
        "unit backward",
        "Gradients of two factors of up to 64 in 16 bits",
        unit_backward.tile,
        (unit_backward.UnitBackward,),
        "pair-backward",
        Takes(HALVES, ("wgmma",), (2, ANY), (warpgroups.LEAST, unit_backward.UnitBackward.largest), merged=True),
    ),
    Family(
        "mixed backward",
        "Gradients of a small factor and two of up to 64 (8⁵) in 16 bits",
        mixed_backward.tile,
        (mixed_backward.MixedBackward,),
        "pair-backward",
        Takes(
            HALVES,
            ("moves_registers",),
            (3, ANY),
            (warpgroups.LEAST, unit_backward.UnitBackward.largest),
            merged=True,
            more=f"one of at most {mixed_backward.MOST_MIXED} before two of these sizes",
        ),
    ),
    Family(
        "split pair backward",
        "Gradients of two factors of up to 64 in 32 bits",
        split_pair_backward.tile,
        (split_pair_backward.SplitPairBackward,),
        "pair-backward",
        Takes(
            ("float32", "tf32"),
            ("wgmma",),
            (2, ANY),
            (warpgroups.LEAST, split_pair_backward.SplitPairBackward.largest),
            merged=True,
        ),
    ),
    Family(
        "strip backward",
        "Gradients of few samples of two factors",
        strip_backward.tile,
        (strip_backward.StripBackward,),
        "few-samples",
        Takes(factors=(2, 2), sizes=(16, strip_backward.LARGEST), samples=FEW, more="multiples of 16"),
    ),
    Family(
        "eights backward",
        "Gradients of 8⁵ in float",
        eights_backward.tile,
        (eights_backward.EightsBackward,),
        "small-factors",
        Takes(("float32",), ("copy_engine",), (5, 5), (8, 8)),
    ),
    Family(
        "small backward",
        "Gradients of four or five square factors of 4 or 8 in float",
        small_backward.tile,
        (small_backward.SmallBackward,),
        "small-factors",
        Takes(("float32",), factors=(4, 5), sizes=(4, 8)),
    ),
    Family(
        "columns backward",
        "Gradients of factors of up to 16 in double",
        columns_backward.tile,
        (columns_backward.ColumnsBackward,),
        "small-factors",
        Takes(("float64",), ("copy_engine", "doubles"), (3, MOST_MODES), (2, columns.LARGEST)),
    ),
    Family(
        "double backward",
        "Gradients of two large factors in double",
        double_backward.tile,
        (double_backward.DoubleBackward,),
        "pair-backward",
        Takes(("float64",), ("moves_registers",), (2, 2), (double_backward.LEAST, double_backward.LARGEST)),
    ),
    Family(
        "triple backward",
        "Gradients of three large factors",
        triple.tile_backward,
        (triple.TripleBackward,),
        "triple",
        Takes(triple.DTYPES, ("wgmma",), (3, 3), (pair.LEAST, 64), samples=MANY),
    ),
    Family(
        "cluster backward",
        "Gradients of few samples of two factors, where a cluster takes all (32²)",
        cluster_backward.tile,
        (cluster_backward.ClusterBackward,),
        "few-samples",
        Takes(needs=("clusters",), factors=(2, 2), sizes=(16, cluster_backward.LARGEST), samples=FEW),
    ),
)

# By visits of neighbouring factors, which plan/visits.py tiles: of any sizes, in any number of terms
CHAIN_BACKWARD = Family(
    "chain backward",
    "All gradients of any list of tied factors, any GPU",
    chain_backward.tile,
    (ChainBackward,),
    "visits",
    Takes(tied=True, sums=True),
)
