"""What runs here: the package, PyTorch, and what the kernels were built or are compiled for. `--version` prints it."""

from __future__ import annotations

import torch

from factorlayer import __version__
from factorlayer.autograd import layer_ops


def version_lines() -> list[str]:
    lines = [f"factorlayer {__version__}, PyTorch {torch.__version__}, {kernels(torch.device('cpu'))}"]
    if torch.cuda.is_available():
        found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        lines += [f"{device}: {torch.cuda.get_device_name(device)}, {kernels(device)}" for device in found]
    return lines


def kernels(device: torch.device) -> str:
    """The fused implementation's on a device: avx512 kernels."""
    if layer_ops.missing_extension is not None:
        why = layer_ops.missing_extension
        return f"no fused kernels: the compiled extension factorlayer._C cannot be imported ({why})"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"kernels for compute capability {major}.{minor}"
    return f"{torch.ops.factorlayer.instruction_set()} kernels"
