"""All gradients of a Kronecker product, of any sizes and rank, by visits of neighbouring modes.

Forward passes make the states between visits once more; then each visit, from the last one on, makes the gradients of
its weights and that of the state that it has read, which takes the state's place (kernels/chain_backward.py). Of a sum
of products each term has states of its own. The visit that reads x takes all terms of a tile and adds up what comes
back to x, or a pass behind it does so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import stands_for
from factorlayer.kernels.chain_backward import Places
from factorlayer.kernels.gradient import REDUCTION_US, OfVisit, States, finished
from factorlayer.kernels.passes import STATES, Pass, class_us
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction
from factorlayer.plan.cuts import MOST_MODES, around, as_one, mergings, modes_of, order_of, parts_of, works_of
from factorlayer.plan.forward import forward
from factorlayer.plan.plan import PASS_WEIGHT
from factorlayer.plan.registry import family_of
from factorlayer.plan.registry.family import Family, fastest, ways
from factorlayer.plan.registry.kronecker import CHAIN_BACKWARD, OF_FACTORS, OF_ONE_FACTOR, OF_STATES
from factorlayer.plan.registry.product import MAPPED_GRADIENT, OF_TURN, OF_WEIGHT
from factorlayer.plan.works import least_of_sample

# Times that a visit of one weight has to be predicted to be faster by two passes: by a gradient of Hopper's or in 16
# bits, and by other ones, beside which visits whose weight several blocks share take 0.62 to 0.85 of what is predicted
# (docs/kernels/visits.md)
APART_WIDE, APART = 1.1, 1.4
MOST_VISITS = 4  # of a chain: of 76 drawn layers none was predicted to be faster with more


@functools.lru_cache(256)
def visits(chain: Chain, dtype: str, batch: int, gpu: Gpu, count: int = 0) -> tuple[Pass, ...] | None:
    """The passes that make all gradients by visits of neighbouring modes of any sizes: those that make the states
    between visits once more, then the visits from the last on. They are the fastest of all ways, or of those with
    `count` visits."""
    best: tuple[Pass, ...] | None = None
    for best in _faster_and_faster(chain, dtype, batch, gpu, count, math.inf):  # noqa: B007 (the last one is wanted)
        pass
    return best


class Way(NamedTuple):
    modes: tuple[Mode, ...]  # some taken as one
    runs: list[list[int]]  # of them, that a visit takes
    works: list[Work]  # of visits
    least: list[float]  # less than each pass takes: those forward, then the visits from the last one on


def _faster_and_faster(
    chain: Chain, dtype: str, batch: int, gpu: Gpu, count: int, us: float
) -> Iterator[tuple[Pass, ...]]:
    """Ways with `count` visits, or with any number, that take less than `us`, each less than the one before it. The
    ways are tried in the order of the least time that they may take."""
    for way in ways_to_visit(chain, dtype, batch, gpu):
        if count not in (0, len(way.runs)):
            continue
        if REDUCTION_US + sum(way.least) >= us:
            break
        passes = _visited(chain, way, batch, gpu, us)
        if passes and _us(passes) < us:
            us = _us(passes)
            yield passes


def ways_to_visit(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> list[Way]:
    """The ways to visit a chain, those first that may take the least time."""
    ways = (_way(chain, dtype, *way, batch, gpu) for way in _modes_and_runs(chain, dtype))
    return sorted(ways, key=lambda way: sum(way.least))


def _way(chain: Chain, dtype: str, modes: tuple[Mode, ...], runs: list[list[int]], batch: int, gpu: Gpu) -> Way:
    works = works_of(replace(chain, activation="identity"), dtype, modes, ordered(modes, runs))
    x, *between = (math.prod(work.states[0]) * work.outer * work.inner for work in works)
    y = math.prod(works[-1].states[-1]) * works[-1].outer * works[-1].inner
    held = [x, *(chain.rank * state for state in between), y]
    # A pass reads and makes a state; a visit reads both, and makes the gradient of the first one and of weights.
    forward = [least_of_sample(works[i], held[i] + held[i + 1], 1, gpu) for i in range(len(works) - 1)]
    back = [least_of_sample(work, 2 * held[i] + held[i + 1], 2, gpu) for i, work in enumerate(works)]
    return Way(modes, runs, works, [gpu.rates.behind_us + batch * us for us in (*forward, *reversed(back))])


def ordered(modes: tuple[Mode, ...], runs: list[list[int]]) -> list[list[int]]:
    """The modes of each run in the order in which they are contracted."""
    return [[i for i in order_of(modes) if i in run] for run in runs]


def _modes_and_runs(chain: Chain, dtype: str) -> Iterator[tuple[tuple[Mode, ...], list[list[int]]]]:
    """Modes of a chain, of which some are taken as one, and runs of them that visits may take."""
    for modes in mergings(chain, dtype):
        if len(modes) > MOST_MODES:
            continue
        for count in range(1, min(len(modes), MOST_VISITS) + 1):
            for runs in parts_of(list(range(len(modes))), count):
                yield from ((modes, order) for order in _orders(modes, runs))


def _orders(modes: tuple[Mode, ...], runs: list[list[int]]) -> list[list[list[int]]]:
    """The orders of visits to try: from either end, or with the smallest states between visits, as order_of() has
    it."""
    orders = [runs]
    for order in (runs[::-1], [runs[i] for i in order_of(as_one(modes, runs))]):
        if order not in orders:
            orders.append(order)
    return orders


def _visited(chain: Chain, way: Way, batch: int, gpu: Gpu, most: float) -> tuple[Pass, ...] | None:
    """The passes of a way, or None where one has no tiling or all would take more than `most` microseconds."""
    forward: list[Pass] = []
    for number, work in enumerate(way.works[:-1]):
        found = _of_states(work, batch, gpu)
        if found is None:
            return None
        forward.append(replace(found, takes=STATES[number - 1] if number else "x", gives=STATES[number]))
        if _us(forward) + sum(way.least[len(forward) :]) > most:
            return None
    back = back_by_visits(chain, way, STATES, batch, gpu, most - _us(forward))
    return (*forward, *back) if back else None


def back_by_visits(
    chain: Chain, way: Way, states: Sequence[str], batch: int, gpu: Gpu, most: float
) -> tuple[Pass, ...] | None:
    """The visits of a way, from the last one on, with the states between them in buffers of these names; or None where
    one has no tiling or all would take more than `most` microseconds. Buffers of the plan that hold states are
    overwritten."""
    modes, runs, works, _ = way
    least = way.least[len(works) - 1 :]
    last, rank = len(works) - 1, chain.rank
    sizes = [rank * sum(q * p for _, q, p in mode.parts) for mode in modes]
    back: list[Pass] = []
    sums = rank > 1
    returned = ""  # where the gradient of what the visit before read lies
    for number in reversed(range(sums, last + 1)):
        work = replace(works[number], rank=1, terms=rank, apart=False)
        before = states[number - 1] if number else "x"
        beside = next(name for name in STATES[number:] if name != returned)  # which nobody reads any more
        places = Places(
            grad=len(chain.contractions),
            begin=sum(sizes[: min(runs[number])]),
            x=before,
            g=returned,
            y=beside if number else "y",
            terms_x=sums,
            terms_g=sums and number < last,
            terms_y=sums,
        )
        by_one = _at_once(work, places, before, batch, gpu)
        visit = _or_apart(by_one, work, replace(places, y=before) if before in STATES else places, batch, gpu)
        if not visit:
            return None
        returned = visit[-1].writes
        back += visit
        if _us(back) + sum(least[last - number + 1 :]) > most:
            return None
    if sums:
        places = Places(len(chain.contractions), sum(sizes[: min(runs[0])]), g=returned, terms_g=last > 0)
        found = _back_to_x(works[0], rank, places, batch, gpu)
        if found is None:
            return None
        back += found
    return tuple(finished(back))


def _at_once(work: Work, places: Places, before: str, batch: int, gpu: Gpu) -> tuple[Any, ...]:
    """A visit by one pass, which leaves the gradient of the state that it has read in that one's place, `before`, where
    no other block reads what this one overwrites."""
    visit = _tiled(CHAIN_BACKWARD, work, places, batch, gpu)
    if visit and before in STATES and visit.parts == 1:
        visit = replace(visit, places=replace(places, y=before))
    return (visit,) if visit else ()


def _or_apart(visit: tuple[Any, ...], work: Work, places: Places, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """The visit by one pass, or what is faster where there is none, or maps describe its states, or the sums of its one
    weight are so many that several blocks share them, each of which reads both states: a pass that makes its gradient,
    and, if it is wanted, one that takes grad_y back through it."""
    (_, mode), *more = work.steps
    if more or work.inputs or len(mode.parts) > 1:
        return visit
    passes = 2 if places.y else 1
    moved = passes * sum(math.prod(state) for state in work.states) * work.outer * work.inner
    least = passes * gpu.rates.behind_us + batch * least_of_sample(work, moved, passes, gpu)
    if visit and least >= _us(visit):
        return visit
    by_one_block = any(p.parts == 1 for p in visit)
    if by_one_block and not (gpu.wgmma and work.dtype in MAPPED_GRADIENT.takes.dtypes):
        return visit
    gradient = _of_one_weight(work.unnumbered, places.terms_x, places.terms_g, batch, gpu)
    by_maps = gradient is not None and family_of(gradient) is MAPPED_GRADIENT
    if gradient is None or (by_one_block and not by_maps):
        return visit
    product = _of_states(_back_through(work, places.terms_g), batch, gpu) if places.y else None
    if places.y and product is None:
        return visit
    made = cast(Pass, OfVisit(gradient, places.x, places.g, places.begin, places.grad))
    back = [replace(product, takes=places.g or f"@{places.grad}", gives=places.y)] if product else []
    is_wide = "wgmma" in family_of(gradient).takes.needs
    margin = APART_WIDE if is_wide or made.size == 2 else APART
    apart = made, *back
    taken = margin * class_us((*apart, *made.finishing), batch)
    return visit if visit and class_us(visit, batch) <= taken else apart


@functools.lru_cache(512)
def _of_one_weight(work: Work, terms_x: bool, terms_g: bool, batch: int, gpu: Gpu) -> Any:
    """The pass that makes the gradient of the weight of a work's one mode."""
    ((at, mode),) = work.steps
    outer, inner = (math.prod(sizes) for sizes in (work.sizes[:at], work.sizes[at + 1 :]))
    c = Contraction(0, work.outer * outer, mode.p, mode.q, work.inner * inner, tied=True)
    x, g = (c.outer * n * c.inner for n in (c.p, c.q))
    states = States(work.terms, x * terms_x, g * terms_g)
    return next(iter(fastest(OF_WEIGHT, c, work.dtype, batch, gpu, states=states)), None)


