"""FactorGRU in PyTorch's world: compiled, exported, mapped, under autocast, and in state_dicts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from oracle import nearly
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.utils.flop_counter import FlopCounterMode

from factorlayer import FactorGRU, FactorGRUCell, fuse
from factorlayer.maths.recurrence import GateStructure

# What Dynamo and functorch say of themselves when they meet any autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]

KINDS = {
    "dense": dict(),
    "kronecker": dict(structure="kronecker", factors=(2, 3), input_factors=(2, 2), bidirectional=True),
    "special": dict(reset="before", norm="layer", activation=nn.PReLU(), learned_initial=True, num_layers=2),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def gru(kind: str, **more: object) -> FactorGRU:
    torch.manual_seed(0)
    return FactorGRU(4, 6, **copy.deepcopy({**KINDS[kind], **more}))


def with_gradients(module: nn.Module, run: object, *given: Tensor) -> list[Tensor]:
    y, h = run(*given)
    loss = y.square().sum() + h.sum()
    return [y, h, *torch.autograd.grad(loss, [*module.parameters()], materialize_grads=True)]


def assert_same(found: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(found, right, strict=True):
        assert nearly(a.detach(), b.detach())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "dynamic"), [("dense", True), ("kronecker", False)])
@pytest.mark.feature("FactorGRU: torch.compile as a whole graph", result="works")
def test_compiles_as_a_whole(kind: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    module = gru(kind)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (3, 5):
        x = torch.randn(2, batch, 4)
        assert_same(with_gradients(module, compiled, x), with_gradients(module, module, x))


@pytest.mark.parametrize("kind", ["dense", "kronecker"])
def test_a_graph_is_trained_with_any_number_of_sequences(kind: str) -> None:
    """Numbers that the way back looks at are no constants of it: each would be compiled for."""
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gru(kind), fullgraph=True, backend=counted)
    for batch in (3, 6, 7, 9, 70):
        y, _ = compiled(torch.randn(5, batch, 4))
        y.sum().backward()
    assert counted.frame_count == 2  # for the first, and for any


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_a_cell_is_exported_for_any_batch(structure: GateStructure) -> None:
    cell = FactorGRUCell(4, 6, structure=structure)
    shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(cell, (torch.randn(3, 4),), dynamic_shapes=shapes).module()
    for x in (torch.randn(2, 4), torch.randn(70, 4)):
        assert nearly(exported(x).detach(), cell(x).detach())


@pytest.mark.parametrize("kind", ["dense", "kronecker"])
def test_a_graph_takes_the_longest_length_that_it_computes(kind: str) -> None:
    """Also where there is none, which a compiler cannot tell of a number that it has not seen."""
    torch._dynamo.reset()
    module = gru(kind)

    def call(x: torch.Tensor, bounds: torch.Tensor) -> list[torch.Tensor]:
        return list(module(x, cu_seqlens=bounds, max_seqlen=bounds.diff().max().item()))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for lengths in ([3, 0, 4], [1, 5, 1], [2, 2, 2]):
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            x = torch.randn(int(bounds[-1]), 4)
            assert_same(compiled(x, bounds), call(x, bounds))
        nothing = torch.zeros(4, dtype=torch.int64)
        assert_same(compiled(torch.randn(0, 4), nothing), call(torch.randn(0, 4), nothing))


@pytest.mark.parametrize("kind", ["kronecker"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The given buffer is not writable")
@pytest.mark.feature("FactorGRU: torch.export", result="works")
def test_export(kind: str) -> None:
    module = gru(kind).eval()
    shapes = {"input": {1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(module, (torch.randn(2, 2, 4),), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    x = torch.randn(2, 7, 4)
    assert_same(list(torch.export.load(buffer).module()(x)), list(module(x)))


@pytest.mark.parametrize("kind", ["dense", "kronecker"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.feature("FactorGRU: torch.jit.trace", result="falls back")
def test_trace(kind: str) -> None:
    """PyTorch's own op takes other sizes than the example's, steps that are unrolled no other number."""
    module, x = gru(kind), torch.randn(3, 2, 4)
    with torch.no_grad():
        traced = torch.jit.trace(module, (x,))
        for given in (x, torch.randn(5, 3, 4)) if kind == "dense" else (x,):
            assert_same(list(traced(given)), list(module(given)))
    module.implementation = "fused"
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cannot run: torch\.jit\.trace takes numbers of sequ"):
        torch.jit.trace(module, (x,))


@each_kind
@pytest.mark.feature("FactorGRU: autocast", result="works")
def test_autocast(kind: str) -> None:
    """All is computed in its dtype, as if parameters and input had it."""
    module, x = gru(kind), torch.randn(3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, h = module(x)
    lower = copy.deepcopy(module).bfloat16()
    right = lower(x.bfloat16())
    assert y.dtype == h.dtype == torch.bfloat16
    assert_same([y, h], list(right))
    y.sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())


@each_kind
@pytest.mark.feature("FactorGRU: torch.func: grad, vmap over samples and models, jvp", result="works")
def test_torch_func(kind: str) -> None:
    module, x = gru(kind), torch.randn(5, 3, 2, 4)
    models = [gru(kind), copy.deepcopy(module)]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.mul_(2)
    parameters, buffers = stack_module_state(models)
    mapped = vmap(lambda p, b: functional_call(module, (p, b), (x[0],))[0])(parameters, buffers)
    assert_same(list(mapped), [model(x[0])[0] for model in models])
    assert_same(list(vmap(lambda x: module(x)[0])(x)), [module(each)[0] for each in x])
    by_loop = x[0].clone().requires_grad_()
    module(by_loop)[0].square().sum().backward()
    assert_same([grad(lambda x: module(x)[0].square().sum())(x[0])], [by_loop.grad])
    small = 1e-6
    doubled = copy.deepcopy(module).double()
    forward = jvp(lambda x: doubled(x)[0], (x[0].double(),), (x[1].double(),))[1]
    step = small * x[1].double()
    slope = (doubled(x[0].double() + step)[0] - doubled(x[0].double() - step)[0]) / (2 * small)
    torch.testing.assert_close(forward, slope.detach(), rtol=1e-5, atol=1e-6)


@each_kind
@pytest.mark.feature("FactorGRU: torch.utils.flop_counter", result="works")
def test_flop_counter(kind: str) -> None:
    module, x = gru(kind), torch.randn(3, 2, 4)
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() == module.flops(2, 3)


@each_kind
@pytest.mark.feature("FactorGRU: the meta device", result="works")
def test_meta_device(kind: str) -> None:
    module = FactorGRU(4, 6, device="meta", **copy.deepcopy(KINDS[kind]))
    y, h = module(torch.randn(3, 2, 4, device="meta"))
    assert y.is_meta and y.shape == (3, 2, 6 * (1 + module.bidirectional)) and h.shape == (len(module.cells), 2, 6)
    torch.manual_seed(0)
    made = module.to_empty(device="cpu")
    made.reset_parameters()
    right = gru(kind)
    assert_same(*([getattr(each, name) for name in each.cells[0].shapes] for each in (made, right)))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    """As near to float64 as the dtype's roundings of a few steps allow."""
    module, x = gru(kind), torch.randn(3, 2, 4)
    right = copy.deepcopy(module).double()(x.double())
    for implementation in ("naive", "batched", "auto"):
        module.implementation = implementation
        found = module.to(dtype)(x.to(dtype))
        for a, b in zip(found, right, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= 16 * torch.finfo(dtype).eps * b.norm()


def test_a_state_dict_says_what_it_is_of() -> None:
    """What shapes do not tell: the order of the reset gate, the activation, the norm."""
    saved = FactorGRU(4, 6, reset="before").state_dict()
    with pytest.raises(RuntimeError, match=r"reset='before'.*this is of.*reset='after'.*strict=False loads"):
        FactorGRU(4, 6).load_state_dict(saved)
    FactorGRU(4, 6).load_state_dict(saved, strict=False)
    FactorGRU(4, 6, reset="before").load_state_dict(saved)
    structured = FactorGRU(4, 6, structure="blocks", blocks=2).state_dict()
    with pytest.raises(RuntimeError, match=r"structure='blocks'.*this is of structure='kronecker'"):
        FactorGRU(4, 6, structure="kronecker").load_state_dict(structured)


def test_every_parameter_has_a_gradient() -> None:
    """DistributedDataParallel waits for all of them."""
    for kind in KINDS:
        module = gru(kind)
        y, _ = module(torch.randn(3, 2, 4))
        y.sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_implementation_is_one_of_ours() -> None:
    cell = FactorGRUCell(4, 6, implementation="v2")
    assert cell.implementation == "batched"
    with pytest.raises(ValueError, match=r"FactorGRUCell: implementation should be one of auto"):
        cell.implementation = "quick"


class Between(nn.Module):
    """A recurrent layer between two stacks."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.recurrent = recurrent
        self.behind = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.recurrent(self.before(x))[0])


@each_kind
@pytest.mark.feature("fuse: models with a FactorGRU", result="works")
def test_fuse_leaves_it_as_it_was(kind: str) -> None:
    model, x = Between(gru(kind)), torch.randn(3, 2, 4)
    right, fused = model(x), fuse(model)
    assert nearly(fused(x).detach(), right.detach())
    assert fused.explain().count("a stack:") == 2 and "\n  recurrent: as it was\n" in fused.explain()


def test_activation_stays_what_it_was_built_with() -> None:
    with pytest.raises(AttributeError, match="FactorGRU: activation is traced when the layer is built; build another"):
        gru("dense").activation = "relu"


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@each_kind
def test_parametrized(kind: str) -> None:
    module, x = gru(kind), torch.randn(3, 2, 4)
    names = [name for name in module.cells[0].shapes if name.startswith("weight")]
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for name in names:
            getattr(doubled, name).mul_(2)
    for name in names:
        nn.utils.parametrize.register_parametrization(module, name, Doubled())
    assert_same(list(module(x)), list(doubled(x)))
