"""The command line: what it accepts, what check, profile and bench print, and what they exit with."""

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import factorlayer.autograd.layer_ops
import factorlayer.cli.case
import factorlayer.cli.source
import factorlayer.cli.subject
import factorlayer.functional
import factorlayer.recurrences.gated
from factorlayer import FactorLinear
from factorlayer.autograd.layer_ops import not_at_once
from factorlayer.cli.app import app
from factorlayer.cli.case import Case, Problem
from factorlayer.cli.compare import Comparison, Report, compare, longest_sums, tolerances
from factorlayer.cli.linear import dense_of
from factorlayer.cli.subject import Block, Single, parse_factor, spec_of_factors
from factorlayer.device.gpu import Gpu
from factorlayer.maths.chain import Chain

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
    command = [*python(), *start, *arguments.split()]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)


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
    before, verdict = lines[:3], lines[-1]
    assert len(lines) == len(before) + len(norms) + len(pairs) + 1
    assert before[0].startswith("kronecker: x [3, 35] -> y [3, 35], 109 parameters (dense: 1260), float64 on cpu, ")
    assert before[1].startswith("compared: v1 naive, v2 batched, v3 fused (")
    assert before[1].endswith("; y, the gradients of x, weight_0, weight_1, bias, and all of these as one, g")
    assert (before[2], verdict) == ("auto runs fused", "all 18 comparisons True")
    lines = lines[len(before) : -1]
    for name, line in zip(norms, lines, strict=False):
        assert re.fullmatch(rf"\|\|{name}\|\| = \d\.\d{{6}}e[+-]\d\d", line)
    for pair, line in zip(pairs, lines[len(norms) :], strict=True):
        assert re.fullmatch(rf"{pair}: True \(\d\.\de[+-]\d\d\)", line)


def test_the_verdict_counts_what_differs_and_names_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.functional.batched
    monkeypatch.setattr(factorlayer.functional, "batched", lambda *a: right(*a) * (1 + 1e-4))
    result = run("16 8 8 check --json")
    found = json.loads(result.stdout)
    wrong = [c for c in found["comparisons"] if not c["equal"]]
    assert result.exit_code == 1 and not found["passed"]
    assert found["verdict"] == result.stderr.splitlines()[-1]
    assert found["verdict"].startswith(f"{len(wrong)} of 18 False: ")
    worst = max(wrong, key=lambda c: c["distance"] / c["tolerance"])
    size = "x".join(map(str, worst["shape"]))
    assert (
        f"False: {worst['left']} == {worst['right']}, {size}, differs by {worst['distance']:.1e} " in found["verdict"]
    )
    assert next(c for c in wrong if c["left"] == "v1_y")["distance"] == pytest.approx(1e-4, rel=0.1)
    assert found["verdict"].endswith(f"; and {len(wrong) - 5} more")


def test_the_verdict_of_a_report_without_v3() -> None:
    single = Single(spec_of_factors("kronecker", [(8, 8)], 1))
    for device, said in (("cuda", ""), ("cpu", ", which a CPU should have: the check failed")):
        report = Report(Case(single, 4, torch.float32, torch.device(device)), unavailable={"v3": "no kernels"})
        report.comparisons.append(Comparison("v1_y", "v2_y", True, 0.0, 1e-6))
        assert report.verdict == "all 1 comparisons True, without v3" + said
        report.comparisons.append(Comparison("v1_g", "v2_g", False, math.nan, 1e-6, math.nan, (3, 4)))
        named = "v1_g == v2_g, 3x4, differs by nan of its norm where 1.0e-06 is allowed"
        assert report.verdict == f"1 of 2 False, without v3{said}: {named}"
        assert report.to_json()["comparisons"][1]["distance"] is None


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
    right = factorlayer.autograd.layer_ops._raw_backward

    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        gradients = list(right(*arguments))
        gradients[bit] = gradients[bit] * (1 + 1e-4)
        return tuple(gradients)

    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_raw_backward", wrong)
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", not_at_once)
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
    right = factorlayer.autograd.layer_ops._raw_backward
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_raw_backward", lambda *a: tuple(g * 1.01 for g in right(*a)))
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "_gradients_at_once", not_at_once)
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
    monkeypatch.setattr(factorlayer.cli.case, "why_not_fused", lambda x, chain: "it was not built")
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


# check of blocks and models

