"""suggest: structures under a budget, and the errors and times that it goes by."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformer import Conv1D, Transformer, tokens, turned

from factorlayer import FactorLinear, convert, suggest
from factorlayer.autograd import layer_ops
from factorlayer.device.gpu import Gpu
from factorlayer.maths.project import project, projection_error
from factorlayer.maths.spec import LayerSpec, resolve
from factorlayer.models.spectra import ranks, squares_left
from factorlayer.models.suggest import Candidate, _hull, _spend
from factorlayer.models.times import dense_spec, layer_us
from factorlayer.tuning import predicted

__all__ = ["turned"]  # a fixture


def model(dense: type[nn.Module] = nn.Linear) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dense).double()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# what projections leave


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "spec",
    [resolve(30, 48), resolve(48, 30), resolve(30, 48, "monarch", blocks=3), resolve(30, 48, "monarch", blocks=(2, 6))],
    ids=str,
)
def test_errors_of_all_ranks_are_those_of_projections(spec: LayerSpec, dtype: torch.dtype) -> None:
    W = torch.randn(spec.out_features, spec.in_features, dtype=dtype)
    left = squares_left(spec, W)
    assert len(left) == spec.max_rank and left[-1] == pytest.approx(0, abs=1e-12)
    found = ranks(spec)
    assert found and all(each.parameter_count < W.numel() for each in found)
    for each in found:
        right = projection_error(each, project(each, W), W, None, None).weight ** 2
        assert left[each.rank - 1] == pytest.approx(right, abs=1e-9)  # of squares


def test_ranks_have_fewer_parameters_and_flops_than_the_dense_layer() -> None:
    spec = resolve(768, 3072)
    found = [each.rank for each in ranks(spec)]
    assert found == [1, 2, 3, 4, 6, 8, 12, 16]
    assert spec.multiply_adds() * 24 > 768 * 3072 > spec.multiply_adds() * 16  # 24 would have come next
    assert [each.rank for each in ranks(resolve(64, 64, "monarch", blocks=4))] == [1, 2, 3, 4, 6]  # 8 is as large


# the budget


@pytest.mark.parametrize("budget", [0.4, 0.6, 0.9, 8000])
@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_the_converted_model_is_within_the_budget(dense: type[nn.Module], budget: float, turned: object) -> None:
    plain = model(dense)
    allowed = budget * count(plain) if budget < 1 else budget
    mapping = suggest(plain, budget)
    assert mapping and "lm_head" not in mapping
    done = convert(plain, mapping)
    assert done.parameters_after == count(plain) <= allowed
    # no step was left out that would have fitted: it is near the budget
    assert count(plain) > 0.8 * allowed


def test_it_is_the_same_every_time_and_more_is_nearer() -> None:
    assert suggest(model(), 0.5) == suggest(model(), 0.5)
    errors = []
    for budget in (0.3, 0.5, 0.7):
        done = convert(model(), suggest(model(), budget), dry_run=True)
        errors.append(sum(change.error.weight**2 for change in done.changes))
    assert errors == sorted(errors, reverse=True)


def test_what_is_a_product_already_is_found() -> None:
    part = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    with torch.no_grad():
        part[0].weight.copy_(torch.kron(torch.randn(8, 8), torch.randn(8, 8)))
        part[2].weight.copy_(FactorLinear(64, 64, structure="monarch", blocks=4, rank=2).double().to_dense())
    mapping = suggest(part, 0.3)
    assert mapping == {
        "0": {"structure": "kronecker", "factors": ((8, 8), (8, 8)), "rank": 1},
        "2": {"structure": "monarch", "blocks": (4, 4), "rank": 2},
    }
    assert max(change.error.weight for change in convert(part, mapping).changes) < 1e-7


@pytest.mark.parametrize("seed", range(20))
def test_each_step_is_the_best_there_is(seed: int) -> None:
    """Of continuous knapsacks the greedy way is the best: it beats all choices but by less than one step."""
    draw = torch.Generator().manual_seed(seed)

    def ways() -> list[Candidate]:
        takes = torch.rand(5, generator=draw).cumsum(0).tolist()
        errors = torch.rand(4, generator=draw).tolist()
        return [Candidate(None, each, error) for each, error in zip(takes, [*errors, 0.0], strict=True)]

    layers = [ways() for _ in range(3)]
    hulls = [_hull(each) for each in layers]
    for hull in hulls:
        gains = [(a.error - b.error) / (b.takes - a.takes) for a, b in itertools.pairwise(hull)]
        assert gains == sorted(gains, reverse=True) and all(gain > 0 for gain in gains)
    allowed = (sum(hull[0].takes for hull in hulls) + sum(each[-1].takes for each in layers)) / 2
    taken = _spend(hulls, allowed)
    assert sum(each.takes for each in taken) <= allowed
    possible = [each for each in itertools.product(*layers) if sum(way.takes for way in each) <= allowed]
    best = min(sum(way.error for way in each) for each in possible)
    step = max(a.error - b.error for hull in hulls for a, b in itertools.pairwise(hull))
    assert sum(each.error for each in taken) <= best + step


def test_layers_and_structures_can_be_chosen() -> None:
    mapping = suggest(model(), 0.8, layers="*.mlp.*", structures=["monarch"])
    assert all(".mlp." in name and settings["structure"] == "monarch" for name, settings in mapping.items())
    both = suggest(model(), 0.8, layers=["h.0.mlp.*", lambda name, module: name == "h.1.attn.c_proj"])
    assert set(both) <= {"h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.1.attn.c_proj"}


# time


@pytest.mark.parametrize("training", [False, True])
def test_a_budget_of_time(training: bool) -> None:
    part = nn.Sequential(nn.Linear(1024, 1024, dtype=torch.bfloat16), nn.Linear(1024, 1024, dtype=torch.bfloat16))
    mapping = suggest(part, 0.8, of="time", batch=16384, arch=90, training=training, structures=["kronecker"])

    def us(settings: Any) -> float:
        spec = dense_spec(1024, 1024) if settings is None else resolve(1024, 1024, **settings)
        return layer_us(spec, True, torch.bfloat16, 16384, Gpu.of(90), training)

    assert mapping
    assert sum(us(mapping.get(name)) for name in "01") <= 0.8 * 2 * us(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_times_are_those_that_auto_goes_by(training: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU of such limits, for the numbers of samples that auto asks for."""
    limits = 90, 132, 232448, 0
    monkeypatch.setattr(predicted, "gpu_limits", lambda device: limits)
    monkeypatch.setattr(layer_ops, "gpu_limits", lambda device: limits)
    monkeypatch.setattr(layer_ops, "untraced", lambda op, question, *given: asked(question, *given))
    for cached in (layer_ops.has_kernel, layer_ops.cuda_ops, predicted._predicted):
        cached.cache_clear()
    for spec in (resolve(1024, 1024), resolve(256, 1024, "monarch", blocks=4, rank=16)):
        chain = f"{predicted.Chain.of(spec, True, 'identity').text}"
        right = predicted.predicted(chain, dtype, 0, 4096, training)
        best = right.fused_us if right.implementation == "fused" else right.batched_us
        found = layer_us(spec, True, dtype, right.samples.asked, Gpu(*limits), training)
        assert found == pytest.approx(best, rel=0.02)  # it is asked at points, between which it is a line
    for cached in (layer_ops.has_kernel, layer_ops.cuda_ops, predicted._predicted):
        cached.cache_clear()


