"""kernels/product/wide.py, of groups that take turns in y, whose results go through shared memory: that they compile,
and, on a CPU, that they are right."""

from __future__ import annotations

import pytest
from compiled import UsageOf
from emulator.driver import Emulator
from test_odd_rows import GPU, OPTIONS, is_right_and_keeps_samples_apart, tensors_of

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.product import wide
from factorlayer.kernels.product.streamed import products
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import Plan

# Consumers, runs of a tile, groups that are held, and of a tile, whether the weight is shifted
Tiling = tuple[int, int, int, int, bool]


def plan_of(text: str, dtype: str, batch: int, processors: int, tiling: Tiling) -> Plan:
    chain, gpu = Chain.parse(text), Gpu(90, processors, 232448)
    (product,) = products(chain, dtype)
    tilings = {
        (p.consumers, p.runs.turns, p.held, p.groups, p.shifted): p for p in wide.tilings(product, batch, gpu) if p.runs
    }
    assert tiling in tilings, sorted(tilings)
    return Plan(chain, dtype, batch, gpu, with_halves((tilings[tiling],)))


# Runs of 1 to 62 elements of a group, odd and even ones; all groups at once, or some and then others with what is left
# of sectors; groups that are left in the last tile, runs that are, and columns; rows that begin anywhere in a piece, of
# x as well; several slow groups; several slabs; fewer rows than a tile; other orders of the weight's rows.
CASES: list[tuple[str, str, int, int, Tiling]] = [
    ("untied 0 7 40 63 1; turn 1 63 7", "bfloat16", 133, 4, (1, 7, 2, 7, False)),
    ("untied 0 7 40 63 1; turn 1 63 7", "bfloat16", 133, 4, (1, 4, 2, 4, False)),
    ("untied 0 7 40 63 1; turn 1 63 7", "float16", 203, 4, (2, 7, 7, 7, False)),
    ("untied 0 7 40 63 1; turn 1 63 7", "float16", 203, 4, (2, 4, 7, 7, False)),
    ("untied 0 13 37 55 1; relu; turn 1 65 11", "float16", 133, 4, (1, 6, 4, 7, True)),
    ("untied 0 13 37 55 1; turn 1 65 11", "bfloat16", 203, 4, (2, 11, 4, 13, True)),
    ("untied 0 13 69 55 1; turn 1 65 11", "bfloat16", 61, 4, (1, 11, 4, 7, True)),
    ("untied 0 6 72 46 1; relu; turn 2 69 2", "bfloat16", 133, 4, (1, 2, 1, 3, False)),
    ("untied 0 6 72 46 1; turn 2 69 2", "bfloat16", 133, 4, (1, 1, 2, 3, False)),
    ("untied 0 5 34 186 1; turn 1 310 3", "float16", 133, 4, (1, 3, 1, 5, True)),
    ("untied 0 5 34 186 1; turn 1 310 3", "float16", 203, 4, (2, 2, 2, 5, False)),
    ("untied 0 9 136 60 1; turn 1 108 5", "bfloat16", 203, 4, (2, 5, 2, 5, False)),
    ("untied 0 9 136 60 1; turn 1 108 5", "float16", 133, 4, (1, 5, 4, 5, False)),
    ("turned; untied 0 1 40 39 6; bias; relu", "bfloat16", 133, 4, (1, 39, 6, 6, False)),
    ("turned; untied 0 2 45 50 3; bias", "float16", 203, 4, (2, 25, 3, 3, True)),
    ("turned; untied 0 1 72 90 5; relu; turn 2 45 5", "bfloat16", 133, 4, (1, 2, 2, 5, False)),
    ("turned; untied 0 2 45 30 5; turn 4 15 5", "float16", 203, 4, (2, 2, 2, 5, True)),
]


@pytest.mark.parametrize(("text", "dtype", "batch", "processors", "tiling"), CASES, ids=str)
def test_is_right_in_any_order_and_keeps_samples_apart(
    text: str, dtype: str, batch: int, processors: int, tiling: Tiling, emulator: Emulator
) -> None:
    found = plan_of(text, dtype, batch, processors, tiling)
    is_right_and_keeps_samples_apart(found, dtype, batch, processors, emulator)


STORE, KEEP = "      __syncwarp();\n      runs.store(", "      __syncwarp();\n      if constexpr (Runs"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STORE, STORE.partition("\n")[2]),
        (KEEP, KEEP.partition("\n")[2]),
        ("columns), __syncwarp();", "columns);"),
    ],
)
def test_finds_what_is_planted(old: str, new: str, emulator: Emulator) -> None:
    found = plan_of("untied 0 7 40 63 1; turn 1 63 7", "bfloat16", 133, 1, (1, 7, 2, 7, False))
    x, weight, _ = tensors_of(found.chain, "bfloat16", 133)
    _, errors = emulator.run(found, emulator.compile(found, {old: new}), x, [weight], None, 1)
    assert any("race" in error for error in errors), errors


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("untied 0 58 183 522 1; turn 1 522 58", "float16"),
        ("untied 0 11 217 682 1; turn 1 682 11", "bfloat16"),
        ("turned; untied 0 1 45 250 6; bias; gelu", "bfloat16"),
        ("turned; untied 0 1 48 250 6; bias; gelu", "bfloat16"),
    ],
)
def test_the_largest_tilings_compile(text: str, dtype: str, usage_of: UsageOf) -> None:
    """Without products one after the other, and all in registers."""
    (product,) = products(Chain.parse(text), dtype)
    tilings = [p for p in wide.tilings(product, 16384, GPU) if p.runs]
    for tiled in sorted(tilings, key=lambda t: (t.rows * t.columns, t.groups))[-3:]:
        usage = usage_of(tiled.source("kernel"), "kernel", "sm_90a", OPTIONS)
        assert "C75" not in usage.notes, usage
        assert usage.frame == 0, f"{tiled}: {usage}"
