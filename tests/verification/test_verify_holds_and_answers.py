"""`gradlogz verify` prints every statement, writes JSON, and exits with 1 if one fails."""

import functools
import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from gradlogz import Empirical, cli
from gradlogz.reporting.verification_page import data_of
from gradlogz.reporting.verification_terminal import statement_lines, verification_summary
from gradlogz.reporting.verification_wording import by_document
from gradlogz.verification.program import statements, verify
from gradlogz.verification.statement import Outcome, Statement, Verification


@functools.cache
def verdict_on(one):
    """Of a statement, once: several tests read it."""
    (verdict,) = verify([one])
    return verdict


@pytest.mark.parametrize("one", statements(), ids=lambda s: s.key)
def test_every_corrected_statement_holds(one):
    verdict = verdict_on(one)
    assert verdict.holds, verdict.error or f"residual {verdict.residual:.1e}"


@pytest.mark.parametrize("one", [s for s in statements() if s.printed], ids=lambda s: s.key)
def test_every_misprint_is_off_by_a_visible_amount(one):
    verdict = verdict_on(one)
    assert verdict.printed is None or verdict.printed > 0.01


def test_there_are_at_least_forty_statements_with_distinct_keys():
    keys = [s.key for s in statements()]
    assert len(keys) >= 40
    assert len(set(keys)) == len(keys)


def run(*arguments, **environment):
    return CliRunner().invoke(cli.application(), list(arguments), env=environment)


@pytest.fixture(scope="module")
def results():
    return tuple(map(verdict_on, statements()))


def test_the_command_exits_with_0_and_counts():
    result = run("verify", "--only", "Prop. 1")
    assert result.exit_code == 0
    assert "2 of 2" in result.output


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_table_has_one_line_for_each_statement_and_fits(results, width):
    lines = [line.plain for line in statement_lines(results, width)]
    assert max(map(cell_len, lines)) <= width
    assert [line for r in results for line in lines if line.startswith(f"{r.statement.key}  ")]
    rows = [line for line in lines if re.search("[✓✗] [0-9.e+-]+$", line)]
    assert len(rows) == len(results)
    assert all("✓" in line for line in rows)
    assert len(lines) <= 4 + len(by_document(results)) + len(results)


def test_narrow_tables_lose_the_formula_and_then_the_source(results):
    def heads(width):
        return statement_lines(results, width)[0].plain.split()

    assert heads(80) == ["statement", "source", "formula", "printed", "corrected"]
    assert heads(60) == ["statement", "source", "printed", "corrected"]
    assert heads(42) == ["statement", "printed", "corrected"]


def test_a_statement_that_fails_is_marked():
    def broken() -> Outcome:
        return Outcome(0.5, 2.0)

    (result,) = verify([Statement("X", "nowhere", "false", "true", 1e-12, broken)])
    (row,) = [line.plain for line in statement_lines([result], 80) if line.plain.startswith("X")]
    assert "✗ 2" in row
    assert row.endswith("✗ 0.5")
    assert any("X fails" in line.plain for line in verification_summary([result], None, 80))


def test_a_pipe_gets_plain_text_of_80_columns():
    command = [sys.executable, "-m", "gradlogz", "verify", "--only", "paper"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("statement")
    assert max(map(cell_len, lines)) == 80


def test_colours_are_left_out_where_no_color_is_set():
    (line,) = [line for line in statement_lines(tuple(verify(statements("Eq. 4"))), 80) if "Eq. 4" in line.plain]
    printed = {}
    for name, environment in {"colour": {}, "none": {"NO_COLOR": "1"}}.items():
        console = Console(
            file=io.StringIO(), force_terminal=True, width=80, color_system="standard", _environ=environment
        )
        console.print(line)
        printed[name] = console.file.getvalue()
    assert "\x1b[32m✓" in printed["colour"]
    assert "\x1b[32m" not in printed["none"]


@pytest.mark.parametrize("options", [("--only", "note"), ("--details",)])  # less than a buffer, and more
def test_a_closed_pipe_is_silent(options):
    command = [sys.executable, "-m", "gradlogz", "verify", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_details_show_both_formulas_and_the_tolerance():
    output = run("verify", "--only", "Eq. 2, E2", "--details").output
    (one,) = statements("Eq. 2, E2")
    assert one.corrected in output
    assert one.printed in output
    assert "tolerance 1e-12" in output


def test_a_whole_key_selects_its_statement_alone():
    assert [s.key for s in statements("E5")] == ["E5"]
    assert len(statements("E")) > 10


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "gradlogz", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("gradlogz ")


def test_a_flipped_sign_in_the_mean_exits_with_1(monkeypatch):
    mean = Empirical.mean
    monkeypatch.setattr(Empirical, "mean", lambda self, eta: -mean(self, eta))
    result = run("verify", "--only", "Prop. 1a")
    assert result.exit_code == 1
    assert "✗ Prop. 1a fails" in result.output


def test_json_goes_to_a_file_whole(tmp_path):
    path = tmp_path / "verdicts.json"
    assert run("verify", "--only", "Eq. 4", "--json", str(path)).exit_code == 0
    table = json.loads(path.read_text())
    assert table["hold"] is True
    assert table["statements"][0]["statement"] == "Eq. 4"
    assert [p.name for p in tmp_path.iterdir()] == ["verdicts.json"]


def test_json_on_standard_output_is_json_alone():
    command = [sys.executable, "-m", "gradlogz.cli", "verify", "--only", "Eq. 4", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["hold"] is True


def test_a_check_that_raises_has_failed_and_says_why():
    def broken() -> Outcome:
        raise RuntimeError("no such law")

    (verdict,) = verify([Statement("X", "nowhere", None, "true", 1e-12, broken)])
    assert not verdict.holds
    assert verdict.error == "RuntimeError: no such law"
    assert data_of(Verification((verdict,)))["statements"][0]["residual"] is None


def test_a_selection_of_nothing_exits_with_2():
    result = run("verify", "--only", "no such statement")
    assert result.exit_code == 2
    assert "--only" in result.stderr
    assert result.stdout == ""


def test_without_its_extra_the_command_says_how_to_install_it():
    code = "import sys; sys.modules['typer'] = None; from gradlogz.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'gradlogz[cli]'" in result.stderr


def test_the_version_is_told():
    assert run("--version").output.startswith("gradlogz ")
