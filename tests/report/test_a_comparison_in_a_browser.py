"""Several runs on one page, opened by a browser: verdicts beside each other, and trends over training."""

import json

import pytest
from playwright.sync_api import expect

from gradlogz import compare
from gradlogz._output_files import write
from gradlogz.reporting.comparison_page import page_of_runs, read_all
from support.invented_findings import HEADS, LAYERS, findings


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    runs = [findings(f"model <b>{step}", step=step, shift=step / 1000) for step in (200, 0, 100)]
    return write(tmp_path_factory.mktemp("compare") / "compare.html", compare(runs))


def rows_of(one, table):
    return one.page.locator(f"#table-{table} tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


def test_checkpoints_are_in_order_and_their_trends_are_drawn(opened, path):
    one = opened(path)
    heads = one.page.locator("#table-claims th").all_inner_texts()
    assert heads == ["claim", "kind", "model <b>0", "model <b>100", "model <b>200"]
    values = ["supported 0.5", "supported 0.6", "supported 0.7"]
    assert rows_of(one, "claims")[0] == ["Heads choose.", "prediction", *values]
    entropy = [row for row in rows_of(one, "differences") if row[0] == "entropy"]
    assert [row[1] for row in entropy] == ["model <b>100", "model <b>200"]
    assert [float(row[3]) for row in entropy] == pytest.approx([0.1, 0.2])
    assert all("to" in row[4] and row[6:] == ["no", "not paired", "supported"] for row in entropy)
    one.page.click("#table-claims a >> text=Heads choose.")
    figures = one.page.locator("#section-entropy [data-figure]:visible")
    assert figures.count() == 4
    for i in range(4):
        figures.nth(i).scroll_into_view_if_needed()
        expect(figures.nth(i)).to_have_attribute("data-drawn", "light")
        labels = figures.nth(i).locator(".xtitle, .ytitle").all_text_contents()
        assert all("[" in label for label in labels if label)
    median = one.page.locator("#figure-entropy-entropy-over-training [data-figure]")
    x, y = median.evaluate("box => { const t = box.data.find(t => t.name === 'median'); return [t.x, t.y]; }")
    assert x == [0, 100, 200]
    assert y[2] - y[0] == pytest.approx(0.2, abs=1e-5)
    values = sorted(r.value for r in findings().rows if r.quantity == "entropy")
    assert y[0] == pytest.approx((values[5] + values[6]) / 2, abs=1e-5)
    change = one.page.locator("#figure-entropy-entropy-changes [data-figure]").evaluate("box => box.data[0].z.flat()")
    assert change == pytest.approx([0.2] * (LAYERS * HEADS), abs=1e-5)
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_trend_of_one_claim_is_seen_at_once_and_of_all_by_a_list(opened, path):
    one = opened(path)
    shown = one.page.locator("#section-trends [data-figure]:visible")
    assert shown.count() == 1
    shown.scroll_into_view_if_needed()
    expect(shown).to_have_attribute("data-drawn", "light")
    one.page.locator("#section-trends select").select_option("ascent: gain")
    expect(one.page.locator("#figure-trend-of-ascent [data-figure]")).to_have_attribute("data-drawn", "light")
    x, y = one.page.locator("#figure-trend-of-ascent [data-figure]").evaluate(
        "b => { const t = b.data.find(t => t.name === 'value'); return [t.x, t.y]; }"
    )
    assert x == [0, 100, 200]
    assert y == pytest.approx([0.1, 0.2, 0.3])


def test_a_head_is_followed_through_training(opened, path):
    one = opened(path)
    one.page.click("summary:has-text('Heads choose.')")
    one.page.locator("#choice").select_option("1/2")
    (row,) = rows_of(one, "entropy-heads")
    assert row[:2] == ["1", "2"]
    change, ends, p, significant = row[-4:]
    assert float(change) == pytest.approx(0.2)
    low, high = map(float, ends.split(" to "))
    assert [low, high] == pytest.approx([0.2 - 0.02**0.5, 0.2 + 0.02**0.5], abs=2e-3)  # two arms of 0.1, not paired
    assert 0.001 < float(p) < 0.05
    assert significant == "significant"
    figure = one.page.locator("#figure-entropy-entropy-by-head-or-layer [data-figure]")
    figure.scroll_into_view_if_needed()
    expect(figure).to_have_attribute("data-choice", "1/2")
    widths = figure.evaluate("box => box.data.map(t => [t.customdata[0], t.line.width])")
    assert [key for key, width in widths if width > 1] == ["1/2"]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_it_fits_the_screen(opened, path, width, scheme):
    one = opened(path, width=width, scheme=scheme)
    one.page.locator("details.section").evaluate_all("sections => sections.forEach(s => { s.open = true; })")
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width


def test_its_data_is_taken_along(opened, path):
    whole = json.loads(opened(path).taken("nav [data-take=page]")[1])
    assert [run["step"] for run in whole["runs"]] == [0, 100, 200]
    assert whole["runs"][1]["claims"][0]["text"] == "They do."
    assert [d["value"] for d in whole["differences"]["model <b>200"] if d["prediction"] == "ascent"] == [0.2]


def test_models_that_are_built_otherwise_stand_in_the_order_given():
    runs = read_all([findings("small"), findings("large", layers=5, heads=2)])
    assert runs.steps is None
    page = page_of_runs(runs)
    assert page.choices == ()
    assert "2 runs" in page.title
    names = {part.name for section in page.sections for part in section.parts if hasattr(part, "name")}
    assert "entropy runs" in names
    assert "entropy heads" not in names


def test_a_prediction_that_one_run_lacks_is_a_gap():
    whole = findings("whole")
    runs = read_all([whole.select("entropy"), findings("other", shift=0.1)])
    page = page_of_runs(runs)
    (claims,) = page.sections[0].parts
    gaps = {row[0].to: row[2] for row in claims.rows}
    assert gaps["ascent"] is None
    assert gaps["entropy"].label == "supported 0.5"
    assert "1 of 1" in page.verdict.sentence
    groups = {group.chip.label.split()[0]: [link.label for link, _ in group.entries] for group in page.verdict.groups}
    assert groups == {"1": ["entropy"], "4": ["novel", "ascent", "linearity", "whole"]}
    assert dict(_said(page.verdict.groups[1]))["ascent"] == "not tested (whole), refuted (other)"


def test_a_claim_that_is_not_applicable_to_a_run_is_not_counted_as_tested():
    other = findings("other")
    applicable = [c._replace(verdict="supported") if c.prediction == "linearity" else c for c in other.claims]
    other = type(other)(other.facts, other.rows, applicable)
    page = page_of_runs(read_all([findings("one"), other]))
    *_, untested = page.verdict.groups
    assert dict(_said(untested))["linearity"] == "not applicable (one), supported (other)"
    assert page.verdict.sentence.startswith("4 claims were tested in every run"), "all but linearity"


def _said(group):
    return [(link.label, says) for link, says in group.entries]


def test_the_course_of_a_verdict_is_told():
    """Over training in the order of steps; of models by the verdict."""
    turned = [f._replace(verdict="refuted") for f in findings("a").claims]
    names = ("step10", "step20", "step30")
    runs = [findings(name) for name in names]
    runs[0] = type(runs[0])(runs[0].facts, runs[0].rows, [f._replace(model="step10") for f in turned])
    (differ, *_) = page_of_runs(read_all(runs)).verdict.groups
    assert differ.chip.label.startswith("2 "), "entropy and novel; linearity is not applicable to two runs"
    assert dict(_said(differ))["entropy"] == "refuted (step 10), supported (steps 20 to 30)"
    models = [
        findings("b"),
        type(runs[0])({"a": {}}, [r._replace(model="a") for r in runs[1].rows], turned),
        findings("c"),
    ]
    (differ, *_) = page_of_runs(read_all(models)).verdict.groups
    assert dict(_said(differ))["entropy"] == "supported (b, c), refuted (a)"


@pytest.mark.parametrize(
    ("names", "steps", "called"),
    [
        (["net-step1000", "net-step20"], (20.0, 1000.0), ("net-step20", "net-step1000")),
        (["checkpoint-5", "checkpoint-30"], (5.0, 30.0), ("checkpoint-5", "checkpoint-30")),
        (["net@step1000", "net@step20"], (20.0, 1000.0), ("net@step20", "net@step1000")),
        (["net-200", "net-30"], (30.0, 200.0), ("net-30", "net-200")),
        (["gpt-2", "bert-4"], None, ("gpt-2", "bert-4")),
        (["step2", "final"], None, ("step2", "final")),
        (["same", "same"], None, ("same (1)", "same (2)")),
    ],
)
def test_steps_are_read_from_names(names, steps, called):
    runs = read_all([findings(name) for name in names])
    assert runs.steps == steps
    assert runs.names == called
