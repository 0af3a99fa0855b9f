"""The command line in a shell: its name, its version, what it completes, and Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from forked import python
from typer.testing import CliRunner

import factorlayer
from factorlayer.autograd.layer_ops import missing_extension
from factorlayer.cli.app import app

ROOT = Path(__file__).parents[1]
INSTALLED = ["-c", "import sys; sys.argv[0] = '/bin/factorlayer'; from factorlayer.cli.app import main; main()"]
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "COLUMNS": "100"}


def run(arguments: list[str], start: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), *start, *arguments]
    variables = ENVIRONMENT | environment
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=variables)


def hears_ctrl_c() -> None:
    """Whoever is started in the background ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(arguments: str, sign: bytes, folder: Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the program, which has Ctrl-C when stderr, a terminal, has shown the sign."""
    ours, its = pty.openpty()
    command = [*python(), "test.py", *arguments.split()]
    with (folder / "stdout").open("w+") as out:
        program = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=its, env=ENVIRONMENT, preexec_fn=hears_ctrl_c)
        os.close(its)
        shown, sent = b"", False
        try:
            while select.select([ours], [], [], 600)[0] and (more := more_of(ours)):
                shown += more
                if sign in shown and not sent:
                    program.send_signal(signal.SIGINT)
                    sent = True
            assert sent, shown.decode()
            status = program.wait(timeout=600)
        finally:
            program.kill()
            os.close(ours)
        return status, (folder / "stdout").read_text(), shown.decode()


def more_of(terminal: int) -> bytes:
    """What was written to it since; nothing once the other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


# its name and version


@pytest.mark.parametrize(
    ("start", "name"), [(["test.py"], "python test.py"), (INSTALLED, "factorlayer")], ids=["test.py", "factorlayer"]
)
def test_help_and_messages_have_the_name_that_it_was_called_by(start: list[str], name: str) -> None:
    said = " ".join(run(["--help"], start).stdout.split())
    assert f"Usage: {name} [OPTIONS] BATCH FACTOR..." in said
    assert f"Example: {name} 16 32 32 check" in said
    assert ("Installed, this is" in said) == (name != "factorlayer")
    refused = run(["16", "32"], start)
    assert f"Try '{name} " in refused.stderr
    assert f"For example: {name} 16 32 32 check" in " ".join(re.sub("[│╭╮╰╯─]", " ", refused.stderr).split())
    assert refused.returncode == 2


def test_without_arguments_it_is_help() -> None:
    done = run([], INSTALLED)
    assert "Example: factorlayer 16 32 32 check" in done.stdout + done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", ["--version", "16 32 --version check", "cache --version"])
def test_version(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), prog_name="factorlayer")
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"factorlayer {factorlayer.__version__}, PyTorch {torch.__version__}, ")
    if missing_extension is None:
        assert first.endswith(f", {torch.ops.factorlayer.instruction_set()} kernels")
    assert result.exit_code == 0


def test_version_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorlayer.autograd.layer_ops.missing_extension", ImportError("no such file"))
    result = CliRunner().invoke(app, ["--version"], prog_name="factorlayer")
    assert "no fused kernels: the compiled extension factorlayer._C cannot be imported (no such file)" in result.stdout
    assert result.exit_code == 0


# completion


