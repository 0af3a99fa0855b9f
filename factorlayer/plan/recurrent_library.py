"""What PyTorch takes for a recurrent layer with dense matrices: operations around the fused recurrence, and its own op,
which on a GPU is cuDNN's. Counted as plan/library.py does, for auto to compare.

cuDNN's ordinary unit makes a step of a product with the state and of a kernel for the gates, one behind another, and so
back: no number of it is needed but those of PyTorch's operations. Of few features, in float16 and float32, all steps
are one kernel, of which SMALL_US and SMALL_BACK_US are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from factorlayer.device.gpu import Gpu
from factorlayer.maths.recurrence import GATES
from factorlayer.plan.library import Call, Pointwise, Product, Sum

# Features of a state up to which cuDNN has one kernel for all steps, as PyTorch asks for it, but for packed sequences:
# use_rnn_persist_small_h in its ATen/native/cudnn/RNN.cpp, and profiles of an H100, in which states of 192 take others
SMALL, OF_SMALL = 128, ("float16", "float32")
# Microseconds of it in a layer, at the start and for each step, forward and back, in those profiles: 61 sequences of 11
# and of 50 steps, 128 features
SMALL_US, SMALL_BACK_US = (25.0, 0.8), (3.0, 1.0)
# Numbers of a feature that the kernel of a step's gates reads and writes: forward those of three gates' inputs and
# products, the state and the new one, and, trained, what is kept of four; back these four, the states, what comes back,
# and gradients of three gates, of the candidate's product, and of the state
OF_GATES, KEPT, OF_GATES_BACK = 8, 4, 12


# What a layer's steps behind those of another layer take, of which cuDNN's ordinary unit runs some at once: four layers
# of 512 features, 16 sequences of 50 steps, forward and back, on an H100
FURTHER_LAYER = 0.51
# What a row adds to the one kernel of cuDNN's that sums up biases' gradients, of any number of columns, in profiles of
# an H200: 24,576 to 131,072 rows of 256 and 512 features took 24 to 26 ns each
BIAS_ROW_US = 0.0255
# What a step back takes more in TF32 for each feature than products are predicted to, as cuDNN's kernels do not split
# the sum of three times as many: rows of an H200 with 16 and 256 sequences of 256 to 1024 features, 6 to 14 nanoseconds
TF32_BACK_US = 7.5e-3
SUM_US = 11.4  # of a sum over few or many rows at least: 671 of 128 and of 384, in the same profiles


@dataclass(frozen=True)
class RowsSum(Sum):
    """The sum of all rows to one, such as a bias's gradient. With few columns few multiprocessors are busy. Where our
    kernel makes it, `text` says what it does, and of how many samples."""

    text: str = ""
    samples: int = 0

    def us(self, dtype: str, gpu: Gpu) -> float:
        return max(SUM_US, super().us(dtype, gpu))


class Sequences(NamedTuple):
    """The sequences of one call. `rows` counts all steps of all of them; `packed` ones may have different lengths."""

    sequences: int
    steps: int
    rows: int
    packed: bool = False

    @property
    def together(self) -> int:
        """Sequences of a step, on average."""
        return max(1, self.rows // max(1, self.steps))


class Unit(NamedTuple):
    """A recurrent layer: features of the inputs of each of its cells, and of all their states; and whether all of its
    matrices are dense."""

    features: tuple[int, ...]
    hidden: int
    bias: bool
    dense: bool


LEADING = 4  # bits of a number of steps, or of rows, that a choice depends on


def alike(n: int) -> int:
    """A number with all but its leading bits cleared, so that lengths which differ little from call to call share a
    prediction."""
    others = max(0, n.bit_length() - LEADING)
    return n >> others << others


@dataclass(frozen=True)
class RowsProduct(Product):
    """A product of all rows with a dense matrix, or, summed over all rows, the gradient of one. Where our kernels make
    it, `text` says what they do, and of how many samples."""

    text: str = ""
    samples: int = 0


def product(rows: int, columns: int, summed: int, bias: bool = False) -> RowsProduct:
    runs, text = (columns, summed), f"tied 0 1 {summed} {columns} 1"
    return RowsProduct(1, rows, columns, summed, runs, batched=False, bias=bias, text=text, samples=rows)


def back(rows: int, columns: int, summed: int) -> RowsProduct:
    """The same with a matrix that lies the other way round."""
    return replace(product(rows, columns, summed), turned=1)


def gradient(q: int, p: int, rows: int) -> RowsProduct:
    text = f"tied 0 1 {p} {q} 1; gradient"
    return RowsProduct(1, q, p, rows, (q, p), batched=False, turned=2, text=text, samples=rows)


def around(unit: Unit, given: Sequences, training: bool) -> Iterator[Call]:
    """Operations of a call beside the recurrence's own kernels."""
    h, rows, cells = unit.hidden, given.rows, len(unit.features)
    yield Pointwise(given.sequences * h)  # initial states
    yield Pointwise(2 * cells * given.sequences * h)  # states behind the last steps
    for features in unit.features:
        yield product(rows, GATES * h, features, unit.bias)
        if unit.bias:
            yield from (Pointwise(2 * GATES * h), Pointwise(3 * 2 * h))
        if training:
            yield from _around_back(unit, features, rows)


