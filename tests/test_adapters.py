"""What factorlayer.adapters is made of, without the packages whose layers it takes: tests/foreign has those."""

from __future__ import annotations

import copy
import importlib.util
import math
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from forked import python
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from factorlayer import adapters
from factorlayer.adapters import added, linears, products, ways
from factorlayer.adapters.record import Record
from factorlayer.autograd import layer_ops
from factorlayer.tuning import predicted

SIZES = [
    ((3, 4), (5, 2, 6)),
    ((2, 2), (8, 1, 16)),
    ((1, 1), (6, 2, 7)),
    ((4, 1), (3, 4, 4)),
]  # w1; rows of a, rank, b's
whole = pytest.mark.parametrize("is_whole", [False, True])
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def factors(size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool) -> tuple[Tensor, list[Tensor]]:
    first, (q, rank, p) = size
    return drawn(*first), [drawn(q, p)] if is_whole else [drawn(q, rank), drawn(rank, p)]


def matrix(first: Tensor, second: list[Tensor]) -> Tensor:
    return torch.kron(first, second[0] if len(second) == 1 else second[0] @ second[1])


def ways_of(first: Tensor, second: list[Tensor]) -> list[ways.Way]:
    """All that there are for these factors, on a CPU and on a GPU."""
    asked = tuple(first.shape), *(tuple(half.shape) for half in second)
    return [way for on_cpu in (True, False) for way in ways._ways(on_cpu, 1, *asked) if way is not None]


@whole
@sizes
@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_product_and_its_gradients(
    size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool, behind: int, on_cpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first, second = factors(size, is_whole)
    if not on_cpu:
        monkeypatch.setattr(ways, "is_by_chain", lambda x: False)
        monkeypatch.setattr(products, "way_of", lambda *_: ways_of(first, second)[-1])
    into = matrix(first, second).shape[1]
    x = drawn(2, 3, into, *(4, 5)[:behind])
    leaves = [x, first, *second]
    y = products.product(x, first, second, behind)
    right = (x.movedim(-1 - behind, -1) @ matrix(first, second).mT).movedim(-1, -1 - behind)
    torch.testing.assert_close(y, right, rtol=1e-11, atol=1e-11)
    grad_y = torch.randn_like(right)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, grad_y), torch.autograd.grad(right, leaves, grad_y), rtol=1e-11, atol=1e-11
    )


@whole
@sizes
@pytest.mark.parametrize(
    ("leading", "bias", "scale", "is_first_whole"),
    [((3,), True, 1, True), ((2, 3), False, 0.7, False), ((), True, 2, False)],
)
def test_a_layer_and_what_is_added_in_one_step(
    size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool, leading: tuple[int, ...], bias: bool,
    scale: float, is_first_whole: bool,
) -> None:  # fmt: skip
    w1, second = factors(size, is_whole)
    first = [w1] if is_first_whole else [drawn(w1.shape[0], 2), drawn(2, w1.shape[1])]
    w1 = w1 if is_first_whole else first[0] @ first[1]
    out, into = matrix(w1, second).shape
    base = nn.Linear(into, out, bias=bias).double().requires_grad_(False)
    x, leaves = drawn(*leading, into), [*first, *second]
    right = base(x) + scale * x @ matrix(w1, second).mT
    grad_y = torch.randn_like(right)
    expected = torch.autograd.grad(right, [x, *leaves], grad_y)
    for way in ways_of(w1, second):
        y = added.Added.apply(way, len(first), scale, None, x, base.weight, base.bias, *first, *second)
        torch.testing.assert_close(y, right, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(y, [x, *leaves], grad_y), expected, rtol=1e-11, atol=1e-11)