def _back_through(work: Work, apart: bool) -> Work:
    """The work that goes back through the modes of a work, `apart` if each term has a gradient of its own."""
    steps = tuple((at, mode.turned) for at, mode in reversed(work.steps))
    return replace(work, sizes=work.states[-1], steps=steps, bias=False, transposed=True, apart=apart)


def _back_to_x(work: Work, rank: int, places: Places, batch: int, gpu: Gpu) -> tuple[Pass, ...] | None:
    """The visit that reads the x of a sum of products: either a block has all terms of a tile and adds up what comes
    back to x, or it has one term, and a pass behind it adds that up."""
    ways: list[tuple[Pass, ...]] = []
    together = _tiled(CHAIN_BACKWARD, replace(work, rank=rank, terms=1, apart=False), places, batch, gpu)
    if together:
        ways.append((together,))
    alone = replace(work, rank=1, terms=rank, apart=False)
    of_weights = replace(places, y="")
    visit = _or_apart(_at_once(alone, of_weights, "x", batch, gpu), alone, of_weights, batch, gpu)
    back = _back_through(replace(work, rank=rank, terms=1), places.terms_g)
    summed = _of_states(back, batch, gpu) if visit and not work.inputs else None
    if visit and summed:
        summed = replace(summed, takes=places.g or f"@{places.grad}", gives="y")
        ways.append((*visit, summed))
    return min(ways, key=_us, default=None)


