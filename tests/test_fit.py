"""fit, and convert with inputs: layers that are nearest in outputs, where a projection is nearest in weights."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import kronecker, monarch, spec_id
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformer import Conv1D, Transformer, tokens, turned

from factorlayer import FactorLinear, convert, fit, restore
from factorlayer.maths import least_squares as solver
from factorlayer.maths.least_squares import least_squares, solve
from factorlayer.maths.moments import Moments
from factorlayer.maths.project import project, to_dense
from factorlayer.maths.spec import LayerSpec

__all__ = ["turned"]  # a fixture
SPECS = [
    kronecker((5,), (3,)),
    kronecker((4, 6), (5, 3)),
    kronecker((4, 6), (5, 3), rank=3),
    kronecker((2, 3, 4), (3, 2, 2)),
    kronecker((2, 3, 4), (3, 4, 2), rank=2),
    kronecker((1, 3, 1), (3, 1, 2)),
    monarch((5,), (3,)),
    monarch((4, 6), (5, 3)),
    monarch((4, 6), (5, 3), rank=2),
    monarch((1, 8), (6, 1), rank=3),
    monarch((3, 4), (4, 5), rank=4),
]
MONARCH = dict(structure="monarch", blocks=4, rank=2)


def layer_of(spec: LayerSpec, bias: bool = True, dtype: torch.dtype = torch.float64, **settings: Any) -> FactorLinear:
    sizes = dict(structure=spec.structure, factors=(spec.in_factors, spec.out_factors), rank=spec.rank)
    return FactorLinear(spec.in_features, spec.out_features, bias, **sizes, dtype=dtype, **settings)


def samples(count: int, features: int) -> Tensor:
    """Features that go together, about a mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    mixed = torch.randn(features, features, generator=generator, dtype=torch.float64)
    return x * torch.logspace(0, -2, features, dtype=torch.float64) @ mixed + 1


