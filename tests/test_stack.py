"""Stacks that are trained run by run: the same numbers as at once, and which runs a GPU gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import kronecker
from test_backward import OPS
from torch import Tensor, nn

import factorlayer.autograd.layer_ops
import factorlayer.autograd.layerwise
import factorlayer.functional
import factorlayer.stacks.stack
from factorlayer import FactorMLP, fuse
from factorlayer.activations.texts import activation_of
from factorlayer.autograd.backward import back_of_kept, slope_of_kept
from factorlayer.autograd.layer_ops import ask_planner, has_kernel, kept_text, not_at_once
from factorlayer.autograd.layerwise import (
    backward_by_layers,
    handed_back,
    has_backward,
    texts_by_layers,
    without_activation,
)
from factorlayer.autograd.runtime import class_of_batch
from factorlayer.autograd.stack_ops import (
    STATES,
    Run,
    Stack,
    _parts,
    _tensors,
    is_large_product,
    keeping,
    known,
    runs_on_gpu,
)
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec

PRELU = activation_of(nn.PReLU())[0]
CUTS = [((0, 2), (2, 4)), ((0, 1), (1, 2), (2, 4)), ((1, 3),), ((0, 1), (3, 4)), ((3, 4),)]
CUTS.append(())  # each layer for itself, whose states one kernel stores
cuts = pytest.mark.parametrize("cut", CUTS, ids=str)
H100 = (90, 132, 232448)
_cpu = torch.library.Library("factorlayer", "IMPL")
_cpu.impl("layers_backward", torch.no_grad()(lambda *given: backward_by_layers(*given)), "CPU")


def states_by_layers(x: Tensor, tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    made, at = [x], 0
    for layer, count in zip(text.split(" | "), _tensors(text), strict=True):
        made.append(torch.ops.factorlayer.stack_forward(made[-1], tensors[at : at + count], layer))
        at += count
    return made[1:]


def cut_by(monkeypatch: pytest.MonkeyPatch, cut: tuple[tuple[int, int], ...]) -> list[str]:
    """As if a GPU had kernels for these runs alone. Returns the texts of those that are asked for, as they are."""
    asked: list[str] = []
    right = factorlayer.stacks.stack.fused_stack

    def runs(stack: Stack, x: Tensor, recorded: bool, joined: bool) -> tuple[Run, ...]:
        layers = stack.text.split(" | ")
        if not cut:
            return ((0, len(layers), stack.text + STATES),)
        return tuple((begin, end, " | ".join(layers[begin:end])) for begin, end in cut)

    def fused_stack(text: str, *rest: object) -> Tensor:
        asked.append(text)
        return right(text, *rest)

    monkeypatch.setattr(factorlayer.stacks.stack, "runs", runs)
    monkeypatch.setattr(factorlayer.stacks.stack, "fused_stack", fused_stack)
    monkeypatch.setattr(factorlayer.autograd.stack_ops, "_states", states_by_layers)
    monkeypatch.setattr(factorlayer.autograd.stack_ops, "_parts", known(lambda text, *_: (text,)))
    be_hopper(monkeypatch)
    return asked


def be_hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if every device were one, whose kernels the CPU stands in for. Returns the texts of what those made."""
    ran: list[str] = []

    def noted(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            ran.append(next(each for each in given if isinstance(each, str)))
            return op(*given)

        return run

    named = "forward", "weight_gradient", "slopes", "slopes_and_sums"
    ops = replace(OPS, **{name: noted(getattr(OPS, name)) for name in named})
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "gpu_limits", lambda device: H100)
    monkeypatch.setattr(factorlayer.stacks.stack, "stack_at_once", not_at_once)

    def cuda_ops(device: int, dtype: torch.dtype) -> Any:
        return replace(ops, fits=lambda chain: factorlayer.autograd.layer_ops.has_kernel(chain.text, dtype, device))

    monkeypatch.setattr(factorlayer.autograd.layerwise, "cuda_ops", cuda_ops)
    monkeypatch.setattr(factorlayer.autograd.layerwise, "prepare_together", lambda *_: None)
    return ran


def block() -> FactorMLP:
    torch.manual_seed(0)
    widths = [6, (3, 3), (2, 4), 7, 5]
    return FactorMLP(widths, activation="tanh", output_activation="silu", implementation="fused", dtype=torch.float64)


