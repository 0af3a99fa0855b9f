"""autograd/runtime.py and csrc/runtime: NVRTC, plans, launches, and what happens where something is missing.

No test here needs a GPU. Launches are tested with a stand-in for the CUDA driver (native/driver.c), which says what it
was asked for.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from oracle import nearly
from test_backward import OPS
from torch import Tensor

import factorlayer.autograd.layer_ops
import factorlayer.functional
from factorlayer import CompileError, FactorGRU, FactorGRUCell, FactorLinear
from factorlayer.autograd import recurrent_ops, runtime
from factorlayer.autograd.backward import texts
from factorlayer.autograd.layer_ops import not_at_once, text_for, why_not_fused
from factorlayer.kernels.batches import class_of
from factorlayer.kernels.recurrent.recurrent import APART
from factorlayer.kernels.recurrent.recurrent_spread import TOGETHER
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import Recurrence
from factorlayer.maths.spec import resolve

ROOT = Path(__file__).parents[1]
NATIVE = Path(__file__).parent / "native"
VERSION = 'FACTORLAYER_VERSION="0"'


def kernel(name: str = "k") -> str:
    return f'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] = 1; }}'


def pass_text(words: str, source: str) -> str:
    return f"pass {words} {len(source)}\n{source}\n"


def plan_text(source: str | None = None, *, head: str = "chunk 0\nscratch 0 0 0\n") -> str:
    return "factorlayer plan 1\n" + head + pass_text("x y 128 0 1 1 0 1 sm_90 k", source or kernel())


OF_X = "map x tf32 8 2 3 1 1 32 48 32 32 32 1 64 1 1\n"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [*python(), "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "cache"))


# NVRTC


def test_nvrtc_is_found_in_the_packages() -> None:
    paths = runtime.nvrtc_paths().splitlines()
    assert paths and all(Path(path).is_file() for path in paths)
    version, path = torch.ops.factorlayer.compiler()
    assert version.split(".")[0] in ("12", "13")
    assert Path(path).name.startswith("libnvrtc")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120"])
def test_compiles_a_kernel(architecture: str) -> None:
    cubin, log = runtime.compile_kernel(kernel(), "k", architecture, ["--ptxas-options=-v"])
    assert cubin.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in log


def test_a_compile_error_carries_source_and_log() -> None:
    with pytest.raises(CompileError, match=r"could not compile kernel k for sm_90") as caught:
        runtime.compile_kernel("float f() { return gelo(1); }", "k", "sm_90")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.source == "float f() { return gelo(1); }"
    assert '"gelo" is undefined' in error.log
    assert error.log in str(error)


def test_a_compile_error_of_a_plan_carries_the_plan() -> None:
    plan = plan_text("nonsense")
    with pytest.raises(CompileError) as caught:
        runtime.fill_cache(plan)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.source, error.plan) == ("nonsense", plan)
    assert "nonsense" in error.log
    assert str(error) == str(caught.value)


def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(CompileError, match=r"for sm_70: NVRTC_ERROR_INVALID_OPTION\n.*gpu-architecture"):
        runtime.compile_kernel(kernel(), "k", "sm_70")


def test_a_missing_nvrtc_is_named_with_what_to_install() -> None:
    done = run_python(
        "import torch, factorlayer.autograd.runtime\n"
        "factorlayer.autograd.runtime.nvrtc_paths = lambda: '/nowhere/libnvrtc.so.13'\n"
        "print(torch.ops.factorlayer.compiler())",
        CUDA_HOME="/nowhere",
    )
    if done.returncode == 0:
        pytest.skip(f"this system has an NVRTC of its own: {done.stdout}")
    assert "pip install nvidia-cuda-nvrtc" in done.stderr
    assert "RuntimeError: factorlayer: the fused CUDA kernels are compiled by NVRTC" in done.stderr


# Plans


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'line 1 cannot be read: a line that begins with "factorlayer"'),
        ("factorlayer plan 2\n", 'line 1 cannot be read: it should be "factorlayer plan 1"'),
        ("factorlayer plan 1\nchink 0\n", 'line 2 cannot be read: it should begin with "chunk", it is "chink 0"'),
        ("factorlayer plan 1\nchunk 0", 'line 2 cannot be read: a line that begins with "chunk" and ends in a newline'),
        ("factorlayer plan 1\nchunk -1\n", 'the chunk should be a whole number from 0 to .*, it is "-1"'),
        ("factorlayer plan 1\nchunk 1e3\n", 'it is "1e3"'),
        ("factorlayer plan 1\nchunk 99999999999999999999\n", "the chunk should be a whole number"),
        (
            "factorlayer plan 1\nchunk 0\nscratch 0\n",
            'line 3 cannot be read: "scratch" has 3 to 8 words behind it, 1 came',
        ),
        ("factorlayer plan 1\nchunk 0\nscratch 0 0 0 0 0 0 0 0 0\n", '"scratch" has 3 to 8 words behind it, 9 came'),
        ("factorlayer plan 1\nchunk 0\nscratch 0 0 0\n", "line 3 cannot be read: the last pass should write y"),
        (plan_text() + "\n", 'line 6 cannot be read: it should begin with "pass", it is ""'),
        (plan_text() + "pass x y 1\n", 'line 6 cannot be read: "pass" has 11 words behind it, 3 came'),
        (plan_text().replace(" y ", " z "), 'line 4 cannot be read: a buffer should be y, w or s0 to s7, it is "z"'),
        (plan_text().replace(" 128 ", f" {2**64 + 128} "), "the number of threads should be a whole number"),
        (plan_text().replace(" 128 ", " 0 "), "the number of threads should be a whole number from 1 to 1024"),
        (plan_text().replace(" 128 ", " 2048 "), 'the number of threads should be .*, it is "2048"'),
        (plan_text()[:-1], "line 4 cannot be read: a source of .* bytes and a newline should follow"),
        (plan_text().replace(" x y ", " s0 y "), "this pass reads a buffer that no pass before it wrote"),
        (plan_text().replace(" x y ", " x s0 "), "this pass writes scratch of no bytes"),
        (plan_text().replace(" x y ", " x s7 "), "this pass writes scratch of no bytes"),
        (plan_text().replace(" x y ", " x s8 "), 'a buffer should be y, w or s0 to s7, it is "s8"'),
        (
            "factorlayer plan 1\nchunk 0\nscratch 4 4 0\n" + pass_text("x s0 1 0 1 1 0 1 sm_90 k", kernel()),
            "the last pass should write y",
        ),
        (plan_text().replace(" x y ", " x w "), "the last pass should write y, or w behind it"),
        (plan_text().replace(" x y ", " w y "), 'a buffer should be x, none or s0 to s7, it is "w"'),
        (plan_text().replace(" x y ", " x none "), 'a buffer should be y, w or s0 to s7, it is "none"'),
        (plan_text().replace(" x y ", " none y "), "a pass that reads weights alone should write s2"),
        (plan_text().replace(" x y ", " s2 y "), "this pass reads a buffer that no pass before it wrote"),
        (
            "factorlayer plan 1\nchunk 0\nscratch 4 4 0\n"
            + pass_text("x s1 1 0 1 1 0 1 sm_90 k", "a\nb\nc")
            + pass_text("s1+s0@2 y 1 0 1 1 0 1 sm_90 k", kernel()),
            "line 9 cannot be read: this pass reads a buffer that no pass before it wrote",
        ),
        (plan_text().replace(" x y ", " x+s0 y "), r'beside another should be such as \+s1@3, it is "x\+s0"'),
        (plan_text().replace(" x y ", " x+x@1 y "), "beside another buffer should be s0 to s7"),
        (plan_text().replace(" x y ", " x+s0@62 y "), 'a weight\'s number should be .* to 61, it is "62"'),
        (plan_text().replace(" x y ", " @62 y "), 'a weight\'s number should be .* to 61, it is "62"'),
        (plan_text().replace(" x y ", " @ y "), "a weight's number should be a whole number"),
        (plan_text() + "map x\n", 'line 6 cannot be read: "map" has 16 words behind it, 1 came'),
        (plan_text() + OF_X.replace("tf32", "bf16"), 'a map\'s elements should be tf32 or u16, they are "bf16"'),
        (plan_text() + OF_X.replace(" 64 ", " 300 "), 'a size of a box should be .* to 256, it is "300"'),
        (plan_text() + 4 * OF_X, "line 9 cannot be read: a pass has 3 maps at most"),
    ],
)
def test_wrong_plans(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runtime.fill_cache(text)


def test_batch_classes() -> None:
    batches = (0, 1, 4, 5, 64, 65, 256, 257, 2048, 2049, 8192, 8193, 2**40)
    found = [torch.ops.factorlayer.batch_class(batch) for batch in batches]
    assert found == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] == list(map(class_of, batches))


# Launches


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in driver and the program that launches through it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C++ compiler and Linux")
    folder = tmp_path_factory.mktemp("native")
    parsing = [ROOT / "csrc" / name for name in ("chain.cpp", "expression.cpp")]
    sources = [*sorted((ROOT / "csrc" / "runtime").glob("*.cpp")), *parsing]
    at_once = folder / "launch.cpp"  # what all of them include is read once, which is most of what the compiler does
    at_once.write_text("".join(f'#include "{source}"\n' for source in (NATIVE / "launch.cpp", *sources)))
    commands = [
        ["-x", "c", "-shared", "-fPIC", NATIVE / "driver.c", "-o", folder / "libcuda.so.1"],
        ["-std=c++17", f"-D{VERSION}", at_once, "-ldl", "-lpthread", "-o", folder / "launch"],
        ["-std=c++17", NATIVE / "load.cpp", "-ldl", "-o", folder / "load"],
        ["-std=c++17", NATIVE / "sha256.cpp", ROOT / "csrc" / "runtime" / "sha256.cpp", "-o", folder / "sha256"],
    ]
    for command in commands:
        subprocess.run([compiler, *map(str, command)], check=True)
    return folder


TWO_FACTORS = "tied 1 2 3 5 1; tied 0 1 2 4 5"  # 6 -> 20


def launch(
    native: Path, plan: str, batch: int, dtype: str = "bfloat16", device: int = 0, part: str = "all", **answers: str
) -> list[str]:
    """What the driver was asked for."""
    (native / "plan").write_text(plan)
    nvrtc = torch.ops.factorlayer.compiler()[1]
    command = [native / "launch", TWO_FACTORS, dtype, str(batch), str(device), native / "plan", nvrtc, part]
    environment = os.environ | {"LD_LIBRARY_PATH": str(native), **answers}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stderr.splitlines()


def launches(lines: list[str]) -> Iterator[dict[str, str]]:
    """kernel, grid, x and so on of each launch."""
    for line in lines:
        if line.startswith("launch "):
            words = line.split()[1:]
            yield {
                "kernel": words[0],
                "grid": " ".join(words[2:5]),
                **dict(zip(words[9::2], words[10::2], strict=True)),
            }


def test_digests_of_every_length(native: Path) -> None:
    """Whatever is left for the last block or two: 55 and 56 letters, 63 and 64, and all others."""
    lines = subprocess.run([native / "sha256", "300"], capture_output=True, text=True, check=True).stdout.split()
    assert lines == [hashlib.sha256(b"a" * length).hexdigest() for length in range(301)]


def test_one_pass(native: Path) -> None:
    lines = launch(native, plan_text(), 250, device=1)
    assert lines[:2] == ["load context 0x1001 capture mode 2", "function k"]
    (call,) = launches(lines)
    assert (call["kernel"], call["grid"], call["shared"], call["stream"]) == ("k", "250 1 1", "0", "0x77")
    assert (call["x"], call["y"], call["batch"]) == ("0x10000000", "0x20000000", "250")
    assert (call["bias"], call["weight_0"], call["weight_1"]) == ("(nil)", "0x50", "0x51")
    assert call["context"] == "0x1001"
    assert len(lines) == 3, "building it a second time should do nothing"


def test_passes_over_chunks(native: Path) -> None:
    """At most 100 of 250 samples at once, and eights: x and y move on, scratch does not; rows of 12 and 40 bytes in
    bfloat16."""
    plan = "factorlayer plan 1\nchunk 100\nscratch 64 32 0\n"
    plan += pass_text("x s0 128 60000 3 2 0 1 sm_90 a", kernel("a"))
    plan += pass_text("s0 s1 256 0 1 4 2 1 sm_90 b", kernel("b"))
    plan += pass_text("s1 y 32 0 300 1 1 5 sm_90 c", kernel("c"))
    lines = launch(native, plan, 250)
    calls = list(launches(lines))
    assert [call["kernel"] for call in calls] == list("abc" * 3)
    assert [call["batch"] for call in calls[::3]] == ["88", "88", "74"]
    assert [call["x"] for call in calls[::3]] == ["0x10000000", hex(0x10000000 + 1056), hex(0x10000000 + 2112)]
    assert [call["y"] for call in calls[2::3]] == ["0x20000000", hex(0x20000000 + 3520), hex(0x20000000 + 7040)]
    assert {call["y"] for call in calls[::3]} == {call["x"] for call in calls[1::3]} == {"0x30000000"}
    assert {call["y"] for call in calls[1::3]} == {call["x"] for call in calls[2::3]} == {"0x40000000"}
    # 88·3 units by 2; 88 units by 4; 88·300 units, but one block for each of 132 processors, 5 to a column.
    assert [call["grid"] for call in calls[:3]] == ["132 1 1", "22 1 1", "26 5 1"]
    assert [call["grid"] for call in calls[6:]] == ["111 1 1", "19 1 1", "26 5 1"]
    assert "attribute 8 = 60000" in lines  # more than 48 KB of shared memory have to be asked for
    assert sum(line.startswith("attribute") for line in lines) == 1


def test_states_may_lie_in_further_buffers(native: Path) -> None:
    plan = "factorlayer plan 1\nchunk 0\nscratch 64 0 0 32\n"
    plan += pass_text("x s0 128 0 1 1 0 1 sm_90 a", kernel("a"))
    plan += pass_text("s0 s3 128 0 1 1 0 1 sm_90 b", kernel("b"))
    plan += pass_text("s0+s3@2 y 128 0 1 1 0 1 sm_90 c", kernel("c"))
    _, second, third = launches(launch(native, plan, 250))
    assert (second["x"], second["y"]) == ("0x30000000", "0x80000000")
    assert (third["x"], third["y"]) == ("0x30000000", "0x20000000")


def test_passes_that_prepare_weights_may_run_alone_or_be_left_out(native: Path) -> None:
    plan = "factorlayer plan 1\nchunk 100\nscratch 0 0 4096\n"
    plan += pass_text(f"none s2 128 0 1 {1 << 40} 1 7 sm_90 a", kernel("a"))
    plan += pass_text("x y 256 0 1 1 0 1 sm_90 b", kernel("b"))

    def run(part: str, batch: int) -> list[dict[str, str]]:
        return list(launches(launch(native, plan, batch, part=part)))

    (preparing,) = run("weights", 1)
    assert (preparing["kernel"], preparing["grid"]) == ("a", "1 7 1")
    assert (preparing["x"], preparing["y"]) == ("(nil)", "0x60000000")
    assert [call["kernel"] for call in run("all", 250)] == list("ababab")
    rest = run("samples", 250)
    assert [call["kernel"] for call in rest] == list("bbb")
    assert {call["sums"] for call in rest} == {"0x60000000"}
    assert [call["x"] for call in rest] == ["0x10000000", hex(0x10000000 + 1056), hex(0x10000000 + 2112)]


def test_sums_and_a_second_output(native: Path) -> None:
    """What a gradient's passes are given: s2 as the output of the first, or beside it; w behind y."""
    head = "factorlayer plan 1\nchunk 0\nscratch 0 0 4096\n"
    for words, first, second in (("x s2", "0x60000000", "0x20000000"), ("x y", "0x20000000", "0x70000000")):
        plan = head + pass_text(f"{words} 128 0 3 2 2 1 sm_90 a", kernel("a"))
        plan += pass_text(f"s2 {'y' if 's2' in words else 'w'} 256 0 1 {1 << 40} 1 7 sm_90 b", kernel("b"))
        summing, adding = launches(launch(native, plan, 250))
        assert (summing["x"], summing["y"], summing["grid"]) == ("0x10000000", first, "264 1 1")
        assert (adding["x"], adding["y"], adding["grid"]) == ("0x60000000", second, "1 7 1")
        assert summing["sums"] == adding["sums"] == "0x60000000"


