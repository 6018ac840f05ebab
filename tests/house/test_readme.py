"""The README's Python runs as printed, and what it says it prints is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(source, str(README), "exec"), {})
    said = re.search(r"print\(decision.*# (.*)", source)
    assert said is not None
    assert capsys.readouterr().out.splitlines()[0] == said[1]


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