MLPS = [
    "32 48 64 64 12",
    "20 48=6*8 64=8*8 35=7*5",
    "16 1 7 1",
    "0 4 8 4",
    "8 4 4",
    "12 5 16=4*4 16=4*4 3 --structure monarch",
]
ACTIVATIONS = """
import torch
from torch import nn


def mish(x):
    return x * torch.tanh(nn.functional.softplus(x))


class Leaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return torch.where(x > 0, x, self.slope * x)


class Rectified(nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
FACTORED = FactorLinear(12, 12).spec  # of the model below
MODELS = """
import torch
from torch import nn
from factorlayer import FactorLinear, FactorMLP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.a, self.b, self.frozen = nn.Linear(12, 30), nn.Linear(30, 12), nn.Linear(12, 12).requires_grad_(False)
        self.block = FactorMLP([12, (4, 4), (3, 4)], activation="gelu", gated=True)
        self.factored = FactorLinear(12, 12)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = x + self.b(torch.relu(self.a(self.norm(x))))
        return self.block(self.drop(h)) + self.frozen(self.factored(h))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(2).mT).mean(1)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, x):
        return self.l(x) if x.isfinite().all() else x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, x):
        return self.l(x), x


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)

    def forward(self, x):
        return x.abs()


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, x):
        return torch.maximum(self.l(x), other=x).mean() + (x.abs() > 0.5).float().mean()


def broken():
    raise KeyError("boo")


def number():
    return 3


def nothing():
    return nn.ReLU()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODELS)
    return tmp_path


def differing(output: str) -> set[str]:
    """The gradients and outputs that two versions do not agree on."""
    return set(re.findall(r"^\w+?_(\S+) == \S+: False", output, re.MULTILINE))


@pytest.mark.parametrize("dtype", "dfhb")
@pytest.mark.parametrize("activation", ["relu", "gelu", "sine"])
@pytest.mark.parametrize("widths", MLPS)
def test_check_of_an_mlp(widths: str, activation: str, dtype: str) -> None:
    result = run(f"--mlp --dtype {dtype} --activation {activation} {widths} check")
    assert result.exit_code == 0, result.stdout
    assert "\nFactorMLP:\n  layers.0: " in result.stdout
    assert "v2_grad_layers.0.bias == v3_grad_layers.0.bias: True" in result.stdout


RECURRENT = [
    "4 5 6x4 8x2",
    "4 5 2 6 --rank 2 --reset before",
    "4 5 2x4 6x3 --structure monarch --no-bias",
    "4 5 4x6 --structure dense --activation softplus",
    "4 5 3 2x4 --structure blocks",
    "4 1 6",
    "0 3 6",
    "3 0 2 3",
]


@pytest.mark.parametrize("dtype", "fdhb")
@pytest.mark.parametrize("arguments", RECURRENT)
def test_check_of_a_recurrent_layer(arguments: str, dtype: str) -> None:
    result = run(f"--rnn --dtype {dtype} {arguments} check")
    assert "_grad_x: True" in result.stdout and "_grad_weight_hh" in result.stdout
    assert "False" not in result.stdout.replace("bias=False", "")


def test_check_says_what_a_recurrent_layer_is() -> None:
    found = json.loads(run("--rnn 4 7 6x4 8x2 check --json").stdout)
    assert found["layers"] == [
        "each gate's input matrix: 6 x 8 -> 4 x 2, kronecker",
        "each gate's recurrent matrix: 4 x 2 -> 4 x 2, kronecker",
    ]
    weights = 3 * (24 + 16 + 16 + 4) + 2 * 3 * 8
    assert found["summary"][0].startswith(
        f"GRU, 7 steps, kronecker: x [7, 4, 48] -> y [7, 4, 8], {weights} parameters (dense: {3 * 8 * (48 + 8 + 2)}), "
    )
    assert (
        found["configuration"] | {"steps": 7, "factors": [[6, 4], [8, 2]], "reset": "after"} == found["configuration"]
    )


def test_check_notices_a_wrong_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.recurrences.gated.batched
    monkeypatch.setattr(factorlayer.recurrences.gated, "batched", lambda *given: 1.001 * right(*given))
    result = run("--rnn 4 7 2 6 check")
    assert result.exit_code == 1 and "y" in differing(result.stdout)


