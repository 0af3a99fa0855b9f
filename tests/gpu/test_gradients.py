"""v3's backward pass on a GPU: right gradients of everything, the same bits every time, and no more than is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from forward_rule import DTYPES, EPS, arithmetic, draw, poison, to_gpu
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import (
    KINDS,
    LAYOUTS,
    PRELU,
    SINE,
    Case,
    Inputs,
    cases,
    kronecker,
    longest_sum_root,
    monarch,
    movement,
    relative_errors,
    results,
)
from torch import Tensor, nn

from factorlayer import FactorLinear
from factorlayer.functional import run
from factorlayer.maths.chain import Chain
from factorlayer.plan.planner import plan_text

dtypes = pytest.mark.parametrize("dtype", DTYPES)

CASES = [
    Case(kronecker((1,), (1,)), 3),
    Case(kronecker((32, 32), (32, 32)), 16, True, "gelu"),
    Case(kronecker((32, 32), (32, 32)), 3000, False),
    Case(kronecker((64, 64), (64, 64)), 300, False),
    Case(kronecker((20, 28), (36, 44)), 133),
    Case(kronecker((97, 31), (97, 31)), 5),
    Case(kronecker((128, 128), (128, 128)), 70, False),
    Case(kronecker((8, 256), (8, 100)), 40, True, "relu"),
    Case(kronecker((3, 1000), (5, 300)), 9, False),
    Case(kronecker((8, 8, 8), (9, 9, 9)), 200, False),
    Case(kronecker((4,) * 6, (4,) * 6), 33, False),
    Case(kronecker((8,) * 5, (8,) * 5), 300, False),
    Case(kronecker((8, 8, 4, 8, 8), (8, 8, 4, 8, 8)), 300),
    Case(kronecker((3, 32, 40), (2, 40, 32)), 70, True, "silu"),
    Case(kronecker((13, 5, 3), (6, 17, 3), rank=2), 50),
    Case(kronecker((12, 12, 12), (12, 12, 12)), 300),
    Case(kronecker((17, 4, 7, 7), (17, 4, 7, 7)), 130, False),
    Case(kronecker((29, 3, 5, 11), (29, 3, 5, 11), rank=2), 70, True, "tanh"),
    Case(kronecker((164, 3, 41), (164, 3, 41), rank=3), 33),
    Case(kronecker((48, 40), (40, 64), rank=4), 300),
    Case(kronecker((64, 64), (64, 64), rank=3), 3000, True, "gelu"),
    Case(kronecker((72, 96), (96, 80), rank=2), 150),
    Case(kronecker((93, 215, 13), (93, 15, 13)), 5, False),
    Case(kronecker((211, 7), (90, 12)), 70),
    Case(kronecker((256,), (256,)), 3000, True, "relu"),
    Case(kronecker((136,), (204,)), 70, True, "gelu"),
    Case(kronecker((63,), (250,)), 3000, True, "relu"),
    Case(kronecker((256,), (4,)), 3000),
    Case(monarch((32, 32), (32, 32)), 70, True, "gelu"),
    Case(monarch((8, 64), (48, 16), rank=4), 300, True, "sine"),
    Case(monarch((32, 24), (64, 48), rank=4), 2060, True, "gelu"),
    Case(monarch((8, 24), (16, 32), rank=8), 300),
    Case(monarch((12, 11, 10), (9, 12, 13)), 40, True, "softplus"),
    Case(monarch((4, 192), (192, 4), rank=48), 300, False),
    Case(kronecker((32, 32), (32, 32)), 300, True, PRELU),
    Case(kronecker((13, 5, 3), (6, 17, 3), rank=2), 50, False, SINE),
    Case(monarch((32, 32), (32, 32)), 70, True, SINE),
]
# One of each way back: all at once, all at once behind a pass of its own, one by one, terms, untied, and that behind
# slopes and sums that are turned, a learned scalar.
FEW = [
    Case(kronecker((32, 24), (24, 40)), 130, False),
    Case(kronecker((3, 32, 40), (2, 40, 32)), 70),
    Case(kronecker((6, 9), (8, 5), rank=2), 37),
    Case(kronecker((14, 9, 17), (6, 9, 20), rank=3), 37),
    Case(kronecker((3, 1000), (5, 300)), 37, True, "tanh"),
    Case(monarch((6, 10), (9, 7)), 37),
    Case(monarch((16, 64), (40, 16), rank=4), 37),
    Case(monarch((16, 64), (40, 16), rank=4), 137, True, "gelu"),
    Case(kronecker((13, 24), (20, 7)), 37, True, SINE),
]
few = pytest.mark.parametrize("case", FEW, ids=str)
MOST_ELEMENTS = 1 << 24  # of x: in float64 with all that is compared 4 GiB, beside other processes of the test run


def on_gpu(case: Case, dtype: str, seed: int = 0) -> Inputs:
    return to_gpu(draw(case, dtype, seed)[0])


def fused(case: Case, inputs: Inputs, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
    """In memory that holds NaNs."""
    poison(inputs.x.numel() * inputs.x.element_size())
    return results(case, inputs, "fused", wanted)


def check_rule(case: Case, dtype: str, drawn: Sequence[Inputs]) -> None:
    """AssertionError, with all the numbers, where a gradient breaks the rule."""
    inputs = [to_gpu(i) for i in drawn]
    right = [results(case, i.to(torch.float64), "naive") for i in inputs]
    with arithmetic(dtype):
        found, batched = [fused(case, i) for i in inputs], [results(case, i, "batched") for i in inputs]
    for one, reference in zip(found, right, strict=True):
        assert all((one[n].shape, one[n].dtype) == (reference[n].shape, DTYPES[dtype]) for n in reference)
    of_fused, of_batched = relative_errors(found, right), relative_errors(batched, right)
    sums = longest_sum_root(case) if dtype == "float64" else 1.0  # that naive itself rounds
    allowed = {name: 2 * of_batched[name] + 4 * sums * EPS[dtype] for name in of_fused}
    if all(of_fused[name] <= allowed[name] for name in allowed):
        return
    on_cpu = [results(case, i.to(torch.float64), "naive") for i in drawn]
    moves = movement(case, drawn, on_cpu, EPS[dtype] if dtype in ("float64", "tf32") else EPS["float32"])
    wrong = {
        name: f"fused is off by {of_fused[name]:.2e}, batched by {of_batched[name]:.2e}"
        for name in of_fused
        if not of_fused[name] <= max(allowed[name], 2 * sums * moves[name])
    }
    assert not wrong, f"{case}, {dtype}: {wrong}"


# The rule


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, dtype: str) -> None:
    check_rule(case, dtype, draw(case, dtype))


@dtypes
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), badly_scaled=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))
def test_rule_on_layers_drawn_at_random(
    dtype: str, data: st.DataObject, layout: str, badly_scaled: bool, seed: int
) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(KINDS))))
    check_rule(case, dtype, draw(case, dtype, seed, layout, badly_scaled))


@few
@dtypes
def test_sums_over_many_samples_do_not_lose_the_small_ones(case: Case, dtype: str) -> None:
    """All of one sign, where an accumulator that truncates would drift; small enough for float16 to hold them."""
    widest = max(case.spec.in_features, case.spec.out_features)
    many = replace(case, batch=min(20000, MOST_ELEMENTS // widest), activation="identity")
    drawn = draw(many, dtype)
    check_rule(many, dtype, [replace(i, x=i.x.abs() / 16, grad_y=i.grad_y.abs()) for i in drawn])


# What is not finite, what is not wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@few
@dtypes
def test_what_is_not_finite_stays_with_its_sample(case: Case, dtype: str, value: float) -> None:
    """In grad_x; gradients of weights are sums over all samples, of which one is such a number."""
    clean = on_gpu(case, dtype)
    grad_y = clean.grad_y.clone()
    sick = case.batch // 2
    grad_y[sick, 0] = value
    with arithmetic(dtype):
        without, found = fused(case, clean), fused(case, replace(clean, grad_y=grad_y))
        batched = results(case, replace(clean, grad_y=grad_y), "batched")
    others = torch.arange(case.batch, device="cuda") != sick
    assert torch.equal(found["grad_x"][others], without["grad_x"][others])
    for name, gradient in found.items():
        assert torch.equal(torch.isfinite(gradient), torch.isfinite(batched[name])), name


@few
@dtypes
def test_any_subset_is_right(case: Case, dtype: str) -> None:
    inputs = on_gpu(case, dtype)
    names = ["x", *(f"weight_{i}" for i in range(len(inputs.weights))), *(["bias"] if case.bias else [])]
    with arithmetic(dtype):
        everything = fused(case, inputs)
        for left_out in names:
            for wanted in ([left_out], [name for name in names if name != left_out]):
                found = fused(case, inputs, wanted)
                assert list(found) == ["y", *(f"grad_{name}" for name in wanted)]
                for name, gradient in found.items():
                    off = (gradient.double() - everything[name].double()).norm() / everything[name].double().norm()
                    assert float(off) <= 16 * EPS[dtype], (wanted, name)


def test_grad_y_moves_on_with_x_from_chunk_to_chunk() -> None:
    """Slopes by the last pass of a plan make the same bits where all samples go through it together."""
    spec = kronecker((24, 32), (48, 64))
    chain = replace(Chain.of(spec, True, "gelu"), slope=spec.out_features)
    whole = plan_text(chain.text, "float32", 1, *torch.ops.factorlayer.limits(0))
    x, grad_y = (torch.randn(1800, n, device="cuda") for n in (spec.in_features, spec.out_features))
    weights = [torch.randn(shape, device="cuda") for shape in spec.weight_shapes]
    bias, found = torch.randn(spec.out_features, device="cuda"), []
    assert whole.count("\nchunk 0\n") == 1
    for text in (whole.replace("\nchunk 0\n", "\nchunk 700\n"), whole):
        torch.ops.factorlayer.install(chain.text, "float32", 1, 0, text)
        found.append(torch.ops.factorlayer.slopes(grad_y, x, weights, bias, chain.text))
    assert torch.equal(*found)


@few
def test_no_samples(case: Case) -> None:
    inputs = on_gpu(case, "bfloat16")
    none = replace(inputs, x=inputs.x[:0], grad_y=inputs.grad_y[:0])
    for name, gradient in results(case, none, "fused").items():
        assert name in ("y", "grad_x") or not bool(gradient.any())


# The same bits


@few
@dtypes
def test_the_same_bits_every_time_and_on_every_stream(case: Case, dtype: str) -> None:
    inputs = on_gpu(case, dtype)

    def same(found: dict[str, Tensor]) -> bool:
        return all(torch.equal(found[name], right[name]) for name in right)

    with arithmetic(dtype):
        right = fused(case, inputs)
        assert all(same(results(case, inputs, "fused")) for _ in range(20))
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(4)], []
        for i in range(12):
            with torch.cuda.stream(streams[i % 4]):
                found.append(results(case, inputs, "fused"))
        torch.cuda.synchronize()
    assert all(map(same, found))


def training(layer: nn.Module, steps: int, batch: int, features: int, dtype: torch.dtype) -> list[float]:
    """Losses of a layer that learns a random linear map."""
    generator = torch.Generator("cuda").manual_seed(3)
    goal = torch.randn(features, features, generator=generator, device="cuda", dtype=torch.float64) / features**0.5
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        x = torch.randn(batch, features, generator=generator, device="cuda", dtype=torch.float64)
        loss = (layer(x.to(dtype)) - (x @ goal).to(dtype)).double().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("structure", ["kronecker", "monarch"])
def test_a_training_run_goes_as_with_batched_and_has_the_same_bits_again(structure: str, dtype: torch.dtype) -> None:
    def losses(implementation: str) -> list[float]:
        torch.manual_seed(0)
        layer = FactorLinear(576, 576, structure=structure, implementation=implementation, device="cuda", dtype=dtype)
        return training(layer, 300, 64, 576, dtype)

    once = losses("fused")
    assert losses("fused") == once
    assert once[-1] < 0.99 * once[0]
    allowed = 1e-9 if dtype == torch.float64 else 0.02
    assert all(abs(a - b) <= allowed * abs(b) for a, b in zip(once, losses("batched"), strict=True))


# As programs run it


@few
def test_graphs_replay_with_other_inputs(case: Case) -> None:
    inputs, other = on_gpu(case, "bfloat16"), on_gpu(case, "bfloat16", seed=2)
    right = results(case, replace(other, weights=inputs.weights, bias=inputs.bias), "fused")
    results(case, inputs, "fused")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(case, inputs, "fused")
    inputs.x.copy_(other.x)
    inputs.grad_y.copy_(other.grad_y)
    graph.replay()
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_warmup_is_enough_to_capture_a_training_step() -> None:
    layer = FactorLinear(30 * 44, 20 * 36, factors=((30, 44), (20, 36)), implementation="fused", device="cuda")
    x = torch.randn(11, 30 * 44, device="cuda")
    layer.warmup(11)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    graph.replay()
    right = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    assert all(map(torch.equal, found, right))


@few
def test_double_backward(case: Case) -> None:
    inputs = on_gpu(case, "float64")

    def second(implementation: str) -> list[Tensor]:
        leaves = [inputs.x, *inputs.weights, *([inputs.bias] if case.bias else [])]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        layer = replace(inputs, x=leaves[0], weights=leaves[1 : 1 + len(inputs.weights)])
        bias = leaves[-1] if case.bias else None
        y = run(case.spec, case.chain, layer.x, layer.weights, bias, implementation, "test")
        first = torch.autograd.grad(y, leaves[: 1 + len(inputs.weights)], inputs.grad_y, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves[: 1 + len(inputs.weights)]))

    for found, right in zip(second("fused"), second("naive"), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9 * float(right.abs().max()))


def test_autocast_keeps_masters_in_float32() -> None:
    layer = FactorLinear(1024, 1024, factors=(32, 32), implementation="fused", device="cuda")
    x = torch.randn(64, 1024, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    y.float().square().mean().backward()
    twin = FactorLinear(1024, 1024, factors=(32, 32), implementation="batched", device="cuda")
    twin.load_state_dict(layer.state_dict())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        twin(x).float().square().mean().backward()
    for p, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and p.grad.dtype == torch.float32 and other.grad is not None
        assert float((p.grad - other.grad).norm() / other.grad.norm()) <= 0.03


@pytest.mark.parametrize("factors", [(32, 32), (64, 64)], ids=lambda f: "x".join(map(str, f)))
def test_a_step_takes_gradients_and_partial_sums(factors: tuple[int, int]) -> None:
    """Of two factors in 16 bits, beside what is returned: each multiprocessor's sums of the weights' gradients."""
    features = math.prod(factors)
    layer = FactorLinear(
        features, features, False, factors=factors, implementation="fused", device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(5000, features, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    key = "requested_bytes.all."
    before = torch.cuda.memory_stats()[f"{key}current"]
    found = step()
    extra = torch.cuda.memory_stats()[f"{key}peak"] - before
    returned = sum(g.numel() * g.element_size() for g in found)
    sums = 4 * layer.parameter_count * torch.cuda.get_device_properties(0).multi_processor_count
    y_and_its_gradient = 2 * x.numel() * x.element_size()
    assert extra <= y_and_its_gradient + returned + sums + 4096