def error(layer: FactorLinear, x: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        return float((layer(x) - targets).norm() / targets.norm())


def dense_problem(spec: LayerSpec) -> tuple[nn.Linear, Tensor, Tensor]:
    dense = nn.Linear(spec.in_features, spec.out_features, dtype=torch.float64)
    x = samples(400, spec.in_features)
    return dense, x, dense(x).detach()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# the least squares


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "without"])
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_what_it_says_is_so_and_the_gradient_is_gone(
    spec: LayerSpec, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sweeps go on until nothing changes."""
    monkeypatch.setattr(solver, "ENOUGH", 1e-5)
    layer = layer_of(spec, bias)
    _, x, targets = dense_problem(spec)
    before = error(layer, x, targets)
    found = fit(layer, x, targets, ridge=0, iterations=600)
    assert found.before == pytest.approx(before, rel=1e-9)
    # The difference of sums of squares: what is smaller than the root of their last bits may be nothing.
    assert found.after == pytest.approx(error(layer, x, targets), rel=1e-7, abs=1e-7)
    assert found.after < 0.95 * before and found.samples == 400
    loss = (layer(x) - targets).square().sum() / targets.square().sum()
    gradients = torch.autograd.grad(loss, list(layer.parameters()))
    size = max(
        float(gradient.norm() * p.detach().norm()) for gradient, p in zip(gradients, layer.parameters(), strict=True)
    )
    assert size < 1e-2


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_no_sweep_raises_what_is_left(spec: LayerSpec) -> None:
    dense, x, targets = dense_problem(spec)
    weights = project(spec, dense.weight.detach())
    start = to_dense(spec, weights)
    moments = Moments(start, dense.bias.detach(), True)
    moments.add(x, targets)
    A, B = moments.inputs, moments.rest + start @ moments.inputs
    found, left = least_squares(spec, weights, A, B, moments.of_rest, 30)
    rounding = 1e-12 * moments.of_targets
    assert left[0] == moments.of_rest and len(left) > 1
    assert all(after <= before + rounding for before, after in itertools.pairwise(left))
    matrix = to_dense(spec, found)
    right = float((x @ matrix.T + moments.bias_for(matrix) - targets).square().sum())
    assert left[-1] == pytest.approx(right, rel=1e-6, abs=rounding)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_it_is_nearer_than_the_projection(spec: LayerSpec) -> None:
    dense, x, targets = dense_problem(spec)
    sizes = dict(structure=spec.structure, factors=(spec.in_factors, spec.out_factors), rank=spec.rank)
    layer = FactorLinear.from_linear(dense, **sizes)
    found = fit(layer, x, targets, ridge=0)
    if len(spec.in_factors) == 1 or layer.projection_error.weight < 1e-12:
        assert found.after < 1e-9
    else:
        assert found.after < 0.9 * found.before


@pytest.mark.parametrize("spec", [kronecker((4, 6), (5, 3), rank=2), monarch((4, 6), (5, 3), rank=2)], ids=spec_id)
def test_what_has_the_structure_is_found_from_nearby(spec: LayerSpec) -> None:
    right = layer_of(spec)
    x = samples(300, spec.in_features)
    layer = copy.deepcopy(right)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    found = fit(layer, x, right(x), ridge=0, iterations=300)
    assert found.before > 1e-2 and found.after < 1e-3


def test_batches_give_what_all_at_once_gives() -> None:
    spec = kronecker((4, 6), (5, 3), rank=2)
    whole = layer_of(spec)
    _, x, targets = dense_problem(spec)
    parts = copy.deepcopy(whole)

    def batches(of: Tensor) -> Iterator[Tensor]:
        yield of[:0]
        yield of[0]
        yield from of[1:].split(70)

    assert fit(whole, x.view(20, 20, -1), targets.view(20, 20, -1)).samples == 400
    assert fit(parts, batches(x), batches(targets)).samples == 400
    torch.testing.assert_close(parts.to_dense(), whole.to_dense(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.bias, whole.bias, rtol=1e-8, atol=1e-10)


def test_the_same_arguments_give_the_same_weights() -> None:
    first = layer_of(monarch((4, 6), (5, 3), rank=2))
    second = copy.deepcopy(first)
    _, x, targets = dense_problem(first.spec)
    assert fit(first, x, targets) == fit(second, x, targets)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_keep_their_dtype_and_the_error_is_theirs(dtype: torch.dtype) -> None:
    layer = layer_of(kronecker((4, 6), (5, 3), rank=2), dtype=dtype)
    _, x, targets = dense_problem(layer.spec)
    found = fit(layer, x.to(dtype), targets.to(dtype))
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    rounded, exact = copy.deepcopy(layer).double(), x.to(dtype).double()
    assert found.after == pytest.approx(error(rounded, exact, targets.to(dtype).double()), rel=1e-6)
    again = [parameter.clone() for parameter in layer.parameters()]
    second = fit(layer, x.to(dtype), targets.to(dtype))
    assert second.after <= second.before == pytest.approx(found.after, rel=1e-9)
    if second.after == second.before:
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again, strict=True))


def test_a_large_mean_costs_no_digits() -> None:
    layer = layer_of(kronecker((5,), (3,)))
    dense, x, _ = dense_problem(layer.spec)
    far = x + 1e6
    assert fit(layer, far.split(50), dense(far).detach().split(50), ridge=0).after < 1e-12


# fewer samples than unknowns


@pytest.mark.parametrize("structure", [MONARCH, dict(rank=2)], ids=["monarch", "kronecker"])
def test_what_no_sample_shows_stays(structure: dict[str, Any]) -> None:
    dense = nn.Linear(24, 24, dtype=torch.float64)
    layer = FactorLinear.from_linear(dense, **structure)
    start = layer.to_dense().detach()
    x = samples(5, 24)
    found = fit(layer, x, dense(x).detach(), ridge=1e-6)
    assert found.after < 0.1 * found.before and found.unseen == 19
    assert "19 directions of the inputs or more had no sample" in str(found)
    firm = FactorLinear.from_linear(dense, **structure)
    fit(firm, x, dense(x).detach(), ridge=1e6)
    torch.testing.assert_close(firm.to_dense(), start, rtol=1e-3, atol=1e-3)


def test_a_single_sample_and_weights_of_zeros_work() -> None:
    layer = layer_of(kronecker((2, 3), (3, 2), rank=2))
    with torch.no_grad():
        for weight in layer.weights:
            weight.zero_()
    x = samples(1, 6)
    assert fit(layer, x, x).after < 1e-6
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    none = fit(layer, x, torch.zeros(1, 6, dtype=torch.float64))
    assert none.after < 1e-12


def test_solve_leaves_what_nothing_depends_on() -> None:
    normal = torch.diag(torch.tensor([2.0, 0.0, 4.0], dtype=torch.float64))
    found = solve(normal, torch.tensor([[2.0, 0.0, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64))
    almost = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-9]], dtype=torch.float64)  # a negative eigenvalue
    assert solve(almost, torch.ones(1, 2, dtype=torch.float64)).isfinite().all()


def test_an_activation_needs_targets_before_it() -> None:
    layer = layer_of(kronecker((4, 6), (5, 3)), activation="tanh")
    _, x, targets = dense_problem(layer.spec)
    with pytest.raises(ValueError, match=r"^fit: the layer ends in activation='tanh', .* before_activation=True$"):
        fit(layer, x, targets)
    found = fit(layer, x, targets, before_activation=True)
    plain = (x @ layer.to_dense().T + layer.bias).detach()
    assert found.after == pytest.approx(float((plain - targets).norm() / targets.norm()), rel=1e-8)


def bad_inputs() -> list[tuple[str, type[Exception], Any, Any, str]]:
    x, y = torch.ones(7, 24), torch.ones(7, 15)
    nan = torch.full((7, 24), torch.nan)
    return [
        ("inputs", ValueError, torch.ones(7, 23), y, r"inputs should be \[\.\.\., in_features=24\]; .* \(7, 23\)"),
        ("targets", ValueError, x, torch.ones(7, 16), r"targets should be \[\.\.\., out_features=15\]"),
        ("scalar", ValueError, torch.ones(()), y, "inputs should be"),
        ("samples", ValueError, x, y[:6], r"as many samples; batch 0 has the shapes \(7, 24\) and \(6, 15\)"),
        ("no batches", ValueError, [], [], "inputs should have samples, there are none"),
        ("no samples", ValueError, x[:0], y[:0], "inputs should have samples, there are none"),
        ("nan", ValueError, [x, nan], [y, y], "inputs should be finite; batch 1 has infinite numbers or NaN"),
        ("infinite", ValueError, x, y * torch.inf, "targets should be finite; batch 0"),
        ("too large", ValueError, x.double() * 1e200, y, "sums of squares of the samples, are infinite"),
        ("fewer", ValueError, [x, x], [y], "as many batches of inputs as of targets; inputs have more than 1"),
        ("more", ValueError, [x], iter([y, y]), "targets have more than 1"),
        ("mixed", TypeError, x, [y], "both be tensors, or both batches"),
        ("list", TypeError, [[1.0]], [y], "batch 0 of inputs should be a tensor, it is list"),
        ("integers", TypeError, x.long(), y, "real floating-point numbers; batch 0 has torch.int64"),
        ("device", ValueError, x, y.to("meta"), "targets should be on the layer's device, cpu; batch 0 is on meta"),
    ]


@pytest.mark.parametrize(
    ("kind", "x", "targets", "words"), [case[1:] for case in bad_inputs()], ids=[c[0] for c in bad_inputs()]
)
def test_wrong_samples_are_refused(kind: type[Exception], x: Any, targets: Any, words: str) -> None:
    layer = layer_of(kronecker((4, 6), (5, 3)), dtype=torch.float32)
    before = [parameter.clone() for parameter in layer.parameters()]
    with pytest.raises(kind, match=f"^fit: .*{words}"):
        fit(layer, x, targets)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), before, strict=True))


def test_wrong_layers_and_settings_are_refused() -> None:
    x = torch.ones(3, 24)
    with pytest.raises(TypeError, match=r"^fit: layer should be a FactorLinear, it is Linear"):
        fit(nn.Linear(24, 24), x, x)
    with pytest.raises(ValueError, match=r"^fit: there are no least squares for a Monarch chain of 3 factors"):
        fit(layer_of(monarch((2, 3, 4), (2, 3, 4))), x, x)
    with pytest.raises(ValueError, match=r"^fit: weight_0 is complex"):
        fit(layer_of(kronecker((4, 6), (4, 6)), dtype=torch.complex64), x, x)
    with pytest.raises(ValueError, match=r"^fit: weight_0 is on the meta device"):
        fit(layer_of(kronecker((4, 6), (4, 6)), device="meta"), x, x)
    layer = layer_of(kronecker((4, 6), (4, 6)))
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^fit: ridge should be a number not below 0"):
            fit(layer, x, x, ridge=wrong)
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match=r"^fit: iterations should be a positive integer"):
            fit(layer, x, x, iterations=wrong)
    parametrize.register_parametrization(layer, "weight_1", nn.Identity())
    with pytest.raises(ValueError, match=r"^fit: weight_1 is parametrized"):
        fit(layer, x, x)


# whole models


class First(nn.Sequential):
    """Which calls the first of its layers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self[0](x))


