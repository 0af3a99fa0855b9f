"""Stacks of dense layers that clusters of blocks share out: right results without a race, by tests/emulator, and what
the compilers make of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from compiled import UsageOf
from emulator.driver import Emulator
from oracle import kronecker
from test_emulator import check_stack, check_states, drawing, drawn_tensors, stack_of
from test_resident_stack import INTO_INFINITIES, MOST_SPILLED, OPTIONS, check_infinities, dense

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels import batches
from factorlayer.kernels.stack.stack_cluster import StackCluster, tile, tilings
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan

SMALL, MEDIUM, LARGE = batches.FEW, batches.SOME, batches.BATCHES[-1]
HOPPER, AMPERE = Gpu.of(90), Gpu.of(80)


def tiled(layers: list[Chain], dtype: str, states: bool = False, **fields: int) -> Plan:
    """The first tiling that has these fields."""
    found = tilings(layers, dtype, LARGE, replace(HOPPER, sms=2 * fields.get("cluster", 2)), states)
    planned = next(p for p in found if all(getattr(p, name) == value for name, value in fields.items()))
    return Plan(layers[0], dtype, LARGE, planned.gpu, (planned,))


# Layers of odd and even number, widths that 8 divides and not, shares of which the last block has less or nothing, a
# single feature, batches that end within a tile and go through several of them
CASES = [
    ([1, 73, 59, 1], "float32", "elu", 70, {"cluster": 2, "units": 16, "warps": 4}),
    ([10, 59, 8], "float64", "silu", 70, {"cluster": 4, "units": 16, "warps": 4}),
    ([48, 24, 40, 8, 16], "float32", "learned", 37, {"cluster": 8, "units": 16, "warps": 8}),
    ([13, 45, 5], "tf32", "sigmoid", 150, {"cluster": 2, "units": 32, "warps": 4}),
    ([1, 59, 73, 3], "bfloat16", "gelu", 70, {"cluster": 4, "units": 32, "warps": 4}),
    ([20, 20, 20], "float16", "relu", 1, {"cluster": 2, "units": 16, "warps": 8}),
    ([264, 100, 36, 260], "bfloat16", "tanh", 40, {"cluster": 8, "units": 16, "warps": 4}),
    ([5, 1, 1, 3], "float32", "sine", 100, {"cluster": 4, "units": 16, "warps": 4}),
    ([40, 130, 130, 7], "tf32", "silu", 200, {"cluster": 4, "units": 64, "warps": 16}),
]


@pytest.mark.parametrize(("widths", "dtype", "activation", "batch", "tiling"), CASES, ids=str)
def test_is_right_and_keeps_samples_apart(
    widths: list[int], dtype: str, activation: str, batch: int, tiling: dict[str, int], emulator: Emulator
) -> None:
    layers = stack_of(widths, dtype, activation, activation)
    check_stack(tiled(layers, dtype, **tiling), layers, batch, emulator)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_alike_are_terms_of_one(dtype: str, count: int, emulator: Emulator) -> None:
    layers = [replace(layer, bias=True) for layer in stack_of([9, *[20] * count, 7], dtype, "tanh")]
    found = tiled(layers, dtype, cluster=2, units=16, warps=4)
    (planned,) = found.passes
    assert isinstance(planned, StackCluster) and [len(run) for run in planned.alike] == [1, count - 1, 1]
    check_stack(found, layers, 100, emulator)


@pytest.mark.parametrize(
    ("widths", "dtype", "activation", "batch"),
    [
        ([1, 73, 20, 3], "float32", "elu", 40),
        ([10, 33, 8], "float64", "gelu", 19),
        ([13, 45, 64, 5], "tf32", "learned", 70),
        ([16, *[23] * 4, 1, 7], "bfloat16", "relu", 70),
    ],
    ids=str,
)
def test_states_are_stored(widths: list[int], dtype: str, activation: str, batch: int, emulator: Emulator) -> None:
    layers = stack_of(widths, dtype, activation, "relu")
    check_states(tiled(layers, dtype, True, cluster=4, units=16, warps=4), layers, batch, emulator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_what_is_no_number_are_pytorchs(dtype: str, emulator: Emulator) -> None:
    layers = stack_of(INTO_INFINITIES, dtype, "sigmoid")
    check_infinities(tiled(layers, dtype, cluster=2, units=16, warps=4), layers, emulator)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    });\n    sync_cluster();", "    });\n    Base::sync();", "race: a"),  # behind a layer
        ("from = to, to = c.other(to);", "from = to;", "race: a"),  # a state in the place of the one that is read
        ("u32 to = state();\n    ROLL", "ROLL", "race: a"),  # a tile that begins where the last one's end is read
    ],
)
def test_what_is_missing_is_found(old: str, new: str, said: str, emulator: Emulator) -> None:
    layers = [replace(layer, bias=True) for layer in stack_of([9, 20, 20, 20, 7], "float32", "tanh")]
    found = tiled(layers, "float32", cluster=2, units=16, warps=4)
    changes = {old: new}
    if "ROLL" in old:
        changes["Base::sync();\n      Pass::stages"] = "Base::sync();\n      u32 to = state();\n      Pass::stages"
    draw = drawing("float32")
    x, tensors = draw(100, 9), drawn_tensors(layers, draw)
    _, errors = emulator.run(found, emulator.compile(found, changes), x, tensors, None, blocks=1)
    assert any(said in error for error in errors), errors


def test_what_does_not_fit_or_is_another_kind_has_no_kernel() -> None:
    wide = dense(*[512] * 8)
    assert tile(wide, "float32", LARGE, HOPPER) is None and tile(wide[:2], "bfloat16", LARGE, HOPPER)
    assert tile(dense(8, 16, 8), "float32", LARGE, AMPERE) is None, "it has no clusters"
    assert tile(dense(8, 16), "float32", LARGE, HOPPER) is None, "a layer has no state to exchange"
    assert tile(dense(*[8] * 40), "float64", LARGE, HOPPER) is None, "a kernel is not given so many tensors"
    factors = Chain.of(kronecker((3, 5), (4, 4)), True, "relu")
    assert tile((*dense(8, 16), factors), "float32", LARGE, HOPPER) is None


@pytest.mark.parametrize("batch", batches.BATCHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tilings_are_within_the_limits(dtype: str, batch: int) -> None:
    for states in (False, True):
        found = list(tilings(dense(1, 273, 159, 8), dtype, batch, HOPPER, states))
        assert found and all(plan.shared <= HOPPER.shared and plan.threads <= 1024 for plan in found)
        assert all(plan.us_of(2 * batch) >= plan.us > 0 for plan in found)
        assert tile(dense(1, 273, 159, 8), dtype, batch, HOPPER, states) in found


COMPILED = [
    ((1, 273, 273, 1), "elu", "float32"),
    ((48, 512, 256, 128, 12), "tanh", "bfloat16"),
    ((10, 159, 159, 8), "silu", "float64"),
    ((83, 206, 206, 206, 70), "softplus", "tf32"),
]


@pytest.mark.parametrize(("widths", "activation", "dtype"), COMPILED, ids=str)
def test_compiles_without_a_spill(widths: tuple[int, ...], activation: str, dtype: str, usage_of: UsageOf) -> None:
    for batch in batches.BATCHES:
        planned = tile(dense(*widths, activation=activation), dtype, batch, HOPPER)
        assert planned is not None
        usage = usage_of(planned.source("kernel"), "kernel", HOPPER.architecture, OPTIONS)
        assert usage.stored <= (MOST_SPILLED if dtype == "float64" else 0), usage


def test_shares_of_a_layer_are_all_of_it() -> None:
    for widths, cluster in itertools.product(([3, 17, 9, 1], [64, 100, 8]), (2, 4, 8)):
        for planned in tilings(dense(*widths), "float32", LARGE, HOPPER):
            if planned.cluster == cluster:
                assert all(stage.q * cluster >= q for stage, (_, q) in zip(planned.plain, planned.sizes, strict=True))
