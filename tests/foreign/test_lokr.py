"""LoKr layers of PEFT and of LyCORIS, taken over: the numbers are theirs, and so is all but the product."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_place import counted, go_our_way
from torch import Tensor, nn

from factorlayer import adapters

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs

SIZES = [(12, 20), (64, 48), (17, 30), (96, 96)]  # 17 is prime: a factor of 1
RANKS = [1, 4, 64]  # of both halves, of the second one, of none
LEADING = [(5,), (2, 3), ()]
configurations = pytest.mark.parametrize(
    ("sizes", "rank", "both", "factor", "leading"),
    [
        (*case, LEADING[i % len(LEADING)])
        for i, case in enumerate(itertools.product(SIZES, RANKS, (False, True), (-1, 4)))
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def _our_way(monkeypatch: pytest.MonkeyPatch) -> None:
    go_our_way(monkeypatch.setattr)


def randomize(module: nn.Module) -> None:
    """Their layers begin as zeros."""
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64) / 4


def results(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    y = run(x)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    grad_y = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]


def agree(found: list[Tensor], right: list[Tensor]) -> None:
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="needs peft, of the extra `foreign`")


@pytest.fixture
def lokr() -> Any:
    return pytest.importorskip("lycoris.modules.lokr", reason="needs lycoris-lora, of the extra `foreign`")


def model_of(peft: Any, base: nn.Module, **options: Any) -> Any:
    """With an adapter on each layer that can have one, of random numbers in double."""
    named = [name for name, module in base.named_modules() if hasattr(module, "weight")]
    config = peft.LoKrConfig(target_modules=named, **{"r": 4, "alpha": 3, "init_weights": False, **options})
    model = peft.get_peft_model(base.double(), config)
    randomize(model)
    return model


def two_layers(sizes: tuple[int, int] = (48, 36)) -> nn.Module:
    return nn.Sequential(nn.Linear(*sizes), nn.Tanh(), nn.Linear(sizes[1], sizes[0]))


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@configurations
def test_peft(
    peft: Any, sizes: tuple[int, int], rank: int, both: bool, factor: int, leading: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from factorlayer.adapters import in_peft

    model = model_of(peft, two_layers(sizes), r=rank, decompose_both=both, decompose_factor=factor)
    x = rows(*leading, sizes[0])
    right = results(model, model, x)
    assert len(adapters.take_over(model).taken) == 2
    calls = counted(monkeypatch.setattr, in_peft, "peft")
    agree(results(model, model, x), right)
    assert calls["peft"] == calls["peft at once"] == 2
    with torch.no_grad():
        torch.testing.assert_close(model.merge_and_unload()(x), right[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bypass", [True, False])
@configurations
def test_lycoris(
    lokr: Any, sizes: tuple[int, int], rank: int, both: bool, factor: int, leading: tuple[int, ...], bypass: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from factorlayer.adapters import in_lycoris

    linear = nn.Linear(*sizes).double().requires_grad_(False)
    layer = lokr.LokrModule(
        "layer", linear, 0.7, rank, 3, decompose_both=both, factor=factor, bypass_mode=bypass, use_scalar=True
    ).double()
    randomize(layer)
    x = rows(*leading, sizes[0])
    right = results(layer, layer, x)
    adapters.take_over(layer)
    calls = counted(monkeypatch.setattr, in_lycoris, "lycoris")
    agree(results(layer, layer, x), right)
    assert calls["lycoris"] == calls["lycoris at once"] == 1


@pytest.mark.parametrize("options", [{"rank_dropout": 0.4}, {"rank_dropout": 0.4, "rank_dropout_scale": True},
                                     {"module_dropout": 0.5}], ids=str)  # fmt: skip
@pytest.mark.parametrize("package", ["peft", "lycoris"])
def test_what_is_dropped_is_what_they_drop(package: str, options: dict[str, Any], request: Any) -> None:
    if package == "peft":
        model = model_of(request.getfixturevalue("peft"), two_layers(), **options).train()
    else:
        module = request.getfixturevalue("lokr").LokrModule
        model = module("layer", nn.Linear(48, 48).double(), 1.0, 4, 3, bypass_mode=False, **options).double().train()
        randomize(model)
    x = rows(5, 48)

    def seeded() -> list[list[Tensor]]:
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            y = model(x)
            found.append([y.detach(), torch.autograd.grad(y.sum(), x)[0]])
        return found

    right = seeded()
    adapters.take_over(model)
    found = seeded()
    for pair in zip(found, right, strict=True):
        agree(*pair)
    assert not all(torch.equal(y, found[0][0]) for y, _ in found)


def test_what_is_drawn_next_is_what_they_would_draw(peft: Any) -> None:
    model, drawn = model_of(peft, two_layers()).train(), []
    for take in (lambda model: None, adapters.take_over):
        take(model)
        torch.manual_seed(3)
        model(rows(5, 48).detach())
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)


def test_hooks_of_the_layer_below_see_what_it_makes(peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorlayer.adapters import in_peft

    model, seen = model_of(peft, two_layers()), []
    below = model.base_model.model[0].base_layer
    below.register_forward_hook(lambda _, given, y: seen.append((*given, y)) or 2 * y)
    x = rows(5, 48)
    right = results(model, model, x)
    adapters.take_over(model)
    calls = counted(monkeypatch.setattr, in_peft, "peft")
    agree(results(model, model, x), right)
    assert (calls["peft"], calls["peft at once"]) == (2, 1)
    (given, y) = seen[-1]
    assert len(seen) == 2 and given is x
    torch.testing.assert_close(y, nn.functional.linear(x, below.weight, below.bias))


@pytest.mark.parametrize("kind", ["linear", "convolution", "strides", "channels last"])
def test_dropout_of_bypass_mode(kind: str, lokr: Any) -> None:
    base = nn.Linear(48, 48) if kind == "linear" else nn.Conv2d(48, 48, 1, stride=2 if kind == "strides" else 1)
    layer = lokr.LokrModule("layer", base.double(), 1.0, 4, 3, dropout=0.5, bypass_mode=True).double()
    randomize(layer)
    x = rows(5, 48) if kind == "linear" else rows(2, 48, 3, 5)
    if kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    right = layer.train()(x)
    adapters.take_over(layer)
    torch.manual_seed(3)
    agree([layer(x)], [right])


CONVOLUTIONS = [
    (lambda: nn.Conv2d(12, 20, 1), (3, 12, 4, 5)),
    (lambda: nn.Conv2d(12, 20, 1, stride=(2, 1)), (3, 12, 4, 5)),
    (lambda: nn.Conv1d(12, 20, 1, stride=2), (3, 12, 7)),
    (lambda: nn.Conv2d(64, 64, 1, padding="same"), (2, 64, 3, 3)),
]


@pytest.mark.parametrize("package", ["peft", "lycoris", "lycoris bypass"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("rank", [2, 64])
@pytest.mark.parametrize("number", range(len(CONVOLUTIONS)))
def test_convolutions_of_one_place(
    number: int, rank: int, channels_last: bool, package: str, request: Any
) -> None:  # fmt: skip
    make, shape = CONVOLUTIONS[number]
    if package == "peft":
        dropped = {"rank_dropout": 0.3, "r": rank}
        model = model_of(request.getfixturevalue("peft"), nn.Sequential(make()), **dropped)
    else:
        bypass, module = package != "lycoris", request.getfixturevalue("lokr").LokrModule
        model = module("layer", make().double(), 1.0, rank, 3, bypass_mode=bypass, rank_dropout=0.3).double()
        randomize(model)
    x = rows(*shape)
    if channels_last:
        x = x.detach().movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
    torch.manual_seed(5)
    right = results(model.train(), model, x)
    record = adapters.take_over(model)
    if package == "peft" and len(shape) == 3 and rank == 64:
        assert "is another than w1 ⊗ w2" in str(record)
    else:
        assert len(record.taken) == 1
    torch.manual_seed(5)
    agree(results(model, model, x), right)


def test_layers_that_are_no_matrix_are_left(peft: Any) -> None:
    base = nn.Sequential(
        nn.Linear(8, 8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1, groups=2), nn.Conv1d(8, 8, 1, padding=1)
    )
    model = model_of(peft, base)
    record = adapters.take_over(model)
    assert [name[-1] for name in record.taken] == ["0"]
    assert list(record.left.values()) == [
        "a convolution with a kernel of 3 x 3 mixes places, not channels alone",
        "its convolution has 2 groups, which are a matrix each",
        "its convolution has a padding of (1,), which makes places without a sample",
    ]
    words = str(record)
    assert words.startswith("1 LoKr layers taken over, 3 left to their own code")
    assert "adapter 'default', 8 -> 8 by 2 x 2 ⊗ 4 x 4" in words


def test_layers_of_lycoris_that_need_the_whole_matrix_are_left(lokr: Any) -> None:
    layer = lokr.LokrModule("layer", nn.Linear(8, 8), 1.0, 2, 1, weight_decompose=True)
    assert adapters.take_over(layer).left == {"LokrModule": "weight_decompose takes the norm of the whole matrix"}
    linear = nn.Linear(8, 8)
    lokr.LokrModule.parametrize(linear, "weight", 1.0, 2, 1)
    (reason,) = adapters.take_over(linear).left.values()
    assert reason == "it is a parametrization, which makes the weight itself"


def test_several_adapters_disabled_and_merged_ones(peft: Any) -> None:
    model = model_of(peft, two_layers())
    model.add_adapter("other", peft.LoKrConfig(r=3, alpha=5, target_modules=["0"], init_weights=False))
    model.double()
    randomize(model)
    x = rows(5, 48)

    def in_all_ways() -> list[Tensor]:
        found = []
        for names in ("default", "other", ["default", "other"]):
            model.base_model.set_adapter(names)
            found += results(model, model, x)
        with model.disable_adapter():
            found.append(model(x))
        model.merge_adapter()
        found.append(model(x))
        model.unmerge_adapter()
        return [*found, model(x)]

    right = in_all_ways()
    record = adapters.take_over(model)
    assert "adapter 'other'" in record.taken["base_model.model.0"]
    agree(in_all_ways(), right)


def test_saved_loaded_copied_and_given_back(peft: Any, tmp_path: Path) -> None:
    model = model_of(peft, two_layers())
    base = copy.deepcopy(model).unload()
    x = rows(5, 48)
    right, before = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    adapters.take_over(model)
    after = model.state_dict()
    assert list(before) == list(after)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    agree([loaded(x)], [right])
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made.base_model.model[0]).__module__ == "factorlayer.adapters.in_peft"
        agree([made(x)], [right])
    assert adapters.give_back(model) == 2
    assert type(model.base_model.model[0]) is peft.tuners.lokr.Linear
    assert torch.equal(model(x), right)
    assert adapters.give_back(model) == 0


def test_what_was_added_since_is_taken_by_another_call(peft: Any) -> None:
    model = model_of(peft, two_layers())
    adapters.take_over(model)
    model.add_adapter("other", peft.LoKrConfig(target_modules=["0"], r=2))
    record = adapters.take_over(model)
    assert len(record.taken) == 2
    assert "adapter 'other'" in str(record)


def test_a_lycoris_network_of_a_model(lokr: Any) -> None:
    lycoris = pytest.importorskip("lycoris")
    lycoris.LycorisNetwork.apply_preset({"target_module": ["Linear"]})
    model = two_layers()
    model = nn.ModuleDict({"body": model}).double()
    network = lycoris.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, algo="lokr", factor=4)
    network.apply_to()
    network.double()
    randomize(network)
    x = rows(5, 48)
    right = model["body"](x)
    record = adapters.take_over(model)
    assert set(record.taken) == {"body.0", "body.2"}
    agree([model["body"](x)], [right])
    assert adapters.give_back(network) == 2
    agree([model["body"](x)], [right])


def test_under_autocast_compiled_and_traced(peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorlayer.adapters import in_peft

    calls = counted(monkeypatch.setattr, in_peft, "peft")
    model = model_of(peft, two_layers()).float()
    x = torch.randn(5, 48)
    right = model(x)
    adapters.take_over(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert calls["peft at once"] == 2
    assert y.dtype == torch.float32  # of x, to which PEFT's forward takes it back
    torch.testing.assert_close(y, right, rtol=0.1, atol=0.1)
    model.eval()  # trained, PEFT asks a random number whether to run an adapter
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), right, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        traced = torch.jit.trace(model.base_model.model, x, check_trace=False)
        torch.testing.assert_close(traced(x), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"r": 64}, {"decompose_both": True}, {"decompose_factor": 4}], ids=str)
def test_adapters_in_another_dtype_than_the_model(
    peft: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT makes them for a model in 16 bits, in one step too."""
    from factorlayer.adapters import in_peft

    model = model_of(peft, two_layers(), **options).float()
    for layer in (model.base_model.model[0], model.base_model.model[2]):
        layer.base_layer.bfloat16()
    x = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
    right = results(model, model, x)
    adapters.take_over(model)
    calls = counted(monkeypatch.setattr, in_peft, "peft")
    found = results(model, model, x)
    assert calls["peft at once"] == 2
    assert [each.dtype for each in found] == [each.dtype for each in right]
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[1:], right[1:], rtol=0.05, atol=0.05)
    with peft.helpers.disable_input_dtype_casting(model), pytest.raises((TypeError, RuntimeError), match="dtype"):
        model(x)  # which is not cast, as they were told


