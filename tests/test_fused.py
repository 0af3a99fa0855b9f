"""v3's numbers: the rule for right (oracle.py), what may not mix, what may not be read, written or allocated.

PyTorch's integration (compile, export, torch.func, autocast, …) is in test_torch.py.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from forked import python
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    DTYPES,
    KINDS,
    LARGE_CASES,
    LAYOUTS,
    SMALL_SPECS,
    Case,
    cases,
    check_rule,
    check_rule_on,
    draw_inputs,
    dtype_id,
    kronecker,
    monarch,
    results,
    spec_id,
)
from torch import Tensor

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.autograd import layer_ops
from factorlayer.functional import run
from factorlayer.maths.spec import LayerSpec

TESTS = Path(__file__).parent
forward = torch.ops.factorlayer.forward
backward = torch.ops.factorlayer.backward

# Sizes that no block and no vector divides, in either layout of the states.
UNEVEN_CASES = [
    Case(kronecker((32, 32), (32, 32)), 37, True, "gelu"),
    Case(kronecker((7, 5), (3, 11), rank=2), 71, True, "tanh"),
    Case(kronecker((5, 3, 7), (4, 6, 2)), 67, True),
    Case(kronecker((4, 4), (4, 4)), 67, True, "silu"),  # neighbours small enough to be merged
    Case(kronecker((5, 4, 4), (6, 4, 4)), 67, True, "silu"),
    Case(monarch((8, 9), (7, 6), rank=2), 69, True, "silu"),
    Case(monarch((3, 4, 5), (5, 2, 3)), 66, True),
]


# Sizes that a CPU's kernels cut into phases: vectors that would be empty in one layout, states that leave the cache.
PHASES_CASES = [
    Case(kronecker((6, 55), (7, 2)), 33),  # few outputs of the last mode
    Case(kronecker((40, 51, 2), (30, 50, 2), rank=2), 9, activation="tanh"),  # little behind the second mode
    Case(kronecker((2, 2, 3, 49, 4), (2, 2, 3, 49, 4)), 22),
    Case(kronecker((8, 6, 16, 24, 8), (8, 6, 16, 24, 8), rank=2), 1),  # columns
    Case(kronecker((32, 4096), (8, 2048)), 2, bias=False),  # rows of whole pages
    Case(kronecker((4, 6, 164, 40), (5, 6, 164, 30)), 3),
    Case(monarch((43, 68), (68, 2), rank=4), 1),  # fewer samples than fill a vector
    Case(monarch((13, 36), (36, 10), rank=3), 5, activation="silu"),
    Case(monarch((3, 4, 50), (5, 20, 3)), 3),
    Case(monarch((40, 64), (32, 40), rank=2), 19),
]

# Fewer samples than threads, or an odd one more: threads share a layer's phases, of units, of columns and interleaved.
SHARED_CASES = [
    Case(kronecker((24, 8, 8, 40), (40, 8, 8, 24), rank=2), 1, True, "gelu"),
    Case(kronecker((60, 2, 3, 90), (41, 3, 2, 80), rank=3), 1, False),
    Case(kronecker((64, 48, 40), (48, 64, 24)), 3, True, "tanh"),
    Case(kronecker((8, 6, 16, 24, 8), (8, 6, 16, 24, 8), rank=2), 3, True),
]

# Few samples of untied weights: threads share the positions of each contraction, in the plain layout and interleaved,
# of one chunk and of several; more threads than positions, and positions along two modes, which are not shared.
POSITIONS_CASES = [
    Case(monarch((43, 68), (300, 43), rank=2), 1, True, "gelu"),
    Case(monarch((43, 68), (300, 43), rank=2), 3, False),
    Case(monarch((2, 90), (70, 2), rank=40), 37, True, "tanh"),
    Case(monarch((16, 40), (30, 8), rank=8), 100, True),
    Case(monarch((3, 4, 50), (5, 20, 3)), 66, True),
]

# The rule


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), badly_scaled=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=60)
def test_rule(kind: str, dtype: torch.dtype, data: st.DataObject, layout: str, badly_scaled: bool, seed: int) -> None:
    check_rule(data.draw(cases(kind)), dtype, seed, layout, badly_scaled)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", PHASES_CASES, ids=str)
def test_rule_in_phases(case: Case, dtype: torch.dtype) -> None:
    check_rule(case, dtype)


@pytest.mark.parametrize("badly_scaled", [False, True], ids=["", "badly-scaled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_rule_when_large(case: Case, dtype: torch.dtype, badly_scaled: bool) -> None:
    check_rule(case, dtype, badly_scaled=badly_scaled)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_rule_in_every_memory_layout(spec: LayerSpec, layout: str) -> None:
    check_rule(Case(spec, 9, True, "tanh"), torch.float32, layout=layout)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rule_for_every_activation(activation: str, dtype: torch.dtype) -> None:
    for spec in (kronecker((9, 8), (7, 6), rank=2), monarch((5, 6), (7, 8))):
        check_rule(Case(spec, 21, True, activation), dtype)


@pytest.mark.parametrize("sign", ["any", "positive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(
    "spec",
    [
        kronecker((5,), (7,)),
        kronecker((4, 8), (8, 4), rank=2),
        kronecker((16, 16), (16, 16)),
        monarch((4, 8), (8, 4)),
    ],
    ids=spec_id,
)
def test_rule_for_gradients_that_sum_over_many_samples(spec: LayerSpec, dtype: torch.dtype, sign: str) -> None:
    """One after the other in float32, 16384 summands would lose twenty times what torch's sums do."""
    case = Case(spec, 16384)
    inputs = draw_inputs(case, dtype, seed=0)
    if sign == "positive":
        for tensor in (inputs.x, inputs.bias, inputs.grad_y, *inputs.weights):
            tensor.abs_()
    check_rule_on(case, [inputs])


