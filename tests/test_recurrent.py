"""FactorGRU and FactorGRUCell: what they compute, against a loop over dense matrices and against nn.GRU."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from gru import unrolled
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, unpack_sequence

from factorlayer import CompileError, Expression, FactorGRU, FactorGRUCell
from factorlayer.autograd import recurrent_ops
from factorlayer.recurrences import gated

KINDS = {
    "dense": dict(),
    "kronecker": dict(structure="kronecker", factors=(2, 3), input_factors=(5, 1)),
    "rank": dict(structure="kronecker", factors=((2, 3), (3, 2)), rank=2, input_structure="dense"),
    "three": dict(structure="kronecker", factors=(1, 2, 3), input_factors=(1, 5, 1), bias=False),
    "monarch": dict(structure="monarch", blocks=2, rank=2, input_structure="dense"),
    "blocks": dict(structure="blocks", blocks=3, input_structure="kronecker", input_factors=(1, 5)),
    "inputs": dict(input_structure="kronecker", factors=(3, 2), input_factors=(5, 1)),
    "before": dict(reset="before", activation="silu"),
    "norm": dict(norm="layer", learned_initial=True),
    "all": dict(
        structure="kronecker", factors=(2, 3), input_factors=(5, 1), rank=2, reset="before", norm="layer",
        activation=nn.PReLU(), learned_initial=True, num_layers=2, bidirectional=True,
    ),
    "deep": dict(structure="blocks", blocks=2, input_structure="dense", num_layers=3, learned_initial=True),
    "both-ways": dict(structure="monarch", blocks=2, input_structure="dense", bidirectional=True, reset="before"),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)
each_implementation = pytest.mark.parametrize("implementation", ["naive", "batched", "auto"])
LENGTHS = (3, 0, 5, 1)


def gru(kind: str, **more: object) -> FactorGRU:
    """With parameters that are all of one size, so that none is lost in the others' sums."""
    torch.manual_seed(0)
    made = FactorGRU(5, 6, dtype=torch.float64, **copy.deepcopy({**KINDS[kind], **more}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.6 * torch.randn_like(parameter))
    return made


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def drawn_starts(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape) < 0.4


@each_kind
@each_implementation
@pytest.mark.parametrize("given", ["", "state", "starts"])
def test_is_its_definition(kind: str, implementation: str, given: str) -> None:
    """Output, state, and all gradients."""
    module = gru(kind, implementation=implementation)
    x = normal(3, 2, 5).requires_grad_()
    hx = normal(len(module.cells), 2, 6).requires_grad_() if given == "state" else None
    starts = torch.tensor([[True, False], [False, False], [False, True]]) if given == "starts" else None
    leaves = [x, *module.parameters(), *([] if hx is None else [hx])]

    found = module(x, hx, starts=starts)
    outputs, states = unrolled(module, x.unbind(1), hx, None if starts is None else starts.unbind(1))
    right = torch.stack(outputs, 1), states
    torch.testing.assert_close(found, right)
    grads = [torch.randn_like(each) for each in right]
    # Of a learned initial state that no sequence begins with there is no gradient.
    got, wanted = (torch.autograd.grad(y, leaves, grads, materialize_grads=True) for y in (found, right))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["dense", "kronecker", "all"])