@whole
@sizes
def test_what_is_added_is_differentiated_twice(
    size: tuple[tuple[int, int], tuple[int, int, int]], is_whole: bool
) -> None:
    first, second = factors(size, is_whole)
    out, into = matrix(first, second).shape
    base, x = nn.Linear(into, out).double().requires_grad_(False), drawn(2, into)
    for way in ways_of(first, second):

        def run(x: Tensor, *halves: Tensor, way: ways.Way = way) -> Tensor:
            return added.add(way, 1, 0.5, None, x, base.weight, base.bias, *halves)

        leaves = (x, first, *second)
        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
        y = run(*leaves)
        vectors = torch.randn(3, *y.shape, dtype=y.dtype)
        found = torch.autograd.grad(y, leaves, vectors, retain_graph=True, is_grads_batched=True)
        one_by_one = [torch.autograd.grad(y, leaves, vector, retain_graph=True) for vector in vectors]
        for batched, alone in zip(found, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(batched, torch.stack(alone), rtol=1e-11, atol=1e-11)


@whole
@pytest.mark.parametrize("given", [0, 1, 2, 3])
def test_gradients_that_nobody_wants_are_not_made(given: int, is_whole: bool) -> None:
    first, second = factors(SIZES[0], is_whole)
    out, into = matrix(first, second).shape
    base, tensors = nn.Linear(into, out).double().requires_grad_(False), [drawn(3, into), first, *second]
    given = min(given, len(tensors) - 1)
    tensors = [tensor if i == given else tensor.detach() for i, tensor in enumerate(tensors)]
    right = base(tensors[0]) + tensors[0] @ matrix(tensors[1], tensors[2:]).mT
    for way in ways_of(first, second):
        y = added.add(way, 1, 1, None, tensors[0], base.weight, base.bias, *tensors[1:])
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), tensors[given]),
            torch.autograd.grad(right.sum(), tensors[given], retain_graph=True),
        )


@sizes
@pytest.mark.parametrize("of_x", [True, False])
def test_gradients_step_by_step(size: tuple[tuple[int, int], tuple[int, int, int]], of_x: bool) -> None:
    first, (second,) = factors(size, is_whole=True)
    w1, w2 = first.detach(), second.detach()
    x = drawn(3, matrix(first, [second]).shape[1])
    right = x @ torch.kron(first, second).mT
    grad_y = torch.randn_like(right)
    expected = torch.autograd.grad(right, [x, first, second], grad_y)
    for begins_with_first in (True, False):
        steps = ways._steps(begins_with_first, w1.shape, w2.shape)
        grad_x, *found = steps.back(grad_y, x.detach(), w1, w2, of_x)
        assert (grad_x is not None) == of_x
        torch.testing.assert_close(
            (expected[0] if grad_x is None else grad_x, *found), expected, rtol=1e-11, atol=1e-11
        )


@pytest.fixture
def of_an_h100(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """What stands for samples of bfloat16 on one."""
    limits = 90, 132, 232448, 4916736
    for module in (predicted, layer_ops, ways):
        monkeypatch.setattr(module, "gpu_limits", lambda _: limits)
    monkeypatch.setattr(ways, "choose", lambda *_: "fused")

    class Samples:
        dtype, is_cuda, is_cpu = torch.bfloat16, True, False

        def __init__(self, count: int, features: int) -> None:
            self.sizes = count, features

        def numel(self) -> int:
            return math.prod(self.sizes)

        def __len__(self) -> int:
            return self.sizes[0]

        def get_device(self) -> int:
            return 0

    return Samples


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [((8, 8), ((128, 8), (8, 128)), ways.ByHalf), ((32, 32), ((32, 8), (8, 32)), ways.ByChain)],
)
def test_a_gpu_takes_a_half_by_itself_where_that_is_predicted_faster(
    first: ways.Sizes, second: list[ways.Sizes], kind: type, of_an_h100: Callable[[int, int], Any]
) -> None:
    assert type(ways.way_of(of_an_h100(4096, 1024), first, second, recorded=True)) is kind


@pytest.mark.parametrize(("w1", "w2", "are"), [((8, 8), (352, 128), True), ((32, 32), (32, 32), False)])
def test_a_gpu_goes_step_by_step_where_that_is_predicted_faster(
    w1: ways.Sizes, w2: ways.Sizes, are: bool, of_an_h100: Callable[[int, int], Any]
) -> None:
    way = ways.of_columns(1, w1, w2)
    steps = ways._steps(way.chain.contractions[0].weight == 0, w1, w2)
    assert steps.are_faster(way.chain, of_an_h100(4096, way.sizes[1])) == are


LINEAR = nn.Linear(12, 20).double().requires_grad_(False)
X = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def with_hook() -> nn.Module:
    base = copy.deepcopy(LINEAR)
    base.register_forward_hook(lambda *_: None)
    return base


def with_forward() -> nn.Module:
    base = copy.deepcopy(LINEAR)
    base.forward = lambda x: x
    return base


def test_layers_that_are_watched() -> None:
    assert not linears.is_watched(LINEAR)
    assert linears.is_watched(with_hook()) and linears.is_watched(with_forward())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert linears.is_watched(LINEAR)
    handle.remove()


