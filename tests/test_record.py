"""state_dicts of another layer: refused by words that name both, by a record or by shapes."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from factorlayer import FactorLinear, FactorMLP, fuse

LAYERS: dict[str, Callable[[], FactorLinear]] = {
    "rank": lambda: FactorLinear(64, 64, rank=8),
    "blocks": lambda: FactorLinear(64, 64, structure="monarch", blocks=8),  # of the same shapes
    "activation": lambda: FactorLinear(64, 64, rank=8, activation="gelu"),
    "function": lambda: FactorLinear(64, 64, rank=8, activation=lambda x: x * 0.5),
    "one-term": lambda: FactorLinear(64, 64),
    "factors": lambda: FactorLinear(64, 64, factors=((4, 16), (16, 4))),
    "triple": lambda: FactorLinear(64, 64, factors=3),
    "more-blocks": lambda: FactorLinear(64, 64, structure="monarch", blocks=(4, 8)),
}
SAME_SHAPES = ("rank", "blocks", "activation", "function")
NAMED = {
    "rank": "structure='kronecker', factors=((8, 8), (8, 8)), rank=8",
    "blocks": "structure='monarch', factors=((8, 8), (8, 8)), rank=1",
}


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS = {"memory": lambda state: state, "torch.save": saved, "deepcopy": copy.deepcopy}


def tensors_only(module: nn.Module, path: Path) -> dict[str, Tensor]:
    save_file(module.state_dict(), path / "layer.safetensors")
    return load_file(path / "layer.safetensors")


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("held", "wanted"), [*itertools.permutations(LAYERS, 2)])
def test_another_layer_is_refused_by_both_names(held: str, wanted: str, way: str) -> None:
    state = WAYS[way](nn.Sequential(LAYERS[held]()).state_dict())
    module = nn.Sequential(LAYERS[wanted]())
    with pytest.raises(RuntimeError, match=r"what is loaded is of ") as error:
        module.load_state_dict(state)
    for name in {held, wanted} & NAMED.keys():
        assert NAMED[name] in str(error.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_its_own_is_loaded(name: str, assign: bool, way: str) -> None:
    layer, fresh = LAYERS[name](), LAYERS[name]()
    done = fresh.load_state_dict(WAYS[way](layer.state_dict()), assign=assign)
    assert not done.missing_keys and not done.unexpected_keys
    assert all(map(torch.equal, fresh.parameters(), layer.parameters()))


@pytest.mark.parametrize(("held", "wanted"), [("rank", "blocks"), ("blocks", "rank")])
def test_another_structure_is_refused_even_if_not_strict(held: str, wanted: str) -> None:
    with pytest.raises(RuntimeError, match="build that one to load it"):
        LAYERS[wanted]().load_state_dict(LAYERS[held]().state_dict(), strict=False)


def test_another_activation_is_loaded_if_not_strict() -> None:
    held, wanted = LAYERS["rank"](), LAYERS["activation"]()
    words = (
        "what is loaded is of .*activation='identity', this is of .*activation='gelu'; strict=False loads the parame"
    )
    with pytest.raises(RuntimeError, match=words):
        wanted.load_state_dict(held.state_dict())
    wanted.load_state_dict(held.state_dict(), strict=False)
    assert all(map(torch.equal, wanted.parameters(), held.parameters()))


# The keys are the parameters'


@pytest.mark.parametrize("name", LAYERS)
def test_the_keys_are_those_of_the_parameters(name: str, tmp_path: Path) -> None:
    layer = LAYERS[name]()
    assert list(layer.state_dict()) == [key for key, _ in layer.named_parameters()]
    state = layer.state_dict()
    x = torch.randn(2, 64)
    assert torch.equal(torch.func.functional_call(layer, state, (x,), strict=True), layer(x))
    fresh = LAYERS[name]()
    fresh.load_state_dict(tensors_only(layer, tmp_path))
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_of_before_is_loaded_strictly(name: str) -> None:
    layer, fresh = nn.Sequential(LAYERS[name]()), nn.Sequential(LAYERS[name]())
    old = OrderedDict(layer.state_dict())
    old._metadata = OrderedDict({"": {"version": 1}, "0": {"version": 1}})
    for state in (old, dict(old)):
        fresh.load_state_dict(state)
        assert all(map(torch.equal, fresh.parameters(), layer.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_before_is_loaded(tmp_path: Path) -> None:
    """By what compares keys, and knows no others."""
    layer, fresh = LAYERS["blocks"](), LAYERS["blocks"]()
    dcp.save(dict(layer.named_parameters()), checkpoint_id=tmp_path, no_dist=True)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(fresh, state)
    assert all(map(torch.equal, fresh.parameters(), layer.parameters()))


@pytest.mark.parametrize(
    ("held", "wanted"), [pair for pair in itertools.permutations(LAYERS, 2) if not set(pair) <= set(SAME_SHAPES)]
)
def test_shapes_are_enough_for_most(held: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key|Unexpected key"):
        LAYERS[wanted]().load_state_dict(tensors_only(LAYERS[held](), tmp_path))


def test_shapes_name_both_layers(tmp_path: Path) -> None:
    words = (
        "FactorLinear: what is loaded is of structure='kronecker', factors=((4, 16), (16, 4)), rank=1, this is of "
        "structure='kronecker', factors=((8, 8), (8, 8)), rank=1"
    )
    with pytest.raises(RuntimeError, match=re.escape(words)):
        LAYERS["one-term"]().load_state_dict(tensors_only(LAYERS["factors"](), tmp_path))


# As a tensor, for what keeps nothing else


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactorLinear, "record", True)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("held", "wanted"), [*itertools.permutations(SAME_SHAPES, 2)])
def test_safetensors_keep_the_record_if_wanted(held: str, wanted: str, tmp_path: Path) -> None:
    state = tensors_only(nn.Sequential(LAYERS[held]()), tmp_path)
    nn.Sequential(LAYERS[held]()).load_state_dict(state)
    with pytest.raises(RuntimeError, match="what is loaded is of "):
        nn.Sequential(LAYERS[wanted]()).load_state_dict(state)


def test_the_record_is_read_by_who_writes_none_and_not_missed_by_who_does(tmp_path: Path) -> None:
    layer, fresh = LAYERS["rank"](), LAYERS["rank"]()
    plain = tensors_only(layer, tmp_path)
    layer.record = True
    state = tensors_only(layer, tmp_path)
    assert state.keys() - plain.keys() == {"_extra_state"} and state["_extra_state"].dtype == torch.uint8
    fresh.load_state_dict(state)
    assert copy.deepcopy(layer).record
    layer.load_state_dict(plain)
    with pytest.raises(RuntimeError, match="what is loaded is of"):
        LAYERS["blocks"]().load_state_dict(state)


@pytest.mark.parametrize("change", [lambda v: v * 0, lambda v: v + v, lambda v: v[:5], lambda v: v.float() / 3 + 0.5])
def test_what_is_no_record_any_more_says_nothing(change: Callable[[Tensor], Tensor]) -> None:
    """As in averages over a state_dict's values."""
    layer = LAYERS["rank"]()
    layer.record = True
    state = dict(layer.state_dict())
    state["_extra_state"] = change(state["_extra_state"])
    layer.load_state_dict(state)


