"""v3 on a GPU: right numbers for every dtype, structure, size, layout and kind of number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forward_rule import DTYPES, arithmetic, check_forward, check_forward_on, draw, forward, forward_on_poison, to_gpu
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import KINDS, LAYOUTS, PRELU, SINE, Case, Inputs, cases, kronecker, monarch
from torch import Tensor

from factorlayer import factor_linear
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.activations.tracing import trace
from factorlayer.kernels.batches import MOST
from factorlayer.maths.spec import LayerSpec

dtypes = pytest.mark.parametrize("dtype", DTYPES)

CASES = [
    Case(kronecker((1,), (1,)), 1),
    Case(kronecker((7, 1, 13), (7, 1, 13)), 7, True, "silu"),
    Case(kronecker((32, 32), (32, 32)), 16, True, "gelu"),
    Case(kronecker((97, 31), (97, 31)), 5),
    Case(kronecker((84, 124), (84, 124)), 64, False),
    Case(kronecker((127, 128), (127, 128)), 21, True, "tanh"),
    Case(kronecker((128, 128), (128, 128)), 32),
    Case(kronecker((20, 28), (36, 44)), 33),
    Case(kronecker((8, 256), (256, 8)), 40, True, "relu"),
    Case(kronecker((128, 128), (128, 128)), 300, True, "relu"),
    Case(kronecker((112, 128), (112, 128)), 2100, False),
    Case(kronecker((41, 100), (72, 68)), 1100, True, "gelu"),
    Case(kronecker((600, 128), (24, 96)), 300, False),
    Case(kronecker((32, 128), (32, 128)), 3000, False),
    Case(kronecker((40, 32), (56, 48)), 300, True, "gelu"),
    Case(kronecker((4, 40, 32), (6, 56, 48)), 700, True, "silu"),
    Case(kronecker((1, 40, 32), (1, 56, 48)), 700),
    Case(kronecker((2, 64, 64), (2, 64, 64)), 2100, False),
    Case(kronecker((1000, 3), (1000, 3)), 9),
    Case(kronecker((3, 1000), (3, 1000)), 9, False),
    Case(kronecker((64,), (300,)), 65),
    Case(kronecker((13, 48), (13, 48)), 16, False),
    Case(kronecker((12,) * 4, (12,) * 4), 70, False),
    Case(kronecker((3, 5, 4), (7, 2, 9)), 2100),
    Case(kronecker((8,) * 5, (8,) * 5), 300, False),
    Case(kronecker((8,) * 4, (8,) * 4), 2100, True, "gelu"),
    Case(kronecker((12,) * 5, (12,) * 5), 16, False),
    Case(kronecker((64, 64, 64), (64, 64, 64)), 5),
    Case(kronecker((4,) * 6, (4,) * 6), 3),
    Case(kronecker((16, 32), (24, 8), rank=3), 19, True, "gelu_tanh"),
    Case(kronecker((13, 5, 3), (6, 17, 3), rank=2), 5),
    Case(kronecker((48, 40), (40, 64), rank=5), 300, True, "gelu"),
    Case(kronecker((96, 72), (72, 96), rank=2), 2100, True),
    Case(kronecker((64, 64, 64), (16, 64, 64), rank=2), 3, True),
    Case(monarch((32, 32), (32, 32)), 70, True, "gelu"),
    Case(monarch((97, 31), (31, 97)), 17),
    Case(monarch((8, 64), (48, 16), rank=4), 2060, True, "sine"),
    Case(monarch((1, 512), (512, 1), rank=7), 33, False),
    Case(monarch((4, 192), (4, 192), rank=4), 300, True, "relu"),
    Case(monarch((16, 64), (16, 64), rank=4), 2100, True, "gelu"),
    Case(monarch((64, 64), (64, 64)), 300),
    Case(monarch((32, 24), (64, 48), rank=4), 2060, True, "gelu"),
    Case(monarch((8, 128), (8, 64)), 2100, False),
    Case(monarch((4, 192), (192, 4), rank=48), 2060, True, "gelu"),
    Case(monarch((5, 120), (40, 8), rank=16), 2100, False),
    Case(kronecker((8, 256), (8, 512)), 2100, True, "silu"),
    Case(monarch((8, 8, 8), (8, 8, 8)), 64),
    Case(monarch((12, 11, 10), (9, 12, 13)), 40, True, "softplus"),
    Case(monarch((2, 3, 4), (3, 2, 2)), 2),
]
# One for each path of the engine: all on chip, two large factors, several terms, several passes, untied.
FEW = [
    Case(kronecker((13, 24), (20, 7)), 37),
    Case(kronecker((90, 72), (24, 32)), 300),
    Case(kronecker((6, 9), (8, 5), rank=2), 37),
    Case(kronecker((3, 1000), (5, 300)), 37),
    Case(monarch((6, 10), (9, 7)), 37),
    Case(monarch((16, 64), (40, 16), rank=4), 37),
    Case(monarch((16, 64), (16, 64), rank=4), 70),
    Case(monarch((4, 3, 5), (2, 6, 3)), 37),
    Case(kronecker((8,) * 5, (8,) * 5), 300),
]
few = pytest.mark.parametrize("case", FEW, ids=str)
PROGRAMS = [*(trace(module)[0].program for module in (torch.nn.Mish(), torch.nn.Hardswish())), PRELU, SINE]
activations = pytest.mark.parametrize(
    "activation", [*ACTIVATIONS, *PROGRAMS], ids=lambda text: f"program-{PROGRAMS.index(text)}" if "/" in text else text
)


def on_gpu(case: Case, dtype: str, seed: int = 0) -> Inputs:
    return to_gpu(draw(case, dtype, seed)[0])


# The rule


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, dtype: str) -> None:
    check_forward(case, dtype)


@dtypes
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), badly_scaled=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))
def test_rule_on_layers_drawn_at_random(
    dtype: str, data: st.DataObject, layout: str, badly_scaled: bool, seed: int
) -> None:
    case = data.draw(cases(data.draw(st.sampled_from(KINDS))))
    check_forward(case, dtype, seed, layout, badly_scaled)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@activations
def test_bias_and_activations(activation: str, bias: bool, dtype: str) -> None:
    if dtype == "float64" and not bias:
        check_forward(Case(monarch((4, 6), (5, 3)), 50, bias, activation), dtype)
    else:
        check_forward(Case(kronecker((4, 6), (5, 7)), 50, bias, activation), dtype)


@dtypes
@few
@pytest.mark.parametrize("activation", [PRELU, SINE], ids=["prelu", "sine"])
def test_learned_parameters(case: Case, dtype: str, activation: str) -> None:
    check_forward(replace(case, activation=activation), dtype)


@dtypes
@few
@pytest.mark.parametrize("scale", ["1e-4", "1e4", "by-feature"])
def test_badly_scaled_inputs(case: Case, dtype: str, scale: str) -> None:
    if scale == "by-feature":
        check_forward(case, dtype, badly_scaled=True)
        return
    narrow = dtype == "float16"  # whose range ends at 6e4
    factor = float(scale) ** (0.5 if narrow else 1.0)
    drawn = [replace(i, x=i.x * factor) for i in draw(case, dtype)]
    check_forward_on(case, dtype, drawn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_very_different_size(dtype: str) -> None:
    """Their product is ordinary; one that is made in a narrow range on the way is not."""
    case = Case(kronecker((8, 8, 8), (8, 8, 8)), 70)
    drawn = []
    for i in draw(case, dtype):
        a, b, c = i.weights
        drawn.append(replace(i, weights=[a * 1e-18, b * 1e12, c * 1e6]))
    check_forward_on(case, dtype, drawn)


@pytest.mark.parametrize("spec", [kronecker((320,), (256,)), monarch((4, 128), (64, 4), rank=16)], ids=str)
@pytest.mark.parametrize(("decades", "most"), [(8, 2e-6), (12, 1e-3)])
def test_features_that_weights_make_up_for(spec: LayerSpec, decades: int, most: float) -> None:
    """Each result by itself, next to what its sum could have been."""
    case = Case(spec, 3000, False)
    (inputs,) = draw(case, "float32")
    groups = spec.in_features // inputs.weights[-1].shape[-1]
    scales = 10 ** torch.linspace(-decades / 2, decades / 2, spec.in_features // groups)
    scales = scales[torch.randperm(len(scales), generator=torch.Generator().manual_seed(1))]
    *behind, first = inputs.weights
    scaled = to_gpu(replace(inputs, x=inputs.x * scales.repeat(groups), weights=[*behind, first / scales]))
    with arithmetic("float32"):
        y = forward_on_poison(case, scaled)
        exact = scaled.to(torch.float64)
        right = forward(case, exact, "naive")
        largest = forward(case, replace(exact, x=exact.x.abs(), weights=[w.abs() for w in exact.weights]), "naive")
    assert bool(((y - right).abs() <= most * largest).all())


@dtypes
@pytest.mark.parametrize("batch", [1, 4, 5, 64, 65, 256, 257, 2048, 2049, 20000])
def test_batches_around_the_bounds_of_their_classes(batch: int, dtype: str) -> None:
    check_forward(Case(kronecker((8, 24), (16, 8)), batch), dtype)
    check_forward(Case(monarch((4, 6), (3, 8)), batch), dtype)


# Numbers that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@dtypes
@few
def test_what_is_not_finite_in_x_goes_through(case: Case, dtype: str, value: float) -> None:
    """One such number in some samples: they get what batched gives, all others what they had without it. Of several
    terms batched may add the weights first, where others add two infinities."""
    clean = on_gpu(case, dtype)
    x = clean.x.clone()
    samples = torch.arange(1, case.batch, 5, device="cuda")
    x[samples, (61 * samples) % case.spec.in_features] = value
    dirty = replace(clean, x=x)
    with arithmetic(dtype):
        fused, batched = forward_on_poison(case, dirty), forward(case, dirty, "batched")
        without = forward(case, clean, "fused")
    assert not torch.isfinite(batched[samples]).all(), "the test should make such numbers"
    if case.spec.rank > 1:
        assert torch.equal(torch.isfinite(fused), torch.isfinite(batched))
    else:
        assert_same_specials(fused, batched)
    untouched = torch.ones(case.batch, dtype=torch.bool, device="cuda")
    untouched[samples] = False
    assert torch.equal(fused[untouched], without[untouched])


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@dtypes
@few
def test_what_is_not_finite_in_weights_goes_through(case: Case, dtype: str, value: float) -> None:
    """Whether an infinity becomes a NaN on the way hangs on the order of contractions, that it stays one does not."""
    for i in range(len(case.spec.weight_shapes)):
        for part in (0, 0.5, 0.99):  # of its elements: also of a rank's first term and of its last
            inputs = on_gpu(case, dtype)
            flat = inputs.weights[i].view(-1)
            flat[int(part * flat.numel())] = value
            with arithmetic(dtype):
                fused, batched = forward_on_poison(case, inputs), forward(case, inputs, "batched")
            assert not torch.isfinite(batched).all()
            assert torch.equal(torch.isfinite(fused), torch.isfinite(batched)), f"weight_{i}, {part}"


@activations
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_activations_of_what_is_not_finite(activation: str, dtype: str) -> None:
    case = Case(kronecker((4, 6), (5, 7)), 50, True, activation)
    inputs = on_gpu(case, dtype)
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        inputs.bias[i::5] = value
    assert_same_specials(forward_on_poison(case, inputs), forward(case, inputs, "batched"))


def assert_same_specials(found: Tensor, right: Tensor) -> None:
    assert torch.equal(torch.isnan(found), torch.isnan(right))
    for infinity in (float("inf"), float("-inf")):
        assert torch.equal(found == infinity, right == infinity)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("factors", "batch"), [((32, 32), 16), ((8,) * 5, 100)], ids=str)
def test_overflow_becomes_infinite(factors: tuple[int, ...], batch: int, dtype: str) -> None:
    case = Case(kronecker(factors, factors), batch, False)
    inputs = on_gpu(case, dtype)
    huge = replace(inputs, x=torch.full_like(inputs.x, 3e38), weights=[w.abs() + 1 for w in inputs.weights])
    assert torch.equal(forward(case, huge, "fused"), torch.full_like(huge.x, float("inf")))


# Memory


@few
@dtypes
def test_misaligned_and_strided_tensors(case: Case, dtype: str) -> None:
    """The same bits as from a copy that lies well."""
    inputs = on_gpu(case, dtype)
    batch, features = inputs.x.shape

    def behind_one(t: Tensor) -> Tensor:
        memory = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device="cuda")
        memory[1:] = t.reshape(-1)
        moved = memory[1:].view(t.shape)
        assert moved.data_ptr() % 16
        return moved

    wide = torch.full((batch, features + 1), float("nan"), dtype=inputs.x.dtype, device="cuda")
    wide[:, 1:] = inputs.x
    every_other = torch.full((batch, 2 * features), float("nan"), dtype=inputs.x.dtype, device="cuda")[:, ::2]
    every_other.copy_(inputs.x)
    with arithmetic(dtype):
        right = forward(case, inputs, "fused")
        for x in (wide[:, 1:], every_other, behind_one(inputs.x), inputs.x.mT.contiguous().mT):
            assert torch.equal(forward_on_poison(case, replace(inputs, x=x)), right)
        moved = replace(inputs, weights=[behind_one(w) for w in inputs.weights], bias=behind_one(inputs.bias))
        assert torch.equal(forward_on_poison(case, moved), right)
        one = replace(inputs, x=inputs.x[:1].expand(batch, -1))
        assert torch.equal(forward_on_poison(case, one), right[:1].expand(batch, -1))


@few
def test_nothing_beside_the_output_is_written(case: Case) -> None:
    """Inputs keep their bits, and so does memory around and between them."""
    inputs = on_gpu(case, "bfloat16")
    fence = torch.full((1 << 22,), 77, dtype=torch.uint8, device="cuda")
    before = [t.clone() for t in (inputs.x, *inputs.weights, inputs.bias)]
    for _ in range(3):
        forward(case, inputs, "fused")
    torch.cuda.synchronize()
    assert bool((fence == 77).all())
    assert all(torch.equal(a, b) for a, b in zip(before, (inputs.x, *inputs.weights, inputs.bias), strict=True))


@few
@dtypes
def test_samples_do_not_mix(case: Case, dtype: str) -> None:
    """A sample's output hangs on that sample alone, wherever it stands in a batch of the same class."""
    inputs = on_gpu(case, dtype)
    with arithmetic(dtype):
        whole = forward(case, inputs, "fused")
        fewest = next(most + 1 for most in reversed((0, *MOST)) if most < case.batch)  # of the class
        for first, last in ((0, fewest), (5, 5 + fewest), (2, case.batch)):
            part = replace(inputs, x=inputs.x[first:last].clone())
            assert torch.equal(forward_on_poison(case, part), whole[first:last])


