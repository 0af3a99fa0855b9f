"""fuse on models that torch.fx cannot trace, on arguments that a trace leaves out, and on what changes afterwards."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import nearly
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from factorlayer import FactorLinear, freeze, fuse, unfreeze
from factorlayer.stacks.stack import LayerStack, RunsAsStacks


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if x.dim() == 2:
            q, k, v = q[None], k[None], v[None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.reshape(x.shape))


class Gated(nn.Module):
    """As Llama's."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down_proj, self.act_fn = nn.Linear(hidden, width, False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """As a transformer's, with branches on shapes and data."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        plain = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.mlp = Gated(width, 2 * width) if gated else plain
        self.scale = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        if x.shape[1] > 100 or not torch.isfinite(x).all():
            return x
        return x + self.scale * self.mlp(x)


class Model(nn.Module):
    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Block(8, gated) for _ in range(3))
        self.drop, self.depth, self.calls = 0.1, 3, 0

    def forward(self, ids: Tensor | None = None, embeds: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if (ids is None) == (embeds is None):
            raise ValueError("either ids or embeds")
        self.calls += 1
        x = self.embed(ids) if embeds is None else embeds
        for layer in self.layers[: self.depth]:
            x = layer(x, mask=mask, unused=1)
        return nn.functional.dropout(x, self.drop, self.training)

    def generate(self, ids: Tensor) -> Tensor:
        return self(ids).argmax(-1)


IDS = torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_what_cannot_be_traced_are_fused(gated: bool) -> None:
    plain = Model(gated).double().eval()
    own, before = dict(plain.__dict__), [type(part) for part in plain.modules()]
    fused = fuse(plain)
    names = [name for stack in fused.stacks for name in stack.names]
    part = ["gate_proj"] if gated else ["0", "2"]
    assert names == [f"layers.{i}.mlp.{name}" for i in range(3) for name in part]
    assert "Model: its own forward, with parts of it fused" in fused.explain()
    assert "layers.0.attention: as it was, because torch.fx cannot trace it: " in fused.explain()
    torch.testing.assert_close(fused(IDS), plain(IDS))
    mask = torch.ones(5, 5).tril().bool()
    torch.testing.assert_close(fused(embeds=plain.embed(IDS), mask=mask), plain(IDS, mask=mask))
    with pytest.raises(ValueError, match="either ids or embeds"):
        fused()
    assert torch.equal(fused.generate(IDS), plain.generate(IDS))
    assert [type(part) for part in plain.modules()] == before
    assert {name for name in own if own[name] is not plain.__dict__[name]} == {"calls"} and plain.calls == 6
    assert list(fused.state_dict()) == list(plain.state_dict())
    parameters = list(plain.parameters())
    for y, z in zip(
        torch.autograd.grad(fused(IDS).square().sum(), parameters),
        torch.autograd.grad(plain(IDS).square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(y, z)


def test_the_fused_parts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    fused = fuse(Model().eval())
    for stack in fused.stacks:
        run = stack.forward
        monkeypatch.setattr(stack, "forward", lambda x, run=run, names=stack.names: (ran.append(names), run(x))[1])
    fused(IDS)
    assert ran == [(f"layers.{i}.mlp.0", f"layers.{i}.mlp.2") for i in range(3)]


def test_what_is_changed_in_such_a_model_counts() -> None:
    plain = Model().double().eval()
    fused = fuse(plain)
    for change in (
        lambda: setattr(fused, "depth", 2),
        lambda: setattr(plain.layers[0], "scale", 3.0),
        lambda: plain.layers.__setitem__(0, Block(8, True).double()),
        lambda: plain.layers[1].mlp.__setitem__(1, nn.ReLU()),
        lambda: plain.layers[1].register_forward_hook(lambda _, __, y: 2 * y),
        lambda: setattr(plain.layers[1], "mlp", nn.Linear(8, 8).double()),
        lambda: plain.layers.append(Block(8, False).double()),
        lambda: setattr(plain, "depth", 4),
    ):
        before = plain(IDS)
        change()
        assert not nearly(plain(IDS), before) or len(plain.layers) == 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(fused(IDS), plain(IDS))


def test_modes_copies_checkpoints_and_dtypes_of_such_a_model() -> None:
    plain = Model().double()
    fused = fuse(plain)
    assert fused.training and not torch.equal(fused(IDS), fused(IDS))
    assert not fused.eval().training and not plain.training and not plain.layers[0].mlp.training
    right = fused(IDS)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused).freeze()):
        assert nearly(again(IDS), right) and len(again.stacks) == 3
        again.load_state_dict({name: 2 * value for name, value in fused.state_dict().items()})
        assert not nearly(again(IDS), right)
    assert nearly(pickle.loads(pickle.dumps(fused.freeze()))(IDS), fused(IDS))
    frozen = fused(IDS)
    with torch.no_grad():
        plain.layers[0].mlp[0].weight.mul_(2)
    assert nearly(fused(IDS), frozen)
    torch.testing.assert_close(fused.unfreeze()(IDS), plain(IDS))
    embeds = plain.embed(IDS).detach().requires_grad_()
    y = checkpoint(lambda e: fused(embeds=e), embeds, use_reentrant=False)
    z = plain(embeds=embeds)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), embeds)[0] for each in (y, z)))
    assert fused.float()(IDS).dtype == torch.float32


