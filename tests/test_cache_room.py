"""The cache's limit, and what a folder may hold that is no entry of this process: who removes what, and when."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from test_cache import CHAIN, contents, kernels, plan_of, run_once, size_on_disk
from typer.testing import CliRunner

from factorlayer.autograd import runtime
from factorlayer.cli.app import app

DAY = 24 * 3600
MIB = 1 << 20
root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FACTORLAYER_CACHE", str(folder))
    return folder


def entry(folder: Path, name: str) -> Path:
    """Of a kernel, by its name."""
    (found,) = [folder / each.file for each in runtime.cache_entries() if each.whole and each.name == name]
    return found


def used(path: Path, seconds_ago: float) -> None:
    moment = time.time() - seconds_ago
    os.utime(path, (moment, moment), follow_symlinks=False)


def fill(*names: str) -> None:
    for name in names:
        runtime.fill_cache(plan_of(name))


def limit_to(folder: Path, entries: float) -> None:
    """As many entries of one kernel."""
    runtime.set_cache_limit(int(entries * size_on_disk(folder) / len(kernels())))


# Which leave first


def test_the_least_recently_used_leave_first(cache: Path) -> None:
    fill("a", "b", "c", "d")
    for days, name in enumerate("dbac"):  # d was used today, c the longest ago
        used(entry(cache, name), days * DAY)
    limit_to(cache, 4)
    fill("e")
    assert kernels() == ["b", "d", "e"]  # down to seven eighths
    assert size_on_disk(cache) == runtime.cache_room().occupied <= runtime.cache_room().limit


def test_loading_is_a_use(cache: Path, tmp_path: Path) -> None:
    fill("a", "b", "c")
    for days, name in enumerate("cba", start=1):
        used(entry(cache, name), days * DAY)
    (tmp_path / "plan").write_text(plan_of("a"))
    assert run_once(tmp_path / "plan", cache) == ""
    assert abs(entry(cache, "a").stat().st_mtime - time.time()) < 300
    limit_to(cache, 3)
    fill("d")
    assert kernels() == ["a", "d"]


def test_what_was_used_within_the_hour_is_not_marked_again(cache: Path) -> None:
    """So that reading writes nothing."""
    fill("a")
    used(entry(cache, "a"), 3000)
    before = entry(cache, "a").stat().st_mtime_ns
    fill("a")
    assert entry(cache, "a").stat().st_mtime_ns == before


def test_clocks_that_were_ahead_keep_nothing_for_ever(cache: Path) -> None:
    fill("a", "b", "c")
    used(entry(cache, "a"), -365 * DAY)
    used(entry(cache, "b"), 9 * DAY)
    used(entry(cache, "c"), -365 * DAY)
    fill("c")  # whose use is a better mark
    assert abs(entry(cache, "c").stat().st_mtime - time.time()) < 300
    limit_to(cache, 3)
    fill("d")
    assert kernels() == ["c", "d"]


def test_a_process_keeps_to_the_limit_at_every_moment(cache: Path) -> None:
    fill("a")
    limit_to(cache, 5)
    for i in range(40):
        fill(f"k{i}")
        assert size_on_disk(cache) <= runtime.cache_room().limit
        assert f"k{i}" in kernels()
    assert len(kernels()) >= 3


def test_plans_and_answers_count_as_well(cache: Path) -> None:
    runtime.set_cache_limit(20 * 4096)
    for size in range(2, 60):
        torch.ops.factorlayer.ask_planner("has_plan", CHAIN.replace("4", str(size)), "float32", 1, 90, 132, 232448)
    assert 0 < size_on_disk(cache) <= 20 * 4096


def test_what_the_limit_has_no_room_for_is_not_kept(cache: Path, tmp_path: Path) -> None:
    runtime.set_cache_limit(1000)
    (tmp_path / "plan").write_text(plan_of("a", "b"))
    err = run_once(tmp_path / "plan", cache)
    assert err.count("RuntimeWarning") == 1
    assert f"factorlayer cannot keep compiled kernels in {cache} (one has " in err
    assert (
        " bytes, the limit is 1000), so every process compiles them again; raise it by `factorlayer cache limit`" in err
    )
    assert list(contents(cache)) == ["limit"]


@root
def test_files_of_others_stay_and_do_not_count(cache: Path) -> None:
    fill("a", "b")
    limit_to(cache, 2)
    other = entry(cache, "a")
    both = size_on_disk(cache)
    os.chown(other, 12345, 12345)
    used(other, 99 * DAY)
    left = cache / (other.name + ".1.2.tmp")
    left.write_bytes(b"half")
    os.chown(left, 12345, 12345)
    used(left, 99 * DAY)
    mine = cache / "mine.kernel"
    mine.write_bytes(bytes(1 << 16))
    used(mine, 99 * DAY)
    assert runtime.cache_room().occupied == both // 2
    fill("c", "d")
    assert kernels() == ["a", "d"]
    assert left.exists() and mine.exists()


def test_a_link_is_removed_and_not_what_it_leads_to(cache: Path, tmp_path: Path) -> None:
    fill("a", "b")
    limit_to(cache, 1)
    first = entry(cache, "a")
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    fill("a")
    assert kernels() == ["a", "b"] and first.is_symlink()
    used(first, DAY)
    fill("c")
    assert kernels() == ["c"]
    assert (tmp_path / "elsewhere").exists() and not first.is_symlink()


# Drafts


def test_drafts_of_killed_writers_leave_and_those_being_written_stay(cache: Path) -> None:
    fill("a")
    name = entry(cache, "a").name
    drafts = [cache / f"{name}.{i}.0.tmp" for i in range(4)]
    for draft in drafts:
        draft.write_bytes(b"half")
        used(draft, DAY)
    used(drafts[1], -DAY)  # by a clock that was ahead
    used(drafts[2], 0)  # of this minute
    with drafts[3].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (cache.parent / "plan").write_text(plan_of("b"))
        run_once(cache.parent / "plan", cache)
    assert [draft.exists() for draft in drafts] == [False, False, True, True]


def test_a_draft_of_the_same_name_is_in_nobodys_way(cache: Path, tmp_path: Path) -> None:
    """Processes of two containers have the same number, and so has one that is started again after a kill."""
    fill("a")
    (name,) = contents(cache)
    shutil.rmtree(cache)
    cache.mkdir()
    code = f"""
