"""x as several tensors side by side: what torch.cat and a layer make, without the tensor that cat would make."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from oracle import DTYPES, PRELU, Case, draw_inputs, dtype_id, kronecker, monarch, relative_errors, with_layout
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from factorlayer import FactorGRU, FactorGRUCell, FactorLinear, FactorMLP, factor_linear
from factorlayer.autograd import input_ops, layer_ops
from factorlayer.autograd.runtime import dtype_name
from factorlayer.device.gpu import Gpu
from factorlayer.functional import run
from factorlayer.kernels.batches import class_of
from factorlayer.maths.chain import Chain
from factorlayer.plan import planner

SPECS = [
    kronecker((4, 6, 5), (3, 7, 4)),
    kronecker((12, 10), (10, 12), rank=3),
    monarch((12, 10), (6, 20)),
    kronecker((120,), (40,)),  # one product
    kronecker((60, 2), (2, 60)),
]
WIDTHS = [(120,), (64, 56), (1, 117, 2), (40, 0, 80), (7, 33, 16, 64)]


def split(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [part.detach().clone().requires_grad_() for part in x.split(list(widths), dim=-1)]


def results(
    case: Case, implementation: str, given: object, inputs: list[Tensor], tensors: dict[str, Tensor], grad_y: Tensor
) -> dict[str, Tensor]:
    """y and all gradients, that of x as one."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    weights = [leaf for name, leaf in leaves.items() if name != "bias"]
    y = run(case.spec, case.chain, given, weights, leaves.get("bias"), implementation, "test")
    grads = torch.autograd.grad(y, [*inputs, *leaves.values()], grad_y)
    of_x = torch.cat(grads[: len(inputs)], dim=-1)
    return {"y": y.detach(), "x": of_x} | dict(zip(leaves, grads[len(inputs) :], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("number", range(len(SPECS)))
def test_errors_are_those_of_one_tensor(number: int, dtype: torch.dtype) -> None:
    """By every implementation, for all widths, in any strides."""
    spec = SPECS[number]
    for i, (widths, implementation) in enumerate(itertools.product(WIDTHS, ("naive", "batched", "fused", "auto"))):
        case = Case(spec, 5 + 8 * (i % 3), bias=i % 2 > 0, activation=("identity", "gelu", "tanh", PRELU)[i % 4])
        drawn = draw_inputs(case, dtype, i)
        tensors = {f"weight_{j}": w for j, w in enumerate(drawn.weights)}
        tensors |= {} if drawn.bias is None else {"bias": drawn.bias}
        parts = split(drawn.x, widths)
        given = [with_layout(part, "strided") if i % 5 else part for part in parts]
        found = results(case, implementation, given, parts, tensors, drawn.grad_y)
        whole = drawn.x.clone().requires_grad_()
        one = results(case, implementation, whole, [whole], tensors, drawn.grad_y)
        exact, doubles = drawn.x.double().requires_grad_(), {name: t.double() for name, t in tensors.items()}
        right = results(case, "naive", exact, [exact], doubles, drawn.grad_y.double())
        ours, theirs = relative_errors([found], [right]), relative_errors([one], [right])
        for name, error in ours.items():
            assert error <= 2 * theirs[name] + 4 * torch.finfo(dtype).eps * len(widths) ** 0.5, (
                widths,
                implementation,
                name,
            )


class Made(TorchDispatchMode):
    """Elements of all that operators concatenate."""

    def __init__(self) -> None:
        super().__init__()
        self.concatenated: list[int] = []
        self.calls = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        made = func(*args, **(kwargs or {}))
        self.calls += 1
        if ".cat." in str(func):
            self.concatenated.append(made.numel())
        return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "kronecker": lambda: FactorLinear(48, 60, activation="relu"),
    "monarch": lambda: FactorLinear(48, 60, structure="monarch", blocks=4),
    "dense": lambda: FactorLinear(48, 60, factors=((48,), (60,))),
    "mlp": lambda: FactorMLP([(6, 8), (8, 8), 20], activation="gelu"),
    "mlp of dense layers": lambda: FactorMLP([48, 32, 20], output_activation="tanh"),
    "gated": lambda: FactorMLP([48, (4, 8), (8, 4), 48], gated=True, activation="silu"),
    "gru": lambda: FactorGRU(48, 24, structure="kronecker"),
    "dense gru": lambda: FactorGRU(48, 24),
}


def called(module: nn.Module, x: object) -> Tensor:
    made = module(x)
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize("name", MODULES)
def test_x_is_never_made(name: str) -> None:
    module, (a, b) = MODULES[name](), (torch.randn(11, 31, n, requires_grad=True) for n in (20, 28))
    with Made() as made:
        called(module, [a, b]).sum().backward()
    assert made.calls and 11 * 31 * 48 not in made.concatenated
    with Made() as made:
        called(module, [torch.cat([a, b], -1)])
    assert 11 * 31 * 48 in made.concatenated


@pytest.mark.parametrize("name", MODULES)
def test_modules_do_as_with_one_tensor(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    parts = [torch.randn(4, 3, n, dtype=torch.float64, requires_grad=n != 5) for n in (20, 5, 23)]
    found = called(module, parts)
    right = called(module, torch.cat(parts, dim=-1))
    torch.testing.assert_close(found, right)
    wanted = [parts[0], parts[2], *module.parameters()]
    grad = torch.randn_like(right)
    torch.testing.assert_close(torch.autograd.grad(found, wanted, grad), torch.autograd.grad(right, wanted, grad))
    alone = torch.cat(parts, dim=-1)
    torch.testing.assert_close(called(module, [alone]), right)


@pytest.mark.feature("several inputs: torch.compile as a whole graph, torch.export", result="works")
@pytest.mark.parametrize("name", ["kronecker", "mlp", "gated", "gru"])
def test_compile_and_export(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    parts = [torch.randn(4, 3, n, dtype=torch.float64, requires_grad=True) for n in (20, 28)]
    right = called(module, parts)
    grads = torch.autograd.grad(right.square().sum(), parts)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=name == "kronecker")
    found = called(compiled, parts)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), parts), grads)
    plain = [part.detach() for part in parts]
    exported = torch.export.export(module, (plain,)).module()
    torch.testing.assert_close(called(exported, plain), right)


