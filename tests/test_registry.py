"""The registry of families of kernels: a record is all that the planner knows of one, and what it says is so."""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from families import PAGE, written

from factorlayer import kernels
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.kronecker import pair_backward
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.work import Mode
from factorlayer.maths.chain import Chain
from factorlayer.plan import gradients
from factorlayer.plan.plan import PlanError
from factorlayer.plan.planner import plan, plan_of
from factorlayer.plan.registry import families, kronecker, monarch, product, recurrent, stack
from factorlayer.plan.registry.family import Asked, Family, Margin, Takes, fastest

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "factorlayer" / "plan"
FAMILIES = families()
CHAIN = "tied 1 24 24 24 1; tied 0 1 24 24 24; backward"


def passes() -> Iterator[type[Pass]]:
    """All that have a kernel."""
    for module in pkgutil.walk_packages(kernels.__path__, "factorlayer.kernels."):
        importlib.import_module(module.name)
    found = [Pass]
    for each in found:
        found += each.__subclasses__()
    yield from {each for each in found if hasattr(each, "told") and not each.__name__.startswith("_")}


def test_each_pass_is_of_one_family() -> None:
    made = [each for family in FAMILIES for each in family.makes]
    bases = {each for each in passes() if each.__subclasses__()} - set(made)  # what several families have in common
    assert len(made) == len(set(made)) and set(made) == set(passes()) - bases
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_each_family_is_of_a_kind() -> None:
    """All that the planner asks are printed."""
    rooms = kronecker, monarch, product, recurrent, stack
    asked = [value for room in rooms for name, value in vars(room).items() if name.startswith("OF_")]
    assert {family.name for kind in asked for family in kind} <= {family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace(" ", "-"))
def test_its_files_are_there(family: Family) -> None:
    assert (ROOT / family.module).exists()
    assert (ROOT / family.template).exists(), f"{family.template}: give the record its header"
    assert (PAGE.parent / f"{family.page}.md").exists()
    assert all(isinstance(getattr(Gpu, need), property) for need in family.takes.needs)


def test_the_page_is_what_the_records_say() -> None:
    page = PAGE.read_text()
    assert page == written(page), "docs/kernels/README.md is stale: run python tests/families.py"


def test_the_planner_imports_no_family() -> None:
    """Functions and constants that families share, but neither their passes nor their tilings."""
    for path in PLAN.glob("*.py"):
        if path.name == "schemes.py":  # compares their tilings
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("factorlayer.kernels"):
                module = importlib.import_module(node.module)
                found = [getattr(module, alias.name, None) for alias in node.names]
                assert not set(found) & {each for family in FAMILIES for each in (*family.makes, family.tile)}
                assert not [each for each in found if hasattr(each, "tile")], path.name


# Few by which most families are met, in each of their dtypes, forward and backward
LAYERS = [
    *(oracle.kronecker((size, size), (size, size)) for size in (32, 64, 128)),
    oracle.kronecker((64, 64, 64), (64, 64, 64)),
    oracle.kronecker((8,) * 5, (8,) * 5),
    oracle.kronecker((4, 8, 8, 8, 4), (4, 8, 8, 8, 4)),
    oracle.monarch((16, 64), (16, 64), rank=4),
    oracle.monarch((3, 9), (8, 2), rank=7),
    oracle.monarch((8, 32), (32, 8), rank=16),
]


