"""The table of a simulation fits terminals of 40 to 120 columns, and is plain text where there is no terminal."""

import re
import subprocess
import sys

import pytest

from gradlogz import simulate, sweep
from gradlogz.reporting.result_table import closing_lines, result_table
from gradlogz.reporting.simulation_terminal import phases_table, simulation_details, simulation_table
from gradlogz.simulation.final_quantities import final_quantities
from support.terminals import printed, without_colours


@pytest.fixture(scope="module")
def simulation():
    return simulate("riccati", seeds=3, steps=2, tokens=60)


@pytest.fixture(scope="module")
def circle():
    return simulate("circle-5", seeds=2, every=1000, tokens=400)


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
@pytest.mark.parametrize("table", [simulation_table, simulation_details])
def test_no_line_is_wider_than_the_terminal(simulation, width, table):
    lines = table(simulation, width)
    assert max(len(line) for line in lines) <= width
    assert all(line.plain == line.plain.rstrip() for line in lines)


def test_a_quantity_is_one_line_of_80_columns(simulation, circle):
    for result in (simulation, circle):
        lines = simulation_table(result, 80)
        assert len(lines) == 1 + len(final_quantities(result))
        assert lines[0].plain.split() == ["quantity", "value", "95", "%", "CI", "expected", "verdict"]


def test_a_narrow_table_has_every_number_of_the_wide_one(simulation):
    wide, narrow = (" ".join(line.plain for line in simulation_table(simulation, w)) for w in (120, 40))
    numbers = {word for word in re.split(r"[ ,–]+", wide) if any(c.isdigit() for c in word)}
    assert len(numbers) > 10
    assert numbers <= {*re.split(r"[ ,–]+", narrow)}


def test_verdicts_have_a_symbol_and_a_colour(circle):
    text = printed(simulation_table(circle, 80), force_terminal=True, color_system="standard")
    assert "✓ supported" in without_colours(text)
    assert "\x1b[32m✓" in text


def test_no_color_means_none(circle, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(simulation_table(circle, 80), force_terminal=True)
    assert "\x1b[3" not in text
    assert "✓ supported" in without_colours(text)


def test_without_a_terminal_it_is_plain_text(circle):
    text = printed(simulation_table(circle, 80))
    assert "\x1b" not in text
    assert text.splitlines() == [line.plain for line in simulation_table(circle, 80)]


def test_a_verdict_follows_from_the_seeds(circle):
    """[theory 10.4]: two or three clusters at beta = 5."""
    rows = {(row.kind, row.name): row for row in final_quantities(circle)}
    count = rows["observable", "clusters"]
    values = circle.trajectory.observed["clusters"][-1].double()
    assert count.value == pytest.approx(float(values.mean()))
    assert count.expected == (2.0, 3.0)
    assert count.verdict == "supported"
    state = rows["state", "clusters"]
    assert (state.value, state.total, state.verdict) == (1.0, 2, "supported")
    assert rows["theorem", "log_pair_energy"].value == 0


def test_the_mean_has_students_interval(simulation):
    from scipy import stats

    row = next(row for row in final_quantities(simulation) if row.name == "radius")
    values = simulation.trajectory.observed["radius"][-1].numpy()
    low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
    assert (row.low, row.high) == (pytest.approx(low), pytest.approx(high))


def test_one_seed_has_no_interval_and_refutes_no_curve():
    rows = final_quantities(simulate("riccati", seeds=1, steps=2, tokens=60, beta=0.4))
    assert all(row.low != row.low for row in rows if row.kind == "observable")
    assert "refuted" not in {row.verdict for row in rows if row.kind == "observable"}


def test_a_phase_diagram_is_a_line_for_each_final_state():
    phases = sweep({"tau": [-0.2, 0.5]}, engine="process", dim=1, beta=0.5, tokens=60, steps=40)
    for width in (40, 60, 80):
        assert max(len(line) for line in phases_table(phases, width)) <= width
    assert len(phases_table(phases, 80)) == 1 + len({p.kind for p in phases.points.values()})


def test_empty_cells_are_dashes_and_no_cell_is_cut():
    rows = [("a name of some length", "1.25", "", "2")]
    wide = result_table(("quantity", "value", "95 % CI", "expected"), rows, ["refuted"], 80)
    assert wide[1].plain.split()[-4:] == ["–", "2", "✗", "refuted"]
    narrow = result_table(("quantity", "value", "95 % CI", "expected"), rows, ["refuted"], 30)
    assert [line.plain for line in narrow] == ["a name of some length", "  ✗ refuted", "  value 1.25, expected 2"]


def test_the_closing_lines_are_three():
    run, results, page = closing_lines("word " * 40, "a.json", "p.html (2.0 MB)", 60)
    assert all(len(part) <= 60 for part in run.plain.splitlines())
    assert (results.plain, page.plain) == ("results  a.json", "page     p.html (2.0 MB)")


def test_a_closed_pipe_costs_no_page_and_shows_no_traceback(tmp_path):
    page = tmp_path / "p.html"
    words = ["simulate", "--tokens", "40", "--dim", "2", "--steps", "2", "--seeds", "2", "--out", str(page)]
    with subprocess.Popen(
        [sys.executable, "-m", "gradlogz", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert process.returncode in (0, 1)
    assert page.read_text().startswith("<!doctype html>")
