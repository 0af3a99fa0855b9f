"""fuse: the same numbers and gradients, the same parameters, and what is left alone."""

from __future__ import annotations

import copy
import pickle
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from oracle import nearly
from torch import Tensor, nn

import factorlayer
from factorlayer import FactorLinear, FactorMLP, factor_linear, fuse
from factorlayer.stacks.stack import RunsAsStacks

DROPOUT = "dropout behind it: where that drops something, the stack ends here"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 20),
        nn.ReLU(),
        nn.Sequential(FactorLinear(20, 30, rank=2), nn.GELU(approximate="tanh")),
        nn.Dropout(0.5),
        nn.Linear(30, 8, bias=False),
        nn.Identity(),
        nn.SiLU(inplace=True),
        FactorLinear(8, 6, structure="monarch", activation="tanh"),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    ).double()


def stacks(fused: nn.Module) -> list[list[str]]:
    """The layers of each stack, as explain() has them."""
    found: list[list[str]] = []
    for line in fused.explain().splitlines()[1:]:
        if line.endswith((" stack:", " layer:")):
            found.append([])
        elif line.startswith("    "):
            found[-1].append(line.strip())
    return found


def gradients(module: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    torch.manual_seed(5)
    return list(torch.autograd.grad(y, [x, *parameters], torch.randn_like(y)))


def assert_same_module(fused: nn.Module, module: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(fused(x), module(x))
    parameters = list(module.parameters())
    torch.testing.assert_close(gradients(fused, parameters, x), gradients(module, parameters, x))


@pytest.mark.parametrize("implementation", ["auto", "v1", "v2", "v3"])
def test_a_sequence_gives_the_same(implementation: str) -> None:
    plain = model().eval()
    fused = fuse(plain, implementation)
    assert stacks(fused) == [
        [
            "0: 12 -> 20, relu",
            f"2.0: 4 x 5 -> 5 x 6, kronecker, gelu_tanh ({DROPOUT})",
            "4: 30 -> 8, silu",
            "7: 2 x 4 -> 2 x 3, monarch, tanh",
        ],
    ]
    assert "8: as it was" in fused.explain() and "9: as it was" in fused.explain()
    assert not fused.training
    assert_same_module(fused, plain, torch.randn(5, 12).double())
    assert_same_module(fused, plain, torch.randn(2, 3, 12).double())
    assert fused(torch.randn(0, 12).double()).shape == (0, 3)


def test_parameters_stay_the_models_own() -> None:
    plain = model()
    fused = fuse(plain)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [id(p) for p in fused.parameters()] == [id(p) for p in plain.parameters()]
    assert dict(fused.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    other = model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    fused.load_state_dict(other.state_dict())
    x = torch.randn(4, 12).double()
    assert nearly(fused.eval()(x), fuse(other.eval())(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.float(),
        lambda m: m[0].weight.data.mul_(3),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(20, 12).double())),
        lambda m: setattr(m[4], "weight", nn.Parameter(torch.randn(8, 30).double(), requires_grad=False)),
        lambda m: nn.utils.parametrizations.weight_norm(m[0]).parametrizations.weight.original0.data.mul_(2),
        lambda m: m[0].register_forward_hook(lambda _, __, y: 2 * y),
        lambda m: m[2][0].register_forward_pre_hook(lambda _, x: (3 * x[0],)),
    ],
    ids=["float", "data", "parameter", "frozen", "parametrized", "hook", "pre-hook"],
)
def test_what_changes_after_fusing_counts(change: Callable[[nn.Module], object]) -> None:
    plain = model().eval()
    fused = fuse(plain)
    x = torch.randn(4, 12).double()
    before = fused(x)
    change(plain)
    x = x.to(next(plain.parameters()).dtype)
    assert not nearly(fused(x).double(), before)
    torch.testing.assert_close(fused(x), plain(x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.feature("fuse: copy.deepcopy and pickle", result="works")
def test_copies_are_whole_and_apart(again: Callable[[nn.Module], nn.Module]) -> None:
    fused = fuse(model().eval())
    x = torch.randn(4, 12).double()
    copied = again(fused)
    right = fused(x)
    assert nearly(copied(x), right) and list(copied.state_dict()) == list(fused.state_dict())
    with torch.no_grad():
        copied.state_dict()["0.weight"].mul_(2)
    assert nearly(fused(x), right) and not nearly(copied(x), right)


def test_training_mode_reaches_what_is_between() -> None:
    fused = fuse(model())
    x = torch.randn(64, 12).double()
    assert not nearly(fused(x), fused(x))
    fused.eval()
    assert nearly(fused(x), fused(x))


class Drops(nn.Module):
    """As transformers have it: dropouts between layers and behind them."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = FactorLinear(6, 16, structure="monarch", blocks=2), nn.Linear(16, 6)
        self.act, self.drop1, self.drop2, self.norm = nn.GELU(), nn.Dropout(p), nn.Dropout(p), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


def seeded(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def called(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(x)

    return called


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of a stack has."""
    made: list[int] = []
    right = factorlayer.stacks.stack.run_stack

    def run_stack(stack: Any, layers: Any, *given: Any) -> Tensor:
        made.append(len(layers))
        return right(stack, layers, *given)

    monkeypatch.setattr(factorlayer.stacks.stack, "run_stack", run_stack)
    return made


@pytest.mark.parametrize(
    ("training", "p", "calls"), [(True, 0.5, [1, 1]), (True, 0.0, [2]), (False, 0.5, [2])], ids=["drops", "p=0", "eval"]
)
def test_a_dropout_between_layers_ends_a_stack_where_it_drops(
    training: bool, p: float, calls: list[int], runs: list[int]
) -> None:
    plain = Drops(p).double().train(training)
    fused, x = fuse(plain), torch.randn(4, 6).double()
    assert stacks(fused) == [[f"fc1: 2 x 3 -> 8 x 2, monarch, gelu ({DROPOUT})", "fc2: 16 -> 6"]]
    assert "drop2: as it was" in fused.explain()
    assert nearly(seeded(fused)(x), seeded(plain)(x)) and runs == calls
    parameters = list(plain.parameters())
    for again in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        found = gradients(seeded(again), list(again.parameters()), x)
        torch.testing.assert_close(found, gradients(seeded(plain), parameters, x))
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(seeded(compiled)(x), seeded(plain)(x))
    fused.freeze()
    runs.clear()
    assert nearly(seeded(fused)(x), seeded(plain)(x)) and runs == [1, 1] * (len(calls) == 2)


def test_what_changes_of_a_dropout_counts() -> None:
    plain = Drops().double().eval()
    fused, x = fuse(plain), torch.randn(4, 6).double()
    plain.drop1.train()  # alone, as for samples of a posterior
    assert nearly(seeded(fused)(x), seeded(plain)(x)) and not nearly(fused(x), fused(x))
    plain.eval().drop1.register_forward_hook(lambda _, __, y: 2 * y)
    assert nearly(fused(x), plain(x)) and not nearly(fused(x), fuse(Drops().double().eval())(x))
    plain = Drops().double().eval()
    fused = fuse(plain)
    plain.drop1 = nn.Tanh()
    with pytest.warns(UserWarning, match=r"Drops\.drop1 is another"):
        assert nearly(fused(x), plain(x))


def test_a_dropout_in_place_stays_where_it_is() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5, inplace=True), nn.Linear(6, 4)).double().eval()
    assert stacks(fuse(plain)) == [["0: 4 -> 6, tanh"]]


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.feature("fuse: torch.compile as a whole graph", result="works")
def test_compiles_as_a_whole(dynamic: bool) -> None:
    torch._dynamo.reset()
    fused = fuse(model().eval())
    compiled = torch.compile(fused, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (4, 9):
        x = torch.randn(batch, 12).double()
        parameters = list(fused.parameters())
        torch.testing.assert_close(gradients(compiled, parameters, x), gradients(fused, parameters, x))


@pytest.mark.feature("fuse: torch.export", result="works")
def test_export() -> None:
    fused = fuse(model().eval())
    program = torch.export.export(fused, (torch.randn(4, 12).double(),), dynamic_shapes=({0: torch.export.Dim("n")},))
    x = torch.randn(9, 12).double()
    torch.testing.assert_close(program.module()(x), fused(x))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(4, 8), nn.Linear(8, 4), inner
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.sin(self.a(x))) * self.scale + self.inner(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l(x)) if x.sum() > 0 else self.l(x)


class Functional(nn.Module):
    """Dropout by a function, whose mode a graph would fix."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.relu(self.l(x)), 0.5, self.training)


def test_other_modules_are_looked_into() -> None:
    plain = Residual(Branching()).double()
    fused = fuse(plain)
    assert stacks(fused) == [["a: 4 -> 8, sine", "b: 8 -> 4"]]
    assert "inner: as it was, because torch.fx cannot trace it: symbolically traced" in fused.explain()
    x = torch.randn(5, 4).double()
    for sign in (1, -1):
        assert_same_module(fused, plain, sign * x.abs())
    plain.scale = nn.Parameter(torch.full((1,), 3.0).double())
    assert_same_module(fused, plain, x)
    again = pickle.loads(pickle.dumps(fused))
    torch.testing.assert_close(again(x), plain(x))


def test_modes_that_a_graph_would_fix_are_left_alone() -> None:
    fused = fuse(Residual(Functional()))
    assert "inner: as it was, because torch.fx cannot trace it: its forward asks whether" in fused.explain()
    x = torch.randn(50, 4)
    assert not nearly(fused(x), fused(x))
    fused.eval()
    assert nearly(fused(x), fused(x))


@pytest.mark.feature("fuse: layers with hooks", result="falls back")
def test_hooks_keep_a_layer_out() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU())
    seen = []
    plain[2].register_forward_hook(lambda *given: seen.append(given))
    fused = fuse(plain)
    assert stacks(fused) == [["0: 3 -> 4, tanh"], ["4: 4 -> 5, relu"]]
    assert "2: as it was, because it has hooks" in fused.explain()
    assert_same_module(fused, plain, torch.randn(2, 3))
    assert seen


def test_a_result_that_others_read_ends_a_stack() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            return self.b(h).tanh() + F.gelu(self.c(h), approximate="tanh")

    plain = Two()
    fused = fuse(plain)
    assert stacks(fused) == [["a: 3 -> 4, relu"], ["b: 4 -> 4, tanh"], ["c: 4 -> 4, gelu_tanh"]]
    assert_same_module(fused, plain, torch.randn(6, 3))


def test_layers_used_twice_have_the_sum_of_their_gradients() -> None:
    shared = nn.Linear(5, 5)
    plain = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh()).double()
    fused = fuse(plain)
    assert stacks(fused) == [["0: 5 -> 5, tanh", "0: 5 -> 5, tanh"]]
    assert_same_module(fused, plain, torch.randn(4, 5).double())


class Snake(nn.Module):
    """With a frequency that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.frequency * x) ** 2 / self.frequency


