"""What `implementation` is assigned to: a layer, a block, what fuse returns and its stacks."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import factorlayer.functional
from factorlayer import FactorLinear, FactorMLP, fuse
from factorlayer.autograd.layer_ops import not_at_once

NAMES = {"v1": "naive", "v2": "batched", "v3": "fused", "naive": "naive", "batched": "batched", "fused": "fused"}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that ran, in their order."""
    calls: list[str] = []
    for name in ("naive", "batched", "fused"):
        real = getattr(factorlayer.functional, name)

        def spy(*arguments: object, name: str = name, real: Callable[..., Tensor] = real) -> Tensor:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(factorlayer.functional, name, spy)
    monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)  # instead of fused
    return calls


@pytest.mark.parametrize(("given", "meant"), NAMES.items())
def test_an_assigned_name_runs_and_is_explained(given: str, meant: str, called: list[str]) -> None:
    layer = FactorLinear(12, 20)
    layer.implementation = given
    layer(torch.ones(12))
    assert called == [meant] and layer.implementation == meant
    assert layer.explain().splitlines()[-1].startswith(f"runs {meant}, ")
    assert f"implementation={meant!r}" in repr(layer)


def subjects() -> dict[str, nn.Module]:
    block = FactorMLP([12, (2, 4), (4, 3)])
    return {
        "FactorLinear": FactorLinear(12, 20),
        "FactorMLP": block,
        "Fused": fuse(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))),
        "": block.stacks[0],
    }


@pytest.mark.parametrize("wrong", ["v9", "Fused", "", None, 3, ["fused"]], ids=str)
@pytest.mark.parametrize("who", subjects())
def test_an_unknown_name_is_refused_and_changes_nothing(who: str, wrong: object) -> None:
    subject = subjects()[who]
    message = f"implementation should be one of auto, naive, batched, fused, v1, v2, v3; it is {wrong!r}"
    with pytest.raises(ValueError, match="^" + re.escape(f"{who}: {message}" if who else message)):
        subject.implementation = wrong
    assert subject.implementation == "auto"


@pytest.mark.parametrize(("given", "meant"), NAMES.items())
@pytest.mark.parametrize("hooked", [False, True])
def test_a_block_hands_it_to_all_that_it_runs(given: str, meant: str, hooked: bool, called: list[str]) -> None:
    """With a hook its layers are called one by one."""
    mlp = FactorMLP([(3, 4), (6, 6), (3, 4)], gated=True)
    mlp.implementation = given
    if hooked:
        for layer in (*mlp.layers, *mlp.gates):
            layer.register_forward_hook(lambda *_: None)
    mlp(torch.ones(2, 12))
    assert called == [meant] * 3
    assert [layer.implementation for layer in (*mlp.layers, *mlp.gates)] == [meant] * 3
    assert mlp.explain().splitlines()[-1] == f"  stacks run by {meant}, as asked"


def test_what_fuse_returns_leaves_the_layers_of_the_module_theirs() -> None:
    module = nn.Sequential(FactorLinear(12, 12), nn.ReLU(), FactorLinear(12, 12))
    fused = fuse(module)
    assert "as asked" not in fused.explain()
    fused.implementation = "v3"
    assert [stack.implementation for stack in fused.stacks] == ["fused"]
    assert fused.explain().splitlines()[-1] == "  stacks run by fused, as asked"
    assert [module[0].implementation, module[2].implementation] == ["auto"] * 2


def test_a_stack_takes_other_names() -> None:
    stack = FactorMLP([4, 5, 6]).stacks[0]
    stack.implementation = "v1"
    assert stack.implementation == "naive"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize(("held", "meant"), [*NAMES.items(), ("v9", "naive"), ("auto", "auto")])
def test_older_layers_load(held: str, meant: str, copied: Callable[[FactorLinear], FactorLinear]) -> None:
    """They could be given any name; an unknown one ran naive."""
    layer = FactorLinear(12, 20)
    layer.__dict__["implementation"] = held
    again = copied(layer)
    assert again.implementation == meant
    torch.testing.assert_close(again(torch.ones(12)), layer.to_linear()(torch.ones(12)))
