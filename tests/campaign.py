"""Cases drawn at random, one after the other, as long as one likes: python tests/campaign.py --seed 1 --seconds 600

Fused is compared with naive in float64 by the rule of oracle.py, for y and every gradient, measured by batched in the
same dtype; it is run twice for equal bits; where a NaN or an infinity is planted, it is where batched or
float64 has it, as far as the same numbers without it are well inside the dtype's range. On
`--device emulator` kernels for GPUs are drawn and run on the CPU by tests/emulator. Every fault is printed with the
command that draws it again.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from drawn import KINKED, Call, Drawn, draw, inputs
from oracle import relative_errors
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorLinear

DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = {name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()} | {"tf32": 2.0**-10}
MOST_FAULTS = 10  # of a run
# A quantity that moves by as much of itself as its inputs do by a rounding has not one right digit in this arithmetic:
# sin(1e4·x) of 16 bits. How far off two implementations are there is luck, however many times.
UNDETERMINED = 0.5
# A slope jumps where a number is zero, and which numbers lie so near that a rounding decides on their side is luck: a
# sum's own roundings reach farther than one of each input. Tries that move by so much more find those numbers.
REACH = 4
REFUSED = "a recurrent matrix that is a sum of products", "recurrent weights do not fit in shared memory"  # by a GPU
ROOM = 8  # what is planted is looked for where numbers would be smaller than the largest of the dtype by as much
Results = dict[str, Tensor]
Inputs = tuple[nn.Module, Tensor, Tensor]


class FaultError(AssertionError):
    """What a case shows to be wrong."""


@contextlib.contextmanager
def arithmetic(name: str) -> Iterator[None]:
    """PyTorch's switch for float32 products on a GPU."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def results(module: nn.Module, x: Tensor, grad_y: Tensor, implementation: str) -> Results:
    """y and every gradient, by name."""
    module.implementation = implementation
    x = x.detach().requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}
    y = module(x)
    gradients = torch.autograd.grad(y, list(leaves.values()), grad_y, materialize_grads=True)
    return {"y": y.detach()} | {f"grad_{name}": g.detach() for name, g in zip(leaves, gradients, strict=True)}


def reference(given: Inputs) -> Results:
    module, x, grad_y = given
    with arithmetic("float64"):
        return results(copy.deepcopy(module).double(), x.double(), grad_y.double(), "naive")