@pytest.mark.parametrize(
    "activation",
    [nn.LeakyReLU(0.3), nn.ELU(2.0), nn.PReLU(), nn.Hardswish(), Snake(), nn.Sequential(nn.Tanhshrink(), nn.Mish())],
    ids=lambda m: type(m).__name__,
)
def test_any_activation_is_part_of_a_stack(activation: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 4), nn.ReLU()).double()
    fused = fuse(plain)
    assert len(stacks(fused)) == 1 and len(stacks(fused)[0]) == 2
    assert_same_module(fused, plain, torch.randn(7, 4).double())
    assert list(fused.state_dict()) == list(plain.state_dict())
    activation.register_forward_hook(lambda _, __, y: 2 * y)
    assert_same_module(fused, plain, torch.randn(7, 4).double())


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.b(torch.sin(30 * self.a(x)).clamp(-0.5, 0.7)), 0.2)


def test_functions_one_behind_another_are_one_activation() -> None:
    plain = Functions().double()
    fused = fuse(plain)
    assert len(stacks(fused)) == 1 and "as it was" not in fused.explain()
    assert_same_module(fused, plain, torch.randn(5, 4).double())


@pytest.mark.parametrize(
    "between",
    [nn.Softmax(-1), nn.RReLU(), nn.PReLU(6), nn.Sequential(nn.Dropout(0.5), nn.ReLU())],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_what_is_no_activation_runs_as_it_was(between: nn.Module, mode: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), between, nn.Linear(6, 4), nn.ReLU()).train(mode)
    fused = fuse(plain)
    assert "as it was" in fused.explain()
    x = torch.randn(7, 4)
    for training in (mode, not mode):
        fused.train(training)
        torch.manual_seed(0)
        y = fused(x)
        torch.manual_seed(0)
        torch.testing.assert_close(y, plain.train(training)(x))


