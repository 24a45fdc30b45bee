"""The theory is written once: every file of tests/theorems names what it goes beyond.

STATEMENTS   keys of statements that `gradlogz verify` computes
THEORY       numbers of docs/theory.md or docs/errata.md, or keys of references.bib, which it does not compute
"""

import ast
import re
from pathlib import Path

import pytest

from gradlogz.verification.program import statements

TESTS = Path(__file__).parent.parent
DOCS = TESTS.parent / "docs"
FILES = sorted((TESTS / "theorems").glob("test_*.py"))
KEYS = {one.key for one in statements()}
NUMBERS = {
    *re.findall(r"^- \*\*([\d.]+)\*\*", (DOCS / "theory.md").read_text(), re.MULTILINE),
    *re.findall(r"^\| (E\d+) \|", (DOCS / "errata.md").read_text(), re.MULTILINE),
    *re.findall(r"^@\w+\{(\w+),", (TESTS.parent / "src" / "gradlogz" / "references.bib").read_text(), re.MULTILINE),
}


def named(path):
    """The values of STATEMENTS and THEORY of a file, read without running it."""
    values = {"STATEMENTS": (), "THEORY": ()}
    for node in ast.parse(path.read_text()).body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None
        if name in values:
            values[name] = ast.literal_eval(node.value)
    return values


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_what_it_goes_beyond(path):
    values = named(path)
    assert values["STATEMENTS"] or values["THEORY"]
    assert set(values["STATEMENTS"]) <= KEYS
    assert set(values["THEORY"]) <= NUMBERS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_computed_is_named_by_its_statement(path):
    numbers = {number for key in KEYS for number in re.findall(r"E\d+|\d+\.\d+", key)}
    assert not set(named(path)["THEORY"]) & numbers


def items():
    """Number, mark and text of each item of docs/theory.md."""
    return re.findall(r"^- \*\*([\d.]+)\*\* (✓ )?(.*(?:\n  .*)*)", (DOCS / "theory.md").read_text(), re.MULTILINE)


def test_a_number_of_the_theory_is_marked_if_it_is_computed():
    numbers = {number for key in KEYS for number in re.findall(r"\d+\.\d+", key)}
    assert numbers == {number for number, mark, _ in items() if mark and number in numbers}


def test_a_number_is_computed_if_it_is_marked_itself_or_as_an_erratum():
    numbers = {number for key in KEYS for number in re.findall(r"E\d+|\d+\.\d+", key)}
    for number, mark, text in items():
        assert not mark or {number, *re.findall(r"E\d+", text)} & numbers, number


def test_every_erratum_is_computed_but_that_of_a_name():
    computed = {number for key in KEYS for number in re.findall(r"E\d+", key)}
    listed = re.findall(r"^\| (E\d+) \|", (DOCS / "errata.md").read_text(), re.MULTILINE)
    assert computed == set(listed) - {"E28"}


def test_every_equation_of_the_note_on_filters_is_computed():
    computed = {int(number) for key in KEYS for number in re.findall(r"^N2 Eq\. (\d+)", key)}
    assert computed == set(range(1, 16))


def test_no_number_of_the_theory_is_given_twice():
    for name, pattern in (("theory.md", r"^- \*\*([\d.]+)\*\*"), ("errata.md", r"^\| (E\d+) \|")):
        found = re.findall(pattern, (DOCS / name).read_text(), re.MULTILINE)
        assert len(found) == len(set(found)), name
