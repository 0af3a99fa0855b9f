"""Measured choice on a GPU: events time it, it is kept, obeyed, refused in a capture, and gone with another driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from untuned import untuned

import factorlayer
import factorlayer.functional
from factorlayer import FactorLinear, FactorMLP
from factorlayer.kernels.batches import class_of
from factorlayer.tuning import choices, timing


@pytest.fixture(autouse=True)
def _nothing_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path))
    with untuned():
        yield


def layer_of() -> FactorLinear:
    return FactorLinear(256, 256, device="cuda", dtype=torch.bfloat16)


def test_a_layer_is_timed_and_says_so() -> None:
    layer = layer_of()
    layer.warmup(100, tune=True)
    found = [choice for places in choices.TABLE.values() for choice in places.values()]
    assert sorted(choice.training for choice in found) == [False, True]
    for choice in found:
        assert choice.place.device == torch.cuda.get_device_name() and choice.place.driver
        assert 0 < choice.fused_us < 1e5 and 0 < choice.batched_us < 1e5
    assert f"measured on {torch.cuda.get_device_name()}" in layer.explain(100)
    x = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))


def test_auto_runs_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "medians", lambda runs, device: {"fused": 2e-5, "batched": 1e-5})
    layer, x = layer_of(), torch.randn(100, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        fused = layer(x)
        layer.warmup(100, tune=True)
        y = layer(x)
        layer.implementation = "batched"
        assert torch.equal(y, layer(x))
    torch.testing.assert_close(y, fused, rtol=0.05, atol=0.05)


def test_another_driver_is_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "medians", lambda runs, device: {"fused": 2e-5, "batched": 1e-5})
    layer = layer_of()
    layer.warmup(100, tune=True)
    (here, *_) = [choice for places in choices.TABLE.values() for choice in places.values()]
    other = dataclasses.replace(here.place, driver="1.0")
    moved = [dataclasses.replace(c, place=other) for places in choices.TABLE.values() for c in places.values()]
    choices.TABLE.clear()
    choices.put(moved)
    with pytest.warns(RuntimeWarning, match=r"measured elsewhere, on .*driver 1\.0"):
        layer(torch.randn(100, 256, device="cuda", dtype=torch.bfloat16))


def test_a_model() -> None:
    block = FactorMLP([48, (8, 8), (8, 8), 12], device="cuda", dtype=torch.bfloat16)
    found = factorlayer.tune(block, torch.randn(3000, 48, device="cuda", dtype=torch.bfloat16))
    assert [tuned.choice.batch_class for tuned in found if tuned.choice] == [class_of(3000)] * 2


@pytest.mark.parametrize("rank", [1, 7])
def test_a_matrix_multiplied_out(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FactorLinear(
        *(432, 432),
        structure="monarch",
        blocks=54,
        rank=rank,
        implementation="batched",
        device="cuda",
        dtype=torch.bfloat16,
    )
    asked, multiply = [], factorlayer.functional.multiplied_out
    monkeypatch.setattr(factorlayer.functional, "multiplied_out", lambda *args: asked.append(args) or multiply(*args))
    x = torch.randn(1452, 432, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert len(asked) == 1
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(y, inputs, torch.ones_like(y) / 1452)
    exact = layer.double()
    exact.implementation = "naive"
    right = exact(x.double())
    wanted = torch.autograd.grad(right, [x, *exact.parameters()], torch.ones_like(right) / 1452)
    for mine, theirs in zip((y.detach(), *found), (right.detach(), *wanted), strict=True):
        assert float((mine.double() - theirs).norm()) < 0.02 * float(theirs.norm())


def test_refused_in_a_capture() -> None:
    layer, graph = layer_of(), torch.cuda.CUDAGraph()
    layer.warmup(8)
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), torch.cuda.graph(graph):
        layer(x)
        with pytest.raises(RuntimeError, match="kernels cannot be timed inside a CUDA graph capture"):
            layer.warmup(8, tune=True)


def test_too_large_for_the_memory() -> None:
    with pytest.warns(RuntimeWarning, match="are too many for the memory of cuda"):
        layer_of().warmup(1 << 40, tune=True)
    assert not choices.TABLE
