"""A page, opened by a browser: drawn, quiet, offline, usable by hand, keyboard and thumb, in light and in dark."""

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
from playwright.sync_api import expect

from gradlogz._output_files import write
from gradlogz.page import Page, Section, Text, VerdictBanner, render
from support.sample_page import HARM, TIMES, sample

FIGURES = 7
WORDS = "wörds & <b>marks</b>"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "sample.html", render(sample(WORDS)))


def test_it_is_drawn_in_silence_and_asks_for_nothing(opened, path):
    one = opened(path)
    one.page.click("summary:has-text('Folded')")
    boxes = one.page.locator("[data-figure]")
    assert boxes.count() == FIGURES
    for i in range(FIGURES):
        boxes.nth(i).scroll_into_view_if_needed()
        expect(boxes.nth(i)).to_have_attribute("data-drawn", "light")
    marks = "box => box.querySelectorAll('.points path, .lines path, .fills path, .heatmaplayer image').length"
    assert all(boxes.nth(i).evaluate(marks) > 0 for i in range(FIGURES)), "every figure shows its marks"
    assert one.complaints == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len(path.read_bytes()) < 8e6


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_in_light_and_dark(opened, path, width, scheme):
    one = opened(path, width=width, scheme=scheme)
    one.page.click("summary:has-text('Folded')")
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    shades = "getComputedStyle(document.body)"
    paper = one.page.evaluate(f"{shades}.backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)")
    ink = one.page.evaluate(f"{shades}.color.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)")
    assert (paper > ink + 400) if scheme == "light" else (ink > paper + 400)


def test_a_figure_is_drawn_when_it_is_near(opened, path):
    one = opened(path, width=390)
    last = one.page.locator("#figure-counts [data-figure]")
    assert last.get_attribute("data-drawn") is None
    last.scroll_into_view_if_needed()
    expect(last).to_have_attribute("data-drawn", "light")


def test_the_theme_is_changed_by_hand_and_figures_follow(opened, path):
    one = opened(path)
    line = "#figure-curves .js-line"
    one.page.locator("#figure-curves").scroll_into_view_if_needed()
    before = one.page.locator(line).first.evaluate("path => getComputedStyle(path).stroke")
    one.page.click("#theme")
    one.page.wait_for_selector("#figure-curves [data-drawn=dark]")
    after = one.page.locator(line).first.evaluate("path => getComputedStyle(path).stroke")
    assert one.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert before != after


def test_a_cloud_plays_and_is_scrubbed_and_turned(opened, path):
    one = opened(path)
    figure = one.page.locator("#figure-space")
    assert figure.locator("output").inner_text() == str(TIMES[-1]), "at first it shows the end"
    first = figure.locator(".point").first
    end = first.get_attribute("transform")
    figure.locator(".time").fill("0")
    assert figure.locator("output").inner_text() == "0"
    start = first.get_attribute("transform")
    assert start != end
    figure.locator(".turn").fill("200")
    assert first.get_attribute("transform") != start
    figure.locator(".play").click()
    assert figure.locator(".play").get_attribute("aria-pressed") == "true"
    expect(figure.locator("output")).to_have_text(str(TIMES[-1]))
    one.page.wait_for_selector("#figure-space .play[aria-pressed=false]")


def test_tables_sort_both_ways_and_what_is_missing_comes_last(opened, path):
    one = opened(path)
    one.page.click("summary:has-text('Folded')")

    def column(index):
        return one.page.locator(f"#table-seeds td:nth-child({index})").all_inner_texts()

    head = one.page.locator("#table-seeds th").nth(1)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(2) == ["9", "10", "–"], "as numbers, not as words"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column(2) == ["10", "9", "–"]
    one.page.locator("#table-seeds th button").first.click()
    assert column(1)[0].startswith("b ")


def test_ellipses_are_closed_and_a_unit_is_as_long_on_both_axes(opened, path):
    one = opened(path)
    box = one.page.locator("#figure-tracks [data-figure]")
    box.scroll_into_view_if_needed()
    expect(box).to_have_attribute("data-drawn", "light")
    x, y = box.evaluate("b => { const t = b.data.find(t => t.fill === 'toself'); return [t.x, t.y]; }")
    curves = [[]]
    for point in zip(x, y, strict=True):
        if point == (None, None):
            curves.append([])
        else:
            curves[-1].append(point)
    assert [len(curve) for curve in curves] == [25, 25, 25]
    assert all(curve[0] == curve[-1] for curve in curves)
    length = "b => { const a = b._fullLayout.NAME; return a._length / Math.abs(a.range[1] - a.range[0]); }"
    across, up = (box.evaluate(length.replace("NAME", name)) for name in ("xaxis", "yaxis"))
    assert across == pytest.approx(up, rel=1e-6)


def test_sections_fold(opened, path):
    one = opened(path)
    folded = one.page.locator("details:has(summary:has-text('Folded'))")
    assert not folded.evaluate("d => d.open")
    one.page.click("#fold")
    assert one.page.locator("details[open]").count() == 0
    one.page.click("#fold")
    assert one.page.locator("details:not([open])").count() == 0


