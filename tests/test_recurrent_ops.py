"""The raw ops of a recurrence on a CPU, and what autograd makes of them, against the definition in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from oracle import DTYPES, PRELU, dtype_id, nearly, relative_errors
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from factorlayer import FactorGRU
from factorlayer.activations.named import activate
from factorlayer.autograd import recurrent_ops
from factorlayer.autograd.recurrent_ops import fused, why_not_fused
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import GATES, Recurrence, Reset
from factorlayer.maths.spec import Contraction, resolve
from factorlayer.maths.steps import Walk, naive

RESETS: tuple[Reset, ...] = ("after", "before")


def chain_of(structure: str, factors: tuple[int, int]) -> tuple[Chain, list[tuple[int, ...]]]:
    """A gate's recurrent matrix, and the shapes of its weights."""
    first, second = factors
    hidden = first * second
    if structure == "dense":
        return Chain((Contraction(0, 1, hidden, hidden, 1, tied=True),)), [(hidden, hidden)]
    if structure == "blocks":
        return Chain((Contraction(0, first, second, second, 1, tied=False),)), [(first, second, second)]
    if structure == "monarch":
        spec = resolve(hidden, hidden, "monarch", blocks=first)
    else:
        spec = resolve(hidden, hidden, "kronecker", factors=factors, rank=1 + (structure == "kronecker-2"))
    return Chain(spec.contractions, spec.terms), list(spec.weight_shapes)


STRUCTURES = ("dense", "blocks", "kronecker", "kronecker-2", "monarch")


@dataclass(frozen=True)
class Call:
    """What `fused` and `naive` are called with."""

    recurrence: Recurrence
    gates: list[Tensor]
    initial: Tensor
    weights: list[Tensor]
    bias: Tensor | None
    starts: Tensor | None
    walk: Walk

    def with_leaves(self, change: Callable[[Tensor], Tensor]) -> Call:
        return replace(
            self,
            gates=[change(gate) for gate in self.gates],
            initial=change(self.initial),
            weights=[change(weight) for weight in self.weights],
            bias=None if self.bias is None else change(self.bias),
        )

    def to(self, dtype: torch.dtype) -> Call:
        return self.with_leaves(lambda t: t.to(dtype))

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.gates, self.initial, *self.weights, *([] if self.bias is None else [self.bias])]

    def of(self, *leaves: Tensor) -> Call:
        rest = iter(leaves)
        return self.with_leaves(lambda _: next(rest))

    def fused(self) -> Tensor:
        return fused(self.recurrence, self.gates, self.initial, self.weights, self.bias, self.starts, self.walk)

    def naive(self) -> Tensor:
        name = self.recurrence.chain.activation
        given = (self.gates, self.initial, self.weights, self.bias, self.starts, self.walk)
        return naive(self.recurrence, *given, lambda x: activate(name, x, []))

    def arguments(self) -> tuple[object, ...]:
        """Those of the raw op."""
        walk = self.walk
        places = (self.starts, walk.first, walk.lengths, walk.offsets)
        return (
            self.gates, self.initial, self.weights, self.bias, *places, walk.numbers, self.recurrence.text,
        )  # fmt: skip


def walk_of(kind: str, sequences: int, steps: int) -> tuple[Walk, int]:
    """A walk, and how many rows it has."""
    rows = sequences * steps
    if kind == "by steps":
        return Walk(sequences, steps, 1, sequences), rows
    if kind == "by sequences":
        return Walk(sequences, steps, steps, 1), rows
    lengths = torch.tensor([(5 * i + 3) % (steps + 1) for i in range(sequences)])
    if kind == "ragged":  # sequences without padding, in rows of which some belong to none
        first = torch.cat([torch.ones(1, dtype=torch.int64), 1 + lengths.cumsum(0)[:-1]])
        return Walk(sequences, steps, 0, 1, first=first, lengths=lengths), int(lengths.sum()) + 2
    # as PackedSequence has them: the longest sequence first, and by steps
    lengths = lengths.sort(descending=True)[0]
    batches = (lengths > torch.arange(steps)[:, None]).sum(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batches.cumsum(0)[:-1]])
    return Walk(sequences, steps, 1, 0, lengths=lengths, offsets=offsets), int(lengths.sum())


