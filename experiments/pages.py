"""Tables of pages, between `<!-- table NAME -->` and `<!-- end NAME -->`.

Read next: metric/page.py.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parent
DOCS = EXPERIMENTS.parent / "docs"


def read_table(page: Path, name: str) -> str:
    """Return the table of a page."""
    return page.read_text().split(f"<!-- table {name} -->\n")[1].split(f"\n<!-- end {name} -->")[0]


def replace_table(page: Path, name: str, table: str) -> None:
    """Write a table into a page."""
    before, rest = page.read_text().split(f"<!-- table {name} -->\n")
    after = rest.split(f"<!-- end {name} -->")[1]
    page.write_text(f"{before}<!-- table {name} -->\n{table}\n<!-- end {name} -->{after}")


def write_page(
    name: str,
    tables: Mapping[str, Callable[[Any], str]],
    figure: Callable[[Any, Path], None],
) -> None:
    """Write the tables of an experiment's results into its page, and its figure."""
    results = json.loads((EXPERIMENTS / name / "results.json").read_text())
    for table, make in tables.items():
        replace_table(DOCS / "experiments" / f"{name}.md", table, make(results))
    figure(results, DOCS / "pictures" / f"{name}.svg")
