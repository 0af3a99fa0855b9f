"""Gradients as chains: the states once more, then grad_y back through transposed weights.

It goes by visits: neighbouring contractions whose gradients one kernel makes at once, a contraction by itself, whose
weight's gradient comes from the states before and behind it, or neighbours that are only passed through. Nothing is
computed but what a gradient that is wanted needs.

Sums over samples want what is contracted side by side in memory. Untied weights with something behind the mode that
they contract get their states turned: by the pass that makes the state, or by one that does nothing else. On the way
back through them a group makes what lies far apart in the gradient for the contraction before: that one takes its q's
in another order, in which those of a group lie together, with its weight's rows in the same order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorlayer.activations.named import activate
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import BATCHES, MOST_SOME, class_of
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan.plan import ASKED, KEPT_WORTH

Turned = tuple[int, int, int]
Launched = list[tuple[str, int]]  # texts, each with its number of samples
Predicting = Callable[[int], Callable[[str], float]]  # the same function for numbers of samples that count as one
LEAST_RUN = 8  # elements side by side that are worth another order: 16 bytes, or a sector of L2
SLAB = 32  # samples
IN_SLABS = 64  # samples, of which there have to be a multiple
ASKED_OF_SOME = ASKED[2] + ASKED[3]  # numbers of samples, from 65 to 2048, that times are asked for
LEAST_MIXED = 65  # samples that are worth putting weights and their gradients into that order: more than few


def _never(_: Chain) -> bool:
    return False


def _before_activation(
    activation: str, grad: Tensor, z: Tensor, scalars: Sequence[Tensor], learns: Sequence[int]
) -> tuple[Tensor, ...]:
    """The gradient of what an activation takes, and those of its parameters that learn."""

    def run(z: Tensor, *learned: Tensor) -> Tensor:
        given = dict(enumerate(scalars)) | dict(zip(learns, learned, strict=True))
        return activate(activation, z, list(given.values()))

    found: tuple[Tensor, ...] = torch.func.vjp(run, z, *(scalars[i] for i in learns))[1](grad)
    return found


@dataclass(frozen=True)
class Ops:
    """What gradients are made of: the raw ops, or what stands in for them.

    all_gradients makes all gradients of a chain at once, those of x and of a
    bias if their bits are set. slopes makes a product and the slopes behind or before it, and slopes_and_sums the sums
    of that as well. `fits` says which chains have a kernel, for graphs, which serve all batches; `fits_in` says it of
    each class of batches. `us` predicts how long a text's kernels take for a number of samples. `learned` makes the
    gradients of an activation's parameters, by PyTorch.
    """

    forward: Callable[[Tensor, Sequence[Tensor], Tensor | None, str], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, str], Tensor]
    all_gradients: Callable[[Tensor, Tensor, Sequence[Tensor], str, int], list[Tensor]]
    slopes: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None, str], Tensor]
    slopes_and_sums: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None, str], tuple[Tensor, Tensor]]
    fits: Callable[[Chain], bool] = _never
    learned: Callable[..., tuple[Tensor, ...]] = _before_activation
    stack: Callable[..., Tensor] = torch.stack
    fits_in: Sequence[Callable[[Chain], bool]] = ()
    us: Predicting | None = None
    add: Callable[[Tensor, Tensor], Tensor] = torch.Tensor.add_

    def fits_of(self, batch: int) -> Callable[[Chain], bool]:
        return self.fits_in[class_of(batch)] if self.fits_in else self.fits


@dataclass(frozen=True)
class Kept:
    """The states that a layer has kept, and its text that says so."""

    text: str
    states: Sequence[Tensor]


@dataclass(frozen=True)
class Visit:
    """Contractions that the way back goes through together. `weights` are their places among the layer's, in order."""

    part: Chain
    weights: tuple[int, ...]
    learns: bool  # makes gradients of its weights
    returns: bool  # makes the gradient of what it reads
    at_once: bool
    hands_on: Turned | None = None  # how what it makes is turned for the visit behind it,
    hands_back: Turned | None = None  # and the gradient of what it reads for the one before
    mixed: Turned | None = None  # its q's come as the groups behind it make them: [outer, rows, columns] turned
    slabs: int = 0  # states that lie by slabs where all is made at once: grad_y, or that and the gradient of x
    hands_slabs: bool = False  # the gradient of what it reads lies so, which a product makes
    orders: bool = False  # who makes its weight's gradient puts these in order
    few: bool = False  # both contractions by the kernels of few samples

    @kept
    def turned(self) -> bool:
        """Whether the states before and behind the visit are turned."""
        first = self.part.contractions[0]
        alone = len(self.part.contractions) == 1
        return self.learns and not (self.at_once and not alone) and not first.tied and first.inner > 1

    def turn(self, is_grad: bool) -> Turned | None:
        """How the state before it, or the gradient behind it, is turned."""
        c = self.part.contractions[0]
        if is_grad and self.mixed:
            return self.mixed
        return (c.outer, c.q if is_grad else c.p, c.inner) if self.turned else None

    def transposed(self, ops: Ops, weight: Tensor) -> Tensor:
        """A weight for the way back."""
        if not self.mixed:
            return _transposed(ops, weight)
        (outer, rows, columns), (q, p) = self.mixed, weight.shape[-2:]
        text = _turning((1, q, p), False, (1, rows, columns))
        return ops.forward(weight.reshape(outer, q * p), [], None, text).view(outer, p, q)

    def in_order(self, gradient: Tensor) -> Tensor:
        """A weight's gradient, made of a gradient whose q's come in another order."""
        if not self.mixed or self.orders:
            return gradient
        outer, rows, columns = self.mixed
        return gradient.reshape(outer, columns, rows, -1).transpose(1, 2).reshape(gradient.shape)

    @kept
    def forward(self) -> str:
        return replace(self.part, x_turned=self.turned, turn=self.hands_on).text

    @kept
    def gradient(self) -> str:
        """The text that makes gradients of the visit's weights."""
        if self.at_once:
            return self.visited.text
        return self.summed.text if self.orders else replace(self.summed, mixed=None).text

    @property
    def summed(self) -> Chain:
        """The chain that makes the gradient of its one weight, in order."""
        return replace(self.part, x_turned=self.turned, gradient=True, mixed=self.mixed)

    @property
    def visited(self) -> Chain:
        """The chain that makes all gradients of the visit at once."""
        return replace(
            self.part,
            backward=True,
            x_turned=self.turned,
            turn=self.hands_back,
            mixed=self.mixed,
            slabs=self.slabs,
            few=self.few,
        )

    @kept
    def back(self) -> str:
        # If no mode lies behind, "turned" changes no order; but it says that a turn has rounded x already.
        x_turned = self.turned or (self.mixed is not None and self.part.tf32)
        back = replace(_back(self.part), x_turned=x_turned, turn=self.hands_back)
        return replace(back, slabs=1).text if self.hands_slabs else back.text

    def __str__(self) -> str:
        names = ", ".join(f"weight_{i}" for i in self.weights)
        if self.at_once:
            return f"{names}: all gradients at once"
        done = ["its gradient"] if self.learns else []
        done += ["grad_y back through it" if self.learns else "grad_y back through"] if self.returns else []
        return f"{names}: {', '.join(done) or 'only forward'}"


