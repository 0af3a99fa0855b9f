"""Models of transformers with sizes and structures that are drawn: converted, they compute, learn and generate what the
dense models with the same matrices do, by their layers and by stacks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorlayer import FactorLinear, convert, freeze, fuse, restore

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `foreign`")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
VOCABULARY = 50
Given = dict[str, Tensor]


def sizes_of(draw: random.Random) -> dict[str, int]:
    heads = draw.choice([2, 4])
    names = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": heads}
    return names | {"hidden_size": heads * draw.choice([4, 6, 10]), "intermediate_size": draw.choice([32, 48, 60, 72])}


def ids(draw: random.Random, length: int) -> Tensor:
    return torch.tensor([[draw.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(2)])


def gpt2(draw: random.Random) -> tuple[nn.Module, Given]:
    s = sizes_of(draw)
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    own: dict[str, Any] = {name: s[theirs] for name, theirs in names.items()} | {"n_inner": s["intermediate_size"]}
    own |= {"activation_function": draw.choice(["gelu_new", "relu", "silu", "gelu_fast", "quick_gelu", "relu2"])}
    config = transformers.GPT2Config(**own, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids(draw, 7)}


def llama(draw: random.Random) -> tuple[nn.Module, Given]:
    config = transformers.LlamaConfig(**sizes_of(draw), num_key_value_heads=2, mlp_bias=draw.random() < 0.5)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(draw, 7)}


def neox(draw: random.Random) -> tuple[nn.Module, Given]:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes_of(draw))), {"input_ids": ids(draw, 7)}


def bert(draw: random.Random) -> tuple[nn.Module, Given]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes_of(draw))), {"input_ids": ids(draw, 7)}


def vit(draw: random.Random) -> tuple[nn.Module, Given]:
    sizes = {name: size for name, size in sizes_of(draw).items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=60)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16).double()}


def t5(draw: random.Random, feed_forward: str = "relu") -> tuple[nn.Module, Given]:
    s = sizes_of(draw)
    own: dict[str, Any] = {"d_model": s["hidden_size"], "d_kv": 6, "d_ff": s["intermediate_size"], "num_layers": 2}
    own |= {"num_heads": s["num_attention_heads"], "decoder_start_token_id": 0, "feed_forward_proj": feed_forward}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**own, vocab_size=VOCABULARY))
    return model, {"input_ids": ids(draw, 7), "decoder_input_ids": ids(draw, 4)}


def gated_t5(draw: random.Random) -> tuple[nn.Module, Given]:
    return t5(draw, "gated-gelu")


# Which layers MLPs have, and how many of them one stack takes
MODELS: dict[Callable[[random.Random], tuple[nn.Module, Given]], tuple[tuple[str, ...], int]] = {
    gpt2: (("c_fc", "mlp.c_proj"), 2),
    llama: (("gate_proj", "up_proj", "down_proj"), 1),
    neox: (("dense_h_to_4h", "dense_4h_to_h"), 2),
    bert: (("intermediate.dense", "output.dense"), 2),
    vit: (("mlp.fc1", "mlp.fc2"), 2),
    t5: (("wi", "wo"), 2),
    gated_t5: (("wi_0", "wi_1", "wo"), 1),
}
STRUCTURES = (
    dict(structure="monarch", blocks=2),
    dict(structure="monarch", blocks=(2, 4)),
    dict(structure="kronecker"),
)
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
every_seed = pytest.mark.parametrize("seed", [0, 1])


def pair(make: Any, seed: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, Given]:
    """A converted model, the dense one with its matrices, and what they are called with."""

    def is_of_mlp(name: str, module: nn.Module) -> bool:
        return name.endswith(MODELS[make][0]) and "attention" not in name

    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, given = make(draw)
    model = model.to(dtype).eval()
    settings: dict[str, Any] = {**draw.choice(STRUCTURES), "rank": draw.choice([1, 2])}
    done = convert(model, {is_of_mlp: settings})
    assert len(done.changes) >= 2 * len(MODELS[make][0])
    dense = copy.deepcopy(model)
    restore(dense, "present")
    return model, dense, given


def logits(model: nn.Module, given: Given) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}).logits


def train(model: nn.Module, given: Given) -> Tensor:
    """A training step's gradients, of any loss, with the dropouts that the seed draws."""
    model.train()
    torch.manual_seed(3)
    y = logits(model, given)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    model.eval()
    return y.detach()


