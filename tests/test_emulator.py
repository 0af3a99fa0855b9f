"""csrc/engine, run on a CPU by tests/emulator: right results, and no race, no missing wait or fence, in any family.

The kernels are those of real plans, with a few blocks that take several tiles each. What the emulator cannot see is
instructions.cuh, which it replaces, and what the compilers for GPUs make of the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from emulator.driver import Array, Emulator, Kernel, decode, encode
from oracle import kronecker, monarch, spec_id
from stacked import plan_by_first
from test_expression import EVERY_OPERATION, Snake
from torch import Tensor

from factorlayer.activations.named import activate, evaluate
from factorlayer.activations.results import from_result
from factorlayer.activations.tracing import trace
from factorlayer.autograd import backward
from factorlayer.autograd.backward import Ops, gradients, sums_text, texts, visits
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels import batches, gradient, tiling
from factorlayer.kernels.chain_backward import ChainBackward
from factorlayer.kernels.gradient import Reduction
from factorlayer.kernels.kronecker import (
    pair_cluster_backward,
    pair_few_backward,
    small_double_backward,
)
from factorlayer.kernels.monarch import slab_backward, untied_backward
from factorlayer.kernels.monarch.untied_backward import UntiedBackward
from factorlayer.kernels.product import few, few_backward
from factorlayer.kernels.product import turn as turns
from factorlayer.kernels.product.streamed import products, unturned
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.stack import dense_streamed
from factorlayer.kernels.stack.dense_streamed import DenseStreamed
from factorlayer.kernels.stages import Stage
from factorlayer.kernels.work import Mode
from factorlayer.maths.chain import Chain
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.plan.cuts import cuts, modes_of, works_of
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import plan
from factorlayer.plan.products import one_by_one, product_pass
from factorlayer.plan.registry import family_of
from factorlayer.plan.registry.family import Family, fastest, ways
from factorlayer.plan.registry.kronecker import OF_FACTORS, OF_WORK
from factorlayer.plan.registry.monarch import OF_MONARCH
from factorlayer.plan.registry.product import (
    FEW_OF_SOME,
    MAPPED,
    OF_MIXED_PRODUCT,
    OF_PRODUCT,
    OF_PRODUCT_AND_SLOPES,
    OF_TURN,
    STREAMED,
    WIDE,
)
from factorlayer.plan.schemes import schemes
from factorlayer.plan.visits import visits as by_visits
from factorlayer.plan.works import single

# What a rounding may be off by, or two where sums are rounded as well
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALL, MEDIUM, LARGE = batches.FEW, batches.SOME, batches.BATCHES[-1]
SOME = 1300  # of the second class, but not what it is planned for, whose untied products are those of few samples
LEARNED = trace(torch.nn.Sequential(torch.nn.PReLU(), Snake()))[0].program  # two parameters


@dataclass(frozen=True)
class Case:
    """`batch` samples through the kernels that are planned for `planned` of them, on so many processors; if `apart`,
    through one for each contraction, as layers have them that no kernel has room for at once."""

    spec: LayerSpec
    dtype: str
    batch: int
    planned: int
    architecture: int = 90
    processors: int = 2
    activation: str = "relu"
    apart: bool = False

    def __str__(self) -> str:
        program = "-learned" if self.activation == LEARNED else "-program" if "/" in self.activation else ""
        return f"sm_{self.architecture}-{self.dtype}-{spec_id(self.spec)}-n{self.batch}-of-{self.planned}{program}"

    @property
    def plan(self) -> Plan:
        chain = Chain.of(self.spec, True, self.activation)
        asked = self.dtype, self.planned, Gpu.of(self.architecture)
        return Plan(chain, *asked, with_halves(one_by_one(chain, *asked))) if self.apart else plan(chain, *asked)


CASES = [
    # Resident: odd sizes, copies of 2 to 16 bytes, the copy engine, products of small weights, ranks, two passes
    Case(kronecker((2, 3), (4, 5)), "float64", 7, SMALL, 80),
    Case(kronecker((31, 17), (31, 17)), "float32", 5, SMALL, 80),
    Case(kronecker((5, 8), (8, 7)), "tf32", 40, SMALL),
    Case(kronecker((31, 17), (31, 17)), "bfloat16", 5, SMALL),
    Case(kronecker((20, 28), (36, 44)), "float16", 4, SMALL),
    Case(kronecker((32, 40), (32, 24)), "float32", 5, SMALL),
    Case(kronecker((32, 24), (40, 24)), "float32", 70, MEDIUM),
    Case(kronecker((32, 32), (32, 32)), "float64", 9, LARGE),
    Case(kronecker((32, 32), (32, 32)), "tf32", 9, SMALL, 80),
    Case(kronecker((3, 4, 6), (5, 2, 7)), "float16", 9, SMALL),
    Case(kronecker((7, 9, 3), (5, 11, 5)), "float16", 33, LARGE),
    Case(kronecker((33, 31), (31, 33)), "bfloat16", 7, MEDIUM),
    Case(kronecker((4, 9), (6, 5), rank=2), "float32", 21, MEDIUM),
    Case(kronecker((4, 9), (6, 5), rank=2), "bfloat16", 21, MEDIUM, 80),
    Case(kronecker((8,) * 5, (8,) * 5), "bfloat16", 1, SMALL),
    # Streamed: after another pass, by rows and by columns; untied groups, ranks, turned states
    Case(kronecker((300, 3), (300, 3)), "float64", 3, SMALL, 80),
    Case(kronecker((300, 3), (300, 3)), "tf32", 3, SMALL),
    Case(monarch((8, 41), (43, 10)), "float32", 70, LARGE),
    Case(monarch((8, 31), (33, 10)), "bfloat16", 70, LARGE, 80, apart=True),
    Case(monarch((4, 9), (6, 5), rank=2), "tf32", 7, SMALL, 80, apart=True),
    Case(monarch((3, 11, 3), (31, 2, 2)), "float16", 5, LARGE, 80),
    Case(monarch((2, 3, 4), (3, 2, 5)), "float64", 3, SMALL),
    # Few: runs of groups and of b's, and single elements, parts of tiles and of chunks, more samples than 16
    Case(monarch((4, 32), (4, 20), rank=2), "bfloat16", 5, SMALL, apart=True),
    Case(monarch((16, 64), (8, 40), rank=4), "float16", 19, SMALL),
    Case(monarch((4, 24), (6, 20), rank=4), "tf32", 16, SMALL, 80, apart=True),
    Case(monarch((4, 24), (3, 21), rank=2), "float32", 33, SMALL, apart=True),
    Case(monarch((2, 4, 8), (3, 2, 4)), "float32", 3, SMALL),
    # Few: rows that 16 bytes do not divide, groups that a block's do not, doubles, weights of two rounds, more samples
    Case(monarch((3, 47), (21, 5), rank=7), "bfloat16", 1, SMALL, apart=True),
    Case(monarch((5, 10), (5, 7), rank=3), "float16", 21, SMALL, 80, apart=True),
    Case(monarch((3, 53), (17, 2), rank=11), "tf32", 5, SMALL, activation=LEARNED, apart=True),
    Case(monarch((3, 30), (13, 5), rank=3), "float32", 18, SMALL, 80, apart=True),
    Case(monarch((4, 15), (13, 6), rank=3), "float64", 19, SMALL, apart=True),
    Case(monarch((3, 10), (8, 3), rank=5), "float64", 3, SMALL, 80, apart=True),
    Case(monarch((41, 40), (40, 2), rank=40), "tf32", 20, SMALL),
    Case(monarch((3, 21), (9, 5), rank=3), "bfloat16", 150, MEDIUM, apart=True),
    # Few, of one factor
    Case(kronecker((269,), (74,)), "tf32", 1, SMALL),
    Case(kronecker((513,), (130,)), "float16", 12, SMALL),
    Case(kronecker((513,), (77,)), "bfloat16", 5, SMALL, 80, activation=LEARNED),
    Case(kronecker((130,), (77,)), "float64", 17, SMALL),
    Case(kronecker((240,), (40,)), "float32", 33, SMALL, 80),
    # Pair: every dtype, one and several parts and groups, with a mode before the two
    Case(kronecker((24, 24), (24, 24)), "float32", 5, SMALL),
    Case(kronecker((32, 24), (40, 24)), "tf32", 30, MEDIUM),
    Case(kronecker((48, 128), (40, 126)), "tf32", 7, MEDIUM),
    Case(kronecker((41, 100), (72, 68)), "tf32", 5, MEDIUM),
    Case(kronecker((600, 128), (24, 96)), "tf32", 3, MEDIUM),
    Case(kronecker((32, 128), (32, 128)), "tf32", 9, MEDIUM),
    Case(kronecker((41, 64), (50, 72)), "bfloat16", 30, MEDIUM),
    Case(kronecker((48, 64), (64, 48)), "float16", 30, MEDIUM),
    Case(kronecker((48, 64), (64, 48)), "bfloat16", 2, MEDIUM),
    Case(kronecker((3, 32, 40), (2, 40, 32)), "tf32", 6, MEDIUM),
    Case(kronecker((2, 24, 24), (3, 24, 24)), "bfloat16", 9, SMALL),
    Case(kronecker((8,) * 5, (8,) * 5), "bfloat16", 5, MEDIUM),
    Case(kronecker((2, 3, 41, 40), (4, 2, 40, 40)), "float16", 5, MEDIUM),
    # Pair, whose bias is in registers, in part or not at all: a sum, mixtures that groups do not divide, large factors
    Case(kronecker((40, 64), (40, 64), rank=2), "bfloat16", 9, MEDIUM),
    Case(kronecker((128, 64), (120, 56)), "bfloat16", 9, MEDIUM, activation="gelu"),
    Case(kronecker((3, 32, 64), (5, 40, 64)), "float16", 6, MEDIUM, processors=1),
    Case(kronecker((128, 128), (128, 128)), "bfloat16", 5, MEDIUM),
    Case(kronecker((128, 128), (128, 128)), "tf32", 5, MEDIUM),
    Case(kronecker((128, 128), (128, 128)), "float32", 3, MEDIUM),
    # Wide: rounded and split operands, three consumers, several slabs, groups held, two blocks of a cluster
    Case(kronecker((400,), (300,)), "float32", 9, MEDIUM),
    Case(kronecker((8, 200), (8, 296)), "bfloat16", 40, LARGE),
    Case(kronecker((8, 200), (8, 184)), "float16", 40, LARGE, activation=LEARNED),
    Case(kronecker((2, 8, 256), (2, 8, 1024)), "float16", 9, MEDIUM),
    Case(kronecker((160,), (192,)), "float32", 70, LARGE),
    Case(kronecker((4, 300), (4, 300), rank=2), "float32", 20, LARGE, activation=LEARNED),
    Case(monarch((4, 96), (104, 4), rank=10), "float32", 70, LARGE),
    Case(monarch((4, 192), (192, 4), rank=48), "float32", 40, LARGE),
    Case(kronecker((402,), (302,)), "tf32", 140, LARGE, apart=True),
    Case(monarch((4, 192), (4, 191)), "tf32", 70, SOME, apart=True),
    Case(monarch((32, 136), (32, 32)), "bfloat16", 70, LARGE, processors=4),
    Case(monarch((16, 136), (16, 64), rank=4), "float16", 70, SOME, processors=4),
    # Wide, floats in rows that 16 bytes do not divide, by pieces of 8 and of 4; groups that take turns in y, stored one
    # after the other and turned, by each family
    Case(kronecker((402,), (302,)), "float32", 9, MEDIUM),
    Case(kronecker((201,), (203,)), "float32", 150, LARGE),
    Case(monarch((17, 24), (112, 17)), "float32", 70, LARGE, processors=4),
    Case(monarch((17, 24), (90, 17)), "tf32", 70, LARGE, processors=4, apart=True),
    Case(monarch((17, 64), (112, 17), rank=8), "tf32", 140, LARGE, processors=8),
    Case(monarch((19, 64), (112, 19), rank=8), "bfloat16", 70, LARGE, processors=8),
    # Wide, whose weight is shifted, alone or before others, of several terms, and one that a pass has multiplied out
    Case(kronecker((375,), (393,)), "tf32", 70, LARGE),
    Case(kronecker((300,), (301,)), "float16", 70, LARGE),
    Case(kronecker((3, 331), (3, 331), rank=2), "bfloat16", 70, LARGE),
    Case(monarch((3, 67), (67, 3), rank=29), "float16", 70, LARGE, activation="gelu"),
    Case(monarch((5, 131), (131, 5), rank=23), "bfloat16", 150, LARGE),
    Case(monarch((7, 257), (129, 7), rank=3), "bfloat16", 70, LARGE, processors=4),
    # Two steps of a pass at one visit
    Case(kronecker((16, 32), (16, 32)), "tf32", 40, MEDIUM),
    # Monarch at once in 16 bits, weights going by: four groups and eight, padded rows and columns, several tiles
    Case(monarch((4, 72), (50, 4), rank=16), "bfloat16", 300, LARGE),
    Case(monarch((5, 120), (40, 8), rank=16), "float16", 150, LARGE, processors=4, activation="gelu"),
    Case(monarch((2, 136), (72, 4), rank=48), "bfloat16", 130, LARGE, activation=LEARNED),
    # Multiplied out, for passes of every kind of dense layers: columns of one group and several, ranks of one and more
    # sums than a thread has
    Case(monarch((5, 9), (9, 60), rank=5), "bfloat16", 70, LARGE),
    Case(monarch((20, 8), (8, 20), rank=7), "bfloat16", 70, LARGE, activation="gelu"),
    Case(monarch((3, 7), (86, 3), rank=2), "tf32", 70, LARGE),
    Case(monarch((12, 24), (40, 3), rank=20), "tf32", 70, LARGE),
    Case(monarch((2, 57), (57, 2), rank=4), "float32", 40, LARGE),
    Case(monarch((9, 32), (28, 11), rank=20), "float32", 40, LARGE),
    Case(monarch((4, 15), (13, 6), rank=5), "float64", 40, LARGE),
    Case(monarch((30, 2), (3, 31), rank=1), "float64", 70, LARGE, 80),
    Case(monarch((5, 9), (9, 60), rank=5), "float16", 70, LARGE),
    Case(monarch((20, 8), (8, 20), rank=7), "float16", 150, LARGE, activation="gelu"),
    # Small: five modes and four, of one size and several, blocks that share a multiprocessor
    Case(kronecker((8,) * 5, (8,) * 5), "float32", 3, MEDIUM, 80),
    Case(kronecker((8,) * 5, (8,) * 5), "float32", 3, MEDIUM, activation=LEARNED),
    Case(kronecker((8,) * 4, (8,) * 4), "float32", 20, MEDIUM, processors=1),
    Case(kronecker((4, 8, 8, 8, 4), (4, 8, 8, 8, 4)), "float32", 9, LARGE, 80),
    Case(kronecker((8, 4, 4, 4, 8), (8, 4, 4, 4, 8)), "float32", 9, LARGE, processors=1, activation=LEARNED),
    # Columns: one warp of a group and several, modes that are contracted in another order
    Case(kronecker((5, 6, 5), (7, 5, 6)), "float64", 9, LARGE),
    Case(kronecker((7, 7, 7, 7), (7, 7, 7, 7)), "float64", 5, LARGE, activation=LEARNED),
    # Double pair: one chunk and several, of odd sizes
    Case(kronecker((80, 16), (70, 90)), "float64", 5, MEDIUM),
    Case(kronecker((97, 90), (97, 90)), "float64", 3, MEDIUM, activation=LEARNED),
    Case(kronecker((128, 124), (100, 128)), "float64", 3, MEDIUM),
    # Strips: every dtype, chunks that all have slots and that take turns, rectangular factors, some before them
    Case(kronecker((64, 64), (64, 64)), "float64", 3, SMALL),
    Case(kronecker((128, 128), (128, 128)), "float64", 1, SMALL),
    Case(kronecker((32, 96), (64, 48)), "float32", 3, SMALL),
    Case(kronecker((128, 128), (128, 128)), "tf32", 2, SMALL),
    Case(kronecker((64, 96), (96, 96)), "tf32", 3, SMALL, 80),
    Case(kronecker((128, 128), (128, 128)), "bfloat16", 2, SMALL),
    Case(kronecker((128, 128), (128, 128)), "float16", 2, SMALL, activation=LEARNED),
    # Programs in place of named activations: every operation, and one that is another function of single elements
    Case(kronecker((5, 8), (8, 7)), "float64", 9, SMALL, 80, activation=EVERY_OPERATION.program),
    Case(kronecker((48, 64), (64, 48)), "bfloat16", 6, MEDIUM, activation=trace(torch.nn.Mish())[0].program),
    # Learned parameters: resident, of several terms and of two passes, streamed, pair with and without a mode, wide
    Case(kronecker((5, 8), (8, 7)), "float64", 9, SMALL, 80, activation=LEARNED),
    Case(kronecker((4, 9), (6, 5), rank=2), "float32", 21, MEDIUM, 80, activation=LEARNED),
    Case(kronecker((300, 3), (300, 3)), "tf32", 3, SMALL, activation=LEARNED),
    Case(monarch((8, 9), (6, 10)), "bfloat16", 70, SOME, 80, activation=LEARNED, apart=True),
    Case(monarch((2, 3, 4), (3, 2, 5)), "float64", 3, SMALL, activation=LEARNED),
    Case(monarch((4, 32), (4, 20), rank=2), "bfloat16", 5, SMALL, activation=LEARNED, apart=True),
    Case(kronecker((24, 24), (24, 24)), "float32", 5, SMALL, activation=LEARNED),
    Case(kronecker((48, 64), (64, 48)), "float16", 30, MEDIUM, activation=LEARNED),
    Case(kronecker((2, 24, 24), (3, 24, 24)), "bfloat16", 9, SMALL, activation=LEARNED),
    Case(kronecker((400,), (300,)), "float32", 9, MEDIUM, activation=LEARNED),
    Case(monarch((4, 192), (4, 191)), "tf32", 70, SOME, activation=LEARNED, apart=True),
    Case(monarch((16, 136), (16, 64), rank=4), "float16", 70, SOME, processors=4, activation=LEARNED),
]


def drawing(dtype: str) -> Callable[..., Array]:
    """Normal numbers of a shape, as the dtype has them."""
    random = np.random.default_rng(1)

    def draw(*shape: int) -> Array:
        return decode(encode(random.standard_normal(shape), dtype), dtype).reshape(shape)

    return draw


@dataclass
class Run:
    """A case's kernels and inputs. Behind the weights are parameters of the activation."""

    case: Case
    emulator: Emulator
    kernels: list[Kernel]
    x: Array
    weights: list[Array]
    bias: Array

    def __call__(self, x: Array, seed: int) -> tuple[Array, list[str]]:
        y, errors = self.emulator.run(
            self.case.plan, self.kernels, x, self.weights, self.bias, self.case.processors, seed=seed
        )
        return y[-1].reshape(len(x), -1) if y else np.full((0,), np.nan), errors

    def right(self) -> Array:
        x, bias, *weights = map(torch.from_numpy, (self.x, self.bias, *self.weights))
        count = len(self.case.spec.weight_shapes)
        z = naive(self.case.spec, x, weights[:count]) + bias
        return np.asarray(activate(self.case.activation, z, weights[count:]))


def in_pairs(found: dict[tuple[object, ...], Plan]) -> Iterator[Plan]:
    """Of plans by their properties some, in which all pairs of properties meet that meet in any of them."""
    pairs = {kind: {*itertools.combinations(enumerate(kind), 2)} for kind in found}
    while any(pairs.values()):
        kind = max(pairs, key=lambda kind: len(pairs[kind]))
        yield found[kind]
        pairs = {other: left - pairs[kind] for other, left in pairs.items()}


def prepare(case: Case, emulator: Emulator, changes: dict[str, str] | None = None) -> Run:
    random = np.random.default_rng(1)

    def draw(*shape: int, scale: float = 1.0) -> Array:
        values = random.standard_normal(shape) * scale
        return decode(encode(values, case.dtype), case.dtype).reshape(shape)

    weights = [draw(*shape, scale=shape[-1] ** -0.5) for shape in case.spec.weight_shapes]
    weights += [0.75 + np.full((1,), i) for i in range(case.plan.chain.parameters)]
    x, bias = draw(case.batch, case.spec.in_features), draw(case.spec.out_features)
    return Run(case, emulator, emulator.compile(case.plan, changes), x, weights, bias)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_right_in_any_order_and_keeps_samples_apart(case: Case, emulator: Emulator) -> None:
    run = prepare(case, emulator)
    y, errors = run(run.x, seed=1)
    assert not errors
    right = run.right()
    distance = np.linalg.norm(y - right)  # nothing, where an activation makes nothing but zeros
    assert distance <= 2 * EPS[case.dtype] * len(case.plan.chain.contractions) * np.linalg.norm(right)

    broken = run.x.copy()
    sick = case.batch // 2
    broken[sick] = np.nan
    found, errors = run(broken, seed=2)
    assert not errors
    assert np.isnan(found[sick]).all()
    others = np.arange(case.batch) != sick
    np.testing.assert_array_equal(found[others], y[others])