@each_implementation
@pytest.mark.parametrize("layout", ["batch-first", "cu_seqlens", "packed", "packed-sorted", "unbatched"])
def test_layouts(kind: str, implementation: str, layout: str) -> None:
    """Sequences of different length, none of them padded, with states and starts, and their gradients."""
    module = gru(kind, implementation=implementation, batch_first=layout == "batch-first")
    lengths = {"batch-first": (3, 3), "unbatched": (4,), "cu_seqlens": LENGTHS}.get(layout, (2, 4, 1))
    lengths = tuple(sorted(lengths, reverse=True)) if layout == "packed-sorted" else lengths
    sequences = [normal(length, 5).requires_grad_() for length in lengths]
    hx = normal(len(module.cells), len(lengths), 6).requires_grad_()
    starts = [drawn_starts((length,)) for length in lengths]
    leaves = [*sequences, hx, *module.parameters()]

    if layout == "batch-first":
        y, h = module(torch.stack(sequences), hx, starts=torch.stack(starts))
        outputs = list(y)
    elif layout == "unbatched":
        y, h = module(sequences[0], hx[:, 0], starts=starts[0])
        outputs, h = [y], h[:, None]
    elif layout == "cu_seqlens":
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        y, h = module(torch.cat(sequences), hx, starts=torch.cat(starts), cu_seqlens=bounds)
        outputs = list(y.split(lengths))
    else:
        packed, mask = (pack_sequence(s, enforce_sorted=layout == "packed-sorted") for s in (sequences, starts))
        y, h = module(packed, hx, starts=mask)
        assert isinstance(y, PackedSequence)
        outputs = unpack_sequence(y)
    right, states = unrolled(module, sequences, hx, starts)
    torch.testing.assert_close((outputs, h), (right, states))
    if layout == "packed-sorted":  # another way to say the same
        again = pack_sequence(starts, enforce_sorted=False)
        torch.testing.assert_close(module(packed, hx, starts=again)[1], states)
    y, right = torch.cat(outputs), torch.cat(right)
    grads = torch.randn_like(y), torch.randn_like(h)
    got, wanted = (
        torch.autograd.grad(made, leaves, grads, materialize_grads=True) for made in ((y, h), (right, states))
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["dense", "kronecker", "norm", "both-ways"])
@each_implementation
def test_max_seqlen_is_the_length_of_the_longest_one_or_more(kind: str, implementation: str) -> None:
    module = gru(kind, implementation=implementation)
    bounds, x = torch.tensor([0, *itertools.accumulate(LENGTHS)]), normal(9, 5)
    right = module(x, cu_seqlens=bounds)
    for most in (max(LENGTHS), 7, np.int64(7)):
        torch.testing.assert_close(module(x, cu_seqlens=bounds, max_seqlen=most), right)
    if (implementation, kind) != ("batched", "dense"):  # PyTorch's op knows no rows of no sequence
        y, h = module(torch.cat([x, x]), cu_seqlens=bounds, max_seqlen=7)
        torch.testing.assert_close((y[:9], h), right)
        assert not y[9:].any()
    y, h = module(x[:0], cu_seqlens=torch.zeros(3, dtype=torch.int32), max_seqlen=2)
    assert y.shape == (0, 6 * (1 + module.bidirectional)) and h.shape == (len(module.cells), 2, 6)


@pytest.mark.parametrize("kind", ["dense", "kronecker", "three", "deep", "inputs"])
@pytest.mark.parametrize("layout", ["steps", "batch-first", "cu_seqlens", "packed"])
def test_pytorchs_op_with_matrices_multiplied_out(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What batched runs on a GPU."""
    module = gru(kind, implementation="naive", batch_first=layout == "batch-first")
    sequences = [normal(length, 5).requires_grad_() for length in (2, 4, 1)]
    x, given = normal(3, 4, 5).requires_grad_(), {}
    if layout == "cu_seqlens":
        x, given = torch.cat([*sequences, sequences[0][:0]]), {"cu_seqlens": torch.tensor([0, 2, 6, 7, 7])}
    elif layout == "packed":
        x = pack_sequence(sequences, enforce_sorted=False)
    leaves = [*(sequences if given or layout == "packed" else [x]), *module.parameters()]

    def results() -> list[Tensor]:
        y, h = module(x, **given)
        y = y.data if isinstance(y, PackedSequence) else y
        return [y, h, *torch.autograd.grad(y.square().sum() + h.sum(), leaves, retain_graph=True)]

    right = results()
    module.implementation = "batched"
    monkeypatch.setattr(gated.Gated, "_is_left_to_pytorch", lambda self, _: self._is_gru)
    monkeypatch.setattr(gated, "batched", None)  # no step by step
    torch.testing.assert_close(results(), right)


PLAIN = [
    dict(),
    dict(num_layers=2, bidirectional=True),
    dict(bias=False, num_layers=2),
    dict(batch_first=True, bidirectional=True),
]


@pytest.mark.parametrize("implementation", ["naive", "batched", "auto"])
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: "-".join(kind) or "plain")
def test_takes_the_place_of_nn_gru(kind: dict, implementation: str) -> None:
    """From the same seed, with the same state_dict, for every kind of input."""
    torch.manual_seed(0)
    theirs = nn.GRU(5, 6, dtype=torch.float64, **kind)
    torch.manual_seed(0)
    ours = FactorGRU(5, 6, dtype=torch.float64, implementation=implementation, **kind)
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=0)
    torch.testing.assert_close(ours.all_weights, theirs.all_weights, rtol=0, atol=0)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    sequences = [normal(length, 5) for length in (2, 4, 3)]
    shape = (len(ours.cells), 3, 6)
    full = normal(3, 4, 5) if ours.batch_first else normal(4, 3, 5)
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=ours.batch_first)
    for x, hx in (
        (full, normal(*shape)),
        (full, None),
        (normal(4, 5), normal(shape[0], 6)),
        (normal(1, 5), None),
        (pack_sequence(sequences, enforce_sorted=False), normal(*shape)),
        (pack_padded_sequence(padded, torch.tensor([2, 4, 3]), ours.batch_first, False), None),
        (pack_sequence([normal(2, 5)] * 3), normal(*shape)),
    ):
        (y, h), (y2, h2) = ours(x, hx), theirs(x, hx)
        if isinstance(x, PackedSequence):
            for a, b in zip(y[1:], y2[1:], strict=True):
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
            y, y2 = y.data, y2.data
        torch.testing.assert_close((y, h), (y2, h2))


def test_flatten_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, nn.GRU's, of what that would flatten; structured parameters stay where they are."""
    flattened = []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: flattened.append(list(self._flat_weights)))
    theirs = nn.GRU(5, 6, 2, bidirectional=True)
    ours = FactorGRU.from_gru(theirs)
    ours.double()
    for found, right in zip(flattened[-1], theirs._flat_weights, strict=True):
        torch.testing.assert_close(found, right.double(), rtol=0, atol=0)
    flattened.clear()
    gru("kronecker").float().flatten_parameters()
    assert not flattened


