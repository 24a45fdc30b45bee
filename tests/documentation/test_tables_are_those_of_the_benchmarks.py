"""The tables in the documentation are made of the committed results, and of nothing else."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_up_to_date():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    pages = [path.read_text() for path in tables.PAGES]
    assert [tables.filled(page) for page in pages] == pages, "run python benchmarks/tables.py"
    assert all(f"<!-- table {name} -->" in "".join(pages) for name in tables.TABLES)
