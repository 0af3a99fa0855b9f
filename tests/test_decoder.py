"""GRUDecoder on a CPU: its step against the definition in float64, every choice, what may change, what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from gru import one_step
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from factorlayer import CompileError, FactorGRU, FactorGRUCell, FactorLinear, GRUDecoder
from factorlayer.autograd import decode_ops, layer_ops
from factorlayer.maths import noise
from factorlayer.maths.decoder import MOST_SAMPLES, Decoder
from factorlayer.maths.noise import bits, gumbel

VOCABULARY, FEATURES, HIDDEN = 150, 6, 12
UNITS = {  # inputs, and whether one op takes it
    "nn.GRU": (lambda x: nn.GRU(x, HIDDEN, 2), True),
    "nn.GRUCell": (lambda x: nn.GRUCell(x, HIDDEN, bias=False), True),
    "dense": (lambda x: FactorGRU(x, HIDDEN, 3, activation="silu", learned_initial=True, batch_first=True), True),
    "cell": (lambda x: FactorGRUCell(x, HIDDEN, learned_initial=True), True),
    "kronecker": (lambda x: FactorGRU(x, HIDDEN, structure="kronecker"), False),
    "inputs": (lambda x: FactorGRUCell(x, HIDDEN, input_structure="blocks", blocks=3), False),
    "before": (lambda x: FactorGRU(x, HIDDEN, 2, reset="before"), False),
    "norm": (lambda x: FactorGRUCell(x, HIDDEN, norm="layer"), False),
    "learned": (lambda x: FactorGRU(x, HIDDEN, activation=nn.PReLU()), False),
}
CHOICES = ["argmax", ("best", 7), ("sample", 0.6), ("sample", 0.6, 4)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def parts(unit: str = "nn.GRU", context: int = 0, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(1)
    made = nn.Embedding(VOCABULARY, FEATURES), UNITS[unit][0](FEATURES + context), nn.Linear(HIDDEN, VOCABULARY)
    for module in made:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.7)
    return [module.to(dtype) for module in made]


def inputs(decoder: GRUDecoder, samples: int) -> list[Tensor | None]:
    weight = decoder.embedding.weight
    tokens = torch.randint(VOCABULARY, (samples,))
    shape = (samples, HIDDEN) if decoder._is_cell else (decoder.layers, samples, HIDDEN)
    context = torch.randn(samples, decoder.context_size).to(weight) if decoder.context_size else None
    return [tokens, torch.randn(shape).to(weight), context]


def definition(modules: list[Any], tokens: Tensor, state: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores and the state, in float64, by matrices."""
    embedding, unit, head = (copy.deepcopy(module).double() for module in modules)
    if isinstance(unit, nn.GRU):
        unit = FactorGRU.from_gru(unit)
    if isinstance(unit, nn.GRUCell):
        unit = FactorGRUCell.from_gru(unit)
    layers = state.double().reshape(-1, len(tokens), HIDDEN)
    behind = torch.empty_like(layers)
    for sample, token in enumerate(tokens):
        x = embedding.weight[token]
        x = x if context is None else torch.cat([x, context[sample].double()])
        for layer, cell in enumerate(unit.cells):
            x = behind[layer, sample] = one_step(unit, cell.suffix, x, layers[layer, sample])
    return head(behind[-1]).detach(), behind.detach().reshape(state.shape)


