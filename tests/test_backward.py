"""autograd/backward.py: gradients as chains, by the raw ops; and the plans of what it asks for."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import AWKWARD_SPECS, SMALL_SPECS, kronecker, monarch, spec_id
from test_expression import Snake
from test_plan import LARGEST_GRID_Y, dtypes, read_text
from torch import Tensor, nn

from benches.sweep import drawn
from benches.workloads import ALL_DTYPES, Layer
from factorlayer.activations.named import activate, evaluate
from factorlayer.activations.results import from_result
from factorlayer.activations.tracing import trace
from factorlayer.autograd import runtime
from factorlayer.autograd.backward import (
    LEAST_MIXED,
    Ops,
    Visit,
    back_to_contractions,
    behind_texts,
    columns_texts,
    gradients,
    sums_text,
    texts,
    visits,
)
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import BATCHES, FEW, MOST_SOME, SOME, most_of_class
from factorlayer.kernels.chain_backward import ChainBackward
from factorlayer.kernels.gradient import SUM_BYTES, Gradient, Reduction
from factorlayer.kernels.kronecker.pair_cluster_backward import PairClusterBackward
from factorlayer.kernels.kronecker.pair_few_backward import PairFewBackward
from factorlayer.kernels.kronecker.warpgroups import Pair16Backward
from factorlayer.kernels.passes import class_us
from factorlayer.kernels.product.mapped_gradient import MappedGradient
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.weight_halves import WeightHalves
from factorlayer.kernels.product.whole_kronecker import KroneckerWeight
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.stack.dense_streamed import WeightChunks
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.plan.plan import PlanError
from factorlayer.plan.planner import has_plan, plan, plan_of


def turned(x: Tensor, outer: int, rows: int, columns: int) -> Tensor:
    return x.view(-1, outer, rows, columns).transpose(2, 3).reshape(len(x), -1)


def forward(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> Tensor:
    """What the raw op computes on a GPU; on a CPU it turns nothing."""
    chain = Chain.parse(text)
    if chain.contractions:
        c = chain.contractions[0]
        x = turned(x, c.outer, c.inner, c.p) if chain.x_turned else x
        x = torch.ops.factorlayer.forward(x, weights, bias, replace(chain, x_turned=False, turn=None, slabs=0).text)
        x = by_slabs(x) if chain.slabs else x
    if chain.mixed:
        _, rows, columns = chain.mixed
        x = x.view(len(x), rows, columns, -1).transpose(1, 2).reshape(x.shape)
    return turned(x, *chain.turn) if chain.turn else x


def by_slabs(rows: Tensor, back: bool = False) -> Tensor:
    """[samples, features] as [samples / 32, features, 32], in as many rows, or from that."""
    between = (-1, rows.shape[1], 32) if back else (-1, 32, rows.shape[1])
    return rows.view(between).transpose(1, 2).reshape(rows.shape)


def nothing(chain: Chain) -> bool:
    return False


def pairs(chain: Chain) -> bool:
    return len(chain.contractions) == 2


def anything(chain: Chain) -> bool:
    return True


def slabs(chain: Chain) -> bool:
    return chain.slabs > 0


def last_by_slabs(chain: Chain) -> bool:
    """And the one before is none of those."""
    return chain.slabs > 0 and chain.contractions[0].inner > 1 and chain.backward


def first_by_slabs(chain: Chain) -> bool:
    """Behind a product."""
    return chain.slabs > 0 and (not chain.backward or chain.contractions[0].inner == 1)


def sums(chain: Chain) -> bool:
    return chain.gradient


def products(chain: Chain) -> bool:
    return chain.through > 0


def weight_gradient(grad: Tensor, x: Tensor, text: str) -> Tensor:
    """What the raw op computes on a GPU."""
    chain = Chain.parse(text)
    if chain.sums:
        assert grad is x
        return grad.sum(0)
    assert chain.gradient
    (c,) = chain.contractions
    if chain.x_turned:
        grad, x = turned(grad, c.outer, c.inner, c.q), turned(x, c.outer, c.inner, c.p)
    behind, before = grad.view(-1, c.outer, c.q, c.inner), x.view(-1, c.outer, c.p, c.inner)
    made = torch.einsum("noqi,nopi->qp" if c.tied else "noqi,nopi->oiqp", behind, before).reshape(-1, c.p)
    if chain.mixed:
        outer, rows, columns = chain.mixed
        made = made.view(outer, columns, rows, -1).transpose(1, 2).reshape(made.shape)
    return torch.cat([made.view(-1), grad.sum(0)])[None] if chain.bias else made


def all_gradients(grad: Tensor, x: Tensor, weights: Sequence[Tensor], text: str, wanted: int) -> list[Tensor]:
    """What the raw op computes on a GPU."""
    chain = Chain.parse(text)
    assert chain.backward
    bias = wanted & 2 > 0
    given = grad[0] if bias else None
    (c, *more) = chain.contractions
    grad = by_slabs(grad, back=True) if chain.slabs else grad
    if chain.x_turned:
        assert not more
        x = turned(x, c.outer, c.inner, c.p)
        grad = grad if chain.slabs else turned(grad, c.outer, c.inner, c.q)
    elif chain.mixed:
        outer, rows, columns = chain.mixed
        grad = turned(grad, outer, columns, rows)
    plain = replace(chain, backward=False, bias=bias, x_turned=False, turn=None, mixed=None, slabs=0)
    made = gradients(replace(OPS, fits=nothing), grad, x, weights, given, plain.text, all_of(weights) | 2 * bias)
    made[0] = turned(made[0], *chain.turn) if chain.turn else made[0]
    made[0] = by_slabs(made[0]) if chain.slabs > 1 else made[0]
    return made[~wanted & 1 :]


def all_of(weights: Sequence[Tensor]) -> int:
    """But for a bias."""
    return (1 << (len(weights) + 2)) - 3


def slopes(beside: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> Tensor:
    """What the raw op computes on a GPU."""
    chain = Chain.parse(text)
    assert (chain.slope or chain.through) == beside.shape[1] and not (chain.slope and chain.through)
    before = replace(chain, activation="identity", slope=0, through=0)
    z = forward(x, weights, bias, before.text) if chain.contractions else x
    if chain.through:
        slope = from_result(chain.activation)
        assert slope is not None
        return z * evaluate(slope, beside)
    made: Tensor = torch.func.vjp(lambda z: activate(chain.activation, z), z)[1](beside)[0]
    return turned(made, *chain.turn) if chain.turn else made


def slopes_and_sums(
    beside: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str
) -> tuple[Tensor, Tensor]:
    chain = Chain.parse(text)
    assert chain.sums == beside.shape[1] and (chain.slope or (chain.turn and beside is x))
    made = slopes(beside, x, weights, bias, replace(chain, sums=0, turn=None).text) if chain.slope else x
    return turned(made, *chain.turn) if chain.turn else made, made.sum(0)


OPS = Ops(forward, weight_gradient, all_gradients, slopes, slopes_and_sums)
LEARNED = trace(nn.Sequential(nn.PReLU(), Snake()))[0].program  # two parameters
activations = pytest.mark.parametrize("activation", ["identity", "gelu", LEARNED], ids=["identity", "gelu", "learned"])


MIXED = monarch((3, 9), (8, 2), rank=8)


@pytest.mark.parametrize("fits", [nothing, pairs, anything, sums])
@activations
@pytest.mark.parametrize("spec", [*SMALL_SPECS, kronecker((3, 4, 2), (2, 5, 3), rank=2), MIXED], ids=spec_id)
def test_gradients_are_those_of_autograd(spec: LayerSpec, activation: str, fits: Callable[[Chain], bool]) -> None:
    """All of them, all but one, and any one alone."""
    torch.manual_seed(0)
    chain, count = Chain.of(spec, True, activation), len(spec.weight_shapes)
    samples = LEAST_MIXED if spec is MIXED else 5
    leaves = [torch.randn(samples, spec.in_features), torch.randn(spec.out_features)]
    leaves += [*map(torch.randn, spec.weight_shapes)]
    leaves += [torch.rand([1] * i) + 0.5 for i in range(chain.parameters)]  # of any number of dimensions
    x, bias, *weights = (leaf.double().requires_grad_() for leaf in leaves)
    y = activate(activation, naive(spec, x, weights[:count]) + bias, weights[count:])
    grad_y = torch.randn_like(y)
    right = torch.autograd.grad(y, (x, bias, *weights), grad_y)
    text = chain.text
    everything, ones = (1 << len(right)) - 1, [1 << bit for bit in range(len(right))]
    for wanted in [everything, *(everything - one for one in ones), *ones, 0]:
        with torch.no_grad():
            found = gradients(replace(OPS, fits=fits), grad_y, x, weights, bias, text, wanted)
        expected = [g for bit, g in enumerate(right) if wanted >> bit & 1]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)  # and of one shape


@pytest.mark.parametrize(
    ("fits", "together"),
    [(slabs, ["slabs 1", "slabs 2"]), (last_by_slabs, ["turn 3 8 2; slabs 1"]), (first_by_slabs, ["slabs 1"])],
)
@pytest.mark.parametrize("samples", [128, 96])
def test_what_comes_back_lies_by_slabs(fits: Callable[[Chain], bool], together: list[str], samples: int) -> None:
    """Of whole units of samples, in tf32, where both gradients are wanted."""
    torch.manual_seed(0)
    chain, asked = replace(Chain.of(MIXED, False, "identity"), tf32=True), []

    def noted(*given: Any) -> list[Tensor]:
        asked.append(Chain.parse(given[3]))
        return all_gradients(*given)

    leaves = [torch.randn(samples, MIXED.in_features), *map(torch.randn, MIXED.weight_shapes)]
    x, *weights = (leaf.double().requires_grad_() for leaf in leaves)
    y = naive(MIXED, x, weights)
    grad_y = torch.randn_like(y)
    right = torch.autograd.grad(y, (x, *weights), grad_y)
    for wanted in (0b1101, 0b1100, 0b0101, 0b1001, 0b0001):
        asked.clear()
        with torch.no_grad():
            found = gradients(
                replace(OPS, fits=fits, all_gradients=noted), grad_y, x, weights, None, chain.text, wanted
            )
        expected = [g for bit, g in zip((1, 4, 8), right, strict=True) if wanted & bit]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
        ends = [each.text.split("backward; ")[1].removesuffix("; tf32") for each in reversed(asked)]
        assert wanted != 0b1101 or ends == (together if samples % 64 == 0 else [])
    assert not visits(chain.text.removesuffix("; tf32"), 0b1101, slabs, slabs=True)[0].slabs


@pytest.mark.parametrize("fits", [nothing, pairs, anything, sums, products])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    "spec", [kronecker((6,), (5,)), *SMALL_SPECS, kronecker((3, 4, 2), (2, 5, 3), rank=2)], ids=spec_id
)
def test_gradients_go_back_through_the_activation_before(
    spec: LayerSpec, bias: bool, fits: Callable[[Chain], bool]
) -> None:
    """That made x: in the kernel of the product where there is one, and but for x's all as they were."""
    torch.manual_seed(0)
    chain, ran = Chain.of(spec, bias, "identity"), []

    def noted(*given: Any) -> Tensor:
        ran.append(given[-1])
        return slopes(*given)

    z = torch.randn(5, spec.in_features, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in spec.weight_shapes]
    given = torch.randn(spec.out_features, dtype=torch.float64, requires_grad=True) if bias else None
    y = naive(spec, activate("elu", z), weights)
    y, leaves = (y, [z, *weights]) if given is None else (y + given, [z, given, *weights])
    grad_y = torch.randn_like(y)
    right = dict(zip([bit for bit in range(len(weights) + 2) if bias or bit != 1],
                     torch.autograd.grad(y, leaves, grad_y), strict=True))  # fmt: skip
    for wanted in [sum(1 << bit for bit in right), *(1 << bit for bit in right), *(1 | 1 << bit for bit in right)]:
        ran.clear()
        ops = replace(OPS, slopes=noted, fits=fits)
        with torch.no_grad():
            found = gradients(ops, grad_y, activate("elu", z), weights, given, chain.text, wanted, "elu")
        expected = [g for bit, g in right.items() if wanted >> bit & 1]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
        alone = f"elu; through {spec.in_features}"
        with_product = chain.is_dense and (fits is products or (fits is anything and not wanted & 4))  # else at once
        back = f"tied 0 1 {spec.out_features} {spec.in_features} 1; {alone}"
        assert ran == [back if with_product else alone] * (wanted & 1)


