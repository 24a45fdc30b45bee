"""Every notebook of the documentation runs from its first cell to its last, and holds no stale output."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def code_of(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_in_order(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "svg")
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code_of(notebook), start=1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    if notebook.stem == "probe_tour":
        assert len(names["heads"]) == 2 * 4
        assert names["findings"].summary()[0].verdict == "passed"  # identity
        assert "step 0   step 60  verdicts" in names["done"].stdout
        assert names["table"].columns == ["head", "0", "20", "40", "60"]
        assert "Paired over the same documents" in names["compared"].stdout
        assert {row.intervention for row in names["effects"].rows} == {"gradient", "heads"}
        assert names["page"].is_file()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_stored(notebook):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_of(notebook))


def test_the_page_of_tutorials_lists_every_notebook():
    page = (NOTEBOOKS[0].parents[1] / "tutorials.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"(notebooks/{path.name})" not in page] == []
