"""What PyTorch takes for a layer by its own operations, as maths/batched.py writes it, or with its matrix multiplied
out before, as maths/multiplied.py does: predicted, for auto to compare.

A layer is counted into products, copies and sums as PyTorch launches them, forward and back. What each takes is its
start, and the longer of what it moves and what it multiplies, by rates of device/gpu.py. docs/measuring.md says how
far that is off.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

LARGEST_FLAT = 12  # as in maths/batched.py
TILES = tuple(itertools.product((32, 64, 128, 256), repeat=2))[:-1]  # rows and columns of a block's product
SUMS = 1 << 16  # of all blocks that a multiprocessor has at once
MOST_BLOCKS = 4  # of these
LARGEST_MATRIX = 1 << 26  # entries of one that is multiplied out: its gradient needs as much memory again
STEP = 32  # of what is summed, at a time
SPLITS = (1, 2, 4, 8, 16, 32)  # parts of the sum
LEAST_STEPS = 4  # of a part
MOST_WAVES = 2  # blocks of a multiprocessor, where the sum is split
WHOLE = 16  # bytes that are loaded at once, where rows allow it
IN_TWO = ("relu_squared",)  # activations that are two operations


@dataclass(frozen=True)
class Product:
    """`count` times [m, k] by [k, n]: at one call if it is `batched`, which no part of the sum is split for. `runs` are
    numbers that lie side by side in the three matrices."""

    count: int
    m: int
    n: int
    k: int
    runs: tuple[int, ...]
    batched: bool = True

    def us(self, dtype: str, gpu: Gpu) -> float:
        return _product_us(self, dtype, gpu)

    def access(self, dtype: str) -> int:
        """Bytes that are loaded and stored at once."""
        return math.gcd(WHOLE, *(n * ELEMENT_BYTES[dtype] for n in self.runs))


@functools.lru_cache(4096)
def _product_us(product: Product, dtype: str, gpu: Gpu) -> float:
    """The fastest way: multiprocessors take turns at blocks, which wait for each step of the sum, or multiply, or read
    L2, whatever takes longest."""
    rates, size, p = gpu.library, ELEMENT_BYTES[dtype], product
    access = p.access(dtype)
    unit = unit_of(dtype, access)
    in_pairs = gpu.clusters and unit in ("tf32", "bfloat16", "float16")  # two blocks share one operand
    moved = p.count * (p.m * p.k + p.k * p.n + p.m * p.n) * size
    small = unit != dtype and size < 8  # pieces that are less than a double
    memory = moved / (gpu.sms * (rates.odd_bytes if small else rates.product_bytes))
    steps, way = -(-p.k // STEP), math.inf
    for rows, columns in TILES:
        read = rows + columns / (2 if in_pairs else 1)
        step = max(2 * rows * columns * STEP / rates.flops[unit], read * STEP * size / gpu.l2_bytes)
        tiles = p.count * -(-p.m // rows) * -(-p.n // columns)
        together = min(MOST_BLOCKS, SUMS // (rows * columns))
        for split in SPLITS[:1] if p.batched else SPLITS:
            if split > 1 and (steps < LEAST_STEPS * split or tiles * split > MOST_WAVES * gpu.sms):
                break
            blocks, each = -(-tiles * split // gpu.sms), -(-steps // split)
            turns = -(-blocks // together)
            us = max(blocks * each * step, turns * each * rates.step_us[unit]) + turns * rates.block_us[dtype]
            way = min(way, us + (rates.split_us if split > 1 else 0.0))
    return rates.kernel_us + rates.product_us + max(memory, way)


def unit_of(dtype: str, access: int) -> str:
    """The name that rates of products have: of floats they do not depend on how operands are loaded."""
    if access == WHOLE or dtype == "float32":
        return dtype
    return f"{dtype} by {min(access, max(4, ELEMENT_BYTES[dtype]))}"


@dataclass(frozen=True)
class Pointwise:
    """What reads and writes so many elements, or moves them to other places."""

    elements: int
    turns: bool = False

    def us(self, dtype: str, gpu: Gpu) -> float:
        rates = gpu.library
        each = rates.turned_bytes if self.turns else rates.pointwise_bytes
        return rates.kernel_us + self.elements * ELEMENT_BYTES[dtype] / (gpu.sms * each)


@dataclass(frozen=True)
class Sum:
    """The sum of so many elements, down to one row."""

    elements: int

    def us(self, dtype: str, gpu: Gpu) -> float:
        return gpu.library.sum_us + Pointwise(self.elements).us(dtype, gpu)


@dataclass(frozen=True)
class Added:
    """What a bias takes beside the product that it is added to."""

    def us(self, dtype: str, gpu: Gpu) -> float:
        return gpu.library.added_us[dtype]


Call = Product | Pointwise | Sum | Added


def contracted_us(chain: Chain, dtype: str, batch: int, gpu: Gpu, training: bool) -> float:
    """The microseconds of a layer that is taken contraction by contraction, with all its gradients if it is trained.
    dtype may be tf32."""
    return sum(call.us(dtype, gpu) for call in calls(chain, batch, training))


def multiplied_us(chain: Chain, dtype: str, batch: int, gpu: Gpu, training: bool) -> float:
    """The microseconds of a layer whose matrix is multiplied out before; infinitely many where that cannot be done."""
    is_known = all(c.tied for c in chain.contractions) or chain.is_monarch
    if chain.is_dense or not is_known or chain.in_features * chain.out_features > LARGEST_MATRIX:
        return math.inf
    return sum(call.us(dtype, gpu) for call in multiplied_calls(chain, batch, training))


@dataclass(frozen=True)
class Ways:
    """Microseconds of both ways in which the batched implementation may take a layer."""

    contracted_us: float
    multiplied_us: float

    @classmethod
    def of(cls, chain: Chain, dtype: str, batch: int, gpu: Gpu, training: bool) -> Ways:
        asked = chain, dtype, batch, gpu, training
        return cls(contracted_us(*asked), multiplied_us(*asked))

    @property
    def multiplies(self) -> bool:
        """Whether the matrix is multiplied out."""
        return self.multiplied_us < self.contracted_us

    @property
    def us(self) -> float:
        return min(self.contracted_us, self.multiplied_us)


def calls(chain: Chain, batch: int, training: bool) -> Iterator[Call]:
    x = batch * chain.in_features
    terms = range(chain.rank)
    for _ in terms:
        yield from (_flat if _is_flat(chain) else _forward)(chain, batch)
    yield from (Pointwise(3 * batch * chain.out_features) for _ in terms[1:])
    yield from _finish(chain, batch, training, is_dense=chain.is_dense)
    if not training:
        return
    for _ in terms:
        yield from (_flat_back if _is_flat(chain) else _back)(chain, batch)
    if chain.rank > 1:
        yield from (Pointwise(3 * x) for _ in terms[1:])
        for c in chain.contractions:  # each term's gradient lies in zeros of the weight's size, which are added up
            weight = c.q * c.p
            for _ in terms:
                yield from (Pointwise(chain.rank * weight), Pointwise(2 * weight))
            yield from (Pointwise(3 * chain.rank * weight) for _ in terms[1:])


def multiplied_calls(chain: Chain, batch: int, training: bool) -> Iterator[Call]:
    """A matrix multiplied out, and a dense layer."""
    features = chain.in_features, chain.out_features
    matrices = list(_matrices(chain))
    # Of blocks, weights are moved to where products find them, and their gradients back.
    moved = [Pointwise(2 * c.weight_size) for c in chain.contractions if not c.tied]
    yield from moved
    for product, elements in matrices:
        yield from (product, Pointwise(2 * elements, turns=True))
    yield Product(1, batch, features[1], features[0], features, batched=False)
    yield from _finish(chain, batch, training, is_dense=True)
    if not training:
        return
    yield Product(1, features[1], features[0], batch, features, batched=False)
    yield Product(1, batch, features[0], features[1], features, batched=False)
    for product, elements in matrices:
        yield Pointwise(2 * elements, turns=True)
        yield replace(product, n=product.k, k=product.n)
        yield replace(product, m=product.k, k=product.m)
    yield from moved


def _matrices(chain: Chain) -> Iterator[tuple[Product, int]]:
    """The products that multiply a matrix out, and how many elements each makes, which are moved to their places."""
    if chain.is_monarch:
        first, second = chain.contractions
        groups = first.outer * second.inner
        rank = first.q // second.inner
        yield Product(groups, second.q, first.p, rank, (rank, first.p)), groups * second.q * first.p
        return
    entries, *others = (c.p * c.q for c in _by_weight(chain))
    for i, size in enumerate(others):
        is_last = i == len(others) - 1
        count, summed = (1, chain.rank) if is_last else (chain.rank, 1)
        yield Product(count, entries, size, summed, (entries, size), not is_last), count * entries * size
        entries *= size


def _finish(chain: Chain, batch: int, training: bool, is_dense: bool) -> Iterator[Call]:
    """Bias and activation, with what goes back through them."""
    y = batch * chain.out_features
    pointwise = 2 if chain.activation in IN_TWO else 0 if chain.activation == "identity" else 1
    pointwise += chain.activation.count(",")  # of a program, each step
    if chain.bias:
        yield Added() if is_dense else Pointwise(2 * y)
    yield from (Pointwise(2 * y) for _ in range(pointwise))
    if training:
        yield from (Pointwise(3 * y) for _ in range(pointwise))
        if chain.bias:
            yield Sum(y)


def _is_flat(chain: Chain) -> bool:
    return all(c.tied and max(c.p, c.q) <= LARGEST_FLAT for c in chain.contractions)


def _by_weight(chain: Chain) -> list[Contraction]:
    return sorted(chain.contractions, key=lambda c: c.weight)


def _flat(chain: Chain, batch: int) -> Iterator[Call]:
    features = chain.in_features
    for number, c in enumerate(_by_weight(chain)):
        rest = features // c.p
        if rest > 1 and not number:
            yield Pointwise(2 * batch * features, turns=True)
        yield Product(1, c.q, rest * batch, c.p, (c.p, rest * batch), batched=False)
        features = rest * c.q
        if rest > 1:
            yield Pointwise(2 * batch * features)


def _flat_back(chain: Chain, batch: int) -> Iterator[Call]:
    features = chain.in_features
    for number, c in enumerate(_by_weight(chain)):
        rest = features // c.p
        runs = c.p, rest * batch
        yield Product(1, c.q, c.p, rest * batch, runs, batched=False)
        yield Product(1, c.p, rest * batch, c.q, runs, batched=False)
        if rest > 1:
            yield Pointwise(2 * batch * features, turns=not number)
            yield Pointwise(2 * batch * rest * c.q)
        features = rest * c.q


def _forward(chain: Chain, batch: int) -> Iterator[Call]:
    in_order = True  # whether the state lies as its shape says
    for c in chain.contractions:
        if c.tied:
            if not in_order:
                yield Pointwise(2 * batch * c.outer * c.p * c.inner, turns=True)
            in_order = True
            yield _product(c, batch)
        else:
            groups = c.outer * c.inner
            if c.inner == 1:
                yield Product(groups, c.q, batch, c.p, (c.p, batch))
            else:  # samples lie side by side in what an untied contraction has made
                yield Product(groups, batch, c.q, c.p, (c.p, c.q) if in_order else (batch, c.p, c.q))
            in_order = False
    if not in_order:
        yield Pointwise(2 * batch * chain.out_features, turns=True)


def _product(c: Contraction, batch: int) -> Product:
    if c.inner == 1:
        return Product(1, batch * c.outer, c.q, c.p, (c.p, c.q), batched=False)
    return Product(batch * c.outer, c.q, c.inner, c.p, (c.p, c.inner))


def _back(chain: Chain, batch: int) -> Iterator[Call]:
    for c in chain.contractions:
        samples, groups = batch * c.outer, c.outer * c.inner
        if c.tied and c.inner == 1:
            yield Product(1, c.p, c.q, samples, (c.p, c.q), batched=False)
            yield Product(1, samples, c.p, c.q, (c.p, c.q), batched=False)
        elif c.tied:  # a weight's gradient for each sample, then their sum
            yield Product(samples, c.q, c.p, c.inner, (c.p, c.inner))
            yield Sum(samples * c.q * c.p)
            yield Product(samples, c.p, c.inner, c.q, (c.p, c.inner))
        else:
            behind = c.p if c.inner == 1 else c.q
            yield Product(groups, c.q, c.p, batch, (batch, behind))
            yield Product(groups, c.p, batch, c.q, (c.p, batch if c.inner == 1 else c.q))
            yield Pointwise(2 * batch * c.outer * c.p * c.inner, turns=True)
    if not chain.contractions[-1].tied:
        yield Pointwise(2 * batch * chain.out_features, turns=True)
