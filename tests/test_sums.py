"""Sums of Kronecker products by the families of two factors: several terms in a pass, and passes that add to the
gradient of x which those before have left. By the emulator, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import test_emulator
from emulator.driver import Emulator
from oracle import kronecker
from test_chain_backward import check
from test_emulator import Case, all_gradients_of
from test_inputs_emulated import check_gradients

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import BATCHES
from factorlayer.kernels.kronecker.warpgroups import (
    ByWarpgroups,
    Pair16Backward,
    Pair16LargeBackward,
    PairSplitBackward,
)
from factorlayer.kernels.work import inputs_of
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.cuts import around, cuts, modes_of
from factorlayer.plan.plan import Plan
from factorlayer.plan.planner import plan
from factorlayer.plan.registry.family import ways
from factorlayer.plan.registry.kronecker import OF_FACTORS, PAIR

MANY = BATCHES[-1]
HOPPER = replace(Gpu.of(90), sms=2)

# A family, a layer, its dtype, and how many terms each of its passes takes
FAMILIES = [
    (Pair16Backward, kronecker((24, 32), (48, 64), rank=3), "bfloat16", [3]),
    (Pair16Backward, kronecker((64, 64), (64, 64), rank=3), "float16", [1, 2]),
    (Pair16Backward, kronecker((25, 24), (30, 40), rank=2), "float16", [2]),
    (Pair16Backward, kronecker((3, 8, 24), (2, 12, 24), rank=5), "bfloat16", [2, 3]),
    (Pair16LargeBackward, kronecker((72, 80), (88, 128), rank=2), "bfloat16", [1, 1]),
    (PairSplitBackward, kronecker((24, 32), (40, 28), rank=2), "tf32", [1, 1]),
    (PairSplitBackward, kronecker((2, 12, 32), (4, 10, 28), rank=3), "float32", [1, 1, 1]),
]


def gradients_by(kind: type[ByWarpgroups], spec: LayerSpec, dtype: str, chain: Chain | None = None) -> Plan:
    """All gradients by a family."""
    chain = replace(chain or all_gradients_of(spec), tf32=dtype == "tf32")
    outer, _ = around(chain)
    found = ways(OF_FACTORS, modes_of(chain), outer, dtype, MANY, HOPPER, inputs=inputs_of(chain), rank=spec.rank)
    (passes,) = (way for way in found if isinstance(way[0], kind))
    return Plan(chain, dtype, MANY, HOPPER, passes)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "spec", "dtype", "terms"), FAMILIES, ids=str)
def test_all_gradients(
    kind: type[ByWarpgroups], spec: LayerSpec, dtype: str, terms: list[int], emulator: Emulator
) -> None:
    found = gradients_by(kind, spec, dtype)
    taken = [p.terms for p in found.passes if isinstance(p, ByWarpgroups)]
    assert [each.count for each in taken] == terms
    assert [each.first for each in taken] == [sum(terms[:i]) for i in range(len(terms))]
    check(spec, found, 5, emulator)


def test_of_an_x_that_is_two_tensors(emulator: Emulator) -> None:
    spec, inputs = kronecker((24, 32), (40, 64), rank=2), (520, 248)
    found = gradients_by(Pair16Backward, spec, "bfloat16", replace(all_gradients_of(spec), inputs=inputs))
    check_gradients(spec, inputs, found, 3, emulator)


@dataclass(frozen=True)
class ByPair(Case):
    """Forward by this family, whatever is faster."""

    @property
    def plan(self) -> Plan:
        chain = Chain.of(self.spec, True, self.activation)
        works = (works[0] for works in cuts(chain, self.dtype) if len(works) == 1)
        passes = next(filter(None, (PAIR.way(work, self.planned, HOPPER) for work in works)))
        return Plan(chain, self.dtype, self.planned, HOPPER, passes)


FORWARD = [
    ByPair(kronecker((24, 32), (48, 64), rank=3), "bfloat16", 5, MANY),
    ByPair(kronecker((64, 64), (64, 64), rank=5), "float16", 5, MANY),
    ByPair(kronecker((40, 56), (72, 88), rank=2), "bfloat16", 5, MANY),  # two parts of q1
    ByPair(kronecker((2, 12, 32), (4, 10, 32), rank=2), "bfloat16", 5, MANY),  # a weight that is a product
    ByPair(kronecker((24, 32), (40, 28), rank=3), "tf32", 5, MANY),
    ByPair(kronecker((100, 96), (80, 72), rank=2), "tf32", 5, MANY),  # several chunks
    ByPair(kronecker((24, 32), (40, 28), rank=2), "float32", 5, MANY),
]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case: ByPair, emulator: Emulator) -> None:
    test_emulator.test_is_right_in_any_order_and_keeps_samples_apart(case, emulator)


def test_products_of_half_precision_weights_are_not_summed() -> None:
    """Each term would need a factor of its own, which keeps products in the range."""
    chain = all_gradients_of(kronecker((4, 8, 48), (4, 8, 48), rank=2))
    outer, _ = around(chain)
    found = ways(OF_FACTORS, modes_of(chain), outer, "float16", MANY, HOPPER, rank=2)
    assert not [way for way in found if isinstance(way[0], Pair16Backward)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_sum_of_two_factors_gets(dtype: str) -> None:
    """Kernels of all terms, in both directions: one reads x and grad_y once for up to four terms."""
    spec, gpu = kronecker((48, 48), (48, 48), rank=3), Gpu.of(90)
    assert [type(p) for p in plan(Chain.of(spec, True, "relu"), dtype, MANY, gpu).passes] == [PAIR.makes[0]]
    first, *_ = plan(all_gradients_of(spec), dtype, MANY, gpu).passes
    assert isinstance(first, Pair16Backward) and first.terms.count == 3
