"""The table of PyTorch's features: it is what the tests say, and each of its rows is one test."""

from __future__ import annotations

from collections import Counter

from features import PAGE, RESULTS, page, rows


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == page(), "docs/pytorch.md is stale: run python tests/features.py"


def test_every_feature_has_one_row_and_one_of_three_results() -> None:
    found = rows()
    assert found and {row.result for row in found} <= set(RESULTS)
    twice = [feature for feature, count in Counter(row.feature for row in found).items() if count > 1]
    assert not twice
    assert not [row for row in found if "|" in row.feature]