def poison(device: str) -> None:
    """What fresh memory may hold."""
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
        torch.full((size,), math.nan, device=device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def longest_sum(module: nn.Module, batch: int) -> int:
    """Behind any value, as in oracle.py: along a contraction, or of a gradient over samples and positions."""
    longest = 1
    for layer in module.modules():
        if isinstance(layer, (FactorLinear, Call)):
            for c in layer.spec.contractions:
                longest = max(longest, c.p * layer.spec.terms, batch * (c.outer * c.inner if c.tied else 1))
            longest = max(longest, batch * layer.spec.out_features)  # of a learned number of its activation
        elif isinstance(layer, FactorGRU):
            longest = max(longest, layer.input_size, layer.hidden_size, batch)
        elif isinstance(layer, nn.Linear):
            longest = max(longest, layer.in_features, batch * layer.out_features)
    return longest


def moved_references(draws: Sequence[Inputs], eps: float) -> Iterator[list[Results]]:
    """Of eight tries in which every number given moves by eps, one way or the other."""
    generator = torch.Generator().manual_seed(0)

    def move(tensor: Tensor) -> Tensor:
        signs = 2 * torch.randint(0, 2, tensor.shape, generator=generator).double() - 1
        return tensor.double() * (1 + eps * signs.to(tensor.device))

    for _ in range(8):
        moved = []
        for module, x, grad_y in draws:
            module = copy.deepcopy(module).double()
            for parameter in module.parameters():
                parameter.data = move(parameter.data)
            moved.append(reference((module, move(x), move(grad_y))))
        yield moved


def check(drawn: Drawn, device: str) -> str:
    """What was compared, or a FaultError."""
    torch.set_num_threads(drawn.threads)
    dtype = DTYPES[drawn.dtype]
    first = inputs(drawn, dtype, device, 0)
    fewest = min([first[1].numel(), first[2].numel(), *(p.numel() for p in first[0].parameters())])
    count = 1 if drawn.plant or not drawn.batch else max(1, min(12, 64 // max(1, fewest)))
    draws = [first, *(inputs(drawn, dtype, device, i) for i in range(1, count))]
    with arithmetic(drawn.dtype):
        fused, again, batched = [], [], []
        for given in draws:
            poison(device)
            try:
                fused.append(results(*given, "fused"))
            except ValueError as error:
                if any(reason in str(error) for reason in REFUSED):
                    return "refused"
                raise
            again.append(results(*given, "fused"))
            batched.append(results(*given, "batched"))
    for one, other in zip(fused, again, strict=True):
        for name, value in one.items():
            if not torch.equal(bits(value), bits(other[name])):
                raise FaultError(f"{name} has other bits in a second run")
    right = [reference(given) for given in draws]
    alone = drawn.kind in ("layer", "call")
    if drawn.plant:
        kept = [judged_without_plant(drawn, dtype, device, alone)]
    else:
        kept = [judged(one, exact, alone) for one, exact in zip(batched, right, strict=True)]
    for one, other, exact, keep in zip(fused, batched, right, kept, strict=True):
        for name, value in one.items():
            if (value.shape, value.dtype, value.device) != (exact[name].shape, dtype, first[1].device):
                raise FaultError(f"{name} is {value.dtype} {tuple(value.shape)} on {value.device}")
            if drawn.plant:
                check_planted(name, value, other[name], exact[name], keep[name])
            elif not bool((value.isfinite() | ~keep[name]).all()):
                raise FaultError(f"{name} is not finite where batched is")
    if drawn.plant:
        return "planted" if any(bool(keep.any()) for keep in kept[0].values()) else "out of range"
    return check_errors(drawn, draws, (fused, batched, right), kept)


def judged_without_plant(drawn: Drawn, dtype: torch.dtype, device: str, alone: bool) -> Results:
    """Where a number that is not finite comes from the plant alone: the others, which are all positive, overflow
    nowhere near it. At the end of a range one order of sums is still finite where another one is not."""
    plain = inputs(drawn, dtype, device, 0, planted=False)
    with arithmetic(drawn.dtype):
        batched = results(*plain, "batched")
    return judged(batched, reference(plain), alone, ROOM)


def judged(batched: Results, exact: Results, alone: bool, room: float = 2) -> Results:
    """Where batched does not overflow, nor the number itself all but does. In a block, where layers stand behind one
    another, an error of what overflows is as large as any number that does not: then nothing is judged."""
    kept = {
        name: value.isfinite() & (exact[name].abs() <= torch.finfo(value.dtype).max / room)
        for name, value in batched.items()
    }
    if alone or all(bool(keep.all()) for keep in kept.values()):
        return kept
    return {name: torch.zeros_like(keep) for name, keep in kept.items()}


def check_planted(name: str, value: Tensor, other: Tensor, exact: Tensor, keep: Tensor) -> None:
    """What is not finite is where batched has it, or float64, among what is judged. They differ where batched rounds a
    small number between two layers to zero, which makes a NaN of an infinity; fused may keep that number."""
    for has in (torch.isnan, torch.isposinf, torch.isneginf):
        places = ((has(value) != has(other)) & (has(value) != has(exact)) & keep).nonzero()
        if len(places):
            raise FaultError(
                f"{has.__name__} of {name} is not as in batched at {len(places)} places, "
                f"the first {places[0].tolist()}: {value[tuple(places[0])]}, batched {other[tuple(places[0])]}"
            )


def check_errors(
    drawn: Drawn,
    draws: Sequence[Inputs],
    results: tuple[list[Results], list[Results], list[Results]],
    kept: Sequence[Results],
) -> str:
    """The rule for fused, batched and the right results, where they are judged."""
    fused, batched, right = results

    def compared(results: Sequence[Results]) -> list[Results]:
        return [
            {name: torch.where(keep[name], value, 0) for name, value in one.items()}
            for one, keep in zip(results, kept, strict=True)
        ]

    exact = compared(right)
    of_fused, of_batched = relative_errors(compared(fused), exact), relative_errors(compared(batched), exact)
    uncertain = math.sqrt(longest_sum(draws[0][0], drawn.batch)) if drawn.dtype == "float64" else 1.0
    allowed = {name: 2 * error + 4 * uncertain * EPS[drawn.dtype] for name, error in of_batched.items()}
    if not any(bool(keep.any()) for keep in itertools.chain.from_iterable(one.values() for one in kept)):
        return "out of range"
    if all(of_fused[name] <= allowed[name] for name in allowed):
        return "by the rule"
    # Of 16 bits the arithmetic's, as in oracle.py, unless it matters how a state is rounded, which every implementation
    # does in its own way: where a slope jumps, a rounding decides on which side a number lies, and in a block the
    # layers behind a state magnify its rounding.
    is_kinked = bool(KINKED & set(drawn.activations))
    is_layer = drawn.kind in ("layer", "call") and not is_kinked
    narrow = drawn.dtype in ("bfloat16", "float16") and is_layer
    eps = EPS["float32" if narrow else drawn.dtype] * (REACH if is_kinked else 1)
    errors = [relative_errors(compared(moved), exact) for moved in moved_references(draws, eps)]
    moves = {name: max(error[name] for error in errors) for name in exact[0]}
    wrong = {
        name: f"fused is off by {of_fused[name]:.2e}, batched by {of_batched[name]:.2e}, "
        f"inputs move it by {moves[name]:.2e}"
        for name in of_fused
        if moves[name] < UNDETERMINED and not of_fused[name] <= max(allowed[name], 2 * uncertain * moves[name])
    }
    if wrong:
        raise FaultError(f"{wrong}")
    return "by how far inputs move it"


def cases(seed: int, device: str, bytes: int | None) -> Callable[[int], tuple[str, Callable[[], str]]]:
    """What a number stands for: its words, and what checks it."""
    if device == "emulator":
        from emulated import Emulated

        return Emulated(seed, Path(tempfile.mkdtemp(prefix="emulated"))).case

    def case(number: int) -> tuple[str, Callable[[], str]]:
        drawn = draw(seed, number, device, bytes)
        return str(drawn), lambda: check(drawn, device)

    return case


def campaign(
    seed: int,
    seconds: float,
    device: str = "cpu",
    only: int | None = None,
    bytes: int | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Counter[str], list[str]]:
    """How many cases ended in which way, and the faults in words."""
    draw_case, counts, faults = cases(seed, device, bytes), Counter[str](), list[str]()
    end, number = time.monotonic() + seconds, only or 0
    threads = torch.get_num_threads()
    while True:
        words = f"case {number}"
        try:
            words, run = draw_case(number)
            counts[run()] += 1
        except Exception as error:  # any at all is a fault, and the next case is another one
            reason = str(error) if isinstance(error, FaultError) else traceback.format_exc()
            again = f"python tests/campaign.py --seed {seed} --case {number} --device {device}"
            again += "" if bytes is None else f" --bytes {bytes}"
            faults.append(f"{words}\n  {reason}\n  again: {again}")
            say(faults[-1])
            counts["faults"] += 1
        number += 1
        if only is not None or time.monotonic() >= end or len(faults) >= MOST_FAULTS:
            break
    torch.set_num_threads(threads)
    return counts, faults


def main(
    seed: Annotated[int, typer.Option(help="What all cases are drawn from.")],
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60,
    device: Annotated[str, typer.Option(help="cpu, cuda or emulator.")] = "cpu",
    case: Annotated[int | None, typer.Option(help="Only the case of this number.")] = None,
    bytes: Annotated[int | None, typer.Option(help="Of the largest state; by default 4 MiB, on a GPU 64.")] = None,
) -> None:
    """Draw cases and check them. Exits with 1 if there are faults."""
    if device not in ("cpu", "cuda", "emulator"):
        raise typer.BadParameter(f"cpu, cuda or emulator; it is {device}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("this PyTorch finds no GPU", param_hint="--device")
    start = time.monotonic()
    counts, faults = campaign(seed, seconds, device, case, bytes)
    ends = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"seed {seed} on {device}: {counts.total()} cases in {time.monotonic() - start:.0f} s: {ends}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    typer.run(main)