def make_call(
    structure: str,
    factors: tuple[int, int] = (3, 4),
    sequences: int = 4,
    steps: int = 5,
    reset: Reset = "after",
    reverse: bool = False,
    kind: str = "by steps",
    starts: bool = False,
    together: bool = True,
    activation: str = "tanh",
) -> Call:
    """`together`: gates are one tensor."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    chain, shapes = chain_of(structure, factors)
    recurrence = Recurrence(replace(chain, bias=reset == "after", activation=activation), reset, reverse)
    hidden = recurrence.hidden
    walk, rows = walk_of(kind, sequences, steps)
    gates = [normal(rows, GATES * hidden)] if together else [normal(rows, hidden) for _ in range(GATES)]
    return Call(
        recurrence,
        gates,
        normal(sequences, hidden),
        [normal(*shape) / shape[-1] ** 0.5 for _ in range(GATES) for shape in shapes],
        normal(hidden) if reset == "after" else None,
        torch.rand(rows, generator=generator) < 0.2 if starts else None,
        walk,
    )


def results(call: Call, run: Callable[[Call], Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The output and the gradients of all that has one."""
    call = call.with_leaves(lambda t: t.detach().requires_grad_())
    output = run(call)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.autograd.grad(output, call.leaves, grad.to(output))
    return {"output": output.detach()} | {f"gradient {i}": g for i, g in enumerate(found)}


def check(call: Call, dtype: torch.dtype = torch.float64) -> None:
    """The rule of oracle.py: beside the definition in float64 it is off by twice what the definition is in its own
    dtype, and 4 eps. In float64, where that is the reference, sums may be ordered in another way."""
    given = call.to(dtype)
    right = results(given.to(torch.float64), Call.naive)
    found, of_naive = results(given, Call.fused), results(given, Call.naive)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, dtype) for n, t in right.items()}
    errors, allowed = relative_errors([found], [right]), relative_errors([of_naive], [right])
    longest = max(call.recurrence.hidden, call.gates[0].shape[0]) if dtype == torch.float64 else 1
    slack = 4 * longest**0.5 * torch.finfo(dtype).eps
    wrong = {n: (error, allowed[n]) for n, error in errors.items() if not error <= 2 * allowed[n] + slack}
    assert not wrong


WAYS = list(itertools.product(RESETS, (False, True), ("by steps", "by sequences", "ragged", "packed")))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_against_the_definition(structure: str) -> None:
    for i, (reset, reverse, kind) in enumerate(WAYS):
        for starts in (False, True):
            check(make_call(structure, (3, 4), 5, 6, reset, reverse, kind, starts, together=i % 2 == 0))


