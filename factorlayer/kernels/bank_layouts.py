"""How states of small factors lie in shared memory, such that few lanes meet in a bank: for small_double.cuh.

A thread takes columns of a mode, all its elements for one index of the others, as neighbouring threads do for
neighbouring indices; a product of the matrix unit takes eight elements of a mode and four columns at once. Doubles have
16 banks, and half a warp's accesses are served together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_MODES = 4
BANKS = 16
ENOUGH = 12  # half warps, to tell how many meet
MOST_PADDING = 1.15  # times what a state has
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """An order of the columns of a mode: those of the last mode side by side, or, reversed, of the first; for threads,
    and for a product, in which four lanes take neighbours."""

    reverse: bool
    product_reverse: bool = False
    spread: bool = False

    def cuda(self) -> str:
        return f"Order<{str(self.reverse).lower()}, {str(self.product_reverse).lower()}, {str(self.spread).lower()}>"


@dataclass(frozen=True)
class State:
    """Sizes of its modes, and how far apart their elements are in doubles."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        doubles = sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True)) + 1
        return -(-doubles // 2) * 16

    def cuda(self) -> str:
        missing = MOST_MODES - len(self.sizes)
        return f"Strides<{', '.join(map(str, ((1,) * missing + self.sizes + (0,) * missing + self.strides)))}>"


@dataclass(frozen=True)
class Uses:
    """How often a state's columns of a mode are accessed by threads, and by products."""

    mode: int
    threads: int
    products: int


def _columns(sizes: Sequence[int], mode: int, reverse: bool, of: Int) -> Int:
    """The index of some of a mode's columns in every mode: [columns, modes]; beyond the last one -1."""
    others = [i for i in range(len(sizes)) if i != mode]
    shape = [sizes[i] for i in others]
    count = math.prod(shape)
    index = np.unravel_index(np.minimum(of, count - 1), shape[::-1] if reverse else shape)
    found = np.zeros((*of.shape, len(sizes)), np.int64)
    for i, each in zip(reversed(others) if reverse else others, index, strict=True):
        found[..., i] = each
    found[of >= count] = -1
    return found


def _met(columns: Int, strides: Int, rows: Int) -> Int:
    """Accesses that half warps take, for each way to lay a state out: of `rows` behind some columns' first elements,
    [half warps, lanes, modes]."""
    there = columns[:, :, 0] >= 0
    places = (columns.reshape(-1, columns.shape[2]) @ strides.T).T.reshape(len(strides), *there.shape)
    banks = np.where(there[:, :, None], (places[..., None] + rows[:, None, None, :]) % BANKS, BANKS)
    count = len(strides) * len(there)
    at = np.arange(count).reshape(len(strides), -1, 1, 1) * (BANKS + 1) + banks
    found = np.bincount(at.ravel(), minlength=count * (BANKS + 1)).reshape(len(strides), -1, BANKS + 1)
    return np.asarray(found[:, :, :BANKS].max(axis=2).sum(axis=1))


def by_threads(sizes: Sequence[int], strides: Int, mode: int, reverse: bool) -> Int:
    """Accesses to all elements, as some half warps tell."""
    halves = -(-math.prod(sizes) // (sizes[mode] * BANKS))
    some = np.arange(0, halves, max(1, halves // ENOUGH))
    columns = _columns(sizes, mode, reverse, some[:, None] * BANKS + np.arange(BANKS))
    met = _met(columns, strides, np.zeros((len(strides), 1), np.int64))
    return np.asarray(sizes[mode] * halves * met // len(some))


def by_products(sizes: Sequence[int], strides: Int, mode: int, order: Order) -> Int:
    fours = 2 * -(-math.prod(sizes) // (sizes[mode] * 8))
    some = np.arange(0, fours, max(1, fours // ENOUGH))
    of = np.arange(4) * fours + some[:, None] if order.spread else some[:, None] * 4 + np.arange(4)
    columns = _columns(sizes, mode, order.product_reverse, of)
    total = np.zeros(len(strides), np.int64)
    for rows, times in ((4, sizes[mode] // 4), (sizes[mode] % 4, 1)):
        if rows and times:
            total += times * fours * _met(columns, strides, strides[:, mode, None] * np.arange(rows)) // len(some)
    return total


def _nested(sizes: tuple[int, ...], modes: Sequence[int], pads: Sequence[int]) -> tuple[int, ...]:
    """Strides where modes lie in each other, the last one's elements side by side, with padding behind the others'."""
    strides, apart = [0] * len(sizes), 1
    for i, pad in zip(reversed(modes), (*reversed(pads), 0), strict=True):
        strides[i] = apart
        apart = apart * sizes[i] + pad
    return tuple(strides)


def _ways(sizes: tuple[int, ...], in_slot: bool) -> list[tuple[int, ...]]:
    """Strides: of what the copy engine brings, which can part runs that 16 bytes divide, or of any state."""
    count = len(sizes)
    if in_slot:
        pads = range(0, BANKS, 2) if math.prod(sizes[1:]) % 2 == 0 else range(1)
        return [_nested(sizes, range(count), (pad, *[0] * (count - 2))) for pad in pads]
    further = [each for each in itertools.product(range(2), repeat=count - 2) if sum(each) < 2]
    found = (
        _nested(sizes, modes, (outer, *pads))
        for modes in itertools.permutations(range(count))
        for outer, pads in itertools.product(range(BANKS) if count < MOST_MODES else (0, 1, 2, 4, 8), further)
    )
    limit = MOST_PADDING * 8 * math.prod(sizes) + 16
    return [strides for strides in dict.fromkeys(found) if State(sizes, strides).bytes <= limit]


Table = dict[tuple[Order | None, Order | None], tuple[int, State]]


def _table(
    sizes: tuple[int, ...], before: Uses | None, behind: Uses | None, orders: Sequence[Order], slot: bool
) -> Table:
    """Of a state between contractions, or before the first or behind the last one: for each two orders the fewest
    accesses, and how it lies for these."""
    strides = np.array(_ways(sizes, slot))
    costs: list[dict[Order | None, Int]] = []
    for uses in (before, behind):
        if uses is None:
            costs.append({None: np.zeros(len(strides), np.int64)})
            continue
        threads = {r: by_threads(sizes, strides, uses.mode, r) for r in {order.reverse for order in orders}}
        products = {
            (o.product_reverse, o.spread): by_products(sizes, strides, uses.mode, o) if uses.products else 0
            for o in orders
        }
        costs.append(
            {
                o: uses.threads * threads[o.reverse] + uses.products * products[o.product_reverse, o.spread]
                for o in orders
            }
        )
    bytes_of = np.array([State(sizes, tuple(way)).bytes for way in strides.tolist()])
    table: Table = {}
    for (one, left), (other, right) in itertools.product(costs[0].items(), costs[1].items()):
        total = left + right
        best = np.lexsort((bytes_of, total))[0]
        table[one, other] = int(total[best]), State(sizes, tuple(strides[best].tolist()))
    return table


def lay_out(
    sizes: Sequence[tuple[int, ...]],
    uses: Sequence[tuple[Uses | None, Uses | None]],
) -> tuple[int, list[State], list[Order]]:
    """The states before, between and behind contractions, and the orders of these, with the fewest accesses, which are
    counted. The first contraction's columns are in memory's order."""
    orders = [Order(*each) for each in itertools.product((False, True), repeat=3)]
    last = len(sizes) - 1
    best: dict[Order | None, tuple[int, list[State], list[Order]]] = {None: (0, [], [])}
    for i, size in enumerate(sizes):
        table = _table(size, *uses[i], orders, i in (0, last))
        found: dict[Order | None, tuple[int, list[State], list[Order]]] = {}
        for (one, other), (cost, state) in table.items():
            if one not in best or (other is not None and i == 0 and other.reverse):
                continue
            before, laid, chosen = best[one]
            if other not in found or before + cost < found[other][0]:
                found[other] = before + cost, [*laid, state], [*chosen, *([other] if other else [])]
        best = found
    return best[None]
