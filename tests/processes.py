"""Two processes of one group on this machine, over gloo or NCCL, each of which runs a function."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
# What processes begin with: one that has imported these forks them. PyTorch itself imports the last two in each process
# that shards a model or has an optimizer, and in each that compiles something: 1 s and 2 s.
multiprocessing.set_forkserver_preload(
    [
        "factorlayer.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.nn.parallel",
        "torch._dynamo",
        "torch._inductor.pattern_matcher",
    ]
)


def run(one_rank: Callable[..., None], folder: Path, *arguments: object, backend: str = "gloo") -> None:
    """Calls it in each process, with its rank and the arguments."""
    given = (one_rank, backend, str(folder / "store"), *arguments)
    mp.start_processes(in_group, given, RANKS, start_method="forkserver")


def in_group(rank: int, one_rank: Callable[..., None], backend: str, store: str, *arguments: object) -> None:
    """Processes that find nothing wrong wait for each other and end at once: taking a group apart waits, with Python's
    lock, for a thread of gloo's, and that thread may be waiting for the lock."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    one_rank(rank, *arguments)
    ended = dist.FileStore(f"{store}-ended", RANKS)
    ended.set(str(rank), "")
    ended.wait([str(r) for r in range(RANKS)])
    os._exit(0)
