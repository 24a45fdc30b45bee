"""The report of a run, opened by a browser: verdicts first, a map that leads everywhere, a head that all speak of."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from playwright.sync_api import expect

from gradlogz import report
from gradlogz._output_files import write
from gradlogz.probing.runs.records import VERDICTS
from support.invented_findings import HEADS, LAYERS, findings
from support.sample_page import HARM


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("report") / "report.html", report(findings()))


def unfolded(one):
    one.page.locator("details.section").evaluate_all("sections => sections.forEach(s => { s.open = true; })")
    return one


def rows_of(one, table):
    """The cells of what a table shows, line by line."""
    return one.page.locator(f"#table-{table} tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


def test_the_first_screen_says_which_claims_hold(opened, path):
    one = opened(path)
    seen = one.page.locator(".head .group").all_inner_texts()
    assert [" ".join(text.split()) for text in seen] == [
        "1 supported entropy Heads choose.",
        "1 refuted ascent Layers climb.",
        "2 inconclusive novel News. whole",
        "1 not applicable linearity Layers are affine.",
    ]
    assert all(box["y"] + box["height"] < 900 for box in map(_box, one.page.locator(".head .group").all()))
    counts = re.findall(r"(\d+) (\w+)", one.page.locator(".head .sentence").inner_text())
    assert [("1", "supported"), ("1", "refuted"), ("2", "inconclusive")] == [c for c in counts if c[1] in VERDICTS]
    table = rows_of(one, "claims")
    assert [row[2] for row in table] == ["supported", "refuted", "inconclusive", "inconclusive", "not applicable"]
    assert table[0][:3] == ["entropy", "prediction", "supported"]
    assert table[0][4:7] == ["0.5", "0.4 to 0.6", "0.9"]
    assert re.findall(r"\d+", table[0][7]) == ["4", "4", "12"], "support, refute, tested"


def _box(element):
    return element.bounding_box()


def test_a_name_on_the_first_screen_leads_to_its_section(opened, path):
    one = opened(path)
    one.page.click(".group a >> text=ascent")
    assert one.page.locator("#section-ascent").evaluate("d => d.open")


def test_everything_is_drawn_in_silence_and_asks_for_nothing(opened, path):
    one = unfolded(opened(path))
    figures = one.page.locator("[data-figure]:visible")
    assert figures.count() == 6, "the map, two for claims about heads, one for those about layers"
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        expect(figures.nth(i)).to_have_attribute("data-drawn", "light")
        labels = figures.nth(i).locator(".xtitle, .ytitle").all_text_contents()
        assert all("[" in label for label in labels if label), "every axis has a unit"
    one.page.locator("#section-entropy .views select").select_option("max logit")
    one.page.locator("#figure-entropy-max-logit-by-head").scroll_into_view_if_needed()
    expect(one.page.locator("#figure-entropy-max-logit-by-head [data-figure]")).to_have_attribute("data-drawn", "light")
    expect(one.page.locator("#figure-entropy-entropy-by-head")).to_be_hidden()
    assert "not declared in this run" in one.page.locator("#section-novel .facts").inner_text()
    assert "H / log n" in one.page.locator("#section-entropy .facts").inner_text()
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_head_that_is_chosen_is_what_every_section_speaks_of(opened, path):
    one = unfolded(opened(path))
    one.page.locator("#figure-map-of-claims").scroll_into_view_if_needed()
    expect(one.page.locator("#figure-map-of-claims [data-figure]")).to_have_attribute("data-drawn", "light")
    box = one.page.locator("#figure-map-of-claims .nsewdrag").bounding_box()  # the first layer is at the bottom
    place = (box["x"] + box["width"] * 2.5 / HEADS, box["y"] + box["height"] * (LAYERS - 1.5) / LAYERS)
    one.page.mouse.move(*place)
    said = one.page.locator("#figure-map-of-claims .hovertext")
    expect(said).to_contain_text("layer 1, head 2")
    row = next(
        r
        for r in findings().rows
        if r.quantity == "entropy" and r.layer == "encoder.layer.1.attention.self" and r.head == 2
    )
    expect(said).to_contain_text(f"entropy: {row.verdict}, {row.value:.3g} ")
    for ends in (f"{row.low:.3g} to {row.high:.3g}", "null 0.9", "0.85 to 0.95"):
        expect(said).to_contain_text(ends)
    one.page.mouse.click(*place)
    expect(one.page.locator("#choice")).to_have_value("1/2")
    assert {(row[0], row[1]) for row in rows_of(one, "places")} == {("1", "–"), ("1", "2"), ("model", "–")}
    for table in ("entropy", "novel"):
        assert [row[:2] for row in rows_of(one, table)] == [["1", "2"]]
    assert [row[0] for row in rows_of(one, "ascent")] == ["1"], "of layers, the layer of the head"
    assert [row[2] for row in rows_of(one, "tokens")] == ["2"]
    for name in ("map-of-claims", "entropy-entropy-by-head", "novel-size-by-head"):
        one.page.locator(f"#figure-{name}").scroll_into_view_if_needed()
        expect(one.page.locator(f"#figure-{name} .shapelayer path")).to_have_count(2)  # a frame, and its edge
    chosen = "box => box.data.flatMap(t => (t.selectedpoints || []).map(i => t.customdata[i]))"
    for name, keys in (("entropy-entropy-by-layer", {"1/2"}), ("ascent-gain-by-layer", {"1"})):
        figure = one.page.locator(f"#figure-{name} [data-figure]")
        figure.scroll_into_view_if_needed()
        expect(figure).to_have_attribute("data-choice", "1/2")
        assert set(figure.evaluate(chosen)) == keys
    one.page.locator("#choice").select_option("0/3")
    assert rows_of(one, "tokens") == [["No rows for layer 0, head 3."]]
    one.page.locator(".choice button").click()
    expect(one.page.locator("#table-tokens tbody tr")).to_have_count(2)
    assert one.complaints == []


def test_long_tables_begin_short_and_sort_as_a_whole(opened, path):
    one = unfolded(opened(path))
    assert len(rows_of(one, "rows")) == 12
    total = len(findings().rows)
    assert one.page.locator("#table-rows .more span").inner_text() == f"12 of {total} rows."
    one.page.locator("#table-rows th button", has_text="value").click()
    values = [row.value for row in findings().rows]
    assert float(rows_of(one, "rows")[0][5]) == pytest.approx(min(values), rel=1e-3)
    one.page.locator("#table-rows .more button").click()
    assert len(rows_of(one, "rows")) == total
    assert [row[5] for row in rows_of(one, "rows")[-LAYERS:]] == ["–"] * LAYERS, "what is missing comes last"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "dark")])
def test_it_fits_the_screen_in_light_and_dark(opened, path, width, scheme):
    one = unfolded(opened(path, width=width, scheme=scheme))
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    figure = one.page.locator("#figure-entropy-entropy-by-layer [data-figure]")
    figure.scroll_into_view_if_needed()
    expect(figure).to_have_attribute("data-drawn", scheme)
    assert figure.locator(".main-svg").first.bounding_box()["width"] <= width


def test_claims_lead_to_their_sections_and_heads_are_chosen_by_keys_alone(opened, path):
    one = opened(path)
    press, focused = one.page.keyboard.press, "document.activeElement"
    reached = []
    for _ in range(60):
        press("Tab")
        reached.append(one.page.evaluate(f"{focused}.id || {focused}.textContent.trim()"))
        if reached[-1] == "choice":
            press("ArrowDown")
            press("ArrowDown")
            assert one.page.locator("#choice").input_value() == "0/0"
        if reached[-1] == "entropy" and "choice" in reached:  # of the table, not of the banner
            press("Enter")
            break
    assert "choice" in reached
    assert one.page.locator("#section-entropy").evaluate("d => d.open")
    assert [row[:2] for row in rows_of(one, "entropy")] == [["0", "0"]]


def test_the_data_of_a_figure_say_of_which_head_they_are(opened, path):
    one = unfolded(opened(path))
    for figure in ("by-head", "by-layer"):
        text = one.taken(f"[data-of=entropy-entropy-{figure}][data-as=csv]")[1]
        table = [row for row in csv.DictReader(io.StringIO(text)) if row["name"] != "null"]
        expected = {(r.layer[14], r.head): r for r in findings().rows if r.quantity == "entropy"}
        assert len(table) == len(expected)
        for row in table:
            _, layer, _, head = row["place"].replace(",", "").split()
            found = expected[layer, int(head)]
            value, ends = (row["value"], ()) if figure == "by-head" else (row["y"], (row["low"], row["high"]))
            assert float(value) == pytest.approx(found.value, rel=1e-5)
            assert [float(end) for end in ends] == pytest.approx([found.low, found.high][: len(ends)], abs=1e-3)


def test_all_data_is_taken_along(opened, path):
    one = unfolded(opened(path))
    expected = findings()
    table = list(csv.DictReader(io.StringIO(one.taken("#table-rows [data-as=csv]")[1])))
    assert len(table) == len(expected.rows)
    first = table[0]
    assert first["claim"] == expected.declarations[expected.rows[0].prediction].title
    assert [first[name] for name in ("layer", "head", "quantity")] == [
        str(getattr(expected.rows[0], name)) for name in ("layer", "head", "quantity")
    ]
    assert float(first["null high"]) == expected.rows[0].null_high
    file, text = one.taken("nav [data-take=page]")
    whole = json.loads(text)
    assert file == "gradlogz-planted.json"
    assert len(whole["rows"]["rows"]) == len(expected.rows)
    assert whole["claims"][1]["text"] == "They do not. A note."
    assert whole["tokens"][0]["text"] == "about a [token] of it"
    for name in ("map-of-claims", "entropy-entropy-by-layer"):
        drawing = ElementTree.fromstring(one.taken(f"[data-of='{name}'][data-as=svg]")[1])
        assert drawing.tag.endswith("svg")


def test_names_and_tokens_are_text(opened, tmp_path):
    one = unfolded(opened(write(tmp_path / "harm.html", report(findings(f"model{HARM}", words=HARM)))))
    one.page.locator("#figure-entropy-entropy-by-head").scroll_into_view_if_needed()
    assert one.page.evaluate("window.harmed") is None
    assert one.page.locator("img").count() == 0
    assert one.page.locator("script").count() == 3
    assert one.page.locator("h1").inner_text() == f"model{HARM}"
    assert HARM in one.page.locator("#table-tokens td").nth(4).inner_text()
    one.page.locator("#choice").select_option("1/2")
    assert HARM in one.page.locator("#table-tokens td").nth(4).inner_text(), "also where the script writes it"
    assert one.page.evaluate("window.harmed") is None
    assert one.complaints == []