@pytest.mark.feature("fuse: torch.compile of models that are fused in parts", result="falls back")
def test_compiled_such_a_model_is_the_same() -> None:
    torch._dynamo.reset()
    plain = Model().double().eval()
    compiled = torch.compile(fuse(plain), backend="aot_eager")
    words = r"torch\.compile and torch\.export Model runs as it was, unfused.*; fuse\(model, inplace=True\) makes"
    with torch.no_grad():
        with pytest.warns(UserWarning, match=words):
            torch.testing.assert_close(compiled(IDS), plain(IDS))
        plain.layers[0].scale = 4.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(compiled(IDS), plain(IDS))


class Branches(nn.Module):
    """On its arguments alone, so that torch.compile has it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.out = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(int(count)):
            x = x + self.mlp(x)
        return self.out(x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_as_a_whole_such_a_model_is_the_same_and_says_what_to_do(dynamic: bool) -> None:
    torch._dynamo.reset()
    plain = Branches().double()
    fused, x = fuse(plain), torch.randn(5, 4, dtype=torch.float64)
    assert [stack.names for stack in fused.stacks] == [("mlp.0", "mlp.2")]
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    parameters = list(plain.parameters())
    with pytest.warns(UserWarning, match="Branches runs as it was") as told:
        found = torch.autograd.grad(compiled(x, 2).square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, 2).square().sum(), parameters))
    assert len(told) == 1  # as the graph is made
    assert str(told[0].message).endswith("fuse(model, inplace=True) makes of the model's parts what they can follow")
    assert fuse(plain, inplace=True) is plain
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(plain, backend=keep, fullgraph=True, dynamic=dynamic)
    found = torch.autograd.grad(compiled(x, 2).square().sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, 2).square().sum(), parameters))
    assert sum(node.target is nn.functional.linear for graph in graphs for node in graph.nodes) == 1  # out


@pytest.mark.long
@pytest.mark.feature("fuse: torch.compile of models that are fused in place", result="works")
@pytest.mark.parametrize("gated", [False, True])
def test_in_place_a_model_stays_what_it_is(gated: bool) -> None:
    torch._dynamo.reset()
    plain = Model(gated).double().eval()
    model = copy.deepcopy(plain)
    heard: list[nn.Module] = []
    model.register_forward_hook(lambda module, _, y: heard.append(module))
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    assert fuse(model, inplace=True) is model and type(model) is Model
    assert [name for name, part in model.named_modules() if isinstance(part, RunsAsStacks)] == [
        f"layers.{i}.mlp" for i in range(3)
    ]
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == parameters
    assert torch.equal(model.generate(IDS), plain.generate(IDS)) and heard == [model]
    right = torch.autograd.grad(plain(IDS).square().sum(), list(plain.parameters()))
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(torch.autograd.grad(each(IDS).square().sum(), list(each.parameters())), right)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(IDS), plain(IDS))
    with pytest.warns(UserWarning, match="nothing in Model can be fused that is not yet"):
        assert fuse(model, inplace=True) is model


class OneGraph(nn.Module):
    """Is one graph, and has a method and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(4, 6), nn.Linear(6, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.factor * self.down(torch.tanh(self.up(x)))
        return made

    def loss(self, x: Tensor) -> Tensor:
        made: Tensor = self(x).square().sum()
        return made


@pytest.mark.filterwarnings("error:fuse")
@pytest.mark.parametrize("make", [OneGraph, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))])
def test_in_place_what_is_one_graph_becomes_what_fuse_makes_of_it(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    plain, x = make().double(), torch.randn(3, 4).double()
    model = copy.deepcopy(plain)
    around, parameters, right = nn.Sequential(model), [id(p) for p in model.parameters()], plain(x)
    assert fuse(model, inplace=True) is model and isinstance(model, RunsAsStacks) and len(model.stacks) == 1
    assert list(model.state_dict()) == list(plain.state_dict()) and [id(p) for p in model.parameters()] == parameters
    called: list[nn.Module] = []
    forward = LayerStack.forward
    with monkeypatch.context() as patch:
        patch.setattr(LayerStack, "forward", lambda self, x: called.append(self) or forward(self, x))
        for each in (model, around, copy.deepcopy(around), pickle.loads(pickle.dumps(model)), freeze(around.eval())):
            torch.testing.assert_close(each(x), right)
            assert called and not called.clear()
    unfreeze(around)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), right)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(right.square().sum(), list(plain.parameters())))
    if isinstance(plain, OneGraph):
        torch.testing.assert_close(model.loss(x), plain.loss(x))
        model.factor, plain.factor = 3.0, 3.0
        with pytest.warns(UserWarning, match=r"OneGraph\.factor is another.*; fuse the model again"):
            torch.testing.assert_close(model(x), plain(x))
    assert fuse(model, "batched", inplace=True) is model and model.implementation == "batched"
    torch.testing.assert_close(model(x), plain(x))
    assert model.stacks[0].names[0] in ("up", "0")


