"""The page lists the largest NIS and the levels, says whether a fit converged, and has no figure without data."""

import dataclasses
import math

import pytest
import torch

from gradlogz.page import Figure, Section, Table, Views
from gradlogz.reporting.tracks_page import page_of
from gradlogz.reporting.tracks_wording import method, moment_text
from gradlogz.tracking import track


def section(page, title: str) -> Section:
    return next(part for part in page.sections if part.title == title)


def test_the_largest_nis_come_first():
    tracks = track(outliers=0.0)
    tables = [
        part for part in section(page_of(tracks), "Consistency of the filter (NIS)").parts if isinstance(part, Table)
    ]
    column = [column.name for column in tables[0].columns].index("NIS")
    values = [row[column] for row in tables[0].rows]
    above = tracks.nis[tracks.nis > tracks.nis_high]
    assert values == sorted(above.tolist(), reverse=True)
    assert len(values) > 0


def test_levels_stand_before_the_tracks():
    titles = [part.title for part in page_of(track()).sections]
    assert titles.index("Noise levels") == titles.index("Results") + 1


@pytest.mark.parametrize("converged", [True, False])
def test_a_fit_says_whether_it_converged(converged):
    tracks = track()
    fitted = dataclasses.replace(tracks, settings=dataclasses.replace(tracks.settings, fit=True), converged=converged)
    assert ("not converged" in method(fitted)) != converged


def test_a_single_detection_has_a_path_and_no_empty_figure():
    tracks = track({"time": [0.0, 0.0, 1.0, 2.0], "target": list("abbb"), "x": [1.0, 2, 3, 4], "y": [0.0, 0, 0, 0]})
    views = next(part for part in section(page_of(tracks), "Individual targets").parts if isinstance(part, Views))
    figures = {view.label: [part for part in view.parts if isinstance(part, Figure)] for view in views.views}
    assert [figure.name for figure in figures["a"]] == ["path-0"]
    assert len(figures["b"]) == 3
    alone = track({"time": [0.0], "x": [1.0], "y": [2.0]})
    assert "Consistency of the filter (NIS)" not in [part.title for part in page_of(alone).sections]


def test_an_outlier_without_an_estimate_has_no_distance():
    tracks = track({"time": [0.0, 1, 2, 3], "x": [0.0, 1, 2, 3], "y": [0.0, 0, 0, 0]})
    detections = tracks.detections._replace(rejected=torch.tensor([True, False, False, False]))
    mean = tracks.filtered.mean.clone()
    mean[0] = math.nan
    changed = dataclasses.replace(tracks, detections=detections, filtered=tracks.filtered._replace(mean=mean))
    table = section(page_of(changed), "Outliers").parts[0]
    assert table.rows[0][-1] is None


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (3.5, 3.5),
        ("2024-05-01T12:00:00.123456+00:00", "2024-05-01 12:00:00.123Z"),
        ("2024-05-01 12:00:00", "2024-05-01 12:00:00"),
    ],
)
def test_times_fit_one_line_of_a_table(label, expected):
    assert moment_text(label) == expected
