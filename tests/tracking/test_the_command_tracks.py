"""`gradlogz track` prints, writes and refuses."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz._errors import InputValueError
from gradlogz.tracking import filtered_batches
from gradlogz.tracking import run_tracking as running

ROWS = "time,target,x,y\n" + "".join(
    f"{t},{who},{t * 2 + t % 3 * 0.1},{-t + t % 2 * 0.1}\n" for t in range(12) for who in "ab"
)


def run(*arguments):
    return CliRunner().invoke(cli.application(), ["track", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "seen.csv"
    path.write_text(ROWS)
    return path


def test_it_writes_a_page_a_table_and_data(tmp_path, file):
    page, table, data = tmp_path / "p.html", tmp_path / "t.csv", tmp_path / "d.json"
    result = run(file, "--out", page, "--out-table", table, "--json", data)
    assert result.exit_code == 0, result.output
    assert "2 targets, 24 detections" in result.output
    assert len(table.read_text().splitlines()) == 25
    found = json.loads(data.read_text())
    assert found["rows"] == 24
    assert [row["target"] for row in found["targets"]] == ["a", "b"]
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.json", "p.html", "seen.csv", "t.csv"]


def test_json_on_standard_output_is_json_alone(tmp_path, file):
    command = [sys.executable, "-m", "gradlogz", "track", str(file), "--out", str(tmp_path / "p.html"), "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["settings"]["filter"] == "imm"


def test_bad_rows_are_refused_or_left_out_and_counted(tmp_path, file):
    file.write_text(ROWS + "12,a,twelve,1\n13,a,26,-13\n")
    result = run(file, "--out", tmp_path / "p.html")
    assert result.exit_code == 2
    assert re.search(r"track: row 26, column x.*'twelve'", result.output.replace("\n", " "))
    assert not (tmp_path / "p.html").exists()
    result = run(file, "--out", tmp_path / "p.html", "--skip-bad", "--out-table", tmp_path / "t.csv")
    assert result.exit_code == 0, result.output
    assert re.search(r"1 invalid row skipped.*row 26, column x", result.output.replace("\n", " "))
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 26


def test_the_command_on_the_page_makes_the_page_again(file):
    for options in ({}, {"model": "cv"}, {"smooth": True, "seed": 3}, {"sigma": 12.5, "filter": "gpb2"}):
        found = running.track(**options)
        words = found.command.split()[2:]
        again = read_back(words)
        assert again == {"columns": {}, "seed": 0, "smooth": False, "fit": False, "skip_bad": False, **options}, (
            found.command
        )
    assert running.track(file, model="turn", sigma=0.1).command == f"gradlogz track {file} --model turn --sigma 0.1"
    named = running.track(file, columns={"x": "x:km", "y": "y:km"}, sigma=(0.5, 1.0)).command
    assert named == f"gradlogz track {file} --column x=x:km --column y=y:km --sigma 0.5,1"


def read_back(words):
    """The options that the command line understands."""
    got = {}

    def catch(file, *, progress, **options):
        got.update({name: value for name, value in options.items() if value is not None})
        raise InputValueError("track", None, "enough", "Stop.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradlogz.tracking.run_tracking.track", catch)
        assert run(*words).stderr == "track: enough. Stop.\n"
    return got


def test_an_interrupt_leaves_no_file(tmp_path, file, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setitem(filtered_batches.FILTERS, "imm", interrupt)
    result = run(file, "--out", tmp_path / "p.html", "--out-table", tmp_path / "t.csv")
    assert result.exit_code != 0
    assert [p.name for p in tmp_path.iterdir()] == ["seen.csv"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.csv"], "track: none.csv"),
        (["--filter", "ukf"], "no filter 'ukf'"),
        (["--sigma", "0"], "track: sigma"),
        (["--out", "no/such/p.html"], "track: --out "),
        (["--out-table", "no/such/t.csv"], "track: --out-table "),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence_and_exits_with_2(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr, result.output
    assert list(tmp_path.iterdir()) == []


def test_without_its_extra_it_says_how_to_install_it(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    result = run("--out", tmp_path / "p.html")
    assert result.exit_code == 2
    assert "pip install 'gradlogz[report]'" in result.output.replace("\n", " ")