def asked(question: str, text: str, dtype: str, batch_class: int, *limits: int) -> str:
    from factorlayer.plan import planner

    return str(getattr(planner, question)(text, dtype, *limits, batch_class=batch_class))


def test_no_gpus_table_has_complex_numbers() -> None:
    assert layer_us(resolve(16, 16), True, torch.complex64, 16, Gpu.of(90), False) is None
    assert layer_us(resolve(16, 16), True, torch.float32, 0, Gpu.of(90), False) == 0


# what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(budget=0), "budget should be a share below 1, or a number above; it is 0"),
        (dict(budget=True), "budget should be a share below 1"),
        (dict(budget="half"), "budget should be a share below 1, .*it is 'half'"),
        (dict(budget=10**9), "a budget of 1000000000 parameters is no less than the [0-9]+ parameters that there are"),
        (dict(budget=0.01), "a budget of .* cannot be kept: with the smallest structures there are .* not in layers"),
        (dict(budget=0.5, of="speed"), "of should be 'parameters' or 'time', it is 'speed'"),
        (dict(budget=0.5, of="time"), "of='time' and batch belong together"),
        (dict(budget=0.5, batch=16), "of='time' and batch belong together"),
        (dict(budget=0.5, of="time", batch=16), "times are predicted for GPUs, the model is on cpu: arch=90"),
        (dict(budget=0.5, of="time", batch=16, arch=70), "arch should be one of 80, .* it is 70"),
        (dict(budget=0.5, of="time", batch=0, arch=90), "batch should be a positive number of samples, it is 0"),
        (dict(budget=0.5, structures=["dense"]), "structures should be some of kronecker, monarch"),
        (dict(budget=0.5, layers="*.mlp.fc"), "selects no layer"),
        (dict(budget=0.5, layers=[]), "layers should be selectors of the layers that may change, there are none"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[5:-1],
)
def test_budgets_that_mean_nothing(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"suggest: .*{words}"):
        suggest(model(), **given)


def test_other_models_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="suggest: 0 is on the meta device and has no weights"):
        suggest(nn.Sequential(nn.Linear(8, 8, device="meta")), 0.5)
    with pytest.raises(ValueError, match="suggest: Sequential has no dense linear layers; restore"):
        suggest(nn.Sequential(FactorLinear(8, 8)), 0.5)
    with pytest.raises(TypeError, match="suggest: batch should be a number of samples, or an example"):
        suggest(model(), 0.5, of="time", batch="16", arch=90)
    mapping = suggest(model(), 0.8, of="time", batch=tokens(), arch=90)
    assert isinstance(mapping, dict)
