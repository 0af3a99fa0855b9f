"""Stacks that are trained run by run: the same numbers as at once, and which runs a GPU gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import factorlayer.fused
import factorlayer.stack
from factorlayer import FactorMLP
from factorlayer.chain import Chain
from factorlayer.spec import LayerSpec
from factorlayer.stacked import STATES, Run, Stack, _runs_on_gpu, _tensors

CUTS = [((0, 2), (2, 4)), ((0, 1), (1, 2), (2, 4)), ((1, 3),), ((0, 1), (3, 4)), ((3, 4),)]
CUTS.append(())  # each layer for itself, whose states one kernel stores
cuts = pytest.mark.parametrize("cut", CUTS, ids=str)
H100 = (90, 132, 232448)


def cut_by(monkeypatch: pytest.MonkeyPatch, cut: tuple[tuple[int, int], ...]) -> list[str]:
    """As if a GPU had kernels for these runs alone. Returns the texts of those that are asked for, as they are."""
    asked: list[str] = []
    right = factorlayer.stack.fused_stack

    def runs(stack: Stack, x: Tensor, recorded: bool) -> tuple[Run, ...]:
        layers = stack.text.split(" | ")
        if not cut:
            return ((0, len(layers), stack.text + STATES),)
        return tuple((begin, end, " | ".join(layers[begin:end])) for begin, end in cut)

    def states(x: Tensor, tensors: Sequence[Tensor], text: str) -> list[Tensor]:
        made, at = [x], 0
        for layer, count in zip(text.split(" | "), _tensors(text), strict=True):
            made.append(torch.ops.factorlayer.stack_forward(made[-1], tensors[at : at + count], layer))
            at += count
        return made[1:]

    def fused_stack(text: str, *rest: object) -> Tensor:
        asked.append(text)
        return right(text, *rest)

    monkeypatch.setattr(factorlayer.stack, "runs", runs)
    monkeypatch.setattr(factorlayer.stack, "fused_stack", fused_stack)
    monkeypatch.setattr(factorlayer.stacked, "_states", states)
    return asked


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
    monkeypatch.setattr(factorlayer.stack, "runs", lambda *_: tuple(parts))
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
    monkeypatch.setattr(factorlayer.fused, "gpu_limits", lambda device: H100)
    monkeypatch.setattr(factorlayer.stacked, "gpu_limits", lambda device: H100)
    return 99


def test_a_stack_that_one_kernel_trains_is_one_run(hopper: int) -> None:
    text = dense(32, 64, 64, 64, 64, 16)
    for recorded in (False, True):
        assert _runs_on_gpu(text, torch.bfloat16, hopper, recorded) == ((0, 5, text),)


def test_others_are_cut_where_they_are_trained(hopper: int) -> None:
    text = dense(*[128] * 7)
    assert _runs_on_gpu(text, torch.bfloat16, hopper, False) == ((0, 6, text),)
    assert _runs_on_gpu(text, torch.bfloat16, hopper, True) == ((0, 6, text + STATES),)
    found = _runs_on_gpu(dense(128, 256, 128, 128), torch.bfloat16, hopper, True)
    assert found == ((2, 3, dense(128, 128)),)
    found = _runs_on_gpu(dense(64, 64, 64, 128, 128), torch.bfloat16, hopper, True)
    assert found == ((0, 2, dense(64, 64, 64)), (2, 4, dense(64, 128, 128) + STATES))
    wide = dense(3072, 128, 256, 64, 3072)
    assert _runs_on_gpu(wide, torch.bfloat16, hopper, False) == ((1, 4, dense(128, 256, 64, 3072)),)
    assert not _runs_on_gpu(text, torch.float64, hopper, False)
    assert not _runs_on_gpu(text, torch.float32, hopper, True)


def test_in_tf32_fewer_layers_are_trained_at_once(hopper: int) -> None:
    text = dense(32, 64, 64, 64, 64, 16, tf32=True)
    assert _runs_on_gpu(text, torch.float32, hopper, False) == ((0, 5, text),)
    found = _runs_on_gpu(text, torch.float32, hopper, True)
    assert [run[:2] for run in found] == [(0, 1), (1, 3), (3, 5)]
    text = dense(32, 64, 16, tf32=True)
    assert _runs_on_gpu(text, torch.float32, hopper, True) == ((0, 2, text),)
    wide, three = (
        dense(*[128] * 8, tf32=True),
        dense(*[128] * 4, tf32=True) + STATES,
    )  # whose weights are all a kernel has
    found = _runs_on_gpu(wide, torch.float32, hopper, True)
    assert found == ((0, 3, three), (3, 6, three), (6, 7, dense(128, 128, tf32=True)))
    found = _runs_on_gpu(dense(48, 512, 128, 12, tf32=True), torch.float32, hopper, True)
    assert found == ((2, 3, dense(128, 12, tf32=True)),)
    assert not _runs_on_gpu(dense(32, 64, 64, 16), torch.float32, hopper, True)


def test_a_graph_knows_the_runs(hopper: int) -> None:
    torch._dynamo.reset()
    text = dense(128, 127, 127)

    def ends(x: Tensor) -> Tensor:
        for _, end, run in _runs_on_gpu(text, torch.float16, hopper, True):
            x = x * end if run else x
        return x

    compiled = torch.compile(ends, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 2