@pytest.mark.long
def test_a_record_takes_all_that_its_family_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for everything, but for sums of products, which a family need not look for."""
    admits, seen = Takes.admits, set[tuple[str, bool]]()

    def asks(self: Family, about: Asked, asked: tuple[Any, ...], told: dict[str, Any]) -> tuple[Pass, ...]:
        monkeypatch.setattr(Takes, "admits", lambda takes, about: takes.sums or not about.sums)
        found = way(self, about, asked, told)
        monkeypatch.setattr(Takes, "admits", admits)
        if found:
            # few has other records, for more samples and for dense layers
            others = *product.OF_PRODUCT_OF_SOME, *product.OF_FEW_DENSE
            records = [f for f in (*FAMILIES, *others) if f.name == self.name]
            seen.add((self.name, any(admits(record.takes, about) for record in records)))
        return found if admits(self.takes, about) else ()

    way = Family._way
    monkeypatch.setattr(Family, "_way", asks)
    batches = itertools.cycle((16, 1024, 16384))
    for spec, dtype, backward in itertools.product(LAYERS, DTYPES, (False, True)):
        chain = replace(Chain.of(spec, False, "identity"), backward=backward)
        try:
            plan(chain, dtype, next(batches), Gpu(90, 96, 200000))  # which no other test has planned for
        except PlanError:
            continue
    assert not [name for name, admitted in seen if not admitted]
    assert len({name for name, _ in seen}) >= len(FAMILIES) // 2


@pytest.mark.parametrize(
    ("takes", "asked", "admitted"),
    [
        (Takes(), ("float64", 1, 80, (3, 5), True, False), True),
        (Takes(("float32",)), ("float64", 1, 80, (3, 5), True, False), False),
        (Takes(needs=("wgmma",)), ("float64", 1, 80, (3, 5), True, False), False),
        (Takes(needs=("wgmma", "clusters")), ("float64", 1, 90, (3, 5), True, False), True),
        (Takes(factors=(2, 3)), ("float64", 1, 80, (3, 5), True, False), False),
        (Takes(factors=(2, 3)), ("float64", 1, 80, (3, 5) * 3, True, False), True),
        (Takes(sizes=(4, 8)), ("float64", 1, 80, (3, 5), True, False), False),
        (Takes(sizes=(4, 8), merged=True), ("float64", 1, 80, (3, 5), True, False), True),
        (Takes(sizes=(4, 8), merged=True), ("float64", 1, 80, (3, 9), True, False), False),
        (Takes(tied=False), ("float64", 1, 80, (3, 5), True, False), False),
        (Takes(tied=False), ("float64", 1, 80, (3, 5), None, False), True),
        (Takes(samples=(1, 64)), ("float64", 65, 80, (3, 5), True, False), False),
        (Takes(), ("float64", 1, 80, (3, 5), True, True), False),
        (Takes(sums=True), ("float64", 1, 80, (3, 5), True, True), True),
    ],
)
def test_what_a_record_takes(takes: Takes, asked: tuple[Any, ...], admitted: bool) -> None:
    dtype, batch, architecture, *further = asked
    assert takes.admits(Asked(dtype, batch, Gpu.of(architecture), *further)) is admitted


def test_a_record_is_enough_for_a_plan_to_have_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def tile(*asked: Any) -> pair_backward.PairBackward | None:
        found = pair_backward.tile(*asked)
        return replace(found, slots=1, us=0.5) if found else None

    asked = kronecker.OF_FACTORS[0]
    assert asked.tile is pair_backward.tile
    before = plan_of(CHAIN, "float32", 1, Gpu(80, 97, 150000))
    assert before.passes[0].us > 0.5
    toy = Family("two factors, one slot", tile, (pair_backward.PairBackward,), "pair-backward", named="toy")
    monkeypatch.setattr(gradients, "OF_FACTORS", (*kronecker.OF_FACTORS, toy))
    found = plan_of(CHAIN, "float32", 1, Gpu(80, 96, 150000))  # one that no other test has planned for
    assert found.passes[0].us == 0.5
    assert found.passes[1:] == found.passes[0].finishing
    assert "1 slots" in str(found)


def toy(us: float, times: float = 1.0, **fields: Any) -> Family:
    def tile(*asked: Any) -> pair_backward.PairBackward:
        found = pair_backward.tile(*asked)
        assert found is not None
        return replace(found, us=us - found.finishing[0].us)

    made = (pair_backward.PairBackward,)
    return Family("", tile, made, "pair-backward", margin=Margin(times), named=f"toy of {us}", **fields)


ASKED = ((Mode(((0, 24, 24),)), Mode(((1, 24, 24),))), 1, "float32", 16, Gpu(90, 94, 150000))


@pytest.mark.parametrize(
    ("families", "taken"),
    [
        ((toy(20.0), toy(10.0)), 1),
        ((toy(10.0), toy(10.0)), 0),  # of equals the first
        ((toy(20.0), toy(10.0, 3.0)), 0),
        ((toy(20.0, alone=True), toy(10.0)), 0),
        ((toy(20.0), toy(10.0, takes=Takes(("float64",)))), 0),
        ((toy(20.0), toy(10.0, takes=Takes(samples=(17, 64)))), 0),
        ((toy(20.0, takes=Takes(sizes=(1, 23))),), None),
    ],
)
def test_the_fastest_is_taken_by_predicted_times_and_margins(
    families: tuple[Family, ...], taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_backward.PairBackward, "us_of", lambda found, batch: found.us)
    found = fastest(families, *ASKED)
    ways = [family.way(*ASKED) for family in families]
    assert found == (() if taken is None else ways[taken])