def gradients(
    ops: Ops,
    grad_y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    text: str,
    wanted: int,
    through: str = "identity",
    by: Kept | None = None,
) -> list[Tensor]:
    """The gradients whose bit is set in `wanted` (1 for x, 2 for the bias, 4 << i for weight i), in that order. Weights
    behind those of the contractions are parameters of the activation. If an activation of another layer made x, the
    gradient of x may be taken back `through` it, so that it is that of what this activation took. All are made `by`
    states that the layer has kept, unless some weight's is not wanted: then states are made anew."""
    chain = Chain.parse(text)
    count = len(chain.contractions)
    if by is not None and wanted >> 2 != (1 << len(weights)) - 1:
        by = None
    fits = ops.fits_of(len(x))
    grad, read, at_once = grad_y, list(weights), None
    if by is None or not chain.contractions[0].tied:
        at_once = _only_visit(text, wanted, fits, _are_few(ops, text, wanted, len(x)))
    else:
        grad, at_once = _to_contractions(ops, grad_y, x, weights, bias, text, by), back_of_kept(by.text)
        read += by.states
    if at_once is not None:
        made = ops.all_gradients(grad, x, read, at_once, wanted & 3)
        if wanted & 1:
            made[0] = back_through(ops, made[0], x, through)
        return made
    states = None if by is None else [x, *by.states]
    weights, scalars = weights[:count], weights[count:]
    grad = grad_y.reshape(x.shape[0], chain.out_features)
    found: dict[int, Tensor] = {}
    if scalars:
        learns = [i for i in range(len(scalars)) if wanted >> (count + 2 + i) & 1]
        _, text, _ = slope_texts(text, fits)
        z = ops.forward(x, weights, bias, text)
        grad, *of_scalars = ops.learned(chain.activation, grad, z, scalars, learns)
        found = {count + 2 + i: of_scalar for i, of_scalar in zip(learns, of_scalars, strict=True)}
        wanted &= (4 << count) - 1
    both, behind = planned_behind(ops, text, wanted, len(x))
    if from_state := behind_state(ops, text, wanted, len(x), behind):
        # The last contractions' state is made once, for the slopes behind it and for gradients.
        last, behind = from_state
        states = states or _states(ops, chain, visits_of(ops, text, wanted, len(x)), x, weights)
        grad, summed = back_to_contractions(ops, behind, grad, states[-1], [weights[i] for i in last.weights], bias)
    else:
        grad, summed = back_to_contractions(ops, behind, grad, x, weights, bias)
    if both and Chain.parse(both).backward:
        made = ops.all_gradients(grad, x, weights, both, wanted & 3)
        found |= dict(zip([*[0] * (wanted & 1), *range(1, count + 2)], made, strict=True))
        wanted = 0
    elif both:
        of_weight, of_bias = ops.weight_gradient(grad, x, both).view(-1).split((weights[0].numel(), grad.shape[1]))
        found |= {1: of_bias, 2: of_weight.view(weights[0].shape)}
        wanted &= 1
    elif summed is not None:
        found[1] = summed
    back = through_text(text, wanted, through, fits)
    if back:
        found[0] = ops.slopes(x, grad, [_transposed(ops, weights[0])], None, back)
        wanted, through = wanted & ~1, "identity"
    if chain.rank > 1:
        found |= _all_terms(ops, chain, grad, x, weights, wanted)
    else:
        found |= _one_term(ops, text, grad, x, weights, wanted, turned=True, states=states)
    if 0 in found:
        found[0] = back_through(ops, found[0], x, through)
    return [found[bit] for bit in sorted(found)]