@each_implementation
def test_dropout_is_between_layers(implementation: str) -> None:
    """Of all of a layer's outputs nothing is left for the next one; in eval mode, nothing is dropped."""
    module = gru("deep", dropout=1.0, implementation=implementation)
    x = normal(4, 3, 5)
    y, _ = module(x)
    again, _ = module(normal(4, 3, 5))
    torch.testing.assert_close(y, again)
    module.eval()
    outputs, states = unrolled(module, x.unbind(1))
    torch.testing.assert_close(module(x), (torch.stack(outputs, 1), states))


@each_kind
@each_implementation
def test_nothing_to_do(kind: str, implementation: str) -> None:
    """No steps: the state stays as it was. No sequences: none come back."""
    module = gru(kind, implementation=implementation)
    directions = 1 + module.bidirectional
    hx = normal(len(module.cells), 3, 6)
    y, h = module(normal(0, 3, 5), hx)
    assert y.shape == (0, 3, 6 * directions) and torch.equal(h, hx)
    y.sum().backward()  # which finds nothing to do either
    y, h = module(normal(0, 3, 5), hx, starts=torch.zeros(0, 3, dtype=torch.bool))
    assert y.shape == (0, 3, 6 * directions) and torch.equal(h, hx)
    y, h = module(normal(4, 0, 5))
    assert y.shape == (4, 0, 6 * directions) and h.shape == (len(module.cells), 0, 6)
    none = torch.zeros(0, dtype=torch.bool)
    for more in ({}, dict(starts=none), dict(starts=none, max_seqlen=2)):
        y, h = module(normal(0, 5), hx, cu_seqlens=torch.zeros(4, dtype=torch.int64), **more)
        assert y.shape == (0, 6 * directions) and torch.equal(h, hx)
    y, h = module(normal(0, 5), cu_seqlens=torch.zeros(1, dtype=torch.int64))
    assert y.shape == (0, 6 * directions) and h.shape == (len(module.cells), 0, 6)


@each_implementation
@pytest.mark.parametrize("layout", ["packed", "cu_seqlens"])
def test_any_default_device(layout: str, implementation: str) -> None:
    """What a call makes beside its tensors is where these are."""
    module, sequences = gru("dense", implementation=implementation), [normal(n, 5) for n in (4, 1, 2)]
    if layout == "packed":
        packed = pack_sequence(sequences, enforce_sorted=False)
        call = lambda: module(packed)[1]  # noqa: E731
    else:
        x, bounds = torch.cat(sequences), torch.tensor([0, 4, 5, 7])
        call = lambda: module(x, cu_seqlens=bounds)[1]  # noqa: E731
    right = call()
    with torch.device("meta"):
        found = call()
    torch.testing.assert_close(found, right)


@each_kind
@each_implementation
def test_the_last_state_is_memory_of_its_own(kind: str, implementation: str) -> None:
    """As nn.GRU's: a rollout that sets ended episodes' states to zero changes neither output nor the state before."""
    module = gru(kind, implementation=implementation)
    hx = normal(len(module.cells), 3, 6)
    with torch.no_grad():
        for x in (normal(4, 3, 5), normal(1, 3, 5), normal(0, 3, 5)):
            y, h = module(x, hx)
            kept = y.clone(), hx.clone()
            h[:, 0] = 0.0
            torch.testing.assert_close((y, hx), kept, rtol=0, atol=0)
            assert h.untyped_storage().nbytes() == h.nbytes  # nor does it keep the output alive
        _, h = module(normal(0, 3, 5))
        h += 1  # not the learned initial state
        assert h.is_contiguous() and not torch.equal(module(normal(0, 3, 5))[1], h)


