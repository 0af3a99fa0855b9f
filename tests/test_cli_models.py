"""The commands convert and report: whole models on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

from factorlayer import FactorLinear, load_converted
from factorlayer.cli.app import app

NETS = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

def empty():
    return nn.Sequential(nn.GELU())
"""
MONARCH = "*=monarch,blocks=4,rank=2"


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], prog_name="test.py")


def words(text: str) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


MODEL = ("--model", "nets.py:make_model")


def test_convert_writes_what_load_converted_reads(nets: Path) -> None:
    done = run("convert", *MODEL, "--map", MONARCH, "--output", "y.safetensors")
    assert done.exit_code == 0, done.output
    assert "2 layers; the model's 1072 parameters became 816" in done.stdout
    assert done.stdout.splitlines()[-1] == "The converted model is in y.safetensors."
    plain = make()
    load_converted(plain, "y.safetensors")
    right = FactorLinear.from_linear(make()[0], structure="monarch", blocks=4, rank=2)
    assert torch.equal(plain[0].weight_0, right.weight_0)


def test_a_checkpoint_is_converted_and_one_that_was_is_reported(nets: Path) -> None:
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    save_file(other.state_dict(), "x.safetensors")
    torch.save(other.state_dict(), "x.pt")
    for name in ("x.safetensors", "x.pt"):
        done = run("convert", *MODEL, "--checkpoint", name, "--map", MONARCH, "--output", "y.safetensors")
        assert done.exit_code == 0, done.output
        right = FactorLinear.from_linear(other[0], structure="monarch", blocks=4, rank=2)
        assert torch.equal(load_file("y.safetensors")["0.weight_0"], right.weight_0)
    found = run("report", *MODEL, "--checkpoint", "y.safetensors", "--samples", "100", "--json")
    read = json.loads(found.stdout)
    assert [line["structure"] for line in read["lines"]] == ["monarch blocks 4x4, rank 2"] * 2
    assert read["lines"][0]["samples"] == 100 and read["parameters_after"] == 816
    assert "the whole model: 1072 -> 816 parameters" in found.stderr


def test_without_output_it_is_a_dry_run(nets: Path) -> None:
    done = run("convert", *MODEL, "--map", "0=kronecker,4x4,4x8,rank=2", "--map", "2=none", "--json")
    assert done.exit_code == 0 and "Nothing was written: give --output." in done.stderr
    read = json.loads(done.stdout)
    assert read["dry_run"] and read["command"] == "convert" and read["model"] == "nets.py:make_model"
    assert read["mapping"] == {"0": {"structure": "kronecker", "factors": [[4, 4], [4, 8]], "rank": 2}}
    assert sorted(path.name for path in nets.iterdir() if path.is_file()) == ["nets.py"]
    (nets / "map.json").write_text(json.dumps(read["mapping"]))
    again = json.loads(run("convert", *MODEL, "--map", "map.json", "--json").stdout)
    assert again["changes"] == read["changes"]


def test_fresh_weights_have_no_error(nets: Path) -> None:
    read = json.loads(run("convert", *MODEL, "--map", "0=monarch,blocks=4x2", "--fresh", "--json").stdout)
    assert read["changes"][0]["error"] is None and read["mapping"]["0"]["blocks"] == [4, 2]


def test_a_budget_proposes_the_map(nets: Path) -> None:
    read = json.loads(run("convert", *MODEL, "--budget", "0.5", "--json").stdout)
    assert read["mapping"] and read["parameters_after"] <= 0.5 * read["parameters_before"]
    found = json.loads(run("report", *MODEL, "--budget", "0.5", "--json").stdout)
    assert found["parameters_after"] == read["parameters_after"]


