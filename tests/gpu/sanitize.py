"""Runs compute-sanitizer over tiny cases: python tests/gpu/sanitize.py [memcheck racecheck initcheck synccheck]

Each tool has a few processes, all at once, that share the cases of this file's list: a process runs its own through the
fused implementation and compares the outputs. A line sums up what each tool found; the exit code is 1 if that is
anything, or if a tool could not do it.

No kernels run but those under test: inputs are made on the CPU and copied, outputs are copied back and compared there.
So initcheck sees memory that a kernel left unwritten, and nothing of PyTorch's. Each tensor has an allocation of its
own, whose ends memcheck knows.

All tools get all cases, but for initcheck, which does not see what the copy engine writes (cp.async.bulk). The newest
compute-sanitizer is taken of those on the PATH, with CUDA and in the package nvidia-cuda-sanitizer-api, which has newer
ones than CUDA's. racecheck of 2025.3 takes an mbarrier as order for what the arriving threads did themselves, not for
the warp that one of them speaks for; release notes of 2025.4 and 2026.1 have such false reports among what is fixed.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2])]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from factorlayer import FactorMLP  # noqa: E402
from factorlayer.autograd import input_ops  # noqa: E402
from factorlayer.autograd.recurrent_ops import fused  # noqa: E402
from factorlayer.autograd.runtime import class_of_batch  # noqa: E402
from factorlayer.device.gpu import Gpu  # noqa: E402
from factorlayer.functional import run  # noqa: E402
from factorlayer.kernels.batches import BATCHES  # noqa: E402
from factorlayer.maths.chain import Chain  # noqa: E402
from factorlayer.maths.decoder import Decoder  # noqa: E402
from factorlayer.maths.noise import draw  # noqa: E402
from factorlayer.maths.recurrence import GATES, Recurrence  # noqa: E402
from factorlayer.maths.spec import LayerSpec  # noqa: E402
from factorlayer.maths.steps import Walk, naive  # noqa: E402
from factorlayer.plan.planner import plan  # noqa: E402

BARRIERS = ["--num-cuda-barriers", "8192"]  # mbarriers: the compiler counts a ring's once, however many slots it has
TOOLS = {
    "memcheck": [],
    "racecheck": ["--racecheck-report", "all", *BARRIERS],
    "initcheck": [],
    "synccheck": BARRIERS,
}
# Of several versions these get the newest: before 2025.4 it took some orders by mbarriers for none, and pieces of which
# cp.async reads the first bytes for whole ones. The others get the oldest: synccheck of 2026.4 takes an mbarrier where
# a block before had one for one that is initialized twice.
NEWEST = ("racecheck", "memcheck")
MOST_SECONDS = 540  # for a tool
SHARES = 4  # processes of a tool
FOUND = 86  # the exit code that a finding makes
DONE = "cases ran and were right"

# in x out of every mode, samples, dtypes, and the rank if it is not 1
LAYERS = [
    ("kronecker", "32x24 96x72", 170, "tf32"),
    ("kronecker", "3x5 4x2 6x7", 9, "float16"),
    ("kronecker", "3 1000", 2, "float32"),
    ("kronecker", "8 8 8 8 8", 1, "bfloat16"),
    ("monarch", "2x101 16x2", 2060, "float32"),
    ("monarch", "2x101 120x2", 2060, "bfloat16", 4),
    ("kronecker", "200 180", 20, "float64"),
    ("kronecker", "64 64", 100, "bfloat16"),
    ("monarch", "2x256 256x4", 256, "float32", 64),
    ("monarch", "4x56 56x4", 2060, "bfloat16", 16),
]  # fmt: skip
# The same, of layers whose gradients are made as well
TRAINED = [
    ("kronecker", "32 32", 70, "float64 tf32"),
    ("kronecker", "32 32", 20, "bfloat16"),
    ("kronecker", "72 72", 66, "bfloat16 tf32"),
    ("kronecker", "120 88", 198, "float64"),
    ("kronecker", "64 60", 24, "float32"),
    ("kronecker", "128 128", 5, "tf32"),
    ("kronecker", "8 8 8 8 8", 4, "float32"),
    ("kronecker", "8x9 8x9 8x9", 71, "float64"),
    ("kronecker", "4x3 3x4 8x9", 24, "float32"),
    ("kronecker", "3x2 12x16 32x24", 72, "bfloat16"),
    ("kronecker", "3x5 24x32 32x24", 72, "bfloat16"),
    ("kronecker", "4x3 3x5", 5, "float32", 2),
    ("kronecker", "8x5 4x6 96x80 3x7", 4, "tf32 bfloat16", 2),
    ("kronecker", "3 19", 8210, "float16", 3),
    ("kronecker", "160 32", 70, "tf32", 2),
    ("kronecker", "200x180 48", 70, "bfloat16", 2),
    ("kronecker", "48x40 40x64", 170, "bfloat16 tf32", 4),
    ("kronecker", "72 96", 66, "bfloat16", 2),
    ("monarch", "4x192 192x4", 320, "tf32", 32),
    ("monarch", "6x64 24x16", 260, "float64", 8),
    ("monarch", "5x9 9x60", 70, "float16", 5),
    ("monarch", "4x3 3x5 2x4", 260, "float32 float64"),
    ("monarch", "3x12 12x3", 8600, "float64", 2),
    ("monarch", "4x256 256x4", 300, "bfloat16", 64),
    ("monarch", "16 64x16", 20, "bfloat16", 8),
    ("monarch", "2x508 508x4", 260, "bfloat16", 64),
]  # fmt: skip
# The same with a bias and gelu, back through which they go
ACTIVATED = [
    ("kronecker", "24x48 32x64", 140, "bfloat16"),
    ("kronecker", "9x31 8x5", 70, "float32"),
    ("kronecker", "3x5 7x9 4x6", 100, "float64"),
    ("monarch", "4x768 192x4", 130, "bfloat16", 48),
]
# Factors, the features of several inputs, samples, dtype; gradients are made of all
INPUTS = [
    ("32 32", "512 512", 70, "bfloat16"),
    ("31x17 17x31", "500 27", 9, "float32"),
    ("64 64", "96 4000", 5, "float16"),
]

# Widths of a block's layers, the activation between them, samples, dtype, and whether gradients are made
BLOCKS = [
    ("24 40 8", "silu", 128, "bfloat16", True),
    ("13 21 21 5", "gelu", 128, "float16", True),
    ("24 128 100 8", "silu", 200, "tf32", True),
    ("127 67 5", "tanh", 130, "bfloat16", True),
    ("63 250 12", "elu", 300, "bfloat16", True),
    ("13 300 40", "silu", 200, "bfloat16", False),
    ("48 264 256 12", "elu", 200, "tf32", False),
    ("10 59 59 8", "silu", 150, "float64", True),
    ("1 73 73 73 1", "elu", 150, "float32", True),
    ("9 165 165 165 165 3", "elu", 40, "bfloat16", False),
    ("8 136 264 136 5", "silu", 20, "float32", False),
]

# Recurrences, sequences, steps, dtype; gradients are made of all
UNITS = [
    ("gru after; tied 1 4 8 8 1; tied 0 1 4 4 8; tanh", 5, 4, "bfloat16"),
    ("gru before reversed; untied 0 3 16 16 1; tanh", 3, 5, "float32"),
    ("gru after; untied 1 3 7 14 1; untied 0 1 6 3 7; bias; tanh", 3, 4, "float64"),
    ("gru after; tied 0 1 264 264 1; tanh", 3, 3, "bfloat16"),
    ("gru before; tied 0 1 264 264 1; tanh", 3, 3, "bfloat16"),
    ("gru after; tied 0 1 264 264 1; bias; tanh", 130, 3, "bfloat16"),
    ("gru after; tied 0 1 200 200 1; tanh", 70, 3, "tf32"),
    ("gru after; tied 1 64 72 72 1; tied 0 1 64 64 72; bias; tanh", 2, 4, "bfloat16"),
]

# Decoders, samples, dtype
DECODERS = [
    ("decode 5 3 40 2 4 scores biased; gru after; tied 0 1 24 24 1; bias; tanh", 3, "bfloat16"),
    ("decode 8 0 1500 1 2 best; gru after; tied 0 1 16 16 1; tanh", 2, "float64"),
    ("decode 8 0 1500 1 1 drawn biased; gru after; tied 0 1 16 16 1; bias; tanh", 1, "float32"),
]
EMBEDDED = 11  # tokens of their embeddings


def main(tools: list[str]) -> int:
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        print(f"the tools are {', '.join(TOOLS)}; {', '.join(unknown)} came", file=sys.stderr)
        return 2
    sanitizers = find_sanitizers()
    if not sanitizers:
        print("compute-sanitizer is neither on the PATH nor with CUDA; install it or set CUDA_HOME", file=sys.stderr)
        return 2
    of_tool = {tool: sanitizers[-1 if tool in NEWEST else 0] for tool in tools or TOOLS}
    for tool, sanitizer in of_tool.items():
        print(f"{tool}: {sanitizer}, version {'.'.join(map(str, version_of(sanitizer)))}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        # Memory checks want PyTorch to hand out each tensor by cudaMalloc.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FACTORLAYER_CACHE": cache}
        compiling = in_shares([], "none", os.cpu_count() or 1, environment)
        if failed := [done.stdout + done.stderr for done in compiling if counted(done) is None]:
            print("without a tool: failed", *failed, sep="\n")
            return 1
        print(f"without a tool: {sum(map(counted, compiling))} {DONE}", flush=True)
        with ThreadPoolExecutor(len(TOOLS)) as pool:
            clean = pool.map(lambda tool: check(tool, [of_tool[tool], "--tool", tool], environment), of_tool)
    return 0 if all(clean) else 1


def in_shares(
    command: list[str], tool: str, shares: int, environment: dict[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Children under a command, at once; each runs every so many-th case. Raises TimeoutExpired."""

    def child(i: int) -> subprocess.CompletedProcess[str]:
        one = [*command, sys.executable, str(HERE), "child", tool, str(i), str(shares)]
        return subprocess.run(one, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)

    with ThreadPoolExecutor(shares) as pool:
        return list(pool.map(child, range(shares)))


