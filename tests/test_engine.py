"""csrc/engine, compiled for every GPU generation: no errors, hardly a spill, shared memory within the limits.

Needs NVRTC, but no GPU: this is what guards the device code where there is none. The numbers come from the log of
ptxas.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from compiled import Usage, UsageOf
from oracle import kronecker, monarch, spec_id
from stacked import plan_by_first
from test_expression import EVERY_OPERATION, Snake

from factorlayer.activations.named import ACTIVATIONS
from factorlayer.activations.tracing import trace
from factorlayer.autograd import runtime
from factorlayer.autograd.backward import texts
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import BATCHES, SOME, class_of
from factorlayer.kernels.batches import FEW as FEW_SAMPLES
from factorlayer.kernels.monarch import slab_backward, untied_backward
from factorlayer.kernels.monarch.untied_backward import UntiedBackward
from factorlayer.kernels.product import wide_gradient
from factorlayer.kernels.product.mapped_gradient import MappedGradient
from factorlayer.kernels.resident import Resident
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import has_plan, plan, plan_of, plan_text

OPTIONS = ["--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
# What is compiled, and the GPU that it is planned for. sm_90a has to accept what sm_90 does.
ARCHITECTURES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120": 120}
MOST_REGISTERS = 65536  # of a multiprocessor
PRELU, SNAKE = (trace(module)[0].program for module in (torch.nn.PReLU(), Snake()))  # with a parameter each

SPECS = [
    kronecker((32, 32), (32, 32)),
    kronecker((97, 31), (97, 31)),
    kronecker((84, 124), (84, 124)),
    kronecker((20, 28), (36, 44)),
    kronecker((8, 8, 8), (8, 8, 8)),
    kronecker((12,) * 5, (12,) * 5),
    kronecker((64, 64, 64), (64, 64, 64)),
    kronecker((128, 128), (128, 128)),
    kronecker((112, 48), (72, 128)),
    kronecker((8,) * 5, (8,) * 5),
    kronecker((16, 8, 3), (24, 32, 5), rank=3),
    kronecker((1000, 3), (1000, 3)),
    kronecker((8, 256), (8, 1024)),
    kronecker((1100,), (9,)),
    monarch((32, 32), (32, 32)),
    monarch((8, 64), (48, 16), rank=4),
    monarch((16, 64), (16, 64), rank=4),
    monarch((64, 64), (64, 64)),
    monarch((32, 24), (64, 48), rank=4),
    monarch((12, 11, 10), (9, 12, 13)),
]
# Bytes that a thread may spill: single values that ptxas, short of registers, keeps in memory for a while. What
# is spilled by mistake, such as the places of all sums, is many times as much.
SPILLED = {"float64": 96, "float32": 56, "tf32": 176, "bfloat16": 152, "float16": 256}


@dataclass(frozen=True)
class Case:
    spec: LayerSpec
    dtype: str
    architecture: str
    batch: int
    activation: str = "gelu"

    def __str__(self) -> str:
        name = {PRELU: "prelu", SNAKE: "snake"}.get(self.activation, self.activation)
        name = "program" if "/" in name else name
        return f"{self.architecture}-{self.dtype}-{spec_id(self.spec)}-n{self.batch}-{name}"


def matrix() -> Iterator[Case]:
    """All layers and dtypes for one architecture, and three layers, others each time, for the others."""
    for i, dtype in enumerate(DTYPES):
        for j, spec in enumerate(SPECS):
            yield Case(spec, dtype, "sm_90a", FEW_SAMPLES if (i + j) % 3 == 0 else BATCHES[-1])
        for j, architecture in enumerate(ARCHITECTURES):
            if architecture != "sm_90a":
                for k in range(3):
                    at = (5 * k + 3 * i + 2 * j) % len(SPECS)
                    yield Case(SPECS[at], dtype, architecture, BATCHES[(i + j + k) % 3])


# outer, p, q, inner, tied: what follows a k in memory are columns, k's or groups; whole runs, or not.
SUMMED = [
    (64, 64, 64, 1, True),
    (1, 64, 64, 64, True),
    (512, 8, 8, 64, True),
    (3, 5, 7, 3, True),
    (1, 1000, 3, 9, True),
    (4, 192, 192, 1, False),
    (1, 192, 768, 4, False),
    (1, 128, 64, 48, False),
    (2, 13, 11, 9, False),
    (1, 1, 1, 1, True),
]
# For Hopper's warpgroups: of whole tiles, and of others
WIDE_SUMMED = [
    (1, 1024, 4096, 1, True),
    (2, 1024, 1024, 1, False),
    (4, 192, 768, 1, False),
    (3, 40, 72, 1, False),
    (1, 63, 256, 1, True),
    (1, 196, 384, 1, True),
]


BACK = [
    kronecker((64, 64), (64, 64)),
    kronecker((32, 32), (32, 32)),
    kronecker((20, 28), (36, 44)),
    kronecker((9, 24), (8, 40)),
    kronecker((48, 64), (64, 32)),
    kronecker((8, 8, 8), (9, 9, 9)),
    kronecker((5, 5, 4), (3, 3, 4)),
    kronecker((112, 128), (112, 128)),
    kronecker((4,) * 6, (4,) * 6),
    kronecker((8,) * 5, (8,) * 5),
]


# Of few samples
FEW = [
    (monarch((16, 256), (688, 16), rank=16), "sm_90a"),
    (monarch((4, 192), (192, 4), rank=16), "sm_90a"),
    (monarch((8, 40), (7, 63), rank=5), "sm_80"),
]


# Of many, with many small groups: blocks alone, and two of a cluster
GROUPED = [
    (monarch((32, 24), (64, 48), rank=4), "sm_90a"),
    (monarch((8, 16), (16, 24), rank=8), "sm_90a"),
    (monarch((8, 32), (32, 8), rank=16), "sm_90a"),
]

# Of Monarch layers that are multiplied out
WHOLE = [
    (monarch((5, 9), (9, 60), rank=5), "sm_90a"),
    (monarch((21, 8), (8, 20), rank=7), "sm_90a"),
    (monarch((3, 40), (34, 4), rank=30), "sm_90a"),
    (monarch((30, 2), (3, 31), rank=1), "sm_80"),
]

FEW_PAIRS = [
    (kronecker((32, 32), (32, 32)), "sm_90a"),
    (kronecker((64, 48), (32, 80)), "sm_90a"),
    (kronecker((128, 128), (128, 128)), "sm_90a"),
    (kronecker((64, 64), (64, 64)), "sm_80"),
    (kronecker((64, 64), (64, 64)), "sm_100a"),
]

# Sums of products, and what shares a large weight between others
VISITS = [
    (kronecker((35, 195, 6, 10), (35, 195, 6, 10), rank=2), "bfloat16", "sm_80"),
    (kronecker((2, 119, 57, 2, 2), (2, 119, 57, 2, 2), rank=2), "float16", "sm_90a"),
    (kronecker((15, 126, 29, 2), (15, 126, 29, 2), rank=2), "float32", "sm_90a"),
    (kronecker((87, 120, 4), (87, 120, 4)), "float64", "sm_90a"),
    (kronecker((28, 217, 82), (28, 217, 82), rank=3), "tf32", "sm_90a"),
]


@dataclass(frozen=True)
class BackwardCase:
    spec: LayerSpec
    dtype: str
    architecture: str
    batch: int = BATCHES[-1]
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.architecture}-{self.dtype}-{spec_id(self.spec)}{'-bias' * self.bias}"


def backward() -> Iterator[BackwardCase]:
    """All on one architecture, and some on the others; some have no plan."""
    for i, dtype in enumerate(DTYPES):
        cases = [(spec, "sm_90a") for spec in BACK]
        cases += [
            (BACK[(i + j) % len(BACK)], name)
            for j, name in enumerate(ARCHITECTURES)
            if name != "sm_90a" and (i + j) % 2
        ]
        for spec, architecture in cases:
            yield BackwardCase(spec, dtype, architecture)
    for dtype, (spec, architecture) in itertools.product(DTYPES, FEW):
        if dtype != "float64":
            yield BackwardCase(spec, dtype, architecture, FEW_SAMPLES)
    for dtype, (spec, architecture) in itertools.product(("tf32", "bfloat16", "float16"), GROUPED):
        yield BackwardCase(spec, dtype, architecture)
    yield from (BackwardCase(*of) for of in of_whole())
    yield from (BackwardCase(*of, FEW_SAMPLES) for of in VISITS)
    for dtype, (spec, architecture) in itertools.product(DTYPES, FEW_PAIRS):
        yield BackwardCase(spec, dtype, architecture, FEW_SAMPLES)
    for dtype, (spec, architecture) in itertools.product(DTYPES, FEW_PAIRS[:1]):
        yield BackwardCase(spec, dtype, architecture, FEW_SAMPLES, bias=True)


def of_whole() -> Iterator[tuple[LayerSpec, str, str]]:
    for dtype, (spec, architecture) in itertools.product(DTYPES, WHOLE):
        if dtype != "float16" or architecture == "sm_90a":
            yield spec, dtype, architecture


def all_gradients_of(spec: LayerSpec) -> Chain:
    return replace(Chain.of(spec, False, "identity"), backward=True)


@dataclass(frozen=True)
class GradientCase:
    contraction: tuple[int, int, int, int, bool]
    dtype: str
    architecture: str
    batch: int
    both: bool = False  # that of x, too

    def __str__(self) -> str:
        outer, p, q, inner, tied = self.contraction
        kind = "tied" if tied else "untied"
        return f"{self.architecture}-{self.dtype}-{kind}-{outer}-{p}x{q}-{inner}-n{self.batch}{'-both' * self.both}"


# Of one factor and x at once: by columns and by rows, with padding and without
BOTH = [
    GradientCase((*sizes, True), dtype, "sm_90a", BATCHES[-1], True)
    for sizes in (
        (1, 128, 128, 128),
        (128, 128, 128, 1),
        (1, 64, 64, 4096),
        (64, 64, 64, 1),
        (2, 100, 76, 64),
        (64, 28, 36, 1),
    )
    for dtype in DTYPES
    if max(sizes[1:3]) < 128 or dtype != "float64"
] + [GradientCase((2, 20, 36, 48, True), dtype, "sm_80", BATCHES[-1], True) for dtype in DTYPES]


def summed() -> Iterator[GradientCase]:
    """All on one architecture, and two on each of the others."""
    for i, dtype in enumerate(DTYPES):
        for j, contraction in enumerate(SUMMED):
            yield GradientCase(contraction, dtype, "sm_90a", BATCHES[(i + j) % 3])
        for j, architecture in enumerate(ARCHITECTURES):
            if architecture != "sm_90a":
                for k in range(2):
                    yield GradientCase(SUMMED[(3 * i + 2 * j + 5 * k) % len(SUMMED)], dtype, architecture, BATCHES[-1])
    for contraction, dtype, batch in itertools.product(WIDE_SUMMED, ("bfloat16", "float16"), BATCHES):
        yield GradientCase(contraction, dtype, "sm_90a", batch)


def activated() -> Iterator[Case]:
    for activation in ACTIVATIONS:
        for dtype in ("float64", "bfloat16"):
            yield Case(kronecker((5, 8), (8, 7)), dtype, "sm_80", SOME, activation)
    yield Case(kronecker((2, 3), (4, 5)), "float64", "sm_80", SOME, EVERY_OPERATION.program)
    mish = trace(torch.nn.Mish())[0].program
    for spec, dtype in (  # of every family
        (kronecker((20, 28), (36, 44)), "float32"),
        (kronecker((64, 64), (64, 64)), "bfloat16"),
        (monarch((12, 11, 10), (9, 12, 13)), "float16"),
        (monarch((32, 32), (16, 16)), "tf32"),  # sizes of few results, of which each writes out the activation
        (monarch((64, 64), (16, 16)), "bfloat16"),
        (monarch((4, 192), (48, 4), rank=48), "bfloat16"),
        (kronecker((64, 64), (64, 64)), "float32"),
        (kronecker((128, 128), (128, 128)), "float64"),
        (kronecker((8, 8, 8), (9, 9, 9)), "float64"),
        (kronecker((8,) * 5, (8,) * 5), "float32"),
    ):
        for activation in (mish, PRELU, SNAKE):
            yield Case(spec, dtype, "sm_90a", BATCHES[-1], activation)
    for architecture, dtype in zip(("sm_80", "sm_86", "sm_100a", "sm_120"), DTYPES, strict=False):
        yield Case(kronecker((5, 8), (8, 7)), dtype, architecture, SOME, PRELU)


@dataclass(frozen=True)
class StackCase:
    """Dense layers, every other with a bias, on sm_90a."""

    widths: tuple[int, ...]
    dtype: str
    activation: str = "relu"
    architecture: str = "sm_90a"
    batch: int = BATCHES[-1]
    last: str = "identity"
    backward: bool = False
    states: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        behind = f"-{self.last}{'-backward' * self.backward}{'-states' * self.states}{'-frozen' * self.frozen}"
        activation = {PRELU: "prelu", SNAKE: "snake"}.get(self.activation, self.activation)
        return f"{'-'.join(map(str, self.widths))}-{self.dtype}-{activation}{behind}"

    @property
    def layers(self) -> tuple[Chain, ...]:
        sizes = list(itertools.pairwise(self.widths))
        activations = [self.activation] * (len(sizes) - 1) + [self.last]
        return tuple(
            Chain.of(kronecker((p,), (q,)), i % 2 == 0, activation)
            for i, ((p, q), activation) in enumerate(zip(sizes, activations, strict=True))
        )


STACKS = [
    StackCase((32, 64, 64, 64, 64, 16), "bfloat16"),
    StackCase((32, 64, 64, 64, 64, 16), "tf32"),
    StackCase((20,) * 9, "float16", "tanh"),
    StackCase((64, 128, 128, 1), "bfloat16", "gelu"),
    StackCase((13, 45, 63, 127, 5), "tf32", "silu"),
    StackCase((3, 256, 256, 3), "float16", "sine"),
    StackCase((63, *[256] * 8, 4), "bfloat16"),
    StackCase((63, *[256] * 8, 4), "tf32"),
    StackCase((48, 512, 256, 128, 12), "bfloat16", "elu"),
    StackCase((48, 512, 256, 128, 12), "tf32", "elu"),
    StackCase((13, 512, 256, 128), "float16", last="relu"),
    StackCase((13, 512, 256, 128), "tf32", last="relu"),
    StackCase((196, 384, 196), "bfloat16", "gelu"),
    StackCase((196, 384, 196), "tf32", "gelu"),
    StackCase((45, 300, 129, 5), "bfloat16", "silu"),
    StackCase((63, *[256] * 8, 4), "bfloat16", frozen=True),
    StackCase((48, 512, 256, 128, 12), "float16", "elu", frozen=True),
    StackCase((196, 384, 196), "bfloat16", "gelu", frozen=True),
    StackCase((63, *[256] * 8, 4), "bfloat16", states=True),
    StackCase((63, *[256] * 8, 4), "tf32", states=True),
    StackCase((48, 512, 256, 128, 12), "float16", "elu", states=True),
    StackCase((48, 512, 256, 128, 12), "tf32", "elu", states=True),
    StackCase((196, 384, 196), "tf32", "gelu", states=True),
    StackCase((45, 300, 129, 5), "bfloat16", "silu", states=True),
    StackCase((32, 64, 64, 64, 64, 16), "bfloat16", PRELU),
    StackCase((64, 128, 128, 1), "tf32", SNAKE),
    StackCase((32, 64, 64, 64, 64, 16), "bfloat16", backward=True),
    StackCase((128,) * 7, "bfloat16", states=True),
    StackCase((100,) * 6, "float16", "gelu", states=True),
    StackCase((128, 127, 66, 127), "bfloat16", "tanh", states=True),
    StackCase((32, 64, 64, 64, 64, 16), "tf32", states=True),
    StackCase((128, 127, 66, 24), "tf32", "gelu", states=True),
    StackCase((128, 128), "bfloat16", last="relu", backward=True),
    StackCase((127, 127), "float16", last="gelu", backward=True),
    StackCase((44, 65), "bfloat16", last="silu", backward=True),
    StackCase((32, 64, 16), "tf32", backward=True),
    StackCase((64, 64, 64), "tf32", "gelu", last="relu", backward=True),
    StackCase((20, 20, 20, 20), "tf32", "tanh", backward=True),
    StackCase((32, 64), "tf32", last="relu", backward=True),
    StackCase((64, 64), "tf32", last="gelu", backward=True),
    StackCase((20, 20), "tf32", last="tanh", backward=True),
    StackCase((72, 72), "tf32", last="silu", backward=True),
    StackCase((100, 66), "tf32", last="sine", backward=True),
    StackCase((64, 128), "tf32", last="softplus", backward=True),
    StackCase((128, 127), "tf32", last="relu", backward=True),
    StackCase((128, 128), "tf32", last="gelu", backward=True),
    StackCase((128, 128), "tf32", backward=True),
    StackCase((127, 127, 63), "bfloat16", "gelu"),
    StackCase((127,) * 4, "tf32"),
    StackCase((45, 127, 250), "float16", "relu", states=True),
    StackCase((13, 45, 63, 5), "bfloat16", "tanh", last="sine", backward=True),
    StackCase((126, 126), "bfloat16", last="tanh", backward=True),
    StackCase((128, 127), "float16", last="relu", backward=True),
]


@dataclass(frozen=True)
class SlopeCase:
    """Of a dense layer with a bias, of a layer of several contractions, or of p = 0 activations that are given."""

    p: int
    q: int
    dtype: str
    activation: str
    architecture: str = "sm_90a"
    batch: int = BATCHES[-1]
    through: bool = False  # from the result, and without a bias
    spec: LayerSpec | None = None

    def __str__(self) -> str:
        way = "-through" if self.through else ""
        sizes = spec_id(self.spec) if self.spec else f"{self.p}-{self.q}"
        return f"{self.architecture}-{self.dtype}-{sizes}-{self.activation}{way}-n{self.batch}"

    @property
    def chain(self) -> Chain:
        if self.spec:
            return replace(Chain.of(self.spec, True, self.activation), slope=self.spec.out_features)
        contractions = (Contraction(0, 1, self.p, self.q, 1, tied=True),) if self.p else ()
        if self.through:
            return Chain(contractions, activation=self.activation, through=self.q)
        return Chain(contractions, 1, self.p > 0, self.activation, slope=self.q)


SLOPES = [
    SlopeCase(p, q, dtype, activation, batch=batch)
    for dtype in ("bfloat16", "float16", "tf32", "float32")
    for p, q, activation, batch in (
        (256, 256, "relu", BATCHES[-1]),
        (512, 512, "gelu", SOME),
        (384, 1536, "gelu", BATCHES[-1]),
        (200, 84, "sine", FEW_SAMPLES),
    )
] + [
    SlopeCase(0, 100, "float64", "tanh", "sm_80"),
    SlopeCase(0, 100, "float32", "gelu", "sm_86"),
    SlopeCase(0, 100, "bfloat16", "relu", "sm_90a"),
    SlopeCase(0, 100, "float16", "elu", "sm_120"),
]
SLOPES += [
    SlopeCase(p, q, dtype, activation, batch=batch, through=True)
    for dtype in ("bfloat16", "float16", "tf32", "float32")
    for p, q, activation, batch in (
        (256, 256, "relu", BATCHES[-1]),
        (256, 512, "elu", BATCHES[-1]),
        (512, 384, "softplus", SOME),
        (200, 84, "tanh", FEW_SAMPLES),
    )
] + [
    SlopeCase(0, 100, "float64", "tanh", "sm_80", through=True),
    SlopeCase(0, 100, "float32", "elu", "sm_86", through=True),
    SlopeCase(0, 100, "bfloat16", "relu", "sm_90a", through=True),
    SlopeCase(0, 100, "float16", "softplus", "sm_120", through=True),
]
SLOPES += [
    SlopeCase(0, 0, dtype, activation, architecture, spec=spec)
    for architecture, spec, activation, dtypes in (
        ("sm_90a", kronecker((24, 32), (48, 64)), "gelu", DTYPES),
        ("sm_90a", kronecker((16, 16, 12), (8, 8, 12)), "silu", DTYPES),
        ("sm_90a", kronecker((25, 31), (49, 63)), "gelu", DTYPES),
        ("sm_90a", kronecker((24, 32), (48, 64), rank=2), "gelu", DTYPES),
        ("sm_90a", monarch((4, 192), (768, 4), rank=48), "gelu", ("tf32",)),
        ("sm_80", kronecker((24, 32), (48, 64)), "silu", ("float32", "bfloat16")),
        ("sm_120", kronecker((48, 64), (24, 32)), "gelu", ("tf32", "float16")),
    )
    for dtype in dtypes
]


@dataclass(frozen=True)
class ColumnsCase:
    """Sums by themselves, or beside an activation's slopes or a turn."""

    text: str
    dtype: str
    architecture: str = "sm_90a"

    def __str__(self) -> str:
        return f"{self.architecture}-{self.dtype}-{self.text}"


