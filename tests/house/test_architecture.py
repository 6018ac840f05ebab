"""The map of the house: every file of the core has its line in docs/architecture.md, and no line is left over."""

from __future__ import annotations

import re

import pytest
from test_import_rules import CORE, GROUND, PARTS, ROOT, part_of

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
FILES = PAGE.partition("## The core, file by file")[2].partition("\n## ")[0]


def listed(heading: str) -> list[str]:
    """The files in the table under a bold heading."""
    table = FILES.partition(f"**{heading}**")[2].partition("\n**")[0]
    return re.findall(r"^\| `(\w+)` \| .+ \|$", table, re.MULTILINE)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_file_of_a_part_has_its_line(part: str) -> None:
    files = {module.rpartition(".")[2] for module in CORE if part_of(module) == part and module.count(".") == 2}
    assert len(listed(part)) == len(set(listed(part)))
    assert set(listed(part)) == files


def test_every_file_at_the_top_has_its_line() -> None:
    assert set(listed("The top")) == {*GROUND, "settings", "stats", "node_clock", "node"}


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