class TenTimes(nn.Module):
    """Does more than its forward when it is called, as layers of transformers that are checkpointed did."""

    def __call__(self, x: Tensor) -> Tensor:
        made: Tensor = super().__call__(x)
        return 10 * made


class TenTimesRelu(TenTimes, nn.ReLU):
    pass


class TenTimesNet(TenTimes, nn.Sequential):
    pass


class TenTimesBlock(TenTimes):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def _ff_block(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self._ff_block(x) if x.shape[0] else x


CALLED = {
    "an activation": (lambda: nn.Sequential(nn.Linear(4, 4), TenTimesRelu(), nn.Linear(4, 4)), 1),
    "the model": (lambda: TenTimesNet(Branching(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 1),
    "a part that is looked into": (
        lambda: nn.Sequential(TenTimesNet(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Tanh()),
        1,
    ),
    "a part": (lambda: Branching(TenTimesNet(Branching(), nn.Linear(4, 4))), 1),
    "a part of which a method is fused": (lambda: nn.Sequential(TenTimesBlock(), nn.Linear(4, 4)), 1),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("what", CALLED)
def test_what_a_class_does_around_forward_is_done_once(what: str, inplace: bool) -> None:
    make, stacks = CALLED[what]
    plain, x = make().double(), torch.randn(3, 4).double()
    fused = fuse(copy.deepcopy(plain), inplace=inplace)
    assert sum(len(part.stacks) for part in fused.modules() if isinstance(part, RunsAsStacks)) == stacks
    torch.testing.assert_close(fused(x), plain(x))


class Branching(nn.Module):
    """No graph holds it."""

    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) if mlp is None else mlp

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x if x.shape[0] == 0 else x + self.mlp(x)
        return made


@pytest.mark.long
@pytest.mark.filterwarnings("error:fuse")
@pytest.mark.parametrize(
    ("first", "fused"), [([], ["1.mlp", "2.mlp"]), ([nn.Linear(4, 4), nn.ReLU()], ["", "3.mlp", "4.mlp"])]
)
def test_in_place_torch_compile_follows_parts_within_what_is_one_graph(
    first: list[nn.Module], fused: list[str]
) -> None:
    torch._dynamo.reset()
    plain, x = nn.Sequential(*first, nn.Linear(4, 4), Branching(), Branching()).double(), torch.randn(3, 4).double()
    model = copy.deepcopy(plain)
    around, names = nn.ModuleList([model]), list(plain.state_dict())
    assert fuse(model, inplace=True) is model and around[0] is model and list(model.state_dict()) == names
    assert sorted(name for name, part in model.named_modules() if isinstance(part, RunsAsStacks)) == fused
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, _: object) -> Any:
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True)
    for each in (model, copy.deepcopy(model), compiled, freeze(model.eval())):
        torch.testing.assert_close(each(x), plain(x))
    (graph,) = graphs
    assert sum(node.target is nn.functional.linear for node in graph.nodes) == (0 if first else 1)


def test_in_place_parts_are_set_in_the_module_and_fused_again() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU()).double()
    model = fuse(copy.deepcopy(plain), inplace=True)
    x, last = torch.randn(3, 4).double(), nn.Linear(6, 3).double()
    plain[2], model[2] = last, last
    del plain[3], model[3]
    with pytest.warns(UserWarning, match="fuse the model again"):
        torch.testing.assert_close(model(x), plain(x))
    assert fuse(model, inplace=True) is model and len(model) == 3 and list(model.stacks[0].names) == ["0", "2"]
    torch.testing.assert_close(model(x), plain(x))
    whole = fuse(OneGraph().double(), inplace=True)
    with pytest.raises(AttributeError, match=r"down cannot be set afterwards: .* which is `\.module`, and fuse again"):
        whole.down = last
    whole.module.down = last
    assert fuse(whole, inplace=True) is whole and whole(x).shape == (3, 3) and whole.stacks[0].members[1] is last


@pytest.mark.filterwarnings("error:fuse")
def test_in_place_a_model_is_fused_for_calls_with_all_its_arguments() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(4, 4), nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))

        def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, state = self.gru(x, state)
            return self.head(y), state

    plain, x = Recurrent().double(), torch.randn(5, 2, 4).double()
    model = copy.deepcopy(plain)
    assert fuse(model, inplace=True) is model and type(model) is Recurrent and isinstance(model.head, RunsAsStacks)
    for given in ((x,), (x, torch.randn(1, 2, 4).double())):
        torch.testing.assert_close(model(*given), plain(*given))


