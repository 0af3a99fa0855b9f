"""FactorGRU on a GPU: every implementation against float64, cuDNN's way, CUDA graphs, autocast, the same bits, and a
million steps beside other work."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from forward_rule import DTYPES, EPS, arithmetic
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorGRUCell
from factorlayer.autograd.layer_ops import gpu_limits
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import class_of
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.recurrent.recurrent_cluster import RecurrentCluster
from factorlayer.kernels.recurrent.recurrent_many import RecurrentMany
from factorlayer.kernels.recurrent.recurrent_spread import RecurrentSpread
from factorlayer.plan.planner import plan_of

KINDS = {
    "dense": dict(input_size=40, hidden_size=48),
    "spread": dict(input_size=40, hidden_size=256),
    "spread-before": dict(input_size=40, hidden_size=256, reset="before"),
    "many": dict(input_size=40, hidden_size=256),
    "many-odd": dict(input_size=40, hidden_size=201, reset="after", bidirectional=True),
    "kronecker": dict(input_size=48, hidden_size=48, structure="kronecker"),
    "cluster": dict(input_size=32, hidden_size=64 * 64, structure="kronecker", factors=(64, 64)),
    "rank-before": dict(input_size=48, hidden_size=64, structure="kronecker", rank=2, reset="before"),
    "monarch": dict(input_size=64, hidden_size=64, structure="monarch", blocks=8, bidirectional=True),
    "monarch-before": dict(
        input_size=48, hidden_size=60, structure="monarch", factors=((5, 12), (20, 3)), rank=2, reset="before"
    ),
    "monarch-large": dict(input_size=32, hidden_size=1024, structure="monarch", blocks=8, input_structure="dense"),
    "blocks": dict(input_size=32, hidden_size=64, structure="blocks", blocks=4, num_layers=2, activation="silu"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (9, 0, 17, 5, 12)
TIMES = {"many": 27, "many-odd": 27}  # as many sequences
LAYOUTS = ("steps", "batch-first", "cu_seqlens", "starts")


def gru(kind: str, **more: object) -> FactorGRU:
    torch.manual_seed(0)
    return FactorGRU(**{**KINDS[kind], "dtype": torch.float64, **more})


def by_kernels(module: FactorGRU) -> FactorGRU:
    """By the kernels where there are some: of few steps, auto leaves dense matrices to cuDNN."""
    if module.why_not_fused(next(module.parameters())) is None:
        module.implementation = "fused"
    return module


def results(module: FactorGRU, x: Tensor, layout: str, grad: Tensor) -> list[Tensor]:
    """y, h and all gradients, in float64 on the CPU."""
    x = x.clone().requires_grad_()
    given: dict[str, Tensor] = {}
    if layout == "cu_seqlens":
        lengths = LENGTHS * (len(x) // sum(LENGTHS))
        given["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.device)
    if layout == "starts":
        given["starts"] = (torch.arange(x.shape[0], device=x.device) % 7 == 3)[:, None].expand(x.shape[:2])
        given["hx"] = torch.ones(len(module.cells), x.shape[1], module.hidden_size, dtype=x.dtype, device=x.device)
    y, h = module(x, **given)
    loss = (y * grad.to(y)).sum() + h.sum()
    found = [y, h, *torch.autograd.grad(loss, [x, *module.parameters()])]
    return [each.detach().cpu().double() for each in found]


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_errors_are_at_most_twice_those_of_pytorchs_operations(kind: str, layout: str, name: str) -> None:
    dtype = DTYPES[name]
    module = gru(kind, batch_first=layout == "batch-first").to(dtype)
    times = TIMES.get(kind, 1)
    shape = (times * sum(LENGTHS),) if layout == "cu_seqlens" else (17, times * 5)
    x = torch.randn(*shape, module.input_size, dtype=torch.float64).to(dtype)
    grad = torch.randn(*shape, module.hidden_size * (1 + module.bidirectional))
    exact = copy.deepcopy(module).double()
    exact.implementation = "naive"
    right = results(exact, x.double(), layout, grad)
    errors = {}
    for implementation in ("batched", "kernels"):
        moved = copy.deepcopy(module).cuda()
        with arithmetic(name):
            if implementation == "batched":
                moved.implementation = "batched"
            else:
                moved = by_kernels(moved)
            found = results(moved, x.cuda(), layout, grad)
        errors[implementation] = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
    for of_kernels, of_batched in zip(errors["kernels"], errors["batched"], strict=True):
        assert of_kernels <= 2 * of_batched + 4 * EPS[name] * shape[0] ** 0.5


@each_kind
def test_cudnns_switch_says_whether_float32_is_tf32(kind: str) -> None:
    """At every call, forward and back; PyTorch's other switch, for products, is off."""
    module = by_kernels(gru(kind, dtype=torch.float32).cuda())
    if module.implementation != "fused":
        pytest.skip("PyTorch's operations, one by one, follow its switch for products")
    sequences = 5 * TIMES.get(kind, 1)
    x, grad = torch.randn(17, sequences, module.input_size), torch.ones(1)
    exact = copy.deepcopy(module).cpu().double()
    exact.implementation = "naive"
    right = results(exact, x.double(), "steps", grad)
    errors = []
    for precision in ("ieee", "tf32", "ieee"):
        torch.backends.cudnn.rnn.fp32_precision = precision
        found = results(module, x.cuda(), "steps", grad)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)])
    assert errors[0] == errors[2]
    assert max(errors[0]) < 2e-5 and 2e-5 < errors[1][0] < 4e-3 and max(errors[1]) < 1e-2


