"""GRUDecoder on a GPU: against float64, in a CUDA graph, sampling, changed parameters, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorGRUCell, FactorLinear, GRUDecoder
from factorlayer.autograd import decode_ops

SIZES = {  # embedding, context, hidden, vocabulary, layers
    "seed": (256, 0, 512, 5893, 1),
    "odd": (7, 3, 33, 130, 2),
    "wide": (64, 64, 1100, 20000, 1),
}
CHOICES = ["argmax", ("best", 5), ("sample", 0.7), ("sample", 0.7, 5)]

CASES = [("seed", 1, torch.float32, choose) for choose in CHOICES]
CASES += [("seed", 16, torch.float32, "argmax"), ("seed", 12, torch.bfloat16, "argmax")]
CASES += [
    ("odd", 3, torch.float64, CHOICES[2]),
    ("odd", 16, torch.float16, CHOICES[1]),
    ("odd", 1, torch.bfloat16, "argmax"),
]
CASES += [("wide", 5, torch.float32, CHOICES[3]), ("wide", 2, torch.bfloat16, "argmax")]


def modules(sizes: str, dtype: torch.dtype, samples: int) -> tuple[list[nn.Module], list[Tensor | None]]:
    embedding, context, hidden, vocabulary, layers = SIZES[sizes]
    torch.manual_seed(samples)
    like: Any = {"device": "cuda", "dtype": dtype}
    made: list[nn.Module] = [nn.Embedding(vocabulary, embedding, **like)]
    made += [nn.GRU(embedding + context, hidden, layers, **like), nn.Linear(hidden, vocabulary, **like)]
    tokens = torch.randint(vocabulary, (samples,), device="cuda")
    state = torch.randn(layers, samples, hidden, **like)
    return made, [tokens, state, torch.randn(samples, context, **like) if context else None]


def double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).cpu().double()


@pytest.mark.parametrize(("sizes", "samples", "dtype", "choose"), CASES, ids=str)
def test_a_step_is_the_definitions(sizes: str, samples: int, dtype: torch.dtype, choose: Any) -> None:
    parts, given = modules(sizes, dtype, samples)
    decoder = GRUDecoder(*parts, choose, seed=3, implementation="fused")  # type: ignore[arg-type]
    exact = GRUDecoder(*map(double, parts), "argmax", implementation="batched")  # type: ignore[arg-type]
    tokens, state, context = (None if t is None else t.cpu() for t in given)
    assert tokens is not None and state is not None
    *made, behind = decoder.step(*given)  # type: ignore[arg-type]
    _, right = exact.step(tokens, state.double(), None if context is None else context.double())
    near = 30 * torch.finfo(dtype).eps * SIZES[sizes][4]
    torch.testing.assert_close(behind.cpu().double(), right, rtol=near, atol=near)
    # Scores of the state as it was made: what is chosen is the best of these, but for rounding
    scores = exact.head(behind[-1].cpu().double())
    found = made[0].cpu()
    if choose == "argmax":
        taken, best = scores.gather(1, found[:, None])[:, 0], scores.amax(1)
        torch.testing.assert_close(taken, best, rtol=1e-4, atol=1e-4)
    elif choose[0] == "best":
        torch.testing.assert_close(scores.gather(1, found), scores.topk(5).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made[1].cpu().double(), scores.topk(5).values, rtol=1e-4, atol=1e-4)
    else:
        theirs = GRUDecoder(*parts, choose, seed=3, implementation="batched")  # type: ignore[arg-type]
        alike = theirs.step(*given)[0].cpu() == found  # type: ignore[arg-type]
        assert dtype in (torch.bfloat16, torch.float16) or bool(alike.all())
        assert decoder.random.tolist() == theirs.random.tolist() == [3, 1, 0]


@pytest.mark.feature("GRUDecoder: CUDA graphs", result="works")
@pytest.mark.parametrize("choose", CHOICES[:3], ids=str)
def test_a_graph_goes_on(choose: Any) -> None:
    """Step by step, with what is drawn going on and beginning again."""
    parts, (tokens, state, _) = modules("seed", torch.float32, 4)
    decoder = GRUDecoder(*parts, choose, seed=7)  # type: ignore[arg-type]
    assert tokens is not None and state is not None
    given = tokens.clone(), state.clone()
    decoder.step(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *made, behind = decoder.step(*given)
        given[0].copy_(made[0].reshape(4, -1)[:, 0])
        given[1].copy_(behind)
    found = []
    for _ in range(2):
        decoder.manual_seed(7)
        given[0].copy_(tokens), given[1].copy_(state)
        for _ in range(6):
            graph.replay()
            found.append(made[0].clone())
    decoder.manual_seed(7)
    x, h = tokens, state
    for step in range(6):
        *wanted, h = decoder.step(x, h)
        x = wanted[0].reshape(4, -1)[:, 0]
        assert torch.equal(found[step], wanted[0]) and torch.equal(found[6 + step], wanted[0])


def test_many_steps_are_the_same_on_several_streams() -> None:
    """Each call has a counter of its own."""
    parts, (tokens, state, _) = modules("seed", torch.float32, 2)
    decoder = GRUDecoder(*parts)  # type: ignore[arg-type]
    assert tokens is not None and state is not None
    wanted, _ = decoder.generate(tokens, state, 200)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(decoder.generate(tokens, state, 200)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


def test_ties_and_what_is_no_number() -> None:
    parts, (tokens, state, _) = modules("seed", torch.float32, 3)
    head = parts[2]
    assert isinstance(head, nn.Linear) and state is not None
    decoder = GRUDecoder(*parts, implementation="fused")  # type: ignore[arg-type]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-torch.inf)
        assert decoder.step(tokens, state)[0].tolist() == [0, 0, 0]
        head.bias[4000:4002] = 2.0
        assert decoder.step(tokens, state)[0].tolist() == [4000] * 3
        head.bias[5000:5002] = torch.nan
        assert decoder.step(tokens, state)[0].tolist() == [5000] * 3


def test_a_token_that_is_not_there_makes_no_number() -> None:
    parts, (tokens, state, _) = modules("seed", torch.float32, 4)
    assert tokens is not None
    wanted = GRUDecoder(*parts).step(tokens, state)  # type: ignore[arg-type]
    tokens[1], tokens[2] = -1, 1 << 40
    chosen, behind = GRUDecoder(*parts, implementation="fused").step(tokens, state)  # type: ignore[arg-type]
    assert bool(behind[:, 1:3].isnan().all())
    assert torch.equal(behind[:, [0, 3]], wanted[1][:, [0, 3]]) and torch.equal(chosen[[0, 3]], wanted[0][[0, 3]])


def test_changed_parameters_count_at_once() -> None:
    parts, (tokens, *_) = modules("seed", torch.float64, 2)
    decoder = GRUDecoder(*parts, implementation="fused")  # type: ignore[arg-type]
    assert tokens is not None
    decoder.step(tokens)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(-1.5)
    torch.testing.assert_close(decoder.step(tokens)[1], decoder.gru(decoder.embedding(tokens)[None])[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_draws_are_those_of_a_cpu(dtype: torch.dtype, some: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(300, 5893).to(dtype)
    places = torch.argsort(torch.randn(300, 5893), 1) if some else None
    randoms = torch.tensor([5, 1 << 40, 0]), torch.tensor([5, 1 << 40, 0], device="cuda")
    for _ in range(3):
        made = decode_ops.draw(scores, places, randoms[0], 0.9)
        found = decode_ops.draw(scores.cuda(), None if places is None else places.cuda(), randoms[1], 0.9).cpu()
        assert float((made == found).float().mean()) > 0.99  # logarithms differ in their last bits
    assert torch.equal(randoms[0], randoms[1].cpu())


@pytest.mark.parametrize("samples", [2, 40])
@pytest.mark.parametrize(
    "unit",
    [
        lambda: FactorGRU(40, 64, structure="kronecker"),
        lambda: FactorGRU(40, 64, 2, reset="before", batch_first=True),
        lambda: FactorGRUCell(40, 64, structure="blocks", blocks=4, input_structure="dense", learned_initial=True),
        lambda: nn.GRUCell(40, 64),
    ],
)
def test_other_units_and_heads(unit: Any, samples: int) -> None:
    torch.manual_seed(0)
    parts = nn.Embedding(144, 40), unit(), FactorLinear(64, 144)
    tokens = torch.randint(144, (samples,))
    moved = GRUDecoder(*copy.deepcopy(parts)).cuda()
    exact = GRUDecoder(*parts).double()
    made, behind = moved.step(tokens.cuda())
    right, wanted = exact.step(tokens)
    torch.testing.assert_close(behind.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    scores = exact.head(wanted if wanted.dim() == 2 else wanted[-1])
    torch.testing.assert_close(scores.gather(1, made.cpu()[:, None])[:, 0], scores.amax(1), rtol=1e-4, atol=1e-4)
    assert right.shape == made.shape


def test_modules_that_go_to_a_gpu_without_their_decoder() -> None:
    parts = nn.Embedding(20, 8), nn.GRU(8, 16), nn.Linear(16, 20)
    decoder = GRUDecoder(*parts, ("sample", 1.0), seed=1)
    tokens = torch.arange(4)
    wanted = decoder.generate(tokens, steps=4)[0]
    decoder.manual_seed(1)
    for part in parts:
        part.cuda()
    assert torch.equal(decoder.generate(tokens.cuda(), steps=4)[0].cpu(), wanted)


def test_other_devices_are_refused() -> None:
    parts, (tokens, state, _) = modules("seed", torch.float32, 2)
    decoder = GRUDecoder(*parts)  # type: ignore[arg-type]
    assert tokens is not None and state is not None
    with pytest.raises(TypeError, match="embedding and tokens should be on one device"):
        decoder.step(tokens.cpu(), state)
    with pytest.raises(TypeError, match="embedding and state should be on one device"):
        decoder.step(tokens, state.cpu())
    with pytest.raises(TypeError, match=r"embedding and head\.weight should be on one device"):
        GRUDecoder(parts[0], parts[1], nn.Linear(512, 5893)).step(tokens, state)  # type: ignore[arg-type]
