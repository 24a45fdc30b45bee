"""The table of the page about the probe is that of the files: their names, claims, and what would refute them."""

from pathlib import Path

from gradlogz.probing.predictions import known_predictions

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"


def row(prediction):
    refutes = prediction.declaration.refutes.replace("|", "\\|")
    return f"| `{prediction.name}` | {prediction.declaration.claim} | {refutes} |"


def test_the_probe_page_lists_every_prediction():
    page = PAGE.read_text()
    table = page[page.index("<!-- predictions -->") : page.index("<!-- /predictions -->")]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    assert lines == [row(p) for p in known_predictions()]