def test_in_place_what_cannot_become_another_class_is_refused_and_left() -> None:
    class Slotted(nn.Sequential):
        __slots__ = ("more",)

    model, x = Slotted(Branching(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(3, 4)
    right, before = model(x), list(model.modules())
    with pytest.raises(ValueError, match=r"Slotted cannot become another class.*use what fuse returns without inplace"):
        fuse(model, inplace=True)
    assert type(model) is Slotted and list(model.modules()) == before and torch.equal(model(x), right)


def test_in_place_what_has_fused_methods_is_as_without() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, before = torch.randn(2, 5, 8), list(model.layers)
    right = model(x)
    assert fuse(model, inplace=True) is model
    assert [part.module for part in model.layers] == before and len(model.layers[0].stacks) == 1
    torch.testing.assert_close(model(x), right)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["feed_forward_chunk", "ff_chunk"])
def test_in_place_parts_are_called_with_what_their_graphs_leave_out(method: str) -> None:
    """As BERT's layers are, and ALBERT's, each time with a keyword that their forward does not name."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None, **unused: Any) -> Tensor:
            return x + getattr(self, method)(x if mask is None else x * mask)

    def of_both_layers(self: Layer, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    setattr(Layer, method, of_both_layers)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers if x.isfinite().all() else ():  # which no graph holds
                x = layer(x, torch.ones_like(x), position=None)
            return x

    torch.manual_seed(0)
    plain = Around().double().eval()
    model = fuse(copy.deepcopy(plain), inplace=True)
    assert all(len(part.stacks) == 1 for part in model.layers)
    x = torch.randn(3, 8).double()
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(each(x), plain(x))


def test_in_place_a_sequence_is_still_asked_for_its_parts() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            if x.isfinite().all() and self.mlp:  # which no graph holds
                x = self.mlp(x)
            for part in self.mlp:
                x = part(x)
            return x + self.mlp[-1].bias * len(self.mlp)

    torch.manual_seed(0)
    plain = Around().double()
    model = fuse(copy.deepcopy(plain), inplace=True)
    assert isinstance(model.mlp, RunsAsStacks)
    x = torch.randn(3, 8).double()
    torch.testing.assert_close(model(x), plain(x))
    assert list(model.mlp[:2]) == list(model.mlp)[:2]
    fused = fuse(plain)
    assert fused
    with pytest.raises(TypeError, match="'Around' object is not subscriptable"):
        fused[0]


class Own(nn.Module):
    """Has its own way with what PyTorch asks of every part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.norm, self.down = nn.Linear(8, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 8)
        self.scale, self.steps = torch.ones(1), 3  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.up(x))))

    def train(self, mode: bool = True) -> Own:
        super().train(mode)
        self.norm.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Own:
        super()._apply(fn, recurse)
        self.scale = fn(self.scale)
        return self

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *given: Any) -> None:
        if f"{prefix}first.bias" in state:
            state[f"{prefix}up.bias"] = state.pop(f"{prefix}first.bias")
        super()._load_from_state_dict(state, prefix, *given)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_module_does_when_it_is_moved_trained_or_loaded_it_does_fused(inplace: bool) -> None:
    class Around(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) if x.isfinite().all() else x

    torch.manual_seed(0)
    own = Own()
    heard: list[str] = []
    own.register_state_dict_post_hook(lambda *_: heard.append("saved"))
    own.register_load_state_dict_pre_hook(lambda *_: heard.append("loads"))
    own.register_load_state_dict_post_hook(lambda *_: heard.append("loaded"))
    model = fuse(Around([own]) if inplace else own, inplace=inplace)
    first = "0.up.bias" if inplace else "up.bias"
    assert isinstance(model[0] if inplace else model, RunsAsStacks)
    assert model.double() is model and own.scale.dtype == torch.float64
    model.eval()
    assert model.train() is model and own.training and not own.norm.training
    own.steps = 4
    state = model.state_dict()
    own.steps = 5
    assert state[first.replace("up.bias", "_extra_state")] == 4
    state[first.replace("up", "first")] = torch.zeros_like(state.pop(first))
    freeze(model)
    model.load_state_dict(state)
    assert own.steps == 4 and not own.up.bias.any() and heard == ["saved", "loads", "loaded"]
    model.eval()
    x = torch.randn(3, 8).double()
    torch.testing.assert_close(model(x), own(x))  # it is frozen anew
    fuse(own)
    assert len(own._load_state_dict_post_hooks) == 2


