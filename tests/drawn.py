"""What the campaign draws at random: layers, calls, blocks and recurrences, with samples for them.

A case depends on its seed and number alone, so that it can be drawn again by itself. Sizes are drawn until the work and
the bytes of a case are within a bound: then thousands of cases fit into a run.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from oracle import LAYOUTS, spec_id, with_layout
from torch import Tensor, nn

from factorlayer import FactorGRU, FactorLinear, FactorMLP, factor_linear
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.maths.spec import LayerSpec

SIZES = [1, 1, 2, 3, 4, 5, 7, 8, 8, 11, 13, 16, 16, 17, 24, 31, 32, 32, 33, 48, 63, 64, 96, 100, 127, 128, 200, 257]
SMALL_SIZES = [1, 2, 2, 3, 4, 4, 5, 7, 8, 8, 9, 16]
BATCHES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 255, 300, 1000, 2049, 5000, 20000]
# Powers of ten that x and grad_y may be multiplied by: of float16 such that no product of a few leaves its range.
SCALES = {"float16": (-2, 1), "bfloat16": (-6, 4), "float32": (-6, 4), "tf32": (-6, 4), "float64": (-6, 4)}
BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # of x, y or a state
WORK = {"cpu": 3e7, "cuda": 3e9}  # multiply-adds of a forward pass
PLANTED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Snake(nn.Module):
    """It learns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.frequency * x) ** 2 / self.frequency


TRACED: dict[str, Callable[[], Any]] = {
    "prelu": nn.PReLU,
    "snake": Snake,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "softsign": lambda: lambda x: x / (1 + x.abs()),
    "quick_gelu": lambda: lambda x: x * torch.sigmoid(1.702 * x),
    "learned_both": lambda: nn.Sequential(nn.PReLU(), Snake()),
    "bump": lambda: lambda x: torch.exp(-(x * x)) + 0.1 * torch.atan(x),
}
KINKED = {"relu", "leaky_relu", "prelu", "learned_both", "selu", "hardtanh", "hardswish"}  # whose slopes jump


class Call(nn.Module):
    """A functional call, whose weights and activation it keeps."""

    def __init__(self, spec: LayerSpec, bias: bool, activation: Any) -> None:
        super().__init__()
        self.spec, self.implementation, self.activation = spec, "fused", activation
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in spec.weight_shapes)
        self.bias = nn.Parameter(torch.empty(spec.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return factor_linear(
            x, list(self.weights), self.bias, self.activation, self.spec.structure, self.implementation,
            rank=self.spec.rank,
        )  # fmt: skip


class Recurrence(nn.Module):
    """The states of a FactorGRU, behind every step of [steps, batch, features]; sequences may be of different length,
    or begin again in between."""

    def __init__(self, ends: bool, starts: bool, sizes: tuple[int, int, int], settings: dict[str, Any]) -> None:
        super().__init__()
        self.gru, self.ends, self.starts = FactorGRU(*sizes, **settings), ends, starts

    @property
    def implementation(self) -> Any:
        return self.gru.implementation

    @implementation.setter
    def implementation(self, name: Any) -> None:
        self.gru.implementation = name

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        numbers = torch.arange(steps * batch).view(steps, batch)
        starts = (numbers % 5 == 3).to(x.device) if self.starts else None
        if not self.ends or not numbers.numel():
            return self.gru(x, starts=starts)[0]
        lengths = numbers[0] * 7 % steps + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], total_length=steps)[0]


@dataclass(frozen=True)
class Drawn:
    """A module by what it is made of, and samples for it; `plant` is what stands at one place of one of them."""

    number: int
    kind: str
    what: str
    make: Callable[[], nn.Module]
    dtype: str
    leading: tuple[int, ...]
    activations: tuple[str, ...]
    layout: str
    scale: tuple[int, int]
    threads: int
    plant: str
    seed: int

    @property
    def batch(self) -> int:
        return math.prod(self.leading)

    def __str__(self) -> str:
        parts = [f"case {self.number}: {self.kind} {self.what}", self.dtype, f"x {[*self.leading, '…']} {self.layout}"]
        parts += [f"x 10^{self.scale[0]}, grad_y 10^{self.scale[1]}", f"{self.threads} threads"]
        return ", ".join(parts + [f"{self.plant} planted"] * bool(self.plant))


def drawn_spec(rng: random.Random, most: int) -> LayerSpec:
    while True:
        kind = rng.choice(["kronecker", "kronecker", "blocks", "untied"])
        count = {"kronecker": rng.choice([1, 2, 2, 2, 3, 3, 4, 5, 6]), "blocks": 2, "untied": rng.randint(1, 4)}[kind]
        pool = SIZES if count < 3 else SMALL_SIZES
        p = tuple(rng.choice(pool) for _ in range(count))
        q = p if rng.random() < 0.3 else tuple(rng.choice(pool) for _ in range(count))
        if max(math.prod(p), math.prod(q)) > most:
            continue
        spec = LayerSpec("kronecker" if kind == "kronecker" else "monarch", p, q)
        ranks = 1 if kind == "untied" else min(6, spec.max_rank)
        return replace(spec, rank=rng.choice([1, 1, rng.randint(1, ranks)]))


