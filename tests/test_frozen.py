"""Frozen blocks: the numbers of the moment when they were frozen, whatever happens to the parameters afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from oracle import nearly
from test_fuse_models import IDS, Model
from test_fusion import model
from test_mlp import block, each_block
from torch import Tensor, nn
from versions import fails_before_2_12

import factorlayer.stacks.frozen
from factorlayer import FactorMLP, freeze, fuse, unfreeze
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES
from factorlayer.plan.planner import plan_of
from factorlayer.stacks.frozen import ALIGNMENT, FROZEN
from factorlayer.stacks.stack import LayerStack, RunsAsStacks

LAYERS = "tied 0 1 6 5 1; bias; relu | tied 0 1 5 3 1"


def inputs(mlp: FactorMLP, *leading: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*leading, mlp.layers[0].in_features, dtype=torch.float64)


def change(module: nn.Module) -> None:
    """Each parameter, past everything that could notice."""
    for parameter in module.parameters():
        parameter.data.add_(0.1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the op is called with."""
    made: list[str] = []
    right = factorlayer.stacks.frozen._frozen_now

    def frozen(x: Tensor, tensor: Tensor, text: str) -> Tensor:
        made.append(text)
        return right(x, tensor, text)

    monkeypatch.setattr(factorlayer.stacks.frozen, "_frozen_now", frozen)
    return made


@each_block
@pytest.mark.parametrize("implementation", ["auto", "v1", "v2", "v3"])
def test_parameters_count_as_they_were(kind: str, implementation: str) -> None:
    """To the bit where our own kernels run."""
    mlp = block(kind, implementation=implementation)
    same = torch.equal if implementation == "v3" else nearly
    x = inputs(mlp, 7)
    before = mlp(x)
    assert mlp.freeze() is mlp and mlp.is_frozen and mlp.explain().startswith("FactorMLP, frozen:")
    change(mlp)
    assert same(mlp(x), before)
    live = copy.deepcopy(mlp).unfreeze()
    assert not live.is_frozen and not nearly(live(x), before)
    assert same(mlp.freeze()(x), live(x))
    assert same(mlp.unfreeze()(x), live(x))


def test_one_call_takes_all_layers(calls: list[str]) -> None:
    mlp = block("mixed").freeze()
    calls.clear()
    for leading in ((5,), (), (2, 3), (0,)):
        x = inputs(mlp, *leading)
        assert mlp(x).shape == x.shape
        torch.testing.assert_close(mlp(x), copy.deepcopy(mlp).unfreeze()(x))
    text = mlp.stacks[0]._stack.text
    assert set(calls) == {text + FROZEN} and len(calls) == 8


def test_a_model_between_whose_stacks_others_stand(calls: list[str]) -> None:
    plain = model().eval()
    plain[3] = nn.Softmax(-1)
    fast, x = fuse(plain), torch.randn(5, 12).double()
    right = fast(x)
    assert fast.freeze().explain().startswith("fuse(Sequential), frozen:")
    calls.clear()
    assert nearly(fast(x), right) and len(calls) == 2
    with torch.no_grad():
        plain[0].weight.zero_()  # of a stack
    assert nearly(fast(x), right)
    with torch.no_grad():
        plain[9].bias.add_(1)  # by itself
    torch.testing.assert_close(fast(x), right + 1)


def test_blocks_in_a_model_are_frozen_with_it() -> None:
    inner = FactorMLP([6, 8, 6])
    fast = fuse(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), inner, nn.Linear(6, 2)))
    x = torch.randn(3, 4)
    right = fast(x)
    fast.freeze()
    change(inner)
    assert inner.is_frozen and nearly(fast(x), right)
    fast.unfreeze()
    assert not inner.is_frozen and not nearly(fast(x), right)


# Models that are fused in place


