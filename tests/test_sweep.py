"""The sweep: what it draws, how it counts special functions, a run from drawing to tables, and what it says of rows."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches is not installed with the package

from benches import ceilings, report, sweep, sweep_plans, sweep_rows, sweep_tables
from benches.floor import DTYPES, Ceilings, Work, refuse_impossible, work
from benches.subjects import Call, build
from benches.sweep import BOUNDS, drawn, footprint
from benches.sweep_check import draw_tensors, wrong
from benches.sweep_results import Spread, Sweep, SweepRow
from benches.timing import Timing, sets_needed
from benches.workloads import ALL_DTYPES, CPU_DTYPES, PASSES, Block, Layer, Workload
from factorlayer.activations import functions
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.activations.texts import activation_of
from factorlayer.autograd.runtime import CompileError
from factorlayer.device.gpu import Gpu
from factorlayer.kernels.batches import SOME, class_of
from factorlayer.maths.chain import Chain
from factorlayer.plan.planner import plan, plan_of, plan_stack
from factorlayer.plan.schemes import schemes

MANY = [row for seed in range(10) for row in drawn(seed, 400, "cuda", ALL_DTYPES)]
LAYERS = [w for w, _ in MANY if isinstance(w, Layer)]
KRONECKER = [w for w in LAYERS if w.structure == "kronecker"]
MONARCH = [w for w in LAYERS if w.structure == "monarch"]
BLOCKS = [w for w, _ in MANY if isinstance(w, Block)]


def of(workloads: list[Layer], holds: Any) -> float:
    return sum(map(holds, workloads)) / len(workloads)


# The distribution.


def test_a_seed_means_the_same_rows_and_more_of_them_begin_with_these() -> None:
    assert drawn(3, 50, "cuda", ALL_DTYPES) == drawn(3, 50, "cuda", ALL_DTYPES)
    assert drawn(3, 90, "cuda", ALL_DTYPES)[:50] == drawn(3, 50, "cuda", ALL_DTYPES)
    assert drawn(3, 50, "cuda", ALL_DTYPES) != drawn(4, 50, "cuda", ALL_DTYPES)
    first, *_ = drawn(0, 1, "cpu", CPU_DTYPES)  # of this machine as of any other
    workload, dtype = first
    assert (workload.name, workload.shape, workload.batch, dtype) == FIRST


FIRST = ("0:0", "448>448, blocks (8, 8), rank 39", 88, "float32")


def test_half_are_kronecker_layers_and_dtypes_are_even() -> None:
    assert len(KRONECKER) == 2000 and len(MONARCH) == len(BLOCKS) == 1000
    assert Counter(dtype for _, dtype in MANY) == dict.fromkeys(ALL_DTYPES, 800)
    kinds = Counter((type(w), getattr(w, "structure", ""), dtype) for w, dtype in MANY)
    assert set(kinds.values()) == {400, 200}


def test_kronecker_layers_are_as_the_head_says() -> None:
    counts = Counter(len(w.in_factors) for w in KRONECKER)
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    assert min(counts.values()) > 0.7 * len(KRONECKER) / 6
    sizes = [size for w in KRONECKER for size in w.in_factors + w.out_factors]
    assert (min(sizes), max(sizes)) == (2, 256)
    assert max(w.features[0] for w in KRONECKER) <= 1 << 20 and max(w.features[1] for w in KRONECKER) <= 1 << 20
    assert of(KRONECKER, lambda w: all(s % 8 == 0 for s in w.in_factors + w.out_factors)) == pytest.approx(
        1 / 3, abs=0.06
    )
    assert of(KRONECKER, lambda w: w.in_factors != w.out_factors) == pytest.approx(1 / 2, abs=0.06)
    assert {w.rank for w in KRONECKER} == {1, 2, 3}
    pairs = [w for w in KRONECKER if len(w.in_factors) == 2]
    small = of(pairs, lambda w: w.in_factors[0] < 23)  # half of the octaves from 2 to 256
    assert 0.3 < small < 0.6


def test_monarch_layers_are_as_the_head_says() -> None:
    blocks = [w.spec.blocks or (0, 0) for w in MONARCH]
    assert min(map(min, blocks)) == 2 and max(map(max, blocks)) <= 64
    assert of(MONARCH, lambda w: w.spec.blocks[0] != w.spec.blocks[1]) == pytest.approx(1 / 3, abs=0.06)
    assert of(MONARCH, lambda w: w.in_factors[1] != w.out_factors[0]) == pytest.approx(1 / 2, abs=0.07)
    assert {1, 2, 3} < {w.rank for w in MONARCH} and max(w.rank for w in MONARCH) > 32
    assert all(w.rank <= 64 for w in MONARCH)


def test_blocks_are_as_the_head_says() -> None:
    assert {w.depth for w in BLOCKS} == set(range(1, 9))
    assert {w.activation for w in BLOCKS} == set(ACTIVATIONS)
    widths = [width for w in BLOCKS for width in w.widths]
    assert min(widths) == 1 and max(widths) > 400 and max(widths) <= 512


def test_batches_stay_within_the_bounds() -> None:
    for device, dtypes in (("cuda", ALL_DTYPES), ("cpu", CPU_DTYPES)):
        bounds = BOUNDS[device]
        for workload, dtype in drawn(7, 400, device, dtypes):
            fixed, each = footprint(workload)
            assert 1 <= workload.batch <= 100_000
            assert (fixed + workload.batch * each) * DTYPES[dtype].itemsize <= bounds.bytes
            assert workload.costs[1] <= bounds.flops
    batches = [w.batch for w, _ in MANY]
    assert min(batches) == 1 and max(batches) > 50_000


def test_a_footprint_counts_the_products_of_v2() -> None:
    layer = Layer("by hand", "kronecker", 5, (16, 2), (32, 2), "cuda", (), "this test")
    assert footprint(layer) == (2 * (16 * 32 + 4), 2 * (32 + 64) + 16 * 32)
    block = Block("by hand", (3, 50, 4), "relu", 5, "cuda", (), "this test")
    assert footprint(block) == (2 * (3 * 50 + 50 * 4 + 54), 2 * 7 + 50)


# Special functions.


def test_special_functions_by_hand() -> None:
    counts = {name: (functions.of_value(name), functions.of_slope(name)) for name in ACTIVATIONS}
    none, once = (0, 0), (1, 0)
    assert counts == {
        "identity": none, "relu": none, "leaky_relu": none, "square": none, "relu_squared": none,
        "elu": once, "tanh": once, "sigmoid": once,  # whose slopes their results tell
        "gelu": (1, 2), "gelu_tanh": (1, 1), "silu": (1, 1), "sine": (1, 1), "softplus": (2, 1),
    }  # fmt: skip
    mish, _ = activation_of(torch.nn.Mish())
    assert functions.of_value(mish) == 3
    root, _ = activation_of(lambda x: x / (1 + x.abs()) ** 0.5)
    assert functions.of_value(root) in (2, 3)


def test_a_floor_counts_special_functions() -> None:
    block = Block("by hand", (4, 10, 20, 3), "sine", 8, "cpu", ("float32",), "this test")
    forward, backward = work(block, 4)
    assert (forward.functions, backward.functions) == (8 * 30, 8 * 30)
    ceilings = Ceilings(lambda _: 1e12, 1e15, "", None, special=1e3)
    assert ceilings.floor(forward) == pytest.approx(0.24)
    assert ceilings.floor(forward, backward) == pytest.approx(0.48)
    without = Ceilings(lambda _: 1e12, 1e15, "")
    assert without.floor(forward) == pytest.approx(max(forward.bytes / 1e12, forward.flops / 1e15))
    refuse_impossible("whoever", 1e-3, (forward,), "float32", ceilings)  # functions can be had in other ways
    assert Work(1, 2, 3) + Work(1, 1, 1) == Work(2, 3, 4)


# Checks.


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_drawn_rows_are_right(dtype: str) -> None:
    small = [w for w, _ in drawn(11, 120, "cpu", [dtype]) if w.costs[1] * w.batch < 1e8 and max(w.features) < 3000]
    assert len(small) > 20
    for number, workload in enumerate(small[:40]):
        torch.manual_seed(number)
        tensors = draw_tensors(workload, dtype)
        calls = {name: build(name, workload, tensors) for name in ("v2", "v3", "auto")}
        assert wrong(workload, dtype, tensors, calls) == [], workload


def off(call: Call, which: int, by: float) -> Call:
    """The same, with one of its results off."""

    class Off(Call):
        def run(self, of_pass: str) -> tuple[torch.Tensor, ...]:
            made = list(super().run(of_pass))
            if which < len(made):
                made[which] = made[which] * (1 + by)
            return tuple(made)

    return Off(call.function, call.x, call.grad_y, call.weights)


A_PAIR = Layer("a pair", "kronecker", 40, (4, 6), (5, 3), "cpu", ("float32",), "this test")


def test_a_gradient_is_not_wrong_where_batched_has_it_wrong() -> None:
    """As sums over samples that cancel, of states that were rounded: then float64 decides."""
    torch.manual_seed(0)
    tensors = draw_tensors(A_PAIR, "float32")
    batched, fused = build("v2", A_PAIR, tensors), build("v3", A_PAIR, tensors)
    for fused_off, wrongs in ((0.0, 0), (0.03, 0), (0.2, 1)):
        found = wrong(A_PAIR, "float32", tensors, {"v2": off(batched, 2, 0.02), "v3": off(fused, 2, fused_off)})
        assert len(found) == wrongs and all(words.startswith("v3: gradient 0 is off by") for words in found)


@pytest.mark.parametrize(("which", "what"), [(0, "y"), (1, "grad_x"), (2, "gradient 0")])
def test_wrong_results_are_named(which: int, what: str) -> None:
    workload = A_PAIR
    torch.manual_seed(0)
    tensors = draw_tensors(workload, "float32")
    right, other = build("v2", workload, tensors), build("v3", workload, tensors)
    broken = off(other, which, 0.01)
    found = wrong(workload, "float32", tensors, {"v2": right, "v3": broken})
    assert found and all(words.startswith(f"v3: {what} is off by") for words in found)
    nan = copy.copy(tensors.x.detach())
    nan[0] = math.nan
    spoilt = Call(lambda x: other.function(x) + nan.sum(), other.x, other.grad_y, other.weights)
    assert wrong(workload, "float32", tensors, {"v2": right, "v3": spoilt})


# A run.


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows, timed shortly."""
    monkeypatch.setitem(BOUNDS, "cpu", sweep.Bounds(2_000_000, 2_000_000))
    effort = sweep_rows.Effort(budget=0.01, block=0.001, least=2, most=3, slowest_dense=0.1)
    monkeypatch.setitem(sweep_rows.EFFORTS, "cpu", effort)
    ceilings = Ceilings(lambda _: 1e13, 1e13, "this test", None, 1e13, "this test")
    monkeypatch.setattr(sweep_rows, "measure_ceilings", lambda device, dtype: ceilings)


