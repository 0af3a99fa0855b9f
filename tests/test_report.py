"""report: what a model's layers have and take, as a table, as JSON and as a picture."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformer import LENGTH, Conv1D, Transformer, tokens, turned

from factorlayer import FactorLinear, FactorMLP, convert, fuse, report
from factorlayer.device.gpu import Gpu
from factorlayer.maths.spec import resolve
from factorlayer.models.times import dense_spec, layer_us

__all__ = ["turned"]  # a fixture
MONARCH = dict(structure="monarch", blocks=4, rank=2)
SPEC = resolve(24, 96, "monarch", blocks=4, rank=2)


def model(dense: type[nn.Module] = nn.Linear) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dense).double()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_what_a_mapping_would_do_and_what_was_done(dense: type[nn.Module], turned: object) -> None:
    plain = model(dense)
    before = count(plain)
    planned = report(plain, 10, {"*.mlp.*": MONARCH})
    assert count(plain) == before
    convert(plain, {"*.mlp.*": MONARCH})
    done = report(plain, 10)
    assert done == planned
    assert (done.parameters_before, done.parameters_after) == (before, count(plain))
    assert [line.name for line in done.lines if line.structure] == [
        f"h.{i}.mlp.c_{n}" for i in (0, 1) for n in ("fc", "proj")
    ]
    (line,) = [line for line in done.lines if line.name == "h.0.mlp.c_fc"]
    assert line.structure == "monarch blocks 4x4, rank 2" and line.samples == 10
    assert (line.before.parameters, line.after.parameters) == (24 * 96 + 96, SPEC.parameter_count + 96)
    assert (line.before.flops, line.after.flops) == (2 * 10 * 24 * 96, SPEC.flops(10))
    assert line.before.bytes == 8 * (10 * (24 + 96) + 24 * 96)
    assert line.error == plain.h[0].mlp["c_fc"].projection_error.weight
    assert done.before.flops == sum(line.before.flops for line in done.lines)


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "pruned weight", "pruned bias"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_whose_parameters_are_made_of_others_is_dense(change: Callable[[nn.Module], Any]) -> None:
    plain = nn.Sequential(nn.Linear(24, 96), nn.Linear(96, 24))
    before = report(plain, 10, {"1": MONARCH})
    change(plain[0])
    after = report(plain, 10, {nn.Linear: MONARCH})
    assert after.lines == before.lines and after.lines[0].structure is None


def test_training_counts_gradients() -> None:
    plain = model()
    convert(plain, {"*.mlp.*": MONARCH})
    forward, both = report(plain, 10), report(plain, 10, training=True)
    assert both.doing == "training" and both.before.flops == 3 * forward.before.flops
    assert both.after.flops == 3 * forward.after.flops  # all gradients of every contraction


def test_an_example_says_how_many_samples_layers_get() -> None:
    plain = model()
    plain.train()
    for example in (tokens(5), (tokens(5),), {"tokens": tokens(5)}):
        found = report(plain, example)
        assert {line.samples for line in found.lines} == {5 * LENGTH}
    assert plain.training and all(part.training for part in plain.modules())
    assert not any(part._forward_pre_hooks for part in plain.modules())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.used(x))

    found = report(Twice(), torch.zeros(3, 4), measure=True, arch=90)
    assert [line.samples for line in found.lines] == [6, 0]
    assert found.lines[1].after.predicted_us == found.lines[1].after.measured_us == 0 < found.after.measured_us


def test_an_example_counts_layers_that_are_not_called_in_the_plainest_way() -> None:
    """By a keyword, by an encoder that reads their weights in eval mode, in stacks, and in frozen ones."""
    x = torch.randn(3, 5, 8)

    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=x)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    stacked = fuse(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    block = FactorMLP([8, (4, 4), 8], activation="gelu").freeze()
    for plain in (ByKeyword(), encoder, stacked, block, nn.Sequential(block, nn.LayerNorm(8))):
        found = report(plain, x)
        assert {line.samples for line in found.lines} == {15}
        assert not any(part._forward_hooks for part in plain.modules())
    assert block.is_frozen and torch.backends.mha.get_fastpath_enabled()


def test_errors_are_of_the_weights_as_they_are_where_the_first_were_kept() -> None:
    plain = model()
    convert(plain, {"*.mlp.*": MONARCH}, keep=True)
    first = report(plain, 1).lines
    with torch.no_grad():
        plain.h[0].mlp["c_fc"].weight_0.zero_()
    later = {line.name: line.error for line in report(plain, 1).lines}
    assert later["h.0.mlp.c_fc"] == pytest.approx(1)
    assert later["h.1.mlp.c_fc"] == pytest.approx({line.name: line.error for line in first}["h.1.mlp.c_fc"])
    assert later["h.0.attn.c_proj"] is None


@pytest.mark.parametrize("training", [False, True])
def test_predictions_are_for_a_gpu(training: bool) -> None:
    plain = model().float()
    found = report(plain, 4096, {"*.mlp.c_fc": MONARCH}, arch=90, training=training)
    (line,) = [line for line in found.lines if line.name == "h.0.mlp.c_fc"]
    for side, spec in ((line.before, dense_spec(24, 96)), (line.after, SPEC)):
        assert side.predicted_us == layer_us(spec, True, torch.float32, 4096, Gpu.of(90), training)
    assert found.after.predicted_us == sum(line.after.predicted_us for line in found.lines)
    assert "compute capability 9.0" in str(found)
    assert report(plain, 4096).after.predicted_us is None
    with pytest.raises(ValueError, match="report: arch should be one of 80"):
        report(plain, 4096, arch=75)


@pytest.mark.parametrize("training", [False, True])
def test_layers_are_measured_once_for_all_that_are_alike(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def medians(runs: dict[str, Any], device: torch.device) -> dict[str, float]:
        for run in runs.values():
            run()
        measured.append(device.type)
        return dict.fromkeys(runs, len(measured) * 1e-6)

    monkeypatch.setattr("factorlayer.models.costs.medians", medians)
    plain = model()
    right = [parameter.clone() for parameter in plain.parameters()]
    found = report(plain, 10, {"*.mlp.*": MONARCH}, measure=True, training=training)
    assert len(measured) == 7  # four dense kinds and the head, two structured
    times = {(line.name, line.after.measured_us) for line in found.lines}
    assert {us for name, us in times if name.endswith("mlp.c_fc")} < {us for _, us in times}
    assert found.after.measured_us == pytest.approx(sum(line.after.measured_us for line in found.lines))
    assert all(map(torch.equal, plain.parameters(), right)) and all(p.grad is None for p in plain.parameters())
    assert "measured on cpu" in str(found)


def test_the_table() -> None:
    plain = model()
    convert(plain, {"*.mlp.*": MONARCH})
    lines = str(report(plain, 1000)).splitlines()
    assert lines[0].split() == ["layer", "structure", "samples", "parameters", "FLOPs", "bytes", "error"]
    assert lines[1].split()[:2] == ["h.0.attn.c_attn", "dense"] and lines[1].split()[-1] == "-"
    (line,) = [line for line in lines if line.startswith("h.0.mlp.c_fc")]
    assert "monarch blocks 4x4, rank 2" in line and "2.4k -> 1.06k" in line and "4.61M -> 1.92M" in line
    assert lines[-2].startswith("all of these") and lines[-1].startswith("the whole model: ")
    assert len(lines) == 1 + 9 + 2


def test_json() -> None:
    found = report(model(), 10, {"*.mlp.*": MONARCH})
    read = json.loads(found.json())
    assert read == json.loads(json.dumps(found.to_json()))
    assert read["lines"][2]["name"] == "h.0.mlp.c_fc" and read["lines"][2]["after"]["parameters"] == 1056
    assert read["parameters_after"] == found.parameters_after and read["doing"] == "inference"


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(model(), 10, {"*.mlp.*": MONARCH})
    pytest.importorskip("matplotlib")
    found.picture(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"report\.picture needs matplotlib, which is not installed: pip install"):
        found.picture(tmp_path / "other.png")


def test_a_layer_whose_time_nobody_predicts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    found = report(part, 10, arch=90)
    assert found.lines[0].after.predicted_us > 0 and found.lines[1].after.predicted_us is None
    assert found.after.predicted_us is None and str(found).splitlines()[2].split()[-2:] == ["-", "-"]
    found.picture(tmp_path / "r.png")


def test_without_the_extension_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorlayer.autograd.layer_ops.missing_extension", ImportError("no _C"))
    assert report(model(), 10).after.predicted_us is None
    with pytest.raises(ValueError, match="report: no time is predicted without the compiled extension: no _C"):
        report(model(), 10, arch=90)


def test_own_structured_layers_are_beside_dense_ones_of_their_sizes() -> None:
    found = report(nn.Sequential(FactorLinear(24, 96, **MONARCH), nn.Linear(96, 4, bias=False)), 10)
    assert [(line.before.parameters, line.after.parameters) for line in found.lines] == [(2400, 1056), (384, 384)]
    assert found.parameters_after == 1440 and found.parameters_before == 2784


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="report: Sequential has no linear layers"):
        report(nn.Sequential(nn.Tanh()))
    with pytest.raises(TypeError, match="report: mapping should say which layers become what"):
        report(model(), 1, {})
    with pytest.raises(TypeError, match="report: batch should be a number of samples, or an example"):
        report(model(), "tokens")
    with pytest.raises(ValueError, match="report: batch should be a positive number of samples, it is -1"):
        report(model(), -1)
    with pytest.raises(ValueError, match="report: 'x' selects no layer"):
        report(model(), 1, {"x": MONARCH})
