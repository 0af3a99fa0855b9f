"""The planner, by the questions that it is asked: plans of chains and stacks as text, whether there are any, how fast.

The engine asks for plan_text() once for each chain, dtype and class of batch sizes. layers.py plans for one chain:
cuts.py cuts it into passes that fit on chip, works.py and products.py tile these for the GPU, gradients.py makes what
goes back. stacks.py plans for several layers at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from factorlayer.activations.functions import of_slope, of_value
from factorlayer.device.gpu import ELEMENT_BYTES, Gpu
from factorlayer.kernels.batches import BATCHES, LAST, OF_SOME
from factorlayer.maths.chain import Chain, parse_layers
from factorlayer.plan.kept import features_of
from factorlayer.plan.layers import plan
from factorlayer.plan.plan import Plan, PlanError, asked_of
from factorlayer.plan.recurrent import is_recurrent, plan_recurrent
from factorlayer.plan.stacks import back_us, plan_stack, us_around

__all__ = [
    "cut",
    "explain",
    "has_plan",
    "kept",
    "parsed",
    "plan",
    "plan_of",
    "plan_stack",
    "plan_text",
    "predicted",
    "runs_of",
    "times",
]

BACKWARD = "backward"
WORDS = (BACKWARD, "states", "frozen")  # behind the layers of a stack
LEAST_ROWS = 16  # samples of a tile
# Of a layer with a bias, beside L2's time for as many bytes as y has: with both, 88 % of 355 layers of seeds 291821 to
# 291823 are predicted within 30 % on an H200, 84 % without
BIAS_US = 0.3
ALONE = 1.1  # times what a layer is predicted to take beside those that one pass takes together


def plan_text(chain: str, dtype: str, batch_class: int, arch: int, sms: int, shared: int, memory: int = 0) -> str:
    """The plan as text, for csrc/runtime. Raises PlanError, which says why there is none."""
    return plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared, memory)).text()


def explain(chain: str, dtype: str, batch_class: int, arch: int, sms: int, shared: int, memory: int = 0) -> str:
    """The plan of plan_text in words, for people."""
    return str(plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared, memory)))


def has_plan(
    chain: str, dtype: str, arch: int, sms: int, shared: int, memory: int = 0, batch_class: int = OF_SOME
) -> bool:
    try:
        return bool(plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared, memory)).passes)
    except PlanError:
        return False


def predicted(
    chain: str, dtype: str, arch: int, sms: int, shared: int, memory: int = 0, batch_class: int = LAST
) -> float:
    """The microseconds that a plan is predicted to take; infinitely many where there is no kernel."""
    try:
        return plan_of(chain, dtype, batch_class, Gpu(arch, sms, shared, memory)).us
    except PlanError:
        return math.inf


def times(chain: str, dtype: str, arch: int, sms: int, shared: int, memory: int = 0, batch_class: int = LAST) -> str:
    """The microseconds that a plan is predicted to take in a CUDA graph, for each of the numbers of samples that are
    asked for; infinitely many where there is no plan."""
    asked = asked_of(chain, batch_class)
    try:
        us = us_for(chain, dtype, Gpu(arch, sms, shared, memory), batch_class)
    except PlanError:
        return " ".join([str(math.inf)] * len(asked))
    return " ".join(repr(us(n)) for n in asked)


def us_for(chain: str, dtype: str, gpu: Gpu, batch_class: int) -> Callable[[int], float]:
    """A function that predicts the microseconds of that class's plan for any number of samples. It adds a bias, and
    functions in double: passes do not count them."""
    passes = plan_of(chain, dtype, batch_class, gpu).passes
    layers, _, word = ((), "", "") if is_recurrent(chain) else _read(chain, dtype)
    bias = _bias_us(layers[0], dtype, gpu) if len(layers) == 1 and not word else (0.0, 0.0)

    def of_passes(samples: int) -> float:
        return sum(p.us_of(samples) for p in passes) + bias[0] + bias[1] * samples

    if not layers or dtype != "float64":  # of a recurrence's STEPS, what their functions take is part of it
        return of_passes
    functions, rate = _functions(layers, word == BACKWARD), gpu.rates.double_functions * gpu.sms
    # Beside memory alone, functions wait for it.
    beside = sum if any(layer.contractions for layer in layers) else max
    return lambda samples: beside((of_passes(samples), functions * _rows(layers, samples, gpu) / rate))


def _bias_us(layer: Chain, dtype: str, gpu: Gpu) -> tuple[float, float]:
    """Microseconds of a bias that is added to what contractions make: a wait for it, and L2's for each sample."""
    if not (layer.bias and layer.contractions) or layer.backward or layer.gradient:
        return 0.0, 0.0
    return BIAS_US, layer.out_features * ELEMENT_BYTES[dtype] / (gpu.l2_bytes * gpu.sms)