def run(*options: str) -> Any:
    return CliRunner().invoke(sweep.app, ["--seed", "5", "--threads", "1", *options], env={"COLUMNS": "300"})


def test_a_short_sweep_saves_rows_and_a_figure_and_goes_on(tmp_path: Path, short: None) -> None:
    path, threads = tmp_path / "sweeps" / "cpu-5.json", torch.get_num_threads()
    finished = run("--count", "3", "--seconds", "300", "--output", str(path))
    assert finished.exit_code == 0, finished.output
    assert torch.get_num_threads() == threads
    found = Sweep.load(path)
    assert [row.index for row in found.rows] == [0, 1, 2]
    assert (found.seed, found.device, found.dtypes, found.threads) == (5, "cpu", ["float32", "float64"], 1)
    assert found.machine["cpu"] and found.ceilings["float32"]["special_functions_per_second"] == 1e13
    for row, (workload, dtype) in zip(found.rows, drawn(5, 3, "cpu", found.dtypes), strict=True):
        assert (row.workload, row.shape, row.batch, row.dtype) == (workload.name, workload.shape, workload.batch, dtype)
        assert set(row.times) >= {"v3", "auto", "v2"} and row.broken == []
        assert all(row.us(who, of_pass) for who in ("v3", "auto", "v2") for of_pass in PASSES)
        assert row.auto in ("fused", "batched")
    assert "auto over batched, fwd+bwd: " in finished.output
    assert "failed: 0 of 3 rows" in finished.output
    assert path.with_suffix(".svg").read_text().count("<!-- efficiency") == 1

    before = path.read_text()
    more = run("--count", "4", "--resume", "--output", str(path), "--against", str(path), "--no-figure")
    assert more.exit_code == 0, more.output
    after = Sweep.load(path)
    assert after.rows[:3] == found.rows and len(after.rows) == 4
    assert "3 rows that are in both, fwd: geometric mean 1.00x, worst 1.00x" in more.output
    assert json.loads(before)["rows"] == json.loads(path.read_text())["rows"][:3]
    other = run("--count", "4", "--resume", "--output", str(path), "--dtype", "float32")
    assert other.exit_code == 2
    assert "--resume should go on with the same sweep on the same machine" in other.output


