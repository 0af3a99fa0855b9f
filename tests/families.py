"""The first table of docs/kernels/README.md: a row for each family of kernels, written from their records.

python tests/families.py          # writes it
"""

from __future__ import annotations

from pathlib import Path

from factorlayer.plan.registry import KINDS
from factorlayer.plan.registry.family import Family

PAGE = Path(__file__).parent.parent / "docs" / "kernels" / "README.md"
BEGIN, END = "<!-- the table of families: python tests/families.py -->\n", "<!-- its end -->\n"


def row(family: Family) -> str:
    module, header = (f"[{path}](../../{path})" for path in (family.module, family.template))
    page = f"[{family.page}]({family.page}.md)"
    return f"| {family.about} | {family.takes} | {family.name} | {module} | {header} | {page} |\n"


def table() -> str:
    made = ""
    for kind, families in KINDS.items():
        made += f"\n**{kind}**\n\n| what you look for | what it takes | family | module | header | page |\n"
        made += f"| {'--- | ' * 6}".rstrip() + "\n" + "".join(map(row, families))
    return made + "\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
