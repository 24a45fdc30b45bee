"""The checks of `make docs` report planted faults, and nothing on a page without one."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "site"
PAGE = "<!doctype html><html><head><title>t</title><link rel='icon' href='data:,'></head><body>{}</body></html>"

FORMULA = "<math display='block' style='overflow: auto; max-width: 100%'>{}</math>"
NARROW = "<style>td { width: 1px; word-break: break-all; }</style>"  # a column of one letter


def module(name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    loaded = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return loaded


@pytest.fixture
def site(tmp_path):
    (tmp_path / "other.html").write_text(PAGE.format("<h1 id='here'>x</h1>"))
    return tmp_path


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<a href='other.html#here'>x</a><a href='https://example.org'>x</a>", None),
        ("<a href='none.html'>x</a>", "no file none.html"),
        ("<a href='other.html#there'>x</a>", "no anchor other.html#there"),
        ("<a href='../outside.html'>x</a>", "no file ../outside.html"),
        ("<script src='https://example.org/x.js'></script>", "<script> loads https://example.org/x.js"),
        ("<img src='//example.org/x.png'>", "<img> loads //example.org/x.png"),
    ],
)
def test_links_and_resources(body, fault, site, monkeypatch):
    (site / "page.html").write_text(PAGE.format(body))
    assert module("link_check", monkeypatch).faults(site) == ([] if fault is None else [f"page.html: {fault}"])


def test_a_style_sheet_of_another_host(site, monkeypatch):
    (site / "style.css").write_text("@import 'https://example.org/font.css';")
    (fault,) = module("link_check", monkeypatch).faults(site)
    assert "example.org" in fault


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        ("<p>text</p>", {}),
        ("<script>console.error('broken')</script>", {"desktop": "broken", "phone": "broken"}),
        ("<script>undefined_name()</script>", {"desktop": "undefined_name", "phone": "undefined_name"}),
        ("<div style='width: 800px'>wide</div>", {"phone": "pixels wide"}),
        (FORMULA.format("<mi>wide</mi>" * 8), {}),
        (FORMULA.format("<mi>wide</mi>" * 16), {"phone": "is cut"}),
        (f"<table><td>{NARROW}<code>two words</code></table>", {}),
        (f"<table><td>{NARROW}<code>one<wbr>_name</code></table>", {}),
        (f"<table><td>{NARROW}<code>one_name</code></table>", {"desktop": "one_name", "phone": "one_name"}),
        ("<p>the product <x, y></p>", {"desktop": "<x,", "phone": "<x,"}),
        ("<p>the product <a, b></p>", {"desktop": "<a,", "phone": "<a,"}),
        ("<article>G<em>(u), and G</em>(v)</article>", {"desktop": "misread: (u)", "phone": "misread: (u)"}),
        ("<article><code>&amp;lt;x, y></code></article>", {"desktop": "misread: &lt;x", "phone": "misread: &lt;x"}),
        ("<article><em>word</em> <code>a &lt; b && c</code></article>", {}),
    ],
)
def test_pages_in_a_browser(body, faults, site, monkeypatch):
    check = module("browser_check", monkeypatch)
    if not any(map(shutil.which, check.CHROMIUM)):
        pytest.skip("no chromium on this machine: apt-get install chromium")
    (site / "page.html").write_text(PAGE.format(body))
    lines = check.faults(site)
    assert len(lines) == len(faults)
    for line, (name, words) in zip(lines, faults.items(), strict=True):
        assert line.startswith(f"page.html ({name}): ")
        assert words in line


def test_the_list_of_pages_for_language_models(site, monkeypatch):
    (site / "llms.txt").write_text("- [here](other.html): <x, y> (in brackets).\n- [there](none.html): x.\n")
    assert module("link_check", monkeypatch).faults(site) == ["llms.txt: no file none.html"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# Title\n\n[The `probe`](probe.md) tests. It ends.", "The probe tests."),
        ("# Title\n\n**Question and answer.** Does it\nlearn? No. Never.", "Does it learn? No."),
        ("# Title\n\n```python\nx\n```\n\n- item\n\n`f` returns &lt;x, y>. Then.", "f returns <x, y>."),
        ("# Title\n\n::: gradlogz.module", "Generated from the docstrings."),
    ],
)
def test_the_first_sentence_of_a_page(text, sentence, monkeypatch):
    assert module("assembly", monkeypatch).first_sentence(text) == sentence


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("<x, y> and <a x - b, c> >= 0", "&lt;x, y> and &lt;a x - b, c> >= 0"),
        ("`<x, y>` is code", "`<x, y>` is code"),
        ("```\n<x, y>\n```\n", "```\n<x, y>\n```\n"),
        (
            '<figure class="wide"><img src="a.svg" alt="a"></figure>',
            '<figure class="wide"><img src="a.svg" alt="a"></figure>',
        ),
        ("a <b> c", "a <b> c"),
    ],
)
def test_a_product_in_the_text_is_no_tag(text, page, monkeypatch):
    assert module("assembly", monkeypatch).typeset(text) == page


@pytest.mark.parametrize(
    ("cell", "page"),
    [
        ("(1, 8, 64) in 8 x 64", "(1,\xa08,\xa064) in 8\xa0x\xa064"),
        ("0.98 ± 0.01 [0.97, 0.99]", "0.98\xa0±\xa00.01 [0.97, 0.99]"),
        ("`--out` `f(8 x 64)`", '<code class="name">--out</code> <code>f(8 x 64)</code>'),
        ("a `norm \\| of x` b", "a <code>norm &#124; of x</code> b"),
        ("`" + "part/" * 5 + "a`", "<code>" + "part/<wbr>" * 5 + "a</code>"),
        ("laws/test_a_name_of_many_words", "laws/<wbr>test_<wbr>a_<wbr>name_<wbr>of_<wbr>many_<wbr>words"),
        ("`a_*`", '<code class="name">a&#95;&#42;</code>'),
        ("word " * 13, '<span class="prose">' + " ".join(["word"] * 13) + "</span>"),
        ("[word](" + "long/" * 20 + ")", "[word](" + "long/" * 20 + ")"),
    ],
)
def test_cells_of_tables_break_between_words(cell, page, monkeypatch):
    assert module("assembly", monkeypatch).with_breaks(f"| {cell} | end |") == f"| {page} | end |"


WORDS = "word " * 70


@pytest.mark.parametrize(
    ("table", "page"),
    [
        ("| a | b | c |\n|---|---|---|\n| `x` | y | z |\n", None),
        (f"| a | b |\n|---|---|\n| x | {WORDS}|\n", None),
        (f"```\n| a | b | c |\n|---|---|---|\n| x | y | {WORDS}|\n```\n", None),
        (
            f"| a | b | c |\n|---|---|---|\n| `x` | y \\| z | {WORDS}|\n| v | – |  |\n",
            f"**`x`**\n\n- *b*: y | z\n- *c*: {WORDS.strip()}\n\n**v**\n\n\n",
        ),
    ],
)
def test_a_table_with_a_paragraph_becomes_a_list(table, page, monkeypatch):
    assert module("assembly", monkeypatch).with_lists(f"Text.\n\n{table}") == f"Text.\n\n{page or table}"


@pytest.mark.parametrize(
    "text", ["a ![b](pictures/c.svg)", "```\n![b](pictures/c.svg)\n```", "![b](cell.svg){ .figure }"]
)
def test_a_picture_in_a_line_has_no_caption(text, monkeypatch):
    assert module("assembly", monkeypatch).with_captions(text) == text


def test_the_text_of_a_picture_is_its_caption(monkeypatch):
    page = module("assembly", monkeypatch).with_captions("Text.\n\n![b, c](../pictures/d.svg)\n\nText.")
    assert "[![b, c](../pictures/d.svg)](../pictures/d.svg)" in page
    assert "\n\nb, c\n{ .caption }\n\n</figure>" in page


def test_a_machine_without_a_browser_is_a_fault(site, monkeypatch):
    check = module("browser_check", monkeypatch)
    monkeypatch.setattr(check, "CHROMIUM", ("no-such-browser",))
    (fault,) = check.faults(site)
    assert "no Chromium" in fault