def batches() -> list[Tensor]:
    return [tokens(64), tokens(8)]


def model(dense: type[nn.Module] = nn.Linear) -> Transformer:
    return Transformer(dense).double().eval()


def difference(found: nn.Module, right: Tensor) -> float:
    with torch.no_grad():
        return float((found(tokens(64)) - right).norm() / right.norm())


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("settings", [MONARCH, dict(rank=3)], ids=["monarch", "kronecker"])
def test_convert_with_inputs_is_nearer(settings: dict[str, Any], dense: type[nn.Module], turned: object) -> None:
    plain = model(dense)
    with torch.no_grad():
        right = plain(tokens(64))
    projected, fitted = copy.deepcopy(plain), copy.deepcopy(plain).train()
    convert(projected, {"h.*": settings})
    random = torch.get_rng_state()
    done = convert(fitted, {"h.*": settings}, inputs=batches(), keep=True)
    assert torch.equal(torch.get_rng_state(), random) and all(part.training for part in fitted.modules())
    assert difference(fitted.eval(), right) < 0.8 * difference(projected, right)
    assert len(done.changes) == 8
    for change in done.changes:
        assert change.fit.after < change.fit.before and change.fit.samples == 72 * 12
        assert fitted.get_submodule(change.name).projection_error == change.error
        assert not fitted.get_submodule(change.name)._forward_hooks
    lines = str(done).splitlines()
    assert lines[0].split() == ["layer", "before", "after", "parameters", "error", "of", "outputs", "fitted"]
    assert re.search(r"\d\.\d\de-\d\d  +\d\.\d\de-\d\d  +\d\.\d\de-\d\d$", lines[1])
    first = done.changes[0].fit
    assert done.to_json()["changes"][0]["fit"] | {"unseen": 0} == vars(first)
    restore(fitted)
    assert difference(fitted, right) < 1e-12


