"""What auto takes of a recurrent layer on a GPU: held against measured rows, and what its prediction counts."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from benches.ceilings import tf32_allowed
from benches.recurrent import DTYPES, UNITS, Row, app, merged
from benches.results import FOLDER
from factorlayer import FactorGRU, FactorGRUCell
from factorlayer.autograd import layer_ops, recurrent_ops
from factorlayer.device.gpu import Gpu
from factorlayer.plan import planner
from factorlayer.plan.recurrent_library import Sequences, around, op_us
from factorlayer.tuning import recurrent

LIMITS = 90, 132, 232448, 4916736  # of the H200 that the rows were measured on, as the driver says
NEARLY = 1.02  # times as long as the faster one: both take as long, by what two runs differ in
ROWS = [Row(**row) for row in json.loads((FOLDER / "recurrent" / "nvidia-h200.json").read_text())["rows"]]


def ids(row: Row) -> str:
    return f"{row.name}-{row.dtype}".replace(" ", "").replace(",", "-")


@pytest.fixture(autouse=True)
def of_an_h200(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The planner, asked for an H200 that is not there."""

    def ask(question: str, text: str, dtype: torch.dtype, batch_class: int, device: int) -> str:
        return getattr(planner, question)(text, str(dtype).removeprefix("torch."), *LIMITS, batch_class=batch_class)

    monkeypatch.setattr(layer_ops, "ask_planner", ask)
    monkeypatch.setattr(recurrent, "gpu_limits", lambda device: LIMITS)
    recurrent._predicted.cache_clear()
    yield
    recurrent._predicted.cache_clear()


def on_a_gpu(dtype: torch.dtype) -> Any:
    """What of an input a choice depends on."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, get_device=lambda: 0)


def layer(row: Row) -> FactorGRU:
    (told, features) = next((told, features) for name, told, features, *_ in UNITS if name == row.name)
    return FactorGRU(features, row.hidden, **told, device="meta", dtype=DTYPES[row.dtype])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_auto_takes_what_was_measured_to_be_faster(row: Row, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer(row)
    monkeypatch.setattr(type(module), "why_not_fused", lambda *_: row.notes.get("fused"))
    given = Sequences(row.sequences, row.steps, row.sequences * row.steps)
    with tf32_allowed(row.dtype == "tf32"):
        chosen = module._choose(on_a_gpu(DTYPES[row.dtype]), given, training)
    us = {"fused": row.us["fused"][training], "batched": row.us["cudnn"][training]}
    assert us[chosen] <= NEARLY * min(each for each in us.values() if each is not None)


def test_pytorchs_op_takes_what_is_predicted() -> None:
    """But for SMALL_US and SMALL_BACK_US nothing was fitted to these rows."""
    ratios = []
    for row, training in itertools.product(ROWS, (False, True)):
        if layer(row)._is_dense:
            found = predicted(row, training)
            ratios.append(found.op_us / row.us["cudnn"][training])
    assert len(ratios) == 80
    assert sum(1 / 1.3 < ratio < 1.3 for ratio in ratios) / len(ratios) >= 0.85
    assert 0.9 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.1


def predicted(row: Row, training: bool, steps: int | None = None) -> recurrent.Prediction:
    """Of a dense row, or of one like it with other steps."""
    module, steps = layer(row), steps or row.steps
    given = Sequences(row.sequences, steps, row.sequences * steps)
    x, allowed = on_a_gpu(DTYPES[row.dtype]), recurrent.Allowed(steps=True, products=row.dtype == "tf32")
    text = recurrent_ops.text_for(module.cells[0].recurrence, x)
    return recurrent._predicted(text, module._unit, given, training, x.dtype, allowed, 0)


def test_short_sequences_have_fixed_costs() -> None:
    """In training the operations around a short sequence's steps take longer than these; cuDNN's kernel of few
    features, which there is in float16, has fewer."""
    of_dtype = {row.dtype: row for row in ROWS if row.name == "dense 128, 2 layers"}
    assert str(predicted(of_dtype["float16"], True).why_slower).startswith("it is predicted: PyTorch's op ")
    short, long = (predicted(of_dtype["bfloat16"], True, steps) for steps in (11, 200))
    assert not short.why_slower and not long.why_slower
    assert str(short).endswith(" us, for training with 61 sequences of 11 steps")
    of_steps = 11 * (long.fused_us - short.fused_us) / (200 - 11)
    assert short.fused_us > 2 * of_steps


def test_packed_sequences_have_no_kernel_of_all_steps() -> None:
    module = FactorGRU(64, 64, device="meta")
    given = Sequences(64, 20, 1280)
    each = [
        op_us(module._unit, "float16", True, given._replace(packed=packed), False, Gpu(*LIMITS))
        for packed in (False, True)
    ]
    assert each[0] < each[1]
    doubles = [op_us(module._unit, "float64", True, given._replace(packed=p), False, Gpu(*LIMITS)) for p in (0, 1)]
    assert doubles[0] == doubles[1]


def test_where_pytorch_has_no_op_nothing_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of starts it knows nothing, and of a structured cell it would be step by step."""
    many, x = Sequences(4096, 24, 4096 * 24), on_a_gpu(torch.float64)
    module = FactorGRU(48, 512, device="meta")
    monkeypatch.setattr(type(module), "why_not_fused", lambda *_: None)
    assert module._choose(x, many, False) == "batched"
    assert module._choose(x, many, False, starts=True) == "fused"
    assert module._choose(x, Sequences(4096, 0, 0), False) == "fused"
    monkeypatch.setattr(recurrent, "is_compiling", lambda: True)
    assert module._choose(x, many, False) == "fused"
    cells = [FactorGRUCell(512, 512, structure=each, device="meta") for each in ("dense", "kronecker")]
    assert [cell._is_left_to_pytorch(x) for cell in cells] == [True, False]


