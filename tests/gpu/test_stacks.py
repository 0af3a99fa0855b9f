"""Blocks on a GPU: several dense layers in one kernel, forward and backward; others layer by layer."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_rule import DTYPES, EPS, arithmetic
from torch import Tensor, nn

import factorlayer.autograd.layerwise
import factorlayer.stacks.stack
from benches.workloads import Block, select
from factorlayer import FactorMLP, fuse
from factorlayer.autograd.backward import Ops
from factorlayer.autograd.layer_ops import cuda_ops, has_kernel
from factorlayer.autograd.stack_ops import STATES, Stack, fused_stack, runs

ROOT = Path(__file__).parent.parent.parent
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float32", "float64"])


class Sine(nn.Module):
    """With a frequency that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * x)


LEARNED = {"prelu": nn.PReLU, "learned-sine": Sine}


@dataclass(frozen=True)
class Net:
    widths: tuple[int, ...]
    activation: str
    batch: int
    output: str | None = None

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.widths))}-{self.activation}-n{self.batch}"

    def block(self, dtype: str, implementation: str = "fused") -> FactorMLP:
        torch.manual_seed(0)
        mlp = FactorMLP(
            list(self.widths),
            activation=LEARNED.get(self.activation, lambda: self.activation)(),
            output_activation=self.output,
            implementation=implementation,
            device="cuda",
        )
        with torch.no_grad():
            for layer in mlp.layers:
                layer.weight.mul_(2)  # so that states keep their size
        return mlp.to("cuda", DTYPES[dtype])  # a module that was passed in stays where it is


NETS = [
    Net((32, 64, 64, 64, 64, 16), "relu", 5000),
    Net((32, 64, 16), "gelu", 100_000),
    Net((2, *[20] * 8, 1), "tanh", 20_000),
    Net((13, 45, 63, 127, 5), "silu", 777),
    Net((279, 15, 2), "gelu", 3001),
    Net((1, 73, 40, 66, 1), "tanh", 5000),
    Net((128, 127, 127, 128), "relu", 3000),
    Net((128,) * 7, "relu", 30_001),
    Net((64, 128, 128, 1), "sine", 64, "sigmoid"),
    Net((63, 256, 256, 4), "relu", 1000),
    Net((48, 512, 256, 128, 12), "elu", 4096),
    Net((256, 264, 256, 4), "leaky_relu", 20_001),
    Net((196, 384, 196), "gelu", 20_000),
    Net((32, 64, 64, 16), "prelu", 3000),
    Net((13, 64, 64, 5), "learned-sine", 777),
]
BLOCKS = [workload for workload, _ in select("cuda", dtypes=["bfloat16"]) if isinstance(workload, Block)]
each = pytest.mark.parametrize("net", NETS, ids=str)
# All gradients at once, from states that are stored, and layers by themselves
WAYS = [Net((32, 64, 16), "gelu", 70), Net((128, 127, 127), "tanh", 70), Net((32, 64, 64, 16), "prelu", 70)]
JOINED = Net((64, 256, 256), "softplus", 70)  # layers by themselves, which hand gradients back through activations
WAYS += [JOINED]
ways = pytest.mark.parametrize("net", WAYS, ids=str)


@pytest.fixture(autouse=True)
def _no_compiled_graphs_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def results(mlp: nn.Module, x: Tensor, grad_y: Tensor, run: nn.Module | None = None) -> list[Tensor]:
    """Of the block, or of what it was compiled to."""
    x = x.detach().requires_grad_()
    y = (mlp if run is None else run)(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *mlp.parameters()], grad_y)]