@pytest.mark.parametrize(
    ("base", "x", "around"),
    [
        pytest.param(copy.deepcopy(LINEAR).requires_grad_(True), X, nullcontext, id="trained"),
        pytest.param(copy.deepcopy(LINEAR).float(), X, nullcontext, id="another dtype"),
        pytest.param(nn.Bilinear(12, 2, 20), X, nullcontext, id="another layer"),
        pytest.param(LINEAR, X[:, :6], nullcontext, id="features"),
        pytest.param(LINEAR, X[:0], nullcontext, id="no rows"),
        pytest.param(LINEAR, X.to_sparse(), nullcontext, id="sparse"),
        pytest.param(LINEAR, X, forward_ad.dual_level, id="forward mode"),
        pytest.param(LINEAR, X, lambda: FlopCounterMode(display=False), id="FLOPs are counted"),
    ],
)
def test_what_is_not_usual_is_left_to_the_layer(
    base: nn.Module, x: Tensor, around: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SMALL_MATRIX", 0)
    first, second = [drawn(4, 3)], [drawn(5, 4)]
    assert linears.added(LINEAR, X, first, second, 1) is not None
    with around():
        assert linears.added(base, x, first, second, 1) is None
    mapped = torch.func.vmap(lambda x: torch.tensor(linears.added(LINEAR, x, first, second, 1) is None))(X)
    assert mapped.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_all_are_of_its_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they were before; gradients are of the dtypes of what they are of."""
    monkeypatch.setattr(products, "SMALL_MATRIX", 0)
    base = nn.Linear(72, 80).to(dtype).requires_grad_(False)
    halves = [half.detach().float().requires_grad_() for half in (drawn(8, 6), drawn(10, 12))]
    x = torch.randn(64, 72).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linears.added(base, x, halves[:1], halves[1:], 1)
        theirs = base(x) + torch.nn.functional.linear(x, torch.kron(*halves))
    assert y is not None and y.dtype == torch.bfloat16
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, *halves)]
    exact = copy.deepcopy(base).double()(doubles[0]) + torch.nn.functional.linear(doubles[0], torch.kron(*doubles[1:]))
    grad_y = torch.randn_like(exact)
    found, others, right = (
        [made.detach(), *torch.autograd.grad(made, leaves, grad_y.to(made.dtype))]
        for made, leaves in ((y, (x, *halves)), (theirs, (x, *halves)), (exact, doubles))
    )
    assert [grad.dtype for grad in found[1:]] == [dtype, torch.float32, torch.float32]
    for mine, other, each in zip(found, others, right, strict=True):
        assert (mine - each).norm() <= 2 * (other - each).norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            linears.added(LINEAR, X, [drawn(4, 3)], [drawn(5, 4).float()], 1) is None
        )  # which leaves doubles as they are


@whole
@pytest.mark.parametrize("is_first_whole", [True, False])
@pytest.mark.parametrize(("dtype", "of_halves"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_factors_of_another_dtype_are_added_in_one_step(
    dtype: torch.dtype, of_halves: torch.dtype, is_first_whole: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product in theirs, the sum in the layer's; and nothing as large as x is kept but x, in its dtype."""
    monkeypatch.setattr(products, "SMALL_MATRIX", 0)
    base = nn.Linear(72, 80).to(dtype).requires_grad_(False)
    first = [drawn(8, 6)] if is_first_whole else [drawn(8, 3), drawn(3, 6)]
    second = [drawn(10, 12)] if is_whole else [drawn(10, 2), drawn(2, 12)]
    halves = [half.detach().to(of_halves).requires_grad_() for half in (*first, *second)]
    split, kept = len(first), []
    x = torch.randn(72, 32, 2).to(dtype).permute(2, 1, 0).requires_grad_()  # not contiguous

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = linears.added(base, x, halves[:split], halves[split:], 0.7)
    assert y is not None and y.dtype == dtype and y.grad_fn.name() == "AddedBackward"
    assert [tensor.dtype for tensor in kept if tensor.numel() == x.numel()] == [dtype]

    def by_matrix(base: nn.Module, x: Tensor, *halves: Tensor) -> Tensor:
        """As PEFT does it."""
        w1 = halves[0] if is_first_whole else halves[0] @ halves[1]
        delta = nn.functional.linear(x.to(w1.dtype), 0.7 * matrix(w1, list(halves[split:])))
        return (base(x) + delta).to(x.dtype)

    theirs = by_matrix(base, x, *halves)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, *halves)]
    exact = by_matrix(copy.deepcopy(base).double(), *doubles)
    grad_y = torch.randn_like(exact)
    found, others, right = (
        [made.detach(), *torch.autograd.grad(made, leaves, grad_y.to(made.dtype))]
        for made, leaves in ((y, (x, *halves)), (theirs, (x, *halves)), (exact, doubles))
    )
    assert [grad.dtype for grad in found[1:]] == [tensor.dtype for tensor in (x, *halves)]
    for mine, other, each in zip(found, others, right, strict=True):
        assert (mine - each).norm() <= 1.5 * (other - each).norm() + 1e-6 * each.norm()


