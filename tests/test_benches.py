"""The benchmarks' registry, the floors' arithmetic, what is refused, a quick run from timing to the tables."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))  # benches is not installed with the package

from benches import compare, report, run, workloads
from benches.ceilings import measure_ceilings, tf32_allowed
from benches.floor import DATASHEETS, DTYPES, Ceilings, ImpossibleFigureError, Work, dense_work, work
from benches.floor import refuse_impossible as refuse
from benches.results import Results, Row, efficiency_means, geometric_means, lead_means
from benches.subjects import SUBJECTS, Call, Tensors, UnavailableError, build, disagreement, tolerances, wrong
from benches.tables import markdown, means
from benches.timing import Timing, peak_bytes, sets_needed
from benches.workloads import PASSES, WORKLOADS, Block, Layer, Workload, published, select

CASES = [(workload, dtype) for workload in WORKLOADS for dtype in workload.dtypes]
TINY = Layer("tiny", "kronecker", 8, (4, 6), (4, 3), "cpu", ("float32",), "this test")
TINY_BLOCK = Block("8:mlp-tiny", (4, 6, 5, 3), "relu", 8, "cpu", ("float32",), "this test")
LAYERS = [workload for workload in WORKLOADS if isinstance(workload, Layer)]
BLOCKS = [workload for workload in WORKLOADS if isinstance(workload, Block)]


# The registry.


def test_names_are_unique_and_sources_given() -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(set(names)) == len(names)
    assert all(workload.source for workload in WORKLOADS)
    assert {workload.device for workload in WORKLOADS} == {"cpu", "cuda"}
    assert all(dtype in DTYPES for _, dtype in CASES)


@pytest.mark.parametrize("workload", LAYERS, ids=lambda workload: workload.name)
def test_every_layer_saves_parameters(workload: Layer) -> None:
    spec = workload.spec
    assert spec.rank == workload.rank
    assert spec.parameter_count < spec.in_features * spec.out_features
    assert workload.batch > 0
    assert workload.shape


@pytest.mark.parametrize("workload", BLOCKS, ids=lambda workload: workload.name)
def test_every_block_is_pytorchs_own_network(workload: Block) -> None:
    ours, dense = workload.make("v3"), workload.dense()
    assert [p.shape for p in ours.parameters()] == [p.shape for p in dense.parameters()]
    assert sum(p.numel() for p in dense.parameters()) == workload.costs[0]
    assert dense(torch.empty(1, workload.features[0], device="meta")).shape == (1, workload.features[1])
    assert "mlp-" in workload.name
    assert workload.shape.endswith(workload.activation)


def test_monarch_rows_have_the_blocks_they_name() -> None:
    rows = {workload.name: workload.spec for workload in LAYERS if workload.structure == "monarch"}
    assert rows["512:gpt2s_fc1"].blocks == rows["gpt2s_fc1"].blocks == (4, 4)
    assert (rows["btt_r4"].blocks, rows["btt_r4"].rank, rows["btt_r4"].out_features) == ((32, 48), 4, 3072)
    assert rows["256:sqrt4096"].weight_shapes == ((64, 64, 64), (64, 64, 64))


@pytest.mark.parametrize(("workload", "dtype"), [(w, d) for w, d in CASES if w.device == "cuda"])
def test_every_cuda_row_has_peers(workload: Workload, dtype: str) -> None:
    peers = published(workload, dtype)
    if dtype == "float16" and isinstance(workload, Layer):  # nobody was measured in it
        assert peers == {}
        return
    assert list(peers) == list(PASSES)[: len(peers)] and peers, "forward, and maybe backward"
    assert all(peer["us"] > 0 and peer["who"] for peer in peers.values())
    assert sorted(peer["us"] for peer in peers.values()) == [peer["us"] for peer in peers.values()]


def test_peers_has_no_row_too_many() -> None:
    rows = json.loads((Path(run.__file__).parent / "peers.json").read_text())["rows"]
    known = {workload.name: set(workload.dtypes) for workload in WORKLOADS if workload.device == "cuda"}
    assert set(rows) == set(known)
    assert all(set(dtypes) <= known[name] for name, dtypes in rows.items())


def test_select() -> None:
    assert [w.name for w, _ in select("cpu", ["1024:*"], ["float64"])] == [
        "1024:32^2",
        "1024:64^2",
        "1024:8^4",
        "1024:16^3",
        "1024:4^6",
    ]
    assert select("cuda", ["1024:*"]) == []
    assert len(select("cpu")) == 24 + 6
    assert [w for w, _ in select("cuda", ["mlp-*"], ["tf32"])] == [w for w in BLOCKS if w.device == "cuda"]


# Floors.


def ceilings(datasheet: dict[str, float] | None = None, rate: float = 746.2e12) -> Ceilings:
    return Ceilings(lambda _: 4.17e12, rate, "a test", datasheet)


def test_work_of_two_factors_by_hand() -> None:
    """1024 samples of 64·64 in bfloat16: x and y are 8 MiB each, a factor is 8 KiB."""
    forward, backward = work(next(w for w in WORKLOADS if w.name == "fk-64^2"), 2)
    assert forward == Work(2 * (8 << 20) + 2 * 8192, 2 * 1024 * 2 * 64**3)
    assert backward == Work(3 * (8 << 20) + 4 * 8192, 2 * forward.flops)
    assert ceilings().floor(forward) * 1e6 == pytest.approx(4.03, abs=0.01)
    assert ceilings().floor(forward, backward) * 1e6 == pytest.approx(10.07, abs=0.01)


def test_work_of_rectangles_counts_the_cheapest_order() -> None:
    forward, backward = work(TINY, 4)
    assert forward.bytes == 4 * (8 * (24 + 12) + 16 + 18)
    assert backward.bytes == 4 * (8 * (2 * 24 + 12) + 2 * (16 + 18))
    assert forward.flops == 2 * 8 * (4 * 6 * 3 + 4 * 4 * 3)  # 6 -> 3 first
    dense, _ = dense_work(TINY, 4)
    assert dense == Work(4 * (8 * (24 + 12) + 24 * 12), 2 * 8 * 24 * 12)


def test_work_of_a_block_leaves_out_what_is_between_its_layers() -> None:
    weights, biases = 4 * 6 + 6 * 5 + 5 * 3, 6 + 5 + 3
    forward, backward = work(TINY_BLOCK, 2)
    assert forward == Work(2 * (8 * (4 + 3) + weights + biases), 2 * 8 * weights)
    assert backward == Work(2 * (8 * (4 + 3 + 4) + 2 * (weights + biases)), 2 * forward.flops)
    assert dense_work(TINY_BLOCK, 2) == (forward, backward)


def test_floor_takes_the_larger_bound_of_each_pass() -> None:
    limits = Ceilings(lambda size: 100.0 if size > 50 else 1000.0, 10.0, "a test")
    assert limits.floor(Work(100, 5)) == 1.0
    assert limits.floor(Work(50, 5)) == 0.5  # in a cache: 0.05 s of bytes, 0.5 s of arithmetic
    assert limits.floor(Work(100, 5), Work(100, 20)) == 3.0


def test_cpu_figures_below_the_floor_are_refused() -> None:
    work = (Work(0, 1000),)
    limits = ceilings(rate=1000.0)
    refuse("v3", 0.95, work, "float32", limits)
    with pytest.raises(ImpossibleFigureError, match=r"^v3: at least 1000000\.0 us .* came out as 800000\.0 us"):
        refuse("v3", 0.8, work, "float32", limits)


@pytest.mark.parametrize(
    ("work", "dtype", "unit"),
    [(Work(int(4.9e12), 0), "float64", "bytes"), (Work(0, int(68e12)), "float64", "FLOPs")],
)
def test_figures_above_the_datasheet_are_refused(work: Work, dtype: str, unit: str) -> None:
    limits = ceilings(DATASHEETS["H200"])
    with pytest.raises(ImpossibleFigureError, match=f"v2: at most .* {unit}/s were expected, the datasheet's"):
        refuse("v2", 1.0, (work,), dtype, limits)
    refuse("v2", 1.1, (work,), dtype, limits)
    refuse("v2", 1.0, (Work(0, int(68e12)),), "bfloat16", limits)


def test_refused_times_are_kept_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_fast(calls: dict[str, Any], of_pass: str, effort: Any) -> dict[str, Timing]:
        return {name: Timing(1e-6 if name == "v3" else 1e9, 0.0, 1) for name in calls}

    monkeypatch.setattr(run, "time_cpu", too_fast)
    row = run.measure_row(TINY, "float32", 1, ["v2", "v3"], ceilings(), run.QUICK)
    assert "v3" not in row.times
    assert set(row.times["v2"]) == set(PASSES)
    assert len(row.broken) == 2


@pytest.mark.long
def test_measured_ceilings_are_plausible() -> None:
    limits = measure_ceilings("cpu", "float32")
    assert 1e9 < limits.rate < 1e14
    assert 1e8 < limits.bandwidth(1 << 20) < 1e13
    assert limits.datasheet is None


def test_tf32_switch_is_restored() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with tf32_allowed(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_cuda_inputs_rotate_through_more_than_twice_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert sets_needed(1 << 20) == 121
    assert sets_needed(100 << 20) == 3
    assert sets_needed(200 << 20) == 2
    assert sets_needed(500 << 20) == 1


# Subjects.


def test_subjects_agree_and_v3_takes_less_memory() -> None:
    workload = next(w for w in WORKLOADS if w.name == "1024:8^4")
    tensors = Tensors.random(workload, "float32")
    calls = {name: build(name, workload, tensors) for name in ("v1", "v2", "v3")}
    reference = calls["v2"].run("forward_backward")
    assert len(reference) == 2 + 4
    assert all(max(disagreement(call, reference[:2])) < 1e-5 for call in calls.values())
    assert peak_bytes(calls["v3"]) >= 1024 * 4096 * 4
    assert peak_bytes(calls["v2"]) > peak_bytes(calls["v3"])


def test_a_wrong_result_is_seen() -> None:
    tensors = Tensors.random(TINY, "float32")
    call = build("v2", TINY, tensors)
    y, *gradients = call.run("forward_backward")
    assert disagreement(call, (2 * y, *gradients)) == (pytest.approx(0.5), 0.0)
    assert disagreement(call, (y * float("nan"), *gradients)) == (float("inf"), 0.0)
    last = (y, *gradients[:-1], 2 * gradients[-1])
    assert disagreement(call, last) == (0.0, pytest.approx(0.5))
    assert disagreement(call, last[:2]) == (0.0, 0.0)
    assert wrong(call, last, (0.1, 0.6)) is None
    assert wrong(call, last, (0.1, 0.4)) == "differs from v2 by 0.0e+00, in gradients by 5.0e-01"


def test_gradients_may_differ_where_rounding_crosses_a_relu() -> None:
    three = math.sqrt(3)  # layers, which each round
    assert tolerances(TINY_BLOCK, "bfloat16") == (5e-2 * three, 5e-2 * three + math.sqrt(2 * 2.0**-7))
    assert tolerances(TINY_BLOCK, "tf32") == (1e-2 * three, 1e-2 * three + math.sqrt(2 * 2.0**-10))
    smooth = Block("8:mlp-smooth", (4, 6, 5, 3), "tanh", 8, "cpu", ("float32",), "this test")
    assert tolerances(smooth, "bfloat16") == (5e-2 * three, 5e-2 * three)
    assert tolerances(TINY, "bfloat16") == (5e-2, 5e-2)


def test_subjects_of_a_block_agree_in_all_gradients() -> None:
    tensors = Tensors.random(TINY_BLOCK, "float32")
    reference = build("v2", TINY_BLOCK, tensors).run("forward_backward")
    assert len(reference) == 2 + 2 * 3
    for name in ("v3", "dense"):
        call = build(name, TINY_BLOCK, tensors)
        assert call.weights is tensors.weights
        assert max(disagreement(call, reference)) < 1e-5
    with pytest.raises(UnavailableError, match="the same as v2"):
        build("v1", TINY_BLOCK, tensors)


@pytest.mark.parametrize("name", ["v3", "dense"])
def test_a_wrong_weight_gradient_of_a_block_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Call):
        def run(self, of_pass: str) -> tuple[torch.Tensor, ...]:
            *found, last = super().run(of_pass)
            return (*found, last if of_pass == "forward" else 2 * last)

    def build_wrongly(built: str, workload: Workload, tensors: Tensors) -> Call:
        call = build(built, workload, tensors)
        return Wrong(call.function, call.x, call.grad_y, call.weights) if built == name else call

    monkeypatch.setattr(run, "build", build_wrongly)
    row = run.measure_row(TINY_BLOCK, "float32", 1, ["v2", "v3", "dense"], ceilings(), run.QUICK)
    assert set(row.times) == {"v2", "v3", "dense"} - {name}
    assert row.notes[name].startswith("wrong result: it differs from v2 by ")
    assert [message.split(" differs")[0] for message in row.broken] == ["8:mlp-tiny float32: v3"] * (name == "v3")


def test_subjects_say_why_they_are_unavailable() -> None:
    workload = next(w for w in WORKLOADS if w.name == "64:64^3")
    x = torch.empty(1, workload.spec.in_features)
    with pytest.raises(UnavailableError, match=r"its weight would take 256\.0 GiB"):
        build("dense", workload, Tensors(x, x, []))
    if "pyfastkron" not in sys.modules:
        monarch = next(w for w in WORKLOADS if w.name == "512:gpt2s_fc1")
        with pytest.raises(UnavailableError, match="pyfastkron"):
            build("fastkron", monarch, Tensors(x, x, []))


# From a run to README.


def quick_run(output: Path, *options: str) -> Any:
    arguments = [
        "--quick",
        "--select",
        "16:*",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--output",
        str(output),
    ]
    return CliRunner().invoke(run.app, [*arguments, *options])


@pytest.mark.long
def test_a_quick_run_saves_results(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    output = tmp_path / "quick.json"
    finished = quick_run(output, "--plot")
    assert finished.exit_code in (0, 1), finished.output  # 1: refused figures, possible in so short a run
    assert "16:32^2" in finished.output
    assert torch.get_num_threads() == before
    data = json.loads(output.read_text())
    assert data["machine"]["threads"] == [1]
    assert data["machine"]["torch"] == torch.__version__
    (row,) = data["rows"]
    assert row["floor_us"]["forward_backward"] > row["floor_us"]["forward"] > 0
    assert row["times"]["v1"]["forward"]["us"] > 0
    assert set(row["times"]) | set(row["notes"]) <= set(SUBJECTS)
    assert row["peak_bytes"]["v2"] >= row["peak_bytes"]["v3"] >= 16 * 1024 * 4
    assert output.with_suffix(".svg").read_text().startswith("<?xml")
    assert Results.load(output).rows[0].us("v1", "forward") == row["times"]["v1"]["forward"]["us"]


def markers(name: str) -> str:
    return f"<!-- benches:begin {name} -->\n<!-- benches:end {name} -->\n"


@pytest.mark.long
def test_a_block_goes_from_a_run_to_tables_report_and_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "WORKLOADS", (TINY, TINY_BLOCK))
    page, readme, output = tmp_path / "tables.md", tmp_path / "README.md", tmp_path / "results" / "cpu.json"
    options = ["--quick", "--select", "*tiny", "--threads", "1", "--plot", "--output", str(output)]
    finished = CliRunner().invoke(run.app, options)
    assert finished.exit_code in (0, 1), finished.output  # 1: refused figures, possible in so short a run
    assert "v2/v3" in finished.output
    assert "dense/v3" in finished.output
    layer, block = Results.load(output).rows
    assert (layer.is_block, block.is_block) == (False, True)
    assert block.shape == "4-6-5-3, relu"
    assert set(block.times) == {"v2", "v3", "dense"}
    assert block.speedup("forward") == block.us("dense", "forward") / block.us("v3", "forward")
    assert (tmp_path / "results" / "cpu.svg").exists()
    assert "<!-- 8:mlp-tiny -->" in (tmp_path / "results" / "cpu-blocks.svg").read_text()

    page.write_text(markers("cpu"))
    readme.write_text(markers("cpu-summary"))
    report_options = ["--page", str(page), "--readme", str(readme), "--results", str(output.parent)]
    assert CliRunner().invoke(report.app, report_options).exit_code == 0
    means = re.findall(r"^\| float32, 1 thread \|(?: \d+\.\d\dx / \d+\.\d\dx \|)+$", readme.read_text(), re.M)
    assert len(means) == 1
    assert "| layers over v2 | layers over nn.Linear | blocks over nn.Linear |" in readme.read_text()
    layers, blocks = page.read_text().split("<details><summary>Blocks</summary>")
    assert "| tiny | float32 | 1 | " in layers
    assert "Blocks, v3 over nn.Linear, geometric mean, float32, 1 thread: " in layers
    assert "](results/cpu-blocks.svg)" in layers
    assert "| 8:mlp-tiny (4-6-5-3, relu) | float32 | 1 | fwd | " in blocks
    assert CliRunner().invoke(report.app, [*report_options, "--check"]).exit_code == 0

    changes = compare.compare(Results.load(output), Results.load(output))
    assert {change.key.subject for change in changes if change.key.row.workload == "8:mlp-tiny"} == set(block.times)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device should be cpu or cuda"),
        (["--dtype", "int8"], "--dtype should be one of"),
        (["--implementation", "v4"], "--implementation should be one of"),
        (["--threads", "100000"], "--threads should be between 1 and"),
        (["--select", "nothing"], "matches no cpu workload"),
    ],
)
def test_run_refuses_options(options: list[str], message: str) -> None:
    finished = CliRunner().invoke(run.app, options, env={"COLUMNS": "300"})
    assert finished.exit_code == 2
    assert message in " ".join(finished.output.split())


def made_up(speedup: float = 2.0, dtype: str = "float32") -> Row:
    times = {"v2": 100.0, "v3": 100.0 / speedup}
    timings = {name: {of_pass: Timing(us, 1.0, 5) for of_pass in PASSES} for name, us in times.items()}
    floors = {"forward": 25.0, "forward_backward": 40.0}
    return Row("16:32^2", "32·32", 16, dtype, 1, "a test", floors, timings)


def made_up_results(*rows: Row) -> Results:
    names = {"cpu": "a CPU", "cores": 2, "l2": "1M", "l3": None, "instruction_set": "avx2"}
    return Results({**names, "torch": "2.11", "date": "2026-01-01"}, {}, list(rows))


def test_geometric_means() -> None:
    means = geometric_means([made_up(2.0), made_up(8.0), made_up(3.0, "float64")])
    assert means["float32", 1]["forward"] == pytest.approx(4.0)
    assert means["float64", 1]["forward_backward"] == pytest.approx(3.0)


def test_means_over_the_published_and_of_the_floor() -> None:
    rows = [made_up(2.0), made_up(8.0), made_up(3.0, "float64")]
    for row, floor in zip(rows, (25.0, 4.0, 25.0), strict=True):
        row.floor_us["forward"] = floor
        row.published = {"forward": {"us": 100.0, "who": "FastKron"}} if row.dtype == "float32" else {}
    v3 = [row.us("v3", "forward") for row in rows]
    assert lead_means(rows) == {"float32": (pytest.approx(math.sqrt(1e4 / (v3[0] * v3[1]))), 100 / max(v3[:2]))}
    assert efficiency_means(rows) == {"float32": pytest.approx(25 / v3[0]), "float64": pytest.approx(25 / v3[2])}
    rows[0].shape = "4096>4096, blocks (64, 64), rank 1"  # not a Kronecker product
    assert list(efficiency_means(rows)) == ["float64"]


def test_a_block_is_compared_with_the_dense_layers_and_the_published() -> None:
    row = made_up()
    row.workload, row.shape, row.threads, row.kernels, row.is_block = "mlp-x", "4-6-3, relu", None, 2, True
    row.times["dense"] = {of_pass: Timing(80.0, 1.0, 5) for of_pass in PASSES}
    row.published = {"forward": {"us": 75.0, "who": "torch.compile"}}
    assert row.speedup("forward") == pytest.approx(1.6)
    assert not row.is_kronecker
    lines = markdown([row])
    assert (
        "| mlp-x (4-6-3, relu) | float32 | fwd | 25.0 | 80.0 | 50.0 | 1.60x | 0.50 | 75.0 (torch.compile) | 1.50x | 2 |"
        in lines
    )
    assert "|  | float32 | fwd+bwd | 40.0 | 80.0 | 50.0 | 1.60x | 0.80 | - | - |  |" in lines
    assert means([row])[::2] == [
        "Blocks, v3 over nn.Linear, geometric mean, float32: 1.60x fwd and 1.60x fwd+bwd.",
        "Blocks, v3 over the best published, forward, geometric mean: float32 1.50x (least 1.50x).",
        "Efficiency, forward, blocks with a floor of 5 µs and more: float32 0.50.",
    ]
    del row.times["dense"]
    assert row.speedup("forward") is None


def test_layers_without_published_peers_stand_beside_nn_linear() -> None:
    row = made_up()
    row.times["dense"] = {of_pass: Timing(us, 1.0, 5) for of_pass, us in zip(PASSES, (600.0, 700.0), strict=True)}
    ours = f"{row.us('v2', 'forward'):.0f} | {row.us('v3', 'forward'):.1f}"
    over = " / ".join(f"{us / row.us('v3', of_pass):.2f}x" for of_pass, us in zip(PASSES, (600, 700), strict=True))
    without = made_up()  # too large, too slow, or results of before it was timed
    lines = markdown([row, without])
    assert "| nn.Linear µs | v2 µs | v3 µs | over nn.Linear | speed-up fwd |" in lines[2]
    assert f"| 16:32^2 | float32 | 1 | 600 | {ours} | {over} | " in lines[4]
    assert f"| 16:32^2 | float32 | 1 | - | {ours} | - / - | " in lines[5]


def test_results_of_before_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    made_up_results(made_up()).save(path)
    data = json.loads(path.read_text())
    del data["rows"][0]["is_block"]
    path.write_text(json.dumps(data))
    (row,) = Results.load(path).rows
    assert not row.is_block
    assert row.speedup("forward") == 2


def test_report_writes_both_tables_and_check_sees_stale_ones(tmp_path: Path) -> None:
    page, readme, folder = tmp_path / "docs" / "tables.md", tmp_path / "README.md", tmp_path / "results"
    page.parent.mkdir()
    page.write_text(f"# Title\n\n{markers('cpu')}\nThe end.\n")
    readme.write_text(f"# Title\n\n{markers('cpu-summary')}\nThe end.\n")
    options = ["--page", str(page), "--readme", str(readme), "--results", str(folder)]
    made_up_results(made_up()).save(folder / "cpu.json")

    stale = CliRunner().invoke(report.app, [*options, "--check"])
    assert stale.exit_code == 1
    assert stale.output.count("out of date") == 2
    assert CliRunner().invoke(report.app, options).exit_code == 0
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- benches:begin cpu -->\na CPU, 2 cores, 1M L2, avx2 kernels")
    assert "| 16:32^2 | float32 | 1 | - | 100 | 50.0 | - / - | 2.00x | 2.00x | 0.50 / 0.80 |" in text
    assert "](../results/cpu.svg)" in text
    assert text.endswith("<!-- benches:end cpu -->\n\nThe end.\n")
    means = readme.read_text()
    assert means.startswith("# Title\n\n<!-- benches:begin cpu-summary -->\na CPU, 2 cores, 1M L2, avx2 kernels")
    assert "| | layers over v2 |\n| --- | ---: |\n| float32, 1 thread | 2.00x / 2.00x |\n" in means
    assert "](results/cpu.svg)" in means
    assert means.endswith("<!-- benches:end cpu-summary -->\n\nThe end.\n")
    assert (folder / "cpu.svg").exists()
    assert CliRunner().invoke(report.app, [*options, "--check"]).exit_code == 0

    made_up_results(made_up(3.0)).save(folder / "cpu.json")
    assert CliRunner().invoke(report.app, [*options, "--check"]).exit_code == 1
    assert CliRunner().invoke(report.app, options).exit_code == 0
    page.write_text(text)  # one of the two is as it was
    stale = CliRunner().invoke(report.app, [*options, "--check"])
    assert stale.exit_code == 1
    assert stale.output.count("out of date") == 1


def test_a_plot_names_workloads_that_only_some_panels_have(tmp_path: Path) -> None:
    rows = [made_up(), made_up(3.0), made_up(4.0, "float64")]
    rows[0].workload, rows[1].workload, rows[2].workload = "one", "two", "two"
    report.draw(made_up_results(*rows), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<!-- one -->" in drawn
    assert "<!-- two -->" in drawn


def test_report_without_markers_or_results_says_so(tmp_path: Path) -> None:
    page, readme, folder = tmp_path / "tables.md", tmp_path / "README.md", tmp_path / "results"
    page.write_text("# Title\n")
    readme.write_text(markers("cpu-summary"))
    options = ["--page", str(page), "--readme", str(readme), "--results", str(folder)]
    made_up_results(made_up()).save(folder / "cpu.json")
    missing = CliRunner().invoke(report.app, options)
    assert missing.exit_code == 2
    assert "should hold the lines <!-- benches:begin cpu --> and <!-- benches:end cpu -->" in missing.output
    page.write_text(markers("h200"))
    unknown = CliRunner().invoke(report.app, options)
    assert unknown.exit_code == 2
    assert "there are none of h200" in unknown.output
    page.write_text(markers("cpu"))
    readme.write_text("# Title\n")
    missing = CliRunner().invoke(report.app, options)
    assert missing.exit_code == 2
    assert "should hold the lines <!-- benches:begin cpu-summary -->" in missing.output
    readme.write_text(markers("cpu-summary"))
    (folder / "cpu.json").write_text("{}")
    damaged = CliRunner().invoke(report.app, options)
    assert damaged.exit_code == 2
    assert "should be a results file of `python -m benches.run`" in damaged.output


def test_markdown_without_v3_shows_the_published_peer() -> None:
    row = made_up()
    del row.times["v3"]
    row.published = {"forward": {"us": 42.0, "who": "FastKron"}}
    lines = markdown([row])
    assert "| 16:32^2 | float32 | 1 | 25.0 | 42.0 (FastKron) | 100 | - | - | - / - | - | - | - / - | - |" in lines


# From one run to another.


def compared(tmp_path: Path, old: Results, new: Results) -> Any:
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for results, path in zip((old, new), paths, strict=True):
        results.save(Path(path))
    return CliRunner().invoke(compare.app, paths)


def timed(v3: float, iqr: float = 0.0, v2: float = 100.0, **machine: Any) -> Results:
    """Both passes of a row; v3 takes 100 us in the run that is compared with."""
    row = made_up()
    for name, us in (("v2", v2), ("v3", v3)):
        row.times[name] = {of_pass: Timing(us, iqr, 5) for of_pass in PASSES}
    results = made_up_results(row)
    results.machine |= machine
    return results


GPU = {"gpu": "a GPU", "gpu_l2": 1, "cuda": "13.0"}


@pytest.mark.parametrize(
    ("v3", "old_iqr", "new_iqr", "machine", "mark"),
    [
        (114.0, 0.0, 0.0, {}, ""),
        (116.0, 0.0, 0.0, {}, "slower"),
        (86.0, 0.0, 0.0, {}, ""),
        (84.0, 0.0, 0.0, {}, "faster"),
        (104.0, 0.0, 0.0, GPU, ""),
        (106.0, 0.0, 0.0, GPU, "slower"),
        (124.0, 15.0, 20.0, {}, ""),  # either one alone is less
        (126.0, 15.0, 20.0, {}, "slower"),
    ],
)
def test_a_time_is_marked_beyond_the_spread_of_both(
    v3: float, old_iqr: float, new_iqr: float, machine: dict[str, Any], mark: str, tmp_path: Path
) -> None:
    old, new = timed(100.0, old_iqr, **machine), timed(v3, new_iqr, **machine)
    marks = {change.key[1:]: change.mark for change in compare.compare(old, new)}
    assert marks == {(name, of_pass): mark if name == "v3" else "" for name in ("v2", "v3") for of_pass in PASSES}
    finished = compared(tmp_path, old, new)
    assert finished.exit_code == (mark == "slower"), finished.output
    assert ("v3 got slower: 2 times" in finished.output) == (mark == "slower")


def test_the_slower_come_first_and_only_v3_decides(tmp_path: Path) -> None:
    old, new = timed(100.0), timed(50.0, v2=200.0)
    new.rows[0].times["v3"]["forward"] = Timing(130.0, 0.0, 5)
    new.rows[0].times["v2"]["forward"] = Timing(150.0, 0.0, 5)
    order = [change.key[1:] for change in compare.compare(old, new)]
    backward = "forward_backward"
    assert order == [("v3", "forward"), ("v2", backward), ("v2", "forward"), ("v3", backward)]
    lines = [line.split() for line in compared(tmp_path, old, new).output.splitlines()]
    cells = ["16:32^2", "float32,", "1", "thread", "v3", "fwd", "100", "130", "1.30x", "±15%", "slower"]
    assert cells in [[cell for cell in line if cell != "│"] for line in lines]
    assert "v2: 2 slower, 0 faster of 2, new/old 1.75x in the median" in [" ".join(line) for line in lines]
    assert compared(tmp_path, timed(100.0), timed(50.0, v2=200.0)).exit_code == 0


@pytest.mark.parametrize("field", [{"workload": "w"}, {"shape": "s"}, {"batch": 1}, {"dtype": "d"}, {"threads": 2}])
def test_rows_are_matched_by_all_that_names_them(field: dict[str, Any], tmp_path: Path) -> None:
    old, new = timed(100.0), timed(200.0)
    for name, value in field.items():
        setattr(new.rows[0], name, value)
    finished = compared(tmp_path, old, new)
    assert finished.exit_code == 2
    assert "should share a time of v3" in finished.output
    old.rows += timed(100.0).rows
    old.rows[0].workload = "same"
    new.rows += timed(100.0).rows
    new.rows[1].workload = "same"
    finished = compared(tmp_path, old, new)
    assert finished.exit_code == 0, finished.output
    output = " ".join(finished.output.split())
    assert "only in the old file, all of: 16:32^2 (32·32, batch 16), float32, 1 thread" in output
    assert f"only in the new file, all of: {compare.RowKey.of(new.rows[0])}" in output


def test_a_time_that_v3_has_no_more_is_a_failure(tmp_path: Path) -> None:
    new = timed(100.0)
    del new.rows[0].times["v3"]["forward_backward"]
    del new.rows[0].times["v2"]["forward"]
    finished = compared(tmp_path, timed(100.0), new)
    assert finished.exit_code == 1
    output = " ".join(finished.output.split())
    assert "only in the old file, v3 fwd+bwd of: 16:32^2" in output
    assert "only in the old file, v2 fwd of: 16:32^2" in output
    assert "v3 got slower: 0 times; has no time any more: 1" in output
    assert compared(tmp_path, new, timed(100.0)).exit_code == 0
    del new.rows[0].times["v3"]
    assert compared(tmp_path, timed(100.0), new).exit_code == 2


def test_other_hardware_is_said_and_not_judged_other_software_is_judged(tmp_path: Path) -> None:
    other = compared(tmp_path, timed(100.0), timed(200.0, cpu="another CPU", l2="2M"))
    assert other.exit_code == 0
    assert "slower" in other.output
    assert "other hardware, nothing is judged: cpu a CPU, then another CPU, l2 1M, then 2M" in other.output
    host = compared(tmp_path, timed(100.0, **GPU), timed(200.0, **GPU, cpu="another CPU"))
    assert host.exit_code == 1
    software = compared(tmp_path, timed(100.0), timed(200.0, torch="2.12", instruction_set="avx512"))
    assert software.exit_code == 1
    assert "other software: instruction_set avx2, then avx512, torch 2.11, then 2.12" in software.output


def test_compare_refuses_what_is_no_results_file(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{}")
    finished = CliRunner().invoke(compare.app, [str(damaged), str(damaged)])
    assert finished.exit_code == 2
    assert "should be a results file of `python -m benches.run`" in finished.output
    assert CliRunner().invoke(compare.app, [str(damaged), str(tmp_path / "none.json")]).exit_code == 2


def test_only_blocks_with_large_products_leave_some_to_cublas() -> None:
    blocks = [w for w in WORKLOADS if isinstance(w, Block) and w.device == "cuda"]
    assert [w.name for w in blocks if w.leaves_to_cublas("tf32")] == ["mlp-ffn_768"]
    assert not any(w.leaves_to_cublas("float32") for w in blocks)