def _rows(layers: Sequence[Chain], samples: int, gpu: Gpu) -> int:
    """The number of samples whose functions in double take as long as those of `samples`: tiles of dense layers are
    dealt to multiprocessors, some of which get one more."""
    each = LEAST_ROWS * gpu.sms
    return -(-samples // each) * each if samples > each and all(layer.is_dense for layer in layers) else samples


def _functions(layers: Sequence[Chain], backward: bool) -> int:
    """How many special functions a sample takes."""
    count = 0
    for layer in layers:
        makes_slope = layer.slope or layer.through
        count += layer.out_features * (0 if makes_slope else of_value(layer.activation))
        count += layer.out_features * (of_slope(layer.activation) if makes_slope or backward else 0)
    return count


def kept(chain: str, dtype: str, arch: int, sms: int, shared: int, memory: int = 0, batch_class: int = OF_SOME) -> str:
    """The text of a layer that is trained with states between its passes kept; empty where it keeps none."""
    (layer,), computed = parsed(chain, dtype)
    features = features_of(layer, computed, BATCHES[batch_class], Gpu(arch, sms, shared, memory))
    return replace(layer, kept=features).text if features else ""


def cut(stack: str, dtype: str, arch: int, sms: int, shared: int, memory: int = 0, batch_class: int = LAST) -> str:
    """The runs of layers, as text; of a stack with BACKWARD behind it, those to be trained by."""
    layers = stack.removesuffix(f" | {BACKWARD}")
    return str(runs_of(layers, dtype, Gpu(arch, sms, shared, memory), batch_class, backward=layers != stack))


def runs_of(stack: str, dtype: str, gpu: Gpu, batch_class: int, backward: bool = False) -> tuple[tuple[int, int], ...]:
    """The runs of a stack's layers, as pairs of the first layer and the one behind the last. One pass takes each run;
    to be trained, one forward and one back. They are the fastest by prediction."""
    layers = [layer.text for layer in parse_layers(stack)]
    chains, computed = parsed(stack, dtype)
    batch = BATCHES[batch_class]
    runs: dict[tuple[int, int], float] = {}

    @functools.cache
    def us_of(text: str) -> float:
        return us_around(plan_of(text, dtype, batch_class, gpu).passes, batch)

    for begin, end in itertools.combinations(range(len(layers) + 1), 2):
        if not backward and end == begin + 1:
            continue
        try:
            text = " | ".join(layers[begin:end])
            runs[begin, end] = us_of(text) + (us_of(f"{text} | {BACKWARD}") if backward else 0.0)
        except PlanError:
            continue
    if not runs:
        return ()
    backs = [backward and layer.is_dense for layer in chains]
    alone = [
        us_of(c.text) + (back_us(c, computed, batch, gpu) if b else 0.0) for c, b in zip(chains, backs, strict=True)
    ]
    best: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {len(layers): (0.0, ())}  # from a layer on
    for begin in reversed(range(len(layers))):
        us, found = best[begin + 1]
        ways = [(us + ALONE * alone[begin], found)]
        for end in range(begin + 1, len(layers) + 1):
            if (begin, end) in runs:
                us, found = best[end]
                ways.append((us + runs[begin, end], ((begin, end), *found)))
        best[begin] = min(ways)
    return best[0][1]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector waits: planning makes objects by the hundred thousand and no cycles of them, and so many would
    have it look through all objects of the program, PyTorch's among them, which takes up to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def plan_of(text: str, dtype: str, batch_class: int, gpu: Gpu) -> Plan:
    if is_recurrent(text):
        return plan_recurrent(text, dtype, BATCHES[batch_class], gpu)
    layers, dtype, asked = _read(text, dtype)
    if asked or len(layers) > 1:
        return plan_stack(layers, dtype, BATCHES[batch_class], gpu, *(asked == word for word in WORDS))
    return plan(layers[0], dtype, BATCHES[batch_class], gpu)


def _read(text: str, dtype: str) -> tuple[tuple[Chain, ...], str, str]:
    """The layers of a text, what they are computed in, and which of WORDS stands behind them."""
    *parts, last = text.split(" | ")
    asked = last if last in WORDS and parts else ""
    return *parsed(" | ".join(parts) if asked else text, dtype), asked


def parsed(text: str, dtype: str) -> tuple[tuple[Chain, ...], str]:
    """The layers of a chain or stack, and what they are computed in."""
    layers = parse_layers(text)
    return layers, "tf32" if dtype == "float32" and layers[0].tf32 else dtype