def test_maps_of_tensors(native: Path) -> None:
    """Of each chunk's x, whose third size is that of one sample, and of a weight."""
    plan = plan_text(head="chunk 100\nscratch 0 0 0\n")
    plan += OF_X + "map 1 tf32 8 8 2 4 40 64 32 512 32 32 8 2 4 1\n"
    lines = launch(native, plan, 250)
    maps = [line for line in lines if line.startswith("map ")]
    assert maps[:2] == [
        "map aligned type 11 of 0x10000000 sizes 8 2 264 1 1 strides 32 48 32 32 box 32 1 64 1 1 options 0 3 2 0",
        "map aligned type 11 of 0x51 sizes 8 8 2 4 40 strides 64 32 512 32 box 32 8 2 4 1 options 0 3 2 0",
    ]
    assert [(line.split()[5], line.split()[9]) for line in maps[2::2]] == [("0x10000420", "264"), ("0x10000840", "222")]
    assert len(list(launches(lines))) == 3
    of_gradient = launch(native, plan_text() + "map 1* u16 64 2 3 1 1 256 128 64 64 64 1 64 1 1\n", 250)
    assert [line for line in of_gradient if line.startswith("map ")] == [
        "map aligned type 1 of 0x51 sizes 64 2 750 1 1 strides 256 128 64 64 box 64 1 64 1 1 options 0 3 2 0"
    ]
    failed = launch(native, plan, 250, MAP_ERROR="1")[-1]
    assert failed == (
        "error factorlayer: the CUDA driver could not describe a tensor to the copy engine: bad luck (error 1)"
    )