@pytest.mark.parametrize("leading", [(5,), (2, 3), ()])
def test_factors_of_another_dtype_are_differentiated_twice(
    leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SMALL_MATRIX", 0)
    base = nn.Linear(12, 20).requires_grad_(False)
    x, first, second = torch.randn(*leading, 12).requires_grad_(), drawn(4, 3), drawn(5, 4)
    y = linears.added(base, x, [first], [second], 0.5)
    right = (base(x) + 0.5 * x.double() @ torch.kron(first, second).mT).float()
    torch.testing.assert_close(y, right)
    for made in (y, right):
        grads = torch.autograd.grad(made.square().sum(), (x, first, second), create_graph=True)
        assert [grad.dtype for grad in grads] == [torch.float32, torch.float64, torch.float64]
        twice = torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, first, second))
        if made is y:
            found = [*grads, *twice]
    torch.testing.assert_close(found, [*grads, *twice], rtol=1e-5, atol=1e-5)


def test_what_is_added_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALL_MATRIX", 0)
    first, second = [drawn(4, 3)], [drawn(5, 4)]
    x = torch.stack([X, X]).requires_grad_()
    y = linears.added(LINEAR, x, first, second, 1)
    assert y is not None
    right = torch.relu(LINEAR(x) + x @ torch.kron(*first, *second).mT)
    torch.testing.assert_close(nn.ReLU(inplace=True)(y), right, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(right.sum(), x))


def test_columns_behind_all_factors() -> None:
    weights = [drawn(2, 3), drawn(4, 2), drawn(3, 3)]
    right = drawn(18, 5)
    leaves = [right, *weights]
    y, expected = products.kronecker(weights, right), torch.kron(torch.kron(*weights[:2]), weights[2]) @ right
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
    )
    assert products.kronecker(weights, right[:, :0]).shape == (24, 0)


@pytest.mark.parametrize("shape", [(0, 12, 5), (2, 12, 0), (0, 12, 3, 3)])
def test_no_places(shape: tuple[int, ...]) -> None:
    """An empty batch of images, for a convolution."""
    x, weights = drawn(*shape).requires_grad_(), [drawn(4, 3), drawn(5, 4)]
    y = products.product(x, weights[0], weights[1:], behind=len(shape) - 2)
    assert y.shape == (shape[0], 20, *shape[2:])
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_halves_are_contracted_where_that_takes_fewer_multiply_adds() -> None:
    # 32·32 by 32·32: 2 · 32³ by factors; 3 · 8 · 32² by halves
    assert ways.multiply_adds((32, 32), (32, 8), (8, 32)) == (65536, 24576)
    together, apart = ways.multiply_adds((4, 4), (4, 3), (3, 4))
    assert apart > together


def test_small_products_are_left_to_who_makes_the_matrix() -> None:
    assert products.is_faster_made(torch.zeros(8, 64), (64, 64))
    assert not products.is_faster_made(torch.zeros(128, 64), (64, 64))
    assert not products.is_faster_made(torch.zeros(1, 128), (128, 128))


def test_what_is_no_model_and_what_has_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"take_over: model should be an nn\.Module, it is list"):
        adapters.take_over([nn.Linear(2, 2)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="take_over: Linear has no LoKr layers of PEFT or LyCORIS; make them with"):
        adapters.take_over(nn.Linear(2, 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="neither of which is installed; `pip install"):
        adapters.take_over(nn.Linear(2, 2))
    assert adapters.give_back(nn.Linear(2, 2)) == 0


def test_a_record_prints_layers_that_are_alike_once() -> None:
    record = Record({"a": "4 -> 4", "b": "4 -> 4", "c": "4 -> 8"}, {"d": "it has 2 groups"})
    assert str(record).split("\n") == [
        "3 LoKr layers taken over, 1 left to their own code",
        "  taken: a and 1 more: 4 -> 4",
        "  taken: c: 4 -> 8",
        "  left: d: it has 2 groups",
    ]


@pytest.mark.long
def test_its_import_brings_no_other_package() -> None:
    code = (
        "import sys; from factorlayer import adapters; "
        "assert not {'peft', 'lycoris', 'linear_operator'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([*python(), "-c", code], check=True)
