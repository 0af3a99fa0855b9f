"""What a gated recurrent unit computes, one sequence and one step after another, by dense matrices: in float64 the
oracle of the recurrent layers' tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from factorlayer import FactorGRU, FactorGRUCell
from factorlayer.activations.named import activate
from factorlayer.activations.texts import scalars


def matrix(module: FactorGRU | FactorGRUCell, kind: str, gate: int, suffix: str) -> Tensor:
    """A gate's [hidden, features], from the definitions of Kronecker, Monarch and block-diagonal matrices."""
    parameters = dict(module.named_parameters())
    if f"weight_{kind}{suffix}" in parameters:
        return parameters[f"weight_{kind}{suffix}"].chunk(3)[gate]
    prefix = f"weight_{kind}_{('reset', 'update', 'candidate')[gate]}_"
    weights = [parameters[f"{prefix}{i}{suffix}"] for i in range(9) if f"{prefix}{i}{suffix}" in parameters]
    if len(weights) == 1:
        return torch.block_diag(*weights[0])
    if weights[0].dim() == 3 and weights[0].shape[0] != weights[1].shape[0]:
        raise AssertionError("the tests' Monarch layers have as many input as output groups")
    if "monarch" in repr(module):  # [L, s, K·rank], [K, rank·L, p]: output j of group l is j·L + l
        (groups, s, columns), (inputs, _, p) = weights[0].shape, weights[1].shape
        rank = columns // inputs
        left = weights[0].view(groups, s, inputs, rank)
        right = weights[1].view(inputs, rank, groups, p)
        return torch.einsum("lskr,krlp->slkp", left, right).reshape(s * groups, inputs * p)
    if weights[0].dim() == 3:
        return sum(torch.kron(*(weight[r] for weight in weights)) for r in range(weights[0].shape[0]))
    product = weights[0]
    for weight in weights[1:]:
        product = torch.kron(product, weight)
    return product


def layer_norm(products: Sequence[Tensor], gains: Tensor) -> list[Tensor]:
    """Of reset and update together, and of the candidate by itself."""
    r, z, n = products
    hidden = len(n)
    both = F.layer_norm(torch.cat([r, z]), (2 * hidden,), gains[: 2 * hidden])
    return [*both.split(hidden), F.layer_norm(n, (hidden,), gains[2 * hidden :])]


def one_step(module: FactorGRU | FactorGRUCell, suffix: str, x: Tensor, h: Tensor) -> Tensor:
    """From a state [hidden] to the next one."""
    parameters, cell = dict(module.named_parameters()), module.cells[0]
    hidden, before = len(h), cell.recurrence.reset == "before"
    zeros = x.new_zeros(3 * hidden)
    of_x = [matrix(module, "ih", g, suffix) @ x for g in range(3)]
    U = [matrix(module, "hh", g, suffix) for g in range(3)]
    of_h = [U[0] @ h, U[1] @ h, U[2] @ h]
    gains = parameters.get(f"norm_hh{suffix}")
    if gains is not None:
        of_x, of_h = layer_norm(of_x, parameters[f"norm_ih{suffix}"]), layer_norm(of_h, gains)
    b, c = (parameters.get(f"bias_{kind}{suffix}", zeros).chunk(3) for kind in ("ih", "hh"))
    r, z = (torch.sigmoid(of_x[g] + b[g] + of_h[g] + c[g]) for g in (0, 1))
    if before:
        product = U[2] @ (r * h)
        inside = (product if gains is None else layer_norm([product] * 3, gains)[2]) + c[2]
    else:
        inside = r * (of_h[2] + c[2])
    further = scalars(module.activation, module._scalar_names) if module._scalar_names else []
    n = activate(cell.recurrence.chain.activation, of_x[2] + b[2] + inside, further)
    return (1 - z) * n + z * h


def unrolled(
    gru: FactorGRU, sequences: Sequence[Tensor], hx: Tensor | None = None, starts: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Of sequences [steps, features]: outputs [steps, directions · hidden], and h_n [layers · directions, sequences,
    hidden]."""
    outputs, states = [], []
    for i, x in enumerate(sequences):
        rows, last = list(x), []
        for layer in range(gru.num_layers):
            made = []
            for direction in range(1 + gru.bidirectional):
                suffix = f"_l{layer}{'_reverse' * direction}"
                fresh = dict(gru.named_parameters()).get(f"initial{suffix}", x.new_zeros(gru.hidden_size))
                h = fresh if hx is None else hx[layer * (1 + gru.bidirectional) + direction, i]
                of_steps = {}
                for t in reversed(range(len(x))) if direction else range(len(x)):
                    behind = t + 1 if direction else t  # an episode ends where the next one starts
                    if starts is not None and behind < len(x) and starts[i][behind]:
                        h = fresh
                    h = of_steps[t] = one_step(gru, suffix, rows[t], h)
                made.append([of_steps[t] for t in range(len(x))])
                last.append(h)
            rows = [torch.cat(each) for each in zip(*made, strict=True)]
        outputs.append(torch.stack(rows) if rows else x.new_zeros(0, gru.hidden_size * (1 + gru.bidirectional)))
        states.append(torch.stack(last))
    return outputs, torch.stack(states, 1)