def test_compiled_parts_that_a_graph_calls_are_the_same() -> None:
    torch._dynamo.reset()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.branches = nn.Linear(4, 4), nn.Linear(4, 4), Branches()

        def forward(self, x: Tensor) -> Tensor:
            return self.branches(self.b(torch.relu(self.a(x))), 2)

    plain = Around().double()
    fused = fuse(plain)
    assert [stack.names for stack in fused.stacks] == [("a", "b"), ("branches.mlp.0", "branches.mlp.2")]
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="branches runs as it was"):
        torch.testing.assert_close(compiled(X), plain(X))


def test_compiled_such_a_model_says_that_it_is_not_frozen() -> None:
    torch._dynamo.reset()
    plain = Branches().double()
    compiled = torch.compile(fuse(plain).freeze(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain.mlp[0].weight.mul_(2)
        with pytest.warns(
            UserWarning, match="unfused, with its parameters as they are and not as they were frozen: they"
        ):
            torch.testing.assert_close(compiled(X, 2), plain(X, 2))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.feature("fuse: nn.TransformerEncoder", result="works")
def test_pytorchs_transformer_layers(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).double()
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fused = fuse(plain)
    assert [stack.names for stack in fused.stacks] == [(f"layers.{i}.linear1", f"layers.{i}.linear2") for i in (0, 1)]
    x = torch.randn(2, 5, 8).double()
    for mode in (True, False):
        fused.train(mode)
        torch.manual_seed(1)
        y = fused(x)
        torch.manual_seed(1)
        torch.testing.assert_close(y, plain(x))
    plain.train()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    plain.layers[0].activation = torch.tanh
    with pytest.warns(UserWarning, match=r"fuse: layers\.0 is not what it was traced as \(.*activation is another\)"):
        y = fused(x)
    assert "layers.0: its own _ff_block runs, because" in fused.explain()
    for part in plain.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    torch.testing.assert_close(fused(x), plain(x))


class Options(nn.Module):
    """Reads what a trace would keep."""

    kind = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.LeakyReLU(0.1)
        self.scale, self.function, self.sizes, self.flag = 2.0, torch.tanh, [1, 2], False
        self.options = SimpleNamespace(shift=0.5)
        self.register_buffer("offset", None)

    def forward(self, x: Tensor, mask: Tensor | None = None, gain: float = 1.0, *more: Tensor, **named: Any) -> Tensor:
        y = self.function(self.a(x)) * self.scale + self.options.shift * self.sizes[0]
        y = self.act(self.b(y)) * self.kind * gain
        y = -y if self.flag else y
        y = y if self.offset is None else y + self.offset
        y = y if mask is None else y * mask
        y = y if named.get("bias") is None else y + named["bias"]
        return y + sum(more) if more else y


X = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {"mask": 2 * X}),
        ((2 * X,), {}),
        ((), {"gain": 3.0}),
        ((None, 3.0), {}),
        ((None, 1), {}),
        ((), {"bias": X}),
        ((None, 1.0, X), {}),
        ((), {"unknown": 1}),
    ],
)
def test_arguments_that_were_not_traced_count(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    plain = Options().double()
    fused = fuse(plain)
    assert [len(stack.layers) for stack in fused.stacks] == [2]
    torch.testing.assert_close(fused(X, None, gain=1.0), plain(X))  # what they are when left out
    with pytest.warns(UserWarning, match="Options is called with other arguments than those it was traced with"):
        y = fused(X, *given, **named)
    assert nearly(y, plain(X, *given, **named))
    assert nearly(fused(X, *given, **named), y)
    torch.testing.assert_close(fused(X), plain(X))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fused()


def test_what_is_no_tensor_where_a_tensor_was_traced_counts() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return self.b(torch.relu(self.a(x))) if mask is not None else self.a(x)

    plain = Needs().double()
    fused = fuse(plain)
    torch.testing.assert_close(fused(X, X), plain(X, X))
    with pytest.warns(UserWarning, match="called with what is no tensor"):
        assert nearly(fused(X, None), plain(X, None))


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "function": lambda m: setattr(m, "function", torch.sigmoid),
    "flag": lambda m: setattr(m, "flag", True),
    "in a list": lambda m: m.sizes.__setitem__(0, 5),
    "in an object": lambda m: setattr(m.options, "shift", 4.0),
    "of the class": lambda m: setattr(m, "kind", 7.0),
    "buffer": lambda m: setattr(m, "offset", torch.ones(4).double()),
    "activation's number": lambda m: setattr(m.act, "negative_slope", 0.7),
    "part": lambda m: setattr(m, "act", nn.Tanh()),
    "layer": lambda m: setattr(m, "b", nn.Linear(4, 4).double()),
    "hook": lambda m: m.register_forward_hook(lambda _, __, y: 2 * y),
    "forward": lambda m: setattr(m, "forward", lambda x: 5 * x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_trace_read_counts_when_it_changes(change: str) -> None:
    plain = Options().double()
    fused = fuse(plain)
    before = fused(X)
    CHANGES[change](plain)
    assert not torch.allclose(plain(X), before)
    with pytest.warns(UserWarning, match=r"Options is not what it was traced as \(.*fuse the model again"):
        y = fused(X)
    assert nearly(y, plain(X)) and nearly(fused(X), y)
    assert "Options: its own forward runs, because" in fused.explain()
    if change not in ("hook", "forward"):
        torch.testing.assert_close(fuse(plain)(X), plain(X))
        torch.testing.assert_close(copy.deepcopy(fused)(X), plain(X))


def test_a_changed_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Options().double()
    fused = fuse(plain)
    monkeypatch.setattr(Options, "kind", 9.0)
    with pytest.warns(UserWarning, match=r"Options\.kind is another"):
        assert nearly(fused(X), plain(X))


def test_what_is_set_in_the_result_is_the_modules() -> None:
    plain = Options().double()
    fused = fuse(plain)
    fused.scale = 4.0
    assert plain.scale == fused.scale == 4.0
    with pytest.warns(UserWarning, match=r"Options\.scale is another"):
        assert nearly(fused(X), plain(X))
    fused.scale = 2.0  # what it was
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(X), plain(X))
    assert "its own forward runs, because" not in fused.explain()
    fused.eval()
    assert not plain.training


class Wrapped(nn.Module):
    """Is called by way of a function that it is given later, as transformers' layers that are checkpointed are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.is_wrapped = nn.Linear(4, 4), nn.Linear(4, 4), False

    def _ff_block(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x
        return self.wrap(self._ff_block, x) if self.is_wrapped else self._ff_block(x)


def test_what_is_set_for_the_first_time_is_the_modules_too() -> None:
    plain = Wrapped().double()
    model = fuse(nn.Sequential(plain), inplace=True)
    fused: Any = model[0]
    before = model(X)
    fused.is_wrapped, fused.wrap = True, lambda run, x: 2 * run(x)
    torch.testing.assert_close(model(X), 2 * before)
    assert plain.wrap is fused.wrap
    fused.is_wrapped = False
    del fused.wrap
    assert not hasattr(plain, "wrap") and not hasattr(fused, "wrap")
    torch.testing.assert_close(model(X), before)
    with pytest.raises(AttributeError, match="wrap"):
        del fused.wrap


@pytest.mark.long
def test_changes_count_when_compiled() -> None:
    torch._dynamo.reset()
    plain = Options().double()
    compiled = torch.compile(fuse(plain), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), plain(X))
    plain.scale = 3.0
    torch.testing.assert_close(compiled(X), plain(X))
    plain.act.negative_slope = 0.6
    torch.testing.assert_close(compiled(X), plain(X))
    torch.testing.assert_close(compiled(X, mask=X), plain(X, mask=X))


def test_whether_gradients_are_enabled_is_not_traced() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y if torch.is_grad_enabled() else 2 * y

    plain = Asks().double()
    fused = fuse(plain)
    assert "Asks: its own forward, with parts of it fused" in fused.explain() and len(fused.stacks) == 1
    torch.testing.assert_close(fused(X), plain(X))
    with torch.no_grad():
        torch.testing.assert_close(fused(X), plain(X))


def test_types_and_buffers_that_a_forward_asks_for_are_not_traced() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.register_buffer("on", torch.tensor(True))

        def forward(self, x: Any) -> Tensor:
            x = x if isinstance(x, Tensor) else torch.zeros(2, 4).double()
            return self.net(x) if self.on else x

    plain = Asks().double()
    fused = fuse(plain)
    assert [stack.names for stack in fused.stacks] == [("net.0",)]
    for on in (1, 0):
        plain.on.fill_(on)
        torch.testing.assert_close(fused(X), plain(X))
        torch.testing.assert_close(fused([X]), plain([X]))


class Doubled(Tensor):
    """A weight with products of its own, as a quantised one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.as_subclass(Tensor) if isinstance(arg, Doubled) else arg for arg in args]
        if function is nn.functional.linear:
            return nn.functional.linear(plain[0], 2 * plain[1], *plain[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("late", [False, True])
def test_weights_with_products_of_their_own_stay(late: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2), nn.Tanh()).double()
    fused = fuse(plain) if late else None
    own = plain[2].weight.detach().as_subclass(Doubled)
    plain[2].weight = nn.Parameter(own, requires_grad=False)
    assert type(plain[2].weight) is Doubled
    fused = fused or fuse(plain)
    if not late:
        assert [stack.names for stack in fused.stacks] == [("0",), ("4",)] and "2: as it was" in fused.explain()
    torch.testing.assert_close(fused(X), plain(X))
    torch.testing.assert_close(fused.freeze()(X), plain(X))


class ReadsWeight(nn.Module):
    """As T5, whose second layer may be of another dtype."""

    def __init__(self, reads: Callable[[Tensor, FactorLinear], Tensor]) -> None:
        super().__init__()
        self.wi, self.wo, self.reads = FactorLinear(4, 8), FactorLinear(8, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.reads(torch.relu(self.wi(x)), self.wo))


def test_a_forward_may_ask_whether_a_structured_weight_is_a_tensor() -> None:
    plain = ReadsWeight(lambda x, layer: x.to(layer.weight.dtype) if isinstance(layer.weight, Tensor) else x)
    fused = fuse(plain)
    assert [stack.names for stack in fused.stacks] == [("wi", "wo")]
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3, 4, dtype=dtype)
        torch.testing.assert_close(fused.to(dtype)(x), plain(x))


