"""FactorGRU on a GPU: every implementation against float64, cuDNN's way, CUDA graphs, autocast, the same bits."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

from factorlayer import FactorGRU

KINDS = {
    "dense": dict(input_size=40, hidden_size=48),
    "kronecker": dict(input_size=48, hidden_size=48, structure="kronecker"),
    "cluster": dict(input_size=32, hidden_size=64 * 64, structure="kronecker", factors=(64, 64)),
    "rank-before": dict(input_size=48, hidden_size=64, structure="kronecker", rank=2, reset="before"),
    "monarch": dict(input_size=64, hidden_size=64, structure="monarch", blocks=8, bidirectional=True),
    "blocks": dict(input_size=32, hidden_size=64, structure="blocks", blocks=4, num_layers=2, activation="silu"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (9, 0, 17, 5, 12)
LAYOUTS = ("steps", "batch-first", "cu_seqlens", "starts")


def gru(kind: str, **more: object) -> FactorGRU:
    torch.manual_seed(0)
    return FactorGRU(**{**KINDS[kind], "dtype": torch.float64, **more})


def results(module: FactorGRU, x: Tensor, layout: str, grad: Tensor) -> list[Tensor]:
    """y, h and all gradients, in float64 on the CPU."""
    x = x.clone().requires_grad_()
    given: dict[str, Tensor] = {}
    if layout == "cu_seqlens":
        given["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=x.device)
    if layout == "starts":
        given["starts"] = (torch.arange(x.shape[0], device=x.device) % 7 == 3)[:, None].expand(x.shape[:2])
        given["hx"] = torch.ones(len(module.cells), x.shape[1], module.hidden_size, dtype=x.dtype, device=x.device)
    y, h = module(x, **given)
    loss = (y * grad.to(y)).sum() + h.sum()
    found = [y, h, *torch.autograd.grad(loss, [x, *module.parameters()])]
    return [each.detach().cpu().double() for each in found]


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_twice_those_of_pytorchs_operations(kind: str, layout: str, dtype: torch.dtype) -> None:
    module = gru(kind, batch_first=layout == "batch-first").to(dtype)
    shape = (sum(LENGTHS),) if layout == "cu_seqlens" else (17, 5)
    x = torch.randn(*shape, module.input_size, dtype=torch.float64).to(dtype)
    grad = torch.randn(*shape, module.hidden_size * (1 + module.bidirectional))
    exact = copy.deepcopy(module).double()
    exact.implementation = "naive"
    right = results(exact, x.double(), layout, grad)
    errors = {}
    for implementation in ("batched", "auto"):
        moved = copy.deepcopy(module).cuda()
        moved.implementation = implementation
        found = results(moved, x.cuda(), layout, grad)
        errors[implementation] = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
    for of_auto, of_batched in zip(errors["auto"], errors["batched"], strict=True):
        assert of_auto <= 2 * of_batched + 4 * torch.finfo(dtype).eps * shape[0] ** 0.5


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
    module = gru(kind, dtype=torch.float32).cuda()
    x = torch.randn(12, 4, module.input_size, device="cuda")
    with torch.no_grad():
        module.warmup(4, 12)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, h = module(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close((y, h), module(x))


@each_kind
def test_autocast(kind: str) -> None:
    module = gru(kind, dtype=torch.float32).cuda()
    x = torch.randn(12, 4, module.input_size, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        y, h = module(x)
    assert y.dtype == h.dtype == torch.float16
    torch.testing.assert_close((y, h), copy.deepcopy(module).half()(x.half()))
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@each_kind
def test_the_same_bits_every_run(kind: str) -> None:
    module = gru(kind, dtype=torch.bfloat16).cuda()
    if module.why_not_fused(torch.zeros(1, dtype=torch.bfloat16, device="cuda")) is not None:
        pytest.skip("promised of the fused implementation alone")
    x, grad = torch.randn(64, 16, module.input_size, device="cuda").bfloat16(), torch.ones(1)
    runs = [results(module, x, "steps", grad) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