@pytest.mark.parametrize("hidden", [48, 256])
def test_a_cell_is_float32s_where_products_are(hidden: int) -> None:
    """As nn.GRUCell is, whatever cuDNN's switch says."""
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    theirs = nn.GRUCell(40, hidden).cuda()
    ours = FactorGRUCell.from_gru(theirs, implementation="fused")
    x, h = torch.randn(9, 40, device="cuda"), torch.randn(9, hidden, device="cuda")
    torch.testing.assert_close(ours(x, h), theirs(x, h))


def test_cudnn_finds_its_weights_together() -> None:
    """nn.GRU's numbers, and no warning that they are apart."""
    theirs = nn.GRU(40, 48, 2, bidirectional=True).cuda()
    ours = FactorGRU.from_gru(theirs, implementation="batched")
    x = torch.randn(6, 3, 40, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.double()(x.double()), theirs.double()(x.double()))
        structured = FactorGRU.from_gru(theirs, structure="kronecker", factors=(6, 8), implementation="batched")
        assert "PyTorch’s op for all of it, with matrices multiplied out" in structured.explain(3, 6)
        torch.testing.assert_close(structured(x.double()), structured.to_gru()(x.double()))


@each_kind
def test_graphs_replay_with_other_inputs(kind: str) -> None:
    module = by_kernels(gru(kind, dtype=torch.float32).cuda())
    sequences = 4 * TIMES.get(kind, 1)
    x = torch.randn(12, sequences, module.input_size, device="cuda")
    with torch.no_grad():
        module.warmup(sequences, 12)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, h = module(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close((y, h), module(x))


@each_kind
def test_autocast(kind: str) -> None:
    module = by_kernels(gru(kind, dtype=torch.float32).cuda())
    x = torch.randn(12, 4, module.input_size, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        y, h = module(x)
    assert y.dtype == h.dtype == torch.float16
    torch.testing.assert_close((y, h), copy.deepcopy(module).half()(x.half()))
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@each_kind
def test_the_same_bits_every_run(kind: str) -> None:
    module = by_kernels(gru(kind, dtype=torch.bfloat16).cuda())
    if module.implementation != "fused":
        pytest.skip("promised of the fused implementation alone")
    x = torch.randn(64, 16 * TIMES.get(kind, 1), module.input_size, device="cuda").bfloat16()
    grad = torch.ones(1)
    runs = [results(module, x, "steps", grad) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


# Kernels whose blocks wait for one another at every step, all of them or those of a cluster, and sequences
WAITING: dict[str, tuple[type[Pass], int, dict[str, object]]] = {
    "spread": (RecurrentSpread, 1, dict(hidden_size=256)),
    "spread-before": (RecurrentSpread, 1, dict(hidden_size=256, reset="before")),
    "many": (RecurrentMany, 65, dict(hidden_size=200)),
    "cluster": (RecurrentCluster, 1, dict(hidden_size=24 * 24, structure="kronecker", input_structure="dense")),
}
OF_MANY = 10  # times fewer steps of them, for which there is memory
SETTLED, COMPARED = 256, 64  # steps behind which nothing is left of a state, and steps that are held against float64
HUNG = 120  # seconds, of what takes a few


@pytest.mark.parametrize(("steps", "trained"), [(1_000_000, False), (100_000, True)])
@pytest.mark.parametrize("kind", WAITING)
def test_a_million_steps_beside_other_work(kind: str, steps: int, trained: bool) -> None:
    """The same bits as alone; and, as a state forgets, at the end those of the last steps in float64."""
    family, sequences, sizes = WAITING[kind]
    steps //= OF_MANY if sequences > 1 else 1
    torch.manual_seed(0)
    module = FactorGRU(8, dtype=torch.bfloat16, device="cuda", implementation="fused", **sizes)  # type: ignore[arg-type]
    plan = plan_of(module.cells[0].recurrence.text, "bfloat16", class_of(sequences), Gpu(*gpu_limits(0)))
    if not isinstance(plan.passes[-1], family):
        pytest.skip(f"this GPU does not take {family.__name__}")
    x = torch.randn(steps, sequences, 8, device="cuda").bfloat16()
    grad = torch.randn(
        steps if trained else SETTLED + COMPARED, sequences, module.hidden_size, device="cuda"
    ).bfloat16()

    def run() -> list[Tensor]:
        given = x.detach().requires_grad_(trained)
        with torch.set_grad_enabled(trained):
            y, h = module(given)
            found = torch.autograd.grad(y, [given, *module.parameters()], grad) if trained else ()
        finish()
        return [y.detach(), h.detach(), *found]

    alone = run()
    with other_work() as done:
        while not done:
            time.sleep(0.01)
        before = len(done)
        beside = run()
        assert len(done) > before, "nothing else ran meanwhile"
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert all(bool(each.isfinite().all()) for each in alone)
    exact = copy.deepcopy(module).double()
    exact.implementation = "naive"
    tail = x[-SETTLED - COMPARED :].double().requires_grad_()
    y, h = exact(tail)
    (grad_x,) = torch.autograd.grad(y, tail, grad[-SETTLED - COMPARED :].double())
    pairs = [(alone[0], y), (alone[2], grad_x)] if trained else [(alone[0], y)]
    for found, right in ((alone[1], h), *((found[-COMPARED:], right[-COMPARED:]) for found, right in pairs)):
        assert (found.double() - right).norm() <= 8 * torch.finfo(torch.bfloat16).eps * right.norm()


def finish() -> None:
    """Waits for the stream, but not for ever."""
    event, begin = torch.cuda.Event(), time.monotonic()
    event.record()
    while not event.query():
        if time.monotonic() - begin > HUNG:
            pytest.exit(f"a kernel has not ended in {HUNG} seconds: whoever runs next on this GPU would wait for it")
        time.sleep(0.001)


@contextlib.contextmanager
def other_work() -> Iterator[list[int]]:
    """Products that fill the GPU, one behind another on a stream of their own; a list of those that are done."""
    done: list[int] = []
    stop = threading.Event()

    def work() -> None:
        stream, events = torch.cuda.Stream(), list[torch.cuda.Event]()
        with torch.cuda.stream(stream):
            a = torch.randn(4096, 4096, device="cuda").bfloat16()
            made = torch.empty_like(a)
            while not stop.is_set():
                torch.mm(a, a, out=made)
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > 4:
                    events.pop(0).synchronize()
                    done.append(len(done))
            stream.synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
