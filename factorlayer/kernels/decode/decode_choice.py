"""Scores of a decoder's step, and what is made of them: what decode_choice.cuh is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.decode.decode_step import (
    COUNTER_BYTES,
    TEAMS,
    load_bytes,
    pieces,
    product_cycles,
    rounds,
    vector_bytes,
)
from factorlayer.kernels.passes import OneSpread
from factorlayer.maths.decoder import Decoder

AT_ONCE = 16  # pieces of a lane that are on their way at once, of all its rows
SAMPLES_OF_ONE = 2  # up to which a team has one row at once, and beyond that two: a vector's numbers are read for both
THREADS = 512
LEAST_ROWS = 8  # of a block
TENSORS, OF_LAYER = 7, 4  # in front of the layers', and of each of them, as decode_rows.cuh has them


@dataclass(frozen=True)
class DecodeChoice(OneSpread):
    """A pass, tiled: a block's rows of the head are shared out by `team` lanes each."""

    decoder: Decoder
    dtype: str
    team: int
    gpu: Gpu

    reads, writes = "x", "y"  # both are tensors of all passes
    threads = THREADS
    title = "decode choice"
    waits = False  # its kernel does, behind what it asks for

    @property
    def rows(self) -> int:
        """Of a block."""
        return max(LEAST_ROWS, -(-self.decoder.vocabulary // self.gpu.sms))

    @property
    def of_team(self) -> int:
        """Rows that a team has at once; of doubles registers hold one."""
        return 1 if self.decoder.samples <= SAMPLES_OF_ONE or self.size == 8 else 2

    @property
    def _of_row(self) -> tuple[int, int, int, str]:
        return self.decoder.hidden, self.team, AT_ONCE // self.of_team, self.dtype

    @property
    def split(self) -> int:
        return -(-self.decoder.vocabulary // self.rows)

    @property
    def best_at(self) -> int:
        """Where best tokens of teams begin in shared memory."""
        return self.decoder.samples * vector_bytes(*self._of_row)

    @property
    def best_bytes(self) -> int:
        return self.decoder.samples * 2 * max(4, self.size)

    @property
    def shared(self) -> int:
        return self.best_at + THREADS // self.team * self.best_bytes

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, COUNTER_BYTES + self.split * self.best_bytes

    @property
    def us(self) -> float:
        decoder, rates = self.decoder, self.gpu.rates
        turns = -(-self.rows // (THREADS // self.team * self.of_team))
        waits = 2 + rounds(*self._of_row) * turns  # for rows, for the state, and for other blocks
        read = self.rows * decoder.hidden * self.size / rates.l2_bytes
        warps = self.rows / self.of_team * self.team / 32
        kind = pieces(decoder.hidden, self.team, self.dtype), self.of_team, decoder.samples, self.team, self.dtype
        return rates.behind_us + waits * rates.wait_us + read + product_cycles(warps, *kind) / rates.cycles

    @property
    def details(self) -> str:
        return f"{self.decoder.made}, {self.rows} rows of the head a block, {self.team} lanes a row"

    @property
    def told(self) -> list[str]:
        decoder = self.decoder
        told: Told = {
            "Element": ELEMENT[self.dtype],
            "THREADS": THREADS,
            "TEAM": self.team,
            "AT_ONCE": AT_ONCE,
            "OF_TEAM": self.of_team,
        }
        told |= {"SAMPLES": decoder.samples, "HIDDEN": decoder.hidden, "VOCABULARY": decoder.vocabulary}
        told |= {"LAYERS": decoder.layers, "ROWS": self.rows, "BLOCKS": self.split, "BIASED": decoder.biased}
        told |= {
            "CHOOSES": decoder.made != "scores",
            "DRAWS": decoder.made == "drawn",
            "LOAD": load_bytes(decoder.hidden, self.dtype),
        }
        told |= {"kOutputs": TENSORS + OF_LAYER * decoder.layers, "kBestAt": self.best_at}
        return constants(told)


def tilings(decoder: Decoder, dtype: str, gpu: Gpu) -> Iterator[DecodeChoice]:
    for team in TEAMS:
        made = DecodeChoice(decoder, dtype, team, gpu)
        if made.shared <= gpu.shared:
            yield made


def tile(decoder: Decoder, dtype: str, batch: int, gpu: Gpu) -> DecodeChoice | None:
    return min(tilings(decoder, dtype, gpu), key=lambda plan: plan.us, default=None)  # of any batch