def test_opcheck() -> None:
    text = Chain.of(SPECS[0], True, "tanh").text
    texts = {f"inputs 50 70; {text}": 4, f"inputs 50 70; {text} | tied 0 1 84 9 1": 5}
    for stack, count in texts.items():
        tensors = [torch.randn(q, p) for q, p in ((3, 4), (7, 6), (4, 5))] + [torch.randn(84), torch.randn(9, 84)]
        tensors, (a, b) = tensors[:count], (torch.randn(3, 50), torch.randn(3, 70))
        torch.library.opcheck(torch.ops.factorlayer.inputs_forward, ([a, b], tensors, stack))
        grad_y = torch.randn(3, 84 if count == 4 else 9)
        torch.library.opcheck(torch.ops.factorlayer.inputs_backward, (grad_y, [a, b], tensors, stack, [1, 2, 4]))


@pytest.mark.feature("several inputs: first and second derivatives, jacobian(vectorize=True)", result="works")
def test_derivatives_of_all_orders() -> None:
    layer = FactorLinear(12, 10, dtype=torch.float64, activation="tanh")
    parts = [torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    assert torch.autograd.gradcheck(lambda *parts: layer(parts), parts)
    assert torch.autograd.gradgradcheck(lambda *parts: layer(parts), parts)
    by_rows = torch.autograd.functional.jacobian(lambda *parts: layer(parts), tuple(parts), vectorize=True)
    one_by_one = torch.autograd.functional.jacobian(lambda *parts: layer(parts), tuple(parts))
    torch.testing.assert_close(by_rows, one_by_one)


@pytest.mark.feature("several inputs: torch.func, autocast, the meta device, torch.utils.flop_counter", result="works")
def test_vmap_autocast_meta_and_flops() -> None:
    layer = FactorLinear(12, 10)
    parts = [torch.randn(3, 4, n) for n in (5, 7)]
    right = layer(torch.cat(parts, -1))
    torch.testing.assert_close(torch.vmap(lambda a, b: layer([a, b]))(*parts), right)
    grads = torch.func.grad(lambda a, b: layer([a, b]).square().sum(), argnums=(0, 1))(*parts)
    assert [tuple(grad.shape) for grad in grads] == [(3, 4, 5), (3, 4, 7)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer([parts[0].bfloat16(), parts[1]]), layer(torch.cat(parts, -1)))
    on_meta = FactorLinear(12, 10, device="meta")([part.to("meta") for part in parts])
    assert on_meta.shape == right.shape
    counts = []
    for x in (parts, torch.cat(parts, -1)):
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_frozen_hooked_and_batched_as_well() -> None:
    parts, module = [torch.randn(4, n) for n in (20, 28)], MODULES["mlp"]()
    right = module(torch.cat(parts, 1))
    torch.testing.assert_close(module.freeze()(parts), right)
    module.unfreeze()
    handle = module.layers[0].register_forward_hook(lambda *given: None)
    torch.testing.assert_close(module(parts), right)
    handle.remove()
    residual = FactorMLP([48, 16, 48], residual=True)
    torch.testing.assert_close(residual(parts), residual(torch.cat(parts, 1)))
    x, weights = [torch.randn(2, 5, n) for n in (3, 9)], [torch.randn(2, 2, 3), torch.randn(2, 5, 4)]
    found = factor_linear(x, weights, batch_dims=1)
    torch.testing.assert_close(found, factor_linear(torch.cat(x, -1), weights, batch_dims=1))
    complex_layer = FactorLinear(12, 10, dtype=torch.complex64)
    x = [torch.randn(2, n, dtype=torch.complex64) for n in (5, 7)]
    torch.testing.assert_close(complex_layer(x), complex_layer(torch.cat(x, -1)))


def test_inputs_without_features_have_gradients_without_numbers() -> None:
    layer = FactorLinear(12, 10)
    for widths in ((12, 0), (5, 0, 7)):
        parts = [torch.randn(3, n, requires_grad=True) for n in widths]
        layer(parts).sum().backward()
        assert [tuple(part.grad.shape) for part in parts] == [(3, n) for n in widths]


def test_the_same_tensor_twice() -> None:
    a = torch.randn(3, 6, requires_grad=True)
    layer = FactorLinear(12, 10)
    (found,) = torch.autograd.grad(layer([a, a]).square().sum(), a)
    (right,) = torch.autograd.grad(layer(torch.cat([a, a], 1)).square().sum(), a)
    torch.testing.assert_close(found, right)


def test_no_samples() -> None:
    layer, parts = FactorLinear(12, 10), [torch.zeros(0, n, requires_grad=True) for n in (5, 7)]
    y = layer(parts)
    y.sum().backward()
    assert y.shape == (0, 10) and not layer.weight_0.grad.any() and parts[1].grad.shape == (0, 7)


def test_nan_stays_in_its_sample() -> None:
    parts = [torch.randn(40, n) for n in (5, 7)]
    parts[1][17, 3] = float("nan")
    y = FactorLinear(12, 10)(parts)
    assert y[17].isnan().all() and not y[:17].isnan().any() and not y[18:].isnan().any()


# FactorGRU's


@pytest.mark.parametrize("layout", ["steps", "batch-first", "cu_seqlens", "packed", "unbatched", "bidirectional"])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "blocks"])
def test_layouts_of_a_gru(structure: str, layout: str) -> None:
    torch.manual_seed(0)
    kind = dict(blocks=4) if structure == "blocks" else {}
    both = layout == "bidirectional"
    gru = FactorGRU(
        48,
        24,
        1 + both,
        batch_first=layout == "batch-first",
        bidirectional=both,
        structure=structure,
        dtype=torch.float64,
        **kind,
    )
    shape = (9,) if layout in ("cu_seqlens", "unbatched") else (4, 3)
    parts = [torch.randn(*shape, n, dtype=torch.float64) for n in (20, 28)]
    further = dict(cu_seqlens=torch.tensor([0, 4, 4, 9])) if layout == "cu_seqlens" else {}
    given, whole = parts, torch.cat(parts, -1)
    if layout == "packed":
        given, whole = (
            [pack_padded_sequence(x, [2, 4, 1], enforce_sorted=False) for x in each] for each in (parts, [whole])
        )
        whole = whole[0]
    found, right = gru(given, **further), gru(whole, **further)
    if isinstance(right[0], PackedSequence):
        found, right = (found[0].data, found[1]), (right[0].data, right[1])
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("implementation", ["naive", "batched", "auto"])
def test_a_cell(implementation: str) -> None:
    cell = FactorGRUCell(48, 24, structure="kronecker", implementation=implementation)
    for shape in ((5,), ()):
        parts = [torch.randn(*shape, n) for n in (20, 28)]
        torch.testing.assert_close(cell(parts), cell(torch.cat(parts, -1)))


