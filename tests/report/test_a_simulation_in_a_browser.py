"""The pages of simulations and phase diagrams: drawn, quiet, offline, with theory beside what was seen."""

import pytest
import torch
from playwright.sync_api import expect

from gradlogz import report, simulate, sweep, track


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("simulation") / "page.html"
    report(simulate(beta=0.1, contraction="rms_norm", seeds=2, steps=20, tokens=60), path)
    return path


def test_a_simulation_is_drawn(opened, path):
    one = opened(path)
    folded = one.page.locator("details:not([open]) > summary")
    while folded.count():
        folded.first.click()
    boxes = one.page.locator("[data-figure]")
    assert boxes.count() >= 9
    for i in range(boxes.count()):
        boxes.nth(i).scroll_into_view_if_needed()
        expect(boxes.nth(i)).to_have_attribute("data-drawn", "light")
        labels = boxes.nth(i).locator(".xtitle, .ytitle").all_text_contents()
        assert all("[" in label for label in labels if label), "every axis has a unit"
    assert "theory" in one.page.locator("#figure-self-weight .legendtext").all_text_contents()
    assert one.page.locator(".verdict .sentence").inner_text().startswith("After 20 steps")
    assert "gradlogz simulate --tokens 60" in one.page.locator(".reproduce").inner_text()
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_phase_diagram_is_drawn_on_a_phone(opened, tmp_path):
    found = sweep({"beta": [0.2, 0.6, 1.0], "tau": [-0.2, 0.5]}, engine="process", tokens=60, dim=2, steps=20)
    report(found, tmp_path / "phases.html")
    one = opened(tmp_path / "phases.html", width=390)
    expect(one.page.locator("#figure-verdicts [data-figure]")).to_have_attribute("data-drawn", "light")
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "τ = 0" in one.page.locator("#figure-verdicts .legendtext").all_text_contents()
    one.page.click("summary:has-text('Grid points')")
    assert one.page.locator("#table-places tbody tr").count() == 6
    assert one.complaints == []


def test_an_interrupted_diagram_is_shown_with_gaps(opened, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    report(
        sweep({"dim": [1, 2, 3]}, engine="process", tokens=40, steps=5, progress=interrupt), tmp_path / "phases.html"
    )
    one = opened(tmp_path / "phases.html")
    assert "nterrupted" in one.page.locator(".sentence").inner_text()
    assert one.complaints == []


def test_a_cloud_that_blew_up_or_stands_still_has_a_page(opened, tmp_path):
    for name, options in (("blow-up", {"seeds": 1}), ("slope-0.3", {"steps": 0, "keys": 50, "tokens": 70, "seeds": 1})):
        report(simulate(name, **options), tmp_path / f"{name}.html")
        one = opened(tmp_path / f"{name}.html")
        expect(one.page.locator("#figure-cloud [data-figure]")).to_have_attribute("data-drawn", "light")
        assert one.complaints == []


def test_the_page_is_returned_and_written_where_a_path_is_given(tmp_path):
    found = simulate(tokens=20, dim=1, steps=1, seeds=1)
    assert report(found, tmp_path / "page.html") == report(found) == (tmp_path / "page.html").read_text("utf-8")


def test_a_notebook_shows_the_page_in_a_frame():
    for found in (
        simulate(torch.randn(20, 1, dtype=torch.float64), steps=2),
        sweep({"dim": [1, 2]}, engine="process", tokens=40, steps=2),
        track({"time": [0, 1, 2], "x": [0.0, 1.0, 2.0], "y": [0.0, 0.0, 0.1]}, sigma=1.0),
    ):
        shown = found._repr_html_()
        assert shown.startswith("<iframe srcdoc=")
        assert "<script" not in shown, "escaped: it is the frame that runs it"