def in_place(gated: bool = False) -> nn.Module:
    """Of three blocks, each with one stack, or where it is gated with a stack of the gate and a layer between."""
    fused = Model(gated).eval()
    assert fuse(fused, inplace=True) is fused
    return fused


def stacks_of(module: nn.Module) -> list[LayerStack]:
    return [stack for part in module.modules() if isinstance(part, RunsAsStacks) for stack in part.stacks]


@torch.no_grad()
def test_a_model_that_was_fused_in_place_is_frozen(calls: list[str]) -> None:
    fused = in_place()
    right, names, kept = fused(IDS), list(fused.state_dict()), [p.clone() for p in fused.parameters()]
    assert not calls
    assert freeze(fused) is fused and type(fused) is Model
    calls.clear()
    assert torch.equal(fused(IDS), right)
    assert calls == [stack._stack.text + FROZEN for stack in stacks_of(fused)] and len(calls) == 3
    assert list(fused.state_dict()) == names and all(map(torch.equal, fused.parameters(), kept))
    change(fused.layers[1].mlp)
    assert torch.equal(fused(IDS), right)
    calls.clear()
    assert unfreeze(fused) is fused and not torch.equal(fused(IDS), right) and not calls


class Branching(nn.Module):
    """What torch.fx cannot trace, with layers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.isfinite().all() else x


class Repeated(nn.Module):
    """Parts under several names, as layers that share their weights are."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        part = Branching()
        self.traced, self.parts = traced, nn.ModuleList([part] * 3)
        self.first = self.last = Branching().layers

    def forward(self, x: Tensor) -> Tensor:
        if not self.traced and not x.isfinite().all():
            return x
        x = torch.sin(self.first(x))
        for part in self.parts:
            x = torch.sin(part(x))
        return self.last(x)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_part_that_has_several_names_is_frozen_under_all(
    traced: bool, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain, x = Repeated(traced).double(), torch.randn(4, 8).double()
    right, names = plain(x), list(plain.state_dict())
    fused = fuse(copy.deepcopy(plain), inplace=inplace)
    assert list(fused.state_dict()) == names and [*fused._modules] == [*plain._modules]
    called: list[nn.Module] = []
    forward = LayerStack.forward
    monkeypatch.setattr(LayerStack, "forward", lambda self, x: called.append(self) or forward(self, x))
    torch.testing.assert_close(freeze(fused)(x), right)
    assert len(called) == 5 and all(stack.frozen is not None for stack in called)
    change(fused)
    torch.testing.assert_close(fused(x), right)
    fused.load_state_dict(plain.state_dict())
    if not inplace:
        copies = ["parts.1: the same as parts.0", "parts.2: the same as parts.0", "last: the same as first"]
        said = [line.strip() for line in fused.explain().splitlines()]
        assert traced or [line for line in said if "the same as" in line] == copies


def test_unfrozen_it_trains_as_it_would_have() -> None:
    fused, plain = unfreeze(freeze(in_place())).train(), in_place().train()
    torch.manual_seed(3)
    found = torch.autograd.grad(fused(IDS).square().sum(), list(fused.parameters()))
    torch.manual_seed(3)
    right = torch.autograd.grad(plain(IDS).square().sum(), list(plain.parameters()))
    assert all(map(torch.equal, found, right))


@torch.no_grad()
@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_in_place_copies_checkpoints_and_dtypes_are_frozen(again: Callable[[nn.Module], nn.Module]) -> None:
    fused, other = again(freeze(in_place(gated=True))), in_place(gated=True)
    assert all(stack.frozen is not None for stack in stacks_of(fused)) and stacks_of(fused)
    change(other)
    fused.load_state_dict(other.state_dict())
    right = other(IDS)
    torch.testing.assert_close(fused(IDS), right)
    for stack in stacks_of(fused):
        change(nn.ModuleList(stack.members))
    torch.testing.assert_close(fused(IDS), right)
    torch.testing.assert_close(fused.double()(IDS), other.double()(IDS))
    assert not torch.allclose(unfreeze(fused)(IDS), other(IDS))


@pytest.mark.long
@torch.no_grad()
@pytest.mark.feature("frozen blocks: torch.compile of a model that is fused in place", result="works")
def test_in_place_it_compiles_frozen_and_not() -> None:
    torch._dynamo.reset()
    fused = in_place()
    compiled = torch.compile(fused, backend="aot_eager")
    right = fused(IDS)
    torch.testing.assert_close(compiled(IDS), right)
    freeze(compiled)  # the same modules
    for part in fused.layers:
        change(part.mlp)
    torch.testing.assert_close(compiled(IDS), right)
    unfreeze(compiled)
    assert not torch.allclose(compiled(IDS), right)
    torch.testing.assert_close(compiled(IDS), fused(IDS))


def test_in_place_all_stacks_are_frozen_or_none() -> None:
    fused = in_place()
    first, *_, last = stacks_of(fused)
    freeze(fused.layers[0])
    before = first.frozen
    last.members[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"freeze: layers 0, 2 should have no hooks"):
        freeze(fused)
    assert [stack.frozen for stack in stacks_of(fused)] == [before, None, None]


def test_models_without_stacks_are_refused() -> None:
    for call in (freeze, unfreeze):
        with pytest.raises(
            ValueError, match=rf"^{call.__name__}: the module should have a FactorMLP .*, Model has none"
        ):
            call(Model())
        with pytest.raises(TypeError, match=rf"^{call.__name__}: module should be an nn\.Module, it is Tensor"):
            call(IDS)


# What may be done to a frozen block


@each_block
def test_x_has_the_gradients_of_what_was_frozen(kind: str) -> None:
    mlp = block(kind)
    x = inputs(mlp, 6).requires_grad_()
    grad_y = torch.randn_like(mlp(x))
    (right,) = torch.autograd.grad(mlp(x), x, grad_y)
    mlp.freeze()
    change(mlp)
    y = mlp(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad_y)[0], right)
    mlp(x).backward(grad_y)
    assert all(parameter.grad is None for parameter in mlp.parameters())
    assert not mlp(x.detach()).requires_grad


