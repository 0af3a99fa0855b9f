"""The commands convert and report: whole models on the command line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

from factorlayer import FactorLinear, convert, load_converted
from factorlayer.cli.app import app

NETS = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, x, scale=None):
        return self.net(x if scale is None else x * scale)

def scaled():
    return Scaled()

def empty():
    return nn.Sequential(nn.GELU())

def batches():
    torch.manual_seed(1)
    return [torch.randn(40, 16), (torch.randn(24, 16),)]

def one_by_one():
    yield from batches()

def broken():
    yield torch.ones(1, 16)
    raise KeyError("no more")

def no_batches():
    return []

def a_number():
    return 3

def lists():
    return [[torch.ones(2, 16)]]

def at_its_end():
    return [iter([1])]
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


def test_a_checkpoint_is_converted_and_one_that_was_is_reported_and_checked(nets: Path) -> None:
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
    checked = run("check", *MODEL, "--checkpoint", "y.safetensors", "8")
    assert checked.exit_code == 0 and "816 parameters" in checked.output, checked.output


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


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(40, 16), torch.randn(24, 16)]


def write(name: str, given: Any) -> None:
    if name.endswith(".npy"):
        np.save(name, given.numpy())
    elif name.endswith(".safetensors"):
        save_file(given, name)
    else:
        torch.save(given, name)


def as_files() -> dict[str, tuple[str, Any]]:
    """The same batches, and of the first one, in each way in which a file may hold them."""
    first, second = batches()
    return {
        "pt": ("x.pt", [first, (second,)]),
        "pth of names": ("x.pth", [{"input": first}, {"input": second}]),
        "numbers": ("x.safetensors", {"0": first, "1": second}),
        "numbers and names": ("x.safetensors", {"10.input": second, "9.input": first}),
        "one tensor": ("x.pt", first),
        "arguments": ("x.pt", (first,)),
        "one name": ("x.safetensors", {"input": first}),
        "another name": ("x.safetensors", {"x": first}),
        "npy": ("x.npy", first),
    }


@pytest.mark.parametrize("kind", as_files())
def test_inputs_of_a_file_fit_as_convert_does(kind: str, nets: Path) -> None:
    name, given = as_files()[kind]
    write(name, given)
    several = isinstance(given, list) or len(given) == 2
    check_fitted(name, batches() if several else batches()[:1])


def test_inputs_of_a_function_fit_as_convert_does(nets: Path) -> None:
    for function in ("batches", "one_by_one"):
        check_fitted(f"nets.py:{function}", batches())


def check_fitted(inputs: str, right: list[torch.Tensor]) -> None:
    """By the bits of what is written, and by what is said of it."""
    model = make()
    done = convert(model, {"*": dict(structure="monarch", blocks=4, rank=2)}, inputs=right)
    found = run("convert", *MODEL, "--map", MONARCH, "--inputs", inputs, "--output", "y.safetensors", "--json")
    assert found.exit_code == 0, found.output
    read = json.loads(found.stdout)
    assert read["inputs"] == inputs and not read["dry_run"]
    assert read["changes"] == [change.to_json() for change in done.changes] and read["changes"][0]["fit"]
    written = load_file("y.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def test_several_arguments_come_by_name(nets: Path) -> None:
    first, second = batches()
    scale = torch.full((1,), 0.5)
    save_file({"0.x": first, "0.scale": scale, "1.x": second}, "x.safetensors")
    found = run("convert", "--model", "nets.py:scaled", "--map", MONARCH, "--inputs", "x.safetensors", "--json")
    model = nn.ModuleDict({"net": make()})
    model.forward = lambda x: model["net"](x)  # type: ignore[assignment]
    right = convert(model, {"*": dict(structure="monarch", blocks=4, rank=2)}, inputs=[first * scale, second])
    assert json.loads(found.stdout)["changes"] == [change.to_json() for change in right.changes]


def test_inputs_without_output_are_a_dry_run_too(nets: Path) -> None:
    found = run("convert", *MODEL, "--budget", "0.8", "--inputs", "nets.py:batches")
    assert found.exit_code == 0, found.output
    assert "fitted" in found.stdout.splitlines()[0] and "parameters would become" in found.stdout
    assert "Nothing was written: give --output." in found.stdout
    assert sorted(path.name for path in nets.iterdir() if path.is_file()) == ["nets.py"]


def bad_inputs() -> list[tuple[str, Any, str]]:
    x = torch.ones(3, 16)
    return [
        ("no.pt", None, "no.pt cannot be read as .pt (FileNotFoundError"),
        ("no.safetensors", None, "no.safetensors cannot be read as .safetensors"),
        (
            "x.csv",
            None,
            "'--inputs': it should be a file of tensors (.safetensors, .pt, .pth, .npy), or path/to/file.py:",
        ),
        ("nets.py:none", None, "nets.py should have a function none"),
        ("nets.py:broken", None, "nets.py:broken() raised KeyError: 'no more'"),
        ("nets.py:no_batches", None, "nets.py:no_batches should have batches, there are none"),
        ("nets.py:a_number", None, "convert: inputs should be batches, such as a list, .* it is a int"),
        ("nets.py:lists", None, "nets.py:lists: batch 0 should be a tensor, a tuple of .*; it is a list"),
        ("nets.py:at_its_end", None, "batch 0 should be a tensor, .*; it is a list_iterator"),
        ("x.pt", [], "x.pt should have batches, there are none"),
        ("x.pt", [x, x[:0]], "x.pt: batch 1 should have samples; it is [0, 16] of torch.float32"),
        ("x.pt", [{}], "x.pt: batch 0 should have samples; it is no tensor"),
        ("x.pt", [x, 3], "x.pt: batch 1 should be a tensor"),
        (
            "x.pt",
            [x, x[:, :7]],
            "x.pt: batch 1 ([3, 7] of torch.float32) does not go through the model: RuntimeError: mat1",
        ),
        ("x.npy", x.double(), "x.npy: batch 0 ([3, 16] of torch.float64) does not go through the model"),
        ("x.npy", x[0, 0] * 2, "x.npy: batch 0 ([] of torch.float32) does not go through the model"),
        (
            "x.safetensors",
            {"input": x, "mask": x + 1},
            "does not go through the model: TypeError: .*unexpected keyword argument 'mask'",
        ),
        (
            "x.safetensors",
            {"0": x, "input": x + 1},
            "x.safetensors should name its tensors all in one way: .*; they are 0, input",
        ),
        ("x.safetensors", {"0": x, "0.input": x + 1}, "should name its tensors all in one way"),
        ("x.pt", x * torch.nan, "convert: 0: inputs should be finite; batch 0 has infinite numbers or NaN"),
    ]


@pytest.mark.parametrize(("name", "given", "said"), bad_inputs())
def test_inputs_that_are_refused(name: str, given: Any, said: str, nets: Path) -> None:
    if given is not None:
        write(name, given)
    done = run("convert", *MODEL, "--map", MONARCH, "--inputs", name, "--output", "y.safetensors")
    assert done.exit_code == 2 and "'--inputs'" in done.stderr, done.stderr
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), words(done.stderr)), done.stderr
    assert not (nets / "y.safetensors").exists()


def test_inputs_that_hold_pickled_objects_are_not_run(nets: Path) -> None:
    np.save("x.npy", np.array([print], dtype=object), allow_pickle=True)
    torch.save(make(), "x.pt")
    for name in ("x.npy", "x.pt"):
        done = run("convert", *MODEL, "--map", MONARCH, "--inputs", name)
        assert done.exit_code == 2 and f"{name} cannot be read as" in words(done.stderr)


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
        (
            "convert --model nets.py:make_model --map *=monarch --fresh --inputs nets.py:batches",
            "'--fresh': it was given where it has no meaning: --inputs fits layers from their projections on",
        ),
        (
            "convert --model nets.py:make_model --map *=monarch,blocks=3 --inputs nets.py:batches",
            "'--map': convert: 0 (Linear 16 -> 32)",
        ),
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
            "should be a safetensors file, as save_converted writes them; it cannot be read as one",
        ),
        ("convert --model nets.py:make_model --checkpoint no.safetensors --map *=monarch", "cannot be read"),
        ("convert --model nets.py:make_model --checkpoint 3.safetensors --map *=monarch", "does not fit the model"),
        ("report --model nets.py:make_model --arch 12", "'--arch': report: arch should be one of 80, 86"),
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
    monkeypatch.setattr("factorlayer.cli.models.importlib.util.find_spec", lambda name: None)
    for option in ("--output", "--checkpoint", "--inputs"):
        done = run("convert", *MODEL, "--map", MONARCH, option, "y.safetensors")
        assert done.exit_code == 2
        assert f"'{option}': y.safetensors needs safetensors, which is not installed: pip install" in words(done.stderr)


def test_what_cannot_be_written(nets: Path) -> None:
    (nets / "folder").mkdir()
    (nets / "folder" / "y.safetensors").mkdir()
    done = run("convert", *MODEL, "--map", MONARCH, "--output", "folder/y.safetensors")
    assert done.exit_code == 2 and "'--output'" in words(done.stderr)
    assert not list((nets / "folder" / "y.safetensors").iterdir())