@each_kind
@each_implementation
def test_nan_stays_in_its_sequence(kind: str, implementation: str) -> None:
    """In outputs, states and gradients."""
    module = gru(kind, implementation=implementation)
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    x, hx = normal(9, 5), normal(len(module.cells), 4, 6)
    x[1] = torch.nan  # of the first sequence, which has three steps
    x.requires_grad_()
    hx.requires_grad_()
    y, h = module(x, hx, cu_seqlens=bounds)
    assert y[1:3].isnan().any() and not y[3:].isnan().any() and not h[:, 1:].isnan().any()
    grad_x, grad_hx = torch.autograd.grad([y, h], [x, hx], [torch.ones_like(y), torch.ones_like(h)])
    assert grad_x[0].isnan().any() and not grad_x[3:].isnan().any() and not grad_hx[:, 1:].isnan().any()


@pytest.mark.parametrize("kind", ["dense", "kronecker", "monarch", "before", "norm"])
def test_gradcheck(kind: str) -> None:
    """Also of second derivatives, by the way that every kind of module takes."""
    module = gru(kind, implementation="auto")
    x, hx = normal(2, 2, 5).requires_grad_(), normal(len(module.cells), 2, 6).requires_grad_()
    names = [name for name, _ in module.named_parameters()]
    starts = torch.tensor([[True, False], [False, True]])
    function = lambda x, hx, *p: torch.func.functional_call(  # noqa: E731
        module, dict(zip(names, p, strict=True)), (x, hx), {"starts": starts}
    )
    inputs = (x, hx, *module.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


CELLS = {name: kind for name, kind in KINDS.items() if not {"num_layers", "bidirectional"} & set(kind)}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("implementation", ["naive", "batched", "auto"])
def test_a_cell_is_one_step(kind: str, implementation: str) -> None:
    module = gru(kind, implementation=implementation)
    cell = FactorGRUCell(5, 6, dtype=torch.float64, implementation=implementation, **copy.deepcopy(KINDS[kind]))
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in module.state_dict().items()})
    x, hx = normal(3, 5), normal(3, 6)
    for state in (hx, None):
        made = cell(x, state)
        torch.testing.assert_close(made, module(x[None], None if state is None else state[None])[0][0])
    torch.testing.assert_close(cell(x[0], hx[0]), cell(x, hx)[0])
    assert cell(x[:0]).shape == cell(x[:0], hx[:0]).shape == (0, 6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_takes_the_place_of_nn_grucell(bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.GRUCell(5, 6, bias, dtype=torch.float64)
    torch.manual_seed(0)
    ours = FactorGRUCell(5, 6, bias, dtype=torch.float64)
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=0)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for x, hx in ((normal(3, 5), normal(3, 6)), (normal(3, 5), None), (normal(5), normal(6)), (normal(5), None)):
        torch.testing.assert_close(ours(x, hx), theirs(x, hx))


@each_kind
def test_copies(kind: str) -> None:
    module = gru(kind)
    x = normal(4, 3, 5)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied(x), module(x))
    if not isinstance(module.activation, nn.Module):
        again = eval(repr(module), {"FactorGRU": FactorGRU, "torch": torch, "Expression": Expression})
        again.load_state_dict(module.state_dict())
        assert repr(again) == repr(module)
        torch.testing.assert_close(again(x), module(x))


