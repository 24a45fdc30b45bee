"""`gradlogz verify` prints every statement, writes JSON, and exits by the truth."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import Empirical, cli
from gradlogz.reporting.verification_page import data_of
from gradlogz.verification.program import statements, verify
from gradlogz.verification.statement import Outcome, Statement, Verification


@pytest.mark.parametrize("one", statements(), ids=lambda s: s.key)
def test_every_corrected_statement_holds(one):
    (verdict,) = verify([one])
    assert verdict.holds, verdict.error or f"residual {verdict.residual:.1e}"


@pytest.mark.parametrize("one", [s for s in statements() if s.printed], ids=lambda s: s.key)
def test_every_misprint_is_off_by_a_visible_amount(one):
    (verdict,) = verify([one])
    assert verdict.printed is None or verdict.printed > 0.01


def test_there_are_at_least_forty_statements_with_distinct_keys():
    keys = [s.key for s in statements()]
    assert len(keys) >= 40
    assert len(set(keys)) == len(keys)


def run(*arguments):
    return CliRunner().invoke(cli.application(), list(arguments))


def test_the_command_exits_with_0_and_counts():
    result = run("verify", "--only", "Prop. 1")
    assert result.exit_code == 0
    assert "2 of 2 corrected statements hold" in result.output


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
    assert "fails Prop. 1a" in result.output


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
