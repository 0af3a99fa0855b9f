"""Calls past the dispatcher, csrc/eager.h: the same as the raw ops, and left to them where anything is special."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import factorlayer.autograd.layer_ops
import factorlayer.functional
import factorlayer.stacks.stack
from factorlayer import FactorLinear, FactorMLP
from factorlayer.activations.texts import scalars
from factorlayer.autograd.layer_ops import layer_at_once, not_at_once, stack_at_once
from factorlayer.tuning import choices


def call(layer: FactorLinear, x: Tensor, choose: bool = True) -> Tensor | None:
    weights = [*layer.weights, *scalars(layer.activation, layer._scalar_names)]
    return layer_at_once(layer.chain.text, layer.chain.tf32_text, choose, x, layer.bias, weights)


@pytest.fixture
def by_ops(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, what ran past the dispatcher."""

    def begin() -> None:
        monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)
        monkeypatch.setattr(factorlayer.stacks.stack, "stack_at_once", not_at_once)
        monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", not_at_once)

    return begin


def call_of_stack(mlp: FactorMLP, x: Tensor, choose: bool = True) -> Tensor | None:
    (own,) = mlp.stacks
    tensors = own._tensors()
    assert tensors is not None
    return stack_at_once(own._stack.text, own._stack.tf32_text, choose, x, tensors)


