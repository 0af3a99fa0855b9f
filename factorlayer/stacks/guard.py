"""What a graph of a module's calls depends on besides tensors, and whether it is still as it was: a Guard.

A trace fixes what the module's code reads of modules: numbers, flags, functions, parts. Reads are recorded while
it runs, and a call compares them with what is there, by identity and in C.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import is_, is_not
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.compiler import is_compiling

from factorlayer.layers import FactorLinear

_ABSENT = object()
_OWN = frozenset(vars(nn.Module()))  # what every module has: its parts and tensors, hooks and mode
_OF_ALL = frozenset(dir(nn.Module))
_HOOKS = ("_forward_pre_hooks", "_backward_pre_hooks", "_forward_hooks", "_backward_hooks")
_LARGEST = 64  # attributes of an object that is compared at every call

Read = tuple[nn.Module, str]


class Quiet:
    """Keeps a class from running its base's __init_subclass__: users' classes should not hear of classes that are made
    from them."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def class_like(base: type, body: dict[str, Any]) -> type:
    """A class of the same name as its base, whose instances pass for the base's, with a body of its own."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (Quiet, base), names | body)


class _Unread:
    """Stands for FactorLinear.weight in a trace. Code may ask whether it is a tensor, but reading its dtype or device
    is refused, as these may change."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(f"its forward reads FactorLinear.weight.{name}, which a graph would keep as it is now")


@contextlib.contextmanager
def recording(modules: Iterable[nn.Module]) -> Iterator[list[Read]]:
    """Records which attributes of the modules are read, by name and in order. Like torch.fx, it watches all modules
    meanwhile."""
    reads: list[Read] = []
    watched = set(modules)

    def read(self: nn.Module, name: str) -> Any:
        if name == "weight" and isinstance(self, FactorLinear):
            return _Unread()
        if name not in _OWN and name not in _OF_ALL and self in watched:
            reads.append((self, name))
        return object.__getattribute__(self, name)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__


class Guard:
    """Values that are compared at every call."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], str] = {}
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._whose: list[str] = []
        self._given: tuple[list[dict[str, Any]], list[str]] = ([], [])  # tensors that are there, whatever they are
        self._hooks: list[dict[int, Any]] = []
        self._counted: list[dict[str, Any]] = []
        self._counts: list[int] = []
        self._copied: list[tuple[Any, Any, str]] = []
        self._of_classes: list[tuple[type, str, Any]] = []

    def add_reads(self, reads: Iterable[Read]) -> None:
        for module, name in reads:
            self._add(module, name)

    def add_module(self, module: nn.Module) -> None:
        """One that the trace has gone through: its parts, and that nothing else runs than its class's forward."""
        self._add_parts(module)
        self._hooks += [vars(module)[name] for name in _HOOKS]
        self._expect(vars(module), "forward", _ABSENT, f"{type(module).__name__}.forward")

    def _add_parts(self, module: nn.Module) -> None:
        for name, part in module._modules.items():
            self._expect(module._modules, name, part, f"{type(module).__name__}.{name}")
        self._counted.append(module._modules)
        self._counts.append(len(module._modules))

    def add_activation(self, module: nn.Module) -> None:
        """One that has become part of a kernel, with all its numbers. Its hooks are looked for by the stack."""
        for part in module.modules():
            self._add_parts(part)
            for name in vars(part).keys() - _OWN - {"forward"}:
                self._add(part, name)

    def _add(self, module: nn.Module, name: str) -> None:
        whose = f"{type(module).__name__}.{name}"
        own = vars(module)
        for tensors in (own["_parameters"], own["_buffers"]):
            if name in tensors:
                if tensors[name] is None:
                    self._expect(tensors, name, None, whose)
                else:
                    self._given[0].append(tensors)
                    self._given[1].append(name)
                return
        if name in own["_modules"] or (id(own), name) in self._seen:
            return
        value = own.get(name, _ABSENT)
        if value is _ABSENT:
            of_class = getattr(type(module), name, _ABSENT)
            if _is_constant(of_class):
                self._of_classes.append((type(module), name, of_class))
        else:
            self._copy_if_it_changes(value, whose)
        self._expect(own, name, value, whose)

    def _expect(self, owner: dict[str, Any], name: str, value: Any, whose: str) -> None:
        if (id(owner), name) not in self._seen:
            self._seen[id(owner), name] = whose
            self._owners.append(owner)
            self._names.append(name)
            self._values.append(value)
            self._whose.append(whose)

    def _copy_if_it_changes(self, value: Any, whose: str) -> None:
        """What may become something else and stay the same object."""
        if isinstance(value, nn.Module) or _is_constant(value):
            return
        inner = value if isinstance(value, list | dict | set) else getattr(value, "__dict__", None)
        if not isinstance(inner, list | dict | set) or isinstance(value, Tensor) or len(inner) > _LARGEST:
            raise ValueError(f"its forward reads {whose}, {_a(value)}, which may change unseen")
        each = inner.values() if isinstance(inner, dict) else inner
        if not all(map(_is_constant, each)):
            raise ValueError(f"its forward reads {whose}, {_a(value)} of what may change unseen")
        self._copied.append((inner, inner.copy(), whose))

    def holds(self) -> bool:
        """Whether all is as it was; by far the most often, so it is asked fast."""
        return (
            all(map(is_, map(dict.get, self._owners, self._names, repeat(_ABSENT)), self._values))
            and not any(self._hooks)
            and [*map(len, self._counted)] == self._counts
            and not (self._copied or self._of_classes or self._given[0])
        ) or self.what_changed() is None

    def what_changed(self) -> str | None:
        """What has changed, in words, or None."""
        for i, (owner, name, value) in enumerate(zip(self._owners, self._names, self._values, strict=True)):
            now = owner.get(name, _ABSENT)
            if now is not value:
                if not is_equal(now, value):
                    return f"{self._whose[i]} is another"
                if not is_compiling():
                    self._values[i] = now  # to be found at once
        if any(self._hooks):
            return "a part has got a hook"
        if [*map(len, self._counted)] != self._counts:
            return "it has got another number of parts"
        if not all(map(is_not, map(dict.get, *self._given), repeat(None))):
            return "a parameter or buffer is gone"
        for inner, copy, whose in self._copied:
            if not _are_equal(inner, copy):
                return f"what is in {whose} is another"
        for owning, name, value in self._of_classes:
            if not is_equal(getattr(owning, name, _ABSENT), value):
                return f"{owning.__name__}.{name} is another"
        return None


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"


def _is_constant(value: Any) -> bool:
    """Whether it stays what it is as long as it is the same object."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    if value is None or isinstance(value, int | float | complex | str | bytes | type):
        return True
    if isinstance(value, Tensor) or value is _ABSENT:
        return False
    if callable(value) and not hasattr(value, "__dict__"):
        return True  # a builtin, say
    if type(value).__name__ in ("function", "method", "method-wrapper", "partial", "ufunc", "OpOverload"):
        return True
    return type(value).__module__ == "torch" and not hasattr(value, "__dict__")  # a dtype, a device


def is_equal(a: Any, b: Any) -> bool:
    """Whether constants are equal: 1, 1.0 and True make different numbers, and so do 0.0 and -0.0."""
    if a is b:
        return True
    if type(a) is not type(b) or not _is_constant(a):
        return False
    return bool(a == b) and (is_compiling() or repr(a) == repr(b))


def _are_equal(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_equal, a.values(), b.values()))
    return a == b if isinstance(a, set) else all(map(is_equal, a, b))
