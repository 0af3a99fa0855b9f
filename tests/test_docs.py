"""The papers: every family of kernels and every page is in the index, and what a page names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "docs" / "kernels"
INDEX = (KERNELS / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ids = [page.relative_to(ROOT).as_posix() for page in PAGES]


def families() -> list[Path]:
    """The modules that put a device header into a kernel's source, but for the one that puts the text together."""
    found = []
    for module in sorted((ROOT / "factorlayer").rglob("*.py")):
        strings = [node.value for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Constant)]
        named = any(isinstance(text, str) and re.fullmatch(r"[\w/]+\.cuh", text) for text in strings)
        if named and module.parent.name != "device":
            found.append(module)
    return found


def test_every_family_is_in_the_index() -> None:
    modules = [module.relative_to(ROOT).as_posix() for module in families()]
    assert len(modules) > 40
    listed = re.findall(r"^\|.*\| \[(factorlayer/.*?\.py)\]\(\.\./\.\./\1\) \|", INDEX, re.M)
    assert set(modules) - set(listed) == set()


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", INDEX))
    assert linked == {page.name for page in KERNELS.glob("*.md")} - {"README.md"}


def test_a_familys_page_has_it_and_its_header() -> None:
    rows = re.findall(
        r"^\|.*\| \[(factorlayer/.*?)\]\(.*?\) \| \[(csrc/.*?)\]\(.*?\) \| \[.*?\]\((.*?)\) \|$", INDEX, re.M
    )
    assert len(rows) > 40
    for module, header, page in rows:
        text = (KERNELS / page).read_text()
        assert f"[{module}]" in text
        assert f"[{header}]" in text
        assert Path(header).name in (ROOT / module).read_text()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_it_links_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_paths_that_it_names_are_there(page: Path) -> None:
    paths = re.findall(
        r"(?<![\w/])((?:factorlayer|csrc|tests|benches|examples|docs)/[\w/.-]*\w\.\w+)", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []
