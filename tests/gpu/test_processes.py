"""A process for each of two GPUs, over NCCL: models are trained as one GPU trains them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import RANKS, run
from test_distributed import by_blocks, losses, recurrent
from test_parallel import PLAN
from test_parallel import losses as losses_of_parts
from test_parallel import transformer as parted
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformer import tokens

from factorlayer import FactorLinear, FactorMLP, convert, fuse

TOO_FEW = not torch.cuda.is_available() or torch.cuda.device_count() < RANKS
pytestmark = pytest.mark.skipif(TOO_FEW, reason=f"needs {RANKS} GPUs")
CLOSE = 1e-10  # sums of the ranks are added in another order


def fused(model: nn.Module) -> nn.Module:
    """On this process' GPU, whose kernels run."""
    for part in model.modules():
        if isinstance(part, FactorLinear):
            part.implementation = "fused"
    return model.cuda()


def transformer() -> nn.Module:
    return fuse(fused(parted()), inplace=True)


def block() -> nn.Module:
    torch.manual_seed(0)
    return fused(FactorMLP([(4, 4), (4, 8), (4, 4)], activation="silu", gated=True, residual=True, dtype=torch.float64))


def data_parallel(rank: int) -> None:
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for make, given in ((transformer, tokens(4)), (block, x), (lambda: recurrent().cuda(), x)):
        expected = losses(make(), given.cuda(), alone=True)
        mine = given.chunk(RANKS)[rank].cuda()
        for wrap in (lambda model: DistributedDataParallel(model, device_ids=[rank]), by_blocks):
            assert losses(wrap(make()), mine) == pytest.approx(expected, rel=CLOSE)


def test_data_parallel_and_fully_sharded(tmp_path: Path) -> None:
    run(data_parallel, tmp_path, backend="nccl")


def tensor_parallel(rank: int) -> None:
    given = tokens().cuda()
    expected = losses_of_parts(fused(parted()), given)
    for shape in ((1, RANKS), (RANKS, 1)):
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
        model = parallelize_module(fused(parted()), mesh["tensor"], PLAN)
        for part in (*model.h, model):
            fully_shard(part, mesh=mesh["data"])
        assert losses_of_parts(model, given) == pytest.approx(expected, rel=CLOSE)


def test_tensor_parallel_and_fully_sharded(tmp_path: Path) -> None:
    run(tensor_parallel, tmp_path, backend="nccl")


def mixed_precision(rank: int) -> None:
    """Compiled, in bfloat16 under autocast, gradients of both ranks the same bits."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        convert(model, {nn.Linear: dict(structure="monarch", blocks=16, rank=2)})
        return fused(model)

    x = torch.randn(RANKS * 64, 256, generator=torch.Generator().manual_seed(3))
    wrapped = DistributedDataParallel(torch.compile(make(), backend="aot_eager"), device_ids=[rank])
    with torch.autocast("cuda", torch.bfloat16):
        loss = wrapped(x.chunk(RANKS)[rank].cuda()).float().square().mean()
    loss.backward()
    for parameter in wrapped.parameters():
        others: list[Tensor] = [torch.empty_like(parameter.grad) for _ in range(RANKS)]
        dist.all_gather(others, parameter.grad)
        assert torch.equal(*others) and others[0].isfinite().all() and others[0].any()


def test_mixed_precision_and_compiled(tmp_path: Path) -> None:
    run(mixed_precision, tmp_path, backend="nccl")
