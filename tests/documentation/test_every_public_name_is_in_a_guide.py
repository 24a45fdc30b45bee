"""Every name that a chapter exports appears in a guide: a page of docs other than the generated reference."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOT_GUIDES = ("reference.md", "design.md", "theory.md", "errata.md", "coverage.md", "terminology.md")
GUIDES = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")) if page.name not in NOT_GUIDES)
WORDS = set(re.findall(r"\w+", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", GUIDES, re.DOTALL))))
CHAPTERS = (
    "measures", "attention", "dynamics", "filters", "contrastive", "probing", "reporting", "simulation", "tracking",
    "integrations",
)  # fmt: skip


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_public_name_is_in_a_guide(chapter):
    module = importlib.import_module(f"gradlogz.{chapter}")
    public = {n for n, value in vars(module).items() if not n.startswith("_") and not inspect.ismodule(value)}
    absent = public - WORDS
    assert not absent, f"no guide says what these are: {sorted(absent)}"