@functools.lru_cache(256)
def are_worth_it(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> bool:
    """Whether visits are predicted to be faster than several calls, contraction by contraction, whose memory has to be
    worth as much as that between passes. The answer for many samples is that for some, as a chain with a plan for the
    one class of batches has one for the other."""
    batch = stands_for(batch)
    return any(_faster_and_faster(chain, dtype, batch, gpu, 0, PASS_WEIGHT * apart_us(chain, dtype, batch, gpu)))


@functools.lru_cache(256)
def apart_us(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> float:
    """The microseconds of all gradients by several calls, as autograd/backward.py would make them."""
    rank = chain.rank
    apart = rank * _term_us(chain, dtype, batch, gpu, True)
    if rank > 1:  # terms' gradients of x are added up, or it is made of all terms, by the chain back
        rate, size = gpu.memory_bytes * gpu.sms, ELEMENT_BYTES[dtype]
        apart += (rank - 1) * (gpu.rates.behind_us + 3 * batch * chain.in_features * size / rate)
        back = tuple(replace(c, p=c.q, q=c.p) for c in reversed(chain.contractions))
        of_all = _us(forward(Chain(back, rank, tf32=chain.tf32), dtype, batch, gpu))
        of_all += sum(_turned_us(c, dtype, rank, gpu) for c in chain.contractions)
        apart = min(apart, of_all + rank * _term_us(chain, dtype, batch, gpu, False))
        # Those of each weight become one tensor.
        apart += sum(gpu.rates.behind_us + 2 * rank * c.weight_size * size / rate for c in chain.contractions)
    return apart


def _turned_us(c: Contraction, dtype: str, terms: int, gpu: Gpu) -> float:
    """The microseconds of transposing a weight, for the way back."""
    return _us(fastest(OF_TURN, 1, c.q, c.p, dtype, terms, gpu))


def _term_us(chain: Chain, dtype: str, batch: int, gpu: Gpu, with_x: bool) -> float:
    """The microseconds of all gradients of one term, and of x's if that is wanted. A family makes all gradients of a
    run of neighbours at once, or a contraction is taken by itself: its gradient and that of what it reads."""
    steps, last = chain.contractions, len(chain.contractions) - 1
    least = [0.0] + [math.inf] * len(steps)  # of the first so many contractions
    for end in range(1, len(steps) + 1):
        for begin in range(end):
            order = sorted(c.weight for c in steps[begin:end])
            if order[-1] - order[0] >= len(order):
                continue
            part = Chain(tuple(replace(c, weight=order.index(c.weight)) for c in steps[begin:end]), tf32=chain.tf32)
            us = _run_us(part, dtype, batch, gpu, end > begin + 1 or begin > 0 or with_x)
            if us < math.inf and end <= last:
                us += _us(forward(part, dtype, batch, gpu))
            least[end] = min(least[end], least[begin] + us)
    return least[-1]


@functools.lru_cache(512)
def _run_us(part: Chain, dtype: str, batch: int, gpu: Gpu, with_x: bool) -> float:
    """The microseconds of all gradients of a run of neighbours by one family, infinitely many where there is none; or
    of one contraction by itself."""
    if len(part.contractions) > 1:
        outer, inner = around(part)
        together = ways(OF_FACTORS, modes_of(part), outer, dtype, batch, gpu) if inner == 1 else ()
        return min(map(_us, together), default=math.inf)
    (c,) = part.contractions
    us = _us(fastest(OF_WEIGHT, c, dtype, batch, gpu))
    if not with_x:
        return us
    back = Chain((replace(c, p=c.q, q=c.p),), tf32=part.tf32)
    us += _us(forward(back, dtype, batch, gpu)) + _turned_us(c, dtype, 1, gpu)
    return min([us, *map(_us, ways(OF_ONE_FACTOR, c, dtype, batch, gpu))])


def _us(passes: Iterable[Pass]) -> float:
    return sum(p.us for p in passes)


def _of_states(work: Work, batch: int, gpu: Gpu) -> Any:
    """The fastest pass that does a work and may read and write any buffer; None where there is none."""
    return next(iter(fastest(OF_STATES, work, batch, gpu)), None)


def _tiled(family: Family, *asked: Any) -> Any:
    """The family's pass for what is asked, without those that finish it."""
    return family.tile(*asked) if family.tile else None
