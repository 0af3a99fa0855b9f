"""compiled.py: a kernel that has changed is compiled, and one of the others now and then, which has to agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import compiled
import pytest
import torch
from compiled import DRAWN, RECORD, SHARE, Compiled, Usage, key_of, line_of, put_down, recorded, report

LOG = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 812 by compiler
ptxas info    : 16 bytes gmem, 24 bytes cmem[3]
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
ptxas         .     32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 32 bytes cumulative stack size, 48 bytes smem, 512 bytes cmem[0]
ptxas info    : Compile time = 12.1 ms
ptxas info    : Function properties for a_slow_path
ptxas         .     40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""
USED = Usage(168, 40, 8, 12, 48, "ptxas info    : (C7519) warpgroup.arrive is injected in around a line by compiler")
SOURCE = """\
#line 1 "types.cuh"
// A comment
struct Tile {
  int n;
};

#line 1 "kernel"
struct Pass {};
  Pair<Pass>(params).run();
"""
ASKS = SOURCE, "kernel", "sm_90a", ["-O"]


def test_what_ptxas_says_is_read() -> None:
    assert Usage.of(LOG) == USED and USED.spilled == 12
    with pytest.raises(AssertionError, match="without registers"):
        Usage.of("error: identifier")


@pytest.mark.parametrize(
    ("old", "new"),
    [("// A comment", "// Another\n  // one"), ("  int n;", "\n    int n;\n"), ('1 "types.cuh"', '1 "tiles.cuh"')],
)
def test_a_comment_makes_no_new_kernel(old: str, new: str) -> None:
    assert old in SOURCE and key_of(SOURCE.replace(old, new), *ASKS[1:]) == key_of(*ASKS)


@pytest.mark.parametrize(
    ("old", "new"), [("int n", "int m"), ("Pair<", "Pairs<"), ("// A comment", "// A comment \\"), ("};", "}; // end")]
)
def test_any_code_makes_a_new_kernel(old: str, new: str) -> None:
    assert old in SOURCE and key_of(SOURCE.replace(old, new), *ASKS[1:]) != key_of(*ASKS)


def test_what_else_the_compiler_gets_makes_a_new_kernel() -> None:
    given: list[tuple[str, str, Sequence[str]]] = [
        ("kernels", "sm_90a", ["-O"]),
        ("kernel", "sm_80", ["-O"]),
        ("kernel", "sm_90a", ["-O", "-G"]),
    ]
    assert len({key_of(SOURCE, *of) for of in given} | {key_of(*ASKS)}) == 4


def test_a_line_is_read_as_it_was_written() -> None:
    usages = {"a": USED, "b": Usage(32, 0, 0, 0, 0)}
    lines = [line_of(SOURCE, "sm_90a", key, usage) for key, usage in usages.items()]
    assert lines[1] == "sm_90a Pair b 32 0 0 0 0"
    text = "\n".join(["13.0 (1 bytes)", *lines])
    assert recorded(text, "13.0 (1 bytes)") == usages
    assert recorded(text, "13.0 (2 bytes)") == recorded("", "13.0 (1 bytes)") == {}


class Nvrtc:
    """Says the same of all kernels, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: str, kernel: str, architecture: str, options: Sequence[str]) -> tuple[bytes, str]:
        self.calls += 1
        return b"\x7fELF kernel", LOG


def number(drawn: bool) -> str:
    return next(str(i) for i in range(1000) if compiled.is_drawn(key_of(*ASKS), str(i)) is drawn)


def test_one_that_is_not_recorded_is_compiled() -> None:
    nvrtc = Nvrtc()
    assert Compiled(nvrtc, {}, number(drawn=False))(*ASKS) == USED and nvrtc.calls == 1


def test_one_that_is_recorded_is_not_compiled_unless_drawn() -> None:
    nvrtc, known = Nvrtc(), {key_of(*ASKS): Usage(1, 2, 3, 4, 5)}
    assert Compiled(nvrtc, known, number(drawn=False))(*ASKS) == Usage(1, 2, 3, 4, 5) and nvrtc.calls == 0
    with pytest.raises(AssertionError, match=rf"compiled.txt is wrong about {key_of(*ASKS)}, sm_90a Pair .* 168 40 8"):
        Compiled(nvrtc, known, number(drawn=True))(*ASKS)
    assert Compiled(nvrtc, {key_of(*ASKS): USED}, number(drawn=True))(*ASKS) == USED and nvrtc.calls == 2


def test_a_share_is_drawn_and_each_kernel_by_some_number() -> None:
    drawn = [sum(compiled.is_drawn(str(key), str(i)) for key in range(1000)) for i in range(10)]
    assert all(1000 / SHARE / 2 < count < 1000 / SHARE * 2 for count in drawn)
    assert all(any(compiled.is_drawn(str(key), str(i)) for i in range(20 * SHARE)) for key in range(100))


def test_a_run_says_what_the_record_lacks(tmp_path: Path) -> None:
    assert list(report(tmp_path, "7")) == []
    asked = Compiled(Nvrtc(), {key_of(*ASKS): USED}, number(drawn=False))
    asked(*ASKS)
    asked.put_down("13.0", tmp_path)
    assert put_down(tmp_path) == {("13.0", "-" + line_of(SOURCE, "sm_90a", key_of(*ASKS), USED))}
    assert len(list(report(tmp_path, "7"))) == 1 and f"{DRAWN}=7" in "".join(report(tmp_path, "7"))
    asked(*ASKS[:3], ["-G"])
    asked.put_down("13.0", tmp_path)
    assert re.search(r"\b1 of 2 kernels are not in .* python tests/compiled\.py", " ".join(report(tmp_path, "7")))


def test_the_record_is_what_tests_go_by(usage_of: Compiled) -> None:
    """A line for a kernel, in order, so that what two changes add is merged."""
    head, *lines = RECORD.read_text().splitlines()
    known = recorded(RECORD.read_text(), head)
    assert lines == sorted(lines) and len(known) == len(lines) > 1000
    assert RECORD.stat().st_size < 200_000
    compiler, _ = torch.ops.factorlayer.compiler()
    assert usage_of.known == (known if compiler == head else {})
