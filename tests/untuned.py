"""Measured choice as in a new process, for tests of it on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import factorlayer.functional
from factorlayer.tuning import choices, kept


def forget() -> None:
    """What was measured and warned of. What is kept in the cache is read again when a layer runs."""
    choices.TABLE.clear()
    choices._warned.clear()
    choices._load[:] = [kept.read_kept]
    choices.put([])
    factorlayer.functional._take_choices()
    factorlayer.functional.layer_at_once = factorlayer.functional._read_choices_first


@contextmanager
def untuned() -> Iterator[None]:
    """Inside nothing is known but what the cache keeps, and behind it nothing at all."""
    forget()
    yield
    forget()
    choices._load.clear()
