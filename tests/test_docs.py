"""The papers: every family of kernels and every page is in the index, and what a page names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from factorlayer import ACTIVATIONS

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "docs" / "kernels"
INDEX = (KERNELS / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ids = [page.relative_to(ROOT).as_posix() for page in PAGES]


def families() -> list[Path]:
    """Modules with passes, which they tile or name: they tell a kernel something, or a device header has their stem."""
    found, room = [], ROOT / "factorlayer" / "kernels"
    for module in sorted(room.rglob("*.py")):
        header = (ROOT / "csrc" / "engine" / "kernels" / module.relative_to(room)).with_suffix(".cuh")
        tells = header.exists() or re.search(r"^    def told\(", module.read_text(), re.M)
        if tells and re.search(r"^def tile\(|^    (def __str__\(|title = )", module.read_text(), re.M):
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


def test_a_users_page_names_every_activation() -> None:
    names = re.search(r"a name of `factorlayer.ACTIVATIONS` \((.*?)\)", (ROOT / "docs" / "layers.md").read_text(), re.S)
    assert names is not None
    assert ["identity", *re.findall(r"`(\w+)`", names[1])] == list(ACTIVATIONS)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_it_links_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [file for file, _, _ in links if file and not (page.parent / file).exists()] == []
    titled = [(page.parent / file if file else page, title) for file, _, title in links if title]
    assert [(other.name, title) for other, title in titled if title not in titles(other)] == []


def titles(page: Path) -> set[str]:
    """The names by which links find a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_paths_that_it_names_are_there(page: Path) -> None:
    paths = re.findall(
        r"(?<![\w/])((?:factorlayer|csrc|tests|benches|examples|docs)/[\w/.-]*\w\.\w+)", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []
