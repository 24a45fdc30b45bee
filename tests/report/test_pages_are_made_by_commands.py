"""gradlogz report and compare: a page in its place, or a sentence and exit status 2; probe ends with a page."""

import importlib.util

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.commands import probe
from gradlogz.probing.runs.run_folder import Run, write_run
from support.invented_findings import findings


@pytest.fixture
def run(tmp_path):
    """Run a command in a folder with two runs."""
    for name in ("one", "two"):
        found = findings(name)
        write_run(tmp_path / name, Run({"name": name}, {}, 0, f"gradlogz probe {name}", {}, {}, found))
    return lambda *words: CliRunner().invoke(cli.application(), [str(word) for word in words])


def test_a_report_lies_in_the_folder_of_its_run(run, tmp_path):
    found = run("report", tmp_path / "one")
    assert found.exit_code == 0, found.output
    page = (tmp_path / "one" / "report.html").read_text()
    assert "<h1>one</h1>" in page
    assert "gradlogz probe one" in page
    assert "report.html" in found.output


def test_a_report_or_a_comparison_lies_where_it_is_asked_for(run, tmp_path):
    assert run("report", tmp_path / "one", "--out", tmp_path / "page.html").exit_code == 0
    assert run("compare", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both.html").exit_code == 0
    assert (tmp_path / "page.html").is_file()
    assert "2 runs side by side" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "none"], "report: "),
        (["report", "one", "--out", "no/such/page.html"], "report: --out "),
        (["compare", "one"], "compare: "),
        (["compare", "one", "none"], "compare: "),
    ],
)
def test_what_cannot_be_done_is_said(run, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    found = run(*words)
    assert found.exit_code == 2
    assert found.stderr.startswith(says)
    assert found.stdout == ""


def test_a_probe_ends_with_a_page_or_with_how_to_get_one(run, tmp_path, monkeypatch):
    assert probe._page_line(tmp_path / "two") == f"Page: {tmp_path / 'two' / 'report.html'}"
    assert "<h1>two</h1>" in (tmp_path / "two" / "report.html").read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert probe._page_line(tmp_path / "one").startswith("Page: none; pip install 'gradlogz[report]'")
    assert not (tmp_path / "one" / "report.html").exists()
