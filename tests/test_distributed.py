"""Two gloo ranks on this machine: gradients are the average of the ranks' own, of whole weights and of sharded ones."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
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
        alone = build()
        for r in range(RANKS):
            (alone(batch(r)).square().sum() / RANKS).backward()
        for wrap in (DistributedDataParallel, fully_shard):
            layer = wrap(build())
            layer(batch(rank)).square().sum().backward()
            for parameter, expected in zip(layer.parameters(), alone.parameters(), strict=True):
                whole = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
                torch.testing.assert_close(whole, expected.grad)
        dist.barrier()  # gloo's threads must not outlive their peer
    finally:
        dist.destroy_process_group()


def test_data_parallel_and_fully_sharded(tmp_path: Path) -> None:
    mp.spawn(train_one_rank, args=(str(tmp_path / "store"),), nprocs=RANKS)
