"""kernels/stack/dense_streamed.py: which stacks stream their weights, and that what they lie in holds them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from oracle import kronecker
from test_plan import LANES, conflicts

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES
from factorlayer.kernels.stack.dense import Dense
from factorlayer.kernels.stack.dense_streamed import LEAST_SLOTS, DenseStreamed, WeightChunks, tile
from factorlayer.kernels.stack.stack_cluster import StackCluster
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import PlanError
from factorlayer.plan.planner import plan_stack
from factorlayer.plan.schemes import schemes

HOPPER = Gpu.of(90)
WIDTHS = [
    (63, *[256] * 8, 4),
    (48, 512, 256, 128, 12),
    (13, 512, 256, 128),
    (196, 384, 196),
    (1, 300, 1),
    (256, 512, 10),
    (100, 456, 130, 7),
    (33, 130, 600),
]
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])


def dense(*widths: int, activation: str = "relu") -> tuple[Chain, ...]:
    return tuple(Chain.of(kronecker((p,), (q,)), True, activation) for p, q in itertools.pairwise(widths))


@dtypes
@pytest.mark.parametrize("widths", WIDTHS[:4], ids=str)
def test_only_hopper_streams_and_only_what_it_cannot_hold(widths: tuple[int, ...], dtype: str) -> None:
    *_, found = plan_stack(dense(*widths), dtype, BATCHES[-1], HOPPER).passes
    assert isinstance(found, DenseStreamed) and "weights streamed: " in str(found)
    for batch in BATCHES[:2]:  # few samples may be shared out by clusters
        *_, found = plan_stack(dense(*widths), dtype, batch, HOPPER).passes
        assert isinstance(found, DenseStreamed | StackCluster)
    for arch in (80, 89, 100, 120):
        assert tile(dense(*widths), dtype, BATCHES[-1], Gpu.of(arch)) is None
    for arch in (80, 89):
        with pytest.raises(PlanError, match="no pass takes all layers"):
            plan_stack(dense(*widths), dtype, BATCHES[-1], Gpu.of(arch))
    (small,) = plan_stack(dense(32, 64, 64, 16), dtype, BATCHES[-1], HOPPER).passes
    assert type(small) is Dense


@dtypes
@pytest.mark.parametrize("widths", WIDTHS[:4], ids=str)
def test_states_are_stored_by_the_same_kernel(widths: tuple[int, ...], dtype: str) -> None:
    """With their bytes in what it is predicted to take; behind the tensors are theirs."""
    for batch in BATCHES:
        plain, found = (tile(dense(*widths), dtype, batch, HOPPER, states=s) for s in (False, True))
        assert plain and found and ", states between them stored, " in str(found)
        assert found.us >= plain.us
        places = [found.struct(i)["STATE"] for i in range(len(widths) - 1)]
        assert places == [-1, *range(found.tensors, found.tensors + len(widths) - 2)]
    (small,) = plan_stack(dense(32, 64, 64, 16), dtype, BATCHES[-1], HOPPER, states=True).passes
    assert type(small) is Dense
    many = dense(*[20] * 25)
    assert tile(many, dtype, 4096, HOPPER) and tile(many, dtype, 4096, HOPPER, states=True) is None


def test_a_function_of_many_instructions_takes_longer() -> None:
    us = [plan_stack(dense(*WIDTHS[3], activation=name), "bfloat16", 49152, HOPPER).us for name in ("relu", "tanh")]
    assert us[1] > us[0]


def test_what_does_not_fit_or_is_another_kind_is_not_streamed() -> None:
    wide, small = dense(768, 3072, 768), dense(300, 300, 300)
    assert tile(wide, "bfloat16", 4096, HOPPER) is None
    assert (
        tile(small, "bfloat16", 4096, HOPPER)
        and tile(small, "bfloat16", 4096, replace(HOPPER, shared=64 << 10)) is None
    )
    assert tile(small, "float32", 4096, HOPPER) is None and tile(small, "float64", 4096, HOPPER) is None
    assert tile(dense(*[20] * 40), "bfloat16", 4096, HOPPER) is None, "a kernel is not given so many tensors"
    factors = Chain.of(kronecker((30, 10), (30, 10)), True, "relu")
    assert tile((*small, factors), "bfloat16", 4096, HOPPER) is None
    assert tile((*small, replace(small[0], rank=2)), "bfloat16", 4096, HOPPER) is None


@dtypes
@pytest.mark.parametrize("widths", [(63, 256, 256, 4), (63, 256)], ids=str)
def test_each_way_to_run_a_streamed_stack_has_all_its_passes(widths: tuple[int, ...], dtype: str) -> None:
    text = " | ".join(layer.tf32_text if dtype == "tf32" else layer.text for layer in dense(*widths))
    ways = [scheme.plan.passes for scheme in schemes(text, "float32" if dtype == "tf32" else dtype, 2, HOPPER)]
    streamed = [passes for passes in ways if isinstance(passes[-1], DenseStreamed)]
    assert streamed
    for *before, last in streamed:
        assert before == ([WeightChunks(last)] if dtype == "tf32" else [])


@dtypes
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_all_columns_have_a_place(widths: tuple[int, ...], dtype: str) -> None:
    """In chunks that a slot holds, sums that a thread has, and states that overlap where one replaces the other."""
    layers, found = dense(*widths), 0
    for groups, rows in itertools.product((1, 2), (64, 128, 256)):
        plan = DenseStreamed(layers, dtype, groups, HOPPER, rows=rows)
        if plan.slots < LEAST_SLOTS:
            continue
        found += 1
        assert plan.shared <= HOPPER.shared
        told = [plan.struct(i) for i in range(len(layers))]
        for (p, q), c, here in zip(plan.sizes, plan.shapes, told, strict=True):
            assert c.k >= p and c.k % plan.step == 0 and c.all >= q
            assert c.n * c.parts <= 256 and c.n * c.slabs <= plan.slot_rows and c.n % 16 == 0
            assert c.passes == 1 or c.n * c.parts % plan.slab == 0
            if here["LAST"]:
                assert c.n % (64 // plan.size) == 0
        for before, here, c in zip(told, told[1:], plan.shapes, strict=False):
            read, written = (
                range(int(at), int(at) + 8192 * -(-n // plan.slab))
                for at, n in ((before["from"], c.k), (before["to"], c.all))
            )
            assert here["from"] == before["to"] and written.stop <= plan.state_places[-1]
            assert (max(read.start, written.start) < min(read.stop, written.stop)) == before["IN_PLACE"]
            assert written.start >= plan.state_places[1], "x has a place of its own"
            assert int(here["K"]) <= c.all, "padding is written as well"
    assert found


@pytest.mark.parametrize("size", [2, 4])
def test_states_are_written_without_bank_conflicts(size: int) -> None:
    """dense_streamed.cuh: hand_on"""
    for piece in range(8):
        assert conflicts([128 * g + (g ^ piece) * 16 + t * 4 for _, g, t in LANES], 4) == 1
