"""v3 on a GPU as programs run it: again and again, on streams, in graphs, compiled, in threads, short of memory."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forward_rule import DTYPES, arithmetic
from torch import Tensor
from typer.testing import CliRunner

import factorlayer.autograd.layer_ops
import factorlayer.functional
from factorlayer import FactorLinear
from factorlayer.autograd.layer_ops import not_at_once
from factorlayer.cli.app import app

# All on chip; through memory between passes; untied.
LAYERS = {
    "on-chip": dict(factors=(32, 32), activation="gelu"),
    "several-passes": dict(factors=(3, 1000)),
    "monarch": dict(structure="monarch", factors=(16, 24)),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)
MODULE = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_compiled_graphs_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def layer_of(
    kind: str, dtype: torch.dtype = torch.bfloat16, implementation: str = "fused", **more: object
) -> FactorLinear:
    settings = {**LAYERS[kind], **more}
    features = math.prod(settings["factors"])
    torch.manual_seed(0)
    return FactorLinear(features, features, implementation=implementation, device="cuda", dtype=dtype, **settings)


def sample(layer: FactorLinear, batch: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = layer.weight_0
    return torch.randn(batch, layer.spec.in_features, generator=generator, device="cuda").to(weight.dtype)


def forward(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


# The same bits


@each_layer
@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16"])
def test_the_same_bits_every_time_and_on_every_stream(kind: str, dtype: str) -> None:
    with arithmetic(dtype):
        layer = layer_of(kind, DTYPES[dtype])
        x = sample(layer, 300)
        right = forward(layer, x)
        assert all(torch.equal(forward(layer, x), right) for _ in range(20))
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for i in range(20):  # at once, as far as the GPU lets them
            with torch.cuda.stream(streams[i % 4]):
                found.append(forward(layer, x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, right) for y in found)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_weights_keep_no_x(kind: str, dtype: torch.dtype) -> None:
    """Kernels are given memory in its place that nobody has written."""
    options = LAYERS[kind] | {"activation": None}
    features = math.prod(options["factors"])
    layer = FactorLinear(features, features, device="cuda", dtype=dtype, **options).requires_grad_(False)
    x = torch.randn(300, features, device="cuda", dtype=dtype, requires_grad=True)
    grad_y = torch.randn_like(x)
    found = {}
    for name in ("fused", "batched"):
        layer.implementation = name
        torch.full_like(x, math.nan)  # what fresh memory may hold
        (found[name],) = torch.autograd.grad(layer(x * 1), x, grad_y)
    assert found["fused"].isfinite().all()
    torch.testing.assert_close(found["fused"], found["batched"], atol=0.05, rtol=0.05)


@each_layer
@pytest.mark.feature("any CUDA stream", result="works")
def test_runs_on_the_current_stream(kind: str) -> None:
    """x is written right before the call, behind long work of that stream: any other would read it too early."""
    layer = layer_of(kind, torch.float32)
    x = sample(layer, 64)
    right = forward(layer, x)
    late, big = torch.zeros_like(x), torch.ones(6000, 6000, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            big = (big @ big).clamp(0, 1)
        late.copy_(x)
        y = forward(layer, late)
    stream.synchronize()
    assert torch.equal(y, right)


# CUDA graphs


@each_layer
@pytest.mark.feature("CUDA graphs", result="works")
def test_graphs_replay_with_other_inputs(kind: str) -> None:
    layer = layer_of(kind)
    x, other = sample(layer, 48), sample(layer, 48, seed=2)
    layer.warmup(48)
    right = forward(layer, other)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    for source in (other, sample(layer, 48, seed=3), other):
        x.copy_(source)
        graph.replay()
    assert torch.equal(y, right)
    with torch.no_grad():
        layer.weight_0.mul_(2)  # a graph reads the weights where they are
    graph.replay()
    assert torch.equal(y, forward(layer, other))


@each_layer
def test_a_learned_scalar_counts_in_a_replayed_graph(kind: str) -> None:
    layer = layer_of(kind, activation=torch.nn.PReLU())
    x = sample(layer, 48)
    gradients(layer, layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer(x).detach(), *gradients(layer, layer, x)]
    for value in (0.5, -2.0):
        with torch.no_grad():
            layer.activation.weight.fill_(value)
        graph.replay()
        assert all(map(torch.equal, found, [forward(layer, x), *gradients(layer, layer, x)]))


COLD = """
    import os

    import torch
    from factorlayer import FactorLinear

    torch.manual_seed(0)
    layer = FactorLinear(30, 42, factors=((5, 6), (6, 7)), implementation="fused", device="cuda").requires_grad_(False)
    x = torch.randn(9, 30, device="cuda")
    torch.cuda.synchronize()
    graph, message = torch.cuda.CUDAGraph(), ""
    try:
        with torch.cuda.graph(graph):
            y = layer(x)
    except RuntimeError as error:
        while error is not None:
            message += str(error) + "; "
            error = error.__context__
    if message:
        assert "warmup" in message, message
        print("says warmup", flush=True)
        os._exit(0)  # without PyTorch's own end, which trips over the capture
    else:
        graph.replay()
        torch.cuda.synchronize()
        right = layer.double()(x.double())
        assert torch.allclose(y.double(), right, rtol=1e-4, atol=1e-4)
        print("works")