@pytest.mark.parametrize(
    ("factors", "sequences", "steps"), [((2, 3), 1, 1), ((8, 9), 20, 3), ((10, 15), 3, 24), ((5, 70), 18, 3)]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_sizes(structure: str, factors: tuple[int, int], sequences: int, steps: int) -> None:
    """Of one step, more sequences than are taken together, panels with a rest, and gates of several steps computed at
    once."""
    for reset, kind in zip(RESETS, ("by steps", "ragged"), strict=True):
        check(make_call(structure, factors, sequences, steps, reset, kind=kind, starts=steps > 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_dtypes(structure: str, dtype: torch.dtype) -> None:
    for reset in RESETS:
        check(make_call(structure, (4, 9), 6, 7, reset, kind="ragged", starts=True), dtype)


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu"])
def test_activations(activation: str) -> None:
    for structure, reset in zip(("dense", "kronecker"), RESETS, strict=True):
        check(make_call(structure, reset=reset, activation=activation))


def test_gradients_of_some() -> None:
    call = make_call("kronecker")
    right = results(call, Call.naive)
    for i, leaf in enumerate(call.leaves):
        leaf.requires_grad_()
        output = call.fused()
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (found,) = torch.autograd.grad(output, [leaf], grad)
        assert nearly(found, right[f"gradient {i}"])
        leaf.requires_grad_(False)


def threads(counts: tuple[int, ...]) -> Iterator[int]:
    for count in counts:
        torch.set_num_threads(count)
        yield count


def raw(call: Call) -> list[Tensor]:
    arguments = call.arguments()
    output = torch.ops.factorlayer.recurrence(*arguments)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    return [output, *torch.ops.factorlayer.recurrence_backward(grad, output, *arguments)]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize(
    ("structure", "factors", "sequences", "steps"),
    [
        ("dense", (16, 16), 1, 24),  # threads share its columns
        ("dense", (16, 17), 20, 3),
        ("dense", (16, 17), 3, 2),  # weights are read where they lie
        ("blocks", (6, 64), 20, 4),
        ("monarch", (8, 8), 40, 10),
        ("kronecker", (16, 16), 40, 4),
    ],
)
def test_the_same_bits_in_every_run_and_for_any_number_of_threads(
    structure: str, factors: tuple[int, int], sequences: int, steps: int, reset: Reset
) -> None:
    call = make_call(structure, factors, sequences, steps, reset, kind="ragged", starts=True).to(torch.float32)
    call = replace(call, walk=replace(call.walk, lengths=None, first=torch.arange(sequences) * steps))
    rows = sequences * steps
    generator = torch.Generator().manual_seed(1)
    call = replace(call, gates=[torch.randn(rows, GATES * call.recurrence.hidden, generator=generator)], starts=None)
    runs = [raw(call) for _ in threads((1, 1, 2, 3, 5))]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_threads_that_share_columns_are_right() -> None:
    torch.set_num_threads(2)
    for reset in RESETS:
        check(make_call("dense", (16, 17), 2, 20, reset, kind="ragged", starts=True), torch.float32)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nan_stays_in_its_sequence(structure: str) -> None:
    for reset, dtype in itertools.product(RESETS, (torch.float32, torch.bfloat16)):
        call = make_call(structure, (4, 5), 18, 4, reset, kind="by sequences").to(dtype)
        clean = raw(call)
        call.gates[0][2 * 4 + 1, 7] = float("nan")
        found = raw(call)
        assert found[0][2 * 4 + 1 : 3 * 4].isnan().any(1).all()
        others = [i for i in range(18 * 4) if i // 4 != 2]
        for a, b in zip(found[:-1], clean[:-1], strict=True):
            assert torch.equal(a[others], b[others])
        others = [i for i in range(18) if i != 2]
        assert torch.equal(found[-1][others], clean[-1][others])


@pytest.mark.parametrize("structure", ["dense", "monarch"])
def test_nothing_to_do(structure: str) -> None:
    """No steps, no sequences, or sequences without steps: rows are zero, and the initial states have no gradient."""
    for sequences, steps, rows in ((3, 0, 0), (0, 4, 0), (0, 4, 2), (3, 0, 2)):
        call = make_call(structure, sequences=1)
        call = replace(
            call,
            gates=[torch.randn(rows, GATES * 12, dtype=torch.float64)],
            initial=torch.randn(sequences, 12, dtype=torch.float64),
            walk=Walk(sequences, steps, 1, sequences),
        )
        found = results(call, Call.fused)
        assert not any(each.any() for each in found.values())
    call = make_call(structure)
    call = replace(call, walk=replace(call.walk, lengths=torch.zeros(4, dtype=torch.int64)))
    assert not any(each.any() for each in results(call, Call.fused).values())


def test_the_operands_may_lie_anywhere() -> None:
    for structure in STRUCTURES:
        call = make_call(structure, kind="packed")
        spread = call.with_leaves(lambda t: torch.stack([t, t.new_full(t.shape, float("nan"))], -1)[..., 0])
        assert all(torch.equal(a, b) for a, b in zip(raw(call), raw(spread), strict=True))


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, gates=[]), "three tensors"),
        (lambda c: replace(c, gates=c.gates * 2), "three tensors"),
        (lambda c: replace(c, gates=[c.gates[0][:, :-1]]), "a gate must be"),
        (lambda c: replace(c, gates=[c.gates[0].float()]), "of another dtype"),
        (lambda c: replace(c, initial=c.initial[:, :-1]), "the initial state must be"),
        (lambda c: replace(c, initial=c.initial.float()), "of another dtype"),
        (lambda c: replace(c, initial=c.initial[0]), "initial state"),
        (lambda c: replace(c, weights=c.weights[:-1]), "weights of each of its three gates"),
        (lambda c: replace(c, weights=[w[..., :-1] for w in c.weights]), "a weight must be"),
        (lambda c: replace(c, bias=None), "bias and chain disagree"),
        (lambda c: replace(c, bias=c.bias[:-1]), "bias must be"),
        (lambda c: replace(c, starts=torch.zeros(3, dtype=torch.bool)), "starts must be bool"),
        (lambda c: replace(c, starts=torch.zeros(20)), "starts must be bool"),
        (lambda c: replace(c, walk=replace(c.walk, steps=-1)), "none of them negative"),
        (lambda c: replace(c, walk=replace(c.walk, steps=6)), "must have a row each"),
        (lambda c: replace(c, walk=replace(c.walk, of_step=5)), "has no row among"),
        (lambda c: replace(c, walk=replace(c.walk, of_step=1)), "which another step has"),
        (lambda c: replace(c, walk=replace(c.walk, of_step=1 << 62)), "has no row among"),
        (lambda c: replace(c, walk=replace(c.walk, first=torch.tensor([0, 1, 2, -1]))), "has no row among"),
        (lambda c: replace(c, walk=replace(c.walk, first=torch.tensor([0, 1, 2]))), "first must be int64"),
        (lambda c: replace(c, walk=replace(c.walk, first=torch.zeros(4))), "first must be int64"),
        (lambda c: replace(c, walk=replace(c.walk, first=torch.zeros(4, dtype=torch.int64))), "which another step has"),
        (lambda c: replace(c, walk=replace(c.walk, lengths=torch.tensor([5, 5, 5, 6]))), "must have 0 to 5 steps"),
        (lambda c: replace(c, walk=replace(c.walk, lengths=torch.tensor([5, 5, 5, -1]))), "must have 0 to 5 steps"),
        (lambda c: replace(c, walk=replace(c.walk, offsets=torch.tensor([0, 4, 8, 12, 17]))), "has no row among"),
        (lambda c: replace(c, walk=replace(c.walk, offsets=torch.tensor([0, 4, 8, 12]))), "offsets must be int64"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused(change: Callable[[Call], Call], message: str) -> None:
    call = make_call("dense")
    output = torch.ops.factorlayer.recurrence(*call.arguments())
    arguments = change(call).arguments()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.factorlayer.recurrence(*arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.factorlayer.recurrence_backward(output, output, *arguments)


def test_gradients_of_another_size_are_refused() -> None:
    call = make_call("dense")
    output = torch.ops.factorlayer.recurrence(*call.arguments())
    for grad, given, name in ((output[1:], output, "grad_output"), (output, output.float(), "output")):
        with pytest.raises(RuntimeError, match=f"{name} must be"):
            torch.ops.factorlayer.recurrence_backward(grad, given, *call.arguments())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "should begin with"),
        ("tied 0 1 12 12 1", "should begin with"),
        ("gru after", "should begin with"),
        ("gru between; tied 0 1 12 12 1", "should begin with"),
        ("gru after reversed twice; tied 0 1 12 12 1", "should begin with"),
        ("gru after; tied 0 1 12 6 1", "as many outputs as inputs"),
        ("gru after; tied 0 1 12 12 1; backward", "make a gate's recurrent matrix"),
        ("gru before; tied 0 1 12 12 1; bias", "should be added to the gates"),
        ("gru after; tied 0 1 12 12", "needs a weight index"),
        ("gru after; tied 7 1 12 12 1; bias; tanh", "which was not given"),
        (f"gru after; tied 0 1 12 12 1; bias; {PRELU}", "must have no parameters"),
        ("gru after; tied 0 1 12 12 1; bias; cosine", "unknown stage"),
    ],
)
def test_a_wrong_text_is_refused(text: str, message: str) -> None:
    *arguments, _ = make_call("dense").arguments()
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.ops.factorlayer.recurrence(*arguments, text)


def test_why_not() -> None:
    call = make_call("dense")
    assert why_not_fused(call.recurrence, call.initial) is None
    learned = Recurrence(replace(call.recurrence.chain, activation=PRELU))
    assert "activation learns" in str(why_not_fused(learned, call.initial))
    assert "has kernels for" in str(why_not_fused(call.recurrence, call.initial.to(torch.complex64)))


# PyTorch's world


@pytest.mark.parametrize("structure", ["dense", "monarch"])
def test_opcheck(structure: str) -> None:
    call = make_call(structure, (2, 3), 3, 2, kind="ragged", starts=True)
    arguments = call.arguments()
    torch.library.opcheck(torch.ops.factorlayer.recurrence, arguments)
    output = torch.ops.factorlayer.recurrence(*arguments)
    torch.library.opcheck(torch.ops.factorlayer.recurrence_backward, (torch.ones_like(output), output, *arguments))


@pytest.mark.parametrize("reset", RESETS)
def test_gradcheck(reset: Reset) -> None:
    call = make_call("kronecker", (2, 2), 2, 3, reset, kind="ragged", starts=True)
    leaves = [leaf.requires_grad_() for leaf in call.leaves]
    assert torch.autograd.gradcheck(lambda *leaves: call.of(*leaves).fused(), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *leaves: call.of(*leaves).fused(), leaves, fast_mode=True)


def test_several_vectors_at_once() -> None:
    call = make_call("dense", (2, 2), 2, 2).with_leaves(torch.Tensor.requires_grad_)
    jacobian = torch.autograd.functional.jacobian

    def run(initial: Tensor) -> Tensor:
        return replace(call, initial=initial).fused()

    assert nearly(jacobian(run, call.initial, vectorize=True), jacobian(run, call.initial))


def test_transforms_of_torch_func() -> None:
    call = make_call("monarch", (2, 3), 2, 3, kind="ragged", starts=True)
    leaves = call.leaves
    places = tuple(range(len(leaves)))

    def loss(run: Callable[[Call], Tensor]) -> Callable[..., Tensor]:
        return lambda *leaves: run(call.of(*leaves)).sin().sum()

    right = torch.func.grad(loss(Call.naive), argnums=places)(*leaves)
    assert all(map(nearly, torch.func.grad(loss(Call.fused), argnums=places)(*leaves), right))
    models = [torch.stack([leaf, leaf.flip(0)]) for leaf in leaves]
    mapped = torch.func.vmap(torch.func.grad(loss(Call.fused), argnums=places))(*models)
    flipped = torch.func.grad(loss(Call.naive), argnums=places)(*[leaf.flip(0) for leaf in leaves])
    for found, first, second in zip(mapped, right, flipped, strict=True):
        assert nearly(found[0], first)
        assert nearly(found[1], second)


def test_compiled_whole() -> None:
    call = make_call("monarch", (2, 3), 2, 3, kind="ragged", starts=True)
    right = results(call, Call.fused)
    compiled = torch.compile(lambda *leaves: call.of(*leaves).fused(), fullgraph=True, backend="aot_eager")
    found = results(call, lambda call: compiled(*call.leaves))
    assert all(nearly(found[name], right[name]) for name in right)


def test_no_numbers_are_needed_for_shapes() -> None:
    call = make_call("monarch", together=False).with_leaves(lambda t: t.to("meta"))
    found = results(call, Call.fused)
    assert found["output"].is_meta
    assert [g.shape for g in list(found.values())[1:]] == [leaf.shape for leaf in call.leaves]


def test_flops() -> None:
    """Forward, and of as many again gradients of what goes into products, and of weights."""
    call = make_call("blocks", (3, 4), 2, 5).with_leaves(torch.Tensor.requires_grad_)
    with FlopCounterMode(display=False) as counter:
        call.fused().sum().backward()
    assert counter.get_total_flops() == 3 * GATES * 2 * (2 * 5) * 3 * 4 * 4


def test_a_trace_has_no_gradients() -> None:
    call = make_call("dense").with_leaves(torch.Tensor.requires_grad_)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot keep the gradients"):
        torch.jit.trace(lambda initial: replace(call, initial=initial).fused(), (call.initial,))


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("transformed", [True, False])
def test_dense_weights_may_lie_in_one_tensor(reset: Reset, together: bool, transformed: bool) -> None:
    call = make_call("dense", reset=reset, reverse=True, kind="ragged", starts=True, together=together)

    def loss(weights: Tensor) -> Tensor:
        return replace(call, weights=[weights]).fused().sin().sum()

    def right(weights: Tensor) -> Tensor:
        return replace(call, weights=list(weights.chunk(GATES))).naive().sin().sum()

    joined = torch.cat(call.weights).requires_grad_()
    if transformed:
        assert nearly(torch.func.grad(loss)(joined), torch.func.grad(right)(joined))
        return
    found = []
    for run in (loss, right):
        (first,) = torch.autograd.grad(run(joined), joined, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), joined)))
    assert all(map(nearly, *found))