def _to_contractions(
    ops: Ops, grad_y: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str, by: Kept
) -> Tensor:
    """The gradient of what a Kronecker product's contractions make, by the last state, or by x where no kernel takes
    that."""
    if Chain.parse(text).activation == "identity":
        return grad_y
    fits, slope = ops.fits_of(len(x)), slope_of_kept(by.text)
    if fits(Chain.parse(slope)):
        return ops.slopes(grad_y, by.states[-1], weights, bias, slope)
    texts = behind_texts(text, False, None, fits, ops.us(len(x)) if ops.us else None)
    return back_to_contractions(ops, texts, grad_y, x, weights, bias)[0]


def planned_behind(ops: Ops, text: str, wanted: int, batch: int) -> tuple[str | None, tuple[str, ...]]:
    """Two answers: the text that makes the bias's gradient with the weight's, or with all others, if one does; and the
    texts that go back from grad_y to the contractions."""
    # Terms of a sum turn grad_y for themselves, as the chain back of all terms reads it unturned.
    turn = turn_behind(visits_of(ops, text, wanted, batch)) if Chain.parse(text).rank == 1 else None
    return _planned_behind(text, wanted, turn, ops.fits_of(batch), ops.us(batch) if ops.us else None)


@functools.lru_cache(1024)
def _planned_behind(
    text: str,
    wanted: int,
    turn: Turned | None,
    fits: Callable[[Chain], bool],
    us: Callable[[str], float] | None,
) -> tuple[str | None, tuple[str, ...]]:
    both = _weight_and_bias(text, wanted, fits)
    without = behind_texts(text, False, turn, fits, us)
    if both or not wanted & 2:
        return both, without
    behind = behind_texts(text, True, turn, fits, us)
    visit = _only_visit(replace(Chain.parse(text), activation="identity").text, wanted, fits)
    if not visit or not Chain.parse(visit).bias:
        return None, behind
    alone = replace(Chain.parse(visit), bias=False).text
    if us is None or sum(map(us, (*without, visit))) <= sum(map(us, (*behind, alone))):
        return visit, without
    return None, behind


def behind_state(
    ops: Ops, text: str, wanted: int, batch: int, behind: tuple[str, ...]
) -> tuple[Visit, tuple[str, ...]] | None:
    """The last visit, and the texts that go back from grad_y to it by the state that it reads, which gradients need
    anyway; None where that is not predicted to take less than the texts `behind`, by x."""
    chain = Chain.parse(text)
    if ops.us is None or chain.rank > 1 or chain.activation == "identity":
        return None
    planned = visits_of(ops, text, wanted, batch)
    return _behind_state(text, wanted, planned, behind, ops.fits_of(batch), ops.us(batch))


@functools.lru_cache(1024)
def _behind_state(
    text: str,
    wanted: int,
    planned: tuple[Visit, ...],
    behind: tuple[str, ...],
    fits: Callable[[Chain], bool],
    us: Callable[[str], float],
) -> tuple[Visit, tuple[str, ...]] | None:
    chain, last = Chain.parse(text), planned[-1]
    if len(planned) == 1 or not last.learns or not any(Chain.parse(each).contractions for each in behind):
        return None
    part = replace(last.part, x_turned=last.turned, bias=chain.bias, activation=chain.activation)
    sums = wanted & 2 > 0 and any(Chain.parse(each).sums for each in behind)
    texts = behind_texts(part.text, sums, turn_behind(planned), fits, us)
    return (last, texts) if sum(map(us, texts)) < sum(map(us, behind)) else None