@pytest.mark.parametrize("activation", [None, "gelu", nn.PReLU()], ids=["identity", "gelu", "learned"])
@pytest.mark.parametrize("structure", ["kronecker", "monarch"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("weight_0",), ("bias", "weight_1")], ids=str)
def test_it_is_what_the_ops_make(
    activation: Any, structure: str, bias: bool, frozen: tuple[str, ...], by_ops: Callable[[], None]
) -> None:
    layer = FactorLinear(12, 20, bias, structure=structure, activation=activation)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(5, 12, requires_grad=True)
    assert call(layer, x) is not None

    def made() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [t for t in (x, *layer.parameters()) if t.requires_grad])]

    at_once = made()
    by_ops()
    for found, right in zip(at_once, made(), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("loss", [torch.sum, torch.norm], ids=["sum", "norm"])  # grad_y is one number, or many
def test_gradients_are_not_copied(loss: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = factorlayer.autograd.layer_ops._gradients_at_once

    def noted(*given: Any) -> Any:
        found = real(*given)
        made.extend(t.data_ptr() for t in found or () if t is not None)
        return found

    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", noted)
    layer, x = FactorLinear(12, 20), torch.randn(5, 12, requires_grad=True)
    loss(layer(x)).backward()
    assert made == [t.grad.data_ptr() for t in (x, layer.bias, *layer.weights)]


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Own(Tensor):
    pass


def onlookers() -> Iterator[Any]:
    yield Watching()
    yield Overriding()
    yield torch.autocast("cpu")
    yield torch.profiler.profile()
    yield forward_ad.dual_level()


@pytest.mark.feature("dispatch and function modes, the profiler, torch.jit.trace", result="works")
def test_who_looks_on_is_shown_the_ops() -> None:
    layer, x = FactorLinear(12, 20), torch.randn(5, 12)
    for onlooker in onlookers():
        with onlooker:
            assert call(layer, x) is None
        assert call(layer, x) is not None
    asked: list[Tensor | None] = []
    torch.func.vmap(lambda x: asked.append(call(layer, x)) or x)(torch.randn(2, 5, 12))
    torch.jit.trace(lambda x: asked.append(call(layer, x)) or x, x, check_trace=False)
    assert asked == [None, None]
    with Watching() as watching:
        layer(x).sum().backward()
    assert {"factorlayer.forward.default", "factorlayer.backward.default"} <= set(watching.seen)


SPECIAL = [
    torch.randn(5, 12).as_subclass(Own),
    torch.randn(5, 12, device="meta"),
    torch.randn(5, 12, dtype=torch.float64),
    torch.randn(5, 13),
    torch.randn(2, 5, 12),
    torch.randn(0, 12),
    torch.randn(5, 12).to_sparse(),
    torch._efficientzerotensor(5, 12),
]
SPECIAL_IDS = ["subclass", "meta", "dtype", "features", "dimensions", "samples", "sparse", "zeros"]


@pytest.mark.parametrize("x", SPECIAL, ids=SPECIAL_IDS)
@pytest.mark.feature("what the fast call leaves to the ops: subclasses and others", result="falls back")
def test_what_is_special_is_left_to_the_ops(x: Tensor) -> None:
    assert call(FactorLinear(12, 20), x) is None


@pytest.mark.parametrize("leading", [(5,), (3, 2)], ids=str)
def test_what_autocast_has_cast_goes_past_the_dispatcher(
    leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FactorLinear(12, 20)
    x = torch.randn(*leading, 12, requires_grad=True)
    narrow = copy.deepcopy(layer).bfloat16()
    grad_y = torch.randn(*leading, 20).bfloat16()

    def by_choice(*_: object) -> str:
        raise AssertionError("this call went to the ops")

    monkeypatch.setattr(factorlayer.functional, "choose", by_choice)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.backward(grad_y)
    x_alone = x.detach().bfloat16().requires_grad_()
    right = narrow(x_alone)
    right.backward(grad_y)
    assert y.dtype == torch.bfloat16 and torch.equal(y, right)
    for given, alone in zip((x, *layer.parameters()), (x_alone, *narrow.parameters()), strict=True):
        assert given.grad.dtype == torch.float32 and torch.equal(given.grad, alone.grad.float())


def test_it_chooses_as_auto_does() -> None:
    """Large products, and those of 16 bits, are PyTorch's."""
    x = torch.randn(5, 1024)
    assert call(FactorLinear(1024, 512, factors=((1024,), (512,))), x) is not None
    large = FactorLinear(1024, 513, factors=((1024,), (513,)))
    short, x_short = FactorLinear(1024, 8, factors=((1024,), (8,)), dtype=torch.bfloat16), x.bfloat16()
    for layer, given in ((large, x), (short, x_short)):
        assert call(layer, given) is None
        assert call(layer, given, choose=False) is not None


@pytest.mark.feature("torch.autograd.grad(is_grads_batched=True) by one call", result="works")
def test_gradients_of_many_at_once_are_left_to_the_ops() -> None:
    """One call of an op makes them, of all vectors as samples."""
    layer, x = FactorLinear(12, 20).requires_grad_(False), torch.randn(5, 12, requires_grad=True)
    y, vectors = layer(x), torch.randn(3, 5, 20)
    with Watching() as watching:
        (found,) = torch.autograd.grad(y, x, vectors, retain_graph=True, is_grads_batched=True)
    assert watching.seen.count("factorlayer.backward.default") == 1
    each = [torch.autograd.grad(y, x, vector, retain_graph=True)[0] for vector in vectors]
    torch.testing.assert_close(found, torch.stack(each))


def test_numbers_that_are_negated_in_name_only() -> None:
    """Views of a complex tensor's imaginary part."""
    layer = FactorLinear(12, 20)
    x = torch.complex(torch.randn(5, 12), torch.randn(5, 12)).conj().imag
    assert x.is_neg()
    assert torch.equal(layer(x), layer(x.resolve_neg().contiguous()))


def test_one_number_that_is_negated_in_name_only() -> None:
    """Its strides are those of any other."""
    layer = FactorLinear(1, 4, factors=((1, 1), (2, 2)))
    x = torch.complex(torch.randn(1), torch.randn(1)).conj().imag.unsqueeze(-1)
    assert x.is_neg()
    assert torch.equal(layer(x), layer(x.resolve_neg()))


WIDTHS = [12, 20, (4, 4), (3, 4), 5]


def of_two(layer: FactorLinear) -> Callable[[Tensor], Tensor]:
    return lambda x: layer([x[:, :5].contiguous(), x[:, 5:].contiguous()])


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda: FactorLinear(12, 20), 4),
        (lambda: FactorMLP(WIDTHS), 10),
        (lambda: of_two(FactorLinear(12, 20)), 5),
    ],
    ids=["layer", "stack", "inputs"],
)
@pytest.mark.feature("saved_tensors_hooks", result="works")
@pytest.mark.parametrize("at_once", [True, False])
def test_saved_tensors_are_asked_for_once(
    make: Callable[[], Callable[[Tensor], Tensor]], tensors: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps them elsewhere may bring them back only once, be it for the ops, where the eager call has none."""
    if not at_once:
        monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", not_at_once)
    layer, x = make(), torch.randn(5, 12, requires_grad=True)
    brought: list[int] = []

    def bring(kept: tuple[int, Tensor]) -> Tensor:
        brought.append(kept[0])
        return kept[1].clone().as_subclass(Own) if kept[0] == 0 else kept[1].clone()

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t) or len(kept) - 1, t), bring):
        y = layer(x)
    y.sum().backward()
    assert len(brought) == len(set(brought)) == len(kept) == tensors


@pytest.mark.feature("frozen weights keep no input for the backward pass", result="works")
@pytest.mark.parametrize("learns", ["nothing", "bias", "weights"])
@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("at_once", [True, False])
def test_x_is_kept_where_weights_learn(
    learns: str, options: dict[str, Any], at_once: bool, by_ops: Callable[[], None]
) -> None:
    """Or where its activation has to be gone back through. Else x may change before the backward pass, as nn.Linear's
    may."""
    layer = FactorLinear(12, 20, dtype=torch.float64, implementation="fused", **options)
    x = torch.randn(50, 12, dtype=torch.float64, requires_grad=True)
    grad_y = torch.randn(50, 20, dtype=torch.float64)
    right = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad_y)
    of = {p: gradient for p, gradient in zip([x, *layer.parameters()], right, strict=True)}
    wanted = {"nothing": [], "bias": [layer.bias], "weights": [*layer.parameters()]}[learns]
    layer.requires_grad_(False)
    for parameter in wanted:
        parameter.requires_grad_()
    if not at_once:
        by_ops()
    is_kept = learns == "weights" or "activation" in options
    numbers: list[int] = []
    h = x * 1
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (numbers.append(t.untyped_storage().nbytes()), t)[1], lambda t: t
    ):
        y = layer(h)
    assert (max(numbers) >= x.nbytes) == is_kept
    made = torch.autograd.grad(y, [x, *wanted], grad_y, retain_graph=True)
    for tensor, gradient in zip([x, *wanted], made, strict=True):
        torch.testing.assert_close(gradient, of[tensor])
    h.detach().zero_()
    again = torch.autograd.grad(y, x, grad_y, create_graph=True)[0] if not is_kept else made[0]
    torch.testing.assert_close(again, made[0])


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.PReLU()], ids=["relu", "gelu", "learned"])
@pytest.mark.parametrize("leading", [(5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("frozen", [(), ("layers.0", "layers.2"), ("layers.3.bias",)], ids=str)
def test_a_stack_is_what_the_ops_make(
    activation: Any, leading: tuple[int, ...], frozen: tuple[str, ...], by_ops: Callable[[], None]
) -> None:
    mlp = FactorMLP(WIDTHS, activation=activation, output_activation="tanh")
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = torch.randn(*leading, 12, requires_grad=True)
    assert call_of_stack(mlp, x.reshape(-1, 12)) is not None

    def made() -> list[Tensor]:
        y = mlp(x)
        with torch.no_grad():
            unrecorded = mlp(x)
        learning = [t for t in (x, *mlp.parameters()) if t.requires_grad]
        return [y, unrecorded, *torch.autograd.grad(y.sin().sum(), learning)]

    at_once = made()
    by_ops()
    for found, right in zip(at_once, made(), strict=True):
        assert torch.equal(found, right)


def test_gradients_of_a_stack_are_made_past_the_dispatcher() -> None:
    mlp, x = FactorMLP(WIDTHS), torch.randn(5, 12, requires_grad=True)
    y = mlp(x)
    with Watching() as watching:
        torch.autograd.grad(y.sum(), [x, *mlp.parameters()])
    assert "factorlayer.stack_backward.default" in watching.seen  # who looks on is shown it
    made: list[Any] = []
    real = factorlayer.autograd.layer_ops._gradients_at_once
    with pytest.MonkeyPatch.context() as patch:
        noted = lambda *given: made.append(real(*given)) or made[-1]  # noqa: E731
        patch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", noted)
        (found,) = torch.autograd.grad(mlp(x).sum(), x)
    assert len(made) == 1 and made[0][1] is found


def test_who_looks_on_is_shown_a_stacks_op() -> None:
    mlp, x = FactorMLP(WIDTHS), torch.randn(5, 12)
    for onlooker in onlookers():
        with onlooker:
            assert call_of_stack(mlp, x) is None
        assert call_of_stack(mlp, x) is not None
    with Watching() as watching:
        mlp(x).sum().backward()
    assert {"factorlayer.stack_forward.default", "factorlayer.stack_backward.default"} <= set(watching.seen)


@pytest.mark.parametrize("x", SPECIAL, ids=SPECIAL_IDS)
def test_what_is_special_of_a_stack_is_left_to_the_ops(x: Tensor) -> None:
    assert call_of_stack(FactorMLP(WIDTHS), x) is None


def test_tensors_of_a_stack_have_to_be_its_own() -> None:
    """One too few, one too many, of another shape, dtype or order: then the ops say what is wrong."""
    mlp, x = FactorMLP(WIDTHS), torch.randn(5, 12)
    (own,) = mlp.stacks
    text, tensors = own._stack.text, own._tensors()
    assert tensors is not None
    wrong = [
        tensors[:-1],
        [*tensors, torch.ones(5)],
        [tensors[0].T.contiguous(), *tensors[1:]],
        [tensors[0].T.contiguous().T, *tensors[1:]],
        [tensors[0].double(), *tensors[1:]],
        tensors[::-1],
        [],
    ]
    assert stack_at_once(text, text, True, x, tensors) is not None
    for given in wrong:
        assert stack_at_once(text, text, True, x, given) is None
    for behind in (" | backward", " | states", " | frozen", " | nonsense"):
        assert stack_at_once(text + behind, text + behind, False, x, tensors) is None


def test_a_stack_is_chosen_as_auto_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products, and those of 16 bits, are PyTorch's; and where something was measured, that is asked first."""
    x = torch.randn(5, 1024)
    large, short = FactorMLP([1024, 513, 4]), FactorMLP([1024, 8, 4], dtype=torch.bfloat16)
    for mlp, given in ((large, x), (short, x.bfloat16())):
        assert call_of_stack(mlp, given) is None
        assert call_of_stack(mlp, given, choose=False) is not None
    asked: list[object] = []
    monkeypatch.setattr(factorlayer.stacks.stack, "stack_at_once", lambda *given: asked.append(given))
    mlp = FactorMLP(WIDTHS)
    (own,) = mlp.stacks
    for measured in (own._stack.text, own._stack.tf32_text):
        monkeypatch.setattr(choices, "BATCHED", {measured})
        mlp(x[:, :12])
        assert not asked
    monkeypatch.setattr(choices, "BATCHED", {"another"})
    mlp(x[:, :12])
    assert asked


def test_each_of_a_stacks_vectors_has_its_gradient() -> None:
    mlp, x = FactorMLP(WIDTHS).requires_grad_(False), torch.randn(5, 12, requires_grad=True)
    y, vectors = mlp(x), torch.randn(3, 5, 5)
    (found,) = torch.autograd.grad(y, x, vectors, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, x, vector, retain_graph=True)[0] for vector in vectors]
    torch.testing.assert_close(found, torch.stack(each))


def test_a_stacks_gradients_can_be_differentiated() -> None:
    mlp = FactorMLP(WIDTHS, activation="tanh", dtype=torch.float64)
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(mlp, x)


def test_compiled_autograd_goes_back_through_a_stack() -> None:
    """It calls the Function's own backward, not what autograd's engine calls."""
    mlp, x = FactorMLP(WIDTHS), torch.randn(5, 12, requires_grad=True)
    right = torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()])
    y = mlp(x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    for found, expected in zip([x.grad, *(p.grad for p in mlp.parameters())], right, strict=True):
        torch.testing.assert_close(found, expected)
