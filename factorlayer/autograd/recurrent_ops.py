"""v3 of a recurrence: its raw ops, and what PyTorch has to know about them.

factorlayer::recurrence and ::recurrence_backward go from step to step. Backward makes the gradients of the gates, and
what stands beside them, of all rows. Gradients of weights are then products over all rows, of these and of the states
before their steps. Double backward goes through the definition, whose every operation PyTorch can differentiate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from factorlayer.activations.named import activate
from factorlayer.autograd import layer_ops
from factorlayer.autograd.backward import sums_text
from factorlayer.autograd.layer_ops import missing_extension, refuse_traced_gradients, transforms_active
from factorlayer.autograd.needed import needed
from factorlayer.autograd.runtime import dtype_name, tf32_allowed
from factorlayer.autograd.vectors import are_vectors, one_by_one
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.recurrent.recurrent import why_not as why_no_kernel
from factorlayer.maths.recurrence import GATES, Recurrence
from factorlayer.maths.steps import Walk, naive
from factorlayer.plan.recurrent_library import RowsProduct, alike, gradient, product

SWITCH = "rnn"  # PyTorch's for recurrent layers, as runtime.tf32_allowed names it
PLACES = 4  # tensors that say where sequences begin and where their rows are: starts, first, lengths, offsets

if missing_extension is None:
    _recurrence = torch.ops.factorlayer.recurrence.default
    _backward = torch.ops.factorlayer.recurrence_backward.default
    _recurrence_now = _recurrence._op  # the same, but for a Python call around it, which torch.compile has to see


def why_not_fused(recurrence: Recurrence, initial: Tensor, switch: str = SWITCH) -> str | None:
    """Why the fused implementation cannot take a recurrence from these states, or None."""
    reason = layer_ops.why_not_fused(initial, recurrence.chain)
    if reason is not None:
        return reason
    if recurrence.chain.parameters:
        return "its kernels have no gradient of what the candidate's activation learns"
    if initial.is_cuda:
        return _why_no_kernel(text_for(recurrence, initial, switch), initial.dtype, initial.get_device()) or None
    return None


def _why_no_kernel(text: str, dtype: torch.dtype, device: int) -> str:
    """Why a GPU has no kernels for a recurrence, forward or back; nothing if it has."""
    texts = text, f"{through_text(text)} | backward"
    if all([layer_ops.has_kernel(asked, dtype, device, batch_class=0) for asked in texts]):
        return ""
    return why_no_kernel(Recurrence.parse(text)) or "its recurrent weights do not fit in shared memory"


_why_no_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


_in_tf32_known: dict[str, str] = {}


def _in_tf32(text: str) -> str:
    if text not in _in_tf32_known:
        recurrence = Recurrence.parse(text)
        _in_tf32_known[text] = replace(recurrence, chain=replace(recurrence.chain, tf32=True)).text
    return _in_tf32_known[text]


_in_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def multiplies_fused(x: Tensor) -> bool:
    """Whether dense products of all rows, around the steps, are always made by our kernels, and not by PyTorch: in
    float32 on a GPU. Exact ones take a third of its library's time; and where recurrences may be TF32, so may these,
    for which its library asks another switch. If that allows TF32 as well, the library is as fast."""
    return x.is_cuda and x.dtype == torch.float32 and not tf32_allowed()


def _is_fused(product: Callable[[], RowsProduct], x: Tensor) -> bool:
    """Whether our kernel makes a product of all rows, of which x are some: always, or as it is predicted to take less
    than PyTorch's. A graph, which serves any number of rows, is not asked for the product, that of one number."""
    if not x.is_cuda or transforms_active():
        return False
    if is_compiling():
        return multiplies_fused(x)
    return multiplies_fused(x) or is_faster(product(), x.dtype, tf32_allowed(), x.get_device())


@functools.lru_cache(4096)
def is_faster(product: RowsProduct, dtype: torch.dtype, tf32: bool, device: int) -> bool:
    """Whether our kernel is predicted to take less than PyTorch's product, which in float32 may be TF32."""
    name = dtype_name(dtype)
    text = product.text + "; tf32" * (tf32 and name == "float32")
    computed = "tf32" if tf32 and name == "float32" else name
    gpu = Gpu(*layer_ops.gpu_limits(device))
    return layer_ops.predicted_us(text, product.samples, dtype, device) < product.us(computed, gpu)