def test_the_implementation_can_be_changed_afterwards() -> None:
    fused = fuse(model(), "batched")
    fused.implementation = "v1"
    assert fused.implementation == "naive"
    assert [stack.implementation for stack in fused.stacks] == ["naive"]
    assert pickle.loads(pickle.dumps(fused)).implementation == "naive"


def test_nothing_to_fuse() -> None:
    block = FactorMLP([4, 8, 4])
    assert fuse(block) is block
    factored = FactorLinear(4, 4), FactorLinear(4, 4, activation=nn.PReLU())
    for plain in (nn.Sequential(), nn.Linear(4, 4), *factored, nn.ReLU()):
        fused = fuse(plain)
        assert (not stacks(fused) and "as it was" in fused.explain()) or not list(plain.children())
        assert list(fused.state_dict()) == list(plain.state_dict()) and fused.module is plain
        assert_same_module(fused.freeze().unfreeze(), plain, torch.randn(2, 4))
    lone = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert not stacks(fuse(lone))
    assert_same_module(fuse(lone), lone, torch.randn(2, 3))


def test_a_fused_module_and_a_block_are_parts_of_another() -> None:
    plain = nn.Sequential(FactorMLP([4, 8, 4], residual=True), nn.Linear(4, 4), nn.Tanh())
    fused = fuse(plain)
    assert stacks(fused) == [["1: 4 -> 4, tanh"]] and "  0: as it was" in fused.explain()
    assert_same_module(fused, plain, torch.randn(3, 4))
    assert_same_module(fuse(fused), plain, torch.randn(3, 4))


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"fuse: module should be an nn\.Module, it is str"):
        fuse("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fuse: implementation should be one of"):
        fuse(model(), "fastest")
    fused = fuse(model())
    with pytest.raises(ValueError, match=r"fuse: layer 0: the last dimension of x should be in_features=12"):
        fused(torch.randn(3, 13).double())
    fused.get_submodule("2.0").float()
    with pytest.raises(TypeError, match=r"fuse: layer 2\.0: x and weight_0 should have one dtype"):
        fused(torch.randn(3, 12).double())


