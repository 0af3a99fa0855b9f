"""The cache's folder under torture: python tests/torture.py --seed 1 --seconds 600

Rounds, each in a folder of its own: many processes begin at once, ask for answers and kernels, some are killed; beside
them a vandal damages what lies there, or removes the folder. Whatever happens, every answer is right, every process
ends, warns at most once, and what is not damaged stays. Then, in peace, a last process makes everything whole again,
within the limit. A round depends on its seed and number, but not on which process is faster.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

import factorlayer.plan.planner
from factorlayer.autograd import runtime

KEYS = 40
NOBODY = 65534
PATIENCE = 600  # seconds that a process may take, where much else is going on
GPU = ("float32", 1, 90, 132, 232448)
LAST = 5.0  # days since a foreign file was used
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
SCENES = ["plain", "plain", "limit", "limit", "link", "full", "read-only", "removed"]


def chain_of(key: int) -> str:
    """One factor; what the planner answers is torture's own."""
    return f"tied 0 1 {key + 1} 4 1"


def truth(chain: str) -> str:
    """What the planner answers here: another text for every chain, of up to 100 kB."""
    seed = hashlib.sha256(chain.encode()).hexdigest()
    return seed * (1 + int(seed[:6], 16) % (1500 if seed[6] in "0123" else 30))


def answer(chain: str, *_: object) -> str:
    time.sleep(0.001)
    return truth(chain)


def ask(key: int) -> None:
    chain = chain_of(key)
    if torch.ops.factorlayer.ask_planner("has_plan", chain, *GPU) != truth(chain):
        raise AssertionError(f"a wrong answer for {chain!r}")


def kernel_plan(key: int) -> str:
    source = f'extern "C" __global__ void torture(float* x) {{ x[threadIdx.x] = {key}; }}'
    head = "factorlayer plan 1\nchunk 0\nscratch 4 4 0\npass x y 32 0 1 1 0 1 sm_90 torture "
    return f"{head}{len(source)}\n{source}\n"


def contents_of(text: bytes) -> tuple[str, bytes] | None:
    """Of a whole entry the chain or kernel's name, and what it holds; by this file's own reading of the format."""
    head, found, contents = text.partition(b"\n\n")
    identity, _, proof = head.rpartition(b"\n")
    right = f"contents {len(contents)} {hashlib.sha256(contents).hexdigest()}".encode()
    if not found or proof != right:
        return None
    names = [line[5:] for line in identity.split(b"\n") if line.startswith(b"name ")]
    return (names[0].decode("latin1"), contents) if names else None


class Vandal:
    """Does one thing after the other to a folder's files."""

    def __init__(self, rng: random.Random, folder: Path, beside: Path) -> None:
        self.rng, self.folder, self.beside = rng, folder, beside

    def run(self) -> None:
        deeds = [self.truncate, self.flip, self.swap, self.clock, self.leave, self.link, self.replace, self.forge]
        while True:
            try:
                paths = [path for path in self.folder.iterdir() if path.suffix in (".plan", ".kernel", ".tmp")]
                if paths:
                    self.rng.choice(deeds)(self.rng.choice(paths))
            except OSError:  # it is gone, or the disk is read-only
                pass
            time.sleep(self.rng.choice([0, 0.001, 0.01]))

    def truncate(self, path: Path) -> None:
        os.truncate(path, self.rng.randrange(max(1, path.stat().st_size)))

    def flip(self, path: Path) -> None:
        if path.is_file():
            with path.open("r+b") as file:
                at = self.rng.randrange(max(1, path.stat().st_size))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << self.rng.randrange(8)]) if byte else b"")

    def swap(self, path: Path) -> None:
        others = list(self.folder.glob("*.*"))
        other = self.rng.choice(others) if others else path  # none: the folder was removed since it was read
        if other != path and other.is_file():
            shutil.copyfile(other, self.beside / "copy")
            os.replace(self.beside / "copy", path)

    def clock(self, path: Path) -> None:
        moment = time.time() + self.rng.choice([-1e9, -1e6, -100, 0, 100, 1e6, 1e9])
        os.utime(path, (moment, moment), follow_symlinks=False)

    def leave(self, path: Path) -> None:
        self.clock_of(self.folder / f"{path.name[:45]}.{self.rng.randrange(99)}.tmp")

    def clock_of(self, path: Path) -> None:
        path.write_bytes(b"half" * self.rng.randrange(2000))
        self.clock(path)

    def link(self, path: Path) -> None:
        target = self.beside / path.name
        if path.is_file():
            shutil.copyfile(path, target)
        path.unlink()
        path.symlink_to(self.rng.choice([target, target, Path("/dev/zero"), Path("nowhere"), path]))

    def replace(self, path: Path) -> None:
        path.unlink()
        if self.rng.random() < 0.5:
            os.mkfifo(path)

    def forge(self, path: Path) -> None:
        """A whole entry of another version, whose contents are wrong, under this one's name."""
        chain = f"has_plan of {chain_of(self.rng.randrange(KEYS))} in float32, batch class 1"
        identity = f"factorlayer plan 1\npackage 9.9.9\ncompiler \narchitecture \noptions \nname {chain}\nsource 0\n"
        wrong = b"wrong"
        proof = f"contents {len(wrong)} {hashlib.sha256(wrong).hexdigest()}\n\n"
        (self.beside / "forged").write_bytes(identity.encode() + proof.encode() + wrong)
        os.replace(self.beside / "forged", path)


