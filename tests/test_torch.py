"""The layer in PyTorch's world: autograd, compile, export, torch.func, autocast, FLOP counter, shapes."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from test_expression import Snake
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError, InductorError
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode
from versions import BEFORE_2_12

from factorlayer import FactorLinear, FactorMLP, factor_linear, fuse

# What Dynamo and functorch say of themselves when they meet any autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]

LAYERS = {
    "kronecker": dict(in_features=35, out_features=24, factors=((5, 7), (4, 6)), activation="gelu"),
    "rank 2": dict(in_features=12, out_features=12, factors=((3, 2, 2), (2, 3, 2)), rank=2, activation="tanh"),
    "monarch": dict(in_features=12, out_features=18, structure="monarch", blocks=(3, 2), rank=2, bias=False),
    "learnable": dict(in_features=6, out_features=12, factors=((2, 3), (4, 3)), activation=Snake()),
}
IMPLEMENTATIONS = ["naive", "batched", "fused"]


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> FactorLinear:
    torch.manual_seed(0)
    return FactorLinear(**copy.deepcopy(LAYERS[request.param]), implementation="fused", dtype=torch.float64)


def sample(layer: FactorLinear, *leading: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, layer.in_features, dtype=layer.weight_0.dtype, generator=generator)


def with_implementation(layer: FactorLinear, implementation: str) -> FactorLinear:
    layer.implementation = implementation
    return layer


def call(layer: FactorLinear, x: Tensor, *parameters: Tensor) -> Tensor:
    names = [name for name, _ in layer.named_parameters()]
    return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return list(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# Autograd


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.feature("first and second derivatives", result="works")
def test_gradcheck_and_gradgradcheck(layer: FactorLinear, implementation: str) -> None:
    names = [name for name, _ in layer.named_parameters()]
    tensors = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    chosen = with_implementation(layer, implementation)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(chosen, dict(zip(names, parameters, strict=True)), (x,))

    x = sample(layer, 3).requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *tensors))
    assert torch.autograd.gradgradcheck(function, (x, *tensors))


@pytest.mark.feature("third derivatives", result="works")
def test_third_derivative_matches_naive(layer: FactorLinear) -> None:
    def third(implementation: str) -> Tensor:
        chosen = with_implementation(layer, implementation)
        x = sample(layer, 4).requires_grad_()
        (first,) = torch.autograd.grad(chosen(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), chosen.weight_0, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    assert_same(third("fused"), third("naive"))


@pytest.mark.feature("parameters that need no gradient", result="works")
def test_only_wanted_gradients_are_computed(layer: FactorLinear) -> None:
    x = sample(layer, 5)
    layer.weight_0.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert layer.weight_0.grad is None
    assert layer.weight_1.grad is not None
    forward = layer.flops(5)
    assert forward < counter.get_total_flops() < 3 * forward


def test_nothing_is_saved_that_needs_no_gradient(layer: FactorLinear) -> None:
    with torch.no_grad():
        assert layer(sample(layer, 2)).grad_fn is None
    assert layer.requires_grad_(False)(sample(layer, 2)).grad_fn is None


@pytest.mark.feature("gradients that accumulate", result="works")
def test_gradients_accumulate(layer: FactorLinear) -> None:
    x = sample(layer, 6)
    layer(x).sum().backward()
    once = [p.grad.clone() for p in layer.parameters()]
    layer(x).sum().backward()
    assert_same([p.grad for p in layer.parameters()], [2 * g for g in once])


def test_backward_of_an_expanded_gradient(layer: FactorLinear) -> None:
    x = sample(layer, 6).requires_grad_()
    (found,) = torch.autograd.grad(layer(x).sum(), x)  # grad_y is one number, expanded
    (expected,) = torch.autograd.grad(with_implementation(layer, "naive")(x).sum(), x)
    assert_same(found, expected)


# Shapes of x


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (0,), (2, 0, 3), (2, 1, 2, 2)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_leading_dimensions(layer: FactorLinear, implementation: str, leading: tuple[int, ...]) -> None:
    x = sample(layer, *leading).requires_grad_()
    y = with_implementation(layer, implementation)(x)
    assert y.shape == (*leading, layer.out_features)
    y.sum().backward()
    assert x.grad.shape == x.shape
    rows = x.detach().reshape(-1, layer.in_features)
    assert_same(y.detach().reshape(-1, layer.out_features), with_implementation(layer, "naive")(rows).detach())


@pytest.mark.parametrize("make", [
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
    lambda x: x[:1].expand(7, -1),
    lambda x: x.flip(0)[::2],
    lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view_as(x),
], ids=["transposed", "sliced", "broadcast", "strided", "misaligned"])  # fmt: skip
@pytest.mark.feature("any strides of x", result="works")
def test_any_strides(layer: FactorLinear, make) -> None:
    x = make(sample(layer, 7)).detach().requires_grad_()
    found = gradients(layer, x)
    y = layer(x)
    expected = gradients(with_implementation(layer, "naive"), x)
    assert_same(y, layer(x))
    assert_same(found, expected)


def test_non_contiguous_weights() -> None:
    w0, w1 = torch.randn(5, 4).t(), torch.randn(6, 8)[:, ::2]
    x = torch.randn(3, 20)
    found = factor_linear(x, [w0, w1], implementation="fused")
    torch.testing.assert_close(found, x @ torch.kron(w0.contiguous(), w1.contiguous()).t())


# torch.compile and torch.export


# Each layer by each implementation, with one of the two kinds of batch, which meets each of both
WHOLE = [
    pytest.param(name, implementation, dynamic := bool((i + j) % 2), id=f"{name}-{implementation}-{dynamic}")
    for i, name in enumerate(LAYERS)
    for j, implementation in enumerate(["auto", *IMPLEMENTATIONS])
]


@pytest.mark.parametrize(("layer", "implementation", "dynamic"), WHOLE, indirect=["layer"])
@pytest.mark.feature("torch.compile as a whole graph, static and dynamic batch", result="works")
def test_compile_fullgraph(layer: FactorLinear, implementation: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    eager = with_implementation(layer, implementation)
    compiled = torch.compile(eager, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (4, 9, 17) if dynamic else (4, 9):  # the second one of which is compiled anew
        x = sample(layer, batch).requires_grad_()
        assert_same(gradients(compiled, x), gradients(eager, x))
        with torch.no_grad():
            assert_same(compiled(x), eager(x))


def test_compile_of_the_functional_form(layer: FactorLinear) -> None:
    if BEFORE_2_12 and isinstance(layer.activation, nn.Module):
        pytest.skip("PyTorch before 2.12: Dynamo takes no module for a constant, which factor_linear's activation is")
    torch._dynamo.reset()
    structure = layer.spec.structure

    def function(x: Tensor, weights: list[Tensor]) -> Tensor:
        return factor_linear(x, weights, None, layer.activation, structure, implementation="fused")

    x = sample(layer, 4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, layer.weights), function(x, layer.weights))


@pytest.mark.long
@pytest.mark.feature("torch.compile by Inductor, trained", result="works")
def test_compile_with_inductor_trains_as_eager() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(8, 16, requires_grad=True)
    try:
        torch.compile(nn.GELU(), fullgraph=True)(x.detach())
    except (
        BackendCompilerFailed,
        CppCompileError,
        InductorError,
    ) as error:  # without a C++ compiler, or with PyTorch's vectors switched off
        pytest.skip(f"Inductor compiles no model of PyTorch's own here: {str(error).splitlines()[0]}")
    model = nn.Sequential(FactorLinear(16, 36, activation="gelu", implementation="fused"), nn.Linear(36, 4))
    expected = gradients(model, x)
    torch.testing.assert_close(gradients(torch.compile(model, fullgraph=True), x), expected)


@pytest.mark.feature("torch.compile of torch.func.grad", result="falls back")
def test_compile_of_torch_func(layer: FactorLinear) -> None:
    torch._dynamo.reset()

    def slope(x: Tensor) -> Tensor:
        return grad(lambda z: layer(z).square().sum())(x)

    x = sample(layer, 4)
    expected = slope(x)
    assert expected.norm() > 0
    with pytest.raises(Exception, match=r"torch\.compile cannot trace its autograd rule under torch\.func"):
        torch.compile(slope, fullgraph=True, backend="aot_eager")(x)
    with_implementation(layer, "auto")
    assert_same(torch.compile(slope, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The given buffer is not writable")
@pytest.mark.feature("torch.export, static and dynamic batch, saved and loaded", result="works")
def test_export(layer: FactorLinear, dynamic: bool) -> None:
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    exported = torch.export.export(layer, (sample(layer, 4),), dynamic_shapes=shapes)
    ops = [node.target for node in exported.graph.nodes]
    assert ops.count(torch.ops.factorlayer.forward.default) == 1
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    x = sample(layer, 11 if dynamic else 4, seed=2)
    assert_same(loaded(x), layer(x))


# torch.func


TRANSFORMS = {
    "grad": lambda f, p, x: grad(lambda p: f(p, x).square().sum())(p),
    "per-sample gradients": lambda f, p, x: vmap(grad(lambda p, x: f(p, x).square().sum()), (None, 0))(p, x),
    "vmap": lambda f, p, x: vmap(lambda x: f(p, x))(x),
    "vmap over dimension 1": lambda f, p, x: vmap(lambda x: f(p, x), 1)(x.unsqueeze(0)),
    "ensemble": lambda f, p, x: vmap(lambda p: f(p, x))({k: torch.stack([v, 2 * v]) for k, v in p.items()}),
    "gradients of an ensemble": lambda f, p, x: vmap(grad(lambda p: f(p, x).square().sum()))(
        {k: torch.stack([v, 2 * v]) for k, v in p.items()}
    ),
    "jacrev": lambda f, p, x: jacrev(lambda x: f(p, x))(x[:2]),
    "second derivative": lambda f, p, x: jacrev(jacrev(lambda x: f(p, x).square().sum()))(x[0]),
    "gradient of a gradient": lambda f, p, x: grad(lambda p: grad(lambda x: f(p, x).square().sum())(x).square().sum())(
        p
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("implementation", ["auto", "batched", "fused"])
@pytest.mark.feature("torch.func: grad, vmap, jacrev, ensembles, per-sample gradients", result="works")
def test_torch_func(layer: FactorLinear, implementation: str, transform: str) -> None:
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def apply(implementation: str) -> object:
        chosen = with_implementation(layer, implementation)
        return TRANSFORMS[transform](lambda p, x: functional_call(chosen, p, (x,)), parameters, sample(layer, 5))

    assert_same(apply(implementation), apply("naive"))


FORWARD_MODE = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: hessian(lambda x: f(x).square().sum())(x[0]),
}


@pytest.mark.parametrize("transform", FORWARD_MODE)
@pytest.mark.feature("torch.func.jvp and hessian", result="falls back")
def test_forward_mode(layer: FactorLinear, transform: str) -> None:
    x = sample(layer, 3)
    expected = FORWARD_MODE[transform](with_implementation(layer, "naive"), x)
    assert_same(FORWARD_MODE[transform](with_implementation(layer, "auto"), x), expected)
    with pytest.raises(RuntimeError, match="implementation='fused' cannot run: it has no forward-mode derivative"):
        FORWARD_MODE[transform](with_implementation(layer, "fused"), x)


@pytest.mark.feature("forward-mode derivatives by dual tensors", result="falls back")
def test_forward_mode_with_dual_tensors(layer: FactorLinear) -> None:
    x = sample(layer, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found = torch.autograd.forward_ad.unpack_dual(with_implementation(layer, "auto")(dual)).tangent
    assert_same(found, jvp(with_implementation(layer, "naive"), (x,), (torch.ones_like(x),))[1])


# Autocast, dtypes, FLOPs, devices


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
@pytest.mark.feature("autocast", result="works")
def test_autocast_as_nn_linear(implementation: str) -> None:
    layer, linear = FactorLinear(16, 36, implementation=implementation), nn.Linear(16, 36)
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, reference = layer(x), linear(x)
    assert y.dtype == reference.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight_0.grad.dtype == layer.bias.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.double()(x.double()).dtype == linear.double()(x.double()).dtype == torch.float64


@pytest.mark.feature("autocast inside torch.compile", result="works")
def test_autocast_with_compile() -> None:
    torch._dynamo.reset()
    layer = FactorLinear(16, 36, implementation="fused")
    x = torch.randn(4, 16)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == torch.bfloat16
    assert torch.equal(compiled, function(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.feature("float64, float32, bfloat16, float16", result="works")
def test_layer_moves_between_dtypes(dtype: torch.dtype) -> None:
    layer = FactorLinear(16, 36, implementation="fused").to(dtype)
    assert layer(torch.randn(4, 16, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("implementation", ["batched", "fused"])
@pytest.mark.feature("torch.utils.flop_counter", result="works")
def test_flop_counter(layer: FactorLinear, implementation: str) -> None:
    x = sample(layer, 9).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        with_implementation(layer, implementation)(x).sum().backward()
    assert counter.get_total_flops() == 3 * layer.flops(9)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
@pytest.mark.feature("the meta device", result="works")
def test_meta_device(implementation: str) -> None:
    layer = FactorLinear(16, 36, activation="relu", implementation=implementation, device="meta")
    x = torch.empty(4, 16, device="meta", requires_grad=True)
    y = layer(x)
    assert y.shape == (4, 36)
    assert y.device.type == "meta"
    y.sum().backward()
    assert layer.weight_0.grad.shape == layer.weight_0.shape


@pytest.mark.feature("optimizers of torch.optim", result="works")
def test_optimizer_trains_the_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    target = FactorLinear(16, 36)(x).detach()
    layer = FactorLinear(16, 36, implementation="fused")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


def replica_of(module: nn.Module) -> nn.Module:
    """As nn.DataParallel makes one for each GPU: parameters are attributes there, and no leaves."""
    parts = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, replica in parts.items():
        for name, child in part._modules.items():
            setattr(replica, name, parts[child])
        for name, parameter in part._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.clone())
    return parts[module]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FactorLinear(6, 12, activation=Snake()),
        lambda: FactorMLP([6, (2, 4), (4, 2), 3], activation=Snake(), output_activation="tanh"),
        lambda: FactorMLP([6, 8, 6], activation=Snake(), gated=True, residual=True),
    ],
    ids=["layer", "block", "gated"],
)
def test_replicas_run_parameters_of_their_own(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = make().double(), torch.randn(4, 6, dtype=torch.float64)
    right = module(x)
    expected = torch.autograd.grad(right.square().sum(), list(module.parameters()))
    replica = replica_of(module)
    y = replica(x)
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), list(module.parameters())), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(replica(x), right)


def test_what_fuse_made_is_not_replicated() -> None:
    fused = fuse(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(RuntimeError, match="DataParallel cannot replicate what fuse made; use DistributedDataParallel"):
        replica_of(nn.Sequential(fused))
