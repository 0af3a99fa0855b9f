"""The `check` command's numbers: run the implementations on one problem and compare them pair by pair.

Two tensors are equal if ‖a − b‖ ≤ 2 · (eps(dtype) · √k + eps(accumulator) · √N) · ‖b‖, in the Frobenius norm
and computed in float64: k roundings to the dtype and N summands in the longest sum lie behind the value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from factorlayer.cli.case import Problem
from factorlayer.cli.comparison import Comparison, Report, summary
from factorlayer.cli.subject import Recurrent, Single
from factorlayer.maths.spec import LayerSpec

JUMPING = {"relu", "leaky_relu", "prelu", "abs"}
COMPARING = {"lt", "le", "gt", "ge", "maximum", "minimum"}
FEW, SMALL = 32, 1e-6


def check(problem: Problem) -> Report:
    """Runs every implementation there is, forward and backward, and compares each pair."""
    report = Report(problem.case, problem.explain(), unavailable=problem.unavailable())
    report.summary = summary(problem, report.unavailable)
    jumping = _steady(problem)
    values = {v: _values(problem, v) for v in problem.modules if v not in report.unavailable}
    for version, tensors in values.items():
        for name in ("y", "g"):
            report.norms[f"{version}_{name}"] = _norm(tensors[name])
    allowed = {name: t + (name != "y") * math.sqrt(jumping) for name, t in tolerances(problem).items()}
    for a, b in itertools.combinations(values, 2):
        for name, tolerance in allowed.items():
            left, right = values[a][name], values[b][name]
            equal, difference = compare(left, right, tolerance)
            size = relative(left, right), tuple(left.shape)
            report.comparisons.append(Comparison(f"{a}_{name}", f"{b}_{name}", equal, difference, tolerance, *size))
    return report


def compare(a: Tensor, b: Tensor, tolerance: float) -> tuple[bool, float]:
    """Whether ‖a − b‖ ≤ tolerance · ‖b‖, and the largest difference. NaN and infinity equal nothing."""
    if a.numel() == 0:
        return True, 0.0
    difference = a.double() - b.double()
    distance = _norm(difference)
    return math.isfinite(distance) and distance <= tolerance * _norm(b), _largest(difference)


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    distance, norm = _norm(a.double() - b.double()), _norm(b)
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


def tolerances(problem: Problem) -> dict[str, float]:
    """The relative tolerance of y, of all gradients together (g) and of each gradient.

    Behind the y of several layers lie the contractions of all of them and what is between; behind a gradient they lie
    twice, forward and backward.
    """
    eps = torch.finfo(problem.case.dtype).eps
    accumulator = max(problem.case.dtype, torch.float32, key=lambda dtype: torch.finfo(dtype).bits)
    eps_sum = torch.finfo(accumulator).eps

    def tolerance(roundings: int, longest: int) -> float:
        return 2 * (eps * math.sqrt(roundings) + eps_sum * math.sqrt(longest))

    calls = problem.calls
    activations = sum(call.layer.chain.activation != "identity" for call in calls)
    k = sum(len(call.layer.spec.contractions) for call in calls) + max(activations, len(calls) - 1)
    if isinstance(problem.case.subject, Recurrent):
        k *= max(problem.case.subject.steps, 1)  # one step stands on the other
    if isinstance(problem.case.subject, Single):
        sums = longest_sums(calls[0].layer.spec, calls[0].rows, activations > 0)
        of_all = calls[0].rows * calls[0].layer.spec.out_features  # for parameters of the activation
        names = ["y", *(f"grad_{name}" for name in problem.inputs)]
        behind = {name: tolerance(k, sums.get(name, of_all)) for name in names}
        if not activations and "grad_bias" in behind:
            behind["grad_bias"] = tolerance(1, sums["grad_bias"])  # a sum of grad_y: nothing was contracted
    else:
        longest = [longest_sums(call.layer.spec, call.rows, True) for call in calls]
        through = max(max(sums["y"], sums["grad_x"]) for sums in longest)
        most = max(max(sums.values()) for sums in longest)
        behind = {"y": tolerance(k, max(sums["y"] for sums in longest)), "grad_x": tolerance(2 * k, through)}
        behind |= {f"grad_{name}": tolerance(2 * k, most) for name in problem.inputs if name != "x"}
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


def _steady(problem: Problem) -> float:
    """Changes grad_y so that neither rounding nor float16's range makes right implementations differ. Returns the share
    of values, of those that enter activations between layers, whose derivative rounding may decide all the same.

    Adds, for each parameter w of a few numbers, slope, how y grows with w's scale: as ⟨grad_w, w⟩ = ⟨grad_y, slope⟩,
    grad_w does not cancel to next to nothing, not even a 1x1 factor's, which is a single number. And zeroes grad_y
    where what enters relu is so near 0 that rounding decides its sign, where the derivative jumps: in the elements of
    y, or in samples, if that leaves a tenth of them. And scales it, as a weight's gradient is a sum over all samples
    and positions, too large for float16.
    """
    exact = problem.in_float64()
    with torch.no_grad(), _Jumps(tolerances(problem)["y"]) as jumps:
        y = exact.forward("v1")
    grad_y = exact.grad_y
    for slope in _slopes(exact, y):
        grad_y += slope / slope.square().mean().sqrt()
    batch = len(problem.x)
    samples = torch.zeros(batch, dtype=torch.bool, device=y.device)
    jumping, by_sample = 0.0, 0.0
    for near, out in jumps.found:
        share = near.double().mean().item()
        if out.data_ptr() == y.data_ptr() and out.numel() == y.numel():
            grad_y[near.reshape(y.shape)] = 0
        elif batch and y.shape[:1] == (batch,) and near.dim() and near.shape[0] % batch == 0:
            samples |= near.reshape(batch, -1).any(1)
            by_sample += share
        else:
            jumping += share
    if samples.double().mean() >= 0.9:
        jumping += by_sample
    elif samples.any():
        grad_y[samples] = 0
    problem.grad_y = grad_y.to(problem.case.dtype)
    if problem.case.dtype == torch.float16:
        largest = max(_largest(gradient) for gradient in exact.backward(exact.forward("v1")).values())
        # Gradients are linear in grad_y, and a power of two changes exponents alone: no relative difference changes.
        problem.grad_y *= 2.0 ** min(0, 15 - math.frexp(largest)[1])
    return jumping / 2  # near on either side: half of them at most cross


def _slopes(exact: Problem, y: Tensor) -> Iterator[Tensor]:
    for name, parameter in exact.inputs.items():
        if name != "x" and parameter.numel() < FEW:
            with torch.no_grad():
                before = parameter.clone()
                parameter *= 1 + SMALL
                slope = (exact.forward("v1") - y) / SMALL
                parameter.copy_(before)
            if slope.any():
                yield slope


class _Jumps(TorchFunctionMode):
    """Notes where derivatives jump: what enters relu and its like, or is compared. Whether it is near there, and the
    result."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")  # of what is done in place, too
        if self.found and name == "square" and args[0].data_ptr() == self.found[-1][1].data_ptr():
            self.found.pop()  # the derivative of relu squared does not jump
        near = self._near(args[:1] if name in JUMPING else args[:2] if name in COMPARING and len(args) > 1 else ())
        y = func(*args, **(kwargs or {}))
        if near is not None:
            self.found.append((near, y))
        return y

    def _near(self, args: Sequence[Any]) -> Tensor | None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors or not all(tensor.is_floating_point() and tensor.numel() for tensor in tensors):
            return None
        z = args[0] if len(args) == 1 else args[0] - args[1]
        scale = max(tensors, key=Tensor.numel).square().mean().sqrt()
        return z.abs() <= self.tolerance * scale  # type: ignore[no-any-return]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
