"""What all GPU tests share. Without a GPU every one of them is skipped, and says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forward_rule import arithmetic

sys.path.insert(0, str(Path(__file__).parents[2]))  # benches is not installed with the package


MOST_KEPT = 2 << 30  # bytes


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs much memory and time; leave out with -m 'not slow'")


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every run compiles its kernels anew."""
    before = os.environ.get("FACTORLAYER_CACHE")
    os.environ["FACTORLAYER_CACHE"] = str(tmp_path_factory.mktemp("kernels"))
    yield
    if before is None:
        del os.environ["FACTORLAYER_CACHE"]
    else:
        os.environ["FACTORLAYER_CACHE"] = before


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """PyTorch keeps what a test has had; processes of a run share a GPU."""
    yield
    if torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _tf32_off() -> Iterator[None]:
    """Tests that want TensorFloat-32 allow it themselves."""
    with arithmetic("float32"):
        yield
