"""plan/planner.py and what it is made of: plans for every legal layer, dtype and GPU generation, without a GPU.

What a plan says is checked for being possible, not for being the one that today's predictions prefer.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import AWKWARD_SPECS, KINDS, kronecker, monarch, spec_id, specs

from factorlayer.autograd import runtime
from factorlayer.device.gpu import DTYPES, ELEMENT_BYTES, Gpu
from factorlayer.kernels import bank_layouts
from factorlayer.kernels.batches import BATCHES, FEW, SOME
from factorlayer.kernels.factor_gradients import FactorGradients
from factorlayer.kernels.gradient import Gradient, Reduction
from factorlayer.kernels.kronecker import pair_backward, small_float
from factorlayer.kernels.kronecker.pair import Pair
from factorlayer.kernels.kronecker.pair_double import PairDouble
from factorlayer.kernels.kronecker.pair_double_backward import PairDoubleBackward
from factorlayer.kernels.kronecker.pair_mixed_backward import PairMixedBackward
from factorlayer.kernels.kronecker.small_double_backward import SmallDoubleBackward
from factorlayer.kernels.kronecker.small_float import SmallFloat
from factorlayer.kernels.kronecker.warpgroups import Pair16Backward, PairTf32Backward
from factorlayer.kernels.monarch import monarch_through
from factorlayer.kernels.monarch.monarch_chunks import MonarchChunks, MonarchKept
from factorlayer.kernels.monarch.monarch_pairs import MonarchPairs
from factorlayer.kernels.monarch.monarch_through import MonarchThrough
from factorlayer.kernels.monarch.slab_backward import SlabBackward
from factorlayer.kernels.monarch.untied_backward import UntiedBackward
from factorlayer.kernels.product import columns, few, wide_gradient
from factorlayer.kernels.product.few import Few
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.mapped_gradient import MappedGradient
from factorlayer.kernels.product.streamed import Streamed
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.whole import Instead, WholeWeight
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.stack import dense, dense_backward32
from factorlayer.kernels.stack.dense_backward32 import LayerBackward32
from factorlayer.kernels.stack.dense_streamed import DenseStreamed
from factorlayer.kernels.stages import Layout, Sandwich, Stage, times_of_copies
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction, LayerSpec
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import has_plan, plan, plan_text, runs_of

MANY = len(BATCHES) - 1  # the class of batches
GENERATIONS = (80, 86, 89, 90, 100, 120)
LARGEST_GRID_X, LARGEST_GRID_Y = 2**31 - 1, 65535
# Of functions, counted with their returns, for a plan: a million is about 0.2 s. A clock would measure the machine.
MOST_CALLS = 2_000_000
# Of a thread, in which no processor makes so many: counting takes longer than planning, and is for what may be long.
LEAST_SECONDS = 0.12

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def chain_of(spec: LayerSpec, bias: bool = True, activation: str = "gelu") -> Chain:
    return Chain.of(spec, bias, activation)


def a_batch(*choices: object) -> int:
    """One of the classes' batches, another for every combination, so that loops stay short."""
    return BATCHES[sum(map(hash_of, choices)) % len(BATCHES)]


def hash_of(choice: object) -> int:
    return sum(str(choice).encode())


# The text, read by the rules of csrc/runtime/plan.cpp


@dataclass(frozen=True)
class Pass:
    read: str
    written: str
    threads: int
    shared: int
    units_per_sample: int
    units_per_block: int
    blocks_per_processor: int
    grid_y: int
    architecture: str
    kernel: str
    source: str
    maps: list[list[str]]


@dataclass(frozen=True)
class Text:
    chunk: int
    scratch: tuple[int, ...]
    passes: list[Pass]


def read_text(text: str) -> Text:
    """Sources are counted in bytes, so they are cut out of bytes."""
    rest = text.encode()

    def line(name: str, *counts: int) -> list[str]:
        nonlocal rest
        head, newline, rest = rest.partition(b"\n")
        assert newline, f"the line {head!r} should end"
        word, *words = head.decode().split()
        assert word == name and len(words) in counts, head
        return words

    assert line("factorlayer", 2) == ["plan", "1"]
    (chunk,) = map(int, line("chunk", 1))
    scratch = tuple(map(int, line("scratch", *range(3, 9))))
    passes = []
    while rest:
        read, written, *numbers, architecture, kernel, length = line("pass", 11)
        source, rest = rest[: int(length)], rest[int(length) :]
        assert rest[:1] == b"\n", f"the source of {kernel} should have {length} bytes"
        rest = rest[1:]
        passes.append(Pass(read, written, *map(int, numbers), architecture, kernel, source.decode(), []))
        while rest.startswith(b"map "):
            passes[-1].maps.append(line("map", 16))
    return Text(chunk, scratch, passes)


def check_text(text: Text, chain: Chain, found: Plan) -> None:
    gpu, written = found.gpu, {"x"}
    splits = len(found.passes) - len(of_samples(found))
    for i, p in enumerate(text.passes):
        read, *beside = p.read.split("+")
        assert beside == (["s2@0"] if isinstance(found.passes[i], Instead) else [])
        if i < splits:
            assert (read, p.written) == ("none", "s2")
        else:
            assert read in written, f"pass {i} reads {p.read}, which nothing wrote"
            assert read != p.written
            assert p.written in ("y", "s0", "s1") and (p.written == "y") == (i == len(text.passes) - 1)
        written.add(p.written)
        assert 32 <= p.threads <= 1024 and p.threads % 32 == 0
        assert 0 <= p.shared <= gpu.shared
        assert 1 <= p.units_per_sample < 2**48 and 1 <= p.units_per_block < 2**48
        assert 0 <= p.blocks_per_processor <= 32
        assert 1 <= p.grid_y <= LARGEST_GRID_Y
        assert p.architecture == gpu.architecture
        entry = re.search(r"__global__ void (?:__cluster_dims__\(1, (\d), 1\) )?__launch_bounds__\((\d+)", p.source)
        assert entry and int(entry[2]) == p.threads and p.grid_y % int(entry[1] or 1) == 0
        assert f"{p.kernel}(" in p.source and p.kernel.startswith("factorlayer_")
        samples = text.chunk or 10**6
        if not p.blocks_per_processor:
            assert samples * p.units_per_sample // p.units_per_block < LARGEST_GRID_X
    assert len({p.kernel for p in text.passes}) == len(text.passes)
    assert (text.scratch[2] > 0) == (splits > 0)
    if len(text.passes) == 1 + splits:
        assert text.chunk == 0 or text.passes[-1].maps
        assert text.scratch[:2] == (0, 0), "a single pass needs nothing but its output"
        return
    assert text.chunk >= 1 and text.chunk % 8 == 0
    for p, (_, bytes_out) in zip(text.passes[splits:-1], sizes_of(found), strict=False):
        assert text.scratch[int(p.written[1])] >= bytes_out, f"{p.kernel} writes {bytes_out} bytes for a sample"


def of_samples(found: Plan) -> list[Any]:
    """Passes that take them, as a dense layer has them where its weight is prepared."""
    return [p.of if isinstance(p, Instead) else p for p in found.passes if p.reads != "none"]


def sizes_of(found: Plan) -> list[tuple[int, int]]:
    """Bytes that each pass reads and writes for one sample."""
    sizes = []
    for p in of_samples(found):
        if isinstance(p, (Few, Mapped, Streamed, Wide)):
            product = p.product
            elements = product.terms_in * product.x_features, product.terms_out * product.y_features
        elif isinstance(p, DenseStreamed):
            elements = p.layers[0].in_features, p.layers[-1].out_features
        elif isinstance(p, (MonarchChunks, MonarchThrough)):
            elements = p.chain.in_features, p.chain.out_features
        elif isinstance(p, Turn):
            elements = (p.matrices * p.rows * p.columns,) * 2
        else:
            around = p.work.outer * p.work.inner
            read = max(p.work.rank, p.work.terms) if p.work.apart else 1  # states: one for each term, or one
            elements = around * math.prod(p.work.states[0]) * read, around * math.prod(p.work.states[-1]) * p.work.terms
        sizes.append((elements[0] * ELEMENT_BYTES[found.dtype], elements[1] * ELEMENT_BYTES[found.dtype]))
    return sizes


