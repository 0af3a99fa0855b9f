"""take_over and give_back: the LoKr layers of a model, PEFT's or LyCORIS', run without making w1 ⊗ w2.

A layer that is taken gets a subclass of its own class, whose product is ours: parameters, hooks, merging, saving and
loading stay as they are. in_peft.py and in_lycoris.py have the classes, and say what each layer is made of.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from factorlayer.adapters.record import Record

PACKAGES = {"peft.tuners.lokr.layer": "in_peft", "lycoris.modules.lokr": "in_lycoris"}  # theirs, and ours for them


def take_over(model: nn.Module) -> Record:
    """Has all LoKr layers of a model, PEFT's or LyCORIS', add x (w1 ⊗ w2)ᵀ without making the matrix.

    A LyCORIS network is given itself, or the model that it was applied to. Layers that need the matrix are left to
    their own code; the record says which and why. What has parts missing is refused, and nothing is changed then.
    Called again, it takes layers that have been added since.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"take_over: model should be an nn.Module, it is {type(model).__name__}")
    record, found, wrong = Record(), [], []
    for name, module, ours in _layers(model):
        reason = ours.why_left(module)
        if reason is not None:
            record.left[name] = reason
            continue
        parts = ours.parts_of(module)
        wrong += [f"{name}: {words}" for words in (each.wrong() for each in parts) if words is not None]
        found.append((name, module, ours, parts))
    if wrong:
        more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
        raise ValueError(
            f"take_over: {wrong[0]}{more}; load a file that has all parts, with the options that it was trained with. "
            "Nothing was taken over"
        )
    if not found and not record.left:
        raise ValueError(_why_none(model))
    for name, module, ours, parts in found:
        module.__class__ = ours.CLASSES.get(type(module), type(module))
        record.taken[name] = "; ".join(map(str, parts))
    return record


def give_back(model: nn.Module) -> int:
    """Has the layers run their own code again; says how many there were."""
    taken = [(module, ours) for _, module, ours in _layers(model) if type(module) in ours.CLASSES.values()]
    for module, ours in taken:
        module.__class__ = next(theirs for theirs, mine in ours.CLASSES.items() if mine is type(module))
    return len(taken)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Names and LoKr layers, with our module for their package. A package that nobody has imported has none."""
    imported = [ours for theirs, ours in PACKAGES.items() if theirs in sys.modules]
    rooms = [importlib.import_module(f"factorlayer.adapters.{ours}") for ours in imported]
    seen: set[int] = set()
    for name, module in model.named_modules():
        wrappers = getattr(module, "_lycoris_wrappers", ())  # of a model that a LyCORIS network was applied to
        for each in (module, *wrappers):
            room = _room_of(each, rooms)
            if room is not None and id(each) not in seen:
                seen.add(id(each))
                yield name or type(each).__name__, each, room


def _room_of(module: nn.Module, rooms: list[ModuleType]) -> ModuleType | None:
    return next((room for room in rooms if isinstance(module, room.LAYERS)), None)


def _why_none(model: nn.Module) -> str:
    who = f"take_over: {type(model).__name__} has no LoKr layers of PEFT or LyCORIS"
    if not any(importlib.util.find_spec(package) for package in ("peft", "lycoris")):
        return f'{who}, neither of which is installed; `pip install "factorlayer[foreign]"` brings both'
    tuners = {type(module).__module__ for module in model.modules()}
    others = sorted({name.split(".")[2] for name in tuners if name.startswith("peft.tuners.") and name.count(".") > 2})
    if others:
        return f"{who}: its adapters are PEFT's {', '.join(others)}, which make no Kronecker product"
    return f"{who}; make them with peft.get_peft_model(model, LoKrConfig(…)), or lycoris.create_lycoris(…), before"
