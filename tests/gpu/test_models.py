"""Whole models on a GPU: converted there, trained, and reported with times."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformer import Transformer, loss_of, tokens

from factorlayer import FactorLinear, convert, fit, param_groups, report, restore, suggest

MONARCH = dict(structure="monarch", blocks=4, rank=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_layers_stay_where_they_are(dtype: torch.dtype) -> None:
    model = Transformer().to("cuda", dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model, {"h.*": MONARCH}, keep=True)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", dtype)}
    assert model(tokens().cuda()).isfinite().all()
    restore(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_fresh_layers_and_moved_ones() -> None:
    model = Transformer()
    convert(model, {"h.*.mlp.*": MONARCH}, keep=True)
    model.cuda()
    restore(model)
    assert all(p.is_cuda for p in model.parameters())
    convert(model, {"h.*.mlp.*": MONARCH}, initialize="fresh")
    assert all(p.is_cuda for p in model.parameters())


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_trains(compiled: bool) -> None:
    model = Transformer()
    convert(model, {"h.*": MONARCH})
    model.cuda()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(run, "cuda"))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
def test_times_are_predicted_for_this_gpu_and_measured_on_it(training: bool) -> None:
    layers = [nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    mapping = suggest(model, 0.8, of="time", batch=16384, training=training, structures=["kronecker"])
    assert mapping
    found = report(model, 16384, mapping, measure=True, training=training)
    assert found.after.predicted_us <= 0.8 * found.before.predicted_us
    assert all(0 < side.measured_us < 1e6 for line in found.lines for side in (line.before, line.after))
    convert(model, mapping)
    assert sum(isinstance(layer, FactorLinear) for layer in model) == len(mapping)


def test_a_layer_is_fitted_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64)
    dense = nn.Linear(24, 24, dtype=torch.float64)
    there = copy.deepcopy(dense).cuda()
    found, right = (FactorLinear.from_linear(each, **MONARCH) for each in (there, dense))
    here = fit(right, x, dense(x))
    assert fit(found, x.cuda(), there(x.cuda())).after == pytest.approx(here.after, rel=1e-4)
    with pytest.raises(ValueError, match=r"inputs should be on the layer's device, cuda:0; batch 0 is on cpu"):
        fit(found, x, dense(x))


def test_layers_on_two_devices_are_fitted_where_they_are() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, device="cuda")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).cuda())

    model = Split()
    done = convert(model, {nn.Linear: MONARCH}, inputs=[torch.randn(200, 24)])
    assert [part.weights[0].device.type for part in (model.first, model.second)] == ["cpu", "cuda"]
    assert all(change.fit.after < change.fit.before for change in done.changes)
