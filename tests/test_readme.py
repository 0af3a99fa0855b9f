"""What README says of its own examples, computed from them."""

from __future__ import annotations

import re
from pathlib import Path

from factorlayer import FactorLinear

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def layers_of_use() -> list[FactorLinear]:
    """Those that the first example builds, in its order."""
    code = README.split("## A layer")[1].split("```python")[1].split("```")[0]
    return [
        eval(call, {"FactorLinear": FactorLinear})
        for call in re.findall(r"layer = (FactorLinear\(.*?\))(?:  #|$)", code, re.M)
    ]


def test_how_many_times_fewer() -> None:
    said = re.search(
        r"the three \[below\]\(#a-layer\) (\S+), (\S+) and\s+(\S+) times fewer FLOPs, "
        r"and (\S+), (\S+) and (\S+) times fewer weights",
        README,
    )
    assert said is not None
    layers = layers_of_use()
    assert len(layers) == 3
    dense = [layer.in_features * layer.out_features for layer in layers]
    flops = [2 * size / layer.flops() for size, layer in zip(dense, layers, strict=True)]
    weights = [size / layer.spec.parameter_count for size, layer in zip(dense, layers, strict=True)]
    for number, found in zip(said.groups(), [*flops, *weights], strict=True):
        digits = len(number.split(".")[1]) if "." in number else 0
        assert f"{found:.{digits}f}" == number


def test_it_is_short_enough_to_be_read() -> None:
    assert len(README.encode()) <= 12_000


def test_it_lists_every_page_of_docs() -> None:
    listed = set(re.findall(r"^- \[(docs/.*?)\]\(\1\): ", README, re.M))
    assert listed >= {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")}
