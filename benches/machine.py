"""What a run was measured on: names, cores, caches, instruction set, versions. Every results file has it."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from factorlayer.autograd.layer_ops import missing_extension


def describe(device: str, threads: list[int]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "l2": _cache_size(2),
        "l3": _cache_size(3),
        "instruction_set": _instruction_set(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties("cuda")
        about |= {"gpu": properties.name, "gpu_l2": properties.L2_cache_size, "cuda": torch.version.cuda}
    return about


def in_words(machine: dict[str, Any]) -> str:
    """The line over a table."""
    if "gpu" in machine:
        return f"{machine['gpu']}, CUDA {machine['cuda']}, PyTorch {machine['torch']}, {machine['date']}"
    caches = "".join(f", {size} {name.upper()}" for name in ("l2", "l3") if (size := machine[name]))
    return (
        f"{machine['cpu']}, {machine['cores']} cores{caches}, {machine['instruction_set']} kernels, "
        f"PyTorch {machine['torch']}, {machine['date']}"
    )


def _instruction_set() -> str:
    if missing_extension is None:
        return str(torch.ops.factorlayer.instruction_set())
    return torch.backends.cpu.get_cpu_capability().lower()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cache_size(level: int) -> str | None:
    """The size of a cache of the first core, as Linux writes it: 1024K."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "level").read_text().strip() == str(level):
            return (index / "size").read_text().strip()
    return None
