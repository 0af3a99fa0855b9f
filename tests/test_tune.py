"""Measured choice: what is timed is kept, read by the next process, obeyed by auto, and ignored where it does not hold.

Times are given, not taken, but in the tests of the clock itself.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from forked import python
from oracle import nearly
from torch import Tensor, nn
from typer.testing import CliRunner
from untuned import forget, untuned

import factorlayer
import factorlayer.functional
import factorlayer.stacks.stack
from factorlayer import FactorLinear, FactorMLP, fuse
from factorlayer.autograd.layer_ops import layer_at_once as every_layer_at_once
from factorlayer.autograd.runtime import cache_folder, class_of_batch
from factorlayer.cli.app import app
from factorlayer.kernels.batches import BATCHES, MOST
from factorlayer.tuning import choices, timing


@pytest.fixture(autouse=True)
def _nothing_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before, as in a new process with an empty cache, and behind it again."""
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "cache"))
    with untuned():
        yield
    torch._dynamo.reset()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes once one choice is kept."""

    def medians(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
        if choices.TABLE:
            raise KeyboardInterrupt
        return {"fused": 2.0, "batched": 1.0}

    monkeypatch.setattr(timing, "medians", medians)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the clock says from now on, in seconds; every candidate runs once."""
    told = {"fused": 3e-5, "batched": 2e-5}

    def medians(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
        for run in runs.values():
            run()
        return dict(told)

    monkeypatch.setattr(timing, "medians", medians)
    return told


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran: batched products, or a fused call of either kind."""
    calls: list[str] = []

    def spy(where: object, name: str, word: str) -> None:
        real = getattr(where, name)

        def run(*given: object) -> object:
            y = real(*given)
            if y is not None:
                calls.append(word)
            return y

        monkeypatch.setattr(where, name, run)

    spy(factorlayer.functional, "batched", "batched")
    spy(factorlayer.functional, "fused", "fused")
    spy(factorlayer.functional, "every_layer_at_once", "fused")
    spy(factorlayer.stacks.stack, "stack_at_once", "fused")
    spy(factorlayer.stacks.stack, "fused_stack", "fused")
    return calls


def layer_of(**more: object) -> FactorLinear:
    return FactorLinear(12, 20, factors=((3, 4), (4, 5)), **more)


def ran(calls: list[str], layer: nn.Module, x: Tensor, training: bool = False) -> list[str]:
    calls.clear()
    with torch.set_grad_enabled(training):
        layer(x)
    return list(calls)


def files() -> list[Path]:
    return sorted((cache_folder() / "choices").glob("*.json"))


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import torch\nfrom factorlayer import FactorLinear\nlayer = FactorLinear(12, 20, factors=((3, 4), (4, 5)))\n"
    )
    return subprocess.run([*python(), "-c", head + code], capture_output=True, text=True, check=False, timeout=600)


# What auto runs


def test_auto_runs_what_was_faster_in_its_class_and_pass(times: dict[str, float], called: list[str]) -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.warmup(8, tune=True)
    assert ran(called, layer, torch.ones(64, 12)) == ["batched"]
    assert ran(called, layer, torch.ones(2, 3, 12)) == ["batched"]
    assert ran(called, layer_of(), torch.ones(5, 12)) == ["batched"]  # another layer of the same text
    assert [ran(called, layer, torch.ones(n, 12)) for n in (4, 65)] == [["fused"]] * 2
    assert ran(called, layer, torch.ones(8, 12), training=True) == ["fused"]
    assert ran(called, layer_of(dtype=torch.float64), torch.ones(8, 12).double()) == ["fused"]
    assert ran(called, layer_of(bias=False), torch.ones(8, 12)) == ["fused"]
    assert ran(called, layer_of(implementation="fused"), torch.ones(8, 12)) == ["fused"]
    layer.warmup(8, tune=True)  # with gradients
    assert ran(called, layer, torch.ones(8, 12), training=True) == ["batched"]


@pytest.mark.parametrize(("batched", "chosen"), [(2.8e-5, "batched"), (2.95e-5, "fused"), (4e-5, "fused")])
def test_batched_has_to_be_faster_by_three_percent(
    batched: float, chosen: str, times: dict[str, float], called: list[str]
) -> None:
    times["batched"] = batched
    layer = layer_of()
    layer.warmup(8, tune=True)
    assert ran(called, layer, torch.ones(8, 12)) == [chosen]


def test_the_eager_call_is_the_extensions_own_where_no_choice_is_batched(times: dict[str, float]) -> None:
    layer = layer_of()
    layer(torch.ones(2, 12))
    assert factorlayer.functional.layer_at_once is every_layer_at_once
    times["batched"] = 1
    layer.warmup(8, tune=True)
    layer(torch.ones(2, 12))
    assert choices.TABLE and factorlayer.functional.layer_at_once is every_layer_at_once


@pytest.mark.parametrize(("batched", "same"), [(2e-5, nearly), (4e-5, torch.equal)], ids=["batched", "fused"])
def test_results_and_gradients_are_the_same(
    batched: float, same: Callable[[Tensor, Tensor], bool], times: dict[str, float]
) -> None:
    """With equal bits where they are ours."""
    times["batched"] = batched
    layer, x = layer_of(activation="gelu"), torch.randn(8, 12, requires_grad=True)
    before = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    layer.warmup(8, tune=True)
    after = [torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]) for _ in range(2)]
    torch.testing.assert_close(after[0], before)
    assert all(same(a, b) for a, b in zip(*after, strict=True))


def test_tuning_leaves_the_programs_random_numbers_and_gradients_alone(times: dict[str, float]) -> None:
    layer, state = layer_of(), torch.get_rng_state()
    layer.warmup(8, tune=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_under_autocast_it_is_autocasts_dtype(times: dict[str, float], called: list[str]) -> None:
    layer = layer_of()
    with torch.autocast("cpu", torch.bfloat16):
        layer.warmup(8, tune=True)
        assert ran(called, layer, torch.ones(8, 12)) == ["batched"]
    assert ran(called, layer, torch.ones(8, 12)) == ["fused"]
    assert {key[1] for key in choices.TABLE} == {"bfloat16"}


# explain


def test_explain_says_where_the_choice_comes_from(times: dict[str, float]) -> None:
    layer, place = layer_of(), choices.place_of("cpu", -1)
    assert layer.explain(8).splitlines()[-2] == "auto takes fused as always: nothing was measured"
    layer.warmup(8, tune=True)
    said = f"measured on {place.device}: batched 20.0 us, fused 30.0 us, for"
    assert layer.explain(64).splitlines()[-3:] == [
        f"auto takes batched: {said} inference with up to 64 samples",
        f"auto takes batched: {said} training with up to 64 samples",
        f"runs batched, because it was {said} training with up to 64 samples",
    ]
    assert layer.explain(65).splitlines()[-2] == "auto takes fused as always: nothing was measured"
    times["fused"] = 1e-5
    layer.warmup(100, tune=True)
    assert f"auto takes fused: measured on {place.device}: fused 10.0 us, batched 20.0 us, for" in layer.explain(100)
    assert layer.explain(100).splitlines()[-1].startswith("runs fused, ")


def test_the_classes_of_batch_are_those_of_plans() -> None:
    of_ends = [(class_of_batch(most), class_of_batch(most + 1)) for most in MOST]
    assert of_ends == list(itertools.pairwise(range(len(BATCHES))))
    assert [words.split()[-2] for words in choices.SAMPLES] == list(map(str, (*MOST, MOST[-1])))


# Files


def test_the_folder_is_the_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choices.folder() == cache_folder() / "choices"
    monkeypatch.delenv("FACTORLAYER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for base in ("", "not/absolute", str(tmp_path)):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert choices.folder() == cache_folder() / "choices"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "")
    assert choices.folder() is None


def test_a_new_process_takes_what_was_kept(times: dict[str, float]) -> None:
    layer_of().warmup(8, tune=True)
    assert len(files()) == 2
    done = in_a_new_process("layer(torch.ones(5, 12))\nprint(layer.explain(5).splitlines()[-1])")
    assert (done.stdout[:31], done.stderr) == ("runs batched, because it was me", "")


def test_what_another_process_measures_changes_nothing_here(times: dict[str, float], called: list[str]) -> None:
    layer = layer_of()
    layer(torch.ones(8, 12))
    done = in_a_new_process(
        "from factorlayer.tuning import timing\n"
        "timing.medians = lambda *_: {'fused': 2.0, 'batched': 1.0}\nlayer.warmup(8, tune=True)"
    )
    assert done.returncode == 0 and len(files()) == 2, done.stderr
    assert ran(called, layer, torch.ones(8, 12)) == ["fused"]


@pytest.mark.parametrize("name", ["device", "torch", "factorlayer"])
def test_a_choice_of_elsewhere_is_ignored_with_one_warning(
    name: str, times: dict[str, float], called: list[str]
) -> None:
    layer = layer_of()
    layer.warmup(8, tune=True)
    for path in files():
        told = json.loads(path.read_text())
        told["choices"][0]["place"][name] = "of old"
        path.write_text(json.dumps(told))
    forget()
    with pytest.warns(RuntimeWarning, match=r"measured elsewhere, on .*of old.*; this is") as met:
        assert [ran(called, layer, torch.ones(n, 12)) for n in (8, 9, 8)] == [["fused"]] * 3
    assert len(met) == 1
    layer.warmup(8, tune=True)  # beside the other's
    assert {len(places) for places in choices.TABLE.values()} == {2}
    assert ran(called, layer, torch.ones(8, 12)) == ["batched"]


def test_a_gpus_choice_is_nothing_to_a_cpu(times: dict[str, float], called: list[str]) -> None:
    layer = layer_of()
    layer.warmup(8, tune=True)
    for path in files():
        path.write_text(path.read_text().replace('"driver": ""', '"driver": "580.1"'))
    forget()
    assert ran(called, layer, torch.ones(8, 12)) == ["fused"]


DAMAGES = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "another version": lambda text: text.replace('choices": 1', 'choices": 2'),
    "a time": lambda text: text.replace('"batched_us": 20', '"batched_us": -20'),
    "no number": lambda text: text.replace('"batched_us": 20', '"batched_us": NaN, "x": 0'),
    "a chain": lambda text: text.replace("tied 1 3", "tied 1 5"),
    "a dtype": lambda text: text.replace("float32", "float31"),
    "a class": lambda text: text.replace('"batch_class": 1', '"batch_class": 2'),
    "a field": lambda text: text.replace('"samples"', '"simples"'),
    "deep": lambda text: "[" * 100000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning(damage: str, times: dict[str, float], called: list[str]) -> None:
    times["batched"] = 20e-6
    layer = layer_of()
    layer.warmup(8, tune=True)
    text = files()[0].read_text()
    assert DAMAGES[damage](text) != text
    for path in files():
        path.write_text(DAMAGES[damage](path.read_text()))
    forget()
    with pytest.warns(RuntimeWarning, match=r"ignores 2 of 2 kept choices, whose files in .* are damaged: ") as met:
        assert [ran(called, layer, torch.ones(8, 12)) for _ in range(3)] == [["fused"]] * 3
    assert len(met) == 1
    with pytest.raises(
        ValueError, match=r"^import_choices: .* should be a file that export_choices wrote, unchanged; "
    ):
        factorlayer.import_choices(files()[0])


def test_a_pipe_among_the_files_does_not_stop_a_process(times: dict[str, float]) -> None:
    layer_of().warmup(8, tune=True)
    os.mkfifo(cache_folder() / "choices" / "0.json")
    forget()
    with pytest.warns(RuntimeWarning, match="ignores 1 of 3 kept choices"):
        choices.load()
    assert len(choices.TABLE) == 2


def test_a_folder_that_cannot_be_written(
    times: dict[str, float], called: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "file"))
    layer = layer_of()
    with pytest.warns(RuntimeWarning, match="cannot keep choices in .*, so they last as long as this process") as met:
        layer.warmup(8, tune=True)
    assert len(met) == 1
    assert ran(called, layer, torch.ones(8, 12)) == ["batched"]


def test_exported_and_imported(times: dict[str, float], called: list[str], tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    with pytest.raises(ValueError, match=r"^export_choices: there should be choices to export, none was measured"):
        factorlayer.export_choices(path)
    layer = layer_of()
    layer.warmup(8, tune=True)
    assert factorlayer.export_choices(path) == 2
    for file in files():
        file.unlink()
    forget()
    assert ran(called, layer, torch.ones(8, 12)) == ["fused"]
    assert factorlayer.import_choices(path) == 2
    assert ran(called, layer, torch.ones(8, 12)) == ["batched"]
    forget()
    assert ran(called, layer, torch.ones(8, 12)) == ["batched"]  # from the folder
    with pytest.raises(ValueError, match=r"^import_choices: .*nowhere cannot be read: No such file"):
        factorlayer.import_choices(tmp_path / "nowhere")


# What cannot be tuned


def test_what_memory_cannot_hold_keeps_no_choice_and_says_why(
    monkeypatch: pytest.MonkeyPatch, called: list[str]
) -> None:
    layer = layer_of()
    with pytest.warns(
        RuntimeWarning, match="FactorLinear.warmup: nothing was chosen, .* are too many for the memory of cpu"
    ):
        layer.warmup(2**50, tune=True)
    assert not choices.TABLE and not files()
    monkeypatch.setattr(timing, "medians", lambda runs, device: dict.fromkeys(runs, 0.0))
    with pytest.warns(RuntimeWarning, match="8 samples are too few for the clock"):
        layer.warmup(8, tune=True)
    assert not choices.TABLE and ran(called, layer, torch.ones(8, 12)) == ["fused"]


def test_where_there_is_no_choice_nothing_is_kept(times: dict[str, float]) -> None:
    FactorLinear(12, 20, factors=1, dtype=torch.bfloat16).warmup(8, tune=True)  # a single contraction, of 16 bits
    layer_of(implementation="fused").warmup(8, tune=True)
    assert not choices.TABLE
    (tuned,) = factorlayer.tune(layer_of(implementation="v2"), 8)
    assert str(tuned) == "FactorLinear: nothing was chosen, it runs batched, as asked"
    (tuned,) = factorlayer.tune(layer_of(device="meta"), 8)
    assert "only plain tensors on a CPU or a GPU can be timed" in str(tuned)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("who", ["FactorLinear.warmup", "tune"])
def test_refused_in_a_compiled_graph(who: str, full: bool, times: dict[str, float]) -> None:
    layer = layer_of()

    def program(x: Tensor) -> Tensor:
        layer.warmup(8, tune=True) if who != "tune" else factorlayer.tune(layer, 8)
        return x

    with pytest.raises(RuntimeError, match=f"{who}: kernels cannot be timed inside a compiled or exported graph"):
        torch.compile(program, fullgraph=full, backend="eager")(torch.ones(2))
    assert not choices.TABLE


def test_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (lambda: layer_of().warmup(8, tune=True), lambda: factorlayer.tune(layer_of(), 8)):
        with pytest.raises(RuntimeError, match="kernels cannot be timed inside a CUDA graph capture; tune before"):
            call()


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_tuning_keeps_what_was_measured() -> None:
    with pytest.raises(KeyboardInterrupt):
        layer_of().warmup(8, tune=True)
    assert [key[3] for key in choices.TABLE] == [False] and len(files()) == 1


# Graphs


def test_a_compiled_graph_has_it_as_a_constant(times: dict[str, float]) -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.warmup(8, tune=True)
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for batch in (8, 9, 70, 3000):
            torch.testing.assert_close(compiled(torch.ones(batch, 12)), layer(torch.ones(batch, 12)))
        assert counter.frame_count == 1
        layer_of(bias=False).warmup(8, tune=True)  # what is measured later does not compile it again
        compiled(torch.ones(8, 12))
        assert counter.frame_count == 1
        exported = torch.export.export(layer, (torch.ones(8, 12),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        assert "factorlayer" not in str(exported.graph)
        times["fused"] = 1e-5
        layer.warmup(100, tune=True)  # two classes that disagree: fused
        exported = torch.export.export(layer, (torch.ones(8, 12),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        assert "factorlayer.forward" in str(exported.graph)


# Models


def test_a_model_is_tuned_part_by_part(times: dict[str, float], called: list[str]) -> None:
    model = nn.Sequential(layer_of(), nn.BatchNorm1d(20), FactorMLP([20, (4, 4), (4, 4), 12]), nn.Dropout(), layer_of())
    modes = [part.training for part in model.modules()]
    found = factorlayer.tune(model, torch.randn(70, 12))
    assert [tuned.name for tuned in found[::2]] == ["FactorMLP: layers.0, layers.1, layers.2", "0", "4"]
    assert all(tuned.choice and tuned.choice.batch_class == 2 for tuned in found) and len(found) == 6
    assert [part.training for part in model.modules()] == modes and model[1].num_batches_tracked == 0
    model.eval()
    assert set(ran(called, model, torch.ones(70, 12))) == {"batched"}
    assert set(ran(called, model, torch.ones(8, 12))) == {"fused"}


def test_a_stack_runs_what_was_chosen_and_explains_it(times: dict[str, float], called: list[str]) -> None:
    module = nn.Sequential(layer_of(), nn.ReLU(), nn.Linear(20, 5))
    model, x = fuse(module), torch.randn(8, 12)
    before = model(x)
    factorlayer.tune(model, 8)
    assert ran(called, model, x) == ["batched"]  # the dense layer is nn.functional.linear
    torch.testing.assert_close(model(x), before)
    assert "  0, 2: auto runs batched, measured on " in model.explain()
    times["fused"] = 1e-6
    factorlayer.tune(model, 8)
    assert ran(called, model, x) == ["fused"]
    assert [str(tuned) for tuned in factorlayer.tune(model.freeze(), 8)] == [
        "fuse: 0, 2: nothing was chosen, it is frozen"
    ]


@pytest.mark.parametrize(
    ("model", "batch", "kind", "message"),
    [
        (3, 8, TypeError, "tune: model should be an nn.Module, it is int"),
        (nn.Linear(2, 2), 8, ValueError, "tune: the model should have a FactorLinear, .* Linear has none"),
        (FactorMLP([4, 4, 4]), 0, ValueError, "tune: batch should be a positive number of samples, it is 0"),
        (
            FactorMLP([4, 4, 4]),
            True,
            TypeError,
            "tune: batch should be a number of samples, or an example: .* it is bool",
        ),
        (FactorMLP([4, 4, 4]), "8", TypeError, "it is str"),
    ],
)
def test_wrong_arguments(model: object, batch: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        factorlayer.tune(model, batch)


# The clock


def test_the_clock_gives_each_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds

        return run

    cpu = torch.device("cpu")
    found = timing.medians({"fused": taking(1e-5), "batched": taking(1e-3)}, cpu)
    assert found == pytest.approx({"fused": 1e-5, "batched": 1e-3})
    assert 2 * timing.LEAST <= now[0] < 0.1
    now[0] = 0
    timing.medians({"fused": taking(0.12), "batched": taking(0.01)}, cpu)
    assert now[0] < 2 * timing.MOST + 3 * 0.13
    now[0] = 0
    timing.medians({"fused": taking(3), "batched": taking(3)}, cpu)
    assert now[0] == 2 * 3 * 4  # warm-ups, a first look and one round


def test_real_times_are_kept() -> None:
    with torch.no_grad():
        layer_of().warmup(4, tune=True)
    ((choice,),) = [list(places.values()) for places in choices.TABLE.values()]
    assert choice.samples == 4 and choice.fused_us > 0 and choice.batched_us > 0


# The command line


def test_the_command(times: dict[str, float], tmp_path: Path) -> None:
    path, run = str(tmp_path / "choices.json"), CliRunner()
    done = run.invoke(app, ["8", "3x4", "4x5", "tune", "--export", path, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [each["choice"]["implementation"] for each in told["tuned"]] == ["batched", "batched"]
    assert told["exported"] == 2 and told["configuration"]["batch"] == 8
    assert "FactorLinear: auto runs batched, measured on" in done.stderr
    again = run.invoke(app, ["tune", "--import", path])
    assert (again.exit_code, again.stdout) == (0, f"2 choices were imported: {path}\n")
    for words, message in (
        (["tune"], "say what to tune"),
        (["tune", "--import", str(tmp_path)], "directory"),
        (["tune", "--import", str(tmp_path / "none")], "cannot be read"),
        (["tune", "--export", str(tmp_path / "no" / "where")], "a folder that exists"),
        (["0", "3x4", "4x5", "tune"], "there should be samples to time"),
    ):
        done = run.invoke(app, words)
        assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", " ").split()), done.output


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_what_the_command_has_measured() -> None:
    done = CliRunner().invoke(app, ["8", "3x4", "4x5", "tune"])
    assert done.exit_code == 130 and "interrupted: 1 choices were measured and are kept" in done.stdout
    assert len(files()) == 1


def test_nothing_is_warned_of_where_nothing_was_tuned(called: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran(called, layer_of(), torch.ones(8, 12)) == ["fused"]
    assert not choices.TABLE and not (cache_folder() / "choices").exists()