def test_a_sweep_ends_in_time_and_at_ctrl_c(tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.json"
    assert run("--count", "3", "--seconds", "0", "--output", str(path)).exit_code == 0
    assert Sweep.load(path).rows == []
    measure = sweep_rows.measure_row

    def interrupted(workload: Workload, dtype: str, index: int, *rest: Any) -> SweepRow:
        if index == 2:
            raise KeyboardInterrupt
        return measure(workload, dtype, index, *rest)

    monkeypatch.setattr(sweep_rows, "measure_row", interrupted)
    finished = run("--count", "5", "--output", str(path))
    assert finished.exit_code == 130
    assert "saved 2 of 5 rows" in finished.output
    assert len(Sweep.load(path).rows) == 2


def test_a_row_that_raises_is_kept_as_failed(tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, *rest: Any) -> Call:
        if name == "v3":
            raise RuntimeError("no such kernel")
        return build(name, *rest)

    monkeypatch.setattr(sweep_rows, "build", failing)
    path = tmp_path / "cpu.json"
    finished = run("--count", "2", "--output", str(path))
    assert finished.exit_code == 1
    assert "failed: 2 of 2 rows" in finished.output
    assert [row.broken for row in Sweep.load(path).rows] == [["RuntimeError: no such kernel"]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device should be cpu or cuda"),
        (["--dtype", "tf32"], "--dtype should be one of float32, bfloat16, float16, float64 on cpu"),
        (["--threads", "100000"], "--threads should be between 1 and"),
    ],
)
def test_options_are_refused(options: list[str], message: str) -> None:
    finished = run("--count", "1", *options)
    assert finished.exit_code == 2
    assert message in " ".join(finished.output.split())


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    for damaged in ("{}", "[]", "no json"):
        path.write_text(damaged)
        finished = run("--count", "1", "--resume", "--output", str(path))
        assert finished.exit_code == 2
        assert "should be a results file of `python -m benches.sweep`" in finished.output


