"""progress= is False for nothing, True for text on standard error, or a function of the work done and the total.

The text is a bar on a terminal, and a line for every tenth of the work elsewhere.
"""

import sys
from types import SimpleNamespace

import pytest

import gradlogz
from gradlogz import _progress
from gradlogz._progress import reporter
from support.saved_models import TEXTS, gpt2, tokenizer


def test_false_shows_nothing(capsys):
    reporter(False, "steps")(1, 2)
    assert capsys.readouterr() == ("", "")


def test_true_shows_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = reporter(True, "steps")
    show(1, 2)
    half = capsys.readouterr()
    show(2, 2)
    full = capsys.readouterr()
    assert half.out == full.out == ""
    assert half.err.count("█") == half.err.count("·") == 20
    assert "1/2 steps" in half.err
    assert full.err.count("█") == 40
    assert full.err.endswith("\n")


def test_where_there_is_no_terminal_every_tenth_is_a_line(capsys):
    show = reporter(True, "tokens")
    for done in range(0, 2001, 7):
        show(done, 2000)
    show(2000, 2000)
    show(2000, 2000)  # the end may be reported twice
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    assert [line.split(" %")[0] for line in shown.err.splitlines()] == [str(10 * tenth) for tenth in range(1, 11)]
    assert "2,000/2,000 tokens" in shown.err.splitlines()[-1]


def test_the_unit_at_work_is_named(capsys, monkeypatch):
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        show = reporter(True, "predictions judged", ["tie", "link"])
        show(0, 2)
        show(1, 2)
        half = capsys.readouterr().err
        show(2, 2)
        assert half.rstrip().endswith(": link")
        assert ("tie" in half) == terminal
        assert "link" not in capsys.readouterr().err


@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_a_bar_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    show = reporter(True, "predictions judged", ["feed_forward_hopfield"] * 19)
    for done in range(20):
        show(done, 19)
    _, *bars = capsys.readouterr().err.rstrip("\n").split("\r")
    assert {len(bar) for bar in bars} == {columns - 1}
    assert all("judged" in bar for bar in bars) == (columns > 20)


def test_where_neither_the_total_is_known_nor_a_terminal_there_every_doubling_is_a_line(capsys):
    show = reporter(True, "rows")
    for done in range(0, 1001, 10):
        show(done, 0)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == [
        "10", "20", "40", "80", "160", "320", "640",
    ]  # fmt: skip


def test_where_the_total_is_not_known_the_bar_is_a_count(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter(True, "tokens")(1000, 0)
    shown = capsys.readouterr().err
    assert "1,000 tokens" in shown
    assert "█" not in shown
    assert not shown.endswith("\n")


def test_a_function_is_called_as_it_is():
    calls = []
    reporter(lambda done, total: calls.append((done, total)), "steps")(3, 7)
    assert calls == [(3, 7)]


@pytest.mark.parametrize("terminal", [True, False])
def test_work_of_earlier_calls_does_not_count_for_the_time_left(capsys, monkeypatch, terminal):
    """50 of 60 parts are finished before; checking them takes 5 s, and each of the others 7 s."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    seconds = iter([0.0, 5.0, 12.0, 19.0, 26.0, 33.0])
    monkeypatch.setattr(_progress, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    show = reporter(True, "parts")
    show(50, 60)
    assert "left" not in capsys.readouterr().err
    for done in (51, 52, 53, 54):
        show(done, 60)
    assert "42 s left" in capsys.readouterr().err


def test_a_probe_reports_its_beginning_so_that_the_time_left_counts_the_first_batch():
    reports = []
    gradlogz.probe(
        gpt2(), tokenizer(), TEXTS, tokens=40, predictions=["entropy"], baseline=0.0, draws=0,
        progress=lambda *report: reports.append(report),
    )  # fmt: skip
    assert reports[0] == (0, 40)
    assert all(total in (40, done) for done, total in reports)
    assert reports[-1][0] == reports[-1][1] > 0
