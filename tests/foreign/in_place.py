"""factorlayer.adapters in the place of other packages' Kronecker products, wherever one is made.

take_over is for one model. Here each LoKr layer that is made is one of ours from the beginning, and every product goes
our way, also where theirs would be faster. As a plugin of pytest it does so for whatever suite runs, theirs included:

    PYTHONPATH=tests/foreign python -m pytest -p in_place path/of/their/tests
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from factorlayer.adapters import linears, operators, products

Replace = Callable[[Any, str, Any], None]  # as pytest.MonkeyPatch.setattr
Calls = Counter[str]  # products by who made them


def go_our_way(replace: Replace) -> None:
    """Nothing is left to others for being small."""
    replace(products, "SMALL_MATRIX", 0)
    replace(operators, "LARGE_MEMBER", 0)


def counted(replace: Replace, room: Any, name: str) -> Calls:
    """Counts the products that a room makes, alone or with the layer's own."""
    calls: Calls = Counter()

    def product(*args: Any) -> Any:
        calls[name] += 1
        return products.product(*args)

    def added(*args: Any) -> Any:
        y = linears.added(*args)
        calls[name] += y is not None
        calls[f"{name} at once"] += y is not None
        return y

    replace(room, "product", product)
    replace(room, "added", added)
    return calls


def put_into_linear_operator(_: Replace) -> Calls:
    return operators.take_over_operators().calls


def put_into_peft(replace: Replace) -> Calls:
    """In the layers that PEFT makes of a model's."""
    from peft.tuners.lokr import LoKrModel

    from factorlayer.adapters import in_peft

    theirs = LoKrModel._create_new_module

    def taken(*args: Any, **named: Any) -> Any:
        layer = theirs(*args, **named)
        if in_peft.why_left(layer) is None:
            layer.__class__ = in_peft.CLASSES[type(layer)]
        return layer

    replace(LoKrModel, "_create_new_module", staticmethod(taken))
    return counted(replace, in_peft, "peft")


PACKAGES = {"linear_operator": put_into_linear_operator, "peft": put_into_peft}
_all: list[Calls] = []


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: in all of them that are installed."""
    go_our_way(setattr)
    _all.extend(put(setattr) for name, put in PACKAGES.items() if importlib.util.find_spec(name) is not None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for calls in _all:
        for words, count in calls.most_common():
            terminalreporter.write_line(f"{count} products by {words}")
