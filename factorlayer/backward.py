"""Gradients as chains: the states once more, then grad_y back through transposed weights, a contraction at a time.

Each weight's gradient comes from the states before and behind its contraction. Nothing is computed but what a gradient
that is wanted needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from factorlayer.activations import ACTIVATIONS
from factorlayer.chain import Chain
from factorlayer.spec import Contraction

Forward = Callable[[Tensor, Sequence[Tensor], Tensor | None, str], Tensor]
WeightGradient = Callable[[Tensor, Tensor, str], Tensor]
AllGradients = Callable[[Tensor, Tensor, Sequence[Tensor], str], tuple[Tensor, Tensor]]


def gradients(
    grad_y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    text: str,
    wanted: int,
    forward: Forward,
    weight_gradient: WeightGradient,
    all_gradients: AllGradients | None = None,
) -> list[Tensor]:
    """Those whose bit is set (1 for x, 2 for the bias, 4 << i for weight i), in that order, by the raw ops;
    `all_gradients` where one pass makes those of x and all weights."""
    chain = Chain.parse(text)
    grad = grad_y.reshape(x.shape[0], chain.out_features)
    if chain.activation != "identity":
        before = forward(x, weights, bias, replace(chain, activation="identity").text)
        (grad,) = torch.func.vjp(ACTIVATIONS[chain.activation], before)[1](grad)
    found: dict[int, Tensor] = {}
    if wanted & 2:
        found[1] = grad.sum(0)
    all_wanted = wanted | 2 == (1 << (len(weights) + 2)) - 1
    if all_gradients is not None and all_wanted and chain.rank == 1:
        text = Chain(chain.contractions, backward=True, tf32=chain.tf32).text
        found[0], summed = all_gradients(grad, x, weights, text)
        parts = summed.view(-1).split([w.numel() for w in weights])
        found |= {i + 2: part.view(w.shape) for i, (part, w) in enumerate(zip(parts, weights, strict=True))}
    elif chain.rank == 1:
        _one_term(chain, grad, x, weights, wanted, found, forward, weight_gradient)
    else:
        _all_terms(chain, grad, x, weights, wanted, found, forward, weight_gradient)
    return [found[bit] for bit in sorted(found)]


def _all_terms(
    chain: Chain,
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    wanted: int,
    found: dict[int, Tensor],
    forward: Forward,
    weight_gradient: WeightGradient,
) -> None:
    """Each term by itself, but for x, whose gradient is the chain back with all terms."""
    if wanted & 1:
        back = tuple(_back(c) for c in reversed(chain.contractions))
        found[0] = forward(grad, [_transposed(w) for w in weights], None, Chain(back, chain.rank, tf32=chain.tf32).text)
    if wanted >> 2:
        terms: list[dict[int, Tensor]] = [{} for _ in range(chain.rank)]
        for r, of_term in enumerate(terms):
            part = Chain(chain.contractions, tf32=chain.tf32)
            _one_term(part, grad, x, [w[r] for w in weights], wanted & ~3, of_term, forward, weight_gradient)
        found |= {bit: torch.stack([of_term[bit] for of_term in terms]) for bit in terms[0]}


def _one_term(
    chain: Chain,
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    wanted: int,
    found: dict[int, Tensor],
    forward: Forward,
    weight_gradient: WeightGradient,
) -> None:
    steps = chain.contractions
    of_weight = [i for i, c in enumerate(steps) if wanted >> (c.weight + 2) & 1]
    states, state = {}, x
    for i in range(of_weight[-1] + 1 if of_weight else 0):
        states[i] = state
        if i < of_weight[-1]:
            state = forward(state, [weights[steps[i].weight]], None, _alone(steps[i], chain.tf32))
    last = 0 if wanted & 1 else of_weight[0] if of_weight else len(steps)
    for i in reversed(range(last, len(steps))):
        c = steps[i]
        weight = weights[c.weight]
        if i in of_weight:
            summed = weight_gradient(grad, states.pop(i), _alone(c, chain.tf32, gradient=True))
            found[c.weight + 2] = summed.view(weight.shape)
        if i > last or wanted & 1:
            grad = forward(grad, [_transposed(weight)], None, _alone(_back(c), chain.tf32))
    if wanted & 1:
        found[0] = grad


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2).contiguous()


def _back(c: Contraction) -> Contraction:
    return replace(c, p=c.q, q=c.p)


def _alone(c: Contraction, tf32: bool, gradient: bool = False) -> str:
    return Chain((replace(c, weight=0),), gradient=gradient, tf32=tf32).text
