"""Families of dense layers one behind another, forward and back."""

from __future__ import annotations

from dataclasses import replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels import resident_stack
from factorlayer.kernels.stack import (
    dense,
    dense_backward,
    dense_backward32,
    dense_streamed,
    layer_backward,
    stack_backward,
    stack_cluster,
)
from factorlayer.maths.chain import Chain
from factorlayer.plan.registry.family import ANY, HALVES, ON_TABLES, Family, Margin, Takes

# Dense layers one behind another: tile(layers, dtype, batch, gpu)

DENSE = Family(
    "A block of dense layers, weights that fit",
    dense.tile,
    (dense.Dense,),
    "dense",
    Takes(("tf32", *HALVES), ("wgmma",), sizes=(1, dense.WIDEST), tied=True),
    told=("states",),
)
DENSE_STREAMED = Family(
    "A block of dense layers, wide",
    dense_streamed.tile,
    (dense_streamed.DenseStreamed, dense_streamed.WeightChunks),
    "dense",
    Takes(("tf32", *HALVES), ("wgmma",), tied=True),
    told=("states", "frozen"),
)
RESIDENT_STACK = Family(
    "A block of dense layers, any GPU, weights that fit",
    resident_stack.tile,
    (resident_stack.ResidentStack,),
    "resident",
    Takes(tied=True, inputs=True, more="of tf32 and 16 bits what no family of Hopper's takes, or several inputs"),
    told=("states",),
)
OF_STACK = (DENSE,)
OF_WIDE_STACK = (DENSE_STREAMED,)  # asked where no family of OF_STACK has a kernel
OF_ANY_STACK = (RESIDENT_STACK,)  # asked where none of those has one
STACK_CLUSTER = Family(
    "A block of dense layers, weights that a cluster's multiprocessors hold together",
    stack_cluster.tile,
    (stack_cluster.StackCluster,),
    "dense",
    Takes(needs=("clusters",), factors=(2, ANY), tied=True),
    told=("states",),
)
OF_CLUSTER_STACK = (STACK_CLUSTER,)  # beside all of these


def _has_odd_rows(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu) -> bool:
    """That 16 bytes do not divide, so that others move them by elements."""
    return any(n * ELEMENT_BYTES[dtype] % 16 for layer in layers for c in layer.contractions for n in (c.p, c.q))


BY_ROWS = Margin(1.3, 1.0, _has_odd_rows, f"of a dense layer as a stack of one, beside wide products: {ON_TABLES}")
OF_DENSE_LAYER = (replace(DENSE_STREAMED, margin=BY_ROWS),)
DENSE_BACKWARD = Family(
    "Gradients of narrow dense layers in 16 bits",
    dense_backward.tile,
    (dense_backward.DenseBackward,),
    "dense",
    Takes(HALVES, ("wgmma",), sizes=(1, dense.WIDEST), tied=True),
)
DENSE_BACKWARD32 = Family(
    "Gradients of narrow dense layers in tf32",
    dense_backward32.tile,
    (dense_backward32.DenseBackward32, dense_backward32.LayerBackward32),
    "dense",
    Takes(("tf32",), ("wgmma",), sizes=(1, dense.WIDEST), tied=True),
)
LAYER_BACKWARD = Family(
    "Gradients of one dense layer in 16 bits",
    layer_backward.tile,
    (layer_backward.LayerBackward,),
    "dense",
    Takes(
        HALVES, ("wgmma",), (1, 1), (1, layer_backward.MOST), tied=True, more=f"more than {layer_backward.LEAST} q's"
    ),
)
STACK_BACKWARD = Family(
    "Gradients of dense layers of any widths, any GPU, weights that fit",
    stack_backward.tile,
    (stack_backward.StackBackward,),
    "dense",
    Takes(tied=True),
)
OF_STACK_BACK = (DENSE_BACKWARD, DENSE_BACKWARD32, LAYER_BACKWARD)
OF_ANY_STACK_BACK = (STACK_BACKWARD,)  # asked where none of those has one, and layer by layer is predicted to be slower
