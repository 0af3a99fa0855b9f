"""A little of the campaign, with another seed in every run, and that it finds what is planted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import campaign
import drawn
import pytest
import torch
from campaign import FaultError, Results
from drawn import draw
from torch import Tensor, nn

SECONDS = 4  # .ci/run goes on for longer


@pytest.mark.long
def test_cases_of_a_new_seed() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    counts, faults = campaign.campaign(seed, SECONDS, bytes=1 << 20)
    assert not faults, "\n".join(faults)
    assert counts.total() >= 1


def test_a_case_is_its_seed_and_number() -> None:
    for number in range(50):
        first, again = draw(3, number, "cpu"), draw(3, number, "cpu")
        assert str(first) == str(again)
        for one, other in zip(
            drawn.inputs(first, torch.float64, "cpu", 0)[1:],
            drawn.inputs(again, torch.float64, "cpu", 0)[1:],
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_every_kind_is_drawn() -> None:
    cases = [draw(1, number, "cpu") for number in range(400)]
    assert {case.kind for case in cases} == {"layer", "call", "block", "gated", "residual", "recurrence"}
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16", "float16"}
    assert {case.plant for case in cases} == {"", "nan", "inf", "-inf"}
    assert {name for case in cases for name in case.activations} >= {*drawn.ACTIVATIONS, *drawn.TRACED}
    assert {0, 1} <= {case.batch for case in cases} and max(case.batch for case in cases) >= 1000
    assert len({case.layout for case in cases}) == 4 and len({case.scale for case in cases}) > 40


def slightly_off(y: Tensor) -> Tensor:
    return y * (1 + 64 * torch.finfo(y.dtype).eps)


def one_number(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[:1] = torch.nan
    return y


def other_bits(y: Tensor) -> Tensor:
    return y + torch.rand(()).to(y.dtype) * torch.finfo(y.dtype).eps * y


@pytest.mark.parametrize(
    ("change", "said"),
    [(slightly_off, "is off by"), (one_number, "not finite where batched is"), (other_bits, "other bits")],
    ids=["off", "nan", "bits"],
)
def test_a_fault_is_found_and_can_be_drawn_again(
    change: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = campaign.results

    def wrong(module: nn.Module, x: Tensor, grad_y: Tensor, implementation: str) -> Results:
        found = right(module, x, grad_y, implementation)
        return {**found, "grad_x": change(found["grad_x"])} if implementation == "fused" else found

    monkeypatch.setattr(campaign, "results", wrong)
    number = next(n for n in range(99) if is_plain(draw(2, n, "cpu")))
    with pytest.raises(FaultError, match=said):
        campaign.check(draw(2, number, "cpu"), "cpu")
    heard: list[str] = []
    counts, faults = campaign.campaign(2, 0, only=number, say=heard.append)
    assert counts["faults"] == 1 and faults == heard
    assert f"again: python tests/campaign.py --seed 2 --case {number} --device cpu" in faults[0]


def is_plain(case: drawn.Drawn) -> bool:
    return (
        not case.plant
        and case.kind == "layer"
        and case.dtype == "float32"
        and case.batch > 7
        and case.activations[0] == "identity"
    )


def test_a_planted_number_has_to_be_where_batched_has_it() -> None:
    value, other = torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan])
    everywhere = torch.ones(2, dtype=torch.bool)
    campaign.check_planted("y", value, value, other, everywhere)
    campaign.check_planted("y", value, other, value, everywhere)
    campaign.check_planted("y", value, other, other, torch.tensor([True, False]))
    with pytest.raises(
        FaultError, match=r"isnan of y is not as in batched at 1 places, the first \[1\]: inf, batched nan"
    ):
        campaign.check_planted("y", value, other, other, everywhere)


def planted_gated(scale: tuple[int, int]) -> drawn.Drawn:
    case = next(c for n in range(999) if (c := draw(3, n, "cpu")).plant and c.kind == "gated" and c.batch > 7)
    return replace(case, plant="inf", dtype="float16", scale=scale)


def test_what_overflows_by_itself_is_not_taken_for_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float16 where its range ends, one order of sums is 59872 and another one an infinity."""
    right = campaign.results

    def finite(module: nn.Module, x: Tensor, grad_y: Tensor, implementation: str) -> Results:
        found = right(module, x, grad_y, implementation)
        return found if implementation != "fused" else {n: t.clamp(-59872, 59872) for n, t in found.items()}

    monkeypatch.setattr(campaign, "results", finite)
    assert campaign.check(planted_gated((3, 3)), "cpu") == "out of range"
    with pytest.raises(FaultError, match=r"isposinf of \w+ is not as in batched"):
        campaign.check(planted_gated((0, 0)), "cpu")


def test_most_planted_cases_are_judged() -> None:
    planted = [case for n in range(600) if (case := draw(4, n, "cpu", 1 << 16)).plant and case.dtype == "float16"]
    ends = [campaign.check(case, "cpu") for case in planted]
    assert ends.count("planted") > 0.7 * len(ends) > 7, ends


def test_kernels_that_are_emulated(tmp_path: Path) -> None:
    """The draws alone: a kernel takes seconds to build."""
    emulated = pytest.importorskip("emulated")
    made = object.__new__(emulated.Emulated)
    made.seed = 1
    words = [made.case(number)[0] for number in range(60)]
    assert words == [made.case(number)[0] for number in range(60)]
    kinds = {"layer", "gradients", "kept", "slopes", "stack", "inputs", "recurrence", "decoder"}
    assert {each.split()[2] for each in words} == kinds