@pytest.mark.parametrize(
    ("wanted", "fits", "expected"),
    [
        (0b00010, nothing, []),
        (0b00001, nothing, ["back 0 1 2"]),
        (0b00100, nothing, ["forward 2 1", "gradient 0"]),
        (0b10000, nothing, ["back 0 1", "gradient 2"]),
        (0b01001, nothing, ["forward 2", "back 0", "gradient 1", "back 1", "back 2"]),
        (
            0b11111,
            nothing,
            ["forward 2", "forward 1", "gradient 0", "back 0", "gradient 1", "back 1", "gradient 2", "back 2"],
        ),
        (0b11101, pairs, ["forward 2 1", "gradient 0", "back 0", "all 2 1"]),
        (0b11100, pairs, ["forward 2 1", "gradient 0", "back 0", "all 2 1"]),
        (0b01101, pairs, ["forward 2", "all 1 0", "back 2"]),
        (0b11001, pairs, ["back 0", "all 2 1"]),
        (0b11101, anything, ["all 2 1 0"]),
    ],
)
def test_nothing_is_computed_that_is_not_needed(
    wanted: int, fits: Callable[[Chain], bool], expected: list[str]
) -> None:
    """Of three factors: states up to the last weight's, and steps back to the first gradient."""
    spec = kronecker((2, 3, 4), (5, 6, 7))
    calls: list[str] = []

    def counted(what: str, op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Tensor) -> Tensor:
            chain = Chain.parse(next(str(each) for each in given if isinstance(each, str)))
            if not chain.contractions:  # a weight, turned
                return op(*given)
            forth = all((c.p, c.q) in zip(spec.in_factors, spec.out_factors, strict=True) for c in chain.contractions)
            modes = spec.in_factors if forth else spec.out_factors
            name = what if forth else "back"
            calls.append(" ".join([name, *(str(modes.index(c.p)) for c in chain.contractions)]))
            return op(*given)

        return run

    ops = Ops(
        *(counted(*each) for each in [("forward", forward), ("gradient", weight_gradient), ("all", all_gradients)]),
        slopes,
        slopes_and_sums,
        fits,
    )
    x, grad = (torch.randn(3, n, dtype=torch.float64) for n in (spec.in_features, spec.out_features))
    weights = [torch.randn(shape, dtype=torch.float64) for shape in spec.weight_shapes]
    bias = torch.zeros(spec.out_features, dtype=torch.float64)
    text = Chain.of(spec, True, "identity").text
    assert [int(word.split()[1]) for word in text.split(";")[:3]] == [2, 1, 0]
    gradients(ops, grad, x, weights, bias, text, wanted)
    assert calls == expected


