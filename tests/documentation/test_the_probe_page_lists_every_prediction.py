"""The table of the page about the probe is that of the files: their names, claims, and what would refute them."""

from pathlib import Path

from gradlogz.probing.predictions import PREDICTIONS
from gradlogz.probing.run_probe import name_of

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"


def row(prediction):
    refutes = prediction.refutes.replace("|", "\\|")
    return f"| `{name_of(prediction)}` | {prediction.claim} | {refutes} |"


def test_the_probe_page_lists_every_prediction():
    page = PAGE.read_text()
    table = page[page.index("<!-- predictions -->") : page.index("<!-- /predictions -->")]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    assert lines == [row(p) for p in PREDICTIONS]
