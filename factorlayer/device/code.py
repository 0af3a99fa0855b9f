"""The device code of csrc/engine as text, put together for the run-time compiler."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# What a dtype is in there: how it is multiplied, and what memory holds.
MATH = {"float64": "Fp64", "float32": "Split3", "tf32": "Tf32", "bfloat16": "Half<bf16>", "float16": "Half<f16>"}
ELEMENT = {"float64": "double", "float32": "float", "tf32": "float", "bfloat16": "bf16", "float16": "f16"}

Told = dict[str, int | str]  # a kernel's constants: numbers, flags and types, by their names
Asks = Sequence[tuple[str, str]]  # tensors and bytes of them, in C++
MOST_ASKED = 4 << 20  # of a tensor: what is read first


def ask_for(samples: str, size: int) -> tuple[str, str]:
    """What asks for a tensor with `size` bytes for each sample."""
    return samples, f"min(params.batch * {size}, i64({MOST_ASKED}))"


@functools.cache
def folder() -> Path:
    """Inside the installed package, or beside it in a source tree."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "engine", package.parent / "csrc" / "engine") if path.is_dir())


@functools.cache
def _paths() -> dict[str, Path]:
    """The path of each header, by its name alone: no two have the same."""
    return {path.name: path for path in folder().rglob("*.cuh")}


@functools.cache
def headers(*names: str) -> str:
    """These headers behind all that they include, each once, with their names for the compiler's messages."""
    found: dict[str, str] = {}

    def take(name: str) -> None:
        if name in found:
            return
        lines = _paths()[name].read_text().splitlines()
        for line in lines:
            if line.startswith("#include"):
                take(Path(line.split('"')[1]).name)
        kept = [line if not line.startswith(("#include", "#pragma once")) else "" for line in lines]
        found[name] = "\n".join([f'#line 1 "{name}"', *kept])

    for name in names:
        take(name)
    return "\n".join(found.values()) + "\n"


def kernel(
    code: str,
    name: str,
    template: str,
    lines: Sequence[str],
    threads: int,
    blocks: int = 1,
    cluster: int = 1,
    waits: bool = True,
    asks: Asks = (),
    starts: bool = False,
    maps: bool = False,
) -> str:
    """Self-contained CUDA C++ of the kernel `name`: headers, a struct of constants, and the template that takes it,
    which waits for the kernel before, or does so by itself, and may have maps of tensors. Before that it `asks` for
    what it will read first, and for x's map, and behind it `starts` the next one, which may then ask as early; with
    `asks` it does. `blocks` share a multiprocessor, `cluster` of them, along y of the grid, each other's memory."""
    struct = "\n  ".join(lines)
    asked = "".join(f"ask_for<{threads}>({tensor}, {size});\n  " for tensor, size in asks)
    asked += "if (threadIdx.x == 0) prefetch_map(maps.x);\n  " if maps and waits else ""
    wait = "wait_for_kernel_before();\n  " + "start_next_kernel();\n  " * bool(asks or starts) if waits else ""
    dims = f"__cluster_dims__(1, {cluster}, 1) " if cluster > 1 else ""
    return (
        code
        + f'#line 1 "{name}"\nstruct Pass {{\n  {struct}\n}};\n'
        + f'extern "C" __global__ void {dims}__launch_bounds__({threads}, {blocks})\n'
        + f"{name}(const __grid_constant__ Params params{', const __grid_constant__ Maps maps' if maps else ''}) {{\n"
        + f"  {asked}{wait}{template}<Pass>(params{', maps' if maps else ''}).run();\n}}\n"
    )


class Long(int):
    """A constant of 64 bits."""


def constants(told: Mapping[str, int | str]) -> list[str]:
    """Lines of a kernel's struct of constants: numbers, flags and types."""
    return [_constant(name, value) for name, value in told.items()]


def kinds(dtype: str) -> list[str]:
    """Its lines that say what a dtype is."""
    return constants({"Math": MATH[dtype], "Element": ELEMENT[dtype]})


def function(head: str, calls: Sequence[str]) -> list[str]:
    """A function of a kernel's struct of constants, which makes these calls one after another."""
    return [f"template <class C> static DEVICE void {head} {{", *(f"  {call}" for call in calls), "}"]


def _constant(name: str, value: int | str) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    kind = "bool" if isinstance(value, bool) else "i64" if isinstance(value, Long) else "int"
    return f"static constexpr {kind} {name} = {str(value).lower()};"


def wgmma(dtype: str, widths: Iterable[int], turned: bool = False) -> str:
    """Wgmma<Element, n> of instructions.cuh, of each width n: the matrix instruction of a warpgroup for sums 64 x n.
    `turned`: also of operands in shared memory whose k's are rows, which 16 bits can have; both, or the right one
    alone."""
    return "".join(_wgmma(dtype, n, turned) for n in sorted(set(widths)))


@functools.cache
def _wgmma(dtype: str, n: int, turned: bool) -> str:
    name = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "tf32")
    k = 8 if name == "tf32" else 16
    count = n // 2  # sums of a thread
    sums, bound = (", ".join(text.format(i) for i in range(count)) for text in ("%{}", '"+f"(d[{}])'))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{name}.{name}"

    def multiply(verb: str, left: str, inputs: list[str], turned: list[bool]) -> str:
        at = count + len(inputs)
        operand = ", ".join(f"%{i}" for i in range(count, at))
        operand = f"{{{operand}}}" if len(inputs) > 1 else operand
        flags = "" if name == "tf32" else "".join(f", {int(flag)}" for flag in turned)
        return (
            f"  static DEVICE void {verb}(float (&d)[{count}], {left}, u64 b, bool add = true) {{\n"
            f'    asm volatile("{{.reg .pred add;\\nsetp.ne.b32 add, %{at + 1}, 0;\\n"\n'
            f'        "{instruction} {{{sums}}}, {operand}, %{at}, add, 1, 1{flags};}}\\n"\n'
            f'        : {bound}\n        : {", ".join(inputs)}, "l"(b), "r"(int(add)));\n  }}\n'
        )

    slab, registers = ("u64 a", ['"l"(a)']), ("const u32 (&a)[4]", [f'"r"(a[{i}])' for i in range(4)])
    verbs = [multiply("multiply", *slab, [False, False]), multiply("multiply", *registers, [False])]
    if turned:
        verbs += [multiply("multiply_turned", *slab, [True, True]), multiply("multiply_turned", *registers, [True])]
        verbs += [multiply("multiply_right_turned", *slab, [False, True])]
    of = f"Wgmma<{ELEMENT[dtype]}, {n}>"
    return f'#line 1 "{of}"\ntemplate <> struct {of} {{\n{"".join(verbs)}}};\n'
