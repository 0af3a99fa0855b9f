"""save_converted and load_converted: files that say what convert did."""

from __future__ import annotations

import builtins
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformer import Conv1D, Transformer, tokens, turned

from factorlayer import FactorLinear, convert, load_converted, restore, save_converted

__all__ = ["turned"]  # a fixture
MAPPING = {"*.mlp.c_fc": dict(structure="monarch", blocks=4, rank=2), "*.mlp.*": dict(rank=2, implementation="batched")}


def model(dense: type[nn.Module] = nn.Linear, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(dense)


@pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["Linear", "Conv1D"])
def test_a_file_makes_the_model_again(dense: type[nn.Module], tmp_path: Path, turned: object) -> None:
    first, second = model(dense), model(dense, seed=1)
    done = convert(first, MAPPING)
    save_converted(first, tmp_path / "y.safetensors")
    again = load_converted(second, tmp_path / "y.safetensors")
    assert again.mapping == done.mapping
    assert torch.equal(second(tokens()), first(tokens()))
    assert second.lm_head.weight is second.wte.weight
    assert second.h[0].mlp["c_proj"].implementation == "batched"
    with safe_open(tmp_path / "y.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "wte.weight" in names and "lm_head.weight" not in names  # once


def test_a_model_whose_weights_are_not_yet_numbers_is_loaded(tmp_path: Path) -> None:
    first, second = model(), model(seed=1)
    convert(first, MAPPING)
    save_converted(first, tmp_path / "y.safetensors")
    for parameter in second.parameters():  # as to_empty() of a model on the meta device may leave them
        nn.init.constant_(parameter, float("nan"))
    load_converted(second, tmp_path / "y.safetensors")
    assert torch.equal(second(tokens()), first(tokens()))


def test_a_model_that_was_converted_so_is_loaded(tmp_path: Path) -> None:
    first, second = model(), model(seed=1)
    convert(first, MAPPING)
    save_converted(first, tmp_path / "y.safetensors")
    convert(second, {"h.0.mlp.*": None, **MAPPING})
    again = load_converted(second, tmp_path / "y.safetensors")
    assert [change.name for change in again.changes] == ["h.0.mlp.c_fc", "h.0.mlp.c_proj"]
    assert load_converted(second, tmp_path / "y.safetensors") is None
    assert torch.equal(second(tokens()), first(tokens()))


def test_weights_in_the_same_memory_are_written_once(tmp_path: Path) -> None:
    first, second = model(), model(seed=1)
    first.lm_head.weight = nn.Parameter(first.wte.weight.data)
    save_converted(first, tmp_path / "y.safetensors")
    load_converted(second, tmp_path / "y.safetensors")
    assert torch.equal(second(tokens()), first(tokens()))


class Overlapping(nn.Module):
    """Tensors in the memory of others: a square weight and its transpose, a buffer and parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.there, self.back = nn.Linear(8, 8), nn.Linear(8, 8, False), nn.Linear(8, 8, False)
        self.back.weight = nn.Parameter(self.there.weight.detach().T)
        whole = torch.randn(12)
        for name, part in (("whole", whole), ("start", whole[:5]), ("table", whole.view(3, 4)), ("one", whole[3:4])):
            self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.there(self.first(x)).relu())


def test_tensors_in_the_memory_of_others_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second, x = Overlapping(), Overlapping(), torch.randn(3, 8)
    convert(first, {"first": dict(structure="monarch", blocks=2)})
    save_converted(first, tmp_path / "y.safetensors")
    load_converted(second, tmp_path / "y.safetensors")
    assert torch.equal(second(x), first(x)) and second.back.weight.data_ptr() == second.there.weight.data_ptr()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_a_file_of_the_dense_model_is_loaded_as_it_is(tmp_path: Path) -> None:
    first, second = model(), model(seed=1)
    save_converted(first, tmp_path / "dense.safetensors")
    assert load_converted(second, tmp_path / "dense.safetensors") is None
    assert torch.equal(second(tokens()), first(tokens()))
    state = {name: value.clone() for name, value in model(seed=2).state_dict().items()}
    save_file(state, tmp_path / "theirs.safetensors")  # without metadata
    assert load_converted(second, tmp_path / "theirs.safetensors") is None
    assert torch.equal(second(tokens()), model(seed=2)(tokens()))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first = model()
    convert(first, MAPPING)
    save_converted(first, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match=r"y\.safetensors does not fit the model: .*'h\.0\.mlp\.c_fc' selects"):
        load_converted(nn.Sequential(nn.Linear(4, 4)), tmp_path / "y.safetensors")
    restore(first)
    save_converted(first, tmp_path / "dense.safetensors")
    other = model()
    convert(other, MAPPING)
    with pytest.raises(RuntimeError, match="load_dense"):
        load_converted(other, tmp_path / "dense.safetensors")
    assert isinstance(other.h[0].mlp["c_fc"], FactorLinear)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "x.pt")
    with pytest.raises(
        ValueError, match=r"x\.pt should be a safetensors file, as save_converted writes them; it cannot be"
    ):
        load_converted(model(), tmp_path / "x.pt")


def test_a_layer_that_is_structured_otherwise_is_refused(tmp_path: Path) -> None:
    """Whose weights have the same shapes."""
    plain = nn.Sequential(nn.Linear(8, 8))
    first, second = copy.deepcopy(plain), copy.deepcopy(plain)
    convert(first, {"0": dict(structure="monarch", blocks=2, implementation="naive")})
    convert(second, {"0": dict(factors=((2, 4), (4, 2)), rank=2)})
    assert [weight.shape for weight in first[0].weights] == [weight.shape for weight in second[0].weights]
    save_converted(first, tmp_path / "y.safetensors")
    weights = [weight.clone() for weight in second[0].weights]
    with pytest.raises(ValueError, match=r"load_converted: 0 is structured otherwise in .*y\.safetensors than in the"):
        load_converted(second, tmp_path / "y.safetensors")
    assert all(map(torch.equal, second[0].weights, weights))
    convert(plain, {"0": dict(structure="monarch", blocks=2)})  # run by another implementation
    assert load_converted(plain, tmp_path / "y.safetensors") is None
    assert torch.equal(plain[0].to_dense(), first[0].to_dense())


def test_a_model_that_a_file_does_not_fit_stays_dense(tmp_path: Path) -> None:
    first = model()
    convert(first, MAPPING)
    save_converted(first, tmp_path / "y.safetensors")
    second = model(seed=1)
    second.more = nn.Linear(4, 4)
    parts, weights = list(second.modules()), [part.weight.clone() for part in second.h[0].mlp.values()]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "more\.weight"'):
        load_converted(second, tmp_path / "y.safetensors")
    assert all(a is b for a, b in zip(second.modules(), parts, strict=True))
    assert all(torch.equal(part.weight, right) for part, right in zip(second.h[0].mlp.values(), weights, strict=True))
    assert not second._load_state_dict_pre_hooks


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100_000], ids=["no JSON", "a list", "deep"])
def test_files_that_say_nothing(text: str, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "y.safetensors", metadata={"factorlayer.convert": text})
    with pytest.raises(
        ValueError, match=r"load_converted: .*y\.safetensors should say as a JSON object what convert did"
    ):
        load_converted(nn.Sequential(nn.Linear(2, 2)), tmp_path / "y.safetensors")
    with pytest.raises(OSError, match=r"save_converted: .*y\.safetensors cannot be written"):
        save_converted(model(), tmp_path / "no" / "y.safetensors")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (save_converted, load_converted):
        with pytest.raises(
            ImportError, match=f"{call.__name__} needs safetensors, which is not installed: pip install"
        ):
            call(model(), tmp_path / "y.safetensors")
