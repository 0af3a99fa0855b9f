"""Two gloo ranks on this machine: data parallel gradients are the average of the ranks' own."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from factorlayer import FactorLinear

RANKS = 2


def build() -> FactorLinear:
    torch.manual_seed(0)
    return FactorLinear(16, 36, activation="tanh", implementation="fused", dtype=torch.float64)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train_one_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        layer = DistributedDataParallel(build())
        layer(batch(rank)).square().sum().backward()
        alone = build()
        for r in range(RANKS):
            (alone(batch(r)).square().sum() / RANKS).backward()
        for parameter, expected in zip(layer.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
        dist.barrier()  # gloo's threads must not outlive their peer
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel(tmp_path: Path) -> None:
    mp.spawn(train_one_rank, args=(str(tmp_path / "store"),), nprocs=RANKS)