# What is wrong

A, B = torch.zeros(3, 5), torch.zeros(3, 7)
WRONG = {
    "none": ([], ValueError, "x should be a tensor or a list of tensors, the list is empty"),
    "kind": ([A, [1.0]], TypeError, r"x should be a tensor or a list of tensors, x\[1\] is of the type list"),
    "sparse": ([A, B.to_sparse()], TypeError, r"should be dense, the layout of x\[1\] is torch.sparse_coo"),
    "number": ([A, torch.zeros(())], ValueError, r"one shape but for their last dimension, they have \(3, 5\), \(\)"),
    "samples": ([A, B[:2]], ValueError, r"one shape but for their last dimension, they have \(3, 5\), \(2, 7\)"),
    "axes": ([A, B[None]], ValueError, r"they have \(3, 5\), \(1, 3, 7\)"),
    "features": (
        [A, A],
        ValueError,
        "last dimensions of x's tensors should be in_features=12 together, they are 5 + 5",
    ),
    "dtype": ([A, B.double()], TypeError, "x should have one dtype, they have torch.float32, torch.float64"),
    "device": ([A, B.to("meta")], TypeError, "x should have one device, they have cpu, meta"),
    "integers": ([A.long(), B.long()], TypeError, "x should be floating-point tensors, they are torch.int64"),
    "weights": ([A.double(), B.double()], TypeError, "x and weight_0 should have one dtype, x is torch.float64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lists_are_refused(name: str) -> None:
    given, kind, words = WRONG[name]
    layer = FactorLinear(12, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind, match=f"FactorLinear: .*{words.replace('+', '[+]')}") as refused:
            layer(given)
    assert refused.value.__cause__ is None
    if name != "weights":
        with pytest.raises(kind, match=r"FactorGRU: .*input"):
            FactorGRU(12, 10)([x if isinstance(x, list) else x[None] for x in given])


def test_packed_lists_that_differ_are_refused() -> None:
    gru, x = FactorGRU(12, 10), torch.zeros(4, 3, 6)
    one, other = (pack_padded_sequence(x, lengths, enforce_sorted=False) for lengths in ([2, 4, 1], [4, 2, 1]))
    with pytest.raises(ValueError, match=r"should have the same lengths, input\[1\] has others"):
        gru([one, other])
    with pytest.raises(TypeError, match=r"of tensors or of PackedSequences, input\[1\] is of the type Tensor"):
        gru([one, x])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inputs 50 60; tied 0 1 120 4 1", "inputs have 110 features, the chain takes 120"),
        ("inputs; tied 0 1 120 4 1", "inputs"),
        ("inputs 0 120; tied 0 1 120 4 1", "inputs"),
        ("tied 0 1 120 4 1; inputs 50 70", "inputs"),
        ("rank 2; inputs 50 70; tied 0 1 120 4 1", "inputs"),
        ("inputs 50 70; tied 0 1 120 4 1; gradient", "inputs"),
        ("tied 0 1 9 120 1 | inputs 50 70; tied 0 1 120 4 1", "first layer"),
    ],
)
def test_wrong_texts_are_refused(text: str, words: str) -> None:
    tensors = [torch.zeros(4, 120)] * (1 + text.count("|"))
    with pytest.raises(ValueError, match=words):
        torch.ops.factorlayer.inputs_forward([torch.zeros(2, 50), torch.zeros(2, 70)], tensors, text)


