"""Classes of batches: numbers of samples that have the same plan, the one that a plan is made for, and those that it is
compared by."""

from __future__ import annotations

import bisect

MOST = 4, 64, 256, 2048, 8192  # samples of a class, as csrc/runtime has them; the last has no end
BATCHES = 2, 16, 192, 1024, 4096, 16384  # what a class is planned for
OF_FEW, OF_SOME, LAST = 1, 3, len(BATCHES) - 1  # classes: those of FEW and SOME, and of many samples
# Times as many samples, which plans and tilings of a class are compared by: those with one number may happen to have as
# many tiles as a GPU takes at once
COMPARED = (1 / 2, 1, 2), (3 / 4, 3 / 2, 2, 3), (1 / 2, 1, 4 / 3), (1 / 2, 1, 3 / 2), (3 / 4, 1, 3 / 2), (1, 4, 16)
# Up to FEW, plans are of few samples; SOME stands for all that are not
FEW, SOME = BATCHES[OF_FEW], BATCHES[OF_SOME]
MOST_FEW, MOST_SOME = MOST[OF_FEW], MOST[OF_SOME]
# Sequences of a recurrence, whose groups take turns, of each class but the last two
OF_SEQUENCES = (1, 2, 4), (8, 16, 32, 64), (128, 256), (512, 1024, 2048)


def class_of(batch: int) -> int:
    """The class that a number of samples belongs to, as csrc/runtime says it: its plan was made for BATCHES[class]."""
    return bisect.bisect_left(MOST, batch)


def most_of_class(batch: int) -> int:
    """The most samples that the plan of a batch's class is for."""
    return next((most for most in MOST if batch <= most), 1 << 40)


def stands_for(batch: int) -> int:
    """The number of samples whose plan says what a chain has kernels for: all classes of few are alike, and all others,
    as graphs serve any batch."""
    return FEW if batch <= FEW else SOME


def samples_of_class(batch: int) -> tuple[int, ...]:
    """Numbers of samples that plans and tilings are compared by for the class of a batch."""
    return tuple(max(1, round(each * batch)) for each in COMPARED[class_of(batch)])


def sequences_of_class(batch: int) -> tuple[int, ...]:
    """The same of sequences that take turns by groups."""
    return next((each for each in OF_SEQUENCES if batch <= each[-1]), (batch,))
