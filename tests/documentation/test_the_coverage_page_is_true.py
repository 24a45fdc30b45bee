"""docs/coverage.md: one row for every statement of the sources, with code and tests that exist, or a reason."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from gradlogz.verification.program import statements

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Statements of each source: the paper, two notes, the record of the paper, the appendix.
COUNTS = {"P": 93, "A": 25, "F": 52, "M": 1, "H": 18}
KEYS = {one.key for one in statements()}


class Row(NamedTuple):
    id: str
    place: str
    statement: str
    verify: str
    code: str
    tests: str


def rows():
    for line in (DOCS / "coverage.md").read_text().splitlines():
        if re.match(r"\| [A-Z]\d+[a-z]? \|", line):
            yield Row(*(cell.strip() for cell in line.strip("|").split(" |")))


ROWS = list(rows())


def links(cell):
    return re.findall(r"\[`?([^]`]*)`?\]\(([^)#]*)[^)]*\)", cell)


def defines(target, name):
    """Whether the file exists and defines this name, or bears it."""
    path = DOCS / target
    pattern = rf"^\s*(?:(?:def|class) {name}\b|{name}\b[^=\n]*=)"
    return path.is_file() and (path.stem == name or re.search(pattern, path.read_text(), re.MULTILINE) is not None)


def test_every_statement_has_one_row():
    assert Counter(row.id[0] for row in ROWS) == COUNTS
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert all(row.place and row.statement for row in ROWS)
    for letter, count in COUNTS.items():
        numbers = [int(re.sub(r"\D", "", row.id)) for row in ROWS if row.id[0] == letter]
        assert numbers == sorted(numbers)  # 1, 2, 3, 3 for 3a, ... in the order of the source
        assert set(numbers) == set(range(1, max(numbers) + 1)), count


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_has_code_and_tests_or_a_reason(row):
    reason = re.search(r"\*[A-Z][^*]*\.\*$", row.statement)
    assert (row.code and row.tests) or reason


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_row_names_exists(row):
    assert not [(name, target) for name, target in links(row.code) if not defines(target, name)]
    for name, target in links(row.tests):
        path = (DOCS / target).resolve()
        assert path == ROOT / "tests" / f"{name}.py", target
        assert re.search(r"^def test_", path.read_text(), re.MULTILINE)
    assert set(re.findall(r"`([^`]*)`", row.verify)) <= KEYS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_tests_of_a_row_use_its_code(row):
    """Some name of the row is in a test of the row; options of a call, such as contractions, have other names there."""
    texts = [(DOCS / target).read_text() for _, target in links(row.tests)]
    names = {name for name, _ in links(row.code)}
    if names and texts:
        assert any(re.search(rf"\b{name}\b", text) for name in names for text in texts)


def test_every_statement_of_verify_about_a_source_is_in_a_row():
    named = {key for row in ROWS for key in re.findall(r"`([^`]*)`", row.verify)}
    sources = {one.key for one in statements() if not one.where.startswith("theory")}
    assert not sources - named
