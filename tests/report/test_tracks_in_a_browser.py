"""The page of tracks: drawn, quiet, offline, target by target."""

import pytest
import torch
from playwright.sync_api import expect

from gradlogz import report, track
from gradlogz.reporting.tracks_page import page_of


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_the_scenario_is_drawn(opened, tmp_path, width, scheme):
    report(track(), tmp_path / "page.html")
    one = opened(tmp_path / "page.html", width=width, scheme=scheme)
    for name in ("tracks", "path-0", "close-0", "modes-0", "nis-0", "calibration", "inside"):
        box = one.page.locator(f"#figure-{name} [data-figure]")
        box.scroll_into_view_if_needed()
        expect(box).to_have_attribute("data-drawn", scheme)
        labels = box.locator(".xtitle, .ytitle").all_text_contents()
        assert labels
        assert all("[" in label for label in labels), "every axis has a unit"
    assert "95 % ellipses" in one.page.locator("#figure-path-0 .legendtext").all_text_contents()
    assert one.page.locator(".verdict .sentence").inner_text().startswith("3 targets, 150 detections")
    assert "gradlogz track" in one.page.locator(".reproduce").inner_text()
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_coordinates_far_from_zero_keep_their_digits():
    t = torch.arange(20.0, dtype=torch.float64)
    found = track({"time": 1.7e9 + t, "x": 5_000_000 + 3 * t + 0.125, "y": 450_000 - t}, sigma=1.0)
    section = next(s for s in page_of(found).sections if s.title == "Individual targets")
    path = section.parts[0].views[0].parts[0]
    assert (path.x.formula, path.y.formula) == ("x − 5000000", "y − 450000")
    seen = next(mark for mark in path.marks if mark.name == "detections")
    assert seen.x[:2] == [0.125, 3.125]


def test_many_targets_in_space_have_a_page_of_the_most_interesting(opened, tmp_path):
    n = 40 * 6
    who = torch.arange(40).repeat(6)
    t = torch.arange(6).repeat_interleave(40).double()
    wobble = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y, z = (wobble + t[:, None] * (who[:, None] % 7)).unbind(-1)
    found = track({"time": t, "target": who, "x": x, "y": y, "z": z})
    report(found, tmp_path / "page.html")
    one = opened(tmp_path / "page.html")
    assert one.page.locator("#table-targets tbody tr").count() == 40
    assert "12 of 40 targets" in one.page.locator("body").inner_text()
    assert one.complaints == []