def test_check_says_what_an_mlp_is() -> None:
    result = run("--mlp --no-bias 4 6 12=3*4 20=4*5 3 check --json")
    found = json.loads(result.stdout)
    layers = ["layers.0: 6 -> 12, relu", "layers.1: 3 x 4 -> 4 x 5, kronecker, relu", "layers.2: 20 -> 3"]
    assert found["layers"] == ["FactorMLP:", *(f"  {layer}" for layer in layers)]
    assert found["configuration"]["widths"] == [6, [3, 4], [4, 5], 3]
    weights = ["layers.0.weight", "layers.1.weight_0", "layers.1.weight_1", "layers.2.weight"]
    compared = [c["left"] for c in found["comparisons"][: 3 + len(weights)]]
    assert compared == ["v1_y", "v1_g", "v1_grad_x", *(f"v1_grad_{name}" for name in weights)]


def test_tolerances_of_a_block_are_those_of_all_its_layers() -> None:
    block = Problem(Case(Block((6, (3, 4), (4, 5), 3), activation="relu"), 8, torch.float32, CPU))
    eps = torch.finfo(torch.float32).eps
    # Four contractions and two activations; 20 summands are the most. Gradients sum over 8 samples, positions, and q's.
    allowed = tolerances(block)
    assert allowed["y"] == pytest.approx(2 * eps * (math.sqrt(6) + math.sqrt(20)))
    assert allowed["grad_x"] == pytest.approx(2 * eps * (math.sqrt(12) + math.sqrt(20)))
    assert allowed["grad_layers.1.weight_0"] == allowed["g"]
    assert allowed["g"] == pytest.approx(2 * eps * (math.sqrt(12) + math.sqrt(8 * 5)))


