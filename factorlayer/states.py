"""How states of small tied factors lie in shared memory, such that few lanes meet in a bank: for csrc/engine/columns.cuh.

A thread takes columns of a mode, all its elements for one index of the others, as neighbouring threads do for neighbouring
indices; a product of the matrix unit takes eight elements of a mode and four columns at once. Doubles have 16 banks, and
half a warp's accesses are served together.
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
MOST_PADDING = 1.15  # times what a state has
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Of the columns of a mode: those of the last mode side by side, or, reversed, of the first; for threads, and for a
    product, in which four lanes take neighbours or columns far apart (spread)."""

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


def _columns(sizes: Sequence[int], strides: Int, mode: int, reverse: bool) -> Int:
    """Where the columns of a mode begin, a row for each way to lay the state out."""
    places = np.zeros((len(strides), 1), np.int64)
    for i in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        if i != mode:
            places = (places[:, :, None] + np.arange(sizes[i]) * strides[:, i, None, None]).reshape(len(strides), -1)
    return places


def _met(places: Int, there: Int) -> Int:
    """Accesses that half warps take: [ways, half warps, lanes], the lanes that are `there`."""
    ways, halves, lanes = places.shape
    rows = np.arange(ways * halves).reshape(ways, halves, 1) * (BANKS + 1)
    counts = np.bincount((rows + np.where(there, places % BANKS, BANKS)).ravel(), minlength=ways * halves * (BANKS + 1))
    return np.asarray(counts.reshape(ways, halves, BANKS + 1)[:, :, :BANKS].max(axis=2).sum(axis=1))


def by_threads(sizes: Sequence[int], strides: Int, mode: int, reverse: bool) -> Int:
    """Accesses to all elements."""
    columns = _columns(sizes, strides, mode, reverse)
    padded = np.pad(columns, ((0, 0), (0, -columns.shape[1] % BANKS)))
    there = np.arange(padded.shape[1]) < columns.shape[1]
    return sizes[mode] * _met(padded.reshape(len(strides), -1, BANKS), there.reshape(1, -1, BANKS))


def by_products(sizes: Sequence[int], strides: Int, mode: int, order: Order) -> Int:
    columns = _columns(sizes, strides, mode, order.product_reverse)
    count = columns.shape[1]
    fours = 2 * -(-count // 8)
    padded = np.pad(columns, ((0, 0), (0, 4 * fours - count)))
    there = np.arange(4 * fours) < count
    if order.spread:
        padded, there = padded.reshape(-1, 4, fours).swapaxes(1, 2), there.reshape(4, fours).T
    padded, there = padded.reshape(-1, fours, 1, 4), there.reshape(1, fours, 1, 4)
    total = np.zeros(len(strides), np.int64)
    for first in range(0, sizes[mode], 4):
        rows = np.arange(4)[:, None]
        both = padded + (first + rows) * strides[:, mode, None, None, None]
        present = there & (first + rows < sizes[mode])
        total += _met(both.reshape(len(strides), fours, 16), present.reshape(1, fours, 16))
    return total


def dense(sizes: tuple[int, ...]) -> State:
    """As memory has it."""
    return State(sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))))


def _nested(sizes: tuple[int, ...], modes: Sequence[int], pads: Sequence[int]) -> tuple[int, ...]:
    """Strides where modes lie in each other, the last one's elements side by side, with padding behind those before it."""
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
    further = [range(BANKS if count == 3 else 2)] * (count - 2)
    found = (
        _nested(sizes, modes, pads)
        for modes in itertools.permutations(range(count))
        for pads in itertools.product(range(BANKS), *further)
    )
    limit = MOST_PADDING * 8 * math.prod(sizes) + 16
    return [strides for strides in dict.fromkeys(found) if State(sizes, strides).bytes <= limit]


Table = dict[tuple[Order | None, Order | None], tuple[int, State]]


def _table(
    sizes: tuple[int, ...], before: Uses | None, behind: Uses | None, orders: Sequence[Order], slot: bool
) -> Table:
    """Of a state between contractions, or before the first or behind the last one: for each two orders the fewest accesses,
    and how it lies for these."""
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
    products: bool,
    in_memory_order: int,
    g_in_slot: bool,
) -> tuple[int, list[State], list[Order]]:
    """The states before, between and behind contractions, and the orders of these, with the fewest accesses, which are
    counted. One contraction's columns are in memory's order."""
    flags = (False, True)
    orders = [
        Order(*each)
        for each in itertools.product(flags, flags if products else (False,), flags if products else (False,))
    ]
    last = len(sizes) - 1
    best: dict[Order | None, tuple[int, list[State], list[Order]]] = {None: (0, [], [])}
    for i, size in enumerate(sizes):
        if i == last and not g_in_slot:
            table: Table = {(order, None): (0, dense(size)) for order in orders}
        else:
            table = _table(size, *uses[i], orders, i in (0, last))
        found: dict[Order | None, tuple[int, list[State], list[Order]]] = {}
        for (one, other), (cost, state) in table.items():
            if one not in best or (other is not None and i == in_memory_order and other.reverse):
                continue
            before, laid, chosen = best[one]
            if other not in found or before + cost < found[other][0]:
                found[other] = before + cost, [*laid, state], [*chosen, *([other] if other else [])]
        best = found
    return best[None]