@pytest.mark.feature("frozen blocks: torch.func and second derivatives", result="works")
def test_torch_func_and_second_derivatives() -> None:
    mlp = block("dense", activation="tanh", implementation="auto")
    x = inputs(mlp, 4)

    def transforms() -> list[Tensor]:
        one = torch.func.vmap(torch.func.jacrev(mlp))(x)
        forward = torch.func.jvp(mlp, (x,), (torch.ones_like(x),))[1]
        return [one, torch.func.vmap(mlp)(x), forward, torch.autograd.functional.hessian(lambda x: mlp(x).sum(), x)]

    right = transforms()
    mlp.freeze()
    change(mlp)
    torch.testing.assert_close(transforms(), right)


@pytest.mark.feature("frozen blocks: torch.inference_mode", result="works")
def test_an_inference_mode_that_ends() -> None:
    mlp = block("mixed")
    x = inputs(mlp, 4)
    with torch.inference_mode():
        right = mlp(x)
        mlp.freeze()
        assert torch.equal(mlp(x), right)
    (gradient,) = torch.autograd.grad(mlp(x.requires_grad_()).sum(), x)
    assert gradient.abs().sum() > 0


def test_optimizers_train_on_and_nothing_notices() -> None:
    mlp = block("mixed").freeze()
    x = inputs(mlp, 4)
    right = mlp(x)
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1)
    for parameter in mlp.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(mlp.train()(x), right)
    assert not torch.equal(mlp.freeze()(x), right)


