"""Passes of the last two modes on Hopper's matrix unit: what pair.cuh is told, and what that takes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from factorlayer.activations.written import activation_type
from factorlayer.device.code import ELEMENT, constants, kinds, wgmma
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.passes import tensor_map, timed
from factorlayer.kernels.weights import can_be_made, told_weights
from factorlayer.kernels.work import OfWork, Terms, TwoSizes, Work, round_up, told_inputs

BARRIER_BYTES = 1024
LEAST = 24  # of a size that fills the matrix unit
MOST_MIXED = 8  # of a mode before the two
SLOT_BYTES = 16 << 10
MIXED_SLOT_BYTES = {2: 32 << 10, 4: 64 << 10}  # by an element's
IN_L1 = 16 << 10  # bytes of a bias that L1 keeps beside all of shared memory
EIGHT_BYTES = 128 * 16  # of a bias of 32 bits, of an eight of q0, as a warpgroup's threads have it
# Registers that are left free where a bias takes others: for an activation, or for the rest of one of 32 bits
BESIDE_BIAS, BESIDE_SOME = 40, 8
START_US = 1.4
RATE = 0.6  # of the matrix unit's, that products of a unit have
SUMS_RATE = 0.8  # and those of a sum's terms, one behind another: eleven sums of two to eight terms on one H200
UNIT_US = 0.4  # from a unit's last copy to its first store, where nothing hides it: of 16 bits
# Of the first unit: waits one behind another, the part of its work that is in the time of a unit beside others, and
# what a thread loads of weights, 16 bytes, an element, one that is a product. Fitted to 31 layers of up to 64 samples
# on an H200, with 1.1 us less of waits than these took: so much longer than predicted other families took there, too.
ALONE_US, OF_UNIT, WORDS_US, ELEMENT_US, MADE_US = 2.2, 0.29, 0.18, 0.09, 0.11
MIX_US = 2e-5  # of a multiply-add of a mixture, by FMA
PRODUCT_US = 0.35  # of a chunk whose mixtures are products, from its last copy to its last mixture


@dataclass(frozen=True)
class Pair(OfWork, TwoSizes):
    """A pass of two tied contractions, tiled. `us` is the time predicted."""

    work: Work
    chunk: int  # of the first mode's p, in a slot
    slots: int
    groups: int
    gpu: Gpu
    stages: int = 0  # chunks on their way to slots
    held: int = 1  # pieces of the second weight that stay in registers: none of a sum's
    us: float = 0.0

    @property
    def pieces(self) -> int:
        """Pieces of an element, as the matrix unit takes it."""
        return 3 if self.work.dtype == "float32" else 1

    @property
    def unit(self) -> int:
        """Bytes of such a piece."""
        return 2 if self.pieces > 1 else self.size

    @kept
    def sizes(self) -> tuple[int, int, int, int]:
        """p0, p1, q0, q1 of the last two modes"""
        (*_, p0, p1), (*_, q0, q1) = self.work.states[0], self.work.states[-1]
        return p0, p1, q0, q1

    @property
    def mixed(self) -> tuple[int, int]:
        """Sizes p, q of a mode before them, or 1."""
        return (self.work.states[0][0], self.work.states[-1][0]) if len(self.work.sizes) == 3 else (1, 1)

    @property
    def mixes_by_products(self) -> bool:
        return self.mixed != (1, 1) and self.size == 2

    @property
    def mapped(self) -> bool:
        """Whether x comes by a map, which rounds it: where its rows are long."""
        return self.work.dtype == "tf32" and self.mixed == (1, 1) and self.parts > 1

    @property
    def maps(self) -> tuple[str, ...]:
        """The map of x."""
        if not self.mapped:
            return ()
        p0, p1, _, _ = self.sizes
        sizes, strides = (p1, p0, self.work.outer, 1, 1), (p1, p0 * p1, p0 * p1, p0 * p1)
        box = (128 // self.unit, self.chunk, 1, 1, 1)
        return (tensor_map("x", "tf32", sizes, strides, box),)

    @kept
    def results(self) -> int:
        """Results that a warpgroup has in shared memory: one leaves while the next one comes, and where there is room,
        the next but one's bias."""
        if not self.mixes_by_products:
            return 1 if self.size == 2 else 0
        return 3 if self.work.bias and self._shared_of(3) <= self.gpu.shared else 2

    @property
    def eights(self) -> int:
        """Of q0, of whose sums a thread has four each."""
        return self.n // 8

    @property
    def keeps_bias(self) -> bool:
        """Whether a thread's numbers of a bias are the same for all units."""
        return self.work.bias and self.mixed == (1, 1) and self.work.outer == 1

    @kept
    def bias_held(self) -> int:
        """Eights whose bias a thread has in registers: of 16 bits all or none."""
        if not self.keeps_bias:
            return 0
        left = (self.registers[1] or 255) - self.registers_needed
        left -= BESIDE_BIAS if self.work.activation != "identity" else BESIDE_SOME if self.size == 4 else 0
        if self.size == 2:
            return self.eights if left >= 2 * self.eights else 0
        return min(self.eights, max(0, left) // 4)

    @property
    def bias_copied(self) -> bool:
        """Whether each unit's is copied to where results will be: of 16 bits, where L1 would not keep it."""
        in_l1 = not self.mixes_by_products and math.prod(self.sizes[2:]) * self.size <= IN_L1
        return self.work.bias and self.size == 2 and not (self.bias_held or in_l1)

    @kept
    def bias_shared(self) -> int:
        """Eights of 32 bits that are in shared memory, where slots leave it room."""
        if not self.keeps_bias or self.size == 2:
            return 0
        room = max(0, self.gpu.shared - self._shared_of(self.results))
        return min(self.eights - self.bias_held, room // (self.groups * self.parts * EIGHT_BYTES))

    @property
    def parts(self) -> int:
        return -(-self.sizes[3] // 64)

    @property
    def n(self) -> int:
        return round_up(self.sizes[2], 16)

    @property
    def threads(self) -> int:
        return 128 * (self.groups * self.parts + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that copies, and of one that multiplies; 0 where all have enough."""
        consumers = self.groups * self.parts
        if consumers == 1:
            return 0, 0
        each = 65536 // self.threads // 8 * 8
        copies = 56 if self.mixed == (1, 1) or self.size == 2 else 72
        return copies, min(240, (each * self.threads - copies * 128) // (consumers * 128) // 8 * 8)

    @property
    def registers_needed(self) -> int:
        """Registers of a consumer's thread, about: sums, operands, places."""
        p0, p1, _, _ = self.sizes
        mixes = self.mixed != (1, 1)
        kinds = min(self.pieces, 2)  # of sums
        t, y = kinds * self.chunk // 2, kinds * self.n // 2 * (-(-self.mixed[1] // self.groups) if mixes else 1)
        sums = max(t, y) if p0 <= self.chunk and not mixes else t + y
        left = self.pieces * self.chunk // 4 if self.unit == 2 else 0
        held = self.held * -(-p1 * self.unit // 32) * 4
        others = 48 if mixes and self.work.bias and self.size == 4 else 36 if self.pieces > 1 else 28
        return sums + left + held + others

    @property
    def staged(self) -> int:
        """Bytes of results."""
        return self._staged_of(self.results)

    def _staged_of(self, results: int) -> int:
        return self.groups * self.parts * results * self.n * 128

    @kept
    def shared(self) -> int:
        return self._shared_of(self.results) + self.groups * self.parts * self.bias_shared * EIGHT_BYTES

    def _shared_of(self, results: int) -> int:
        """Bytes with so many results of a warpgroup, without a bias."""
        p0, p1, _, _ = self.sizes
        row, mixed = 128 // self.unit, self.mixed
        a = self.pieces * -(-round_up(p0, self.chunk) // row) * self.n * 128
        b = (self.pieces - self.held) * -(-p1 // row) * self.parts * 64 * 128
        state = self.pieces * -(-p1 // row) * self.chunk * 128
        slot = state * (mixed[1] if self.stages else max(mixed))
        stage = round_up(self.chunk * p1 * self.unit, 2048) * mixed[0] * self.size // self.unit
        if self.mixes_by_products:  # by eights, none of which meet in a bank
            slot, stage = MOST_MIXED * (state + 128), mixed[0] * (self.chunk * p1 * self.size + 16)
        weights = self.work.rank * (a + b)
        return BARRIER_BYTES + weights + self.slots * slot + self.stages * stage + self._staged_of(results)

    @property
    def units_per_block(self) -> int:
        return 1

    @property
    def output_bytes(self) -> int:
        _, _, q0, q1 = self.sizes
        return self.work.outer * self.mixed[1] * q0 * q1 * self.size

    def us_of(self, batch: int) -> float:
        work, gpu = self.work, self.gpu
        p0, p1, q0, q1 = self.sizes
        p, q = self.mixed
        units = -(-batch * work.outer // gpu.sms)
        memory = (p * p0 * p1 + q * q0 * q1) * self.size / (0.9 * gpu.memory_bytes)
        rate = (SUMS_RATE if work.rank > 1 and self.pieces == 1 else RATE) * gpu.flops["bfloat16"]
        rate *= {"tf32": 0.5, "float32": 0.2}.get(work.dtype, 1)
        products = 128 * self.parts * q * round_up(p0, self.chunk) * (round_up(p1, 32 // self.unit) + self.n) / rate
        products *= work.rank
        chunk_us, row_us = (0.12, 0.003) if self.size == 2 else (0.25, 0.011)  # of waits; of a row of the result
        unit_us = UNIT_US if self.size == 2 and p * q == 1 else 0.0
        busy = products + (-(-p0 // self.chunk) * chunk_us + q0 * row_us + unit_us) * q / self.groups
        mixing = MIX_US * p * q * p0 * p1 if p * q > 1 else 0.0
        if self.mixes_by_products:
            mixing = PRODUCT_US * -(-p0 // self.chunk)
        begin = START_US
        if work.rank > 1:  # the others' weights, of which all loads of a thread are waited for at once
            begin += gpu.rates.wait_us + (work.rank - 1) * (p0 * q0 + p1 * q1) * self.size / gpu.l2_bytes
        if work.bias:  # what stays in a block comes once, the rest for every unit, from L2 as x does
            kept = (self.bias_held + self.bias_shared) / self.eights
            of_bias = q * q0 * q1 * self.size
            begin += kept * of_bias / gpu.l2_bytes
            memory = max(memory, (p * p0 * p1 * self.size + (1 - kept) * of_bias) / gpu.l2_bytes)
        each = max(memory, busy, mixing)
        return max(begin + (units + 1) * each, self._alone_us(each) + max(0, units - self.groups - 1) * each)

    def _alone_us(self, each: float) -> float:
        """What the first unit takes, from weights to results: nothing hides its waits where units are few."""
        *_, mode_a, mode_b = (mode for _, mode in sorted(self.work.steps))
        p0, p1, _, _ = self.sizes
        row, threads, us = 128 // self.unit, self.threads - 128, ALONE_US + OF_UNIT * each * self.groups
        for mode, q, p in (
            (mode_a, self.n, round_up(round_up(p0, self.chunk), row)),
            (mode_b, 64 * self.parts, round_up(p1, row)),
        ):
            elements = self.work.rank * q * p / threads
            if len(mode.parts) > 1:
                us += MADE_US * elements
            elif mode.p * self.size % 16:
                us += ELEMENT_US * elements
            else:
                us += WORDS_US * elements * self.size / 16
        return us

    @property
    def details(self) -> str:
        p, q = self.mixed
        first = "" if p == q == 1 else f"{p}→{q}, "
        groups = f"{self.groups} groups of {self.parts} warpgroups"
        terms = f", all {self.work.rank} terms" if self.work.rank > 1 else ""
        return f"{first}{self.contracted}, {groups}, {self.slots} slots of {self.chunk} rows{terms}"

    def lines(self, registers: tuple[int, int], ahead: int, mapped: bool = False) -> list[str]:
        """The kernel's constants, with registers of threads who copy, and who multiply, and chunks under way."""
        work = self.work
        numbers = self.told_sizes | {"UNITS_PER_SAMPLE": work.outer, "CHUNK": self.chunk, "SLOTS": self.slots}
        numbers |= {"PARTS": self.parts}
        numbers |= {"GROUPS": self.groups, "COPY_REGISTERS": registers[0], "REGISTERS": registers[1]}
        numbers |= {"PIECES": self.pieces, "STAGES": self.stages, "HELD": self.held, "AHEAD": ahead}
        numbers |= {"RESULTS": self.results, "BIAS_HELD": self.bias_held, "BIAS_SHARED": self.bias_shared}
        numbers |= {"BIAS_COPIED": self.bias_copied}
        numbers |= {"P": self.mixed[0], "Q": self.mixed[1]}
        lines = kinds(work.dtype)
        lines += [f"using Part = {'bf16' if self.pieces > 1 else ELEMENT[work.dtype]};"]
        lines += [activation_type(work.activation, work.dtype, work.scalars)]
        lines += constants(numbers)
        flags = {"BIAS": work.bias, "MAPPED": mapped}
        lines += constants({**flags, "Source": told_inputs(work.inputs)["Source"]})
        last = len(work.sizes) - 1
        letters = "".join({last: "b", last - 1: "a"}.get(at, "m") for at, _ in work.steps)
        modes = [mode for _, mode in work.steps]
        return lines + told_weights(modes, letters, work.dtype, Terms(work.rank, 0, work.rank))

    template = "TwoFactors"

    @property
    def products(self) -> str:
        return wgmma("bfloat16" if self.pieces > 1 else self.work.dtype, {self.chunk, self.n})

    @property
    def told(self) -> list[str]:
        return self.lines(self.registers, 2 if self.slots > 3 else 1, self.mapped)


def tile(work: Work, batch: int, gpu: Gpu) -> Pair | None:
    """The tiling of two large modes, and maybe a small one before them; None where this family has no kernel."""
    sums = work.rank > 1
    if not gpu.wgmma or work.dtype == "float64" or work.inner > 1 or work.terms > 1 or work.apart or work.transposed:
        return None
    if len(work.steps) != len(work.sizes) or len(work.sizes) not in (2, 3):
        return None
    mixes = len(work.sizes) == 3
    if mixes and not 1 < max(work.states[0][0], work.states[-1][0]) <= MOST_MIXED:
        return None
    *_, p0, p1 = work.states[0]
    *_, q0, q1 = work.states[-1]
    size = ELEMENT_BYTES[work.dtype]
    if min(p0, q0, p1, q1) < LEAST or max(q0, q1) > (64 if mixes else 128) or p1 * size % 16 or (size == 2 and q1 % 8):
        return None
    if work.inputs and (mixes or not work.inputs.are_pieces(size)):
        return None
    if sums and (mixes or not all(can_be_made(mode, work.dtype, Terms(work.rank)) for _, mode in work.steps)):
        return None
    exact = work.dtype == "float32"
    if exact and (mixes or p1 % 8):  # the sums of mixtures need too many registers
        return None
    groups = 2 if mixes else 1 if q1 > 64 else 3 if size == 2 else 2
    for chunk, held in itertools.product(_chunks(work), (0,) if sums else (3, 1) if exact else (1,)):
        for slots, stages in _rings(exact, mixes and size == 2):
            plan = Pair(work, chunk, slots, groups, gpu, stages, held)
            fits = (
                plan.shared <= gpu.shared
                and not (plan.mapped and work.inputs)
                and plan.registers_needed <= (plan.registers[1] or 255)
            )
            if fits and (mixes or groups == 1 or slots >= groups * -(-p0 // chunk)):
                return timed(plan, batch)
    return None


def _rings(exact: bool, by_products: bool) -> tuple[tuple[int, int], ...]:
    """Slots, and chunks on their way to them."""
    if by_products:
        return (3, 2), (2, 2)
    return ((5, 2), (4, 2), (3, 3), (3, 2)) if exact else ((8, 0), (6, 0), (5, 0), (4, 0), (3, 0))


def _chunks(work: Work) -> list[int]:
    """Rows of a slot: as many as its bytes may be, in chunks of about the same size; or half as many."""
    *_, p0, p1 = work.states[0]
    size = ELEMENT_BYTES[work.dtype]
    mixes = len(work.sizes) == 3
    states = MOST_MIXED if size == 2 else max(work.states[0][0], work.states[-1][0])
    states = states if mixes else 1
    most = MIXED_SLOT_BYTES[size] if mixes else SLOT_BYTES
    chunks = -(-p0 * round_up(p1 * size, 128) * states // most)
    step = 8 if work.dtype == "tf32" else 16
    return [round_up(-(-p0 // (chunks * by)), step) for by in (1, 2)]