class Styles(nn.Module):
    """A forward, given as a function of the module and x, beside two layers."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.run = run

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.run(self, x) if mask is None else self.run(self, x) * mask


def without_gradients(self: Styles, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.relu(self.a(x))
    return self.b(h)


def drawing(self: Styles, x: Tensor) -> Tensor:
    return self.b(self.a(x)) if random.random() < 0.5 else self.b(x)


def noting(self: Styles, x: Tensor) -> Tensor:
    self.last = self.a(x)
    return self.b(torch.relu(self.last))


def counting(self: Styles, x: Tensor) -> Tensor:
    self.count += 1
    return self.b(torch.relu(self.a(x)))


def with_autocast(self: Styles, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.b(torch.relu(self.a(x))).float()


def making(self: Styles, x: Tensor) -> Tensor:
    return self.b(torch.relu(self.a(x))) * torch.arange(4.0)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (without_gradients, "switches gradients or autocast"),
        (with_autocast, "switches gradients or autocast"),
        (drawing, "draws random numbers|in training mode"),
        (noting, "its forward sets last"),
        (counting, "its forward sets"),
        (making, "makes tensors of its own"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_a_graph_would_not_keep_is_left_alone(run: Callable[..., Tensor], reason: str) -> None:
    inner = Styles(run)
    before = dict(inner.__dict__)
    assert re.search(f"Styles: its own forward, as it was, because .*({reason})", fuse(inner).explain())
    fused = fuse(nn.Sequential(inner, nn.Linear(4, 3), nn.ReLU()))
    assert re.search(reason, fused.explain()) and stacks(fused) == [["1: 4 -> 3, relu"]]
    assert inner.__dict__ == before and not inner.count
    x = torch.randn(3, 4)
    random.seed(0)
    y = fused(x)
    random.seed(0)
    torch.testing.assert_close(y, torch.relu(fused.get_submodule("1")(inner(x))))


def writing_between(self: Styles, x: Tensor) -> Tensor:
    h = self.a(x)
    x.mul_(2)
    return self.b(h) + x


def adding_in_place(self: Styles, x: Tensor) -> Tensor:
    h = self.a(x)
    r = h
    h += 1
    return self.b(torch.relu(h)) + r


def comparing(self: Styles, x: Tensor) -> Tensor:
    return self.b(torch.relu(self.a(x))) > 0


@pytest.mark.parametrize("run", [writing_between, adding_in_place, comparing])
def test_order_aliases_and_dtypes_stay(run: Callable[..., Tensor]) -> None:
    plain = Styles(run)
    fused = fuse(plain)
    with torch.no_grad():
        x = torch.randn(5, 4)
        y, z = fused(x.clone()), plain(x.clone())
    assert y.dtype == z.dtype
    torch.testing.assert_close(y, z)
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_arguments_that_may_be_left_out_are() -> None:
    plain = Styles(lambda self, x: self.b(torch.relu(self.a(x))))
    fused = fuse(plain)
    x = torch.randn(5, 4)
    torch.testing.assert_close(fused(x), plain(x))
    assert "Styles: its own forward runs where mask is given" in fused.explain()
    mask = torch.randn(5, 4)
    with pytest.warns(UserWarning, match="Styles is called with other arguments than those it was traced with"):
        y = fused(x, mask)
    torch.testing.assert_close(y, plain(x, mask))
    torch.testing.assert_close(fused(x, mask=mask), plain(x, mask))
    torch.testing.assert_close(fused(mask=None, x=x), plain(x))


def test_forwards_and_hooks_of_their_own_run() -> None:
    plain = model().eval()
    plain[0].forward = lambda x: nn.functional.linear(x, 2 * plain[0].weight, plain[0].bias)
    plain[2].register_forward_hook(lambda _, __, y: 3 * y)
    fused = fuse(plain)
    x = torch.randn(3, 12).double()
    torch.testing.assert_close(fused(x), plain(x))
    plain[4].forward = lambda x: 5 * nn.functional.linear(x, plain[4].weight)
    torch.testing.assert_close(fused(x), plain(x))
    plain.register_forward_hook(lambda _, __, y: 3 * y)
    with pytest.raises(ValueError, match="Sequential has hooks or a forward of its own"):
        fuse(plain)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_compiled_is_refused_or_left(inplace: bool) -> None:
    """It would go on with what was compiled, unfused and without a word."""
    own = model().eval()
    own.compile(backend="eager")
    for compiled in (torch.compile(model().eval(), backend="eager"), own):
        name = type(compiled).__name__
        with pytest.raises(ValueError, match=f"fuse: {name} is compiled, .* with inplace=True before"):
            fuse(compiled, inplace=inplace)
        outer = nn.Sequential(compiled, nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
        assert "0: as it was, because it is compiled: fuse it before" in fuse(outer).explain()
        fuse(outer, inplace=True)
        assert outer[0] is compiled
        assert any(isinstance(part, RunsAsStacks) for part in outer.modules())


@pytest.mark.long
def test_threads_may_trace_and_call_at_once() -> None:
    """torch.fx changes nn.Module's own methods while it traces, for all threads."""
    x, plain = torch.randn(4, 12).double(), model().eval()
    fused, own = fuse(plain), nn.Module.__call__
    right = fused(x)
    weights = [torch.randn(4, 3).double(), torch.randn(5, 4).double()]
    failed: list[Exception] = []

    def repeat(work: Callable[[], object]) -> None:
        try:
            for _ in range(20):
                work()
        except Exception as error:
            failed.append(error)

    def again() -> None:
        copied = copy.deepcopy(fused)
        assert len(copied.stacks) == len(fused.stacks)
        torch.testing.assert_close(copied(x), right)

    works = [
        again,
        again,
        lambda: FactorLinear(12, 20, activation=nn.Mish()),
        lambda: factor_linear(x, weights, activation=lambda x: torch.tanh(x) * 2),
        lambda: torch.testing.assert_close(plain(x), right),
        lambda: torch.testing.assert_close(fused(x), right),
        lambda: [torch.rand(4) for _ in range(1000)],
    ]
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and nn.Module.__call__ is own


