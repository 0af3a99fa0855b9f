"""The registry of workloads: one row per layer or block, batch and device, with the dtypes it is measured in.

CPU rows are named BATCH:FACTORS as the command line has them; CUDA rows carry the names under which
peers.json keeps the best time that anybody's published code reached on them; blocks have mlp- in theirs. `source`
says where a shape comes from. Adding a workload is adding a row.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from factorlayer import FactorLinear, FactorMLP, Implementation, Structure
from factorlayer.activations import functions
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.autograd.stack_ops import LARGEST_DENSE
from factorlayer.maths.spec import LayerSpec, resolve

PASSES = ("forward", "forward_backward")
CPU_DTYPES = ("float32", "float64")
ALL_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
NO_DOUBLE = ("float32", "tf32", "bfloat16", "float16")
SIXTEEN_BITS = ("bfloat16", "float16")

Factors = tuple[int, ...]
NGP_64X4 = (32, 64, 64, 64, 64, 16)
PINN = (2, *(20,) * 8, 1)
POLICY = (48, 512, 256, 128, 12)
JUMPING = ("relu", "leaky_relu")  # activations whose derivative jumps


class Activation(nn.Module):
    """A named one, as PyTorch has it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True)
class Layer:
    """A structured layer on `batch` samples. tf32 is float32 with PyTorch's TF32 switch on."""

    name: str
    structure: Structure
    batch: int
    in_factors: Factors
    out_factors: Factors
    device: str
    dtypes: tuple[str, ...]
    source: str
    rank: int = 1
    bias: bool = False
    jumps: ClassVar = 0
    depth: ClassVar = 1
    functions: ClassVar = (0, 0)  # special ones, forward and backward

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.structure, self.in_factors, self.out_factors, self.rank)

    @property
    def shape(self) -> str:
        """The shape in words: 20x36·28x44, or features, blocks and rank, and whether there is a bias."""
        spec, bias = self.spec, ", bias" if self.bias else ""
        if self.structure == "kronecker":
            pairs = zip(self.in_factors, self.out_factors, strict=True)
            sizes = "·".join(f"{p}" if p == q else f"{p}x{q}" for p, q in pairs)
            return (f"{sizes}, rank {self.rank}" if self.rank > 1 else sizes) + bias
        return f"{spec.in_features}>{spec.out_features}, blocks {spec.blocks}, rank {spec.rank}{bias}"

    @property
    def features(self) -> tuple[int, int]:
        """The features of x and of y."""
        return self.spec.in_features, self.spec.out_features

    @property
    def costs(self) -> tuple[int, int]:
        """Parameters, and FLOPs of a forward pass."""
        return self.spec.parameter_count, self.spec.flops(self.batch)

    @property
    def dense_costs(self) -> tuple[int, int]:
        """The costs of the nn.Linear in its place."""
        size = self.spec.in_features * self.spec.out_features
        return size, 2 * self.batch * size

    def make(self, implementation: Implementation) -> nn.Module:
        """The layer on the meta device, as dense() makes its own."""
        spec = self.spec
        return FactorLinear(
            spec.in_features,
            spec.out_features,
            bias=self.bias,
            structure=spec.structure,
            factors=(spec.in_factors, spec.out_factors),
            rank=spec.rank,
            implementation=implementation,
            device="meta",
        )

    def dense(self) -> nn.Linear:
        """The nn.Linear in its place."""
        return nn.Linear(*self.features, bias=self.bias, device="meta")


@dataclass(frozen=True)
class Block:
    """Dense layers with biases, and activations between them, on `batch` samples."""

    name: str
    widths: tuple[int, ...]
    activation: str
    batch: int
    device: str
    dtypes: tuple[str, ...]
    source: str

    @property
    def shape(self) -> str:
        """The shape in words: 48-512-256-128-12, elu."""
        return f"{'-'.join(map(str, self.widths))}, {self.activation}"

    @property
    def features(self) -> tuple[int, int]:
        return self.widths[0], self.widths[-1]

    def leaves_to_cublas(self, dtype: str) -> bool:
        """Whether v3 leaves some of its products to cuBLAS."""
        products = [p * q for p, q in itertools.pairwise(self.widths)]
        return dtype in ("bfloat16", "float16", "tf32") and max(products) > LARGEST_DENSE

    @property
    def depth(self) -> int:
        """Layers, each of which rounds."""
        return len(self.widths) - 1

    @property
    def jumps(self) -> int:
        """How many activations with a derivative that jumps a sample passes."""
        return len(self.widths) - 2 if self.activation in JUMPING else 0

    @property
    def functions(self) -> tuple[int, int]:
        """How many special functions a pass takes, forward and backward."""
        values = self.batch * sum(self.widths[1:-1])
        return values * functions.of_value(self.activation), values * functions.of_slope(self.activation)

    @property
    def costs(self) -> tuple[int, int]:
        sizes = sum(p * q for p, q in itertools.pairwise(self.widths))
        return sizes + sum(self.widths[1:]), 2 * self.batch * sizes

    @property
    def dense_costs(self) -> tuple[int, int]:
        return self.costs

    def make(self, implementation: Implementation) -> nn.Module:
        return FactorMLP(self.widths, activation=self.activation, implementation=implementation, device="meta")

    def dense(self) -> nn.Sequential:
        parts: list[nn.Module] = []
        for p, q in itertools.pairwise(self.widths):
            parts += [nn.Linear(p, q, device="meta"), Activation(self.activation)]
        return nn.Sequential(*parts[:-1])


