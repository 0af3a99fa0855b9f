"""The raw ops of a stack: the rule for right numbers (oracle.py) against its layers one by one, and what is refused."""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from forked import python
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    DTYPES,
    LAYOUTS,
    Case,
    draw_inputs,
    dtype_id,
    kronecker,
    longest_sum_root,
    monarch,
    relative_errors,
    spec_id,
    with_layout,
)
from torch import Tensor

from factorlayer.activations.expression import X, parameter
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.functional import run
from factorlayer.maths.spec import LayerSpec

stack_forward = torch.ops.factorlayer.stack_forward
stack_backward = torch.ops.factorlayer.stack_backward
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Stack:
    """Layers one behind another, all for one batch."""

    layers: tuple[Case, ...]

    @property
    def batch(self) -> int:
        return self.layers[0].batch

    @property
    def text(self) -> str:
        return " | ".join(layer.chain.text for layer in self.layers)

    def __str__(self) -> str:
        return "-then-".join(f"{spec_id(layer.spec)}-{layer.activation}" for layer in self.layers) + f"-n{self.batch}"


@dataclass(frozen=True)
class Given:
    """What the ops take."""

    grad_y: Tensor
    x: Tensor
    tensors: list[Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> Given:
        return Given(change(self.grad_y), change(self.x), [change(t) for t in self.tensors])


def stack_of(batch: int, *layers: tuple[LayerSpec, str], bias: bool = True) -> Stack:
    return Stack(tuple(Case(spec, batch, bias, activation) for spec, activation in layers))


def dense(*features: int, activation: str, batch: int) -> Stack:
    """An MLP, whose last layer has no activation."""
    pairs = list(itertools.pairwise(features))
    layers = [(kronecker((p,), (q,)), activation) for p, q in pairs[:-1]]
    return stack_of(batch, *layers, (kronecker((pairs[-1][0],), (pairs[-1][1],)), "identity"))


def draw_given(stack: Stack, dtype: torch.dtype, seed: int, layout: str = "contiguous") -> Given:
    parts = [draw_inputs(layer, dtype, 100 * seed + i, layout) for i, layer in enumerate(stack.layers)]
    tensors = [t for part in parts for t in (*part.weights, part.bias) if t is not None]
    return Given(parts[-1].grad_y, parts[0].x, tensors)


def by_the_ops(stack: Stack, given: Given) -> Results:
    places = list(range(len(given.tensors) + 1))
    gradients = stack_backward(given.grad_y, given.x, given.tensors, stack.text, places)
    y = stack_forward(given.x, given.tensors, stack.text)
    return {"y": y} | {f"gradient {i}": g for i, g in zip(places, gradients, strict=True)}


def layer_by_layer(stack: Stack, given: Given, implementation: str) -> Results:
    x, *tensors = leaves = [t.detach().requires_grad_() for t in (given.x, *given.tensors)]
    rest = iter(tensors)
    for layer in stack.layers:
        weights = [next(rest) for _ in layer.chain.contractions]
        x = run(layer.spec, layer.chain, x, weights, next(rest) if layer.bias else None, implementation, "test")
    gradients = torch.autograd.grad(x, leaves, given.grad_y)
    return {"y": x.detach()} | {f"gradient {i}": g for i, g in enumerate(gradients)}


def check_rule(
    stack: Stack, dtype: torch.dtype, seed: int = 0, layout: str = "contiguous", threads: int | None = None
) -> None:
    """The rule of oracle.py, with what it allows where the reference itself moves as far with an eps in the inputs."""
    fewest = min(t.numel() for t in draw_given(stack, torch.float64, 0).tensors)
    draws = [draw_given(stack, dtype, seed + i, layout) for i in range(max(1, min(12, 64 // fewest)))]
    right = [layer_by_layer(stack, d.map(Tensor.double), "naive") for d in draws]
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    found = [by_the_ops(stack, d) for d in draws]
    torch.set_num_threads(before)
    for one, reference in zip(found, right, strict=True):
        for name, value in one.items():
            assert (value.shape, value.dtype) == (reference[name].shape, dtype), name
            assert value.is_contiguous(), name
    of_ops = relative_errors(found, right)
    of_batched = relative_errors([layer_by_layer(stack, d, "batched") for d in draws], right)
    uncertain = max(map(longest_sum_root, stack.layers)) if dtype == torch.float64 else 1.0
    allowed = {name: 2 * error + 4 * uncertain * torch.finfo(dtype).eps for name, error in of_batched.items()}
    if all(of_ops[name] <= allowed[name] for name in allowed):
        return
    moves = movement(stack, draws, right, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)
    wrong = {
        name: f"the ops are off by {of_ops[name]:.2e}, batched by {of_batched[name]:.2e}"
        for name in of_ops
        if not of_ops[name] <= max(allowed[name], 2 * uncertain * moves[name])
    }
    assert not wrong, f"{stack}, {dtype}: {wrong}"


def movement(stack: Stack, draws: Sequence[Given], right: Sequence[Results], eps: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)

    def move(tensor: Tensor) -> Tensor:
        signs = 2 * torch.randint(0, 2, tensor.shape, generator=generator).double() - 1
        return tensor.double() * (1 + eps * signs)

    tries = [relative_errors([layer_by_layer(stack, d.map(move), "naive") for d in draws], right) for _ in range(4)]
    return {name: max(one[name] for one in tries) for name in right[0]}


# Small layers of every kind, that fit behind each other.
FEATURES = (1, 7, 12, 32, 40)
FACTORS = {n: [f for f in itertools.product(range(1, n + 1), repeat=3) if math.prod(f) == n] for n in FEATURES}
ONE_LAYER = [
    kronecker((4, 5), (6, 7)),
    kronecker((3, 2, 2), (2, 3, 2), rank=3),
    monarch((3, 4), (2, 5), rank=2),
    kronecker((9,), (33,)),
]
STACKS = [
    dense(20, 20, 20, 20, 20, activation="tanh", batch=133),
    dense(48, 64, 12, 1, activation="relu", batch=70),
    dense(300, 700, 300, activation="gelu", batch=21),  # few samples for such weights
    dense(300, 200, 1030, activation="relu", batch=600),  # several blocks even so
    stack_of(70, (kronecker((32, 32), (32, 32)), "gelu"), (kronecker((32, 32), (32, 32)), "identity")),
    stack_of(
        69,
        (monarch((8, 9), (7, 6), rank=2), "silu"),
        (kronecker((42,), (30,)), "relu"),
        (monarch((5, 6), (6, 5)), "sine"),
    ),
    stack_of(67, (kronecker((5, 4, 4), (6, 4, 4)), "identity"), (kronecker((8, 12), (4, 4), rank=3), "softplus")),
    # Narrow ones of many samples: one block and several, not all of them whole
    dense(14, 4, 4, 4, 12, activation="relu", batch=700),
    dense(3, 1, 5, 2, activation="sine", batch=131),
    dense(2, 3, 3, 9, activation="gelu", batch=256),
    stack_of(
        203,
        (kronecker((2, 3), (3, 2), rank=2), "relu"),
        (kronecker((6,), (5,)), "tanh"),
        (kronecker((5,), (2,)), "square"),
    ),
]


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    features = draw(st.lists(st.sampled_from(list(FACTORS)), min_size=2, max_size=5))
    batch = draw(st.sampled_from([1, 2, 7, 16, 17, 33, 65, 150]))

    def factors(n: int, count: int) -> tuple[int, ...]:
        chosen = draw(st.sampled_from(FACTORS[n]))
        return (*chosen[: count - 1], math.prod(chosen[count - 1 :]))

    layers = []
    for p, q in itertools.pairwise(features):
        count, structure = draw(st.integers(1, 3)), draw(st.sampled_from(["kronecker", "monarch"]))
        spec = LayerSpec(structure, factors(p, count), factors(q, count))
        most = 1 if structure == "monarch" and count == 3 else min(3, spec.max_rank)
        spec = replace(spec, rank=draw(st.integers(1, most)))
        activation = draw(st.one_of(st.just("identity"), st.sampled_from(list(ACTIVATIONS))))
        layers.append(Case(spec, batch, draw(st.booleans()), activation))
    return Stack(tuple(layers))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@given(stack=stacks(), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 999))
@settings(max_examples=60)
def test_rule(dtype: torch.dtype, stack: Stack, layout: str, seed: int) -> None:
    check_rule(stack, dtype, seed, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_rule_with_several_threads(stack: Stack, dtype: torch.dtype) -> None:
    for threads in (1, 2, 3):
        check_rule(stack, dtype, threads=threads)


@pytest.mark.parametrize("spec", ONE_LAYER, ids=spec_id)
def test_a_stack_of_one_layer_is_that_layer(spec: LayerSpec) -> None:
    stack = stack_of(35, (spec, "gelu"))
    given = draw_given(stack, torch.float32, 0)
    *weights, bias = given.tensors
    arguments = given.x, weights, bias, stack.text
    y = torch.ops.factorlayer.forward(*arguments)
    grad_x, grad_bias, *rest = torch.ops.factorlayer.backward(given.grad_y, *arguments, 2 ** (len(weights) + 2) - 1)
    right = [y, grad_x, *rest, grad_bias]
    assert all(map(torch.equal, by_the_ops(stack, given).values(), right))


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_repeated_runs_give_the_same_bits(stack: Stack) -> None:
    given = draw_given(stack, torch.float32, 0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        first = by_the_ops(stack, given)
        for _ in range(3):
            again = by_the_ops(stack, given)
            assert all(torch.equal(again[name], value) for name, value in first.items())


SUBSETS = [
    (dense(6, 5, 4, activation="tanh", batch=6), 32),
    (dense(6, 5, 4, activation="tanh", batch=200), 32),
    (stack_of(6, (kronecker((2, 3), (3, 2)), "identity"), (monarch((2, 3), (4, 5)), "relu"), bias=False), 32),
    (stack_of(18, (kronecker((2, 3), (3, 2), rank=2), "relu"), (kronecker((6,), (5,)), "identity"), bias=False), 16),
    (
        stack_of(6, (kronecker((6,), (7,)), "elu"), (monarch((7,), (5,)), "identity"), (kronecker((5,), (2,)), "elu")),
        128,
    ),
]


@pytest.mark.parametrize(("stack", "subsets"), SUBSETS, ids=str)
def test_any_gradients_may_be_wanted(stack: Stack, subsets: int) -> None:
    given = draw_given(stack, torch.float32, 0)
    every = list(by_the_ops(stack, given).values())[1:]
    assert subsets == 2 ** len(every)
    for mask in range(subsets):
        wanted = [i for i in range(len(every)) if mask >> i & 1]
        found = stack_backward(given.grad_y, given.x, given.tensors, stack.text, wanted)
        assert len(found) == len(wanted)
        assert all(torch.equal(f, every[place]) for f, place in zip(found, wanted, strict=True)), wanted


@pytest.mark.parametrize("batch", [9, 150])
def test_what_is_not_needed_is_not_read(batch: int) -> None:
    """A layer's states matter to its own weights and to what is behind it, which a NaN shows."""
    stack = stack_of(batch, *[(kronecker((4,), (4,)), "identity")] * 3)
    given = draw_given(stack, torch.float32, 0)
    given.x[3, 2] = math.nan
    for wanted in ([2], [4, 6], [0], [2, 4]):  # biases and x: of linear layers, whatever x is
        assert all(g.isfinite().all() for g in stack_backward(given.grad_y, given.x, given.tensors, stack.text, wanted))
    for wanted in ([1], [3], [5]):
        assert stack_backward(given.grad_y, given.x, given.tensors, stack.text, wanted)[0].isnan().any()


def test_a_shared_weight_has_a_gradient_at_each_place() -> None:
    weight, x, grad_y = torch.randn(5, 5), torch.randn(9, 5), torch.randn(9, 5)
    text = "tied 0 1 5 5 1; tanh | tied 0 1 5 5 1"
    apart = stack_backward(grad_y, x, [weight, weight.clone()], text, [1, 2])
    shared = stack_backward(grad_y, x, [weight, weight], text, [1, 2])
    assert all(map(torch.equal, shared, apart))
    leaf = weight.clone().requires_grad_()
    right = torch.autograd.grad((x @ leaf.mT).tanh() @ leaf.mT, leaf, grad_y)[0]
    torch.testing.assert_close(shared[0] + shared[1], right)


@pytest.mark.parametrize("batch", [9, 3000])
def test_learned_parameters_stand_behind_a_layers_weights(batch: int) -> None:
    program = (parameter(0) * X * X + parameter(1) * X).program
    text = f"tied 0 1 6 20 1; bias; {program} | tied 0 1 20 5 1; {program}"
    sizes = [(20, 6), (), (), (20,), (5, 20), (), ()]
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(batch, 6), *sizes]]

    def layer(x: Tensor, weight: Tensor, p: Tensor, q: Tensor, bias: Tensor | float) -> Tensor:
        z = x @ weight.mT + bias
        return p * z * z + q * z

    x, w, p, q, bias, *last = leaves
    y = layer(layer(x, w, p, q, bias), *last, 0)
    grad_y = torch.randn_like(y)
    right = torch.autograd.grad(y, leaves, grad_y)
    x, *tensors = [leaf.detach() for leaf in leaves]
    torch.testing.assert_close(stack_forward(x, tensors, text), y.detach())
    for threads, wanted in itertools.product((1, 2), (range(8), [2], [3, 6], [7], [4, 5])):
        torch.set_num_threads(threads)
        found = stack_backward(grad_y, x, tensors, text, list(wanted))
        torch.testing.assert_close(found, [right[place] for place in wanted])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_no_samples(stack: Stack, dtype: torch.dtype) -> None:
    empty = Stack(tuple(replace(layer, batch=0) for layer in stack.layers))
    found = by_the_ops(empty, draw_given(empty, dtype, 0))
    assert found["y"].shape == (0, stack.layers[-1].spec.out_features)
    assert found["gradient 0"].shape == (0, stack.layers[0].spec.in_features)
    assert not any(value.any() for value in found.values())


LINEAR_STACKS = [
    Stack(tuple(replace(layer, activation="identity") for layer in stack.layers))
    for stack in (*STACKS[:3], *STACKS[5:])
]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("stack", LINEAR_STACKS, ids=str)
def test_nan_and_inf_go_through_as_in_batched(stack: Stack, poison: float) -> None:
    """In x, grad_y, or any weight or bias; the numbers are positive, so that no infinity meets its opposite."""
    clean = draw_given(stack, torch.float32, 0).map(Tensor.abs)
    for place in range(-2, len(clean.tensors)):
        given = clean.map(Tensor.clone)
        target = [given.grad_y, given.x, *given.tensors][place + 2]
        target.view(-1)[target.numel() // 3] = poison
        right, found = layer_by_layer(stack, given, "batched"), by_the_ops(stack, given)
        for name, value in right.items():
            for has in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(has(found[name]), has(value)), f"{has.__name__} of {name}, {poison} at {place}"


@pytest.mark.parametrize("layout", ["transposed", "strided"])
@pytest.mark.parametrize("stack", STACKS[2:], ids=str)
def test_any_strides(stack: Stack, layout: str) -> None:
    given = draw_given(stack, torch.float32, 0)
    strided = given.map(lambda t: with_layout(t, layout))
    assert not (strided.x.is_contiguous() or strided.grad_y.is_contiguous())
    found, right = by_the_ops(stack, strided), by_the_ops(stack, given)
    assert all(torch.equal(found[name], value) for name, value in right.items())


def test_the_cpu_has_no_use_for_tf32() -> None:
    stack = STACKS[1]
    given = draw_given(stack, torch.float32, 0)
    text = " | ".join(layer.chain.tf32_text for layer in stack.layers)
    assert text.count("tf32") == 3
    assert torch.equal(stack_forward(given.x, given.tensors, text), by_the_ops(stack, given)["y"])


# Memory


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_forward_allocates_its_output_only(stack: Stack) -> None:
    given = draw_given(stack, torch.float32, 0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        y = stack_forward(given.x, given.tensors, stack.text)
    events = profile.profiler.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert allocated == [y.numel() * y.element_size()]


RESIDENT = """
import torch
from test_stack_ops import draw_given, dense, stack_forward

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

torch.set_num_threads(2)  # each keeps its own scratch
stack = dense(16, 512, 512, 16, activation="relu", batch=64)
small = draw_given(stack, torch.float32, 0)
x = torch.ones(1 << 16, 16)
stack_forward(small.x, small.tensors, stack.text)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here
y = stack_forward(x, small.tensors, stack.text)
print(status("VmHWM") - before - y.numel() * y.element_size())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="peak memory is read from /proc")
def test_forward_holds_nothing_that_grows_with_the_batch() -> None:
    """A hidden state of 65536 samples would be 128 MB."""
    done = run_python(RESIDENT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 << 20


# Builds


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [*python(), "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


CHECK_BUILD = """
import sys, torch
from test_stack_ops import DTYPES, STACKS, check_rule

try:
    torch.ops.factorlayer.instruction_set()
except RuntimeError as error:
    sys.exit(f"{error}")
torch.set_num_threads(1)
for dtype in DTYPES:
    for stack in STACKS:
        check_rule(stack, dtype)
"""


@pytest.mark.long
@pytest.mark.parametrize("build", ["avx2", "generic"])
def test_every_build(build: str) -> None:
    """The best that this processor runs is what all other tests run."""
    done = run_python(CHECK_BUILD, FACTORLAYER_CPU=build)
    if "which this processor cannot run" in done.stderr and build != "generic":
        pytest.skip(f"this processor has no {build}")
    assert done.returncode == 0, done.stderr


# Wrong calls

TEXT = "tied 1 2 3 5 1; tied 0 1 2 4 5; bias; relu | tied 0 1 20 3 1"  # kronecker (2, 3) -> (4, 5), then 20 -> 3


def raw_arguments() -> dict[str, object]:
    tensors = [torch.ones(4, 2), torch.ones(5, 3), torch.ones(20), torch.ones(3, 20)]
    return {"x": torch.ones(7, 6), "tensors": tensors, "stack": TEXT}


FIRST, LAST = TEXT.split(" | ")
TENSORS = list(raw_arguments()["tensors"])  # type: ignore[call-overload]
WRONG_CALLS = {
    "x-too-wide": (dict(x=torch.ones(7, 5)), r"x must be \[batch, 6\]"),
    "x-not-a-matrix": (dict(x=torch.ones(6)), r"x must be \[batch, 6\]"),
    "x-integer": (dict(x=torch.ones(7, 6, dtype=torch.int32)), "x has a dtype that the fused kernels do not know"),
    "another-dtype": (dict(x=torch.ones(7, 6).double()), "a weight must be a CPU tensor of x's dtype"),
    "too-few": (dict(tensors=TENSORS[:3]), "have 4 weights and biases, 3 were given"),
    "too-many": (dict(tensors=[*TENSORS, TENSORS[0]]), "have 4 weights and biases, 5 were given"),
    "swapped": (dict(tensors=[TENSORS[1], TENSORS[0], *TENSORS[2:]]), "a weight must be .* 15 elements; it has 8"),
    "a-last-weight-too-small": (
        dict(tensors=[*TENSORS[:3], torch.ones(3, 19)]),
        "a weight must be .* 60 elements; it has 57",
    ),
    "bias-too-short": (
        dict(tensors=[*TENSORS[:2], torch.ones(19), TENSORS[3]]),
        "bias must be .* 20 elements; it has 19",
    ),
    "bias-not-a-vector": (
        dict(tensors=[*TENSORS[:2], torch.ones(1, 20), TENSORS[3]]),
        r"bias must be \[20\]",
    ),
    "no-layer": (dict(stack=""), "there is no contraction in it"),
    "an-empty-layer": (dict(stack=TEXT + " | "), "there is no contraction in it"),
    "an-empty-layer-between": (dict(stack=f"{FIRST} |  | {LAST}"), "there is no contraction in it"),
    "joined-without-spaces": (dict(stack=f"{FIRST}|{LAST}"), "unknown stage|one word too many|wrong place"),
    "unknown-stage": (dict(stack=TEXT + "; gelo"), "unknown stage gelo"),
    "layers-disagree": (
        dict(stack=f"{FIRST} | tied 0 1 21 3 1"),
        "a layer with 21 inputs stands behind one with 20 outputs",
    ),
    "sizes-disagree": (dict(stack=f"tied 1 2 3 5 1; tied 0 1 3 4 5 | {LAST}"), "neighbouring contractions disagree"),
    "weight-of-another-layer": (dict(stack=f"{FIRST} | tied 2 1 20 3 1"), "weight 2, which was not given"),
    "size-negative": (dict(stack=f"{FIRST} | tied 0 1 20 -3 1"), "four positive sizes"),
    "rank-zero": (dict(stack=f"{FIRST} | rank 0; {LAST}"), "rank must be a positive integer"),
    "rank-not-in-the-weights": (
        dict(stack=f"{FIRST} | rank 2; {LAST}"),
        "a weight must be .* 120 elements; it has 60",
    ),
    "gradient": (dict(stack=f"{FIRST} | {LAST}; gradient"), '"turned" and "turn" make no layer'),
    "backward": (
        dict(stack="tied 0 1 6 6 1; backward | tied 0 1 6 3 1"),
        '"backward", "turned" and "turn" make no layer',
    ),
    "all gradients": (dict(stack=f"{FIRST} | {LAST} | backward"), 'or "frozen" is no text for this op'),
    "states": (dict(stack=f"{FIRST} | {LAST} | states"), 'or "frozen" is no text for this op'),
    "frozen": (dict(stack=f"{FIRST} | {LAST} | frozen"), 'or "frozen" is no text for this op'),
    "states-too-large": (
        dict(stack=" | ".join(["tied 0 1 1 1 140737488355328"] * 2)),
        "its states are more than memory can hold",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_raise(name: str) -> None:
    change, message = WRONG_CALLS[name]
    arguments = {**raw_arguments(), **change}
    with pytest.raises((ValueError, RuntimeError), match=message):
        stack_forward(**arguments)
    with pytest.raises((ValueError, RuntimeError), match=message):
        stack_backward(torch.ones(7, 3, dtype=arguments["x"].dtype), **arguments, wanted=[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(grad_y=torch.ones(7, 4)), "grad_y must be .* 21 elements; it has 28"),
        (dict(grad_y=torch.ones(7, 3).double()), "grad_y must be .* x's dtype"),
        (dict(wanted=[5]), "`wanted` should be ascending places .* 4 tensors .* 5 is out of place"),
        (dict(wanted=[-1]), "-1 is out of place"),
        (dict(wanted=[0, 2, 1]), "1 is out of place"),
        (dict(wanted=[0, 2, 2]), "2 is out of place"),
    ],
    ids=["too-wide", "another-dtype", "behind-the-last", "negative", "descending", "twice"],
)
def test_wrong_backward_calls_raise(change: dict[str, object], message: str) -> None:
    arguments = {"grad_y": torch.ones(7, 3), **raw_arguments(), "wanted": [0, 1], **change}
    with pytest.raises(RuntimeError, match=message):
        stack_backward(**arguments)


def test_a_stack_is_no_chain() -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"wrong place|too many"):
        torch.ops.factorlayer.forward(torch.ones(7, 4), [torch.ones(4, 4)], None, "tied 0 1 4 4 1 | tied 0 1 4 4 1")