def test_a_layer_makes_up_for_those_before_it() -> None:
    """Its inputs are the converted model's, its targets those of the model as it was."""
    net = nn.Sequential(nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 24)).double()
    x = samples(300, 24)
    hidden, right = torch.relu(net[0](x)).detach(), net(x).detach()
    fitted = copy.deepcopy(net)
    done = convert(fitted, {"0": dict(rank=1), "2": dict(rank=6)}, inputs=[x])
    second = FactorLinear.from_linear(net[2], rank=6)
    assert fit(second, hidden, right).after > 0
    with torch.no_grad():
        alone = float((second(torch.relu(fitted[0](x))) - right).norm() / right.norm())
        both = float((fitted(x) - right).norm() / right.norm())
    assert both < 0.9 * alone
    assert done.changes[1].fit.after == pytest.approx(both, rel=1e-8)


def test_the_order_is_that_of_calls_and_layers_without_any_stay_projected() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.unused, self.first = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.last(torch.tanh(self.first(x))) * scale

    net = Net().double()
    x = samples(100, 16)
    right = net(x).detach()
    weight = net.unused.weight.detach().clone()
    done = convert(net, {nn.Linear: dict(rank=2)}, inputs=[dict(x=x, scale=2.0), (x,)])
    last, unused, first = done.changes
    assert unused.fit is None and first.fit.samples == last.fit.samples == 200
    left = (net.unused.to_dense() - weight).norm() / weight.norm()
    assert unused.error.weight == pytest.approx(left.item())
    assert last.fit.after == pytest.approx(((net(x) - right).norm() / right.norm()).item(), rel=1e-6)
    assert str(done).splitlines()[2].split()[-2:] == ["-", "-"]


def test_a_layer_that_is_called_twice_is_fitted_to_both() -> None:
    inner = nn.Linear(16, 16, dtype=torch.float64)
    net = nn.Sequential(inner, nn.Tanh(), inner)
    x = samples(50, 16)
    done = convert(net, {nn.Linear: dict(rank=2)}, inputs=[x])
    assert done.changes[0].names == ("0", "2") and done.changes[0].fit.samples == 100