def weights_of(found: Plan) -> list[int]:
    for made in found.passes:
        if isinstance(made, WholeWeight):
            return list(range(len(found.chain.contractions)))
    weights: list[int] = []
    for p in of_samples(found):
        if isinstance(p, Turn):
            continue
        if isinstance(p, (Few, Mapped, Streamed, Wide)):
            weights.append(p.product.contraction.weight)
        elif isinstance(p, DenseStreamed):
            weights += [c.weight for layer in p.layers for c in layer.contractions]
        elif isinstance(p, (MonarchChunks, MonarchThrough)):
            weights += [c.weight for c in p.chain.contractions]
        else:
            weights += [weight for _, mode in p.work.steps for weight, _, _ in mode.parts]
    return weights


def check_plan(found: Plan, chain: Chain) -> None:
    size = ELEMENT_BYTES[found.dtype]
    sizes = sizes_of(found)
    assert sizes[0][0] == chain.in_features * size and sizes[-1][1] == chain.out_features * size
    for (_, written), (read, _) in itertools.pairwise(sizes):
        assert written == read, f"{written} bytes are written, {read} are read by the next pass"
    assert sorted(weights_of(found)) == list(range(len(chain.contractions))), "every weight has one place"
    assert 0 < found.us < math.inf
    shown = str(found)
    assert len(shown.splitlines()) >= 1 + len(found.passes) and f"{len(found.passes)} kernel" in shown
    check_text(read_text(found.text()), chain, found)


# Every legal layer

# Every layer on every GPU, each time for another dtype, so that each layer meets all of them, and each GPU does
LAYERS = [
    pytest.param(spec, dtype := DTYPES[(i + j) % len(DTYPES)], Gpu.of(arch), id=f"{spec_id(spec)}-{dtype}-{arch}")
    for i, spec in enumerate(AWKWARD_SPECS)
    for j, arch in enumerate(GENERATIONS)
]


def test_layers_meet_every_gpu_and_every_dtype() -> None:
    given = [each.values for each in LAYERS]
    assert {(spec, dtype) for spec, dtype, _ in given} == {*itertools.product(AWKWARD_SPECS, DTYPES)}
    assert {(spec, gpu) for spec, _, gpu in given} == {*itertools.product(AWKWARD_SPECS, map(Gpu.of, GENERATIONS))}
    assert {(dtype, gpu) for _, dtype, gpu in given} == {*itertools.product(DTYPES, map(Gpu.of, GENERATIONS))}


@pytest.mark.parametrize(("spec", "dtype", "gpu"), LAYERS)
def test_every_layer_has_a_plan(spec: LayerSpec, dtype: str, gpu: Gpu) -> None:
    chain, batch = chain_of(spec), a_batch(spec, dtype, gpu.arch)
    begin = time.thread_time()
    found = plan(chain, dtype, batch, gpu)
    is_long = time.thread_time() - begin > LEAST_SECONDS
    check_plan(found, chain)
    if is_long:
        check_calls(chain, dtype, batch, gpu)