def drawn(net: Net, dtype: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x, grad_y = (
        torch.randn(net.batch, n, generator=generator, device="cuda").to(DTYPES[dtype])
        for n in (net.widths[0], net.widths[-1])
    )
    return x, grad_y


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("net", NETS[-3:], ids=str)
def test_layers_that_no_block_can_hold_are_one_kernel(net: Net, dtype: str) -> None:
    """Without gradients"""
    mlp, exact = net.block(dtype), net.block(dtype, "batched").double()
    exact.load_state_dict(mlp.state_dict())
    x, _ = drawn(net, dtype)
    stack = Stack(tuple(layer.chain for layer in mlp._stacks[0][0].layers))
    with arithmetic(dtype), torch.no_grad():
        assert [run[:2] for run in runs(stack, x, False)] == [(0, len(net.widths) - 1)]
        found, plain, right = mlp(x), net.block(dtype, "batched")(x), exact(x.double())
    of_fused, of_plain = (float((y.double() - right).norm() / right.norm()) for y in (found, plain))
    assert of_fused <= 2 * of_plain + 4 * EPS[dtype], (of_fused, of_plain)


@pytest.mark.parametrize(
    "net", [*NETS, Net((1, *[73] * 6, 1), "elu", 17_361), Net((10, 59, 59, 8), "silu", 24_218)], ids=str
)
@dtypes
def test_without_gradients_results_are_as_right_as_torchs(net: Net, dtype: str) -> None:
    """By one kernel or several, of tiles of all kinds: with fewer samples than one has, and with many. A sample that is
    no number stays the only one."""
    mlp, exact = net.block(dtype), net.block(dtype, "batched").double()
    exact.load_state_dict(mlp.state_dict())
    for batch in (1, 63, 1000, net.batch):
        x, _ = drawn(replace(net, batch=batch), dtype)
        with arithmetic(dtype), torch.no_grad():
            found, plain, right = mlp(x), net.block(dtype, "batched")(x), exact(x.double())
            x[batch // 2] = float("nan")
            sick = mlp(x)
        of_fused, of_plain = (float((y.double() - right).norm() / right.norm()) for y in (found, plain))
        rounded = len(net.widths) if dtype == "float64" else 1  # what is right has as many roundings of its own
        assert of_fused <= 2 * of_plain + 4 * rounded * EPS[dtype], (batch, of_fused, of_plain)
        others = torch.arange(batch, device="cuda") != batch // 2
        assert torch.equal(sick[others], found[others]) and bool(torch.isnan(sick[batch // 2]).all())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layers_of_any_dtype_are_one_kernel_as_far_as_their_weights_fit(dtype: str) -> None:
    net = Net((32, 64, 64, 16), "relu", 5000)
    mlp = net.block(dtype)
    x, _ = drawn(net, dtype)
    stack = Stack(tuple(layer.chain for layer in mlp._stacks[0][0].layers))
    assert runs(stack, x, False) == ((0, 3, stack.text),)
    with torch.no_grad():
        mlp(x)
        torch.cuda.synchronize()
        cuda = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
            mlp(x)
            torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if name.startswith("factorlayer")]) == 1


@each
@dtypes
def test_outputs_and_gradients_are_as_right_as_torchs(net: Net, dtype: str) -> None:
    x, grad_y = drawn(net, dtype)
    mlp = net.block(dtype)
    exact = net.block(dtype, "batched").double()
    exact.load_state_dict(mlp.state_dict())
    right = results(exact, x.double(), grad_y.double())
    with arithmetic(dtype):
        found, plain = results(mlp, x, grad_y), results(net.block(dtype, "batched"), x, grad_y)
    assert_as_right(net, dtype, found, plain, right)


def assert_as_right(net: Net, dtype: str, found: list[Tensor], plain: list[Tensor], right: list[Tensor]) -> None:
    """As PyTorch's own, by design; the output first, then gradients."""
    for i, (f, p, r) in enumerate(zip(found, plain, right, strict=True)):
        of_fused, of_plain = (float((t.double() - r).norm() / r.norm()) for t in (f, p))
        sums = net.batch**0.5 if dtype == "float64" else 1.0
        # Where rounding moves a sum of relu's across zero, a gradient loses or gains it all.
        kinks = (len(net.widths) * max(EPS[dtype], 1e-6)) ** 0.5 if "relu" in net.activation and i else 0.0
        assert of_fused <= 2 * of_plain + 4 * sums * EPS[dtype] + kinks, (i, of_fused, of_plain)


@pytest.mark.parametrize("workload", BLOCKS, ids=lambda workload: workload.name)
@dtypes
def test_fuse_takes_every_measured_network_at_its_full_batch(workload: Block, dtype: str) -> None:
    net = Net(workload.widths, workload.activation, workload.batch)
    torch.manual_seed(0)
    model = workload.dense().to_empty(device="cuda").to(DTYPES[dtype])
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    exact = workload.dense().to_empty(device="cuda").double()
    exact.load_state_dict(model.state_dict())
    fused = fuse(model)
    x, grad_y = drawn(net, dtype)
    with arithmetic(dtype):
        found, plain = results(fused, x, grad_y), results(model, x, grad_y)
    assert_as_right(net, dtype, found, plain, results(exact, x.double(), grad_y.double()))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_one_kernel_takes_all_layers() -> None:
    net = NETS[0]
    mlp = net.block("bfloat16")
    x, grad_y = drawn(net, "bfloat16")
    stack = Stack(tuple(layer.chain for layer in mlp._stacks[0][0].layers))
    assert runs(stack, x, True) and has_kernel(f"{stack.text} | backward", x.dtype, 0)
    results(mlp, x, grad_y)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile, torch.no_grad():
        fused_stack(stack.text, x, list(mlp.parameters()), False)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if name.startswith("factorlayer")]) == 1


@each
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_the_same_bits_every_time_and_samples_apart(net: Net, dtype: str) -> None:
    mlp = net.block(dtype)
    x, grad_y = drawn(net, dtype)
    with arithmetic(dtype):
        right = results(mlp, x, grad_y)
        for _ in range(10):
            assert all(map(torch.equal, results(mlp, x, grad_y), right))
        with torch.no_grad():
            healthy = mlp(x)
            x[5] = float("nan")
            sick = mlp(x)
    others = torch.arange(net.batch, device="cuda") != 5
    assert torch.equal(sick[others], healthy[others]) and bool(torch.isnan(sick[5]).all())


@each
def test_graphs(net: Net) -> None:
    mlp = net.block("bfloat16")
    x, grad_y = drawn(net, "bfloat16")
    right = results(mlp, x, grad_y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(mlp, x, grad_y)
    graph.replay()
    assert all(map(torch.equal, found, right))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("net", [net for net in NETS if net.activation in LEARNED], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_one_kernel_reads_what_has_been_learned(net: Net, dtype: str) -> None:
    """Forward, at each replay of a graph; the layers are trained one by one."""
    mlp, exact = net.block(dtype), net.block(dtype, "batched").double()
    x, _ = drawn(net, dtype)
    stack = Stack(tuple(layer.chain for layer in mlp._stacks[0][0].layers))
    with torch.no_grad(), arithmetic(dtype):
        layers = len(net.widths) - 1
        assert runs(stack, x, False) == ((0, layers, stack.text_for(x)),)
        assert all(
            begin == layers - 1 for begin, _, _ in runs(stack, x, True)
        )  # only the last one, which learns nothing
        mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mlp(x)
        for value in (0.5, 1.5):
            next(mlp.activation.parameters()).fill_(value)
            exact.load_state_dict(mlp.state_dict())
            graph.replay()
            right = exact(x.double())
            assert float((y.double() - right).norm() / right.norm()) <= 4 * len(net.widths) * EPS[dtype]


@each
def test_fuse(net: Net) -> None:
    mlp = net.block("float32", "batched")
    parts: list[nn.Module] = []
    for layer in mlp.layers[:-1]:
        parts += [layer, nn.GELU(approximate="tanh")]
    plain = nn.Sequential(*parts, mlp.layers[-1])
    fused = fuse(plain, "fused")
    x, _ = drawn(net, "float32")
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        y, z = fused(x).detach(), plain(x).detach()
    assert y.dtype == torch.bfloat16 and float((y - z).float().norm() / z.float().norm()) < 0.05


def test_a_tensor_elsewhere_is_refused_by_its_layers_name() -> None:
    mlp = NETS[0].block("bfloat16")
    mlp.layers[2].bias = nn.Parameter(mlp.layers[2].bias.detach().cpu())
    x, _ = drawn(NETS[0], "bfloat16")
    with pytest.raises(TypeError, match=r"FactorMLP: layer layers\.2: x and bias should be on one device"):
        mlp(x)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("widths", [(128,) * 7, (128, 127, 127, 128)], ids=str)
def test_layers_that_no_kernel_trains_together_have_one_each_on_the_way_back(widths: tuple[int, ...]) -> None:
    net = next(net for net in NETS if net.widths == widths)
    mlp = net.block("bfloat16")
    x, grad_y = drawn(net, "bfloat16")
    stack = Stack(tuple(layer.chain for layer in mlp._stacks[0][0].layers))
    assert runs(stack, x, True) == ((0, len(widths) - 1, stack.text + STATES),)
    results(mlp, x, grad_y)
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        results(mlp, x, grad_y)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if name.startswith("factorlayer")]) == 1 + 2 * (len(widths) - 1)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_products_go_back_through_the_activation_before(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers of 256, and none is made again"""
    net = Net((256,) * 5, "elu", 5000)
    mlp = net.block(dtype)
    x, grad_y = drawn(net, dtype)
    ran: list[str] = []

    def noted(device: int, dtype: torch.dtype) -> Ops:
        ops = cuda_ops(device, dtype)

        def slopes(*given: Any) -> Tensor:
            ran.append(given[-1])
            return ops.slopes(*given)

        return replace(ops, slopes=slopes)

    monkeypatch.setattr(factorlayer.autograd.layerwise, "cuda_ops", noted)
    with arithmetic(dtype):
        (stack,) = mlp.stacks
        assert runs(Stack(tuple(layer.chain for layer in stack.layers)), x, True, True) == (
            (0, 4, stack.text_for(x) + STATES),
        )
        results(mlp, x, grad_y)
    tf32 = "; tf32" if dtype == "tf32" else ""
    assert ran == ["tied 0 1 256 256 1; elu; through 256" + tf32] * 3


# In PyTorch's world


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@ways
def test_opcheck(net: Net) -> None:
    mlp = net.block("bfloat16")
    x, grad_y = drawn(net, "bfloat16")
    (stack,) = mlp.stacks
    tensors, text = [t.detach() for t in stack._tensors()], stack.text_for(x)
    torch.library.opcheck(torch.ops.factorlayer.stack_forward, (x, tensors, text))
    if net is JOINED:
        states = [torch.nn.functional.softplus(torch.nn.functional.linear(x, *tensors[:2]))]
        for wanted in ([0], [1]):  # a bias may lie behind its weight, in one allocation
            torch.library.opcheck(torch.ops.factorlayer.layers_backward, (grad_y, x, states, tensors, text, wanted))
        return
    if net.activation in LEARNED:
        return
    torch.library.opcheck(torch.ops.factorlayer.stack_states, (x, tensors, text))
    if has_kernel(f"{text} | backward", x.dtype, 0):
        for wanted in ([0], [1]):  # several lie in one allocation, which opcheck does not allow
            torch.library.opcheck(torch.ops.factorlayer.stack_backward, (grad_y, x, tensors, text, wanted))


@ways
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(net: Net, dtype: str, dynamic: bool) -> None:
    mlp = net.block(dtype)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (5, 64, 65, 2100) if dynamic else (5, 65):
        x, grad_y = drawn(replace(net, batch=batch), dtype)
        with torch.no_grad():  # a graph takes layers as many samples have them, which may be by other kernels
            both = [(compiled(x), mlp(x))]
        both += zip(results(mlp, x, grad_y, compiled), results(mlp, x, grad_y), strict=True)
        for found, right in both:
            assert float((found.double() - right.double()).norm() / right.double().norm()) <= 8 * EPS[dtype]


@dtypes
def test_past_the_dispatcher_the_same_is_made(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one plan takes all layers: from the second call on, of samples that round up to the same power of two."""
    net = Net((24, 64, 40, 16), "relu", 50)  # which nothing else here has
    mlp, (x, _) = net.block(dtype, "auto"), drawn(net, dtype)
    made: list[Tensor | None] = []
    real = factorlayer.stacks.stack.stack_at_once
    monkeypatch.setattr(factorlayer.stacks.stack, "stack_at_once", lambda *given: made.append(real(*given)) or made[-1])
    with arithmetic(dtype):
        with torch.no_grad():
            y = [mlp(x), mlp(x), mlp(x[:33]), mlp(x[:32])]
        mlp(x)  # which is recorded: it is not asked
    assert [each is not None for each in made] == [False, True, True, False]
    assert torch.equal(y[0], y[1]) and torch.equal(y[0][:33], y[2])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_auto_joins_layers_as_well() -> None:
    net = Net((48, 512, 256, 128, 12), "elu", 3000)
    x, grad_y = drawn(net, "bfloat16")
    found, mlp = results(net.block("bfloat16"), x, grad_y), net.block("bfloat16", "auto")
    assert all(map(torch.equal, results(mlp, x, grad_y), found))
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, results(mlp, x, grad_y, compiled), found))


