"""Back through a gated recurrent unit whose state a cluster of blocks shares out, by slopes: what
recurrent_cluster_backward.cuh is told."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import fastest
from factorlayer.kernels.recurrent.recurrent import OF_TWO_BACK
from factorlayer.kernels.recurrent.recurrent_backward import STREAMS
from factorlayer.kernels.recurrent.recurrent_cluster import RecurrentCluster, tilings
from factorlayer.maths.recurrence import GATES, Recurrence


@dataclass(frozen=True)
class RecurrentClusterBackward(RecurrentCluster):
    """A pass, tiled. What is multiplied at a step are three states, those of the gates' gradients."""

    title = "recurrent, in clusters, backward"
    states, streams, written_each_step = GATES, STREAMS, GATES + 1
    turned = goes_down = True
    other_registers, of_columns = 72, 52
    of_two, functions_of_feature = OF_TWO_BACK, 0

    @property
    def walk_at(self) -> int:
        return self.first_tensor + STREAMS - 1

    @property
    def functions(self) -> list[str]:
        return []


def tile(recurrence: Recurrence, dtype: str, batch: int, gpu: Gpu) -> RecurrentClusterBackward | None:
    return fastest(tilings(RecurrentClusterBackward, recurrence, dtype, batch, gpu))
