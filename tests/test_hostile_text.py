"""Texts from anywhere: chains, programs, plans, questions and names that nobody of the house has written.

Every raw op that takes text refuses what is not of its language, before a kernel, a file or a question is made of it.
docs/trust.md says what is trusted.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python

from factorlayer import CompileError
from factorlayer.activations import expression
from factorlayer.activations.expression import Expression
from factorlayer.activations.written import activation_type
from factorlayer.autograd import layer_ops, runtime, stack_ops
from factorlayer.device.gpu import Gpu
from factorlayer.maths import chain
from factorlayer.maths.chain import Chain, parse_layers
from factorlayer.plan import planner
from factorlayer.plan.planner import plan

ROOT = Path(__file__).parents[1]
OPS = torch.ops.factorlayer
HOPPER = (90, 132, 232448)
LAYER = "tied 1 32 32 32 1; tied 0 1 32 32 32"
STRUCT = 'gelu{template<class\tT>static\tDEVICE\tT\tof(T\tx){asm("trap");return\tx}}'  # no blank, semicolon or slash
PRELU = "0.0,x,lt:0:1,p0,mul:3:1,select:2:1:4/1.0,select:2:6:0,select:2:0:3,add:7:8/select:2:0:1"
REFUSED = (ValueError, RuntimeError, TypeError)

HOSTILE = {
    "struct": f"{LAYER}; {STRUCT}",
    "struct-plain": f"{LAYER}; gelu{{}}",
    "base-class": f"{LAYER}; gelu:relu",
    "comment": f"{LAYER}; gelu//",
    "comment-in-a-program": f"{LAYER}; x/*y*/",
    "define": f"{LAYER}; gelu\n#define DEVICE",
    "call": f"{LAYER}; x,system:0/x",
    "template": f"{LAYER}; gelu<1>",
    "code-as-number": f"{LAYER}; x,add:0:0/1.0)+f(",
    "overlong-number": f"tied 0 1 {'9' * 400} 1 1",
    "number-around-2-to-the-64": f"tied 0 1 {2**64 + 32} 32 1",
    "number-around-2-to-the-32": f"tied {2**32} 1 32 32 1",
    "negative": "tied 0 1 -32 32 1",
    "signed": "tied 0 1 +32 32 1",
    "zero": "tied 0 1 0 32 1",
    "leading-zero": "tied 0 1 032 32 1",
    "hexadecimal": "tied 0 1 0x20 32 1",
    "underscores": "tied 0 1 3_2 32 1",
    "float": "tied 0 1 32.0 32 1",
    "other-digits": "tied 0 1 ٣٢ 32 1",
    "huge-rank": f"rank {2**48}; {LAYER}",
    "more-elements-than-memory": f"tied 0 {2**40} {2**40} 1 1",
    "weights-shared": "tied 0 1 2 2 1; tied 0 1 2 2 1",
    "sizes-disagree": "tied 0 1 2 2 1; tied 1 1 3 2 1",
    "too-few-numbers": "tied 0 1 2 2",
    "too-many-numbers": "tied 0 1 2 2 1 1",
    "bias-of-a-number": f"{LAYER}; bias 1",
    "other-order": f"{LAYER}; gelu; bias",
    "kept-of-an-activation-that-learns": f"{LAYER}; {PRELU}; kept 1024",
    "kept-behind-sums": f"{LAYER}; gelu; slope 1024; sums 1024; kept 1024",
    "kept-behind-through": f"{LAYER}; gelu; through 1024; kept 1024",
    "kept-before-a-slope": f"{LAYER}; gelu; kept 1024; slope 1024",
    "kept-of-gradients-of-an-activation": f"{LAYER}; gelu; backward; kept 1024",
    "kept-of-a-slope-of-groups": "untied 0 2 2 2 1; untied 1 1 2 2 2; gelu; slope 4; kept 4",
    "many-contractions": "; ".join(["tied 0 1 1 1 1"] * 5000),
    "different-contractions": "; ".join(f"tied {i} 1 1 1 1" for i in range(5000)),
    "many-layers": " | ".join(["tied 0 1 1 1 1"] * 5000),
    "many-ranks": "; ".join(["rank 2"] * 100_000),
    "long": "a" * 10_000_000,
    "long-of-blanks": " " * 10_000_000,
    "long-of-stages": "bias; " * 1_700_000,
    "long-of-layers": "bias | " * 1_500_000,
    "long-program": f"{LAYER}; x" + ",neg:0" * 1_600_000 + "/x",
    "deep-program": f"{LAYER}; x," + ",".join(f"neg:{i}" for i in range(100_000)) + "/:0",
    "many-parameters": f"{LAYER}; x" + "/1.0" * 30,
    "high-parameter": f"{LAYER}; p99/1.0/1.0",
    "parameter-without-derivative": f"{LAYER}; p3/1.0",
    "step-that-is-not-there": f"{LAYER}; x,neg:7/1.0",
    "program-of-nothing": f"{LAYER}; /",
    "nul": f"{LAYER}; gelu\0",
    "nul-in-front": f"\0{LAYER}",
    "nul-and-more": f"{LAYER}\0; {STRUCT}",
    "non-ascii": f"{LAYER}; gélu",
    "non-ascii-in-the-wrong-place": f"{LAYER}; gelu; gélu",
    "non-ascii-too-many": f"{LAYER}; gelu é",
    "no-break-space": f"{LAYER};\u00a0gelu",
    "emoji": "\U0001f4a5" * 1000,
    "empty": "",
    "blank": " ",
    "semicolons": "; ; ;",
    "bars": " |  | ",
    "trailing": f"{LAYER}; ",
    "newline": f"{LAYER}\n",
    "tabs": LAYER.replace(" ", "\t"),
    "two-blanks": LAYER.replace(" ", "  "),
    "no-blank": LAYER.replace("; ", ";"),
    "capitals": f"{LAYER}; GELU",
    "unknown": f"{LAYER}; gelo",
    "quote": f'{LAYER}; gelu"',
    "format": f"{LAYER}; %s%n",
    "path": f"{LAYER}; ../../etc/passwd",
    "attribute": "__class__",
}  # fmt: skip
ids = list(HOSTILE)
hostile = pytest.mark.parametrize("text", list(HOSTILE.values()), ids=ids)
ONE = torch.ones(1, 32)


def of_chain() -> dict[str, Callable[[str], Any]]:
    """Every raw op that takes a chain or a stack, on the CPU; those of a GPU begin with the same find_chain."""
    return {
        "forward": lambda text: OPS.forward(ONE, [ONE], None, text),
        "backward": lambda text: OPS.backward(ONE, ONE, [ONE], None, text, 1),
        "stack_forward": lambda text: OPS.stack_forward(ONE, [ONE], text),
        "stack_frozen": lambda text: OPS.stack_frozen(ONE, ONE, text),
        "stack_backward": lambda text: OPS.stack_backward(ONE, ONE, [ONE], text, [0]),
        "plan": lambda text: OPS.plan(text, "float32", 1, *HOPPER),
        "ask_planner": lambda text: OPS.ask_planner("has_plan", text, "float32", 1, *HOPPER),
        "cut": lambda text: OPS.ask_planner("cut", text, "float32", 1, *HOPPER),
        "prepare": lambda text: OPS.prepare(text, "float32", 1, 0),
        "install": lambda text: OPS.install(text, "float32", 1, 0, ""),
        "failure": lambda text: OPS.failure(text, "float32", 1, 0),
    }


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTORLAYER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def nothing_kept(tmp_path: Path) -> Any:
    """Whether a test has left nothing in the cache: then nothing was planned or compiled."""
    yield
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("op", list(of_chain()))
@hostile
def test_ops_refuse_chains(op: str, text: str, nothing_kept: Any) -> None:
    with pytest.raises(REFUSED) as caught:
        of_chain()[op](text)
    message = str(caught.value)
    assert message.isascii() and "\0" not in message and len(message) < 100_000
    by_python = op in ("plan", "ask_planner", "cut") and re.match(
        "factorlayer: chain |ValueError: (chain|stack) ", message
    )
    assert by_python or re.match('factorlayer: (chain|stack) "', message), message[:200]


def test_a_stack_is_refused_for_its_length_alone() -> None:
    """Of words that are all known: with a layer less it is run."""
    numbers = ",".join(["0." + "0" * (expression.LONGEST_STEP - 2)] * 900)
    layer = f"tied 0 1 1 1 1; x,{numbers},:0/1.0"
    fitting = chain.MOST_TEXT // len(f"{layer} | ")
    x = torch.ones(1, 1)
    assert OPS.stack_forward(x, [x] * fitting, " | ".join([layer] * fitting)).item() == 1
    with pytest.raises(REFUSED, match=f"it should have {chain.MOST_TEXT} bytes at most"):
        OPS.stack_forward(x, [x] * (fitting + 1), " | ".join([layer] * (fitting + 1)))


@hostile
def test_python_refuses_chains(text: str) -> None:
    for read in (Chain.parse, parse_layers, lambda text: planner.plan_of(text, "float32", 1, Gpu(*HOPPER))):
        with pytest.raises(ValueError, match=r"cannot be read|should (have|be)") as caught:
            read(text)
        assert len(str(caught.value)) < 2000


@hostile
def test_fakes_refuse_chains(text: str) -> None:
    with torch.device("meta"):
        x = torch.ones(1, 32)
    for call in (lambda: OPS.forward(x, [x], None, text), lambda: OPS.stack_forward(x, [x], text)):
        with pytest.raises(REFUSED):
            call()


@pytest.mark.parametrize("activation", [STRUCT, "gelu{}", "gelu;int", "", "GELU", "x,system:0/x", "x/*", "gelu\n"])
def test_no_activation_becomes_code_that_is_not_known(activation: str) -> None:
    with pytest.raises(ValueError, match=r"unknown stage|cannot be read|should come with"):
        activation_type(activation, "float32", 0)
    made = Chain(Chain.parse("tied 0 1 32 32 1").contractions, activation=activation)
    with pytest.raises((ValueError, KeyError)):
        plan(made, "float32", 2048, Gpu(*HOPPER)).text()


@pytest.mark.parametrize(
    "question", ["", "plan_text", "__class__", "has_plan\0", "HAS_PLAN", "has_plan ", "é", "a" * 10_000_000]
)
def test_the_planner_is_asked_nothing_else(question: str, nothing_kept: Any) -> None:
    with pytest.raises(REFUSED, match="the planner is asked has_plan, predicted, times, cut or kept, not "):
        OPS.ask_planner(question, LAYER, "float32", 1, *HOPPER)


@pytest.mark.parametrize("dtype", ["", "float", "float32\0", "float32 ", "Float32", "é", "float32" * 1_500_000, "int8"])
def test_dtypes(dtype: str, nothing_kept: Any) -> None:
    calls = [
        lambda: OPS.plan(LAYER, dtype, 1, *HOPPER),
        lambda: OPS.ask_planner("has_plan", LAYER, dtype, 1, *HOPPER),
        lambda: OPS.prepare(LAYER, dtype, 1, 0),
        lambda: OPS.install(LAYER, dtype, 1, 0, ""),
        lambda: OPS.failure(LAYER, dtype, 1, 0),
    ]
    for call in calls:
        with pytest.raises(REFUSED, match="a dtype should be float64, float32, bfloat16 or float16"):
            call()


@pytest.mark.parametrize("number", [-1, 2**32 + 90, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", range(5))
def test_numbers_beside_a_text(number: int, place: int, nothing_kept: Any) -> None:
    numbers = [1, *HOPPER, 3352320]
    numbers[place] = number
    with pytest.raises(REFUSED, match="should be from"):
        OPS.plan(LAYER, "float32", *numbers)
    with pytest.raises(REFUSED, match="should be from"):
        OPS.ask_planner("has_plan", LAYER, "float32", *numbers)
    for op, rest in ((OPS.prepare, ()), (OPS.install, ("",)), (OPS.failure, ())):
        with pytest.raises(REFUSED, match="a batch class should be"):
            op(LAYER, "float32", number, 0, *rest)
        with pytest.raises(REFUSED, match="a device should be"):
            op(LAYER, "float32", 1, number, *rest)
    with pytest.raises(REFUSED, match="a device should be"):
        OPS.limits(number)


# Plans and sources

KERNEL = 'extern "C" __global__ void k(float* x) { x[0] = 1; }'


def plan_text(words: str = "x y 128 0 1 1 0 1 sm_90 k", source: str = KERNEL, count: int = 1) -> str:
    part = f"pass {words} {len(source.encode())}\n{source}\n"
    return "factorlayer plan 1\nchunk 0\nscratch 0 0 0\n" + part * count


PLANS = {
    "empty": "",
    "nul": "\0",
    "long": "a" * 10_000_000,
    "long-line": "factorlayer plan 1 " + "1 " * 5_000_000 + "\n",
    "long-word": "factorlayer " + "1" * 10_000_000 + " 1\n",
    "non-ascii": "factorlayer plan ١\n",
    "many-passes": plan_text(count=300),
    "nul-in-a-source": plan_text(source=KERNEL + "\0 hidden"),
    "number-around-2-to-the-64": plan_text(f"x y {2**64 + 128} 0 1 1 0 1 sm_90 k"),
    "number-of-18-digits": plan_text("x y 128 0 100000000000000001 1 0 1 sm_90 k"),
    "long-number": plan_text(f"x y {'1' * 100_000} 0 1 1 0 1 sm_90 k"),
    "negative": plan_text("x y -128 0 1 1 0 1 sm_90 k"),
    "hexadecimal": plan_text("x y 0x80 0 1 1 0 1 sm_90 k"),
    "name-of-two": plan_text("x y 128 0 1 1 0 1 sm_90 k,j"),
    "name-of-a-path": plan_text("x y 128 0 1 1 0 1 sm_90 ../../k"),
    "name-of-a-number": plan_text("x y 128 0 1 1 0 1 sm_90 1k"),
    "name-of-code": plan_text("x y 128 0 1 1 0 1 sm_90 k(){}"),
    "name-too-long": plan_text(f"x y 128 0 1 1 0 1 sm_90 {'k' * 101}"),
    "architecture-of-an-option": plan_text("x y 128 0 1 1 0 1 sm_90--include-path=/ k"),
    "architecture-other": plan_text("x y 128 0 1 1 0 1 compute_90 k"),
    "architecture-long": plan_text("x y 128 0 1 1 0 1 sm_90000 k"),
    "architecture-empty": plan_text("x y 128 0 1 1 0 1 sm_ k"),
    "source-longer-than-said": plan_text() + "hidden\n",
    "source-shorter-than-said": plan_text()[:-10],
    "source-of-2-to-the-40-bytes": plan_text().replace(f" {len(KERNEL)}\n", f" {2**40}\n"),
    "cluster-of-many": plan_text(source="__cluster_dims__(1, 99999999999999999999"),
    "cluster-of-none": plan_text(source="__cluster_dims__(1, -2"),
    "buffer": plan_text("x s9 128 0 1 1 0 1 sm_90 k"),
    "weight-62": plan_text() + "map 62 tf32 8 2 3 1 1 32 48 32 32 32 1 64 1 1\n",
    "map-of-nothing": plan_text() + "map * tf32 8 2 3 1 1 32 48 32 32 32 1 64 1 1\n",
}  # fmt: skip


@pytest.mark.parametrize("text", list(PLANS.values()), ids=list(PLANS))
def test_plans(text: str, nothing_kept: Any) -> None:
    for call in (lambda: OPS.fill_cache(text), lambda: runtime.install(LAYER, torch.float32, 1, 0, text)):
        with pytest.raises((ValueError, RuntimeError, CompileError), match="cannot be read") as caught:
            call()
        assert len(str(caught.value)) < 12_000_000 and "\0" not in str(caught.value).split("cannot be read")[0]


@pytest.mark.parametrize("name", ["", "k\0", "k;", "1k", "../k", "k" * 101, "é", "k" * 10_000_000, "k\n"])
def test_names_of_kernels(name: str) -> None:
    with pytest.raises(REFUSED, match="a kernel's name should be"):
        OPS.compile(KERNEL, name, "sm_90", [])


@pytest.mark.parametrize(
    "word", ["", "sm_", "sm_90 ", "sm_90\0", "sm_90,lto", "90", "sm_9x", "sm_90aa", "é", "s" * 10_000_000]
)
def test_architectures(word: str) -> None:
    with pytest.raises(REFUSED, match="an architecture should be"):
        OPS.compile(KERNEL, "k", word, [])


def test_sources() -> None:
    for source, options in ((KERNEL + "\0#error", []), (KERNEL, ["-w\0"])):
        with pytest.raises(REFUSED, match="a byte that is 0"):
            OPS.compile(source, "k", "sm_90", options)
    with pytest.raises(REFUSED, match="16777216 bytes at most"):
        OPS.compile("/" * (1 << 25), "k", "sm_90", [])
    with pytest.raises(REFUSED, match="with 64 options"):
        OPS.compile(KERNEL, "k", "sm_90", ["-w"] * 65)


# What the cache answers, and what a pickle brings


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "(",
        "((0, 1)",
        "((0, 9),)",
        "((1, 0),)",
        "__import__('os')",
        "((0, 1), (0, 2))",
        "(" * 10_000,
        "((0, 1e1),)",
        "((0, ٣),)",
    ],
)
def test_cuts_from_the_cache(answer: str) -> None:
    with pytest.raises(RuntimeError, match="empty the cache"):
        stack_ops._read_cut(answer, 3)


def test_cuts_that_the_planner_makes_are_read() -> None:
    for cut in ((), ((0, 3),), ((0, 1), (1, 3)), ((1, 2), (2, 3))):
        assert stack_ops._read_cut(str(cut), 3) == list(cut)


def test_an_expression_of_a_pickle_is_read_as_any_other() -> None:
    read, _ = Expression.parse("x").__reduce__()
    for text in ("x,system:0", "gelu{}", "", "x" + ",neg:0" * 2000, "1.0)", "٣.0", "p٣", "x,neg:٠"):
        with pytest.raises(ValueError, match=r"cannot be read|steps at most"):
            read(text)


def test_ten_million_letters_end_in_an_error_in_a_process_of_little_memory() -> None:
    """Nothing is made of it in the way of a tree."""
    code = (
        "import resource, torch, factorlayer\n"
        "for text in ('x' * 10**7, 'bias; ' * 10**6, ' | ' * 10**6):\n"
        "    try: torch.ops.factorlayer.forward(torch.ones(1, 1), [], None, text)\n"
        "    except (ValueError, RuntimeError): pass\n"
        "    else: raise SystemExit('taken')\n"
        "print('fine')"
    )
    done = subprocess.run([*python(), "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# The same numbers on both sides


def test_bounds_are_the_same_on_both_sides() -> None:
    def of(path: str, name: str) -> int:
        found = re.search(rf"constexpr \w+ {name} = ([^;]+);", (ROOT / "csrc" / path).read_text())
        assert found, name
        value = re.sub(r"(size_t|int64_t|int)\((\d+)\)", r"\2", found[1])
        assert re.fullmatch(r"[\d <]+", value), value
        return int(eval(value))  # digits and shifts

    assert of("chain.h", "kMostText") == chain.MOST_TEXT
    assert of("chain.h", "kMostContractions") == chain.MOST_CONTRACTIONS
    assert of("chain.h", "kMostLayers") == chain.MOST_LAYERS
    assert of("chain.h", "kMostInputs") == chain.MOST_INPUTS
    assert of("chain.h", "kMostElements") == chain.MOST_ELEMENTS
    assert of("expression.cpp", "kMostSteps") == expression.MOST_STEPS
    assert of("expression.cpp", "kMostParameters") == expression.MOST_PARAMETERS
    assert of("expression.cpp", "kLongestStep") == expression.LONGEST_STEP
    assert of("ops/on_cpu.cpp", "kMostWanted") == layer_ops.MOST_WANTED
    assert of("runtime/kernels.h", "MAX_WEIGHTS") == runtime.MAX_WEIGHTS


def test_words_are_the_same_on_both_sides() -> None:
    source = (ROOT / "csrc" / "chain.cpp").read_text()
    names = re.search(r"kActivations\[\] = \{([^}]*)\}", source)
    assert names and re.findall(r'"(\w+)"', names[1]) == list(expression.NAMED)
    known = re.search(r"known\[\] = \{(.*?)\};", source, re.DOTALL)
    assert known
    assert {name: int(count) for name, count in re.findall(r'\{"(\w+)", (\d)\}', known[1])} == chain.NUMBERS