def assert_same_gradients(model: nn.Module, dense: nn.Module) -> None:
    """Those of structured weights are the dense matrix's, through what makes that of them."""
    right = {name: part for name, part in dense.named_modules() if name}
    for name, part in model.named_modules():
        if isinstance(part, FactorLinear):
            grad = right[name].weight.grad
            grad = grad if type(right[name]) is nn.Linear else grad.T
            expected = torch.autograd.grad(part.to_dense(), part.weights, grad)
            torch.testing.assert_close([weight.grad for weight in part.weights], list(expected), rtol=1e-7, atol=1e-9)
            if part.bias is not None:
                torch.testing.assert_close(part.bias.grad, right[name].bias.grad, rtol=1e-7, atol=1e-9)
    of_dense = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if name in of_dense and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, of_dense[name].grad, rtol=1e-7, atol=1e-9)


@every_model
@every_seed
def test_it_computes_and_learns_what_the_dense_model_does(make: Any, seed: int) -> None:
    model, dense, given = pair(make, seed)
    torch.testing.assert_close(logits(model, given), logits(dense, given), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(train(model, given), train(dense, given), rtol=1e-9, atol=1e-9)
    assert_same_gradients(model, dense)


@every_model
@every_seed
def test_fused_it_does_the_same_with_activations_in_stacks(make: Any, seed: int) -> None:
    model, dense, given = pair(make, seed)
    fused, right = fuse(model), logits(dense, given)
    of_mlps = [stack for stack in fused.stacks if isinstance(stack.members[0], FactorLinear)]
    count = sum(isinstance(part, FactorLinear) for part in model.modules()) // len(MODELS[make][0])
    assert [len(stack.layers) for stack in of_mlps] == [MODELS[make][1]] * count
    assert all(stack.layers[0].chain.activation != "identity" for stack in of_mlps)
    torch.testing.assert_close(logits(fused, given), right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(train(fused, given), train(dense, given), rtol=1e-9, atol=1e-9)
    assert_same_gradients(model, dense)
    with torch.no_grad():
        torch.testing.assert_close(logits(fused.freeze(), given), right, rtol=1e-9, atol=1e-9)


@every_model
def test_gradient_checkpointing_changes_no_gradient(make: Any) -> None:
    model, dense, given = pair(make, 2)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(train(model, given), train(dense, given), rtol=1e-9, atol=1e-9)
    assert_same_gradients(model, dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@every_model
def test_in_16_bits_it_is_as_near_as_the_dense_model(make: Any, dtype: torch.dtype) -> None:
    model, dense, given = pair(make, 3)
    right = logits(dense, given)
    errors = []
    for each in (model.to(dtype), fuse(model), dense.to(dtype)):
        with torch.no_grad():
            y = logits(each, given)
        assert y.dtype == dtype
        errors.append((y - right).norm() / right.norm())
    assert max(errors[:2]) <= 2 * errors[2]


@pytest.mark.parametrize("make", [gpt2, llama, neox, t5, gated_t5], ids=lambda make: make.__name__)
@every_seed
def test_it_generates_with_its_cache_what_the_dense_model_does(make: Any, seed: int) -> None:
    model, dense, given = pair(make, seed)
    how: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    right = dense.generate(given["input_ids"], **how)
    frozen = freeze(fuse(copy.deepcopy(model), inplace=True))
    assert type(frozen) is type(model) and list(frozen.state_dict()) == list(model.state_dict())
    for each in (model, fuse(model), fuse(model).freeze(), frozen):
        assert torch.equal(each.generate(given["input_ids"], **how), right)


@every_model
def test_it_compiles_by_its_layers_and_with_fused_mlps(make: Any) -> None:
    model, dense, given = pair(make, 4)
    right = logits(dense, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, given), right, rtol=1e-8, atol=1e-8)
    assert fuse(model, inplace=True) is model
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, given), right, rtol=1e-8, atol=1e-8)


class Converted(transformers.GPT2LMHeadModel):
    """A class that converts itself, as from_pretrained of transformers wants it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        convert(self, {"*.mlp.c_*": dict(structure="monarch", blocks=2)}, initialize="fresh")


def test_from_pretrained_of_a_class_that_converts_itself(tmp_path: Path) -> None:
    model, given = gpt2(random.Random(0))
    converted = Converted(model.config).eval()
    converted.save_pretrained(tmp_path)
    again = Converted.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, given), logits(converted, given))