# On a GPU, as far as it can be seen without one.


def test_first_calls_are_made_with_the_switch_that_a_row_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def noted(name: str, workload: Workload, *rest: Any) -> Call:
        seen[workload.name] = torch.backends.cuda.matmul.allow_tf32
        if workload.name == "2":
            raise RuntimeError("no such kernel")
        return build(name, workload, *rest)

    monkeypatch.setattr(sweep_rows, "build", noted)
    seconds = {workload.name: sweep_rows._first_call(workload, dtype) for workload, dtype in first_rows()}
    assert seen == {"0": False, "1": True, "2": False, "3": True, "4": False}
    assert [set(seconds[str(i)]) for i in range(5)] == [set(PASSES), set(PASSES), set(), set(PASSES), set(PASSES)]


def first_rows() -> list[tuple[Workload, str]]:
    return [
        (Layer(str(i), "kronecker", 4, (4, 6), (5, 3), "cpu", (), "this test"), dtype)
        for i, dtype in enumerate(("float32", "tf32", "float32", "tf32", "float64"))
    ]


@pytest.mark.long
def test_first_calls_are_made_in_processes_of_one_core() -> None:
    rows: list[tuple[Workload, str]] = [
        *first_rows(),
        (Block("block", (4, 8, 4), "relu", 4, "cpu", (), "this test"), "float32"),
    ]
    seconds = sweep_rows._first_calls(rows, 2)
    assert list(seconds) == [workload.name for workload, _ in rows]
    assert all(set(of_row) == set(PASSES) and min(of_row.values()) > 0 for of_row in seconds.values())


