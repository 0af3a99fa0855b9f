"""x as several tensors on a GPU: against torch.cat and a layer, in float64 as both are, for drawn layers and widths."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from oracle import DTYPES, dtype_id
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorLinear, FactorMLP
from factorlayer.autograd import input_ops

SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 32, 40, 64]


def drawn(rng: random.Random, dtype: torch.dtype) -> tuple[FactorLinear, list[int], int]:
    """A layer, widths of its inputs, and a number of samples."""
    structure = rng.choice(["kronecker", "kronecker", "kronecker", "monarch"])
    count = 2 if structure == "monarch" else rng.choice([1, 2, 2, 3, 4])
    pool = SIZES if count < 3 else SIZES[:6]
    sizes = [tuple(rng.choice(pool) for _ in range(count)) for _ in range(2)]
    features = [math.prod(each) for each in sizes]
    rank = rng.choice([1, 1, 2]) if count == 2 and structure == "kronecker" and min(map(min, sizes)) > 2 else 1
    activation = rng.choice([None, "gelu", nn.PReLU()])
    layer = FactorLinear(
        *features,
        rng.random() < 0.7,
        structure=structure,
        factors=tuple(sizes),
        rank=rank,
        activation=activation,
        dtype=dtype,
    )
    layer.implementation = "fused"
    step = rng.choice([1, 1, 2, 8])  # features that all widths are multiples of
    cuts = sorted(rng.sample(range(0, features[0] + 1, step), min(rng.choice([1, 1, 2, 4]), features[0] // step)))
    widths = [b - a for a, b in itertools.pairwise([0, *cuts, features[0]])]
    return layer.cuda(), widths, rng.choice([1, 5, 64, 65, 333, 2049])


def results(layer: nn.Module, x: object, parts: list[Tensor], grad_y: Tensor) -> list[Tensor]:
    y = layer(x)
    grads = torch.autograd.grad(y, [*parts, *layer.parameters()], grad_y.to(y))
    count = len(parts)
    return [each.detach().cpu().double() for each in (y, torch.cat(grads[:count], -1), *grads[count:])]


@pytest.fixture
def _always_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read several tensors wherever there are such."""
    monkeypatch.setattr(input_ops, "slower_than_concatenated", lambda *_: None)
    for known in (input_ops._at_once,):
        known.cache_clear()


@pytest.mark.usefixtures("_always_apart")
@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"], ids=lambda dtype: dtype if dtype == "tf32" else dtype_id(dtype))
@pytest.mark.parametrize("seed", range(6))
def test_errors_are_those_of_one_tensor(seed: int, dtype: torch.dtype | str) -> None:
    rng = random.Random(f"inputs {seed} {dtype}")
    torch.manual_seed(seed)
    if dtype == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    kind = torch.float32 if dtype == "tf32" else dtype
    check(*drawn(rng, kind), 2**-10 if dtype == "tf32" else torch.finfo(kind).eps)


# One at least of each family that takes inputs
OF_FAMILIES = [
    ("32x32 32x32", (512, 512), 16, torch.bfloat16),
    ("112x96 96x112", (10000, 752), 5, torch.float32),
    ("48x40 40x48", (1000, 920), 300, torch.bfloat16),
    ("96x72 72x96", (32, 6880), 70, torch.float16),
    ("64x64 64x64", (1024, 1024, 1024, 1024), 300, torch.float32),
    ("32x24 24x32", (568, 200), 2049, torch.bfloat16),
    ("16x16 16x16 16x16", (4000, 96), 2049, torch.float32),
    ("300x3 300x3", (45000, 45000), 40, torch.float64),
    ("8x8 512x512", (2048, 2048), 300, torch.bfloat16),
    ("monarch 32x32 32x32", (1000, 24), 300, torch.bfloat16),
    ("monarch 31x33 33x31", (1000, 23), 40, torch.float16),
]


@pytest.mark.usefixtures("_always_apart")
@pytest.mark.parametrize(("factors", "widths", "batch", "dtype"), OF_FAMILIES, ids=str)
def test_families(factors: str, widths: tuple[int, ...], batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = factors.removeprefix("monarch ")
    p, q = zip(*(tuple(map(int, factor.split("x"))) for factor in sizes.split()), strict=True)
    layer = FactorLinear(
        math.prod(p),
        math.prod(q),
        structure="kronecker" if sizes == factors else "monarch",
        factors=(p, q),
        dtype=dtype,
        implementation="fused",
    )
    check(layer.cuda(), list(widths), batch, torch.finfo(dtype).eps)


def check(layer: FactorLinear, widths: list[int], batch: int, eps: float) -> None:
    kind = layer.weight_0.dtype
    x = torch.randn(batch, layer.in_features, dtype=kind, device="cuda")
    grad_y = torch.randn(batch, layer.out_features, dtype=kind, device="cuda")
    parts = [part.clone().requires_grad_() for part in x.split(widths, 1)]
    found = results(layer, parts, parts, grad_y)
    whole = x.clone().requires_grad_()
    one = results(layer, whole, [whole], grad_y)
    exact = layer.double()
    exact.implementation = "naive"
    whole = x.double().requires_grad_()
    right = results(exact, whole, [whole], grad_y)
    for ours, theirs, true in zip(found, one, right, strict=True):
        size = true.norm()
        assert (ours - true).norm() <= 2 * (theirs - true).norm() + 4 * eps * size, (widths, batch, layer)


@pytest.mark.usefixtures("_always_apart")
def test_the_same_bits_every_run_and_a_graph_replays() -> None:
    layer = FactorLinear(1024, 1024, dtype=torch.bfloat16, implementation="fused").cuda()
    parts = [torch.randn(300, n, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (640, 384)]
    runs = [results(layer, parts, parts, torch.ones(300, 1024)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(parts)
        for part in parts:
            part.copy_(torch.randn_like(part))
        graph.replay()
        assert torch.equal(y, layer(parts))


@pytest.mark.parametrize("inputs", [(512, 512), (1000, 24), (1023, 1)])
def test_words_say_what_runs(inputs: tuple[int, int]) -> None:
    layer = FactorLinear(1024, 1024, dtype=torch.bfloat16, implementation="fused").cuda()
    words = layer.explain(4096, inputs)
    assert "x from 2 tensors" in words or "concatenated before, because" in words
    dense = FactorLinear(1024, 1024, factors=((1024,), (1024,)), implementation="batched").cuda()
    assert "a product for each" in dense.explain(4096, inputs)


@pytest.mark.parametrize("kind", ["mlp", "dense mlp", "gru", "dense gru", "compiled"])
def test_modules(kind: str) -> None:
    torch.manual_seed(0)
    module: nn.Module = {
        "mlp": lambda: FactorMLP([(16, 16), (16, 16), 30], activation="gelu"),
        "dense mlp": lambda: FactorMLP([256, 64, 30]),
        "gru": lambda: FactorGRU(256, 64, structure="kronecker"),
        "dense gru": lambda: FactorGRU(256, 64, implementation="fused"),
        "compiled": lambda: FactorLinear(256, 256),
    }[kind]().cuda()
    parts = [torch.randn(6, 40, n, device="cuda", requires_grad=True) for n in (96, 100, 60)]
    call = torch.compile(module, fullgraph=True) if kind == "compiled" else module
    found, right = ((y[0] if isinstance(y, tuple) else y) for y in (call(parts), module(torch.cat(parts, -1))))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    wanted = [*parts, *module.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), wanted) for y in (found, right)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-2)
