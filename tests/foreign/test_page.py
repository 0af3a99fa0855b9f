"""The programs of docs/adapters.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize(("number", "package", "says"), [
    (0, "peft", "2 LoKr layers taken over, 0 left to their own code"),
    (1, "linear_operator", "1 by factorlayer"),
])  # fmt: skip
def test_it_runs(number: int, package: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package, reason=f"needs {package}, of the extra `foreign`")
    exec(PROGRAMS[number], {})
    assert says in capsys.readouterr().out
