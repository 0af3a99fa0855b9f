"""Runs compute-sanitizer over tiny cases: python tests/gpu/sanitize.py [memcheck racecheck initcheck synccheck]

A process for each tool; each runs every case of this file's list through the fused implementation and compares the
outputs. A line sums up what each tool found; the exit code is 1 if that is anything, or if a tool could not do it.

No kernels run but those under test: inputs are made on the CPU and copied, outputs are copied back and compared there.
So initcheck sees memory that a kernel left unwritten, and nothing of PyTorch's. Each tensor has an allocation of its
own, whose ends memcheck knows.

Two tools do not get all cases. initcheck does not see what the copy engine writes (cp.async.bulk). racecheck takes an
mbarrier as order for what the arriving threads did themselves, not for the warp that one of them speaks for: where
warps read slabs of a ring by ldmatrix, tests/emulator, which follows that, has to do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factorlayer.chain import Chain
    from factorlayer.gpu import Gpu
    from factorlayer.spec import LayerSpec

TOOLS = {
    "memcheck": [],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}
MOST_SECONDS = 540  # for a tool
FOUND = 86  # the exit code that a finding makes
HERE = Path(__file__).resolve()
DONE = "cases ran and were right"

# in x out of every mode, samples, dtypes, and the rank if it is not 1
LAYERS = [
    ("kronecker", "32 32", 5, "float64 float32 tf32 bfloat16"),
    ("kronecker", "32x24 40x24", 70, "float32 tf32 bfloat16 float16"),
    ("kronecker", "2x3 24 24", 70, "tf32 bfloat16"),
    ("kronecker", "24 24", 5, "float32"),
    ("kronecker", "31 17", 3, "float32 bfloat16"),
    ("kronecker", "20x36 28x44", 2, "float16"),
    ("kronecker", "5x9 24x8", 70, "tf32"),
    ("kronecker", "3x5 4x2 6x7", 9, "float16"),
    ("kronecker", "4x6 9x5", 7, "float64 float32 bfloat16", 2),
    ("kronecker", "3 1000", 2, "float32"),
    ("kronecker", "1000 3", 2, "tf32"),
    ("kronecker", "8 8 8 8 8", 1, "bfloat16"),
    ("monarch", "32 32", 5, "float64 tf32 bfloat16"),
    ("monarch", "8x6 9x10", 70, "float32"),
    ("monarch", "4x6 9x5", 7, "tf32", 2),
    ("monarch", "2x3 3x2 4x5", 3, "float64 bfloat16"),
    ("monarch", "4 192", 70, "float32", 4),
    ("monarch", "4 192", 70, "tf32"),
    ("monarch", "16 64", 70, "bfloat16", 4),
]  # fmt: skip
# The same, of layers whose gradients are made as well
TRAINED = [
    ("kronecker", "32 32", 9, "float64 float32 tf32 float16"),
    ("kronecker", "112 128", 5, "bfloat16"),
    ("kronecker", "4x3 3x4 8x9", 9, "float32"),
    ("kronecker", "3x2 12x16 16x8", 70, "bfloat16"),
    ("kronecker", "5x4 6x7", 5, "float64"),
    ("kronecker", "4x3 3x5", 5, "float32", 2),
    ("monarch", "8x6 9x10", 70, "tf32 bfloat16"),
]  # fmt: skip


def main(tools: list[str]) -> int:
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        print(f"the tools are {', '.join(TOOLS)}; {', '.join(unknown)} came", file=sys.stderr)
        return 2
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is neither on the PATH nor with CUDA; install it or set CUDA_HOME", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as cache:
        # Memory checks want PyTorch to hand out each tensor by cudaMalloc.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FACTORLAYER_CACHE": cache}
        child = [sys.executable, str(HERE), "child"]
        compiling = [*child, "none"]
        plain = subprocess.run(compiling, env=environment, capture_output=True, text=True, check=False)
        if plain.returncode or DONE not in plain.stdout:
            print(f"without a tool: failed\n{plain.stdout}{plain.stderr}")
            return 1
        print(f"without a tool: {plain.stdout.strip().splitlines()[-1]}", flush=True)
        clean = [check(tool, [sanitizer, "--tool", tool], child, environment) for tool in tools or TOOLS]
    return 0 if all(clean) else 1


def check(tool: str, command: list[str], child: list[str], environment: dict[str, str]) -> bool:
    command = [*command, *TOOLS[tool], "--error-exitcode", str(FOUND), "--print-limit", "20", *child, tool]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{tool}: not done after {MOST_SECONDS} s", flush=True)
        return False
    output = done.stdout + done.stderr
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output)
    nothing = bool(summaries) and all(re.search(r"SUMMARY: 0 (errors|hazards)", summary) for summary in summaries)
    ran = re.findall(rf"\d+ {DONE}", output)
    clean = done.returncode == 0 and nothing and bool(ran)
    what = ran[-1] if ran else "the cases did not run to their end"
    print(
        f"{tool}: {'clean' if clean else 'FAILED'}, {what}, {'; '.join(summaries) or 'no summary'}, "
        f"exit code {done.returncode}, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    if not clean:
        print(output[-12000:], flush=True)
    return clean


def find_sanitizer() -> str | None:
    name = "compute-sanitizer"
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    found = [str(folder / name) for folder in folders if os.access(folder / name, os.X_OK)]
    return shutil.which(name) or (found[0] if found else None)


def cases() -> Iterator[tuple[str, LayerSpec, Chain, int, str, bool]]:
    """What the case is, the layer, its chain, samples, dtype, and whether gradients are made."""
    from factorlayer.chain import Chain
    from factorlayer.spec import LayerSpec

    for trained, (structure, factors, batch, dtypes, *rank) in [(row in TRAINED, row) for row in LAYERS + TRAINED]:
        sizes = [tuple(map(int, f"{factor}x{factor}".split("x")[:2])) for factor in factors.split()]
        spec = LayerSpec(structure, tuple(p for p, _ in sizes), tuple(q for _, q in sizes), *rank)
        for dtype in dtypes.split():
            what = f"{structure} {factors}, {batch} samples, {dtype}{', gradients' if trained else ''}"
            yield what, spec, Chain.of(spec, not trained, "identity" if trained else "relu"), batch, dtype, trained


def can_judge(tool: str, chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    from factorlayer.plan import BATCHES, plan
    from factorlayer.wide import Wide

    planned = plan(chain, dtype, BATCHES[0 if batch <= 64 else 1], gpu)
    if tool == "initcheck":
        return "BULK_STORE = true" not in planned.text()
    return (
        tool != "racecheck" or dtype not in ("float32", "tf32") or not any(isinstance(p, Wide) for p in planned.passes)
    )


def run_cases(tool: str) -> int:
    """The child: all cases that the tool can judge, each compared with naive in float64."""
    sys.path[:0] = [str(HERE.parents[2])]
    import torch

    from factorlayer.functional import run
    from factorlayer.gpu import Gpu

    def results(spec, chain, x, weights, bias, grad_y, implementation) -> list[torch.Tensor]:
        """y, and the gradients of x and of the weights if grad_y is given."""
        leaves = [t.detach().requires_grad_(grad_y is not None) for t in (x, *weights)]
        y = run(spec, chain, leaves[0], leaves[1:], bias, implementation, "sanitize")
        return [y.detach(), *(() if grad_y is None else torch.autograd.grad(y, leaves, grad_y))]

    tolerances = {"float64": 1e-13, "float32": 1e-5, "tf32": 4e-3, "bfloat16": 3e-2, "float16": 4e-3}
    count, wrong = 0, []
    major, minor = torch.cuda.get_device_capability()
    gpu = Gpu.of(major * 10 + minor)
    for case, spec, chain, batch, name, trained in cases():
        if not can_judge(tool, chain, name, batch, gpu):
            continue
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        generator = torch.Generator().manual_seed(count)

        def normal(*shape: int, scale: float = 1.0, dtype=dtype, generator=generator) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        x, bias = normal(batch, spec.in_features), normal(spec.out_features) if chain.bias else None
        weights = [normal(*shape, scale=shape[-1] ** -0.5) for shape in spec.weight_shapes]
        grad_y = normal(batch, spec.out_features) if trained else None

        def moved(to, x=x, weights=weights, bias=bias, grad_y=grad_y) -> list:
            return [
                to(x),
                [to(w) for w in weights],
                None if bias is None else to(bias),
                None if grad_y is None else to(grad_y),
            ]

        exact = results(spec, chain, *moved(torch.Tensor.double), "naive")
        torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        found = results(spec, chain, *moved(torch.Tensor.cuda), "fused")
        count += 1
        for one, right in zip(found, exact, strict=True):
            error = float((one.cpu().double() - right).norm() / right.norm())
            if not error <= tolerances[name]:
                wrong.append(f"{case}: off by {error:.1e}")
    print("\n".join(wrong) if wrong else f"{count} {DONE}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_cases(sys.argv[2]) if sys.argv[1:2] == ["child"] else main(sys.argv[1:]))
