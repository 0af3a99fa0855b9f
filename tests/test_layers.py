"""FactorLinear as a module: its parameters, its start, its words, and what becomes of it when it is saved."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import dtype_id, kronecker, monarch, nearly, spec_id
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune

import factorlayer.autograd.layer_ops
from factorlayer import FactorLinear, fuse
from factorlayer.maths.spec import LayerSpec

ARGUMENTS = {
    "default": dict(),
    "no-bias": dict(bias=False),
    "one-factor": dict(factors=1),
    "rectangular": dict(factors=((3, 4), (4, 5))),
    "triple": dict(factors=((3, 2, 2), (2, 2, 5))),
    "rank": dict(rank=3),
    "monarch": dict(structure="monarch"),
    "blocks": dict(structure="monarch", blocks=(3, 5), rank=2),
    "untied-chain": dict(structure="monarch", factors=((3, 2, 2), (2, 2, 5))),
    "activation": dict(activation="gelu"),
    "implementation": dict(implementation="batched"),
    "dtype": dict(dtype=torch.bfloat16),
    "meta": dict(device="meta"),
}


def build(name: str) -> FactorLinear:
    arguments = dict(ARGUMENTS[name])
    return FactorLinear(12, 20, arguments.pop("bias", True), **arguments)


# The start


@pytest.mark.parametrize(
    "spec",
    [
        kronecker((48,), (32,)),
        kronecker((8, 6), (4, 8)),
        kronecker((8, 6), (4, 8), rank=4),
        kronecker((4, 4, 3), (4, 2, 4)),
        kronecker((4, 4, 3), (4, 2, 4), rank=2),
        kronecker((3, 2, 4, 2), (2, 4, 2, 2)),
        monarch((48,), (32,)),
        monarch((8, 6), (4, 8)),
        monarch((8, 6), (4, 8), rank=4),
        monarch((1, 48), (32, 1), rank=5),
        monarch((4, 4, 3), (4, 2, 4)),
        monarch((3, 2, 4, 2), (2, 4, 2, 2)),
    ],
    ids=spec_id,
)
def test_outputs_start_with_the_variance_of_linear(spec: LayerSpec) -> None:
    """For inputs of variance 1 an output has the squared norm of its row of W, and the bias adds its own square. The
    mean over all outputs of 2000 layers is known to four of its own standard errors, which is 8 percent at most (a
    product of few weights varies much from layer to layer, hence so many); nn.Linear's mean is known exactly."""
    in_features, factors = spec.in_features, (spec.in_factors, spec.out_factors)
    of_weights, of_bias = [], []
    for _ in range(2000):
        layer = FactorLinear(
            in_features, spec.out_features, structure=spec.structure, factors=factors, rank=spec.rank,
            dtype=torch.float64,
        )  # fmt: skip
        of_weights.append(layer.to_dense().detach().square().sum(1).mean())
        of_bias.append(layer.bias.detach().square().mean())
    variances = torch.stack(of_weights)
    standard_error = float(variances.std()) / math.sqrt(len(variances))
    assert 4 * standard_error <= 0.08 / 3
    linear = nn.Linear(in_features, 20000, dtype=torch.float64).requires_grad_(False)
    assert float(linear.weight.square().sum(1).mean()) == pytest.approx(1 / 3, rel=0.01)
    assert float(variances.mean()) == pytest.approx(1 / 3, abs=4 * standard_error)
    assert float(torch.stack(of_bias).mean()) == pytest.approx(float(linear.bias.square().mean()), rel=0.05)


@pytest.mark.parametrize("name", ["default", "rank", "blocks", "untied-chain"])
def test_outputs_start_centred(name: str) -> None:
    y = torch.stack([build(name)(torch.ones(12)) for _ in range(500)])
    assert (y.mean(0).abs() <= 5 * y.std(0) / math.sqrt(len(y))).all()


def test_reset_parameters_draws_again() -> None:
    layer = FactorLinear(12, 20, rank=2)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert not torch.equal(parameter, before[name]), name


# The parameters


@pytest.mark.parametrize("name", ARGUMENTS)
def test_parameters(name: str) -> None:
    layer = build(name)
    shapes = {f"weight_{i}": shape for i, shape in enumerate(layer.spec.weight_shapes)}
    if name != "no-bias":
        shapes["bias"] = (20,)
    assert {key: tuple(p.shape) for key, p in layer.named_parameters()} == shapes
    assert list(layer.state_dict()) == list(shapes)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in layer.parameters())
    assert layer.parameter_count == sum(p.numel() for p in layer.parameters())
    assert layer.flops(7) == layer.spec.flops(7)
    assert (layer.in_features, layer.out_features) == (12, 20)


