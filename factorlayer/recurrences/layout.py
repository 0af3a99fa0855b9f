"""FactorGRU's inputs as they lie in memory: where each sequence has its steps, without a copy and without padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from factorlayer.autograd.inputs import Input, are_several, checked
from factorlayer.autograd.layer_ops import transforms_active
from factorlayer.maths.spec import plain
from factorlayer.maths.steps import Walk


class Layout(NamedTuple):
    """A row for each step of each sequence, and how the user sees them."""

    rows: list[Tensor]  # [rows, features], or several that are these side by side
    walk: Walk
    shape: tuple[int, ...]  # of the output, but for its features
    packed: PackedSequence | None = None
    alone: bool = False  # one sequence, without an axis of them


def layout_of(
    who: str,
    x: Input | PackedSequence | Sequence[PackedSequence],
    features: int,
    batch_first: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Layout:
    """Of an input, or of a list of them as if they were concatenated along their `features`."""
    if max_seqlen is not None and cu_seqlens is None:
        raise ValueError(f"{who}: max_seqlen={max_seqlen!r} was given without cu_seqlens, the bounds of sequences")
    if isinstance(x, PackedSequence) or not are_several(x):
        return _of_one(who, x, batch_first, cu_seqlens, max_seqlen)
    if any(isinstance(each, PackedSequence) for each in x):
        packed = _packed_alike(who, x)
        data = checked(who, [each.data for each in packed], features, "input_size", "input")
        return _of_one(who, packed[0], batch_first, cu_seqlens, max_seqlen)._replace(rows=data)
    inputs = checked(who, x, features, "input_size", "input")
    layout = _of_one(who, inputs[0], batch_first, cu_seqlens, max_seqlen)
    count = layout.rows[0].shape[0]
    return layout._replace(rows=[each.reshape(count, each.shape[-1]) for each in inputs])


def _packed_alike(who: str, given: Sequence[Any]) -> list[PackedSequence]:
    """Whether all are, and of the same sequences."""
    first = next(each for each in given if isinstance(each, PackedSequence))
    for i, each in enumerate(given):
        if not isinstance(each, PackedSequence):
            kind = type(each).__name__
            raise TypeError(
                f"{who}: input should be a list of tensors or of PackedSequences, input[{i}] is of the type {kind}"
            )
        if not _are_alike(each, first):
            raise ValueError(f"{who}: the PackedSequences of input should have the same lengths, input[{i}] has others")
    return list(given)


def _are_alike(one: PackedSequence, other: PackedSequence) -> bool:
    """Whether their sequences have the same lengths, in the same order."""
    if not torch.equal(one.batch_sizes, other.batch_sizes):
        return False
    own, order = one.sorted_indices, other.sorted_indices
    if own is order:
        return True
    as_given = torch.arange(int(one.batch_sizes[0]), device=one.data.device)
    return torch.equal(as_given if own is None else own, as_given if order is None else order)


def _of_one(who: str, x: Any, batch_first: bool, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Layout:
    if isinstance(x, PackedSequence):
        if cu_seqlens is not None:
            raise ValueError(f"{who}: cu_seqlens was given beside a PackedSequence, which has its own lengths")
        return _of_packed(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: input should be a tensor or a PackedSequence, it is of the type {type(x).__name__}")
    check_dense(who, x)
    if cu_seqlens is not None:
        if x.dim() != 2:
            raise ValueError(
                f"{who}: input should be [total, input_size] with cu_seqlens, it has the shape {tuple(x.shape)}"
            )
        return Layout([x], _walk_of(who, cu_seqlens, max_seqlen, x), (x.shape[0],))
    if x.dim() == 2:
        return Layout([x], Walk(1, x.shape[0], x.shape[0], 1), (x.shape[0],), alone=True)
    if x.dim() != 3:
        axes = "[batch, steps, input_size]" if batch_first else "[steps, batch, input_size]"
        raise ValueError(
            f"{who}: input should be {axes} or [steps, input_size], it has the shape {tuple(x.shape)}; give cu_seqlens "
            "for sequences of different length"
        )
    first, second, features = x.shape
    walk = Walk(first, second, second, 1) if batch_first else Walk(second, first, 1, second)
    return Layout([x.reshape(first * second, features)], walk, (first, second))


def check_dense(who: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(
            f"{who}: input should be no nested tensor; give input.values() of a jagged one, and "
            "cu_seqlens=input.offsets()"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{who}: input should be dense, its layout is {x.layout}; convert it with input.to_dense()")


def _of_packed(x: PackedSequence) -> Layout:
    """Step by step, each as many rows as there are sequences so long."""
    data, sizes = x.data, x.batch_sizes
    sequences, steps, shape = int(sizes[0]), len(sizes), (data.shape[0],)
    if int(sizes[-1]) == sequences:
        return Layout([data], Walk(sequences, steps, 1, sequences), shape, x)
    places = torch.arange(1, sequences + 1, device=sizes.device)
    lengths = torch.searchsorted(-sizes, -places, right=True)  # sizes descend
    offsets = sizes.cumsum(0) - sizes
    walk = Walk(sequences, steps, 1, 0, None, lengths.to(data.device), offsets.to(data.device))
    return Layout([data], walk, shape, x)


def _walk_of(who: str, cu_seqlens: Tensor, max_seqlen: int | None, x: Tensor) -> Walk:
    wanted = "cu_seqlens should be integers [sequences + 1] that ascend from 0 to the rows of input"
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{who}: {wanted}; it is of the type {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0] or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{who}: {wanted}; it is {cu_seqlens.dtype} and has the shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise TypeError(
            f"{who}: input and cu_seqlens should be on one device, input is on {x.device} and cu_seqlens on "
            f"{cu_seqlens.device}"
        )
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    if max_seqlen is not None and not is_compiling() and not isinstance(max_seqlen, Tensor):
        max_seqlen = plain(max_seqlen)
    if max_seqlen is not None and (
        not isinstance(max_seqlen, (int, torch.SymInt)) or (not is_compiling() and max_seqlen < 0)
    ):
        raise ValueError(
            f"{who}: max_seqlen should be an integer, the length of the longest sequence or more; it is {max_seqlen!r}"
        )
    if max_seqlen is None or _are_at_hand(bounds):
        given = bounds.tolist()
        begin, end = given[0], given[-1]
        fit = (begin, end) == (0, x.shape[0]) if max_seqlen is None else begin >= 0 and end <= x.shape[0]
        if not fit or sorted(given) != given:
            raise ValueError(f"{who}: {wanted}, of which there are {x.shape[0]}; it is {given}")
        longest = max((behind - before for before, behind in itertools.pairwise(given)), default=0)
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(
                f"{who}: max_seqlen should be {longest} or more, the length of the longest sequence; it is {max_seqlen}"
            )
        max_seqlen = longest if max_seqlen is None else max_seqlen
    elif is_compiling():  # for a compiler that cannot tell whether there are steps, as of what t.item() returned
        max_seqlen = torch.sym_max(max_seqlen, 1)
    return Walk(lengths.shape[0], max_seqlen, 0, 1, bounds[:-1], lengths)


def _are_at_hand(bounds: Tensor) -> bool:
    """Whether bounds can be read without waiting for a GPU, by nobody who looks on or stands between."""
    if is_compiling() or type(bounds) is not Tensor or not bounds.is_cpu:
        return False
    return not (torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() or transforms_active())


def state_of(who: str, hx: Tensor | None, layout: Layout, cells: int, hidden: int) -> Tensor | None:
    """[cells, sequences, hidden], in the order in which sequences lie in memory, of the state that a user gives."""
    if hx is None:
        return None
    shape = (cells, hidden) if layout.alone else (cells, layout.walk.sequences, hidden)
    if not isinstance(hx, Tensor) or tuple(hx.shape) != shape:
        came = f"has the shape {tuple(hx.shape)}" if isinstance(hx, Tensor) else f"is of the type {type(hx).__name__}"
        names = "(layers · directions, hidden)" if layout.alone else "(layers · directions, batch, hidden)"
        raise ValueError(f"{who}: hx should have the shape {names} = {shape}, it {came}")
    if layout.alone:
        return hx.unsqueeze(1)
    order = None if layout.packed is None else layout.packed.sorted_indices
    return hx if order is None else hx.index_select(1, order)


def mask_of(who: str, starts: Tensor | PackedSequence | None, layout: Layout) -> Tensor | None:
    """[rows]; None where there are no rows, of which none begins."""
    if starts is None:
        return None
    mask = starts.data if isinstance(starts, PackedSequence) else starts
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != layout.shape:
        came = f"of the type {type(mask).__name__}"
        if isinstance(mask, Tensor):
            came = f"{mask.dtype} and has the shape {tuple(mask.shape)}"
        raise ValueError(
            f"{who}: starts should be a mask (torch.bool) of the shape {layout.shape}, that of input without its "
            f"features; it is {came}"
        )
    if mask.device != (device := layout.rows[0].device):
        raise TypeError(
            f"{who}: input and starts should be on one device, input is on {device} and starts on {mask.device}"
        )
    if isinstance(starts, PackedSequence) and (layout.packed is None or not _are_alike(starts, layout.packed)):
        raise ValueError(
            f"{who}: starts is a PackedSequence, so input should be one of the same lengths; "
            + ("it is none" if layout.packed is None else "its lengths are others")
        )
    return mask.reshape(-1) if mask.numel() else None


def cut(walk: Walk, starts: Tensor, reverse: bool) -> Walk:
    """Every sequence as two, where it begins again for the first time: all parts of earlier steps, then all of later
    ones. Of a walk whose steps are evenly apart."""
    rows, there = walk.rows(starts)
    begins, steps = starts[rows] & there, torch.arange(walk.steps, device=starts.device)[:, None]
    lengths = there.sum(0)
    last, first_one = torch.where(begins, steps + 1, 0), torch.where(begins, steps, lengths)
    at = last.amax(0) if reverse else first_one.amin(0)
    first = walk.first
    if first is None:
        first = torch.arange(walk.sequences, device=starts.device) * walk.of_sequence
    behind = torch.cat([first, first + at * walk.of_step])
    return Walk(2 * walk.sequences, walk.steps, 0, walk.of_step, behind, torch.cat([at, lengths - at]))


def ends(starts: Tensor, walk: Walk) -> Tensor:
    """Where a walk from the last step to the first one begins again: at the steps before those that start."""
    rows, there = walk.rows(starts)
    nowhere = starts.shape[0]
    at = torch.where(there[1:], rows[:-1], nowhere)
    return starts.new_zeros(nowhere + 1).index_put((at,), starts[rows[1:]] & there[1:])[:nowhere]