def text_for(recurrence: Recurrence, x: Tensor, switch: str = SWITCH) -> str:
    """The recurrence as the raw ops take it: with tf32 where that one of PyTorch's switches allows it."""
    return _in_tf32(recurrence.text) if layer_ops.runs_in_tf32(x, switch) else recurrence.text


def fused(
    recurrence: Recurrence,
    gates: Sequence[Tensor],
    initial: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    walk: Walk,
    switch: str = SWITCH,
) -> Tensor:
    """The states behind all steps, [rows, hidden], from tensors as maths/steps.py has them. Dense weights may also lie
    in one tensor, [3 · hidden, hidden], which then has one gradient."""
    places = starts, walk.first, walk.lengths, walk.offsets
    text = text_for(recurrence, initial, switch)
    output: Tensor
    if transforms_active():
        given = *places, bias, initial, *gates, *weights
        output = _TransformableRecurrence.apply(text, tuple(walk.numbers), len(gates), *given)
    elif torch.is_grad_enabled() and _any_requires_grad(gates, initial, weights, bias):
        if not is_compiling():
            refuse_traced_gradients()
        given = *places, bias, initial, *gates, *weights
        output = _Recurrence.apply(text, tuple(walk.numbers), len(gates), *given)
    else:
        op = _recurrence if is_compiling() else _recurrence_now
        output = op(gates, initial, _by_gate(weights), bias, *places, walk.numbers, text)
    return output


def _by_gate(weights: Sequence[Tensor | None]) -> list[Tensor]:
    given = [weight for weight in weights if weight is not None]
    return list(given[0].chunk(GATES)) if len(given) == 1 else given


