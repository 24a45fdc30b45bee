"""gradlogz report and compare: a page in its place, or a sentence and exit status 2; probe ends with a page."""

import importlib.util
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.commands.outputs import page_of
from gradlogz.probing.runs.run_folder import Run, write_run
from gradlogz.reporting import report
from gradlogz.reporting.comparison_terminal import comparison_lines
from gradlogz.reporting.findings_wording import by_agreement
from support.invented_findings import DECLARATIONS, findings


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
    assert "2 runs" in (tmp_path / "both.html").read_text()


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
    assert page_of(tmp_path / "two", report) == str(tmp_path / "two" / "report.html")
    assert "<h1>two</h1>" in (tmp_path / "two" / "report.html").read_text()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert page_of(tmp_path / "one", report).startswith("none; pip install 'gradlogz[report]'")
    assert not (tmp_path / "one" / "report.html").exists()


# The terminal ---------------------------------------------------------------------------------------------------------


def started(words, columns=None, **options):
    """A command in a process of its own, whose output is a pipe and no terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {} if columns is None else {"COLUMNS": str(columns)}
    command = [sys.executable, "-m", "gradlogz", *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **streams, **options)


@pytest.mark.parametrize("columns", [None, 40])  # each is a process; None is 80
@pytest.mark.parametrize("name", ["report", "compare"])
def test_tables_fit_and_are_plain_where_there_is_no_terminal(run, tmp_path, name, columns):
    runs = [tmp_path / "one"] if name == "report" else [tmp_path / "one", tmp_path / "two"]
    process = started([name, *runs, "--out", tmp_path / "page.html"], columns)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "\x1b" not in output
    table, closing = output[: output.index("\nrun ")], output[output.index("\nrun ") :]
    lines = table.splitlines()
    assert max(map(len, lines)) <= (columns or 80)
    assert sum(line.startswith(("  ", "✓", "✗", "~", "–")) for line in lines) >= 5  # one line for each claim
    assert f"page     {tmp_path / 'page.html'} (" in closing
    assert f"results  {tmp_path / 'one'}" in closing


def test_details_add_sentences(run, tmp_path):
    short, long = run("report", tmp_path / "one"), run("report", tmp_path / "one", "--details")
    assert "They do not." not in short.output
    assert "They do not." in long.output
    both = run("compare", tmp_path / "one", tmp_path / "two", "--details", "--out", tmp_path / "both.html")
    assert "one: They do not." in both.output
    assert "two: They do not." in both.output


def test_a_comparison_has_a_line_for_each_claim_and_a_cell_for_each_run(run, tmp_path):
    output = run("compare", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both.html").output
    (line,) = (line for line in output.splitlines() if line.startswith("  entropy"))
    assert line.split() == ["entropy", "✓", "0.500", "✓", "0.500", "+0.000", "-0.141", "to", "0.141", "1"]
    (heading,) = (line for line in output.splitlines() if line.startswith("claim"))
    assert heading.split() == ["claim", "one", "two", "change", "95", "%", "CI", "p"]
    assert "same documents: 0 of 2" in output
    table = output.splitlines()[: output.splitlines().index(heading) + 10]
    assert max(map(len, table)) <= 80


def test_runs_that_do_not_fit_follow_in_further_tables():
    names = [f"model {i}" for i in range(5)]
    claims = [{s.prediction: s for s in findings(name, shift=i / 10).summary()} for i, name in enumerate(names)]
    lines = [line.text for line in comparison_lines(names, claims, DECLARATIONS, 60)]
    assert max(map(len, lines)) <= 60
    headings = [line for line in lines if line.startswith("claim")]
    assert len(headings) == 3
    assert all(name in " ".join(headings) for name in names)


def test_long_names_of_runs_lose_what_they_share():
    names = ["pythia-14m@checkpoint-500", "pythia-14m@checkpoint-1000"]
    claims = [{s.prediction: s for s in findings(name).summary()} for name in names]
    first, second, *_ = (line.text for line in comparison_lines(names, claims, DECLARATIONS, 80))
    assert first == "runs  pythia-14m@checkpoint-500, pythia-14m@checkpoint-1000"
    assert second.split()[1:3] == ["500", "1000"]


def test_descriptions_and_self_checks_are_no_agreement_of_verdicts():
    verdicts = {
        "tested": ("supported", "supported"), "changed": ("supported", "refuted"), "absent": ("supported", ""),
        "described": ("described", "described"), "checked": ("passed", "passed"), "broken": ("passed", "failed"),
    }  # fmt: skip
    summary = findings("one").summary()[0]
    runs = [{name: summary._replace(verdict=pair[i]) for name, pair in verdicts.items()} for i in range(2)]
    agreement = by_agreement(runs)
    assert agreement.different == ["changed", "broken"]
    assert agreement.same == ["tested"]
    assert agreement.described == ["described", "checked"]
    assert agreement.untested == ["absent"]


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_closed_pipe_is_silent(run, tmp_path, name):
    runs = [tmp_path / "one"] if name == "report" else [tmp_path / "one", tmp_path / "two"]
    with started([name, *runs, "--out", tmp_path / "page.html"]) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    assert (tmp_path / "page.html").is_file()  # files come before the table