@pytest.mark.parametrize(
    ("architecture", "driver", "batch", "how"),
    [
        ("sm_90a", "13000", 250, ["behind", "early", "early"]),  # 500 blocks, 125, and 132 that take all units in turn
        ("sm_100a", "12030", 60, ["early", "early", "early"]),
        ("sm_89", "13000", 60, ["behind", "behind", "behind"]),  # whose instructions have no such wait
        ("sm_90", "12020", 60, ["behind", "behind", "behind"]),
    ],
)
def test_blocks_that_wait_for_the_kernel_before_may_start_early(
    native: Path, architecture: str, driver: str, batch: int, how: list[str]
) -> None:
    plan = "factorlayer plan 1\nchunk 0\nscratch 64 32 0\n"
    for words, name in (("x s0 128 0 2 1 0 1", "a"), ("s0 s1 128 0 1 2 0 1", "b"), ("s1 y 128 0 300 1 1 1", "c")):
        source = kernel(name).replace("{ x", "{ wait_for_kernel_before(); x")
        plan += pass_text(f"{words} {architecture} {name}", "__device__ void wait_for_kernel_before() {}\n" + source)
    assert [call["how"] for call in launches(launch(native, plan, batch, DRIVER_VERSION=driver))] == how


@pytest.mark.parametrize(
    ("blocks", "cluster", "batch", "shared"),
    [
        (1, 1, 132, 116225),  # two of which have no room on a multiprocessor of 232448 bytes, and 1024 for each block
        (1, 1, 133, 60000),  # more blocks than multiprocessors
        (4, 4, 15, 116225),
        (4, 4, 16, 60000),  # more clusters than the driver has room for
        (66, 1, 2, 116225),
    ],
)
def test_blocks_have_multiprocessors_of_their_own_where_there_are_as_many(
    native: Path, blocks: int, cluster: int, batch: int, shared: int
) -> None:
    source = kernel().replace("__global__ void", f"__global__ void __cluster_dims__(1, {cluster}, 1)")
    text = pass_text(f"x y 128 60000 1 1 0 {blocks} sm_90 k", (source if cluster > 1 else kernel()) + "\n" + APART)
    lines = launch(native, "factorlayer plan 1\nchunk 0\nscratch 0 0 0\n" + text, batch)
    (call,) = launches(lines)
    assert int(call["shared"]) == shared
    assert "attribute 8 = 116225" in lines