@pytest.mark.parametrize("equal", [False, True], ids=["normal", "equal"])
@pytest.mark.parametrize(
    "spec",
    [kronecker((1,), (1,)), kronecker((2, 2), (1, 2)), kronecker((2, 2), (2, 2)), kronecker((1, 4), (1, 8)),
     kronecker((3,), (5,)), kronecker((2,), (16,)), kronecker((4, 8), (4, 8)), monarch((2, 2), (2, 2))],
    ids=spec_id,
)  # fmt: skip
def test_a_biass_gradient_of_many_short_rows(spec: LayerSpec, equal: bool) -> None:
    """A block has thousands of them. Equal ones, as the gradient of a mean has, round in one direction: one behind
    another in float32, 5461 of 0.7 were off by 394 eps."""
    case = Case(spec, 100_003)
    inputs = draw_inputs(case, torch.float32, seed=0)
    if equal:
        inputs.grad_y.fill_(0.7)
    check_rule_on(case, [inputs])


@pytest.mark.parametrize("activation", ["identity", "relu", "square"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_small_integers_come_out_exactly(spec: LayerSpec, dtype: torch.dtype, activation: str) -> None:
    """-1, 0 and 1: every product and every sum of the reference is exact, so one wrong summand would show. What is
    left is the result's own rounding to its dtype."""
    case = Case(spec, 35, True, activation)
    inputs = draw_inputs(case, torch.float64, seed=1)
    whole = inputs.to(torch.float64)
    for tensor in (whole.x, whole.bias, whole.grad_y, *whole.weights):
        tensor.copy_(torch.randint(-1, 2, tensor.shape))
    right, found = results(case, whole, "naive"), results(case, whole.to(dtype), "fused")
    for name, value in right.items():
        assert torch.equal(found[name], value.to(dtype)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_no_samples(spec: LayerSpec, dtype: torch.dtype) -> None:
    case = Case(spec, 0, True, "relu")
    found = results(case, draw_inputs(case, dtype, seed=0), "fused")
    assert found["y"].shape == (0, spec.out_features)
    assert found["grad_x"].shape == (0, spec.in_features)
    for name, gradient in found.items():
        assert not gradient.any(), name


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_gradcheck(spec: LayerSpec) -> None:
    case = Case(spec, 3, True, "tanh")
    inputs = draw_inputs(case, torch.float64, seed=0)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.bias, *inputs.weights)]

    def call(x: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return run(spec, case.chain, x, weights, bias, "fused", "test")

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("exponent", [25, -25], ids=["huge-weights", "tiny-weights"])
@pytest.mark.parametrize(
    "spec", [kronecker((4, 4), (4, 4)), kronecker((32, 32), (32, 32)), monarch((4, 4), (4, 4))], ids=spec_id
)
def test_rule_where_a_product_of_weights_leaves_the_range(spec: LayerSpec, exponent: int) -> None:
    """x of 1e-30 times weights of 1e25 and 1e25 is 1e20 in float32, unless the weights are multiplied first."""
    case = Case(spec, 19, False)
    inputs = draw_inputs(case, torch.float32, seed=0)
    inputs.x.mul_(10.0 ** (-30 if exponent > 0 else 30))
    for weight in inputs.weights:
        weight.mul_(10.0**exponent)
    inputs.grad_y.mul_(10.0 ** (-20 if exponent > 0 else 20))
    check_rule_on(case, [inputs])


# What may not depend on what


def assert_bitwise(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, value in found.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_gradients_do_not_depend_on_which_are_wanted(spec: LayerSpec, activation: str) -> None:
    case = Case(spec, 35, True, activation)
    inputs = draw_inputs(case, torch.float32, seed=0)
    every = results(case, inputs, "fused")
    names = [name.removeprefix("grad_") for name in every if name != "y"]
    for size in range(len(names)):
        for wanted in itertools.combinations(names, size):
            assert_bitwise(results(case, inputs, "fused", wanted), every)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", UNEVEN_CASES + LARGE_CASES, ids=str)
def test_repeated_runs_are_bitwise_equal(case: Case, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    inputs = draw_inputs(case, dtype, seed=0)
    first = results(case, inputs, "fused")
    for _ in range(2):
        torch.full((1 << 16,), float("nan"))  # what fresh memory may hold
        assert_bitwise(results(case, inputs, "fused"), first)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_rule_with_threads(case: Case, threads: int) -> None:
    check_rule(case, torch.float32, threads=threads)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", SHARED_CASES + POSITIONS_CASES, ids=str)
def test_samples_that_threads_share(case: Case, dtype: torch.dtype, threads: int) -> None:
    """By the rule, and with the same bits in every run: whoever comes first takes what is left."""
    check_rule(case, dtype, threads=threads)
    torch.set_num_threads(threads)
    inputs = draw_inputs(case, dtype, seed=0)
    first = results(case, inputs, "fused")
    for _ in range(3):
        assert_bitwise(results(case, inputs, "fused"), first)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("case", UNEVEN_CASES + LARGE_CASES, ids=str)
def test_a_sample_does_not_depend_on_the_others(case: Case, dtype: torch.dtype, threads: int) -> None:
    """Beyond rounding, which may differ with a sample's place in a vector or a tile."""
    torch.set_num_threads(threads)
    inputs = draw_inputs(case, dtype, seed=0)
    together = results(case, inputs, "fused", ["x"])
    for n in {0, case.batch // 2, case.batch - 1}:
        alone = Case(case.spec, 1, case.bias, case.activation)
        one = type(inputs)(inputs.x[n : n + 1], inputs.weights, inputs.bias, inputs.grad_y[n : n + 1])
        for name, value in results(alone, one, "fused", ["x"]).items():
            error = (together[name][n].double() - value[0].double()).norm()
            assert error <= 8 * torch.finfo(dtype).eps * value.double().norm(), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("case", UNEVEN_CASES, ids=str)
def test_a_poisoned_sample_leaves_the_others_alone(case: Case, dtype: torch.dtype, poison: float, threads: int) -> None:
    """y and grad_x of every other sample keep their bits, wherever in a block the poisoned one lies."""
    torch.set_num_threads(threads)
    inputs = draw_inputs(case, dtype, seed=0)
    clean = results(case, inputs, "fused", ["x"])
    for n in {0, 1, 15, 16, 31, case.batch // 2, case.batch - 2, case.batch - 1}:
        x, grad_y = inputs.x.clone(), inputs.grad_y.clone()
        x[n], grad_y[n] = poison, poison
        found = results(case, type(inputs)(x, inputs.weights, inputs.bias, grad_y), "fused", ["x"])
        others = torch.arange(case.batch) != n
        for name in ("y", "grad_x"):
            assert torch.equal(found[name][others], clean[name][others]), (name, n)
            assert not found[name][n].isfinite().all(), (name, n)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["x", "weight_0", "weight_1", "bias", "grad_y"])
@pytest.mark.parametrize("case", UNEVEN_CASES, ids=str)
def test_nan_and_inf_go_through_as_in_batched(case: Case, where: str, poison: float) -> None:
    """NaN, inf and -inf in the same places of y and of every gradient. The numbers are positive, so that an infinity
    is not turned into NaN by its opposite, and the activation is left out: test_activations.py has those."""
    case = Case(case.spec, case.batch, case.bias)
    inputs = draw_inputs(case, torch.float32, seed=0)
    for tensor in (inputs.x, inputs.bias, inputs.grad_y, *inputs.weights):
        tensor.abs_()
    target = {"x": inputs.x, "bias": inputs.bias, "grad_y": inputs.grad_y}
    target |= {f"weight_{i}": weight for i, weight in enumerate(inputs.weights)}
    target[where].view(-1)[target[where].numel() // 3] = poison
    right, found = results(case, inputs, "batched"), results(case, inputs, "fused")
    for name, value in right.items():
        for has in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(has(found[name]), has(value)), f"{has.__name__} of {name}"


@pytest.mark.parametrize("where", [0, 1], ids=["weight_0", "weight_1"])
@pytest.mark.parametrize("case", UNEVEN_CASES, ids=str)
def test_an_infinite_weight_beside_zeros_goes_through_as_in_batched(case: Case, where: int) -> None:
    """inf · 0 is NaN only where the state is 0, not where a weight of an earlier contraction is."""
    case = Case(case.spec, case.batch, case.bias)
    inputs = draw_inputs(case, torch.float32, seed=0)
    for tensor in (inputs.x, inputs.bias, *inputs.weights):
        tensor.abs_()
    for weight in inputs.weights:
        weight.view(-1)[::2] = 0
    inputs.weights[where].view(-1)[0] = math.inf
    right, found = results(case, inputs, "batched", []), results(case, inputs, "fused", [])
    for has in (torch.isnan, torch.isposinf):
        assert torch.equal(has(found["y"]), has(right["y"])), has.__name__


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_forward_allocates_its_output_only(case: Case, dtype: torch.dtype) -> None:
    inputs = draw_inputs(case, dtype, seed=0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        y = run(case.spec, case.chain, inputs.x, inputs.weights, inputs.bias, "fused", "test")
    events = profile.profiler.kineto_results.events()
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert allocated == [y.numel() * y.element_size()]


RESIDENT = """
import sys, torch
from oracle import Case, draw_inputs, kronecker, monarch
from factorlayer.autograd import layer_ops
from factorlayer.functional import run

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

torch.set_num_threads(2)  # each keeps its own scratch
spec = {"kronecker": kronecker((32, 32), (32, 32)), "monarch": monarch((32, 32), (32, 32))}[sys.argv[1]]
dtype = getattr(torch, sys.argv[2])
case = Case(spec, 32768, True, "gelu")
small = draw_inputs(Case(spec, 64, True, "gelu"), dtype, 0)
x = torch.ones(case.batch, spec.in_features, dtype=dtype)
call = lambda x: run(spec, case.chain, x, small.weights, small.bias, "fused", "test")
call(small.x)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here
y = call(x)
print(status("VmHWM") - before - y.numel() * y.element_size())
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("structure", ["kronecker", "monarch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_holds_nothing_that_grows_with_the_batch(structure: str, dtype: str) -> None:
    """Nor the kernels' own scratch, which torch does not see: at 32768 samples one state is 64 or 128 MB, and the peak
    of resident memory is within 8 MB of what x, y and the weights take."""
    extra = int(run_python(RESIDENT, structure, dtype).stdout)
    assert extra < 8 << 20


# Builds


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [*python(), "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


CHECK_BUILD = """
import sys, torch
import oracle
from factorlayer.activations.named import ACTIVATIONS

try:
    chosen = torch.ops.factorlayer.instruction_set()
except RuntimeError as error:
    sys.exit(f"{error}")
assert chosen == sys.argv[1], chosen
torch.set_num_threads(1)
for j, dtype in enumerate(oracle.DTYPES):
    for i, spec in enumerate(oracle.SMALL_SPECS):
        oracle.check_rule(oracle.Case(spec, 35, True, list(ACTIVATIONS)[i % len(ACTIVATIONS)]), dtype)
    for i, case in enumerate(oracle.LARGE_CASES):
        oracle.check_rule(case, dtype, badly_scaled=True, threads=1 + (i + j) % 2)
x = torch.tensor([float("nan"), float("inf"), -float("inf"), 65504, 65519.996, 65520, 1e-8, 6e-8, 3e-5, -0.0, 1e9])
one = torch.ones(1, 1)
for dtype in (torch.float16, torch.bfloat16):  # conversions, both ways, are those of torch
    given = x.to(dtype)[:, None]
    doubled = torch.ops.factorlayer.forward(given, [one.to(dtype) * 2], None, "tied 0 1 1 1 1")
    torch.testing.assert_close(doubled, (given.float() * 2).to(dtype), rtol=0, atol=0, equal_nan=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("build", ["avx512", "avx2", "generic"])
def test_every_build(build: str) -> None:
    """FACTORLAYER_CPU chooses the build once per process, so each has one of its own; with one thread and two, in
    turn for each case and dtype."""
    done = run_python(CHECK_BUILD, build, FACTORLAYER_CPU=build)
    if "which this processor cannot run" in done.stderr and build != "generic":
        pytest.skip(f"this processor has no {build}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", ["torch.ops.factorlayer.instruction_set()", "layer(torch.ones(1, 4))"])
def test_an_unknown_build_is_refused(call: str) -> None:
    done = run_python(
        f"import torch, factorlayer\nlayer = factorlayer.FactorLinear(4, 4)\n{call}", FACTORLAYER_CPU="sse9"
    )
    assert done.returncode == 1
    assert (
        'RuntimeError: FACTORLAYER_CPU is "sse9", which this processor cannot run; leave it unset, or use one of '
        "avx512, avx2, generic" in done.stderr
    )


# The raw ops

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # of opcheck


@pytest.mark.parametrize("spec", SMALL_SPECS, ids=spec_id)
def test_opcheck(spec: LayerSpec) -> None:
    """With every check for every other layer with a bias, and for the others without one: tracing takes most time."""
    for bias in (False, True):
        case = Case(spec, 5, bias, "gelu")
        inputs = draw_inputs(case, torch.float32, seed=0)
        every = 2 ** (2 + len(inputs.weights)) - 1 - 2 * (not bias)
        arguments = inputs.weights, inputs.bias, case.chain.text
        checks = CHECKS if bias == bool(SMALL_SPECS.index(spec) % 2) else CHECKS[:-1]
        torch.library.opcheck(forward, (inputs.x, *arguments), test_utils=checks)
        for wanted in (every, 1, 4):
            torch.library.opcheck(backward, (inputs.grad_y, inputs.x, *arguments, wanted), test_utils=checks)


def test_what_is_wanted_comes_in_its_order() -> None:
    case = Case(kronecker((2, 3), (4, 5)), 6, True)
    inputs = draw_inputs(case, torch.float32, seed=0)
    names = ["grad_x", "grad_bias", "grad_weight_0", "grad_weight_1"]
    every = results(case, inputs, "fused")
    for wanted in range(16):
        found = backward(inputs.grad_y, inputs.x, inputs.weights, inputs.bias, case.chain.text, wanted)
        right = [every[name] for bit, name in enumerate(names) if wanted >> bit & 1]
        assert len(found) == len(right)
        assert all(map(torch.equal, found, right))


def test_raw_calls_read_any_strides_and_return_contiguous_tensors() -> None:
    x, weights, bias = torch.randn(7, 6), [torch.randn(4, 2), torch.randn(5, 3)], torch.randn(20)
    grad_y, chain = torch.randn(7, 20), TEXT + "; bias"
    right = [forward(x, weights, bias, chain), *backward(grad_y, x, weights, bias, chain, 15)]

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0].t().contiguous().t()

    arguments = strided(x), [strided(w) for w in weights], torch.stack([bias, bias], 1)[:, 0], chain
    assert not any(t.is_contiguous() for t in (arguments[0], *arguments[1], arguments[2], strided(grad_y)))
    found = [forward(*arguments), *backward(strided(grad_y), *arguments, 15)]
    assert all(map(torch.equal, found, right)) and all(t.is_contiguous() for t in found)


TEXT = "tied 1 2 3 5 1; tied 0 1 2 4 5"  # kronecker (2, 3) -> (4, 5)


def raw_arguments() -> dict[str, object]:
    weights = [torch.ones(4, 2), torch.ones(5, 3)]
    return {"x": torch.ones(7, 6), "weights": weights, "bias": None, "chain": TEXT}


WRONG_CALLS = {
    "x-too-wide": (dict(x=torch.ones(7, 5)), r"x must be \[batch, 6\]"),
    "x-not-a-matrix": (dict(x=torch.ones(6)), r"x must be \[batch, 6\]"),
    "x-integer": (
        dict(
            x=torch.ones(7, 6, dtype=torch.int32),
            weights=[torch.ones(s, dtype=torch.int32) for s in ((4, 2), (5, 3))],
        ),
        "x has a dtype that the fused kernels do not know",
    ),
    "another-dtype": (
        dict(x=torch.ones(7, 6).double()),
        "a weight must be a CPU tensor of x's dtype",
    ),
    "too-few-weights": (dict(weights=[torch.ones(4, 2)]), "the chain has 2 weights, 1 were given"),
    "too-many-weights": (dict(weights=[torch.ones(4, 2)] * 3), "the chain has 2 weights, 3 were given"),
    "swapped-weights": (
        dict(weights=[torch.ones(5, 3), torch.ones(4, 2)]),
        "a weight must be .* 15 elements; it has 8",
    ),
    "another-last-dimension": (  # with as many elements, and as many rows
        dict(weights=[torch.ones(2, 4, 1), torch.ones(5, 3)]),
        r"a weight must be \[..., 4, 2\]",
    ),
    "another-dimension-before-the-last": (
        dict(weights=[torch.ones(2, 2, 2), torch.ones(5, 3)]),
        r"a weight must be \[..., 4, 2\]",
    ),
    "bias-not-in-the-chain": (dict(bias=torch.ones(20)), "bias and chain disagree"),
    "bias-missing": (dict(chain=TEXT + "; bias"), "bias and chain disagree"),
    "bias-too-short": (
        dict(chain=TEXT + "; bias", bias=torch.ones(19)),
        "bias must be .* 20 elements; it has 19",
    ),
    "bias-not-a-vector": (dict(chain=TEXT + "; bias", bias=torch.ones(1, 20)), r"bias must be \[20\]"),
    "unknown-stage": (dict(chain=TEXT + "; gelo"), "unknown stage gelo"),
    "no-contraction": (dict(chain=""), "there is no contraction in it"),
    "sizes-missing": (
        dict(chain="tied 1 2 3 5"),
        "a contraction needs a weight index and four positive sizes",
    ),
    "size-zero": (dict(chain="tied 1 2 3 0 1; tied 0 1 2 4 0"), "four positive sizes"),
    "size-negative": (dict(chain="tied 1 -2 -3 5 1; tied 0 1 2 4 5"), "four positive sizes"),
    "size-not-a-number": (dict(chain="tied 1 two 3 5 1; tied 0 1 2 4 5"), "four positive sizes"),
    "size-beyond-64-bits": (dict(chain="tied 0 1 99999999999999999999 1 1"), "four positive sizes"),
    "weight-negative": (dict(chain="tied -1 2 3 5 1; tied 0 1 2 4 5"), "a weight index"),
    "weight-not-given": (dict(chain="tied 2 2 3 5 1; tied 0 1 2 4 5"), "weight 2, which was not given"),
    "sizes-disagree": (dict(chain="tied 1 2 3 5 1; tied 0 1 3 4 5"), "neighbouring contractions disagree"),
    "rank-zero": (dict(chain="rank 0; " + TEXT), "rank must be a positive integer"),
    "rank-missing": (dict(chain="rank; " + TEXT), "rank must be a positive integer"),
    "rank-not-in-the-weights": (dict(chain="rank 2; " + TEXT), "a weight must be .* 30 elements; it has 15"),
}


@pytest.mark.parametrize("shape", [(2, 4, 1), (2, 2, 2), (8,), (4, 2, 1)], ids=str)
def test_weights_of_other_dimensions_are_not_taken_at_once(shape: tuple[int, ...]) -> None:
    """Past the dispatcher: such a call is left to the raw ops, which say what is wrong with it."""
    if layer_ops.layer_at_once is layer_ops.not_at_once:
        pytest.skip("this PyTorch has other names for what it takes")
    x, last = torch.ones(7, 6), torch.ones(5, 3)
    assert layer_ops.layer_at_once(TEXT, TEXT, False, x, None, (torch.ones(4, 2), last)) is not None
    assert layer_ops.layer_at_once(TEXT, TEXT, False, x, None, (torch.ones(shape), last)) is None


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_raw_calls_raise(name: str) -> None:
    change, message = WRONG_CALLS[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        forward(**{**raw_arguments(), **change})
    arguments = {**raw_arguments(), **change}
    with pytest.raises((ValueError, RuntimeError), match=message):
        backward(grad_y=torch.ones(7, 20, dtype=arguments["x"].dtype), **arguments, wanted=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(grad_y=torch.ones(7, 19)), "grad_y must be .* 140 elements; it has 133"),
        (dict(grad_y=torch.ones(7, 20).double()), "grad_y must be .* x's dtype"),
        (dict(wanted=2), "a gradient is wanted of something that was not given"),
        (dict(wanted=16), "a gradient is wanted of something that was not given"),
        (dict(wanted=-1), "a gradient is wanted of something that was not given"),
    ],
    ids=["too-narrow", "another-dtype", "bias-not-given", "weight-not-given", "negative"],
)
def test_wrong_raw_backward_calls_raise(change: dict[str, object], message: str) -> None:
    arguments = {"grad_y": torch.ones(7, 20), **raw_arguments(), "wanted": 1, **change}
    with pytest.raises(RuntimeError, match=message):
        backward(**arguments)


@pytest.mark.parametrize(
    ("chain", "weights"),
    [
        ("tied 0 2 2 2 1; tied 0 1 2 2 2", 2),
        ("tied 1 2 2 2 1; relu; tied 0 1 2 2 2", 2),
        ("tied 1 2 2 2 1; bias; tied 0 1 2 2 2", 2),
        ("tied 1 2 2 2 1 1; tied 0 1 2 2 2", 2),
        ("tied 1 2 2 2 1; tied 0 1 2 2 2; relu; tanh", 2),
        ("tied 1 2 2 2 1; tf32; tied 0 1 2 2 2", 2),
        ("tied 1 2 2 2 1; tied 0 1 2 2 2; tf32; relu", 2),
        ("tf32; tied 1 2 2 2 1; tied 0 1 2 2 2", 2),
    ],
    ids=[
        "a-weight-twice",
        "activation-between",
        "bias-between",
        "a-fifth-size",
        "two-activations",
        "tf32-between",
        "tf32-before-the-activation",
        "tf32-first",
    ],
)
def test_a_chain_that_the_engine_cannot_run_is_refused(chain: str, weights: int) -> None:
    """Rather than run as another one: of a weight named twice, the gradient of the other is never written."""
    given = [torch.ones(2, 2) for _ in range(weights)]
    with pytest.raises((ValueError, RuntimeError)):
        forward(torch.ones(3, 4), given, torch.ones(4) if "bias" in chain else None, chain)


def test_the_cpu_has_no_use_for_tf32() -> None:
    arguments = raw_arguments()
    right = forward(**arguments)
    assert torch.equal(forward(**{**arguments, "chain": TEXT + "; tf32"}), right)


def test_sizes_that_overflow_are_refused() -> None:
    """In a process of its own: 2^33 · 2^31 is 0 in 64 bits."""
    done = run_python(
        "import torch, factorlayer\n"
        "torch.ops.factorlayer.forward(torch.ones(3, 0), [torch.ones(1, 1)], None, 'tied 0 8589934592 1 1 2147483648')"
    )
    assert done.returncode == 1, f"ended by signal {-done.returncode}"
    assert "Error" in done.stderr
