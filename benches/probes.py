"""Small kernels that do one thing as fast as a GPU can, and how long that takes: benches.calibrate makes a table of it.

Each kernel runs until it takes milliseconds, so that starting it does not count, and says how fast the clock was
meanwhile. What they compute with is drawn from threads' numbers: zeros would be faster than any caller's numbers. A
rate is that of one multiprocessor in a microsecond. The engine's compiler makes them, PyTorch launches them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from factorlayer.device.code import headers
from factorlayer.device.gpu import Gpu

DEVICE = "cuda"
ELEMENTS = 1 << 28  # floats that are moved
OPTIONS = ["--std=c++17", "--device-as-default-execution-space"]  # as the engine compiles
LONG_US = 4000.0  # of a launch
LAUNCHES, ROUNDS = 3, 9  # between two events; of which the median counts
QUEUED = 4_000_000  # cycles that the GPU sleeps, while the host queues what is timed
CHAIN = 200  # small kernels of a graph
MANY_PARTS, FEW_PARTS = 128, 8  # of the same bytes

# Every kernel is told where its numbers are, where the clock's go, and how much to do.
FRAME = """
extern "C" __global__ void __launch_bounds__({threads}) {name}(unsigned* data, unsigned long long* clock, int steps,
                                                              int count) {{
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, drawn = 2654435761u * (thread + 1);
  unsigned kept = 0;
  unsigned long long begun, ended;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  const long long cycles = clock64();
  {body}
  __syncthreads();
  if (thread == 0) {{
    clock[0] = clock64() - cycles;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ended));
    clock[1] = ended - begun;
  }}
  if (kept == 12345 && count < 0) data[thread] = kept;
}}
"""
INSTRUCTIONS = """
  float x[8];
  unsigned u[8];
  for (int i = 0; i < 8; ++i) x[i] = float(drawn + i), u[i] = drawn ^ i;
  const float a = 1.0f / (1 + count), b = float(drawn);
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 64; ++i) {
      asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i % 8]) : "f"(a), "f"(b));
      asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(u[i % 8]) : "r"(drawn), "r"(thread));
    }
  for (int i = 0; i < 8; ++i) kept ^= u[i] ^ __float_as_uint(x[i]);
"""
SHARED = """
  __shared__ uint4 held[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) held[i] = make_uint4(drawn, drawn ^ i, ~drawn, i);
  __syncthreads();
  const unsigned from = unsigned(__cvta_generic_to_shared(held)) + 16 * threadIdx.x;
  uint4 v;
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + 1024 * i));
      kept ^= v.x ^ v.y ^ v.z ^ v.w;
    }
"""
L2 = """
  const unsigned all = gridDim.x * blockDim.x;
  unsigned at = thread;
  #pragma unroll 1
  for (int step = 0; step < steps; ++step, at += 8 * all) {
    uint4 v[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                   : "l"(reinterpret_cast<uint4*>(data) + (at + i * all & unsigned(count - 1))));
    #pragma unroll
    for (int i = 0; i < 8; ++i) kept ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
"""
SPECIAL = """
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = (drawn % 1024 + i) / 1024.0f;
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 64; ++i)
      asm volatile("{ .reg .f32 t; neg.f32 t, %0; ex2.approx.ftz.f32 %0, t; }" : "+f"(x[i % 8]));
  for (int i = 0; i < 8; ++i) kept ^= __float_as_uint(x[i]);
"""
DOUBLES = """
  double x[8];
  for (int i = 0; i < 8; ++i) x[i] = (drawn % 1024 + i) / 1024.0;
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = Accurate::tanh(x[i]) + Accurate::erf(x[i]);
  for (int i = 0; i < 8; ++i) kept ^= low_of(x[i]);
"""
BARRIERS = """
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("bar.sync 0;" ::: "memory");
"""
CHASE = """
  unsigned at = unsigned(clock[2]);
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(data + 32ull * at));
  clock[2] = at;
