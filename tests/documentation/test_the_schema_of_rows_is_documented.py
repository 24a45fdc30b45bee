"""docs/probe.md has a line for every column of the tables of rows, with its type, in their order."""

import re
from pathlib import Path

from gradlogz.probing.runs.row_table import COLUMNS, SCHEMA

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"
TYPES = {str: "text", int: "integer", float: "number"}


def test_every_column_has_a_line():
    table = re.search(r"<!-- columns -->\n(.*?)<!-- /columns -->", PAGE.read_text(), re.DOTALL)[1]
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert [(name, kind) for name, kind, _ in lines] == [(f"`{name}`", TYPES[kind]) for name, kind in COLUMNS.items()]
    assert all(meaning.endswith(".") or len(meaning) > 10 for *_, meaning in lines)


def test_the_version_is_that_of_the_code():
    assert re.findall(r"version (\d+) of the schema", PAGE.read_text()) == [str(SCHEMA)]


def test_columns_change_with_the_version():
    """The columns of each version: a change of COLUMNS needs a new version, and a line here."""
    two = [
        "model", "step", "prediction", "layer", "call", "head", "quantity", "value", "low", "high", "null", "null_low",
        "null_high", "tokens", "verdict", "freedom", "null_freedom", "unit",
    ]  # fmt: skip
    assert {2: two}[SCHEMA] == list(COLUMNS)
