"""Settings of all tests: the same examples in every run, and one thread, so that results can be compared bitwise."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "factorlayer", derandomize=True, deadline=None, max_examples=50, print_blob=False, database=None
)
hypothesis.settings.load_profile("factorlayer")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """What `-n auto` is: one process where there is a GPU, whose memory and times tests measure."""
    return 0 if torch.cuda.is_available() else None


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Every test starts with the same seed and one thread, whatever the test before it did."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
