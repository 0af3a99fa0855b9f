"""PyTorch's styles of tensor parallelism, for structured layers as well: parallelize_module takes them in their place.

Of a FactorLinear the outer factor is shared out (maths/shards.py), and each process runs a smaller layer by the same
kernels (autograd/shards.py). Modules of other classes are PyTorch's own matter, and so is everything else here: the
layouts of inputs and outputs, and what is communicated between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import style

from factorlayer.autograd.inputs import are_several
from factorlayer.autograd.shards import ways_of
from factorlayer.layers import FactorLinear
from factorlayer.maths.shards import Sharing, colwise, rowwise
from factorlayer.maths.spec import LayerSpec


class ColwiseParallel(style.ColwiseParallel):
    """The outputs are shared out: a process has its rows of the outer factor, weight_0, and of the bias, and the other
    weights whole. Arguments and defaults are PyTorch's: x whole, y sharded along the features, both plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FactorLinear):
            return super()._apply(module, device_mesh)
        return _apply(self, module, device_mesh, colwise, Shard(0))


class RowwiseParallel(style.RowwiseParallel):
    """The inputs are shared out: a process has its columns of the outer factor, weight_0, of Monarch layers its input
    groups in all weights, and the bias whole. Arguments and defaults are PyTorch's: x sharded along the features, y
    whole, both plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FactorLinear):
            return super()._apply(module, device_mesh)
        return _apply(self, module, device_mesh, rowwise, Replicate())


def _apply(
    how: ColwiseParallel | RowwiseParallel,
    layer: FactorLinear,
    mesh: DeviceMesh,
    share_out: Callable[[LayerSpec, int], Sharing],
    of_bias: Placement,
) -> nn.Module:
    who, (layout,) = type(how).__name__, how.input_layouts
    for name in (*layer._weight_names, "bias"):
        if name not in layer._parameters:
            raise ValueError(
                f"{who}: {name} is parametrized, so that it cannot be shared out: "
                "torch.nn.utils.parametrize.remove_parametrizations makes it a parameter"
            )
    try:
        axes = share_out(layer.spec, mesh.size()).axes
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
    whole: Placement = Replicate()
    cut = [whole if axis is None else Shard(axis) for axis in axes]

    def distribute(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        if part is not layer:
            return  # an activation's parameters, which all have whole
        for name, placement in zip([*layer._weight_names, "bias"], [*cut, of_bias], strict=True):
            given = layer._parameters[name]
            if given is not None:
                shard = distribute_tensor(given, mesh, [placement], src_data_rank=how.src_data_rank)
                layer.register_parameter(name, nn.Parameter(shard, requires_grad=given.requires_grad))

    def prepare(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        (x,) = inputs
        if are_several(x):
            raise TypeError(f"{who}: x should be one tensor, it is a list of {len(x)}; concatenate them")
        if isinstance(x, DTensor) or not isinstance(x, Tensor):
            return x
        shared = layout in (Shard(-1), Shard(x.dim() - 1))
        features = layer.in_features // mesh.size() if shared else layer.in_features
        if not x.dim() or x.shape[-1] != features:
            raise ValueError(
                f"{who}: the last dimension of x should be {features}, {'a share' if shared else 'all'} of "
                f"in_features={layer.in_features}, as input_layouts={layout} says; x has the shape {tuple(x.shape)}"
            )
        return DTensor.from_local(x, mesh, how.input_layouts, run_check=False)

    output = partial(how._prepare_output_fn, how.output_layouts, how.use_local_output)
    done = distribute_module(layer, mesh, distribute, prepare, output)
    lie = [whole, *cut, *[whole] * layer.chain.parameters, *[of_bias] * layer.chain.bias]
    layer.own_chain = ways_of(layer.spec, layer.chain, 2, (mesh.size(),), tuple((each,) for each in lie)).chain
    return done
