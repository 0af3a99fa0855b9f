"""Whole models on a GPU: converted there, trained, and reported with times."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformer import Transformer, loss_of, tokens

from factorlayer import FactorLinear, convert, param_groups, report, restore, suggest

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
