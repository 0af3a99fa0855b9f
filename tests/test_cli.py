"""The command line: what it accepts, what check, profile and bench print, and what they exit with."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import factorlayer.case
import factorlayer.functional
import factorlayer.fused
from factorlayer.case import Case, Problem
from factorlayer.cli import app
from factorlayer.compare import Comparison, Report, compare, longest_sums, tolerances
from factorlayer.subject import Single, parse_factor, spec_of_factors

ROOT = Path(__file__).parents[1]
CASES = ["16 32 32", "3 5 7", "1 64", "8 2 3 4 5", "16 20x36 28x44", "7 1 13", "0 8 8"]
STRUCTURES = ["kronecker", "monarch"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests expect of v3 holds on a CPU; a test that wants CUDA says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(arguments: str) -> Result:
    return CliRunner().invoke(app, arguments.split(), prog_name="test.py")


def run_program(arguments: str, *, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """The real thing: python test.py, or other code with these arguments."""
    start = ["-c", code] if code else ["test.py"]
    command = [sys.executable, *start, *arguments.split()]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)


def words(text: str) -> str:
    """Without the boxes and line breaks that fit a message to a terminal."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def verdicts(output: str) -> dict[str, bool]:
    lines = re.findall(r"^(\w+ == \w+): (True|False) \(.+\)$", output, re.MULTILINE)
    return {pair: verdict == "True" for pair, verdict in lines}


# check


@pytest.mark.parametrize("dtype", "dfhb")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", CASES)
def test_check_finds_all_equal(case: str, structure: str, dtype: str) -> None:
    result = run(f"--dtype {dtype} --structure {structure} --device cpu {case} check")
    found = verdicts(result.stdout)
    assert len(found) == 3 * (4 + len(case.split()) - 1)  # y, g, grad_x, grad_bias and one per factor
    assert all(found.values()), result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize("dtype", "dfhb")
@pytest.mark.parametrize("activation", [name for name in factorlayer.ACTIVATIONS if name != "identity"])
def test_check_finds_all_equal_with_an_activation(activation: str, dtype: str) -> None:
    for structure in STRUCTURES:
        result = run(f"16 20x36 28x44 --dtype {dtype} --structure {structure} --activation {activation} check")
        assert result.exit_code == 0, result.stdout


@pytest.mark.parametrize("options", ["--rank 3", "--no-bias", "--seed 5 --rank 2", "--structure monarch --rank 4"])
def test_check_finds_all_equal_with_options(options: str) -> None:
    for dtype in "dfhb":
        result = run(f"5 8x6 4x12 check --dtype {dtype} {options}")
        assert result.exit_code == 0, result.stdout
        assert ("grad_bias" in result.stdout) == ("--no-bias" not in options)


def test_check_prints_the_classic_lines() -> None:
    lines = run("--device cpu --dtype d 3 5 7 check").stdout.splitlines()
    norms = [f"v{v}_{name}" for v in (1, 2, 3) for name in "yg"]
    names = ["y", "g", "grad_x", "grad_weight_0", "grad_weight_1", "grad_bias"]
    pairs = [f"v{a}_{name} == v{b}_{name}" for a, b in [(1, 2), (1, 3), (2, 3)] for name in names]
    assert len(lines) == len(norms) + len(pairs)
    for name, line in zip(norms, lines, strict=False):
        assert re.fullmatch(rf"\|\|{name}\|\| = \d\.\d{{6}}e[+-]\d\d", line)
    for pair, line in zip(pairs, lines[len(norms) :], strict=True):
        assert re.fullmatch(rf"{pair}: True \(\d\.\de[+-]\d\d\)", line)


