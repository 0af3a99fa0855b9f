"""Families of dense layers one behind another, forward and back."""

from __future__ import annotations

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
from factorlayer.plan.registry.family import ANY, HALVES, Family, Takes

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
    Takes(tied=True, inputs=True),
    told=("states",),
)
STACK_CLUSTER = Family(
    "A block of dense layers, weights that a cluster's multiprocessors hold together",
    stack_cluster.tile,
    (stack_cluster.StackCluster,),
    "dense",
    Takes(needs=("clusters",), factors=(2, ANY), tied=True),
    told=("states",),
)
OF_STACK = (DENSE, DENSE_STREAMED, RESIDENT_STACK, STACK_CLUSTER)
OF_DENSE_LAYER = (DENSE_STREAMED,)  # as a stack of one
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
OF_ANY_STACK_BACK = (STACK_BACKWARD,)  # asked where layer by layer is predicted to take longer
