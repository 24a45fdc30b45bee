"""`gradlogz verify --out` makes a page that shows every statement, with its residual and its verdict."""

from html import unescape

import pytest
from typer.testing import CliRunner

from gradlogz import cli, report
from gradlogz.page import render
from gradlogz.reporting.verification_page import data_of, page_of
from gradlogz.verification.program import statements, verify
from gradlogz.verification.statement import Outcome, Statement, Verification


@pytest.fixture(scope="module")
def verification():
    return Verification(tuple(verify()))


def test_the_page_shows_every_statement(verification):
    text = unescape(report(verification))
    text = text.replace("\u00a0", " ").replace("\u2060", "")  # against line breaks inside "N = 3" and "9–10"
    for one in statements():
        assert one.key in text
        assert one.corrected in text
        assert one.printed is None or one.printed in text
    assert f"{len(verification.results)} of {len(verification.results)}" in text
    assert "Shim, A Probabilistic Interpretation of Transformers" in text


def test_its_data_are_those_of_the_command(verification):
    rows = data_of(verification)["statements"]
    assert [row["statement"] for row in rows] == [one.key for one in statements()]
    assert all(row["holds"] for row in rows)


def test_a_statement_that_fails_is_named_with_its_error():
    def broken() -> Outcome:
        raise RuntimeError("no such law")

    page = page_of(Verification(tuple(verify([Statement("X", "nowhere", None, "true", 1e-12, broken)]))))
    (note,) = page.verdict.notes
    assert "X" in note
    assert "RuntimeError: no such law" in note
    assert page.verdict.chips[0].status == "departs"
    assert "no such law" in render(page)


def test_the_command_writes_the_page(tmp_path):
    path = tmp_path / "theory.html"
    result = CliRunner().invoke(cli.application(), ["verify", "--only", "Eq. 4", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "theory.html" in result.output.replace("\n", "")
    assert path.read_text().startswith("<!doctype html>")