@ways
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export(net: Net, dynamic: bool) -> None:
    """Also at batches of classes that nobody planned."""
    mlp = net.block("bfloat16")
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(mlp, (drawn(net, "bfloat16")[0],), dynamic_shapes=shapes), buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for batch in (7, 300, 2100) if dynamic else (net.batch,):
            x, _ = drawn(replace(net, batch=batch), "bfloat16")
            assert torch.equal(loaded(x), mlp(x))


@ways
def test_gradcheck_and_gradgradcheck(net: Net) -> None:
    """In double, whose layers are kernels of their own."""
    mlp = replace(net, widths=(3, 5, 5, 2), batch=3).block("float64")
    names = [name for name, _ in mlp.named_parameters()]
    x, _ = drawn(replace(net, widths=(3, 2), batch=3), "float64")

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(mlp, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [t.detach().requires_grad_() for t in (x, *mlp.parameters())]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@ways
def test_second_derivatives(net: Net) -> None:
    """Of layers that one kernel trains, too."""
    found = []
    for implementation, dtype in (("fused", "bfloat16"), ("batched", "bfloat16"), ("batched", "float64")):
        mlp = net.block("bfloat16", implementation).to(DTYPES[dtype])
        x, grad_y = (t.to(DTYPES[dtype]) for t in drawn(net, "bfloat16"))
        leaves = [x.requires_grad_(), *mlp.parameters()]
        first = torch.autograd.grad(mlp(x), leaves, grad_y, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves[:-1]))  # not the last bias
    for fused, plain, right in zip(*found, strict=True):
        of_fused, of_plain = (float((t.double() - right).norm() / right.norm()) for t in (fused, plain))
        assert of_fused <= 2 * of_plain + 4 * EPS["bfloat16"], (of_fused, of_plain)


