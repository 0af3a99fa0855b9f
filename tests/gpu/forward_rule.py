"""The rule for right numbers (design: numbers), on a GPU: fused against naive in float64, measured by batched.

As in oracle.py, whose cases and inputs these are; here for y alone, with TensorFloat-32 as a dtype of its own. The
output's memory holds NaNs before a call, so that an element that is not written shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from oracle import Case, Inputs, draw_inputs, movement, relative_errors, results
from torch import Tensor

from factorlayer.functional import run

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EPS = {name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()} | {"tf32": 2.0**-10}


@contextlib.contextmanager
def arithmetic(name: str) -> Iterator[None]:
    """PyTorch's switches for float32 products and recurrences, as `name` wants them. That for convolutions goes with
    them, as torch.export cannot read the two of cuDNN where they differ."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32" if name == "tf32" else "ieee"
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def to_gpu(inputs: Inputs) -> Inputs:
    """With the strides that the tensors have."""

    def move(t: Tensor) -> Tensor:
        moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
        if 0 in t.stride() and t.numel():
            moved[:1].copy_(t[:1])
        else:
            moved.copy_(t)
        return moved

    bias = None if inputs.bias is None else move(inputs.bias)
    return Inputs(move(inputs.x), [move(w) for w in inputs.weights], bias, inputs.grad_y.cuda())


def forward(case: Case, inputs: Inputs, implementation: str) -> Tensor:
    with torch.no_grad():
        return run(case.spec, case.chain, inputs.x, inputs.weights, inputs.bias, implementation, "test")


def forward_on_poison(case: Case, inputs: Inputs) -> Tensor:
    """Of fused, which finds NaNs where it is to write."""
    size = math.prod(inputs.x.shape[:-1]) * case.spec.out_features * inputs.x.element_size()
    poisoned = poison(size)
    y = forward(case, inputs, "fused")
    if size and inputs.x.is_contiguous():
        assert any(first <= y.data_ptr() < last for first, last in poisoned), "the output lies in memory without NaNs"
    return y


def poison(size: int) -> list[tuple[int, int]]:
    """Fills memory that the allocator will hand out next, in blocks of `size` bytes, and further memory for scratch."""
    torch.cuda.empty_cache()
    count = 16 if size < 1 << 20 else 4
    blocks = [torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda") for _ in range(count)]
    blocks += [torch.full((n << 20,), 255, dtype=torch.uint8, device="cuda") for n in (32, 32, 1, 1)]
    return [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]


def draw(case: Case, dtype: str, seed: int = 0, layout: str = "contiguous", badly_scaled: bool = False) -> list[Inputs]:
    """Several draws where there are few numbers: the error of one that cancels is luck."""
    numbers = 1 if case.chain.parameters else case.batch * case.spec.out_features
    count = max(1, min(12, 256 // max(1, numbers)))
    return [draw_inputs(case, DTYPES[dtype], 1000 * seed + i, layout, badly_scaled) for i in range(count)]


def check_forward(
    case: Case, dtype: str, seed: int = 0, layout: str = "contiguous", badly_scaled: bool = False
) -> None:
    check_forward_on(case, dtype, draw(case, dtype, seed, layout, badly_scaled))


def check_forward_on(case: Case, dtype: str, drawn: Sequence[Inputs]) -> None:
    """AssertionError, with all the numbers, where fused breaks the rule. The inputs are on the CPU."""
    inputs = [to_gpu(i) for i in drawn]
    with arithmetic("float32"):
        right = [{"y": forward(case, i.to(torch.float64), "naive")} for i in inputs]
    with arithmetic(dtype):
        fused = [{"y": forward_on_poison(case, i)} for i in inputs]
        batched = [{"y": forward(case, i, "batched")} for i in inputs]
    for one, other, reference in zip(fused, batched, right, strict=True):
        y = one["y"]
        assert (y.shape, y.dtype, y.is_cuda) == (reference["y"].shape, DTYPES[dtype], True)
        assert bool((torch.isfinite(y) | ~torch.isfinite(other["y"])).all()), (
            f"{case}, {dtype}: not finite, as batched is"
        )
    of_fused, of_batched = relative_errors(fused, right)["y"], relative_errors(batched, right)["y"]
    if dtype == "float64":  # batched may be naive bit for bit
        longest = max(c.p for c in case.spec.contractions) * case.spec.terms
        allowed = 2 * EPS[dtype] * (math.sqrt(len(case.spec.contractions)) + math.sqrt(longest))
    else:
        allowed = 2 * of_batched + 4 * EPS[dtype]
    if of_fused <= allowed:
        return
    on_cpu = [results(case, i.to(torch.float64), "naive", []) for i in drawn]
    eps = EPS[dtype] if dtype in ("float64", "tf32") else EPS["float32"]
    moves = 2 * movement_of_y(case, drawn, on_cpu, eps)
    assert of_fused <= max(allowed, moves), (
        f"{case}, {dtype}: fused is off by {of_fused:.2e}, batched by {of_batched:.2e}; "
        f"{max(allowed, moves):.2e} is allowed"
    )


def movement_of_y(case: Case, drawn: Sequence[Inputs], right: Sequence[dict[str, Tensor]], eps: float) -> float:
    """How far y moves when every input moves by eps."""
    return movement(case, drawn, right, eps)["y"]
