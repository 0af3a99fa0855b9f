"""How the CUDA engine runs a chain or a stack: passes one behind another, as a printable Plan.

planner.py finds it; csrc/runtime reads its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.emit import source
from factorlayer.kernels.gradient import BlockSums, Gradient, Reduction, TileSums
from factorlayer.kernels.kronecker.cluster_backward import ClusterBackward
from factorlayer.kernels.kronecker.columns import Columns
from factorlayer.kernels.kronecker.columns_backward import ColumnsBackward
from factorlayer.kernels.kronecker.double_backward import DoubleBackward
from factorlayer.kernels.kronecker.double_pair import DoublePair
from factorlayer.kernels.kronecker.eights import Eights
from factorlayer.kernels.kronecker.eights_backward import EightsBackward
from factorlayer.kernels.kronecker.large_backward import LargeBackward
from factorlayer.kernels.kronecker.mixed_backward import MixedBackward
from factorlayer.kernels.kronecker.pair import Pair
from factorlayer.kernels.kronecker.pair_backward import PairBackward
from factorlayer.kernels.kronecker.scaled_backward import ScaledBackward
from factorlayer.kernels.kronecker.small import Small
from factorlayer.kernels.kronecker.small_backward import SmallBackward
from factorlayer.kernels.kronecker.split_pair_backward import SplitPairBackward
from factorlayer.kernels.kronecker.split_single_backward import SplitSingleBackward
from factorlayer.kernels.kronecker.strip import Strip
from factorlayer.kernels.kronecker.strip_backward import StripBackward
from factorlayer.kernels.kronecker.triple import Triple, TripleBackward
from factorlayer.kernels.kronecker.unit_backward import UnitBackward
from factorlayer.kernels.monarch.monarch import Monarch
from factorlayer.kernels.monarch.monarch_backward import MonarchBack, MonarchGradient, MonarchWeights
from factorlayer.kernels.monarch.monarch_mapped import MonarchMapped
from factorlayer.kernels.monarch.monarch_through import MonarchThrough
from factorlayer.kernels.monarch.slab_backward import SlabBackward
from factorlayer.kernels.monarch.untied_backward import UntiedBackward
from factorlayer.kernels.parts import Parts
from factorlayer.kernels.product.column_sums import ColumnSums
from factorlayer.kernels.product.few import Few, FewPass
from factorlayer.kernels.product.mapped import LARGEST, Mapped
from factorlayer.kernels.product.single_backward import SingleBackward
from factorlayer.kernels.product.slopes import Slopes
from factorlayer.kernels.product.streamed import Streamed
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.weight_halves import WeightHalves
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.stack.dense import Dense
from factorlayer.kernels.stack.dense_streamed import WeightChunks
from factorlayer.maths.chain import Chain

PASS_WEIGHT = 1.3  # another kernel, and memory for what lies between, have to be worth it
STREAMED_CHUNK_BYTES = 40 << 20  # of a state between passes that it pays to find in the L2
CHUNK_BYTES = 256 << 20  # of a state between passes: each pass then runs long enough for its start not to count

Pass = (
    ClusterBackward
    | Columns
    | ColumnsBackward
    | ColumnSums
    | Dense
    | DoubleBackward
    | DoublePair
    | Eights
    | EightsBackward
    | Few
    | FewPass
    | Gradient
    | LargeBackward
    | Mapped
    | MixedBackward
    | Monarch
    | MonarchBack
    | MonarchGradient
    | MonarchMapped
    | MonarchThrough
    | MonarchWeights
    | Pair
    | PairBackward
    | Parts
    | Reduction
    | Resident
    | ScaledBackward
    | SingleBackward
    | SlabBackward
    | Slopes
    | Small
    | SmallBackward
    | SplitPairBackward
    | SplitSingleBackward
    | Streamed
    | Strip
    | StripBackward
    | Triple
    | TripleBackward
    | Turn
    | UnitBackward
    | UntiedBackward
    | WeightChunks
    | WeightHalves
    | Wide
    | WideGradient
)
WithMaps = Mapped | Pair | MonarchMapped | MonarchThrough | SlabBackward | UntiedBackward
Unbound = ClusterBackward | Slopes | Streamed | Strip | StripBackward | Turn  # with as many blocks as there is work


class PlanError(ValueError):
    """The engine has no kernel for this chain."""


@dataclass(frozen=True)
class Plan:
    """Passes in order; states between them lie in two scratch buffers in turn, sums of a gradient and chunks of weights
    in a third. `us` is predicted. Of a stack, `chain` is the first layer's."""

    chain: Chain
    dtype: str
    batch: int
    gpu: Gpu
    passes: tuple[Pass, ...]

    @property
    def us(self) -> float:
        return sum(p.us for p in self.passes)

    @property
    def weight(self) -> float:
        """What plans are compared by."""
        return self.us * PASS_WEIGHT ** (len(self.passes) - 1)

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Bytes of the first two buffers for one sample, and of the third."""
        first = self.passes[0]
        if isinstance(first, BlockSums | TileSums):
            return 0, 0, first.part_bytes
        if isinstance(first, WeightChunks):
            return 0, 0, first.output_bytes
        if isinstance(first, MonarchWeights):  # grad_y turned; the weights, which are read before there are sums
            (back,) = (p for p in self.passes if isinstance(p, MonarchBack))
            sums = max(p.part_bytes for p in self.passes if isinstance(p, MonarchGradient))
            return back.output_bytes, 0, max(first.output_bytes, sums)
        if isinstance(first, FewPass):
            return first.output_bytes, 0, first.part_bytes
        between = [_output_bytes(p) for p in self.passes[self._before : -1]]
        prepared = first.output_bytes if isinstance(first, WeightHalves) else 0
        return max(between[0::2], default=0), max(between[1::2], default=0), prepared

    @property
    def _before(self) -> int:
        """Passes that only split weights."""
        return int(isinstance(self.passes[0], WeightHalves))

    @property
    def chunk(self) -> int:
        """Samples that go through all passes together; 0 is the whole batch."""
        outer = max((p.product.outer for p in self.passes if isinstance(p, Mapped)), default=0)
        alone = len(self.passes) == 1 + self._before
        if outer and alone:
            return LARGEST // outer
        if alone or self.chain.gradient or self.chain.backward or self.chain.sums:
            return 0
        if isinstance(self.passes[0], WeightChunks):
            return 0
        kinds = {type(p) for p in self.passes}
        bytes_between = STREAMED_CHUNK_BYTES if Streamed in kinds and not kinds & {Mapped, Wide} else CHUNK_BYTES
        return max(1, bytes_between // max(self.scratch[:2]))

    def _buffers(self, i: int) -> tuple[str, str]:
        """What a pass reads and writes. A pair's backward pass writes sums, s2, as well."""
        p = self.passes[i]
        if isinstance(p, Reduction | Parts):
            in_place = isinstance(p, Reduction) and p.in_place
            return "s2", "s2" if in_place else "w" if self.chain.backward else "y"
        if isinstance(p, WeightChunks | WeightHalves):
            return "none", "s2"
        if isinstance(p, FewPass):
            return [("x", "s2"), ("x", "s0"), ("s0", "y")][i]
        if isinstance(p, MonarchWeights | MonarchGradient):  # beside s2, for sums; s0 is the way back's to write
            return "x", "s0"
        if isinstance(p, MonarchBack):
            return "s0", "y"
        if isinstance(p, Dense | SplitPairBackward | UnitBackward):
            return "x", "y"
        if isinstance(p, DoubleBackward):
            return "x", "y" if p.returns else "s2"
        if isinstance(p, TileSums) and not self.chain.backward:
            return "x", "y" if p.is_whole else "s2"
        last = self.chain.backward or i == len(self.passes) - 1
        i -= self._before
        return "x" if i == 0 else f"s{(i - 1) % 2}", "y" if last else f"s{i % 2}"

    def text(self) -> str:
        """What csrc/runtime reads."""
        lines = ["factorlayer plan 1", f"chunk {self.chunk}", "scratch {} {} {}".format(*self.scratch)]
        for i, p in enumerate(self.passes):
            read, written = self._buffers(i)
            name = f"factorlayer_{self.dtype}_{i}"
            code = source(p, name) if isinstance(p, Resident) else p.source(name)
            most = 0 if isinstance(p, Unbound) else p.blocks if isinstance(p, Small | TileSums) else 1
            lines.append(
                f"pass {read} {written} {p.threads} {p.shared} {p.units_per_sample} {p.units_per_block} {most} "
                f"{p.split} {self.gpu.architecture} {name} {len(code.encode())}\n{code}"
            )
            lines += [f"map {line}" for line in p.maps] if isinstance(p, WithMaps) else []
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        batch = f"a batch of {self.batch}"
        lines = [
            f"{len(self.passes)} kernel{'s' if len(self.passes) > 1 else ''}, {self.us:.1f} us predicted for {batch}"
        ]
        if self.chunk:
            lines.append(f"at most {self.chunk} samples at once, their states between kernels in memory")
        return "\n  ".join([*lines, *map(str, self.passes)])


def _output_bytes(p: Pass) -> int:
    """For one sample."""
    if isinstance(p, Columns | Dense | DoublePair | Few | Mapped | Monarch | Pair | Slopes | Small | Streamed | Strip):
        return p.output_bytes
    if isinstance(p, Eights | MonarchMapped | MonarchThrough | Triple | Turn | Wide):
        return p.output_bytes
    assert isinstance(p, Resident)
    return p.work.outer * math.prod(p.work.states[-1]) * p.work.inner * ELEMENT_BYTES[p.work.dtype]