@pytest.mark.parametrize(
    "kind",
    [
        dict(structure="monarch", input_structure="blocks", blocks=4),
        dict(structure="monarch", input_structure="blocks", factors=((2, 12), (12, 2))),
        dict(structure="monarch", blocks=4, num_layers=2),
        dict(structure="blocks", input_structure="monarch", num_layers=2, bidirectional=True),
        dict(structure="kronecker", input_structure="monarch", blocks=(2, 4), rank=2),
        dict(input_structure="monarch", blocks=4, rank=9, num_layers=2),
        dict(structure="blocks"),
        dict(structure="kronecker", factors=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [16, 64])
def test_its_text_builds_it_again(kind: dict, size: int) -> None:
    """Where no sizes of one layer say what all have, by those that were given."""
    module = FactorGRU(size, 24, **kind)
    again = eval(repr(module), {"FactorGRU": FactorGRU})
    assert again.cells == module.cells and repr(again) == repr(module)
    of_a_cell = {name: value for name, value in kind.items() if name not in ("num_layers", "bidirectional")}
    cell = FactorGRUCell(size, 24, **of_a_cell)
    assert eval(repr(cell), {"FactorGRUCell": FactorGRUCell}).cells == cell.cells


PROJECTED = {
    "dense": dict(),
    "kronecker": dict(structure="kronecker", factors=(2, 3), input_factors=(2, 2), rank=4),
    "monarch": dict(structure="monarch", blocks=2, rank=3),
    "inputs": dict(structure="dense", input_structure="kronecker", factors=(2, 3), input_factors=(2, 2), rank=4),
}


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_from_gru_and_back(name: str, bidirectional: bool) -> None:
    """Exact where the rank is full."""
    layers = 1 if bidirectional else 2
    kind = dict(num_layers=layers, bidirectional=bidirectional, batch_first=True, dtype=torch.float64)
    theirs = nn.GRU(4, 6, **kind).eval()
    ours = FactorGRU.from_gru(theirs, **PROJECTED[name], implementation="batched")
    x = normal(2, 3, 4)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.to_gru()(x), theirs(x))
    assert "projected" in ours.explain() or name == "dense"

    cell = nn.GRUCell(4, 6, bias=not bidirectional, dtype=torch.float64)
    made = FactorGRUCell.from_gru(cell, **PROJECTED[name])
    torch.testing.assert_close(made(x[0]), cell(x[0]))
    torch.testing.assert_close(made.to_gru()(x[0]), cell(x[0]))


def test_from_gru_is_the_nearest() -> None:
    """Of blocks on the diagonal, those of the dense matrix: what it leaves is all else."""
    theirs = nn.GRU(4, 6, dtype=torch.float64)
    ours = FactorGRU.from_gru(theirs, structure="blocks", blocks=2)
    dense = theirs.weight_hh_l0[6:12]
    inside = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    torch.testing.assert_close(ours.to_gru().weight_hh_l0[6:12], dense.where(inside, 0.0))
    error = ours.projection_errors["weight_hh_update_l0"].weight
    assert error == pytest.approx((dense[~inside].norm() / dense.norm()).item())
    assert pickle.loads(pickle.dumps(ours)).projection_errors == {}


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", PROJECTED)
def test_from_gru_of_parametrized_ones(name: str) -> None:
    """What a parametrization makes of a parameter counts, not what is behind it."""
    x = normal(2, 3, 4)
    for theirs, of, given in (
        (nn.GRU(4, 6, dtype=torch.float64), FactorGRU, x),
        (nn.GRUCell(4, 6, dtype=torch.float64), FactorGRUCell, x[0]),
    ):
        for parameter in [parameter for parameter, _ in theirs.named_parameters()]:
            nn.utils.parametrize.register_parametrization(theirs, parameter, Doubled())
        torch.testing.assert_close(of.from_gru(theirs, **PROJECTED[name])(given), theirs(given))


@pytest.mark.parametrize(
    "kind",
    [dict(reset="before"), dict(activation="relu"), dict(norm="layer"), dict(learned_initial=True)],
    ids=lambda kind: next(iter(kind)),
)
def test_to_gru_refuses_what_that_has_not(kind: dict) -> None:
    for module in (FactorGRU(5, 6, **kind), FactorGRUCell(5, 6, **kind)):
        ((name, value),) = kind.items()
        with pytest.raises(ValueError, match=rf"to_gru: this one has {name}={value!r}, (GRU|GRUCell) knows"):
            module.to_gru()


def test_explain() -> None:
    module = FactorGRU(64, 64, structure="kronecker", implementation="batched")
    told = module.explain(16, 100)
    assert "factors=((8, 8), (8, 8))" in told
    assert f"{768 + 384} parameters, those of matrices 3.12% of dense ones'" in told
    assert "16 sequences of 100 steps: 1.966e+07 FLOPs, 7.864e+07 dense" in told
    assert "runs batched, step by step, as asked" in told
    assert "PyTorch’s op for all of it, as asked" in FactorGRUCell(5, 6, implementation="v2").explain(3)
    assert "because fused cannot: its kernels have no layer norm" in FactorGRU(5, 6, norm="layer").explain()


@each_kind
def test_warmup(kind: str) -> None:
    """Changes nothing."""
    module = gru(kind)
    before = copy.deepcopy(module.state_dict())
    module.warmup(2, 3)
    with torch.no_grad():
        module.warmup(1, 1)
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())