def test_predictions_are_of_the_plan_that_runs_for_the_rows_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu.of(90)
    monkeypatch.setattr(sweep_plans, "gpu_limits", lambda device: (gpu.arch, gpu.sms, gpu.shared))
    workload = Layer("a pair", "kronecker", 300, (32, 32), (32, 32), "cpu", (), "this test")
    call = build("v3", workload, draw_tensors(workload, "bfloat16"))
    made = plan(Chain.of(workload.spec, False, "identity"), "bfloat16", SOME, gpu)
    assert sweep_plans.predicted_us(call) == sum(p.us_of(300) for p in made.passes) > 0
    block = Block("a block", (16, 32, 16), "relu", 300, "cpu", (), "this test")
    call = build("v3", block, draw_tensors(block, "bfloat16"))
    (stack,) = call.function.stacks  # type: ignore[attr-defined]
    chains = tuple(layer.chain for layer in stack.layers)
    made = plan_stack(chains, "bfloat16", SOME, gpu)
    assert sweep_plans.predicted_us(call) == sum(p.us_of(300) for p in made.passes) > 0


def test_candidates_are_installed_one_by_one_and_the_chosen_plan_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, installed = Gpu.of(90), list[str]()
    workload = Layer("a pair", "kronecker", 300, (32, 32), (32, 32), "cpu", (), "this test")
    call = build("v3", workload, draw_tensors(workload, "bfloat16"))
    text = Chain.of(workload.spec, False, "identity").text

    def install(chain: str, dtype: torch.dtype, batch_class: int, device: int, plan: str) -> None:
        assert (chain, dtype, batch_class) == (text, torch.bfloat16, class_of(SOME))
        installed.append(plan)
        if len(installed) == 2:
            raise CompileError("not this one")

    def timed(calls: dict[str, list[Call]], of_pass: str, effort: Any) -> Any:
        assert of_pass == "forward" and list(calls.values()) == [[call]]
        return {name: Timing(10.0 * len(installed), 0.0, 5) for name in calls}, {}

    monkeypatch.setattr(sweep_plans, "gpu_limits", lambda device: (gpu.arch, gpu.sms, gpu.shared))
    monkeypatch.setattr(sweep_plans, "install", install)
    monkeypatch.setattr(sweep_plans, "time_cuda", timed)
    found = sweep_plans.candidates([call], sweep_rows.EFFORTS["cuda"])
    ways = schemes(text, "bfloat16", class_of(300), gpu)
    assert len(ways) > 2
    assert installed == [way.plan.text() for way in ways] + [plan_of(text, "bfloat16", class_of(300), gpu).text()]
    assert list(found.values()) == [10.0 * i for i in range(1, len(ways) + 1) if i != 2]


