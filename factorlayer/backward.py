"""Gradients as chains: the states once more, then grad_y back through transposed weights, a contraction at a time.

Each weight's gradient comes from the states before and behind its contraction. Nothing is computed but what a gradient
that is wanted needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorlayer.activations import ACTIVATIONS
from factorlayer.chain import Chain
from factorlayer.spec import Contraction


@dataclass(frozen=True)
class Ops:
    """What it is made of: raw ops, or what stands in for them."""

    forward: Callable[[Tensor, Sequence[Tensor], Tensor | None, str], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, str], Tensor]
    all_gradients: Callable[[Tensor, Tensor, Sequence[Tensor], str], tuple[Tensor, Tensor]] | None = None


def gradients(
    ops: Ops, grad_y: Tensor, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, text: str, wanted: int
) -> list[Tensor]:
    """Those whose bit is set (1 for x, 2 for the bias, 4 << i for weight i), in that order; by all_gradients, if there
    is one, where it makes all that is wanted."""
    chain = Chain.parse(text)
    grad = grad_y.reshape(x.shape[0], chain.out_features)
    if chain.activation != "identity":
        before = ops.forward(x, weights, bias, replace(chain, activation="identity").text)
        (grad,) = torch.func.vjp(ACTIVATIONS[chain.activation], before)[1](grad)
    found = {1: grad.sum(0)} if wanted & 2 else {}
    if chain.rank > 1:
        found |= _all_terms(ops, chain, grad, x, weights, wanted)
    elif ops.all_gradients is not None and wanted | 2 == (1 << (len(weights) + 2)) - 1:
        found[0], summed = ops.all_gradients(
            grad, x, weights, Chain(chain.contractions, backward=True, tf32=chain.tf32).text
        )
        parts = summed.view(-1).split([w.numel() for w in weights])
        found |= {i + 2: part.view(w.shape) for i, (part, w) in enumerate(zip(parts, weights, strict=True))}
    else:
        found |= _one_term(ops, chain, grad, x, weights, wanted)
    return [found[bit] for bit in sorted(found)]


def _all_terms(
    ops: Ops, chain: Chain, grad: Tensor, x: Tensor, weights: Sequence[Tensor], wanted: int
) -> dict[int, Tensor]:
    """Each term by itself, but for x, whose gradient is the chain back with all terms."""
    found = {}
    if wanted & 1:
        back = Chain(tuple(map(_back, reversed(chain.contractions))), chain.rank, tf32=chain.tf32)
        found[0] = ops.forward(grad, list(map(_transposed, weights)), None, back.text)
    if wanted >> 2:
        part = Chain(chain.contractions, tf32=chain.tf32)
        terms = [_one_term(ops, part, grad, x, [w[r] for w in weights], wanted & ~1) for r in range(chain.rank)]
        found |= {bit: torch.stack([term[bit] for term in terms]) for bit in terms[0]}
    return found


def _one_term(
    ops: Ops, chain: Chain, grad: Tensor, x: Tensor, weights: Sequence[Tensor], wanted: int
) -> dict[int, Tensor]:
    steps, found = chain.contractions, {}
    of_weights = [i for i, c in enumerate(steps) if wanted >> (c.weight + 2) & 1]
    states = [x]
    for c in steps[: of_weights[-1]] if of_weights else ():
        states.append(ops.forward(states[-1], [weights[c.weight]], None, _alone(c, chain.tf32)))
    first = 0 if wanted & 1 else min(of_weights, default=len(steps))
    for i in reversed(range(first, len(steps))):
        c = steps[i]
        weight = weights[c.weight]
        if i in of_weights:
            summed = ops.weight_gradient(grad, states[i], _alone(c, chain.tf32, gradient=True))
            found[c.weight + 2] = summed.view(weight.shape)
        if i > first or wanted & 1:
            grad = ops.forward(grad, [_transposed(weight)], None, _alone(_back(c), chain.tf32))
        del states[i:]
    return {**found, 0: grad} if wanted & 1 else found


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2).contiguous()


def _back(c: Contraction) -> Contraction:
    return replace(c, p=c.q, q=c.p)


def _alone(c: Contraction, tf32: bool, gradient: bool = False) -> str:
    return Chain((replace(c, weight=0),), gradient=gradient, tf32=tf32).text