# Frozen


def kernels(run: nn.Module, x: Tensor) -> list[str]:
    """Of one call, without gradients."""
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad():
        run(x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
            run(x)
            torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@each
@dtypes
@pytest.mark.parametrize("batch", [1, 100, 3000])  # of each class
def test_frozen_layers_make_the_same(net: Net, dtype: str, batch: int) -> None:
    mlp, exact = net.block(dtype), net.block(dtype, "batched").double()
    exact.load_state_dict(mlp.state_dict())
    x, _ = drawn(replace(net, batch=batch), dtype)
    with arithmetic(dtype), torch.no_grad():
        plain, right = mlp(x), exact(x.double())
        mlp.freeze()
        for parameter in mlp.parameters():
            parameter.zero_()
        found = mlp(x)
        assert torch.equal(mlp(x), found)
        assert mlp(x[:0]).shape == (0, net.widths[-1])
    of_found, of_plain = (float((y.double() - right).norm() / right.norm()) for y in (found, plain))
    assert of_found <= 1.1 * of_plain + EPS[dtype], (of_found, of_plain)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("net", NETS[:-2], ids=str)
def test_frozen_layers_are_one_kernel(net: Net, dtype: str) -> None:
    x, _ = drawn(net, dtype)
    with arithmetic(dtype):
        (only,) = kernels(net.block(dtype).freeze(), x)
    assert only.startswith("factorlayer")


@each
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_graphs_of_frozen_layers(net: Net, dtype: str) -> None:
    mlp = net.block(dtype)
    x, _ = drawn(net, dtype)
    with arithmetic(dtype), torch.no_grad():
        mlp.freeze()
        right = mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = mlp(x)
        for parameter in mlp.parameters():
            parameter.zero_()
        found.zero_()
        graph.replay()
        assert torch.equal(found, right)


def test_what_is_frozen_runs_on_any_stream() -> None:
    mlp = NETS[-4].block("tf32")
    x, _ = drawn(NETS[-4], "tf32")
    with arithmetic("tf32"), torch.no_grad():
        mlp.freeze()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = mlp(x)
        stream.synchronize()
        assert torch.equal(found, mlp(x))


CAPTURED = """
    import torch
    from factorlayer import FactorMLP
    mlp = FactorMLP([48, 64, 12], implementation="fused", device="cuda", dtype=torch.bfloat16).freeze().half()
    x = torch.randn(70, 48, device="cuda", dtype=torch.float16)
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            mlp(x)
    except RuntimeError as error:
        assert "not packed for torch.float16 on cuda:0, and a capture cannot do it" in str(error), error
        print("refused")
"""


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_nothing_is_packed_in_a_capture() -> None:
    """In a process of its own: a capture that failed leaves PyTorch's stream as it was."""
    command = [sys.executable, "-c", textwrap.dedent(CAPTURED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr


def test_frozen_layers_follow_the_tf32_switch() -> None:
    net = NETS[0]
    mlp, exact = net.block("float32"), net.block("float32", "batched").double()
    exact.load_state_dict(mlp.state_dict())
    x, _ = drawn(net, "float32")
    mlp.freeze()
    errors = []
    for dtype in ("float32", "tf32"):
        with arithmetic(dtype), torch.no_grad():
            right = exact(x.double())
            errors.append(float((mlp(x).double() - right).norm() / right.norm()))
    assert errors[0] < 1e-5 < errors[1] < 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_frozen_layers_compile_and_move(dtype: str) -> None:
    net = NETS[-4]
    mlp = net.block(dtype)
    x, _ = drawn(net, dtype)
    with arithmetic(dtype), torch.no_grad():
        right = mlp.freeze()(x)
        torch.testing.assert_close(torch.compile(mlp, fullgraph=True)(x), right)
        torch.testing.assert_close(mlp.cpu().cuda()(x), right)
        there = mlp.cpu()(x.cpu()).cuda()
    assert float((there - right).float().norm() / right.float().norm()) < 100 * EPS[dtype]