def test_what_is_loaded_is_frozen() -> None:
    mlp, other = block("gated").freeze(), block("gated")
    change(other)
    x = inputs(mlp, 3)
    names = list(mlp.state_dict())
    assert names == list(other.state_dict())
    nn.Sequential(mlp).load_state_dict(nn.Sequential(other).state_dict())
    assert mlp.is_frozen and torch.equal(mlp(x), other(x))
    change(mlp)
    assert torch.equal(mlp(x), other(x))
    plain = block("gated")
    plain.load_state_dict(other.state_dict())
    assert not plain.is_frozen


def test_moves_between_dtypes_and_devices() -> None:
    mlp = block("mixed").freeze()
    x = inputs(mlp, 3)
    right = mlp(x)
    change(mlp)
    torch.testing.assert_close(nn.Sequential(mlp).float()(x.float()), right.float())
    torch.testing.assert_close(mlp.half()(x.half()), right.half(), atol=0.02, rtol=0.02)
    assert mlp.to("meta")(x.half().to("meta")).shape == right.shape


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [lambda: block("mixed"), lambda: block("gated"), lambda: fuse(model().eval()[:8])])
def test_copies_and_pickles_are_frozen(make: Callable[[], nn.Module], again: Callable[[nn.Module], nn.Module]) -> None:
    module = make().freeze()
    x = torch.randn(3, next(m for m in module.modules() if hasattr(m, "in_features")).in_features).double()
    right = module(x)
    other = again(module)
    change(other)
    assert other.is_frozen and torch.equal(other(x), right)
    assert torch.equal(module.unfreeze()(x), right)
    assert other.is_frozen and not torch.equal(other.unfreeze()(x), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.feature("frozen blocks: autocast", result="works")
def test_autocast(dtype: torch.dtype, calls: list[str]) -> None:
    mlp = block("learned", implementation="v3").float()
    x = inputs(mlp, 3).float()
    with torch.autocast("cpu", dtype):
        right = mlp(x)
        mlp.freeze()
        calls.clear()
        assert torch.equal(mlp(x), right) and right.dtype == dtype and len(calls) == 1
    with pytest.raises(TypeError, match="x and weight_0 should have one dtype"):
        mlp(x.to(dtype))
    with torch.autocast("cpu", dtype), pytest.raises(TypeError, match="should have one dtype"):
        block("learned").freeze()(x)


def test_parametrizations_are_evaluated_once() -> None:
    mlp = block("dense")
    nn.utils.parametrizations.weight_norm(mlp.layers[0])
    x = inputs(mlp, 3)
    right = mlp(x)
    mlp.freeze()
    mlp.layers[0].parametrizations.weight.original0.data.mul_(2)
    assert torch.equal(mlp(x), right)


@each_block
@pytest.mark.feature("frozen blocks: torch.compile as a whole graph", result="works")
def test_compiles_as_a_whole(kind: str) -> None:
    torch._dynamo.reset()
    mlp = block(kind, implementation="fused").freeze()
    x = inputs(mlp, 5)
    right = mlp(x)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), right)
    change(mlp)
    torch.testing.assert_close(compiled(x), right)
    (gradient,) = torch.autograd.grad(compiled(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(mlp(x).sum(), x)[0])


@fails_before_2_12("Dynamo's graph does not name the op; that results are right is test_compiles_as_a_whole's")
def test_a_compiled_graph_calls_the_op_that_is_frozen() -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    mlp = block("mixed").freeze()
    torch.compile(mlp, fullgraph=True, backend=backend)(inputs(mlp, 5))
    assert "stack_frozen" in graphs[0]


@pytest.mark.feature("frozen blocks: torch.export", result="works")
def test_exports_what_any_gpu_can_prepare() -> None:
    mlp = block("mixed").freeze()
    x = inputs(mlp, 5)
    right = mlp(x)
    with torch.no_grad():
        exported = torch.export.export(mlp, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    change(mlp)
    assert "stack_forward" in str(exported.graph) and "stack_frozen" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), right)
    assert exported.module()(x[:2]).shape == (2, 6)