@pytest.mark.parametrize(
    ("dtype", "activation", "wider"), [("f", "relu", False), ("b", "relu", True), ("b", "elu", False)]
)
def test_tolerances_are_wider_only_where_rounding_decides_derivatives(dtype: str, activation: str, wider: bool) -> None:
    found = json.loads(run(f"--mlp --dtype {dtype} --activation {activation} 64 8 48 48 4 check --json").stdout)
    subject = Block((8, 48, 48, 4), activation=activation)
    rule = tolerances(Problem(Case(subject, 64, factorlayer.cli.case.DTYPES[dtype], CPU)))
    allowed = {
        c["left"].removeprefix("v1_"): c["tolerance"] for c in found["comparisons"] if c["left"].startswith("v1")
    }
    assert allowed["y"] == rule["y"]
    assert (allowed["grad_x"] > 1.2 * rule["grad_x"]) == wider
    assert allowed["grad_x"] < 0.5 and (wider or allowed["grad_x"] == rule["grad_x"])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_check_notices_a_wrong_layer_of_an_mlp(layer: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = factorlayer.functional.batched_sums

    def wrong(chain: Chain, *arguments: Any) -> torch.Tensor:
        return right(chain, *arguments) * (1 + 1e-4 * (chain.in_features == (5, 9)[layer]))

    monkeypatch.setattr(factorlayer.functional, "batched_sums", wrong)
    result = run(f"--mlp --activation {activation} 16 5 9 4 check")
    assert result.exit_code == 1
    assert {"y", "grad_x", f"grad_layers.{layer}.weight"} <= differing(result.stdout)
    assert "v1_y == v3_y: True" in result.stdout


def test_check_notices_wrong_gradients_behind_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits rounding decides some of them, and the tolerance of gradients is wider."""
    right = factorlayer.functional.batched_sums

    def wrong(*arguments: Any) -> torch.Tensor:
        y = right(*arguments)
        return y + 0.4 * (y - y.detach())

    assert run("--mlp --dtype b 256 32 64 64 8 check").exit_code == 0
    monkeypatch.setattr(factorlayer.functional, "batched_sums", wrong)
    result = run("--mlp --dtype b 256 32 64 64 8 check")
    assert result.exit_code == 1
    assert "v1_y == v2_y: True" in result.stdout and "grad_layers.0.weight" in differing(result.stdout)


@pytest.mark.parametrize("dtype", "dfhb")
@pytest.mark.parametrize(
    ("activation", "understood"),
    [
        ("mish", "x * tanh(select(20 < x, x, softplus(x)))"),
        ("Leaking", "select(0 < x, x, p0 * x)"),
        ("Rectified", "relu"),
    ],
)
def test_check_of_an_activation_of_the_users(activation: str, understood: str, dtype: str, models: Path) -> None:
    (models / "acts.py").write_text(ACTIVATIONS)
    result = run(f"--activation acts.py:{activation} 64 8x4 6 check --dtype {dtype}")
    assert result.exit_code == 0, result.stdout
    assert f"\n8 x 6 -> 4 x 6, kronecker, {understood}\n||v1_y||" in result.stdout
    assert ("grad_activation.slope" in result.stdout) == (activation == "Leaking")
    result = run(f"--mlp --activation acts.py:{activation} 64 8 12=3*4 20=4*5 3 check --dtype {dtype}")
    assert result.exit_code == 0, result.stdout
    assert f"layers.1: 3 x 4 -> 4 x 5, kronecker, {understood}" in result.stdout


@pytest.mark.parametrize("dtype", "dfhb")
@pytest.mark.parametrize(("model", "options"), [("Net", ""), ("Convolution", "--input 3,5,6"), ("Loss", "")])
def test_check_of_a_model(model: str, options: str, dtype: str, models: Path) -> None:
    result = run(f"--model nets.py:{model} {options} --dtype {dtype} 24 check")
    assert result.exit_code == 0, result.stdout
    assert "model_y == v3_y: True" in result.stdout


def test_check_says_what_a_model_is(models: Path) -> None:
    result = run("--model nets.py:Net 4 check --json")
    found = json.loads(result.stdout)
    lines = [line.strip() for line in found["layers"]]
    assert lines[0] == "fuse(Net):" and "a: 12 -> 30, relu" in lines and "drop: as it was" in lines
    assert "multiplied by gates.0: 12 -> 16, gelu" in lines
    assert (
        found["configuration"] | {"model": "nets.py:Net", "input": [12], "checkpoint": None} == found["configuration"]
    )
    names = {c["left"].removeprefix("model_grad_") for c in found["comparisons"]}
    assert {"norm.weight", "block.gates.0.bias", "factored.weight_1"} <= names and "frozen.weight" not in names


def test_check_of_a_model_that_cannot_be_traced(models: Path) -> None:
    result = run("--model nets.py:Branching 4 check --json")
    assert result.exit_code == 0, result.output
    (_, line, *_) = json.loads(result.stdout)["layers"]
    assert line.startswith("  Branching: its own forward, as it was, because torch.fx cannot trace it: ")


def test_check_notices_a_wrong_layer_of_a_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that fuse leaves as it was, too."""
    right = factorlayer.functional.naive
    monkeypatch.setattr(
        factorlayer.functional, "naive", lambda spec, *a: right(spec, *a) * (1 + 0.01 * (spec == FACTORED))
    )
    result = run("--model nets.py:Net 16 check")
    assert result.exit_code == 1
    assert "model_y == v1_y: False" in result.stdout and "model_y == v2_y: True" in result.stdout


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_checkpoint_is_loaded(suffix: str, models: Path) -> None:
    factory = factorlayer.cli.subject.make_model("nets.py:Net")
    state = {name: 2 * tensor for name, tensor in factory.state_dict().items()}
    write = torch.save if suffix == "pt" else save_file
    write(state, models / f"w.{suffix}")
    without = json.loads(run("--model nets.py:Net 4 check --json").stdout)
    result = run(f"--model nets.py:Net --checkpoint w.{suffix} 4 check --json")
    found = json.loads(result.stdout)
    assert found["passed"] and found["norms"]["v1_y"] > 1.5 * without["norms"]["v1_y"]
    assert found["configuration"]["checkpoint"] == f"w.{suffix}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mlp 4 8 check", "'--mlp': FactorMLP: widths should be those of the input and the output at least"),
        ("--mlp 4 8 7=2*3 check", "'WIDTH': the factors of a WIDTH should multiply up to it; those of '7=2*3' make 6"),
        ("--mlp 4 8 2*3 check", "a WIDTH should be a positive size, or with its factors 1024=32*32; it is '2*3'"),
        ("--mlp 4 8 0 check", "it is '0'"),
        ("--mlp 4 8=2*4 6=2*3 check --rank 99", "'--mlp': FactorLinear: rank should be at most"),
        ("--mlp 4 8 8 check --activation swoosh", "activation should be None or one of identity, relu"),
        ("--mlp 4 99999999999 999999999 check", "a layer and samples of these sizes cannot be made"),
        ("--rnn 4 8 check", "'--rnn': BATCH should be followed by STEPS and sizes, such as 16 1024 32 32; 8 came"),
        ("--rnn 4 8x8 8 check", "such as 16 1024 32 32; 8x8 8 came behind it"),
        ("--rnn 4 8 0 check", "a FACTOR should be a positive size or two"),
        (
            "--rnn 4 8 2 2 check --structure dense",
            "'--rnn': sizes should be one, or 256x512 for in x out, of structure",
        ),
        ("--rnn 4 8 2x4 2 check --structure blocks", "sizes should be how many blocks there are, and the size of one"),
        ("--rnn 4 8 2 check --structure dense --rank 2", "a rank of structure dense has no meaning; it is 2"),
        ("--rnn 4 8 2 check --rank 2", "rank should be at most 1"),
        (
            "--rnn 4 8 8 check --mlp",
            "'--mlp': it was given where it has no meaning: it is another module than --rnn is",
        ),
        (
            "--rnn 4 8 8 check --source",
            "'--source': it was given where it has no meaning: it is for layers, blocks and",
        ),
        (
            "--rnn 4 8 8 bench --variants",
            "'--variants': it was given where it has no meaning: it is for layers, blocks",
        ),
        ("--rnn 4 8 8 tune", "'tune': it was given where it has no meaning: it is for layers, blocks and models"),
        ("4 8 8 check --reset before", "'--reset': it was given where it has no meaning: it is for a recurrent layer"),
        (
            "4 8 check --structure dense",
            "'--structure': dense is for --rnn; without it, kronecker of one FACTOR is dense",
        ),
        (
            "4 8 8 check --input 8",
            "'--input': it was given where it has no meaning: they are for a model; give --model",
        ),
        ("4 8 8 check --checkpoint nets.py", "'--checkpoint': it was given where it has no meaning"),
        ("4 8 8 check --arch 80", "'--arch': it says which GPU --source is for; give --source as well"),
        (
            "4 8 8 check --source --arch 70",
            "the compute capability should be one of 80, 86, 89, 90, 100, 120; it is 70",
        ),
        (
            "4 8 8 bench --implementation model",
            "model cannot run: it is a model of your own, for --model; choose another",
        ),
        ("--model nets.py:Net 4 8 check", "'FACTOR': it was given where it has no meaning: they are the model's own"),
        ("--model nets.py:Net 4 check --rank 2", "'--rank': it was given where it has no meaning"),
        ("--model nets.py:Net 4 check --mlp", "'--mlp': it was given where it has no meaning"),
        ("--model nets.py 4 check", "should be given as path/to/file.py:function; it is 'nets.py'"),
        (
            "--model nots.py:Net 4 check",
            "a Python file that exists should be given before the function; there is no nots",
        ),
        ("--model nets.py:Not 4 check", "'--model': nets.py should have a function Not; it has none"),
        ("--model nets.py:__name__ 4 check", "should have a function __name__; it has a str of that name"),
        ("--model nets.py:Brancing 4 check", "have a function Brancing; it has none; did you mean 'Branching'?"),
        ("--model nets.py:Net 4 bench --implementation dense", "dense cannot run: it stands beside a layer or --mlp"),
        ("--model nets.py:broken 4 check", "nets.py:broken() raised KeyError: 'boo' (line 68 of"),
        ("--model nets.py:number 4 check", "nets.py:number() should return an nn.Module; it returned int"),
        ("4 8 8 check --activation nets.py:Not", "'--activation': nets.py should have a function Not; it has none"),
        ("4 8 8 check --activation nets.py:Net", "'--activation': activation Net cannot be traced"),
        ("--model nets.py:nothing 4 check", "ReLU has no nn.Linear and no FactorLinear: there is nothing to compare"),
        ("--model nets.py:Unused 4 check", "the model called no nn.Linear and no FactorLinear"),
        ("--model nets.py:Two 4 check", "the model should return a tensor; it returned tuple"),
        ("--model nets.py:Convolution 4 check", "the model cannot be called with x [4, 4]: Expected"),
        (
            "--model nets.py:Net 4 check --input 3x4",
            "should be sizes with commas between them, such as 3,32; it is '3x4'",
        ),
        (
            "--model nets.py:Net 4 check --checkpoint nets.py",
            "nets.py cannot be read as a state_dict (UnpicklingError)",
        ),
        ("--model nets.py:Net 4 check --checkpoint other.pt", "other.pt does not fit the model"),
        ("--model nets.py:Net 4 check --checkpoint no.pt", "'no.pt' does not exist"),
    ],
)
def test_wrong_usage_of_blocks_and_models(arguments: str, message: str, models: Path) -> None:
    torch.save({"weight": torch.ones(3)}, models / "other.pt")
    result = run(arguments)
    assert message in words(result.stderr)
    assert "Traceback" not in result.stderr
    assert (result.stdout, result.exit_code) == ("", 2)