def noting(ran: list[tuple[str, int]], fits: Callable[[Chain], bool]) -> Ops:
    """Operations that note the text of each kernel that they run, and its number of samples."""

    def noted(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Tensor) -> Tensor:
            ran.extend((each, len(given[0])) for each in given if isinstance(each, str))
            if given[-1] is True:  # the op makes a bias's gradient as well, by another kernel
                ran.append((sums_text(given[0].shape[1]), len(given[0])))
            return op(*given)

        return run

    return Ops(*map(noted, (forward, weight_gradient, all_gradients, slopes, slopes_and_sums)), fits)


@pytest.mark.parametrize("fits", [nothing, pairs, anything, sums])
@activations
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_what_is_to_be_compiled_is_what_runs(spec: LayerSpec, activation: str, fits: Callable[[Chain], bool]) -> None:
    chain = Chain.of(spec, True, activation)
    text = chain.text
    ran: list[tuple[str, int]] = []

    x, grad_y, bias = torch.randn(3, spec.in_features), torch.randn(3, spec.out_features), torch.ones(spec.out_features)
    weights = [*map(torch.randn, spec.weight_shapes), *[torch.ones(1)] * chain.parameters]
    ops = noting(ran, fits)
    for wanted in (all_of(weights) | 2, 0b101):
        ran.clear()
        gradients(ops, grad_y, x, weights, bias, text, wanted)
        assert texts(text, fits, len(x), wanted) == list(dict.fromkeys(ran))
    assert texts(text, fits, len(x)) == texts(text, fits, len(x), all_of(weights) | 2)


@pytest.mark.parametrize("back_us", [0.0, 1e9])
@pytest.mark.parametrize("fits", [nothing, pairs])
@pytest.mark.parametrize("wanted", [0b1, 0b10101, 0b11101])
def test_the_gradient_of_x_may_be_a_sum_of_the_terms(
    wanted: int, fits: Callable[[Chain], bool], back_us: float
) -> None:
    """Where all terms back are predicted to take longer; what is asked for is what runs, and the sum is right."""
    spec = replace(kronecker((4, 3, 2), (2, 3, 5)), rank=3)
    chain = Chain.of(spec, False, "identity")
    x, grad_y = torch.randn(3, 24).double(), torch.randn(3, 30).double()
    weights = [torch.randn(shape).double() for shape in spec.weight_shapes]
    ran: list[tuple[str, int]] = []

    def us(text: str) -> float:
        return back_us if text.startswith("rank 3") else 1.0

    ops = replace(noting(ran, fits), us=lambda _: us)
    made = gradients(ops, grad_y, x, weights, None, chain.text, wanted)
    assert texts(chain.text, fits, 3, wanted, ops.us) == list(dict.fromkeys(ran))
    assert any(text.startswith("rank 3") for text, _ in ran) == (wanted == 1 or not back_us)
    leaves = [t.requires_grad_() for t in (x, *weights)]
    right = torch.autograd.grad(naive(spec, x, weights), leaves, grad_y)
    kept = [t for bit, t in zip((1, 4, 8, 16), right, strict=True) if wanted & bit]
    torch.testing.assert_close(made, kept)


@pytest.mark.parametrize(("us_at_once", "us_apart"), [(2.0, 3.0), (3.0, 2.0), (math.inf, 2.0)])
def test_slopes_are_made_with_their_product_where_that_is_predicted_to_take_less(
    us_at_once: float, us_apart: float
) -> None:
    chain = Chain.of(kronecker((4, 3), (2, 5)), True, "gelu")
    before, slope = "tied 0 1 4 2 3; tied 1 2 3 5 1; bias", "gelu; slope 10"
    predicted = {f"{before}; {slope}": us_at_once, before: us_apart / 2, slope: us_apart / 2}
    found = behind_texts(chain.text, False, None, anything, predicted.__getitem__)
    assert found == ((f"{before}; {slope}",) if us_at_once < us_apart else (before, slope))


def behind_products(chain: Chain) -> bool:
    """Slopes with their product, and sums and turns by themselves."""
    return chain.slope > 0 and len(chain.contractions) > 0 and not chain.sums and not chain.turn


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fits", [nothing, behind_products])
@pytest.mark.parametrize("spec", [spec for spec in SMALL_SPECS if spec.terms == 1], ids=spec_id)
def test_whichever_way_back_to_contractions_is_predicted_to_take_least(
    spec: LayerSpec, fits: Callable[[Chain], bool], seed: int
) -> None:
    """By x or by the state that the last contractions read: the gradients are right, and what is to be compiled is what
    runs."""
    chain = Chain.of(spec, True, "tanh")
    ran: list[tuple[str, int]] = []

    def us(text: str) -> float:
        return 1.0 + zlib.crc32(f"{seed} {text}".encode()) % 100  # any times

    x, bias = torch.randn(3, spec.in_features).double(), torch.randn(spec.out_features).double()
    weights, grad_y = [torch.randn(s).double() for s in spec.weight_shapes], torch.randn(3, spec.out_features).double()
    ops = replace(noting(ran, fits), us=lambda _: us)
    leaves = [t.requires_grad_() for t in (x, bias, *weights)]
    right = torch.autograd.grad(torch.tanh(naive(spec, x, weights) + bias), leaves, grad_y)
    for wanted in ((4 << len(weights)) - 1, (4 << len(weights)) - 3, 0b0110, 0b0001):
        ran.clear()
        made = gradients(ops, grad_y, x.detach(), [w.detach() for w in weights], bias.detach(), chain.text, wanted)
        assert texts(chain.text, fits, 3, wanted, ops.us) == list(dict.fromkeys(ran))
        kept = [t for bit, t in enumerate(right) if wanted >> bit & 1]
        torch.testing.assert_close(made, kept)


@pytest.mark.parametrize("wanted", [0b1111, 0b1101])
def test_a_state_that_gradients_need_is_made_once(wanted: int) -> None:
    """What is activated is made again from the state before the last contraction."""
    chain = Chain.of(monarch((4, 6), (5, 3), rank=2), True, "tanh")

    def us(text: str) -> float:
        return 1.0 + text.count("untied")

    asked = [text for text, _ in texts(chain.text, behind_products, 100, wanted, lambda _: us)]
    first, behind, *_ = asked
    assert (first, behind) == (
        "untied 0 4 6 6 1; turn 1 8 3",
        "turned; untied 0 1 8 5 3; bias; tanh; slope 15",
    )
    assert not any(text.startswith("untied 0 4 6 6 1; untied") for text in asked)


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_what_no_samples_would_run_is_known_too(spec: LayerSpec) -> None:
    text = Chain.of(spec, True, "identity").text
    for fits in (nothing, anything):
        assert [each for each, _ in texts(text, fits, 0)] == [each for each, _ in texts(text, fits, 3)]


