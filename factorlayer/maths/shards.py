"""A layer shared out among processes: each runs a layer of the same structure, with a part of mode 0. No torch here.

Features are numbered with mode 0 slowest, so that one of n equal parts of P1 is a run of the inputs, and one of Q1 a
run of the outputs.

Colwise: a process has some rows of weight_0 and makes a run of the outputs, of all inputs. The other weights it has
whole, as every output needs all of them.

Rowwise: a process has some columns of weight_0 and, where weights are untied, those of the others that belong to its
part of mode 0, which is the slowest of their positions: of a Monarch layer its input groups in both weights. Of a run
of the inputs it makes one summand of all outputs. A Monarch layer of one input group, K = 1, has mode 1 shared out.
"""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.maths.spec import BlockDiagonal, LayerSpec, divisors


@dataclass(frozen=True)
class Part(LayerSpec):
    """What a process runs. Its rank is the whole layer's, which may be more than makes a difference in it."""

    @property
    def max_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class Sharing:
    """What each process runs, and the axis along which each weight is cut, None of those that all have whole."""

    part: LayerSpec
    axes: tuple[int | None, ...]


def colwise(spec: LayerSpec, processes: int) -> Sharing:
    first, *rest = spec.out_factors
    part = Part(
        spec.structure,
        spec.in_factors,
        (_share("Q1" if spec.blocks is None else "out_features/L", first, processes, spec), *rest),
        spec.rank,
    )
    return Sharing(part, (len(spec.weight_shapes[0]) - 2, *[None] * len(rest)))


def rowwise(spec: LayerSpec, processes: int) -> Sharing:
    first, *rest = spec.in_factors
    columns = len(spec.weight_shapes[0]) - 1
    if spec.blocks is not None and first == 1:
        sizes = 1, _share("in_features", rest[0], processes, spec)
        return Sharing(Part(spec.structure, sizes, spec.out_factors, spec.rank), (None, columns))
    share = _share("P1" if spec.blocks is None else "K", first, processes, spec)
    part = Part(spec.structure, (share, *rest), spec.out_factors, spec.rank)
    return Sharing(part, (columns, *[None if spec.tied else 0] * len(rest)))


def _share(name: str, size: int, processes: int, spec: LayerSpec) -> int:
    if isinstance(spec, BlockDiagonal):
        raise ValueError("a block-diagonal layer is not shared out")
    if size % processes:
        among = ", ".join(map(str, divisors(size)))
        raise ValueError(
            f"{name}={size} of a {spec.structure} layer with factors {(spec.in_factors, spec.out_factors)} should be a "
            f"multiple of the number of processes, which is {processes}; take one of {among}, or other factors"
        )
    return size // processes
