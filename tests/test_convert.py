"""convert, restore and load_dense: layers swapped in whole models, and back."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transformer import Conv1D, Transformer, loss_of, tokens, turned

from factorlayer import FactorLinear, FactorMLP, convert, fuse, load_dense, restore
from factorlayer.maths.project import project, to_dense

__all__ = ["turned"]  # a fixture
MONARCH = dict(structure="monarch", blocks=4, rank=2)


def model(dense: type[nn.Module] = nn.Linear, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dense).to(dtype)


def whole(structure: str) -> dict[str, dict[str, Any]]:
    """Of full rank: [24, 24], [72, 24], [96, 24] and [24, 96]."""
    if structure == "monarch":
        sizes = {"attn.c_attn": 6, "attn.c_proj": 6, "mlp.c_fc": 6, "mlp.c_proj": 6}
        return {f"h.*.{name}": dict(structure=structure, blocks=4, rank=rank) for name, rank in sizes.items()}
    factors = {
        "attn.c_attn": ((4, 6), (8, 9), 32),
        "attn.c_proj": ((4, 6), (4, 6), 16),
        "mlp.c_fc": ((4, 6), (8, 12), 32),
        "mlp.c_proj": ((8, 12), (4, 6), 32),
    }
    return {f"h.*.{name}": dict(factors=(p, q), rank=rank) for name, (p, q, rank) in factors.items()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_state(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(found) == list(right)
    assert all(torch.equal(found[name], right[name]) for name in right)


# what becomes of a model


@pytest.mark.parametrize("structure", ["monarch", "kronecker"])
@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_with_full_rank_it_computes_the_same(dense: type[nn.Module], structure: str, turned: object) -> None:
    plain = model(dense)
    right = plain(tokens())
    done = convert(plain, whole(structure))
    assert len(done.changes) == 8 and max(change.error.weight for change in done.changes) < 1e-12
    assert sum(isinstance(part, FactorLinear) for part in plain.modules()) == 8
    torch.testing.assert_close(plain(tokens()), right, rtol=1e-9, atol=1e-9)


def test_weights_are_the_projections() -> None:
    plain = model()
    W = plain.h[1].mlp["c_fc"].weight.detach().clone()
    convert(plain, {"h.1.mlp.c_fc": MONARCH})
    layer = plain.h[1].mlp["c_fc"]
    right = project(layer.spec, W)
    torch.testing.assert_close(layer.to_dense(), to_dense(layer.spec, right), rtol=0, atol=0)
    assert isinstance(plain.h[0].mlp["c_fc"], nn.Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_is_stays(dtype: torch.dtype) -> None:
    plain = model(dtype=dtype)
    before = plain.h[0].mlp["c_fc"].eval()
    before.weight.requires_grad_(False)
    before.decay = 0.5
    random = torch.get_rng_state()
    convert(plain, {"*.mlp.c_*": dict(implementation="batched", **MONARCH)})
    after, other = plain.h[0].mlp["c_fc"], plain.h[0].mlp["c_proj"]
    assert torch.equal(torch.get_rng_state(), random)  # a projection draws nothing
    assert after.bias is before.bias and after.bias.requires_grad
    assert not any(weight.requires_grad for weight in after.weights)
    assert all(weight.requires_grad for weight in other.weights)
    assert not after.training and other.training
    assert {parameter.dtype for parameter in plain.parameters()} == {dtype}
    assert after.decay == 0.5 and after.implementation == "batched"
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in model().named_modules()]
    assert plain(tokens()).dtype == dtype


def test_complex_and_meta_layers() -> None:
    part = nn.Sequential(nn.Linear(12, 20, dtype=torch.complex128), nn.Linear(8, 8, device="meta"))
    done = convert(part, {nn.Linear: MONARCH})
    assert part[0].weights[0].dtype == torch.complex128 and part[1].weights[0].is_meta
    assert done.changes[0].error.weight > 0 and done.changes[1].error is None
    assert "-" in str(done).splitlines()[2].split()


def test_layers_without_bias() -> None:
    part = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    convert(part, {"0": MONARCH}, keep=True)
    assert part[0].bias is None
    restore(part)
    assert part[0].bias is None and type(part[0]) is nn.Linear


def test_what_is_returned_says_what_was_done() -> None:
    plain = model()
    before = sum(parameter.numel() for parameter in plain.parameters())
    done = convert(plain, {"*.mlp.*": MONARCH, nn.Linear: None})
    assert done.parameters_before == before
    assert done.parameters_after == sum(parameter.numel() for parameter in plain.parameters())
    lines = str(done).splitlines()
    assert lines[0].split() == ["layer", "before", "after", "parameters", "error"]
    assert re.fullmatch(
        r"h\.0\.mlp\.c_fc +Linear 24 -> 96 +monarch blocks 4x4, rank 2 +2400 +-> 1056 +\d\.\d\de-01", lines[1]
    )
    assert lines[-1].startswith(f"4 layers; the model's {before} parameters became {done.parameters_after} (")
    found = json.loads(json.dumps(done.to_json()))
    assert found["changes"][0]["names"] == ["h.0.mlp.c_fc"]
    assert found["changes"][0]["error"] == done.changes[0].error.weight
    assert found["mapping"]["h.0.mlp.c_fc"] == {"structure": "monarch", "blocks": [4, 4], "rank": 2}


@pytest.mark.parametrize("structure", ["monarch", "kronecker"])
def test_the_mapping_that_is_returned_does_it_again(structure: str) -> None:
    first, second = model(), model()
    done = convert(first, whole(structure))
    assert convert(second, json.loads(json.dumps(done.mapping))) == done
    assert_same_state(second.state_dict(), first.state_dict())


def test_a_dry_run_returns_the_same_and_changes_nothing() -> None:
    plain = model()
    state, parts, random = state_of(plain), list(plain.modules()), torch.get_rng_state()
    for initialize in ("project", "fresh"):
        planned = convert(plain, {"*.mlp.*": MONARCH}, dry_run=True, initialize=initialize)
        assert "would become" in str(planned)
        assert_same_state(plain.state_dict(), state)
        assert all(a is b for a, b in zip(plain.modules(), parts, strict=True))
        assert not plain._load_state_dict_pre_hooks and torch.equal(torch.get_rng_state(), random)
    done = convert(copy.deepcopy(plain), {"*.mlp.*": MONARCH})
    planned = convert(plain, {"*.mlp.*": MONARCH}, dry_run=True)
    assert (planned.changes, planned.left) == (done.changes, done.left)
    assert (planned.parameters_before, planned.parameters_after) == (done.parameters_before, done.parameters_after)


@pytest.mark.parametrize("fails", ["projection", "sizes", "last"])
def test_a_call_that_fails_changes_nothing(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model()
    state, parts = state_of(plain), list(plain.modules())
    mapping: dict[Any, Any] = {"h.0.mlp.*": MONARCH, "h.1.mlp.*": dict(structure="monarch", blocks=5)}
    if fails != "sizes":
        mapping["h.1.mlp.*"] = dict(structure="monarch", factors=3)  # has no projection
    if fails == "last":
        mapping["h.1.mlp.*"], calls = MONARCH, []
        made = FactorLinear.__init__

        def init(self: FactorLinear, *given: Any, **named: Any) -> None:
            calls.append(0)
            if len(calls) == 4:
                raise MemoryError("no more")
            made(self, *given, **named)

        monkeypatch.setattr(FactorLinear, "__init__", init)
    with pytest.raises((ValueError, MemoryError)):
        convert(plain, mapping)
    assert_same_state(plain.state_dict(), state)
    assert all(a is b for a, b in zip(plain.modules(), parts, strict=True))
    assert not plain._load_state_dict_pre_hooks


# fresh weights


@pytest.mark.parametrize(
    "settings", [MONARCH, dict(rank=3), dict(factors=3)], ids=["monarch", "rank 3", "three factors"]
)
def test_fresh_weights_have_the_spread_of_those_before(settings: dict[str, Any]) -> None:
    part = nn.Sequential(nn.Linear(512, 512).double())
    nn.init.normal_(part[0].weight, std=0.02)
    done = convert(part, {"0": settings}, initialize="fresh")
    assert done.changes[0].error is None and part[0].projection_error is None
    assert part[0].to_dense().std().item() == pytest.approx(0.02, rel=0.1)


def test_fresh_weights_of_zeros_give_zeros_and_learn() -> None:
    part = nn.Sequential(nn.Linear(16, 16).double())
    nn.init.zeros_(part[0].weight)
    convert(part, {"0": MONARCH}, initialize="fresh")
    assert not part[0].to_dense().any()
    part(torch.randn(3, 16).double()).square().sum().backward()
    assert any(weight.grad.any() for weight in part[0].weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fresh_weights_of_what_is_no_number_are_those_of_a_fresh_layer(value: float) -> None:
    part = nn.Sequential(nn.Linear(512, 512).double())
    nn.init.constant_(part[0].weight, value)
    convert(part, {"0": MONARCH}, initialize="fresh")
    assert part[0].to_dense().std().item() == pytest.approx((3 * 512) ** -0.5, rel=0.1)


# which layers are meant


def test_of_several_selectors_the_first_counts() -> None:
    plain = model()
    mapping = {"h.0.mlp.c_fc": dict(rank=2), "h.1.*": None, lambda name, module: "mlp" in name: MONARCH}
    convert(plain, mapping)
    found = {name: part.spec.structure for name, part in plain.named_modules() if isinstance(part, FactorLinear)}
    assert found == {"h.0.mlp.c_fc": "kronecker", "h.0.mlp.c_proj": "monarch"}


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_classes_select(dense: type[nn.Module], turned: object) -> None:
    plain = model(dense)
    done = convert(plain, {dense: MONARCH})
    assert len(done.changes) == 8
    assert [each.name for each in done.left] == (["lm_head"] if dense is nn.Linear else [])


def test_conv1d_is_unknown_where_transformers_are_not_imported() -> None:
    with pytest.raises(ValueError, match=r"'h\.0\.mlp\.c_fc' is a Conv1D, no linear layer"):
        convert(model(Conv1D), {"h.0.mlp.c_fc": MONARCH})


def test_a_name_is_no_pattern() -> None:
    part = nn.ModuleDict({"[a]": nn.Linear(8, 8), "a": nn.Linear(8, 8), "*": nn.Linear(8, 8)})
    done = convert(part, {"[a]": MONARCH, "*": MONARCH})
    assert [change.name for change in done.changes] == ["[a]", "*"]


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(8, 8).double()
    part = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Tanh()), "c": nn.Linear(8, 8).double()})
    done = convert(part, {"b.*": MONARCH})
    assert part["a"] is part["b"][0] and isinstance(part["a"], FactorLinear)
    assert [change.names for change in done.changes] == [("a", "b.0")] and "a = b.0" in str(done)
    restore(part)
    assert part["a"] is part["b"][0] and type(part["a"]) is nn.Linear


def test_tied_weights_are_left_alone() -> None:
    plain = model()
    done = convert(plain, {nn.Linear: MONARCH})
    assert plain.lm_head.weight is plain.wte.weight
    assert [str(each) for each in done.left] == [
        "lm_head (Linear 24 -> 50): its weight is tied: it is wte.weight as well"
    ]
    assert "left as it is: lm_head" in str(done)
    again = model()
    again.lm_head.weight = nn.Parameter(again.wte.weight.data)  # the same memory
    with pytest.raises(ValueError, match=r"lm_head .* cannot be structured: its weight is tied"):
        convert(again, {"lm_head": MONARCH})


class Listed(nn.Module):
    """Calls its layers by lists that are no parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[nn.Module] = []
        for name in ("a", "b"):
            self.add_module(name, nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if name == "a" else nn.Linear(8, 8))
            self.calls.append(getattr(self, name))
        self.c = nn.Linear(8, 8)
        self.pairs = {"last": (self.c, 2)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.calls:
            x = layer(x)
        layer, scale = self.pairs["last"]
        return scale * layer(x)


def test_layers_that_are_called_from_where_no_swap_reaches_are_left_alone() -> None:
    listed = Listed()
    done = convert(listed, {nn.Linear: MONARCH})
    assert [change.name for change in done.changes] == ["a.0"]
    assert [each.name for each in done.left] == ["b", "c"]
    assert done.left[1].why.startswith("Listed.pairs has it as well, where it would stay dense: have an nn.ModuleList")
    listed(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in listed.parameters())
    with pytest.raises(ValueError, match=r"b .* cannot be structured: Listed\.calls has it as well"):
        convert(listed, {"b": MONARCH})


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked_state(layer: nn.Linear) -> nn.Module:
    layer.register_state_dict_post_hook(lambda *_: None)
    return layer


def hooked_weight(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda grad: grad)
    return layer


def own_forward(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: x
    return layer


def buffered(layer: nn.Linear) -> nn.Module:
    layer.register_buffer("mask", torch.ones(8, 8))
    return layer


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


def integers(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    return layer


class Weights(Tensor):
    pass


def of_a_class(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(torch.zeros(8, 8).as_subclass(Weights))
    return layer


def quantised(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.nn.quantized.dynamic.Linear(8, 8)


LEFT: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    "a class of its own": (lambda layer: Own(8, 8), "Own is a class of its own, derived from a dense layer"),
    "parametrized": (parametrizations.weight_norm, "its parameters are parametrized: .*remove_parametrizations"),
    "orthogonal": (parametrizations.orthogonal, "its parameters are parametrized"),
    "pruned": (pruned, r"its weight is made of other parameters \(weight_mask, weight_orig\)"),
    "lazy": (lambda layer: nn.LazyLinear(8), "it has no sizes before its first call: call the model once"),
    "quantised": (quantised, "Linear is no nn.Linear: a layer of its own, or a quantised one"),
    "integers": (integers, r"its weight is of torch\.int8: quantised weights stay as they are"),
    "a tensor's class": (of_a_class, "its weight is a Weights, which has products of its own"),
    "converted": (lambda layer: FactorLinear(8, 8), "it is a FactorLinear already"),
    "hooks on its state": (hooked_state, r"hooks on its state_dict \(_state_dict_hooks\)"),
    "hooks on its weight": (hooked_weight, "its weight has hooks on its gradient"),
    "a forward of its own": (own_forward, "it has a forward of its own, set on the object"),
    "a buffer": (buffered, "it has more than a weight and a bias: mask"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_plain_layer_is_left_alone(case: str) -> None:
    make, reason = LEFT[case]
    part = nn.Sequential(nn.Linear(8, 8), make(nn.Linear(8, 8)))
    before = part[1]
    done = convert(part, {"*": MONARCH})
    assert part[1] is before and isinstance(part[0], FactorLinear)
    assert len(done.left) == 1 and re.search(reason, done.left[0].why)
    with pytest.raises(ValueError, match=f"1 .*cannot be structured: .*{reason}"):
        convert(part, {"1": MONARCH})


def test_attention_keeps_the_layer_whose_weight_it_reads() -> None:
    part = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match=r"none of the layers .*out_proj .*nn\.MultiheadAttention reads its weight"):
        convert(part, {"*": MONARCH})


def test_blocks_and_fused_models_keep_their_layers() -> None:
    part = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    holder = nn.ModuleDict({"block": FactorMLP([8, 8, 8]), "fused": fuse(part), "alone": nn.Linear(8, 8)})
    done = convert(holder, {"*": MONARCH})
    assert [change.name for change in done.changes] == ["alone"]
    whys = {f"{kind} runs it as part of a stack: convert the model first" for kind in ("FactorMLP", "Fused")}
    assert {each.why for each in done.left} == whys
    convert(part, {"*": MONARCH})
    fused = fuse(part)
    with pytest.raises(
        ValueError, match=r"restore: fused\.0 cannot be restored: Fused runs it as .* which is its \.module"
    ):
        restore(nn.ModuleDict({"fused": fused}))
    restore(fused.module)
    assert isinstance(part[0], nn.Linear)


class Adapter(nn.Module):
    """As PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(8, 8), nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})


def test_adapters_keep_their_layers() -> None:
    done = convert(nn.ModuleDict({"a": Adapter(), "b": nn.Linear(8, 8)}), {"*": MONARCH})
    assert [change.name for change in done.changes] == ["b"]
    assert [each.name for each in done.left] == ["a.base_layer", "a.lora_A.default"]
    assert {each.why.split(",")[0] for each in done.left} == {"Adapter adapts a layer"}


# hooks


def test_hooks_go_with_the_layer_and_back() -> None:
    plain, seen = model(), []
    layer = plain.h[0].mlp["c_fc"]
    handles = [
        layer.register_forward_pre_hook(lambda module, given, named: seen.append("before"), with_kwargs=True),
        layer.register_forward_hook(lambda module, given, y: seen.append(type(module).__name__)),
        layer.register_full_backward_hook(lambda module, grad_x, grad_y: seen.append("back")),
    ]
    convert(plain, {"*.mlp.*": MONARCH}, keep=True)
    loss_of(plain).backward()
    assert seen == ["before", "FactorLinear", "back"]
    handles[0].remove()
    restore(plain)
    loss_of(plain).backward()
    assert seen[3:] == ["Linear", "back"]
    for handle in handles[1:]:
        handle.remove()
    convert(plain, {"*.mlp.*": MONARCH})
    loss_of(plain).backward()
    assert len(seen) == 5


# and back


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_kept_weights_come_back_as_they_were(dense: type[nn.Module], turned: object) -> None:
    plain = model(dense)
    state, right = state_of(plain), plain(tokens())
    convert(plain, {"*.mlp.*": MONARCH}, keep=True)
    optimizer = torch.optim.SGD([p for layer in plain.h for p in layer.mlp.parameters()], lr=0.1)
    loss_of(plain).backward()
    optimizer.step()
    done = restore(plain)
    assert {change.after.split(", ")[1] for change in done.changes} == {"kept"}
    assert_same_state(plain.state_dict(), state)
    assert {type(block.mlp["c_fc"]) for block in plain.h} == {dense}
    assert torch.equal(plain(tokens()), right)
    assert not plain._load_state_dict_pre_hooks


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_present_weights_are_multiplied_out(dense: type[nn.Module], keep: bool, turned: object) -> None:
    plain = model(dense)
    convert(plain, {"*.mlp.*": MONARCH}, keep=keep)
    plain.h[0].mlp["c_fc"].weight_0.requires_grad_(False)
    right = plain(tokens())
    done = restore(plain, "present" if keep else None)
    assert {change.after.split(", ")[1] for change in done.changes} == {"multiplied out"}
    assert type(plain.h[0].mlp["c_fc"]) is dense and plain.h[0].mlp["c_fc"].weight.requires_grad
    torch.testing.assert_close(plain(tokens()), right, rtol=1e-9, atol=1e-9)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model(dense).named_parameters()]


def test_kept_weights_come_back_in_the_dtype_of_now() -> None:
    plain = model()
    right = plain.h[0].mlp["c_fc"].weight.detach().float()
    convert(plain, {"*.mlp.*": MONARCH}, keep=True)
    restore(plain.float())
    assert torch.equal(plain.h[0].mlp["c_fc"].weight, right)


@pytest.mark.parametrize("name", ["weight_0", "weight_1", "bias"])
def test_a_layer_that_was_pruned_since_is_not_restored(name: str) -> None:
    plain = model()
    convert(plain, {"*.mlp.*": MONARCH})
    layer = plain.h[1].mlp["c_proj"]
    prune.l1_unstructured(layer, name, 0.5)
    right = plain(tokens())
    with pytest.raises(ValueError, match=rf"h\.1\.mlp\.c_proj cannot be restored: its {name} is made of other param"):
        restore(plain)
    assert torch.equal(plain(tokens()), right)
    prune.remove(layer, name)
    restore(plain)
    torch.testing.assert_close(plain(tokens()), right, rtol=1e-9, atol=1e-9)


def test_a_parametrized_weight_is_multiplied_out() -> None:
    plain = model()
    convert(plain, {"*.mlp.*": MONARCH})
    parametrizations.weight_norm(plain.h[1].mlp["c_proj"], "weight_0")
    right = plain(tokens())
    restore(plain)
    assert type(plain.h[1].mlp["c_proj"]) is nn.Linear
    torch.testing.assert_close(plain(tokens()), right, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_restored() -> None:
    plain = model()
    with pytest.raises(ValueError, match="restore: convert has made no layer of this Transformer"):
        restore(plain)
    convert(plain, {"*.mlp.*": MONARCH})
    with pytest.raises(ValueError, match=r"no weights were kept of h\.0\.mlp\.c_fc.*keep=True; weights='present'"):
        restore(plain, "kept")
    with pytest.raises(ValueError, match="weights should be 'kept', 'present' or None, it is 'old'"):
        restore(plain, "old")
    own = nn.Sequential(FactorLinear(8, 8))
    with pytest.raises(ValueError, match="convert has made no layer"):
        restore(own)


# checkpoints


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_from_before_is_refused_in_one_sentence(strict: bool) -> None:
    plain = model()
    checkpoint = state_of(plain)
    convert(plain, {"*.mlp.*": MONARCH})
    state = state_of(plain)
    with pytest.raises(RuntimeError) as error:
        plain.load_state_dict(checkpoint, strict=strict)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("convert: the state_dict is of the model before it was converted")
    assert "factorlayer.load_dense(model, state_dict) projects them" in str(error.value)
    assert_same_state(plain.state_dict(), state)
    outer = nn.ModuleDict({"inner": plain})
    with pytest.raises(RuntimeError, match=r"inner\.h\.0\.mlp\.c_fc\.weight"):
        outer.load_state_dict({f"inner.{name}": value for name, value in checkpoint.items()}, strict=strict)


def test_a_part_of_a_checkpoint_from_before_is_loaded() -> None:
    plain = model()
    checkpoint = {name: torch.ones_like(value) for name, value in state_of(plain).items() if "h.0" in name}
    convert(plain, {"*.mlp.*": MONARCH})
    others = {name: value for name, value in state_of(plain).items() if "h.0" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        load_dense(plain, checkpoint)
    load_dense(plain, checkpoint, strict=False)
    state = plain.state_dict()
    assert_same_state({name: state[name] for name in others}, others)
    matrix = plain.h[0].mlp["c_fc"].to_dense()
    assert torch.allclose(matrix, torch.ones_like(matrix))


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_load_dense_projects_what_is_dense(dense: type[nn.Module], turned: object) -> None:
    torch.manual_seed(1)
    other = Transformer(dense).double()
    checkpoint = state_of(other)
    plain = model(dense)
    convert(plain, {"*.mlp.*": MONARCH})
    done = load_dense(plain, checkpoint)
    convert(other, {"*.mlp.*": MONARCH})
    assert_same_state(plain.state_dict(), other.state_dict())
    assert len(done.changes) == 4 and all(0 < change.error.weight < 1 for change in done.changes)
    with pytest.raises(ValueError, match="has no dense weight of a layer that convert made"):
        load_dense(plain, plain.state_dict())
    checkpoint["h.0.mlp.c_fc.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"load_dense: h\.0\.mlp\.c_fc\.weight: the dense weight should be"):
        load_dense(plain, checkpoint)
    checkpoint["h.0.mlp.c_fc.weight"] = torch.full((96, 24) if dense is nn.Linear else (24, 96), torch.inf)
    with pytest.raises(ValueError, match=r"load_dense: h\.0\.mlp\.c_fc\.weight: the dense weight has infinite numbers"):
        load_dense(plain, checkpoint)


def test_load_dense_keeps_what_modules_have_written_of_themselves() -> None:
    part = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    checkpoint, versions = part.state_dict(), []
    convert(part, {"0": MONARCH})
    part[1].register_load_state_dict_pre_hook(
        lambda module, state, prefix, local, *_: versions.append(local["version"])
    )
    load_dense(part, checkpoint)
    assert versions == [2]


def test_a_converted_checkpoint_loads_into_a_converted_model() -> None:
    first, second = model(), Transformer().double()
    done = convert(first, {"*.mlp.*": MONARCH})
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    convert(second, done.mapping, initialize="fresh")
    second.load_state_dict(torch.load(file))
    assert torch.equal(second(tokens()), first(tokens()))


# a converted model is a model


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.feature("convert: copy.deepcopy and pickle of a converted model", result="works")
def test_copies_compute_the_same_and_can_be_restored(how: str) -> None:
    plain = model()
    state = state_of(plain)
    convert(plain, {"*.mlp.*": MONARCH}, keep=True)
    other = copy.deepcopy(plain) if how == "deepcopy" else pickle.loads(pickle.dumps(plain))
    assert torch.equal(other(tokens()), plain(tokens()))
    with pytest.raises(RuntimeError, match="load_dense"):
        other.load_state_dict(state)
    restore(other)
    assert_same_state(other.state_dict(), state)
    assert isinstance(plain.h[0].mlp["c_fc"], FactorLinear)
    other.load_state_dict(state)


@pytest.mark.parametrize("structure", ["monarch", "kronecker"])
def test_it_trains(structure: str) -> None:
    plain = model()
    settings = MONARCH if structure == "monarch" else dict(rank=2)
    convert(plain, {"h.*": settings})
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(loss_of(plain))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in plain.h.parameters())


@pytest.mark.long
@pytest.mark.feature("convert: torch.compile of a converted model as a whole graph", result="works")
def test_it_compiles() -> None:
    plain = model()
    convert(plain, {"h.*": MONARCH})
    right = plain(tokens())
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), right, rtol=1e-9, atol=1e-9)


def test_a_compiled_model_sees_that_it_was_converted() -> None:
    plain = model()
    compiled = torch.compile(plain, backend="eager")
    compiled(tokens())
    convert(plain, {"h.*": MONARCH})
    torch.testing.assert_close(compiled(tokens()), plain(tokens()), rtol=1e-9, atol=1e-9)


def test_it_can_be_fused() -> None:
    part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    convert(part, {"*": MONARCH})
    x = torch.randn(3, 8).double()
    fused = fuse(part)
    assert [stack.names for stack in fused.stacks] == [("0", "2")]
    torch.testing.assert_close(fused(x), part(x))


@pytest.mark.parametrize("mask", [None, torch.tensor([[False, False, True], [False, False, False]])])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pytorchs_encoder_goes_past_no_structured_layer(mask: Tensor | None) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.randn(2, 3, 8).double()
    with torch.no_grad():
        right = encoder(x, src_key_padding_mask=mask)
        done = convert(encoder, {"*.linear*": dict(structure="monarch", blocks=2, rank=4)}, keep=True)
        found = encoder(x, src_key_padding_mask=mask)
        seen = slice(None) if mask is None else ~mask
        torch.testing.assert_close(found[seen], right[seen])
        assert len(done.changes) == 4
        restore(encoder)
        assert torch.equal(encoder(x, src_key_padding_mask=mask), right)


# what is refused


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, "mapping should say which layers become what"),
        ([("h.*", MONARCH)], "mapping should say which layers become what"),
        ({3: MONARCH}, "a selector should be a pattern for names, a class of layers, or a function"),
        ({int: MONARCH}, "a selector should be a pattern for names, a class of layers, or a function"),
        ({"h.*": "monarch"}, r"what 'h\.\*' becomes should be a dict .*; it is 'monarch'"),
        ({"h.*": dict(ranks=2)}, "has the setting 'ranks'; there are structure, .*; did you mean 'rank'"),
        (
            {"*.mlp.fc": MONARCH},
            r"'\*\.mlp\.fc' selects no layer; the model's linear layers are .* and 4 more; did you",
        ),
        ({"h.0.mlp": MONARCH}, r"'h\.0\.mlp' is a ModuleDict, no linear layer; 'h\.0\.mlp\.\*' selects the 2 in it"),
        ({"ln_f": MONARCH}, "'ln_f' is a LayerNorm, no linear layer"),
        ({nn.Conv2d: MONARCH}, "Conv2d selects no layer"),
        ({"h.*": MONARCH, "*.c_fc": dict(rank=2)}, r"'\*\.c_fc' selects only layers that selectors before it take"),
        ({"lm_*": MONARCH}, "none of the layers that were selected can be structured: lm_head .* tied"),
        ({"*.c_fc": dict(structure="butterfly")}, "structure should be one of"),
        (
            {"*.c_fc": dict(structure="monarch", blocks=5)},
            r"h\.0\.mlp\.c_fc \(Linear 24 -> 96\): blocks should divide the features: K=5 does not divide "
            r"in_features=24; divisors near it are 3, 4, 6; "
            r"{'h\.0\.mlp\.c_fc': None} in front leaves this layer",
        ),
        ({"*.c_fc": dict(factors=((5, 5), (8, 12)))}, r"factors should multiply up to in_features=24; 5·5 is 25"),
        ({"*.c_fc": dict(rank=1000)}, r"h\.0\.mlp\.c_fc .*rank should be at most"),
        ({"*.c_fc": dict(structure="monarch", factors=3)}, r"h\.0\.mlp\.c_fc .*there is no projection onto a Monarch"),
        ({"*.c_fc": dict(implementation="quick")}, r"h\.0\.mlp\.c_fc .*implementation should be"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value)[:40],
)
def test_mappings_that_mean_nothing(mapping: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"convert: .*({words})"):
        convert(model(), mapping)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value: float) -> None:
    plain = model()
    plain.h[1].mlp["c_fc"].weight.data[0, 0] = value
    with pytest.raises(ValueError, match=r"convert: h\.1\.mlp\.c_fc .* has weights that are infinite or no numbers"):
        convert(plain, {"h.*": MONARCH})
    assert not any(isinstance(part, FactorLinear) for part in plain.modules())


def test_other_arguments_that_mean_nothing() -> None:
    with pytest.raises(TypeError, match=r"model should be an nn\.Module, it is list"):
        convert([nn.Linear(8, 8)], {"*": MONARCH})
    with pytest.raises(ValueError, match=r"it is the model itself, which nothing holds: FactorLinear\.from_linear"):
        convert(nn.Linear(8, 8), {nn.Linear: MONARCH})
    with pytest.raises(ValueError, match="initialize should be 'project' or 'fresh', it is 'random'"):
        convert(model(), {"h.*": MONARCH}, initialize="random")
    with pytest.raises(ValueError, match="keep=True is for initialize='project'"):
        convert(model(), {"h.*": MONARCH}, initialize="fresh", keep=True)
    with pytest.raises(ValueError, match="Sequential has no linear layers"):
        convert(nn.Sequential(nn.Tanh()), {"*": MONARCH})
