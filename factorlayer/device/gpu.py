"""What the planner knows of a GPU: its limits, and how fast its parts are, as its table has it (table.py). No torch,
no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from factorlayer.device.kept import kept
from factorlayer.device.table import DTYPES, L2_OVER_MEMORY, Rates, Table, of

__all__ = ["DTYPES", "ELEMENT_BYTES", "LIMITS", "Gpu", "Library"]

ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}

# Shared memory a block may ask for, in bytes, and multiprocessors of a typical GPU of that generation.
LIMITS = {80: (166912, 108), 86: (101376, 84), 89: (101376, 128), 90: (232448, 132), 100: (232448, 148)}
LIMITS[120] = (101376, 170)


@dataclass(frozen=True)
class Library:
    """How fast PyTorch's operations are inside a CUDA graph. Rates of whole products are those of cuBLAS on an H200,
    measured; all else is fitted to the times of the batched implementation and of dense layers in drawn rows on it: 550
    of cuda-4711, cuda-914027 and cuda-271833, and for doubles those of cuda-281109, cuda-291107, cuda-291163,
    cuda-390481 and cuda-704233, all in benches/results/earlier. Names of units are those of plan/library.py."""

    kernel_us: float  # from one operation to the next
    product_us: float  # that a matrix product takes beside it,
    split_us: float  # and where it is split along what is summed
    sum_us: float
    pointwise_bytes: float  # that a multiprocessor moves in operations: element by element,
    turned_bytes: float  # to other places,
    product_bytes: float  # in products,
    odd_bytes: float  # where rows of less than doubles are no multiples of 16 bytes; of all, as much as memory moves
    flops: dict[str, float]  # of products, of a multiprocessor, by units
    step_us: dict[str, float]  # of 32 summands, one behind another, by units
    block_us: dict[str, float]  # until a block's first step, and behind its last one
    added_us: dict[str, float]  # of a bias


@dataclass(frozen=True)
class Gpu:
    """arch is the compute capability without its dot, shared the most bytes of shared memory for one block. They are
    what the driver says of a GPU."""

    arch: int
    sms: int
    shared: int
    memory: int = 0  # bytes in a microsecond by memory's clock and the width of its bus; 0 where nobody says

    @classmethod
    def of(cls, arch: int) -> Gpu:
        shared, sms = LIMITS[arch]
        return cls(arch, sms, shared)

    @property
    def architecture(self) -> str:
        """What its kernels are compiled for; Hopper's own instructions need the "a"."""
        return f"sm_{self.arch}a" if self.arch == 90 else f"sm_{self.arch}"

    # What a family may need of a GPU. Instructions that belong to one architecture alone are compiled for it by its
    # own name, with an "a": those of Hopper are known here.

    @property
    def wgmma(self) -> bool:
        """Four warps multiply together out of shared memory."""
        return self.architecture.endswith("a")

    @property
    def moves_registers(self) -> bool:
        """Warps that copy leave registers to those that multiply (setmaxnreg)."""
        return self.architecture.endswith("a")

    @property
    def copy_engine(self) -> bool:
        """Runs of bytes and tiles of tensor maps are copied into shared memory by no thread (cp.async.bulk)."""
        return self.arch >= 90

    @property
    def clusters(self) -> bool:
        """Blocks read each other's shared memory."""
        return 90 <= self.arch < 120

    @property
    def doubles(self) -> bool:
        """Matrix instructions for doubles run at half the rate of floats or more."""
        return self.arch in (80, 90, 100)

    @property
    def float_lanes(self) -> int:
        """Floats that a multiprocessor multiplies and adds at once."""
        return 64 if self.arch == 80 else 128

    @kept
    def table(self) -> Table:
        """Its rates, and where they are from."""
        return of((self.arch, self.sms, self.shared, self.memory))

    @kept
    def rates(self) -> Rates:
        return self.table.rates

    # What is asked most, kept

    @kept
    def memory_bytes(self) -> float:
        return self.rates.memory_bytes

    @kept
    def l2_bytes(self) -> float:
        return self.rates.l2_bytes

    @kept
    def shared_bytes(self) -> float:
        return self.rates.shared_bytes

    @kept
    def instructions(self) -> float:
        return self.rates.instructions

    @kept
    def flops(self) -> dict[str, float]:
        return self.rates.flops

    @kept
    def library(self) -> Library:
        """PyTorch's operations on it: an H200's, with the rates of products scaled."""
        scale = {dtype: self.flops[dtype] / Gpu.of(90).flops[dtype] for dtype in DTYPES}
        flops = {"float64": 0.44e6, "float32": 0.34e6, "tf32": 3e6, "bfloat16": 5.5e6, "float16": 5.5e6}
        step_us = {"float64": 0.179, "float32": 0.615, "tf32": 0.132, "bfloat16": 0.007, "float16": 0.007}
        # Of rows that 16 bytes do not divide, and what is loaded at once
        flops["float64 by 8"], step_us["float64 by 8"] = 0.236e6, 0.17
        flops["tf32 by 4"], step_us["tf32 by 4"] = 0.67e6, 0.31
        for dtype in ("bfloat16", "float16"):
            flops[f"{dtype} by 4"], step_us[f"{dtype} by 4"] = 1.45e6, 0.18
            flops[f"{dtype} by 2"], step_us[f"{dtype} by 2"] = 0.68e6, 0.33
        typical = self.l2_bytes / L2_OVER_MEMORY  # L2 holds most of what operations hand on, whatever is behind it
        pointwise_bytes, turned_bytes = (min(share * typical, self.memory_bytes) for share in (0.61, 0.29))
        return Library(
            kernel_us=1.73,
            product_us=0.3,
            split_us=4.7,
            sum_us=2.2,
            pointwise_bytes=pointwise_bytes,
            turned_bytes=turned_bytes,
            product_bytes=0.62 * self.memory_bytes,
            odd_bytes=0.35 * self.memory_bytes,
            flops={unit: rate * scale[unit.split(" ")[0]] for unit, rate in flops.items()},
            step_us=step_us,
            block_us={"float64": 0.9, "float32": 0.78, "tf32": 1.36, "bfloat16": 1.2, "float16": 1.2},
            added_us={"float64": 1.3, "float32": 0.85, "tf32": 0.49, "bfloat16": 0.31, "float16": 0.31},
        )