Workload = Layer | Block


def _cpu(name: str, in_factors: Factors, source: str, out_factors: Factors | None = None) -> Layer:
    batch = int(name.split(":")[0])
    return Layer(name, "kronecker", batch, in_factors, out_factors or in_factors, "cpu", CPU_DTYPES, source)


def _cuda(
    name: str,
    batch: int,
    in_factors: Factors,
    dtypes: tuple[str, ...],
    source: str,
    out_factors: Factors | None = None,
) -> Layer:
    return Layer(name, "kronecker", batch, in_factors, out_factors or in_factors, "cuda", dtypes, source)


def _monarch(
    name: str, batch: int, features: Factors, blocks: Factors, rank: int, source: str, device: str = "cuda"
) -> Layer:
    spec = resolve(features[0], features[1], "monarch", blocks=blocks, rank=rank)
    dtypes = CPU_DTYPES if device == "cpu" else NO_DOUBLE
    return Layer(name, "monarch", batch, spec.in_factors, spec.out_factors, device, dtypes, source, rank)


def _block(name: str, widths: tuple[int, ...], activation: str, batch: int, source: str, device: str = "cuda") -> Block:
    return Block(name, widths, activation, batch, device, CPU_DTYPES if device == "cpu" else NO_DOUBLE[1:], source)