@dataclass(frozen=True)
class TurnedBehind(Case):
    """A Monarch layer whose second product, `by` a family, has one group after the other in y, which is turned then:
    planners do that for large layers alone."""

    by: Family = STREAMED

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.by.makes[0].__name__}"

    @property
    def plan(self) -> Plan:
        chain, gpu = Chain.of(self.spec, True, self.activation), Gpu.of(self.architecture)
        first, second = products(chain, self.dtype)
        apart = unturned(second)
        assert apart
        behind = fastest((self.by,), apart[0], self.planned, gpu, first=False, last=True)
        assert behind
        turn = fastest(OF_TURN, *apart[1], self.dtype, self.planned, gpu)
        passes = product_pass(first, self.planned, gpu, True, False), *behind, *turn
        return Plan(chain, self.dtype, self.planned, gpu, with_halves(passes))


TURNED_BEHIND = [
    TurnedBehind(monarch(inputs, outputs, rank=rank), dtype, 70, MEDIUM, by=family)
    for inputs, outputs, rank in (((4, 16), (16, 8), 8), ((3, 9), (20, 5), 2))
    for family, dtypes in (
        (STREAMED, ("float64", "float32", "bfloat16")),
        (FEW_OF_SOME, ("float64", "float32", "tf32", "bfloat16", "float16")),
        (WIDE, ("float32", "bfloat16", "float16") if outputs[0] == 16 else ()),
        (MAPPED, ("tf32",) if outputs[0] == 16 else ()),
    )
    for dtype in dtypes
]


@pytest.mark.parametrize("case", TURNED_BEHIND, ids=str)
def test_a_bias_finds_its_features_before_they_are_turned(case: TurnedBehind, emulator: Emulator) -> None:
    test_is_right_in_any_order_and_keeps_samples_apart(case, emulator)


@pytest.mark.parametrize("sizes", [((5, 9), (9, 60), 5), ((20, 8), (8, 20), 7)], ids=str)
def test_products_of_weights_in_half_precision_keep_their_bits(
    sizes: tuple[tuple[int, int], tuple[int, int], int], emulator: Emulator
) -> None:
    """Of small weights they would be subnormal numbers or zeros, of large ones infinite. Infinities stay alone."""
    inputs, outputs, rank = sizes
    run = prepare(Case(monarch(inputs, outputs, rank=rank), "float16", 70, LARGE, activation="identity"), emulator)
    largest, weight, *product = (type(p).__name__ for p in run.case.plan.passes)
    assert (largest, weight, *{*product}) == ("MonarchLargest", "MonarchWeight", "Instead")
    for first, second in ((2.0**-9, 2.0**-9), (2.0**9, 2.0**-12), (2.0**12, 2.0**9)):
        weights, by = [run.weights[0] * first, run.weights[1] * second], (first * second) ** 0.5
        x, bias = (decode(encode(t, "float16"), "float16").reshape(t.shape) for t in (run.x / by, run.bias * by))
        scaled = replace(run, weights=weights, x=x, bias=bias)
        y, errors = scaled(x, seed=1)
        right = scaled.right()
        assert not errors
        assert np.linalg.norm(y - right) <= 4 * EPS["float16"] * np.linalg.norm(right)
    weights = [weight.copy() for weight in run.weights]
    weights[0][1, 2, 3] = np.inf
    y, errors = replace(run, weights=weights)(run.x, seed=2)
    sick = ~np.isfinite(replace(run, weights=weights).right())
    assert not errors and sick.any() and not sick.all()
    np.testing.assert_array_equal(~np.isfinite(y), sick)


def terms_apart(weights: Sequence[Array], decades: float = 3) -> list[Array]:
    """Of half precision, the first factor of each term so many decades smaller than that of the term before, and the
    last one larger: all terms have as much to say."""
    first, *others, last = weights
    by = (10.0 ** -(decades * (np.arange(len(first)) - (len(first) - 1) / 2))).reshape(-1, 1, 1)
    return [decode(encode(w, "float16"), "float16").reshape(w.shape) for w in (first * by, *others, last / by)]


@pytest.mark.parametrize(
    ("sizes_in", "sizes_out", "rank", "batch_class"),
    [
        ((4, 6, 20), (6, 4, 24), 3, SMALL),
        ((2, 2), (2, 2), 2, SMALL),
        ((2, 2, 30), (2, 2, 30), 2, SMALL),
        ((2, 2, 30), (2, 2, 30), 2, LARGE),  # by threads
        ((3, 20, 2, 4), (3, 20, 4, 2), 2, SMALL),
    ],
    ids=str,
)
def test_terms_of_products_of_weights_in_half_precision_may_be_far_apart(
    sizes_in: tuple[int, ...], sizes_out: tuple[int, ...], rank: int, batch_class: int, emulator: Emulator
) -> None:
    """Each is brought to where it has its bits, and back, by itself."""
    spec = replace(kronecker(sizes_in, sizes_out), rank=rank)
    run = prepare(Case(spec, "float16", 5, batch_class, activation="identity"), emulator)
    (planned,) = run.case.plan.passes
    assert isinstance(planned, Resident) and planned.work.rank == rank and planned.work.dtype == "float16"
    assert any(len(mode.parts) > 1 for _, mode in planned.work.steps)
    run = replace(run, weights=terms_apart(run.weights))
    y, errors = run(run.x, seed=1)
    right = run.right()
    assert not errors
    assert np.linalg.norm(y - right) <= 2 * len(sizes_in) * EPS["float16"] * np.linalg.norm(right)


def test_floats_in_halves_have_any_scale(emulator: Emulator) -> None:
    """Of samples, of what is contracted, and of what is made: each row is as exact, and infinities go through."""
    case = Case(kronecker((200,), (136,)), "float32", 21, LARGE, activation="identity")
    run = prepare(case, emulator)
    assert [type(p).__name__ for p in case.plan.passes] == ["WeightHalves", "Wide"]
    random = np.random.default_rng(2)
    samples, features, rows = (10 ** random.uniform(-s, s, n) for s, n in ((15, 21), (3, 200), (15, 136)))
    x = decode(encode(run.x * samples[:, None] * features, "float32"), "float32").reshape(run.x.shape)
    weight = decode(encode(run.weights[0] * rows[:, None], "float32"), "float32").reshape(run.weights[0].shape)
    scaled = replace(run, weights=[weight], bias=run.bias * 0)
    y, errors = scaled(x, seed=1)
    assert not errors
    off = (y - x @ weight.T) / samples[:, None] / rows
    right = (x @ weight.T) / samples[:, None] / rows
    assert (np.linalg.norm(off, axis=0) <= 3 * EPS["float32"] * np.linalg.norm(right, axis=0)).all()
    assert (np.linalg.norm(off, axis=1) <= 3 * EPS["float32"] * np.linalg.norm(right, axis=1)).all()

    x[3, 7], weight[5, 9], x[8] = np.inf, -np.inf, 0
    y, errors = replace(scaled, weights=[weight])(x, seed=2)
    assert not errors
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.where(np.isfinite(y), 0, y), np.where(np.isfinite(s := x @ weight.T), 0, s))


@pytest.mark.parametrize(("decades", "most"), [(8, 2e-6), (12, 1e-3)])
def test_floats_in_halves_keep_features_that_weights_make_up_for(decades: int, most: float, emulator: Emulator) -> None:
    """Of 64 neighbours, each by itself: 2^-40 of the largest has 11 bits yet."""
    case = Case(kronecker((200,), (136,)), "float32", 21, LARGE, activation="identity")
    run = prepare(case, emulator)
    assert [type(p).__name__ for p in case.plan.passes] == ["WeightHalves", "Wide"]
    scales = 10 ** np.random.default_rng(2).permutation(np.linspace(-decades / 2, decades / 2, 200))
    x, weight = (
        decode(encode(values, "float32"), "float32").reshape(values.shape)
        for values in (run.x * scales, run.weights[0] / scales)
    )
    y, errors = replace(run, weights=[weight], bias=run.bias * 0)(x, seed=1)
    assert not errors
    assert (np.abs(y - x @ weight.T) <= most * (np.abs(x) @ np.abs(weight.T))).all()
    x, weight = np.zeros_like(x), np.zeros_like(weight)
    x[:, :2], weight[:, :2] = [1e6, 1e-6], [1e-6, 1e6]
    y, errors = replace(run, weights=[weight], bias=run.bias * 0)(x, seed=2)
    assert not errors
    np.testing.assert_allclose(y, 2, rtol=1e-3)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(kronecker((32, 48), (48, 32)), "bfloat16"), (kronecker((4, 6, 5), (6, 4, 5)), "float64")],
    ids=str,
)
def test_every_scheme_makes_the_same(spec: LayerSpec, dtype: str, emulator: Emulator) -> None:
    case = Case(spec, dtype, 9, SMALL)
    run = prepare(case, emulator)
    right = run.right()
    found = schemes(case.plan.chain.text, dtype, 0, Gpu.of(90))
    assert {scheme.weights for scheme in found} == {"resident", "streamed"}
    for scheme in found:
        kernels = emulator.compile(scheme.plan)
        y, errors = emulator.run(scheme.plan, kernels, run.x, run.weights, run.bias, case.processors)
        assert not errors, scheme
        distance = np.linalg.norm(y[-1].reshape(right.shape) - right)
        assert distance <= 2 * EPS[dtype] * len(spec.contractions) * np.linalg.norm(right), scheme


def run_with_less_memory(case: Case, shared: int, emulator: Emulator) -> Plan:
    """Its plan for a GPU with so many bytes of shared memory, which has run and was right."""
    run, gpu = prepare(case, emulator), replace(Gpu.of(case.architecture), shared=shared)
    found = plan(case.plan.chain, case.dtype, case.planned, gpu)
    kernels = emulator.compile(found)
    y, errors = emulator.run(found, kernels, run.x, run.weights, run.bias, case.processors)
    assert not errors
    right = run.right()
    distance = np.linalg.norm(y[-1].reshape(right.shape) - right)
    assert distance <= 2 * EPS[case.dtype] * len(found.chain.contractions) * np.linalg.norm(right)
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(kronecker((7, 8, 8), (7, 8, 8), rank=3), "bfloat16", 9, LARGE, activation=LEARNED),
        Case(kronecker((7, 5, 6, 5), (7, 5, 6, 5), rank=2), "bfloat16", 9, LARGE),
        Case(kronecker((16, 16), (16, 16), rank=2), "float32", 33, LARGE, 80),
        Case(kronecker((7, 8, 4, 4, 5), (7, 8, 4, 4, 5), rank=3), "float16", 3, MEDIUM),
    ],
    ids=str,
)
def test_terms_have_states_of_their_own_between_passes(case: Case, emulator: Emulator) -> None:
    shared = {(7, 8, 8): 5500, (16, 16): 8000}.get(case.spec.in_factors, 24000)
    found = run_with_less_memory(case, shared, emulator)
    first, *_, last = found.passes
    assert isinstance(first, Resident) and isinstance(last, Resident)
    rank = case.spec.rank
    assert (first.work.terms, first.work.apart, last.work.rank, last.work.apart) == (rank, False, rank, True)


@pytest.mark.parametrize(
    ("case", "count", "slots"),
    [
        (Case(kronecker((6, 5, 12), (6, 5, 12), rank=2), "float32", 9, LARGE), 1, 1),
        (Case(kronecker((48, 24), (24, 24), rank=3), "float32", 9, LARGE), 1, 2),  # by the copy engine
        (Case(kronecker((7, 41, 3), (2, 41, 2), rank=3), "float64", 9, LARGE, 80), 1, 1),  # by threads
        (Case(kronecker((5, 24, 16), (5, 24, 16), rank=2), "tf32", 9, LARGE), 2, 1),
        (Case(kronecker((6, 8, 8, 8), (6, 8, 8, 8), rank=2), "float16", 5, LARGE), 2, 2),  # scaled
        (Case(kronecker((20, 8, 10, 6), (20, 8, 10, 6), rank=3), "bfloat16", 3, LARGE), 3, 1),
    ],
    ids=str,
)
def test_a_block_makes_the_states_of_all_terms(case: Case, count: int, slots: int, emulator: Emulator) -> None:
    """In the first of two passes, of so many stages: with the result in place of a stage's state, and beside all. What
    several cuts begin with runs once."""
    run, gpu, seen = prepare(case, emulator), Gpu.of(case.architecture), set[Resident]()
    for works in cuts(case.plan.chain, case.dtype):
        if len(works) != 2 or len(works[0].steps) != count:
            continue
        tilings = tiling.candidates(works[0], case.planned, gpu)
        found = (Resident(*fields) for _, fields, _ in sorted(tilings, key=lambda candidate: candidate[0]))
        first = next((p for p in found if (p.made, p.slots) == (case.spec.rank, slots)), None)
        last = tiling.tile(works[1], case.planned, gpu)
        if first is None or last is None or first in seen:
            continue
        seen.add(first)
        both = Plan(case.plan.chain, case.dtype, case.planned, gpu, (first, last))
        y, errors = emulator.run(both, emulator.compile(both), run.x, run.weights, run.bias, case.processors)
        assert not errors, both
        right = run.right()
        distance = np.linalg.norm(y[-1].reshape(right.shape) - right)
        assert distance <= 2 * EPS[case.dtype] * len(case.spec.contractions) * np.linalg.norm(right), both
    assert seen


@pytest.mark.parametrize(
    ("case", "count"),
    [
        (Case(kronecker((20, 24), (20, 24)), "bfloat16", 40, LARGE), 2),
        (Case(kronecker((20, 24), (20, 24), rank=2), "bfloat16", 40, LARGE), 2),
        (Case(kronecker((48, 3, 8), (48, 3, 8)), "float32", 20, LARGE), 2),  # loaded by the copy engine
        (Case(kronecker((7, 5, 18), (9, 5, 18)), "float64", 9, LARGE, 80), 3),
        (Case(kronecker((6, 5, 18, 9), (6, 5, 18, 9)), "float16", 5, LARGE), 4),
        (Case(kronecker((6, 5, 18, 9), (6, 5, 18, 10), rank=3), "bfloat16", 5, LARGE), 4),  # all terms of a state
        (Case(kronecker((2, 9, 3, 7, 5), (2, 9, 4, 7, 5), rank=2), "float64", 5, LARGE, 80), 5),
    ],
    ids=str,
)
def test_x_may_be_alone_in_its_slot(case: Case, count: int, emulator: Emulator) -> None:
    """With so many stages. The next tile is loaded behind the first one."""
    run, gpu = prepare(case, emulator), Gpu.of(case.architecture)
    works = (works[0] for works in cuts(case.plan.chain, case.dtype) if len(works) == 1)
    tilings = (each for work in works for each in tiling.candidates(work, case.planned, gpu))
    found = (Resident(*fields) for _, fields, _ in sorted(tilings, key=lambda candidate: candidate[0]))
    alone = next(p for p in found if (p.alone, p.slots, len(p.stages)) == (True, 1, count))
    planned = Plan(case.plan.chain, case.dtype, case.planned, gpu, (alone,))
    y, errors = emulator.run(planned, emulator.compile(planned), run.x, run.weights, run.bias, case.processors)
    assert not errors, planned
    right = run.right()
    distance = np.linalg.norm(y[-1].reshape(right.shape) - right)
    assert distance <= 2 * EPS[case.dtype] * count * np.linalg.norm(right), planned


@pytest.mark.parametrize(
    ("case", "count", "slots"),
    [
        (Case(kronecker((20, 24), (20, 24)), "float32", 40, LARGE), 2, 1),  # x alone
        (Case(kronecker((20, 16), (21, 16), rank=2), "float16", 40, LARGE), 2, 2),  # terms that are summed
        (Case(kronecker((9, 4, 12), (9, 5, 12)), "float64", 9, LARGE, 80), 3, 2),
        (Case(kronecker((40, 64), (24, 64), rank=2), "bfloat16", 9, LARGE), 1, 1),  # terms with a state each
        (Case(kronecker((18, 3, 48), (18, 3, 48), rank=2), "bfloat16", 9, LARGE), 1, 2),  # chunks, some not whole
        (Case(kronecker((18, 200), (18, 200)), "tf32", 9, LARGE), 1, 2),
        (Case(kronecker((18, 40), (19, 48), rank=2), "tf32", 9, LARGE), 2, 1),  # by rows
        (Case(kronecker((70, 48), (70, 48)), "float16", 50, LARGE), 1, 2),
        (Case(kronecker((12, 80), (12, 64), rank=3), "bfloat16", 50, LARGE), 1, 2),
    ],
    ids=str,
)
def test_a_result_goes_straight_to_memory(case: Case, count: int, slots: int, emulator: Emulator) -> None:
    """From the sums of the last stage, in every pass that may do so, of so many stages."""
    run, gpu, right = prepare(case, emulator), Gpu.of(case.architecture), None
    kinds: dict[tuple[object, ...], Plan] = {}
    for works in cuts(case.plan.chain, case.dtype):
        passes = [tiling.tile(work, case.planned, gpu) for work in works]
        for at, work in enumerate(works):
            tilings = sorted(
                tiling.candidates(work, case.planned, gpu), key=lambda candidate: candidate[0], reverse=True
            )
            ways = [p for p in (Resident(*fields) for _, fields, _ in tilings) if p.straight and p.slots == slots]
            of_work = {(work, p.made, p.alone, p.is_ragged, p.units > 1): p for p in ways if len(p.stages) == count}
            for kind, way in of_work.items():
                whole = [p for p in (*passes[:at], way, *passes[at + 1 :]) if p]
                if len(whole) == len(works):  # several cuts may have a work in common
                    kinds.setdefault(kind, Plan(case.plan.chain, case.dtype, case.planned, gpu, tuple(whole)))
    for planned in in_pairs(kinds):
        y, errors = emulator.run(planned, emulator.compile(planned), run.x, run.weights, run.bias, case.processors)
        assert not errors, planned
        right = run.right()
        distance = np.linalg.norm(y[-1].reshape(right.shape) - right)
        assert distance <= 2 * EPS[case.dtype] * len(case.spec.contractions) * np.linalg.norm(right), planned
    assert right is not None


@pytest.mark.parametrize(
    "case",
    [
        Case(kronecker((40, 1), (40, 8)), "float32", 9, LARGE),
        Case(kronecker((40, 1), (40, 8)), "bfloat16", 9, MEDIUM),
        Case(kronecker((40, 8), (40, 1)), "float64", 9, LARGE),
        Case(kronecker((1, 12, 1), (9, 12, 3)), "float16", 9, LARGE, 80),
    ],
    ids=str,
)
def test_modes_may_have_a_single_element(case: Case, emulator: Emulator) -> None:
    run_with_less_memory(case, Gpu.of(case.architecture).shared, emulator)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (Case(kronecker((15, 7), (9, 13)), "bfloat16", 37, LARGE), "rows"),
        (Case(kronecker((9, 31), (9, 27)), "float16", 19, LARGE, activation=LEARNED), "columns"),
        (Case(kronecker((2, 45), (3, 45)), "float16", 11, LARGE), "threads"),
        (Case(kronecker((3, 17), (3, 19)), "float32", 70, LARGE), "rows"),
        (Case(kronecker((60, 11, 13), (60, 11, 13), rank=3), "float16", 3, LARGE), "columns"),
        (Case(kronecker((13, 21), (11, 2)), "float16", 5, LARGE), "columns"),
        (Case(kronecker((70, 21, 15), (70, 21, 15)), "bfloat16", 2, LARGE), "columns"),
    ],
    ids=str,
)
def test_results_of_odd_rows_lie_as_in_memory(case: Case, how: str, emulator: Emulator) -> None:
    """Behind 16 bytes that a tile begins among, and that the last one ends among, of one term or of several."""
    found = run_with_less_memory(case, 60000, emulator)
    assert any(isinstance(p, Resident) and p.as_memory and how in str(p.last) for p in found.passes), found


def stages_of(found: Plan) -> list[Stage]:
    passes = (p for p in found.passes if isinstance(p, Resident))
    return [stage for p in passes for stage in p.stages if isinstance(stage, Stage)]


@pytest.mark.parametrize(
    "case",
    [
        Case(kronecker((3, 40, 98), (2, 40, 98)), "float16", 3, LARGE),
        Case(kronecker((3, 90, 97), (2, 90, 97)), "bfloat16", 3, LARGE),
        Case(kronecker((70, 3), (70, 5)), "float64", 3, LARGE, activation=LEARNED),
        Case(kronecker((2, 120), (2, 120)), "float32", 3, LARGE),
        Case(kronecker((2, 66, 30), (2, 66, 30), rank=3), "tf32", 3, LARGE),
        Case(kronecker((2, 63, 5), (2, 63, 5), rank=2), "float64", 3, LARGE),
        Case(kronecker((3, 1), (3, 4)), "float32", 9, LARGE),
    ],
    ids=str,
)
def test_small_modes_are_contracted_by_threads(case: Case, emulator: Emulator) -> None:
    """In the first stage, the last or the only one, and summed over terms whose states lie apart."""
    found = run_with_less_memory(case, 60000 if case.spec.rank > 2 else 200000, emulator)
    assert any(stage.mt == 0 for stage in stages_of(found)), found