def counted(done: subprocess.CompletedProcess[str]) -> int | None:
    """Cases that a child ran, if all were right."""
    ran = re.findall(rf"(\d+) {DONE}", done.stdout)
    return int(ran[-1]) if ran else None


def check(tool: str, command: list[str], environment: dict[str, str]) -> bool:
    command = [*command, *TOOLS[tool], "--error-exitcode", str(FOUND), "--print-limit", "20"]
    begun = time.monotonic()
    try:
        shares = in_shares(command, tool, SHARES, environment)
    except subprocess.TimeoutExpired:
        print(f"{tool}: not done after {MOST_SECONDS} s", flush=True)
        return False
    outputs = [done.stdout + done.stderr for done in shares]
    summaries = [re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output) for output in outputs]
    found = [line for lines in summaries for line in lines if not re.search(r"SUMMARY: 0 (errors|hazards)", line)]
    found += [line for output in outputs for line in re.findall(r".*Results might be incorrect.*", output)]
    counts = [counted(done) for done in shares]
    clean = all(summaries) and not found and None not in counts and not any(done.returncode for done in shares)
    codes = ", ".join(str(done.returncode) for done in shares)
    what = "the cases did not run to their end" if None in counts else f"{sum(filter(None, counts))} {DONE}"
    print(
        f"{tool}: {'clean' if clean else 'FAILED'}, {what}, {'; '.join(found) or 'nothing found'}, "
        f"exit codes {codes}, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    if not clean:
        print(*(f"{output[:6000]}\n...\n{output[-6000:]}" for output in outputs), sep="\n", flush=True)
    return clean


def find_sanitizers() -> list[str]:
    """From the oldest to the newest one."""
    name = "compute-sanitizer"
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / part for home in homes if home for part in ("bin", "compute-sanitizer")]
    folders += [folder for path in sys.path for folder in Path(path).glob("nvidia/*/compute-sanitizer")]
    found = [str(folder / name) for folder in folders if os.access(folder / name, os.X_OK)]
    on_path = shutil.which(name)
    return sorted([on_path, *found] if on_path else found, key=version_of)


