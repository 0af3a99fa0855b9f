"""Plants faults in csrc, one at a time, and says which of them no test finds.

    python tests/plant.py                  all of them, which takes about an hour on two cores
    python tests/plant.py --only fsync     those whose name or file has this in it
    python tests/plant.py --list

Each fault is put into a copy of the repository, which is built and whose tests of that fault are run; then it is taken
out again. All these tests have to pass before the first one. A fault that all tests pass with survives, and is an
error: of the tests, not of the code. To add one, add a row.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
COPIED = ("csrc", "factorlayer", "tests", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in")
LIMIT_S = 1200  # for a build, or the tests of a fault: one that does not end is found as well


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in the file, is replaced by `new`; `tests` should find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, f"csrc/{file}", old, new, tuple(f"tests/{test}" for test in tests))


CACHE, RUNTIME, FUSED = "test_cache.py", "test_runtime.py", "test_fused.py"
HOSTILE, MANY, ACTIVATIONS = "test_hostile_text.py", "test_many_factors.py", "test_activations.py"
KEY = f"{CACHE}::test_the_key_of_a_kernel"
PLANS = f"{RUNTIME}::test_wrong_plans"
DIGESTS = f"{RUNTIME}::test_digests_of_every_length"
CALLS = (f"{FUSED}::test_wrong_raw_calls_raise",)
AT_ONCE = f"{FUSED}::test_weights_of_other_dimensions_are_not_taken_at_once"
EXACT = f"{FUSED}::test_small_integers_come_out_exactly"

FAULTS = (
    # runtime
    fault(
        "fsync",
        "runtime/cache.cpp",
        "return !fsync(file);",
        "return true;",
        f"{CACHE}::test_a_file_is_on_disk_before_it_has_its_name",
    ),
    fault("options-in-the-key", "runtime/cache.cpp", r'"\noptions " + key.options', r'"\noptions "', KEY),
    fault(
        "compiler-in-the-key",
        "runtime/cache.cpp",
        r'FACTORLAYER_VERSION "\ncompiler " + key.compiler)',
        r'FACTORLAYER_VERSION "\ncompiler ")',
        KEY,
    ),
    fault("name-in-the-key", "runtime/cache.cpp", r'"\nname " + key.name', r'"\nname "', KEY),
    fault("no-proof", "runtime/cache.cpp", "proof(contents)) != 0)", "proof(contents)) == 1000)", CACHE),
    fault(
        "compilers-size",
        "runtime/nvrtc.cpp",
        'version + " (" + std::to_string(file.st_size) + " bytes)"',
        'version + " (0 bytes)"',
        KEY,
    ),
    fault("sha256-padding", "runtime/sha256.cpp", "% 64 != 56", "% 64 != 55", DIGESTS),
    fault("sha256-rotation", "runtime/sha256.cpp", "rotate(e, 25)", "rotate(e, 24)", DIGESTS),
    fault(
        "sha256-last-block", "runtime/sha256.cpp", "done + 64 <= text.size()", "done + 64 < text.size() - 1", DIGESTS
    ),
    fault("long-number-in-a-plan", "runtime/plan.cpp", "word.size() < 18", "word.size() < 38", PLANS),
    fault("number-beyond-in-a-plan", "runtime/plan.cpp", "value < least || value > most", "value < least", PLANS),
    fault(
        "nul-in-a-source",
        "runtime/plan.cpp",
        r"found.find('\0') != std::string::npos",
        "false",
        f"{HOSTILE}::test_plans",
    ),
    fault(
        "name-of-a-kernel",
        "runtime/plan.cpp",
        "if (!is_kernel_name(pass.kernel))",
        "if (false)",
        f"{HOSTILE}::test_plans",
    ),
    fault(
        "architecture",
        "runtime/plan.cpp",
        "if (!is_architecture(pass.architecture))",
        "if (false)",
        f"{HOSTILE}::test_plans",
    ),
    fault(
        "last-chunk",
        "runtime/kernels.cpp",
        "std::min(chunk, batch - first)",
        "chunk",
        f"{RUNTIME}::test_passes_over_chunks",
    ),
    fault("batch-class", "runtime/kernels.cpp", "lower_bound", "upper_bound", f"{RUNTIME}::test_batch_classes"),
    fault("blocks-rounded-down", "runtime/kernels.cpp", "(blocks % pass.units_per_block != 0)", "0", RUNTIME),
    # chain
    fault(
        "unknown-activation",
        "chain.cpp",
        "      check_activation(name);\n      chain.activation",
        "      chain.activation",
        f"{HOSTILE}::test_ops_refuse_chains",
    ),
    fault(
        "letters",
        "chain.cpp",
        "if (at != std::string::npos)\n    throw",
        "if (false)\n    throw",
        f"{HOSTILE}::test_ops_refuse_chains",
    ),
    fault(
        "length-of-a-text",
        "chain.cpp",
        "if (text.size() > kMostText)",
        "if (false)",
        f"{HOSTILE}::test_a_stack_is_refused_for_its_length_alone",
    ),
    fault(
        "leading-zero",
        "chain.cpp",
        "(word[0] != '0' || word.size() == 1)",
        "true",
        f"{HOSTILE}::test_ops_refuse_chains",
    ),
    fault("neighbours", "chain.cpp", "chain.out_features() != c.outer * c.p * c.inner", "false", *CALLS),
    fault("shared-weight", "chain.cpp", "earlier.weight == c.weight", "false", f"{HOSTILE}::test_ops_refuse_chains"),
    fault(
        "places-of-frozen",
        "chain.cpp",
        "(elements + 127) / 128 * 128",
        "elements",
        "test_frozen.py::test_parameters_count_as_they_were",
    ),
    # expression
    fault(
        "steps",
        "expression.cpp",
        "if (steps_.size() == kMostSteps)",
        "if (false)",
        f"{HOSTILE}::test_ops_refuse_chains",
    ),
    fault(
        "later-step",
        "expression.cpp",
        "if (value >= limit) return -1;",
        "",
        f"{ACTIVATIONS}::test_malformed_programs_are_refused",
    ),
    fault(
        "row-used-again",
        "expression.cpp",
        "last_use[from] == i) free",
        "last_use[from] >= i) free",
        f"{ACTIVATIONS}::test_programs_are_as_accurate_as_torch",
    ),
    fault(
        "parameter-places",
        "expression.cpp",
        "node.index + (node.kind == Node::number ? parameters : 0)",
        "node.index",
        f"{ACTIVATIONS}::test_every_operation",
    ),
    # ops
    fault("last-dimension", "ops/checks.cpp", "weight.size(weight.dim() - 1) == c.p && ", "", *CALLS),
    fault("dimension-before", "ops/checks.cpp", " && weight.size(weight.dim() - 2) == c.q", "", *CALLS),
    fault("bias-and-chain", "ops/checks.cpp", "(bias != nullptr) == chain.bias", "true", *CALLS),
    fault(
        "bits",
        "ops/on_cpu.cpp",
        "weights.size() <= kMostWanted",
        "true",
        f"{MANY}::test_the_raw_op_says_how_many_bits_it_has",
    ),
    fault(
        "order-of-places",
        "ops/checks.cpp",
        "    least = place + 1;\n",
        "",
        "test_stack_ops.py::test_wrong_backward_calls_raise",
    ),
    fault(
        "questions",
        "ops/plans.cpp",
        "std::find(std::begin(questions), std::end(questions), question.value) != std::end(questions)",
        "true",
        f"{HOSTILE}::test_the_planner_is_asked_nothing_else",
    ),
    fault("words-of-a-question", "ops/plans.cpp", "  check_words(chain);\n", "", f"{HOSTILE}::test_ops_refuse_chains"),
    fault(
        "empty-batch",
        "ops/on_cpu.cpp",
        "gradients) torch::stable::zero_(gradient);",
        "gradients) torch::stable::fill_(gradient, 1);",
        f"{FUSED}::test_no_samples",
    ),
    # eager
    fault("eager-last-dimension", "ops/eager.cpp", "w.sizes[w.dimensions - 1] != c.p || ", "", AT_ONCE),
    fault("eager-dimension-before", "ops/eager.cpp", " || w.sizes[w.dimensions - 2] != c.q", "", AT_ONCE),
    fault(
        "eager-bits",
        "python.cpp",
        "if (count > kMostBits) return none();",
        "",
        f"{MANY}::test_gradients_of_every_subset_are_those_of_the_definition",
    ),
    fault(
        "eager-strides",
        "ops/eager.cpp",
        "t.strides[i] != count) return false;",
        "false) return false;",
        "test_eager.py::test_numbers_that_are_negated_in_name_only",
    ),
    fault(
        "eager-negated",
        "python.cpp",
        "if (is_negated(tensors[i], given[i])) return {};",
        "",
        "test_eager.py::test_one_number_that_is_negated_in_name_only",
    ),
    # CPU kernels
    fault(
        "sums-of-8n+7",
        "cpu/finish/expression.h",
        "(sums[6] + sums[7])",
        "sums[6]",
        f"{ACTIVATIONS}::test_a_parameters_gradient_has_every_term",
    ),
    fault(
        "tail-of-a-gradient",
        "cpu/finish/expression.h",
        "store_first(to + i, load_first(to + i, count - i)",
        "store_first(to + i, load_first(to + i, count - i - 1)",
        f"{ACTIVATIONS}::test_every_number_has_its_value_and_gradient",
    ),
    fault("merged-part", "cpu/layer/merge.h", "if (i != part) others", "others", EXACT),
    fault(
        "tasks-beyond-the-first",
        "cpu/layer/backward.h",
        "at < places_ * sums_size_",
        "at < sums_size_",
        f"{FUSED}::test_rule_with_threads",
    ),
    fault(
        "workers-sums-in-one-place",
        "cpu/layer/backward.h",
        "b.sum + worker * sums_size_",
        "b.sum",
        f"{FUSED}::test_samples_that_threads_share",
    ),
    fault(
        "a-phase-before-the-one-behind-it",
        "cpu/layer/layer.h",
        "team.run(member, int64_t(steps_.size()), [&](int64_t step, int64_t worker) { steps_[step](worker); });",
        "for (const auto& step : steps_) step(member);",
        f"{FUSED}::test_samples_that_threads_share",
    ),
    fault(
        "features-of-a-worker",
        "cpu/layer/layer.h",
        "Phase::scatter_some(chunk, size, first, end, local",
        "Phase::scatter_some(chunk, size, 0, end - first, local",
        f"{FUSED}::test_samples_that_threads_share",
    ),
    fault(
        "positions-of-a-worker",
        "cpu/multiply/contract.h",
        "from += first * features, to += first;",
        "from += first * features;",
        f"{FUSED}::test_samples_that_threads_share",
    ),
    fault(
        "rows-of-a-bias",
        "cpu/layer/backward.h",
        "for (; at < end; at += length)",
        "for (; at < 0; at += length)",
        EXACT,
    ),
    fault(
        "rows-as-one", "cpu/layer/backward.h", "n = size; n < length; n += size", "n = size; n < 0; n += size", EXACT
    ),
    fault(
        "a-bias-turned-with-y",
        "engine/kernels/product/few.cuh",
        "(params.bias)[bias + i * kInner]",
        "(params.bias)[place + i]",
        "test_emulator.py::test_a_bias_finds_its_features_before_they_are_turned",
    ),
    fault("last-block", "cpu/layer/run.h", "std::min(samples, batch - b * samples)", "samples", EXACT),
    fault("rest-of-a-row", "cpu/finish/pointwise.h", "x + load_first(bias + i, last) : x", "x : x", EXACT),
)


def place(found: Fault, root: Path) -> str:
    """The file's text with the fault in it; ValueError unless what it replaces stands there once."""
    text = (root / found.file).read_text()
    if (count := text.count(found.old)) != 1:
        raise ValueError(
            f"{found.name}: {found.old!r} should stand once in {found.file}, it stands there {count} times"
        )
    return text.replace(found.old, found.new)


