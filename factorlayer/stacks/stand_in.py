"""Stand-ins: a module's attributes, parameters and hooks, the same objects, with another forward or other parts.

A module that no graph can hold runs its own forward on its stand-in, and finds stand-ins where its parts are fused. The
module itself is left as it is, and what is changed in it afterwards is changed in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from factorlayer.stacks.guard import class_like

Parts = Mapping[str, tuple[nn.Module, nn.Module]]  # by name, what was there and what stands for it
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # which look for their parts in _modules


def why_none(module: nn.Module) -> str | None:
    """Why there can be no stand-in for a module, or None."""
    base = type(module)
    if isinstance(module, nn.Module) and not any("__slots__" in vars(c) and vars(c)["__slots__"] for c in base.__mro__):
        return "it is a script" if base.__module__.startswith("torch.jit") else None
    return "its class has __slots__"


def stand_in(module: nn.Module, parts: Parts, methods: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """The module with other parts, as long as those are there that they stand for, and other methods."""
    base = type(module)
    body: dict[str, Any] = {"__class__": property(lambda self: base), **methods}
    if parts:
        body["_modules"] = property(*_found_by_all(parts))
        if not isinstance(module, _LISTS):
            body["__getattr__"] = _found_by_name(base, parts)
    twin: nn.Module = object.__new__(class_like(base, body))
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _found_by_name(base: Any, parts: Parts) -> Callable[[nn.Module, str], Any]:
    def found(self: nn.Module, name: str) -> Any:
        value = base.__getattr__(self, name)
        was, now = parts.get(name, (None, None))
        return now if was is not None and value is was else value

    return found


class _View(dict[str, Any]):
    """A module's parts, some by their stand-ins: what is set here is set there."""

    def __init__(self, own: dict[str, Any], stands: dict[str, nn.Module]) -> None:
        super().__init__({**own, **stands})
        self.own = own

    def __setitem__(self, name: str, part: Any) -> None:
        super().__setitem__(name, part)
        self.own[name] = part

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.own[name]


def _found_by_all(parts: Parts) -> tuple[Callable[[nn.Module], dict[str, Any]], Callable[[nn.Module, Any], None]]:
    def get(self: nn.Module) -> dict[str, Any]:
        own: dict[str, Any] = self.__dict__["_modules"]
        stands = {name: now for name, (was, now) in parts.items() if own.get(name) is was}
        return _View(own, stands) if stands else own

    def put(self: nn.Module, modules: Any) -> None:
        self.__dict__["_modules"] = modules

    return get, put
