"""Tests that an older PyTorch fails by a fault of its own: they are skipped there, and say why."""

from __future__ import annotations

import re

import pytest
import torch

BEFORE_2_12 = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 12)


def fails_before_2_12(why: str, also: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.skipif(BEFORE_2_12 and also, reason=f"PyTorch before 2.12: {why}")