"""


def test_a_first_call_in_a_capture_works_or_says_what_to_do() -> None:
    """In a process of its own: a capture that failed leaves PyTorch's stream as it was."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COLD)],
        cwd=MODULE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("works", "says warmup")


def test_warmup_is_enough_for_a_capture() -> None:
    layer = FactorLinear(77, 65, factors=((7, 11), (5, 13)), implementation="fused", device="cuda")
    x = sample(layer, 11)
    layer.warmup(11)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, forward(layer, x))


# torch.compile, torch.export, autocast, gradients


@each_layer
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.feature("on a GPU: torch.compile as a whole graph", result="works")
def test_compile(kind: str, dynamic: bool) -> None:
    layer = layer_of(kind)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (5, 64, 65, 2100) if dynamic else (5, 65):
        x = sample(layer, batch)
        assert torch.equal(forward(compiled, x), forward(layer, x))
        assert_close(gradients(compiled, layer, x), gradients(layer, layer, x))


@pytest.mark.filterwarnings("ignore")  # what Inductor says of its surroundings
@pytest.mark.feature("on a GPU: torch.compile by Inductor", result="works")
def test_inductor() -> None:
    layer = layer_of("on-chip", torch.float32)
    pytest.importorskip("triton")
    compiled = torch.compile(lambda x: torch.relu(layer(x * 2)) + 1, fullgraph=True, dynamic=True)
    for batch in (33, 2100):
        x = sample(layer, batch)
        torch.testing.assert_close(forward(compiled, x), torch.relu(forward(layer, x * 2)) + 1)


@each_layer
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.feature("on a GPU: torch.export", result="works")
def test_export(kind: str, dynamic: bool) -> None:
    """Also at batches of classes that nobody planned."""
    layer = layer_of(kind, activation="relu")
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(layer, (sample(layer, 40),), dynamic_shapes=shapes), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for batch in (7, 300, 2100) if dynamic else (40,):
        x = sample(layer, batch, seed=2)
        assert torch.equal(forward(loaded, x), forward(layer, x))


@each_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.feature("on a GPU: autocast", result="works")
def test_autocast(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(kind, torch.float32)
    x = sample(layer, 50)
    with torch.autocast("cuda", dtype=dtype):
        y = forward(layer, x)
    assert y.dtype == dtype
    right = forward(layer.to(dtype), x.to(dtype))
    assert torch.equal(y, right)


def gradients(run: Callable[[Tensor], Tensor], layer: FactorLinear, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return list(torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)))