@pytest.mark.parametrize("implementation", ["auto", "batched"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("choose", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_the_definitions(unit: str, choose: Any, dtype: torch.dtype, implementation: str) -> None:
    modules = parts(unit, 3, dtype)
    decoder = GRUDecoder(*modules, choose, seed=9, implementation=implementation)  # type: ignore[arg-type]
    decoder.random[1] = 1 << 33
    samples = 3
    given = inputs(decoder, samples)
    numbers = decoder.random.clone()
    *made, behind = decoder.step(*given)  # type: ignore[arg-type]
    tokens, state, context = given
    assert tokens is not None and state is not None
    scores, right = definition(modules, tokens, state, context)
    near = {"rtol": 20 * torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(behind.double(), right, **near)
    assert behind.dtype == dtype and behind.shape == state.shape and made[0].dtype == torch.int64
    if choose == "argmax":
        assert made[0].shape == (samples,)
        torch.testing.assert_close(scores.gather(1, made[0][:, None])[:, 0], scores.amax(1), **near)
    elif choose[0] == "best":
        best = scores.topk(choose[1]).values
        assert made[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(made[1].double(), best, **near)
        torch.testing.assert_close(scores.gather(1, made[0]), best, **near)
    else:
        added = gumbel(numbers, torch.arange(samples)[:, None], torch.arange(VOCABULARY), torch.float64)
        noisy = scores / choose[1] + added
        if len(choose) > 2 and dtype in DTYPES[:2]:
            noisy = noisy.masked_fill(scores < scores.topk(choose[2]).values[:, -1:], -torch.inf)
        if len(choose) == 2 or dtype in DTYPES[:2]:  # of rounded scores others may be the k best
            torch.testing.assert_close(noisy.gather(1, made[0][:, None])[:, 0], noisy.amax(1), **near)
        assert decoder.random.tolist() == [9, (1 << 33) + 1, 0]


@pytest.mark.parametrize("unit", UNITS)
def test_one_op_takes_what_it_says(unit: str) -> None:
    taken = UNITS[unit][1]
    decoder = GRUDecoder(*parts(unit), implementation="fused")
    given = inputs(decoder, 2)
    if taken:
        decoder.step(*given)  # type: ignore[arg-type]
        return
    with pytest.raises(RuntimeError, match="GRUDecoder: implementation='fused' cannot run: its "):
        decoder.step(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [0, 1, MOST_SAMPLES, MOST_SAMPLES + 1])
@pytest.mark.parametrize("choose", CHOICES, ids=str)
def test_any_number_of_samples(samples: int, choose: Any) -> None:
    """The op's own, and one more."""
    made = []
    for implementation in ("auto", "batched") if samples else ("auto",):
        decoder = GRUDecoder(*parts(), choose, seed=4, implementation=implementation)  # type: ignore[arg-type]
        torch.manual_seed(2)
        made.append(decoder.step(*inputs(decoder, samples)))  # type: ignore[arg-type]
        assert made[-1][0].shape[0] == samples and made[-1][-1].shape == (2, samples, HIDDEN)
    torch.testing.assert_close(made[0], made[-1])
    if samples > MOST_SAMPLES:
        decoder.implementation = "fused"
        with pytest.raises(RuntimeError, match="cannot run: it takes 16 samples at once, there are 17"):
            decoder.step(*inputs(decoder, samples))  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [300, 1100])  # sums of one piece, and of several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_by_any_number_of_threads_and_beside_any_samples(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(0)
    modules = nn.Embedding(900, 40), nn.GRU(40, hidden, 2), nn.Linear(hidden, 900)
    decoder = GRUDecoder(*(module.to(dtype) for module in modules), ("best", 5), implementation="fused")
    tokens, state = torch.randint(900, (8,)), torch.randn(2, 8, hidden).to(dtype)
    threads, made = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(decoder.step(tokens, state))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(other, made[0], strict=True))
    one = decoder.step(tokens[2:3], state[:, 2:3])
    assert torch.equal(one[0], made[0][0][2:3]) and torch.equal(one[2], made[0][2][:, 2:3])


@pytest.mark.parametrize("implementation", ["fused", "batched"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_what_is_no_number(implementation: Any, dtype: torch.dtype) -> None:
    modules = parts(dtype=dtype)
    head = modules[2]
    decoder = GRUDecoder(*modules, implementation=implementation)
    given = inputs(decoder, 2)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-torch.inf)
        assert decoder.step(*given)[0].tolist() == [0, 0]  # type: ignore[arg-type]
        head.bias[[70, 140]] = 1.5
        assert decoder.step(*given)[0].tolist() == [70, 70]  # type: ignore[arg-type]
        head.bias[[90, 145]] = torch.nan
        assert decoder.step(*given)[0].tolist() == [90, 90]  # type: ignore[arg-type]
        assert given[1] is not None
        given[1][:, 1] = torch.nan  # stays in its sample
        head.bias.zero_(), head.weight.normal_()
        made, behind = decoder.step(*given)  # type: ignore[arg-type]
    assert made[1] == 0 and bool(behind[:, 1].isnan().all()) and not bool(behind[:, 0].isnan().any())


# What may change between steps


@pytest.mark.parametrize("unit", ["nn.GRU", "cell", "kronecker"])
def test_changed_parameters_count_at_once(unit: str) -> None:
    """Those of an optimizer's step, of load_state_dict, of a parameter that is another one, and of another dtype."""
    modules = parts(unit)
    decoder = GRUDecoder(*modules, ("best", 3))
    given = inputs(decoder, 2)

    def check() -> None:
        tokens, state, context = given
        assert tokens is not None and state is not None
        scores, behind = definition(modules, tokens, state, context)
        made = decoder.step(*given)  # type: ignore[arg-type]
        torch.testing.assert_close(made[1:], (scores.topk(3).values, behind))

    check()
    optimizer = torch.optim.SGD(decoder.parameters(), 0.5)
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check()
    decoder.load_state_dict({name: value * 0.7 for name, value in decoder.state_dict().items()})
    check()
    modules[2].weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64))
    check()
    decoder.float(), decoder.double()
    check()


def test_hooks_and_parametrizations_are_called() -> None:
    modules = parts()
    decoder = GRUDecoder(*modules)
    given = inputs(decoder, 2)
    decoder.step(*given)  # type: ignore[arg-type]
    handle = modules[2].register_forward_hook(lambda module, x, y: -y)
    turned, _ = decoder.step(*given)  # type: ignore[arg-type]
    handle.remove()
    scores, _ = definition(modules, *given)  # type: ignore[arg-type]
    assert torch.equal(turned, scores.argmin(1))
    modules[2].forward = lambda x: -nn.Linear.forward(modules[2], x)  # as Accelerate wraps one module's own
    assert torch.equal(decoder.step(*given)[0], scores.argmin(1))  # type: ignore[arg-type]
    del modules[2].forward
    parametrizations.weight_norm(modules[2])
    with torch.no_grad():
        modules[2].parametrizations.weight.original0.mul_(-1)
        modules[2].bias.mul_(-1)
    assert torch.equal(decoder.step(*given)[0], scores.argmin(1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="implementation='fused' cannot run: its modules should be"):
        GRUDecoder(*modules, implementation="fused").step(*given)  # type: ignore[arg-type]


def test_its_modules_stay() -> None:
    """Another one in the place of one that the decoder has looked at is refused, or called."""
    modules = parts()
    decoder = GRUDecoder(*modules)
    with pytest.raises(AttributeError, match="GRUDecoder: head is looked at when the decoder is built"):
        decoder.head = nn.Linear(HIDDEN, VOCABULARY)
    with pytest.raises(AttributeError, match="GRUDecoder: choose is looked at when the decoder is built"):
        decoder.choose = ("best", 2)

    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    given = inputs(decoder, 2)
    decoder.step(*given), decoder.step(*given)  # type: ignore[arg-type]
    decoder._modules["head"] = turned = Turned(HIDDEN, VOCABULARY, dtype=torch.float64)
    scores, _ = definition([*modules[:2], turned], *given)  # type: ignore[arg-type]
    assert torch.equal(decoder.step(*given)[0], scores.argmax(1))  # type: ignore[arg-type]


def test_an_embedding_that_is_the_head() -> None:
    embedding, gru, head = nn.Embedding(20, 12), nn.GRU(12, 12), nn.Linear(12, 20, bias=False)
    head.weight = embedding.weight
    decoder = GRUDecoder(embedding, gru, head, implementation="fused")
    tokens, state = torch.arange(4), torch.randn(1, 4, 12)
    made, behind = decoder.step(tokens, state)
    torch.testing.assert_close(behind, gru(embedding(tokens)[None], state)[1])
    assert torch.equal(made, (behind[0] @ embedding.weight.t()).argmax(1))


def test_a_structured_head() -> None:
    embedding, gru, _ = parts(dtype=torch.float32)
    head = FactorLinear(HIDDEN, VOCABULARY, activation="silu")
    decoder = GRUDecoder(embedding, gru, head)
    tokens, state, _ = inputs(decoder, 4)
    assert tokens is not None and state is not None
    made, _ = decoder.step(tokens, state)
    assert torch.equal(made, head(gru(embedding(tokens)[None], state)[1][-1]).argmax(1))
    with pytest.raises(RuntimeError, match="its modules should be"):
        GRUDecoder(embedding, gru, head, implementation="fused").step(tokens, state)


# Several steps


@pytest.mark.parametrize("choose", ["argmax", ("sample", 1.5)], ids=str)
def test_generate(choose: Any) -> None:
    decoder = GRUDecoder(*parts("dense", 2), choose, seed=5)
    tokens, _, context = inputs(decoder, 3)
    assert tokens is not None
    made, behind = decoder.generate(tokens, steps=6, context=context)
    decoder.manual_seed(5)
    state, given = None, tokens
    for step in range(6):
        given, state = decoder.step(given, state, context)
        assert torch.equal(made[:, step], given)
    assert state is not None and torch.equal(behind, state)
    decoder.manual_seed(5)
    end = int(made[0, 1])
    ended, _ = decoder.generate(tokens, steps=6, end=end, context=context)
    for row, whole in zip(ended.tolist(), made.tolist(), strict=True):
        at = whole.index(end) if end in whole else 6
        assert row == whole[: at + 1] + [end] * (5 - at)
    nothing, begun = decoder.generate(tokens, steps=0, context=context)
    assert nothing.shape == (3, 0) and begun.shape == behind.shape


def test_a_cpu_ends_when_all_samples_have(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = parts()
    with torch.no_grad():
        modules[2].bias[4] = 1e9
    decoder, calls = GRUDecoder(*modules), []
    monkeypatch.setattr(decoder, "step", lambda *given: calls.append(1) or GRUDecoder.step(decoder, *given))
    made, _ = decoder.generate(torch.tensor([1, 2]), steps=50, end=4)
    assert len(calls) == 1 and made.tolist() == [[4] * 50] * 2


def test_draws_are_as_often_as_a_softmax_says() -> None:
    """Of 4,000 draws of 4 tokens, within 4 standard deviations."""
    embedding, gru, head = nn.Embedding(4, 2), nn.GRU(2, 3), nn.Linear(3, 4)
    with torch.no_grad():
        head.weight.zero_(), head.bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    decoder = GRUDecoder(embedding, gru, head, ("sample", 0.8), seed=0)
    tokens = torch.cat([decoder.step(torch.zeros(16, dtype=torch.int64))[0] for _ in range(250)])
    share = torch.bincount(tokens, minlength=4) / 4000
    wanted = torch.softmax(head.bias.detach() / 0.8, 0)
    assert bool(((share - wanted).abs() < 4 * (wanted * (1 - wanted) / 4000).sqrt()).all())


def test_seeds() -> None:
    modules = parts()
    tokens = torch.arange(8)

    def drawn(decoder: GRUDecoder) -> Tensor:
        return decoder.generate(tokens, steps=8)[0]

    torch.manual_seed(3)
    first = drawn(GRUDecoder(*modules, ("sample", 2.0)))
    second = drawn(GRUDecoder(*modules, ("sample", 2.0)))
    torch.manual_seed(3)
    assert torch.equal(first, drawn(GRUDecoder(*modules, ("sample", 2.0)))) and not torch.equal(first, second)
    decoder = GRUDecoder(*modules, ("sample", 2.0), seed=(1 << 64) - 1)
    first = drawn(decoder)
    decoder.manual_seed(-1)  # the same bits
    assert torch.equal(first, drawn(decoder))
    for call in (lambda seed: GRUDecoder(*modules, seed=seed), decoder.manual_seed):
        with pytest.raises(TypeError, match=r"GRUDecoder: seed should be an integer, it is 1\.5"):
            call(1.5)
        with pytest.raises(ValueError, match=f"GRUDecoder: seed should be an integer of 64 bits, it is {1 << 64}"):
            call(1 << 64)


def test_noise_is_philox() -> None:
    """Known answers of Random123: counter and key of zeros, of ones, and of the digits of pi."""

    def word(value: int) -> Tensor:
        return torch.tensor(value if value < 1 << 63 else value - (1 << 64))

    for key, step, sample, token, right in (
        (0, 0, 0, 0, 0x6627E8D5),
        ((1 << 64) - 1, (1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF, 0x408F276D),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3, 0x243F6A88, 0xD16CFE09),
    ):
        assert int(bits(torch.stack([word(key), word(step)]), torch.tensor(sample), torch.tensor(token))) == right
    many = gumbel(torch.tensor([1, 2]), torch.arange(4)[:, None], torch.arange(50_000), torch.float32)
    assert bool(many.isfinite().all()) and abs(float(many.mean()) - 0.5772) < 0.02


# What PyTorch does with a module


@pytest.mark.feature("GRUDecoder: torch.no_grad, torch.inference_mode", result="works")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_there_is_no_gradient(mode: Any) -> None:
    decoder = GRUDecoder(*parts(), ("sample", 1.0))
    given = inputs(decoder, 2)
    with mode():
        made = decoder.step(*given)  # type: ignore[arg-type]
    assert not any(each.requires_grad for each in made)


@pytest.mark.parametrize("unit", ["nn.GRU", "kronecker"])
def test_autocast_changes_nothing(unit: str) -> None:
    decoder = GRUDecoder(*parts(unit, dtype=torch.float32))
    given = inputs(decoder, 2)
    wanted = decoder.step(*given)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(decoder.step(*given), wanted)  # type: ignore[arg-type]


@pytest.mark.feature("GRUDecoder: torch.compile as a whole graph", result="works")
@pytest.mark.parametrize("unit", ["dense", "cell", "kronecker"])
@pytest.mark.parametrize("choose", CHOICES, ids=str)
def test_compiles_as_a_whole(unit: str, choose: Any) -> None:
    decoder = GRUDecoder(*parts(unit, 2), choose, seed=6)
    given = inputs(decoder, 3)
    wanted = decoder.step(*given)  # type: ignore[arg-type]
    decoder.manual_seed(6)
    torch.compiler.reset()
    step = torch.compile(decoder.step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(*given), wanted)
    assert decoder.random[1] == (decoder._kind == "sample")


def test_compiled_before_any_step_it_says_nothing_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo warns of silent mistakes where it looks into a function that keeps what it returned."""
    torch.compiler.reset()
    said: list[str] = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda message, *_, **__: said.append(message))
    decoder = GRUDecoder(*parts("dense"))
    torch.compile(decoder.step, backend="eager", fullgraph=True)(*inputs(decoder, 3))
    assert said == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("choose", CHOICES, ids=str)
def test_traced_it_is_its_modules_own_calls(choose: Any) -> None:
    decoder = GRUDecoder(*parts("dense"), choose, seed=6)
    traced = torch.jit.trace(decoder, (*inputs(decoder, 3)[:2],), check_trace=False)
    given = inputs(decoder, 5)[:2]
    found = []
    for run in (traced, decoder.step):
        decoder.manual_seed(6)  # of both, which have one state
        found.append(run(*given))
    torch.testing.assert_close(*found)
    decoder.implementation = "fused"
    decoder._at_once.clear()
    with pytest.raises(RuntimeError, match=r"cannot run: torch\.jit\.trace takes numbers of samples for tensors"):
        torch.jit.trace(decoder, (*given,))


@pytest.mark.feature("GRUDecoder: copy.deepcopy and pickle", result="works")
def test_copies_and_pickle() -> None:
    decoder = GRUDecoder(*parts("dense"), ("sample", 1.0), seed=8)
    tokens = torch.arange(5)
    copies = [copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))]
    wanted = decoder.step(tokens)
    for each in copies:
        torch.testing.assert_close(each.step(tokens), wanted)
    assert "choose=('sample', 1.0)" in repr(decoder) and "random" not in decoder.state_dict()


def test_dropout_is_the_modules_own() -> None:
    gru = nn.GRU(FEATURES, HIDDEN, 2, dropout=0.9)
    decoder = GRUDecoder(nn.Embedding(VOCABULARY, FEATURES), gru, nn.Linear(HIDDEN, VOCABULARY))
    tokens, state = torch.arange(4), torch.randn(2, 4, HIDDEN)
    behind = [decoder.step(tokens, state)[1] for _ in range(2)]
    assert not torch.equal(*behind)
    decoder.eval()
    torch.testing.assert_close(decoder.step(tokens, state)[1], gru(decoder.embedding(tokens)[None], state)[1])


def test_what_pytorch_knows_of_the_op() -> None:
    for choose in CHOICES:
        decoder = GRUDecoder(*parts("nn.GRU", 3, torch.float32), choose, seed=1)
        tokens, state, context = inputs(decoder, 3)
        random = decoder.random if choose == CHOICES[2] else None
        tensors = [t.detach() for t in decoder._tensors() or []]
        text = decoder._text(2)
        given = tokens, state, context, tensors, random, 0.5, text
        torch.library.opcheck(torch.ops.factorlayer.decode.default, given)
    for places in (None, torch.tensor([[4, 1, 9]] * 2)):
        given = torch.randn(2, 3), places, torch.tensor([1, 2, 0]), 0.5
        torch.library.opcheck(torch.ops.factorlayer.draw.default, given)
    with FlopCounterMode(display=False) as counter:
        decoder.step(tokens, state, context)  # type: ignore[arg-type]
    units = 3 * HIDDEN * (FEATURES + 3 + HIDDEN) + 3 * HIDDEN * 2 * HIDDEN
    assert counter.get_total_flops() == 2 * 3 * (units + HIDDEN * VOCABULARY)


def test_a_kernel_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CompileError("no compiler", "", "", "")

    decoder = GRUDecoder(*parts())
    given = inputs(decoder, 2)
    wanted = decoder.step(*given)  # type: ignore[arg-type]
    decoder.implementation = "auto"  # which forgets that it has run
    monkeypatch.setattr(decode_ops, "decode", fail)
    with pytest.warns(RuntimeWarning, match="GRUDecoder runs its modules' own calls: no compiler"):
        torch.testing.assert_close(decoder.step(*given), wanted)  # type: ignore[arg-type]
    decoder.step(*given)  # type: ignore[arg-type] (without asking again)
    with pytest.raises(CompileError):
        GRUDecoder(*parts(), implementation="fused").step(*given)  # type: ignore[arg-type]


# What is refused


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: p.__setitem__(0, nn.Linear(3, 3)), TypeError, "embedding should be Embedding, it is Linear"),
        (lambda p: p.__setitem__(1, nn.LSTM(3, 3)), TypeError, "gru should be FactorGRU or .* it is LSTM"),
        (lambda p: p.__setitem__(2, nn.Identity()), TypeError, "head should be Linear or FactorLinear, it is Identity"),
        (lambda p: p.__setitem__(0, nn.Embedding(9, FEATURES, max_norm=1)), ValueError, "with max_norm changes"),
        (lambda p: p.__setitem__(1, nn.GRU(6, HIDDEN, bidirectional=True)), ValueError, "should go in one direction"),
        (lambda p: p.__setitem__(1, nn.GRU(5, HIDDEN)), ValueError, "embedding has features, 6, .* it has 5"),
        (lambda p: p.__setitem__(2, nn.Linear(7, 3)), ValueError, "features as inputs, 12, it has 7"),
    ],
)
def test_modules_that_do_not_go_together(change: Any, error: type[Exception], words: str) -> None:
    modules = parts()
    change(modules)
    with pytest.raises(error, match=f"GRUDecoder: .*{words}"):
        GRUDecoder(*modules)


@pytest.mark.parametrize(
    "choose",
    ["best", "argmin", ("best",), ("best", 0), ("best", 2.0), ("best", True), ("argmax", 1), (), 3, ("sample", 0),
     ("sample", -1.0), ("sample", 1.0, 0), ("sample", float("nan")), ("sample", "hot")],
    ids=str,
)  # fmt: skip
def test_choices_that_there_are_not(choose: Any) -> None:
    with pytest.raises(ValueError, match="GRUDecoder: choose should be"):
        GRUDecoder(*parts(), choose)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="k should be 150 at most, as the head has it; it is 151"):
        GRUDecoder(*parts(), ("best", 151))
    with pytest.raises(ValueError, match="GRUDecoder: implementation should be"):
        GRUDecoder(*parts(), implementation="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"generate: choose=\('best', 2\) has several tokens for one"):
        GRUDecoder(*parts(), ("best", 2)).generate(torch.tensor([1]))
    with pytest.raises(ValueError, match="generate: steps should be an integer"):
        GRUDecoder(*parts()).generate(torch.tensor([1]), steps=-1)


@pytest.mark.parametrize("unit", ["nn.GRU", "nn.GRUCell", "kronecker"])
@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        (
            0,
            torch.tensor(3),
            ValueError,
            r"tokens should be integers \[batch\], int64 or int32; torch.int64 of the shape",
        ),
        (0, torch.randn(2), ValueError, "torch.float32 of the shape"),
        (0, [1, 2], ValueError, "something of the type list came"),
        (
            0,
            torch.tensor([1, -1]),
            IndexError,
            "tokens should be from 0 to 149, as the embedding has them; there is -1",
        ),
        (0, torch.tensor([150, 1]), IndexError, "there is 150"),
        (0, torch.tensor([1, 2, 3]), ValueError, "state should have the shape"),
        (1, torch.randn(2, 13).double(), ValueError, "state should have the shape"),
        (1, torch.randn(1, 2, 2, 12).double(), ValueError, "state should have the shape"),
        (1, "state", ValueError, "state should have the shape .* something of the type str came"),
        (1, "float", TypeError, "one dtype, embedding is torch.float64 and state is torch.float32"),
        (2, None, ValueError, "has 3 inputs beside .* no context"),
        (2, torch.randn(2, 4).double(), ValueError, r"context should have the shape \(2, 3\)"),
        (2, torch.randn(2, 3), TypeError, "one dtype, embedding is torch.float64 and context is torch.float32"),
    ],
)
def test_wrong_inputs(unit: str, name: int, given: Any, error: type[Exception], words: str) -> None:
    """Before and behind a step that was right."""
    decoder = GRUDecoder(*parts(unit, 3))
    right = inputs(decoder, 2)
    wrong: list[Any] = list(right)
    wrong[name] = right[1].float() if given == "float" else given  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(error, match=f"GRUDecoder: .*{words}"):
            decoder.step(*wrong)
        decoder.step(*right)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", [lambda: nn.GRU(FEATURES, HIDDEN), lambda: nn.GRUCell(FEATURES, HIDDEN)])
def test_an_axis_of_layers_belongs_to_the_unit(unit: Any) -> None:
    """Where there is one layer, a state with it and one without have as many numbers."""
    gru = unit()
    decoder = GRUDecoder(nn.Embedding(VOCABULARY, FEATURES), gru, nn.Linear(HIDDEN, VOCABULARY))
    tokens, state = torch.arange(3), torch.randn(3, HIDDEN)
    right, wrong = (state, state[None]) if isinstance(gru, nn.GRUCell) else (state[None], state)
    for _ in range(2):
        assert decoder.step(tokens, right)[1].shape == right.shape
        with pytest.raises(ValueError, match="GRUDecoder: state should have the shape"):
            decoder.step(tokens, wrong)


def test_int32_and_strides() -> None:
    decoder = GRUDecoder(*parts("nn.GRU", 3))
    tokens, state, context = inputs(decoder, 3)
    assert tokens is not None and state is not None and context is not None
    wanted = decoder.step(tokens, state, context)
    strided = state.transpose(0, 2).contiguous().transpose(0, 2), context.t().contiguous().t()
    torch.testing.assert_close(decoder.step(tokens.int(), *strided), wanted)


def test_the_op_refuses_what_would_leave_its_memory() -> None:
    """Its text and tensors come from anyone."""
    decoder = GRUDecoder(*parts("nn.GRU", 3, torch.float32), ("sample", 1.0))
    tokens, state, context = inputs(decoder, 3)
    tensors = [t.detach() for t in decoder._tensors() or []]
    text, random = decoder._text(2), torch.zeros(3, dtype=torch.int64)
    assert tokens is not None and state is not None and context is not None
    right = [tokens, state, context, tensors, random, 1.0, text]
    op = torch.ops.factorlayer.decode
    op(*right)
    for place, wrong in (
        (0, torch.tensor([0, 1, VOCABULARY])),
        (0, tokens.int()),
        (0, torch.zeros(5, dtype=torch.int64)),
        (1, state[:1]),
        (1, state.double()),
        (2, None),
        (2, context[:, :2]),
        (3, tensors[:-1]),
        (3, [*tensors[:3], tensors[4], tensors[3], *tensors[5:]]),
        (3, [tensors[0].t(), *tensors[1:]]),
        (3, [tensors[0], tensors[1].double(), *tensors[2:]]),
        (4, None),
        (4, torch.zeros(6, dtype=torch.int64)[::2]),
        (4, torch.zeros(3)),
        (6, text.replace("drawn", "best")),
        (6, text.replace("decode 6 3 150", "decode 6 3 151")),
        (6, text.replace(" 4 drawn", " 17 drawn")),
        (6, text.replace(" 4 drawn", " 4 drawn biased")),
        (6, text.replace("decode ", "decode  ")),
        (6, text.replace("decode 6", "decode 06")),
        (6, text.replace("gru after", "gru after reversed")),
        (6, text.replace("gru after", "gru before").replace("; bias", "")),
        (6, "decode 6 3 150 2 4 drawn biased"),
    ):
        given: list[Any] = list(right)
        given[place] = wrong
        with pytest.raises((RuntimeError, ValueError), match="factorlayer"):
            op(*given)

    scores, places = torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    draw = torch.ops.factorlayer.draw
    assert draw(scores, places, random, 1.0).tolist() == [0, 0]
    for wrong in (
        (scores[0], None, random),
        (scores[:, :0], None, random),
        (scores.long(), None, random),
        (scores, places[:1], random),
        (scores, places.int(), random),
        (scores, None, random[:2]),
    ):
        with pytest.raises(RuntimeError, match="factorlayer"):
            draw(*wrong, 1.0)


@pytest.mark.skipif(layer_ops.decode_at_once is layer_ops.not_at_once, reason="this PyTorch has no such calls")
@pytest.mark.parametrize("choose", CHOICES[:3], ids=str)
def test_past_the_dispatcher(choose: Any) -> None:
    """The same as the op, or nothing where something is not as kernels read it."""
    decoder = GRUDecoder(*parts("nn.GRU", 3, torch.float32), choose, seed=2)
    tokens, state, context = inputs(decoder, 3)
    assert tokens is not None and state is not None and context is not None
    random = decoder.random if choose == CHOICES[2] else None
    tensors, text = decoder._tensors(), decoder._text(2)
    assert tensors is not None
    right: list[Any] = [text, tokens, state, context, random, tensors, 0.6]
    made = layer_ops.decode_at_once(*right)
    assert made is not None
    decoder.manual_seed(2)
    detached = [t.detach() for t in tensors]
    wanted = torch.ops.factorlayer.decode(tokens, state, context, detached, random, 0.6, text)
    assert torch.equal(made[0], wanted[0]) and torch.equal(made[1], wanted[1])
    for place, wrong in (
        (0, text.replace("decode 6 3 150", "decode 6 3 151")),
        (0, "decode"),
        (1, torch.tensor([0, 1, VOCABULARY])),
        (1, tokens.int()),
        (1, tokens[:2]),
        (1, tokens.expand(2, 3)),
        (2, state.double()),
        (2, state.transpose(0, 2).contiguous().transpose(0, 2)),
        (2, state[:1]),
        (3, None),
        (3, context[:, :2]),
        (4, None if random is not None else torch.zeros(3, dtype=torch.int64)),
        (4, torch.zeros(2, dtype=torch.int64)),
        (5, tensors[:-1]),
        (5, (*tensors[:3], tensors[4], tensors[3], *tensors[5:])),
        (5, (tensors[0].t(), *tensors[1:])),
        (5, (tensors[0], tensors[1].double(), *tensors[2:])),
    ):
        given = list(right)
        given[place] = wrong
        assert layer_ops.decode_at_once(*given) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_draws_of_any_number_of_samples(dtype: torch.dtype, some: bool) -> None:
    """By one op as by the definition."""
    torch.manual_seed(0)
    scores = torch.randn(40, 30).to(dtype)
    places = torch.argsort(torch.randn(40, 30), 1) + 1000 if some else None
    randoms = [torch.tensor([5, 1 << 40, 0]) for _ in range(2)]
    made = [decode_ops.draw(scores, places, randoms[0], 0.9) for _ in range(3)]
    wanted = [noise.draw(scores, places, randoms[1], 0.9) for _ in range(3)]
    assert torch.equal(torch.stack(made), torch.stack(wanted)) and torch.equal(*randoms)
    assert not torch.equal(made[0], made[1])


@pytest.mark.parametrize("choose", CHOICES[2:], ids=str)
def test_warmup_draws_nothing(choose: Any) -> None:
    decoder = GRUDecoder(*parts("cell", 2), choose, seed=3)
    decoder.warmup(4)
    assert decoder.random.tolist() == [3, 0, 0]


def test_texts() -> None:
    text = "decode 6 3 150 2 4 drawn biased; gru after; tied 0 1 12 12 1; bias; tanh"
    assert Decoder.parse(text).text == text
    for wrong in ("decode 6 3 150 2 4; gru after", text.replace("drawn", "thrown"), text.replace("after", "before")):
        with pytest.raises(ValueError, match=r"decoder|recurrence|chain"):
            Decoder.parse(wrong)