WRONG = {
    "from_gru": (lambda: FactorGRU.from_gru(nn.LSTM(5, 6)), TypeError, "gru should be an nn.GRU, it is LSTM"),
    "from_gru of a cell": (lambda: FactorGRUCell.from_gru(nn.GRU(5, 6)), TypeError, "an nn.GRUCell, it is GRU"),
    "warmup": (lambda: FactorGRU(5, 6).warmup(0, 3), ValueError, "FactorGRU.warmup: sequences and steps should be pos"),
    "sizes": (lambda: FactorGRU(0, 6), ValueError, "FactorGRU: input_size should be a positive integer, it is 0"),
    "layers": (lambda: FactorGRU(5, 6, 0), ValueError, "num_layers should be a positive integer, it is 0"),
    "dropout": (lambda: FactorGRU(5, 6, 2, dropout=2), ValueError, "a probability from 0 to 1, it is 2"),
    "warmup's kind": (
        lambda: FactorGRU(5, 6).warmup(2, 1.5),
        ValueError,
        "should be positive integers, they are (1.5, 2",
    ),
    "explain": (
        lambda: FactorGRU(5, 6).explain(2, 0),
        ValueError,
        "FactorGRU.explain: sequences and steps should be pos",
    ),
    "dtype by name": (
        lambda: FactorGRU(5, 6, dtype="half"),
        TypeError,
        "FactorGRU: dtype should be a floating-point type, it is '",
    ),
    "structure": (
        lambda: FactorGRU(5, 6, structure="toeplitz"),
        ValueError,
        "GRU: structure should be one of 'dense', 'kr",
    ),
    "input structure": (lambda: FactorGRU(5, 6, input_structure=1), ValueError, "input_structure should be one of"),
    "none of it": (lambda: FactorGRU(5, 6, factors=2), ValueError, "factors=2 was given, which structure='dense' has"),
    "none of them": (lambda: FactorGRU(5, 6, input_factors=(5,)), ValueError, "input_factors=(5,) was given, which 'd"),
    "rank": (lambda: FactorGRU(6, 6, structure="kronecker", rank=99), ValueError, "rank should be at most"),
    "factors": (
        lambda: FactorGRU(6, 6, structure="kronecker", factors=(2, 4)),
        ValueError,
        "factors should multiply up to in_features=6",
    ),
    "blocks": (
        lambda: FactorGRU(5, 6, structure="blocks", blocks=3),
        ValueError,
        "blocks should be a number that divides the features of the inputs, 5, and of the outputs, 6; it is 3",
    ),
    "reset": (
        lambda: FactorGRU(5, 6, reset="behind"),
        ValueError,
        "reset should be 'after' or 'before', it is 'behind'",
    ),
    "norm": (lambda: FactorGRU(5, 6, norm="batch"), ValueError, "norm should be None or 'layer', it is 'batch'"),
    "activation": (
        lambda: FactorGRU(5, 6, activation="tan"),
        ValueError,
        "FactorGRU: activation should be None or one",
    ),
    "dtype": (lambda: FactorGRU(5, 6, dtype=torch.int64), TypeError, "dtype should be a floating-point type, it is"),
    "implementation": (lambda: FactorGRU(5, 6, implementation="v4"), ValueError, "FactorGRU: implementation should be"),
    "features": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 4)),
        ValueError,
        "the last dimension of input should be input_size=5, input has the shape (3, 2, 4)",
    ),
    "axes": (lambda: FactorGRU(5, 6)(torch.zeros(5)), ValueError, "input should be [steps, batch, input_size] or [st"),
    "kind": (
        lambda: FactorGRU(5, 6)(1.0),
        TypeError,
        "input should be a tensor or a PackedSequence, it is of the type",
    ),
    "integers": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5, dtype=torch.int64)),
        TypeError,
        "input should be a floating-point tensor, it is torch.int64; convert it with input.float()",
    ),
    "mixture": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5, dtype=torch.float64)),
        TypeError,
        "input and weight_ih_l0 should have one dtype, input is torch.float64 and weight_ih_l0 is torch.float32",
    ),
    "device": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5, device="meta")),
        TypeError,
        "input and weight_ih_l0 should be on one device, input is on meta and weight_ih_l0 on cpu",
    ),
    "state": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), torch.zeros(1, 3, 6)),
        ValueError,
        "hx should have the shape (layers · directions, batch, hidden) = (1, 2, 6), it has the shape (1, 3, 6)",
    ),
    "state of one": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), torch.zeros(1, 1, 6)),
        ValueError,
        "hx should have the shape (layers · directions, hidden) = (1, 6), it has the shape (1, 1, 6)",
    ),
    "state's kind": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), [0]),
        ValueError,
        "(1, 2, 6), it is of the type list",
    ),
    "state's dtype": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), torch.zeros(1, 2, 6, dtype=torch.float64)),
        TypeError,
        "input and hx should have one dtype, input is torch.float32 and hx is torch.float64",
    ),
    "starts": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), starts=torch.zeros(2, 3, dtype=torch.bool)),
        ValueError,
        "starts should be a mask (torch.bool) of the shape (3, 2), that of input without its features; it is",
    ),
    "mask": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), starts=torch.zeros(3, 2)),
        ValueError,
        "features; it is torch.float32 and has the shape (3, 2)",
    ),
    "mask's kind": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), starts=[True]),
        ValueError,
        "of the shape (3, 2), that of input without its features; it is of the type list",
    ),
    "mask's device": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), starts=torch.zeros(3, 2, dtype=torch.bool, device="meta")),
        TypeError,
        "input and starts should be on one device, input is on cpu and starts on meta",
    ),
    "mask's lengths": (
        lambda: FactorGRU(5, 6)(
            pack_sequence([torch.zeros(n, 5) for n in (3, 1)]),
            starts=pack_sequence([torch.zeros(2, dtype=torch.bool)] * 2),
        ),
        ValueError,
        "starts is a PackedSequence, so input should be one of the same lengths; its lengths are others",
    ),
    "mask's order": (
        lambda: FactorGRU(5, 6)(
            pack_sequence([torch.zeros(n, 5) for n in (3, 1)]),
            starts=pack_sequence([torch.zeros(n, dtype=torch.bool) for n in (1, 3)], enforce_sorted=False),
        ),
        ValueError,
        "its lengths are others",
    ),
    "packed mask": (
        lambda: FactorGRU(5, 6)(
            torch.zeros(4, 5),
            starts=pack_sequence([torch.zeros(n, dtype=torch.bool) for n in (3, 1)]),
            cu_seqlens=torch.tensor([0, 3, 4]),
        ),
        ValueError,
        "starts is a PackedSequence, so input should be one of the same lengths; it is none",
    ),
    "cu_seqlens' kind": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=[0, 3]),
        TypeError,
        "integers [sequences + 1] that ascend from 0 to the rows of input; it is of the type list",
    ),
    "cu_seqlens beside padding": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5), cu_seqlens=torch.tensor([0, 3])),
        ValueError,
        "input should be [total, input_size] with cu_seqlens, it has the shape (3, 2, 5)",
    ),
    "cu_seqlens beside packed": (
        lambda: FactorGRU(5, 6)(pack_sequence([torch.zeros(2, 5)]), cu_seqlens=torch.tensor([0, 2])),
        ValueError,
        "cu_seqlens was given beside a PackedSequence, which has its own lengths",
    ),
    "cu_seqlens' dtype": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0.0, 3.0])),
        ValueError,
        "integers [sequences + 1] that ascend from 0 to the rows of input; it is torch.float32 and has the shape (2,)",
    ),
    "cu_seqlens' end": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 4])),
        ValueError,
        "that ascend from 0 to the rows of input, of which there are 3; it is [0, 4]",
    ),
    "cu_seqlens' order": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 2, 1, 3])),
        ValueError,
        "it is [0, 2, 1, 3]",
    ),
    "cu_seqlens' device": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 3], device="meta")),
        TypeError,
        "input and cu_seqlens should be on one device, input is on cpu and cu_seqlens on meta",
    ),
    "max_seqlen's kind": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 3]), max_seqlen=3.0),
        ValueError,
        "max_seqlen should be an integer, the length of the longest sequence or more; it is 3.0",
    ),
    "max_seqlen below 0": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 3]), max_seqlen=-1),
        ValueError,
        "max_seqlen should be an integer, the length of the longest sequence or more; it is -1",
    ),
    "max_seqlen below the longest": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 1, 3]), max_seqlen=1),
        ValueError,
        "max_seqlen should be 2 or more, the length of the longest sequence; it is 1",
    ),
    "cu_seqlens' end beside max_seqlen": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), cu_seqlens=torch.tensor([0, 4]), max_seqlen=4),
        ValueError,
        "cu_seqlens should be integers [sequences + 1] that ascend from 0 to the rows of input, of which there are 3",
    ),
    "max_seqlen alone": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 5), max_seqlen=3),
        ValueError,
        "max_seqlen=3 was given without cu_seqlens, the bounds of sequences",
    ),
    "jagged": (
        lambda: FactorGRU(5, 6)(torch.nested.nested_tensor([torch.zeros(n, 5) for n in (1, 3)], layout=torch.jagged)),
        TypeError,
        "input should be no nested tensor; give input.values() of a jagged one, and cu_seqlens=input.offsets()",
    ),
    "sparse": (
        lambda: FactorGRU(5, 6)(torch.zeros(3, 2, 5).to_sparse()),
        TypeError,
        "FactorGRU: input should be dense, its layout is torch.sparse_coo; convert it with input.to_dense()",
    ),
    "cell's layout": (
        lambda: FactorGRUCell(5, 6)(torch.zeros(2, 5).to_sparse()),
        TypeError,
        "FactorGRUCell: input should be dense, its layout is torch.sparse_coo",
    ),
    "cell's axes": (
        lambda: FactorGRUCell(5, 6)(torch.zeros(3, 2, 5)),
        ValueError,
        "FactorGRUCell: input should be [batch, input_size] or [input_size], it has the shape (3, 2, 5)",
    ),
    "cell's state": (
        lambda: FactorGRUCell(5, 6)(torch.zeros(3, 5), torch.zeros(2, 6)),
        ValueError,
        "FactorGRUCell: hx should have the shape (3, 6), it has (2, 6)",
    ),
    "cell's state's kind": (
        lambda: FactorGRUCell(5, 6)(torch.zeros(3, 5), (torch.zeros(3, 6),)),
        ValueError,
        "FactorGRUCell: hx should have the shape (3, 6), it is of the type tuple",
    ),
    "script": (lambda: torch.jit.script(FactorGRU(5, 6)), RuntimeError, "FactorGRU: torch.jit.script cannot compile"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_wrong_input_is_refused(name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind) as refused:
        call()
    assert words in str(refused.value)


def test_dropout_of_one_layer_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"dropout=0.5 is between layers, and there is num_layers=1"):
        FactorGRU(5, 6, dropout=0.5)


