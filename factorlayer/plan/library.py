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
LINE = 128  # bytes
IN_PAIRS = ("tf32", "tf32 turned", "bfloat16", "float16")  # two blocks share one operand
# Products on the way there that cuBLAS takes slow kernels for, if they have LEAST_ROWS: those of few entries and
# summands, and of floats with a bias those of few rows, too
FEW_ENTRIES, FEW_SUMMANDS, FEW_ROWS, LEAST_ROWS = 24 << 10, 512, 512, 17
IN_TWO = ("relu_squared",)  # activations that are two operations


@dataclass(frozen=True)
class Product:
    """`count` times [m, k] by [k, n]: at one call if it is `batched`, which no part of the sum is split for. `runs` are
    numbers that lie side by side in the three matrices; of `turned` ones of the two that are multiplied, these are no
    neighbours in the sum. A `bias` may be added."""

    count: int
    m: int
    n: int
    k: int
    runs: tuple[int, ...]
    batched: bool = True
    turned: int = 0
    bias: bool = False

    def us(self, dtype: str, gpu: Gpu) -> float:
        return _product_us(self, dtype, gpu)

    @property
    def is_batch(self) -> bool:
        """Whether one call makes several."""
        return self.batched and self.count > 1

    def access(self, dtype: str) -> int:
        """Bytes that are loaded and stored at once."""
        return math.gcd(WHOLE, *(n * ELEMENT_BYTES[dtype] for n in self.runs))


@functools.lru_cache(4096)
def _product_us(product: Product, dtype: str, gpu: Gpu) -> float:
    """A matrix and a vector wait for memory. Of others it is the fastest way: multiprocessors take turns at blocks,
    which wait for each step of the sum, or multiply, or read L2, whatever takes longest."""
    rates, size, p = gpu.library, ELEMENT_BYTES[dtype], product
    unit, is_vector = unit_of(p, dtype), min(p.m, p.n) == 1 and not p.is_batch
    is_narrow = size < 8 and " by " in unit  # loaded in pieces that are less than a double
    more = rates.bias_share if p.bias and p.n * size % LINE else 0.0
    moved = p.count * (p.m * p.k + p.k * p.n + p.m * p.n * (1 + more)) * size
    each = rates.vector_bytes if is_vector else rates.odd_bytes if is_narrow else rates.product_bytes
    memory = moved / (gpu.sms * each)
    us = rates.kernel_us + rates.product_us + (rates.added_us[dtype] if p.bias else 0.0)
    if is_vector:
        return us + rates.vector_us + memory
    if _are_few(p) and p.k < FEW_SUMMANDS:
        us += rates.few_us.get(unit, 0.0)
    return us + max(memory, _blocks_us(p, unit, dtype, gpu))