def test_parts_of_one_tensor_are_known() -> None:
    joined = torch.randn(6, 2)
    parts = list(joined.chunk(GATES))
    assert recurrent_ops._joined(parts).data_ptr() == joined.data_ptr()
    assert torch.equal(recurrent_ops._joined(parts), joined)
    apart = [parts[0], parts[2], parts[1]], [parts[0], parts[1], parts[2].clone()], [part.t() for part in parts]
    assert all(recurrent_ops._joined(each) is None for each in apart)


def test_states_before_steps_are_taken_where_they_lie() -> None:
    output, initial = torch.randn(12, 4), torch.randn(3, 4)
    for reverse in (False, True):
        parts = list(recurrent_ops._states_before(reverse, output, initial, None, Walk(3, 4, 1, 3)))
        assert [x.data_ptr() for _, x in parts] == [initial.data_ptr(), output[3 * reverse :].data_ptr()]


@pytest.mark.parametrize("hidden", [3, 8, 11])
def test_sums_over_many_rows_are_as_exact_as_step_by_step(hidden: int) -> None:
    """Of few columns MKL adds up thousands of rows one after the other."""
    torch.manual_seed(hidden)
    gru = FactorGRU(4, hidden)
    exact = copy.deepcopy(gru).double()
    errors = dict.fromkeys(("fused", "batched"), 0.0)
    for _ in range(4):
        x, grad = torch.randn(100, 64, 4), torch.randn(100, 64, hidden)
        exact.implementation = "naive"
        (right,) = torch.autograd.grad(exact(x.double())[0], exact.weight_hh_l0, grad.double())
        for name in errors:
            gru.implementation = name
            (found,) = torch.autograd.grad(gru(x)[0], gru.weight_hh_l0, grad)
            errors[name] += float((found - right).norm() / right.norm())
    assert errors["fused"] < 1.5 * errors["batched"]
