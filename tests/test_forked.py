"""forked.py: a program is as Python itself would run it, but for PyTorch, which is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked import python

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="programs start Python itself here")
SHOW = """
import os, sys
print(sys.argv, os.getcwd(), sys.path, sorted(os.environ.items()), __name__, globals().get("__file__"), input())
print("to stderr", file=sys.stderr)
"""


def run(begin: Sequence[str], *arguments: str | Path, **named: object) -> tuple[int, str, str]:
    command = [*begin, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, **named)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["-c", "a file"])
def test_it_sees_what_python_would_show_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    program = ["-c", SHOW] if how == "-c" else ["show.py"]
    variables = os.environ | {"PYTHONPATH": f"/nowhere{os.pathsep}/elsewhere", "ONE": "more \udcff"}
    variables.pop("HOME", None)
    found = [
        run(begin, *program, "a", "b c", cwd=tmp_path, env=variables, input="a line\n")
        for begin in (python(), [sys.executable])
    ]
    assert found[0] == found[1] and found[0][0] == 0 and "a line" in found[0][1]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("print('some words', end=''); raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('some words')", 1),
        ("raise ValueError('some words')", 1),
        ("import atexit; atexit.register(print, 'some words')", 0),
        ("import threading, time; threading.Timer(0.1, print, ['some words']).start()", 0),
        ("import sys; sys.stdout.close()", 0),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_it_ends_as_it_would(code: str, status: int) -> None:
    found, out, err = run(python(), "-c", code)
    assert (found, "some words" in out + err) == (status, "some words" in code)


def test_pytorch_is_there_and_nothing_of_ours() -> None:
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('factorlayer')])"
    assert run(python(), "-c", code) == (0, "True []\n", "")


def hears_ctrl_c() -> None:
    """Whoever is started in the background ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignores_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.long
def test_it_hears_ctrl_c_where_who_asks_does_and_not_where_the_server_does() -> None:
    """Tests that run in the background have a server that ignores it."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    asks = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from forked import python
from test_forked import hears_ctrl_c, ignores_ctrl_c
for before in (hears_ctrl_c, ignores_ctrl_c):
    subprocess.run([*python(), "-c", {code!r}], preexec_fn=before, check=True)
"""
    for before in (hears_ctrl_c, ignores_ctrl_c):
        status, out, err = run([sys.executable], "-c", asks, preexec_fn=before)
        assert (status, out) == (0, "True\nFalse\n"), err


def test_it_gets_the_signals_of_who_asked() -> None:
    """The program looks for them again and again: a pause that begins just behind one would last for ever."""
    code = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.01)"
    for sent, status in ((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*python(), "-c", code], preexec_fn=hears_ctrl_c, **streams) as asking:
            assert asking.stdout is not None and asking.stdout.readline() == b"ready\n"
            asking.send_signal(sent)
            assert asking.wait(600) == status


def test_it_ends_with_who_asked() -> None:
    """Whoever is killed cannot say so. Its output ends where the last process that can write to it is no more."""
    code = "import signal; print('ready', flush=True); signal.pause()"
    with subprocess.Popen([*python(), "-c", code], stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None and asking.stdout.readline() == b"ready\n"
        asking.kill()
        assert asking.stdout.read() == b""


def test_it_ends_with_who_was_gone_before_it_began() -> None:
    code = f"""
import os, signal, socket, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from forked import watch
asking, asked = socket.socketpair()
asking.close()
if program := os.fork():
    watch(program, asked)
signal.alarm(10)  # or what nobody ends would hold the output for ever
signal.pause()
"""
    assert run(python(), "-c", code) == (0, "", "")