@pytest.mark.parametrize(
    "case",
    [
        Case(kronecker((24, 12, 128), (24, 12, 128)), "bfloat16", 2, LARGE),
        Case(kronecker((2, 40, 8, 16), (2, 40, 8, 16), rank=2), "float16", 2, LARGE),
        Case(kronecker((20, 8, 64), (20, 8, 64)), "tf32", 3, LARGE),
        Case(kronecker((2, 20, 8, 64), (2, 20, 8, 64)), "float32", 2, LARGE),
    ],
    ids=str,
)
def test_lanes_store_tiles_in_turn(case: Case, emulator: Emulator) -> None:
    """Where the q's that a stage makes lie in the same banks of the next one's rows."""
    found, size = run_with_less_memory(case, Gpu.of(case.architecture).shared, emulator), ELEMENT_BYTES[case.dtype]
    pairs = [pair for p in found.passes if isinstance(p, Resident) for pair in itertools.pairwise(p.stages)]
    assert any(a.inner * size % 128 == 0 and a.nt % 4 == 0 and b.inner == a.inner * a.q for a, b in pairs), found


@pytest.mark.parametrize(
    "case",
    [
        Case(kronecker((40, 155), (40, 155)), "bfloat16", 3, LARGE),
        Case(kronecker((24, 5, 140), (24, 5, 140)), "float16", 3, LARGE),
        Case(kronecker((40, 138), (40, 138)), "float32", 3, LARGE),
    ],
    ids=str,
)
def test_chunks_need_not_divide_a_slice(case: Case, emulator: Emulator) -> None:
    found = run_with_less_memory(case, 30000, emulator)
    assert any(isinstance(p, Resident) and p.is_ragged for p in found.passes), found


# Of gradients: outer, p, q, inner, tied. Columns, k's or groups lie side by side in memory, in whole runs or not.
Sizes = tuple[int, int, int, int, bool]
SUMMED = [
    ((3, 16, 32, 1, True), "float64", 33),
    ((2, 13, 9, 1, True), "bfloat16", 20),
    ((1, 64, 24, 72, True), "float16", 5),
    ((3, 5, 7, 3, True), "float32", 9),
    ((2, 8, 20, 20, True), "tf32", 9),
    ((4, 24, 40, 1, False), "tf32", 70),
    ((2, 24, 40, 4, False), "bfloat16", 70),
    ((1, 9, 5, 8, False), "float64", 37),
    ((2, 3, 5, 3, False), "float32", 40),
]


def gradient_of(sizes: Sizes, dtype: str, batch: int, processors: int = 2, architecture: int = 90) -> Plan:
    *numbers, tied = sizes
    chain = Chain((Contraction(0, *numbers, tied=tied),), gradient=True)
    return plan(chain, dtype, batch, Gpu(architecture, processors, 232448))