def drawn_batch(rng: random.Random, features: int, work: float, bytes: int, on: str) -> int:
    """Of `features` in the widest state and `work` multiply-adds a sample."""
    return rng.choice([batch for batch in BATCHES if batch <= most_samples(features, work, bytes, on)])


def most_samples(features: int, work: float, bytes: int, on: str) -> int:
    return max(1, min(bytes // (8 * features), int(WORK[on] / max(1.0, work))))


def drawn_activation(rng: random.Random, planted: bool, on: str) -> str:
    """A planted number goes through those whose slopes are not rounded to 0 somewhere. On a GPU not through those with
    a flat side either, which kernels of several layers multiply by a slope of 0."""
    if planted:
        return rng.choice(["identity", "leaky_relu", *(["relu", "hardtanh"] if on == "cpu" else [])])
    return rng.choice(["identity", "identity", *ACTIVATIONS, *TRACED])


def activation(name: str) -> Any:
    return TRACED[name]() if name in TRACED else name


def widest(spec: LayerSpec) -> int:
    return spec.terms * max(c.outer * c.inner * max(c.p, c.q) for c in spec.contractions) * max(1, spec.rank)


def draw(seed: int, number: int, on: str, bytes: int | None = None) -> Drawn:
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(["layer", "layer", "call", "block", "gated", "residual", "recurrence"])
    dtype = rng.choice(["float64", "float32", "bfloat16", "float16", *(["tf32"] if on == "cuda" else [])])
    plant = rng.choice(list(PLANTED)) if rng.random() < 0.15 else ""
    bias = rng.random() < 0.7
    bytes = BYTES[on] if bytes is None else bytes
    leading: tuple[int, ...] = ()
    if kind == "recurrence":
        plant = ""  # gates take an infinity for a one
        names = (rng.choice(["tanh", "tanh", "tanh", "relu", "sine", "mish"]),)
        leading, make, what = drawn_recurrence(rng, bias, names[0], bytes, on)
    elif kind in ("layer", "call"):
        spec = drawn_spec(rng, bytes // 256)
        names = (drawn_activation(rng, bool(plant), on),)
        batch = drawn_batch(rng, widest(spec), spec.multiply_adds(), bytes, on)
        make = layer_maker(spec, bias, names[0]) if kind == "layer" else lambda: Call(spec, bias, activation(names[0]))
        what = f"{spec_id(spec)} {names[0]}"
    else:
        names = (drawn_activation(rng, bool(plant), on), drawn_activation(rng, bool(plant), on))
        widths, settings = drawn_block(rng, kind)
        features = [width if isinstance(width, int) else math.prod(width) for width in widths]
        work = 2 * sum(p * q for p, q in itertools.pairwise(features))
        batch = drawn_batch(rng, 2 * max(features), work, bytes, on)
        make = block_maker(widths, bias, names, settings)
        what = f"{widths} {settings} {' '.join(names)}"
    least, most = SCALES[dtype]
    most = min(most, 0) if kind == "gated" and dtype == "float16" else most  # each of its layers squares
    wild = rng.random() < 0.5 and not plant
    scale = (rng.randint(least, most), rng.randint(least, most)) if wild else (0, 0)
    if kind == "recurrence":  # of large x gates are all open or all closed, and gradients nothing
        scale = (max(-1, min(1, scale[0])), scale[1])
    split = not leading and batch % 2 == 0 and rng.random() < 0.3
    return Drawn(
        number,
        kind,
        what + " with bias" * bias,
        make,
        dtype,
        leading or ((2, batch // 2) if split else () if batch == 1 and rng.random() < 0.3 else (batch,)),
        names,
        rng.choice(LAYOUTS),
        scale,
        rng.choice([1, 1, 2, 3]),
        plant,
        rng.randrange(1 << 30),
    )


def layer_maker(spec: LayerSpec, bias: bool, name: str) -> Callable[[], nn.Module]:
    return lambda: FactorLinear(
        spec.in_features,
        spec.out_features,
        bias,
        structure=spec.structure,
        factors=(spec.in_factors, spec.out_factors),
        rank=spec.rank,
        activation=activation(name),
    )


def drawn_block(rng: random.Random, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Widths are numbers, or factors; where two neighbours have as many, the layer between them is structured."""

    def width() -> Any:
        count = rng.choice([1, 1, 2, 2, 3])
        pool = [8, 12, 16, 1, 3, 5, 32] if count == 2 else [2, 3, 4, 5, 8]
        return (
            rng.choice([1, 3, 12, 16, 20, 40, 64, 100, 128, 300]) if count == 1 else tuple(rng.choices(pool, k=count))
        )

    widths = [width() for _ in range(rng.choice([2, 3, 3, 4, 5]))]
    if kind == "residual":
        widths[-1] = widths[0]
    settings: dict[str, Any] = {"structure": rng.choice(["kronecker", "monarch"])}
    return widths, settings | ({kind: True} if kind != "block" else {})


def drawn_recurrence(
    rng: random.Random, bias: bool, name: str, bytes: int, on: str
) -> tuple[tuple[int, int], Callable[[], nn.Module], str]:
    """Steps and samples, what makes the module, and that in words."""
    structure, settings = rng.choice(["dense", "kronecker", "monarch", "blocks"]), dict[str, Any]()
    if structure == "kronecker":
        count = rng.choice([2, 2, 3])
        pool = [1, 2, 3, 4, 5, 8, 11, 16, 24, 32] if count == 2 else [1, 2, 3, 4, 5, 8]
        factors = settings["factors"] = tuple(rng.choice(pool) for _ in range(count))
        hidden = math.prod(factors)
        settings["rank"] = rng.choice([1, 1, min(2, LayerSpec("kronecker", factors, factors).max_rank)])
    elif structure == "dense":
        hidden = rng.choice([1, 3, 8, 20, 33, 64, 100, 128, 200, 256])
    else:
        blocks = settings["blocks"] = rng.choice([1, 2, 3, 4, 8])
        each = rng.choice([blocks, 4 * blocks, 8, 24])
        hidden = blocks * each
        if structure == "monarch":
            settings["rank"] = rng.choice([1, 1, min(2, LayerSpec("monarch", (blocks, each), (each, blocks)).max_rank)])
    as_many = structure == "monarch" or rng.random() < 0.5
    features = hidden if as_many else rng.choice([1, 5, 16, 40, 100])
    settings |= {"structure": structure, "bias": bias, "bidirectional": rng.random() < 0.3}
    settings |= {"input_structure": rng.choice(["dense", None]) if features == hidden else "dense"}
    settings |= {"reset": rng.choice(["after", "after", "before"]), "learned_initial": rng.random() < 0.3}
    most = most_samples(4 * hidden, 6 * hidden * (hidden + features), bytes, on)
    sizes = [(t, n) for t in (1, 2, 3, 7, 16, 33, 100) for n in (1, 2, 3, 8, 16, 17, 64, 65, 130) if t * n <= most]
    (steps, batch), layers = rng.choice(sizes), rng.choice([1, 1, 2])
    ends, starts = rng.random() < 0.2, rng.random() < 0.2
    return (
        (steps, batch),
        lambda: Recurrence(ends, starts, (features, hidden, layers), settings | {"activation": activation(name)}),
        f"{features} {hidden} {layers} {settings} {name}" + " of different length" * ends + " begins again" * starts,
    )


def block_maker(
    widths: list[Any], bias: bool, names: tuple[str, ...], settings: dict[str, Any]
) -> Callable[[], nn.Module]:
    return lambda: FactorMLP(
        widths, activation=activation(names[0]), output_activation=activation(names[1]), bias=bias, **settings
    )


def inputs(
    drawn: Drawn, dtype: torch.dtype, device: str, seed: int, planted: bool = True
) -> tuple[nn.Module, Tensor, Tensor]:
    """The module, x and grad_y as the dtype has them. Where something is planted all numbers are positive, so that an
    infinity meets no other one and no zero, and weights are so small that sums of positive numbers keep their size;
    without `planted`, the same but for the plant."""
    generator = torch.Generator().manual_seed(drawn.seed + seed)
    module = copy.deepcopy(drawn.make()).double()
    features = 0
    for layer in module.modules():
        if isinstance(layer, (FactorLinear, Call)):
            features = features or layer.spec.in_features
            shapes = layer.weights
        elif isinstance(layer, FactorGRU):
            features = layer.input_size
            for given, parameter in layer.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                scale = parameter.shape[-1] ** -0.5 if given.startswith("weight") else 0.3
                parameter.data = noise * scale
            continue
        elif isinstance(layer, nn.Linear):
            features = features or layer.in_features
            shapes = [layer.weight]
        else:
            continue
        for weight in [*shapes, *([] if layer.bias is None else [layer.bias])]:
            scale = 1.0 if weight is layer.bias else weight.shape[-1] ** (-1.0 if drawn.plant else -0.5)
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale
    x = torch.randn(*drawn.leading, features, generator=generator, dtype=torch.float64) * 10.0 ** drawn.scale[0]
    with torch.no_grad():
        made = module(x)
    grad_y = torch.randn(made.shape, generator=generator, dtype=torch.float64) * 10.0 ** drawn.scale[1]
    tensors = [x, grad_y, *(parameter.data for parameter in module.parameters())]
    if drawn.plant:
        for tensor in tensors:
            tensor.abs_()
        places = [tensor for tensor in tensors if tensor.numel() > 1]
        if places:
            place = places[int(torch.randint(len(places), (), generator=generator))]
            at = int(torch.randint(place.numel(), (), generator=generator))
            if planted:
                place.view(-1)[at] = PLANTED[drawn.plant]
    laid_out = with_layout(x.to(device, dtype), drawn.layout if drawn.leading else "contiguous")
    return module.to(device, dtype), laid_out, grad_y.to(device, dtype)