@pytest.mark.parametrize("arguments", ["--mlp 16 6 8=2*4 9=3*3 4", "--model nets.py:Net 16"])
def test_bench_and_profile_of_blocks_and_models(arguments: str, models: Path) -> None:
    result = run(f"{arguments} bench --min-run-time 0.001 --device cpu")
    columns = r"model +\| +v1" if "--model" in arguments else r"\| +v1"
    assert result.exit_code == 0, result.output
    assert re.search(columns + r" +\| +v2 +\| +v3", result.stdout)
    version = "model" if "--model" in arguments else "v3"
    result = run(f"{arguments} profile --device cpu --steps 1 --json --implementation {version}")
    assert result.exit_code == 0, result.output
    assert any(event["name"].endswith(" backward") for event in json.loads(result.stdout)["events"])


def test_figures_of_a_block_are_those_of_all_its_layers() -> None:
    found = json.loads(run("--mlp 10 6 12=3*4 20=4*5 3 bench --json --min-run-time 0.001").stdout)
    factored = 3 * 4 * 5 + 4 * 3 * 5  # the second mode first, or the first: as many
    forward = 10 * (6 * 12 + factored + 20 * 3)
    assert found["timings"][0]["multiply_adds"] == forward
    assert found["state_size"] == 20
    moved = 10 * (6 + 3) + 6 * 12 + (3 * 4 + 4 * 5) + 20 * 3
    assert found["arithmetic_intensity"] == pytest.approx(forward / moved)


