"""The table of docs/probe.md has the declared texts: kind, claim, definition of the statistic, and both conditions.

As a script, this file writes the table again.
"""

from pathlib import Path

from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.records import DESCRIPTIVE

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"
START, END = "<!-- predictions -->\n", "<!-- /predictions -->"
COLUMNS = ("prediction", "kind", "claim", "definition of the statistic", "supported if", "refuted if")
HEADING = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def table():
    rows = []
    for prediction in known_predictions():
        declared = prediction.declaration
        conditions = ["–", "–"] if declared.kind == DESCRIPTIVE else [declared.supports, declared.refutes]
        cells = [declared.kind, declared.claim, declared.formula, *conditions]
        rows.append(" | ".join([f"| `{prediction.name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |\n")
    return HEADING + "".join(rows)


def parts():
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    current, after = rest.split(END)
    return before, current, after


def test_the_probe_page_lists_every_prediction():
    assert parts()[1] == table()


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + START + table() + END + after, encoding="utf-8")