WORKLOADS: tuple[Workload, ...] = (
    _cpu("16:32^2", (32, 32), "faclin README, check and bench"),
    _cpu("32:128^2", (128, 128), "faclin README, bench"),
    _cpu("1024:32^2", (32, 32), "a batch of training at the size of faclin's example"),
    _cpu("1024:64^2", (64, 64), "FastKron performance.md; a LLaMA-7B hidden size"),
    _cpu("1024:8^4", (8, 8, 8, 8), "FastKron performance.md's eights, one factor fewer"),
    _cpu("1024:16^3", (16, 16, 16), "4096 features as a triple"),
    _cpu("1024:4^6", (4,) * 6, "4096 features in the most factors that still save work"),
    _cpu(
        "64:64^3",
        (64, 64, 64),
        "FastKron performance.md, batch 64: a sample's state is larger than an L2 cache",
    ),
    _cpu("4096:20x36.28x44", (20, 28), "rectangular, sizes that no vector width divides", (36, 44)),
    _cpu("2048:84.124", (84, 124), "sizes that only 4 divides, features near LLaMA-7B's 11008"),
    _monarch("512:gpt2s_fc1", 512, (768, 3072), (4, 4), 48, "fly configs gpt2_mlp_cfg/bflyblockdiag.yaml", "cpu"),
    _monarch("256:sqrt4096", 256, (4096, 4096), (64, 64), 1, "square sqrt(n) Monarch; fly tests, log_n=12", "cpu"),
    _block("16384:mlp-ngp_64x4", NGP_64X4, "relu", 16384, "instant-ngp's bench network, 64x4", "cpu"),
    _block("20000:mlp-pinn_20x8", PINN, "tanh", 20000, "Raissi PINN Burgers: 8 hidden layers of 20, tanh", "cpu"),
    _block("4096:mlp-rl_act", POLICY, "elu", 4096, "legged_gym policy [512,256,128] ELU, 4096 envs", "cpu"),
    _cuda("seed-32^2", 16, (32, 32), ALL_DTYPES, "faclin README, check and bench"),
    _cuda("seed-128^2", 32, (128, 128), ALL_DTYPES, "faclin README, bench"),
    _cuda("fk-64^2", 1024, (64, 64), ALL_DTYPES, "FastKron performance.md"),
    _cuda("fk-128^2", 1024, (128, 128), ALL_DTYPES, "FastKron performance.md"),
    _cuda("fk-8^5", 1024, (8,) * 5, ALL_DTYPES, "FastKron performance.md"),
    _cuda("fk-64^3", 1024, (64, 64, 64), ALL_DTYPES, "FastKron performance.md"),
    _cuda("fq-4096-dec", 16, (64, 64), SIXTEEN_BITS, "FlatQuant kernel_benchmark.py, decode, batch 16"),
    _cuda("fq-4096-pre", 16384, (64, 64), NO_DOUBLE[1:], "FlatQuant kernel_benchmark.py, prefill 8 x 2048"),
    _cuda("fq-14336", 16384, (112, 128), SIXTEEN_BITS, "FlatQuant, LLaMA-3-8B down_proj"),
    _cuda("lokr-2048>8192", 4096, (8, 256), NO_DOUBLE[1:], "LoKr full-matrix, AnimaLoraStudio PR 204", (8, 1024)),
    _cuda("fem-8^3>9^3", 65536, (8,) * 3, ("float64",), "CEED BP-style interpolation, p=7, q=9", (9,) * 3),
    _cuda("two-32^2", 131072, (32, 32), ("bfloat16",), "where two factors in one Triton kernel were measured"),
    _cuda("two-64^2", 32768, (64, 64), ("bfloat16",), "where two factors in one Triton kernel were measured"),
    _cuda("two-128^2", 8192, (128, 128), ("bfloat16",), "where two factors in one Triton kernel were measured"),
    _cuda("two-32^2-tf32", 65536, (32, 32), ("tf32",), "where two factors in one Triton kernel were measured"),
    _cuda("two-64^2-tf32", 16384, (64, 64), ("tf32",), "where two factors in one Triton kernel were measured"),
    _monarch("gpt2s_fc1", 16384, (768, 3072), (4, 4), 48, "fly configs gpt2_mlp_cfg/bflyblockdiag.yaml, nblocks 4"),
    _monarch("gpt2s_fc2", 16384, (3072, 768), (4, 4), 48, "fly configs gpt2_mlp_cfg/bflyblockdiag.yaml, fc2"),
    _monarch("vitb_proj", 25088, (768, 768), (4, 4), 48, "ViT-B attention projection, fly's recipe"),
    _monarch("bertb_fc1", 4096, (768, 3072), (4, 4), 48, "BERT-base, 32 x 128 tokens, fly's recipe"),
    _monarch(
        "sffn_xl_fc1",
        16384,
        (2048, 8192),
        (2, 2),
        512,
        "StructuredFFN basic.sh, gpt2xl blockshuffle nblocks 2",
    ),
    _monarch("llama_up", 4096, (4096, 11008), (16, 16), 16, "LLaMA-7B gate/up, 16 blocks"),
    _monarch("llama_down", 4096, (11008, 4096), (16, 16), 16, "LLaMA-7B down, 16 blocks"),
    _monarch("llama_decode", 16, (4096, 11008), (16, 16), 16, "LLaMA-7B gate/up at decode, batch 16"),
    _monarch("sqrt4096", 8192, (4096, 4096), (64, 64), 1, "square sqrt(n) Monarch; fly tests, log_n=12"),
    _monarch("btt_r4", 16384, (768, 3072), (32, 48), 4, "compute-better-spent build_btt, tt_rank 4"),
    _block("mlp-ngp_density", (32, 64, 16), "relu", 262144, "instant-ngp configs/nerf/base.json: 8x4 grid -> 64x1"),
    _block("mlp-ngp_64x4", NGP_64X4, "relu", 2097152, "instant-ngp frequency/tcnn bench: 64x4, batch 2^21"),
    _block(
        "mlp-thesis_128x6",
        (128,) * 7,
        "relu",
        1305600,
        "DaShi-Git train_model.py 6 x Linear(128,128), 13056*100 samples",
    ),
    _block("mlp-thesis_odd", (128, 127, 127, 128), "relu", 262144, "DaShi-Git train_model.py: 8*16-1 widths"),
    _block("mlp-nerf_256x8", (63, *(256,) * 8, 4), "relu", 196608, "NeRF: 1024 rays x 192 samples"),
    _block("mlp-pinn_20x8", PINN, "tanh", 20000, "Raissi PINN Burgers: 8 hidden layers of 20, tanh"),
    _block("mlp-rl_act", POLICY, "elu", 4096, "legged_gym policy [512,256,128] ELU, 4096 envs"),
    _block("mlp-dlrm_bottom", (13, 512, 256, 128), "relu", 32768, "MLPerf DLRM bottom MLP 13-512-256-128"),
    _block("mlp-mixer_token", (196, 384, 196), "gelu", 49152, "MLP-Mixer B/16 token mixing, 64 images x 768 channels"),
    _block("mlp-ffn_768", (768, 3072, 768), "gelu", 8192, "BERT/GPT-2 FFN 768-3072, 16 x 512 tokens"),
)


def select(device: str, patterns: Iterable[str] = ("*",), dtypes: Iterable[str] = ()) -> list[tuple[Workload, str]]:
    """(workload, dtype) of a device whose name matches one of the glob patterns, in the registry's order."""
    patterns, dtypes = list(patterns), set(dtypes)
    return [
        (workload, dtype)
        for workload in WORKLOADS
        if workload.device == device and any(fnmatchcase(workload.name, pattern) for pattern in patterns)
        for dtype in workload.dtypes
        if not dtypes or dtype in dtypes
    ]


def published(workload: Workload, dtype: str) -> dict[str, Any]:
    """The best published peer: {pass: {"us": …, "who": …}}, empty where nobody was measured."""
    peers = json.loads((Path(__file__).parent / "peers.json").read_text())["rows"]
    found: dict[str, Any] = peers.get(workload.name, {}).get(dtype, {}) if workload.device == "cuda" else {}
    return found
