"""The `check` command's numbers: run the implementations on one problem and compare them pair by pair.

Two tensors are equal if ‖a − b‖ ≤ 2 · (eps(dtype) · √k + eps(accumulator) · √N) · ‖b‖, in the Frobenius norm
and computed in float64: k roundings to the dtype and N summands in the longest sum lie behind the value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from factorlayer.activations import ACTIVATIONS
from factorlayer.case import VERSIONS, Case, Problem
from factorlayer.functional import factor_linear
from factorlayer.spec import LayerSpec


@dataclass(frozen=True)
class Comparison:
    left: str  # v1_y, v2_grad_x …
    right: str
    equal: bool
    difference: float  # the largest absolute one
    tolerance: float  # of the Frobenius norm of the difference, relative to the right side's


@dataclass
class Report:
    case: Case
    norms: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Everything compared is equal, and v3 is there where it should be, on a CPU."""
        complete = not self.unavailable or self.case.device.type != "cpu"
        return complete and all(comparison.equal for comparison in self.comparisons)

    def lines(self) -> list[str]:
        return [f"||{name}|| = {norm:.6e}" for name, norm in self.norms.items()] + [
            f"{c.left} == {c.right}: {c.equal} ({c.difference:.1e})" for c in self.comparisons
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN and no infinity: they become null."""
        return {
            "passed": self.passed,
            "unavailable": self.unavailable,
            "norms": {name: _finite(norm) for name, norm in self.norms.items()},
            "comparisons": [{**asdict(c), "difference": _finite(c.difference)} for c in self.comparisons],
        }


def check(problem: Problem) -> Report:
    """Runs every implementation there is, forward and backward, and compares each pair."""
    report = Report(problem.case, unavailable=problem.unavailable())
    _steady(problem)
    values = {v: _values(problem, v) for v in VERSIONS if v not in report.unavailable}
    for version, tensors in values.items():
        for name in ("y", "g"):
            report.norms[f"{version}_{name}"] = _norm(tensors[name])
    allowed = tolerances(problem.case)
    for a, b in itertools.combinations(values, 2):
        for name, tolerance in allowed.items():
            equal, difference = compare(values[a][name], values[b][name], tolerance)
            report.comparisons.append(Comparison(f"{a}_{name}", f"{b}_{name}", equal, difference, tolerance))
    return report


def compare(a: Tensor, b: Tensor, tolerance: float) -> tuple[bool, float]:
    """Whether ‖a − b‖ ≤ tolerance · ‖b‖, and the largest difference. NaN and infinity equal nothing."""
    if a.numel() == 0:
        return True, 0.0
    difference = a.double() - b.double()
    distance = _norm(difference)
    return math.isfinite(distance) and distance <= tolerance * _norm(b), _largest(difference)


def tolerances(case: Case) -> dict[str, float]:
    """The relative tolerance of y, of all gradients together (g) and of each gradient."""
    eps = torch.finfo(case.dtype).eps
    accumulator = max(case.dtype, torch.float32, key=lambda dtype: torch.finfo(dtype).bits)
    eps_sum = torch.finfo(accumulator).eps

    def tolerance(roundings: int, longest: int) -> float:
        return 2 * (eps * math.sqrt(roundings) + eps_sum * math.sqrt(longest))

    activated = case.activation != "identity"
    k = len(case.spec.contractions) + activated
    sums = longest_sums(case.spec, case.batch, activated)
    behind = {name: tolerance(k, longest) for name, longest in sums.items()}
    if not case.bias:
        del behind["grad_bias"]
    elif not activated:
        behind["grad_bias"] = tolerance(1, sums["grad_bias"])  # a sum of grad_y: nothing was contracted
    gradients = {name: t for name, t in behind.items() if name != "y"}
    return {"y": behind["y"], "g": max(gradients.values()), **gradients}


def longest_sums(spec: LayerSpec, batch: int, activated: bool) -> dict[str, int]:
    """How many summands the longest sum behind y and behind each gradient has.

    y: a contraction sums over p, and r Kronecker products are added up on top, which makes p · r. grad_x:
    likewise, over q. A weight's gradient: over the samples and, as positions share a tied weight, the sizes
    of the other modes (the larger of in and out: the order of contraction decides which), of products whose
    own sums ran over p (contracted before this weight) or q (after). The bias: over the samples. With an
    activation, the sums of the whole forward pass lie behind every gradient: its derivative is taken there.
    """
    contractions, P, Q = spec.contractions, spec.in_factors, spec.out_factors
    forward = max(c.p for c in contractions) * spec.terms
    behind_gradients = forward if activated else 1
    sums = {"y": forward, "grad_x": max(max(c.q for c in contractions) * spec.terms, behind_gradients)}
    for i in range(len(contractions)):
        positions = math.prod(max(p, q) for j, (p, q) in enumerate(zip(P, Q, strict=True)) if j != i)
        others = [max(c.p, c.q) for c in contractions if c.weight != i]
        sums[f"grad_weight_{i}"] = max(batch * (positions if spec.tied else 1), *others, behind_gradients, 1)
    sums["grad_bias"] = max(batch, behind_gradients)
    return sums


def _values(problem: Problem, version: str) -> dict[str, Tensor]:
    y = problem.forward(version)
    gradients = problem.backward(y)
    together = torch.cat([gradient.flatten() for gradient in gradients.values()])
    return {
        "y": y.detach(),
        "g": together,
        **{f"grad_{name}": gradient for name, gradient in gradients.items()},
    }


def _steady(problem: Problem) -> None:
    """Changes grad_y so that neither rounding nor float16's range makes right implementations differ.

    Adds slope, how y grows with any one weight's scale. As ⟨grad_w, w⟩ = ⟨grad_y, slope⟩ for each weight w,
    no grad_w cancels to next to nothing, not even a 1x1 factor's, which is a single number. And zeroes grad_y
    where what enters the activation is so near 0 that rounding decides its sign: relu's derivative jumps.
    And scales it, as a weight's gradient is a sum over all samples and positions, too large for float16.
    """
    case, layer = problem.case, problem.layer
    with torch.no_grad():
        product = factor_linear(problem.x, layer.weights, structure=case.spec.structure, implementation="v1").double()
    z = product if layer.bias is None else product + layer.bias.detach().double()
    z.requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[case.activation](z).sum(), z)
    slope = slope * product
    grad_y = problem.grad_y.double()
    if slope.any():
        grad_y += slope / slope.square().mean().sqrt()
    if case.activation != "identity":
        near = tolerances(replace(case, activation="identity"))["y"] * z.square().mean().sqrt()
        grad_y[z.abs() <= near] = 0
    problem.grad_y = grad_y.to(case.dtype)
    if case.dtype == torch.float16:
        problem.grad_y *= _scale_in_range(problem)


def _scale_in_range(problem: Problem) -> float:
    """A power of two that brings the largest gradient, which float32 finds, to half of what float16 holds or less."""
    wide = Problem(replace(problem.case, dtype=torch.float32))
    wide.grad_y = problem.grad_y.float()
    largest = max(_largest(gradient) for gradient in wide.backward(wide.forward("v1")).values())
    # Gradients are linear in grad_y, and a power of two changes exponents alone: no relative difference changes.
    return 2.0 ** min(0, 15 - math.frexp(largest)[1])


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
