"""A chain of tied contractions cut into passes: which neighbouring factors are taken as one, and what each pass does.

Nothing here knows a GPU or a family of kernels: works.py finds tilings for the works that are made here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from factorlayer.kernels.weights import can_be_made
from factorlayer.kernels.work import Mode, Work, inputs_of
from factorlayer.maths.chain import Chain
from factorlayer.plan.plan import PlanError

# Up to what size neighbours are taken as one, of few modes: multiply-adds of longer ones take more time than
# what passes move. Of more modes from the last one on, as far as each of some lengths goes
LONGEST_MERGED = {"float64": 64, "float32": 128, "tf32": 256, "bfloat16": 256, "float16": 256}
LENGTHS = 64, 16, 1
MOST_MODES, MOST_PASSES = 6, 6  # of which every way to cut is tried


def cuts(chain: Chain, dtype: str) -> Iterator[list[Work]]:
    """Ways to cut the chain into passes: fewer passes first, more only while nothing fits."""
    if not all(c.tied for c in chain.contractions):
        return
    for number, modes in enumerate(mergings(chain, dtype)):
        if number and len(modes) > MOST_MODES:
            continue
        few = len(modes) <= MOST_MODES
        for count in range(1, (min(len(modes), MOST_PASSES) if few else len(modes)) + 1):
            found: list[list[list[int]]] = []
            for order in _orders(modes, chain.rank):
                found += parts_of(order, count) if few or count == 1 else [_even(order, count)]
            if few:
                found += (parts for parts in _of_neighbours(modes, chain.rank, count) if parts not in found)
            yield from (works_of(chain, dtype, modes, parts) for parts in found)


def _of_neighbours(modes: tuple[Mode, ...], rank: int, count: int) -> Iterator[list[list[int]]]:
    """Cuts into `count` passes of neighbouring modes each, so that a unit of a pass has these modes and no others."""
    order = order_of(modes)
    for runs in parts_of(list(range(len(modes))), count):
        for ways in _orders(as_one(modes, runs), rank):
            yield [[i for i in order if i in runs[way]] for way in ways]


def _orders(modes: tuple[Mode, ...], rank: int) -> list[list[int]]:
    """The orders of contractions to try: the one with fewest multiply-adds, and for a sum of products its reverse as
    well, since the last contraction takes all terms at once, with the weights of all."""
    order = order_of(modes)
    return [order, order[::-1]] if rank > 1 and len(order) > 1 else [order]


def mergings(chain: Chain, dtype: str) -> list[tuple[Mode, ...]]:
    """The ways to take neighbouring modes as one, each as the modes that it leaves."""
    modes = modes_of(chain)
    if len(modes) > MOST_MODES:
        return list(dict.fromkeys(_merged(modes, longest, dtype) for longest in LENGTHS))
    every = range(len(modes))
    found = [as_one(modes, runs) for count in range(1, len(modes) + 1) for runs in parts_of(list(every), count)]
    return [way for way in found if all(_may_be_one(mode, dtype) for mode in way)]


def as_one(modes: tuple[Mode, ...], runs: list[list[int]]) -> tuple[Mode, ...]:
    """The modes that are left if each run of neighbours is taken as one."""
    return tuple(Mode(tuple(part for i in run for part in modes[i].parts)) for run in runs)


def _may_be_one(mode: Mode, dtype: str) -> bool:
    return len(mode.parts) == 1 or (max(mode.p, mode.q) <= LONGEST_MERGED[dtype] and can_be_made(mode, dtype))


def modes_of(chain: Chain) -> tuple[Mode, ...]:
    """The modes of a Kronecker product, slowest first."""
    by_weight = sorted(chain.contractions, key=lambda c: c.weight)
    sizes = [c.p for c in by_weight]
    outer, inner = around(chain)
    for c in chain.contractions:
        if (c.outer, c.inner) != (outer * math.prod(sizes[: c.weight]), inner * math.prod(sizes[c.weight + 1 :])):
            raise PlanError(f"the contractions of {chain.text!r} are not those of a Kronecker product")
        sizes[c.weight] = c.q
    return tuple(Mode(((c.weight, c.q, c.p),)) for c in by_weight)


def around(chain: Chain) -> tuple[int, int]:
    """The sizes of the state before and behind the modes that a chain contracts, which may be a part of a longer
    chain."""
    first = chain.contractions[0]
    sizes = {c.weight: c.p for c in chain.contractions}
    before = math.prod(p for weight, p in sizes.items() if weight < first.weight)
    behind = math.prod(p for weight, p in sizes.items() if weight > first.weight)
    return first.outer // before, first.inner // behind


def _merged(modes: tuple[Mode, ...], longest: int, dtype: str) -> tuple[Mode, ...]:
    """The modes with neighbours taken as one, from the last on, while the product is at most `longest`."""
    found = [modes[-1]]
    for mode in reversed(modes[:-1]):
        both = Mode(mode.parts + found[0].parts)
        if max(both.p, both.q) <= longest and can_be_made(both, dtype):
            found[0] = both
        else:
            found.insert(0, mode)
    return tuple(found)


def order_of(modes: tuple[Mode, ...]) -> list[int]:
    """The order of contractions with fewest multiply-adds, as in spec.py; last modes first among equals."""
    return sorted(reversed(range(len(modes))), key=lambda i: 1 / modes[i].p - 1 / modes[i].q)


def _even(order: list[int], count: int) -> list[list[int]]:
    bounds = [len(order) * i // count for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def parts_of(order: list[int], count: int) -> Iterator[list[list[int]]]:
    for cuts in itertools.combinations(range(1, len(order)), count - 1):
        bounds = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(bounds)]


def works_of(chain: Chain, dtype: str, modes: tuple[Mode, ...], parts: list[list[int]]) -> list[Work]:
    sizes, works = [mode.p for mode in modes], []
    outer, inner = around(chain)
    for number, part in enumerate(parts):
        first, last = min(part), max(part) + 1
        begins, final = number == 0, number == len(parts) - 1
        works.append(
            Work(
                outer=outer * math.prod(sizes[:first]),
                sizes=tuple(sizes[first:last]),
                inner=inner * math.prod(sizes[last:]),
                steps=tuple((i - first, modes[i]) for i in part),
                dtype=dtype,
                rank=chain.rank if final else 1,
                terms=1 if final else chain.rank,
                apart=chain.rank > 1 and not begins,
                bias=chain.bias and final,
                activation=chain.activation if final else "identity",
                scalars=len(chain.contractions),
                inputs=inputs_of(chain) if begins else None,
                slope=chain.slope > 0 and final,
            )
        )
        for i in part:
            sizes[i] = modes[i].q
    return works