class Garden:
    """A copy of the repository, built, in which faults are planted one after another."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "MAX_JOBS": str(jobs),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            elif source.exists():
                shutil.copy2(source, folder / name)
        if not self._succeeds("setup.py", "build_ext", "--inplace"):
            raise RuntimeError(f"{ROOT} cannot be built as it is")

    def passes(self, tests: list[str]) -> bool:
        """Whether all of them do."""
        return self._succeeds("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)

    def survives(self, found: Fault) -> str:
        """What was found of a fault: "survived", or how it was caught."""
        path = self.folder / found.file
        whole, planted = path.read_text(), place(found, self.folder)
        path.write_text(planted)
        try:
            if not self._succeeds("setup.py", "build_ext", "--inplace"):
                return "not built"
            return "survived" if self.passes([*found.tests]) else "caught"
        finally:
            path.write_text(whole)

    def _succeeds(self, *words: str) -> bool:
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                check=False,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def run(faults: list[Fault], workers: int, jobs: int, folder: Path) -> dict[str, str]:
    """What was found of each, by its name."""
    gardens: queue.Queue[Garden] = queue.Queue()
    with ThreadPoolExecutor(workers) as pool:
        for made in pool.map(lambda i: Garden(folder / str(i), jobs), range(workers)):
            gardens.put(made)
        tests = sorted({test for found in faults for test in found.tests})
        if tests and not made.passes(tests):  # a test that fails anyway, or that is not there, would catch every fault
            raise RuntimeError(f"with no fault planted, these do not pass: {' '.join(tests)}")

        def plant(found: Fault) -> str:
            garden = gardens.get()
            try:
                said = garden.survives(found)
            finally:
                gardens.put(garden)
            typer.echo(f"{said:9} {found.name}  {found.file}")
            return said

        return dict(zip((f.name for f in faults), pool.map(plant, faults), strict=True))


def main(
    only: Annotated[str, typer.Option(help="Faults whose name or file has this in it.")] = "",
    workers: Annotated[int, typer.Option(help="Copies that are built and tested at once; 0: one for two cores.")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="Say what there is, and plant nothing.")] = False,
) -> None:
    """Plants faults in csrc and reports those that no test finds."""
    chosen = [f for f in FAULTS if only in f.name or only in f.file]
    for found in chosen:
        place(found, ROOT)
        if list_:
            typer.echo(f"{found.name:24} {found.file:24} {' '.join(found.tests)}")
    if list_:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(len(chosen), workers or cores // 2))
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        said = run(chosen, workers, max(1, cores // workers), Path(folder))
    wrong = [name for name, what in said.items() if what != "caught"]
    typer.echo(
        f"{len(said)} planted, {len(said) - len(wrong)} caught" + (f"; not: {', '.join(wrong)}" if wrong else "")
    )
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