def version_of(sanitizer: str) -> tuple[int, ...]:
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    (version,) = re.findall(r"^Version ([\d.]+)", said, re.MULTILINE)
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True)
class Case:
    """`run(implementation, x, *tensors)` is y; gradients of all are made if it is trained."""

    name: str
    dtype: str
    batch: int
    out_features: int
    trained: bool
    shapes: tuple[tuple[int, ...], ...]  # of x and the tensors
    run: Callable[..., Tensor]
    spec: LayerSpec | None = None  # of a layer
    chain: Chain | None = None  # of a layer, or of the products that a recurrence makes of all steps at once
    by_pytorch: bool = False  # whether PyTorch makes products between its kernels


def cases() -> Iterator[Case]:
    for row in LAYERS + TRAINED + ACTIVATED:
        structure, factors, batch, dtypes, *rank = row
        trained, activated = row not in LAYERS, row in ACTIVATED
        sizes = [tuple(map(int, f"{factor}x{factor}".split("x")[:2])) for factor in factors.split()]
        spec = LayerSpec(structure, tuple(p for p, _ in sizes), tuple(q for _, q in sizes), *rank)
        activation = "gelu" if activated else "identity" if trained else "relu"
        chain = Chain.of(spec, not trained or activated, activation)

        def layer(implementation, x, *tensors, spec=spec, chain=chain) -> Tensor:
            weights, bias = (tensors[:-1], tensors[-1]) if chain.bias else (tensors, None)
            return run(spec, chain, x, weights, bias, implementation, "sanitize")

        shapes = ((batch, spec.in_features), *spec.weight_shapes, *([(spec.out_features,)] if chain.bias else []))
        for dtype in dtypes.split():
            name = f"{structure} {factors}, {batch} samples, {dtype}{', gradients' if trained else ''}"
            yield Case(name, dtype, batch, spec.out_features, trained, shapes, layer, spec, chain)
    for factors, features, batch, dtype in INPUTS:
        sizes = [tuple(map(int, f"{factor}x{factor}".split("x")[:2])) for factor in factors.split()]
        spec = LayerSpec("kronecker", tuple(p for p, _ in sizes), tuple(q for _, q in sizes))
        several = Chain(spec.contractions, inputs=tuple(map(int, features.split())))

        def of_inputs(implementation, x, *tensors, spec=spec, several=several) -> Tensor:
            others = len(several.inputs) - 1
            inputs, weights = [x, *tensors[:others]], tensors[others:]
            if implementation == "naive":
                return run(spec, several.alone, inputs, weights, None, implementation, "sanitize")
            return input_ops.fused_inputs(several.text, inputs, weights, True)

        shapes = (*((batch, n) for n in several.inputs), *spec.weight_shapes)
        name = f"{factors} of inputs {features}, {batch} samples, {dtype}, gradients"
        yield Case(name, dtype, batch, spec.out_features, True, shapes, of_inputs)
    for widths, activation, batch, dtype, trained in BLOCKS:
        features = list(map(int, widths.split()))
        block = FactorMLP(features, activation=activation)
        names = [name for name, _ in block.named_parameters()]

        def stack(implementation, x, *tensors, block=block, names=names) -> Tensor:
            block.implementation = implementation
            return torch.func.functional_call(block, dict(zip(names, tensors, strict=True)), x)

        shapes = ((batch, features[0]), *(tuple(p.shape) for p in block.parameters()))
        name = f"{widths} {activation}, {batch} samples, {dtype}{', gradients' if trained else ''}"
        yield Case(name, dtype, batch, features[-1], trained, shapes, stack)
    for text, sequences, steps, dtype in UNITS:
        unit = Recurrence.parse(text)
        walk = Walk(sequences, steps, of_sequence=1, of_step=sequences)

        def states(implementation, x, *tensors, unit=unit, walk=walk) -> Tensor:
            gates, initial, weights = [x, *tensors[:2]], tensors[2], tensors[3 : 3 + GATES * unit.weights]
            bias = tensors[-1] if unit.chain.bias else None
            if implementation == "naive":
                return naive(unit, gates, initial, weights, bias, None, walk, torch.tanh)
            return fused(unit, gates, initial, weights, bias, None, walk)

        of_gate = [
            (c.q, c.p) if c.tied else (c.outer * c.inner, c.q, c.p)
            for c in sorted(unit.chain.contractions, key=lambda c: c.weight)
        ]
        rows = (sequences * steps, unit.hidden)
        shapes = (rows, rows, rows, (sequences, unit.hidden), *of_gate * GATES, *[(unit.hidden,)] * unit.chain.bias)
        name, dense = f"{text}, {sequences} x {steps}, {dtype}, gradients", unit.chain.is_dense
        yield Case(name, dtype, rows[0], unit.hidden, True, shapes, states, chain=unit.chain, by_pytorch=dense)
    for text, samples, dtype in DECODERS:
        decoder = Decoder.parse(text)
        gates, hidden = GATES * decoder.hidden, decoder.hidden
        context = [(samples, decoder.context)] * (decoder.context > 0)
        of_head = [(decoder.vocabulary, hidden), *[(decoder.vocabulary,)] * decoder.biased]
        biases = [(gates,)] * 2 * decoder.recurrence.chain.bias
        of_layers = [[(gates, decoder.features_in(i)), (gates, hidden), *biases] for i in range(decoder.layers)]
        shapes = ((decoder.layers, samples, hidden), *context, (EMBEDDED, decoder.embedding), *of_head)
        shapes = (*shapes, *itertools.chain(*of_layers))
        made = (samples, decoder.vocabulary if decoder.made == "scores" else 1)
        yield Case(f"{text}, {samples} samples, {dtype}", dtype, *made, False, shapes, step_of(decoder))


