"""Tables of pages, between `<!-- table NAME -->` and `<!-- end NAME -->`.

Read next: metric/page.py.
"""

from pathlib import Path


def read_table(page: Path, name: str) -> str:
    """Return the table of a page."""
    return page.read_text().split(f"<!-- table {name} -->\n")[1].split(f"\n<!-- end {name} -->")[0]


def replace_table(page: Path, name: str, table: str) -> None:
    """Write a table into a page."""
    before, rest = page.read_text().split(f"<!-- table {name} -->\n")
    after = rest.split(f"<!-- end {name} -->")[1]
    page.write_text(f"{before}<!-- table {name} -->\n{table}\n<!-- end {name} -->{after}")
