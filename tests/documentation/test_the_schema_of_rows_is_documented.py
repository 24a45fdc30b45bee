"""docs/probe.md has a line for every column of the tables of rows, with its type, in their order."""

import re
from pathlib import Path

from gradlogz.probing.runs.row_table import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"
TYPES = {str: "text", int: "integer", float: "number"}


def test_every_column_has_a_line():
    table = re.search(r"<!-- columns -->\n(.*?)<!-- /columns -->", PAGE.read_text(), re.DOTALL)[1]
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert [(name, kind) for name, kind, _ in lines] == [(f"`{name}`", TYPES[kind]) for name, kind in COLUMNS.items()]
    assert all(meaning.endswith(".") or len(meaning) > 10 for *_, meaning in lines)