def check_gradient(found: Plan, emulator: Emulator) -> None:
    """And infinite where it has to be."""
    (c,), dtype, batch = found.chain.contractions, found.dtype, found.batch
    kernels = emulator.compile(found)
    random = np.random.default_rng(1)
    x, grad = (
        decode(encode(random.standard_normal(n * c.outer * batch * c.inner), dtype), dtype).reshape(batch, -1)
        for n in (c.p, c.q)
    )
    for value in (None, np.inf):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[batch // 2, 0] = value
            grad[batch // 2, -1] = value if found.chain.bias else grad[batch // 2, -1]
        with np.errstate(invalid="ignore"):
            states = grad.reshape(batch, c.outer, c.q, c.inner), x.reshape(batch, c.outer, c.p, c.inner)
            right = np.einsum("noqi,nopi->qp" if c.tied else "noqi,nopi->oiqp", *states).ravel()
            right = np.append(right, grad.sum(0)) if found.chain.bias else right
        outputs, errors = emulator.run(found, kernels, x, [grad], None, blocks=found.gpu.sms)
        assert not errors
        summed = outputs[-1]
        fine = np.isfinite(right)
        np.testing.assert_array_equal(summed[~fine], right[~fine])
        error = np.linalg.norm(summed[fine] - right[fine]) / np.linalg.norm(right[fine])
        longest = batch * c.inner * (c.outer if c.tied else 1)
        assert error <= 2 * EPS[dtype] + EPS["float64" if dtype == "float64" else "float32"] * longest**0.5


@pytest.mark.parametrize(("sizes", "dtype", "batch"), SUMMED, ids=str)
def test_gradients_are_right_in_any_order(sizes: Sizes, dtype: str, batch: int, emulator: Emulator) -> None:
    """Two processors, whose blocks take several chunks each."""
    check_gradient(gradient_of(sizes, dtype, batch, architecture=80), emulator)


# The same on the warpgroup instructions, with wm, wn, height, n and least: rows that fill no chunk, or no four of them,
# one of them; sizes that fill no slab, or tile; several tiles, groups and parts; rings that turn.
WIDE_SUMMED = [
    ((1, 64, 64, 1, True), "bfloat16", 64, 1, (1, 1, 1, 64, 1)),
    ((3, 40, 72, 1, True), "bfloat16", 100, 2, (2, 1, 1, 48, 1)),
    ((2, 136, 200, 1, False), "float16", 70, 8, (1, 2, 2, 64, 1)),
    ((4, 24, 40, 1, False), "bfloat16", 700, 1, (1, 1, 1, 32, 2)),
    ((2, 192, 192, 1, False), "float16", 300, 4, (3, 1, 1, 192, 2)),
    ((1, 264, 136, 1, True), "bfloat16", 1100, 8, (2, 1, 1, 192, 4)),
    ((1, 8, 8, 1, True), "float16", 1, 2, (1, 1, 1, 16, 2)),
    ((3, 36, 76, 1, True), "tf32", 50, 2, (2, 1, 1, 96, 1)),
    ((2, 132, 100, 1, False), "tf32", 35, 8, (1, 2, 2, 64, 1)),
    ((1, 260, 136, 1, True), "tf32", 550, 8, (2, 1, 1, 256, 4)),
    ((1, 4, 4, 1, True), "tf32", 1, 2, (1, 1, 1, 32, 2)),
    ((2, 192, 188, 1, False), "tf32", 200, 4, (1, 2, 3, 96, 1)),
    ((1, 140, 260, 1, True), "tf32", 470, 4, (2, 1, 2, 128, 1)),
    ((1, 60, 196, 1, True), "tf32", 130, 2, (1, 1, 4, 64, 1)),
    ((3, 36, 76, 1, True), "float32", 50, 2, (2, 1, 1, 64, 1)),
    ((2, 132, 100, 1, False), "float32", 35, 8, (1, 2, 1, 64, 1)),
    ((4, 24, 44, 1, False), "float32", 351, 1, (1, 1, 1, 32, 2)),
    ((1, 68, 192, 1, True), "float32", 397, 8, (1, 1, 2, 64, 4)),
    # Rows that are no whole pieces: of one state or both, odd, of whole words, of pairs of these; parts of rows; fewer
    # rows than places to begin at; a group alone that begins within a piece, also of rows that are whole
    ((1, 63, 256, 1, True), "bfloat16", 300, 2, (2, 1, 2, 64, 1)),
    ((1, 196, 132, 1, True), "float16", 330, 4, (2, 1, 1, 128, 1)),
    ((1, 200, 70, 1, True), "bfloat16", 130, 4, (1, 2, 1, 64, 1)),
    ((3, 37, 75, 1, True), "bfloat16", 101, 2, (2, 1, 1, 48, 1)),
    ((2, 133, 201, 1, False), "float16", 70, 8, (1, 2, 2, 64, 1)),
    ((1, 3, 5, 1, True), "bfloat16", 1, 1, (1, 1, 1, 16, 1)),
    ((1, 63, 100, 1, True), "tf32", 300, 2, (2, 1, 1, 64, 1)),
    ((1, 132, 66, 1, True), "tf32", 70, 3, (1, 2, 1, 64, 1)),
    ((3, 70, 31, 1, False), "float32", 70, 6, (1, 1, 1, 64, 1)),
    ((1, 27, 13, 1, True), "float32", 170, 2, (1, 1, 1, 32, 1)),
    ((1, 61, 125, 1, True), "bfloat16", 900, 20, (2, 1, 1, 64, 1)),
    ((1, 67, 130, 1, True), "tf32", 3, 4, (1, 1, 2, 96, 1)),
    ((2, 20, 12, 1, False), "float16", 70, 1, (1, 1, 1, 32, 1)),
    ((4, 14, 130, 1, False), "bfloat16", 67, 1, (1, 1, 1, 32, 1)),
    ((4, 9, 65, 1, False), "tf32", 41, 1, (1, 1, 1, 32, 1)),
    ((2, 66, 70, 1, False), "float32", 41, 1, (1, 1, 2, 64, 1)),
]


Tiling = tuple[int, ...]


def wide_gradient_of(sizes: Sizes, dtype: str, batch: int, processors: int, tiling: Tiling, bias: bool = False) -> Plan:
    found = gradient_of(sizes, dtype, batch, processors)
    found = replace(found, chain=replace(found.chain, bias=bias))
    summing = WideGradient(found.chain.contractions[0], dtype, *tiling, gpu=found.gpu, batch=batch, bias=bias)
    return replace(found, passes=(summing,) if summing.is_whole else (summing, Reduction(summing)))


@pytest.mark.parametrize(("sizes", "dtype", "batch", "processors", "tiling"), WIDE_SUMMED, ids=str)
def test_gradients_of_warpgroups_are_right_in_any_order(
    sizes: Sizes, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    check_gradient(wide_gradient_of(sizes, dtype, batch, processors, tiling), emulator)


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32"])
def test_gradients_of_warpgroups_are_put_in_order(dtype: str, emulator: Emulator) -> None:
    for batch, rows, across in ((300, 16, 5), (70, 40, 2)):
        chain = Chain((Contraction(0, 3, 72, 80, 1, tied=False),), gradient=True, mixed=(3, rows, across))
        found = plan(chain, dtype, LARGE, Gpu(90, 6 if batch > 70 else 3, 232448))
        assert isinstance(found.passes[0], WideGradient) and found.passes[0].mixed == (rows, across)
        draw = drawing(dtype)
        x, grad = draw(batch, 3, 72), draw(batch, 3, across, rows)
        outputs, errors = emulator.run(found, emulator.compile(found), x, [grad], None, blocks=found.gpu.sms)
        assert not errors
        right = np.einsum("ngcr,ngp->grcp", grad, x).ravel()
        assert np.linalg.norm(outputs[-1] - right) <= 2 * EPS[dtype] * np.linalg.norm(right)


@pytest.mark.parametrize(
    ("sizes", "dtype", "batch", "processors", "tiling"),
    [
        *(case for case in WIDE_SUMMED if case[0][0] == 1 and case[1] != "float32"),
        ((1, 136, 80, 1, True), "bfloat16", 130, 4, (1, 1, 1, 64, 1)),
        ((1, 264, 72, 1, True), "float16", 70, 3, (1, 2, 1, 64, 1)),
        ((1, 128, 72, 1, True), "tf32", 70, 4, (2, 1, 1, 64, 1)),
        ((1, 72, 264, 1, True), "tf32", 70, 4, (1, 1, 2, 64, 1)),
    ],
    ids=str,
)
def test_a_bias_is_summed_with_its_weight(
    sizes: Sizes, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    check_gradient(wide_gradient_of(sizes, dtype, batch, processors, tiling, bias=True), emulator)


@pytest.mark.parametrize("height", [1, 2])
def test_a_bias_in_tf32_is_summed_before_anything_is_rounded(height: int, emulator: Emulator) -> None:
    """Where all but a forty-thousandth of what is summed cancels, nothing would be left of sums of rounded numbers."""
    random, q, batch = np.random.default_rng(7), 72, 130
    found = wide_gradient_of((1, 64, q, 1, True), "tf32", batch, 4, (1, 1, height, 64, 1), bias=True)
    grad = np.ones((batch, q)) + random.uniform(1e-6, 1e-3, (batch, q))
    grad[1::2] *= -1
    grad = decode(encode(grad.ravel(), "float32"), "float32").reshape(batch, q)
    outputs, errors = emulator.run(found, emulator.compile(found), np.ones((batch, 64)), [grad], None, blocks=4)
    assert not errors
    assert np.abs(outputs[-1][-q:] - grad.sum(0)).max() <= EPS["float32"] * batch


def test_cases_have_one_block_for_a_tile_and_several() -> None:
    plans = [gradient_of(*case, architecture=80) for case in SUMMED]
    assert {(type(found.passes[0]).__name__, len(found.passes)) for found in plans} >= {
        ("Gradient", 1),
        ("Gradient", 2),
    }
    plans = [wide_gradient_of(*case) for case in WIDE_SUMMED]
    assert {len(found.passes) for found in plans} == {1, 2}


@pytest.mark.parametrize(
    ("sizes", "dtype", "filled", "ways", "vector"),
    [
        ((16, 16, 32, 1, True), "float64", 256, 1, 2),
        ((16, 16, 32, 1, True), "tf32", 256, 2, 4),
        ((16, 16, 24, 1, True), "bfloat16", 256, 4, 4),
        ((2, 20, 20, 2, False), "float32", 2048, 8, 4),
        ((16, 15, 23, 1, True), "float16", 256, 1, 1),
        ((16, 16, 8, 1, True), "float32", 1 << 17, 8, 1),
    ],
    ids=str,
)
def test_sums_are_added_up_by_as_many_as_fill_the_gpu(
    sizes: Sizes,
    dtype: str,
    filled: int,
    ways: int,
    vector: int,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient, "FILLED", filled)
    found = gradient_of(sizes, dtype, 70 if sizes[-1] else 270, processors=20)
    reduction = found.passes[1]
    assert isinstance(reduction, Reduction) and reduction.of.most * reduction.of.folds > 2
    assert (reduction.ways, reduction.vector) == (ways, vector)
    check_gradient(found, emulator)


# Of both weights and x at once: several groups and slots, padding in every size, parts of columns, odd rows, few units,
# a weight that leaves no room for copies before it is read
AT_ONCE = [
    (((64, 64), (64, 64)), "bfloat16", 40, 90),
    (((64, 64), (64, 64)), "bfloat16", 9, 80),
    (((41, 56), (50, 24)), "float16", 40, 90),
    (((24, 40), (33, 64)), "bfloat16", 5, 90),
    (((32, 32), (32, 32)), "float16", 20, 80),
    (((20, 28), (36, 44)), "bfloat16", 9, 90),
    (((9, 24), (8, 40)), "float16", 11, 90),
    (((64, 64), (64, 64)), "tf32", 5, 90),
    (((9, 21), (8, 43)), "tf32", 23, 86),
    (((48, 64), (64, 32)), "tf32", 5, 90),
    (((64, 64), (64, 64)), "float32", 5, 90),
    (((48, 48), (48, 48)), "float32", 5, 90),
    (((64, 64), (64, 64)), "tf32", 5, 80),
    (((39, 44), (42, 60)), "tf32", 5, 90),
    (((45, 60), (51, 44)), "float32", 9, 90),
    (((20, 31), (36, 42)), "float32", 9, 80),
    (((16, 16), (16, 16)), "float32", 2, 90),
    (((64, 64), (64, 64)), "float64", 3, 90),
    (((8, 64), (9, 81)), "float64", 5, 90),
    (((84, 128), (84, 110)), "bfloat16", 3, 90),
    (((112, 128), (112, 128)), "bfloat16", 3, 90),
    (((72, 72), (104, 88)), "float16", 5, 90),
    (((8, 24), (96, 24)), "bfloat16", 25, 90),
    (((67, 72), (99, 88)), "bfloat16", 3, 90),
    (((112, 128), (112, 128)), "tf32", 5, 90),
    (((72, 76), (24, 68)), "tf32", 5, 90),
    (((128, 44), (97, 100)), "tf32", 4, 90),
    (((96, 128), (33, 32)), "tf32", 5, 90),
    (((80, 64), (64, 128)), "tf32", 5, 90),
    (((20, 28), (33, 45)), "float64", 9, 80),
    (((128, 128), (128, 128)), "float64", 3, 90),
    (((97, 31), (100, 45)), "float64", 5, 90),
    (((40, 124), (110, 72)), "float64", 5, 90),
]
DOUBLE_PAIRS = (((128, 128), (128, 128)), ((97, 31), (100, 45)), ((40, 124), (110, 72)))
SCALED_PAIRS = (
    ((112, 128), (112, 128)),
    ((72, 76), (24, 68)),
    ((128, 44), (97, 100)),
    ((96, 128), (33, 32)),
    ((80, 64), (64, 128)),
)
LARGE_PAIRS = (((112, 128), (112, 128)), ((72, 72), (104, 88)), ((67, 72), (99, 88)))


def kind_of(sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, architecture: int) -> str:
    of_warpgroups = architecture == 90 and dtype != "float64" and min(min(s) for s in sizes) >= 24
    own = "Pair16Backward" if dtype in ("bfloat16", "float16") else "PairSplitBackward"
    if dtype == "float64" and sizes in DOUBLE_PAIRS:
        return "PairDoubleBackward"
    if dtype == "tf32" and sizes in SCALED_PAIRS:
        return "PairTf32Backward"
    fits = of_warpgroups and max(max(s) for s in sizes) <= 64
    return "Pair16LargeBackward" if sizes in LARGE_PAIRS else own if fits else "PairBackward"


def all_gradients_of(spec: LayerSpec) -> Chain:
    return replace(Chain.of(spec, False, "identity"), backward=True)


def gradients_by(kind: str, spec: LayerSpec, dtype: str, batch: int, gpu: Gpu) -> Plan:
    """Of factors, by passes that begin with one of this kind, whichever the planner would take."""
    chain = all_gradients_of(spec)
    found = ways(OF_FACTORS, modes_of(chain), 1, dtype, batch, gpu)
    return Plan(chain, dtype, batch, gpu, next(passes for passes in found if type(passes[0]).__name__ == kind))


@pytest.mark.parametrize(("sizes", "dtype", "batch", "architecture"), AT_ONCE, ids=str)
def test_all_gradients_at_once(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, batch: int, architecture: int, emulator: Emulator
) -> None:
    spec = kronecker(*sizes)
    gpu = replace(Gpu.of(architecture), sms=2)
    found = gradients_by(kind_of(sizes, dtype, architecture), spec, dtype, LARGE, gpu)
    check_all_gradients_of(spec, found, batch, emulator)


@pytest.mark.parametrize("sizes", [((64, 64), (64, 64)), ((33, 40), (46, 24)), ((24, 56), (64, 40))], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_gradients_with_a_biass(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, emulator: Emulator
) -> None:
    spec = kronecker(*sizes)
    of_weights = gradients_by("Pair16Backward", spec, dtype, LARGE, replace(Gpu.of(90), sms=2))
    both = of_weights.passes[0].with_bias(LARGE)
    chain = replace(of_weights.chain, bias=True)
    check_all_gradients_of(spec, replace(of_weights, chain=chain, passes=(both, *both.finishing)), 9, emulator)


def check_all_gradients_of(spec: LayerSpec, found: Plan, batch: int, emulator: Emulator) -> None:
    """And infinite where they have to be, which is for no other sample."""
    kernels, dtype = emulator.compile(found), found.dtype
    draw = drawing(dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    a, b = (draw(*shape) / 8 for shape in spec.weight_shapes)
    sick = {batch // 2, batch - 1}
    fine = [n for n in range(batch) if n not in sick]
    before: Array | None = None
    for seed, value in enumerate((None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[batch // 2, 1], grad[batch - 1, 2] = value, -value
        outputs, errors = emulator.run(found, kernels, x, [a, b, grad], None, blocks=2, seed=seed)
        assert not errors
        grad_x, grad_weights = outputs[0].reshape(batch, -1), outputs[-1]
        with np.errstate(invalid="ignore"):
            states, behind = x.reshape(batch, *spec.in_factors), grad.reshape(batch, *spec.out_factors)
            back = a.T @ behind
            right = [back @ b, (behind @ (states @ b.T).mT).sum(0), (back.mT @ states).sum(0)]
            right += [grad.sum(0)] if found.chain.bias else []
        made = np.split(grad_weights, np.cumsum([each.size for each in right[1:]])[:-1])
        for part, expected in zip((grad_x, *made), right, strict=True):
            part, expected = part.ravel(), expected.ravel()
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(part[~finite], expected[~finite])
            error = np.linalg.norm(part[finite] - expected[finite])
            assert error <= 4 * EPS[dtype] * np.linalg.norm(expected[finite])
        before = grad_x if before is None else before
        np.testing.assert_array_equal(grad_x[fine], before[fine])


@pytest.mark.parametrize(
    ("sizes", "dtype", "batch"),
    [
        (((8, 64, 64), (8, 64, 64)), "bfloat16", 5),
        (((5, 33, 40), (8, 46, 24)), "float16", 5),
        (((8, 24, 56), (3, 64, 40)), "bfloat16", 7),
    ],
    ids=str,
)
def test_all_gradients_with_a_small_mode(
    sizes: tuple[tuple[int, int, int], tuple[int, int, int]], dtype: str, batch: int, emulator: Emulator
) -> None:
    """Which mixes what is read, and what is made, at one visit; infinite where they have to be."""
    spec = kronecker(*sizes)
    found = gradients_by("PairMixedBackward", spec, dtype, LARGE, replace(Gpu.of(90), sms=2))
    kernels, draw = emulator.compile(found), drawing(dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / 8 for shape in spec.weight_shapes]
    m, a, b = weights
    before: Array | None = None
    for seed, value in enumerate((None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[batch // 2, 1], grad[batch - 1, 2] = value, -value
        outputs, errors = emulator.run(found, kernels, x, [*weights, grad], None, blocks=2, seed=seed)
        assert not errors
        with np.errstate(invalid="ignore"):
            states, behind = x.reshape(batch, *spec.in_factors), grad.reshape(batch, *spec.out_factors)
            mixed = np.einsum("qp,npij->nqij", m, states)
            between = a.T @ behind
            back = between @ b
            right = [np.einsum("qp,nqij->npij", m, back), np.einsum("nqij,npij->qp", back, states)]
            right += [(behind @ (mixed @ b.T).mT).sum((0, 1)), (between.mT @ mixed).sum((0, 1))]
        parts = np.split(outputs[-1], np.cumsum([w.size for w in weights])[:-1])
        for part, expected in zip((outputs[0], *parts), right, strict=True):
            part, expected = part.ravel(), expected.ravel()
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(part[~finite], expected[~finite])
            assert np.linalg.norm(part[finite] - expected[finite]) <= 4 * EPS[dtype] * np.linalg.norm(expected[finite])
        fine = [n for n in range(batch) if n not in (batch // 2, batch - 1)]
        grad_x = outputs[0].reshape(batch, -1)[fine]
        before = grad_x if before is None else before
        np.testing.assert_array_equal(grad_x, before)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("decades", [(8, 0), (0, 8)], ids=["of x", "of grad_y"])
def test_scaled_halves_hold_eight_decades(mode: int, decades: tuple[int, int], emulator: Emulator) -> None:
    """Of rows or columns that weights make up for: each result by itself."""
    spec = kronecker((84, 72), (68, 76))
    found = plan(all_gradients_of(spec), "tf32", LARGE, replace(Gpu.of(90), sms=2))
    assert type(found.passes[0]).__name__ == "PairTf32Backward"
    draw, generator = drawing("tf32"), np.random.default_rng(1)
    x, grad = draw(3, *spec.in_factors), draw(3, *spec.out_factors)
    weights = [draw(*shape) / 8 for shape in spec.weight_shapes]
    of_p, of_q = (
        10 ** generator.permutation(np.linspace(-n / 2, n / 2, sizes[mode]))
        for n, sizes in zip(decades, (spec.in_factors, spec.out_factors), strict=True)
    )
    along = (1, -1, 1) if mode == 0 else (1, 1, -1)
    weights[mode] = weights[mode] / np.outer(of_q, of_p)
    given = [(x * of_p.reshape(along)).reshape(3, -1), *weights, (grad * of_q.reshape(along)).reshape(3, -1)]
    x, a, b, grad = (np.float64(np.float32(values)) for values in given)
    outputs, errors = emulator.run(found, emulator.compile(found), x, [a, b, grad], None, blocks=2)
    assert not errors
    states, behind = x.reshape(3, *spec.in_factors), grad.reshape(3, *spec.out_factors)
    back = a.T @ behind
    right = [back @ b, (behind @ (states @ b.T).mT).sum(0), (back.mT @ states).sum(0)]
    made = [outputs[0], outputs[-1][: a.size], outputs[-1][a.size :]]
    for i, (part, expected) in enumerate(zip(made, right, strict=True)):
        scale = 1 / of_p.reshape(along) if i == 0 else np.outer(of_q, of_p) if i == mode + 1 else np.ones(())
        off = np.linalg.norm((part.reshape(expected.shape) - expected) / scale)
        assert off <= 4 * EPS["tf32"] * np.linalg.norm(expected / scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_few_samples_with_two_tiles_of_rows(dtype: str, emulator: Emulator) -> None:
    """Of a warp, as large weights have them: parts of the second one, and of what is contracted."""
    spec = monarch((4, 64), (40, 4), rank=4)
    chain = replace(Chain.of(spec, False, "identity"), tf32=dtype == "tf32")
    passes = one_by_one(chain, dtype, SMALL, Gpu.of(90))
    found = Plan(chain, dtype, SMALL, Gpu.of(90), tuple(replace(p, height=2, ways=4) for p in passes))
    draw = drawing(dtype)
    x, weights = draw(19, spec.in_features), [draw(*shape) / 8 for shape in spec.weight_shapes]
    outputs, errors = emulator.run(found, emulator.compile(found), x, weights, None, blocks=2)
    assert not errors
    right = np.asarray(naive(spec, torch.from_numpy(x), [*map(torch.from_numpy, weights)])).ravel()
    assert np.linalg.norm(outputs[-1] - right) <= 4 * EPS[dtype] * np.linalg.norm(right)


# Blocks with several tiles, one after the other: samples all at once, and in parts; rows in parts and in several
# rounds, groups side by side of which the last has none
@pytest.mark.parametrize(
    ("outputs", "rank", "dtype", "batch", "tiles"),
    [
        ((20, 12), 8, "bfloat16", 49, 2),
        ((20, 12), 8, "float16", 64, 4),
        ((20, 12), 8, "tf32", 41, 8),
        ((9, 13), 5, "float32", 37, 2),
        ((9, 13), 5, "float32", 50, 8),
        ((7, 11), 1, "float64", 59, 4),
        ((9, 13), 5, "float64", 27, 2),
        ((7, 11), 1, "bfloat16", 23, 8),
    ],
)
def test_tiles_of_a_block_of_few_samples(
    outputs: tuple[int, int], rank: int, dtype: str, batch: int, tiles: int, emulator: Emulator
) -> None:
    spec = monarch((12, 45), outputs, rank=rank)
    gpu = replace(Gpu.of(90), sms=1, shared=40000)
    chain = Chain.of(spec, False, "identity")
    both = []
    for i, product in enumerate(products(chain, dtype)):
        tilings = few._tilings(product, gpu, few.SAMPLES[-1:], i == 0, i == 1)
        of_tiles = [each for each in tilings if each.tiles == tiles and each.row_tiles > each.split]
        both.append(max(of_tiles, key=lambda each: (each.wg, each.height, each.rounds, each.ways)))
    found = Plan(chain, dtype, SMALL, gpu, tuple(both))
    draw = drawing(dtype)
    x, weights = draw(batch, spec.in_features), [draw(*shape) / 8 for shape in spec.weight_shapes]
    kernels, (made, errors) = emulator.compile(found), ([], [])
    for value in (None, np.nan):
        if value is not None:
            x = x.copy()
            x[1, 1] = value
        made, errors = emulator.run(found, kernels, x, weights, None, blocks=1)
        assert not errors
        right = np.asarray(naive(spec, torch.from_numpy(x), [*map(torch.from_numpy, weights)]))
        y = made[-1].reshape(right.shape)
        fine = np.isfinite(right).all(1)
        assert fine.sum() == batch - (value is not None) and not np.isfinite(y[~fine]).any()
        assert np.linalg.norm(y[fine] - right[fine]) <= 4 * EPS[dtype] * np.linalg.norm(right[fine])


# The same of gradients' passes, each with more tiles than blocks
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank", "dtype", "batch", "tiles"),
    [
        ((6, 47), (35, 7), 9, "bfloat16", 64, 8),
        ((6, 48), (32, 8), 8, "float16", 49, 4),
        ((6, 48), (32, 8), 8, "tf32", 33, 2),
        ((5, 30), (21, 6), 7, "float32", 41, 8),
        ((5, 30), (21, 6), 7, "float32", 21, 2),
        ((5, 30), (21, 6), 7, "float64", 57, 4),
        ((3, 37), (19, 5), 11, "float64", 9, 2),
    ],
)
def test_tiles_of_a_block_of_gradients_of_few_samples(
    inputs: tuple[int, int], outputs: tuple[int, int], rank: int, dtype: str, batch: int, tiles: int, emulator: Emulator
) -> None:
    spec = monarch(inputs, outputs, rank=rank)
    gpu, chain = replace(Gpu.of(90), sms=1, shared=40000), all_gradients_of(spec)
    chain = replace(chain, tf32=dtype == "tf32")
    passes = []
    for part in ("FewStates", "FewBack", "FewLast"):
        of_tiles = [each for each in few_backward._passes(part, chain, dtype, gpu) if each.tiles == tiles]
        more = [each for each in of_tiles if each.row_tiles > each.of_tiles] or of_tiles
        passes.append(max(more, key=lambda each: (each.height, each.strips, each.rounds > 1, -each.blocks, each.words)))
    check_all_gradients_of_groups(spec, Plan(chain, dtype, SMALL, gpu, tuple(passes)), batch, emulator)


# Groups that one warp each takes, side by side in whole sectors; more of them than there are
@pytest.mark.parametrize(
    ("outputs", "dtype", "wg"),
    [((10, 17), "bfloat16", 16), ((6, 9), "float16", 8), ((3, 9), "float64", 8), ((5, 8), "tf32", 4)],
)
def test_more_than_a_few_samples_of_groups_side_by_side(
    outputs: tuple[int, int], dtype: str, wg: int, emulator: Emulator
) -> None:
    spec = monarch((6, 20), outputs, rank=3)
    gpu = Gpu.of(90)
    found = plan(Chain.of(spec, False, "identity"), dtype, 1024, gpu)
    product = products(found.chain, dtype)[1]
    tilings = few._tilings(product, gpu, few.SAMPLES, False, True)
    last = next(each for each in tilings if (each.wg, each.ways, each.samples) == (wg, 1, 32))
    found = replace(found, passes=(few.tile(products(found.chain, dtype)[0], 1024, gpu, True, False), last))
    draw = drawing(dtype)
    x, weights = draw(75, spec.in_features), [draw(*shape) / 8 for shape in spec.weight_shapes]
    made, errors = emulator.run(found, emulator.compile(found), x, weights, None, blocks=3)
    assert not errors
    right = np.asarray(naive(spec, torch.from_numpy(x), [*map(torch.from_numpy, weights)])).ravel()
    assert np.linalg.norm(made[-1] - right) <= 4 * EPS[dtype] * np.linalg.norm(right)


def mixed_rows(chain: Chain) -> Array:
    """Of a weight, in the order in which what comes back has its q's."""
    (c,) = chain.contractions
    _, rows, columns = chain.mixed or (1, c.q, 1)
    return np.arange(c.q).reshape(rows, columns).T.ravel()


def by_slabs(rows: Array, outer: int, inner: int) -> Array:
    """[samples, groups, features] as [samples / 32, outer, features, inner, 32]."""
    return rows.reshape(len(rows) // 32, 32, outer, inner, -1).transpose(0, 2, 4, 3, 1)


# Both gradients of untied weights: one to four warpgroups that share q's, p's or groups; parts of tiles, slabs, chunks
UNTIED = [
    ("untied 0 4 40 56 1; backward", "bfloat16", 150, (2, 1, 1, 1, 64)),
    ("untied 0 4 136 192 1; backward; mixed 4 48 4", "float16", 150, (1, 3, 1, 1, 192)),
    ("turned; untied 0 1 96 128 4; backward; turn 2 48 4", "bfloat16", 200, (1, 2, 1, 1, 128)),
    ("turned; untied 0 2 96 200 2; backward; turn 4 48 2", "bfloat16", 300, (1, 2, 1, 2, 128)),
    ("untied 0 2 200 24 1; backward; mixed 2 8 3", "float16", 130, (1, 1, 2, 1, 64)),
    ("untied 0 6 64 64 1; backward", "bfloat16", 330, (3, 1, 1, 1, 64)),
    ("untied 0 2 72 136 1; backward", "bfloat16", 65, (1, 1, 1, 3, 96)),
    ("turned; untied 0 1 144 192 4; backward; turn 3 48 4", "bfloat16", 150, (1, 3, 1, 1, 96)),
    ("untied 0 1 200 152 1; backward", "float16", 700, (1, 3, 1, 1, 96, True)),
    ("turned; untied 0 1 192 96 2; backward; turn 4 48 2", "bfloat16", 800, (1, 2, 1, 1, 128, True)),
    ("untied 0 2 72 136 1; backward", "float16", 65, (1, 1, 1, 3, 64, True)),
    ("turned; untied 0 1 192 144 4; backward; turn 4 48 4", "bfloat16", 300, (1, 3, 1, 1, 96, False, True)),
    ("untied 0 2 192 192 1; backward; mixed 2 48 4", "float16", 1000, (1, 3, 1, 1, 96, True, True)),
    ("untied 0 1 72 136 1; backward", "bfloat16", 333, (1, 1, 2, 3, 64, False, True)),
    ("untied 0 2 192 136 1; backward; mixed 2 34 4", "bfloat16", 900, (1, 3, 1, 1, 96, False, True, True)),
    ("turned; untied 0 1 112 200 2; backward; turn 7 16 2", "float16", 700, (1, 1, 1, 4, 64, False, False, True)),
]


@pytest.mark.parametrize(("text", "dtype", "batch", "tiling"), UNTIED, ids=str)
def test_both_gradients_of_untied_weights(
    text: str, dtype: str, batch: int, tiling: Tiling, emulator: Emulator
) -> None:
    chain, gpu = Chain.parse(text), Gpu(90, 8, 232448)
    visit = UntiedBackward(chain, dtype, *tiling[:5], gpu, LARGE, *tiling[5:])
    assert visit.fits and visit in list(untied_backward.tilings(chain, dtype, LARGE, gpu))
    check_both_gradients(Plan(chain, dtype, LARGE, gpu, (visit, Reduction(visit))), batch, emulator)


def check_both_gradients(found: Plan, batch: int, emulator: Emulator) -> None:
    """And infinite where they have to be, which is for no other sample."""
    kernels, dtype, (c,) = emulator.compile(found), found.dtype, found.chain.contractions
    draw, groups = drawing(dtype), c.outer * c.inner
    x, grad, weight = draw(batch, groups * c.p), draw(batch, groups * c.q), draw(groups, c.q, c.p) / 8
    for seed, value in enumerate((None, np.inf)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[batch // 2, 1], grad[batch - 1, 2] = value, -value
        given = by_slabs(grad, c.outer, c.inner) if found.chain.slabs else grad
        outputs, errors = emulator.run(found, kernels, x, [weight, given], None, blocks=found.gpu.sms, seed=seed)
        assert not errors
        order = mixed_rows(found.chain)
        with np.errstate(invalid="ignore"):
            before, behind = x.reshape(batch, groups, c.p), grad.reshape(batch, groups, c.q)
            back = np.einsum("ngq,gqp->ngp", behind, weight[:, order])
            if found.chain.turn:
                natural = back.reshape(batch, c.outer, c.inner, c.p).swapaxes(2, 3)
                back = natural.reshape(batch, *found.chain.turn).swapaxes(2, 3)
            if found.chain.slabs > 1:
                back = by_slabs(back, c.outer, c.inner)
            summed = np.empty_like(weight)
            summed[:, order] = np.einsum("ngq,ngp->gqp", behind, before)
        for part, expected in ((outputs[0], back), (outputs[-1], summed)):
            part, expected = part.ravel(), expected.ravel()
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(part[~finite], expected[~finite])
            error = np.linalg.norm(part[finite] - expected[finite])
            assert error <= 2 * EPS[dtype] * np.linalg.norm(expected[finite])


# In tf32, of grad_y by slabs: parts of tiles; x's gradient by rows, in another contraction's order, by slabs
BY_SLABS = [
    ("untied 0 2 36 64 1; backward; slabs 1", 704, 4),
    ("untied 0 2 132 40 1; backward; slabs 2", 320, 8),
    ("turned; untied 0 1 96 128 4; backward; turn 2 48 4; slabs 1", 320, 8),
    ("turned; untied 0 2 64 72 2; backward; slabs 2", 384, 8),
    ("turned; untied 0 1 64 256 2; backward; slabs 2", 256, 2),
    ("untied 0 2 256 64 1; backward; slabs 1", 832, 8),
    ("untied 0 2 256 96 1; backward; slabs 1", 576, 12),
]


@pytest.mark.parametrize(("text", "batch", "processors"), BY_SLABS, ids=str)
def test_both_gradients_of_a_grad_y_that_lies_by_slabs(
    text: str, batch: int, processors: int, emulator: Emulator
) -> None:
    chain, gpu = Chain.parse(text), Gpu(90, processors, 232448)
    assert chain.text == text
    visit = slab_backward.tile(chain, "tf32", batch, gpu)
    assert visit is not None
    found = Plan(chain, "tf32", batch, gpu, (visit, Reduction(visit)))
    check_both_gradients(found, batch, emulator)


# Of two untied weights and x: parts of tiles, chunks and pieces, one to four times 16 samples, one group and many
FEW = [
    ((4, 32), (4, 20), 2, "bfloat16", 5, 90),
    ((16, 64), (8, 40), 4, "float16", 19, 90),
    ((8, 40), (5, 7), 1, "bfloat16", 64, 80),
    ((1, 24), (9, 1), 8, "float16", 1, 90),
    ((4, 24), (6, 20), 4, "tf32", 16, 90),
    ((2, 132), (4, 70), 2, "tf32", 40, 80),
    ((4, 24), (3, 21), 2, "float32", 33, 90),
    ((12, 60), (11, 4), 1, "float32", 7, 90),
    # Rows that 16 bytes do not divide, and doubles
    ((3, 47), (7, 5), 3, "bfloat16", 3, 90),
    ((5, 10), (5, 6), 3, "float16", 21, 80),
    ((4, 13), (5, 3), 2, "tf32", 18, 90),
    ((3, 31), (9, 5), 3, "float32", 5, 80),
    ((4, 15), (6, 3), 3, "float64", 19, 90),
    ((2, 12), (7, 4), 2, "float64", 33, 80),
    # Weights of several rounds
    ((9, 40), (40, 40), 40, "float32", 18, 90),
]


@pytest.mark.parametrize(("inputs", "outputs", "rank", "dtype", "batch", "architecture"), FEW, ids=str)
def test_all_gradients_of_few_samples(
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rank: int,
    dtype: str,
    batch: int,
    architecture: int,
    emulator: Emulator,
) -> None:
    spec = monarch(inputs, outputs, rank=rank)
    found = plan(all_gradients_of(spec), dtype, SMALL, replace(Gpu.of(architecture), sms=2))
    assert [type(p).__name__ for p in found.passes] == ["FewPass"] * 3
    check_all_gradients_of_groups(spec, found, batch, emulator)


# Of more samples than a few: blocks along x take turns at them, and warps share what a gradient is summed over
HUNDREDS = [
    ((6, 47), (35, 7), 9, "bfloat16", 77, 1, 90),
    ((6, 48), (32, 8), 8, "tf32", 131, 4, 90),
    ((5, 30), (21, 6), 7, "float64", 70, 8, 80),
    ((5, 30), (21, 6), 7, "float32", 99, 2, 80),
    ((3, 72), (24, 4), 3, "float16", 65, 2, 90),
]


@pytest.mark.parametrize(("inputs", "outputs", "rank", "dtype", "batch", "share", "architecture"), HUNDREDS, ids=str)
def test_all_gradients_of_some_hundreds_of_samples(
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rank: int,
    dtype: str,
    batch: int,
    share: int,
    architecture: int,
    emulator: Emulator,
) -> None:
    spec, gpu = monarch(inputs, outputs, rank=rank), replace(Gpu.of(architecture), sms=4)
    chain = replace(all_gradients_of(spec), few=True, tf32=dtype == "tf32")
    found = plan(chain, dtype, MEDIUM, gpu)
    ways = few_backward._passes("FewLast", chain, dtype, gpu, some=True)
    last = next(each for each in ways if each.share == share and each.ways >= 2 * share)
    assert [type(p).__name__ for p in found.passes] == ["FewPass"] * 3 and all(p.some for p in found.passes)  # type: ignore[attr-defined]
    check_all_gradients_of_groups(spec, replace(found, passes=(*found.passes[:2], last)), batch, emulator)


# By a dense weight's: dense passes of every kind, sums of one block and of several for a tile, parts of every height
MULTIPLIED_OUT = [
    ((5, 9), (9, 60), 5, "bfloat16", 150, 90),
    ((20, 8), (8, 20), 7, "bfloat16", 70, 90),
    ((3, 7), (86, 3), 3, "tf32", 70, 90),
    ((12, 24), (40, 3), 20, "tf32", 70, 90),
    ((2, 57), (57, 2), 40, "float32", 300, 90),
    ((9, 32), (28, 11), 20, "float32", 70, 90),
    ((4, 15), (13, 6), 5, "float64", 70, 90),
    ((30, 2), (3, 31), 1, "float64", 150, 80),
    ((5, 9), (9, 60), 5, "float16", 150, 90),
    ((20, 8), (8, 20), 7, "float16", 70, 90),
    ((24, 2), (2, 51), 2, "float16", 70, 90),  # what is held of the second weight is 6 rounds of 256 threads
]


@pytest.mark.parametrize(("inputs", "outputs", "rank", "dtype", "batch", "architecture"), MULTIPLIED_OUT, ids=str)
def test_all_gradients_by_a_dense_weights(
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rank: int,
    dtype: str,
    batch: int,
    architecture: int,
    emulator: Emulator,
) -> None:
    spec = monarch(inputs, outputs, rank=rank)
    chain = replace(all_gradients_of(spec), tf32=dtype == "tf32")
    found = plan(chain, dtype, LARGE, replace(Gpu.of(architecture), sms=2))
    first = "MonarchLargest" if dtype == "float16" else "MonarchWeight"
    assert type(found.passes[0]).__name__ == first and type(found.passes[-1]).__name__ == "MonarchGradients"
    check_all_gradients_of_groups(spec, found, batch, emulator)


def check_all_gradients_of_groups(spec: LayerSpec, found: Plan, batch: int, emulator: Emulator) -> None:
    """And not finite where they may not be, which is for no other sample."""
    dtype = found.dtype
    kernels, draw = emulator.compile(found), drawing(dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / 4 for shape in spec.weight_shapes]
    sick = batch // 2
    fine = np.arange(batch) != sick
    healthy: Array | None = None
    for seed, value in enumerate((None, np.inf, np.nan)):
        if value is not None:
            x, grad = x.copy(), grad.copy()
            x[sick, 1], grad[sick, 2] = value, -value
        made, errors = emulator.run(found, kernels, x, [*weights, grad], None, blocks=2, seed=seed)
        assert not errors
        leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
        right = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
        of_x, of_weights = (made[0] if found.passes[-1].writes == "w" else made[-2]), made[-1]
        grad_x = of_x.reshape(batch, -1)
        parts = [of_x, *np.split(of_weights, [weights[0].size])]
        for part, expected in zip(parts, (t.numpy().ravel() for t in right), strict=True):
            finite = np.isfinite(expected)
            assert not np.isfinite(part[~finite]).any()
            error = np.linalg.norm(part[finite] - expected[finite])
            assert error <= 4 * EPS[dtype] * np.linalg.norm(expected[finite])
        healthy = grad_x if healthy is None else healthy
        np.testing.assert_array_equal(grad_x[fine], healthy[fine])


# Of two factors where samples are few: rectangular ones, chunks that all have slots and that take turns
STRIPS = [
    (((32, 32), (32, 32)), "float64", {}),
    (((128, 128), (128, 128)), "float64", {}),
    (((48, 64), (32, 80)), "float32", {"span": 16}),
    (((64, 32), (64, 48)), "float32", {"span": 32}),
    (((32, 64), (96, 48)), "tf32", {"slots": 2, "width": 16}),
    (((128, 128), (128, 128)), "tf32", {}),
    (((128, 64), (64, 128)), "bfloat16", {"span": 64}),
    (((80, 64), (48, 32)), "float16", {"span": 16, "width": 16}),
]


@pytest.mark.parametrize(("sizes", "dtype", "chosen"), STRIPS, ids=str)
def test_all_gradients_of_few_samples_at_once(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, chosen: dict[str, int], emulator: Emulator
) -> None:
    spec = kronecker(*sizes)
    chain, gpu = all_gradients_of(spec), Gpu.of(90)
    modes = tuple(Mode(((i, q, p),)) for i, (p, q) in enumerate(zip(*sizes, strict=True)))
    tilings = pair_few_backward.tilings((modes[0], modes[1]), 1, dtype, SMALL, gpu)
    tiled = next(t for t in tilings if all(getattr(t, name) == value for name, value in chosen.items()))
    check_all_gradients_of(spec, Plan(chain, dtype, SMALL, gpu, (tiled, Reduction(tiled))), 3, emulator)


# By the blocks of a cluster: groups of one warp and of several, units for some of them and several for each, strips
# of all widths, more warps than tiles
CLUSTERS = [
    (((32, 32), (32, 32)), "float64", 19, {"groups": 2, "warps": 2, "cluster": 8}),
    (((32, 32), (32, 32)), "bfloat16", 5, {"groups": 2, "warps": 2, "cluster": 8}),
    (((48, 32), (32, 64)), "float32", 9, {"groups": 1, "warps": 4, "cluster": 8}),
    (((32, 64), (48, 80)), "tf32", 40, {"groups": 4, "warps": 1, "cluster": 4}),
    (((64, 64), (64, 64)), "float16", 9, {"groups": 1, "warps": 8, "cluster": 4, "span": 32}),
    (((64, 48), (80, 64)), "tf32", 3, {"groups": 1, "warps": 8, "cluster": 2, "span": 64}),
]


def clusters_of(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, chosen: dict[str, int], bias: bool = False
) -> Plan:
    gpu = Gpu.of(90)
    modes = tuple(Mode(((i, q, p),)) for i, (p, q) in enumerate(zip(*sizes, strict=True)))
    tilings = pair_cluster_backward.tilings((modes[0], modes[1]), 1, dtype, SMALL, gpu)
    tilings = (replace(tiled, cluster=chosen["cluster"]) for tiled in tilings)
    tiled = next(t for t in tilings if all(getattr(t, name) == value for name, value in chosen.items()))
    chain = replace(all_gradients_of(kronecker(*sizes)), bias=bias)
    return Plan(chain, dtype, SMALL, gpu, (replace(tiled, bias=bias),))


@pytest.mark.parametrize(("sizes", "dtype", "batch", "chosen"), CLUSTERS, ids=str)
def test_all_gradients_by_blocks_of_a_cluster(
    sizes: tuple[tuple[int, int], tuple[int, int]],
    dtype: str,
    batch: int,
    chosen: dict[str, int],
    emulator: Emulator,
) -> None:
    check_all_gradients_of(kronecker(*sizes), clusters_of(sizes, dtype, chosen), batch, emulator)


@pytest.mark.parametrize(("sizes", "dtype", "batch", "chosen"), [*CLUSTERS[1:3], CLUSTERS[5]], ids=str)
def test_a_biass_gradient_by_a_cluster_of_its_own(
    sizes: tuple[tuple[int, int], tuple[int, int]],
    dtype: str,
    batch: int,
    chosen: dict[str, int],
    emulator: Emulator,
) -> None:
    check_all_gradients_of(kronecker(*sizes), clusters_of(sizes, dtype, chosen, bias=True), batch, emulator)


def check_gradients_of_any(spec: LayerSpec, found: Plan, batch: int, emulator: Emulator) -> None:
    """And not finite where they may not be, which is for no other sample."""
    kernels, draw = emulator.compile(found), drawing(found.dtype)
    x, grad = draw(batch, spec.in_features), draw(batch, spec.out_features)
    weights = [draw(*shape) / 3 for shape in spec.weight_shapes]
    sick = batch // 2
    healthy: Array | None = None
    for seed, value in enumerate((None, np.inf)):
        if value is not None:
            grad = grad.copy()
            grad[sick, 1] = value
        outputs, errors = emulator.run(found, kernels, x, [*weights, grad], None, blocks=2, seed=seed)
        assert not errors
        leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
        right = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
        parts = [outputs[0], *np.split(outputs[-1], np.cumsum([w.size for w in weights])[:-1])]
        grad_x = outputs[0].reshape(batch, -1)
        for part, expected in zip(parts, (t.numpy().ravel() for t in right), strict=True):
            finite = np.isfinite(expected)
            assert not np.isfinite(part[~finite]).any()
            error = np.linalg.norm(part[finite] - expected[finite])
            assert error <= 8 * EPS[found.dtype] * np.linalg.norm(expected[finite])
        healthy = grad_x if healthy is None else healthy
        fine = np.arange(batch) != (-1 if value is None else sick)
        np.testing.assert_array_equal(grad_x[fine], healthy[fine])


# In double, by columns: three and four modes, odd samples and even ones, runs apart in their slots, one warp of a group
# and several, one slot and two, sizes up to 16
BY_COLUMNS = [
    (((8, 8, 8), (9, 9, 9)), 9, 1, 1),
    (((9, 9, 9), (8, 8, 8)), 6, 1, 2),
    (((5, 7, 3), (6, 4, 9)), 7, 2, 1),
    (((16, 5, 12), (12, 7, 16)), 3, 4, 1),
    (((3, 4, 5, 6), (4, 3, 6, 5)), 5, 2, 2),
]


@pytest.mark.parametrize(("sizes", "batch", "warps", "slots"), BY_COLUMNS, ids=str)
def test_gradients_of_small_factors_of_doubles_by_columns(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], batch: int, warps: int, slots: int, emulator: Emulator
) -> None:
    """In every order of their modes."""
    spec, gpu = kronecker(*sizes), replace(Gpu.of(90), sms=2)
    modes = modes_of(all_gradients_of(spec))
    for back in small_double_backward.tilings(modes, 1, gpu):
        if (back.warps, back.slots) == (warps, slots):
            some = replace(back, groups=min(back.groups, 3))
            found = Plan(all_gradients_of(spec), "float64", LARGE, gpu, (some, Reduction(some)))
            check_gradients_of_any(spec, found, batch, emulator)


# Of one weight and x at once, p to q between outer and inner: by columns and by rows, several units of a row, padding
# in every size, parts of columns, weights held in registers and not
SINGLE = [
    ((1, 64, 64, 128), "bfloat16", 3, 90),
    ((2, 20, 36, 48), "float16", 5, 80),
    ((1, 128, 120, 32), "bfloat16", 5, 90),
    ((3, 8, 9, 64), "tf32", 7, 90),
    ((1, 31, 17, 64), "tf32", 5, 86),
    ((1, 100, 128, 64), "float32", 3, 90),
    ((2, 33, 20, 32), "float64", 4, 90),
    ((64, 24, 40, 1), "bfloat16", 5, 90),
    ((32, 128, 112, 1), "float16", 7, 90),
    ((64, 128, 128, 1), "tf32", 3, 90),
    ((16, 21, 43, 1), "tf32", 9, 80),
    ((32, 67, 34, 1), "float32", 5, 90),
    ((32, 20, 31, 1), "float64", 5, 90),
    ((1, 128, 128, 128), "float32", 3, 90),
    ((2, 100, 81, 64), "tf32", 3, 90),
    ((1, 64, 64, 256), "float32", 2, 90),
    ((2, 31, 50, 64), "tf32", 4, 90),
    ((128, 128, 128, 1), "float32", 3, 90),
    ((64, 84, 108, 1), "tf32", 5, 90),
    ((192, 64, 44, 1), "float32", 3, 90),
]


@pytest.mark.parametrize(("sizes", "dtype", "batch", "architecture"), SINGLE, ids=str)
def test_both_gradients_of_one_factor_at_once(
    sizes: tuple[int, int, int, int], dtype: str, batch: int, architecture: int, emulator: Emulator
) -> None:
    outer, p, q, inner = sizes
    chain = Chain((Contraction(0, outer, p, q, inner, tied=True),), backward=True)
    found = plan(chain, dtype, LARGE, replace(Gpu.of(architecture), sms=2))
    is_split = dtype in ("float32", "tf32") and architecture == 90 and min(p, q) >= 24 and max(outer, inner) >= 64
    assert type(found.passes[0]).__name__ == ("SingleSplitBackward" if is_split else "SingleBackward")
    kernels = emulator.compile(found)
    draw = drawing(dtype)
    x, grad, weight = draw(batch, outer * p * inner), draw(batch, outer * q * inner), draw(q, p) / 8
    sick = batch // 2
    healthy: Array | None = None
    for seed, value in enumerate((None, np.inf)):
        if value is not None:
            grad = grad.copy()
            grad[sick, 1] = value
        outputs, errors = emulator.run(found, kernels, x, [weight, grad], None, blocks=2, seed=seed)
        assert not errors
        grad_x = outputs[0].reshape(batch, -1)
        with np.errstate(invalid="ignore"):
            states, behind = x.reshape(batch, outer, p, inner), grad.reshape(batch, outer, q, inner)
            right = [np.einsum("qp,noqi->nopi", weight, behind), np.einsum("noqi,nopi->qp", behind, states)]
        for part, expected in zip((grad_x, outputs[-1]), right, strict=True):
            part, expected = part.ravel(), expected.ravel()
            finite = np.isfinite(expected)
            assert not np.isfinite(part[~finite]).any()
            error = np.linalg.norm(part[finite] - expected[finite])
            assert error <= 4 * EPS[dtype] * np.linalg.norm(expected[finite])
        healthy = grad_x if healthy is None else healthy
        fine = np.arange(batch) != sick
        np.testing.assert_array_equal(grad_x[fine], healthy[fine])


@pytest.mark.parametrize(
    ("spec", "dtype", "activation"),
    [
        (kronecker((2, 12, 16), (3, 16, 8)), "bfloat16", "identity"),
        (kronecker((5, 6), (4, 7)), "float32", "gelu"),
        (kronecker((4, 3), (3, 5), rank=2), "float64", "sine"),
        (monarch((4, 6), (5, 3)), "tf32", "identity"),
        (monarch((3, 16), (8, 4), rank=8), "float16", "identity"),
        (monarch((3, 16), (8, 4), rank=8), "tf32", "identity"),
        (monarch((2, 3, 4), (3, 2, 5)), "float32", "identity"),
        (kronecker((136,), (72,)), "float16", "tanh"),
    ],
    ids=lambda given: spec_id(given) if isinstance(given, LayerSpec) else str(given),
)
def test_a_backward_pass_is_made_of_such_kernels(
    spec: LayerSpec, dtype: str, activation: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """backward.gradients by kernels of real plans, its states and gradients in the dtype's own memory."""
    monkeypatch.setattr(backward, "LEAST_MIXED", 1)
    gpu = Gpu(90, 2, 232448)
    memory = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    ran = []

    def run(text: str, x: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> list[Tensor]:
        ran.append(text)
        found = plan(Chain.parse(text), dtype, MEDIUM if "untied" in text and "backward" in text else SMALL, gpu)
        arrays = [t.double().numpy() for t in (x, *weights)]
        given = None if bias is None else bias.double().numpy()
        outputs, errors = emulator.run(found, emulator.compile(found), arrays[0], arrays[1:], given, blocks=2)
        assert not errors
        return [torch.from_numpy(y).to(memory) for y in outputs]

    def forward(x: Tensor, weights: list[Tensor], bias: Tensor | None, text: str) -> Tensor:
        return run(text, x, weights, bias)[-1].view(len(x), -1)

    def slopes(grad: Tensor, x: Tensor, weights: list[Tensor], bias: Tensor | None, text: str) -> Tensor:
        return run(text, x, [*weights, grad], bias)[-1].view_as(grad)

    def slopes_and_sums(
        grad: Tensor, x: Tensor, weights: list[Tensor], bias: Tensor | None, text: str
    ) -> tuple[Tensor, Tensor]:
        made, *_, sums = run(text, x, [*weights, grad] if "slope" in text else [], bias)
        return made.view_as(grad), sums

    def weight_gradient(grad: Tensor, x: Tensor, text: str) -> Tensor:
        return run(text, x, [] if grad is x else [grad])[-1]

    def all_gradients(grad: Tensor, x: Tensor, weights: list[Tensor], text: str, wanted: int) -> list[Tensor]:
        grad_x, *_, summed = run(text, x, [*weights, grad])
        parts = summed.split([w.numel() for w in weights])
        return [
            *([grad_x.view_as(x)] if wanted & 1 else []),
            *([run(sums_text(grad.shape[1]), grad, [])[-1]] if wanted & 2 else []),
            *(part.view_as(w) for part, w in zip(parts, weights, strict=True)),
        ]

    def fits(chain: Chain) -> bool:
        """But for visits, whose buffers tests/test_chain_backward.py knows."""
        try:
            return not any(isinstance(p, ChainBackward) for p in plan(chain, dtype, MEDIUM, gpu).passes)
        except PlanError:
            return False

    torch.manual_seed(0)
    shapes = [(5, spec.in_features), (5, spec.out_features), (spec.out_features,), *spec.weight_shapes]
    x, grad_y, bias, *weights = (torch.randn(shape).to(memory) for shape in shapes)
    weights = [(w * w.shape[-1] ** -0.5).to(memory) for w in weights]
    text = Chain.of(spec, True, activation).text
    wanted = (1 << (len(weights) + 2)) - 1
    ops = Ops(forward, weight_gradient, all_gradients, slopes, slopes_and_sums, fits)
    two_blocks = spec.structure == "monarch" and len(spec.in_factors) == 2
    assert any(visit.at_once for visit in visits(text, wanted, fits)) == (dtype == "bfloat16" or two_blocks)
    found = gradients(ops, grad_y, x, weights, bias, text, wanted)
    assert list(dict.fromkeys(ran)) == list(dict.fromkeys(asked for asked, _ in texts(text, fits, len(x))))
    assert sum("slope" in each for each in ran) == (activation != "identity")
    exact = [t.double().requires_grad_() for t in (x, bias, *weights)]
    y = activate(activation, naive(spec, exact[0], exact[2:]) + exact[1])
    for a, b in zip(found, torch.autograd.grad(y, exact, grad_y.double()), strict=True):
        assert a.shape == b.shape and float((a - b).norm() / b.norm()) <= 6 * EPS[dtype]


# Slopes with their product: widths of slabs and tiles, and others, accesses of 4 to 16 bytes, several tiles of a block
SLOPES = [
    (1, 256, 256, "bfloat16", "relu", 131, LARGE),
    (1, 64, 136, "float16", "gelu", 200, LARGE),
    (3, 40, 12, "bfloat16", "sine", 65, MEDIUM),
    (1, 136, 78, "float16", "tanh", 1, SMALL),
    (1, 64, 192, "tf32", "gelu", 131, LARGE),
    (2, 36, 25, "tf32", "relu", 67, MEDIUM),
    (1, 100, 98, "float32", "tanh", 70, MEDIUM),
    (1, 72, 68, "float32", "relu", 3, SMALL),
    (1, 64, 64, "bfloat16", trace(torch.nn.Mish())[0].program, 70, MEDIUM),
    (3, 40, 13, "bfloat16", "relu", 65, LARGE),
    (1, 139, 71, "bfloat16", "gelu", 70, LARGE),
    (2, 94, 76, "float16", "sine", 67, LARGE),
]


@pytest.mark.parametrize(("outer", "p", "q", "dtype", "activation", "batch", "planned"), SLOPES, ids=str)
def test_slopes_with_their_product(
    outer: int, p: int, q: int, dtype: str, activation: str, batch: int, planned: int, emulator: Emulator
) -> None:
    """And zero where relu is, even of an infinite gradient."""
    chain = Chain((Contraction(0, outer, p, q, 1, tied=True),), 1, True, activation, slope=outer * q)
    passes = with_halves(fastest(OF_PRODUCT_AND_SLOPES, *products(chain, dtype), planned, Gpu.of(90)))
    found = Plan(chain, dtype, planned, Gpu.of(90), passes)
    split = ["WeightHalves"] if passes[-1].reads_prepared else []
    assert [type(each).__name__ for each in found.passes] == [*split, "Wide"]
    kernels, draw = emulator.compile(found), drawing(dtype)
    x, weight, bias, grad = draw(batch, outer * p), draw(q, p) / 8, draw(outer * q), draw(batch, outer * q)
    z = torch.from_numpy(np.einsum("qp,nop->noq", weight, x.reshape(batch, outer, p)).reshape(batch, -1) + bias)
    sick = batch // 2
    healthy: Array | None = None
    for seed, value in enumerate((None, np.inf)):
        if value is not None:
            grad[sick] = value
        (made,), errors = emulator.run(found, kernels, x, [weight, grad], bias, blocks=2, seed=seed)
        assert not errors
        right = torch.func.vjp(lambda z: activate(activation, z), z)[1](torch.from_numpy(grad))[0].numpy()
        made = made.reshape(batch, -1)
        healthy = made if healthy is None else healthy
        fine = np.arange(batch) != (-1 if value is None else sick)
        clear = np.abs(z.numpy()) > 0.1  # of a kink
        np.testing.assert_array_equal(made[fine], healthy[fine])
        assert np.linalg.norm((made[fine] - right[fine])[clear[fine]]) <= 3 * EPS[dtype] * np.linalg.norm(right[fine])
        if activation == "relu":
            np.testing.assert_array_equal((made == 0)[clear], (right == 0)[clear])


def check_slopes(found: Plan, spec: LayerSpec, activation: str, batch: int, emulator: Emulator) -> None:
    """Of any plan whose last pass goes back through the activation: right, and in any order of blocks the same. An
    infinite gradient stays with its sample."""
    kernels, draw, dtype = emulator.compile(found), drawing(found.dtype), found.dtype
    x, bias, grad = draw(batch, spec.in_features), draw(spec.out_features), draw(batch, spec.out_features)
    weights = [decode(encode(draw(*shape) * shape[-1] ** -0.5, dtype), dtype).reshape(shape)
               for shape in spec.weight_shapes]  # fmt: skip
    z = naive(spec, *(torch.from_numpy(each) for each in (x,)), [torch.from_numpy(w) for w in weights])
    right = torch.func.vjp(lambda z: activate(activation, z), z + torch.from_numpy(bias))[1](torch.from_numpy(grad))[0]
    sick, healthy = batch // 2, np.zeros(0)
    for seed in (1, 2):
        made, errors = emulator.run(found, kernels, x, [*weights, grad], bias, blocks=2, seed=seed)
        assert not errors, found
        if seed == 1:
            healthy = made[-1].reshape(batch, -1)
            distance = np.linalg.norm(healthy - right.numpy())
            assert distance <= 2 * EPS[dtype] * (1 + len(spec.contractions)) * np.linalg.norm(right), found
            grad[sick] = np.inf
        fine = np.arange(batch) != sick if seed > 1 else np.full(batch, True)
        np.testing.assert_array_equal(made[-1].reshape(batch, -1)[fine], healthy[fine])


# Of several contractions, by a resident pass: terms that it sums, of one x or with a state each, chunks, parts of a q,
# modes by threads, two at one visit
@pytest.mark.parametrize(
    ("spec", "dtype", "activation", "batch", "planned"),
    [
        (kronecker((24, 32), (48, 64)), "bfloat16", "gelu", 9, LARGE),
        (kronecker((9, 4, 12), (9, 5, 12)), "float64", "silu", 9, LARGE),
        (kronecker((20, 24), (20, 24)), "float32", trace(torch.nn.Mish())[0].program, 40, LARGE),
        (kronecker((20, 16), (21, 16), rank=2), "float16", "gelu", 40, LARGE),
        (kronecker((4, 9), (6, 5), rank=2), "float32", "sine", 21, MEDIUM),
        (kronecker((31, 17), (31, 17)), "bfloat16", "gelu", 5, SMALL),
        (kronecker((7, 9, 3), (5, 11, 5)), "float16", "silu", 33, LARGE),
        (kronecker((5, 8), (8, 7)), "tf32", "gelu", 40, SMALL),
        (kronecker((16, 32), (16, 32)), "tf32", "gelu", 40, MEDIUM),
        (kronecker((2, 120), (2, 120)), "float32", "silu", 3, LARGE),
        (kronecker((2, 63, 5), (2, 63, 5), rank=2), "float64", "gelu", 3, LARGE),
        (kronecker((18, 3, 48), (18, 3, 48), rank=2), "bfloat16", "gelu", 9, LARGE),
        (kronecker((40, 137), (40, 137)), "bfloat16", "silu", 3, LARGE),
        (kronecker((64, 64), (64, 64)), "tf32", "gelu", 1, SMALL),
    ],
    ids=str,
)
def test_slopes_behind_several_contractions(
    spec: LayerSpec, dtype: str, activation: str, batch: int, planned: int, emulator: Emulator
) -> None:
    """Ways to finish that the last pass has, as many as show every two properties that one of them has."""
    gpu = Gpu.of(90)
    chain = replace(Chain.of(spec, True, activation), slope=spec.out_features)
    check_slopes(plan(chain, dtype, planned, gpu), spec, activation, batch, emulator)
    kinds: dict[tuple[object, ...], Plan] = {}
    for works in cuts(chain, dtype):
        *before, last = works
        passes = [tiling.tile(work, planned, gpu) for work in before]
        for _, fields, _ in sorted(tiling.candidates(last, planned, gpu), key=lambda found: found[0], reverse=True):
            way, end = Resident(*fields), fields[1][-1]
            kind = len(works), way.slots, way.alone, way.in_place, way.is_ragged, way.parts > 1
            kind = *kind, isinstance(end, Stage), isinstance(end, Stage) and end.mt > 0
            whole = [each for each in (*passes, way) if each]
            if len(whole) == len(works):
                kinds[kind] = Plan(chain, dtype, planned, gpu, tuple(whole))
    for found in in_pairs(kinds):
        check_slopes(found, spec, activation, batch, emulator)


@pytest.mark.parametrize(
    ("spec", "dtype", "batch", "planned"),
    [
        (monarch((4, 72), (72, 4), rank=16), "tf32", 70, LARGE),
        (monarch((2, 40), (40, 2), rank=8), "tf32", 70, LARGE),
        (monarch((8, 64), (64, 8), rank=8), "tf32", 40, LARGE),
        (monarch((4, 96), (104, 4), rank=10), "tf32", 40, MEDIUM),
    ],
    ids=str,
)
def test_slopes_behind_products_of_groups(
    spec: LayerSpec, dtype: str, batch: int, planned: int, emulator: Emulator
) -> None:
    found = plan(replace(Chain.of(spec, True, "gelu"), slope=spec.out_features), dtype, planned, Gpu.of(90))
    assert type(found.passes[-1]).__name__ == "Wide"
    check_slopes(found, spec, "gelu", batch, emulator)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (kronecker((5, 64), (5, 96), rank=2), "float32"),
        (kronecker((6, 72), (6, 136), rank=3), "bfloat16"),
        (kronecker((4, 200), (4, 200), rank=2), "tf32"),
    ],
    ids=str,
)
def test_slopes_behind_a_sum_of_products(spec: LayerSpec, dtype: str, emulator: Emulator) -> None:
    """Whose terms a pass of the last factor adds up."""
    chain, gpu = replace(Chain.of(spec, True, "gelu"), slope=spec.out_features), Gpu.of(90)
    made = [single(work, LARGE, gpu) for work in works_of(chain, dtype, modes_of(chain), [[0], [1]])]
    assert type(made[-1]).__name__ == "Wide"
    found = Plan(chain, dtype, LARGE, gpu, with_halves(tuple(filter(None, made))))
    check_slopes(found, spec, "gelu", 17, emulator)


@pytest.mark.parametrize(
    ("features", "dtype", "activation", "batch"),
    [
        (64, "bfloat16", "gelu", 300),
        (7, "float16", "relu", 5),
        (513, "float32", "sine", 19),
        (33, "float64", "tanh", 40),
    ],
)
def test_slopes_of_what_is_given(features: int, dtype: str, activation: str, batch: int, emulator: Emulator) -> None:
    found = plan(Chain((), activation=activation, slope=features), dtype, SMALL, Gpu.of(80))
    draw = drawing(dtype)
    z, grad = draw(batch, features), draw(batch, features)
    (made,), errors = emulator.run(found, emulator.compile(found), z, [grad], None)
    assert not errors
    right = torch.func.vjp(lambda z: activate(activation, z), torch.from_numpy(z))[1](torch.from_numpy(grad))[0]
    np.testing.assert_allclose(made.reshape(batch, -1), right, rtol=4 * EPS[dtype], atol=EPS[dtype])


# Sums over samples: rows that 16 bytes divide and others, ways and tiles of a block, a rest that makes no whole row
@pytest.mark.parametrize(
    ("features", "dtype", "batch", "planned"),
    [
        (64, "bfloat16", 50, SMALL),
        (64, "bfloat16", 5000, LARGE),
        (8, "float16", 3000, LARGE),
        (4104, "float32", 70, MEDIUM),
        (13, "bfloat16", 3001, LARGE),
        (12, "float16", 7, SMALL),
        (2003, "bfloat16", 41, MEDIUM),
        (63, "float32", 1026, MEDIUM),
        (33, "float64", 601, MEDIUM),
        (6, "float64", 3, SMALL),
        (4224, "bfloat16", 64, SMALL),
        (4096, "bfloat16", 333, LARGE),
        (5120, "float32", 37, LARGE),
        (8200, "bfloat16", 19, MEDIUM),
        (17000, "float16", 21, SMALL),
    ],
)
def test_sums(features: int, dtype: str, batch: int, planned: int, emulator: Emulator) -> None:
    found = plan(Chain((), sums=features), dtype, planned, Gpu(90, 2, 232448))
    assert len(found.passes) == 1 or planned != SMALL or features % (16 // ELEMENT_BYTES[dtype])
    x = drawing(dtype)(batch, features)
    (*_, made), errors = emulator.run(found, emulator.compile(found), x, [], None, blocks=2)
    assert not errors
    right = x.sum(0, dtype=np.float64)
    rounded = batch**0.5 if dtype == "float64" else 4  # numpy's sums of doubles, too; a thread adds 128 of 1026
    assert np.linalg.norm(made - right) <= rounded * EPS[dtype] * np.linalg.norm(right)
    x[batch // 2, features // 2] = np.nan
    (*_, sick), errors = emulator.run(found, emulator.compile(found), x, [], None, blocks=2)
    assert not errors and np.isnan(sick).sum() == 1 and np.isnan(sick[features // 2])


# The same beside slopes, and turned: samples that make a row together, runs of 2 to 16 bytes, one tile of a matrix and
# several, of which the last has fewer rows; ways and rests of a chunk
COLUMNS = [
    (64, "bfloat16", "gelu", None, True, 300),
    (13, "float16", "tanh", None, True, 301),
    (33, "float64", "sine", None, True, 61),
    (2100, "float32", "gelu", None, True, 17),
    (3072, "bfloat16", "gelu", (1, 768, 4), True, 50),
    (48, "bfloat16", "relu", (1, 12, 4), True, 170),
    (1800, "bfloat16", "identity", (1, 600, 3), True, 33),
    (320, "float16", "identity", (2, 20, 8), True, 33),
    (105, "bfloat16", "relu", (1, 35, 3), True, 33),
    (105, "float32", "relu", (1, 35, 3), False, 33),
    (768, "tf32", "identity", (1, 24, 32), True, 21),
    (768, "float64", "tanh", (1, 24, 32), True, 21),
    (4096, "bfloat16", "gelu", (1, 16, 256), True, 9),
    (2600, "float16", "elu", (1, 200, 13), True, 1),
]


@pytest.mark.parametrize(("features", "dtype", "activation", "turn", "sums", "batch"), COLUMNS, ids=str)
@pytest.mark.parametrize("planned", [SMALL, LARGE])
def test_slopes_sums_and_turns_in_one_sweep(
    features: int,
    dtype: str,
    activation: str,
    turn: tuple[int, int, int] | None,
    sums: bool,
    batch: int,
    planned: int,
    emulator: Emulator,
) -> None:
    slope = features if activation != "identity" else 0
    chain = Chain((), activation=activation, slope=slope, sums=features if sums else 0, turn=turn)
    found = plan(chain, dtype, planned, Gpu(90, 2, 232448))
    assert [type(p).__name__ for p in found.passes] == ["Columns"] + ["Reduction"] * sums
    batch = min(batch, 64) if planned == SMALL else batch
    draw, kernels = drawing(dtype), emulator.compile(found)
    z, grad = draw(batch, features), draw(batch, features)
    right = torch.func.vjp(lambda z: activate(activation, z), torch.from_numpy(z))[1](torch.from_numpy(grad))[0].numpy()
    x, given, right = (z, [grad], right) if slope else (z, [], z)
    summed = right.sum(0)
    if turn:
        right = right.reshape(batch, *turn).swapaxes(2, 3).reshape(batch, -1)
    (made, *of_bias), errors = emulator.run(found, kernels, x, given, None, blocks=2)
    assert not errors
    np.testing.assert_allclose(made.reshape(batch, -1), right, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])
    if sums:
        rounded = batch**0.5 if dtype == "float64" else 2  # numpy's sums, too
        assert np.linalg.norm(of_bias[0] - summed) <= rounded * EPS[dtype] * np.linalg.norm(summed)
        again, _ = emulator.run(found, kernels, x, given, None, blocks=2, seed=7)  # blocks in another order
        np.testing.assert_array_equal(again[1], of_bias[0])
        (grad if slope else z)[z[:, features // 2].argmax(), features // 2] = np.nan  # where relu's slope is 1
        (_, sick), errors = emulator.run(found, kernels, x, given, None, blocks=2)
        assert not errors and np.flatnonzero(np.isnan(sick)).tolist() == [features // 2]


# Products that go back through the activation before: as the slopes with theirs, by each kind of row
THROUGH = [
    (1, 256, 256, "bfloat16", "relu", 131, LARGE),
    (1, 64, 136, "float16", "elu", 200, LARGE),
    (3, 40, 12, "bfloat16", "softplus", 65, MEDIUM),
    (1, 64, 192, "tf32", "elu", 131, LARGE),
    (2, 36, 25, "tf32", "relu", 67, MEDIUM),
    (1, 100, 98, "float32", "tanh", 70, MEDIUM),
    (1, 64, 64, "bfloat16", trace(torch.nn.SELU())[0].program, 70, MEDIUM),
    (1, 139, 71, "bfloat16", "relu", 131, LARGE),
    (2, 94, 75, "float16", "elu", 67, LARGE),
]


@pytest.mark.parametrize(("outer", "p", "q", "dtype", "activation", "batch", "planned"), THROUGH, ids=str)
def test_products_back_through_the_activation_before(
    outer: int, p: int, q: int, dtype: str, activation: str, batch: int, planned: int, emulator: Emulator
) -> None:
    """And zero where relu was, even of an infinite gradient."""
    chain = Chain((Contraction(0, outer, p, q, 1, tied=True),), activation=activation, through=outer * q)
    found = plan(chain, dtype, planned, Gpu.of(90))
    halves = ["WeightHalves"] if found.passes[-1].reads_prepared else []
    assert [type(each).__name__ for each in found.passes] == [*halves, "Wide"]
    kernels, draw = emulator.compile(found), drawing(dtype)
    grad, weight, z = draw(batch, outer * p), draw(q, p) / 8, draw(batch, outer * q)
    state = activate(activation, torch.from_numpy(z)).numpy()
    slope = slopes_from(activation, state, dtype)
    sick = batch // 2
    for seed, value in enumerate((None, np.inf)):
        if value is not None:
            grad[sick, : p // 2] = value
        (made,), errors = emulator.run(found, kernels, grad, [np.abs(weight), state], None, blocks=2, seed=seed)
        assert not errors
        sums = np.einsum("qp,nop->noq", np.abs(weight), grad.reshape(batch, outer, p)).reshape(batch, -1)
        right = np.where(slope == 0, 0, sums * np.where(slope == 0, 1, slope))
        made, fine = made.reshape(batch, -1), np.arange(batch) != (-1 if value is None else sick)
        assert np.linalg.norm(made[fine] - right[fine]) <= 3 * EPS[dtype] * np.linalg.norm(right[fine])
        np.testing.assert_array_equal(np.isinf(made), np.isinf(right))
        assert activation != "relu" or (made == 0).sum() == (slope == 0).sum() > made.size / 4


def slopes_from(activation: str, state: Array, dtype: str) -> Array:
    """Of a state as memory holds it."""
    slope = from_result(activation)
    assert slope is not None
    return evaluate(slope, torch.from_numpy(decode(encode(state, dtype), dtype).reshape(state.shape))).numpy()


@pytest.mark.parametrize(
    ("features", "dtype", "activation", "batch"),
    [
        (64, "bfloat16", "elu", 300),
        (7, "float16", "relu", 5),
        (513, "float32", "softplus", 19),
        (33, "float64", "tanh", 40),
    ],
)
def test_back_through_an_activation_by_itself(
    features: int, dtype: str, activation: str, batch: int, emulator: Emulator
) -> None:
    found = plan(Chain((), activation=activation, through=features), dtype, SMALL, Gpu.of(80))
    draw = drawing(dtype)
    state, grad = activate(activation, torch.from_numpy(draw(batch, features))).numpy(), draw(batch, features)
    (made,), errors = emulator.run(found, emulator.compile(found), grad, [state], None)
    assert not errors
    right = grad * slopes_from(activation, state, dtype)
    np.testing.assert_allclose(made.reshape(batch, -1), right, rtol=4 * EPS[dtype], atol=EPS[dtype])


# Matrices, rows and columns: whole and partial tiles, rows in one tile and in several, accesses of 2 to 16 bytes, tiles
# with rows of many matrices, and several side by side
TURNS = [
    (1, 16, 688),
    (2, 13, 200),
    (1, 4, 1000),
    (1, 3, 7),
    (2, 200, 8),
    (1, 768, 4),
    (3, 64, 48),
    (1, 5, 130),
    (1, 130, 136),
    (2, 72, 200),
    (40, 24, 4),
    (9, 40, 2),
]


def rounded_to_tf32(x: Array) -> Array:
    return (x.astype(np.float32).view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32).astype(np.float64)


# Of two neighbours each for every other dtype, so that each dtype has sizes that 16 bytes divide and others
@pytest.mark.parametrize(
    ("turn", "dtype"),
    [
        (turn, dtype)
        for i, turn in enumerate(TURNS)
        for j, dtype in enumerate(("float64", "float32", "tf32", "bfloat16"))
        if (i // 2 + j) % 2 == 0
    ],
    ids=str,
)
def test_turn(turn: tuple[int, int, int], dtype: str, emulator: Emulator) -> None:
    """In tf32, floats are rounded."""
    matrices, rows, columns = turn
    x = decode(encode(np.random.default_rng(0).standard_normal((5, matrices * rows * columns)), dtype), dtype)
    kept = rounded_to_tf32(x) if dtype == "tf32" else x
    for seed, planned in enumerate((SMALL, LARGE)):
        found = plan(Chain((), turn=turn), dtype, planned, Gpu.of(80))
        outputs, errors = emulator.run(found, emulator.compile(found), x.reshape(5, -1), [], None, blocks=2, seed=seed)
        assert not errors
        right = kept.reshape(5, matrices, rows, columns).swapaxes(2, 3)
        np.testing.assert_array_equal(outputs[-1].ravel(), right.ravel())


@pytest.mark.parametrize("turn", [(1, 3, 7), (3, 13, 37), (2, 13, 200), (1, 59, 131), (7, 25, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16", "float16"])
def test_whole_matrices_are_turned(turn: tuple[int, int, int], dtype: str, emulator: Emulator) -> None:
    """The last block has fewer, and may end within 16 bytes, or a word."""
    matrices, rows, columns = turn
    gpu = Gpu.of(80)
    made = turns.whole(*turn, dtype, LARGE, gpu)
    assert made
    together = 16 // math.gcd(16, ELEMENT_BYTES[dtype] * rows * columns)
    found = Plan(Chain((), turn=turn), dtype, LARGE, gpu, (replace(made, together=together),))
    kernels = emulator.compile(found)
    for batch, seed in itertools.product((5, 8), (0, 1)):
        x = decode(encode(np.random.default_rng(0).standard_normal((batch, matrices * rows * columns)), dtype), dtype)
        outputs, errors = emulator.run(found, kernels, x.reshape(batch, -1), [], None, blocks=2, seed=seed)
        assert not errors
        kept = rounded_to_tf32(x) if dtype == "tf32" else x
        right = kept.reshape(batch, matrices, rows, columns).swapaxes(2, 3)
        np.testing.assert_array_equal(outputs[-1].ravel(), right.ravel())


@pytest.mark.parametrize(
    ("turn", "mixed"),
    [((1, 192, 24), (48, 4)), ((1, 30, 136), (10, 3)), ((1, 64, 200), (8, 8)), ((1, 40, 4), (8, 5))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_rows_are_turned_in_another_order(
    turn: tuple[int, int, int], mixed: tuple[int, int], dtype: str, emulator: Emulator
) -> None:
    _, rows, columns = turn
    x = decode(encode(np.random.default_rng(0).standard_normal((5, *mixed, columns)), dtype), dtype)
    x = x.reshape(5, *mixed, columns)
    for planned in (SMALL, LARGE):
        found = plan(Chain((), turn=turn, mixed=(1, *mixed)), dtype, planned, Gpu.of(80))
        outputs, errors = emulator.run(found, emulator.compile(found), x.reshape(5, -1), [], None, blocks=2)
        assert not errors
        right = x.swapaxes(1, 2).reshape(5, rows, columns).swapaxes(1, 2)
        np.testing.assert_array_equal(outputs[-1].ravel(), right.ravel())


# Untied products whose groups, behind q, store runs of theirs side by side: outer, p, q and inner, and the runs
RUNS = [
    ((1, 72, 96, 4), 48, "bfloat16", 90, 130, "Wide"),
    ((2, 64, 48, 16), 8, "float16", 90, 70, "Wide"),
    ((2, 64, 48, 16), 8, "float16", 80, 70, "Streamed"),
    ((1, 64, 64, 16), 64, "bfloat16", 90, 70, "Mapped"),
    ((1, 40, 64, 16), 16, "tf32", 90, 70, "Mapped"),
    ((1, 40, 72, 16), 24, "tf32", 90, 70, "Wide"),
    ((2, 40, 48, 4), 24, "float32", 90, 70, "Wide"),
    ((1, 20, 24, 3), 8, "bfloat16", 80, 33, "Streamed"),
    ((2, 9, 40, 5), 20, "tf32", 80, 7, "Streamed"),
    ((1, 7, 16, 2), 8, "float64", 80, 5, "Streamed"),
]


@pytest.mark.parametrize("x_turned", [True, False], ids=["turned", "in-order"])
@pytest.mark.parametrize("case", RUNS, ids=str)
def test_groups_store_runs(
    case: tuple[tuple[int, int, int, int], int, str, int, int, str], x_turned: bool, emulator: Emulator
) -> None:
    (outer, p, q, inner), run, dtype, architecture, batch, family = case
    c = Contraction(0, outer, p, q, inner, tied=False)
    turn = outer * q // run, run, inner
    found = plan(Chain((c,), x_turned=x_turned, turn=turn), dtype, LARGE, replace(Gpu.of(architecture), sms=2))
    assert type(found.passes[-1]).__name__ == family or not x_turned
    draw = drawing(dtype)
    x, weight = draw(batch, outer, inner, p), draw(outer, inner, q, p) / 8
    right = np.einsum("oiqp,noip->noqi", weight, x).reshape(batch, *turn).swapaxes(2, 3).ravel()
    given = x if x_turned else x.swapaxes(2, 3)
    outputs, errors = emulator.run(found, emulator.compile(found), given.reshape(batch, -1), [weight], None, blocks=2)
    assert not errors
    assert np.linalg.norm(outputs[-1].ravel() - right) <= 2 * EPS[dtype] * np.linalg.norm(right)


# Widths, whose rows are copied 2 to 16 bytes at a time, in whole and in half steps
STACKS = [
    ([32, 64, 48, 16], "bfloat16", "relu", 200),
    ([20, 20, 20], "float16", "tanh", 70),
    ([3, 45, 63, 1], "bfloat16", "softplus", 130),
    ([13, 24, 5], "tf32", "gelu", 130),
    ([48, 40, 128, 12], "tf32", "sigmoid", 65),
    ([100, 200, 36], "float16", "sine", 64),
    ([127, 20, 13], "bfloat16", "relu", 65),
    ([13, 45, 127], "float16", "tanh", 200),
    ([63, 12, 9], "tf32", "relu", 63),
    ([126, 1], "bfloat16", "silu", 1),
    ([20, 24, 40, 8], "bfloat16", "learned", 130),
    ([13, 24, 5], "tf32", "learned", 65),
    ([127, 127, 127, 127], "tf32", "relu", 131),  # no room for packed rows
]


# The same with weights streamed, and a tiling's warpgroups and rows of a chunk: columns in one pass and in several,
# chunks side by side and of several slabs, rows copied 2 to 16 bytes at a time, layers that are alike, states that lie
# where those before lay and not, batches that end within a tile, warpgroups without one
STREAMED_STACKS = [
    ([13, 512, 256, 128], "bfloat16", "relu", 200, (2, 128)),
    ([63, 256, 256, 256, 256, 4], "bfloat16", "relu", 330, (2, 256)),
    ([48, 512, 256, 128, 12], "float16", "elu", 70, (1, 256)),
    ([196, 384, 196], "bfloat16", "gelu", 65, (2, 128)),
    ([45, 63, 127, 5], "float16", "sigmoid", 130, (2, 64)),
    ([24, 328, 300, 100], "bfloat16", "softplus", 131, (1, 128)),
    ([63, 256, 256, 4], "tf32", "relu", 130, (2, 128)),
    ([48, 512, 256, 12], "tf32", "elu", 70, (1, 128)),
    ([45, 63, 127, 5], "tf32", "sigmoid", 200, (2, 256)),
    ([10, 276, 268, 130], "tf32", "silu", 64, (1, 64)),
    ([3, 3, 3], "tf32", "sine", 260, (1, 64)),
    ([1, 2, 1], "bfloat16", "tanh", 1, (2, 64)),
]


STORED = [
    ([128, 128, 128, 128], "bfloat16", "relu", 136),
    ([24, 127, 66, 44, 9], "float16", "gelu", 136),
    ([5, 17, 80, 3], "bfloat16", "softplus", 136),
    ([45, 127, 63, 13], "bfloat16", "relu", 201),
    ([127, 20, 1, 127], "float16", "identity", 63),
    ([32, 64, 64, 16], "tf32", "gelu", 136),
    ([13, 45, 66, 1], "tf32", "tanh", 136),
    ([16, 24, 24], "float16", "learned", 136),
]


def stack_of(widths: list[int], dtype: str, activation: str, last: str = "identity") -> list[Chain]:
    """Dense layers, every other with a bias; "learned" is LEARNED."""
    layers = []
    for i, (p, q) in enumerate(itertools.pairwise(widths)):
        stage = activation if i < len(widths) - 2 else last
        chain = Chain.of(kronecker((p,), (q,)), i % 2 == 0, LEARNED if stage == "learned" else stage)
        layers.append(replace(chain, tf32=dtype == "tf32"))
    return layers


def drawn_tensors(layers: list[Chain], draw: Callable[..., Array]) -> list[Array]:
    """Each layer's weight, the parameters of its activation, and its bias if it has one."""
    tensors = []
    for i, layer in enumerate(layers):
        (c,) = layer.contractions
        tensors += [draw(c.q, c.p) / 4, *(np.full((1,), 0.5 + i + j / 4) for j in range(layer.parameters))]
        tensors += [draw(c.q)] if layer.bias else []
    return tensors


def run_in_torch(layers: list[Chain], x: Tensor, tensors: list[Tensor]) -> Tensor:
    rest = iter(tensors)
    for layer in layers:
        x = x @ next(rest).T
        parameters = [next(rest) for _ in range(layer.parameters)]
        x = activate(layer.activation, x + next(rest) if layer.bias else x, parameters)
    return x


def check_stack(found: Plan, layers: list[Chain], batch: int, emulator: Emulator) -> None:
    dtype = found.dtype
    kernels = emulator.compile(found)
    draw = drawing(dtype)
    x, tensors = draw(batch, layers[0].in_features), drawn_tensors(layers, draw)
    right = run_in_torch(layers, torch.from_numpy(x), [torch.from_numpy(t) for t in tensors])
    (y,), errors = emulator.run(found, kernels, x, tensors, None, blocks=1)
    assert not errors
    y = y.reshape(batch, -1)
    assert np.linalg.norm(y - right.numpy()) <= 3 * EPS[dtype] * len(layers) * torch.linalg.norm(right)
    broken = x.copy()
    broken[batch // 2] = np.inf
    (found_y,), errors = emulator.run(found, kernels, broken, tensors, None, blocks=2, seed=2)
    others = np.arange(batch) != batch // 2
    assert not errors
    np.testing.assert_array_equal(found_y.reshape(batch, -1)[others], y[others])


@pytest.mark.parametrize(("widths", "dtype", "activation", "batch"), STACKS, ids=str)
def test_stacks_are_right_and_keep_samples_apart(
    widths: list[int], dtype: str, activation: str, batch: int, emulator: Emulator
) -> None:
    """One processor, whose warpgroups take several tiles."""
    layers = stack_of(widths, dtype, activation, "learned" if activation == "learned" else "identity")
    found = plan_by_first(layers, dtype, LARGE, Gpu(90, 2, 232448))
    assert found.passes[0].threads >= 256
    check_stack(found, layers, batch, emulator)


@pytest.mark.parametrize(
    ("widths", "dtype", "activation", "batch", "tiling", "frozen"),
    [(*case, frozen) for case in STREAMED_STACKS for frozen in (False, True) if case[1] != "tf32" or not frozen],
    ids=str,
)
def test_streamed_stacks_are_right_and_keep_samples_apart(
    widths: list[int],
    dtype: str,
    activation: str,
    batch: int,
    tiling: tuple[int, int],
    frozen: bool,
    emulator: Emulator,
) -> None:
    """One processor, whose warpgroups take several tiles. The second layer has no bias; those behind may be alike."""
    groups, rows = tiling
    layers = tuple(replace(layer, bias=i != 1) for i, layer in enumerate(stack_of(widths, dtype, activation)))
    planned = DenseStreamed(layers, dtype, groups, Gpu(90, 1, 232448), rows=rows, frozen=frozen)
    assert len(planned.passes) == 1 + (frozen or dtype == "tf32")
    found = Plan(layers[0], dtype, LARGE, planned.gpu, planned.passes)
    check_stack(found, list(layers), batch, emulator)


@pytest.mark.parametrize(
    ("p", "q", "dtype"),
    [(63, 136, "bfloat16"), (132, 45, "float16"), (13, 200, "tf32"), (40, 102, "bfloat16"), (24, 33, "tf32")],
)
def test_one_layer_with_odd_rows_goes_the_same_way(p: int, q: int, dtype: str, emulator: Emulator) -> None:
    (layer,) = stack_of([p, q], dtype, "relu")
    gpu = Gpu(90, 1, 232448)
    planned = dense_streamed.tile((layer,), dtype, LARGE, gpu)
    assert planned and bool(planned.results_bytes) == (q * ELEMENT_BYTES[dtype] % 16 > 0)
    check_stack(Plan(layer, dtype, LARGE, gpu, planned.passes), [layer], 300, emulator)


@pytest.mark.parametrize("activation", ["elu", "gelu"])
def test_activations_of_what_is_rounded_are_right_for_small_numbers_too(activation: str, emulator: Emulator) -> None:
    """Of each element, through two layers that change nothing."""
    layers = tuple(replace(layer, bias=False) for layer in stack_of([32, 32, 32], "float16", activation))
    planned = DenseStreamed(layers, "float16", 1, Gpu(90, 1, 232448), rows=64)
    found = Plan(layers[0], "float16", SMALL, planned.gpu, planned.passes)
    below = -np.geomspace(1e-3, 12 if activation == "elu" else 3.5, 64 * 16)
    x = decode(encode(np.concatenate([below, -below]).reshape(64, 32), "float16"), "float16").reshape(64, 32)
    (y,), errors = emulator.run(found, emulator.compile(found), x, [np.eye(32)] * 2, None, blocks=1)
    assert not errors
    right = activate(activation, torch.from_numpy(x.ravel())).numpy()
    assert np.max(np.abs(y / right - 1)) <= 1.2 * EPS["float16"]

    layers = tuple(replace(layer, bias=False) for layer in stack_of([1, 1, 1], "float16", activation))
    found = replace(found, passes=replace(planned, layers=layers).passes)
    x = np.array([[np.inf], [-np.inf], [np.nan]])
    (y,), errors = emulator.run(found, emulator.compile(found), x, [np.eye(1)] * 2, None, blocks=1)
    assert not errors
    np.testing.assert_array_equal(y, activate(activation, torch.from_numpy(x.ravel())).numpy())


def check_states(found: Plan, layers: list[Chain], batch: int, emulator: Emulator) -> None:
    """Stored beside the outputs."""
    draw, dtype = drawing(found.dtype), found.dtype
    x, tensors = draw(batch, layers[0].in_features), drawn_tensors(layers, draw)
    (made,), errors = emulator.run(found, emulator.compile(found), x, tensors, None, blocks=1)
    assert not errors
    widths = [layer.out_features for layer in layers]
    y, *states = np.split(made, np.cumsum([batch * q for q in (widths[-1], *widths[:-2])]))
    for count, state in enumerate([*states, y], 1):
        used = sum(1 + layer.parameters + layer.bias for layer in layers[:count])
        right = run_in_torch(layers[:count], torch.from_numpy(x), [torch.from_numpy(t) for t in tensors[:used]])
        assert np.linalg.norm(state - right.numpy().ravel()) <= 3 * EPS[dtype] * count * torch.linalg.norm(right)


@pytest.mark.parametrize(("widths", "dtype", "activation", "batch"), STORED, ids=str)
def test_states_of_stacks(widths: list[int], dtype: str, activation: str, batch: int, emulator: Emulator) -> None:
    layers = stack_of(widths, dtype, activation, "relu")
    planned = plan_by_first(layers, dtype, LARGE, Gpu(90, 2, 232448), states=True)
    check_states(planned, layers, batch, emulator)


@pytest.mark.parametrize(("widths", "dtype", "activation", "batch", "tiling"), STREAMED_STACKS, ids=str)
def test_states_of_streamed_stacks(
    widths: list[int], dtype: str, activation: str, batch: int, tiling: tuple[int, int], emulator: Emulator
) -> None:
    groups, rows = tiling
    layers = [replace(layer, bias=i != 1) for i, layer in enumerate(stack_of(widths, dtype, activation, "relu"))]
    planned = DenseStreamed(tuple(layers), dtype, groups, Gpu(90, 1, 232448), states=True, rows=rows)
    check_states(Plan(layers[0], dtype, LARGE, planned.gpu, planned.passes), layers, batch, emulator)


@pytest.mark.parametrize(
    ("spec", "dtype", "batch", "size"),
    [
        (kronecker((8, 8, 8), (8, 8, 8)), "float16", 9, 2.0**-9),
        (kronecker((4,) * 6, (4,) * 6), "bfloat16", 2, 0.5),
        (kronecker((3, 4, 2, 5), (4, 3, 6, 2)), "float32", 7, 1.0),
        (kronecker((8, 8, 8), (9, 9, 9)), "float64", 3, 1.0),
        (kronecker((7, 8, 48), (8, 7, 52)), "tf32", 5, 1.0),
    ],
    ids=lambda given: spec_id(given) if isinstance(given, LayerSpec) else str(given),
)
def test_gradients_of_small_factors_come_from_their_products(
    spec: LayerSpec, dtype: str, batch: int, size: float, emulator: Emulator
) -> None:
    """And do not underflow where weights of half precision are small."""
    found = plan(all_gradients_of(spec), dtype, batch, Gpu(90, 2, 232448))
    kernels = emulator.compile(found)
    random = np.random.default_rng(1)

    def draw(*shape: int, scale: float) -> Array:
        return decode(encode(random.standard_normal(shape) * scale, dtype), dtype).reshape(shape)

    x, grad = (draw(batch, n, scale=size**-1.2) for n in (spec.in_features, spec.out_features))
    weights = [draw(*shape, scale=size) for shape in spec.weight_shapes]
    outputs, errors = emulator.run(found, kernels, x, [*weights, grad], None, blocks=2)
    assert not errors
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *weights)]
    right = torch.autograd.grad(naive(spec, leaves[0], leaves[1:]), leaves, torch.from_numpy(grad))
    made = [outputs[0], *np.split(outputs[-1], np.cumsum([w.size for w in weights]))]
    for part, expected in zip(made, map(np.ravel, right), strict=False):
        assert np.linalg.norm(part - expected) <= 2 * len(weights) * EPS[dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("widths", "dtype", "activation", "last", "batch"),
    [
        ([32, 64, 16], "float16", "tanh", "identity", 200),
        ([32, 64, 64, 64, 64, 16], "bfloat16", "gelu", "identity", 300),
        ([13, 45, 63, 5], "float16", "silu", "identity", 150),
        ([2, 20, 20, 1], "bfloat16", "sine", "sigmoid", 131),
        ([96, 40], "float16", "identity", "square", 65),
        ([128, 128], "bfloat16", "identity", "relu", 300),
        ([100, 66], "float16", "identity", "gelu", 131),
        ([127, 127], "bfloat16", "identity", "softplus", 300),
        ([44, 127], "float16", "identity", "identity", 129),
        ([1, 65], "bfloat16", "identity", "sine", 2),
        ([32, 64, 16], "tf32", "tanh", "identity", 200),
        ([64, 64, 64], "tf32", "gelu", "sigmoid", 330),
        ([13, 45, 5], "tf32", "silu", "identity", 150),
        ([2, 20, 20, 20, 1], "tf32", "sine", "square", 131),
        ([40, 24, 56], "tf32", "identity", "elu", 63),
        ([32, 64], "tf32", "identity", "elu", 200),
        ([64, 16], "tf32", "identity", "identity", 530),
        ([64, 64], "tf32", "identity", "gelu", 63),
        ([128, 128], "tf32", "identity", "elu", 330),
        ([127, 127], "tf32", "identity", "silu", 200),
        ([128, 127], "tf32", "identity", "identity", 63),
        ([128, 64], "tf32", "identity", "tanh", 130),
        ([72, 72], "tf32", "identity", "sigmoid", 200),
        ([2, 20], "tf32", "identity", "tanh", 300),
        ([20, 1], "tf32", "identity", "square", 1),
        ([13, 45], "tf32", "identity", "softplus", 63),
        ([128, 1], "tf32", "identity", "gelu_tanh", 200),
        ([1, 128], "tf32", "identity", "sine", 200),
        ([63, 45, 13], "bfloat16", "relu", "tanh", 65),
        ([45, 20, 127], "float16", "tanh", "identity", 63),
        ([127, 127], "float16", "identity", "relu", 65),
        ([128, 127], "bfloat16", "identity", "relu", 200),
        ([127, 128], "float16", "identity", "tanh", 63),
        ([126, 70], "bfloat16", "identity", "identity", 1),
        ([3, 125], "float16", "identity", "relu", 64),
        ([80, 96], "bfloat16", "identity", "relu", 130),
    ],
    ids=str,
)
def test_all_gradients_of_stacks(
    widths: list[int], dtype: str, activation: str, last: str, batch: int, emulator: Emulator
) -> None:
    """One processor, whose warpgroups take several tiles."""
    check_all_gradients(stack_of(widths, dtype, activation, last), dtype, batch, emulator)


@pytest.mark.parametrize(("p", "q"), [(64, 40), (128, 104)])
def test_all_gradients_of_a_layer_without_a_bias_in_tf32(p: int, q: int, emulator: Emulator) -> None:
    (layer,) = stack_of([p, q], "tf32", "identity", "silu")
    check_all_gradients([replace(layer, bias=False)], "tf32", 150, emulator)


@pytest.mark.parametrize("dtype", ["float16", "tf32"])
def test_an_infinite_gradient_meets_no_padding(dtype: str, emulator: Emulator) -> None:
    """Of layers whose widths are padded, where nothing but their weights is behind them."""
    layers = stack_of([24, 5, 24], dtype, "identity")
    found = plan_by_first(layers, dtype, LARGE, Gpu(90, 1, 232448), backward=True)
    x, grad, *tensors = (np.ones(shape) for shape in ((17, 24), (17, 24), (5, 24), (5,), (24, 5)))
    grad[3, 3] = np.inf
    outputs, errors = emulator.run(found, emulator.compile(found), x, [*tensors, grad], None, blocks=1)
    assert not errors
    grad_x = outputs[0].reshape(17, 24)
    assert np.isposinf(grad_x[3]).all()
    np.testing.assert_array_equal(np.delete(grad_x, 3, axis=0), 120.0)


def check_all_gradients(layers: list[Chain], dtype: str, batch: int, emulator: Emulator) -> None:
    found = plan_by_first(layers, dtype, LARGE, Gpu(90, 1, 232448), backward=True)
    check_gradients_of_stack(found, layers, batch, emulator)


def check_gradients_of_stack(found: Plan, layers: list[Chain], batch: int, emulator: Emulator) -> None:
    dtype, kernels = found.dtype, emulator.compile(found)
    draw = drawing(dtype)
    x, grad, tensors = draw(batch, layers[0].in_features), draw(batch, layers[-1].out_features), []
    for layer in layers:
        (c,) = layer.contractions
        weight = decode(encode(draw(c.q, c.p) * c.p**-0.5, dtype), dtype).reshape(c.q, c.p)
        tensors += [weight, draw(c.q)] if layer.bias else [weight]
    outputs, errors = emulator.run(found, kernels, x, [*tensors, grad], None, blocks=1)
    assert not errors
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x, *tensors)]
    y = run_in_torch(layers, leaves[0], leaves[1:])
    parts = [outputs[0], *np.split(outputs[1], np.cumsum([t.size for t in tensors])[:-1])]
    for part, right in zip(parts, torch.autograd.grad(y, leaves, torch.from_numpy(grad)), strict=True):
        assert np.linalg.norm(part - right.numpy().ravel()) <= 2 * EPS[dtype] * len(layers) * torch.linalg.norm(right)

    broken = grad.copy()
    sick = batch // 2
    broken[sick] = np.nan
    outputs, errors = emulator.run(found, kernels, x, [*tensors, broken], None, blocks=1, seed=2)
    assert not errors
    found_x, others = outputs[0].reshape(batch, -1), np.arange(batch) != sick
    assert np.isnan(found_x[sick]).all()
    np.testing.assert_array_equal(found_x[others], parts[0].reshape(batch, -1)[others])


ELSEWHERE = "triple", "mapped", "mapped columns", "monarch chunks"  # families with a file of tests each


@pytest.mark.long
def test_cases_cover_the_families() -> None:
    """Of forward passes: every dtype that a record takes, and an activation that learns."""
    kinds = OF_WORK, OF_PRODUCT, OF_MIXED_PRODUCT, OF_MONARCH
    families = {family.name: family for kind in kinds for family in kind if family.name not in ELSEWHERE}
    found = {(family_of(p).name, case.dtype) for case in CASES for p in case.plan.passes}
    assert found >= {(name, dtype) for name, family in families.items() for dtype in family.takes.dtypes}
    learned = {family_of(case.plan.passes[-1]).name for case in CASES if case.activation == LEARNED}
    assert learned == set(families)
    text = "".join(case.plan.text() for case in CASES)
    ways = ["Sandwich<Stage", "__cluster_dims__", "SPLIT = true", "PAIRED = true", "BY_ROWS = false"]
    ways += [f"CONSUMERS = {count}" for count in (1, 2, 3)]
    ways += [f"{way} = {used}" for way in ("BULK_LOAD", "BULK_STORE", "ROUND_X") for used in ("true", "false")]
    assert not [way for way in ways if way not in text]


RESIDENT = Case(kronecker((32, 24), (40, 24)), "float32", 70, MEDIUM)
RESIDENT_SUMS = Case(kronecker((20, 20, 20), (20, 20, 20), rank=3), "bfloat16", 9, LARGE)
LEAVING = Case(kronecker((41, 64), (50, 72)), "bfloat16", 30, MEDIUM)
STREAMED = Case(monarch((8, 9, 4), (6, 10, 5)), "bfloat16", 70, LARGE)
PAIR = Case(kronecker((48, 64), (64, 48)), "bfloat16", 30, MEDIUM)
WIDE = Case(monarch((8, 136), (64, 16), rank=16), "bfloat16", 300, SOME, processors=4, apart=True)
WIDE_OF_FLOATS = Case(monarch((2, 256), (256, 4), rank=64), "float32", 300, SOME, processors=4)
FENCE_OF_SLABS = "if constexpr (!kPrepares) fence_copy_engine();  // or those who have prepared it have had one"
PAIR_BY_MAP = Case(kronecker((48, 128), (40, 126)), "tf32", 16, MEDIUM)
STRIP = Case(kronecker((128, 128), (128, 128)), "tf32", 2, SMALL)
STRIPS_IN_TURN = Case(kronecker((96, 128), (96, 128)), "float64", 1, SMALL)
FEW = Case(kronecker((8,) * 4, (8,) * 4), "float32", 20, MEDIUM, processors=1)
# What breaks a kernel, and what the emulator says of it
PLANTED = {
    "no-sync-between-stages": (RESIDENT, "\n    sync();\n  }\n", "\n  }\n", "race: a read"),
    "no-sync-of-x": (
        RESIDENT_SUMS,
        "sync();  // x is there, and the last tile's result has left",
        "",
        "race: a",
    ),
    "next-x-before-all-terms": (
        RESIDENT_SUMS,
        "if (term == 2) c.load_next",
        "if (term == 0) c.load_next",
        "has not landed",
    ),
    "no-fence-before-stores": (LEAVING, "fence_copy_engine();\n    sync();", "sync();", "no fence: the copy"),
    "no-wait-for-copies": (STREAMED, "wait_for_copies<Pass::SLOTS - 2>();", "", "has not landed"),
    "no-sync-of-chunks": (STREAMED, "__syncthreads();\n          multiply", "multiply", "race"),
    "no-fence-of-copies": (PAIR, "fence_copy_engine();\n      arrive", "arrive", "no fence: a matrix unit"),
    "no-wait-for-a-slot": (PAIR, "wait_for_bytes(ring.empty(slot), phase);", "", "nobody goes on"),
    "no-wait-for-a-mapped-slot": (PAIR_BY_MAP, "wait_for_bytes(ring.empty(slot), phase);", "", "more arrivals"),
    "no-wait-for-sums": (PAIR, "wait_for_products<0>();\n            t", "t", "race: a copy"),
    "no-fence-of-slabs": (WIDE, FENCE_OF_SLABS + "\n    at.last", "at.last", "no fence: a matrix unit"),
    "no-fence-of-split-slabs": (
        WIDE_OF_FLOATS,
        "fence_copy_engine();\n    arrive(full(slot));",
        "arrive(full(slot));",
        "no fence: a matrix unit",
    ),
    "no-wait-for-a-chunk": (STRIP, "wait_for_copies<SLOTS - 2>();", ";", "has not landed"),
    "no-sync-of-strips": (STRIP, "__syncthreads();  // the chunk", "// the chunk", "race"),
    "no-wait-for-a-strip": (STRIPS_IN_TURN, "wait_for_copies<SLOTS - 1>();", ";", "has not landed"),
    "no-sync-of-strips-in-turn": (STRIPS_IN_TURN, "__syncthreads();  // the chunk", "// the chunk", "race"),
    "no-sync-before-columns": (FEW, "if (first + 4 == B) __syncthreads();", "", "race: a write"),
    "no-sync-behind-columns": (FEW, "__syncthreads();\n      {", "{", "race: a"),
    "no-sync-of-a-warp": (FEW, "__syncwarp();\n      Base::load", "Base::load", "race: a read"),
    "no-wait-for-a-block": (WIDE, "wait_for_cluster(free, phase ^ 1);", "", "race: a write"),
}


@pytest.mark.parametrize(("case", "old", "new", "said"), PLANTED.values(), ids=PLANTED)
def test_finds_what_is_planted(case: Case, old: str, new: str, said: str, emulator: Emulator) -> None:
    run = prepare(case, emulator, {old: new})
    _, errors = run(run.x, seed=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("dtype", "old", "new", "said"),
    [
        ("bfloat16", "slots.wait_until_empty(cursor);", "", "race: a matrix unit"),
        ("bfloat16", "fence_copy_engine();\n      if", "if", "no fence: a matrix unit"),
        ("bfloat16", "wait_for_products<1>();\n", "", "race: a matrix unit"),
        ("bfloat16", "slots.wait_until_full(cursor);", "", "has not landed"),
        ("tf32", "slots.wait_until_empty(cursor);", "", "race: a"),
        ("float32", "slots.wait_until_empty(cursor);", "", "race: a"),
        ("tf32", "fence_copy_engine();\n      if", "if", "no fence: a matrix unit"),
        ("float32", "wait_for_products<0>();\n", "", "nobody has waited for"),
        ("float32", "slots.wait_until_full(cursor);", "", "race: a matrix unit"),
    ],
)
def test_finds_what_is_missing_of_a_gradient_of_warpgroups(
    dtype: str, old: str, new: str, said: str, emulator: Emulator
) -> None:
    check_that_it_finds(64, dtype, {old: new}, said, emulator)


@pytest.mark.parametrize(
    ("dtype", "old", "new", "said"),
    [
        ("bfloat16", "min(there, kPiece)", "kPiece", "outside of the tensors"),
        ("tf32", "whole = kShifted && ends", "whole = false && ends", "outside of the tensors"),
        ("float32", "whole = kShifted && ends", "whole = false && ends", "outside of the tensors"),
        ("bfloat16", "    sync_consumers<kConsumers>();\n", "", "race: a"),
        ("tf32", "      __syncwarp();\n      staged", "      staged", "race"),
    ],
)
def test_finds_what_is_missing_where_rows_are_no_whole_pieces(
    dtype: str, old: str, new: str, said: str, emulator: Emulator
) -> None:
    check_that_it_finds(63, dtype, {old: new}, said, emulator)


def check_that_it_finds(p: int, dtype: str, changes: dict[str, str], said: str, emulator: Emulator) -> None:
    found = wide_gradient_of((1, p, 64, 1, True), dtype, 1501, 1, (1, 1, 1, 64, 1))
    kernels = emulator.compile(found, changes)
    _, errors = emulator.run(found, kernels, np.ones((1501, p)), [np.ones((1501, 64))], None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("dtype", "width", "old", "new", "said"),
    [
        ("bfloat16", 192, "ring.wait_until_empty(cursor);\n            ROLL", "ROLL", "race"),
        ("bfloat16", 192, "ring.wait_until_full(cursor);\n    if", "if", "has not landed"),
        ("bfloat16", 64, "of_x.wait_until_empty({0, u32(round & 1 ^ 1)});", "", "race"),
        ("bfloat16", 192, "fence_copy_engine(), meet();", "fence_copy_engine();", "race: a matrix unit"),
        ("bfloat16", 192, "if constexpr (!kInChunks) fence_copy_engine();", "", "no fence: a matrix unit"),
        ("bfloat16", 192, "wait_for_products<1>();\n", "", "race"),
        ("tf32", 192, "    Base::wait_until_empty(cursor);\n", "\n", "race"),
        ("tf32", 192, "ring.wait_until_full(cursor);\n    if", "if", "has not landed"),
        ("tf32", 192, "sync_group<kLoaders / 32, 16>(kMeeting);", "", "race"),
        ("tf32", 192, "wait_for_copies<0>();\n        if", "if", "has not landed"),
        ("tf32", 192, "of_x.wait_until_full({0, u32(round & 1)}), ", "", "race"),
        ("tf32", 192, "u32(round & 1)}), fence_copy_engine();", "u32(round & 1)});", "no fence: a matrix unit"),
        ("frozen bfloat16", 192, "    Base::wait_until_empty(cursor);\n", "\n", "race"),
        ("frozen bfloat16", 192, "wait_for_copies<0>();\n        if", "if", "has not landed"),
        ("frozen bfloat16", 192, "of_x.wait_until_full({0, u32(round & 1)}), ", "", "race"),
        (
            "frozen bfloat16",
            192,
            "u32(round & 1)}), fence_copy_engine();",
            "u32(round & 1)});",
            "no fence: a matrix unit",
        ),
    ],
)
def test_finds_what_is_missing_of_streamed_layers(
    dtype: str, width: int, old: str, new: str, said: str, emulator: Emulator
) -> None:
    """Of 64, the ring has room for all that comes behind the first layer."""
    *frozen, dtype = dtype.split()
    layers = tuple(stack_of([192, width, width, 32], dtype, "relu"))
    groups = 2 if dtype == "bfloat16" else 1
    planned = DenseStreamed(layers, dtype, groups, Gpu(90, 1, 232448), rows=64, frozen=bool(frozen))
    found = Plan(layers[0], dtype, LARGE, planned.gpu, planned.passes)
    kernels = emulator.compile(found, {old: new})
    tensors = drawn_tensors(list(layers), lambda *shape: np.ones(shape))
    _, errors = emulator.run(found, kernels, np.ones((600, 192)), tensors, None, blocks=1)
    assert any(said in error for error in errors), errors


def test_finds_a_missing_barrier_of_a_gradient(emulator: Emulator) -> None:
    c = Contraction(0, 3, 16, 32, 1, tied=True)
    found = plan(Chain((c,), gradient=True), "tf32", 100, Gpu(90, 1, 232448))
    put = "if (more) put_both(slot);"
    kernels = emulator.compile(found, {f"{put}\n      __syncthreads();": put})
    states = (np.ones((100, c.outer * n)) for n in (c.p, c.q))
    _, errors = emulator.run(found, kernels, next(states), list(states), None, blocks=1)
    assert any("race" in error for error in errors), errors


@pytest.mark.parametrize(
    ("size", "dtype", "old", "new", "said"),
    [
        (32, "tf32", "sync();\n      second", "second", "race"),
        (32, "tf32", "wait_for_copies<(SLOTS > 1 ? SLOTS - 2 : 0)>();", "", "has not landed"),
        (32, "tf32", "if (of_first < units) ROLL", "if (false) ROLL", "has met"),
        (64, "float32", "if (of_first < units) ROLL", "if (false) ROLL", "has met"),
        (64, "bfloat16", "if (of_first < units) ROLL", "if (false) ROLL", "has met"),
        (96, "bfloat16", "fence_copy_engine();\n      u32 t[", "u32 t[", "no fence: a matrix unit"),
        (96, "bfloat16", "sync_consumers<256>();  // dT has", "// dT has", "race"),
        (64, "float32", "states.wait_until_empty({x_state(group), phase});", "", "race"),
        (64, "float32", "states.wait_until_empty({g_state(group), phase});", "", "race"),
        (64, "float32", "states.wait_until_full({x_state(warpgroup), phase});", "", "race: a matrix unit"),
        (64, "float32", "fence_copy_engine();\n    arrive(full", "arrive(full", "no fence: a matrix unit"),
        (64, "float32", "fence_copy_engine();\n      states.wait", "states.wait", "no fence: a matrix unit"),
        (64, "float32", "sync_warpgroup(warpgroup);  // all", "// all", "race: a matrix unit"),
        (64, "float32", "sync_warpgroup(warpgroup);  // dT has", "// dT has", "race"),
        (64, "float32", "wait_for_products<1>();\n", "", "race"),
        (64, "bfloat16", "ring.wait_until_empty(position);", "", "has not landed"),
        (64, "bfloat16", "wait_for_copies<AHEAD>();", "", "has not landed"),
        (64, "bfloat16", "fence_copy_engine();\n    arrive", "arrive", "no fence: a matrix unit"),
        (64, "bfloat16", "fence_copy_engine();\n      wait", "wait", "no fence: a matrix unit"),
        (64, "bfloat16", "sync_warpgroup(warpgroup);  // all", "// all", "race: a matrix unit"),
        (64, "bfloat16", "sync_warpgroup(warpgroup);  // dT has", "// dT has", "race"),
        (128, "float64", "Base::wait_for_room(c);", "", "has not landed"),
        (128, "float64", "sync_consumers<kThreads>();\n  }", "}", "race"),
    ],
)
def test_finds_what_is_missing_of_all_gradients(
    size: int, dtype: str, old: str, new: str, said: str, emulator: Emulator
) -> None:
    spec = kronecker((size, size), (size, size))
    kind = {32: "PairBackward", 96: "Pair16LargeBackward"}.get(size) or kind_of(((size, size),) * 2, dtype, 90)
    found = gradients_by(kind, spec, dtype, 16384, Gpu(90, 1, 232448))
    found = replace(found, passes=found.passes[:1])
    kernels = emulator.compile(found, {old: new})
    x = np.ones(({32: 30, 64: 11, 96: 3, 128: 2}[size], size**2))
    _, errors = emulator.run(found, kernels, x, [*map(np.ones, spec.weight_shapes), x], None, blocks=1)
    assert any(said in error for error in errors), errors


# Of factors, by a family of their own or as a chain, and of stacks: samples that groups of one block take unequally
UNEQUAL_FACTORS = [
    ("", kronecker((8, 8, 8), (8, 8, 8)), "bfloat16", 18),
    ("PairMixedBackward", kronecker((5, 33, 40), (5, 46, 24)), "float16", 1),
    ("SmallDoubleBackward", kronecker((16, 5, 12), (12, 7, 16)), "float64", 8),
]
UNEQUAL_STACKS = [([24, 40, 8], "float16", 65), ([24, 40, 8], "tf32", 65), ([13, 21, 5], "float32", 40)]


@pytest.mark.parametrize(("kind", "spec", "dtype", "batch"), UNEQUAL_FACTORS, ids=str)
def test_groups_meet_equally_often(kind: str, spec: LayerSpec, dtype: str, batch: int, emulator: Emulator) -> None:
    asked = dtype, LARGE, Gpu(90, 1, 232448)
    chain = all_gradients_of(spec)
    found = gradients_by(kind, spec, *asked) if kind else Plan(chain, *asked, by_visits(chain, *asked) or ())
    x, grad = np.ones((batch, spec.in_features)), np.ones((batch, spec.out_features))
    check_meetings(found, x, [*map(np.ones, spec.weight_shapes), grad], emulator)


@pytest.mark.parametrize(("widths", "dtype", "batch"), UNEQUAL_STACKS, ids=str)
def test_groups_of_stacks_meet_equally_often(widths: list[int], dtype: str, batch: int, emulator: Emulator) -> None:
    layers = stack_of(widths, dtype, "silu")
    found = plan_by_first(layers, dtype, LARGE, Gpu(90, 1, 232448), backward=True)
    tensors = [*drawn_tensors(layers, drawing(dtype)), np.ones((batch, widths[-1]))]
    check_meetings(found, np.ones((batch, widths[0])), tensors, emulator)


def check_meetings(found: Plan, x: Array, tensors: Sequence[Array], emulator: Emulator) -> None:
    """What racecheck would say of groups without a unit that do not meet."""
    found = replace(found, passes=found.passes[:1])
    changes = {"if (of_first < units) ROLL": "if (false) ROLL"}
    _, errors = emulator.run(found, emulator.compile(found), x, tensors, None, blocks=1)
    assert not errors
    _, errors = emulator.run(found, emulator.compile(found, changes), x, tensors, None, blocks=1)
    assert any("has met" in error for error in errors), errors


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("wait_for_copies<SLOTS - 1>();", "has not landed"),
        ("wait_for_copies<SLOTS - 2>();", "has not landed"),
        ("__syncthreads();  // the chunk is there", "race"),
        ("__syncthreads();  // T and dT are", "race"),
    ],
)
def test_finds_what_is_missing_of_strips(old: str, said: str, emulator: Emulator) -> None:
    spec = kronecker((128, 128), (128, 128))
    found = plan(all_gradients_of(spec), "float64", SMALL, Gpu.of(90))
    found = replace(found, passes=found.passes[:1])
    kernels = emulator.compile(found, {old: "//" if "//" in old else ";"})
    x = np.ones((1, 128**2))
    _, errors = emulator.run(found, kernels, x, [*map(np.ones, spec.weight_shapes), x], None)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_copies<SLOTS - 1>();", "", "has not landed"),
        ("wait_for_copies<SLOTS - 2>();", "", "has not landed"),
        ("__syncthreads();  // the weights", "// the weights", "race"),
        ("sync();  // the unit", "// the unit", "race"),
        ("    sync();\n  }", "  }", "race"),
        ("wait_at_cluster();  // all have begun", "", "a second arrival"),
        ("    sync_cluster();\n    const int parts", "    const int parts", "race"),
    ],
)
def test_finds_what_is_missing_of_clusters(old: str, new: str, said: str, emulator: Emulator) -> None:
    found = clusters_of(((32, 32), (32, 32)), "tf32", {"groups": 2, "warps": 2, "cluster": 2})
    kernels = emulator.compile(found, {old: new})
    x = np.ones((23, 32**2))
    _, errors = emulator.run(found, kernels, x, [np.ones((32, 32)), np.ones((32, 32)), x], None)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("size", "old", "new", "said"),
    [
        (128, "states.wait_until_empty({state(group, 0), phase});", "", "race"),
        (128, "states.wait_until_empty({state(group, 1), phase});", "", "race"),
        (128, "states.wait_until_empty({state(group, 2), phase});", "", "race"),
        (64, "states.wait_until_empty({state(group, 1), phase});", "", "race"),
        (128, "states.wait_until_full({state(group, 1 + h), phase});", "", "race: a matrix unit"),
        (128, "if (h == 0) states.wait_until_full({state(group, 0), phase});", "", "race: a matrix unit"),
        (128, "fence_copy_engine();\n    arrive(", "arrive(", "no fence: a matrix unit"),
        (64, "fence_copy_engine();\n    sync_consumers", "sync_consumers", "no fence: a matrix unit"),
        (64, "wait_for_products<0>();\n        states.release", "states.release", "race"),
        (64, "wait_for_products<1>();\n", "", "sums touched in flight"),
    ],
)
def test_finds_what_is_missing_of_both_gradients(size: int, old: str, new: str, said: str, emulator: Emulator) -> None:
    chain = Chain((Contraction(0, 1, size, size, 64, tied=True),), backward=True)
    found = plan(chain, "tf32", LARGE, Gpu(90, 1, 232448))
    kernels = emulator.compile(replace(found, passes=found.passes[:1]), {old: new})
    x = np.ones((6, size * 64))
    _, errors = emulator.run(found, kernels, x, [np.ones((size, size)), x], None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_copies<0>();", "", "has not landed"),
        ("fence_copy_engine();\n      __syncthreads();  // samples", "__syncthreads();  //", "no fence: a matrix unit"),
        ("__syncthreads();  // samples", "//", "race"),
        ("fence_copy_engine();\n        __syncthreads();", "__syncthreads();", "no fence: a matrix unit"),
        ("fence_copy_engine();\n        __syncthreads();", "fence_copy_engine();", "race"),
    ],
)
def test_finds_what_is_missing_of_a_layers_gradients(old: str, new: str, said: str, emulator: Emulator) -> None:
    (layer,) = stack_of([128, 128], "bfloat16", "identity", "relu")
    found = plan_by_first([layer], "bfloat16", LARGE, Gpu(90, 1, 232448), backward=True)
    kernels = emulator.compile(replace(found, passes=found.passes[:1]), {old: new})
    x, tensors = np.ones((600, 128)), [np.ones((128, 128)), np.ones(128), np.ones((600, 128))]
    _, errors = emulator.run(replace(found, passes=found.passes[:1]), kernels, x, tensors, None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("size", "old", "new", "said"),
    [
        (64, "sync();  // the samples", "//", "race"),
        (64, "fence_copy_engine();\n    sync();", "sync();", "no fence: a matrix unit"),
        (64, "fence_copy_engine();\n    sync();", "fence_copy_engine();", "race"),
        (64, "wait_for_products<0>();\n    Base::template touch_sums<L>(sums);", "", "race"),
        (128, "wait_for_bytes(samples().full(0), before & 1);", "", "race: a matrix unit"),
        (128, "wait_for_bytes(samples().full(0), before + 1 & 1);", "", "race: a matrix unit"),
        (128, "wait_for_bytes(samples().empty(0), before & 1);", "", "race: a write"),
        (128, "if (before > 0) wait_for_bytes(samples().empty(0), before - 1 & 1);", "", "race: a write"),
        (
            128,
            "fence_copy_engine();\n        arrive(samples().full(0));",
            "arrive(samples().full(0));",
            "no fence: a matrix unit",
        ),
    ],
)
def test_finds_what_is_missing_of_a_layers_gradients_in_tf32(
    size: int, old: str, new: str, said: str, emulator: Emulator
) -> None:
    (layer,) = stack_of([size, size], "tf32", "identity", "relu")
    found = plan_by_first([layer], "tf32", LARGE, Gpu(90, 1, 232448), backward=True)
    found = replace(found, passes=found.passes[:1])
    kernels = emulator.compile(found, {old: new})
    x, tensors = np.ones((800, size)), [np.ones((size, size)), np.ones(size), np.ones((800, size))]
    _, errors = emulator.run(found, kernels, x, tensors, None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_copies<0>();\n      __syncwarp();", "__syncwarp();", "has not landed"),
        ("wait_for_copies<0>();\n      __syncwarp();", "wait_for_copies<0>();", "race"),
        ("__syncwarp();\n    } else", "} else", "race: a copy"),
        ("__syncwarp();\n    send_run", "send_run", "race: a read"),
        ("lane.index);\n    __syncwarp();", "lane.index);", "race: a write"),
        ("at < whole ? place + at : from, at < whole", "place + at, true", "outside of the tensors"),
        ("rest < left", "rest < left - 2", "not written"),
    ],
)
def test_finds_what_is_missing_of_packed_rows(old: str, new: str, said: str, emulator: Emulator) -> None:
    layers = stack_of([127, 127], "bfloat16", "identity")
    found = plan_by_first(layers, "bfloat16", LARGE, Gpu(90, 1, 232448))
    x, tensors = np.ones((601, 127)), [np.ones((127, 127)), np.ones(127)]
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, tensors, None, blocks=1)
    assert any(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("take_apart();\n        fence_copy_engine();", "take_apart();", "no fence: a matrix unit"),
        ("take_apart();\n        fence_copy_engine();\n        __syncthreads();", "take_apart();", "race"),
    ],
)
def test_finds_what_is_missing_of_landed_rows(old: str, new: str, said: str, emulator: Emulator) -> None:
    (layer,) = stack_of([127, 127], "bfloat16", "identity", "relu")
    found = plan_by_first([layer], "bfloat16", LARGE, Gpu(90, 1, 232448), backward=True)
    found = replace(found, passes=found.passes[:1])
    x, tensors = np.ones((601, 127)), [np.ones((127, 127)), np.ones(127), np.ones((601, 127))]
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, tensors, None, blocks=1)
    assert any(said in error for error in errors), errors
