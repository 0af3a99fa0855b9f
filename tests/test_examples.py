"""The examples in small: they run, learn, and draw."""

from __future__ import annotations

import datetime
import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from factorlayer import FactorGRU, FactorLinear
from factorlayer.models.groups import multipliers

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def load(name: str) -> ModuleType:
    (path,) = [path for path in EXAMPLES if path.stem == name]
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, arguments: str) -> str:
    app = typer.Typer()
    app.command()(load(name).main)
    result = CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_image(implementation: str) -> None:
    arguments = "--size 32 --width 48 --hidden 2 --steps 120 --batch 1024 --rate 0.008"
    found = run("image", f"{arguments} --implementation {implementation}")
    plain, fused = (float(value) for value in re.findall(r"PSNR ([\d.]+) dB", found))
    assert plain > 18  # the mean colour has 10.6
    assert abs(plain - fused) < 0.5


def test_the_equation_of_poisson_is_that_of_its_solution() -> None:
    poisson = load("poisson")
    places = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    hessians = torch.stack([torch.autograd.functional.hessian(poisson.solution, place) for place in places.detach()])
    torch.testing.assert_close(-hessians.diagonal(dim1=1, dim2=2).sum(1), poisson.source(places).detach())


@pytest.mark.long
def test_poisson() -> None:
    found = run("poisson", "--width 24 --hidden 2 --steps 250 --batch 256 --rate 0.01")
    assert float(re.search(r"relative error of u (\S+),", found)[1]) < 0.05


@pytest.mark.long
def test_digits() -> None:
    pytest.importorskip("sklearn")
    found = run("digits", "--side 12 --hidden 1 --rank 4 --epochs 8 --batch 64 --rate 0.01")
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)%", found)]
    dense, factored = (int(value) for value in re.findall(r"(\d+) parameters", found))
    assert len(accuracies) == 2 and min(accuracies) > 93
    assert factored < dense / 4


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("image", "--size 8 --width 4 --hidden 1 --steps 2"),
        ("poisson", "--width 4 --hidden 1 --steps 1"),
        ("digits", "--side 2 --epochs 1"),
    ],
)
def test_pictures(name: str, arguments: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    if name == "digits":
        pytest.importorskip("sklearn")
    run(name, f"{arguments} --picture {tmp_path / name}.png")
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_translate_letter_by_letter_is_what_the_decoder_expects() -> None:
    """Of strings of different length, each by itself."""
    translate = load("translate")
    torch.manual_seed(0)
    sizes = dict(structure="monarch", blocks=4, input_structure="dense")
    model = translate.Translator(FactorGRU(3, 16, **sizes), FactorGRU(3, 16, **sizes), 3, 16).double()
    given, right = translate.pairs(range(40, 4000, 400), random.Random(0))
    made = model.translate(given)
    assert made.shape == right.shape == (10, 10) and len({len(each) for each in given}) > 1
    assert torch.equal(model(given, made).argmax(dim=2).t(), made)
    assert torch.equal(torch.cat([model.translate([each]) for each in given]), made)


def test_translate_writes_dates_as_people_do() -> None:
    translate = load("translate")
    found = {translate.written(datetime.date(1987, 3, 22), form) for form in translate.FORMS}
    assert {"sunday the 22nd of march, 1987", "22 mar 1987", "mar 22 '87", "22.03.1987", "03/22/1987"} <= found
    days = [datetime.date(2004, 2, day) for day in (1, 2, 3, 11, 12, 13, 21)]
    assert [translate.written(day, "{th}") for day in days] == ["1st", "2nd", "3rd", "11th", "12th", "13th", "21st"]


def test_translate(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run("translate", f"--hidden 16 --steps 3 --batch 8 --picture {tmp_path}/t.png")
    dense, factored = (int(value) for value in re.findall(r"(\d+) parameters", found))
    assert factored < dense and (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_shrink(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    arguments = "--width 128 --epochs 8 --further 3 --budget 0.5 --budget 0.2 --rate 0.003"
    found = run("shrink", f"{arguments} --picture {tmp_path}/s.png")
    rows = re.findall(
        r"^([\d.]+)% of .* projected ([\d.]+)%, fitted ([\d.]+)%; 3 epochs later ([\d.]+)% and ([\d.]+)%", found, re.M
    )
    shares, projected, fitted, *later = zip(*[map(float, row) for row in rows], strict=True)
    assert 40 < shares[0] <= 50 and 15 < shares[1] <= 20
    assert min(later[0] + later[1]) > 90 and projected[0] > projected[1]
    assert fitted[1] > projected[1] + 5
    assert "the whole model: " in found and (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_distil() -> None:
    pytest.importorskip("sklearn")
    found = run("distil", "--width 32 --layers 1 --epochs 2 --rate 0.01")
    rows = re.findall(r"^\| (\w+), rank (\d+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \|", found, re.M)
    assert [row[0] for row in rows] == ["kronecker"] * 4 + ["monarch"] * 4
    assert sum(float(fitted) < 0.9 * float(projected) for *_, projected, fitted in rows) >= 6


@pytest.mark.long
def test_language(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = "--width 32 --heads 2 --layers 1 --context 32 --steps 60 --seconds 0.1 --rate 0.01"
    found = run("language", f"{sizes} --picture {tmp_path}/l.png")
    rows = re.findall(r"^\| (\S+) \| (\d+) \| \S+ \| (\d+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|$", found, re.M)
    names, hidden, counts, bits, _ = zip(*rows, strict=True)
    assert names == ("dense", "monarch", "kronecker", "low-rank") and hidden == ("128", "256", "256", "256")
    assert all(0.95 * int(counts[0]) <= int(each) <= int(counts[0]) for each in counts)
    assert max(map(float, bits)) < 6.5  # of 8, at first
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")


def test_language_draws_low_rank_layers_as_others_and_gives_them_the_rates_of_monarch_layers() -> None:
    language = load("language")
    torch.manual_seed(0)
    layer = language.LowRank(600, 400, 200)
    y = layer[1].weight @ (layer[0].weight @ torch.randn(600, 1000))
    assert abs(float(y.detach().var()) - 1 / 3) < 0.02
    one_block = FactorLinear(600, 400, structure="monarch", blocks=1, rank=200)
    right = multipliers(one_block.spec)  # of weight_0, which is the second, and weight_1
    assert [*layer.rates().values()] == pytest.approx(right[::-1])
    sizes = language.Sizes(32, 2, 1, 8, 128, 2)
    model = language.build("low-rank", sizes, 4)
    groups = language.groups(model, 0.1)
    assert sorted(id(each) for group in groups for each in group["params"]) == sorted(map(id, model.parameters()))
    (rate,) = (
        group["lr"] for group in groups if any(each is model.blocks[0].mlp[2][1].weight for each in group["params"])
    )
    assert rate == pytest.approx(0.1 * 256 / 4 / 2)


def test_language_reads_a_curve_between_its_points() -> None:
    curve = load("language").Curve([0, 10, 20], [0.0, 1.0, 3.0], [8.0, 4.0, 2.0])
    assert [curve.at(curve.steps, place) for place in (0, 5, 10, 20)] == [8, 6, 4, 2]
    assert curve.at(curve.seconds, 2) == 3


def test_all_examples_are_run() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "digits",
        "distil",
        "image",
        "language",
        "poisson",
        "shrink",
        "translate",
    ]