def test_everything_is_reached_by_keys_alone(opened, path):
    one = opened(path)
    press, focused = one.page.keyboard.press, "document.activeElement"
    seen = []
    for _ in range(60):
        press("Tab")
        label = f"{focused}.getAttribute('aria-label') || {focused}.textContent.trim()"
        seen.append(one.page.evaluate(label)[:30])
        if seen[-1] == "Folded":
            press("Enter")
            assert one.page.locator("details:has(summary:has-text('Folded'))").evaluate("d => d.open")
        if seen[-1] == "Step of the simulation":
            press("Home")
            assert one.page.evaluate(f"{focused}.value") == "0"
            press("ArrowRight")
            assert one.page.evaluate(f"{focused}.value") == "1"
        if seen[-1] == "name":
            press("Enter")
            assert one.page.locator("#table-seeds th").first.get_attribute("aria-sort") == "ascending"
    order = ["Skip", "Data", "Fold all", "Light or dark", "Clouds", "SVG", "Play", "Rotation", "Curves", "Folded",
             "name", "Methods"]  # fmt: skip
    places = [next(i for i, label in enumerate(seen) if label.startswith(word)) for word in order]
    assert places == sorted(places)


def test_tables_and_data_are_taken_along(opened, path):
    one = opened(path)
    one.page.click("summary:has-text('Folded')")
    file, text = one.taken("#table-seeds [data-as=csv]")
    assert file.endswith("-seeds.csv")
    table = list(csv.reader(io.StringIO(text)))
    assert table[0] == ["name", "size [1]", "verdict"]
    assert table[2] == ['quoted, "name"', "9", "departs"]
    assert len(table) == 4
    objects = json.loads(one.taken("#table-seeds [data-as=json]")[1])
    assert objects[1] == {"name": 'quoted, "name"', "size [1]": 9, "verdict": "departs"}
    whole = json.loads(one.taken("nav [data-take=page]")[1])
    assert whole == {"harm": WORDS, "nothing": None, "numbers": [1, 2.5]}


@pytest.mark.parametrize("third", [0, 1, 2])
def test_every_figure_is_taken_along_as_data_and_as_svg(opened, path, third):
    """In three parts: chromium gives a page no more than ten files."""
    one = opened(path)
    one.page.click("summary:has-text('Folded')")
    names = one.page.locator("[data-figure]").evaluate_all("boxes => boxes.map(box => box.dataset.figure)")
    assert len(names) == FIGURES
    for name in names[third::3]:
        picture = one.taken(f"[data-of='{name}'][data-as=svg]")[1]
        root = ElementTree.fromstring(picture)
        assert root.tag.endswith("svg")
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 3
        rows = list(csv.reader(io.StringIO(one.taken(f"[data-of='{name}'][data-as=csv]")[1])))
        assert len({len(row) for row in rows}) == 1
        assert len(rows) > 5
        if name == "space":
            assert rows[0] == ["step", "token", "cluster", "x1", "x2", "x3"]
            assert len(rows) == 1 + 40 * len(TIMES)
        assert json.loads(one.taken(f"[data-of='{name}'][data-as=json]")[1])["title"]
    assert one.complaints == []


def test_text_of_users_is_text(opened, tmp_path):
    one = opened(write(tmp_path / "harm.html", render(sample(HARM))))
    one.page.click("summary:has-text('Folded')")
    one.page.locator("#figure-late").scroll_into_view_if_needed()
    one.page.wait_for_selector("#figure-late .main-svg")
    one.page.locator("#figure-curves .points path").first.hover(force=True)
    assert one.page.evaluate("window.harmed") is None
    assert one.page.locator("img").count() == 0
    assert one.page.locator("script").count() == 3
    assert HARM in one.page.locator("h1").inner_text()
    label = one.page.locator("#figure-curves .xtitle").text_content()  # in lines, since it is long
    assert "".join(HARM.split()) in "".join(label.split()), "also where plotly writes it"
    assert json.loads(one.taken("nav [data-take=page]")[1])["harm"] == HARM
    assert one.complaints == []


def test_formulas_scroll_in_their_box_and_numbers_stay_with_their_units(opened, tmp_path):
    formulas = "a         = b + c" + " " * 80 + "the sum\nproduct   = b c"
    text = Text(("A share of 95 % lies in 87.1–95.8.", formulas), "Method")
    page = Page("lines", "lines", "", VerdictBanner(""), (Section("one", (text,)),))
    one = opened(write(tmp_path / "lines.html", render(page)), width=390)
    one.page.click("summary:has-text('Method')")
    box = one.page.locator("p.lines")
    assert box.evaluate("p => p.scrollWidth > p.clientWidth")
    assert box.evaluate("p => Math.round(p.clientHeight / parseFloat(getComputedStyle(p).lineHeight))") == 2
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "95\u00a0% lies in 87.1\u2060–\u206095.8" in one.page.locator("details.inner p").first.text_content()