def test_what_may_change_of_a_structured_weight_is_not_traced() -> None:
    plain = ReadsWeight(lambda x, layer: x.to(layer.weight.dtype))
    fused = fuse(plain)
    assert not fused.stacks
    assert "its forward reads FactorLinear.weight.dtype, which a graph would keep as it is now" in fused.explain()
    assert fused.double()(torch.randn(3, 4).double()).dtype == torch.float64


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32)).eval()
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, num_key_value_heads=2)
    llama = transformers.LlamaForCausalLM(config).eval()
    for plain, count in ((bert, 3), (llama, 2)):
        fused = fuse(plain)
        assert len(fused.stacks) == count, fused.explain()
        given = {"input_ids": IDS, "attention_mask": torch.ones(2, 5)}
        with torch.no_grad():
            torch.testing.assert_close(fused(**given)[0], plain(**given)[0])
            torch.testing.assert_close(fused.freeze()(**given)[0], plain(**given)[0])
        assert list(fused.state_dict()) == list(plain.state_dict()) and fused.config is plain.config
    made = [each.generate(IDS + 1, max_new_tokens=4, do_sample=False) for each in (fuse(llama), llama)]
    assert torch.equal(*made)
    albert = transformers.AlbertModel(transformers.AlbertConfig(**sizes, intermediate_size=32, embedding_size=8)).eval()
    for plain in (bert, albert):
        model = fuse(copy.deepcopy(plain), inplace=True)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # that layers run unfused
            torch.testing.assert_close(model(**given)[0], plain(**given)[0])