def lose(layer: Any, name: str) -> None:
    del getattr(layer, name)["default"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda layer: lose(layer, "lokr_w2_b"), "adapter 'default' lacks lokr_w2_b"),
        (lambda layer: lose(layer, "lokr_w2_a"), "adapter 'default' lacks lokr_w2_a"),
        (
            lambda layer: lose(layer, "lokr_w1"),
            "adapter 'default' lacks lokr_w1, and has no lokr_w1_a and lokr_w1_b either",
        ),
        (lambda layer: layer.lokr_w1.to("meta"), "adapter 'default' has no numbers in lokr_w1"),
        (
            lambda layer: layer.lokr_w1.update({"default": nn.Parameter(torch.ones(2, 3))}),
            r"adapter 'default' makes a matrix of \(12, 24\), the layer's is \(36, 48\)",
        ),
        (
            lambda layer: layer.lokr_w2_b.update({"default": nn.Parameter(torch.ones(3, 8))}),
            r"adapter 'default' has lokr_w2_a \(6, 2\) and lokr_w2_b \(3, 8\)",
        ),
    ],
)
def test_missing_and_wrong_parts_are_one_error(peft: Any, spoil: Callable[[Any], None], words: str) -> None:
    model = model_of(peft, two_layers(), r=2)
    spoil(model.base_model.model[0])
    with pytest.raises(ValueError, match=f"take_over: base_model.model.0: {words}.*Nothing was taken over"):
        adapters.take_over(model)
    assert adapters.give_back(model) == 0


def test_a_model_with_other_adapters(peft: Any) -> None:
    model = peft.get_peft_model(two_layers(), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="its adapters are PEFT's lora, which make no Kronecker product"):
        adapters.take_over(model)


def test_a_layer_of_lycoris_with_a_part_missing(lokr: Any) -> None:
    layer = lokr.LokrModule("layer", nn.Linear(48, 48), 1.0, 2, 1)
    del layer.lokr_w2_b
    with pytest.raises(ValueError, match="take_over: LokrModule: it lacks lokr_w2_b; load a file that has all parts"):
        adapters.take_over(layer)


def test_small_products_are_theirs_to_the_bit(peft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of what goes our way everywhere
    model = model_of(peft, two_layers())
    x = rows(2, 48)
    right = results(model, model, x)
    adapters.take_over(model)
    assert all(torch.equal(*pair) for pair in zip(results(model, model, x), right, strict=True))
