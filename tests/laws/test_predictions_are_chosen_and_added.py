"""The command line chooses predictions by name, runs those of the user's own files, and writes tables of their rows."""

import csv
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.probing.prediction_files import prediction_in, selected
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.row_table import COLUMNS, SCHEMA
from gradlogz.probing.runs.run_folder import read_run
from support.saved_models import gpt2, save, save_text

GUIDE = Path(__file__).parents[2] / "docs" / "adding_a_prediction.md"
NAMES = [prediction.name for prediction in known_predictions()]


@pytest.fixture
def own(tmp_path):
    """The prediction of the guide, as a file of the user."""
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    path = tmp_path / "long_queries.py"
    path.write_text(code.replace('Prediction("long_queries"', "Prediction(__name__"))
    return path


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (None, NAMES),
        (["ascent,tie"], ["ascent", "tie"]),
        (["tie", "ascent"], ["tie", "ascent"]),
        (["tie, entropy ,", "tie"], ["tie", "entropy"]),
    ],
)
def test_names_are_separated_by_commas_or_repeated(only, names):
    assert [prediction.name for prediction in selected(only, [])] == names


def test_a_file_adds_a_prediction_that_can_be_chosen(own):
    assert prediction_in(own).name == "long_queries"
    assert [prediction.name for prediction in selected(None, [str(own)])] == [*NAMES, "long_queries"]
    assert [prediction.name for prediction in selected(["long_queries,tie"], [str(own)])] == ["long_queries", "tie"]


def test_only_files_that_are_named_are_run(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.application(), ["probe", "none", "--only", "trap"])
    assert result.exit_code == 2
    assert not (tmp_path / "sprung").exists()


def test_rows_are_written_by_probe_and_by_report(own, tmp_path, monkeypatch):
    polars = pytest.importorskip("polars")
    monkeypatch.chdir(tmp_path)
    save(gpt2(), tmp_path / "model")
    text = save_text(tmp_path / "text.jsonl")
    words = ["probe", "model", "--text", str(text), "--tokens", "0", "--prediction", str(own), "--out", "run"]
    words += ["--only", "long_queries,tie", "--csv", "rows.csv", "--parquet", "rows.parquet"]
    result = CliRunner().invoke(cli.application(), words)
    assert result.exit_code == 0, result.output
    assert "Long queries" in result.stdout
    assert "100 %" in result.stderr  # progress, without a terminal
    findings = read_run("run").findings
    assert {row.prediction for row in findings.rows} == {"long_queries", "tie", "identity"}  # and the self-check
    with open("rows.csv", newline="") as file:
        head, *lines = csv.reader(file)
    assert head == list(COLUMNS)
    assert len(lines) == len(findings.rows)
    frame = polars.read_parquet("rows.parquet")
    assert frame.equals(findings.frame())
    for file in ("rows.parquet", "run/findings.parquet"):
        assert polars.read_parquet_metadata(file)["gradlogz_schema"] == str(SCHEMA)
    pandas = pytest.importorskip("pandas")
    read = pandas.read_csv("rows.csv", keep_default_na=False, na_values={"value": [""]})
    assert read["value"].tolist() == frame["value"].to_list()
    assert read["unit"].tolist() == frame["unit"].to_list()
    assert {row["unit"] for row in frame.to_dicts() if row["prediction"] == "tie" and row["verdict"]} == {"1"}
    assert [float(line[head.index("value")]) for line in lines] == frame["value"].to_list()

    again = ["report", "run", "--csv", "again.csv", "--parquet", "again.parquet"]
    assert CliRunner().invoke(cli.application(), again).exit_code == 0
    assert Path("again.csv").read_text() == Path("rows.csv").read_text()
    assert polars.read_parquet("again.parquet").equals(frame)


@pytest.mark.parametrize("command", [["probe", "model"], ["report", "run"]], ids=["probe", "report"])
@pytest.mark.parametrize("flag", ["--csv", "--parquet"])
def test_tables_that_cannot_be_written_are_refused_first(command, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.application(), [*command, flag, "no/such/table"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{command[0]}: {flag} ")