# source


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_source_of_a_layer(empty_cache: Path) -> None:
    first = run("16 8 8 check --json --source --arch 80")
    found = json.loads(first.stdout)
    (source,) = found["source"]
    (kernel,) = source["kernels"]
    assert (found["architecture"], kernel["architecture"]) == ("sm_80", "sm_80")
    assert source["chain"] == "tied 1 8 8 8 1; tied 0 1 8 8 8; bias" and "1 kernel, " in source["plan"]
    assert f"{kernel['name']}(const __grid_constant__ Params" in kernel["code"]
    assert Path(kernel["file"]).parent == empty_cache and Path(kernel["file"]).is_file()
    assert "compute capability 8.0, 108 multiprocessors (here v3 runs on cpu)" in first.stderr
    assert kernel["code"] in first.stderr
    again = json.loads(run("16 8 8 check --json --source --arch 80").stdout)
    assert again["source"] == found["source"]


def test_a_plan_is_that_of_the_gpus_own_memory(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.cli.source, "gpu_of", lambda *_: Gpu(90, 132, 232448, 4916736))
    (source,) = json.loads(run("16 8 8 check --json --source").stdout)["source"]
    assert source["plan"].splitlines()[0].endswith(" by rates measured on such a GPU")


def test_source_of_dense_layers_is_one_kernel_where_there_is_one(empty_cache: Path) -> None:
    arguments = "--mlp --dtype b --activation gelu 64 48 64 32 check --json --source"
    (source,) = json.loads(run(arguments).stdout)["source"]
    assert source["layers"] == ["layers.0", "layers.1"] and "48→64→32" in source["plan"]
    (source,) = json.loads(run(f"{arguments} --arch 80").stdout)["source"]
    assert source["layers"] == ["layers.0", "layers.1"] and "48→64 by rows" in source["plan"]
    wide = arguments.replace(" 48 ", " 2000 ")
    each = json.loads(run(f"{wide} --arch 80").stdout)["source"]
    assert [one["layers"] for one in each] == [["layers.0"], ["layers.1"]]


@pytest.mark.long
def test_source_of_a_model(models: Path, empty_cache: Path) -> None:
    found = json.loads(run("--model nets.py:Net 16 check --json --source --arch 80").stdout)["source"]
    layers = [layer for one in found for layer in one["layers"]]
    assert sorted(layers) == ["a", "b", "factored", "frozen", "gates.0", "layers.0", "layers.1"]


def test_source_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.autograd.layer_ops, "missing_extension", ImportError("no such file"))
    result = run("16 8 8 check --source")
    assert "'--source': the compiled extension factorlayer._C cannot be imported (no such file)" in words(result.stderr)
    assert result.exit_code == 2


