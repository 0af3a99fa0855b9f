"""The planner: chains cut into passes that fit on chip, each tiled for the GPU, and stacks taken by one pass.

Neighbouring small factors are taken as one where that is predicted to be faster. A state too large for one pass goes
through memory between passes. The engine asks for plan_text() once for each chain, dtype and class of batch sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from factorlayer.activations.results import from_result
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels import chain_backward, gradient
from factorlayer.kernels.chain_backward import Places
from factorlayer.kernels.gradient import REDUCTION_US, Gradient
from factorlayer.kernels.kronecker import (
    columns,
    double_pair,
    eights,
    pair,
    small,
    strip,
    triple,
)
from factorlayer.kernels.monarch import (
    monarch,
    monarch_backward,
    monarch_mapped,
    monarch_through,
    slab_backward,
    untied_backward,
)
from factorlayer.kernels.monarch.monarch import Monarch
from factorlayer.kernels.monarch.monarch_mapped import MonarchMapped
from factorlayer.kernels.monarch.monarch_through import MonarchThrough
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product import few, mapped, streamed, wide, wide_gradient, wide_resident
from factorlayer.kernels.product.column_sums import ColumnSums
from factorlayer.kernels.product.few import Few
from factorlayer.kernels.product.mapped import Mapped
from factorlayer.kernels.product.slopes import Slopes
from factorlayer.kernels.product.streamed import Product, Streamed
from factorlayer.kernels.product.turn import Turn
from factorlayer.kernels.product.weight_halves import with_halves
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.product.wide_gradient import WideGradient
from factorlayer.kernels.stack import dense, dense_backward, dense_backward32, dense_streamed, layer_backward
from factorlayer.kernels.stack.dense import Dense
from factorlayer.kernels.stack.dense_streamed import WeightChunks
from factorlayer.kernels.tiling import tile
from factorlayer.kernels.weights import LARGEST_NORMALISED
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain, parse_layers
from factorlayer.maths.spec import Contraction
from factorlayer.plan import registry
from factorlayer.plan.plan import PASS_WEIGHT, Plan, PlanError

LEAST_OF_SOME = 128  # samples that the second class is planned for as well, where few of them leave most of a GPU idle
WORDS = ("backward", "states", "frozen")  # behind the layers of a stack
BATCHES = (16, 1024, 16384)  # what a class of batch sizes is planned for: up to 64, up to 2048, larger
LONGEST_MERGED = {"float64": 16, "float32": 64, "tf32": 64, "bfloat16": 64, "float16": 64}
MOST_MODES, MOST_PASSES = 6, 6  # of which every way to cut is tried
STRIDED = {2: 6.0, 4: 1.8, 8: 1.5}  # times what a pass is predicted to take whose p's do not lie side by side
ALONE = 1.1  # times what a layer is predicted to take beside those that one pass takes together
AT_ONCE = 1.2  # what both contractions of a Monarch layer in one pass have to win by
# What a family's predicted time is multiplied by where another family's stands beside it. They were chosen so that an
# H200 gets the faster of the two in the tables' rows; one cost model for all families would need none of them.
COLUMNS, COLUMNS_PADDED = 1.2, 0.6  # beside resident passes, whose predictions are too short with padded modes
PAIR, PAIR_OF_FEW = 0.85, 1.15  # beside resident passes, which start faster: it shows where units are few
STREAMED, STREAMED_OF_FEW = 1.2, 0.9  # of streamed products, predicted too short, but better with few samples
STREAMED_OF_SOME = 1.6  # beside few: ten Monarch layers of 85 to 1722 samples took 2.0 of what is predicted, and 1.3
BY_ROWS = 1.3  # of a dense layer as a stack of one, beside passes that move whole 16 bytes
FLOAT_GRADIENT = 2  # times what a gradient of many floats is predicted to take where warps multiply


def plan_text(chain: str, dtype: str, batch_class: int, arch: int, sms: int, shared: int) -> str:
    """For csrc/runtime; PlanError says why there is none."""
    return plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared)).text()


def explain(chain: str, dtype: str, batch_class: int, arch: int, sms: int, shared: int) -> str:
    """The same plan for people."""
    return str(plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared)))


def has_plan(chain: str, dtype: str, arch: int, sms: int, shared: int, batch_class: int = 1) -> bool:
    try:
        return bool(plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared)).passes)
    except PlanError:
        return False


def has_plan_of_few(chain: str, dtype: str, arch: int, sms: int, shared: int) -> bool:
    """The same of as many samples as the first class of batches has."""
    return has_plan(chain, dtype, arch, sms, shared, 0)


def predicted(chain: str, dtype: str, arch: int, sms: int, shared: int) -> float:
    """Microseconds with many samples; infinitely many where there is no kernel."""
    try:
        return plan_of(chain, dtype, len(BATCHES) - 1, Gpu(arch, sms, shared)).us
    except PlanError:
        return math.inf


def cut_backward(stack: str, dtype: str, arch: int, sms: int, shared: int) -> tuple[tuple[int, int], ...]:
    return cut(stack, dtype, arch, sms, shared, backward=True)


def cut(
    stack: str, dtype: str, arch: int, sms: int, shared: int, backward: bool = False
) -> tuple[tuple[int, int], ...]:
    """Runs of a stack's layers, from one number up to another, each of which one pass takes. Backward, it makes all
    gradients, and most layers are in a run; of such cuts it is the fastest by prediction, and forward of all."""
    layers, gpu = [layer.text for layer in parse_layers(stack)], Gpu(arch, sms, shared)
    runs: dict[tuple[int, int], float] = {}
    for begin, end in itertools.combinations(range(len(layers) + 1), 2):
        if not backward and end == begin + 1:
            continue
        try:
            text = " | ".join([*layers[begin:end], "backward"] if backward else layers[begin:end])
            runs[begin, end] = plan_of(text, dtype, len(BATCHES) - 1, gpu).us
        except PlanError:
            continue
    costs = not backward and len(runs) > 0
    alone = [ALONE * plan_of(layer, dtype, len(BATCHES) - 1, gpu).us if costs else 0.0 for layer in layers]
    best: dict[int, tuple[int, float, tuple[tuple[int, int], ...]]] = {len(layers): (0, 0.0, ())}  # from a layer on
    for begin in reversed(range(len(layers))):
        outside, us, found = best[begin + 1]
        ways = [(outside + backward, us + alone[begin], found)]
        for end in range(begin + 1, len(layers) + 1):
            if (begin, end) in runs:
                outside, us, found = best[end]
                ways.append((outside, us + runs[begin, end], ((begin, end), *found)))
        best[begin] = min(ways)
    return best[0][2]


def plan_of(text: str, dtype: str, batch_class: int, gpu: Gpu) -> Plan:
    *parts, last = text.split(" | ")
    layers, dtype = parsed(" | ".join(parts) if last in WORDS and parts else text, dtype)
    if parts:
        return plan_stack(layers, dtype, BATCHES[batch_class], gpu, *(last == word for word in WORDS))
    return plan(layers[0], dtype, BATCHES[batch_class], gpu)


def parsed(text: str, dtype: str) -> tuple[tuple[Chain, ...], str]:
    """The layers of a chain or stack, and what they are computed in."""
    layers = parse_layers(text)
    return layers, "tf32" if dtype == "float32" and layers[0].tf32 else dtype


def plan_stack(
    layers: tuple[Chain, ...],
    dtype: str,
    batch: int,
    gpu: Gpu,
    backward: bool = False,
    states: bool = False,
    frozen: bool = False,
) -> Plan:
    """Of layers that one pass takes, and stores the states between if these are wanted, or that makes all gradients. If
    they are frozen, what is done with weights alone takes no time."""
    if backward:
        families = (dense_backward, dense_backward32, layer_backward)
        tiled = [family.tile(layers, dtype, batch, gpu) for family in families]
    else:
        tiled = [dense.tile(layers, dtype, batch, gpu, states)]
        # Weights that stay in shared memory are faster: six layers of 128, 1.3 million samples, 401 us instead of 517.
        streams = tiled[0] is None and _streams(layers, dtype, gpu, states)
        tiled += [dense_streamed.tile(layers, dtype, batch, gpu, states, frozen)] if streams else []

    def us(p: Dense) -> float:
        return math.fsum(each.us for each in p.passes if not (frozen and isinstance(each, WeightChunks)))

    found = min((p for p in tiled if p), key=us, default=None)
    if found is None:
        which = "makes all gradients" if backward else "takes all layers"
        raise PlanError(f"no pass {which} of {' | '.join(layer.text for layer in layers)!r}")
    return Plan(replace(layers[0], backward=backward), dtype, batch, gpu, found.passes)


@functools.lru_cache(256)
def _streams(layers: tuple[Chain, ...], dtype: str, gpu: Gpu, states: bool) -> bool:
    """Whether a pass that streams their weights is predicted to be faster than layer by layer, for many samples: layers
    that have a kernel for these have one for few as well."""
    found = dense_streamed.tile(layers, dtype, BATCHES[-1], gpu, states)
    if found is None:
        return False
    alone = PASS_WEIGHT * sum(plan(layer, dtype, BATCHES[-1], gpu).us for layer in layers)
    return sum(p.us for p in found.passes) < alone


@functools.lru_cache(256)
def plan(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan:
    found = _plan(chain, dtype, batch, gpu)
    return replace(found, passes=with_halves(found.passes))


def _plan(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan:
    if chain.gradient:
        (c,) = chain.contractions
        c = replace(c, outer=c.outer * c.inner, inner=1) if chain.x_turned else c
        if chain.bias:
            both = wide_gradient.tile(c, dtype, batch, gpu, True)
            if both is None:
                raise PlanError(f"no pass makes both gradients of {chain.text!r} at once")
            return Plan(chain, dtype, batch, gpu, _with_reduction(both))
        made = _in_order(chain, c, dtype, batch, gpu) if chain.mixed else _gradient(c, dtype, batch, gpu)
        return Plan(chain, dtype, batch, gpu, made)
    if chain.sums:
        return Plan(chain, dtype, batch, gpu, _with_reduction(ColumnSums(chain.sums, dtype, batch, gpu)))
    if chain.slope or chain.through:
        return Plan(chain, dtype, batch, gpu, (_slopes(chain, dtype, batch, gpu),))
    if chain.backward:
        return Plan(chain, dtype, batch, gpu, _all_gradients(chain, dtype, batch, gpu))
    if chain.slabs:
        (product,) = streamed.products(chain, dtype)
        by_maps = mapped.tile(product, batch, gpu)
        if by_maps is None:
            raise PlanError(f"no pass makes {chain.text!r}")
        return Plan(chain, dtype, batch, gpu, (by_maps,))
    if chain.turn and not (chain.contractions and streamed.y_turned(chain)):
        first = plan(replace(chain, turn=None), dtype, batch, gpu).passes if chain.contractions else ()
        mixed = chain.mixed[1:] if chain.mixed else None
        if mixed and (chain.contractions or math.prod(mixed) != chain.turn[1]):
            raise PlanError(f"{chain.text!r} turns other rows than it mixes")
        return Plan(chain, dtype, batch, gpu, (*first, Turn(*chain.turn, dtype, batch, gpu, mixed)))
    best: Plan | None = None
    for passes in cuts(chain, dtype):
        if best is not None and PASS_WEIGHT ** (len(passes) - 1) * _least_us(passes, batch, gpu) > best.weight:
            continue
        tiled = _tile_all(passes, batch, gpu)
        if tiled is None:
            continue
        found = Plan(chain, dtype, batch, gpu, tiled)
        if best is None or found.weight < best.weight:
            best = found
    if best is None or (chain.rank > 1 and len(best.passes) > 1):
        alone = Plan(chain, dtype, batch, gpu, one_by_one(chain, dtype, batch, gpu))
        best = min(alone, best or alone, key=lambda found: found.weight)
    are_few = batch <= few.MOST_SAMPLES and isinstance(best.passes[0], Few)
    at_once = None if are_few else _at_once(chain, dtype, batch, gpu)
    if at_once and AT_ONCE * at_once.us < best.us:
        return Plan(chain, dtype, batch, gpu, (at_once,))
    by_rows = _by_rows(chain, dtype, batch, gpu)
    return by_rows if by_rows and by_rows.us * _margin(chain, dtype) < best.us else best


def _at_once(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Monarch | MonarchMapped | MonarchThrough | None:
    """Both contractions of a Monarch layer."""
    tiled = [family.tile(chain, dtype, batch, gpu) for family in (monarch_mapped, monarch_through, monarch)]
    return min((plan for plan in tiled if plan), key=lambda plan: plan.us, default=None)


def _by_rows(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Plan | None:
    """A dense layer by the pass that takes stacks of them, its weight streamed, unless there are few samples."""
    if not chain.is_dense or chain.turn or chain.x_turned or batch <= BATCHES[0]:
        return None
    found = dense_streamed.tile((chain,), dtype, batch, gpu)
    return Plan(chain, dtype, batch, gpu, found.passes) if found else None


def _margin(chain: Chain, dtype: str) -> float:
    """What such a pass has to win by: nothing where 16 bytes do not divide a row, which others move by elements."""
    (c,) = chain.contractions
    return BY_ROWS if all(n * ELEMENT_BYTES[dtype] % 16 == 0 for n in (c.p, c.q)) else 1.0


def one_by_one(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """A pass for each contraction, its weight streamed."""
    products = streamed.products(chain, dtype)
    last = len(products) - 1
    passes = _in_turns([_product_pass(product, batch, gpu, i == 0, i == last) for i, product in enumerate(products)])
    first = chain.contractions[0]
    if first.tied or first.inner == 1 or chain.x_turned:
        return passes
    turn = Turn(first.outer, first.p, first.inner, dtype, batch, gpu)
    turned = (turn, *one_by_one(replace(chain, x_turned=True), dtype, batch, gpu))
    strided = STRIDED[ELEMENT_BYTES[dtype]] * passes[0].us + sum(p.us for p in passes[1:])
    return turned if sum(p.us for p in turned) < strided else passes


def _in_turns(passes: list[Few | Mapped | Streamed | Wide]) -> tuple[Pass, ...]:
    """Of a pass in 16 bits that reads what the one before has made last, the last samples come first. One that makes
    more than it reads does not get faster so."""

    def turned(i: int, p: Few | Mapped | Streamed | Wide) -> Pass:
        if i % 2 and isinstance(p, Wide) and p.product.size == 2 and p.product.y_features <= p.product.x_features:
            return replace(p, from_last=True)
        return p

    return tuple(turned(i, p) for i, p in enumerate(passes))


def _gradient(contraction: Contraction, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    tiled = [family.tile(contraction, dtype, batch, gpu) for family in (gradient, wide_gradient)]
    ways = [_with_reduction(p) for p in tiled if p]
    if not ways:
        raise PlanError(f"no pass makes the gradient of {contraction}: it has too many groups")
    weight = FLOAT_GRADIENT if dtype == "float32" and batch > 64 else 1
    return min(ways, key=lambda passes: sum(p.us for p in passes) * (weight if isinstance(passes[0], Gradient) else 1))


def _in_order(chain: Chain, c: Contraction, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    """Of q's that come in another order: one family takes them so, and is asked whatever the number of samples."""
    summing = wide_gradient.tile(c, dtype, batch, gpu)
    if summing is None or not chain.mixed or math.prod(chain.mixed[1:]) != c.q or c.inner > 1:
        raise PlanError(f"no pass makes {chain.text!r}")
    return _with_reduction(replace(summing, mixed=chain.mixed[1:]))