def test_of_few_samples_nothing_is_put_in_another_order() -> None:
    text = Chain.of(MIXED, False, "identity").text
    assert any("turn 3 8 2" in each for each, _ in texts(text, nothing, LEAST_MIXED))
    assert not any("turn 3 8 2" in each for each, _ in texts(text, nothing, LEAST_MIXED - 1))


@pytest.mark.parametrize("wanted", [0b1101, 0b1100, 0b1000, 0b1001, 0b0101, 0b0001])
def test_groups_store_their_part_of_a_gradient_together(wanted: int) -> None:
    """Where the weight contracted last learns, so that its states lie turned, and a run of theirs is long enough."""
    for spec, together in ((MIXED, True), (monarch((3, 9), (8, 2), rank=7), False), (monarch((3, 9), (8, 2)), False)):
        chain = Chain.of(spec, False, "identity")
        found = visits(chain.text, wanted, nothing)
        assert [visit.mixed for visit in found[:-1]] == [
            (3, 8, 2) if together and wanted & 4 else None for visit in found[:-1]
        ]
        if wanted == 0b1101:
            assert found[1].back.endswith("; turn 3 8 2") == together


def parts(spec: LayerSpec) -> list[Contraction]:
    """Each contraction of a layer, and that back through it, alone."""
    alone = [replace(c, weight=0) for c in Chain.of(spec, False, "identity").contractions]
    return [*alone, *(replace(c, p=c.q, q=c.p) for c in alone)]


