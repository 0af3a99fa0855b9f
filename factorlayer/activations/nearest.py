"""The name that somebody meant who typed another one: what a refusal ends with."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(came: str, names: Iterable[str]) -> str | None:
    """The name most like what came, in capitals or not, if one is."""
    lower = {name.lower(): name for name in names}
    found = get_close_matches(came.lower(), lower, n=1)
    return lower[found[0]] if found else None


def did_you_mean(name: str | None) -> str:
    """The end of a sentence: '; did you mean 'check'?', or nothing where there is no such name."""
    return "" if name is None else f"; did you mean {name!r}?"