COLUMNS = [ColumnsCase(f"sums {features}", dtype) for features in (63, 1024, 4104) for dtype in DTYPES]
COLUMNS += [
    ColumnsCase(text, dtype)
    for dtype in DTYPES
    for text in (
        "gelu; slope 3072; sums 3072",
        "gelu; slope 3072; sums 3072; turn 1 768 4",
        "tanh; slope 4096; sums 4096; turn 1 16 256",
        "sums 768; turn 1 48 16",
        "sums 105; turn 1 35 3",
    )
]
COLUMNS += [
    ColumnsCase("sums 100", "bfloat16", "sm_80"),
    ColumnsCase("sums 13", "float64", "sm_86"),
    ColumnsCase("sums 100", "float16", "sm_120"),
    ColumnsCase("relu; slope 100; sums 100; turn 1 25 4", "float16", "sm_120"),
    ColumnsCase("gelu; slope 13; sums 13", "float32", "sm_80"),
]

AnyCase = Case | GradientCase | BackwardCase | StackCase | SlopeCase | ColumnsCase


@dataclass(frozen=True)
class Kernel:
    """One of a plan's, compiled."""

    name: str
    plan: str
    shared: int
    threads: int
    usage: Usage


def compile_case(case: AnyCase, usage_of: UsageOf) -> list[Kernel]:
    gpu = Gpu.of(ARCHITECTURES[case.architecture])
    if isinstance(case, StackCase):
        which = case.backward, case.states, case.frozen
        return compile_plan(
            plan_by_first(case.layers, case.dtype, case.batch, gpu, *which), case.architecture, usage_of
        )
    if isinstance(case, SlopeCase):
        chain = case.chain
    elif isinstance(case, ColumnsCase):
        found = plan(Chain.parse(case.text), case.dtype, BATCHES[-1], gpu)
        return compile_plan(found, case.architecture, usage_of)
    elif isinstance(case, BackwardCase):
        chain = replace(all_gradients_of(case.spec), bias=case.bias)
    elif isinstance(case, GradientCase):
        *sizes, tied = case.contraction
        chain = Chain((Contraction(0, *sizes, tied=tied),), gradient=not case.both, backward=case.both)
    else:
        chain = Chain.of(case.spec, True, case.activation)
    return compile_plan(plan(chain, case.dtype, case.batch, gpu), case.architecture, usage_of)