@pytest.mark.parametrize(
    ("room", "clusters"),
    [("15", 15), ("17", 16), ("0", 16)],  # of 132 multiprocessors; 0: the driver does not know
)
def test_clusters_that_take_turns_are_as_many_as_have_room(native: Path, room: str, clusters: int) -> None:
    source = kernel().replace("__global__ void", "__global__ void __cluster_dims__(1, 8, 1)")
    plan = "factorlayer plan 1\nchunk 0\nscratch 0 0 0\n" + pass_text("x y 128 0 1 1 1 8 sm_90 k", source)
    (call,) = launches(launch(native, plan, 250, CLUSTERS=room))
    assert call["grid"] == f"{clusters} 8 1"


@pytest.mark.parametrize(
    ("blocks", "batch", "answers", "grid", "error"),
    [
        (12, 5, {}, "5 12 1", None),
        (12, 250, {}, "11 12 1", None),  # as many groups as there is room for, which take all units in turn
        (132, 250, {}, "1 132 1", None),
        (133, 1, {}, "1 133 1", "could not launch 1 x 133 blocks"),
        (64, 2, {"RESIDENT": "100"}, "2 64 1", "could not launch 2 x 64 blocks"),  # of a part of a GPU
        (12, 5, {"DRIVER_VERSION": "12020"}, None, "this driver is too old to launch blocks that wait for one another"),
    ],
)  # fmt: skip
def test_blocks_that_wait_for_one_another_are_all_there_or_refused(
    native: Path, blocks: int, batch: int, answers: dict[str, str], grid: str | None, error: str | None
) -> None:
    """By a launch that fails where not all of them can be on the GPU at once; otherwise those that are would wait for
    ever."""
    plan = "factorlayer plan 1\nchunk 0\nscratch 0 0 0\n"
    plan += pass_text(f"x y 128 0 1 1 1 {blocks} sm_90 k", kernel() + "\n" + TOGETHER)
    lines = launch(native, plan, batch, **answers)
    calls = list(launches(lines))
    assert {(call["how"], call["grid"]) for call in calls} == ({("together", grid)} if grid else set())
    assert (error is None) == (not any(line.startswith(("error", "failure")) for line in lines))
    assert error is None or error in lines[-1]