def test_it_is_called_by_the_name_that_linear_has() -> None:
    layer, x = FactorLinear(16, 24), torch.randn(3, 16)
    assert torch.equal(layer(input=x), layer(x))


def test_a_layer_without_bias_has_none() -> None:
    layer = FactorLinear(12, 20, bias=False)
    assert layer.bias is None
    x = torch.randn(5, 12)
    torch.testing.assert_close(layer(x), x @ layer.to_dense().T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
def test_dtype(dtype: torch.dtype) -> None:
    layer = FactorLinear(12, 20, rank=2, dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer(torch.randn(5, 12, dtype=dtype)).dtype == dtype
    assert FactorLinear(12, 20).to(dtype)(torch.randn(5, 12, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])
def test_meta_device(implementation: str) -> None:
    layer = FactorLinear(12, 20, rank=2, device="meta", implementation=implementation)
    y = layer(torch.empty(2, 5, 12, device="meta"))
    assert (y.shape, y.device.type) == ((2, 5, 20), "meta")
    real = layer.to_empty(device="cpu")
    real.reset_parameters()
    assert real(torch.ones(12)).isfinite().all()


@pytest.mark.parametrize("shape", [(12,), (0, 12), (5, 12), (2, 0, 12), (2, 3, 4, 12)], ids=str)
@pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])
@pytest.mark.parametrize("name", ["default", "rank", "blocks", "untied-chain", "one-factor"])
@pytest.mark.feature("leading dimensions: none, several, of size zero", result="works")
def test_leading_dimensions_are_those_of_linear(name: str, implementation: str, shape: tuple[int, ...]) -> None:
    layer = build(name)
    layer.implementation = implementation
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), layer.to_linear()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("v1", "naive"), ("v2", "batched"), ("v3", "fused"), ("naive", "naive"), ("batched", "batched"),
     ("fused", "fused"), ("auto", "auto")],
)  # fmt: skip
def test_implementation_names(given: str, meant: str) -> None:
    assert FactorLinear(12, 20, implementation=given).implementation == meant


# Copies


@pytest.mark.parametrize("name", ARGUMENTS)
def test_repr_builds_the_layer_again(name: str) -> None:
    layer = build(name)
    again = eval(repr(layer), {"FactorLinear": FactorLinear, "torch": torch})
    assert (again.spec, again.chain, again.implementation) == (layer.spec, layer.chain, layer.implementation)
    assert repr(again) == repr(layer)
    for parameter, other in zip(layer.parameters(), again.parameters(), strict=True):
        assert (parameter.shape, parameter.dtype, parameter.device) == (
            other.shape,
            other.dtype,
            other.device,
        )
    if name != "meta":
        assert not again.load_state_dict(layer.state_dict()).missing_keys
        assert same(layer, again)


def test_repr_says_what_was_asked_for() -> None:
    layer = FactorLinear(
        12, 20, False, structure="monarch", blocks=(3, 5), rank=2, activation="relu", implementation="v3",
        device="meta", dtype=torch.float16,
    )  # fmt: skip
    assert repr(layer) == (
        "FactorLinear(12, 20, bias=False, structure='monarch', factors=((3, 4), (4, 5)), rank=2, activation='relu', "
        "implementation='fused', device='meta', dtype=torch.float16)"
    )
    assert repr(FactorLinear(12, 20)) == "FactorLinear(12, 20, structure='kronecker', factors=((3, 4), (4, 5)))"


def same(layer: FactorLinear, other: FactorLinear) -> bool:
    x = torch.randn(5, 12, dtype=layer.weight_0.dtype)
    return nearly(layer(x), other(x)) and repr(layer) == repr(other)


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "meta"])
@pytest.mark.feature("copy.deepcopy, pickle, state_dict, safetensors", result="works")
def test_copies(name: str, tmp_path: Path) -> None:
    layer = build(name)
    deep = copy.deepcopy(layer)
    assert same(layer, deep)
    assert same(layer, pickle.loads(pickle.dumps(layer)))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    for state in (torch.load(tmp_path / "layer.pt"), load_file(tmp_path / "layer.safetensors")):
        fresh = build(name)
        assert not same(layer, fresh)
        fresh.load_state_dict(state)
        assert same(layer, fresh)
    with torch.no_grad():
        deep.weight_0.zero_()
    assert layer.weight_0.any()


def test_a_state_of_other_sizes_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for weight_0"):
        FactorLinear(12, 20).load_state_dict(FactorLinear(12, 20, factors=((2, 6), (5, 4))).state_dict())