import os, sys
from factorlayer.autograd import runtime
for i in range(200):
    open(os.path.join(os.environ["FACTORLAYER_CACHE"], f"{name}.{{os.getpid()}}.{{i}}.tmp"), "w").close()
print("ready", flush=True)
sys.stdin.readline()
runtime.fill_cache(open(sys.argv[1]).read())
print("done", flush=True)
"""
    (tmp_path / "plan").write_text(plan_of("a"))
    assert run_once(tmp_path / "plan", cache, code) == ""
    assert kernels() == ["a"]


# What is no file


def test_a_pipe_and_a_device_under_an_entrys_name(cache: Path) -> None:
    fill("a")
    path = entry(cache, "a")
    right = path.read_bytes()
    for make in (os.mkfifo, lambda name: os.symlink("/dev/zero", name), lambda name: os.symlink("nowhere", name)):
        path.unlink()
        make(path)
        assert not kernels() and runtime.cache_entries()[0].bytes == 0
        fill("a")
        assert path.read_bytes() == right and not path.is_symlink()


def test_a_file_of_any_size_under_an_entrys_name(cache: Path) -> None:
    fill("a")
    path = entry(cache, "a")
    right = path.read_bytes()
    os.truncate(path, 1 << 42)  # of which a page is on the disk
    assert not kernels()
    fill("a")
    assert path.read_bytes() == right


def test_damage_may_be_any_bytes(cache: Path) -> None:
    """A line of the list is split at tabs, and is text."""
    fill("a")
    path = entry(cache, "a")
    right = path.read_bytes()
    for word in (b"a\tb\nname c\td", b"\xff\xfe", b"\0", b"\n\n"):
        path.write_bytes(right.replace(b"\nname a\n", b"\nname " + word + b"\n"))
        (found,) = runtime.cache_entries()
        assert not found.whole and found.line().endswith("damaged")


def test_a_folder_that_is_removed_while_in_use(cache: Path) -> None:
    for name in "abc":
        fill(name)
        assert kernels() == [name]
        shutil.rmtree(cache)


def test_a_folder_that_is_a_link(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    cache.symlink_to(tmp_path / "real")
    fill("a")
    assert kernels() == ["a"] and cache.is_symlink() and len(list((tmp_path / "real").iterdir())) == 1


# The limit itself


def run(arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments.split(), prog_name="test.py")
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("size", "limit"), [("5000000", 5000000), ("64k", 65536), ("500M", 500 * MIB), ("2G", 2 << 30), ("1T", 1 << 40)]
)
def test_the_limit_stays_with_the_folder(cache: Path, size: str, limit: int) -> None:
    torch.ops.factorlayer.ask_planner("has_plan", CHAIN, "float32", 1, 90, 132, 232448)
    assert run("cache limit")[1].endswith(f"; 4096 of at most {1 << 30} bytes are taken\n")
    code, text = run(f"cache limit {size}")
    assert code == 0 and text == f"1 kernels and plans in {cache}; 4096 of at most {limit} bytes are taken\n"
    assert run("cache clear")[0] == 0
    assert run("cache list")[1] == f"0 kernels and plans in {cache}; 0 of at most {limit} bytes are taken\n"


@pytest.mark.parametrize("size", ["0", "2GB", "G", "1.5G", "half", "9" * 30, "٣"])
def test_other_limits_are_refused(cache: Path, size: str) -> None:
    code, text = run(f"cache limit {size}")
    assert code == 2 and "SIZE" in text and "number" in text
    assert not cache.exists()


def test_a_size_belongs_to_the_limit(cache: Path) -> None:
    code, text = run("cache clear 2G")
    assert code == 2 and "takes none; 2G came" in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("text", [b"", b"5", b"factorlayer cache limit 1\nbytes 12", b"\0" * 50, b"9" * 100])
def test_a_damaged_limit_is_the_usual_one(cache: Path, text: bytes) -> None:
    runtime.set_cache_limit(8192)
    (cache / "limit").write_bytes(text)
    assert runtime.cache_room().limit == 1 << 30


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_limit_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=f"limit cannot be kept in {tmp_path / 'file'}: Not a directory"):
        runtime.set_cache_limit(MIB)