def test_batches_beyond_2_to_the_31(native: Path) -> None:
    chunked = launch(native, plan_text(head=f"chunk {2**40}\nscratch 0 0 0\n").replace("1 1 0 1", "7 8 4 1"), 2**40 + 5)
    calls = list(launches(chunked))
    assert [call["batch"] for call in calls] == [str(2**39 + 8), str(2**39 - 3)]
    assert calls[0]["grid"] == f"{4 * 132} 1 1"
    assert calls[1]["x"] == hex(0x10000000 + 12 * (2**39 + 8))
    assert launch(native, plan_text(), 2**31)[-1] == (
        "error factorlayer: a batch of 2147483648 makes 2147483648 blocks, a launch can have 2147483647; "
        "split the batch"
    )


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"LOAD_ERROR": "218"}, "failure factorlayer: the CUDA driver could not load kernel k: bad luck (error 218)"),
        ({"LOAD_ERROR": "2"}, "error factorlayer: the CUDA driver could not load kernel k: out of memory (error 2)"),
        (
            {"LOAD_ERROR": "900"},
            "error factorlayer: the CUDA driver could not load kernel k: operation not permitted when stream is "
            "capturing (error 900); call layer.warmup(batch) before the capture",
        ),
        (
            {"SHARED": "50000"},
            "failure factorlayer: the CUDA driver could not give kernel k 60000 bytes of shared memory: bad luck "
            "(error 1)",
        ),
        (
            {"LAUNCH_ERROR": "700"},
            "error factorlayer: the CUDA driver could not launch 3 x 1 blocks of 128 threads with 60000 bytes of "
            "shared memory: bad luck (error 700)",
        ),
        ({"INIT_ERROR": "100"}, "error factorlayer: the CUDA driver could not start: bad luck (error 100)"),
    ],
)
def test_errors_of_the_driver(native: Path, answers: dict[str, str], message: str) -> None:
    lines = launch(native, plan_text().replace(" 128 0 ", " 128 60000 "), 3, **answers)
    assert message in lines
    loads = sum(line.startswith("load ") for line in lines)
    if message.startswith("failure"):  # what cannot work is not tried again
        assert lines.count(message) == 2 and loads == 1
    elif "LOAD_ERROR" in answers:  # what may work later leaves nothing behind
        assert lines[-1] == message


