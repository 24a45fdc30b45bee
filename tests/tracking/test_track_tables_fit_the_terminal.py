"""The table of tracks fits terminals of 40 to 120 columns, and its verdicts follow from the innovations."""

import math
import subprocess
import sys

import pytest

from gradlogz import track
from gradlogz.reporting.tracks_terminal import tracks_details, tracks_table
from gradlogz.special.proportions import share_of
from gradlogz.tracking.records import consistency_verdict
from gradlogz.tracking.track_quantities import track_quantities
from support.terminals import printed, without_colours


@pytest.fixture(scope="module")
def tracks():
    return track()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("table", [tracks_table, tracks_details])
def test_no_line_is_wider_than_the_terminal(tracks, width, table):
    assert max(len(line) for line in table(tracks, width)) <= width


def test_a_quantity_is_one_line_of_80_columns(tracks):
    assert len(tracks_table(tracks, 80)) == 1 + len(track_quantities(tracks))


def test_colours_are_for_terminals(tracks, monkeypatch):
    text = printed(tracks_table(tracks, 80), force_terminal=True, color_system="standard")
    assert "\x1b[32m✓" in text
    assert printed(tracks_table(tracks, 80)) == without_colours(text)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(tracks_table(tracks, 80), force_terminal=True)


def test_shares_by_coordinate_are_counted(tracks):
    rows = {(row.name, row.part): row for row in track_quantities(tracks)}
    for i, axis in enumerate("xy"):
        v, z = tracks.innovation[:, i].tolist(), tracks.score[:, i].tolist()
        pairs = [(a, b) for a, b in zip(v, z, strict=True) if not math.isnan(a)]
        inside = sum(abs(b) <= 1.959963984540054 for _, b in pairs)
        row = rows["innovation", axis]
        assert (row.value, row.total) == (inside / len(pairs), len(pairs))
        rms = math.sqrt(sum(a * a for a, _ in pairs) / len(pairs))
        assert rows["innovation_rms", axis].value == pytest.approx(rms)
    assert rows["nis", ""].value == tracks.consistency.value
    modes = [rows["mode", name].value for name in tracks.settings.modes]
    assert sum(modes) == pytest.approx(1)


def test_one_coordinate_has_the_score_whose_square_is_the_nis(tracks):
    one = tracks.degrees == 1
    assert bool(one.any())
    assert tracks.score.square().nansum(-1)[one].tolist() == pytest.approx(tracks.nis[one].tolist())


@pytest.mark.parametrize(
    ("number", "total", "verdict"),
    [(0, 0, ""), (95, 100, "consistent"), (9300, 10000, "consistent"), (9200, 10000, "inconsistent"),
     (9900, 10000, "inconsistent"), (5, 6, "consistent")],
)  # fmt: skip
def test_a_share_is_consistent_in_its_interval_or_within_two_points(number, total, verdict):
    assert consistency_verdict(share_of(number, total)) == verdict


def test_a_closed_pipe_costs_no_page_and_shows_no_traceback(tmp_path):
    page = tmp_path / "p.html"
    with subprocess.Popen(
        [sys.executable, "-m", "gradlogz", "track", "--out", str(page)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert process.returncode in (0, 1)
    assert page.read_text().startswith("<!doctype html>")
