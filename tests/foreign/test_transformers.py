"""Models of transformers, small and with random weights, converted: they compute, train, generate, and go back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorlayer import FactorLinear, convert, load_converted, load_dense, param_groups, report, restore, save_converted

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `foreign`")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
MONARCH = dict(structure="monarch", blocks=4, rank=2)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(n_embd=24, n_layer=2, n_head=4, vocab_size=50, n_positions=16)
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    return transformers.GPT2LMHeadModel(config).eval()


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()


EXAMPLES = {
    gpt2: {"input_ids": torch.arange(24).reshape(2, 12), "labels": torch.arange(24).reshape(2, 12)},
    vit: {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).reshape(2, 3, 16, 16), "labels": torch.tensor([0, 1])},
}
models = pytest.mark.parametrize("make", EXAMPLES, ids=lambda make: make.__name__)


def logits(model: nn.Module, make: Any) -> Tensor:
    return model(**{name: x.double() if x.is_floating_point() else x for name, x in EXAMPLES[make].items()}).logits


def whole(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Of full rank, for layers of the blocks."""
    names = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    return {name: dict(structure="monarch", blocks=4, rank=6) for name in names if "layers." in name or ".h." in name}


@models
def test_with_full_rank_it_computes_the_same(make: Any) -> None:
    model = make().double()
    right = logits(model, make)
    done = convert(model, whole(model))
    assert len(done.changes) == (8 if make is gpt2 else 12)
    torch.testing.assert_close(logits(model, make), right, rtol=1e-8, atol=1e-8)


@models
def test_it_trains_and_is_copied_and_goes_back(make: Any, tmp_path: Path) -> None:
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    done = convert(model, dict.fromkeys(whole(model), MONARCH), keep=True)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(model(**EXAMPLES[make]).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    save_converted(model, tmp_path / "y.safetensors")
    other = make()
    assert load_converted(other, tmp_path / "y.safetensors").mapping == done.mapping
    for twin in (other, copy.deepcopy(model)):
        assert torch.equal(twin(**EXAMPLES[make]).logits, model(**EXAMPLES[make]).logits)
    with pytest.raises(RuntimeError, match="load_dense"):
        model.load_state_dict(state)
    load_dense(model, state)
    restore(model, "kept")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if "bias" not in name)


@models
def test_classes_take_what_is_not_tied(make: Any) -> None:
    model = make()
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D) if make is gpt2 else (nn.Linear,)
    settings = dict(factors=1)  # of the classifier's 2 outputs, too
    if make is gpt2:
        with pytest.raises(ValueError, match=r"lm_head .* its weight is tied: it is transformer\.wte\.weight as well"):
            convert(model, {nn.Linear: settings})
        kinds = kinds[1:]
    done = convert(model, dict.fromkeys(kinds, settings))
    assert not any(type(module) in kinds for module in model.modules()) and len(done.changes) >= 8


def test_gpt2_generates_with_its_cache() -> None:
    model = gpt2()
    convert(model, {"transformer.h.*.mlp.*": MONARCH, "*.c_attn": dict(rank=2)})
    given = torch.tensor([[3, 4, 5]])
    made = model.generate(given, max_new_tokens=6, do_sample=False, pad_token_id=2, eos_token_id=None)
    assert made.shape == (1, 9)
    for length in range(3, 9):  # each as without the cache
        assert model(made[:, :length]).logits[0, -1].argmax() == made[0, length]


def test_theirs_save_and_load(tmp_path: Path) -> None:
    model = gpt2()
    mapping = convert(model, {"*.mlp.*": MONARCH}).mapping
    model.save_pretrained(tmp_path)
    other = gpt2()
    convert(other, mapping, initialize="fresh")
    from safetensors.torch import load_file

    missing, unexpected = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    assert torch.equal(other(**EXAMPLES[gpt2]).logits, model(**EXAMPLES[gpt2]).logits)


@models
def test_report_counts_what_layers_get(make: Any) -> None:
    model = make()
    mapping = dict.fromkeys(whole(model), MONARCH)
    found = report(model, EXAMPLES[make], mapping)
    assert sum(line.structure is not None for line in found.lines) == len(mapping)
    rows = {line.name: line.samples for line in found.lines}
    assert rows["lm_head" if make is gpt2 else "classifier"] == (24 if make is gpt2 else 2)
    convert(model, mapping)
    assert report(model, EXAMPLES[make]) == found
    assert sum(isinstance(module, FactorLinear) for module in model.modules()) == len(mapping)


@models
def test_it_compiles(make: Any) -> None:
    model = make().double()
    convert(model, dict.fromkeys(whole(model), MONARCH))
    right = logits(model, make)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, make), right, rtol=1e-8, atol=1e-8)


@models
def test_fitted_layers_are_nearer_than_projected_ones(make: Any) -> None:
    dense, projected, fitted = (make().double() for _ in range(3))
    mapping = dict.fromkeys(whole(dense), MONARCH)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in EXAMPLES[make].items()}
    convert(projected, mapping)
    done = convert(fitted, mapping, inputs=[batch])
    assert all(change.fit.after < change.fit.before for change in done.changes)
    right = logits(dense, make)
    assert (logits(fitted, make) - right).norm() < 0.8 * (logits(projected, make) - right).norm()