def test_check_norms_are_alike_in_all_dtypes() -> None:
    norms = [json.loads(run(f"16 8 9 check --json --dtype {d}").stdout)["norms"] for d in "dfhb"]
    for name, exact in norms[0].items():
        assert [norm[name] for norm in norms[1:]] == pytest.approx([exact] * 3, rel=0.01)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_check_notices_a_wrong_output(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.functional.batched
    monkeypatch.setattr(factorlayer.functional, "batched", lambda *a: right(*a) * (1 + 1e-4))
    result = run(f"--structure {structure} 16 8 8 check")
    found = verdicts(result.stdout)
    assert result.exit_code == 1
    assert [pair for pair in found if "y" in pair and not found[pair]] == ["v1_y == v2_y", "v2_y == v3_y"]
    assert all(verdict for pair, verdict in found.items() if "v2" not in pair)


@pytest.mark.parametrize("bit", [0, 1, 2, 3])  # x, bias, weight_0, weight_1
@pytest.mark.parametrize("structure", STRUCTURES)
def test_check_notices_a_wrong_gradient(structure: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.fused._raw_backward

    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        gradients = list(right(*arguments))
        gradients[bit] = gradients[bit] * (1 + 1e-4)
        return tuple(gradients)

    monkeypatch.setattr(factorlayer.fused, "_raw_backward", wrong)
    result = run(f"--structure {structure} 16 8 8 check")
    name = ["grad_x", "grad_bias", "grad_weight_0", "grad_weight_1"][bit]
    wrong_pairs = {pair for pair, verdict in verdicts(result.stdout).items() if not verdict}
    assert result.exit_code == 1
    assert {f"v1_{name} == v3_{name}", f"v2_{name} == v3_{name}"} <= wrong_pairs
    assert wrong_pairs <= {f"v{v}_{n} == v3_{n}" for v in (1, 2) for n in (name, "g")}


def test_check_keeps_float16_gradients_finite() -> None:
    """A sum over 65536 samples would be infinite, whoever adds it up."""
    result = run("--dtype h --device cpu 65536 4 4 check --json")
    norms = json.loads(result.stdout)["norms"]
    assert result.exit_code == 0, result.stderr
    assert all(1 << 13 < norms[f"{v}_g"] < 1 << 18 for v in ("v1", "v2", "v3"))


def test_check_notices_a_wrong_float16_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.fused._raw_backward
    monkeypatch.setattr(factorlayer.fused, "_raw_backward", lambda *a: tuple(g * 1.01 for g in right(*a)))
    result = run("--dtype h --device cpu 65536 4 4 check")
    wrong_pairs = {pair for pair, verdict in verdicts(result.stdout).items() if not verdict}
    assert result.exit_code == 1
    assert {f"v1_grad_{name} == v3_grad_{name}" for name in ("x", "bias", "weight_0", "weight_1")} <= wrong_pairs


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_check_notices_nan_and_infinity(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.functional.naive

    def wrong(*arguments: object) -> torch.Tensor:
        y = right(*arguments).clone()
        with torch.no_grad():
            y[0, 0] = value
        return y

    monkeypatch.setattr(factorlayer.functional, "naive", wrong)
    result = run("4 8 8 check --json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert not report["passed"]
    first = report["comparisons"][0]
    assert (first["left"], first["equal"], first["difference"]) == ("v1_y", False, None)
    assert f"v1_y == v2_y: False ({value})" in result.stderr


def test_check_says_that_v3_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.case, "why_not_fused", lambda x, chain: "it was not built")
    result = run("--device cpu 4 8 8 check")
    assert "v3 is not available on cpu and left out: it was not built" in result.stdout
    assert set(verdicts(result.stdout)) == {f"v1_{n} == v2_{n}" for n in tolerances(_problem("4 8 8"))}
    assert result.exit_code == 1  # a CPU should have it


def test_report_excuses_missing_kernels_only_where_there_are_none() -> None:
    spec = spec_of_factors("kronecker", [(8, 8)], 1)
    for device, equal, passed in (("cuda", True, True), ("cuda", False, False), ("cpu", True, False)):
        case = Case(Single(spec), 4, torch.float32, torch.device(device))
        report = Report(case, unavailable={"v3": "no kernels"})
        report.comparisons.append(Comparison("v1_y", "v2_y", equal, 0.0, 1e-6))
        assert report.passed == passed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", "dfhb")
def test_check_on_cuda(dtype: str) -> None:
    result = run(f"--dtype {dtype} --device cuda 16 20x36 28x44 check")
    assert result.exit_code == 0, result.stdout
    assert "v2_grad_x == v3_grad_x: True" in result.stdout


def test_compare() -> None:
    one = torch.ones(4)
    assert compare(one, one, 0.0) == (True, 0.0)
    assert compare(one[:0], one[:0], 0.0) == (True, 0.0)
    assert compare(0 * one, 0 * one, 1e-6) == (True, 0.0)
    assert compare(one * 1.5, one, 0.5) == (True, 0.5)
    assert compare(one * 1.5, one, 0.49) == (False, 0.5)
    assert not compare(one * math.nan, one * math.nan, 1.0)[0]
    assert not compare(one, one * math.inf, 1.0)[0]
    assert not compare(one * math.inf, one * math.inf, 1.0)[0]


def test_tolerances_follow_the_rule() -> None:
    problem, spec = _problem("16 4x6 5x3"), spec_of_factors("kronecker", [(4, 6), (5, 3)], 1)
    eps = torch.finfo(torch.float32).eps
    # The second mode comes first, as that is cheaper: sums over 5, then 4; backward over 6, then 3.
    assert longest_sums(spec, 16, False) == {
        "y": 5,
        "grad_x": 6,
        "grad_weight_0": 16 * 5,
        "grad_weight_1": 16 * 6,
        "grad_bias": 16,
    }
    assert tolerances(problem)["y"] == pytest.approx(2 * eps * (math.sqrt(2) + math.sqrt(5)))
    assert tolerances(problem)["g"] == pytest.approx(2 * eps * (math.sqrt(2) + math.sqrt(16 * 6)))
    half = _problem("16 4x6 5x3", dtype=torch.bfloat16, activation="relu")
    assert tolerances(half)["y"] == pytest.approx(2 * (2**-7 * math.sqrt(3) + eps * math.sqrt(5)))
    untied = spec_of_factors("monarch", [(4, 6), (5, 3)], 2)  # sums over 5 and over 4·2
    assert longest_sums(untied, 16, False)["y"] == 8
    assert longest_sums(untied, 16, False)["grad_weight_0"] == 16


def _problem(text: str, dtype: torch.dtype = torch.float32, activation: str = "identity") -> Problem:
    batch, *factors = text.split()
    spec = spec_of_factors("kronecker", [parse_factor(factor) for factor in factors], 1)
    return Problem(Case(Single(spec, activation), int(batch), dtype, CPU))


# profile


@pytest.mark.parametrize("implementation", ["v1", "batched", "v3"])
def test_profile(implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(f"4 8 8 profile --device cpu --implementation {implementation} --steps 2")
    version = {"batched": "v2"}.get(implementation, implementation)
    assert result.exit_code == 0, result.output
    assert f"{version} backward" in result.stdout
    assert "Self CPU time total" in result.stdout
    assert f"factorlayer_{version}.json" in result.stdout
    assert "ui.perfetto.dev" in result.stdout
    assert json.loads((tmp_path / f"factorlayer_{version}.json").read_text())["traceEvents"]


def test_profile_as_json(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run(f"4 8 8 profile --device cpu --forward-only --json --steps 3 --trace {trace}")
    found = json.loads(result.stdout)
    calls = {event["name"]: event["calls"] for event in found["events"]}
    assert (found["command"], found["implementation"], found["trace"]) == ("profile", "v3", str(trace))
    assert calls["v3 forward"] == 3
    assert "v3 backward" not in calls
    assert "Self CPU time total" in result.stderr


# bench


def test_bench() -> None:
    result = run("--device cpu 32 128 128 bench --min-run-time 0.001")
    assert result.exit_code == 0, result.output
    assert "state size 16384, AI 1.2e+02" in result.stdout
    assert re.search(r"v1 +\| +v2 +\| +v3", result.stdout)
    assert re.search(r"forward, 1\.342e\+08 multiply-adds +\| +[\d.]+ +\| +[\d.]+ +\| +[\d.]+", result.stdout)
    assert re.search(r"forward\+backward, 4\.027e\+08 multiply-adds +\|", result.stdout)


def test_bench_as_json_with_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    options = f"--implementation fused --implementation v1 --min-run-time 0.001 --plot {plot} --json"
    result = run(f"bench {options} --device cpu --structure monarch 4 8x4 8x6")
    found = json.loads(result.stdout)
    timed = [(timing["implementation"], timing["direction"]) for timing in found["timings"]]
    assert timed == [(v, d) for d in ("forward", "forward+backward") for v in ("v3", "v1")]
    assert all(timing["median_seconds"] > 0 for timing in found["timings"])
    assert found["state_size"] == 64
    assert found["configuration"]["structure"] == "monarch"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "multiply-adds" in result.stderr


def test_bench_without_samples() -> None:
    assert run("0 8 8 bench --min-run-time 0.001").exit_code == 0


def test_bench_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("4 8 8 bench --plot out.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in words(result.stderr)


# usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("16 32 32", "say what to do: check, profile or bench. For example: python test.py 16 32 32 check"),
        ("16 32 32 chek", "say what to do: check, profile or bench, there is no command 'chek'"),
        ("--dtype d 16 32", "say what to do"),
        ("16 8 check bench", "one command at a time, check and bench came"),
        (
            "16 32y4 check",
            "a FACTOR should be a positive size or two, such as 32 or 20x36 (in x out); it is '32y4'",
        ),
        ("16 32x check", "it is '32x'"),
        ("16 8 0 check", "it is '0'"),
        ("16 8x0 check", "it is '8x0'"),
        ("16 -8 check", "BATCH should be 0 or more and each FACTOR a positive size; -8 came"),
        ("-1 8 check", "BATCH should be 0 or more and each FACTOR a positive size; -1 came"),
        ("x 8 check", "BATCH"),
        ("16 check", "'FACTOR': BATCH should be followed by one or more. For example"),
        ("check", "Missing argument 'BATCH"),
        ("16 8 check --dtype x", "'x' is not one of 'f', 'd', 'h', 'b'"),
        ("16 8 check --structure toeplitz", "'toeplitz' is not one of 'kronecker', 'monarch'"),
        ("16 8 check --rank 0", "--rank"),
        (
            "16 4 4 check --rank 17",
            "'--rank': rank should be at most 16 for a kronecker layer with factors ((4, 4), (4, 4))",
        ),
        ("16 4 4 4 check --rank 2 --structure monarch", "rank should be at most 1 for a monarch layer"),
        (
            "16 4 4 check --activation swoosh",
            "'--activation': activation should be None or one of identity, relu",
        ),
        (
            "16 4 4 check --device meta",
            "'--device': the device should be one that computes torch.float32 here: cpu",
        ),
        ("16 4 4 check --device abacus", "it is 'abacus'"),
        ("16 999999999999 999999999 check", "a layer and samples of these sizes cannot be made"),
        ("16 4 4 check --threads 0", "--threads"),
        ("16 4 4 check --seed -1", "--seed"),
        ("16 4 4 check --trace t.json", "No such option: --trace"),
        ("16 4 4 profile --implementation v4", "'v4' is not one of"),
        (
            "16 4 4 profile --trace nowhere/t.json",
            "'--trace': the file should be in a folder that exists; there is no nowhere",
        ),
        ("16 4 4 bench --plot nowhere/t.png", "there is no nowhere"),
        ("16 4 4 bench --plot out.foo", "'--plot': the file's name should end in one of"),
    ],
)
def test_wrong_usage(arguments: str, message: str) -> None:
    result = run(arguments)
    assert message in words(result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert result.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    result = run("16 4 4 check --device cuda")
    assert "there is no CUDA device; it is 'cuda'" in words(result.stderr)
    assert result.exit_code == 2


@pytest.mark.parametrize("command", ["profile --trace t.json", "bench"])
def test_an_implementation_that_cannot_run_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.case, "why_not_fused", lambda x, chain: "it was not built")
    result = run(f"4 4 4 {command} --implementation fused")
    assert "v3 cannot run: it was not built; choose another" in words(result.stderr)
    assert result.exit_code == 2


def test_bench_leaves_out_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.case, "why_not_fused", lambda x, chain: "it was not built")
    result = run("4 4 4 bench --min-run-time 0.001 --device cpu")
    assert "v3 is not available on cpu and left out: it was not built" in result.stdout
    assert re.search(r"v1 +\| +v2\s", result.stdout)
    assert result.exit_code == 0


def test_the_value_of_an_option_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("4 4 4 --trace check profile --steps 1").exit_code == 0
    assert (tmp_path / "check").exists()
    assert "say what to do" in words(run("4 4 4 --trace check").stderr)


@pytest.mark.parametrize(
    "arguments", ["--help", "-h", "16 32 --help", "check --help", "profile -h", "16 8 bench --help"]
)
def test_help_has_an_example(arguments: str) -> None:
    result = run(arguments)
    assert result.exit_code == 0
    assert "Example: python test.py" in words(result.stdout)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        found = json.loads(run("4 4 4 check --json --threads 1").stdout)
    finally:
        torch.set_num_threads(before)
    assert found["configuration"]["threads"] == 1


# the program itself


@pytest.mark.parametrize(
    "arguments",
    ["--dtype d 3 5 7 check --json", "check 3 --json 5 --dtype d 7", "3 5 7 --json check --dtype=d"],
)
def test_program_takes_options_anywhere(arguments: str) -> None:
    done = run_program(arguments)
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["configuration"]["dtype"] == "float64"
    assert found["configuration"]["in_factors"] == [5, 7]
    assert "v1_y == v2_y: True" in done.stderr
    assert done.returncode == 0


def test_program_prints_tables_on_stdout() -> None:
    done = run_program("--structure monarch 16 20x36 28x44 check")
    assert all(verdicts(done.stdout).values())
    assert len(verdicts(done.stdout)) == 18
    assert (done.stderr, done.returncode) == ("", 0)


def test_program_keeps_stdout_for_json(tmp_path: Path) -> None:
    done = run_program(f"4 8 8 profile --json --trace {tmp_path}/t.json")
    assert json.loads(done.stdout)["command"] == "profile"
    assert done.returncode == 0


def test_program_exits_with_1_if_implementations_differ() -> None:
    code = """
import factorlayer.functional
right = factorlayer.functional.batched
factorlayer.functional.batched = lambda *arguments: right(*arguments) * 1.01
from factorlayer.cli import main
main()
"""
    done = run_program("16 8 8 check", code=code)
    assert "v1_y == v2_y: False" in done.stdout
    assert (done.stderr, done.returncode) == ("", 1)


def test_program_exits_with_2_on_wrong_usage() -> None:
    done = run_program("16 32 32")
    assert "say what to do: check, profile or bench" in words(done.stderr)
    assert (done.stdout, done.returncode) == ("", 2)