def _any_requires_grad(
    gates: Sequence[Tensor], initial: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> bool:
    if initial.requires_grad or (bias is not None and bias.requires_grad):
        return True
    return any([each.requires_grad for each in (*gates, *weights)])  # a list takes less time than a generator


# Autograd. A call's tensors come in one order: starts, first, lengths, offsets, bias, initial, gates, weights.


class _Recurrence(Function):
    @staticmethod
    def forward(ctx: Any, text: str, numbers: tuple[int, ...], count: int, *given: Tensor | None) -> Tensor:
        output = _run(text, numbers, count, given)
        ctx.call = text, numbers, count
        ctx.save_for_backward(output, *given)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        made = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return _backward_of(ctx, grad_output, made)


class _TransformableRecurrence(Function):
    """The recurrence in the form that torch.func can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(text: str, numbers: tuple[int, ...], count: int, *given: Tensor | None) -> Tensor:
        return _run(text, numbers, count, given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call = inputs[:3]
        ctx.save_for_backward(output, *inputs[3:])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        return _backward_of(ctx, grad_output, _Gradients.apply)


class _Gradients(Function):
    """The backward pass, which can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        text: str, numbers: tuple[int, ...], count: int, wanted: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        return _gradients(text, numbers, count, wanted, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.wanted = inputs[:3], inputs[3]
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor) -> tuple[Any, ...]:
        grad_output, _, *given = ctx.saved_tensors
        places, learned = given[:PLACES], given[PLACES:]

        def first_gradients(grad_output: Tensor, *present: Tensor) -> tuple[Tensor, ...]:
            of = _definition(ctx.call, places, learned)
            found = iter(torch.func.vjp(of, *present)[1](grad_output))
            all_found = [None if t is None else next(found) for t in learned]
            return tuple(g for g, want in zip(all_found, ctx.wanted, strict=True) if want and g is not None)

        present = [t for t in learned if t is not None]
        vjp = torch.func.vjp(first_gradients, grad_output, *present)[1]
        if are_vectors(*grad_gradients):
            found = iter(one_by_one(lambda *of_one: vjp(of_one), *grad_gradients))
        else:
            found = iter(vjp(grad_gradients))
        of_output = next(found)
        none = (None,) * PLACES
        return None, None, None, None, of_output, None, *none, *(None if t is None else next(found) for t in learned)


def _run(text: str, numbers: tuple[int, ...], count: int, given: Sequence[Tensor | None]) -> Tensor:
    *places, bias, initial = given[: PLACES + 2]
    tensors = given[PLACES + 2 :]
    op = _recurrence if is_compiling() or transforms_active() else _recurrence_now
    output: Tensor = op(tensors[:count], initial, _by_gate(tensors[count:]), bias, *places, numbers, text)
    return output


def _definition(
    call: tuple[str, tuple[int, ...], int], places: Sequence[Tensor | None], learned: Sequence[Tensor | None]
) -> Callable[..., Tensor]:
    """The recurrence by operations that PyTorch can differentiate, of the tensors that are there among bias, initial,
    gates and weights."""
    text, numbers, count = call
    recurrence = Recurrence.parse(text)

    def run(*present: Tensor) -> Tensor:
        rest = iter(present)
        bias, initial, *tensors = (None if t is None else next(rest) for t in learned)
        assert initial is not None
        starts, *of_rows = places
        walk = _walk(numbers, initial, of_rows)
        gates, weights = tensors[:count], _by_gate(tensors[count:])

        def activation(x: Tensor) -> Tensor:
            return activate(recurrence.chain.activation, x, [])

        return naive(recurrence, gates, initial, weights, bias, starts, walk, activation)  # type: ignore[arg-type]

    return run


def _walk(numbers: Sequence[int], initial: Tensor, of_rows: Sequence[Tensor | None]) -> Walk:
    steps, of_sequence, of_step = numbers
    return Walk(initial.shape[0], steps, of_sequence, of_step, *of_rows)


def _backward_of(ctx: Any, grad_output: Tensor, gradients: Callable[..., tuple[Tensor, ...]]) -> tuple[Any, ...]:
    none, saved = (None,) * (3 + PLACES), ctx.saved_tensors
    wanted = needed(ctx, saved[1:])[len(none) :]

    def run(grad_output: Tensor) -> tuple[Tensor, ...]:
        return gradients(*ctx.call, wanted, grad_output, *saved)

    found = iter(one_by_one(run, grad_output) if are_vectors(grad_output) else run(grad_output))
    return *none, *(next(found) if want else None for want in wanted)


def _gradients(
    text: str, numbers: tuple[int, ...], count: int, wanted: Sequence[bool], *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of bias, initial, gates and weights that are wanted, in this order."""
    grad_output, output, starts, *given = tensors
    of_rows, (bias, initial), rest = given[: PLACES - 1], given[PLACES - 1 : PLACES + 1], given[PLACES + 1 :]
    assert output is not None and initial is not None
    gates, weights = rest[:count], [weight for weight in rest[count:] if weight is not None]
    by_gate = _by_gate(weights)
    made = _backward(grad_output, output, gates, initial, by_gate, bias, starts, *of_rows, numbers, text)
    of_gates, (beside, of_initial, *before) = made[:count], made[count:]
    wants_weights = wanted[2 + count :]
    of_weights: list[Tensor | None] = [None] * len(weights)
    if any(wants_weights):
        states: Parts = [(slice(None), *before)]
        if not before:
            walk = _walk(numbers, initial, of_rows)
            states = list(_states_before(_About(*_about(text)).reverse, output, initial, starts, walk))
        if len(weights) < len(by_gate):
            of_weights = [_joined_gradient(text, of_gates, beside, states)]
        else:
            of_weights = _weight_gradients(text, of_gates, beside, states, weights, wants_weights)
    of_bias = _sum_of_rows(beside) if wanted[0] else None
    found = of_bias, of_initial, *of_gates, *of_weights
    return tuple(g for g, want in zip(found, wanted, strict=True) if want and g is not None)


# Gradients of weights: products of what comes back to a gate's product, and of what went into it, summed over all rows.


class _About(NamedTuple):
    """What gradients of weights depend on of a recurrence."""

    hidden: int
    before: bool  # where the reset stands
    reverse: bool
    dense: bool
    product: str  # the chain of a gate's recurrent matrix alone
    tf32: bool


_known: dict[str, tuple[Any, ...]] = {}


def _about(text: str) -> tuple[Any, ...]:
    if text not in _known:
        recurrence = Recurrence.parse(text)
        chain = replace(recurrence.chain, bias=False, activation="identity")
        before = recurrence.reset == "before"
        _known[text] = _About(
            chain.out_features, before, recurrence.reverse, chain.is_dense, chain.text, recurrence.chain.tf32
        )
    return tuple(_known[text])


_about._dynamo_marked_constant = True  # type: ignore[attr-defined]

Parts = list[tuple[slice, Tensor]]  # rows, and what has gone into their products


def _weight_gradients(
    text: str,
    of_gates: Sequence[Tensor],
    beside: Tensor,
    states: Parts,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    about = _About(*_about(text))
    hidden, count = about.hidden, len(weights) // GATES

    def of_gate(first: int, last: int) -> Tensor:
        return of_gates[first] if len(of_gates) > 1 else of_gates[0][:, first * hidden : last * hidden]

    if about.dense and len(of_gates) == 1 and all(wanted[:2]):
        found: list[Tensor | None] = list(_dense_gradient(of_gate(0, 2), states, about.tf32).split(hidden))
        gates = [2]
    else:
        found, gates = [], list(range(GATES))
    for g in gates:
        if g < 2:
            grad, parts = of_gate(g, g + 1), states
        elif about.before:
            grad, parts = of_gate(2, 3), [(slice(None), beside)]
        else:
            grad, parts = beside, states
        wants = wanted[g * count : (g + 1) * count]
        if not any(wants):
            found += [None] * count
        elif about.dense:
            found.append(_dense_gradient(grad, parts, about.tf32))
        else:
            found += _structured_gradients(about.product, grad, parts, weights[g * count : (g + 1) * count], wants)
    return found


def _joined_gradient(text: str, of_gates: Sequence[Tensor], beside: Tensor, states: Parts) -> Tensor:
    """The gradient of the dense weights of all gates that lie in one tensor. Reset and update are one product where
    their gradients lie side by side: of these two, or, where our kernel makes it, which would copy them, of all three,
    of which the candidate's is another one."""
    about = _About(*_about(text))
    both = 2 * about.hidden
    of_candidate = of_gates[-1][:, -about.hidden :] if about.before else beside
    candidate = of_candidate, [(slice(None), beside)] if about.before else states
    if len(of_gates) == 1 and not is_compiling() and _is_fused(lambda: _gradient_of(of_gates[0], states), beside):
        made = _dense_gradient(of_gates[0], states, about.tf32)
        _dense_gradient(*candidate, about.tf32, made[both:])
        return made
    each = [(of_gates[0][:, :both], states)] if len(of_gates) == 1 else [(grad, states) for grad in of_gates[:2]]
    if is_compiling() or transforms_active():
        return torch.cat([_dense_gradient(grad, parts, about.tf32) for grad, parts in (*each, candidate)])
    made, at = beside.new_empty(GATES * about.hidden, about.hidden), 0
    for grad, parts in (*each, candidate):
        _dense_gradient(grad, parts, about.tf32, made[at : at + grad.shape[1]])
        at += grad.shape[1]
    return made


def _dense_product(x: Tensor, weight: Tensor, tf32: bool) -> Tensor:
    if _is_fused(lambda: product(alike(x.shape[0]), *weight.shape), x):
        return layer_ops.product(x, [weight], _dense_text(weight, tf32))
    return x @ weight.t()


def _sum_of_rows(x: Tensor) -> Tensor:
    """The gradient of a bias: of few rows or few columns PyTorch's sum takes a GPU 11 us, our kernel 3."""
    if not x.is_cuda or is_compiling() or transforms_active():
        return x.sum(0)
    sums: Tensor = torch.ops.factorlayer.weight_gradient(x, x, sums_text(x.shape[1]))
    return sums.view(-1)


class _InputProduct(Function):
    """F.linear of all rows, whose bias's gradient is _sum_of_rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = saved = ctx.saved_tensors
        of_x, of_weight, of_bias = needed(ctx, saved)
        recorded = torch.is_grad_enabled() or are_vectors(grad)
        return (
            grad @ weight if of_x else None,
            grad.t() @ x if of_weight else None,
            (grad.sum(0) if recorded else _sum_of_rows(grad)) if of_bias else None,
        )


def input_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of all rows that go to a recurrence."""
    known = not x.is_cuda or is_compiling() or transforms_active() or forward_ad._current_level >= 0
    if known or bias is None or not (torch.is_grad_enabled() and bias.requires_grad):
        return F.linear(x, weight, bias)
    made: Tensor = _InputProduct.apply(x, weight, bias)
    return made


def _dense_text(weight: Tensor, tf32: bool) -> str:
    """In TF32 if the recurrence is, or as PyTorch's products would be."""
    q, p = weight.shape
    allowed = tf32 or (weight.dtype == torch.float32 and tf32_allowed())
    return f"tied 0 1 {p} {q} 1" + "; tf32" * allowed


def _gradient_of(grad: Tensor, parts: Parts) -> RowsProduct:
    return gradient(grad.shape[1], parts[0][1].shape[1], alike(sum(len(x) for _, x in parts)))


def _adds_one_by_one(parts: Parts) -> bool:
    """Whether PyTorch's product on a CPU, which is MKL's, would add up all rows one after the other: of fewer than 12
    columns. Of thousands of rows it is off by 4 times as much as a step's products that are added up, and slower."""
    x = parts[0][1]
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64) or x.shape[1] >= 12 or transforms_active():
        return False
    return is_compiling() or sum(len(x) for _, x in parts) >= 256  # a graph serves any number


def _dense_gradient(grad: Tensor, parts: Parts, tf32: bool, into: Tensor | None = None) -> Tensor:
    (rows, x), *rest = parts
    # Of rows that lie apart our kernel would make a copy.
    is_fused = _is_fused(lambda: _gradient_of(grad, parts), x) and (multiplies_fused(x) or grad.is_contiguous())
    if is_fused or _adds_one_by_one(parts):
        weight = x.new_empty(grad.shape[1], x.shape[1]) if into is None else into  # of which nothing is read
        (found,) = _structured_gradients(_dense_text(weight, tf32), grad, parts, [weight], [True])
        assert found is not None
        return found if into is None else into.copy_(found)
    made = torch.mm(grad[rows].t(), x, out=into)
    for rows, x in rest:
        made = torch.addmm(made, grad[rows].t(), x) if into is None else made.addmm_(grad[rows].t(), x)
    return made


def _structured_gradients(
    product: str, grad: Tensor, parts: Parts, weights: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    places = [i for i, want in enumerate(wanted) if want]
    sums: list[Tensor] = []
    for rows, x in parts:
        if len(weights) > layer_ops.MOST_WANTED:
            made = torch.ops.factorlayer.stack_backward(grad[rows], x, weights, product, [i + 1 for i in places])
        else:
            bits = sum([4 << i for i in places])
            made = torch.ops.factorlayer.backward(grad[rows], x, weights, None, product, bits)
        sums = [a + b for a, b in zip(sums, made, strict=True)] if sums else list(made)
    by_place = dict(zip(places, sums, strict=True))
    return [by_place.get(i) for i in range(len(weights))]


def _states_before(
    reverse: bool, output: Tensor, initial: Tensor, starts: Tensor | None, walk: Walk
) -> Iterator[tuple[slice, Tensor]]:
    """The state before each row's step. Where all sequences have all steps and lie side by side, they are in the output
    one step before; else they are brought together."""
    rows, sequences = output.shape[0], walk.sequences
    irregular = any(each is not None for each in (starts, walk.first, walk.lengths, walk.offsets))
    if not (rows and walk.steps):
        yield slice(None), output
    elif irregular or (walk.of_sequence, walk.of_step) != (1, sequences) or rows != sequences * walk.steps:
        yield slice(None), _gathered(reverse, output, initial, starts, walk)
    elif reverse:
        yield slice(rows - sequences, rows), initial
        if rows > sequences:
            yield slice(0, rows - sequences), output[sequences:]
    else:
        yield slice(0, sequences), initial
        if rows > sequences:
            yield slice(sequences, rows), output[: rows - sequences]


def _gathered(reverse: bool, output: Tensor, initial: Tensor, starts: Tensor | None, walk: Walk) -> Tensor:
    """The states before all steps, brought together row by row. A row that belongs to no sequence keeps its own state,
    which is zero."""
    rows, there = walk.rows(initial)
    total = output.shape[0]
    toward = 1 if reverse else -1
    step = torch.arange(walk.steps, device=output.device)[:, None] + toward
    follows = (step >= 0) & (step < walk.steps)
    step = step.clamp(0, max(0, walk.steps - 1)).expand(rows.shape)
    follows = follows & there.gather(0, step)
    if starts is not None:
        follows = follows & ~starts[rows]
    own = total + torch.arange(walk.sequences, device=output.device)
    source = torch.arange(total + 1, device=output.device)  # the last one is of steps that are not there
    before = torch.where(follows, rows.gather(0, step), own)
    source = source.scatter(0, torch.where(there, rows, total).flatten(), before.flatten())
    return torch.cat([output, initial]).index_select(0, source[:total])


# On a GPU the products of all steps come first, then slopes of all steps, and then what goes back step by step.


@functools.cache
def through_text(text: str) -> str:
    """The text of the steps back, which depend on neither bias nor activation."""
    recurrence = Recurrence.parse(text)
    return replace(recurrence, chain=replace(recurrence.chain, bias=False, activation="identity")).text


def _backward_on_cuda(
    grad_output: Tensor,
    output: Tensor,
    gates: Sequence[Tensor],
    initial: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    starts: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    numbers: Sequence[int],
    text: str,
) -> list[Tensor]:
    """The gradients that the op returns on a CPU, and behind them the states before all rows' steps, of which gradients
    of weights are made."""
    about, count = _About(*_about(text)), len(weights) // GATES
    walk = _walk(numbers, initial, (first, lengths, offsets))
    parts = sorted(_states_before(about.reverse, output, initial, starts, walk), key=lambda part: part[0].start or 0)
    states = [each for _, each in parts]
    is_given = states[0] is output or states[0] is initial  # what an op returns is its own
    before = torch.cat(states) if len(states) > 1 or is_given else states[0]

    def of_gate(gate: int, x: Tensor) -> Tensor:
        mine = weights[gate * count : (gate + 1) * count]
        return _dense_product(x, mine[0], about.tf32) if about.dense else layer_ops.product(x, mine, about.product)

    beside = before
    joined = _joined(weights) if about.dense and not about.before else None
    if joined is not None:
        products = [_dense_product(before, joined, about.tf32)]
    else:
        products = [of_gate(0, before), of_gate(1, before)]
        if about.before:
            beside = torch.sigmoid(gates[0][:, : about.hidden] + products[0]) * before
        products.append(of_gate(2, beside))
    slopes = torch.ops.factorlayer.recurrence_slopes(gates, before, products, bias, text)
    places = starts, first, lengths, offsets
    made = torch.ops.factorlayer.recurrence_through(
        grad_output, slopes, initial, weights, *places, numbers, len(gates) == 1, through_text(text)
    )
    return [*made[:-1], *([beside] if about.before else []), made[-1], before]


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """Dense weights of all gates as the one tensor that they are parts of, if they lie there one behind another."""
    first, size = weights[0], weights[0].numel()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    for i, weight in enumerate(weights):
        together = weight.untyped_storage().data_ptr() == memory and weight.storage_offset() == begin + i * size
        if not together or not weight.is_contiguous():
            return None
    return first.as_strided((GATES * first.shape[0], first.shape[1]), (first.shape[1], 1))


# What PyTorch asks of an op: the shapes it returns, its FLOPs, and how it is mapped over a further dimension.


def _recurrence_fake(gates: Sequence[Tensor], initial: Tensor, *_: Any) -> Tensor:
    return initial.new_empty(gates[0].shape[0], initial.shape[1])


def _backward_fake(
    grad_output: Tensor, output: Tensor, gates: Sequence[Tensor], initial: Tensor, *_: Any
) -> list[Tensor]:
    before = [output] if output.is_cuda else []
    return [t.new_empty(t.shape) for t in (*gates, output, initial, *before)]


def _recurrence_flops(gate_shapes: Any, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    recurrence = Recurrence.parse(shapes[-1])
    return GATES * recurrence.chain.forward_flops(gate_shapes[0][0])


def _backward_flops(grad_shape: Any, output_shape: Any, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Gates that are computed again are not counted."""
    return GATES * Recurrence.parse(shapes[-1]).chain.forward_flops(output_shape[0])


def _mapped(op: Any, info: Any, in_dims: Any, arguments: Any) -> list[Any]:
    """One call for each index."""

    def pick(argument: Any, dims: Any, index: int) -> Any:
        if isinstance(argument, (list, tuple)) and isinstance(dims, (list, tuple)):
            return [pick(each, dim, index) for each, dim in zip(argument, dims, strict=True)]
        return argument.select(dims, index) if isinstance(argument, Tensor) and dims is not None else argument

    return [
        op(*(pick(argument, dims, i) for argument, dims in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]


def _recurrence_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    return torch.stack(_mapped(torch.ops.factorlayer.recurrence, info, in_dims, arguments)), 0


def _backward_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    made = _mapped(torch.ops.factorlayer.recurrence_backward, info, in_dims, arguments)
    gradients = [torch.stack(of_one) for of_one in zip(*made, strict=True)]
    return gradients, [0] * len(gradients)


if missing_extension is None:
    torch.library.impl("factorlayer::recurrence_backward", "cuda")(_backward_on_cuda)
    torch.library.register_fake("factorlayer::recurrence")(_recurrence_fake)
    torch.library.register_fake("factorlayer::recurrence_backward")(_backward_fake)
    torch.library.register_vmap("factorlayer::recurrence")(_recurrence_vmap)
    torch.library.register_vmap("factorlayer::recurrence_backward")(_backward_vmap)
    register_flop_formula(torch.ops.factorlayer.recurrence)(_recurrence_flops)
    register_flop_formula(torch.ops.factorlayer.recurrence_backward)(_backward_flops)