"""
SMALL = "if (thread < count) data[thread] = 3 * data[thread] + 1;"


def _products(shape: str, types: str, counts: tuple[int, int, int]) -> str:
    """Products of a warp by mma.sync, into four sums in turn: a thread has so many registers of the sums and of both
    operands, whose numbers are from a half to one, of either sign."""
    number, operand = ("double", "double") if "f64" in types else ("float", "unsigned")
    letters = {"double": "d", "float": "f", "unsigned": "r"}
    of_sums, of_a, of_b = counts
    places = iter(range(sum(counts)))
    lists = ["{" + ", ".join(f"%{next(places)}" for _ in range(count)) + "}" for count in counts]
    outputs = ", ".join(f'"+{letters[number]}"(sums[i % 4][{i}])' for i in range(of_sums))
    inputs = ", ".join(f'"{letters[operand]}"({x}[{i}])' for x, n in (("a", of_a), ("b", of_b)) for i in range(n))
    return f"""
  {operand} a[{of_a}], b[{of_b}];
  {number} sums[4][{of_sums}];
  for (int i = 0; i < {of_a}; ++i) a[i] = DRAWN(drawn * (2 * i + 1));
  for (int i = 0; i < {of_b}; ++i) b[i] = DRAWN(drawn * (2 * i + 17));
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < {of_sums}; ++j) sums[i][j] = i + j + 1;
  #pragma unroll 1
  for (int step = 0; step < steps; ++step)
    #pragma unroll
    for (int i = 0; i < 16; ++i)
      asm volatile("mma.sync.aligned.{shape}.row.col.{types} {", ".join(lists)}, {lists[0]};" : {outputs} : {inputs});
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < {of_sums}; ++j) kept ^= unsigned(sums[i][j]);
"""


# The FLOPs of a warp's product in a dtype, and the body of its kernel. Doubles have a larger product from Hopper on.
DRAWN = {
    "bfloat16": "#define DRAWN(x) (0x3f003f00u | ((x) & 0x807f807fu))",
    "float16": "#define DRAWN(x) (0x38003800u | ((x) & 0x83ff83ffu))",
    "tf32": "#define DRAWN(x) (0x3f000000u | ((x) & 0x807fe000u))",
    "float64": "#define DRAWN(x) (((x) % 1024 + 1025) / ((x) & 1024 ? 2048.0 : -2048.0))",
}


def product(dtype: str, arch: int) -> tuple[int, str]:
    if dtype == "float64":
        if arch >= 90:
            return 2 * 16 * 8 * 16, _products("m16n8k16", "f64.f64.f64.f64", (4, 8, 4))
        return 2 * 8 * 8 * 4, _products("m8n8k4", "f64.f64.f64.f64", (2, 1, 1))
    if dtype == "tf32":
        return 2 * 16 * 8 * 8, _products("m16n8k8", "f32.tf32.tf32.f32", (4, 4, 2))
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    return 2 * 16 * 8 * 16, _products("m16n8k16", f"f32.{kind}.{kind}.f32", (4, 4, 2))


def kernels(arch: int) -> dict[str, tuple[str, int]]:
    """Bodies by name, each with the threads of a block."""
    alone = {"shared": (SHARED, 1024), "instructions": (INSTRUCTIONS, 512), "special": (SPECIAL, 512), "l2": (L2, 512)}
    alone["doubles"] = DOUBLES, 256
    waiting = {"barriers": (BARRIERS, 1024), "chase": (CHASE, 1), "small": (SMALL, 128)}
    return alone | waiting | {f"products_{dtype}": (product(dtype, arch)[1], 256) for dtype in DRAWN}


def source(name: str, arch: int) -> str:
    body, threads = kernels(arch)[name]
    before = headers("pointwise.cuh") if name == "doubles" else DRAWN.get(name.removeprefix("products_"), "")
    return before + FRAME.format(name=name, body=body, threads=threads)


class Probes:
    """Measures one GPU, the current device. `clock` is the fastest that was seen so far, in cycles of a microsecond."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.clock = gpu, 0.0
        self.l2 = int(torch.cuda.get_device_properties("cuda").L2_cache_size)
        self._clock = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        self._numbers = torch.randint(1, 1 << 31, (gpu.sms * 1024,), dtype=torch.int32, device=DEVICE)

    def measure(self) -> Iterator[tuple[str, float]]:
        """Yields each figure with its name, as Rates has them."""
        yield "memory_bytes", self.memory_bytes()
        yield "l2_bytes", self.l2_bytes()
        yield "shared_bytes", 1024 * 16 * 16 / self._step_us("shared")
        yield "instructions", 32 * 128 / self._step_us("instructions", 2)
        yield "special_functions", 2 * 512 * 64 / self._step_us("special", 2)
        yield "double_functions", 2 * 256 * 2 * 8 / self._step_us("doubles", 2)  # tanh and erf, by the engine's code
        for dtype in ("float64", "tf32", "float16", "bfloat16"):
            flops, _ = product(dtype, self.gpu.arch)
            yield f"flops.{dtype}", 16 * 16 * flops / self._step_us(f"products_{dtype}", 2)
        yield "cycles", self._cycles_of_last()
        yield "wait_us", self.wait_us()
        yield "sync_us", self._step_us("barriers") / 16
        behind = self.behind_us()
        yield "behind_us", behind
        yield "ramp_us", self.ramp_us(behind)

    def memory_bytes(self) -> float:
        """The rate of a copy that no cache holds."""
        x = torch.randn(ELEMENTS, device=DEVICE)
        y = torch.empty_like(x)
        return 8 * x.numel() / us_of(lambda: y.copy_(x)) / self.gpu.sms

    def l2_bytes(self) -> float:
        """The rate of reading at most 0.4 of the L2, as it may be in two halves, either with copies of the other's
        lines."""
        pieces = 1 << int(0.4 * self.l2 / 16).bit_length() - 1
        data = torch.randint(1, 1 << 31, (4 * pieces,), dtype=torch.int32, device=DEVICE)
        return 2 * 512 * 8 * 16 / self._step_us("l2", 2, data, pieces)

    def wait_us(self) -> float:
        """The time from one line of memory to the next, which the first one names, in over four times what L2 holds."""
        order = torch.randperm(4 * self.l2 // 128, device=DEVICE)
        lines = torch.empty(len(order), 32, dtype=torch.int32, device=DEVICE)
        lines[order, 0] = order.roll(-1).int()
        return self._step_us("chase", 0, lines)

    def behind_us(self) -> float:
        """The time that one more small kernel takes in a graph."""
        longer, shorter = (us_of(self._small_kernels(count).replay) for count in (CHAIN, CHAIN // 2))
        return (longer - shorter) / (CHAIN - CHAIN // 2)

    def ramp_us(self, behind_us: float) -> float:
        """The time that a kernel takes beyond its launch and its work: the same bytes are changed by few kernels and by
        many, and the difference is divided by how many more there are. No cache holds what comes again."""
        x = torch.randn(ELEMENTS, device=DEVICE)
        y = torch.empty_like(x)

        def change(parts: int) -> None:
            for source, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
                torch.neg(source, out=target)

        many, few = (us_of(graph_of(functools.partial(change, parts)).replay, 1) for parts in (MANY_PARTS, FEW_PARTS))
        return (many - few) / (MANY_PARTS - FEW_PARTS) - behind_us

    def _step_us(self, name: str, blocks_per_sm: int = 1, data: Tensor | None = None, count: int = 1) -> float:
        """Microseconds of a step, of so many blocks of each multiprocessor, or of one alone."""
        kernel, threads = compiled(name, self.gpu), kernels(self.gpu.arch)[name][1]
        blocks = max(1, blocks_per_sm * self.gpu.sms)
        data = self._numbers if data is None else data
        self._clock.zero_()

        def launch(steps: int) -> None:
            kernel((blocks, 1, 1), (threads, 1, 1), [data, self._clock, steps, count])

        steps = 16
        for _ in range(2):  # the first time is mostly the start
            steps = min(max(1, int(steps * LONG_US / us_of(functools.partial(launch, steps), 1, 3))), 1 << 24)
        us = us_of(functools.partial(launch, steps))
        self.clock = max(self.clock, self._cycles_of_last())
        return us / steps

    def _cycles_of_last(self) -> float:
        cycles, ns, _ = self._clock.tolist()
        return float(1e3 * cycles / ns)

    def _small_kernels(self, count: int) -> torch.cuda.CUDAGraph:
        """A graph of so many kernels, each of which changes what the one before it has left."""
        kernel, blocks = compiled("small", self.gpu), self.gpu.sms

        def launch() -> None:
            for _ in range(count):
                kernel((blocks, 1, 1), (128, 1, 1), [self._numbers, self._clock, 1, 128 * blocks])

        return graph_of(launch)


def graph_of(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()  # what is loaded or chosen by a first call is not captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@functools.cache
def compiled(name: str, gpu: Gpu) -> Callable[..., None]:
    """A function that launches the kernel: it takes a grid, a block and arguments."""
    from torch.cuda._utils import _cuda_load_module

    kernel: Callable[..., None] = getattr(_cuda_load_module(cubin_of(name, gpu)), name)
    return kernel


def cubin_of(name: str, gpu: Gpu) -> bytes:
    cubin, log, error = torch.ops.factorlayer.compile(source(name, gpu.arch), name, gpu.architecture, OPTIONS)
    if error:
        raise RuntimeError(f"{name} cannot be compiled for {gpu.architecture}: {error}\n{log}")
    return bytes(cubin.numpy().tobytes())


def us_of(call: Callable[[], object], launches: int = LAUNCHES, rounds: int = ROUNDS) -> float:
    """Microseconds of a call, the median of rounds that the host has queued before they start."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        torch.cuda._sleep(QUEUED)
        start.record()
        for _ in range(launches):
            call()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / launches

    once()
    return statistics.median(once() for _ in range(rounds))