def _around_back(unit: Unit, features: int, rows: int) -> Iterator[Call]:
    h = unit.hidden
    yield Pointwise(2 * rows * h)  # states before steps
    yield product(rows, GATES * h, h)
    yield from (gradient(2 * h, h, rows), gradient(h, h, rows))
    yield from (gradient(GATES * h, features, rows), back(rows, features, GATES * h))
    if unit.bias:
        yield from (of_rows(rows, h), of_rows(rows, GATES * h), Pointwise(2 * GATES * h))


def of_rows(rows: int, columns: int) -> RowsSum:
    return RowsSum(rows, columns, text=f"sums {columns}", samples=rows)


def op_us(unit: Unit, dtype: str, in_tf32: bool, given: Sequences, training: bool, gpu: Gpu) -> float:
    """Microseconds of PyTorch's op. dtype may be float32 `in_tf32`."""
    computed = "tf32" if dtype == "float32" and in_tf32 else dtype
    h, rows, cells = unit.hidden, given.rows, len(unit.features)
    us = Pointwise(cells * given.sequences * h).us(dtype, gpu)
    step_us, step_back_us = steps_us(unit, dtype, in_tf32, given, training, gpu)
    small = is_small(unit, dtype, given)
    start_us, start_back_us = (SMALL_US[0], SMALL_BACK_US[0]) if small else (0.0, 0.0)
    last = 0.0  # of what all layers do side by side, behind all steps
    for i, features in enumerate(unit.features):
        beside = 1.0 if small or i == 0 else FURTHER_LAYER
        us += product(rows, GATES * h, features).us(computed, gpu) + start_us + beside * given.steps * step_us
        if training:
            of_x = back(rows, features, GATES * h).us(computed, gpu)
            of_weights = [gradient(GATES * h, each, rows).us(computed, gpu) for each in (features, h)]
            of_steps = start_back_us + beside * given.steps * step_back_us
            if small:
                us += of_steps + of_x
                of_biases = of_rows(rows, 2 * GATES * h).us(dtype, gpu) if unit.bias else 0.0
                last = max(last, *of_weights, of_biases)
            else:
                # Of a layer behind another, biases are summed while the steps of that one go back.
                of_biases = BIAS_ROW_US * rows if unit.bias and i == 0 else 0.0
                us += max(of_steps + of_biases, of_x + sum(of_weights))  # which streams of their own make
    return us + last


def steps_us(unit: Unit, dtype: str, in_tf32: bool, given: Sequences, training: bool, gpu: Gpu) -> tuple[float, float]:
    """The microseconds of a step, forward and back."""
    h, together = unit.hidden, max(2, given.together)  # of one sequence, too, cuDNN makes products of matrices
    computed = "tf32" if dtype == "float32" and in_tf32 else dtype
    found = []
    for goes_back in (False, True):
        if is_small(unit, dtype, given):
            multiplied = 2 * together * GATES * h * h / (gpu.library.units[computed].flops * gpu.sms)
            found.append(max((SMALL_BACK_US if goes_back else SMALL_US)[1], multiplied))
            continue
        moved = OF_GATES_BACK if goes_back else OF_GATES + KEPT * training
        made = back(together, h, GATES * h) if goes_back else product(together, GATES * h, h)
        further = TF32_BACK_US * h if computed == "tf32" and goes_back else 0.0
        found.append(made.us(computed, gpu) + Pointwise(moved * together * h).us(dtype, gpu) + further)
    forward, back_us = found
    return forward, back_us


def is_small(unit: Unit, dtype: str, given: Sequences) -> bool:
    return unit.hidden <= SMALL and dtype in OF_SMALL and not given.packed