def test_it_learns() -> None:
    """A hundred steps of a real optimizer bring it to a target of its own structure."""
    target, layer = FactorLinear(12, 20, rank=2), FactorLinear(12, 20, rank=2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    x = torch.randn(256, 12)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (layer(x) - target(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]


# explain


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("naive", "runs naive, as asked"),
        ("batched", "runs batched, as asked"),
        ("v1", "runs naive, as asked"),
    ],
)
def test_explain_names_what_was_asked_for(implementation: str, words: str) -> None:
    assert FactorLinear(12, 20, implementation=implementation).explain().splitlines()[-1] == words


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_explain(implementation: str) -> None:
    layer = FactorLinear(1024, 1024, implementation=implementation)
    assert layer.explain(batch=32).splitlines() == [
        repr(layer),
        "3072 parameters, those of the weights 0.20% of the dense weight's",
        "32 samples: 4.194e+06 FLOPs, 6.711e+07 dense; 2.703e+05 bytes moved at least",
        "  [32, 32, 1] -> [32, 32, 1] by weight_1, one weight",
        "  [1, 32, 32] -> [1, 32, 32] by weight_0, one weight",
        *(["auto takes fused as always: nothing was measured"] if implementation == "auto" else []),
        f"runs fused, {torch.ops.factorlayer.instruction_set()} kernels: one pass over x for all contractions",
    ]


def test_explain_of_untied_weights_and_of_terms() -> None:
    blocks = FactorLinear(12, 20, structure="monarch", blocks=(3, 5), rank=2).explain()
    assert "  [3, 4, 1] -> [3, 10, 1] by weight_1, 3 weights" in blocks.splitlines()
    assert "  [1, 6, 5] -> [1, 4, 5] by weight_0, 5 weights" in blocks.splitlines()
    terms = FactorLinear(12, 20, rank=3).explain().splitlines()
    assert sum(line.endswith(", one weight, for each of 3 terms") for line in terms) == 2


def test_explain_says_why_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FactorLinear(12, 20, factors=1).explain().splitlines()[-1].startswith("runs fused")
    for layer in (FactorLinear(12, 20, factors=1, dtype=torch.bfloat16), FactorLinear(1024, 520, factors=1)):
        assert layer.explain().splitlines()[-1] == "runs batched, because a single contraction is one matrix product"
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "DTYPES", (torch.float64,))
    assert FactorLinear(12, 20).explain().splitlines()[-1] == (
        "runs batched, because fused cannot: it has kernels for torch.float64, x is torch.float32"
    )


# What other code sees of the matrix.


@pytest.mark.parametrize("name", ["default", "monarch", "dtype", "meta"])
def test_weight_is_an_outline_of_the_matrix(name: str) -> None:
    layer = build(name)
    weight, matrix = layer.weight, layer.to_dense()
    assert not isinstance(weight, torch.Tensor) and "weight" not in layer.state_dict()
    for attribute in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda"):
        assert getattr(weight, attribute) == getattr(matrix, attribute)
    assert (weight.size(), weight.size(0), weight.size(-1)) == ((20, 12), 20, 12)
    assert weight.dim() == 2 and weight.numel() == 240
    assert layer.requires_grad_(False).to(torch.float64).weight.dtype == torch.float64
    assert not layer.weight.requires_grad


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: torch.nn.functional.linear(torch.randn(2, 12), weight),
        lambda weight: nn.init.normal_(weight),
        lambda weight: torch.linalg.norm(weight),
        lambda weight: weight @ torch.randn(12, 2),  # as Mamba of transformers does
        lambda weight: torch.randn(2, 20) @ weight,
        lambda weight: 2 * weight,
        lambda weight: torch.ones(20, 12) - weight,
        lambda weight: weight[:4],
    ],
)
def test_an_outline_is_not_computed_with(use: Callable[[Any], object]) -> None:
    layer = FactorLinear(12, 20)
    with pytest.raises(TypeError, match=r"FactorLinear\.weight cannot be computed with: .* to_dense\(\) makes it"):
        use(layer.weight)
    with pytest.raises(AttributeError, match=r"FactorLinear\.weight has no 'data': .* to_dense\(\) makes it"):
        _ = layer.weight.data
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        layer.weight = nn.Parameter(torch.ones(20, 12))


