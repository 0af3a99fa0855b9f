"""A layer's step of a decoder: what decode_step.cuh is told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.passes import OneSpread
from factorlayer.kernels.recurrent.recurrent import functions_of
from factorlayer.kernels.work import round_up
from factorlayer.maths.decoder import Decoder
from factorlayer.maths.recurrence import GATES

PIECE = 16  # bytes
TEAMS = (8, 16, 32)  # lanes that share a row
AT_ONCE = 8  # pieces of a lane, of either of the two rows that it has, that are on their way at once
MOST_THREADS = 512
# Of a multiprocessor: what issues instructions; cycles from one of a warp to its next where no other warp fills them;
# and from lanes' sums to those that they have handed on
SCHEDULERS, ALONE, EXCHANGE = 4, 2, 30
COUNTER_BYTES = 16  # in front of what blocks of decode_choice.cuh leave


def load_bytes(features: int, dtype: str) -> int:
    """The widest accesses that rows allow."""
    return math.gcd(PIECE, features * ELEMENT_BYTES[dtype])


def pieces(features: int, team: int, dtype: str) -> int:
    """Of a lane, of a row."""
    return -(-features * ELEMENT_BYTES[dtype] // (PIECE * team))


def rounds(features: int, team: int, at_once: int, dtype: str) -> int:
    """In which a lane has its pieces, so many at once."""
    return -(-pieces(features, team, dtype) // at_once)


def vector_bytes(features: int, team: int, at_once: int, dtype: str) -> int:
    """Of what a row is multiplied by, with zeros behind it, as TeamRows of decode_rows.cuh has it."""
    most = min(at_once, pieces(features, team, dtype))
    return rounds(features, team, at_once, dtype) * most * team * PIECE


def product_cycles(warps: float, pieces: int, rows: int, samples: int, team: int, dtype: str) -> float:
    """Of a multiprocessor's warps that have so many pieces of each of so many rows: a vector's numbers are read, of 16
    bits widened, and multiplied for every row; then lanes add up their sums."""
    size = ELEMENT_BYTES[dtype]
    of_piece = samples * (1 + PIECE // size * (rows + (size == 2)))
    return pieces * of_piece * max(warps / SCHEDULERS, ALONE) + math.log2(team) * EXCHANGE


@dataclass(frozen=True)
class DecodeStep(OneSpread):
    """A pass, tiled: `own` features for each block along y, `team` lanes for a row."""

    decoder: Decoder
    dtype: str
    layer: int
    own: int
    team: int
    gpu: Gpu

    reads, writes = "x", "y"  # both are tensors of all passes
    title = "decode step"
    starts = True

    @property
    def inputs(self) -> int:
        return self.decoder.features_in(self.layer)

    @property
    def hidden(self) -> int:
        return self.decoder.hidden

    @property
    def threads(self) -> int:
        return round_up(GATES * self.own * self.team, 32)

    @property
    def split(self) -> int:
        return -(-self.hidden // self.own)

    @property
    def states_at(self) -> int:
        """Where states begin in shared memory, behind inputs."""
        return self.decoder.samples * vector_bytes(self.inputs, self.team, AT_ONCE, self.dtype)

    @property
    def made_at(self) -> int:
        """Where sums of rows begin in shared memory."""
        return self.states_at + self.decoder.samples * vector_bytes(self.hidden, self.team, AT_ONCE, self.dtype)

    @property
    def shared(self) -> int:
        return self.made_at + self.own * GATES * 2 * self.decoder.samples * max(4, self.size)

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, COUNTER_BYTES

    @property
    def weight_bytes(self) -> int:
        return GATES * self.hidden * (self.inputs + self.hidden) * self.size

    @property
    def us(self) -> float:
        rates, longest = self.gpu.rates, max(self.inputs, self.hidden)
        waits = 2 + rounds(longest, self.team, AT_ONCE, self.dtype)  # for tokens, for their rows, and for weights
        read = self.weight_bytes / self.split / rates.l2_bytes
        mine = sum(pieces(features, self.team, self.dtype) for features in (self.inputs, self.hidden))
        kind = mine, 1, self.decoder.samples, self.team, self.dtype
        busy = product_cycles(self.threads / 32, *kind) / rates.cycles
        return rates.behind_us + waits * rates.wait_us + (read + busy) * -(-self.split // self.gpu.sms)

    @property
    def details(self) -> str:
        return f"layer {self.layer}, {self.own} features a block, {self.team} lanes a row"

    @property
    def told(self) -> list[str]:
        decoder, chain = self.decoder, self.decoder.recurrence.chain
        told: Told = {"Element": ELEMENT[self.dtype], "THREADS": self.threads, "TEAM": self.team}
        told |= {"AT_ONCE": AT_ONCE, "SAMPLES": decoder.samples, "OWN": self.own, "LAYER": self.layer}
        told |= {"EMBEDDING": decoder.embedding, "CONTEXT": decoder.context, "INPUTS": self.inputs}
        told |= {"HIDDEN": self.hidden, "BIASED": chain.bias}
        told |= {"LOAD_INPUTS": load_bytes(self.inputs, self.dtype), "LOAD_STATES": load_bytes(self.hidden, self.dtype)}
        parts = (decoder.embedding, decoder.context) if self.layer == 0 else (self.hidden,)
        told["LOAD_VECTOR"] = math.gcd(*(load_bytes(part, self.dtype) for part in parts))
        told |= {"kStatesAt": self.states_at, "kSumsAt": self.made_at}
        return [*constants(told), *functions_of(chain, self.dtype)]


def tilings(decoder: Decoder, layer: int, dtype: str, gpu: Gpu) -> Iterator[DecodeStep]:
    for team in TEAMS:
        most = MOST_THREADS // (GATES * team)
        own = min(most, max(1, -(-decoder.hidden // gpu.sms)))
        made = DecodeStep(decoder, dtype, layer, own, team, gpu)
        if made.shared <= gpu.shared and decoder.samples * own <= made.threads:
            yield made


def tile(decoder: Decoder, layer: int, dtype: str, batch: int, gpu: Gpu) -> DecodeStep | None:
    return min(tilings(decoder, layer, dtype, gpu), key=lambda plan: plan.us, default=None)  # of any batch