def test_a_device_that_is_not_there(native: Path) -> None:
    assert launch(native, plan_text(), 3, device=2)[-1] == (
        "error factorlayer: the CUDA driver could not find device 2: bad luck (error 101)"
    )


LIMITS = """
import os, torch, factorlayer
for clock, bus in ("3201000", "6144"), ("2619000", "5120"), ("0", "0"):
    if not os.fork():
        os.environ |= {"MEMORY_CLOCK": clock, "MEMORY_BUS": bus}
        print(*torch.ops.factorlayer.limits(1), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_what_a_driver_says_of_a_gpu(native: Path) -> None:
    """Of an H200, of an H100, and of one whose memory nobody knows, each in a process that has asked none before."""
    command, answers = [sys.executable, "-c", LIMITS], {"LD_LIBRARY_PATH": str(native)}
    done = subprocess.run(command, env=os.environ | answers, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"90 132 232448 {rate}" for rate in (4916736, 3352320, 0)]


def test_the_extension_loads_without_python(native: Path) -> None:
    """As an exported package does it: every symbol is resolved at once, in a process that has no Python."""
    libraries = [Path(torch.__file__).parent / "lib" / "libtorch.so", factorlayer._C.__file__]
    done = subprocess.run([native / "load", *map(str, libraries)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_driver_is_named() -> None:
    if ctypes.util.find_library("cuda"):  # also where no GPU is visible
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(
        RuntimeError, match=r"need NVIDIA's driver, libcuda.so.1, which cannot be opened \(.+\); install"
    ):
        runtime.install(TWO_FACTORS, torch.float32, 0, 0, plan_text())


# Choosing


class Gpu(types.SimpleNamespace):
    """What a CUDA tensor says of itself."""

    def __init__(self, dtype: torch.dtype = torch.float32, index: int = 0) -> None:
        super().__init__(is_cuda=True, is_cpu=False, is_meta=False, dtype=dtype, device=torch.device("cuda", index))
        self.get_device = lambda: index


def chain_of(k: int = 2) -> Chain:
    return Chain.of(resolve(2**k, 2**k, "kronecker", ((2,) * k, (2,) * k), None, 1), True, "relu")


@pytest.mark.parametrize(
    ("capability", "nvrtc", "reason"),
    [
        ((7, 5), True, "its CUDA kernels need compute capability 8.0 or later, Old One has 7.5"),
        ((8, 0), True, None),
        ((12, 0), True, None),
        ((9, 0), False, "no NVRTC"),
    ],
)
def test_why_not_on_a_gpu(
    capability: tuple[int, int], nvrtc: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compiler() -> list[str]:
        asked.append(1)
        if not nvrtc:
            raise RuntimeError("no NVRTC")
        return ["13.0", "here"]

    monkeypatch.setattr(runtime, "_reasons", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old One")
    monkeypatch.setattr(torch.ops.factorlayer, "compiler", compiler)
    for _ in range(3):
        assert why_not_fused(Gpu(), chain_of()) == reason
    assert len(asked) <= 1, "a device is looked at once"


def test_why_not_with_too_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_reasons", {0: None})
    contraction = chain_of().contractions[0]
    assert why_not_fused(Gpu(), Chain((contraction,) * 62)) is None
    assert why_not_fused(Gpu(), Chain((contraction,) * 63)) == (
        "its CUDA kernels take 62 weights at most, this layer has 63"
    )


@pytest.fixture
def _tf32_switch() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield
    matmul.fp32_precision = before


def _by_precision(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


def _by_allow(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on


def _by_matmul_precision(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


@pytest.mark.usefixtures("_tf32_switch")
@pytest.mark.parametrize("switch", [_by_precision, _by_allow, _by_matmul_precision])
def test_tf32_follows_the_switch_however_it_is_set(switch: Any) -> None:
    chain = chain_of()
    switch(True)
    assert text_for(chain, Gpu()) == chain.text + "; tf32"
    assert text_for(chain, Gpu(torch.float64)) == text_for(chain, torch.ones(1)) == chain.text
    switch(False)
    assert text_for(chain, Gpu()) == chain.text


def test_of_a_recurrence_it_follows_the_switch_for_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.GRU's, which is on unless it is told otherwise, whatever that for products is, which nn.GRUCell follows."""
    recurrence = Recurrence.parse("gru after; tied 0 1 8 8 1; tanh")
    in_tf32 = "gru after; tied 0 1 8 8 1; tanh; tf32"
    switches = {"rnn": True, "matmul": False}
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "tf32_allowed", lambda operation="matmul": switches[operation])
    assert recurrent_ops.text_for(recurrence, Gpu()) == in_tf32
    assert recurrent_ops.text_for(recurrence, Gpu(torch.float64)) == recurrence.text
    assert recurrent_ops.text_for(recurrence, torch.ones(1)) == recurrence.text
    assert recurrent_ops.text_for(recurrence, Gpu(), FactorGRUCell._switch) == recurrence.text
    switches.update(rnn=False, matmul=True)
    assert recurrent_ops.text_for(recurrence, Gpu(), FactorGRU._switch) == recurrence.text
    assert recurrent_ops.text_for(recurrence, Gpu(), FactorGRUCell._switch) == in_tf32


