"""Layers that keep the states between their passes: what the kernels of both plans make, by the emulator, against
float64; when states are kept; and texts that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from emulator.driver import Emulator
from oracle import kronecker, monarch
from test_backward import OPS
from test_chain_backward import check_gradients, gradients_of
from test_emulator import EPS, LEARNED, Array, all_gradients_of, drawing
from torch import Tensor

from factorlayer.activations.named import activate
from factorlayer.activations.tracing import trace
from factorlayer.autograd.backward import Kept, back_of_kept, gradients, kept_if_worth_it, slope_of_kept, step_texts
from factorlayer.autograd.runtime import class_of_batch, plan_text
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec
from factorlayer.models.times import plan_us
from factorlayer.plan import kept, planner
from factorlayer.plan.plan import Plan, PlanError

MANY = 1024
HOPPER = Gpu.of(90)
LARGE = kronecker((16, 16, 8, 24, 16), (16, 16, 8, 24, 16), rank=3)

MISH = trace(torch.nn.Mish())[0].program
CASES = [
    (kronecker((6, 7, 8), (5, 9, 4)), "bfloat16", 90, 3, "identity"),
    (kronecker((6, 7, 8), (5, 9, 4), rank=2), "float16", 90, 4, "identity"),
    (kronecker((33, 40), (40, 25), rank=3), "tf32", 90, 3, "identity"),
    (kronecker((4, 3, 5, 6), (2, 7, 5, 3), rank=2), "float32", 80, 5, "identity"),
    (kronecker((17, 4, 7), (17, 4, 7)), "float64", 80, 4, "identity"),
    (kronecker((24, 32), (32, 24)), "bfloat16", 90, 3, "identity"),
    (kronecker((6, 7, 8), (5, 9, 4)), "bfloat16", 90, 5, "gelu"),
    (kronecker((6, 7, 8), (5, 9, 4), rank=2), "float16", 90, 4, "tanh"),
    (kronecker((33, 40), (40, 25), rank=3), "tf32", 90, 5, "gelu"),
    (kronecker((4, 3, 5, 6), (2, 7, 5, 3), rank=2), "float32", 80, 5, MISH),
    (kronecker((17, 4, 7), (17, 4, 7)), "float64", 80, 4, "sigmoid"),
    (kronecker((24, 32), (32, 24)), "bfloat16", 90, 4, MISH),
]


def planned(spec: LayerSpec, dtype: str, arch: int, activation: str = "identity") -> list[Plan]:
    """A layer's plan, that of the slopes of its activation, if it has one, and that of its gradients, with states kept
    whether that is worth it or not."""
    gpu = dataclasses.replace(Gpu.of(arch), sms=2)
    chain = dataclasses.replace(Chain.of(spec, False, "identity"), tf32=dtype == "tf32")
    found = kept.fastest(chain, dtype, MANY, gpu)
    if found is None:
        raise PlanError("there is no way to keep states")
    chain = dataclasses.replace(chain, kept=found.features)
    layer = dataclasses.replace(chain, bias=True, activation=activation)
    asked = [(layer, tuple(range(len(found.features))))]
    asked += [(dataclasses.replace(layer, slope=spec.out_features), ())] * (activation != "identity")
    made = [
        Plan(each, dtype, MANY, gpu, with_halves(kept.forward_of(each, found, dtype, MANY, gpu)), keeps)
        for each, keeps in asked
    ]
    if not all(each.passes for each in made):
        raise PlanError("no pass makes the slopes")
    return [*made, Plan(dataclasses.replace(chain, backward=True), dtype, MANY, gpu, with_halves(found.back))]


@pytest.mark.parametrize(("spec", "dtype", "arch", "batch", "activation"), CASES, ids=str)
def test_gradients_of_kept_states(
    spec: LayerSpec, dtype: str, arch: int, batch: int, activation: str, emulator: Emulator
) -> None:
    plans = planned(spec, dtype, arch, activation)
    assert len(plans) == (2 if activation == "identity" else 3)
    check(spec, plans, batch, emulator)


def check(spec: LayerSpec, plans: list[Plan], batch: int, emulator: Emulator) -> None:
    """Against float64, with an infinity and a NaN in a sample, and the same bits for any order of blocks."""
    (forward, *slopes, back), dtype = plans, plans[0].dtype
    activation = forward.chain.activation
    written = [line.split(" ")[2] for line in forward.text().splitlines() if line.startswith("pass ")]
    places = [f"@{len(spec.weight_shapes) + 1 + i}" for i in range(len(forward.keeps))]
    assert [name for name in written if name[0] == "@"] == places
    assert not any(line.split(" ")[2][0] == "@" for line in back.text().splitlines() if line.startswith("pass "))
    draw = drawing(dtype)
    x, grad, bias = draw(batch, spec.in_features), draw(batch, spec.out_features), draw(spec.out_features)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    kernels, states = emulator.compile(forward), list[list[Array]]()
    given: list[tuple[Array, Array]] = []  # x and grad_y: twice the same, then with what is no number
    before_activation: list[torch.Tensor] = []
    for seed, value in enumerate((None, None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[0, 1 % x.shape[1]], grad[1, 2 % grad.shape[1]] = value, -value
        outputs, errors = emulator.run(forward, kernels, x, weights, bias, blocks=2, seed=seed)
        assert not errors, errors
        given.append((x, grad))
        states.append(outputs[: len(forward.chain.kept)])
        assert [state.size for state in states[-1]] == [batch * n for n in forward.chain.kept]
        z = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]) + torch.from_numpy(bias)
        before_activation.append(z)
        y, terms = outputs[-1].reshape(batch, -1), len(weights) * spec.rank
        right = activate(activation, z)[2:].numpy()
        np.testing.assert_allclose(y[2:], right, rtol=0, atol=20 * terms * EPS[dtype] * float(z[2:].abs().max()))
    for slope in slopes:
        kernels = emulator.compile(slope)  # which takes the place of what was compiled before
        for seed, ((x, grad), kept_ones, z) in enumerate(zip(given, states, before_activation, strict=True)):
            last = kept_ones[-1].reshape(batch, -1)
            outputs, errors = emulator.run(slope, kernels, last, [*weights, grad], bias, 2, seed)
            assert not errors, errors
            through = outputs[-1].reshape(batch, -1)
            of_activation = torch.func.vjp(lambda z: activate(activation, z), z)[1](torch.from_numpy(grad))[0].numpy()
            distance = np.linalg.norm(through[2:] - of_activation[2:])
            assert distance <= 2 * EPS[dtype] * (1 + len(weights)) * np.linalg.norm(of_activation[2:])
            given[seed] = x, through
        np.testing.assert_array_equal(given[0][1], given[1][1])
    kernels, before = emulator.compile(back), list[Array]()
    others = np.zeros(1)  # where a kernel finds the gradients of weights
    for seed, ((x, grad), kept_ones) in enumerate(zip(given, states, strict=True)):
        outputs, errors = emulator.run(back, kernels, x, [*weights, grad, others, *kept_ones], None, 2, seed)
        assert not errors, errors
        made = gradients_of(outputs, back, spec)
        check_gradients(made, spec, x, weights, grad, dtype)
        if seed == 1:
            for part, other in zip(made, before, strict=True):
                np.testing.assert_array_equal(part, other)
        before = before or made


def kept_text(
    spec: LayerSpec, dtype: str, batch_class: int = 4, bias: bool = True, activation: str = "identity"
) -> str:
    chain = Chain.of(spec, bias, activation).text
    return planner.kept(chain, dtype, HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory, batch_class)


@pytest.mark.parametrize("bias", [False, True])
def test_a_state_that_leaves_the_chip_is_kept(bias: bool) -> None:
    text = kept_text(LARGE, "bfloat16", bias=bias)
    chain = Chain.parse(text)
    assert chain.kept and all(n % LARGE.rank == 0 for n in chain.kept)
    limits = HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory, 4
    of_gradients = dataclasses.replace(chain, bias=False, backward=True).text
    apart = [Chain.of(LARGE, bias, "identity").text, all_gradients_of(LARGE).text]
    times = [planner.predicted(each, "bfloat16", *limits) for each in (text, of_gradients, *apart)]
    assert sum(times[:2]) < sum(times[2:])
    plan = planner.plan_of(text, "bfloat16", 4, HOPPER)
    assert plan.chunk == 0 or plan.chunk > 1 << 20
    assert not any(plan.scratch[:2])  # no state lies anywhere else


def test_a_state_that_stays_on_the_chip_is_not() -> None:
    assert kept_text(kronecker((32, 32), (32, 32)), "bfloat16") == ""
    assert kept_text(kronecker((64,), (64,)), "float32") == ""


@pytest.mark.parametrize("activation", ["gelu", MISH], ids=["gelu", "mish"])
def test_slopes_are_made_of_the_last_state(activation: str) -> None:
    """By the last pass alone, where without states all passes run once more."""
    _, with_state, without = texts_of_step(LARGE, "bfloat16", 4000, activation)
    text, *back = with_state
    assert back == [slope_of_kept(text), back_of_kept(text), f"sums {LARGE.out_features}"]
    assert text == kept_text(LARGE, "bfloat16", activation=activation)
    assert Chain.parse(text).kept == Chain.parse(kept_text(LARGE, "bfloat16")).kept
    ahead, slope, _ = (planner.plan_of(each, "bfloat16", 4, HOPPER) for each in with_state[:3])
    assert len(slope.passes) == 1 < len(ahead.passes) and not slope.keeps
    for each in with_state[:3]:  # the extension reads such texts, too
        limits = HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory
        planned = plan_text(each, torch.bfloat16, 4000, *limits)
        assert planned == planner.plan_text(each, "bfloat16", class_of_batch(4000), *limits)
    (anew,) = (each for each in without if " slope " in each)
    assert len(planner.plan_of(anew, "bfloat16", 4, HOPPER).passes) > 1


def test_slopes_that_no_kernel_makes_of_the_last_state_are_made_of_x() -> None:
    spec = kronecker((192, 27, 9, 8), (192, 27, 9, 8), rank=3)
    _, (text, *back), without = texts_of_step(spec, "float32", 15, "tanh")
    assert " kept " in text and not fits(slope_of_kept(text), "float32", 15)
    *slopes, gradients, _ = back
    assert gradients == back_of_kept(text) and set(slopes) <= set(without)


def test_a_step_with_an_activation_has_to_take_less_by_states() -> None:
    """As a whole: what the planner asks is less, as it counts nothing for the slope that is made of them."""
    spec, batch = kronecker((11, 107), (252, 9), rank=2), 28
    assert kept_text(spec, "float64", class_of_batch(batch), activation=MISH)
    _, with_state, without = texts_of_step(spec, "float64", batch, MISH)
    assert with_state == without
    assert kept_text(kronecker((32, 32), (32, 32)), "bfloat16", activation="gelu") == ""


def fits(text: str, dtype: str, batch: int) -> bool:
    limits = HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory
    return planner.has_plan(text, dtype, *limits, class_of_batch(batch))


@pytest.mark.parametrize("through", ["identity", "tanh"])
@pytest.mark.parametrize(("activation", "is_handed"), [("identity", False), ("gelu", False), ("gelu", True)])
def test_which_gradients_are_made_by_states(activation: str, is_handed: bool, through: str) -> None:
    """Those of all weights, by one op behind the slopes. A layer that is handed the gradient of what it activates makes
    none."""
    torch.manual_seed(0)
    spec = kronecker((3, 4), (5, 2))
    layer = Chain.of(spec, True, activation)
    text = Chain.of(spec, True, "identity").text if is_handed else layer.text
    first, last = layer.contractions
    shapes = [(7, spec.in_features), (7, spec.out_features), (spec.out_features,), *spec.weight_shapes]
    x, grad_y, bias, *weights = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    x = x.tanh()
    state = OPS.forward(x, [weights[first.weight]], None, Chain((dataclasses.replace(first, weight=0),)).text)
    by, asked = Kept(dataclasses.replace(layer, kept=(state.shape[1],)).text, [state]), list[str]()

    def slopes(grad: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> Tensor:
        asked.append(text)
        if text != slope_of_kept(by.text):
            return OPS.slopes(grad, x, weights, bias, text)
        assert x is state
        part = Chain((dataclasses.replace(last, weight=0),), bias=True, activation=activation)
        part = dataclasses.replace(part, slope=spec.out_features)
        return OPS.slopes(grad, x, [weights[last.weight]], bias, part.text)

    def all_gradients(grad: Tensor, x: Tensor, given: Sequence[Tensor], text: str, wanted: int) -> list[Tensor]:
        asked.append(text)
        assert text == back_of_kept(by.text) and given[2] is state
        return OPS.all_gradients(grad, x, given[:2], dataclasses.replace(Chain.parse(text), kept=()).text, wanted)

    ops = dataclasses.replace(OPS, slopes=slopes, all_gradients=all_gradients, fits=lambda chain: chain.kept != ())
    leaves = [t.clone().requires_grad_() for t in (x, bias, *weights)]
    y = naive(spec, leaves[0], leaves[2:]) + leaves[1]
    right = list(torch.autograd.grad(y if is_handed else activate(activation, y), leaves, grad_y))
    right[0] = right[0] * (1 - x**2) if through == "tanh" else right[0]
    for wanted in (0b1111, 0b1110, 0b1101, 0b1100, 0b1011, 0b0111, 0b0001, 0b0010):
        asked.clear()
        found = gradients(ops, grad_y, x, weights, bias, text, wanted, through, by)
        for made, expected in zip(found, [g for bit, g in enumerate(right) if wanted >> bit & 1], strict=True):
            torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-11)
        steps = [slope_of_kept(by.text)] * (activation != "identity" and not is_handed) + [back_of_kept(by.text)]
        assert [each for each in asked if " kept " in each] == (steps if wanted >> 2 == 3 else [])


def texts_of_step(spec: LayerSpec, dtype: str, batch: int, activation: str) -> tuple[Plan, list[str], list[str]]:
    """The plan of a layer that keeps states, and the texts of a training step with them, if they are worth it, and
    without them."""
    text, limits = Chain.of(spec, True, activation).text, (HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory)
    which = class_of_batch(batch)
    kept_text = planner.kept(text, dtype, *limits, which)

    def us(samples: int) -> Callable[[str], float]:
        return lambda each: plan_us(each, samples, dtype, HOPPER)

    def has_plan(chain: Chain) -> bool:
        return fits(chain.text, dtype, batch)

    worth = kept_if_worth_it(text, kept_text, has_plan, batch, us)
    steps = [[each for each, _ in step_texts(text, kept, has_plan, batch, us)] for kept in (worth, "")]
    return planner.plan_of(kept_text, dtype, which, HOPPER), *steps


@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_the_state_of_a_monarch_layer_is_kept(activation: str) -> None:
    plan, with_state, without = texts_of_step(monarch((28, 208), (192, 27), rank=9), "bfloat16", 4245, activation)
    buffers = [line.split(" ")[1:3] for line in plan.text().splitlines() if line.startswith("pass ")]
    assert [read for read, _ in buffers].count("@3") == [written for _, written in buffers].count("@3") == 1
    assert with_state[0].endswith(" kept 6804") and "kept" not in without[0]
    made_again = [text for text in without[1:] if text not in with_state]
    assert [Chain.parse(text).contractions[0].q for text in made_again] == [27 * 9]  # the first contraction, once more
    assert set(with_state[1:]) < set(without[1:])


def test_the_state_of_a_small_monarch_layer_is_not() -> None:
    _, with_state, without = texts_of_step(monarch((2, 8), (8, 2)), "float32", 100, "identity")
    assert with_state == without


@pytest.mark.parametrize("words", [LEARNED, "backward", "gelu; backward", "gelu; through 16", "turn 1 4 4"])
def test_texts_that_cannot_keep_states(words: str) -> None:
    text = Chain.of(kronecker((2, 2), (4, 4)), words == "backward", "identity").text + f"; {words}; kept 8"
    with pytest.raises(ValueError, match="states are kept by a Kronecker product"):
        Chain.parse(text)


@pytest.mark.parametrize("words", ["", "; gelu", "; gelu; slope 786432", "; backward"])
def test_states_that_the_planner_does_not_keep_are_refused(words: str) -> None:
    layer, numbers = kept_text(LARGE, "bfloat16", bias=False).split("; kept ")
    assert planner.plan_of(f"{layer}{words}; kept {numbers}", "bfloat16", 4, HOPPER).passes
    with pytest.raises(PlanError, match="other states than those between its passes"):
        planner.plan_of(f"{layer}{words}; kept {numbers}0", "bfloat16", 4, HOPPER)


def test_groups_that_are_no_monarch_layer_keep_no_states() -> None:
    text = "untied 0 4 2 2 1; untied 1 2 2 2 2"
    assert not Chain.parse(text).is_monarch
    with pytest.raises(PlanError, match="other states than those between its passes"):
        planner.plan_of(text + "; kept 8", "bfloat16", 4, HOPPER)