def test_a_record_under_a_key_that_was_renamed_says_nothing() -> None:
    module = nn.Sequential(FactorLinear(12, 20), FactorLinear(20, 12))
    state = module.state_dict()
    for name in ("weight_0", "weight_1", "bias"):
        state[f"0.{name}"], state[f"1.{name}"] = state[f"1.{name}"], state[f"0.{name}"]
    nn.Sequential(FactorLinear(20, 12), FactorLinear(12, 20)).load_state_dict(state)


# nn.Linear's


def test_the_weights_of_a_linear_are_refused_or_warned_of() -> None:
    linear, layer = nn.Linear(64, 64), LAYERS["rank"]()
    before = values(layer)[:2]
    words = r"has an nn\.Linear's weight \(64, 64\), this is of structure='kronecker'.*FactorLinear\.from_linear"
    words = "FactorLinear keeps the weights it has: .*" + words
    with pytest.raises(RuntimeError, match="Missing key"), pytest.warns(UserWarning, match=words):
        layer.load_state_dict(linear.state_dict())
    with pytest.warns(UserWarning, match=words):
        layer.load_state_dict(linear.state_dict(), strict=False)
    assert all(map(torch.equal, values(layer)[:2], before))


def test_a_part_of_the_parameters_is_loaded_if_not_strict() -> None:
    layer, other = LAYERS["rank"](), LAYERS["rank"]()
    for part in ("weight_1", "weight_0", "bias"):
        state: Mapping[str, Tensor] = {part: other.state_dict()[part]}
        layer.load_state_dict(state, strict=False)
        assert torch.equal(layer.state_dict()[part], state[part])