def compile_plan(found: Plan, architecture: str, usage_of: UsageOf) -> list[Kernel]:
    """Under one name, so that kernels which differ by theirs alone are compiled once."""
    kernels = []
    for head, name, source in sources(found.text()):
        usage = usage_of(source.replace(name, "kernel"), "kernel", architecture, OPTIONS)
        kernels.append(Kernel(name, str(found), int(head[4]), int(head[3]), usage))
    assert kernels
    return kernels


def sources(text: str) -> Iterator[tuple[list[str], str, str]]:
    """The words of each pass of a plan's text, its kernel and source."""
    rest = text.encode()
    while rest:
        line, _, rest = rest.partition(b"\n")
        words = line.decode().split()
        if words[0] == "pass":
            length = int(words[-1])
            yield words, words[-2], rest[:length].decode()
            rest = rest[length + 1 :]


Compiled = Callable[[AnyCase], list[Kernel]]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, usage_of: UsageOf) -> Iterator[Compiled]:
    """The kernels of a case. One process compiles all that are to be tested, on all processors: NVRTC works without
    Python's lock. Of several processes each one compiles its own cases."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield lambda case: compile_case(case, usage_of)
        return
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "case" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    pool = ThreadPoolExecutor(os.cpu_count())
    kernels = {case: pool.submit(compile_case, case, usage_of) for case in wanted}
    yield lambda case: kernels[case].result()
    pool.shutdown(cancel_futures=True)


def check(kernels: list[Kernel], case: AnyCase, spilled: int, uses_stack: bool = False) -> None:
    limit = Gpu.of(ARCHITECTURES[case.architecture]).shared
    for kernel in kernels:
        usage, found = kernel.usage, f"{kernel.name}: {kernel.usage}\n{kernel.plan}"
        assert not re.search(r"\b(warning|error)\b", usage.notes), found
        assert "serialized" not in usage.notes, "products wait for each other: " + found
        # The frame holds what is spilled, and arrays that are indexed as the kernel runs.
        assert usage.spilled <= 2 * spilled and (uses_stack or usage.frame <= spilled), found
        assert -(-usage.registers // 8) * 8 * kernel.threads <= MOST_REGISTERS, found
        assert kernel.shared + usage.static <= limit, found


@pytest.mark.parametrize("case", list(matrix()), ids=str)
def test_compiles_and_hardly_spills(case: Case, compiled: Compiled) -> None:
    check(compiled(case), case, SPILLED[case.dtype])


@pytest.mark.parametrize("activation", ["identity", "relu", "sigmoid", "silu", "tanh", "gelu_tanh"])
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
@pytest.mark.parametrize("groups", [2, 4])
def test_what_is_done_with_sums_does_not_make_products_wait(
    groups: int, dtype: str, activation: str, usage_of: UsageOf
) -> None:
    """Of groups that are held until the last one's sums are there, also if it is short: a bias, an activation."""
    chain = Chain.of(monarch((groups, 768 // groups), (3072 // groups, groups), rank=192 // groups), True, activation)
    *_, last = plan(chain, dtype, BATCHES[-1], Gpu.of(90)).passes
    usage = usage_of(last.source("kernel"), "kernel", "sm_90a", OPTIONS)
    assert "serialized" not in usage.notes
    assert usage.spilled <= 2 * SPILLED[dtype]


@pytest.mark.parametrize("case", list(summed()), ids=str)
def test_gradients_compile(case: GradientCase, compiled: Compiled) -> None:
    check(compiled(case), case, 24)


@pytest.mark.parametrize(
    ("dtype", "bias", "p", "q", "least", "count"),
    [
        ("bfloat16", False, 1000, 2008, 96, 9),
        ("tf32", False, 1000, 2008, 96, 6),
        ("float32", False, 1000, 2008, 128, 3),
        ("bfloat16", True, 1000, 2008, 96, 9),
        ("tf32", True, 1000, 2008, 96, 6),
        ("bfloat16", True, 1001, 2007, 96, 6),
        ("float16", True, 1004, 2000, 96, 6),
        ("tf32", True, 1000, 2007, 96, 6),
        ("float32", False, 1001, 2007, 128, 3),
    ],
)
def test_no_tiling_of_a_gradient_of_warpgroups_spills(
    dtype: str, bias: bool, p: int, q: int, least: int, count: int, usage_of: UsageOf
) -> None:
    """With as many sums as a thread may have; those that planned cases do not have, too."""
    gpu, seen = Gpu.of(90), set()
    for tiled in wide_gradient.tilings(Contraction(0, 1, p, q, 1, tied=True), dtype, 16384, gpu, bias):
        tiling = (tiled.wm, tiled.wn, tiled.height, tiled.n)
        if tiling in seen or tiled.sums < least:
            continue
        seen.add(tiling)
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        kernel = Kernel("kernel", str(tiled), tiled.shared, tiled.threads, usage)
        check([kernel], GradientCase((1, p, q, 1, True), dtype, "sm_90a", 16384), 0)
    assert len(seen) >= count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("untied 0 4 192 192 1; backward; mixed 4 48 4", 3),
        ("turned; untied 0 1 256 256 16; backward; turn 16 16 16", 2),
        ("untied 0 16 688 232 1; backward", 1),
        ("untied 0 12 64 64 1; backward", 3),
    ],
)
def test_no_tiling_of_both_gradients_of_untied_weights_spills(text: str, count: int, usage_of: UsageOf) -> None:
    """Those with most sums for each number of warpgroups."""
    chain, gpu = Chain.parse(text), Gpu.of(90)
    most: dict[int, UntiedBackward] = {}
    for tiled in untied_backward.tilings(chain, "bfloat16", 16384, gpu):
        if tiled.sums > getattr(most.get(tiled.consumers), "sums", 0):
            most[tiled.consumers] = tiled
    for tiled in most.values():
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        kernel = Kernel("kernel", str(tiled), tiled.shared, tiled.threads, usage)
        check([kernel], GradientCase((1, 8, 8, 1, False), "bfloat16", "sm_90a", 16384), 0)
    assert len(most) >= count


@pytest.mark.parametrize(
    "text",
    [
        "untied 0 4 192 192 1; backward; slabs 1; tf32",
        "turned; untied 0 1 256 256 16; backward; slabs 2; tf32",
        "turned; untied 0 1 192 200 4; backward; turn 4 48 4; slabs 1; tf32",
        "untied 0 64 64 64 1; backward; slabs 1; tf32",
    ],
)
def test_both_gradients_by_slabs_do_not_spill(text: str, usage_of: UsageOf) -> None:
    tiled = slab_backward.tile(Chain.parse(text), "tf32", 16384, Gpu.of(90))
    assert tiled is not None
    usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
    kernel = Kernel("kernel", str(tiled), tiled.shared, tiled.threads, usage)
    check([kernel], GradientCase((1, 8, 8, 1, False), "tf32", "sm_90a", 16384), 0)


@pytest.mark.parametrize("case", STACKS, ids=str)
def test_stacks_compile(case: StackCase, compiled: Compiled) -> None:
    check(compiled(case), case, 80 if case.backward or case.states else 32)


@pytest.mark.parametrize("case", list(dict.fromkeys(backward())), ids=str)
def test_all_gradients_at_once_compile(case: BackwardCase, compiled: Compiled) -> None:
    """Of those without a plan the planner says so."""
    try:
        kernels = compiled(case)
    except PlanError:
        gpu, chain = Gpu.of(ARCHITECTURES[case.architecture]), all_gradients_of(case.spec)
        text = chain.tf32_text if case.dtype == "tf32" else chain.text
        assert not has_plan(text, case.dtype.replace("tf32", "float32"), gpu.arch, gpu.sms, gpu.shared)
    else:
        check(kernels, case, 128)  # those of few samples in float on sm_80; others 80 at most


@pytest.mark.parametrize("case", [Case(*s, BATCHES[-1], "relu") for s in of_whole()], ids=str)
def test_layers_multiplied_out_compile(case: Case, compiled: Compiled) -> None:
    check(compiled(case), case, 0)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_both_gradients_of_one_factor_compile(case: GradientCase, compiled: Compiled) -> None:
    check(compiled(case), case, 80)


@pytest.mark.parametrize("case", SLOPES, ids=str)
def test_slopes_compile(case: SlopeCase, compiled: Compiled) -> None:
    check(compiled(case), case, SPILLED[case.dtype] if case.p or case.spec else 0, case.activation == "sine")


@pytest.mark.parametrize("case", COLUMNS, ids=str)
def test_columns_compile(case: ColumnsCase, compiled: Compiled) -> None:
    check(compiled(case), case, 0)


@pytest.mark.parametrize("case", list(activated()), ids=str)
def test_activations_compile(case: Case, compiled: Compiled) -> None:
    """The sine of a large number is found with a table on the stack."""
    uses_stack = case.activation in ("sine", EVERY_OPERATION.program, SNAKE)
    check(compiled(case), case, SPILLED[case.dtype] if case.architecture == "sm_90a" else 0, uses_stack)


def test_the_matrix_covers_all() -> None:
    cases = list(matrix())
    assert {case.architecture for case in cases} == set(ARCHITECTURES)
    assert {(case.architecture, case.dtype) for case in cases} == {(a, d) for a in ARCHITECTURES for d in DTYPES}
    elsewhere = {spec_id(case.spec) for case in cases if case.architecture != "sm_90a"}
    assert elsewhere == set(map(spec_id, SPECS))


@pytest.mark.long
def test_a_plan_goes_through_the_runtime(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the runtime's own options, into its cache: what a machine without a GPU does for one that has it."""
    try:
        torch.ops.factorlayer.compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path))
    gpu = Gpu.of(80)
    layers = (kronecker((5, 8), (8, 7)), "relu"), (monarch((3, 4), (4, 3)), EVERY_OPERATION.program)
    asked = [(Chain.of(spec, True, activation), 0) for spec, activation in layers]
    asked += [(chain, 2) for chain in (Chain.of(WHOLE[0][0], True, "relu"), all_gradients_of(WHOLE[0][0]))]
    for chain, batch_class in asked:
        text = plan_text(chain.text, "float32", batch_class, gpu.arch, gpu.sms, gpu.shared)
        runtime.fill_cache(text)
        names = {name for _, name, _ in sources(text)}
        entries = runtime.cache_entries()
        assert names <= {entry.name for entry in entries}
        assert all(entry.whole and entry.architecture == "sm_80" for entry in entries)


