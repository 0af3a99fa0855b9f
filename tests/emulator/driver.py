"""Runs the kernels of a plan on a CPU, by the C++ files beside this, and collects what they find wrong.

The device code is what the GPU gets, but for instructions.cuh and Wgmma<...>: those are instructions.cuh
beside this.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from once import name_of, once

from factorlayer.device.gpu import ELEMENT_BYTES
from factorlayer.kernels.emit import source
from factorlayer.kernels.gradient import PART_BYTES, BlockSums, Reduction, TileSums
from factorlayer.kernels.kronecker.cluster_backward import ClusterBackward
from factorlayer.kernels.kronecker.columns_backward import ColumnsBackward
from factorlayer.kernels.kronecker.double_backward import DoubleBackward
from factorlayer.kernels.kronecker.eights_backward import EightsBackward
from factorlayer.kernels.kronecker.large_backward import LargeBackward
from factorlayer.kernels.kronecker.mixed_backward import MixedBackward
from factorlayer.kernels.kronecker.pair_backward import PairBackward
from factorlayer.kernels.kronecker.scaled_backward import ScaledBackward
from factorlayer.kernels.kronecker.small import Small
from factorlayer.kernels.kronecker.small_backward import SmallBackward
from factorlayer.kernels.kronecker.split_pair_backward import SplitPairBackward
from factorlayer.kernels.kronecker.split_single_backward import SplitSingleBackward
from factorlayer.kernels.kronecker.strip_backward import StripBackward
from factorlayer.kernels.kronecker.triple import TripleBackward
from factorlayer.kernels.kronecker.unit_backward import UnitBackward
from factorlayer.kernels.monarch.monarch_backward import MonarchBack, MonarchGradient, MonarchWeights
from factorlayer.kernels.monarch.slab_backward import SlabBackward
from factorlayer.kernels.monarch.untied_backward import UntiedBackward
from factorlayer.kernels.parts import Parts
from factorlayer.kernels.product.few import FewPass
from factorlayer.kernels.product.single_backward import SingleBackward
from factorlayer.kernels.product.weight_halves import WeightHalves
from factorlayer.kernels.product.wide import Wide
from factorlayer.kernels.resident import Resident
from factorlayer.kernels.stack.dense import Dense
from factorlayer.kernels.stack.dense_streamed import DenseStreamed, WeightChunks
from factorlayer.plan.plan import Pass, Plan, Unbound, WithMaps, _output_bytes

HERE = Path(__file__).parent
COMPILE = ["g++", "-std=c++17", "-w", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing"]
KERNEL = ["-O1", "-fstack-reuse=none", f"-I{HERE}"]  # its compiler takes longer than it does
LINK = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # a fifth of the other one's time
SECONDS = 180  # for a kernel
Array = NDArray[np.float64]


def why_not() -> str | None:
    """Why there is no emulator here, or None."""
    if platform.machine() != "x86_64":
        return f"the emulator's fibers are for x86_64, this is {platform.machine()}"
    return None if shutil.which("g++") else "the emulator needs g++"


def encode(values: Array, dtype: str) -> bytes:
    """As memory holds it."""
    if dtype != "bfloat16":
        return values.astype({"float64": np.float64, "float16": np.float16}.get(dtype, np.float32)).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).tobytes()


def decode(memory: bytes, dtype: str) -> Array:
    """Any bits: broken kernels leave signalling NaNs, too."""
    if dtype == "bfloat16":
        held = (np.frombuffer(memory, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        held = np.frombuffer(memory, {"float64": np.float64, "float16": np.float16}.get(dtype, np.float32))
    with np.errstate(invalid="ignore"):
        return held.astype(np.float64)


@dataclass(frozen=True)
class Kernel:
    """A pass as a program."""

    program: Path
    planned: Pass
    cluster: int

    def arguments(self, folder: Path, seed: int, batch: int, blocks: int, bias: bool, weights: int) -> list[str]:
        """With as many blocks as the runtime would launch where there are `blocks` processors."""
        p = self.planned
        grid_y = p.split
        grid_x = -(-batch * p.units_per_sample // p.units_per_block)
        if isinstance(p, Small | TileSums):
            blocks *= p.blocks
        if not isinstance(p, Unbound):
            grid_x = min(grid_x, max(1, blocks // grid_y))
        sums = grid_x * (p.part_bytes // p.most) if isinstance(p, BlockSums | TileSums) else 0
        sums = p.output_bytes if isinstance(p, MonarchWeights) else sums
        sums = p.part_bytes if isinstance(p, TripleBackward) else sums
        *places, end = self.places(batch)
        numbers = [seed, batch, end + sums, end - self.output_bytes(batch), p.shared, p.threads, self.cluster]
        in_chunks = (isinstance(p, DenseStreamed) and len(p.passes) > 1) or isinstance(p, FewPass)
        in_chunks |= (isinstance(p, Wide) and p.splits) or isinstance(p, MonarchBack)
        numbers += [grid_x, grid_y, int(bias), weights, -1 if in_chunks else end, *places[1:]]
        return [str(self.program), str(folder), *map(str, numbers)]

    def outputs(self, batch: int) -> list[int]:
        """Bytes of each"""
        p = self.planned
        if isinstance(p, Dense) and p.states:
            return [batch * q * p.size for q in (p.sizes[-1][1], *(q for _, q in p.sizes[:-1]))]
        if isinstance(p, FewPass):
            return self.outputs_of_few(batch)
        if isinstance(p, MonarchBack):  # grad_y turned
            return [batch * p.chain.in_features * p.size, batch * p.output_bytes]
        if isinstance(p, ClusterBackward):
            p0, p1, _, _ = p.sizes
            return [batch * p.units_per_sample * p0 * p1 * p.size, p.made * p.size]
        return [self.output_bytes(batch)]

    def outputs_of_few(self, batch: int, padding: bool = True) -> list[int]:
        """What is behind rows that are read by 16 bytes, and rows of samples that are not there, nobody writes."""
        p = self.planned
        (first, second), samples, piece = p.both, -(-batch // 8) * 8, 16 // p.size
        rows = [-(-c.q // piece) * piece for c in p.both]
        if p.template == "FewStates":
            turned = first.outer * first.p + second.inner * (second.p + second.q)
            return [(turned * samples + second.inner * rows[1] * (samples if padding else batch)) * p.size]
        if p.template == "FewBack":
            return [first.outer * (first.q + (rows[0] if padding else first.q)) * samples * p.size]
        return [batch * first.outer * first.p * p.size, (first.weight_size + second.weight_size) * p.size]

    def places(self, batch: int) -> list[int]:
        """Where they begin, as tensors do, and where sums do behind them."""
        return list(itertools.accumulate((-(-size // 16) * 16 for size in self.outputs(batch)), initial=0))

    def dtype(self, plan: Plan) -> str:
        """Of what it writes."""
        sums = isinstance(self.planned, Reduction) and self.planned.in_place
        return plan.dtype if not sums or PART_BYTES[plan.dtype] == 8 else "float32"

    def output_bytes(self, batch: int) -> int:
        """Without sums."""
        p = self.planned
        if isinstance(p, SlabBackward | UntiedBackward):
            return batch * p.output_bytes
        if isinstance(p, TileSums):
            return p.weights * ELEMENT_BYTES[p.dtype] if p.is_whole else 0
        if isinstance(p, MonarchGradient | MonarchWeights):
            return 0
        if isinstance(p, MonarchBack):  # but for what is behind short rows of a slab
            return batch * (p.chain.in_features + p.chain.out_features) * p.size
        if isinstance(p, Reduction):
            return p.of.weights * (PART_BYTES if p.in_place else ELEMENT_BYTES)[p.of.dtype]
        if isinstance(p, WeightChunks | WeightHalves):
            return p.output_bytes
        if isinstance(p, Parts):
            return p.weights * ELEMENT_BYTES[p.dtype]
        if isinstance(p, SingleBackward | SplitSingleBackward):
            return batch * p.contraction.outer * p.contraction.p * p.contraction.inner * p.size
        if isinstance(p, ColumnsBackward | EightsBackward | MixedBackward | SmallBackward):
            return batch * p.output_bytes
        if isinstance(p, DoubleBackward) and not p.returns:
            return 0
        if isinstance(
            p,
            DoubleBackward
            | LargeBackward
            | PairBackward
            | ScaledBackward
            | SplitPairBackward
            | StripBackward
            | UnitBackward,
        ):
            return batch * p.units_per_sample * p.sizes[0] * p.sizes[1] * p.size
        if isinstance(p, ClusterBackward) or (isinstance(p, Dense) and p.states):
            return sum(self.outputs(batch))
        if isinstance(p, FewPass):
            return sum(self.outputs_of_few(batch, padding=False))
        return batch * _output_bytes(p)


class Emulator:
    """Compiled once. Programs and tensors lie in its folder; programs that others can use lie in `shared`."""

    def __init__(self, folder: Path, shared: Path | None = None) -> None:
        self.folder, self.shared = folder, shared
        self.made = shared or folder
        self.objects = [str(self.object_of(path)) for path in sorted(HERE.glob("*.cpp"))]
        # What every kernel includes first: the compiler finds it compiled beside no header, before it finds the header
        vocabulary = [*KERNEL, "-x", "c++-header", str(HERE / "instructions.cuh")]
        once(self.made / "instructions.cuh.gch", lambda part: compile_cpp([*vocabulary, "-o", str(part)]))

    def object_of(self, path: Path) -> Path:
        """Of a file of the emulator."""
        return once(self.made / f"{path.stem}.o", lambda part: compile_cpp(["-O3", "-c", str(path), "-o", str(part)]))

    def program(self, number: int, text: str) -> Path:
        """Of a kernel. Without `shared` the next one takes its place."""

        def build(program: Path) -> None:
            path = self.folder / f"kernel{number}.cpp"
            path.write_text(text)
            compile_cpp([f"-I{self.made}", *KERNEL, str(path), *self.objects, *LINK, "-o", str(program)])

        if self.shared:
            return once(self.shared / name_of(text), build)
        build(self.folder / f"kernel{number}")
        return self.folder / f"kernel{number}"

    def compile(
        self, plan: Plan, changes: dict[str, str] | None = None, which: Sequence[int] | None = None
    ) -> list[Kernel]:
        """A program for each pass, or some. `changes` breaks the device code: texts in it, each there at least once."""
        kernels = []
        for i, planned in enumerate(plan.passes):
            if which is not None and i not in which:
                continue
            text = source(planned, "kernel") if isinstance(planned, Resident) else planned.source("kernel")
            cluster = re.search(r"__cluster_dims__\(1, (\d+), 1\)", text)
            text = for_the_cpu(text)
            for old, new in (changes or {}).items():
                assert old in text, f"the device code has no {old!r}"
                text = text.replace(old, new)
            kernels.append(Kernel(self.program(i, text), planned, int(cluster[1]) if cluster else 1))
        return kernels

    def run(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        x: Array,
        weights: Sequence[Array],
        bias: Array | None,
        blocks: int = 3,
        seed: int = 1,
    ) -> tuple[list[Array], list[str]]:
        """What the passes write, and the errors found."""
        for name, values in {"x": x, "bias": bias, **{f"w{i}": w for i, w in enumerate(weights)}}.items():
            if values is not None:
                (self.folder / name).write_bytes(encode(values, plan.dtype))
        left = self.folder / "left"  # what one pass leaves for another one
        left.unlink(missing_ok=True)
        outputs: list[Array] = []
        errors: list[str] = []
        for number, kernel in enumerate(kernels):
            maps = kernel.planned.maps if isinstance(kernel.planned, WithMaps) else ()
            (self.folder / "maps").write_text("\n".join(maps))
            arguments = kernel.arguments(self.folder, seed, len(x), blocks, bias is not None, len(weights))
            try:
                done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired:
                return outputs, [*errors, f"pass {number}: not done after {SECONDS} s"]
            found = done.stdout.splitlines()
            if done.returncode not in (0, 1):
                found.append(f"exit code {done.returncode}: accesses outside of the tensors, or a broken stack")
            errors += [f"pass {number}: {line}" for line in found if not is_left_to_another(kernel.planned, line)]
            if done.returncode not in (0, 1) or not (self.folder / "y").exists():
                return outputs, errors
            memory = (self.folder / "y").read_bytes()
            if isinstance(kernel.planned, MonarchGradient):
                left.unlink(missing_ok=True)
            if isinstance(kernel.planned, MonarchBack):
                of_x, turned = kernel.outputs(len(x))
                outputs.append(decode(memory[:of_x], plan.dtype))
                left.write_bytes(memory[kernel.places(len(x))[1] :][:turned])
                continue
            if isinstance(kernel.planned, MonarchWeights):
                left.touch()
            if (
                isinstance(kernel.planned, MonarchWeights | WeightChunks | WeightHalves)
                or getattr(kernel.planned, "template", "") == "FewStates"
            ):
                (self.folder / "chunks").write_bytes(memory)
                continue
            sizes, places = kernel.outputs(len(x)), kernel.places(len(x))
            if isinstance(kernel.planned, TripleBackward):  # the next one goes on from what it has written
                (self.folder / "before").write_bytes(memory)
                continue
            (self.folder / "before").unlink(missing_ok=True)
            if isinstance(kernel.planned, DoubleBackward):
                if errors:
                    return outputs, errors
                made = np.frombuffer(memory[places[-1] :]).reshape(-1, kernel.planned.weights)
                if not kernel.planned.returns:  # the other one's sums lie beside
                    held = made
                    continue
                first = math.prod(kernel.planned.sizes[::2])
                memory = memory[: places[-1]] + np.hstack([held[:, :first], made[:, first:]]).tobytes()
            parts = [memory[at : at + size] for at, size in zip(places, sizes, strict=False)]
            written = b"".join(parts)
            for part in parts if isinstance(kernel.planned, ClusterBackward | FewPass) else [written]:
                outputs.append(decode(part, kernel.dtype(plan)))
            (self.folder / "x").write_bytes(memory[places[-1] :] or written)
        return outputs, errors


def is_left_to_another(planned: Pass, line: str) -> bool:
    """Whether all that is missing are sums that another kernel writes."""
    found = re.search(r": (\d+) bytes of the output not written, and 0 behind tensors$", line)
    if found and isinstance(planned, TripleBackward):
        return int(found[1]) == planned.part_bytes - planned.most * planned.singles * PART_BYTES[planned.dtype]
    if found and isinstance(planned, SplitPairBackward | UnitBackward):
        return int(found[1]) == planned.most * planned.singles * PART_BYTES[planned.dtype]
    if not isinstance(planned, DoubleBackward):
        return False
    p0, p1, q0, q1 = planned.sizes
    others = PART_BYTES[planned.dtype] * (q0 * p0 if planned.returns else q1 * p1)
    missing = re.search(r": (\d+) bytes of the output not written, and \d+ behind tensors$", line)
    return (
        missing is not None and 0 <= int(missing[1]) - 2 * others < 16
    )  # of two blocks, and what lies between tensors


def for_the_cpu(text: str) -> str:
    """The source of a kernel without its instructions, and the emulator's entry into it."""
    sections = re.split(r'(?=^#line 1 ")', text, flags=re.MULTILINE)
    kept = [section for section in sections if not re.match(r'#line 1 "(instructions\.cuh|Wgmma<.*>)"', section)]
    assert len(kept) < len(sections) and not any(re.search(r"\basm\b", section) for section in kept)
    maps = ", *static_cast<const Maps*>(maps)" if "Maps maps)" in text else ""
    entry = "void run_kernel(const void* params, const void* maps) "
    entry += f"{{ kernel(*static_cast<const Params*>(params){maps}); }}\n"
    return '#include "instructions.cuh"\n' + "".join(kept) + '#line 1 "entry"\n' + entry


def compile_cpp(arguments: list[str]) -> None:
    done = subprocess.run([*COMPILE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr[:4000]}"
