"""benches.models in small: rows of every task and subject, and their table. Models of transformers are needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches is not installed with the package

from benches import models

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `foreign`")
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs


def test_a_try_on_a_cpu(tmp_path: Path) -> None:
    told = f"--small --device cpu --mode eager --output {tmp_path}/m.json"
    result = CliRunner().invoke(models.app, told.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert [(row["task"], row["subject"]) for row in rows] == [(t, s) for t in models.TASKS for s in models.ALL]
    for row in rows:
        assert row["ms"] > 0 and row["notes"] == []
        assert (row["adamw_ms"] is not None) == row["task"].endswith("train")
    found = {row["subject"]: row["parameters"] for row in rows[: len(models.ALL)]}
    assert found["dense"] > found["monarch"] == found["monarch batched"] > found["kronecker"]
    assert [found[f"{name}, fused"] for name in ("monarch", "kronecker")] == [found["monarch"], found["kronecker"]]
    assert models.markdown(tmp_path / "m.json")[2:] == result.stdout.splitlines()


def test_a_name_that_it_does_not_know_is_refused() -> None:
    for option in ("--task", "--mode", "--subject"):
        result = CliRunner().invoke(models.app, [option, "dence"])
        assert result.exit_code == 2 and "'dence' is none of" in result.output


def test_what_fails_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("no such kernel\nat all")

    monkeypatch.setattr(models, "_train", broken)
    row = models.measured("gpt2-train", "eager", "dense", models.SMALL, "cpu")
    assert row.ms is None and row.notes == ["TypeError: no such kernel"]
    assert models.line(row, [row]).endswith("| - | - | - | - | TypeError: no such kernel |")


def test_both_implementations_of_a_monarch_layer_are_the_same_model() -> None:
    made = []
    for subject in ("monarch", "monarch, fused", "monarch batched"):
        torch.manual_seed(0)
        model = models.build("gpt2-train", models.SMALL)
        models.structure(model, subject, models.SMALL)
        made.append(model.state_dict())
    for other in made[1:]:
        assert all(torch.equal(value, other[name]) for name, value in made[0].items())
    assert sum(name.endswith("weight_0") for name in made[0]) == 2 * models.SMALL.layers


class NoSync(TorchDispatchMode):
    """Refuses what reads a number from the device, which no CUDA graph can capture."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", models.TASKS)
@pytest.mark.parametrize("subject", ["dense", "monarch"])
def test_what_is_timed_can_be_captured(task: str, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def refusing(call: Any, device: str, notes: Any, before: Any = lambda: None) -> float:
        before()
        with NoSync():
            call()
        calls.append(call)
        return 1.0

    monkeypatch.setattr(models, "_milliseconds", refusing)
    assert models.measured(task, "eager", subject, models.SMALL, "cpu").notes == []
    assert len(calls) == (2 if task.endswith("train") else 1)


def test_gpt2_attends_as_theirs() -> None:
    torch.manual_seed(0)
    model = models.build("gpt2-train", models.SMALL).eval()
    ids = torch.randint(models.SMALL.vocabulary, (2, models.SMALL.tokens))
    found = model(input_ids=ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids=ids).logits)
