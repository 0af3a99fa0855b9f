"""Layers on DTensors: each process runs a layer of its own on the tensors that it has, by any implementation.

For each dimension of the mesh, it follows from where x and the weights lie in which way (maths/shards.py):

    way      x          weights, bias        y          gradients that are summed over the processes
    samples  Shard(i)   whole                Shard(i)   of weights and bias
    colwise  whole      shared out           Shard(-1)  of x, and of weights that all have whole
    rowwise  Shard(-1)  shared out           Partial    of weights that all have whole
    whole    whole      whole                whole      none

What lies otherwise is redistributed before, and its gradient back. The activation of a rowwise layer waits for the sum.
Without one, the first process adds the bias to its summand, so that y can stay Partial: whoever takes it next may want
no more than a shard of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from factorlayer.activations.named import activate
from factorlayer.maths.chain import Chain
from factorlayer.maths.shards import Sharing, colwise, rowwise
from factorlayer.maths.spec import LayerSpec

Layer = Callable[[LayerSpec, Chain, Tensor, Sequence[Tensor], Tensor | None], Tensor]
Placements = tuple[Placement, ...]  # one for each dimension of the mesh
Move = tuple[Placements, Placements]


@dataclass(frozen=True)
class Ways:
    """What each process runs: its layer, where x, the weights and the bias have to lie for that, where the gradients
    made of them lie, and where y lies."""

    part: LayerSpec
    chain: Chain
    before: tuple[Placements, ...]
    gradients: tuple[Placements, ...]
    of_y: Placements


def run_sharded(
    layer: Layer, spec: LayerSpec, chain: Chain, x: Any, weights: Sequence[Any], bias: Any, who: str
) -> DTensor:
    """Runs the layer on x [..., in], a DTensor as all parameters are, by calling `layer` with what this process has of
    them."""
    given = [x, *weights, *([] if bias is None else [bias])]
    mesh = x.device_mesh
    for each in given:
        if each.device_mesh != mesh:
            raise ValueError(
                f"{who}: x and the parameters should be DTensors of one DeviceMesh, they are of {mesh} and of "
                f"{each.device_mesh}"
            )
    ways = ways_of(spec, chain, x.ndim, tuple(mesh.shape), tuple(each.placements for each in given))
    own_x, *own = map(_own, given, ways.before, ways.gradients)
    own_bias = None if bias is None else own.pop()
    shape, of_y, whole = (*x.shape[:-1], spec.out_features), ways.of_y, _of_gradient(ways.of_y)
    if ways.chain.bias == chain.bias and ways.chain.activation == chain.activation:
        if own_bias is not None and not _is_first(mesh, of_y):
            own_bias = _OfOne.apply(own_bias, False)
        y = layer(ways.part, ways.chain, own_x, own, own_bias)
        y = _moved(y, mesh, shape, (of_y, of_y), (whole, whole), (of_y, whole))
        return _shards(y, mesh, of_y, shape)
    count = len(spec.weight_shapes)
    y = layer(ways.part, ways.chain, own_x, own[:count], None)
    sums = _moved(y, mesh, shape, (of_y, whole), (whole, whole), (of_y, whole))
    y = activate(chain.activation, sums if own_bias is None else sums + own_bias, own[count:])
    return _shards(y, mesh, whole, shape)


def _own(tensor: DTensor, before: Placements, gradient: Placements) -> Tensor:
    """What this process has of a tensor that lies as it should. The gradient goes back to where the tensor lay."""
    lay, back = tensor.placements, _of_gradient(tensor.placements)
    return _moved(tensor.to_local(), tensor.device_mesh, tensor.shape, (lay, before), (gradient, back), (back, before))


def _of_gradient(placements: Placements) -> Placements:
    """Where the gradient of a DTensor with these placements lies."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _shards(own: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    """The DTensor of what each process has."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return DTensor.from_local(own.contiguous(), mesh, placements, shape=torch.Size(shape), stride=tuple(strides))


def _is_first(mesh: DeviceMesh, of_y: Placements) -> bool:
    """Whether this process is the one whose summand includes the bias."""
    at = mesh.get_coordinate() or ()
    return not any(place for place, placement in zip(at, of_y, strict=True) if placement.is_partial())


# Moves of tensors with derivatives of any order. Those of redistribute and to_local lack sums in the second order.


def _moved(own: Tensor, mesh: DeviceMesh, shape: Sequence[int], now: Move, back: Move, again: Move) -> Tensor:
    if all(before == behind for before, behind in (now, back, again)):
        return own
    moved: Tensor = _Moved.apply(own, mesh, shape, now, back, again)
    return moved


