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


def test_a_machine_without_a_browser_is_a_fault(site, monkeypatch):
    check = module("browser_check", monkeypatch)
    monkeypatch.setattr(check, "CHROMIUM", ("no-such-browser",))
    (fault,) = check.faults(site)
    assert "no Chromium" in fault