@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_encoder_layer_calls_structured_layers(compiled: bool) -> None:
    """In eval mode it would go past its layers, whose weights it reads."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True).double()
    layer.linear1 = FactorLinear(8, 12, structure="monarch", blocks=2).double()
    x = torch.randn(2, 3, 8).double()
    right = layer.train()(x)
    torch._dynamo.reset()
    found = torch.compile(layer, backend="aot_eager") if compiled else layer
    with torch.no_grad():
        assert nearly(found.eval()(x), right)


@pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])
def test_a_bias_may_be_taken_away_and_given(implementation: str) -> None:
    layer = FactorLinear(12, 20, implementation=implementation, dtype=torch.float64)
    x, W = torch.randn(5, 12, dtype=torch.float64), layer.to_dense()
    layer.bias = None
    torch.testing.assert_close(layer(x), x @ W.T)
    layer(x).sum().backward()
    assert layer.to_linear().bias is None and "bias=False" in repr(layer)
    layer.bias = nn.Parameter(torch.randn(20, dtype=torch.float64))
    torch.testing.assert_close(copy.deepcopy(layer)(x), x @ W.T + layer.bias)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((20,), 5.0).double())
    layer.register_parameter("bias", None)
    torch.testing.assert_close(layer(x), x @ W.T)


@pytest.mark.parametrize("implementation", ["auto", "naive", "batched", "fused"])
@pytest.mark.parametrize("make", [nn.GELU, nn.PReLU, lambda: nn.Sequential(nn.Tanh(), nn.PReLU())])
def test_an_activations_hooks_are_called(make: Callable[[], nn.Module], implementation: str) -> None:
    layer = FactorLinear(6, 12, activation=make(), implementation=implementation, dtype=torch.float64)
    *_, last = layer.activation.modules()
    x, seen = torch.randn(5, 6, dtype=torch.float64), []
    y = layer(x)
    handles = [
        last.register_forward_hook(lambda _, __, y: 2 * y),
        last.register_forward_pre_hook(lambda *_: seen.append(1)),
    ]
    torch.testing.assert_close(layer(x), 2 * y)
    torch.testing.assert_close(layer([x[:, :2], x[:, 2:]]), 2 * y)
    assert len(seen) == 2
    torch.testing.assert_close(fuse(nn.Sequential(layer, nn.Identity()))(x), 2 * y)
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x), y)


def test_an_activation_may_be_pruned() -> None:
    """Its parameter is made anew by a hook at every call."""
    layer = FactorLinear(6, 12, activation=nn.PReLU(), dtype=torch.float64)
    prune.identity(layer.activation, "weight")
    x = torch.randn(5, 6, dtype=torch.float64)
    for slope in (0.25, 0.5):
        with torch.no_grad():
            layer.activation.weight_orig.fill_(slope)
        layer(x).sum().backward()
        torch.testing.assert_close(layer(x), nn.functional.leaky_relu(x @ layer.to_dense().T + layer.bias, slope))


def test_explain_takes_inputs_of_no_features() -> None:
    layer = FactorLinear(12, 20)
    assert layer.explain(5, inputs=(4, 0, 8)) == layer.explain(5, inputs=(4, 8))
    assert layer.explain(5, inputs=(0, 12)).endswith("of several inputs: one has features, and runs as it is")


def test_sizes_may_be_numpys() -> None:
    layer = FactorLinear(np.int64(12), np.int32(20), factors=((np.int64(3), 4), [4, torch.tensor(5)]), rank=np.int8(2))
    assert repr(layer) == repr(FactorLinear(12, 20, factors=((3, 4), (4, 5)), rank=2))
    FactorLinear(12, 20, structure="monarch", blocks=np.int64(2)).load_state_dict(
        FactorLinear(np.int64(12), 20, structure="monarch", blocks=(2, np.int64(2))).state_dict()
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FactorLinear(True, 4), "FactorLinear: in_features should be a positive integer, it is True"),
        (
            lambda: FactorLinear(4, 4, dtype="float32"),
            "FactorLinear: dtype should be a floating-point .* it is 'float32'",
        ),
        (lambda: FactorLinear(4, 4).warmup("8"), r"FactorLinear\.warmup: batch should be .* samples, it is '8'"),
        (lambda: FactorLinear(4, 4).warmup(2.5), r"FactorLinear\.warmup: batch should be .* samples, it is 2\.5"),
        (lambda: FactorLinear(4, 4).explain(None), r"FactorLinear\.explain: batch should be .* samples, it is None"),
        (lambda: FactorLinear(4, 4).explain(-1), r"FactorLinear\.explain: batch should be .* samples, it is -1"),
        (lambda: FactorLinear(4, 4).explain(2, inputs=4), r"FactorLinear\.explain: inputs should be features of each"),
        (
            lambda: FactorLinear.from_linear(nn.Linear(4, 4), inputs=[[1.0, 2.0, 3.0, 4.0]]),
            r"FactorLinear\.from_linear: inputs should be a tensor \[\.\.\., in_features\], it is list",
        ),
    ],
)
def test_what_is_wrong_is_said(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()