def step_of(decoder: Decoder) -> Callable[..., Tensor]:
    """Tokens or scores, as floats or integers."""

    def step(implementation, state, *tensors) -> Tensor:
        context, tensors = (tensors[0], tensors[1:]) if decoder.context else (None, tensors)
        tokens = (torch.arange(state.shape[1]) * 3 % EMBEDDED).to(state.device)
        random = torch.tensor([3, 4, 0]).to(state.device) if decoder.made == "drawn" else None
        if implementation == "fused":
            return torch.ops.factorlayer.decode(tokens, state, context, tensors, random, 0.7, decoder.text)[0]
        embedding, head, *rest = tensors
        bias = rest.pop(0) if decoder.biased else None
        x = embedding[tokens] if context is None else torch.cat([embedding[tokens], context], 1)
        count = len(rest) // decoder.layers
        for layer in range(decoder.layers):
            x = torch.gru_cell(x, state[layer], *rest[layer * count : (layer + 1) * count])
        scores = torch.nn.functional.linear(x, head, bias)
        if decoder.made == "scores":
            return scores
        return scores.argmax(1) if random is None else draw(scores, None, random, 0.7)

    return step


def can_judge(tool: str, case: Case, gpu: Gpu) -> bool:
    if tool == "initcheck" and case.by_pytorch:
        return False  # it does not see what the copy engine writes
    if tool != "initcheck" or case.chain is None:
        return True
    planned = plan(case.chain, case.dtype, BATCHES[class_of_batch(case.batch)], gpu)
    return "BULK_STORE = true" not in planned.text()


