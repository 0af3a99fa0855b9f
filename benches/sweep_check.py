"""Whether a drawn row is right: some samples against float64, gradients of weights against the batched implementation,
and against float64 where that is another.

Rounding moves values across the places where a relu's derivative jumps; where few values decide a gradient, one of them
makes much of it. Values that float16 keeps as subnormal numbers have few digits, all the way back.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from benches.subjects import EPS, TOLERANCES, Call, Tensors, build
from benches.workloads import Block, Workload

SQUARING = ("square", "relu_squared")  # whose results grow with the number of layers, unless weights are small
SQUARING_GAIN, LARGEST_WEIGHT = 0.2, 2.0  # times and of what other weights are
GRADIENT_OF_HALF = 1 / 16  # of a layer in float16: sums over samples and positions stay in its range
OFF_AS_V2 = 4  # times what v2's gradient of a weight is off itself, by float64
MOST_SAMPLES, LEAST_SAMPLES, MOST_VALUES = 256, 4, 1 << 20
MOST_WIDE = 1 << 26  # numbers of a sample, of which a single one is compared beyond that


def draw_tensors(workload: Workload, dtype: str) -> Tensors:
    tensors = Tensors.random(workload, dtype)
    with torch.no_grad():
        if isinstance(workload, Block) and workload.activation in SQUARING:
            for weight in tensors.weights:
                most = LARGEST_WEIGHT / math.sqrt(weight.shape[-1])
                weight.clamp_(-most, most).mul_(SQUARING_GAIN)
        elif dtype == "float16" and not isinstance(workload, Block):
            tensors.grad_y *= GRADIENT_OF_HALF
    return tensors


def wrong(workload: Workload, dtype: str, tensors: Tensors, calls: dict[str, Call]) -> list[str]:
    """What each of them has wrong."""
    least = LEAST_SAMPLES if _widest(workload) <= MOST_WIDE else 1
    samples = min(workload.batch, max(least, min(MOST_SAMPLES, MOST_VALUES // max(workload.features))))
    picked = torch.linspace(0, workload.batch - 1, samples, device=tensors.x.device).long()
    exact = _in_float64(workload, tensors, picked)
    of_all = calls["v2"].run("forward_backward")[2:]
    allowed, allowed_gradient = _tolerances(workload, dtype, samples)
    of_weights = functools.cache(lambda: _weights_in_float64(workload, tensors))
    found = []
    for name, call in calls.items():
        (alone,) = call.run("forward")
        y, grad_x, *gradients = call.run("forward_backward")
        sampled = [(what, t.detach()[picked]) for what, t in (("y", alone), ("y", y), ("grad_x", grad_x))]
        expected = exact[0], exact[0], exact[1]
        pairs = [(*one, right) for one, right in zip(sampled, expected, strict=True)]
        for what, tensor, right in pairs:
            tolerance = allowed if what == "y" else allowed_gradient
            distance, most = _distance(tensor, right, tolerance, workload.batch)
            if not distance <= most:
                found.append(f"{name}: {what} is off by {distance:.1e}, at most {most:.1e} was expected")
        for i, (gradient, of_v2) in enumerate(zip(gradients, of_all, strict=True)):
            distance, most = _distance(gradient, of_v2, allowed_gradient, workload.batch)
            if not distance <= most:  # v2's may be the wrong one: sums that cancel, of states that were rounded
                right = of_weights()[i]
                distance, most = _distance(gradient, right, allowed_gradient, workload.batch)
                most = max(most, OFF_AS_V2 * _distance(of_v2, right, 0.0, workload.batch)[0])
            if not distance <= most:
                found.append(f"{name}: gradient {i} is off by {distance:.1e}, at most {most:.1e} was expected")
    return found


def _widest(workload: Workload) -> int:
    """How many numbers the widest state of a sample has by the definition, which contracts a Kronecker layer's last
    factor first."""
    if isinstance(workload, Block) or workload.structure != "kronecker":
        return max(workload.features)
    places = range(len(workload.in_factors) + 1)
    return max(math.prod(workload.in_factors[:k]) * math.prod(workload.out_factors[k:]) for k in places)


def _weights_in_float64(workload: Workload, tensors: Tensors) -> tuple[Tensor, ...]:
    """The gradients of the weights in float64, of all samples."""
    leaves: list[Tensor] = [nn.Parameter(t.detach().double()) for t in (tensors.x, *tensors.weights)]
    exact = Tensors(leaves[0], tensors.grad_y.double(), leaves[1:])
    return build("v2", workload, exact).run("forward_backward")[2:]


def _in_float64(workload: Workload, tensors: Tensors, picked: Tensor) -> tuple[Tensor, Tensor]:
    """y and grad_x of the samples picked."""
    x = tensors.x.detach()[picked].double().requires_grad_()
    weights: list[Tensor] = [nn.Parameter(weight.detach().double()) for weight in tensors.weights]
    exact = Tensors(x, tensors.grad_y[picked].double(), weights)
    y, grad_x, *_ = build("dense" if isinstance(workload, Block) else "v1", workload, exact).run("forward_backward")
    return y.detach(), grad_x


def _tolerances(workload: Workload, dtype: str, samples: int) -> tuple[float, float]:
    """The relative differences that are allowed of y and of gradients. A share s of values behind a jump makes a
    difference of sqrt(s)."""
    rounded = TOLERANCES[dtype] * math.sqrt(workload.depth)
    if not isinstance(workload, Block) or not workload.jumps:
        return rounded, rounded
    values = samples * min(workload.widths[1:-1])
    return rounded, rounded + math.sqrt(workload.jumps * (EPS[dtype] + 1 / values))


def _distance(tensor: Tensor, right: Tensor, tolerance: float, batch: int) -> tuple[float, float]:
    """The distance of two tensors in the Frobenius norm, and the most that is allowed."""
    limits = torch.finfo(tensor.dtype)
    last_digit = 4 * limits.smallest_normal * limits.eps * math.sqrt(batch * tensor.numel())
    distance = torch.linalg.vector_norm(tensor.detach().double() - right.detach().double()).item()
    return distance, tolerance * torch.linalg.vector_norm(right.detach().double()).item() + last_digit
