"""What the command line works on: one layer with random weights, x and grad_y, and its three implementations.

cli.py builds a Case from what the user typed; compare.py and measure.py make the tensors of it and run them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from factorlayer.fused import why_not_fused
from factorlayer.layers import FactorLinear
from factorlayer.spec import LayerSpec

VERSIONS = {"v1": "naive", "v2": "batched", "v3": "fused"}
DTYPES = {"f": torch.float32, "d": torch.float64, "h": torch.float16, "b": torch.bfloat16}


def parse_factor(text: str) -> tuple[int, int]:
    """'32' is (32, 32), '20x36' is (20, 36): in and out."""
    match = re.fullmatch(r"([0-9]{1,18})(?:x([0-9]{1,18}))?", text)
    sizes = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if min(sizes) < 1:
        raise ValueError(f"a FACTOR should be a positive size or two, such as 32 or 20x36 (in x out); it is {text!r}")
    return sizes


def spec_of_factors(structure: str, factors: Sequence[tuple[int, int]], rank: int) -> LayerSpec:
    """The layer that FACTOR… means on the command line."""
    in_factors, out_factors = zip(*factors, strict=True)
    return LayerSpec(structure, in_factors, out_factors, rank)


def usable_device(name: str | None, dtype: torch.dtype) -> torch.device:
    """The device named (none: CUDA where there is one), or a ValueError if nothing can be computed on it."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, dtype=dtype, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
        count = torch.cuda.device_count()
        raise ValueError(
            f"the device should be one that computes {dtype} here: cpu"
            + (f" or cuda:0 … cuda:{count - 1}" if count else ", there is no CUDA device")
            + f"; it is {name!r} ({reason})"
        ) from None
    return device


@dataclass(frozen=True)
class Case:
    spec: LayerSpec
    batch: int
    dtype: torch.dtype
    device: torch.device
    activation: str = "identity"
    bias: bool = True
    seed: int = 0

    def configuration(self) -> dict[str, Any]:
        """What was asked, for --json."""
        spec = self.spec
        return {
            "batch": self.batch,
            "in_factors": spec.in_factors,
            "out_factors": spec.out_factors,
            "structure": spec.structure,
            "rank": spec.rank,
            "activation": self.activation,
            "bias": self.bias,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
        }


class Problem:
    """A case's layer and tensors, drawn in float64 on the CPU and cast: all dtypes see the same."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.layer = layer = FactorLinear(
            case.spec.in_features,
            case.spec.out_features,
            case.bias,
            structure=case.spec.structure,
            factors=(case.spec.in_factors, case.spec.out_factors),
            rank=case.spec.rank,
            activation=case.activation,
            dtype=torch.float64,
        )
        x = torch.randn(case.batch, layer.in_features, dtype=torch.float64)
        grad_y = torch.randn(case.batch, layer.out_features, dtype=torch.float64)
        layer.to(case.device, case.dtype)
        self.x = x.to(case.device, case.dtype).requires_grad_()
        self.grad_y = grad_y.to(case.device, case.dtype)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What has a gradient, by name."""
        return {"x": self.x, **dict(self.layer.named_parameters())}

    def forward(self, version: str) -> Tensor:
        """y by v1, v2 or v3."""
        self.layer.implementation = VERSIONS[version]
        y: Tensor = self.layer(self.x)
        return y

    def backward(self, y: Tensor) -> dict[str, Tensor]:
        """The gradients, by the name of what they are gradients of."""
        inputs = self.inputs
        return dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), self.grad_y), strict=True))

    def unavailable(self) -> dict[str, str]:
        """The implementations that cannot run here, each with the reason."""
        reason = why_not_fused(self.x, self.layer.chain)
        return {} if reason is None else {"v3": reason}
