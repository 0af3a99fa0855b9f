"""What kernels use once they are compiled: of a kernel that has not changed, tests read it in compiled.txt.

A line there is a kernel: its architecture and template, the hash of all that the compiler gets, and what ptxas said.
The first line names the build of NVRTC that all of them are from. A kernel without a line is compiled, and so is one
in SHARE of the others, drawn anew in every run by FACTORLAYER_TEST_DRAWN, which has to use what its line says.
`python tests/compiled.py` writes the file anew, of all kernels that tests ask for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from once import Compile

RECORD = Path(__file__).with_name("compiled.txt")
SHARE = 50
# Whose kernels are drawn, by its number; where processes of a run put down the lines of kernels that it asked for
DRAWN, ASKED = "FACTORLAYER_TEST_DRAWN", "FACTORLAYER_TEST_ASKED"

SAID = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")
# Lines of the log that every kernel has
USUAL = re.compile(r"bytes gmem|Compiling entry function|Function properties for|Compile time|" + SAID.pattern)


@dataclass(frozen=True)
class Usage:
    """The most that a kernel or a function that it calls uses: registers of a thread, bytes of its stack, of these
    what is spilled, written and read, and static shared memory of a block; and what else ptxas had to say."""

    registers: int
    frame: int
    stored: int
    loaded: int
    static: int
    notes: str = ""

    @staticmethod
    def of(log: str) -> Usage:
        said, used = SAID.findall(log), USED.findall(log)
        assert said and used, f"a log without registers and spills: {log}"
        frame, stored, loaded = (max(map(int, column)) for column in zip(*said, strict=True))
        others = [line for line in log.splitlines() if not USUAL.search(line) and not USED.search(line)]
        notes = re.sub(r"\bline \d+", "a line", " / ".join(others))  # of what this kernel is translated to
        return Usage(max(map(int, used)), frame, stored, loaded, sum(map(int, STATIC.findall(log))), notes)

    @property
    def spilled(self) -> int:
        return max(self.stored, self.loaded)


# A kernel's source, its name, the architecture and options
UsageOf = Callable[[str, str, str, Sequence[str]], Usage]


@functools.cache
def _digest(text: str) -> str:
    """Of code without lines of comments, indents and numbers of lines, of which the compiler makes the same."""
    lines = map(str.strip, text.splitlines())
    kept = [line for line in lines if line and (line[-1] == "\\" or not line.startswith(("//", "#line ")))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def key_of(source: str, kernel: str, architecture: str, options: Sequence[str]) -> str:
    """Kernels have headers in common, of which each is looked at once."""
    digests = map(_digest, re.split(r"^(?=#line 1 )", source, flags=re.MULTILINE))
    return hashlib.sha256(json.dumps([*digests, kernel, architecture, *options]).encode()).hexdigest()[:16]


def line_of(source: str, architecture: str, key: str, usage: Usage) -> str:
    """Of compiled.txt."""
    template = re.findall(r"(\w+)<Pass>\(params", source) or ["-"]
    return " ".join(map(str, (architecture, template[-1], key, *astuple(usage)))).rstrip()


def recorded(text: str, compiler: str) -> dict[str, Usage]:
    """By the keys of kernels; none if another compiler made them."""
    head, *lines = text.splitlines() or [""]
    if head != compiler:
        return {}
    words = [line.split(" ", 8) for line in lines]
    return {key: Usage(*map(int, of[:5]), notes="".join(of[5:])) for _, _, key, *of in words}


def is_drawn(key: str, number: str) -> bool:
    return int(hashlib.sha256(f"{number} {key}".encode()).hexdigest(), 16) % SHARE == 0


class Compiled:
    """A UsageOf that compiles what has no line, or is drawn, and keeps the lines of all that it is asked for."""

    def __init__(self, compile_kernel: Compile, known: dict[str, Usage], number: str) -> None:
        self.compile_kernel, self.known, self.number = compile_kernel, known, number
        self.lines: dict[str, str] = {}

    def __call__(self, source: str, kernel: str, architecture: str, options: Sequence[str]) -> Usage:
        key = key_of(source, kernel, architecture, options)
        usage = self.known.get(key)
        if usage is None or is_drawn(key, self.number):
            cubin, log = self.compile_kernel(source, kernel, architecture, options)
            assert cubin.startswith(b"\x7fELF") and kernel.encode() in cubin
            made = Usage.of(log)
            assert usage in (None, made), (
                f"{RECORD.name} is wrong about {key}, {line_of(source, architecture, key, made)}: it has {usage}; "
                f"{DRAWN}={self.number} draws it again"
            )
            usage = made
        self.lines[key] = line_of(source, architecture, key, usage)
        return usage

    def put_down(self, compiler: str, folder: Path) -> None:
        """The compiler and the lines, those without one in the record first marked by a +."""
        marked = (f"{'-' if key in self.known else '+'}{line}" for key, line in sorted(self.lines.items()))
        (folder / str(os.getpid())).write_text("\n".join([compiler, *marked]))


def put_down(folder: Path) -> set[tuple[str, str]]:
    """What all processes of a run have: compilers, and marked lines."""
    texts = [path.read_text().splitlines() for path in folder.iterdir()]
    return {(compiler, line) for compiler, *lines in texts for line in lines}


def report(folder: Path, number: str) -> Iterator[str]:
    """What a run has to say of the record."""
    lines = {line for _, line in put_down(folder)}
    new = sum(line.startswith("+") for line in lines)
    if new < len(lines):
        yield f"Of kernels in tests/{RECORD.name} one in {SHARE} was compiled all the same, by {DRAWN}={number}."
    if new:
        yield f"{new} of {len(lines)} kernels are not in tests/{RECORD.name} and were compiled."
        yield "It is written anew by: python tests/compiled.py"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-n", "auto", "-m", "compiles", str(RECORD.parent)]
        failed = subprocess.run(command, env={**os.environ, ASKED: folder}, check=False).returncode
        found = put_down(Path(folder))
    compilers = {compiler for compiler, _ in found}
    if failed or len(compilers) != 1:
        print(f"{RECORD} is as it was: tests failed or were skipped. Where it is wrong, empty it and do this again.")
        return 1
    RECORD.write_text("\n".join([*compilers, *sorted(line[1:] for _, line in found)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