def test_report_predicts_measures_and_draws(nets: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = ("--map", MONARCH, "--samples", "64", "--training", "--measure", "--arch", "90", "--plot", "r.png")
    found = run("report", *MODEL, *asked)
    assert found.exit_code == 0, found.output
    head, *lines = found.stdout.splitlines()
    assert head.split()[-5:] == ["predicted", "us", "measured", "us", "error"] and lines[0].startswith("0  ")
    assert lines[-1] == "The picture is in r.png." and (nets / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "training; predicted for a GPU of compute capability 9.0; measured on cpu" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("convert", "Missing option '--model'"),
        ("convert --model nets.py:make_model", "'--map': say which layers become what by --map, or give --budget"),
        ("convert --model nets.py:make_model --map *=monarch --budget 0.5", "and not both"),
        ("convert --model nets.py:nothing --map *=monarch", "'--model': nets.py should have a function nothing"),
        ("convert --model nets.py:make_model --map *=monarch,blocks=3", "K=3 does not divide in_features=16; divisors"),
        ("convert --model nets.py:make_model --map *=butterfly", "structure should be one of 'kronecker', 'monarch'"),
        ("convert --model nets.py:make_model --map *=monarch,ranks=3", "'ranks=3' is in '*=monarch,ranks=3'"),
        (
            "convert --model nets.py:make_model --map mlp=monarch",
            "'mlp' selects no layer; the model's linear layers are 0, 2",
        ),
        ("convert --model nets.py:make_model --map map.json", "or a JSON file; it is 'map.json'"),
        ("convert --model nets.py:make_model --map nets.py", "nets.py is no JSON"),
        ("convert --model nets.py:make_model --map list.json", "list.json should hold an object, of patterns with"),
        (
            "convert --model nets.py:make_model --budget 0.01",
            "'--budget': suggest: a budget of 11 parameters cannot be kept",
        ),
        (
            "convert --model nets.py:make_model --map *=monarch --output y.pt",
            "name should end in .safetensors; it is y.pt",
        ),
        ("convert --model nets.py:make_model --map *=monarch --output no/y.safetensors", "there is no no"),
        (
            "convert --model nets.py:make_model --checkpoint bad.safetensors --map *=monarch",
            "cannot be read as safetensors",
        ),
        ("convert --model nets.py:make_model --checkpoint no.safetensors --map *=monarch", "cannot be read"),
        ("convert --model nets.py:make_model --checkpoint 3.safetensors --map *=monarch", "does not fit the model"),
        (
            "convert --model nets.py:make_model --map *=monarch --device tpu",
            "'--device': the model cannot be moved to tpu",
        ),
        ("report --model nets.py:empty", "'--model': report: Sequential has no linear layers"),
        ("report --model nets.py:make_model --arch 70", "arch should be one of 80"),
        ("report --model nets.py:make_model --map *=monarch --budget 0.5", "it proposes what --map says"),
        ("report --model nets.py:make_model --samples 0", "'--samples'"),
        ("report --model nets.py:make_model --plot r.tar", "the file's name should end in one of"),
    ],
)
def test_what_is_refused(arguments: str, said: str, nets: Path) -> None:
    (nets / "bad.safetensors").write_text("no tensors")
    (nets / "list.json").write_text("[]")
    save_file({"0.weight": torch.zeros(3)}, nets / "3.safetensors")
    done = run(*arguments.split())
    assert done.exit_code == 2 and said in words(done.stderr), done.stderr


def test_without_safetensors(nets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorlayer.cli.whole.importlib.util.find_spec", lambda name: None)
    for option in ("--output", "--checkpoint"):
        done = run("convert", *MODEL, "--map", MONARCH, option, "y.safetensors")
        assert done.exit_code == 2
        assert f"'{option}': y.safetensors needs safetensors, which is not installed: pip install" in words(done.stderr)


def test_what_cannot_be_written(nets: Path) -> None:
    (nets / "folder").mkdir()
    (nets / "folder" / "y.safetensors").mkdir()
    done = run("convert", *MODEL, "--map", MONARCH, "--output", "folder/y.safetensors")
    assert done.exit_code == 2 and "'--output'" in words(done.stderr)
    assert not list((nets / "folder" / "y.safetensors").iterdir())