@dtypes
@pytest.mark.parametrize("spec", AWKWARD_SPECS, ids=spec_id)
def test_every_part_of_a_layer_has_plans(spec: LayerSpec, dtype: str) -> None:
    """On one of two GPUs, the other one for the next dtype and the next layer."""
    gpu = Gpu.of((86, 90)[(AWKWARD_SPECS.index(spec) + ALL_DTYPES.index(dtype)) % 2])
    for i, c in enumerate(parts(spec)):
        batch = BATCHES[(i + gpu.arch) % len(BATCHES)]
        *turn, _ = plan(Chain((c,)), dtype, batch, gpu).passes
        turn = turn[isinstance(turn[0], WeightHalves | WeightChunks) :] if turn else []
        assert not turn or (not c.tied and c.inner > 1 and len(turn) == 1 and isinstance(turn[0], Turn))
        found = plan(Chain((c,), gradient=True), dtype, batch, gpu)
        text = read_text(found.text())
        (summing, *adding), made = text.passes, found.passes[0]
        assert isinstance(made, Gradient | WideGradient | MappedGradient)
        buffers = [(p.read, p.written) for p in text.passes]
        assert buffers == [("x", "s2"), ("s2", "y")] if adding else buffers == [("x", "y")] and made.most == 1
        assert text.chunk == 0 and text.scratch[:2] == (0, 0)
        for p in text.passes:
            assert p.threads in range(32, 1025, 32) and p.shared <= gpu.shared and 1 <= p.grid_y <= LARGEST_GRID_Y
        if isinstance(made, Gradient):
            groups = 1 if c.tied else c.outer * -(-c.inner // made.wg)
            assert summing.grid_y == -(-c.q // made.bm) * -(-c.p // made.bn) * groups
        # As csrc/runtime launches them: no more blocks for a tile than there are places for their sums.
        units = -(-most_of_class(batch) * summing.units_per_sample // summing.units_per_block)
        most = min(units, max(1, summing.blocks_per_processor * gpu.sms // summing.grid_y))
        assert text.scratch[2] == (most * made.folds * c.weight_size * SUM_BYTES[dtype] if adding else 0)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        pytest.param(spec, dtype, id=f"{spec_id(spec)}-{dtype}")
        for (i, spec), (j, dtype) in itertools.product(enumerate(AWKWARD_SPECS), enumerate(ALL_DTYPES))
        if (i + j) % 2 == 0
    ],
)
def test_what_is_passed_through_has_plans(spec: LayerSpec, dtype: str) -> None:
    """Of several contractions whose weights are frozen, of every layer for every other dtype."""
    text, k = Chain.of(spec, False, "identity").text, len(spec.weight_shapes)
    seen = {visit.part for wanted in (1, 4, 4 << (k - 1)) for visit in visits(text, wanted, nothing)}
    for part in seen:
        for chain in (part, Chain.parse(Visit(part, (), False, True, False).back)):
            assert plan(chain, dtype, SOME, Gpu.of(90)).passes


def layers_to_train() -> list[tuple[LayerSpec, str]]:
    """One whose last groups are so many that the pass preferred for many samples takes no order; and drawn ones."""
    rows = drawn(11, 40, "cuda", ALL_DTYPES)
    layers = [(row.spec, dtype) for row, dtype in rows if isinstance(row, Layer)]
    return [(monarch((53, 10), (23, 2), rank=8), "float16"), *layers]


LARGE_TO_TRAIN = [layer for layer in layers_to_train() if len(layer[0].in_factors) > 3]


def test_large_layers_to_train_meet_every_class() -> None:
    assert len(LARGE_TO_TRAIN) >= len(BATCHES)


@pytest.mark.parametrize(("spec", "dtype"), layers_to_train(), ids=str)
def test_what_training_asks_for_has_a_plan(spec: LayerSpec, dtype: str) -> None:
    """Whether there is one is asked of a usual number of samples; there has to be one of each class of numbers. Of more
    than three factors, which take seconds, layers are asked of one class each."""
    chain, gpu = Chain.of(spec, True, "identity"), Gpu.of(90)
    text, of_dtype = (chain.tf32_text, "float32") if dtype == "tf32" else (chain.text, dtype)
    batches: tuple[int, ...] = (10, 500, 5000, 50_000)
    for batch in (
        batches if len(spec.in_factors) < 4 else (batches[LARGE_TO_TRAIN.index((spec, dtype)) % len(batches)],)
    ):
        asked_of = runtime.class_of_batch(batch)

        def fits(part: Chain, batch_class: int = asked_of) -> bool:
            return has_plan(part.text, of_dtype, gpu.arch, gpu.sms, gpu.shared, batch_class=batch_class)

        for asked, samples in [(text, batch), *texts(text, fits, batch)]:
            assert plan_of(asked, of_dtype, runtime.class_of_batch(samples), gpu).passes


def test_gradients_of_a_chain_have_a_text_of_their_own() -> None:
    chain = Chain((parts(monarch((4, 3), (2, 5)))[0],), gradient=True)
    assert chain.text == "untied 0 4 3 5 1; gradient" and chain.tf32_text == chain.text + "; tf32"
    assert Chain.parse(chain.tf32_text) == replace(chain, tf32=True)
    both = Chain((Contraction(0, 1, 3, 4, 1, tied=True),), bias=True, gradient=True)
    assert both.text == "tied 0 1 3 4 1; bias; gradient" and Chain.parse(both.text) == both
    for text in (
        "gradient",
        "backward",
        "tied 0 2 2 2 1; bias; gradient",
        "untied 0 1 2 2 1; bias; gradient",
        "tied 0 1 2 2 1; bias; relu; gradient",
        "tied 0 1 2 2 1; gradient; bias",
        "rank 2; tied 0 1 2 2 1; bias; backward",
        "tied 1 2 2 2 1; tied 0 1 2 2 2; gradient",
        "untied 0 2 2 2 1; slabs 1; relu",
        "untied 0 2 2 2 1; backward; slabs 1; slabs 1",
        "untied 1 2 2 2 1; untied 0 1 2 2 2; backward; slabs 1",
        "untied 1 2 2 2 1; untied 0 1 2 2 2; few",
        "untied 1 2 2 2 1; untied 0 1 2 2 2; backward; few; few",
        "untied 1 2 2 2 1; untied 0 1 2 2 2; backward; few; turn 2 1 2",
        "untied 1 2 2 2 1; untied 0 1 2 2 2; backward; turn 2 1 2; few",
        "turned; untied 1 2 2 2 1; untied 0 1 2 2 2; backward; few",
        "tied 1 2 2 2 1; tied 0 1 2 2 2; backward; few",
        "untied 0 2 2 2 1; backward; few",
    ):
        with pytest.raises(ValueError, match="wrong place"):
            torch.ops.factorlayer.forward(torch.ones(1, 4), [torch.ones(2, 2)], None, text)
    for word in ("gradient", "backward"):
        with pytest.raises(RuntimeError, match="is for the ops that make gradients"):
            torch.ops.factorlayer.forward(torch.ones(1, 4), [torch.ones(2, 2)], None, f"tied 0 2 2 2 1; {word}")


def test_a_dense_layers_bias_is_summed_with_its_weight_where_that_family_does() -> None:
    """On Hopper's warpgroups; PyTorch sums the others'."""
    c = Contraction(0, 1, 256, 200, 1, tied=True)
    sizes = ((256, 200), (63, 256), (256, 4), (196, 384), (255, 13))
    for dtype, batch, (p, q) in itertools.product(("bfloat16", "float16", "tf32"), BATCHES, sizes):
        found = plan(both_of(replace(c, p=p, q=q)), dtype, batch, Gpu.of(90))
        (summing, *adding) = read_text(found.text()).passes
        assert "BIAS = true" in summing.source
        assert all(f"COUNT = {p * q + q};" in each.source for each in adding)
    for other, dtype, gpu in (
        (c, "float32", Gpu.of(90)),
        (c, "bfloat16", Gpu.of(80)),
        (replace(c, outer=2), "bfloat16", Gpu.of(90)),
    ):
        with pytest.raises(PlanError, match="no pass makes both gradients"):
            plan(both_of(other), dtype, BATCHES[-1], gpu)


def both_of(contraction: Contraction) -> Chain:
    return Chain((contraction,), bias=True, gradient=True)


def check_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.ops.factorlayer.forward(torch.ones(1, 4), [], None, text)


def test_sums_have_a_text_of_their_own() -> None:
    only = Chain((), sums=5)
    assert only.text == "sums 5" and Chain.parse(only.text) == only and only.in_features == 5
    for text in ("sums 5; relu", "relu; sums 5", "tied 0 1 2 2 1; sums 2", "sums 5; sums 5", "sums 5; tf32"):
        check_refused(text, "wrong place")
    for text, message in {"sums": "positive size", "sums 0": "positive size", "sums 5 5": "one word too many"}.items():
        check_refused(text, message)
    with pytest.raises(RuntimeError, match="for the ops that make gradients"):
        torch.ops.factorlayer.forward(torch.ones(1, 5), [], None, "sums 5")
    with pytest.raises(ValueError, match="make no layer"):
        torch.ops.factorlayer.stack_forward(torch.ones(1, 5), [], "sums 5 | relu; slope 5")


def test_slopes_have_a_text_of_their_own() -> None:
    chain = Chain.of(kronecker((3,), (4,)), True, "relu")
    chain = replace(chain, slope=4, tf32=True)
    assert chain.text == "tied 0 1 3 4 1; bias; relu; slope 4; tf32" and Chain.parse(chain.text) == chain
    only = Chain((), activation="gelu", slope=5)
    assert only.text == "gelu; slope 5" and Chain.parse(only.text) == only
    assert only.in_features == only.out_features == 5
    for text, message in {
        "slope 4": "wrong place",
        "relu": "no contraction",
        "relu; tied 0 1 2 2 1; slope 2": "wrong place",
        "turned; relu; slope 2": "wrong place",
        "tied 0 1 2 2 1; slope 2": "wrong place",
        "tied 0 1 2 2 1; relu; slope 2; slope 2": "wrong place",
        "tied 0 1 2 2 1; relu; slope 2; backward": "wrong place",
        "tied 0 1 2 2 1; relu; slope 3": "disagrees about the size of y",
        "relu; slope": "a positive size",
        "relu; slope 0": "a positive size",
    }.items():
        check_refused(text, message)
    with pytest.raises(RuntimeError, match="is for the ops that make gradients"):
        torch.ops.factorlayer.forward(torch.ones(1, 2), [torch.ones(2, 2)], None, "tied 0 1 2 2 1; relu; slope 2")


def test_sums_and_a_turn_may_stand_behind_a_slope() -> None:
    """And a turn behind sums alone."""
    whole = Chain((), activation="gelu", slope=12, sums=12, turn=(1, 4, 3), tf32=True)
    assert whole.text == "gelu; slope 12; sums 12; turn 1 4 3; tf32"
    for chain in (
        whole,
        replace(whole, sums=0),
        replace(whole, turn=None, tf32=False),
        replace(whole, slope=0, activation="identity"),
    ):
        assert Chain.parse(chain.text) == chain and chain.in_features == chain.out_features == 12
        with pytest.raises(RuntimeError, match="is for the ops that make gradients"):
            torch.ops.factorlayer.forward(torch.ones(1, 12), [], None, chain.text)
    for text, message in {
        "gelu; slope 12; sums 13": "disagrees about the size",
        "gelu; slope 12; turn 1 4 4": "disagrees about the size",
        "sums 12; turn 1 4 4": "disagrees about the size",
        "relu; slope 4; sums 4; sums 4": "wrong place",
        "relu; slope 4; turn 1 2 2; sums 4": "wrong place",
        "sums 4; turn 1 2 2; turn 1 2 2": "wrong place",
        "sums 4; turn 1 2 2; mixed 1 2 1": "wrong place",
        "relu; slope 4; mixed 1 2 2": "wrong place",
        "relu; slope 4; sums 4; tf32": "wrong place",
        "turn 1 2 2; sums 4": "wrong place",
        "tied 0 1 4 4 1; relu; slope 4; turn 1 2 2": "wrong place",
        "sums 4; tied 0 1 4 4 1": "wrong place",
        "sums 4; rank 2": "wrong place",
        "turned; sums 4": "wrong place",
    }.items():
        check_refused(text, message)


@pytest.mark.parametrize("activation", ["gelu", "identity"])
def test_what_is_activated_is_what_slopes_are_of(activation: str) -> None:
    """Where a layer reads several tensors: its sums are made before, and no pass goes back through contractions."""
    chain = replace(Chain.of(kronecker((3, 4), (5, 2)), True, activation), inputs=(5, 7))
    grad, z = torch.randn(2, 6, 10, dtype=torch.float64)
    found, of_bias = back_to_contractions(OPS, columns_texts(chain, True, None, anything), grad, z)
    right = torch.func.vjp(lambda z: activate(activation, z), z)[1](grad)[0]
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(of_bias, right.sum(0))


@pytest.mark.parametrize("us_of_product", [1.0, 10.0])
def test_what_goes_back_to_contractions_is_what_takes_less(us_of_product: float) -> None:
    """The product with the slope and then sums, or the product and then slopes with sums."""
    text, sums, slope = "tied 0 1 4 12 1; bias; gelu", "sums 12; turn 1 4 3", "gelu; slope 12; sums 12; turn 1 4 3"
    times = {f"{text}; slope 12": us_of_product, sums: 2.0, "tied 0 1 4 12 1; bias": 1.0, slope: 4.0}
    times |= {"sums 12": 1.5, "gelu; slope 12; sums 12": 3.5, "turn 1 4 3": 1.0}
    found = behind_texts(text, True, (1, 4, 3), anything, times.__getitem__)
    assert found == ((f"{text}; slope 12", sums) if us_of_product < 3 else ("tied 0 1 4 12 1; bias", slope))
    apart = behind_texts(text, True, (1, 4, 3), nothing, None)
    assert apart == ("tied 0 1 4 12 1; bias", "gelu; slope 12; sums 12", "turn 1 4 3")
    plain = text.removesuffix("; gelu")
    assert behind_texts(plain, True, None, nothing, None) == ("sums 12",)
    assert behind_texts(plain, False, (1, 4, 3), nothing, None) == ("turn 1 4 3",)
    assert not behind_texts(plain, False, None, nothing, None)


@pytest.mark.parametrize("us_at_once", [2.0, 4.0])
def test_sums_and_a_turn_are_one_pass_where_that_takes_less(us_at_once: float) -> None:
    at_once, *apart = "sums 12; turn 1 4 3", "sums 12", "turn 1 4 3"
    times = {at_once: us_at_once, **dict.fromkeys(apart, 1.5)}
    found = behind_texts("tied 0 1 4 12 1; bias", True, (1, 4, 3), anything, times.__getitem__)
    assert found == ((at_once,) if us_at_once < 3 else tuple(apart))


@pytest.mark.parametrize("us_of_sums", [0.5, 2.0])
def test_a_biass_gradient_comes_with_slopes_or_with_all_others(us_of_sums: float) -> None:
    """Whichever is predicted to take less."""
    chain = Chain.of(kronecker((3, 4), (5, 6)), True, "gelu")
    before = replace(chain, activation="identity")
    visit = replace(before, backward=True).text

    def us(text: str) -> float:
        return 1.0 + us_of_sums * ("sums" in text) + (text == visit)

    asked = [text for text, _ in texts(chain.text, lambda asked: asked.backward, 16, -1, lambda _: us)]
    apart = ["gelu; slope 30; sums 30", replace(before, bias=False, backward=True).text]
    assert asked == [before.text, *(apart if us_of_sums < 1 else ["gelu; slope 30", visit])]


def test_the_way_back_through_an_activation_has_a_text_of_its_own() -> None:
    chain = Chain.of(kronecker((3,), (4,)), False, "relu")
    chain = replace(chain, through=4, tf32=True)
    assert chain.text == "tied 0 1 3 4 1; relu; through 4; tf32" and Chain.parse(chain.text) == chain
    only = Chain((), activation="elu", through=5)
    assert only.text == "elu; through 5" and Chain.parse(only.text) == only
    assert only.in_features == only.out_features == 5
    for text, message in {
        "through 4": "wrong place",
        "relu; tied 0 1 2 2 1; through 2": "wrong place",
        "tied 0 1 2 2 1; bias; relu; through 2": "wrong place",
        "tied 0 1 2 2 1; through 2": "wrong place",
        "tied 0 1 2 2 1; relu; slope 2; through 2": "wrong place",
        "tied 0 1 2 2 1; relu; through 2; slope 2": "wrong place",
        "tied 0 1 2 2 1; relu; through 3": "disagrees about the size of y",
        "relu; through": "a positive size",
    }.items():
        check_refused(text, message)
    with pytest.raises(RuntimeError, match="is for the ops that make gradients"):
        torch.ops.factorlayer.forward(torch.ones(1, 2), [torch.ones(2, 2)], None, "tied 0 1 2 2 1; relu; through 2")
    with pytest.raises(PlanError, match="the slope of 'gelu' cannot be told from its result"):
        plan(Chain((), activation="gelu", through=5), "float32", FEW, Gpu.of(80))


def test_a_product_goes_back_through_an_activation_where_it_makes_slopes() -> None:
    for dtype, (p, q), batch in itertools.product(("bfloat16", "tf32", "float32"), [(256, 256), (64, 136)], BATCHES):
        chain = replace(Chain.of(kronecker((p,), (q,)), False, "elu"), through=q)
        found = plan(chain, dtype, batch, Gpu.of(90))
        text = read_text(found.text())
        split = [("none", "s2")] if dtype == "float32" else []
        assert [(each.read, each.written) for each in text.passes] == [*split, ("x", "y")] and text.chunk == 0
        assert "BESIDE = 1;" in text.passes[-1].source
        plain = plan(replace(chain, activation="identity", through=0), dtype, batch, Gpu.of(90))
        alone = plan(Chain((), activation="elu", through=q), dtype, batch, Gpu.of(90))
        # Of few samples another family makes the product
        assert plain.us < found.us and (batch < BATCHES[-1] or found.us < plain.us + alone.us)
    for p, q, dtype in ((5, 8, "bfloat16"), (64, 136, "float64"), (139, 72, "tf32")):
        with pytest.raises(PlanError, match="no pass makes the product and the slopes"):
            plan(replace(Chain.of(kronecker((p,), (q,)), False, "relu"), through=q), dtype, BATCHES[-1], Gpu.of(90))


def test_a_product_and_its_slopes_are_one_plan_where_the_last_pass_makes_both() -> None:
    """Others are refused, and their slopes are made from what a pass has stored."""
    specs = [
        kronecker((256,), (256,)),
        kronecker((64,), (136,)),
        kronecker((24, 32), (48, 64)),
        kronecker((7, 9), (5, 8)),
    ]
    for dtype, spec, batch in itertools.product(DTYPES, specs, BATCHES):
        chain = replace(Chain.of(spec, True, "gelu"), slope=spec.out_features)
        found = plan(chain, dtype, batch, Gpu.of(90))
        text = read_text(found.text())
        *before, last = text.passes
        assert last.written == "y" and (before or text.chunk == 0)
        assert f"BESIDE = {len(spec.contractions)};" in last.source
        assert not any("BESIDE = 1;" in each.source or "BESIDE = 2;" in each.source for each in before)
        plain = plan(replace(chain, activation="identity", slope=0), dtype, batch, Gpu.of(90))
        alone = plan(slopes_of(spec.out_features), dtype, batch, Gpu.of(90))
        many = batch == BATCHES[-1] and dtype != "float64"  # of few, and in double, other families make the product
        assert class_us(plain.passes, batch) < class_us(found.passes, batch)
        assert not many or found.us < plain.us + alone.us
    groups = monarch((4, 72), (72, 4), rank=16)
    chain = replace(Chain.of(groups, True, "gelu"), slope=groups.out_features)
    *before, last = read_text(plan(chain, "tf32", BATCHES[-1], Gpu.of(90)).text()).passes
    assert before and "BESIDE = 2;" in last.source
    for spec, dtype, gpu in (
        (kronecker((300, 300), (300, 300), rank=2), "float32", Gpu.of(80)),
        (monarch((8, 64), (64, 8)), "bfloat16", Gpu.of(90)),
        (monarch((8, 64), (64, 8)), "tf32", Gpu.of(80)),
    ):
        chain = replace(Chain.of(spec, True, "relu"), slope=spec.out_features)
        with pytest.raises(PlanError, match="no pass makes the product and the slopes"):
            plan(chain, dtype, BATCHES[-1], gpu)
        (only,) = read_text(plan(slopes_of(spec.out_features), dtype, BATCHES[-1], gpu).text()).passes
        assert (only.read, only.written, only.blocks_per_processor) == ("x", "y", 0)
        assert only.units_per_sample == spec.out_features


def slopes_of(features: int) -> Chain:
    return Chain((), activation="relu", slope=features)


def test_states_that_lie_turned_have_a_text_of_their_own() -> None:
    chain = Chain((Contraction(0, 1, 3, 4, 2, tied=False),), x_turned=True, turn=(1, 2, 4), tf32=True)
    assert chain.text == "turned; untied 0 1 3 4 2; turn 1 2 4; tf32" and Chain.parse(chain.text) == chain
    only = Chain((), turn=(2, 3, 4))
    assert only.text == "turn 2 3 4" and Chain.parse(only.text) == only and Chain.parse(only.tf32_text).tf32
    assert only.in_features == only.out_features == 24
    for text, message in {
        "turned": "no contraction",
        "turned; turn 1 2 2": "no contraction",
        "turned; tied 0 1 2 2 2": "wrong place",
        "turn 1 2 2; untied 0 1 2 2 2": "wrong place",
        "untied 0 1 2 2 2; bias; turn 1 2 2": "wrong place",
        "untied 0 1 2 2 2; turn 1 2 3": "disagrees about the size of y",
        "turn 1 2": "three positive sizes",
        "turn 1 0 2": "three positive sizes",
    }.items():
        check_refused(text, message)
    for text in ("turn 1 2 2", "turn 1 2 2; tf32"):
        with pytest.raises(RuntimeError, match="is for tensors on a GPU"):
            torch.ops.factorlayer.forward(torch.ones(1, 4), [], None, text)


def all_gradients_of(spec: LayerSpec) -> Chain:
    return replace(Chain.of(spec, False, "identity"), backward=True)


# An odd number of them, whose two products are of two sizes, and an even one, in turn for each dtype
@pytest.mark.parametrize(
    ("factors", "dtype"), [((4,) * (5 + i % 2), dtype) for i, dtype in enumerate(ALL_DTYPES)], ids=str
)
def test_small_factors_are_taken_as_two(factors: tuple[int, ...], dtype: str) -> None:
    """Whose gradients are summed as any others are, in place, and then become those of the factors."""
    spec = kronecker(factors, factors)
    gpu = Gpu.of(90)
    text = plan(all_gradients_of(spec), dtype, BATCHES[-1], gpu).text()
    found = read_text(text)
    assert [(p.read, p.written) for p in found.passes] == [("x", "y"), ("s2", "s2"), ("s2", "w")]
    first, last = math.prod(factors[: len(factors) // 2]), math.prod(factors[len(factors) // 2 :])
    assert found.scratch == (0, 0, gpu.sms * (first**2 + last**2) * SUM_BYTES[dtype])
    assert f"COUNT = {sum(n * n for n in factors)};" in found.passes[-1].source
    with pytest.raises(ValueError, match='it should begin with "pass", it is "the end"'):
        runtime.fill_cache(text + "the end\n")  # so everything before it was read, and nothing is compiled


@dtypes
def test_all_gradients_of_two_factors_are_one_pass(dtype: str) -> None:
    """Of sizes whose sums a group of warps can hold. Sizes, GPUs and batches meet one another, two by two."""
    all_sizes = (((64, 64), (64, 64)), ((32, 32), (32, 32)), ((20, 28), (36, 44)), ((9, 24), (8, 40)))
    for (i, sizes), (j, batch) in itertools.product(enumerate(all_sizes), enumerate(BATCHES)):
        gpu = Gpu.of((80, 86, 90)[(i + j) % 3])
        if dtype == "float64" and gpu.arch == 86 and sizes[0][0] == 64:
            continue  # a sample fills its shared memory
        found = plan(all_gradients_of(kronecker(*sizes)), dtype, batch, gpu)
        text = read_text(found.text())
        if any(isinstance(p, ChainBackward | KroneckerWeight) for p in found.passes):  # which have tests of their own
            continue
        if isinstance(found.passes[0], PairClusterBackward):
            (only,) = text.passes
            assert batch <= FEW and (only.read, only.written, text.scratch) == ("x", "y", (0, 0, 0))
            assert only.grid_y % found.passes[0].cluster == 0 and only.shared <= gpu.shared
            continue
        first, adding = text.passes
        assert (first.read, first.written, adding.read, adding.written) == ("x", "y", "s2", "w")
        (p0, p1), (q0, q1) = sizes
        tiled, sums, most = found.passes[0], p0 * q0 + p1 * q1, gpu.sms
        if isinstance(tiled, PairFewBackward):  # of the second weight, each strip has sums
            assert batch <= FEW and p0 % tiled.span == q1 % tiled.width == 0
            assert f"SINGLES = {p0 * q0};" in adding.source and f"FOLDS = {first.grid_y};" in adding.source
            sums, most = p0 * q0 + first.grid_y * p1 * q1, most_of_class(batch)
        assert text.scratch == (0, 0, most * sums * SUM_BYTES[dtype]) and text.chunk == 0
        assert first.threads <= 1024 and first.shared <= gpu.shared
        assert f"MOST = {most};" in adding.source and f"UNITS_PER_BLOCK = {first.units_per_block};" in adding.source
    with pytest.raises(PlanError, match="no pass makes all gradients"):
        plan(all_gradients_of(monarch((4, 8, 8), (8, 8, 4))), dtype, BATCHES[-1], Gpu.of(90))


@dtypes
def test_few_samples_have_kernels_that_many_have_not(dtype: str) -> None:
    """All gradients of two factors of 128 at once: of many samples not in float."""
    chain = replace(all_gradients_of(kronecker((128, 128), (128, 128))), tf32=dtype == "tf32")
    asked = (chain.text, dtype.replace("tf32", "float32"), 90, 132, 232448)
    assert has_plan(*asked, batch_class=0) and has_plan(*asked) == (dtype != "float32")
    few = plan(chain, dtype, FEW, Gpu.of(90)).passes
    by_strips = ["PairFewBackward", "Reduction"] if dtype not in ("bfloat16", "float16") else ["PairClusterBackward"]
    assert [type(p).__name__ for p in few] == by_strips


@dtypes
def test_of_few_small_samples_gradients_are_made_and_summed_by_one_kernel(dtype: str) -> None:
    """By the blocks of clusters, which are few in number and all there at once, where a GPU has clusters."""
    chain = replace(all_gradients_of(kronecker((32, 32), (32, 32))), tf32=dtype == "tf32")
    gpu = Gpu.of(90)
    (only,) = plan(chain, dtype, FEW, gpu).passes
    assert isinstance(only, PairClusterBackward) and only.split <= gpu.sms
    assert f"__cluster_dims__(1, {only.cluster}, 1)" in only.source("kernel")
    for batch, arch in ((SOME, 90), (FEW, 80), (FEW, 120)):
        assert not any(isinstance(p, PairClusterBackward) for p in plan(chain, dtype, batch, Gpu.of(arch)).passes)


@dtypes
def test_a_biass_gradient_is_made_by_the_kernel_that_makes_the_others(dtype: str) -> None:
    """Where that is a kernel of clusters, of few samples."""
    chain = replace(all_gradients_of(kronecker((32, 32), (32, 32))), tf32=dtype == "tf32")
    both = replace(chain, bias=True)
    assert Chain.parse(both.text) == both and "; bias; backward" in both.text
    (alone,), (only,) = (plan(each, dtype, FEW, Gpu.of(90)).passes for each in (chain, both))
    assert isinstance(alone, PairClusterBackward) and only == replace(alone, bias=True)
    assert only.split == alone.split + only.cluster and only.made == alone.made + 1024
    for batch, arch in ((SOME, 90), (FEW, 80)):
        if arch == 80 or dtype not in ("bfloat16", "float16"):  # where who copies sums
            with pytest.raises(PlanError, match="the bias's among them"):
                plan(both, dtype, batch, Gpu.of(arch))

    def fits(asked: Chain) -> bool:
        return asked in (chain, both)

    layer = replace(chain, backward=False, bias=True)
    for wanted, made in ((15, both.text), (14, both.text), (13, chain.text)):
        assert texts(layer.text, fits, 16, wanted) == [(made, 16)]
    assert texts(layer.text, lambda asked: asked == chain, 16) == [(chain.text, 16), (sums_text(1024), 16)]
    for rest in ("bias; gelu; backward", "bias; backward; turn 1 32 32", "backward; bias", "bias; bias; backward"):
        check_refused(f"tied 1 32 32 32 1; tied 0 1 32 32 32; {rest}", "wrong place")
    check_refused("turned; untied 0 1 2 2 2; bias; backward", "wrong place")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_many_samples_who_copies_grad_y_sums_it_as_well(dtype: str) -> None:
    """Of a unit that is a sample."""
    chain, gpu = replace(all_gradients_of(kronecker((64, 64), (64, 64))), bias=True), Gpu.of(90)
    first, adding = plan(chain, dtype, BATCHES[-1], gpu).passes
    assert isinstance(first, Pair16Backward) and first.bias and isinstance(adding, Reduction)
    assert adding.of.weights == first.weights == 3 * 64 * 64
    several = replace(all_gradients_of(kronecker((3, 64, 64), (3, 64, 64))), bias=True)
    with pytest.raises(PlanError, match="the bias's among them"):
        plan(several, dtype, BATCHES[-1], gpu)


def test_kernels_ask_for_what_they_read_before_they_wait() -> None:
    """And have the next one start behind their own wait, so that it comes after all that they come after."""
    chain = Chain.of(kronecker((64, 64), (64, 64)), False, "identity")
    for each, batch, asked in (
        (chain, FEW, ("x", "weights[0]", "weights[1]")),
        (chain, SOME, ("x", "weights[0]", "weights[1]")),
        (replace(chain, backward=True), FEW, ("x", "weights[0]", "weights[1]", "weights[2]")),
        (replace(chain, backward=True), SOME, ("x", "weights[0]", "weights[1]", "weights[2]")),
    ):
        first, *more = read_text(plan(each, "bfloat16", batch, Gpu.of(90)).text()).passes
        entry = first.source.split("__grid_constant__")[1]
        ask, wait, start = (entry.index(word) for word in ("ask_for<", "wait_for_kernel_before", "start_next_kernel"))
        assert entry.rindex("ask_for<") < wait < start and ask < wait
        assert set(re.findall(r"ask_for<\d+>\(params\.(\S+),", entry)) == set(asked)
        assert all("start_next_kernel" in p.source.split("__grid_constant__")[1] for p in more)


@pytest.mark.parametrize("batch", [LEAST_MIXED - 1, LEAST_MIXED, 700, MOST_SOME, MOST_SOME + 1])
@pytest.mark.parametrize("learned", [0b1101, 0b101])
def test_some_samples_of_a_monarch_layer_count_as_few_where_that_is_predicted_to_take_less(
    batch: int, learned: int
) -> None:
    """Here it takes two microseconds for each sample, and every other kernel two thousand."""
    text = Chain.of(monarch((3, 4), (5, 2), rank=2), False, "identity").text

    def us_of(batch: int) -> Callable[[str], float]:
        return lambda text: 2.0 * batch if "few" in text else 2000.0

    asked = [each for each, _ in texts(text, anything, batch, learned, us=us_of)]
    parsed = [Chain.parse(each) for each in asked]
    less = LEAST_MIXED <= batch < 1000 and learned == 0b1101
    both = replace(Chain.parse(text), backward=True, few=True)
    assert [chain for chain in parsed if chain.few] == [both] * less
    assert not less or parsed == [both]


@pytest.mark.parametrize("batch", [LEAST_MIXED - 1, LEAST_MIXED])
def test_gradients_of_few_samples_are_made_by_such_kernels(batch: int) -> None:
    spec, ran = kronecker((3, 4), (5, 2)), []

    def noted(*given: Any) -> list[Tensor]:
        ran.append(given[3])
        return all_gradients(*given)

    x = torch.randn(batch, spec.in_features, dtype=torch.float64, requires_grad=True)
    grad_y = torch.randn(batch, spec.out_features, dtype=torch.float64)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in spec.weight_shapes]
    ops = replace(OPS, all_gradients=noted, fits=nothing, fits_in=[pairs, pairs, *[nothing] * 4])
    made = gradients(
        ops, grad_y, x.detach(), [w.detach() for w in weights], None, Chain.of(spec, False, "identity").text, 13
    )
    assert bool(ran) == (batch < LEAST_MIXED)
    right = torch.autograd.grad(naive(spec, x, weights), [x, *weights], grad_y)
    for a, b in zip(made, right, strict=True):
        torch.testing.assert_close(a.view_as(b), b)


def test_sums_of_a_large_batch_are_those_that_are_added_up() -> None:
    """The second kernel counts the first one's blocks by the same rule as the runtime."""
    for (c, dtype), gpu in itertools.product(
        [(parts(kronecker((64, 64), (64, 64)))[0], "bfloat16"), (parts(monarch((16, 8), (8, 32)))[1], "float64")],
        (Gpu.of(80), Gpu.of(90)),
    ):
        summing, adding = read_text(plan(Chain((c,), gradient=True), dtype, BATCHES[-1], gpu).text()).passes
        for key, value in {
            "UNITS": summing.units_per_sample,
            "UNITS_PER_BLOCK": summing.units_per_block,
            "MOST": max(1, summing.blocks_per_processor * gpu.sms // summing.grid_y),
        }.items():
            assert f"static constexpr i64 {key} = {value};" in adding.source