def gradients_one_by_one(chain: Chain) -> Iterator[Chain]:
    for c in chain.contractions:
        alone = replace(c, weight=0)
        yield Chain((alone,), gradient=True, x_turned=not c.tied and c.inner > 1)


def has_plan_in_float32(chain: Chain) -> bool:
    return has_plan(chain.text, "float32", 90, 132, 232448)


@pytest.mark.long
def test_the_sanitizers_cases_cover_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu"))
    cases = list(importlib.import_module("sanitize").cases())
    assert len(cases) <= 70
    found = set()
    for case in cases:
        assert case.batch * max(case.shapes[0][1], case.out_features) <= 1 << 21, f"{case} takes long"
        if " of inputs " in case.name:
            found |= {f"inputs in {case.dtype}"}
            continue
        if case.name.startswith("gru "):
            text, sequences, *_ = case.name.split(", ")
            batch_class = class_of(int(sequences.split()[0]))
            for asked in ("", " | slopes", " | backward"):
                passes = plan_of(text + asked, case.dtype, batch_class, Gpu.of(90)).passes
                found |= {" ".join(type(p).__name__ for p in passes)}
            continue
        if case.chain is None or case.spec is None:
            found |= {f"block in {case.dtype}{', trained' if case.trained else ''}"}
            if case.trained and case.dtype == "bfloat16":
                sizes = [shape for shape in case.shapes[1:] if len(shape) == 2]
                text = " | ".join(Chain.of(kronecker((p,), (q,)), True, "relu").text for q, p in sizes)
                ways = "at once" if has_plan(f"{text} | backward", case.dtype, 90, 132, 232448) else "layer by layer"
                found |= {f"{'odd' if sizes[0][1] % 2 else 'even'} block {ways}"}
            continue
        found |= {"rank"} if case.chain.rank > 1 else set()
        if case.trained and case.dtype == "tf32":
            asked = texts(replace(case.chain, tf32=True).text, has_plan_in_float32, case.batch)
            found |= {"by slabs" for text, _ in asked if "backward; slabs" in text}
        for each in (case.chain, all_gradients_of(case.spec)) if case.trained else (case.chain,):
            planned_for = BATCHES[runtime.class_of_batch(case.batch)]
            try:
                plans = [plan(each, case.dtype, planned_for, Gpu.of(90))]
            except PlanError:  # these gradients are made one by one
                plans = [plan(one, case.dtype, planned_for, Gpu.of(90)) for one in gradients_one_by_one(each)]
            for planned in plans:
                found |= {"split" for p in planned.passes if isinstance(p, Resident) and p.split > 1}
                found |= {"as memory" for p in planned.passes if isinstance(p, Resident) and p.as_memory}
                mapped = [q for p in planned.passes if isinstance(q := getattr(p, "of", p), MappedGradient)]
                found |= {"by rows and maps" if p.is_turned else "by maps behind the mode" for p in mapped}
                kinds = " ".join(type(p).__name__ for p in planned.passes)
                found |= {kinds, f"{kinds} in {case.dtype}"} | ({"Wide Wide"} if "Wide Wide" in kinds else set())
                passes = planned.text().split("\npass ")[1:]
                found |= {flag for text in passes for flag in re.findall(r"BULK_\w+ = \w+", text)}
    assert {
        "PairClusterBackward",
        "PairDouble",
        "Mapped Mapped",
        "PairFew",
        "PairFewBackward Reduction",
    } <= found
    assert {
        "by slabs",
        "inputs in bfloat16",
        "inputs in float32",
        "rank",
        "split",
        "as memory",
        "Pair",
        "Resident",
        "Resident Resident",
        "Streamed Streamed",
        "Wide Wide",
    } <= found
    assert {"Recurrent", "RecurrentBackward", "RecurrentSlopes", "RecurrentFill RecurrentSpread"} <= found
    assert {"RecurrentFill RecurrentSpreadBackward", "RecurrentCluster", "RecurrentClusterBackward"} <= found
    assert {"RecurrentCounters RecurrentMany", "RecurrentCounters RecurrentManyBackward"} <= found
    assert {"PairBackward Reduction FactorGradients", "PairBackward Reduction"} <= found
    assert "PairDoubleBackward PairDoubleBackward Reduction" in found
    ways = "SmallDouble", "Pair16Large", "PairSplit"
    assert {f"{way}Backward Reduction" for way in ways} <= found
    assert any("ChainBackward Reduction" in kinds for kinds in found)
    assert any("MonarchLargest MonarchWeight" in kinds and "MonarchGradients" in kinds for kinds in found)
    assert any("KroneckerLargest KroneckerWeight" in kinds and "KroneckerGradients" in kinds for kinds in found)
    assert any("MonarchChunkWeights MonarchChunks MonarchPairs" in kinds for kinds in found)
    assert {"MonarchKept", "MonarchKept MonarchPairs Reduction"} <= found
    assert {"Gradient Reduction", "Few Few", "FewPass FewPass FewPass"} <= found
    assert {"WideGradient Reduction in bfloat16", "WideGradient Reduction in float32"} <= found
    assert {"by rows and maps", "by maps behind the mode"} <= found
    assert any("MappedColumns Resident" in kinds for kinds in found)
    assert any("MappedColumns ChainBackward" in kinds for kinds in found)
    assert {"even block at once", "odd block at once"} <= found
    trained = {f"block in {dtype}, trained" for dtype in ("bfloat16", "float16", "tf32")}
    assert {"block in bfloat16", "block in tf32", *trained} <= found
    assert {f"BULK_{way} = {used}" for way in ("LOAD", "STORE") for used in ("true", "false")} <= found