def test_source_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.cli.source, "why_not_compiled", lambda: "no NVRTC here")
    result = run("16 8 8 check --source")
    assert "not compiled: no NVRTC here" in result.stdout
    assert "for sm_90a, compiled: nowhere" in result.stdout


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
    assert (
        "dense is left out: weights of nn.Linear 16384 -> 16384 would take 1.0 GiB, more than 256 MiB" in result.stdout
    )
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


@pytest.mark.parametrize(
    ("arguments", "layers", "weights"),
    [
        ("16 4x6 8x5 --activation gelu", "32 -> 30", 32 * 30),
        ("--structure monarch 16 4 8 --no-bias --dtype b", "32 -> 32", 32 * 32),
        ("--mlp 16 6 12=3*4 20=4*5 3", "6 -> 12 -> 20 -> 3", 6 * 12 + 12 * 20 + 20 * 3),
    ],
)
def test_bench_has_nn_linear_beside_the_versions(arguments: str, layers: str, weights: int) -> None:
    result = run(f"{arguments} bench --device cpu --min-run-time 0.001 --json")
    timings = json.loads(result.stdout)["timings"]
    assert [t["implementation"] for t in timings] == ["v1", "v2", "v3", "dense"] * 2
    assert [t["multiply_adds"] for t in timings if t["implementation"] == "dense"] == [16 * weights, 3 * 16 * weights]
    assert f"dense is nn.Linear {layers}, " in result.stderr
    assert re.search(r"v1 +\| +v2 +\| +v3 +\| +dense", result.stderr)
    only = run(f"{arguments} bench --device cpu --min-run-time 0.001 --json --implementation dense")
    assert [t["implementation"] for t in json.loads(only.stdout)["timings"]] == ["dense"] * 2


def test_bench_has_nn_gru_beside_a_recurrent_layer() -> None:
    result = run("--rnn 4 5 6x4 8x2 bench --device cpu --min-run-time 0.001 --json")
    timings = json.loads(result.stdout)["timings"]
    named = [t["implementation"] for t in timings]
    assert [name for name in named if name != "v3"] == ["v1", "v2", "dense"] * 2
    rows = 4 * 5
    of_dense, of_ours = rows * 3 * 8 * (48 + 8), rows * 3 * ((6 * 8 * 2 + 6 * 4 * 2) + 2 * 4 * 4)
    assert [t["multiply_adds"] for t in timings if t["implementation"] == "dense"] == [of_dense, 3 * of_dense]
    assert "dense is nn.GRU 48 -> 8, 1392 parameters" in result.stderr
    assert timings[0]["multiply_adds"] < of_dense and of_ours > 0


def test_dense_computes_what_pytorchs_own_modules_do() -> None:
    block = Block((6, (3, 4), 3), activation="gelu")
    dense = dense_of(Case(block, 5, torch.float64, CPU))
    first, second = dense.layers
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(dense(x), second(torch.nn.functional.gelu(first(x))))
    single = dense_of(Case(Single(spec_of_factors("kronecker", [(2, 3), (3, 5)], 1), "relu"), 5, torch.float64, CPU))
    torch.testing.assert_close(single(x), torch.relu(single.layers[0](x)))


def test_profile_of_dense(tmp_path: Path) -> None:
    result = run(f"4 8 8 profile --device cpu --json --steps 2 --implementation dense --trace {tmp_path}/t.json")
    calls = {event["name"]: event["calls"] for event in json.loads(result.stdout)["events"]}
    assert calls["dense forward"] == calls["dense backward"] == 2


def test_variants_of_a_layer() -> None:
    result = run("--device cpu --dtype b 1024 64 64 bench --variants --json")
    (table,) = json.loads(result.stdout)["variants"]
    ways = [(v["states"], v["weights"], v["kernels"]) for v in table["variants"]]
    assert {("registers", "resident", 1), ("shared memory", "resident", 1), ("memory", "streamed", 2)} <= set(ways)
    assert [v["chosen"] for v in table["variants"]].count(True) == 1
    assert all(v["predicted_us"] > 0 and v["measured_us"] is None for v in table["variants"])
    assert "compute capability 9.0, 132 multiprocessors; predicted only, the case is on cpu" in result.stderr
    assert "(chosen)  registers" in result.stderr


