"""How the CUDA engine runs a chain or a stack: passes one behind another, as a printable Plan.

planner.py finds it; csrc/runtime reads its text.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import OF_SEQUENCES
from factorlayer.kernels.passes import CHUNK_BYTES, Pass
from factorlayer.maths.chain import Chain

# Numbers of samples that times are asked for, in each class of batch sizes: three quarters of each power of two that a
# number may round up to. Between two of them, and beyond the last ones, times lie on a line.
ASKED = (
    (1, 3),
    (6, 12, 24, 48),
    (96, 192),
    (384, 768, 1536),
    (3 << 10, 6 << 10),
    tuple(12 << bits for bits in range(10, 17)),
)
# Groups of a recurrence's sequences take turns: powers of two themselves, of as many numbers. Times of few are steps.
ASKED_OF_GROUPS = (
    *OF_SEQUENCES,
    (4 << 10, 8 << 10),
    tuple(16 << bits for bits in range(10, 17)),
)
CHUNK = 8  # samples that batches are cut into multiples of
KEPT_WORTH = 0.97  # of the time of a training step: memory for states that are kept has to be worth that
PASS_WEIGHT, PASS_US = 1.1, 1.0  # memory for what lies between, and another kernel's launch, have to be worth it


def asked_of(text: str, batch_class: int) -> tuple[int, ...]:
    """The numbers of samples that the times of a text's plan are asked for."""
    return (ASKED_OF_GROUPS if takes_turns(text) else ASKED)[batch_class]


def takes_turns(text: str) -> bool:
    """Whether a text is that of a recurrence's steps, forward or back."""
    return text.startswith("gru ") and not text.endswith(" | slopes")


def words(name: str) -> str:
    """The name of a class, written as names of Python's functions are."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class PlanError(ValueError):
    """The engine has no kernel for this chain."""


@dataclass(frozen=True)
class Plan:
    """Passes in order. The states between them lie in two scratch buffers in turn, sums of a gradient and chunks of
    weights in a third, and visits may name more buffers for their states. `us` is predicted. The plan of a stack has
    the first layer's `chain`."""

    chain: Chain
    dtype: str
    batch: int
    gpu: Gpu
    passes: tuple[Pass, ...]
    keeps: tuple[int, ...] = ()  # states that are kept behind the bias: the first pass's that hands one on is 0

    @property
    def us(self) -> float:
        return sum(p.us for p in self.passes)

    @property
    def _handed_on(self) -> tuple[tuple[int, Pass], ...]:
        """States that the next pass reads and nobody keeps, and the passes that make them."""
        makers = [p for p in self.passes[:-1] if p.writes == "state"]
        return tuple((i, p) for i, p in enumerate(makers) if i not in self.keeps)

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes of the first two buffers for one sample, of the third, and of further ones for one sample."""
        s0, s1, *others = map(max, itertools.zip_longest(*(p.scratch for p in self.passes), fillvalue=0))
        for i, p in self._handed_on:
            s0, s1 = (s0, max(s1, p.output_bytes)) if i % 2 else (max(s0, p.output_bytes), s1)
        return s0, s1, *others

    @property
    def chunk(self) -> int:
        """How many samples go through all passes together: a multiple of CHUNK, so that any rows of them are whole
        pieces of 16 bytes; 0 stands for the whole batch."""
        bounds = [p.most_samples for p in self.passes if p.most_samples]
        bounds += [CHUNK_BYTES // max(self.scratch[:2])] if self._handed_on else []
        return max(CHUNK, min(bounds) // CHUNK * CHUNK) if bounds else 0

    def _buffers(self, i: int) -> tuple[str, str]:
        """The buffers that a pass reads and writes; states take two buffers in turn, or are kept behind the bias."""
        p, before = self.passes[i], sum(each.writes == "state" for each in self.passes[:i])
        last = i == len(self.passes) - 1

        def of(state: int) -> str:
            if state in self.keeps:
                return f"@{self.chain.weights + 1 + self.keeps.index(state)}"
            return f"s{state % 2}"

        read = p.reads if p.reads != "state" else of(before - 1) if before else "x"
        return read, p.writes if p.writes != "state" else "y" if last else of(before)

    def text(self) -> str:
        """The plan as csrc/runtime reads it."""
        lines = ["factorlayer plan 1", f"chunk {self.chunk}", " ".join(map(str, ("scratch", *self.scratch)))]
        for i, p in enumerate(self.passes):
            read, written = self._buffers(i)
            beside, weight = p.beside
            read += f"+{beside}@{weight}" if beside else ""
            name = f"factorlayer_{words(type(p).__name__)}_{self.dtype}_{i}"  # as profilers show it
            code = p.source(name)
            lines.append(
                f"pass {read} {written} {p.threads} {p.shared} {p.units_per_sample} {p.units_per_block} "
                f"{p.blocks_per_sm} {p.split} {self.gpu.architecture} {name} {len(code.encode())}\n{code}"
            )
            lines += [f"map {line}" for line in p.maps]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        kernels = f"{len(self.passes)} kernel{'s' if len(self.passes) > 1 else ''}"
        lines = [
            f"{kernels}, {self.us:.1f} us predicted for a batch of {self.batch}, by rates {self.gpu.table.source}",
        ]
        if self.chunk:
            lines.append(f"at most {self.chunk} samples at once, their states between kernels in memory")
        return "\n  ".join([*lines, *map(str, self.passes)])