@pytest.mark.parametrize(
    ("hidden", "told", "held"),
    [
        (1024, dict(blocks=8), True),
        (512, dict(), True),
        (60, dict(factors=((5, 12), (20, 3)), rank=2, reset="before"), True),
        (1024, dict(), False),
    ],
)
def test_monarch_matrices_are_fused_while_a_multiprocessor_holds_them(
    hidden: int, told: dict[str, Any], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = FactorGRU(64, hidden, structure="monarch", device="meta", **told), on_a_gpu(torch.bfloat16)
    text = module.cells[0].recurrence.text
    for asked in (text, f"{recurrent_ops.through_text(text)} | backward"):
        assert planner.has_plan(asked, "bfloat16", *LIMITS) == held
    monkeypatch.setattr(type(module), "why_not_fused", lambda *_: None if held else "it has no kernels")
    given = Sequences(16, 1024, 16 * 1024)
    assert {module._choose(x, given, training) for training in (False, True)} == {"fused" if held else "batched"}


def test_lengths_that_are_nearly_alike_have_one_choice() -> None:
    assert [recurrent.alike(n) for n in (0, 1, 13, 15, 16, 17, 100, 103, 104, 1024)] == [
        *(0, 1, 13, 15, 16, 16, 96, 96, 104, 1024)
    ]
    assert all(n - recurrent.alike(n) <= n / 8 for n in range(5000))


KINDS = {"addmm": "Product", "mm": "Product", "sum": "Sum"}
KINDS |= dict.fromkeys(("new_zeros", "cat", "clone", "add_", "stack"), "Pointwise")
FREE = ("view", "t", "transpose", "chunk", "split", "slice", "select", "unsqueeze", "as_strided", "detach", "new_empty")


class Launched(TorchDispatchMode):
    """Operations that compute, by what plan/library.py counts them as."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.__name__.split(".")[0]
        if op.namespace == "aten" and name not in FREE:
            self.found[KINDS.get(name, name)] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_counted_is_launched(layers: int, bias: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the recurrence's own ops, of which a GPU's are played here by the CPU's."""
    module = FactorGRU(5, 6, layers, bias=bias, implementation="fused").requires_grad_(training)
    x, grad = torch.randn(4, 3, 5, requires_grad=training), torch.randn(4, 3, 6)
    learned = [x, *module.parameters()]
    right = torch.autograd.grad(module(x)[0], learned, grad) if training else ()
    play_a_gpu(monkeypatch)
    with Launched() as launched:
        y = module(x)[0]
        found = torch.autograd.grad(y, learned, grad) if training else ()
    counted = Counter(
        type(call).__name__.removeprefix("Rows") for call in around(module._unit, Sequences(3, 4, 12), training)
    )
    assert launched.found == counted
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def play_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back as on a GPU: slopes and what goes through them step by step are those of the CPU's op."""
    backward = torch.ops.factorlayer.recurrence_backward.default
    asked: list[Any] = []

    def run(*given: Any) -> list[Tensor]:
        asked[:] = given
        return recurrent_ops._backward_on_cuda(*given)

    def slopes(gates: Any, before: Tensor, products: list[Tensor], bias: Any, text: str) -> list[Tensor]:
        with unseen():
            weights = asked[4]
            joined = products[0] if len(products) == 1 else torch.cat(products, 1)
            torch.testing.assert_close(joined, before @ torch.cat(list(weights)).t())
            return [torch.empty_like(before)] * 5

    def through(*_: Any) -> list[Tensor]:
        with unseen():
            return backward(*asked)

    monkeypatch.setattr(recurrent_ops, "_backward", run)
    monkeypatch.setattr(torch.ops.factorlayer, "recurrence_slopes", slopes)
    monkeypatch.setattr(torch.ops.factorlayer, "recurrence_through", through)


def unseen() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


def test_rows_of_a_results_file_are_measured_anew_by_their_names() -> None:
    before = [{"name": name, "dtype": "float16", "us": 1} for name in (UNITS[0][0], UNITS[3][0])]
    new = [{"name": UNITS[3][0], "dtype": "float16", "us": 2}, {"name": UNITS[1][0], "dtype": "bfloat16", "us": 3}]
    assert [row["us"] for row in merged(before, new)] == [1, 3, 2]
    refused = CliRunner().invoke(app, ["--select", "sparse*"])
    assert refused.exit_code == 2 and "matches none of 32 x 32" in " ".join(refused.output.replace("│", " ").split())