def test_variants_of_a_block_are_compared_with_layer_by_layer() -> None:
    arguments = "--device cpu --mlp --dtype b 4096 32 {0} {0} 16 bench --variants --json"
    (table,) = json.loads(run(arguments.format(64)).stdout)["variants"]
    assert table["layers"] == ["layers.0", "layers.1", "layers.2"]
    *whole, by_layer = table["variants"]
    assert {v["samples"] for v in whole} >= {"64", "128"} and all(v["kernels"] == 1 for v in whole)
    assert by_layer["weights"] == "layer by layer" and by_layer["kernels"] >= 3
    together, apart = (json.loads(run(f"{arguments.format(n)} --arch 80").stdout)["variants"] for n in (64, 512))
    assert [one["layers"] for one in together] == [["layers.0", "layers.1", "layers.2"]]
    assert [one["layers"] for one in apart] == [["layers.0"], ["layers.1"], ["layers.2"]]  # too large for one pass


def test_variants_of_a_model(models: Path) -> None:
    found = json.loads(run("--device cpu --model nets.py:Net 16 bench --variants --json").stdout)["variants"]
    assert {layer for one in found for layer in one["layers"]} >= {"a", "b", "factored"}


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
        (
            "16 32 32 chek",
            "say what to do: check, profile or bench, there is no command 'chek'; did you mean 'check'? For example",
        ),
        ("cahce list", "there is no command 'cahce'; did you mean 'cache'?"),
        ("16 chek 32", "there is no command 'chek'; did you mean 'check'?"),
        ("16 32 frobnicate", "there is no command 'frobnicate'. For example"),
        ("16 frobnicate 32 check", "a FACTOR should be a positive size or two, such as 32 or 20x36 (in x out)"),
        ("cache lst", "'lst' is not one of 'list', 'verify', 'clear', 'limit'; did you mean 'list'?"),
        ("16 8 check --dtype float64", "'float64' is not one of 'f', 'd', 'h', 'b'; did you mean 'd'?"),
        ("16 8 check --dtype bf16", "did you mean 'b'?"),
        (
            "16 8 check --structure Monrach",
            "is not one of 'kronecker', 'monarch', 'dense', 'blocks'; did you mean 'monarch'?",
        ),
        ("16 8 bench --implementation fusd", "'dense'; did you mean 'fused'?"),
        ("16 8 8 check --activation gleu", "it is 'gleu'; did you mean 'gelu'?"),
        ("16 8 8 check --dtyp d", "No such option: --dtyp"),
        ("bench", "Missing argument 'BATCH"),
        ("1.5 8 check", "BATCH should be a number of samples, 0 or more; it is '1.5'"),
        ("99999999999999999999 8 check", "BATCH should be a number of samples, 0 or more"),
        ("--install-completion", "a shell completes the installed program only: `factorlayer --install-completion`"),
        (
            "16 128 256 bench --implementation dense",
            "'--implementation': dense cannot run: weights of nn.Linear",
        ),
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
        ("16 4 4 bench --arch 80", "'--arch': it says which GPU --variants is for; give --variants as well"),
        ("16 4 4 bench --variants --arch 70", "'--arch': the compute capability should be one of 80, 86"),
        ("16 4 4 bench --variants --plot t.png", "'--plot': it was given where it has no meaning"),
        ("16 4 4 bench --variants --implementation v1", "'--implementation': it was given where it has no meaning"),
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
    monkeypatch.setattr(factorlayer.cli.case, "why_not_fused", lambda x, chain: "it was not built")
    result = run(f"4 4 4 {command} --implementation fused")
    assert "v3 cannot run: it was not built; choose another" in words(result.stderr)
    assert result.exit_code == 2


def test_bench_leaves_out_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorlayer.cli.case, "why_not_fused", lambda x, chain: "it was not built")
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


@pytest.mark.long
def test_program_keeps_stdout_for_json(tmp_path: Path) -> None:
    done = run_program(f"4 8 8 profile --json --trace {tmp_path}/t.json")
    assert json.loads(done.stdout)["command"] == "profile"
    assert done.returncode == 0


@pytest.mark.long
def test_program_exits_with_1_if_implementations_differ() -> None:
    code = """
import factorlayer.functional
right = factorlayer.functional.batched
factorlayer.functional.batched = lambda *arguments: right(*arguments) * 1.01
from factorlayer.cli.app import main
main()
"""
    done = run_program("16 8 8 check", code=code)
    assert "v1_y == v2_y: False" in done.stdout
    assert (done.stderr, done.returncode) == ("", 1)


def test_program_exits_with_2_on_wrong_usage() -> None:
    done = run_program("16 32 32")
    assert "say what to do: check, profile or bench" in words(done.stderr)
    assert (done.stdout, done.returncode) == ("", 2)
