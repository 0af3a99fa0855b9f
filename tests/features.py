"""docs/pytorch.md: which features of PyTorch are supported, a row for each test that is marked with one.

    python tests/features.py          # writes it

Marks are read from the text of the tests, so that none has to be run, and a GPU's tests count where there is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "pytorch.md"
RESULTS = ("works", "falls back", "refused")
HEAD = """# PyTorch's features

Each row is a test, and this page is written from the tests by `python tests/features.py`: what is not run is not
claimed. *Falls back*: `implementation="auto"` runs it by PyTorch's own operations, or by the plain path of ours, with
the same results. *Refused*: an error says what to do instead. Files under `gpu/` need a CUDA GPU.

| feature | result | test |
|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    feature: str
    result: str
    test: str


def rows_of(path: Path) -> Iterator[Row]:
    for node in ast.walk(ast.parse(path.read_text())):
        for mark in getattr(node, "decorator_list", []):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
                (feature,), (result,) = mark.args, mark.keywords
                given = ast.literal_eval(feature), ast.literal_eval(result.value)
                yield Row(*given, f"{path.relative_to(TESTS).as_posix()}::{node.name}")


def rows() -> list[Row]:
    return [row for path in sorted(TESTS.rglob("test_*.py")) for row in rows_of(path)]


def page() -> str:
    order = sorted(rows(), key=lambda row: (RESULTS.index(row.result), row.feature.lower(), row.test))
    return HEAD + "".join(f"| {row.feature} | {row.result} | `{row.test}` |\n" for row in order)


if __name__ == "__main__":
    PAGE.write_text(page())