def check_calls(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> int:
    """How many a plan takes of which nothing is kept."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("factorlayer.plan.", "factorlayer.kernels.")):
            for each in vars(module).values():
                if hasattr(each, "cache_clear"):
                    each.cache_clear()
    calls = itertools.count()
    before = sys.getprofile()
    sys.setprofile(lambda *_: next(calls))
    try:
        plan(chain, dtype, batch, gpu)
    finally:
        sys.setprofile(before)
    taken = next(calls)
    assert taken < MOST_CALLS, f"planning took {taken} calls and returns"
    return taken


def test_planning_is_counted() -> None:
    taken = [
        check_calls(chain_of(kronecker(*sizes)), "float32", 1000, Gpu.of(90))
        for sizes in (((8,), (8,)), ((8, 8), (8, 8)))
    ]
    assert 1000 < taken[0] < taken[1]


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 64, 1000, 65537, 10**6])
@pytest.mark.parametrize(
    "spec",
    [kronecker((32, 32), (32, 32)), kronecker((3, 1000), (3, 1000)), kronecker((5, 3), (3, 7), rank=2),
     monarch((2, 3), (3, 2)), monarch((5, 3, 2), (2, 3, 5)), kronecker((1,), (1,))],
    ids=spec_id,
)  # fmt: skip
def test_every_batch_has_a_plan(spec: LayerSpec, batch: int) -> None:
    for dtype in DTYPES:
        check_plan(plan(chain_of(spec), dtype, batch, Gpu.of(90)), chain_of(spec))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=30)
def test_layers_drawn_at_random_have_plans(kind: str, data: st.DataObject) -> None:
    spec = data.draw(specs(kind, largest_state=5000))
    chain = chain_of(spec, data.draw(st.booleans()), "identity")
    gpu = Gpu.of(data.draw(st.sampled_from(GENERATIONS)))
    check_plan(plan(chain, data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BATCHES)), gpu), chain)


@pytest.mark.parametrize("batch_class", range(len(BATCHES)))
@dtypes
def test_the_text_that_the_runtime_asks_for(dtype: str, batch_class: int) -> None:
    """tf32 is a word of the chain there, not a dtype."""
    gpu = Gpu.of(86)
    named = "float32" if dtype == "tf32" else dtype
    for spec in (kronecker((20, 28), (36, 44)), monarch((8, 64), (48, 16), rank=4)):
        chain = chain_of(spec)
        text = chain.tf32_text if dtype == "tf32" else chain.text
        found = plan_text(text, named, batch_class, gpu.arch, gpu.sms, gpu.shared)
        if torch.cuda.is_available() or has_compiler():
            with pytest.raises(ValueError, match='it should begin with "pass", it is "the end"'):
                runtime.fill_cache(found + "the end\n")  # so everything before it was read, and nothing is compiled
        kernels = [p.kernel for p in read_text(found).passes]
        assert all(dtype in kernel for kernel in kernels), f"{kernels} should be for {dtype}"


def has_compiler() -> bool:
    try:
        torch.ops.factorlayer.compiler()
    except RuntimeError:
        return False
    return True


def test_a_first_mode_of_one_is_not_forgotten() -> None:
    """Its weight is a number like any other; pairs take what is before them as 1 only if nothing is."""
    for dtype in DTYPES:
        found = plan(chain_of(kronecker((1, 40, 32), (1, 56, 48))), dtype, 1024, Gpu.of(90))
        for p in found.passes:
            assert isinstance(p, Resident) or "params.weights[0]" in p.source("k"), str(found)
            assert not isinstance(p, Pair) or len(p.work.sizes) == (3 if p.mixed != (1, 1) else 2)


def test_plans_are_the_same_for_the_same_question() -> None:
    """Kernels are cached by their source: a plan that varied would be compiled anew."""
    for spec, dtype in itertools.product((kronecker((12, 11), (7, 24)), monarch((8, 9), (9, 8))), DTYPES):
        first = plan(chain_of(spec), dtype, 1024, Gpu.of(90)).text()
        plan.cache_clear()
        assert plan(chain_of(spec), dtype, 1024, Gpu.of(90)).text() == first


@pytest.mark.parametrize(
    ("widths", "activation", "right", "in_float", "without_wgmma"),
    [
        ((32, 64, 64, 16), "relu", [(0, 3)], [(0, 3)], [(0, 3)]),
        ((128, 128, 127, 128), "relu", [(0, 1), (1, 2), (2, 3)], [], [(0, 1), (1, 3)]),
        ((64,) * 9, "tanh", [(0, 2), (2, 5), (5, 8)], [], [(0, 4), (4, 8)]),
        ((48, 512, 256, 128, 12), "elu", [(3, 4)], [(3, 4)], [(0, 1), (2, 4)]),
        ((128, 256, 256, 128), "relu", [], [], []),
        ((64, 64, 64), "p0,x,mul:0:1/:0/:1", [], [], []),
    ],
    ids=str,
)
def test_stacks_are_cut_into_runs_that_have_kernels(
    widths: tuple[int, ...],
    activation: str,
    right: list[tuple[int, int]],
    in_float: list[tuple[int, int]],
    without_wgmma: list[tuple[int, int]],
) -> None:
    layers = [Chain.of(kronecker((p,), (q,)), True, activation).text for p, q in itertools.pairwise(widths)]
    asked = [("bfloat16", 90, right), ("float32", 90, in_float), ("bfloat16", 80, without_wgmma)]
    for dtype, arch, runs in asked:
        assert list(runs_of(" | ".join(layers), dtype, Gpu(arch, 132, 232448), MANY, backward=True)) == runs


@pytest.mark.parametrize(
    ("widths", "right", "without_wgmma"),
    [
        ((768, 3072, 768), [], []),
        ((48, 512, 256, 128, 12), [(0, 4)], [(2, 4)]),
        ((3072, 128, 256, 64, 3072), [(1, 4)], [(1, 3)]),
        ((768, 3072, 128, 256, 64, 3072, 768), [(2, 5)], [(2, 4)]),
    ],
    ids=str,
)
def test_stacks_are_cut_forward_where_one_pass_takes_several(
    widths: tuple[int, ...], right: list[tuple[int, int]], without_wgmma: list[tuple[int, int]]
) -> None:
    stack = " | ".join(chain_of(kronecker((p,), (q,)), activation="relu").text for p, q in itertools.pairwise(widths))
    assert list(runs_of(stack, "bfloat16", Gpu(90, 132, 232448), MANY)) == right
    assert list(runs_of(stack, "bfloat16", Gpu(80, 132, 232448), MANY)) == without_wgmma


@pytest.mark.parametrize(
    ("p", "q", "groups", "together"),
    [
        (32, 64, 3, False),
        (64, 64, 3, False),
        (64, 16, 4, False),
        (20, 1, 4, False),
        (72, 72, 2, False),
        (128, 128, 2, True),
        (127, 127, 2, True),
        (128, 64, 2, True),
        (64, 128, 2, True),
    ],
)
def test_layers_in_tf32_have_warpgroups_alone_or_together(p: int, q: int, groups: int, together: bool) -> None:
    gpu, chain = Gpu.of(90), Chain.of(kronecker((p,), (q,)), True, "relu")
    first = dense_backward32.tile((chain,), "tf32", 1 << 20, gpu)
    assert first and first.groups == groups
    assert isinstance(first, LayerBackward32) == together
    assert first.shared <= gpu.shared and first.threads * first.registers_needed <= 65536
    floor = (1 << 20) * (2 * p + q) * 4 / gpu.sms / gpu.memory_bytes
    assert floor < first.us < 4 * floor + 10
    assert Plan(chain, "tf32", 1 << 20, gpu, first.passes).scratch == (0, 0, 132 * (p * q + q) * 4)


def test_layers_in_tf32_are_no_wider_than_their_sums() -> None:
    for p, q in ((129, 64), (64, 129)):
        layers = (Chain.of(kronecker((p,), (q,)), True, "relu"),)
        assert dense_backward32.tile(layers, "tf32", 1024, Gpu.of(90)) is None
    narrow = (Chain.of(kronecker((64,), (64,)), True, "relu"),)
    for arch, dtype in ((100, "tf32"), (80, "tf32"), (90, "float32"), (90, "float64")):
        assert dense_backward32.tile(narrow, dtype, 1024, Gpu.of(arch)) is None


def test_stacks_whose_activations_learn_have_kernels_forward_only() -> None:
    layer = Chain.of(kronecker((8,), (8,)), True, "p0,x,mul:0:1/:0/:1")
    for count in (2, 20, 21):  # a weight, a parameter and a bias each
        text = " | ".join([layer.text] * count)
        assert has_plan(text, "bfloat16", 90, 132, 232448) == (count < 21)
        assert not has_plan(f"{text} | backward", "bfloat16", 90, 132, 232448)
    assert not has_plan(f"{layer.text} | backward", "bfloat16", 90, 132, 232448)


@pytest.mark.parametrize(
    ("widths", "dtype", "packs"),
    [((127, 127, 63), "bfloat16", True), ((127,) * 4, "tf32", False), ((128, 20, 4, 7), "bfloat16", None)],
)
def test_odd_rows_are_packed_where_there_is_room(widths: tuple[int, ...], dtype: str, packs: bool | None) -> None:
    layers = tuple(Chain.of(kronecker((p,), (q,)), True, "relu") for p, q in itertools.pairwise(widths))
    found = dense.tile(layers, dtype, BATCHES[-1], Gpu.of(90))
    assert found and found.shared <= found.gpu.shared
    assert (found.packed_bytes > 0) == (packs is True) and found.packs == (packs is not False)


def test_less_shared_memory_than_any_gpu_of_today() -> None:
    gpu = Gpu(89, 20, 49152)
    for spec, dtype in itertools.product((kronecker((64, 64), (64, 64)), monarch((16, 16), (16, 16))), DTYPES):
        check_plan(plan(chain_of(spec), dtype, 1024, gpu), chain_of(spec))


def test_a_chain_that_is_no_layer_is_refused() -> None:
    """The second contraction has another state than the first one leaves, or takes it apart otherwise; the raw ops take
    such a text from anyone."""
    with pytest.raises(ValueError, match="disagree about the size of the state"):
        Chain.parse("tied 1 2 3 3 1; tied 0 1 2 2 4")
    with pytest.raises(PlanError, match="Kronecker"):
        plan(Chain.parse("tied 1 2 3 3 1; tied 0 2 3 3 1"), "float32", 16, Gpu.of(90))


def test_a_state_that_fits_stays_on_chip() -> None:
    for dtype, batch in itertools.product(DTYPES, BATCHES):
        found = plan(chain_of(kronecker((32, 32), (32, 32))), dtype, batch, Gpu.of(90))
        assert len(found.passes) == 1, str(found)


# Gradients of one weight: outer, p, q, inner, tied


def gradient_of(*sizes: int, tied: bool, dtype: str = "bfloat16", batch: int = 16384, arch: int = 90) -> Plan:
    chain = Chain((Contraction(0, *sizes, tied=tied),), gradient=True)
    found = plan(chain, dtype, batch, Gpu.of(arch))
    buffers = [(p.read, p.written) for p in read_text(found.text()).passes]
    assert buffers == ([("x", "y")] if len(found.passes) == 1 else [("x", "s2"), ("s2", "y")])
    assert (found.scratch[2] > 0) == (len(found.passes) == 2)
    return found


@pytest.mark.parametrize(
    ("sizes", "tied", "batch", "most_us"),
    [
        ((1, 1024, 4096, 1), True, 16384, (275, 550, 1550)),
        ((2, 1024, 1024, 1), False, 16384, (138, 275, 720)),
        ((8, 256, 1024, 1), True, 4096, (45, 85, 200)),
        ((4, 192, 192, 1), False, 16384, (25, 45, 75)),
    ],
)
def test_gradients_of_large_products_are_for_warpgroups(
    sizes: tuple[int, int, int, int], tied: bool, batch: int, most_us: tuple[float, float, float]
) -> None:
    for dtype in DTYPES:
        found = gradient_of(*sizes, tied=tied, dtype=dtype, batch=batch)
        assert isinstance(found.passes[0], WideGradient | MappedGradient) == (dtype != "float64")
        if dtype != "float64":
            assert found.us <= most_us[("tf32", "float32").index(dtype) + 1 if dtype in ("tf32", "float32") else 0]
    for arch in GENERATIONS:
        found = gradient_of(*sizes, tied=tied, batch=batch, arch=arch)
        assert isinstance(found.passes[0], WideGradient | MappedGradient) == (arch == 90)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("untied 0 4 192 192 1; backward; mixed 4 48 4", True),
        ("turned; untied 0 1 192 192 4; backward; turn 4 48 4", True),
        ("untied 0 16 256 256 1; backward; mixed 16 16 16", True),
        ("untied 0 64 64 64 1; backward", True),
        ("untied 0 4 768 192 1; backward", False),  # x's rows would come in many parts
        ("turned; untied 0 1 192 768 4; backward; turn 4 48 4", False),  # more q's than a block has sums for
        ("turned; untied 0 1 64 64 64; backward", False),  # groups take turns in x's gradient
        ("untied 0 4 192 192 1; backward; mixed 4 48 2", False),
    ],
)
def test_both_gradients_of_untied_weights_at_one_visit(text: str, takes: bool) -> None:
    for dtype, arch in itertools.product(DTYPES, (80, 90)):
        fits = takes and arch == 90 and dtype in ("bfloat16", "float16")
        assert has_plan(text, dtype, arch, 132, 232448) == fits
        assert not has_plan(text, dtype, arch, 132, 232448, batch_class=0)
        for batch in BATCHES[2:] if fits else ():
            found = plan(Chain.parse(text), dtype, batch, Gpu.of(arch))
            visit, _ = found.passes
            assert isinstance(visit, UntiedBackward) and visit.most * visit.tiles <= 132
            buffers = [(p.read, p.written) for p in read_text(found.text()).passes]
            assert buffers == [("x", "y"), ("s2", "w")] and "at one visit" in str(visit)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("untied 0 4 192 192 1; backward; slabs 1", True),
        ("turned; untied 0 1 192 192 4; backward; slabs 2", True),
        ("turned; untied 0 1 192 192 4; backward; turn 4 48 4; slabs 1", True),
        ("turned; untied 0 1 256 256 16; backward; slabs 2", True),
        ("untied 0 64 64 64 1; backward; slabs 1", True),
        ("turned; untied 0 1 192 768 4; backward; slabs 1", False),  # more q's than a block has sums for
        ("turned; untied 0 1 64 64 64; backward; slabs 1", False),  # groups take turns in x's gradient
        ("untied 0 4 192 192 1; backward; mixed 4 48 4; slabs 1", False),  # in order, as slabs are
        ("turned; untied 0 1 768 192 4; slabs 1", True),
        ("untied 0 4 190 190 1; slabs 1", False),
    ],
)
def test_states_by_slabs(text: str, takes: bool) -> None:
    for (dtype, tf32), arch in itertools.product((("float32", "; tf32"), ("float32", ""), ("bfloat16", "")), (80, 90)):
        fits = takes and arch == 90 and tf32 != ""
        assert has_plan(text + tf32, dtype, arch, 132, 232448) == fits
        for batch in BATCHES[2:] if fits else ():
            found = plan(Chain.parse(text + tf32), "tf32", batch, Gpu.of(arch))
            made, *summing = found.passes
            passes = read_text(found.text()).passes
            if found.chain.backward:
                assert isinstance(made, SlabBackward) and made.most * made.tiles <= 132 * made.blocks and summing
                assert [(p.read, p.written) for p in passes] == [("x", "y"), ("s2", "w")]
                assert "\nmap 1 tf32 32 " in found.text() and "at one visit" in str(made)
            else:
                assert isinstance(made, Mapped) and "SLABS = true" in passes[0].source


def test_in_tf32_grad_y_goes_through_registers_and_two_chunks_are_on_their_way() -> None:
    for p, q in ((1024, 4096), (256, 688), (1024, 1022)):
        summing, *_ = gradient_of(1, p, q, 1, tied=True, dtype="tf32").passes
        assert isinstance(summing, WideGradient) and summing.loads_left and summing.held == 2
    summing, *_ = gradient_of(1, 1024, 4096, 1, tied=True, dtype="float32").passes
    assert isinstance(summing, WideGradient) and not summing.loads_left


def test_weights_that_stay_in_l2_go_by_for_each_tile_of_rows() -> None:
    for groups, p, q, span in ((16, 254, 680, 1), (2, 1022, 4088, 16)):
        chain = Chain((Contraction(0, groups, p, q, 1, tied=False),), tf32=True)
        *_, product = plan(chain, "tf32", 16384, Gpu.of(90)).passes
        assert isinstance(product, Wide) and product.span == span


@pytest.mark.parametrize("dtype", wide_gradient.DTYPES)
def test_tiles_of_gradients_of_warpgroups_end_with_a_slab(dtype: str) -> None:
    """Where a row has several, also of rows that begin within 16 bytes."""
    for p in (*range(1, 70), 125, 127, 250, 251, 255, 256, 257):
        found = list(wide_gradient.tilings(Contraction(0, 1, p, 40, 1, tied=True), dtype, 2048, Gpu.of(90)))
        assert found and all(each.across == 1 or each.bn % 64 == 0 for each in found)


def test_blocks_of_gradients_of_warpgroups_have_rows_that_begin_at_one_place_in_a_piece() -> None:
    for dtype, whole, broken, every in (
        ("bfloat16", 1032, 1028, 2),
        ("float16", 1032, 1029, 8),
        ("tf32", 1028, 1026, 2),
        ("float32", 1028, 1023, 4),
    ):
        for p, q in ((whole, whole), (broken, 1024), (1024, broken), (broken, broken)):
            summing, *behind = gradient_of(1, p, q, 1, tied=True, dtype=dtype).passes
            if p == q == whole and dtype in ("bfloat16", "float16"):
                assert isinstance(summing, MappedGradient)
                continue
            assert isinstance(summing, WideGradient)
            assert summing.every == summing.folds == (every if broken in (p, q) else 1)
            assert summing.tiles % summing.every == 0 and (f"every {every}th" in str(summing)) == (broken in (p, q))
            assert behind or summing.every == 1
        assert isinstance(gradient_of(1, 1024, 1024, 2, tied=True, dtype=dtype).passes[0], Gradient)


@pytest.mark.parametrize(
    ("p", "q", "batch", "most_us"),
    [(63, 256, 196608, 45), (13, 512, 32768, 20), (196, 384, 49152, 46), (384, 196, 49152, 46), (256, 4, 196608, 40)],
)
def test_gradients_of_odd_widths_are_bound_by_memory(p: int, q: int, batch: int, most_us: float) -> None:
    for dtype in ("bfloat16", "float16"):
        found = gradient_of(1, p, q, 1, tied=True, dtype=dtype, batch=batch)
        assert isinstance(found.passes[0], WideGradient) and found.us <= most_us


@dtypes
def test_sums_of_few_samples_are_not_written_in_parts(dtype: str) -> None:
    """Nor those of so many weights that there are blocks enough."""
    for sizes, tied in (((4, 192, 768, 1), False), ((1, 100, 100, 4), False), ((1, 64, 64, 1), True)):
        found = gradient_of(*sizes, tied=tied, dtype=dtype, batch=16)
        assert len(found.passes) == 1
    found = gradient_of(16, 1024, 1024, 1, tied=False, dtype=dtype)
    assert len(found.passes) == 1
    assert len(gradient_of(1, 64, 64, 1, tied=True, dtype=dtype).passes) == 2


# Banks of shared memory: 32 of 4 bytes. An access of 4, 8 or 16 bytes for each lane is served to 32, 16 or 8 lanes at
# once; so are the 8 rows of a matrix of 16-bit elements, 16 bytes each.


def conflicts(addresses: list[int], bytes_each: int) -> int:
    """The most words of one bank that lanes served together ask for; 1 is no conflict."""
    most = 0
    together = 128 // bytes_each
    for first in range(0, len(addresses), together):
        words = {(a + 4 * i) // 4 for a in addresses[first : first + together] for i in range(bytes_each // 4)}
        banks = [word % 32 for word in words]
        most = max(most, *(banks.count(bank) for bank in banks))
    return most


LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]  # lane, g, t


def reads_a(stride: int, size: int) -> tuple[list[int], int]:
    """Operand A, rows `stride` elements apart: where each lane reads, and how much. mma.cuh: lane_row_a."""
    if size < 8:  # rows of 16 bytes
        return [lane % 16 * stride * size + lane // 16 * 16 for lane, _, _ in LANES], 16
    return [(g * stride + t) * size for _, g, t in LANES], size


def reads_b_by_k(stride: int, size: int) -> tuple[list[int], int]:
    if size < 8:
        return [(lane % 8 + lane // 16 * 8) * stride * size + lane // 8 % 2 * 16 for lane, _, _ in LANES], 16
    return [(g * stride + t) * size for _, g, t in LANES], size


def reads_b_by_n(stride: int, size: int) -> tuple[list[int], int]:
    """k's `stride` elements apart. In 16 bits lanes 16 to 31 name rows of the next tile of columns."""
    if size == 2:
        return [((lane % 16) * stride + lane // 16 * 8) * 2 for lane, _, _ in LANES], 16
    return [(t * stride + g) * size for _, g, t in LANES], size


def test_the_simulated_banks_see_conflicts() -> None:
    assert conflicts(list(range(0, 128, 4)), 4) == 1
    assert conflicts([128 * lane for lane in range(32)], 4) == 32
    assert conflicts([0] * 32, 4) == 1, "one word is handed to all"
    for read, size in itertools.product((reads_a, reads_b_by_k, reads_b_by_n), (2, 4, 8)):
        assert conflicts(*read(64, size)) > 1, "a stride of whole lines"


def single_stages(found: Plan) -> Iterator[tuple[Stage, str]]:
    """The contractions of resident passes, and what reads them: A and B from shared memory."""
    for p in found.passes:
        if not isinstance(p, Resident):
            continue
        for stage in p.stages:
            if isinstance(stage, Sandwich):
                yield stage.first, "weight as A, state as B"
                yield stage.second, "weight as B"
            else:
                yield stage, "state as A, weight as B" if stage.by_rows else "weight as A, state as B"


def stages_and_what_follows(found: Plan) -> Iterator[tuple[Stage, Layout]]:
    for p in found.passes:
        if isinstance(p, Resident) and not any(isinstance(stage, Sandwich) for stage in p.stages):
            yield from zip(p.stages, [*(stage.layout for stage in p.stages[1:]), p.final], strict=True)


def check_banks(stage: Stage, reads: str) -> None:
    """By rows of 32 bytes two lanes meet, where what is copied lies as in memory."""
    size = ELEMENT_BYTES[stage.dtype]
    as_in_memory = stage.source == "memory" and stage.layout.row * size == 32
    accesses = {}
    if "weight as A" in reads:
        accesses["weight as A"] = reads_a(stage.weight_stride, size)
    if "state as A" in reads:
        accesses["state as A"] = reads_a(stage.layout.row, size)
    if "weight as B" in reads:
        accesses["weight as B"] = reads_b_by_k(stage.weight_stride, size)
    if "state as B" in reads:
        accesses["state as B"] = reads_b_by_n(stage.layout.step, size)
    for what, (addresses, bytes_each) in accesses.items():
        assert all(address % bytes_each == 0 for address in addresses), f"{stage}, {what}: misaligned"
        most = 2 if what == "state as A" and as_in_memory else 1
        assert conflicts(addresses, bytes_each) == most, f"{stage}, {what}: lanes meet in a bank"


@dtypes
def test_operands_are_read_without_bank_conflicts(dtype: str) -> None:
    seen = set()
    for i, spec in enumerate(AWKWARD_SPECS, DTYPES.index(dtype)):
        gpu = Gpu.of((80, 90)[i % 2])
        found = plan(chain_of(spec), dtype, a_batch(spec, dtype, gpu.arch), gpu)
        for stage, reads in single_stages(found):
            check_banks(stage, reads)
            seen |= set(reads.split(", "))
            # other sizes in the same place
            for p, inner in itertools.product((1, 3, 8, 13, 64, 100, 127, 1000), (1, 2, 8, 13, 40, 512)):
                if (inner == 1) == stage.by_rows and reads != "weight as B":
                    check_banks(replace(stage, p=p, inner=inner), reads)
    assert seen >= {"state as A", "weight as B", "weight as A", "state as B"}


@dtypes
@pytest.mark.parametrize(("p", "inner"), [(8, 8), (16, 8), (24, 32), (13, 40), (32, 64), (2, 100)])
def test_states_are_stored_without_bank_conflicts(p: int, inner: int, dtype: str) -> None:
    """Where a stage contracts a mode behind the one of the stage before it, whose q's are rows by themselves then: a
    warp stores eight of them at once, four lanes two elements of each."""
    size = ELEMENT_BYTES[dtype]
    layout = Stage(p, p, inner, 16, 1, 1, dtype, source="stage").layout
    places = [(layout.at(g * p * inner) + t * 2) * size for _, g, t in LANES]
    assert conflicts(places, 2 * size) == 1, f"{layout}: lanes meet in a bank"


@pytest.mark.parametrize(
    ("row", "step", "apart", "cycles"),
    [
        *[(256, 272, False, 8), (128, 144, False, 10), (64, 80, False, 15), (32, 48, False, 24), (32, 32, False, 4)],
        *[(128, 128, True, 4), (64, 64, True, 8), (32, 32, True, 16), (64, 80, True, 15)],
    ],
)
def test_copies_take_what_was_counted(row: int, step: int, apart: bool, cycles: int) -> None:
    """Of 512 bytes in rows of so many, so far apart in shared memory, side by side in memory or not: docs/traps.md."""
    layout = Layout(8, row // 2, 8 * step // 2, step // 2)
    assert 4 * times_of_copies(layout, row // 2 if apart else 0, 2) == pytest.approx(cycles, rel=0.1)


PAIRS = [
    ((64, 64), (64, 64)),
    ((32, 32), (32, 32)),
    ((20, 28), (36, 44)),
    ((9, 24), (8, 40)),
    ((8, 64), (9, 56)),
]


@dtypes
def test_gradients_operands_are_read_without_bank_conflicts(dtype: str) -> None:
    """But for B of doubles, which is read with its rows turned: pair_backward.cuh."""
    size = ELEMENT_BYTES[dtype]
    together = 2 if size == 4 else 1  # k's by n or m that a lane reads

    def turned(reads: tuple[list[int], int], stride: int) -> tuple[list[int], int]:
        """By lanes in another order, which name rows of 16 bytes, or read one of 8 rows."""
        addresses, bytes_each = reads
        order = [j % 2 * 4 + j // 2 for j in range(8)]
        if size == 8:
            return [(order[g] * stride + t) * size for _, g, t in LANES], bytes_each
        return [addresses[lane // 8 * 8 + order[lane % 8]] for lane in range(32)], bytes_each

    for sizes in PAIRS:
        modes = tuple(Mode(((i, q, p),)) for i, (p, q) in enumerate(zip(*sizes, strict=True)))
        p = pair_backward.tile(modes, 1, dtype, 1024, Gpu.of(90))
        assert p is not None
        of_x, of_g, of_a = p.strides
        b = reads_b_by_k(of_x, size)
        accesses = {"x": reads_a(of_x, size), "g": reads_a(of_g, size), "b": b if size == 2 else turned(b, of_x)}
        accesses |= {f"by n, {stride} apart": reads_b_by_n(together * stride, size) for stride in (of_x, of_g, of_a)}
        for what, (addresses, bytes_each) in accesses.items():
            assert all(address % bytes_each == 0 for address in addresses), f"{p}, {what}: misaligned"
            most = 2 if what == "b" and size == 8 else 1
            assert conflicts(addresses, bytes_each) == most, f"{p}, {what}: lanes meet in a bank"


@pytest.mark.parametrize("sizes", [(8,) * 5, (8,) * 4, (8, 8, 4, 8, 8), (4, 8, 8, 8, 4), (8, 4, 4, 4, 8)], ids=str)
def test_small_factors_of_floats_have_a_family(sizes: tuple[int, ...]) -> None:
    """On chip at one visit."""
    spec = kronecker(sizes, sizes)
    work = Work(1, sizes, 1, tuple((i, Mode(((i, n, n),))) for i, n in reversed(list(enumerate(sizes)))), "float32")
    for gpu in (Gpu.of(80), Gpu.of(90)):
        for batch in (1024, 16384):
            few = small_float.tile(work, batch, gpu)
            assert few is not None and few.shared <= gpu.shared
            assert (
                few.blocks_per_sm * few.threads * 128 <= 65536
                and few.blocks_per_sm * (few.sizes.shared + 1024) <= gpu.shared + 1024
            )
            floor = batch * 2 * spec.in_features * 4 / gpu.sms / gpu.memory_bytes
            assert floor < few.us < 6 * floor + 5
    assert isinstance(few, SmallFloat) and "small float: " in str(few)
    lanes = [lane * few.sizes.row_bytes for lane in range(32)]
    assert conflicts(lanes, 16) == 1, "lanes meet in a bank"


@pytest.mark.parametrize(
    ("sizes", "takes"),
    [
        (((8, 8, 8), (9, 9, 9)), True),
        (((7,) * 4, (7,) * 4), True),
        (((9, 9), (13, 13)), False),
        (((17, 8, 8), (9, 9, 9)), False),
        (((4,) * 5, (4,) * 5), False),
    ],
    ids=str,
)
def test_gradients_of_small_factors_of_doubles_go_by_columns(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], takes: bool
) -> None:
    """Where the matrix unit would pad them: what fits a multiprocessor, and takes not much longer than memory."""
    spec = kronecker(*sizes)
    chain = replace(chain_of(spec, False, "identity"), backward=True)
    for batch, gpu in itertools.product((1024, 16384), (Gpu.of(90), Gpu.of(80))):
        found = plan(chain, "float64", batch, gpu).passes[0]
        assert isinstance(found, SmallDoubleBackward) == (takes and gpu.copy_engine)
        if isinstance(found, SmallDoubleBackward):
            floor = batch * 8 * (2 * spec.in_features + spec.out_features) / gpu.sms / gpu.memory_bytes
            assert found.shared <= gpu.shared and found.threads <= 512 and floor < found.us < 6 * floor + 12


def test_states_by_columns_meet_in_banks_as_often_as_is_counted() -> None:
    """What a layout is chosen by, as lanes access it: all columns of a mode, sixteen at once."""
    sizes, strides = (3, 5, 4), (22, 4, 1)
    for mode, reverse in itertools.product(range(3), (False, True)):
        others = [range(n) if i != mode else range(1) for i, n in enumerate(sizes)]
        every = itertools.product(*(reversed(others) if reverse else others))
        indices = [tuple(reversed(index)) if reverse else index for index in every]
        places = [8 * sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
        met = sum(conflicts(places[first : first + 16], 8) for first in range(0, len(places), 16))
        found = bank_layouts.by_threads(sizes, np.array([strides]), mode, reverse)
        assert found.tolist() == [sizes[mode] * met]
    order = bank_layouts.Order(False)
    fours = [[8 * (4 * q + 22 * (k // 4) + k % 4) for q in range(4) for k in range(j, j + 4)] for j in range(0, 12, 4)]
    assert sum(conflicts(four, 8) for four in fours) == 3, "four rows of four neighbours are in all banks"
    found = bank_layouts.by_products(sizes, np.array([strides]), 1, order)
    assert found.tolist() == [2 * 3], "and the fifth row by itself; the last four columns of eight are not there"


@pytest.mark.parametrize(
    ("sizes", "batch", "taken"),
    [
        (((128, 128), (128, 128)), 1024, True),
        (((97, 124), (128, 65)), 1024, True),
        (((64, 128, 128), (64, 128, 128)), 1024, True),
        (((64, 64), (64, 64)), 1024, False),
        (((128, 129), (128, 128)), 1024, False),
        (((128, 128), (128, 128)), 16, False),
    ],
    ids=str,
)
def test_two_large_factors_of_doubles_have_a_family(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], batch: int, taken: bool
) -> None:
    """Where a state and both weights do not fit shared memory."""
    found = plan(chain_of(kronecker(*sizes)), "float64", batch, Gpu.of(90))
    doubles = [p for p in found.passes if isinstance(p, PairDouble)]
    assert bool(doubles) == taken and ("pair double: " in str(found)) == taken
    for p in doubles:
        assert p.shared <= p.gpu.shared and p.slots >= 3
        floor = batch * p.work.outer * 2 * (p.sizes[0] * p.sizes[1] * p.sizes[3] + p.sizes[0] * p.sizes[2] * p.sizes[3])
        assert floor / 132 / 0.5e6 < p.us < 2.2 * floor / 132 / 0.45e6 + 5
    assert not any(
        isinstance(p, PairDouble) for p in plan(chain_of(kronecker(*sizes)), "float64", batch, Gpu.of(80)).passes
    )


@pytest.mark.parametrize(
    ("sizes", "dtype", "fits"),
    [
        (((8,) * 5, (8,) * 5), "bfloat16", True),
        (((8, 64, 64), (8, 64, 64)), "float16", True),
        (((8,) * 5, (8,) * 5), "tf32", False),
        (((9, 64, 64), (9, 64, 64)), "bfloat16", False),
        (((8, 64, 65), (8, 64, 64)), "bfloat16", False),
        (((8, 64, 60), (8, 64, 64)), "bfloat16", False),
    ],
    ids=str,
)
def test_a_small_mode_is_gone_back_through_with_two_large_ones(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str, fits: bool
) -> None:
    """In 16 bits, at one visit, with room for some of the next unit's X."""
    chain = replace(chain_of(kronecker(*sizes), False, "identity"), backward=True)
    for arch in (80, 90):
        try:
            passes = plan(chain, dtype, 1024, Gpu.of(arch)).passes
        except PlanError:
            assert not fits or arch == 80
            continue
        (visit, *_) = passes
        assert isinstance(visit, PairMixedBackward) == (fits and arch == 90)
        if not isinstance(visit, PairMixedBackward):
            continue
        assert visit.shared <= visit.gpu.shared and visit.chunks > visit.least_chunks
        assert [type(p) for p in passes[1:]] == ([Reduction, FactorGradients] if len(sizes[0]) > 3 else [Reduction])
        p, p0, p1, q, q0, q1 = visit.sizes
        assert visit.weights == p * q + p0 * q0 + p1 * q1
        floor = 1024 * (2 * math.prod(sizes[0]) + math.prod(sizes[1])) * 2 / visit.gpu.sms / visit.gpu.memory_bytes
        assert floor < visit.us < floor + 60


@pytest.mark.parametrize(
    ("sizes", "dtype", "batch", "mixed"),
    [
        (((8, 256), (8, 1024)), "bfloat16", 16384, 0),
        (((8, 256), (8, 1024)), "float16", 1024, 0),
        (((8, 256), (8, 1024)), "bfloat16", 16, None),
        (((8, 256), (8, 1024)), "tf32", 16384, None),
        (((4, 256), (4, 1024)), "bfloat16", 16384, None),
        (((8, 256), (9, 1024)), "bfloat16", 16384, None),
    ],
    ids=str,
)
def test_a_mode_of_eight_is_mixed_on_the_way_to_a_wide_product(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, batch: int, mixed: int | None
) -> None:
    passes = plan(chain_of(kronecker(*sizes)), dtype, batch, Gpu.of(90)).passes
    assert [p.product.mixed for p in passes if isinstance(p, Wide) and p.product.mixed >= 0] == (
        [] if mixed is None else [mixed]
    )
    assert (len(passes) == 1) == (mixed is not None)


@pytest.mark.parametrize(
    ("sizes", "dtype", "batch", "family"),
    [
        (((128, 128), (128, 128)), "float64", 1024, PairDoubleBackward),
        (((128, 65), (97, 64)), "float64", 16384, PairDoubleBackward),
        (((128, 129), (128, 128)), "float64", 1024, None),
        (((128, 23), (128, 128)), "float64", 1024, None),
        (((128, 128), (128, 128)), "tf32", 1024, PairTf32Backward),
        (((96, 96), (96, 96)), "tf32", 16384, PairTf32Backward),
        (((128, 130), (128, 128)), "tf32", 1024, None),
        (((64, 64), (64, 64)), "bfloat16", 16384, Pair16Backward),
        (((24, 64), (33, 40)), "float16", 1024, Pair16Backward),
        (((64, 64), (65, 64)), "bfloat16", 16384, None),
        (((64, 60), (64, 64)), "bfloat16", 16384, None),
    ],
    ids=str,
)
def test_all_gradients_of_two_factors_have_families(
    sizes: tuple[tuple[int, int], tuple[int, int]], dtype: str, batch: int, family: type | None
) -> None:
    chain = replace(chain_of(kronecker(*sizes), False, "identity"), backward=True)
    for arch in (80, 90):
        try:
            found = plan(chain, dtype, batch, Gpu.of(arch))
        except PlanError:
            assert dtype in ("float64", "tf32") and (arch == 80 or family is None)
            continue
        if arch == 80 or family is None:
            assert not {type(p) for p in found.passes} & {PairDoubleBackward, PairTf32Backward, Pair16Backward}
            continue
        *passes, reduction = found.passes
        assert isinstance(reduction, Reduction) and {type(p) for p in passes} == {family}
        (p0, p1), (q0, q1) = sizes
        assert all(p.shared <= p.gpu.shared and p.us > 0 for p in passes)
        assert found.scratch == (0, 0, 132 * (q0 * p0 + q1 * p1) * (8 if dtype == "float64" else 4))
        buffers = [(p.read, p.written) for p in read_text(found.text()).passes]
        assert buffers == [*([("x", "s2")] if len(passes) > 1 else []), ("x", "y"), ("s2", "w")]


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (kronecker((8,) * 5, (8,) * 5), "tf32"),
        (kronecker((8,) * 5, (8,) * 5), "float64"),
        (kronecker((8,) * 4, (8,) * 4, rank=2), "float32"),
        (kronecker((8, 8, 8, 8, 8), (8, 8, 8, 8, 4)), "float32"),
        (kronecker((8, 8, 8, 8, 4), (8, 8, 8, 8, 4)), "float32"),
        (kronecker((6,) * 5, (6,) * 5), "float32"),
        (kronecker((8,) * 3, (8,) * 3), "float32"),
    ],
    ids=str,
)
def test_other_small_factors_have_other_families(spec: LayerSpec, dtype: str) -> None:
    assert not any(isinstance(p, SmallFloat) for p in plan(chain_of(spec), dtype, 1024, Gpu.of(90)).passes)


def test_a_sum_of_products_ends_with_the_smaller_weights() -> None:
    """As the last pass has those of all terms, which have to fit."""
    found = plan(chain_of(kronecker((161, 17, 4, 4), (161, 17, 4, 4), rank=3)), "tf32", 256, Gpu.of(90))
    assert all(isinstance(p, Resident) for p in found.passes)
    assert next(single_stages(found))[0].p == 161


@pytest.mark.parametrize("gpu", [Gpu.of(80), Gpu.of(90)], ids=str)
def test_places_of_sums_are_their_rows_and_columns(gpu: Gpu) -> None:
    """chain.cuh adds up a row's, a q's and a column's place; q's are a constant apart."""
    source = random.Random(5)
    checked = 0
    while checked < 40:
        count = source.randint(2, 5)
        sizes = [tuple(source.choice((1, 2, 3, 4, 5, 8, 9, 16, 24, 33)) for _ in range(count)) for _ in range(2)]
        dtype = source.choice(("float64", "float32", "tf32", "bfloat16", "float16"))
        if max(math.prod(side) for side in sizes) > 1 << 14:
            continue
        for stage, out in stages_and_what_follows(plan(chain_of(kronecker(*sizes)), dtype, 1024, gpu)):
            checked += 1
            if stage.by_rows:
                row, q = np.arange(stage.rows)[:, None], np.arange(stage.q)
                assert (out.at(row * stage.q + q) == out.at(row * stage.q) + q * out.at(1)).all(), (stage, out)
                continue
            inner = stage.inner
            o, q, i = np.ogrid[: stage.rows, : stage.q, :inner]
            step = inner if out.i % (stage.q * inner) == 0 else out.at(inner)
            right = out.at(o * stage.q * inner) + q * step + out.at(i)
            assert (out.at((o * stage.q + q) * inner + i) == right).all(), (stage, out)
            assert out.i % inner or (out.at(i) == i).all(), (stage, out)


@dtypes
def test_layouts_have_a_place_of_its_own_for_every_element(dtype: str) -> None:
    for spec in AWKWARD_SPECS:
        if spec.in_features > 20000:
            continue
        for stage, _ in single_stages(plan(chain_of(spec), dtype, 16, Gpu.of(90))):
            elements = range(min(stage.rows * stage.p * stage.inner, 20000))
            places = [stage.layout.at(e) for e in elements]
            assert len(set(places)) == len(places), f"{stage}: two elements in one place"
            if elements.stop == stage.rows * stage.p * stage.inner:
                assert max(places) * ELEMENT_BYTES[dtype] < stage.state_bytes, f"{stage}: beyond its memory"


@pytest.mark.parametrize("q", [15376, 8 * 1922 * 3])
def test_a_large_factors_rows_are_not_in_more_parts_than_there_are_multiprocessors(q: int) -> None:
    """Which would take turns: a pass was predicted to take less than its memory does."""
    gpu = Gpu.of(90)
    passes = plan(Chain.of(kronecker((70,), (q,)), False, "identity"), "float32", SOME, gpu).passes
    assert not any(isinstance(p, Resident) and p.split > gpu.sms for p in passes)
    assert sum(p.us_of(700) for p in passes) > 700 * (70 + q) * 4 / (gpu.memory_bytes * gpu.sms)


# Few samples of untied contractions


@dtypes
def test_few_samples_of_untied_contractions_have_passes_of_their_own(dtype: str) -> None:
    """Forward by one each, unless a block has room for all weights, and all gradients by three, whatever divides their
    rows."""
    limits = 90, 132, 232448
    small = plan(Chain.of(monarch((5, 6), (5, 3)), True, "relu"), dtype, FEW, Gpu.of(90)).passes
    assert [type(p) for p in small] == [MonarchKept]
    for spec in (monarch((16, 256), (688, 16), rank=16), monarch((7, 470), (470, 5), rank=9)):
        for batch in BATCHES:
            passes = plan(Chain.of(spec, True, "relu"), dtype, batch, Gpu.of(90)).passes
            found = [isinstance(p, Few) for p in passes]
            assert all(found) if batch <= few.MOST_SAMPLES else batch < BATCHES[-1] or not any(found)
            if all(found):
                (first, second) = passes
                assert first.first and not first.last and not second.first and second.last
        chain = replace(Chain.of(spec, False, "identity"), backward=True)
        text = chain.tf32_text if dtype == "tf32" else chain.text
        memory = dtype.replace("tf32", "float32")
        assert has_plan(text, memory, *limits, batch_class=0)
        if has_plan(text, memory, *limits):
            found_of_many = plan(chain, dtype, BATCHES[-1], Gpu.of(90)).passes
            assert any(isinstance(p, (WholeWeight, MonarchPairs)) for p in found_of_many)


@pytest.mark.parametrize(("dtype", "arch"), [("float64", 90), ("float32", 89), ("bfloat16", 89), ("float64", 80)])
def test_high_ranks_are_not_multiplied_out_where_that_does_not_fit(dtype: str, arch: int) -> None:
    spec, gpu = monarch((8, 512), (512, 8), rank=512), Gpu.of(arch)
    assert all(p.shared <= gpu.shared for p in plan(chain_of(spec), dtype, BATCHES[-1], gpu).passes)
    chain = replace(Chain.of(spec, False, "identity"), backward=True)
    try:
        passes = plan(chain, dtype, BATCHES[-1], gpu).passes
    except PlanError:  # one contraction after the other
        return
    assert all(p.shared <= gpu.shared for p in passes)


def test_all_gradients_of_few_samples_go_through_scratch() -> None:
    spec = monarch((16, 256), (688, 16), rank=16)
    chain = replace(Chain.of(spec, False, "identity"), backward=True)
    found = plan(chain, "bfloat16", FEW, Gpu.of(90))
    text = read_text(found.text())
    assert [(p.read, p.written) for p in text.passes] == [("x", "s2"), ("x", "s0"), ("s0", "y")]
    features, state = 4096 + 4096 + 11008, 4096
    assert text.scratch == (8 * state * 2, 0, 64 * features * 2) and text.chunk == 0
    assert all(p.blocks_per_processor == 1 and p.units_per_block > 64 for p in text.passes)

    # Of some hundreds a buffer has all that the first pass makes of each, padded to eight.
    some = read_text(plan(replace(chain, few=True), "bfloat16", SOME, Gpu.of(90)).text())
    assert [(p.read, p.written) for p in some.passes] == [("x", "s1"), ("s1", "s0"), ("s0+s1@2", "y")]
    of_state, of_features, sums = some.scratch
    assert sums == 0 and 65 * of_state >= 72 * state * 2 and 65 * of_features >= 72 * features * 2
    assert all(p.blocks_per_processor == 0 and p.units_per_block <= 64 for p in some.passes)
    with pytest.raises(PlanError):
        plan(replace(chain, few=True), "bfloat16", BATCHES[-1], Gpu.of(90))


def test_weights_go_by_where_groups_of_a_monarch_layer_are_few() -> None:
    chain = Chain.of(monarch((4, 192), (192, 4), rank=48), True, "identity")
    (found,) = plan(chain, "bfloat16", BATCHES[-1], Gpu.of(90)).passes
    assert isinstance(found, MonarchThrough) and found.fits and found.shared <= found.gpu.shared
    x, first, second = (line.split() for line in found.maps)
    assert x[1:7] == ["u16", "192", "4", "1", "1", "1"] and x[-5:] == ["64", "1", "64", "1", "1"]
    assert first[2:7] == ["192", "48", "4", "4", "1"] and first[-5:] == ["64", "48", "2", "1", "1"]
    assert second[2:7] == ["192", "192", "4", "1", "1"] and second[-5:] == ["64", str(found.n), "1", "1", "1"]
    for p, groups, rank in ((190, 4, 48), (192, 6, 32), (192, 4, 40), (192, 4, 80)):
        other = Chain.of(monarch((4, p), (192, groups), rank=rank), True, "identity")
        assert not list(monarch_through.tilings(other, "bfloat16", BATCHES[-1], Gpu.of(90)))


@pytest.mark.parametrize(
    ("spec", "dtype", "backward"),
    [
        (monarch((25, 48), (24, 2), rank=14), "bfloat16", False),  # 67 us on an H100, 198 at once
        (monarch((4, 4), (40, 4), rank=1), "float32", False),
        (monarch((4, 80), (8, 4), rank=3), "float16", True),  # 68 us, 112
        (monarch((17, 88), (88, 17), rank=29), "float32", True),  # 1455 us, 3948
    ],
)
def test_what_is_faster_multiplied_out_is(spec: LayerSpec, dtype: str, backward: bool) -> None:
    chain = replace(Chain.of(spec, False, "identity"), backward=backward)
    passes = plan(chain, dtype, BATCHES[-1], Gpu.of(90)).passes
    assert any(isinstance(p, WholeWeight) for p in passes)


@pytest.mark.parametrize(
    ("batch", "features", "dtype"),
    [
        (1024, 16384, "bfloat16"),
        (4096, 3072, "bfloat16"),
        (25088, 768, "bfloat16"),
        (16384, 14336, "bfloat16"),
        (192, 344064, "bfloat16"),
        (59, 851968, "bfloat16"),
        (11044, 7160, "float16"),
        (2600, 15169, "float32"),
        (9656, 368, "float32"),
    ],
)
def test_sums_alone_keep_memory_busy(batch: int, features: int, dtype: str) -> None:
    """What memory gives in 0.7 us, of all multiprocessors, is on its way at once, with room."""
    found = columns.tile(Chain((), sums=features), dtype, batch, Gpu.of(90))
    assert found is not None
    blocks = min(found.most, -(-batch // found.units_per_block)) * found.tiles
    waiting = min(batch / (found.folds * found.ways), found.each)
    assert min(blocks, 132 * found.blocks) * found.lanes * found.ways * waiting * 16 >= 132 * (40 << 10)


def test_sums_of_few_samples_are_waited_for_once() -> None:
    for features, dtype in ((768, "bfloat16"), (4096, "bfloat16"), (1024, "float32")):
        found = columns.tile(Chain((), sums=features), dtype, 64, Gpu.of(90))
        assert found is not None and found.is_whole and not found.finishing
        assert -(-64 // found.ways) <= found.each


@dtypes
def test_sums_of_some_samples_need_no_second_kernel(dtype: str) -> None:
    """Of few features or many, odd ones or not; but those of thousands of samples do."""
    for features in (13, 58, 144, 447, 1216, 2048):
        for batch, passes in ((FEW, 1), (SOME, 1), (BATCHES[-1], 2)):
            found = plan(Chain((), sums=features), dtype, batch, Gpu.of(90)).passes
            assert len(found) == passes


def test_a_turn_takes_longer_by_narrow_accesses() -> None:
    def us(rows: int, columns: int) -> float:
        return Turn(37, rows, columns, "float16", 3933, Gpu.of(90)).us

    assert us(37, 222) > 1.5 * us(40, 224) * (37 * 222) / (40 * 224)  # 2 and 16 bytes


def test_a_monarch_layer_whose_weights_are_large_is_two_products() -> None:
    for spec in (
        monarch((4, 192), (768, 4), rank=48),
        monarch((16, 256), (688, 16), rank=16),
        monarch((64, 64), (64, 64)),
    ):
        for dtype, batch in itertools.product(("tf32", "bfloat16"), BATCHES):
            passes = plan(Chain.of(spec, True, "gelu"), dtype, batch, Gpu.of(90)).passes
            by_itself = [p for p in passes if not isinstance(p, Turn)]
            assert len(by_itself) == 2 and not any(isinstance(p, MonarchChunks) for p in passes)


def test_a_monarch_layer_in_float_or_of_odd_sizes_is_two_kernels() -> None:
    for spec, dtype in (
        (monarch((32, 24), (64, 48), rank=4), "float32"),
        (monarch((32, 24), (64, 47), rank=4), "bfloat16"),
        (monarch((32, 23), (64, 48), rank=4), "bfloat16"),
    ):
        assert len(plan(Chain.of(spec, False, "relu"), dtype, BATCHES[-1], Gpu.of(90)).passes) >= 2


@pytest.mark.parametrize("dtype", ["float64", "float32", "tf32", "bfloat16"])
def test_gradients_at_once_need_no_more_memory_than_they_are_worth(dtype: str) -> None:
    """Of few samples blocks write their sums side by side; those of a part of a longer chain would take gigabytes."""
    for outer in (1, 16, 64):
        part = Chain((Contraction(1, outer * 128, 128, 128, 1, True), Contraction(0, outer, 128, 128, 128, True)))
        try:
            found = plan(replace(part, backward=True, tf32=dtype == "tf32"), dtype, FEW, Gpu.of(90))
        except PlanError:
            assert outer > 1
        else:
            assert max(found.scratch) <= 64 << 20


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_what_has_too_many_groups_is_refused_in_words(dtype: str) -> None:
    """All gradients of this layer at once: of its first weight alone there would be more tiles than a grid has rows."""
    gpu = Gpu.of(90)
    for batch in BATCHES[2:]:
        with pytest.raises(PlanError, match="no pass makes"):
            plan(Chain.parse("untied 1 128 200 800 1; untied 0 1 512 128 200; backward"), dtype, batch, gpu)
        assert plan(Chain.parse("untied 0 1 512 128 200; gradient"), dtype, batch, gpu).passes