def work(rng: random.Random, kernels: bool) -> None:
    """What a process of a user does: cold, then warm."""
    if rng.random() < 0.15:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))  # as a disk that fills up
    for _ in range(rng.choice([1, 10, 60])):
        ask(rng.randrange(KEYS))
        if kernels and rng.random() < 0.1:
            runtime.fill_cache(kernel_plan(rng.randrange(3)))


class Child:
    """A forked process: the cache is as new to it as to any other, and it starts in a millisecond."""

    def __init__(self, run: Callable[[], None], report: Path, user: int | None = None) -> None:
        self.report, self.end, self.killed = report, time.monotonic() + PATIENCE, False
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            if user is not None:
                os.setuid(user)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run()
            code = 0
            if len(caught) > 1:
                raise AssertionError(f"it warned {len(caught)} times: {[str(each.message) for each in caught]}")
        except BaseException:
            code = 1
            sys.stderr.write(traceback.format_exc())
            with report.open("a") as file:
                file.write(traceback.format_exc())
        finally:
            os._exit(code)

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """What was wrong with it, or nothing."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > self.end:
                self.kill()
                os.waitpid(self.pid, 0)
                return f"a process did not end within {PATIENCE} s"
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 or (self.killed and code == -signal.SIGKILL):
            return ""
        return f"a process ended with {code}: {self.report.read_text() if self.report.exists() else ''}"


class Round:
    """One folder, from cold to the end."""

    def __init__(self, seed: int, number: int, base: Path) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.scene, self.is_calm = self.rng.choice(SCENES), self.rng.random() < 0.3
        self.folder, self.beside = base / "cache", base / "beside"
        self.report, self.mounted, self.faults = base / "report", False, list[str]()
        self.beside.mkdir()
        self.beside.chmod(0o777)

    def prepare(self) -> None:
        os.environ["FACTORLAYER_CACHE"] = str(self.folder)
        if self.scene in ("full", "read-only"):
            self.folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(self.folder)]
            self.mounted = not subprocess.run(command, capture_output=True, check=False).returncode
            self.scene = self.scene if self.mounted else "plain"
        elif self.scene == "link":
            (self.beside / "real").mkdir(mode=0o777)
            self.folder.symlink_to(self.beside / "real")
        elif self.scene != "removed":
            self.folder.mkdir()
        if self.scene == "limit":
            runtime.set_cache_limit(self.rng.choice([200 << 10, 400 << 10]))
        if self.folder.exists():
            self.folder.chmod(0o777)
            (self.folder / "mine.plan").write_text("mine")
        self.foreign: dict[Path, bytes] = {}
        if IS_ROOT and self.folder.exists() and not self.mounted:
            for i in range(3):
                path = self.folder / f"{i:040x}.plan"
                path.write_bytes(b"other" * 9999)
                os.chown(path, 12345, 12345)
                os.utime(path, (time.time() - LAST * 86400,) * 2)
                self.foreign[path] = path.read_bytes()

    def run(self) -> None:
        self.prepare()
        vandal = None
        if not self.is_calm:
            vandal = Child(Vandal(random.Random(self.rng.random()), self.folder, self.beside).run, self.report)
        children = []
        for i in range(self.rng.choice([2, 8, 24])):
            rng, user = random.Random(self.rng.random()), NOBODY if IS_ROOT and i % 4 == 3 else None
            kernels = user is None and self.rng.random() < 0.2
            children.append(Child(lambda rng=rng, kernels=kernels: work(rng, kernels), self.report, user))
        for child in children:
            if self.rng.random() < 0.3:
                time.sleep(self.rng.random() * 0.02)
                child.kill()
            if self.scene == "removed" and self.rng.random() < 0.5:
                shutil.rmtree(self.folder, ignore_errors=True)
            if self.scene == "read-only" and self.rng.random() < 0.3:
                mode = self.rng.choice(["ro", "rw"])
                subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], capture_output=True, check=False)
        self.faults += [fault for child in children if (fault := child.wait())]
        if vandal:
            vandal.kill()
            self.faults += [fault for fault in [vandal.wait()] if fault]
        self.look()

    def look(self) -> None:
        """In peace: what is kept, and what a last process makes of it."""
        if self.scene in ("plain", "link", "limit"):
            self.require(
                (self.folder / "mine.plan").exists() or not self.is_calm, "a file that is no entry was removed"
            )
        if self.is_calm and self.foreign:
            self.require(
                all(p.read_bytes() == right for p, right in self.foreign.items()), "another user's was removed"
            )
        for entry in runtime.cache_entries():  # which are read, whatever they are
            entry.line()
        if self.mounted:
            return
        before = self.kept()
        old = time.time() - 86400
        for path in self.folder.glob("*.tmp"):
            os.utime(path, (old, old), follow_symlinks=False)
        # One of the answers is new, as only who writes clears away.
        last = Child(lambda: [ask(key) for key in range(KEYS + 1)] and None, self.report)
        if fault := last.wait():
            self.faults.append(f"the last process: {fault}")
        after, room = self.kept(), runtime.cache_room()
        self.require(room.occupied <= room.limit, f"{room}")
        if self.scene == "limit":
            return
        lost = {name for name, text in before.items() if after.get(name) != text}
        self.require(not lost, f"lost what was whole: {lost}")
        chains = {
            contents_of(text)[0].split(" of ")[-1].split(" in ")[0]
            for name, text in after.items()
            if name.endswith(".plan")
        }
        self.require({chain_of(key) for key in range(KEYS)} <= chains, "not everything is kept in the end")
        if self.is_calm:
            left = [path.name for path in self.folder.glob("*.tmp") if path.lstat().st_uid == os.geteuid()]
            self.require(not left, f"drafts of killed processes were left: {left}")

    def kept(self) -> dict[str, bytes]:
        """The files that are whole by their own name, all of which have to be right."""
        found = {}
        whole = {entry.file for entry in runtime.cache_entries() if entry.whole}
        for name in whole:
            text = (self.folder / name).read_bytes()
            held = contents_of(text)
            self.require(held is not None, f"{name} was taken for whole")
            chain = held[0].split(" of ")[-1].split(" in ")[0] if held else ""
            if chain.startswith("tied ") and b"\npackage 9.9.9\n" not in text:
                self.require(held is not None and held[1] == truth(chain).encode(), f"{name} is whole and wrong")
            found[name] = text
        return found

    def require(self, fine: bool, fault: str) -> None:
        if not fine:
            self.faults.append(fault)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], capture_output=True, check=False)


def torture(
    seed: int, seconds: float, only: int | None = None, say: Callable[[str], None] = print
) -> tuple[Counter[str], list[str]]:
    """How many rounds of which scene, and the faults in words."""
    factorlayer.plan.planner.has_plan = answer  # type: ignore[assignment]
    runtime.planner()
    torch.ops.factorlayer.compiler()  # so that forks have it
    counts, faults = Counter[str](), list[str]()
    end, number = time.monotonic() + seconds, only or 0
    while not faults and (not counts or time.monotonic() < end):
        with tempfile.TemporaryDirectory(prefix="torture") as base:
            os.chmod(base, 0o777)
            one = Round(seed, number, Path(base))
            try:
                one.run()
            finally:
                one.close()
        counts[one.scene + (", calm" if one.is_calm else "")] += 1
        for fault in one.faults:
            faults.append(
                f"round {number}, {one.scene}: {fault}\n  again: python tests/torture.py --seed {seed} --round {number}"
            )
            say(faults[-1])
        number += 1
        if only is not None:
            break
    return counts, faults


def main(
    seed: Annotated[int, typer.Option(help="What all rounds are drawn from.")],
    seconds: Annotated[float, typer.Option(help="How long to go on.")] = 60,
    round: Annotated[int | None, typer.Option(help="Only the round of this number.")] = None,
) -> None:
    """Torture the cache. Exits with 1 if it gave in."""
    counts, faults = torture(seed, seconds, round)
    print(f"seed {seed}: {counts.total()} rounds: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    typer.run(main)