def gradients(mlp: FactorMLP, x: Tensor) -> list[Tensor]:
    leaves = [t for t in (x, *mlp.parameters()) if t.requires_grad]
    return [mlp(x).detach(), *torch.autograd.grad(mlp(x).sin().sum(), leaves)]


@cuts
@pytest.mark.parametrize("frozen", ["nothing", "x", "first", "weights"])
def test_runs_make_the_same_numbers(
    cut: tuple[tuple[int, int], ...], frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, x = block(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=frozen not in ("x", "first"))
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(
            not (frozen == "first" and ".0." in name) and not (frozen == "weights" and "weight" in name)
        )
    right = gradients(mlp, x)
    asked = cut_by(monkeypatch, cut)
    found = gradients(mlp, x)
    text = mlp._stacks[0][0]._stack.text
    assert asked == 2 * [" | ".join(text.split(" | ")[slice(*run)]) for run in cut] if cut else 2 * [text + STATES]
    torch.testing.assert_close(found, right)


def test_some_of_the_runs_may_store_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = block(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    right = gradients(mlp, x)
    asked = cut_by(monkeypatch, ())
    layers = mlp._stacks[0][0]._stack.text.split(" | ")
    parts = [(0, 2, " | ".join(layers[:2]) + STATES), (2, 3, layers[2])]
    monkeypatch.setattr(factorlayer.stacks.stack, "runs", lambda *_: tuple(parts))
    torch.testing.assert_close(gradients(mlp, x), right)
    assert asked == 2 * [text for _, _, text in parts]


@cuts
def test_runs_can_be_differentiated_twice(cut: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = block(), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert cut_by(monkeypatch, cut) == []
    assert torch.autograd.gradgradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()), atol=1e-4)


@cuts
def test_runs_compile_as_a_whole(cut: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    mlp, x = block(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    right = gradients(mlp, x)
    cut_by(monkeypatch, cut)
    torch.testing.assert_close(gradients(torch.compile(mlp, fullgraph=True, backend="aot_eager"), x), right)


def test_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = block().float(), torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        right = gradients(mlp, x)
        cut_by(monkeypatch, ((0, 1), (2, 4)))
        found = gradients(mlp, x)
    assert [t.dtype for t in found] == [torch.bfloat16] + [torch.float32] * (len(found) - 1)
    for one, other in zip(found, right, strict=True):
        assert float((one - other).float().norm()) <= 0.03 * float(other.float().norm())


def test_a_wrong_weight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = block()
    cut_by(monkeypatch, ((0, 1), (2, 4)))
    mlp.layers[3].bias = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(TypeError, match=r"FactorMLP: layer layers\.3: x and bias should have one dtype"):
        mlp(torch.randn(2, 6, dtype=torch.float64))


def dense(*widths: int, tf32: bool = False) -> str:
    specs = [LayerSpec("kronecker", (p,), (q,)) for p, q in itertools.pairwise(widths)]
    chains = [Chain.of(spec, True, "relu") for spec in specs]
    return " | ".join(chain.tf32_text if tf32 else chain.text for chain in chains)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of a GPU that there is not, known to be one."""
    be_hopper(monkeypatch)
    return 99


def test_a_stack_that_one_kernel_trains_is_one_run(hopper: int) -> None:
    text = dense(32, 64, 64, 64, 64, 16)
    for recorded in (False, True):
        assert runs_on_gpu(text, torch.bfloat16, hopper, recorded) == ((0, 5, text),)


def test_others_are_cut_where_they_are_trained(hopper: int) -> None:
    text = dense(*[128] * 7)
    assert runs_on_gpu(text, torch.bfloat16, hopper, False) == ((0, 6, text),)
    assert runs_on_gpu(text, torch.bfloat16, hopper, True) == ((0, 6, text + STATES),)
    found = runs_on_gpu(dense(128, 256, 128, 128), torch.bfloat16, hopper, True)
    assert found == ((2, 3, dense(128, 128)),)
    found = runs_on_gpu(dense(64, 64, 64, 128, 128), torch.bfloat16, hopper, True)
    assert found == ((0, 2, dense(64, 64, 64)), (2, 4, dense(64, 128, 128) + STATES))
    wide = dense(3072, 128, 256, 64, 3072)
    assert runs_on_gpu(wide, torch.bfloat16, hopper, False) == ((1, 4, dense(128, 256, 64, 3072)),)
    assert not runs_on_gpu(text, torch.float64, hopper, False)
    assert not runs_on_gpu(text, torch.float32, hopper, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_of_any_dtype_are_cut_where_it_is_faster(dtype: torch.dtype, hopper: int) -> None:
    text = dense(10, 59, 59, 8)
    for recorded in (False, True):
        assert runs_on_gpu(text, dtype, hopper, recorded) == ((0, 3, text),)
    wide = dense(3072, 48, 48, 48, 10)  # which has a kernel for all layers, in which the others wait for the first one
    assert runs_on_gpu(wide, dtype, hopper, False) == ((1, 4, dense(48, 48, 48, 10)),)
    many = dense(*[48] * 21)
    found = runs_on_gpu(many, dtype, hopper, False)
    assert len(found) > 1 and (found[0][0], found[-1][1]) == (0, 20)


def test_layers_of_any_dtype_store_their_states_where_it_is_faster(hopper: int) -> None:
    text = dense(96, 96, 96).replace("relu", "gelu")  # which hands no gradient back
    assert runs_on_gpu(text, torch.float64, hopper, True, True) == ((0, 2, text + STATES),)
    first, rest = dense(485, 34), dense(34, 34, 34, 34, 13)  # the others would wait for the first one
    assert _parts(f"{first} | {rest}", torch.float32, hopper) == (first, rest)
    learned = text.replace("gelu", PRELU)
    assert not runs_on_gpu(learned, torch.float64, hopper, True, True)


def test_in_tf32_fewer_layers_are_trained_at_once(hopper: int) -> None:
    text = dense(32, 64, 64, 64, 64, 16, tf32=True)
    assert runs_on_gpu(text, torch.float32, hopper, False) == ((0, 5, text),)
    found = runs_on_gpu(text, torch.float32, hopper, True)
    assert len(found) > 1 and [run[0] for run in found] == [0, *(run[1] for run in found[:-1])] and found[-1][1] == 5
    text = dense(32, 64, 16, tf32=True)
    assert runs_on_gpu(text, torch.float32, hopper, True) == ((0, 2, text),)
    wide = dense(*[128] * 8, tf32=True)  # layers by themselves, whose states one kernel stores
    assert runs_on_gpu(wide, torch.float32, hopper, True) == ((0, 7, wide + STATES),)
    found = runs_on_gpu(dense(48, 512, 128, 12, tf32=True), torch.float32, hopper, True)
    assert found == ((2, 3, dense(128, 12, tf32=True)),)
    found = runs_on_gpu(dense(32, 64, 64, 16), torch.float32, hopper, True)
    assert [run[:2] for run in found] == [(0, 3)]


def test_a_graph_knows_the_runs(hopper: int) -> None:
    torch._dynamo.reset()
    text = dense(128, 127, 127)

    def ends(x: Tensor) -> Tensor:
        for _, end, run in runs_on_gpu(text, torch.float16, hopper, True):
            x = x * end if run else x
        return x

    compiled = torch.compile(ends, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 2


# Layers that are trained one by one, and hand gradients back through activations


def trained_as_on_hopper(monkeypatch: pytest.MonkeyPatch, tf32: bool = False) -> list[str]:
    """As if no kernel made all gradients of these layers."""
    asked = factorlayer.autograd.layer_ops.ask_planner

    def answered(question: str, *of: Any) -> str:
        return "()" if question.startswith("cut") and of[0].endswith("backward") else asked(question, *of)

    monkeypatch.setattr(factorlayer.autograd.stack_ops, "ask_planner", answered)
    monkeypatch.setattr(factorlayer.autograd.layerwise, "has_backward", lambda *_: False)

    def runs(stack: Stack, x: Tensor, recorded: bool, joined: bool) -> tuple[Run, ...]:
        text = stack.tf32_text if tf32 else stack.text
        return runs_on_gpu(text, x.dtype, -1, recorded, joined) if recorded else ((0, len(stack.layers), text),)

    monkeypatch.setattr(factorlayer.stacks.stack, "runs", runs)
    monkeypatch.setattr(factorlayer.autograd.stack_ops, "_states", states_by_layers)
    return be_hopper(monkeypatch)


def wide_block(activation: str, dtype: torch.dtype = torch.float64) -> FactorMLP:
    torch.manual_seed(0)
    widths = [132, 136, 144, 152, 140]
    return FactorMLP(widths, activation=activation, output_activation="tanh", implementation="fused", dtype=dtype)


@pytest.mark.parametrize("activation", ["relu", "elu", "softplus", "gelu"])
@pytest.mark.parametrize("tf32", [False, True], ids=["float64", "tf32"])
def test_gradients_go_back_through_activations(activation: str, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products of tf32, by themselves in float64; and every layer but the last one makes nothing again."""
    mlp = wide_block(activation, torch.float32 if tf32 else torch.float64)
    x = torch.randn(2, 3, 132, dtype=mlp.layers[0].weight.dtype, requires_grad=True)
    right = gradients(mlp, x)
    ran = trained_as_on_hopper(monkeypatch, tf32)
    found = gradients(mlp, x)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
    through, slopes = ([text for text in ran if f"; {word} " in text] for word in ("through", "slope"))
    if activation == "gelu":
        assert not through
        return
    products = ["tied 0 1 140 152 1; ", "tied 0 1 152 144 1; ", "tied 0 1 144 136 1; "] if tf32 else [""] * 3
    texts = [f"{p}{activation}; through {n}" for p, n in zip(products, (152, 144, 136), strict=True)]
    assert through == [text + "; tf32" * tf32 for text in texts] and all("tanh; slope 140" in text for text in slopes)


@pytest.mark.parametrize("activation", ["relu", "elu"])
@pytest.mark.parametrize("tf32", [False, True], ids=["float64", "tf32"])
def test_training_begins_with_all_kernels(activation: str, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first forward and backward pass are compiled together; later ones of the same class of batches have
    them."""
    mlp = wide_block(activation, torch.float32 if tf32 else torch.float64)
    ran, prepared = trained_as_on_hopper(monkeypatch, tf32), []
    monkeypatch.setattr(factorlayer.autograd.layerwise, "prepare_together", lambda asked, *_: prepared.append(asked))
    for module in (factorlayer.autograd.layerwise, factorlayer.autograd.stack_ops):
        monkeypatch.setattr(module, "_prepared", set())
    mlp(torch.randn(0, 132, dtype=mlp.layers[0].weight.dtype, requires_grad=True)).sum().backward()
    assert not prepared  # nothing runs, and nothing is known to be there
    for batch, passes in ((66, 1), (67, 1), (64, 2)):
        y = mlp(torch.randn(batch, 132, dtype=mlp.layers[0].weight.dtype, requires_grad=True))
        assert len(prepared) == passes
        layers = mlp._stacks[0][0]._stack
        forward = _parts(layers.tf32_text if tf32 else layers.text, y.dtype, -1)
        ran.clear()
        y.sum().backward()
        assert len(prepared) == passes
        texts = [text for text, _ in prepared[-1]]
        assert [text.removesuffix(STATES) for text in texts] == [*forward, *dict.fromkeys(ran)]
        assert {samples for _, samples in prepared[-1]} == {66 if passes == 1 else 64, 1}


@pytest.mark.parametrize("samples", [5, 70, 3000, 100000])
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        *(("tied 0 1 128 127 1; bias; relu", torch.float32), ("tied 0 1 64 256 1; bias", torch.bfloat16)),
        *(("tied 0 1 200 64 1; bias; tanh", torch.float32), ("tied 0 1 64 64 1; bias; tanh", torch.float64)),
    ],
)
def test_a_kernel_of_all_gradients_is_asked_for_where_so_many_samples_have_one(
    layer: str, dtype: torch.dtype, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some classes of batches have one for these layers, and others have not."""
    be_hopper(monkeypatch)
    classes = range(class_of_batch(1 << 20) + 1)
    there = {has_backward(layer, dtype, -1, each) for each in classes}
    asked = texts_by_layers(layer, range(Chain.parse(layer).tensors + 1), samples, dtype, -1)
    assert there == {False, True} and asked
    for text, batch in asked:
        assert has_kernel(text, dtype, -1, class_of_batch(batch)), text


@pytest.mark.parametrize("activation", ["identity", "tanh", "gelu"])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_keep_states_go_back_by_them(
    frozen: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them by its own; one of which some weight does not learn makes them anew. The first one makes no slopes
    of tanh, whose gradient the second one takes back."""
    be_hopper(monkeypatch)
    sizes, batch = (16, 16, 8, 24, 16), 4000
    layers = [Chain.of(kronecker(sizes, sizes, rank=rank), True, activation) for rank in (2, 3)]
    asked_of = torch.bfloat16, class_of_batch(batch), -1
    first, second = (ask_planner("kept", layer.text, *asked_of) for layer in layers)
    assert " kept " in first and " kept " in second
    wanted = [place for place in range(13) if not (frozen and place == 1)]
    asked = [text for text, _ in texts_by_layers(f"{first} | {second}", wanted, batch, torch.bfloat16, -1)]
    slopes = [] if activation == "identity" else [slope_of_kept(second)]
    assert asked[: len(slopes) + 2] == [*slopes, back_of_kept(second), "sums 786432"]
    assert (back_of_kept(first) in asked) != frozen
    assert ("tanh; through 786432" in asked) == (activation == "tanh")
    assert activation == "identity" or (slope_of_kept(first) in asked) == (activation == "gelu" and not frozen)


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_which_layers_of_a_block_keep_states(activation: str, hopper: int) -> None:
    """As by themselves, but for the activation of one that is handed the gradient of what it activates."""
    wide, small = kronecker((16, 16, 8, 24, 16), (16, 16, 8, 24, 16)), kronecker((1024, 768), (4, 4))
    layers = [Chain.of(spec, True, activation).text for spec in (wide, wide, small)]
    dtype, batch = torch.bfloat16, 4000
    made = keeping(" | ".join(layers), dtype, hopper, batch).split(" | ")
    handed = handed_back(" | ".join(layers), dtype, hopper, class_of_batch(batch))
    assert handed == ((activation == "tanh",) * 2 + (False,))
    asked = [without_activation(layer) if is_handed else layer for layer, is_handed in zip(layers, handed, strict=True)]
    for layer, own, kept in zip(layers, made, [kept_text(each, dtype, hopper, batch) for each in asked], strict=True):
        assert own == (f"{layer}; kept {kept.split('; kept ')[1]}" if kept else layer)
    assert " kept " in made[0]


@pytest.mark.parametrize("frozen", ["x", "first", "weights", "biases", "all but x", "all but the first"])
def test_nothing_goes_back_to_where_nothing_learns(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = wide_block("elu")
    x = torch.randn(5, 132, dtype=torch.float64, requires_grad=frozen not in ("x", "first", "all but the first"))
    for name, parameter in mlp.named_parameters():
        first = ".0." in name
        learns = {"first": not first, "weights": "weight" not in name, "biases": "bias" not in name}
        learns |= {"all but x": False, "all but the first": first}
        parameter.requires_grad_(learns.get(frozen, True))
    right = gradients(mlp, x)
    ran = trained_as_on_hopper(monkeypatch)
    torch.testing.assert_close(gradients(mlp, x), right)
    assert len([text for text in ran if "through" in text]) == (2 if frozen == "first" else 3)


def test_a_layer_may_stand_at_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(136, 136)
    plain = nn.Sequential(
        nn.Linear(132, 136), nn.ReLU(), shared, nn.ELU(0.5), shared, nn.LeakyReLU(), nn.Linear(136, 3)
    )
    mlp, x = fuse(plain.double(), "fused"), torch.randn(9, 132, dtype=torch.float64)
    leaves = list(plain.parameters())
    right = torch.autograd.grad(plain(x).sin().sum(), leaves)
    ran = trained_as_on_hopper(monkeypatch)
    torch.testing.assert_close(torch.autograd.grad(mlp(x).sin().sum(), leaves), right)
    assert len([text for text in ran if "through 136" in text]) == 3
    empty = torch.autograd.grad(mlp(x[:0]).sin().sum(), leaves)
    assert [g.shape for g in empty] == [p.shape for p in leaves] and not any(g.any() for g in empty)


def test_joined_layers_can_be_differentiated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    widths = [3, 5, 4, 2]
    mlp = FactorMLP(widths, activation="tanh", implementation="fused", dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ran = trained_as_on_hopper(monkeypatch)
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()))
    assert torch.autograd.gradgradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()), atol=1e-4)
    assert "tanh; through 4" in ran


def test_joined_layers_compile_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    mlp, x = wide_block("elu"), torch.randn(4, 132, dtype=torch.float64, requires_grad=True)
    right = gradients(mlp, x)
    ran = trained_as_on_hopper(monkeypatch)
    torch.testing.assert_close(gradients(torch.compile(mlp, fullgraph=True, backend="aot_eager"), x), right)
    assert "elu; through 144" in ran


def test_layers_of_several_factors_hand_gradients_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    widths = [(24, 22), (12, 12), (13, 12), 7]
    mlp = FactorMLP(widths, activation="relu", implementation="fused", dtype=torch.float64)
    x = torch.randn(6, 528, dtype=torch.float64, requires_grad=True)
    right = gradients(mlp, x)
    ran = trained_as_on_hopper(monkeypatch)
    torch.testing.assert_close(gradients(mlp, x), right)
    assert [text for text in ran if "relu" in text] == ["relu; through 156", "relu; through 144"]


def test_layers_are_joined_where_gradients_are_handed_back(hopper: int) -> None:
    text = dense(63, 256, 256, 256, 4)
    assert handed_back(text, torch.bfloat16, hopper) == (True, True, True, False)
    assert runs_on_gpu(text, torch.bfloat16, hopper, True, True) == ((0, 4, text + STATES),)
    assert runs_on_gpu(text, torch.bfloat16, hopper, True, False) == ((3, 4, dense(256, 4)),)
    assert _parts(text, torch.bfloat16, hopper) == (text,)  # one kernel makes all states
    text = dense(768, 3072, 256, 128, 128)  # of which one kernel forward has the last two; the others are cuBLAS's
    *alone, third, last = text.split(" | ")
    assert runs_on_gpu(text, torch.bfloat16, hopper, True, True) == ((2, 4, f"{third} | {last}{STATES}"),)
    assert _parts(text, torch.bfloat16, hopper) == (*alone, f"{third} | {last}")
    learned = text.replace("relu", PRELU)
    assert runs_on_gpu(learned, torch.bfloat16, hopper, True, True) == runs_on_gpu(
        learned, torch.bfloat16, hopper, True, False
    )
    kept = dense(*[128] * 7)  # whose kernels have the slopes of their layers
    assert not any(handed_back(kept, torch.bfloat16, hopper))
    assert runs_on_gpu(kept, torch.bfloat16, hopper, True, True) == ((0, 6, kept + STATES),)


def test_a_layer_that_learns_its_activation_stays_apart(hopper: int) -> None:
    layers = dense(256, 256, 256, 256, 256, 256).split(" | ")
    layers[2] = layers[2].replace("relu", PRELU)
    found = runs_on_gpu(" | ".join(layers), torch.float16, hopper, True, True)
    assert found == tuple((a, b, " | ".join(layers[a:b]) + STATES) for a, b in ((0, 2), (3, 5)))


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float64"])
def test_large_products_are_left_to_cublas(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits and tf32, wherever they stand, though their neighbours would hand gradients back."""
    memory = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    theirs = dtype in ("tf32", "bfloat16")
    monkeypatch.setattr(
        factorlayer.stacks.stack, "is_left_to_cublas", lambda layer, x: theirs and is_large_product(layer)
    )
    ran: list[str] = []

    def noted(spec: LayerSpec, chain: Chain, x: Tensor, *given: Any) -> Tensor:
        ran.append(given[2])
        return factorlayer.functional.run(spec, chain, x, *given)

    monkeypatch.setattr(factorlayer.stacks.stack, "run", noted)
    be_hopper(monkeypatch)
    mlp = FactorMLP([256, 256, 768, 1024, 8], activation="relu", implementation="fused", dtype=memory)
    layers = [layer.chain for layer in mlp._stacks[0][0].layers]
    assert [is_large_product(layer) for layer in layers] == [False, False, True, False]
    text = Stack(tuple(layers)).tf32_text if dtype == "tf32" else Stack(tuple(layers)).text
    monkeypatch.setattr(factorlayer.stacks.stack, "runs", lambda *_: ())
    mlp(torch.ones(1, 256, dtype=memory))
    assert ran == ["fused", "fused", "batched" if theirs else "fused", "fused"]
    joined = runs_on_gpu(text, memory, 0, True, True)
    assert not theirs or all(end <= 2 or begin >= 3 for begin, end, _ in joined)
    assert ("by cuBLAS" in mlp._stacks[0][0].explain()[2]) and "cuBLAS" not in mlp._stacks[0][0].explain()[1]
