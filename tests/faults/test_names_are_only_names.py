"""Names of models, files and targets are shown as they are: no markup, no escape sequence, no formula takes effect."""

import csv
import io

import pytest
from test_a_run_is_written_whole_or_not_at_all import run_of
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz._foreign_text import table_cell, visible
from gradlogz.commands import outputs
from gradlogz.probing.runs.row_table import csv_text
from gradlogz.tracking import table
from gradlogz.tracking.run_tracking import track
from support.saved_models import gpt2, save, save_text

FORMULAS = ["=HYPERLINK(1)", "+cmd|x", "@SUM(A1)", "-2+3", "\t=1", "\r=1"]
NUMBERS = ["-2", "+3.5", "-1e-3", "", "a", "1=1"]
ESCAPES = "\x1b[2J\x07\x9b31m\u202e\x7f\b"


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_becomes_a_text(cell):
    assert table_cell(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", [*NUMBERS, -2.0, None, 3])
def test_other_cells_stay(cell):
    assert table_cell(cell) == cell


@pytest.mark.parametrize("polars", [True, False])
def test_tables_of_tracks_compute_nothing(tmp_path, monkeypatch, polars):
    names = [*FORMULAS[:4], "-5", "plain"]
    rows = [(t, name) for name in names for t in (0, 1, 2)]
    columns = {"time": [str(t) for t, _ in rows], "target": [n for _, n in rows]}
    tracks = track(columns | {"x": [1.0 * t for t, _ in rows], "y": [0.0] * len(rows)}, sigma=1.0, noise=1.0)
    if not polars:
        monkeypatch.setattr(table, "_polars", lambda: None)
    table.write_table(tracks, tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        written = {row["target"] for row in csv.DictReader(file)}
    assert written == {*(f"'{name}" for name in FORMULAS[:4]), "-5", "plain"}


def test_tables_of_findings_compute_nothing():
    findings = run_of(1).findings
    rows = [row._replace(layer="=1+1") for row in findings.rows]
    (name,) = {
        row["layer"] for row in csv.DictReader(io.StringIO(csv_text(findings.facts, rows, findings.declarations)))
    }
    assert name == "'=1+1"


def test_control_characters_become_pictures():
    text = visible(f"a{ESCAPES}b\n\tc")
    assert text.replace("\n", "").replace("\t", "").isprintable()
    assert len(text) == len(f"a{ESCAPES}b\n\tc")
    assert text.startswith("a␛[2J␇")


def test_a_terminal_gets_none_of_them(capsys):
    console = outputs.terminal(None)
    console.print(f"[bold]{ESCAPES}[/red] :smile:")
    outputs.print_closing(console, f"run {ESCAPES}", "[/x]", "page")
    printed = capsys.readouterr().out
    assert not set(ESCAPES) - set("[2J31m") & set(printed)
    assert printed.startswith("[bold]␛[2J")
    assert ":smile:" in printed
    assert "[/x]" in printed


def test_errors_show_them_as_pictures():
    result = CliRunner().invoke(cli.application(), ["report", f"no{ESCAPES}run"])
    assert result.exit_code == 2
    assert "␛[2J" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_model_may_be_called_markup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(gpt2(), tmp_path / "[" / "x]\x1b[2J")
    save_text(tmp_path / "text.jsonl")
    words = [
        "probe",
        "[/x]\x1b[2J",
        "--text",
        "text.jsonl",
        "--only",
        "entropy",
        "--draws",
        "0",
        "--out",
        "[bold]x[red]",
    ]
    result = CliRunner().invoke(cli.application(), words)
    assert result.exit_code == 0, result.output
    assert "\x1b[2J" not in result.output
    assert "x]␛[2J" in result.output


def test_files_may_have_names_that_are_not_utf_8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(gpt2(), tmp_path / "model")
    save_text(tmp_path / "text\udcff.jsonl")
    words = ["probe", "model", "--text", "text\udcff.jsonl", "--tokens", "0", "--only", "entropy", "--draws", "0"]
    for run in ("run", "run\udcff"):
        files = ["--out", run, "--json", f"{run}.json", "--csv", f"{run}.csv", "--parquet", f"{run}.parquet"]
        result = CliRunner().invoke(cli.application(), [*words, "--device", "cpu", *files], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(cli.application(), ["report", run], catch_exceptions=False)
        assert result.exit_code == 0, result.output