def back_to_contractions(
    ops: Ops,
    texts: Sequence[str],
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of what the contractions make, and its sums, by the texts of behind_texts(); or by those of
    columns_texts(), if x is what is activated."""
    given, summed = x, None
    for text in texts:
        chain = Chain.parse(text)
        if chain.contractions and not chain.slope:
            given = ops.forward(x, weights, bias, text)
            continue
        alone = given if chain.slope else grad  # what a pass without contractions reads beside grad
        asked = (grad, x, weights, bias, text) if chain.contractions else (grad, alone, [], None, text)
        if chain.sums and (chain.slope or chain.turn):
            grad, summed = ops.slopes_and_sums(*asked)
        elif chain.sums:
            summed = ops.weight_gradient(grad, grad, text)
        else:
            grad = ops.slopes(*asked) if chain.slope else ops.forward(grad, [], None, text)
        given = grad
    return grad, summed


def back_through(ops: Ops, grad: Tensor, state: Tensor, activation: str) -> Tensor:
    """The gradient of what an activation took, from that of the state that it made."""
    if activation == "identity":
        return grad
    return ops.slopes(state, grad, [], None, through_alone(activation, state.shape[1]))


def recording(fits: Callable[[Chain], bool], us: Predicting | None = None) -> tuple[Ops, list[tuple[str, int]]]:
    """Ops that make hollow tensors, and the texts of what would run, each with its number of samples."""
    asked: list[tuple[str, int]] = []

    def forward(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> Tensor:
        asked.append((text, len(x)))
        return hollow(len(x), Chain.parse(text).out_features)

    def weight_gradient(grad: Tensor, x: Tensor, text: str) -> Tensor:
        asked.append((text, len(x)))
        made = Chain.parse(text)
        return hollow(made.sums or made.contractions[0].weight_size + made.bias * made.out_features)

    def all_gradients(grad: Tensor, x: Tensor, weights: Sequence[Tensor], text: str, wanted: int) -> list[Tensor]:
        asked.append((text, len(x)))
        if wanted & 2 and not Chain.parse(text).bias:  # which the op makes by another kernel
            asked.append((sums_text(grad.shape[1]), len(x)))
        beside = [x] * (wanted & 1) + [hollow(grad.shape[1])] * (wanted >> 1)
        own = weights[: len(Chain.parse(text).contractions)]  # behind which states stand that a layer has kept
        return [hollow(*t.shape) for t in (*beside, *own)]

    def slopes(grad: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str) -> Tensor:
        asked.append((text, len(x)))
        return hollow(*grad.shape)

    def slopes_and_sums(
        grad: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str
    ) -> tuple[Tensor, Tensor]:
        return slopes(grad, x, weights, bias, text), hollow(grad.shape[1])

    def learned(
        activation: str, grad: Tensor, z: Tensor, scalars: Sequence[Tensor], learns: Sequence[int]
    ) -> tuple[Tensor, ...]:
        return grad, *(scalars[i] for i in learns)

    def stack(terms: Sequence[Tensor]) -> Tensor:
        return hollow(len(terms), *terms[0].shape)

    def add(sum_of: Tensor, term: Tensor) -> Tensor:
        return sum_of

    made = forward, weight_gradient, all_gradients, slopes, slopes_and_sums
    return Ops(*made, fits, learned, stack, us=us, add=add), asked


def hollow(*shape: int) -> Tensor:
    """One element for all: what is asked of it is its shape. (PyTorch's meta device takes two seconds to wake up.)"""
    return torch.zeros((), device="cpu").expand(shape)


def hollow_layer(chain: Chain) -> tuple[list[Tensor], Tensor | None]:
    """A layer's weights and bias as hollow tensors."""
    weights = [hollow(1)] * chain.weights
    for c in chain.contractions:
        weights[c.weight] = hollow(*([chain.rank] if chain.rank > 1 else []), c.weight_size // (c.q * c.p), c.q, c.p)
    return weights, hollow(chain.out_features) if chain.bias else None


def step_texts(text: str, kept: str, fits: Callable[[Chain], bool], batch: int, us: Predicting | None) -> Launched:
    """The texts of a training step, each with its number of samples: of a layer that keeps states, whose text that is
    `kept`, or of one that keeps none."""
    return [(kept or text, batch), *launched_texts(text, fits, batch, us=us, kept=kept)]


def kept_if_worth_it(text: str, kept: str, fits: Callable[[Chain], bool], batch: int, us: Predicting) -> str:
    """The text of a layer that keeps states where a training step is predicted to take less by it; else an empty one.
    Of a Kronecker product without an activation the planner has compared what it takes. A Monarch layer keeps the state
    between its contractions only where both are visited one after the other."""
    chain = Chain.parse(text)
    if chain.contractions[0].tied and chain.activation == "identity":
        return kept
    if chain.is_monarch:
        ops, _ = recording(fits, us)
        planned = visits_of(ops, text, (4 << len(chain.contractions)) - 1, batch)
        if len(planned) < 2 or not planned[1].turned:
            return ""

    def total(kept: str) -> float:
        return sum(us(samples)(each) for each, samples in step_texts(text, kept, fits, batch, us))

    return kept if total(kept) < KEPT_WORTH * total("") else ""


@functools.lru_cache(1024)
def back_of_kept(kept: str) -> str:
    """The text that makes all gradients of a layer that has kept states, from the gradient of what it activates."""
    return replace(Chain.parse(kept), bias=False, activation="identity", backward=True).text


@functools.lru_cache(1024)
def slope_of_kept(kept: str) -> str:
    """The text that makes the gradient of what such a layer activates, from the last state."""
    chain = Chain.parse(kept)
    return replace(chain, slope=chain.out_features).text


def texts(
    text: str,
    fits: Callable[[Chain], bool],
    batch: int,
    wanted: int = -1,
    us: Predicting | None = None,
    kept: str = "",
) -> list[tuple[str, int]]:
    """The chains whose kernels make gradients of a chain, all or those `wanted`, and of how many samples each; of a
    layer that keeps states, `kept` is the text that says so."""
    return list(dict.fromkeys(launched_texts(text, fits, batch, wanted, us, kept)))


def launched_texts(
    text: str,
    fits: Callable[[Chain], bool],
    batch: int,
    wanted: int = -1,
    us: Predicting | None = None,
    kept: str = "",
) -> list[tuple[str, int]]:
    """The texts of texts(), each as often as its kernels run: if terms are taken one by one, once for each term."""
    chain = Chain.parse(text)
    weights, bias = hollow_layer(chain)
    given = 1 | chain.bias << 1 | ((1 << len(weights)) - 1) << 2
    ops, asked = recording(fits, us)
    x, grad_y = hollow(batch, chain.in_features), hollow(batch, chain.out_features)
    by = Kept(kept, [hollow(batch, n) for n in Chain.parse(kept).kept]) if kept else None
    gradients(ops, grad_y, x, weights, bias, text, wanted & given, by=by)
    return asked


def _all_terms(
    ops: Ops, chain: Chain, grad: Tensor, x: Tensor, weights: Sequence[Tensor], wanted: int
) -> dict[int, Tensor]:
    """Gradients of a sum of products: at once, if there is a plan for that; else each term by itself. The gradient of x
    is then the chain back with all terms, unless it takes less to add up those of the terms, which their first visits
    make anyway or nearly make."""
    at_once = replace(chain, activation="identity", bias=False, backward=True)
    all_wanted = wanted >> 2 == (1 << len(weights)) - 1
    if all_wanted and all(c.tied for c in chain.contractions) and ops.fits_of(len(x))(at_once):
        made = ops.all_gradients(grad, x, weights, at_once.text, wanted & 1)
        of_x = {0: made.pop(0)} if wanted & 1 else {}
        return of_x | {i + 2: of_weight for i, of_weight in enumerate(made)}
    found = {}
    us = ops.us(len(x)) if wanted & 1 and ops.us else None
    adds = us is not None and _adds_up(chain.text, wanted, ops.fits_of(len(x)), us)
    if wanted & 1 and not adds:
        found[0] = ops.forward(grad, [_transposed(ops, w) for w in weights], None, _back(chain).text)
    if wanted >> 2:
        terms = []
        for r in range(chain.rank):
            term = _one_term(ops, _term(chain), grad, x, [w[r] for w in weights], (wanted & ~1) | adds)
            if adds:
                of_term = term.pop(0)
                found[0] = ops.add(found[0], of_term) if r else of_term
            terms.append(term)
        found |= {bit: ops.stack([term[bit] for term in terms]) for bit in terms[0]}
    return found


def _term(chain: Chain) -> str:
    """The text of one term of a sum: its contractions alone."""
    return Chain(chain.contractions, tf32=chain.tf32).text


@functools.lru_cache(1024)
def _adds_up(text: str, wanted: int, fits: Callable[[Chain], bool], us: Callable[[str], float]) -> bool:
    """Whether the gradient of x is predicted to take less as a sum of the terms', of which each is what its first visit
    makes anyway or one product more, than as the chain back."""
    if not wanted >> 2:
        return False
    chain = Chain.parse(text)
    first, *_ = visits(_term(chain), wanted, fits)
    alone, *_ = visits(_term(chain), wanted & ~1, fits)
    more = 0.0 if alone.at_once else us(first.gradient) - us(alone.gradient) if first.at_once else us(first.back)
    adding = us(through_alone("relu", chain.in_features))  # which reads and writes as much as an addition
    return chain.rank * more + (chain.rank - 1) * adding < us(_back(chain).text)


def _states(ops: Ops, chain: Chain, planned: Sequence[Visit], x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """What each visit reads, up to the last one that makes gradients of its weights."""
    states = [_turned(ops, x, planned[0].turn(is_grad=False), chain.tf32)]
    last = max((i for i, visit in enumerate(planned) if visit.learns), default=0)
    for visit in planned[:last]:
        states.append(ops.forward(states[-1], [weights[i] for i in visit.weights], None, visit.forward))
    return states


def _one_term(
    ops: Ops,
    text: str,
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    wanted: int,
    turned: bool = False,
    states: list[Tensor] | None = None,
) -> dict[int, Tensor]:
    """The gradients of one term, by the bits of `gradients`. `turned` says that grad_y is turned already, where the
    visits want it so; `states` are what visits read, if that has been made."""
    planned = visits_of(ops, text, wanted, len(x))
    found: dict[int, Tensor] = {}
    chain = Chain.parse(text)
    states = states or _states(ops, chain, planned, x, weights)
    if planned[-1].slabs:
        grad = _in_slabs(ops, grad)
    elif not turned:
        grad = _turned(ops, grad, turn_behind(planned), chain.tf32)
    for i in reversed(range(len(planned))):
        visit = planned[i]
        own = [weights[j] for j in visit.weights]
        if visit.at_once:
            grad, *of_weights = ops.all_gradients(grad, states[i], own, visit.gradient, 1)
            found |= {j + 2: of_weight for j, of_weight in zip(visit.weights, of_weights, strict=True)}
        elif visit.learns:
            of_weight = ops.weight_gradient(grad, states[i], visit.gradient)
            found[visit.weights[0] + 2] = visit.in_order(of_weight).view(own[0].shape)
        if visit.returns and not visit.at_once:
            grad = ops.forward(grad, [visit.transposed(ops, w) for w in own], None, visit.back)
        del states[i:]
    return {**found, 0: grad} if wanted & 1 else found


def visits_of(ops: Ops, text: str, wanted: int, batch: int) -> tuple[Visit, ...]:
    few = _are_few(ops, text, wanted, batch)
    return visits(text, wanted, ops.fits_of(batch), batch >= LEAST_MIXED, batch % IN_SLABS == 0, few)


@functools.lru_cache(4096)
def counts_as(batch: int) -> int:
    """The number of samples that predictions are asked for. Of some it is three quarters of the power of two that
    `batch` rounds up to; of others, the number that the class is planned for."""
    if LEAST_MIXED <= batch <= MOST_SOME:
        return next(each for each in ASKED_OF_SOME if 3 * batch <= 4 * each)
    return BATCHES[class_of(batch)]


def _are_few(ops: Ops, text: str, wanted: int, batch: int) -> bool:
    """Whether all gradients of a Monarch layer of some hundreds of samples are predicted to take less by the kernels of
    few than otherwise."""
    counted = counts_as(batch)
    return ops.us is not None and counted in ASKED_OF_SOME and _count_as_few(text, wanted, ops.fits, ops.us, counted)


@functools.lru_cache(1024)
def _count_as_few(text: str, wanted: int, fits: Callable[[Chain], bool], us: Predicting, batch: int) -> bool:
    chain = Chain.parse(text)
    every_weight = (4 << len(chain.contractions)) - 4
    if not chain.is_monarch or wanted & every_weight != every_weight:
        return False
    few = replace(Chain.parse(_term(chain)), backward=True, few=True)
    if not fits(few):
        return False
    others = launched_texts(_term(chain), fits, batch, wanted & ~2)
    return us(batch)(few.text) < sum(us(samples)(each) for each, samples in others)


def turn_behind(planned: Sequence[Visit]) -> Turned | None:
    """How visits want grad_y turned."""
    return None if planned[-1].slabs else planned[-1].turn(is_grad=True)


@functools.lru_cache(1024)
def behind_texts(
    text: str,
    sums: bool,
    turn: Turned | None,
    fits: Callable[[Chain], bool],
    us: Callable[[str], float] | None,
) -> tuple[str, ...]:
    """The texts that go from grad_y back to the contractions, in order: through the activation, by a kernel that makes
    what is activated as well or by one behind that, whichever is predicted to take less; then the `sums` of the result,
    and its `turn`."""
    chain = Chain.parse(text)
    columns = columns_texts(chain, sums, turn, fits, us)
    if chain.activation == "identity":
        return columns
    at_once, before, _ = slope_texts(text, fits)
    if not at_once:
        return before, *columns
    ways = (at_once, *columns_texts(replace(chain, activation="identity"), sums, turn, fits, us)), (before, *columns)
    return min(ways, key=lambda way: sum(map(us, way))) if us else ways[0]


def columns_texts(
    chain: Chain,
    sums: bool,
    turn: Turned | None,
    fits: Callable[[Chain], bool],
    us: Callable[[str], float] | None = None,
) -> tuple[str, ...]:
    """The texts of behind_texts() once what is activated is there: one pass, if one kernel does all and a turn by
    itself is not predicted to take less."""
    features = chain.out_features
    slope = features if chain.activation != "identity" else 0
    if not (slope or sums or turn):
        return ()
    asked = Chain((), activation=chain.activation, slope=slope, sums=features if sums else 0)
    turned = replace(asked, turn=turn, tf32=chain.tf32) if turn else asked
    if turn and (slope or sums):
        apart = asked.text, _turning(turn, chain.tf32)
        if not fits(turned) or (us is not None and sum(map(us, apart)) < us(turned.text)):
            return apart
    return (turned.text,)


@functools.lru_cache(1024)
def visits(
    text: str,
    wanted: int,
    fits: Callable[[Chain], bool],
    mixes: bool = True,
    slabs: bool = False,
    few: bool = False,
) -> tuple[Visit, ...]:
    """The visits of a chain's contractions, in order: as many contractions in each as have one kernel, or both of a
    Monarch layer by the kernels of `few` samples. With `mixes`, a visit may take its q's in the order in which the
    visit behind stores them; with `slabs`, what comes back to the last visits may lie by slabs."""
    chain = Chain.parse(text)
    steps, made, at = chain.contractions, [], 0
    learns = [bool(wanted >> (c.weight + 2) & 1) for c in steps]

    def has_one(at: int, end: int) -> bool:
        if not _are_neighbours(steps[at:end]):
            return False
        return not learns[at] or few or fits(replace(_part(chain, steps[at:end]), backward=True))

    while at < len(steps):
        longest = next((i for i in range(at + 1, len(steps)) if learns[i] != learns[at]), len(steps))
        # From the longest on, as a kernel for all answers for shorter ones as well.
        end = next((end for end in range(longest, at + 1, -1) if has_one(at, end)), at + 1)
        returns = bool(wanted & 1) or any(learns[:at])
        weights = tuple(sorted(c.weight for c in steps[at:end]))
        part = _part(chain, steps[at:end])
        one = returns and part.contractions[0].tied and fits(replace(part, backward=True))
        at_once = learns[at] and (end > at + 1 or one)
        made.append(Visit(part, weights, learns[at], returns, at_once, few=few))
        at = end
    if mixes:
        made = [*(replace(a, mixed=_mixed(a, b)) for a, b in itertools.pairwise(made)), made[-1]]
    on = [*(visit.turn(is_grad=False) for visit in made[1:]), None]
    back = [None, *(visit.turn(is_grad=True) for visit in made[:-1])]
    made = [replace(v, hands_on=a, hands_back=b) for v, a, b in zip(made, on, back, strict=True)]
    made = [replace(v, at_once=v.at_once or (v.learns and v.returns and fits(v.visited))) for v in made]
    made = _by_slabs(made, fits) if slabs and mixes and chain.tf32 else made
    return tuple(replace(v, orders=v.mixed is not None and not v.at_once and fits(v.summed)) for v in made)


def _by_slabs(made: list[Visit], fits: Callable[[Chain], bool]) -> list[Visit]:
    """The same visits, of which some take what comes back by slabs: grad_y, if it would be turned anyway, or what
    another visit or a product makes."""

    def taken(visit: Visit, slabs: int) -> Visit | None:
        there = visit.learns and visit.returns and not visit.at_once and len(visit.part.contractions) == 1
        hands_back = visit.hands_back if slabs == 1 else None
        visit = replace(visit, at_once=True, slabs=slabs, mixed=None, hands_back=hands_back)
        return visit if there and fits(visit.visited) else None

    made = list(made)
    comes = made[-1].turned
    for i in reversed(range(len(made))):
        visit, before = made[i], i > 0 and taken(made[i - 1], 1) is not None
        product = replace(visit, hands_back=None, hands_slabs=True)
        found = (taken(visit, 2) if before else None) or taken(visit, 1) if comes else None
        if not found and before and not visit.at_once and fits(Chain.parse(product.back)):
            found = product
        comes = found is not None and (found.slabs > 1 or found.hands_slabs)
        made[i] = found or visit
    return made


@functools.lru_cache(1024)
def _only_visit(text: str, wanted: int, fits: Callable[[Chain], bool], few: bool = False) -> str | None:
    """The text that makes all gradients, if it is all that has to run; it includes the bias's gradient, if one kernel
    makes that too."""
    chain = Chain.parse(text)
    if chain.rank > 1 or chain.activation != "identity":
        return None
    planned = visits(text, wanted, fits, few=few)
    if len(planned) > 1 or not planned[0].at_once:
        return None
    with_bias = replace(planned[0].visited, bias=True)
    return with_bias.text if wanted & 2 and not few and fits(with_bias) else planned[0].gradient


@functools.lru_cache(1024)
def _weight_and_bias(text: str, wanted: int, fits: Callable[[Chain], bool]) -> str | None:
    """The text that makes both gradients of a dense layer, if both are wanted and no kernel makes x's with the
    weight's."""
    chain = Chain.parse(text)
    if wanted & 6 != 6 or not chain.is_dense or visits(text, wanted, fits)[0].at_once:
        return None
    both = Chain(chain.contractions, bias=True, gradient=True, tf32=chain.tf32)
    return both.text if fits(both) else None


@functools.lru_cache(1024)
def through_text(text: str, wanted: int, through: str, fits: Callable[[Chain], bool]) -> str | None:
    """The text that makes the gradient of x and takes it back through the activation before, if one kernel does
    both."""
    chain = Chain.parse(text)
    if through == "identity" or not wanted & 1 or not chain.is_dense:
        return None
    if visits(text, wanted, fits)[0].at_once:
        return None
    both = replace(_back(chain), activation=through, through=chain.in_features)
    return both.text if fits(both) else None


@functools.lru_cache(1024)
def sums_text(features: int) -> str:
    """The text that makes the gradient of a bias."""
    return Chain((), sums=features).text


@functools.lru_cache(1024)
def through_alone(activation: str, features: int) -> str:
    return Chain((), activation=activation, through=features).text


def _mixed(visit: Visit, following: Visit) -> Turned | None:
    """The order in which a visit can take its q's, so that the groups of the visit behind it store theirs side by
    side."""
    (c, *more), (behind, *further) = visit.part.contractions, following.part.contractions
    if c.tied or c.inner > 1 or more or further or not following.turned or c.outer % behind.outer:
        return None
    groups = c.outer // behind.outer
    rows = behind.p // groups
    if behind.p % groups or rows % LEAST_RUN or rows * behind.inner != c.q:
        return None
    return c.outer, rows, behind.inner


def _are_neighbours(steps: Sequence[Contraction]) -> bool:
    """Whether no other mode lies between those that are contracted."""
    weights = [c.weight for c in steps]
    return max(weights) - min(weights) < len(weights)


def _part(chain: Chain, steps: tuple[Contraction, ...]) -> Chain:
    """Some contractions of a chain, by themselves."""
    order = sorted(c.weight for c in steps)
    return Chain(tuple(replace(c, weight=order.index(c.weight)) for c in steps), tf32=chain.tf32)


def _back(chain: Chain) -> Chain:
    steps = tuple(replace(c, p=c.q, q=c.p) for c in reversed(chain.contractions))
    return Chain(steps, chain.rank, tf32=chain.tf32)


@functools.lru_cache(1024)
def slope_texts(text: str, fits: Callable[[Chain], bool]) -> tuple[str | None, str, str]:
    """Three texts for the gradient of what is activated: the one that makes it from x at once, or None without such a
    kernel; the one that makes what is activated; and the one that makes the gradient from that."""
    chain = Chain.parse(text)
    at_once = replace(chain, slope=chain.out_features)
    slope = Chain((), activation=chain.activation, slope=chain.out_features)
    return at_once.text if fits(at_once) else None, replace(chain, activation="identity").text, slope.text


def _transposed(ops: Ops, weight: Tensor) -> Tensor:
    *matrices, q, p = weight.shape
    return _turned(ops, weight.reshape(-1, q * p), (1, q, p)).view(*matrices, p, q)


def _turned(ops: Ops, x: Tensor, turn: Turned | None, tf32: bool = False) -> Tensor:
    return ops.forward(x, [], None, _turning(turn, tf32)) if turn else x


def _in_slabs(ops: Ops, x: Tensor) -> Tensor:
    samples, features = x.shape
    text = _turning((1, SLAB, features), True)
    return ops.forward(x.reshape(samples // SLAB, SLAB * features), [], None, text).view(samples, features)


@functools.lru_cache(1024)
def _turning(turn: Turned, tf32: bool, mixed: Turned | None = None) -> str:
    return Chain((), turn=turn, mixed=mixed, tf32=tf32).text
