"""A property that is computed once: functools.cached_property without the lock that Python before 3.12 takes for it,
as planning asks for ten thousands of them. Two threads at once may both compute one, to the same value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as kept
else:

    class kept:  # noqa: N801
        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Of an instance that does not have it yet: what it has itself comes before this."""
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


__all__ = ["kept"]