@pytest.mark.feature("convert: inputs of nn.TransformerEncoder in eval mode", result="works")
def test_nn_transformer_encoder() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(encoder, 2).eval()
    done = convert(net, {"*.linear?": dict(rank=2)}, inputs=[torch.randn(40, 6, 16)])
    assert all(change.fit.samples == 240 for change in done.changes)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.feature("convert: inputs of a compiled model", result="works")
def test_a_compiled_model_is_fitted_as_it_is_and_compiled_once() -> None:
    net, compiled = First(nn.Linear(16, 16)), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compiled.append(graph)
        return graph.forward

    run = torch.compile(net.eval(), backend=backend)
    x = torch.randn(50, 16)
    with torch.no_grad():
        run(x)
    done = convert(run, {nn.Linear: dict(rank=2)}, inputs=[x])
    assert done.changes[0].fit.samples == 50 and len(compiled) == 1
    torch._dynamo.reset()


def test_hooks_hear_and_change_what_a_layer_is_called_with() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    net[2].register_forward_pre_hook(lambda module, given: (2 * given[0],))
    net[2].register_forward_hook(lambda module, given, output: output + 1)
    x = samples(100, 16)
    right = net(x).detach()
    done = convert(net, {nn.Linear: dict(rank=8)}, inputs=[x])
    apart = (net(x) - right).norm() / (right - 1).norm()
    assert done.changes[1].fit.after == pytest.approx(apart.item(), rel=1e-6)


def test_a_bias_that_others_have_too_stays() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)).double()
    net[2].bias = net[0].bias
    before = net[0].bias.detach().clone()
    done = convert(net, {"0": dict(rank=2)}, inputs=[samples(10, 16)])
    assert str(done).splitlines()[-1] == f"few samples of 0: {done.changes[0].fit}" and done.changes[0].fit.unseen == 6
    assert net[0].bias is net[2].bias and torch.equal(net[0].bias, before)
    assert done.changes[0].fit.after < done.changes[0].fit.before


def test_a_fit_that_fails_has_changed_nothing() -> None:
    net = model()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    parts = list(net.modules())
    calls = []

    class Unlucky(list):
        """The model fails in the middle of the passes."""

        def __iter__(self) -> Iterator[Tensor]:
            calls.append(1)
            yield tokens(8) if len(calls) < 6 else tokens(8) + 1000

    with pytest.raises(IndexError):
        convert(net, {"h.*": MONARCH}, inputs=Unlucky())
    assert len(calls) == 6
    assert all(a is b for a, b in zip(net.modules(), parts, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert not any(part._forward_hooks for part in parts) and torch.backends.mha.get_fastpath_enabled()


def test_wrong_inputs_of_convert_are_refused() -> None:
    net, x = First(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(5, 16)
    with pytest.raises(
        ValueError, match=r"^convert: with inputs the model calls none of the layers that it was to fit"
    ):
        convert(net, {"1": dict(rank=2)}, inputs=[x])
    wrong: list[tuple[type[Exception], Any, str]] = [
        (TypeError, x, "should be batches, such as a list, .*; it is a Tensor"),
        (TypeError, (x,), "it is a tuple"),
        (TypeError, 7, "it is a int"),
        (TypeError, (each for each in [x]), "a generator is at its end after the first"),
        (TypeError, [[x, x]], "each batch of inputs should be a tensor, .*; one is a list"),
        (ValueError, [], "inputs should have batches, there are none"),
        (ValueError, [x * torch.nan], "0: inputs should be finite; batch 0"),
        (ValueError, [x[:0]], "0: inputs should have samples, there are none"),
    ]
    for kind, given, words in wrong:
        with pytest.raises(kind, match=f"^convert: .*{words}|^convert: {words}"):
            convert(net, {"0": dict(rank=2)}, inputs=given)
        assert type(net[0]) is nn.Linear
    for settings in (dict(dry_run=True), dict(initialize="fresh")):
        with pytest.raises(
            ValueError, match=r"^convert: inputs fit layers from their projections on, and .* leave one"
        ):
            convert(net, {"0": dict(rank=2)}, inputs=[x], **settings)