def _blocks_us(p: Product, unit: str, dtype: str, gpu: Gpu) -> float:
    rates, how, size = gpu.library, gpu.library.units[unit], ELEMENT_BYTES[dtype]
    in_pairs = gpu.clusters and unit in IN_PAIRS
    steps, way = -(-p.k // STEP), math.inf
    for rows, columns in TILES:
        read = rows + columns / (2 if in_pairs else 1)
        step = max(2 * rows * columns * STEP / how.flops, read * STEP * size / gpu.l2_bytes)
        tiles = p.count * -(-p.m // rows) * -(-p.n // columns)
        together = min(MOST_BLOCKS, SUMS // (rows * columns))
        for split in SPLITS[:1] if p.is_batch else SPLITS:
            if split > 1 and (steps < LEAST_STEPS * split or tiles * split > MOST_WAVES * gpu.sms):
                break
            blocks, each = -(-tiles * split // gpu.sms), -(-steps // split)
            turns = -(-blocks // together)
            us = max(blocks * each * step, turns * each * how.step_us)
            us += turns * (how.batched_us if p.is_batch else how.block_us)
            way = min(way, us + (rates.split_us if split > 1 else 0.0))
    return way


def _are_few(p: Product) -> bool:
    """Whether a product on the way there has few entries, and not few rows."""
    return not p.batched and not p.turned and p.m >= LEAST_ROWS and p.m * p.n <= FEW_ENTRIES


def unit_of(product: Product, dtype: str) -> str:
    """The name that a product's rates have. Of floats they do not depend on how operands are loaded, but on a bias, of
    doubles on both; and of tf32, whose matrix instructions take no turned operands, on these."""
    access = product.access(dtype)
    if dtype == "float64" and product.bias:
        return "float64 with bias"
    if dtype == "float32":
        slow = product.bias and product.m >= LEAST_ROWS and (product.m <= FEW_ROWS or _are_few(product))
        return "float32 with bias" if slow else dtype
    if access < WHOLE:
        return f"{dtype} by {min(access, max(4, ELEMENT_BYTES[dtype]))}"
    return "tf32 turned" if dtype == "tf32" and product.turned else dtype


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
    """The sum of so many rows, down to one."""

    rows: int
    columns: int

    def us(self, dtype: str, gpu: Gpu) -> float:
        rates, elements = gpu.library, self.rows * self.columns
        memory = elements * ELEMENT_BYTES[dtype] / rates.pointwise_bytes
        us = max(memory, elements / rates.summed) / gpu.sms
        return rates.kernel_us + rates.row_us * min(self.rows, rates.summed_rows) + us


Call = Product | Pointwise | Sum


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
    yield Product(1, batch, features[1], features[0], features, batched=False, bias=chain.bias)
    yield from _finish(chain, batch, training, is_dense=True)
    if not training:
        return
    yield Product(1, features[1], features[0], batch, features, batched=False, turned=2)
    yield Product(1, batch, features[0], features[1], features, batched=False, turned=1)
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
        yield Product(groups, second.q, first.p, rank, (rank, first.p), turned=1), groups * second.q * first.p
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
    if chain.bias and not is_dense:  # which adds it to its product
        yield Pointwise(2 * y)
    yield from (Pointwise(2 * y) for _ in range(pointwise))
    if training:
        yield from (Pointwise(3 * y) for _ in range(pointwise))
        if chain.bias:
            yield Sum(batch, chain.out_features)


def _is_flat(chain: Chain) -> bool:
    return not chain.is_dense and all(c.tied and max(c.p, c.q) <= LARGEST_FLAT for c in chain.contractions)


def _by_weight(chain: Chain) -> list[Contraction]:
    return sorted(chain.contractions, key=lambda c: c.weight)


def _flat(chain: Chain, batch: int) -> Iterator[Call]:
    features = chain.in_features
    for number, c in enumerate(_by_weight(chain)):
        rest = features // c.p
        if rest > 1 and not number:
            yield Pointwise(2 * batch * features, turns=True)
        yield Product(1, c.q, rest * batch, c.p, (c.p, rest * batch), batched=False, turned=1)
        features = rest * c.q
        if rest > 1:
            yield Pointwise(2 * batch * features)


def _flat_back(chain: Chain, batch: int) -> Iterator[Call]:
    features = chain.in_features
    for number, c in enumerate(_by_weight(chain)):
        rest = features // c.p
        runs = c.p, rest * batch
        yield Product(1, c.q, c.p, rest * batch, runs, batched=False)
        yield Product(1, c.p, rest * batch, c.q, runs, batched=False, turned=2)
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
            yield _product(c, batch, chain.bias and chain.is_dense)
        else:
            groups = c.outer * c.inner
            if c.inner == 1:
                yield Product(groups, c.q, batch, c.p, (c.p, batch), turned=not in_order)
            else:  # samples lie side by side in what an untied contraction has made
                runs = (c.p, c.q) if in_order else (batch, c.p, c.q)
                yield Product(groups, batch, c.q, c.p, runs, turned=not in_order)
            in_order = False
    if not in_order:
        yield Pointwise(2 * batch * chain.out_features, turns=True)


def _product(c: Contraction, batch: int, bias: bool) -> Product:
    if c.inner == 1:
        return Product(1, batch * c.outer, c.q, c.p, (c.p, c.q), batched=False, bias=bias)
    return Product(batch * c.outer, c.q, c.inner, c.p, (c.p, c.inner), turned=1)


def _back(chain: Chain, batch: int) -> Iterator[Call]:
    for c in chain.contractions:
        samples, groups = batch * c.outer, c.outer * c.inner
        if c.tied and c.inner == 1:
            yield Product(1, c.p, c.q, samples, (c.p, c.q), batched=False, turned=2)
            yield Product(1, samples, c.p, c.q, (c.p, c.q), batched=False, turned=1)
        elif c.tied:  # a weight's gradient for each sample, then their sum
            yield Product(samples, c.q, c.p, c.inner, (c.p, c.inner))
            yield Sum(samples, c.q * c.p)
            yield Product(samples, c.p, c.inner, c.q, (c.p, c.inner), turned=2)
        else:
            behind = c.p if c.inner == 1 else c.q
            yield Product(groups, c.q, c.p, batch, (batch, behind), turned=2)
            yield Product(groups, c.p, batch, c.q, (c.p, batch if c.inner == 1 else c.q), turned=1)
            yield Pointwise(2 * batch * c.outer * c.p * c.inner, turns=True)
    if not chain.contractions[-1].tied:
        yield Pointwise(2 * batch * chain.out_features, turns=True)