def test_flops_are_those_of_the_layers() -> None:
    x, tensors = torch.randn(7, 6), [torch.randn(shape) for shape in ((5, 6), (5,), (3, 5))]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch.ops.factorlayer.stack_frozen(x, factorlayer.stacks.frozen._side_by_side(tensors), LAYERS + FROZEN)
    assert counter.get_total_flops() == 2 * 7 * (6 * 5 + 5 * 3)


# What is refused


@pytest.mark.feature("frozen blocks: layers with hooks", result="refused")
def test_hooks_are_refused() -> None:
    mlp = block("gated")
    mlp.gates[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"FactorMLP: freeze: layers gates\.0 should have no hooks"):
        mlp.freeze()
    assert not mlp.is_frozen


def test_weights_of_two_dtypes_are_refused() -> None:
    mlp = block("mixed")
    mlp.layers[2].half()
    with pytest.raises(ValueError, match=r"of one dtype.*they are torch\.float16 on cpu and torch\.float64 on cpu"):
        mlp.freeze()


def test_a_wrong_input_names_the_layer() -> None:
    mlp = block("dense").freeze()
    with pytest.raises(ValueError, match=r"layer layers\.0: the last dimension of x should be in_features=5"):
        mlp(torch.randn(2, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match="should have one dtype"):
        mlp(torch.randn(2, 5))


# The raw op


def side_by_side(*shapes: tuple[int, ...]) -> Tensor:
    return factorlayer.stacks.frozen._side_by_side([torch.randn(shape) for shape in shapes])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(frozen=torch.zeros(2 * ALIGNMENT)), "should have 384 elements, they have 256; freeze them again"),
        (dict(frozen=torch.zeros(3 * ALIGNMENT, 1)), r"should be a stack with \"frozen\" and one contiguous tensor"),
        (dict(frozen=torch.zeros(6 * ALIGNMENT)[::2]), r"should be a stack with \"frozen\" and one contiguous tensor"),
        (dict(frozen=torch.zeros(3 * ALIGNMENT).double()), "what is frozen must be a CPU tensor of x's dtype"),
        (dict(x=torch.ones(7, 5)), r"x must be \[batch, 6\]"),
        (dict(x=torch.ones(6)), r"x must be \[batch, 6\]"),
        (dict(stack=LAYERS), "should be a stack with"),
        (dict(stack="tied 1 1 6 5 1 | frozen"), "a layer names weight 1, which is not its own"),
    ],
)
def test_wrong_calls_raise(change: dict[str, object], message: str) -> None:
    right = {"x": torch.ones(7, 6), "frozen": side_by_side((5, 6), (5,), (3, 5)), "stack": LAYERS + FROZEN}
    assert torch.ops.factorlayer.stack_frozen(**right).shape == (7, 3)
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.ops.factorlayer.stack_frozen(**{**right, **change})


def test_opcheck() -> None:
    given = torch.randn(4, 6), side_by_side((5, 6), (5,), (3, 5)), LAYERS + FROZEN
    torch.library.opcheck(torch.ops.factorlayer.stack_frozen, given)


def test_any_strides_of_x() -> None:
    mlp = block("mixed").freeze()
    x = inputs(mlp, 6)
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous() and torch.equal(mlp(turned), mlp(x))


# Plans


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_says_which_passes_read_weights_alone(dtype: str) -> None:
    text = " | ".join(f"tied 0 1 {p} {q} 1; bias; relu; tf32" for p, q in ((63, 256), (256, 256), (256, 256), (256, 4)))
    for batch_class in range(len(BATCHES)):
        found = plan_of(text + FROZEN, dtype, batch_class, Gpu(90, 132, 232448)).text()
        words = [line.split()[1:3] for line in found.splitlines() if line.startswith("pass ")]
        prepared = [["none", "s2"], ["x", "y"]]
        assert words == prepared or (words == [["x", "y"]] and batch_class < 2)  # few samples by clusters