def results(case: Case, tensors: list[Tensor], grad_y: Tensor, implementation: str) -> list[Tensor]:
    """y, and the gradients of x and of the tensors if the case is trained."""
    leaves = [t.detach().requires_grad_(case.trained) for t in tensors]
    y = case.run(implementation, *leaves)
    return [y.detach(), *(torch.autograd.grad(y, leaves, grad_y) if case.trained else ())]


def run_cases(tool: str, share: int, shares: int) -> int:
    """A child: of the cases that the tool can judge its own, each compared with naive in float64."""
    tolerances = {"float64": 1e-13, "float32": 1e-5, "tf32": 4e-3, "bfloat16": 3e-2, "float16": 4e-3}
    count, wrong = 0, []
    input_ops.slower_than_concatenated = lambda *_: None  # so that nothing is
    major, minor = torch.cuda.get_device_capability()
    for case in itertools.islice(cases(), share, None, shares):
        if not can_judge(tool, case, Gpu.of(major * 10 + minor)):
            continue
        generator = torch.Generator().manual_seed(count)
        dtype = torch.float32 if case.dtype == "tf32" else getattr(torch, case.dtype)

        def normal(shape: tuple[int, ...], scale: float, dtype=dtype, generator=generator) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        tensors = [normal(s, 1.0 if i == 0 or len(s) == 1 else s[-1] ** -0.5) for i, s in enumerate(case.shapes)]
        grad_y = normal((case.batch, case.out_features), 1.0)
        exact = results(case, [t.double() for t in tensors], grad_y.double(), "naive")
        for switch in (torch.backends.cuda.matmul, torch.backends.cudnn.rnn):
            switch.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
        found = results(case, [t.cuda() for t in tensors], grad_y.cuda(), "fused")
        count += 1
        for one, right in zip(found, exact, strict=True):
            error = float((one.cpu().double() - right).norm() / right.double().norm())
            if not error <= tolerances[case.dtype]:
                wrong.append(f"{case.name}: off by {error:.1e}")
    print("\n".join(wrong) if wrong else f"{count} {DONE}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_cases(sys.argv[2], *map(int, sys.argv[3:])) if sys.argv[1:2] == ["child"] else main(sys.argv[1:]))
