"""Two gloo ranks on this machine: gradients are the average of the ranks' own, of whole weights and of sharded ones."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from modules import module, sample
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from versions import fails_before_2_12

from factorlayer import FactorLinear, functional

RANKS = 2
# What ranks begin with: a process that has imported these forks them
multiprocessing.set_forkserver_preload(
    ["factorlayer", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.nn.parallel"]
)


def run(one_rank: Callable[..., None], store: Path, *arguments: object) -> None:
    mp.start_processes(in_group, (one_rank, str(store), *arguments), RANKS, start_method="forkserver")


def in_group(rank: int, one_rank: Callable[..., None], store: str, *arguments: object) -> None:
    """Ranks that find nothing wrong wait for each other and end at once: taking a group apart waits, with Python's
    lock, for a thread of gloo's, and that thread may be waiting for the lock."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    one_rank(rank, *arguments)
    ended = dist.FileStore(f"{store}-ended", RANKS)
    ended.set(str(rank), "")
    ended.wait([str(r) for r in range(RANKS)])
    os._exit(0)


def build() -> FactorLinear:
    torch.manual_seed(0)
    return FactorLinear(16, 36, activation="tanh", implementation="fused", dtype=torch.float64)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train_one_rank(rank: int) -> None:
    alone = build()
    for r in range(RANKS):
        (alone(batch(r)).square().sum() / RANKS).backward()
    for wrap in (DistributedDataParallel, fully_shard):
        layer = wrap(build())
        layer(batch(rank)).square().sum().backward()
        for parameter, expected in zip(layer.parameters(), alone.parameters(), strict=True):
            whole = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
            torch.testing.assert_close(whole, expected.grad)


@pytest.mark.feature("DistributedDataParallel and fully_shard", result="works")
def test_data_parallel_and_fully_sharded(tmp_path: Path) -> None:
    run(train_one_rank, tmp_path / "store")


# DTensors


def sharded(layer: nn.Module, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    def shard(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))

    return distribute_module(layer, mesh, shard)


def run_dtensors(rank: int, of_parameters: Placement) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for kind in ("layer", "block", "fuse"):
        for of_x in (Shard(0), Replicate()):
            compare_dtensors(kind, mesh, of_x, of_parameters)
        refuse_dtensors(kind, mesh)


def compare_dtensors(kind: str, mesh: DeviceMesh, of_x: Placement, of_parameters: Placement) -> None:
    """auto runs the batched implementation, of PyTorch's operations, which know how they are sharded; and says so."""
    plain, x = module(kind, "naive"), sample(6)
    y = plain(x)
    y.square().sum().backward()
    why = "fused cannot: nobody has said how its kernels are sharded, and x is a DTensor"
    for implementation, does in (("auto", "runs batched"), ("batched", ""), ("fused", "is refused")):
        told = module(kind, implementation).explain()
        assert "DTensor" not in told
        said = sharded(module(kind, implementation), mesh, of_parameters).explain().removeprefix(told).strip()
        assert said == (does and f"its parameters are DTensors now: an x that is one {does}, because {why}")
    for implementation in ("auto", "batched"):
        model = sharded(module(kind, implementation), mesh, of_parameters)
        functional._warned.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = model(distribute_tensor(x, mesh, [of_x]))
        said = [str(w.message) for w in warned if "factorlayer" in str(w.message)]
        assert len(said) == (implementation == "auto")
        assert all("runs the batched implementation, not the fused one: nobody has said how its" in s for s in said)
        torch.testing.assert_close(found.full_tensor(), y)
        found.square().sum().backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    with pytest.raises(RuntimeError, match="nobody has said how its kernels are sharded, and x is a DTensor; or use"):
        sharded(module(kind, "fused"), mesh, of_parameters)(distribute_tensor(x, mesh, [of_x]))


def refuse_dtensors(kind: str, mesh: DeviceMesh) -> None:
    x = sample(6)
    for implementation in ("auto", "naive", "batched"):
        with pytest.raises(TypeError, match="should all be DTensors, or none of them, x is none; give x to distribute"):
            sharded(module(kind, implementation), mesh, Replicate())(x)
        with pytest.raises(TypeError, match="should all be DTensors, or none of them, a weight or the bias is none"):
            module(kind, implementation)(distribute_tensor(x, mesh, [Replicate()]))
    with pytest.raises(NotImplementedError, match="ColwiseParallel currently only support nn"):
        parallelize_module(module(kind, "auto"), mesh, ColwiseParallel())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.feature("DTensors", result="falls back")
@pytest.mark.parametrize(
    "of_parameters",
    [
        Replicate(),
        pytest.param(Shard(0), marks=fails_before_2_12("a DTensor sharded along a factor refuses to be viewed")),
    ],
    ids=["whole", "sharded"],
)
def test_dtensors(of_parameters: Placement, tmp_path: Path) -> None:
    run(run_dtensors, tmp_path / "store", of_parameters)


def checkpoint_in_parallel(rank: int) -> None:
    for kind in ("layer", "block", "fuse"):
        alone = module(kind, "fused")
        for r in range(RANKS):
            (alone(batch(r)[:, :12]).square().sum() / RANKS).backward()
        wrapped = DistributedDataParallel(module(kind, "fused"))
        checkpoint(wrapped, batch(rank)[:, :12], use_reentrant=False).square().sum().backward()
        for parameter, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.feature("activation checkpointing under DistributedDataParallel", result="works")
def test_checkpointing_in_parallel(tmp_path: Path) -> None:
    run(checkpoint_in_parallel, tmp_path / "store")