class _Moved(Function):
    """A process's own of a tensor that is redistributed. Its gradient goes `back`, the gradient of that `again`, and so
    on in turns."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, mesh: DeviceMesh, shape: Sequence[int], now: Move, back: Move, again: Move
    ) -> Tensor:
        ctx.given = mesh, shape, back, again, back
        before, behind = now
        if before == behind:
            return own.view_as(own)
        return _shards(own, mesh, before, shape).redistribute(placements=behind).to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Moved.apply(grad, *ctx.given), None, None, None, None, None


class _OfOne(Function):
    """A bias that one process adds to its summand: zeros where another one does. The gradient is that of the sum, which
    all have; to what is derived from it this process adds nothing again, and so on in turns."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, adds: bool) -> Tensor:
        ctx.adds = adds
        return given.view_as(given) if adds else torch.zeros_like(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _OfOne.apply(grad, not ctx.adds), None


_kept = SimpleNamespace()  # where torch.compile finds what was added meanwhile, which it does not in a dict
_names: dict[Any, str] = {}


def ways_of(spec: LayerSpec, chain: Chain, axes: int, mesh: tuple[int, ...], lie: tuple[Placements, ...]) -> Ways:
    """The ways of an x with so many axes on a mesh of these sizes, where x, the weights and the bias `lie` as they do
    now."""
    ways: Ways = getattr(_kept, _name(spec, chain, axes, mesh, lie))
    return ways


def _name(*key: Any) -> str:
    if key not in _names:
        name = f"ways_{len(_names)}"
        setattr(_kept, name, _find_ways(*key))
        _names[key] = name
    return _names[key]


# torch.compile takes what it returns as constant: this is all that torch.compiler.assume_constant_result does, but for
# importing the compiler.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _find_ways(spec: LayerSpec, chain: Chain, axes: int, mesh: tuple[int, ...], lie: tuple[Placements, ...]) -> Ways:
    part, count, found = spec, 1 + len(spec.weight_shapes), []
    for dim, processes in enumerate(mesh):
        of_x, *of_weights = (placements[dim] for placements in lie[:count])
        part, *lies = _of_one_dim(part, chain, processes, of_x, of_weights, Shard(axes - 1))
        found.append(lies)
    before, gradients, of_y = zip(*found, strict=True)
    waits = chain.activation != "identity" and Partial() in of_y
    own = Chain.of(part, chain.bias and not waits, "identity" if waits else chain.activation)
    return Ways(part, own, tuple(zip(*before, strict=True)), tuple(zip(*gradients, strict=True)), of_y)


def _of_one_dim(
    spec: LayerSpec, chain: Chain, processes: int, of_x: Placement, of_weights: list[Placement], last: Shard
) -> tuple[LayerSpec, list[Placement], list[Placement], Placement]:
    """Four answers for one dimension of the mesh: the layer that a process runs; where x, the weights, the activation's
    parameters and the bias lie before; where their gradients lie; and where y lies."""
    whole: Placement = Replicate()
    parameters, bias = [whole] * chain.parameters, [whole] * chain.bias
    by_rows, by_columns = _shared_out(colwise, spec, processes), _shared_out(rowwise, spec, processes)
    if by_rows is not None and _lie_so(of_weights, by_rows[1]):
        part, weights = by_rows
        before = [whole, *weights, *parameters, *[Shard(0)] * chain.bias]
        return part, before, _summed(before), last
    if by_columns is not None and (of_x == last or _lie_so(of_weights, by_columns[1])):
        part, weights = by_columns
        before = [last, *weights]
        return part, [*before, *parameters, *bias], [*_summed(before), *parameters, *bias], Partial()
    behind = [*[whole] * len(of_weights), *parameters, *bias]
    if type(of_x) is Shard and of_x != last:
        return spec, [of_x, *behind], [of_x, *_summed(behind)], of_x
    return spec, [whole, *behind], [whole, *behind], whole


def _shared_out(
    way: Callable[[LayerSpec, int], Sharing], spec: LayerSpec, processes: int
) -> tuple[LayerSpec, list[Placement]] | None:
    """A process's part, and where the weights lie for it, if it can be had."""
    try:
        sharing = way(spec, processes)
    except ValueError:
        return None
    return sharing.part, [Replicate() if axis is None else Shard(axis) for axis in sharing.axes]


def _lie_so(of_weights: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether all weights that are to be cut are cut that way already."""
    return all(lies == cut for lies, cut in zip(of_weights, wanted, strict=True) if cut.is_shard())


def _summed(placements: Sequence[Placement]) -> list[Placement]:
    """Where gradients lie: of what every process has whole, each process makes a summand of the gradient."""
    return [Partial() if placement.is_replicate() else placement for placement in placements]
