"""Dense layers one behind another whose weights the blocks of a cluster share out, as stack_cluster.cuh is told them.

A block has some q's of every layer, so that weights of more than a multiprocessor's shared memory stay on chip, and
few samples keep a cluster of multiprocessors busy instead of one. States are exchanged behind each layer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import Told, constants, function, kinds
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import MOST_TENSORS, steadiest, timed
from factorlayer.kernels.resident import copied_at_once, region_of, type_of_stage
from factorlayer.kernels.resident_stack import OF_END, ResidentStack, stages_of, tensor, work_of
from factorlayer.kernels.stages import Stage, together
from factorlayer.kernels.tiling import MOST_TILES, pieces_of, warps_that_fit
from factorlayer.kernels.timing import waits_of
from factorlayer.maths.chain import Chain

CLUSTERS = (2, 4, 8, 16)  # blocks; up to PORTABLE any GPU with clusters has, more if it has enough multiprocessors
PORTABLE, ENOUGH = 8, 100
SAMPLES = (16, 32, 64)  # of a tile
WARPS = (4, 8, 16)
ROOM = 15 / 16  # of the multiprocessors, that large clusters fit into
# Microseconds of a cluster's barrier, and until what a block has stored in others is there, beside products; times what
# L2 and instructions take for weights at their rates: 232 passes of drawn blocks on one H200, of which 90 % are within
# 30 %. Bytes that a multiprocessor stores in others by words in a microsecond: layers of 128 and 256 on an H100,
# clusters of 8 and 16 blocks
SYNC_US, ACROSS_US, WEIGHTS, GIVEN_BYTES = 0.27, 0.08, 1.8, 17e3
MOST_BESIDE = 4  # products of a warp on their way
# Instructions for a pair of sums in each block that it is given to, and in memory; for eight numbers of an odd row
OF_GIVEN, OF_STORED, OF_EIGHT = 3, 8, 30


@dataclass(frozen=True)
class StackCluster(ResidentStack):
    """A pass, tiled, whose stages are a block's shares. `us` is the time predicted."""

    header, template = "stack_cluster", "StackCluster"

    @property
    def cluster(self) -> int:
        return self.split

    @kept
    def state_bytes(self) -> int:
        """Of one of the two places where states between layers lie."""
        return max(stage.state_bytes for stage in self.plain[1:])

    @property
    def slot_bytes(self) -> int:
        return self.plain[0].state_bytes

    @property
    def group_bytes(self) -> int:
        return self.slot_bytes + 2 * self.state_bytes

    def us_of(self, batch: int) -> float:
        """Predicted microseconds: rounds of tiles, one of each cluster."""
        places = max(1, int(self.gpu.sms * ROOM) // self.cluster)
        rounds = math.ceil(math.ceil(batch / self.units) / places)
        return self.start_us + rounds * self.tile_us_alone

    @kept
    def start_us(self) -> float:
        """Until weights have come, and been put to their places."""
        gpu, shares = self.gpu, zip(self.sizes, self.plain, strict=True)
        odd = sum(p * stage.q for (p, _), stage in shares if p * self.size % 4)
        placed = odd / 8 * OF_EIGHT / 32 / gpu.instructions * waits_of(self.warps)
        weights = WEIGHTS * (self.weight_bytes / gpu.rates.l2_bytes + placed)
        return gpu.rates.behind_us + gpu.rates.wait_us + weights + SYNC_US

    @kept
    def tile_us_alone(self) -> float:
        """Of a tile: a cluster has one at a time."""
        gpu, (p, q) = self.gpu, (self.sizes[0][0], -(-self.sizes[-1][1] // self.cluster))
        pieces = self.units * (pieces_of(p, self.work, 1) + pieces_of(q, self.work, 1)) / gpu.instructions
        us = self.units * (p + q) * self.size / gpu.memory_bytes + pieces * waits_of(self.warps)
        us += self.units * self.functions / self.cluster / gpu.rates.special_functions
        for i, stage in enumerate(self.plain):
            busy = min(self.warps, stage.tiles)
            multiply, move, issue = stage.parts(busy, gpu)
            pairs = 2 * stage.mt * stage.nt * stage.tiles
            behind = pairs * (2 * OF_END + (OF_GIVEN * self.cluster if i < len(self.plain) - 1 else OF_STORED))
            us += together(multiply, move, (issue + behind / gpu.instructions) * waits_of(busy * _beside(stage)))
        given = sum(stage.q for stage in self.plain[:-1]) * self.units * (self.cluster - 1) * self.size
        return us + given / GIVEN_BYTES + (len(self.plain) - 1) * (SYNC_US + ACROSS_US) + 2 * gpu.rates.sync_us

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return (
            f"dense layers shared out by clusters of {self.cluster} blocks: {self.warps} warps, tiles of {self.units} "
            f"samples, {self.shared} bytes of shared memory; {stages}" + ", states between them stored" * self.states
        )

    @property
    def told(self) -> list[str]:
        stages, work = self.plain, self.work
        layouts = [*(stage.layout for stage in stages), self.final]
        region = region_of(work, 1, self.sizes[0][0], self.sizes[0][0])
        told: Told = {"WARPS": self.warps, "GROUPS": 1, "UNITS": self.units, "SLOTS": 1, "CLUSTER": self.cluster}
        told |= {"RANK": 1, "HELD": 1, "UNITS_PER_SAMPLE": 1, "TERM_IN": 0, "BULK_LOAD": False, "BESIDE": -1}
        told |= {"COPY": copied_at_once(layouts[0], region, self.size), "Source": "void"}
        told |= {"kBarrierBytes": self.barrier_bytes, "kWeightBytes": self.weight_bytes}
        told |= {"kHeldBytes": self.slot_bytes, "kSlotBytes": self.slot_bytes, "kStateBytes": self.state_bytes}
        told |= {"kGroupBytes": self.group_bytes, "Input": f"Region<{', '.join(map(str, region))}, 1>"}
        weight_at = 0
        for i, stage in enumerate(stages):
            told[f"S{i}"] = type_of_stage(self, i, layouts[i], layouts[i + 1], weight_at)
            weight_at += stage.weight_bytes
        told |= {"FirstStage": "S0", "AlsoRaw": "void", "First": "FirstStage::In"}
        return [
            *kinds(self.dtype),
            activation_type("identity", self.dtype, 0),
            *self.ends,
            *constants(told),
            *self.loading,
            *self.calls,
        ]

    @property
    def loading(self) -> list[str]:
        calls, placed = [], []
        for run in self.alike:
            for i in run:
                p, which, first = self.sizes[i][0], f"S{run.start}", self.first(i)
                weight, bias = (tensor(first + j) for j in (0, 1 + self.layers[i].parameters))
                calls.append(f"c.template load_rows<{which}, {p}>({i - run.start}, {weight});")
                calls += [f"c.template load_own_bias<{which}>({i - run.start}, {bias});"] * self.layers[i].bias
                placed.append(f"c.template place_rows<{which}, {p}>({i - run.start});")
        return function("load_weights(const C& c)", calls) + function("place_weights(const C& c)", placed)

    @property
    def calls(self) -> list[str]:
        calls = ["u32 from = c.slot_address(0);"]
        for run in self.alike:
            i, kept = run.start, self.first(len(self.layers)) + run.start if self.states else 0
            if run.stop == len(self.layers):
                calls.append(f"c.template finish<S{i}>(0, from, tile);")
                continue
            calls.append(f"ROLL for (int i = 0; i < {len(run)}; ++i) {{")
            calls.append(f"  c.template hand_on<S{i}, {str(self.states).lower()}>(i, from, to, tile, {kept} + i);")
            calls += ["  from = to, to = c.other(to);", "}"]
            calls += ["c.ask(tile);"] * (i == 0)
        return function("stages(const C& c, u32& to, i64 tile)", calls)


@functools.lru_cache(512)
def tile(layers: tuple[Chain, ...], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> StackCluster | None:
    """The fastest tiling by prediction, or None where this family has no kernel."""
    return steadiest(tilings(layers, dtype, batch, gpu, states), batch)


def tilings(layers: Sequence[Chain], dtype: str, batch: int, gpu: Gpu, states: bool = False) -> Iterator[StackCluster]:
    if not gpu.clusters or len(layers) < 2 or layers[0].inputs or not all(layer.is_dense for layer in layers):
        return
    if sum(layer.tensors + states for layer in layers) > MOST_TENSORS:
        return
    work, size = work_of(layers, dtype, states), ELEMENT_BYTES[dtype]
    weights = sum(mode.p * mode.q for _, mode in work.steps) * size
    ending = replace(work, bias=dtype == "float64")  # whose functions take registers beside sums
    for cluster, warps, samples in itertools.product(CLUSTERS, WARPS, SAMPLES):
        if (
            weights > cluster * gpu.shared
            or (cluster > PORTABLE and gpu.sms < ENOUGH)
            or (samples > SAMPLES[0] and samples >= 2 * batch)
        ):
            continue
        seen = []
        for most in MOST_TILES:
            stages = stages_of(work, samples, warps, most, False, gpu, cluster)
            if stages is None or stages in seen:
                continue
            seen.append(stages)
            if warps_that_fit(ending, stages) < warps:
                continue
            fields = work, stages, 1, cluster, 1, samples, warps, 1, 1, False, False, False, gpu, 0.0
            plan = StackCluster(*fields, layers=tuple(layers), states=states)
            if plan.shared <= gpu.shared:
                yield timed(plan, batch)


def _beside(stage: Stage) -> int:
    """Products of a warp that do not wait for each other: of its tiles, and of a float's pieces."""
    return min(MOST_BESIDE, stage.mt * stage.nt * (2 if stage.dtype in ("float32", "float64") else 1))