def test_ops_refuse_other_tensors_than_the_text_says() -> None:
    op, weight, text = torch.ops.factorlayer.inputs_forward, [torch.zeros(4, 12)], "inputs 5 7; tied 0 1 12 4 1"
    for given in ([A], [B, A], [A, B[:2]], [A, B.double()], []):
        with pytest.raises(RuntimeError, match="factorlayer: "):
            op(given, weight, text)
    with pytest.raises(RuntimeError, match="which this op does not take"):
        torch.ops.factorlayer.forward(torch.zeros(3, 12), weight, None, text)
    assert Chain.parse(text).text == text and Chain.parse(text).alone.text == text.split("; ")[1]


def test_why_they_are_concatenated_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an H100, whose planner is asked here."""
    gpu = Gpu.of(90)

    def ask(question: str, text: str, dtype: torch.dtype, batch_class: int, device: int) -> str:
        limits = gpu.arch, gpu.sms, gpu.shared
        return str(getattr(planner, question)(text, dtype_name(dtype), *limits, batch_class=batch_class))

    monkeypatch.setattr(layer_ops, "ask_planner", ask)
    monkeypatch.setattr(input_ops, "gpu_limits", lambda _: (gpu.arch, gpu.sms, gpu.shared))
    none = -1  # a device that nobody else asks for
    for spec, inputs, forward, backward in (
        (kronecker((32, 32), (32, 32)), (1000, 24), None, None),
        (kronecker((33, 33), (33, 33)), (1000, 89), "are predicted to take", "are predicted to take"),
        (monarch((32, 32), (32, 32)), (512, 512), None, "no plan for all gradients"),
    ):
        text = input_ops.of_inputs(Chain.of(spec, True, "relu"), inputs).text
        found = input_ops._why_concatenated(text, torch.bfloat16, none, class_of(4096))
        _, back = input_ops._at_once(text, torch.bfloat16, none, class_of(4096))
        for reason, words in ((found, forward), (back, backward)):
            assert reason is None if words is None else words in reason