def completed(line: str) -> list[str]:
    """What bash offers behind the line, whose last word is the one begun, if it does not end in a space."""
    words = line.split(" ")
    environment = {"_FACTORLAYER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(app, [], prog_name="factorlayer", env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("factorlayer ", ["check", "profile", "bench", "tune", "convert", "report", "cache"]),
        ("factorlayer 16 ", ["check", "profile", "bench", "tune"]),
        ("factorlayer 16 32 20x36 ", ["check", "profile", "bench", "tune"]),
        ("factorlayer --dtype d 16 32 ch", ["check"]),
        ("factorlayer c", ["check", "convert", "cache"]),
        ("factorlayer cache ", ["list", "verify", "clear", "limit"]),
        ("factorlayer 16 32 check ", []),
        ("factorlayer --dtype ", ["f", "d", "h", "b"]),
        ("factorlayer 16 32 --structure m", ["monarch"]),
        ("factorlayer 16 32 check --structure ", ["kronecker", "monarch", "dense", "blocks"]),
        ("factorlayer --activation ge", ["gelu", "gelu_tanh"]),
        ("factorlayer 16 32 check --activation relu", ["relu", "relu_squared"]),
        ("factorlayer bench 16 32 --implementation f", ["fused"]),
        ("factorlayer 16 32 profile --implementation v", ["v1", "v2", "v3"]),
        ("factorlayer 16 32 profile --tr", ["--trace"]),
        ("factorlayer 16 32 check --tr", []),
        ("factorlayer 16 32 --tr", ["--trace"]),
        ("factorlayer --v", ["--variants", "--version"]),
    ],
)
def test_completion(line: str, words: list[str]) -> None:
    assert completed(line) == words


def test_activations_are_completed_by_name() -> None:
    assert completed("factorlayer 16 32 --activation ") == ["none", *factorlayer.ACTIVATIONS]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_of_shells_call_the_installed_program(shell: str, tmp_path: Path) -> None:
    environment = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    shown = run(["--show-completion", shell], INSTALLED, **environment)
    assert "_FACTORLAYER_COMPLETE" in shown.stdout and shown.returncode == 0
    done = run(["--install-completion", shell], INSTALLED, **environment)
    assert f"{shell} completion installed in {tmp_path}" in done.stdout.replace("\n", "") and done.returncode == 0
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "_FACTORLAYER_COMPLETE" in written


# Ctrl-C

ONE_DONE = b"1/8"
BENCH = "--device cpu 8 8 8 bench --min-run-time 0.3"


@pytest.mark.long
def test_bench_prints_what_was_measured_before_ctrl_c(tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    status, out, shown = interrupted(f"{BENCH} --plot {plot}", ONE_DONE, tmp_path)
    count = re.search(r"interrupted: (\d) of 8 figures were measured", out)
    assert count and 1 <= int(count[1]) < 8
    assert re.search(r"forward, 8\.192e\+03 multiply-adds +\| +[\d.]+", out)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (status, "Traceback" in shown) == (130, False)


@pytest.mark.long
def test_bench_as_json_has_what_was_measured_before_ctrl_c(tmp_path: Path) -> None:
    status, out, shown = interrupted(f"{BENCH} --json", ONE_DONE, tmp_path)
    found = json.loads(out)
    assert found["interrupted"] and 1 <= len(found["timings"]) < 8
    assert (found["timings"][0]["implementation"], found["timings"][0]["direction"]) == ("v1", "forward")
    assert "interrupted: " in shown
    assert status == 130


def test_bench_that_nobody_interrupts_says_so() -> None:
    result = CliRunner().invoke(app, ["4", "4", "bench", "--device", "cpu", "--json", "--min-run-time", "0.001"])
    assert json.loads(result.stdout)["interrupted"] is False
    assert result.exit_code == 0


def test_bench_before_the_first_figure(tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    status, out, _ = interrupted(f"{BENCH.replace('0.3', '600')} --plot {plot}", b"0/8", tmp_path)
    assert "interrupted: 0 of 8 figures were measured" in out
    assert (status, plot.exists()) == (130, False)


@pytest.mark.long
def test_profile_keeps_the_steps_before_ctrl_c(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    arguments = f"--device cpu 256 32 32 profile --steps 100000 --json --trace {trace}"
    status, out, _ = interrupted(arguments, b"3/100000", tmp_path)
    found = json.loads(out)
    assert found["interrupted"] and 3 <= found["steps"] < 100000
    calls = {event["name"]: event["calls"] for event in found["events"]}
    assert calls["v3 backward"] >= found["steps"]
    assert json.loads(trace.read_text())["traceEvents"]
    assert status == 130