def test_the_switch_for_recurrent_layers_is_read() -> None:
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            rnn.fp32_precision = precision
            assert runtime.tf32_allowed("rnn") is (precision == "tf32")
    finally:
        rnn.fp32_precision = before


@pytest.mark.usefixtures("_tf32_switch")
def test_torch_compile_sees_through_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiles again when the switch moves."""
    monkeypatch.setattr(runtime, "_reasons", {-1: "because"})

    def probe(x: Tensor) -> Tensor:
        if runtime.why_not_on_gpu(x.get_device()) != "because":
            return x
        return x + 1 if runtime.tf32_allowed() else x + 2

    compiled = torch.compile(probe, fullgraph=True, backend="eager")
    for on in (False, True, False):
        _by_precision(on)
        assert compiled(torch.zeros(1)).item() == (1 if on else 2)


def test_auto_falls_back_once_where_a_kernel_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fused(*arguments: Any) -> Tensor:
        calls.append(1)
        raise CompileError("the kernel is too clever")

    monkeypatch.setattr(factorlayer.functional, "fused", fused)
    monkeypatch.setattr(factorlayer.functional, "layer_at_once", not_at_once)
    monkeypatch.setattr(factorlayer.functional, "_given_up", {})
    monkeypatch.setattr(factorlayer.functional, "_warned", set())
    layer, x = FactorLinear(12, 20), torch.ones(3, 12)
    right = FactorLinear(12, 20, implementation="batched")
    right.load_state_dict(layer.state_dict())
    with pytest.warns(
        RuntimeWarning, match="the batched implementation, not the fused one, .*: the kernel is too clev"
    ):
        assert nearly(layer(x), right(x))
    assert nearly(layer(x), right(x))  # without a warning, which would be an error here
    assert len(calls) == 1
    assert layer.explain().endswith("runs batched, because fused cannot: the kernel is too clever")
    layer.implementation = "fused"
    with pytest.raises(CompileError, match="too clever"):
        layer(x)


def test_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FactorLinear(12, 20)
    layer.warmup(16)  # nothing to do on a CPU
    with pytest.raises(
        ValueError, match=r"FactorLinear\.warmup: batch should be a positive number of samples, it is 0"
    ):
        layer.warmup(0)
    prepared = []
    monkeypatch.setattr(factorlayer.functional, "prepare_fused", lambda *arguments: prepared.append(arguments))
    layer.warmup(16)
    with torch.autocast("cpu", torch.bfloat16):
        layer.warmup(17)
    with torch.no_grad():
        layer.warmup(18)
    layer.implementation = "batched"
    layer.warmup(19)
    assert [(chain, x.dtype, batch, recorded) for chain, x, batch, recorded in prepared] == [
        (layer.chain, torch.float32, 16, True),
        (layer.chain, torch.bfloat16, 17, True),
        (layer.chain, torch.float32, 18, False),
    ]


def test_backward_on_cuda_computes_what_the_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below autograd, where the dispatcher calls it. Before the first time it compiles what that takes, at once."""
    prepared = []
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "cuda_ops", lambda device, dtype: OPS)
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "prepare_together", lambda asked, *_: prepared.append(asked))
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_prepared", set())
    for bias in (True, False):
        layer = FactorLinear(12, 20, bias, factors=((3, 4), (4, 5)), activation="gelu", dtype=torch.float64)
        x, grad_y = torch.randn(7, 12, dtype=torch.float64), torch.randn(7, 20, dtype=torch.float64)
        for wanted in (13 + 2 * bias, 1, 4):
            arguments = (grad_y, x, layer.weights, layer.bias, layer.chain.text, wanted)
            right = torch.ops.factorlayer.backward(*arguments)
            found = factorlayer.autograd.layer_ops._backward_on_cuda(*arguments)
            torch.testing.assert_close(found, right)
            assert not any(gradient.requires_grad for gradient in found)
            assert prepared.pop() == texts(layer.chain.text, OPS.fits, 7, wanted)
            factorlayer.autograd.layer_ops._backward_on_cuda(*arguments)
            assert not prepared
    assert torch._C._dispatch_has_kernel_for_dispatch_key("factorlayer::backward", "CUDA")


# Importing


def test_importing_touches_no_cuda_and_imports_little() -> None:
    """Beside PyTorch, the package itself and Python's own modules; nothing of the command line, and no compiler, which
    fuse() does not import either."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import factorlayer\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "assert not torch.cuda.is_initialized()\n"
        "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else ''\n"
        "ours = [name for name in ('libcuda.so', 'libnvrtc') if name in maps]\n"
        "assert torch.version.cuda is not None or not ours, ours\n"
        "from factorlayer import fuse\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "factorlayer.cli.app" not in imported and "factorlayer.plan.planner" not in imported
    # PyTorch's own modules bring Triton along where PyTorch is built for GPUs.
    others = {name.split(".")[0] for name in imported} - {"factorlayer", "torch", "triton"}
    others = {name for name in others if not name.startswith("_sysconfigdata")}
    assert others <= set(sys.stdlib_module_names), others
    assert len([name for name in imported if name.startswith("torch.")]) <= 3, imported
