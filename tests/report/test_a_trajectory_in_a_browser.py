"""A training run on one page, in a browser: the statistic of each claim against the step, and repeated weights."""

import math
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from gradlogz._output_files import write
from gradlogz.page import render
from gradlogz.reporting.comparison_page import read_all
from gradlogz.reporting.trajectory_page import duplicate_sentences, page_of_trajectory
from gradlogz.reporting.trajectory_terminal import trajectory_lines
from support.invented_findings import findings

STEPS = (0, 10, 100, 1000, 2000)
REPEATED = {100: "b" * 64, 2000: "b" * 64}


def checkpoint(step):
    """Findings of a checkpoint; those of steps 100 and 2000 have the same weights."""
    shift = 0.1 if step in REPEATED else step / 10_000
    found = findings(f"run@step{step}", step=step, shift=shift)
    facts = {**found.facts[f"run@step{step}"], "weights_sha256": REPEATED.get(step, f"{step:064d}")}
    return replace(found, facts={f"run@step{step}": facts})


@pytest.fixture(scope="module")
def runs():
    return read_all([checkpoint(step) for step in reversed(STEPS)])


@pytest.fixture(scope="module")
def path(runs, tmp_path_factory):
    return write(tmp_path_factory.mktemp("trajectory") / "trajectory.html", render(page_of_trajectory(runs)))


def test_every_claim_has_a_small_figure(opened, path, runs):
    one = opened(path)
    figures = one.page.locator("#section-trajectories [data-figure]")
    valued = [p for p in runs.predictions if any(math.isfinite(c[p].value) for c in runs.claims if p in c)]
    assert figures.count() == len(valued) > 2
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        expect(figures.nth(i)).to_have_attribute("data-drawn", "light")
    traces = one.page.locator("#figure-trajectory-of-entropy [data-figure]").evaluate(
        "box => box.data.map(t => [t.name, [...t.x], [...t.y], t.error_y ? [...t.error_y.array] : null])"
    )
    line = next(trace for trace in traces if trace[0] == "value")
    assert line[1] == pytest.approx([5, 10, 1000])  # 0 has a place before 10; 100 and 2000 are doubtful
    assert line[2] == pytest.approx([0.5, 0.501, 0.6])
    repeated = next(trace for trace in traces if "repeated weights" in trace[0])
    assert repeated[1] == pytest.approx([100, 2000])
    summary = runs.claims[0]["entropy"]
    points = next(trace for trace in traces if trace[0] == summary.verdict)
    assert points[3][0] == pytest.approx(summary.high - summary.value, rel=1e-2)
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_repeated_weights_are_named(opened, path, runs):
    assert duplicate_sentences(runs) == ["Same weights: run@step100, run@step2000."]
    one = opened(path)
    assert one.page.locator("text=Same weights: run@step100, run@step2000.").count() == 1
    rows = one.page.locator("#table-checkpoints tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    assert [row[:4] for row in rows][2] == ["run@step100", "100", "b" * 16, "run@step2000"]
    assert [row[3] for row in rows] == ["–", "–", "run@step2000", "–", "run@step100"]
    lines = [line.text for line in trajectory_lines(runs, 60)]
    assert lines[-1] == "Same weights: run@step100, run@step2000."
    assert all(len(line) <= 60 for line in lines)


def test_values_and_verdicts_are_in_the_order_of_steps(runs):
    (line,) = (line.text for line in trajectory_lines(runs, 80) if line.text.startswith("entropy"))
    assert line.split() == ["entropy", "0.500", "0.600", "✓✓✓✓✓"]
    assert next(trajectory_lines(runs, 80)).text.split() == ["claim", "step", "0", "step", "2000", "verdicts"]
    entries = {link.label: words for group in page_of_trajectory(runs).verdict.groups for link, words in group.entries}
    assert entries["entropy"] == "supported: 0.5 to 0.6"
    assert not any("nan" in words for words in entries.values())
    narrow = [line.text for line in trajectory_lines(runs, 32)]
    assert max(map(len, narrow)) <= 32
    assert "run@step2000." in narrow[-1]  # wrapped, not cut


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_it_fits_the_screen(opened, path, width, scheme):
    one = opened(path, width=width, scheme=scheme)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.complaints == []


def test_without_steps_checkpoints_are_in_the_order_of_the_arguments():
    runs = read_all([findings("beta"), findings("alpha")])
    page = page_of_trajectory(runs)
    assert runs.steps is None
    assert page.sections[0].parts[0].x.names == ("beta", "alpha")
    assert duplicate_sentences(runs) == []