def test_kernels_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto warns once and goes on, with the same results; fused raises."""

    def fails(*_: object) -> None:
        raise CompileError("no compiler")

    module, x = gru("kronecker"), normal(3, 2, 5)
    right = module(x)
    monkeypatch.setattr(recurrent_ops, "fused", fails)
    monkeypatch.setattr(gated, "_given_up", {})
    with pytest.warns(
        RuntimeWarning, match="runs the batched implementation, not the fused one, of gru after;.*no comp"
    ):
        torch.testing.assert_close(module(x), right)
    torch.testing.assert_close(module(x), right)
    assert "step by step, because fused cannot: no compiler" in module.explain()
    module.implementation = "fused"
    with pytest.raises(CompileError, match="no compiler"):
        module(x)


def test_what_runs_fused() -> None:
    for kind in KINDS:
        module, special = gru(kind), kind in ("norm", "all")
        assert ("runs fused" in module.explain()) is not special
        module.implementation = "fused"
        if not special:
            assert module(normal(3, 2, 5))[0].shape[:2] == (3, 2)


def test_norm_is_no_case_for_the_kernels() -> None:
    module = FactorGRU(5, 6, norm="layer", implementation="fused")
    with pytest.raises(
        RuntimeError, match=r"implementation='fused' cannot run: its kernels have no layer norm; or use"
    ):
        module(torch.zeros(3, 2, 5))


@pytest.mark.parametrize("kind", ["dense", "kronecker", "both-ways"])
@each_implementation
def test_any_strides(kind: str, implementation: str) -> None:
    """Of input, state, mask and what comes back."""
    module = gru(kind, implementation=implementation)
    count = len(module.cells)

    def results(x: Tensor, hx: Tensor, starts: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
        y, h = module(x, hx, starts=starts)
        return y, h, *torch.autograd.grad([y, h], [x, hx, *module.parameters()], [grad.expand_as(y), h.detach()])

    x, hx = normal(3, 4, 5).transpose(0, 1).requires_grad_(), normal(6, 3, count).permute(2, 1, 0).requires_grad_()
    for starts in (None, torch.tensor([False, True, False]).expand(4, 3)):
        for tensors in ((x, hx), (x[:1].expand(4, 3, 5), hx[:, :1].expand(count, 3, 6))):
            plain = (*(t.detach().contiguous().requires_grad_() for t in tensors), starts)
            right = results(*plain, torch.ones((), dtype=torch.float64))
            torch.testing.assert_close(results(*tensors, starts, torch.ones(1, 1, 1, dtype=torch.float64)), right)
