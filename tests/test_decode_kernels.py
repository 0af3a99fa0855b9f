"""Kernels of a decoder's step on the emulator: against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from test_recurrent_kernels import NEAR, TORCH, dense, run, written
from torch import Tensor

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.decode import decode_choice, decode_draw, decode_few, decode_step
from factorlayer.maths.decoder import Decoder, Made
from factorlayer.maths.noise import gumbel
from factorlayer.maths.recurrence import GATES, Recurrence
from factorlayer.plan.planner import plan_of

if TYPE_CHECKING:
    from emulator.driver import Emulator

GPU = replace(Gpu.of(90), sms=3)  # so that blocks have several rows, and there are several
ROWS = 9  # of the embedding
TEMPERATURE = 0.75
RANDOM = [1234567890123456789, (5 << 32) + 77, 0]


@dataclass(frozen=True)
class Case:
    dtype: str
    embedding: int
    context: int
    hidden: int
    vocabulary: int
    batch: int
    samples: int
    made: Made = "best"
    biased: bool = True
    layer: int = 0
    activation: str = "tanh"

    def __str__(self) -> str:
        sizes = "-".join(map(str, (self.embedding, self.context, self.hidden, self.vocabulary, self.batch)))
        return f"{self.dtype}-{sizes}-{self.made}" + f"-layer{self.layer}" * bool(self.layer)

    @property
    def decoder(self) -> Decoder:
        chain = replace(dense(self.hidden), bias=self.biased, activation=self.activation)
        sizes = self.embedding, self.context, self.vocabulary, 1 + self.layer, self.samples
        return Decoder(Recurrence(chain), *sizes, self.made, self.biased)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
        return (made * scale).to(TORCH[self.dtype])


CASES = [
    Case("float32", 12, 0, 20, 37, 1, 1),
    Case("bfloat16", 8, 3, 24, 150, 3, 4, "drawn"),
    Case("float64", 5, 2, 7, 11, 2, 2, biased=False),
    Case("float16", 7, 0, 13, 30, 9, 16, "scores"),
    Case("float32", 8, 0, 80, 600, 16, 16, "best", layer=1, activation="silu"),
]


def step_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Tokens, of which one is not there, embedding, context, state, and the layers' weights and biases."""
    decoder, layers = case.decoder, []
    for layer in range(decoder.layers):
        inputs = decoder.features_in(layer)
        layers.append(case.random(GATES * case.hidden, inputs, scale=inputs**-0.5))
        layers.append(case.random(GATES * case.hidden, case.hidden, scale=case.hidden**-0.5))
        layers += [case.random(GATES * case.hidden), case.random(GATES * case.hidden).flip(0)]
    tokens = torch.arange(case.batch) * 5 % ROWS
    if case.batch > 2:
        tokens[-1] = ROWS
    state = case.random(decoder.layers, case.batch, case.hidden)
    return tokens, case.random(ROWS, case.embedding), case.random(case.batch, max(1, case.context)), state, layers


def cell(case: Case, x: Tensor, h: Tensor, weights: list[Tensor]) -> Tensor:
    w, u, b, c = (weight.double() for weight in weights)
    b, c = (b, c) if case.biased else (b * 0, c * 0)
    (xr, xz, xn), (hr, hz, hn) = (F.linear(x, w, b).chunk(GATES, 1), F.linear(h, u, c).chunk(GATES, 1))
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = (torch.tanh if case.activation == "tanh" else F.silu)(xn + r * hn)
    return (1 - z) * n + z * h


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step(case: Case, emulator: Emulator) -> None:
    tokens, embedding, context, state, layers = step_inputs(case)
    decoder, dtype = case.decoder, TORCH[case.dtype]
    planned = decode_step.tile(decoder, case.layer, case.dtype, 16, GPU)
    assert planned is not None
    places = [embedding, ROWS, context if case.context else 0, state, 0, 0, 0, *layers]
    weights = layers[4 * case.layer : 4 * case.layer + 4]
    before = case.random(case.batch, case.hidden).double().tanh()  # what the layer before has made
    if case.layer:
        x = before.to(dtype).double()
    else:
        there = tokens.clamp(max=ROWS - 1)
        x = torch.cat([embedding[there].double(), context.double()[:, : case.context]], 1)
        x[tokens >= ROWS] = torch.nan
    wanted = cell(case, x, state[case.layer].double(), weights)
    shape = tuple(state.shape)
    held = torch.cat([before.to(dtype)[None]] * case.layer + [torch.zeros_like(state[:1])])
    left = 4 if case.layer == 0 else 0  # bytes of the counter
    made = [
        run(emulator, planned, case.batch, tokens, None, places, [(shape, dtype), ((4,), torch.int32)], seed,
            before=[held, torch.full((4,), 7, dtype=torch.int32)],
            unwritten=state[: case.layer].numel() * state.element_size() + 16 - left)
        for seed in (1, 2)
    ]  # fmt: skip
    got, counter = made[0]
    torch.testing.assert_close(
        got[case.layer].double(), wanted, rtol=NEAR[case.dtype], atol=NEAR[case.dtype], equal_nan=True
    )
    assert counter.tolist() == [0 if case.layer == 0 else 7, 7, 7, 7]
    assert torch.equal(got.view(torch.uint8), made[1][0].view(torch.uint8)), "not the same in any order"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("special", [False, True], ids=["", "special"])