@few
def test_empty_batches_and_leading_dimensions(case: Case) -> None:
    inputs = on_gpu(case, "float32")
    right = forward(case, inputs, "fused")
    x = inputs.x
    assert forward(case, replace(inputs, x=x[:0]), "fused").shape == (0, case.spec.out_features)
    some = case.batch // 6 * 6  # of the same class of batches
    shaped = replace(inputs, x=x[:some].reshape(2, 3, some // 6, -1))
    assert torch.equal(forward(case, shaped, "fused"), right[:some].reshape(2, 3, some // 6, -1))
    one, alone = replace(inputs, x=x[3:4]), replace(inputs, x=x[3])
    assert torch.equal(forward(case, alone, "fused"), forward(case, one, "fused")[0])
    assert forward(case, replace(inputs, x=x.new_empty(4, 0, case.spec.in_features)), "fused").shape == (
        4,
        0,
        case.spec.out_features,
    )


@pytest.mark.parametrize("which", ["a weight", "the bias"])
def test_tensors_elsewhere_are_refused_by_name(which: str) -> None:
    inputs = on_gpu(FEW[0], "float32")
    weights, bias = list(inputs.weights), inputs.bias
    if which == "a weight":
        weights[1] = weights[1].cpu()
    else:
        bias = bias.cpu()
    with pytest.raises(TypeError, match=r"on one device, x is on cuda:0 and (weight_1|bias) on cpu"):
        factor_linear(inputs.x, weights, bias, implementation="fused")


@pytest.mark.slow
@pytest.mark.parametrize("structure", [kronecker, monarch], ids=["kronecker", "monarch"])
def test_more_elements_than_32_bits_count(structure: object) -> None:
    """Rows around element 2^31 and the last ones, of x and of y."""
    batch = 2_200_000
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free GPU memory")
    case = Case(structure((32, 32), (32, 32)), batch)
    assert batch * case.spec.in_features > 2**31
    small = to_gpu(draw(replace(case, batch=3), "bfloat16")[0])
    x = torch.empty(batch, case.spec.in_features, dtype=torch.bfloat16, device="cuda").normal_()
    del_later = torch.full((batch * case.spec.out_features,), float("nan"), dtype=torch.bfloat16, device="cuda")
    del del_later
    y = forward(case, replace(small, x=x), "fused")
    boundary = 2**31 // case.spec.in_features
    for rows in (slice(0, 200), slice(boundary - 100, boundary + 100), slice(batch - 333, batch)):
        part = replace(small, x=x[rows])
        right = forward(case, part.to(torch.float64), "naive")
        error, of_batched = (
            float((v.double() - right).norm() / right.norm()) for v in (y[rows], forward(case, part, "batched"))
        )
        assert error <= 2 * of_batched + 4 * torch.finfo(torch.bfloat16).eps, f"rows {rows}"
    assert bool(torch.isfinite(y.view(-1)).all())
    del x, y
    torch.cuda.empty_cache()
