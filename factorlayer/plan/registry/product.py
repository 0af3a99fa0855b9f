"""Families of one contraction, of the gradient of one weight, and of what goes before and behind contractions."""

from __future__ import annotations

from dataclasses import replace

from factorlayer.device.gpu import Gpu
from factorlayer.kernels import gradient
from factorlayer.kernels.factor_gradients import FactorGradients
from factorlayer.kernels.gradient import Gradient, Reduction, Reductions
from factorlayer.kernels.product import (
    columns,
    few,
    mapped,
    mapped_gradient,
    streamed,
    turn,
    whole_kronecker,
    whole_monarch,
    wide,
    wide_gradient,
)
from factorlayer.kernels.product.weight_halves import WeightHalves
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan.registry.family import ANY, FEW, MANY, ON_TABLES, Family, Margin, Takes

# One contraction: tile(product, batch, gpu), and of few samples whether it is the first and the last of its chain


def _is_of_few(product: streamed.Product, batch: int, gpu: Gpu) -> bool:
    return batch <= FEW[1]


FEW_PRODUCT = Family(
    "Few samples: one contraction of a Monarch layer, or a dense layer",
    few.tile,
    (few.Few,),
    "few-samples",
    Takes(factors=(1, 1), tied=False, samples=FEW),
    told=("first", "last"),
    alone=True,
)
# The same of more samples, which is compared with what the others make of them
FEW_OF_SOME = replace(FEW_PRODUCT, takes=Takes(factors=(1, 1), tied=False), alone=False)
STREAMED = Family(
    "One contraction, untied or too large, any GPU",
    streamed.tile,
    (streamed.Streamed,),
    "wide",
    Takes(factors=(1, 1), sums=True, inputs=True),
    margin=Margin(1.2, 0.9, _is_of_few, f"beside wide and mapped ones, better with few samples: {ON_TABLES}"),
    last=True,
)
WIDE = Family(
    "One contraction by rows",
    wide.tile,
    (wide.Wide,),
    "wide",
    Takes(wide.DTYPES, ("wgmma",), (1, 1), sums=True, slopes=True),
)
MAPPED = Family(
    "One contraction of tensors that maps describe",
    mapped.tile,
    (mapped.Mapped,),
    "wide",
    Takes(mapped.DTYPES, ("wgmma",), (1, 1)),
)
# The same of a dense layer, which is held against resident passes
FEW_DENSE = replace(FEW_PRODUCT, takes=Takes(factors=(1, 1), tied=True, samples=FEW), alone=False)
OF_PRODUCT_OF_SOME = (FEW_OF_SOME,)
OF_FEW_DENSE = (FEW_DENSE,)
OF_PRODUCT = (FEW_PRODUCT, STREAMED, WIDE, MAPPED)
OF_SCALED_PRODUCT = (WIDE, MAPPED)  # whose weight is prepared, and scaled
OF_MIXED_PRODUCT = (WIDE,)  # of a mode of 8 before it
OF_SLABS = (MAPPED,)  # whose y lies by slabs

# The gradient of one weight: tile(contraction, dtype, batch, gpu)


def _is_of_many_floats(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> bool:
    return dtype == "float32" and batch > FEW[1]


GRADIENT = Family(
    "The gradient of any one weight, any GPU",
    gradient.tile,
    (Gradient,),
    "gradients",
    Takes(factors=(1, 1)),
    margin=Margin(
        1.0, 2.0, _is_of_many_floats, f"beside wide gradients, where warps multiply many floats: {ON_TABLES}"
    ),
    told=("states",),
)
WIDE_GRADIENT = Family(
    "The gradient of a large weight, and of a bias with it",
    wide_gradient.tile,
    (wide_gradient.WideGradient,),
    "gradients",
    Takes(wide_gradient.DTYPES, ("wgmma",), (1, 1), more="nothing behind the mode"),
    told=("bias", "mixed", "states"),
)
MAPPED_GRADIENT = Family(
    "The gradient of a weight from tensors that maps describe",
    mapped_gradient.tile,
    (mapped_gradient.MappedGradient,),
    "gradients",
    Takes(mapped_gradient.DTYPES, ("wgmma",), (1, 1), more="rows, or what lies behind the mode, in whole 16 bytes"),
    told=("states",),
)
OF_WEIGHT = (GRADIENT, WIDE_GRADIENT, MAPPED_GRADIENT)
OF_WEIGHT_AND_BIAS = (WIDE_GRADIENT,)
OF_WEIGHT_IN_ORDER = (WIDE_GRADIENT,)  # of q's that come in another order

# Before and behind contractions: tile(chain, dtype, batch, gpu) of columns, tile(outer, rows, columns, dtype, batch,
# gpu) of turns

COLUMNS = Family(
    "A bias's gradient, an activation's slope, and what is turned with either",
    columns.tile,
    (columns.Columns,),
    "gradients",
    Takes(slopes=True),
)
TURN = Family("Turned states, weights, grad_y", turn.tile, (turn.Turn, turn.TurnWhole), "untied", told=("mixed",))
OF_COLUMNS, OF_TURN = (COLUMNS,), (TURN,)
OF_PRODUCT_AND_SLOPES = (WIDE,)

# Beside others' passes, which ask for them

WEIGHT_HALVES = Family("Weights of wide products, split or shifted", None, (WeightHalves,), "wide")
REDUCTION = Family("Sums of blocks, added in order", None, (Reduction, Reductions), "gradients")
FACTOR_GRADIENTS = Family("Factors that a pass has taken as one", None, (FactorGradients,), "gradients")
BESIDE = (WEIGHT_HALVES, REDUCTION, FACTOR_GRADIENTS)

# Layers as dense ones, whose families take the samples


def _goes_back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    return chain.backward


WHOLE_MONARCH = Family(
    "A Monarch layer multiplied out, and both its gradients from the dense weight's",
    None,
    (whole_monarch.MonarchWeight, whole_monarch.MonarchLargest, whole_monarch.MonarchGradients),
    "whole",
    Takes(factors=(2, 2), tied=False, samples=MANY),
    named="whole Monarch",
    margin=Margin(1.1, source="beside one contraction after the other: 8 drawn layers of both kinds on one H100"),
)
WHOLE_KRONECKER = Family(
    "A Kronecker layer multiplied out, and all its gradients from the dense weight's",
    None,
    (
        whole_kronecker.KroneckerWeight,
        whole_kronecker.KroneckerLargest,
        whole_kronecker.KroneckerColumns,
        whole_kronecker.KroneckerGradients,
    ),
    "whole",
    Takes(factors=(2, ANY), tied=True, samples=MANY, sums=True, more="2^21 elements of the dense weight at most"),
    named="whole Kronecker",
    margin=Margin(1.1, 1.0, _goes_back, "beside passes of factors: fitted to 36 layers on one H100"),
)
OF_WHOLE = (WHOLE_MONARCH, WHOLE_KRONECKER)