def test_pytorch_reads_the_kernel_that_measures_special_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, make = [], torch.rand

    def on_cpu(*sizes: int, device: str, **rest: Any) -> torch.Tensor:
        assert device == "cuda"
        return make(*sizes, **rest)

    def launched(code: str, name: str, *rest: Any) -> None:
        asked.append((code, name))

    monkeypatch.setattr(torch, "rand", on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_jiterator_compile_and_launch_kernel", launched, raising=False)
    for dtype, step in (("float64", "exp(-x)"), ("tf32", "ex2.approx.ftz.f32")):
        rate, _ = ceilings._special_rate_of_gpu(dtype)
        assert rate is not None and rate > 0
        assert asked[-1][1] == "special" and step in asked[-1][0]

    def refused(*_: Any) -> None:
        raise RuntimeError("no compiler\nfor this")

    monkeypatch.setattr(torch._C, "_cuda_jiterator_compile_and_launch_kernel", refused)
    assert ceilings._special_rate_of_gpu("float32") == (None, "not measured: no compiler")


# What is said of rows.


def row(
    index: int, v3: float, auto_us: float, v2: float = 100.0, structure: str = "kronecker", **rest: Any
) -> SweepRow:
    times = {"v3": v3, "auto": auto_us, "v2": v2}
    timings = {who: {of_pass: Timing(us, 0.0, 5) for of_pass in PASSES} for who, us in times.items()}
    floors = {"forward": 20.0, "forward_backward": 40.0}
    made = SweepRow(f"1:{index}", "8·8", 7, rest.pop("dtype", "float32"), 1, "drawn", floors, timings)
    made.index, made.structure, made.is_block = index, structure, structure == "block"
    for name, value in rest.items():
        setattr(made, name, value)
    return made


def test_spreads() -> None:
    spread = Spread.of([4.0, 1.0, None, 2.0])
    assert spread is not None
    assert (spread.count, spread.mean, spread.median, spread.worst) == (3, pytest.approx(2.0), 2.0, 1.0)
    assert (spread.tenth, spread.ninetieth) == (pytest.approx(1.2), pytest.approx(3.6))
    assert Spread.of([None]) is None


def test_shares_of_auto_predictions_and_choices() -> None:
    rows = [
        row(0, 50.0, 50.0, predicted_us=60.0, candidates_us={"a": 49.0, "b": 70.0}),
        row(1, 200.0, 102.0, predicted_us=100.0, candidates_us={"a": 80.0}),
        row(2, 200.0, 200.0, shape="9·9", first_seconds={"forward": 0.5, "forward_backward": 2.0}),
        row(3, 90.0, 103.0, auto="batched"),
    ]
    text = "\n".join(sweep_tables.sentences(rows))
    assert "auto over batched, fwd: 50% of 4 rows slower, 25% below 0.97" in text
    assert "worst 0.50x (kronecker 9·9, float32, 7 samples)" in text
    assert "predicted over measured, forward: 50% of 2 rows within 30%, geometric mean 0.77" in text
    assert "the best that was measured over auto, forward: 50% of 2 rows within 5 %" in text
    assert "first training step behind it, several rows at once: median 2.00 s, worst 2.00 s" in text
    found = {(name, of_pass): spread for name, of_pass, spread in sweep_tables.efficiencies(rows)}
    assert found["kronecker, float32", "forward"].worst == pytest.approx(0.1)
    assert found["fp32 fp64, floor from 5 us", "forward_backward"].count == 4
    assert ("bf16 fp16 tf32, floor from 5 us", "forward") not in found


def test_report_writes_sweeps_of_a_machine_together(tmp_path: Path) -> None:
    page, readme, folder = tmp_path / "tables.md", tmp_path / "README.md", tmp_path / "results"
    machine = {"cpu": "a CPU", "cores": 2, "l2": "1M", "l3": None, "instruction_set": "avx2", "torch": "2.11"}
    for seed, v3 in ((1, 40.0), (2, 10.0)):
        rows = [row(0, v3, 50.0), row(1, v3, 50.0, structure="block")]
        made = Sweep({**machine, "date": "2026-01-01"}, {}, rows, seed, "cpu", ["float32"], 1)
        made.save(folder / "sweeps" / f"cpu-{seed}.json")
    another = {**machine, "instruction_set": "avx512", "date": "2026-01-01"}
    Sweep(another, {}, [row(0, 20.0, 50.0)], 3, "cpu", ["float32"], 1).save(folder / "sweeps" / "cpu-3.json")
    page.write_text("# Title\n\n<!-- benches:begin sweeps -->\n<!-- benches:end sweeps -->\n")
    readme.write_text("# Title\n")
    options = ["--page", str(page), "--readme", str(readme), "--results", str(folder)]
    assert CliRunner().invoke(report.app, [*options, "--check"]).exit_code == 1
    written = CliRunner().invoke(report.app, options)
    assert written.exit_code == 0, written.output
    text = page.read_text()
    assert "4 rows of the seeds 1, 2." in text
    assert "auto over batched, fwd: 0% of 4 rows slower" in text
    assert "| kronecker, float32 | fwd | 2 | 1.000 |" in text
    assert "1 rows of the seeds 3." in text
    for name in ("a-cpu-avx2-1-threads.svg", "a-cpu-avx512-1-threads.svg"):
        assert f"](results/sweeps/{name})" in text
        assert (folder / "sweeps" / name).exists()
    assert CliRunner().invoke(report.app, [*options, "--check"]).exit_code == 0
    page.write_text("# Title\n")
    missing = CliRunner().invoke(report.app, options)
    assert missing.exit_code == 2
    assert "should hold the lines <!-- benches:begin sweeps -->" in missing.output


def test_few_sets_of_tensors_are_asked_for_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert sets_needed(1 << 20, 64) == 64
    assert sets_needed(1 << 20) == 101
    assert sets_needed(10 << 20, 64) == 11
