"""The registry of families that make all gradients at one visit: a record is all that the planner knows of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.kronecker import pair_backward
from factorlayer.plan import registry
from factorlayer.plan.planner import plan_of

ROOT = Path(__file__).parents[1]
FAMILIES = (*registry.OF_ONE_FACTOR, *registry.OF_FACTORS)
CHAIN = "tied 1 24 24 24 1; tied 0 1 24 24 24; backward"


def test_each_family_has_one_record_and_is_in_the_index() -> None:
    index = (ROOT / "docs" / "kernels" / "README.md").read_text()
    modules = [family.tile.__module__ for family in FAMILIES]
    assert len(set(modules)) == len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert [module for module in modules if f"[{module.replace('.', '/')}.py]" not in index] == []


def test_the_planner_imports_the_registry_and_not_its_families() -> None:
    text = (ROOT / "factorlayer" / "plan" / "planner.py").read_text()
    assert [family.name for family in FAMILIES if family.name.replace(" ", "_") in text] == []


def test_a_record_is_enough_for_a_plan_to_have_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def tile(*asked: Any) -> pair_backward.PairBackward | None:
        found = pair_backward.tile(*asked)
        return replace(found, slots=1, us=0.5) if found else None

    asked = registry.OF_FACTORS[0]
    assert asked.tile is pair_backward.tile
    before = plan_of(CHAIN, "float32", 1, Gpu(80, 97, 150000))
    assert before.passes[0].us > 0.5
    toy = registry.Family("toy", "two factors, one slot", tile)
    monkeypatch.setattr(registry, "OF_FACTORS", (*registry.OF_FACTORS, toy))
    found = plan_of(CHAIN, "float32", 1, Gpu(80, 96, 150000))  # one that no other test has planned for
    assert found.passes[0].us == 0.5
    assert found.passes[1:] == found.passes[0].finishing
    assert "1 slots" in str(found)