def assert_close(found: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(found, right, strict=True):
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error <= 8 * torch.finfo(b.dtype).eps


# Threads and devices


def test_threads_with_kernels_that_are_not_there_yet() -> None:
    """Several for each layer, and several layers, none of which has been run."""
    sizes = [(9, 5), (5, 9), (10, 11), (3, 19)]
    layers = [
        FactorLinear(p * q, p * q, factors=(p, q), implementation="fused", device="cuda")
        for p, q in sizes
        for _ in range(3)
    ]
    xs = [sample(layer, 20, seed) for seed, layer in enumerate(layers)]
    torch.cuda.synchronize()

    def work(i: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                y = forward(layers[i], xs[i])
            torch.cuda.current_stream().synchronize()
        return y

    with ThreadPoolExecutor(len(layers)) as pool:
        found = list(pool.map(work, range(len(layers))))
    torch.cuda.synchronize()
    for y, layer, x in zip(found, layers, xs, strict=True):
        assert torch.equal(y, forward(layer, x))


@each_layer
@pytest.mark.feature("any device index", result="works")
def test_a_device_that_is_not_the_current_one(kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer = layer_of(kind)
    x = sample(layer, 70)
    right = forward(layer, x)
    layer.to("cuda:1")
    assert torch.cuda.current_device() == 0
    y = forward(layer, x.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and y.device == torch.device("cuda:1")
    assert torch.equal(y.cpu(), right.cpu())
    with pytest.raises(TypeError, match="on one device, x is on cuda:0"):
        layer(x)


# Memory and kernels


def requested(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


@pytest.mark.parametrize("factors", [(32, 32), (64, 64), (8, 8, 8), (20, 28)], ids=lambda f: "x".join(map(str, f)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_pass_takes_no_memory_but_for_its_output(factors: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = FactorLinear(
        math.prod(factors), math.prod(factors), factors=factors, implementation="fused", device="cuda", dtype=dtype
    )
    x = sample(layer, 5000)
    forward(layer, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    y = forward(layer, x)
    assert requested("peak") - before == y.numel() * y.element_size()


@each_layer
def test_calls_leave_no_memory_behind(kind: str) -> None:
    layer = layer_of(kind)
    x = sample(layer, 500)
    forward(layer, x)
    gc.collect()  # what tests before have left in cycles
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        forward(layer, x)
    assert torch.cuda.memory_allocated() == before


@each_layer
@pytest.mark.feature("on a GPU: calls after running out of memory", result="works")
def test_out_of_memory_leaves_the_next_call_working(kind: str) -> None:
    layer = layer_of(kind)
    x = sample(layer, 100)
    right = forward(layer, x)
    wide = FactorLinear(
        4, 16384, factors=((2, 2), (128, 128)), implementation="fused", device="cuda", dtype=torch.bfloat16
    )
    many = torch.zeros(1 << 25, 4, dtype=torch.bfloat16, device="cuda")  # for an output of 2^40 bytes
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            forward(wide, many)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(forward(layer, x), right)
    y = forward(wide, many[:7])
    assert y.shape == (7, 16384) and bool(torch.isfinite(y).all())


def kernels_of(run: Callable[[], object]) -> list[str]:
    """Names of all that ran on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in events if "Sync" not in e.name]


@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's, of events that it clears
def test_one_kernel_for_a_forward() -> None:
    layer = layer_of("on-chip", factors=(128, 128), activation=None)
    x = sample(layer, 32)
    forward(layer, x)
    torch.cuda.synchronize()
    names = kernels_of(lambda: forward(layer, x))
    assert len(names) == 1 and names[0].startswith("factorlayer"), names
    three = kernels_of(lambda: [forward(layer, x) for _ in range(3)])
    assert len(three) == 3 and set(three) == set(names)


@pytest.mark.parametrize("arguments", ["--dtype b 512 64 64", "--dtype d 64 8 8 8", "--mlp --dtype h 4096 32 64 64 16"])
def test_variants_are_timed_and_make_the_same(arguments: str) -> None:
    command = [*arguments.split(), "bench", "--variants", "--json", "--min-run-time", "0.01"]
    found = CliRunner().invoke(app, command)
    (table,) = json.loads(found.stdout)["variants"]
    assert len(table["variants"]) > 2 and any(v["chosen"] for v in table["variants"])
    for variant in table["variants"]:
        assert variant["failure"] is None and variant["measured_us"] > 0, variant
        assert variant["differs_by"] < 1e-2, variant


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_layer
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_runs_kernels_of_its_own_and_no_others(kind: str, dtype: str) -> None:
    with arithmetic(dtype):
        layer = layer_of(kind, DTYPES[dtype])
        x = sample(layer, 32)
        forward(layer, x)
        names = kernels_of(lambda: forward(layer, x))
    assert names and all(name.startswith("factorlayer") for name in names), names


def test_the_tf32_switch_is_seen_at_every_call() -> None:
    layer = layer_of("on-chip", torch.float32)
    x = sample(layer, 32)
    right = forward(layer.double(), x.double())
    layer.float()
    errors = []
    for dtype in ("float32", "tf32", "float32"):
        with arithmetic(dtype):
            errors.append(float((forward(layer, x).double() - right).norm() / right.norm()))
    assert errors[0] == errors[2] < 1e-6 < 1e-5 < errors[1] < 2e-3


@each_layer
@pytest.mark.parametrize("grad_x", [True, False])
@pytest.mark.parametrize(("dtype", "batch"), [("float32", 16), ("tf32", 16), ("bfloat16", 100), ("float64", 3)])
def test_past_the_dispatcher_the_same_is_made(
    kind: str, dtype: str, batch: int, grad_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arithmetic(dtype):
        layer = layer_of(kind, DTYPES[dtype])
        x = sample(layer, batch).requires_grad_(grad_x)
        grad_y = sample(layer, batch, seed=2)
        wanted = [*layer.parameters(), *([x] if grad_x else [])]

        def made() -> list[Tensor]:
            y = layer(x)
            return [y.detach(), *torch.autograd.grad(y, wanted, grad_y)]

        made()  # which looks for kernels
        given = layer.chain.text, layer.chain.tf32_text, False, x, layer.bias, layer.weights
        assert factorlayer.autograd.layer_ops.layer_at_once(*given) is not None
        at_once = made()
        monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)
        monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", not_at_once)
        assert all(map(torch.equal, at_once, made()))


@pytest.mark.parametrize("grad_x", [True, False])
def test_a_small_steps_gradients_are_made_at_once(grad_x: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call, whose results become the parameters' gradients as they are."""
    layer = FactorLinear(1024, 1024, factors=(32, 32), device="cuda")
    x, grad_y = sample(layer, 16).requires_grad_(grad_x), sample(layer, 16)
    layer(x).backward(grad_y)
    layer.zero_grad()
    x.grad = None
    found: list[int] = []
    real = factorlayer.autograd.layer_ops._gradients_at_once

    def noted(*given: object) -> object:
        gradients = real(*given)
        found.extend(t.data_ptr() for t in gradients[1:] if t is not None)
        return gradients

    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", noted)
    layer(x).backward(grad_y)
    tensors = [*([x] if grad_x else []), layer.bias, layer.weight_0, layer.weight_1]
    assert found == [t.grad.data_ptr() for t in tensors]


# What the engine does not take


def test_an_unsupported_dtype_is_refused_under_fused() -> None:
    layer = layer_of("on-chip").to(torch.float8_e4m3fn)
    x = torch.zeros(4, 1024, device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"implementation='fused' cannot run: it has kernels for .*float8_e4m3fn"):
        forward(layer, x)


def test_an_unsupported_dtype_warns_under_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the batched implementation then makes of it is PyTorch's affair."""
    monkeypatch.setattr(factorlayer.functional, "_warned", set())
    layer = layer_of("on-chip", implementation="auto").to(torch.float8_e4m3fn)
    x = torch.zeros(4, 1024, device="cuda").to(torch.float8_e4m3fn)
    refused = contextlib.suppress(RuntimeError, TypeError)
    with refused, pytest.warns(RuntimeWarning, match=r"batched implementation, not the fused one: it has kernels for"):
        forward(layer, x)


def test_an_unsupported_gpu_runs_batched_under_auto_and_is_refused_under_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its CUDA kernels need compute capability 8.0 or later, this one has 7.0"
    monkeypatch.setattr(factorlayer.functional, "_warned", set())
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "why_not_on_gpu", lambda index: reason)
    monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)  # which has run these kernels before
    layer = layer_of("on-chip", torch.float32, implementation="auto")
    x = sample(layer, 20)
    with pytest.warns(RuntimeWarning, match="7.0"):
        y = forward(layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert_close([forward(layer, x)], [y])
    layer.implementation = "batched"
    assert_close([forward(layer, x)], [y])
    layer.implementation = "fused"
    with pytest.raises(RuntimeError, match=r"cannot run: .*8\.0"):
        forward(layer, x)


def test_auto_is_fused_where_it_can_be() -> None:
    layer = layer_of("on-chip", torch.bfloat16)
    x = sample(layer, 64)
    fused = forward(layer, x)
    layer.implementation = "auto"
    assert torch.equal(forward(layer, x), fused)
