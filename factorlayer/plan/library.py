"""What PyTorch takes for a layer by its own operations, as maths/batched.py writes it, or with its matrix multiplied
out before, as maths/multiplied.py does: predicted, for auto to compare.

A layer is counted into products, copies and sums as PyTorch launches them, forward and back. What each takes is its
start, and the longer of what it moves and what it multiplies, by rates of device/gpu.py. docs/layers.md says how far
that is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction

LARGEST_FLAT = 12  # as in maths/batched.py
TILES = (32, 64, 128, 256)  # rows and columns of a block's product
SHARES = {32: 0.5, 64: 0.75}  # of the rate that smaller blocks reach: each operand is read for fewer products
LARGEST_MATRIX = 1 << 26  # entries of one that is multiplied out: its gradient needs as much memory again
STEP = 32  # of what is summed, at a time
LEAST_STEPS = 4  # of a part, where the sum is split
IN_TWO = ("relu_squared",)  # activations that are two operations


@dataclass(frozen=True)
class Product:
    """`count` times [m, k] by [k, n]: at one call if it is `batched`, which no part of the sum is split for."""

    count: int
    m: int
    n: int
    k: int
    batched: bool = True

    def us(self, dtype: str, gpu: Gpu) -> float:
        rates, size = gpu.library, ELEMENT_BYTES[dtype]
        odd = sum(n * size % 16 != 0 for n in (self.m, self.n, self.k)) > 1  # pieces of less than 16 bytes
        moved = self.count * (self.m * self.k + self.k * self.n + self.m * self.n) * size
        memory = moved / (gpu.sms * (rates.odd_bytes if odd else rates.product_bytes))
        steps, way = -(-self.k // STEP), math.inf
        for tile in TILES[:-1] if odd else TILES:
            blocks = self.count * -(-self.m // tile) * -(-self.n // tile)
            step = 2 * tile * tile * STEP / (rates.flops if tile == TILES[-1] else rates.small_flops)[dtype]
            step /= SHARES.get(tile, 1.0)
            parts = {1} if self.batched or blocks >= gpu.sms else {1, min(gpu.sms // blocks, steps // LEAST_STEPS)}
            for split in parts - {0}:
                each = -(-steps // split)
                latency = each * rates.step_us[dtype] * (rates.odd_steps if odd else 1)
                busy = blocks * split / gpu.sms * (each * step + rates.block_us)
                way = min(way, latency + busy + (rates.split_us if split > 1 else 0))
        return rates.kernel_us + rates.product_us + max(memory, way)


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
    """Of so many elements, down to one row."""

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
    """Microseconds of a layer, one contraction behind another, with all its gradients if it is trained. dtype may be
    tf32."""
    return sum(call.us(dtype, gpu) for call in calls(chain, batch, training))


def multiplied_us(chain: Chain, dtype: str, batch: int, gpu: Gpu, training: bool) -> float:
    """The same with its matrix multiplied out before; infinitely many where that is not to be had."""
    is_known = all(c.tied for c in chain.contractions) or chain.is_monarch
    if chain.is_dense or not is_known or chain.in_features * chain.out_features > LARGEST_MATRIX:
        return math.inf
    return sum(call.us(dtype, gpu) for call in multiplied_calls(chain, batch, training))


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
    yield Product(1, batch, features[1], features[0], batched=False)
    yield from _finish(chain, batch, training, is_dense=True)
    if not training:
        return
    yield Product(1, features[1], features[0], batch, batched=False)
    yield Product(1, batch, features[0], features[1], batched=False)
    for product, elements in matrices:
        yield Pointwise(2 * elements, turns=True)
        yield Product(product.count, product.m, product.k, product.n, product.batched)
        yield Product(product.count, product.k, product.n, product.m, product.batched)
    yield from moved


def _matrices(chain: Chain) -> Iterator[tuple[Product, int]]:
    """The products that multiply a matrix out, and how many elements each makes, which are moved to their places."""
    if chain.is_monarch:
        first, second = chain.contractions
        groups = first.outer * second.inner
        yield Product(groups, second.q, first.p, first.q // second.inner), groups * second.q * first.p
        return
    entries, *others = (c.p * c.q for c in _by_weight(chain))
    for i, size in enumerate(others):
        is_last = i == len(others) - 1
        count, summed = (1, chain.rank) if is_last else (chain.rank, 1)
        yield Product(count, entries, size, summed, batched=not is_last), count * entries * size
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
        yield Product(1, c.q, rest * batch, c.p, batched=False)
        features = rest * c.q
        if rest > 1:
            yield Pointwise(2 * batch * features)


def _flat_back(chain: Chain, batch: int) -> Iterator[Call]:
    features = chain.in_features
    for number, c in enumerate(_by_weight(chain)):
        rest = features // c.p
        yield Product(1, c.q, c.p, rest * batch, batched=False)
        yield Product(1, c.p, rest * batch, c.q, batched=False)
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
            in_order = False
            groups = c.outer * c.inner
            yield Product(groups, *((c.q, batch) if c.inner == 1 else (batch, c.q)), c.p)
    if not in_order:
        yield Pointwise(2 * batch * chain.out_features, turns=True)


def _product(c: Contraction, batch: int) -> Product:
    if c.inner == 1:
        return Product(1, batch * c.outer, c.q, c.p, batched=False)
    return Product(batch * c.outer, c.q, c.inner, c.p)


def _back(chain: Chain, batch: int) -> Iterator[Call]:
    for c in chain.contractions:
        samples, groups = batch * c.outer, c.outer * c.inner
        if c.tied and c.inner == 1:
            yield Product(1, c.p, c.q, samples, batched=False)
            yield Product(1, samples, c.p, c.q, batched=False)
        elif c.tied:  # a weight's gradient for each sample, then their sum
            yield Product(samples, c.q, c.p, c.inner)
            yield Sum(samples * c.q * c.p)
            yield Product(samples, c.p, c.inner, c.q)
        else:
            yield Product(groups, c.q, c.p, batch)
            yield Product(groups, c.p, batch, c.q)
            yield Pointwise(2 * batch * c.outer * c.p * c.inner, turns=True)
    if not chain.contractions[-1].tied:
        yield Pointwise(2 * batch * chain.out_features, turns=True)
