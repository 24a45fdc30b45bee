"""The tables in the documentation are made of the committed results, and of nothing else."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_of_attention_are_up_to_date():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text()
    assert tables.filled(page) == page, "run python benchmarks/tables.py"
