"""Python programs that tests start, in processes that have PyTorch already: most take less time than importing it.

A server that has imported it and done nothing else forks a process for each program, whose arguments, folder,
variables, streams, signals and exit status are those of the command that asks:

    subprocess.run([*python(), "-c", "import torch"])
    subprocess.run([*python(), "test.py", "16", "32", "check"])

What is about the start of Python itself, or changes variables that are read before PyTorch is there (LD_PRELOAD,
OMP_NUM_THREADS), begins with `sys.executable` as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path


def python() -> list[str]:
    """What a command begins with."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [sys.executable, "-I", "-S", __file__, *server()]


@functools.cache
def server() -> list[str]:
    """How the one of this process is asked, with which it ends."""
    address = str(Path(tempfile.mkdtemp()) / "server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        given = listener.fileno()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # or NumPy starts a thread, which no fork has
        command = [sys.executable, __file__, "serve", str(given)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[given])
    atexit.register(process.communicate)  # it ends with its stdin
    return ["ask", address]


def serve(listener: socket.socket) -> list[str] | None:
    """None once nobody can ask any more. In a fork, the arguments of what was asked for."""
    watching: set[int] = set()
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        asked, _ = listener.accept()
        if fork := os.fork():
            asked.close()
            watching = {fork, *(each for each in watching if not os.waitpid(each, os.WNOHANG)[0])}
            continue
        listener.close()
        size, streams, _, _ = socket.recv_fds(asked, 8, 3)
        arguments, folder, variables, hears = json.loads(read(asked, int.from_bytes(size, "big")))
        if program := os.fork():
            watch(program, asked)
        asked.close()
        become(streams, folder, variables, hears)
        return arguments
    for each in watching:
        os.waitpid(each, 0)
    address = Path(listener.getsockname())
    address.unlink()
    address.parent.rmdir()
    return None


def watch(program: int, asked: socket.socket) -> None:
    """Says who the program is and how it ends, and ends it if who asked is gone, which may be so from the start."""
    with contextlib.suppress(ConnectionError):
        asked.sendall(program.to_bytes(8, "big"))
    if asked in select.select([asked, os.pidfd_open(program)], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(ConnectionError):
        asked.sendall(status.to_bytes(8, "big"))
    os._exit(0)


def become(streams: list[int], folder: str, variables: dict[str, str], hears: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler if hears else signal.SIG_IGN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    of_the_server = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    path = [entry for entry in sys.path[1:] if entry not in of_the_server]
    sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *path]


def run(arguments: list[str]) -> None:
    """As Python does: a text behind -c, or a file."""
    name, *rest = arguments
    main = types.ModuleType("__main__")
    if name == "-c":
        text, *rest = rest
        sys.path.insert(0, "")
    else:
        text, main.__file__ = Path(name).read_text(), os.path.abspath(name)
        sys.path.insert(0, str(Path(name).resolve().parent))
    sys.argv[:] = [name, *rest]
    sys.modules["__main__"] = main
    exec(compile(text, main.__dict__.get("__file__", "<string>"), "exec"), main.__dict__)


def leave() -> None:
    """As Python ends a program without an error, but for taking PyTorch apart, which is most of a small program."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # of a stream that is gone: Python itself says so
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def ask(address: str, arguments: list[str]) -> None:
    """A program of the server's, which has this process's signals, and whose end is that of this process, too."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(address)
        hears = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # which the server may have from elsewhere
        request = json.dumps([arguments, os.getcwd(), dict(os.environ), hears]).encode()
        socket.send_fds(asked, [len(request).to_bytes(8, "big")], [0, 1, 2])
        asked.sendall(request)
        program = int.from_bytes(read(asked, 8), "big")
        woken, wakes = socket.socketpair()  # by a signal that comes just before a wait begins, too
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(program, number))
        while asked not in select.select([asked, woken], [], [])[0]:
            woken.recv(1)
        status = os.waitstatus_to_exitcode(int.from_bytes(read(asked, 8), "big"))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def read(asked: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = asked.recv(size - len(got))
        if not more:
            raise EOFError
        got += more
    return got


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    import torch  # noqa: F401

    gc.freeze()  # or collections write to memory that the forks have in common
    if arguments := serve(socket.socket(fileno=int(sys.argv[2]))):
        try:
            run(arguments)
        except SystemExit as end:
            if end.code:
                raise
        leave()
