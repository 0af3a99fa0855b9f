"""Classes of batches: numbers of samples that have the same plan, the one that a plan is made for, and those that it is
compared by."""

from __future__ import annotations

import bisect

MOST_FEW, MOST_SOME, MOST_MORE = 64, 2048, 8192  # samples of a class, as csrc/runtime has them; the last has no end
BATCHES = (16, 1024, 4096, 16384)  # what a class is planned for: few, some, more and many samples
SOME, LAST = 1, len(BATCHES) - 1  # classes; a layer that has a kernel for some samples has one for more and for many
FEW = BATCHES[0]
OF_FEW = (3 / 8, 3 / 4, 3 / 2, 3)  # times as many, 6 to 48, are what plans of few are compared by
OF_MORE = (3 / 4, 3 / 2)  # and of more, 3072 and 6144
TIMES_FEWER = 4  # samples than a class is planned for, with which few blocks may leave most of a last round idle
LEAST_OF_SOME = 128  # with few of some, most of a GPU may be idle
# Sequences of a recurrence, whose groups take turns: of plans of up to 64, and of up to 2048
OF_SEQUENCES = (4, 8, 16, 32, 64), (128, 256, 512, 1024, 2048)


def class_of(batch: int) -> int:
    """The class that a number of samples belongs to, as csrc/runtime says it: its plan was made for BATCHES[class]."""
    return bisect.bisect_left((MOST_FEW, MOST_SOME, MOST_MORE), batch)


def are_more(batch: int) -> bool:
    """Whether a number of samples stands for the class of more: 2049 to 8192."""
    return MOST_SOME < batch <= MOST_MORE


def few_samples(batch: int) -> tuple[int, ...]:
    """Numbers of samples that what is made for so few is compared by."""
    return tuple(round(each * batch) for each in OF_FEW)


def more_samples(batch: int) -> tuple[int, ...]:
    """The same of more."""
    return tuple(round(each * batch) for each in OF_MORE)


def samples_of_class(batch: int) -> tuple[int, ...]:
    """Numbers of samples that tilings are compared by for a class of batches: of few and of more, some that it has; of
    others, TIMES_FEWER as well."""
    if batch <= FEW:
        return few_samples(batch)
    return more_samples(batch) if are_more(batch) else (batch, -(-batch // TIMES_FEWER))
