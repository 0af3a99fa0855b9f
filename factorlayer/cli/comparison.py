"""What `check` found, in words and as JSON: what was compared, every norm and pair of values, and the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from factorlayer.cli.about import kernels
from factorlayer.cli.case import VERSIONS, Case, Problem
from factorlayer.cli.subject import Own, Single
from factorlayer.functional import why_auto_is_batched

WORST = 5  # pairs that the verdict names
FEW = 6  # of what has a gradient: named one by one


@dataclass(frozen=True)
class Comparison:
    left: str  # v1_y, v2_grad_x …
    right: str
    equal: bool
    difference: float  # the largest absolute one
    tolerance: float  # of the Frobenius norm of the difference, relative to the right side's
    distance: float = 0.0  # that norm, relative
    shape: tuple[int, ...] = ()  # of either side

    def __str__(self) -> str:
        """The sentence on a pair that differs: v1_y == v2_y, 16x1024, differs by 1.0e-04 of its norm where 2.3e-06 is
        allowed."""
        size = "x".join(map(str, self.shape)) or "a number"
        return (
            f"{self.left} == {self.right}, {size}, differs by {self.distance:.1e} of its norm "
            f"where {self.tolerance:.1e} is allowed"
        )


@dataclass
class Report:
    case: Case
    layers: list[str] = field(default_factory=list)  # as they were understood
    norms: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Everything compared is equal, and v3 is there where it should be, on a CPU."""
        complete = not self.unavailable or self.case.device.type != "cpu"
        return complete and all(comparison.equal for comparison in self.comparisons)

    @property
    def verdict(self) -> str:
        """One line: how many comparisons are True, and the worst of those that are not."""
        total = len(self.comparisons)
        missing = f", without {' and '.join(self.unavailable)}" if self.unavailable else ""
        if missing and self.case.device.type == "cpu":
            missing += ", which a CPU should have: the check failed"
        wrong = [c for c in self.comparisons if not c.equal]
        if not wrong:
            return f"all {total} comparisons True{missing}"
        # What is not a number is worst of all.
        wrong.sort(key=lambda c: c.distance / c.tolerance if math.isfinite(c.distance) else math.inf, reverse=True)
        named = "; ".join(map(str, wrong[:WORST]))
        rest = f"; and {len(wrong) - WORST} more" if len(wrong) > WORST else ""
        return f"{len(wrong)} of {total} False{missing}: {named}{rest}"

    def lines(self) -> list[str]:
        subject = self.case.subject
        layers = [] if isinstance(subject, Single) and isinstance(subject.activation, str) else self.layers
        norms = [f"||{name}|| = {norm:.6e}" for name, norm in self.norms.items()]
        pairs = [f"{c.left} == {c.right}: {c.equal} ({c.difference:.1e})" for c in self.comparisons]
        return [*self.summary, *layers, *norms, *pairs, self.verdict]

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN and no infinity: they become null."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "summary": self.summary,
            "unavailable": self.unavailable,
            "layers": self.layers,
            "norms": {name: _finite(norm) for name, norm in self.norms.items()},
            "comparisons": [
                {**asdict(c), "difference": _finite(c.difference), "distance": _finite(c.distance)}
                for c in self.comparisons
            ],
        }


def summary(problem: Problem, unavailable: dict[str, str]) -> list[str]:
    """What is compared: sizes and parameters, and which implementations run."""
    case = problem.case
    sizes = f"x {list(problem.x.shape)} -> y {list(problem.grad_y.shape)}"
    count = sum(parameter.numel() for parameter in problem.module.parameters())
    dtype, threads = str(case.dtype).removeprefix("torch."), torch.get_num_threads()
    where = f"{dtype} on {case.device}" + (f", {threads} thread{'s' * (threads > 1)}" * (case.device.type == "cpu"))
    lines = [f"{case.subject}: {sizes}, {count} parameters{_of_dense(problem)}, {where}"]
    names = {"v3": f"v3 fused ({kernels(case.device)})", "model": "model as it is"}
    ways = [names.get(v, f"{v} {VERSIONS.get(v)}") for v in problem.modules if v not in unavailable]
    inputs = list(problem.inputs)
    named = ", ".join(inputs) if len(inputs) <= FEW else f"x and {len(inputs) - 1} parameters"
    lines.append(f"compared: {', '.join(ways)}; y, the gradients of {named}, and all of these as one, g")
    return lines + ([f"auto runs {_auto(problem)}"] if isinstance(case.subject, Single) else [])


def _of_dense(problem: Problem) -> str:
    """How many parameters dense layers in the place of the same would have."""
    if isinstance(problem.case.subject, Own):
        return ""
    layers = {call.name: call.layer.spec for call in problem.calls}
    biases = sum(p.numel() for name, p in problem.module.named_parameters() if name.split(".")[-1].startswith("bias"))
    return f" (dense: {sum(spec.in_features * spec.out_features for spec in layers.values()) + biases})"


def _auto(problem: Problem) -> str:
    x, chain = problem.x, problem.calls[0].layer.chain
    reason = why_auto_is_batched(chain, x, x.numel() // chain.in_features)
    return "fused" if reason is None else f"batched, because {reason}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
