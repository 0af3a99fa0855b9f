"""Layers that keep the states between their passes: what the kernels of both plans make, by the emulator, against
float64; when states are kept; and texts that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from emulator.driver import Emulator
from oracle import kronecker, monarch
from test_chain_backward import check_gradients, gradients_of
from test_emulator import EPS, Array, all_gradients_of, drawing

from factorlayer.autograd.backward import kept_if_worth_it, step_texts
from factorlayer.autograd.runtime import class_of_batch
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

CASES = [
    (kronecker((6, 7, 8), (5, 9, 4)), "bfloat16", 90, 3),
    (kronecker((6, 7, 8), (5, 9, 4), rank=2), "float16", 90, 4),
    (kronecker((33, 40), (40, 25), rank=3), "tf32", 90, 3),
    (kronecker((4, 3, 5, 6), (2, 7, 5, 3), rank=2), "float32", 80, 5),
    (kronecker((17, 4, 7), (17, 4, 7)), "float64", 80, 4),
    (kronecker((24, 32), (32, 24)), "bfloat16", 90, 3),
]


def planned(spec: LayerSpec, dtype: str, arch: int) -> tuple[Plan, Plan]:
    """A layer's plan and that of its gradients, with states kept whether that is worth it or not."""
    gpu = dataclasses.replace(Gpu.of(arch), sms=2)
    chain = dataclasses.replace(Chain.of(spec, False, "identity"), tf32=dtype == "tf32")
    found = kept.fastest(chain, dtype, MANY, gpu)
    if found is None:
        raise PlanError("there is no way to keep states")
    chain = dataclasses.replace(chain, kept=found.features)
    with_bias = dataclasses.replace(chain, bias=True)
    forward = kept.forward_of(dataclasses.replace(with_bias, kept=()), found, dtype, MANY, gpu)
    of_gradients = dataclasses.replace(chain, backward=True)
    keeps = tuple(range(len(found.features)))
    both = (with_bias, forward, keeps), (of_gradients, found.back, ())
    ahead, back = (Plan(chain, dtype, MANY, gpu, with_halves(passes), keeps) for chain, passes, keeps in both)
    return ahead, back


@pytest.mark.parametrize(("spec", "dtype", "arch", "batch"), CASES, ids=str)
def test_gradients_of_kept_states(spec: LayerSpec, dtype: str, arch: int, batch: int, emulator: Emulator) -> None:
    check(spec, planned(spec, dtype, arch), batch, emulator)


def check(spec: LayerSpec, plans: tuple[Plan, Plan], batch: int, emulator: Emulator) -> None:
    """Against float64, with an infinity and a NaN in a sample, and the same bits for any order of blocks."""
    (forward, back), dtype = plans, plans[0].dtype
    written = [line.split(" ")[2] for line in forward.text().splitlines() if line.startswith("pass ")]
    places = [f"@{len(spec.weight_shapes) + 1 + i}" for i in range(len(forward.keeps))]
    assert [name for name in written if name[0] == "@"] == places
    assert not any(line.split(" ")[2][0] == "@" for line in back.text().splitlines() if line.startswith("pass "))
    draw = drawing(dtype)
    x, grad, bias = draw(batch, spec.in_features), draw(batch, spec.out_features), draw(spec.out_features)
    weights = [draw(*shape) / np.sqrt(shape[-1]) for shape in spec.weight_shapes]
    kernels, states = emulator.compile(forward), list[list[Array]]()
    given: list[tuple[Array, Array]] = []  # x and grad_y: twice the same, then with what is no number
    for seed, value in enumerate((None, None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[0, 1 % x.shape[1]], grad[1, 2 % grad.shape[1]] = value, -value
        outputs, errors = emulator.run(forward, kernels, x, weights, bias, blocks=2, seed=seed)
        assert not errors, errors
        given.append((x, grad))
        states.append(outputs[: len(forward.chain.kept)])
        assert [state.size for state in states[-1]] == [batch * n for n in forward.chain.kept]
        right = naive(spec, torch.from_numpy(x), [torch.from_numpy(w) for w in weights]).numpy() + bias
        y, terms = outputs[-1].reshape(batch, -1), len(weights) * spec.rank
        np.testing.assert_allclose(y[2:], right[2:], rtol=0, atol=20 * terms * EPS[dtype] * np.abs(right[2:]).max())
    kernels, before = emulator.compile(back), list[Array]()  # which takes the place of what was compiled before
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


def kept_text(spec: LayerSpec, dtype: str, batch_class: int = 4, bias: bool = True) -> str:
    chain = Chain.of(spec, bias, "identity").text
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


def texts_of_monarch(spec: LayerSpec, dtype: str, batch: int, activation: str) -> tuple[Plan, list[str], list[str]]:
    """The plan of a layer that keeps the state between its contractions, and the texts of a training step with it and
    without it."""
    text, limits = Chain.of(spec, True, activation).text, (HOPPER.arch, HOPPER.sms, HOPPER.shared, HOPPER.memory)
    which = class_of_batch(batch)
    kept_text = planner.kept(text, dtype, *limits, which)

    def us(samples: int) -> Callable[[str], float]:
        return lambda each: plan_us(each, samples, dtype, HOPPER)

    def fits(chain: Chain) -> bool:
        return planner.has_plan(chain.text, dtype, *limits, which)

    worth = kept_if_worth_it(text, kept_text, fits, batch, us)
    steps = [[each for each, _ in step_texts(text, kept, fits, batch, us)] for kept in (worth, "")]
    return planner.plan_of(kept_text, dtype, which, HOPPER), *steps


@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_the_state_of_a_monarch_layer_is_kept(activation: str) -> None:
    plan, with_state, without = texts_of_monarch(monarch((28, 208), (192, 27), rank=9), "bfloat16", 4245, activation)
    buffers = [line.split(" ")[1:3] for line in plan.text().splitlines() if line.startswith("pass ")]
    assert [read for read, _ in buffers].count("@3") == [written for _, written in buffers].count("@3") == 1
    assert with_state[0].endswith(" kept 6804") and "kept" not in without[0]
    made_again = [text for text in without[1:] if text not in with_state]
    assert [Chain.parse(text).contractions[0].q for text in made_again] == [27 * 9]  # the first contraction, once more
    assert set(with_state[1:]) < set(without[1:])


def test_the_state_of_a_small_monarch_layer_is_not() -> None:
    _, with_state, without = texts_of_monarch(monarch((2, 8), (8, 2)), "float32", 100, "identity")
    assert with_state == without


@pytest.mark.parametrize("words", ["gelu", "backward", "turn 1 4 4"])
def test_texts_that_cannot_keep_states(words: str) -> None:
    text = Chain.of(kronecker((2, 2), (4, 4)), words == "backward", "identity").text + f"; {words}; kept 8"
    with pytest.raises(ValueError, match="states are kept by a Kronecker product"):
        Chain.parse(text)


def test_states_that_the_planner_does_not_keep_are_refused() -> None:
    text = kept_text(LARGE, "bfloat16")
    with pytest.raises(PlanError, match="other states than those between its passes"):
        planner.plan_of(text + "0", "bfloat16", 4, HOPPER)