def test_parts_that_are_put_past_the_module_run() -> None:
    """As torch.ao.quantization.quantize_dynamic puts its own."""
    plain = model().eval()
    x = torch.randn(4, 12).double()
    fused = copy.deepcopy(fuse(plain))
    other = nn.Linear(12, 20).double()
    fused._modules["0"] = other
    with pytest.warns(UserWarning, match=r"not what it was traced as \(Sequential\.0 is another\)"):
        y = fused(x)
    torch.testing.assert_close(y, nn.Sequential(other, *plain[1:])(x))
    assert next(fused.parameters()) is other.weight


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_stay_as_they_are() -> None:
    x = torch.randn(3, 4)
    inner = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)
    plain = nn.Sequential(inner, nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    fused = fuse(plain)
    assert [list(stack.names) for stack in fused.stacks] == [["1", "3"]]
    torch.testing.assert_close(fused(x), plain(x))
    for inplace in (False, True):
        with pytest.raises(TypeError, match=r"module is of torch\.jit, .*; fuse what it is made of, then trace that"):
            fuse(inner, inplace=inplace)


def test_parts_cannot_be_set_afterwards() -> None:
    fused = fuse(model())
    with pytest.raises(AttributeError, match="fuse: 0 cannot be set afterwards"):
        setattr(fused, "0", nn.Linear(12, 20))
    plain = model().eval()
    fused = fuse(plain)
    plain[0].bias = None
    with pytest.raises(ValueError, match="fuse: layer 0 has got or lost its bias since"):
        fused(torch.randn(3, 12).double())
    plain[4].weight = nn.Parameter(torch.randn(30, 8).double())
