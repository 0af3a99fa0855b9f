"""A little of the cache's torture, with another seed in every run, and that it finds what is planted.

In a process of its own, as it forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import python

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python(), *arguments], cwd=TESTS, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.long
def test_rounds_of_a_new_seed() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    done = run("torture.py", "--seed", str(seed), "--seconds", "8")
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {
    "a wrong answer": (
        "torture.answer = lambda chain, *_: 'wrong' if chain == torture.chain_of(7) else torture.truth(chain)",
        "a wrong answer for 'tied 0 1 8 4 1'",
    ),
    "a crash": ("torture.ask = lambda key: os.abort()", "a process ended with -6"),
    "a hang": ("torture.PATIENCE = 1; torture.ask = lambda key: time.sleep(60)", "a process did not end within 1 s"),
    "too many warnings": ("torture.ask = lambda key: runtime.warn(str(key))", "it warned "),
    "a loss": ("torture.ask = lambda key: None", "not everything is kept in the end"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_finds_what_is_planted(name: str) -> None:
    planted, said = PLANTED[name]
    rest = f"""
import os, time, torture
from factorlayer.autograd import runtime
{planted}
torture.SCENES[:] = ["plain"]
counts, faults = torture.torture(3, 0)
assert any({said!r} in fault for fault in faults), faults
assert "again: python tests/torture.py --seed 3 --round 0" in faults[0]
"""
    done = run("-c", rest)
    assert done.returncode == 0, done.stdout + done.stderr