def _with_reduction(summing: ColumnSums | Gradient | WideGradient) -> tuple[Pass, ...]:
    return summing, *summing.finishing


def _slopes(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Slopes | Wide:
    if chain.through and from_result(chain.activation) is None:
        raise PlanError(f"the slope of {chain.activation!r} cannot be told from its result")
    if not chain.contractions:
        return Slopes(chain.slope or chain.through, chain.activation, dtype, batch, gpu, chain.through > 0)
    product, *further = streamed.products(chain, dtype)
    takes = not further and chain.rank == 1 and not chain.parameters
    found = wide.tile(product, batch, gpu) if takes else None
    if found is None:
        raise PlanError(f"no pass makes the product and the slopes of {chain.text!r} at once")
    return found


def _all_gradients(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> tuple[Pass, ...]:
    if chain.bias:  # by the kernel that is the fastest without it, if it can
        (first, *_) = _all_gradients(replace(chain, bias=False), dtype, batch, gpu)
        with_bias = first.with_bias()
        if with_bias is None:
            raise PlanError(f"no pass makes all gradients of {chain.text!r}, the bias's among them")
        return (with_bias,)
    found = list(_ways_back(chain, dtype, batch, gpu))
    if not found:
        raise PlanError(f"no pass makes all gradients of {chain.text!r} at once")
    return min(found, key=lambda passes: sum(p.us for p in passes))


def _ways_back(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Iterator[tuple[Pass, ...]]:
    first, *more = chain.contractions
    if first.tied and not more:
        yield from registry.ways(registry.OF_ONE_FACTOR, first, dtype, batch, gpu)
    elif chain.slabs:
        if (by_slabs := slab_backward.tile(chain, dtype, batch, gpu)) and _is_worth_it(chain, dtype, gpu):
            yield by_slabs, *by_slabs.finishing
    elif not more and (visit := untied_backward.tile(chain, dtype, batch, gpu)):
        if _is_worth_it(chain, dtype, gpu):
            yield visit, *visit.finishing
    elif chain.x_turned:
        return
    elif passes := monarch_backward.all_gradients(chain, dtype, batch, gpu):
        yield passes
    elif few_passes := few.all_gradients(chain, dtype, batch, gpu):
        yield few_passes
    elif chain.rank == 1 and all(c.tied for c in chain.contractions):
        outer, inner = _around(chain)
        if inner == 1:
            yield from registry.ways(registry.OF_FACTORS, _modes(chain), outer, dtype, batch, gpu)
    plain = all(c.tied for c in chain.contractions) and not (chain.turn or chain.slabs or chain.mixed)
    visits = _visits(chain, dtype, batch, gpu) if plain and _visits_are_worth_it(chain, dtype, gpu) else None
    if visits:
        yield visits


@functools.lru_cache(256)
def _visits_are_worth_it(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether visits are predicted to be faster than one contraction after another. It is asked of one number of
    samples, so that what has a kernel for few has one for many as well."""
    batch = BATCHES[1]
    visits = _visits(chain, dtype, batch, gpu)
    if visits is None:
        return False
    return sum(p.us for p in visits) < chain.rank * _apart_us(chain, dtype, batch, gpu)


def _apart_us(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> float:
    """Of all gradients of one term by several calls, as autograd/backward.py would make them: a run of neighbours by a
    family that makes all of theirs, or a contraction by itself, its gradient and that of what it reads."""
    steps, last = chain.contractions, len(chain.contractions) - 1
    least = [0.0] + [math.inf] * len(steps)  # of the first so many contractions
    for end in range(1, len(steps) + 1):
        for begin in range(end):
            order = sorted(c.weight for c in steps[begin:end])
            if order[-1] - order[0] >= len(order):
                continue
            part = Chain(tuple(replace(c, weight=order.index(c.weight)) for c in steps[begin:end]), tf32=chain.tf32)
            if end == begin + 1:
                (c,) = part.contractions
                back = Chain((replace(c, p=c.q, q=c.p),), tf32=chain.tf32)
                us = plan(back, dtype, batch, gpu).us + sum(p.us for p in _gradient(c, dtype, batch, gpu))
            else:
                outer, inner = _around(part)
                ways = registry.ways(registry.OF_FACTORS, _modes(part), outer, dtype, batch, gpu) if inner == 1 else ()
                us = min((sum(p.us for p in way) for way in ways), default=math.inf)
            if us < math.inf and end <= last:
                us += plan(part, dtype, batch, gpu).us
            least[end] = min(least[end], least[begin] + us)
    return least[-1]


MOST_VISITS = 3  # of a chain: two buffers hold the states between them


@functools.lru_cache(256)
def _visits(chain: Chain, dtype: str, batch: int, gpu: Gpu, count: int = 0) -> tuple[Pass, ...] | None:
    """All gradients by visits of neighbouring modes, each of any sizes: the states between them once more, then back.
    The fastest of all ways, or of those with `count` visits."""
    ways = [way for way in _ways_to_visit(chain, dtype) if count in (0, len(way[1]))]
    bounded = sorted(((_least_back_us(chain, dtype, *way, batch, gpu), i) for i, way in enumerate(ways)))
    best: tuple[Pass, ...] | None = None
    us = math.inf
    for least, i in bounded:
        if least >= us:
            break
        passes = _visited(chain, dtype, *ways[i], batch, gpu)
        if passes and sum(p.us for p in passes) < us:
            best, us = passes, sum(p.us for p in passes)
    return best


def _least_back_us(
    chain: Chain, dtype: str, modes: tuple[Mode, ...], runs: list[list[int]], batch: int, gpu: Gpu
) -> float:
    """No plan of these visits is predicted to be faster: what they move, once each."""
    works = _works(chain, dtype, modes, runs)
    states = [math.prod(work.states[0]) * work.outer * work.inner for work in works]
    states.append(math.prod(works[-1].states[-1]) * works[-1].outer * works[-1].inner)
    rank, last = chain.rank, len(works) - 1
    moved = 3 * sum(states[1:-1]) * rank + sum(states[2:-1]) * rank  # made, read by a visit, and what that gives back
    moved += states[0] * (1 + bool(last)) + states[-1] * (1 if rank == 1 else 2 - bool(last)) + sum(states[1:-1]) * rank
    moved += states[0]
    return 5.0 * len(works) + batch * moved * ELEMENT_BYTES[dtype] / (gpu.memory_bytes * gpu.sms)


def _ways_to_visit(chain: Chain, dtype: str) -> Iterator[tuple[tuple[Mode, ...], list[list[int]]]]:
    """Modes, some taken as one, and runs of them that a visit takes."""
    largest = LARGEST_NORMALISED if dtype == "float16" else 1 << 30
    if dtype == "float16" and chain.rank > 1:
        largest = 0
    seen: set[tuple[Mode, ...]] = set()
    for longest in (64, 16, 1):
        modes = _merged(_modes(chain), min(longest, LONGEST_MERGED[dtype]), largest)
        if modes in seen or len(modes) > MOST_MODES:
            continue
        seen.add(modes)
        for count in range(1, min(len(modes), MOST_VISITS) + 1):
            for runs in _runs(len(modes), count):
                for order in (runs, runs[::-1])[: 2 if count > 1 else 1]:
                    yield modes, order


def _runs(modes: int, count: int) -> Iterator[list[list[int]]]:
    """Neighbouring modes, in so many parts."""
    for cuts in itertools.combinations(range(1, modes), count - 1):
        bounds = [0, *cuts, modes]
        yield [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def _visited(
    chain: Chain, dtype: str, modes: tuple[Mode, ...], runs: list[list[int]], batch: int, gpu: Gpu
) -> tuple[Pass, ...] | None:
    parts = [sorted(run, key=lambda i: (1 / modes[i].p - 1 / modes[i].q, -i)) for run in runs]
    works = _works(replace(chain, activation="identity"), dtype, modes, parts)
    last, rank = len(works) - 1, chain.rank
    sizes = [rank * sum(q * p for _, q, p in mode.parts) for mode in modes]
    forward: list[Pass] = []
    for number, work in enumerate(works[:-1]):
        found = tile(work, batch, gpu)
        if found is None:
            return None
        forward.append(replace(found, takes=f"s{number - 1}" if number else "x", gives=f"s{number}"))
    back: list[Pass] = []
    behind = ""  # where the gradient lies that the last visit gets
    returned = ""  # where the gradient of what the visit before read lies
    for number in reversed(range(last + 1)):
        work = replace(works[number], rank=1, terms=rank, apart=False)
        sums = rank > 1
        before = f"s{number - 1}" if number else "x"
        places = Places(
            grad=len(chain.contractions),
            begin=sum(sizes[: min(runs[number])]),
            x=before,
            g=returned,
            y=before if number else "" if sums else "y",
            terms_x=sums and number > 0,
            terms_g=sums and number < last,
            terms_y=sums and number > 0,
        )
        ways = [chain_backward.tile(work, places, batch, gpu)]
        if number == last == 1:  # which may as well give another buffer, that its parts do not read
            ways.append(chain_backward.tile(work, replace(places, y="s1"), batch, gpu))
        visit = min((way for way in ways if way), key=lambda way: way.us, default=None)
        if visit is None:
            return None
        behind, returned = visit.places.g, visit.places.y
        back += [visit, *visit.finishing]
    if rank > 1:
        first = works[0]
        steps = tuple((at, Mode(tuple((w, p, q) for w, q, p in mode.parts))) for at, mode in reversed(first.steps))
        work = replace(
            first, sizes=first.states[-1], steps=steps, rank=rank, terms=1, apart=last > 0, bias=False, transposed=True
        )
        summed = tile(work, batch, gpu)
        if summed is None:
            return None
        back.append(replace(summed, takes=behind if last else f"@{len(chain.contractions)}", gives="y"))
    return (*forward, *back)


@functools.lru_cache(256)
def _is_worth_it(chain: Chain, dtype: str, gpu: Gpu) -> bool:
    """Whether both gradients at one visit are predicted to be faster than one by one, for many samples: what has a
    kernel for these has one for fewer as well."""
    batch = BATCHES[-1]
    family = slab_backward if chain.slabs else untied_backward
    visit = family.tile(chain, dtype, batch, gpu)
    (c,) = chain.contractions
    grouped = replace(c, outer=c.outer * c.inner, inner=1)
    back = Chain((replace(c, p=c.q, q=c.p),), x_turned=chain.x_turned, turn=chain.turn)
    apart = (*_gradient(grouped, dtype, batch, gpu), *one_by_one(back, dtype, batch, gpu))
    return visit is not None and visit.us + REDUCTION_US < sum(p.us for p in apart)


def _least_us(passes: list[Work], batch: int, gpu: Gpu) -> float:
    """No tiling of them is predicted to be faster."""
    elements = sum((math.prod(p.states[0]) + math.prod(p.states[-1])) * p.outer * p.inner for p in passes)
    return 2.0 * len(passes) + batch * elements * ELEMENT_BYTES[passes[0].dtype] / gpu.memory_bytes / gpu.sms


def _tile_all(passes: list[Work], batch: int, gpu: Gpu) -> tuple[Pass, ...] | None:
    tiled = []
    for work in passes:
        found = _fastest(work, batch, gpu)
        if found is None:
            return None
        tiled.append(found)
    return tuple(tiled)


def _fastest(work: Work, batch: int, gpu: Gpu) -> Pass | None:
    """Of all families, by predicted times and the margins between them."""
    if work.terms > 1 or work.apart:
        return tile(work, batch, gpu)
    resident, paired = tile(work, batch, gpu), pair.tile(work, batch, gpu)
    others = (family.tile(work, batch, gpu) for family in (small, eights, strip, double_pair, triple))
    found: list[tuple[float, Pass]] = [(p.us, p) for p in (resident, *others) if p]
    by_columns = columns.tile(work, batch, gpu)
    if by_columns:
        padded = any(n % 8 for state in work.states for n in state)
        found.append((by_columns.us * (COLUMNS_PADDED if padded else COLUMNS), by_columns))
    if paired:
        found.append((paired.us * (PAIR if batch * work.outer > gpu.sms else PAIR_OF_FEW), paired))
    else:
        single = _single(work, batch, gpu)
        if single and (isinstance(single, Mapped | Wide) or not found):
            found.append((single.us, single))
    return min(found, key=lambda each: each[0])[1] if found else None


def _single(work: Work, batch: int, gpu: Gpu) -> Few | Mapped | Streamed | Wide | None:
    """A pass of one factor whose weight comes from memory again and again, and maybe of one of 8 before it."""
    if any(len(mode.parts) > 1 for _, mode in work.steps) or len(work.steps) != len(work.sizes) or work.rank > 1:
        return None
    *before, mode = (mode for _, mode in sorted(work.steps, key=lambda step: step[0]))
    ((weight, q, p),) = mode.parts
    outer = work.outer * math.prod(each.p for each in before)
    contraction = Contraction(weight, outer, p, q, work.inner, tied=True)
    product = Product(
        work.dtype, contraction, work.inner, 1, 1, q, bias=work.bias, activation=work.activation, scalars=work.scalars
    )
    if not before:
        return _product_pass(product, batch, gpu)
    mixes = len(before) == 1 and before[0].p == before[0].q == wide.MIXED and batch > BATCHES[0]
    if not mixes:
        return None
    product = replace(product, mixed=before[0].parts[0][0])
    tiled = (family.tile(product, batch, gpu) for family in (wide, wide_resident))
    return min((p for p in tiled if p), key=lambda p: p.us, default=None)


def _product_pass(
    product: Product, batch: int, gpu: Gpu, first: bool = True, last: bool = True
) -> Few | Mapped | Streamed | Wide:
    """Times of streamed passes are predicted too short, but they are better with few samples, untied ones apart."""
    some = LEAST_OF_SOME < batch <= BATCHES[1] and not product.contraction.tied
    batches = (LEAST_OF_SOME, batch) if some else (batch,)
    of_few = few.tile(product, batches, gpu, first, last) if batch <= BATCHES[1] else None
    if of_few and batch <= few.MOST_SAMPLES:
        return of_few
    narrow = streamed.tile(product, batches, gpu)
    tiled = (family.tile(product, batch, gpu) for family in (wide, mapped))
    found: Mapped | Streamed | Wide | None = min((p for p in tiled if p), key=lambda p: p.us, default=None)
    weight = STREAMED if batch > 64 else STREAMED_OF_FEW
    found = found if found and found.us < weight * narrow.us else narrow
    if of_few and _is_faster(of_few, found, batches):
        return of_few
    return found


def _is_faster(of_few: Few, other: Mapped | Streamed | Wide, batches: tuple[int, ...]) -> bool:
    """For all numbers of samples together; or for each, where the other one is made for many."""
    us = [few.time(of_few, batch) for batch in batches]
    if isinstance(other, Streamed):
        return math.prod(us) < math.prod(STREAMED_OF_SOME * streamed.time(other, batch) for batch in batches)
    others = [_time_of(replace(other, batch=batch)) for batch in batches]
    return all(mine < another for mine, another in zip(us, others, strict=True))


def _time_of(p: Mapped | Wide) -> float:
    return mapped.time(p) if isinstance(p, Mapped) else wide.time(p)


def cuts(chain: Chain, dtype: str) -> Iterator[list[Work]]:
    """Ways to cut the chain into passes: fewer passes first, more only while nothing fits."""
    if not all(c.tied for c in chain.contractions):
        return
    seen: set[tuple[Mode, ...]] = set()
    largest = LARGEST_NORMALISED if dtype == "float16" else 1 << 30
    if dtype == "float16" and chain.rank > 1:
        largest = 0
    for longest in (64, 16, 1):
        modes = _merged(_modes(chain), min(longest, LONGEST_MERGED[dtype]), largest)
        if modes in seen or (seen and len(modes) > MOST_MODES):
            continue
        seen.add(modes)
        order = _order(modes)
        most = min(len(order), MOST_PASSES) if len(order) <= MOST_MODES else len(order)
        for count in range(1, most + 1):
            cuts = _parts(order, count) if len(order) <= MOST_MODES or count == 1 else [_even(order, count)]
            yield from (_works(chain, dtype, modes, cut) for cut in cuts)


def _modes(chain: Chain) -> tuple[Mode, ...]:
    """Of the Kronecker product, slowest first."""
    by_weight = sorted(chain.contractions, key=lambda c: c.weight)
    sizes = [c.p for c in by_weight]
    outer, inner = _around(chain)
    for c in chain.contractions:
        if (c.outer, c.inner) != (outer * math.prod(sizes[: c.weight]), inner * math.prod(sizes[c.weight + 1 :])):
            raise PlanError(f"the contractions of {chain.text!r} are not those of a Kronecker product")
        sizes[c.weight] = c.q
    return tuple(Mode(((c.weight, c.q, c.p),)) for c in by_weight)


def _around(chain: Chain) -> tuple[int, int]:
    """Sizes of the state before and behind the modes that the chain contracts: of a part of a longer chain."""
    first = chain.contractions[0]
    sizes = {c.weight: c.p for c in chain.contractions}
    before = math.prod(p for weight, p in sizes.items() if weight < first.weight)
    behind = math.prod(p for weight, p in sizes.items() if weight > first.weight)
    return first.outer // before, first.inner // behind


def _merged(modes: tuple[Mode, ...], longest: int, largest: int) -> tuple[Mode, ...]:
    """Neighbours taken as one, from the last on, while the product is at most `longest` and no weight has more than
    `largest` elements."""
    merged = [modes[-1]]
    for mode in reversed(modes[:-1]):
        small = all(q * p <= largest for _, q, p in mode.parts + merged[0].parts)
        if small and max(mode.p * merged[0].p, mode.q * merged[0].q) <= longest:
            merged[0] = Mode(mode.parts + merged[0].parts)
        else:
            merged.insert(0, mode)
    return tuple(merged)


def _order(modes: tuple[Mode, ...]) -> list[int]:
    """Fewest multiply-adds, as in spec.py; last modes first among equals."""
    return sorted(reversed(range(len(modes))), key=lambda i: 1 / modes[i].p - 1 / modes[i].q)


def _even(order: list[int], count: int) -> list[list[int]]:
    bounds = [len(order) * i // count for i in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def _parts(order: list[int], count: int) -> Iterator[list[list[int]]]:
    for cuts in itertools.combinations(range(1, len(order)), count - 1):
        bounds = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(bounds)]


def _works(chain: Chain, dtype: str, modes: tuple[Mode, ...], parts: list[list[int]]) -> list[Work]:
    sizes, works = [mode.p for mode in modes], []
    outer, inner = _around(chain)
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
            )
        )
        for i in part:
            sizes[i] = modes[i].q
    return works
