"""The tables of docs/probe.md have the declared texts: claims, statistics, conditions; nulls; bounds, smallest effects.

As a script, this file writes the tables again.
"""

from pathlib import Path

import pytest

from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.records import DESCRIPTIVE

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"
COLUMNS = ("prediction", "kind", "claim", "definition of the statistic", "supported if", "refuted if")
OF_NULLS = ("prediction", "null", "what it keeps and destroys, and why")
OF_BOUNDS = ("prediction", "bound", "derivation", "smallest interesting effect")


def lines(columns, rows):
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    heading = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    return heading + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def predictions():
    rows = []
    for prediction in known_predictions():
        declared = prediction.declaration
        conditions = [text or "–" for text in (declared.supports, declared.refutes)]
        rows.append([f"`{prediction.name}`", declared.kind, declared.claim, declared.formula, *conditions])
    return lines(COLUMNS, rows)


def nulls():
    rows = []
    for prediction in known_predictions():
        declared = prediction.declaration
        name = "–" if declared.null in ("", "null") else declared.null
        rows.append([f"`{prediction.name}`", name, declared.null_reason])
    return lines(OF_NULLS, rows)


def bounds():
    rows = []
    for prediction in known_predictions():
        declared = prediction.declaration
        if declared.kind != DESCRIPTIVE:
            derived = declared.bounds or {"the null": "–"}
            rows += [[f"`{prediction.name}`", *each, declared.interesting or "–"] for each in derived.items()]
    return lines(OF_BOUNDS, rows)


TABLES = {"predictions": predictions, "nulls": nulls, "bounds": bounds}


def parts(name):
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(start)
    current, after = rest.split(end)
    return before + start, current, end + after


@pytest.mark.parametrize("name", TABLES)
def test_the_probe_page_lists_every_prediction(name):
    assert parts(name)[1] == TABLES[name]()


def test_every_prediction_names_its_null_and_why():
    missing = [p.name for p in known_predictions() if len(p.declaration.null_reason.split()) < 8]
    assert not missing, f"Declaration.null_reason is empty: {missing}"


if __name__ == "__main__":
    for name, table in TABLES.items():
        before, _, after = parts(name)
        PAGE.write_text(before + table() + after, encoding="utf-8")
