"""What the planner knows of a GPU: its limits, and how fast its parts are, as its table has it (table.py). No torch,
no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from factorlayer.device.kept import kept
from factorlayer.device.table import DTYPES, L2_OVER_MEMORY, Rates, Table, of

__all__ = ["DTYPES", "ELEMENT_BYTES", "LIMITS", "Gpu", "Library"]

ELEMENT_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}

# Shared memory a block may ask for, in bytes, and multiprocessors of a typical GPU of that generation.
LIMITS = {80: (166912, 108), 86: (101376, 84), 89: (101376, 128), 90: (232448, 132), 100: (232448, 148)}
LIMITS[120] = (101376, 170)


class Unit(NamedTuple):
    """How fast matrix products of one kind are."""

    flops: float  # of a multiprocessor
    step_us: float  # of 32 summands, one behind another
    block_us: float  # until a block's first step, and behind its last one,
    batched_us: float  # and where one call makes many products


@dataclass(frozen=True)
class Library:
    """How fast PyTorch's operations are inside a CUDA graph, on an H200. Rates of whole products by 16 bytes are those
    of cuBLAS, measured; all else is fitted to 8148 times of the batched implementation and 2878 of dense layers,
    forward and trained, in the drawn rows of cuda-2918*, cuda-3011*, cuda-3012* and cuda-3113* in
    benches/results/earlier: least squares of logarithms. Names of units are those of plan/library.py."""

    kernel_us: float  # from one operation to the next
    product_us: float  # that a matrix product takes beside it,
    split_us: float  # where it is split along what is summed,
    vector_us: float  # and of a matrix and a vector
    row_us: float  # of each row of a sum of rows,
    summed_rows: int  # up to so many, which one thread adds one by one,
    summed: float  # and elements that a multiprocessor adds in a microsecond
    pointwise_bytes: float  # that a multiprocessor moves in operations: element by element,
    turned_bytes: float  # to other places,
    product_bytes: float  # in products,
    odd_bytes: float  # where rows of less than doubles are no multiples of 16 bytes,
    vector_bytes: float  # and of a matrix and a vector; of all, as much as memory moves
    bias_share: float  # of the bytes that a product makes, what a bias adds to them where rows are no whole lines,
    added_us: dict[str, float]  # and to its time anyway
    few_us: dict[str, float]  # that products with few entries take beside others, by units
    units: dict[str, Unit]


UNITS = {
    "float64": Unit(0.44e6, 0.15, 0.05, 0.79),
    "float64 by 8": Unit(0.231e6, 0.17, 0.29, 0.62),  # rows that 16 bytes do not divide, loaded by 8
    "float64 with bias": Unit(0.209e6, 0.1, 0.26, 0.26),
    "float32": Unit(0.34e6, 0.42, 0.95, 0.29),
    "float32 with bias": Unit(0.157e6, 0.86, 7.0, 7.0),
    "tf32": Unit(3e6, 0.1, 1.58, 0.78),
    "tf32 turned": Unit(1.98e6, 0.17, 1.59, 1.31),
    "tf32 by 4": Unit(0.74e6, 0.25, 0.87, 0.62),
    "bfloat16": Unit(5.5e6, 0.007, 0.05, 2.18),
    "bfloat16 by 4": Unit(1.05e6, 0.21, 0.45, 0.27),
    "bfloat16 by 2": Unit(0.55e6, 0.33, 1.25, 1.18),
    "float16": Unit(5.5e6, 0.007, 0.05, 2.0),
    "float16 by 4": Unit(1.21e6, 0.19, 0.05, 0.34),
    "float16 by 2": Unit(0.54e6, 0.23, 0.28, 0.67),
}


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

    def blocks_at_once(self, shared: int, registers: int, most: int) -> int:
        """Blocks, `most` of them, each of so many bytes of shared memory and registers, that a multiprocessor has."""
        return max(1, min(65536 // registers, (self.shared + 1024) // (shared + 1024), most))

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
        typical = self.l2_bytes / L2_OVER_MEMORY  # L2 holds most of what operations hand on, whatever is behind it
        pointwise_bytes, turned_bytes = (min(share * typical, self.memory_bytes) for share in (0.72, 0.29))
        return Library(
            kernel_us=1.78,
            product_us=0.93,
            split_us=4.8,
            vector_us=0.5,
            row_us=0.046,
            summed_rows=156,
            summed=4000,
            pointwise_bytes=pointwise_bytes,
            turned_bytes=turned_bytes,
            product_bytes=0.63 * self.memory_bytes,
            odd_bytes=0.34 * self.memory_bytes,
            vector_bytes=0.67 * self.memory_bytes,
            bias_share=0.68,
            added_us={"float64": 0.7, "float32": 0.0, "tf32": 0.13, "bfloat16": 0.44, "float16": 0.39},
            few_us={"float64 by 8": 11.8, "float64 with bias": 3.9},
            units={name: unit._replace(flops=unit.flops * scale[name.split(" ")[0]]) for name, unit in UNITS.items()},
        )
