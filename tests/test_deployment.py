"""The programs of docs/deployment.md, and what is refused on the way to other formats."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import python
from torch import Tensor, nn
from versions import fails_before_2_12

from factorlayer import FactorLinear, FactorMLP, factor_linear, fuse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deployment.md").read_text()
PROGRAMS = dict(re.findall(r"^```(?:python|cpp)\n(?:#|//) (\w+\.\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
(SHELL,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

Run = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them lie and leave their files."""
    folder = tmp_path_factory.mktemp("deployment")
    for name, code in PROGRAMS.items():
        (folder / name).write_text(code)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    def run(*command: str | Path, **environment: str) -> None:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")} | environment
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def package(folder: Path, run: Run) -> Path:
    """Compiled with headers as they are, two that are compiled for it alone would take longer than all else, and what
    calls the kernels as it is written: it runs once."""
    plain = "from torch._inductor.config import aot_inductor\naot_inductor.precompile_headers = False\n"
    plain += "aot_inductor.compile_wrapper_opt_level = 'O0'\n"
    run(*python(), "-c", plain + PROGRAMS["package.py"])
    return folder / "model.pt2"


def expected_of(folder: Path, x: Tensor) -> Tensor:
    model: dict[str, Callable[[], nn.Module]] = {}
    exec((folder / "model.py").read_text(), model)
    with torch.no_grad():
        return model["make_model"]()(x)


def test_all_programs_are_run() -> None:
    here = Path(__file__).read_text()
    assert len(PROGRAMS) == 9
    for name in PROGRAMS:
        assert f'"{name}"' in here or (name == "serve.cpp" and name in SHELL)


aoti_loads = fails_before_2_12(
    "AOTInductor's loader crashes where a build for GPUs finds none",
    torch.version.cuda is not None and not torch.cuda.is_available(),
)


@pytest.mark.long
@aoti_loads
@pytest.mark.feature("AOTInductor, from Python", result="works")
def test_aot_inductor_in_python(package: Path, run: Run) -> None:
    run(*python(), "load.py")


@pytest.mark.long
@aoti_loads
@pytest.mark.feature("AOTInductor, from C++", result="works")
def test_aot_inductor_in_cpp(package: Path, folder: Path, run: Run) -> None:
    run("bash", "-euc", SHELL, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    found = torch.frombuffer(bytearray((folder / "y.bin").read_bytes()), dtype=torch.float32).reshape(33, 16)
    torch.testing.assert_close(found, expected_of(folder, (torch.arange(33 * 64).float() / 1000).reshape(33, 64)))


@pytest.mark.long
@pytest.mark.feature("torch.export, run where factorlayer is not", result="falls back")
def test_export_runs_where_factorlayer_is_not(folder: Path, run: Run) -> None:
    run(*python(), "export.py")
    hide = "import sys; sys.modules['factorlayer'] = None\n"  # every import of it is an ImportError
    run(*python(), "-c", hide + PROGRAMS["elsewhere.py"])


@pytest.mark.long
@pytest.mark.feature("ONNX", result="falls back")
def test_onnx(run: Run) -> None:
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed)
    run(*python(), "to_onnx.py")
    run(*python(), "run_onnx.py")
    if importlib.util.find_spec("onnxruntime") is not None:
        other = PROGRAMS["run_onnx.py"].replace("from onnx.reference import ReferenceEvaluator", "import onnxruntime")
        other = re.sub(r"session = .*", 'session = onnxruntime.InferenceSession("model.onnx")', other)
        run(*python(), "-c", other.replace("session.input_names[0]", "session.get_inputs()[0].name"))


@pytest.mark.feature("torch.jit.trace without gradients", result="works")
def test_trace(run: Run) -> None:
    run(*python(), "trace.py")


# What else is traced, and what is refused


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "layer":
        return FactorLinear(16, 36, activation="gelu")
    if kind == "fuse":
        return fuse(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), FactorLinear(8, 4), nn.Tanh()))
    block = FactorMLP([16, (4, 4), (4, 4), 3])
    return block.freeze() if kind == "frozen" else block


KINDS = ("layer", "block", "frozen", "fuse")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.feature("torch.jit.script", result="refused")
def test_script_is_refused(kind: str, nested: bool) -> None:
    module = nn.Sequential(make(kind)) if nested else make(kind)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile .* use torch\.export or torch\.compile"):
        torch.jit.script(module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["auto", "batched", "fused"])
def test_traced_without_gradients_it_takes_any_batch(kind: str, implementation: str) -> None:
    module = make(kind)
    module.implementation = implementation
    with torch.no_grad():
        if kind == "frozen":
            module.freeze()
        traced = torch.jit.trace(module, (torch.randn(5, 16),))
        for batch in (1, 5, 9):
            x = torch.randn(batch, 16)
            torch.testing.assert_close(traced(x), module(x))


class Joined(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.module([a, b])


@pytest.mark.parametrize("kind", ["layer", "block", "function"])
def test_traced_sizes_are_numbers(kind: str) -> None:
    """Of several inputs, and of weights: torch.jit.trace has tensors for them."""

    def function(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return factor_linear([a, b], weights)

    weights = (torch.randn(2, 4), torch.randn(3, 4)) if kind == "function" else ()
    call = function if kind == "function" else Joined(make(kind))
    with torch.no_grad():
        traced = torch.jit.trace(call, (torch.randn(5, 6), torch.randn(5, 10), *weights))
        given = torch.randn(9, 6), torch.randn(9, 10), *weights
        torch.testing.assert_close(traced(*given), call(*given))


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_traced_weights_that_are_constants(kind: str) -> None:
    """PyTorch takes them out of their list at the first call."""
    module, x = make(kind).eval(), torch.randn(5, 16)
    with torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(module, (x,)))
        torch.testing.assert_close(traced(x), module(x))
        with pytest.raises(
            RuntimeError, match=r"trace a module, and do not freeze it, or use implementation='batched'"
        ):
            traced(x)
        module.implementation = "batched"
        traced = torch.jit.freeze(torch.jit.trace(module, (x,)))
        for _ in range(2):
            torch.testing.assert_close(traced(x), module(x))


@pytest.mark.parametrize("kind", ["layer", "block", "fuse"])
def test_traced_with_gradients_it_is_refused_or_batched(kind: str) -> None:
    module, x = make(kind), torch.randn(5, 16)
    with pytest.raises(RuntimeError, match=r"cannot keep the gradients .* trace under torch\.no_grad\(\), or"):
        torch.jit.trace(module, (x,))
    module.implementation = "batched"
    y = torch.jit.trace(module, (x,))(torch.cat([x, x]))
    torch.testing.assert_close(y, module(torch.cat([x, x])))
    assert y.requires_grad


@pytest.mark.long
@pytest.mark.parametrize("kind", ["layer", "block"])
def test_onnx_refuses_fused(kind: str) -> None:
    pytest.importorskip("onnxscript")
    module = make(kind)
    module.implementation = "fused"
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"ONNX has no operation like it|factorlayer"):
        torch.onnx.export(module, (torch.randn(5, 16),), dynamo=True, verbose=False)
