"""Passes of few samples for an untied contraction, and for all gradients of two: few.cuh, tiles and source.

What counts is how soon all of a weight is on its way, and how few kernels wait for each other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.activations.written import activation_type
from factorlayer.device.code import ELEMENT, MATH, ask_for, headers, kernel
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import MOST_BLOCKS, Pass
from factorlayer.kernels.product.streamed import Product
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

MOST_SAMPLES = 64
START_US, NEXT_US = 2.0, 1.0  # of a first kernel, and of one whose weights are on their way when the one before ends
STRIPS = 2  # of 64 bytes, of a warp's part of a gradient
HELD_ROWS, HELD_COLUMNS = 64, 112  # registers of a thread that hold a weight, at most


def _chunk(size: int) -> int:
    """Elements of a row that a warp's access has: four pieces of 16 bytes."""
    return 64 // size


def _registers(held: int, dtype: str) -> int:
    """Of a thread, `held` of which hold a weight."""
    of_pieces = 16 if dtype == "float32" else 0
    return min(255, of_pieces + (64 if held <= 16 else 96 if held <= 32 else 128 if held <= 48 else 240))


@dataclass(frozen=True)
class Few(Pass):
    """A pass of one contraction, tiled. `us` is the time predicted."""

    product: Product
    wg: int
    ways: int
    height: int
    first: bool
    last: bool
    gpu: Gpu
    us: float = 0.0

    units_per_sample = 1
    units_per_block = 1 << 40  # one block, but for the other direction of the grid

    @property
    def threads(self) -> int:
        return 32 * self.wg * self.ways

    @property
    def shared(self) -> int:
        return self.wg * self.ways * self.height * 16 * 18 * 4

    @property
    def split(self) -> int:
        p = self.product
        return -(-p.contraction.q // (16 * self.height)) * (p.groups // self.wg)

    @property
    def held(self) -> int:
        """Registers of a thread."""
        return 8 * self.height * -(-self.product.contraction.p // (_chunk(self.product.size) * self.ways))

    @property
    def registers(self) -> int:
        return _registers(self.held, self.product.dtype)

    @property
    def blocks(self) -> int:
        """At once on a multiprocessor."""
        return max(1, 65536 // (self.threads * self.registers))

    @property
    def run(self) -> int:
        """Elements that are stored at once."""
        p = self.product
        return math.gcd(16 // p.size, self.wg if self.wg > 1 else p.b)

    @property
    def output_bytes(self) -> int:
        return self.product.y_features * self.product.size

    def __str__(self) -> str:
        p, c = self.product, self.product.contraction
        return (
            f"few: {c.p}→{c.q}, {16 * self.height} columns for {self.wg} of {p.groups} groups, "
            f"{self.wg * self.ways} warps, {self.shared} bytes of shared memory"
        )

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        p, c = self.product, self.product.contraction
        numbers = {"WEIGHT": c.weight, "P": c.p, "Q": c.q, "GROUPS": p.groups, "FAST": p.fast, "NEXT": p.next, "B": p.b}
        numbers |= dict(zip(("STEP_A", "STEP_B"), p.row_steps, strict=True))
        numbers |= {"X_SAMPLE": p.x_features, "Y_SAMPLE": p.y_features}
        numbers |= {"WG": self.wg, "WAYS": self.ways, "HEIGHT": self.height, "RUN": self.run}
        flags = {"BIAS": p.bias, "ROUND_Y": p.dtype == "tf32" and p.ours_out, "FIRST": self.first, "LAST": self.last}
        lines = [f"using Math = {MATH[p.dtype]};", f"using Element = {ELEMENT[p.dtype]};"]
        lines += [activation_type(p.activation, p.dtype, p.scalars)]
        lines += [f"static constexpr i64 {key} = {value};" if "SAMPLE" in key else
                  f"static constexpr int {key} = {value};" for key, value in numbers.items()]  # fmt: skip
        lines += [f"static constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()]
        asks = p.asks if self.first else ()
        return kernel(headers("few.cuh"), name, "Few", lines, self.threads, self.blocks, waits=False, asks=asks)


def tile(product: Product, batch: int, gpu: Gpu, first: bool, last: bool) -> Few | None:
    """The fastest tiling by prediction, if it is a product of few samples that there is one for."""
    p, c = product, product.contraction
    takes = not c.tied and p.x_step == 1 and p.terms == 1 and not p.reads_beside and p.dtype != "float64"
    if not takes or batch > MOST_SAMPLES or c.p * p.size % 16:
        return None
    found = []
    heights = (1,) if p.dtype == "float32" else (1, 2)
    for wg, ways, height in itertools.product((8, 4, 2, 1), (2, 4, 8, 16), heights):
        if p.fast % wg or (wg > 1 and (p.b > 1 or wg * p.size > 16)) or wg * ways > 16:
            continue
        plan = Few(p, wg, ways, height, first, last, gpu)
        if plan.held <= HELD_ROWS and plan.split <= MOST_BLOCKS and plan.threads * plan.registers <= 65536:
            found.append(replace(plan, us=_time(plan)))
    return min(found, key=lambda plan: plan.us, default=None)


def _time(plan: Few) -> float:
    """Microseconds: the weight's way from memory, states' from L2 for each of its tiles, and what is done behind it;
    more where not all blocks fit at once, registers are many, or runs short. Fitted to an H200."""
    p, gpu = plan.product, plan.gpu
    weight = p.weights * p.size
    us = (START_US if plan.first else NEXT_US) + weight / (gpu.memory_bytes * gpu.sms)
    us += weight / plan.height / (gpu.l2_bytes * gpu.sms)
    waves = -(-plan.split // (gpu.sms * plan.blocks))
    held = (0.014 if p.dtype == "float32" else 0.006) * plan.held
    return us + 0.25 * (waves - 1) + held + 0.06 * plan.wg * plan.ways + 1 / plan.run


# All gradients of two contractions


@dataclass(frozen=True)
class FewPass(Pass):
    """One of three passes that make all gradients of two untied contractions."""

    template: str
    chain: Chain
    dtype: str
    gpu: Gpu
    ways: int
    words: int  # of a lane's access to a column
    us: float = 0.0

    units_per_sample = 1
    units_per_block = 1 << 40
    is_apart = True

    @property
    def reads(self) -> str:
        return {"FewStates": "x", "FewBack": "x", "FewLast": "s0"}[self.template]

    @property
    def writes(self) -> str:
        return {"FewStates": "s2", "FewBack": "s0", "FewLast": "y"}[self.template]

    @property
    def scratch(self) -> tuple[int, int, int]:
        return self.back_bytes, 0, self.states_bytes

    @property
    def leaves(self) -> str:
        return "prepared" if self.template == "FewStates" else ""

    reads_prepared = True

    def outputs(self, batch: int) -> tuple[int, ...]:
        first, second = self.both
        if self.template == "FewLast":
            return batch * first.outer * first.p * self.size, (first.weight_size + second.weight_size) * self.size
        return (self._bytes_of(batch, padded=True),)

    def written(self, batch: int) -> int:
        if self.template == "FewLast":
            return sum(self.outputs(batch))
        return self._bytes_of(batch, padded=False)

    def _bytes_of(self, batch: int, padded: bool) -> int:
        """Of states that it makes. Padding is behind rows that are read by 16 bytes, and rows of samples beyond."""
        (first, second), samples, piece = self.both, -(-batch // 8) * 8, 16 // self.size
        rows = [-(-c.q // piece) * piece for c in self.both]
        if self.template == "FewStates":
            turned = first.outer * first.p + second.inner * (second.p + second.q)
            return (turned * samples + second.inner * rows[1] * (samples if padded else batch)) * self.size
        return first.outer * (first.q + (rows[0] if padded else first.q)) * samples * self.size

    @property
    def size(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def both(self) -> tuple[Contraction, Contraction]:
        first, second = self.chain.contractions
        return first, second

    @functools.cached_property
    def rank(self) -> int:
        first, second = self.both
        return first.q // second.inner

    @property
    def threads(self) -> int:
        return 32 * self.ways

    @property
    def each(self) -> int:
        """Columns of a lane."""
        return self.words * 4 // self.size

    @property
    def tall(self) -> int:
        """A warp's part of a gradient, in 16 rows."""
        return 1 if self.dtype == "float32" else 2

    def _column_tiles(self, which: int) -> int:
        c = self.both[which]
        return c.outer * c.inner * -(-c.p // (8 * self.each))

    def _outer_tiles(self, which: int) -> int:
        """Of a weight's gradient, by warps."""
        c = self.both[which]
        return c.outer * c.inner * -(-c.q // (16 * self.tall)) * -(-c.p // (STRIPS * _chunk(self.size)))

    @property
    def turns(self) -> int:
        """Blocks that turn states: a square of 16 bytes for each thread, of 16 samples."""
        piece = 16 // self.size
        first, second = self.both
        across = math.gcd(piece, second.inner)
        units = 16 // piece * (first.outer * first.p // piece + second.q * second.inner // across)
        units += 16 * -(-second.q // piece) * (second.inner // across)
        return -(-units // self.threads)

    @property
    def split(self) -> int:
        first, _ = self.both
        if self.template == "FewStates":
            return first.outer * -(-first.q // 16) + self.turns
        if self.template == "FewBack":
            return self._column_tiles(1)
        return self._column_tiles(0) + sum(-(-self._outer_tiles(which) // self.ways) for which in (0, 1))

    @property
    def shared(self) -> int:
        rows = 16 if self.template == "FewStates" else 8 * self.each
        return self.ways * rows * 18 * 4

    @property
    def held(self) -> int:
        """Registers of a thread that hold a weight."""
        first, second = self.both
        if self.template == "FewStates":
            return 8 * -(-first.p // (_chunk(self.size) * self.ways))
        c = second if self.template == "FewBack" else first
        return 16 // self.size * self.words * -(-c.q // (_chunk(self.size) * self.ways))

    @property
    def registers(self) -> int:
        return max(_registers(self.held, self.dtype), 128 if self.template == "FewLast" else 0)

    @property
    def blocks(self) -> int:
        """At once on a multiprocessor."""
        return max(1, 65536 // (self.threads * self.registers))

    @property
    def states_bytes(self) -> int:
        """Of what the first one makes, for as many samples as there may be."""
        first, second = self.both
        rows = -(-second.q * self.size // 16) * 16 // self.size
        features = first.outer * first.p + second.inner * (second.p + second.q + rows)
        return MOST_SAMPLES * features * self.size

    @property
    def back_bytes(self) -> int:
        """Of what the second one makes, for one sample, which is padded to eight."""
        first, _ = self.both
        row = -(-first.q * self.size // 16) * 16 // self.size
        return 8 * first.outer * (first.q + row) * self.size

    def __str__(self) -> str:
        first, second = self.both
        what = {
            "FewStates": f"{first.p}→{first.q} for {first.outer} groups, and states turned",
            "FewBack": f"{second.q}→{second.p} for {second.inner} groups",
            "FewLast": f"{first.q}→{first.p}, and gradients of both weights",
        }
        return f"few, backward: {what[self.template]}, {self.ways} warps, {self.shared} bytes of shared memory"

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        first, second = self.both
        numbers = {"K": first.outer, "L": second.inner, "R": self.rank, "P0": first.p, "Q1": second.q}
        numbers |= {"WEIGHT_0": first.weight, "WEIGHT_1": second.weight, "GRAD": 2}
        numbers |= {"OF_0": first.weight * second.weight_size, "OF_1": second.weight * first.weight_size}
        numbers |= {"WAYS": self.ways, "WORDS": self.words, "TALL": self.tall, "STRIPS": STRIPS, "TURNS": self.turns}
        lines = [f"using Math = {MATH[self.dtype]};", f"using Element = {ELEMENT[self.dtype]};"]
        lines += [f"static constexpr int {key} = {value};" for key, value in numbers.items()]
        size = self.size
        weights = [(f"params.weights[{c.weight}]", str(c.weight_size * size)) for c in self.both]
        states = [ask_for("params.x", self.chain.in_features * size)]
        states += [ask_for("params.weights[2]", self.chain.out_features * size)]
        asks = [*states, *weights] if self.template == "FewStates" else ()
        blocks = self.blocks
        return kernel(headers("few.cuh"), name, self.template, lines, self.threads, blocks, waits=False, asks=asks)


def all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[FewPass, ...] | None:
    """Three passes, if they take the chain."""
    if not _is_pair(chain) or batch > MOST_SAMPLES or dtype == "float64" or chain.rank > 1:
        return None
    size = ELEMENT_BYTES[dtype]
    first, second = chain.contractions
    if first.p * size % 16 or second.p * size % 16:
        return None
    found = []
    for template in ("FewStates", "FewBack", "FewLast"):
        ways = [replace(plan, us=_backward_time(plan)) for plan in _passes(template, chain, dtype, gpu)]
        if not ways:
            return None
        found.append(min(ways, key=lambda plan: plan.us))
    return tuple(found)


def _is_pair(chain: Chain) -> bool:
    """Whether it is two contractions of a Monarch layer, all groups of the first in each of the second."""
    if len(chain.contractions) != 2:
        return False
    first, second = chain.contractions
    untied = not first.tied and not second.tied and first.inner == second.outer == 1
    return untied and first.q % second.inner == 0 and first.outer * first.q == second.p * second.inner


def _passes(template: str, chain: Chain, dtype: str, gpu: Gpu) -> Iterator[FewPass]:
    most = HELD_ROWS if template == "FewStates" else HELD_COLUMNS
    for ways, words in itertools.product((2, 4, 8, 16), (2,) if template == "FewStates" else (2, 4)):
        plan = FewPass(template, chain, dtype, gpu, ways, words)
        fits = plan.held <= most and plan.threads * plan.registers <= 65536 and plan.shared <= gpu.shared
        if all(c.p % plan.each == 0 for c in plan.both) and fits and plan.split <= MOST_BLOCKS:
            yield plan


def _backward_time(plan: FewPass) -> float:
    """Microseconds, as above: multiprocessors without a block cost, too, and blocks of many warps that write."""
    first, second = plan.both
    gpu, size = plan.gpu, plan.size
    waves = -(-plan.split // (gpu.sms * plan.blocks))
    if plan.template == "FewStates":
        held = 0.014 if plan.dtype == "float32" else 0.008
        us = START_US + first.weight_size * size / (gpu.memory_bytes * gpu.sms)
        return us + 0.3 * (waves - 1) + held * plan.held + 0.06 * plan.ways
    if plan.template == "FewBack":
        moved, tiles, of_warps = second.weight_size, plan.split, 0.03
    else:
        moved, tiles, of_warps = first.weight_size + second.weight_size, plan._column_tiles(0), 0.025 * size
    us = NEXT_US + moved * size / (gpu.memory_bytes * gpu.sms) + max(0.0, 1 - tiles / gpu.sms)
    return us + 1.3 * (waves - 1) + 0.02 * plan.held + of_warps * plan.ways