def test_a_choice(case: Case, special: bool, emulator: Emulator) -> None:
    decoder, dtype = case.decoder, TORCH[case.dtype]
    planned = decode_choice.tile(decoder, case.dtype, 16, GPU)
    assert planned is not None
    head, bias = case.random(case.vocabulary, case.hidden), case.random(case.vocabulary)
    state = case.random(decoder.layers, case.batch, case.hidden)
    if special:  # all alike; one that is no number; none that is finite
        head[:] = head[0].clone()
        bias[:] = -torch.inf if case.batch < 2 else 0
        state[-1, 1:2] = torch.nan
    numbers = torch.tensor(RANDOM)
    scores = state[-1].double() @ head.double().t() + (bias.double() if case.biased else 0)
    samples, tokens = torch.arange(case.batch)[:, None], torch.arange(case.vocabulary)
    noisy = scores / TEMPERATURE + gumbel(numbers, samples, tokens, torch.float64)
    sums = torch.float64 if case.dtype == "float64" else torch.float32
    shape = (case.batch, case.vocabulary)
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = [(tuple(state.shape), dtype)]
    chooses, draws = case.made != "scores", case.made == "drawn"
    outputs += [((case.batch,), torch.int64)] if chooses else [(shape, sums)]
    outputs.append(((3,), torch.int64))
    sum_bytes = planned.scratch[2]
    outputs.append(((sum_bytes,), torch.uint8))
    held = [state, torch.zeros(outputs[1][0], dtype=outputs[1][1]), numbers]
    held.append(torch.zeros(sum_bytes, dtype=torch.uint8))
    unwritten = written(state)
    bits = int(torch.tensor(TEMPERATURE, dtype=torch.float64).view(torch.int64))
    layers = [0] * (4 * decoder.layers)
    places = [0, 0, 0, 0, head, bias if case.biased else 0, bits, *layers]
    # The state, the seed, and the counter
    left = len(unwritten) + (16 if draws else 24) + (16 if chooses else sum_bytes)
    made = run(emulator, planned, case.batch, torch.zeros(1), None, places, outputs, 3, before=held, unwritten=left)
    assert made[2].tolist() == [numbers[0], numbers[1] + draws, 0]
    near = {"rtol": NEAR[case.dtype], "atol": NEAR[case.dtype], "equal_nan": True}
    if not chooses:
        torch.testing.assert_close(made[1].double(), scores, **near)
        return
    right = noisy if draws else scores
    got = made[1]
    if special and not draws:  # the first of equals, though a library's sums of equal rows may differ
        assert not got.any()
    taken = right.gather(1, got[:, None])[:, 0]
    torch.testing.assert_close(taken, right.amax(1), **near)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("placed", [False, True], ids=["all", "some"])
def test_a_draw(dtype: str, placed: bool, emulator: Emulator) -> None:
    """Twice, so that the counter is zero again."""
    planned = decode_draw.tile(placed, dtype, 16, GPU)
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 1300, generator=rng).to(TORCH[dtype])
    scores[3, 7:9] = torch.nan
    tokens = torch.arange(1300).expand(5, -1) * (3 if placed else 1)
    bits = int(torch.tensor(TEMPERATURE, dtype=torch.float64).view(torch.int64))
    held = torch.tensor(RANDOM)
    for step in range(2):
        places = [bits, 1300, tokens if placed else 0]
        outputs: list[tuple[tuple[int, ...], torch.dtype]] = [((5,), torch.int64), ((3,), torch.int64)]
        before = [torch.zeros(5, dtype=torch.int64), held]
        made, held = run(emulator, planned, 5, scores, None, places, outputs, 3, before=before, unwritten=8 + 4)
        assert held.tolist() == [RANDOM[0], RANDOM[1] + step + 1, 0]
        numbers = torch.tensor([RANDOM[0], RANDOM[1] + step, 0])
        noisy = scores.double() / TEMPERATURE + gumbel(numbers, torch.arange(5)[:, None], tokens, torch.float64)
        at = made // 3 if placed else made
        assert at[3] == 7
        taken = noisy.gather(1, at[:, None])[:, 0]
        torch.testing.assert_close(taken, noisy.amax(1), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_few_best(dtype: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal ones, some that are no number, and some that are not finite."""
    planned = decode_few.tile(dtype, 16, GPU)
    monkeypatch.setattr(decode_few, "HELD", 1)  # of two or three that a thread has
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 2100, generator=rng).to(TORCH[dtype])
    scores[1] = (scores[1] * 2).round()
    scores[2, [5, 1029, 700]] = torch.nan
    scores[3] = -torch.inf
    scores[3, 2000:2003] = torch.tensor([1.0, torch.inf, 1.0])
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = [((4, 9), TORCH[dtype]), ((4, 9), torch.int64)]
    best, tokens = run(emulator, planned, 4, scores, None, [2100, 9], outputs, 3)
    ranks = torch.where(scores.isnan(), torch.inf, scores)
    order = (~scores.isnan()).sort(dim=1, stable=True).indices  # NaN first, then by score, and of equal ones the first
    rest = ranks.gather(1, order).masked_fill(scores.gather(1, order).isnan(), torch.finfo(TORCH[dtype]).max)
    rest[3] = ranks[3]
    right = order.gather(1, rest.sort(dim=1, descending=True, stable=True).indices)[:, :9]
    assert torch.equal(tokens, right)
    torch.testing.assert_close(best, scores.gather(1, right), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_planner_has_a_plan(case: Case) -> None:
    kinds = [type(p) for p in plan_of(case.decoder.text, case.dtype, 0, GPU).passes]
    assert kinds == [decode_step.DecodeStep] * case.decoder.layers + [decode_choice.DecodeChoice]
