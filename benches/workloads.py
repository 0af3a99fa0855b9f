"""The registry of workloads: one row per layer, batch and device, with the dtypes it is measured in.

CPU rows are named BATCH:FACTORS as the command line has them; CUDA rows carry the names under which
peers.json keeps the best time that anybody's published code reached on them. `source` says where a shape
comes from. Adding a workload is adding a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from factorlayer.spec import LayerSpec, resolve

PASSES = ("forward", "forward_backward")
CPU_DTYPES = ("float32", "float64")
ALL_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64")
NO_DOUBLE = ("float32", "tf32", "bfloat16", "float16")
SIXTEEN_BITS = ("bfloat16", "float16")

Factors = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A structured layer without bias on `batch` samples. tf32 is float32 with PyTorch's TF32 switch on."""

    name: str
    structure: str
    batch: int
    in_factors: Factors
    out_factors: Factors
    device: str
    dtypes: tuple[str, ...]
    source: str
    rank: int = 1

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.structure, self.in_factors, self.out_factors, self.rank)

    @property
    def shape(self) -> str:
        """In words: 20x36·28x44, or features, blocks and rank."""
        if self.structure == "kronecker":
            pairs = zip(self.in_factors, self.out_factors, strict=True)
            return "·".join(f"{p}" if p == q else f"{p}x{q}" for p, q in pairs)
        spec = self.spec
        return f"{spec.in_features}>{spec.out_features}, blocks {spec.blocks}, rank {spec.rank}"


def _cpu(name: str, in_factors: Factors, source: str, out_factors: Factors | None = None) -> Workload:
    batch = int(name.split(":")[0])
    return Workload(name, "kronecker", batch, in_factors, out_factors or in_factors, "cpu", CPU_DTYPES, source)


def _cuda(
    name: str,
    batch: int,
    in_factors: Factors,
    dtypes: tuple[str, ...],
    source: str,
    out_factors: Factors | None = None,
) -> Workload:
    return Workload(name, "kronecker", batch, in_factors, out_factors or in_factors, "cuda", dtypes, source)


def _monarch(
    name: str, batch: int, features: Factors, blocks: Factors, rank: int, source: str, device: str = "cuda"
) -> Workload:
    spec = resolve(features[0], features[1], "monarch", blocks=blocks, rank=rank)
    dtypes = CPU_DTYPES if device == "cpu" else NO_DOUBLE
    return Workload(name, "monarch", batch, spec.in_factors, spec.out_factors, device, dtypes, source, rank)


WORKLOADS = (
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