# Blocks


def test_blocks_of_other_activations_are_refused() -> None:
    def block(**settings: object) -> FactorMLP:
        return FactorMLP([6, (2, 4), (4, 2), 6], **settings)

    state = saved(block().state_dict())
    block().load_state_dict(state)
    for settings in (dict(activation="gelu"), dict(output_activation="tanh"), dict(residual=True)):
        with pytest.raises(RuntimeError, match=r"\(what is loaded is of activations="):
            block(**settings).load_state_dict(state)
        block(**settings).load_state_dict(state, strict=False)


def test_a_model_and_what_fuse_returns_load_each_others() -> None:
    def model() -> nn.Module:
        return nn.Sequential(FactorLinear(12, 20), nn.GELU(), FactorLinear(20, 12), FactorMLP([12, (3, 4), (4, 3)]))

    x = torch.randn(2, 12)
    plain, fused = model(), fuse(model())
    assert plain.state_dict().keys() == fused.state_dict().keys()
    fused.load_state_dict(saved(plain.state_dict()))
    torch.testing.assert_close(fused(x), plain(x))
    other = model()
    other.load_state_dict(saved(fused.state_dict()))
    torch.testing.assert_close(other(x), plain(x))
    with pytest.raises(RuntimeError, match="FactorLinear 0: what is loaded is of"):
        fuse(nn.Sequential(FactorLinear(12, 20, factors=((2, 6), (5, 4))), nn.GELU())).load_state_dict(
            nn.Sequential(FactorLinear(12, 20), nn.GELU()).state_dict()
        )


def test_optimizers_and_averaged_models_go_on() -> None:
    layer = LAYERS["activation"]()
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    averaged.update_parameters(layer)
    averaged.load_state_dict(saved(averaged.state_dict()))
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(saved(optimizer.state_dict()))


# transformers


def bert(layer: Callable[[int, int], nn.Module]) -> tuple[Any, Any]:
    """A class of models with such layers, and a configuration for it."""
    transformers = pytest.importorskip("transformers")

    class Model(transformers.BertModel):
        def __init__(self, config: Any, **named: Any) -> None:
            super().__init__(config, **named)
            for each in self.encoder.layer:
                each.intermediate.dense, each.output.dense = layer(32, 64), layer(64, 32)

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    return Model, transformers.BertConfig(**sizes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", [False, True])
def test_a_pretrained_model_comes_back(record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactorLinear, "record", record)
    cls, config = bert(lambda p, q: FactorLinear(p, q, structure="monarch", blocks=4))
    model, ids = cls(config).eval(), torch.arange(8).unsqueeze(0)
    model.save_pretrained(tmp_path)
    again, told = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    torch.testing.assert_close(again.eval()(ids)[0], model(ids)[0])
    if record:
        other, _ = bert(lambda p, q: FactorLinear(p, q, structure="monarch", blocks=4, activation="gelu"))
        with pytest.raises(Exception, match=r"what is loaded is of .*activation='identity', this is of .*'gelu'"):
            other.from_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_pretrained_dense_weights_are_told_of(tmp_path: Path) -> None:
    dense, config = bert(nn.Linear)
    dense(config).save_pretrained(tmp_path)
    factored, _ = bert(FactorLinear)
    _, told = factored.from_pretrained(tmp_path, output_loading_info=True)
    places = ("encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense")
    assert told["missing_keys"] == {f"{place}.weight_{i}" for place in places for i in (0, 1)}
    assert told["unexpected_keys"] == {f"{place}.weight" for place in places}
